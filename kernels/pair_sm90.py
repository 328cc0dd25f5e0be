"""Two products in one launch on Hopper: y = f(x @ wᵀ), which is stored, and z = g(y @ vᵀ), where y's rows are as wide as a block
can hold: the 1×1 convolutions between two residual blocks, say, of which one widens and the next one narrows.

Each warpgroup of a block takes 64 rows at a time. y comes in chunks of 128 bytes: their sums go through the first epilogue into
a box in shared memory, which is what the copy engine stores, and what the second product reads. So y is written once and not
read again. What is added to y comes into the same boxes, some ahead. Weights of both products stay in shared memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from typing import Any, NamedTuple

from tccompile.arch import KIB, Arch
from tccompile.ir.extent import Extent, ceil_div, hint, least
from tccompile.ir.ops import Conv, Op
from tccompile.ir.program import Program
from tccompile.ir.types import DType
from tccompile.kernels.gemm_sm90_copies import EIGHTS, Boxed, Copies, boxed_results, columns_in_order, copies
from tccompile.kernels.implicit_gemm import Problem, describe, unfit
from tccompile.kernels.parts.layout import Region, SharedLayout, barriers
from tccompile.kernels.parts.operands import ROW, ROWS, Operand
from tccompile.kernels.parts.part import Part, part
from tccompile.kernels.parts.row_tile import RowTile
from tccompile.kernels.ptx.atoms import BITS, group_atom, of_warpgroups
from tccompile.kernels.rates import measured
from tccompile.kernels.remembered import remembered
from tccompile.kernels.spec import I32, Config, Function, Joint, Launch, TiledMap, Value, Work, code, memory_us, traffic_us

TYPES = (DType.F16, DType.BF16, DType.I8, DType.U8)
"""Of operands."""

BOX = ROWS * ROW
"""Bytes of a box of y."""


class Factor(NamedTuple):
    """How a product's operands lie: types of rows and of weights, boxes in a row, bytes of a box's row."""

    kinds: tuple[str, str]
    deep: int
    row: int

    @property
    def rows_bytes(self) -> int:
        """Of a warpgroup's rows."""
        return ROWS * self.row * self.deep

    def weights_bytes(self, columns: int) -> int:
        return columns * self.row * self.deep

    @property
    def elements(self) -> int:
        """Of a box's row."""
        return self.row * 8 // BITS[self.kinds[0]]


@dataclass(frozen=True)
class Tile(RowTile):
    """How a block's shared memory is laid out; its results are z.

    first   of x and w, as `Factor`
    made    of the product that is added to y, as `Factor`; or () if there is none
    second  types of y and v
    chunks  boxes in a row of y
    added   whether something is added to y that comes from memory
    slots   boxes of a warpgroup; ahead, its tiles of x; parts, of a chunk of y whose sums are there at a time
    """

    first: tuple[Value, ...]
    made: tuple[Value, ...]
    second: tuple[str, str]
    chunks: int
    added: bool
    slots: int
    ahead: int
    parts: int

    @property
    def factors(self) -> list[Factor]:
        """Of y, the one that is added first."""
        return [Factor(*given) for given in (self.made, self.first) if given]

    @property
    def per(self) -> int:
        """Elements of y in a box's row."""
        return ROW * 8 // BITS[self.second[0]]

    @property
    def v_bytes(self) -> int:
        """Of the second weights for a chunk."""
        return self.columns * ROW

    @property
    def registers(self) -> int:
        """What a thread needs: sums of z, those of y while they become fewer, and what else there is."""
        return self.columns // 2 + 3 * (self.per // self.parts) // 8 + (56 if self.made else 44)

    @cached_property
    def layout(self) -> SharedLayout:
        weights = sum(f.weights_bytes(self.per) for f in self.factors) + self.v_bytes
        return SharedLayout(
            Region("w", weights * self.chunks, KIB),
            Region("x", self.groups * self.ahead * sum(f.rows_bytes for f in self.factors), KIB),
            Region("y", self.groups * self.slots * BOX, KIB),
            Region("z", self.groups * self.z_bytes, KIB),
            barriers("w full", 1),
            barriers("x full", self.groups * self.ahead),
            barriers("y full", self.groups * self.slots if self.added else 0),
        )


