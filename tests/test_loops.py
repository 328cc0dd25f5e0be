"""Loops that stay loops: what their bodies do again and again, and what a plan with one keeps to."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import onnx
import pytest

import tccompile
from tccompile.errors import InputError, PlanError, UnsupportedError
from tccompile.ir.limits import check_program
from tccompile.ir.loops import bodies, in_turn, together
from tccompile.ir.memory import lifetimes
from tccompile.ir.ops import Carry
from tccompile.ir.program import Program
from tccompile.load import unroll
from tccompile.pipeline import without_code
from tccompile.plan.file import from_bytes, to_bytes
from tccompile.runtime.session import Session
from tests.networks import reference
from tests.test_unroll import BOOL, FLOAT, INT64, array, graph, model, value


@pytest.fixture(autouse=True)
def kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Loops stay loops, however short they are."""
    monkeypatch.setattr(unroll, "LONG", 0)
    monkeypatch.setattr(unroll, "LONG_COUNTED", 0)


def looped(
    nodes: list[tuple],
    carried: dict[str, tuple],
    rows: tuple[str, ...] = (),
    condition: str = "c",
    most: str = "n",
    **weights: np.ndarray,
) -> onnx.ModelProto:
    """A loop over these nodes, which carries values by their names, the shapes of which are given; x, of 3×4, is read in it.

    What an iteration leaves of `a` is called `a_`; the model's outputs are what is left of each in the end, and `rows`.
    """
    inputs = [value("i", INT64, ()), value("c", BOOL, ()), *(value(name, elem, shape) for name, (elem, shape) in carried.items())]
    outputs = [value(condition, BOOL, ()), *(value(f"{name}_", *kind) for name, kind in carried.items()), *map(value, rows)]
    body = graph(nodes, inputs, outputs, weights)
    results = [*(f"{name}_end" for name in carried), *(f"{row}_all" for row in rows)]
    given = [value("x", shape=(3, 4)), value("n", INT64, ()), value("go", BOOL, ())]
    given += [value(f"{name}_0", *kind) for name, kind in carried.items()]
    loop = ("Loop", " ".join([most, "go", *(f"{name}_0" for name in carried)]), " ".join(results), {"body": body})
    return model([loop], given, [value(name) for name in results])


ONE = (FLOAT, (3, 4))

MODELS: dict[str, Callable[[], onnx.ModelProto]] = {
    "a sum": lambda: looped([("Add", "a x", "a_")], {"a": ONE}),
    "two that change places": lambda: looped([("Identity", "a", "b_"), ("Identity", "b", "a_")], {"a": ONE, "b": ONE}),
    "turned round": lambda: looped(
        [("Transpose", "b", "a_", {"perm": [1, 0]}), ("Transpose", "a", "b_", {"perm": [1, 0]})],
        {"a": (FLOAT, (4, 3)), "b": (FLOAT, (3, 4))},
    ),
    "what stays as it is": lambda: looped([("Mul", "a b", "a_"), ("Identity", "b", "b_")], {"a": ONE, "b": ONE}),
    "what does not depend on it": lambda: looped([("Exp", "x", "e"), ("Sub", "a e", "a_")], {"a": ONE}),
    "what is another one each time": lambda: looped([("Identity", "x", "a_"), ("Add", "a x", "r")], {"a": ONE}, ("r",)),
    "rows": lambda: looped(
        [("Add", "a x", "a_"), ("Cast", "i", "f", {"to": FLOAT}), ("Mul", "a f", "r"), ("ReduceSum", "a_", "s", {"keepdims": 0})],
        {"a": ONE},
        ("r", "s"),
    ),
    "rows of what comes in": lambda: looped([("Add", "a x", "a_"), ("Identity", "a", "r")], {"a": ONE}, ("r",)),
    "a row at a place": lambda: looped(
        [("Gather", "t i", "g"), ("Add", "a g", "a_")], {"a": ONE}, t=np.float32([[1], [2], [4], [8]])
    ),
    "until it is large": lambda: looped(
        [("Add", "a x", "a_"), ("ReduceMax", "a_", "turn", {"keepdims": 0}), ("Less", "turn more", "going")],
        {"a": ONE}, ("turn",), "going", more=np.float32(6),
    ),
    "a product": lambda: looped([("MatMul", "a w", "p"), ("Tanh", "p", "a_")], {"a": ONE}, ("p",), w=np.eye(4, dtype=np.float32)),
}  # fmt: skip


def run(m: onnx.ModelProto, precision: str = "fp32", limit: int = 4) -> tuple[Session, Program]:
    named = {node.name: limit for node in m.graph.node if node.op_type == "Loop"}
    plan = from_bytes(to_bytes(without_code(m, precision=precision, limits=named)))
    program = plan.entries[0].program
    assert any(isinstance(op, Carry) for op in program.ops)
    return Session(plan, "cpu"), program


