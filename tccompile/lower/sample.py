"""Ops that read an image at computed places: grids of them, and regions of interest.

The places become integer tensors and weights, a Pointwise each; then one Pointwise reads the neighbours at these indices.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import onnx_graphsurgeon as gs

from tccompile.ir.expr import (
    ACC,
    Epilogue,
    Expr,
    Index,
    Range,
    View,
    call,
    cast,
    const,
    constant,
    coord,
    element,
    identity_view,
    quotient,
    remainder,
)
from tccompile.ir.extent import Shape
from tccompile.ir.ops import Conv
from tccompile.ir.tensor import Tensor
from tccompile.ir.types import DType
from tccompile.ir.weights import transform
from tccompile.load.constants import recipe_of
from tccompile.load.late import is_late
from tccompile.lower.builder import IMAGE, Builder, Reads, shape_of
from tccompile.lower.positions import position
from tccompile.lower.reduce import REDUCTIONS, combine

CUBIC = -0.75
"""The coefficient of the cubic kernel (Keys, 1981) that GridSample takes."""


def affine_grid(node: gs.Node, b: Builder) -> None:
    """y (N, D, H, W, 3) or (N, H, W, 2) = theta @ (x, y, z, 1) for places from -1 to 1, of corners or of centres."""
    size, y = b.ints(1, "size"), node.outputs[0]
    assert size is not None
    shape, corners, count = shape_of(y), bool(b.attr("align_corners", 0)), len(size) - 2
    reads = Reads(b, shape)
    theta, total = b.value(node.inputs[0]), None
    for j in range(count + 1):
        value = reads.view(View(theta.name, (coord(0), coord(count + 1), constant(j))))
        if j < count:
            value = call("mul", value, _grid_places(b, reads, y.name, count - j, corners))  # x runs along the last axis
        total = value if total is None else call("add", total, value)
    assert total is not None
    b.compute(b.result(y), total, reads)


def late_places(y: str, axis: int) -> str:
    """What `is_late` calls the places along an axis of an AffineGrid's result whose extent depends on a size."""
    return f"{y}.places{axis}"


def _grid_places(b: Builder, reads: Reads, y: str, axis: int, corners: bool) -> Expr:
    """The places along an axis of the grid, from -1 to 1."""
    n = reads.shape[axis]
    if n > 1 and is_late(late_places(y, axis)):  # whole numbers up to the quotient
        place = cast(position(reads, f"{y}.{axis}", coord(axis), n), DType.F32)
        from_middle = call("sub", call("mul", place, 2.0), float(n - 1))
        return call("div", from_middle, float(n - 1 if corners else n))
    at = np.linspace(1, -1, n)[::-1] if corners else (2 * np.arange(n) + 1) / n - 1  # of one corner the last, 1
    places = b.literal(f"{y}.places{axis}", at.astype(np.float32))
    return reads.view(View(places.name, (coord(axis),)))


def grid_sample(node: gs.Node, b: Builder) -> None:
    """y (N, C, …) = x at the places that grid (N, …, axes) says, from -1 to 1 along each axis, the last axis first."""
    x, grid, y = b.value(node.inputs[0]), b.value(node.inputs[1]), node.outputs[0]
    mode, pads = b.attr("mode", "linear"), b.attr("padding_mode", "zeros")
    corners, axes = bool(b.attr("align_corners", 0)), x.rank - 2
    shape = (grid.shape[0], *grid.shape[1:-1])  # of the places
    here = [coord(a) for a in range(len(shape))]
    spots = []
    for axis in range(axes):
        n = x.shape[2 + axis]
        reads = Reads(b, shape)
        g = reads.view(View(grid.name, (*here, constant(axes - 1 - axis))))
        u = (
            call("mul", call("add", g, 1.0), (n - 1) / 2)
            if corners
            else call("mul", call("add", call("mul", g, n), n - 1.0), 0.5)
        )
        if mode != "cubic":
            u = _kept_inside(u, n, pads, corners)
        place = b.compute(b.new(f"{y.name}.place{axis}", shape), u, reads)
        spots.append(_spots(b, f"{y.name}.{axis}", place, n, mode, pads, corners))
    _gather(b, x, y, spots, shape)


def _kept_inside(u: Expr, n: int, pads: str, corners: bool) -> Expr:
    """A place as it is before anything is read: clamped, or reflected at the edges."""
    if pads == "border":
        return call("min", call("max", u, 0.0), n - 1.0)
    if pads == "reflection":
        low, high = (0.0, n - 1.0) if corners else (-0.5, n - 0.5)
        return call("min", call("max", _reflected(u, low, high), 0.0), n - 1.0)
    return u


