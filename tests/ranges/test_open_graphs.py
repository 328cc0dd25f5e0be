"""Some of the graphs of `tests.open_graphs`, and what was refused or wrong in models that nobody had used before."""

from __future__ import annotations

import numpy as np
import pytest
from onnx import TensorProto, helper

from tccompile.errors import ModelError
from tccompile.options import Options, as_sizes
from tccompile.pipeline import Dump, Told, quiet, read, to_parts, to_patterns, without_code
from tccompile.ranges.box import opened
from tccompile.ranges.fit import fit
from tccompile.ranges.late import _points
from tccompile.ranges.pool import Known
from tccompile.runtime.session import Session
from tccompile.schedule.timings import NO_TIMINGS
from tests.open_graphs import BOUND, error_of
from tests.ranges.models import Graph
from tests.ranges.test_late import beside_onnxruntime
from tests.tiers import thorough, usually

FOUND = {
    5: "batches of none have no results",
    8: "a border to a multiple is none at some sizes",
    28: "ones at places",
    32: "thirds that are nearly 21 of 32",
    33: "rows that are written by place",
    34: "two batches, of which every other one is one",
    4546: "a size is a factor of weights",
    10542: "half as large again behind strides",
    71012: "another branch at the least size",
}


@pytest.mark.parametrize("seed", usually(list(FOUND), 8, 32))
def test_a_graph_that_was_refused_or_wrong(seed):
    found = error_of(seed)
    assert not isinstance(found, str) and found <= BOUND


def test_extents_that_are_equal_at_some_sizes_are_no_other_program():
    """Of what is not 0 there are h · 6 at most, and in seven rows 7 · 6."""
    g = Graph()
    part = g.op("Slice", g.op("Concat", "x", "x", axis=0), g.numbers(0), g.numbers(7), g.numbers(0))
    part = g.op("Unsqueeze", part, g.numbers(0))
    counts = [
        g.op("Cast", g.op("Gather", g.op("Shape", g.op("NonZero", y)), g.numbers(1)), to=TensorProto.FLOAT) for y in ("x", part)
    ]
    y = g.op("Add", "x", g.op("Div", *counts))
    plan = without_code(g.model("x", TensorProto.FLOAT, ["h", 6], y), precision="fp32", ranges={"h": (5, 9)})
    assert len(plan.entries) == 1
    x = np.arange(-3, 27, dtype=np.float32).reshape(5, 6)
    (out,) = Session(plan, device="cpu").run(None, {"x": x})
    assert np.allclose(out, x + np.float32(29 / 40))


