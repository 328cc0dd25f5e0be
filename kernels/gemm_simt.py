"""Convolution and matrix product without Tensor Cores, in float32 arithmetic: every generation, every layout and grouping.

The plain kernel that always works, and the one for models in fp32. A block computes a tile of bm×bn of one batch of a
`Problem`; operands of any float type become float32 on their way through registers to shared memory, K-major, one step ahead of
the arithmetic; a thread multiplies rows and columns in groups of four. Few tiles are split along K as in gemm_mma.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from tccompile.arch import Arch
from tccompile.ir.ops import Conv, Gemm, Op
from tccompile.ir.program import Program
from tccompile.ir.types import DType
from tccompile.kernels import epilogue
from tccompile.kernels.codegen import execute, tuple_of
from tccompile.kernels.implicit_gemm import (
    IMAGES,
    MATRICES,
    MOST_SCRATCH,
    SCALARS,
    Problem,
    Rates,
    describe,
    scalars,
    split_steps,
    tiles,
    time_us,
)  # fmt: skip
from tccompile.kernels.spec import I32, Arg, Config, Counters, Function, Kernel, Launch, Ptr, Scratch, Work, code, traffic_us

BK = 16
"""Depth of a step."""

MORE = ("x_c", "w_r", "w_s", "w_c")
"""int32 parameters after SCALARS: strides of x along channels and of w along taps and channels, in chunks."""


@dataclass(frozen=True)
class Tile:
    """bm×bn results a block, `threads_m`×`threads_n` threads; a thread has groups of four rows and columns, interleaved."""

    bm: int
    bn: int
    threads_m: int
    threads_n: int

    @property
    def threads(self) -> int:
        return self.threads_m * self.threads_n

    @property
    def rows(self) -> int:
        """Rows of a thread."""
        return self.bm // self.threads_m

    @property
    def columns(self) -> int:
        return self.bn // self.threads_n

    @property
    def smem(self) -> int:
        """Bytes: two steps' operands, later a slab of results with one row of each thread."""
        return max(2 * BK * (self.bm + self.bn + 8), self.threads_m * (self.bn + 4)) * 4

    def __post_init__(self) -> None:
        assert self.rows in (4, 8) and self.columns in (4, 8)
        assert self.bm * BK // 4 % self.threads == 0 and self.bn * BK // 4 % self.threads == 0


TILES = (Tile(128, 128, 16, 16), Tile(64, 64, 8, 8), Tile(128, 32, 32, 4), Tile(32, 64, 8, 8), Tile(32, 32, 8, 8))
BY_SHAPE = {(t.bm, t.bn): t for t in TILES}


