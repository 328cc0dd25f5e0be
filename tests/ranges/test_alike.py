"""Programs at some sizes as one for all: what may differ from size to size, and how often programs are made for that."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import onnx
import onnxruntime
import pytest

from tccompile import pipeline
from tccompile.errors import UnsupportedError
from tccompile.ir.expr import Epilogue, call, const, identity_view, load
from tccompile.ir.extent import Decisions, possible, worth
from tccompile.ir.metric import relative_error
from tccompile.ir.ops import Pointwise
from tccompile.ir.program import Program
from tccompile.ir.tensor import dense
from tccompile.ir.types import DType
from tccompile.options import as_sizes
from tccompile.pipeline import without_code
from tccompile.plan.file import Plan
from tccompile.ranges import alike
from tccompile.ranges.box import divided_by, without_end
from tccompile.ranges.made import Made
from tccompile.runtime.session import Session
from tccompile.sizes import Size
from tests.ranges import models

FLOAT = onnx.TensorProto.FLOAT


def right(model: onnx.ModelProto, plan: Plan, shapes: list[tuple[int, ...]]) -> bool:
    """Whether a plan of one input is right at shapes of it."""
    session, exact = Session(plan, "cpu"), onnxruntime.InferenceSession(model.SerializeToString())
    for shape in shapes:
        feeds = {"x": np.random.default_rng(0).standard_normal(shape).astype(np.float32)}
        got, want = session.run(None, feeds), exact.run(None, feeds)
        assert all(relative_error(a, b) < 2e-3 for a, b in zip(got, want, strict=True)), shape
    return True


def test_programs_are_made_again_only_where_decisions_are_others():
    """A program is known by what was asked for it and answered: another answer makes another one."""
    loaded: list[tuple[int, ...]] = []
    made: list[bool] = []

    class Graph:
        nodes = ("one",)

        def __init__(self, n: int) -> None:
            self.n = n

        def copy(self):
            return self

    def load(point):
        loaded.append(point)
        return Graph(*point)

    def to_program(graph):
        worth("rows", graph.n > 4)
        made.append(possible("view", graph.n % 8 == 0))
        return SimpleNamespace(ops=("view",) if made[-1] else ("copy",))

    all_of = Made(load, to_program)  # type: ignore[arg-type]
    first = Decisions()
    assert [all_of.at((n,), first).ops for n in (8, 9, 8)] == [("view",), ("copy",), ("view",)]
    assert loaded == [(8,), (9,)] and made == [True, False] and first.differs
    again = Decisions(can=dict(first.can), everywhere=True)
    assert [all_of.at((n,), again).ops for n in (8, 9, 8)] == [("copy",)] * 3
    assert loaded == [(8,), (9,)] and made == [True, False, False] and again.made == {"rows": True}


def test_few_graphs_are_kept(monkeypatch):
    monkeypatch.setattr("tccompile.ranges.made.NODES", 3)
    monkeypatch.setattr("tccompile.ranges.made.OPS", 2)
    loaded: list[tuple[int, ...]] = []

    def load(point):
        loaded.append(point)
        graph = SimpleNamespace(nodes=("one",))
        graph.copy = lambda: graph
        return graph

    all_of = Made(load, lambda graph: SimpleNamespace(ops=("one",)))  # type: ignore[arg-type, return-value]
    for n in (1, 2, 3, 1, 4, 1):
        all_of.at((n,), Decisions())
    assert loaded == [(1,), (2,), (3,), (4,), (1,)]


def attending(rows: int = 8) -> onnx.ModelProto:
    """Attention of channels to channels, whose heads are as long as an image has pixels."""
    g = models.Graph()
    flat = g.op("Reshape", g.op("Relu", "x"), g.numbers(0, rows, -1))
    scores = g.op("Softmax", g.op("MatMul", flat, g.op("Transpose", flat, perm=[0, 2, 1])), axis=-1)
    return g.model("x", FLOAT, ["batch", rows, "h", "w"], g.op("MatMul", scores, flat))


def test_heads_as_long_as_an_image_has_pixels_are_one_part():
    """Attention with heads of more than 256 elements is lowered to its parts, here at most sizes and so at all."""
    model = attending()
    plan = without_code(model, ranges=as_sizes({"batch": (2, 3), "h": (4, 32, 4), "w": (4, 32, 4)}))
    assert len(plan.families) == 1
    assert right(model, plan, [(2, 8, 4, 4), (3, 8, 32, 32), (2, 8, 12, 20), (3, 8, 16, 16)])


def test_numbers_that_are_too_large_for_extents():
    """A power of a size has no formula, however large it gets."""
    g = models.Graph()
    rows = g.op("Cast", g.op("Gather", g.op("Shape", "x"), g.numbers(0)), to=FLOAT)
    model = g.model("x", FLOAT, ["n", 8], g.op("Mul", "x", g.op("Pow", g.op("Cast", g.numbers(2), to=FLOAT), rows)))
    with pytest.raises(UnsupportedError, match="does not do the same at all sizes"):
        without_code(model, ranges=as_sizes({"n": (2, 120)}))


def two_levels() -> onnx.ModelProto:
    """Tokens of two images, one half as large, one behind the other."""
    g = models.Graph()
    large = g.op("Conv", "x", g.weight(16, 3, 4, 4), strides=[4, 4])
    small = g.op("Conv", large, g.weight(16, 16, 2, 2), strides=[2, 2])
    flat = [g.op("Reshape", t, g.numbers(0, 16, -1)) for t in (large, small)]
    tokens = g.op("Concat", *flat, axis=2)
    scores = g.op("Softmax", g.op("MatMul", g.op("Transpose", tokens, perm=[0, 2, 1]), tokens), axis=-1)
    return g.model("x", FLOAT, [1, 3, "h", "w"], g.op("MatMul", scores, g.op("Transpose", tokens, perm=[0, 2, 1])))


def test_images_of_two_sizes_one_behind_the_other_are_one_part():
    """The second one's padding is that of both together."""
    model = two_levels()
    plan = without_code(model, ranges=as_sizes({"h": (32, 64, 8), "w": (32, 64, 8)}))
    assert len(plan.families) == 1
    assert right(model, plan, [(1, 3, 32, 32), (1, 3, 64, 64), (1, 3, 40, 56)])


