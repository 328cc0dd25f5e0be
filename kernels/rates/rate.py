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
    storing_bytes: Rate
    """What boxes of as many bytes take beyond what others multiply meanwhile."""
    shuffling: Rate
    """The same where the results lie apart."""
    of_groups: Table
    """Of the time of two warpgroups, what more take, by their number."""
    weights: Rate
    """Weights that come, as far as launches before do not hide it."""
    short_row: Rate
    """More for a row of weights of 16 bytes."""
    alone_us: Rate
    """More for 1000 results of a tile that is the only one of its block."""
    rough: Rate
    """Of floats of 8 bits, what a round of products takes beside them, until its sums are added to the others."""
    start_us: Rate
    """A launch."""
    exposed: Rate
    """What is not hidden of the shorter of computing and moving."""


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
    exposed: Rate
    """What is not hidden of the shorter of computing and moving."""


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
    most: Rate
    """What mma.sync reaches of a multiprocessor, at most."""
    mma_sync: Rate
    """The same of the Tensor Cores' rate."""
    sharing: Rate
    """Reads of shared memory."""
    copying: Rate
    """To copy 16 bytes of a patch."""
    storing: Rate
    """To store a vector of results."""
    exposed: Rate
    """What is not hidden of the shorter of multiplying and sharing."""
    few_warps: Rate
    """How a tile's time grows where warps are too few to hide latencies."""
    apart: Rate
    """What large blocks do not overlap, which load, multiply and store one after the other."""
    exposed_moving: Rate
    """What is not hidden of the shorter of computing and moving."""
    of_8_bits_us: Rate
    """Less, where operands are of 8 bits and the filter has several taps."""


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
    wait_us: Rate
    """A wait for memory."""
    instruction_us: Rate
    """An instruction of a thread, one after the other."""
    exposed: Rate
    """What is not hidden of what takes less than the longest."""


@dataclass(frozen=True)
class DepthwiseBytes:
    """What `depthwise_bytes.py` asks of a GPU."""

    start_us: Rate
    """A launch, and what its blocks wait for."""
    issue: Rate
    """Where instructions are issued at every cycle."""
    line: Rate
    """A line of the L1 cache, of those that a warp reads or writes at once."""
    moving: Rate
    """Each tensor's bytes once."""


@dataclass(frozen=True)
class DepthwiseBytesSm90:
    """What `depthwise_bytes_sm90.py` asks of a GPU."""

    start_us: Rate
    """A launch, the first boxes' way in and the last ones' way out."""
    moving: Rate
    """Each tensor's bytes once."""
    apart: Rate
    """More for boxes of parts of pixels, in whole sectors of the L2 cache."""
    straddling: Rate
    """More for boxes of other parts of pixels."""
    busy: Rate
    """A row of results, where a multiprocessor is busy."""
    alone: Rate
    """The same of a warp, of those that it makes one after the other."""
    tile_us: Rate
    """A tile of a block, beside its rows."""
    half: Rate
    """A result in halves by a function such as SiLU, of a lane."""


@dataclass(frozen=True)
class ExpandSm90:
    """What `expand_sm90.py` asks of a GPU."""

    start_us: Rate
    """A launch, the first boxes' way in and the last ones' way out."""
    moving: Rate
    """The bytes of what is read and written once."""
    busy: Rate
    """128 results, where a multiprocessor is busy."""
    alone: Rate
    """The same of a warp, of those that it makes one after the other."""
    half: Rate
    """128 results in halves, more than in bytes."""
    tile_us: Rate
    """A tile of a block, beside its results."""
    slot: Rate
    """128 results, for an instruction of their functions."""


@dataclass(frozen=True)
class DepthwiseMma:
    """What `depthwise_mma.py` asks of a GPU."""

    mma_sync: Rate
    """What mma.sync reaches of the Tensor Cores' rate with wgmma."""
    older: Rate
    """The same before wgmma."""
    issuing: Rate
    """A product's, where instructions are issued."""
    issue: Rate
    """What is issued of what could be."""
    busy: Rate
    """Steps of which several overlap."""
    step_us: Rate
    """A step's, beside them."""
    start_us: Rate
    """A block's start and end."""
    latency_us: Rate
    """A step that waits for its row."""
    moving: Rate
    """All that moves: one row ahead does not keep memory busy."""
    exposed: Rate
    """What is not hidden of what takes less than the longest."""


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
    under_way: Rate
    """What is under way at any time of a warp's turn."""
    tensor_cores: Rate
    """What a kernel with Tensor Cores reaches."""
    widened: Rate
    """The same of floats of 8 bits that become halves first."""
    unfilled: Rate
    """What these lose where there are fewer blocks than find room, as far as there are fewer."""
    result_us: Rate
    """A result of a block's whose rows are those of the streamed operand, and which stores them row by row."""
    across: Rate
    """More for rows that are read at once and lie apart, each time they are twice as many."""
    again: Rate
    """What is read again, from the L2 cache."""
    part: Rate
    """A tile's parts, which the last block reads."""
    parts: Rate
    """All parts."""
    room_us: Rate
    """What few blocks begin earlier, which find room beside the launch before."""
    exposed: Rate
    """What is not hidden of the shorter ones."""
    ramp_us: Rate
    """Until memory is busy."""
    turn_us: Rate
    """More for each of the first turns."""


