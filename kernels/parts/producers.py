"""What fills the stages of a ring: boxes of a matrix, or pixels of an image by im2col, and beside them boxes of B.

A producer is for a kernel that goes through a tile's K stage by stage:

fill(maps, buffers, tile, share, asked, slot, parity, geometry)   fill the stages of a tile; (slot, parity) of the next one
ask_ahead(map_b, buffers, tile, share, geometry)   have B copied to all stages of the ring, before earlier grids have ended; the
                                        `asked` of the first tile: the first stage of which B has not been asked for

maps      of A and B; in B's place of B and its places, where B is sparse
tile      (tile of A's rows within its batch, tile of columns, batch)
share     the stages of K: the first one, and the one after the last
geometry  integers that say how A lies
"""

from __future__ import annotations

from typing import Any

from tccompile.ir.sparse import PIECE
from tccompile.kernels.device_math import divide
from tccompile.kernels.parts.operands import BLOCK, Operand, Places
from tccompile.kernels.parts.part import Part
from tccompile.kernels.parts.ring import Ring
from tccompile.kernels.ptx import hopper as hw
from tccompile.kernels.ptx.core import cuda, i32, inline, u16, u32


def boxes(operand: Operand) -> Any:
    """The device function copy(map, target, k, first, batch): an operand's part of a stage, from element k of K and row or column
    `first` on, by a tiled map; `target`: the barrier, and where the part begins."""
    across, blocks = operand.box_bytes, operand.extent // BLOCK

    @inline
    def copy_rows(map_, target, k, first, batch):
        hw.copy_box(target[1], map_, target[0], k, first, batch)

    @inline
    def copy_blocks(map_, target, k, first, batch):
        for i in range(blocks):
            hw.copy_box(u32(target[1] + i * across), map_, target[0], i32(first + BLOCK * i), k, batch)

    @inline
    def copy_pairs(map_, target, k, first, batch):
        hw.copy_box4(target[1], map_, target[0], k, i32(0), i32(0), i32(first >> 4))

    @inline
    def copy_eights(map_, target, k, first, batch):
        hw.copy_box5(target[1], map_, target[0], k, i32(0), i32(0), i32(0), i32(first >> 5))

    if operand.eights:
        return copy_eights
    return copy_pairs if operand.paired else copy_rows if operand.k_major else copy_blocks


def _dense(b: Operand) -> Any:
    """As `boxes`, of B; `target` is the whole stage."""
    copy, offset = boxes(b), b.at

    @inline
    def copy_b(map_b, target, k, first, batch):
        copy(map_b, (target[0], u32(target[1] + offset)), k, first, batch)

    return copy_b


