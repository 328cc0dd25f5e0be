"""Floats of 8 bits: loads and stores, and products of them, as compiled, run thread by thread: wgmma, mma.sync, CUDA cores."""

from __future__ import annotations

import struct

import numpy as np
import pytest
from onnx import TensorProto

from tccompile.arch import ARCHS
from tccompile.emit.compile import compile_code, resources
from tccompile.ir.expr import call, identity_view, load
from tccompile.ir.ops import Conv, Gemm
from tccompile.ir.program import Program
from tccompile.ir.reference import compute
from tccompile.ir.storage import elements, from_storage, to_storage
from tccompile.ir.types import FLOAT8, DType
from tccompile.kernels import KERNELS
from tccompile.kernels.codegen import unrounded
from tccompile.kernels.conv_halo import ConvHalo
from tccompile.kernels.gemm_mma import TILES, ConvMma, GemmMma
from tccompile.kernels.gemm_simt import ConvSimt, GemmSimt
from tccompile.kernels.gemm_sm90 import HOPPER
from tccompile.kernels.gemm_sm90_tile import MOST_SUMS
from tccompile.kernels.pointwise import PointwiseKernel
from tccompile.kernels.spec import Config, Kernel
from tccompile.lower.narrow import rounded
from tests.gpu.cases import Builder, of_float8, pointwise
from tests.kernels import machine
from tests.kernels.memory import Memory
from tests.kernels.support import on_blocks, on_two_blocks
from tests.networks import relative_error
from tests.tiers import thorough, usually

F16, F32, E4M3, E5M2 = DType.F16, DType.F32, *FLOAT8


