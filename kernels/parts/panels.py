"""The operands of one step of a tiled product: which chunks a thread copies to shared memory, and where a lane reads fragments.

Most operands are K-major: a line in shared memory is a row of A or a column of B (a row of w, which holds them so), and its
chunks go along K. What is not has lines of K, whose chunks are of rows or columns, and is turned round by ldmatrix on its way to
registers. An operand is a part of these device functions:

    begin(start, line, tid, matrices, images, lines) → own
                                what a thread remembers of the lines whose chunks it copies; `start`: the tile's first row or
                                column, `line`: the thread's first line, where all is K-major
    fetch(own, address, here, held, to, matrices, images)
                                asks for its chunks of the step at `here` (see `blocks.walk`); they go `to` shared memory
    store(held, to)             writes them there, if they came through registers
    first(base, tid)            the address in the first stage of the thread's first chunk
    reads(base, lane, warp)     the address there of a lane's first fragment, of the `warp`-th rows or columns of the tile
"""

from __future__ import annotations

from collections import namedtuple
from dataclasses import dataclass
from typing import Any

from tccompile.kernels.device_math import at
from tccompile.kernels.parts.blocks import LINE, C, K, R, S, first_tap
from tccompile.kernels.parts.chunks import BYTES, swizzled
from tccompile.kernels.parts.part import Part, part
from tccompile.kernels.ptx.core import cuda, i32, inline, types, u32

Lines = namedtuple("Lines", ("depth", "x_line", "w_line"))
"""A launch's numbers about operands that are not K-major: lines of K, and strides of x and w from line to line, in chunks."""

Pixels = namedtuple("Pixels", ("at", "h", "w"))
"""Of a thread's rows that are pixels: offsets of their first taps in x, in chunks, and those taps' places in the image."""

Turned = namedtuple("Turned", ("line", "chunk", "inside", "start", "stride", "depth"))
"""A thread's share of lines of K: its first line of a step, its chunk of the matrix, whether that holds any rows or columns, the
stride from line to line, and how many lines there are."""


@dataclass(frozen=True)
class Panel:
    """An operand's share of a stage: `lines` lines of `across` chunks, from byte `offset` of the stage on.

    Neighbouring threads copy neighbouring chunks; a thread has one column of chunks, in every `apart`-th line.

    blocks  16-row (16-column) blocks of a warp
    held    where a thread's chunks begin among those that it copies in a step
    """

    lines: int
    across: int
    threads: int
    offset: int
    blocks: int
    held: int

    @property
    def apart(self) -> int:
        return self.threads // self.across

    @property
    def count(self) -> int:
        """Chunks that a thread copies."""
        return self.lines // self.apart

    @property
    def pitch(self) -> int:
        """Bytes from line to line."""
        return BYTES * self.across


def pixels(panel: Panel, copies: Part, lanes: Any) -> Part:
    """A of a convolution: rows are pixels, whose taps may lie outside the image. `lanes`: as `Fragments.a`."""
    count, apart, own_held, take, step = panel.count, panel.apart, panel.held, copies.fetch, panel.apart * panel.pitch

    @inline
    def begin(start, line, tid, matrices, images, lines):
        offset = cuda.local.array(count, types.int32)
        h = cuda.local.array(count, types.int32)
        w = cuda.local.array(count, types.int32)
        for i in range(count):
            m = i32(start + line + i * apart)
            offset[i], h[i], w[i] = first_tap(m, matrices, images)
        return Pixels(offset, h, w)

    @inline
    def fetch(own, x, here, held, to, matrices, images):
        inside = here[K] < matrices.chunks
        h = i32(here[R] * images.dilation_h)
        w = i32(here[S] * images.dilation_w)
        shift = i32(h * images.x_h + w * matrices.x_row + here[C])
        for i in range(count):
            ok = inside and u32(i32(own.h[i] + h)) < u32(images.image_h) and u32(i32(own.w[i] + w)) < u32(images.image_w)
            take(held, own_held + i, to + u32(i * step), at(x, i32(own.at[i] + shift), BYTES), ok)

    return _operand(panel, copies, lanes, begin, fetch)


def rows(panel: Panel, copies: Part, lanes: Any) -> Part:
    """A of a product: rows begin at multiples of one stride."""
    count, apart, own_held, take, step = panel.count, panel.apart, panel.held, copies.fetch, panel.apart * panel.pitch

    @inline
    def begin(start, line, tid, matrices, images, lines):
        offset, inside = cuda.local.array(count, types.int32), cuda.local.array(count, types.int32)
        for i in range(count):
            m = i32(start + line + i * apart)
            offset[i] = i32(m * matrices.x_row)
            inside[i] = i32(m < matrices.rows)
        return offset, inside

    @inline
    def fetch(own, x, here, held, to, matrices, images):
        offset, inside = own
        within = here[K] < matrices.chunks
        for i in range(count):
            ok = within and inside[i] != 0
            take(held, own_held + i, to + u32(i * step), at(x, i32(offset[i] + here[K]), BYTES), ok)

    return _operand(panel, copies, lanes, begin, fetch)


