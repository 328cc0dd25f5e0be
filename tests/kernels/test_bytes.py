"""Products of integers of 8 bits, as compiled, run thread by thread and compared with exact sums: wgmma, mma.sync, CUDA cores."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import pytest

from tccompile.arch import ARCHS
from tccompile.emit.compile import resources
from tccompile.emit.ptx import ptx_text
from tccompile.emit.ptxas import assemble
from tccompile.ir.expr import Epilogue, Expr, View, call, cast, const, coord, load
from tccompile.ir.ops import Conv, Gemm, Op
from tccompile.ir.program import Program
from tccompile.ir.reference import compute
from tccompile.ir.tensor import Tensor, dense, padding, per_row
from tccompile.ir.types import DType
from tccompile.ir.verify import verify
from tccompile.ir.weights import Literal
from tccompile.kernels import KERNELS
from tccompile.kernels.conv_halo import ConvHalo
from tccompile.kernels.gemm_mma import TILES, ConvMma, GemmMma
from tccompile.kernels.gemm_simt import ConvSimt, GemmSimt
from tccompile.kernels.gemm_sm90 import HOPPER
from tccompile.kernels.spec import Config, Kernel, Launch
from tccompile.schedule.choose import choose
from tests.bench.eight import Convolution
from tests.bench.layers import ConvLayer
from tests.gpu.cases import conv as convolution
from tests.kernels import machine, support
from tests.kernels.memory import Memory
from tests.kernels.support import check as agrees
from tests.kernels.support import on_blocks, on_two_blocks, sums
from tests.tiers import thorough, usually

I8, U8, I32, F16, F32 = DType.I8, DType.U8, DType.I32, DType.F16, DType.F32
NHWC = (0, 2, 3, 1)
SUM, ROUNDED = Expr("acc", (), None, DType.I64), Expr("acc")
MIXES = [(I8, I8), (I8, U8), (U8, I8), (U8, U8)]


def values(shape: tuple[int, ...], dtype: DType, seed: int, extreme: bool = False) -> np.ndarray:
    """All values of the type, or, with `extreme`, the two ends of it."""
    rng, (low, high) = np.random.default_rng(seed), (int(dtype.lowest), int(dtype.largest))
    found = np.where(rng.random(shape) < 0.9, high, low) if extreme else rng.integers(low, high + 1, shape)
    return found.astype(dtype.numpy)


def program_of(op: Op, x: Tensor, w: Tensor, y: Tensor, extreme: bool = False) -> Program:
    """An op of constants. Of the result, `scale` is per channel and `bias` an int32: those of a quantized layer."""
    channels = y.shape[1] if isinstance(op, Conv) else y.shape[-1]
    rng = np.random.default_rng(5)
    scale = rng.uniform(0.5, 2, channels) * 2.0 ** rng.integers(-9, -5, channels)
    given = {
        "x": values(x.shape, x.dtype, 1, extreme),
        "w": values(w.shape, w.dtype, 2, extreme),
        "scale": scale.astype(np.float32),
        "bias": rng.integers(-(2**12), 2**12, channels).astype(np.int32),
    }
    tensors = {t.name: t for t in (x, w, y, dense("scale", (channels,), F32), dense("bias", (channels,), I32))}
    made = Program((), (), tensors, {n: Literal(given[n]) for n in given if n in op.inputs}, (op,))
    verify(made)
    return made


def ending(y: DType, axis: int) -> Epilogue:
    """What a layer does with its sums: int32 as they are; floats scaled; bytes with a bias, scaled, rounded and saturated."""
    scale, bias = View("scale", (coord(axis),)), View("bias", (coord(axis),))
    if y is I32:
        return Epilogue(SUM)
    if y.is_float:
        return Epilogue(call("mul", ROUNDED, load(0)), (scale,))
    biased = cast(call("add", SUM, load(1, DType.I64)), F32)
    return Epilogue(call("round", call("mul", biased, load(0))), (scale, bias))


def gemm(
    m: int, n: int, k: int, x: DType = I8, w: DType = I8, y: DType = I32, lead: tuple[int, ...] = (), extreme: bool = False
) -> Program:
    op = Gemm(nodes=("gemm",), a="x", b="w", y="y", epilogue=ending(y, len(lead) + 1))
    out = dense("y", (*lead, m, n), y, pad=padding(y, True))
    return program_of(op, dense("x", (*lead, m, k), x, pad=16), dense("w", (*lead, n, k), w, pad=16), out, extreme)


def conv(
    shape: tuple[int, ...],
    outputs: int,
    taps: tuple[int, int],
    kinds: tuple[DType, DType, DType] = (I8, I8, I32),
    groups: int = 1,
    order: Sequence[int] = NHWC,
    **how: tuple[int, int],
) -> Program:
    n, c, h, w = shape
    (sh, sw), (ph, pw), (dh, dw) = (how.get(k, d) for k, d in (("strides", (1, 1)), ("pads", (0, 0)), ("dilations", (1, 1))))
    p, q = (h + 2 * ph - dh * (taps[0] - 1) - 1) // sh + 1, (w + 2 * pw - dw * (taps[1] - 1) - 1) // sw + 1
    op = Conv(nodes=("c",), x="x", w="w", y="y", groups=groups, strides=(sh, sw), pads=(ph, pw), dilations=(dh, dw))
    x = dense("x", shape, kinds[0], tuple(order), 16)
    weights = dense("w", (outputs, c // groups, *taps), kinds[1], NHWC, 16)
    y = dense("y", (n, outputs, p, q), kinds[2], NHWC, padding(kinds[2], True))
    return program_of(replace(op, epilogue=ending(kinds[2], 1)), x, weights, y)


def expected(program: Program) -> np.ndarray:
    """What the layer gives, by NumPy from the exact sums, in the result's own type."""
    (op,) = program.ops
    y, total = program.tensors[op.y], sums(program, np.int64)
    along = [-1 if a == (1 if isinstance(op, Conv) else y.rank - 1) else 1 for a in range(y.rank)]
    given = {n: program.constants[n].values.reshape(along) for n in ("scale", "bias") if n in program.constants}  # type: ignore[union-attr]
    if y.dtype is I32:
        return total.astype(np.int32)
    if y.dtype.is_float:
        return (total.astype(np.float32) * given["scale"]).astype(y.dtype.numpy)
    quantized = np.rint((total + given["bias"]).astype(np.float32) * given["scale"])
    return np.clip(quantized, float(y.dtype.lowest), float(y.dtype.largest)).astype(y.dtype.numpy)


