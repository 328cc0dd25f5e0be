"""Operators of Microsoft's domain that ONNX Runtime's transformer optimizer writes, as the standard ones that they were made of
(https://github.com/microsoft/onnxruntime/blob/main/docs/ContribOperators.md)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import onnx
import onnx.helper
from onnx import numpy_helper

from tccompile.contrib import Parts

Shapes = Mapping[str, tuple[int, ...]]
"""Of the node's inputs, by name."""


def taken_apart(node: onnx.NodeProto, shapes: Shapes) -> list[onnx.NodeProto] | None:
    """The standard nodes that a node of Microsoft's domain stands for, or None if it is not one of those here."""
    if node.op_type not in OPERATORS:
        return None
    attributes = {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}
    parts = Parts(node)
    inputs = [*node.input, *[""] * 12]
    if OPERATORS[node.op_type](parts, inputs, attributes, shapes) is False:
        return None
    return parts.nodes


def _constant(parts: Parts, values: Any) -> str:
    return parts.add("Constant", [], value=numpy_helper.from_array(np.asarray(values), "values"))


def _gelu(parts: Parts, inputs: Sequence[str], attributes: Mapping[str, Any], shapes: Shapes) -> None:
    """gelu(x + bias)"""
    x, bias = inputs[:2]
    x = parts.add("Add", [x, bias]) if bias else x
    approximate = "tanh" if parts.node.op_type == "FastGelu" else "none"
    parts.add("Gelu", [x], parts.node.output[0], approximate=approximate)


def _quick_gelu(parts: Parts, inputs: Sequence[str], attributes: Mapping[str, Any], shapes: Shapes) -> None:
    """x * sigmoid(alpha * x)"""
    alpha = parts.add("CastLike", [_constant(parts, np.float32(attributes.get("alpha", 1.702))), inputs[0]])
    gate = parts.add("Sigmoid", [parts.add("Mul", [inputs[0], alpha])])
    parts.add("Mul", [inputs[0], gate], parts.node.output[0])


def _skip_norm(parts: Parts, inputs: Sequence[str], attributes: Mapping[str, Any], shapes: Shapes) -> bool:
    """norm(x + skip + bias), and the sum as the fourth output; the second and third are of training."""
    node, simplified = parts.node, parts.node.op_type == "SkipSimplifiedLayerNormalization"
    x, skip, scale, *rest = inputs
    beta, bias = ("", rest[0]) if simplified else rest[:2]
    outputs = [*node.output, "", "", ""]
    if any(outputs[1:3]):
        return False
    total = parts.add("Add", [x, skip], "" if bias else outputs[3])
    total = parts.add("Add", [total, bias], outputs[3]) if bias else total
    epsilon = attributes.get("epsilon", 1e-12)
    if simplified:
        parts.add("RMSNormalization", [total, scale], node.output[0], axis=-1, epsilon=epsilon)
    else:
        parts.add("LayerNormalization", [total, scale, beta], node.output[0], axis=-1, epsilon=epsilon)
    return True


def _packed_attention(parts: Parts, inputs: Sequence[str], attributes: Mapping[str, Any], shapes: Shapes) -> bool:
    """Attention with its projection: x (B, M, W) times weights (W, 3·hidden)."""
    x, weights, bias, mask, past, bias_of_scores = inputs[:6]
    width = shapes[weights][1]
    if past or bias_of_scores or len(parts.node.output) > 1 or attributes.get("do_rotary") or width % 3:
        return False
    if any(attributes.get("qkv_hidden_sizes", ())) or (mask and shapes[mask] != shapes[x][:2]):
        return False
    qkv = parts.add("MatMul", [x, weights])
    qkv = parts.add("Add", [qkv, bias]) if bias else qkv
    names = [f"{qkv}/{part}" for part in "qkv"]
    split = onnx.helper.make_node("Split", [qkv, _constant(parts, np.full(3, width // 3))], names, parts.node.name, axis=-1)
    parts.nodes.append(split)
    _attention(parts, names, mask, "", attributes)
    return True


def _multi_head_attention(parts: Parts, inputs: Sequence[str], attributes: Mapping[str, Any], shapes: Shapes) -> bool:
    """Attention of projections (B, M, hidden), without their bias (which comes beside them), and without a cache."""
    q, k, v, bias, mask, bias_of_scores, *cache = inputs
    if not (k and v) or any(len(shapes[t]) != 3 for t in (q, k, v)) or any(cache) or len(parts.node.output) > 1:
        return False
    if mask and shapes[mask] != shapes[k][:2]:
        return False
    operands = [q, k, v]
    if bias:
        sizes = [shapes[t][2] for t in operands]
        names = [f"{parts.node.output[0]}/bias {part}" for part in "qkv"]
        parts.nodes.append(onnx.helper.make_node("Split", [bias, _constant(parts, np.array(sizes))], names, axis=0))
        operands = [parts.add("Add", [t, b]) for t, b in zip(operands, names, strict=True)]
    _attention(parts, operands, mask, bias_of_scores, attributes)
    return True


def _attention(parts: Parts, operands: Sequence[str], mask: str, bias: str, attributes: Mapping[str, Any]) -> None:
    """`mask` (B, N) is 1 for keys that count; `bias` is added to the scores."""
    if mask:
        lowest = parts.add("CastLike", [_constant(parts, np.float32(attributes.get("mask_filter_value", -10000.0))), operands[0]])
        one = parts.add("CastLike", [_constant(parts, np.float32(1)), operands[0]])
        hidden = parts.add("Mul", [parts.add("Sub", [one, parts.add("CastLike", [mask, operands[0]])]), lowest])
        hidden = parts.add("Unsqueeze", [hidden, _constant(parts, np.array([1, 2]))])
        bias = parts.add("Add", [hidden, bias]) if bias else hidden
    heads = attributes["num_heads"]
    more = {"scale": attributes["scale"]} if attributes.get("scale") else {}
    parts.add(
        "Attention", [*operands, bias], parts.node.output[0], q_num_heads=heads, kv_num_heads=heads,
        is_causal=int(bool(attributes.get("unidirectional"))), **more,
    )  # fmt: skip


OPERATORS: dict[str, Callable[..., bool | None]] = {
    "Attention": _packed_attention,
    "BiasGelu": _gelu,
    "FastGelu": _gelu,
    "Gelu": _gelu,
    "MultiHeadAttention": _multi_head_attention,
    "QuickGelu": _quick_gelu,
    "SkipLayerNormalization": _skip_norm,
    "SkipSimplifiedLayerNormalization": _skip_norm,
}
