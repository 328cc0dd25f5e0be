"""What becomes of scores in attention on Hopper: weights, their sums, and what earlier results are multiplied by."""

from __future__ import annotations

import math
from typing import Any

from tccompile.ir.types import DType
from tccompile.kernels.attention_sm90_tile import Tile
from tccompile.kernels.parts.part import Part

FAR = -1e4
"""A row whose highest score is less, with a mask, sees nothing that counts: then scores are taken off it before they are scaled.

The product of such a score and log2(e) is rounded to more than an exponent may be off, or beyond float32.
"""

LIFT = 5
"""Weights in E4M3 are 2^LIFT times as large: that of a row's highest score up to then is 32. The largest number is 448, and the
smallest that has all digits 2^-6."""

ARITHMETIC = 2
"""Of 16 exponentials of weights in E4M3, so many are computed by multiplications: others wait for the unit that has them."""


def softmax(t: Tile, mask_kind: str, own_rows: bool, causal: bool) -> Any:
    """What becomes of scores, as device functions.

    sees(…)                               see `_seeing`
    read(mask_rows, n, column, columns)   the mask's words for the tile whose first column is n; () without a mask
    weigh(s, words, scales, n, sight, x0, x1)   weights of scores, for `packed`; the highest score of each row, with those of the
                                          tiles before, which weights are relative to; by what weights of these shrink; the sums
                                          of the new ones in this thread; and an int32 that depends on all of them.
                                          sight: (the thread's first column, and what `sees` gave)
    weigh_first(…)                        the same of a row's first tile, whose x0 and x1 are -inf
    packed(weights)                       the words of the product's left operand
    scaled(acc, a0, a1)                   each row's results times a
    sums(acc, sum0, sum1)                 of all weights of each row, from those in this thread or beside its results
    """
    from tccompile.kernels.ptx import softmax
    from tccompile.kernels.ptx.core import i32, inline

    part: Any = Part()
    bn, groups = t.bn, t.bn // 8
    has_mask, additive = mask_kind != "none", mask_kind not in ("none", "bool")
    kind = DType(mask_kind) if has_mask else DType.F32
    row_maximum, highest, cut = softmax.row_maximum(), softmax.highest(groups), softmax.cut(groups)
    masked = softmax.masked(groups, kind, own_rows)

    @inline
    def seen(s, words, factor, n, sight):
        """Scores with the mask, cut to what rows see."""
        column, end0, end1, safe = sight
        if has_mask:
            s = masked(s, words, factor)
        if n + bn > safe:
            s = cut(s, i32(n + column), end0, end1)
        return s

    @inline
    def top(s, x0, x1):
        """The highest of each row, with those of the tiles before."""
        x0, x1 = highest(s, x0, x1)
        return row_maximum(x0), row_maximum(x1)

    part.read, part.sees, part.additive = _reading(t, mask_kind, own_rows), _seeing(t, kind.size, has_mask, causal), additive
    weights, relative = _in_bytes if t.size == 1 else _in_halves, _relative(t, additive)
    part.weigh_first, part.weigh, part.packed, part.scaled, part.sums = weights(t, additive, seen, top, relative)
    part.shrink = _shrink()
    return part