def test_checks_of_kernels_take_integers_as_they_are_stored() -> None:
    """`support.check`'s, whose values most tests of kernels are compared with: here most are beyond a byte."""
    program = gemm(5, 8, 40, U8, I8, U8)
    (op,) = program.ops
    given = {name: recipe.values for name, recipe in program.constants.items()}  # type: ignore[union-attr]
    assert compute(op, program, given).max() > 255
    support.check(GemmSimt(), program, next(iter(GemmSimt().configs(op, program, support.ARCH))), run=machine.run)


def check(program: Program, simt: bool = False, arch: str = "sm_80", config: Config | None = None) -> None:
    """`gives_exactly` by the kernel of mma.sync or of CUDA cores."""
    kernels = ((ConvMma, GemmMma), (ConvSimt, GemmSimt))[simt]
    gives_exactly(program, kernels[isinstance(program.ops[0], Gemm)](), arch, config)


def check_sm90(program: Program, config: Config) -> None:
    """`gives_exactly` by the kernel of wgmma, whose blocks take several tiles."""
    gives_exactly(program, HOPPER[isinstance(program.ops[0], Gemm)], "sm_90a", config, on_two_blocks)


def gives_exactly(
    program: Program, kernel: Kernel, arch: str, config: Config | None, run: Callable[..., Memory] = machine.run
) -> None:
    """The kernel, and the CPU engine's meaning of the op, give every element exactly, and all of y's padding is written."""
    (op,), generation = program.ops, ARCHS[arch]
    assert kernel.supports(op, program, generation) is None
    config = config or min(kernel.configs(op, program, generation), key=lambda c: kernel.cost(op, program, c, generation))
    given = {name: recipe.values for name, recipe in program.constants.items()}  # type: ignore[union-attr]
    memory = run(kernel.work(op, program, config, generation), program, given, op.y, generation)
    memory.check_written(True)
    wanted = expected(program)
    np.testing.assert_array_equal(memory.result(), wanted)
    meant = compute(op, program, given)
    if program.tensors[op.y].dtype.size == 1:
        meant = np.clip(meant, program.tensors[op.y].dtype.lowest, program.tensors[op.y].dtype.largest)
    np.testing.assert_array_equal(meant.astype(wanted.dtype), wanted)


