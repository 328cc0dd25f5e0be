"""Attention on Hopper: the tensor copy engine feeds wgmma; softmax and products overlap.

A block computes 64 rows of one head for each of its warpgroups, an item, and then the item that lies a grid further, if there
is one; one warp more asks for copies of q once an item, and of k and v tile by tile, in rings of `STAGES` buffers each, so
that an item's first rows come while results of the one before go out. A warpgroup asks for the scores of a tile and, with the
weights of the tile before, for its share of the result, and computes weights from the scores while the latter is under way.
With two warpgroups or more they take turns in asking, so that one multiplies while another computes exponentials (after Shah
et al., FlashAttention-3, 2024). Weights go into the second product from registers; v is read as its rows lie, transposed by
wgmma.

Of a mask each thread reads what its accumulators need, two columns at a time, before it asks for the scores. With what is added
they are logarithms to base e until weights are computed, so that the lowest float32 stays finite.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from tccompile.arch import KIB, Arch
from tccompile.ir.ops import Attention, Op
from tccompile.ir.program import Program
from tccompile.ir.tensor import Tensor
from tccompile.ir.types import DType
from tccompile.kernels import epilogue
from tccompile.kernels.attention import op_extents
from tccompile.kernels.attention_mma import LOG2_E, unfit
from tccompile.kernels.codegen import execute, tuple_of
from tccompile.kernels.loops import refusal
from tccompile.kernels.spec import (
    F32,
    I32,
    LAUNCH_US,
    Arg,
    Config,
    Function,
    Kernel,
    Launch,
    Ptr,
    TiledMap,
    Value,
    Work,
    code,
    traffic_us,
)

STAGES = 2
"""Tiles of k, and of v, that are in shared memory at once."""

COLUMNS = 64
"""Halves of a row that a box of the copy engine has: 128 bytes, the widest swizzle."""


@dataclass(frozen=True)
class Tile:
    """What a block does: warpgroups (64 rows each), rows of k and v at a time, elements of q's and v's heads in 16s and 8s.

    words  of a mask, in registers of a thread for each 8 of its columns
    """

    warpgroups: int
    bn: int
    d: int
    e: int
    words: int = 0

    @property
    def bm(self) -> int:
        return 64 * self.warpgroups

    @property
    def exchange(self) -> bool:
        """Whether the copying warp leaves its registers to the others, which takes a whole warpgroup of it."""
        return self.warpgroups > 1

    @property
    def threads(self) -> int:
        return 128 * self.warpgroups + (128 if self.exchange else 32)

    @property
    def registers(self) -> tuple[int, int]:
        """With an exchange: what a thread of the copying warpgroup keeps, and what one of the others then has."""
        launched = 65536 // self.threads // 8 * 8
        return 32, (launched * self.threads // 128 - 32) // self.warpgroups // 8 * 8

    @property
    def held(self) -> int:
        """Registers of a thread for scores, weights, results and the mask."""
        return self.bn // 2 + self.bn // 4 + self.e // 2 + self.bn // 8 * self.words

    @property
    def boxes(self) -> tuple[int, int]:
        """Boxes side by side in a row of q and k, and in one of v."""
        return -(-self.d // COLUMNS), -(-self.e // COLUMNS)

    @property
    def q_bytes(self) -> int:
        return self.boxes[0] * self.bm * 2 * COLUMNS

    @property
    def k_bytes(self) -> int:
        return self.boxes[0] * self.bn * 2 * COLUMNS

    @property
    def v_bytes(self) -> int:
        return self.boxes[1] * self.bn * 2 * COLUMNS

    @property
    def staged(self) -> int:
        """Columns of the result that a warp stages at once on their way to the epilogue."""
        return next(n for n in (32, 16, 8) if self.e % n == 0)

    @property
    def pitch(self) -> int:
        """Bytes between staged rows: 8 columns more than there are, so that a warp's writes meet no bank twice."""
        return 4 * (self.staged + 8)

    @property
    def staging(self) -> int:
        return self.q_bytes + STAGES * (self.k_bytes + self.v_bytes)

    @property
    def barriers(self) -> int:
        return self.staging + self.bm * self.pitch

    @property
    def smem(self) -> int:
        """Bytes to ask for: 1 KiB more than used, since swizzled tiles begin at multiples of it."""
        return self.barriers + 8 * (2 + 4 * STAGES) + KIB