def _reading(t: Tile, mask_kind: str, own_rows: bool) -> Any:
    """The device function read(mask's rows, n, column, columns) → the mask's words for the tile whose first column is n."""
    from tccompile.kernels.ptx import softmax
    from tccompile.kernels.ptx.core import i32, inline, u64

    if mask_kind == "none":

        @inline
        def read_nothing(mask_rows, n, column, columns):
            return ()

        return read_nothing

    bn, kind = t.bn, DType(mask_kind)
    size, (read_all, read_some) = kind.size, (softmax.read_mask(bn // 8, kind, own_rows, guarded) for guarded in (False, True))

    @inline
    def read_words(mask_rows, n, column, columns):
        at0, at1, left = u64(mask_rows[0] + u64(n * size)), u64(mask_rows[1] + u64(n * size)), i32(columns - n)
        if left >= bn:
            return read_all(at0, at1, left)
        return read_some(at0, at1, i32(left - column))

    return read_words


def _relative(t: Tile, additive: bool) -> Any:
    """The device function (s, x0, x1, by) → scores, and what is taken off them once they are scaled; if a mask is added, that is
    already off them where rows see nothing that counts."""
    from tccompile.kernels.ptx import softmax
    from tccompile.kernels.ptx.core import f32, inline

    taken_off, below = _taken_off(), softmax.below(t.bn // 8)

    @inline
    def near(s, x0, x1, b0, b1):
        if x0 < f32(FAR) or x1 < f32(FAR):
            return below(s, taken_off(x0, f32(1)), taken_off(x1, f32(1))), f32(0), f32(0)
        return s, b0, b1

    @inline
    def relative(s, x0, x1, by):
        b0, b1 = taken_off(x0, by), taken_off(x1, by)
        if additive:
            s, b0, b1 = near(s, x0, x1, b0, b1)
        return s, b0, b1

    return relative


def _taken_off() -> Any:
    """The device function (x, by) → what is taken off the scaled scores of a row whose highest is x."""
    from tccompile.kernels.ptx.core import f32, inline

    @inline
    def taken_off(x, by):
        return f32(0) if x == f32(-math.inf) else f32(x * by)

    return taken_off


def _shrink() -> Any:
    """The device function (was, x, by) → what is left of weights that are relative to a row's score `was` when that becomes x."""
    from tccompile.kernels.ptx.core import f32, inline
    from tccompile.kernels.ptx.softmax import exp2

    taken_off = _taken_off()

    @inline
    def shrink(was, x, by):
        return exp2(f32(f32(was - taken_off(x, f32(1))) * by))

    return shrink


def _in_halves(t: Tile, additive: bool, seen: Any, top: Any, relative: Any) -> tuple[Any, Any, Any, Any, Any]:
    """weigh_first, weigh, packed, scaled and sums of weights in halves."""
    from tccompile.kernels.ptx import hopper as hw
    from tccompile.kernels.ptx import softmax
    from tccompile.kernels.ptx.core import f32, inline

    exponentials, row_sum, exp2, shrink = softmax.exponentials(t.bn // 8), softmax.row_sum(), softmax.exp2, _shrink()

    @inline
    def decay(was, x, b, by):
        return shrink(was, x, by) if additive else exp2(f32(was * by - b))

    @inline
    def weigh(s, words, scales, n, sight, x0, x1):
        factor, by = scales
        was0, was1 = x0, x1
        s = seen(s, words, factor, n, sight)
        x0, x1 = top(s, x0, x1)
        s, b0, b1 = relative(s, x0, x1, by)
        s, add0, add1 = exponentials(s, by, b0, b1)
        a0, a1 = decay(was0, x0, b0, by), decay(was1, x1, b1, by)
        return s, x0, x1, a0, a1, add0, add1, hw.bits_of(f32(add0 + add1))

    @inline
    def sums(acc, sum0, sum1):
        return row_sum(sum0), row_sum(sum1)

    return weigh, weigh, softmax.halves(t.bn // 8, t.kind), softmax.scaled(t.e // 8), sums


def _in_bytes(t: Tile, additive: bool, seen: Any, top: Any, relative: Any) -> tuple[Any, Any, Any, Any, Any]:
    """The same of weights in E4M3, 2^`LIFT` times as large. What they are relative to stays until one is 256 or more, which is
    seen in the bytes: then the row's highest score is looked for, and weights are computed again."""
    from tccompile.kernels.ptx import softmax
    from tccompile.kernels.ptx.core import f32, i32, inline

    exponentials, packed, scaled = (
        softmax.exponentials(t.bn // 8, ARITHMETIC),
        softmax.bytes_of(t.bn // 8),
        softmax.scaled(t.wide // 8),
    )
    reached, any_of_warp, row_sum, row_first = (
        softmax.largest_reached(t.bn // 8), softmax.any_of_warp, softmax.row_sum(), softmax.row_first
    )  # fmt: skip
    shrink, counted, at0, at1 = _shrink(), t.wide > t.e, t.e // 2, t.e // 2 + 2

    @inline
    def given(s, x0, x1, by):
        s, b0, b1 = relative(s, x0, x1, by)
        s, add0, add1 = exponentials(s, by, f32(b0 - f32(LIFT)), f32(b1 - f32(LIFT)))
        return packed(s), add0, add1

    @inline
    def weigh_first(s, words, scales, n, sight, x0, x1):
        s = seen(s, words, scales[0], n, sight)
        x0, x1 = top(s, x0, x1)
        weights, add0, add1 = given(s, x0, x1, scales[1])
        return weights, x0, x1, f32(1), f32(1), add0, add1, i32(0)

    @inline
    def weigh(s, words, scales, n, sight, x0, x1):
        factor, by = scales
        s = seen(s, words, factor, n, sight)
        weights, add0, add1 = given(s, x0, x1, by)
        a0, a1, beyond = f32(1), f32(1), reached(weights)
        if any_of_warp(i32(1 if beyond != 0 or x0 == f32(-math.inf) or x1 == f32(-math.inf) else 0)) != 0:
            was0, was1 = x0, x1
            x0, x1 = top(s, x0, x1)
            weights, add0, add1 = given(s, x0, x1, by)
            a0, a1 = shrink(was0, x0, by), shrink(was1, x1, by)
        return weights, x0, x1, a0, a1, add0, add1, beyond

    @inline
    def as_they_are(weights):
        return weights

    @inline
    def scaled_if_changed(acc, a0, a1):
        if any_of_warp(i32(1 if a0 != f32(1) or a1 != f32(1) else 0)) != 0:
            acc = scaled(acc, a0, a1)
        return acc

    @inline
    def sums(acc, sum0, sum1):
        if counted:
            return row_first(acc[at0]), row_first(acc[at1])
        return row_sum(sum0), row_sum(sum1)

    return weigh_first, weigh, as_they_are, scaled_if_changed, sums


def _seeing(t: Tile, size: int, has_mask: bool, causal: bool) -> Any:
    """The device function sees(lanes, m0, item's (batch, head), integers, mask) → up to which columns a thread's two rows see, up
    to which all rows of its warpgroup do, and the addresses of the mask's rows.

    lanes  (warp, lane, the warp's group, the thread's first column of 8)
    """
    from tccompile.kernels.ptx.core import i32, inline, types, u64

    i64 = types.int64

    @inline
    def sees(lanes, m0, at, integers, mask):
        warp, lane, group, column = lanes
        rows, columns, ahead = integers[4], integers[5], integers[6]
        m = i32(m0 + warp * 16 + (lane >> 2))
        end0 = i32(min(columns, i32(m + 1 + ahead))) if causal else columns
        end1 = i32(min(columns, i32(m + 9 + ahead))) if causal else columns
        safe = i32(min(columns, i32(m0 + group * 64 + 1 + ahead))) if causal else columns
        if has_mask:
            mask_at, mask_b, mask_h, mask_r = mask
            line = i64(at[0]) * mask_b + i64(at[1]) * mask_h + column
            mask0 = u64(mask_at + u64((line + i64(min(m, i32(rows - 1))) * mask_r) * size))
            mask1 = u64(mask_at + u64((line + i64(min(i32(m + 8), i32(rows - 1))) * mask_r) * size))
            return end0, end1, safe, mask0, mask1
        return end0, end1, safe, u64(0), u64(0)

    return sees
