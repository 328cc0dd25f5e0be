"""Rounding weights to float16 such that their sums stay, in memory that a thread keeps: making it anew takes more than the sums.

To nearest, but for those few elements that lie about halfway to the next number, and by which rounding adds up.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from threading import local

import numpy as np

GOLDEN = 0.6180339887498949
EXPONENT = 0xFF << 23
LEAST = (127 - 24) << 23
"""Of float32: the bits of the exponent, and of 2**-24, float16's least."""

LEAST_NORMAL = (127 - 14) << 23
SIGN = -(1 << 31)

LARGEST, END = np.float32(65504), np.float32(65520)
"""float16's largest number, and the first that it rounds to infinity."""

BLOCK = 5 << 17
"""Elements that are looked at at once: so many that threads seldom wait for the lock that each function of NumPy's takes."""

ACROSS, STRETCHES, WORTH_TILES = 1 << 22, 16, 4 << 20
"""Elements that are gathered at once where rows lie across memory, from how many stretches of it, and from how many bytes on
that takes less time."""

COST = 14
"""Bits of float16's numbers from 0 to 1."""


def rounded(x: np.ndarray, terms: int) -> np.ndarray:
    """As float16, with the sums over the last `terms` axes kept."""
    if x.dtype == np.float16:
        return x
    if not x.size:
        return x.astype(np.float16)
    k = math.prod(x.shape[x.ndim - terms :])
    lines, out = x.reshape(-1, k), np.empty((x.size // k, k), np.float16)
    turns = (np.arange(k) * GOLDEN % 1).argsort(kind="stable")  # any first part of it is spread evenly: for equal elements
    place, many = turns.argsort(), len(lines) if lines.flags.c_contiguous else max(ACROSS // k, 1)
    for first in range(0, len(lines), many):
        some, near = _together(lines[first : first + many]), out[first : first + many]
        for i in range(0, len(some), step := rows_at_once(len(some), k)):
            _round_lines(some[i : i + step], turns, place, near[i : i + step])
    return out.reshape(x.shape)


def _together(lines: np.ndarray) -> np.ndarray:
    """The rows, one behind the other: where they lie across memory, read in stretches."""
    if lines.flags.c_contiguous:
        return lines
    out = np.empty(lines.shape, lines.dtype)
    step = STRETCHES if out.nbytes >= WORTH_TILES else lines.shape[1]
    for j in range(0, lines.shape[1], step):
        out[:, j : j + step] = lines[:, j : j + step]
    return out


def _round_lines(lines: np.ndarray, turns: np.ndarray, place: np.ndarray, near: np.ndarray) -> None:
    """Write the rows to `near`, each with the sum that it has if it is finite; `turns` and `place` as `_Lines` has them."""
    x, off, wide, gap = (room.reshape(lines.shape) for room in scratch(lines.size))
    np.copyto(x, lines, "same_kind")
    np.abs(x, out=wide)
    largest_there = wide.max()
    if not largest_there < END:
        with np.errstate(all="ignore"):
            near[...] = x
        if (finite := wide.max(1) < END).any():
            those = np.empty((np.count_nonzero(finite), lines.shape[1]), np.float16)
            _round_lines(lines[finite], turns, place, those)
            near[finite] = those
        return
    _nearest(x, wide, near, off, gap)
    np.subtract(wide, x, out=off)
    total = off.sum(1, dtype=np.float64)
    side = np.where(total < 0, np.float32(-1), np.float32(1))[:, None]
    np.abs(total, out=total)
    off *= side  # positive: rounded to the side of its row's sum
    wide *= side
    inward = wide > 0  # the next number on the other side is nearer to 0
    # How far that is: one in the last of float16's 10 bits; in float32's bits, that is quick
    bits = np.subtract(wide.view(np.int32), inward, out=gap.view(np.int32))
    bits &= EXPONENT
    bits -= 10 << 23
    np.maximum(bits, LEAST, out=bits)
    moves = off > 0
    moves &= wide != 0
    if largest_there >= LARGEST:
        moves &= wide != -LARGEST
    gap *= moves
    largest = np.maximum(gap.max(1), np.finfo(np.float32).tiny)
    off += off
    flipped = _Lines(off, gap, moves, largest, total, turns, place).cheapest()
    near.view(np.uint16).reshape(-1)[flipped] += np.where(inward.reshape(-1)[flipped], -1, 1).astype(np.uint16)


def _nearest(x: np.ndarray, size: np.ndarray, near: np.ndarray, more: np.ndarray, power: np.ndarray) -> None:
    """Write the nearest float16 numbers of `x`, and these as float32 to `size`, where magnitudes are. NumPy takes three times as
    long, one after the other.

    To add 2**13 times a number's power of two rounds it as float16 does, and leaves in the last bits how many of its steps it is.
    """
    exponent, steps, sign = power.view(np.int32), more.view(np.int32), size.view(np.int32)
    np.bitwise_and(size.view(np.int32), EXPONENT, out=exponent)
    np.maximum(exponent, LEAST_NORMAL, out=exponent)
    exponent += 13 << 23
    np.add(size, power, out=more)
    np.subtract(more, power, out=size)
    steps -= exponent
    exponent >>= 13
    steps += exponent
    steps -= (13 << 10) + (LEAST_NORMAL >> 13)  # the power of two of float16's least normal numbers counts as 0
    np.bitwise_and(x.view(np.int32), SIGN, out=exponent)
    sign |= exponent
    exponent >>= 16
    steps |= exponent
    near.view(np.uint16)[...] = steps


@dataclass(frozen=True)
class _Lines:
    """What is known of rows.

    twice    how far each element has been rounded, times 2
    gap      how far the next number on the other side is; 0 where it stays
    moves    which do not stay
    largest  gap of each row; `total` is what rounding has added up to
    turns    the order of places in which the first of equals is taken; `place`, where each is in it
    """

    twice: np.ndarray
    gap: np.ndarray
    moves: np.ndarray
    largest: np.ndarray
    total: np.ndarray
    turns: np.ndarray
    place: np.ndarray

    def cheapest(self) -> np.ndarray:
        """Where elements are to round to the other side: those of least cost in each row, such that their gaps add up to about
        the row's total. An element costs how much farther it is then, as a part of the row's largest gap: from 0 to 1."""
        k, rows, found, lines = self.gap.shape[1], np.arange(len(self.gap)), [], self
        bound = min(1.0, k**-0.5)  # few rows need more, and only what is below it is sorted
        while True:
            at, enough = lines._below(bound)
            row = at // k
            taken = enough[row]
            found.append((rows[row] * k + at - row * k)[taken])
            if enough.all():
                return np.concatenate(found)
            short = np.flatnonzero(~enough)
            rows, bound, lines = rows[short], min(1.0, 8 * bound), lines._of(short)

    def _of(self, rows: np.ndarray) -> _Lines:
        twice, gap, moves = self.twice[rows], self.gap[rows], self.moves[rows]
        return _Lines(twice, gap, moves, self.largest[rows], self.total[rows], self.turns, self.place)

    def _below(self, bound: float) -> tuple[np.ndarray, np.ndarray]:
        """What `cheapest` finds of elements that cost at most so much; and in which rows that is all."""
        k, gap = self.gap.shape[1], self.gap.reshape(-1)
        least = np.float32(-bound * (1 + 2**-8)) * self.largest
        some = np.flatnonzero((self.twice - self.gap >= least[:, None]) & self.moves)
        row = some // k
        cost = gap[some] - self.twice.reshape(-1)[some]
        cost /= self.largest[row]
        np.maximum(cost, 0, out=cost)
        costs = cost.astype(np.float16).view(np.uint16)  # in 16 bits, of which 14 are used: those are sorted fast
        bits = (k - 1).bit_length()
        small = bits + COST + (len(self.total) - 1).bit_length() <= 32
        keys = row.astype(np.uint32 if small else np.uint64)
        keys <<= COST
        keys |= costs
        keys <<= bits
        keys |= self.place[some - row * k].astype(keys.dtype)
        keys = np.sort(keys[costs <= np.float16(bound).view(np.uint16)]).astype(np.int64)
        row = keys >> bits + COST
        at = row * k + self.turns[keys & ((1 << bits) - 1)]
        brought = gap[at].astype(np.float64)
        after = np.concatenate([[0.0], brought.cumsum()])  # exact: multiples of 2**-24 below 2**29
        edges = np.searchsorted(row, np.arange(len(self.total) + 1))
        flips = after[:-1] - after[edges[row]] + brought / 2 < self.total[row]
        return at[flips], (after[edges[1:]] - after[edges[:-1]] >= self.total) | (bound == 1)


def rows_at_once(rows: int, k: int) -> int:
    """Into how many rows of that length those are cut, such that all parts are about alike and at most a block, or a row."""
    parts = -(-rows * k // BLOCK)
    return max(-(-rows // max(parts, 1)), 1) if k < BLOCK else 1


class _Kept(local):
    def __init__(self) -> None:
        self.arrays = np.empty((4, BLOCK), np.float32)


_kept = _Kept()


def scratch(size: int) -> np.ndarray:
    """Four arrays of so many float32, in memory that a thread keeps if it is a block's: the next call gives them away again."""
    return _kept.arrays[:, :size] if size <= BLOCK else np.empty((4, size), np.float32)
