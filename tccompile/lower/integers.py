"""Products of integers of 8 bits, whose sums are exact however many terms they have.

Bytes are multiplied as they are where that pays (byte_products.py). Else differences to zero points are exact in fp16, and their
sums in float32 as long as none comes to 2^24, in whatever order they are added up. A longer sum is taken in parts that are short
enough, by what the zero points and constant weights allow: one product makes them all, side by side, and they are added up as
integers, modulo 2^32 as int32 is.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

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
    constant,
    coord,
    quotient,
    remainder,
    reshape_view,
)
from tccompile.ir.extent import Shape, ceil_div
from tccompile.ir.ops import Gemm, Reduce
from tccompile.ir.tensor import LANES, Tensor
from tccompile.ir.types import DType
from tccompile.ir.weights import GROWTH, Recipe, transform
from tccompile.load.constants import derived, held, recipe_of
from tccompile.lower import byte_products, conv, linear
from tccompile.lower.builder import IMAGE, Builder, Order, Reads, shape_of
from tccompile.lower.byte_products import EXACT, Bytes
from tccompile.lower.pointwise import wrapped
from tccompile.lower.windows import window

LIMITS = float(-(2**31)), float(2**31)

Finish = Callable[[Reads, Expr, int], Expr]
"""What becomes of a sum: from the result's views, the sum, in float32 or in int64, and if in float32, its largest magnitude."""


@dataclass(frozen=True)
class Factor:
    """What a product multiplies: integers less their zero points.

    whole      the integers
    zero       their zero points; a vector of them goes along `axis`
    order      of the differences' axes in memory
    low, high  the least and greatest difference; 0 is between
    """

    whole: gs.Tensor
    zero: gs.Tensor | None
    axis: int
    order: Order | None
    low: int
    high: int

    @property
    def is_constant(self) -> bool:
        return isinstance(self.whole, gs.Constant) and (self.zero is None or isinstance(self.zero, gs.Constant))

    def differences(self, b: Builder) -> gs.Tensor:
        """As floats."""
        return _difference(b, self.whole, self.zero, self.axis, self.order)


def centred(b: Builder, t: gs.Tensor, zero: int, axis: int, order: Order | None = None) -> Factor:
    """`t` less its zero point, which is input number `zero`."""
    z, limits = b.input(zero), np.iinfo(b.io_dtype(t).numpy)
    zeros = (0, 0) if z is None else (limits.min, limits.max)
    if isinstance(z, gs.Constant) and math.prod(z.shape):
        zeros = int(z.values.min()), int(z.values.max())
    low, high = min(limits.min - zeros[1], 0), max(limits.max - zeros[0], 0)
    return Factor(t, z, max(axis, -len(t.shape)) % len(t.shape), order, low, high)


def _bytes(b: Builder, x: Factor, w: Factor, terms: int, rows: Callable[[np.ndarray], np.ndarray]) -> Bytes | None:
    """The operands of a product of so many terms as bytes, where that pays and they are; `rows`: as `_Sums` has it."""
    zero = byte_products.zero_of(x.zero)
    if zero is None or terms < byte_products.LEAST:
        return None
    if w.is_constant:
        weights = w.differences(b)
        assert isinstance(weights, gs.Constant)
        return byte_products.of_weights(b, x.whole, zero, weights, rows)
    return Bytes(x.whole, w.whole, 0, terms * 255 * 255) if zero == byte_products.zero_of(w.zero) == 0 else None


def _own_filters(b: Builder, x: Factor, w: Factor, rows: Callable[[np.ndarray], np.ndarray]) -> Bytes | None:
    """The operands of a depthwise convolution as bytes, where x has no zero point and sums are exact in float32."""
    if byte_products.zero_of(x.zero) != 0 or not w.is_constant:
        return None
    weights = w.differences(b)
    assert isinstance(weights, gs.Constant)
    given = byte_products.of_weights(b, x.whole, 0, weights, rows)
    fits = given is not None and given.bound <= EXACT and b.io_dtype(given.w) is DType.I8
    return given if fits else None


