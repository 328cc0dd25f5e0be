"""Multiplications by and additions of one constant a channel go into the weights and the bias beside them.

    conv(x, w, b) * c       =  conv(x, w * c, b * c)              c along the output channels
    conv(x, w, b) + c       =  conv(x, w, b + c)
    conv(x * c, w, b)       =  conv(x, w * c, b)                  c along the input channels; zeros beyond the edges stay zeros
    conv(x + c, w, b)       =  conv(x, w, b + sum(w * c))         without padding only: beyond the edges x + c would be c
    (matmul(x, w) + b) * c  =  matmul(x, w * c) + b * c
    (x + a) + c             =  x + (a + c)       and the same for products

The first two hold for transposed convolutions and for Gemm and MatMul too, whose channels are the last axis.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx_graphsurgeon as gs

from tccompile.load.constants import Weight, derived, held, literal
from tccompile.rewrites.rule import (
    Editor,
    Rewrite,
    calculate,
    constant,
    finite,
    is_float,
    name_of,
    operand,
    producer,
    rank,
    reshaped,
    rounded,
)  # fmt: skip

LINEAR = ("Conv", "ConvTranspose", "Gemm", "MatMul")


@dataclass
class Change:
    """y = value * scale + shift, as a Mul, Div, Add or Sub with a constant says. `scale` or `shift` is None, for 1 or 0."""

    node: gs.Node
    value: gs.Tensor
    scale: Weight | None
    shift: Weight | None
    constant: gs.Constant


def _change(node: gs.Node) -> Change | None:
    a, b = node.inputs
    if not is_float(node.outputs[0]) or (constant(a) is None) == (constant(b) is None):
        return None
    left = constant(a) is not None
    value, c = (b, a) if left else (a, b)
    one = np.ones((), np.float32)
    match node.op:
        case "Mul":
            return Change(node, value, c, None, c)
        case "Div" if not left:
            return Change(node, value, calculate("div", one, c), None, c)
        case "Add":
            return Change(node, value, None, c, c)
        case "Sub" if left:
            return Change(node, value, literal("", -one), c, c)
        case "Sub":
            return Change(node, value, None, calculate("neg", c), c)
    return None


def _channel_axis(node: gs.Node) -> int:
    """The axis of the node's result that its output channels are on."""
    return 1 if node.op in ("Conv", "ConvTranspose") else rank(node.outputs[0]) - 1


def _along(c: gs.Constant, shape: list[int], axis: int) -> str | None:
    """Why c is not one number for each extent of `axis` of a tensor of this shape."""
    full = (1,) * (len(shape) - len(c.shape)) + tuple(c.shape)
    if len(full) > len(shape):
        return "the constant has more axes"
    if any(n != 1 for a, n in enumerate(full) if a != axis) or full[axis] not in (1, shape[axis]):
        return f"the constant {list(c.shape)} is not one number a channel (axis {axis} of {list(shape)})"
    return None


def _vector(c: Weight, n: int) -> Weight:
    """One number or n of them as a vector of n."""
    flat = reshaped(c, -1)
    return flat if flat.shape[0] == n else derived("", "expand", flat, shape=(n,))


# --- after ---


@dataclass
class After:
    linear: gs.Node
    change: Change


def _match_after(node: gs.Node) -> After | None:
    change = _change(node)
    linear = producer(change.value, *LINEAR) if change else None
    return After(linear, change) if linear and change else None


def _check_after(edit: Editor, m: After) -> str | None:
    y = m.linear.outputs[0]
    w, b = constant(m.linear.inputs[1]), operand(m.linear, 2)
    if not edit.only_use(y):
        return "the result is used elsewhere as well"
    if w is None:
        return "the weights are not constant"
    if m.linear.op == "MatMul":
        if m.change.shift is not None:
            return "MatMul has no bias; the addition stays beside it"
        if rank(w) < 2:
            return "the weights are a vector"
    if b is not None and constant(b) is None:
        return "the bias is not constant"
    if m.linear.op == "Gemm" and (m.linear.attrs.get("alpha", 1.0) != 1 or m.linear.attrs.get("beta", 1.0) != 1):
        return "alpha and beta are not 1 yet"
    why = _along(m.change.constant, y.shape, _channel_axis(m.linear))
    if why is None and m.linear.op == "Gemm" and b is not None and m.change.scale is not None:
        why = _along(b, y.shape, 1)
    if why is None and m.linear.op == "Gemm" and b is not None and m.change.shift is not None and b.shape[:1] == (0,):
        why = "the bias is empty"
    if why:
        return why
    if m.change.scale is not None:
        scaled = rounded(_scale_outputs(m.linear, _vector(m.change.scale, y.shape[_channel_axis(m.linear)])), w.dtype)
        if not finite(scaled):
            return "the scaled weights leave the range of their type"
    return None


