"""Resampling to extents that depend on sizes of a range: places and weights are computed when the plan runs.

Along each axis a small tensor holds the neighbour of each place, and another one how far the place is from it. Then one
Pointwise, or one for each row of taps, reads the neighbours.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import onnx_graphsurgeon as gs

from tccompile.ir.expr import Expr, Index, View, call, cast, const, constant, coord, element, greatest, identity_view, least
from tccompile.ir.extent import Extent
from tccompile.ir.types import DType
from tccompile.load.late import is_late
from tccompile.lower.builder import IMAGE, Builder, Reads, shape_of
from tccompile.lower.positions import position

TOGETHER = 4
"""Elements that one Pointwise reads for each of its own."""


def late_axis(y: str, axis: int) -> str:
    """What `is_late` calls an axis along which a Resize's result, and what it reads, differ in extent from size to size."""
    return f"{y}.axis{axis}"


def late_scales(y: str) -> str:
    """What it calls the scales of a Resize that are quotients of extents, in place of the same numbers at all sizes."""
    return f"{y}.scales"


@dataclass(frozen=True)
class Taps:
    """What is read along one axis: elements of x, and their weights as expressions of the distance to the first of them.

    distance  the tensor that has it, one for each place; "" where there is one tap only, of weight 1
    """

    axis: int
    index: Sequence[Index]
    distance: str


def late_resize(node: gs.Node, b: Builder) -> None:
    """Resize along axes that are late; others keep their extent."""
    x, t = b.value(node.inputs[0]), node.outputs[0]
    mode, shape = b.attr("mode", "nearest"), shape_of(t)
    axes = [a for a in range(len(shape)) if is_late(late_axis(t.name, a)) or x.shape[a] != shape[a]]
    taps = [_taps(node, b, t.name, axis, x.shape[axis], shape[axis]) for axis in axes]
    order = b.order_for(shape, node.inputs[0]) if mode == "nearest" else IMAGE.get(len(shape))
    *outer, inner = [list(range(len(along.index))) for along in taps]
    rows = list(itertools.product(*outer))
    each = max(1, TOGETHER // len(inner))
    parts = [rows[i : i + each] for i in range(0, len(rows), each)]
    sums = None
    for number, part in enumerate(parts):
        reads = Reads(b, shape)
        total = None if sums is None else reads.view(identity_view(sums.name, len(shape)))
        for steps in ((*row, last) for row in part for last in inner):
            index = [coord(a) for a in range(len(shape))]
            for along, step in zip(taps, steps, strict=True):
                index[along.axis] = along.index[step]
            value = reads.view(View(x.name, tuple(index)))
            for along, step in zip(taps, steps, strict=True):
                if along.distance:
                    value = call("mul", cast(value, DType.F32), _weight(b, reads, along, step))
            total = value if total is None else call("add", total, value)
        assert total is not None
        last = number == len(parts) - 1
        sums = b.compute(b.result(t, order) if last else b.new(f"{t.name}.sum{number}", shape, order=order), total, reads)


def _taps(node: gs.Node, b: Builder, name: str, axis: int, n: Extent, out: Extent) -> Taps:
    """The taps along an axis of extent n, of which `out` elements are made."""
    mode, reads = b.attr("mode", "nearest"), Reads(b, (out,))
    o = cast(position(reads, f"{name}.{axis}", coord(0), out), DType.F32)
    at = _coordinates(b, o, n, out, _scale(node, b, name, axis, n, out))
    shape, i = (out,), [coord(axis)]
    if mode == "nearest":
        near = call("min", call("max", _nearest(b, at), 0.0), float(n - 1))
        table = b.compute(b.new(f"{name}.nearest{axis}", shape, DType.I32), cast(near, DType.I64), reads)
        return Taps(axis, [element(table.name, i, n)], "")
    floor = call("floor", at)  # from -1 to n - 1: the table has the element after it
    after = call("min", call("max", call("add", floor, 1.0), 0.0), float(n))
    table = b.compute(b.new(f"{name}.after{axis}", shape, DType.I32), cast(after, DType.I64), reads)
    distance = b.compute(b.new(f"{name}.distance{axis}", shape), call("sub", at, floor), reads)
    found = element(table.name, i, n + 1)
    whole = tuple(n + 1 if a == axis else 1 for a in range(axis + 1))
    steps = (-1, 0) if mode == "linear" else (-2, -1, 0, 1)
    index = [least(greatest(found + step, constant(0), whole), constant(n - 1), whole) for step in steps]
    return Taps(axis, index, distance.name)


def _weight(b: Builder, reads: Reads, along: Taps, step: int) -> Expr:
    """The weight of a tap, by how far the place is from the neighbour below it."""
    d = reads.view(View(along.distance, (coord(along.axis),)))
    if len(along.index) == 2:
        return d if step else call("sub", 1.0, d)
    a = float(b.attr("cubic_coeff_a", -0.75))
    from_tap = (call("add", d, 1.0), d, call("sub", 1.0, d), call("sub", 2.0, d))[step]
    square = call("mul", from_tap, from_tap)
    if step in (1, 2):  # (a + 2) d³ - (a + 3) d² + 1
        return call("add", call("mul", call("sub", call("mul", from_tap, a + 2), a + 3), square), 1.0)
    inner = call("add", call("mul", call("sub", call("mul", from_tap, a), 5 * a), from_tap), 8 * a)
    return call("sub", call("mul", inner, from_tap), 4 * a)  # a d³ - 5a d² + 8a d - 4a


def _scale(node: gs.Node, b: Builder, name: str, axis: int, n: Extent, out: Extent) -> Expr:
    """How many elements there are for one of x, as the model says it or as the quotient of extents in float32."""
    scales = b.array(2, "scales")
    if scales is not None and scales.size and not is_late(late_scales(name)):
        axes = [a % len(node.outputs[0].shape) for a in b.attr("axes") or range(len(node.outputs[0].shape))]
        return const(float(np.float32(scales.reshape(-1)[axes.index(axis)])))
    return call("div", const(float(out)), const(float(n)))


def _coordinates(b: Builder, o: Expr, n: Extent, out: Extent, scale: Expr) -> Expr:
    """Where elements lie on the input's axis, as `resize.coordinates` has it."""
    match b.attr("coordinate_transformation_mode", "half_pixel"):
        case "asymmetric":
            return call("div", o, scale)
        case "align_corners":
            return call("div", call("mul", o, float(n - 1)), float(out - 1)) if out > 1 else o
        case "pytorch_half_pixel" if out <= 1:
            return call("mul", o, 0.0)
        case "tf_half_pixel_for_nn":
            return call("div", call("add", o, 0.5), scale)
        case "half_pixel_symmetric":
            share = call("div", const(float(out)), call("mul", scale, float(n)))
            beside = call("mul", call("mul", const(float(n)), 0.5), call("sub", 1.0, share))
            return call("sub", call("add", beside, call("div", call("add", o, 0.5), scale)), 0.5)
    return call("sub", call("div", call("add", o, 0.5), scale), 0.5)


def _nearest(b: Builder, at: Expr) -> Expr:
    match b.attr("nearest_mode", "round_prefer_floor"):
        case "round_prefer_floor":
            return call("ceil", call("sub", at, 0.5))
        case "round_prefer_ceil":
            return call("floor", call("add", at, 0.5))
        case rounding:
            return call(str(rounding), at)