def test_of_fractions_that_are_nearly_the_same_the_simplest_is_found():
    """21 of 32 are as good between 6 and 19, and wrong beside that."""
    (size,) = as_sizes({"h": (5, 40)}).values()
    (h,) = opened((size,))
    seen = range(6, 16)
    formula = fit([(2 * n - 1) // 3 + 1 for n in seen], [{"h": n} for n in seen], {"h": h})
    assert formula.values.tolist() == [(2 * n - 1) // 3 + 1 for n in range(5, 41)]


def test_sizes_of_either_parity_say_what_is_computed():
    """Also of a second size, whose first one near the least is even."""
    box = tuple(as_sizes({"h": (64, 256, 32), "w": (64, 256, 32)}).values())
    for axis in (0, 1):
        assert {point[axis] // 32 % 2 for point in _points(box)} == {0, 1}
    assert {point[0] for point in _points(tuple(as_sizes({"batch": (1, 3), "tokens": (2, 21)}).values()))} == {2, 3}


def test_a_model_that_is_none_at_some_sizes():
    g = Graph()
    y = g.op("Add", g.op("Reshape", g.op("Slice", "x", *map(g.numbers, (0, 3, 1))), g.numbers(1, 3)), g.weight(1, 3))
    with pytest.raises(ModelError, match=r"Reshape.*the range has sizes at which that is so, as n \d+"):
        without_code(g.model("x", 1, [1, "n"], y), ranges={"n": (2, 9)})


def test_a_size_that_is_made_even_may_be_so():
    """Between 64 and 256 by 32, as a network of vision has it that takes patches of 2 × 2 at a 32nd of the size."""
    g = Graph()
    x = g.op("MaxPool", "x", kernel_shape=[32, 1], strides=[32, 1])
    even = g.op("Mul", g.op("Div", g.op("Add", g.extent(x, 2), g.numbers(1)), g.numbers(2)), g.numbers(2))
    y = g.op("Resize", x, "", "", g.op("Concat", g.numbers(1, 2), even, g.numbers(3), axis=0), mode="linear")
    y = g.op("Resize", y, "", "", g.op("Concat", g.numbers(1, 2), g.extent(x, 2), g.numbers(3), axis=0), mode="linear")
    assert beside_onnxruntime(g.model("x", 1, [1, 2, "h", 3], y), (64, 96, 160, 256), 64, 256, 32) < BOUND


@thorough
def test_borders_that_are_none_at_some_sizes():
    """A codec's: each layer pads what its stride leaves over, by the edge or by reflection."""
    g, x = Graph(), "x"
    for mode, stride in (("reflect", 4), ("edge", 3), ("reflect", 2)):
        n = g.extent(x, 2)
        whole = g.op("Mul", g.op("Div", g.op("Add", n, g.numbers(stride - 1)), g.numbers(stride)), g.numbers(stride))
        x = g.op("Pad", x, g.op("Concat", g.numbers(0, 0, 0, 0, 0), g.op("Sub", whole, n), axis=0), mode=mode)
        x = g.op("Conv", x, g.weight(2, 2, stride), strides=[stride])
    assert beside_onnxruntime(g.model("x", 1, [1, 2, "t"], x), (96, 97, 111, 120), 96, 120) < BOUND


@pytest.mark.parametrize("arch", usually(["sm_75", "sm_90a"], "sm_75"))
def test_products_whose_depth_is_any_number_have_kernels(arch):
    """A transform of tokens, whose matrix is as long as there are tokens."""
    g = Graph()
    spectrum = g.op("DFT", g.op("Unsqueeze", "x", g.numbers(-1)), axis=1)
    model = g.model("x", 1, [1, "t", 16], g.op("ReduceSum", spectrum, g.numbers(-1), keepdims=0))
    options = Options(archs=(arch,), ranges=as_sizes({"t": (12, 15)}))
    (pattern,), options = to_patterns(read(model), options, Dump(None), quiet, Told())
    assert to_parts(pattern, options, quiet, (), NO_TIMINGS, Known())


def test_a_constant_is_not_stored_with_a_formula():
    """Weights that are padded by as much as there are tokens, and multiplied with, are computed."""
    g = Graph()
    more = g.op("Sub", g.extent("x", 1), g.numbers(3))
    pads = g.op("Concat", g.numbers(0), more, g.numbers(0), more, axis=0)
    wide = g.op("Pad", g.weight(4, 7), pads)
    model = g.model("x", 1, [1, "n", 4], g.op("MatMul", "x", wide))
    assert beside_onnxruntime(model, (3, 4, 9, 20), 3, 20) < BOUND


def test_sizes_that_are_an_extent_by_chance_are_looked_at():
    """Of three rows, which have three elements, the best four are all, and not the two that rows of 2 and 4 speak for."""
    g = Graph()
    best = g.op("TopK", "x", g.op("Min", g.extent("x", 1), g.numbers(4)), axis=1)
    g.nodes[-1].output.append("places")
    model = g.model("x", 1, ["batch", "n", 3], g.op("Tanh", best))
    session = Session(without_code(model, precision="fp32", ranges={"batch": (2, 3), "n": (2, 21)}), "cpu")
    for n in (2, 3, 4, 21):
        x = np.random.default_rng(n).standard_normal((2, n, 3)).astype(np.float32)
        assert np.allclose(session.run(None, {"x": x})[0], np.tanh(-np.sort(-x, 1)[:, :4]))


def test_what_a_model_does_at_a_size_that_is_an_extent_by_chance():
    """Up to 9 rows the other branch is taken: in steps of 8 only at 8, which is how many columns there are, too."""
    g = Graph()
    rows = g.op("Squeeze", g.op("Gather", g.op("Shape", "x"), g.numbers(0)), g.numbers(0))
    branches = {
        name: helper.make_graph([helper.make_node(op, ["x"], [name])], name, [], [helper.make_empty_tensor_value_info(name)])
        for name, op in (("then_branch", "Tanh"), ("else_branch", "Neg"))
    }
    y = g.op("If", g.op("Greater", rows, g.op("Squeeze", g.numbers(9), g.numbers(0))), **branches)
    made = g.model("x", TensorProto.FLOAT, ["rows", 8], y)
    with Session(without_code(made, precision="fp32", ranges={"rows": (8, 96, 8)}), "cpu") as session:
        for rows_of in (8, 16, 96):
            x = np.random.default_rng(rows_of).standard_normal((rows_of, 8)).astype(np.float32)
            (found,) = session.run(None, {"x": x})
            np.testing.assert_allclose(found, np.tanh(x) if rows_of > 9 else -x, rtol=1e-5)
