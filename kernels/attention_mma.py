"""Attention on Tensor Cores by mma.sync: sm_75 and all later generations.

A block computes 64 rows of one head, 16 a warp. It walks k and v `bn` rows at a time: scores come into registers as accumulators
and leave them as the left operand of the second product, so that neither they nor their exponentials see shared memory. The
softmax is online (see attention.py), in float32 and to base 2. A tile of k or v is copied while the other one is multiplied.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from tccompile.arch import KIB, Arch
from tccompile.expr import DType
from tccompile.kernels import epilogue
from tccompile.kernels.attention import INTEGERS, arguments, op_extents
from tccompile.kernels.codegen import execute, tuple_of
from tccompile.kernels.gemm_mma import instruction_of
from tccompile.kernels.loops import refusal
from tccompile.kernels.spec import LAUNCH_US, Config, Function, Kernel, Launch, Work, code, traffic_us
from tccompile.program import Attention, Op, Program, Tensor

CHUNK = 8
"""Halves that are copied at once: 16 bytes."""

BM, THREADS = 64, 128

MOST = 256
"""Elements of a head: registers hold no more of a row's result."""

LOG2_E = math.log2(math.e)
LEAST = -3e38
"""Finite masks times log2(e) stay finite: a row whose mask is the lowest float32 throughout is an even mean, as in float32."""


def unfit(op: Attention, program: Program) -> str | None:
    """None if 16-byte copies of half-precision rows can feed Tensor Cores, else the rule that does not hold."""
    if not 0 < op.scale < 1e4:
        return f"its scale is {op.scale:g}; the greatest score is looked for before it is scaled"
    for name in (op.q, op.k, op.v):
        t = program.tensors[name]
        if 0 in t.shape:
            return f"an extent of {name} is 0"
        if t.dtype is not DType.F16:
            return f"{name} is {t.dtype.value}; Tensor Cores are fed with float16"
        if t.shape[3] > MOST:
            return f"heads of {t.shape[3]} elements; at most {MOST} fit registers"
        if t.strides[3] != 1 and t.padded[3] > 1:
            return f"neighbouring elements of {name}'s heads are {t.strides[3]} apart in memory"
        if t.padded[3] < _chunks(t) * CHUNK:
            return f"{name} has {t.padded[3]} elements a head in memory, no multiple of {CHUNK}"
        steps = [t.offset, *(s for n, s in zip(t.shape[:3], t.strides[:3], strict=True) if n > 1)]
        if any(s % CHUNK for s in steps):
            return f"rows of {name} do not begin at multiples of 16 bytes"
    return None


