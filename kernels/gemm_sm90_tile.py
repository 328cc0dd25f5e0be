"""Tiles of Hopper's implicit GEMM: their sizes, and what they take of a multiprocessor's registers and shared memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import Any

from tccompile.arch import KIB, Arch
from tccompile.ir.extent import Extent, ceil_div, round_up
from tccompile.kernels.parts.layout import Region, SharedLayout, barriers, ring_barriers
from tccompile.kernels.parts.operands import ROW, Operand, Places
from tccompile.kernels.parts.promotion import Promotion
from tccompile.kernels.parts.staging import BOXES, RESULT, Staging
from tccompile.kernels.ptx.atoms import BITS, Atom, group_atom

TILES = {64: (16, 32, 64, 96, 128, 192, 256), 128: (32, 64, 96, 128, 192, 256), 192: (64, 96, 128)}
"""Rows of a tile → columns: multiples of 8 that wgmma takes, at most 256, and registers are left for the epilogue."""

SWAPPED = {
    64: (8, 16, 24, 32, 40, 48, 56, 64, 112, 144, 200, 256),
    128: (8, 16, 32, 56, 64, 96, 112, 128, 200, 256),
}
"""With swapped operands, columns of a tile → rows: those of 7², 14² and 28² images fill 56, 200 and 112 of them. 20 other sizes,
left out, were the fastest by more than 2 % in 11 of 420 measurements on an H200, and by 0.2 % in the mean."""

TALL = {256: (176, 192, 200)}
"""The same for 2:4 weights whose sums a thread has once: a warpgroup has two blocks of 64 columns. For each block wgmma reads the
activations again, which takes shared memory as long as the products take Tensor Cores, so what else that has to do counts."""

LARGE = {64: (), 128: (176, 192)}
"""Rows beside those where each thread has its sums twice, so that 256 find no room. 8192³ in E4M3 takes 683 µs on an H200 with
192 rows, 718 with 200, and 738 with 128. 208 rows are not for these: 2097152×128×64 takes 220 µs with them, 197 with 200."""

LARGE_SPARSE = {128: (176, 208)}
"""The same for 2:4 weights: 4096³ in E4M3 takes 78.8 µs on an H200 with 208 rows, 79.6 with 176, 80.3 with 128, 81.8 with 200."""

EVEN: dict[int, tuple[int, ...]] = {64: (96,)}
"""Rows beside those for operands of 8 bits and two tiles of columns: 14² pixels of 32 images are a tile for each multiprocessor
of an H200."""

STAGES = 8
"""Stages that a tile has at most."""

NARROW: dict[int, tuple[int, ...]] = {64: (192,)}
"""The same for one tile of columns, of integers, which cannot be multiplied in 200 rows: floats of 8 bits with these take 6.1 µs
for 256 → 64 channels of 32 images of 56² pixels on an H200, and 8.1 with 112."""

SHARED = (176, 192, 208)
"""Rows of tiles of 128 columns of 2:4 weights in which two blocks of a cluster copy half of the rows for each other: where sums
are rough, and tiles so small, products wait for what comes from the L2 cache."""

PIECES = 3
"""Boxes of some rows that a swapped warpgroup has at most: one is filled while the others are stored."""

MOST_SUMS = {64: 192, 128: 208, 192: 128}
"""Rows of a product → columns at most where each thread has its sums twice: see `parts.accumulator.Promoted`."""

AT_ONCE = 2
"""Stages of floats of 8 bits whose sums Tensor Cores make at once where results have 8 bits, too: 256 products are off by 2.1e-3
at worst, where all have one sign, and rounding to 8 bits by 2.6e-2."""

MOST_OVERLAPPING = 112
"""The same of a warpgroup alone where each thread has them three times: see `parts.accumulator.Overlapped`. Of two warpgroups one
multiplies anyway while the other adds: 128×64 and 56×128 took as long either way."""


def stages_at_once(kinds: tuple[str, str], result: int) -> int:
    """Of how many stages Tensor Cores may add up products whose sums are rough, for results of so many bytes."""
    return AT_ONCE if group_atom(*kinds).rough and result < RESULT else 1


def overlapping(config: Mapping[str, Any]) -> bool:
    """Whether a tile's sums may overlap; blocks of a cluster share one, and so have little to multiply."""
    rows, columns = (config["bn"], config["bm"]) if config.get("swapped") else (config["bm"], config["bn"])
    return config["split"] == 1 and rows == 64 and columns <= MOST_OVERLAPPING


