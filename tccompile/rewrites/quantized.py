"""Quantized tensors, integers x that stand for (x - zero) · scale, are multiplied, moved and compared as integers.

f(dequantize(x))                        =  dequantize(f(x))                                 on the way to a product of two such
conv(dequantize(x), dequantize(w)) + b  =  conv_integer(x, w) · (x's scale · w's) + b       and so for matmul and gemm
dequantize(constant)                    =  a constant                                       where no product takes it
f(dequantize(x))                        =  dequantize(f(x))                                 f moves, chooses or joins elements
quantize(dequantize(x))                 =  x                                                with the same scale and zero
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
import onnx_graphsurgeon as gs

from tccompile.load.constants import Weight, dequantized, derived
from tccompile.rewrites.rule import (
    Editor,
    Rewrite,
    calculate,
    constant,
    finite,
    itself,
    name_of,
    operand,
    producer,
    rank,
    reshaped,
    rounded,
    shape_constant,
)

BYTES = (np.dtype(np.int8), np.dtype(np.uint8))

MOVES = ("DepthToSpace", "Flatten", "MaxPool", "Reshape", "Resize", "Slice", "Squeeze", "Transpose", "Unsqueeze")
"""Operators whose results are elements of their first input, which grow where these do; of Resize only to the nearest."""


def moves(node: gs.Node) -> list[gs.Tensor] | None:
    """What a node only moves, chooses from, or joins; None if it does something else, or of what is constant."""
    if node.domain not in (None, "", "ai.onnx") or (node.op == "Resize" and node.attrs.get("mode", "nearest") != "nearest"):
        return None
    if node.op == "Concat":
        return list(node.inputs) if all(constant(t) is None for t in node.inputs) else None
    if node.op == "Split" or (node.op in MOVES and len(node.outputs) == 1):
        return node.inputs[:1] if constant(node.inputs[0]) is None else None
    return None


@dataclass
class Quantized:
    """What a tensor stands for; `axis` is the one that a vector of scales goes along, None where there is one scale."""

    integers: gs.Tensor
    scale: Weight
    zero: gs.Constant | None
    axis: int | None


def _quantized(t: gs.Tensor) -> Quantized | None:
    """What is dequantized to `t`, if it is bytes with constant scales and zero points, and not in blocks."""
    node = producer(t, "DequantizeLinear")
    turned = None
    if node is None and (turned := producer(t, "Transpose")) is not None:
        node = producer(turned.inputs[0], "DequantizeLinear")
    if node is None or node.attrs.get("block_size", 0) or node.inputs[0].dtype not in BYTES:
        return None
    x, scale, zero = node.inputs[0], constant(node.inputs[1]), operand(node, 2)
    if scale is None or (zero is not None and constant(zero) is None) or rank(scale) > 1 or not finite(scale):
        return None
    axis = None if math.prod(scale.shape) == 1 else node.attrs.get("axis", 1) % rank(x)
    if turned is not None:
        order = list(turned.attrs.get("perm", reversed(range(rank(x)))))
        if constant(x) is None:
            return None
        x, axis = derived(f"{x.name}/turned", "transpose", x, axes=tuple(order)), None if axis is None else order.index(axis)
    return Quantized(x, scale, zero, axis)


@dataclass
class Product:
    node: gs.Node
    x: Quantized
    w: Quantized


def product(node: gs.Node) -> Product | None:
    """A product of two that are dequantized."""
    x, w = (_quantized(t) for t in node.inputs[:2])
    return None if x is None or w is None else Product(node, x, w)


def _columns(product: Product) -> int:
    """The axis of w that the result's channels or columns go along."""
    if product.node.op == "Conv" or product.node.attrs.get("transB", 0):
        return 0
    return rank(product.w.integers) - 1


