"""Products of integers whose sums are long, against ONNX Runtime: every bit must be the same, on what fp16 storage holds."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest

from tccompile.ir.ops import Gemm, Pointwise
from tccompile.ir.program import Program
from tccompile.pipeline import without_code
from tccompile.runtime.session import Session
from tests.networks import reference
from tests.ops.common import Net
from tests.ops.test_quantized import microsoft, with_inputs

EACH = pytest.mark.parametrize("constant", [True, False])


def same(net: Net, values: dict[str, np.ndarray]) -> Program:
    model = net.model()
    plan = without_code(model, precision="fp16")
    for got, want in zip(Session(plan, "cpu").run(None, values), reference(model, values).values(), strict=True):
        np.testing.assert_array_equal(got, want, strict=True)
    return plan.entries[0].program


def weights(net: Net, *shape: int) -> np.ndarray:
    """uint8, which ONNX Runtime multiplies by uint8 exactly on any CPU."""
    return net.rng.integers(0, 256, shape).astype(np.uint8)


def operands(constant: bool, **shapes: tuple[int, ...]) -> tuple[Net, dict[str, np.ndarray], Any]:
    """A net, its inputs, of which "w" is one unless it is to be constant, and "w" or its values."""
    w = shapes.pop("w")
    net, values = with_inputs(np.uint8, **shapes, **({} if constant else {"w": w}))
    return net, values, weights(net, *w) if constant else "w"


@EACH
@pytest.mark.parametrize("k", [1, 257, 699, 700, 4096, 40_000])
def test_matrix_products(k: int, constant: bool) -> None:
    net, values, w = operands(constant, a=(3, k), w=(k, 5))
    net.out(net("MatMulInteger", "a", w, np.uint8(255), np.uint8(3)))
    args = "a", np.float32(0.02), np.uint8(1), w, np.float32(0.03), np.uint8(254)
    net.out(net("QLinearMatMul", *args, np.float32(k / 9), np.uint8(251)))
    same(net, values)


@EACH
@pytest.mark.parametrize("zeros", [(0, 0), (255, 255), (0, 255)])
def test_the_largest_sums(zeros: tuple[int, int], constant: bool) -> None:
    """All of one sign and as large as may be: float32 holds every other one of them from 259 terms on."""
    for k in (258, 259, 1000):
        extreme(k, zeros, constant)


@EACH
def test_sums_modulo_2_32(constant: bool) -> None:
    extreme(1 << 20, (0, 0), constant)


def extreme(k: int, zeros: tuple[int, int], constant: bool) -> None:
    a, b = (255 - z for z in zeros)
    net, _ = with_inputs(np.uint8, a=(1, k), **({} if constant else {"w": (k, 2)}))
    full = np.full((k, 2), b, np.uint8)
    full[0, 1] = abs(b - 1)
    net.out(net("MatMulInteger", "a", full if constant else "w", *map(np.uint8, zeros)))
    same(net, {"a": np.full((1, k), a, np.uint8)} | ({} if constant else {"w": full}))


@EACH
@pytest.mark.parametrize(
    ("a", "w"),
    [
        ((3, 5, 700), (700, 7)),
        ((2, 3, 5, 700), (2, 3, 700, 7)),
        ((2, 1, 5, 700), (3, 700, 7)),
        ((1, 5, 700), (3, 700, 7)),
        ((3, 5, 700), (1, 700, 7)),
        ((700,), (700, 7)),
        ((5, 700), (700,)),
        ((700,), (3, 700, 7)),
    ],
)
def test_stacks_of_matrices_and_vectors(a: tuple[int, ...], w: tuple[int, ...], constant: bool) -> None:
    net, values, right = operands(constant, a=a, w=w)
    same(net.out(net("MatMulInteger", "a", right, np.uint8(3), np.uint8(5))), values)


@EACH
@pytest.mark.parametrize(
    ("x", "w", "attrs"),
    [
        ((1, 80, 6, 6), (5, 80, 3, 3), {"pads": [1, 1, 1, 1]}),
        ((2, 200, 5, 7), (6, 100, 3, 3), {"group": 2, "strides": [2, 1], "pads": [1, 0, 2, 1]}),
        ((1, 1, 40, 40), (2, 1, 33, 31), {"pads": [2, 3, 4, 1]}),
        ((1, 300, 9), (4, 300, 3), {"dilations": [2]}),
        ((1, 40, 5, 5, 5), (3, 40, 3, 3, 3), {"pads": [1] * 6}),
        ((2, 4, 30, 30), (4, 1, 27, 27), {"group": 4}),
    ],
)
def test_convolutions(x: tuple[int, ...], w: tuple[int, ...], attrs: dict[str, Any], constant: bool) -> None:
    """By channels, groups, one large window, and with a bias at which float32 rounds"""
    net, values, filters = operands(constant, x=x, w=w)
    net.out(net("ConvInteger", "x", filters, np.uint8(255), np.uint8(3), **attrs))
    bias = net.rng.integers(-(2**27), 2**27, w[0]).astype(np.int32)
    args = "x", np.float32(0.02), np.uint8(7), filters, np.float32(0.03), np.uint8(200), np.float32(600), np.uint8(127), bias
    same(net.out(net("QLinearConv", *args, **attrs)), values)


def test_a_bias_beyond_float32() -> None:
    """A short sum, whose halves between two results turn on its last bit"""
    net, values = with_inputs(np.uint8, x=(1, 4, 8, 8))
    bias = (np.arange(16, dtype=np.int32) - 8) * 2 + (1 << 25)
    scales = np.full(16, 2**-7, np.float32)
    args = "x", np.float32(1), np.uint8(0), weights(net, 16, 4, 1, 1), scales, np.zeros(16, np.uint8)
    same(net.out(net("QLinearConv", *args, np.float32(2), np.uint8(0), bias - (1 << 25) + 5)), values)
    same(net.out(net("QLinearConv", *args, np.float32(1 << 12), np.uint8(0), bias)), values)


@pytest.mark.parametrize("weight", [np.int8, np.uint8])
def test_signs_of_weights(weight: Any) -> None:
    net, values = with_inputs(np.uint8, a=(4, 3000))
    w = net.rng.integers(0, 64, (3000, 6)).astype(weight)
    right = net("MatMulInteger", "a", w, np.uint8(9), net.rng.integers(0, 60, 6).astype(weight))
    same(net.out(right), values)


def test_what_weights_allow_is_one_product() -> None:
    """A sum of 4096 weights around 20 cannot come to 2^24 with either sign: it costs no more than another product."""
    net, values = with_inputs(np.uint8, a=(4, 4096))
    w = net.rng.integers(-40, 41, (4096, 6)).astype(np.int8)
    program = same(net.out(net("MatMulInteger", "a", w, np.uint8(3))), values)
    assert [type(op) for op in program.ops] == [Pointwise, Gemm]


# --- Microsoft's operators -------------------------------------------------------------------------------------------


def test_microsoft_s_products() -> None:
    """To the last bit where the result is of integers; floats to rounding, as ONNX Runtime may fuse a multiplication with an
    addition."""
    rng = np.random.default_rng(0)
    a, w = rng.integers(0, 256, (5, 3000)).astype(np.uint8), rng.integers(0, 256, (3000, 7)).astype(np.uint8)
    bias, scales = rng.integers(-(2**27), 2**27, 7).astype(np.int32), rng.uniform(0.01, 0.02, 7).astype(np.float32)
    left, right = [np.float32(0.03), np.uint8(250)], [scales, rng.integers(0, 256, 7).astype(np.uint8)]
    stored = [np.float32(20_000), np.uint8(100)]
    for transposed in (0, 1):
        b = w.T.copy() if transposed else w
        model = microsoft("QGemm", ["a", *left, b, *right, bias, *stored], {"a": a.shape}, transB=transposed, alpha=1.5)
        np.testing.assert_array_equal(*ours_and_theirs(model, {"a": a}), strict=True)
    model = microsoft("QGemm", ["a", *left, w, *right, bias], {"a": (3000, 5)}, np.float32, transA=1)
    np.testing.assert_allclose(*ours_and_theirs(model, {"a": a.T.copy()}), rtol=2e-7)
    inputs = ["a", w, left[0], right[0], left[1], right[1], np.float32(bias[:7] / 1e3)]
    model = microsoft("MatMulIntegerToFloat", inputs, {"a": a.shape}, np.float32)
    np.testing.assert_allclose(*ours_and_theirs(model, {"a": a}), rtol=2e-6, atol=0.1)


def test_a_product_that_quantizes_its_operand() -> None:
    rng = np.random.default_rng(1)
    w, x = rng.integers(0, 256, (900, 6)).astype(np.uint8), rng.standard_normal((4, 900)).astype(np.float32)
    inputs = ["a", w, np.float32(0.02), np.uint8(117), rng.standard_normal(6).astype(np.float32)]
    model = microsoft("DynamicQuantizeMatMul", inputs, {"a": x.shape}, np.float32)
    model.graph.input[0].type.tensor_type.elem_type = onnx.TensorProto.FLOAT
    np.testing.assert_allclose(*ours_and_theirs(model, {"a": x}), rtol=1e-5, atol=1e-4)


def ours_and_theirs(model: onnx.ModelProto, values: dict[str, np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    (got,), (want,) = Session(without_code(model, precision="fp32"), "cpu").run(None, values), reference(model, values).values()
    return got, want
