"""Weights that come in 4 or 8 bits: integers u, a scale for each block of K, and the integer that stands for 0.

A weight is (u - zero) * scale. A kernel that reads each weight once reads its integers as they are, and so a quarter of the bytes
that halves have, or half of them. The constants of that form (`forms.Packed`):

  values  (tiles, chunks, bytes) bytes: of TILE rows of weights (N, K) and CHUNK neighbours along K. Both are filled up
  scales  (tiles, groups, numbers): of each of the tile's rows `per(block)` numbers, of the blocks that a group has; a group has
          CHUNK of K, or one block if that has more. Scales of rows that are not there are 0
  zeros   the same as bytes, ZEROS of each row at least

Bytes lie as a warp asks for them: 16 bytes of lane 0, then of lane 1 and so on. Lane 4 g + t has, of every 32 of K, 8 of rows g
and g + 8: the t-th 8, or where blocks have 16, the t-th 4 of each 16. In a word of 4 bits each, those are in the order 0, 2, 4,
6, 1, 3, 5, 7, so that neighbours along K lie 16 bits apart, as halves do.
"""

from __future__ import annotations

import numpy as np

from tccompile.ir.extent import Shape, ceil_div

TILE = 16
"""Rows of a product of Tensor Cores."""

CHUNK = 128
"""Of K, that a lane reads 16 bytes of each of its two rows of in 4 bits."""

ZEROS = 4
"""A word."""