def columns(panel: Panel, copies: Part, lanes: Any) -> Part:
    """B: columns, which are rows of w, begin at multiples of one stride. `lanes`: as `Fragments.b`."""
    count, apart, own_held, take, step = panel.count, panel.apart, panel.held, copies.fetch, panel.apart * panel.pitch

    @inline
    def begin(start, line, tid, matrices, images, lines):
        offset = cuda.local.array(count, types.int32)
        for i in range(count):
            n = i32(start + line + i * apart)
            offset[i] = i32(n * matrices.w_row) if n < matrices.columns else i32(-1)
        return offset

    @inline
    def fetch(own, w, here, held, to, matrices, images):
        inside = here[K] < matrices.chunks
        for i in range(count):
            ok = inside and own[i] >= 0
            take(held, own_held + i, to + u32(i * step), at(w, i32(own[i] + here[K]), BYTES), ok)

    return _operand(panel, copies, lanes, begin, fetch)


def values(panel: Panel, copies: Part, lanes: Any, elements: int) -> Part:
    """B of which two of every four neighbours along K are there, in rows of half as many chunks: see `sparse_fragments`. lanes:
    those of A, as it is the left operand; elements: of a chunk of K."""
    count, apart, own_held, take, step = panel.count, panel.apart, panel.held, copies.fetch, panel.apart * panel.pitch
    across = panel.across

    @inline
    def begin(start, line, tid, matrices, images, lines):
        offset = cuda.local.array(count, types.int32)
        for i in range(count):
            n = i32(start + tid // across + i * apart)
            offset[i] = i32(n * matrices.w_row + tid % across) if n < matrices.columns else i32(-1)
        return offset

    @inline
    def fetch(own, w, here, held, to, matrices, images):
        k = i32(here[LINE] // (2 * elements))
        for i in range(count):
            take(held, own_held + i, to + u32(i * step), at(w, i32(own[i] + k), BYTES), own[i] >= 0)

    return _operand(panel, copies, lanes, begin, fetch)


def turned(panel: Panel, copies: Part, lanes: Any, is_a: bool, elements: int) -> Part:
    """A or B whose rows or columns are neighbours in memory, `elements` in a chunk. `lanes`: those of the other operand."""
    across, count, apart, own_held, take, step = (
        panel.across,
        panel.count,
        panel.apart,
        panel.held,
        copies.fetch,
        panel.apart * panel.pitch,
    )

    @inline
    def begin(start, line, tid, matrices, images, lines):
        own, chunk = i32(tid // across), i32(tid % across)
        end, stride = (matrices.rows, lines.x_line) if is_a else (matrices.columns, lines.w_line)
        inside = i32(start + chunk * elements) < end
        return Turned(own, chunk, inside, start, stride, lines.depth)

    @inline
    def fetch(own, base, here, held, to, matrices, images):
        for i in range(count):
            line = i32(here[LINE] + own.line + i * apart)
            ok = own.inside and line < own.depth
            source = at(base, types.int64(line) * own.stride + i32(own.start // elements + own.chunk), BYTES)
            take(held, own_held + i, to + u32(i * step), source, ok)

    return _operand(panel, copies, lanes, begin, fetch, k_major=False)


def _operand(panel: Panel, copies: Part, lanes: Any, begin: Any, fetch: Any, k_major: bool = True) -> Part:
    """The part with what all operands have alike."""
    offset, across, pitch, count, own_held = panel.offset, panel.across, panel.pitch, panel.count, panel.held
    put, step, blocks = copies.store, panel.apart * panel.pitch, panel.blocks
    place = inline(lanes)

    @inline
    def store(held, to):
        for i in range(count):
            put(held, own_held + i, to + u32(i * step))

    @inline
    def first(base, tid):
        line = i32(tid // across)
        return base + u32(offset + line * pitch + swizzled(line, i32(tid % across), across) * BYTES)

    @inline
    def reads(base, lane, warp):
        row, half = place(lane)
        if k_major:
            return base + u32(offset + (warp * (blocks * 16) + row) * pitch + swizzled(row, half, across) * BYTES)
        return base + u32(offset + row * pitch + swizzled(row, warp * (blocks * 2) + half, across) * BYTES)

    return part(begin=begin, fetch=fetch, store=store, first=first, reads=reads, turned=0 if k_major else pitch)