KINDS = [(x, w, I32) for x, w in MIXES] + [(U8, I8, F16), (I8, I8, F32), (I8, I8, I8), (U8, I8, U8)]


@pytest.mark.parametrize(("x", "w", "y"), usually(KINDS, 7))
@pytest.mark.parametrize("arch", usually(["sm_75", "sm_80"], "sm_75"))
def test_both_signs_and_every_result(x: DType, w: DType, y: DType, arch: str) -> None:
    check(gemm(21, 19, 75, x, w, y), arch=arch, config={"bm": 32, "bn": 64, "bk": 128, "splits": 1})


@pytest.mark.parametrize(("x", "w", "y"), usually(KINDS, 6))
def test_both_signs_and_every_result_by_dp4a(x: DType, w: DType, y: DType) -> None:
    check(gemm(21, 19, 75, x, w, y), simt=True, arch="sm_61")


def test_results_saturate() -> None:
    for y in (I8, U8):
        program = gemm(16, 16, 32, y=y)
        found = expected(program)
        assert found.min() == y.lowest and found.max() == y.largest and len(np.unique(found)) > 20


ENDS = [{"bm": t.bm, "bn": t.bn, "bk": t.depth, "splits": 1} for t in TILES]


@pytest.mark.parametrize("config", usually(ENDS), ids=str)
def test_every_tile(config: Config) -> None:
    check(gemm(37, 41, 200, U8, I8), config=config)


PARTS = [(y, simt, splits) for y in (I32, F32) for simt, splits in ((False, 1), (False, 3), (True, 1), (True, 4))]


@pytest.mark.parametrize(("y", "simt", "splits"), usually(PARTS, 5))
def test_sums_beyond_24_bits_are_exact_until_they_are_rounded_once(y: DType, simt: bool, splits: int) -> None:
    program = gemm(8, 8, 1024, U8, U8, y, extreme=True)
    total = sums(program, np.int64)
    assert (total > 2**24).all() and (total % 2 == 1).any()
    check(
        program,
        simt,
        config={"bm": 32, "bn": 32, "splits": splits} if simt else {"bm": 16, "bn": 64, "bk": 128, "splits": splits},
    )


def test_sums_are_modulo_2_to_the_32() -> None:
    x, w = np.full((1, 40000), 255), np.full((2, 40000), 255)
    op = Gemm(nodes=("gemm",), a="x", b="w", y="y")
    found = op.compute({"x": x, "w": w}, (1, 2))
    assert found.tolist() == [[40000 * 255 * 255 - 2**32] * 2]


CONVOLUTIONS = {
    "3x3": partial(conv, (1, 16, 5, 6), 24, (3, 3), pads=(1, 1)),
    "1x1 with strides": partial(conv, (2, 40, 5, 4), 8, (1, 1), (U8, I8, F16), strides=(2, 1)),
    "dilated": partial(conv, (1, 24, 6, 7), 16, (3, 2), (I8, U8, I32), dilations=(2, 1), strides=(1, 2)),
    "two groups": partial(conv, (1, 32, 5, 5), 32, (3, 3), (U8, I8, U8), groups=2, pads=(1, 1)),
    "odd channels": partial(conv, (1, 5, 5, 5), 9, (3, 3), (U8, I8, I8), pads=(1, 1)),
}


@pytest.mark.parametrize("simt", [False, pytest.param(True, marks=thorough)])
@pytest.mark.parametrize("case", usually(CONVOLUTIONS, "two groups"))
def test_convolutions(case: str, simt: bool) -> None:
    check(CONVOLUTIONS[case](), simt, "sm_61" if simt else "sm_80")


ELSEWHERE = {
    "narrow groups": partial(conv, (1, 6, 5, 5), 9, (3, 3), (U8, I8, I32), groups=3, pads=(1, 1)),
    "planes": partial(conv, (1, 5, 5, 6), 8, (3, 3), order=(0, 1, 2, 3)),
    "batches": partial(gemm, 9, 10, 40, y=F32, lead=(3,)),
}


@pytest.mark.parametrize("case", usually(ELSEWHERE, "narrow groups"))
def test_layouts_that_only_cuda_cores_take(case: str) -> None:
    check(ELSEWHERE[case](), simt=True)


