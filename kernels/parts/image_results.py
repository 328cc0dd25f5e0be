"""How the sums of a tile of an image leave: each object is one way, and a kernel chooses by the problem.

A warpgroup has its tile's sums in blocks of 64 pixels, 8 rows of `SIDE`, of which each of its warps has two rows. All ways have
what those of `results` have, but

own(thread, first, e)             where a thread's part is in every tile, and what is kept for its channels, which `ask` and
                                  `finish` take. A kernel calls it ahead of its loop: there the compiler does not move by
                                  itself all that does not change
ask(own, tile, turn, e)           have what is added to the results copied, while the tile is multiplied
finish(acc, own, tile, turn, e)   the tile's results through the epilogue, and on their way to memory; the next `turn`, which
                                  begins with 0

thread  (base, warp, lane, number in its block); base: address of the block's shared memory, from which a layout counts
first   the block's first channel
tile    (image, first row, first column, rows and columns of the image); a way of boxes needs no columns
acc     a tuple of sums for each block
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tccompile.ir.extent import round_up
from tccompile.kernels import epilogue
from tccompile.kernels.parts.boxes import drain_boxes, kept_rows_of_boxes
from tccompile.kernels.parts.results import Params, Results, landing, taken_of
from tccompile.kernels.parts.staging import BOXES, Staging
from tccompile.kernels.ptx import hopper as hw
from tccompile.kernels.ptx import mma
from tccompile.kernels.ptx.core import cuda, f32, i32, inline, instruction, u32

SIDE = 8
"""Pixels along both sides of a block."""

GROUP = 128
"""Threads of a warpgroup."""


def _each(steps: Sequence[Any]) -> Any:
    """The device function (acc, where, turn, e) → turn, that gives the sums of each block to the step that is for it."""
    first, rest = steps[0], _each(steps[1:]) if len(steps) > 1 else None

    @inline
    def one(acc, where, turn, e):
        return first(acc[0], where, turn, e)

    @inline
    def several(acc, where, turn, e):
        turn = first(acc[0], where, turn, e)
        return rest(acc[1:], where, turn, e)

    return several if len(steps) > 1 else one


# --- Boxes ---------------------------------------------------------------------------------------------------------------


class ImageBoxes(Results):
    """Each warp rounds its two rows of a block into a box laid out as the copy engine swizzles it, which it stores.

    columns  of the product: channels of a box
    places   of each block, its first column and row in the tile; warps: that multiply
    `turn` is the box that is next; with something added, where each block has a box of its own, the parity of its phase.
    """

    def __init__(self, columns: int, places: tuple[tuple[int, int], ...], warps: int, staging: Staging, params: Params) -> None:
        place_of, keep, put_16, extra = kept_rows_of_boxes(staging, columns, len(places), params)
        added = staging.landed is not None
        maps = 1 + added
        super().__init__(params, maps, extra)
        at_results, each, landed = staging.at, staging.each, staging.landed or 0
        line = staging.result * columns  # bytes of a box's row
        rows_alike = 8 - line.bit_length()  # logarithm of a box's rows in 128 bytes, which swizzles take alike
        box_bytes, boxes_read = 16 * line, hw.boxes_read(0)
        put = _put_columns(put_16, columns, staging.result)
        if staging.sums != "f32":
            put = _put_taken(put, mma.taken(taken_of(params), columns // 2))
        put_all = _each([_put_box(put, box_bytes, place, n, added) for n, place in enumerate(places)])
        copy_all = _copy_boxes([(n * box_bytes, *place) for n, place in enumerate(places)])

        @inline
        def own(thread, first, e):
            base, warp, lane, _ = thread
            boxes, barrier = u32(base + at_results + warp * each), u32(base + landed + warp * 8)
            row, of_row, inside = place_of(lane)
            key = i32((row >> rows_alike) & (line // 16 - 1))
            at = u32(row * line + (of_row ^ key) * 16 + inside)
            c = i32(first + (lane & 3) * 2)
            return boxes, barrier, at, lane, i32((warp & 3) * 2), first, c, keep(c, e[maps:])

        @inline
        def finish(acc, own, tile, turn, e):
            boxes, barrier, at, lane, below, first, c, read = own
            image, row, column, bounds = tile
            if added:
                hw.barrier_wait(barrier, turn)
            turn = put_all(acc, (boxes, at, lane, c, read, (image, i32(row + below), column, first, bounds[0])), turn, e)
            if added:
                turn = i32(turn ^ 1)
            return turn

        @inline
        def ask(own, tile, turn, e):
            """Once the boxes of the tile before have been read."""
            boxes, barrier, _, lane, below, first, _, _ = own
            image, row, column, _ = tile
            if lane == 0:
                boxes_read()
                hw.barrier_expect(barrier, each)
                copy_all(e[1], boxes, barrier, (image, i32(row + below), column, first))

        self.own, self.finish, self.drain = own, finish, drain_boxes()
        if added:
            self.init, self.ask = landing(warps, landed), ask


def _put_taken(put: Any, taken: Any) -> Any:
    """`put` of sums of integers, as the epilogue takes them."""

    @inline
    def put_sums(sums, at, read, c, e):
        put(taken(sums), at, read, c, e)

    return put_sums


def _put_columns(put_16: Any, columns: int, result: int) -> Any:
    """The device function (values, at, read, c, e): `put_16` of all columns of a box, with `at` of the first ones."""

    def put(first: int) -> Any:
        rest = put(first + 16) if first + 16 < columns else None
        put_these = put_16(first)

        @inline
        def last(values, at, read, c, e):
            put_these(values, u32(at ^ (result * first)), read, i32(c + first), e)

        @inline
        def more(values, at, read, c, e):
            put_these(values[:8], u32(at ^ (result * first)), read, i32(c + first), e)
            rest(values[8:], at, read, c, e)

        return more if first + 16 < columns else last

    return put(0)


def _put_box(put: Any, box_bytes: int, place: tuple[int, int], block: int, added: bool) -> Any:
    """The step of `ImageBoxes` for a block: into a box, which the copy engine then stores."""
    (along, below), maps = place, 1 + added
    box_read = hw.boxes_read(BOXES - 1)

    @inline
    def step(acc, where, turn, e):
        boxes, at, lane, c, read, tile = where
        image, row, column, first, rows = tile
        if i32(row + below) < rows:
            if not added:
                if lane == 0:
                    box_read()
                cuda.syncwarp()
            box = u32(boxes + (block if added else turn) * box_bytes)
            put(acc, u32(box + at), read, c, e[maps:])
            hw.fence_copies()
            cuda.syncwarp()
            if lane == 0:
                hw.store_box4(e[0], box, first, i32(column + along), i32(row + below), image)
            if not added:
                turn = i32(turn ^ 1)
        return turn

    return step


def _copy_boxes(places: Sequence[tuple[int, int, int]]) -> Any:
    """The device function (map, boxes, barrier, tile): have a box for each block copied to its place, bytes from `boxes` on."""
    offset, along, below = places[0]
    rest = _copy_boxes(places[1:]) if len(places) > 1 else None

    @inline
    def one(map_, boxes, barrier, tile):
        image, row, column, first = tile
        hw.copy_box4(u32(boxes + offset), map_, barrier, first, i32(column + along), i32(row + below), image)

    @inline
    def several(map_, boxes, barrier, tile):
        one(map_, boxes, barrier, tile)
        rest(map_, boxes, barrier, tile)

    return several if len(places) > 1 else one


# --- From registers ------------------------------------------------------------------------------------------------------


class ImageLanes(Results):
    """Lanes store what they have: of a pixel, and of the one in the row below, two neighbours of every 8 channels.

    columns  of the product; places: of each block, its first column and row in the tile
    """

    def __init__(self, columns: int, places: tuple[tuple[int, int], ...], params: Params) -> None:
        store, extra = epilogue.build(params, 2)
        super().__init__(params, 0, extra)
        put_all = _each([_store_block(_store_channels(store, columns // 8), place) for place in places])

        @inline
        def own(thread, first, e):
            _, warp, lane, _ = thread
            return i32((warp & 3) * 2), i32(lane >> 2), i32(first + (lane & 3) * 2)

        @inline
        def finish(acc, own, tile, turn, e):
            below, along, c = own
            image, row, column, bounds = tile
            end = i32(i32(image + 1) * bounds[0] * bounds[1])
            put_all(acc, ((image, i32(row + below), i32(column + along)), bounds, end, c), turn, e)
            cuda.syncwarp()  # a warp multiplies together
            return turn

        self.own, self.finish = own, finish


def _store_channels(store: Any, eights: int, first: int = 0) -> Any:
    """The device function (values, m, step, end, c, e): a lane's two channels of every 8, of two rows."""
    rest = _store_channels(store, eights - 1, first + 8) if eights > 1 else None

    @inline
    def one(values, m, step, end, c, e):
        store(values, m, step, end, i32(c + first), e)

    @inline
    def several(values, m, step, end, c, e):
        store(values[:4], m, step, end, i32(c + first), e)
        rest(values[4:], m, step, end, c, e)

    return several if eights > 1 else one