def room_for(promoted: bool) -> Callable[[int, int], bool]:
    """Whether registers hold the sums of so many rows by so many columns; promoted: that each thread has twice."""
    return lambda rows, columns: not promoted or columns <= MOST_SUMS.get(rows, 0)


def swapped_rows(columns: int, more: Mapping[int, tuple[int, ...]], promoted: bool) -> tuple[int, ...]:
    """Rows of tiles of so many columns with swapped operands; more: others, by columns; promoted: where each thread has its sums
    twice."""
    return (*SWAPPED[columns], *more.get(columns, ()), *(LARGE[columns] if promoted else ()))


def sparse_tiles(kinds: tuple[str, str]) -> list[tuple[int, int]]:
    """Rows and columns of tiles for 2:4 weights beside those of `SWAPPED`, with operands of these types."""
    more = LARGE_SPARSE if group_atom(*kinds).rough else TALL
    return [(bm, bn) for bn, rows in more.items() for bm in rows]


@dataclass(frozen=True)
class Tile:
    """A config: what a block computes, and how its shared memory is laid out.

    bm, bn   rows and columns of a tile; stages, buffers of the ring; split, blocks of a cluster that share K
    swapped  whether wgmma's rows are the tile's columns
    boxed    whether results are stored in boxes; added, whether something that differs by row is added to them there
    kinds    PTX's types of the operands' elements
    result   bytes of a result in a box
    sparse   whether wgmma's rows, the tile's columns, are 2:4: the weights' values and their places are multiplied
    overlaps  whether rough sums of a stage are added to the others while the next stage is multiplied: `parts.accumulator`
    short    bytes of K that count in the first stage, K's last ones: the second one begins with K; or 0 for all
    shared   blocks of a cluster that have tiles of the same rows: each copies a part of these to all
    teams    how many have warpgroups for a tile each: two take tiles in turn, and one multiplies while the other stores
    once     whether there are so few stages that their sums are made at once, rough or not
    in_pairs  whether rough sums are made of two stages at once
    """

    bm: int
    bn: int
    stages: int
    split: int
    swapped: bool
    boxed: bool
    added: bool
    kinds: tuple[str, str] = ("f16", "f16")
    result: int = RESULT
    sparse: bool = False
    teams: int = 1
    eights: bool = False
    overlaps: bool = False
    short: int = 0
    once: bool = False
    shared: int = 1
    in_pairs: bool = False

    @cached_property
    def atom(self) -> Atom:
        """What multiplies."""
        return group_atom(*self.kinds, self.sparse)

    @cached_property
    def promoted(self) -> bool:
        """Whether a thread has its sums twice, as those of a stage are rough: see `parts.accumulator.Promoted`."""
        return self.atom.rough and not self.once

    @property
    def promotion(self) -> Promotion | None:
        """When sums of stages that are rough are added to the others."""
        if self.overlaps:
            return Promotion.MEANWHILE
        return (Promotion.OF_PAIRS if self.in_pairs else Promotion.OF_EACH) if self.promoted else None

    @cached_property
    def product(self) -> tuple[int, int]:
        """Rows and columns of what wgmma makes: 64 rows for each warpgroup."""
        return (self.bn, self.bm) if self.swapped else (self.bm, self.bn)

    @cached_property
    def consumers(self) -> int:
        """Threads that multiply."""
        return 2 * self.product[0] * self.teams // self.blocks

    @cached_property
    def blocks(self) -> int:
        """Blocks of 64 rows of the product that a warpgroup has."""
        return 2 if self.product[0] == 256 else 1

    @cached_property
    def exchange(self) -> bool:
        """Whether the copying warp leaves its registers to the others, which takes a whole warpgroup of it.

        A multiprocessor has 16384 registers for every fourth warp; one warp more than a multiple of four takes its share of them.
        """
        rows, columns = self.product
        return rows >= 192 or (rows == 128 and columns > 128) or self.teams > 1

    @property
    def registers(self) -> tuple[int, int]:
        """With an exchange: what a thread of the copying warpgroup keeps, and what one of the others then has."""
        launched = 65536 // self.threads // 8 * 8
        own = 24 if self.blocks > 1 or (self.promoted and self.product[1] > 200) else 40
        return own, (launched * self.threads // 128 - own) // (self.consumers // 128) // 8 * 8

    @cached_property
    def threads(self) -> int:
        return self.consumers + (128 if self.exchange else 32)

    @property
    def stage_bytes(self) -> int:
        places = self.places
        return round_up(places.at + places.copied, KIB) if places else (self.bm + self.bn) * ROW

    @property
    def places(self) -> Places | None:
        """Of 2:4 weights, behind their values in a stage."""
        return Places(self.bn, self.bm * ROW + self.bn * ROW // 2, self.kinds[1]) if self.sparse else None

    def operands(self, im2col: bool, chunk: int, k_major: tuple[bool, bool]) -> tuple[Operand, Operand]:
        """A and B of a stage; `chunk`: elements of K in a row of a box, of B's only where A does not come by im2col."""
        of_a, of_b = self.kinds
        row = chunk * BITS[of_a] // 8
        a = Operand(self.bm, 0, of_a, row, ROW // row if im2col else 1, k_major[0])
        if self.sparse:
            return a, Operand(self.bn, self.bm * ROW, of_b, ROW // 2, 1, True)
        return a, Operand(self.bn, self.bm * ROW, of_b, ROW if im2col else row, 1, k_major[1], self.paired, self.eights)

    @property
    def paired(self) -> bool:
        """Whether a lane's two channels are neighbours: of bytes, which stmatrix turns back two at a time."""
        return self.boxed and self.swapped and self.result < RESULT

    @cached_property
    def columns(self) -> int:
        """Columns that a warp stages at once on their way to memory; with a split, all: the other blocks read them."""
        if self.boxed and self.swapped:
            return 64
        if self.boxed:
            return next(n for n in (ROW // self.result, 64, 32, 16) if self.bn % n == 0)  # rows of a box have 128 bytes at most
        return self.bn if self.split > 1 else 64 if self.bn in (64, 128) else min(self.bn, 32)

    def rows(self, loads: int) -> int:
        """Rows that a lane stores at a time, whose loads overlap: as many as registers allow, given loads that differ by row.

        Three blocks of 64×128 on a multiprocessor leave a thread 128 registers, too few for a second row's loads.
        """
        if self.boxed or self.split > 1 or loads > 2 or (loads and (self.bm, self.bn) == (64, 128)):
            return 1
        return min(self.columns // 16, 4 if self.bm == 128 and loads < 2 else 2)

    @property
    def box(self) -> tuple[int, int]:
        """Columns and rows of a box of results."""
        return self.columns, self.piece if self.swapped else 16

    @property
    def piece(self) -> int:
        """With swapped operands, rows of a box: all of the tile's, or of 2:4 weights, whose stages take half as long and of which
        there have to be more, some 64."""
        if not self.sparse or self.added:
            return self.bm
        return next(self._pieces(self.span), self.bm)

    def _pieces(self, span: int) -> Iterator[int]:
        """What pieces may have: several spans, and not too many of them."""
        return (n for n in (64, *range(span, 105, span)) if n >= 40 and self.bm % n == n % span == 0)

    @property
    def span(self) -> int:
        """What is taken from the accumulators at once: columns of a box, or with swapped operands rows of the tile."""
        if not self.swapped:
            return min(self.columns, 32)
        return max(n for n in range(8, 57, 8) if self.bm % n == 0 and (self.blocks == 1 or any(self._pieces(n))))

    @property
    def pitch(self) -> int:
        """Bytes between staged rows: some columns more than there are, so that a warp's writes meet no bank twice."""
        return 4 * (self.columns + (4 if self.swapped else 8))

    @property
    def writers(self) -> int:
        """How many have a place of their own to stage results in: warps of 16 rows, swapped warpgroups of 64 columns."""
        return self.product[0] // ((64 if self.swapped else 16) * self.blocks) * self.teams

    @property
    def ahead(self) -> int:
        """Tiles that have room in such a place: two where what is added takes little of it."""
        return 2 if self.added and self.result < RESULT and not self.swapped else 1

    @property
    def staged(self) -> int:
        """Bytes of such a place."""
        boxes = self.ahead * self.bn // self.columns if self.added else BOXES
        if self.swapped:
            boxes = min(self.bm // self.piece, PIECES)
        return boxes * self.result * self.box[0] * self.box[1] if self.boxed else 16 * self.pitch

    @cached_property
    def layout(self) -> SharedLayout:
        """Shared memory: the ring; results after it, or over it when the block has but one tile; barriers."""
        results = self.writers * self.staged if self.split == 1 else self.bm * self.pitch
        return SharedLayout(
            Region("ring", self.stages * self.stage_bytes, KIB),
            Region("results", results, KIB if self.boxed else 16, over="ring" if self.split > 1 else None),
            *ring_barriers("ring", self.stages),
            barriers("landed", self.writers * self.ahead if self.added else 0),
        )

    @property
    def staging(self) -> Staging:
        """Where the results of a warp, or with swapped operands of a warpgroup, are on their way to memory."""
        landed = self.layout["landed"] if self.added else None
        return Staging(self.layout["results"], self.staged, landed, self.result, self.atom.acc, self.ahead)

    @cached_property
    def smem(self) -> int:
        """Bytes to ask for in a launch."""
        return self.layout.smem


def stages_at_most(config: Mapping[str, Any], steps: int) -> int:
    """So many as the config says, or STAGES, but not many more than a block's share of K can fill."""
    each = ceil_div(steps, config["split"])
    return config.get("stages") or (2 if each <= 2 else 4 if each <= 4 else STAGES)


def tile(
    config: Mapping[str, Any],
    arch: Arch,
    steps: int,
    boxed: bool,
    added: bool = False,
    kinds: tuple[str, str] = ("f16", "f16"),
    result: int = RESULT,
) -> Tile:
    """The tile with as many stages as shared memory holds, and `stages_at_most`."""
    most = stages_at_most(config, steps)
    swapped, sparse, overlaps = (config.get(name, False) for name in ("swapped", "sparse", "overlaps"))
    rough = group_atom(*kinds).rough and not sparse
    at_once = stages_at_once(kinds, result)
    once, in_pairs = rough and steps <= at_once, rough and 1 < at_once < steps and not overlaps
    shape = config["bm"], config["bn"], most, config["split"], swapped
    more = sparse, config.get("teams", 1), False, overlaps, 0, once, config.get("shared", 1), in_pairs
    return _fitting(arch.smem_block, *shape, boxed, added, kinds, result, *more)


@cache  # also since a tile remembers what was computed of it
def _fitting(room: int, bm: int, bn: int, most: int, *more: Any) -> Tile:
    """The tile with as many stages as so many bytes of shared memory hold, and no more than `most`."""
    for stages in range(most, 1, -1):
        t = Tile(bm, bn, stages, *more)
        if t.smem <= room:
            return t
    raise AssertionError(f"{bm}×{bn} does not fit {room} bytes of shared memory")


@cache
def in_eights(t: Tile) -> Tile:
    """The tile, whose columns come in groups of eight: see `Operand.eights`."""
    return replace(t, eights=True)


def shortened(t: Tile, short: Extent) -> Tile:
    """The tile with so many bytes of K in the first stage."""
    return _shortened(t, short) if isinstance(short, int) else replace(t, short=short)


@cache
def _shortened(t: Tile, short: int) -> Tile:
    return replace(t, short=short) if short else t


def resident(t: Tile, arch: Arch) -> int:
    """Blocks that a multiprocessor holds at once, by shared memory and registers."""
    if t.exchange:
        return 1
    sums = t.product[1] // 2 * (3 if t.overlaps else 2 if t.promoted else 1)
    registers = min(255, sums + (48 if t.split == 1 else 88))  # the accumulators, and what else a thread needs
    warps = 4 * (65536 // 4 // (32 * registers))  # every fourth warp has its own 16384 registers
    return max(1, min(arch.smem_sm // (t.smem + KIB), warps // (t.threads // 32)))