def _function(t: Tile, epilogues: tuple[tuple[Value, ...], ...]) -> Function:
    """The kernel; epilogues: their parameters, in the order of the ops."""
    from tccompile.kernels.loops import entry
    from tccompile.kernels.parts.whole_rows import storing
    from tccompile.kernels.ptx import hopper as hw
    from tccompile.kernels.ptx.core import cuda, i32, inline, types, u32

    copies_of, groups, ahead = _copying(t), t.groups, t.ahead
    added = copies_of.added
    through_y, extra_y = _through_y(t, copies_of, epilogues[:-1])
    store_z, extra_z = storing(t, t.layout["z"], t.second, epilogues[-1])
    all_read, maps = hw.boxes_read(0), 3 + 2 * len(t.factors) + t.added
    extra = (*extra_y, extra_z)

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
        next_tile, next_chunk, next_slot = added.ask_first(thread, maps, tile, stride, tiles)
        slot, parity, stage, x_parity = i32(0), i32(0), i32(0), i32(0)
        copies_of.wait_weights(base)
        while tile < tiles:
            copies_of.wait_x(base, i32(group * ahead + stage), x_parity)
            following = next_tile, next_chunk, next_slot, stride, tiles
            sums, slot, parity, following = through_y(thread, maps, tile, stage, slot, parity, following, e)
            next_tile, next_chunk, next_slot = following[0], following[1], following[2]
            store_z(thread, maps, group, tile, i32(0), sums, f)
            if leads and tile + ahead * stride < tiles:
                copies_of.ask_x(base, maps, i32(group * ahead + stage), i32(tile + ahead * stride))
            stage = i32(stage + 1)
            if stage == ahead:
                stage, x_parity = i32(0), i32(x_parity ^ 1)
            tile = i32(tile + stride)
        if leads:
            all_read()

    before = _one_of_two(body) if t.made else body
    signature = types.void(*[types.uint64] * maps, types.int32, *(kind for kinds in extra for kind in kinds))
    return Function(entry(before, 0, maps, 1, *map(len, extra)), signature, t.threads)


def _one_of_two(body: Any) -> Any:
    """The device function of a body that takes the arguments of both of y's epilogues as one."""
    from tccompile.kernels.ptx.core import inline

    @inline
    def whole(maps, numbers, made, e, f):
        body(maps, numbers, (made, e), f)

    return whole


def _copying(t: Tile) -> Part:
    """What asks for copies, and waits for them. `maps`: of v, y, z, then of each factor's rows and weights, and of what is added.

    init(base)                         barriers, by one thread
    load_weights(base, maps)           of all products, by one thread
    ask_x(base, maps, stage, tile)     64 rows of x, of each factor
    wait_weights(base), wait_x(base, stage, parity)
    added                              of what is added, as `_copying_added` has it
    """
    from tccompile.kernels.parts.ring import Stages
    from tccompile.kernels.parts.whole_rows import copying_columns
    from tccompile.kernels.ptx import hopper as hw
    from tccompile.kernels.ptx.core import i32, inline, u32

    layout, chunks, per, v_bytes = t.layout, t.chunks, t.per, t.v_bytes
    x_bytes, whole = sum(f.rows_bytes for f in t.factors), layout["x"] - layout["w"]
    weights, rows = Stages(layout, "w", 1, 0), Stages(layout, "x", t.groups * t.ahead, x_bytes)
    copy_weights, copy_rows = _copying_factors(t)
    copy_v, added = copying_columns(t.result), _copying_added(t)

    @inline
    def init(base):
        weights.init(weights.buffers(base))
        rows.init(rows.buffers(base))
        added.init(base)
        hw.fence_barrier_init()

    @inline
    def load_weights(base, maps):
        target = weights.target(weights.buffers(base), i32(0))
        weights.expect(target, whole)
        for c in range(chunks):
            copy_v(u32(target[1] + c * v_bytes), maps[0], target[0], i32(c * per), i32(0))
            copy_weights(maps, target, i32(c))

    @inline
    def ask_x(base, maps, stage, tile):
        target = rows.target(rows.buffers(base), stage)
        rows.expect(target, x_bytes)
        copy_rows(maps, target, i32(tile * ROWS))

    @inline
    def wait_weights(base):
        weights.wait(weights.buffers(base), i32(0), i32(0))

    @inline
    def wait_x(base, stage, parity):
        rows.wait(rows.buffers(base), stage, parity)

    return part(init=init, load_weights=load_weights, ask_x=ask_x, wait_weights=wait_weights, wait_x=wait_x, added=added)


