"""Equations for convolutions whose channels are too few to fill a Tensor Core's tiles: taps become channels.

    unfold_inputs   conv(x, w)  =>  conv(columns(x), w')    x with 1–4 channels: the S taps of a filter row become channels; of
                                                            an image's filter that steps by g rows, those of g rows
    unfold_outputs  conv(x, w)  =>  rows(conv(x, w'))       y with 1–4 channels: the R filter rows become output channels,
                                                            and y is the sum of R shifted reads; or all R·S taps do

An implicit GEMM pads a tap's channels to 8, so a 7×7 filter over 3 channels multiplies 49·8 numbers where 7·24 do after
unfold_inputs, or 4·48 in half as many rows if it steps by 2; and with 3 output channels a tile of 16 columns, for which each
pixel is gathered R·S times, is mostly padding where 9·3 columns and S gathers do after unfold_outputs.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import reduce
from typing import Any

from tccompile.expr import ACC, Epilogue, Index, Range, View, call, coord, load, quotient, remainder, substitute
from tccompile.program import Conv, Op, Pointwise, Program, Tensor, dense
from tccompile.weights import Recipe, transform

FEW = 4
"""Up to this many channels are few."""

TAPS = 3
"""Taps in a filter row from which unfolding inputs pays."""

ROWS = 5
"""Filter rows from which unfolding outputs pays: below, the second pass over memory costs more than the gathers saved."""

SUMS = 9
"""Taps up to which all become output channels, if what is then stored is no more than what is read: x is gathered once, not R·S
times, and the second pass adds so many numbers."""

PIXELS = 1 << 14
"""Output pixels from which a second pass is short beside the convolution."""


def unfold_inputs(program: Program) -> Program:
    tensors, constants, ops = dict(program.tensors), dict(program.constants), []
    for op in program.ops:
        if not isinstance(op, Conv) or op.groups != 1 or op.w not in constants or not _few_inputs(tensors[op.w]):
            ops.append(op)
            continue
        x, w, y = tensors[op.x], tensors[op.w], program.op_shape(op)
        outputs, channels, *rows, taps = w.shape
        g, last = _rows_at_once(op, w), x.rank - 1
        steps = [-(-n // g) for n in rows]
        heights = [y[2] + steps[0] - 1] if g > 1 else x.shape[2:last]
        shape = (x.shape[0], g * taps * channels, *heights, y[last])
        columns = dense(f"{op.y}.columns", shape, x.dtype, _channels_last(x.rank))
        weights = dense(f"{op.w}.columns.{op.y}", (outputs, shape[1], *steps, 1), w.dtype, _channels_last(x.rank))
        constants[weights.name] = _column_weights(constants[op.w], w.shape, g, weights.shape)
        tensors |= {columns.name: columns, weights.name: weights}

        tap, channel = quotient(coord(1), channels, shape), remainder(coord(1), channels, shape)
        row, tap = quotient(tap, taps, shape), remainder(tap, taps, shape)
        at = coord(last) * op.strides[-1] + tap * op.dilations[-1] - op.pads[-1]
        valid = _inside(at, x.shape[last], shape)
        middle = [coord(axis) for axis in range(2, last)]
        if g > 1:
            middle = [coord(2) * g + row - op.pads[0]]
            valid += _inside(middle[0], x.shape[2], shape)
        view = View(x.name, (coord(0), channel, *middle, at), valid)
        ops.append(Pointwise(nodes=op.nodes, y=columns.name, epilogue=Epilogue(load(0), (view,))))
        along: dict[str, Any] = {
            "strides": (*op.strides[:-1], 1) if g == 1 else (1, 1),
            "pads": (*op.pads[:-1], 0) if g == 1 else (0, 0),
            "dilations": (*op.dilations[:-1], 1),
        }
        ops.append(replace(op, x=columns.name, w=weights.name, **along))
    return replace(program, tensors=tensors, constants=constants, ops=tuple(ops))


def _rows_at_once(op: Conv, w: Tensor) -> int:
    """Filter rows that become channels together: those that the filter steps over."""
    together = len(op.strides) == 2 and op.dilations[0] == 1 and op.strides[0] <= w.shape[2]
    return op.strides[0] if together else 1


def _column_weights(w: Recipe, shape: tuple[int, ...], g: int, columns: tuple[int, ...]) -> Recipe:
    """(O, C, R, S) as (O, g · S · C, R / g, 1), with rows of zeros where g does not divide R."""
    outputs, channels, *rows, taps = shape
    rank = len(shape)
    if g == 1:
        turned = transform("transpose", w, axes=(0, rank - 1, 1, *range(2, rank - 1)))
        return transform("reshape", turned, shape=columns)
    missing = columns[2] * g - rows[0]
    whole = transform("pad", w, before=(0, 0, 0, 0), after=(0, 0, missing, 0)) if missing else w
    parts = transform("reshape", whole, shape=(outputs, channels, columns[2], g, taps))
    return transform("reshape", transform("transpose", parts, axes=(0, 3, 4, 1, 2)), shape=columns)


def _channels_last(rank: int) -> tuple[int, ...]:
    return (0, *range(2, rank), 1)


def _inside(index: Index, extent: int, shape: tuple[int, ...]) -> tuple[Range, ...]:
    """The condition that an index lies in an axis, where the bounds do not say so."""
    low, high = index.bounds(shape)
    return () if low >= 0 and high < extent else (Range(index, 0, extent),)


def _few_inputs(w: Tensor) -> bool:
    return w.shape[1] <= FEW and w.shape[-1] >= TAPS


def unfold_outputs(program: Program) -> Program:
    tensors, constants, ops = dict(program.tensors), dict(program.constants), list[Op]()
    for op in program.ops:
        y = program.op_shape(op)
        unfolded = _unfolded(tensors[op.w], op, y) if isinstance(op, Conv) and op.w in constants else None
        if unfolded is None or not isinstance(op, Conv):
            ops.append(op)
            continue
        (rows, taps), x, w = unfolded, tensors[op.x], tensors[op.w]
        outputs, channels, _, width = w.shape
        across = taps > 1  # whether taps of a row are output channels too
        shape = (y[0], rows * taps * outputs, x.shape[2], x.shape[3] if across else y[3])
        sums = dense(f"{op.y}.rows", shape, tensors[op.y].dtype, _channels_last(4))
        weights = dense(f"{op.w}.rows", (rows * taps * outputs, channels, 1, width // taps), w.dtype, _channels_last(4))
        recipe = transform("transpose", constants[op.w], axes=(2, 3, 0, 1) if across else (2, 0, 1, 3))
        constants[weights.name] = transform("reshape", recipe, shape=weights.shape)
        tensors |= {sums.name: sums, weights.name: weights}

        along: dict[str, Any] = {"strides": (1, op.strides[1]), "pads": (0, op.pads[1]), "dilations": (1, op.dilations[1])}
        if across:
            along = {"strides": (1, 1), "pads": (0, 0), "dilations": (1, 1)}
        ops.append(replace(op, y=sums.name, w=weights.name, epilogue=Epilogue(), **along))
        views = []
        for tap in range(rows * taps):
            r, s = divmod(tap, taps)
            i = coord(2) + (r * op.dilations[0] - op.pads[0])
            j = coord(3) + (s * op.dilations[1] - op.pads[1] if across else 0)
            inside = _inside(i, x.shape[2], y) + _inside(j, shape[3], y)
            views.append(View(sums.name, (coord(0), coord(1) + tap * outputs, i, j), inside))
        first = len(op.epilogue.loads)
        total = reduce(lambda a, b: call("add", a, b), (load(first + t) for t in range(rows * taps)))
        expr = substitute(op.epilogue.expr, {ACC: total})
        ops.append(Pointwise(nodes=op.nodes, y=op.y, epilogue=Epilogue(expr, (*op.epilogue.loads, *views))))
    return replace(program, tensors=tensors, constants=constants, ops=tuple(ops))


def _unfolded(w: Tensor, op: Conv, y: tuple[int, ...]) -> tuple[int, int] | None:
    """How many rows, and taps of each, become output channels: (R, S), (R, 1), or None where that does not pay."""
    if len(w.shape) != 4 or op.groups != 1 or op.strides[0] != 1 or op.epilogue.shuffle != 1:
        return None
    outputs, channels, rows, taps = w.shape
    if outputs > FEW or math.prod(y[2:]) * y[0] < PIXELS:
        return None
    if op.strides[1] == 1 and 2 < rows * taps <= SUMS and channels >= rows * taps * outputs:
        return rows, taps
    return (rows, 1) if rows >= ROWS else None
