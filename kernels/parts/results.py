"""How the sums of a tile leave: each object is one way, and a kernel chooses by the problem.

All of them have

maps                               how many tensor maps come first in `e`, ahead of the epilogue's arguments
types                              Numba's types of what `e` holds
init(base)                         by one thread, before all others use them: barriers
ahead(c, e)                        what is read for channels from c on is to come to the L2 cache
keep(c, e)                         what the epilogue reads for a lane's channels, if the lane keeps it for the whole tile
early                              whether what is added to a tile's results is asked for before those of the one before are made
ask(thread, tile, turn, e)         have what is added to the results copied: of the tile that has this `turn`
finish(acc, read, thread, tile, turn, e)   the tile's results through the epilogue, and on their way to memory; the next `turn`,
                                   which begins with 0
drain(lane)                        before the block ends

base    address of the block's shared memory, from which a layout counts
thread  (base, warp, lane, number in its block, rank of the block in its cluster); the warps that multiply are the first
tile    (batch, rows of a batch, the tile's number among those of the batch's rows, and among those of the columns)
"""

from __future__ import annotations

from typing import Any

from tccompile.ir.extent import ceil_div
from tccompile.ir.types import DType
from tccompile.kernels import epilogue
from tccompile.kernels.parts.part import Part
from tccompile.kernels.parts.staging import Staging
from tccompile.kernels.ptx import hopper as hw
from tccompile.kernels.ptx import memory, mma
from tccompile.kernels.ptx.core import cuda, f32, i32, inline, types, u32
from tccompile.kernels.spec import Value

Params = tuple[Value, ...]
"""`EpilogueSpec.params`."""


class Results(Part):
    """What ways have in common: see the module. This one has no barriers, keeps nothing and asks for nothing."""

    def __init__(self, params: Params, maps: int, extra: tuple[Any, ...]) -> None:
        super().__init__()
        self.maps, self.types = maps, (*[types.uint64] * maps, *extra)
        read_ahead = epilogue.build_ahead(params)

        @inline
        def ahead(c, e):
            read_ahead(c, e[maps:])

        @inline
        def nothing_kept(c, e):
            return ()

        @inline
        def nothing(base_or_lane):
            pass

        @inline
        def nothing_asked(thread, tile, turn, e):
            pass

        self.ahead, self.keep, self.ask = ahead, nothing_kept, nothing_asked
        self.init = self.drain = nothing
        self.early = False


def taken_of(params: Params) -> DType:
    """The type in which the epilogue takes sums, which those of integers become on their way."""
    return epilogue.Form.decoded(params).taken


