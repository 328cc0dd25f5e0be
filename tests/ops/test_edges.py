"""Numbers at the edges, as ONNX Runtime has them: infinities, NaN and what no integer type holds; and ops that do nothing."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from onnx import TensorProto

from tccompile.arch import ARCHS
from tccompile.runtime.session import Session
from tests.kernels.replay import replay
from tests.networks import feeds, reference
from tests.ops.common import Net
from tests.plans import without_code

INF, NAN = np.inf, np.nan
FLOATS = np.array(
    [
        *(0, -0.0, 0.5, 1.5, -1.5, 127, 128, 255.7, 256, -1, -129, 300, 32767.5, 32768, 65535, 65536, -32769, 70000, 2147483520),
        *(2147483648, -2147483648, -2147483904, 4294967040, 4294967296, 5e9, -5e9, 9.2e18, 9.3e18, -9.3e18, 1.9e19, 3e38, -3e38),
        *(INF, -INF, NAN),
    ],
    np.float32,
)
ROWS = np.array(
    [[1, NAN, 3, 2], [NAN] * 4, [INF, 1, NAN, -INF], [-INF] * 4, [INF, INF, 1, 2], [NAN, 5, NAN, 7], [2, 3, 5, NAN],
     [-INF, -INF, NAN, -INF], [0, -0.0, 0, -0.0]], np.float32,
)  # fmt: skip


def as_there(net: Net, **values: np.ndarray) -> None:
    """The CPU engine gives ONNX Runtime's results, NaN and infinities included; kernels' code gives the CPU engine's."""
    model = net.model()
    values = feeds(model, 0) | values
    plan = without_code(model, ("sm_90a",), {n: v.shape for n, v in values.items()}, "fp32")
    with np.errstate(all="ignore"):
        for got, want in zip(Session(plan, "cpu").run(None, values), reference(model, values).values(), strict=True):
            np.testing.assert_allclose(got, want, rtol=1e-6, strict=True)
        assert not [s for s in replay(plan, values, ARCHS["sm_90a"]) if s.problem]


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_casts_to_integers(dtype: Any) -> None:
    """Of numbers that the integers do not hold ONNX Runtime makes one or another uint32, by the loop that they fall to."""
    with np.errstate(over="ignore"):
        x = FLOATS.astype(dtype)
    net = Net(dtype=dtype, x=x.shape)
    as_there(net.out(*(net("Cast", "x", to=to) for to in (3, 2, 5, 4, 6, 7, TensorProto.BOOL))), x=x)
    inside = x[(x > -60000) & (x < 60000)] if dtype is np.float16 else x[(x > -(2.0**31)) & (x < 2.0**32)]
    net = Net(dtype=dtype, x=inside.shape)
    as_there(net.out(net("Cast", "x", to=TensorProto.UINT32)), x=inside)


@pytest.mark.parametrize("value", [5e9, -5e9, INF, -INF, NAN])
def test_a_cast_to_uint32(value: float) -> None:
    net = Net(x=(1,))
    as_there(net.out(net("Cast", "x", to=TensorProto.UINT32)), x=np.array([value], np.float32))


@pytest.mark.parametrize("largest", [0, 1])
@pytest.mark.parametrize("k", [1, 2, 4])
def test_top_k(k: int, largest: int) -> None:
    net = Net(x=ROWS.shape)
    as_there(net.out(*net("TopK", "x", np.array([k]), outputs=2, largest=largest)), x=ROWS)


@pytest.mark.parametrize("op", ["ArgMax", "ArgMin"])
def test_places_of_the_largest(op: str) -> None:
    net = Net(x=ROWS.shape)
    net.out(*(net(op, "x", axis=axis, keepdims=0, select_last_index=last) for axis in (0, 1) for last in (0, 1)))
    as_there(net, x=ROWS)


