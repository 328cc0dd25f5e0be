"""Two products in one launch: values thread by thread, where the kernel applies, its code."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tccompile.arch import ARCHS
from tccompile.emit.compile import resources
from tccompile.errors import PlanError
from tccompile.ir.expr import load
from tccompile.ir.limits import check_program
from tccompile.ir.ops import Mlp
from tccompile.ir.types import DType
from tccompile.kernels.mlp import MlpKernel
from tests.gpu.cases import mlp, program_of
from tests.kernels.support import ARCH, cases_of, check
from tests.tiers import usually

KERNEL = MlpKernel()


@pytest.mark.parametrize("case", [case for case in cases_of(Mlp) if case != "mlp_large"])
def test_values(case: str) -> None:
    check(KERNEL, program_of(case))


def test_says_why_not() -> None:
    program = mlp("many", (1, 40), 300, 20)
    assert "it takes 256 at most" in str(KERNEL.supports(program.ops[0], program, ARCH))
    program = mlp("few", (1, 40), 30, 20)
    ints = replace(program, tensors={**program.tensors, "x": replace(program.tensors["x"], dtype=DType.I32)})
    assert "x is int32" in str(KERNEL.supports(program.ops[0], ints, ARCH))


@pytest.mark.parametrize("case", usually(["mlp_large", "mlp_200"], "mlp_200"))
@pytest.mark.parametrize("arch", usually(["sm_61", "sm_90a"], "sm_61"))
def test_compiles_without_spills(arch: str, case: str) -> None:
    program = program_of(case)
    (launch,) = KERNEL.work(program.ops[0], program, {}, ARCHS[arch]).launches
    assert resources(launch.code, ARCHS[arch]).stack == 0


def test_its_operations_are_those_of_both_products() -> None:
    program = program_of("mlp_small")  # 3 vectors of 32, 8 hidden units, 35 results
    assert program.products(program.ops[0]) == 2 * 3 * (32 * 8 + 8 * 35)


@pytest.mark.parametrize("change", [{"v": "w"}, {"w": "v"}, {"b": "x"}, {"x": "w"}, {"hidden": load(0)}], ids=str)
def test_a_plan_whose_shapes_do_not_fit_is_refused(change: dict[str, Any]) -> None:
    program = program_of("mlp_two_rows")
    with pytest.raises(PlanError, match=r"do not fit its parameters|has no view 0"):
        check_program(replace(program, ops=(replace(program.ops[0], **change),)))