def taking(columns: int, span: int, sums: str, params: Params) -> Any:
    """The device function (acc, number): `hopper.part` of sums of a type of `SUMS`, as the epilogue takes them."""
    part = hw.part(columns, span, sums)
    if sums == "f32":
        return part
    taken = mma.taken(taken_of(params), span // 2)

    @inline
    def take(acc, number):
        return taken(part(acc, number))

    return take


def landing(writers: int, landed: int) -> Any:
    """`init` of a way that adds something: a barrier for each writer."""

    @inline
    def init(base):
        for w in range(writers):
            hw.barrier_init(u32(base + landed + 8 * w), 1)

    return init


class Rows(Results):
    """Lanes store rows: a warp stages its 16 rows, `columns` at a time, and a lane takes 8 columns of every so-manieth row.

    shape  rows and columns of the tile; pitch, bytes between staged rows
    batch  rows that a lane stores at a time, whose loads overlap
    """

    def __init__(self, shape: tuple[int, int], columns: int, pitch: int, batch: int, staging: Staging, params: Params) -> None:
        compute, extra = epilogue.build(params, batch)
        super().__init__(params, 0, extra)
        (bm, wide), at_results, each, sums = shape, staging.at, staging.each, staging.sums
        stage, half, groups, chunks = hw.stage(wide, columns, pitch, sums), 2 * columns + 16, columns // 8, wide // columns
        apart, turns = 32 // groups, groups // 2  # rows between the groups of 8 results that a lane stores, and how many it has
        batches, skip = turns // batch, batch * apart
        load4 = hw.load_shared_f32x4 if sums == "f32" else memory.load_sums(taken_of(params), 4)
        staged_rows = _staged_rows(load4, batch, half, apart * pitch)

        @inline
        def store_row(acc, m, step, end, c, e):
            compute(acc, m, c, e)

        store_rows = store_row if batch == 1 else compute

        @inline
        def finish(acc, read, thread, tile, turn, e):
            base, warp, lane, _, _ = thread
            number, rows, row_tile, column_tile = tile
            m, n = i32(row_tile * bm), i32(column_tile * wide)
            own = u32(base + at_results + warp * each)
            corner = u32(own + (lane >> 2) * pitch + ((lane >> 1) & 1) * half + (lane & 1) * 8)
            row, group = i32(lane // groups), i32(lane % groups)
            if groups == 4:  # 8 lanes read two rows at once: rows that are 2 apart share no bank
                row = i32((row & 4) | (row & 1) << 1 | (row & 2) >> 1)
            at = u32(own + row * pitch + group * 16)
            start = i32(number * rows)
            first, end, c = i32(start + m + warp * 16 + row), i32(start + rows), i32(n + group * 8)
            if i32(m + warp * 16) < rows:
                for part in range(chunks):
                    stage(acc, corner, part)
                    cuda.syncwarp()
                    for again in range(batches):
                        if first + again * skip < end:
                            results = staged_rows(u32(at + again * (skip * pitch)))
                            store_rows(results, i32(first + again * skip), i32(apart), end, i32(c + part * columns), e)
                    cuda.syncwarp()
            return turn

        self.finish = finish


def _staged_rows(load4: Any, batch: int, half: int, step: int) -> Any:
    """The device function address → 8 results each of `batch` staged rows, `step` bytes apart; `load4` reads half of 8."""

    @inline
    def one_row(at):
        return load4(at) + load4(u32(at + half))

    @inline
    def two_rows(at):
        return one_row(at) + one_row(u32(at + step))

    @inline
    def four_rows(at):
        return two_rows(at) + two_rows(u32(at + 2 * step))

    return {1: one_row, 2: two_rows, 4: four_rows}[batch]


class Split(Results):
    """Each block of a cluster stages its part of the sum over K, where the ring was; each then adds the parts of every
    `split`-th row, in order of rank, and its lanes store them.

    shape      rows and columns of the tile; pitch, bytes between staged rows
    consumers  threads that multiply
    turned     whether the product's rows are the tile's columns
    """

    def __init__(
        self, shape: tuple[int, int], pitch: int, split: int, consumers: int, turned: bool, staging: Staging, params: Params
    ) -> None:
        compute, extra = epilogue.build(params)
        super().__init__(params, 0, extra)
        (bm, columns), at_results, sums, taken = shape, staging.at, staging.sums, taken_of(params)
        half, groups = 2 * columns + 16, columns // 8
        stage = hw.stage_turned(bm, pitch, sums=sums) if turned else hw.stage(columns, columns, pitch, sums)
        share = bm * groups // split  # groups of 8 results that a block stores
        shares = ceil_div(share, consumers)
        sync_consumers, zero = hw.sync_threads(1, consumers), (types.float32 if taken is DType.F32 else types.int64)(0)
        sum_of_parts = _sum_of_parts(split, half, sums, taken)

        @inline
        def finish(acc, read, thread, tile, turn, e):
            base, warp, lane, _, rank = thread
            number, rows, row_tile, column_tile = tile
            m, n = i32(row_tile * bm), i32(column_tile * columns)
            if turned:  # a lane has a channel of every 8 rows' two
                corner = u32(base + at_results + (lane & 3) * 2 * pitch + (lane >> 4) * half + warp * 32 + ((lane >> 2) & 3) * 4)
            else:
                corner = u32(base + at_results + (warp * 16 + (lane >> 2)) * pitch + ((lane >> 1) & 1) * half + (lane & 1) * 8)
            sync_consumers()  # nobody reads the ring any more
            stage(acc, corner, i32(0))
            hw.cluster_arrive()
            hw.cluster_wait()
            for again in range(shares):
                i = i32(again * consumers + warp * 32 + lane)
                row, group = i32((i // groups) * split + rank), i32(i % groups)
                inside = i < share and i32(m + row) < rows
                a0, a1, a2, a3, a4, a5, a6, a7 = zero, zero, zero, zero, zero, zero, zero, zero
                if inside:
                    a0, a1, a2, a3, a4, a5, a6, a7 = sum_of_parts(u32(base + at_results + row * pitch + group * 16))
                if again == shares - 1:  # before the results are stored: arriving waits for all that has been stored
                    hw.cluster_arrive()
                if inside:
                    compute((a0, a1, a2, a3, a4, a5, a6, a7), i32(number * rows + m + row), i32(n + group * 8), e)
            return turn

        self.finish = finish


def _sum_of_parts(split: int, half: int, sums: str, compute: DType) -> Any:
    """The device function address → the sum of 8 results over the blocks of a cluster, all of which have a part there.

    sums, compute  the type of parts, and the one in which the epilogue takes what they are together
    """
    load4, number = hw.load_cluster_x4(sums), f32 if sums == "f32" else i32
    taken = mma.taken(compute, 8) if sums == "s32" else None

    @inline
    def sum_of_parts(at):
        a0, a1, a2, a3 = load4(hw.in_block(at, 0))
        a4, a5, a6, a7 = load4(hw.in_block(u32(at + half), 0))
        for other in range(1, split):
            b0, b1, b2, b3 = load4(hw.in_block(at, other))
            b4, b5, b6, b7 = load4(hw.in_block(u32(at + half), other))
            a0, a1, a2, a3 = number(a0 + b0), number(a1 + b1), number(a2 + b2), number(a3 + b3)
            a4, a5, a6, a7 = number(a4 + b4), number(a5 + b5), number(a6 + b6), number(a7 + b7)
        return a0, a1, a2, a3, a4, a5, a6, a7

    @inline
    def taken_sum(at):
        return taken(sum_of_parts(at))

    return taken_sum if taken else sum_of_parts