SM90 = [(gemm(70, 40, 300, x, w, y), bn) for (x, w, y), bn in zip(KINDS, (32, 64, 16, 96, 64, 32, 64, 32), strict=True)]


@pytest.mark.parametrize(("program", "bn"), usually(SM90, 5))
def test_both_signs_and_every_result_by_wgmma(program: Program, bn: int) -> None:
    check_sm90(program, {"bm": 64, "bn": bn, "split": 1})


@thorough
def test_teams_take_tiles_in_turn() -> None:
    """A block's three, of more stages than a ring holds"""
    config = {"bm": 128, "bn": 128, "split": 1, "teams": 2}
    gives_exactly(gemm(260, 20, 520, U8, I8, U8), HOPPER[1], "sm_90a", config, partial(on_blocks, 1))


def test_teams_are_for_several_tiles_stored_in_bytes_without_a_residual() -> None:
    def offered(program: Program) -> bool:
        (op,) = program.ops
        return any(c.get("teams") for c in HOPPER[isinstance(op, Gemm)].configs(op, program, ARCHS["sm_90a"]))

    assert offered(gemm(4096, 3072, 384, y=U8))
    assert not offered(gemm(4096, 3072, 384, y=F16))  # which swapped operands store faster
    assert not offered(gemm(512, 512, 384, y=U8))  # a tile for each block
    assert not offered(gemm(4096, 3072, 256, y=U8))  # of two stages
    assert not offered(with_residual(F16, F16, (8, 64, 64, 64), 512))


def chosen(kind: DType | None, x: tuple[int, int, int, int], outputs: int) -> tuple[Config, Launch]:
    """What a 1×1 layer of this many images is estimated to be fastest in, in 8 bits or halves."""
    layer = ConvLayer(x, (outputs, x[1], 1, 1), (0, 0), (1, 1))
    ((op, program),) = (layer if kind is None else Convolution(layer, kind)).parts()
    choice = choose(op, program, ARCHS["sm_90a"])
    assert choice.kernel.name == "conv_sm90"
    return choice.config, choice.work.launches[0]


FASTEST = [
    (U8, (32, 160, 56, 56), 128, {"bm": 256, "bn": 128}),  # 11.3 µs; two teams 14.7
    (U8, (32, 256, 56, 56), 64, {"bm": 192, "bn": 64}),  # floats of 8 bits in 200 rows 6.1, in 112 8.1
    (DType.E4M3, (32, 192, 28, 28), 64, {"bm": 112, "bn": 64, "stages": 8}),  # 3.15; as many as K fills 3.76
    (DType.E4M3, (32, 192, 28, 28), 128, {"bm": 96, "bn": 128, "stages": 8}),  # 3.98; as many as K fills 4.62
    (DType.E4M3, (32, 832, 14, 14), 128, {"bm": 112, "bn": 64, "overlaps": True}),  # 3.52; 96 rows 3.68
    (U8, (32, 96, 14, 14), 576, {"bm": 128, "bn": 128, "stages": 8}),  # 3.66; 256 rows 4.49
    (DType.E4M3, (32, 256, 14, 14), 128, {"bm": 96, "bn": 64}),  # 2.23; 48 rows 2.36
    (DType.E4M3, (32, 128, 28, 28), 128, {"bm": 96, "bn": 128, "stages": 8}),  # 3.19; as many as K fills 3.27
    (DType.E4M3, (32, 1152, 7, 7), 192, {"bm": 40, "bn": 64, "overlaps": True}),  # 2.64; 64 rows 2.72
    (DType.E4M3, (32, 128, 28, 28), 512, {"bm": 96, "bn": 128}),  # 5.74; 256 rows 7.70
    (U8, (32, 128, 56, 56), 128, {"bm": 96, "bn": 128}),  # 6.64; 256 rows 8.21
    (DType.E4M3, (32, 32, 28, 28), 192, {"bm": 200, "bn": 128, "stages": 8}),  # 3.34; 192×96, not swapped, 4.29
    (DType.E4M3, (32, 320, 14, 14), 128, {"bm": 112, "bn": 64, "overlaps": True}),  # 2.51; sums of pairs of stages 2.61
]


@pytest.mark.parametrize(("kind", "x", "outputs", "tile"), FASTEST)
def test_estimates_choose_what_was_measured_to_be_fast(kind, x, outputs, tile) -> None:
    """At batch 32 on an H200."""
    assert chosen(kind, x, outputs)[0] == {**tile, "split": 1, "swapped": True}


