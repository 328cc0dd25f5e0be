"""Tensors that are quantized to floats of 8 bits, numbers x of float8 that stand for x · s, are multiplied and moved as such.

Quantizing is cast(cast(y / s, float8), float) here, and dequantizing x · s (`load/narrow.py`). In all of these x is a number of
float8, by two casts or as what only moves such numbers, and s is one positive constant:

f(x · s)                               =  f(x) · s              f moves, chooses or joins elements
cast(cast(x · s / s, float8), float)   =  x
product(x · s, w)                      =  product(x, w · s)     whoever else reads x · s
attention(q · a, k · b, v · c)         =  attention(q, k, v) · c     with a · b times the scale
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx
import onnx_graphsurgeon as gs

from tccompile.ir.types import FLOAT8, DType
from tccompile.load.constants import Weight, derived
from tccompile.rewrites.quantized import MOVES, moves
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
    scalar,
)

PRODUCTS = ("Conv", "Gemm", "MatMul")


def float8_of(t: gs.Tensor) -> DType | None:
    """The float of 8 bits that is a tensor's type."""
    dtype = t.dtype
    if dtype is None:
        return None
    name = onnx.helper.tensor_dtype_to_np_dtype(dtype).name if isinstance(dtype, int) else np.dtype(dtype).name
    return next((kind for kind in FLOAT8 if kind.value == name), None)


def same_numbers(node: gs.Node) -> list[gs.Tensor] | None:
    """Whose numbers a node's results have: of a cast between floats, or of what only moves elements; else None."""
    if node.domain in (None, "", "ai.onnx") and node.op == "Cast":
        t = node.inputs[0]
        return [t] if is_float(node.outputs[0]) and (float8_of(t) is not None or is_float(t)) else None
    return moves(node) if node.op != "Resize" else None


def on_grid(t: gs.Tensor) -> bool:
    """Whether all numbers of a tensor are ones of float8, by the nodes that made it."""
    if len(t.inputs) != 1 or constant(t) is not None:
        return False
    if float8_of(t) is not None:
        return True
    read = same_numbers(t.inputs[0])
    return read is not None and all(on_grid(x) for x in read)


@dataclass
class Scaled:
    """x · s"""

    x: gs.Tensor
    scale: gs.Constant


def _scaled(t: gs.Tensor) -> Scaled | None:
    """What a tensor is, past a cast between floats, if it is dequantized from float8."""
    if (cast := producer(t, "Cast")) is not None and is_float(t) and is_float(cast.inputs[0]):
        t = cast.inputs[0]
    node = producer(t, "Mul")
    if node is None:
        return None
    for x, scale in (node.inputs, node.inputs[::-1]):
        if (value := scalar(scale)) is not None and 0 < value < np.inf and on_grid(x):
            return Scaled(x, scale)
    return None


# --- What moves --------------------------------------------------------------------------------------------------------


@dataclass
class Moved:
    node: gs.Node
    pieces: list[Scaled]


def _moved(node: gs.Node) -> Moved | None:
    pieces = [_scaled(t) for t in moves(node) or ()]
    found = [p for p in pieces if p is not None]
    return Moved(node, found) if found and len(found) == len(pieces) and node.op != "Resize" else None


def _check_moved(edit: Editor, moved: Moved) -> str | None:
    if len({scalar(p.scale) for p in moved.pieces}) > 1:
        return "scales differ"
    if len({np.dtype(t.dtype) for t in (*(p.x for p in moved.pieces), *moved.node.outputs)}) > 1:
        return "it is cast on the way"
    if len(moved.node.outputs) > 1 and moved.node.op != "Split":
        return "it has several results"
    return None


def _move(edit: Editor, moved: Moved) -> None:
    """The node moves the numbers, and what they are times the scale takes its result's place."""
    node, pieces, results = moved.node, moved.pieces, list(moved.node.outputs)
    node.outputs.clear()
    for y in results:
        numbers = gs.Variable(edit.name(f"{y.name}/float8"), dtype=y.dtype, shape=list(y.shape))
        node.outputs.append(numbers)
        edit.graph.nodes.append(gs.Node("Mul", edit.name(f"{name_of(node)}/scale"), {}, [numbers, pieces[0].scale], [y]))
    for i, piece in enumerate(pieces):
        node.inputs[i] = piece.x


