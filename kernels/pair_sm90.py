"""Two products in one launch on Hopper: y = f(x @ wᵀ), which is stored, and z = g(y @ vᵀ), where y's rows are as wide as a block
can hold: the 1×1 convolutions between two residual blocks, say, of which one widens and the next one narrows.

Each warpgroup of a block takes 64 rows at a time. y comes in chunks of 128 bytes: their sums go through the first epilogue into
a box in shared memory, which is what the copy engine stores, and what the second product reads. So y is written once and not
read again. What is added to y comes into the same boxes, some ahead. Weights of both products stay in shared memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from functools import cached_property
from itertools import product
from typing import Any

from tccompile.arch import KIB, Arch
from tccompile.ir.extent import Extent, ceil_div, least
from tccompile.ir.ops import Conv, Op
from tccompile.ir.program import Program
from tccompile.ir.types import DType
from tccompile.kernels.gemm_sm90_copies import Boxed, Copies, boxed_results, copies
from tccompile.kernels.implicit_gemm import Problem, describe, unfit
from tccompile.kernels.parts.layout import Region, SharedLayout, barriers
from tccompile.kernels.parts.operands import ROW, Operand
from tccompile.kernels.parts.part import Part, part
from tccompile.kernels.parts.staging import Staging
from tccompile.kernels.ptx.atoms import BITS, group_atom, of_warpgroups
from tccompile.kernels.spec import I32, Config, Function, Joint, Launch, TiledMap, Value, Work, code, memory_us, traffic_us

TYPES = (DType.F16, DType.BF16, DType.I8, DType.U8)
"""Of operands."""

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
    deep    boxes of x in a row; row, bytes of a box's row
    chunks  boxes in a row of y; columns, of z
    slots   boxes of a warpgroup; ahead, tiles of x
    parts   of a chunk of y whose sums are there at a time
    added   whether something is added to y by row
    result  bytes of an element of z
    """

    groups: int
    kinds: tuple[str, str, str, str]
    deep: int
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

    @property
    def registers(self) -> int:
        """What a thread needs at least: sums, and what else there is."""
        return (self.per // self.parts + self.columns) // 2 + 32

    @property
    def params(self) -> dict[str, Value]:
        """As parameters of the code."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

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
            barriers("y full", self.groups * self.slots if self.added else 0),
        )


def _function(t: Tile, first: tuple[Value, ...], second: tuple[Value, ...]) -> Function:
    """The kernel; first, second: parameters of both epilogues."""
    from tccompile.kernels.loops import entry
    from tccompile.kernels.ptx import hopper as hw
    from tccompile.kernels.ptx.core import cuda, i32, inline, types, u32

    copies_of, groups, ahead = _copying(t), t.groups, t.ahead
    through_y, extra_y = _through_y(t, copies_of, first)
    through_z, extra_z = _through_z(t, second)
    all_read, maps = hw.boxes_read(0), 5 + t.added

    @inline
    def body(maps, numbers, e, f):
        tiles = numbers[0]
        base = u32(hw.base())
        tid = i32(cuda.threadIdx.x)
        warp, lane = hw.uniform(i32(tid >> 5)), i32(tid & 31)
        group, own = i32(warp >> 2), i32(warp & 3)
        leads = own == 0 and lane == 0
        thread = base, group, own, lane, leads
        if tid == 0:
            copies_of.init(base)
        cuda.syncthreads()
        if tid == 0:
            copies_of.load_weights(base, maps)
        tile, stride = i32(cuda.blockIdx.x * groups + group), i32(cuda.gridDim.x * groups)
        hw.wait_for_earlier_grids()
        hw.let_later_grids_start()
        if leads:
            for s in range(ahead):
                if tile + s * stride < tiles:
                    copies_of.ask_x(base, maps, i32(group * ahead + s), i32(tile + s * stride))
        next_tile, next_chunk, next_slot = copies_of.ask_first(thread, maps, tile, stride, tiles)
        slot, parity, stage, x_parity = i32(0), i32(0), i32(0), i32(0)
        copies_of.wait_weights(base)
        while tile < tiles:
            copies_of.wait_x(base, i32(group * ahead + stage), x_parity)
            following = next_tile, next_chunk, next_slot, stride, tiles
            sums, slot, parity, following = through_y(thread, maps, tile, stage, slot, parity, following, e)
            next_tile, next_chunk, next_slot = following[0], following[1], following[2]
            through_z(thread, maps, tile, sums, f)
            if leads and tile + ahead * stride < tiles:
                copies_of.ask_x(base, maps, i32(group * ahead + stage), i32(tile + ahead * stride))
            stage = i32(stage + 1)
            if stage == ahead:
                stage, x_parity = i32(0), i32(x_parity ^ 1)
            tile = i32(tile + stride)
        if leads:
            all_read()

    signature = types.void(*[types.uint64] * maps, types.int32, *extra_y, *extra_z)
    return Function(entry(body, 0, maps, 1, len(extra_y), len(extra_z)), signature, t.threads)


def _copying(t: Tile) -> Part:
    """What asks for copies, and waits for them.

    init(base)                         barriers, by one thread
    load_weights(base, maps)           of both products, by one thread
    ask_x(base, maps, stage, tile)     64 rows of x
    ask_added(base, maps, slot, tile, chunk)   what is added to a box of y
    ask_first(thread, maps, tile, stride, tiles)   the same of the first boxes; what comes next: (tile, chunk, slot)
    after(next_tile, next_chunk, next_slot, stride)   what comes after that
    """
    from tccompile.kernels.parts.ring import Stages
    from tccompile.kernels.ptx import hopper as hw
    from tccompile.kernels.ptx.core import i32, inline, u32

    layout, groups, slots, ahead, added, chunks, deep = t.layout, t.groups, t.slots, t.ahead, t.added, t.chunks, t.deep
    weights, rows = Stages(layout, "w", 1, 0), Stages(layout, "x", groups * ahead, t.x_bytes)
    boxes = Stages(layout, "y", groups * slots if added else 0, BOX)
    v_at, w_bytes, v_bytes, x_bytes, per, row = layout["v"], t.w_bytes, t.v_bytes, t.x_bytes, t.per, t.row
    elements, whole = row * 8 // BITS[t.kinds[0]], chunks * (w_bytes + v_bytes)

    @inline
    def init(base):
        weights.init(weights.buffers(base))
        rows.init(rows.buffers(base))
        boxes.init(boxes.buffers(base))
        hw.fence_barrier_init()

    @inline
    def load_weights(base, maps):
        target = weights.target(weights.buffers(base), i32(0))
        weights.expect(target, whole)
        for c in range(chunks):
            for k in range(deep):
                at = u32(target[1] + c * w_bytes + k * (per * row))
                hw.copy_box(at, maps[1], target[0], i32(k * elements), i32(c * per), i32(0))
            hw.copy_box(u32(base + v_at + c * v_bytes), maps[2], target[0], i32(c * per), i32(0), i32(0))

    @inline
    def ask_x(base, maps, stage, tile):
        target = rows.target(rows.buffers(base), stage)
        rows.expect(target, x_bytes)
        for k in range(deep):
            hw.copy_box(u32(target[1] + k * (ROWS * row)), maps[0], target[0], i32(k * elements), i32(tile * ROWS), i32(0))

    @inline
    def ask_added(base, maps, slot, tile, chunk):
        target = boxes.target(boxes.buffers(base), slot)
        boxes.expect(target, BOX)
        hw.copy_box(target[1], maps[5], target[0], i32(chunk * per), i32(tile * ROWS), i32(0))

    @inline
    def after(tile, chunk, slot, stride):
        slot, chunk = i32(slot + 1), i32(chunk + 1)
        if slot == slots:
            slot = i32(0)
        if chunk == chunks:
            chunk, tile = i32(0), i32(tile + stride)
        return tile, chunk, slot

    @inline
    def ask_first(thread, maps, tile, stride, tiles):
        base, group, _, _, leads = thread
        chunk, slot = i32(0), i32(0)
        for _ in range(slots - 1):
            if added and leads and tile < tiles:
                ask_added(base, maps, i32(group * slots + slot), tile, chunk)
            tile, chunk, slot = after(tile, chunk, slot, stride)
        return tile, chunk, slot

    @inline
    def wait_weights(base):
        weights.wait(weights.buffers(base), i32(0), i32(0))

    @inline
    def wait_x(base, stage, parity):
        rows.wait(rows.buffers(base), stage, parity)

    @inline
    def wait_added(base, slot, parity):
        boxes.wait(boxes.buffers(base), slot, parity)

    asking = {"load_weights": load_weights, "ask_x": ask_x, "ask_added": ask_added, "ask_first": ask_first, "after": after}
    return part(init=init, wait_weights=wait_weights, wait_x=wait_x, wait_added=wait_added, **asking)


def _through_y(t: Tile, copying: Part, params: tuple[Value, ...]) -> tuple[Any, tuple[Any, ...]]:
    """The device function that makes a tile of y, and multiplies it by the second weights, and the types of the epilogue's
    arguments: (thread, maps, tile, stage, slot, parity, following, e) → sums, slot, parity, following.

    stage, slot  of x, and the next one of y's boxes, whose barrier's phase has this parity
    following    the box of what is added that is asked for next: its tile, chunk and slot; from tile to tile; how many there are
    """
    from tccompile.kernels.ptx import hopper as hw
    from tccompile.kernels.ptx.core import i32, inline, u32

    (first, last), second = _products(t)
    wide, added, two, chunks, per = t.per // t.parts, t.added, t.parts == 2, t.chunks, t.per
    puts, extra = _putting(params, (wide, t.parts), ROW, per, added, group_atom(*t.kinds[:2]).acc)
    put_first, put_last = puts[0], puts[-1]
    no_y, no_z = (hw.accumulators(n, group_atom(*k).acc) for n, k in ((wide, t.kinds[:2]), (t.columns, t.kinds[2:])))
    x_at, w_at, v_at, y_at = (t.layout[name] for name in ("x", "w", "v", "y"))
    x_bytes, w_bytes, v_bytes, slots, ahead = t.x_bytes, t.w_bytes, t.v_bytes, t.slots, t.ahead
    but_last_read = hw.boxes_read(1)

    @inline
    def through(thread, maps, tile, stage, slot, parity, following, e):
        base, group, own, lane, leads = thread
        next_tile, next_chunk, next_slot, stride, tiles = following
        x = u32(base + x_at + (group * ahead + stage) * x_bytes)
        sums, c = no_z(), i32(0)
        while c < chunks:
            box = u32(base + y_at + (group * slots + slot) * BOX)
            rows, w = u32(box + own * (16 * ROW)), u32(base + w_at + c * w_bytes)
            acc = first(no_y(), x, w)
            hw.wgmma_wait_all()  # and for the products of the chunk before
            if added:
                copying.wait_added(base, i32(group * slots + slot), parity)
            put_first(acc, rows, lane, i32(c * per), e)
            if two:
                acc = last(acc, x, w)
                hw.wgmma_wait_all()
                put_last(acc, rows, lane, i32(c * per), e)
            hw.fence_copies()
            hw.sync_group(i32(group + 1))
            sums = second(sums, box, u32(base + v_at + c * v_bytes), c)
            if leads:
                hw.store_box(maps[3], box, i32(c * per), i32(tile * ROWS), i32(0))
                but_last_read()  # so the box before this one is free: all have waited for its products
                if added and next_tile < tiles:
                    copying.ask_added(base, maps, i32(group * slots + next_slot), next_tile, next_chunk)
            next_tile, next_chunk, next_slot = copying.after(next_tile, next_chunk, next_slot, stride)
            slot = i32(slot + 1)
            if slot == slots:
                slot, parity = i32(0), i32(parity ^ 1)
            c = i32(c + 1)
        hw.wgmma_wait_all()
        return sums, slot, parity, (next_tile, next_chunk, next_slot, stride, tiles)

    return through, extra


def _through_z(t: Tile, params: tuple[Value, ...]) -> tuple[Any, tuple[Any, ...]]:
    """The device function (thread, maps, tile, sums, f) that stores a tile of z, and the types of the epilogue's arguments."""
    from tccompile.kernels.ptx import hopper as hw
    from tccompile.kernels.ptx.core import i32, inline, u32

    per, z_at, boxes, line = t.line // t.result, t.layout["z"], t.z_boxes, t.line
    (put,), extra = _putting(params, (t.columns, 1), line, per, False, group_atom(*t.kinds[2:]).acc)

    @inline
    def through(thread, maps, tile, sums, f):
        base, group, own, lane, leads = thread
        first = u32(base + z_at + group * (boxes * ROWS * line))
        put(sums, u32(first + own * (16 * line)), lane, i32(0), f)
        hw.fence_copies()
        hw.sync_group(i32(group + 1))
        if leads:
            for k in range(boxes):
                hw.store_box(maps[4], u32(first + k * (ROWS * line)), i32(k * per), i32(tile * ROWS), i32(0))

    return through, extra


def _products(t: Tile) -> tuple[tuple[Any, Any], Any]:
    """The device functions of both products: (sums, address of rows, address of weights) → the sums of the first part of a chunk,
    and of the last one; and (sums, rows, weights, whether to add)."""
    from tccompile.kernels.ptx import hopper as hw
    from tccompile.kernels.ptx.core import i32, inline, u64

    rows, wide = Operand(ROWS, 0, t.kinds[0], t.row, 1, True), t.per // t.parts
    w = Operand(t.per, 0, t.kinds[1], t.row, 1, True)
    row_half, w_half = hw.descriptor(*rows.layout), hw.descriptor(*w.layout)

    def first(part: int) -> Any:
        begin = part * wide * t.row
        steps = tuple((k * rows.box_bytes + at, begin + k * w.box_bytes + at) for k in range(t.deep) for at in rows.steps)
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

    return (first(0), first(t.parts - 1)), second


def _putting(
    params: tuple[Value, ...], columns: tuple[int, int], line: int, box: int, added: bool, sums: str
) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """For each part of so many columns, the device function put(acc, at, lane, c, e): the sums of a warp's 16 rows through the
    epilogue into boxes of so many columns, whose rows have so many bytes; at: of the warp's rows in the first one. And the types
    of the epilogue's arguments."""
    from tccompile.kernels.parts import results
    from tccompile.kernels.ptx.core import i32, inline, u32

    (wide, parts), size = columns, line // box
    staging = Staging(0, 0, 0 if added else None, size, sums)
    place, put_16, extra = results.rows_of_boxes(staging, box, params)
    take, rows_alike = results.taking(wide, SPAN, sums, params), 8 - line.bit_length()

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
        every = results.all_of([put_span(number, part * wide) for number in range(wide // SPAN)])

        @inline
        def put(acc, at, lane, c, e):
            row, of_row, inside = place(lane)
            key = i32((row >> rows_alike) & (line // 16 - 1))
            every(acc, u32(at + row * line + (of_row ^ key) * 16 + inside), i32(c + (lane & 3) * 2), e)

        return put

    return tuple(put_part(part) for part in range(parts)), extra


class PairSm90(Joint):
    """Two products, of which the second one reads the first one's result."""

    name = "pair_sm90"
    tensor_cores = True

    def supports(self, first: Op, second: Op, program: Program, arch: Arch) -> str | None:
        if not of_warpgroups(arch):
            return f"{arch.name} has no wgmma instructions"
        found = described(first, second, program)
        if isinstance(found, str):
            return found
        least = next(iter(self.configs(first, second, program, arch)), None)
        return None if least else f"the weights of {first.y} and {second.y} do not fit into shared memory"

    def configs(self, first: Op, second: Op, program: Program, arch: Arch) -> Iterator[Config]:
        found = described(first, second, program)
        assert isinstance(found, Products)
        for groups, slots, ahead in product((4, 3, 2), (4, 3), (2, 1)):
            for parts in (1, 2):
                t = found.tile({"groups": groups, "slots": slots, "ahead": ahead, "parts": parts})
                if t.per // parts % SPAN == 0 and t.layout.smem <= arch.smem_block and t.registers * t.threads <= 65536:
                    yield {"groups": groups, "slots": slots, "ahead": ahead, "parts": parts}

    def cost(self, first: Op, second: Op, program: Program, config: Config, arch: Arch) -> float:
        found = described(first, second, program)
        assert isinstance(found, Products)
        t = found.tile(config)
        z = memory_us([program.tensors[second.y]], arch)
        return 3.0 + traffic_us(first, program, arch) + z - 0.1 * t.groups - 0.01 * t.slots - 0.01 * t.ahead + 0.001 * t.parts

    def work(self, first: Op, second: Op, program: Program, config: Config, arch: Arch) -> Work:
        found = described(first, second, program)
        assert isinstance(found, Products)
        t = found.tile(config)
        launch = Launch(
            code=code(self.name, **t.params, first=found.y.epilogue.params, second=found.z.epilogue.params),
            grid=(least(ceil_div(found.tiles, t.groups), arch.sms), 1, 1),
            block=t.threads,
            args=(*found.maps(t), I32(found.tiles), *found.y.epilogue.args, *found.z.epilogue.args),
            smem=t.layout.smem,
        )
        return Work((launch,))

    def build(self, arch: Arch, **params: Any) -> Function:
        t = Tile(**{field.name: params[field.name] for field in fields(Tile)})
        return _function(t, params["first"], params["second"])


@dataclass(frozen=True)
class Products:
    """Both products of a launch: how their operands are read, and how results are written."""

    first: Problem
    second: Problem
    of_w: Copies
    of_v: Copies
    y: Boxed
    z: Boxed

    @property
    def tiles(self) -> Extent:
        """Of a warpgroup's rows."""
        return ceil_div(self.first.rows, ROWS)

    def tile(self, config: Config) -> Tile:
        size = self.first.x.dtype.size
        return Tile(
            groups=config["groups"],
            kinds=(*self.of_w.kinds, *self.of_v.kinds),
            deep=ceil_div(self.first.channels, self.of_w.chunk),
            row=self.of_w.chunk * size,
            chunks=self.first.stored * self.y.size // ROW,
            columns=self.second.stored,
            slots=config["slots"],
            ahead=config["ahead"],
            parts=config["parts"],
            added=self.y.added is not None,
            result=self.z.size,
        )

    def maps(self, t: Tile) -> tuple[TiledMap, ...]:
        """Of x, w, v, y, z, and of what is added to y."""
        assert isinstance(self.of_w.a, TiledMap)
        x = replace(self.of_w.a, box=(self.of_w.chunk, ROWS, 1), swizzle=t.row)
        w = replace(self.of_w.b, box=(self.of_w.chunk, t.per, 1), swizzle=t.row)
        v = replace(self.of_v.b, box=(t.per, t.columns, 1), swizzle=ROW)
        z = replace(self.z.y, box=(t.line // t.result, ROWS, 1), swizzle=t.line)
        boxes = [replace(m, box=(t.per, ROWS, 1), swizzle=ROW) for m in (self.y.y, self.y.added) if m]
        return x, w, v, boxes[0], z, *boxes[1:]


def described(first: Op, second: Op, program: Program) -> Products | str:
    """Both products, or why they cannot be computed by one launch."""
    if not isinstance(first, Conv) or not isinstance(second, Conv) or second.x != first.y:
        return "one of them is no convolution of the other's result"
    of_first, of_second = _described(first, program), _described(second, program)
    if isinstance(of_first, str):
        return of_first
    if isinstance(of_second, str):
        return of_second
    (p, of_w, y), (q, of_v, z) = of_first, of_second
    others = [name for name in second.inputs if name != first.y and program.tensors[name].storage not in program.constants]
    if others:
        return f"the second one also reads {others[0]}, which is no constant"
    if p.stored != p.columns or q.stored != q.columns or p.stored * y.size % ROW or p.stored * y.size < 2 * ROW:
        return f"{first.y} has {p.columns} channels; they have to be {2 * ROW} bytes or more, in multiples of {ROW}"
    if not group_atom(*of_v.kinds).takes(q.stored) or (q.stored * z.size not in (32, 64) and q.stored * z.size % ROW):
        return f"{second.y} has {q.columns} channels; they have to be 32, 64 or a multiple of {ROW} bytes, and 256 at most"
    return Products(p, q, of_w, of_v, y, z)


def _described(op: Conv, program: Program) -> tuple[Problem, Copies, Boxed] | str:
    problem = describe(op, program)
    if isinstance(problem, str):
        return problem
    if reason := unfit(problem, TYPES):
        return reason
    how = copies(problem, program)
    if isinstance(how, str):
        return how
    boxed = boxed_results(op, program, problem, 2)
    if boxed is None:
        return f"{op.y} cannot be written in boxes"
    if how.im2col or problem.batches != 1 or how.k_major != (True, True):
        return f"{op.x} is not read pixel by pixel"
    if group_atom(*how.kinds).rough or problem.w.storage not in program.constants:
        return f"{op.w} is no constant of halves or integers"
    return problem, how, boxed
