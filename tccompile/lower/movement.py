"""Ops that only move data: a Pointwise whose one view says where each element comes from.

The `*_view` functions build these views in canonical form: later stages recognise them by comparing for equality.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import onnx_graphsurgeon as gs

from tccompile.ir.expr import (
    Index,
    Range,
    View,
    always_inside,
    broadcast_view,
    call,
    constant,
    coord,
    element,
    greatest,
    identity_view,
    least,
    quotient,
    remainder,
    reshape_view,
)
from tccompile.ir.extent import Shape
from tccompile.ir.tensor import Tensor
from tccompile.ir.types import DType
from tccompile.lower.builder import Builder, Reads, shape_of
from tccompile.lower.lines import scatter_rows
from tccompile.lower.positions import position
from tccompile.rewrites.transposes import ELEMENTWISE

# --- Views -----------------------------------------------------------------------------------------------------------


def transpose_view(tensor: str, perm: Sequence[int]) -> View:
    """Axis i of the result is axis perm[i] of the tensor."""
    index = [constant(0)] * len(perm)
    for i, axis in enumerate(perm):
        index[axis] = coord(i)
    return View(tensor, tuple(index))


def slice_view(tensor: str, starts: Sequence[int], steps: Sequence[int]) -> View:
    """Element start + step * coordinate along each axis."""
    return View(tensor, tuple(coord(a) * step + start for a, (start, step) in enumerate(zip(starts, steps, strict=True))))


def depth_to_space_view(tensor: str, shape: Shape, block: int, mode: str = "DCR") -> View:
    """Reads (N, b*b*C, H, W) as `shape` (N, C, b*H, b*W): channels of `tensor` in order (i, j, C) for DCR, (C, i, j) for CRD."""
    n, c, h, w = map(coord, range(4))
    i, j = remainder(h, block, shape), remainder(w, block, shape)
    channel = (i * block + j) * shape[1] + c if mode == "DCR" else c * (block * block) + i * block + j
    return View(tensor, (n, channel, quotient(h, block, shape), quotient(w, block, shape)))


def space_to_depth_view(tensor: str, shape: Shape, block: int, mode: str = "DCR") -> View:
    """Reads (N, C, b*H, b*W) as `shape` (N, b*b*C, H, W), with channels in order (i, j, C) for DCR, (C, i, j) for CRD."""
    n, k, h, w = map(coord, range(4))
    channels = shape[1] // (block * block)
    if mode == "DCR":
        phase, c = quotient(k, channels, shape), remainder(k, channels, shape)
    else:
        phase, c = remainder(k, block * block, shape), quotient(k, block * block, shape)
    i, j = quotient(phase, block, shape), remainder(phase, block, shape)
    return View(tensor, (n, c, h * block + i, w * block + j))


def tile_view(tensor: str, tensor_shape: Shape, shape: Shape) -> View:
    """Reads the tensor again and again along each axis."""
    return View(tensor, tuple(remainder(coord(a), n, shape) if n else constant(0) for a, n in enumerate(tensor_shape)))


def pad_view(tensor: str, extents: Shape, shape: Shape, before: Sequence[int], mode: str, fill: float = 0.0) -> View:
    """Reads a tensor of `extents` with `before` elements more (less, if negative) at the start of each axis.

    mode  "constant" (elements outside are `fill`), "edge", "reflect" (the edge itself is not repeated), or "wrap"
    """
    index, valid = [], []
    for axis, (n, start) in enumerate(zip(extents, before, strict=True)):
        i = coord(axis) - start
        if always_inside(i, 0, n, shape):
            index.append(i)
            continue
        if mode == "constant":
            valid.append(Range(i, 0, n))
        elif mode == "edge":
            i = least(greatest(i, constant(0), shape), constant(n - 1), shape)
        elif mode == "reflect":
            i = _reflected(i, n, shape)
        else:
            i = remainder(i, n, shape)
        index.append(i)
    return View(tensor, tuple(index), tuple(valid), fill)


def _reflected(i: Index, n: int, shape: Shape) -> Index:
    """i folded back at 0 and at n - 1, as often as need be."""
    if n == 1:
        return constant(0)
    period = 2 * (n - 1)
    lo, hi = i.bounds(shape)
    once = max(-lo, hi) <= period  # then an absolute value does, which is cheaper than a division
    i = greatest(i, -i, shape) if once else remainder(i, period, shape)
    return least(i, constant(period) - i, shape)


# --- Converters ------------------------------------------------------------------------------------------------------


def dropout(node: gs.Node, b: Builder) -> None:
    """Nothing but for training, which `load` would have taken away."""
    raise b.refuse("it drops values at random (training_mode)", "export the model for inference")


def copy(node: gs.Node, b: Builder) -> None:
    """Identity."""
    x, y = node.inputs[0], node.outputs[0]
    source = b.value(x)
    b.copy(identity_view(source.name, source.rank), b.result(y, b.order_for(shape_of(y), x)))


def reshape(node: gs.Node, b: Builder) -> None:
    """Reshape, Flatten, Squeeze and Unsqueeze: the output's shape says it all."""
    y = node.outputs[0]
    x = b.value(node.inputs[0])
    shape = shape_of(y)
    # Pixels that become a sequence, (N, C, H, W) → (N, C, H·W) → (N, H·W, C), keep their channels innermost all the way.
    images = x.rank >= 3 and len(shape) >= 3 and x.shape[:2] == shape[:2] and shape[1] > 1 and x.order[-1] == 1
    order = (0, *range(2, len(shape)), 1) if images and _turned(y) else None
    b.copy(reshape_view(x.name, x.shape, shape), b.result(y, order))


