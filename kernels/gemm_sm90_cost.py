"""How long Hopper's implicit GEMM takes, by estimate."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tccompile.arch import Arch
from tccompile.ir.expr import Expr, walk
from tccompile.ir.extent import ceil_div, round_up
from tccompile.ir.types import DType
from tccompile.kernels.codegen import RECIPROCAL, coarse
from tccompile.kernels.gemm_sm90_copies import Copies, multiplying_cycles, row_cycles
from tccompile.kernels.gemm_sm90_tile import Tile, resident
from tccompile.kernels.implicit_gemm import Problem
from tccompile.kernels.parts.operands import ROW, STEP
from tccompile.kernels.parts.staging import RESULT
from tccompile.kernels.ptx.atoms import BITS
from tccompile.kernels.rates import measured
from tccompile.kernels.rates.rate import GemmSm90

IN_TURN = 96 * 64, 200 * 128
"""The fewest and the most results of tiles of which a multiprocessor has two in turn: smaller ones were not measured so, and
larger ones were not faster."""


def _blocks(problem: Problem, t: Tile, arch: Arch) -> tuple[int, int, int]:
    """Blocks, multiprocessors that they can fill, and how many of them one holds."""
    tiles = ceil_div(problem.rows, t.bm) * problem.batches * ceil_div(problem.stored, t.bn)
    return tiles * t.split, measured(arch).gemm_sm90.together[t.split], resident(t, arch) if t.split < 8 else 1


def in_turn(problem: Problem, how: Copies, config: Mapping[str, Any], arch: Arch) -> bool:
    """Whether a multiprocessor has two tiles of 8 bits, of so few stages that a ring of more has room for both: then it copies
    those of the second while the first is stored. Only with swapped operands: others were not faster."""
    tiles = ceil_div(problem.rows, config["bm"]) * problem.batches * ceil_div(problem.stored, config["bn"])
    few = how.size == 1 and how.steps <= 2 and config["split"] == 1 and config.get("swapped", False)
    fits = IN_TURN[0] <= config["bm"] * config["bn"] <= IN_TURN[1]
    return few and fits and not config.get("sparse") and arch.sms < tiles <= 2 * arch.sms


def starting_us(problem: Problem, how: Copies, t: Tile, arch: Arch, biased: bool) -> float:
    """Microseconds from the launch before to the first stage: less if blocks find room while that one's still run."""
    own = measured(arch).gemm_sm90
    blocks, sms, most = _blocks(problem, t, arch)
    felt = own.crowded_overlapping if t.overlaps else 1.0
    crowded = [felt * min(max(2 * blocks / room - 1, 0.0), 1.0) for room in (arch.sms, sms * most)]
    early = min(how.steps / t.split / 8, 1.0)  # how much of what it copies could come before
    late = crowded[how.smooth and most > 1 and blocks <= arch.sms]  # where few stages are most of K, the next launch finds room
    start = own.start_swapped_us if t.swapped else own.start_us
    return start + own.late_us * early * late + own.crowded_us * crowded[1] + own.biased_us * biased


def slots_of(expr: Expr, dtype: DType, arch: Arch) -> float:
    """Slots of instructions that the functions of an epilogue take which count, where this is stored of it."""
    own = measured(arch).gemm_sm90
    slots = {"erf": own.erf, "gelu": own.erf, "coarse_gelu": own.coarse_gelu, "tanh": own.tanh}
    slots |= dict.fromkeys(RECIPROCAL, own.sigmoid) | dict.fromkeys(
        ("coarse_tanh", "coarse_sigmoid", "coarse_silu"), own.coarse_tanh
    )
    return sum(slots.get(e.fn, 0) for e in walk(coarse(expr, dtype)))


