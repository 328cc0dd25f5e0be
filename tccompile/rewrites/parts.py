"""part(f(x)) = f(part(x)) where f computes each of those parts by itself: rows that nobody reads are not computed.

A classifier reads one token of a transformer's last layer, and a language model in its first step the last one. What takes that
token moves past norms, activations, sums, products by constants and the rows of q in attention, as far as each of them has no
other readers than such as take the same part; two that take the same part of a sum become one. It moves only where a product, an
attention or a norm has fewer rows by it: elsewhere it would stand between a product and what is fused into it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx_graphsurgeon as gs

from tccompile.ir.extent import worth
from tccompile.rewrites.movement import permutation
from tccompile.rewrites.rule import Editor, Rewrite, ints, operand, producer, rank, shape_constant
from tccompile.rewrites.transposes import ELEMENTWISE

FEW = 4
"""A part moves if it is one row, or no more than one in so many: less saves little, and a copy of it may be needed."""

LAST = np.iinfo(np.int64).max

PASSED = (*ELEMENTWISE, "Reshape", "Transpose")
"""What a part moves past on the way to what has fewer rows by it."""

SAVING = ("Attention", "Gemm", "LayerNormalization", "MatMul", "RMSNormalization")

Span = tuple[int, int, int]
"""Where a part begins and ends along an axis, and its step, as Slice takes them."""


@dataclass(frozen=True)
class Part:
    """Rows of a node's result: the node, the axis that they are numbered along, which ones, and how many."""

    of: gs.Node
    axis: int
    span: Span
    count: int


def _taken(node: gs.Node) -> tuple[int, Span] | None:
    """The axis and the rows that a node takes: one by Gather, or some by Slice."""
    x = node.inputs[0]
    if node.op == "Gather":
        index = ints(node.inputs[1])
        if index is None or rank(node.inputs[1]) != 0:
            return None
        return node.attrs.get("axis", 0) % rank(x), (index[0], LAST if index[0] == -1 else index[0] + 1, 1)
    starts, ends, axes = (ints(operand(node, i)) for i in (1, 2, 3))
    steps = (1,) if operand(node, 4) is None else ints(operand(node, 4))
    if starts is None or ends is None or axes is None or steps is None or len(axes) != 1:
        return None
    return axes[0] % rank(x), (starts[0], ends[0], steps[0])


def _match(node: gs.Node) -> Part | None:
    found, of = _taken(node), producer(node.inputs[0], *PASSED, *SAVING)
    if found is None or of is None or len(of.outputs) != 1:
        return None
    axis, span = found
    return Part(of, axis, span, 1 if node.op == "Gather" else node.outputs[0].shape[axis])


def _check(edit: Editor, m: Part) -> str | None:
    y = m.of.outputs[0]
    if edit.is_output(y) or any(n.op not in ("Gather", "Slice") or _taken(n) != (m.axis, m.span) for n in y.outputs):
        return "others read it as well"
    if _operands(m.of, m.axis) is None:
        return "it does not compute these rows each by itself"
    if m.count != 1 and not worth(f"parts of {y.name} taken early", m.count * FEW <= y.shape[m.axis]):
        return "most of its rows are read"
    return None if _saves(edit, m, m.of, m.axis, ()) else "no product or norm ahead of it would have fewer rows"


def _saves(edit: Editor, m: Part, node: gs.Node, axis: int, passed: tuple[gs.Node, ...]) -> bool:
    """Whether what has fewer rows, if these are taken ahead of the node, is more than elementwise. What has been passed may read
    the same tensor more than once, as x · sigmoid(x) does."""
    operands = _operands(node, axis)
    if operands is None or len(node.outputs) != 1 or node.op in SAVING:
        return operands is not None
    passed = (*passed, node)

    def alone(t: gs.Tensor, at: int) -> bool:
        same = (n.op in ("Gather", "Slice") and _taken(n) == (at, m.span) for n in t.outputs if not any(n is p for p in passed))
        return not edit.is_output(t) and all(same)

    ahead = [(node.inputs[i], at) for i, at in operands.items() if alone(node.inputs[i], at)]
    found = [(producer(t, *PASSED, *SAVING), at) for t, at in ahead]
    return any(before is not None and _saves(edit, m, before, at, passed) for before, at in found)


