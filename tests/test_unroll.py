"""Branches and loops become the nodes in them: as ONNX Runtime runs them, and refused where their data decides."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from tccompile.errors import UnsupportedError
from tccompile.load import unroll
from tccompile.load.model import load
from tccompile.load.turns import turns
from tccompile.rewrites import rewrite
from tests.ops.common import agrees

FLOAT, INT64, BOOL = TensorProto.FLOAT, TensorProto.INT64, TensorProto.BOOL


def value(name: str, elem: int = FLOAT, shape: Any = None) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, elem, shape)


def graph(nodes: list[tuple], inputs: list, outputs: list, weights: dict[str, np.ndarray] | None = None) -> onnx.GraphProto:
    """Nodes are (op, inputs, outputs, attributes); names are separated by spaces."""
    made = [helper.make_node(op, x.split(), y.split(), f"{op}_{y.split()[0]}", **(a[0] if a else {})) for op, x, y, *a in nodes]
    tensors = [numpy_helper.from_array(v, n) for n, v in (weights or {}).items()]
    return helper.make_graph(made, "g", inputs, outputs, tensors)


def model(nodes: list[tuple], inputs: list, outputs: list, weights: dict[str, np.ndarray] | None = None) -> onnx.ModelProto:
    imports = [helper.make_opsetid("", 21)]
    return helper.make_model(graph(nodes, inputs, outputs, weights), opset_imports=imports, ir_version=10)


def array(*values: Any, dtype: Any = np.int64) -> np.ndarray:
    return np.array(values, dtype)


# --- If


def branches(then: str, other: str, shape: Any = (3, 4)) -> dict[str, onnx.GraphProto]:
    """Each branch computes two values from x; the names in them are the same."""

    def branch(op: str) -> onnx.GraphProto:
        return graph(
            [(op, "x", "r"), ("Add", "r w", "s")], [], [value("r", shape=shape), value("s")], {"w": np.float32([1, 2, 3, 4])}
        )

    return {"then_branch": branch(then), "else_branch": branch(other)}


@pytest.mark.parametrize("shape", [(), (1,)])
@pytest.mark.parametrize("condition", [True, False])
def test_a_condition_that_is_computed(condition: bool, shape: tuple[int, ...]) -> None:
    nodes = [("If", "c", "p q", branches("Relu", "Neg"))]
    m = model(nodes, [value("x", shape=(3, 4)), value("c", BOOL, shape)], [value("p", shape=(3, 4)), value("q", shape=(3, 4))])
    agrees(m, {"c": np.full(shape, condition)})
    assert [n.op for n in rewrite(load(m)).nodes].count("Where") == 2


def test_branches_of_different_shapes() -> None:
    other = {
        "then_branch": graph([("Relu", "x", "r")], [], [value("r")]),
        "else_branch": graph([("ReduceSum", "x", "r", {"keepdims": 0})], [], [value("r")]),
    }
    inputs = [value("x", shape=(3, 4)), value("c", BOOL, ())]
    with pytest.raises(UnsupportedError, match=r"'If_y' \(If\): its output 'y' is 3×4 or scalar, by a condition .* run time"):
        load(model([("If", "c", "y", other)], inputs, [value("y")]))
    known = model([("If", "c", "y", other)], inputs[:1], [value("y")], {"c": np.array(False)})
    assert [n.op for n in load(known).nodes] == ["ReduceSum"]


def test_nested_branches() -> None:
    inner = graph([("If", "d", "r", branches_of_one("Exp", "Neg"))], [], [value("r", shape=(3, 4))])
    outer = {"then_branch": inner, "else_branch": graph([("Relu", "x", "r")], [], [value("r", shape=(3, 4))])}
    m = model(
        [("If", "c", "y", outer)],
        [value("x", shape=(3, 4)), value("c", BOOL, ()), value("d", BOOL, ())],
        [value("y", shape=(3, 4))],
    )
    for c in (True, False):
        for d in (True, False):
            agrees(m, {"c": np.array(c), "d": np.array(d)})


def branches_of_one(then: str, other: str) -> dict[str, onnx.GraphProto]:
    def branch(op: str) -> onnx.GraphProto:
        return graph([(op, "x", "r")], [], [value("r", shape=(3, 4))])

    return {"then_branch": branch(then), "else_branch": branch(other)}


# --- Loop


def loop_body() -> onnx.GraphProto:
    """h = tanh(h @ w) + i; the parts are h·i"""
    nodes = [
        ("MatMul", "h w", "m"),
        ("Tanh", "m", "t"),
        ("Cast", "i", "f", {"to": FLOAT}),
        ("Add", "t f", "h2"),
        ("Mul", "h2 f", "part"),
        ("Identity", "c", "c2"),
    ]
    w = np.random.default_rng(0).standard_normal((4, 4)).astype(np.float32)
    return graph(
        nodes,
        [value("i", INT64, ()), value("c", BOOL, ()), value("h")],
        [value("c2", BOOL), value("h2"), value("part", shape=(3, 4))],
        {"w": w},
    )


@pytest.mark.parametrize("count", [0, 1, 5])
@pytest.mark.parametrize("condition", ["", "true"])
def test_loop(count: int, condition: str) -> None:
    weights = {"n": np.array(count), "true": np.array(True)}
    nodes = [("Loop", f"n {condition or '_'} x", "last parts", {"body": loop_body()})]
    m = model(nodes, [value("x", shape=(3, 4))], [value("last", shape=(3, 4)), value("parts", shape=(count, 3, 4))], weights)
    m.graph.node[0].input[1] = condition
    agrees(m)
    graph_ = load(m)
    assert sum(n.op == "MatMul" for n in graph_.nodes) == count
    assert sum(t.shape == (4, 4) for t in graph_.tensors().values() if hasattr(t, "values")) == min(count, 1)  # one w for all


def test_a_loop_that_ends_by_its_condition() -> None:
    """while i < 3, without a number of iterations"""
    nodes = [("Mul", "h h", "h2"), ("Add", "k one", "k2"), ("Less", "k2 three", "c2")]
    inputs = [value("i", INT64, ()), value("c", BOOL, ()), value("k", INT64, ()), value("h")]
    body = graph(
        nodes, inputs, [value("c2", BOOL), value("k2", INT64, ()), value("h2")], {"one": array(1)[0], "three": array(3)[0]}
    )
    weights = {"true": np.array(True), "zero": np.array(0)}
    m = model(
        [("Loop", "_ true zero x", "k_last last", {"body": body})],
        [value("x", shape=(3, 4))],
        [value("last", shape=(3, 4))],
        weights,
    )
    m.graph.node[0].input[0] = ""
    agrees(m)
    assert [n.op for n in load(m).nodes] == ["Mul"] * 3


def test_loops_do_not_grow_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unroll, "MOST", 100)
    weights = {"n": np.array(1 << 40), "true": np.array(True)}
    m = model(
        [("Loop", "n true x", "last parts", {"body": loop_body()})],
        [value("x", shape=(3, 4))],
        [value("last", shape=(3, 4))],
        weights,
    )
    with pytest.raises(UnsupportedError, match=r"'last'.*6 nodes each, make more than 100 nodes.*shorter"):
        load(m)


def test_a_sequence_without_tensors() -> None:
    """An input of which no shapes are given."""
    sequence = helper.make_tensor_sequence_value_info("x", FLOAT, [2, 3])
    m = model([("ConcatFromSequence", "x", "y", {"axis": 0})], [sequence], [value("y")])
    with pytest.raises(UnsupportedError, match=r"reads the sequence 'x', which has no tensors: .* --shape 'x\[0\]=2x3'"):
        load(m)


def test_a_sequence_that_a_loop_gathers() -> None:
    nodes = [("Gather", "x i", "row"), ("Relu", "row", "r"), ("SequenceInsert", "s r", "s2"), ("Identity", "c", "c2")]
    sequence = helper.make_tensor_sequence_value_info
    body = graph(
        nodes,
        [value("i", INT64, ()), value("c", BOOL, ()), sequence("s", FLOAT, None)],
        [value("c2", BOOL), sequence("s2", FLOAT, None)],
    )
    outer = [
        ("SequenceEmpty", "", "empty"),
        ("Loop", "n true empty", "all", {"body": body}),
        ("ConcatFromSequence", "all", "y", {"axis": 0}),
    ]
    m = model(outer, [value("x", shape=(3, 4))], [value("y", shape=(12,))], {"n": np.array(3), "true": np.array(True)})
    agrees(m)


# --- Scan


@pytest.mark.parametrize("directions", [(0, 0), (1, 0), (0, 1), (1, 1)])
@pytest.mark.parametrize(("axis", "out"), [(0, 0), (1, 1), (-1, -1)])
def test_scan(axis: int, out: int, directions: tuple[int, int]) -> None:
    """A recurrence over slices of x and y, whose steps are put together along an axis"""
    shape = [(5, 2, 3), (2, 5, 3), (2, 3, 5)][axis]
    nodes = [("Mul", "a b", "m"), ("Add", "h m", "s"), ("Tanh", "s", "h2"), ("Neg", "h2", "part")]
    body = graph(
        nodes,
        [value("h", shape=(2, 3)), value("a", shape=(2, 3)), value("b", shape=(2, 3))],
        [value("h2", shape=(2, 3)), value("part", shape=(2, 3))],
    )
    attrs = {
        "body": body, "num_scan_inputs": 2, "scan_input_axes": [axis, axis], "scan_input_directions": [directions[0], 0],
        "scan_output_axes": [out], "scan_output_directions": [directions[1]],
    }  # fmt: skip
    inputs = [value("h0", shape=(2, 3)), value("x", shape=shape), value("y", shape=shape)]
    agrees(model([("Scan", "h0 x y", "last parts", attrs)], inputs, [value("last", shape=(2, 3)), value("parts", shape=None)]))


def test_scan_of_opset_8_is_refused() -> None:
    body = graph([("Identity", "a", "b")], [value("a", shape=(2,))], [value("b", shape=(2,))])
    m = model(
        [("Scan", "_ x", "y", {"body": body, "num_scan_inputs": 1})], [value("x", shape=(1, 3, 2))], [value("y", shape=(1, 3, 2))]
    )
    m.graph.node[0].input[0] = ""
    m.opset_import[0].version, m.ir_version = 8, 4
    with pytest.raises(UnsupportedError, match="'Scan_y': Scan of opset 8"):
        load(m)


@pytest.mark.parametrize(("most", "goes"), [(20, 20), (50, 20), (2**63 - 1, 20), (7, 7)])
def test_a_loop_whose_condition_counts(most: int, goes: int) -> None:
    """TensorFlow's recurrences: a counter is carried, and the condition compares it with a number of steps."""
    nodes = [
        ("Add", "t one", "t2"), ("Cast", "t2", "at", {"to": FLOAT}), ("Less", "at steps", "more"),
        ("Cast", "i", "turn", {"to": FLOAT}), ("Less", "turn steps", "inside"),
        ("And", "more inside", "c2"), ("Gather", "x t", "row"), ("MatMul", "h w", "a"),
        ("Add", "a row", "b"), ("Tanh", "b", "h2"), ("Identity", "h2", "y"),
    ]  # fmt: skip
    state = [value(name, shape=(2, 3)) for name in ("h", "h2", "y")]
    body = graph(
        nodes,
        [value("i", INT64, ()), value("c", BOOL, ()), value("t", INT64, ()), state[0]],
        [value("c2", BOOL, ()), value("t2", INT64, ()), *state[1:]],
        {"one": np.array(1), "steps": np.array(20, np.float32), "w": np.eye(3, dtype=np.float32)[::-1] / 2},
    )
    outer = [
        ("Loop", "most true zero h0", "t_end h_end ys", {"body": body}),
        ("ReverseSequence", "ys lengths", "y", {"time_axis": 0, "batch_axis": 1}),
    ]
    weights = {"most": np.array(most), "true": np.array(True), "zero": np.array(0), "h0": np.zeros((2, 3), np.float32)}
    weights["lengths"] = np.full(2, goes)
    m = model(outer, [value("x", shape=(20, 2, 3))], [value("y"), value("t_end", INT64, ())], weights)
    program = agrees(m)
    assert program.tensors["y"].shape == (goes, 2, 3)
    assert not program.counts


