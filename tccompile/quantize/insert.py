"""Quantized tensors in a graph: what reads one reads what its bytes stand for, and products read weights in bytes."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

import numpy as np
import onnx_graphsurgeon as gs

from tccompile.load.constants import derived, literal
from tccompile.quantize.grid import Grid
from tccompile.quantize.products import Layer, layers
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


def quantized(graph: gs.Graph, tensors: Mapping[str, Tensor], names: Collection[str]) -> gs.Graph:
    """A copy of the graph in which these tensors are quantized, and the layers of these names multiply them in bytes."""
    graph = graph.copy()
    edit = Editor(graph)
    found = {layer.name: layer for layer in layers(graph)[0] if layer.name in names}
    for layer in found.values():
        _in_bytes(edit, layer, tensors[layer.x.name])
    known, products = graph.tensors(), {id(layer.node) for layer in found.values()}
    read = {layer.x.name for layer in found.values()}
    for name, how in tensors.items():
        if name in read or (how.tied and name in known):
            _stored(edit, known[name], how, products)
    return graph


def _in_bytes(edit: Editor, layer: Layer, x: Tensor) -> None:
    """The layer reads its weights in bytes."""
    node, w = layer.node, layer.weights
    turned = layer.columns != 0
    rows = derived("", "transpose", w, axes=(1, 0)) if turned else w
    scales = edit.named(derived("", "byte_scales", rows), f"{w.name}/scale")
    whole = derived("", "in_bytes", rows, scales, x.means.astype(np.float32))
    stored = edit.named(derived("", "transpose", whole, axes=(1, 0)) if turned else whole, f"{w.name}/bytes")
    node.inputs[1] = edit.add(
        "DequantizeLinear",
        [stored, scales],
        node,
        w.shape,
        axis=layer.columns,
    )


def _stored(edit: Editor, t: gs.Tensor, how: Tensor, products: Collection[int]) -> None:
    """Who reads the tensor, or only the products among them, reads what bytes hold of it."""
    readers = [(n, i) for n in t.outputs for i, x in enumerate(n.inputs) if x is t and (how.shared or id(n) in products)]
    scale = literal(edit.name(f"{t.name}/scale"), np.float32(how.grid.scale))
    zero = literal(edit.name(f"{t.name}/zero"), how.grid.dtype.type(how.grid.zero))
    q = gs.Variable(edit.name(f"{t.name}/bytes"), how.grid.dtype, list(t.shape))
    y = gs.Variable(edit.name(f"{t.name}/stored"), np.dtype(np.float32), list(t.shape))
    edit.graph.nodes.append(gs.Node("QuantizeLinear", quantize_of(t.name), {}, [t, scale, zero], [q]))
    edit.graph.nodes.append(gs.Node("DequantizeLinear", dequantize_of(t.name), {}, [q, scale, zero], [y]))
    for node, i in readers:
        node.inputs[i] = y


def quantize_of(tensor: str) -> str:
    """The name of the node that quantizes a tensor."""
    return f"{tensor}/QuantizeLinear"


def dequantize_of(tensor: str) -> str:
    """The name of the node that gives what a tensor's bytes stand for."""
    return f"{tensor}/DequantizeLinear"
