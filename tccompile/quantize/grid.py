"""The numbers that bytes stand for: (q - zero) · scale, chosen by the error that rounding to them and cutting off make.

Or q is a float of 8 bits, E4M3, whose largest number the largest value becomes: its steps grow with the numbers, so that nothing
is won by cutting off, nor by a zero point.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from tccompile.ir.storage import nearest
from tccompile.ir.types import DType
from tccompile.ir.weights import byte_scales, float8_scale, float8_scales

CUTS = np.geomspace(1.0, 0.05, 40)
"""Shares of the greatest magnitude beyond which values are cut off, of which the one with the least error is taken."""

BETTER = 0.5
"""What a zero point must leave of the error's square to be worth what it costs: a constant to be added to each sum."""

NEGATIVE = 2.0**-9
"""The share of the greatest value up to which values below zero are cut off: half a step."""

LARGEST = 2.0**60
"""The magnitude from which on squares would not be float32 numbers."""


@dataclass(frozen=True)
class Grid:
    """Which numbers a tensor's bytes stand for, and the root mean square of what rounding to them moves it by, relative to it.

    float8  whether the bytes are floats, signed ones without a zero point
    """

    scale: float
    zero: int
    signed: bool
    error: float
    float8: bool = False

    @property
    def dtype(self) -> np.dtype:
        return np.dtype(np.int8 if self.signed else np.uint8)


def rounded(x: np.ndarray, grid: Grid) -> np.ndarray:
    """The values as the bytes hold them."""
    if grid.float8:
        return to_float8(x, np.float32(grid.scale))
    return _rounded(x, grid.scale, grid.zero, grid.signed)


def to_float8(x: np.ndarray, scale: np.ndarray | np.floating) -> np.ndarray:
    """The values as numbers of E4M3 times the scale."""
    return nearest(x / scale, DType.E4M3) * scale


def _rounded(x: np.ndarray, scale: float, zero: int, signed: bool) -> np.ndarray:
    limits = np.iinfo(np.int8 if signed else np.uint8)
    q = np.rint(x * np.float32(1 / scale)) + np.float32(zero)
    return (np.clip(q, limits.min, limits.max) - np.float32(zero)) * np.float32(scale)


def grid_of(sample: np.ndarray, float8: bool = False, centred: bool = False) -> Grid:
    """The grid of least error for values of which these are some, the least and the greatest among them; or that of float8.

    Values of both signs get signed bytes without a zero point, unless one would leave less than half of the error's square, and
    they need not be `centred`: what reads them may take none.
    """
    low, high = min(float(sample.min()), 0.0), max(float(sample.max()), 0.0)
    most = max(high, -low)
    if not 0.0 < most < LARGEST:
        return Grid(1.0, 0, signed=float8, error=0.0, float8=float8)
    size = float(np.mean(np.square(sample, dtype=np.float64))) or 1.0
    if float8:
        scale = float8_scale(np.float32(most))
        error = float(np.mean(np.square(to_float8(sample, scale) - sample, dtype=np.float64)))
        return Grid(float(scale), 0, signed=True, error=float(np.sqrt(error / size)), float8=True)

    def least(scales: np.ndarray, zeros: np.ndarray, signed: bool) -> Grid:
        errors = [
            np.mean(np.square(_rounded(sample, s, z, signed) - sample, dtype=np.float64))
            for s, z in zip(scales, zeros, strict=True)
        ]
        i = int(np.argmin(errors))
        scale = float(np.float32(scales[i]))
        return Grid(scale, int(zeros[i]), signed, float(np.sqrt(errors[i] / size)))

    none = np.zeros(len(CUTS), int)
    if -low <= high * NEGATIVE:
        return least(high * CUTS / 255, none, signed=False)
    symmetric = least(most * CUTS / 127, none, signed=True)
    if centred:
        return symmetric
    steps = (high - low) * CUTS / 255
    shifted = least(steps, np.clip(np.rint(-low * CUTS / steps), 0, 255).astype(int), signed=False)
    return shifted if shifted.error**2 < BETTER * symmetric.error**2 else symmetric


BLOCK = 1 << 20
"""Weights that are rounded at a time."""


def weight_error(rows: np.ndarray, float8: bool = False, rounded: Callable[[int], object] = lambda count: None) -> float:
    """What rounding weights to bytes moves them by, relative to them: the root mean square over all rows.

    rounded  called with how many more weights are rounded, now and then
    """
    size = moved = 0.0
    for part in np.array_split(rows, max(rows.size // BLOCK, 1)):
        scale = (float8_scales(part) if float8 else byte_scales(part))[:, None]
        off = (to_float8(part, scale) if float8 else np.clip(np.rint(part / scale), -127, 127) * scale) - part
        size += float(np.square(part, dtype=np.float64).sum())
        moved += float(np.square(off, dtype=np.float64).sum())
        rounded(part.size)
    return math.sqrt(moved / size) if size else 0.0
