"""Convolution and matrix product without Tensor Cores, in float32 arithmetic: every generation, every layout and grouping.

The plain kernel that always works, and the one for models in fp32. A block computes a tile of bm×bn of one batch of a
`Problem`; operands of any float type become float32 on their way through registers to shared memory, K-major, one step ahead of
the arithmetic; a thread multiplies rows and columns in groups of four. Few tiles are split along K as in gemm_mma.
"""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from tccompile.arch import Arch, Feature
from tccompile.ir.extent import ceil_div, round_up
from tccompile.ir.ops import Conv, Gemm, Op
from tccompile.ir.program import Program
from tccompile.ir.types import DType
from tccompile.kernels import epilogue
from tccompile.kernels.implicit_gemm import (
    MOST_SCRATCH,
    Grid,
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

More = namedtuple("More", ("x_c", "w_r", "w_s", "w_c"))
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
    padded = round_up(problem.channels, 4)
    axis = 1 if problem.column_batch else x.rank - 1
    fits = problem.channels % 4 == 0 or (problem.batches == 1 and x.padded[axis] >= padded and problem.padded >= padded)
    steps = (x.offset, w.offset, *problem.x_batch, *problem.w_batch, *problem.x_pixel[:3], problem.w_column, *problem.w_tap[:2])
    return 4 if fits and problem.x_pixel[3] == problem.w_tap[2] == 1 and all(s % 4 == 0 for s in steps) else 1


@dataclass(frozen=True)
class Form:
    """What the code depends on, beside the epilogue: types of x and of w, elements that are loaded at once along K, whether K is
    split over blocks, and columns that the epilogue takes at once."""

    tile: Tile
    x: DType
    w: DType
    chunk: int
    split: bool
    lanes: int

    @property
    def across(self) -> int:
        """Chunks of a step; neighbouring threads load them, and have one of every `apart`-th row and column."""
        return BK // self.chunk

    @property
    def apart(self) -> int:
        return self.tile.threads // self.across


def rows_of(form: Form) -> Any:
    """The part that brings A, whose rows are gathered from x, to registers."""
    from tccompile.kernels.device_math import at
    from tccompile.kernels.parts import blocks
    from tccompile.kernels.parts.blocks import C, K, R, S
    from tccompile.kernels.parts.part import part
    from tccompile.kernels.ptx import memory, simt
    from tccompile.kernels.ptx.core import cuda, i32, inline, types, u32

    chunk, unit, apart, count = form.chunk, form.chunk * form.x.size, form.apart, form.tile.bm // form.apart
    take = simt.fetch(memory.load(form.x, chunk, guarded=True), chunk)

    @inline
    def begin(m0, first, matrices, images):
        """(offsets of the rows' first taps, in chunks, and those taps' places in the image)"""
        offset = cuda.local.array(count, types.int32)
        h = cuda.local.array(count, types.int32)
        w = cuda.local.array(count, types.int32)
        for i in range(count):
            offset[i], h[i], w[i] = blocks.first_tap(i32(m0 + first + i * apart), matrices, images)
        return offset, h, w

    @inline
    def fetch(own, x, here, held, matrices, images, more):
        inside = here[K] < matrices.chunks
        offset, top, left = own
        h = i32(here[R] * images.dilation_h)
        w = i32(here[S] * images.dilation_w)
        shift = i32(h * images.x_h + w * matrices.x_row + here[C] * more.x_c)
        for i in range(count):
            ok = inside and u32(i32(top[i] + h)) < u32(images.image_h) and u32(i32(left[i] + w)) < u32(images.image_w)
            take(held, i * chunk, at(x, i32(offset[i] + shift), unit), i32(ok))

    return part(begin=begin, fetch=fetch)


def columns_of(form: Form) -> Any:
    """The device function that brings B, whose columns are rows of w, to registers behind those of A."""
    from tccompile.kernels.device_math import at
    from tccompile.kernels.parts.blocks import C, K, R, S
    from tccompile.kernels.ptx import memory, simt
    from tccompile.kernels.ptx.core import i32, inline

    chunk, unit, apart, count = form.chunk, form.chunk * form.w.size, form.apart, form.tile.bn // form.apart
    take, behind = simt.fetch(memory.load(form.w, chunk, guarded=True), chunk), form.tile.bm // form.apart * chunk

    @inline
    def fetch(w, n0, first, here, held, matrices, more):
        inside = here[K] < matrices.chunks
        shift = i32(here[R] * more.w_r + here[S] * more.w_s + here[C] * more.w_c)
        for i in range(count):
            n = i32(n0 + first + i * apart)
            ok = inside and n < matrices.columns
            take(held, behind + i * chunk, at(w, i32(n * matrices.w_row + shift), unit), i32(ok))

    return fetch


def keeper(form: Form, start: int, count: int, offset: int, pitch: int) -> Any:
    """The part that writes `count` chunks of a thread, from register `start` on, to a stage: from its float `offset` on rows
    (columns) lie side by side, `pitch` floats from one k to the next."""
    from tccompile.kernels.parts.part import part
    from tccompile.kernels.ptx import memory
    from tccompile.kernels.ptx.core import inline, u32

    chunk, apart = form.chunk, form.apart
    put = memory.store(DType.F32, 1, space="shared")

    @inline
    def first(base, column, line):
        return base + u32((offset + column * chunk * pitch + line) * 4)

    @inline
    def store(held, to):
        for i in range(count):
            for j in range(chunk):
                put(to + u32((i * apart + j * pitch) * 4), held[start + i * chunk + j])

    return part(first=first, store=store)


def results_of(form: Form, store: Any) -> Any:
    """The device function (acc, i, to, base, tid, where) that takes row i of each thread to the epilogue, through a slab in
    shared memory, so that neighbouring threads store neighbouring columns. `to`: where this thread's row goes there."""
    from tccompile.kernels.ptx import memory, simt
    from tccompile.kernels.ptx.core import cuda, i32, inline, u32

    tile, lanes, pitch = form.tile, form.lanes, form.tile.bn + 4
    threads, threads_m, threads_n, groups = tile.threads, tile.threads_m, tile.threads_n, tile.bn // lanes
    turns = threads_m * groups // threads
    spill = simt.spill_row(tile.rows, tile.columns, threads_n)
    read = simt.as_tuple(memory.load(DType.F32, lanes, space="shared"), lanes)

    @inline
    def results(acc, i, to, base, tid, where):
        batch, m0, n0, stored, matrices, e = where
        cuda.syncthreads()
        spill(acc, to, i32(i))
        cuda.syncthreads()
        for j in range(turns):
            place = i32(tid + j * threads)
            row = i32(place // groups)
            group = i32(place % groups)
            values = read(base + u32((row * pitch + group * lanes) * 4))
            m = i32(m0 + i // 4 * (4 * threads_m) + row * 4 + i % 4)
            n = i32(n0 + group * lanes)
            if m < matrices.rows and n < stored:
                store(values, i32(batch * matrices.row_batch + m), i32(batch * matrices.column_batch + n), e)

    return results


def build_tile(form: Form, in_order: bool, epilogue_params: Any) -> Function:
    """The kernel's code. Parameters: x, w, with `split` also workspace and counters, SCALARS, the fields of More, the epilogue's.
    `in_order`: see `parts.split.last_to_arrive`."""
    from tccompile.kernels.parts import blocks, split
    from tccompile.kernels.ptx import mma, simt
    from tccompile.kernels.ptx.core import cuda, i32, inline, types, u32

    tile, chunk, across, splits = form.tile, form.chunk, form.across, form.split
    count, threads_n, rows, slab_pitch = tile.rows * tile.columns, tile.threads_n, tile.rows, tile.bn + 4
    a_count, b_count = tile.bm // form.apart, tile.bn // form.apart  # chunks that a thread loads
    a_pitch, b_pitch = tile.bm + 4, tile.bn + 4  # floats from one k to the next
    stage, words, b_at = BK * (a_pitch + b_pitch) * 4, (a_count + b_count) * chunk, BK * a_pitch

    locate = blocks.located(tile.bm, tile.bn, chunk * form.x.size, chunk * form.w.size)
    walk = blocks.walk(across, chunk, False)
    a, fetch_b = rows_of(form), columns_of(form)
    keep_a, keep_b = keeper(form, 0, a_count, 0, a_pitch), keeper(form, a_count * chunk, b_count, b_at, b_pitch)
    multiply = simt.multiply_step(tile.rows, tile.columns, BK, a_pitch, b_pitch, tile.threads_m, threads_n)
    zeros, parts = mma.zeros(count), split.split_k(count, tile.threads, in_order)
    store, extra = epilogue.build(epilogue_params)
    results = results_of(form, store)

    @inline
    def body(x, w, partial, counter, matrices, images, more, e):
        base, tid = mma.shared_address(cuda.shared.array(0, types.float32)), i32(cuda.threadIdx.x)
        part, batch, m0, n0, x, w, stored = locate(x, w, matrices)
        column, first = i32(tid % across), i32(tid // across)
        here, steps = walk.begin(part, column, matrices, images)
        of_a = a.begin(m0, first, matrices, images)
        to_a, to_b = keep_a.first(base, column, first), keep_b.first(base, column, first)
        from_a = base + u32(tid // threads_n * 16)
        from_b = base + u32((b_at + tid % threads_n * 4) * 4)

        acc, held = zeros(), cuda.local.array(words, types.float32)
        fill = u32(0)
        for turn in range(i32(steps + 1)):
            if turn < steps:  # global memory to registers
                a.fetch(of_a, x, here, held, matrices, images, more)
                fetch_b(w, n0, first, here, held, matrices, more)
                walk.onward(here, matrices, images)
            if turn > 0:
                acc = multiply(acc, from_a + (u32(stage) - fill), from_b + (u32(stage) - fill))
            if turn < steps:  # registers to shared memory
                keep_a.store(held, to_a + fill)
                keep_b.store(held, to_b + fill)
            cuda.syncthreads()
            fill = u32(stage) - fill

        if splits:
            own = parts.place(partial, tid)
            if not parts.is_last(acc, own, part, counter):
                return
            acc = parts.total(own)

        to = base + u32((tid // threads_n * slab_pitch + tid % threads_n * 4) * 4)
        for i in range(rows):
            results(acc, i, to, base, tid, (batch, m0, n0, stored, matrices, e))

    kernel, signature = blocks.entry(body, splits, More, extra)
    return Function(kernel, signature, tile.threads)


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
        form = Form(tile, x, w, params["chunk"], params["split"], params["lanes"])
        return build_tile(form, arch.has(Feature.ASYNC_COPIES), params["epilogue"])


def _tile(config: Config) -> Tile:
    return BY_SHAPE[config["bm"], config["bn"]]  # type: ignore[index]


def _steps(problem: Problem) -> int:
    """Steps of BK along K: each tap's channels fill whole chunks."""
    chunk = chunk_of(problem)
    return ceil_div(problem.taps[0] * problem.taps[1] * ceil_div(problem.channels, chunk), BK // chunk)


def _scratch(problem: Problem, tile: Tile, splits: int) -> int:
    tm, tn = tiles(problem, tile.bm, tile.bn)
    return tm * tn * problem.batches * splits * tile.bm * tile.bn * 4


def _time(problem: Problem, tile: Tile, splits: int, arch: Arch, moving: float) -> float:
    share = {64: 0.75, 32: 0.6, 16: 0.45}[tile.rows * tile.columns] * (1.0 if chunk_of(problem) == 4 else 0.8)
    resident = max(1, min(512 // tile.threads, arch.smem_sm // (tile.smem + 1024)))
    rates = Rates(arch.fp32_tflops * 1e6 / arch.sms * share, step_us=0.35, least_us=0.0, start_us=1.0, store_us=0.0)
    return time_us(problem, arch, rates, Grid(tile.bm, tile.bn, BK, _steps(problem), splits, resident), moving)


class GemmSimt(_Simt):
    name = "gemm_simt"
    realises = Gemm


class ConvSimt(_Simt):
    name = "conv_simt"
    realises = Conv


SIMT = (ConvSimt(), GemmSimt())