def _copying_added(t: Tile) -> Part:
    """The same of what is added to y, which comes into y's boxes.

    init(base)                                  barriers, by one thread
    ask(base, maps, slot, tile, chunk)          what is added to a box
    ask_first(thread, maps, tile, stride, tiles)   the same of the first boxes; what comes next: (tile, chunk, slot)
    after(tile, chunk, slot, stride)            what comes after that
    wait(base, slot, parity)
    """
    from tccompile.kernels.parts.ring import Stages
    from tccompile.kernels.ptx import hopper as hw
    from tccompile.kernels.ptx.core import i32, inline

    groups, slots, added, chunks, per, of_added = t.groups, t.slots, t.added, t.chunks, t.per, 3 + 2 * len(t.factors)
    boxes = Stages(t.layout, "y", groups * slots if added else 0, BOX)

    @inline
    def init(base):
        boxes.init(boxes.buffers(base))

    @inline
    def ask(base, maps, slot, tile, chunk):
        target = boxes.target(boxes.buffers(base), slot)
        boxes.expect(target, BOX)
        hw.copy_box(target[1], maps[of_added], target[0], i32(chunk * per), i32(tile * ROWS), i32(0))

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
                ask(base, maps, i32(group * slots + slot), tile, chunk)
            tile, chunk, slot = after(tile, chunk, slot, stride)
        return tile, chunk, slot

    @inline
    def wait(base, slot, parity):
        boxes.wait(boxes.buffers(base), slot, parity)

    return part(init=init, ask=ask, after=after, ask_first=ask_first, wait=wait)