def _turned(t: gs.Tensor) -> bool:
    """Whether a transposition that puts axis 1 last follows, at once or behind what is computed of each element."""
    seen, left = {t.name}, [t]
    while left:
        for node in left.pop().outputs:
            if node.op == "Transpose" and list(node.attrs.get("perm", (0,)))[-1] == 1:
                return True
            y = node.outputs[0]
            if node.op in ELEMENTWISE and y.name not in seen and shape_of(y) == shape_of(t):
                seen.add(y.name)
                left.append(y)
    return False


def transpose(node: gs.Node, b: Builder) -> None:
    """The result lies in memory as the input does: no more than a change of names of the axes."""
    y = node.outputs[0]
    x = b.value(node.inputs[0])
    perm = b.attr("perm") or list(reversed(range(x.rank)))
    b.copy(transpose_view(x.name, perm), b.result(y, tuple(perm.index(a) for a in x.order)))


def slice_(node: gs.Node, b: Builder) -> None:
    x = node.inputs[0]
    extents = shape_of(x)
    starts, steps = [0] * len(extents), [1] * len(extents)
    begin = b.ints(1, "starts") or []
    axes = b.ints(3, "axes") or list(range(len(begin)))
    strides = b.ints(4, "steps") or [1] * len(begin)
    for start, axis, step in zip(begin, axes, strides, strict=True):
        axis, n = b.axis(axis, len(extents)), extents[b.axis(axis, len(extents))]
        start += n if start < 0 else 0
        starts[axis] = min(max(start, 0), n if step > 0 else n - 1)
        steps[axis] = min(max(step, -n), n)  # beyond the axis, whatever it is
    _move(node, b, slice_view(b.value(x).name, starts, steps))


def gather(node: gs.Node, b: Builder) -> None:
    """Constant indices at equal distances: a slice, or one element along the axis; others are read as they are needed."""
    x, indices, y = node.inputs[0], node.inputs[1], node.outputs[0]
    shape, rank = shape_of(y), len(x.shape)
    axis, count = b.axis(b.attr("axis", 0), rank), len(indices.shape)
    source = b.value(x)
    at = _regular(b, indices, source.shape[axis], axis, shape) if isinstance(indices, gs.Constant) else None
    if at is None:
        at = element(b.value(indices).name, [coord(axis + a) for a in range(count)], source.shape[axis])
    index = [at if a == axis else coord(a if a < axis else a + count - 1) for a in range(rank)]
    order = b.order_for(shape, x) if count == 1 else None
    b.copy(View(source.name, tuple(index)), b.result(y, order))


