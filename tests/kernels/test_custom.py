"""Kernels of users' own operators: values by their PTX, on generations with Tensor Cores and without."""

from __future__ import annotations

import pytest

from tccompile.arch import ARCHS
from tccompile.kernels.custom import CustomKernel
from tests.gpu.cases import CASES, program_of
from tests.kernels import machine
from tests.kernels.support import check
from tests.tiers import thorough, usually

KERNEL = CustomKernel()
CUSTOM = [case for case in CASES if case.startswith("custom")]


@pytest.mark.parametrize("case", usually(CUSTOM, "custom_tensor_cores", "custom_outputs"))
def test_values(case: str) -> None:
    check(KERNEL, program_of(case), arch=ARCHS["sm_80"], run=machine.run, once=False)


@thorough
@pytest.mark.parametrize("arch", ["sm_61", "sm_90a"])
def test_other_generations(arch: str) -> None:
    """One without Tensor Cores has a kernel of its own; on another a kernel waits before it reads anything."""
    check(KERNEL, program_of("custom_tensor_cores_output"), arch=ARCHS[arch], run=machine.run, once=False)
