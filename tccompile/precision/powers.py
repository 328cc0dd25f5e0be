"""Powers of two by which fp16 holds weights whose output channels are of very different sizes."""

from __future__ import annotations

import numpy as np

from tccompile.refit.held import SUBNORMAL

LARGE = 2.0**13
"""Magnitudes from which on a channel is made smaller: fp16 ends at 65504, and other weights may be larger."""

SMALL = 2.0**-10
"""The largest magnitude of a channel below which it is made larger, where any channel is: a few digits above SUBNORMAL."""

APART = 2.0**8
"""How many times as large as the smallest channel the largest one is, at least: else one power for all does as well."""

STEP = 8
"""Powers are multiples of it, so that channels of about one size have the same."""

MOST = 96
"""And are at most so large, which float32 has room for on both sides."""


def powers_of(values: np.ndarray) -> np.ndarray | None:
    """For each output channel of weights (output channels, …) the power of two by which fp16 holds it; None where one for all
    channels does as well."""
    rows = values.reshape(len(values), -1)
    if not rows.size:
        return None
    largest = np.maximum(rows.max(1), -rows.min(1)).astype(np.float64)
    there = largest[largest > 0]
    if not np.isfinite(largest).all() or not there.size or there.max() < APART * there.min():
        return None
    if there.min() >= SUBNORMAL and there.max() < LARGE:
        return None
    powers = -STEP * np.ceil((np.frexp(largest)[1] - STEP) / STEP)
    fits = (largest == 0) | ((largest >= SMALL) & (largest < LARGE))
    return np.clip(np.where(fits, 0, powers), -MOST, MOST).astype(np.int32)
