"""Depthwise convolution of bytes on Tensor Cores: where it applies, values thread by thread and of its PTX, code."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tccompile.arch import ARCHS
from tccompile.emit.compile import resources
from tccompile.ir.program import Program
from tccompile.ir.types import DType
from tccompile.ir.weights import Literal
from tccompile.kernels.depthwise_bytes import TILES, DepthwiseBytes
from tests.gpu.cases import depthwise_of_bytes, of_8_bits, program_of
from tests.kernels import machine
from tests.kernels.support import ARCH, check
from tests.tiers import thorough, usually

KERNEL = DepthwiseBytes()
U8, I8, F16, F32 = DType.U8, DType.I8, DType.F16, DType.F32


def depthwise(
    x: tuple[int, ...] = (1, 16, 9, 7), window: int = 3, kinds: tuple[DType, ...] = (U8, I8, U8), stride: int = 1
) -> Program:
    return depthwise_of_bytes(f"{window}/{stride}", x, (window,) * (len(x) - 2), kinds, stride)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "program, arch, reason",
    [
        (depthwise(), "sm_75", "16 rows and 8 columns of bytes"),
        (depthwise(kinds=(U8, F16, U8)), "sm_80", "float16 to uint8"),
        (depthwise(kinds=(U8, I8, F32)), "sm_80", "to float32"),
        (depthwise((1, 16, 9, 7), 7, stride=2), "sm_80", "its filter is 7×7"),
        (depthwise((1, 16, 30), 9), "sm_80", "its filter is 1×9"),
        (of_8_bits("exact", (1, 16, 5, 5), 16, (3, 3), groups=16), "sm_80", "to int32"),
        (program_of("s8_conv"), "sm_80", "no depthwise convolution"),
    ],
    ids=["sm_75", "weights in halves", "fp32", "7x7/2", "1x9", "sums", "dense"],
)
def test_says_why_not(program: Program, arch: str, reason: str) -> None:
    assert reason in str(KERNEL.supports(program.ops[0], program, ARCHS[arch]))


def test_needs_channels_in_vectors() -> None:
    program = depthwise()
    moved = {**program.tensors, "x": replace(program.tensors["x"], offset=4)}
    assert "aligned vectors" in str(KERNEL.supports(program.ops[0], replace(program, tensors=moved), ARCH))


# Channels that fill no vector, rectangles that reach over the edges, and octets of them over images.
CASES = {
    "3x3": (depthwise((3, 40, 5, 7)), {"rows": 2, "lanes": 16}),
    "3x3, halves": (depthwise((2, 24, 6, 5), kinds=(I8, I8, F16)), {"rows": 4, "lanes": 8}),
    "3x3/2": (depthwise((2, 48, 9, 8), kinds=(I8, I8, F16), stride=2), {"rows": 2, "lanes": 16}),
    "3x3/2, few channels": (depthwise((1, 5, 7, 9), stride=2), {"rows": 4, "lanes": 8}),
    "5x5": (depthwise((1, 20, 6, 9), 5, (I8, I8, I8)), {"rows": 4, "lanes": 8}),
    "5x5/2": (depthwise((2, 16, 11, 6), 5, stride=2), {"rows": 2, "lanes": 8}),
    "7x7": (depthwise((1, 8, 6, 9), 7, (U8, I8, F16)), {"rows": 4, "lanes": 8}),
    "a line": (depthwise((2, 40, 21), 5), {"rows": 1, "lanes": 8}),
}


@pytest.mark.parametrize("program, config", CASES.values(), ids=CASES)
def test_values(program: Program, config: dict[str, int]) -> None:
    check(KERNEL, program, config)


@pytest.mark.parametrize("case", usually(["3x3", "3x3, halves"], "3x3"))
def test_values_of_the_ptx(case: str) -> None:
    program, config = CASES[case]
    check(KERNEL, program, config, arch=ARCHS["sm_90a"], run=machine.run)


def test_the_largest_sums_are_exact() -> None:
    """All bytes are 255, and all weights -127: a sum of 49 is beyond 2^20."""
    program = depthwise((1, 8, 8, 7), 7, (U8, I8, F16))
    most = {name: Literal(np.full(program.tensors[name].shape, value)) for name, value in (("x", 255), ("w", -127))}
    check(KERNEL, replace(program, constants={**program.constants, **most}), {"rows": 1, "lanes": 8})


@thorough
@pytest.mark.parametrize("arch", ["sm_80", "sm_89", "sm_90a", "sm_120"])
def test_compiles(arch: str) -> None:
    """On each generation the largest tile of another filter."""
    (window, stride), tiles = list(TILES.items())[["sm_80", "sm_89", "sm_90a", "sm_120"].index(arch)]
    program = depthwise((2, 32, 30, 30), window, stride=stride)
    rows, lanes = max(tiles)
    (launch,) = KERNEL.work(program.ops[0], program, {"rows": rows, "lanes": lanes}, ARCHS[arch]).launches
    assert resources(launch.code, ARCHS[arch]).stack == 0
