"""Implicit-GEMM convolution and GEMM on Hopper: the tensor copy engine feeds wgmma.

Both are out[m, o] = sum over k of A[m, k] · B[o, k]. A Gemm, and a 1×1 convolution that reads every pixel, take A from a tiled
tensor map; any other convolution takes it from an im2col map, whose boxes are the same filter tap of `bm` output pixels in a
row. B is the weights, K-major: [O][taps · channels]. Of a Gemm either may be transposed (MN-major, in wgmma's terms): rows of A
or columns of B are neighbours in memory, and come in boxes of 64 of them by 64 of K, which wgmma reads as they are.

Weights that are 2:4 may come compressed: half of their values, and the places of these. Sparse products take them as the first
operand, so operands are swapped, and a stage has 64 bytes of weights beside 128 of A's K.

Operands are halves; or integers of 8 bits, signed or not each, which lie along K. Sums are then int32 until the epilogue takes
them, as int64 or each rounded once to float32. Or they are floats of 8 bits along K, of either kind each: their sums are
roughly kept, so those of each stage, or of two where results have 8 bits too, are added up in float32
(`parts.accumulator.Promoted`), in tiles of half as many columns at most, or of a warpgroup alone while it multiplies the next
stage (`Overlapped`); where there are no more stages these are all. All that is counted in bytes of K is the same for all of
them. Where K in 8 bits does not fill its stages, the first one is the end of K: its box ends there, and what it
shares with others does not count, so that no box reaches beyond K.

A block has one warpgroup for every 64 rows of its tile and one warp more, of which one thread asks for copies. With `swapped`
operands wgmma's rows are B's, 64 for each warpgroup, and its columns A's, of which it takes any multiple of 8: 7² or 14² pixels
fill tiles of 56 or 200 rows, and a few rows waste nothing. The accumulators are then the tile turned over. Copies and warpgroups
meet in a ring of `stages` buffers, each 128 bytes of K wide: as many as there is room for. With `split` > 1, the blocks of a
cluster share one tile: each sums a part of K, then all read the others' sums from their shared memory, each for its share of the
rows, in a fixed order.

With 2:4 weights whose sums are rough, two blocks of a cluster may have tiles of the same rows side by side: each copies half of
the rows to both (`shared`).

The kernel is put together from parts: `gemm_sm90_tile` has sizes, `gemm_sm90_copies` the tensor maps, `gemm_sm90_cost` estimates.

Where the epilogue reads at most one tensor that differs by row, such as a residual, each warp rounds its results into boxes in
shared memory, which the copy engine stores while the next tile is multiplied; a box of the residual comes into the same place
while its own tile is, or, if it is of bytes, while the results of the one before are stored. Boxes are of halves, of integers
of 8 bits or of floats of 8 bits, residuals included; of 8 bits, a lane has eight neighbours where the columns of B come in an
order for that, and so reads scales and stores results several at once. With swapped operands stmatrix turns the results back,
halves one by one and bytes of neighbouring channels in pairs: a warpgroup fills one box of 64 channels, and what differs by
channel, of which a lane has two, is read before the products are there. Otherwise lanes store rows, whose loads overlap.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from tccompile.arch import Arch
from tccompile.ir.extent import ceil_div, least
from tccompile.ir.ops import Conv, Gemm, Op
from tccompile.ir.program import Program
from tccompile.ir.sparse import ROWS
from tccompile.ir.tensor import Tensor
from tccompile.ir.types import FLOAT8, DType
from tccompile.kernels import epilogue
from tccompile.kernels.gemm_sm90_copies import EIGHTS, Boxed, Copies, boxed_results, compressed, copies, gathered, turned_results
from tccompile.kernels.gemm_sm90_cost import in_turn, slots_of, starting_us, time_us
from tccompile.kernels.gemm_sm90_tile import (
    EVEN,
    NARROW,
    SHARED,
    STAGES,
    SWAPPED,
    TILES,
    Tile,
    in_eights,
    overlapping,
    resident,
    room_for,
    shortened,
    sparse_tiles,
    stages_at_most,
    swapped_rows,
    tile,
)
from tccompile.kernels.implicit_gemm import DOUBT, OneWay, Problem, describe, sparse_form, unfit
from tccompile.kernels.loops import entry
from tccompile.kernels.parts import tile_order
from tccompile.kernels.parts.staging import RESULT
from tccompile.kernels.ptx.atoms import group_atom, of_warpgroups
from tccompile.kernels.rates import measured
from tccompile.kernels.remembered import remembered
from tccompile.kernels.spec import I32, Code, Config, Function, Launch, Value, Work, code, memory_us, traffic_us

TYPES = (DType.F16, DType.BF16, DType.I8, DType.U8, *FLOAT8)
"""Of operands: both are halves, both integers of 8 bits, or both floats of 8 bits."""

CHEAPEST = 16
"""Configs to offer; and then each with fewer blocks than all that are cheaper, which leaves room to others."""


# --- The code ------------------------------------------------------------------------------------------------------------

GEOMETRY = {False: 1, True: 20}
"""How many integers the producer of A needs, and by im2col: see `parts.producers`."""


def _results(t: Tile, batch: int, params: tuple[Value, ...]) -> Any:
    """How the tile's results leave; `batch`: rows that a lane stores at a time."""
    from tccompile.kernels.parts.boxes import Boxes
    from tccompile.kernels.parts.results import Rows, Split
    from tccompile.kernels.parts.turned import Turned

    if t.split > 1:
        return Split((t.bm, t.bn), t.pitch, t.split, t.consumers, t.swapped, t.staging, params)
    if t.boxed and t.swapped:
        return Turned((t.bm, t.bn), t.span, t.piece, t.staging, params, t.blocks)
    if t.boxed:
        return Boxes((t.bm, t.bn), t.columns, t.span, t.staging, params)
    return Rows((t.bm, t.bn), t.columns, t.pitch, batch, t.staging, params)


