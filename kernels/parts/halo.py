"""What fills stages with boxes of an image, each of some channels of a tile's pixels and those around it, and of weights."""

from __future__ import annotations

from typing import Any

from tccompile.kernels.parts.part import Part
from tccompile.kernels.parts.ring import Ring, Stages
from tccompile.kernels.ptx import hopper as hw
from tccompile.kernels.ptx.core import i32, inline, u32


class Halo(Part):
    """A tile's boxes, of `depth` channels each, go to a warpgroup's ring of several side by side.

    ring, box  whose stages they fill; bytes of a box

    fill(map_x, buffers, place, number, slot, parity, geometry)   fill the ring `number` with the tile's boxes one after the
                              other; (slot, parity) of the next stage
    place     (image, first row, first column) of the tile
    geometry  rows and columns of padding before the image
    """

    def __init__(self, ring: Ring, chunks: int, depth: int, box: int) -> None:
        super().__init__()

        @inline
        def fill(map_x, buffers, place, number, slot, parity, geometry):
            image, row, column = place
            top, left = geometry
            for chunk in range(chunks):
                stage = ring.stage(number, slot)
                ring.acquire(buffers, stage, parity)
                target = ring.target(buffers, stage)
                ring.expect(target, box)
                hw.copy_box4(target[1], map_x, target[0], i32(chunk * depth), i32(column - left), i32(row - top), image)
                slot, parity = ring.advance(slot, parity)
            return slot, parity

        self.fill = fill


def weights_by_tap(weights: Stages, depth: int, taps: int, tap_bytes: int) -> Any:
    """The device function ask(map_w, filters, first, padded): have the weights of the block's output channels copied, from
    channel `first` on, a stage for each `depth` input channels, a box for each tap.

    map_w    of (taps · channels, output channels)
    filters  `weights.buffers`; padded: channels of a tap in memory
    """
    chunks = weights.stages

    @inline
    def ask(map_w, filters, first, padded):
        for chunk in range(chunks):
            target = weights.target(filters, i32(chunk))
            weights.expect(target, taps * tap_bytes)
            for tap in range(taps):
                at = u32(target[1] + tap * tap_bytes)
                hw.copy_box(at, map_w, target[0], i32(tap * padded + chunk * depth), first, i32(0))

    return ask


def weights_of_all_taps(weights: Stages, depth: int, copied: int) -> Any:
    """The same where a box of `copied` bytes has all taps; map_w: of (channels, taps, output channels)."""
    chunks = weights.stages

    @inline
    def ask(map_w, filters, first, padded):
        for chunk in range(chunks):
            target = weights.target(filters, i32(chunk))
            weights.expect(target, copied)
            hw.copy_box(target[1], map_w, target[0], i32(chunk * depth), i32(0), first)

    return ask
