"""Quantized tensors and products of them against ONNX Runtime: the integers must be the same."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from tccompile.arch import ARCHS
from tccompile.fuse import fuse
from tccompile.ir.expr import load as load_of
from tccompile.ir.ops import Conv, Gemm, Pointwise, Reduce
from tccompile.ir.program import Program
from tccompile.ir.reference import evaluate
from tccompile.ir.types import DType
from tccompile.load.model import load, sources
from tccompile.lower.graph import lower
from tccompile.precision.formats import precision
from tccompile.precision.positions import whole_numbers
from tccompile.rewrites import rewrite
from tccompile.runtime.session import Session
from tccompile.schedule.choose import schedule
from tests.networks import feeds, reference, relative_error
from tests.ops.common import Net, agrees
from tests.plans import without_code

INTEGERS = {"uint8": np.uint8, "int8": np.int8, "uint16": np.uint16, "int16": np.int16}


def integers(net: Net, dtype: Any, *shape: int) -> np.ndarray:
    limits = np.iinfo(dtype)
    return net.rng.integers(max(limits.min, -128), min(limits.max, 255) + 1, shape).astype(dtype)


def filters(net: Net, *shape: int) -> np.ndarray:
    """Weights that ONNX Runtime multiplies by uint8 as it should on any CPU: without VNNI it adds up pairs of products in 16
    bits, which weights beyond 64 saturate."""
    return net.rng.integers(-64, 64, shape).astype(np.int8)


def with_inputs(dtype: Any, **shapes: tuple[int, ...]) -> tuple[Net, dict[str, np.ndarray]]:
    """A net whose inputs are quantized already, and values for them."""
    net = Net(opset=21)
    net.inputs = [
        helper.make_tensor_value_info(n, helper.np_dtype_to_tensor_dtype(np.dtype(dtype)), s) for n, s in shapes.items()
    ]
    return net, {n: integers(net, dtype, *s) for n, s in shapes.items()}


@pytest.mark.parametrize("zero", [True, False])
@pytest.mark.parametrize("axis", [None, 0, 1, -1])
@pytest.mark.parametrize("dtype", INTEGERS)
def test_quantize_and_dequantize(dtype: str, axis: int | None, zero: bool) -> None:
    """Values beyond both ends, and many halves between two integers"""
    net = Net(opset=21, x=(3, 4, 5))
    n = () if axis is None else (3, 4, 5)[axis : axis + 1 or None]
    scale = np.float32(2) ** -net.rng.integers(1, 4, n).astype(np.float32)
    zeros = [integers(net, INTEGERS[dtype], *n)] if zero else []
    attrs = {} if axis is None else {"axis": axis}
    typed = {} if zero else {"output_dtype": helper.np_dtype_to_tensor_dtype(np.dtype(dtype))}
    q = net("QuantizeLinear", "x", scale, *zeros, **attrs, **typed)
    net.out(q, net("DequantizeLinear", q, scale, *zeros, **attrs))
    x = np.round(net.rng.standard_normal((3, 4, 5)) * 300).astype(np.float32) / 16
    x[0, 0, :2] = 1e6, -1e6
    agrees(net, {"x": x})


@pytest.mark.parametrize("block", [2, 3])
def test_blocks(block: int) -> None:
    net = Net(opset=21, x=(3, 7, 2))
    shape = (3, -(-7 // block), 2)
    scale, zero = net.positive(*shape), integers(net, np.int8, *shape)
    q = net("QuantizeLinear", "x", scale, zero, axis=1, block_size=block)
    agrees(net.out(net("DequantizeLinear", q, scale, zero, axis=1, block_size=block)), {"x": net.normal(3, 7, 2, scale=40)})


def test_wide_integers_are_dequantized() -> None:
    net, x = with_inputs(np.int32, x=(5, 6))
    agrees(net.out(net("DequantizeLinear", "x", np.float32(0.37))), x)


def test_parameters_that_are_computed() -> None:
    net = Net(opset=21, x=(4, 9))
    q, scale, zero = net("DynamicQuantizeLinear", "x", outputs=3)
    net.out(q, scale, zero, net("DequantizeLinear", q, scale, zero))
    for shift in (0.0, 5.0, -5.0):  # a range without zero reaches to it
        agrees(net, {"x": net.normal(4, 9) + np.float32(shift)})


@pytest.mark.parametrize("group", [1, 2, 6])
@pytest.mark.parametrize("per_channel", [True, False])
@pytest.mark.parametrize("bias", [True, False])
def test_qlinear_conv(bias: bool, per_channel: bool, group: int) -> None:
    net, x = with_inputs(np.uint8, x=(2, 6, 9, 8))
    n = (12,) if per_channel else ()
    args: list[Any] = [np.float32(0.02), np.uint8(117), filters(net, 12, 6 // group, 3, 3)]
    args += [net.positive(*n) * np.float32(0.03), np.zeros(n, np.int8), np.float32(0.4), np.uint8(131)]
    args += [net.rng.integers(-9000, 9000, 12).astype(np.int32)] if bias else []
    agrees(net.out(net("QLinearConv", "x", *args, pads=[1, 0, 1, 2], strides=[2, 1], group=group)), x)


@pytest.mark.parametrize(("a", "w"), [((5, 12), (12, 7)), ((3, 5, 12), (12, 7)), ((2, 3, 5, 12), (2, 3, 12, 7))])
@pytest.mark.parametrize("constant", [True, False])
def test_qlinear_matmul(a: tuple[int, ...], w: tuple[int, ...], constant: bool) -> None:
    net, values = with_inputs(np.uint8, a=a, **({} if constant else {"w": w}))
    right = integers(net, np.uint8, *w) if constant else "w"
    rest = np.float32(0.3), np.uint8(90)
    args = ("a", np.float32(0.02), np.uint8(120), right, np.float32(0.05), np.uint8(133), *rest)
    agrees(net.out(net("QLinearMatMul", *args)), values)


def test_columns_with_scales_of_their_own() -> None:
    net, values = with_inputs(np.uint8, a=(5, 12))
    args = ("a", np.float32(0.02), np.uint8(120), filters(net, 12, 7), net.positive(7), np.zeros(7, np.int8))
    agrees(net.out(net("QLinearMatMul", *args, np.float32(4), np.uint8(90))), values)


@pytest.mark.parametrize("zeros", ["", "one", "each"])
def test_integer_products(zeros: str) -> None:
    net, values = with_inputs(np.uint8, a=(4, 5, 12), x=(2, 4, 6, 6))
    n = {"": None, "one": (), "each": (7,)}[zeros]
    left = [] if n is None else [np.uint8(99)]
    right = filters(net, 12, 7)
    net.out(net("MatMulInteger", "a", right, *left, *([] if n is None else [integers(net, np.int8, *n)])))
    net.out(
        net(
            "ConvInteger",
            "x",
            integers(net, np.uint8, 7, 4, 3, 3),
            *left,
            *([] if n is None else [np.uint8(12)]),
            pads=[1, 1, 1, 1],
        )
    )
    agrees(net, values, tolerance=0.0)


def test_rows_with_zero_points_of_their_own() -> None:
    """ONNX Runtime takes one for all of a."""
    net, values = with_inputs(np.uint8, a=(5, 12))
    zero, w = integers(net, np.uint8, 5), integers(net, np.uint8, 12, 7)
    model = net.out(net("MatMulInteger", "a", w, zero)).model()
    (got,) = evaluate(
        lower(load(model)), values, {t.name: np.asarray(a) for t, a in zip(model.graph.initializer, (w, zero), strict=True)}
    ).values()
    np.testing.assert_array_equal(got, (values["a"].astype(int) - zero[:, None]) @ w.astype(int))


def stored(net: Net) -> Program:
    return precision(fuse(lower(rewrite(load(net.model())))), "fp16")


def test_sums_of_integers_are_never_stored_in_fp16() -> None:
    """They reach 10^6. Tensor Cores multiply the differences to zero points, and the epilogue does the rest."""
    net, _ = with_inputs(np.uint8, x=(1, 64, 9, 8), a=(64, 128))
    args: list[Any] = [np.float32(0.02), np.uint8(117), integers(net, np.int8, 64, 64, 3, 3), np.float32(0.03), np.int8(0)]
    net.out(net("QLinearConv", "x", *args, np.float32(40), np.uint8(131)))
    net.out(net("MatMulInteger", "a", integers(net, np.uint8, 128, 64), np.uint8(3)))
    program = stored(net)
    results = {type(op): program.tensors[op.y].dtype for op in program.ops if isinstance(op, Conv | Gemm)}
    assert results == {Conv: DType.U8, Gemm: DType.I32}
    assert all(
        c.kernel.tensor_cores
        for op, c in zip(program.ops, schedule(program, ARCHS["sm_80"]), strict=True)
        if not isinstance(op, Pointwise)
    )


def test_a_quantized_network_runs_between_products() -> None:
    """Dequantize, convolve, quantize: weights are folded, and what follows a product is its epilogue."""
    net = Net(opset=21, x=(1, 8, 9, 8))
    x = "x"
    for _ in range(2):
        q = net("QuantizeLinear", x, np.float32(0.05), np.uint8(128))
        w = net(
            "DequantizeLinear",
            integers(net, np.int8, 8, 8, 3, 3),
            net.positive(8) * np.float32(0.01),
            np.zeros(8, np.int8),
            axis=0,
        )
        x = net("Relu", net("Conv", net("DequantizeLinear", q, np.float32(0.05), np.uint8(128)), w, pads=[1, 1, 1, 1]))
    agrees(net.out(x), tolerance=2e-2)  # a value near a half may fall to the other side
    program = stored(net)
    assert sum(isinstance(op, Conv) for op in program.ops) == 2 and len(program.ops) <= 4


@pytest.mark.parametrize("domain", ["", "com.microsoft"])
def test_products_of_bytes_are_found_in_both_domains(domain: str) -> None:
    """ONNX Runtime's quantizer takes its own domain where the standard's had no such types yet."""
    net, _ = with_inputs(np.uint8, x=(4, 64))
    a = net("DequantizeLinear", "x", np.float32(0.02), np.uint8(117), domain=domain)
    w = net("DequantizeLinear", integers(net, np.int8, 64, 32), np.float32(0.01), np.int8(0), domain=domain)
    y = helper.make_tensor_value_info(net("MatMul", a, w), TensorProto.FLOAT, (4, 32))
    graph = helper.make_graph(net.nodes, "net", net.inputs, [y], net.weights)
    imports = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
    program = fuse(lower(rewrite(load(helper.make_model(graph, opset_imports=imports, ir_version=8)))))
    (product,) = (op for op in program.ops if isinstance(op, Gemm))
    assert {program.tensors[name].dtype for name in product.operands} == {DType.U8, DType.I8}


def excited(net: Net, x: str) -> str:
    """Squeeze and excitation: a mean of all, and a gate that all are multiplied by."""
    step, zero = np.float32(1 / 255), np.uint8(0)
    gate = net("QuantizeLinear", net("Sigmoid", net("GlobalAveragePool", x)), step, zero)
    return net("Mul", x, net("DequantizeLinear", gate, step, zero))


NEXT = {
    "excited": excited,
    "sum": lambda net, x: net("Add", net("Mul", x, np.float32(0.37)), net("Relu", x)),
    "mean": lambda net, x: net("ReduceMean", x, np.array([1])),
    "normalized": lambda net, x: net("LayerNormalization", x, net.positive(40), net.normal(40)),
    "softmax": lambda net, x: net("Mul", net("Softmax", x, axis=-1), np.float32(9)),
    "pooled": lambda net, x: net("AveragePool", x, kernel_shape=[3, 3], pads=[1, 1, 1, 1]),
    "resized": lambda net, x: net("Resize", x, None, np.array([1, 1, 1.5, 1], np.float32), mode="linear"),
}
"""What stands between bytes and the next bytes, where nothing is multiplied by weights."""


@pytest.mark.parametrize("between", NEXT)
def test_bytes_are_those_of_the_standard_in_mixed_precision_too(between: str) -> None:
    """One of 200 may be one off: what fp16 rounds off brings more of them to the other side of a half."""
    net, values = with_inputs(np.uint8, x=(1, 48, 24, 40))
    x = net("DequantizeLinear", "x", np.float32(0.021), np.uint8(101))
    model = net.out(net("QuantizeLinear", NEXT[between](net, x), np.float32(0.013), np.uint8(128))).model()
    (expected,) = reference(model, values).values()
    (got,) = Session(without_code(model, ("sm_80",), precision="mixed"), "cpu").run(None, values)
    apart = np.abs(got.astype(int) - expected)
    assert np.mean(apart == 0) >= 0.995 and apart.max() <= 1
    assert between not in ("excited", "sum", "mean") or all(
        t.dtype is not DType.F16 for t in precision(fuse(lower(rewrite(load(model)))), "fp16").tensors.values()
    )


@pytest.mark.parametrize("dtype", ["uint16", "int16"])
def test_inputs_that_are_quantized_are_measured_with_all_that_they_may_be(dtype: str) -> None:
    """Of zeros and ones, which other integers are made of, all is so small that it would be stored times 2^24."""
    net, _ = with_inputs(INTEGERS[dtype], x=(4, 64))
    limits = np.iinfo(dtype)
    y = net("MatMul", net("DequantizeLinear", "x", np.float32(7e-6), INTEGERS[dtype](0)), net.normal(64, 16))
    model = net.out(net("MatMul", net("Relu", y), net.normal(16, 5))).model()
    x = {"x": net.rng.integers(limits.min, limits.max, (4, 64), dtype, endpoint=True)}
    (expected,) = reference(model, x).values()
    plan = without_code(model, ("sm_80",), precision="mixed")
    assert relative_error(Session(plan, "cpu").run(None, x)[0], expected) <= 2e-3


def test_what_is_saturated_is_not_scaled_beyond_fp16() -> None:
    """Inputs near 0 are seen; others are much larger, and the grid says how large at most."""
    net = Net(opset=21, x=(4, 64))
    scale, zero = np.float32(5e-7), np.uint16(2**15)
    x = net("DequantizeLinear", net("QuantizeLinear", "x", scale, zero), scale, zero)
    model = net.out(net("MatMul", x, net.normal(64, 5))).model()
    plan = without_code(model, ("sm_80",), precision="mixed", input_ranges={"x": (0.0, 1e-6)})
    x = {"x": np.random.default_rng(0).uniform(-0.016, 0.016, (4, 64)).astype(np.float32)}
    assert relative_error(Session(plan, "cpu").run(None, x)[0], *reference(model, x).values()) <= 2e-3


def test_scales_that_are_computed_keep_fp32() -> None:
    net = Net(opset=21, x=(40, 90))
    net.out(net("DynamicQuantizeLinear", net("Relu", "x"), outputs=3)[0])
    program = stored(net)
    numbers = {t.dtype for t in program.tensors.values() if t.size == 1 and t.dtype.is_float}
    assert numbers == {DType.F32} and any(t.dtype is DType.F16 for t in program.tensors.values())


def dynamically(net: Net, x: str, w: np.ndarray, **attrs: Any) -> tuple[str, str]:
    """The sums of a product of `x`, quantized by its own range, as floats; and what they are to be multiplied by."""
    q, scale, zero = net("DynamicQuantizeLinear", x, outputs=3)
    sums = net("ConvInteger" if w.ndim == 4 else "MatMulInteger", q, w, zero, **attrs)
    return net("Cast", sums, to=TensorProto.FLOAT), net("Mul", scale, np.float32(0.003))


def heads(net: Net, x: str) -> str:
    return net("Transpose", net("Reshape", x, np.array([1, 16, 4, 8])), perm=[0, 2, 1, 3])


BETWEEN = {
    "nothing": lambda net, x: x,
    "heads": heads,
    "relu": lambda net, x: net("Relu", x),
    "gather": lambda net, x: net("Gather", x, np.array([3, 1, 7]), axis=1),
    "pad": lambda net, x: net("Pad", x, np.array([0, 1, 0, 0, 2, 0])),
    "total": lambda net, x: net("ReduceSum", x, np.array([1])),
    "cumsum": lambda net, x: net("CumSum", x, np.array(1)),
    "sum": lambda net, x: net("Add", x, dynamically(net, net("Tanh", "x"), filters(net, 256, 32))[0]),
}
"""What stands between a product's sums and their scale: functions that give a multiple of the result for a multiple of it."""


