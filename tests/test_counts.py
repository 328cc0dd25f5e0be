"""What a plan says of outputs whose extents the data decide: written and read again, and held to rules."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tccompile.errors import PlanError
from tccompile.ir.program import Count
from tccompile.pipeline import without_code
from tccompile.plan.file import Plan, from_bytes, to_bytes
from tccompile.plan.rules import check_plan
from tccompile.runtime.session import Session
from tests.rewrites.common import Net


def found() -> Plan:
    """Where x (3, 4) is not zero, (2, K), and x itself."""
    net = Net(x=(3, 4))
    net.out(net("NonZero", "x"), net("Neg", "x"))
    return without_code(net.model(), precision="fp32")


def test_a_plan_is_read_as_it_was_written() -> None:
    plan = from_bytes(to_bytes(found()))
    program = plan.entries[0].program
    assert program.counts == (Count(program.outputs[2], 12, "node 'n0' (NonZero)", {program.outputs[0]: (1,)}),)
    assert program.results == program.outputs[:2]
    with Session(plan, "cpu") as session:
        given = np.float32([[0, 0, 0, 2], [0, 3, 0, 0], [0, 0, 0, 0]])
        np.testing.assert_array_equal(session.run(None, {"x": given})[0], [[0, 1], [3, 1]])


def test_entries_have_the_same_counts() -> None:
    """Of three elements as many are found as there are, of thirty no more than five."""
    net = Net(x=("n",))
    there = net("Compress", "x", net("Greater", "x", np.float32(0)), axis=0)
    values, at = net("TopK", there, net("Min", net("Shape", there), np.array([5])), outputs=2)
    model = net.out(values, at, there).model()
    few, many = (without_code(model, {"x": (n,)}).entries[0].program for n in (3, 30))
    assert few.outputs == many.outputs and [c.cuts for c in few.counts] == [c.cuts for c in many.counts]
    assert [[count.limit for count in program.counts] for program in (few, many)] == [[3, 3, 3], [5, 5, 30]]


BROKEN = {
    "is no output": {"tensor": "x"},
    "is not one int64": {"tensor": "t1"},
    "has a limit of -1": {"limit": -1},
    "with a limit of 11": {"limit": 11},
    "which is no result": {"cuts": {"x": (0,)}},
    "along axis 2": {"cuts": {"t0": (2,)}},
    "along axis 0": {"cuts": {"t0": (1, 0)}},
    "along axis 1": {"cuts": {"t0": (1, 1)}},
}


@pytest.mark.parametrize("message", BROKEN)
def test_a_count_that_breaks_a_rule_is_refused(message: str) -> None:
    plan = found()
    (entry,) = plan.entries
    (count,) = entry.program.counts
    program = replace(entry.program, counts=(replace(count, **BROKEN[message]),))
    with pytest.raises(PlanError, match=message):
        check_plan(replace(plan, entries=(replace(entry, program=program),)))


def test_two_counts_need_two_outputs() -> None:
    plan = found()
    (entry,) = plan.entries
    program = replace(entry.program, counts=entry.program.counts * 2)
    with pytest.raises(PlanError, match="several counts in one output"):
        check_plan(replace(plan, entries=(replace(entry, program=program),)))
