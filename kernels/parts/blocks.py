"""Which tile of which product a block computes, and its way through K: taps and channels, in chunks."""

from __future__ import annotations

from collections import namedtuple
from functools import cache
from typing import Any

from tccompile.kernels.codegen import definition, execute, tuple_of
from tccompile.kernels.device_math import at
from tccompile.kernels.implicit_gemm import IMAGES, MATRICES, SCALARS
from tccompile.kernels.parts.part import Part, part
from tccompile.kernels.ptx.core import cuda, i32, inline, types, u64
from tccompile.kernels.ptx.mma import divide

Matrices = namedtuple("Matrices", MATRICES)  # type: ignore[misc]
"""A launch's numbers about the product (`implicit_gemm.scalars`), by name."""

Images = namedtuple("Images", IMAGES)  # type: ignore[misc]
"""Those about the image and the filter."""

K, LINE, C, R, S = range(5)
"""Where a thread is on its way through K: see `walk`."""

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


@cache
def located(bm: int, bn: int, x_unit: int, w_unit: int) -> Any:
    """The device function (x, w, matrices) → Block of this block, of bm×bn results; strides count units of so many bytes."""

    @inline
    def locate_block(x, w, matrices):
        part = i32(cuda.blockIdx.y)
        batch, tile_m, tile_n = locate(i32(cuda.blockIdx.x), matrices.tiles_m, matrices.tiles_n)
        m0 = i32(tile_m * bm)
        n0 = i32(tile_n * bn)
        outer = divide(batch, matrices.inner)
        within = i32(batch - outer * matrices.inner)
        x = at(x, i32(outer * matrices.x_outer + within * matrices.x_inner), x_unit)
        w = at(w, i32(outer * matrices.w_outer + within * matrices.w_inner), w_unit)
        stored = matrices.last_stored if batch == matrices.inner - 1 else matrices.stored
        return part, batch, m0, n0, x, w, stored

    return locate_block


@cache
def walk(across: int, elements: int, linear: bool) -> Part:
    """A thread's way through K, of which it has one chunk in each step of `across` chunks of so many elements.

    Where it is are five int32: its chunk of K, counted through all taps and channels, the step's first line of K, and its chunk's
    tap and chunk of channels. `linear`: there is one tap, and these stay.
    """

    @inline
    def begin(part, column, matrices, images):
        """Where a thread begins, and how many steps the block makes."""
        here = cuda.local.array(5, types.int32)
        k = i32(part * matrices.steps * across + column)
        steps = i32(min(matrices.steps, i32((matrices.chunks + across - 1) // across - part * matrices.steps)))
        tap = divide(k, matrices.channels)
        here[K], here[C] = k, i32(k - tap * matrices.channels)
        r = divide(tap, images.taps_w)
        here[R], here[S] = r, i32(tap - r * images.taps_w)
        here[LINE] = i32(part * matrices.steps * (across * elements))
        return here, steps

    @inline
    def onward(here, matrices, images):
        """To the next step, in the order (r, s, c)."""
        here[K] = i32(here[K] + across)
        here[LINE] = i32(here[LINE] + across * elements)
        if not linear:
            here[R], here[S], here[C] = carried(here[R], here[S], here[C], matrices, images)

    return part(begin=begin, onward=onward)


@inline
def carried(r, s, c, matrices, images):
    """The tap and the chunk of channels one step further."""
    c = i32(c + images.walk_c)
    s = i32(s + images.walk_s)
    r = i32(r + images.walk_r)
    if c >= matrices.channels:
        c = i32(c - matrices.channels)
        s = i32(s + 1)
    if s >= images.taps_w:
        s = i32(s - images.taps_w)
        r = i32(r + 1)
    return r, s, c


@inline
def first_tap(m, matrices, images):
    """(offset of row m's first tap in x, its h, its w), in units; an h outside every image for a row that is none."""
    line = divide(m, images.q)
    n = divide(line, images.p)
    h = i32(i32(line - n * images.p) * images.stride_h - images.pad_h)
    w = i32(i32(m - line * images.q) * images.stride_w - images.pad_w)
    offset = i32(n * images.x_n + h * images.x_h + w * matrices.x_row)
    return offset, h if m < matrices.rows else i32(-(2**30)), w


def entry(body: Any, split: bool, more: Any, extra: tuple[Any, ...], sparse: bool = False) -> tuple[Any, Any]:
    """The kernel and its signature around body(x, w, (places, partial, counter), Matrices, Images, more, e).

    Parameters: x, w, if that is `sparse` its places, with `split` workspace and counters, SCALARS, the int32 fields of the named
    tuple `more`, if any, and the epilogue's, of types `extra`.
    """
    addresses = ["x", "w", *(["places"] if sparse else []), *(["partial", "counter"] if split else [])]
    fields, kept = more._fields if more else (), [f"e{i}" for i in range(len(extra))]
    scope = {"body": body, "places": 0, "partial": 0, "counter": 0, "Matrices": Matrices, "Images": Images, "More": more}
    call = f"body(x, w, (places, partial, counter), Matrices({', '.join(MATRICES)}), Images({', '.join(IMAGES)}), "
    call += f"{f'More(*{tuple_of(fields)})' if more else 0}, {tuple_of(kept)})"
    text = definition("kernel", [*addresses, *SCALARS, *fields, *kept], [call])
    numbers = [i32] * (len(SCALARS) + len(fields))
    return execute(text, scope, "kernel"), types.void(*[u64] * len(addresses), *numbers, *extra)