@pytest.mark.parametrize("mode", ["fp16", "mixed"])
@pytest.mark.parametrize("between", BETWEEN)
def test_sums_that_fp16_does_not_hold_wait_for_a_computed_scale(between: str, mode: str) -> None:
    net = Net(opset=21, x=(1, 16, 256))
    sums, scale = dynamically(net, "x", np.abs(filters(net, 256, 32)))
    moved = BETWEEN[between](net, sums)
    model = net.out(net("Mul", moved, scale), net("Mul", net("Relu", moved), scale)).model()
    x = {"x": np.random.default_rng(1).uniform(0.5, 1, (1, 16, 256)).astype(np.float32)}
    expected = reference(model, x)
    assert min(e.max() for e in expected.values()) > 65504 * 0.003 / 255  # so there are sums above 65504
    found = Session(without_code(model, ("sm_80",), precision=mode), "cpu").run(None, x)
    assert max(relative_error(y, expected[name]) for name, y in zip(net.outputs, found, strict=True)) <= 1e-3


def encoder_layer() -> Net:
    """Attention and a network of two layers, as they are when each MatMul has been quantized dynamically; sums exceed 65504."""
    net = Net(opset=21, x=(2, 16, 256))

    def linear(x: str, terms: int, columns: int) -> str:
        sums, scale = dynamically(net, x, filters(net, terms, columns))
        return net("Add", net("Mul", sums, scale), net.normal(columns))

    def apart(x: str, *perm: int) -> str:
        return net("Transpose", net("Reshape", x, np.array([2, 16, 4, 64])), perm=perm)

    q, k, v = (apart(linear("x", 256, 256), 0, 2, *rest) for rest in ((1, 3), (3, 1), (1, 3)))
    weights = net("Softmax", net("Mul", net("MatMul", q, k), np.float32(0.005)), axis=-1)
    joined = net("Reshape", net("Transpose", net("MatMul", weights, v), perm=[0, 2, 1, 3]), np.array([2, 16, 256]))
    x = net("LayerNormalization", net("Add", linear(joined, 256, 256), "x"), net.positive(256), net.normal(256))
    return net.out(net("Add", linear(net("Gelu", linear(x, 256, 512)), 512, 256), x))


