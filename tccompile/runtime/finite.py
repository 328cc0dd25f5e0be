"""Infinities and NaN where there should be numbers, and which step wrote them."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from tccompile.errors import VerificationError
from tccompile.ir.program import Op
from tccompile.ir.reference import from_storage
from tccompile.ir.tensor import Storage, Tensor
from tccompile.ir.types import DType


def is_finite(tensor: Tensor, stored: np.ndarray) -> bool:
    """Whether all elements of a tensor, as they are stored, are numbers; integers always are."""
    return not tensor.dtype.is_float or bool(np.isfinite(from_storage(stored, tensor.dtype)).all())


def check_finite(op: Op, tensor: Tensor, stored: np.ndarray, values: Callable[[], np.ndarray], storage: Storage | None) -> None:
    """Raises VerificationError, with the user's node, if what the op wrote holds an infinity or a NaN.

    values  gives what it computes, ahead of rounding to the tensor's type
    """
    if is_finite(tensor, stored):
        return
    exact = values()
    finite = exact[np.isfinite(exact)]
    largest = float(np.abs(finite).max()) if finite.size else 0.0
    what = "NaN" if np.isnan(from_storage(stored, tensor.dtype)).any() else "an infinity"
    where = f"node {op.nodes[0]!r} writes {what} into {tensor.name!r} {tensor.shape} {tensor.dtype.value}"
    if tensor.dtype is DType.F16 and largest > 65504:
        scale = storage.scale if storage else 0
        end = f"float16 {f'times 2^{-scale} ' if scale else ''}ends at {65504 / 2.0**scale:.6g}"
        way = f"its largest magnitude is {largest / 2.0**scale:.4g}, {end}: compile with --calibrate INPUT, or --precision fp32"
    else:
        way = f"its largest finite magnitude is {largest:.4g}: the model itself computes it, or an input holds it"
    raise VerificationError(f"{where}; {way}")
