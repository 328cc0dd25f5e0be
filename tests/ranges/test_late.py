"""Tables that depend on every size: they are computed when the plan runs."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, numpy_helper

from tccompile.ir.expr import Expr, call, const, load
from tccompile.ir.extent import Open
from tccompile.ir.metric import relative_error
from tccompile.kernels.codegen import lifted
from tccompile.kernels.spec import F32
from tccompile.options import Options
from tccompile.pipeline import Dump, Told, quiet, read, to_parts, to_patterns, without_code
from tccompile.ranges.pool import Known
from tccompile.runtime.session import Session
from tccompile.schedule.timings import NO_TIMINGS
from tccompile.sizes import Size
from tests.ranges.models import Graph
from tests.tiers import usually


def beside_onnxruntime(model: onnx.ModelProto, sizes: tuple[int, ...], low: int, high: int, step: int = 1) -> float:
    """The largest error of a plan for low to high tokens or rows, in steps, at these of them."""
    (name,) = (d.dim_param for d in model.graph.input[0].type.tensor_type.shape.dim if d.dim_param)
    session = Session(without_code(model, precision="fp32", ranges={name: (low, high, step)}), device="cpu")
    oracle = onnxruntime.InferenceSession(model.SerializeToString())
    shape = [d.dim_value for d in model.graph.input[0].type.tensor_type.shape.dim]
    errors = []
    for n in sizes:
        x = np.random.default_rng(n).standard_normal([m or n for m in shape]).astype(np.float32)
        (out,), (expected,) = session.run(None, {"x": x}), oracle.run(None, {"x": x})
        assert out.shape == expected.shape
        errors.append(relative_error(out, expected))
    return max(errors)


# --- Resize ----------------------------------------------------------------------------------------------------------

RESIZED = {
    "linear": {"mode": "linear"},
    "cubic": {"mode": "cubic", "cubic_coeff_a": -0.5},
    "corners": {"mode": "linear", "coordinate_transformation_mode": "align_corners"},
    "symmetric": {"mode": "linear", "coordinate_transformation_mode": "half_pixel_symmetric"},
    "asymmetric": {"mode": "nearest", "coordinate_transformation_mode": "asymmetric", "nearest_mode": "floor"},
    "nearest": {"mode": "nearest", "coordinate_transformation_mode": "pytorch_half_pixel"},
    "ceil": {"mode": "nearest", "nearest_mode": "round_prefer_ceil"},
}


def resized(size: str, how: dict) -> onnx.ModelProto:
    """To one size, by a factor, or to a size that follows from the image's."""
    g = Graph()
    x = g.op("Relu", "x")
    match size:
        case "given":
            y = g.op("Resize", x, "", "", g.numbers(1, 3, 13, 10), **how)
        case "scaled":
            y = g.op("Resize", x, "", g.value(np.array([1, 1, 1.5, 2], np.float32)), **how)
        case _:
            rows = g.op("Sub", g.op("Mul", g.extent("x", 2), g.numbers(2)), g.numbers(3))
            y = g.op("Resize", x, "", "", g.op("Concat", g.numbers(1, 3), rows, g.numbers(7), axis=0), **how)
    return g.model("x", TensorProto.FLOAT, [1, 3, "h", 5], g.op("Sigmoid", y))


FIXED = [("given", how) for how in RESIZED if how != "linear"]


@pytest.mark.parametrize("size, how", usually([("given", "linear"), ("follows", "nearest"), ("scaled", "linear"), *FIXED], 0, 1))
def test_images_of_any_size_are_resized(size, how):
    assert beside_onnxruntime(resized(size, RESIZED[how]), (4, 5, 9, 13, 26, 30), 4, 30) < 1e-6


# --- Fourier transforms, grids ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("there_and_back", usually([False, True], 0))
def test_transforms_of_any_length(there_and_back):
    """ONNX Runtime's angles are of less digits than NumPy's. There and back, an innermost axis is cut and joined, which is a view
    at some lengths only."""
    g = Graph()
    x = g.op("Unsqueeze", "x", g.numbers(-1))
    y = g.op("DFT", x, axis=1, onesided=int(there_and_back))
    if there_and_back:
        y = g.op("Squeeze", g.op("DFT", y, axis=1, inverse=1), g.numbers(0))
    session = Session(without_code(g.model("x", TensorProto.FLOAT, [1, "n"], y), precision="fp32", ranges={"n": (3, 200)}), "cpu")
    for n in (3, 4, 8, 97, 200):
        x = np.random.default_rng(n).standard_normal((1, n))
        expected = np.fft.ifft(np.fft.rfft(x))[0] if there_and_back else np.fft.fft(x)
        (out,) = session.run(None, {"x": x.astype(np.float32)})
        assert relative_error(out, np.stack([expected.real, expected.imag], -1)) < 1e-6


