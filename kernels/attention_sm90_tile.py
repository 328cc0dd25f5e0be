"""Tiles of attention on Hopper: their sizes, and what they take of a multiprocessor's registers and shared memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from tccompile.arch import KIB, Arch
from tccompile.ir.extent import ceil_div, round_up
from tccompile.ir.ops import Attention
from tccompile.ir.program import Program
from tccompile.ir.types import DType
from tccompile.kernels.attention_mma import KINDS
from tccompile.kernels.attention_turn import columns
from tccompile.kernels.parts.layout import Region, SharedLayout, ring_barriers
from tccompile.kernels.parts.operands import ROW
from tccompile.kernels.ptx.atoms import BITS

STAGES = 2
"""Tiles of k, and of v, that are in shared memory at once."""


@dataclass(frozen=True)
class Tile:
    """What a block does: warpgroups (64 rows each), rows of k and v at a time, elements of q's and v's heads in 16s and 8s.

    words  of a mask, in registers of a thread for each 8 of its columns
    kind   PTX's type of the elements of q, k and v; of E4M3 v is turned (see attention_turn.py)
    long   whether rows of k are so many that results are added up in parts, as Tensor Cores' sums of E4M3 are rough
    """

    warpgroups: int
    bn: int
    d: int
    e: int
    words: int = 0
    kind: str = "f16"
    long: bool = False

    @property
    def size(self) -> int:
        """Bytes of an element."""
        return BITS[self.kind] // 8

    @property
    def columns(self) -> int:
        """Elements of a row that a box of the copy engine has."""
        return ROW // self.size

    @property
    def bm(self) -> int:
        return 64 * self.warpgroups

    @property
    def exchange(self) -> bool:
        """Whether the copying warp leaves its registers to the others, which takes a whole warpgroup of it."""
        return self.warpgroups > 1

    @property
    def in_turn(self) -> bool:
        """Whether warpgroups take turns in asking for products, so that one multiplies while another computes exponentials."""
        return self.warpgroups > 1 and self.size > 1

    @property
    def threads(self) -> int:
        return 128 * self.warpgroups + (128 if self.exchange else 32)

    @property
    def registers(self) -> tuple[int, int]:
        """With an exchange: what a thread of the copying warpgroup keeps, and what one of the others then has."""
        launched, kept = 65536 // self.threads // 8 * 8, 32 if self.size > 1 else 24
        return kept, (launched * self.threads // 128 - kept) // self.warpgroups // 8 * 8

    @property
    def wide(self) -> int:
        """Columns of the product with v: with a sum of weights, if it makes that, too."""
        return columns(self.e) if self.size == 1 else self.e

    @property
    def packed(self) -> int:
        """Float32, or words of E4M3, that a thread has of the weights when the product before is waited for."""
        return self.bn // 8 if self.size == 1 else self.bn // 2

    @property
    def held(self) -> int:
        """Registers of a thread for scores, weights (in E4M3 beside those of the tile before), results and the mask."""
        return self.bn // 2 + self.bn // 4 + self.wide // 2 + self.bn // 8 * self.words

    @property
    def boxes(self) -> tuple[int, int]:
        """Boxes side by side in a row of q and k, and in one of v."""
        return ceil_div(self.d, self.columns), ceil_div(self.e, self.columns)

    @property
    def q_bytes(self) -> int:
        return self.boxes[0] * self.bm * ROW

    @property
    def k_bytes(self) -> int:
        return self.boxes[0] * self.bn * ROW

    @property
    def v_bytes(self) -> int:
        return self.boxes[1] * self.bn * ROW if self.size > 1 else self.wide * self.bn

    @property
    def staged(self) -> int:
        """Columns of the result that a warp stages at once on their way to the epilogue."""
        return next(n for n in (32, 16, 8) if self.e % n == 0)

    @property
    def pitch(self) -> int:
        """Bytes between staged rows: 8 columns more than there are, so that a warp's writes meet no bank twice."""
        return 4 * (self.staged + 8)

    @property
    def totals_bytes(self) -> int:
        """Of a warpgroup's results that are added up in shared memory, in whose place they are staged then: two in a word."""
        return max(2048 * ceil_div(self.wide, 16), 64 * self.pitch) if self.long else 0

    @property
    def slab_bytes(self) -> int:
        """From where a warpgroup's results are staged to where the next one's are."""
        return self.totals_bytes if self.long else 64 * self.pitch

    @cached_property
    def layout(self) -> SharedLayout:
        """Shared memory: q, the rings of k and v, results on their way, barriers."""
        return SharedLayout(
            Region("q", self.q_bytes, KIB),
            Region("k", STAGES * self.k_bytes, KIB),
            Region("v", STAGES * self.v_bytes, KIB),
            Region("totals", self.warpgroups * self.totals_bytes),
            Region("results", self.bm * self.pitch, over="totals" if self.long else None),
            *ring_barriers("q", 1),
            *ring_barriers("k", STAGES),
            *ring_barriers("v", STAGES),
        )

    @property
    def turns(self) -> int:
        """Tiles of k and v whose results are added up before these are added to others, of a `long` tile."""
        return ROUGH // self.bn

    @property
    def smem(self) -> int:
        """Bytes to ask for in a launch."""
        return self.layout.smem


SHAPES = {
    2: ((1, 64), (1, 80), (1, 128), (2, 64), (2, 96), (2, 128), (3, 64), (3, 96), (3, 128)),
    1: ((1, 64), (1, 128), (2, 64), (2, 96), (2, 128), (2, 160), (2, 192), (3, 64), (3, 96), (3, 128)),
}
"""Warpgroups of a block, and rows of k and v that they take at a time, by bytes of an element."""

SLACK = {1: 20, 2: 56}
"""Registers that a thread needs beside what it holds of tiles, by bytes of an element."""

ROUGH = 2112
"""Rows of k whose weights times v are added up by Tensor Cores in E4M3, before they are added to others in float32. Each product
loses what lies beyond 14 digits of the sum: of sums of weights, 1 % for so many rows of normal scores, and 6 % for 4096."""


def tiles_of(op: Attention, program: Program, arch: Arch) -> Iterator[Tile]:
    """The tiles that fit registers and shared memory."""
    q, k, v = (program.tensors[name] for name in (op.q, op.k, op.v))
    size = q.dtype.size
    for warpgroups, bn in SHAPES[size]:
        t = Tile(
            warpgroups,
            bn,
            round_up(q.shape[3], 32 // size),
            round_up(v.shape[3], 8),
            words_of(op, program),
            KINDS[q.dtype],
            size == 1 and k.shape[2] > ROUGH,
        )
        room = t.registers[1] if t.exchange else 240
        if t.smem <= arch.smem_block and t.held + SLACK[size] <= room + (24 if warpgroups == 3 and size == 2 else 0):
            yield t


def words_of(op: Attention, program: Program) -> int:
    """Words of the mask that a thread holds for 8 columns: two elements of each of its rows, or of one that all rows share."""
    if op.mask is None:
        return 0
    mask = program.tensors[op.mask]
    return (2 if mask.dtype is DType.F32 else 1) * (2 if mask.shape[2] > 1 else 1)


def resident(t: Tile, arch: Arch) -> int:
    """Blocks that a multiprocessor holds at once, by shared memory and registers."""
    if t.exchange:
        return 1
    # Each quarter of a multiprocessor has registers of its own, 512 for a lane: five warps of 192 are one block, not two.
    warps = 4 * (512 // round_up(t.held + 28, 8))
    return max(1, min(arch.smem_sm // (t.smem + KIB), warps // (t.threads // 32)))
