"""Branches of an If by a condition that is computed: what is not taken does not run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

import numpy as np
import onnx
import pytest

from tccompile.ir.branches import branches, in_order
from tccompile.ir.ops import Carry
from tccompile.ir.verify import verify
from tccompile.load import unroll
from tccompile.pipeline import without_code
from tccompile.plan.file import Plan, from_bytes, to_bytes
from tccompile.runtime.cpu import CpuEngine
from tccompile.runtime.session import Session
from tests.networks import reference
from tests.test_unroll import BOOL, FLOAT, INT64, array, graph, model, value
from tests.tiers import usually

X = value("x", shape=(3, 4))
Nodes = list[tuple]


def chain(x: str, y: str, name: str, n: int = 8) -> Nodes:
    """Products with w, and what comes between them."""
    names = [x, *(f"{name}{k}" for k in range(n - 1)), y]
    return [(("Tanh", a, b) if k % 2 else ("MatMul", f"{a} w", b)) for k, (a, b) in enumerate(pairwise(names))]


def choice(then: Nodes, other: Nodes, outputs: str = "r", condition: str = "c", results: str = "p") -> tuple:
    """An If whose branches give `outputs`."""
    parts = {
        f"{which}_branch": graph(nodes, [], [value(name) for name in outputs.split()])
        for which, nodes in (("then", then), ("else", other))
    }
    return ("If", condition, results, parts)


def whole(nodes: Nodes, outputs: str, **weights: np.ndarray) -> onnx.ModelProto:
    given = [X, value("c", BOOL, ()), value("d", BOOL, ()), value("n", INT64, ())]
    used = {name for node in nodes for name in _reads(node)}
    weights = {"w": np.random.default_rng(3).standard_normal((4, 4)).astype(np.float32) / 2, **weights}
    return model(nodes, [v for v in given if v.name in used], [value(name) for name in outputs.split()], weights)


def _reads(node: tuple) -> set[str]:
    inner = [a for a in (node[3] if len(node) > 3 else {}).values() if isinstance(a, onnx.GraphProto)]
    return {*node[1].split(), *(x for g in inner for n in g.node for x in _all_reads(n))}


def _all_reads(node: onnx.NodeProto) -> set[str]:
    return {*node.input, *(x for a in node.attribute for n in a.g.node for x in _all_reads(n))}


def _loop(nodes: Nodes, condition: str = "go", **weights: np.ndarray) -> tuple:
    """A loop that carries `a`, of x's shape."""
    inputs = [value("i", INT64, ()), value("on", BOOL, ()), value("a", shape=(3, 4))]
    body = graph(nodes, inputs, [value("on", BOOL, ()), value("a_")], weights)
    return ("Loop", f"n {condition} x", "q", {"body": body})


def _either(x: str, y: str, name: str, condition: str = "c") -> list[tuple]:
    return [choice(chain(x, f"{name}r", f"{name}t"), [("Neg", x, f"{name}r")], f"{name}r", condition, y)]


MODELS: dict[str, tuple[Callable[[], onnx.ModelProto], int]] = {
    "one of two": (lambda: whole([choice(chain("x", "r", "t"), [*chain("x", "s", "e", 6), ("Relu", "s", "r")])], "p"), 2),
    "one is x itself": (lambda: whole([choice(chain("x", "r", "t"), [("Identity", "x", "r")])], "p"), 1),
    "one is a constant": (
        lambda: whole([choice(chain("x", "r", "t"), [("Identity", "zeros", "r")])], "p", zeros=np.zeros((3, 4), np.float32)),
        1,
    ),
    "the same, computed before": (
        lambda: whole(
            [
                *chain("x", "b", "o"),
                choice([*chain("x", "unread", "t"), ("Identity", "b", "r")], [("Transpose", "b", "r", {"perm": [0, 1]})]),
                *_either("p", "y", "u"),
            ],
            "y",
        ),
        1,
    ),
    "what is computed before, for it alone": (
        lambda: whole([*chain("x", "b", "o"), choice([("MatMul", "b w", "r")], [("Neg", "x", "r")])], "p"),
        1,
    ),
    "what is computed before, for others, too": (
        lambda: whole([*chain("x", "b", "o"), choice(chain("b", "r", "t"), [("Neg", "x", "r")]), ("Add", "p b", "y")], "y"),
        1,
    ),
    "a condition of the data": (
        lambda: whole(
            [
                ("ReduceSum", "x", "s", {"keepdims": 0}), ("Greater", "s zero", "k"),
                *_either("x", "p", "u", "k"), ("Exp", "p", "y"),
            ],
            "y", zero=np.float32(0),
        ),
        1,
    ),
    "several results of other sizes": (
        lambda: whole(
            [
                choice(
                    [*chain("x", "r", "t"), ("Concat", "r x", "s", {"axis": 0}), ("ReduceMax", "r", "m", {"keepdims": 0})],
                    [*chain("x", "r", "e", 7), ("Slice", "r one two", "s"), ("Identity", "half", "m")],
                    "r s m", "c", "p q o",
                )
            ],
            "p q o", one=array(1), two=array(2), half=np.float32(0.5),
        ),
        2,
    ),
    "as many as the data say": (
        lambda: whole(
            [
                choice(
                    [*chain("x", "t", "u"), ("Greater", "t zero", "g"), ("NonZero", "g", "nz"), ("Transpose", "nz", "z"),
                     ("Cast", "z", "r", {"to": FLOAT})],
                    [("Identity", "none", "r")],
                )
            ],
            "p", zero=np.float32(0), none=np.zeros((1, 2), np.float32),
        ),
        1,
    ),
    "one in another": (
        lambda: whole(
            [choice([*chain("x", "t", "u", 4), *_either("t", "v", "k", "d"), *chain("v", "r", "z", 3)], [("Neg", "x", "r")])], "p"
        ),
        2,
    ),
    "one after another by the same condition": (
        lambda: whole([*_either("x", "b", "u"), *_either("b", "p", "k")], "p"), 2,
    ),
    "one in a loop": (
        lambda: whole(
            [_loop([("Less", "i two", "k"), *_either("a", "e", "u", "k"), ("Tanh", "e", "a_")])],
            "q", go=np.array(True), two=array(2).reshape(()),
        ),
        1,
    ),
    "a loop in one": (
        lambda: whole([choice([_loop(chain("a", "a_", "b")), ("Tanh", "q", "r")], [("Neg", "x", "r")])], "p", go=np.array(True)),
        1,
    ),
}  # fmt: skip