@dataclass(frozen=True)
class GemvPacked:
    """What `gemv_packed.py` asks of a GPU."""

    start_us: Rate
    """A block beside its turns, and a launch beside its gap."""
    crowded_us: Rate
    """A turn of a loop at least, of two blocks of a multiprocessor: what is under way comes in it."""
    alone_us: Rate
    """The same of one block."""
    two_stages: Rate
    """How much longer that is with two stages than with three."""
    next_us: Rate
    """From a block's end to the first turn of the one that takes its place."""


@dataclass(frozen=True)
class GemmThin:
    """What `gemm_thin.py` asks of a GPU."""

    start_us: Rate
    """From the launch before."""
    ready_us: Rate
    """Until a warp has its weights, beside what follows."""
    weight_us: Rate
    """More for each register of weights."""
    across_us: Rate
    """More for what is stored in each turn beside the first 4 · lanes columns."""
    exposed: Rate
    """What is not hidden of that and of what rows and results take, of the shorter one."""
    moving: Rate
    """What rows and results take, of which a part is in the L2 cache."""
    issue: Rate
    """Instructions of a multiprocessor in a cycle."""
    functions: Rate
    """What functions of results take of their instructions' time, which others hide in part."""
    turn_us: Rate
    """More for each turn of a warp's loop."""
    first_us: Rate
    """More for 16 rows of a warp's first turn, which nothing hides, over its turns."""


@dataclass(frozen=True)
class GemmMma:
    """What `gemm_mma.py` asks of a GPU."""

    latency_us: Rate
    """From a copy's begin to its end where memory is busy."""
    sparse: Rate
    """By how much 2:4 weights are multiplied faster."""
    few_streams: Rate
    """A large product's where splits of K give a multiprocessor two blocks or less: more read memory more slowly."""
    tiles: Table[tuple[float, float]]
    """A multiprocessor's rate, and a step's overhead, by a warp's 16×16 blocks."""
    memory_us: Rate
    """From a copy's start to its end, when the operand comes from memory."""
    float_tiles: Table[tuple[float, float]]
    """As `tiles`, of float32 by three products of bf16."""
    most: Rate
    """What is reached of the Tensor Cores' rate, at most."""
    gather_us: Rate
    """A step's, more where rows are gathered."""
    waiting_us: Rate
    """A step's, more without asynchronous copies."""
    start_us: Rate
    """A block's start and end."""
    store_us: Rate
    """To store 128 by 128 results."""
    load_us: Rate
    """More for each tensor that differs by row."""