@pytest.mark.parametrize(("name", "precision"), [*((name, "fp32") for name in MODELS), ("a product", "mixed"), ("rows", "mixed")])
def test_as_onnx_runtime_runs_them(name: str, precision: str) -> None:
    m = MODELS[name]()
    session, program = run(m, precision)
    rng = np.random.default_rng(1)
    for n, go in ((3, True), (4, True), (0, True), (1, True), (2, False)):
        feeds = {i.name: np.ones(i.shape, np.float32) for i in session.get_inputs()}
        feeds |= {name: rng.uniform(0.5, 2, x.shape).astype(np.float32) for name, x in feeds.items()}
        feeds |= {"n": array(n).reshape(()), "go": np.array(go)}
        feeds = {name: feeds[name] for name in program.inputs}
        expected = reference(m, feeds)
        for output, got in zip(session.get_outputs(), session.run(None, feeds), strict=True):
            want = expected[output.name]
            assert got.shape == want.shape and got.dtype == want.dtype
            np.testing.assert_allclose(got, want, 2e-3 if precision == "mixed" else 1e-6, 1e-6)


def test_more_iterations_than_there_is_room_for_are_an_error() -> None:
    session, _ = run(MODELS["a sum"](), limit=2)
    feeds = {"x": np.ones((3, 4), np.float32), "a_0": np.zeros((3, 4), np.float32), "go": np.array(True)}
    assert session.run(None, {**feeds, "n": array(2).reshape(())})[0].max() == 2
    with pytest.raises(
        InputError, match=r"'Loop_a_end' \(Loop\) finds 3 elements .* room for 2: compile it with a larger --limit"
    ):
        session.run(None, {**feeds, "n": array(7).reshape(())})


def test_a_scan_that_passes_something_on() -> None:
    inputs, outputs = [value("a", shape=(4,)), value("r", shape=(4,))], [value("a_"), value("s")]
    body = graph([("Mul", "a w", "d"), ("Add", "d r", "a_"), ("Relu", "a_", "s")], inputs, outputs, {"w": np.float32([0.5])})
    given = [value("a_0", shape=(4,)), value("x", shape=(6, 4))]
    m = model([("Scan", "a_0 x", "a_end s_all", {"body": body, "num_scan_inputs": 1})], given, [value("a_end"), value("s_all")])
    session, program = run(m)
    assert [body.most for body in bodies(program)] == [6]
    rng = np.random.default_rng(0)
    feeds = {x.name: rng.standard_normal(x.shape).astype(np.float32) for x in session.get_inputs()}
    for name, got in zip(("a_end", "s_all"), session.run(None, feeds), strict=True):
        np.testing.assert_allclose(got, reference(m, feeds)[name], 1e-6)


def test_iterations_that_do_not_depend_on_each_other_are_unrolled() -> None:
    """So they can run side by side."""
    inputs, outputs = [value("i", INT64, ()), value("c", BOOL, ())], [value("c", BOOL, ()), value("r")]
    body = graph([("Gather", "x i", "g"), ("Exp", "g", "r")], inputs, outputs)
    often = {"n": array(3).reshape(()), "go": np.array(True)}
    m = model([("Loop", "n go", "r_all", {"body": body})], [value("x", shape=(3, 4))], [value("r_all")], often)
    assert not any(isinstance(op, Carry) for op in without_code(m).entries[0].program.ops)


def test_nothing_is_read_at_a_place_that_there_is_not_if_no_iteration_takes_place() -> None:
    m = looped([("Gather", "x n", "g"), ("Add", "a g", "a_")], {"a": ONE})
    session, _ = run(m)
    feeds = {"x": np.ones((3, 4), np.float32), "a_0": np.zeros((3, 4), np.float32)}
    for n, go, result in ((2, True, 2), (50, False, 0), (0, True, 0)):
        assert session.run(None, {**feeds, "n": array(n).reshape(()), "go": np.array(go)})[0].max() == result
    with pytest.raises(InputError, match="50"):
        session.run(None, {**feeds, "n": array(50).reshape(()), "go": np.array(True)})