def time_us(
    problem: Problem, how: Copies, t: Tile, arch: Arch, loads: int, biased: bool, constant: bool, slots: float = 0
) -> float:
    """Microseconds from the first block's start to the last one's end, if memory is fast enough.

    loads   of the epilogue by row; what they cost is from ResNet-50's layers
    biased  whether it loads by column too, as convolutions do and most products of the benchmarks do not
    slots   of instructions that functions of a result take: see `slots_of`

    Fitted on an H200 to 6100 times of 1120 convolutions and GEMMs, each launched several times in a row by programmatic edges,
    and with swapped operands to 13600 times of 1258, from which it is 15 % off (in the mean of squares). Its choices are 3 %
    slower than the best of those measured. Of halves in im2col boxes 841 times again, 13 % off, choices 3 % slower than the best
    where they were 4 %. Boxes of bytes: 193 times of 17 convolutions on an H100. Clusters of eight: whole
    inferences of bert_base. The constants are near what they stand for, at the clock that a GPU keeps under load.
    """
    own = measured(arch).gemm_sm90
    blocks, sms, most = _blocks(problem, t, arch)
    together = min(most, ceil_div(blocks, sms))
    waves = ceil_div(blocks, sms * together)
    tiles_m, steps = ceil_div(problem.rows, t.bm), ceil_div(how.steps, t.split)
    # Cycles of a stage: of the copy engine (its boxes overlap), the Tensor Cores, and shared memory, which both use
    narrow = own.narrow_cycles
    if how.size == 1 and how.chunk < how.whole // 2:
        narrow = own.byte_cycles if how.b.strides[0] % ROW else own.byte_lined_cycles
    row_b = own.tiled_cycles if how.im2col or how.chunk == how.whole else narrow
    gathered = how.im2col and how.size == 2
    if gathered:
        row_b = own.gathered_cycles
    row_a = _gathering(problem, how, t, own) if how.im2col else row_b
    strided = gathered and 2 * how.chunk == how.whole and problem.strides == (2, 2)
    row_a *= own.strided if strided else 1.0
    copying = max(t.bm * row_a + t.bn * row_b, own.box_cycles * how.boxes_of_stage(t))
    if how.size == 1 and how.im2col and how.chunk <= STEP:
        copying *= own.narrow_gathering
    part = 1.0 if how.im2col else how.chunk / how.whole  # of a stage, what comes
    left, right = t.product
    multiplying = multiplying_cycles(left, right, t.sparse) * part
    if t.promoted:
        multiplying *= _adding(t, own, left * together == 64)
    rows = left // 2 if t.sparse else left  # of 128 bytes
    sharing = (2 * rows + right + left // 64 * right) * part
    busy = 1 + own.power * max(sharing / multiplying - 1, 0)
    alone = own.alone if left * together == 64 else 1.0  # a warpgroup on a multiprocessor waits for what it has begun
    # Of a copy: from the L2 cache, if another block has the same columns
    latency = (own.latency_us + own.queue * copying / own.copy_cycles_us) / tiles_m
    clock = measured(arch).cycles_us
    shared_us = own.share_gathered_cycles_us if gathered and t.split == 1 else own.share_cycles_us
    engines = copying / own.copy_cycles_us, alone * multiplying * busy / clock, alone * sharing / shared_us
    # Of halves, where only some multiprocessors have a block more than others, these are not much slower: they share what brings
    # data. Of clusters, which find room in few places, the last ones begin late
    shared = waves == 1 and t.split == 1 and how.size > 1
    load = (max(own.two, blocks / sms) if blocks > sms else 1.0) if shared else together
    step = max(max(engines) * load, latency / t.stages)
    if t.shared > 1:
        step *= own.shared_rows
    if t.promoted:  # what a warpgroup adds up waits for its products, unless those of others keep Tensor Cores busy
        step += own.rough_us * max(0.0, 1 - multiplying * together / 512) * _waiting(t, own)
    # The last stage, where rows of tiled boxes reach beyond the channels: the copy engine is slow at these
    rest = (problem.padded - t.short // how.size) % how.chunk  # elements of K in that stage, 0 for all
    beyond = not how.im2col and how.k_major == (True, True) and rest > 0
    few = how.size == 1 and 2 * rest < how.chunk
    row = own.few_cycles if few else own.beyond_cycles
    tail = max((t.bm + t.bn) * row / own.copy_cycles_us * together - step, 0) / t.split if beyond else 0.0
    # Weights that come while the launch before ends, as far as the ring takes them and blocks find room
    taken = min(max(own.room * blocks / arch.sms - own.full, 0.0), 1.0)
    early = own.ahead * (1 - taken) * min(steps, t.stages) if constant else 0.0
    # Of a tile's rows those that are stored: a warp does what it has of a warpgroup's, and 16 rows take as long as 64
    inside = 1.0 if t.swapped else min(1.0, (problem.rows if t.split > 1 else round_up(problem.rows, 64)) / t.bm)
    # A warpgroup alone takes longer than one beside another
    results = max(left * together, own.sums_swapped if t.swapped else own.sums) * right / (128 * 128) * inside
    storing = _storing_us(t, own, results, inside, loads, biased)
    if t.split > 4:  # what clusters of eight blocks exchange, in a network
        storing += own.split_of_eight_us * min(t.bm, problem.rows) * t.bn / (128 * 128)
    storing += slots * t.bm * t.bn * inside * together / (128 * measured(arch).cycles_us)
    if how.size == 1 and not how.im2col and t.split == waves == 1 and t.bm > t.bn == 128:
        storing *= own.at_once
    summing = steps * step + tail
    if t.teams > 1:  # one multiplies while the other stores
        return own.teams * waves * max(summing, (summing + storing) / 2) + storing - early * step
    filled = t.promoted and waves == t.split == 1 and sms - own.spare < blocks  # the next launch finds no room beside it
    total = waves * (summing + storing + own.strided_us * strided)
    if how.size == 1 and together > 1 and 1 < waves <= 8 and how.steps <= 2 and t.bn == 128 and _within_lines(problem, how):
        total *= own.beside
    return total - early * step + own.filled_us * filled


def _within_lines(problem: Problem, how: Copies) -> bool:
    """Whether no row of A's tiled boxes reaches into a second line of memory, if its rows lie close."""
    return not how.im2col and (problem.padded % how.whole == 0 or how.whole % problem.padded == 0)


def _adding(t: Tile, own: GemmSm90, alone: bool) -> float:
    """How many times as long products take whose sums are added to others: by an instruction of CUDA cores for each sum."""
    if t.overlaps:
        return 1.0
    rate = own.rough_alone if alone else own.rough
    return (1 + rate) / 2 if t.in_pairs else rate


def _waiting(t: Tile, own: GemmSm90) -> float:
    """How much of the wait for a stage's sums a tile has."""
    return own.overlapping if t.overlaps else 0.5 if t.in_pairs else 1


def _gathering(problem: Problem, how: Copies, t: Tile, own: GemmSm90) -> float:
    """Cycles of the copy engine for a row of a stage that comes in im2col boxes. Blocks that read the same rows at the same time,
    for other columns, share what comes from the L2 cache."""
    part = own.gathering if how.size == 1 else own.gathering_halves + own.gathering_apart / ceil_div(problem.stored, t.bn)
    if how.size == 2 and how.chunk < how.whole and problem.padded > how.whole:  # boxes of a tap share its lines
        part *= own.gathering_parts
    return part * row_cycles(problem.padded, how.chunk, how.size) * (how.whole // how.chunk)


def _storing_us(t: Tile, own: GemmSm90, results: float, inside: float, loads: int, biased: bool) -> float:
    """Microseconds that a block takes to store a tile.

    results  of a warpgroup, in tiles of 128 by 128
    inside   how much of the tile's rows there is
    """
    if t.split > 1:  # each block of a cluster stores its share of the rows, whose loads begin late
        if t.swapped:
            return own.split_swapped_us + own.split_swapped_sums_us * results + own.split_load_us * loads
        tile = (own.split_inside_us * inside + own.split_tile_us) * t.bm * t.bn / (128 * 128)
        return own.split_us + own.split_sums_us * results + own.split_load_us * loads + tile
    if not t.boxed:
        return (own.row_us + own.row_load_us * loads) * results
    if t.result < RESULT and BITS[t.kinds[0]] == 16:
        return (own.byte_of_halves_us + own.byte_load_us * loads) * results
    if t.paired:
        return (own.byte_swapped_us + own.byte_swapped_load_us * loads) * results
    if t.swapped:  # a lane has read its bias before
        return (own.box_swapped_us + own.box_swapped_load_us * loads) * results
    if t.result < RESULT:
        return (own.byte_us + own.byte_load_us * loads) * results
    return (own.box_us + own.box_biased_us * biased + own.box_load_us * loads) * results
