"""Convolution and matrix product on Tensor Cores by mma.sync: the generations from sm_70 on.

A block computes a tile of bm rows by bn columns of one batch of a `Problem`. K is walked in steps of bk; each step's operands
are copied to shared memory in chunks of 8 halves, every thread following one chunk column of the tap and channel walk, so that
a step may cover part of a tap or several. An operand of a product that is not K-major is copied in lines of K, in chunks of 8
rows, and turned round by ldmatrix. Warps multiply 16×16 blocks from there. From sm_80 on the copies are asynchronous and
run `stages` - 1 steps ahead; before, they pass through registers, one step ahead.

Where the tiles are too few to fill the GPU, K is split over blocks: each writes its part of the tile to a workspace, and the
last one to arrive, by a counter, adds the parts in their order and goes on to the epilogue, so results do not depend on timing.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from tccompile.arch import KIB, Arch
from tccompile.ir.ops import Conv, Gemm, Op
from tccompile.ir.program import Program
from tccompile.kernels import epilogue
from tccompile.kernels.codegen import execute, tuple_of
from tccompile.kernels.implicit_gemm import (
    CHUNK,
    IMAGES,
    MATRICES,
    MOST_SCRATCH,
    SCALARS,
    OneWay,
    Problem,
    Rates,
    describe,
    scalars,
    split_steps,
    tiles,
    time_us,
    unfit,
)
from tccompile.kernels.ptx.atoms import instruction_of
from tccompile.kernels.spec import (
    I32,
    Arg,
    Config,
    Counters,
    Function,
    Launch,
    Ptr,
    Scratch,
    Value,
    Work,
    code,
    traffic_us,
)

LINES = ("depth", "x_line", "w_line")
"""int32 parameters after SCALARS if not all is K-major: lines of K, and strides of x and w from line to line, in chunks."""

MOST_SPLITS = 32
"""Parts of K."""

LATENCY_US = 0.9
"""From a copy's begin to its end where memory is busy."""

FEW_STREAMS = 0.9
"""Of a large product's time, where splits of K give a multiprocessor two blocks or less: more of them read memory more slowly.

0.83 to 0.9 in three products of 16 rows and weights of 0.2 to 1 GB, an H200.
"""


@dataclass(frozen=True)
class Tile:
    """What a block computes and how its warps share it.

    bm, bn, bk        rows, columns and depth of a step
    warps_m, warps_n  warps along rows and columns
    blocks            blocks that a multiprocessor holds at once: they bound the registers
    """

    bm: int
    bn: int
    bk: int
    warps_m: int
    warps_n: int
    blocks: int

    @property
    def threads(self) -> int:
        return 32 * self.warps_m * self.warps_n

    @property
    def mi(self) -> int:
        """16-row blocks of a warp."""
        return self.bm // self.warps_m // 16

    @property
    def nj(self) -> int:
        """16-column blocks of a warp."""
        return self.bn // self.warps_n // 16

    @property
    def stage(self) -> int:
        """Bytes of one step's operands."""
        return 2 * (self.bm + self.bn) * self.bk

    @property
    def slab_pitch(self) -> int:
        """Floats from row to row where a warp turns its results round: 8 or 24 modulo 32, for accesses without bank conflicts."""
        return 16 * self.nj + 8

    @property
    def copies_lines(self) -> bool:
        """Whether a thread's lines of K have one swizzle, where A is not K-major."""
        return self.threads * CHUNK // self.bm % 8 == 0

    def smem(self, stages: int) -> int:
        """Bytes of shared memory: the operands' stages, later the warps' slabs of 16 rows; and room to align it."""
        slabs = self.warps_m * self.warps_n * 16 * self.slab_pitch * 4
        return max(stages * self.stage, slabs) + 128

    def __post_init__(self) -> None:
        across = self.bk // CHUNK
        assert across in (4, 8), "the swizzle permutes the four or eight chunks of a row"
        assert self.mi * self.warps_m * 16 == self.bm and self.nj * self.warps_n * 16 == self.bn
        assert self.bm * across % self.threads == 0 and self.bn * across % self.threads == 0, "all threads copy equally much"
        assert self.threads // across % 8 == 0 and self.threads * CHUNK // self.bn % 8 == 0, "a thread's rows have one swizzle"


