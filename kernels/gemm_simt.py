"""Convolution and matrix product without Tensor Cores: every generation, every layout and grouping.

The plain kernel that always works, and the one for models in fp32. A block computes a tile of bm×bn of one batch of a
`Problem`; operands of any float type become float32 on their way through registers to shared memory, K-major, one step ahead of
the arithmetic; a thread multiplies rows and columns in groups of four. Few tiles are split along K as in gemm_mma.

Integers of 8 bits stay as they are, a word for four neighbours along K (or for one, where they are no neighbours, with zeros
beside it), which dp4a multiplies at once; sums are int32, as in gemm_mma.
"""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from tccompile.arch import Arch, Feature
from tccompile.ir.extent import ceil_div, divides, round_up
from tccompile.ir.ops import Conv, Gemm, Op
from tccompile.ir.program import Program
from tccompile.ir.types import DType
from tccompile.kernels import epilogue
from tccompile.kernels.implicit_gemm import (
    MOST_SCRATCH,
    OPERANDS,
    Grid,
    Problem,
    Rates,
    describe,
    scalars,
    split_steps,
    tiles,
    time_us,
)  # fmt: skip
from tccompile.kernels.ptx.atoms import Atom, thread_atom
from tccompile.kernels.rates import measured
from tccompile.kernels.remembered import remembered
from tccompile.kernels.spec import I32, Arg, Config, Counters, Function, Kernel, Launch, Ptr, Scratch, Work, code, traffic_us

BK = 16
"""Depth of a step, in words of shared memory: a float32, or up to four integers of 8 bits."""

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


@remembered
def chunk_of(problem: Problem) -> int:
    """Elements that are loaded at once along K: 4 where x and w have neighbouring channels at aligned rows, else 1."""
    x, w = problem.x, problem.w
    padded = round_up(problem.channels, 4)
    axis = 1 if problem.column_batch else x.rank - 1
    fits = divides(4, problem.channels) or (problem.batches == 1 and x.padded[axis] >= padded and problem.padded >= padded)
    steps = (x.offset, w.offset, *problem.x_batch, *problem.w_batch, *problem.x_pixel[:3], problem.w_column, *problem.w_tap[:2])
    return 4 if fits and problem.x_pixel[3] == problem.w_tap[2] == 1 and all(divides(4, s) for s in steps) else 1


def kind_of(dtype: DType) -> str:
    """As what operands of a type are multiplied: floats as float32."""
    return "f32" if dtype.is_float else OPERANDS.get(dtype, dtype.value)


def words_of(chunk: int, atom: Atom) -> int:
    """Words of shared memory that so many elements take: one each, unless an instruction multiplies several of a word."""
    return ceil_div(chunk, atom.k)


def atom_of(problem: Problem, arch: Arch) -> Atom | None:
    """What multiplies the operands, if anything does."""
    return thread_atom(arch, kind_of(problem.x.dtype), kind_of(problem.w.dtype))


@dataclass(frozen=True)
class Form:
    """What the code depends on, beside the epilogue: what multiplies, types of x and of w, elements that are loaded at once along
    K, whether K is split over blocks, and columns that the epilogue takes at once."""

    tile: Tile
    atom: Atom
    x: DType
    w: DType
    chunk: int
    split: bool
    lanes: int

    @property
    def words(self) -> int:
        """Words of shared memory that a chunk takes."""
        return words_of(self.chunk, self.atom)

    @property
    def across(self) -> int:
        """Chunks of a step; neighbouring threads load them, and have one of every `apart`-th row and column."""
        return BK // self.words

    @property
    def kinds(self) -> tuple[str, str]:
        """The types of x and of w, as the atom is told."""
        return kind_of(self.x), kind_of(self.w)

    @property
    def apart(self) -> int:
        return self.tile.threads // self.across