def _produce(producer: Any, constant: bool, shared: int) -> Any:
    """The device function of the thread that asks for copies: (maps, buffers, order, geometry, share, tiles).

    share   the stages of K that the block sums: the first one, and the one after the last
    tiles   the block's first one, and how many the next one is further on
    """
    from tccompile.kernels.ptx.core import i32, inline

    place, writer = tile_order.placing(shared), producer.ring.writer

    @inline
    def produce(maps, buffers, order, geometry, share, tiles):
        index, stride = tiles
        (slot, parity), asked = writer(), share[0]
        if constant:  # what the grids before have no part in comes while they run: weights, as many as the ring holds
            asked = producer.ask_ahead(maps[1], buffers, place(index, order), share, geometry)
        while index < order[0]:
            slot, parity = producer.fill(maps, buffers, place(index, order), share, asked, slot, parity, geometry)
            asked = share[0]
            index = i32(index + stride)

    return produce


def _consume(t: Tile, ring: Any, product: Any, results: Any) -> Any:
    """The device function of the warpgroups that multiply: (thread, buffers, rows, order, share, tiles, e).

    thread  as `parts.results` has it; share, tiles: as `_produce` has them; e: the arguments of the results
    """
    from tccompile.kernels.parts import sums
    from tccompile.kernels.ptx import hopper as hw
    from tccompile.kernels.ptx.core import i32, inline, u32

    place, bn, in_teams, warps = tile_order.placing(t.shared), t.bn, t.teams > 1, t.consumers // 32 // t.teams
    sum_up, staged = sums.summing(ring, product, results, t.added, t.short > 0, t.shared > 1), t.staged * t.writers // t.teams
    sync_teams, arrive_teams = hw.meeting(t.consumers)

    @inline
    def consume(thread, buffers, rows, order, share, tiles, e):
        base, warp, lane, tid, rank = thread
        index, stride = tiles
        (slot, parity), turn = ring.reader(), i32(0)
        if in_teams:  # the second one's first tile, and its places for results, come behind the first one's
            team, others = i32(1 if warp >= warps else 0), i32(share[1] - share[0])
            warp = i32(warp - team * warps)
            thread = u32(base + team * staged), warp, lane, tid, rank
            slot, parity = ring.skip(slot, parity, i32(team * others))
            index, stride = i32(index + team * stride), i32(2 * stride)
            if team == 1:
                arrive_teams(i32(1))
        operands = product.operands(base, warp)
        if warp == 0 and lane * 8 < bn and index < order[0]:  # of the first tile, as there is nothing to do but wait
            _, column, _ = place(index, order)
            results.ahead(i32(column * bn + lane * 8), e)
        hw.wait_for_earlier_grids()
        hw.let_later_grids_start()
        if results.early and index < order[0]:
            row, column, batch = place(index, order)
            results.ask(thread, (batch, rows, row, column), turn, e)
        while index < order[0]:
            row, column, batch = place(index, order)
            read = results.keep(i32(column * bn + warp * 16 + (lane >> 2)), e)
            tile = batch, rows, row, column
            if in_teams:  # stages before its own have been read, so that it waits for no phase but the next
                sync_teams(i32(1 + team))
            acc, slot, parity = sum_up(share, buffers, operands, slot, parity, thread, tile, e)
            if in_teams:
                arrive_teams(i32(2 - team))
                slot, parity = ring.skip(slot, parity, others)
            index = i32(index + stride)
            if results.early and index < order[0]:
                row, column, batch = place(index, order)
                results.ask(thread, (batch, rows, row, column), i32(turn + 1), e)
            turn = results.finish(acc, read, thread, tile, turn, e)
        results.drain(lane)

    return consume