def _regular(b: Builder, indices: gs.Constant, extent: int, axis: int, shape: Shape) -> Index | None:
    """Constant indices into an axis as a function of the result's coordinates from `axis` on: linear, or all of it rolled."""
    values = np.asarray(indices.values)
    flat = _checked(b, values, extent).reshape(-1)
    if values.shape == (extent,) and extent and np.array_equal(flat, (flat[0] + np.arange(extent)) % extent):
        return remainder(coord(axis) + int(flat[0]), extent, shape)
    steps = {int(d) for d in flat[1:] - flat[:-1]} or {0}
    if len(steps) > 1 or not len(flat):
        return None
    (step,) = steps
    linear = constant(int(flat[0]))
    for a, count in reversed(list(enumerate(values.shape))):
        linear = linear + coord(axis + a) * step
        step *= count
    return linear


def _checked(b: Builder, indices: np.ndarray, extents: np.ndarray | int) -> np.ndarray:
    """Constant indices from 0 on, into axes of `extents` (which the indices' last axis numbers, if they are several)."""
    wrong = (indices < -np.asarray(extents)) | (indices >= extents)
    if wrong.any():
        raise b.refuse(f"it has the index {indices[wrong][0]} into {extents} elements", "check the model with ONNX Runtime")
    return np.where(indices < 0, indices + extents, indices)


def gather_each(node: gs.Node, b: Builder) -> None:
    """Of each row elements at its own indices."""
    x, indices, y = b.value(node.inputs[0]), b.value(node.inputs[1]), node.outputs[0]
    axis, count = b.attr("axis"), indices.rank - 1
    at = element(indices.name, [coord(0), *(coord(axis + a) for a in range(count))], x.shape[axis])
    index = [at if a == axis else coord(a if a < axis else a + count - 1) for a in range(x.rank)]
    order = b.order_for(shape_of(y), node.inputs[0]) if count == 1 else None
    b.copy(View(x.name, tuple(index)), b.result(y, order))


def gather_elements(node: gs.Node, b: Builder) -> None:
    x, indices, y = b.value(node.inputs[0]), b.value(node.inputs[1]), node.outputs[0]
    axis, here = b.axis(b.attr("axis", 0), x.rank), [coord(a) for a in range(x.rank)]
    index = [element(indices.name, here, x.shape[axis]) if a == axis else here[a] for a in range(x.rank)]
    b.copy(View(x.name, tuple(index)), b.result(y, b.order_for(shape_of(y), node.inputs[0])))


def gather_nd(node: gs.Node, b: Builder) -> None:
    """Rows of indices (…, k): each names a part of x by its coordinates along k axes after the batch's."""
    x, indices, y = b.value(node.inputs[0]), b.value(node.inputs[1]), node.outputs[0]
    batch, rows, k = b.attr("batch_dims", 0), indices.rank - 1, indices.shape[-1]
    here = [coord(a) for a in range(rows)]
    named = [element(indices.name, [*here, constant(j)], x.shape[batch + j]) for j in range(k)]
    rest = [coord(rows + a) for a in range(x.rank - batch - k)]
    b.copy(View(x.name, (*here[:batch], *named, *rest)), b.result(y))


def scatter_nd(node: gs.Node, b: Builder) -> None:
    """Constant indices that are a box of the data, in order: the updates inside it, the data around it."""
    source, indices, updates = node.inputs
    rows = _box(b, indices, shape_of(source)) if b.attr("reduction", "none") == "none" else None
    if rows is None:
        scatter_rows(node, b)
        return
    x, u, y = b.value(source), b.value(updates), node.outputs[0]
    steps = [int(v[1] - v[0]) if len(v) > 1 else 1 for v in rows]
    shape, box = x.shape, (*map(len, rows), *x.shape[len(rows) :])
    index, valid, partial = [coord(a) for a in range(x.rank)], [], []
    for a, (v, step) in enumerate(zip(rows, steps, strict=True)):
        if len(v) < shape[a]:
            inside = coord(a) - int(v[0])
            index[a] = quotient(inside, step, shape)
            valid.append(Range(inside, 0, step * len(v)))
            partial.append((a, np.isin(np.arange(shape[a]), v).astype(np.float32)))
    view = reshape_view(u.name, u.shape, box).at(index, shape)
    reads = Reads(b, shape)
    value, old = reads.view(replace(view, valid=tuple(valid))), reads.view(identity_view(x.name, x.rank))
    for a, mask in partial:
        inside_a = reads.view(View(b.literal(f"{y.name}.inside{a}", mask).name, (coord(a),)))
        value = call("where", call("greater", inside_a, 0.0), value, old)
    b.compute(b.result(y, b.order_for(shape, source)), value, reads)