IM2COL = {
    "3x3": partial(conv, (1, 16, 7, 6), 24, (3, 3), (I8, I8, I8), pads=(1, 1)),
    "3x3 of 144": partial(conv, (1, 144, 7, 6), 72, (3, 3), (U8, I8, U8), pads=(1, 1)),
    "1x1": partial(conv, (3, 130, 5, 6), 40, (1, 1), (U8, U8, I32)),
    "1x1 of 64 with strides": partial(conv, (2, 64, 9, 8), 40, (1, 1), (U8, I8, F16), strides=(2, 2)),
    "7x7 with strides": partial(conv, (1, 3, 15, 14), 64, (7, 7), (U8, I8, I8), strides=(2, 2), pads=(3, 3)),
    "dilated": partial(conv, (1, 48, 9, 7), 16, (3, 2), (I8, U8, I32), dilations=(2, 1), strides=(1, 2)),
    "odd channels": partial(conv, (1, 37, 6, 5), 9, (3, 3), (U8, I8, F32), pads=(1, 1)),
}


@pytest.mark.parametrize("case", usually(IM2COL, "7x7 with strides"))
def test_convolutions_by_wgmma(case: str) -> None:
    check_sm90(IM2COL[case](), {"bm": 64, "bn": 32, "split": 1})


def test_operands_are_swapped_where_stmatrix_turns_the_results_or_a_cluster_does() -> None:
    halves, bytes_ = IM2COL["1x1 of 64 with strides"](), IM2COL["3x3 of 144"]()
    check_sm90(halves, {"bm": 24, "bn": 64, "split": 1, "swapped": True})
    splits = [{c["split"] for c in HOPPER[0].configs(p.ops[0], p, ARCHS["sm_90a"]) if c.get("swapped")} for p in (halves, bytes_)]
    assert 1 in splits[0] and 1 not in splits[1] and splits[1]


TURNED = {
    "1x1": (partial(conv, (2, 130, 9, 8), 80, (1, 1), (U8, I8, U8)), {"bm": 48}),
    "3x3": (partial(conv, (1, 144, 7, 6), 48, (3, 3), (U8, I8, I8), pads=(1, 1)), {"bm": 24}),
    "few channels": (partial(conv, (1, 20, 9, 17), 144, (1, 1), (I8, U8, I8)), {"bm": 32, "bn": 128}),
    "rows": (partial(gemm, 170, 64, 300, I8, I8, U8), {"bm": 112}),
    "a few rows": (partial(gemm, 5, 96, 64, I8, I8, I8), {"bm": 8}),
}


@thorough
@pytest.mark.parametrize("case", TURNED)
def test_bytes_are_turned_two_channels_at_a_time(case: str) -> None:
    made, more = TURNED[case]
    program, config = made(), {"bn": 64, "split": 1, "swapped": True, **more}
    assert HOPPER[0].takes_of(program.ops[0], program, config, ARCHS["sm_90a"])
    check_sm90(program, config)


def with_residual(
    y: DType, kind: DType, x: tuple[int, int, int, int] = (2, 20, 7, 6), channels: int = 40, taps: tuple[int, int] = (1, 1)
) -> Program:
    """A convolution and a tensor of a kind that is added to its results; they are few enough to be exact as halves."""
    program = conv(x, channels, taps, (I8, I8, y))
    op, r = program.ops[0], dense("r", program.tensors["y"].shape, kind, NHWC, padding(kind, True))
    there = (View("r", tuple(map(coord, range(4)))), View("scale", (coord(1),)))
    scaled = call("mul", cast(SUM, F32), load(1))
    total = call("add", scaled, load(0) if kind is F16 else cast(load(0, DType.I64), F32))
    added = total if y is F16 else call("round", total)
    low = 0 if kind is U8 else -9
    constants = {**program.constants, "r": Literal(np.random.default_rng(3).integers(low, 10, r.shape).astype(kind.numpy))}
    constants["scale"] = Literal(np.full(channels, 2.0**-12, np.float32))
    tensors = {**program.tensors, "r": r}
    made = replace(program, tensors=tensors, constants=constants, ops=(replace(op, epilogue=Epilogue(added, there)),))
    verify(made)
    return made