def fetch_of(form: Form, dtype: DType) -> Any:
    """The device function (array, at, address, ok) that keeps a chunk of an operand in array[at …]; zeros if not ok."""
    from tccompile.kernels.ptx import memory, simt

    if form.atom.k == 1:
        return simt.fetch(memory.load(dtype, form.chunk, guarded=True), form.chunk)
    return simt.fetch(memory.load_bytes(form.chunk), 1)


def rows_of(form: Form) -> Any:
    """The part that brings A, whose rows are gathered from x, to registers."""
    from tccompile.kernels.device_math import at
    from tccompile.kernels.parts import blocks
    from tccompile.kernels.parts.blocks import C, K, R, S
    from tccompile.kernels.parts.part import part
    from tccompile.kernels.ptx.core import cuda, i32, inline, types, u32

    words, unit, apart, count = form.words, form.chunk * form.x.size, form.apart, form.tile.bm // form.apart
    take = fetch_of(form, form.x)

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
            take(held, i * words, at(x, i32(offset[i] + shift), unit), i32(ok))

    return part(begin=begin, fetch=fetch)


def columns_of(form: Form) -> Any:
    """The device function that brings B, whose columns are rows of w, to registers behind those of A."""
    from tccompile.kernels.device_math import at
    from tccompile.kernels.parts.blocks import C, K, R, S
    from tccompile.kernels.ptx.core import i32, inline

    words, unit, apart, count = form.words, form.chunk * form.w.size, form.apart, form.tile.bn // form.apart
    take, behind = fetch_of(form, form.w), form.tile.bm // form.apart * words

    @inline
    def fetch(w, n0, first, here, held, matrices, more):
        inside = here[K] < matrices.chunks
        shift = i32(here[R] * more.w_r + here[S] * more.w_s + here[C] * more.w_c)
        for i in range(count):
            n = i32(n0 + first + i * apart)
            ok = inside and n < matrices.columns
            take(held, behind + i * words, at(w, i32(n * matrices.w_row + shift), unit), i32(ok))

    return fetch


def keeper(form: Form, start: int, count: int, offset: int, pitch: int) -> Any:
    """The part that writes `count` chunks of a thread, from register `start` on, to a stage: from its word `offset` on rows
    (columns) lie side by side, `pitch` words from one k to the next."""
    from tccompile.kernels.parts.part import part
    from tccompile.kernels.ptx import memory
    from tccompile.kernels.ptx.core import inline, u32

    words, apart = form.words, form.apart
    put = memory.store(DType.F32, 1, space="shared") if form.atom.k == 1 else memory.store_word

    @inline
    def first(base, column, line):
        return base + u32((offset + column * words * pitch + line) * 4)

    @inline
    def store(held, to):
        for i in range(count):
            for j in range(words):
                put(to + u32((i * apart + j * pitch) * 4), held[start + i * words + j])

    return part(first=first, store=store)


