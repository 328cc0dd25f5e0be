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

from collections.abc import Sequence
from typing import Any

from tccompile.ir.extent import ceil_div
from tccompile.ir.types import DType
from tccompile.kernels import epilogue
from tccompile.kernels.parts.part import Part
from tccompile.kernels.parts.staging import BOXES, BYTES, KINDS, RESULT, Staging
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


# --- Rows --------------------------------------------------------------------------------------------------------------


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


# --- Boxes -------------------------------------------------------------------------------------------------------------


class Boxes(Results):
    """Each warp rounds its 16 rows, `columns` at a time, into boxes laid out as the copy engine swizzles them, which it stores.
    Results are halves, or integers of 8 bits; what is added to them has a type of the same size.

    shape  rows and columns of the tile; span, columns that are taken from the accumulators at once
    `turn` is the box that is next; with something added, which of a place's parts is next, plus so many if its barrier's phase is
    odd.
    """

    def __init__(self, shape: tuple[int, int], columns: int, span: int, staging: Staging, params: Params) -> None:
        added = staging.landed is not None
        lanes = epilogue.Form.decoded(params).lanes
        if lanes == NEIGHBOURS:
            place, put_32, extra = rows_by_eight(staging.result * columns, added, params)
        else:
            place, put_16, extra = rows_of_boxes(staging, columns, params)
        maps = 1 + added
        super().__init__(params, maps, extra)
        (bm, wide), each, landed = shape, staging.each, staging.landed or 0
        result, line = staging.result, staging.result * columns  # bytes of a result, and of a box's row
        chunks, spans, box_bytes = wide // columns, columns // span, 16 * line
        early, part_bytes = staging.tiles > 1, each // staging.tiles
        rows_alike = 8 - line.bit_length()  # logarithm of a box's rows in 128 bytes, which swizzles take alike
        take, box_read, boxes_read = taking(wide, span, staging.sums, params), hw.boxes_read(BOXES - 1), hw.boxes_read(0)
        part_of, barrier_of, phase, after = _turns(staging)

        def put_span(number: int) -> Any:
            """Columns from `span` times the number on, of all of the tile's: their place in a box is known here."""
            inside, column = number % spans * (result * span), number * span

            @inline
            def put_16_columns(acc, at, c, e):
                put_16(take(acc, i32(number)), u32(at ^ inside), i32(c + column), e)

            @inline
            def put_32_columns(acc, at, c, e):
                values = take(acc, i32(number))
                put_16(values, u32(at ^ inside), i32(c + column), e)
                put_16(values[8:], u32(at ^ (inside + 16 * result)), i32(c + column + 16), e)

            @inline
            def put_eights(acc, at, c, e):
                put_32(take(acc, i32(number)), u32(at ^ inside), i32(c + column), e)

            return put_eights if lanes == NEIGHBOURS else put_32_columns if span == 32 else put_16_columns

        def put_box(number: int) -> Any:
            """The box of these columns, and its way to memory."""
            spans_of_box = all_of([put_span(number * spans + i) for i in range(spans)])

            @inline
            def put(acc, own, at, where, lane, turn, e):
                first, n, batch = where
                box = u32((number if added else turn) * box_bytes)
                if not added:
                    if lane == 0:
                        box_read()
                    cuda.syncwarp()
                spans_of_box(acc, u32(at + box), i32(n + (lane & 3) * lanes), e[maps:])
                hw.fence_copies()
                cuda.syncwarp()
                if lane == 0:
                    hw.store_box(e[0], u32(own + box), i32(n + number * columns), first, batch)
                if not added:
                    turn = i32(turn + 1) if turn < BOXES - 1 else i32(0)
                return turn

            return put

        put_all = _in_turn([put_box(number) for number in range(chunks)])

        @inline
        def finish(acc, read, thread, tile, turn, e):
            base, warp, lane, _, _ = thread
            number, rows, row_tile, column_tile = tile
            m, n = i32(row_tile * bm), i32(column_tile * wide)
            row, of_row, inside = place(lane)
            first, key = i32(m + warp * 16), i32((row >> rows_alike) & (line // 16 - 1))
            own = part_of(base, warp, turn)
            at = u32(own + row * line + (of_row ^ key) * 16 + inside)
            if first < rows:
                if added:
                    hw.barrier_wait(barrier_of(base, warp, turn), phase(turn))
                turn = put_all(acc, own, at, (first, n, number), lane, turn, e)
                if added and not early:
                    turn = after(turn)
            if early:
                turn = after(turn)
            return turn

        @inline
        def ask(thread, tile, turn, e):
            """Once the boxes of the tile before have been read."""
            base, warp, lane, _, _ = thread
            number, rows, row_tile, column_tile = tile
            m, n = i32(row_tile * bm), i32(column_tile * wide)
            first, own, barrier = i32(m + warp * 16), part_of(base, warp, turn), barrier_of(base, warp, turn)
            if lane == 0 and first < rows:
                boxes_read()
                hw.barrier_expect(barrier, part_bytes)
                for chunk in range(chunks):
                    hw.copy_box(u32(own + chunk * box_bytes), e[1], barrier, i32(n + chunk * columns), first, number)
            elif early and lane == 0:  # a tile without rows for the warp has its turn, too
                hw.barrier_arrive(barrier)

        self.finish, self.drain = finish, drain_boxes()
        if added:
            self.init, self.ask, self.early = landing(bm // 16 * staging.tiles, landed), ask, early


def all_of(steps: Sequence[Any]) -> Any:
    """The device function that calls all of these of (acc, at, c, e), without a loop."""
    if len(steps) == 1:
        return steps[0]
    first, rest = steps[0], all_of(steps[1:])

    @inline
    def every(acc, at, c, e):
        first(acc, at, c, e)
        rest(acc, at, c, e)

    return every


def _in_turn(steps: Sequence[Any]) -> Any:
    """The same of (acc, own, at, where, lane, turn, e) → turn."""
    if len(steps) == 1:
        return steps[0]
    first, rest = steps[0], _in_turn(steps[1:])

    @inline
    def every(acc, own, at, where, lane, turn, e):
        return rest(acc, own, at, where, lane, first(acc, own, at, where, lane, turn, e), e)

    return every


def _turns(staging: Staging) -> tuple[Any, Any, Any, Any]:
    """What a `turn` says of a place that has parts for one or two tiles, as device functions: (base, warp, turn) → where the part
    is, and where its barrier; turn → the parity of that one's phase; turn → the next one."""
    at, each, landed = staging.at, staging.each, staging.landed or 0

    @inline
    def the_place(base, warp, turn):
        return u32(base + at + warp * each)

    @inline
    def the_barrier(base, warp, turn):
        return u32(base + landed + warp * 8)

    @inline
    def itself(turn):
        return turn

    @inline
    def other(turn):
        return i32(turn ^ 1)

    @inline
    def part(base, warp, turn):
        return u32(base + at + warp * each + (turn & 1) * (each // 2))

    @inline
    def barrier(base, warp, turn):
        return u32(base + landed + warp * 16 + (turn & 1) * 8)

    @inline
    def phase(turn):
        return i32((turn >> 1) & 1)

    @inline
    def after(turn):
        return i32((turn + 1) & 3)

    return (the_place, the_barrier, itself, other) if staging.tiles == 1 else (part, barrier, phase, after)


def rows_of_boxes(staging: Staging, columns: int, params: Params) -> tuple[Any, Any, tuple[Any, ...]]:
    """How 16 rows of 16 columns go through the epilogue into a box of so many columns: the device functions place(lane) and
    put(values, at, c, e), of `put_rows` or `_put_bytes`, and the types of the epilogue's arguments."""
    halves, added = staging.result == RESULT, staging.landed is not None
    compute, extra = epilogue.build_results(params, groups=1 if halves else 2)
    if halves:
        return _place_of_halves, put_rows(compute, added, kind_of(params)), extra
    return *_put_bytes(compute, staging.result * columns, added, params), extra


def kept_rows_of_boxes(staging: Staging, columns: int, blocks: int, params: Params) -> tuple[Any, Any, Any, tuple[Any, ...]]:
    """The same for a kernel that stays with its columns: place(lane); keep(c, e), what is read for them if results are bytes, of
    which reading takes a large part; and for 16 columns from `first` on, put(values, at, read, c, e). With sums of several blocks
    a lane has no registers left to keep it in."""
    place, put_16, extra = rows_of_boxes(staging, columns, params)

    @inline
    def nothing(c, e):
        return ()

    def plain(first: int) -> Any:
        @inline
        def put(values, at, read, c, e):
            put_16(values, at, c, e)

        return put

    if staging.result == RESULT or blocks > 1:
        return place, nothing, plain, extra
    kept, results, extra = epilogue.build_kept(params)
    put_four, load_four = _fours_of_bytes(staging.result * columns, staging.landed is not None, params)
    return place, _kept_by_eights(kept, columns // 8), _put_kept(results, put_four, load_four), extra


def _kept_by_eights(kept: Any, count: int, first: int = 0) -> Any:
    """The device function (c, e) → what is kept for a lane's channels of each so many times 8."""
    rest = _kept_by_eights(kept, count - 1, first + 8) if count > 1 else None

    @inline
    def last(c, e):
        return (kept(i32(c + first), e),)

    @inline
    def more(c, e):
        return (kept(i32(c + first), e), *rest(c, e))

    return more if count > 1 else last


def _put_kept(results: Any, put_four: Any, load_four: Any) -> Any:
    """Of the first of 16 columns, `put` of `kept_rows_of_boxes` for bytes; load_four: of what is added, if anything is."""

    def of(first: int) -> Any:
        one, other = first // 8, first // 8 + 1

        @inline
        def put_plain(values, at, read, c, e):
            put_four(at, results(values[:4], read[one], c, e) + results(values[4:8], read[other], i32(c + 8), e))

        @inline
        def put_added(values, at, read, c, e):
            there = load_four(at)
            a = results(values[:4], there[:4], read[one], c, e)
            put_four(at, a + results(values[4:8], there[4:], read[other], i32(c + 8), e))

        return put_added if load_four else put_plain

    return of


def kind_of(params: Params) -> str:
    """PTX's type of results of 16 bits in a box."""
    return KINDS[epilogue.Form.decoded(params).y.dtype]


def put_rows(compute: Any, added: bool, kind: str) -> Any:
    """The device function put(values, at, c, e): 16 rows of 16 columns through the epilogue and into a box, where `at` is the
    lane's address for stmatrix. A lane has 4 values of 8 columns after those of the 8 before."""
    store, load = hw.store_matrices(kind=kind), hw.load_matrices(kind=kind)

    @inline
    def put_plain(values, at, c, e):
        a, b = compute(values[:4], c, e), compute(values[4:8], i32(c + 8), e)
        store(at, a[0], a[1], a[2], a[3], b[0], b[1], b[2], b[3])

    @inline
    def put_added(values, at, c, e):
        """The same, with what is at their place."""
        there = load(at)
        a, b = compute(values[:4], there[:4], c, e), compute(values[4:8], there[4:], i32(c + 8), e)
        store(at, a[0], a[1], a[2], a[3], b[0], b[1], b[2], b[3])

    return put_added if added else put_plain


@inline
def _place_of_halves(lane):
    """Where in 16 rows of 16 columns a lane's address for stmatrix is: row, which 16 bytes of it, bytes from their start on."""
    return i32(lane & 15), lane >> 4, 0


def _put_bytes(compute: Any, line: int, added: bool, params: Params) -> tuple[Any, Any]:
    """What `_place_of_halves` and `put_rows` are for results of a byte, in a box's rows of `line` bytes: a lane's address is that
    of its two neighbours in the first 8 rows and columns, from which it stores four times two."""
    put, load = _fours_of_bytes(line, added, params)

    @inline
    def place(lane):
        return i32(lane >> 2), 0, (lane & 3) * 2

    @inline
    def put_plain(values, at, c, e):
        put(at, compute(values[:8], c, e))

    @inline
    def put_added(values, at, c, e):
        put(at, compute(values[:8], load(at), c, e))

    return place, put_added if added else put_plain


def _fours_of_bytes(line: int, added: bool, params: Params) -> tuple[Any, Any]:
    """The device functions (at, values) that stores a lane's eight results, and at → what is there, if something is added."""
    dtype, below = epilogue.Form.decoded(params).y.dtype, 8 * line
    store = memory.store(dtype, 2, space="shared", rounds=dtype in BYTES)
    load = epilogue.load_added(params, 2, "shared") if added else None

    @inline
    def put(at, v):
        store(at, v[0], v[1])
        store(u32(at + below), v[2], v[3])
        store(u32(at + 8), v[4], v[5])
        store(u32(at + below + 8), v[6], v[7])

    @inline
    def there(at):
        return load(at) + load(u32(at + below)) + load(u32(at + 8)) + load(u32(at + below + 8))

    return put, there if added else None


NEIGHBOURS = 8
"""Results of bytes that a lane has side by side, of 32 columns in an order for that: see `Operand.eights`."""


def rows_by_eight(line: int, added: bool, params: Params) -> tuple[Any, Any, tuple[Any, ...]]:
    """As `rows_of_boxes`, of 32 columns, in a box's rows of `line` bytes, which a lane takes by eight."""
    compute, extra = epilogue.build_results(params)
    dtype, below = epilogue.Form.decoded(params).y.dtype, 8 * line
    store = memory.store(dtype, NEIGHBOURS, space="shared", rounds=dtype in BYTES)
    load = epilogue.load_added(params, NEIGHBOURS, "shared") if added else None

    @inline
    def place(lane):
        return i32(lane >> 2), (lane & 3) >> 1, (lane & 1) * 8

    @inline
    def by_rows(v):
        return v[0], v[1], v[4], v[5], v[8], v[9], v[12], v[13], v[2], v[3], v[6], v[7], v[10], v[11], v[14], v[15]

    @inline
    def put(at, v):
        store(at, v[0], v[1], v[2], v[3], v[4], v[5], v[6], v[7])
        store(u32(at + below), v[8], v[9], v[10], v[11], v[12], v[13], v[14], v[15])

    @inline
    def put_plain(values, at, c, e):
        put(at, compute(by_rows(values), c, e))

    @inline
    def put_added(values, at, c, e):
        there = load(at) + load(u32(at + below))
        put(at, compute(by_rows(values), there, c, e))

    return place, put_added if added else put_plain, extra


def drain_boxes() -> Any:
    """`drain` of boxes: shared memory lives until the copy engine has read it."""
    boxes_read = hw.boxes_read(0)

    @inline
    def drain(lane):
        if lane == 0:
            boxes_read()

    return drain


# --- Boxes turned over ---------------------------------------------------------------------------------------------------


class Turned(Results):
    """For a product whose rows are the tile's columns: a warpgroup turns and rounds its 64 columns of all rows into one box, of
    which a warp has 16 numbers in every row; or into boxes of a piece of the rows each, which take places in turn. Results are
    halves, of which a lane has columns c and c + 8, or bytes, of which it has neighbours: `Operand.paired`.

    shape   rows and columns of the tile; span, rows that are taken from the accumulators at once; piece, rows of a box
    blocks  of 64 columns that a warpgroup has, one after the other
    `turn` is the parity of its barrier's phase, where something is added.
    """

    def __init__(self, shape: tuple[int, int], span: int, piece: int, staging: Staging, params: Params, blocks: int = 1) -> None:
        added = staging.landed is not None
        maps = 1 + added
        line = staging.result * 64
        turning, place = (
            (_put_turned, _place_of_halves_turned) if staging.result == RESULT else (_put_turned_bytes, _place_of_pairs)
        )
        kept, put_span, extra = turning(span, added, params)
        super().__init__(params, maps, extra)
        (bm, bn), at_results, each, landed = shape, staging.at, staging.each, staging.landed or 0
        take, boxes_read = taking(bm, span, staging.sums, params), hw.boxes_read(0)
        assert piece == bm or not added, "what is added comes in one box"

        @inline
        def keep(c, e):
            return kept(c, e[maps:])

        @inline
        def finish(acc, read, thread, tile, turn, e):
            base, warp, lane, _, _ = thread
            number, _, row_tile, column_tile = tile
            m, n = i32(row_tile * bm), i32(column_tile * bn)
            group, leads = i32(warp >> 2), (warp & 3) == 0 and lane == 0
            own = u32(base + at_results + group * each)
            inside, of_lane = place(warp, lane)
            at = u32(own + inside)
            if added:
                hw.barrier_wait(u32(base + landed + group * 8), turn)
            else:
                if leads:
                    boxes_read()
                hw.sync_group(i32(group + 1))
            c = i32(n + warp * 16 + of_lane)
            for part in range(bm // span):
                put_span(take(acc, i32(part)), read, u32(at + part * (span * line)), c, e[maps:])
            hw.fence_copies()
            hw.sync_group(i32(group + 1))
            if leads:
                hw.store_box(e[0], own, i32(n + group * 64), m, number)
            return i32(turn ^ 1)

        @inline
        def ask(thread, tile, turn, e):
            base, warp, lane, _, _ = thread
            number, _, row_tile, column_tile = tile
            m, n = i32(row_tile * bm), i32(column_tile * bn)
            group = i32(warp >> 2)
            if (warp & 3) == 0 and lane == 0:
                boxes_read()
                barrier = u32(base + landed + group * 8)
                hw.barrier_expect(barrier, each)
                hw.copy_box(u32(base + at_results + group * each), e[1], barrier, i32(n + group * 64), m, number)

        self.keep, self.finish, self.drain = keep, finish, drain_boxes()
        if added:
            self.init, self.ask = landing(bn // 64, landed), ask
        if piece < bm:
            self.finish = _finish_in_pieces(shape, span, piece, staging, (put_span, take))
        if blocks > 1:
            self._take_blocks(shape, span, piece, staging, (put_span, take))

    def _take_blocks(self, shape: tuple[int, int], span: int, piece: int, staging: Staging, how: tuple[Any, Any]) -> None:
        """Two blocks of a warpgroup. What the epilogue reads for their columns is read when they leave: while products are made
        there are no registers for it."""
        assert piece < shape[0], "two blocks leave in pieces"
        one, first, second = self.keep, *(_finish_in_pieces(shape, span, piece, staging, how, (i, 2)) for i in range(2))
        bn = shape[1]

        @inline
        def keep(c, e):
            return ()

        @inline
        def finish(acc, read, thread, tile, turn, e):
            _, warp, lane, _, _ = thread
            c = i32(tile[3] * bn + (warp >> 2) * 128 + (warp & 3) * 16 + (lane >> 2))
            first(acc[0], one(c, e), thread, tile, turn, e)
            return second(acc[1], one(i32(c + 64), e), thread, tile, turn, e)

        self.keep, self.finish = keep, finish


def _finish_in_pieces(
    shape: tuple[int, int], span: int, piece: int, staging: Staging, how: tuple[Any, Any], block: tuple[int, int] = (0, 1)
) -> Any:
    """`finish` of `Turned` where a warpgroup's results leave in several boxes; block: which of so many of a warpgroup."""
    (bm, bn), at_results, each, (put_span, take) = shape, staging.at, staging.each, how
    box, parts = 128 * piece, piece // span
    number_of_block, blocks = block
    places, boxes_read, others_read = each // box, hw.boxes_read(0), hw.boxes_read(each // box - 1)

    def place_of(k: int) -> int:
        return (number_of_block * (bm // piece) + k) % places

    def put_part(k: int, part: int) -> Any:
        """Some rows of a piece, whose sums are known here."""
        number, further = k * parts + part, place_of(k) * box + part * (span * 128)

        @inline
        def put(acc, read, at, c, e):
            put_span(take(acc, i32(number)), read, u32(at + further), c, e)

        return put

    def put_piece(k: int) -> Any:
        put_all, offset = _one_by_one([put_part(k, part) for part in range(parts)]), place_of(k) * box

        @inline
        def piece_of(acc, read, at, c, e):
            first, lanes, group, leads, column, m, batch = at
            own = u32(first + offset)
            if leads:
                others_read()
            hw.sync_group(i32(group + 1))
            put_all(acc, read, u32(first + lanes), c, e[1:])
            hw.fence_copies()
            hw.sync_group(i32(group + 1))
            if leads:
                hw.store_box(e[0], own, column, i32(m + k * piece), batch)

        return piece_of

    put_pieces = _one_by_one([put_piece(k) for k in range(bm // piece)])

    @inline
    def finish(acc, read, thread, tile, turn, e):
        base, warp, lane, _, _ = thread
        number, _, row_tile, column_tile = tile
        m, n = i32(row_tile * bm), i32(column_tile * bn)
        group, leads = i32(warp >> 2), (warp & 3) == 0 and lane == 0
        first = u32(base + at_results + group * each)
        lanes = ((lane >> 4) * 8 + (lane & 7)) * 128 + ((((warp & 3) * 2 + ((lane >> 3) & 1)) ^ (lane & 7)) * 16)
        block = i32(group * blocks + number_of_block)
        c = i32(n + block * 64 + (warp & 3) * 16 + (lane >> 2)) if blocks > 1 else i32(n + warp * 16 + (lane >> 2))
        if leads and number_of_block == 0:  # those of the tile before
            boxes_read()
        put_pieces(acc, read, (first, lanes, group, leads, i32(n + block * 64), m, number), c, e)
        return i32(turn ^ 1)

    return finish


def _one_by_one(steps: Sequence[Any]) -> Any:
    """The device function that calls all of these of (acc, read, at, c, e), without a loop, so that it is known which sums each
    takes."""
    if len(steps) == 1:
        return steps[0]
    first, rest = steps[0], _one_by_one(steps[1:])

    @inline
    def every(acc, read, at, c, e):
        first(acc, read, at, c, e)
        rest(acc, read, at, c, e)

    return every


@inline
def _place_of_halves_turned(warp, lane):
    """Where in a box a lane's address for stmatrix is, and which of its warp's columns is the lane's first one."""
    return ((lane >> 4) * 8 + (lane & 7)) * 128 + ((((warp & 3) * 2 + ((lane >> 3) & 1)) ^ (lane & 7)) * 16), lane >> 2


@inline
def _place_of_pairs(warp, lane):
    """The same of bytes, of which a warp has 16 in every row."""
    return lane * 64 + (((warp & 3) ^ ((lane >> 1) & 3)) * 16), (lane >> 2) * 2


def _put_turned_bytes(span: int, added: bool, params: Params) -> tuple[Any, Any, tuple[Any, ...]]:
    """As `_put_turned`, for bytes: a lane's channels are neighbours, c and c + 1."""
    kept, results, extra = epilogue.build_kept(params)
    floats, stored = epilogue.floats_added(params, 4) if added else None, epilogue.Form.decoded(params).y.dtype

    @inline
    def keep(c, e):
        first = i32(c + (c & 15))  # columns of 16 are asked for by row, of which there are 8
        return kept(first, e), kept(i32(first + 1), e)

    @inline
    def both_plain(values, word, read, c, e):
        """8 rows of both channels."""
        return results(values[:2], read[0], c, e) + results(values[2:4], read[1], i32(c + 1), e)

    @inline
    def both_added(values, word, read, c, e):
        there = floats(word)
        first, second = (there[0], there[2]), (there[1], there[3])
        return results(values[:2], first, read[0], c, e) + results(values[2:4], second, read[1], i32(c + 1), e)

    both = both_added if added else both_plain

    def several(count: int) -> Any:
        """The device function (values, words, read, c, e) → the results of so many times 8 rows."""
        if count == 1:

            @inline
            def one(values, words, read, c, e):
                return both(values[:4], words[0], read, c, e)

            return one
        rest = several(count - 1)

        @inline
        def more(values, words, read, c, e):
            return both(values[:4], words[0], read, c, e) + rest(values[4:], words[1:], read, c, e)

        return more

    def put(rows: int) -> Any:
        count = next(n for n in (4, 2, 1) if 8 * n <= rows)
        compute, store = several(count), hw.store_byte_matrices(stored, count)
        load, words = hw.read_turned_matrices(count), (types.uint32(0),) * count
        four, further = 4 * count, 8 * count * 64

        @inline
        def stored_there(at):
            return load(at)

        @inline
        def nothing(at):
            return words

        there = stored_there if added else nothing

        @inline
        def put_first(values, read, at, c, e):
            store(at, *compute(values[:four], there(at), read, c, e))

        if rows == 8 * count:
            return put_first
        rest = put(rows - 8 * count)

        @inline
        def put_more(values, read, at, c, e):
            put_first(values, read, at, c, e)
            rest(values[four:], read, u32(at + further), c, e)

        return put_more

    return keep, put(span), extra


def _put_turned(span: int, added: bool, params: Params) -> tuple[Any, Any, tuple[Any, ...]]:
    """How a lane's part of a tile that is turned over becomes rows of its box, and the types of the epilogue's arguments.

    keep(c, e)                   what the epilogue reads for channels c and c + 8, which are a lane's
    put(values, read, at, c, e)  `span` rows of them, as `part` takes them: two neighbouring rows of c, the same of c + 8, then of
                                 the next 8 rows; `at` is the lane's address for stmatrix of the first 16 rows
    """
    kept, results, extra = epilogue.build_kept(params)
    zeros = (types.float32(0),) * 8

    @inline
    def keep(c, e):
        return kept(c, e), kept(i32(c + 8), e)

    @inline
    def plain(values, there, read, c, e):
        return results(values, read, c, e)

    @inline
    def nothing(at):
        return zeros

    compute = results if added else plain
    kind = kind_of(params)
    store_x2, store_x4 = (hw.store_matrices(count, True, kind) for count in (2, 4))
    there_x2, there_x4 = (hw.load_matrices(count, True, kind) if added else nothing for count in (2, 4))

    @inline
    def both(values, there, read, c, e):
        """8 rows of both channels."""
        return compute(values[:2], there[:2], read[0], c, e) + compute(values[2:4], there[2:4], read[1], i32(c + 8), e)

    @inline
    def put_8(values, read, at, c, e):
        v = both(values, there_x2(at), read, c, e)
        store_x2(at, v[0], v[1], v[2], v[3])

    @inline
    def put_16(values, read, at, c, e):
        there = there_x4(at)
        v, w = both(values[:4], there[:4], read, c, e), both(values[4:], there[4:], read, c, e)
        store_x4(at, v[0], v[1], v[2], v[3], w[0], w[1], w[2], w[3])

    def put(rows: int) -> Any:
        if rows <= 16:
            return put_8 if rows == 8 else put_16
        rest = put(rows - 16)

        @inline
        def put_more(values, read, at, c, e):
            put_16(values[:8], read, at, c, e)
            rest(values[8:], read, u32(at + 2048), c, e)

        return put_more

    return keep, put(span), extra


# --- Sums split over a cluster -------------------------------------------------------------------------------------------


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
