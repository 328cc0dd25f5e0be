"""Sums of a tile with swapped operands, which leave in boxes turned over: columns of the tile are rows there."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tccompile.kernels import epilogue
from tccompile.kernels.parts.boxes import drain_boxes, kind_of
from tccompile.kernels.parts.results import Params, Results, landing, taking
from tccompile.kernels.parts.staging import RESULT, Staging
from tccompile.kernels.ptx import hopper as hw
from tccompile.kernels.ptx.core import i32, inline, types, u32


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
    kept, results, extra = epilogue.build_kept(params, rectified=False)
    floats, stored = epilogue.floats_added(params, 4) if added else None, epilogue.Form.decoded(params).y.dtype
    both = _both_channels(results, floats)

    @inline
    def keep(c, e):
        first = i32(c + (c & 15))  # columns of 16 are asked for by row, of which there are 8
        return kept(first, e), kept(i32(first + 1), e)

    def put(rows: int) -> Any:
        count = next(n for n in (4, 2, 1) if 8 * n <= rows)
        compute, store = _several(count, both), hw.store_byte_matrices(stored, count, epilogue.rectifies(params))
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


def _both_channels(results: Any, floats: Any) -> Any:
    """The device function (values, word, read, c, e) → the results of 8 rows of both channels. `floats` makes floats of a word of
    what is added to them, if anything is."""

    @inline
    def plain(values, word, read, c, e):
        return results(values[:2], read[0], c, e) + results(values[2:4], read[1], i32(c + 1), e)

    @inline
    def added(values, word, read, c, e):
        there = floats(word)
        first, second = (there[0], there[2]), (there[1], there[3])
        return results(values[:2], first, read[0], c, e) + results(values[2:4], second, read[1], i32(c + 1), e)

    return added if floats else plain


def _several(count: int, both: Any) -> Any:
    """The device function (values, words, read, c, e) → the results of so many times 8 rows."""
    if count == 1:

        @inline
        def one(values, words, read, c, e):
            return both(values[:4], words[0], read, c, e)

        return one
    rest = _several(count - 1, both)

    @inline
    def more(values, words, read, c, e):
        return both(values[:4], words[0], read, c, e) + rest(values[4:], words[1:], read, c, e)

    return more


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
