"""Implicit-GEMM convolution and GEMM on Hopper: the tensor copy engine feeds wgmma.

Both are out[m, o] = sum over k of A[m, k] · B[o, k]. A Gemm, and a 1×1 convolution that reads every pixel, take A from a tiled
tensor map; any other convolution takes it from an im2col map, whose boxes are the same filter tap of `bm` output pixels in a
row. B is the weights, K-major: [O][taps · channels]. Of a Gemm either may be transposed (MN-major, in wgmma's terms): rows of A
or columns of B are neighbours in memory, and come in boxes of 64 of them by 64 of K, which wgmma reads as they are.

A block has one warpgroup for every 64 rows of its tile and one warp more, of which one thread asks for copies. With `swapped`
operands wgmma's rows are B's, 64 for each warpgroup, and its columns A's, of which it takes any multiple of 8: 7² or 14² pixels
fill tiles of 56 or 200 rows, and a few rows waste nothing. The accumulators are then the tile turned over. Copies and warpgroups
meet in a ring of `stages` buffers, each 64 halves of K wide, by two barriers a buffer: `full` (the copies have arrived) and
`empty` (the warpgroups have read it). With `split` > 1, the blocks of a cluster share one tile: each sums a part of K, then all
read the others' sums from their shared memory, each for its share of the rows, in a fixed order.

Where the epilogue reads at most one tensor that differs by row, such as a residual, each warp rounds its results into boxes in
shared memory, which the copy engine stores while the next tile is multiplied; a box of the residual comes into the same place
while its own tile is. With swapped operands stmatrix turns the results back, a warpgroup fills one box of 64 channels, and what
differs by channel, of which a lane has two, is read before the products are there. Otherwise lanes store rows, whose loads
overlap.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from tccompile.arch import KIB, Arch
from tccompile.ir.program import Conv, Gemm, Op, Program
from tccompile.ir.tensor import Tensor
from tccompile.ir.types import DType
from tccompile.kernels import epilogue
from tccompile.kernels.codegen import divider
from tccompile.kernels.implicit_gemm import OneWay, Problem, describe, unfit
from tccompile.kernels.loops import entry
from tccompile.kernels.spec import (
    I32,
    Arg,
    Config,
    Function,
    Im2colMap,
    Launch,
    TiledMap,
    Value,
    Work,
    code,
    traffic_us,
)

BK = 64
"""Halves of K in a stage: a row of 128 bytes, the widest swizzle."""

ACROSS = 64 * 2 * BK
"""Bytes of a box of 64 rows or columns by BK, as an operand that is not K-major is copied."""

BOXES = 2
"""Boxes of results that a warp has: one is filled while the other is stored. With a residual, as many as its part of a tile."""

GROUP = 8
"""Row tiles that are taken together before the next column of tiles, so that they share B in the L2 cache."""

TILES = {64: (16, 32, 64, 96, 128, 192, 256), 128: (32, 64, 96, 128, 192, 256), 192: (64, 96, 128)}
"""Rows of a tile → columns: multiples of 8 that wgmma takes, at most 256, and registers are left for the epilogue."""

SWAPPED = {
    64: (8, 16, 24, 32, 40, 48, 56, 64, 112, 144, 200, 256),
    128: (8, 16, 32, 56, 64, 96, 112, 128, 200, 256),
}
"""With swapped operands, columns of a tile → rows: those of 7², 14² and 28² images fill 56, 200 and 112 of them. 20 other sizes,
left out, were the fastest by more than 2 % in 11 of 420 measurements on an H200, and by 0.2 % in the mean."""

CHEAPEST = 16
"""Configs to offer; and then each with fewer blocks than all that are cheaper, which leaves room to others."""

ORDER, IM2COL = 11, 20
"""How many integers `_order` gives, and the geometry of an im2col walk."""


# --- What the copy engine reads ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Copies:
    """How an implicit GEMM's operands are read: tensor maps whose boxes are a tile's, filled in by `work`.

    a, b      arrays of (k, rows, batches) and (k, columns, batches), or for a an im2col map; (rows, k, batches) and
              (columns, k, batches) where they are not K-major
    k_major   whether a and b are
    depth     halves of K that the kernel goes through, by im2col a multiple of the box's row
    chunk     halves of a box's row; B's are 64 beside an im2col map
    geometry  what the code needs to walk through A, in the order of its parameters
    """

    a: TiledMap | Im2colMap
    b: TiledMap
    k_major: tuple[bool, bool]
    depth: int
    chunk: int
    geometry: tuple[int, ...]

    @property
    def im2col(self) -> bool:
        return isinstance(self.a, Im2colMap)

    @property
    def steps(self) -> int:
        """Stages along K."""
        return -(-self.depth // BK)

    def boxes_of_stage(self, t: Tile) -> int:
        """How many copies fill a stage."""
        a, b = (1 if k_major else n // 64 for n, k_major in zip((t.bm, t.bn), self.k_major, strict=True))
        return (BK // self.chunk if self.im2col else a) + b

    def boxed(self, t: Tile) -> tuple[TiledMap | Im2colMap, TiledMap]:
        """The maps with a tile's boxes."""
        if isinstance(self.a, Im2colMap):
            return replace(self.a, pixels=t.bm), replace(self.b, box=(BK, t.bn, 1))
        boxes = ((self.chunk, n, 1) if k_major else (64, BK, 1) for n, k_major in zip((t.bm, t.bn), self.k_major, strict=True))
        a, b = (replace(m, box=box, swizzle=2 * self.chunk) for m, box in zip((self.a, self.b), boxes, strict=True))
        return a, b


TILED_CYCLES, NARROW_CYCLES = 1.4, 2.5
"""What the copy engine takes for a row of a tiled box of 64 halves, and of 32 or 16."""

BOX_CYCLES = 80
"""What a box takes at least: asking for it is one thread's work."""

BEYOND_CYCLES = 4
"""The same where the row reaches beyond the tensor: 4 on average, up to 12 where less than half of it lies inside."""


