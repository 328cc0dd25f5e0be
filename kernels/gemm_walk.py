"""Device functions that the GEMM-like kernels share: which tile a block computes, and its way through taps and channels."""

from __future__ import annotations

from functools import cache
from typing import Any

from numba import cuda
from numba.cuda import types

from tccompile.kernels.device_math import inline
from tccompile.kernels.ptx.core import i32, u32, u64
from tccompile.kernels.ptx.mma import count_up, count_up_in_order, divide, fence_device, store_word

GROUP = 8
"""Tiles of rows that are walked through all columns before the next ones: their operands stay in L2."""


@inline
def locate(block, tiles_m, tiles_n):
    """(batch, tile of rows, tile of columns) of a block."""
    batch = divide(block, i32(tiles_m * tiles_n))
    at = i32(block - batch * tiles_m * tiles_n)
    band = divide(at, i32(GROUP * tiles_n))
    at = i32(at - band * GROUP * tiles_n)
    height = i32(min(i32(tiles_m - band * GROUP), i32(GROUP)))
    column = divide(at, height)
    return batch, i32(band * GROUP + at - column * height), column


@inline
def first_tap(m, rows, image, x_row):
    """(offset of row m's first tap in x, its h, its w); an h outside every image for a row that is none. `image`: IMAGES."""
    p, q, x_n, x_h, _, _, stride_h, stride_w, pad_h, pad_w = image[:10]
    line = divide(m, q)
    n = divide(line, p)
    h = i32(i32(line - n * p) * stride_h - pad_h)
    w = i32(i32(m - line * q) * stride_w - pad_w)
    return i32(n * x_n + h * x_h + w * x_row), h if m < rows else i32(-(2**30)), w


@inline
def onward(r, s, c, channels, image):
    """One step further in the order (r, s, c)."""
    taps_w, walk_r, walk_s, walk_c = image[12:]
    c = i32(c + walk_c)
    s = i32(s + walk_s)
    r = i32(r + walk_r)
    if c >= channels:
        c = i32(c - channels)
        s = i32(s + 1)
    if s >= taps_w:
        s = i32(s - taps_w)
        r = i32(r + 1)
    return r, s, c


@cache
def last_to_arrive(in_order: bool) -> Any:
    """The device function (counter, parts) → whether this block is the last of `parts` to come here.

    What the others wrote before is then visible, and the counter 0. `in_order`: by one thread's atomic operation that orders
    memory (sm_70 and newer), which takes less time than every thread's fences.
    """

    @inline
    def arrived(counter, parts):
        if not in_order:
            fence_device()
        cuda.syncthreads()
        before = i32(0)
        if cuda.threadIdx.x == 0:
            before = i32(count_up_in_order(counter)) if in_order else i32(count_up(counter))
            if before == parts - 1:
                store_word(counter, u32(0))
        last = cuda.syncthreads_or(i32(cuda.threadIdx.x == 0 and before == parts - 1))
        if not in_order:
            fence_device()
        return last != 0

    return arrived


@inline
def at(base, offset, size):
    """The address `offset` units of `size` bytes from `base`."""
    return base + u64(types.int64(offset) * size)