@pytest.mark.parametrize("corners", usually([0, 1], 0))
def test_grids_of_any_size(corners):
    """An image is turned: the grid is as large as the image, and what is read of it depends on how large that is."""
    g = Graph()
    theta = g.value(np.array([[[0.8, -0.5, 0.1], [0.4, 0.9, -0.2]]], np.float32))
    grid = g.op("AffineGrid", theta, g.op("Shape", "x"), align_corners=corners)
    y = g.op("GridSample", "x", grid, mode="linear", padding_mode="reflection", align_corners=corners)
    model = g.model("x", TensorProto.FLOAT, [1, 2, "h", 6], y)
    model.opset_import[0].version = 20
    assert beside_onnxruntime(model, (3, 4, 5, 9, 22, 30), 3, 30) < 1e-5


# --- Positions, masks, angles ----------------------------------------------------------------------------------------


def _count(g: Graph) -> str:
    return g.op("Squeeze", g.extent("x", 1), g.numbers(0))


def _places(g: Graph, start: str = "", end: str = "") -> str:
    return g.op("Range", start or g.value(np.int64(0)), end or _count(g), g.value(np.int64(1)))


def _ahead(g: Graph) -> str:
    places = _places(g)
    return g.op("Sub", g.op("Unsqueeze", places, g.numbers(0)), g.op("Unsqueeze", places, g.numbers(1)))


def _mixed(g: Graph, scores: str) -> str:
    return g.op("MatMul", g.op("Softmax", scores, axis=-1), "x")


def _scores(g: Graph) -> str:
    return g.op("MatMul", "x", g.op("Transpose", "x", perm=[0, 2, 1]))


def angles(g: Graph) -> str:
    """Sines of positions from 0 to 1."""
    last = g.op("Cast", g.op("Sub", _count(g), g.value(np.int64(1))), to=TensorProto.FLOAT)
    share = g.op("Div", g.op("Cast", _places(g), to=TensorProto.FLOAT), last)
    every = g.op("MatMul", g.op("Unsqueeze", share, g.numbers(1)), g.value(np.linspace(0, 9, 16, dtype=np.float32)[None]))
    return g.op("Add", "x", g.op("Sin", every))


def window(g: Graph) -> str:
    """Tokens see what is at most half of all tokens away."""
    far = g.op("Greater", g.op("Abs", _ahead(g)), g.op("Div", _count(g), g.value(np.int64(2))))
    return _mixed(g, g.op("Where", far, g.value(np.float32(-1e4)), _scores(g)))


def buckets(g: Graph) -> str:
    """A bias for each distance between tokens, from the model's weights."""
    near = g.op("Max", g.op("Min", _ahead(g), g.value(np.int64(7))), g.value(np.int64(-8)))
    bias = g.op("Gather", g.weight(16, 2, scale=1), g.op("Add", near, g.value(np.int64(8))))
    bias = g.op("ReduceSum", g.op("Transpose", bias, perm=[2, 0, 1]), g.numbers(0), keepdims=0)
    return _mixed(g, g.op("Add", _scores(g), bias))


def behind(g: Graph) -> str:
    """Embeddings of positions behind as many others."""
    twice = g.op("Mul", _count(g), g.value(np.int64(2)))
    return g.op("Add", "x", g.op("Gather", g.weight(100, 16, scale=1), _places(g, _count(g), twice)))


def of_tokens(table: Callable[[Graph], str]) -> onnx.ModelProto:
    g = Graph()
    return g.model("x", TensorProto.FLOAT, [2, "n", 16], table(g))


@pytest.mark.parametrize("table", usually([window, angles, buckets, behind], 0, 1))
def test_tables_of_any_size_are_computed(table):
    assert beside_onnxruntime(of_tokens(table), (2, 3, 8, 17, 40), 2, 40) < 1e-6


