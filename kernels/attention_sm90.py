"""Attention on Hopper: the tensor copy engine feeds wgmma; softmax and products overlap.

A block computes 64 rows of one head for each of its warpgroups, an item, and then the item that lies a grid further, if there
is one; one warp more asks for copies of q once an item, and of k and v tile by tile, in rings of `STAGES` buffers each, so
that an item's first rows come while results of the one before go out. A warpgroup asks for the scores of a tile and, with the
weights of the tile before, for its share of the result, and computes weights from the scores while the latter is under way.
With two warpgroups or more they take turns in asking, so that one multiplies while another computes exponentials (after Shah
et al., FlashAttention-3, 2024). Weights go into the second product from registers; v is read as its rows lie, transposed by
wgmma.

Operands in E4M3 are multiplied as they are, and so are their weights, but v lies turned by then (attention_turn.py). Weights are
relative to a score that a row's highest may exceed, so that it is seldom looked for. Their sums are one more column of the
result. Results of many rows are added up in float32, and kept in bf16 in shared memory meanwhile. Warpgroups take no turns: with
turns it took 1 to 2 % longer on an H200.

Of a mask each thread reads what its accumulators need, two columns at a time, before it asks for the scores. With what is added
they are logarithms to base e until weights are computed, so that the lowest float32 stays finite.

`attention_sm90_tile` has sizes, `attention_sm90_softmax` what becomes of scores; here are copies, products and their order.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from tccompile.arch import Arch
from tccompile.ir.extent import ceil_div, least
from tccompile.ir.ops import Attention, Op
from tccompile.ir.program import Program
from tccompile.ir.tensor import Tensor
from tccompile.ir.types import DType
from tccompile.kernels import attention_turn, epilogue
from tccompile.kernels.attention import op_extents
from tccompile.kernels.attention_mma import FEW, LOG2_E, unfit
from tccompile.kernels.attention_sm90_tile import STAGES, Tile, resident, tiles_of
from tccompile.kernels.attention_turn import LINE, turned_bytes, turning
from tccompile.kernels.codegen import definition, execute, tuple_of
from tccompile.kernels.loops import refusal
from tccompile.kernels.parts.maps import unmapped
from tccompile.kernels.parts.operands import ROW, STEP, UNIT, Operand
from tccompile.kernels.ptx.atoms import of_warpgroups
from tccompile.kernels.rates import measured
from tccompile.kernels.rates.rate import AttentionSm90 as Rated
from tccompile.kernels.spec import (
    F32,
    I32,
    Arg,
    Config,
    Function,
    Kernel,
    Launch,
    Ptr,
    Scratch,
    TiledMap,
    Value,
    Work,
    code,
    memory_us,
    traffic_us,
)

SMALL = 64
"""Up to so many elements of a head, weights in halves are packed, and results scaled, while exponentials are computed."""

MASKS = (DType.F32, DType.F16, DType.BOOL)


def _mask_unfit(op: Attention, program: Program) -> str | None:
    """None if two neighbouring elements of the mask can be read at once, else the rule that does not hold."""
    if op.mask is None:
        return None
    mask, columns = program.tensors[op.mask], program.tensors[op.k].shape[2]
    if mask.dtype not in MASKS:
        return f"its mask, {op.mask}, is {mask.dtype.value}; masks are {', '.join(m.value for m in MASKS)}"
    if mask.shape[3] != columns:
        return f"its mask, {op.mask}, has one element for all columns"
    if mask.strides[3] != 1 and mask.padded[3] > 1:
        return f"neighbouring elements of its mask, {op.mask}, are {mask.strides[3]} apart in memory"
    steps = [mask.offset, mask.padded[3], *(s for n, s in zip(mask.shape[:3], mask.strides[:3], strict=True) if n > 1)]
    if any(s % 2 for s in steps):
        return f"rows of its mask, {op.mask}, do not begin at even elements, or end there"
    return None


def _tile(config: Mapping[str, Any], op: Attention, program: Program, arch: Arch) -> Tile:
    found = (t for t in tiles_of(op, program, arch) if (t.warpgroups, t.bn) == (config["warpgroups"], config["bn"]))
    return next(found)


def _map(t: Tensor, rows: int) -> TiledMap:
    """Boxes of 128 bytes by `rows` rows of a head, of (elements, rows, heads, batches)."""
    b, h, m, e = t.shape
    size = t.dtype.size
    steps = tuple(size * s if n > 1 else 16 for n, s in zip((m, h, b), (t.strides[2], t.strides[1], t.strides[0]), strict=True))
    return TiledMap(t.name, 0, (e, m, h, b), steps, (ROW // size, rows, 1, 1), (1, 1, 1, 1))


class AttentionSm90(Kernel):
    """Attention of heads of up to 256 elements in fp16, bf16 or E4M3, by TMA and wgmma."""

    name = "attention_sm90"
    realises = Attention
    tensor_cores = True

    def supports(self, op: Op, program: Program, arch: Arch) -> str | None:
        assert isinstance(op, Attention)
        if not of_warpgroups(arch):
            return f"{arch.name} has no wgmma instructions"
        if reason := unfit(op, program):
            return reason
        if reason := _mask_unfit(op, program):
            return reason
        if len({program.tensors[name].dtype for name in (op.q, op.k, op.v)}) > 1:
            return "q, k and v are not all of one type"
        for name in (op.q, op.k, op.v):
            t = program.tensors[name]
            if any(
                t.dtype.size * s % UNIT for s in (t.offset, *(s for n, s in zip(t.shape, t.strides[:3], strict=False) if n > 1))
            ):
                return f"rows of {name} do not begin at multiples of {UNIT} bytes"
            if reason := unmapped((t,), program):
                return reason
        if not any(True for _ in tiles_of(op, program, arch)):
            return f"its heads{'' if op.mask is None else ' and mask'} do not fit registers and shared memory"
        return refusal(op, program, epilogue.frame_of(op, program))

    def configs(self, op: Op, program: Program, arch: Arch) -> Iterator[Config]:
        assert isinstance(op, Attention)
        heads, rows, n = op_extents(op, program)
        for t in tiles_of(op, program, arch):
            if (t.warpgroups == 1 or t.bm < rows + 64) and (t.bn == 64 or t.bn < 2 * n):
                for persistent in (False, True)[: 1 + (heads * ceil_div(rows, t.bm) > arch.sms * resident(t, arch))]:
                    yield {"warpgroups": t.warpgroups, "bn": t.bn, "persistent": persistent}

    def cost(self, op: Op, program: Program, config: Config, arch: Arch) -> float:
        assert isinstance(op, Attention)
        own = measured(arch).attention_sm90
        t = _tile(config, op, program, arch)
        heads, rows, n = op_extents(op, program)
        blocks = heads * ceil_div(rows, t.bm)
        seen = min(n, rows / 2 + op.causal + t.bm) if op.causal is not None and rows > t.bm else n
        together = min(resident(t, arch), ceil_div(blocks, arch.sms))
        shares = together * t.warpgroups
        each = self._tile_cycles(t, shares, op, program, own)
        waves = blocks / (arch.sms * together)
        waves = math.ceil(waves) if config["persistent"] else max(1.0, waves, min(math.ceil(waves), waves + 0.5))
        # And the end: results on their way out
        start = own.start_us + t.bm * (t.d + t.e) / own.results_us + (own.exchange_us if t.exchange else 0)
        starts = 1 + own.again * (waves - 1) if config["persistent"] else waves
        time = waves * math.ceil(max(seen, 1) / t.bn) * shares * each / own.clock + starts * start - own.early_us
        time += own.few_us if rows <= FEW else 0.0
        if t.size == 1:
            v = program.tensors[op.v]
            time += measured(arch).launch_us + 2 * memory_us([v], arch)  # to turn it
        return measured(arch).launch_us + max(time, traffic_us(op, program, arch))

    def _tile_cycles(self, t: Tile, shares: int, op: Attention, program: Program, own: Rated) -> float:
        """Cycles that one of so many warpgroups of a multiprocessor takes for a tile of k and v."""
        products = t.bn * (t.d + t.wide) * t.size / 64
        masked = 0.0  # of rows of their own, eight lines for each load
        if op.mask is not None:
            masked = t.bn * t.words * (own.masked if program.tensors[op.mask].shape[2] > 1 else own.masked_alike)
        if t.size == 1:
            if shares > 2:
                return masked + own.byte_step + own.byte_softmax * t.bn + own.byte_products * products
            few = own.byte_step_few + own.byte_softmax_few * t.bn + own.byte_products_few * products
            return masked + few * (own.byte_alone if shares == 1 else 1.0)
        softmax = own.softmax * t.bn + own.scaling * t.e + masked  # of scores, and to scale the results
        # One warpgroup does either by turns; of two, one multiplies while the other computes exponentials, for the most part.
        exposed = {1: 1.0, 2: own.exposed}.get(shares, 0.0)
        return max(products, softmax) + exposed * min(products, softmax) + (own.single if shares == 1 else own.several)

    def work(self, op: Op, program: Program, config: Config, arch: Arch) -> Work:
        assert isinstance(op, Attention)
        heads, rows, n = op_extents(op, program)
        if 0 in program.tensors[op.y].padded:
            return Work(())
        t = _tile(config, op, program, arch)
        q, k, v = (program.tensors[name] for name in (op.q, op.k, op.v))
        stored = epilogue.describe(op, program, epilogue.frame_of(op, program))
        tiles = ceil_div(rows, t.bm)
        items = tiles * heads
        integers = (items, tiles, q.shape[1], q.shape[1] // k.shape[1], rows, n, op.causal or 0)
        kind, own_rows = "none", False
        mask: tuple[Arg, ...] = ()
        if op.mask is not None:
            m = program.tensors[op.mask]
            kind, own_rows = m.dtype.value, m.shape[2] > 1
            mask = (Ptr(op.mask), *(I32(s if n > 1 else 0) for n, s in zip(m.shape[:3], m.strides[:3], strict=True)))
        scale = F32(op.scale * (LOG2_E if kind in ("none", "bool") else 1))
        values = _map(v, t.bn) if t.size > 1 else Scratch()
        args = (_map(q, t.bm), _map(k, t.bn), values, scale, *map(I32, integers), *mask, *stored.args)
        compiled = code(
            self.name,
            warpgroups=t.warpgroups,
            bn=t.bn,
            d=t.d,
            e=t.e,
            kind=t.kind,
            long=t.long,
            mask=kind,
            own_rows=own_rows,
            causal=op.causal is not None,
            epilogue=stored.params,
        )
        grid = least(items, arch.sms * resident(t, arch)) if config["persistent"] else items
        launch = Launch(compiled, (grid, 1, 1), t.threads, args, t.smem)
        return Work((launch,)) if t.size > 1 else Work((turning(self.name, v, t.bn), launch), turned_bytes(v, t.bn))

    def build(self, arch: Arch, **params: Any) -> Function:
        if "turns" in params:
            return attention_turn.function()
        tile = Tile(params["warpgroups"], params["bn"], params["d"], params["e"], 0, params["kind"], params["long"])
        return _function(tile, params["mask"], params["own_rows"], params["causal"], params["epilogue"])


MAPS = ("map_q", "map_k", "from_v")
"""Maps of q, k and v; for the last one the address of v turned, if it is."""
INTEGERS = ("items", "tiles_m", "heads", "share", "rows", "columns", "ahead")
"""Items, tiles of a head's rows, heads of a batch, how many share a head of k, extents, and how far ahead a causal row sees."""