@pytest.mark.parametrize(
    ("condition", "constants"),
    [
        ([("RandomUniform", "", "r", {"shape": [1]}), ("Less", "r half", "c1"), ("Squeeze", "c1", "c2")], {"half": 0.5}),
        ([("Expand", "half large", "r"), ("ReduceMax", "r", "m", {"keepdims": 0}), ("Less", "m half", "c2")], {"half": 0.5}),
        ([("Constant", "", "r", {"value_ints": [1, 2]}), ("Less", "r i", "c1"), ("Squeeze", "c1", "c2")], {}),
    ],
)
def test_conditions_that_are_not_counted(condition: list, constants: dict[str, float]) -> None:
    """What is random, large, or several numbers: a turn of it says nothing of the next, takes long, or has no truth."""
    inputs = [value("i", INT64, ()), value("c", BOOL, ())]
    own = {name: np.array(v, np.float32) for name, v in constants.items()} | {"large": array(2**40)}
    body = graph(condition, inputs, [value("c2", BOOL, ())], own)
    assert turns(body, 20, [], {}, [helper.make_opsetid("", 21)]) is None


def test_a_condition_by_a_number_that_becomes_a_constant() -> None:
    body = graph(
        [("Less", "t five", "c2"), ("Relu", "h", "h2")],
        [value("i", INT64, ()), value("c", BOOL, ()), value("t", INT64, ()), value("h", shape=(3,))],
        [value("c2", BOOL, ()), value("seven", INT64, ()), value("h2", shape=(3,))],
        {"five": np.array(5), "seven": np.array(7)},
    )
    weights = {"most": np.array(20), "true": np.array(True), "zero": np.array(0)}
    m = model([("Loop", "most true zero x", "t_end y", {"body": body})], [value("x", shape=(3,))], [value("y")], weights)
    assert not agrees(m).counts


def test_a_body_that_takes_its_number_as_a_vector() -> None:
    """As TensorFlow's crop_and_resize is converted: a Slice from it to the next one."""
    body = graph(
        [("Add", "i one", "end"), ("Slice", "x i end zero", "row"), ("And", "c c", "c2"), ("Relu", "row", "y")],
        [value("i", INT64, (1,)), value("c", BOOL, ())],
        [value("c2", BOOL, ()), value("y", shape=(1, 3))],
        {"one": array(1), "zero": array(0)},
    )
    weights = {"most": np.array(4), "true": np.array(True)}
    agrees(model([("Loop", "most true", "y", {"body": body})], [value("x", shape=(4, 3))], [value("y")], weights))