def _reflected(u: Expr, low: float, high: float) -> Expr:
    """u folded back at `low` and `high`, as often as need be."""
    span = high - low
    if span <= 0:
        return const(0.0)
    turn = call("floor_mod", call("sub", u, low), 2 * span)
    return call("add", call("min", turn, call("sub", 2 * span, turn)), low)


Spot = tuple[Tensor, Tensor | None]
"""Indices along an axis, as an int32 tensor, and the weights of what is read there (None: 1), for each place."""


def _spots(b: Builder, name: str, place: Tensor, n: int, mode: str, pads: str, corners: bool) -> list[Spot]:
    """Which elements along an axis of extent n are read for each place, and with which weights: 0 outside."""
    shape = place.shape

    def tensor(text: str, dtype: DType, value: Callable[[Expr], Expr]) -> Tensor:
        reads = Reads(b, shape)
        return b.compute(b.new(f"{name}.{text}", shape, dtype), value(reads.view(identity_view(place.name, len(shape)))), reads)

    def index(u: Expr, step: int) -> Expr:
        """The element that is `step` from the one below u, as a float, wherever it may be."""
        return call("round", u) if mode == "nearest" else call("add", call("floor", u), float(step))

    def chosen(step: int, u: Expr) -> Expr:
        i = index(u, step)
        if mode == "cubic" and pads == "reflection":
            low, high = (0.0, n - 1.0) if corners else (-0.5, n - 0.5)
            i = _reflected(i, low, high)
        return cast(call("min", call("max", i, 0.0), n - 1.0), DType.I64)

    def weight(step: int, u: Expr) -> Expr:
        t = call("sub", u, call("floor", u))
        value = const(1.0)
        if mode == "linear":
            value = t if step else call("sub", 1.0, t)
        elif mode == "cubic":
            value = _cubic(call("abs", call("sub", t, float(step))), abs(step - 0.5) < 1)
        if pads == "zeros":
            i = index(u, step)
            there = call("bit_and", call("greater_equal", i, 0.0), call("less_equal", i, n - 1.0))
            value = call("where", there, value, 0.0)
        return value

    steps = {"nearest": [0], "linear": [0, 1], "cubic": [-1, 0, 1, 2]}[mode]
    plain = mode == "nearest" and pads != "zeros"
    found: list[Spot] = []
    for k, step in enumerate(steps):
        at = tensor(f"index{k}", DType.I32, partial(chosen, step))
        found.append((at, None if plain else tensor(f"weight{k}", DType.F32, partial(weight, step))))
    return found


def _cubic(d: Expr, near: bool) -> Expr:
    """The cubic kernel at distance d, at most 1 or between 1 and 2."""
    a = CUBIC
    if near:  # (a + 2) d³ - (a + 3) d² + 1
        return call("add", call("mul", call("mul", call("sub", call("mul", a + 2, d), a + 3), d), d), 1.0)
    inner = call("add", call("mul", call("sub", call("mul", a, d), 5 * a), d), 8 * a)  # a d³ - 5a d² + 8a d - 4a
    return call("sub", call("mul", inner, d), 4 * a)


def _gather(b: Builder, x: Tensor, t: gs.Tensor, spots: Sequence[Sequence[Spot]], shape: Shape) -> None:
    """y (N, C, …) = the sum over all combinations of spots along the axes; places are (N, …). A row of spots at a time."""
    whole = shape_of(t)
    at = [coord(0), *(coord(2 + a) for a in range(len(shape) - 1))]
    order = IMAGE.get(len(whole))
    rows = list(itertools.product(*spots[:-1]))
    sums: Tensor | None = None
    for number, row in enumerate(rows):
        reads = Reads(b, whole)
        total: Expr | None = None
        for spot in spots[-1]:
            combination = (*row, spot)
            index: list[Index] = [coord(0), coord(1)]
            index += [element(i.name, at, n) for (i, _), n in zip(combination, x.shape[2:], strict=True)]
            value = reads.view(View(x.name, tuple(index)))
            for _, weight in combination:
                if weight is not None:
                    value = call("mul", value, reads.view(View(weight.name, tuple(at))))
            total = value if total is None else call("add", total, value)
        assert total is not None
        if sums is not None:
            total = call("add", total, reads.view(identity_view(sums.name, len(whole))))
        last = number == len(rows) - 1
        sums = b.compute(b.result(t, order) if last else b.new(f"{t.name}.sum{number}", whole, order=order), total, reads)


