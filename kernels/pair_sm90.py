"""Two products in one launch on Hopper: y = f(x @ wᵀ), which is stored, and z = g(y @ vᵀ), where y's rows are as wide as a block
can hold: the 1×1 convolutions between two residual blocks, say, of which one widens and the next one narrows.

Each warpgroup of a block takes 64 rows at a time. y comes in chunks of 128 bytes: their sums go through the first epilogue into
a box in shared memory, which is what the copy engine stores, and what the second product reads. So y is written once and not
read again. What is added to y comes into the same boxes, some ahead. Weights of both products stay in shared memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from tccompile.arch import KIB, Arch
from tccompile.ir.extent import ceil_div, least
from tccompile.ir.ops import Conv
from tccompile.ir.program import Program
from tccompile.kernels import epilogue
from tccompile.kernels.gemm_sm90_copies import Boxed, Copies, boxed_results, copies
from tccompile.kernels.implicit_gemm import Problem, describe, unfit
from tccompile.kernels.parts.layout import Region, SharedLayout, barriers
from tccompile.kernels.parts.operands import ROW, Operand
from tccompile.kernels.parts.staging import Staging
from tccompile.kernels.ptx.atoms import BITS, group_atom, of_warpgroups
from tccompile.kernels.spec import I32, Config, Function, Launch, Value, Work, code

ROWS = 64
"""Of a warpgroup."""

SPAN = 32
"""Columns that are taken from the sums at once."""

BOX = ROWS * ROW
"""Bytes of a box of y."""


@dataclass(frozen=True)
class Tile:
    """How a block's shared memory is laid out.

    groups  warpgroups; kinds, those of x and w, then of y and v
    depth   bytes of a row of x; row, of a box of it
    chunks  boxes in a row of y; columns, of z
    slots   boxes of a warpgroup; ahead, tiles of x
    parts   of a chunk of y whose sums are there at a time
    added   whether something is added to y by row
    result  bytes of an element of z
    """

    groups: int
    kinds: tuple[str, str, str, str]
    depth: int
    row: int
    chunks: int
    columns: int
    slots: int
    ahead: int
    parts: int
    added: bool
    result: int

    @property
    def per(self) -> int:
        """Elements of y in a box's row."""
        return ROW * 8 // BITS[self.kinds[2]]

    @property
    def deep(self) -> int:
        """Boxes of x in a row."""
        return ceil_div(self.depth, self.row)

    @property
    def x_bytes(self) -> int:
        return ROWS * self.row * self.deep

    @property
    def w_bytes(self) -> int:
        """Of the first weights for a chunk."""
        return self.per * self.row * self.deep

    @property
    def v_bytes(self) -> int:
        """Of the second weights for a chunk."""
        return self.columns * ROW

    @property
    def line(self) -> int:
        """Bytes of a row of a box of z."""
        return min(ROW, self.columns * self.result)

    @property
    def z_boxes(self) -> int:
        return self.columns * self.result // self.line

    @property
    def threads(self) -> int:
        return 128 * self.groups

    @cached_property
    def layout(self) -> SharedLayout:
        return SharedLayout(
            Region("w", self.w_bytes * self.chunks, KIB),
            Region("v", self.v_bytes * self.chunks, KIB),
            Region("x", self.groups * self.ahead * self.x_bytes, KIB),
            Region("y", self.groups * self.slots * BOX, KIB),
            Region("z", self.groups * self.z_boxes * ROWS * self.line, KIB),
            barriers("w full", 1),
            barriers("x full", self.groups * self.ahead),
            barriers("landed", self.groups * self.slots),
        )


