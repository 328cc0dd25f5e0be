"""What ONNX Runtime's transformer optimizer writes, against ONNX Runtime."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from tccompile.errors import ModelError
from tccompile.ir.ops import Attention, Norm, Pointwise
from tccompile.load.model import load
from tests.ops.common import Net, agrees

B, M, N, H, D = 2, 5, 7, 4, 8
f = np.float32


def model(net: Net, **shapes: tuple[int, ...]) -> onnx.ModelProto:
    """The net's model with Microsoft's operators, whose shapes ONNX cannot infer: outputs by name and shape."""
    outputs = [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name, shape in shapes.items()]
    graph = helper.make_graph(net.nodes, "net", net.inputs, outputs, net.weights)
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=8)


def own(net: Net, op: str, *args, outputs: int = 1, **attrs):
    return net(op, *args, outputs=outputs, domain="com.microsoft", **attrs)


@pytest.mark.parametrize(
    "op, bias", [("Gelu", False), ("BiasGelu", True), ("FastGelu", True), ("FastGelu", False), ("QuickGelu", False)]
)
def test_gelu(op: str, bias: bool) -> None:
    net = Net(x=(B, M, 16))
    y = own(net, op, "x", *([net.normal(16)] if bias else []), **({"alpha": 1.5} if op == "QuickGelu" else {}))
    program = agrees(model(net, **{y: (B, M, 16)}), tolerance=1e-5 if op != "FastGelu" else 1e-4)
    assert all(isinstance(op, Pointwise) for op in program.ops)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("op", ["SkipLayerNormalization", "SkipSimplifiedLayerNormalization"])
def test_skip_and_norm(op: str, bias: bool) -> None:
    net = Net(x=(B, M, 16), skip=(B, M, 16))
    beta = [] if "Simplified" in op else [net.normal(16)]
    y, _, _, total = own(
        net, op, "x", "skip", net.normal(16), *beta, *([net.normal(16)] if bias else []), outputs=4, epsilon=1e-5
    )
    net.nodes[-1].output[1] = net.nodes[-1].output[2] = ""
    program = agrees(model(net, **{y: (B, M, 16), total: (B, M, 16)}))
    (norm,) = (op for op in program.ops if isinstance(op, Norm))
    assert norm.centred == ("Simplified" not in op)


@pytest.mark.parametrize("masked", [True, False])
@pytest.mark.parametrize("causal", [0, 1])
def test_attention_with_its_projection(masked: bool, causal: int) -> None:
    net = Net(x=(B, M, 24))
    mask = [np.array([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]], np.int32)] if masked else []
    weights = net.normal(24, 3 * H * D, scale=0.2)
    y = own(net, "Attention", "x", weights, net.normal(3 * H * D), *mask, num_heads=H, unidirectional=causal)
    program = agrees(model(net, **{y: (B, M, H * D)}))
    assert sum(isinstance(op, Attention) for op in program.ops) == 1


@pytest.mark.parametrize("masked", [True, False])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("scores", [None, (1, H, M, N), (B, 1, M, N)])
def test_multi_head_attention(masked: bool, bias: bool, scores: tuple[int, ...] | None) -> None:
    net = Net(q=(B, M, H * D), k=(B, N, H * D), v=(B, N, H * D))
    mask = np.array([[1] * N, [1] * 4 + [0] * (N - 4)], np.int32) if masked else None
    args = [net.normal(3 * H * D) if bias else None, mask, net.normal(*scores) if scores else None]
    while args and args[-1] is None:
        args.pop()
    y = own(net, "MultiHeadAttention", "q", "k", "v", *args, num_heads=H, scale=0.3)
    program = agrees(model(net, **{y: (B, M, H * D)}))
    assert sum(isinstance(op, Attention) for op in program.ops) == 1


@pytest.mark.parametrize("attributes", [{"num_heads": H, "unidirectional": 7}, {"num_heads": 0}, {"num_heads": "four"}])
def test_attributes_without_a_meaning(attributes: dict) -> None:
    net = Net(x=(B, M, 24))
    y = own(net, "Attention", "x", net.normal(24, 96), net.normal(96), **attributes)
    with pytest.raises(
        ModelError, match=r"node 'n0' \(com.microsoft.Attention\) is not valid: its (unidirectional is 7|num_heads is)"
    ):
        load(model(net, **{y: (B, M, 32)}))
