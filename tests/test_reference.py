"""Each op's meaning against ONNX's reference formulas, written as plain loops or float64, or against ONNX Runtime."""

from __future__ import annotations

import itertools
import math
import re

import ml_dtypes
import numpy as np
import onnxruntime
import pytest
from onnx import TensorProto, helper

from tccompile.ir import expr as e
from tccompile.ir.evaluate import evaluate_expr
from tccompile.ir.expr import ACC, FUNCTIONS, Epilogue, View, call, const, coord, identity_view, load
from tccompile.ir.ops import OPS, Conv, Gemm, Norm, Op, Pointwise, Pool, Reduce, Resize, Softmax
from tccompile.ir.program import Program
from tccompile.ir.reference import compute, evaluate
from tccompile.ir.storage import from_storage, nearest, to_storage
from tccompile.ir.tensor import dense
from tccompile.ir.types import ELEMENTS, DType
from tccompile.ir.verify import verify
from tccompile.ir.weights import Literal, Source
from tccompile.lower.pointwise import FLOAT
from tests.networks import relative_error

F32 = DType.F32


def rng(*seed: int) -> np.random.Generator:
    return np.random.default_rng(seed or 0)


def meaning(op: Op, shape: tuple[int, ...], dtype: DType = F32, **values: np.ndarray) -> np.ndarray:
    """compute() of an op that reads `values` and writes y of `shape`."""
    types = {np.dtype(d.value): d for d in ELEMENTS if d.in_numpy}
    tensors = {name: dense(name, v.shape, types[v.dtype]) for name, v in values.items()}
    tensors["y"] = dense("y", shape, dtype)
    return compute(op, Program((), (), tensors, {}, (op,)), values)