@pytest.mark.parametrize(("mode", "tolerance"), [("fp32", 1e-5), ("mixed", 2e-2), ("fp16", 2e-2), ("bf16", 3e-2)])
def test_a_layer_of_a_transformer_that_is_quantized_dynamically(mode: str, tolerance: float) -> None:
    """What 16 bits round off moves some bytes by one."""
    model = encoder_layer().model()
    x = feeds(model, 1)
    (expected,), (got,) = (
        reference(model, x).values(),
        Session(without_code(model, ("sm_80",), precision=mode), "cpu").run(None, x),
    )
    assert relative_error(got, expected) <= tolerance


@pytest.mark.parametrize("image", [True, False])
def test_computed_scales_are_in_epilogues_of_products(image: bool) -> None:
    """Their sums are never stored as floats; and where the scale cannot be in the epilogue, as int32."""
    net = Net(opset=21, x=(1, 64, 9, 8) if image else (1, 16, 256))
    if image:
        sums, scale = dynamically(net, "x", filters(net, 32, 64, 3, 3), pads=[1, 1, 1, 1])
        net.out(net("Relu", net("Add", net("Mul", sums, scale), net.normal(1, 32, 1, 1))))
    else:
        sums, scale = dynamically(net, "x", filters(net, 256, 32))
        net.out(net("Relu", net("Mul", heads(net, sums), scale)))
    program = stored(net)
    (product,) = (op for op in program.ops if isinstance(op, Conv | Gemm))
    assert product.y not in whole_numbers(program)
    assert program.tensors[product.y].dtype is (DType.F16 if image else DType.I32)