def test_a_copy_that_is_a_view_at_few_sizes_divides_no_range():
    """No cut tells multiples of 8 from the other sizes, and one that leaves them on one side is none either."""
    box, seen = (Size("h", 16, 48),), [(n,) for n in range(17, 37)]
    mask = np.array([n != 24 for (n,) in seen])
    assert divided_by(box, seen, mask) is not None and divided_by(box, seen, mask, 1.0) is None
    assert divided_by(box, seen, np.array([n < 20 for (n,) in seen]), 1.0) == ((Size("h", 16, 19),), (Size("h", 20, 48),))


@pytest.mark.parametrize("point, cut", [((2, 9), (0, 4)), ((8, 2), (1, 3)), ((4, 12), (1, 12)), ((4, 9), None), ((), None)])
def test_an_end_at_which_a_point_lies_is_alone(point, cut):
    box = Size("h", 2, 24, 2), Size("w", 2, 12)
    parts = without_end(box, point)
    assert (parts is None) == (cut is None)
    if parts is not None and cut is not None:
        number, at = cut
        assert parts[1][number].low == at and parts[0][number].all[-1] < at


def test_how_often_a_model_is_loaded(monkeypatch):
    """Once at each point, however often programs are made there: that a copy is a view at some sizes is seen late."""
    loaded: list[dict[str, tuple[int, ...]]] = []
    said = pipeline.load
    monkeypatch.setattr(pipeline, "load", lambda opened, shapes: loaded.append(dict(shapes)) or said(opened, shapes))
    without_code(attending(), ranges=as_sizes({"batch": (2, 3), "h": (4, 32, 4), "w": (4, 32, 4)}))
    once = [tuple(shape["x"]) for shape in loaded]
    assert len(once) < 1.3 * len(set(once))


def in_chunks(chunk: int = 16) -> onnx.ModelProto:
    """Running sums of tokens in chunks of so many, of which a last one is filled up, as in state space models."""
    g = models.Graph()
    n = g.op("Shape", "x", start=1, end=2)
    more = g.op("Sub", g.numbers(chunk - 1), g.op("Mod", g.op("Add", n, g.numbers(chunk - 1)), g.numbers(chunk)))
    whole = g.op("Pad", "x", g.op("Concat", g.numbers(0, 0, 0, 0), more, g.numbers(0), axis=0))
    rows = g.op("Reshape", whole, g.numbers(0, -1, chunk, 8))
    sums = g.op("CumSum", rows, g.numbers(1))
    return g.model("x", FLOAT, [2, "n", 8], g.op("Softmax", g.op("Mul", sums, rows), axis=1))


def test_a_range_is_divided_where_programs_begin_to_be_alike(monkeypatch):
    """... and not at one of the points seen, after which each part would be divided again"""
    tried: list[tuple[int, int]] = []
    said = alike.pattern
    monkeypatch.setattr(alike, "pattern", lambda box, *more: tried.append((box[0].low, box[0].all[-1])) or said(box, *more))
    model = in_chunks()
    plan = without_code(model, ranges=as_sizes({"n": (2, 200)}))
    assert {*tried} == {(2, 200), (2, 16), (17, 200)} and len(plan.families) == 2
    assert right(model, plan, [(2, n, 8) for n in (2, 16, 17, 100, 200)])


def test_a_range_is_not_divided_for_hours(caplog):
    """After so many programs it is refused, with the way out; each time that it is divided is in the log, and why."""
    sizes = (Size("n", 2, 64),)

    def program_of(box, decided):
        return lambda point: alone(point[0] % 7)

    spent = iter((0, alike.BUDGET + 1))
    with (
        caplog.at_level("INFO", "tccompile"),
        pytest.raises(UnsupportedError, match=r"not do the same.*--entry.*LOW\.\.HIGH:STEP"),
    ):
        alike.patterns(sizes, program_of, lambda one, other: False, lambda: next(spent))
    (record,) = [r.getMessage() for r in caplog.records if "is divided" in r.getMessage()]
    assert record.startswith("range: n 2 to 64 is divided: ")


def alone(number: int) -> Program:
    """A program of one op, which is another one for each number."""
    t = {name: dense(name, (4, 8), DType.F32) for name in ("x", "y")}
    expr = call("mul", load(0), const(0.3 + number))
    op = Pointwise(nodes=("Mul",), y="y", epilogue=Epilogue(expr, (identity_view("x", 2),)))
    return Program(("x",), ("y",), t, {}, (op,))