@dataclass(frozen=True)
class GemmSm90:
    """What `gemm_sm90_cost.py` asks of a GPU."""

    start_us: Rate
    """From the launch before to the first stage."""
    start_swapped_us: Rate
    """The same with swapped operands."""
    late_us: Rate
    """More, where blocks find no room while that launch's still run, for what they could have copied before."""
    crowded_us: Rate
    """More, where they find none for longer."""
    crowded_overlapping: Rate
    """How much of both tiles take whose rough sums are added while others are made."""
    biased_us: Rate
    """More, where they begin by loading a bias."""
    gathering: Rate
    """A row of an im2col box of bytes, of what `row_cycles` says."""
    gathering_halves: Rate
    """One of halves, where many blocks read it at the same time."""
    gathering_apart: Rate
    """More of it where a single block does: it comes from the L2 cache once for all that do."""
    gathering_parts: Rate
    """Of that, where a tap's channels fill more than a stage, in boxes of halves of stages."""
    strided: Rate
    """One of 64 bytes of every second pixel, of that."""
    strided_us: Rate
    """More for each wave of blocks that read such rows, which come from memory in a network."""
    copy_cycles_us: Rate
    """What the copy engine's cycles are counted by."""
    share_cycles_us: Rate
    """The same of shared memory's."""
    share_gathered_cycles_us: Rate
    """The same where im2col boxes of halves are read, and no cluster shares what is multiplied."""
    gathered_cycles: Rate
    """A row of weights beside such boxes."""
    power: Rate
    """More of a product's, for what it reads beyond what it multiplies meanwhile: a lower clock."""
    alone: Rate
    """A warpgroup's alone on a multiprocessor, which waits for what it has begun."""
    two: Rate
    """Of a stage's where multiprocessors have a block each, what it takes at least where some have two."""
    latency_us: Rate
    """Of a copy that waits for none."""
    queue: Rate
    """More, in the time of copies that are under way."""
    ahead: Rate
    """What comes while the launch before ends, where blocks find room."""
    room: Rate
    """Less of what comes for each block of one."""
    full: Rate
    """What of them does not count there."""
    sums: Rate
    """Results of a warpgroup alone take the time of so many."""
    sums_swapped: Rate
    """The same with swapped operands."""
    row_us: Rate
    """To store 128 by 128 results by row."""
    row_load_us: Rate
    """More for each tensor that is loaded for it."""
    box_us: Rate
    """To store as many in boxes."""
    box_biased_us: Rate
    """More where they have a bias."""
    box_load_us: Rate
    """More for each tensor that is loaded for it."""
    box_swapped_us: Rate
    """As `box_us`, with swapped operands."""
    box_swapped_load_us: Rate
    """As `box_load_us`, with swapped operands."""
    byte_us: Rate
    """To store as many bytes in boxes."""
    byte_of_halves_us: Rate
    """The same of products of halves, with swapped operands or without."""
    byte_load_us: Rate
    """More for each tensor that is loaded for it."""
    byte_swapped_us: Rate
    """As `byte_us`, with swapped operands."""
    byte_swapped_load_us: Rate
    """As `byte_load_us`, with swapped operands."""
    at_once: Rate
    """More for storing large tiles of products of bytes where all tiles are made at the same time, and so stored at its end."""
    split_us: Rate
    """To store a share of what a cluster has summed up."""
    split_sums_us: Rate
    """More for 128 by 128 results of a warpgroup."""
    split_load_us: Rate
    """More for each tensor that is loaded for it."""
    split_tile_us: Rate
    """More for 128 by 128 of a tile."""
    split_inside_us: Rate
    """More for the same of those that there are."""
    split_of_eight_us: Rate
    """More for 128 by 128 of those that there are, which eight blocks have summed up."""
    split_swapped_us: Rate
    """As `split_us`, with swapped operands."""
    split_swapped_sums_us: Rate
    """As `split_sums_us`, with swapped operands."""
    tiled_cycles: Rate
    """The copy engine's, for a row of a tiled box of 128 bytes."""
    narrow_cycles: Rate
    """The same of 64 or 32 bytes."""
    byte_cycles: Rate
    """The same of 32 bytes, of numbers of 8 bits."""
    byte_lined_cycles: Rate
    """The same where rows of weights begin with lines of memory."""
    box_cycles: Rate
    """A box, at least: asking for it is one thread's work."""
    beyond_cycles: Rate
    """A row of a box that reaches beyond the tensor, on average; up to 12 where less than half lies inside."""
    few_cycles: Rate
    """The same of numbers of 8 bits, where less than half lies inside."""
    together: Table[int]
    """What clusters of so many blocks fill at once: their blocks share one of the GPU's parts, of 14 to 18."""
    exposed: Rate
    """What is not hidden of the shorter of computing and moving: a beginning and an end."""
    exposed_more: Rate
    """The same of what is beyond `exposed_us` of it."""
    exposed_us: Rate
    """How long `exposed` holds."""
    rough: Rate
    """More of a product's whose sums are rough: an instruction of CUDA cores for each."""
    rough_alone: Rate
    """The same of a warpgroup alone."""
    rough_us: Rate
    """More for a stage of floats of 8 bits, of which a warpgroup adds up the sums."""
    overlapping: Rate
    """What is left of that where sums are added up while the next are made."""
    filled_us: Rate
    """More where sums are rough and one wave of blocks leaves less than `spare` multiprocessors to the next launch."""
    spare: Rate
    """So many: see there."""
    beside: Rate
    """All that tiles of 8 bits take of a stage or two, where blocks share a multiprocessor: one stores while others multiply."""
    in_turn: Rate
    """All that two tiles take which a multiprocessor has in turn, where it copies both at once."""
    shared_rows: Rate
    """All of a stage where two blocks copy half of its rows for each other."""
    narrow_gathering: Rate
    """All that im2col copies take, of rows of up to 32 bytes of numbers of 8 bits."""
    teams: Rate
    """More for products by teams that take turns: as copies come faster than the L2 cache has them."""
    erf: Rate
    """Slots of instructions that erf of a result takes."""
    tanh: Rate
    """The same of tanh."""
    sigmoid: Rate
    """The same of a sigmoid, or of SiLU."""
    coarse_gelu: Rate
    """The same of gelu where 8 bits of it are stored."""
    coarse_tanh: Rate
    """The same of tanh, and of what is made of it by a product."""