def _function(t: Tile, copied: tuple[Any, ...], batch: int, params: tuple[Value, ...], blocks: int) -> Function:
    """The kernel for a tile: the code that `Hopper.work` gives its arguments to.

    copied  whether A comes by im2col; elements of a box's row; whether A and B are K-major; whether B is the same in every run
    batch   rows that a lane stores at a time
    blocks  that a multiprocessor is to hold at once

    Integers are kept in 32 bits: Numba widens every result, and a cast lets the compiler narrow it again.
    """
    from tccompile.kernels.parts.accumulator import accumulator
    from tccompile.kernels.parts.producers import Im2col, Tiled
    from tccompile.kernels.parts.ring import Ring
    from tccompile.kernels.ptx import hopper as hw
    from tccompile.kernels.ptx.core import cuda, i32, inline, types, u32

    im2col, chunk, k_major, constant = copied
    a, b = t.operands(im2col, chunk, k_major)
    ring = Ring(t.layout, "ring", t.stages, t.stage_bytes, t.product[0] // (64 * t.blocks), shared=t.shared)
    sides = (b, a) if t.swapped else (a, b)
    product = accumulator(*sides, ring, t.places, t.blocks, t.short, t.promotion)
    producer = Im2col(ring, a, b, t.places) if im2col else Tiled(ring, a, b, t.places, t.short > 0, t.shared)
    results = _results(t, batch, params)
    produce, consume = _produce(producer, constant, t.shared), _consume(t, ring, product, results)
    consumers, split, exchange, shared = t.consumers, t.split, t.exchange, t.shared
    shrink, grow = hw.set_registers(t.registers[0], False), hw.set_registers(t.registers[1], True)
    prefetch = _prefetching(t.sparse)
    geometry_at = 2 + tile_order.NUMBERS
    integers = geometry_at + GEOMETRY[im2col] + (t.short > 0)

    @inline
    def body(map_a, map_b, rest):
        rows, steps = rest[0], rest[1]
        order, geometry, e = rest[2:geometry_at], rest[geometry_at:integers], rest[integers:]
        base = u32(hw.base())
        buffers = ring.buffers(base)
        tid = i32(cuda.threadIdx.x)
        warp, lane = hw.uniform(i32(tid >> 5)), i32(tid & 31)
        if tid == 0:
            ring.init(buffers)
            results.init(base)
            hw.fence_barrier_init()
            hw.prefetch_map(map_a)
            prefetch(map_b)
        if shared > 1:  # the others' copies complete this block's barriers
            hw.cluster_arrive()
            hw.cluster_wait()
        else:
            cuda.syncthreads()
        block, blocks = u32(cuda.blockIdx.x), u32(cuda.gridDim.x)
        rank, tiles = i32(block % split), (i32(block // split), i32(blocks // split))
        share = i32(u32(steps * rank) // split), i32(u32(steps * (rank + 1)) // split)
        if warp >= consumers // 32:
            if exchange:
                shrink()
            if tid == consumers:
                produce((map_a, map_b), buffers, order, geometry, share, tiles)
            if split > 1:
                cuda.syncwarp()
                hw.cluster_arrive()
                hw.cluster_wait()
                hw.cluster_arrive()
        else:
            if exchange:
                grow()
            consume((base, warp, lane, tid, rank), buffers, rows, order, share, tiles, e)
        if shared > 1:  # a block's shared memory lives until the others have written to it
            cuda.syncwarp()
            hw.cluster_arrive()
        if split > 1 or shared > 1:  # or until all have read it
            hw.cluster_wait()

    maps = 3 if t.sparse else 2
    signature = types.void(*[types.uint64] * maps, *[types.int32] * integers, *results.types)
    flat = entry(_with_three_maps(body) if t.sparse else body, maps, integers + len(results.types))
    return Function(flat, signature, t.threads, blocks, cluster=split * shared)


def _prefetching(sparse: bool) -> Any:
    """The device function that has B's map fetched, or those of its values and their places."""
    from tccompile.kernels.ptx import hopper as hw
    from tccompile.kernels.ptx.core import inline

    @inline
    def one(map_b):
        hw.prefetch_map(map_b)

    @inline
    def two(maps):
        hw.prefetch_map(maps[0])
        hw.prefetch_map(maps[1])

    return two if sparse else one


def _with_three_maps(body: Any) -> Any:
    """The device function of a body whose second map is a pair."""
    from tccompile.kernels.ptx.core import inline

    @inline
    def whole(map_a, map_b, map_places, rest):
        body(map_a, (map_b, map_places), rest)

    return whole


# --- The kernel ----------------------------------------------------------------------------------------------------------


class Hopper(OneWay):
    """Convolutions and matrix products by TMA and wgmma; one instance for each of the two ops."""

    tensor_cores = True

    def __init__(self, name: str, realises: type[Op]) -> None:
        self.name, self.realises = name, realises

    def refusal(self, way: Op, program: Program, arch: Arch) -> str | None:
        if not of_warpgroups(arch):
            return f"{arch.name} has no wgmma instructions"
        problem = describe(way, program)
        if isinstance(problem, str):
            return problem
        if reason := unfit(problem, TYPES):
            return reason
        if not problem.across and not all(problem.k_major):
            return f"{problem.x.name} or {problem.w.name} is transposed; wgmma takes numbers of 8 bits along K only"
        found = copies(problem, program)
        return found if isinstance(found, str) else None

    def configs_of(self, way: Op, program: Program, arch: Arch) -> Iterator[Config]:
        problem, how = self._described(way, program)
        whole, takes = 1 if how.k_major[1] else 64, group_atom(*how.kinds).takes  # whole: columns of a box
        boxed = boxed_results(way, program, problem, 1)
        result = boxed.size if boxed else RESULT
        promoted = how.promoted(result)
        room = room_for(promoted)
        candidates = [
            {"bm": bm, "bn": bn, "split": split}
            for bm, every in TILES.items()
            for columns in [[n for n in every if n % whole == 0 and takes(n) and room(bm, n)]]
            for bn in columns
            for split in (1, 2, 4, 8)
            if (bm == 64 or bm < 2 * problem.rows) and (bn == columns[0] or bn < 2 * problem.stored)
        ]
        candidates += [
            {"bm": bm, "bn": bn, "split": split, "swapped": True}
            for bn in (SWAPPED if how.k_major[0] else ())
            for bm in filter(takes, swapped_rows(bn, self._more_rows(problem, how), promoted))
            if room(bn, bm)
            if (bm == 8 or bm < 2 * problem.rows) and (bn == 64 or bn < 2 * problem.stored)
            for split in (1, 2, 4, 8)
        ]
        large = ceil_div(problem.rows, 128) * ceil_div(problem.stored, 128) * problem.batches > arch.sms
        if large and how.steps > 2:  # teams have a tile each, and take as long as others where they multiply little
            candidates.append({"bm": 128, "bn": 128, "split": 1, "teams": 2})
        if promoted:
            candidates += [{**c, "overlaps": True} for c in candidates if overlapping(c)]
        candidates += [{**c, "stages": STAGES} for c in candidates if in_turn(problem, how, c, arch)]
        fits = self._takes(way, program)
        candidates = list(filter(fits, candidates))
        costs = self._costs(way, program, arch)
        halved: list[Config] = [c for c in candidates if c.get("swapped") and c["bm"] in SWAPPED[c["bn"]] and "overlaps" not in c]
        twice = room_for(group_atom(*how.kinds).rough)  # 2:4 weights are multiplied as if there were more stages
        halved = [c for c in halved if twice(c["bn"], c["bm"])]
        halved += [c for c in self._sparse_only(way, program, arch) if fits(c)]
        sparse = [{**c, "sparse": True} for c in halved] if self._compressed(way, program) else []
        if boxed is not None and boxed.size < RESULT:  # compressed weights come in their own order
            sparse = [c for c in sparse if c["split"] > 1]
        for ranked in (sorted(candidates, key=costs), sorted(sparse, key=costs)):
            yield from ranked[:CHEAPEST]
            blocks = [ceil_div(problem.rows, c["bm"]) * ceil_div(problem.stored, c["bn"]) * c["split"] for c in ranked]
            yield from (c for i, c in enumerate(ranked) if i >= CHEAPEST and blocks[i] < min(blocks[:i]))

    def _more_rows(self, problem: Problem, how: Copies) -> dict[int, tuple[int, ...]]:
        """Rows of tiles with swapped operands that are for these sizes, by columns."""
        if not how.smooth:
            return {}
        return EVEN if problem.stored > 64 else NARROW if problem.integers else {}

    def _sparse_only(self, way: Op, program: Program, arch: Arch) -> Iterator[Config]:
        """The configs that are for 2:4 weights alone. Places are there for whole groups of weights, and what is added to results
        comes in one box, of which two blocks would need two."""
        problem, how = self._described(way, program)
        in_pairs = ceil_div(problem.stored, ROWS) % 2 == 0
        in_blocks = in_pairs and not epilogue.loads_by_row(way, program)
        for bm, bn in sparse_tiles(how.kinds):
            if group_atom(*how.kinds).takes(bm) and bm <= problem.rows and (bn == ROWS or in_blocks):
                yield {"bm": bm, "bn": bn, "split": 1, "swapped": True}
        for bm in SHARED if in_pairs and how.k_major[0] and not how.im2col and group_atom(*how.kinds).rough else ():
            if ceil_div(problem.rows, bm) * ceil_div(problem.stored, ROWS) * problem.batches >= 2 * arch.sms:
                yield {"bm": bm, "bn": ROWS, "split": 1, "swapped": True, "shared": 2}

    def takes_of(self, way: Op, program: Program, config: Config, arch: Arch) -> bool:
        return self._takes(way, program)(config)

    @remembered
    def _takes(self, way: Op, program: Program) -> Callable[[Config], bool]:
        """What the sizes must be for a config."""
        problem, how = self._described(way, program)
        boxed, turned = boxed_results(way, program, problem, 2), turned_results(way, program, problem, how) is not None

        def takes(config: Config) -> bool:
            if config["split"] > 1:  # each block of a cluster has two steps at least
                return config["bm"] * config["bn"] <= 128 * 128 and how.steps >= 2 * config["split"]
            if config.get("teams"):
                return (
                    how.size == 1
                    and boxed is not None
                    and not how.promoted(boxed.size)
                    and boxed.added is None
                    and boxed.size == 1
                )
            return turned or not config.get("swapped")

        return takes

    def shareable_of(self, way: Op, program: Program, config: Config, arch: Arch) -> Iterator[Config]:
        problem, how = self._described(way, program)
        if config.get("sparse"):
            return
        more = {"stages": STAGES} if stages_at_most(config, how.steps) < STAGES else {}
        if more:
            yield {**config, **more}
        if isinstance(way, Conv) and gathered(problem, program):
            yield {**config, **more, "gathered": True}

    def without_zeros(self, op: Op, program: Program, arch: Arch) -> str | None:
        if reason := self.supports(op, program, arch):
            return reason
        form, problem = sparse_form(op, program), describe(op, program)
        assert form is not None and isinstance(problem, Problem)
        found = compressed(problem, program, form)
        if isinstance(found, str):
            return found
        some = any(config.get("sparse") for config in self.configs(op, program, arch))
        return None if some else "sparse wgmma's rows are the weights', and then results go to y in boxes of halves"

    def cost_of(self, way: Op, program: Program, config: Config, arch: Arch) -> float:
        return self._costs(way, program, arch)(config)

    @remembered
    def _costs(self, way: Op, program: Program, arch: Arch) -> Callable[[Config], float]:
        """The cost of each config, which is asked for again once the best are known."""
        problem, _ = self._described(way, program)
        own, boxed = measured(arch).gemm_sm90, boxed_results(way, program, problem, 2)
        constant = problem.w.storage in program.constants
        loads = len(epilogue.loads_by_row(way, program))
        biased = len(way.epilogue.loads) > loads
        slots = slots_of(way.epilogue.expr, program.tensors[way.y].dtype, arch)
        moving = traffic_us(way, program, arch)

        sparse = self._compressed(way, program)
        fewer = 0.0 if sparse is None else memory_us([problem.w], arch) - memory_us(_read(sparse, program), arch)

        known: dict[Any, float] = {}

        def cost(config: Config) -> float:
            key = tuple(config.items())
            if key not in known:
                known[key] = estimated(config)
            return known[key]

        def estimated(config: Config) -> float:
            read = self._read(way, program, config)
            moved, doubt = (moving - fewer, DOUBT) if read.places else (moving, 1.0)
            t = _tile(config, arch, read, boxed)
            computing = time_us(problem, read, t, arch, loads, biased, constant, slots)
            shorter = min(computing, moved)  # overlaps the other but for a beginning and an end
            apart = own.exposed * min(shorter, own.exposed_us)
            if t.split == 1:  # else there is one wave, in which all of K but its beginning overlaps
                apart += own.exposed_more * max(shorter - own.exposed_us, 0)
            if config.get("stages") and in_turn(problem, read, config, arch):
                doubt *= own.in_turn
            return (starting_us(problem, read, t, arch, biased) + max(computing, moved) + apart) * doubt

        return cost

    def _laid_out(
        self, way: Op, program: Program, config: Config, arch: Arch
    ) -> tuple[Copies, Tile, Boxed | None, epilogue.EpilogueSpec, Code]:
        """How a config reads its operands, its tile, how results go to y, and the code for that."""
        problem, _ = self._described(way, program)
        how = self._read(way, program, config)
        boxed = boxed_results(way, program, problem, 1 if config.get("swapped") else 2) if config["split"] == 1 else None
        t = _tile(config, arch, how, boxed)
        if t.eights:
            boxed = boxed_results(way, program, problem, 8)
        spec = boxed.epilogue if boxed else epilogue.describe(way, program, epilogue.frame_of(way, program))
        made = code(
            self.name,
            im2col=how.im2col,
            chunk=how.chunk,
            k_major=how.k_major,
            constant=problem.w.storage in program.constants,
            bm=t.bm,
            bn=t.bn,
            stages=t.stages,
            split=t.split,
            swapped=t.swapped,
            boxed=t.boxed,
            kinds=t.kinds,
            result=t.result,
            sparse=t.sparse,
            **({"teams": t.teams} if t.teams > 1 else {}),
            **({"eights": True} if t.eights else {}),
            **({"overlaps": True} if t.overlaps else {}),
            **({"short": t.short} if t.short else {}),
            **({"once": True} if t.once else {}),
            **({"in_pairs": True} if t.in_pairs else {}),
            **({"shared": t.shared} if t.shared > 1 else {}),
            rows=t.rows(spec.form.loads_by_row),
            epilogue=spec.params,
        )
        return how, t, boxed, spec, made

    def _read(self, way: Op, program: Program, config: Config) -> Copies:
        """How a config reads the operands."""
        problem, how = self._described(way, program)
        found: Copies | None = how
        if config.get("sparse"):
            found = self._compressed(way, program)
        elif config.get("gathered"):
            found = gathered(problem, program)
        assert found, f"the operands cannot be read as {config} says"
        return found

    def codes_of(self, way: Op, program: Program, config: Config, arch: Arch) -> frozenset[Code]:
        return frozenset([self._laid_out(way, program, config, arch)[-1]])

    def work_of(self, way: Op, program: Program, config: Config, arch: Arch) -> Work:
        problem, _ = self._described(way, program)
        how, t, boxed, spec, made = self._laid_out(way, program, config, arch)
        stored = boxed.args(t) if boxed else spec.args
        tiles_m, tiles_n = ceil_div(problem.rows, t.bm), ceil_div(problem.stored, t.bn)
        order = tile_order.numbers(tiles_m, tiles_n, problem.batches, t.shared)
        tiles = order[0]
        grid = tiles * t.split if t.split > 1 else least(tiles, arch.sms * resident(t, arch))
        last = (t.short // how.size + (how.steps - 2) * how.whole,) if t.short else ()  # where the last box of K begins
        integers = (problem.rows, how.steps, *order, *how.geometry, *last)
        launch = Launch(
            code=made,
            grid=(grid, 1, 1),
            block=t.threads,
            args=(*how.boxed(t), *map(I32, integers), *stored),
            smem=t.smem,
        )
        return Work((launch,))

    def build(self, arch: Arch, **params: Any) -> Function:
        added = params["boxed"] and epilogue.Form.decoded(params["epilogue"]).loads_by_row > 0
        chosen = {name: params[name] for name in ("bm", "bn", "stages", "split", "swapped", "boxed", "kinds", "result", "sparse")}
        more = {
            name: params[name]
            for name in ("teams", "eights", "overlaps", "short", "once", "in_pairs", "shared")
            if name in params
        }
        t = Tile(**chosen, added=added, **more)
        copied = params["im2col"], params["chunk"], params["k_major"], params["constant"]
        blocks = resident(t, arch) if t.paired or t.eights else 1  # more registers than it needs would leave one of them room
        return _function(t, copied, params["rows"], params["epilogue"], blocks)

    @remembered
    def _described(self, op: Op, program: Program) -> tuple[Problem, Copies]:
        problem = describe(op, program)
        assert isinstance(problem, Problem)
        how = copies(problem, program)
        assert isinstance(how, Copies)
        return problem, how

    @remembered
    def _compressed(self, op: Op, program: Program) -> Copies | None:
        """How 2:4 weights are read, if the op has such in that form and they can be."""
        form, problem = sparse_form(op, program), describe(op, program)
        if form is None or not isinstance(problem, Problem) or (problem.column_batch and problem.batches > 1):
            return None
        found = compressed(problem, program, form)
        return found if isinstance(found, Copies) else None


def _read(how: Copies, program: Program) -> list[Tensor]:
    """The constants that hold 2:4 weights."""
    return [program.tensors[m.tensor] for m in (how.b, how.places) if m]


def _tile(config: Config, arch: Arch, how: Copies, boxed: Boxed | None) -> Tile:
    """The config's tile; `boxed`: how results may go to y in boxes, which those of a split do not."""
    if config["split"] > 1:
        return tile(config, arch, how.steps, False, kinds=how.kinds)
    assert boxed or not config.get("swapped"), "results of swapped operands go to y in boxes, or through a cluster"
    if boxed is None:
        return shortened(tile(config, arch, how.steps, False, kinds=how.kinds), how.short)
    t = tile(config, arch, how.steps, True, boxed.added is not None, how.kinds, boxed.size)
    whole = how.k_major[1] and how.b.extents[1] % EIGHTS == 0 and how.b.extents[2] == 1
    eights = whole and not t.swapped and t.result < RESULT and t.columns % EIGHTS == 0
    return shortened(in_eights(t) if eights else t, how.short)


HOPPER = Hopper("conv_sm90", Conv), Hopper("gemm_sm90", Gemm)