def _sparse(b: Operand, places: Places) -> Any:
    """The same of a sparse B, whose map is one of its elements and one of their places; k counts zeros, too."""
    copy, at, depth = _dense(b), places.at, b.depth
    pieces = places.group_bytes // PIECE

    @inline
    def copy_b(maps, target, k, first, batch):
        copy(maps[0], target, i32(k >> 1), first, batch)
        piece = i32(u32(k) // u32(depth) * u32(pieces))
        hw.copy_box(u32(target[1] + at), maps[1], target[0], i32(0), piece, i32(first >> 6))

    return copy_b


def _for_all(operand: Operand, shared: int) -> Any:
    """As `boxes`, of an operand that so many blocks of a cluster have in common: each copies a part of the rows to all."""
    part = operand.extent // shared
    part_bytes, every = part * operand.row_bytes, (1 << shared) - 1

    @inline
    def copy_part(map_, target, k, first, batch):
        rank = i32(cuda.blockIdx.x & (shared - 1))
        at = u32(target[1] + rank * part_bytes)
        hw.copy_box_to(at, map_, target[0], k, i32(first + rank * part), batch, u16(every))

    return copy_part


class Producer(Part):
    """What producers have in common: how they ask for B.

    ask(map_b, target, k, column, batch, geometry)   have B copied from element k of K on, for a tile of columns and a batch of A;
                                           what is expected is all of the stage
    weights_at(k, geometry)                where stage k begins along B's K
    weights_batch(batch, geometry)         B's batch for one of A's

    places   of B, if it is sparse: half of its elements are there
    """

    def __init__(
        self, ring: Ring, a: Operand, b: Operand, weights_at: Any, weights_batch: Any, places: Places | None = None
    ) -> None:
        super().__init__()
        self.ring = ring
        columns, stages = b.extent, ring.stages
        copied, copy_b = a.copied + b.copied + (places.copied if places else 0), _sparse(b, places) if places else _dense(b)

        @inline
        def ask(map_b, target, k, column, batch, geometry):
            ring.expect(target, copied)
            copy_b(map_b, target, k, i32(column * columns), weights_batch(batch, geometry))

        @inline
        def ask_ahead(map_b, buffers, tile, share, geometry):
            first, end = share
            asked = i32(min(end, i32(first + stages)))
            for s in range(stages):
                if first + s < end:
                    k = weights_at(i32(first + s), geometry)
                    ask(map_b, ring.target(buffers, i32(s)), k, tile[1], tile[2], geometry)
            return asked

        self.ask, self.ask_ahead = ask, ask_ahead


class Tiled(Producer):
    """A is a matrix. `geometry`: (whether B has batches too, as 1 or 0); and if the first stage is short, where its boxes begin.

    short   whether the first stage counts no more than the end of K, where its boxes end: others begin with K
    shared  blocks of a cluster that have the same rows of A
    """

    def __init__(
        self, ring: Ring, a: Operand, b: Operand, places: Places | None = None, short: bool = False, shared: int = 1
    ) -> None:
        copy_a, rows, depth = _for_all(a, shared) if shared > 1 else boxes(a), a.extent, a.depth

        @inline
        def begin(k, geometry):
            if short:
                return i32((k - 1) * depth) if k > 0 else geometry[1]
            return i32(k * depth)

        @inline
        def weights_batch(batch, geometry):
            return i32(batch * geometry[0])

        super().__init__(ring, a, b, begin, weights_batch, places)
        ask = self.ask

        @inline
        def fill(maps, buffers, tile, share, asked, slot, parity, geometry):
            row, column, batch = tile
            k, end = share
            m = i32(row * rows)
            hw.wait_for_earlier_grids()
            while k < end:
                target = ring.target(buffers, slot)
                if k >= asked:
                    ring.acquire(buffers, slot, parity)
                    ask(maps[1], target, begin(k, geometry), column, batch, geometry)
                copy_a(maps[0], target, begin(k, geometry), m, batch)
                slot, parity = ring.advance(slot, parity)
                k = i32(k + 1)
            return slot, parity

        self.fill = fill


@inline
def _no_batch(batch, geometry):
    """Weights are the same for all images."""
    return i32(0)


class Im2col(Producer):
    """A's rows are pixels, and K goes through the taps of the filter one after the other: boxes are the same tap of pixels in a
    row, of some channels.

    `geometry`: (padded channels, taps, width of the filter, Q, P * Q, strides, padding and dilations by h and w, boxes of a tap),
    then reciprocals of the last, the width, Q and P * Q.
    """

    def __init__(self, ring: Ring, a: Operand, b: Operand, places: Places | None = None) -> None:
        rows, boxes_of_stage, chunk, box_bytes = a.extent, a.boxes, a.row_bytes // a.size, a.box_bytes

        @inline
        def weights_at(k, geometry):
            box = i32(k * boxes_of_stage)
            tap = divide(box, geometry[12], geometry[13])
            return i32(tap * geometry[0] + (box - tap * geometry[11]) * chunk)

        super().__init__(ring, a, b, weights_at, _no_batch, places)
        ask = self.ask

        @inline
        def fill(maps, buffers, tile, share, asked, slot, parity, geometry):
            cp, taps, width, q, pq, stride_h, stride_w, pad_h, pad_w, dil_h, dil_w, tap_boxes = geometry[:12]
            boxes_m, boxes_s, width_m, width_s, q_m, q_s, pq_m, pq_s = geometry[12:]
            row, column, batch = tile
            k, end = share
            # The first pixel's image, and the first element (h, w) of its window.
            m = i32(row * rows)
            image = divide(m, pq_m, pq_s)
            pixel = i32(m - image * pq)
            out_h = divide(pixel, q_m, q_s)
            h, w = i32(out_h * stride_h - pad_h), i32((pixel - out_h * q) * stride_w - pad_w)
            # The tap, its first channel of the stage, and its place in the window.
            box = i32(k * boxes_of_stage)
            tap = divide(box, boxes_m, boxes_s)
            c = i32((box - tap * tap_boxes) * chunk)
            r = divide(tap, width_m, width_s)
            at_h, at_w, end_w = i32(r * dil_h), i32((tap - r * width) * dil_w), i32(width * dil_w)
            hw.wait_for_earlier_grids()
            while k < end:
                target = ring.target(buffers, slot)
                if k >= asked:
                    ring.acquire(buffers, slot, parity)
                    # Beyond the last channels of a tap, B goes on with the next tap's weights; A is zero there.
                    ask(maps[1], target, i32(tap * cp + c), column, batch, geometry)
                for i in range(boxes_of_stage):
                    # Beyond the last tap, zeros: every channel is outside the array.
                    inside = tap < taps
                    first = c if inside else cp
                    right, down = (at_w, at_h) if inside else (i32(0), i32(0))
                    at = u32(target[1] + i * box_bytes)
                    hw.copy_pixels(at, maps[0], target[0], first, w, h, image, u16(right), u16(down))
                    c = i32(c + chunk)
                    if c >= cp:
                        c = i32(0)
                        tap = i32(tap + 1)
                        at_w = i32(at_w + dil_w)
                        if at_w == end_w:
                            at_w = i32(0)
                            at_h = i32(at_h + dil_h)
                slot, parity = ring.advance(slot, parity)
                k = i32(k + 1)
            return slot, parity

        self.fill = fill
