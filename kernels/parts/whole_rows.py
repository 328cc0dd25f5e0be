"""Products of which a warpgroup makes 64 rows at a time, with all weights in shared memory: how weights come there, how a chunk
is multiplied, and how results get into the boxes that the copy engine stores."""

from __future__ import annotations

from typing import Any

from tccompile.kernels.gemm_sm90_copies import EIGHTS
from tccompile.kernels.parts import boxes
from tccompile.kernels.parts.operands import ROW, ROWS, Operand
from tccompile.kernels.parts.results import taking
from tccompile.kernels.parts.row_tile import RowTile
from tccompile.kernels.parts.staging import Staging
from tccompile.kernels.ptx import hopper as hw
from tccompile.kernels.ptx.atoms import group_atom
from tccompile.kernels.ptx.core import i32, inline, u32, u64
from tccompile.kernels.spec import Value


def copying_columns(size: int) -> Any:
    """The device function (address, map, barrier, k, column): weights of columns from this one on, whose results have a size.
    Those of bytes come in an order in which a lane's sums of 32 are of 8 neighbours: see `gemm_sm90_copies.columns_in_order`."""

    @inline
    def straight(at, map_, barrier, k, column):
        hw.copy_box(at, map_, barrier, k, column, i32(0))

    @inline
    def by_eight(at, map_, barrier, k, column):
        hw.copy_box5(at, map_, barrier, k, i32(0), i32(0), i32(0), i32(column // EIGHTS))

    return by_eight if size == 1 else straight


def multiplying(columns: int, kinds: tuple[str, str]) -> Any:
    """The device function (sums, address of a chunk of rows, of its weights, whether to add), of rows and weights of these types
    whose chunks have 128 bytes of K."""
    rows, w = (Operand(extent, 0, kind, ROW, 1, True) for extent, kind in zip((ROWS, columns), kinds, strict=True))
    rows_half, w_half = hw.descriptor(*rows.layout), hw.descriptor(*w.layout)
    multiplied = hw.multiply(columns, tuple(zip(rows.steps, w.steps, strict=True)), (True, True), kinds)

    @inline
    def multiply(acc, a, b, more):
        return multiplied(acc, hw.operand(u64(rows_half), a), hw.operand(u64(w_half), b), more)

    return multiply


def storing(t: RowTile, at: int, kinds: tuple[str, str], params: tuple[Value, ...]) -> tuple[Any, tuple[Any, ...]]:
    """The device function (thread, maps, place, tile, column, sums, f) that stores a tile's results by way of a place's boxes, of
    which the first are `at` bytes behind the base; and the types of the epilogue's arguments. kinds: of what is multiplied."""
    per, z_bytes, boxes, line = t.line // t.result, t.z_bytes, t.z_boxes, t.line
    (put,), extra = putting(params, (t.columns, 1), line, per, False, group_atom(*kinds).acc)

    @inline
    def store(thread, maps, place, tile, column, sums, f):
        base, group, own, lane, leads = thread
        first = u32(base + at + place * z_bytes)
        put(sums, u32(first + own * (16 * line)), lane, column, f)
        hw.fence_copies()
        hw.sync_group(i32(group + 1))
        if leads:
            for k in range(boxes):
                hw.store_box(maps[2], u32(first + k * (ROWS * line)), i32(column + k * per), i32(tile * ROWS), i32(0))

    return store, extra


def putting(
    params: tuple[Value, ...], columns: tuple[int, int], line: int, box: int, added: bool, sums: str
) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """For each part of so many columns, the device function put(acc, at, lane, c, e): the sums of a warp's 16 rows through the
    epilogue into boxes of so many columns, whose rows have so many bytes; at: of the warp's rows in the first one. And the types
    of the epilogue's arguments."""
    (wide, parts), size = columns, line // box
    place, put_32, extra = (_rows_of_bytes if size == 1 else _rows_of_halves)(params, line, added)
    take, rows_alike = taking(wide, EIGHTS, sums, params), 8 - line.bit_length()
    lanes = 8 if size == 1 else 2

    def put_span(number: int, before: int) -> Any:
        column = before + number * EIGHTS
        apart, inside = column // box * (ROWS * line), column % box * size

        @inline
        def put(acc, at, c, e):
            put_32(take(acc, i32(number)), u32(at ^ inside), apart, i32(c + column), e)

        return put

    def put_part(part: int) -> Any:
        every = boxes.all_of([put_span(number, part * wide) for number in range(wide // EIGHTS)])

        @inline
        def put(acc, at, lane, c, e):
            row, of_row, inside = place(lane)
            key = i32((row >> rows_alike) & (line // 16 - 1))
            every(acc, u32(at + row * line + (of_row ^ key) * 16 + inside), i32(c + (lane & 3) * lanes), e)

        return put

    return tuple(put_part(part) for part in range(parts)), extra


def _rows_of_halves(params: tuple[Value, ...], line: int, added: bool) -> tuple[Any, Any, tuple[Any, ...]]:
    """How 16 rows of 32 columns go through the epilogue into a box: the device functions place(lane) → row, which 16 bytes of it,
    bytes from their start on; and put(values, at, apart, c, e), some bytes behind `at`. And its arguments' types."""

    place, put_16, extra = boxes.rows_of_boxes(Staging(0, 0, 0 if added else None), line // 2, params)

    @inline
    def put_32(values, at, apart, c, e):
        put_16(values, u32(at + apart), c, e)
        put_16(values[8:], u32((at ^ 32) + apart), i32(c + 16), e)

    return place, put_32, extra


def _rows_of_bytes(params: tuple[Value, ...], line: int, added: bool) -> tuple[Any, Any, tuple[Any, ...]]:
    """The same of bytes, of which a lane has 8 neighbours in two rows: see `copying_columns`."""

    place, put, extra = boxes.rows_by_eight(line, added, params)

    @inline
    def put_32(values, at, apart, c, e):
        put(values, u32(at + apart), c, e)

    return place, put_32, extra