def _function(t: Tile, mask_kind: str, own_rows: bool, causal: bool, params: Value) -> Function:
    """The kernel for a tile: the code that `work` gives its arguments to."""
    from tccompile.kernels.attention_sm90_softmax import softmax
    from tccompile.kernels.parts.ring import Ring
    from tccompile.kernels.ptx import hopper as hw
    from tccompile.kernels.ptx.core import cuda, f32, i32, inline, types, u32, u64

    q, k, v = rings = (
        Ring(t.layout, "q", 1, t.q_bytes, t.warpgroups),
        Ring(t.layout, "k", STAGES, t.k_bytes, t.warpgroups),
        Ring(t.layout, "v", STAGES, t.v_bytes, t.warpgroups),
    )
    place = _placing(t, causal)
    storing, extra = _storing(t, params)
    weights = softmax(t, mask_kind, own_rows, causal)
    produce, consume = _produce(t, rings, place), _consume(t, rings, place, weights, storing)
    consumers, exchange, turned = 128 * t.warpgroups, t.exchange, t.size == 1
    shrink, grow = hw.set_registers(t.registers[0], False), hw.set_registers(t.registers[1], True)

    @inline
    def body(map_q, map_k, from_v, factor, integers, mask, e):
        base = u32(hw.base())
        buffers = q.buffers(base), k.buffers(base), v.buffers(base)
        tid = i32(cuda.threadIdx.x)
        warp, lane = hw.uniform(i32(tid >> 5)), i32(tid & 31)
        if tid == 0:
            q.init(buffers[0])
            k.init(buffers[1])
            v.init(buffers[2])
            hw.fence_barrier_init()
            hw.prefetch_map(map_q)
            hw.prefetch_map(map_k)
            if not turned:
                hw.prefetch_map(from_v)
        cuda.syncthreads()
        item = i32(cuda.blockIdx.x)
        hw.wait_for_earlier_grids()
        hw.let_later_grids_start()
        if warp >= consumers // 32:
            if exchange:
                shrink()
            if tid == consumers:
                produce((map_q, map_k, from_v), buffers, item, integers)
        else:
            if exchange:
                grow()
            consume((base, warp, lane, tid), buffers, item, factor, integers, mask, e)

    masks = ["mask", "mask_b", "mask_h", "mask_r"] if mask_kind != "none" else []
    more = [f"e{i}" for i in range(len(extra))]
    call = f"body({', '.join(MAPS)}, factor, {tuple_of(INTEGERS)}, {tuple_of(masks)}, {tuple_of(more)})"
    text = definition("kernel", [*MAPS, "factor", *INTEGERS, *masks, *more], [call])
    signature = types.void(u64, u64, u64, f32, *[i32] * len(INTEGERS), *([u64, *[i32] * 3] if masks else []), *extra)
    return Function(execute(text, {"body": body}, "kernel"), signature, t.threads)