# fmt: off
TILES = (
    #     bm   bn  bk  warps  blocks
    Tile(128, 128, 32, 2, 2, 2),
    Tile(256,  64, 32, 4, 1, 2),
    Tile(128,  64, 64, 2, 2, 2),
    Tile( 64, 128, 64, 2, 2, 2),
    Tile( 64,  64, 64, 2, 2, 3),
    Tile(128,  32, 64, 4, 1, 3),
    Tile(128,  16, 64, 4, 1, 3),
    Tile( 64,  32, 64, 4, 1, 4),
    Tile( 32,  64, 64, 1, 4, 4),
    Tile( 16,  64, 64, 1, 4, 4),
)
# fmt: on
BY_SHAPE = {(t.bm, t.bn, t.bk): t for t in TILES}


def stages_of(tile: Tile, arch: Arch) -> int:
    """Steps of operands in shared memory: as many as leave room for the tile's blocks, four at most; 0 if too few fit."""
    if not arch.cp_async:  # the registers that copies pass through leave room for 8 blocks of accumulators
        return 2 if tile.smem(2) <= arch.smem_block and tile.mi * tile.nj <= 8 else 0
    for blocks in (tile.blocks, 1):
        room = min(arch.smem_block, arch.smem_sm // blocks - 1 * KIB)  # each block costs the system 1 KiB
        for stages in (4, 3):
            if tile.smem(stages) <= room:
                return stages
    return 0


def resident_of(tile: Tile, arch: Arch) -> int:
    """Blocks that a multiprocessor holds at once."""
    smem = tile.smem(stages_of(tile, arch)) + KIB
    return max(1, min(tile.blocks, arch.smem_sm // smem, arch.threads_sm // tile.threads, arch.blocks_sm))


RATES = {16: (5.5e6, 0.30), 8: (3.0e6, 0.16), 4: (3.5e6, 0.18), 2: (2.2e6, 0.14), 1: (2.0e6, 0.10)}
"""By a warp's 16×16 blocks: FLOP a microsecond of a multiprocessor, and a step's overhead in microseconds; fitted to an H100."""


MEMORY_US = 0.8
"""From a copy's start to its end, when the operand comes from memory."""


def rates_of(tile: Tile, arch: Arch, linear: bool, loads: int) -> Rates:
    """What the kernel reaches: as on an H100, but at most 0.9 of what the generation's Tensor Cores can do.

    Where copies are not asynchronous a step waits for memory. `loads`: of the epilogue, those that differ by row.
    """
    flops, step = RATES[tile.mi * tile.nj]
    peak = arch.tensor_tflops * 1e6 / arch.sms
    return Rates(
        flops_us=min(flops, 0.9 * peak),
        step_us=step + (0.0 if linear else 0.35) + (0.0 if arch.cp_async else 0.3),
        least_us=MEMORY_US / (stages_of(tile, arch) - 1),
        start_us=0.7,
        store_us=(1.9 + 3.2 * loads) * tile.bm * tile.bn / (128 * 128),
    )


# --- The kernel ------------------------------------------------------------------------------------------------------


def build_tile(
    instruction: str,
    cp_async: bool,
    tile: Tile,
    stages: int,
    linear: bool,
    k_major: tuple[bool, bool],
    split: bool,
    epilogue_params: Any,
) -> Function:
    """The kernel's code. Parameters: x, w, with `split` also workspace and counters, SCALARS, LINES if not all is K-major, the
    epilogue's."""
    from numba import cuda
    from numba.cuda import types

    from tccompile.kernels import gemm_walk as walk
    from tccompile.kernels.device_math import inline
    from tccompile.kernels.ptx import mma
    from tccompile.kernels.ptx.core import i32, u32, u64

    bm, bn, bk = tile.bm, tile.bn, tile.bk
    threads, mi, nj = tile.threads, tile.mi, tile.nj
    across = bk // CHUNK  # chunks of a row
    apart = threads // across  # rows between those that a thread copies
    a_rows, b_rows = bm // apart, bn // apart  # rows that a thread copies; or of an operand that is not K-major, lines of K
    a_k_major, b_k_major = k_major
    a_across, b_across = (across if major else n // CHUNK for major, n in zip(k_major, (bm, bn), strict=True))
    a_apart, b_apart = threads // a_across, threads // b_across
    a_pitch, b_pitch = 16 * a_across, 16 * b_across
    words = 4 * (a_rows + b_rows)  # registers on the way, where copies are not asynchronous
    a_bytes, stage_bytes = bm * bk * 2, tile.stage
    pitch, groups = tile.slab_pitch, 2 * nj  # a slab's row holds `groups` groups of 8 columns
    ahead = stages - 1
    count = mi * nj * 8
    warps_n = tile.warps_n

    fragments = mma.FRAGMENTS[instruction]
    lane_a, lane_b, lane_acc = (inline(f) for f in (fragments.a, fragments.b, fragments.acc))
    lane_a, lane_b = lane_a if a_k_major else lane_b, lane_b if b_k_major else lane_a
    turned = 0 if a_k_major else a_pitch, 0 if b_k_major else b_pitch
    multiply, zeros = mma.multiply_stage(instruction, mi, nj, bk, *turned), mma.zeros(count)
    spill = mma.spill_block(instruction, mi, nj, pitch)
    store_partial, add_partial = mma.store_partial(count, threads), mma.add_partial(count, threads)
    last_to_arrive = walk.last_to_arrive(cp_async)
    wait_copies = mma.cp_async_wait(ahead - 1)
    store, extra = epilogue.build(epilogue_params)
    read = mma.load_floats

    @inline
    def swizzled(row, chunk, across):
        """Chunk c of a row lies at c ^ key(row): the same chunk of eight neighbouring rows is in different banks."""
        return i32(chunk ^ (row // max(1, 8 // across) % min(8, across)))

    @inline
    def body(x, w, partial, counter, matrices, images, lines, e):
        rows, columns, stored, last_stored, chunks, tiles_m, tiles_n, steps, inner = matrices[:9]
        x_outer, x_inner, w_outer, w_inner, row_batch, column_batch, x_row, w_row, channels = matrices[9:]
        x_h, image_h, image_w = images[3:6]
        dilation_h, dilation_w, taps_w = images[10:13]
        base = (mma.shared_address(cuda.shared.array(0, types.uint8)) + u32(127)) & u32(0xFFFFFF80)
        tid = i32(cuda.threadIdx.x)

        # Which tile of which batch, and which part of K.
        part = i32(cuda.blockIdx.y)
        batch, tile_m, tile_n = walk.locate(i32(cuda.blockIdx.x), tiles_m, tiles_n)
        m0 = i32(tile_m * bm)
        n0 = i32(tile_n * bn)
        outer = mma.divide(batch, inner)
        within = i32(batch - outer * inner)
        x = walk.at(x, i32(outer * x_outer + within * x_inner), 16)
        w = walk.at(w, i32(outer * w_outer + within * w_inner), 16)
        stored = last_stored if batch == inner - 1 else stored

        # What this thread copies: chunk `column` of rows first, first + apart … of A and of B.
        column = i32(tid % across)
        first = i32(tid // across)
        k = i32(part * steps * across + column)  # the chunk of K
        steps = i32(min(steps, i32((chunks + across - 1) // across - part * steps)))
        tap = mma.divide(k, channels)
        c = i32(k - tap * channels)
        r = mma.divide(tap, taps_w)
        s = i32(tap - r * taps_w)
        a_at = cuda.local.array(a_rows, types.int32)  # offset in x of the row's first tap
        a_h = cuda.local.array(a_rows, types.int32)  # its position in the image
        a_w = cuda.local.array(a_rows, types.int32)
        for i in range(a_rows):
            m = i32(m0 + first + i * apart)
            if linear:
                a_at[i] = i32(m * x_row)
                a_h[i] = i32(m < rows)
                a_w[i] = 0
            else:
                a_at[i], a_h[i], a_w[i] = walk.first_tap(m, rows, images, x_row)
        b_at = cuda.local.array(b_rows, types.int32)
        for i in range(b_rows):
            n = i32(n0 + first + i * apart)
            b_at[i] = i32(n * w_row) if n < columns else i32(-1)
        # Or of A or B that is not K-major: chunk `a_column` of lines a_line, a_line + a_apart … of a step.
        depth, x_line, w_line = lines
        k0 = i32(part * i32(matrices[7]) * bk)
        a_line, a_column = i32(tid // a_across), i32(tid % a_across)
        b_line, b_column = i32(tid // b_across), i32(tid % b_across)
        m_inside, n_inside = i32(m0 + a_column * CHUNK) < rows, i32(n0 + b_column * CHUNK) < columns
        put_a = base + u32(a_line * a_pitch + swizzled(a_line, a_column, a_across) * 16)
        put_b = base + u32(a_bytes + b_line * b_pitch + swizzled(b_line, b_column, b_across) * 16)

        # Where this lane reads its fragments, in the first stage.
        lane = i32(tid % 32)
        warp_m = i32(tid // 32 // warps_n)
        warp_n = i32(tid // 32 % warps_n)
        row, half = lane_a(lane)
        if a_k_major:
            from_a = base + u32((warp_m * (mi * 16) + row) * a_pitch + swizzled(row, half, a_across) * 16)
        else:
            from_a = base + u32(row * a_pitch + swizzled(row, warp_m * (mi * 2) + half, a_across) * 16)
        row, half = lane_b(lane)
        if b_k_major:
            from_b = base + u32(a_bytes + (warp_n * (nj * 16) + row) * b_pitch + swizzled(row, half, b_across) * 16)
        else:
            from_b = base + u32(a_bytes + row * b_pitch + swizzled(row, warp_n * (nj * 2) + half, b_across) * 16)

        acc = zeros()
        staged = cuda.local.array(words, types.uint32)
        fill = u32(0)  # the stage that is filled next, and the one that is multiplied next
        drain = u32(0)
        for step in range(i32(steps + ahead)):
            if cp_async and step >= ahead:  # the stage that is multiplied has come, nobody reads the one that is filled
                wait_copies()
                cuda.syncthreads()
            if step < steps:
                inside = k < chunks
                h = i32(r * dilation_h)
                v = i32(s * dilation_w)
                shift = i32(h * x_h + v * x_row + c)
                for i in range(a_rows):
                    if not a_k_major:
                        line = i32(k0 + a_line + i * a_apart)
                        ok = m_inside and line < depth
                        source = walk.at(x, types.int64(line) * x_line + i32(m0 // CHUNK + a_column), 16)
                    elif linear:
                        ok = inside and a_h[i] != 0
                        source = walk.at(x, i32(a_at[i] + k), 16)
                    else:
                        ok = inside and u32(i32(a_h[i] + h)) < u32(image_h) and u32(i32(a_w[i] + v)) < u32(image_w)
                        source = walk.at(x, i32(a_at[i] + shift), 16)
                    if cp_async:
                        mma.cp_async(put_a + fill + u32(i * (a_apart * a_pitch)), source, i32(16) if ok else i32(0))
                    else:
                        staged[4 * i], staged[4 * i + 1], staged[4 * i + 2], staged[4 * i + 3] = mma.load_chunk(source, i32(ok))
                for i in range(b_rows):
                    if b_k_major:
                        ok = inside and b_at[i] >= 0
                        source = walk.at(w, i32(b_at[i] + k), 16)
                    else:
                        line = i32(k0 + b_line + i * b_apart)
                        ok = n_inside and line < depth
                        source = walk.at(w, types.int64(line) * w_line + i32(n0 // CHUNK + b_column), 16)
                    if cp_async:
                        mma.cp_async(put_b + fill + u32(i * (b_apart * b_pitch)), source, i32(16) if ok else i32(0))
                    else:
                        j = 4 * (a_rows + i)
                        staged[j], staged[j + 1], staged[j + 2], staged[j + 3] = mma.load_chunk(source, i32(ok))
                # On to the same column of the next step.
                k = i32(k + across)
                k0 = i32(k0 + bk)
                if not linear:
                    r, s, c = walk.onward(r, s, c, channels, images)
            if cp_async:
                mma.cp_async_commit()
            if step >= ahead:
                acc = multiply(acc, from_a + drain, from_b + drain)
                drain = u32(drain + u32(stage_bytes)) if drain < u32((stages - 1) * stage_bytes) else u32(0)
            if not cp_async:
                if step < steps:
                    for i in range(a_rows):
                        to = put_a + fill + u32(i * (a_apart * a_pitch))
                        mma.store_chunk(to, staged[4 * i], staged[4 * i + 1], staged[4 * i + 2], staged[4 * i + 3])
                    for i in range(b_rows):
                        to, j = put_b + fill + u32(i * (b_apart * b_pitch)), 4 * (a_rows + i)
                        mma.store_chunk(to, staged[j], staged[j + 1], staged[j + 2], staged[j + 3])
                cuda.syncthreads()
            fill = u32(fill + u32(stage_bytes)) if fill < u32((stages - 1) * stage_bytes) else u32(0)

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

        # The epilogue: each warp turns 16 rows at a time round in its own slab, so that a lane gets 8 columns of a row.
        cuda.syncthreads()
        slab = base + u32(tid // 32 * (16 * pitch * 4))
        row, column = lane_acc(lane)
        to = slab + u32((row * pitch + column) * 4)
        for i in range(mi):
            spill(acc, to, i32(i))
            cuda.syncwarp()
            for j in range(nj):
                at = i32(lane + j * 32)
                row = i32(at // groups)
                group = i32(at % groups)
                values = read(slab + u32((row * pitch + group * 8) * 4))
                m = i32(m0 + (warp_m * mi + i) * 16 + row)
                n = i32(n0 + warp_n * (nj * 16) + group * 8)
                if m < rows and n < stored:
                    store(values, i32(batch * row_batch + m), i32(batch * column_batch + n), e)
            cuda.syncwarp()

    addresses = ["x", "w", "partial", "counter"] if split else ["x", "w"]
    more = [f"e{i}" for i in range(len(extra))]
    lines = LINES if turned != (0, 0) else ()
    scope = {"body": body, "partial": 0, "counter": 0}
    text = f"def kernel({', '.join([*addresses, *SCALARS, *lines, *more])}):\n    body(x, w, partial, counter, "
    text += f"({', '.join(MATRICES)}), ({', '.join(IMAGES)}), ({', '.join(lines or '000')}), {tuple_of(more)})\n"
    signature = types.void(*[u64] * len(addresses), *[i32] * (len(SCALARS) + len(lines)), *extra)
    return Function(execute(text, scope, "kernel"), signature, threads, tile.blocks)


# --- The kernel families ---------------------------------------------------------------------------------------------


class _Mma(OneWay):
    """Convolutions and matrix products by mma.sync, fp16, from sm_70 on; one class for each of the two ops."""

    tensor_cores = True

    def refusal(self, way: Op, program: Program, arch: Arch) -> str | None:
        if arch.mma is None:
            return f"{arch.name} has no Tensor Cores"
        problem = describe(way, program)
        if isinstance(problem, str):
            return problem
        if problem.rows >= 2**31 - 256:
            return f"it has {problem.rows} rows; they are counted in 31 bits"
        if reason := unfit(problem):
            return reason
        if not all(problem.k_major) and instruction_of(arch) == "mma.m8n8k4":
            return f"{arch.name} has no ldmatrix to transpose {problem.x.name} or {problem.w.name} by"
        return None

    def configs_of(self, way: Op, program: Program, arch: Arch) -> Iterator[Config]:
        problem = describe(way, program)
        assert isinstance(problem, Problem)
        ranked: list[tuple[float, dict[str, Value]]] = []
        loads, moving = len(epilogue.loads_by_row(way, program)), traffic_us(way, program, arch)
        for tile in TILES:
            if not stages_of(tile, arch) or not (problem.k_major[0] or tile.copies_lines):
                continue
            options = {split_steps(-(-problem.depth // tile.bk), s)[0] for s in (1, 2, 3, 4, 6, 8, 12, 16, 24, MOST_SPLITS)}
            for splits in sorted(options):
                if splits > 1 and _scratch(problem, tile, splits) > MOST_SCRATCH:
                    continue
                config = {"bm": tile.bm, "bn": tile.bn, "bk": tile.bk, "splits": splits}
                ranked.append((_time(problem, tile, splits, arch, loads, moving), config))
        ranked.sort(key=lambda r: r[0])
        for _, config in ranked[:12]:
            yield config

    def cost_of(self, way: Op, program: Program, config: Config, arch: Arch) -> float:
        problem = describe(way, program)
        assert isinstance(problem, Problem)
        loads, moving = len(epilogue.loads_by_row(way, program)), traffic_us(way, program, arch)
        return _time(problem, _tile(config), int(config["splits"]), arch, loads, moving)  # type: ignore[arg-type]

    def work_of(self, way: Op, program: Program, config: Config, arch: Arch) -> Work:
        problem = describe(way, program)
        assert isinstance(problem, Problem)
        if problem.batches * problem.rows * problem.stored == 0:
            return Work(())
        tile = _tile(config)
        splits, each = split_steps(-(-problem.depth // tile.bk), int(config["splits"]))  # type: ignore[arg-type]
        stored = epilogue.describe(way, program, epilogue.frame_of(way, program))
        instruction = instruction_of(arch)
        stages = stages_of(tile, arch)
        args: list[Arg] = [Ptr(problem.x.name), Ptr(problem.w.name)]
        if splits > 1:
            args += [Scratch(), Counters()]
        args += [I32(v) for v in scalars(problem, tile.bm, tile.bn, tile.bk, each, CHUNK).values()]
        if not all(problem.k_major):
            args += map(I32, (problem.channels, problem.x_pixel[3] // CHUNK, problem.w_tap[2] // CHUNK))
        tm, tn = tiles(problem, tile.bm, tile.bn)
        count = tm * tn * problem.batches
        assert instruction is not None
        compiled = code(
            GemmMma.name,
            bm=tile.bm,
            bn=tile.bn,
            bk=tile.bk,
            stages=stages,
            linear=problem.linear,
            k_major=problem.k_major,
            split=splits > 1,
            epilogue=stored.params,
        )
        launch = Launch(compiled, (count, splits, 1), tile.threads, (*args, *stored.args), tile.smem(stages))
        if splits == 1:
            return Work((launch,))
        return Work((launch,), _scratch(problem, tile, splits), count * 4)

    def build(self, arch: Arch, **params: Any) -> Function:
        tile = BY_SHAPE[params["bm"], params["bn"], params["bk"]]
        instruction = instruction_of(arch)
        assert instruction is not None
        copied = params["stages"], params["linear"], params["k_major"]
        return build_tile(instruction, arch.cp_async, tile, *copied, params["split"], params["epilogue"])


def _tile(config: Config) -> Tile:
    return BY_SHAPE[config["bm"], config["bn"], config["bk"]]  # type: ignore[index]


def _scratch(problem: Problem, tile: Tile, splits: int) -> int:
    tm, tn = tiles(problem, tile.bm, tile.bn)
    return tm * tn * problem.batches * splits * tile.bm * tile.bn * 4


def _time(problem: Problem, tile: Tile, splits: int, arch: Arch, loads: int, moving: float) -> float:
    rates, resident = rates_of(tile, arch, problem.linear, loads), resident_of(tile, arch)
    if min(problem.rows, problem.columns) <= 16:  # a step's operand comes from memory, not from L2
        rates = replace(rates, step_us=max(rates.step_us, LATENCY_US / max(1, stages_of(tile, arch) - 1)))
    time = time_us(problem, arch, rates, tile.bm, tile.bn, tile.bk, -(-problem.depth // tile.bk), splits, resident, moving)
    blocks = math.prod(tiles(problem, tile.bm, tile.bn)) * splits * problem.batches
    few = moving > 20 and splits > 1 and blocks <= 2 * arch.sms and min(problem.rows, problem.columns) > 8  # where measured
    return time * FEW_STREAMS if few else time


class GemmMma(_Mma):
    name = "gemm_mma"
    realises = Gemm


class ConvMma(_Mma):
    name = "conv_mma"
    realises = Conv


MMA = (ConvMma(), GemmMma())
