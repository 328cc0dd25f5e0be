"""Elementwise ops against ONNX Runtime: broadcasting, constants, types."""

from __future__ import annotations

import numpy as np
import onnx
import pytest

from tccompile import backend
from tccompile.ir.evaluate import evaluate_expr
from tccompile.ir.expr import FUNCTIONS, const
from tccompile.ir.reference import evaluate
from tccompile.ir.types import DType
from tccompile.load.model import load
from tccompile.lower.graph import lower
from tccompile.lower.pointwise import ANY, FLOAT, wrapped
from tests.networks import reference
from tests.ops.common import Net, agrees

UNIT = ("Asin", "Acos", "Atanh")
POSITIVE = ("Sqrt", "Log", "Reciprocal")


@pytest.mark.parametrize("op", [op for op in FLOAT if op != "IsNaN"])
def test_functions_of_floats(op: str) -> None:
    net = Net(x=(3, 50))
    x = np.random.default_rng(1).standard_normal((3, 50)).astype(np.float32)
    x = np.tanh(x) * np.float32(0.9) if op in UNIT else np.abs(x) + np.float32(0.1) if op in POSITIVE else x * 3
    x = np.abs(x) + np.float32(1.01) if op == "Acosh" else x
    agrees(net.out(net(op, "x")), {"x": x})


@pytest.mark.parametrize(
    ("op", "attrs"),
    [
        ("LeakyRelu", {"alpha": 0.3}),
        ("Elu", {"alpha": 0.5}),
        ("Selu", {"alpha": 1.5, "gamma": 2.0}),
        ("Celu", {"alpha": 0.7}),
        ("ThresholdedRelu", {"alpha": 0.4}),
        ("HardSigmoid", {"alpha": 0.3, "beta": 0.4}),
        ("Shrink", {"lambd": 0.7, "bias": 0.2}),
        ("Gelu", {}),
        ("Gelu", {"approximate": "tanh"}),
    ],
)
def test_attributes(op: str, attrs: dict) -> None:
    net = Net(x=(4, 33))
    agrees(net.out(net(op, "x", **attrs)))


SHAPES = (
    ((2, 3, 4, 5), (2, 3, 4, 5)),
    ((2, 3, 4, 5), (3, 1, 1)),
    ((5,), (2, 1, 5)),
    ((1, 3, 1), (2, 1, 4)),
    ((), (2, 3)),
    ((2, 3), (1,)),
)


@pytest.mark.parametrize("op", ["Add", "Sub", "Mul", "Div", "PRelu", "Min", "Less", "GreaterOrEqual", "Equal"])
@pytest.mark.parametrize(("a", "b"), SHAPES)
def test_broadcasting(op: str, a: tuple[int, ...], b: tuple[int, ...]) -> None:
    if op == "PRelu" and np.broadcast_shapes(a, b) != a:
        pytest.skip("the slope is broadcast to the input, not the other way")
    net = Net(x=a, y=b)
    agrees(net.out(net(op, "x", "y")))


@pytest.mark.parametrize("op", ["Add", "Sub", "Mul", "Div", "Max"])
@pytest.mark.parametrize("shape", [(), (1,), (3,), (1, 3), (4, 1)])
def test_constants(op: str, shape: tuple[int, ...]) -> None:
    net = Net(x=(4, 3))
    program = agrees(net.out(net(op, "x", net.normal(*shape)), net(op, net.normal(*shape), "x")))
    if shape in ((), (1,)):
        assert not program.constants, "one number is part of the expression"


@pytest.mark.parametrize("op", ["Sum", "Mean", "Min", "Max"])
def test_variadic(op: str) -> None:
    net = Net(x=(4, 3), y=(3,), z=(4, 1))
    agrees(net.out(net(op, "x", "y", "z"), net(op, "x")))


def test_an_image_keeps_its_layout() -> None:
    net = Net(x=(1, 3, 6, 6))
    y = net("Conv", "x", net.normal(5, 3, 3, 3))
    z = net("Mul", net("Sigmoid", net("GlobalAveragePool", y)), net("Add", y, net.normal(5, 1, 1)))
    program = agrees(net.out(z))
    inside = [program.tensors[op.y] for op in program.ops if program.tensors[op.y].rank == 4 and op.y not in program.outputs]
    assert len(inside) > 4 and all(t.inner == 1 and t.padded[1] == 8 for t in inside)


def test_clip_with_constant_and_computed_bounds() -> None:
    net = Net(x=(4, 30), low=(), high=())
    c = net("Clip", "x", np.float32(-0.5), np.float32(0.25))
    d = net("Clip", "x", None, np.float32(0.25))
    e = net("Clip", "x", "low", "high")
    agrees(net.out(c, d, e), {"low": np.array(-0.3, np.float32), "high": np.array(0.8, np.float32)})


