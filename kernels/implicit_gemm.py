"""Convolutions and matrix products as one thing: batches of y[m, n] = sum over k of A[m, k] * B[n, k].

For a convolution m is an output pixel (n, p, q), n an output channel of one group, and k = (r, s, c) a tap and an input channel;
A is never written down: its rows are gathered from x. A Gemm is the case of one tap. Everything here is plain arithmetic on
the host, shared by the kernels of all generations.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TypeGuard, TypeVar

from tccompile.arch import Arch
from tccompile.ir.extent import Extent, Shape, ceil_div, greatest, hint, round_up
from tccompile.ir.forms import Grouped, Sparse
from tccompile.ir.ops import Conv, Gemm, Op
from tccompile.ir.program import Program
from tccompile.ir.tensor import Tensor, merged
from tccompile.ir.types import FLOAT8, DType
from tccompile.kernels.rates import measured
from tccompile.kernels.remembered import remembered
from tccompile.kernels.spec import Code, Config, Kernel, Work

CHUNK_BYTES = 16
"""Bytes that are copied at once."""

CHUNK = 8
"""Halves that are copied at once."""

OPERANDS = {
    DType.F16: "f16", DType.BF16: "bf16", DType.I8: "s8", DType.U8: "u8", DType.E4M3: "e4m3", DType.E5M2: "e5m2",
}  # fmt: skip
"""Types of tensors that Tensor Cores can be fed with as they are stored, and what instructions call them."""

MIXED = (frozenset({DType.I8, DType.U8}), frozenset(FLOAT8))
"""Types that are multiplied in any mix; of all others both operands are of one."""

MOST_SCRATCH = 64 << 20
"""Bytes of workspace up to which K is split: the arena has room for them while the step runs."""

DOUBT = 1.05
"""By which times with 2:4 weights are estimated longer: where they bring nothing, dense ones stay."""


E = TypeVar("E", bound=Extent)

Pair = tuple[Extent, Extent]
"""Of H and W, of (outer, inner), or of rows and columns, as it says where it is used."""


@dataclass(frozen=True)
class Problem:
    """An op as an implicit GEMM. Strides are in elements.

    batch      independent products: (1, groups) of a Conv, two levels of leading axes of a batched Gemm
    pixels     (N, P, Q) a batch: row m = (n*P + p)*Q + q
    columns    a batch; the last batch also stores y's padding, up to `stored` columns
    taps       (R, S); channels, those of one tap: `channels` has the model's, `padded` what w has in memory
    image      (H, W): a tap outside reads zeros
    x_batch    strides of x between batches (outer, inner), as w_batch
    x_pixel    strides of x: (n, h, w, c)
    w_column   stride of w between columns; w_tap its strides (r, s, c). A product's operand may be transposed: rows of x or
               columns of w are then neighbours in memory, and channels lie apart
    row_batch  rows of y between batches, column_batch columns of y
    """

    x: Tensor
    w: Tensor
    y: Tensor
    batch: Pair
    pixels: tuple[Extent, Extent, Extent]
    columns: Extent
    stored: Extent
    taps: Pair
    channels: Extent
    padded: Extent
    image: Pair
    x_batch: Pair
    w_batch: Pair
    x_pixel: tuple[Extent, Extent, Extent, Extent]
    w_column: Extent
    w_tap: tuple[Extent, Extent, Extent]
    row_batch: Extent
    column_batch: Extent
    strides: tuple[int, int] = (1, 1)
    pads: Pair = (0, 0)
    dilations: tuple[int, int] = (1, 1)

    @property
    def chunk(self) -> int:
        """Elements of x and of w that are copied at once."""
        return CHUNK_BYTES // self.x.dtype.size

    @property
    def integers(self) -> bool:
        """Whether operands are integers of 8 bits, whose sums are int32."""
        return {self.x.dtype, self.w.dtype} <= {DType.I8, DType.U8}

    @property
    def across(self) -> bool:
        """Whether operands may lie across K, as transposed ones do, for Tensor Cores: those of 16 bits."""
        return self.x.dtype.bits == self.w.dtype.bits == 16

    @cached_property
    def batches(self) -> Extent:
        return self.batch[0] * self.batch[1]

    @cached_property
    def rows(self) -> Extent:
        """M: rows of a batch."""
        return math.prod(self.pixels)

    @cached_property
    def depth(self) -> Extent:
        """K, with the channels' padding."""
        return self.taps[0] * self.taps[1] * self.padded

    @cached_property
    def k_major(self) -> tuple[bool, bool]:
        """Of x and of w: whether channels are neighbours in memory, not rows or columns as in a transposed matrix."""
        transposed = [
            self.channels > 1 and step != 1 and across == 1
            for step, across in ((self.x_pixel[3], self.x_pixel[2]), (self.w_tap[2], self.w_column))
        ]
        return not transposed[0], not transposed[1]

    @property
    def flops(self) -> float:
        """Floating-point operations that the model asks for."""
        return 2.0 * hint(self.batches * self.rows * self.columns * self.taps[0] * self.taps[1] * self.channels)

    @property
    def linear(self) -> bool:
        """Whether row m of A begins at m times one stride: one tap, no stride, no padding of the image."""
        (_, p, q), (n, h, w, _) = self.pixels, self.x_pixel
        plain = self.taps == (1, 1) and self.strides == (1, 1) and self.pads == (0, 0) and self.pixels[1:] == self.image
        return plain and (p == 1 or h == q * w) and (self.pixels[0] == 1 or n == p * q * w)


