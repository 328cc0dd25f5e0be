"""Products of floats of 8 bits: which tensors of a graph are stored as such, and the numbers that weights are multiples of.

A model that is quantized to float8 rounds what a product reads by a cast to it and one back, and multiplies it by a scale, which
`rewrites/float8.py` moves into the weights behind. So weights are numbers of float8 times a scale for each output channel, which
is found again from their values:

  conv(x, w) = conv(x, w / scale) · scale           where all of w / scale are numbers of float8

Such an x is stored in 8 bits, with what only moves its elements on the way to the product. So are q, k and v of Attention, if all
three are numbers of E4M3. Products that Tensor Cores do not take in 8 bits multiply the same numbers in halves, which hold them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
import onnx_graphsurgeon as gs

from tccompile.ir.types import DType
from tccompile.load.constants import Weight, derived, held
from tccompile.lower.heads import is_one_op
from tccompile.rewrites.float8 import PRODUCTS, channels, float8_of, lying, on_grid, same_numbers, scales_of
from tccompile.rewrites.rule import constant, finite, operand, rank

LEAST = 16
"""Terms from which on they are multiplied so: 16 of them are what memory is read in."""

ELEMENTWISE = ("Add", "Div", "Max", "Min", "Mul", "Neg", "Relu", "Sub")
"""What may read such a tensor beside products: it takes elements one by one."""


@dataclass(frozen=True)
class Weights:
    """Of a product: numbers of float8 and the scale of each output channel, or of all."""

    numbers: Weight
    scale: Weight


@dataclass
class Float8:
    """Of a graph: tensors that are stored in 8 bits, by name, and products of them, by the identity of their nodes."""

    stored: dict[str, DType] = field(default_factory=dict)
    products: dict[int, Weights] = field(default_factory=dict)


def found(graph: gs.Graph) -> Float8:
    """What is stored and multiplied in floats of 8 bits."""
    out = Float8()
    taken = {id(t) for t in (*graph.inputs, *graph.outputs)}
    for node in graph.nodes:
        if node.op != "Cast" or (dtype := float8_of(node.outputs[0])) is None or node.outputs[0].name in out.stored:
            continue
        together, products = _together(node.outputs[0])
        alike = {float8_of(t) for t in together} <= {None, dtype}
        if products and alike and not any(id(t) in taken for t in together):
            weights = {id(p): _weights(p) for p in products if p.op != "Attention"}
            if all(weights.values()) and (dtype is DType.E4M3 or len(weights) == len(products)):
                out.products |= {p: w for p, w in weights.items() if w is not None}
                out.stored |= {t.name: dtype for t in together}
    out.stored |= {w.numbers.name: DType.E4M3 for w in out.products.values()}
    for node in graph.nodes:
        left = node.op in PRODUCTS and id(node) not in out.products and on_grid(node.inputs[0])
        if left and (numbers := _multiples(node)) is not None:
            out.products[id(node)] = numbers
    return out


def _together(rounded: gs.Tensor) -> tuple[list[gs.Tensor], list[gs.Node]]:
    """A tensor of floats of 8 bits with all that have its numbers, and the products that read them; no products where anything
    else reads one than what takes its elements one by one."""
    together, products, rest = [rounded], list[gs.Node](), [rounded]

    def add(new: Iterable[gs.Tensor]) -> None:
        found = [t for t in new if all(t is not known for known in together)]
        together.extend(found)
        rest.extend(found)

    while rest:
        t = rest.pop()
        for node in t.outputs:
            if (read := same_numbers(node)) is not None and all(on_grid(x) for x in read):
                add(node.outputs)
                add(x for x in read if x is not t)  # what is joined with it
            elif node.op in PRODUCTS and node.inputs[0] is t and sum(x is t for x in node.inputs) == 1:
                products.append(node)
            elif _attends(node, t):
                products.append(node)
                add(node.inputs[:3])
            elif node.op not in ELEMENTWISE:
                return together, []
        add(same_numbers(t.inputs[0]) or () if float8_of(t) is None else ())
    return together, products


def _attends(node: gs.Node, t: gs.Tensor) -> bool:
    """Whether a node is attention in floats of 8 bits that reads a tensor as q, k or v, by one operation."""
    if node.op != "Attention" or not any(x is t for x in node.inputs[:3]) or any(x is t for x in node.inputs[3:]):
        return False
    plain = len(node.outputs) == 1 and all(operand(node, i) is None for i in (4, 5, 6))
    return plain and is_one_op(node) and all(on_grid(x) for x in node.inputs[:3])


# --- Weights -----------------------------------------------------------------------------------------------------------


def _weights(node: gs.Node) -> Weights | None:
    """A product's weights as numbers of float8; None where it has no such weights, or Tensor Cores would not take it."""
    w = constant(node.inputs[1])
    if w is None or rank(w) < 2:
        return None
    if node.op == "Conv":
        terms, groups = w.shape[1], node.attrs.get("group", 1)
        if rank(w) > 4 or terms < LEAST or (groups > 1 and terms % LEAST):
            return None
    elif node.attrs.get("transA", 0) or w.shape[1 - channels(node)] < LEAST:
        return None
    return _multiples(node)


def _multiples(node: gs.Node) -> Weights | None:
    """A product's weights as numbers of float8 and scales; None where they are no such multiples."""
    w = constant(node.inputs[1])
    if not isinstance(w, Weight) or held(w).dtype != np.float32 or not finite(w) or not held(w).size:
        return None
    if node.op != "Conv" and rank(w) != 2:
        return None
    scales = scales_of(node)
    if scales is None:
        return None
    scales.name = f"{w.name}/scales"
    return Weights(derived(f"{w.name}/float8", "div", w, lying(node, scales)), scales)
