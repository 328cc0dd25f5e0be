"""Every kind of op, wherever ops are told apart."""

from __future__ import annotations

import pytest

from tccompile.ir.expr import coord, element
from tccompile.ir.limits import check_program
from tccompile.ir.ops import OPS, Op, Resize, Rnn, Scatter
from tccompile.ir.ops.op import Ref
from tccompile.ir.program import Program
from tests.gpu.cases import program_of
from tests.kernels.support import few_of


@pytest.fixture(scope="module")
def programs() -> list[Program]:
    return [program_of(case) for kind in OPS for case in few_of(kind)]


@pytest.mark.parametrize("wrong", [str, tuple[str, ...], str | None, Ref | int, dict[str, int]])
def test_a_field_whose_type_does_not_say_what_it_holds_is_refused(wrong: object) -> None:
    """A tensor's name in a plain str would be no operand: nobody would rename it, or ask whether it is written before."""
    with pytest.raises(TypeError, match=r"Sum\.terms: .* does not say what it holds"):
        type("Sum", (Op,), {"__annotations__": {"terms": wrong}})


def test_fields_that_name_tensors_are_operands_in_their_order() -> None:
    index = (coord(0), element("rows", [coord(0)], 5))
    op = Scatter(nodes=("s",), y="y", x="x", updates="u", at=index, combine="add")
    assert op.operands == ("x", "u", "rows") and op.integers == () and op.multiplied == ()
    resize = Resize(nodes=("r",), y="y", x="x", axes=(2, 3), index=("i0", "i1"), weights=("w0", "w1"))
    assert resize.operands == ("x", "i0", "i1", "w0", "w1") and resize.integers == ("i0", "i1")
    rnn = Rnn(nodes=("n",), y="y", x="x", r="r", cell="rnn", backward=(False,), functions=(), lengths="n", h="h")
    assert rnn.operands == ("x", "r", "h", "n") and rnn.integers == ("n",) and rnn.multiplied == ("r",)


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
