"""ONNX Runtime's own operators, one by one: against its kernel for CPUs where it has one, else against standard operators that
say the same, which it runs."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from tccompile.errors import ModelError, UnsupportedError, UsageError
from tccompile.ir.ops import Rnn
from tccompile.ir.program import Program
from tccompile.ir.reference import evaluate
from tccompile.load import fold
from tccompile.load.model import load, read, sources
from tccompile.lower.graph import lower
from tccompile.pipeline import without_code
from tccompile.runtime.session import Session
from tests.networks import feeds, reference, relative_error
from tests.ops.common import Net
from tests.tiers import thorough

f, i32, i64, u8, i8 = np.float32, np.int32, np.int64, np.uint8, np.int8
B, M, H, D = 2, 5, 4, 8
W = H * D


def own(net: Net, op: str, *args: Any, outputs: int = 1, domain: str = "com.microsoft", **attrs: Any) -> Any:
    return net(op, *args, outputs=outputs, domain=domain, **attrs)


def model(net: Net, *outputs: str, dtype: Any = f, opset: int = 17) -> onnx.ModelProto:
    """The net's model, of whose outputs ONNX knows nothing but the type."""
    elem = helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    values = [helper.make_tensor_value_info(y, elem, None) for y in outputs]
    graph = helper.make_graph(net.nodes, "net", net.inputs, values, net.weights)
    imports = [helper.make_opsetid("", opset), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=imports, ir_version=8 if opset < 21 else 10)


def results(made: onnx.ModelProto, inputs: dict[str, np.ndarray]) -> tuple[dict[str, np.ndarray], Program]:
    program = lower(load(made))
    return evaluate(program, inputs, sources(made)), program


def agrees(made: onnx.ModelProto, other: onnx.ModelProto | None = None, tolerance: float = 2e-6, **inputs: np.ndarray) -> Program:
    """Hold the model to ONNX Runtime's results of it, or of another of the same inputs and outputs."""
    given = feeds(made, 0) | inputs
    (got, program), want = results(made, given), reference(other or made, given)
    for (name, ours), theirs in zip(((y.name, got[y.name]) for y in made.graph.output), want.values(), strict=True):
        error = relative_error(ours, theirs)
        assert error <= tolerance, f"{name} is {error:.1e} off"
    return program


def same(net: Net, y: str, other: Net, expected: str, dtype: Any = f, **inputs: np.ndarray) -> None:
    """Hold an operator that ONNX Runtime cannot run to the standard ones of another net."""
    agrees(model(net, y, dtype=dtype), model(other, expected, dtype=dtype, opset=21), **inputs)


def pair(**inputs: Any) -> tuple[Net, Net]:
    """Two nets of the same inputs and the same numbers at random."""
    return Net(**inputs), Net(**inputs)


# --- Products ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("op", ["FusedMatMul", "TransposeMatMul"])
@pytest.mark.parametrize(
    ("a", "b", "attrs"),
    [
        ((4, 6), (6, 5), {"alpha": 0.5}),
        ((6, 4), (5, 6), {"transA": 1, "transB": 1}),
        ((2, 3, 6, 4), (2, 3, 6, 5), {"transA": 1, "alpha": -2.0}),
        ((2, 3, 4, 6), (3, 5, 6), {"transB": 1}),
    ],
)
def test_fused_matmul(op: str, a: tuple[int, ...], b: tuple[int, ...], attrs: dict) -> None:
    net = Net(a=a, b=b)
    agrees(model(net, own(net, op, "a", "b", **attrs)))


@pytest.mark.parametrize(
    ("a", "b", "attrs"),
    [
        ((4, 2, 3, 6), (2, 3, 6, 5), {"transBatchA": 1}),
        ((6, 2, 3, 4), (2, 3, 6, 5), {"transBatchA": 1, "transA": 1}),
        ((2, 4, 6), (5, 2, 6), {"transBatchB": 1, "transB": 1, "alpha": 3.0}),
    ],
)
def test_fused_matmul_of_batches_inside(a: tuple[int, ...], b: tuple[int, ...], attrs: dict) -> None:
    net = Net(a=a, b=b)
    agrees(model(net, own(net, "FusedMatMul", "a", "b", **attrs)))


@pytest.mark.parametrize(
    "attrs",
    [
        {"activation": "Relu"},
        {"activation": "LeakyRelu", "activation_alpha": 0.2},
        {"activation": "Tanh", "transB": 1, "alpha": 0.5},
    ],
)
def test_fused_gemm(attrs: dict) -> None:
    net = Net(x=(4, 6))
    w = net.normal(*((5, 6) if attrs.get("transB") else (6, 5)))
    agrees(model(net, own(net, "FusedGemm", "x", w, net.normal(5), **attrs)))


ACTIVATIONS = [
    ("Relu", []), ("Tanh", []), ("Sigmoid", []), ("LeakyRelu", [0.3]), ("Clip", [-0.5, 0.75]), ("HardSigmoid", [0.3, 0.4]),
]  # fmt: skip


@pytest.mark.parametrize("added", [True, False])
@pytest.mark.parametrize(("activation", "params"), ACTIVATIONS)
def test_fused_conv(activation: str, params: list[float], added: bool) -> None:
    net = Net(x=(2, 6, 9, 8), z=(2, 8, 5, 4)) if added else Net(x=(2, 6, 9, 8))
    args = ["x", net.normal(8, 3, 3, 3, scale=0.3), net.normal(8), *(["z"] if added else [])]
    attrs = {"strides": [2, 2], "pads": [1, 1, 1, 1], "group": 2, "activation": activation}
    agrees(model(net, own(net, "FusedConv", *args, **attrs, **({"activation_params": params} if params else {}))))


@pytest.mark.parametrize("op", ["NhwcConv", "NhwcFusedConv"])
def test_convolutions_of_channels_last(op: str) -> None:
    a, b = pair(x=(2, 9, 8, 6))
    w, bias = a.normal(10, 3, 3, 2), a.normal(10)
    attrs = {"strides": [2, 1], "pads": [1, 0, 1, 0], "group": 2}
    fused = op == "NhwcFusedConv"
    more = {"activation": "LeakyRelu", "activation_params": [0.2]} if fused else {}
    z = [a.normal(2, 5, 7, 10)] if fused else []
    y = own(a, op, "x", w if fused else w.transpose(0, 2, 3, 1), bias, *z, **attrs, **more)
    e = b("Conv", b("Transpose", "x", perm=[0, 3, 1, 2]), w, bias, **attrs)
    e = b("Transpose", e, perm=[0, 2, 3, 1])
    same(a, y, b, b("LeakyRelu", b("Add", e, z[0]), alpha=0.2) if fused else e)


