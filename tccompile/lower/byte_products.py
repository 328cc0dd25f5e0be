"""Products of integers of 8 bits as they are, for Tensor Cores that multiply bytes.

sum((x - zero) · w) = sum(x · w) - zero · sum(w), where w are constant weights less their own zero points, as far as these
differences are integers of 8 bits again: always, where zero points are those of symmetric quantization. The sums of weights are
constants. A convolution's padding counts as the zero point, but is 0 in memory: there the sum is over the taps inside the image.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import onnx_graphsurgeon as gs

from tccompile.ir.expr import Expr, View, call, cast, coord
from tccompile.ir.extent import Shape
from tccompile.ir.types import DType
from tccompile.ir.weights import GROWTH, Literal, Recipe, transform
from tccompile.load.constants import derived, held, recipe_of
from tccompile.lower import conv, linear
from tccompile.lower.builder import Builder, Reads, shape_of
from tccompile.lower.windows import Window, window

LEAST = 16
"""Terms from which on bytes are worth it: 16 of them are what memory is read in, and fewer fill as much as 8 halves do."""

EXACT = 1 << 24
"""Integers of magnitudes up to this one are float32 numbers."""

SUM = Expr("acc", (), None, DType.I64)
"""The sum exactly; as float32 it is rounded once."""

Finish = Callable[[Reads, Expr], Expr]
"""What becomes of a sum, in float32 where it is exact there, else in int64."""


@dataclass(frozen=True)
class Bytes:
    """The operands of a product of bytes.

    x, w   as they are multiplied
    zero   x's zero point
    bound  what no sum of some of the products x · w exceeds in magnitude
    """

    x: gs.Tensor
    w: gs.Tensor
    zero: int
    bound: int

    def sum_of(self, reads: Reads, correction: View | None) -> Expr:
        """The product's sum, from that of the integers as they are."""
        acc = cast(SUM, DType.F32) if self.bound <= EXACT else SUM
        return acc if correction is None else call("sub", acc, cast(reads.view(correction), acc.dtype))


def zero_of(zero: gs.Tensor | None) -> int | None:
    """The number that a zero point is; None where it is not constant or several."""
    if zero is None:
        return 0
    return int(zero.values.item()) if isinstance(zero, gs.Constant) and math.prod(zero.shape) == 1 else None


def of_weights(b: Builder, x: gs.Tensor, zero: int, w: gs.Constant, rows: Callable[[np.ndarray], np.ndarray]) -> Bytes | None:
    """The operands of a product with constant weights, or None where these are not bytes.

    w     the weights less their zero points, as floats; nothing is decided by them that `refit/` does not hold others to
    rows  gives them with those of a sum as a row
    """
    values = rows(held(w))
    low, high = (int(values.min()), int(values.max())) if values.size else (0, 0)
    dtype = next((d for d in (DType.I8, DType.U8) if d.lowest <= low and high <= d.largest), None)
    if dtype is None:
        return None
    above, below = (np.maximum(sign * values, 0).sum(1, dtype=np.float64) for sign in (1, -1))
    most = 128 * (above + below) if b.io_dtype(x) is DType.I8 else 255 * np.maximum(above, below)
    weights = derived(b.unique(f"{w.name}/bytes"), "cast", w, dtype=dtype.numpy.name)
    return Bytes(x, weights, zero, int(GROWTH * most.max(initial=0)))


def convolution(b: Builder, given: Bytes, y: gs.Tensor, finish: Finish) -> None:
    """y = finish(conv(x - zero, w)) by the current node's attributes."""
    shape = shape_of(given.w)
    win = window(b, shape_of(given.x)[2:], shape[2:])
    correction = _of_window(b, given, y, win) if given.zero else None
    conv.product(b, given.x, given.w, y, lambda reads: finish(reads, given.sum_of(reads, correction)))


def matmul(b: Builder, given: Bytes, y: gs.Tensor, finish: Finish) -> None:
    """y = finish(matmul(x - zero, w)); w is a matrix where x has a zero point."""
    correction = None
    if given.zero:
        k, n = shape_of(given.w)
        ones = Literal(np.full((1, k), given.zero, np.int64))
        sums = transform("matmul", ones, transform("cast", recipe_of(given.w), dtype="int64"))
        rank = max(len(shape_of(given.x)), 2)
        correction = View(_stored(b, y, sums, (n,)), (coord(rank - 1),))
    linear.product(b, given.x, given.w, y, lambda reads: finish(reads, given.sum_of(reads, correction)))


def _of_window(b: Builder, given: Bytes, y: gs.Tensor, win: Window) -> View:
    """The zero point times the sum of the weights of the taps inside the image, by channel and pixel of the result."""
    (o, c, *size), (_, _, *out), extents = shape_of(given.w), shape_of(y), shape_of(given.x)[2:]
    whole = transform("transpose", recipe_of(given.w), axes=(0, *range(2, 2 + len(size)), 1))
    by_tap = transform("matmul", transform("cast", whole, dtype="int64"), Literal(np.full((c, 1), given.zero, np.int64)))
    if not any(win.pads) and all(n <= 0 for n in win.reach(extents, tuple(out))):
        taps = transform("reshape", by_tap, shape=(o, int(np.prod(size))))
        total = transform("matmul", taps, Literal(np.ones((int(np.prod(size)), 1), np.int64)))
        return View(_stored(b, y, total, (o,)), (coord(1),))
    taps = transform("reshape", by_tap, shape=(o, *size))
    for axis in reversed(range(len(size))):  # (o, …, taps of the axis) by (taps, pixels): the axis goes to the front
        at = np.arange(out[axis]) * win.strides[axis] - win.pads[axis] + np.arange(size[axis])[:, None] * win.dilations[axis]
        inside = Literal(((at >= 0) & (at < extents[axis])).astype(np.int64))
        taps = transform("matmul", taps, inside)
        if len(size) == 2:
            taps = transform("transpose", taps, axes=(0, 2, 1))
    order = (*range(1, 1 + len(out)), 0)
    name = _stored(b, y, taps, (o, *out), order)
    return View(name, tuple(coord(1 + a) for a in range(1 + len(out))))


def _stored(b: Builder, y: gs.Tensor, sums: Recipe, shape: Shape, order: tuple[int, ...] | None = None) -> str:
    """The name of a constant of int32 with these sums, which are taken modulo 2^32 as the product's are."""
    recipe = transform("cast", transform("reshape", sums, shape=shape), dtype="int32")
    return b.constant(f"{y.name}/zero", recipe, shape, DType.I32, order).name