def deform_conv(node: gs.Node, b: Builder) -> None:
    """A convolution whose taps read x (N, C, H, W) at places moved by offsets: what they read are the channels of a 1×1 one."""
    x, w, offset, t = b.value(node.inputs[0]), node.inputs[1], b.value(node.inputs[2]), node.outputs[0]
    (n, c, *extents), (o, share, *size), (_, _, *out) = x.shape, shape_of(w), shape_of(t)
    if len(extents) != 2:
        raise b.refuse(f"it has {len(extents)} spatial axes", "images of two spatial axes are supported")
    groups, moved, taps = b.attr("group", 1), b.attr("offset_group", 1), math.prod(size)
    strides, dilations, pads = b.attr("strides", [1, 1]), b.attr("dilations", [1, 1]), b.attr("pads", [0] * 4)
    shape = (n, moved * taps, *out)  # of the places: those of all taps, for each group of channels that moves as one
    spots: list[list[Spot]] = []
    for axis, extent in enumerate(extents):
        tap = np.indices(size)[axis].reshape(-1, 1)
        rest = np.arange(out[axis]) * strides[axis] - pads[axis] + tap * dilations[axis]
        at_rest = b.literal(f"{t.name}.rest{axis}", rest.astype(np.float32))
        reads = Reads(b, shape)
        by = reads.view(View(offset.name, (coord(0), coord(1) * 2 + axis, coord(2), coord(3))))
        still = reads.view(View(at_rest.name, (remainder(coord(1), taps, shape), coord(2 + axis))))
        place = b.compute(b.new(f"{t.name}.place{axis}", shape), call("add", still, by), reads)
        spots.append(_spots(b, f"{t.name}.{axis}", place, extent, "linear", "zeros", True))
    whole = (n, groups * taps * share, *out)
    channel = quotient(coord(1), taps * share, whole) * share + remainder(coord(1), share, whole)
    number = quotient(channel, c // moved, whole) * taps + remainder(quotient(coord(1), share, whole), taps, whole)
    at = (coord(0), number, coord(2), coord(3))
    reads = Reads(b, whole)
    total: Expr | None = None
    for corner in itertools.product(*spots):
        value = reads.view(
            View(x.name, (coord(0), channel, *(element(i.name, at, e) for (i, _), e in zip(corner, extents, strict=True))))
        )
        for _, weight in corner:
            assert weight is not None
            value = call("mul", value, reads.view(View(weight.name, at)))
        total = value if total is None else call("add", total, value)
    assert total is not None
    mask, bias = b.input(4), b.input(3)
    if mask is not None:
        total = call("mul", total, reads.view(View(b.value(mask).name, at)))
    columns = b.compute(b.new(f"{t.name}.columns", whole, order=IMAGE[4]), total, reads)
    reads = Reads(b, shape_of(t))
    expr = ACC if bias is None else call("add", ACC, reads.along(bias, 1))
    filters = _flat_filters(b, w, (o, taps * share, 1, 1))
    b.emit(
        Conv,
        b.result(t, IMAGE[4]),
        x=columns.name,
        w=filters.name,
        strides=(1, 1),
        pads=(0, 0),
        dilations=(1, 1),
        groups=groups,
        epilogue=Epilogue(expr, tuple(reads.views)),
    )


def _flat_filters(b: Builder, w: gs.Tensor, flat: Shape) -> Tensor:
    """Filters (O, C/groups, R, S) as those of a 1×1 convolution of R·S·C/groups channels, taps outermost."""
    if isinstance(w, gs.Constant):
        moved = transform("transpose", recipe_of(w), axes=(0, 2, 3, 1))
        return b.constant(w.name, transform("reshape", moved, shape=flat), flat, order=IMAGE[4])
    _, share, _, s = shape_of(w)
    tap = quotient(coord(1), share, flat)
    index = (coord(0), remainder(coord(1), share, flat), quotient(tap, s, flat), remainder(tap, s, flat))
    return b.copy(View(b.value(w).name, index), b.new(f"{w.name}.flat", flat, order=IMAGE[4]))


def roi_align(node: gs.Node, b: Builder) -> None:
    """y (R, C, P, Q) = the mean or maximum of points in each cell of each region, read linearly from x (N, C, H, W)."""
    x, rois, batch, t = b.value(node.inputs[0]), b.value(node.inputs[1]), b.value(node.inputs[2]), node.outputs[0]
    points, scale = b.attr("sampling_ratio", 0), float(b.attr("spatial_scale", 1.0))
    if points <= 0:
        raise b.refuse("sampling_ratio is 0: how many points are read depends on the regions", "give a sampling_ratio, as 2")
    if points > 1 << 10:
        raise b.refuse(f"sampling_ratio is {points}: it reads the square of that in each cell", "give one up to 1024, as 2")
    mode, half = b.attr("mode", "avg"), b.attr("coordinate_transformation_mode", "half_pixel") == "half_pixel"
    r, c, *cells = shape_of(t)
    spots: list[tuple[Tensor, Tensor]] = []
    for axis, (cell, n) in enumerate(zip(cells, x.shape[2:], strict=True)):
        shape = (r, cell, points)  # points along the axis
        reads = Reads(b, shape)
        low, high = (reads.view(View(rois.name, (coord(0), constant(k + 1 - axis)))) for k in (0, 2))
        shift = 0.5 if half else 0.0
        start = call("sub", call("mul", low, scale), shift)
        size = call("sub", call("sub", call("mul", high, scale), shift), start)
        if not half:
            size = call("max", size, 1.0)
        at = ((np.arange(cell * points) + 0.5) / (cell * points)).astype(np.float32)
        where = b.literal(f"{t.name}.where{axis}", at.reshape(cell, points))
        u = call("add", start, call("mul", size, reads.view(View(where.name, (coord(1), coord(2))))))
        place = b.compute(b.new(f"{t.name}.place{axis}", shape), u, reads)
        spots.append(_region_spots(b, f"{t.name}.{axis}", place, n))
    image, some = element(batch.name, [coord(0)], x.shape[0]), _may_be_none(node.inputs[2])
    if points <= FEW_POINTS:
        rows, columns = (
            [(coord(0), coord(2 + a), constant(p), constant(k)) for p in range(points) for k in (0, 1)] for a in (0, 1)
        )
        reads = Reads(b, shape_of(t))
        value = _of_taps(reads, x, image, spots, (rows, columns), mode)
        value = value if mode == "max" else call("mul", value, 1.0 / points**2)
        if some:  # nothing is read for a region of no image
            value = call("where", call("greater", reads.view(View(batch.name, (coord(0),))), -1), value, 0.0)
        b.compute(b.result(t, IMAGE[4]), value, reads)
        return
    whole = (r, c, cells[0] * points, cells[1] * points)
    reads = Reads(b, whole)
    place_of = [(quotient(coord(2 + axis), points, whole), remainder(coord(2 + axis), points, whole)) for axis in (0, 1)]
    rows, columns = ([(coord(0), *place, constant(k)) for k in (0, 1)] for place in place_of)
    sampled = b.compute(b.new(f"{t.name}.sampled", whole), _of_taps(reads, x, image, spots, (rows, columns), mode), reads)
    split = (r, c, cells[0], points, cells[1], points)
    parts = b.new(f"{t.name}.cells", split)
    b.copy(View(sampled.name, (coord(0), coord(1), coord(2) * points + coord(3), coord(4) * points + coord(5))), parts)
    kept = b.new(f"{t.name}.kept", (r, c, cells[0], 1, cells[1], 1))
    combine(b, parts, kept, (3, 5), REDUCTIONS["GlobalMaxPool" if mode == "max" else "GlobalAveragePool"])
    b.copy(View(kept.name, (coord(0), coord(1), coord(2), constant(0), coord(3), constant(0))), b.result(t, IMAGE[4]))


FEW_POINTS = 2
"""Points along an axis of a cell up to which all that they read is read in one expression."""


Taps = tuple[Sequence[tuple[Index, ...]], Sequence[tuple[Index, ...]]]
"""Of both axes, where the places and the weights of what is read are in their tensors."""


def _may_be_none(images: gs.Tensor) -> bool:
    """Whether regions may be of image -1, which is none: see `load.counted.mixing.roi_align`."""
    where = images.inputs[0] if images.inputs else None
    if where is None or where.op != "Where" or not isinstance(where.inputs[2], gs.Constant):
        return False
    return bool((np.asarray(where.inputs[2].values) == -1).all())


def _of_taps(reads: Reads, x: Tensor, image: Index, spots: Sequence[tuple[Tensor, Tensor]], taps: Taps, mode: str) -> Expr:
    """The sum, or the maximum, of what taps along both axes read of an image, times their weights."""
    (rows, row_weights), (columns, column_weights) = spots
    total: Expr | None = None
    for i in taps[0]:
        of_row, weight = None, reads.view(View(row_weights.name, i))
        for j in taps[1]:
            at = (image, coord(1), element(rows.name, i, x.shape[2]), element(columns.name, j, x.shape[3]))
            value = call("mul", reads.view(View(x.name, at)), reads.view(View(column_weights.name, j)))
            value = call("mul", value, weight) if mode == "max" else value
            of_row = value if of_row is None else call("max" if mode == "max" else "add", of_row, value)
        assert of_row is not None
        of_row = of_row if mode == "max" else call("mul", of_row, weight)
        total = of_row if total is None else call("max" if mode == "max" else "add", total, of_row)
    assert total is not None
    return total


def _region_spots(b: Builder, name: str, place: Tensor, n: int) -> tuple[Tensor, Tensor]:
    """The two neighbours of each place, and their weights, along one axis more: a place more than 1 outside counts as nothing,
    others are moved to the edge."""
    shape = (*place.shape, 2)
    which = b.literal(f"{name}.which", np.arange(2, dtype=np.float32))

    def tensor(text: str, dtype: DType, value: Callable[[Expr, Expr, Expr], Expr]) -> Tensor:
        reads = Reads(b, shape)
        u = reads.view(View(place.name, tuple(coord(a) for a in range(place.rank))))
        v = call("min", call("max", u, 0.0), n - 1.0)
        return b.compute(
            b.new(f"{name}.{text}", shape, dtype), value(u, v, reads.view(View(which.name, (coord(place.rank),)))), reads
        )

    def index(u: Expr, v: Expr, k: Expr) -> Expr:
        return cast(call("min", call("add", call("floor", v), k), n - 1.0), DType.I64)

    def weight(u: Expr, v: Expr, k: Expr) -> Expr:
        t = call("sub", v, call("floor", v))
        inside = call("bit_and", call("greater_equal", u, -1.0), call("less_equal", u, float(n)))
        return call("where", inside, call("where", call("greater", k, 0.0), t, call("sub", 1.0, t)), 0.0)

    return tensor("index", DType.I32, index), tensor("weight", DType.F32, weight)


def col2im(node: gs.Node, b: Builder) -> None:
    """y (N, C, …) = the sum of the blocks that x (N, C * block, blocks) holds, each at its place."""
    x, y = b.value(node.inputs[0]), node.outputs[0]
    extents, block = b.ints(1, "image_shape"), b.ints(2, "block_shape")
    assert extents is not None and block is not None
    rank, shape = len(extents), shape_of(y)
    strides, dilations = (b.attr(k, [1] * rank) for k in ("strides", "dilations"))
    pads = b.attr("pads", [0] * 2 * rank)
    counts = [(n + pads[a] + pads[rank + a] - dilations[a] * (block[a] - 1) - 1) // strides[a] + 1 for a, n in enumerate(extents)]
    if math.prod(counts) != x.shape[-1] or x.shape[1] != shape[1] * math.prod(block):
        blocks = "×".join(map(str, counts))
        raise b.refuse(f"its input does not hold {blocks} blocks of {'×'.join(map(str, block))}", "check the model")
    sums: Tensor | None = None
    taps = list(np.ndindex(*block))
    for first in range(0, len(taps), TAPS):
        reads = Reads(b, shape)
        total: Expr | None = None if sums is None else reads.view(identity_view(sums.name, len(shape)))
        for tap in taps[first : first + TAPS]:
            value = reads.view(_tap_view(x.name, tap, block, counts, strides, dilations, pads, shape))
            total = value if total is None else call("add", total, value)
        assert total is not None
        last = first + TAPS >= len(taps)
        order = IMAGE.get(len(shape))
        sums = b.compute(b.result(y, order) if last else b.new(f"{y.name}.sum{first}", shape, order=order), total, reads)


TAPS = 9
"""Terms of a sum that are read in one expression."""


def _tap_view(
    x: str, tap: Sequence[int], block: Sequence[int], counts: Sequence[int], strides: Sequence[int],
    dilations: Sequence[int], pads: Sequence[int], shape: Shape,
) -> View:  # fmt: skip
    """What one element of the blocks adds to each element of the image: 0 where no block has that element there."""
    valid, number = [], constant(0)
    for a, (k, n) in enumerate(zip(tap, counts, strict=True)):
        at = coord(2 + a) + (pads[a] - int(k) * dilations[a])
        if strides[a] > 1:
            valid.append(Range(remainder(at, strides[a], shape), 0, 1))
        i = quotient(at, strides[a], shape)
        valid.append(Range(i, 0, n))
        number = number * n + i
    row = int(np.ravel_multi_index(tuple(tap), tuple(block)))
    return View(x, (coord(0), coord(1) * math.prod(block) + row, number), tuple(valid))