@pytest.mark.parametrize("image", [True, False])
def test_numbers_of_dynamic_quantization_are_made_by_those_who_read_them(image: bool) -> None:
    """The extremes are steps, and what quantizes and multiplies; scales and zero points would be four launches more."""
    net = Net(opset=21, x=(1, 64, 9, 8) if image else (16, 256))
    sums, scale = dynamically(net, "x", filters(net, 32, 64, 3, 3) if image else filters(net, 256, 32))
    program = stored(net.out(net("Mul", sums, scale)))
    kinds = [type(op).__name__ for op in program.ops if not (isinstance(op, Pointwise) and op.epilogue.expr == load_of(0))]
    assert kinds == ["Reduce", "Reduce", "Pointwise", "Conv" if image else "Gemm"]


def test_sums_of_bytes_are_whole_numbers() -> None:
    """Symmetric quantization by a computed scale: bytes are multiplied as they are, and no input is known to bound their sums."""
    net = Net(opset=21, x=(1, 16, 256))
    scale = net("Div", net("ReduceMax", net("Abs", "x"), np.array([2])), np.float32(127))
    q = net("Cast", net("Clip", net("Round", net("Div", "x", scale)), np.float32(-127), np.float32(127)), to=TensorProto.INT8)
    sums = net("Cast", net("MatMulInteger", q, filters(net, 256, 32)), to=TensorProto.FLOAT)
    net.out(net("LayerNormalization", sums, net.positive(32)))
    for program in stored(net), precision(fuse(lower(rewrite(load(net.model())))), "mixed"):
        (product,) = (op for op in program.ops if isinstance(op, Gemm))
        assert program.tensors[product.a].dtype is DType.I8
        assert program.tensors[product.y].dtype is DType.F32
        assert program.storage[program.tensors[product.y].storage].reason.startswith("fp32: whole numbers that may exceed")


