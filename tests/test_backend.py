"""ONNX's backend API, and ONNX's own node cases through it on the CPU engine; the page of operators that they make."""

from __future__ import annotations

import fnmatch
import re
from types import SimpleNamespace

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

import tccompile
from tccompile import backend
from tccompile.errors import InputError, UnsupportedError, UsageError
from tccompile.plan.file import Plan
from tests.backend import DIFFERENT, LISTED, OUT_OF_RANGE, REFUSED, cases, reason, verdict
from tests.networks import reference, relative_error
from tests.reference import ANEW, committed, operators
from tests.reference.operators import CLASSICAL, SEQUENCES, STANDARD
from tests.rewrites.common import Net
from tests.tiers import thorough, usually

PASSING = 1783
"""Of 1884 cases in onnx 1.23: they must not disappear unseen."""

SHARES = 32
"""Of the cases, every so-manieth."""


@pytest.fixture(scope="module")
def known() -> list:
    return cases()


@pytest.mark.parametrize("share", usually(range(SHARES), 0))
def test_every_case_passes_or_is_refused_for_a_stated_reason(known: list, share: int) -> None:
    mine = known[share::SHARES]
    found = [verdict(case) for case in mine]
    problems = [problem for _, problem in found if problem]
    assert not problems, "\n".join(problems)
    expected = sum(reason(case.name) is None for case in mine)
    assert sum(passed for passed, _ in found) >= (expected if LISTED else 0.9 * expected)


def test_every_reason_is_somebody_s(known: list) -> None:
    names = {case.name for case in known}
    patterns = [p for group in REFUSED.values() for p in group]
    assert len(patterns) == len(set(patterns))
    assert not LISTED or all(any(fnmatch.fnmatch(n, p) for n in names) for p in patterns)
    assert not LISTED or set(DIFFERENT) <= names
    assert not LISTED or sum(reason(name) is None for name in names) == PASSING


KINDS = ["relu", "softmax", "matmul", "conv_with", "reduce_mean", "layer_normalization", "gelu"]


@pytest.mark.parametrize("kind", usually(KINDS, "softmax", "matmul", "conv_with"))
def test_some_cases_in_half_precision(known: list, kind: str) -> None:
    mine = [case for case in known if case.name.startswith(f"test_{kind}") and reason(case.name) is None]
    chosen = [case for case in mine if not any(fnmatch.fnmatch(case.name, p) for p in OUT_OF_RANGE)]
    assert len(chosen) > 1
    problems = [problem for case in chosen for _, problem in [verdict(case, precision="fp16")] if problem]
    assert not problems, "\n".join(problems)


def test_a_model_is_compiled_for_each_set_of_shapes_and_of_values_that_decide_them() -> None:
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["N", 6])
    shape = helper.make_tensor_value_info("shape", TensorProto.INT64, [2])
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, None)
    nodes = [helper.make_node("Relu", ["x"], ["r"]), helper.make_node("Reshape", ["r", "shape"], ["y"])]
    model = helper.make_model(helper.make_graph(nodes, "g", [x, shape], [y]), opset_imports=[helper.make_opsetid("", 23)])
    prepared = backend.prepare(model, precision="fp32")
    rng = np.random.default_rng(0)
    for n, to in ((2, (3, 4)), (2, (4, 3)), (5, (1, 30)), (2, (3, 4))):
        values = rng.standard_normal((n, 6)).astype(np.float32)
        (out,) = prepared.run([values, np.array(to)])
        np.testing.assert_array_equal(out, np.maximum(values, 0).reshape(to))
        assert prepared.run({"x": values, "shape": np.array(to)}).y.shape == to
    for n in range(1, 2 * backend.KEPT):
        assert prepared.run([np.ones((n, 6), np.float32), np.array([n, 6])])[0].shape == (n, 6)


def test_run_model_and_run_node() -> None:
    net = Net(x=(2, 3, 4), y=(4, 5))
    model = net.out(net("Softmax", net("MatMul", "x", "y"))).model()
    rng = np.random.default_rng(0)
    x, y = (rng.standard_normal(s).astype(np.float32) for s in ((2, 3, 4), (4, 5)))
    (expected,) = reference(model, {"x": x, "y": y}).values()
    assert backend.is_compatible(model)
    (out,) = backend.run_model(model, [x, y], precision="fp32")
    assert relative_error(out, expected) < 1e-6
    node = onnx.helper.make_node("MatMul", ["x", "y"], ["z"])
    assert relative_error(backend.run_node(node, [x, y], precision="fp32")[0], x @ y) < 1e-6
    assert relative_error(backend.run_node(node, [x, y], opset_version=9)[0], x @ y) < 2e-3