ADDED = [(F16, F16, {}), (F16, F16, {"swapped": True}), (I8, I8, {}), (U8, I8, {}), (I8, U8, {"bn": 32}), (I8, F16, {})]
TURNED_ADDED = [(I8, I8, {"bm": 24}), (U8, I8, {"bm": 64}), (I8, U8, {"bm": 32, "bn": 128})]


@pytest.mark.parametrize(("y", "r", "more"), usually(ADDED, 5))
def test_what_differs_by_row_is_added_to_sums_by_wgmma(y: DType, r: DType, more: Config) -> None:
    """In boxes, if elements have the same size; else lanes store rows."""
    program, config = with_residual(y, r), {"bm": 64, "bn": 64, "split": 1, **more}
    (launch,) = HOPPER[0].work(program.ops[0], program, config, ARCHS["sm_90a"]).launches
    assert dict(launch.code.params)["boxed"] == (y.size == r.size)
    agrees(HOPPER[0], program, config, arch=ARCHS["sm_90a"], run=on_two_blocks)


@thorough
@pytest.mark.parametrize(("y", "r", "more"), TURNED_ADDED)
def test_what_is_added_to_bytes_that_are_turned(y: DType, r: DType, more: Config) -> None:
    program, config = with_residual(y, r, (5, 20, 7, 6), 144), {"bn": 64, "split": 1, "swapped": True, **more}
    agrees(HOPPER[0], program, config, arch=ARCHS["sm_90a"], run=on_two_blocks)


@pytest.mark.parametrize(
    ("program", "bn"),
    usually([(conv((2, 20, 7, 6), 96, (1, 1), (U8, I8, U8)), 64), (with_residual(I8, U8, channels=160), 128)], 1),
    ids=("plain", "added"),
)
def test_lanes_have_eight_neighbours_where_columns_come_by_32(program: Program, bn: int) -> None:
    """The last tile's are beyond the result."""
    config = {"bm": 64, "bn": bn, "split": 1}
    (launch,) = HOPPER[0].work(program.ops[0], program, config, ARCHS["sm_90a"]).launches
    assert dict(launch.code.params)["eights"]
    agrees(HOPPER[0], program, config, arch=ARCHS["sm_90a"], run=on_two_blocks)


@thorough
@pytest.mark.parametrize("bm", [64, 128])
def test_what_is_added_to_bytes_comes_a_tile_ahead(bm: int) -> None:
    """Twelve or twenty-four tiles of two blocks, the last rows of which are beyond the result: a warp has several turns, some
    without rows."""
    program = with_residual(I8, I8, (9, 20, 7, 6), 100)
    agrees(HOPPER[0], program, {"bm": bm, "bn": 32, "split": 1}, arch=ARCHS["sm_90a"], run=on_two_blocks)


HALO = {
    "64 channels": (conv((1, 64, 9, 10), 40, (3, 3), (I8, U8, I8), pads=(1, 1)), {"across": 8, "down": 8, "columns": 16}, 3),
    "128": (conv((2, 128, 7, 6), 24, (3, 3), (U8, I8, U8), pads=(1, 1)), {"across": 8, "down": 16, "columns": 32}, 1),
    "two boxes": (conv((1, 144, 6, 9), 64, (3, 2), (I8, I8, I8)), {"across": 16, "down": 8, "columns": 32}, 2),
    "few, to halves": (
        conv((1, 20, 9, 17), 24, (1, 5), (I8, I8, F16), pads=(0, 2)),
        {"across": 16, "down": 16, "columns": 16},
        2,
    ),
    "three warpgroups": (
        conv((1, 144, 17, 14), 24, (2, 3), (U8, I8, I8), pads=(0, 1)),
        {"across": 8, "down": 8, "columns": 16, "groups": 3},
        2,
    ),
    "four": (conv((1, 16, 9, 10), 32, (3, 3), (I8, I8, U8)), {"across": 8, "down": 8, "columns": 32, "groups": 4}, 1),
    "64 columns": (conv((1, 32, 5, 5), 64, (3, 3), (U8, U8, U8), pads=(2, 1)), {"across": 8, "down": 8, "columns": 64}, 1),
}


@pytest.mark.parametrize("case", usually(HALO, "three warpgroups"))
def test_convolutions_from_patches(case: str) -> None:
    """By as few blocks as there are parts of the output channels: each has all tiles."""
    program, config, blocks = HALO[case]
    assert config in list(ConvHalo().configs(program.ops[0], program, ARCHS["sm_90a"]))
    gives_exactly(program, ConvHalo(), "sm_90a", config, partial(on_blocks, blocks))


