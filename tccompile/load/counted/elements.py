"""Operators that keep elements along such an axis apart, and stay as they are."""

from __future__ import annotations

import math

import onnx
import onnx.helper

from tccompile.load.counted.begin import constant_number
from tccompile.load.counted.late import tiled, widened
from tccompile.load.counted.shapes import regrouped
from tccompile.load.sizes import Axes, Rest, Sizes


def elementwise(s: Sizes, node: onnx.NodeProto) -> bool:
    """Axes of inputs as they are broadcast; what is there along one axis is so of all inputs."""
    names = [x for x in node.input if x]
    shapes = [s.shape(x) for x in names]
    rank, out = max(map(len, shapes)), Axes()
    for x, shape in zip(names, shapes, strict=True):
        for axis, size in s.of(x).items():
            to = axis + rank - len(shape)
            if out.setdefault(to, size) != size:
                raise s.refuse(x, axis, f"{out[to].node} decides how much there is of another input")
    for x, shape in zip(names, shapes, strict=True):
        for axis, n in enumerate(shape):
            there = out.get(axis + rank - len(shape))
            if there is not None and n != 1 and axis not in s.of(x):  # nor is one element repeated, of which there may be none
                other = next(y for y in names if there in s.of(y).values())
                raise s.refuse(other, s.axis_of(other, there), f"{x!r} has {n} elements there, as many as there may be")
    return s.says(node.output[0], out)


def transpose(s: Sizes, node: onnx.NodeProto) -> bool:
    x = node.input[0]
    perm = list(s.attribute("perm", range(len(s.shape(x)))[::-1]))
    return s.says(node.output[0], {perm.index(axis): size for axis, size in s.of(x).items()})


def unsqueeze(s: Sizes, node: onnx.NodeProto) -> bool:
    x, axes = node.input[0], s.integers(1) or []
    rank = len(s.shape(x)) + len(axes)
    added = {a % rank for a in axes}
    kept = [a for a in range(rank) if a not in added]
    return s.says(node.output[0], {kept[axis]: size for axis, size in s.of(x).items()})


def squeeze(s: Sizes, node: onnx.NodeProto) -> bool:
    x = node.input[0]
    shape = s.shape(x)
    axes = s.integers(1)
    gone = {a for a, n in enumerate(shape) if n == 1} if axes is None else {a % len(shape) for a in axes}
    for axis in s.of(x):
        if axis in gone:
            raise s.refuse(x, axis)
    kept = [a for a in range(len(shape)) if a not in gone]
    return s.says(node.output[0], {kept.index(axis): size for axis, size in s.of(x).items()})


def flatten(s: Sizes, node: onnx.NodeProto) -> bool:
    shape, axis = s.shape(node.input[0]), s.attribute("axis", 1)
    axis = axis % len(shape) if axis < 0 else axis
    target = [math.prod(shape[:axis]), math.prod(shape[axis:])]
    return s.says(node.output[0], regrouped(s, node.input[0], target))


def along_others(s: Sizes, node: onnx.NodeProto, default: int = -1, outputs: int = 0) -> bool:
    """What goes along one axis, other than those that the data decide, and keeps all of them."""
    x = node.input[0]
    axis = s.attribute("axis", default) % max(len(s.shape(x)), 1)
    if axis in s.of(x):
        raise s.refuse(x, axis)
    for y in node.output[: outputs or len(node.output)]:
        s.says(y, s.of(x))
    return False


def rows(s: Sizes, node: onnx.NodeProto) -> bool:
    """What is done with each row of the first axis by itself, such as convolutions of images."""
    for i, x in enumerate(node.input):
        for axis in s.of(x):
            if i or axis:
                raise s.refuse(x, axis)
    for y in node.output:
        s.says(y, s.of(node.input[0]))
    return False


def normalized(s: Sizes, node: onnx.NodeProto) -> bool:
    """Norms over the axes from one on."""
    x = node.input[0]
    first = s.attribute("axis", -1) % len(s.shape(x))
    for name in node.input:
        for axis in s.of(name):
            if name != x or axis >= first:
                raise s.refuse(name, axis)
    return s.says(node.output[0], s.of(x))


def padded(s: Sizes, node: onnx.NodeProto) -> bool:
    """Pad along other axes; or behind what there is, as far as to an extent that is known."""
    x = node.input[0]
    shape, found = s.shape(x), s.numbers_in(node.input[1])
    if (found is None or not any(isinstance(n, Rest) for n in found.flat)) and widened(s, node):
        return True
    pads = None if found is None else list(found.flat)
    axes, out, whole = s.integers(3, range(len(shape))), s.of(x), list(pads or ())
    for axis, size in s.of(x).items():
        at = [i for i, a in enumerate(axes or ()) if a % len(shape) == axis]
        if pads is None or axes is None:
            raise s.refuse(x, axis, "its pads are computed")
        for i in at:
            behind = pads[i + len(axes)]
            if pads[i] != 0 or not (behind == 0 or (isinstance(behind, Rest) and behind.size == size)):
                raise s.refuse(x, axis)
            if isinstance(behind, Rest):
                if s.attribute("mode", b"constant") != b"constant":
                    raise s.refuse(x, axis, "its mode is not constant")
                node.input[0] = s.masked(node.input[0], axis, constant_number(s, 2, 0.0))
                whole[i + len(axes)] = behind.whole - shape[axis]
                out = {a: other for a, other in out.items() if a != axis}
    if whole != (pads or []):
        node.input[1] = s.constant(whole)
    return s.says(node.output[0], out)


def tile(s: Sizes, node: onnx.NodeProto) -> bool:
    """Tile along other axes, or as often as the data say."""
    if tiled(s, node):
        return True
    x, repeats = node.input[0], s.integers(1)
    for axis in s.of(x):
        if repeats is None or repeats[axis] != 1:
            raise s.refuse(x, axis)
    return s.says(node.output[0], s.of(x))