# --- Microsoft's operators -------------------------------------------------------------------------------------------


def microsoft(
    op: str, inputs: list[Any], shapes: dict[str, tuple[int, ...]], dtype: Any = np.uint8, **attrs: Any
) -> onnx.ModelProto:
    """A model of one such node: inputs are names, constants, or None."""
    weights = [
        numpy_helper.from_array(np.asarray(v), f"w{i}") for i, v in enumerate(inputs) if v is not None and not isinstance(v, str)
    ]
    names = ["" if v is None else v if isinstance(v, str) else f"w{i}" for i, v in enumerate(inputs)]
    elem = helper.np_dtype_to_tensor_dtype(np.dtype(np.uint8))
    given = [helper.make_tensor_value_info(n, TensorProto.BOOL if n == "c" else elem, s) for n, s in shapes.items()]
    y = helper.make_tensor_value_info("y", helper.np_dtype_to_tensor_dtype(np.dtype(dtype)), None)
    node = helper.make_node(op, names, ["y"], "n0", domain="com.microsoft", **attrs)
    graph = helper.make_graph([node], "g", given, [y], weights)
    imports = [helper.make_opsetid("", 20), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=imports, ir_version=9)


IMAGE_SHAPE = (2, 6, 9, 8)
X = ["x", np.float32(0.031), np.uint8(117)]
POOL = {"kernel_shape": [3, 2], "strides": [2, 2], "pads": [1, 0, 1, 0]}
OTHER = ["b", np.float32(0.017), np.uint8(9)]
Y = [np.float32(0.043), np.uint8(100)]