@remembered
def describe(op: Op, program: Program) -> Problem | str:
    """The op as an implicit GEMM, or the reason why it is none."""
    if isinstance(op, Conv):
        return _conv(op, program)
    assert isinstance(op, Gemm)
    return _gemm(op, program)


def _conv(op: Conv, program: Program) -> Problem:
    x, w, y = (program.tensors[n] for n in (op.x, op.w, op.y))
    shape = program.op_shape(op)
    flat = x.rank == 3  # (N, C, W): an image of height 1

    def spatial(values: tuple[E, ...], missing: E) -> tuple[E, E]:
        return (missing, values[0]) if flat else (values[0], values[1])

    groups, columns, channels = op.groups, shape[1] // op.groups, w.shape[1]
    xn = x.strides[0] if x.shape[0] > 1 else 0  # a view's may be any
    xh, xw = spatial(x.strides[2:], 0)
    wr, ws = spatial(w.strides[2:], 0)
    p, q = spatial(shape[2:], 1)
    return Problem(
        x=x,
        w=w,
        y=y,
        batch=(1, groups),
        pixels=(shape[0], p, q),
        columns=columns,
        stored=_stored(op, program, axis=1) - (groups - 1) * columns,
        taps=spatial(w.shape[2:], 1),
        channels=channels,
        padded=w.padded[1],
        image=spatial(x.shape[2:], 1),
        x_batch=(0, channels * x.strides[1] if groups > 1 else 0),
        w_batch=(0, columns * w.strides[0] if groups > 1 else 0),
        x_pixel=(xn, xh, xw, x.strides[1]),
        w_column=w.strides[0],
        w_tap=(wr, ws, w.strides[1]),
        row_batch=0,
        column_batch=columns,
        strides=spatial(op.strides, 1),
        pads=spatial(op.pads, 0),
        dilations=spatial(op.dilations, 1),
    )


