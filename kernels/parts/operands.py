"""How an operand of a product lies in a stage of a ring: as boxes of the copy engine, which wgmma reads as they are."""

from __future__ import annotations

from dataclasses import dataclass

from tccompile.ir.sparse import GROUP
from tccompile.kernels.ptx.atoms import BITS

ROW = 128
"""Bytes of K in a stage, whatever their type: the widest swizzle of a row of a box."""

STEP = 32
"""Bytes of K that one wgmma takes, whatever their type."""

ROWS = 64
"""Of a warpgroup's product."""

UNIT = 16
"""Bytes of which tensor maps' strides are multiples: the stride of an axis of one element may be anything."""

BLOCK = 64
"""Rows or columns of a box that is not K-major, which is of 16-bit elements: `ROW` bytes."""


@dataclass(frozen=True)
class Places:
    """Where the elements of a sparse operand are along K: of every four neighbours two are there, two bits for the place of each.

    They lie as `ir/sparse.py` says, so that a thread of a warpgroup has those of a stage in `words` of its own: the two wgmmas of
    16-bit elements that a stage makes each look at one half of the threads, those of 8-bit elements at all.

    extent  rows of the operand
    at      bytes from the stage's start
    kind    PTX's type of an element
    """

    extent: int
    at: int
    kind: str

    @property
    def words(self) -> int:
        """Of a thread, for a stage."""
        return 16 // BITS[self.kind]

    @property
    def group_bytes(self) -> int:
        """Of a warpgroup's 64 rows, for a stage."""
        return 4 * 128 * self.words

    @property
    def copied(self) -> int:
        """Bytes that come for a stage."""
        return self.extent // GROUP * self.group_bytes


@dataclass(frozen=True)
class Operand:
    """One operand's part of a stage: `extent` rows (of A) or columns (of B) by K.

    at         bytes from the stage's start
    kind       PTX's type of an element
    row_bytes  of K in a row of a box, if K-major: 16 (not swizzled) or 32, 64, 128 (swizzled by as much); else ROW
    boxes      of so many bytes, one after the other along K
    k_major    whether neighbours along K are neighbours in memory; else those along the extent are, which comes in boxes of
               `BLOCK` of them by ROW bytes' worth of K
    paired     whether, of each 16 of the extent, numbers 2r and 2r + 1 lie in rows r and r + 8: as wgmma's rows, a lane has both
    eights     whether, of each 32 of the extent, 8q + 2h and the next one lie in rows 8h + 2q and on: as wgmma's columns, a lane
               has all eight
    """

    extent: int
    at: int
    kind: str
    row_bytes: int
    boxes: int
    k_major: bool
    paired: bool = False
    eights: bool = False

    @property
    def size(self) -> int:
        """Bytes of an element."""
        return BITS[self.kind] // 8

    @property
    def depth(self) -> int:
        """Elements of K in a whole stage."""
        return ROW // self.size

    @property
    def box_bytes(self) -> int:
        """Of one box."""
        return self.extent * self.row_bytes if self.k_major else self.depth * ROW

    @property
    def copied(self) -> int:
        """Bytes that come for a stage."""
        return self.extent * self.row_bytes * self.boxes

    @property
    def group_bytes(self) -> int:
        """From a warpgroup's 64 rows to those of the next."""
        return 64 * self.row_bytes

    @property
    def layout(self) -> tuple[int, int, int]:
        """What `hopper.descriptor` takes: swizzle, leading and stride, in bytes."""
        if not self.k_major:
            return ROW, self.box_bytes, 8 * ROW
        if self.row_bytes == 16:  # 8 rows of 16 bytes are a core matrix, and the next box is its neighbour along K
            return 0, self.box_bytes, 8 * 16
        return self.row_bytes, 0, 8 * self.row_bytes

    @property
    def steps(self) -> tuple[int, ...]:
        """Bytes from the operand's start to what each wgmma of a stage takes."""
        taken = range(0, self.boxes * self.row_bytes, STEP)
        if not self.k_major:
            return tuple(at // self.size * ROW for at in taken)
        if self.row_bytes == 16:
            return tuple(at // 16 * self.box_bytes for at in taken)
        return tuple(at // self.row_bytes * self.box_bytes + at % self.row_bytes for at in taken)