def results_of(form: Form, store: Any, taken: DType) -> Any:
    """The device function (acc, base, tid, where) that takes each thread's rows to the epilogue, one after the other through a
    slab in shared memory, so that neighbouring threads store neighbouring columns. `taken`: as `epilogue.Form.taken`."""
    from tccompile.kernels.ptx import memory, simt
    from tccompile.kernels.ptx.core import cuda, i32, inline, u32

    tile, lanes, rows, pitch = form.tile, form.lanes, form.tile.rows, form.tile.bn + 4
    threads, threads_m, threads_n, groups = tile.threads, tile.threads_m, tile.threads_n, tile.bn // lanes
    turns = threads_m * groups // threads
    spill = simt.spill_row(rows, tile.columns, threads_n, form.atom.acc)
    of_floats = form.atom.acc == "f32"
    load = memory.load(DType.F32, lanes, space="shared") if of_floats else memory.load_sums(taken, lanes)
    read = simt.as_tuple(load, lanes)

    @inline
    def results(acc, base, tid, where):
        batch, m0, n0, stored, matrices, e = where
        to = base + u32((tid // threads_n * pitch + tid % threads_n * 4) * 4)  # where this thread's row goes
        for i in range(rows):
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
    kept = types.float32 if form.atom.k == 1 else types.uint32
    count, threads_n = tile.rows * tile.columns, tile.threads_n
    a_count, b_count = tile.bm // form.apart, tile.bn // form.apart  # chunks that a thread loads
    a_pitch, b_pitch = tile.bm + 4, tile.bn + 4  # words from one k to the next
    stage, words, b_at = BK * (a_pitch + b_pitch) * 4, (a_count + b_count) * form.words, BK * a_pitch

    locate = blocks.located(tile.bm, tile.bn, chunk * form.x.size, chunk * form.w.size)
    walk = blocks.walk(across, chunk, False)
    a, fetch_b = rows_of(form), columns_of(form)
    keep_a, keep_b = keeper(form, 0, a_count, 0, a_pitch), keeper(form, a_count * form.words, b_count, b_at, b_pitch)
    lie = (a_pitch, b_pitch, tile.threads_m, threads_n)
    multiply = simt.multiply_step(form.atom, form.kinds, tile.rows, tile.columns, BK, lie)
    zeros, parts = mma.zeros(count, form.atom.acc), split.split_k(count, tile.threads, in_order, form.atom.acc)
    store, extra = epilogue.build(epilogue_params)
    results = results_of(form, store, epilogue.Form.decoded(epilogue_params).taken)

    @inline
    def body(x, w, others, matrices, images, more, e):
        base, tid, (_, partial, counter) = mma.shared_address(cuda.shared.array(0, types.float32)), i32(cuda.threadIdx.x), others
        part, batch, m0, n0, x, w, stored = locate(x, w, matrices)
        column, first = i32(tid % across), i32(tid // across)
        here, steps = walk.begin(part, column, matrices, images)
        of_a = a.begin(m0, first, matrices, images)
        to_a, to_b = keep_a.first(base, column, first), keep_b.first(base, column, first)
        from_a = base + u32(tid // threads_n * 16)
        from_b = base + u32((b_at + tid % threads_n * 4) * 4)

        acc, held = zeros(), cuda.local.array(words, kept)
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

        results(acc, base, tid, (batch, m0, n0, stored, matrices, e))

    kernel, signature = blocks.entry(body, splits, More, extra)
    return Function(kernel, signature, tile.threads)


# --- The kernel families ---------------------------------------------------------------------------------------------


class _Simt(Kernel):
    """Convolutions and matrix products by CUDA cores; one class for each of the two ops."""

    def supports(self, op: Op, program: Program, arch: Arch) -> str | None:
        problem = describe(op, program)
        if isinstance(problem, str):
            return problem
        if problem.rows >= 2**31 - 256:
            return f"it has {problem.rows} rows; they are counted in 31 bits"
        if atom_of(problem, arch) is None:
            kinds = f"{problem.x.name} is {problem.x.dtype.value} and {problem.w.name} {problem.w.dtype.value}"
            return f"{kinds}; CUDA cores multiply two floats, or two integers of 8 bits"
        for t in (problem.x, problem.w):
            if t.span >= 2**31:
                return f"{t.name} has {t.span} elements; offsets are counted in 31 bits"
        return None

    def configs(self, op: Op, program: Program, arch: Arch) -> Iterator[Config]:
        problem = describe(op, program)
        assert isinstance(problem, Problem)
        ranked = []
        loads, moving = len(epilogue.loads_by_row(op, program)), traffic_us(op, program, arch)
        for tile in TILES:
            for splits in sorted({split_steps(_steps(problem, arch), s)[0] for s in (1, 2, 4, 8, 16)}):
                if splits == 1 or _scratch(problem, tile, splits) <= MOST_SCRATCH:
                    config = {"bm": tile.bm, "bn": tile.bn, "splits": splits}
                    ranked.append((_time(problem, tile, splits, arch, loads, moving), config))
        ranked.sort(key=lambda r: r[0])
        for _, config in ranked[:6]:
            yield config

    def cost(self, op: Op, program: Program, config: Config, arch: Arch) -> float:
        problem = describe(op, program)
        assert isinstance(problem, Problem)
        loads, moving = len(epilogue.loads_by_row(op, program)), traffic_us(op, program, arch)
        return _time(problem, _tile(config), int(config["splits"]), arch, loads, moving)  # type: ignore[arg-type]

    def work(self, op: Op, program: Program, config: Config, arch: Arch) -> Work:
        problem = describe(op, program)
        assert isinstance(problem, Problem)
        if problem.batches * problem.rows * problem.stored == 0:
            return Work(())
        tile, chunk = _tile(config), chunk_of(problem)
        splits, each = split_steps(_steps(problem, arch), int(config["splits"]))  # type: ignore[arg-type]
        lanes = next(n for n in (4, 2, 1) if (problem.column_batch if problem.batches > 1 else 0) % n == 0)
        stored = epilogue.describe(op, program, epilogue.frame_of(op, program), lanes)
        more = (problem.x_pixel[3], *(s // chunk for s in problem.w_tap[:2]), problem.w_tap[2])
        args: list[Arg] = [Ptr(problem.x.name), Ptr(problem.w.name)]
        if splits > 1:
            args += [Scratch(), Counters()]
        depth, channels = _depth(problem, arch), ceil_div(problem.channels, chunk)
        args += [I32(v) for v in scalars(problem, tile.bm, tile.bn, depth, each, chunk, channels).values()]
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
        atom = thread_atom(arch, kind_of(x), kind_of(w))
        assert atom is not None
        form = Form(tile, atom, x, w, params["chunk"], params["split"], params["lanes"])
        return build_tile(form, arch.has(Feature.ASYNC_COPIES), params["epilogue"])


def _tile(config: Config) -> Tile:
    return BY_SHAPE[config["bm"], config["bn"]]  # type: ignore[index]


def _depth(problem: Problem, arch: Arch) -> int:
    """Elements of K of a step."""
    chunk, atom = chunk_of(problem), atom_of(problem, arch)
    assert atom is not None
    return BK // words_of(chunk, atom) * chunk


def _steps(problem: Problem, arch: Arch) -> int:
    """Steps along K: each tap's channels fill whole chunks."""
    chunk = chunk_of(problem)
    chunks = problem.taps[0] * problem.taps[1] * ceil_div(problem.channels, chunk)
    return ceil_div(chunks, _depth(problem, arch) // chunk)


def _scratch(problem: Problem, tile: Tile, splits: int) -> int:
    tm, tn = tiles(problem, tile.bm, tile.bn)
    return tm * tn * problem.batches * splits * tile.bm * tile.bn * 4


def _time(problem: Problem, tile: Tile, splits: int, arch: Arch, loads: int, moving: float) -> float:
    own = measured(arch).gemm_simt
    share = own.shares[tile.rows * tile.columns] * (1.0 if chunk_of(problem) == 4 else own.single)
    resident, depth = max(1, min(512 // tile.threads, arch.smem_sm // (tile.smem + 1024))), _depth(problem, arch)
    share *= depth / BK  # a step takes as long however many elements a word has
    # Beside products of bytes, results count
    store = (own.store_us + own.load_us * loads) * tile.bm * tile.bn / (128 * 128) if problem.integers else 0.0
    rate = arch.fp32_tflops * 1e6 / arch.sms * share
    rates = Rates(rate, step_us=own.step_us, least_us=0.0, start_us=own.start_us, store_us=store)
    return time_us(problem, arch, rates, Grid(tile.bm, tile.bn, depth, _steps(problem, arch), splits, resident), moving)


class GemmSimt(_Simt):
    name = "gemm_simt"
    realises = Gemm


class ConvSimt(_Simt):
    name = "conv_simt"
    realises = Conv


SIMT = (ConvSimt(), GemmSimt())