@pytest.fixture(autouse=True)
def kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Loops stay loops, and branches are worth it, however short they are."""
    monkeypatch.setattr(unroll, "LONG", 0)
    monkeypatch.setattr(unroll, "LONG_COUNTED", 0)
    monkeypatch.setattr("tccompile.ir.branches.LEAST_US", 3.0)


def limits(m: onnx.ModelProto) -> dict[str, int]:
    """How often its loops go round at most."""
    inside = [n for node in m.graph.node for a in node.attribute for n in a.g.node]
    return {n.name: 4 for n in (*m.graph.node, *inside) if n.op_type == "Loop"}


def compiled(m: onnx.ModelProto, precision: str = "fp32") -> Plan:
    return from_bytes(to_bytes(without_code(m, precision=precision, limits=limits(m))))


@pytest.mark.parametrize(
    "name", usually(MODELS, "one of two", "several results of other sizes", "one in another", "a loop in one")
)
def test_as_onnx_runtime_runs_them(name: str) -> None:
    make, count = MODELS[name]
    m = make()
    plan = compiled(m)
    entry = plan.entries[0]
    assert len(branches(entry.program)) == count
    session, rng = Session(plan, "cpu"), np.random.default_rng(1)
    ran: list[str] = []
    engine = CpuEngine(plan, entry, entry.sections[0], check_padding=True, observe=lambda name, values: ran.append(name))
    times = set()
    for c, d, sign in ((True, True, 1), (False, True, -1), (True, False, 1), (False, False, -1)):
        feeds = {"x": (sign * rng.uniform(0.1, 1, (3, 4))).astype(np.float32), "c": np.array(c), "d": np.array(d)}
        feeds = {i.name: {**feeds, "n": array(3).reshape(())}[i.name] for i in session.get_inputs()}
        expected = reference(m, feeds)
        for output, got in zip(session.get_outputs(), session.run(None, feeds), strict=True):
            want = expected[output.name]
            assert got.shape == want.shape and got.dtype == want.dtype
            np.testing.assert_allclose(got, want, 1e-5, 1e-6)
        ran.clear()
        engine.run(feeds)
        times.add(len(ran))
    assert len(times) > 1 or name == "one in a loop"


@pytest.mark.parametrize("what", ["short", "nothing"])
def test_ifs_that_are_computed_both_ways(what: str) -> None:
    """One of a few nodes, and one that asks whether there is anything."""
    if what == "short":
        m = whole([choice([("Relu", "x", "r")], [("Neg", "x", "r")])], "p")
    else:
        m = whole([choice(chain("x", "r", "t"), [("Identity", "none", "r")])], "p", none=np.zeros((0, 4), np.float32))
    assert not any(isinstance(op, Carry) for op in compiled(m).entries[0].program.ops)


def test_branches_are_put_in_rows() -> None:
    """Ops in any order that their operands allow come into one in which a branch's lie in a row."""
    program = compiled(MODELS["one of two"][0]()).entries[0].program
    one, other = branches(program)
    first, second = (list(program.ops[b.first : b.last + 1]) for b in (one, other))
    mixed = [op for pair in zip(first, second, strict=False) for op in pair]
    mixed += [op for op in (*first, *second) if op not in mixed]
    apart = replace(program, ops=(*program.ops[: one.first], *mixed, *program.ops[other.last + 1 :]))
    assert len(branches(apart)) < 2
    again = in_order(apart)
    verify(again)
    assert {(b.last - b.first, b.wanted) for b in branches(again)} == {(b.last - b.first, b.wanted) for b in (one, other)}
