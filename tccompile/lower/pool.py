"""Pools over spatial windows."""

from __future__ import annotations

import math

import numpy as np
import onnx_graphsurgeon as gs

from tccompile.ir.expr import (
    ACC,
    Epilogue,
    Expr,
    Index,
    Range,
    View,
    always_inside,
    call,
    cast,
    const,
    constant,
    coord,
    element,
    identity_view,
    load,
    quotient,
    remainder,
    reshape_view,
)
from tccompile.ir.extent import Shape
from tccompile.ir.ops import Pool, Scatter
from tccompile.ir.tensor import Tensor
from tccompile.ir.types import FLOAT8, DType
from tccompile.lower.builder import IMAGE, Builder, Reads, shape_of
from tccompile.lower.windows import Window, window

BYTES = (DType.I8, DType.U8)

MAX_INDEXED = 9
"""Elements of a window whose largest one's place can be asked for: each is a view of one expression."""


def max_pool(node: gs.Node, b: Builder) -> None:
    win, t = _window(node, b), node.inputs[0]
    indexed = len(node.outputs) > 1 and b.used(node.outputs[1])
    as_they_are = b.dtype(t) in (*BYTES, *FLOAT8) and len(t.shape) < 5 and not indexed
    x = b.image(t) if as_they_are else _floats(node, b)
    _pool(node, b, x, "max", win)
    if indexed:
        _places(node, b, x, win)


def _places(node: gs.Node, b: Builder, x: Tensor, win: Window) -> None:
    """MaxPool's output Indices: where in the flattened input the first of each window's largest elements lies."""
    y, places = b.value(node.outputs[0]), node.outputs[1]
    if math.prod(win.size) > MAX_INDEXED:
        raise b.refuse(
            f"its output Indices ({places.name}) is used, and its window has {math.prod(win.size)} elements",
            f"windows of at most {MAX_INDEXED} elements can say where their maximum is",
        )
    if b.attr("storage_order", 0):
        raise b.refuse(f"its output Indices ({places.name}) counts column by column (storage_order=1)", "use storage_order=0")
    reads = Reads(b, y.shape)
    largest = reads.view(identity_view(y.name, y.rank))
    spans = strides_of(x.shape)
    offset: Expr = const(0, DType.I64)
    for place in reversed(list(np.ndindex(*win.size))):  # the first comes last, so that it wins
        moves = [i * d for i, d in zip(place, win.dilations, strict=True)]
        at = [coord(2 + a) * s - p + m for a, (s, p, m) in enumerate(zip(win.strides, win.pads, moves, strict=True))]
        valid = tuple(Range(i, 0, n) for i, n in zip(at, x.shape[2:], strict=True) if not always_inside(i, 0, n, y.shape))
        value = reads.view(View(x.name, (coord(0), coord(1), *at), valid, -math.inf))
        here = const(sum(m * s for m, s in zip(moves, spans[2:], strict=True)), DType.I64)
        offset = call("where", call("equal", value, largest), here, offset)
    starts = [(1, 0), (1, 0), *zip(win.strides, win.pads, strict=True)]
    for axis, (stride, pad) in enumerate(starts):
        first = (np.arange(y.shape[axis]) * stride - pad) * spans[axis]
        table = b.literal(f"{places.name}.start{axis}", first.astype(np.int64))
        offset = call("add", offset, reads.view(View(table.name, (coord(axis),))))
    b.compute(b.result(places, IMAGE[x.rank]), offset, reads)


def strides_of(shape: Shape) -> tuple[int, ...]:
    """The steps of a row-major tensor without padding, in elements."""
    return tuple(math.prod(shape[a + 1 :]) for a in range(len(shape)))


