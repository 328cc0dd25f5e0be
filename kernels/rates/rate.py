"""What cost models may ask of a GPU beside its datasheet: numbers that were measured, each with its unit, source and date."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")


class Rate(float):
    """A measured number: computed with as a float, and known by its unit, by what it was measured with, and when (YYYY-MM-DD)."""

    unit: str
    source: str
    date: str

    def __new__(cls, value: float, unit: str, source: str, date: str) -> Rate:
        self = super().__new__(cls, value)
        self.unit, self.source, self.date = unit, source, date
        return self


@dataclass(frozen=True)
class Table(Generic[T]):
    """Measured numbers by an integer that the field's comment names."""

    values: Mapping[int, T]
    unit: str
    source: str
    date: str

    def __getitem__(self, key: int) -> T:
        return self.values[key]


@dataclass(frozen=True)
class ConvHalo:
    """What `conv_halo.py` asks of a GPU."""

    multiplying: Rate
    """A product of 64 pixels by 16 channels, for each output channel."""
    narrow: Rate
    """Output channels that a product takes at least the time of: it waits for its pixels."""
    narrow_stored: Rate
    """The same where threads store results."""
    copying: Rate
    """A pixel of a box."""
    beyond: Rate
    """More for a pixel of a box that reaches beyond the channels."""
    storing: Rate
    """Threads' time to store 64 pixels of an output channel, and for each tensor that is read by pixel."""
    shuffling: Rate
    """The same where the results lie apart."""
    weights: Rate
    """Weights that come, as far as launches before do not hide it."""
    start_us: Rate
    """A launch."""


@dataclass(frozen=True)
class ConvStem:
    """What `conv_stem.py` asks of a GPU."""

    multiplying: Rate
    """A product of 64 pixels by 16 of K, which is bound by shared memory."""
    more: Rate
    """More of it for each output channel."""
    putting: Rate
    """A pixel of a patch for each channel that is read and each copy that is written."""
    storing: Rate
    """A result."""
    weight_us: Rate
    """A turn of a block's threads through its weights."""
    parts: Rate
    """More where several blocks share a pixel's channels: each reads the image, and lines are stored in parts."""
    start_us: Rate
    """Until a block begins."""
    least_us: Rate
    """A tile, at least."""
    launching_us: Rate
    """A launch."""


@dataclass(frozen=True)
class ConvPatch:
    """What `conv_patch.py` asks of a GPU."""

    start_us: Rate
    """Until a block begins."""
    tile_us: Rate
    """A tile, at least."""
    step_us: Rate
    """A step of K of a tile, one waiting for the other."""
    weight_us: Rate
    """A turn of a block's threads through its weights."""


@dataclass(frozen=True)
class Depthwise:
    """What `depthwise.py` asks of a GPU."""

    busy: Table[float]
    """In which an instruction is issued, if nothing else bounds it, by the blocks of a multiprocessor."""
    from_l2: Rate
    """What is left where the step before has just written x, so that a part of it is in the L2 cache."""
    early_start_us: Rate
    """A launch that starts before those before it have ended."""
    l1_bytes: Rate
    """What a multiprocessor reads of its L1 cache."""
    of_byte: Rate
    """A byte of x, more than a half takes."""
    to_byte: Rate
    """A result in bytes, more than one in halves."""


@dataclass(frozen=True)
class DepthwiseMma:
    """What `depthwise_mma.py` asks of a GPU."""

    mma_sync: Rate
    """What mma.sync reaches of the Tensor Cores' rate with wgmma."""