def _check(edit: Editor, product: Product) -> str | None:
    node, x, w = product.node, product.x, product.w
    if x.axis is not None or (x.zero is not None and math.prod(x.zero.shape) > 1):
        return "its first operand has several scales or zero points"
    matrix = node.op == "Conv" or rank(w.integers) == 2
    if w.axis is not None and (w.axis != _columns(product) or not matrix):
        return "the scales of its second operand do not go along the result's channels or columns"
    shape = w.integers.shape
    terms = math.prod(shape[1:]) if node.op == "Conv" else shape[-1 if node.attrs.get("transB", 0) or len(shape) < 2 else -2]
    if terms * 255 * 255 >= 2**31:
        return f"its sums of {terms} products may exceed int32"
    if node.op == "Gemm" and (node.attrs.get("transA", 0) or {node.attrs.get(k, 1.0) for k in ("alpha", "beta")} != {1.0}):
        return "it is a Gemm with factors or a transposed first operand"
    if constant(w.integers) is None and (node.op != "MatMul" or w.axis is not None):
        return "its weights are computed"
    bias = operand(node, 2)
    return "its bias is computed" if node.op != "MatMul" and bias is not None and constant(bias) is None else None


def _apply(edit: Editor, product: Product) -> None:
    node, x, w, y = product.node, product.x, product.w, product.node.outputs[0]
    is_conv, bias = node.op == "Conv", constant(operand(node, 2))
    weights = w.integers
    if isinstance(weights, Weight):
        turned = node.op == "Gemm" and node.attrs.get("transB", 0)
        weights = derived("", "transpose", weights, axes=(1, 0)) if turned else weights.copy()
        edit.named(weights, f"{w.integers.name}/integers")
    channels = (-1,) + (1,) * (rank(y) - 2) if is_conv else (-1,)
    zeros = [_point(edit, t) for t in (x.zero, w.zero)]
    sums = edit.add(
        "ConvInteger" if is_conv else "MatMulInteger",
        [x.integers, weights, *zeros],
        node,
        y.shape,
        **(node.attrs if is_conv else {}),
    )
    sums.dtype = np.dtype(np.int32)
    scale = calculate("mul", x.scale, w.scale)
    scale = edit.named(reshaped(scale, *(() if w.axis is None else channels)), f"{y.name}/scale")
    steps: list[tuple[str, list[gs.Tensor], dict[str, Any]]]
    steps = [("Cast", [], {"to": onnx.TensorProto.FLOAT}), ("Mul", [scale], {})]
    if bias is not None:
        floats = derived("", "cast", bias, dtype="float32")
        steps.append(("Add", [edit.named(reshaped(floats, *channels) if is_conv else floats, f"{y.name}/bias")], {}))
    if np.dtype(y.dtype) != np.float32:
        steps.append(("Cast", [], {"to": onnx.helper.np_dtype_to_tensor_dtype(np.dtype(y.dtype))}))
    for step, by, how in steps[:-1]:
        sums = edit.add(step, [sums, *by], node, y.shape, **how)
        sums.dtype = np.dtype(np.float32)
    step, by, how = steps[-1]
    edit.add(step, [sums, *by], node, into=y, **how)


def _point(edit: Editor, zero: gs.Constant | None) -> gs.Tensor:
    """A zero point as an operand: left out, a number, or one for each channel where they differ."""
    if zero is None or not zero.values.any():
        return gs.Variable.empty()
    points = derived("", "reshape", zero, shape=(-1,))
    shape: tuple[int, ...] = (-1,)
    if (zero.values == zero.values.flat[0]).all():
        points, shape = derived("", "slice", points, starts=(0,), ends=(1,), steps=(1,)), ()
    return edit.named(derived("", "reshape", points, shape=shape), f"{zero.name}/zero")


# --- What is moved on its way to a product ----------------------------------------------------------------------------


@dataclass
class Ahead:
    """A node that moves what has been dequantized, all with one scale."""

    node: gs.Node
    read: list[Quantized]


def _ahead(node: gs.Node) -> Ahead | None:
    read = [_quantized(t) for t in moves(node) or ()]
    found = [q for q in read if q is not None and constant(q.integers) is None]
    return Ahead(node, found) if found and len(found) == len(read) and any(map(_for_products, node.outputs)) else None


