"""Convolutions and products of matrices that ONNX Runtime fuses with what follows, transposes or lays out anew."""

from __future__ import annotations

from typing import Any

from tccompile.load.contrib.parts import ACTIVATIONS, Operator, Parts

CONV = ("auto_pad", "dilations", "group", "kernel_shape", "pads", "strides")
POOL = ("auto_pad", "ceil_mode", "count_include_pad", "dilations", "kernel_shape", "pads", "storage_order", "strides")
"""Attributes that the standard's have too."""


def kept(p: Parts, names: tuple[str, ...]) -> dict[str, Any]:
    return {name: p.attributes[name] for name in names if name in p.attributes}


def _fused_matmul(p: Parts) -> None:
    """alpha * a·b, of which either may be transposed: its last two axes, or with transBatch the first one to before the last."""
    operands = []
    for i, side in enumerate("AB"):
        rank, x = len(p.shape(i)), p.inputs[i]
        order = [*range(rank)]
        if p.attributes.get(f"transBatch{side}") and rank > 2:
            order = [*order[1:-1], 0, rank - 1]
        if p.attributes.get(f"trans{side}") and rank > 1:
            order[-2:] = order[:-3:-1]
        operands.append(x if order == sorted(order) else p.add("Transpose", [x], perm=order))
    alpha = p.attributes.get("alpha", 1.0)
    product = p.add("MatMul", operands, p.outputs[0] if alpha == 1 else "")
    if alpha != 1:
        p.add("Mul", [product, p.number(alpha, product)], p.outputs[0])


def _fused_gemm(p: Parts) -> None:
    """The activation of a Gemm."""
    y = p.add("Gemm", p.inputs[:3], **kept(p, ("alpha", "beta", "transA", "transB")))
    parameters = {name: p.attributes[f"activation_{name}"] for name in ("alpha", "beta") if f"activation_{name}" in p.attributes}
    p.activated(y, p.attributes.get("activation", ""), parameters, p.outputs[0])


def activate_convolution(p: Parts, y: str, addend: str) -> None:
    """The first output: the activation of a convolution and what is added to it."""
    y = p.add("Add", [y, addend]) if addend else y
    name = p.attributes.get("activation", "")
    values = [*p.attributes.get("activation_params", ())]
    p.activated(y, name, dict(zip(ACTIVATIONS.get(name, ()), values, strict=False)), p.outputs[0])


def _fused_conv(p: Parts) -> None:
    """The activation of a convolution and what is added to it: (x, w, bias, addend)."""
    activate_convolution(p, p.add("Conv", p.inputs[:3], **kept(p, CONV)), p.inputs[3])


def _nhwc_conv(p: Parts) -> None:
    """A convolution whose channels are last, in its filters too."""
    rank = len(p.shape(0))
    operands = [p.channels_first(x, rank) for x in p.inputs[:2]]
    y = p.add("Conv", [*operands, p.inputs[2]], **kept(p, CONV))
    p.channels_last(y, rank, p.outputs[0])


def _nhwc_fused_conv(p: Parts) -> None:
    """FusedConv whose channels are last, but not in its filters."""
    rank = len(p.shape(0))
    y = p.add("Conv", [p.channels_first(p.inputs[0], rank), *p.inputs[1:3]], **kept(p, CONV))
    activate_convolution(p, p.channels_last(y, rank), p.inputs[3])


def _nhwc_max_pool(p: Parts) -> None:
    rank = len(p.shape(0))
    y = p.add("MaxPool", [p.channels_first(p.inputs[0], rank)], **kept(p, POOL))
    p.channels_last(y, rank, p.outputs[0])


OPERATORS: dict[str, Operator] = {
    **dict.fromkeys(("FusedMatMul", "TransposeMatMul"), _fused_matmul),
    "FusedConv": _fused_conv,
    "FusedGemm": _fused_gemm,
    "NhwcConv": _nhwc_conv,
    "NhwcFusedConv": _nhwc_fused_conv,
    "NhwcMaxPool": _nhwc_max_pool,
}
