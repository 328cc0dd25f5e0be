"""Quantized tensors in a graph: what reads one reads what its bytes stand for, and products read weights in bytes."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass

import numpy as np
import onnx
import onnx_graphsurgeon as gs

from tccompile.errors import InputError
from tccompile.ir.reference import Kept
from tccompile.ir.weights import TRANSFORMS, Literal, byte_scales, transform
from tccompile.load.constants import Weight, derived, held, literal, recipe_of
from tccompile.quantize.grid import Grid
from tccompile.quantize.products import Layer, products
from tccompile.quantize.ticks import Ticks
from tccompile.rewrites.rule import Editor


@dataclass(frozen=True)
class Tensor:
    """How an activation is stored in bytes.

    means   of its channels: sums of weights that they are multiplied by are kept when those are rounded
    shared  all that reads it reads the bytes, not only products
    tied    it is stored whether products read it or not, since others are that have its scale
    """

    grid: Grid
    means: np.ndarray
    shared: bool
    tied: bool = False


BLOCK = 1 << 20
"""Weights that are rounded before it is told how far that is: a second of work at most."""


class Rounded(dict[tuple[str, bytes], tuple[Weight, Weight]]):
    """A model's weights in bytes and their scales, by their names and the means of what they multiply: rounding takes long.

    kept   what the recipes of these make
    ticks  is told how much is rounded
    """

    def __init__(self, ticks: Ticks | None = None) -> None:
        super().__init__()
        self.kept: Kept = {}
        self.ticks = ticks or Ticks(lambda done, total: None)


def quantized(graph: gs.Graph, tensors: Mapping[str, Tensor], names: Collection[str], weights: Rounded | None = None) -> gs.Graph:
    """A copy of the graph in which these tensors are quantized, and the layers of these names multiply them in bytes.

    weights  those that were rounded before; more are added. Raises InputError for what cannot be quantized
    """
    graph = graph.copy()
    edit = Editor(graph)
    found = {name: layer for name, layer in products(graph).items() if name in names}
    for layer in found.values():
        if not isinstance(layer, Layer):
            continue  # attention has no weights
        x = tensors[layer.x.name]
        if x.grid.float8:
            _in_float8(edit, layer)
        else:
            _in_bytes(edit, layer, x, Rounded() if weights is None else weights)
    known, nodes = graph.tensors(), {id(layer.node) for layer in found.values()}
    read = {name for layer in found.values() for name in layer.reads}
    for name, how in sorted(tensors.items()):  # in which order they were found, a file does not say
        if name in read or (how.tied and name in known):
            t = known[name]
            if not isinstance(t, gs.Variable) or np.dtype(t.dtype) != np.float32:
                raise InputError(f"the calibration is of another model: {name!r} is no activation of float32 in this one")
            _stored(edit, t, how, nodes)
    return graph


def _in_bytes(edit: Editor, layer: Layer, x: Tensor, weights: Rounded) -> None:
    """The layer reads its weights in bytes."""
    node, w = layer.node, layer.weights
    key = w.name, x.means.tobytes()
    if key not in weights:
        weights[key] = _rounded(layer, x, weights)
    whole, scales = weights[key]
    stored = edit.named(whole.copy(), f"{w.name}/bytes")
    scales = edit.named(scales.copy(), f"{w.name}/scale")
    node.inputs[1] = edit.add(
        "DequantizeLinear",
        [stored, scales],
        node,
        w.shape,
        axis=layer.columns,
    )


def _rounded(layer: Layer, x: Tensor, weights: Rounded) -> tuple[Weight, Weight]:
    """A layer's weights in bytes, and their scales, which are also `kept`."""
    turned, w = layer.columns != 0, layer.weights
    rows, means = derived("", "transpose", w, axes=(1, 0)) if turned else w, x.means.astype(np.float32)
    values, parts = held(rows), list[tuple[np.ndarray, np.ndarray]]()
    whole_groups = len(means) > math.prod(values.shape[1:2])  # each group of rows has means of its own
    step = len(values) if whole_groups else max(BLOCK * len(values) // max(values.size, 1), 1)
    for i in range(0, len(values), step):
        part = values[i : i + step]
        own = byte_scales(part)
        parts.append((own, TRANSFORMS["in_bytes"](part, own, means)))
        weights.ticks.rounded(part.size)
    found = [np.concatenate(of) for of in zip(*parts, strict=True)]
    scales = Weight("", found[0], transform("byte_scales", recipe_of(rows)))
    whole = Weight("", found[1], transform("in_bytes", recipe_of(rows), scales.recipe, Literal(means)))
    weights.kept |= {id(made.recipe): (made.recipe, held(made)) for made in (scales, whole)}
    return derived("", "transpose", whole, axes=(1, 0)) if turned else whole, scales


def _in_float8(edit: Editor, layer: Layer) -> None:
    """The layer reads weights that are numbers of float8 times a scale for each output channel: see `rewrites/float8.py`."""
    w = layer.weights
    rows = derived("", "transpose", w, axes=(1, 0)) if layer.columns else w
    along = tuple(-1 if a == layer.columns else 1 for a in range(len(w.shape)))
    scales = derived("", "reshape", derived("", "float8_scales", rows), shape=along)
    numbers = derived("", "float8", derived("", "div", w, scales))
    layer.node.inputs[1] = edit.named(derived("", "mul", numbers, scales), f"{w.name}/float8")


def _stored(edit: Editor, t: gs.Tensor, how: Tensor, products: Collection[int]) -> None:
    """Who reads the tensor, or only the products among them, reads what bytes hold of it."""
    readers = [(n, i) for n in t.outputs for i, x in enumerate(n.inputs) if x is t and (how.shared or id(n) in products)]
    scale = literal(edit.name(f"{t.name}/scale"), np.float32(how.grid.scale))
    y = gs.Variable(edit.name(f"{t.name}/stored"), np.dtype(np.float32), list(t.shape))
    if how.grid.float8:
        _cast(edit, t, scale, y)
    else:
        _quantized(edit, t, scale, how, y)
    for node, i in readers:
        node.inputs[i] = y


def _cast(edit: Editor, t: gs.Tensor, scale: gs.Constant, y: gs.Tensor) -> None:
    """y = cast(cast(t / scale, float8), float) · scale"""
    kinds = np.dtype(np.float32), int(onnx.TensorProto.FLOAT8E4M3FN), np.dtype(np.float32)
    between = [gs.Variable(edit.name(f"{t.name}/float8"), kind, list(t.shape)) for kind in kinds]
    for op, name, read, attrs, made in (
        ("Div", f"{t.name}/Div", [t, scale], {}, between[0]),
        ("Cast", quantize_of(t.name), [between[0]], {"to": kinds[1], "saturate": 1}, between[1]),
        ("Cast", f"{t.name}/Cast", [between[1]], {"to": int(onnx.TensorProto.FLOAT)}, between[2]),
        ("Mul", dequantize_of(t.name), [between[2], scale], {}, y),
    ):
        edit.graph.nodes.append(gs.Node(op, name, attrs, read, [made]))


def _quantized(edit: Editor, t: gs.Tensor, scale: gs.Constant, how: Tensor, y: gs.Tensor) -> None:
    """y = dequantize(quantize(t))"""
    zero = literal(edit.name(f"{t.name}/zero"), how.grid.dtype.type(how.grid.zero))
    q = gs.Variable(edit.name(f"{t.name}/bytes"), how.grid.dtype, list(t.shape))
    edit.graph.nodes.append(gs.Node("QuantizeLinear", quantize_of(t.name), {}, [t, scale, zero], [q]))
    edit.graph.nodes.append(gs.Node("DequantizeLinear", dequantize_of(t.name), {}, [q, scale, zero], [y]))


def quantize_of(tensor: str) -> str:
    """The name of the node that quantizes a tensor."""
    return f"{tensor}/QuantizeLinear"


def dequantize_of(tensor: str) -> str:
    """The name of the node that gives what a tensor's bytes stand for."""
    return f"{tensor}/DequantizeLinear"
