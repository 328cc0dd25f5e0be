"""`tcinspect --diff`: what two plans of a model differ in, and nothing else."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import numpy as np
import onnx
import pytest
from click.testing import CliRunner

from tccompile.cli.commands import tcinspect
from tccompile.cli.plan_diff import changes, text_of
from tccompile.plan.file import Plan
from tccompile.schedule.timings import NO_TIMINGS
from tccompile.verify.budgets import expected_time
from tests.plans import without_code
from tests.rewrites.common import Net


def network(scale: float = 1.0, last: str = "Relu") -> onnx.ModelProto:
    net = Net(x=(16, 64))
    h = net("Relu", net("MatMul", "x", net.normal(64, 64) * np.float32(scale)))
    return net.out(net(last, net("MatMul", h, net.normal(64, 32)))).model()


@pytest.fixture(scope="module")
def plan() -> Plan:
    return without_code(network(), ("sm_80", "sm_90a"))


def test_the_same_plan_differs_in_nothing(plan: Plan) -> None:
    assert changes(plan, without_code(network(), ("sm_80", "sm_90a"))) == []
    assert text_of([]) == "the plans have the same steps, code sizes and weights"


def test_weights_that_changed(plan: Plan) -> None:
    (change,) = changes(plan, without_code(network(2.0), ("sm_80", "sm_90a")))
    assert change.where.startswith("weights ") and change.old.startswith("float16 64×64, SHA-256 ") and change.old != change.new


def test_precision_changes_what_steps_write(plan: Plan) -> None:
    found = changes(plan, without_code(network(), ("sm_80", "sm_90a"), precision="fp32"))
    first = [c for c in found if c.where == "sm_90a, x 16×64, n0 + n1" and c.what == "writes"]
    assert [(c.old, c.new) for c in first] == [("float16", "float32")]
    assert {"sm_80, x 16×64, n0 + n1", "sm_90a, x 16×64, n2 + n3"} <= {c.where for c in found}


def test_expected_times(plan: Plan) -> None:
    """A network of twice the rows takes longer; the same one as long."""
    took = partial(expected_time, timings=NO_TIMINGS)
    assert changes(plan, without_code(network(), ("sm_80", "sm_90a")), took) == []
    found = changes(plan, without_code(network(last="Exp"), ("sm_80", "sm_90a"), precision="fp32"), took)
    times = [c for c in found if c.what == "expected time, µs"]
    assert [c.where for c in times] == ["sm_80, x 16×64", "sm_90a, x 16×64"] and all(c.new > c.old > 0 for c in times)


def test_steps_are_matched_by_most_of_their_nodes(plan: Plan) -> None:
    """Another function behind the last product: one step is another, and no step has gone or come."""
    found = changes(plan, without_code(network(last="Exp"), ("sm_80", "sm_90a")))
    assert not [c for c in found if c.what == "step"]
    net = Net(x=(16, 64))
    h = net("Relu", net("MatMul", "x", net.normal(64, 64)))
    one = without_code(net.out(net("Relu", h)).model(), ("sm_80",))
    found = changes(plan, one)
    gone = [c for c in found if c.what == "step"]
    assert [(c.where, c.old is None, c.new) for c in gone] == [("sm_80, x 16×64, n2 + n3", False, None)]
    assert ("sm_90a, x 16×64", "steps") in [(c.where, c.what) for c in found]  # the new one has no code for it


def test_another_shape_is_another_entry(plan: Plan) -> None:
    net = Net(x=("n", 64))
    net.out(net("Relu", net("MatMul", "x", net.normal(64, 64))))
    one, other = (without_code(net.model(), ("sm_80",), {"x": (n, 64)}) for n in (1, 2))
    found = {(c.where, c.old is None, c.new is None) for c in changes(one, other) if c.what == "steps"}
    assert found == {("sm_80, x 1×64", False, True), ("sm_80, x 2×64", True, False)}


def test_the_command(plan: Plan, tmp_path: Path) -> None:
    plan.save(tmp_path / "old.plan")
    without_code(network(), ("sm_80", "sm_90a"), precision="fp32").save(tmp_path / "new.plan")
    command = [str(tmp_path / "new.plan"), "--diff", str(tmp_path / "old.plan")]
    result = CliRunner().invoke(tcinspect, command)
    assert result.exit_code == 0 and "  writes: float16 → float32" in result.stdout
    found = json.loads(CliRunner().invoke(tcinspect, [*command, "--json"]).stdout)["changes"]
    assert {"where": "sm_90a, x 16×64, n0 + n1", "what": "writes", "old": "float16", "new": "float32"} in found
    assert CliRunner().invoke(tcinspect, [*command, "--rebuild"]).exit_code == 2
