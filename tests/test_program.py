"""Every kind of op, wherever ops are told apart."""

from __future__ import annotations

import pytest

from tccompile.ir.limits import check_program
from tccompile.ir.ops import OPS, Op
from tccompile.ir.program import Program
from tests.gpu.cases import CASES, program_of


@pytest.fixture(scope="module")
def programs() -> list[Program]:
    return list(map(program_of, CASES))


@pytest.mark.parametrize("kind", OPS)
def test_an_op_passes_its_rule_and_all_its_tensors_can_be_renamed(programs: list[Program], kind: type[Op]) -> None:
    """So does what each reads, by the types of its fields: a tensor that they do not say is not renamed, and breaks the rule."""
    mine = [p for p in programs if any(type(op) is kind for op in p.ops)]
    assert mine
    for program in mine:
        check_program(program)
        there = {name: f"{name}'" for name in program.tensors}
        back = {new: name for name, new in there.items()}
        for op in program.ops:
            other = op.renamed(there)
            assert other.y == there[op.y] and other.inputs == tuple(there[name] for name in op.inputs)
            assert other.renamed(back) == op
