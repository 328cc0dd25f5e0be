"""Loops whose iterations do not depend on each other: several of them at once."""

from __future__ import annotations

import numpy as np
import onnx
import pytest

from tccompile.errors import InputError
from tccompile.ir.loops import bodies
from tccompile.load import at_once, unroll
from tccompile.pipeline import without_code
from tccompile.runtime.session import Session
from tests.networks import reference
from tests.test_unroll import BOOL, FLOAT, INT64, array, graph, model, value
from tests.tiers import usually

Body = tuple[list[tuple], dict[str, np.ndarray]]

RNG = np.random.default_rng(5)
ROW = [("Gather", "x i", "g")]  # (3, 4) of (6, 3, 4)

BODIES: dict[str, Body] = {
    "elementwise": (
        [*ROW, ("Cast", "i", "f", {"to": FLOAT}), ("Mul", "g f", "a"), ("Add", "a line", "b"), ("Max", "b f", "r")],
        {"line": np.float32([1, 2, 3, 4])},
    ),
    "what is the same each time": ([("Exp", "once", "r")], {}),
    "places that are the same each time": (
        [
            *ROW,
            ("ArgMax", "once", "at", {"axis": 1, "keepdims": 0}),
            ("Gather", "once at", "k", {"axis": 1}),
            ("MatMul", "k g", "r"),
        ],
        {},
    ),
    "the number alone": ([("Unsqueeze", "i zero", "u"), ("Cast", "u", "r", {"to": FLOAT})], {"zero": array(0)}),
    "reductions": (
        [
            *ROW,
            ("ReduceSum", "g", "a", {"keepdims": 0}),
            ("ReduceMax", "g last", "b"),
            ("ReduceMean", "g", "c"),
            ("Add", "b c", "d"),
            ("Mul", "d a", "r"),
        ],
        {"last": array(-1)},
    ),
    "places": (
        [
            *ROW,
            ("ArgMax", "g", "at", {"axis": 1, "keepdims": 0}),
            ("Gather", "g at", "h", {"axis": 1}),
            ("Gather", "once at", "k", {"axis": 1}),
            ("Concat", "h k", "r", {"axis": 0}),
        ],
        {},
    ),
    "places of each element": (
        [*ROW, ("TopK", "g two", "v at", {"axis": 1}), ("GatherElements", "once at", "h", {"axis": 1}), ("Add", "v h", "r")],
        {"two": array(2)},
    ),
    "parts": (
        [
            *ROW,
            ("Slice", "g one end one", "a"),
            ("Transpose", "a", "b"),
            ("Concat", "b ends", "c", {"axis": -1}),
            ("Softmax", "c", "r", {"axis": 0}),
        ],
        {"one": array(1), "end": array(3), "ends": np.float32([[1], [2]])},
    ),
    "products": (
        [*ROW, ("MatMul", "g w", "a"), ("MatMul", "once2 g", "b"), ("Transpose", "b", "c"), ("MatMul", "a c", "r")],
        {"w": RNG.standard_normal((4, 4)).astype(np.float32), "once2": np.float32([[1, 2, 3]])},
    ),
    "an image": (
        [
            *ROW,
            ("Unsqueeze", "g ends", "a"),
            ("Conv", "a w", "b", {"pads": [1, 1, 1, 1]}),
            ("MaxPool", "b", "r", {"kernel_shape": [2, 2]}),
        ],
        {"ends": array(0, 1), "w": RNG.standard_normal((2, 1, 3, 3)).astype(np.float32)},
    ),
    "pasted": (
        # an image of computed sizes, between zeros
        [
            *ROW,
            ("Add", "i one", "h"),
            ("Min", "h four", "l"),
            ("Max", "l one", "k"),
            ("Unsqueeze", "k ax", "ks"),
            ("Concat", "ones ks five", "size", {"axis": 0}),
            ("Unsqueeze", "g two", "im"),
            ("Resize", "im none none size", "big", {"mode": "linear"}),
            ("Sub", "five ks", "left"),
            ("Concat", "ones left five", "z0", {"axis": 0}),
            ("ConstantOfShape", "z0", "zeros"),
            ("Concat", "zeros big", "wide", {"axis": 2}),
            ("Concat", "none_yet wide", "r", {"axis": 0}),
        ],
        {
            "one": array(1).reshape(()),
            "four": array(4).reshape(()),
            "ax": array(0),
            "two": array(0, 1),
            "ones": array(1, 1),
            "five": array(5),
            "none_yet": np.zeros((0, 1, 5, 5), np.float32),
        },
    ),
}


def independent(body: Body) -> onnx.ModelProto:
    """A loop over rows of x, whose result r is put together; `kept` passes through it."""
    nodes, weights = body
    inputs = [value("i", INT64, ()), value("on", BOOL, ()), value("kept", shape=(3, 4))]
    inside = graph([*nodes, ("Identity", "kept", "kept_")], inputs, [value("on", BOOL, ()), value("kept_"), value("r")], weights)
    for node in inside.node:
        node.input[:] = ["" if name == "none" else name for name in node.input]
    given = [value("x", shape=(6, 3, 4)), value("once", shape=(3, 4)), value("n", INT64, ()), value("go", BOOL, ())]
    loop = ("Loop", "n go once", "same rows", {"body": inside})
    return model([loop], given, [value("same"), value("rows")])


CASES = [(name, at_most) for name in BODIES for at_most in (5, 2)]


@pytest.mark.parametrize(("name", "at_most"), usually(CASES, 0, 1, 5, 21))
def test_as_onnx_runtime_runs_them(name: str, at_most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """All iterations at once, or two in each iteration of another loop."""
    monkeypatch.setattr(unroll, "LONG_COUNTED", 0)
    monkeypatch.setattr(at_once, "_at_most", lambda *_: at_most)
    m = independent(BODIES[name])
    plan = without_code(m, precision="fp32", limits={"Loop_same": 5})
    found = bodies(plan.entries[0].program)
    assert [body.most for body in found] == ([] if at_most == 5 else [3])
    session, rng = Session(plan, "cpu"), np.random.default_rng(1)
    for n, go in ((5, True), (3, True), (0, True), (1, True), (4, False)):
        feeds = {"x": rng.standard_normal((6, 3, 4)).astype(np.float32), "once": rng.standard_normal((3, 4)).astype(np.float32)}
        feeds |= {"n": array(n).reshape(()), "go": np.array(go)}
        expected = reference(m, feeds)
        feeds = {i.name: feeds[i.name] for i in session.get_inputs()}
        for output, got in zip(session.get_outputs(), session.run(None, feeds), strict=True):
            want = expected[output.name]
            assert got.shape[: 1 if not want.size else None] == want.shape[: 1 if not want.size else None]  # it says 0 of none
            assert got.dtype == want.dtype
            np.testing.assert_allclose(got, want.reshape(got.shape), 1e-5, 1e-6)
    with pytest.raises(InputError, match=r"'Loop_same' \(Loop\) finds 6 elements"):
        session.run(None, {**feeds, "n": array(6).reshape(()), "go": np.array(True)})