@pytest.mark.parametrize(
    ("op", "inputs", "attrs"),
    [
        ("QLinearAdd", [*X, *OTHER, *Y], {}),
        ("QLinearMul", [*X, *OTHER, *Y], {}),
        ("QLinearSigmoid", [*X, np.float32(1 / 255), np.uint8(0)], {}),
        ("QLinearLeakyRelu", [*X, *Y], {"alpha": 0.3}),
        ("QLinearGlobalAveragePool", [*X, *Y], {}),
        ("QLinearAveragePool", [*X, *Y], POOL),
        ("QLinearConcat", [*Y, *X, *OTHER], {"axis": 1}),
        ("QLinearWhere", ["c", *X, *OTHER, *Y], {}),
    ],
)
def test_microsoft_s_operators(op: str, inputs: list[Any], attrs: dict[str, Any]) -> None:
    shapes = {n: IMAGE_SHAPE for n in ("x", "b", "c") if n in inputs}
    model = microsoft(op, inputs, shapes, **attrs)
    rng = np.random.default_rng(0)
    values = {n: rng.integers(0, 256, s).astype(np.uint8) for n, s in shapes.items() if n != "c"}
    given = feeds(model, 0) | values
    got, want = evaluate(lower(load(model)), given, sources(model)), reference(model, given)
    difference = np.abs(got["y"].astype(int) - want["y"].astype(int))
    assert difference.max() <= 1 and (difference > 0).mean() < 0.02  # ONNX Runtime takes sums of integers, or tables