def _gemm(op: Gemm, program: Program) -> Problem | str:
    a, b, y = (program.tensors[n] for n in (op.a, op.b, op.y))
    shape = program.op_shape(op)
    if b.rank > 2:
        leading = _loops(shape[:-2], [a.strides[:-2], b.strides[:-2]], 2)
        if leading is None:
            return f"its batches {shape[:-2]} lie at more than two different strides"
        batch, (a_batch, b_batch) = leading
        pixels: Shape = (1, 1, shape[-2])
        rows: Shape = (0, 0, a.strides[-2])
    else:
        leading = _loops(shape[:-1], [a.strides[:-1]], 3)
        if leading is None:
            return f"its rows {shape[:-1]} lie at more than three different strides"
        pixels, (rows,) = leading
        batch, a_batch, b_batch = (1, 1), (0, 0), (0, 0)
    return Problem(
        x=a,
        w=b,
        y=y,
        batch=(batch[0], batch[1]),
        pixels=(pixels[0], pixels[1], pixels[2]),
        columns=shape[-1],
        stored=_stored(op, program, axis=len(shape) - 1),
        taps=(1, 1),
        channels=b.shape[-1],
        padded=b.padded[-1],
        image=(pixels[1], pixels[2]),
        x_batch=(a_batch[0], a_batch[1]),
        w_batch=(b_batch[0], b_batch[1]),
        x_pixel=(rows[0], rows[1], rows[2], a.strides[-1]),
        w_column=b.strides[-2],
        w_tap=(0, 0, b.strides[-1]),
        row_batch=shape[-2] if b.rank > 2 else 0,
        column_batch=0,
    )


def _stored(op: Op, program: Program, axis: int) -> Extent:
    """Columns that the epilogue stores, y's padding included."""
    channels = program.op_shape(op)[axis]
    return channels if op.epilogue.shuffle > 1 else greatest(channels, program.tensors[op.y].padded[axis])


def _loops(extents: Shape, strides: list[Shape], depth: int) -> tuple[Shape, list[Shape]] | None:
    """`merged` loops, filled up to `depth` with loops of one turn; None if there are more."""
    loops = merged(extents, strides)
    if len(loops) > depth:
        return None
    loops = [(1, (0,) * len(strides))] * (depth - len(loops)) + loops
    return tuple(n for n, _ in loops), [tuple(steps[k] for _, steps in loops) for k in range(len(strides))]


# --- Groups ----------------------------------------------------------------------------------------------------------


def ways(op: Op, program: Program) -> list[Op]:
    """The op, and if it is a grouped convolution, what is the same in fewer groups, with joined weights."""
    if not isinstance(op, Conv):
        return [op]
    forms = [form for form in program.forms.get(op.w, ()) if isinstance(form, Grouped) and form.of == op.groups]
    return [op, *(replace(op, w=form.tensor, groups=form.groups) for form in forms)]


def sparse_form(op: Op, program: Program) -> Sparse | None:
    """The compressed form of an op's weights, if these are 2:4."""
    name = op.w if isinstance(op, Conv) else op.b if isinstance(op, Gemm) else ""
    return next((form for form in program.forms.get(name, ()) if isinstance(form, Sparse)), None)


