"""Depthwise convolution on Tensor Cores: where it applies, values at all edges, code for every generation that has them."""

from __future__ import annotations

import pytest

from tccompile.arch import ARCHS
from tccompile.emit.compile import resources
from tccompile.ir.types import DType
from tccompile.kernels.depthwise_mma import TILES, DepthwiseMma
from tccompile.kernels.spec import Config
from tests.gpu.cases import conv, program_of
from tests.kernels.support import ARCH, check
from tests.tiers import usually

KERNEL = DepthwiseMma()


def depthwise(channels: int = 24, size: int = 14, window: int = 5, **how):
    return conv("depthwise", (2, channels, size, size + 1), channels, (window, window), groups=channels, **how)


def config(columns: int, lanes: int, rows: int) -> Config:
    return {"rows": rows, "columns": columns, "lanes": lanes}


@pytest.mark.parametrize(
    "program", [depthwise(), depthwise(33, stride=2), depthwise(window=7, to="output")], ids=["5x5", "5x5/2", "7x7"]
)
def test_supports(program) -> None:
    assert KERNEL.supports(program.ops[0], program, ARCH) is None


@pytest.mark.parametrize(
    "program, arch, reason",
    [
        (depthwise(), "sm_61", "no Tensor Core instruction"),
        (depthwise(), "sm_70", "no Tensor Core instruction"),
        (program_of("conv_groups_4"), "sm_80", "no depthwise convolution"),
        (depthwise(dtype=DType.F32), "sm_80", "float32"),
        (depthwise(dilation=2), "sm_80", "5×5"),
        (depthwise(window=9, size=20), "sm_80", "9×9"),
    ],
    ids=["sm_61", "sm_70", "groups", "fp32", "dilated", "7x7/2"],
)
def test_says_why_not(program, arch: str, reason: str) -> None:
    assert reason in KERNEL.supports(program.ops[0], program, ARCHS[arch])


# Extents that fill no tile, bands that end beyond the image, channels that fill no warp, every tile.
CASES = [
    (conv("5x5", (1, 12, 5, 6), 12, (5, 5), groups=12, ep="bias residual"), 3),
    (conv("5x5/2", (2, 8, 7, 5), 8, (5, 5), stride=2, groups=8, ep="bias"), 3),
    (conv("7x7", (1, 8, 4, 3), 8, (7, 7), groups=8, to="odd_tail"), 4),
]
VARIANTS = [
    (program, config(*tile, rows=rows))
    for program, rows in CASES
    for tile in TILES[(program.tensors["w"].shape[2],) * 2, program.ops[0].strides[0]]
]


@pytest.mark.parametrize("program, chosen", VARIANTS, ids=[f"{p.ops[0].nodes[0]} {[*c.values()]}" for p, c in VARIANTS])
def test_values(program, chosen: Config) -> None:
    check(KERNEL, program, chosen)


@pytest.mark.parametrize("arch, number", usually([("sm_75", 4), ("sm_80", 1), ("sm_90a", 2)]))
def test_compiles(arch: str, number: int) -> None:
    """For each of the instructions, another tile"""
    (taps, stride), tile = [(filters, tile) for filters, tiles in TILES.items() for tile in tiles][number]
    program = depthwise(window=taps[0], size=20, stride=stride, ep="bias silu")
    (launch,) = KERNEL.work(program.ops[0], program, config(*tile, rows=4), ARCHS[arch]).launches
    assert resources(launch.code, ARCHS[arch]).stack == 0
