"""Depthwise convolution: where it applies, how pixels and channels are shared out, code for every generation."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tccompile.arch import ARCHS
from tccompile.emit import resources
from tccompile.expr import DType
from tccompile.kernels.depthwise import THREADS, Depthwise
from tccompile.kernels.spec import I32
from tests.gpu.cases import conv, program_of
from tests.kernels.support import ARCH

KERNEL = Depthwise()


def depthwise(channels: int = 24, size: int = 14, window: int = 3, **how):
    return conv("depthwise", (2, channels, size, size + 1), channels, (window, window), groups=channels, **how)


@pytest.mark.parametrize("program", [depthwise(), depthwise(33), depthwise(to="output"), depthwise(dtype=DType.F32)], ids=str)
def test_supports(program) -> None:
    assert KERNEL.supports(program.ops[0], program, ARCH) is None


@pytest.mark.parametrize(
    "program, reason",
    [
        (program_of("conv_groups_4"), "no depthwise convolution"),
        (program_of("conv_multiplier"), "no depthwise convolution"),
        (depthwise(dtype=DType.BF16), "bfloat16"),
    ],
    ids=["groups", "multiplier", "bf16"],
)
def test_says_why_not(program, reason: str) -> None:
    assert reason in KERNEL.supports(program.ops[0], program, ARCH)


def test_needs_channels_in_vectors() -> None:
    program = depthwise()
    x = program.tensors["x"]
    moved = {**program.tensors, "x": replace(x, strides=(x.strides[0], x.strides[1], x.strides[2], x.strides[3] + 1))}
    assert "aligned vectors" in KERNEL.supports(program.ops[0], replace(program, tensors=moved), ARCH)


@pytest.mark.parametrize("channels, pixels", [(24, 1), (24, 2), (24, 4), (33, 4), (8, 2)])
def test_threads_cover_the_output(channels: int, pixels: int) -> None:
    program = depthwise(channels, 13)
    (launch,) = KERNEL.work(program.ops[0], program, {"pixels": pixels}, ARCH).launches
    n, _, p, q = program.tensors["y"].shape
    total = launch.args[2]
    assert total == I32(n * p * -(-q // pixels) * -(-channels // 8))
    assert 0 <= launch.grid[0] * THREADS - total.value < THREADS


def test_shares_columns_of_common_filters_only() -> None:
    def params(**how) -> dict:
        program = depthwise(**how)
        (launch,) = KERNEL.work(program.ops[0], program, {"pixels": 2}, ARCH).launches
        return dict(launch.code.params)

    assert (params(window=5)["size"], params(window=5)["stride"]) == (5, 1)
    assert (params(stride=2)["size"], params(stride=2)["stride"]) == (3, 2)
    assert params(dilation=2)["size"] == params(stride=3)["size"] == params(window=9, size=20)["size"] == 0


def test_a_batch_takes_more_pixels_a_thread() -> None:
    def best(batch: int) -> int:
        program = conv("depthwise", (batch, 96, 56, 56), 96, (3, 3), groups=96)
        arch = ARCHS["sm_90a"]
        configs = list(KERNEL.configs(program.ops[0], program, arch))
        return min(configs, key=lambda c: KERNEL.cost(program.ops[0], program, c, arch))["pixels"]

    assert best(1) < best(64)


@pytest.mark.parametrize("arch", ARCHS)
def test_compiles(arch: str) -> None:
    for program in (depthwise(20, stride=2, ep="bias silu"), depthwise(window=9, size=20)):
        (launch,) = KERNEL.work(program.ops[0], program, {"pixels": 4 if arch == "sm_61" else 2}, ARCHS[arch]).launches
        assert resources(launch.code, ARCHS[arch]).stack == 0