def _for_products(t: gs.Tensor) -> bool:
    """Whether a product of quantized operands reads a tensor, or what only moves it. Scores of an attention that is in floats are
    left to it: it is one op, and no less exact than with integers in its first half."""
    rest, seen = [t], {id(t)}
    while rest:
        for reader in rest.pop().outputs:
            if (
                reader.op in ("Conv", "ConvTranspose", "Gemm", "MatMul")
                and all(map(_of_bytes, reader.inputs[:2]))
                and not _scores(reader)
            ):
                return True
            new = [y for y in reader.outputs if id(y) not in seen] if moves(reader) is not None else []
            rest += new
            seen |= {*map(id, new)}
    return False


def _scores(node: gs.Node) -> bool:
    """Whether a product's results go into a softmax whose results are not quantized."""
    while len(node.outputs) == 1 and len(node.outputs[0].outputs) == 1:
        (node,) = node.outputs[0].outputs
        if node.op == "Softmax":
            return all(reader.op != "QuantizeLinear" for reader in node.outputs[0].outputs)
        if node.op not in ("Add", "Cast", "Div", "Mul", "Sub", "Where"):
            return False
    return False


def _of_bytes(t: gs.Tensor) -> bool:
    """Whether a tensor is dequantized, or what only moves such ones."""
    rest, seen = [t], {id(t)}
    while rest:
        x = rest.pop()
        if _quantized(x) is not None:
            continue
        read = moves(x.inputs[0]) if len(x.inputs) == 1 else None
        if not read:
            return False
        rest += [y for y in read if id(y) not in seen]
        seen |= {*map(id, read)}
    return True


def _check_ahead(edit: Editor, ahead: Ahead) -> str | None:
    first = ahead.read[0]
    if (
        first.axis is not None
        or (first.zero is not None and math.prod(first.zero.shape) > 1)
        or not first.scale.values.item() > 0
    ):
        return "it has several scales or zero points"
    alike = {(q.integers.dtype, q.scale.values.tobytes(), q.axis, _zero_of(q)) for q in ahead.read}
    return None if len(alike) == 1 else "scales or zero points differ"


def _zero_of(q: Quantized) -> int | None:
    return None if q.zero is None or math.prod(q.zero.shape) > 1 else int(q.zero.values.item())


def _dequantize_behind(edit: Editor, ahead: Ahead) -> None:
    """The node moves bytes, and each result of it is dequantized."""
    node, first = ahead.node, ahead.read[0]
    results, parameters = list(node.outputs), [first.scale, *([] if first.zero is None else [first.zero])]
    node.outputs.clear()
    for y in results:
        integers = gs.Variable(edit.name(f"{y.name}/integers"), dtype=first.integers.dtype, shape=list(y.shape))
        node.outputs.append(integers)
        edit.graph.nodes.append(
            gs.Node("DequantizeLinear", edit.name(f"{name_of(node)}/scale"), {}, [integers, *parameters], [y])
        )
    for i, q in enumerate(ahead.read):
        node.inputs[i] = q.integers


# --- Constants, and what only moves -----------------------------------------------------------------------------------


def _check_constant(edit: Editor, node: gs.Node) -> str | None:
    if node.attrs.get("block_size", 0) or any(constant(t) is None for t in node.inputs if t.name):
        return "its input is computed"
    return None if not edit.is_output(node.outputs[0]) else "it is an output of the model"


def _to_constant(edit: Editor, node: gs.Node) -> None:
    y = node.outputs[0]
    weight = dequantized(node.inputs[0], node.inputs[1], constant(operand(node, 2)), node.attrs.get("axis", 1))
    edit.named(rounded(weight, y.dtype), y.name)
    for reader in list(y.outputs):
        for i, t in enumerate(reader.inputs):
            if t is y:
                reader.inputs[i] = weight


@dataclass
class Moved:
    """quantize(f(dequantize(x))): the last node, and those of f, the first of them first."""

    node: gs.Node
    source: gs.Node
    between: list[gs.Node]