def test_on_a_gpu_it_compiles_for_that_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """As far as can be seen without one: the plan that a session on the GPU is given."""
    opened = []

    class Session:
        def __init__(self, plan: Plan, device: str) -> None:
            opened.append((plan, device))
            self.cpu = tccompile.Session(plan, "cpu")

        def run(self, names: list[str], feeds: dict) -> list:
            return self.cpu.run(names, feeds)

    monkeypatch.setattr("tccompile.runtime.driver.open_device", lambda number: SimpleNamespace(cc=(8, 6)))
    monkeypatch.setattr(backend, "Session", Session)
    net = Net(x=(2, 3))
    model = net.out(net("Relu", "x")).model()
    assert backend.supports_device("CUDA:1")
    (y,) = backend.run_model(model, [-np.ones((2, 3), np.float32)], "CUDA:1", jobs=1)
    ((plan, device),) = opened
    assert not y.any() and device == "gpu:1"
    assert [s.arch for s in plan.entries[0].sections] == ["sm_86"] and plan.images


def test_what_it_cannot_do_is_said() -> None:
    net = Net(x=(2, 3))
    model = net.out(net("Bernoulli", "x")).model()
    assert not backend.is_compatible(model)
    with pytest.raises(UnsupportedError, match="Bernoulli"):
        backend.run_model(model, [np.zeros((2, 3), np.float32)])
    assert backend.supports_device("CPU")
    assert not backend.supports_device("TPU") and not backend.supports_device("CUDA:99")
    relu = Net(x=(2, 3))
    model = relu.out(relu("Relu", "x")).model()
    with pytest.raises(UsageError, match="unknown device 'TPU'; choose CPU, CUDA"):
        backend.prepare(model, "TPU")
    with pytest.raises(UsageError, match="unknown argument 'mode'"):
        backend.prepare(model, mode=3)
    with pytest.raises(InputError, match="an input is a float"):
        backend.run_model(model, [[1.0]])
    with pytest.raises(InputError, match="2 inputs; the model has 1: x"):
        backend.run_model(model, [np.zeros((2, 3), np.float32)] * 2)


# --- The page of operators: docs/reference/operators.md ----------------------------------------------------------------

of_this_release = pytest.mark.skipif(not LISTED, reason="the page is of another release of ONNX")


@thorough
@of_this_release
def test_the_page_of_operators() -> None:
    """All of it, but the types of four operators in five: `python -m tests.reference` tries each type of each."""
    page, ops = committed("operators.md"), operators.listed(STANDARD)
    rows = [line for line in page.splitlines() if re.match(r"\| \w+ \| \d+–\d+ \|", line)]
    assert [row.split()[1] for row in rows] == ops, ANEW
    without = "\n".join(line for line in page.splitlines() if line not in rows)
    assert without + "\n" == operators.with_rows(()), ANEW
    made = [*operators.table([operators.row(op) for op in ops[::5]])][2:]
    assert made == rows[::5], ANEW


@thorough
@of_this_release
def test_every_operator_that_is_listed_checks_out() -> None:
    rows = {line.split()[1]: line for line in committed("operators.md").splitlines() if re.match(r"\| \w+ \| \d+–", line)}
    for op in operators.listed(STANDARD):
        if SEQUENCES not in rows[op]:  # a node of these alone is no model
            assert isinstance(operators.checked(STANDARD, op), tuple), op


@thorough
@of_this_release
@pytest.mark.parametrize("domain", [STANDARD, CLASSICAL, "ai.onnx.preview", "ai.onnx.preview.training"])
def test_every_operator_that_is_not_listed_is_refused(domain: str) -> None:
    known = {*operators.listed(domain)} if domain in (STANDARD, CLASSICAL) else set()
    others = sorted({*operators.schemas(domain)} - known)
    assert others
    for op in others:
        assert operators.not_listed(domain, op), f"{op} is taken, and not listed"