@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("stays", [True, False])
def test_rows_that_are_put_behind_others(rows: int, stays: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """As torch.cat in a loop is exported: iterations give them, and what is carried need not grow."""
    monkeypatch.setattr(unroll, "LONG_COUNTED", 0 if stays else 1 << 20)
    inputs = [value("i", INT64, ()), value("c", BOOL, ()), value("a", shape=(4,)), value("all")]
    nodes = [("Mul", "a x", "a_"), ("Unsqueeze", "a_ at", "u"), ("Concat", "u u" if rows == 2 else "u", "v", {"axis": 0})]
    nodes += [("Cast", "all", "as", {"to": FLOAT}), ("Concat", "as v", "all_", {"axis": 0})]
    body = graph(nodes, inputs, [value("c", BOOL, ()), value("a_"), value("all_"), value("u")], {"at": array(0)})
    given = [value("x", shape=(4,)), value("n", INT64, ())]
    weights = {"go": np.array(True), "none": np.zeros((0, 4), np.float32)}
    outputs = [value("last"), value("y", shape=(None, 4)), value("us")]
    m = model([("Loop", "n go x none", "last y us", {"body": body})], given, outputs, weights)
    session = Session(without_code(m, precision="fp32", limits={"Loop_last": 4}), "cpu")
    assert any(isinstance(op, Carry) for op in session.plan.entries[0].program.ops) == stays
    for n in (0, 1, 4):
        feeds = {"x": np.float32([1, 2, 3, 0.5]), "n": array(n).reshape(())}
        expected = reference(m, feeds)
        for name, got in zip(("last", "y", "us"), session.run(None, feeds), strict=True):
            assert got.shape == expected[name].shape
            np.testing.assert_allclose(got, expected[name], 1e-6)


def test_a_check_takes_limits() -> None:
    m = MODELS["a sum"]()
    m.graph.node[0].input[0] = ""
    assert "say how often at most" in tccompile.check(m).text
    assert not tccompile.check(m, limits={"Loop_a_end": 9}).missing


def test_a_body_is_in_the_program_once() -> None:
    _, program = run(MODELS["a product"](), limit=1000)
    (body,) = bodies(program)
    assert body.most == 1000 and len(program.ops) < 40
    turns = list(in_turn(program, lambda body: True, most=3))
    assert turns.count(body.first) == turns.count(body.last) == 3 and turns.count(0) == turns.count(len(program.ops) - 1) == 1
    assert all(life[1] == body.last or not life[0] < body.first <= life[1] < body.last for life in lifetimes(program).values())


def test_what_cannot_stay_a_loop_is_unrolled() -> None:
    m = looped([("Concat", "a x", "a_", {"axis": 0})], {"a": ONE})
    m.graph.node[0].input[0] = ""
    with pytest.raises(UnsupportedError, match="how often it goes round is computed at run time"):
        without_code(m)
    limits = {"Loop_a_end": 3}
    program = without_code(m, limits=limits).entries[0].program
    assert not any(isinstance(op, Carry) for op in program.ops)
    with pytest.raises(
        UnsupportedError, match=r"goes round up to 20000 times.*\(it does not stay a loop: .*'a_end/a_' is float of shape 6×4"
    ):
        without_code(m, limits={"Loop_a_end": 20000})


WRONG: dict[str, Callable[[Carry], Carry]] = {
    "no end": lambda op: replace(op, role="next", most=0) if op.role == "again" else op,
    "another loop": lambda op: replace(op, loop="other") if op.role == "next" else op,
    "so often": lambda op: replace(op, most=1 << 25) if op.role == "again" else op,
    "no flag": lambda op: replace(op, going=None) if op.role == "next" else op,
    "left before": lambda op: replace(op, role="enter") if op.role == "leave" else op,
}


@pytest.mark.parametrize("change", WRONG)
def test_plans_whose_loops_are_none_are_refused(change: str) -> None:
    _, program = run(MODELS["rows"]())
    check_program(program)
    ops = tuple(WRONG[change](op) if isinstance(op, Carry) else op for op in program.ops)
    with pytest.raises(PlanError):
        check_program(replace(program, ops=ops))


def test_ops_of_a_body_out_of_their_order_are_refused_and_put_in_order() -> None:
    _, program = run(MODELS["rows"]())
    (body,) = bodies(program)
    early = replace(
        program,
        ops=(
            *program.ops[: body.first],
            program.ops[body.last],
            *program.ops[body.first : body.last],
            *program.ops[body.last + 1 :],
        ),
    )
    with pytest.raises(PlanError):
        check_program(early)
    first = next(i for i, op in enumerate(program.ops) if isinstance(op, Carry) and op.role == "next")
    moved = list(program.ops)
    moved.insert(body.first + 1, moved.pop(first))
    ready = {program.tensors[op.y].storage for op in program.ops[: body.first + 1]} | {*program.inputs, *program.constants}
    if all(program.tensors[name].storage in ready for name in program.ops[first].inputs):
        check_program(together(replace(program, ops=tuple(moved))))
    assert together(program).ops == program.ops
