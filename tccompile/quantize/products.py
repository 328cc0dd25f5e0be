"""The products of a graph that may be multiplied in bytes: which ones, and why not the others.

Attention is one of its three operands, in floats of 8 bits only.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass

import numpy as np
import onnx_graphsurgeon as gs

from tccompile.load.constants import Weight, held
from tccompile.lower.byte_products import LEAST
from tccompile.lower.heads import MOST, is_one_op
from tccompile.rewrites.rule import constant, finite, is_float, name_of, operand, rank

OPS = ("Conv", "Gemm", "MatMul")


@dataclass(frozen=True, eq=False)
class Layer:
    """A Conv, Gemm or MatMul of an activation by constant weights.

    columns  the axis of the weights that the result's channels go along
    terms    the axis of the weights that x's channels go along
    channels the axis of x's channels
    """

    node: gs.Node
    columns: int
    terms: int
    channels: int

    @property
    def name(self) -> str:
        return name_of(self.node)

    @property
    def x(self) -> gs.Tensor:
        return self.node.inputs[0]

    @property
    def reads(self) -> dict[str, int]:
        """What it reads that may be in bytes, by name, and the axis that its channels go along."""
        return {self.x.name: self.channels}

    @property
    def weights(self) -> Weight:
        weights: Weight = self.node.inputs[1]
        return weights

    @property
    def depthwise(self) -> bool:
        """Whether it reads bytes, and multiplies them by weights in floats: each channel by its own filter."""
        return self.node.op == "Conv" and self.node.attrs.get("group", 1) > 1 and self.weights.shape[1] == 1

    @property
    def not_in_float8(self) -> str | None:
        """Why it is not multiplied in floats of 8 bits; None if it may be."""
        return "it is a depthwise convolution, which reads integers or halves" if self.depthwise else None

    @property
    def not_in_integers(self) -> str | None:
        """Why it is not multiplied in integers; None if it may be."""
        size = math.prod(self.weights.shape) // self.weights.shape[self.columns]
        return f"its sums of {size} products may exceed int32" if size * 255 * 255 >= 2**31 else None

    def rows(self) -> np.ndarray:
        """The weights, those of an output channel as a row."""
        values: np.ndarray = np.moveaxis(held(self.weights), self.columns, 0)
        return values.reshape(len(values), -1)

    def by_term(self) -> np.ndarray:
        """The weights as (the result's channels, x's channels, taps)."""
        values: np.ndarray = np.moveaxis(held(self.weights), (self.columns, self.terms), (0, 1))
        return values.reshape(*values.shape[:2], -1)


@dataclass(frozen=True, eq=False)
class Attended:
    """An Attention of three activations."""

    node: gs.Node

    @property
    def name(self) -> str:
        return name_of(self.node)

    @property
    def reads(self) -> dict[str, int]:
        """What it reads that may be in bytes, by name, and the axis that its channels go along."""
        return {t.name: rank(t) - 1 for t in self.node.inputs[:3]}


MEANS = ("GlobalAveragePool", "ReduceMean")

IN_FLOATS = "it is attention, which is not multiplied in integers"
"""Why an attention is not in integers of 8 bits."""


def attentions(graph: gs.Graph, taken: Collection[str]) -> tuple[list[Attended], dict[str, str]]:
    """The attentions of a graph that may be in floats of 8 bits, and for the others, by their names, why they may not.

    taken  what products read, by name
    """
    found, refused = [], {}
    nodes = [node for node in graph.nodes if node.op == "Attention" and node.domain in (None, "", "ai.onnx")]
    for node in nodes:
        others = {t.name for other in nodes if other is not node for t in other.inputs[:3]}
        reason = _why_not_attended(node, {*taken, *others})
        if reason is None:
            found.append(Attended(node))
        else:
            refused[name_of(node)] = reason
    return found, refused


def _why_not_attended(node: gs.Node, taken: set[str]) -> str | None:
    operands = node.inputs[:3]
    if len(node.outputs) > 1 or any(operand(node, i) is not None for i in (4, 5, 6)):
        return "it is attention to keys and values from before"
    if not is_one_op(node):
        return f"it is attention with softcap, or with heads of more than {MOST} elements"
    if any(constant(t) is not None for t in operands):
        return "it is attention to constants"
    if any(not is_float(t) or np.dtype(t.dtype) != np.float32 for t in operands):
        return "it is not of float32"
    if shared := sorted({t.name for t in operands} & taken):
        return f"other products read {shared[0]!r}, too"
    if any(x is t for t in operands for x in node.inputs[3:]):
        return "its mask is one of its operands"
    return None


def products(graph: gs.Graph) -> dict[str, Layer | Attended]:
    """All that may be multiplied in bytes, by name."""
    found, _ = layers(graph)
    attended, _ = attentions(graph, {layer.x.name for layer in found})
    every: list[Layer | Attended] = [*found, *attended]
    return {one.name: one for one in every}


def layers(graph: gs.Graph) -> tuple[list[Layer], dict[str, str]]:
    """The layers of a graph that may be multiplied in bytes, and for its other products, by their names, why they may not."""
    found, refused = [], {}
    for node in graph.nodes:
        if node.op in OPS and node.domain in (None, "", "ai.onnx"):
            reason = why_not(node)
            if reason is None:
                found.append(_layer(node))
            else:
                refused[name_of(node)] = reason
    return found, refused


def is_gate(t: gs.Tensor) -> bool:
    """Whether it has a number for each channel of an image."""
    return isinstance(t, gs.Variable) and list((t.shape or ())[2:]) == [1, 1]


def gating(graph: gs.Graph) -> set[str]:
    """The names of the products of squeeze and excitation: between an image's means and the numbers that it is multiplied by."""
    return {name_of(product) for node in graph.nodes if node.op == "Mul" for product in _behind_means(node)}