SHAPES = ((1, 64), (1, 128), (2, 64), (2, 96), (2, 128), (3, 64), (3, 96), (3, 128))
"""Warpgroups of a block, and rows of k and v that they take at a time."""

SLACK = 56
"""Registers that a thread needs beside what it holds of tiles."""

FAR = -1e4
"""A row whose highest score is less, with a mask, sees nothing that counts: then scores are taken off it before they are scaled.

The product of such a score and log2(e) is rounded to more than an exponent may be off, or beyond float32.
"""

EARLY_US = 2.0
"""What a launch's first blocks have done of their start when the launch before has ended."""

AGAIN = 0.5
"""Of an item's start and end, what a block that goes on with it takes: its rows are there by then."""

MASKS = (DType.F32, DType.F16, DType.BOOL)


def tiles_of(op: Attention, program: Program, arch: Arch) -> Iterator[Tile]:
    """The tiles that fit registers and shared memory."""
    q, v = program.tensors[op.q], program.tensors[op.v]
    for warpgroups, bn in SHAPES:
        t = Tile(warpgroups, bn, -(-q.shape[3] // 16) * 16, -(-v.shape[3] // 8) * 8, _words(op, program))
        room = t.registers[1] if t.exchange else 240
        if t.smem <= arch.smem_block and t.held + SLACK <= room + (24 if warpgroups == 3 else 0):
            yield t


def _words(op: Attention, program: Program) -> int:
    """Words of the mask that a thread holds for 8 columns: two elements of each of its rows, or of one that all rows share."""
    if op.mask is None:
        return 0
    mask = program.tensors[op.mask]
    return (2 if mask.dtype is DType.F32 else 1) * (2 if mask.shape[2] > 1 else 1)


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
    """Boxes of 64 elements by `rows` rows of a head, of (elements, rows, heads, batches)."""
    b, h, m, e = t.shape
    steps = tuple(2 * (s if n > 1 else 8) for n, s in zip((m, h, b), (t.strides[2], t.strides[1], t.strides[0]), strict=True))
    return TiledMap(t.name, 0, (e, m, h, b), steps, (COLUMNS, rows, 1, 1), (1, 1, 1, 1))


def resident(t: Tile, arch: Arch) -> int:
    """Blocks that a multiprocessor holds at once, by shared memory and registers."""
    if t.exchange:
        return 1
    # Each quarter of a multiprocessor has registers of its own, 512 for a lane: five warps of 192 are one block, not two.
    warps = 4 * (512 // (-(-(t.held + 28) // 8) * 8))
    return max(1, min(arch.smem_sm // (t.smem + KIB), warps // (t.threads // 32)))


class AttentionSm90(Kernel):
    """Attention of half-precision heads of up to 256 elements, by TMA and wgmma."""

    name = "attention_sm90"
    realises = Attention
    tensor_cores = True

    def supports(self, op: Op, program: Program, arch: Arch) -> str | None:
        assert isinstance(op, Attention)
        if arch.mma != "wgmma":
            return f"{arch.name} has no wgmma instructions"
        if reason := unfit(op, program):
            return reason
        if reason := _mask_unfit(op, program):
            return reason
        for name in (op.q, op.k, op.v):
            t = program.tensors[name]
            if t.storage in program.inputs or t.storage in program.outputs:
                return f"{name} is a model input or output, whose address may change; tensor maps hold addresses"
        if not any(True for _ in tiles_of(op, program, arch)):
            return f"its heads{'' if op.mask is None else ' and mask'} do not fit registers and shared memory"
        return refusal(op, program, epilogue.frame_of(op, program))

    def configs(self, op: Op, program: Program, arch: Arch) -> Iterator[Config]:
        assert isinstance(op, Attention)
        heads, rows, n = op_extents(op, program)
        for t in tiles_of(op, program, arch):
            if (t.warpgroups == 1 or t.bm < rows + 64) and (t.bn == 64 or t.bn < 2 * n):
                for persistent in (False, True)[: 1 + (heads * -(-rows // t.bm) > arch.sms * resident(t, arch))]:
                    yield {"warpgroups": t.warpgroups, "bn": t.bn, "persistent": persistent}

    def cost(self, op: Op, program: Program, config: Config, arch: Arch) -> float:
        assert isinstance(op, Attention)
        t = _tile(config, op, program, arch)
        heads, rows, n = op_extents(op, program)
        blocks = heads * -(-rows // t.bm)
        seen = min(n, rows / 2 + op.causal + t.bm) if op.causal is not None and rows > t.bm else n
        together = min(resident(t, arch), -(-blocks // arch.sms))
        # Cycles of 1.7 GHz that a warpgroup takes for a tile of k and v; fitted to 50 times on an H200.
        products = t.bn * (t.d + t.e) / 32
        softmax = 4.9 * t.bn + 2.25 * t.e  # of scores, and to scale the results
        if op.mask is not None:  # of rows of their own, eight lines for each load
            softmax += t.bn * t.words * (3 if program.tensors[op.mask].shape[2] > 1 else 1.6)
        # One warpgroup does either by turns; of two, one multiplies while the other computes exponentials, for the most part.
        shares = together * t.warpgroups
        exposed = {1: 1.0, 2: 0.33}.get(shares, 0.0)
        each = max(products, softmax) + exposed * min(products, softmax) + (120 if shares == 1 else 46)
        waves = blocks / (arch.sms * together)
        waves = math.ceil(waves) if config["persistent"] else max(1.0, waves, min(math.ceil(waves), waves + 0.5))
        start = 1.55 + t.bm * (t.d + t.e) / 15500 + (0.2 if t.exchange else 0)  # and the end: results on their way out
        starts = 1 + AGAIN * (waves - 1) if config["persistent"] else waves
        time = waves * math.ceil(max(seen, 1) / t.bn) * shares * each / 1700 + starts * start - EARLY_US
        return LAUNCH_US + max(time, traffic_us(op, program, arch))

    def work(self, op: Op, program: Program, config: Config, arch: Arch) -> Work:
        assert isinstance(op, Attention)
        heads, rows, n = op_extents(op, program)
        if 0 in program.tensors[op.y].padded:
            return Work(())
        t = _tile(config, op, program, arch)
        q, k, v = (program.tensors[name] for name in (op.q, op.k, op.v))
        stored = epilogue.describe(op, program, epilogue.frame_of(op, program))
        tiles = -(-rows // t.bm)
        items = tiles * heads
        integers = (items, tiles, q.shape[1], q.shape[1] // k.shape[1], rows, n, op.causal or 0)
        kind, own_rows = "none", False
        mask: tuple[Arg, ...] = ()
        if op.mask is not None:
            m = program.tensors[op.mask]
            kind, own_rows = m.dtype.value, m.shape[2] > 1
            mask = (Ptr(op.mask), *(I32(s if n > 1 else 0) for n, s in zip(m.shape[:3], m.strides[:3], strict=True)))
        scale = F32(op.scale * (LOG2_E if kind in ("none", "bool") else 1))
        args = (_map(q, t.bm), _map(k, t.bn), _map(v, t.bn), scale, *map(I32, integers), *mask, *stored.args)
        compiled = code(
            self.name,
            warpgroups=t.warpgroups,
            bn=t.bn,
            d=t.d,
            e=t.e,
            mask=kind,
            own_rows=own_rows,
            causal=op.causal is not None,
            epilogue=stored.params,
        )
        grid = min(items, arch.sms * resident(t, arch)) if config["persistent"] else items
        return Work((Launch(compiled, (grid, 1, 1), t.threads, args, t.smem),))

    def build(self, arch: Arch, **params: Any) -> Function:
        tile = Tile(params["warpgroups"], params["bn"], params["d"], params["e"])
        return _function(tile, params["mask"], params["own_rows"], params["causal"], params["epilogue"])


MAPS = ("map_q", "map_k", "map_v")
INTEGERS = ("items", "tiles_m", "heads", "share", "rows", "columns", "ahead")
"""Items, tiles of a head's rows, heads of a batch, how many share a head of k, extents, and how far ahead a causal row sees."""


def _function(t: Tile, mask_kind: str, own_rows: bool, causal: bool, params: Value) -> Function:
    """The kernel for a tile: the code that `work` gives its arguments to."""
    from numba import cuda
    from numba.cuda import types

    from tccompile.kernels.device_math import inline
    from tccompile.kernels.ptx import hopper as hw
    from tccompile.kernels.ptx import mma, softmax
    from tccompile.kernels.ptx.core import f32, i32, u32, u64

    i64 = types.int64
    bm, bn, warpgroups, exchange, consumers = t.bm, t.bn, t.warpgroups, t.exchange, 128 * t.warpgroups
    q_bytes, k_bytes, v_bytes = t.q_bytes, t.k_bytes, t.v_bytes
    k_ring, v_ring, barriers = q_bytes, q_bytes + STAGES * k_bytes, t.barriers
    d_boxes, e_boxes = t.boxes
    q_box, kv_box = bm * 2 * COLUMNS, bn * 2 * COLUMNS
    steps = tuple((i // 4 * q_box + i % 4 * 32, i // 4 * kv_box + i % 4 * 32) for i in range(t.d // 16))
    row_half, v_half = hw.descriptor(128, 0, 1024), hw.descriptor(128, kv_box, 1024)
    k_units, v_units = k_bytes >> 4, v_bytes >> 4
    in_turn = warpgroups > 1
    first_scores, empty_scores = hw.multiply(bn, steps, (True, True)), hw.accumulators(bn)
    attend, weigh, settle = hw.attend(bn, t.e, steps, in_turn), hw.weigh(bn, t.e), hw.settle(bn, t.e)
    zeros = mma.zeros(t.e // 2)
    groups = bn // 8
    highest, cut, scaled = softmax.highest(groups), softmax.cut(groups), softmax.scaled(t.e // 8)
    below = softmax.below(groups)
    exponentials, halves = softmax.exponentials(groups), softmax.halves(groups)
    row_maximum, row_sum, exp2 = softmax.row_maximum(), softmax.row_sum(), softmax.exp2
    store, extra = epilogue.build(params)
    staged, pitch, half = t.staged, t.pitch, 2 * t.staged + 16
    stage_results, parts = hw.stage(t.e, staged, pitch), t.e // staged
    lane_groups = staged // 8
    apart, turns = 32 // lane_groups, lane_groups // 2 if lane_groups > 1 else 1
    load4 = hw.load_shared_f32x4
    shrink, grow = hw.set_registers(t.registers[0], False), hw.set_registers(t.registers[1], True)
    has_mask, additive = mask_kind != "none", mask_kind not in ("none", "bool")
    kind = DType(mask_kind) if has_mask else DType.F32
    size = kind.size
    read_all, read_some = (softmax.read_mask(groups, kind, own_rows, guarded) for guarded in (False, True))
    masked = softmax.masked(groups, kind, own_rows)

    @inline
    def read_mask(at0, at1, n, column, columns):
        """The mask's words for the tile whose first column is n."""
        at0, at1, left = u64(at0 + u64(n * size)), u64(at1 + u64(n * size)), i32(columns - n)
        if left >= bn:
            return read_all(at0, at1, left)
        return read_some(at0, at1, i32(left - column))

    @inline
    def taken_off(x, by):
        """What is taken off the scaled scores of a row whose highest is x."""
        return f32(0) if x == f32(-math.inf) else f32(x * by)

    @inline
    def near(s, x0, x1, b0, b1):
        """Scores and what is taken off them once they are scaled, or already off them where rows see nothing that counts."""
        if x0 < f32(FAR) or x1 < f32(FAR):
            return below(s, taken_off(x0, f32(1)), taken_off(x1, f32(1))), f32(0), f32(0)
        return s, b0, b1

    @inline
    def decay(was, x, b, by):
        """What is left of earlier weights when a row's highest score goes from `was` to x."""
        if additive:
            return exp2(f32(f32(was - taken_off(x, f32(1))) * by))
        return exp2(f32(was * by - b))

    @inline
    def place(item, integers):
        """An item's head of all, its batch, head there and head of k, its first row, the columns that it sees, their tiles."""
        _, tiles_m, heads, share, rows, columns, ahead = integers
        head = mma.divide(item, tiles_m)
        tile_m = i32(item - head * tiles_m)
        # The longest causal rows first: blocks are started in order.
        m0 = i32((tiles_m - 1 - tile_m) * bm) if causal else i32(tile_m * bm)
        b = mma.divide(head, heads)
        h = i32(head - b * heads)
        last = i32(min(columns, i32(min(rows, i32(m0 + bm)) + ahead))) if causal else columns
        return head, b, h, mma.divide(h, share), m0, last, i32(i32(max(i32(0), last) + (bn - 1)) // bn)

    @inline
    def produce(map_q, map_k, map_v, base, q_full, item, integers):
        q_empty, k_full, k_empty = u32(q_full + 8), u32(q_full + 16), u32(q_full + 16 + 8 * STAGES)
        v_full, v_empty = u32(q_full + 16 + 16 * STAGES), u32(q_full + 16 + 24 * STAGES)
        slot, parity, parity_q = i32(0), i32(1), i32(1)
        while item < integers[0]:
            _, b, h, g, m0, _, tiles = place(item, integers)
            if tiles > 0:
                hw.barrier_wait(q_empty, parity_q)
                hw.barrier_expect(q_full, q_bytes)
                for c in range(d_boxes):
                    hw.copy_box4(u32(base + c * q_box), map_q, q_full, i32(c * COLUMNS), m0, h, b)
                parity_q = i32(parity_q ^ 1)
            for tile in range(tiles):
                n = i32(tile * bn)
                full, at = u32(k_full + 8 * slot), u32(base + k_ring + slot * k_bytes)
                hw.barrier_wait(u32(k_empty + 8 * slot), parity)
                hw.barrier_expect(full, k_bytes)
                for c in range(d_boxes):
                    hw.copy_box4(u32(at + c * kv_box), map_k, full, i32(c * COLUMNS), n, g, b)
                full, at = u32(v_full + 8 * slot), u32(base + v_ring + slot * v_bytes)
                hw.barrier_wait(u32(v_empty + 8 * slot), parity)
                hw.barrier_expect(full, v_bytes)
                for c in range(e_boxes):
                    hw.copy_box4(u32(at + c * kv_box), map_v, full, i32(c * COLUMNS), n, g, b)
                slot = i32(slot + 1)
                if slot == STAGES:
                    slot, parity = i32(0), i32(parity ^ 1)
            item = i32(item + cuda.gridDim.x)

    @inline
    def body(map_q, map_k, map_v, factor, integers, mask, e):
        items, _, _, _, rows, columns, ahead = integers
        base = u32((hw.shared_address(cuda.shared.array(0, dtype=types.uint8)) + 1023) & 0xFFFFFC00)
        q_full = u32(base + barriers)
        q_empty, k_full, k_empty = u32(q_full + 8), u32(q_full + 16), u32(q_full + 16 + 8 * STAGES)
        v_full, v_empty = u32(q_full + 16 + 16 * STAGES), u32(q_full + 16 + 24 * STAGES)
        tid = i32(cuda.threadIdx.x)
        warp, lane = hw.uniform(i32(tid >> 5)), i32(tid & 31)
        if tid == 0:
            hw.barrier_init(q_full, 1)
            hw.barrier_init(q_empty, warpgroups)
            for s in range(STAGES):
                hw.barrier_init(u32(k_full + 8 * s), 1)
                hw.barrier_init(u32(v_full + 8 * s), 1)
                hw.barrier_init(u32(k_empty + 8 * s), warpgroups)
                hw.barrier_init(u32(v_empty + 8 * s), warpgroups)
            hw.fence_barrier_init()
            hw.prefetch_map(map_q)
            hw.prefetch_map(map_k)
            hw.prefetch_map(map_v)
        cuda.syncthreads()
        item = i32(cuda.blockIdx.x)
        hw.wait_for_earlier_grids()
        hw.let_later_grids_start()
        if warp >= consumers // 32:
            if exchange:
                shrink()
            if tid == consumers:
                produce(map_q, map_k, map_v, base, q_full, item, integers)
        else:
            if exchange:
                grow()
            group = i32(warp >> 2)
            q_half = row_half | u64((base + group * (64 * 2 * COLUMNS) & 0x3FFFF) >> 4)
            k_half = row_half | u64((base + k_ring & 0x3FFFF) >> 4)
            values_half = v_half | u64((base + v_ring & 0x3FFFF) >> 4)
            column = i32((lane & 3) * 2)
            own, other = i32(1 + group), i32(1 if group == warpgroups - 1 else 2 + group)
            if in_turn and group == warpgroups - 1:
                hw.arrive_named(other)
            # Each warp stages its 16 rows, some columns at a time; a lane takes 8 columns of every `apart`-th row.
            slab = u32(base + t_staging + warp * (16 * pitch))
            corner = u32(slab + (lane >> 2) * pitch + ((lane >> 1) & 1) * half + (lane & 1) * 8)
            row, part = i32(lane // lane_groups), i32(lane % lane_groups)
            at = u32(slab + row * pitch + part * 16)
            by = f32(LOG2_E) if additive else factor
            slot, parity, parity_q = i32(0), i32(0), i32(0)
            while item < items:
                head, b, h, _, m0, last, tiles = place(item, integers)
                # This thread's two rows, and what they see; `safe` columns are seen by all rows of the warpgroup.
                m = i32(m0 + warp * 16 + (lane >> 2))
                end0 = i32(min(columns, i32(m + 1 + ahead))) if causal else columns
                end1 = i32(min(columns, i32(m + 9 + ahead))) if causal else columns
                safe = i32(min(columns, i32(m0 + group * 64 + 1 + ahead))) if causal else columns
                if has_mask:
                    mask_at, mask_b, mask_h, mask_r = mask
                    line = i64(b) * mask_b + i64(h) * mask_h + column
                    mask0 = u64(mask_at + u64((line + i64(min(m, i32(rows - 1))) * mask_r) * size))
                    mask1 = u64(mask_at + u64((line + i64(min(i32(m + 8), i32(rows - 1))) * mask_r) * size))
                acc = zeros()
                x0, x1, sum0, sum1 = f32(-math.inf), f32(-math.inf), f32(0), f32(0)
                if tiles > 0:
                    if has_mask:
                        words = read_mask(mask0, mask1, i32(0), column, columns)
                    hw.barrier_wait(q_full, parity_q)
                    hw.barrier_wait(u32(k_full + 8 * slot), parity)
                    s = first_scores(empty_scores(), q_half, k_half + u64(slot * k_units), i32(0))
                    hw.wgmma_wait_all()
                    if tid & 127 == 0:
                        hw.barrier_arrive(u32(k_empty + 8 * slot))
                    if has_mask:
                        s = masked(s, words, factor)
                    if bn > safe:
                        s = cut(s, column, end0, end1)
                    x0, x1 = highest(s, x0, x1)
                    x0, x1 = row_maximum(x0), row_maximum(x1)
                    b0, b1 = taken_off(x0, by), taken_off(x1, by)
                    if additive:
                        s, b0, b1 = near(s, x0, x1, b0, b1)
                    s, sum0, sum1 = exponentials(s, by, b0, b1)
                    weights = halves(s)
                    before, parity_before = slot, parity
                    slot = i32(slot + 1)
                    if slot == STAGES:
                        slot, parity = i32(0), i32(parity ^ 1)
                    n = i32(bn)
                    while n < last:
                        if has_mask:
                            words = read_mask(mask0, mask1, n, column, columns)
                        hw.barrier_wait(u32(k_full + 8 * slot), parity)
                        hw.barrier_wait(u32(v_full + 8 * before), parity_before)
                        q_at, k_at, v_at = q_half, k_half + u64(slot * k_units), values_half + u64(before * v_units)
                        if in_turn:
                            hw.sync_named(own)
                            s, acc = attend(acc, weights, q_at, k_at, v_at, other)
                        else:
                            s, acc = attend(acc, weights, q_at, k_at, v_at)
                        if tid & 127 == 0:
                            hw.barrier_arrive(u32(k_empty + 8 * slot))
                        if has_mask:
                            s = masked(s, words, factor)
                        if n + bn > safe:
                            s = cut(s, i32(n + column), end0, end1)
                        was0, was1 = x0, x1
                        x0, x1 = highest(s, x0, x1)
                        x0, x1 = row_maximum(x0), row_maximum(x1)
                        b0, b1 = taken_off(x0, by), taken_off(x1, by)
                        if additive:
                            s, b0, b1 = near(s, x0, x1, b0, b1)
                        s, add0, add1 = exponentials(s, by, b0, b1)
                        a0, a1 = decay(was0, x0, b0, by), decay(was1, x1, b1, by)
                        sum0, sum1 = f32(sum0 * a0 + add0), f32(sum1 * a1 + add1)
                        acc, s = settle(acc, s)
                        if tid & 127 == 0:
                            hw.barrier_arrive(u32(v_empty + 8 * before))
                        weights = halves(s)
                        acc = scaled(acc, a0, a1)
                        before, parity_before = slot, parity
                        slot = i32(slot + 1)
                        if slot == STAGES:
                            slot, parity = i32(0), i32(parity ^ 1)
                        n = i32(n + bn)
                    if tid & 127 == 0:
                        hw.barrier_arrive(q_empty)
                    parity_q = i32(parity_q ^ 1)
                    hw.barrier_wait(u32(v_full + 8 * before), parity_before)
                    acc = weigh(acc, weights, values_half + u64(before * v_units))
                    if tid & 127 == 0:
                        hw.barrier_arrive(u32(v_empty + 8 * before))
                    sum0, sum1 = row_sum(sum0), row_sum(sum1)
                    acc = scaled(acc, f32(1) / sum0 if sum0 > f32(0) else f32(0), f32(1) / sum1 if sum1 > f32(0) else f32(0))

                first, c = i32(m0 + warp * 16 + row), i32(part * 8)
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
                item = i32(item + cuda.gridDim.x)

    t_staging = t.staging
    masks = ["mask", "mask_b", "mask_h", "mask_r"] if has_mask else []
    more = [f"e{i}" for i in range(len(extra))]
    text = f"def kernel({', '.join([*MAPS, 'factor', *INTEGERS, *masks, *more])}):\n"
    text += f"    body({', '.join(MAPS)}, factor, {tuple_of(INTEGERS)}, {tuple_of(masks)}, {tuple_of(more)})\n"
    signature = types.void(u64, u64, u64, f32, *[i32] * len(INTEGERS), *([u64, *[i32] * 3] if has_mask else []), *extra)
    return Function(execute(text, {"body": body}, "kernel"), signature, t.threads)
