"""Two products in one launch: values thread by thread, where the kernel applies, its code, weights asked for in time."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tccompile.arch import ARCHS
from tccompile.emit import resources
from tccompile.expr import DType
from tccompile.kernels.mlp import MlpKernel, lines
from tccompile.program import Mlp
from tests.gpu.cases import mlp, program_of
from tests.kernels.support import ARCH, cases_of, check

KERNEL = MlpKernel()


@pytest.mark.parametrize("case", [case for case in cases_of(Mlp) if case != "mlp_large"])
def test_values(case: str) -> None:
    check(KERNEL, program_of(case))


def test_says_why_not() -> None:
    program = mlp("many", (1, 40), 300, 20)
    assert "it takes 256 at most" in str(KERNEL.supports(program.ops[0], program, ARCH))
    program = mlp("few", (1, 40), 30, 20)
    computed = replace(program, constants={n: r for n, r in program.constants.items() if n != "v"})
    assert "v is computed" in str(KERNEL.supports(program.ops[0], computed, ARCH))
    ints = replace(program, tensors={**program.tensors, "x": replace(program.tensors["x"], dtype=DType.I32)})
    assert "x is int32" in str(KERNEL.supports(program.ops[0], ints, ARCH))


@pytest.mark.parametrize("case", ["mlp_large", "mlp_200"])
@pytest.mark.parametrize("arch", ["sm_61", "sm_90a"])
def test_compiles_without_spills(arch: str, case: str) -> None:
    program = program_of(case)
    (launch,) = KERNEL.work(program.ops[0], program, {}, ARCHS[arch]).launches
    assert resources(launch.code, ARCHS[arch]).stack == 0


def test_weights_are_asked_for_before_it_waits() -> None:
    """From sm_90 on; x, which the steps before write, after that."""
    program = program_of("mlp")
    (launch,) = KERNEL.work(program.ops[0], program, {}, ARCHS["sm_90a"]).launches
    early = lines(dict(launch.code.params), early=True)
    wait = early.index("        wait_for_earlier_grids()")
    where = {name: [i for i, line in enumerate(early) if f"read_{name}(" in line] for name in "xwv"}
    assert min(where["x"]) > wait > max(where["w"]) and wait > min(where["v"])
    assert not any("grids" in line for line in lines(dict(launch.code.params), early=False))
