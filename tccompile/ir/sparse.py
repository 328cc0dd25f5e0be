"""2:4 sparsity: weights of which, of every four neighbours along the channels that are summed over, two at most are not zero.

Sparse Tensor Cores take two of every four, and of each where it is, two bits. Both are constants of their own (`forms.Sparse`):

  values  (O, taps · channels / 2): of every four channels of a tap two, in ascending order; each tap's channels are filled up
          with zeros to a multiple of `whole`
  places  (blocks of 64 rows, pieces, PIECE) bytes: of each four a nibble, the places of its two values, the first one in the low
          bits. Rows are filled up to a multiple of ROWS

Places lie as a sparse product of Hopper's asks the 128 threads of a warpgroup for them: for 64 rows and `whole` of K the words of
thread 0, then of thread 1 and so on. Thread 32 w + 4 g + q has rows 16 w + g and 8 below. Of 16-bit elements (`whole` is 64) it
has a word, channels 16 q to 16 q + 15 of both; of 8-bit elements (128) one for each 64 channels, of the first row where q is even
or else of the second, channels 0 to 31 where q is below 2 or else 32 to 63.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from tccompile.ir.extent import Extent, Shape, round_up
from tccompile.ir.types import DType

GROUP = 64
"""Rows that a warpgroup multiplies by."""

ROWS = 128
"""Rows of which there are places are filled up to a multiple of it: no tile has more, or a part of them."""

PIECE = 256
"""Bytes of places in a row: no box of the copy engine has more elements along an axis."""

WHOLE_BYTES = 128
"""Of K, zeros included, that are multiplied at a time."""

PART = 1 << 22
"""Elements that are looked at at once: what is computed of them takes several times their memory."""

PAIRS = [(0, 1), (0, 1), (0, 1), (0, 1), (0, 2), (0, 2), (1, 2), (0, 1), (0, 3), (0, 3), (1, 3), (0, 1), (2, 3)] + [(0, 1)] * 3
"""Of four numbers, two that hold those that are not zero, which the bits of an index say."""


def whole(dtype: DType) -> int:
    """Elements of K, zeros included, that are multiplied at a time."""
    return WHOLE_BYTES * 8 // dtype.bits


def shapes(shape: Shape, whole: int) -> tuple[tuple[Extent, Extent], tuple[Extent, Extent, int]]:
    """The shapes of the values and of the places of weights (O, C, …). Raises ValueError for no such weights."""
    if len(shape) < 2 or whole not in (64, 128):
        raise ValueError(f"weights {shape} in {whole} of K at a time")
    depth = math.prod(shape[2:]) * round_up(shape[1], whole)
    return (shape[0], depth // 2), (round_up(shape[0], ROWS) // GROUP, depth * GROUP // 8 // PIECE, PIECE)


def is_sparse(w: np.ndarray) -> bool:
    """Whether of every four neighbouring channels of weights (O, C, …) two at most are not zero."""
    return all((np.count_nonzero(fours, -1) <= 2).all() for fours in _fours(w, 4))


def sparse_values(w: np.ndarray, whole: int) -> np.ndarray:
    """The values of weights (O, C, …). Raises ValueError if they are not 2:4."""
    shape, _ = shapes(w.shape, whole)
    parts = [np.take_along_axis(fours, _pairs(fours), -1).reshape(len(fours), -1) for fours in _fours(w, whole)]
    return np.concatenate(parts) if parts else np.empty(shape, w.dtype)


def sparse_places(w: np.ndarray, whole: int) -> np.ndarray:
    """The places of the values of weights (O, C, …). Raises ValueError if they are not 2:4."""
    _, (blocks, pieces, _) = shapes(w.shape, whole)
    nibbles = np.full(
        (blocks * GROUP, pieces * PIECE * 2 // GROUP), 0b0100, np.uint8
    )  # of rows that are not there, the first two
    at = 0
    for fours in _fours(w, whole):
        pairs = _pairs(fours)
        nibbles[at : at + len(fours)] = (pairs[..., 0] | pairs[..., 1] << 2).reshape(len(fours), -1)
        at += len(fours)
    found = nibbles[:, ::2] | nibbles[:, 1::2] << 4
    rows = blocks, 4, 2, 8  # a warp's 16, in two halves
    if whole == 64:
        laid = found.reshape(*rows, -1, 4, 2).transpose(0, 4, 1, 3, 5, 2, 6)
    else:
        laid = found.reshape(*rows, -1, 2, 2, 4).transpose(0, 4, 1, 3, 6, 2, 5, 7)
    return np.ascontiguousarray(laid).reshape(blocks, pieces, PIECE)


def _fours(w: np.ndarray, whole: int) -> Iterator[np.ndarray]:
    """Some rows of weights (O, C, …) at a time, as (rows, fours of K, 4), taps before channels, which are filled up."""
    step = max(PART // max(math.prod(w.shape[1:]), 1), 1)
    for i in range(0, len(w), step):
        rows = np.moveaxis(w[i : i + step], 1, -1)
        missing = round_up(w.shape[1], whole) - w.shape[1]
        if missing:
            rows = np.pad(rows, [(0, 0)] * (rows.ndim - 1) + [(0, missing)])
        yield rows.reshape(len(rows), math.prod(rows.shape[1:]) // 4, 4)


def _pairs(fours: np.ndarray) -> np.ndarray:
    """Which two of each four may differ from zero."""
    there = fours != 0
    if (there.sum(-1, dtype=np.uint8) > 2).any():
        raise ValueError("of four neighbouring channels more than two differ from zero")
    index = np.packbits(there, -1, bitorder="little")[..., 0]
    found: np.ndarray = np.array(PAIRS, np.uint8)[index]
    return found
