"""The greedy part of NonMaxSuppression: values thread by thread and by their PTX, code for every generation."""

from __future__ import annotations

import pytest

from tccompile.arch import ARCHS
from tccompile.emit.compile import resources
from tccompile.kernels.suppress import SuppressKernel
from tests.gpu.cases import program_of
from tests.kernels import machine
from tests.kernels.support import check
from tests.tiers import APART, thorough, usually

KERNEL = SuppressKernel()
CASES = ("suppress", "suppress_classes", "suppress_all")


@pytest.mark.parametrize("case", usually(CASES, "suppress"))
def test_values(case: str) -> None:
    check(KERNEL, program_of(case), once=False)


@thorough
@pytest.mark.parametrize("case", CASES)
def test_values_of_code(case: str) -> None:
    check(KERNEL, program_of(case), once=False, arch=ARCHS["sm_90a"], run=machine.run)


@thorough
@pytest.mark.parametrize("arch", APART)
def test_compiles(arch: str) -> None:
    program = program_of("suppress_classes")
    *_, launch = KERNEL.work(program.ops[0], program, {}, ARCHS[arch]).launches
    assert resources(launch.code, ARCHS[arch]).stack == 0