def _store_block(put: Any, place: tuple[int, int]) -> Any:
    """The step of `ImageLanes` for a block."""
    along, below = place

    @inline
    def step(acc, where, turn, e):
        (image, row, column), (rows, columns), end, c = where
        if i32(column + along) < columns and i32(row + below) < rows:
            m = i32(i32(image * rows + i32(row + below)) * columns + i32(column + along))
            put(acc, m, columns, end, c, e)
        return turn

    return step


# --- Sums of taps --------------------------------------------------------------------------------------------------------


class ImageSums(Results):
    """Columns of the product are taps: what a tap gives for a pixel is part of the result of one some rows and pixels away. Parts
    go to shared memory, a column a row there; a thread adds up the taps of its pixels, and stores them.

    tile    pixels across and down
    window  output channels, and the filter's height and width
    pitch   pixels of a row of the box that was multiplied, as it lies; blocks, of 64 of its pixels
    parts   bytes of a column's parts
    """

    def __init__(
        self, tile: tuple[int, int], window: tuple[int, int, int], pitch: int, blocks: int, parts: int, staging: Staging,
        params: Params,
    ) -> None:  # fmt: skip
        store, extra = epilogue.build(params)
        super().__init__(params, 0, extra)
        (across, down), (channels, height, width) = tile, window
        wide, at_results, each = round_up(channels * height * width, 8), staging.at, staging.each
        stage = hw.stage_turned(wide, parts, 4 * SIDE)
        put_all = _each([_stage_block(stage, 4 * SIDE**2 * n) for n in range(blocks)])
        sums = instruction(sums_of_taps(window, pitch, parts), (f32,) * channels, u32)
        put_pixel, put_pixels = _store_pairs(store, channels), across * down // GROUP
        fill = (f32(0),)  # beside the last one of an odd number of channels
        lines, low = GROUP // across, across.bit_length() - 1

        @inline
        def own(thread, first, e):
            base, warp, lane, tid = thread
            group = i32(warp >> 2)
            first_part = u32(base + at_results + group * each)
            at = u32(first_part + (lane & 3) * (2 * parts) + ((warp & 3) * 16 + (lane >> 2)) * 4)
            return first_part, at, i32(group + 1), i32(tid & (across - 1)), i32((tid & (GROUP - 1)) >> low)

        @inline
        def finish(acc, own, tile, turn, e):
            first_part, at, meeting, along, below = own
            image, row, column, (rows, columns) = tile
            hw.sync_group(meeting)  # nobody reads the parts before any more
            put_all(acc, at, turn, e)
            hw.sync_group(meeting)
            for again in range(put_pixels):
                line = i32(below + again * lines)
                if i32(column + along) < columns and i32(row + line) < rows:
                    values = sums(u32(first_part + (line * pitch + along) * 4))
                    put_pixel(values + fill, i32(i32(image * rows + row + line) * columns + column + along), e)
            cuda.syncwarp()
            return turn

        self.own, self.finish = own, finish