def max_unpool(node: gs.Node, b: Builder) -> None:
    """Each element of x goes to its place in the flattened result; there is 0 elsewhere."""
    x, places, y = b.value(node.inputs[0]), node.inputs[1], node.outputs[0]
    size = tuple(b.attr("kernel_shape"))
    if not _side_by_side(node, size):
        _unpool_anywhere(node, b, x, b.value(places))
        return
    shape, found = shape_of(y), b.value(places)
    reads = Reads(b, shape)
    at = [coord(0), coord(1), *(quotient(coord(2 + a), k, shape) for a, k in enumerate(size))]
    valid = tuple(Range(i, 0, n) for i, n in zip(at, x.shape, strict=True) if not always_inside(i, 0, n, shape))
    value, place = reads.view(View(x.name, tuple(at), valid)), reads.view(View(found.name, tuple(at), valid, -1))
    here: Expr = const(0, DType.I64)
    for axis, step in enumerate(strides_of(shape)):
        table = b.literal(f"{y.name}.place{axis}", np.arange(shape[axis], dtype=np.int64) * step)
        here = call("add", here, reads.view(View(table.name, (coord(axis),))))
    b.compute(b.result(y, b.order_for(shape, node.inputs[0])), call("where", call("equal", place, here), value, 0.0), reads)


def _side_by_side(node: gs.Node, size: tuple[int, ...]) -> bool:
    """Whether the places are those of a MaxPool of the result's shape whose windows neither overlap nor pad: each has its own."""
    places = node.inputs[1]
    pool = places.inputs[0] if len(places.inputs) == 1 else None
    if pool is None or pool.op != "MaxPool":
        return False
    beside = list(pool.attrs["kernel_shape"]) == list(pool.attrs.get("strides", [])) == list(size)
    plain = not any(pool.attrs.get("pads", [])) and set(pool.attrs.get("dilations", [1])) == {1}
    return beside and plain and shape_of(pool.inputs[0]) == shape_of(node.outputs[0])


def _unpool_anywhere(node: gs.Node, b: Builder, x: Tensor, places: Tensor) -> None:
    """Places count the elements of the shape that the windows give; a larger result has zeros at the end of its axes."""
    y, axes = node.outputs[0], x.rank - 2
    steps, size, pads = b.attr("strides", [1] * axes), b.attr("kernel_shape"), b.attr("pads", [0] * 2 * axes)
    spatial = [(n - 1) * steps[a] + size[a] - pads[a] - pads[axes + a] for a, n in enumerate(x.shape[2:])]
    shape = (*x.shape[:2], *spatial)
    flat, whole = (math.prod(x.shape),), (math.prod(shape),)
    zeros = b.compute(b.new(f"{y.name}.zeros", whole), const(0.0), [])
    updates = b.copy(reshape_view(x.name, x.shape, flat), b.new(f"{x.name}.flat", flat))
    where = b.copy(reshape_view(places.name, places.shape, flat), b.new(f"{places.name}.flat", flat, DType.I64))
    result = b.new(f"{y.name}.flat", whole)
    b.emit(Scatter, result, x=zeros.name, updates=updates.name, at=(element(where.name, [coord(0)], whole[0]),))
    out = shape_of(y)
    valid = tuple(Range(coord(a), 0, n) for a, n in enumerate(shape) if n < out[a])
    linear = constant(0)
    for a, n in enumerate(shape):
        linear = linear * n + coord(a)
    b.copy(View(result.name, (linear,), valid), b.result(y))


def average_pool(node: gs.Node, b: Builder) -> None:
    win = _window(node, b)
    _pool(node, b, _floats(node, b), "mean", win, count_pads=bool(b.attr("count_include_pad", 0)))


def lp_pool(node: gs.Node, b: Builder) -> None:
    """(sum of |x|^p)^(1/p): the mean of |x|^p, with everything beyond the edges counted as zero, times the window's size."""
    x, y = node.inputs[0], node.outputs[0]
    p = float(b.attr("p", 2))
    win = _window(node, b)
    ends = tuple(map(max, win.end_pads, win.reach(shape_of(x)[2:], shape_of(y)[2:])))
    win = Window(win.size, win.strides, win.dilations, win.pads, ends)
    reads = Reads(b, shape_of(x))
    powers = b.compute(b.new(f"{y.name}.powers", shape_of(x), order=IMAGE[len(x.shape)]), power(reads.broadcast(x), p), reads)
    total = call("mul", ACC, float(math.prod(win.size)))
    _pool(node, b, powers, "mean", win, count_pads=True, expr=root(total, p))


def power(x: Expr, p: float) -> Expr:
    """|x|^p"""
    return call("mul", x, x) if p == 2 else call("abs", x) if p == 1 else call("pow", call("abs", x), p)