def _box(b: Builder, indices: gs.Tensor, shape: Shape) -> list[np.ndarray] | None:
    """The values along each axis of constant rows of indices that are those of a slice, in order; else None."""
    if not isinstance(indices, gs.Constant) or not indices.shape[-1] or 0 in indices.shape:
        return None
    k = indices.shape[-1]
    rows = _checked(b, np.asarray(indices.values).reshape(-1, k), np.array(shape[:k]))
    values = [np.unique(rows[:, a]) for a in range(k)]
    if any(len(v) > 1 and (np.diff(v) != v[1] - v[0]).any() for v in values):
        return None
    grid = np.stack(np.meshgrid(*values, indexing="ij"), -1).reshape(-1, k)
    return values if np.array_equal(rows, grid) else None


def compress(node: gs.Node, b: Builder) -> None:
    """The elements along an axis (or of x as one row) where a constant condition is true."""
    condition, t = b.array(1, "condition"), node.outputs[0]
    assert condition is not None
    x, kept = b.value(node.inputs[0]), np.flatnonzero(condition)
    places, axis = b.literal(f"{t.name}.kept", kept.astype(np.int64)), b.attr("axis")
    if axis is None:
        flat = element(places.name, [coord(0)], x.size)
        index = [i.at([flat], shape_of(t)) for i in reshape_view(x.name, x.shape, (x.size,)).index]
    else:
        axis = b.axis(axis, x.rank)
        index = [element(places.name, [coord(a)], n) if a == axis else coord(a) for a, n in enumerate(x.shape)]
    b.copy(View(x.name, tuple(index)), b.result(t))


def reverse_sequence(node: gs.Node, b: Builder) -> None:
    """Along the time axis the first `lengths` elements of each sequence in reverse, the others as they are."""
    x, lengths, t = b.value(node.inputs[0]), b.value(node.inputs[1]), node.outputs[0]
    batch, time = b.attr("batch_axis", 1), b.attr("time_axis", 0)
    shape = (x.shape[batch], x.shape[time])
    reads = Reads(b, shape)
    length = reads.view(View(lengths.name, (coord(0),)))
    step = position(reads, t.name, coord(1), shape[1])
    turned = call("where", call("less", step, length), call("sub", call("sub", length, step), 1), step)
    where = b.compute(b.new(f"{t.name}.where", shape, DType.I32), turned, reads)
    here = [coord(a) for a in range(x.rank)]
    index = [element(where.name, [coord(batch), coord(time)], shape[1]) if a == time else here[a] for a in range(x.rank)]
    b.copy(View(x.name, tuple(index)), b.result(t, b.order_for(shape_of(t), node.inputs[0])))


def tensor_scatter(node: gs.Node, b: Builder) -> None:
    """A cache (B, …) whose elements along an axis, from a place that each sequence has, are an update's; others are as before."""
    x, update, t = b.value(node.inputs[0]), b.value(node.inputs[1]), node.outputs[0]
    axis, starts = b.axis(b.attr("axis", -2), x.rank), b.input(2)
    n, shape = x.shape[axis], x.shape
    at = coord(axis)
    if starts is not None:
        at = at - element(b.value(starts).name, [coord(0)], n)
    if b.attr("mode", "linear") == "circular":
        at = remainder(at, n, shape)
    inside = (Range(at, 0, update.shape[axis]),)
    index = tuple(at if a == axis else coord(a) for a in range(x.rank))
    ones = b.literal(f"{t.name}.ones", np.ones(update.shape[axis], np.int32))
    reads = Reads(b, shape)
    new, old = reads.view(View(update.name, index, inside)), reads.view(identity_view(x.name, x.rank))
    there = reads.view(View(ones.name, (at,), inside))
    b.compute(b.result(t, b.order_for(shape, node.inputs[0])), call("where", call("equal", there, 1), new, old), reads)


