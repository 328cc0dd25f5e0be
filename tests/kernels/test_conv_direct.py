"""Direct grouped convolution: every layout, how channels are shared out, code for every generation."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tccompile.arch import ARCHS
from tccompile.emit.compile import resources
from tccompile.ir.ops import Conv
from tccompile.ir.types import DType
from tccompile.kernels.conv_direct import THREADS, ConvDirect
from tests.gpu.cases import conv, program_of
from tests.kernels.support import ARCH, cases_of, check
from tests.tiers import APART, thorough, usually

KERNEL = ConvDirect()


@pytest.mark.parametrize("case", [c for c in cases_of(Conv) if "s8_" not in c])
def test_supports_every_convolution(case: str) -> None:
    program = program_of(case)
    assert KERNEL.supports(program.ops[0], program, ARCH) is None


@pytest.mark.parametrize(
    "case",
    usually(["conv_groups_odd", "conv_groups_1x1", "conv_multiplier", "depthwise_u8_1d"], "conv_groups_1x1"),
)
@pytest.mark.parametrize("pixels", [1, 4])
def test_values(case: str, pixels: int) -> None:
    check(KERNEL, program_of(case), {"pixels": pixels})


@pytest.mark.parametrize("pixels", [1, 4])
def test_values_of_odd_sizes(pixels: int) -> None:
    """Groups of 5 and 7 channels of float32, a window that is no square, stride and dilation."""
    program = conv("odd", (2, 15, 7, 6), 21, (3, 2), stride=2, dilation=2, groups=3, dtype=DType.F32)
    check(KERNEL, program, {"pixels": pixels})


def test_says_why_not() -> None:
    program = program_of("conv_groups_4")
    y = program.tensors["y"]
    padded = replace(y, padded=(y.padded[0], y.padded[1], y.padded[2], y.padded[3] + 2))
    program = replace(program, tensors={**program.tensors, "y": padded})
    assert "padded along axis 3" in KERNEL.supports(program.ops[0], program, ARCH)


@pytest.mark.parametrize(
    "inputs, outputs, groups, lanes, vector",
    [(128, 128, 32, 4, 4), (64, 96, 8, 4, 8), (24, 48, 6, 8, 4), (15, 21, 3, 1, 1), (12, 24, 12, 2, 1), (16, 16, 1, 8, 8)],
)
def test_channels_of_a_thread_are_of_one_group(inputs: int, outputs: int, groups: int, lanes: int, vector: int) -> None:
    program = conv("grouped", (1, inputs, 7, 9), outputs, (3, 3), groups=groups)
    for config in KERNEL.configs(program.ops[0], program, ARCH):
        (launch,) = KERNEL.work(program.ops[0], program, config, ARCH).launches
        params = dict(launch.code.params)
        assert (params["lanes"], params["vector"]) == (lanes, vector)
        across = launch.args[2].value
        rows = launch.grid[0] * THREADS // across * config["pixels"]
        assert rows >= 63 and launch.grid[1] * across * lanes >= program.tensors["y"].padded[1]


def test_reads_single_channels_where_they_are_no_neighbours() -> None:
    program = conv("grouped", (1, 16, 7, 9), 16, (3, 3), groups=2)
    rows = replace(program.tensors["x"], padded=(1, 16, 7, 9), strides=(1008, 63, 9, 1))
    program = replace(program, tensors={**program.tensors, "x": rows})
    (launch, *_) = KERNEL.work(program.ops[0], program, {"pixels": 1}, ARCH).launches
    assert dict(launch.code.params)["vector"] == 1


@thorough
@pytest.mark.parametrize("arch", APART)
def test_compiles(arch: str) -> None:
    for program, pixels in (
        (program_of("conv_groups_32"), 4),
        (conv("grouped", (1, 15, 9, 9), 21, (3, 3), groups=3, dtype=DType.F32), 1),
    ):
        (launch,) = KERNEL.work(program.ops[0], program, {"pixels": pixels}, ARCHS[arch]).launches
        assert resources(launch.code, ARCHS[arch]).stack == 0
