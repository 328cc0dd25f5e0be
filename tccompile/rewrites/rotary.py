"""The rotation of halves in rotary position embeddings, as one read of x and one product.

    concat(-x[h:], x[:h])  = sign * x[rolled]      over an axis of 2h; sign is -1 in the first half and 1 in the second

Exporters write x * cos + concat(-x[h:], x[:h]) * sin: with this, all of it is one elementwise step that reads x twice, instead
of copies of both halves.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx_graphsurgeon as gs

from tccompile.load.constants import literal
from tccompile.rewrites.rule import Editor, Rewrite, ints, is_float, name_of, operand, producer, rank


@dataclass
class Halves:
    """y = concat(-x[h:], x[:h]) along `axis`."""

    node: gs.Node
    x: gs.Tensor
    axis: int


def _part(t: gs.Tensor, axis: int) -> tuple[gs.Tensor, int] | None:
    """x and the start, if the tensor is a part of x along the axis, and nothing else."""
    if (node := producer(t, "Slice")) is not None:
        starts, axes, steps = ints(node.inputs[1]), ints(operand(node, 3)), ints(operand(node, 4)) or (1,)
        if starts is None or len(starts) != 1 or axes is None or axes[0] % rank(t) != axis or steps != (1,):
            return None
        extent = node.inputs[0].shape[axis]
        return node.inputs[0], min(max(starts[0] + extent * (starts[0] < 0), 0), extent)
    if (node := producer(t, "Split")) is not None and node.attrs.get("axis", 0) % rank(t) == axis:
        before = next(i for i, y in enumerate(node.outputs) if y is t)
        return node.inputs[0], sum(y.shape[axis] for y in node.outputs[:before])
    return None


def _match(node: gs.Node) -> Halves | None:
    if len(node.inputs) != 2 or not is_float(node.outputs[0]):
        return None
    axis = node.attrs["axis"] % rank(node.outputs[0])
    negated = producer(node.inputs[0], "Neg")
    second, first = (_part(negated.inputs[0], axis) if negated else None), _part(node.inputs[1], axis)
    if not (first and second) or first[0] is not second[0] or first[1] != 0 or second[1] != node.inputs[1].shape[axis]:
        return None
    return Halves(node, first[0], axis)


def _check(edit: Editor, m: Halves) -> str | None:
    if list(m.x.shape) != list(m.node.outputs[0].shape):
        return "the halves are not all of it"
    return None if 2 * m.node.inputs[1].shape[m.axis] == m.x.shape[m.axis] else "the parts are not halves"


def _apply(edit: Editor, m: Halves) -> None:
    node, n, r = m.node, m.x.shape[m.axis], rank(m.x)
    rolled = literal(edit.name(f"{name_of(node)}/rolled"), np.roll(np.arange(n), -(n // 2)), np.int64)
    sign = np.repeat([-1.0, 1.0], n // 2).reshape([n if a == m.axis else 1 for a in range(r)])
    x = edit.add("Gather", [m.x, rolled], node, m.x.shape, axis=m.axis)
    edit.add("Mul", [x, literal(edit.name(f"{name_of(node)}/sign"), sign, m.x.dtype)], node, into=node.outputs[0])


REWRITES = (Rewrite("concat(-x[h:], x[:h]) => sign * x[rolled]", ("Concat",), _match, _check, _apply),)
