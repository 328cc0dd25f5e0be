"""Sums of a tile that leave in boxes of the copy engine: rows of the tile are rows of the boxes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from tccompile.kernels import epilogue
from tccompile.kernels.parts.results import Params, Results, landing, taking
from tccompile.kernels.parts.staging import BOXES, BYTES, KINDS, RESULT, Staging
from tccompile.kernels.ptx import hopper as hw
from tccompile.kernels.ptx import memory
from tccompile.kernels.ptx.core import cuda, i32, inline, u32


class Boxes(Results):
    """Each warp rounds its 16 rows, `columns` at a time, into boxes laid out as the copy engine swizzles them, which it stores.
    Results are halves, or integers of 8 bits; what is added to them has a type of the same size.

    shape  rows and columns of the tile; span, columns that are taken from the accumulators at once
    `turn` is the box that is next; with something added, which of a place's parts is next, plus so many if its barrier's phase is
    odd.
    """

    def __init__(self, shape: tuple[int, int], columns: int, span: int, staging: Staging, params: Params) -> None:
        box = Box(staging.result, columns, span, epilogue.Form.decoded(params).lanes, staging.landed is not None)
        if box.lanes == NEIGHBOURS:
            place, put, extra = rows_by_eight(box.line, box.added, params)
        else:
            place, put, extra = rows_of_boxes(staging, columns, params)
        super().__init__(params, 1 + box.added, extra)
        take, spans = taking(shape[1], span, staging.sums, params), columns // span
        boxes = [
            _put_box(number, box, all_of([_put_span(number * spans + i, box, take, put) for i in range(spans)]))
            for number in range(shape[1] // columns)
        ]
        self.finish, self.drain = _finish(shape, box, staging, place, _in_turn(boxes)), drain_boxes()
        if box.added:
            self.init = landing(shape[0] // 16 * staging.tiles, staging.landed or 0)
            self.ask, self.early = _ask(shape, box, staging), staging.tiles > 1


class Box(NamedTuple):
    """16 rows of a warp: bytes of a result, columns of a box and of what is taken from the accumulators at once, neighbours that
    a lane has of them, and whether something is added to results."""

    result: int
    columns: int
    span: int
    lanes: int
    added: bool

    @property
    def line(self) -> int:
        """Bytes of a row."""
        return self.result * self.columns

    @property
    def bytes(self) -> int:
        return 16 * self.line


def _put_span(number: int, box: Box, take: Any, put: Any) -> Any:
    """The device function (acc, at, c, e) for columns from `span` times the number on, of all of the tile's: their place in a box
    is known here. `put` takes 16 of them, or by eight neighbours 32."""
    result, span = box.result, box.span
    inside, column = number % (box.columns // span) * (result * span), number * span

    @inline
    def put_once(acc, at, c, e):
        put(take(acc, i32(number)), u32(at ^ inside), i32(c + column), e)

    @inline
    def put_twice(acc, at, c, e):
        values = take(acc, i32(number))
        put(values, u32(at ^ inside), i32(c + column), e)
        put(values[8:], u32(at ^ (inside + 16 * result)), i32(c + column + 16), e)

    return put_twice if span == 32 and box.lanes != NEIGHBOURS else put_once


def _put_box(number: int, box: Box, put_spans: Any) -> Any:
    """The device function (acc, own, at, where, lane, turn, e) → turn for the box of this number, and its way to memory."""
    added, lanes, columns, box_bytes = box.added, box.lanes, box.columns, box.bytes
    box_read, maps = hw.boxes_read(BOXES - 1), 1 + added

    @inline
    def put(acc, own, at, where, lane, turn, e):
        first, n, batch = where
        begin = u32((number if added else turn) * box_bytes)
        if not added:
            if lane == 0:
                box_read()
            cuda.syncwarp()
        put_spans(acc, u32(at + begin), i32(n + (lane & 3) * lanes), e[maps:])
        hw.fence_copies()
        cuda.syncwarp()
        if lane == 0:
            hw.store_box(e[0], u32(own + begin), i32(n + number * columns), first, batch)
        if not added:
            turn = i32(turn + 1) if turn < BOXES - 1 else i32(0)
        return turn

    return put


def _finish(shape: tuple[int, int], box: Box, staging: Staging, place: Any, put_all: Any) -> Any:
    """`finish` of boxes."""
    (bm, wide), line, added, early = shape, box.line, box.added, staging.tiles > 1
    rows_alike = 8 - line.bit_length()  # logarithm of a box's rows in 128 bytes, which swizzles take alike
    part_of, barrier_of, phase, after = _turns(staging)

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

    return finish


def _ask(shape: tuple[int, int], box: Box, staging: Staging) -> Any:
    """`ask` of boxes to which something is added, once those of the tile before have been read."""
    (bm, wide), columns, box_bytes, early = shape, box.columns, box.bytes, staging.tiles > 1
    chunks, part_bytes, boxes_read = wide // columns, staging.each // staging.tiles, hw.boxes_read(0)
    part_of, barrier_of, _, _ = _turns(staging)

    @inline
    def ask(thread, tile, turn, e):
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

    return ask


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
    compute, extra = epilogue.build_results(params, groups=1 if halves else 2, rectified=False)
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
    kept, results, extra = epilogue.build_kept(params, rectified=False)
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
    store = memory.store(dtype, 2, space="shared", rounds=dtype in BYTES, rectifies=epilogue.rectifies(params))
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
    compute, extra = epilogue.build_results(params, rectified=False)
    dtype, below = epilogue.Form.decoded(params).y.dtype, 8 * line
    store = memory.store(dtype, NEIGHBOURS, space="shared", rounds=dtype in BYTES, rectifies=epilogue.rectifies(params))
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