def _scale_outputs(node: gs.Node, s: Weight) -> Weight:
    """The node's weights times one number an output channel."""
    w = node.inputs[1]
    match node.op:
        case "Conv":  # (O, C/g, R, S)
            return calculate("mul", w, reshaped(s, -1, *(1,) * (rank(w) - 1)))
        case "ConvTranspose":  # (C, O/g, R, S), channels of a group together on both axes
            g, shape = node.attrs.get("group", 1), tuple(w.shape)
            grouped = reshaped(w, g, shape[0] // g, *shape[1:])
            return reshaped(calculate("mul", grouped, reshaped(s, g, 1, -1, *(1,) * (rank(w) - 2))), *shape)
        case "Gemm" if node.attrs.get("transB", 0):  # (N, K)
            return calculate("mul", w, reshaped(s, -1, 1))
    return calculate("mul", w, s)  # (…, K, N)


def _apply_after(edit: Editor, m: After) -> None:
    node, change = m.linear, m.change
    w, b = node.inputs[1], operand(node, 2)
    n = node.outputs[0].shape[_channel_axis(node)]
    if change.scale is not None:
        s = _vector(change.scale, n)
        node.inputs[1] = edit.named(rounded(_scale_outputs(node, s), w.dtype), f"{w.name}/scaled")
        b = None if b is None else calculate("mul", b, s)
    if change.shift is not None:
        t = _vector(change.shift, n)
        b = t if b is None else calculate("add", b, t)
    if b is not None:
        node.inputs = [*node.inputs[:2], edit.named(rounded(b, w.dtype), f"{name_of(node)}/bias")]
    _take_over(node, change.node)


def _take_over(node: gs.Node, last: gs.Node) -> None:
    """The node writes what `last` wrote, and `last` goes."""
    y = last.outputs[0]
    last.outputs.clear()
    last.inputs.clear()
    node.outputs = [y]


# --- before ---


@dataclass
class Before:
    conv: gs.Node
    change: Change


def _match_before(node: gs.Node) -> Before | None:
    change_node = producer(node.inputs[0], "Mul", "Div", "Add", "Sub")
    change = _change(change_node) if change_node else None
    return Before(node, change) if change else None


def _check_before(edit: Editor, m: Before) -> str | None:
    x = m.conv.inputs[0]
    w, b = constant(m.conv.inputs[1]), operand(m.conv, 2)
    if not edit.only_use(x):
        return "the input is used elsewhere as well"
    if w is None or (b is not None and constant(b) is None):
        return "weights and bias are not constant"
    if list(m.change.value.shape) != list(x.shape):
        return "the constant widens the input"
    why = _along(m.change.constant, x.shape, 1)
    if why:
        return why
    if m.change.shift is not None and (any(m.conv.attrs.get("pads", ())) or _auto_pad(m.conv)):
        return "an addition before a convolution with padding does not hold at the edges"
    cast = producer(m.change.value, "Cast")
    if cast is not None and producer(cast.inputs[0], "ConvInteger", "MatMulInteger"):
        return "what it scales are sums of bytes, which fp16 does not hold"
    if m.change.scale is not None:
        size = np.abs(held(m.change.scale))
        if (size < 1 / FAR).any() or (size > FAR).any():
            return "what it scales may be too large or too small for fp16 before"
        scaled = rounded(_scale_inputs(m.conv, _vector(m.change.scale, x.shape[1])), w.dtype)
        if not finite(scaled):
            return "the scaled weights leave the range of their type"
    return None


FAR = 512.0
"""A factor between its inverse and this goes into the weights, as that of pixels, 1/255. Others bring near 1 what is far."""


def _auto_pad(node: gs.Node) -> bool:
    return node.attrs.get("auto_pad", "NOTSET") not in ("NOTSET", "VALID")


def _grouped(conv: gs.Node) -> tuple[Weight, tuple[int, ...]]:
    """The weights as (g, O/g, C/g, R, S), and the shape they had."""
    w, g = conv.inputs[1], conv.attrs.get("group", 1)
    shape = tuple(w.shape)
    return reshaped(w, g, shape[0] // g, *shape[1:]), shape


def _scale_inputs(conv: gs.Node, s: Weight) -> Weight:
    w, shape = _grouped(conv)
    return reshaped(calculate("mul", w, reshaped(s, w.shape[0], 1, w.shape[2], *(1,) * (len(shape) - 2))), *shape)


def _apply_before(edit: Editor, m: Before) -> None:
    conv, change = m.conv, m.change
    w, b = conv.inputs[1], operand(conv, 2)
    channels = conv.inputs[0].shape[1]
    if change.shift is not None:  # sum over channels, rows and columns of a group as a product of matrices
        grouped, shape = _grouped(conv)
        g, o, c, *window = grouped.shape
        rows = reshaped(grouped, g, o, -1)
        t = reshaped(_vector(change.shift, channels), g, c, 1)
        t = reshaped(derived("", "expand", t, shape=(g, c, int(np.prod(window)))), g, -1, 1)
        total = reshaped(calculate("matmul", rows, t), shape[0])
        bias = rounded(total if b is None else calculate("add", b, total), w.dtype)
        conv.inputs = [*conv.inputs[:2], edit.named(bias, f"{name_of(conv)}/bias")]
    if change.scale is not None:
        scaled = _scale_inputs(conv, _vector(change.scale, channels))
        conv.inputs[1] = edit.named(rounded(scaled, w.dtype), f"{w.name}/scaled")
    conv.inputs[0] = change.value


# --- chains ---


@dataclass
class Chain:
    first: Change
    second: Change


def _match_chain(node: gs.Node) -> Chain | None:
    second = _change(node)
    first_node = producer(second.value, "Mul", "Div", "Add", "Sub") if second else None
    first = _change(first_node) if first_node else None
    return Chain(first, second) if first and second else None


def _check_chain(edit: Editor, m: Chain) -> str | None:
    if not edit.only_use(m.first.node.outputs[0]):
        return "the value between is used elsewhere as well"
    kinds = [(c.scale is None, c.shift is None) for c in (m.first, m.second)]
    if (False, False) in kinds:
        return "a constant minus the value is both a scale and a shift"
    linear = producer(m.first.value, "MatMul")
    past = m.first.shift is not None and m.second.scale is not None
    if kinds[0] != kinds[1] and not (past and linear):
        return "a scale and a shift stay two nodes"
    if past and linear and (not edit.only_use(m.first.value) or constant(linear.inputs[1]) is None or rank(linear.inputs[1]) < 2):
        return "the product cannot take the scale"
    if past and (why := _along(m.second.constant, m.first.node.outputs[0].shape, rank(m.first.node.outputs[0]) - 1)):
        return why
    y = m.second.node.outputs[0]
    if past and list(m.first.value.shape) != list(y.shape):
        return "a constant widens the value"
    made = np.broadcast_shapes(tuple(m.first.constant.shape), tuple(m.second.constant.shape))
    if np.prod(made) > max(np.prod(m.first.constant.shape), np.prod(m.second.constant.shape)):
        return "the constants together are larger than each of them"
    return None if finite(rounded(_combined(m), y.dtype)) else "the constants together leave the range of their type"


def _combined(m: Chain) -> Weight:
    first = m.first.shift if m.first.scale is None else m.first.scale
    second = m.second.shift if m.second.scale is None else m.second.scale
    assert first is not None and second is not None  # each is a scale or a shift, by `_check_chain`
    return calculate("add" if m.second.scale is None else "mul", first, second)


def _apply_chain(edit: Editor, m: Chain) -> None:
    node, y = m.second.node, m.second.node.outputs[0]
    value, both = m.first.value, rounded(_combined(m), y.dtype)
    both = edit.named(both, f"{m.second.constant.name}/combined")
    if m.second.scale is not None and m.first.shift is not None:
        scale = edit.named(rounded(m.second.scale, y.dtype), f"{m.second.constant.name}/scale")
        value = edit.add("Mul", (value, scale), node, m.first.value.shape)
    edit.add("Mul" if m.first.scale is not None else "Add", (value, both), node, into=y)


CHANGES = ("Mul", "Div", "Add", "Sub")
REWRITES = (
    Rewrite("linear(x, w, b) * c + d => linear(x, w * c, b * c + d)", CHANGES, _match_after, _check_after, _apply_after),
    Rewrite("(x + a) + c => x + (a + c)", CHANGES, _match_chain, _check_chain, _apply_chain),
    Rewrite("conv(x * c + d, w, b) => conv(x, w * c, b + sum(w * d))", ("Conv",), _match_before, _check_before, _apply_before),
)