def test_an_activation_that_nobody_knows_is_refused() -> None:
    net = Net(x=(2, 6, 9, 8))
    with pytest.raises(UnsupportedError, match=r"node 'n0' \(com.microsoft.FusedConv\) .* its activation is 'Snake'"):
        load(model(net, own(net, "FusedConv", "x", net.normal(8, 6, 3, 3), activation="Snake")))


# --- Quantized tensors ----------------------------------------------------------------------------------------------------


def bytes_of(net: Net, *shape: int, low: int = 0, high: int = 256, dtype: Any = u8) -> np.ndarray:
    return net.rng.integers(low, high, shape).astype(dtype)


def weights_of(net: Net, *shape: int) -> np.ndarray:
    """That ONNX Runtime multiplies by uint8 as it should on any CPU."""
    return bytes_of(net, *shape, low=-64, high=64, dtype=i8)


@pytest.mark.parametrize("dtype", [u8, i8])
def test_a_pool_of_channels_last(dtype: Any) -> None:
    net = Net()
    net.inputs = [helper.make_tensor_value_info("x", helper.np_dtype_to_tensor_dtype(np.dtype(dtype)), (2, 9, 8, 3))]
    y = own(net, "NhwcMaxPool", "x", kernel_shape=[3, 2], strides=[2, 1], pads=[1, 0, 1, 1])
    agrees(model(net, y, dtype=dtype), x=bytes_of(net, 2, 9, 8, 3).astype(dtype))


@pytest.mark.parametrize(
    ("op", "attrs"),
    [
        ("QLinearGlobalAveragePool", {}),
        ("QLinearAveragePool", {"kernel_shape": [3, 2], "strides": [2, 2], "pads": [1, 0, 1, 0]}),
        ("QLinearConv", {"pads": [1, 1, 1, 1], "strides": [2, 1], "group": 2}),
    ],
)
def test_quantized_images_of_channels_last(op: str, attrs: dict) -> None:
    net = Net()
    net.inputs = [helper.make_tensor_value_info("x", TensorProto.UINT8, (2, 29, 28, 6))]
    filters = [weights_of(net, 8, 3, 3, 3), net.positive(8) * f(0.02), np.zeros(8, i8)] if op == "QLinearConv" else []
    bias = [net.rng.integers(-900, 900, 8).astype(i32)] if filters else []
    args = ["x", f(0.031), u8(117), *filters, f(0.0917), u8(100), *bias]
    y = own(net, op, *args, channels_last=1, **attrs)
    made, x = model(net, y, dtype=u8), bytes_of(net, 2, 29, 28, 6)
    got, want = results(made, {"x": x})[0][y], reference(made, {"x": x})[y]
    assert np.abs(got.astype(int) - want.astype(int)).max() <= 1 and (got != want).mean() < 0.02


def test_the_mean_of_quantized_numbers() -> None:
    a, b = Net(), Net()
    for net in (a, b):
        net.inputs = [helper.make_tensor_value_info("x", TensorProto.UINT8, (3, 4, 5))]
    x, y = [f(0.03), u8(117)], [f(0.02), u8(90)]
    got = own(a, "QLinearReduceMean", "x", *x, *y, axes=[0, -1], keepdims=0)
    mean = b("ReduceMean", b("DequantizeLinear", "x", *x), np.array([0, 2]), keepdims=0)
    same(a, got, b, b("QuantizeLinear", mean, *y), u8, x=bytes_of(a, 3, 4, 5))


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_the_softmax_of_old_opsets(axis: int) -> None:
    """All axes from this one on are one; ONNX Runtime's table may be 1 off."""
    net = Net()
    net.inputs = [helper.make_tensor_value_info("x", TensorProto.UINT8, (2, 3, 4))]
    made = model(net, own(net, "QLinearSoftmax", "x", f(0.02), u8(117), f(1 / 255), u8(0), axis=axis, opset=11), dtype=u8)
    x = bytes_of(net, 2, 3, 4)
    (got,), (want,) = results(made, {"x": x})[0].values(), reference(made, {"x": x}).values()
    assert np.abs(got.astype(int) - want.astype(int)).max() <= 1 and want.max() < 250


@pytest.mark.parametrize("columns", [True, False])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("op", ["MatMulIntegerToFloat", "DynamicQuantizeMatMul"])
def test_products_of_integers_that_give_floats(op: str, bias: bool, columns: bool) -> None:
    net = Net(x=(3, 5, 12))
    w, scale = weights_of(net, 12, 7), net.positive(*((7,) if columns else ())) * f(0.02)
    zero = weights_of(net, *((7,) if columns else ())) // i8(8)
    b = net.normal(7) if bias else None
    if op == "DynamicQuantizeMatMul":
        agrees(model(net, own(net, op, "x", w, scale, zero, b)), tolerance=1e-6)
        return
    net.inputs = [helper.make_tensor_value_info("x", TensorProto.UINT8, (3, 5, 12))]
    agrees(model(net, own(net, op, "x", w, f(0.03), scale, u8(99), zero, b)), x=bytes_of(net, 3, 5, 12))