def _row_cycles(channels: int, chunk: int) -> float:
    """What it takes for a row of an im2col box, on average: for one that reaches beyond the channels, most."""
    boxes = -(-channels // chunk)
    whole = 1.7 if chunk == 64 else 2.5
    return whole if channels % chunk == 0 else (whole * (boxes - 1) + 5.2) / boxes


def _multiplying(rows: int, columns: int) -> int:
    """Cycles of the Tensor Cores for a stage."""
    return rows // 64 * 2 * max(columns, 48)


def _chunk(channels: int, columns: int) -> int:
    """Halves of an im2col box's row: 64, which may be mostly zeros to multiply, or a divisor of the channels, in more boxes."""

    def cycles(n: int) -> float:
        """Of 64 rows of a tap."""
        boxes = -(-channels // n)
        return max(64 * _row_cycles(channels, n) * boxes, _multiplying(64, min(columns, 128)) * boxes * n / BK)

    return min((n for n in (64, 32, 16, 8) if n == 64 or channels % n == 0), key=cycles)


def _array(t: Tensor, depth: tuple[int, int], rows: tuple[int, int], batches: tuple[int, int], k_major: bool) -> TiledMap:
    """The map of an array of (depth, rows, batches), or (rows, depth, batches): each of them (extent, stride in elements)."""
    (inner, _), (outer, step) = (depth, rows) if k_major else (rows, depth)
    steps = (2 * (step if outer > 1 else 8), 2 * (batches[1] if batches[0] > 1 else 8))
    return TiledMap(t.name, 0, (inner, outer, batches[0]), steps, (), (1, 1, 1))


def copies(problem: Problem, program: Program) -> Copies | str:
    """The maps for an op that `implicit_gemm.unfit` has passed, or why the copy engine cannot read its operands."""
    for t in (problem.x, problem.w):
        if t.storage in program.inputs or t.storage in program.outputs:
            return f"{t.name} is a model input or output, whose address may change; tensor maps hold addresses"
    if problem.column_batch and problem.batches > 1:
        return f"{problem.batches} groups; the kernel takes one"
    if 0 in (problem.rows, problem.columns, problem.depth, problem.batches):
        return "an extent is 0"
    lead = [(n, i) for i, n in enumerate(problem.batch) if n > 1]
    if len(lead) > 1:
        return f"its batches {problem.batch} lie at two different strides"
    batches, level = lead[0] if lead else (1, 0)
    (n, p, q), (step_n, step_h, step_w, _) = problem.pixels, problem.x_pixel
    (r, s), (height, width), channels, cp = problem.taps, problem.image, problem.channels, problem.padded
    depth = r * s * cp
    a_k_major, b_k_major = problem.k_major
    columns = problem.columns, problem.w_column
    b = _array(problem.w, (depth, problem.w_tap[2]), columns, (batches, problem.w_batch[level]), b_k_major)
    if problem.linear:
        step = next((t for extent, t in ((q, step_w), (p, step_h), (n, step_n)) if extent > 1), 8)
        by_batch = batches, problem.x_batch[level]
        a = _array(problem.x, (channels, problem.x_pixel[3]), (problem.rows, step), by_batch, a_k_major)
        # A row of 64 halves of which less than half are there takes longer than a narrower one.
        chunk = BK if problem.k_major != (True, True) or channels > 32 else 32 if channels > 16 else 16
        return Copies(a, b, problem.k_major, channels, chunk, (int(problem.w_batch[level] > 0),))
    if not b_k_major:
        return f"{problem.w.name} is transposed, and the rows of {problem.x.name}, {problem.pixels}, lie at more than one stride"
    if batches > 1:
        return f"its rows {problem.pixels} lie at more than one stride, in each of {batches} batches"

    (stride_h, stride_w), (pad_h, pad_w), (dil_h, dil_w) = problem.strides, problem.pads, problem.dilations
    # The window's first element walks from -pad to where the last output pixel needs it: p × q steps.
    upper_w, upper_h = (q - 1) * stride_w - pad_w - (width - 1), (p - 1) * stride_h - pad_h - (height - 1)
    if max(problem.strides) > 8:
        return f"strides {problem.strides}; im2col maps step at most 8"
    corners = (-pad_w, -pad_h, upper_w, upper_h)
    if min(corners) < -128 or max(corners) > 127:
        return f"the window's first element goes from {corners[:2]} to {corners[2:]} off the image; im2col maps take -128 to 127"
    if (r - 1) * dil_h > 255 or (s - 1) * dil_w > 255:
        return "the window spans more than 256 elements, the most of im2col maps"
    chunk = _chunk(cp, problem.stored)
    steps = [2 * (t if extent > 1 else 8) for extent, t in ((width, step_w), (height, step_h), (n, step_n))]
    swizzle = 0 if chunk == 8 else 2 * chunk
    window = Im2colMap(
        problem.x.name,
        (channels, width, height, n),
        (steps[0], steps[1], steps[2]),
        (-pad_w, -pad_h),
        (upper_w, upper_h),
        (stride_w, stride_h),
        chunk,
        0,
        swizzle,
    )
    boxes = -(-cp // chunk)
    sizes = (cp, r * s, s, q, p * q, stride_h, stride_w, pad_h, pad_w, dil_h, dil_w, boxes)
    geometry = (*sizes, *divider(boxes), *divider(s), *divider(q), *divider(p * q))
    return Copies(window, b, problem.k_major, r * s * boxes * chunk, chunk, geometry)


@dataclass(frozen=True)
class Boxed:
    """How results go to y in boxes: the maps of y and of what is added to it by row, and the epilogue for what a thread has."""

    y: TiledMap
    added: TiledMap | None
    epilogue: epilogue.EpilogueSpec

    def args(self, t: Tile) -> tuple[Arg, ...]:
        """The launch's arguments after the integers, for a tile's boxes."""
        maps = [self.y, *([self.added] if self.added else [])]
        return *(replace(m, box=(*t.box, 1), swizzle=2 * t.box[0]) for m in maps), *self.epilogue.args


def boxed_results(op: Op, program: Program, problem: Problem, lanes: int) -> Boxed | None:
    """None where the copy engine cannot write y, or read what is added to it; lanes: columns that a thread has side by side."""
    y, shape, frame = program.tensors[op.y], program.op_shape(op), epilogue.frame_of(op, program)
    target = epilogue.describe(op, program, frame).form.y
    by_row = epilogue.loads_by_row(op, program)
    if target.shuffled or target.mode != "vector" or target.rows == "general" or len(by_row) > 1:
        return None
    if any(load.step is None or not load.vector for load in by_row):
        return None
    outside = {*program.inputs, *program.outputs}
    if any(t.dtype is not DType.F16 or t.storage in outside for t in (y, *(load.tensor for load in by_row))):
        return None

    def rows_of(t: Tensor, offset: int, columns: int, step: int) -> TiledMap:
        step = step or 8
        return TiledMap(
            t.name, 2 * offset, (columns, problem.rows, problem.batches), (2 * step, 2 * step * problem.rows), (), (1, 1, 1)
        )

    lane = frame[-1] or 0
    step = next((y.strides[a] for a in reversed(frame[:-1]) if a is not None and shape[a] > 1), 0)
    added = [rows_of(load.tensor, load.offset, shape[lane], load.step or 0) for load in by_row]
    return Boxed(rows_of(y, 0, y.padded[lane], step), added[0] if added else None, epilogue.describe(op, program, frame, lanes))


# --- Tiles ---------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Tile:
    """A config: what a block computes, and how its shared memory is laid out.

    bm, bn   rows and columns of a tile; stages, buffers of the ring; split, blocks of a cluster that share K
    swapped  whether wgmma's rows are the tile's columns
    boxed    whether results are stored in boxes; added, whether something that differs by row is added to them there
    """

    bm: int
    bn: int
    stages: int
    split: int
    swapped: bool
    boxed: bool
    added: bool

    @property
    def product(self) -> tuple[int, int]:
        """Rows and columns of what wgmma makes: 64 rows for each warpgroup."""
        return (self.bn, self.bm) if self.swapped else (self.bm, self.bn)

    @property
    def consumers(self) -> int:
        """Threads that multiply."""
        return 2 * self.product[0]

    @property
    def exchange(self) -> bool:
        """Whether the copying warp leaves its registers to the others, which takes a whole warpgroup of it.

        A multiprocessor has 16384 registers for every fourth warp; one warp more than a multiple of four takes its share of them.
        """
        rows, columns = self.product
        return rows == 192 or (rows == 128 and columns > 128)

    @property
    def registers(self) -> tuple[int, int]:
        """With an exchange: what a thread of the copying warpgroup keeps, and what one of the others then has."""
        launched = 65536 // self.threads // 8 * 8
        return 40, (launched * self.threads // 128 - 40) // (self.product[0] // 64) // 8 * 8

    @property
    def threads(self) -> int:
        return self.consumers + (128 if self.exchange else 32)

    @property
    def stage_bytes(self) -> int:
        return (self.bm + self.bn) * 2 * BK

    @property
    def columns(self) -> int:
        """Columns that a warp stages at once on their way to memory; with a split, all: the other blocks read them."""
        if self.boxed and self.swapped:
            return 64
        if self.boxed:
            return next(n for n in (64, 32, 16) if self.bn % n == 0)
        return self.bn if self.split > 1 else 64 if self.bn in (64, 128) else min(self.bn, 32)

    def rows(self, loads: int) -> int:
        """Rows that a lane stores at a time, whose loads overlap: as many as registers allow, given loads that differ by row.

        Three blocks of 64×128 on a multiprocessor leave a thread 128 registers, too few for a second row's loads.
        """
        if self.boxed or self.split > 1 or loads > 2 or (loads and (self.bm, self.bn) == (64, 128)):
            return 1
        return min(self.columns // 16, 4 if self.bm == 128 and loads < 2 else 2)

    @property
    def box(self) -> tuple[int, int]:
        """Columns and rows of a box of results."""
        return self.columns, self.bm if self.swapped else 16

    @property
    def span(self) -> int:
        """What is taken from the accumulators at once: columns of a box, or with swapped operands rows of the tile."""
        return max(n for n in range(8, 57, 8) if self.bm % n == 0) if self.swapped else min(self.columns, 32)

    @property
    def pitch(self) -> int:
        """Bytes between staged rows: some columns more than there are, so that a warp's writes meet no bank twice."""
        return 4 * (self.columns + (4 if self.swapped else 8))

    @property
    def writers(self) -> int:
        """How many have a place of their own to stage results in: warps of 16 rows, swapped warpgroups of 64 columns."""
        return self.product[0] // (64 if self.swapped else 16)

    @property
    def staged(self) -> int:
        """Bytes of such a place."""
        boxes = 1 if self.swapped else self.bn // self.columns if self.added else BOXES
        return boxes * 2 * self.box[0] * self.box[1] if self.boxed else 16 * self.pitch

    @property
    def staging(self) -> int:
        """Where the staged results are: after the ring, or over it when the block has but one tile."""
        return 0 if self.split > 1 else self.stages * self.stage_bytes

    @property
    def barriers(self) -> int:
        staged = self.writers * self.staged if self.boxed else self.bm * self.pitch
        return max(self.stages * self.stage_bytes, self.staging + staged)

    @property
    def smem(self) -> int:
        """Bytes to ask for: 1 KiB more than used, since swizzled tiles begin at multiples of it."""
        return self.barriers + 16 * self.stages + (8 * self.writers if self.added else 0) + KIB


def tile(config: Mapping[str, Any], arch: Arch, steps: int, boxed: bool, added: bool = False) -> Tile:
    """The tile with as many stages as shared memory holds, at most 8, and not many more than a block's share of K can fill."""
    bm, bn, split = config["bm"], config["bn"], config["split"]
    each = -(-steps // split)
    for stages in range(2 if each <= 2 else 4 if each <= 4 else 8, 1, -1):
        t = Tile(bm, bn, stages, split, config.get("swapped", False), boxed, added)
        if t.smem <= arch.smem_block:
            return t
    raise AssertionError(f"{bm}×{bn} does not fit {arch.smem_block} bytes of shared memory")


# --- The code ------------------------------------------------------------------------------------------------------------


def _order(tiles_m: int, tiles_n: int, batches: int) -> tuple[int, ...]:
    """What the code's `place` needs of the order of tiles, with reciprocals for its divisions."""
    rows = tiles_m * batches
    tail = rows % GROUP
    dividers = (*divider(GROUP * tiles_n), *divider(max(tail, 1)), *divider(tiles_m))
    return (rows * tiles_n, tiles_n, tiles_m, rows - tail, tail, *dividers)


def _turned(t: Tile, params: tuple[Value, ...]) -> tuple[Any, Any, tuple[Any, ...]]:
    """How a lane's part of a tile that is turned over becomes rows of its box, and the types of the epilogue's arguments.

    keep(c, e)                   what the epilogue reads for channels c and c + 8, which are a lane's
    put(values, read, at, c, e)  `span` rows of them, as `part` takes them: two neighbouring rows of c, the same of c + 8, then of
                                 the next 8 rows; `at` is the lane's address for stmatrix of the first 16 rows
    """
    from numba import cuda
    from numba.cuda import types

    from tccompile.kernels.ptx import hopper as hw
    from tccompile.kernels.ptx.core import i32, u32

    inline = cuda.jit(device=True, inline="always")
    kept, results, extra = epilogue.build_kept(params)
    zeros = (types.float32(0),) * 8

    @inline
    def keep(c, e):
        return kept(c, e), kept(i32(c + 8), e)

    @inline
    def plain(values, there, read, c, e):
        return results(values, read, c, e)

    @inline
    def nothing(at):
        return zeros

    compute = results if t.added else plain
    there_x2, there_x4 = (hw.load_turned_x2, hw.load_turned_x4) if t.added else (nothing, nothing)

    @inline
    def both(values, there, read, c, e):
        """8 rows of both channels."""
        return compute(values[:2], there[:2], read[0], c, e) + compute(values[2:4], there[2:4], read[1], i32(c + 8), e)

    @inline
    def put_8(values, read, at, c, e):
        v = both(values, there_x2(at), read, c, e)
        hw.store_turned_x2(at, v[0], v[1], v[2], v[3])

    @inline
    def put_16(values, read, at, c, e):
        there = there_x4(at)
        v, w = both(values[:4], there[:4], read, c, e), both(values[4:], there[4:], read, c, e)
        hw.store_turned_x4(at, v[0], v[1], v[2], v[3], w[0], w[1], w[2], w[3])

    def put(rows: int) -> Any:
        if rows <= 16:
            return put_8 if rows == 8 else put_16
        rest = put(rows - 16)

        @inline
        def put_more(values, read, at, c, e):
            put_16(values[:8], read, at, c, e)
            rest(values[8:], read, u32(at + 2048), c, e)

        return put_more

    return keep, put(t.span), extra


def _function(
    im2col: bool, chunk: int, k_major: tuple[bool, bool], constant: bool, t: Tile, batch: int, params: tuple[Value, ...]
) -> Function:
    """The kernel for a tile: the code that `Hopper.work` gives its arguments to; a lane stores `batch` rows at a time.

    constant  whether B is the same in every run

    Integers are kept in 32 bits: Numba widens every result, and a cast lets the compiler narrow it again.
    """
    from numba import cuda
    from numba.cuda import types

    from tccompile.kernels.device_math import divide
    from tccompile.kernels.ptx import hopper as hw
    from tccompile.kernels.ptx.core import i32, u16, u32, u64

    inline = cuda.jit(device=True, inline="always")
    boxed, added, swapped = t.boxed, t.added, t.swapped
    if boxed and swapped:
        keep, put_span, extra = _turned(t, params)
    else:
        compute, extra = epilogue.build_results(params) if boxed else epilogue.build(params, batch)
    ahead = epilogue.build_ahead(params)
    maps = boxed + added
    extra = *[types.uint64] * maps, *extra  # the maps of boxes
    bm, bn, stages, split = t.bm, t.bn, t.stages, t.split
    a_bytes, stage_bytes, stage_units = bm * 2 * BK, t.stage_bytes, t.stage_bytes >> 4
    boxes = BK // chunk if im2col else 1  # of one stage, one after the other in shared memory
    copied = boxes * chunk  # halves of K that come
    b_chunk = BK if im2col else chunk
    box_bytes = bm * 2 * chunk
    a_k_major, b_k_major = k_major
    if not a_k_major:
        a_half, steps_a = hw.descriptor(128, ACROSS, 1024), [32 * i * BK for i in range(4)]
    elif chunk == 8:  # no swizzle: 8 rows of 16 bytes are a core matrix, and the next box is its neighbour along K
        a_half = hw.descriptor(0, box_bytes, 128)
        steps_a = [2 * i * box_bytes for i in range(4)]
    else:
        a_half = hw.descriptor(2 * chunk, 0, 16 * chunk)
        steps_a = [16 * i // chunk * box_bytes + 16 * i % chunk * 2 for i in range(4)]
    b_half = hw.descriptor(2 * b_chunk, 0 if b_k_major else ACROSS, 16 * b_chunk)
    steps_b = [32 * i if b_k_major else 32 * i * BK for i in range(4)]
    # wgmma's left and right operand: descriptor, where its boxes begin, bytes to the next warpgroup's 64 rows, steps along K
    operands = (a_half, 0, 64 * 2 * chunk, steps_a), (b_half, a_bytes, 64 * 2 * b_chunk, steps_b)
    (left, left_at, left_bytes, left_steps), (right, right_at, _, right_steps) = operands[::-1] if swapped else operands
    wide = t.product[1]
    multiply = hw.multiply(
        wide, tuple(zip(left_steps, right_steps, strict=True))[: copied // 16], k_major[::-1] if swapped else k_major
    )
    accumulators = hw.accumulators(wide)
    columns, pitch, half, staged = t.columns, t.pitch, 2 * t.columns + 16, t.staged
    groups, chunks = columns // 8, bn // columns
    stage_results = hw.stage_turned(bm, pitch) if swapped else hw.stage(bn, columns, pitch)
    span = t.span
    rows_alike = 7 - columns.bit_length()  # logarithm of a box's rows in 128 bytes, which swizzles take alike
    take, spans, box_y = hw.part(wide, span), columns // span, 32 * columns
    box_read, boxes_read = hw.boxes_read(BOXES - 1), hw.boxes_read(0)
    consumers, writers, staging, barriers, smallest = t.consumers, t.writers, t.staging, t.barriers, GROUP - 1
    landed = barriers + 16 * stages  # for each writer, whether what is added to its results is there
    apart, turns = 32 // groups, groups // 2  # rows between the groups of 8 results that a lane stores, and how many it has
    share = bm * groups // split  # groups of 8 results that a block of a cluster stores
    shares = -(-share // consumers)
    load4, sync_consumers = hw.load_shared_f32x4, hw.sync_threads(1, consumers)
    exchange = t.exchange
    shrink, grow = hw.set_registers(t.registers[0], False), hw.set_registers(t.registers[1], True)
    by_group, zero = GROUP.bit_length() - 1, types.float32(0)

    @inline
    def place(index, order):
        """(row tile within its batch, column tile, batch): GROUP row tiles at a time, column by column."""
        _, tiles_n, tiles_m, whole, tail, group_m, group_s, tail_m, tail_s, batch_m, batch_s = order
        first = i32(divide(index, group_m, group_s) << by_group)
        rest = i32(index - first * tiles_n)
        if first < whole:
            column = i32(rest >> by_group)
            row = i32(first + (rest & smallest))
        else:
            column = divide(rest, tail_m, tail_s)
            row = i32(first + rest - column * tail)
        batch = divide(row, batch_m, batch_s)
        return i32(row - batch * tiles_m), column, batch

    @inline
    def ask_for_b(map_b, ring, full, slot, first, column, batch, geometry):
        """Have B of a stage copied, from `first` of K on; what the stage's barrier expects is all of the stage."""
        barrier, at, n = u32(full + slot * 8), u32(ring + slot * stage_bytes + a_bytes), i32(column * bn)
        b_batch = i32(0) if im2col else i32(batch * geometry[0])
        hw.barrier_expect(barrier, (bm + bn) * 2 * copied)
        if b_k_major:
            hw.copy_box(at, map_b, barrier, first, n, b_batch)
        else:
            for i in range(bn // 64):
                hw.copy_box(u32(at + i * ACROSS), map_b, barrier, i32(n + 64 * i), first, b_batch)

    @inline
    def tiled_at(k, geometry):
        """Where a stage begins along B's K."""
        return i32(k * BK)

    @inline
    def im2col_at(k, geometry):
        box = i32(k * boxes)
        tap = divide(box, geometry[12], geometry[13])
        return i32(tap * geometry[0] + (box - tap * geometry[11]) * chunk)

    @inline
    def produce_tiled(map_a, map_b, ring, full, empty, row, column, batch, k, asked, k_end, slot, parity, geometry):
        m = i32(row * bm)
        hw.wait_for_earlier_grids()
        while k < k_end:
            barrier, at = u32(full + slot * 8), u32(ring + slot * stage_bytes)
            if k >= asked:
                hw.barrier_wait(u32(empty + slot * 8), parity)
                ask_for_b(map_b, ring, full, slot, i32(k * BK), column, batch, geometry)
            if a_k_major:
                hw.copy_box(at, map_a, barrier, i32(k * BK), m, batch)
            else:
                for i in range(bm // 64):
                    hw.copy_box(u32(at + i * ACROSS), map_a, barrier, i32(m + 64 * i), i32(k * BK), batch)
            slot = i32(slot + 1)
            if slot == stages:
                slot, parity = i32(0), i32(parity ^ 1)
            k = i32(k + 1)
        return slot, parity

    @inline
    def produce_im2col(map_a, map_b, ring, full, empty, row, column, batch, k, asked, k_end, slot, parity, geometry):
        cp, taps, width, q, pq, stride_h, stride_w, pad_h, pad_w, dil_h, dil_w, tap_boxes = geometry[:12]
        boxes_m, boxes_s, width_m, width_s, q_m, q_s, pq_m, pq_s = geometry[12:]
        m = i32(row * bm)
        image = divide(m, pq_m, pq_s)
        pixel = i32(m - image * pq)
        out_h = divide(pixel, q_m, q_s)
        h, w = i32(out_h * stride_h - pad_h), i32((pixel - out_h * q) * stride_w - pad_w)
        box = i32(k * boxes)
        tap = divide(box, boxes_m, boxes_s)
        c = i32((box - tap * tap_boxes) * chunk)
        r = divide(tap, width_m, width_s)
        at_h, at_w, end_w = i32(r * dil_h), i32((tap - r * width) * dil_w), i32(width * dil_w)
        hw.wait_for_earlier_grids()
        while k < k_end:
            barrier, at = u32(full + slot * 8), u32(ring + slot * stage_bytes)
            if k >= asked:
                hw.barrier_wait(u32(empty + slot * 8), parity)
                # Beyond the last channels of a tap, B goes on with the next tap's weights; A is zero there.
                ask_for_b(map_b, ring, full, slot, i32(tap * cp + c), column, batch, geometry)
            for i in range(boxes):
                # Beyond the last tap, zeros: every channel is outside the array.
                inside = tap < taps
                first = c if inside else cp
                right, down = (at_w, at_h) if inside else (i32(0), i32(0))
                hw.copy_pixels(u32(at + i * box_bytes), map_a, barrier, first, w, h, image, u16(right), u16(down))
                c = i32(c + chunk)
                if c >= cp:
                    c = i32(0)
                    tap = i32(tap + 1)
                    at_w = i32(at_w + dil_w)
                    if at_w == end_w:
                        at_w = i32(0)
                        at_h = i32(at_h + dil_h)
            slot = i32(slot + 1)
            if slot == stages:
                slot, parity = i32(0), i32(parity ^ 1)
            k = i32(k + 1)
        return slot, parity

    @inline
    def one_row(at):
        return load4(at) + load4(u32(at + half))

    @inline
    def two_rows(at):
        return one_row(at) + one_row(u32(at + apart * pitch))

    @inline
    def four_rows(at):
        return two_rows(at) + two_rows(u32(at + 2 * apart * pitch))

    @inline
    def store_row(acc, m, step, end, c, e):
        compute(acc, m, c, e)

    staged_rows = {1: one_row, 2: two_rows, 4: four_rows}[batch]
    store_rows = store_row if batch == 1 else compute
    batches, skip = turns // batch, batch * apart

    @inline
    def finish(acc, read, base, warp, lane, batch, rows, m, n, rank, turn, e):
        """Each warp stages its 16 rows, some columns at a time; a lane takes 8 columns of every `apart`-th row."""
        own = u32(base + staging + warp * staged)
        corner = u32(own + (lane >> 2) * pitch + ((lane >> 1) & 1) * half + (lane & 1) * 8)
        row, group = i32(lane // groups), i32(lane % groups)
        if groups == 4:  # 8 lanes read two rows at once: rows that are 2 apart share no bank
            row = i32((row & 4) | (row & 1) << 1 | (row & 2) >> 1)
        at = u32(own + row * pitch + group * 16)
        start = i32(batch * rows)
        first, end, c = i32(start + m + warp * 16 + row), i32(start + rows), i32(n + group * 8)
        if i32(m + warp * 16) < rows:
            for part in range(chunks):
                stage_results(acc, corner, part)
                cuda.syncwarp()
                for again in range(batches):
                    if first + again * skip < end:
                        results = staged_rows(u32(at + again * (skip * pitch)))
                        store_rows(results, i32(first + again * skip), i32(apart), end, i32(c + part * columns), e)
                cuda.syncwarp()
        return turn

    @inline
    def keep_nothing(c, e):
        return ()

    @inline
    def put_plain(values, at, c, e):
        """Two rows of 16 columns, of which a lane has 4: those of 8 columns after those of the 8 before."""
        a, b = compute(values[:4], c, e), compute(values[4:8], i32(c + 8), e)
        hw.store_matrices(at, a[0], a[1], a[2], a[3], b[0], b[1], b[2], b[3])

    @inline
    def put_added(values, at, c, e):
        """The same, with what is at their place."""
        there = hw.load_matrices(at)
        a, b = compute(values[:4], there[:4], c, e), compute(values[4:8], there[4:], i32(c + 8), e)
        hw.store_matrices(at, a[0], a[1], a[2], a[3], b[0], b[1], b[2], b[3])

    put_16 = put_added if added else put_plain

    @inline
    def ask(base, warp, lane, batch, rows, m, n, e):
        """Have what is added to a warp's results copied to their boxes, once those of the tile before have been read."""
        first, own, barrier = i32(m + warp * 16), u32(base + staging + warp * staged), u32(base + landed + warp * 8)
        if lane == 0 and first < rows:
            boxes_read()
            hw.barrier_expect(barrier, staged)
            for number in range(chunks):
                hw.copy_box(u32(own + number * box_y), e[1], barrier, i32(n + number * columns), first, batch)

    @inline
    def finish_boxed(acc, read, base, warp, lane, batch, rows, m, n, rank, turn, e):
        """Each warp rounds its 16 rows, some columns at a time, into boxes laid out as the copy engine swizzles them.

        turn  which box is next; with something added, the parity of its barrier's phase
        """
        row, first = i32(lane & 15), i32(m + warp * 16)
        key = i32((row >> rows_alike) & (columns // 8 - 1))
        own = u32(base + staging + warp * staged)
        at = u32(own + row * (2 * columns) + ((lane >> 4) ^ key) * 16)
        if first < rows:
            if added:
                hw.barrier_wait(u32(base + landed + warp * 8), turn)
            for number in range(chunks):
                box = u32((number if added else turn) * box_y)
                c = i32(n + number * columns + (lane & 3) * 2)
                if not added:
                    if lane == 0:
                        box_read()
                    cuda.syncwarp()
                for i in range(spans):
                    values = take(acc, i32(number * spans + i))
                    put_16(values, u32((at + box) ^ (i * 2 * span)), i32(c + i * span), e[maps:])
                    if span == 32:
                        put_16(values[8:], u32((at + box) ^ (i * 2 * span + 32)), i32(c + i * span + 16), e[maps:])
                hw.fence_copies()
                cuda.syncwarp()
                if lane == 0:
                    hw.store_box(e[0], u32(own + box), i32(n + number * columns), first, batch)
                if not added:
                    turn = i32(turn + 1) if turn < BOXES - 1 else i32(0)
            if added:
                turn = i32(turn ^ 1)
        return turn

    @inline
    def ask_turned(base, warp, lane, batch, rows, m, n, e):
        """The same for a warpgroup's one box."""
        group = i32(warp >> 2)
        if (warp & 3) == 0 and lane == 0:
            boxes_read()
            hw.barrier_expect(u32(base + landed + group * 8), staged)
            hw.copy_box(u32(base + staging + group * staged), e[1], u32(base + landed + group * 8), i32(n + group * 64), m, batch)

    @inline
    def finish_turned(acc, read, base, warp, lane, batch, rows, m, n, rank, turn, e):
        """A warpgroup turns and rounds its 64 columns of all rows into one box, of which a warp has 32 bytes in every row."""
        group, leads = i32(warp >> 2), (warp & 3) == 0 and lane == 0
        own = u32(base + staging + group * staged)
        at = u32(own + ((lane >> 4) * 8 + (lane & 7)) * 128 + ((((warp & 3) * 2 + ((lane >> 3) & 1)) ^ (lane & 7)) * 16))
        if added:
            hw.barrier_wait(u32(base + landed + group * 8), turn)
        else:
            if leads:
                boxes_read()
            hw.sync_group(i32(group + 1))
        c = i32(n + warp * 16 + (lane >> 2))
        for number in range(wide // span):
            put_span(take(acc, i32(number)), read, u32(at + number * (span * 128)), c, e[maps:])
        hw.fence_copies()
        hw.sync_group(i32(group + 1))
        if leads:
            hw.store_box(e[0], own, i32(n + group * 64), m, batch)
        return i32(turn ^ 1)

    @inline
    def finish_split(acc, read, base, warp, lane, batch, rows, m, n, rank, turn, e):
        """Each block stages its part of the sum over K; each then adds the parts of every `split`-th row, in order of rank."""
        if swapped:  # a lane has a channel of every 8 rows' two
            corner = u32(base + (lane & 3) * 2 * pitch + (lane >> 4) * half + warp * 32 + ((lane >> 2) & 3) * 4)
        else:
            corner = u32(base + (warp * 16 + (lane >> 2)) * pitch + ((lane >> 1) & 1) * half + (lane & 1) * 8)
        sync_consumers()  # nobody reads the ring any more
        stage_results(acc, corner, i32(0))
        hw.cluster_arrive()
        hw.cluster_wait()
        for again in range(shares):
            i = i32(again * consumers + warp * 32 + lane)
            row, group = i32((i // groups) * split + rank), i32(i % groups)
            inside = i < share and i32(m + row) < rows
            a0, a1, a2, a3, a4, a5, a6, a7 = zero, zero, zero, zero, zero, zero, zero, zero
            if inside:
                at = u32(base + row * pitch + group * 16)
                a0, a1, a2, a3 = hw.load_cluster_f32x4(hw.in_block(at, 0))
                a4, a5, a6, a7 = hw.load_cluster_f32x4(hw.in_block(u32(at + half), 0))
                for other in range(1, split):
                    b0, b1, b2, b3 = hw.load_cluster_f32x4(hw.in_block(at, other))
                    b4, b5, b6, b7 = hw.load_cluster_f32x4(hw.in_block(u32(at + half), other))
                    a0, a1, a2, a3 = a0 + b0, a1 + b1, a2 + b2, a3 + b3
                    a4, a5, a6, a7 = a4 + b4, a5 + b5, a6 + b6, a7 + b7
            if again == shares - 1:  # before the results are stored: arriving waits for all that has been stored
                hw.cluster_arrive()
            if inside:
                compute((a0, a1, a2, a3, a4, a5, a6, a7), i32(batch * rows + m + row), i32(n + group * 8), e)
        return turn

    produce, at_b = (produce_im2col, im2col_at) if im2col else (produce_tiled, tiled_at)
    finish_tile, ask_added = finish_split if split > 1 else finish, ask
    keep_columns = keep if boxed and swapped else keep_nothing
    if boxed:
        finish_tile, ask_added = (finish_turned, ask_turned) if swapped else (finish_boxed, ask)
    geometry_at = 2 + ORDER
    integers = geometry_at + (IM2COL if im2col else 1)

    @inline
    def body(map_a, map_b, rest):
        rows, steps = rest[0], rest[1]
        order, geometry, e = rest[2:geometry_at], rest[geometry_at:integers], rest[integers:]
        tiles = order[0]
        base = u32((hw.shared_address(cuda.shared.array(0, dtype=types.uint8)) + 1023) & 0xFFFFFC00)
        full = u32(base + barriers)
        empty = u32(full + 8 * stages)
        tid = i32(cuda.threadIdx.x)
        warp, lane = hw.uniform(i32(tid >> 5)), i32(tid & 31)
        if tid == 0:
            for s in range(stages):
                hw.barrier_init(u32(full + 8 * s), 1)
                hw.barrier_init(u32(empty + 8 * s), consumers // 128)
            for w in range(writers if added else 0):
                hw.barrier_init(u32(base + landed + 8 * w), 1)
            hw.fence_barrier_init()
            hw.prefetch_map(map_a)
            hw.prefetch_map(map_b)
        cuda.syncthreads()
        block, blocks = u32(cuda.blockIdx.x), u32(cuda.gridDim.x)
        rank, index, stride = i32(block % split), i32(block // split), i32(blocks // split)
        k_from, k_to = i32(u32(steps * rank) // split), i32(u32(steps * (rank + 1)) // split)
        slot = i32(0)
        if warp >= consumers // 32:
            if exchange:
                shrink()
            if tid == consumers:
                parity, asked = i32(1), k_from
                if constant:  # what the grids before have no part in comes while they run: weights, as many as the ring holds
                    row, column, batch = place(index, order)
                    asked = i32(min(k_to, i32(k_from + stages)))
                    for s in range(stages):
                        if k_from + s < k_to:
                            ask_for_b(map_b, base, full, i32(s), at_b(i32(k_from + s), geometry), column, batch, geometry)
                while index < tiles:
                    row, column, batch = place(index, order)
                    slot, parity = produce(
                        map_a, map_b, base, full, empty, row, column, batch, k_from, asked, k_to, slot, parity, geometry
                    )
                    asked = k_from
                    index = i32(index + stride)
            if split > 1:
                cuda.syncwarp()
                hw.cluster_arrive()
                hw.cluster_wait()
                hw.cluster_arrive()
        else:
            if exchange:
                grow()
            # A descriptor holds an address within its block; the bits above say which block of the cluster.
            half_left = left | u64((base + left_at + (warp >> 2) * left_bytes & 0x3FFFF) >> 4)
            half_right = right | u64((base + right_at & 0x3FFFF) >> 4)
            parity, turn = i32(0), i32(0)
            if warp == 0 and lane * 8 < bn and index < tiles:  # of the first tile, as there is nothing to do but wait
                row, column, batch = place(index, order)
                ahead(i32(column * bn + lane * 8), e[maps:])
            hw.wait_for_earlier_grids()
            hw.let_later_grids_start()
            while index < tiles:
                row, column, batch = place(index, order)
                read = keep_columns(i32(column * bn + warp * 16 + (lane >> 2)), e[maps:])
                acc = accumulators()
                before, k = empty, k_from
                while k < k_to:
                    hw.barrier_wait(u32(full + slot * 8), parity)
                    at = u64(slot * stage_units)
                    acc = multiply(acc, half_left + at, half_right + at, i32(k - k_from))
                    if added and k == k_from:
                        ask_added(base, warp, lane, batch, rows, i32(row * bm), i32(column * bn), e)
                    hw.wgmma_wait_last()
                    if k > k_from and tid & 127 == 0:  # the multiplications before these are done: give their buffer back
                        hw.barrier_arrive(before)
                    before = u32(empty + slot * 8)
                    slot = i32(slot + 1)
                    if slot == stages:
                        slot, parity = i32(0), i32(parity ^ 1)
                    k = i32(k + 1)
                hw.wgmma_wait_all()
                if tid & 127 == 0:
                    hw.barrier_arrive(before)
                turn = finish_tile(acc, read, base, warp, lane, batch, rows, i32(row * bm), i32(column * bn), rank, turn, e)
                index = i32(index + stride)
            if boxed and lane == 0:
                boxes_read()
        if split > 1:  # a block's shared memory lives until all have read it
            hw.cluster_wait()

    signature = types.void(types.uint64, types.uint64, *[types.int32] * integers, *extra)
    return Function(entry(body, 2, integers + len(extra)), signature, t.threads, cluster=split)


# --- The kernel ----------------------------------------------------------------------------------------------------------


class Hopper(OneWay):
    """Convolutions and matrix products by TMA and wgmma; one instance for each of the two ops."""

    tensor_cores = True

    def __init__(self, name: str, realises: type[Op]) -> None:
        self.name, self.realises = name, realises

    def refusal(self, way: Op, program: Program, arch: Arch) -> str | None:
        if arch.mma != "wgmma":
            return f"{arch.name} has no wgmma instructions"
        problem = describe(way, program)
        if isinstance(problem, str):
            return problem
        if reason := unfit(problem):
            return reason
        found = copies(problem, program)
        return found if isinstance(found, str) else None

    def configs_of(self, way: Op, program: Program, arch: Arch) -> Iterator[Config]:
        problem, how = self._described(way, program)
        whole = 1 if how.k_major[1] else 64  # columns of a box
        candidates = [
            {"bm": bm, "bn": bn, "split": split}
            for bm, every in TILES.items()
            for columns in [[n for n in every if n % whole == 0]]
            for bn in columns
            for split in (1, 2, 4, 8)
            if (bm == 64 or bm < 2 * problem.rows) and (bn == columns[0] or bn < 2 * problem.stored)
            if split == 1 or (bm * bn <= 128 * 128 and how.steps >= 2 * split)
        ]
        boxed = boxed_results(way, program, problem, 2)
        candidates += [
            {"bm": bm, "bn": bn, "split": split, "swapped": True}
            for bn, every in (SWAPPED if how.k_major[0] else {}).items()
            for bm in every
            if (bm == 8 or bm < 2 * problem.rows) and (bn == 64 or bn < 2 * problem.stored)
            for split in (1, 2, 4, 8)
            if (boxed if split == 1 else bm * bn <= 128 * 128 and how.steps >= 2 * split)
        ]
        ranked = sorted(candidates, key=self._costs(way, program, arch))
        yield from ranked[:CHEAPEST]
        blocks = [-(-problem.rows // c["bm"]) * -(-problem.stored // c["bn"]) * c["split"] for c in ranked]
        yield from (c for i, c in enumerate(ranked) if i >= CHEAPEST and blocks[i] < min(blocks[:i]))

    def cost_of(self, way: Op, program: Program, config: Config, arch: Arch) -> float:
        return self._costs(way, program, arch)(config)

    def _costs(self, way: Op, program: Program, arch: Arch) -> Callable[[Config], float]:
        """The cost of each config."""
        problem, how = self._described(way, program)
        boxed = boxed_results(way, program, problem, 2)
        constant = problem.w.storage in program.constants
        loads = len(epilogue.loads_by_row(way, program))
        biased = len(way.epilogue.loads) > loads
        moving = traffic_us(way, program, arch)

        def cost(config: Config) -> float:
            t = _tile(config, arch, how, boxed)
            computing = time_us(problem, how, t, arch, loads, biased, constant)
            shorter = min(computing, moving)  # overlaps the other but for a beginning and an end
            apart = 0.32 * min(shorter, 15) + 0.15 * max(shorter - 15, 0)
            return starting_us(problem, how, t, arch, biased) + max(computing, moving) + apart

        return cost

    def work_of(self, way: Op, program: Program, config: Config, arch: Arch) -> Work:
        problem, how = self._described(way, program)
        boxed = boxed_results(way, program, problem, 1 if config.get("swapped") else 2) if config["split"] == 1 else None
        t = _tile(config, arch, how, boxed)
        spec = boxed.epilogue if boxed else epilogue.describe(way, program, epilogue.frame_of(way, program))
        stored = boxed.args(t) if boxed else spec.args
        tiles_m, tiles_n = -(-problem.rows // t.bm), -(-problem.stored // t.bn)
        order = _order(tiles_m, tiles_n, problem.batches)
        tiles = order[0]
        grid = tiles * t.split if t.split > 1 else min(tiles, arch.sms * resident(t, arch))
        integers = (problem.rows, how.steps, *order, *how.geometry)
        launch = Launch(
            code=code(
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
                rows=t.rows(spec.form.loads_by_row),
                epilogue=spec.params,
            ),
            grid=(grid, 1, 1),
            block=t.threads,
            args=(*how.boxed(t), *map(I32, integers), *stored),
            smem=t.smem,
        )
        return Work((launch,))

    def build(self, arch: Arch, **params: Any) -> Function:
        added = params["boxed"] and epilogue.Form.decoded(params["epilogue"]).loads_by_row > 0
        t = Tile(params["bm"], params["bn"], params["stages"], params["split"], params["swapped"], params["boxed"], added)
        copied = params["im2col"], params["chunk"], params["k_major"], params["constant"]
        return _function(*copied, t, params["rows"], params["epilogue"])

    def _described(self, op: Op, program: Program) -> tuple[Problem, Copies]:
        problem = describe(op, program)
        assert isinstance(problem, Problem)
        how = copies(problem, program)
        assert isinstance(how, Copies)
        return problem, how


def _tile(config: Config, arch: Arch, how: Copies, boxed: Boxed | None) -> Tile:
    """The config's tile; `boxed`: how results may go to y in boxes, which those of a split do not."""
    if config["split"] > 1:
        return tile(config, arch, how.steps, False)
    assert boxed or not config.get("swapped"), "results of swapped operands go to y in boxes, or through a cluster"
    return tile(config, arch, how.steps, boxed is not None, boxed is not None and boxed.added is not None)


def resident(t: Tile, arch: Arch) -> int:
    """Blocks that a multiprocessor holds at once, by shared memory and registers."""
    if t.exchange:
        return 1
    registers = min(255, t.product[1] // 2 + (48 if t.split == 1 else 88))  # the accumulators, and what else a thread needs
    warps = 4 * (65536 // 4 // (32 * registers))  # every fourth warp has its own 16384 registers
    return max(1, min(arch.smem_sm // (t.smem + KIB), warps // (t.threads // 32)))


TOGETHER = {1: 132, 2: 132, 4: 120, 8: 112}
"""Multiprocessors that clusters of so many blocks fill at once: their blocks share one of the GPU's parts, of 14 to 18."""


def _blocks(problem: Problem, t: Tile, arch: Arch) -> tuple[int, int, int]:
    """Blocks, multiprocessors that they can fill, and how many of them one holds."""
    tiles = -(-problem.rows // t.bm) * problem.batches * -(-problem.stored // t.bn)
    return tiles * t.split, TOGETHER[t.split], resident(t, arch) if t.split < 8 else 1


def starting_us(problem: Problem, how: Copies, t: Tile, arch: Arch, biased: bool) -> float:
    """Microseconds from the launch before to the first stage: less if blocks find room while that one's still run."""
    blocks, sms, most = _blocks(problem, t, arch)
    crowded = [min(max(2 * blocks / room - 1, 0.0), 1.0) for room in (arch.sms, sms * most)]
    early = min(how.steps / t.split / 8, 1.0)  # how much of what it copies could come before
    return (1.25 if t.swapped else 1.3) + 0.26 * early * crowded[0] + 0.07 * crowded[1] + 0.11 * biased


def time_us(problem: Problem, how: Copies, t: Tile, arch: Arch, loads: int, biased: bool, constant: bool) -> float:
    """Microseconds from the first block's start to the last one's end, if memory is fast enough.

    loads   of the epilogue by row; what they cost is from ResNet-50's layers
    biased  whether it loads by column too, as convolutions do and most products of the benchmarks do not

    Fitted on an H200 to 6100 times of 1120 convolutions and GEMMs, each launched several times in a row by programmatic edges,
    and with swapped operands to 13600 times of 1258, from which it is 15 % off (in the mean of squares). Its choices are 3 %
    slower than the best of those measured. The constants are near what they stand for, at the clock that a GPU keeps under load.
    """
    blocks, sms, most = _blocks(problem, t, arch)
    together = min(most, -(-blocks // sms))
    waves = -(-blocks // (sms * together))
    tiles_m, steps = -(-problem.rows // t.bm), -(-how.steps // t.split)
    # Cycles of a stage: of the copy engine (its boxes overlap), the Tensor Cores, and shared memory, which both use
    row_b = TILED_CYCLES if how.im2col or how.chunk == BK else NARROW_CYCLES
    row_a = 0.855 * _row_cycles(problem.padded, how.chunk) * (BK // how.chunk) if how.im2col else row_b
    copying = max(t.bm * row_a + t.bn * row_b, BOX_CYCLES * how.boxes_of_stage(t))
    part = 1.0 if how.im2col else how.chunk / BK  # of a stage, what comes
    left, right = t.product
    multiplying = _multiplying(left, right) * part
    sharing = (left + right + left // 64 * (64 + right)) * part
    busy = 1 + 0.4 * max(sharing / multiplying - 1, 0)  # what reads more for each multiplication takes more power: a lower clock
    alone = 1.1 if left * together == 64 else 1.0  # a warpgroup on a multiprocessor waits for what it has begun
    latency = (0.8 + 3 * copying / 1370) / tiles_m  # of a copy: from the L2 cache, if another block has the same columns
    step = max(max(copying / 1370, alone * multiplying * busy / 1660, alone * sharing / 1960) * together, latency / t.stages)
    # The last stage, where rows of tiled boxes reach beyond the channels: the copy engine is slow at these
    beyond = not how.im2col and how.k_major == (True, True) and problem.padded % how.chunk > 0
    tail = max((t.bm + t.bn) * BEYOND_CYCLES / 1370 * together - step, 0) / t.split if beyond else 0.0
    # Weights that come while the launch before ends, as far as the ring takes them and blocks find room
    early = 0.42 * min(steps, t.stages) * (1 - min(max(2.4 * blocks / arch.sms - 0.6, 0.0), 1.0)) if constant else 0.0
    inside = 1.0 if t.swapped else min(1.0, problem.rows / t.bm)  # of a tile's rows
    # A warpgroup alone takes longer than one beside another
    results = max(left * together, 85 if t.swapped else 155) * right / (128 * 128) * inside
    if t.split > 1:  # each block of a cluster stores its share of the rows, whose loads begin late
        if t.swapped:
            storing = 0.6 + 2 * results + 0.4 * loads
        else:
            storing = 0.48 + 0.36 * results + 0.4 * loads + (2.05 * inside + 0.21) * t.bm * t.bn / (128 * 128)
    elif t.boxed:  # swapped, a lane has read its bias before
        storing = (0.6 + 0.4 * loads if t.swapped else 0.61 + 0.2 * biased + 0.25 * loads) * results
    else:
        storing = (0.56 + 0.45 * loads) * results
    return waves * (steps * step + tail + storing) - early * step


HOPPER = Hopper("conv_sm90", Conv), Hopper("gemm_sm90", Gemm)