def _placing(t: Tile, causal: bool) -> Any:
    """The device function place(item, integers) → (an item's head of all, its batch, head there and head of k, its first row, the
    columns that it sees, their tiles)."""
    from tccompile.kernels.ptx import mma
    from tccompile.kernels.ptx.core import i32, inline

    bm, bn = t.bm, t.bn

    @inline
    def place(item, integers):
        _, tiles_m, heads, share, rows, columns, ahead = integers
        head = mma.divide(item, tiles_m)
        tile_m = i32(item - head * tiles_m)
        # The longest causal rows first: blocks are started in order.
        m0 = i32((tiles_m - 1 - tile_m) * bm) if causal else i32(tile_m * bm)
        b = mma.divide(head, heads)
        h = i32(head - b * heads)
        last = i32(min(columns, i32(min(rows, i32(m0 + bm)) + ahead))) if causal else columns
        return head, b, h, mma.divide(h, share), m0, last, i32(i32(max(i32(0), last) + (bn - 1)) // bn)

    return place


def _produce(t: Tile, rings: tuple[Any, Any, Any], place: Any) -> Any:
    """The device function of the thread that asks for copies: (maps, buffers, item, integers), of q, k and v."""
    from tccompile.kernels.ptx import hopper as hw
    from tccompile.kernels.ptx.core import cuda, i32, inline, u32

    q, k, v = rings
    bn, (d_boxes, e_boxes), (q_bytes, k_bytes, v_bytes) = t.bn, t.boxes, (t.q_bytes, t.k_bytes, t.v_bytes)
    columns = t.columns

    @inline
    def itself(map_, head, batch, integers):
        return map_

    def copying(boxes: int, box_bytes: int) -> Any:
        @inline
        def copy(map_, target, first, head, batch):
            """Rows of a head, from `first` on."""
            for c in range(boxes):
                hw.copy_box4(u32(target[1] + c * box_bytes), map_, target[0], i32(c * columns), first, head, batch)

        return copy

    copy_q, copy_k = copying(d_boxes, t.bm * ROW), copying(d_boxes, bn * ROW)
    values_of, copy_v = _from_turned(t) if t.size == 1 else (itself, copying(e_boxes, bn * ROW))

    @inline
    def produce(maps, buffers, item, integers):
        (slot, parity), (slot_q, parity_q) = k.writer(), q.writer()
        while item < integers[0]:
            _, b, h, g, m0, _, tiles = place(item, integers)
            values = values_of(maps[2], g, b, integers)
            if tiles > 0:
                target = q.target(buffers[0], slot_q)
                q.acquire(buffers[0], slot_q, parity_q)
                q.expect(target, q_bytes)
                copy_q(maps[0], target, m0, h, b)
                slot_q, parity_q = q.advance(slot_q, parity_q)
            for tile in range(tiles):
                n = i32(tile * bn)
                target = k.target(buffers[1], slot)
                k.acquire(buffers[1], slot, parity)
                k.expect(target, k_bytes)
                copy_k(maps[1], target, n, g, b)
                target = v.target(buffers[2], slot)
                v.acquire(buffers[2], slot, parity)
                v.expect(target, v_bytes)
                copy_v(values, target, n, g, b)
                slot, parity = k.advance(slot, parity)  # v's are the same
            item = i32(item + cuda.gridDim.x)

    return produce


def _from_turned(t: Tile) -> tuple[Any, Any]:
    """The device functions that give where the values of a head lie turned, and that ask for a copy of a tile of them."""
    from tccompile.kernels.ptx import hopper as hw
    from tccompile.kernels.ptx import mma
    from tccompile.kernels.ptx.core import i32, inline, types, u64

    i64, bn, wide, v_bytes = types.int64, t.bn, t.wide, t.v_bytes

    @inline
    def values_of(turned, head, batch, integers):
        _, _, heads, share, _, columns, _ = integers
        number = i32(batch * mma.divide(heads, share) + head)
        return u64(turned + u64(i64(number) * i64(i32(columns + (bn - 1)) // bn) * v_bytes))

    @inline
    def copy(values, target, first, head, batch):
        hw.copy_bytes(target[1], u64(values + u64(i64(first) * wide)), target[0], i32(v_bytes))

    return values_of, copy


def _values_layout(t: Tile) -> tuple[int, int, int]:
    """How a tile of v lies, as `hopper.descriptor` takes it."""
    if t.size == 1:
        return Operand(t.wide, 0, t.kind, LINE, t.bn // LINE, True).layout
    return ROW, t.bn * ROW, 8 * ROW


def _products(t: Tile, rings: tuple[Any, Any, Any]) -> Any:
    """The part about what Tensor Cores are asked for, of a warpgroup.

    operands(base, group)             descriptors of its q, and of k and v, as they lie in the first buffers
    meet(group)                       named barriers: its own, and of the one whose turn is next; the last lets the first begin
    first(at, buffers, slot, parity, tid)               scores of an item's first tile, when they are there
    both(acc, weights, at, slots, turn)                   scores of a tile, and acc plus the weights times v, which is under way
                                                          until `settle`
    last(acc, weights, at, buffers, slot, parity, tid)  acc plus the weights times v, when it is there

    at: what `operands` gave; slots: of k and of v; turn: what `meet` gave
    """
    from tccompile.kernels.parts.part import part
    from tccompile.kernels.ptx import hopper as hw
    from tccompile.kernels.ptx.core import i32, inline, u64

    (_, k, v), warpgroups, in_turn, (steps, operands) = rings, t.warpgroups, t.in_turn, _operands(t, rings)
    k_units, v_units = t.k_bytes >> 4, t.v_bytes >> 4
    first_scores, undefined = hw.multiply(t.bn, steps, (True, True), (t.kind, t.kind)), hw.accumulators(t.bn)
    attend, weigh = hw.attend(t.bn, t.wide, steps, in_turn, t.kind), hw.weigh(t.bn, t.wide, t.kind)

    @inline
    def meet(group):
        own, other = i32(1 + group), i32(1 if group == warpgroups - 1 else 2 + group)
        if in_turn and group == warpgroups - 1:
            hw.arrive_named(other)
        return own, other

    @inline
    def first(at, buffers, slot, parity, tid):
        k.wait(buffers[1], slot, parity)
        s = first_scores(undefined(), at[0], at[1] + u64(slot * k_units), i32(0))
        hw.wgmma_wait_all()
        if tid & 127 == 0:
            k.release(k.hold(buffers[1], slot))
        return s

    @inline
    def both(acc, weights, at, slots, turn):
        k_tile, v_tile = at[1] + u64(slots[0] * k_units), at[2] + u64(slots[1] * v_units)
        if in_turn:
            hw.sync_named(turn[0])
            return attend(acc, weights, at[0], k_tile, v_tile, turn[1])
        return attend(acc, weights, at[0], k_tile, v_tile)

    @inline
    def last(acc, weights, at, buffers, slot, parity, tid):
        v.wait(buffers[2], slot, parity)
        acc = weigh(acc, weights, at[2] + u64(slot * v_units))
        if tid & 127 == 0:
            v.release(v.hold(buffers[2], slot))
        return acc

    return part(operands=operands, meet=meet, first=first, both=both, last=last)


def _operands(t: Tile, rings: tuple[Any, Any, Any]) -> tuple[tuple[tuple[int, int], ...], Any]:
    """Steps of the product q · kᵀ, and `operands` of `_products`."""
    from tccompile.kernels.ptx import hopper as hw
    from tccompile.kernels.ptx.core import inline, u64

    q_rows, k_rows = (Operand(n, 0, t.kind, ROW, t.boxes[0], True) for n in (t.bm, t.bn))
    steps = tuple(zip(q_rows.steps, k_rows.steps, strict=True))[: t.d * t.size // STEP]
    row_half, v_half = hw.descriptor(*q_rows.layout), hw.descriptor(*_values_layout(t))
    (q_at, k_at, v_at), group_bytes = (ring.first for ring in rings), q_rows.group_bytes

    @inline
    def operands(base, group):
        q_half = row_half | u64((base + q_at + group * group_bytes & 0x3FFFF) >> 4)
        k_half = row_half | u64((base + k_at & 0x3FFFF) >> 4)
        return q_half, k_half, v_half | u64((base + v_at & 0x3FFFF) >> 4)

    return steps, operands


def _sums(t: Tile, softmax: Any) -> Any:
    """The part about a warpgroup's results, of a `long` tile with what is kept in shared memory meanwhile.

    zeros()                           what an item begins with
    kept_at(base, group, tid)         a thread's place in shared memory
    kept(acc, address, left, parts, kept0, kept1, x, by)   results, zeros if they have just been kept; how many tiles are left
                                      until then; how often it was done; to which scores weights of what is kept are relative
    whole(acc, address, parts, kept0, kept1, x, sums, by)  an item's results with what is kept, divided by its sums of weights

    x: a thread's two rows' scores that weights are relative to; by: what scores are multiplied by
    """
    from tccompile.kernels.parts.part import part
    from tccompile.kernels.ptx import hopper as hw
    from tccompile.kernels.ptx import mma
    from tccompile.kernels.ptx.core import f32, i32, inline, u32

    long, turns, total_at, kept_bytes = t.long, t.turns, t.layout["totals"], t.totals_bytes
    add_kept, keep_sums, zeros, shrink = (
        hw.add_kept(t.wide // 2),
        hw.keep_sums(t.wide // 2),
        mma.zeros(t.wide // 2),
        softmax.shrink,
    )

    @inline
    def kept_at(base, group, tid):
        return u32(base + total_at + group * kept_bytes + (tid & 127) * 16)

    @inline
    def joined(acc, address, parts, kept0, kept1, x, by):
        if long and parts > 0:
            acc = add_kept(acc, address, shrink(kept0, x[0], by), shrink(kept1, x[1], by))
        return acc

    @inline
    def kept(acc, address, left, parts, kept0, kept1, x, by):
        if long:
            left = i32(left - 1)
            if left == 0:
                keep_sums(joined(acc, address, parts, kept0, kept1, x, by), address)
                acc, left, parts, kept0, kept1 = zeros(), i32(turns), i32(parts + 1), x[0], x[1]
        return acc, left, parts, kept0, kept1

    @inline
    def whole(acc, address, parts, kept0, kept1, x, sums, by):
        acc = joined(acc, address, parts, kept0, kept1, x, by)
        sum0, sum1 = softmax.sums(acc, sums[0], sums[1])
        each0, each1 = f32(1) / sum0 if sum0 > f32(0) else f32(0), f32(1) / sum1 if sum1 > f32(0) else f32(0)
        return softmax.scaled(acc, each0, each1)

    return part(zeros=zeros, kept_at=kept_at, kept=kept, whole=whole)


def _consume(t: Tile, rings: tuple[Any, Any, Any], place: Any, softmax: Any, storing: Any) -> Any:
    """The device function of the warpgroups: (thread, buffers, item, factor, integers, mask, e)."""
    from tccompile.kernels.ptx import hopper as hw
    from tccompile.kernels.ptx.core import cuda, f32, i32, inline

    (q, k, v), bn, turns, additive = rings, t.bn, t.turns, softmax.additive
    products, sums = _products(t, rings), _sums(t, softmax)
    settle = hw.settle(t.wide, t.packed, t.kind, t.size == 1 or t.e > SMALL)

    @inline
    def consume(thread, buffers, item, factor, integers, mask, e):
        base, warp, lane, tid = thread
        group, columns = i32(warp >> 2), integers[5]
        operands, column = products.operands(base, group), i32((lane & 3) * 2)
        turn, places = products.meet(group), storing.places(thread)
        by = f32(LOG2_E) if additive else factor
        kept_at = sums.kept_at(base, group, tid)
        (slot, parity), (slot_q, parity_q) = k.reader(), q.reader()
        while item < integers[0]:
            head, b, h, _, m0, last, tiles = place(item, integers)
            end0, end1, safe, mask0, mask1 = softmax.sees((warp, lane, group, column), m0, (b, h), integers, mask)
            acc = sums.zeros()
            x0, x1, sum0, sum1 = f32(-math.inf), f32(-math.inf), f32(0), f32(0)
            if tiles > 0:
                words = softmax.read((mask0, mask1), i32(0), column, columns)
                q.wait(buffers[0], slot_q, parity_q)
                s = products.first(operands, buffers, slot, parity, tid)
                sight = column, end0, end1, safe
                w, x0, x1, _, _, sum0, sum1, _ = softmax.weigh_first(s, words, (factor, by), i32(0), sight, x0, x1)
                weights = softmax.packed(w)
                before, parity_before = slot, parity
                slot, parity = k.advance(slot, parity)
                n, left, parts, kept0, kept1 = i32(bn), i32(turns), i32(0), x0, x1
                while n < last:
                    words = softmax.read((mask0, mask1), n, column, columns)
                    k.wait(buffers[1], slot, parity)
                    v.wait(buffers[2], before, parity_before)
                    s, acc = products.both(acc, weights, operands, (slot, before), turn)
                    if tid & 127 == 0:
                        k.release(k.hold(buffers[1], slot))
                    w, x0, x1, a0, a1, add0, add1, total = softmax.weigh(s, words, (factor, by), n, sight, x0, x1)
                    sum0, sum1 = f32(sum0 * a0 + add0), f32(sum1 * a1 + add1)
                    acc, w = settle(acc, w, total)
                    if tid & 127 == 0:
                        v.release(v.hold(buffers[2], before))
                    weights = softmax.packed(w)
                    acc = softmax.scaled(acc, a0, a1)
                    acc, left, parts, kept0, kept1 = sums.kept(acc, kept_at, left, parts, kept0, kept1, (x0, x1), by)
                    before, parity_before = slot, parity
                    slot, parity = k.advance(slot, parity)
                    n = i32(n + bn)
                if tid & 127 == 0:
                    q.release(q.hold(buffers[0], slot_q))
                slot_q, parity_q = q.advance(slot_q, parity_q)
                acc = products.last(acc, weights, operands, buffers, before, parity_before, tid)
                acc = sums.whole(acc, kept_at, parts, kept0, kept1, (x0, x1), (sum0, sum1), by)
            storing.store(acc, places, warp, head, m0, integers[4], e)
            item = i32(item + cuda.gridDim.x)

    return consume


def _storing(t: Tile, params: Value) -> tuple[Any, tuple[Any, ...]]:
    """The part places(thread) and store(acc, places, warp, head, first row, rows, e), and the types of what `e` holds.

    Each warp stages its 16 rows, some columns at a time; a lane takes 8 columns of every so-manieth row.
    """
    from tccompile.kernels.parts.part import part
    from tccompile.kernels.ptx import hopper as hw
    from tccompile.kernels.ptx.core import cuda, i32, inline, u32
    from tccompile.kernels.ptx.softmax import leading

    store, extra = epilogue.build(params)
    results = leading(t.wide // 2, t.e // 2)
    staged, pitch, half, at_results = t.staged, t.pitch, 2 * t.staged + 16, t.layout["results"]
    stage_results, parts, load4 = hw.stage(t.e, staged, pitch), t.e // staged, hw.load_shared_f32x4
    slab_bytes, long, sync_group = t.slab_bytes, t.long, hw.sync_group
    lane_groups = staged // 8
    apart, turns = 32 // lane_groups, lane_groups // 2 if lane_groups > 1 else 1

    @inline
    def places_of(thread):
        """Where a lane's results are staged, and where it reads those that it stores: of which row and 8 columns."""
        base, warp, lane, _ = thread
        slab = u32(base + at_results + (warp >> 2) * slab_bytes + (warp & 3) * (16 * pitch))
        corner = u32(slab + (lane >> 2) * pitch + ((lane >> 1) & 1) * half + (lane & 1) * 8)
        row, lane_group = i32(lane // lane_groups), i32(lane % lane_groups)
        return corner, u32(slab + row * pitch + lane_group * 16), row, lane_group

    @inline
    def store_rows(acc, places, warp, head, m0, rows, e):
        corner, at, row, lane_group = places
        acc, first, c = results(acc), i32(m0 + warp * 16 + row), i32(lane_group * 8)
        if long:  # all of the warpgroup have read what was in the slabs' place
            sync_group(i32(1 + (warp >> 2)))
        if m0 + warp * 16 < rows:
            for chunk in range(parts):
                stage_results(acc, corner, i32(chunk))
                cuda.syncwarp()
                for turn in range(turns):
                    if row + turn * apart < 16 and first + turn * apart < rows:
                        source = u32(at + turn * (apart * pitch))
                        values = load4(source) + load4(u32(source + half))
                        store(values, i32(head * rows + first + turn * apart), i32(c + chunk * staged), e)
                cuda.syncwarp()
        if long:
            sync_group(i32(1 + (warp >> 2)))

    return part(places=places_of, store=store_rows), extra
