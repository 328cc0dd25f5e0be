"""Loops, scans and branches whose number, condition or results the data decide: the same plan, whatever that is."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx
import pytest
from onnx import helper

from tccompile.errors import InputError, UnsupportedError
from tccompile.load.model import load
from tccompile.pipeline import without_code
from tccompile.runtime.session import Session
from tests.networks import reference
from tests.test_unroll import BOOL, FLOAT, INT64, graph, model, value

Case = tuple[onnx.ModelProto, list[dict[str, np.ndarray]]]
TURN = [value("i", INT64, ()), value("c", BOOL, ())]
SAME = ("Identity", "c", "c2")


def holds(m: onnx.ModelProto, *feeds: dict[str, np.ndarray], limits: dict[str, int] | None = None) -> None:
    with Session(without_code(m, precision="fp32", limits=limits or {}), "cpu") as session:
        names = [v.name for v in m.graph.output]
        for given in feeds:
            want = reference(m, given)
            for name, y in zip(names, session.run(names, given), strict=True):
                assert y.shape == want[name].shape, f"{name} is {y.shape} in place of {want[name].shape}"
                np.testing.assert_allclose(y, want[name], rtol=1e-5, atol=1e-6, err_msg=name)


def rounds() -> onnx.ModelProto:
    """As often as an input says: what is carried, a row a round, and a list that grows."""
    lists = [helper.make_tensor_sequence_value_info(name, FLOAT, (3,)) for name in ("q", "q2")]
    body = graph(
        [("Add", "x x", "y"), ("ReduceSum", "y", "s", {"keepdims": 0}), ("SequenceInsert", "q y", "q2"), SAME],
        [*TURN, value("x", shape=(3,)), lists[0]],
        [value("c2", BOOL, ()), value("y", shape=(3,)), lists[1], value("s", shape=())],
    )
    nodes = [
        ("SequenceConstruct", "x0", "q0"),
        ("Loop", "n true x0 q0", "last list sums", {"body": body}),
        ("ConcatFromSequence", "list", "all", {"axis": 0, "new_axis": 1}),
        ("ConcatFromSequence", "list", "flat", {"axis": 0}),
        ("SequenceLength", "list", "length"),
    ]
    outputs = [value(name, INT64 if name == "length" else FLOAT) for name in ("last", "sums", "all", "flat", "length")]
    return model(nodes, [value("n", INT64, ()), value("x0", shape=(3,))], outputs, {"true": np.array(True)})


def test_as_often_as_the_data_say_and_no_more_than_there_is_room_for() -> None:
    feeds = [{"n": np.array(n), "x0": np.float32([1, 2, 3])} for n in (0, 1, 3, 4)]
    holds(rounds(), *feeds[:3], limits={"Loop_last": 3})
    more = r"'Loop_last' \(Loop\) finds 4 .* room for 3: compile it with a larger --limit"
    plan = without_code(rounds(), limits={"Loop_last": 3})
    with Session(plan, "cpu") as session, pytest.raises(InputError, match=more):
        session.run(None, feeds[3])
    with pytest.raises(UnsupportedError, match=r"how often it goes round is computed at run time: say .* --limit Loop_last=N"):
        load(rounds())


def root() -> Case:
    """Newton's method, until it changes little."""
    nodes = [
        ("Div", "a x", "d"), ("Add", "d x", "t"), ("Mul", "t half", "y"), ("Sub", "y x", "e"), ("Abs", "e", "far"),
        ("ReduceMax", "far", "most", {"keepdims": 0}), ("Greater", "most little", "c2"),
    ]  # fmt: skip
    outputs = [value("c2", BOOL, ()), value("y", shape=(3,)), value("most", shape=())]
    body = graph(nodes, [*TURN, value("x", shape=(3,))], outputs, {"half": np.float32(0.5), "little": np.float32(1e-3)})
    weights = {"n": np.array(12), "true": np.array(True)}
    m = model([("Loop", "n true a", "y most", {"body": body})], [value("a", shape=(3,))], [value("y"), value("most")], weights)
    return m, [{"a": np.float32(a)} for a in ([1, 2, 3], [1, 1, 1], [1e9, 2, 3])]


def words() -> Case:
    """The best word after the last one, until it is word 0: a list that grows along an axis."""
    rng = np.random.default_rng(0)
    nodes = [
        ("Gather", "table last", "row"), ("MatMul", "row w", "scores"), ("ArgMax", "scores", "t", {"axis": -1, "keepdims": 0}),
        ("Unsqueeze", "t first", "t1"), ("Concat", "said t1", "said2", {"axis": 0}), ("Cast", "t", "c2", {"to": BOOL}),
    ]  # fmt: skip
    body = graph(
        nodes,
        [*TURN, value("last", INT64, ()), value("said", INT64, ("N",))],
        [value("c2", BOOL, ()), value("t", INT64, ()), value("said2", INT64, ("M",))],
        {"first": np.array([0])},
    )
    weights = {"n": np.array(6), "true": np.array(True), "one": np.array([1])}
    table = rng.standard_normal((9, 8)).astype(np.float32)
    m = model(
        [("Reshape", "start one", "said"), ("Loop", "n true start said", "last all", {"body": body})],
        [value("start", INT64, ()), value("w", shape=(8, 9))],
        [value("last", INT64), value("all", INT64)],
        {**weights, "table": table},
    )
    feeds = [{"start": np.array(i), "w": rng.standard_normal((8, 9)).astype(np.float32)} for i in range(1, 5)]
    return m, [*feeds, {"start": np.array(3), "w": (table.T * [1e3, *[1] * 8]).astype(np.float32)}]