def _difference(b: Builder, t: gs.Tensor, z: gs.Tensor | None, axis: int, order: Order | None) -> gs.Tensor:
    shape = shape_of(t)
    if isinstance(t, gs.Constant) and (z is None or isinstance(z, gs.Constant)):
        out = derived(b.unique(f"{t.name}/centred"), "cast", t, dtype="float32")
        if z is None:
            return out
        wide = derived("", "cast", z, dtype="float32")
        if len(z.shape) == 1 and z.shape[0] > 1:
            lie = tuple(-1 if a == axis else 1 for a in range(len(shape)))
            wide = derived("", "reshape", wide, shape=lie)
        elif len(z.shape) == 1:
            wide = derived("", "reshape", wide, shape=())
        return derived(out.name, "sub", out, wide)
    reads = Reads(b, shape)
    value = reads.broadcast(t)
    if z is not None:
        value = call("sub", value, reads.along(z, axis) if len(z.shape) < 2 else reads.broadcast(z))
    y = gs.Variable(b.unique(f"{t.name}/centred"), np.float32, shape)
    b.compute(b.result(y, order or tuple(range(len(shape)))), cast(value, DType.F32), reads)
    return y


# --- Sums that are short enough --------------------------------------------------------------------------------------


class _Sums:
    """What is known of the sums of a product of so many terms.

    weights  w's differences
    lines    gives the weights, if they are constant, with those of a sum as a row
    """

    def __init__(self, a: Factor, w: Factor, weights: gs.Tensor, terms: int, lines: Callable[[np.ndarray], np.ndarray]) -> None:
        self.a, self.w, self.terms = a, w, terms
        self.rows = None
        if isinstance(weights, gs.Constant):
            rows = GROWTH * lines(held(weights))
            self.rows = np.maximum(rows, 0), np.maximum(-rows, 0)

    def bound(self, share: int) -> int:
        """What no sum of some of the products in a part of `share` terms exceeds in magnitude."""
        down, up = -self.a.low, self.a.high
        if self.rows is None:
            most = max(up * self.w.high, down * -self.w.low), max(up * -self.w.low, down * self.w.high)
            return min(share, self.terms) * max(most)
        if not self.rows[0].size:
            return 0
        starts = np.arange(0, self.terms, share)
        above, below = (np.add.reduceat(r, starts, axis=1, dtype=np.float64) for r in self.rows)
        least, both = min(up, down), (above + below).max()  # of these maxima `refit/` knows that others keep to them
        rest = max(
            (up - least) * above.max() + (down - least) * below.max(), (down - least) * above.max() + (up - least) * below.max()
        )
        return int(least * both + rest)

    def share(self) -> int:
        """How many terms a part has: all of them, or else a multiple of LANES, the same in all parts but for the last."""
        whole = self.bound(max(self.terms, 1))
        if whole <= EXACT:
            return self.terms
        parts = ceil_div(whole, EXACT)
        while True:
            share = ceil_div(self.terms, parts * LANES) * LANES
            if share == LANES or self.bound(share) <= EXACT:
                return share
            parts += ceil_div(parts, 8)


def integer(x: Expr) -> Expr:
    """A sum in float32 as the integer of 32 bits that it is, to rounding."""
    if x.fn == "cast":
        return x.args[0]
    return cast(call("saturate", call("round", x), *LIMITS), DType.I64) if x.dtype is DType.F32 else x


# --- Products --------------------------------------------------------------------------------------------------------


