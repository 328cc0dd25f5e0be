"""Equations for convolutions whose channels are too few to fill a Tensor Core's tiles: taps become channels.

    unfold_inputs   conv(x, w)  =>  conv(columns(x), w')    x with 1–4 channels: the S taps of a filter row become channels
    unfold_outputs  conv(x, w)  =>  rows(conv(x, w'))       y with 1–4 channels: the R filter rows become output channels,
                                                            and y is the sum of R shifted reads

An implicit GEMM pads a tap's channels to 8, so a 7×7 filter over 3 channels multiplies 49·8 numbers where 7·24 do after
unfold_inputs; and with 3 output channels a tile of 16 columns, for which each pixel is gathered R·S times, is mostly padding
where 9·3 columns and S gathers do after unfold_outputs.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import reduce
from typing import Any

from tccompile.expr import ACC, Epilogue, Index, Range, View, call, coord, load, quotient, remainder, substitute
from tccompile.program import Conv, Op, Pointwise, Program, Tensor, dense
from tccompile.weights import transform

FEW = 4
"""Up to this many channels are few."""

TAPS = 3
"""Taps in a filter row from which unfolding inputs pays."""

ROWS = 5
"""Filter rows from which unfolding outputs pays: below, the second pass over memory costs more than the gathers saved."""

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
        shape = (x.shape[0], taps * channels, *x.shape[2:-1], y[-1])
        columns = dense(f"{op.y}.columns", shape, x.dtype, _channels_last(len(shape)))
        recipe = transform("transpose", constants[op.w], axes=(0, x.rank - 1, 1, *range(2, x.rank - 1)))
        weights = dense(f"{op.w}.columns.{op.y}", (outputs, taps * channels, *rows, 1), w.dtype, _channels_last(x.rank))
        constants[weights.name] = transform("reshape", recipe, shape=weights.shape)
        tensors |= {columns.name: columns, weights.name: weights}

        last = x.rank - 1
        tap, channel = quotient(coord(1), channels, shape), remainder(coord(1), channels, shape)
        at = coord(last) * op.strides[-1] + tap * op.dilations[-1] - op.pads[-1]
        view = View(x.name, (coord(0), channel, *(coord(a) for a in range(2, last)), at), _inside(at, x.shape[-1], shape))
        ops.append(Pointwise(nodes=op.nodes, y=columns.name, epilogue=Epilogue(load(0), (view,))))
        along: dict[str, Any] = {
            "strides": (*op.strides[:-1], 1),
            "pads": (*op.pads[:-1], 0),
            "dilations": (*op.dilations[:-1], 1),
        }
        ops.append(replace(op, x=columns.name, w=weights.name, **along))
    return replace(program, tensors=tensors, constants=constants, ops=tuple(ops))


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
        if not isinstance(op, Conv) or op.groups != 1 or op.w not in constants or not _few_outputs(tensors[op.w], op, y):
            ops.append(op)
            continue
        x, w = tensors[op.x], tensors[op.w]
        outputs, channels, rows, taps = w.shape
        shape = (y[0], rows * outputs, x.shape[2], y[3])
        sums = dense(f"{op.y}.rows", shape, tensors[op.y].dtype, _channels_last(4))
        weights = dense(f"{op.w}.rows", (rows * outputs, channels, 1, taps), w.dtype, _channels_last(4))
        recipe = transform("transpose", constants[op.w], axes=(2, 0, 1, 3))
        constants[weights.name] = transform("reshape", recipe, shape=weights.shape)
        tensors |= {sums.name: sums, weights.name: weights}

        along: dict[str, Any] = {"strides": (1, op.strides[1]), "pads": (0, op.pads[1]), "dilations": (1, op.dilations[1])}
        ops.append(replace(op, y=sums.name, w=weights.name, epilogue=Epilogue(), **along))
        views = []
        for r in range(rows):
            at = coord(2) + (r * op.dilations[0] - op.pads[0])
            views.append(View(sums.name, (coord(0), coord(1) + r * outputs, at, coord(3)), _inside(at, x.shape[2], y)))
        first = len(op.epilogue.loads)
        total = reduce(lambda a, b: call("add", a, b), (load(first + r) for r in range(rows)))
        expr = substitute(op.epilogue.expr, {ACC: total})
        ops.append(Pointwise(nodes=op.nodes, y=op.y, epilogue=Epilogue(expr, (*op.epilogue.loads, *views))))
    return replace(program, tensors=tensors, constants=constants, ops=tuple(ops))


def _few_outputs(w: Tensor, op: Conv, y: tuple[int, ...]) -> bool:
    if len(w.shape) != 4 or op.strides[0] != 1 or op.epilogue.shuffle != 1:
        return False
    return w.shape[0] <= FEW and w.shape[2] >= ROWS and math.prod(y[2:]) * y[0] >= PIXELS
