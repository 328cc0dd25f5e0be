"""Products of quantized tensors become integer ones. What they compute is held to ONNX Runtime's results of the model before."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tests.rewrites.common import Net, check

SCALE, STEP = np.float32(0.05), np.float32(0.04)


def quantized(net: Net, x: str, zero: Any) -> str:
    return net("DequantizeLinear", net("QuantizeLinear", x, SCALE, zero), SCALE, zero)


def weights(net: Net, *shape: int, zero: int = 0, axis: int = 0, several: bool = True) -> str:
    """Of 7 bits, which ONNX Runtime multiplies as it should on any CPU."""
    values = net.rng.integers(-60, 60, shape).astype(np.int8)
    scale = net.positive(shape[axis]) * STEP if several else STEP
    zeros = np.full(np.shape(scale), zero, np.int8)
    return net("DequantizeLinear", values, scale, zeros, **({"axis": axis} if several else {}))


INTEGER = {"QuantizeLinear": 1, "ConvInteger": 1, "Cast": 1, "Mul": 1}


@pytest.mark.parametrize("several", [True, False])
@pytest.mark.parametrize("zero", [np.uint8(0), np.uint8(117)])
def test_convolutions(zero: np.integer, several: bool) -> None:
    net = Net(opset=21, x=(2, 16, 7, 6))
    w = weights(net, 8, 16, 3, 3, several=several)
    y = net("Conv", quantized(net, "x", zero), w, net.normal(8), pads=[1, 0, 1, 2], strides=[2, 1])
    check(net.out(net("Relu", y)), INTEGER | {"Add": 1, "Relu": 1})


def test_groups_and_lines() -> None:
    net = Net(opset=21, x=(1, 32, 9))
    y = net("Conv", quantized(net, "x", np.uint8(9)), weights(net, 16, 16, 3), group=2, dilations=[2])
    check(net.out(y), INTEGER)


@pytest.mark.parametrize(("several", "group", "zero"), [(True, 1, 0), (False, 1, 7), (True, 1, 7), (False, 2, 0)])
def test_transposed_convolutions(several: bool, group: int, zero: int) -> None:
    """They are convolutions of integers whose weights have the zero point at taps that are not there."""
    net = Net(opset=21, x=(1, 32, 5, 4))
    w = weights(net, 32, 8, 3, 3, zero=zero, axis=1, several=several)
    attributes = {"strides": [2, 2], "pads": [1, 1, 1, 1], "output_padding": [1, 1], "group": group}
    y = net("ConvTranspose", quantized(net, "x", np.uint8(117)), w, net.normal(8 * group), **attributes)
    check(net.out(y), INTEGER | {"Add": 1, "DepthToSpace": 1})


@pytest.mark.parametrize("how", ["MatMul", "a transposed matrix", "Gemm", "Gemm, transposed"])
def test_matrix_products(how: str) -> None:
    net = Net(opset=21, x=(5, 24))
    x = quantized(net, "x", np.uint8(100))
    bias = net.normal(10)
    if how == "MatMul":
        y = net("MatMul", x, weights(net, 24, 10, axis=1))
    elif how == "a transposed matrix":
        y = net("MatMul", x, net("Transpose", weights(net, 10, 24, axis=0), perm=[1, 0]))
    elif how == "Gemm":
        y = net("Gemm", x, weights(net, 24, 10, axis=1), bias)
    else:
        y = net("Gemm", x, weights(net, 10, 24, axis=0), bias, transB=1)
    left = {"QuantizeLinear": 1, "MatMulInteger": 1, "Cast": 1, "Mul": 1} | ({"Add": 1} if "Gemm" in how else {})
    check(net.out(y), left)


def test_products_of_two_that_are_computed() -> None:
    net = Net(opset=21, x=(2, 5, 16), w=(2, 16, 7))
    y = net("MatMul", quantized(net, "x", np.uint8(128)), quantized(net, "w", np.uint8(128)))
    check(net.out(y), {"QuantizeLinear": 2, "MatMulInteger": 1, "Cast": 1, "Mul": 1})


def numbers(*values: int) -> np.ndarray:
    return np.array(values)


AHEAD: dict[str, Callable[[Net, str], list[str]]] = {
    "transposed": lambda net, x: [net("Transpose", x, perm=[0, 1, 3, 2])],
    "reshaped": lambda net, x: [net("Slice", net("Reshape", x, numbers(2, 6, 16)), numbers(1), numbers(5), numbers(1))],
    "other axes": lambda net, x: [net("Unsqueeze", net("Squeeze", x, numbers(0)), numbers(1))],
    "split": lambda net, x: net("Split", x, num_outputs=2, axis=2, outputs=2),
    "joined": lambda net, x: [net("Concat", x, quantized(net, net("Neg", "x"), np.uint8(117)), axis=2)],
    "pooled": lambda net, x: [net("MaxPool", x, kernel_shape=[2, 1])],
}


@pytest.mark.parametrize("how", AHEAD)
def test_bytes_are_moved_to_a_product_as_they_are(how: str) -> None:
    """Where only the first of several movements is quantized: the product is one of integers, exact in any precision."""
    net = Net(opset=21, x={"transposed": (2, 3, 8, 4), "other axes": (1, 3, 4, 8)}.get(how, (2, 3, 4, 8)))
    parts = AHEAD[how](net, quantized(net, "x", np.uint8(117)))
    w = weights(net, 16 if how == "reshaped" else 8, 10, axis=1)
    y = net("Concat", *(net("MatMul", t, w) for t in parts), axis=0)
    left = Counter(node.op for node in check(net.out(y), None).nodes)
    assert left["MatMulInteger"] == len(parts) and not {"DequantizeLinear", "MatMul"} & {*left}


@pytest.mark.parametrize("quantized_too", [False, True])
def test_scores_are_products_of_integers_where_weights_of_values_are_quantized(quantized_too: bool) -> None:
    """Else attention is one op of floats, which is faster than a product of integers, a softmax and another product."""
    net = Net(opset=21, x=(2, 3, 24, 8))
    q, k, v = (net("Transpose", quantized(net, "x", np.uint8(z)), perm=[0, 1, 3, 2]) for z in (117, 120, 90))
    scores = net("MatMul", q, net("Transpose", k, perm=[0, 1, 3, 2]))
    share = net("Softmax", net("Mul", scores, np.float32(0.2)), axis=-1)
    if quantized_too:
        share = net(
            "DequantizeLinear", net("QuantizeLinear", share, np.float32(1 / 255), np.uint8(0)), np.float32(1 / 255), np.uint8(0)
        )
    left = Counter(node.op for node in check(net.out(net("MatMul", share, v)), None).nodes)
    assert (left["MatMulInteger"], left["Attention"]) == ((2, 0) if quantized_too else (0, 1))


def test_bytes_of_several_scales_are_joined_as_floats() -> None:
    net = Net(opset=21, x=(2, 4, 8))
    other = net("DequantizeLinear", net("QuantizeLinear", "x", STEP, np.uint8(117)), STEP, np.uint8(117))
    y = net("MatMul", net("Concat", quantized(net, "x", np.uint8(117)), other, axis=1), weights(net, 8, 10, axis=1))
    left = Counter(node.op for node in check(net.out(y), None).nodes)
    assert left["MatMul"] == 1


def test_scales_along_what_is_summed_over_stay() -> None:
    net = Net(opset=21, x=(5, 24))
    y = net("MatMul", quantized(net, "x", np.uint8(100)), weights(net, 24, 10, axis=0))
    check(net.out(y), {"QuantizeLinear": 1, "DequantizeLinear": 1, "MatMul": 1})


def test_scales_of_a_vector_stay() -> None:
    net = Net(opset=21, x=(5, 24))
    y = net("MatMul", quantized(net, "x", np.uint8(100)), weights(net, 24, axis=0))
    check(net.out(y), {"QuantizeLinear": 1, "DequantizeLinear": 1, "MatMul": 1})


def test_sums_that_int32_may_not_hold_stay_floats() -> None:
    net = Net(opset=21, x=(1, 33_100))
    y = net("MatMul", quantized(net, "x", np.uint8(0)), weights(net, 33_100, 2, several=False))
    check(net.out(y), {"QuantizeLinear": 1, "DequantizeLinear": 1, "MatMul": 1}, tolerance=1e-5)


def test_weights_of_other_products_are_constants() -> None:
    net = Net(opset=21, x=(5, 24))
    check(net.out(net("MatMul", "x", weights(net, 24, 10, axis=1))), {"MatMul": 1})


def test_half_precision() -> None:
    net = Net(opset=21, dtype=np.float16, x=(1, 16, 6, 6))
    scale, zero = np.float16(0.05), np.int8(3)
    x = net("DequantizeLinear", net("QuantizeLinear", "x", scale, zero), scale, zero)
    w = net("DequantizeLinear", net.rng.integers(-60, 60, (8, 16, 1, 1)).astype(np.int8), np.float16(0.04), np.int8(0))
    check(net.out(net("Conv", x, w)), INTEGER | {"Cast": 2})


@pytest.mark.parametrize(("op", "attributes"), [("MaxPool", {"kernel_shape": [3, 3], "pads": [1, 1, 1, 1]}), ("Transpose", {})])
def test_bytes_move_as_they_are(op: str, attributes: dict[str, Any]) -> None:
    net = Net(opset=21, x=(1, 4, 8, 8))
    x = quantized(net, net(op, quantized(net, "x", np.uint8(117)), **attributes), np.uint8(117))
    check(net.out(net("Relu", x)), {"QuantizeLinear": 1, op: 1, "DequantizeLinear": 1, "Relu": 1})


@pytest.mark.parametrize("other", [{"scale": np.float32(0.06)}, {"zero": np.uint8(116)}])
def test_bytes_of_other_scales_are_quantized_again(other: dict[str, Any]) -> None:
    net = Net(opset=21, x=(1, 4, 8, 8))
    pooled = net("MaxPool", quantized(net, "x", np.uint8(117)), kernel_shape=[2, 2])
    to = other.get("scale", SCALE), other.get("zero", np.uint8(117))
    x = net("DequantizeLinear", net("QuantizeLinear", pooled, *to), *to)
    check(net.out(net("Relu", x)), {"QuantizeLinear": 2, "MaxPool": 1, "DequantizeLinear": 2, "Relu": 1})
