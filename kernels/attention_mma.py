"""Attention on Tensor Cores by mma.sync: sm_75 and all later generations.

A block computes 64 rows of one head, 16 a warp. It walks k and v `bn` rows at a time: scores come into registers as accumulators
and leave them as the left operand of the second product, so that neither they nor their exponentials see shared memory. The
softmax is online (see attention.py), in float32 and to base 2. A tile of k or v is copied while the other one is multiplied.
Up to 16 rows of q are every warp's; then each has a quarter of a tile's rows of k, and results are added up at the end.

Where blocks are too few to fill the GPU, as for few rows of q and many of k, the rows of k are split over blocks: each writes its
part's results, as they are before they are divided by the sum of weights, with each row's highest score and that sum; the last
one to arrive, by a counter, adds the parts up.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from tccompile.arch import KIB, Arch, Feature
from tccompile.ir.extent import ceil_div, round_up
from tccompile.ir.ops import Attention, Op
from tccompile.ir.program import Program
from tccompile.ir.tensor import Tensor
from tccompile.ir.types import DType
from tccompile.kernels import epilogue
from tccompile.kernels.attention import INTEGERS, arguments, op_extents
from tccompile.kernels.codegen import definition, execute, tuple_of
from tccompile.kernels.implicit_gemm import CHUNK, split_steps
from tccompile.kernels.loops import refusal
from tccompile.kernels.ptx.atoms import ATOMS, Atom, of_warpgroups, warp_atom
from tccompile.kernels.rates import measured
from tccompile.kernels.spec import (
    I32,
    Arg,
    Config,
    Counters,
    Function,
    Kernel,
    Launch,
    Scratch,
    Work,
    code,
    traffic_us,
)

SPLIT = ("partial", "counter", "each")
"""Where k is split: addresses of the workspace and of the counters, and rows of k in a part."""

BM, THREADS = 64, 128

FEW = 16
"""Rows of q that one warp can hold: up to so many, the warps share out the rows of k."""

MOST_SPLITS = 32
"""Parts of k: a lane of a warp has one each when they are joined."""

JOINED = 8
"""Threads that add up the parts of 8 elements of a row."""

MOST = 256
"""Elements of a head: registers hold no more of a row's result."""

LOG2_E = math.log2(math.e)
LEAST = -3e38
"""Finite masks times log2(e) stay finite: a row whose mask is the lowest float32 throughout is an even mean, as in float32."""


KINDS = {DType.F16: "f16", DType.BF16: "bf16", DType.E4M3: "e4m3"}
"""Types of q, k and v that Tensor Cores are fed with, and what instructions call them."""


def unfit(op: Attention, program: Program) -> str | None:
    """None if copies of 8 elements of rows can feed Tensor Cores, else the rule that does not hold."""
    if not 0 < op.scale < 1e4:
        return f"its scale is {op.scale:g}; the greatest score is looked for before it is scaled"
    for name in (op.q, op.k, op.v):
        t = program.tensors[name]
        if 0 in t.shape:
            return f"an extent of {name} is 0"
        if t.dtype not in KINDS:
            return f"{name} is {t.dtype.value}; Tensor Cores are fed with float16, bfloat16 or E4M3"
        if t.shape[3] > MOST:
            return f"heads of {t.shape[3]} elements; at most {MOST} fit registers"
        if t.strides[3] != 1 and t.padded[3] > 1:
            return f"neighbouring elements of {name}'s heads are {t.strides[3]} apart in memory"
        if t.padded[3] < _chunks(t) * CHUNK:
            return f"{name} has {t.padded[3]} elements a head in memory, no multiple of {CHUNK}"
        steps = [t.offset, *(s for n, s in zip(t.shape[:3], t.strides[:3], strict=True) if n > 1)]
        if any(s % CHUNK for s in steps):
            return f"rows of {name} do not begin at multiples of {CHUNK * t.dtype.size} bytes"
    types = {program.tensors[name].dtype for name in (op.q, op.k, op.v)}
    if len(types) > 1 and DType.BF16 in types:
        return "q, k and v are bfloat16 and another type"
    return None


def _chunks(t: Tensor) -> int:
    """Chunks of a head's row."""
    return ceil_div(t.shape[3], CHUNK)


def _pitch(chunks: int) -> int:
    """Bytes from row to row in shared memory: an odd number of chunks, so that eight rows' chunks lie in different banks."""
    return 16 * (round_up(chunks, 2) + 1)


def smem_of(chunks: tuple[int, int], bn: int, few: bool = False) -> int:
    """Bytes of shared memory: q, a tile of k and one of v, later the warps' results or the parts' weights; and room to align."""
    operands = ((FEW if few else BM) + bn) * _pitch(chunks[0]) + bn * _pitch(chunks[1])
    return max(operands, BM * 4 * _slab(chunks[1]), BM * 4 * MOST_SPLITS) + 128


def _slab(chunks: int) -> int:
    """Floats from row to row where a warp turns its results round."""
    return round_up(chunks, 2) * CHUNK + 8


