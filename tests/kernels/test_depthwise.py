"""Depthwise convolution: where it applies, how pixels and channels are shared out, code for every generation."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tccompile.arch import ARCHS
from tccompile.emit.compile import resources
from tccompile.ir.expr import Epilogue, Expr
from tccompile.ir.types import DType
from tccompile.kernels.depthwise import LINES, THREADS, TILES, Depthwise
from tccompile.kernels.spec import I32
from tests.gpu.cases import conv, depthwise_of_bytes, of_8_bits, program_of
from tests.kernels.support import ARCH, check
from tests.tiers import APART, thorough

KERNEL = Depthwise()


def depthwise(channels: int = 24, size: int = 14, window: int = 3, **how):
    return conv("depthwise", (2, channels, size, size + 1), channels, (window, window), groups=channels, **how)


def exact_sums():
    """Of bytes by bytes, as int64."""
    program = depthwise_of_bytes("s8", (1, 16, 5, 5), (3, 3), (DType.I8, DType.I8, DType.I32))
    (op,) = program.ops
    return replace(program, ops=(replace(op, epilogue=Epilogue(Expr("acc", (), None, DType.I64))),))


@pytest.mark.parametrize("program", [depthwise(), depthwise(33), depthwise(to="output"), depthwise(dtype=DType.F32)], ids=str)
def test_supports(program) -> None:
    assert KERNEL.supports(program.ops[0], program, ARCH) is None


@pytest.mark.parametrize(
    "program, reason",
    [
        (program_of("conv_groups_4"), "no depthwise convolution"),
        (program_of("conv_multiplier"), "no depthwise convolution"),
        (depthwise(dtype=DType.BF16), "bfloat16"),
        (exact_sums(), "integers"),
        (of_8_bits("u8", (1, 16, 5, 5), 16, (3, 3), (DType.U8, DType.U8, DType.I32), groups=16), "uint8"),
    ],
    ids=["groups", "multiplier", "bf16", "exact sums", "by unsigned bytes"],
)
def test_says_why_not(program, reason: str) -> None:
    assert reason in KERNEL.supports(program.ops[0], program, ARCH)


def test_needs_channels_in_vectors() -> None:
    program = depthwise()
    x = program.tensors["x"]
    moved = {**program.tensors, "x": replace(x, strides=(x.strides[0], x.strides[1], x.strides[2], x.strides[3] + 1))}
    assert "aligned vectors" in KERNEL.supports(program.ops[0], replace(program, tensors=moved), ARCH)


@pytest.mark.parametrize(
    "program",
    [
        conv("3x3", (2, 12, 7, 9), 12, (3, 3), groups=12, ep="bias"),
        conv("3x3/2", (1, 20, 9, 8), 20, (3, 3), stride=2, groups=20, ep="bias residual"),
        conv("5x5", (1, 8, 7, 6), 8, (5, 5), groups=8),
        conv("7x7", (1, 8, 6, 9), 8, (7, 7), groups=8, to="output"),
        conv("3x3 fp32", (1, 8, 5, 5), 8, (3, 3), groups=8, dtype=DType.F32),
        conv("dilated", (1, 8, 9, 9), 8, (3, 3), groups=8, dilation=2),
        conv("5", (1, 12, 20), 12, (5,), groups=12, to="odd_tail"),
        conv("9/3", (1, 12, 20), 12, (9,), groups=12, stride=3),
        depthwise_of_bytes("u8", (1, 12, 7, 6), (3, 3), (DType.U8, DType.F16, DType.U8)),
        depthwise_of_bytes("by s8", (1, 12, 7, 6), (3, 3), (DType.I8, DType.I8, DType.U8)),
        depthwise_of_bytes("s8/2", (1, 20, 7, 6), (5, 5), (DType.I8, DType.F16, DType.F16), stride=2),
    ],
    ids=lambda program: program.ops[0].nodes[0],
)
def test_values(program) -> None:
    check(KERNEL, program)


@pytest.mark.parametrize("channels, tile", [(24, (1, 1, 8)), (24, (1, 2, 8)), (33, (4, 2, 8)), (33, (4, 4, 4)), (8, (2, 2, 8))])
def test_threads_cover_the_output(channels: int, tile: tuple[int, int, int]) -> None:
    program = depthwise(channels, 13)
    rows, columns, lanes = tile
    (launch,) = KERNEL.work(program.ops[0], program, {"rows": rows, "columns": columns, "lanes": lanes}, ARCH).launches
    n, _, p, q = program.tensors["y"].shape
    total = launch.args[2]
    assert total == I32(n * -(-p // rows) * -(-q // columns) * -(-program.tensors["y"].padded[1] // lanes))
    assert 0 <= launch.grid[0] * THREADS - total.value < THREADS


def test_unrolls_common_filters_only() -> None:
    def params(**how) -> tuple:
        program = depthwise(**how)
        (launch,) = KERNEL.work(program.ops[0], program, {"rows": 1, "columns": 2, "lanes": 8}, ARCH).launches
        found = dict(launch.code.params)
        return found["taps"], found["stride"]

    assert params(window=5) == ((5, 5), 1) and params(stride=2) == ((3, 3), 2)
    assert params(dilation=2) == params(stride=3) == params(window=9, size=20) == ((0, 0), 0)


def test_a_batch_takes_more_pixels_a_thread() -> None:
    def best(batch: int) -> int:
        program = conv("depthwise", (batch, 96, 56, 56), 96, (3, 3), groups=96)
        arch = ARCHS["sm_90a"]
        configs = list(KERNEL.configs(program.ops[0], program, arch))
        return min(configs, key=lambda c: KERNEL.cost(program.ops[0], program, c, arch))["rows"]

    assert best(1) < best(64)


@thorough
@pytest.mark.parametrize("arch", APART)
def test_compiles(arch: str) -> None:
    """On each generation another tile"""
    number = list(ARCHS).index(arch)
    program, tiles = (
        (depthwise(20, ep="bias silu"), TILES[3, 3]),
        (depthwise(window=5, stride=2), TILES[5, 5]),
        (depthwise(window=7, size=20) if number < 6 else depthwise(window=9, size=20), TILES[7, 7] if number < 6 else LINES),
    )[number % 3]
    rows, columns, lanes = list(tiles)[number // 3 * 2 % len(tiles)]
    config = {"rows": rows, "columns": columns, "lanes": lanes}
    (launch,) = KERNEL.work(program.ops[0], program, config, ARCHS[arch]).launches
    assert resources(launch.code, ARCHS[arch]).stack == 0