@dataclass(frozen=True)
class DepthwiseSm90:
    """What `depthwise_sm90.py` asks of a GPU."""

    product: Table[float]
    """A Tensor Core's mma.sp, by its taps, with 8 warps of a multiprocessor."""
    slab_us: Rate
    """A slab, of a block, beyond its steps."""
    partly: Rate
    """Those of a part's first and last rows where they are not multiplied in full."""
    pixel: Rate
    """The copy engine's, for a pixel of a box."""
    moving: Rate
    """Each tensor's bytes once: a part of x is in the L2 cache, where the step before left it."""
    straddling: Rate
    """More for pieces of rows that begin within lines of the L2 cache: parts of pixels, or every second pixel."""
    again: Rate
    """What of x is read again."""
    start_us: Rate
    """A launch, the first rows' way in and the last results' way out."""
    first: Rate
    """What a slab's products take more, of the first one."""
    refill_us: Rate
    """The way in of rows that find no free buffer at first."""


@dataclass(frozen=True)
class Gemv:
    """What `gemv.py` asks of a GPU."""

    latency_us: Rate
    """From a load to its data where memory is busy."""
    start_us: Rate
    """A block beside its turns: to start, to add up over its warps, to store."""


@dataclass(frozen=True)
class GemmMma:
    """What `gemm_mma.py` asks of a GPU."""

    latency_us: Rate
    """From a copy's begin to its end where memory is busy."""
    few_streams: Rate
    """A large product's where splits of K give a multiprocessor two blocks or less: more read memory more slowly."""
    tiles: Table[tuple[float, float]]
    """A multiprocessor's rate, and a step's overhead, by a warp's 16×16 blocks."""
    memory_us: Rate
    """From a copy's start to its end, when the operand comes from memory."""
    float_tiles: Table[tuple[float, float]]
    """As `tiles`, of float32 by three products of bf16."""


@dataclass(frozen=True)
class GemmSm90:
    """What `gemm_sm90_cost.py` asks of a GPU."""

    tiled_cycles: Rate
    """The copy engine's, for a row of a tiled box of 128 bytes."""
    narrow_cycles: Rate
    """The same of 64 or 32 bytes."""
    byte_cycles: Rate
    """The same of 32 bytes, of numbers of 8 bits."""
    box_cycles: Rate
    """A box, at least: asking for it is one thread's work."""
    beyond_cycles: Rate
    """A row of a box that reaches beyond the tensor, on average; up to 12 where less than half lies inside."""
    few_cycles: Rate
    """The same of numbers of 8 bits, where less than half lies inside."""
    together: Table[int]
    """What clusters of so many blocks fill at once: their blocks share one of the GPU's parts, of 14 to 18."""
    rough_us: Rate
    """More for a stage of floats of 8 bits, of which a warpgroup adds up the sums."""
    erf: Rate
    """Slots of instructions that erf of a result takes."""


@dataclass(frozen=True)
class AttentionMma:
    """What `attention_mma.py` asks of a GPU."""

    step_us: Rate
    """A block's step beside its own products: to wait for copies and for its warps."""


@dataclass(frozen=True)
class AttentionSm90:
    """What `attention_sm90.py` asks of a GPU."""

    early_us: Rate
    """What a launch's first blocks have done of their start when the launch before has ended."""
    again: Rate
    """An item's start and end where a block goes on with it: its rows are there by then."""


@dataclass(frozen=True)
class Rates:
    """All that was measured of one GPU: what several cost models ask, and by their kernels, what one does."""

    gpu: str
    launch_us: Rate
    """What any launch costs inside a graph: gap, ramp-up and drain."""
    cycles_us: Rate
    """The clock that a GPU keeps under load."""
    reduce_us: Rate
    """A split's way through the workspace: fences, the counter, the first read."""
    branch_us: Rate
    """A tree's branch: its record comes from L2, and then the feature that it names."""
    loss: Rate
    """What each of the others loses to a step whose blocks are on all multiprocessors, of that step's time."""
    conv_halo: ConvHalo
    conv_stem: ConvStem
    conv_patch: ConvPatch
    depthwise: Depthwise
    depthwise_mma: DepthwiseMma
    depthwise_sm90: DepthwiseSm90
    gemv: Gemv
    gemm_mma: GemmMma
    gemm_sm90: GemmSm90
    attention_mma: AttentionMma
    attention_sm90: AttentionSm90
