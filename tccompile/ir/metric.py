"""How far results are from what they should be."""

from __future__ import annotations

import math

import numpy as np


def relative_error(out: np.ndarray, reference: np.ndarray) -> float:
    """‖out - ref‖ / ‖ref‖ in float64. Where the reference is not finite, `out` must be the same, or the error is NaN."""
    out, reference = np.asarray(out, np.float64), np.asarray(reference, np.float64)
    finite = np.isfinite(reference)
    if not np.array_equal(out[~finite], reference[~finite], equal_nan=True):
        return math.nan
    norm = float(np.linalg.norm(reference[finite]))
    difference = float(np.linalg.norm(out[finite] - reference[finite]))
    return difference / norm if norm else difference