class AttentionMma(Kernel):
    """Attention of heads of up to 256 elements in fp16 or bf16, or in E4M3, which become halves of fp16."""

    name = "attention_mma"
    realises = Attention
    tensor_cores = True

    def supports(self, op: Op, program: Program, arch: Arch) -> str | None:
        assert isinstance(op, Attention)
        if reason := unfit(op, program):
            return reason
        if self._atom(op, program, arch) is None:
            return f"{arch.name} has no mma.m16n8 instructions of {program.tensors[op.q].dtype.value}"
        if not any(True for _ in self.configs(op, program, arch)):
            return f"its tiles do not fit {arch.smem_block // KIB} KiB of shared memory"
        return refusal(op, program, epilogue.frame_of(op, program))

    def configs(self, op: Op, program: Program, arch: Arch) -> Iterator[Config]:
        assert isinstance(op, Attention)
        heads, rows, n = op_extents(op, program)
        chunks, blocks = self._chunks(op, program), heads * ceil_div(rows, BM)
        few = rows <= FEW
        for bn in (64, 128) if few else (64, 32):
            small = max(chunks) <= 16 and op.mask is None  # registers, and code for a mask's elements
            if smem_of(chunks, bn, few) <= arch.smem_block and (few or bn == 32 or small):
                steps, most = ceil_div(n, bn), _resident(chunks, bn, few, True, op.mask is not None, arch)
                longest = steps if few else steps // 2
                wanted = [1, *(min(arch.sms * r // blocks, MOST_SPLITS, longest) for r in range(1, most + 1))]
                for splits in sorted({split_steps(steps, w)[0] for w in wanted if w > 0}):
                    yield {"bn": bn, "splits": splits}

    def takes(self, op: Op, program: Program, config: Config, arch: Arch) -> bool:
        """Rows of k are split into as many parts as at other sizes, or fewer: by one code, where there are two at least."""
        assert isinstance(op, Attention)
        steps, splits = ceil_div(op_extents(op, program)[2], int(config["bn"])), int(config["splits"])
        split = split_steps(steps, splits)[0] > 1
        return split == (splits > 1) and any(own["bn"] == config["bn"] for own in self.every(op, program, arch))

    def cost(self, op: Op, program: Program, config: Config, arch: Arch) -> float:
        assert isinstance(op, Attention)
        own = measured(arch).attention_mma
        heads, rows, n = op_extents(op, program)
        chunks, bn, splits = self._chunks(op, program), int(config["bn"]), int(config["splits"])
        parts, each = split_steps(ceil_div(n, bn), splits)
        blocks = heads * ceil_div(rows, BM) * parts
        seen = min(n, rows / 2 + op.causal) if op.causal is not None and rows > BM else n
        few = rows <= FEW
        resident = _resident(chunks, bn, few, parts > 1, op.mask is not None, arch)
        together = min(resident, ceil_div(blocks, arch.sms))
        # Fitted to 30 times on an H200; other generations' rate is an estimate.
        rate = (own.rate if of_warpgroups(arch) else 0.7) * arch.tensor_tflops * 1e6 / arch.sms
        each_us = 2.0 * (FEW if few else BM) * bn * CHUNK * sum(chunks) / rate
        if op.mask is not None:
            each_us += bn * (own.masked_us if program.tensors[op.mask].shape[2] > 1 else own.masked_alike_us)
        step_us = own.step_us + together * each_us
        if few:  # an estimate: memory's time, or one block's way through a step
            each_us = max(each_us, 2.0 * bn * CHUNK * sum(chunks) * arch.sms / (arch.gbps * 1e3 * 0.9))
            step_us = max(own.step_us + each_us, together * each_us)
        steps = min(math.ceil(max(seen, 1) / bn), each)
        waves = blocks / (arch.sms * together)
        waves = max(1.0, waves, min(math.ceil(waves), waves + 0.5))
        time = waves * (steps * step_us + own.item_us * together)
        return measured(arch).launch_us + max(time, traffic_us(op, program, arch)) + self._join_us(op, program, parts, arch)

    def _join_us(self, op: Attention, program: Program, parts: int, arch: Arch) -> float:
        """To write the parts and to read them, eight at a time: fitted to times on an H200."""
        if parts == 1:
            return 0.0
        _, rows, _ = op_extents(op, program)
        rounds = ceil_div(min(rows, BM) * round_up(self._chunks(op, program)[1], 2) * JOINED, THREADS)
        moved = 2 * _scratch(op, program, parts) / (arch.gbps * 1e3 * 0.9)
        return measured(arch).attention_mma.join_us * rounds * ceil_div(parts, JOINED) + moved

    def work(self, op: Op, program: Program, config: Config, arch: Arch) -> Work:
        assert isinstance(op, Attention)
        heads, rows, columns = op_extents(op, program)
        if 0 in program.tensors[op.y].padded:
            return Work(())
        chunks, tiles, bn = self._chunks(op, program), ceil_div(rows, BM), int(config["bn"])
        parts, each = split_steps(ceil_div(columns, bn), int(config["splits"]))
        stored = epilogue.describe(op, program, epilogue.frame_of(op, program))
        atom = self._atom(op, program, arch)
        assert atom is not None
        compiled = code(
            self.name,
            instruction=atom.name,
            chunks=chunks,
            bn=bn,
            few=rows <= FEW,
            split=parts > 1,
            mask="none" if op.mask is None else program.tensors[op.mask].dtype.value,
            causal=op.causal is not None,
            sizes=tuple(program.tensors[name].dtype.size for name in (op.q, op.k, op.v)),
            epilogue=stored.params,
        )
        shared: tuple[Arg, ...] = (Scratch(), Counters(), I32(each * bn)) if parts > 1 else ()
        args = (*arguments(op, program, tiles), *shared, *stored.args)
        launch = Launch(compiled, (tiles * heads, parts, 1), THREADS, args, smem_of(chunks, bn, rows <= FEW))
        return Work((launch,), _scratch(op, program, parts), tiles * heads * 4) if parts > 1 else Work((launch,))

    def build(self, arch: Arch, **params: Any) -> Function:
        atom, chunks = ATOMS[params["instruction"]], tuple(params["chunks"])
        how = {name: params[name] for name in ("bn", "few", "split", "mask", "causal")}
        how["sizes"] = tuple(params["sizes"])
        return build(Form(atom, arch.has(Feature.ASYNC_COPIES), chunks, **how), params["epilogue"])

    def _atom(self, op: Attention, program: Program, arch: Arch) -> Atom | None:
        kind = "bf16" if program.tensors[op.q].dtype is DType.BF16 else "f16"
        return warp_atom(arch, kind, kind)

    def _chunks(self, op: Op, program: Program) -> tuple[int, int]:
        assert isinstance(op, Attention)
        return _chunks(program.tensors[op.q]), _chunks(program.tensors[op.v])


def _resident(chunks: tuple[int, int], bn: int, few: bool, split: bool, mask: bool, arch: Arch) -> int:
    """Blocks that a multiprocessor holds at once, by shared memory and registers."""
    held = round_up(chunks[1], 2) * CHUNK // 2 + (bn // 8 if few else bn // 2)  # results and scores
    # Without masks within 16 of what ptxas takes for sm_90a in nine variants, 74 to 182.
    registers = round_up(held + 66 + 10 * split + 40 * mask, 8)
    return max(1, min(arch.smem_sm // (smem_of(chunks, bn, few) + KIB), 512 // registers))  # a warp in each quarter


def _scratch(op: Attention, program: Program, parts: int) -> int:
    """Bytes of all parts: for each row that a block has, its elements, and its highest score and sum of weights."""
    heads, rows, _ = op_extents(op, program)
    elements = round_up(_chunks(program.tensors[op.v]), 2) * CHUNK
    return heads * ceil_div(rows, BM) * parts * min(rows, BM) * (elements + 2) * 4


def _warp_reductions() -> tuple[Any, Any]:
    """The device functions x → the greatest x of a warp, and their sum."""
    from tccompile.kernels.loops import device
    from tccompile.kernels.ptx.simt import shuffle

    distances = (16, 8, 4, 2, 1)
    found = [line for d in distances for line in (f"other = shuffle(x, i32({d}))", "x = larger(x, other)")]
    added = [f"x = x + shuffle(x, i32({d}))" for d in distances]
    return tuple(device("reduced", "x", [*lines, "return x"], shuffle=shuffle) for lines in (found, added))  # type: ignore[return-value]


def _warps_added(apart: int, behind: int) -> tuple[Any, Any]:
    """The device functions that add up the warps' results of 8 elements of a row, and that scale them.

    (line, at, by): addresses of the row and of the elements in the first warp's slab, `apart` bytes from the next; the row's
    highest score and sum are `behind` bytes from its beginning. Gives the elements, the highest score of all, and the sum.
    """
    from tccompile.kernels.loops import device
    from tccompile.kernels.ptx import memory, mma, softmax
    from tccompile.kernels.ptx.core import u32

    warps, lanes = range(THREADS // 32), range(CHUNK)
    lines = [f"x{w} = word(line + u32({w * apart + behind}), i32(1))" for w in warps]
    lines.append(f"top = {'maximum(' * (len(warps) - 1)}x0{''.join(f', x{w})' for w in warps[1:])}")
    lines.append("b = select(top == f32(-inf), f32(0), top * by)")
    lines += [f"w{w} = exp2(x{w} * by - b)" for w in warps]
    lines.append("total = " + " + ".join(f"w{w} * word(line + u32({w * apart + behind + 4}), i32(1))" for w in warps))
    lines += [f"v{w} = read(at + u32({w * apart}))" for w in warps]
    sums = [" + ".join(f"w{w} * v{w}[{k}]" for w in warps) for k in lanes]
    lines.append(f"return {tuple_of(sums)}, top, total")
    word = memory.load(DType.F32, guarded=True, space="shared")
    added = device("added", "line, at, by", lines, word=word, read=mma.load_floats, exp2=softmax.exp2, u32=u32)
    return added, device("scaled_by", "values, by", [f"return {tuple_of([f'values[{k}] * by' for k in lanes])}"])


def joined() -> Any:
    """The device function that adds up the parts of 8 elements of a row, and gives them to all JOINED threads that do.

    (at, step, weights, first, parts): address of the elements in part 0, bytes from part to part, address of the row's weights
    in shared memory, this thread's first part, and how many parts there are.
    """
    from tccompile.kernels.loops import device
    from tccompile.kernels.ptx import memory
    from tccompile.kernels.ptx.core import u32
    from tccompile.kernels.ptx.simt import shuffle

    turns, lanes = range(MOST_SPLITS // JOINED), range(CHUNK)
    lines = [f"i{t} = first + i32({t * JOINED})" for t in turns]
    lines += [f"v{t} = read(at + i64(i{t}) * i64(step), i32(i{t} < parts))" for t in turns]
    lines += [f"w{t} = weight(weights + u32(i{t} * i32(4)), i32(i{t} < parts))" for t in turns]
    lines += [f"s{k} = {' + '.join(f'v{t}[{k}] * w{t}' for t in turns)}" for k in lanes]
    for distance in (4, 2, 1):
        lines += [f"s{k} = s{k} + shuffle(s{k}, i32({distance}))" for k in lanes]
    lines.append(f"return {tuple_of([f's{k}' for k in lanes])}")
    scope = {
        "shuffle": shuffle,
        "read": memory.load(DType.F32, CHUNK, guarded=True),
        "weight": memory.load(DType.F32, guarded=True, space="shared"),
        "u32": u32,
    }
    return device("joined", "at, step, weights, first, parts", lines, **scope)


def masked(groups: int, kind: str) -> Any:
    """The device function that gives scores, scaled by `scale` and masked, of a thread's accumulators (see ptx/softmax.py).

    (acc, scale, mask, base0, base1, step, column, end0, end1): rows' first elements of the mask, in elements from `mask`, and the
    step from column to column; `column` is this thread's first, and `end` the columns that a row has.
    """
    from tccompile.kernels.loops import device
    from tccompile.kernels.ptx import memory

    dtype = DType(kind)
    lines = [f"at{r} = mask + base{r} * i64({dtype.size})" for r in range(2)] + [f"by = i64(step) * i64({dtype.size})"]
    for i in range(4 * groups):
        r, at = i % 4 // 2, f"column + {i // 4 * 8 + i % 2}"
        lines.append(f"k{i} = read(at{r} + i64({at}) * by, i32({at} < end{r}))")
        if kind == "bool":
            lines.append(f"s{i} = select(k{i} != i64(0), acc[{i}] * scale, f32(-inf))")
        else:
            finite = f"acc[{i}] * scale + maximum(k{i} * f32({LOG2_E}), f32({LEAST}))"
            lines.append(f"s{i} = select(k{i} == f32(-inf), f32(-inf), {finite})")
    lines.append(f"return {tuple_of([f's{i}' for i in range(4 * groups)])}")
    params = "acc, scale, mask, base0, base1, step, column, end0, end1"
    return device("masked", params, lines, read=memory.load(dtype, guarded=True))


@dataclass(frozen=True)
class Form:
    """What the code depends on, beside the epilogue.

    atom      the instruction that multiplies
    cp_async  whether the generation copies asynchronously
    chunks    of a head's row, of q and k and of v
    bn        rows of k and v in a tile
    few       whether all warps have the same rows of q, and each a quarter of a tile's rows of k
    split     whether the rows of k are split over blocks
    mask      the type of the mask's elements, or "none"
    sizes     bytes of an element of q, k and v: 2 of halves, or 1 of E4M3
    """

    atom: Atom
    cp_async: bool
    chunks: tuple[int, int]
    bn: int
    few: bool
    split: bool
    mask: str
    causal: bool
    sizes: tuple[int, int, int]

    @property
    def bm(self) -> int:
        """Rows of q in a block."""
        return FEW if self.few else BM

    @property
    def share(self) -> int:
        """Rows of k in a warp's part of a tile."""
        return self.bn * 32 // THREADS if self.few else self.bn

    @property
    def blocks(self) -> tuple[int, int]:
        """Blocks of 16 elements of a head, of q and k and of v."""
        return round_up(self.chunks[0], 2) // 2, round_up(self.chunks[1], 2) // 2

    @property
    def k_at(self) -> int:
        """Where the tile of k begins in shared memory, in bytes; the one of v is at `v_at`."""
        return self.bm * _pitch(self.chunks[0])

    @property
    def v_at(self) -> int:
        return (self.bm + self.bn) * _pitch(self.chunks[0])


def copier(chunks: int, rows: int, size: int, cp_async: bool) -> Any:
    """The device function that copies a tile of `rows` rows of so many chunks; each thread has one chunk column. Elements of one
    byte, of E4M3, become halves on the way."""
    from tccompile.kernels.device_math import at as address
    from tccompile.kernels.ptx import memory, mma
    from tccompile.kernels.ptx.core import i32, inline, types, u32, u64

    pitch, padded = _pitch(chunks), round_up(chunks, 2)
    width = 1 << (padded - 1).bit_length()
    apart = THREADS // width
    turns = max(1, rows // apart)
    load_bytes, store_halves = memory.load(DType.E4M3, CHUNK, True), memory.store(DType.F16, CHUNK, space="shared")

    @inline
    def copy(to, source, step, first, end, tid):
        row, column = i32(tid // width), i32(tid % width)
        if column < padded and row < rows:
            at = address(source, types.int64(first + row) * step + column * 8, size)
            put = u32(to + u32(row * pitch + column * 16))
            by = u64(types.int64(step) * (size * apart))
            for i in range(turns):
                ok = i32(i32(first + row + i * apart) < end and column < chunks)
                if size == 1:
                    store_halves(put, *load_bytes(at, ok))
                elif cp_async:
                    mma.cp_async(put, at, i32(16) if ok != 0 else i32(0))
                else:
                    a, b, c, d = mma.load_chunk(at, ok)
                    mma.store_chunk(put, a, b, c, d)
                put = u32(put + u32(apart * pitch))
                at = at + by

    return copy


def adder(stored_groups: int, store: Any) -> Any:
    """The device function (partial, pairs, base, tid, parts, by, where) that joins what the blocks of a tile wrote: each warp the
    weights of the parts of some rows, then threads their elements. where: the tile's first row, its head, rows of q, the thread's
    lane and warp, and the epilogue's arguments."""
    from tccompile.kernels.device_math import at as address
    from tccompile.kernels.ptx import memory, softmax
    from tccompile.kernels.ptx.core import cuda, f32, i32, inline, types, u32

    i64, exp2 = types.int64, softmax.exp2
    join, (warp_maximum, warp_sum) = joined(), _warp_reductions()
    load_pair, store_weight = memory.load(DType.F32, 2, True), memory.store(DType.F32, space="shared")

    @inline
    def add_parts(partial, pairs, base, tid, parts, by, where):
        m0, head, rows, lane, warp, e = where
        within = i32(min(i32(rows - m0), BM))
        kept = i32(min(rows, BM))
        row = warp
        while row < within:
            x, total = load_pair(address(pairs, i64(lane) * kept + row, 8), i32(lane < parts))
            x = x if lane < parts else f32(-math.inf)
            top = warp_maximum(x)
            b = f32(0) if top == f32(-math.inf) else f32(top * by)
            weight = exp2(f32(x * by - b))
            total = warp_sum(f32(weight * total))
            store_weight(u32(base + u32((row * MOST_SPLITS + lane) * 4)), f32(weight / total) if total > f32(0) else f32(0))
            row = i32(row + THREADS // 32)
        cuda.syncthreads()
        items = i32(within * stored_groups)
        at = i32(tid // JOINED)
        for _ in range(i32(items + (THREADS // JOINED - 1)) // (THREADS // JOINED)):
            inside = at < items
            row = i32(at // stored_groups) if inside else i32(0)
            group = i32(at % stored_groups)
            place = address(partial, i64(row) * stored_groups + group, 32)
            weights = u32(base + u32(row * (MOST_SPLITS * 4)))
            values = join(place, i32(kept * (stored_groups * 32)), weights, i32(tid % JOINED), parts if inside else i32(0))
            if inside and tid % JOINED == 0:
                store(values, i32(head * rows + m0 + row), i32(group * 8), e)
            at = i32(at + THREADS // JOINED)

    return add_parts


def few_results(form: Form, store: Any) -> Any:
    """The device function (base, slab, seen, kept, tid, by, where) that adds up the warps' results of the same rows, and stores
    them, or, split, the block's part. seen: for each of the thread's two rows the highest score, then each sum of weights;
    kept: addresses of the parts' elements and of their highest scores and sums, and the part's first row; where: as `adder`'s."""
    from tccompile.kernels.device_math import at as address
    from tccompile.kernels.ptx import memory
    from tccompile.kernels.ptx.core import cuda, f32, i32, inline, u32

    split, pitch, groups = form.split, _slab(form.chunks[1]), 2 * form.blocks[1]
    add_warps, scaled_by = _warps_added(16 * pitch * 4, 8 * groups * 4)
    store_eight, store_pair = memory.store(DType.F32, 8), memory.store(DType.F32, 2)
    store_weight = memory.store(DType.F32, space="shared")

    @inline
    def results(base, slab, seen, kept, tid, by, where):
        x0, x1, sum0, sum1 = seen
        partial, pairs, own = kept
        m0, head, rows, lane, _, e = where
        # Behind each row's elements, its highest score and its sum, of each warp.
        if lane % 4 == 0:
            beside = u32(slab + u32((lane // 4 * pitch + groups * 8) * 4))
            store_weight(beside, x0)
            store_weight(u32(beside + 4), sum0)
            beside = u32(beside + u32(8 * pitch * 4))
            store_weight(beside, x1)
            store_weight(u32(beside + 4), sum1)
        cuda.syncthreads()
        for j in range((16 * groups + THREADS - 1) // THREADS):
            at = i32(tid + j * THREADS)
            row = i32(at // groups)
            group = i32(at % groups)
            if row < 16 and m0 + row < rows:
                line = u32(base + u32(row * pitch * 4))
                values, top, total = add_warps(line, u32(line + u32(group * 32)), by)
                if split:
                    store_eight(address(partial, (own + row) * groups + group, 32), *values)
                    if group == 0:
                        store_pair(address(pairs, own + row, 8), top, total)
                else:
                    scale_by = f32(1) / total if total > f32(0) else f32(0)
                    store(scaled_by(values, scale_by), i32(head * rows + m0 + row), i32(group * 8), e)

    return results


def results_of(form: Form, store: Any) -> Any:
    """The device function (slab, partial, own, where) that stores what a warp's slab holds, or, split, the block's part."""
    from tccompile.kernels.device_math import at as address
    from tccompile.kernels.ptx import memory, mma
    from tccompile.kernels.ptx.core import cuda, i32, inline, u32

    split, pitch, groups, read = form.split, _slab(form.chunks[1]), 2 * form.blocks[1], mma.load_floats
    store_eight = memory.store(DType.F32, 8)

    @inline
    def results(slab, partial, own, where):
        m0, head, rows, lane, warp, e = where
        cuda.syncwarp()
        for j in range(groups // 2):
            at = i32(lane + j * 32)
            row = i32(at // groups)
            group = i32(at % groups)
            values = read(u32(slab + u32((row * pitch + group * 8) * 4)))
            m = i32(m0 + warp * 16 + row)
            if m < rows:
                if split:
                    to = address(partial, (own + warp * 16 + row) * groups + group, 32)
                    store_eight(to, *values)
                else:
                    store(values, i32(head * rows + m), i32(group * 8), e)

    return results


def reader(form: Form) -> Any:
    """The device function (base, lane, warp_m, warp_n) → addresses of a lane's fragments of q, of v and of k, of the warp's first
    row of q and first row of k."""
    from tccompile.kernels.parts.fragments import fragments_of
    from tccompile.kernels.ptx.core import inline, u32

    k_at, v_at, k_pitch, v_pitch = form.k_at, form.v_at, _pitch(form.chunks[0]), _pitch(form.chunks[1])
    lanes = fragments_of(form.atom)
    lane_a, lane_b = inline(lanes.a), inline(lanes.b)

    @inline
    def reads(base, lane, warp_m, warp_n):
        row, half = lane_a(lane)
        from_q = u32(base + u32((warp_m + row) * k_pitch + half * 16))
        from_v = u32(base + u32(v_at + (warp_n + row) * v_pitch + half * 16))
        row, half = lane_b(lane)
        return from_q, from_v, u32(base + u32(k_at + (warp_n + row) * k_pitch + half * 16))

    return reads


def weigher(groups: int) -> Any:
    """The device function (s, by, x0, x1, sum0, sum1) → (weights of the scores s, by what sums up to here shrink, and the rest
    brought up to date) for each of a thread's two rows: the highest scores and the sums of weights."""
    from tccompile.kernels.ptx import softmax
    from tccompile.kernels.ptx.core import f32, inline

    highest, exponentials = softmax.highest(groups), softmax.exponentials(groups)
    row_maximum, exp2 = softmax.row_maximum(), softmax.exp2

    @inline
    def weigh(s, by, x0, x1, sum0, sum1):
        before0, before1 = x0, x1
        x0, x1 = highest(s, x0, x1)
        x0, x1 = row_maximum(x0), row_maximum(x1)
        b0 = f32(0) if x0 == f32(-math.inf) else f32(x0 * by)
        b1 = f32(0) if x1 == f32(-math.inf) else f32(x1 * by)
        p, add0, add1 = exponentials(s, by, b0, b1)
        a0, a1 = exp2(f32(before0 * by - b0)), exp2(f32(before1 * by - b1))
        return p, a0, a1, x0, x1, f32(sum0 * a0 + add0), f32(sum1 * a1 + add1)

    return weigh


def entry(form: Form, body: Any, extra: tuple[Any, ...]) -> Function:
    """The kernel around `body`, with its parameters one by one; those of the epilogue are of types `extra`."""
    from tccompile.kernels.ptx.core import f32, i32, types, u64

    tensors = ["q", "k", "v", *(["mask"] if form.mask != "none" else [])]
    strides = [f"{t}_{axis}" for t in tensors for axis in "bhre"]
    more = [f"e{i}" for i in range(len(extra))]
    parts = SPLIT if form.split else ()
    call = f"body((q, k, v, mask), {tuple_of(INTEGERS)}, {tuple_of(strides)}, scale, {tuple_of(parts)}, {tuple_of(more)})"
    text = definition("kernel", [*tensors, *INTEGERS, *strides, "scale", *parts, *more], [call])
    shared = [u64, u64, i32] if form.split else []
    signature = types.void(*[u64] * len(tensors), *[i32] * (len(INTEGERS) + len(strides)), f32, *shared, *extra)
    return Function(execute(text, {"body": body, "mask": 0}, "kernel"), signature, THREADS, 2 if max(form.chunks) <= 16 else 1)


def parts_of(form: Form) -> Any:
    """The part about where the blocks of a tile write what they make, and a thread's share of that."""
    from tccompile.kernels.device_math import at as address
    from tccompile.kernels.parts.part import part
    from tccompile.kernels.ptx import memory
    from tccompile.kernels.ptx.core import cuda, i32, inline, types

    i64, groups, store_pair = types.int64, 2 * form.blocks[1], memory.store(DType.F32, 2)

    @inline
    def places(partial, rows):
        """(elements of the tile's first part, its rows' highest scores and sums, this part's first row): parts of a tile lie one
        after the other; all rows' highest scores and sums behind the last tile's."""
        count, kept = i32(cuda.gridDim.y), i32(min(rows, BM))
        number = i32(i32(cuda.blockIdx.x) * count)  # of the tile's first part
        pairs = address(partial, i64(i32(cuda.gridDim.x) * count) * kept, groups * 32)
        pairs = address(pairs, i64(number) * kept, 8)
        partial = address(partial, i64(number) * kept, groups * 32)
        return partial, pairs, i64(i32(cuda.blockIdx.y)) * kept

    @inline
    def keep(pairs, own, m, seen, where):
        """Writes the highest scores and sums of a thread's two rows."""
        x0, x1, sum0, sum1 = seen
        _, _, rows, lane, warp, _ = where
        row = i32(warp * 16 + lane // 4)
        if lane % 4 == 0 and m < rows:
            store_pair(address(pairs, own + row, 8), x0, sum0)
        if lane % 4 == 0 and m + 8 < rows:
            store_pair(address(pairs, own + row + 8, 8), x1, sum1)

    return part(places=places, keep=keep)


def place_of(causal: bool, sizes: tuple[int, int, int]) -> Any:
    """The device function (q, k, v, integers, strides) → (b, h, head, m0, q, k, v): the batch, head and first row that a block
    has, and where the operands of that head begin."""
    from tccompile.kernels.device_math import at as address
    from tccompile.kernels.ptx import mma
    from tccompile.kernels.ptx.core import cuda, i32, inline, types

    i64, (q_size, k_size, v_size) = types.int64, sizes

    @inline
    def place(q, k, v, integers, strides):
        tiles, heads, share = integers[:3]
        q_b, q_h, _, _, k_b, k_h, _, _, v_b, v_h = strides[:10]
        # The longest causal rows first: blocks are started in order.
        head = mma.divide(i32(cuda.blockIdx.x), tiles)
        tile = i32(cuda.blockIdx.x) - head * tiles
        m0 = i32((tiles - 1 - tile) * BM) if causal else i32(tile * BM)
        b = mma.divide(i32(head), heads)
        h = i32(head - b * heads)
        g = mma.divide(h, share)
        q = address(q, i64(b) * q_b + i64(h) * q_h, q_size)
        k = address(k, i64(b) * k_b + i64(g) * k_h, k_size)
        v = address(v, i64(b) * v_b + i64(g) * v_h, v_size)
        return b, h, head, m0, q, k, v

    return place


def sight_of(form: Form) -> Any:
    """The part about what a thread's two rows see.

    within(m0, integers, parts)                   the first of the block's rows of k, and the one behind its last
    ends(first row of the warp, lane, integers)   the thread's first row; up to which columns it sees, and the one 8 below; and up
                                                  to which all rows of the warp see
    cut(s, n, at, scales, mask, strides, integers, ends)   scores of the tile whose first row of k is n, with the mask, -inf
                                                  where rows do not see. at: batch, head, the warp's first row of k in a tile,
                                                  lane; scales: of the scores
    """
    from tccompile.kernels.parts.part import part
    from tccompile.kernels.ptx import softmax
    from tccompile.kernels.ptx.core import cuda, i32, inline, types

    i64, causal, has_mask, bn, groups, splits = (
        types.int64,
        form.causal,
        form.mask != "none",
        form.bn,
        form.share // 8,
        form.split,
    )
    add_mask, cut_columns = masked(groups, form.mask) if has_mask else None, softmax.cut(groups)

    @inline
    def within(m0, integers, parts):
        rows, columns, ahead = integers[3], integers[4], integers[7]
        last = i32(min(columns, i32(min(rows, i32(m0 + BM)) + ahead))) if causal else columns
        if splits:
            first = i32(i32(cuda.blockIdx.y) * parts[2])
            return first, i32(min(last, i32(first + parts[2])))
        return i32(0), last

    @inline
    def ends(first, lane, integers):
        columns, ahead = integers[4], integers[7]
        m = i32(first + lane // 4)
        end0 = i32(min(columns, i32(m + 1 + ahead))) if causal else columns
        end1 = i32(min(columns, i32(m + 9 + ahead))) if causal else columns
        return m, end0, end1, i32(min(columns, i32(first + 1 + ahead))) if causal else columns

    @inline
    def cut(s, n, at, factor, mask, strides, integers, ends):
        b, h, warp_n, lane = at
        rows, columns = integers[3], integers[4]
        m, end0, end1, first_end = ends
        column = i32(n + warp_n + lane % 4 * 2)
        if has_mask:
            m_b, m_h, m_r, m_e = strides[12:16]
            line = i64(b) * m_b + i64(h) * m_h
            base0, base1 = line + i64(m) * m_r, line + i64(m + 8) * m_r
            s = add_mask(
                s, factor, types.int64(mask), base0, base1, m_e, column,
                columns if m < rows else i32(0), columns if m + 8 < rows else i32(0),
            )  # fmt: skip
        if n + bn > first_end:
            s = cut_columns(s, column, end0, end1)
        return s

    return part(within=within, ends=ends, cut=cut)


def finisher(form: Form, store: Any) -> Any:
    """The device function (acc, seen, base, m, parts, by, where) that stores a block's results; of a tile that is split, what the
    block made, and the last block of the tile all. seen: as `few_results`'s; m: the thread's first row; where: as `adder`'s."""
    from tccompile.kernels.device_math import at as address
    from tccompile.kernels.parts import fragments, split
    from tccompile.kernels.ptx import softmax
    from tccompile.kernels.ptx.core import cuda, f32, i32, inline, u32

    few, splits, pitch, e_blocks = form.few, form.split, _slab(form.chunks[1]), form.blocks[1]
    lane_acc, spill = inline(fragments.fragments_of(form.atom).acc), fragments.spill_block(form.atom, 1, e_blocks, pitch)
    scaled, parts_of_tile, last_to_arrive = softmax.scaled(2 * e_blocks), parts_of(form), split.last_to_arrive(form.cp_async)
    add_parts, add_warps, results = adder(2 * e_blocks, store), few_results(form, store), results_of(form, store)

    @inline
    def finish(acc, seen, base, m, parts, by, where):
        _, _, rows, lane, warp, _ = where
        _, _, sum0, sum1 = seen
        tid = i32(cuda.threadIdx.x)
        if splits:
            partial, counter, _ = parts
            partial, pairs, own = parts_of_tile.places(partial, rows)
        if splits and not few:
            parts_of_tile.keep(pairs, own, m, seen, where)
        if not splits and not few:
            acc = scaled(acc, f32(1) / sum0 if sum0 > f32(0) else f32(0), f32(1) / sum1 if sum1 > f32(0) else f32(0))
        slab = u32(base + u32(warp * (16 * pitch * 4)))
        row, column = lane_acc(lane)
        spill(acc, u32(slab + u32((row * pitch + column) * 4)), i32(0))
        kept = (partial, pairs, own) if splits else (0, 0, 0)
        if few:
            add_warps(base, slab, seen, kept, tid, by, where)
        else:
            results(slab, kept[0], kept[2], where)
        if splits and last_to_arrive(address(counter, cuda.blockIdx.x, 4), i32(cuda.gridDim.y)):
            add_parts(partial, pairs, base, tid, i32(cuda.gridDim.y), by, where)

    return finish


def copiers(form: Form) -> Any:
    """The part about tiles' way to shared memory: q(…), k(…) and v(…), each a `copier`; commit(); and wait_one(), wait_all()."""
    from tccompile.kernels.parts.part import part
    from tccompile.kernels.ptx import mma
    from tccompile.kernels.ptx.core import inline

    cp_async = form.cp_async
    tiles = zip("qkv", (0, 0, 1), (form.bm, form.bn, form.bn), form.sizes, strict=True)
    copies = {name: copier(form.chunks[i], n, size, cp_async) for name, i, n, size in tiles}
    wait_all, wait_one = mma.cp_async_wait(0), mma.cp_async_wait(1)

    @inline
    def commit():
        if cp_async:
            mma.cp_async_commit()

    @inline
    def all_but_one():
        wait_one() if cp_async else None

    @inline
    def all_of_them():
        wait_all() if cp_async else None

    return part(**copies, commit=commit, wait_one=all_but_one, wait_all=all_of_them)


def build(form: Form, epilogue_params: Any) -> Function:
    """The kernel's code. Parameters: those of `attention.arguments`, with `split` SPLIT, then the epilogue's."""
    store, extra = epilogue.build(epilogue_params)
    return entry(form, _body(form, store), extra)


def _body(form: Form, store: Any) -> Any:
    """The device function of a block: (addresses of tensors, INTEGERS, strides, scale, SPLIT, e)."""
    from tccompile.kernels.parts import chunks, fragments
    from tccompile.kernels.ptx import mma, softmax
    from tccompile.kernels.ptx.core import cuda, f32, i32, inline, u32

    atom, bn, k_at, v_at, share_n = form.atom, form.bn, form.k_at, form.v_at, form.share
    few, has_mask, (d_blocks, e_blocks), n_blocks = form.few, form.mask != "none", form.blocks, form.share // 16
    reads, copy, sight, finish = reader(form), copiers(form), sight_of(form), finisher(form, store)
    load_rows = fragments.load_rows(atom, d_blocks)
    scores_of = fragments.multiply_rows(atom, d_blocks, n_blocks, _pitch(form.chunks[0]))
    add_values = fragments.multiply_columns(atom, n_blocks, e_blocks, _pitch(form.chunks[1]))
    zeros, scaled, row_sum = mma.zeros(8 * e_blocks), softmax.scaled(2 * e_blocks), softmax.row_sum()
    halves, weigh = softmax.halves(2 * n_blocks, atom.a, atom.k == 16), weigher(2 * n_blocks)
    place = place_of(form.causal, form.sizes)

    @inline
    def body(tensors, integers, strides, scale, parts, e):
        q, k, v, mask = tensors
        rows, q_r, k_r, v_r = integers[3], strides[2], strides[6], strides[10]
        base = chunks.base()
        tid = i32(cuda.threadIdx.x)
        lane, warp = i32(tid % 32), i32(tid // 32)
        b, h, head, m0, q, k, v = place(q, k, v, integers, strides)
        first, last = sight.within(m0, integers, parts)
        copy.q(base, q, q_r, m0, rows, tid)
        copy.k(u32(base + k_at), k, k_r, first, last, tid)
        copy.commit()
        copy.v(u32(base + v_at), v, v_r, first, last, tid)
        copy.commit()
        warp_m, warp_n = (i32(0), i32(warp * share_n)) if few else (i32(warp * 16), i32(0))
        ends = sight.ends(i32(m0 + warp_m), lane, integers)
        from_q, from_v, from_k = reads(base, lane, warp_m, warp_n)
        acc = zeros()
        x0, x1, sum0, sum1 = f32(-math.inf), f32(-math.inf), f32(0), f32(0)
        factor, n = f32(scale * f32(LOG2_E)), first
        by = f32(1) if has_mask else factor
        while n < last:
            copy.wait_one()
            cuda.syncthreads()
            s = scores_of(load_rows(from_q), from_k)
            cuda.syncthreads()
            copy.k(u32(base + k_at), k, k_r, i32(n + bn), last, tid)
            copy.commit()
            s = sight.cut(s, n, (b, h, warp_n, lane), factor, mask, strides, integers, ends)
            p, a0, a1, x0, x1, sum0, sum1 = weigh(s, by, x0, x1, sum0, sum1)
            acc = scaled(acc, a0, a1)
            copy.wait_one()
            cuda.syncthreads()
            acc = add_values(acc, halves(p), from_v)
            cuda.syncthreads()
            copy.v(u32(base + v_at), v, v_r, i32(n + bn), last, tid)
            copy.commit()
            n = i32(n + bn)
        copy.wait_all()
        cuda.syncthreads()
        seen = (x0, x1, row_sum(sum0), row_sum(sum1))
        finish(acc, seen, base, ends[0], parts, by, (m0, head, rows, lane, warp, e))

    return body