def _chunks(t: Tensor) -> int:
    """Chunks of a head's row."""
    return -(-t.shape[3] // CHUNK)


def _up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple


def _pitch(chunks: int) -> int:
    """Bytes from row to row in shared memory: an odd number of chunks, so that eight rows' chunks lie in different banks."""
    return 16 * (_up(chunks, 2) + 1)


def smem_of(chunks: tuple[int, int], bn: int) -> int:
    """Bytes of shared memory: q, a tile of k and one of v, or later the warps' results; and room to align them."""
    operands = (BM + bn) * _pitch(chunks[0]) + bn * _pitch(chunks[1])
    return max(operands, BM * 4 * _slab(chunks[1])) + 128


def _slab(chunks: int) -> int:
    """Floats from row to row where a warp turns its results round."""
    return _up(chunks, 2) * CHUNK + 8


class AttentionMma(Kernel):
    """Attention of half-precision heads of up to 256 elements."""

    name = "attention_mma"
    realises = Attention
    tensor_cores = True

    def supports(self, op: Op, program: Program, arch: Arch) -> str | None:
        assert isinstance(op, Attention)
        if instruction_of(arch) not in ("mma.m16n8k8", "mma.m16n8k16"):
            return f"{arch.name} has no mma.m16n8 instructions"
        if reason := unfit(op, program):
            return reason
        if not any(True for _ in self.configs(op, program, arch)):
            return f"its tiles do not fit {arch.smem_block // KIB} KiB of shared memory"
        return refusal(op, program, epilogue.frame_of(op, program))

    def configs(self, op: Op, program: Program, arch: Arch) -> Iterator[Config]:
        assert isinstance(op, Attention)
        chunks = self._chunks(op, program)
        for bn in (64, 32):
            small = max(chunks) <= 16 and op.mask is None  # registers, and code for a mask's elements
            if smem_of(chunks, bn) <= arch.smem_block and (bn == 32 or small):
                yield {"bn": bn}

    def cost(self, op: Op, program: Program, config: Config, arch: Arch) -> float:
        assert isinstance(op, Attention)
        heads, rows, n = op_extents(op, program)
        chunks, bn = self._chunks(op, program), int(config["bn"])
        tiles = heads * -(-rows // BM)
        seen = min(n, rows / 2 + op.causal) if op.causal is not None and rows > BM else n
        work = 2.0 * BM * max(seen, 1) * CHUNK * sum(chunks)
        resident = max(1, min(2, arch.smem_sm // (smem_of(chunks, bn) + KIB)))
        rate = (
            (0.32 if arch.mma == "wgmma" else 0.5) * arch.tensor_tflops * 1e6 / arch.sms
        )  # of a multiprocessor's blocks together
        waves = tiles / (arch.sms * resident)
        time = max(waves, 1.0) * resident * work / rate if waves >= 1 else work / rate * max(1.0, tiles / arch.sms)
        steps = -(-n // bn) * (0.5 if bn == 64 else 0.35)
        return LAUNCH_US + max(time, steps, traffic_us(op, program, arch)) + 2.0

    def work(self, op: Op, program: Program, config: Config, arch: Arch) -> Work:
        assert isinstance(op, Attention)
        heads, rows, _ = op_extents(op, program)
        if 0 in program.tensors[op.y].padded:
            return Work(())
        chunks, tiles = self._chunks(op, program), -(-rows // BM)
        stored = epilogue.describe(op, program, epilogue.frame_of(op, program))
        instruction = instruction_of(arch)
        assert instruction is not None
        compiled = code(
            self.name,
            instruction=instruction,
            chunks=chunks,
            bn=config["bn"],
            mask="none" if op.mask is None else program.tensors[op.mask].dtype.value,
            causal=op.causal is not None,
            epilogue=stored.params,
        )
        args = (*arguments(op, program, tiles), *stored.args)
        return Work((Launch(compiled, (tiles * heads, 1, 1), THREADS, args, smem_of(chunks, int(config["bn"]))),))

    def build(self, arch: Arch, **params: Any) -> Function:
        chunks = params["chunks"]
        return build(
            params["instruction"],
            arch.cp_async,
            (chunks[0], chunks[1]),
            params["bn"],
            params["mask"],
            params["causal"],
            params["epilogue"],
        )

    def _chunks(self, op: Op, program: Program) -> tuple[int, int]:
        assert isinstance(op, Attention)
        return _chunks(program.tensors[op.q]), _chunks(program.tensors[op.v])


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


def build(
    instruction: str, cp_async: bool, chunks: tuple[int, int], bn: int, mask_kind: str, causal: bool, epilogue_params: Any
) -> Function:
    """The kernel's code. Parameters: those of `attention.arguments`, then the epilogue's."""
    from numba import cuda
    from numba.cuda import types

    from tccompile.kernels import gemm_walk as walk
    from tccompile.kernels.device_math import inline
    from tccompile.kernels.ptx import mma, softmax
    from tccompile.kernels.ptx.core import f32, i32, u32, u64

    i64 = types.int64
    d_chunks, e_chunks = chunks
    d_steps, e_blocks, n_blocks = _up(d_chunks, 2) // 2, _up(e_chunks, 2) // 2, bn // 16
    k_pitch, v_pitch, slab_pitch = _pitch(d_chunks), _pitch(e_chunks), _slab(e_chunks)
    k_at, v_at = BM * k_pitch, (BM + bn) * k_pitch
    groups = 2 * n_blocks
    fragments = mma.FRAGMENTS[instruction]
    lane_a, lane_b, lane_acc = (inline(f) for f in (fragments.a, fragments.b, fragments.acc))
    load_rows, scores_of = mma.load_rows(instruction, d_steps), mma.multiply_rows(instruction, d_steps, n_blocks, k_pitch)
    add_values = mma.multiply_columns(instruction, n_blocks, e_blocks, v_pitch)
    zeros, spill = mma.zeros(8 * e_blocks), mma.spill_block(instruction, 1, e_blocks, slab_pitch)
    highest, cut, scaled = softmax.highest(groups), softmax.cut(groups), softmax.scaled(2 * e_blocks)
    exponentials, halves = softmax.exponentials(groups), softmax.halves(groups, instruction == "mma.m16n8k16")
    row_maximum, row_sum, exp2 = softmax.row_maximum(), softmax.row_sum(), softmax.exp2
    has_mask = mask_kind != "none"
    add_mask = masked(groups, mask_kind) if has_mask else None
    wait_all, wait_one = mma.cp_async_wait(0), mma.cp_async_wait(1)
    store, extra = epilogue.build(epilogue_params)
    read = mma.load_floats
    stored_groups = 2 * e_blocks

    def copier(chunks: int, pitch: int, rows: int) -> Any:
        """The device function that copies a tile of `rows` rows; each thread has one chunk column."""
        width = 1 << (_up(chunks, 2) - 1).bit_length()
        apart = THREADS // width
        turns, padded = max(1, rows // apart), _up(chunks, 2)

        @inline
        def copy(to, source, step, first, end, tid):
            row, column = i32(tid // width), i32(tid % width)
            if column < padded and row < rows:
                at = walk.at(source, types.int64(first + row) * step + column * 8, 2)
                put = u32(to + u32(row * pitch + column * 16))
                by = u64(types.int64(step) * (2 * apart))
                for i in range(turns):
                    ok = i32(i32(first + row + i * apart) < end and column < chunks)
                    if cp_async:
                        mma.cp_async(put, at, i32(16) if ok != 0 else i32(0))
                    else:
                        a, b, c, d = mma.load_chunk(at, ok)
                        mma.store_chunk(put, a, b, c, d)
                    put = u32(put + u32(apart * pitch))
                    at = at + by

        return copy

    copy_q, copy_k, copy_v = copier(d_chunks, k_pitch, BM), copier(d_chunks, k_pitch, bn), copier(e_chunks, v_pitch, bn)

    @inline
    def commit():
        if cp_async:
            mma.cp_async_commit()

    @inline
    def body(q, k, v, mask, integers, strides, scale, e):
        tiles, heads, share, rows, columns, _, _, ahead = integers
        q_b, q_h, q_r, _, k_b, k_h, k_r, _, v_b, v_h, v_r = strides[:11]
        base = (mma.shared_address(cuda.shared.array(0, types.uint8)) + u32(127)) & u32(0xFFFFFF80)
        tid = i32(cuda.threadIdx.x)
        lane = i32(tid % 32)
        warp = i32(tid // 32)

        # The longest causal rows first: blocks are started in order.
        head = mma.divide(i32(cuda.blockIdx.x), tiles)
        tile = i32(cuda.blockIdx.x) - head * tiles
        m0 = i32((tiles - 1 - tile) * BM) if causal else i32(tile * BM)
        b = mma.divide(i32(head), heads)
        h = i32(head - b * heads)
        g = mma.divide(h, share)
        q = walk.at(q, i64(b) * q_b + i64(h) * q_h, 2)
        k = walk.at(k, i64(b) * k_b + i64(g) * k_h, 2)
        v = walk.at(v, i64(b) * v_b + i64(g) * v_h, 2)
        last = i32(min(columns, i32(min(rows, i32(m0 + BM)) + ahead))) if causal else columns

        copy_q(base, q, q_r, m0, rows, tid)
        copy_k(u32(base + k_at), k, k_r, i32(0), last, tid)
        commit()
        copy_v(u32(base + v_at), v, v_r, i32(0), last, tid)
        commit()

        # This thread's two rows, and what they see.
        m = i32(m0 + warp * 16 + lane // 4)
        end0 = i32(min(columns, i32(m + 1 + ahead))) if causal else columns
        end1 = i32(min(columns, i32(m + 9 + ahead))) if causal else columns
        first_end = i32(min(columns, i32(m0 + warp * 16 + 1 + ahead))) if causal else columns  # what all rows of the warp see
        row, half = lane_a(lane)
        from_q = u32(base + u32((warp * 16 + row) * k_pitch + half * 16))
        from_v = u32(base + u32(v_at + row * v_pitch + half * 16))
        row, half = lane_b(lane)
        from_k = u32(base + u32(k_at + row * k_pitch + half * 16))

        acc = zeros()
        x0, x1, sum0, sum1 = f32(-math.inf), f32(-math.inf), f32(0), f32(0)
        factor = f32(scale * f32(LOG2_E))
        by = f32(1) if has_mask else factor
        n = i32(0)
        while n < last:
            wait_one() if cp_async else None
            cuda.syncthreads()
            s = scores_of(load_rows(from_q), from_k)
            cuda.syncthreads()
            copy_k(u32(base + k_at), k, k_r, i32(n + bn), last, tid)
            commit()
            column = i32(n + lane % 4 * 2)
            if has_mask:
                m_b, m_h, m_r, m_e = strides[12:16]
                line = i64(b) * m_b + i64(h) * m_h
                base0, base1 = line + i64(m) * m_r, line + i64(m + 8) * m_r
                s = add_mask(
                    s, factor, types.int64(mask), base0, base1, m_e, column,
                    columns if m < rows else i32(0), columns if m + 8 < rows else i32(0),
                )  # fmt: skip
            if n + bn > first_end:
                s = cut(s, column, end0, end1)
            before0, before1 = x0, x1
            x0, x1 = highest(s, x0, x1)
            x0, x1 = row_maximum(x0), row_maximum(x1)
            b0 = f32(0) if x0 == f32(-math.inf) else f32(x0 * by)
            b1 = f32(0) if x1 == f32(-math.inf) else f32(x1 * by)
            p, add0, add1 = exponentials(s, by, b0, b1)
            a0, a1 = exp2(f32(before0 * by - b0)), exp2(f32(before1 * by - b1))
            sum0, sum1 = f32(sum0 * a0 + add0), f32(sum1 * a1 + add1)
            acc = scaled(acc, a0, a1)
            wait_one() if cp_async else None
            cuda.syncthreads()
            acc = add_values(acc, halves(p), from_v)
            cuda.syncthreads()
            copy_v(u32(base + v_at), v, v_r, i32(n + bn), last, tid)
            commit()
            n = i32(n + bn)
        wait_all() if cp_async else None
        cuda.syncthreads()

        sum0, sum1 = row_sum(sum0), row_sum(sum1)
        acc = scaled(acc, f32(1) / sum0 if sum0 > f32(0) else f32(0), f32(1) / sum1 if sum1 > f32(0) else f32(0))
        slab = u32(base + u32(warp * (16 * slab_pitch * 4)))
        row, column = lane_acc(lane)
        spill(acc, u32(slab + u32((row * slab_pitch + column) * 4)), i32(0))
        cuda.syncwarp()
        for j in range(stored_groups // 2):
            at = i32(lane + j * 32)
            row = i32(at // stored_groups)
            group = i32(at % stored_groups)
            values = read(u32(slab + u32((row * slab_pitch + group * 8) * 4)))
            m = i32(m0 + warp * 16 + row)
            if m < rows:
                store(values, i32(head * rows + m), i32(group * 8), e)

    tensors = ["q", "k", "v", *(["mask"] if has_mask else [])]
    strides = [f"{t}_{axis}" for t in tensors for axis in "bhre"]
    more = [f"e{i}" for i in range(len(extra))]
    text = f"def kernel({', '.join([*tensors, *INTEGERS, *strides, 'scale', *more])}):\n"
    text += f"    body(q, k, v, mask, {tuple_of(INTEGERS)}, {tuple_of(strides)}, scale, {tuple_of(more)})\n"
    signature = types.void(*[u64] * len(tensors), *[i32] * (len(INTEGERS) + len(strides)), f32, *extra)
    return Function(execute(text, {"body": body, "mask": 0}, "kernel"), signature, THREADS, 2 if max(chunks) <= 16 else 1)
