"""Resampling, simulated and compiled."""

from __future__ import annotations

import pytest

from tccompile.arch import ARCHS
from tccompile.emit.compile import resources
from tccompile.ir.ops import Resize
from tccompile.ir.types import DType
from tccompile.kernels.resize import ResizeKernel
from tests.gpu.cases import program_of, resize
from tests.kernels.support import cases_of, check
from tests.tiers import APART, thorough

KERNEL = ResizeKernel()


@pytest.mark.parametrize("case", cases_of(Resize))
def test_values(case: str) -> None:
    check(KERNEL, program_of(case))


@pytest.mark.parametrize(
    "how",
    [
        {"x": (1, 12, 5, 6), "axes": {2: (9, 3), 3: (8, 7)}, "ep": "bias relu"},  # too many taps to unroll
        {"x": (1, 5, 4, 6), "axes": {1: (9, 2), 2: (5, 2), 3: (7, 1)}},  # channels too: no vectors
        {"x": (3, 20), "axes": {1: (33, 2)}, "to": "slice"},
        {"x": (6, 20), "axes": {0: (9, 2)}, "to": "output", "dtype": DType.F32},
        {"x": (2, 3, 4, 5, 6), "axes": {1: (5, 2), 3: (7, 2)}, "dtype": DType.F32},
    ],
    ids=str,
)
def test_other_values(how: dict) -> None:
    check(KERNEL, resize("resize", **how))


@thorough
@pytest.mark.parametrize("arch", APART)
def test_compiles(arch: str) -> None:
    program = program_of("resize_linear")
    (op,) = program.ops
    (config,) = KERNEL.configs(op, program, ARCHS[arch])
    (launch,) = KERNEL.work(op, program, config, ARCHS[arch]).launches
    assert resources(launch.code, ARCHS[arch]).stack == 0