# --- What is rounded again ---------------------------------------------------------------------------------------------


@dataclass
class Again:
    y: gs.Tensor
    x: gs.Tensor
    narrow: gs.Tensor


def _again(node: gs.Node) -> Again | None:
    narrow = producer(node.inputs[0], "Cast")
    quotient = producer(narrow.inputs[0], "Div") if narrow is not None else None
    before = _scaled(quotient.inputs[0]) if quotient is not None else None
    if narrow is None or quotient is None or before is None or float8_of(narrow.outputs[0]) is None:
        return None
    return Again(node.outputs[0], before.x, narrow.outputs[0]) if scalar(quotient.inputs[1]) == scalar(before.scale) else None


def _check_again(edit: Editor, again: Again) -> str | None:
    if np.dtype(again.x.dtype) != np.dtype(again.y.dtype) or _kind(again.x) is not float8_of(again.narrow):
        return "the types differ"
    return None if edit.may_vanish(again.x, again.y) else "it stands between an input and an output of the model"


def _kind(t: gs.Tensor) -> DType | None:
    """Of which float of 8 bits a tensor has the numbers."""
    while (kind := float8_of(t)) is None:
        t = (same_numbers(t.inputs[0]) or [t])[0]
    return kind


def _once(edit: Editor, again: Again) -> None:
    edit.redirect(again.x, again.y)


# --- Products ----------------------------------------------------------------------------------------------------------


@dataclass
class Product:
    node: gs.Node
    x: Scaled


def _product(node: gs.Node) -> Product | None:
    x = _scaled(node.inputs[0])
    return None if x is None else Product(node, x)


def _check_product(edit: Editor, product: Product) -> str | None:
    node, w = product.node, operand(product.node, 1)
    if not isinstance(w, Weight) or not is_float(w) or not finite(w):
        return "its weights are computed, or no finite numbers"
    if np.dtype(w.dtype) == np.float32:
        return None
    if np.dtype(w.dtype) != np.float16 or rank(w) < 2 or (node.op == "MatMul" and rank(w) != 2) or scales_of(node) is None:
        return "its weights are no numbers of float8"
    return "its bias is computed" if operand(node, 2) is not None and constant(operand(node, 2)) is None else None


def _apply(edit: Editor, product: Product) -> None:
    """The scale goes into the weights. A product of halves, which hold less than that, becomes one of float32."""
    node, w, x, y = product.node, product.node.inputs[1], product.x.x, product.node.outputs[0]
    scale, weights = calculate("reshape", product.x.scale, shape=()), w
    if np.dtype(w.dtype) == np.float16:
        found = scales_of(node)
        assert found is not None
        along = lying(node, found)
        numbers = derived("", "float8", derived("", "div", derived("", "cast", w, dtype="float32"), along))
        weights = derived("", "mul", numbers, along)
        if (bias := constant(operand(node, 2))) is not None:
            node.inputs[2] = edit.named(derived("", "cast", bias, dtype="float32"), f"{bias.name}/float32")
        wide = gs.Variable(edit.name(f"{y.name}/float32"), np.dtype(np.float32), list(y.shape))
        to = onnx.helper.np_dtype_to_tensor_dtype(np.dtype(y.dtype))
        node.outputs.clear()
        node.outputs.append(wide)
        edit.graph.nodes.append(gs.Node("Cast", edit.name(f"{name_of(node)}/Cast"), {"to": to}, [wide], [y]))
    node.inputs[0], node.inputs[1] = x, edit.named(calculate("mul", weights, scale), f"{w.name}/scaled")


# --- Attention ---------------------------------------------------------------------------------------------------------


