"""Tensors, where their elements lie, and how they are stored."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from tccompile.ir.extent import Extent, Shape, ceil_div, most, round_up
from tccompile.ir.types import DType

ROW = 16
"""Bytes: the widest load and store, a row of the 8-row matrices that mma.sync's and wgmma's operands are made of, and what the
strides and the innermost box of a tensor map are multiples of."""


def per_row(dtype: DType) -> int:
    """How many elements lie in ROW bytes."""
    return 8 * ROW // dtype.bits


LANES = 8
"""Elements that a thread of most kernels reads, computes and writes at once, whatever their type. The innermost axis is padded to
a multiple of it, so that no thread has less to do."""


def padding(dtype: DType, multiplied: bool) -> int:
    """The innermost axis of a tensor of this type is padded to a multiple of so many elements.

    multiplied  whether products may read it as an operand, whose rows are of ROW bytes each for Tensor Cores
    """
    return max(LANES, per_row(dtype)) if multiplied and dtype is not DType.BOOL else LANES


@dataclass(frozen=True)
class Tensor:
    """A tensor and where its elements lie. Tuples have one entry per logical axis, in the model's order of axes.

    shape    what the model says
    padded   the extents in memory: those of `shape` plus padding. Whoever writes the tensor writes all of `padded`, zeros
             outside `shape`, and nothing else
    strides  in elements; 0 is not allowed except where the extent is 1
    base     the tensor in whose storage this one lies (never itself a view), or None if it has storage of its own
    offset   in elements, from the start of the storage
    """

    name: str
    shape: Shape
    dtype: DType
    padded: Shape
    strides: Shape
    base: str | None = None
    offset: Extent = 0

    @property
    def rank(self) -> int:
        return len(self.shape)

    @cached_property
    def span(self) -> Extent:
        """Elements from the first to the last one of `padded`, both included."""
        return 1 + sum((n - 1) * s for n, s in zip(self.padded, self.strides, strict=True)) if 0 not in self.padded else 0

    @property
    def size(self) -> Extent:
        """Elements of `shape`."""
        return math.prod(self.shape)

    @cached_property
    def nbytes(self) -> Extent:
        """Bytes from the first to the last element of `padded`."""
        return ceil_div(self.span * self.dtype.bits, 8)

    @property
    def storage(self) -> str:
        """The name of the tensor that owns the memory."""
        return self.base or self.name

    @property
    def order(self) -> tuple[int, ...]:
        """The axes from the outermost to the innermost; of those that share a stride, the first one first."""
        return tuple(sorted(range(self.rank), key=lambda a: -self.strides[a]))

    @property
    def inner(self) -> int | None:
        """The axis whose neighbours are neighbours in memory (stride 1), or None for a tensor of one element. Over a range of
        sizes it may have neighbours at some of them only, as the padding of a concatenation's last part."""
        unit = [a for a in range(self.rank) if self.strides[a] == 1 and most(self.padded[a]) > 1]
        return unit[0] if unit else None


def dense(name: str, shape: Shape, dtype: DType, order: tuple[int, ...] | None = None, pad: int | None = None) -> Tensor:
    """A tensor with storage of its own, axes in `order` (outermost first; default as in `shape`), the last one padded.

    An image's NHWC is order (0, 2, 3, 1); `pad=1` gives no padding. By default there is what operands of products have: `layout`
    takes away what is too much.
    """
    pad = padding(dtype, multiplied=True) if pad is None else pad
    order = tuple(range(len(shape))) if order is None else order
    padded = list(shape)
    if order:
        padded[order[-1]] = round_up(shape[order[-1]], pad)
    strides: list[Extent] = [1] * len(shape)
    step: Extent = 1
    for axis in reversed(order):
        strides[axis], step = step, step * padded[axis]
    return Tensor(name, shape, dtype, tuple(padded), tuple(strides))


def translated(steps: Extent, old: Tensor, new: Tensor) -> Extent:
    """How far elements of a tensor that lie `steps` apart in its layout `old` do so in `new`, with its axes in the same order."""
    out: Extent = 0
    for axis in old.order:
        if old.padded[axis] > 1:
            count, steps = divmod(steps, old.strides[axis])
            out += count * new.strides[axis]
    return out


def merged(extents: Sequence[Extent], strides: Sequence[Sequence[Extent]]) -> list[tuple[Extent, Shape]]:
    """Nested loops over some axes, neighbours merged where all strides allow it: how often each turns, and the steps it takes.

    strides  of each tensor that the loops go through, one an axis
    """
    loops: list[tuple[Extent, Shape]] = []
    for i, n in enumerate(extents):
        steps = tuple(s[i] for s in strides)
        if n == 1:
            continue
        if loops and all(outer == n * inner for outer, inner in zip(loops[-1][1], steps, strict=True)):
            loops[-1] = loops[-1][0] * n, steps
        else:
            loops.append((n, steps))
    return loops


@dataclass(frozen=True)
class Storage:
    """How a tensor is stored other than its neighbours, and why.

    scale    what lies in memory is the value times this, any positive number
    in_full  products of float32 that it is the result of multiply float32, not parts that leave out last digits
    """

    reason: str
    scale: float = 1.0
    in_full: bool = False


def factor_text(factor: float) -> str:
    """A factor as people read it: 2^-8, or its shortest decimal number if it is no power of two."""
    significand, exponent = math.frexp(factor)
    return f"2^{exponent - 1}" if significand == 0.5 else repr(factor)