@dataclass(frozen=True)
class Attention:
    """What `attention.py` asks of a GPU."""

    step_us: Rate
    """A block's way through 32 elements of a head of a tile of k and v: barriers, and loads that come late."""
    rate: Rate
    """What multiply-adds reach of the GPU's."""


@dataclass(frozen=True)
class AttentionMma:
    """What `attention_mma.py` asks of a GPU."""

    rate: Rate
    """What mma.sync reaches of the Tensor Cores' rate with wgmma."""
    masked_us: Rate
    """A step's, for each column of a mask that rows have of their own."""
    masked_alike_us: Rate
    """The same of a mask that all rows share."""
    item_us: Rate
    """A block's begin and end."""
    join_us: Rate
    """To join eight parts, for each round of a block's threads."""
    step_us: Rate
    """A block's step beside its own products: to wait for copies and for its warps."""


@dataclass(frozen=True)
class AttentionSm90:
    """What `attention_sm90.py` asks of a GPU."""

    start_us: Rate
    """An item's start and end."""
    results_us: Rate
    """What of its rows and results comes and goes then."""
    exchange_us: Rate
    """More where warpgroups take turns."""
    clock: Rate
    """What the cycles below are counted by."""
    masked: Rate
    """A column's, of a mask that rows have of their own, for each word of it."""
    masked_alike: Rate
    """The same of a mask that all rows share."""
    softmax: Rate
    """A column's exponentials."""
    scaling: Rate
    """To scale a column of results."""
    exposed: Rate
    """What two warpgroups do not hide of the shorter of products and exponentials."""
    single: Rate
    """A step's, of a warpgroup alone."""
    several: Rate
    """The same of several."""
    byte_step: Rate
    """A step's in E4M3, of more than two warpgroups."""
    byte_softmax: Rate
    """A column's."""
    byte_products: Rate
    """A product's."""
    byte_step_few: Rate
    """A step's in E4M3, of two warpgroups."""
    byte_softmax_few: Rate
    """A column's."""
    byte_products_few: Rate
    """A product's."""
    byte_alone: Rate
    """All of it, of a warpgroup alone."""
    early_us: Rate
    """What a launch's first blocks have done of their start when the launch before has ended."""
    few_us: Rate
    """Of few rows, what a launch takes longer in a network than alone, beside attention_mma's."""
    again: Rate
    """An item's start and end where a block goes on with it: its rows are there by then."""


@dataclass(frozen=True)
class NormSplit:
    """What `norm_split.py` asks of a GPU."""

    start_us: Rate
    """Both launches beside what they move."""
    moving: Rate
    """All of what they move."""
    item_us: Rate
    """A block's start and end."""
    step_us: Rate
    """A thread's pixel."""
    read_bytes: Rate
    """What is read first."""


@dataclass(frozen=True)
class NormTeam:
    """What `norm_team.py` asks of a GPU."""

    cluster_us: Rate
    """A cluster's image, of few threads."""
    cluster_more_us: Rate
    """More, by the root of how many threads more there are."""
    pixel_us: Rate
    """A thread's pixel of it."""
    costly_us: Rate
    """More of it for each function that takes long."""
    cluster_moving: Rate
    """All that clusters move."""
    rereading: Rate
    """What is read again by 512 threads."""
    moving: Rate
    """All that teams move."""
    pieces: Rate
    """More of it where pixels are read in pieces, from more places."""
    pieces_memory: Rate
    """The same from memory."""
    in_turn: Rate
    """All of it where the same blocks do it one after the other."""
    team_us: Rate
    """A team's image, of 256 threads."""
    team_more_us: Rate
    """More for each 256 threads more."""
    team_pixel_us: Rate
    """A thread's pixel of it."""
    team_costly_us: Rate
    """More of it for each function that takes long."""


