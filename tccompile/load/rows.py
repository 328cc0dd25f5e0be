"""Loops that put rows behind what they carry, as torch.cat in a loop is exported: rows that iterations give are the same.

The standard has these as outputs of their own kind: an iteration gives a row, and nobody copies those before it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import onnx
import onnx.helper

from tccompile.load.nodes import reads


@dataclass(frozen=True)
class Rows:
    """What a body puts behind a value that it carries.

    result  what is carried then
    row     what is put behind it
    nodes   the results of nodes that do nothing else
    """

    result: str
    row: str
    nodes: frozenset[str]


def appended(body: onnx.GraphProto, k: int) -> Rows | None:
    """What a loop's body puts behind the value number k that it carries; None if it does something else with it."""
    makers = {y: node for node in body.node for y in node.output}
    used = Counter([*(name for node in body.node for name in reads(node)), *(v.name for v in body.output)])
    result = body.output[1 + k].name
    node = makers.get(result)
    if node is None or node.op_type != "Concat" or len(node.input) != 2 or used[result] > 1:
        return None
    if next((a.i for a in node.attribute if a.name == "axis"), None) != 0:
        return None
    name, row = node.input
    own = {result}
    while name in makers and makers[name].op_type in ("Cast", "Identity") and used[name] == 1:
        own.add(name)
        name = makers[name].input[0]
    return Rows(result, row, frozenset(own)) if name == body.input[2 + k].name and used[name] == 1 else None


def as_rows(node: onnx.NodeProto, body: onnx.GraphProto, found: Mapping[int, Rows], results: Sequence[str]) -> onnx.NodeProto:
    """The loop without these values, by their numbers, whose iterations give their rows: its last results, of these names.

    A row is put behind what the loop begins with, which has none: that says its other extents.
    """
    own = {y for rows in found.values() for y in rows.nodes}
    behind = [
        onnx.helper.make_node("Concat", [node.input[2 + k], rows.row], [rows.result], f"{rows.result}/row", axis=0)
        for k, rows in found.items()
    ]
    inner, carried = onnx.GraphProto(), len(node.input) - 2
    inner.CopyFrom(body)
    del inner.node[:], inner.input[:], inner.output[:]
    inner.node.extend([*(n for n in body.node if own.isdisjoint(n.output)), *behind])
    inner.input.extend(v for i, v in enumerate(body.input) if i - 2 not in found)
    inner.output.extend(v for i, v in enumerate(body.output) if i - 1 not in found)
    inner.output.extend(onnx.ValueInfoProto(name=rows.result) for rows in found.values())
    made = onnx.NodeProto()
    made.CopyFrom(node)
    made.input[:] = [x for i, x in enumerate(node.input) if i - 2 not in found]
    left = [*node.output, *[""] * (len(body.output) - 1 - len(node.output))]
    made.output[:] = [*(y for i, y in enumerate(left) if i >= carried or i not in found), *results]
    next(a for a in made.attribute if a.name == "body").g.CopyFrom(inner)
    return made