def test_ones_that_are_summed_up():
    """As places are counted, from the last one, in a mask of all tokens, which is a constant of two sizes."""
    g = Graph()
    zeros = g.op("ConstantOfShape", g.op("Slice", g.op("Shape", "x"), g.numbers(0), g.numbers(2)))
    mask = g.op("Cast", g.op("Not", g.op("Equal", zeros, g.value(np.float32(1)))), to=TensorProto.INT32)
    places = g.op("Cast", g.op("Mul", g.op("CumSum", mask, g.value(np.int64(1)), reverse=1), mask), to=TensorProto.INT64)
    rows = g.op("Gather", g.weight(30, 4), g.op("Reshape", places, g.numbers(-1)))
    model = g.model("x", TensorProto.FLOAT, ["batch", "n", 4], g.op("Add", "x", g.op("Reshape", rows, g.op("Shape", "x"))))
    plan = without_code(model, precision="fp32", ranges={"batch": (1, 3), "n": (3, 20)})
    assert len(plan.entries) == 2  # for one batch and for several
    session = Session(plan, device="cpu")
    x = np.random.default_rng(0).standard_normal((3, 17, 4)).astype(np.float32)
    (expected,) = onnxruntime.InferenceSession(model.SerializeToString()).run(None, {"x": x})
    assert relative_error(session.run(None, {"x": x})[0], expected) < 1e-6


def test_ones_that_are_joined_to_others():
    """As distances of points are written as one product: (-2 x, |x|², 1) by (x, 1, |x|²)."""
    g = Graph()
    square = g.op("ReduceSum", g.op("Mul", "x", "x"), g.numbers(2), keepdims=1)
    ones = g.op("ConstantOfShape", g.op("Shape", square), value=numpy_helper.from_array(np.ones(1, np.float32)))
    a = g.op("Concat", g.op("Mul", "x", g.value(np.float32(-2))), square, ones, axis=2)
    b = g.op("Concat", "x", ones, square, axis=2)
    model = g.model("x", TensorProto.FLOAT, [1, "n", 3], g.op("MatMul", a, g.op("Transpose", b, perm=[0, 2, 1])))
    assert beside_onnxruntime(model, (2, 3, 8, 17, 40), 2, 40) < 1e-6


def test_a_result_that_needs_no_padding_at_some_sizes_is_made_as_at_others():
    g = Graph()
    at = g.op("Range", g.value(np.int64(0)), g.op("Squeeze", g.extent("x", 1)), g.value(np.int64(1)))
    apart = g.op("Sub", g.op("Unsqueeze", at, g.numbers(1)), g.op("Unsqueeze", at, g.numbers(0)))
    kernels = g.op("Mul", g.op("Cos", g.op("Cast", apart, to=TensorProto.FLOAT)), g.weight(16, 1, 1))
    y = g.op("Einsum", kernels, g.op("MatMul", "x", g.weight(3, 16)), equation="dlm,bmd->bld")
    y = g.op("MatMul", g.op("Mul", y, g.op("Sigmoid", y)), g.weight(16, 5))
    model = g.model("x", TensorProto.FLOAT, ["batch", "n", 3], y)
    plan = without_code(model, precision="fp32", ranges={"batch": (1, 1), "n": (55, 86)})
    assert len(plan.entries) == 1
    x = np.random.default_rng(0).standard_normal((1, 72, 3)).astype(np.float32)
    (expected,) = onnxruntime.InferenceSession(model.SerializeToString()).run(None, {"x": x})
    assert relative_error(Session(plan, device="cpu").run(None, {"x": x})[0], expected) < 1e-6


# --- On a GPU --------------------------------------------------------------------------------------------------------


def test_sizes_in_expressions_are_arguments():
    """... whatever they are operands of: the code is the same at all sizes."""
    n = Open("size", ("n",), np.array([3, 4, 9]))
    size = Expr("const", (), n / 1)
    _, args = lifted(call("min", load(0), call("div", const(2.0), size)))
    assert [a.value.values.tolist() for a in args if isinstance(a, F32)] == [[3, 4, 9]]


def farthest() -> onnx.ModelProto:
    """A place along an axis that fills vectors at some sizes."""
    g = Graph()
    at = g.op("ArgMax", g.op("ReduceSum", g.op("Mul", "x", "x"), g.numbers(2), keepdims=0), axis=1, keepdims=0)
    return g.model("x", TensorProto.FLOAT, [3, "n", 3], g.op("Gather", g.weight(20, 3), at))


@pytest.mark.parametrize("arch", usually(["sm_80", "sm_61"], "sm_80"))
@pytest.mark.parametrize("model", [lambda: resized("given", RESIZED["linear"]), lambda: of_tokens(window), farthest])
def test_kernels_compute_tables(model, arch):
    """Their launches are held to those for fixed shapes as they are made."""
    ranges = {name: Size(name, 9, 20) for name in "hn" if f'"{name}"' in str(model())}
    (pattern,), options = to_patterns(read(model()), Options(archs=(arch,), ranges=ranges), Dump(None), quiet, Told())
    assert to_parts(pattern, options, quiet, (), NO_TIMINGS, Known())
