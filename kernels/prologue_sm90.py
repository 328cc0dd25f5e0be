"""A 1×1 convolution in bytes, and what makes its operand element by element, in one launch on Hopper: z = f(g(x) @ wᵀ).

g may be a norm that is a factor and an addend for each channel, an activation, and the rounding to bytes: what each layer of a
densely connected block does to all results before it. Each warpgroup of a block takes 64 rows at a time. They come in chunks of
128 channels, which it changes where they lie in shared memory, while the Tensor Cores multiply the chunk before. So g(x) is
neither written nor read. Weights stay in shared memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from typing import Any

from tccompile.arch import KIB, Arch
from tccompile.ir.expr import canonical_view, identity_view
from tccompile.ir.extent import Extent, ceil_div, divides, hint, least
from tccompile.ir.ops import Conv, Op, Pointwise
from tccompile.ir.program import Program
from tccompile.ir.tensor import Tensor
from tccompile.ir.types import DType
from tccompile.kernels import epilogue
from tccompile.kernels.gemm_sm90_copies import Boxed, Copies, boxed_results, columns_in_order, copies
from tccompile.kernels.implicit_gemm import Problem, describe, unfit
from tccompile.kernels.parts.layout import Region, SharedLayout, barriers
from tccompile.kernels.parts.maps import unmapped
from tccompile.kernels.parts.operands import ROW, ROWS, UNIT
from tccompile.kernels.parts.part import Part, part
from tccompile.kernels.parts.row_tile import RowTile
from tccompile.kernels.ptx.atoms import group_atom, of_warpgroups
from tccompile.kernels.rates import measured
from tccompile.kernels.remembered import remembered
from tccompile.kernels.spec import I32, Config, Function, Joint, Launch, TiledMap, Value, Work, code, memory_us

BYTES = DType.I8, DType.U8
"""What is multiplied."""

SOURCES = *BYTES, DType.F16
"""What that is made of."""

BOX = ROWS * ROW
"""Bytes of a chunk of a warpgroup's rows as they are multiplied."""

LANES = 8
"""Channels that a thread changes at a time."""

WARPGROUPS = (4, 1), (3, 1), (2, 1), (1, 1), (4, 2), (2, 2), (4, 4)
"""How many a block has, and how many of them take turns with the chunks of the same rows."""

AT_ONCE = 2
"""Rows that it changes at a time."""


@dataclass(frozen=True)
class Tile(RowTile):
    """How a block's shared memory is laid out.

    kinds    types of what is multiplied
    source   bytes of what is read: 1, which is changed in its place, or 2
    chunks   of 128 channels
    share    how many warpgroups take turns with the chunks of the same rows, and add up what they have
    slots    chunks of each warpgroup that are there at a time
    """

    kinds: tuple[str, str]
    source: int
    chunks: int
    share: int
    slots: int

    @property
    def teams(self) -> int:
        """Of warpgroups, each of which takes rows of its own."""
        return self.groups // self.share

    @property
    def slot_bytes(self) -> int:
        """Of a chunk of a warpgroup's rows as they are read."""
        return self.source * BOX

    @property
    def w_bytes(self) -> int:
        """Of the weights of a chunk."""
        return self.columns * ROW

    @property
    def sums_bytes(self) -> int:
        """Of a warpgroup's sums."""
        return 4 * ROWS * self.columns

    @cached_property
    def layout(self) -> SharedLayout:
        return SharedLayout(
            Region("w", self.w_bytes * self.chunks, KIB),
            Region("x", self.groups * self.slots * self.slot_bytes, KIB),
            Region("made", self.groups * 2 * BOX if self.source > 1 else 0, KIB),
            Region("z", self.teams * self.z_bytes, KIB),
            Region("sums", (self.groups - self.teams) * self.sums_bytes),
            barriers("w full", self.chunks),
            barriers("x full", self.groups * self.slots),
        )