def converted(x: np.ndarray, source: DType, to: DType, arch: str, columns: int) -> np.ndarray:
    """What is stored as one type, in another one, negated by a kernel: rows of vectors, or of elements by themselves."""

    def make(b: Builder):
        b.values("x", np.zeros((x.size // columns, columns)), source, pad=1)
        b.result((x.size // columns, columns), to)
        return call("neg", load(0)), (identity_view("x", 2),)

    program, kernel = pointwise("float8", make), PointwiseKernel()
    (op,) = program.ops
    config = next(kernel.configs(op, program, ARCHS[arch]))
    given = {"x": x.reshape(-1, columns)}
    memory = machine.run(kernel.work(op, program, config, ARCHS[arch]), program, given, "y", ARCHS[arch])
    memory.check_written()
    y = program.tensors["y"]
    return elements(memory.buffers[memory.base["y"] // (1 << 33)], y).ravel()


@pytest.mark.parametrize("columns", [8, 5])
@pytest.mark.parametrize("arch", usually(["sm_61", "sm_89"], "sm_89"))
@pytest.mark.parametrize("dtype", FLOAT8)
def test_conversions_of_every_number(dtype: DType, arch: str, columns: int) -> None:
    """By instructions for pairs of them, and by arithmetic before there were such."""
    every = np.resize(np.arange(256, dtype=np.uint8), 280)
    numbers = from_storage(every, dtype)
    np.testing.assert_array_equal(converted(every, dtype, F32, arch, columns), -numbers)
    finite = np.unique(numbers[np.isfinite(numbers)])
    halfway = (finite[1:] + finite[:-1]) / 2
    beside = [np.nextafter(halfway, np.float32(end)) for end in (-np.inf, np.inf)]
    x = np.concatenate([finite, halfway, *beside, [1e30, -1e9, 1e-30, np.inf, -np.inf, np.nan, 0.0, -0.0]]).astype(np.float32)
    x = np.resize(x, -(-x.size // 40) * 40)
    np.testing.assert_array_equal(converted(x, F32, dtype, arch, columns), to_storage(-x, dtype))


@pytest.mark.parametrize(("dtype", "elem"), [(E4M3, TensorProto.FLOAT8E4M3FN), (E5M2, TensorProto.FLOAT8E5M2)])
def test_what_storing_rounds_is_not_rounded_before(dtype: DType, elem: int) -> None:
    """In what a model says of it, kernels leave out the same rounding, and no other."""
    value = call("relu", load(0))
    assert unrounded(rounded(value, elem, saturate=True), dtype) == value
    for other in (rounded(value, elem, saturate=False), rounded(value, TensorProto.FLOAT8E4M3FNUZ, saturate=True), value):
        assert unrounded(other, dtype) == other
    for stored in (F16, *(t for t in FLOAT8 if t is not dtype)):
        assert unrounded(rounded(value, elem, saturate=True), stored).fn == "on_grid"


# --- Products ----------------------------------------------------------------------------------------------------------

ROUNDING = {F32: 3e-4, F16: 5e-4, E4M3: 1e-2, E5M2: 2e-2}
"""What results may be off: sums of 14 digits, and what they are rounded to, a few of them to another number of 8 bits."""

GEMMS = (GemmMma(), GemmSimt(), HOPPER[1])
CONVS = (ConvMma(), ConvSimt(), HOPPER[0])
MMA, SIMT, WGMMA = range(3)


def result(program: Program, family: int, arch: str, config: Config | None = None) -> Memory:
    """What a kernel's PTX makes of a product; all of its padding is written, and nothing else."""
    (op,), generation = program.ops, ARCHS[arch]
    kernel: Kernel = (GEMMS if isinstance(op, Gemm) else CONVS)[family]
    assert kernel.supports(op, program, generation) is None
    config = config or min(kernel.configs(op, program, generation), key=lambda c: kernel.cost(op, program, c, generation))
    run = on_two_blocks if family == WGMMA else machine.run
    given = {name: recipe.values for name, recipe in program.constants.items()}  # type: ignore[union-attr]
    memory = run(kernel.work(op, program, config, generation), program, given, op.y, generation)
    memory.check_written(family != SIMT)
    return memory


def check(program: Program, family: int, arch: str, config: Config | None = None) -> None:
    """The result is near what the CPU engine stores."""
    (op,) = program.ops
    given = {name: recipe.values for name, recipe in program.constants.items()}  # type: ignore[union-attr]
    y = program.tensors[op.y].dtype
    expected = from_storage(to_storage(compute(op, program, given), y), y)
    assert relative_error(result(program, family, arch, config).result(), expected) < ROUNDING[y]


KINDS = [(E4M3, E4M3, F16), (E4M3, E5M2, F32), (E5M2, E4M3, E4M3), (E5M2, E5M2, E5M2), (E4M3, E4M3, E4M3)]
FAMILIES = [(MMA, "sm_75"), (MMA, "sm_80"), (MMA, "sm_89"), (MMA, "sm_90a"), (SIMT, "sm_61"), (WGMMA, "sm_90a")]
SMALL: dict[int, Config] = {
    MMA: {"bm": 32, "bn": 64, "bk": 128, "splits": 1},
    SIMT: {"bm": 32, "bn": 32, "splits": 1},
    WGMMA: {"bm": 64, "bn": 32, "split": 1},
}
OWN = [(MMA, "sm_89"), (WGMMA, "sm_90a")]
"""Those that multiply floats of 8 bits as they are; the others have fewer of the cases."""
EACH = [(*of, kinds) for kinds in KINDS for of in (FAMILIES if kinds in (KINDS[0], KINDS[2]) else OWN)]


@pytest.mark.parametrize(("family", "arch", "kinds"), usually(EACH, 6, 17))
def test_every_mix_and_every_result(family: int, arch: str, kinds: tuple[DType, DType, DType]) -> None:
    check(of_float8("mix", (37, 200), 45, kinds=kinds, fn="relu"), family, arch, SMALL[family])


@pytest.mark.parametrize(("arch", "family"), usually([("sm_89", MMA), ("sm_90a", WGMMA), ("sm_80", MMA)], 1))
@pytest.mark.parametrize("depth", [4096, pytest.param(65536, marks=thorough)])
def test_long_sums_keep_their_digits(arch: str, family: int, depth: int) -> None:
    """Tensor Cores' own have 14, and cut the rest off: in sums of one sign what is lost adds up."""
    program = of_float8("long", (8, depth), 8, kinds=(E4M3, E4M3, F32), bias=False, sign=False)
    given = {name: recipe.values.astype(np.float64) for name, recipe in program.constants.items()}  # type: ignore[union-attr]
    exact = given["x"] @ given["w"].T * given["scale"]
    rough = np.zeros((8, 8), np.float32)
    for k in range(0, depth, 32):
        rough = machine.cut(rough + given["x"][:, k : k + 32] @ given["w"][:, k : k + 32].T)
    assert relative_error(rough * given["scale"], exact) > 2e-3
    config = {"bm": 16, "bn": 64, "bk": 128, "splits": 1} if family == MMA else {"bm": 64, "bn": 16, "split": 1}
    assert relative_error(result(program, family, arch, config).result(), exact) < (1e-3 if arch != "sm_80" else 1e-5)


CONVOLUTIONS = {
    "3x3": ((1, 16, 7, 6), 24, (3, 3), (E4M3, E4M3, E4M3), {}),
    "1x1 with strides": ((2, 64, 9, 8), 40, (1, 1), (E4M3, E4M3, F16), {"stride": 2}),
    "5x3 mixed": ((1, 37, 9, 7), 16, (5, 3), (E5M2, E4M3, F32), {"stride": 2}),
    "residual": ((2, 20, 7, 6), 40, (1, 1), (E4M3, E4M3, E4M3), {"residual": E4M3}),
    "residual of halves": ((2, 20, 7, 6), 40, (1, 1), (E4M3, E4M3, F16), {"residual": F16}),
}
EVERY = [(case, *of) for case in CONVOLUTIONS for of in (FAMILIES if case in ("3x3", "residual") else OWN)]


@pytest.mark.parametrize(("case", "family", "arch"), usually(EVERY, 8))
def test_convolutions(case: str, family: int, arch: str) -> None:
    shape, outputs, window, kinds, how = CONVOLUTIONS[case]
    check(of_float8(case, shape, outputs, window, kinds, **how), family, arch, SMALL[family])


PATCHES = {
    "64 channels": ((1, 64, 9, 10), 40, (3, 3), (E4M3, E4M3, E4M3), {"fn": "relu"}, (8, 8, 16)),
    "a residual, four products": ((1, 24, 17, 17), 16, (3, 3), (E4M3, E5M2, E4M3), {"residual": E4M3}, (16, 16, 16)),
    "two boxes to halves": ((2, 136, 9, 10), 32, (3, 3), (E4M3, E4M3, F16), {"fn": "relu"}, (8, 8, 32)),
    "two boxes, two products": ((1, 144, 6, 9), 24, (5, 3), (E5M2, E4M3, E5M2), {}, (16, 8, 16)),
    "three groups": ((1, 64, 17, 18), 48, (3, 3), (E4M3, E4M3, E4M3), {"fn": "relu"}, (8, 8, 64, 3)),
    "four groups": ((1, 128, 10, 33), 32, (3, 3), (E4M3, E4M3, E4M3), {}, (8, 8, 32, 4)),
    "pairs of taps, two boxes": ((1, 160, 9, 18), 32, (3, 3), (E4M3, E4M3, E4M3), {"fn": "relu"}, (16, 8, 32)),
    "pairs of an even number": ((1, 96, 9, 10), 16, (2, 3), (E4M3, E4M3, E4M3), {"fn": "relu"}, (8, 8, 16)),
}


def from_patches(program: Program, tile: tuple[int, ...], blocks: int = 2, **more: bool) -> Memory:
    """What conv_halo makes of a convolution, by so few blocks that a warpgroup has several tiles."""
    (op,), config = program.ops, dict(zip(("across", "down", "columns", "groups"), tile, strict=False)) | more
    assert config in list(ConvHalo().configs(op, program, ARCHS["sm_90a"]))
    given = {name: recipe.values for name, recipe in program.constants.items()}  # type: ignore[union-attr]
    work = ConvHalo().work(op, program, config, ARCHS["sm_90a"])
    memory = on_blocks(blocks, work, program, given, op.y, ARCHS["sm_90a"])
    memory.check_written()
    return memory


@pytest.mark.parametrize("case", usually(PATCHES, "64 channels"))
def test_convolutions_from_patches(case: str) -> None:
    shape, outputs, window, kinds, how, tile = PATCHES[case]
    program = of_float8(case, shape, outputs, window, kinds, **how)
    shares = -(-outputs // tile[2])
    given = {name: recipe.values for name, recipe in program.constants.items()}  # type: ignore[union-attr]
    expected = from_storage(to_storage(compute(program.ops[0], program, given), kinds[2]), kinds[2])
    assert relative_error(from_patches(program, tile, shares).result(), expected) < ROUNDING[kinds[2]]


@pytest.mark.parametrize(("channels", "outputs", "window"), usually([(24, 1, (5, 5)), (64, 3, (3, 3)), (136, 4, (2, 3))], 0))
def test_taps_that_are_columns(channels: int, outputs: int, window: tuple[int, int]) -> None:
    """Of up to 64 channels, a row of pixels and of weights has 64 bytes, and of more 128."""
    program = of_float8("output", (1, channels, 17, 18), outputs, window, (E4M3, E4M3, F32), to="output")
    given = {name: recipe.values for name, recipe in program.constants.items()}  # type: ignore[union-attr]
    found = from_patches(program, (16, 8, outputs), spread=True).result()
    assert relative_error(found, compute(program.ops[0], program, given)) < ROUNDING[F32]


@thorough
@pytest.mark.parametrize("channels", [64, 192])
def test_sums_of_patches_keep_their_digits(channels: int) -> None:
    """Each tap's are made by themselves: sums of one sign of all of them would lose digits."""
    program = of_float8("long", (1, channels, 10, 8), 16, (5, 3), (E4M3, E4M3, F32), bias=False, sign=False)
    given = {name: np.asarray(recipe.values, np.float32) for name, recipe in program.constants.items()}  # type: ignore[union-attr]
    assert relative_error(from_patches(program, (8, 8, 16), 1).result(), compute(program.ops[0], program, given)) < 6e-4


@thorough
def test_two_groups() -> None:
    check(of_float8("groups", (1, 32, 5, 5), 32, (3, 3), (E4M3,) * 3, groups=2), MMA, "sm_89")
    check(of_float8("narrow", (1, 18, 5, 5), 27, (3, 3), groups=3), SIMT, "sm_80")


@thorough
@pytest.mark.parametrize("config", [{"bm": 24, "bn": 64, "split": 1, "swapped": True}, {"bm": 64, "bn": 64, "split": 1}])
def test_halves_leave_by_wgmma_in_boxes(config: Config) -> None:
    check(of_float8("boxes", (90, 130), 100, kinds=(E4M3, E4M3, F16), fn="relu"), WGMMA, "sm_90a", config)


@pytest.mark.parametrize(
    ("kinds", "residual", "bm"),
    [
        ((E4M3, E4M3, E4M3), None, 24),
        pytest.param((E4M3, E4M3, E4M3), E4M3, 56, marks=thorough),
        pytest.param((E4M3, E5M2, E5M2), E4M3, 200, marks=thorough),
    ],
)
def test_bytes_leave_turned(kinds: tuple[DType, DType, DType], residual: DType | None, bm: int) -> None:
    """With swapped operands a lane has two neighbouring channels, which are stored together."""
    program = of_float8("turned", (2, 130, 9, 8), 80, (1, 1), kinds, residual=residual)
    check(program, WGMMA, "sm_90a", {"bm": bm, "bn": 64, "split": 1, "swapped": True})


IN_PAIRS: dict[str, tuple[int, Config]] = {
    "two at once": (256, {"bm": 64, "bn": 32}),
    "a short stage and two": (352, {"bm": 16, "bn": 64, "swapped": True}),
    "a short stage and three": (480, {"bm": 64, "bn": 32}),
    "four": (512, {"bm": 16, "bn": 64, "swapped": True}),
    "five": (640, {"bm": 64, "bn": 32}),
}


@pytest.mark.parametrize("case", usually(IN_PAIRS, "a short stage and three"))
def test_results_of_8_bits_take_sums_of_two_stages_at_once(case: str) -> None:
    depth, config = IN_PAIRS[case]
    program, config = of_float8("pairs", (2, depth, 3, 3), 64, (1, 1), (E4M3,) * 3, fn="relu"), {"split": 1, **config}
    code = dict(HOPPER[0].work(program.ops[0], program, config, ARCHS["sm_90a"]).launches[0].code.params)
    assert "once" in code if depth == 256 else "in_pairs" in code
    check(program, WGMMA, "sm_90a", config)
    to_halves = of_float8("halves", (2, depth, 3, 3), 64, (1, 1), (E4M3, E4M3, F16))
    code = dict(HOPPER[0].work(to_halves.ops[0], to_halves, config, ARCHS["sm_90a"]).launches[0].code.params)
    assert not {"once", "in_pairs"} & code.keys()


@pytest.mark.parametrize(("family", "arch"), usually(FAMILIES, 5))
def test_what_is_no_number_stays_none(family: int, arch: str) -> None:
    program = of_float8("nan", (16, 64), 16, kinds=(E4M3, E4M3, F32))
    program.constants["x"].values[3, 40] = np.nan  # type: ignore[union-attr]
    found = result(program, family, arch, SMALL[family]).result()
    assert np.isnan(found[3]).all() and np.isfinite(np.delete(found, 3, 0)).all()


def test_what_multiplies_where() -> None:
    """On every generation there is a kernel, on Tensor Cores where there are any; depthwise ones have a kernel of CUDA cores."""
    for program in (of_float8("a", (64, 256), 64), of_float8("b", (1, 32, 8, 8), 32, (3, 3))):
        (op,) = program.ops
        for arch in ARCHS.values():
            takes = {k.name for k in KERNELS if isinstance(op, k.realises) and k.supports(op, program, arch) is None}
            kind = "gemm" if isinstance(op, Gemm) else "conv"
            families = {"simt": True, "mma": arch.cc >= (7, 0), "sm90": arch.name == "sm_90a"}
            more = {"conv_direct": True, "conv_halo": arch.name == "sm_90a", "conv_patch": arch.cc >= (7, 5)}
            more = {name: isinstance(op, Conv) and there for name, there in more.items()}
            there = {f"{kind}_{name}": there for name, there in families.items()} | more
            assert takes == {name for name, takes in there.items() if takes}


OVERLAPPING: dict[str, tuple[int, int, Config]] = {
    "a stage": (100, 24, {"swapped": True}),
    "two": (200, 64, {}),
    "three": (384, 24, {"swapped": True}),
    "four": (512, 24, {"swapped": True}),
    "seven, the first one short": (832, 40, {"swapped": True}),
    "many": (1040, 40, {"swapped": True}),
}


@pytest.mark.parametrize("case", usually(OVERLAPPING, "three", "four"))
def test_sums_that_overlap(case: str) -> None:
    """A stage's are added to the others while the next is multiplied, in two turns."""
    depth, bm, more = OVERLAPPING[case]
    program = of_float8("overlaps", (2, depth, 9, 8), 80, (1, 1), (E4M3,) * 3)
    check(program, WGMMA, "sm_90a", {"bm": bm, "bn": 64, "split": 1, "overlaps": True, **more})


R2UR = 0x2CA
"""The instruction of sm_90a that moves a number to a uniform register: its lowest 12 bits."""


def instructions(cubin: bytes) -> list[int]:
    """The first 8 of each instruction's 16 bytes, of an ELF file's code."""
    (table,), (each, count, names) = struct.unpack_from("<Q", cubin, 0x28), struct.unpack_from("<3H", cubin, 0x3A)
    sections = [struct.unpack_from("<2I4Q", cubin, table + each * i) for i in range(count)]
    texts = [s for s in sections if cubin.startswith(b".text.", sections[names][4] + s[0])]
    return [struct.unpack_from("<Q", cubin, s[4] + at)[0] for s in texts for at in range(0, s[5], 16)]


@thorough
@pytest.mark.parametrize("channels", [832, 256])
def test_descriptors_of_sums_that_overlap_are_in_uniform_registers(channels: int) -> None:
    """Where a branch of some threads ends beside one of all, the compiler takes what meets there for a thread's own, and moves
    four words before each wgmma."""
    program = of_float8("uniform", (32, channels, 7, 7), 128, (1, 1), (E4M3,) * 3, fn="relu")
    config = {"bm": 56, "bn": 64, "split": 1, "swapped": True, "overlaps": True}
    (launch,) = HOPPER[0].work(program.ops[0], program, config, ARCHS["sm_90a"]).launches
    moves = [word for word in instructions(compile_code(launch.code, ARCHS["sm_90a"]).code) if word & 0xFFF == R2UR]
    assert len(moves) < 4


ONCE: list[Config] = [
    {"bm": 24, "bn": 64, "split": 1, "swapped": True},
    {"bm": 64, "bn": 64, "split": 1},
    {"bm": 128, "bn": 128, "split": 1, "teams": 2},
]


@thorough
@pytest.mark.parametrize("config", usually(ONCE, 0))
def test_sums_of_one_stage_are_all(config: Config) -> None:
    """They are added to no others."""
    program = of_float8("once", (2, 100, 9, 8), 80, (1, 1), (E4M3,) * 3)
    check(program, WGMMA, "sm_90a", config)


@thorough
@pytest.mark.parametrize("depth", [256, 272])
def test_tiles_whose_sums_are_made_at_once_are_as_large_as_those_of_integers(depth: int) -> None:
    program = of_float8("large", (32, depth, 56, 56), 256, (1, 1), (E4M3,) * 3)
    large = [c for c in HOPPER[0].configs(program.ops[0], program, ARCHS["sm_90a"]) if c["bm"] == 256]
    assert bool(large) == (depth == 256) and all("overlaps" not in c for c in large)
    for config in large[:1]:
        (launch,) = HOPPER[0].work(program.ops[0], program, config, ARCHS["sm_90a"]).launches
        assert resources(launch.code, ARCHS["sm_90a"]).stack == 0


@thorough
@pytest.mark.parametrize(("bm", "bn"), [(112, 64), (64, 128)])
def test_no_tile_whose_sums_overlap_spills(bm: int, bn: int) -> None:
    program = of_float8("spills", (4, 520, 14, 14), 528, (1, 1), (E4M3,) * 3, fn="silu", residual=E4M3)
    config = {"bm": bm, "bn": bn, "split": 1, "swapped": True, "overlaps": True}
    (launch,) = HOPPER[0].work(program.ops[0], program, config, ARCHS["sm_90a"]).launches
    assert resources(launch.code, ARCHS["sm_90a"]).stack == 0


LARGEST = [(rows, columns, {"split": 1}) for rows, columns in MOST_SUMS.items()]
LARGEST += [(64, 192, {"split": 4}), (128, 128, {"split": 2, "swapped": True})]


@pytest.mark.parametrize(("y", "residual"), [(E4M3, E4M3), pytest.param(F32, F16, marks=thorough)])
@pytest.mark.parametrize(("bm", "bn", "more"), usually(LARGEST, 1))
def test_no_tile_of_wgmma_spills_registers(y: DType, residual: DType, bm: int, bn: int, more: Config) -> None:
    """`resources` raises on spills and on serialised wgmma."""
    program = of_float8("spills", (520, 2048), 520, kinds=(E4M3, E4M3, y), fn="relu", residual=residual)
    (launch,) = HOPPER[1].work(program.ops[0], program, {"bm": bm, "bn": bn, **more}, ARCHS["sm_90a"]).launches
    assert resources(launch.code, ARCHS["sm_90a"]).stack == 0


@thorough
@pytest.mark.parametrize("tile", [(16, 8, 64), (16, 16, 32), (8, 8, 64), (8, 8, 64, 3), (8, 8, 32, 4)])
def test_no_patch_spills_registers(tile: tuple[int, ...]) -> None:
    program = of_float8("spills", (2, 128, 30, 30), 64, (3, 3), (E4M3,) * 3, fn="silu", residual=E4M3)
    config = dict(zip(("across", "down", "columns", "groups"), tile, strict=False))
    (launch,) = ConvHalo().work(program.ops[0], program, config, ARCHS["sm_90a"]).launches
    assert resources(launch.code, ARCHS["sm_90a"]).stack == 0


@pytest.mark.parametrize("arch", usually(["sm_70", "sm_75", "sm_89", "sm_90a", "sm_120"], "sm_89"))
def test_no_tile_spills_registers(arch: str) -> None:
    """The largest that a generation is offered."""
    program, kernel, generation = of_float8("spills", (520, 520), 520, kinds=(E4M3,) * 3, fn="relu"), GemmMma(), ARCHS[arch]
    (op,) = program.ops
    offered = [(c["bm"], c["bn"]) for c in kernel.configs(op, program, generation)]
    chosen = [t for t in TILES if (t.bm, t.bn) in offered]
    for tile in sorted(chosen, key=lambda t: -t.mi * t.nj)[:2]:
        config = {"bm": tile.bm, "bn": tile.bn, "bk": tile.depth, "splits": 1}
        (launch,) = kernel.work(op, program, config, generation).launches
        assert resources(launch.code, generation).stack == 0