@pytest.mark.parametrize("zeros", ["", "packed", "floats"])
@pytest.mark.parametrize(("bits", "block", "k"), [(4, 16, 48), (4, 32, 40), (8, 16, 33), (2, 16, 48), (4, 16, 16)])
def test_weights_in_blocks_of_few_bits(bits: int, block: int, k: int, zeros: str) -> None:
    net, n = Net(x=(3, 5, k)), 7
    blocks = -(-k // block)
    args = [bytes_of(net, n, blocks, block * bits // 8), net.positive(n, blocks) * f(0.05)]
    packed = bytes_of(net, n, -(-blocks * bits // 8))
    args += {"": [None], "packed": [packed], "floats": [net.positive(n, blocks) * f(2 ** (bits - 1))]}[zeros]
    args += [None, net.normal(n)] if bits == 4 and zeros else []
    if zeros == "floats" and bits != 4:
        args[2] = None
    while args[-1] is None:
        args.pop()
    made = model(net, own(net, "MatMulNBits", "x", *args, K=k, N=n, bits=bits, block_size=block))
    agrees(made, tolerance=3e-6)
    gemms = load(made).nodes
    assert [node.op for node in gemms] in (["MatMul"], ["MatMul", "Add"])  # the rest is folded


@pytest.mark.parametrize("kind", [0, 1])
def test_weights_in_four_bits_of_bitsandbytes(kind: int) -> None:
    n, k = 6, 40
    net = Net(x=(3, k))
    args = [bytes_of(net, n * k // 2), net.positive(-(-n * k // 16))]
    agrees(model(net, own(net, "MatMulBnb4", "x", *args, K=k, N=n, block_size=16, quant_type=kind)))


@pytest.mark.parametrize(("n", "k", "block"), [(256, 512, 64), (33, 512, 16)])
def test_large_weights_of_bitsandbytes_are_made_before_they_are_read(n: int, k: int, block: int, monkeypatch: Any) -> None:
    """However large they are: what is made on the way is little beside what constants may take."""
    monkeypatch.setattr(fold, "LARGE", 1 << 12)
    monkeypatch.setattr(fold, "ROOM", 1 << 12)
    net = Net(x=(3, k))
    args = [bytes_of(net, -(-n * k // 2)), net.positive(-(-n * k // block))]
    made = model(net, own(net, "MatMulBnb4", "x", *args, K=k, N=n, block_size=block, quant_type=1))
    assert [node.op for node in load(made).nodes] == ["MatMul"]
    agrees(made)


def four_bits(net: Net, values: np.ndarray, signed: bool) -> str:
    """A constant of a type of four bits."""
    elem = TensorProto.INT4 if signed else TensorProto.UINT4
    net.weights.append(helper.make_tensor(f"w{len(net.weights)}", elem, values.shape, values.reshape(-1).tolist()))
    return net.weights[-1].name


@pytest.mark.parametrize("zeros", [True, False])
@pytest.mark.parametrize("form", ["int4", "uint4", "4 bits", "8 bits"])
def test_a_gather_from_a_table_in_blocks(form: str, zeros: bool) -> None:
    net = Net()
    net.inputs = [helper.make_tensor_value_info("ids", TensorProto.INT64, (2, 3))]
    rows, width, block = 9, 48, 16
    scales, blocks = net.positive(rows, width // block), width // block
    if form.endswith("int4"):
        low = -8 if form == "int4" else 0
        table = four_bits(net, net.rng.integers(low, low + 16, (rows, width)), form == "int4")
        zero = four_bits(net, net.rng.integers(low, low + 16, (rows, blocks)), form == "int4")
        attrs: dict[str, int] = {}
    else:
        bits = int(form[0])
        table, zero = bytes_of(net, rows, width * bits // 8), bytes_of(net, rows, -(-blocks * bits // 8))
        attrs = {"bits": bits}
    y = own(net, "GatherBlockQuantized", table, "ids", scales, *([zero] if zeros else []), block_size=block, **attrs)
    agrees(model(net, y, opset=21), ids=np.array([[0, 8, 3], [2, 2, 7]]))


@pytest.mark.parametrize("direction", ["forward", "reverse", "bidirectional"])
@pytest.mark.parametrize("columns", [True, False])
def test_an_lstm_of_quantized_weights(columns: bool, direction: str) -> None:
    """ONNX Runtime also rounds what the weights are multiplied by: to 8 bits, which moves results by half a percent."""
    net, d, h, k = Net(x=(7, 3, 12)), 2 if direction == "bidirectional" else 1, 8, 12
    shape = (d, 4 * h) if columns else (d,)
    w, r = weights_of(net, d, k, 4 * h), weights_of(net, d, h, 4 * h)
    scales = [net.positive(*shape) * f(0.006), net.positive(*shape) * f(0.006)]
    zeros = [weights_of(net, *shape) // i8(9), weights_of(net, *shape) // i8(9)]
    if columns:
        zeros = [np.zeros(shape, i8)] * 2
    args = ["x", w, r, net.normal(d, 8 * h, scale=0.1), None, None, None, None, scales[0], zeros[0], scales[1], zeros[1]]
    ys = own(net, "DynamicQuantizeLSTM", *args, outputs=3, direction=direction, hidden_size=h)
    program = agrees(model(net, *ys), tolerance=2e-2)
    assert any(isinstance(op, Rnn) for op in program.ops)
    exact = Net(x=(7, 3, 12))
    wide = (d, 1, 4 * h) if columns else (d, 1, 1)
    floats = [
        ((q.astype(f) - z.reshape(wide).astype(f)) * s.reshape(wide)).transpose(0, 2, 1)
        for q, s, z in zip((w, r), scales, zeros, strict=True)
    ]
    es = exact("LSTM", "x", *floats, args[3], outputs=3, direction=direction, hidden_size=h)
    agrees(model(net, *ys), model(exact, *es), 1e-5)


# --- Norms, embeddings, activations ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("opset", [11, 17])
def test_a_norm_in_the_default_domain_of_any_opset(opset: int) -> None:
    net = Net(x=(B, M, 16))
    y = net("SimplifiedLayerNormalization", "x", net.normal(16), axis=-1, epsilon=1e-5)
    y = net("LayerNormalization", y, net.normal(16), net.normal(16), axis=-1, epsilon=1e-5)
    made = model(net, y, opset=opset)
    del made.opset_import[1:]
    agrees(made)


@pytest.mark.parametrize("last", [1, 0])
@pytest.mark.parametrize("activation", [0, 1])
@pytest.mark.parametrize("skip", ["", "whole", "row", "row and bias"])
def test_group_norm(skip: str, activation: int, last: int) -> None:
    shape = (2, 5, 4, 12) if last else (2, 12, 5, 4)
    a, b = pair(x=shape)
    scale, beta, bias = a.normal(12), a.normal(12), a.normal(12)
    row = a.normal(2, 12)
    other = a.normal(*shape) if skip == "whole" else row
    args = [scale, beta, *([other] if skip else []), *([bias] if "bias" in skip else [])]
    attrs = {"groups": 4, "activation": activation, "channels_last": last, "epsilon": 1e-3}
    names = own(a, "SkipGroupNorm" if skip else "GroupNorm", "x", *args, outputs=2 if skip else 1, **attrs)
    e = "x"
    if skip:
        wide = other if skip == "whole" else other.reshape((2, 1, 1, 12) if last else (2, 12, 1, 1))
        e = b("Add", e, wide + (bias.reshape((12,) if last else (12, 1, 1)) if "bias" in skip else f(0)))
    total = e
    e = b("Transpose", e, perm=[0, 3, 1, 2]) if last else e
    e = b("GroupNormalization", e, scale, beta, num_groups=4, epsilon=1e-3)
    e = b("Transpose", e, perm=[0, 2, 3, 1]) if last else e
    e = b("Mul", e, b("Sigmoid", e)) if activation else e
    agrees(model(a, *names) if skip else model(a, names), model(b, e, *([total] if skip else []), opset=21))


@pytest.mark.parametrize("segments", [True, False])
@pytest.mark.parametrize("positions", [None, (1, M), (B, M)])
@pytest.mark.parametrize("mask", [True, False])
def test_embeddings(mask: bool, positions: tuple[int, ...] | None, segments: bool) -> None:
    net, width = Net(), 16
    inputs = {"ids": (0, 20), "segments": (0, 3)} if segments else {"ids": (0, 20)}
    net.inputs = [helper.make_tensor_value_info(n, TensorProto.INT32, (B, M)) for n in inputs]
    given = {n: net.rng.integers(*r, (B, M)).astype(i32) for n, r in inputs.items()}
    tables = [net.normal(20, width), net.normal(9, width), net.normal(3, width) if segments else None]
    args = ["ids", "segments" if segments else None, *tables, net.normal(width), net.normal(width)]
    args += [np.array([[1, 1, 0, 1, 1], [1, 1, 1, 0, 0]], i32) if mask else None]
    args += [net.rng.integers(0, 9, positions).astype(i32)] if positions else []
    y, count, total = own(net, "EmbedLayerNormalization", *args, outputs=3, epsilon=1e-5)
    made = model(net, y, count, total)
    made.graph.output[1].type.tensor_type.elem_type = TensorProto.INT32
    if not mask:
        del made.graph.output[1]
    agrees(made, **given)


def test_embeddings_of_quantized_tables() -> None:
    net, width = Net(), 16
    net.inputs = [helper.make_tensor_value_info(n, TensorProto.INT32, (B, M)) for n in ("ids", "segments")]
    given = {"ids": net.rng.integers(0, 20, (B, M)).astype(i32), "segments": net.rng.integers(0, 3, (B, M)).astype(i32)}
    tables = [
        bytes_of(net, 20, width),
        bytes_of(net, 9, width),
        bytes_of(net, 3, width),
        bytes_of(net, width),
        bytes_of(net, width),
    ]
    mask = np.array([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]], i32)
    args = ["ids", "segments", *tables, mask, *(f(0.01 * (i + 1)) for i in range(5)), *(u8(100 + i) for i in range(5))]
    y, count = own(net, "QEmbedLayerNormalization", *args, outputs=2, epsilon=1e-5)
    made = model(net, y, count)
    made.graph.output[1].type.tensor_type.elem_type = TensorProto.INT32
    agrees(made, **given)


def test_what_splits_and_gates() -> None:
    a, b = pair(x=(B, M, 12))
    bias = a.normal(12)
    left, right = b("Split", b("Add", "x", bias), np.array([6, 6]), axis=2, outputs=2)
    same(a, own(a, "BiasSplitGelu", "x", bias), b, b("Mul", left, b("Gelu", right)))


def test_sums_with_a_bias() -> None:
    a, b = pair(x=(B, M, 12))
    bias, skip = a.normal(12), a.normal(B, M, 12)
    e = b("Add", b("Add", "x", bias), skip)
    same(a, own(a, "BiasAdd", "x", bias, skip), b, e)
    c = Net(x=(B, M, 12))
    same(c, own(c, "BiasDropout", "x", bias, skip, f(0.5)), b, e)


@pytest.mark.parametrize(
    ("axis", "inner", "bias", "wide"),
    [(3, 0, (6, 7), (6, 7)), (3, 1, (2, 7), (2, 1, 1, 7)), (1, 1, (2, 5, 6, 7), (2, 5, 6, 7)), (-1, 0, (5, 6, 7), (5, 6, 7))],
)
def test_softmax_with_a_bias(axis: int, inner: int, bias: tuple[int, ...], wide: tuple[int, ...]) -> None:
    a, b = pair(x=(2, 5, 6, 7))
    values = a.normal(*bias)
    e = b("Flatten", b("Add", "x", values.reshape(wide)), axis=axis % 4)
    e = b("Reshape", b("Softmax", e, axis=-1), np.array([2, 5, 6, 7]))
    same(a, own(a, "BiasSoftmax", "x", values, axis=axis, is_inner_broadcast=inner), b, e)


def test_a_product_and_its_gelu() -> None:
    a, b = pair(x=(B, M, 12))
    w, bias = a.normal(12, 7), a.normal(7)
    same(a, own(a, "GemmFastGelu", "x", w, bias), b, b("Gelu", b("Add", b("MatMul", "x", w), bias), approximate="tanh"))


@pytest.mark.parametrize("op", ["ComplexMul", "ComplexMulConj"])
def test_complex_products(op: str) -> None:
    """(a + bi)(c + di), or by c - di: rows of a matrix that says so"""
    a, b = pair(x=(B, M, 2))
    c, d = 0.75, -1.5 if op == "ComplexMul" else 1.5
    matrix = np.array([[c, d], [-d, c]], f)
    same(a, own(a, op, "x", np.broadcast_to(np.array([0.75, -1.5], f), (B, M, 2))), b, b("MatMul", "x", matrix))


def test_a_sigmoid_of_what_is_scaled() -> None:
    net = Net(x=(B, M, 12))
    agrees(model(net, own(net, "ScaledSiLU", "x", alpha=0.4), own(net, "ScaledSiLU", "x", f(1.7))))


def test_a_sum_that_is_gated() -> None:
    net = Net(x=(B, M, 12), y=(B, M, 12), gate=(B, M, 1))
    agrees(model(net, own(net, "GatedAdd", "x", "y", "gate")))


@pytest.mark.parametrize("metric", ["euclidean", "sqeuclidean"])
def test_distances(metric: str) -> None:
    net = Net(x=(5, 6), y=(7, 6))
    agrees(model(net, own(net, "CDist", "x", "y", metric=metric)), tolerance=1e-5)


def test_the_standard_s_operators_by_another_name() -> None:
    net = Net(x=(2, 3, 6, 5))
    y = own(net, "Pad", "x", np.array([0, 0, 1, 2, 0, 0, 3, 0]), f(0.5), mode="constant")
    y = own(net, "Trilu", y, upper=0)
    y = own(net, "GridSample", y, np.clip(net.normal(2, 4, 4, 2, scale=0.4), -1, 1), mode="bilinear", padding_mode="zeros")
    y = own(net, "ExpandDims", y, np.array(-2, i32))
    agrees(model(net, own(net, "GatherND", y, np.array([[0, 1], [1, 2]]))), tolerance=1e-5)


# --- Attention ------------------------------------------------------------------------------------------------------------


MASKS = {
    "keys": np.array([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]], i32),
    "rows": np.stack([np.tri(M, dtype=i32), np.tri(M, k=1, dtype=i32)]),
    "ends": np.array([5, 3], i32),
    "ends and starts": np.array([5, 4, 0, 2], i32),
}


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("causal", [0, 1])
def test_masks(causal: int, mask: str) -> None:
    net = Net(x=(B, M, 24))
    args = [net.normal(24, 3 * W, scale=0.3), net.normal(3 * W), MASKS[mask]]
    agrees(model(net, own(net, "Attention", "x", *args, num_heads=H, unidirectional=causal)), tolerance=1e-5)


def test_a_mask_of_all_positions_that_there_may_be() -> None:
    """ONNX Runtime takes its part of these rows and columns, and not on CPUs."""
    a, b = pair(x=(B, M, 24))
    wide = a.rng.integers(0, 2, (B, 1, 9, 9)).astype(i32) | np.eye(9, dtype=i32)
    args = [a.normal(24, 3 * W, scale=0.3), a.normal(3 * W)]
    y = own(a, "Attention", "x", *args, wide, num_heads=H)
    agrees(model(a, y), model(b, own(b, "Attention", "x", *args, wide[:, 0, :M, :M], num_heads=H)), 1e-5)


def test_a_bias_of_scores() -> None:
    net = Net(x=(B, M, 24))
    args = [net.normal(24, 3 * W, scale=0.3), net.normal(3 * W), MASKS["keys"], None, net.normal(1, H, M, M)]
    agrees(model(net, own(net, "Attention", "x", *args, num_heads=H)), tolerance=1e-5)


@pytest.mark.parametrize("causal", [0, 1])
@pytest.mark.parametrize("masked", [True, False])
def test_attention_with_a_cache(masked: bool, causal: int) -> None:
    net, p = Net(x=(B, M, 24), past=(2, B, H, 3, D)), 3
    mask = np.concatenate([np.ones((B, p), i32), MASKS["keys"]], 1) if masked else None
    args = [net.normal(24, 3 * W, scale=0.3), net.normal(3 * W), mask, "past"]
    ys = own(net, "Attention", "x", *args, outputs=2, num_heads=H, unidirectional=causal, scale=0.2)
    agrees(model(net, *ys), tolerance=1e-5)


def test_attention_whose_values_are_wider() -> None:
    net, sizes = Net(x=(B, M, 24)), [W, W, 2 * W]
    args = [net.normal(24, 4 * W, scale=0.3), net.normal(4 * W)]
    agrees(model(net, own(net, "Attention", "x", *args, num_heads=H, qkv_hidden_sizes=sizes)), tolerance=1e-5)


@pytest.mark.parametrize("past", [True, False])
@pytest.mark.parametrize("mask", ["", "keys", "ends"])
@pytest.mark.parametrize("columns", [True, False])
def test_attention_of_integers(columns: bool, mask: str, past: bool) -> None:
    net = Net(past=(2, B, H, 3, D)) if past else Net()
    net.inputs.append(helper.make_tensor_value_info("x", TensorProto.UINT8, (B, M, 24)))
    n = (3 * W,) if columns else ()
    values = {"keys": np.concatenate([np.ones((B, 3 * past), i32), MASKS["keys"]], 1), "ends": MASKS["ends"] + i32(3 * past)}
    args = [weights_of(net, 24, 3 * W), net.normal(3 * W), f(0.01), net.positive(*n) * f(0.004), values.get(mask), u8(120)]
    args += [np.zeros(n, i8), *(["past"] if past else [])]
    made = own(net, "QAttention", "x", *args, outputs=2 if past else 1, num_heads=H, unidirectional=int(past))
    agrees(model(net, *([made] if isinstance(made, str) else made)), tolerance=1e-5, x=bytes_of(net, B, M, 24))


@pytest.mark.parametrize("form", ["apart", "heads apart", "a cache"])
@pytest.mark.parametrize("bias", [True, False])
def test_multi_head_attention_of_many_forms(bias: bool, form: str) -> None:
    n, p = 7, 3
    keys = (B, H, n, D) if form == "heads apart" else (B, n, W)
    net = Net(q=(B, M, W), k=keys, v=keys, **({"pk": (B, H, p, D), "pv": (B, H, p, D)} if form == "a cache" else {}))
    more = [None, None, "pk", "pv"] if form == "a cache" else []
    args = ["q", "k", "v", net.normal(3 * W) if bias else None, *more]
    while args[-1] is None:
        args.pop()
    ys = own(net, "MultiHeadAttention", *args, outputs=1 if form == "heads apart" else 3, num_heads=H)
    agrees(model(net, *([ys] if isinstance(ys, str) else ys)), tolerance=1e-5)


@pytest.mark.parametrize("parts", [2, 3])
def test_queries_keys_and_values_in_one(parts: int) -> None:
    a = Net(x=(B, M, H, parts, D))
    b = Net(x=(B, M, H, parts, D))
    q = a.normal(B, M, W)
    y = own(a, "MultiHeadAttention", *(["x"] if parts == 3 else [q, "x"]), num_heads=H)
    taken = b("Split", "x", np.ones(parts, i64), axis=3, outputs=parts)
    taken = [b("Reshape", t, np.array([B, M, W])) for t in taken]
    made = b("Attention", *([q] if parts == 2 else []), *taken, q_num_heads=H, kv_num_heads=H)
    agrees(model(a, y), model(b, made, opset=23), 1e-5)


def test_one_row_of_a_decoder() -> None:
    a, b = pair(q=(B, 1, W), k=(B, 1, W), v=(B, 1, W), pk=(B, H, 3, D), pv=(B, H, 3, D))
    mask, bias = np.array([[1, 1, 1, 1], [0, 1, 1, 1]], i32), a.normal(3 * W)
    past, more = ["pk", "pv"], [None] * 3
    ys = own(a, "DecoderMaskedMultiHeadAttention", "q", "k", "v", mask, None, *past, *more, bias, outputs=3, num_heads=H)
    es = own(b, "MultiHeadAttention", "q", "k", "v", bias, mask, None, *past, outputs=3, num_heads=H)
    agrees(model(a, *ys), model(b, *es), 1e-5)


def test_a_cache_of_which_a_part_is_in_use_is_refused() -> None:
    net = Net(x=(B, M, 24), past=(2, B, H, 9, D))
    args = ["x", net.normal(24, 3 * W), net.normal(3 * W), None, "past", None, np.array([3], i32)]
    with pytest.raises(
        UnsupportedError, match=r"node 'n0' \(com.microsoft.Attention\) .*share a buffer.*past_present_share_buffer=0"
    ):
        load(model(net, own(net, "Attention", *args, num_heads=H, past_present_share_buffer=1)))


def tables(net: Net, rows: int = 16, half: int = D // 2) -> list[np.ndarray]:
    angles = net.normal(rows, half, scale=3.0)
    return [np.cos(angles), np.sin(angles)]


@pytest.mark.parametrize("interleaved", [0, 1])
@pytest.mark.parametrize("positions", [(1,), (B, M)])
@pytest.mark.parametrize("shape", [(B, M, W), (B, H, M, D)])
def test_rotary_positions(shape: tuple[int, ...], positions: tuple[int, ...], interleaved: int) -> None:
    net = Net(x=shape)
    ids = net.rng.integers(0, 11, positions)
    agrees(model(net, own(net, "RotaryEmbedding", "x", ids, *tables(net), interleaved=interleaved)))


def test_rotary_positions_of_a_part() -> None:
    net = Net(x=(B, M, W))
    ids = net.rng.integers(0, 11, (B, M))
    more = {"num_heads": H, "rotary_embedding_dim": 4}
    agrees(model(net, own(net, "RotaryEmbedding", "x", ids, *tables(net, half=2), **more)))


GROUPS, SIZE = 2, 16
WIDTH = H * SIZE


def cache(batch: int, past: int) -> dict[str, tuple[int, ...]]:
    return dict.fromkeys(("pk", "pv"), (batch, GROUPS, past, SIZE))


def grouped(rows: int, past: int, lengths: list[int], total: int, packed: bool = False, bias: bool = False, **attrs: Any) -> None:
    """GroupQueryAttention of so many new rows, and a cache with room for `past`."""
    kv = GROUPS * SIZE
    shapes = {"q": (B, rows, WIDTH + 2 * kv)} if packed else {"q": (B, rows, WIDTH), "k": (B, rows, kv), "v": (B, rows, kv)}
    if past:
        shapes |= cache(B, past)
    net = Net(**shapes)
    args = ["q", *([None, None] if packed else ["k", "v"]), *(["pk", "pv"] if past else [None, None])]
    args += [np.array(lengths, i32) - i32(1), np.array(total, i32)]
    args += tables(net, half=SIZE // 2) if attrs.get("do_rotary") else [None, None] if bias else []
    args += [None, net.normal(1, H, rows, total)] if bias else []
    made = own(net, "GroupQueryAttention", *args, outputs=3, num_heads=H, kv_num_heads=GROUPS, **attrs)
    agrees(model(net, *made), tolerance=1e-5)


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize(
    "attrs", [{}, {"do_rotary": 1}, {"do_rotary": 1, "rotary_interleaved": 1, "scale": 0.2}, {"softcap": 2.0}]
)
def test_groups_of_heads_without_a_cache(attrs: dict, packed: bool) -> None:
    grouped(M, 0, [M, M], M, packed, **attrs)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("window", [-1, 2])
def test_groups_of_heads_that_see_so_far(window: int, bias: bool) -> None:
    grouped(M, 0, [M, M], M, bias=bias, local_window_size=window)


@pytest.mark.parametrize("window", [-1, 3])
@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("rotary", [0, 1])
def test_groups_of_heads_with_a_cache(rotary: int, packed: bool, window: int) -> None:
    grouped(1, 6, [7, 7], 7, packed, do_rotary=rotary, local_window_size=window)


def test_caches_that_hold_more_of_one_batch_than_of_another() -> None:
    """Of what no position of a batch sees, ONNX Runtime says nothing."""
    net = Net(q=(B, 1, WIDTH), k=(B, 1, GROUPS * SIZE), v=(B, 1, GROUPS * SIZE), **cache(B, 6))
    args = ["q", "k", "v", "pk", "pv", np.array([6, 3], i32), np.array(7, i32), *tables(net, half=SIZE // 2)]
    ys = own(net, "GroupQueryAttention", *args, outputs=3, num_heads=H, kv_num_heads=GROUPS, do_rotary=1)
    made = model(net, *ys)
    given = feeds(made, 0)
    got, want = results(made, given)[0], reference(made, given)
    assert relative_error(got[ys[0]], want[ys[0]]) < 1e-5
    for y in ys[1:]:
        for b, length in enumerate((7, 4)):
            assert relative_error(got[y][b, :, :length], want[y][b, :, :length]) < 1e-5


def test_several_new_rows_behind_a_cache() -> None:
    """ONNX Runtime takes one batch then."""
    net = Net(q=(1, 3, WIDTH), k=(1, 3, GROUPS * SIZE), v=(1, 3, GROUPS * SIZE), **cache(1, 4))
    args = ["q", "k", "v", "pk", "pv", np.array([6], i32), np.array(7, i32), *tables(net, half=SIZE // 2)]
    agrees(
        model(net, *own(net, "GroupQueryAttention", *args, outputs=3, num_heads=H, kv_num_heads=GROUPS, do_rotary=1)),
        tolerance=1e-5,
    )


@pytest.mark.parametrize("rows, past, total", [(M, 0, M), (1, 6, 7)])
@pytest.mark.parametrize("window", [-1, 3])
@pytest.mark.parametrize("sinks", [True, False])
def test_sinks_of_heads(sinks: bool, window: int, rows: int, past: int, total: int) -> None:
    """A score for each head that is of no key, or 0 for all: a part of the sum that weights are divided by."""
    net = Net(q=(B, rows, WIDTH), k=(B, rows, GROUPS * SIZE), v=(B, rows, GROUPS * SIZE), **(cache(B, past) if past else {}))
    args = [
        "q",
        "k",
        "v",
        *(["pk", "pv"] if past else [None, None]),
        np.array([total, total], i32) - i32(1),
        np.array(total, i32),
    ]
    args += [None, None, None, None, net.normal(H)] if sinks else []
    more = {"local_window_size": window, "num_heads": H, "kv_num_heads": GROUPS, "smooth_softmax": int(not sinks)}
    agrees(model(net, *own(net, "GroupQueryAttention", *args, outputs=3, **more)), tolerance=1e-5)


@pytest.mark.parametrize("rows, room, last", [(1, 4, 3), (1, 4, 9), (1, 6, 6), (1, 6, 7), (3, 6, 13), (9, 6, 15), (5, 5, 5)])
@pytest.mark.parametrize("packed", [True, False])
def test_caches_of_a_window(packed: bool, rows: int, room: int, last: int) -> None:
    """They hold the last positions, in order: a window of 4 at least, and what lies behind the last of them is of no matter."""
    kv = GROUPS * SIZE
    net = Net(
        **({"q": (1, rows, WIDTH + 2 * kv)} if packed else {"q": (1, rows, WIDTH), "k": (1, rows, kv), "v": (1, rows, kv)}),
        **cache(1, room),
    )
    args = ["q", *([None, None] if packed else ["k", "v"]), "pk", "pv", np.array([last - 1], i32), np.array(last, i32)]
    more = {"num_heads": H, "kv_num_heads": GROUPS, "do_rotary": 1, "local_window_size": 4, "sliding_window_cache": 1}
    ys = own(net, "GroupQueryAttention", *args, *tables(net, half=SIZE // 2), outputs=3, **more)
    made = model(net, *ys)
    given = feeds(made, 0)
    got, want = results(made, given)[0], reference(made, given)
    held = last - (room - 3) * max(-(-(last - room) // (room - 3)), 0)
    assert relative_error(got[ys[0]], want[ys[0]]) < 1e-5
    assert all(relative_error(got[y][:, :, :held], want[y][:, :, :held]) < 1e-5 for y in ys[1:])


def test_norms_of_queries_and_keys() -> None:
    """Of each head, before it is turned; ONNX Runtime's kernel for CPUs does not take them."""
    a, b = pair(q=(B, M, WIDTH), k=(B, M, GROUPS * SIZE), v=(B, M, GROUPS * SIZE))
    where = [np.array([M, M], i32) - i32(1), np.array(M, i32), *tables(a, half=SIZE // 2)]
    weights = [a.normal(SIZE), a.normal(SIZE)]
    more = {"num_heads": H, "kv_num_heads": GROUPS, "do_rotary": 1}
    args = ["q", "k", "v", None, None, *where, *[None] * 5, *weights]
    y = own(a, "GroupQueryAttention", *args, q_norm_epsilon=1e-2, qk_norm_epsilon=1e-3, **more)
    normed = []
    for x, w, heads, epsilon in zip("qk", weights, (H, GROUPS), (1e-2, 1e-3), strict=True):
        apart = b("Reshape", x, np.array([B, M, heads, SIZE]))
        squares = b("ReduceMean", b("Mul", apart, apart), axes=[3])
        apart = b("Div", apart, b("Sqrt", b("Add", squares, np.array(epsilon, f))))
        normed.append(b("Reshape", b("Mul", apart, w), np.array([B, M, heads * SIZE])))
    other = own(b, "GroupQueryAttention", *normed, "v", None, None, *where, **more)
    agrees(model(a, y), model(b, other), 1e-5)


@thorough
def test_a_step_behind_any_number_of_tokens() -> None:
    """In a plan for a range: how many there are is read from the shape of a mask, and positions are counted when it runs."""
    held = dict.fromkeys(("pk", "pv"), (1, GROUPS, "past", SIZE))
    net = Net(q=(1, 1, WIDTH), k=(1, 1, GROUPS * SIZE), v=(1, 1, GROUPS * SIZE), **held, mask=(i64, (1, "past + 1")))
    total = net("Gather", net("Shape", "mask"), np.array(1), axis=0)
    last = net("Cast", net("Sub", net("ReduceSum", "mask", np.array([1]), keepdims=0), np.array([1])), to=TensorProto.INT32)
    args = ["q", "k", "v", "pk", "pv", last, net("Cast", total, to=TensorProto.INT32), *(net.normal(64, SIZE // 2) for _ in "cs")]
    ys = own(net, "GroupQueryAttention", *args, outputs=3, num_heads=H, kv_num_heads=GROUPS, do_rotary=1)
    made = model(net, *ys)
    with Session(without_code(made, precision="fp32", ranges={"past": (2, 40)}), "cpu") as session:
        for past in (2, 3, 17, 40):
            rng = np.random.default_rng(past)
            sizes = {"q": (1, 1, WIDTH)} | dict.fromkeys("kv", (1, 1, GROUPS * SIZE)) | cache(1, past)
            given = {name: rng.standard_normal(shape).astype(f) for name, shape in sizes.items()} | {
                "mask": np.ones((1, past + 1), i64)
            }
            for found, expected in zip(session.run([*ys], given), reference(made, given).values(), strict=True):
                assert relative_error(found, expected) < 1e-5


@pytest.mark.parametrize("op", ["PackedAttention", "PackedMultiHeadAttention"])
def test_tokens_without_padding(op: str) -> None:
    """Sequences of 5, 2 and 3 tokens: the same as each by itself."""
    lengths, rows, width = [5, 2, 3], 5, 24 if op == "PackedAttention" else 3 * W
    a, b = pair(x=(10, width))
    places = [5 * i + j for i, n in enumerate(lengths) for j in range(n)]
    offset = np.array(places + [t for t in range(15) if t not in places], i32).reshape(3, rows)
    begins = np.cumsum([0, *lengths]).astype(i32)
    w, bias = a.normal(24, 3 * W, scale=0.3), a.normal(3 * W)
    if op == "PackedAttention":
        y = own(a, op, "x", w, bias, offset, begins, num_heads=H)
        qkv = b("Split", b("Add", b("MatMul", "x", w), bias), np.array([W] * 3), axis=1, outputs=3)
    else:
        parts = a("Split", "x", np.array([W] * 3), axis=1, outputs=3)
        y = own(a, op, *parts, bias, offset, begins, num_heads=H)
        qkv = b("Split", b("Add", "x", bias), np.array([W] * 3), axis=1, outputs=3)
    done = []
    for n, parts in enumerate(zip(*(b("Split", t, np.array(lengths), axis=0, outputs=3) for t in qkv), strict=True)):
        one = [b("Reshape", t, np.array([1, lengths[n], W])) for t in parts]
        done.append(b("Reshape", b("Attention", *one, q_num_heads=H, kv_num_heads=H), np.array([lengths[n], W])))
    agrees(model(a, y), model(b, b("Concat", *done, axis=0), opset=23), 1e-5)


def test_padding_comes_back() -> None:
    a, b = pair(x=(5, 3))
    offset = np.array([0, 1, 4, 5, 6, 2, 3, 7], i32).reshape(2, 4)
    zeros = np.zeros((8, 3), f)
    e = b("ScatterND", zeros, np.array([[0], [1], [4], [5], [6]]), "x")
    same(a, own(a, "RestorePadding", "x", offset), b, b("Reshape", e, np.array([2, 4, 3])))


BUCKETS = {  # by T5's own code, of 32 buckets up to a distance of 128: how far behind the query a key is, and its bucket
    1: {-200: 31, -127: 31, -64: 30, -16: 26, -8: 24, -1: 17, 0: 0, 1: 1, 7: 7, 8: 8, 12: 9, 20: 10, 64: 14, 127: 15, 200: 15},
    0: {-200: 0, -16: 0, -1: 0, 0: 0, 1: 1, 7: 7, 8: 8, 9: 9, 12: 12, 16: 16, 20: 17, 64: 26, 127: 31, 128: 31, 200: 31},
}


@pytest.mark.parametrize("both", BUCKETS)
def test_bias_by_distance(both: int) -> None:
    queries, table = 201, np.arange(64, dtype=f).reshape(32, 2)
    net = Net(x=(32, 2))
    y = own(net, "RelativePositionBias", "x", np.array([queries]), np.array([queries]), max_distance=128, is_bidirectional=both)
    got, _ = results(model(net, y), {"x": table})
    assert got[y].shape == (1, 2, queries, queries)
    for distance, bucket in BUCKETS[both].items():
        diagonal = np.diagonal(got[y], -distance, 2, 3)  # key = query - distance
        np.testing.assert_array_equal(diagonal[0], np.broadcast_to(table[bucket][:, None], diagonal[0].shape))


def test_bias_by_distance_that_is_gated() -> None:
    a, b = pair(x=(B, M, W))
    bias, by_distance, w, c, eco = a.normal(W), a.normal(1, H, M, M), a.normal(D, 6), a.normal(6), a.normal(1, H, 1, 1)
    y = own(a, "GatedRelativePositionBias", "x", bias, by_distance, w, c, eco, num_heads=H)
    q = b("Transpose", b("Reshape", b("Add", "x", bias), np.array([B, M, H, D])), perm=[0, 2, 1, 3])
    g = b("Reshape", b("Add", b("MatMul", q, w), c), np.array([B, H, M, 2, 3]))
    g = b("Sigmoid", b("ReduceSum", g, np.array([4]), keepdims=0))
    u, r = b("Split", g, np.array([1, 1]), axis=3, outputs=2)
    gate = b("Add", b("Mul", u, b("Sub", b("Mul", r, eco), f(1))), f(2))
    same(a, y, b, b("Mul", gate, by_distance))


# --- What has no meaning here -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("op", "why"),
    [
        ("BeamSearch", "step by step"), ("RemovePadding", "size of its output"), ("LongformerAttention", "layout of blocks"),
        ("QOrderedMatMul", "one kind of GPU"), ("QMoE", "experts"), ("Inverse", "ONNX Runtime's own"),
    ],
)  # fmt: skip
def test_others_are_refused_by_their_names(op: str, why: str) -> None:
    net = Net(x=(B, M, W))
    with pytest.raises(UnsupportedError, match=rf"node 'n0' \(com.microsoft.{op}\) is not supported: .*{why}.*;"):
        load(model(net, own(net, op, "x")))


@pytest.mark.parametrize(
    ("op", "args", "attrs", "why"),
    [
        ("MatMulNBits", [np.zeros((7, 3, 8), u8), np.ones((7, 2), f)], {"K": 32, "N": 7, "block_size": 16}, "weights is 7×3×8"),
        ("GroupNorm", [np.ones(32, f), np.ones(32, f)], {"groups": 5, "activation": 0}, "does not divide 32"),
        ("SkipGroupNorm", [np.ones(32, f), np.ones(32, f), None], {"groups": 4, "activation": 2}, "its activation is 2"),
        ("MultiHeadAttention", [np.ones((B, M, 30), f)] * 2, {"num_heads": 4}, "for 4 heads"),
    ],
)
def test_contradictions(op: str, args: list, attrs: dict, why: str) -> None:
    net = Net(x=(B, M, W))
    with pytest.raises(ModelError, match=f"n0.*{why}"):
        load(model(net, own(net, op, "x", *args, **attrs)))


# --- Channels in blocks -----------------------------------------------------------------------------------------------------


def optimized(made: onnx.ModelProto, path: Any) -> onnx.ModelProto:
    """As ONNX Runtime lays it out for this CPU."""
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.optimized_model_filepath, options.log_severity_level = str(path), 4
    ort.InferenceSession(made.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return onnx.load(path)


def blocked(channels: int) -> onnx.ModelProto:
    n = Net(opset=17, x=(1, 3, 16, 16))
    c = channels
    y = n("Relu", n("Conv", "x", n.normal(c, 3, 3, 3, scale=0.3), n.normal(c), pads=[1, 1, 1, 1]))
    z = n("Conv", y, n.normal(c, 1, 3, 3, scale=0.3), n.normal(c), pads=[1, 1, 1, 1], group=c)
    z = n("LeakyRelu", z, alpha=0.2)
    z = n("Add", n("Conv", z, n.normal(c, c, 1, 1, scale=0.1)), y)
    z = n("MaxPool", n("Relu", z), kernel_shape=[2, 2], strides=[2, 2])
    z = n("AveragePool", z, kernel_shape=[3, 3], strides=[2, 2], pads=[1, 1, 1, 1], count_include_pad=1)
    up = n(
        "Resize",
        z,
        None,
        np.array([1, 1, 2, 2], f),
        mode="nearest",
        coordinate_transformation_mode="asymmetric",
        nearest_mode="floor",
    )
    z = n("Mul", n("Conv", up, n.normal(c, c, 3, 3, scale=0.1), pads=[1, 1, 1, 1]), n("Sigmoid", n("GlobalAveragePool", up)))
    return n.out(z, n("GlobalAveragePool", z)).model()


def test_channels_in_blocks(tmp_path: Any) -> None:
    """24 channels are 24 in blocks of 8, and 32 in blocks of 16."""
    plain = blocked(24)
    made = optimized(plain, tmp_path / "blocked.onnx")
    assert sum(n.domain == "com.microsoft.nchwc" for n in made.graph.node) > 5
    agrees(made, plain, 1e-5)


def test_blocks_of_a_size_that_does_not_show(tmp_path: Any) -> None:
    """Then the user says it, and one of the two sizes is right."""
    plain = blocked(32)
    made = optimized(plain, tmp_path / "blocked.onnx")
    with pytest.raises(
        UnsupportedError, match=r"com.microsoft.nchwc.*blocks of 8 or 16 channels.*NchwcTransformer.*--nchwc-block"
    ):
        load(made)
    given = feeds(plain, 0)
    want = reference(plain, given)
    errors = []
    for block in (8, 16):
        got = evaluate(lower(load(read(made, block))), given, sources(made))
        errors.append(max(relative_error(got[y], want[y]) for y in want))
    assert min(errors) < 1e-5 and max(errors) > 0.1


def test_blocks_that_the_user_says_otherwise(tmp_path: Any) -> None:
    made = optimized(blocked(24), tmp_path / "blocked.onnx")
    is_8 = any(t.dims[0] % 16 for t in made.graph.initializer if len(t.dims) == 4)
    with pytest.raises(UsageError, match="do not fit the model"):
        load(read(made, 16 if is_8 else 8))


def test_blocks_that_others_read(tmp_path: Any) -> None:
    """As ONNX Runtime's transformer optimizer leaves some networks, when it rewrites convolutions after their layout."""
    made = optimized(blocked(32), tmp_path / "blocked.onnx")
    pool = next(n for n in made.graph.node if n.op_type == "MaxPool")
    pool.domain = ""
    with pytest.raises(UnsupportedError, match=rf"node '{pool.name}' .*MaxPool.*whose channels lie in blocks"):
        load(read(made, 8))
