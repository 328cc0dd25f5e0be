"""Operators of Microsoft's domain that ONNX Runtime's quantization tools write: standard ones between numbers taken apart
and put together again (https://github.com/microsoft/onnxruntime/blob/main/docs/ContribOperators.md)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import onnx
import onnx.helper

DOMAIN = "com.microsoft"

UNARY = {
    "QLinearAveragePool": "AveragePool",
    "QLinearGlobalAveragePool": "GlobalAveragePool",
    "QLinearLeakyRelu": "LeakyRelu",
    "QLinearSigmoid": "Sigmoid",
    "QLinearSoftmax": "Softmax",
}
"""Of (x, scale, zero point, y's scale, zero point)."""

BINARY = {"QLinearAdd": "Add", "QLinearMul": "Mul"}
"""Of (a, scale, zero point, b, scale, zero point, y's scale, zero point)."""

OWN = ("channels_last", "opset")
"""Attributes that the standard operators have not."""


def taken_apart(node: onnx.NodeProto) -> list[onnx.NodeProto] | None:
    """The standard nodes that a node of Microsoft's domain stands for, or None if it is not one of those here."""
    attributes = {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}
    x, op = [*node.input], node.op_type
    if attributes.get("channels_last") or (
        op == "QLinearSoftmax" and attributes.get("opset", 13) < 13 and attributes.get("axis") != -1
    ):
        return None
    kept = {name: value for name, value in attributes.items() if name not in OWN}
    parts = Parts(node)
    if op in ("QuantizeLinear", "DequantizeLinear"):
        parts.add(op, x, node.output[0], **kept)
    elif op in UNARY:
        parts.store(parts.add(UNARY[op], [parts.take(*x[:3])], **kept), *x[3:])
    elif op in BINARY:
        parts.store(parts.add(BINARY[op], [parts.take(*x[:3]), parts.take(*x[3:6])], **kept), *x[6:])
    elif op == "QLinearWhere":
        parts.store(parts.add("Where", [x[0], parts.take(*x[1:4]), parts.take(*x[4:7])]), *x[7:])
    elif op == "QLinearConcat":
        taken = [parts.take(*x[i : i + 3]) for i in range(2, len(x), 3)]
        parts.store(parts.add("Concat", taken, **kept), *x[:2])
    elif op == "QGemm":
        _gemm(parts, x, kept)
    else:
        return None
    return parts.nodes


def _gemm(parts: Parts, x: Sequence[str], attributes: dict) -> None:
    """(a, scale, zero, b, scale, zero, c, y's scale, zero): c has a's scale times b's and alpha; without y's scale y is float."""
    c, y_scale, y_zero = [*x[6:], "", "", ""][:3]
    operands = [parts.take(*x[:3]), parts.take(*x[3:6], axis=0 if attributes.get("transB") else 1)]
    if c:
        alpha = onnx.helper.make_tensor("alpha", onnx.TensorProto.FLOAT, (), [attributes.get("alpha", 1.0)])
        scale = parts.add("Mul", [parts.add("Mul", [x[1], x[4]]), parts.add("Constant", [], value=alpha)])
        operands.append(parts.add("Mul", [parts.add("Cast", [c], to=onnx.TensorProto.FLOAT), scale]))
    if y_scale:
        parts.store(parts.add("Gemm", operands, **attributes), y_scale, y_zero)
    else:
        parts.add("Gemm", operands, parts.node.output[0], **attributes)


class Parts:
    """The nodes that a node becomes."""

    def __init__(self, node: onnx.NodeProto) -> None:
        self.node = node
        self.nodes: list[onnx.NodeProto] = []

    def add(self, op: str, inputs: Sequence[str], y: str = "", **attributes: Any) -> str:
        """The name of what one more node computes."""
        y = y or f"{self.node.output[0]}/{len(self.nodes)}"
        while inputs and not inputs[-1]:
            inputs = inputs[:-1]
        self.nodes.append(onnx.helper.make_node(op, inputs, [y], self.node.name or self.node.output[0], **attributes))
        return y

    def take(self, x: str, scale: str, zero: str = "", **attributes: Any) -> str:
        return self.add("DequantizeLinear", [x, scale, zero], **attributes)

    def store(self, x: str, scale: str, zero: str = "") -> None:
        self.add("QuantizeLinear", [x, scale, zero], self.node.output[0])
