"""Convolution and matrix product on Tensor Cores by mma.sync: the generations from sm_70 on.

A block computes a tile of bm rows by bn columns of one batch of a `Problem`. K is walked in steps of bk; each step's operands
are copied to shared memory in chunks of 16 bytes, every thread following one chunk column of the tap and channel walk, so that
a step may cover part of a tap or several. An operand of a product that is not K-major is copied in lines of K, in chunks of 8
rows, and turned round by ldmatrix. Warps multiply 16×16 blocks from there. From sm_80 on the copies are asynchronous and
run `stages` - 1 steps ahead; before, they pass through registers, one step ahead.

Integers of 8 bits have sums of int32, which stay so until the epilogue takes them, in parts of K, too: as int64, exactly, or each
rounded once to float32. What the epilogue's expression says of its `acc` decides. Of floats of 8 bits each instruction's sums are
added up in float32; where Tensor Cores do not take them from registers they are multiplied as halves.

Weights that are 2:4 may come compressed, from sm_80 on: half of their values, and the places of these. mma.sp takes them as its
left operand, so what it makes of a tile lies turned over (`parts.sparse_fragments`).

Where the tiles are too few to fill the GPU, K is split over blocks: each writes its part of the tile to a workspace, and the
last one to arrive, by a counter, adds the parts in their order and goes on to the epilogue, so results do not depend on timing.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from tccompile.arch import KIB, Arch, Feature
from tccompile.ir.extent import ceil_div, round_up
from tccompile.ir.forms import Sparse
from tccompile.ir.ops import Conv, Gemm, Op
from tccompile.ir.program import Program
from tccompile.ir.types import FLOAT8, DType
from tccompile.kernels import epilogue
from tccompile.kernels.gemm_sm90_cost import slots_of
from tccompile.kernels.implicit_gemm import (
    CHUNK,
    CHUNK_BYTES,
    DOUBT,
    MOST_SCRATCH,
    OPERANDS,
    Grid,
    OneWay,
    Problem,
    Rates,
    describe,
    scalars,
    sparse_form,
    split_steps,
    tiles,
    time_us,
    unaligned,
    unfit,
)
from tccompile.kernels.ptx.atoms import BITS, Atom, atoms, of_warpgroups, warp_atom
from tccompile.kernels.rates import measured
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
    memory_us,
    traffic_us,
)

MOST_SPLITS = 32
"""Parts of K."""


@dataclass(frozen=True)
class Tile:
    """What a block computes and how its warps share it.

    bm, bn, depth     rows, columns, and bytes of K of a step
    warps_m, warps_n  warps along rows and columns
    blocks            blocks that a multiprocessor holds at once: they bound the registers
    places            of weights that are 2:4 and come compressed, bytes of a column's places in a step; or 0
    """

    bm: int
    bn: int
    depth: int
    warps_m: int
    warps_n: int
    blocks: int
    places: int = 0

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
        """Bytes of one step's panels."""
        return self.bm * self.depth + self.bn * (self.depth // 2 + self.places if self.places else self.depth)

    @property
    def across(self) -> int:
        """Chunks of a row in a step."""
        return self.depth // CHUNK_BYTES

    @property
    def slab_pitch(self) -> int:
        """Words from row to row where a warp turns its results round: 8 or 24 modulo 32, for accesses without bank conflicts."""
        return 16 * self.nj + 8

    @property
    def copies_lines(self) -> bool:
        """Whether a thread's lines of K have one swizzle, where A is not K-major: of halves, which alone are turned round."""
        return self.threads * CHUNK // self.bm % 8 == 0

    def smem(self, stages: int) -> int:
        """Bytes of shared memory: the operands' stages, later the warps' slabs of 16 rows; and room to align it."""
        slabs = self.warps_m * self.warps_n * 16 * self.slab_pitch * 4
        return max(stages * self.stage, slabs) + 128

    def __post_init__(self) -> None:
        across = self.across
        assert across in (4, 8), "the swizzle permutes the four or eight chunks of a row"
        assert self.mi * self.warps_m * 16 == self.bm and self.nj * self.warps_n * 16 == self.bn
        assert self.bm * across % self.threads == 0 and self.bn * across % self.threads == 0, "all threads copy equally much"
        assert self.threads // across % 8 == 0 and self.threads * CHUNK // self.bn % 8 == 0, "a thread's rows have one swizzle"


# fmt: off
TILES = (
    #     bm   bn  depth warps  blocks
    Tile(128, 128,  64, 2, 2, 2),
    Tile(256,  64,  64, 4, 1, 2),
    Tile(128,  64, 128, 2, 2, 2),
    Tile( 64, 128, 128, 2, 2, 2),
    Tile( 64,  64, 128, 2, 2, 3),
    Tile(128,  32, 128, 4, 1, 3),
    Tile(128,  16, 128, 4, 1, 3),
    Tile( 64,  32, 128, 4, 1, 4),
    Tile( 32,  64, 128, 1, 4, 4),
    Tile( 16,  64, 128, 1, 4, 4),
)
# fmt: on
FLOAT_TILES = (Tile(128, 128, 128, 2, 4, 1), *(t for t in TILES if t.mi * t.nj <= 8 and t.nj <= 2))
"""Those of float32: parts of operands and of sums take registers beside the accumulators."""

BY_SHAPE = {(t.bm, t.bn, t.depth): t for t in (*TILES, *FLOAT_TILES)}

FLOATS = (DType.F32.value, DType.F32.value)
"""The types of operands that are multiplied in parts, and `PART`, those of the parts."""

PART = "bf16"

MOST_ROUGH = 8
"""Blocks of 16 × 16 of a warp at most where each has its sums twice: see `fragments`."""

AS_HALVES = (9, 10)
"""Major compute capabilities that do not multiply floats of 8 bits from registers: the assembler makes other instructions of such
an mma.sync, and registers are spilled."""

SPARSE = {(t.bm, t.bn): t for t in (Tile(128, 128, 128, 2, 2, 2), *(t for t in TILES if t.depth == 128 and t.bn >= 32))}
"""Those of weights that are 2:4, whose steps are twice as deep: all threads copy equally many of their values."""

PLACES = 128
"""Bytes of K of a step of 2:4 weights, and bits of its places' bytes: four for every four elements."""

TERMS = 32
"""Terms of a sum from which on float32 is multiplied in parts: shorter ones are rotations and the like, exact on CUDA cores."""


def stages_of(tile: Tile, arch: Arch) -> int:
    """Steps of operands in shared memory: as many as leave room for the tile's blocks, four at most; 0 if too few fit."""
    if not arch.has(Feature.ASYNC_COPIES):  # the registers that copies pass through leave room for 8 blocks of accumulators
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


def rates_of(tile: Tile, arch: Arch, linear: bool, loads: int, dtype: DType) -> Rates:
    """What the kernel reaches: as on an H100, but at most 0.9 of what the generation's Tensor Cores can do.

    Where copies are not asynchronous a step waits for memory. Bytes are multiplied twice as fast as halves. Floats of 8 bits that
    become halves take as long as these: 16 rows by 512 columns and K of 500,000 80.9 µs on an H200.

    loads  of the epilogue, those that differ by row; dtype: the operands' type
    """
    own, atom = measured(arch).gemm_mma, None if dtype is DType.F32 else atom_of(dtype, dtype, arch)
    faster = 2.0 if dtype.bits == 8 and atom and atom.a != "f16" else 1.0
    flops, step = (own.float_tiles if dtype is DType.F32 else own.tiles)[tile.mi * tile.nj]
    faster *= own.sparse if tile.places else 1.0
    peak = arch.tensor_tflops * 1e6 / arch.sms / (3 if dtype is DType.F32 else 1)
    return Rates(
        flops_us=min(flops, own.most * peak) * faster,
        step_us=step + (0.0 if linear else own.gather_us) + (0.0 if arch.has(Feature.ASYNC_COPIES) else own.waiting_us),
        least_us=own.memory_us / (stages_of(tile, arch) - 1),
        start_us=own.start_us,
        store_us=(own.store_us + own.load_us * loads) * tile.bm * tile.bn / (128 * 128),
    )


# --- The kernel ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Form:
    """What the code depends on, beside the epilogue.

    atom      the instruction that multiplies
    cp_async  whether the generation copies asynchronously
    linear    whether rows of x begin at multiples of one stride
    k_major   of x and of w, as `Problem.k_major`
    split     whether K is split over blocks
    floats    whether operands are float32, which an atom of bf16 multiplies in parts
    kinds     types of x and of w, where an atom's row stands for several or takes what they are widened to

    Weights are 2:4 where the atom is sparse.
    """

    atom: Atom
    cp_async: bool
    tile: Tile
    stages: int
    linear: bool
    k_major: tuple[bool, bool]
    split: bool
    floats: bool = False
    kinds: tuple[str | None, str | None] = (None, None)

    @property
    def chunk(self) -> int:
        """Elements of an operand that are copied at once."""
        return CHUNK_BYTES // 4 if self.floats else CHUNK_BYTES * 8 // BITS[self.kinds[0] or self.atom.a]

    def multiply_stage(self, a_turned: int, b_turned: int) -> Any:
        """The device function (acc, a, b, places) → acc that multiplies a stage's operands, of whose lines of K some have so many
        bytes."""
        from tccompile.kernels.parts import compensated, fragments, sparse_fragments
        from tccompile.kernels.ptx.core import inline

        tile = self.tile
        if self.atom.sparse:
            return sparse_fragments.multiply_stage(self.atom, tile.mi, tile.nj, self.kinds)
        if self.floats:
            of_two = compensated.multiply_stage(self.atom, tile.mi, tile.nj, tile.depth)
        else:
            of_two = fragments.multiply_stage(self.atom, tile.mi, tile.nj, tile.depth, a_turned, b_turned, self.kinds)

        @inline
        def multiply(acc, a, b, places):
            return of_two(acc, a, b)

        return multiply


def operands_of(form: Form) -> tuple[Any, Any, Any, Any]:
    """The parts that bring A, B and B's places from global memory to shared memory and that find fragments there, and copies."""
    if form.atom.sparse:
        return _sparse_operands(form)
    from tccompile.kernels.parts import chunks, panels, sparse_fragments
    from tccompile.kernels.parts.fragments import fragments_of

    tile, fragments, (a_k_major, b_k_major) = form.tile, fragments_of(form.atom), form.k_major

    def panel(k_major: bool, rows: int, offset: int, blocks: int, held: int) -> Any:
        across = tile.across if k_major else rows // form.chunk
        return panels.Panel(rows * tile.across // across, across, tile.threads, offset, blocks, held)

    of_a = panel(a_k_major, tile.bm, 0, tile.mi, 0)
    of_b = panel(b_k_major, tile.bn, tile.bm * tile.depth, tile.nj, of_a.count)
    copies = chunks.copies(form.cp_async, of_a.count + of_b.count)
    a_rows = panels.rows if form.linear else panels.pixels
    a = a_rows(of_a, copies, fragments.a) if a_k_major else panels.turned(of_a, copies, fragments.b, True, form.chunk)
    b = panels.columns(of_b, copies, fragments.b) if b_k_major else panels.turned(of_b, copies, fragments.a, False, form.chunk)
    return a, b, copies, sparse_fragments.no_places()


def _sparse_operands(form: Form) -> tuple[Any, Any, Any, Any]:
    """The same where B is the left operand, of half as many chunks."""
    from tccompile.kernels.parts import chunks, panels, sparse_fragments
    from tccompile.kernels.parts.fragments import WARP

    tile, half = form.tile, form.tile.across // 2
    of_a = panels.Panel(tile.bm, tile.across, tile.threads, 0, tile.mi, 0)
    of_b = panels.Panel(tile.bn, half, tile.threads, tile.bm * tile.depth, tile.nj, of_a.count)
    copies = chunks.copies(form.cp_async, of_a.count + of_b.count)
    a = (panels.rows if form.linear else panels.pixels)(of_a, copies, WARP.b)
    b = panels.values(of_b, copies, WARP.a, form.chunk)
    behind = tile.bm * tile.depth + tile.bn * sparse_fragments.VALUES
    return a, b, copies, sparse_fragments.places(form.atom, tile.bn, form.chunk, behind)


def results_of(form: Form, store: Any, taken: DType) -> Any:
    """The device function (acc, base, tid, lane, tile, where) that takes a warp's accumulators to the epilogue, in 16 rows at a
    time; `taken`: as `epilogue.Form.taken`."""
    from tccompile.kernels.parts import fragments, slabs, sparse_fragments
    from tccompile.kernels.ptx import memory, mma
    from tccompile.kernels.ptx.core import cuda, i32, inline

    tile, mi, nj = form.tile, form.tile.mi, form.tile.nj
    read = memory.load_sums(taken, 8) if form.atom.acc == "s32" else mma.load_floats
    turned = sparse_fragments if form.atom.sparse else fragments
    spill = turned.spill_block(form.atom, tile.mi, tile.nj, tile.slab_pitch)
    held = sparse_fragments.held if form.atom.sparse else fragments.fragments_of(form.atom).acc

    @inline
    def keep(values, row, group, where):
        m0, n0, warp_m, warp_n, i, batch, stored, matrices, e = where
        m = i32(m0 + (warp_m * mi + i) * 16 + row)
        n = i32(n0 + warp_n * (nj * 16) + group * 8)
        if m < matrices.rows and n < stored:
            store(values, i32(batch * matrices.row_batch + m), i32(batch * matrices.column_batch + n), e)

    part = slabs.slabs(spill, held, tile.nj, tile.slab_pitch, read, keep)

    @inline
    def results(acc, base, tid, lane, tile, where):
        cuda.syncthreads()
        (m0, n0, warp_m, warp_n), (batch, stored, matrices, e) = tile, where
        slab, to = part.own(base, tid, lane)
        for i in range(mi):
            part.turn(acc, slab, to, i, lane, (m0, n0, warp_m, warp_n, i, batch, stored, matrices, e))

    return results


def build_tile(form: Form, epilogue_params: Any) -> Function:
    """The kernel's code. Parameters: x, w, of 2:4 weights their places, with `split` also workspace and counters, SCALARS, the
    numbers of `panels.Lines` if not all is K-major, the epilogue's."""
    from tccompile.kernels.parts import async_ring, blocks, chunks, panels, split
    from tccompile.kernels.ptx import mma
    from tccompile.kernels.ptx.core import cuda, i32, inline

    tile, splits, through_registers = form.tile, form.split, not form.cp_async
    nj, warps_n, across, ahead = tile.nj, tile.warps_n, tile.across, form.stages - 1
    a, b, copies, which = operands_of(form)
    ring = async_ring.ring(form.stages, tile.stage, form.cp_async)
    locate, walk = blocks.located(tile.bm, tile.bn, CHUNK_BYTES, CHUNK_BYTES), blocks.walk(across, form.chunk, form.linear)
    multiply, zeros = form.multiply_stage(a.turned, b.turned), mma.zeros(tile.mi * nj * 8, form.atom.acc)
    parts = split.split_k(tile.mi * nj * 8, tile.threads, form.cp_async, form.atom.acc)
    store, extra = epilogue.build(epilogue_params)
    results = results_of(form, store, epilogue.Form.decoded(epilogue_params).taken)
    FILLED, MULTIPLIED = async_ring.FILLED, async_ring.MULTIPLIED

    @inline
    def body(x, w, others, matrices, images, lines, e):
        base, tid, (places, partial, counter) = chunks.base(), i32(cuda.threadIdx.x), others
        part, batch, m0, n0, x, w, stored = locate(x, w, matrices)
        column, first = i32(tid % across), i32(tid // across)
        here, steps = walk.begin(part, column, matrices, images)
        of_a, of_b = a.begin(m0, first, tid, matrices, images, lines), b.begin(n0, first, tid, matrices, images, lines)
        to_a, to_b = a.first(base, tid), b.first(base, tid)
        lane, warp_m, warp_n = i32(tid % 32), i32(tid // 32 // warps_n), i32(tid // 32 % warps_n)
        from_a, from_b = a.reads(base, lane, warp_m), b.reads(base, lane, warp_n)
        from_places = which.reads(base, lane, i32(warp_n * nj))

        acc, held = zeros(), copies.registers()
        stage = ring.begin()
        for turn in range(i32(steps + ahead)):
            ring.arrived(turn)
            if turn < steps:
                a.fetch(of_a, x, here, held, to_a + stage[FILLED], matrices, images)
                b.fetch(of_b, w, here, held, to_b + stage[FILLED], matrices, images)
                which.fetch(places, n0, here, tid, base + stage[FILLED], matrices)
                walk.onward(here, matrices, images)
            ring.asked()
            if turn >= ahead:
                at = stage[MULTIPLIED]
                acc = multiply(acc, from_a + at, from_b + at, from_places + at)
                ring.advance(stage, MULTIPLIED)
            if through_registers and turn < steps:
                a.store(held, to_a + stage[FILLED])
                b.store(held, to_b + stage[FILLED])
            ring.written()
            ring.advance(stage, FILLED)

        if splits:
            own = parts.place(partial, tid)
            if not parts.is_last(acc, own, part, counter):
                return
            acc = parts.total(own)

        results(acc, base, tid, lane, (m0, n0, warp_m, warp_n), (batch, stored, matrices, e))

    kernel, signature = blocks.entry(body, splits, None if all(form.k_major) else panels.Lines, extra, form.atom.sparse)
    return Function(kernel, signature, tile.threads, tile.blocks)


# --- The kernel families ---------------------------------------------------------------------------------------------


class _Mma(OneWay):
    """Convolutions and matrix products by mma.sync, from sm_70 on; one class for each of the two ops."""

    tensor_cores = True

    def refusal(self, way: Op, program: Program, arch: Arch) -> str | None:
        if not atoms(arch):
            return f"{arch.name} has no Tensor Cores"
        problem = describe(way, program)
        if isinstance(problem, str):
            return problem
        if problem.rows >= 2**31 - 256:
            return f"it has {problem.rows} rows; they are counted in 31 bits"
        stored = program.storage.get(problem.y.storage)
        if _floats(problem) and stored is not None and stored.in_full:
            return f"parts in {PART} would leave out the last digits of its products, which count: {stored.reason}"
        if reason := _unfit_floats(problem, arch) if _floats(problem) else unfit(problem, OPERANDS):
            return reason
        if not _floats(problem) and atom_of(problem.x.dtype, problem.w.dtype, arch) is None:
            return f"{arch.name} has no products of {problem.x.dtype.value}"
        if not all(problem.k_major) and not _floats(problem) and not problem.across:
            return f"{problem.x.name} or {problem.w.name} is transposed, which ldmatrix does for 16 bits only"
        if not all(problem.k_major) and warp_atom(arch) is None:
            return f"{arch.name} has no ldmatrix to transpose {problem.x.name} or {problem.w.name} by"
        return None

    def configs_of(self, way: Op, program: Program, arch: Arch) -> Iterator[Config]:
        problem = describe(way, program)
        assert isinstance(problem, Problem)
        ranked: list[tuple[float, dict[str, Value]]] = []
        loads, moving = len(epilogue.loads_by_row(way, program)), traffic_us(way, program, arch)
        atom = None if _floats(problem) else atom_of(problem.x.dtype, problem.w.dtype, arch)
        for tile in FLOAT_TILES if _floats(problem) else TILES:
            if not stages_of(tile, arch) or not (problem.k_major[0] or tile.copies_lines):
                continue
            if atom and atom.rough and tile.mi * tile.nj > MOST_ROUGH:
                continue
            steps = _steps(problem, tile)
            options = {split_steps(steps, s)[0] for s in (1, 2, 3, 4, 6, 8, 12, 16, 24, MOST_SPLITS)}
            for splits in sorted(options):
                if splits > 1 and _scratch(problem, tile, splits) > MOST_SCRATCH:
                    continue
                config = {"bm": tile.bm, "bn": tile.bn, "bk": tile.depth // problem.x.dtype.size, "splits": splits}
                ranked.append((_time(problem, tile, splits, arch, loads, moving), config))
        ranked.sort(key=lambda r: r[0])
        for _, config in ranked[:12]:
            yield config
        if _uncompressed(way, program, arch) is None:
            yield from self._sparse_configs(way, program, problem, arch)

    def _sparse_configs(self, way: Op, program: Program, problem: Problem, arch: Arch) -> Iterator[Config]:
        """Those that read 2:4 weights compressed."""
        steps = ceil_div(problem.depth * problem.x.dtype.size, 128)
        sizes = [size for size, t in SPARSE.items() if stages_of(replace(t, places=_places_of(problem)), arch)]
        splits = {split_steps(steps, s)[0] for s in (1, 2, 4, 8, 16)}
        found: list[Config] = [
            {"bm": bm, "bn": bn, "bk": 128 // problem.x.dtype.size, "splits": n, "sparse": True}
            for bm, bn in sizes
            for n in sorted(splits)
            if n == 1 or ceil_div(problem.rows, bm) * ceil_div(problem.stored, bn) * n * bm * bn * 4 <= MOST_SCRATCH
        ]
        yield from sorted(found, key=lambda c: self.cost_of(way, program, c, arch))[:8]

    def without_zeros(self, op: Op, program: Program, arch: Arch) -> str | None:
        return None if of_warpgroups(arch) else self.supports(op, program, arch) or _uncompressed(op, program, arch)

    def cost_of(self, way: Op, program: Program, config: Config, arch: Arch) -> float:
        problem = describe(way, program)
        assert isinstance(problem, Problem)
        loads, moving = len(epilogue.loads_by_row(way, program)), traffic_us(way, program, arch)
        form, fewer = _read(way, program, config), 0.0
        if form:
            fewer = memory_us([problem.w], arch) - memory_us([program.tensors[name] for name in form.tensors], arch)
        time = _time(problem, _tile(problem, config), int(config["splits"]), arch, loads, moving - fewer)  # type: ignore[arg-type]
        results = problem.batches * problem.rows * problem.stored
        functions = slots_of(way.epilogue.expr, program.tensors[way.y].dtype, arch) * results / (128 * arch.sms)
        time += functions / measured(arch).cycles_us
        return time * DOUBT if form else time

    def work_of(self, way: Op, program: Program, config: Config, arch: Arch) -> Work:
        problem = describe(way, program)
        assert isinstance(problem, Problem)
        if problem.batches * problem.rows * problem.stored == 0:
            return Work(())
        tile, chunk = _tile(problem, config), problem.chunk
        splits, each = split_steps(_steps(problem, tile), int(config["splits"]))  # type: ignore[arg-type]
        stored = epilogue.describe(way, program, epilogue.frame_of(way, program))
        stages = stages_of(tile, arch)
        form = _read(way, program, config)
        args: list[Arg] = [Ptr(problem.x.name), *map(Ptr, form.tensors if form else [problem.w.name])]
        if splits > 1:
            args += [Scratch(), Counters()]
        channels = round_up(problem.channels, max(CHUNK, chunk)) // chunk  # of w: taps are neighbours, with their padding
        numbers = scalars(problem, tile.bm, tile.bn, tile.across * chunk, each, chunk, channels)
        if form:
            numbers["w_row"] = program.tensors[form.tensor].strides[0] // chunk
        args += map(I32, numbers.values())
        if not all(problem.k_major):
            args += map(I32, (problem.channels, problem.x_pixel[3] // chunk, problem.w_tap[2] // chunk))
        tm, tn = tiles(problem, tile.bm, tile.bn)
        count = tm * tn * problem.batches
        compiled = code(
            GemmMma.name,
            types=(problem.x.dtype.value, problem.w.dtype.value),
            tile=(tile.bm, tile.bn, tile.depth),
            stages=stages,
            linear=problem.linear,
            k_major=problem.k_major,
            split=splits > 1,
            epilogue=stored.params,
            **({"sparse": True} if form else {}),
        )  # fmt: skip
        launch = Launch(compiled, (count, splits, 1), tile.threads, (*args, *stored.args), tile.smem(stages))
        if splits == 1:
            return Work((launch,))
        return Work((launch,), _scratch(problem, tile, splits), count * 4)

    def build(self, arch: Arch, **params: Any) -> Function:
        x, w = map(DType, params["types"])
        floats = params["types"] == FLOATS
        if params.get("sparse"):
            atom = warp_atom(arch, OPERANDS[w], OPERANDS[x], sparse=True)
            tile = replace(SPARSE[tuple(params["tile"][:2])], places=PLACES // x.bits)
        else:
            atom, tile = warp_atom(arch, PART, PART) if floats else atom_of(x, w, arch), BY_SHAPE[tuple(params["tile"])]
        assert atom is not None
        how = {name: params[name] for name in ("stages", "linear", "k_major", "split")} | {"floats": floats}
        how["kinds"] = (OPERANDS[x], OPERANDS[w]) if x.bits == 8 else (None, None)
        return build_tile(Form(atom, arch.has(Feature.ASYNC_COPIES), tile, **how), params["epilogue"])


def atom_of(x: DType, w: DType, arch: Arch) -> Atom | None:
    """What multiplies operands of these types: floats of 8 bits as halves where there is nothing for them."""
    own = warp_atom(arch, OPERANDS[x], OPERANDS[w], quads=True)
    widened = {x, w} <= {*FLOAT8} and (own is None or arch.cc[0] in AS_HALVES)
    return warp_atom(arch, quads=True) if widened else own


def _floats(problem: Problem) -> bool:
    """Whether its operands are float32, which are multiplied in parts."""
    return problem.x.dtype is DType.F32 and problem.w.dtype is DType.F32


def _unfit_floats(problem: Problem, arch: Arch) -> str | None:
    """None if operands of float32 can be multiplied in parts, else the rule that does not hold."""
    if warp_atom(arch, PART, PART) is None:
        return f"{arch.name} has no products of {PART}, of which those of float32 are made"
    terms = math.prod(problem.taps) * problem.channels
    if terms < TERMS:
        return f"sums of {terms} products are exact in float32 on CUDA cores; from {TERMS} on they are made of parts in {PART}"
    if not all(problem.k_major):
        return f"{problem.x.name} or {problem.w.name} is transposed, which ldmatrix does for 16 bits only"
    return unaligned(problem)


def _tile(problem: Problem, config: Config) -> Tile:
    if config.get("sparse"):
        return replace(SPARSE[config["bm"], config["bn"]], places=_places_of(problem))  # type: ignore[index]
    return BY_SHAPE[config["bm"], config["bn"], int(config["bk"]) * problem.x.dtype.size]  # type: ignore[index]


def _places_of(problem: Problem) -> int:
    """Bytes of places of a column of weights that are 2:4, in a step."""
    return PLACES // problem.x.dtype.bits


def _read(way: Op, program: Program, config: Config) -> Sparse | None:
    """The compressed form of the weights, if the config reads that."""
    if not config.get("sparse"):
        return None
    form = sparse_form(way, program)
    assert form, "the weights have no 2:4 form"
    return form


def _uncompressed(way: Op, program: Program, arch: Arch) -> str | None:
    """None if 2:4 weights can be read compressed, else the rule that does not hold."""
    form, problem = sparse_form(way, program), describe(way, program)
    if form is None or not isinstance(problem, Problem):
        return "its weights are not 2:4"
    if of_warpgroups(arch):
        return f"{arch.name} has sparse products of warpgroups, which are faster"
    x, w = (OPERANDS.get(t.dtype, "") for t in (problem.x, problem.w))
    atom = warp_atom(arch, w, x, sparse=True) if x and w else None
    if atom is None or atom.rough:
        return f"{arch.name} has no sparse products of {problem.x.dtype.value} that a warp makes"
    if not all(problem.k_major):
        return f"{problem.x.name} is transposed; sparse Tensor Cores take both along K"
    if problem.batches > 1:
        return f"it has {problem.batches} batches; 2:4 weights are one matrix's"
    if problem.taps != (1, 1) and problem.channels % (step := 128 // problem.x.dtype.size):
        return f"its taps have {problem.channels} channels, not a multiple of {step}"
    return None


def _steps(problem: Problem, tile: Tile) -> int:
    """Steps of the tile's depth along K."""
    return ceil_div(problem.depth * problem.x.dtype.size, tile.depth)


def _scratch(problem: Problem, tile: Tile, splits: int) -> int:
    tm, tn = tiles(problem, tile.bm, tile.bn)
    return tm * tn * problem.batches * splits * tile.bm * tile.bn * 4


def _time(problem: Problem, tile: Tile, splits: int, arch: Arch, loads: int, moving: float) -> float:
    own = measured(arch).gemm_mma
    rates, resident = rates_of(tile, arch, problem.linear, loads, problem.x.dtype), resident_of(tile, arch)
    if min(problem.rows, problem.columns) <= 16:  # a step's operand comes from memory, not from L2
        rates = replace(rates, step_us=max(rates.step_us, own.latency_us / max(1, stages_of(tile, arch) - 1)))
    grid = Grid(tile.bm, tile.bn, tile.depth // problem.x.dtype.size, _steps(problem, tile), splits, resident)
    time = time_us(problem, arch, rates, grid, moving)
    blocks = math.prod(tiles(problem, tile.bm, tile.bn)) * splits * problem.batches
    few = moving > 20 and splits > 1 and blocks <= 2 * arch.sms  # where measured
    return time * own.few_streams if few else time


class GemmMma(_Mma):
    name = "gemm_mma"
    realises = Gemm


class ConvMma(_Mma):
    name = "conv_mma"
    realises = Conv


MMA = (ConvMma(), GemmMma())