def split(node: gs.Node, b: Builder) -> None:
    x = node.inputs[0]
    axis = b.axis(b.attr("axis", 0), len(x.shape))
    source, start = b.value(x), 0
    for y in node.outputs:
        if y.name:
            starts = [start if a == axis else 0 for a in range(source.rank)]
            b.copy(slice_view(source.name, starts, [1] * source.rank), b.result(y, b.order_for(shape_of(y), x)))
            start += y.shape[axis]


def concat(node: gs.Node, b: Builder) -> None:
    """Each input is copied into its slice of the output, which nobody else writes."""
    y = node.outputs[0]
    shape = shape_of(y)
    parts = [t for t in node.inputs if t.shape[b.axis(node.attrs["axis"], len(shape))]]
    concatenate(b, parts, b.result(y, b.order_for(shape, *parts)), b.axis(node.attrs["axis"], len(shape)))


def concatenate(b: Builder, parts: Sequence[gs.Tensor], y: Tensor, axis: int) -> None:
    start = 0
    for i, t in enumerate(parts):
        x = b.value(t)
        end = start + x.shape[axis]
        part = slice_of(b.unique(f"{y.name}[{i}]"), y, axis, start, end)
        b.copy(identity_view(x.name, x.rank), b.add(part))
        start = end


def slice_of(name: str, parent: Tensor, axis: int, start: int, end: int) -> Tensor:
    """The elements start … end - 1 of `parent` along `axis`, as a view of it; the last of them has its padding too."""

    def cut(extents: Shape, n: int) -> Shape:
        return (*extents[:axis], n, *extents[axis + 1 :])

    rest = parent.padded[axis] - start if end == parent.shape[axis] else end - start
    return replace(
        parent,
        name=name,
        shape=cut(parent.shape, end - start),
        padded=cut(parent.padded, rest),
        base=parent.storage,
        offset=parent.offset + start * parent.strides[axis],
    )


def expand(node: gs.Node, b: Builder) -> None:
    x = b.value(node.inputs[0])
    _move(node, b, broadcast_view(x.name, x.shape, shape_of(node.outputs[0])))


def tile(node: gs.Node, b: Builder) -> None:
    x = b.value(node.inputs[0])
    _move(node, b, tile_view(x.name, x.shape, shape_of(node.outputs[0])))


def pad(node: gs.Node, b: Builder) -> None:
    x, y = node.inputs[0], node.outputs[0]
    rank = len(x.shape)
    pads = b.ints(1, "pads") or []
    axes = [b.axis(a, rank) for a in b.ints(3, "axes") or range(rank)]
    before = [0] * rank
    for axis, start in zip(axes, pads, strict=False):
        before[axis] = start
    value = b.array(2, "padding value")
    fill = 0.0 if value is None or value.size == 0 else value.reshape(-1)[0].item()
    _move(node, b, pad_view(b.value(x).name, shape_of(x), shape_of(y), before, b.attr("mode", "constant"), fill))


def depth_to_space(node: gs.Node, b: Builder) -> None:
    y = shape_of(node.outputs[0])
    _move(node, b, depth_to_space_view(b.value(node.inputs[0]).name, y, b.attr("blocksize"), b.attr("mode", "DCR")))


def space_to_depth(node: gs.Node, b: Builder) -> None:
    y = shape_of(node.outputs[0])
    _move(node, b, space_to_depth_view(b.value(node.inputs[0]).name, y, b.attr("blocksize"), b.attr("mode", "DCR")))


def _move(node: gs.Node, b: Builder, view: View) -> None:
    """y = what the view reads, in the layout of the node's first input: the axes correspond."""
    y = node.outputs[0]
    b.copy(view, b.result(y, b.order_for(shape_of(y), node.inputs[0])))