def _operands(node: gs.Node, axis: int) -> dict[int, int] | None:
    """Which operands have the rows that an axis of the node's result numbers, and along which axis; None if it mixes them."""
    y, x = node.outputs[0], node.inputs[0]
    if node.op in ELEMENTWISE:
        at = {i: axis - rank(y) + rank(t) for i, t in enumerate(node.inputs) if t.name}
        return {i: a for i, a in at.items() if a >= 0 and list(node.inputs[i].shape)[a : a + 1] != [1]}
    match node.op:
        case "Transpose":
            return {0: permutation(node)[axis]}
        case "Reshape":
            return _reshaped(list(x.shape), list(y.shape), axis)
        case "LayerNormalization" | "RMSNormalization":
            return {0: axis} if axis < node.attrs.get("axis", -1) % rank(x) else None
        case "Gemm" | "MatMul":
            return _of_product(node, axis)
    return _of_attention(node, axis)


def _of_product(node: gs.Node, axis: int) -> dict[int, int] | None:
    """Rows of the left operand; with a right one of two axes, of all axes but its last."""
    x, w, y = node.inputs[0], node.inputs[1], node.outputs[0]
    if node.op == "Gemm":
        c = operand(node, 2)
        alike = c is None or rank(c) < 2 or c.shape[0] == 1
        return {0: 0} if axis == 0 and alike and not node.attrs.get("transA", 0) else None
    at, last = axis - rank(y) + rank(x), rank(y) - 2
    return {0: at} if at >= 0 and rank(x) > 1 and (axis == last or (axis < last and rank(w) == 2)) else None


def _reshaped(before: list[int], after: list[int], axis: int) -> dict[int, int] | None:
    """The axis that a reshape leaves as it is: all ahead of it, or all behind it, stays."""
    at = axis - len(after) + len(before)
    if before[: axis + 1] == after[: axis + 1]:
        return {0: axis}
    return {0: at} if at >= 0 and before[at:] == after[axis:] else None


def _of_attention(node: gs.Node, axis: int) -> dict[int, int] | None:
    """Rows of q, and of a mask that has them."""
    mask, plain = operand(node, 3), len([t for t in node.inputs if t.name]) <= 4 and not node.attrs.get("is_causal", 0)
    if not plain or rank(node.outputs[0]) != 4 or axis != 2:
        return None
    by_row = mask is not None and list(mask.shape)[-2:-1] != [1]
    return {0: 2} | ({3: rank(mask) - 2} if by_row else {})  # type: ignore[arg-type]


def _apply(edit: Editor, m: Part) -> None:
    node, y = m.of, m.of.outputs[0]
    inputs = list(node.inputs)
    for i, axis in (_operands(node, m.axis) or {}).items():
        inputs[i] = _cut(edit, inputs[i], axis, m)
    shape = [m.count if a == m.axis else n for a, n in enumerate(y.shape)]
    if node.op == "Reshape":
        inputs[1] = shape_constant(edit, shape, node)
    part = gs.Variable(y.name, y.dtype, shape)  # all of it is no more, and a calibration knows it by its name
    y.name = edit.name(f"{y.name}/whole")
    edit.add(node.op, inputs, node, into=part, **node.attrs)
    for reader in list(y.outputs):
        out = reader.outputs[0]
        if reader.op == "Gather":
            edit.add("Reshape", [part, shape_constant(edit, out.shape, reader)], reader, into=out)
        else:
            edit.redirect(part, out)


def _cut(edit: Editor, t: gs.Tensor, axis: int, m: Part) -> gs.Tensor:
    """These rows of an operand."""
    shape = [m.count if a == axis else n for a, n in enumerate(t.shape)]
    start, end, step = (shape_constant(edit, [n], m.of) for n in m.span)
    out = edit.add("Slice", [t, start, end, shape_constant(edit, [axis], m.of), step], m.of, shape)
    out.dtype = t.dtype
    return out


REWRITES = (Rewrite("part(f(x)) => f(part(x))", ("Gather", "Slice"), _match, _check, _apply),)