def _copying_factors(t: Tile) -> tuple[Any, Any]:
    """The device functions (maps, target, chunk), which has weights of all factors copied behind all of v, and (maps, target,
    row), which has rows of theirs copied; target: barrier, and where the first one's begin."""
    from tccompile.kernels.parts.whole_rows import copying_columns
    from tccompile.kernels.ptx import hopper as hw
    from tccompile.kernels.ptx.core import i32, inline, u32

    per, chunks, copy = t.per, t.chunks, copying_columns(BITS[t.second[0]] // 8)

    def copying(number: int, factor: Factor, x_at: int, w_at: int) -> tuple[Any, Any]:
        deep, row, elements, each, x, w = (
            factor.deep,
            factor.row,
            factor.elements,
            factor.weights_bytes(per),
            3 + 2 * number,
            4 + 2 * number,
        )

        @inline
        def weights(maps, target, c):
            for k in range(deep):
                at = u32(target[1] + w_at + c * each + k * (per * row))
                copy(at, maps[w], target[0], i32(k * elements), i32(c * per))

        @inline
        def rows(maps, target, first):
            for k in range(deep):
                hw.copy_box(u32(target[1] + x_at + k * (ROWS * row)), maps[x], target[0], i32(k * elements), first, i32(0))

        return weights, rows

    x_at, w_at, every = 0, chunks * t.v_bytes, []
    for number, factor in enumerate(t.factors):
        every.append(copying(number, factor, x_at, w_at))
        x_at, w_at = x_at + factor.rows_bytes, w_at + chunks * factor.weights_bytes(per)
    (weights_a, rows_a), (weights_b, rows_b) = every[0], every[-1]
    if len(every) == 1:
        return weights_a, rows_a

    @inline
    def both_weights(maps, target, c):
        weights_a(maps, target, c)
        weights_b(maps, target, c)

    @inline
    def both_rows(maps, target, first):
        rows_a(maps, target, first)
        rows_b(maps, target, first)

    return both_weights, both_rows


def _through_y(t: Tile, copying: Part, epilogues: tuple[tuple[Value, ...], ...]) -> tuple[Any, tuple[tuple[Any, ...], ...]]:
    """The device function that makes a tile of y, and multiplies it by the second weights, and the types of the epilogues'
    arguments: (thread, maps, tile, stage, slot, parity, following, e) → sums, slot, parity, following.

    stage, slot  of x, and the next one of y's boxes, whose barrier's phase has this parity
    following    the box of what is added that is asked for next: its tile, chunk and slot; from tile to tile; how many there are
    """
    from tccompile.kernels.parts.whole_rows import multiplying
    from tccompile.kernels.ptx import hopper as hw
    from tccompile.kernels.ptx.core import i32, inline, u32

    added, chunks, per, of_added = t.added, t.chunks, t.per, copying.added
    fill, extra = _filling(t, copying, epilogues)
    second, no_z = multiplying(t.columns, t.second), hw.accumulators(t.columns, group_atom(*t.second).acc)
    x_at, w_at, y_at = (t.layout[name] for name in ("x", "w", "y"))
    x_bytes, v_bytes, slots, ahead = sum(f.rows_bytes for f in t.factors), t.v_bytes, t.slots, t.ahead
    but_last_read = hw.boxes_read(1)

    @inline
    def through(thread, maps, tile, stage, slot, parity, following, e):
        base, group, _, _, leads = thread
        next_tile, next_chunk, next_slot, stride, tiles = following
        x = u32(base + x_at + (group * ahead + stage) * x_bytes)
        sums, c = no_z(), i32(0)
        while c < chunks:
            box = u32(base + y_at + (group * slots + slot) * BOX)
            fill(thread, box, x, c, i32(group * slots + slot), parity, e)
            hw.fence_copies()
            hw.sync_group(i32(group + 1))
            sums = second(sums, box, u32(base + w_at + c * v_bytes), c)
            if leads:
                hw.store_box(maps[1], box, i32(c * per), i32(tile * ROWS), i32(0))
                but_last_read()  # so the box before this one is free: all have waited for its products
                if added and next_tile < tiles:
                    of_added.ask(base, maps, i32(group * slots + next_slot), next_tile, next_chunk)
            next_tile, next_chunk, next_slot = of_added.after(next_tile, next_chunk, next_slot, stride)
            slot = i32(slot + 1)
            if slot == slots:
                slot, parity = i32(0), i32(parity ^ 1)
            c = i32(c + 1)
        hw.wgmma_wait_all()
        return sums, slot, parity, (next_tile, next_chunk, next_slot, stride, tiles)

    return through, extra


def _filling(t: Tile, copying: Part, epilogues: tuple[tuple[Value, ...], ...]) -> tuple[Any, tuple[tuple[Any, ...], ...]]:
    """The device function that fills a box of y, and the types of its epilogues' arguments.

    (thread, box, x, c, slot, parity, e): from rows at x, and weights of chunk c; what is added comes to the slot's barrier
    """
    from tccompile.kernels.parts.whole_rows import putting
    from tccompile.kernels.ptx import hopper as hw
    from tccompile.kernels.ptx.core import i32, inline, u32

    wide, two, per, added, w_at = t.per // t.parts, t.parts == 2, t.per, t.added, t.layout["w"] + t.chunks * t.v_bytes
    wait_added = copying.added.wait

    def filling(factor: Factor, of_x: int, of_w: int, epilogue: tuple[Value, ...], adds: bool, waits: bool) -> tuple[Any, Any]:
        first, last = _first(t, factor)
        sums = group_atom(*factor.kinds).acc
        puts, extra = putting(epilogue, (wide, t.parts), ROW, per, adds, sums)
        put_first, put_last, none, each = puts[0], puts[-1], hw.accumulators(wide, sums), factor.weights_bytes(per)

        @inline
        def fill(thread, box, x, c, slot, parity, e):
            base, _, own, lane, _ = thread
            rows, w = u32(box + own * (16 * ROW)), u32(base + w_at + of_w + c * each)
            acc = first(none(), u32(x + of_x), w)
            hw.wgmma_wait_all()  # and for the products of the chunk before
            if waits:
                wait_added(base, slot, parity)
            put_first(acc, rows, lane, i32(c * per), e)
            if two:
                acc = last(acc, u32(x + of_x), w)
                hw.wgmma_wait_all()
                put_last(acc, rows, lane, i32(c * per), e)

        return fill, extra

    factors = t.factors
    if len(factors) == 1:
        fill, extra = filling(factors[0], 0, 0, epilogues[0], added, added)
        return fill, (extra,)
    of_w = t.chunks * factors[0].weights_bytes(per)
    make, of_made = filling(factors[0], 0, 0, epilogues[0], False, False)
    add, of_first = filling(factors[1], factors[0].rows_bytes, of_w, epilogues[1], True, False)

    @inline
    def make_and_add(thread, box, x, c, slot, parity, e):
        make(thread, box, x, c, slot, parity, e[0])
        hw.sync_warp()
        add(thread, box, x, c, slot, parity, e[1])

    return make_and_add, (of_made, of_first)


def _first(t: Tile, factor: Factor) -> tuple[Any, Any]:
    """The device functions (sums, address of rows, of weights) → the sums of a chunk's first part, and of its last one."""
    from tccompile.kernels.ptx import hopper as hw
    from tccompile.kernels.ptx.core import i32, inline, u64

    (of_rows, of_weights), wide = factor.kinds, t.per // t.parts
    rows, w = Operand(ROWS, 0, of_rows, factor.row, 1, True), Operand(t.per, 0, of_weights, factor.row, 1, True)
    row_half, w_half = hw.descriptor(*rows.layout), hw.descriptor(*w.layout)

    def multiplying(begin: int) -> Any:
        steps = tuple((k * rows.box_bytes + at, begin + k * w.box_bytes + at) for k in range(factor.deep) for at in rows.steps)
        multiplied = hw.multiply(wide, steps, (True, True), factor.kinds)

        @inline
        def product(acc, a, b):
            return multiplied(acc, hw.operand(u64(row_half), a), hw.operand(u64(w_half), b), i32(0))

        return product

    return multiplying(0), multiplying((t.parts - 1) * wide * factor.row)


class PairSm90(Joint):
    """Two products, of which the second one reads the first one's result; and one whose result is added to the first one's."""

    name = "pair_sm90"
    tensor_cores = True

    def groups(self, program: Program) -> Iterator[tuple[int, Sequence[int]]]:
        writers = {op.y: i for i, op in enumerate(program.ops) if isinstance(op, Conv)}
        for second, op in enumerate(program.ops):
            first = writers.get(op.x, -1) if isinstance(op, Conv) else -1
            if first < 0:
                continue
            yield first, (first, second)
            for name in program.ops[first].inputs:
                if writers.get(name, first) < first and name != program.ops[first].operands[0]:
                    yield first, (writers[name], first, second)

    def supports(self, ops: Sequence[Op], program: Program, arch: Arch) -> str | None:
        if not of_warpgroups(arch):
            return f"{arch.name} has no wgmma instructions"
        found = described(ops, program)
        if isinstance(found, str):
            return found
        least = next(iter(self.configs(ops, program, arch)), None)
        return None if least else f"the weights of {' and '.join(op.y for op in ops)} do not fit into shared memory"

    def configs(self, ops: Sequence[Op], program: Program, arch: Arch) -> Iterator[Config]:
        found = described(ops, program)
        assert isinstance(found, Products)
        few = (3, 2) if BITS[found.operands[-1].kinds[0]] == 8 else (3,)  # halves wait for memory, whatever the warpgroups
        for slots, groups in product(few, (4, 3, 2)):
            ways = ({"groups": groups, "slots": slots, "ahead": ahead, "parts": 2 if groups == 4 else 1} for ahead in (2, 1))
            yield from [c for c in ways if _fits(found.tile(c), arch)][:1]

    def cost(self, ops: Sequence[Op], program: Program, config: Config, arch: Arch) -> float:
        found = described(ops, program)
        assert isinstance(found, Products)
        t, own = found.tile(config), measured(arch).pair_sm90
        moved = sum(traffic_us(op, program, arch) for op in ops)
        moved -= memory_us([program.tensors[ops[-2].y]] + [program.tensors[op.y] for op in ops[:-2]] * 2, arch)
        turns = ceil_div(hint(found.tiles), t.groups * arch.sms)
        results = (t.chunks * t.per * (1 + own.made * bool(t.made)) + t.columns) / ROWS
        weights = (t.layout["x"] - t.layout["w"]) / own.weights
        each = own.bytes_us if found.results[-2].size == 1 else own.results_us
        computing = turns * results * max(own.alone_us, t.groups * each)
        return own.start_us + weights + max(computing, moved)

    def work(self, ops: Sequence[Op], program: Program, config: Config, arch: Arch) -> Work:
        found = described(ops, program)
        assert isinstance(found, Products)
        t = found.tile(config)
        specs = [boxed.epilogue for boxed in found.results]
        launch = Launch(
            code=code(self.name, **t.params, epilogues=tuple(spec.params for spec in specs)),
            grid=(least(ceil_div(found.tiles, t.groups), arch.sms), 1, 1),
            block=t.threads,
            args=(*found.maps(t), I32(found.tiles), *(arg for spec in specs for arg in spec.args)),
            smem=t.layout.smem,
        )
        return Work((launch,))

    def build(self, arch: Arch, **params: Any) -> Function:
        return _function(Tile.of(params), params["epilogues"])


def _fits(t: Tile, arch: Arch) -> bool:
    """Whether a multiprocessor has the shared memory and the registers."""
    return t.per // t.parts % EIGHTS == 0 and t.layout.smem <= arch.smem_block and t.registers * t.threads <= 65536


@dataclass(frozen=True)
class Products:
    """The products of a launch, in the order of the ops: how their operands are read, and how results are written."""

    problems: Sequence[Problem]
    operands: Sequence[Copies]
    results: Sequence[Boxed]

    @property
    def tiles(self) -> Extent:
        """Of a warpgroup's rows."""
        return ceil_div(self.problems[-1].rows, ROWS)

    @property
    def factors(self) -> list[Factor]:
        """Of all but the second product."""
        of = zip(self.problems[:-1], self.operands[:-1], strict=True)
        return [Factor(how.kinds, ceil_div(p.channels, how.chunk), how.chunk * p.x.dtype.size) for p, how in of]

    def tile(self, config: Config) -> Tile:
        *made, first = map(tuple, self.factors)
        y, z = self.results[-2:]
        return Tile(
            first=first,
            made=made[0] if made else (),
            second=self.operands[-1].kinds,
            chunks=self.problems[-2].stored * y.size // ROW,
            columns=self.problems[-1].stored,
            added=y.added is not None and not made,
            result=z.size,
            **config,
        )

    def maps(self, t: Tile) -> list[TiledMap]:
        """Of v, y, z, then of rows and weights of each factor, and of what is added to y from memory."""
        y, z = self.results[-2:]
        found = [columns_in_order(self.operands[-1].b, t.per, t.columns, ROW, z.size)]
        found += [replace(y.y, box=(t.per, ROWS, 1), swizzle=ROW)]
        found += [t.boxes_of(z.y)]
        for how, factor in zip(self.operands[:-1], t.factors, strict=True):
            assert isinstance(how.a, TiledMap)
            found += [replace(how.a, box=(how.chunk, ROWS, 1), swizzle=factor.row)]
            found += [columns_in_order(how.b, how.chunk, t.per, factor.row, y.size)]
        return found + [replace(m, box=(t.per, ROWS, 1), swizzle=ROW) for m in (y.added,) if m and t.added]


def described(ops: Sequence[Op], program: Program) -> Products | str:
    """The products, or why they cannot be computed by one launch."""
    *made, first, second = ops
    if not all(isinstance(op, Conv) for op in ops) or second.operands[0] != first.y:
        return "one of them is no convolution of the other's result"
    if several := [op.y for op in ops if op.also is not None]:
        return f"{several[0]} is one of two results"
    parts = []
    for op in ops:
        found = _described(op, program)
        if isinstance(found, str):
            return found
        parts.append(found)
    problems, operands, results = zip(*parts, strict=True)
    others = [name for name in second.inputs if name != first.y and program.tensors[name].storage not in program.constants]
    if others:
        return f"the second one also reads {others[0]}, which is no constant"
    p, q, y, z = *problems[-2:], *results[-2:]
    if p.stored != p.columns or q.stored != q.columns or p.stored * y.size % ROW or p.stored * y.size < 2 * ROW:
        return f"{first.y} has {p.columns} channels; they have to be {2 * ROW} bytes or more, in multiples of {ROW}"
    if not group_atom(*operands[-1].kinds).takes(q.stored) or (q.stored * z.size not in (32, 64) and q.stored * z.size % ROW):
        return f"{second.y} has {q.columns} channels; they have to be 32, 64 or a multiple of {ROW} bytes, and 256 at most"
    if made and (reason := _unmade(made[0], first, y, program)):
        return reason
    return Products(problems, operands, results)


def _unmade(made: Op, first: Op, y: Boxed, program: Program) -> str | None:
    """Why the result of the op cannot be added to the first one's without being written."""
    alike = program.tensors[made.y].shape == program.tensors[first.y].shape and not program.tensors[made.y].base
    if y.added is None or y.added.tensor != made.y or made.y in program.outputs or not alike:
        return f"{made.y} is not what is added to {first.y}"
    if sum(program.tensors[name].storage == made.y for op in program.ops for name in op.inputs) != 1:
        return f"{made.y} is not only added to {first.y}"
    mine = boxed_results(made, program, describe(made, program), 2)  # type: ignore[arg-type]
    return "its own result is added to something" if mine and mine.added else None


@remembered
def _described(op: Op, program: Program) -> tuple[Problem, Copies, Boxed] | str:
    problem = describe(op, program)
    if isinstance(problem, str):
        return problem
    if reason := unfit(problem, TYPES):
        return reason
    how = copies(problem, program)
    if isinstance(how, str):
        return how
    boxed = boxed_results(op, program, problem, 8 if program.tensors[op.y].dtype.size == 1 else 2)
    if boxed is None:
        return f"{op.y} cannot be written in boxes"
    if how.im2col or problem.batches != 1 or how.k_major != (True, True):
        return f"{problem.x.name} is not read pixel by pixel"
    if group_atom(*how.kinds).rough or problem.w.storage not in program.constants:
        return f"{problem.w.name} is no constant of halves or integers"
    return problem, how, boxed
