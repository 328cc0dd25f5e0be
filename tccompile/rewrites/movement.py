"""Operators that only move data, brought to few forms.

squeeze(x) = unsqueeze(x) = flatten(x) = reshape(x)
reshape(reshape(x, a), b) = reshape(x, b)
transpose(transpose(x, p), q) = transpose(x, p[q])
transpose(x) = reshape(x)                    where only axes of extent 1 change places
f(x) = x                                     where f moves nothing
reshape(softmax(reshape(x))) = softmax(x)    where the flattened axes have one extent that is not 1
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import onnx_graphsurgeon as gs

from tccompile.ir.extent import possible
from tccompile.rewrites.rule import Editor, Rewrite, ints, itself, operand, producer, rank, shape_constant

MOVES = ("Concat", "Expand", "Max", "Mean", "Min", "Pad", "Reshape", "Slice", "Split", "Sum", "Tile", "Transpose")
RESHAPES = ("Reshape", "Flatten", "Squeeze", "Unsqueeze")


def permutation(node: gs.Node) -> list[int]:
    return list(node.attrs.get("perm", reversed(range(rank(node.outputs[0])))))


def _vanish(edit: Editor, node: gs.Node) -> str | None:
    x, y = node.inputs[0], node.outputs[0]
    stays = list(x.shape) == list(y.shape)
    if not possible(f"{y.name} left out", stays and not (node.op == "Pad" and any(ints(node.inputs[1]) or (1,)))):
        return "it moves elements" if stays else "it changes the shape"
    if node.op == "Transpose" and permutation(node) != sorted(permutation(node)):
        return "it moves axes"
    if node.op == "Slice" and any(s < 0 for s in ints(operand(node, 4)) or ((1,) if operand(node, 4) is None else (-1,))):
        return "it may reverse an axis"
    if node.op in ("Concat", "Max", "Mean", "Min", "Sum") and len(node.inputs) > 1:
        return "it has several inputs"
    return None if edit.may_vanish(x, y) else "it stands between an input and an output of the model"


def _remove(edit: Editor, node: gs.Node) -> None:
    edit.redirect(node.inputs[0], node.outputs[0])


def _reshape(edit: Editor, node: gs.Node, x: gs.Tensor) -> None:
    y = node.outputs[0]
    attrs: dict[str, Any] = {"allowzero": 1} if 0 in y.shape else {}
    edit.add("Reshape", [x, shape_constant(edit, y.shape, node)], node, into=y, **attrs)


def _always(edit: Editor, node: gs.Node) -> str | None:
    return None


def _to_reshape(edit: Editor, node: gs.Node) -> None:
    _reshape(edit, node, node.inputs[0])


@dataclass
class Pair:
    first: gs.Node
    second: gs.Node


def _pair(*ops: str):
    def match(node: gs.Node) -> Pair | None:
        first = producer(node.inputs[0], *ops)
        return Pair(first, node) if first else None

    return match


def _both(edit: Editor, m: Pair) -> str | None:
    return None


def _merge_reshapes(edit: Editor, m: Pair) -> None:
    _reshape(edit, m.second, m.first.inputs[0])


def _merge_transposes(edit: Editor, m: Pair) -> None:
    p, y = permutation(m.first), m.second.outputs[0]
    edit.add("Transpose", [m.first.inputs[0]], m.second, into=y, perm=[p[a] for a in permutation(m.second)])


def _moves_ones(edit: Editor, node: gs.Node) -> str | None:
    shape = node.inputs[0].shape
    kept = [a for a in permutation(node) if shape[a] != 1]
    return None if kept == sorted(kept) else "it moves axes whose extent is not 1"


@dataclass
class FlatSoftmax:
    before: gs.Node
    softmax: gs.Node
    after: gs.Node


def _match_softmax(node: gs.Node) -> FlatSoftmax | None:
    softmax = producer(node.inputs[0], "Softmax", "LogSoftmax", "Hardmax")
    before = producer(softmax.inputs[0], *RESHAPES) if softmax else None
    return FlatSoftmax(before, softmax, node) if before and softmax else None


def _softmax_axis(m: FlatSoftmax) -> int | None:
    """The axis of x that holds what the softmax runs over."""
    shape, flat = list(m.before.inputs[0].shape), list(m.softmax.inputs[0].shape)
    if m.softmax.attrs.get("axis", -1) % len(flat) != len(flat) - 1:
        return None
    for axis, n in enumerate(shape):
        if n == flat[-1] and all(k == 1 for k in shape[axis + 1 :]):
            return axis
    return None


def _check_softmax(edit: Editor, m: FlatSoftmax) -> str | None:
    if list(m.before.inputs[0].shape) != list(m.after.outputs[0].shape):
        return "the shape does not come back"
    if not edit.only_use(m.softmax.outputs[0]):
        return "the flat result is used elsewhere as well"
    return "it runs over several axes" if _softmax_axis(m) is None else None


def _apply_softmax(edit: Editor, m: FlatSoftmax) -> None:
    edit.add(m.softmax.op, [m.before.inputs[0]], m.softmax, into=m.after.outputs[0], axis=_softmax_axis(m))


REWRITES = (
    Rewrite("f(x) => x where f moves nothing", MOVES, itself, _vanish, _remove),
    Rewrite("flatten, squeeze, unsqueeze => reshape", ("Flatten", "Squeeze", "Unsqueeze"), itself, _always, _to_reshape),
    Rewrite("reshape(softmax(reshape(x))) => softmax(x)", ("Reshape",), _match_softmax, _check_softmax, _apply_softmax),
    Rewrite("reshape(reshape(x)) => reshape(x)", ("Reshape",), _pair("Reshape"), _both, _merge_reshapes),
    Rewrite("transpose(transpose(x)) => transpose(x)", ("Transpose",), _pair("Transpose"), _both, _merge_transposes),
    Rewrite("transpose(x) => reshape(x) where axes of 1 move", ("Transpose",), itself, _moves_ones, _to_reshape),
)