def _function(t: Tile, prologue: tuple[Value, ...], results: tuple[Value, ...]) -> Function:
    from tccompile.kernels.loops import entry
    from tccompile.kernels.parts.whole_rows import storing
    from tccompile.kernels.ptx import hopper as hw
    from tccompile.kernels.ptx.core import cuda, i32, inline, types, u32

    copying, slots, columns, share, teams = _copying(t), t.slots, t.columns, t.share, t.teams
    sum_up, of_x = _summing(t, copying, prologue)
    add_up, (store, of_z) = _adding_up(t), storing(t, t.layout["z"], t.kinds, results)
    all_read = hw.boxes_read(0)

    @inline
    def body(maps, numbers, g, f):
        tiles = numbers[0]
        base, tid = u32(hw.base()), i32(cuda.threadIdx.x)
        warp, lane = hw.uniform(i32(tid >> 5)), i32(tid & 31)
        group, own = i32(warp >> 2), i32(warp & 3)
        team, first = i32(group // share), i32(group % share)
        leads = own == 0 and lane == 0
        thread = base, group, own, lane, leads
        column = i32(cuda.blockIdx.y * columns)
        if tid == 0:
            copying.init(base)
        cuda.syncthreads()
        if tid == 0:
            copying.load_weights(base, maps, column)
        tile, stride = i32(cuda.blockIdx.x * teams + team), i32(cuda.gridDim.x * teams)
        hw.wait_for_earlier_grids()
        hw.let_later_grids_start()
        next_tile, next_chunk, free = tile, first, i32(0)
        for _ in range(slots - 1):
            if leads and next_tile < tiles:
                copying.ask(base, maps, i32(group * slots + free), next_tile, next_chunk)
            next_tile, next_chunk, free = copying.after(next_tile, next_chunk, free, stride, first)
        slot, parity, turn = i32(0), i32(0), i32(0)
        while tile < tiles:
            coming, place = (next_tile, next_chunk, free, stride, tiles), (slot, parity, turn)
            sums, coming, place = sum_up(thread, maps, first, coming, place, g)
            next_tile, next_chunk, free = coming[0], coming[1], coming[2]
            slot, parity, turn = place
            sums = add_up(thread, team, first, sums)
            if first == 0:
                store(thread, maps, team, tile, column, sums, f)
            tile = i32(tile + stride)
        if leads:
            all_read()

    signature = types.void(*[types.uint64] * 3, types.int32, *of_x, *of_z)
    return Function(entry(body, 0, 3, 1, len(of_x), len(of_z)), signature, t.threads)


def _summing(t: Tile, copying: Part, prologue: tuple[Value, ...]) -> tuple[Any, tuple[Any, ...]]:
    """The device function (thread, maps, first, coming, place, g) → sums, coming, place: the products of a warpgroup's chunks of
    a tile, of which `first` is the first one; and the types of the prologue's arguments.

    coming  the tile, chunk and slot that are asked for next; from tile to tile; how many there are
    place   of the next chunk: its slot, the parity of that one's barrier, and which of two boxes it is made in
    """
    from tccompile.kernels.parts.whole_rows import multiplying
    from tccompile.kernels.ptx import hopper as hw
    from tccompile.kernels.ptx.core import i32, inline, u32

    slots, chunks, share, w_at, w_bytes, all_read = t.slots, t.chunks, t.share, t.layout["w"], t.w_bytes, hw.boxes_read(0)
    read, change, extra = (_changing if t.source == 1 else _making)(t, prologue)
    multiply, no_sums = multiplying(t.columns, t.kinds), hw.accumulators(t.columns, group_atom(*t.kinds).acc)

    @inline
    def sum_up(thread, maps, first, coming, place, g):
        base, group, _, lane, leads = thread
        tile, chunk, free, stride, tiles = coming
        slot, parity, turn = place
        sums, c = no_sums(), first
        while c < chunks:
            of_channels = read(lane, i32(c * ROW), g)
            copying.wait_rows(base, i32(group * slots + slot), parity)
            box = change(thread, slot, turn, i32(c * ROW), of_channels, g)
            turn = i32(turn ^ 1)
            hw.fence_copies()
            hw.wgmma_wait_all()  # the chunk before has been multiplied, so its box is free once all have come here
            if leads and c == first:
                all_read()
            hw.sync_group(i32(group + 1))
            if leads and tile < tiles:
                copying.ask(base, maps, i32(group * slots + free), tile, chunk)
            tile, chunk, free = copying.after(tile, chunk, free, stride, first)
            copying.wait_weights(base, c)
            sums = multiply(sums, box, u32(base + w_at + c * w_bytes), i32(c - first))
            slot = i32(slot + 1)
            if slot == slots:
                slot, parity = i32(0), i32(parity ^ 1)
            c = i32(c + share)
        hw.wgmma_wait_all()
        return sums, (tile, chunk, free, stride, tiles), (slot, parity, turn)

    return sum_up, extra


def _adding_up(t: Tile) -> Any:
    """The device function (thread, team, first, sums) → the sums of all warpgroups of a team, in the first one of it."""
    from tccompile.kernels.loops import device
    from tccompile.kernels.ptx import hopper as hw
    from tccompile.kernels.ptx.core import i32, inline, instruction, u32, void

    share, at, each = t.share, t.layout["sums"], t.sums_bytes
    put_4 = instruction("st.shared.v4.b32 [$0], {$1, $2, $3, $4};", void, u32, i32, i32, i32, i32)
    get_4 = instruction("ld.shared.v4.b32 {$0, $1, $2, $3}, [$4];", (i32, i32, i32, i32), u32)
    fours = range(0, t.columns // 2, 4)
    put = device(
        "put",
        "at, v",
        [f"put_4(u32(at + {512 * k}), v[{k}], v[{k + 1}], v[{k + 2}], v[{k + 3}])" for k in fours],
        put_4=put_4,
        u32=u32,
    )
    got = [f"v{k} = get_4(u32(at + {512 * k}))" for k in fours]
    added = ", ".join(f"i32(v[{k + i}] + v{k}[{i}])" for k in fours for i in range(4))
    add = device("add", "at, v", [*got, f"return {added}"], get_4=get_4, u32=u32)
    meet = hw.meeting(128 * share)[0]

    @inline
    def alone(thread, team, first, sums):
        return sums

    @inline
    def add_up(thread, team, first, sums):
        base, _, own, lane, _ = thread
        mine = u32(base + at + team * ((share - 1) * each) + (own * 32 + lane) * 16)
        if first > 0:
            put(u32(mine + (first - 1) * each), sums)
        meet(i32(8 + team))
        if first == 0:
            for k in range(share - 1):
                sums = add(u32(mine + k * each), sums)
        meet(i32(8 + team))
        return sums

    return add_up if share > 1 else alone


def _copying(t: Tile) -> Part:
    """What asks for copies, and waits for them. `maps`: of weights, rows and results.

    init(base)                              barriers, by one thread
    load_weights(base, maps, column)        of all chunks, by one thread
    ask(base, maps, slot, tile, chunk)      64 rows of a chunk
    after(tile, chunk, slot, stride, first)  what is asked for next
    wait_weights(base, chunk), wait_rows(base, slot, parity)
    """
    from tccompile.kernels.parts.ring import Stages
    from tccompile.kernels.parts.whole_rows import copying_columns
    from tccompile.kernels.ptx import hopper as hw
    from tccompile.kernels.ptx.core import i32, inline, u32

    slots, chunks, w_bytes, share, boxes, slot_bytes = t.slots, t.chunks, t.w_bytes, t.share, t.source, t.slot_bytes
    weights, rows = Stages(t.layout, "w", chunks, w_bytes), Stages(t.layout, "x", t.groups * slots, slot_bytes)
    copy_columns = copying_columns(t.result)

    @inline
    def init(base):
        weights.init(weights.buffers(base))
        rows.init(rows.buffers(base))
        hw.fence_barrier_init()

    @inline
    def load_weights(base, maps, column):
        for c in range(chunks):
            target = weights.target(weights.buffers(base), i32(c))
            weights.expect(target, w_bytes)
            copy_columns(target[1], maps[0], target[0], i32(c * ROW), column)

    @inline
    def ask(base, maps, slot, tile, chunk):
        target = rows.target(rows.buffers(base), slot)
        rows.expect(target, slot_bytes)
        for k in range(boxes):
            channel = i32(chunk * ROW + k * (ROW // boxes))
            hw.copy_box(u32(target[1] + k * BOX), maps[1], target[0], channel, i32(tile * ROWS), i32(0))

    @inline
    def after(tile, chunk, slot, stride, first):
        slot, chunk = i32(slot + 1), i32(chunk + share)
        if slot == slots:
            slot = i32(0)
        if chunk >= chunks:
            chunk, tile = first, i32(tile + stride)
        return tile, chunk, slot

    @inline
    def wait_weights(base, chunk):
        weights.wait(weights.buffers(base), chunk, i32(0))

    @inline
    def wait_rows(base, slot, parity):
        rows.wait(rows.buffers(base), slot, parity)

    return part(init=init, load_weights=load_weights, ask=ask, after=after, wait_weights=wait_weights, wait_rows=wait_rows)


def _changing(t: Tile, params: tuple[Value, ...]) -> tuple[Any, Any, tuple[Any, ...]]:
    """The device functions read(lane, c, g), what the op before reads for channels from c on, and
    change(thread, slot, turn, c, of, g): what it makes with that of a slot's bytes, in their place, which it returns; and the
    types of the op's arguments. A thread has 8 channels of every other row."""
    from tccompile.kernels.ptx.core import i32, inline, u32

    kept, results, load, store, extra = _made_of(params)
    slots, at = t.slots, t.layout["x"]

    @inline
    def read(lane, c, g):
        return kept(i32(c + (lane & 15) * LANES), g)

    @inline
    def change(thread, slot, turn, c, of, g):
        base, group, own, lane, _ = thread
        box = u32(base + at + (group * slots + slot) * BOX)
        eight, other = i32(lane & 15), i32(lane >> 4)
        first = u32(box + (own * 16 + other) * ROW + (((eight >> 1) ^ other) << 4) + (eight & 1) * 8)
        for k in range(0, 8, AT_ONCE):
            above = u32((first ^ (((2 * k) & 7) << 4)) + k * (2 * ROW))
            below = u32((first ^ (((2 * k + 2) & 7) << 4)) + (k + 1) * (2 * ROW))
            v = results(0, load(above) + load(below), of, i32(c + eight * LANES), g)
            store(above, v[0], v[1], v[2], v[3], v[4], v[5], v[6], v[7])
            store(below, v[8], v[9], v[10], v[11], v[12], v[13], v[14], v[15])
        return box

    return read, change, extra


def _making(t: Tile, params: tuple[Value, ...]) -> tuple[Any, Any, tuple[Any, ...]]:
    """The same of halves, whose bytes go to one of two boxes by `turn`. A thread has 8 channels of each of the slot's two boxes,
    of every fourth row; `read` is for the first box."""
    from tccompile.kernels.ptx.core import i32, inline, u32

    kept, results, load, store, extra = _made_of(params)
    slots, slot_bytes, at, made_at = t.slots, t.slot_bytes, t.layout["x"], t.layout["made"]

    @inline
    def read(lane, c, g):
        return kept(i32(c + (lane & 7) * LANES), g)

    @inline
    def make(thread, slot, turn, c, of, g):
        base, group, own, lane, _ = thread
        eight, row = i32(lane & 7), i32(own * 16 + (lane >> 3))
        box = u32(base + made_at + (group * 2 + turn) * BOX)
        source = u32(base + at + (group * slots + slot) * slot_bytes + row * ROW + ((eight ^ (row & 7)) << 4))
        target = u32(box + row * ROW + (((eight >> 1) ^ (row & 7)) << 4) + (eight & 1) * 8)
        for half in range(2):
            channel = i32(c + half * (ROW // 2) + eight * LANES)
            above, to = u32(source + half * BOX), u32(target ^ (half * 64))
            for k in range(2):  # rows 8 apart are swizzled alike, those 4 apart by another bit
                rows = load(u32(above + k * (8 * ROW))) + load(u32((above ^ 64) + (k * 8 + 4) * ROW))
                v = results(0, rows, of, channel, g)
                store(u32(to + k * (8 * ROW)), v[0], v[1], v[2], v[3], v[4], v[5], v[6], v[7])
                store(u32((to ^ 64) + (k * 8 + 4) * ROW), v[8], v[9], v[10], v[11], v[12], v[13], v[14], v[15])
            if half == 0:
                of = kept(i32(channel + ROW // 2), g)
        return box

    return read, make, extra


def _made_of(params: tuple[Value, ...]) -> tuple[Any, Any, Any, Any, tuple[Any, ...]]:
    """Of an op that makes bytes element by element the device functions kept(c, g) and results(0, added, read, c, g), as
    `epilogue.build_kept` has them, of two rows of 8 channels; those that load 8 elements and store 8 bytes; and the types of the
    op's arguments."""
    from tccompile.kernels.ptx import memory

    kept, results, extra = epilogue.build_kept(params, AT_ONCE)
    load = epilogue.load_added(params, LANES, "shared")
    store = memory.store(epilogue.Form.decoded(params).y.dtype, LANES, space="shared", rounds=True)
    return kept, results, load, store, extra


class PrologueSm90(Joint):
    """A 1×1 convolution, and an op of single elements that makes what it reads."""

    name = "prologue_sm90"
    tensor_cores = True

    def groups(self, program: Program) -> Iterator[tuple[int, Sequence[int]]]:
        writers = {op.y: i for i, op in enumerate(program.ops) if isinstance(op, Pointwise)}
        for i, op in enumerate(program.ops):
            if isinstance(op, Conv) and op.x in writers:
                yield i, (writers[op.x], i)

    def supports(self, ops: Sequence[Op], program: Program, arch: Arch) -> str | None:
        if not of_warpgroups(arch):
            return f"{arch.name} has no wgmma instructions"
        found = described(ops, program)
        if isinstance(found, str):
            return found
        fits = next(iter(self.configs(ops, program, arch)), None)
        return None if fits else f"the weights of {ops[-1].y} do not fit into shared memory"

    def configs(self, ops: Sequence[Op], program: Program, arch: Arch) -> Iterator[Config]:
        found = described(ops, program)
        assert isinstance(found, Product)
        for columns, (groups, share) in product(found.widths, WARPGROUPS):
            ways = ({"columns": columns, "groups": groups, "share": share, "slots": slots} for slots in (5, 4, 3, 2))
            tiles = (c for c in ways if share <= found.chunks and found.tile(c).layout.smem <= arch.smem_block)
            yield from [*tiles][:1]

    def cost(self, ops: Sequence[Op], program: Program, config: Config, arch: Arch) -> float:
        found = described(ops, program)
        assert isinstance(found, Product)
        t, own = found.tile(config), measured(arch).prologue_sm90
        across = found.problem.stored // t.columns
        read, written = memory_us([found.source], arch), memory_us([program.tensors[ops[-1].y]], arch)
        turns = ceil_div(hint(found.tiles) * across, t.teams * arch.sms)
        each = ceil_div(t.chunks, t.share) * max(own.alone_us, t.groups * own.chunk_us) * (own.halves if t.source > 1 else 1.0)
        each += t.columns / 128 * max(own.stored_alone_us, t.teams * own.stored_us) + own.shared_us * (t.share > 1)
        begins = own.start_us + own.apart_us + t.chunks * t.w_bytes / own.weights
        return begins + max(turns * each, across * read + written)

    def work(self, ops: Sequence[Op], program: Program, config: Config, arch: Arch) -> Work:
        found = described(ops, program)
        assert isinstance(found, Product)
        t, prologue, results = found.tile(config), found.prologue, found.results.epilogue
        across = found.problem.stored // t.columns
        launch = Launch(
            code=code(self.name, **t.params, prologue=prologue.params, epilogue=results.params),
            grid=(least(ceil_div(found.tiles, t.teams), max(arch.sms // across, 1)), across, 1),
            block=t.threads,
            args=(*found.maps(t), I32(found.tiles), *prologue.args, *results.args),
            smem=t.layout.smem,
        )
        return Work((launch,))

    def build(self, arch: Arch, **params: Any) -> Function:
        return _function(Tile.of(params), params["prologue"], params["epilogue"])


@dataclass(frozen=True)
class Product:
    """The convolution, with what its operand is made of in that one's place.

    problem, operands  as the op itself has them
    source, rows       what is read in place of its operand, and the map of that
    """

    problem: Problem
    operands: Copies
    source: Tensor
    rows: TiledMap
    prologue: epilogue.EpilogueSpec
    results: Boxed

    @property
    def tiles(self) -> Extent:
        """Of a warpgroup's rows."""
        return ceil_div(self.problem.rows, ROWS)

    @property
    def chunks(self) -> int:
        return ceil_div(self.problem.channels, ROW)

    @property
    def widths(self) -> list[int]:
        """Columns that a block may have."""
        stored, size = self.problem.stored, self.results.size
        return [n for n in (128, 64, 32) if stored % n == 0 and n * size in (32, 64, 128, 256)]

    def tile(self, config: Config) -> Tile:
        source = self.source.dtype.size
        return Tile(kinds=self.operands.kinds, source=source, chunks=self.chunks, result=self.results.size, **config)

    def maps(self, t: Tile) -> list[TiledMap]:
        """Of weights, rows and results."""
        weights = columns_in_order(self.operands.b, ROW, t.columns, ROW, t.result)
        rows = replace(self.rows, box=(ROW // t.source, ROWS, 1), swizzle=ROW)
        return [weights, rows, t.boxes_of(self.results.y)]


def described(ops: Sequence[Op], program: Program) -> Product | str:
    """The product, or why the two ops cannot be one launch."""
    first, conv = ops
    assert isinstance(first, Pointwise) and isinstance(conv, Conv)
    return _described(first, conv, program)


@remembered
def _described(first: Pointwise, conv: Conv, program: Program) -> Product | str:
    made = program.tensors[first.y]
    if first.also is not None or conv.also is not None or made.base or first.y in program.outputs:
        return f"{first.y} or {conv.y} is not the only result"
    if sum(program.tensors[name].storage == first.y for op in program.ops for name in op.inputs) != 1:
        return f"{first.y} is not only multiplied"
    source = _source(first, program)
    if source is None or made.dtype not in BYTES:
        return f"{first.y} is not made of one tensor element by element, to bytes"
    problem = describe(conv, program)
    if isinstance(problem, str):
        return problem
    if reason := unfit(problem, BYTES):
        return reason
    operands, rows = copies(problem, program), _rows(replace(conv, x=source), program)
    if isinstance(operands, str) or isinstance(rows, str):
        return operands if isinstance(operands, str) else str(rows)
    if operands.im2col or problem.batches != 1 or operands.k_major != (True, True) or problem.w.storage not in program.constants:
        return f"{problem.x.name} is not read pixel by pixel"
    boxed = boxed_results(conv, program, problem, 8 if program.tensors[conv.y].dtype.size == 1 else 2)
    if boxed is None or boxed.added is not None or problem.stored != problem.columns:
        return f"{conv.y} cannot be written in boxes"
    prologue = epilogue.describe(first, program, epilogue.frame_of(first, program), LANES)
    found = Product(problem, operands, program.tensors[source], rows, prologue, boxed)
    return found if found.widths else f"{conv.y} has {problem.columns} channels"


def _rows(conv: Conv, program: Program) -> TiledMap | str:
    """The map of rows of what a convolution would read, whatever type that has, or why there is none."""
    problem = describe(conv, program)
    if isinstance(problem, str):
        return problem
    if reason := unmapped((problem.x,), program):
        return reason
    x, (n, p, q), (step_n, step_h, step_w, step_c) = problem.x, problem.pixels, problem.x_pixel
    step = next((t for extent, t in ((q, step_w), (p, step_h), (n, step_n)) if extent > 1), UNIT)
    if not problem.linear or step_c != 1 or not all(divides(UNIT, v * x.dtype.size) for v in (step, x.offset)):
        return f"{x.name} is not read pixel by pixel"
    return TiledMap(x.name, 0, (problem.channels, problem.rows, 1), (step * x.dtype.size, UNIT), (), (1, 1, 1))


def _source(op: Pointwise, program: Program) -> str | None:
    """What an op makes its result of element by element, beside constants of a channel; None if it does not."""
    others, found, y = [], list[str](), program.tensors[op.y]
    for view in op.epilogue.loads:
        x = program.tensors[view.tensor]
        whole = canonical_view(identity_view(x.name, x.rank), x.shape)
        if x.dtype in SOURCES and x.shape == y.shape and x.order == y.order and canonical_view(view, x.shape) == whole:
            found.append(x.name)
        else:
            others.append(view)
    constant = all(program.tensors[view.tensor].storage in program.constants for view in others)
    by_channel = all(i.affine is not None and {*i.affine} <= {1} for view in others for i in view.index)
    return found[0] if len(found) == 1 and constant and by_channel and op.epilogue.shuffle == 1 else None