def root(x: Expr, p: float) -> Expr:
    """x^(1/p) for x >= 0"""
    return call("sqrt", x) if p == 2 else x if p == 1 else call("pow", x, 1.0 / p)


def _window(node: gs.Node, b: Builder) -> Window:
    return window(b, shape_of(node.inputs[0])[2:], tuple(b.attr("kernel_shape")))


def _floats(node: gs.Node, b: Builder) -> Tensor:
    """The input as an image of floats; 8-bit integers are exact in them."""
    x = node.inputs[0]
    dtype = b.dtype(x)
    if dtype is DType.F32:
        return b.image(x)
    if dtype not in BYTES:
        raise b.refuse(f"a pool of {dtype.value}", "cast its input to float")
    y = b.new(f"{x.name}.float", shape_of(x), order=IMAGE[len(x.shape)])
    reads = Reads(b, shape_of(x))
    return b.compute(y, cast(reads.view(identity_view(b.value(x).name, y.rank)), DType.F32), reads)


def _pool(node: gs.Node, b: Builder, x: Tensor, kind: str, win: Window, count_pads: bool = False, expr: Expr = ACC) -> None:
    y = b.result(node.outputs[0], IMAGE[x.rank])
    if x.rank == 5:
        _pool_volume(b, x, y, kind, win, count_pads, expr)
    else:
        _pool_image(b, x, y, kind, win, count_pads, expr)


def _pool_volume(b: Builder, x: Tensor, y: Tensor, kind: str, win: Window, count_pads: bool, expr: Expr) -> None:
    """Images first, then along the depth: the largest of the largest, or the mean of means, each of as many elements."""
    (n, c, d, h, w), (_, _, depth, p, q) = x.shape, y.shape
    frames = b.new(f"{y.name}.frames", (n * d, c, h, w), order=IMAGE[4])
    b.copy(reshape_axes(x, (0, 2), (1,), (3,), (4,)), frames)
    flat = b.new(f"{y.name}.flat", (n * d, c, p, q), order=IMAGE[4])
    _pool_image(b, frames, flat, kind, win.along(slice(1, 3)), count_pads, ACC)
    columns = b.new(f"{y.name}.columns", (n, c, d, p * q), order=IMAGE[4])
    shape = columns.shape
    where = (coord(0) * d + coord(2), coord(1), quotient(coord(3), q, shape), remainder(coord(3), q, shape))
    b.copy(View(flat.name, where), columns)
    deep = win.along(slice(0, 1))
    tall = Window((deep.size[0], 1), (deep.strides[0], 1), (deep.dilations[0], 1), (deep.pads[0], 0), (deep.end_pads[0], 0))
    pooled = b.new(f"{y.name}.pooled", (n, c, depth, p * q), order=IMAGE[4])
    _pool_image(b, columns, pooled, kind, tall, count_pads, expr if y.dtype is DType.F32 else ACC)
    value = load(0)
    if y.dtype is not DType.F32:
        value = cast(value, y.dtype.compute)
    b.compute(y, value, [View(pooled.name, (coord(0), coord(1), coord(2), coord(3) * q + coord(4)))])


def reshape_axes(x: Tensor, *groups: tuple[int, ...]) -> View:
    """Reads x with groups of its axes merged, each group's in row-major order."""
    shape = tuple(math.prod(x.shape[a] for a in group) for group in groups)
    index: dict[int, Index] = {}
    for axis, group in enumerate(groups):
        own = reshape_view(x.name, tuple(x.shape[a] for a in group), (shape[axis],)).index
        index |= {a: i.at([coord(axis)], shape) for a, i in zip(group, own, strict=True)}
    return View(x.name, tuple(index[a] for a in range(x.rank)))


def _pool_image(b: Builder, x: Tensor, y: Tensor, kind: str, win: Window, count_pads: bool, expr: Expr) -> None:
    b.emit(
        Pool,
        y,
        x=x.name,
        kind=kind,
        window=win.size,
        strides=win.strides,
        pads=win.pads,
        end_pads=win.end_pads,
        dilations=win.dilations,
        count_pads=count_pads,
        epilogue=Epilogue(cast(expr, y.dtype.compute)),
    )
