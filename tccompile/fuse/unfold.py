"""Equations for convolutions whose channels are too few to fill a Tensor Core's tiles: taps become channels.

    unfold_inputs   conv(x, w)  =>  conv(columns(x), w')    x with 1–4 channels, whose windows do not overlap along a
                                                            row, or whose filter is long: the S taps of a filter row become
                                                            channels; of a filter that steps by g rows, those of g rows
    unfold_outputs  conv(x, w)  =>  rows(conv(x, w'))       y with 1–4 channels: the R filter rows become output channels,
                                                            and y is the sum of R shifted reads

An implicit GEMM pads a tap's channels to 8, so a 16×16 filter over 3 channels multiplies 256·8 numbers where 256·3 do after
unfold_inputs; and with 3 output channels a tile of 16 columns, for which each pixel is gathered R·S times, is mostly padding
where 9·3 columns and S gathers do after unfold_outputs. Windows that overlap would be stored several times over:
kernels/conv_patch.py gathers them from shared memory.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import reduce
from typing import Any

from tccompile.ir.expr import (
    Epilogue,
    Index,
    Range,
    View,
    always_inside,
    call,
    coord,
    load,
    quotient,
    remainder,
    substitute,
    walk,
)
from tccompile.ir.extent import ceil_div, worth
from tccompile.ir.ops import Conv, Op, Pointwise
from tccompile.ir.program import Program
from tccompile.ir.tensor import Tensor, dense
from tccompile.ir.types import DType
from tccompile.ir.weights import Recipe, transform

FEW = 4
"""Up to this many channels are few."""

TAPS = 3
"""Taps in a filter row from which unfolding inputs pays."""

ROWS = 5
"""Filter rows from which unfolding outputs pays: below, the second pass over memory costs more than the gathers saved."""

LONG = 128
"""Taps beyond which a filter is unfolded although its windows overlap: more than a patch's kernel takes."""

PIXELS = 1 << 14
"""Output pixels from which a second pass is short beside the convolution."""


def unfold_inputs(program: Program) -> Program:
    """The program in which convolutions of few channels read columns (g filter rows × S taps × C channels) that a step writes."""
    tensors, constants, ops = dict(program.tensors), dict(program.constants), []
    for op in program.ops:
        if not isinstance(op, Conv) or op.groups != 1 or op.w not in constants or not _few_inputs(op, tensors[op.w]):
            ops.append(op)
            continue
        x, w, y = tensors[op.x], tensors[op.w], program.op_shape(op)
        outputs, channels, *rows, taps = w.shape
        g, last = _rows_at_once(op, w), x.rank - 1
        steps = [ceil_div(n, g) for n in rows]
        heights = [y[2] + steps[0] - 1] if g > 1 else x.shape[2:last]
        shape = (x.shape[0], g * taps * channels, *heights, y[last])
        columns = dense(f"{op.y}.columns", shape, x.dtype, _channels_last(x.rank))
        weights = dense(f"{op.w}.columns.{op.y}", (outputs, shape[1], *steps, 1), w.dtype, _channels_last(x.rank))
        constants[weights.name] = _column_weights(constants[op.w], w.shape, g, weights.shape)
        tensors |= {columns.name: columns, weights.name: weights}

        # Column (row · S + tap) · C + channel of a pixel is x's channel there: zero where the tap lies beside the image.
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
    return () if always_inside(index, 0, extent, shape) else (Range(index, 0, extent),)


def _few_inputs(op: Conv, w: Tensor) -> bool:
    """Whether it pays that taps become channels."""
    apart = op.strides[-1] >= w.shape[-1] or math.prod(w.shape[2:]) > LONG
    return w.shape[1] <= FEW and w.shape[-1] >= TAPS and apart


def unfold_outputs(program: Program) -> Program:
    """The program in which convolutions into few channels sum along a filter row only, and a step adds their rows, shifted."""
    tensors, constants, ops = dict(program.tensors), dict(program.constants), list[Op]()
    for op in program.ops:
        y = program.op_shape(op)
        if not isinstance(op, Conv) or op.w not in constants or not _many_rows(op, tensors[op.w], y):
            ops.append(op)
            continue
        x, w = tensors[op.x], tensors[op.w]
        outputs, channels, rows, taps = w.shape
        shape = (y[0], rows * outputs, x.shape[2], y[3])
        acc, stored = next(e for e in walk(op.epilogue.expr) if e.fn == "acc"), tensors[op.y].dtype
        kind = stored if stored.is_float else DType.F32
        sums = dense(f"{op.y}.rows", shape, kind, _channels_last(4))
        weights = dense(f"{op.w}.rows", (rows * outputs, channels, 1, taps), w.dtype, _channels_last(4))
        recipe = transform("transpose", constants[op.w], axes=(2, 0, 1, 3))
        constants[weights.name] = transform("reshape", recipe, shape=weights.shape)
        tensors |= {sums.name: sums, weights.name: weights}

        along: dict[str, Any] = {"strides": (1, op.strides[1]), "pads": (0, op.pads[1]), "dilations": (1, op.dilations[1])}
        ops.append(replace(op, y=sums.name, w=weights.name, epilogue=Epilogue(acc), **along))
        views = []
        for r in range(rows):
            i = coord(2) + (r * op.dilations[0] - op.pads[0])
            views.append(View(sums.name, (coord(0), coord(1) + r * outputs, i, coord(3)), _inside(i, x.shape[2], y)))
        first = len(op.epilogue.loads)
        total = reduce(lambda a, b: call("add", a, b), (load(first + r, acc.dtype) for r in range(rows)))
        expr = substitute(op.epilogue.expr, {acc: total})
        ops.append(Pointwise(nodes=op.nodes, y=op.y, epilogue=Epilogue(expr, (*op.epilogue.loads, *views))))
    return replace(program, tensors=tensors, constants=constants, ops=tuple(ops))


def _integers(op: Conv) -> bool:
    """Whether it sums integers: such sums take twice the memory that halves do, and more time to add up than is saved."""
    return any(e.fn == "acc" and e.dtype is DType.I64 for e in walk(op.epilogue.expr))


def _many_rows(op: Conv, w: Tensor, y: tuple[int, ...]) -> bool:
    """Whether it pays that the filter's rows become output channels."""
    if len(w.shape) != 4 or op.groups != 1 or op.strides[0] != 1 or op.epilogue.shuffle != 1:
        return False
    few = w.shape[0] <= FEW and w.shape[2] >= ROWS and not _integers(op)
    return few and worth(f"rows of {op.y}", math.prod(y[2:]) * y[0] >= PIXELS)