def test_comparisons_and_choices() -> None:
    a, b = (v.reshape(-1) for v in np.meshgrid(FLOATS, FLOATS))
    net = Net(a=a.shape, b=b.shape)
    compared = [net(op, "a", "b") for op in ("Less", "LessOrEqual", "Greater", "GreaterOrEqual", "Equal")]
    chosen = [net("Where", compared[0], "a", "b"), net("Max", "a", "b"), net("Min", "a", "b")]
    as_there(net.out(*compared, *chosen), a=a, b=b)


def test_functions() -> None:
    net = Net(x=FLOATS.shape)
    net.out(*(net(op, "x") for op in ("Relu", "Sign", "Abs", "IsNaN", "IsInf", "Round", "LeakyRelu", "Sigmoid", "Tanh")))
    net.out(net("Clip", "x", np.float32(-7), np.float32(7)))
    as_there(net, x=FLOATS)


@pytest.mark.parametrize("dtype", [np.uint8, np.int8, np.uint16, np.int16])
def test_quantizing(dtype: Any) -> None:
    net = Net(opset=21, x=FLOATS.shape)
    as_there(net.out(net("QuantizeLinear", "x", np.float32(1), dtype(3))), x=FLOATS)


def test_constants() -> None:
    """They are folded, or left to later stages."""
    net = Net(opset=21, x=(1,))
    index = net("Cast", "x", to=TensorProto.INT64)
    for op in ("ArgMax", "ArgMin"):
        net.out(net("Add", index, net(op, ROWS, axis=1)))
    values, places = net("TopK", ROWS, np.array([2]), outputs=2)
    net.out(net("Add", "x", values), net("Add", index, places))
    for zero in (np.int8(3), np.uint8(3), np.full(2, 7, np.int8), np.full(2, -7, np.int16)):
        x = np.stack([FLOATS, FLOATS / 3], 1)
        scale = np.full(zero.shape, 0.5, np.float32)
        q = net("QuantizeLinear", x, scale, zero, axis=1)
        net.out(net("Add", "x", net("DequantizeLinear", q, scale, zero, axis=1)))
    for to in (TensorProto.INT8, TensorProto.INT32, TensorProto.INT64):
        net.out(net("Add", index, net("Cast", net("Cast", FLOATS, to=to), to=TensorProto.INT64)))
    as_there(net, x=np.zeros(1, np.float32))


def test_softmax() -> None:
    net = Net(x=ROWS.shape)
    as_there(net.out(net("Softmax", "x"), net("LogSoftmax", "x")), x=ROWS)


# --- Ops that do nothing ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mode", "shape"),
    [*((mode, s) for mode in ("nearest", "linear") for s in ((1, 3, 4, 5), (2, 3, 4), (3, 4), (1, 2, 3, 4, 5))),
     ("cubic", (1, 3, 4, 5)), ("cubic", (3, 4))],
)  # fmt: skip
def test_resize_to_the_same_size(mode: str, shape: tuple[int, ...]) -> None:
    net = Net(x=shape)
    net.out(net("Resize", "x", None, np.ones(len(shape), np.float32), mode=mode))
    net.out(net("Resize", net("Relu", "x"), None, None, np.array(shape), mode=mode))
    as_there(net)


def test_means_of_nothing() -> None:
    net = Net(x=(2, 0))
    as_there(net.out(net("ReduceMean", "x", np.array([1]))))


def test_slices_with_huge_steps() -> None:
    net = Net(x=(2, 5))
    for start, end, step in ((1, 2**62, 2**62), (-1, -(2**62), -(2**62)), (0, 2**62, 5), (-1, -9, -5)):
        net.out(net("Slice", "x", np.array([start]), np.array([end]), np.array([1]), np.array([step])))
    as_there(net)


def test_a_grid_of_one_place() -> None:
    net = Net(theta=(1, 2, 3), cube=(1, 3, 4))
    net.out(net("AffineGrid", "theta", np.array([1, 1, 1, 1]), align_corners=1))
    net.out(net("AffineGrid", "cube", np.array([1, 1, 3, 1, 2]), align_corners=1))
    as_there(net)