def _behind_means(node: gs.Node) -> list[gs.Node]:
    """The convolutions between means and one factor of a product; none where there are no means."""
    found, means, left = list[gs.Node](), False, [t for t in node.inputs if is_gate(t)]
    if len(left) != 1:  # two of them are no image and its gate
        return []
    seen = {left[0].name}
    while left:
        for maker in left.pop().inputs:
            if maker.op in MEANS:
                means = True
                continue
            found += [maker] if maker.op == "Conv" else []
            more = [t for t in maker.inputs if is_gate(t) and t.name not in seen]
            seen |= {t.name for t in more}
            left += more
    return found if means else []


def why_not(node: gs.Node) -> str | None:
    """Why a product is not multiplied in bytes, whatever its values; None if it may be."""
    x, w = node.inputs[:2]
    if constant(w) is None or constant(x) is not None:
        return "its weights are computed" if constant(w) is None else "its first operand is constant"
    if not (is_float(x) and np.dtype(x.dtype) == np.float32):
        return f"it is computed in {np.dtype(x.dtype).name}: give the model in float32" if is_float(x) else "it is not of float32"
    if not isinstance(w, Weight) or not finite(w) or not math.prod(w.shape):
        return "its weights are no finite numbers"
    if node.op == "Conv":
        groups = node.attrs.get("group", 1)
        if rank(w) > 4:
            return "it is a convolution of volumes"
        if groups != 1 and w.shape[1] == 1:
            same = groups == w.shape[0]
            return None if same else "it has several filters for each channel, which no Tensor Core multiplies in bytes"
        terms = w.shape[1]
        if groups != 1 and terms % LEAST and terms > LEAST:
            return f"its groups have {terms} input channels; bytes are multiplied in multiples of {LEAST}"
    else:
        if rank(w) != 2:
            return "its weights are several matrices"
        if node.op == "Gemm" and (node.attrs.get("transA", 0) or {node.attrs.get(k, 1.0) for k in ("alpha", "beta")} != {1.0}):
            return "it is a Gemm with factors or a transposed first operand"
        terms = w.shape[1 if node.attrs.get("transB", 0) else 0]
    if terms < LEAST:
        return f"it has {terms} input channels; bytes are multiplied from {LEAST} on"
    if node.op != "MatMul" and operand(node, 2) is not None and constant(node.inputs[2]) is None:
        return "its bias is computed"
    return None


def _columns(node: gs.Node) -> int:
    return 0 if node.op == "Conv" or node.attrs.get("transB", 0) else 1


def _layer(node: gs.Node) -> Layer:
    if node.op == "Conv":
        return Layer(node, 0, 1, 1)
    columns = _columns(node)
    return Layer(node, columns, 1 - columns, rank(node.inputs[0]) - 1)