class OneWay(Kernel):
    """A kernel that may take a grouped convolution in fewer groups: its configs then say in how many. The subclass's methods see
    one of the op's `ways` at a time.
    """

    def supports(self, op: Op, program: Program, arch: Arch) -> str | None:
        refusals = [self.refusal(way, program, arch) for way in ways(op, program)]
        return None if None in refusals else refusals[0]

    def configs(self, op: Op, program: Program, arch: Arch) -> Iterator[Config]:
        for way in ways(op, program):
            if self.refusal(way, program, arch) is None:
                groups = {"groups": way.groups} if _is_joined(way, op) else {}
                yield from ({**config, **groups} for config in self.configs_of(way, program, arch))

    def takes(self, op: Op, program: Program, config: Config, arch: Arch) -> bool:
        found = [way for way in ways(op, program) if config.get("groups") == (way.groups if _is_joined(way, op) else None)]
        return any(self.refusal(way, program, arch) is None and self.takes_of(way, program, config, arch) for way in found)

    def shareable(self, op: Op, program: Program, config: Config, arch: Arch) -> Iterator[Config]:
        return self.shareable_of(_chosen(op, program, config), program, config, arch)

    def shareable_of(self, way: Op, program: Program, config: Config, arch: Arch) -> Iterator[Config]:
        return iter(())

    def cost(self, op: Op, program: Program, config: Config, arch: Arch) -> float:
        return self.cost_of(_chosen(op, program, config), program, config, arch)

    def codes(self, op: Op, program: Program, config: Config, arch: Arch) -> frozenset[Code]:
        return self.codes_of(_chosen(op, program, config), program, config, arch)

    def work(self, op: Op, program: Program, config: Config, arch: Arch) -> Work:
        return self.work_of(_chosen(op, program, config), program, config, arch)

    @abstractmethod
    def refusal(self, way: Op, program: Program, arch: Arch) -> str | None:
        """As `supports`."""

    @abstractmethod
    def configs_of(self, way: Op, program: Program, arch: Arch) -> Iterator[Config]:
        """As `configs`."""

    def takes_of(self, way: Op, program: Program, config: Config, arch: Arch) -> bool:
        """As `takes`."""
        own = {name: value for name, value in config.items() if name != "groups"}
        return own in self._every_of(way, program, arch)

    @remembered
    def _every_of(self, way: Op, program: Program, arch: Arch) -> list[Config]:
        return [*self.configs_of(way, program, arch)]

    @abstractmethod
    def cost_of(self, way: Op, program: Program, config: Config, arch: Arch) -> float:
        """As `cost`."""

    def codes_of(self, way: Op, program: Program, config: Config, arch: Arch) -> frozenset[Code]:
        """As `codes`."""
        return frozenset(launch.code for launch in self.work_of(way, program, config, arch).launches)

    @abstractmethod
    def work_of(self, way: Op, program: Program, config: Config, arch: Arch) -> Work:
        """As `work`."""


def _is_joined(way: Op, op: Op) -> TypeGuard[Conv]:
    """Whether it is the op in fewer groups."""
    return isinstance(way, Conv) and way != op


def _chosen(op: Op, program: Program, config: Config) -> Op:
    """The way that a config of the op names."""
    if "groups" not in config:
        return op
    return next(way for way in ways(op, program) if isinstance(way, Conv) and way.groups == config["groups"])


# --- What Tensor Core kernels need -----------------------------------------------------------------------------------


def unfit(problem: Problem, kinds: Collection[DType] = (DType.F16,)) -> str | None:
    """None if 16-byte copies of operands of one of these types can feed Tensor Cores, else the rule that does not hold.

    Two operands are of one type, or of two of `MIXED`.
    """
    for t in (problem.x, problem.w):
        if t.dtype not in kinds:
            return f"{t.name} is {t.dtype.value}; Tensor Cores are fed with {' or '.join(kind.value for kind in kinds)}"
    types = {problem.x.dtype, problem.w.dtype}
    if len(types) > 1 and not any(types <= mix for mix in MIXED):
        return f"{problem.x.name} is {problem.x.dtype.value} and {problem.w.name} {problem.w.dtype.value}; they must be alike"
    return unaligned(problem)