@dataclass(frozen=True)
class Rnn:
    """What `rnn.py` asks of a GPU."""

    start_us: Rate
    """A launch beside its steps."""
    step_us: Rate
    """A step: the state goes from block to block."""
    turn_us: Rate
    """More for each turn of a multiprocessor."""
    wait_us: Rate
    """A wait for weights."""
    streaming: Rate
    """Weights that come from the L2 cache."""
    shared_cycles_us: Rate
    """What shared memory's cycles, and those of products, are counted by."""


@dataclass(frozen=True)
class Mlp:
    """What `mlp.py` asks of a GPU."""

    start_us: Rate
    """A block's start and end."""
    l2_bytes: Rate
    """Weights that come to a multiprocessor from the L2 cache."""


@dataclass(frozen=True)
class SqueezeExcite:
    """What `squeeze_excite.py` asks of a GPU."""

    early_us: Rate
    """Of a launch, what does not count: blocks start while the launch before ends."""
    turn_us: Rate
    """What comes one after the other in a block beside what follows."""
    thread_us: Rate
    """A thread of a block: clusters of large ones find room later."""
    weight_us: Rate
    """A weight that a thread multiplies."""
    pixel_us: Rate
    """A channel of a pixel that a thread keeps."""
    byte_us: Rate
    """More for one that comes as a byte: it is converted for the mean, and again for the result."""
    moving: Rate
    """Of the time that the bytes take: what is read and written comes and goes by way of the L2 cache."""
    reach: Rate
    """How many multiprocessors' share of the bandwidth a block gets, where there are few."""


@dataclass(frozen=True)
class TwoPass:
    """What `two_pass.py`, softmax and norms, ask of a GPU."""

    setup: Rate
    """A thread's, beside its elements."""
    element: Rate
    """An element in a pass."""
    words: Rate
    """More where rows are kept as words of halves: to convert them."""
    partly: Rate
    """More for a vector that may lack lanes."""
    issue: Rate
    """What is issued of what multiply-adds reach."""
    once_us: Rate
    """A block's start and end."""
    read_us: Rate
    """A read that waits for the one before."""
    together: Rate
    """What reads take that are not kept, of three passes."""
    row_us: Rate
    """Each row more of a thread."""
    exchange_us: Rate
    """Sums that threads exchange."""
    waves: Rate
    """A wave of blocks beside others."""
    apart: Rate
    """What is not hidden of the shorter ones of memory's, instructions' and latency's time."""


@dataclass(frozen=True)
class Reduce:
    """What `reduce.py` asks of a GPU."""

    lanes_us: Rate
    """A step, where a thread has several results side by side."""
    gather_us: Rate
    """To combine what more than 8 threads have of each vector of a block, for each block beyond a multiprocessor's first."""
    lanes_early_us: Rate
    """Less in all, as the first steps are under way at once."""
    start_us: Rate
    """Others' begin and end."""
    vector_us: Rate
    """A step of vectors, of which a thread has one result."""
    step_us: Rate
    """A step of single elements."""
    split_lanes_us: Rate
    """To add up splits, where a thread has several results."""
    split_us: Rate
    """The same of others."""


@dataclass(frozen=True)
class Pointwise:
    """What `pointwise.py` asks of a GPU."""

    transposing: Rate
    """All that moves, where it is turned round in shared memory."""
    narrow: Rate
    """The same of threads that store fewer elements at once than they could: it is for expressions that spill otherwise."""
    scattered: Rate
    """The same of elements that are read one by one, over several groups of lanes."""


@dataclass(frozen=True)
class Pool:
    """What `pool.py` and `resize.py` ask of a GPU."""

    tap: Rate
    """A tap of a lane."""
    tap_of_bytes: Rate
    """The same where the bytes of a word are compared."""
    tap_of_many: Rate
    """The same of 16 channels at once."""
    wait_us: Rate
    """A row of the window, which is waited for in turn."""
    at_once: Rate
    """What comes at once of a row whose loop is not unrolled."""


@dataclass(frozen=True)
class ConvDirect:
    """What `conv_direct.py` asks of a GPU."""

    vector: Rate
    """To address, load and convert a vector."""
    vector_float8: Rate
    """The same of floats of 8 bits."""
    setup: Rate
    """A thread's, beside its taps."""
    slots: Rate
    """What an instruction takes of a multiprocessor, those of a multiply-add counted as one."""
    tap_us: Rate
    """A tap, where one wave of blocks does all."""
    more_us: Rate
    """More of it for each product."""


