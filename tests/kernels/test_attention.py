"""Attention: the plain kernel thread by thread, what each refuses, code for every generation."""

from __future__ import annotations

import pytest

from tccompile.arch import ARCHS
from tccompile.emit import resources
from tccompile.expr import DType
from tccompile.kernels.attention import AttentionKernel
from tests.gpu.cases import attention, program_of
from tests.kernels.support import ARCH, check

KERNEL = AttentionKernel()

TINY = {
    "masked": attention("masked", (2, 2, 3, 5), 36, e=9, mask=(2, 1, 1, 36), ep="bias"),
    "bool, causal": attention("bool, causal", (1, 2, 34, 8), 35, mask=(1, 2, 34, 35), kind=DType.BOOL, causal=-1),
    "grouped, packed heads": attention("grouped", (1, 4, 4, 40), 6, e=3, share=2, dtype=DType.F32, to="output"),
}


@pytest.mark.parametrize("case", TINY)
def test_values(case: str) -> None:
    check(KERNEL, TINY[case])


def test_says_why_not() -> None:
    program = attention("integers", (1, 1, 4, 8), 4, dtype=DType.I32)
    assert "no float type" in (KERNEL.supports(program.ops[0], program, ARCH) or "")


@pytest.mark.parametrize("arch", ["sm_61", "sm_90a"])
def test_compiles(arch: str) -> None:
    program = program_of("attention_mask_causal")
    (launch,) = KERNEL.work(program.ops[0], program, {}, ARCHS[arch]).launches
    assert resources(launch.code, ARCHS[arch]).stack == 0
