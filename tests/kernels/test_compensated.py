"""Products of float32 by parts of bf16, as compiled, run thread by thread and compared with float64."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest

from tccompile.arch import ARCHS
from tccompile.emit.ptx import ptx_text
from tccompile.emit.ptxas import assemble
from tccompile.ir.ops import Conv, Gemm, Op
from tccompile.ir.program import Program
from tccompile.ir.tensor import Tensor, dense
from tccompile.ir.types import DType
from tccompile.ir.weights import Literal
from tccompile.kernels.gemm_mma import FLOAT_TILES, TERMS, ConvMma, GemmMma
from tccompile.kernels.spec import Config
from tests.kernels import machine
from tests.kernels.support import sums
from tests.networks import relative_error
from tests.tiers import usually

SM_80 = ARCHS["sm_80"]
NHWC = (0, 2, 3, 1)
NORMAL, ONE_SIGN, WIDE = "normal", "of one sign", "of all sizes"


def values(kind: str, shape: tuple[int, ...], seed: int) -> np.ndarray:
    rng = np.random.default_rng(seed)
    if kind == ONE_SIGN:
        return rng.random(shape, np.float32)
    found = rng.standard_normal(shape).astype(np.float32)
    return found * np.exp2(rng.integers(-40, 40, shape)).astype(np.float32) if kind == WIDE else found


def gemm(m: int, n: int, k: int, kind: str = NORMAL, y: DType = DType.F32) -> Program:
    op = Gemm(nodes=("gemm",), a="x", b="w", y="y")
    tensors = [dense("x", (m, k), DType.F32), dense("w", (n, k), DType.F32), dense("y", (m, n), y)]
    return program_of(op, tensors, {t.name: values(kind, t.shape, i) for i, t in enumerate(tensors)})


def conv(shape: tuple[int, ...], outputs: int, taps: tuple[int, int], groups: int = 1, **how: tuple[int, int]) -> Program:
    n, c, h, w = shape
    (sh, sw), (ph, pw), (dh, dw) = (how.get(k, d) for k, d in (("strides", (1, 1)), ("pads", (0, 0)), ("dilations", (1, 1))))
    p, q = (h + 2 * ph - dh * (taps[0] - 1) - 1) // sh + 1, (w + 2 * pw - dw * (taps[1] - 1) - 1) // sw + 1
    op = Conv(nodes=("c",), x="x", w="w", y="y", groups=groups, strides=(sh, sw), pads=(ph, pw), dilations=(dh, dw))
    tensors = [
        dense("x", shape, DType.F32, NHWC),
        dense("w", (outputs, c // groups, *taps), DType.F32, NHWC),
        dense("y", (n, outputs, p, q), DType.F32, NHWC),
    ]
    return program_of(op, tensors, {t.name: values(NORMAL, t.shape, i) for i, t in enumerate(tensors)})


def program_of(op: Op, tensors: list[Tensor], arrays: dict[str, np.ndarray]) -> Program:
    """An op of constants: what is read lies as constants do, and nothing else is there."""
    constants = {name: Literal(arrays[name]) for name in op.inputs}
    return Program((), (), {t.name: t for t in tensors}, constants, (op,))


def result(program: Program, config: Config | None = None, arch=SM_80) -> np.ndarray:
    (op,) = program.ops
    kernel = GemmMma() if isinstance(op, Gemm) else ConvMma()
    assert kernel.supports(op, program, arch) is None
    config = config or min(kernel.configs(op, program, arch), key=lambda c: kernel.cost(op, program, c, arch))
    given = {name: recipe.values for name, recipe in program.constants.items()}  # type: ignore[union-attr]
    memory = machine.run(kernel.work(op, program, config, arch), program, given, op.y, arch)
    memory.check_written(True)
    return memory.result()


TILES = [{"bm": t.bm, "bn": t.bn, "bk": t.depth // 4, "splits": 1} for t in FLOAT_TILES]


@pytest.mark.parametrize("config", usually(TILES, 1), ids=str)
@pytest.mark.parametrize("kind", [NORMAL, ONE_SIGN, WIDE])
def test_every_tile_is_as_exact_as_24_bits_nearly_are(config: Config, kind: str) -> None:
    program = gemm(37, 41, 200, kind)
    assert relative_error(result(program, config), sums(program, np.float64)) < 1e-5


@pytest.mark.parametrize("splits", usually([2, 5], 1))
def test_sums_in_parts(splits: int) -> None:
    program = gemm(16, 24, 640)
    assert relative_error(result(program, {"bm": 16, "bn": 64, "bk": 32, "splits": splits}), sums(program, np.float64)) < 1e-5


@pytest.mark.parametrize(
    "program",
    usually(
        [
            partial(conv, (1, 16, 7, 9), 24, (3, 3), pads=(1, 1)),
            partial(conv, (2, 40, 8, 5), 8, (1, 1), strides=(2, 1)),
            partial(conv, (1, 24, 9, 9), 16, (3, 2), dilations=(2, 1), strides=(1, 2)),
            partial(conv, (1, 32, 6, 6), 32, (3, 3), groups=2, pads=(1, 1)),
            partial(conv, (1, 5, 8, 8), 9, (3, 3), pads=(1, 1)),
            partial(conv, (1, 20, 8, 8), 9, (3, 3), pads=(1, 1)),
        ],
        5,
    ),
    ids=["3x3", "1x1 with strides", "dilated", "two groups", "odd channels", "channels of five chunks"],
)
def test_convolutions(program: partial[Program]) -> None:
    made = program()
    assert relative_error(result(made), sums(made, np.float64)) < 1e-5


def test_a_result_of_halves() -> None:
    program = gemm(20, 32, 96, y=DType.F16)
    assert relative_error(result(program), sums(program, np.float64)) < 5e-4


def test_what_is_multiplied_elsewhere() -> None:
    kernel = GemmMma()
    for program, arch, reason in (
        (gemm(64, 64, TERMS - 1), SM_80, "exact in float32 on CUDA cores"),
        (gemm(64, 64, 256), ARCHS["sm_75"], "no products of bf16"),
    ):
        assert reason in str(kernel.supports(program.ops[0], program, arch))


@pytest.mark.parametrize("arch", usually(["sm_80", "sm_89", "sm_90a", "sm_120"]))
def test_no_tile_spills_registers(arch: str) -> None:
    program = gemm(512, 512, 512)
    (op,), kernel, generation = program.ops, GemmMma(), ARCHS[arch]
    for config in TILES[:2]:
        (launch,) = kernel.work(op, program, config, generation).launches
        assemble(ptx_text(kernel.build(generation, **dict(launch.code.params)), generation, "kernel"), arch)