def matmul(b: Builder, a: Factor, w: Factor, y: gs.Tensor, finish: Finish) -> None:
    """y = finish(matmul(a, w))"""
    ashape, wshape = shape_of(a.whole), shape_of(w.whole)
    k, n = wshape[-2:] if len(wshape) > 1 else (wshape[0], 1)

    def rows(values: np.ndarray) -> np.ndarray:
        return values.reshape(-1, k, n).transpose(0, 2, 1).reshape(-1, k)

    given = _bytes(b, a, w, k, rows)
    if given is not None and (given.zero == 0 or len(wshape) == 2):
        byte_products.matmul(b, given, y, lambda reads, acc: finish(reads, acc, given.bound))
        return
    left, right = a.differences(b), w.differences(b)
    sums = _Sums(a, w, right, k, rows)
    share = sums.share()
    if share == k:
        linear.product(b, left, right, y, lambda reads: finish(reads, ACC, sums.bound(max(k, 1))))
        return
    total = _sums_in_parts(b, left, right, y, share)
    lead = shape_of(y)[: len(y.shape) - (len(ashape) > 1) - (len(wshape) > 1)]
    whole = (*lead, ashape[-2] if len(ashape) > 1 else 1, n)
    result = b.result(y, tuple(range(len(whole)))) if whole == shape_of(y) else b.new(y.name, whole, b.dtype(y))
    reads = Reads(b, whole)
    b.compute(result, finish(reads, reads.view(reshape_view(total.name, total.shape, whole)), 0), reads)
    if not b.known(y):
        b.copy(reshape_view(result.name, whole, shape_of(y)), b.result(y))


def _sums_in_parts(b: Builder, a: gs.Tensor, w: gs.Tensor, y: gs.Tensor, share: int) -> Tensor:
    """The sums of matmul(a, w), which is y, added up from parts of `share` terms: (1, batch, rows, columns) of int32."""
    ashape, wshape = shape_of(a), shape_of(w)
    k, n = wshape[-2:] if len(wshape) > 1 else (wshape[0], 1)
    lead = shape_of(y)[: len(y.shape) - (len(ashape) > 1) - (len(wshape) > 1)]
    m = ashape[-2] if len(ashape) > 1 else 1
    several = math.prod(wshape[:-2]) > 1  # else all of a's matrices are rows of one
    parts, batch, height = ceil_div(k, share), math.prod(lead) if several else 1, m if several else math.prod(lead) * m

    shape: Shape = (parts, batch, height, share)
    *outer, row = _digits(coord(1) * height + coord(2), (*lead, m), shape)
    left = _part(b, a, shape, k, lambda term: (*_own(ashape, outer), *(row,)[: len(ashape) - 1], term))
    shape = (parts, batch, n, share)
    outer = _digits(coord(1), lead if several else (), shape)
    if isinstance(w, gs.Constant):
        whole = (*lead, k, n) if several else wshape
        matrices = transform("reshape", transform("expand", recipe_of(w), shape=whole), shape=(batch, k, n))
        right = _constant_part(b, w.name, transform("transpose", matrices, axes=(0, 2, 1)), shape, k)
    else:
        right = _part(b, w, shape, k, lambda term: (*_own(wshape, outer), term, *(coord(2),)[: len(wshape) - 1]))
    return _added(b, y.name, left, right)


def convolution(b: Builder, x: Factor, w: Factor, y: gs.Tensor, finish: Finish) -> None:
    """y = finish(conv(x, w)) by the current node's attributes; where sums are long, a product of matrices."""
    (o, share_c, *size), groups = shape_of(w.whole), b.attr("group", 1)
    k, each = share_c * math.prod(size), o // groups

    def rows(values: np.ndarray) -> np.ndarray:
        return values.reshape(o, k)

    whole = len(size) < 3 and (groups == 1 or share_c % byte_products.LEAST == 0)
    own_filters = len(size) < 3 and groups == o > 1 and share_c == 1
    given = _bytes(b, x, w, share_c, rows) if whole else _own_filters(b, x, w, rows) if own_filters else None
    if given is not None:
        byte_products.convolution(b, given, y, lambda reads, acc: finish(reads, acc, given.bound))
        return
    image, filters = x.differences(b), w.differences(b)
    sums = _Sums(x, w, filters, k, rows)
    share = sums.share()
    if share == k:
        conv.product(b, image, filters, y, lambda reads: finish(reads, ACC, sums.bound(max(k, 1))))
        return
    (n, _, *extents), (_, _, *out) = shape_of(x.whole), shape_of(y)
    win, parts, height = window(b, tuple(extents), tuple(size)), ceil_div(k, share), n * math.prod(out)

    shape: Shape = (parts, groups, height, share)
    number, *pixel = _digits(coord(2), (n, *out), shape)
    steps = list(zip(pixel, win.strides, win.dilations, win.pads, strict=True))

    def place(term: Index) -> tuple[Index, ...]:
        channel, *taps = _digits(term, (share_c, *size), shape)
        at = (p * stride + t * dilation - pad for t, (p, stride, dilation, pad) in zip(taps, steps, strict=True))
        return number, coord(1) * share_c + channel, *at

    left = _part(b, image, shape, k, place)
    shape = (parts, groups, each, share)
    if isinstance(filters, gs.Constant):
        right = _constant_part(b, filters.name, transform("reshape", recipe_of(filters), shape=(groups, each, k)), shape, k)
    else:
        right = _part(b, filters, shape, k, lambda term: (coord(1) * each + coord(2), *_digits(term, (share_c, *size), shape)))
    total = _added(b, y.name, left, right)

    whole = shape_of(y)
    row = coord(0)
    for axis, extent in enumerate(out, 2):
        row = row * extent + coord(axis)
    view = View(total.name, (constant(0), quotient(coord(1), each, whole), row, remainder(coord(1), each, whole)))
    reads = Reads(b, whole)
    b.compute(b.result(y, IMAGE[len(whole)]), finish(reads, reads.view(view), 0), reads)


