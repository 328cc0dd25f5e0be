"""Activations that are stored with one scale, since what lies between them only moves numbers: then bytes are moved.

A concatenation is in bytes if its parts are, with its own scale; and so is what is split, sliced, pooled by its maxima, resized
to the nearest, reshaped, transposed.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import onnx_graphsurgeon as gs

from tccompile.quantize.observe import Values
from tccompile.rewrites.quantized import moves

APART = 4.0
"""How many times as large the largest values of one may be as those of another."""


def ties(graph: gs.Graph, values: Mapping[str, Values], heavy: tuple[str, ...]) -> list[list[gs.Tensor]]:
    """The activations that may be tied, in groups of two and more.

    values  what those take for values that were seen, by name
    heavy   operators that do not read bytes
    """
    group: dict[int, list[gs.Tensor]] = {}

    def of(t: gs.Tensor) -> list[gs.Tensor]:
        return group.setdefault(id(t), [t])

    for node in graph.nodes:
        for x in moves(node) or ():
            for y in node.outputs:
                one, other = of(x), of(y)
                if one is not other:
                    one += other
                    group |= dict.fromkeys(map(id, other), one)
    found = {id(members): members for members in group.values() if len(members) > 1}
    outside = {id(t) for t in (*graph.inputs, *graph.outputs)}
    return [members for members in found.values() if _may_be_tied(members, values, outside, heavy)]


def _may_be_tied(members: list[gs.Tensor], values: Mapping[str, Values], outside: set[int], heavy: tuple[str, ...]) -> bool:
    """Whether all are activations of about one size that what reads them may read in bytes."""
    for t in members:
        readers = [node for node in t.outputs if moves(node) is None]
        products = [n for n in readers if n.op in ("Conv", "Gemm", "MatMul") and n.inputs[0] is t]
        if id(t) in outside or not isinstance(t, gs.Variable) or np.dtype(t.dtype) != np.float32 or t.name not in values:
            return False
        if any(n.op in heavy and n not in products for n in readers):
            return False
    sizes = [max(values[t.name].high, -values[t.name].low) for t in members]
    return 0 < max(sizes) <= APART * min(sizes) < np.inf


def begins(members: list[gs.Tensor]) -> list[gs.Tensor]:
    """Those of a group that are computed, and not moved from others."""
    return [t for t in members if not (t.inputs and moves(t.inputs[0]))]