@pytest.mark.parametrize("dtype", [np.uint8, np.int8])
@pytest.mark.parametrize("zeros", [(3, 7, 5), (0, 0, None)])
@pytest.mark.parametrize(
    ("op", "attrs"),
    [
        ("QLinearAdd", {}), ("QLinearMul", {}), ("QLinearAveragePool", POOL), ("QLinearGlobalAveragePool", {"channels_last": 0}),
        ("QLinearGlobalAveragePool", {"channels_last": 1}),
    ],
)  # fmt: skip
def test_halves_between_bytes_are_rounded_as_by_onnx_runtime(op: str, attrs: dict[str, Any], zeros: Any, dtype: Any) -> None:
    """One scale is a multiple of another, so many results lie halfway between two bytes: all bytes are ONNX Runtime's."""
    points = [None if z is None else dtype(z) for z in zeros]
    x, other, y = ([s, point] for s, point in zip(np.float32([0.01, 0.02, 0.04]), points, strict=True))
    operands = {"x": x} if attrs else {"x": x, "b": other}
    inputs = [v for name, own in operands.items() for v in (name, *own)] + y
    shape = (64, 6, 8, 4) if "Global" in op else IMAGE_SHAPE  # means over a power of two of numbers are halves
    if zeros[2] is None:  # left out, where it may be
        inputs = [*inputs[:-1], dtype(0)] if "Global" in op else inputs[:-1]
    model = microsoft(op, inputs, dict.fromkeys(operands, shape), dtype, **attrs)
    rng, limits = np.random.default_rng(0), np.iinfo(dtype)
    given = {}
    for value in model.graph.input:
        value.type.tensor_type.elem_type = helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
        given[value.name] = rng.integers(limits.min, limits.max + 1, shape).astype(dtype)
    got = evaluate(lower(load(model)), given, sources(model))
    np.testing.assert_array_equal(got["y"], reference(model, given)["y"])


def test_a_mean_of_bytes_reads_bytes() -> None:
    model = microsoft("QLinearGlobalAveragePool", [*X, *Y], {"x": IMAGE_SHAPE})
    (op,) = fuse(lower(rewrite(load(model)))).ops
    assert isinstance(op, Reduce) and op.x == "x"


def test_microsoft_s_softmax() -> None:
    """ONNX Runtime rounds its results down; QuantizeLinear rounds to the nearest."""
    model = microsoft("QLinearSoftmax", [*X, np.float32(1 / 255), np.uint8(0)], {"x": (5, 9)}, axis=-1, opset=13)
    x = np.random.default_rng(0).integers(0, 256, (5, 9)).astype(np.uint8)
    e = np.exp((x.astype(np.float64) - 117) * 0.031)
    (got,) = evaluate(lower(load(model)), {"x": x}, sources(model)).values()
    np.testing.assert_array_equal(got, np.rint(e / e.sum(-1, keepdims=True) * 255))
    (theirs,) = reference(model, {"x": x}).values()
    assert set(np.unique(got - theirs)) == {0, 1}


@pytest.mark.parametrize("quantized", [True, False])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("transposed", [0, 1])
def test_microsoft_s_gemm(transposed: int, bias: bool, quantized: bool) -> None:
    net = Net()
    w = filters(net, 7, 12) if transposed else filters(net, 12, 7)
    inputs = ["x", np.float32(0.031), np.uint8(117), w, net.positive(7) * np.float32(0.01), np.zeros(7, np.int8)]
    inputs += [net.rng.integers(-9000, 9000, 7).astype(np.int32) if bias else None]
    inputs += [np.float32(0.4), np.uint8(100)] if quantized else []
    model = microsoft("QGemm", inputs, {"x": (5, 12)}, np.uint8 if quantized else np.float32, transB=transposed, alpha=1.5)
    agrees(model, {"x": integers(net, np.uint8, 5, 12)})