@pytest.mark.parametrize(
    ("y", "r", "more"),
    [
        (I8, I8, {"groups": 3}),
        pytest.param(U8, I8, {}, marks=thorough),
        pytest.param(F16, F16, {"groups": 4}, marks=thorough),
    ],
)
def test_what_is_added_to_convolutions_from_patches(y: DType, r: DType, more: Config) -> None:
    program = with_residual(y, r, (2, 40, 9, 10), 64, (3, 3))
    agrees(ConvHalo(), program, {"across": 8, "down": 8, "columns": 32, **more}, arch=ARCHS["sm_90a"], run=machine.run)


@pytest.mark.parametrize("kind", [I8, pytest.param(F16, marks=thorough)])
def test_a_part_of_an_image_is_added_to_convolutions_from_patches(kind: DType) -> None:
    program = with_residual(kind, kind, (2, 20, 5, 9), 32, (3, 3))
    (op,), (n, c, p, q) = program.ops, program.tensors["y"].shape
    r = dense("r", (n, c, p + 3, q + 2), kind, NHWC, padding(kind, True))
    part = View("r", (coord(0), coord(1), coord(2) + 2, coord(3) + 1))
    there = replace(op.epilogue, loads=(part, *op.epilogue.loads[1:]))
    constants = {**program.constants, "r": Literal(np.random.default_rng(3).integers(-9, 10, r.shape).astype(kind.numpy))}
    program = replace(program, tensors={**program.tensors, "r": r}, constants=constants, ops=(replace(op, epilogue=there),))
    config = {"across": 8, "down": 8, "columns": 32}
    assert dict(ConvHalo().work(program.ops[0], program, config, ARCHS["sm_90a"]).launches[0].code.params)["boxed"]
    agrees(ConvHalo(), program, config, arch=ARCHS["sm_90a"], run=machine.run)


def test_patches_of_bytes_leave_in_boxes_only() -> None:
    program = conv((1, 64, 9, 10), 40, (3, 3), (I8, I8, I32), pads=(1, 1))
    assert "is not stored by the copy engine" in str(ConvHalo().supports(program.ops[0], program, ARCHS["sm_90a"]))


@pytest.mark.parametrize(
    ("kernel", "taps", "config"),
    [
        (HOPPER[0], 1, {"bm": 64, "bn": 32, "split": 1}),
        pytest.param(ConvHalo(), 3, {"across": 8, "down": 8, "columns": 32}, marks=thorough),
    ],
)
def test_sums_of_halves_leave_in_boxes_of_bytes(kernel: Kernel, taps: int, config: Config) -> None:
    """What a product in floats stores for one in bytes; none is off by more than a step."""
    program = convolution("c", (1, 72, 9, 10), 48, (taps, taps), ep="bias")
    op, arch = program.ops[0], ARCHS["sm_90a"]
    steps = call("add", call("round", call("mul", op.epilogue.expr, 31.0)), 5.0)
    rounded = cast(Expr("saturate", (steps, const(-128.0), const(127.0))), DType.I64)
    y = dense("y", program.tensors["y"].shape, I8, NHWC, 16)
    ops = (replace(op, epilogue=replace(op.epilogue, expr=rounded)),)
    program = replace(program, tensors={**program.tensors, "y": y}, ops=ops)
    given = {name: np.array(recipe.values) for name, recipe in program.constants.items()}  # type: ignore[union-attr]
    work = kernel.work(program.ops[0], program, config, arch)
    assert dict(work.launches[0].code.params)["boxed"] and dict(work.launches[0].code.params)["result"] == 1
    memory = machine.run(work, program, given, "y", arch)
    memory.check_written(True)
    off = memory.result().astype(int) - compute(program.ops[0], program, given)
    assert abs(off).max() <= 1 and (off == 0).mean() > 0.999 and len(np.unique(memory.result())) > 100


BOXES = [(I8, 64, 16), (I8, 64, 32), (I8, 128, 96), (I8, 64, 128), (U8, 64, 32)]