def _digits(number: Index, extents: Shape, shape: Shape) -> list[Index]:
    """The digits of `number` in mixed radix, outermost first; `shape` is that of the coordinates in it."""
    digits = []
    for n in reversed(extents):
        digits.append(remainder(number, n, shape))
        number = quotient(number, n, shape)
    return digits[::-1]


def _own(shape: Shape, outer: list[Index]) -> list[Index]:
    """The indices of a stack of matrices that is broadcast, from those of the whole."""
    own = shape[:-2]
    return (
        [i if n > 1 else constant(0) for n, i in zip(own, outer[len(outer) - len(own) :], strict=True)]
        if outer
        else [constant(0)] * len(own)
    )


def _part(b: Builder, t: gs.Tensor, shape: Shape, terms: int, index: Callable[[Index], tuple[Index, ...]]) -> Tensor:
    """(parts, batch, rows, terms of a part) of `t`, which `index` gives the place of a term in; zeros beyond its edges."""
    x, term = b.value(t), coord(0) * shape[3] + coord(3)
    at = index(term)
    inside = [Range(term, 0, terms)] if shape[0] * shape[3] > terms else []
    for i, n in zip(at, x.shape, strict=True):
        if i != term and not always_inside(i, 0, n, shape):
            inside.append(Range(i, 0, n))
    return b.copy(View(x.name, at, tuple(inside)), b.new(f"{t.name}/parts", shape, order=(0, 1, 2, 3)))


def _constant_part(b: Builder, name: str, rows: Recipe, shape: Shape, terms: int) -> Tensor:
    """The same of constant weights, (batch, rows, terms)."""
    parts, batch, height, share = shape
    padded = transform("pad", rows, before=(0, 0, 0), after=(0, 0, parts * share - terms))
    apart = transform("reshape", padded, shape=(batch, height, parts, share))
    return b.constant(f"{name}/parts", transform("transpose", apart, axes=(2, 0, 1, 3)), shape, order=(0, 1, 2, 3))


def _added(b: Builder, name: str, left: Tensor, right: Tensor) -> Tensor:
    """The products of the parts, added up: (1, batch, rows, columns) of int32."""
    shape, order = (*left.shape[:3], right.shape[2]), (0, 1, 2, 3)
    sums = b.new(f"{name}/parts", shape, DType.I32, order)
    b.emit(Gemm, sums, a=left.name, b=right.name, epilogue=Epilogue(integer(ACC)))
    total, acc = b.new(f"{name}/sum", (1, *shape[1:]), DType.I32, order), Expr("acc", (), None, DType.I64)
    return b.emit(Reduce, total, x=sums.name, axes=(0,), combine="add", pre=acc, epilogue=Epilogue(wrapped(acc, DType.I32)))
