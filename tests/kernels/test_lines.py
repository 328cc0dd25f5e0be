"""Scatter, TopK and Cumulate, simulated and compiled."""

from __future__ import annotations

import numpy as np
import pytest

from tccompile.arch import ARCHS
from tccompile.emit.compile import resources
from tccompile.ir.ops import Cumulate, Scatter, TopK
from tccompile.ir.reference import compute
from tccompile.kernels.cumulate import CumulateKernel
from tccompile.kernels.scatter import ScatterKernel
from tccompile.kernels.spec import I32, Kernel
from tccompile.kernels.top_k import TopKKernel
from tests.gpu.cases import program_of
from tests.kernels.support import ARCH, cases_of, check
from tests.tiers import APART, thorough

KERNELS: dict[type, Kernel] = {Scatter: ScatterKernel(), TopK: TopKKernel(), Cumulate: CumulateKernel()}
CASES = [(kind, case) for kind in KERNELS for case in cases_of(kind)]


@pytest.mark.parametrize(("kind", "case"), [pytest.param(kind, case, id=case) for kind, case in CASES])
def test_values(kind: type, case: str) -> None:
    check(KERNELS[kind], program_of(case), once=False)


def test_sequences_are_shared_where_threads_are_few() -> None:
    """A thread for each channel of each row, and buckets of places where that is not enough."""
    masks = {}
    for case in ("scatter_elements", "scatter_points"):
        program = program_of(case)
        (op,) = program.ops
        *_, launch = ScatterKernel().work(op, program, {}, ARCH).launches
        assert isinstance(launch.args[2], I32)
        masks[case] = launch.args[2].value
    assert masks == {"scatter_elements": 1, "scatter_points": 63}


def test_the_order_of_updates_is_theirs() -> None:
    """In the reference: 4 + 1 + 2 and 8 set twice, the last of them counts."""
    program = program_of("scatter_last_wins")
    (op,) = program.ops
    values = {name: recipe.values for name, recipe in program.constants.items()}  # type: ignore[union-attr]
    expected = values["x"].copy()
    for place, update in zip(values["i"], values["updates"], strict=True):
        expected[place] = update
    np.testing.assert_array_equal(compute(op, program, values), expected)


@thorough
@pytest.mark.parametrize("arch", APART)
def test_compiles(arch: str) -> None:
    others = [(TopK, "top_k_nhwc"), (Cumulate, "cumsum_nhwc")] if arch in ("sm_61", "sm_90a") else []
    for kind, case in [(Scatter, "scatter_rows"), *others]:
        program = program_of(case)
        *_, launch = KERNELS[kind].work(program.ops[0], program, {}, ARCH).launches
        assert resources(launch.code, ARCHS[arch]).stack == 0