@pytest.mark.parametrize(("y", "bm", "bn"), usually(BOXES, 4))
def test_boxes_of_bytes(y: DType, bm: int, bn: int) -> None:
    """Of 16, 32 and 64 columns, the last of which lie beyond the result."""
    program, config = gemm(150, 100, 40, U8, I8, y), {"bm": bm, "bn": bn, "split": 1}
    (launch,) = HOPPER[1].work(program.ops[0], program, config, ARCHS["sm_90a"]).launches
    how = dict(launch.code.params)
    assert how["boxed"] and how["result"] == 1
    check_sm90(program, config)


@thorough
def test_sums_by_wgmma_are_rounded_once() -> None:
    check_sm90(gemm(8, 8, 1024, U8, U8, F32, extreme=True), {"bm": 64, "bn": 16, "split": 1})


@thorough
def test_batches() -> None:
    check(gemm(9, 10, 40, y=I32, lead=(2, 3)))


def test_what_multiplies_where() -> None:
    """Every generation has one kernel at least, and those that know halves alone say that they do not take bytes."""
    for program in (gemm(64, 64, 256, U8, I8), conv((1, 32, 8, 8), 32, (3, 3), pads=(1, 1))):
        (op,) = program.ops
        for arch in ARCHS.values():
            takes = {k.name for k in KERNELS if isinstance(op, k.realises) and k.supports(op, program, arch) is None}
            kind = "gemm" if isinstance(op, Gemm) else "conv"
            families = {"simt": True, "mma": arch.cc >= (7, 5), "sm90": arch.name == "sm_90a"}  # halo takes no sums as results
            families["patch"] = kind == "conv" and arch.cc >= (8, 0)
            assert takes == {f"{kind}_{name}" for name, there in families.items() if there}
    assert "no products of int8" in str(GemmMma().supports(gemm(64, 64, 256).ops[0], gemm(64, 64, 256), ARCHS["sm_70"]))


def test_rows_of_16_bytes() -> None:
    """A row whose padding ends within 16 bytes is not for Tensor Cores, nor is one that would have to be turned round."""
    assert per_row(I8) == 16
    program = gemm(16, 16, 24)
    narrow = {**program.tensors, "x": dense("x", (16, 24), I8, pad=8), "w": dense("w", (16, 24), I8, pad=8)}
    program = replace(program, tensors=narrow)
    assert "24 elements a tap for 24 channels, not the next multiple of 16" in str(
        GemmMma().supports(program.ops[0], program, ARCHS["sm_80"])
    )
    bare = replace(program, tensors={**narrow, "x": dense("x", (24, 16), I8)})
    turned = replace(bare.tensors["x"], shape=(16, 24), padded=(16, 24), strides=(1, 16))
    turned_program = replace(bare, tensors={**bare.tensors, "x": turned, "w": dense("w", (16, 24), I8, pad=16)})
    assert "is transposed" in str(GemmMma().supports(program.ops[0], turned_program, ARCHS["sm_80"]))


SPILL = [
    (y, bm, bn, more)
    for y in (I32, I8, F16)
    for bm, bn, more in (
        (128, 256, {"split": 1}),
        (64, 256, {"split": 1}),
        (192, 128, {"split": 1}),
        (64, 256, {"split": 4}),
        (256, 64, {"split": 4, "swapped": True}),
        *([(256, 128, {"split": 1, "swapped": True})] if y is F16 else []),
    )
]


@pytest.mark.parametrize(("y", "bm", "bn", "more"), usually(SPILL))
def test_no_tile_of_wgmma_spills_registers(y: DType, bm: int, bn: int, more: Config) -> None:
    """`resources` raises on spills and on serialised wgmma."""
    program = gemm(512, 512, 2048, U8, I8, y)
    (launch,) = HOPPER[1].work(program.ops[0], program, {"bm": bm, "bn": bn, **more}, ARCHS["sm_90a"]).launches
    assert resources(launch.code, ARCHS["sm_90a"]).stack == 0


@pytest.mark.parametrize("arch", usually(["sm_80", "sm_75", "sm_89", "sm_90a", "sm_120"]))
def test_no_tile_spills_registers(arch: str) -> None:
    program, kernel, generation = gemm(512, 512, 512, U8, I8, I8), GemmMma(), ARCHS[arch]
    (op,) = program.ops
    for config in [c for c in ENDS if c in [{**d, "splits": 1} for d in kernel.configs(op, program, generation)]][:2]:
        (launch,) = kernel.work(op, program, config, generation).launches
        _, used = assemble(ptx_text(kernel.build(generation, **dict(launch.code.params)), generation, "kernel"), arch)
        assert used.stack == 0
