"""Results on their way to the epilogue: warps turn accumulators round in shared memory, so that a lane has 8 columns."""

from __future__ import annotations

from typing import Any

from tccompile.kernels.parts.part import Part, part
from tccompile.kernels.ptx.core import cuda, i32, inline, u32


def slabs(spill: Any, lanes: Any, blocks: int, pitch: int, read: Any, keep: Any) -> Part:
    """A warp's results, of 16 rows and 16 times `blocks` columns at a time.

    spill  as `mma.spill_block`; lanes: as `Fragments.acc`; pitch: numbers from row to row of a slab
    read   the device function address → 8 numbers that lie there, as `keep` takes them
    keep   the device function (values, row, column, where) that takes 8 of a row's results
    """
    groups = 2 * blocks
    place = inline(lanes)

    @inline
    def own(base, tid, lane):
        """Addresses in the warp's slab, which lie one after the other from `base` on: its first, and the lane's first pair."""
        slab = base + u32(tid // 32 * (16 * pitch * 4))
        row, column = place(lane)
        return slab, slab + u32((row * pitch + column) * 4)

    @inline
    def turn(acc, slab, to, i, lane, where):
        """Hands on the i-th 16 rows of a warp's accumulators. All of the warp's lanes take part."""
        spill(acc, to, i32(i))
        cuda.syncwarp()
        for j in range(blocks):
            at = i32(lane + j * 32)
            row = i32(at // groups)
            group = i32(at % groups)
            keep(read(slab + u32((row * pitch + group * 8) * 4)), row, group, where)
        cuda.syncwarp()

    return part(own=own, turn=turn)