def unaligned(problem: Problem) -> str | None:
    """None if both operands can be read in aligned vectors of neighbouring channels, else the rule that does not hold.

    A vector has 16 bytes, and 8 elements at least.
    """
    x, w, unit = problem.x, problem.w, max(CHUNK, problem.chunk)
    if problem.batch[1] > 1 and problem.column_batch:  # a grouped convolution
        for what, n, multiple in (("input", problem.channels, unit), ("output", problem.columns, CHUNK)):
            if n % multiple:
                return f"its groups have {n} {what} channels, not a multiple of {multiple}"
    x_k_major, w_k_major = problem.k_major
    whole = round_up(problem.channels, unit)
    if w_k_major and problem.padded != whole:
        return f"{w.name} has {problem.padded} elements a tap for {problem.channels} channels, not the next multiple of {unit}"
    channel_axis = 1 if problem.column_batch else x.rank - 1
    if x_k_major and (problem.batches == 1 or not problem.column_batch) and x.padded[channel_axis] < whole:
        return f"{x.name} has {x.padded[channel_axis]} channels in memory, fewer than the {whole} that are read at once"
    if (x_k_major or problem.column_batch) and problem.x_pixel[3] != 1 and problem.channels > 1:
        return f"neighbouring channels of {x.name} are {problem.x_pixel[3]} elements apart in memory"
    if not x_k_major and not problem.linear:
        return f"{x.name} is transposed, and its rows {problem.pixels} lie at more than one stride"
    r, s = problem.taps
    wr, ws, wc = problem.w_tap
    neighbours = wc == 1 and (s == 1 or ws == problem.padded) and (r == 1 or wr == s * problem.padded)
    if (w_k_major or problem.column_batch) and not neighbours:
        return f"the taps and channels of {w.name} are not neighbours in memory"
    x_steps = problem.x_pixel[:3] if x_k_major else problem.x_pixel[3:]
    w_step = problem.w_column if w_k_major else wc
    steps = {x.name: (x.offset, *problem.x_batch, *x_steps), w.name: (w.offset, *problem.w_batch, w_step)}
    for name, values in steps.items():
        for v in values:
            if v % unit:
                return f"rows of {name} begin at multiples of {v} elements, not of 16 bytes"
    for t in (x, w):
        if t.span // CHUNK >= 2**31:
            return f"{t.name} has {t.span} elements; offsets of 16 bytes are counted in 31 bits"
    return None


# --- Arguments -------------------------------------------------------------------------------------------------------

MATRICES = (
    "rows", "columns", "stored", "last_stored", "chunks", "tiles_m", "tiles_n", "steps",
    "inner", "x_outer", "x_inner", "w_outer", "w_inner", "row_batch", "column_batch", "x_row", "w_row", "channels",
)  # fmt: skip
IMAGES = (
    "p", "q", "x_n", "x_h", "image_h", "image_w", "stride_h", "stride_w", "pad_h", "pad_w", "dilation_h", "dilation_w",
    "taps_w", "walk_r", "walk_s", "walk_c",
)  # fmt: skip
SCALARS = (*MATRICES, *IMAGES)
"""The kernels' int32 parameters after their addresses, in order. Offsets and strides of x and w are in chunks."""