@pytest.mark.parametrize("exponent", [2.0, 3.0, 0.5, 1.0, -1.5])
def test_powers(exponent: float) -> None:
    net = Net(x=(4, 30))
    agrees(net.out(net("Pow", "x", np.float32(exponent))), {"x": np.linspace(0.1, 3, 120, dtype=np.float32).reshape(4, 30)})


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
@pytest.mark.parametrize("op", ["Add", "Sub", "Mul", "Div", "Mod", "Max", "Abs", "Sign", "Neg"])
def test_integers(op: str, dtype: type) -> None:
    rng = np.random.default_rng(2)
    x = rng.integers(-50, 50, (4, 9)).astype(dtype)
    y = rng.integers(1, 9, (4, 9)).astype(dtype) * rng.choice([-1, 1], (4, 9)).astype(dtype)
    names = ("x", "y") if op in ("Add", "Sub", "Mul", "Div", "Mod", "Max") else ("x",)
    net = Net(dtype=dtype, **dict.fromkeys(names, (4, 9)))
    agrees(net.out(net(op, *names)), dict(zip(names, (x, y), strict=False)), tolerance=0)


@pytest.mark.parametrize("op", ["Where", "And", "Or", "Xor", "Not"])
def test_booleans(op: str) -> None:
    net = Net(x=(4, 9), y=(9,))
    p, q = net("Greater", "x", np.float32(0.2)), net("Less", "y", np.float32(0))
    args = {"Where": (p, "x", "y"), "Not": (p,)}.get(op, (p, q))
    agrees(net.out(net(op, *args)))


@pytest.mark.parametrize("to", ["FLOAT", "FLOAT16", "DOUBLE", "INT32", "INT64", "UINT8", "BOOL"])
def test_casts_of_floats(to: str) -> None:
    net = Net(x=(4, 9))
    y = net("Cast", "x", to=getattr(onnx.TensorProto, to))
    agrees(
        net.out(y), {"x": np.linspace(0, 200.5, 36, dtype=np.float32).reshape(4, 9)}, tolerance=1e-3 if to == "FLOAT16" else 1e-6
    )


def test_remainders_of_floats() -> None:
    net = Net(x=(4, 9), y=(4, 9))
    agrees(net.out(net("Mod", "x", "y", fmod=1)))


def test_infinities_and_nans_are_told_apart() -> None:
    x = np.array([1.0, np.inf, -np.inf, np.nan], np.float32)
    net = Net(x=(4,))
    found = [net("IsInf", "x"), net("IsInf", "x", detect_negative=0), net("IsInf", "x", detect_positive=0), net("IsNaN", "x")]
    agrees(net.out(*found), {"x": x}, tolerance=0)


@pytest.mark.parametrize("dtype", [DType.U8, DType.I8, DType.U16, DType.I16, DType.U32, DType.I32])
def test_integers_wrap_in_registers_as_in_memory(dtype: DType) -> None:
    for value in (-(1 << 40) - 3, -129, -1, 0, 127, 128, 255, 65537, (1 << 31), (1 << 40) + 5):
        expr = wrapped(const(value, DType.I64), dtype)
        got = int(np.asarray(evaluate_expr(expr, (), {}, (), None)))
        assert got == int(np.array(value).astype(dtype.numpy)), f"{value} as {dtype.value}"


def test_bytes_overflow_between_ops() -> None:
    net = Net(dtype=np.uint8, x=(6,))
    y = net("Cast", net("Sub", "x", np.array([10], np.uint8)), to=onnx.TensorProto.FLOAT)
    x = np.array([0, 5, 10, 20, 200, 255], np.uint8)
    model = net.out(y).model()
    assert evaluate(lower(load(model)), {"x": x}, {})[y].tolist() == [246, 251, 0, 10, 190, 245]


def test_the_tables_name_functions_that_exist() -> None:
    for op, (fn, attributes) in FLOAT.items():
        assert len(FUNCTIONS[fn].params) == 1 + len(attributes), op
    assert not set(FLOAT) & set(ANY)


@pytest.mark.parametrize("op", ["Less", "LessOrEqual", "Greater", "GreaterOrEqual", "Min", "Max"])
def test_order_of_uint64(op: str) -> None:
    values = np.array([0, 1, 2**63 - 1, 2**63, 2**64 - 1], np.uint64)
    net = Net(x=(np.uint64, (5, 1)), y=(np.uint64, (1, 5)))
    outs = [net(op, "x", "y"), net(op, "x", np.array(2**63, np.uint64))]
    model, inputs = net.out(*outs).model(), {"x": values[:, None], "y": values[None]}
    for out, expected in zip(backend.run_model(model, inputs), reference(model, inputs).values(), strict=True):
        assert out.dtype == expected.dtype
        np.testing.assert_array_equal(out, expected)