def _moved(node: gs.Node) -> Moved | None:
    between: list[gs.Node] = []
    t = node.inputs[0]
    while (move := producer(t, *MOVES)) is not None and moves(move):
        between.insert(0, move)
        t = move.inputs[0]
    source = producer(t, "DequantizeLinear")
    return None if source is None else Moved(node, source, between)


def _check_moved(edit: Editor, moved: Moved) -> str | None:
    before = _quantized(moved.source.outputs[0])
    scale, zero = constant(moved.node.inputs[1]), operand(moved.node, 2)
    if before is None or scale is None or before.axis is not None or math.prod(scale.shape) != 1:
        return "it is not of bytes with one scale"
    points = [[0] if z is None else constant(z) and z.values.reshape(-1).tolist() for z in (before.zero, zero)]
    same = moved.node.outputs[0].dtype == before.integers.dtype and (scale.values.item() == before.scale.values.item() > 0)
    if not same or points[0] != points[1]:
        return "scales or zero points differ"
    if not all(edit.only_use(n.outputs[0]) for n in moved.between):
        return "others read what is moved"
    if not moved.between and not edit.may_vanish(before.integers, moved.node.outputs[0]):
        return "it stands between an input and an output of the model"
    return None


def _move(edit: Editor, moved: Moved) -> None:
    x, y = moved.source.inputs[0], moved.node.outputs[0]
    if not moved.between:
        edit.redirect(x, y)
    for n in moved.between:
        last = n is moved.between[-1]
        shape = list(n.outputs[0].shape)
        x, of = edit.add(n.op, [x, *n.inputs[1:]], n, shape, into=y if last else None, **n.attrs), x
        x.dtype = of.dtype


def _pieces(node: gs.Node) -> tuple[gs.Node, gs.Node] | None:
    """quantize(split(dequantize(x))), or of a concatenation: the last node, and what splits or joins."""
    between = producer(node.inputs[0], "Concat", "Split")
    if between is None or not (read := moves(between)):
        return None
    return (node, between) if all(producer(t, "DequantizeLinear") is not None for t in read) else None


def _check_pieces(edit: Editor, found: tuple[gs.Node, gs.Node]) -> str | None:
    node, between = found
    for t in moves(between) or ():
        why_not = _check_moved(edit, Moved(node, t.inputs[0], [gs.Node("Identity", outputs=[node.inputs[0]])]))
        if why_not is not None:
            return why_not
    return None


def _join_pieces(edit: Editor, found: tuple[gs.Node, gs.Node]) -> None:
    """Bytes are joined, or a piece of them is taken."""
    node, between = found
    y, pieces = node.outputs[0], [t.inputs[0].inputs[0] for t in moves(between) or ()]
    axis = between.attrs.get("axis", 0) % rank(y)
    if between.op == "Concat":
        edit.add("Concat", pieces, between, into=y, axis=axis)
        return
    at = next(i for i, t in enumerate(between.outputs) if t is node.inputs[0])
    begin = sum(int(t.shape[axis]) for t in between.outputs[:at])
    ends = [shape_constant(edit, (n,), between) for n in (begin, begin + int(y.shape[axis]), axis)]
    edit.add("Slice", [pieces[0], *ends], between, into=y)


PRODUCTS = (
    Rewrite("f(dequantize(x)) => dequantize(f(x))", ("Concat", "Split", *MOVES), _ahead, _check_ahead, _dequantize_behind),
    Rewrite(
        "conv(dequantize(x), dequantize(w)) => conv_integer(x, w) * scale", ("Conv", "Gemm", "MatMul"), product, _check, _apply
    ),
)
"""Those that go before weights are no integers any more."""

REWRITES = (
    Rewrite("dequantize(constant) => constant", ("DequantizeLinear",), itself, _check_constant, _to_constant),
    Rewrite("quantize(f(dequantize(x))) => f(x)", ("QuantizeLinear",), _moved, _check_moved, _move),
    Rewrite("quantize(concat(dequantize(x), …)) => concat(x, …)", ("QuantizeLinear",), _pieces, _check_pieces, _join_pieces),
)