BLOCKS = (64, 32, 16)
"""Sizes of blocks below CHUNK; those above are multiples of it."""

ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def per(block: int) -> int:
    """Blocks of a group."""
    return max(1, CHUNK // block)


def span(block: int) -> int:
    """Chunks of a group."""
    return max(1, block // CHUNK)


def shapes(shape: Shape, bits: int, block: int) -> tuple[Shape, Shape, Shape]:
    """The shapes of values, scales and zeros of weights (N, K). Raises ValueError for no such bits or blocks."""
    if bits not in (4, 8) or not (block in BLOCKS or (block > 0 and block % CHUNK == 0)):
        raise ValueError(f"weights of {bits} bits in blocks of {block}")
    n, k = shape
    tiles, chunks = ceil_div(n, TILE), ceil_div(k, CHUNK)
    groups = ceil_div(chunks, span(block))
    values = tiles, chunks, TILE * CHUNK * bits // 8
    return values, (tiles, groups, TILE * per(block)), (tiles, groups, TILE * max(per(block), ZEROS))


def packed_values(q: np.ndarray, bits: int, block: int, offset: int) -> np.ndarray:
    """Integers (N, K), `offset` added, as they lie. Raises ValueError for one that the bits do not hold."""
    shape, *_ = shapes(q.shape, bits, block)
    low, high = (int(q.min()), int(q.max())) if q.size else (0, 0)
    if not (low + offset >= 0 and high + offset < 1 << bits):
        raise ValueError(f"integers from {low} to {high} in {bits} bits")
    u = np.zeros((shape[0] * TILE, shape[1] * CHUNK), np.uint8)
    u[: q.shape[0], : q.shape[1]] = q + np.asarray(offset, np.int16 if q.dtype.itemsize == 1 else q.dtype)
    e = _apart(u, block)
    if bits == 8:
        e = e.reshape(*e.shape[:4], 2, 2, 4, 8)  # (tile, r, g, chunk, j >> 1, j & 1, t, e)
        return np.ascontiguousarray(e.transpose(0, 3, 4, 1, 2, 6, 5, 7)).reshape(shape)
    e = e[..., ORDER]
    pairs = e[..., ::2] | e[..., 1::2] << 4
    return np.ascontiguousarray(pairs.transpose(0, 3, 1, 2, 5, 4, 6)).reshape(shape)


def _apart(u: np.ndarray, block: int) -> np.ndarray:
    """Rows filled up to chunks, as (tile, r, g, chunk, j, t, e): row 8 r + g of the tile, the j-th 32 of the chunk, lane t."""
    tiles, chunks = u.shape[0] // TILE, u.shape[1] // CHUNK
    if block > 16:
        return u.reshape(tiles, 2, 8, chunks, 4, 4, 8)
    return u.reshape(tiles, 2, 8, chunks, 4, 2, 4, 4).swapaxes(5, 6).reshape(tiles, 2, 8, chunks, 4, 4, 8)


def packed_scales(scales: np.ndarray, block: int, dtype: str) -> np.ndarray:
    """Scales (N, blocks) as they lie."""
    return _in_groups(scales.astype(dtype), block, per(block))


def packed_zeros(zeros: np.ndarray, block: int, offset: int) -> np.ndarray:
    """Zero points (N, blocks), `offset` added, as they lie. Raises ValueError for one that is no byte then, or not whole."""
    low, high = (int(zeros.min()), int(zeros.max())) if zeros.size else (0, 0)
    if np.any(zeros % 1):
        raise ValueError("zero points that are no whole numbers")
    if not (low + offset >= 0 and high + offset < 256):
        raise ValueError(f"zero points from {low} to {high}, and {offset}")
    return _in_groups((zeros.astype(np.int16) + offset).astype(np.uint8), block, max(per(block), ZEROS))


def _in_groups(x: np.ndarray, block: int, room: int) -> np.ndarray:
    """(N, blocks) as (tiles, groups, rows of a tile with room for so many)."""
    tiles, groups = ceil_div(x.shape[0], TILE), ceil_div(x.shape[1], per(block))
    whole = np.zeros((tiles * TILE, groups * per(block)), x.dtype)
    whole[: x.shape[0], : x.shape[1]] = x
    out = np.zeros((tiles, groups, TILE, room), x.dtype)
    out[..., : per(block)] = whole.reshape(tiles, TILE, groups, per(block)).swapaxes(1, 2)
    return out.reshape(tiles, groups, TILE * room)


def unpacked(
    shape: tuple[int, ...], values: np.ndarray, scales: np.ndarray, zeros: np.ndarray | int, bits: int, block: int
) -> np.ndarray:
    """The weights (N, K) in float32, from what lies in the constants; zeros: that constant, or the number that stands for 0."""
    tiles, chunks, _ = values.shape
    if bits == 8:
        e = values.reshape(tiles, chunks, 2, 2, 8, 4, 2, 8).transpose(0, 3, 4, 1, 2, 6, 5, 7)
        e = e.reshape(tiles, 2, 8, chunks, 4, 4, 8)
    else:
        pairs = values.reshape(tiles, chunks, 2, 8, 4, 4, 4).transpose(0, 2, 3, 1, 5, 4, 6)
        e = np.empty((*pairs.shape[:-1], 8), np.uint8)
        e[..., ORDER[::2]], e[..., ORDER[1::2]] = pairs & 15, pairs >> 4
    if block == 16:
        e = e.reshape(*e.shape[:5], 4, 2, 4).swapaxes(5, 6)
    u = e.reshape(tiles * TILE, chunks * CHUNK)[: shape[0], : shape[1]].astype(np.float32)
    zero = np.float32(zeros) if isinstance(zeros, int) else _of_each(zeros, shape, block).astype(np.float32)
    out: np.ndarray = (u - zero) * _of_each(scales, shape, block).astype(np.float32)
    return out


def _of_each(x: np.ndarray, shape: tuple[int, ...], block: int) -> np.ndarray:
    """Of every weight what its block has in a constant of scales or zeros."""
    tiles, groups, _ = x.shape
    rows = x.reshape(tiles, groups, TILE, -1)[..., : per(block)].swapaxes(1, 2).reshape(tiles * TILE, -1)
    return np.repeat(rows[: shape[0]], block, 1)[:, : shape[1]]
