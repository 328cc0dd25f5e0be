"""Depthwise convolution of bytes by boxes of the copy engine: where it applies, values by its PTX, shared memory, code."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tccompile.arch import ARCHS
from tccompile.emit.compile import resources
from tccompile.ir.program import Program
from tccompile.ir.types import DType
from tccompile.kernels.depthwise_bytes_sm90 import CHOSEN, DepthwiseBytesSm90, tile_of
from tests.gpu.cases import depthwise_of_bytes
from tests.kernels import machine
from tests.kernels.support import check
from tests.tiers import thorough, usually

KERNEL, ARCH = DepthwiseBytesSm90(), ARCHS["sm_90a"]
U8, I8, F16 = DType.U8, DType.I8, DType.F16


def depthwise(x: tuple[int, ...], window: int = 3, kinds: tuple[DType, ...] = (U8, I8, U8), stride: int = 1) -> Program:
    return depthwise_of_bytes(f"{window}/{stride}", x, (window,) * (len(x) - 2), kinds, stride)  # type: ignore[arg-type]


def test_says_why_not() -> None:
    program = depthwise((1, 32, 9, 7))
    (op,) = program.ops
    assert "no tensor copy engine" in str(KERNEL.supports(op, program, ARCHS["sm_89"]))
    assert "made for sm_90a" in str(KERNEL.supports(op, program, ARCHS["sm_100"]))
    assert "model input or output" in str(KERNEL.supports(op, replace(program, inputs=("x",)), ARCH))
    moved = {**program.tensors, "x": replace(program.tensors["x"], offset=8)}
    assert "multiples of 16 bytes" in str(KERNEL.supports(op, replace(program, tensors=moved), ARCH))
    line = depthwise((1, 32, 9), 5)
    assert "along a line" in str(KERNEL.supports(line.ops[0], line, ARCH))


# Boxes over the edges of channels, rows, columns and images; rectangles that fill no octet, and several octets for a warp.
CASES = {
    "3x3": (depthwise((3, 48, 9, 13)), (32, 16, 8, 4, 2, 1, 1, 2)),
    "3x3, halves": (depthwise((2, 80, 5, 30), kinds=(I8, I8, F16)), (80, 16, 30, 4, 1, 1, 1, 2)),
    "3x3/2": (depthwise((2, 48, 13, 11), kinds=(I8, I8, U8), stride=2), (32, 16, 6, 4, 1, 1, 1, 2)),
    "side by side": (depthwise((3, 32, 7, 7)), (32, 16, 8, 7, 1, 2, 1, 2)),
    "5x5": (depthwise((1, 48, 8, 9), 5, (I8, I8, I8)), (48, 8, 10, 4, 2, 1, 1, 2)),
    "5x5/2": (depthwise((2, 16, 11, 14), 5, (U8, I8, F16), 2), (32, 8, 4, 4, 1, 1, 1, 2)),
    "7x7": (depthwise((1, 32, 7, 9), 7), (32, 8, 10, 4, 2, 1, 1, 2)),
}


@pytest.mark.parametrize("program, chosen", CASES.values(), ids=CASES)
def test_values(program: Program, chosen: tuple[int, ...]) -> None:
    check(KERNEL, program, {**dict(zip(CHOSEN, chosen, strict=True)), "held": 1}, arch=ARCH)


@pytest.mark.parametrize("case", usually(CASES, "3x3/2"))
def test_values_of_the_ptx(case: str) -> None:
    program, chosen = CASES[case]
    check(KERNEL, program, {**dict(zip(CHOSEN, chosen, strict=True)), "held": 1}, arch=ARCH, run=machine.run)


def test_two_blocks_fit_a_multiprocessor() -> None:
    program = depthwise((32, 144, 56, 56))
    configs = list(KERNEL.configs(program.ops[0], program, ARCH))
    assert configs and all(2 * (tile_of(program.ops[0], program, c).smem + 1024) <= ARCH.smem_sm for c in configs)


@thorough
@pytest.mark.parametrize("window, stride", [(3, 1), (3, 2), (5, 1), (5, 2), (7, 1)])
def test_compiles(window: int, stride: int) -> None:
    program = depthwise((8, 160, 28, 28), window, stride=stride)
    config = max(KERNEL.configs(program.ops[0], program, ARCH), key=lambda c: (c["channels"], c["rows"]))
    (launch,) = KERNEL.work(program.ops[0], program, config, ARCH).launches
    assert resources(launch.code, ARCH).stack == 0