@dataclass(frozen=True)
class GemmSimt:
    """What `gemm_simt.py` asks of a GPU."""

    shares: Table[float]
    """What multiply-adds reach, by the results of a thread."""
    single: Rate
    """Where elements are loaded one by one."""
    step_us: Rate
    """A step's overhead."""
    start_us: Rate
    """A block's start and end."""
    store_us: Rate
    """To store 128 by 128 results of products of bytes."""
    load_us: Rate
    """More for each tensor that differs by row."""


@dataclass(frozen=True)
class Order:
    """What kernels of running sums, sorting and scattering ask of a GPU."""

    cumulate_us: Rate
    """`cumulate.py`: an element of a line."""
    compare: Rate
    """`top_k.py`: a comparison."""
    load_cycles: Rate
    """A comparison at least: it loads from a cache."""
    compare_cycles_us: Rate
    """What these are counted by."""
    scan_us: Rate
    """`scan.py`: a tile, which waits for memory, and some ten times for its threads."""
    scan_chunks_us: Rate
    """The same in two launches."""
    stage_us: Rate
    """`sort.py`: a stage at least, which ends with a barrier."""
    exchange: Rate
    """An element of a stage."""
    search_us: Rate
    """A step of a search, which waits for a cache."""
    scatter_us: Rate
    """`scatter.py`: an update that follows another one."""


@dataclass(frozen=True)
class PairSm90:
    """What `pair_sm90.py` asks of a GPU."""

    start_us: Rate
    """From the launch before to the first results."""
    weights: Rate
    """Weights that come to each multiprocessor."""
    alone_us: Rate
    """A warpgroup's time for 64 by 64 results, where few others share its multiprocessor."""
    results_us: Rate
    """A multiprocessor's for as many."""
    bytes_us: Rate
    """The same, where they are bytes."""
    made: Rate
    """More of it where what is added to results is made, too."""


@dataclass(frozen=True)
class PrologueSm90:
    """What `prologue_sm90.py` asks of a GPU."""

    start_us: Rate
    """From the launch before to the first results."""
    apart_us: Rate
    """What estimates of the two ops one after the other say beyond their time, which is said of both together, too."""
    weights: Rate
    """Weights that come to each multiprocessor."""
    alone_us: Rate
    """A warpgroup's time for 64 rows of 128 channels in bytes, where few others share its multiprocessor."""
    chunk_us: Rate
    """A multiprocessor's for as many."""
    halves: Rate
    """Of both, where they are halves."""
    stored_alone_us: Rate
    """A warpgroup's time to store 64 rows of 128 results, where few others share its multiprocessor."""
    stored_us: Rate
    """A multiprocessor's for as many."""
    shared_us: Rate
    """To add up the sums of warpgroups that have multiplied the same rows."""


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
    l2_bandwidths: Rate
    """What the L2 cache gives of the tiles of products."""
    part_bytes: Rate
    """A tile's parts, which one block reads."""
    parts_bandwidths: Rate
    """All parts."""
    exposed: Rate
    """What products do not hide of the shorter of computing and moving."""
    branch_us: Rate
    """A tree's branch: its record comes from L2, and then the feature that it names."""
    join_us: Rate
    """To add up two values of a tree's leaves that neighbouring threads have."""
    loss: Rate
    """What each of the others loses to a step whose blocks are on all multiprocessors, of that step's time."""
    conv_halo: ConvHalo
    conv_stem: ConvStem
    conv_patch: ConvPatch
    depthwise: Depthwise
    depthwise_bytes: DepthwiseBytes
    depthwise_bytes_sm90: DepthwiseBytesSm90
    depthwise_mma: DepthwiseMma
    depthwise_sm90: DepthwiseSm90
    gemm_thin: GemmThin
    gemv: Gemv
    gemv_packed: GemvPacked
    gemm_mma: GemmMma
    gemm_sm90: GemmSm90
    expand_sm90: ExpandSm90
    pair_sm90: PairSm90
    prologue_sm90: PrologueSm90
    attention: Attention
    attention_mma: AttentionMma
    attention_sm90: AttentionSm90
    norm_split: NormSplit
    norm_team: NormTeam
    rnn: Rnn
    mlp: Mlp
    squeeze_excite: SqueezeExcite
    two_pass: TwoPass
    reduce: Reduce
    pointwise: Pointwise
    pool: Pool
    conv_direct: ConvDirect
    gemm_simt: GemmSimt
    order: Order