def _stage_block(stage: Any, offset: int) -> Any:
    """The step of `ImageSums` for a block."""

    @inline
    def step(acc, at, turn, e):
        stage(acc, u32(at + offset), i32(0))
        return turn

    return step


def _store_pairs(store: Any, channels: int, first: int = 0) -> Any:
    """The device function (values, m, e): a pixel's channels from `first` on, of which these are the values, two at a time."""
    rest = _store_pairs(store, channels, first + 2) if first + 2 < channels else None

    @inline
    def one(values, m, e):
        store(values[:2], m, i32(first), e)

    @inline
    def several(values, m, e):
        one(values, m, e)
        rest(values[2:], m, e)

    return several if first + 2 < channels else one


def sums_of_taps(window: tuple[int, int, int], pitch: int, parts: int) -> str:
    """PTX that adds up a pixel's taps, for each output channel; the pixel's first tap of the first channel lies at the address
    behind them. As `ImageSums` has it."""
    channels, height, width = window
    taps = height * width
    text = ["{ .reg .f32 part;"]
    for channel in range(channels):
        for tap in range(taps):
            at = (channel * taps + tap) * parts + 4 * (tap // width * pitch + tap % width)
            to = "part" if tap else f"${channel}"
            text.append(f"ld.shared.f32 {to}, [${channels}+{at}];")
            text += [f"add.f32 ${channel}, ${channel}, part;"] if tap else []
    return " ".join([*text, "}"])
