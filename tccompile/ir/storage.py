"""Between values and bytes: the rounding rules of storage, and a tensor's elements inside a buffer."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import numpy as np

from tccompile.ir.tensor import Tensor
from tccompile.ir.types import FLOAT8, DType


def convert(values: np.ndarray, dtype: np.dtype | type) -> np.ndarray:
    """`values` as another NumPy type. Floats to integers truncate and saturate, NaN gives 0; to bool, all but 0 is true.

    Integers to narrower integers keep their low bits; floats to narrower floats round to nearest even, overflow to inf.
    """
    dtype = np.dtype(dtype)
    if values.dtype == dtype:
        return values
    with np.errstate(all="ignore"):
        if values.dtype.kind != "f" or dtype.kind not in "iu":
            return values.astype(dtype)
        limits = np.iinfo(dtype)
        if values.size and values.min() > float(limits.min) and values.max() < float(limits.max):  # and none of them is NaN
            return values.astype(dtype)
        inside = (values > float(limits.min)) & (values < float(limits.max))
        truncated = np.where(inside, values, 0).astype(dtype)
        # Comparisons with NaN are false: it stays 0.
        return np.where(inside, truncated, np.where(values > 0, limits.max, np.where(values < 0, limits.min, 0))).astype(dtype)


def to_storage(values: np.ndarray, dtype: DType) -> np.ndarray:
    """Values as `dtype` stores them: see `convert`. What NumPy does not have is rounded to nearest even and returned as its bits:
    bf16 as uint16, floats of 8 bits as uint8. These saturate, infinities too; NaN stays NaN."""
    if dtype in FLOAT8:
        return _to_float8(convert(values, np.float32), dtype)
    if dtype is not DType.BF16:
        return convert(values, dtype.numpy)
    bits = np.ascontiguousarray(convert(values, np.float32)).view(np.uint32)
    nan = (bits & 0x7FFFFFFF) > 0x7F800000
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> 16) & 1)) >> 16
    return np.where(nan, (bits >> 16) | 0x40, rounded).astype(np.uint16).reshape(values.shape)


def from_storage(stored: np.ndarray, dtype: DType) -> np.ndarray:
    """Stored elements in the type that expressions compute in: float32, int64 or bool."""
    if dtype in FLOAT8:
        return _numbers_of(dtype)[stored]
    if dtype is DType.BF16:
        return (stored.astype(np.uint32) << 16).view(np.float32)
    return convert(stored, dtype.compute.numpy)


def nearest(values: np.ndarray, dtype: DType) -> np.ndarray:
    """The numbers of a float of 8 bits that float32 values are stored as: `from_storage` of `to_storage`, in less time."""
    inside = np.clip(values, np.float32(dtype.lowest), np.float32(dtype.largest))
    step = (np.ascontiguousarray(inside).view(np.int32) & 0x7F800000).view(np.float32)  # its power of two
    with np.errstate(invalid="ignore"):  # infinite where it is no number
        step = np.maximum(step * np.float32(dtype.eps), np.float32(dtype.least_normal * dtype.eps))
        found: np.ndarray = np.rint(inside / step) * step
    return found


def _to_float8(values: np.ndarray, dtype: DType) -> np.ndarray:
    """The bits of float32 as a float of 8 bits: its bias is taken from the exponent, and its last digits are rounded off."""
    dropped = 24 - dtype.digits
    largest, normal = np.float32(dtype.largest), np.float32(dtype.least_normal)
    size = np.minimum(np.abs(values), largest)  # NaN stays
    bits = size.view(np.uint32)
    rounded = (bits + np.uint32((1 << dropped - 1) - 1) + (bits >> dropped & 1) >> dropped) - (normal.view(np.uint32) >> dropped)
    with np.errstate(invalid="ignore"):
        least = np.rint(np.where(size < normal, size, 0) / (normal * np.float32(dtype.eps)))  # in steps of the least number
        code = np.where(size < normal, least, (rounded + (1 << dtype.digits - 1)).astype(np.float32))
        code = np.where(np.isnan(values), np.float32(0x7F), code).astype(np.uint8)
    return np.where(np.signbit(values) & ~np.isnan(values), code | 0x80, code).astype(np.uint8)


@cache
def _numbers_of(dtype: DType) -> np.ndarray:
    """What each byte stands for as a float of 8 bits."""
    byte, fraction = np.arange(256), dtype.digits - 1
    exponent, rest = (byte & 0x7F) >> fraction, byte & (1 << fraction) - 1
    size = np.where(exponent > 0, rest + (1 << fraction), rest) * 2.0 ** (np.maximum(exponent, 1) - 1)
    size *= dtype.least_normal * dtype.eps
    if dtype.infinite:
        size[exponent == exponent.max()] = np.nan
        size[(byte & 0x7F) == (exponent.max() << fraction)] = np.inf
    else:
        size[(byte & 0x7F) == 0x7F] = np.nan
    return np.where(byte & 0x80, -size, size).astype(np.float32)


def elements(buffer: np.ndarray, tensor: Tensor, shape: Sequence[int] | None = None) -> np.ndarray:
    """The tensor's elements inside the one-dimensional `buffer` that is its storage: a strided view of `shape`.

    shape  extents along the tensor's axes: `tensor.shape` if None, or `tensor.padded` for the padding too.
    Raises TypeError or ValueError if they reach outside the buffer.
    """
    size = buffer.itemsize
    shape = tensor.shape if shape is None else tuple(shape)
    if 0 in shape:
        return np.empty(shape, buffer.dtype)
    return np.ndarray(shape, buffer.dtype, buffer, tensor.offset * size, [s * size for s in tensor.strides])


def store(buffer: np.ndarray, tensor: Tensor, values: np.ndarray) -> None:
    """Write values (logical shape, type of the buffer) with zeros in all of the padding."""
    whole = elements(buffer, tensor, tensor.padded)
    for axis, (n, padded) in enumerate(zip(tensor.shape, tensor.padded, strict=True)):
        if padded > n:
            whole[(slice(None),) * axis + (slice(n, None),)] = 0
    _copy(elements(buffer, tensor), values)


def _copy(into: np.ndarray, values: np.ndarray) -> None:
    """into[...] = values. Where these lie in another order, in tiles: NumPy would go through all memory for every line."""
    a, b = (min(range(x.ndim), key=lambda axis: abs(x.strides[axis]), default=0) for x in (into, values))
    if a == b or into.nbytes < WORTH_TILES:
        into[...] = values
        return
    into, values = (np.moveaxis(x, (a, b), (0, 1)) for x in (into, values))
    for i in range(0, into.shape[0], WIDE):
        for j in range(0, into.shape[1], HIGH):
            into[i : i + WIDE, j : j + HIGH] = values[i : i + WIDE, j : j + HIGH]


WIDE, HIGH, WORTH_TILES = 16, 8192, 4 << 20
"""Elements of a tile, as they follow each other where they are written and where they are read, and from how many bytes on it
takes less time."""


def pack_constant(tensor: Tensor, values: np.ndarray) -> memoryview:
    """Logical values as the bytes of `tensor`'s storage: its dtype, its order of axes, zeros in the padding.

    Raises ValueError if they have another shape.
    """
    if not values.size and not tensor.span:
        return memoryview(b"")
    if values.shape != tensor.shape:
        raise ValueError(f"{tensor.name}: values of shape {values.shape} for a tensor of {tensor.shape}")
    full = tensor.padded == tensor.shape and tensor.span == values.size
    buffer = (np.empty if full else np.zeros)(tensor.span, tensor.dtype.numpy)
    store(buffer, tensor, to_storage(values, tensor.dtype))
    return buffer.view(np.uint8).data  # of gigabytes there need not be a copy