def cursor() -> Case:
    """A place that is beyond the end after the last round: nothing may be read there."""
    nodes = [("Gather", "x at", "v"), ("Add", "s v", "s2"), ("Add", "at one", "at2"), ("Less", "at2 end", "c2")]
    body = graph(
        nodes,
        [*TURN, value("s", shape=()), value("at", INT64, ())],
        [value("c2", BOOL, ()), value("s2", shape=()), value("at2", INT64, ())],
        {"one": np.array(1)},
    )
    m = model(
        [("Less", "zero end", "c0"), ("Loop", "n c0 s0 zero", "s at", {"body": body})],
        [value("x", shape=(4,)), value("end", INT64, ())],
        [value("s"), value("at", INT64)],
        {"zero": np.array(0), "s0": np.float32(0), "n": np.array(4)},
    )
    return m, [{"x": np.arange(4, dtype=np.float32) + 1, "end": np.array(n)} for n in (0, 2, 4)]


def of_what_is_found(scanned: bool) -> Case:
    """A round for each row that there is."""
    nodes = [("Add", "s r", "s2"), ("Mul", "s2 r", "p")]
    outputs = [value("s2", shape=(2,)), value("p", shape=(2,))]
    found = [("Greater", "k zero", "good"), ("Compress", "x good", "rows", {"axis": 0})]
    if scanned:
        body = graph(nodes, [value("s", shape=(2,)), value("r", shape=(2,))], outputs)
        found += [("Scan", "s0 rows", "s p", {"body": body, "num_scan_inputs": 1})]
    else:
        nodes = [("Gather", "rows i", "r"), *nodes, SAME]
        body = graph(nodes, [*TURN, value("s", shape=(2,))], [value("c2", BOOL, ()), *outputs])
        found += [("Shape", "rows", "k2", {"end": 1}), ("Squeeze", "k2", "n"), ("Loop", "n true s0", "s p", {"body": body})]
    weights = {"zero": np.float32(0), "true": np.array(True), "s0": np.zeros(2, np.float32)}
    m = model(found, [value("x", shape=(6, 2)), value("k", shape=(6,))], [value("s"), value("p")], weights)
    rng = np.random.default_rng(1)
    shifts = (0, 1, 9) if scanned else (0, -9, 9)  # ONNX Runtime's Scan does not take none
    feeds = [{"k": rng.standard_normal(6) + shift, "x": rng.standard_normal((6, 2))} for shift in shifts]
    return m, [{name: x.astype(np.float32) for name, x in given.items()} for given in feeds]


def nothing_or_all() -> Case:
    """A branch that has nothing: what is read of it is empty, not what the other one has."""
    something = graph([("Identity", "x", "a")], [], [value("a")])
    nothing = graph([("Identity", "e", "b")], [], [value("b")], {"e": np.zeros(0, np.float32)})
    nodes = [("If", "c", "y", {"then_branch": something, "else_branch": nothing}), ("Neg", "y", "z")]
    m = model(nodes, [value("c", BOOL, ()), value("x", shape=(3,))], [value("y"), value("z")])
    return m, [{"c": np.array(c), "x": np.float32([1, 2, 3])} for c in (True, False)]


def at_a_place_that_only_one_branch_has() -> Case:
    then = graph([("Gather", "x at", "a")], [], [value("a")])
    other = graph([("Sub", "at at", "none"), ("Gather", "x none", "b")], [], [value("b")])
    nodes = [("Less", "at four", "c"), ("If", "c", "y", {"then_branch": then, "else_branch": other})]
    m = model(nodes, [value("x", shape=(4,)), value("at", INT64, ())], [value("y")], {"four": np.array(4)})
    return m, [{"x": np.arange(4, dtype=np.float32) + 1, "at": np.array(n)} for n in (0, 3, 7)]


CASES: dict[str, Callable[[], Case]] = {
    "root": root, "words": words, "cursor": cursor, "loop": lambda: of_what_is_found(False),
    "scan": lambda: of_what_is_found(True), "nothing": nothing_or_all, "one_branch": at_a_place_that_only_one_branch_has,
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_by_what_is_computed(case: str) -> None:
    m, feeds = CASES[case]()
    holds(m, *feeds)


def test_a_list_that_may_be_longer_has_no_known_places() -> None:
    m = rounds()
    m.graph.node.append(helper.make_node("SequenceAt", ["list", "first"], ["y"], "at"))
    m.graph.initializer.append(onnx.numpy_helper.from_array(np.array(0), "first"))
    with pytest.raises(UnsupportedError, match=r"'at' \(SequenceAt\): how many tensors the sequence 'list' has is computed"):
        without_code(m, limits={"Loop_last": 3})