def chunk_of(problem: Problem) -> int:
    """Elements that are loaded at once along K: 4 where x and w have neighbouring channels at aligned rows, else 1."""
    x, w = problem.x, problem.w
    padded = -(-problem.channels // 4) * 4
    axis = 1 if problem.column_batch else x.rank - 1
    fits = problem.channels % 4 == 0 or (problem.batches == 1 and x.padded[axis] >= padded and problem.padded >= padded)
    steps = (x.offset, w.offset, *problem.x_batch, *problem.w_batch, *problem.x_pixel[:3], problem.w_column, *problem.w_tap[:2])
    return 4 if fits and problem.x_pixel[3] == problem.w_tap[2] == 1 and all(s % 4 == 0 for s in steps) else 1


def build_tile(
    arch: Arch, tile: Tile, chunk: int, x_type: DType, w_type: DType, split: bool, lanes: int, epilogue_params: Any
) -> Function:
    """The kernel's code. Parameters: x, w, with `split` also workspace and counters, SCALARS, MORE, the epilogue's."""
    from numba import cuda
    from numba.cuda import types

    from tccompile.kernels import gemm_walk as walk
    from tccompile.kernels.device_math import inline
    from tccompile.kernels.ptx import memory, mma, simt
    from tccompile.kernels.ptx.core import i32, u32, u64

    bm, bn, bk = tile.bm, tile.bn, BK
    threads, rows_each, columns_each, threads_n = tile.threads, tile.rows, tile.columns, tile.threads_n
    threads_m = tile.threads_m
    across = bk // chunk  # chunks of a step
    apart = threads // across  # rows between those that a thread loads
    a_rows, b_rows = bm // apart, bn // apart
    a_words, words = a_rows * chunk, (a_rows + b_rows) * chunk
    a_pitch, b_pitch = bm + 4, bn + 4  # floats from one k to the next
    stage = bk * (a_pitch + b_pitch) * 4
    count = rows_each * columns_each
    slab_pitch = bn + 4
    groups = bn // lanes
    turns = threads_m * groups // threads
    x_size, w_size = x_type.size, w_type.size

    zeros, multiply = mma.zeros(count), simt.multiply_step(rows_each, columns_each, bk, a_pitch, b_pitch, threads_m, threads_n)
    spill = simt.spill_row(rows_each, columns_each, threads_n)
    fetch_x = simt.fetch(memory.load(x_type, chunk, guarded=True), chunk)
    fetch_w = simt.fetch(memory.load(w_type, chunk, guarded=True), chunk)
    put = memory.store(DType.F32, 1, space="shared")
    read = simt.as_tuple(memory.load(DType.F32, lanes, space="shared"), lanes)
    store_partial, add_partial = mma.store_partial(count, threads), mma.add_partial(count, threads)
    last_to_arrive = walk.last_to_arrive(arch.cp_async)
    store, extra = epilogue.build(epilogue_params)

    @inline
    def body(x, w, partial, counter, matrices, images, more, e):
        rows, columns, stored, last_stored, chunks, tiles_m, tiles_n, steps, inner = matrices[:9]
        x_outer, x_inner, w_outer, w_inner, row_batch, column_batch, x_row, w_row, channels = matrices[9:]
        x_h, image_h, image_w = images[3:6]
        dilation_h, dilation_w, taps_w = images[10:13]
        x_c, w_r, w_s, w_c = more
        base = mma.shared_address(cuda.shared.array(0, types.float32))
        tid = i32(cuda.threadIdx.x)

        part = i32(cuda.blockIdx.y)
        batch, tile_m, tile_n = walk.locate(i32(cuda.blockIdx.x), tiles_m, tiles_n)
        m0 = i32(tile_m * bm)
        n0 = i32(tile_n * bn)
        outer = mma.divide(batch, inner)
        within = i32(batch - outer * inner)
        x = walk.at(x, i32(outer * x_outer + within * x_inner), chunk * x_size)
        w = walk.at(w, i32(outer * w_outer + within * w_inner), chunk * w_size)
        stored = last_stored if batch == inner - 1 else stored

        # What this thread loads: chunk `column` of rows first, first + apart … of A and of B.
        column = i32(tid % across)
        first = i32(tid // across)
        k = i32(part * steps * across + column)
        steps = i32(min(steps, i32((chunks + across - 1) // across - part * steps)))
        tap = mma.divide(k, channels)
        c = i32(k - tap * channels)
        r = mma.divide(tap, taps_w)
        s = i32(tap - r * taps_w)
        a_at = cuda.local.array(a_rows, types.int32)
        a_h = cuda.local.array(a_rows, types.int32)
        a_w = cuda.local.array(a_rows, types.int32)
        for i in range(a_rows):
            a_at[i], a_h[i], a_w[i] = walk.first_tap(i32(m0 + first + i * apart), rows, images, x_row)
        put_a = base + u32((column * chunk * a_pitch + first) * 4)
        put_b = base + u32((bk * a_pitch + column * chunk * b_pitch + first) * 4)
        from_a = base + u32(tid // threads_n * 16)
        from_b = base + u32((bk * a_pitch + tid % threads_n * 4) * 4)

        acc = zeros()
        staged = cuda.local.array(words, types.float32)
        fill = u32(0)
        for step in range(i32(steps + 1)):
            if step < steps:  # global memory to registers
                inside = k < chunks
                h = i32(r * dilation_h)
                v = i32(s * dilation_w)
                shift = i32(h * x_h + v * x_row + c * x_c)
                for i in range(a_rows):
                    ok = inside and u32(i32(a_h[i] + h)) < u32(image_h) and u32(i32(a_w[i] + v)) < u32(image_w)
                    fetch_x(staged, i * chunk, walk.at(x, i32(a_at[i] + shift), chunk * x_size), i32(ok))
                shift = i32(r * w_r + s * w_s + c * w_c)
                for i in range(b_rows):
                    n = i32(n0 + first + i * apart)
                    ok = inside and n < columns
                    fetch_w(staged, a_words + i * chunk, walk.at(w, i32(n * w_row + shift), chunk * w_size), i32(ok))
                k = i32(k + across)
                r, s, c = walk.onward(r, s, c, channels, images)
            if step > 0:
                acc = multiply(acc, from_a + (u32(stage) - fill), from_b + (u32(stage) - fill))
            if step < steps:  # registers to shared memory
                for i in range(a_rows):
                    for j in range(chunk):
                        put(put_a + fill + u32((i * apart + j * a_pitch) * 4), staged[i * chunk + j])
                for i in range(b_rows):
                    for j in range(chunk):
                        put(put_b + fill + u32((i * apart + j * b_pitch) * 4), staged[a_words + i * chunk + j])
            cuda.syncthreads()
            fill = u32(stage) - fill

        if split:
            # Parts of a tile lie one after the other; each thread reads back what its like wrote.
            parts = i32(cuda.gridDim.y)
            own = walk.at(partial, types.int64(cuda.blockIdx.x) * parts * (bm * bn) + tid * 4, 4)
            store_partial(acc, walk.at(own, types.int64(part) * (bm * bn), 4))
            if not last_to_arrive(walk.at(counter, cuda.blockIdx.x, 4), parts):
                return
            acc = zeros()
            for i in range(parts):
                acc = add_partial(acc, walk.at(own, types.int64(i) * (bm * bn), 4))

        # The epilogue: one row of each thread at a time through a slab, so that neighbouring threads store neighbouring columns.
        to = base + u32((tid // threads_n * slab_pitch + tid % threads_n * 4) * 4)
        for i in range(rows_each):
            cuda.syncthreads()
            spill(acc, to, i32(i))
            cuda.syncthreads()
            for j in range(turns):
                place = i32(tid + j * threads)
                row = i32(place // groups)
                group = i32(place % groups)
                values = read(base + u32((row * slab_pitch + group * lanes) * 4))
                m = i32(m0 + i // 4 * (4 * threads_m) + row * 4 + i % 4)
                n = i32(n0 + group * lanes)
                if m < rows and n < stored:
                    store(values, i32(batch * row_batch + m), i32(batch * column_batch + n), e)

    addresses = ["x", "w", "partial", "counter"] if split else ["x", "w"]
    params = [f"e{i}" for i in range(len(extra))]
    scope = {"body": body, "partial": 0, "counter": 0}
    text = f"def kernel({', '.join([*addresses, *SCALARS, *MORE, *params])}):\n    body(x, w, partial, counter, "
    text += f"({', '.join(MATRICES)}), ({', '.join(IMAGES)}), ({', '.join(MORE)}), {tuple_of(params)})\n"
    signature = types.void(*[u64] * len(addresses), *[i32] * (len(SCALARS) + len(MORE)), *extra)
    return Function(execute(text, scope, "kernel"), signature, threads)


# --- The kernel families ---------------------------------------------------------------------------------------------


class _Simt(Kernel):
    """Convolutions and matrix products of floats by CUDA cores; one class for each of the two ops."""

    def supports(self, op: Op, program: Program, arch: Arch) -> str | None:
        problem = describe(op, program)
        if isinstance(problem, str):
            return problem
        if problem.rows >= 2**31 - 256:
            return f"it has {problem.rows} rows; they are counted in 31 bits"
        for t in (problem.x, problem.w):
            if not t.dtype.is_float:
                return f"{t.name} is {t.dtype.value}; it multiplies floats"
            if t.span >= 2**31:
                return f"{t.name} has {t.span} elements; offsets are counted in 31 bits"
        return None

    def configs(self, op: Op, program: Program, arch: Arch) -> Iterator[Config]:
        problem = describe(op, program)
        assert isinstance(problem, Problem)
        ranked = []
        moving = traffic_us(op, program, arch)
        for tile in TILES:
            for splits in sorted({split_steps(_steps(problem), s)[0] for s in (1, 2, 4, 8, 16)}):
                if splits == 1 or _scratch(problem, tile, splits) <= MOST_SCRATCH:
                    ranked.append((_time(problem, tile, splits, arch, moving), {"bm": tile.bm, "bn": tile.bn, "splits": splits}))
        ranked.sort(key=lambda r: r[0])
        for _, config in ranked[:6]:
            yield config

    def cost(self, op: Op, program: Program, config: Config, arch: Arch) -> float:
        problem = describe(op, program)
        assert isinstance(problem, Problem)
        return _time(problem, _tile(config), int(config["splits"]), arch, traffic_us(op, program, arch))  # type: ignore[arg-type]

    def work(self, op: Op, program: Program, config: Config, arch: Arch) -> Work:
        problem = describe(op, program)
        assert isinstance(problem, Problem)
        if problem.batches * problem.rows * problem.stored == 0:
            return Work(())
        tile, chunk = _tile(config), chunk_of(problem)
        splits, each = split_steps(_steps(problem), int(config["splits"]))  # type: ignore[arg-type]
        lanes = next(n for n in (4, 2, 1) if (problem.column_batch if problem.batches > 1 else 0) % n == 0)
        stored = epilogue.describe(op, program, epilogue.frame_of(op, program), lanes)
        more = (problem.x_pixel[3], *(s // chunk for s in problem.w_tap[:2]), problem.w_tap[2])
        args: list[Arg] = [Ptr(problem.x.name), Ptr(problem.w.name)]
        if splits > 1:
            args += [Scratch(), Counters()]
        args += [I32(v) for v in scalars(problem, tile.bm, tile.bn, BK, each, chunk).values()]
        args += [I32(v) for v in more]
        tm, tn = tiles(problem, tile.bm, tile.bn)
        count = tm * tn * problem.batches
        compiled = code(
            GemmSimt.name, bm=tile.bm, bn=tile.bn, chunk=chunk, x=problem.x.dtype.value, w=problem.w.dtype.value,
            split=splits > 1, lanes=lanes, epilogue=stored.params,
        )  # fmt: skip
        launch = Launch(compiled, (count, splits, 1), tile.threads, (*args, *stored.args), tile.smem)
        if splits == 1:
            return Work((launch,))
        return Work((launch,), _scratch(problem, tile, splits), count * 4)

    def build(self, arch: Arch, **params: Any) -> Function:
        tile, x, w = BY_SHAPE[params["bm"], params["bn"]], DType(params["x"]), DType(params["w"])
        return build_tile(arch, tile, params["chunk"], x, w, params["split"], params["lanes"], params["epilogue"])


def _tile(config: Config) -> Tile:
    return BY_SHAPE[config["bm"], config["bn"]]  # type: ignore[index]


def _steps(problem: Problem) -> int:
    """Steps of BK along K: each tap's channels fill whole chunks."""
    chunk = chunk_of(problem)
    return -(-problem.taps[0] * problem.taps[1] * -(-problem.channels // chunk) // (BK // chunk))


def _scratch(problem: Problem, tile: Tile, splits: int) -> int:
    tm, tn = tiles(problem, tile.bm, tile.bn)
    return tm * tn * problem.batches * splits * tile.bm * tile.bn * 4


def _time(problem: Problem, tile: Tile, splits: int, arch: Arch, moving: float) -> float:
    share = {64: 0.75, 32: 0.6, 16: 0.45}[tile.rows * tile.columns] * (1.0 if chunk_of(problem) == 4 else 0.8)
    resident = max(1, min(512 // tile.threads, arch.smem_sm // (tile.smem + 1024)))
    rates = Rates(arch.fp32_tflops * 1e6 / arch.sms * share, step_us=0.35, least_us=0.0, start_us=1.0, store_us=0.0)
    return time_us(problem, arch, rates, tile.bm, tile.bn, BK, _steps(problem), splits, resident, moving)


class GemmSimt(_Simt):
    name = "gemm_simt"
    realises = Gemm


class ConvSimt(_Simt):
    name = "conv_simt"
    realises = Conv


SIMT = (ConvSimt(), GemmSimt())