def scalars(problem: Problem, bm: int, bn: int, bk: int, each: int, chunk: int, channels: Extent) -> dict[str, Extent]:
    """Values of SCALARS for tiles of bm×bn and steps of bk, of which a block takes `each`; a chunk is so many elements, and a tap
    so many chunks, its channels.

    columns  rows of w in a batch; stored, last_stored: columns that are stored of a batch, and of the last one
    walk_r, walk_s, walk_c  how far a step of bk moves in the order (r, s, c), with carries still to be made
    """
    tm, tn = tiles(problem, bm, bn)
    across = bk // chunk
    whole, walk_c = divmod(across, max(channels, 1))
    walk_r, walk_s = divmod(whole, problem.taps[1])
    x_n, x_h, x_w, _ = (s // chunk for s in problem.x_pixel)
    (x_outer, x_inner), (w_outer, w_inner) = ((a // chunk, b // chunk) for a, b in (problem.x_batch, problem.w_batch))
    stored = problem.stored if problem.batches == 1 or not problem.column_batch else problem.columns
    values = {
        "rows": problem.rows, "columns": problem.columns, "stored": stored, "last_stored": problem.stored,
        "chunks": math.prod(problem.taps) * channels, "tiles_m": tm, "tiles_n": tn, "steps": each,
        "inner": problem.batch[1], "x_outer": x_outer, "x_inner": x_inner, "w_outer": w_outer, "w_inner": w_inner,
        "row_batch": problem.row_batch, "column_batch": problem.column_batch,
        "x_row": x_w, "w_row": problem.w_column // chunk, "channels": channels,
        "p": problem.pixels[1], "q": problem.pixels[2], "x_n": x_n, "x_h": x_h,
        "image_h": problem.image[0], "image_w": problem.image[1],
        "stride_h": problem.strides[0], "stride_w": problem.strides[1], "pad_h": problem.pads[0], "pad_w": problem.pads[1],
        "dilation_h": problem.dilations[0], "dilation_w": problem.dilations[1],
        "taps_w": problem.taps[1], "walk_r": walk_r, "walk_s": walk_s, "walk_c": walk_c,
    }  # fmt: skip
    assert tuple(values) == SCALARS
    return values


# --- Cost ------------------------------------------------------------------------------------------------------------


def tiles(problem: Problem, bm: int, bn: int) -> Pair:
    """Tiles along the rows and the columns of one batch."""
    return ceil_div(problem.rows, bm), ceil_div(problem.stored, bn)


def split_steps(steps: Extent, splits: Extent) -> Pair:
    """(splits, steps each) that cover `steps` steps of K with at most `splits` parts, none of them empty."""
    each = max(1, ceil_div(steps, max(1, splits)))
    return max(1, ceil_div(steps, each)), each


@dataclass(frozen=True)
class Rates:
    """What one kernel reaches on a generation.

    flops_us  floating-point operations a microsecond of one multiprocessor
    step_us   what a step of a block's main loop takes beside its arithmetic: copies that come late, barriers
    least_us  what a step takes at least: the time from asking memory for a step's operands to having them, over the steps
              that are asked for ahead
    start_us  from a block's start to its first multiplication, and from its last to its end, together
    store_us  what the epilogue of one block's tile takes a multiprocessor
    """

    flops_us: float
    step_us: float
    least_us: float
    start_us: float
    store_us: float


@dataclass(frozen=True)
class Grid:
    """How a kernel shares a problem out.

    bm, bn     rows and columns of a block's tile
    bk, steps  elements of K that a block multiplies in a step, and steps along K
    splits     parts of K, each for another block
    resident   blocks that a multiprocessor holds at once
    """

    bm: int
    bn: int
    bk: int
    steps: int
    splits: int
    resident: int


def time_us(problem: Problem, arch: Arch, rates: Rates, grid: Grid, moving: float) -> float:
    """The time of a problem, in µs; `moving`: of its tensors' way through memory.

    Waves of blocks, in each of which a multiprocessor's blocks share its arithmetic; or the time to move every tile's operands
    through L2 (at `l2_bandwidths` of the memory's), or all tensors through memory if that is longer; they overlap
    but in part. Fitted to an H100 and an H200.
    """
    bm, bn, bk, resident = grid.bm, grid.bn, grid.bk, grid.resident
    tm, tn = tiles(problem, bm, bn)
    splits, each = map(hint, split_steps(grid.steps, grid.splits))
    results = hint(tm * tn * problem.batches)  # tiles of y
    blocks = results * splits
    work = 2.0 * bm * bn * bk / rates.flops_us
    full, rest = divmod(blocks, arch.sms * resident)

    def wave(together: int) -> float:
        return each * max(rates.step_us + together * work, rates.least_us) + rates.start_us + together * rates.store_us

    compute = full * wave(resident) + (wave(ceil_div(rest, arch.sms)) if rest else 0.0)
    l2 = blocks * (bm + bn) * bk * each * problem.x.dtype.size / (arch.gbps * 1e3 * measured(arch).l2_bandwidths)
    computing = max(compute, l2)
    reduction = 0.0
    if splits > 1:  # every part of a tile is written, and the last block reads them all
        part = bm * bn * 4
        bandwidth = arch.gbps * 1e3 * measured(arch).parts_bandwidths
        reduction = measured(arch).reduce_us + splits * part / measured(arch).part_bytes + results * splits * part / bandwidth
    return measured(arch).launch_us + max(computing, moving) + measured(arch).exposed * min(computing, moving) + reduction
