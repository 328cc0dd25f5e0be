"""reshape(transpose(reshape(x))) = depth_to_space(x) or space_to_depth(x), for the shapes and axes of their definition.

depth_to_space, DCR   (N, b, b, C, H, W)      axes 0 3 4 1 5 2   (N, C, H*b, W*b)
depth_to_space, CRD   (N, C, b, b, H, W)      axes 0 1 4 2 5 3   (N, C, H*b, W*b)
space_to_depth        (N, C, H, b, W, b)      axes 0 3 5 1 2 4   (N, b*b*C, H, W)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import onnx_graphsurgeon as gs

from tccompile.rewrites.movement import permutation
from tccompile.rewrites.rule import Editor, Rewrite, producer, rank


@dataclass
class Shuffle:
    x: gs.Tensor
    transpose: gs.Node
    last: gs.Node


def _match(node: gs.Node) -> Shuffle | None:
    transpose = producer(node.inputs[0], "Transpose")
    first = producer(transpose.inputs[0], "Reshape") if transpose else None
    return Shuffle(first.inputs[0], transpose, node) if first and transpose else None


def _form(m: Shuffle) -> tuple[str, dict[str, Any]] | None:
    """The operator and attributes that do the same."""
    y = m.last.outputs[0]
    if rank(m.x) != 4 or rank(y) != 4 or rank(m.transpose.inputs[0]) != 6:
        return None
    s = list(m.transpose.inputs[0].shape)
    n, c, h, w = m.x.shape
    match permutation(m.transpose):
        case [0, 3, 4, 1, 5, 2]:
            b, split, grown = s[1], [n, s[1], s[1], s[3], h, w], [n, s[3], h * s[1], w * s[1]]
            form = "DepthToSpace", {"blocksize": b, "mode": "DCR"}
        case [0, 1, 4, 2, 5, 3]:
            b, split, grown = s[2], [n, s[1], s[2], s[2], h, w], [n, s[1], h * s[2], w * s[2]]
            form = "DepthToSpace", {"blocksize": b, "mode": "CRD"}
        case [0, 3, 5, 1, 2, 4]:
            b, split, grown = s[3], [n, c, h // s[3], s[3], w // s[3], s[3]], [n, c * s[3] ** 2, h // s[3], w // s[3]]
            form = "SpaceToDepth", {"blocksize": b}
        case _:
            return None
    return form if s == split and list(y.shape) == grown else None


def _check(edit: Editor, m: Shuffle) -> str | None:
    return "its shapes or axes are not those of a shuffle of square blocks" if _form(m) is None else None


def _apply(edit: Editor, m: Shuffle) -> None:
    op, attrs = _form(m)  # type: ignore[misc]
    edit.add(op, [m.x], m.last, into=m.last.outputs[0], **attrs)


REWRITES = (Rewrite("reshape(transpose(reshape(x))) => depth_to_space(x)", ("Reshape",), _match, _check, _apply),)