def _function(t: Tile, first: tuple[Value, ...], second: tuple[Value, ...]) -> Function:
    """The kernel: first, second: parameters of both epilogues."""
    from tccompile.kernels.parts.ring import Stages
    from tccompile.kernels.ptx import hopper as hw
    from tccompile.kernels.ptx.core import cuda, i32, inline, types, u32

    layout, groups, chunks, slots, ahead, added = t.layout, t.groups, t.chunks, t.slots, t.ahead, t.added
    weights = Stages(layout, "w", 1, 0)
    xs = Stages(layout, "x", groups * ahead, t.x_bytes)
    product_y, product_z = _products(t)
    put_y, extra_y = _putting(t, first, t.per // t.parts, t.parts, ROW, t.added, t.kinds[:2], t.per)
    put_z, extra_z = _putting(t, second, t.columns, 1, t.line, False, t.kinds[2:], t.line // t.result)
    sums_y, sums_z = (group_atom(*k).acc for k in (t.kinds[:2], t.kinds[2:]))
    y_first, y_last, put_first, put_last, two, put_all_z = product_y[0], product_y[-1], put_y[0], put_y[-1], t.parts == 2, put_z[0]
    zero_y, zero_z = hw.accumulators(t.per // t.parts, sums_y), hw.accumulators(t.columns, sums_z)
    w_at, v_at, y_at, z_at, landed_at = (layout[n] for n in ("w", "v", "y", "z", "landed"))
    w_bytes, v_bytes, x_bytes, per, row, deep, columns = t.w_bytes, t.v_bytes, t.x_bytes, t.per, t.row, t.deep, t.columns
    elements, z_boxes, z_box, z_per = row * 8 // BITS[t.kinds[0]], t.z_boxes, ROWS * t.line, t.line // t.result
    z_bytes, whole = z_boxes * z_box, chunks * (w_bytes + v_bytes)
    pending, all_read = hw.boxes_read(1), hw.boxes_read(0)
    maps = 5 + added

    @inline
    def load_weights(base, maps):
        target = weights.target(weights.buffers(base), i32(0))
        weights.expect(target, whole)
        for c in range(chunks):
            for k in range(deep):
                at = u32(base + w_at + c * w_bytes + k * (per * row))
                hw.copy_box(at, maps[1], target[0], i32(k * elements), i32(c * per), i32(0))
            hw.copy_box(u32(base + v_at + c * v_bytes), maps[2], target[0], i32(c * per), i32(0), i32(0))

    @inline
    def ask_x(buffers, map_x, stage, tile):
        target = xs.target(buffers, stage)
        xs.expect(target, x_bytes)
        for k in range(deep):
            hw.copy_box(u32(target[1] + k * (ROWS * row)), map_x, target[0], i32(k * elements), i32(tile * ROWS), i32(0))

    @inline
    def ask_added(base, map_r, slot, tile, c):
        barrier = u32(base + landed_at + slot * 8)
        hw.barrier_expect(barrier, BOX)
        hw.copy_box(u32(base + y_at + slot * BOX), map_r, barrier, i32(c * per), i32(tile * ROWS), i32(0))

    @inline
    def body(maps, numbers, e, f):
        tiles = numbers[0]
        base = u32(hw.base())
        tid = i32(cuda.threadIdx.x)
        warp, lane = hw.uniform(i32(tid >> 5)), i32(tid & 31)
        group, own = i32(warp >> 2), i32(warp & 3)
        leads = own == 0 and lane == 0
        x_buffers = xs.buffers(base)
        if tid == 0:
            weights.init(weights.buffers(base))
            xs.init(x_buffers)
            for s in range(groups * slots):
                hw.barrier_init(u32(base + landed_at + 8 * s), 1)
            hw.fence_barrier_init()
        cuda.syncthreads()
        if tid == 0:
            load_weights(base, maps)
        tile, stride = i32(cuda.blockIdx.x * groups + group), i32(cuda.gridDim.x * groups)
        next_tile, next_chunk, next_slot = tile, i32(0), i32(0)
        hw.wait_for_earlier_grids()
        hw.let_later_grids_start()
        if leads:
            for s in range(ahead):
                if tile + s * stride < tiles:
                    ask_x(x_buffers, maps[0], i32(group * ahead + s), i32(tile + s * stride))
        for _ in range(slots - 1):
            if added and leads and next_tile < tiles:
                ask_added(base, maps[5], i32(group * slots + next_slot), next_tile, next_chunk)
            next_slot = i32(next_slot + 1)
            next_chunk = i32(next_chunk + 1)
            if next_chunk == chunks:
                next_chunk, next_tile = i32(0), i32(next_tile + stride)
        slot, parity, stage, x_parity = i32(0), i32(0), i32(0), i32(0)
        z_box_at = u32(base + z_at + group * z_bytes)
        weights.wait(weights.buffers(base), i32(0), i32(0))
        while tile < tiles:
            x_at = u32(x_buffers.stages + (group * ahead + stage) * x_bytes)
            xs.wait(x_buffers, i32(group * ahead + stage), x_parity)
            sums = zero_z()
            c = i32(0)
            while c < chunks:
                box = u32(base + y_at + (group * slots + slot) * BOX)
                part = y_first(zero_y(), x_at, u32(base + w_at + c * w_bytes))
                hw.wgmma_wait_all()
                if added:
                    hw.barrier_wait(u32(base + landed_at + (group * slots + slot) * 8), parity)
                put_first(part, u32(box + own * (16 * ROW)), lane, i32(c * per), e)
                if two:
                    part = y_last(part, x_at, u32(base + w_at + c * w_bytes))
                    hw.wgmma_wait_all()
                    put_last(part, u32(box + own * (16 * ROW)), lane, i32(c * per), e)
                hw.fence_copies()
                hw.sync_group(i32(group + 1))
                sums = product_z(sums, box, u32(base + v_at + c * v_bytes), c)
                if leads:
                    hw.store_box(maps[3], box, i32(c * per), i32(tile * ROWS), i32(0))
                    pending()
                    if added and next_tile < tiles:
                        ask_added(base, maps[5], i32(group * slots + next_slot), next_tile, next_chunk)
                next_slot = i32(next_slot + 1)
                if next_slot == slots:
                    next_slot = i32(0)
                next_chunk = i32(next_chunk + 1)
                if next_chunk == chunks:
                    next_chunk, next_tile = i32(0), i32(next_tile + stride)
                slot = i32(slot + 1)
                if slot == slots:
                    slot, parity = i32(0), i32(parity ^ 1)
                c = i32(c + 1)
            hw.wgmma_wait_all()
            put_all_z(sums, u32(z_box_at + own * (16 * (z_box // ROWS))), lane, i32(0), f)
            hw.fence_copies()
            hw.sync_group(i32(group + 1))
            if leads:
                for k in range(z_boxes):
                    hw.store_box(maps[4], u32(z_box_at + k * z_box), i32(k * z_per), i32(tile * ROWS), i32(0))
                if tile + ahead * stride < tiles:
                    ask_x(x_buffers, maps[0], i32(group * ahead + stage), i32(tile + ahead * stride))
            stage = i32(stage + 1)
            if stage == ahead:
                stage, x_parity = i32(0), i32(x_parity ^ 1)
            tile = i32(tile + stride)
        if leads:
            all_read()

    from tccompile.kernels.loops import entry

    signature = types.void(*[types.uint64] * maps, types.int32, *extra_y, *extra_z)
    return Function(entry(body, 0, maps, 1, len(extra_y), len(extra_z)), signature, t.threads)


def _products(t: Tile) -> tuple[Any, Any]:
    """The device functions of both products: (sums, address of rows, address of weights) → the sums of a part of a chunk, one for
    each part; and (sums, rows, weights, whether to add)."""
    from tccompile.kernels.ptx import hopper as hw
    from tccompile.kernels.ptx.core import i32, inline, u64

    rows, wide = Operand(ROWS, 0, t.kinds[0], t.row, 1, True), t.per // t.parts
    w = Operand(t.per, 0, t.kinds[1], t.row, 1, True)
    row_half, w_half = hw.descriptor(*rows.layout), hw.descriptor(*w.layout)

    def first(part: int) -> Any:
        begin = part * wide * t.row
        steps = tuple(
            (k * rows.box_bytes + at, begin + k * w.box_bytes + at) for k in range(t.deep) for at in rows.steps
        )
        multiplied = hw.multiply(wide, steps, (True, True), t.kinds[:2])

        @inline
        def product(acc, a, b):
            return multiplied(acc, hw.operand(u64(row_half), a), hw.operand(u64(w_half), b), i32(0))

        return product

    box, v = Operand(ROWS, 0, t.kinds[2], ROW, 1, True), Operand(t.columns, 0, t.kinds[3], ROW, 1, True)
    box_half, v_half = hw.descriptor(*box.layout), hw.descriptor(*v.layout)
    multiplied_z = hw.multiply(t.columns, tuple(zip(box.steps, v.steps, strict=True)), (True, True), t.kinds[2:])

    @inline
    def second(acc, a, b, more):
        return multiplied_z(acc, hw.operand(u64(box_half), a), hw.operand(u64(v_half), b), more)

    return tuple(first(part) for part in range(t.parts)), second


def _putting(
    t: Tile, params: tuple[Value, ...], wide: int, parts: int, line: int, added: bool, kinds: tuple[str, str], box: int
) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """For each part of so many columns, the device function put(acc, at, lane, c, e): the sums of a warp's 16 rows through the
    epilogue into boxes of so many columns; at: of the warp's rows in the first one. And the types of the epilogue's arguments."""
    from tccompile.kernels.parts import results
    from tccompile.kernels.ptx.core import i32, inline, u32

    size = line // box
    staging = Staging(0, 0, 0 if added else None, size, group_atom(*kinds).acc)
    place, put_16, extra = results.rows_of_boxes(staging, box, params)
    take = results.taking(wide, SPAN, staging.sums, params)
    rows_alike = 8 - line.bit_length()

    def put_span(number: int, before: int) -> Any:
        column = before + number * SPAN
        apart, inside = column // box * (ROWS * line), column % box * size

        @inline
        def put(acc, at, c, e):
            values = take(acc, i32(number))
            put_16(values, u32((at ^ inside) + apart), i32(c + column), e)
            put_16(values[8:], u32((at ^ (inside + 16 * size)) + apart), i32(c + column + 16), e)

        return put

    def put_part(part: int) -> Any:
        every = results._all_of([put_span(number, part * wide) for number in range(wide // SPAN)])

        @inline
        def put(acc, at, lane, c, e):
            row, of_row, inside = place(lane)
            key = i32((row >> rows_alike) & (line // 16 - 1))
            every(acc, u32(at + row * line + (of_row ^ key) * 16 + inside), i32(c + (lane & 3) * 2), e)

        return put

    return tuple(put_part(part) for part in range(parts)), extra


class Pair:
    """Two products, of which the second reads the first one's result."""

    name = "pair_sm90"

    def supports(self, first: Conv, second: Conv, program: Program, arch: Arch) -> str | None:
        if not of_warpgroups(arch):
            return f"{arch.name} has no wgmma instructions"
        return None

    def tile(self, first: Conv, second: Conv, program: Program, config: Config) -> tuple[Tile, Any]:
        p, q = describe(first, program), describe(second, program)
        assert isinstance(p, Problem) and isinstance(q, Problem)
        how, of_v = copies(p, program), copies(q, program)
        assert isinstance(how, Copies) and isinstance(of_v, Copies)
        y, z = boxed_results(first, program, p, 2), boxed_results(second, program, q, 2)
        assert y and z
        size = p.x.dtype.size
        t = Tile(
            groups=config["groups"],
            kinds=(*how.kinds, *of_v.kinds),
            depth=p.channels * size,
            row=how.chunk * size,
            chunks=p.stored * p.y.dtype.size // ROW,
            columns=q.stored,
            slots=config["slots"],
            ahead=config["ahead"],
            parts=config["parts"],
            added=y.added is not None,
            result=z.size,
        )
        return t, (p, how, of_v, y, z)

    def work(self, first: Conv, second: Conv, program: Program, config: Config, arch: Arch) -> Work:
        t, (p, how, of_v, y, z) = self.tile(first, second, program, config)
        x_map = replace(how.a, box=(how.chunk, ROWS, 1), swizzle=t.row)
        w_map = replace(how.b, box=(how.chunk, t.per, 1), swizzle=t.row)
        v_map = replace(of_v.b, box=(t.per, t.columns, 1), swizzle=ROW)
        y_map = replace(y.y, box=(t.per, ROWS, 1), swizzle=ROW)
        z_map = replace(z.y, box=(t.line // t.result, ROWS, 1), swizzle=t.line)
        added = (replace(y.added, box=(t.per, ROWS, 1), swizzle=ROW),) if y.added else ()
        tiles = ceil_div(p.rows, ROWS)
        launch = Launch(
            code=code(
                self.name,
                **{n: getattr(t, n) for n in Tile.__dataclass_fields__},
                first=y.epilogue.params,
                second=z.epilogue.params,
            ),
            grid=(least(ceil_div(tiles, t.groups), arch.sms), 1, 1),
            block=t.threads,
            args=(x_map, w_map, v_map, y_map, z_map, *added, I32(tiles), *y.epilogue.args, *z.epilogue.args),
            smem=t.layout.smem,
        )
        return Work((launch,))

    def build(self, arch: Arch, **params: Any) -> Function:
        t = Tile(**{n: params[n] for n in Tile.__dataclass_fields__})
        return _function(t, params["first"], params["second"])


PAIR = Pair()