@dataclass
class Operand:
    """q, k or v as what only moves x · s, if it is dequantized from float8.

    t      x · s
    passed what lies between that and the operand, and the operand itself if it is another tensor
    """

    t: gs.Tensor
    scaled: Scaled
    passed: list[gs.Tensor]


@dataclass
class Attended:
    node: gs.Node
    operands: list[Operand | None]


def _operand(t: gs.Tensor) -> Operand | None:
    passed = list[gs.Tensor]()
    while (scaled := _scaled(t)) is None:
        if (node := producer(t, "Transpose", "Reshape")) is None:
            return None
        passed.append(t)
        t = node.inputs[0]
    return Operand(t, scaled, passed)


def _attended(node: gs.Node) -> Attended | None:
    operands = [_operand(t) for t in node.inputs[:3]]
    return Attended(node, operands) if any(operands) else None


def _check_attended(edit: Editor, attended: Attended) -> str | None:
    node = attended.node
    if len(node.outputs) > 1 or any(operand(node, i) is not None for i in (4, 5)):
        return "it has keys and values from before"
    for x in attended.operands:
        if x is not None and np.dtype(x.scaled.x.dtype) != np.dtype(x.t.dtype):
            return "it is cast on the way"
        if x is not None and x.passed and not all(edit.only_use(t) for t in (x.t, *x.passed)):
            return f"{x.t.name} is used elsewhere as well"
    return None


def _attend(edit: Editor, attended: Attended) -> None:
    """The scales of q and k go into the scores' scale, and v's behind the result."""
    node, (q, k, v) = attended.node, attended.operands
    x = node.inputs[0]
    size = x.shape[3] if rank(x) == 4 else x.shape[2] // node.attrs["q_num_heads"]
    factors = [scalar(x.scaled.scale) or 1.0 for x in (q, k) if x is not None]
    node.attrs["scale"] = float(np.prod([node.attrs.get("scale", size**-0.5), *factors]))
    for i, found in enumerate((q, k, v)):
        if found is not None and found.passed:
            edit.redirect(found.scaled.x, found.t)
        elif found is not None:
            node.inputs[i] = found.scaled.x
    if v is not None:
        (y,) = node.outputs
        node.outputs.clear()
        node.outputs.append(gs.Variable(edit.name(f"{y.name}/float8"), y.dtype, list(y.shape)))
        edit.graph.nodes.append(gs.Node("Mul", edit.name(f"{name_of(node)}/scale"), {}, [node.outputs[0], v.scaled.scale], [y]))


# --- Weights -----------------------------------------------------------------------------------------------------------


def channels(node: gs.Node) -> int:
    """The axis of a product's weights that its output channels go along."""
    return 0 if node.op == "Conv" or node.attrs.get("transB", 0) else 1


def rows(node: gs.Node) -> Weight:
    """A product's constant weights, output channels first."""
    w: Weight = node.inputs[1]
    return w if channels(node) == 0 else derived("", "transpose", w, axes=(1, 0))


def lying(node: gs.Node, scales: Weight) -> Weight:
    """Scales of output channels as what is broadcast to a product's weights."""
    return reshaped(scales, *(-1 if a == channels(node) else 1 for a in range(rank(node.inputs[1]))))


def scales_of(node: gs.Node) -> Weight | None:
    """For each output channel a scale by which all of a product's constant weights are numbers of E4M3, or None where one has
    none."""
    try:
        return derived("", "multiples", rows(node))
    except ValueError:
        return None


REWRITES = (
    Rewrite("f(float8 · s) => f(float8) · s", ("Concat", "Split", *MOVES), _moved, _check_moved, _move),
    Rewrite("cast(cast(float8 · s / s, float8), float) => float8", ("Cast",), _again, _check_again, _once),
    Rewrite("product(float8 · s, w) => product(float8, w · s)", PRODUCTS, _product, _check_product, _apply),
)

ATTENTION = (
    Rewrite("attention(q · a, k · b, v · c) => attention(q, k, v) · c", ("Attention",), _attended, _check_attended, _attend),
)
"""With `attention.REWRITES`, which put it together."""