def onnxruntime_runs(op_type: str, feeds: dict[str, np.ndarray], opset: int = 18, **attributes) -> np.ndarray:
    inputs = [helper.make_tensor_value_info(k, helper.np_dtype_to_tensor_dtype(v.dtype), v.shape) for k, v in feeds.items()]
    node = helper.make_node(op_type, list(feeds), ["y"], **attributes)
    graph = helper.make_graph([node], "g", inputs, [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=8)
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return session.run(None, feeds)[0]


CONVS = [
    # x, w, strides, pads (start, end), dilations, groups
    ((2, 3, 9, 8), (5, 3, 3, 3), (1, 1), (1, 1, 1, 1), (1, 1), 1),
    ((1, 4, 11, 7), (6, 4, 1, 1), (2, 2), (0, 0, 0, 0), (1, 1), 1),
    ((1, 4, 11, 13), (8, 2, 3, 5), (2, 3), (0, 3, 2, 1), (2, 1), 2),
    ((3, 6, 10, 10), (6, 1, 3, 3), (1, 2), (1, 1, 1, 1), (1, 1), 6),
    ((1, 4, 9, 9), (12, 1, 5, 3), (1, 1), (4, 0, 4, 2), (2, 1), 4),
    ((2, 4, 17), (3, 4, 5), (2,), (2, 1), (1,), 1),
    ((1, 6, 12), (6, 1, 3), (1,), (2, 2), (2,), 6),
]


@pytest.mark.parametrize("xs, ws, strides, pads, dilations, groups", CONVS)
def test_conv(xs, ws, strides, pads, dilations, groups):
    x, w = rng(1).standard_normal(xs, np.float32), rng(2).standard_normal(ws, np.float32)
    ref = onnxruntime_runs("Conv", {"x": x, "w": w}, strides=strides, pads=pads, dilations=dilations, group=groups)
    spatial = len(strides)
    op = Conv(nodes=("c",), y="y", x="x", w="w", strides=strides, pads=pads[:spatial], dilations=dilations, groups=groups)
    assert relative_error(meaning(op, ref.shape, x=x, w=w), ref) < 1e-6


def test_conv_that_ends_before_the_input_does():
    x, w = rng(1).standard_normal((1, 2, 6, 6), np.float32), rng(2).standard_normal((2, 2, 3, 3), np.float32)
    op = Conv(nodes=("c",), y="y", x="x", w="w", strides=(1, 1), pads=(0, 0), dilations=(1, 1))
    whole = meaning(op, (1, 2, 4, 4), x=x, w=w)
    assert relative_error(meaning(op, (1, 2, 2, 3), x=x, w=w), whole[:, :, :2, :3]) < 1e-6


def test_conv_in_blocks(monkeypatch):
    x, w = rng(1).standard_normal((3, 8, 12, 10), np.float32), rng(2).standard_normal((5, 8, 3, 3), np.float32)
    op = Conv(nodes=("c",), y="y", x="x", w="w", strides=(1, 1), pads=(1, 1), dilations=(1, 1))
    whole = meaning(op, (3, 5, 12, 10), x=x, w=w)
    for block in (1, 300, 3000, 20000):
        monkeypatch.setattr("tccompile.ir.ops.windows.BLOCK", block)
        assert relative_error(meaning(op, (3, 5, 12, 10), x=x, w=w), whole) < 1e-6


def test_conv_epilogue_and_shuffle():
    """relu(conv + bias) + residual, then depth-to-space: ONNX Runtime's operators, one after the other."""
    x, w = rng(1).standard_normal((2, 4, 5, 6), np.float32), rng(2).standard_normal((12, 4, 3, 3), np.float32)
    bias, residual = rng(3).standard_normal(12, np.float32), rng(4).standard_normal((2, 12, 5, 6), np.float32)
    loads = (View("bias", (coord(1),)), identity_view("residual", 4))
    expr = call("add", call("relu", call("add", ACC, load(0))), load(1))
    op = Conv(
        nodes=("c",), y="y", x="x", w="w", strides=(1, 1), pads=(1, 1), dilations=(1, 1),
        epilogue=Epilogue(expr, loads, shuffle=2),
    )  # fmt: skip
    ref = onnxruntime_runs("Conv", {"x": x, "w": w, "b": bias}, pads=(1, 1, 1, 1))
    ref = onnxruntime_runs("DepthToSpace", {"x": np.maximum(ref, 0) + residual}, blocksize=2, mode="DCR")
    assert relative_error(meaning(op, ref.shape, x=x, w=w, bias=bias, residual=residual), ref) < 1e-6


@pytest.mark.parametrize("a, b", [((5, 7), (3, 7)), ((2, 3, 5, 7), (4, 7)), ((2, 3, 5, 7), (2, 3, 4, 7)), ((5, 0), (3, 0))])
def test_gemm(a, b):
    a, b = rng(1).standard_normal(a, np.float32), rng(2).standard_normal(b, np.float32)
    ref = a.astype(np.float64) @ b.astype(np.float64).swapaxes(-1, -2)
    out = meaning(Gemm(nodes=("g",), y="y", a="a", b="b"), ref.shape, a=a, b=b)
    assert relative_error(out, ref) < 1e-6


POOLS = [
    # x, window, strides, pads (start, end), dilations, ceil
    ((2, 3, 9, 8), (3, 3), (2, 2), (1, 1, 1, 1), (1, 1), 0),
    ((1, 2, 10, 7), (3, 2), (2, 2), (0, 1, 2, 0), (1, 1), 1),
    ((1, 2, 12, 12), (3, 3), (1, 2), (2, 0, 0, 2), (2, 2), 0),
    ((1, 2, 13), (4,), (3,), (1, 2), (1,), 1),
]


@pytest.mark.parametrize("shape, window, strides, pads, dilations, ceil", POOLS)
@pytest.mark.parametrize("kind, count", [("max", False), ("mean", False), ("mean", True)])
def test_pool(shape, window, strides, pads, dilations, ceil, kind, count):
    x = rng(1).standard_normal(shape, np.float32)
    attributes = {"kernel_shape": window, "strides": strides, "pads": pads, "dilations": dilations, "ceil_mode": ceil}
    if kind == "max":
        ref = onnxruntime_runs("MaxPool", {"x": x}, **attributes)
    else:
        ref = onnxruntime_runs("AveragePool", {"x": x}, opset=19, count_include_pad=int(count), **attributes)
    n = len(window)
    op = Pool(
        nodes=("p",), y="y", x="x", kind=kind, window=window, strides=strides, pads=pads[:n], end_pads=pads[n:],
        dilations=dilations, count_pads=count,
    )  # fmt: skip
    assert relative_error(meaning(op, ref.shape, x=x), ref) < 1e-6


@pytest.mark.parametrize("axes", [(0,), (1, 2), (0, 1, 2)])
@pytest.mark.parametrize("combine", ["add", "mul", "min", "max"])
def test_reduce(axes, combine):
    x = rng(1).standard_normal((4, 5, 6), np.float32)
    function = {"add": np.sum, "mul": np.prod, "min": np.min, "max": np.max}[combine]
    ref = function(np.abs(x).astype(np.float64), axis=axes, keepdims=True)
    op = Reduce(nodes=("r",), y="y", x="x", axes=axes, combine=combine, pre=call("abs", ACC))
    assert relative_error(meaning(op, ref.shape, x=x), ref) < 1e-6


def test_a_long_sum_keeps_its_accuracy():
    x = rng(1).random((200_000, 3), np.float32) + 1
    op = Reduce(nodes=("r",), y="y", x="x", axes=(0,), combine="add")
    assert relative_error(meaning(op, (1, 3), x=x), x.sum(0, np.float64, keepdims=True)) < 1e-7


@pytest.mark.parametrize("axis", [0, 1, 2])
@pytest.mark.parametrize("log", [False, True])
def test_softmax(axis, log):
    x = 30 * rng(1).standard_normal((4, 5, 6), np.float32)
    ref = onnxruntime_runs("LogSoftmax" if log else "Softmax", {"x": x}, axis=axis)
    assert relative_error(meaning(Softmax(nodes=("s",), y="y", x="x", axis=axis, log=log), x.shape, x=x), ref) < 1e-6


@pytest.mark.parametrize("axes, groups", [((2, 3), 0), ((1,), 0), ((2, 3), 2), ((1, 2, 3), 0)])
def test_norm(axes, groups):
    x = 3 * rng(1).standard_normal((2, 6, 4, 5), np.float32) + 7
    d = x.astype(np.float64)
    if groups:
        d, over = d.reshape(2, groups, 3, 4, 5), (2, 3, 4)
    else:
        over = axes
    ref = ((d - d.mean(over, keepdims=True)) / np.sqrt(d.var(over, keepdims=True) + 1e-5)).reshape(x.shape)
    op = Norm(nodes=("n",), y="y", x="x", axes=axes, eps=1e-5, groups=groups)
    assert relative_error(meaning(op, x.shape, x=x), ref) < 1e-6


def test_resize():
    x = rng(1).standard_normal((2, 3, 4, 5), np.float32)
    index = [rng(2).integers(0, 4, (7, 2), np.int32), rng(3).integers(0, 5, (3, 3), np.int32)]
    weights = [rng(4).random((7, 2), np.float32), rng(5).random((3, 3), np.float32)]
    ref = np.zeros((2, 3, 7, 3))
    for p, q, t, u in itertools.product(range(7), range(3), range(2), range(3)):
        ref[:, :, p, q] += x[:, :, index[0][p, t], index[1][q, u]] * float(weights[0][p, t]) * float(weights[1][q, u])
    op = Resize(nodes=("r",), y="y", x="x", axes=(2, 3), index=("i0", "i1"), weights=("w0", "w1"))
    out = meaning(op, ref.shape, x=x, i0=index[0], i1=index[1], w0=weights[0], w1=weights[1])
    assert relative_error(out, ref) < 1e-6


def test_every_op_has_a_meaning_and_rules():
    """A plan with an op that nobody checks, or that the CPU cannot run, must not come to be."""
    for kind in OPS:
        assert kind.compute is not Op.compute and kind.rule is not Op.rule, kind.__name__


# --- Expressions -----------------------------------------------------------------------------------------------------


def pointwise(expr, loads, shape, dtype=F32, **values):
    return meaning(Pointwise(nodes=("p",), y="y", epilogue=Epilogue(expr, loads)), shape, dtype, **values)


ACTIVATIONS = {
    # ONNX's function, attributes of the node, further arguments of ours
    "erf": ("Erf", {}, ()),
    "gelu": ("Gelu", {}, ()),
    "gelu_tanh": ("Gelu", {"approximate": "tanh"}, ()),
    "mish": ("Mish", {}, ()),
    "softplus": ("Softplus", {}, ()),
    "softsign": ("Softsign", {}, ()),
    "sigmoid": ("Sigmoid", {}, ()),
    "hard_swish": ("HardSwish", {}, ()),
    "hard_sigmoid": ("HardSigmoid", {"alpha": 0.3, "beta": 0.4}, (0.3, 0.4)),
    "elu": ("Elu", {"alpha": 1.5}, (1.5,)),
    "selu": ("Selu", {"alpha": 1.5, "gamma": 1.1}, (1.5, 1.1)),
    "celu": ("Celu", {"alpha": 2.0}, (2.0,)),
    "leaky_relu": ("LeakyRelu", {"alpha": 0.2}, (0.2,)),
    "thresholded_relu": ("ThresholdedRelu", {"alpha": 0.7}, (0.7,)),
    "shrink": ("Shrink", {"bias": 0.3, "lambd": 0.6}, (0.3, 0.6)),
    "round": ("Round", {}, ()),
    "sign": ("Sign", {}, ()),
    "reciprocal": ("Reciprocal", {}, ()),
    "atanh": ("Atanh", {}, ()),
    "tan": ("Tan", {}, ()),
}


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_functions(name):
    op_type, attributes, arguments = ACTIVATIONS[name]
    x = np.concatenate([np.linspace(-9, 9, 997), [0.0, 0.5, 1.5, 2.5, -0.5]]).astype(np.float32)
    x = np.tanh(x) * 0.99 if name == "atanh" else x
    x = x[x != 0] if name == "reciprocal" else x
    ref = onnxruntime_runs(op_type, {"x": x}, opset=22, **attributes)
    out = pointwise(call(name, load(0), *arguments), (identity_view("x", 1),), x.shape, x=x)
    assert out.dtype == np.float32
    assert relative_error(out, ref) < 1e-6


def test_what_onnx_calls_functions_has_its_lines():
    """For each name in FLOAT a function, and beside ONNX Runtime, unless it is one of NumPy's, its line in ACTIVATIONS."""
    for op_type, (name, _) in FLOAT.items():
        assert name in FUNCTIONS, f"{op_type}: add a line for {name} to FUNCTIONS in tccompile/ir/expr.py"
        assert name in ACTIVATIONS or re.fullmatch(r"\w+\(x\)", FUNCTIONS[name].body), f"add {name} to ACTIVATIONS here"
    with pytest.raises(NameError, match=r"no function 'mush': add its line to FUNCTIONS in tccompile/ir/expr.py"):
        call("mush", load(0))


def test_every_function_evaluates_in_its_type():
    """Each function gives the type that its expression says, whatever NumPy would promote to."""
    for name, function in FUNCTIONS.items():
        dtype = DType.I64 if name.startswith("bit_") else DType.BOOL if name == "logical_not" else F32
        x = (rng(1).random((3, 4)) + 0.1).astype(dtype.numpy)
        expr = call(name, *[load(0, dtype)] * len(function.params))
        if name == "where":
            expr = call("where", call("less", load(0), 0.5), load(0), 2.0)
        out = pointwise(expr, (identity_view("x", 2),), (3, 4), expr.dtype, x=x)
        assert out.dtype == expr.dtype.numpy, name


@pytest.mark.parametrize(
    "name, python",
    [
        ("trunc_div", lambda a, b: math.trunc(a / b)),
        ("floor_mod", lambda a, b: a % b),
        ("fmod", lambda a, b: int(math.fmod(a, b))),
    ],
)
def test_integer_division(name, python):
    a, b = (np.array(v, np.int64) for v in zip(*itertools.product(range(-7, 8), [-3, -2, -1, 1, 2, 3]), strict=True))
    expr = call(name, load(0, DType.I64), load(1, DType.I64))
    out = pointwise(expr, (identity_view("a", 1), identity_view("b", 1)), a.shape, DType.I64, a=a, b=b)
    assert out.tolist() == [python(int(x), int(y)) for x, y in zip(a, b, strict=True)]


def test_integer_power():
    a, b = (np.array(v, np.int64) for v in zip(*itertools.product([-3, -2, -1, 1, 2, 3], range(-3, 5)), strict=True))
    expr = call("pow", load(0, DType.I64), load(1, DType.I64))
    out = pointwise(expr, (identity_view("a", 1), identity_view("b", 1)), a.shape, DType.I64, a=a, b=b)
    assert out.tolist() == [math.trunc(float(x) ** int(y)) for x, y in zip(a, b, strict=True)]


def test_division_by_zero_and_nan_go_through():
    x = np.array([1.0, -1.0, 0.0, np.nan], np.float32)
    out = pointwise(call("div", load(0), 0.0), (identity_view("x", 1),), (4,), x=x)
    np.testing.assert_array_equal(out, [np.inf, -np.inf, np.nan, np.nan])
    out = pointwise(call("relu", load(0)), (identity_view("x", 1),), (4,), x=x)
    np.testing.assert_array_equal(out, [1, 0, 0, np.nan])


def test_views_broadcast_shift_and_pad():
    x, y = rng(1).standard_normal((3, 1, 5), np.float32), rng(2).standard_normal((4, 1), np.float32)
    loads = (e.broadcast_view("a", (3, 1, 5), (3, 4, 5)), e.broadcast_view("b", (4, 1), (3, 4, 5)))
    np.testing.assert_array_equal(pointwise(call("sub", load(0), load(1)), loads, (3, 4, 5), a=x, b=y), x - y)
    flat = (e.reshape_view("a", (3, 1, 5), (5, 3)),)
    np.testing.assert_array_equal(pointwise(load(0), flat, (5, 3), a=x), x.reshape(5, 3))


def test_a_view_that_is_never_valid_is_its_fill():
    """A constant index beyond the edge, as a shift by a whole extent leaves it."""
    x = np.arange(8, dtype=np.float32).reshape(2, 4)
    for i in (-1, 4):
        outside = View("x", (coord(0), e.constant(i)), (e.Range(e.constant(i), 0, 4),), 7.0)
        np.testing.assert_array_equal(pointwise(load(0), (outside,), (2, 3), x=x), np.full((2, 3), 7))


def test_an_empty_tensor_is_its_fill():
    x = np.zeros((2, 0), np.float32)
    padded = View("x", (coord(0), coord(1) - 1), (e.Range(coord(1) - 1, 0, 0),), 3.0)
    np.testing.assert_array_equal(pointwise(load(0), (padded,), (2, 2), x=x), np.full((2, 2), 3))


def test_a_shared_part_is_evaluated_once():
    """x doubled 60 times: 2^60 additions if parts were not shared."""
    expr = load(0)
    for _ in range(60):
        expr = call("add", expr, expr)
    values = {"x": np.ones(2, np.float32)}
    out = evaluate_expr(expr, (identity_view("x", 1),), values, (2,))
    np.testing.assert_array_equal(out, np.float32(2.0**60))


# --- Storage ---------------------------------------------------------------------------------------------------------


def test_rounding_to_fp16_and_bf16():
    x = rng(1).standard_normal(5000).astype(np.float32) * 100
    x = np.concatenate([x, [65504, 65519.9, 65520, 1e30, -1e30, np.inf, 1e-8, 2.0**-24, 2.0**-25, 1.5 * 2.0**-24]]).astype(
        np.float32
    )
    half = to_storage(x, DType.F16)
    assert half.dtype == np.float16
    assert half[5000:5006].tolist() == [65504, 65504, np.inf, np.inf, -np.inf, np.inf]
    assert half[5006:].tolist() == [0, 2.0**-24, 0, 2.0**-23]
    bits = to_storage(x, DType.BF16)
    assert bits.dtype == np.uint16
    np.testing.assert_array_equal(bits, x.astype(ml_dtypes.bfloat16).view(np.uint16))
    np.testing.assert_array_equal(from_storage(bits, DType.BF16), x.astype(ml_dtypes.bfloat16).astype(np.float32))
    assert np.isnan(from_storage(to_storage(np.array([np.nan, -np.nan], np.float32), DType.BF16), DType.BF16)).all()


@pytest.mark.parametrize(("dtype", "known"), [(DType.E4M3, ml_dtypes.float8_e4m3fn), (DType.E5M2, ml_dtypes.float8_e5m2)])
def test_rounding_to_floats_of_8_bits(dtype: DType, known: type):
    every = np.arange(256, dtype=np.uint8)
    numbers = from_storage(every, dtype)
    np.testing.assert_array_equal(numbers, every.view(known).astype(np.float32))
    halfway = np.unique(numbers[np.isfinite(numbers)])
    halfway = ((halfway[1:] + halfway[:-1]) / 2).astype(np.float32)
    around = [np.nextafter(halfway, np.float32(end)) for end in (-np.inf, np.inf)]
    others = rng(1).standard_normal(4000) * 2.0 ** rng(2).integers(-30, 20, 4000)
    x = np.concatenate([halfway, *around, others, numbers, [1e30, -1e30, -np.inf, -0.0, -1e-20]]).astype(np.float32)
    with np.errstate(invalid="ignore"):
        expected = np.clip(x, -dtype.largest, dtype.largest).astype(known).view(np.uint8)
    bits = to_storage(x, dtype)
    assert bits.dtype == np.uint8
    np.testing.assert_array_equal(bits, np.where(np.isnan(x), 0x7F, expected))
    np.testing.assert_array_equal(nearest(x, dtype), from_storage(bits, dtype))


def test_floats_to_integers_truncate_and_saturate():
    x = np.array([1.9, -1.9, 300.0, -300.0, np.inf, -np.inf, np.nan, 3e18, 1e19, -1e19], np.float32)
    assert to_storage(x, DType.I8).tolist() == [1, -1, 127, -128, 127, -128, 0, 127, 127, -128]
    assert to_storage(x, DType.U8).tolist() == [1, 0, 255, 0, 255, 0, 0, 255, 255, 0]
    top, low = 2**63 - 1, -(2**63)
    assert to_storage(x, DType.I64).tolist() == [1, -1, 300, -300, top, low, 0, int(x[7]), top, low]
    assert to_storage(np.array([257, -1]), DType.U8).tolist() == [1, 255]
    assert to_storage(x, DType.BOOL).all()
    expr = e.cast(load(0), DType.I64)
    assert pointwise(expr, (identity_view("x", 1),), (10,), DType.I64, x=x)[:4].tolist() == [1, -1, 300, -300]


# --- Programs --------------------------------------------------------------------------------------------------------


def small_program() -> Program:
    """Two convolutions whose results are concatenated by views, a slice of that, and a Gemm over its mean."""
    image = (0, 2, 3, 1)
    cat = dense("cat", (1, 16, 6, 6), DType.F16, image)
    tensors = [
        dense("x", (1, 3, 6, 6), F32, pad=1), dense("xh", (1, 3, 6, 6), DType.F16, image),
        dense("w1", (8, 3, 3, 3), DType.F16, image), dense("w2", (8, 3, 1, 1), DType.F16, image), cat,
        *(type(cat)(n, (1, 8, 6, 6), DType.F16, (1, 8, 6, 6), cat.strides, "cat", 8 * i) for i, n in enumerate(("c1", "c2"))),
        dense("mean", (1, 16, 1, 1), DType.F16, image), dense("flat", (1, 16), DType.F16), dense("fc", (5, 16), DType.F16),
        dense("b", (5,), F32), dense("y", (1, 5), F32, pad=1),
    ]  # fmt: skip
    geometry = {"strides": (1, 1), "dilations": (1, 1)}
    ops = (
        Pointwise(nodes=("in",), y="xh", epilogue=Epilogue(load(0), (identity_view("x", 4),))),
        Conv(nodes=("c1",), y="c1", x="xh", w="w1", pads=(1, 1), **geometry),
        Conv(nodes=("c2",), y="c2", x="xh", w="w2", pads=(0, 0), **geometry, epilogue=Epilogue(call("relu", ACC))),
        Reduce(nodes=("m",), y="mean", x="cat", axes=(2, 3), combine="add", epilogue=Epilogue(call("mul", ACC, const(1 / 36)))),
        Pointwise(nodes=("f",), y="flat", epilogue=Epilogue(load(0), (e.reshape_view("mean", (1, 16, 1, 1), (1, 16)),))),
        Gemm(nodes=("fc",), y="y", a="flat", b="fc", epilogue=Epilogue(call("add", ACC, load(0)), (View("b", (coord(1),)),))),
    )
    constants = {n: Source(n, t.shape, "float32") for t in tensors for n in [t.name] if n in ("w1", "w2", "fc")}
    constants["b"] = Literal(np.arange(5, dtype=np.float32))
    program = Program(("x",), ("y",), {t.name: t for t in tensors}, constants, ops)
    verify(program)
    return program


def test_evaluate_a_program():
    program, r = small_program(), rng(7)
    feeds = {"x": r.standard_normal((1, 3, 6, 6), np.float32)}
    sources = {n: r.standard_normal(program.tensors[n].shape, np.float32) for n in ("w1", "w2", "fc")}
    c1 = onnxruntime_runs("Conv", {"x": feeds["x"], "w": sources["w1"]}, pads=(1, 1, 1, 1))
    c2 = onnxruntime_runs("Conv", {"x": feeds["x"], "w": sources["w2"]})
    mean = np.concatenate([c1, np.maximum(c2, 0)], 1).mean((2, 3))
    out = evaluate(program, feeds, sources)
    assert list(out) == ["y"]
    assert relative_error(out["y"], mean @ sources["fc"].T + np.arange(5)) < 1e-6
