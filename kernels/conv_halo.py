"""Convolution on Hopper from patches of the image: each pixel is copied once for all taps of the filter that read it.

By im2col (gemm_sm90) a pixel comes from the L2 cache once for every tap, and where a convolution has few output channels that is
what bounds it. Here a block's tile is a rectangle of output pixels, and what it needs of the image, 64 channels of the rectangle
and the halo around it, is one box in shared memory. wgmma takes 64 pixels as 8 rows of 8: a row of 8 pixels is a group of its
left operand, and the next row of the image is the next group. So a tap is the same matrix from another address, by some rows and
pixels further on: swizzles follow addresses, and lie the same way wherever a matrix begins. The weights of a block's output
channels stay in shared memory for all of its tiles, and are copied while the launches before this one still run.

A block has two warpgroups, each with a tile of its own: while one stores its results, the other one multiplies. One thread of a
further warp has boxes copied, a tile's 64 channels after the other, into the rings of buffers that the warpgroups have; two
barriers of each buffer say when it is full, and when it has been read.

Results leave in boxes where the copy engine can store them. Others, such as a model's output, in float32 and each channel by
itself, are stored by threads, from their registers: few output channels are little to store.

Few output channels are also little to multiply with: what takes time is to read pixels from shared memory, once for each tap. All
taps of few channels fit in the columns of one product, of all pixels of the box as they lie. What a tap gives for a pixel belongs
to a result some rows and pixels away, and goes there through shared memory, where threads add up their pixels' taps ("spread").
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from math import prod

from tccompile.arch import KIB, Arch
from tccompile.ir.extent import ceil_div, round_up
from tccompile.ir.ops import Conv, Op
from tccompile.ir.program import Program
from tccompile.ir.tensor import Tensor
from tccompile.ir.types import DType
from tccompile.kernels import boxes, epilogue, image_walk
from tccompile.kernels.implicit_gemm import Problem, describe, unfit
from tccompile.kernels.loops import device, entry, refusal
from tccompile.kernels.parts.layout import BARRIER, Region, SharedLayout, barriers, ring_barriers
from tccompile.kernels.parts.operands import ROW
from tccompile.kernels.parts.staging import BOXES, RESULT
from tccompile.kernels.ptx.atoms import of_warpgroups
from tccompile.kernels.rates import measured
from tccompile.kernels.spec import I32, Config, Function, Kernel, Launch, TiledMap, Value, Work, code, traffic_us

SIZE = 2
"""Bytes of an element of the image and the weights."""

SIDE = 8
"""Pixels along both sides of what one wgmma takes."""

DEPTH = ROW // SIZE
"""Channels of a box: a pixel is 128 bytes, the widest swizzle."""

TILES = ((8, 8), (16, 8), (8, 16), (16, 16))
"""Columns and rows of the image in a tile."""

COLUMNS = (8, 16, 32, 64)
"""Output channels of a block; boxes of results have 16 and more."""

MOST_BOXED, MOST_STORED, MOST_SPREAD = 64, 32, 96
"""Accumulators of a thread: whose results leave in boxes; which stores them itself (that is text for each, long to compile); and
where they are taps' parts of results."""

MOST_STEPS = 80
"""Products of a box and 64 pixels, of tiles with more pixels that threads store: the compiler keeps what each begins with in
registers, and at 84 spilled others."""

LEAST, MOST = 16, 192
"""Input channels. With 256, im2col took 0.55 to 0.98 of the time in five of six convolutions (H200); why has not been found."""

MOST_STAGES = 4

GROUPS = 2
"""Warpgroups that multiply."""

GROUP = 128
"""Threads of a warpgroup."""

WARPS = 4 * GROUPS
THREADS = 32 * (WARPS + 1)


@dataclass(frozen=True)
class Patch:
    """A tile, and the layout of shared memory: weights, the ring, boxes of results, barriers.

    across, down    pixels of a tile
    columns         output channels of a block
    height, width   of the filter
    channels        of the input
    boxed           whether results leave in boxes
    added           whether something that differs by pixel is added to them there
    spread          whether taps are columns of a product, which takes the box's pixels as they lie
    """

    across: int
    down: int
    columns: int
    height: int
    width: int
    channels: int
    boxed: bool
    added: bool
    spread: bool

    @property
    def pixels(self) -> int:
        """Of a tile."""
        return self.across * self.down

    @property
    def blocks(self) -> int:
        """Products of 64 pixels."""
        return ceil_div(self.pitch * self.rows if self.spread else self.pixels, SIDE**2)

    @property
    def wide(self) -> int:
        """Columns of a product."""
        return round_up(self.taps * self.columns, 8) if self.spread else self.columns

    @property
    def most(self) -> int:
        """Accumulators that a thread may have."""
        return MOST_SPREAD if self.spread else MOST_BOXED if self.boxed else MOST_STORED

    @property
    def chunks(self) -> int:
        """Boxes of channels."""
        return ceil_div(self.channels, DEPTH)

    @property
    def taps(self) -> int:
        return self.height * self.width

    @property
    def last(self) -> int:
        """Products of 16 channels in the last box of channels."""
        return ceil_div(self.channels - (self.chunks - 1) * DEPTH, 16)

    @property
    def pitch(self) -> int:
        """Pixels of a box's row."""
        return self.across + self.width - 1

    @property
    def rows(self) -> int:
        """Of a box."""
        return self.down + self.height - 1

    @property
    def box(self) -> int:
        """Bytes."""
        return self.pitch * self.rows * ROW

    @property
    def slot(self) -> int:
        """Bytes of a buffer, all that products read: swizzles repeat after 1 KiB."""
        return self.blocks * SIDE**2 * ROW if self.spread else round_up(self.box, KIB)

    @property
    def tap(self) -> int:
        """Bytes of a tap's weights, of 64 channels."""
        return self.columns * ROW

    @property
    def filters(self) -> int:
        """Bytes of all taps' weights, of 64 channels."""
        return self.wide * ROW if self.spread else self.taps * self.tap

    @property
    def weights(self) -> int:
        """Bytes of all."""
        return self.chunks * self.filters

    @property
    def box_out(self) -> int:
        """Bytes of a box of results: 16 pixels."""
        return 16 * RESULT * self.columns

    @property
    def boxes_out(self) -> int:
        """Boxes of a warp: all of a tile's where something is added, which comes into their places meanwhile."""
        return self.blocks if self.added else BOXES

    @property
    def parts(self) -> int:
        """Bytes of a column of a warpgroup's parts: four numbers more than pixels, so that a warp's writes meet no bank twice."""
        return 4 * (self.blocks * SIDE**2 + 4)

    @property
    def staged(self) -> int:
        """Bytes that a warp has for results: of boxes, or a quarter of its warpgroup's parts."""
        if self.spread:
            return self.wide * self.parts // 4
        return self.boxes_out * self.box_out if self.boxed else 0

    def layout(self, stages: int) -> SharedLayout:
        """Shared memory: weights, the warpgroups' rings of so many buffers each, results, and barriers one after the other."""
        return SharedLayout(
            Region("weights", self.weights),
            Region("ring", GROUPS * stages * self.slot, KIB),
            Region("results", WARPS * self.staged),
            barriers("weights there", self.chunks),
            *ring_barriers("ring", GROUPS * stages),
            barriers("landed", WARPS if self.added else 0),
        )

    def smem(self, stages: int) -> int:
        """Bytes to ask for in a launch."""
        return self.layout(stages).smem

    def stages(self, arch: Arch) -> int:
        """Buffers of a warpgroup's ring, at most `MOST_STAGES`; 0 if there is no room for two."""
        return next((n for n in range(min(MOST_STAGES, self.chunks + 1), 1, -1) if self.smem(n) <= arch.smem_block), 0)


class ConvHalo(Kernel):
    """Conv with stride 1 and a filter of several taps, of an fp16 image in NHWC, by TMA and wgmma."""

    name = "conv_halo"
    realises: type[Op] = Conv
    tensor_cores = True

    def supports(self, op: Op, program: Program, arch: Arch) -> str | None:
        assert isinstance(op, Conv)
        if not of_warpgroups(arch):
            return f"{arch.name} has no wgmma instructions"
        x, w, y = (program.tensors[name] for name in (op.x, op.w, op.y))
        if x.rank != 4 or op.groups > 1 or max(op.strides) > 1 or max(op.dilations) > 1 or prod(w.shape[2:]) == 1:
            return "it takes images and filters of several taps, without strides, dilations and groups"
        problem = describe(op, program)
        if isinstance(problem, str):
            return problem
        if reason := unfit(problem):
            return reason
        for t in (x, w):
            if _may_move(t, program):
                return f"{t.name} is a model input or output, whose address may change; tensor maps hold addresses"
        if 0 in (*x.shape, *y.shape):
            return "an extent is 0"
        if not LEAST <= problem.channels <= MOST:
            return f"{problem.channels} input channels; it takes {LEAST} to {MOST}"
        if (reason := refusal(op, program, epilogue.frame_of(op, program))) is not None:
            return reason
        if next(self.configs(op, program, arch), None) is None:
            least = columns_of(is_boxed(op, program))[0]
            return f"the weights of {least} output channels and two boxes do not fit {arch.smem_block} bytes of shared memory"
        return None

    def configs(self, op: Op, program: Program, arch: Arch) -> Iterator[Config]:
        assert isinstance(op, Conv)
        boxed = is_boxed(op, program)
        least, *wider = columns_of(boxed)
        stored = epilogue.lane_groups(op, program, epilogue.frame_of(op, program), 1)
        tiled = [
            {"across": across, "down": down, "columns": columns}
            for columns in (least, *(n for n in wider if n < 2 * stored))
            for across, down in TILES
        ]
        spread = [
            {"across": across, "down": down, "columns": stored, "spread": True}
            for across, down in TILES
            if not boxed and across * down >= GROUP
        ]
        for config in [*tiled, *spread]:
            patch = patch_of(op, program, config)
            short = boxed or patch.blocks == 1 or len(steps(patch, DEPTH // 16 if patch.chunks > 1 else patch.last)) <= MOST_STEPS
            fits = patch.blocks * patch.wide // 2 <= patch.most and patch.stages(arch)
            if short and fits and ceil_div(stored, patch.columns) <= arch.sms and max(patch.pitch, patch.rows) <= 256:
                yield config

    def cost(self, op: Op, program: Program, config: Config, arch: Arch) -> float:
        assert isinstance(op, Conv)
        own = measured(arch).conv_halo
        patch = patch_of(op, program, config)
        shares, n, down, across = tiles_of(op, program, patch)
        tiles = n * down * across
        each = ceil_div(tiles, min(tiles, arch.sms // shares))
        depth = ((patch.chunks - 1) * 4 + patch.last) * (1 if patch.spread else patch.taps)
        cycles, narrow = measured(arch).cycles_us, own.narrow if patch.boxed else own.narrow_stored
        multiplying = patch.blocks * depth * max(patch.wide, narrow) * own.multiplying / cycles
        copying = patch.pitch * patch.rows * (own.copying * patch.chunks + (own.beyond if patch.channels % DEPTH else 0)) / cycles
        accesses = 0 if patch.boxed else 1 + len(epilogue.loads_by_row(op, program))
        # Parts to shared memory, and back: a warp's pixels, of two rows and more, meet in some banks.
        adding = (patch.wide * patch.parts + 2 * patch.taps * patch.columns * 4 * patch.pixels) / 128 if patch.spread else 0
        storing = (
            adding
            + patch.pixels / SIDE**2 * patch.columns * (own.shuffling if op.epilogue.shuffle > 1 else own.storing) * accesses
        ) / cycles
        computing = each * max(multiplying + storing, copying) + patch.weights / own.weights
        moving = traffic_us(op, program, arch)
        return own.start_us + max(computing, moving) + 0.43 * min(computing, moving)

    def work(self, op: Op, program: Program, config: Config, arch: Arch) -> Work:
        assert isinstance(op, Conv)
        patch = patch_of(op, program, config)
        x, w, y = (program.tensors[name] for name in (op.x, op.w, op.y))
        shares, n, down, across = tiles_of(op, program, patch)
        tiles = n * down * across
        problem = describe(op, program)
        assert isinstance(problem, Problem)
        spec = epilogue.describe(op, program, epilogue.frame_of(op, program), 2)
        results = patch.columns, SIDE, 2, 1
        maps = [_map(x, problem.channels, (DEPTH, patch.pitch, patch.rows, 1), 128), _map_weights(problem, patch)]
        if patch.boxed:
            maps.append(_map(y, y.padded[1], results, 2 * patch.columns))
            maps += [_map_added(load, y, results, 2 * patch.columns) for load in epilogue.loads_by_row(op, program)]
        numbers = (
            *(*image_walk.numbers(n, down, across, shares), *op.pads[:2]),
            *(problem.padded, *problem.pixels[1 : 2 if patch.boxed else 3]),
        )
        stages = patch.stages(arch)
        launch = Launch(
            code(
                self.name, across=patch.across, down=patch.down, columns=patch.columns, height=patch.height, width=patch.width,
                channels=patch.channels, boxed=patch.boxed, added=patch.added, spread=patch.spread, stages=stages,
                constant=w.storage in program.constants, epilogue=spec.params,
            ),
            grid=(shares * min(tiles, arch.sms // shares), 1, 1),
            block=THREADS,
            args=(*maps, *map(I32, numbers), *spec.args),
            smem=patch.smem(stages),
        )  # fmt: skip
        return Work((launch,))

    def build(self, arch: Arch, **params: Value) -> Function:
        from tccompile.kernels.ptx import hopper
        from tccompile.kernels.ptx.core import f32, instruction, types, u32, u64

        patch = Patch(*(params[field.name] for field in fields(Patch)))
        rows = 1 if patch.spread else 2
        ending, extra = (epilogue.build_results if patch.boxed else epilogue.build)(params["epilogue"], rows)

        scope = {
            "results" if patch.boxed else "store": ending,
            "accumulators": hopper.accumulators(patch.wide),
            "multiply": hopper.multiply(patch.wide, steps(patch, DEPTH // 16), (True, True)),
            "multiply_last": hopper.multiply(patch.wide, steps(patch, patch.last), (True, True)),
            "ended": hopper.wgmma_wait_all,
            "ended_before": hopper.wgmma_wait(patch.blocks),
            "left": types.uint64(hopper.descriptor(128, 0, (SIDE if patch.spread else patch.pitch) * ROW)),
            "right": types.uint64(hopper.descriptor(128, 0, SIDE * ROW)),
            "u64": u64,
            "one_box_left": hopper.boxes_read(BOXES - 1),
            "boxes_read": hopper.boxes_read(0),
            **{name: getattr(hopper, name) for name in CALLED},
        }
        if patch.spread:
            scope["put_parts"] = hopper.stage_turned(patch.wide, patch.parts, 4 * SIDE)
            scope["sums"] = instruction(sums(patch), (f32,) * patch.columns, u32)
        maps = ["x", "w", *(["y"] if patch.boxed else []), *(["z"] if patch.added else [])]
        body = device("conv_halo", f"{', '.join(maps)}, numbers, e", lines(patch, params["stages"], params["constant"]), **scope)
        count = numbers_of(patch).count(",") + 1
        signature = types.void(*(types.uint64,) * len(maps), *(types.int32,) * count, *extra)
        return Function(entry(body, len(maps), count, len(extra)), signature, THREADS)


CALLED = (
    "uniform", "barrier_init", "barrier_arrive", "barrier_expect", "barrier_wait", "fence_barrier_init", "prefetch_map",
    "sync_warp", "wait_for_earlier_grids", "let_later_grids_start", "fence_copies", "copy_box", "copy_box4", "store_box4",
    "store_matrices", "load_matrices", "sync_group", "base", "operand",
)  # fmt: skip
"""Instructions that the kernel's text calls by their names."""

NUMBERS = f"{image_walk.NUMBERS}, top, left_pad, padded, P"


def numbers_of(patch: Patch) -> str:
    """Names of the launch's numbers."""
    return NUMBERS if patch.boxed else f"{NUMBERS}, Q"


def columns_of(boxed: bool) -> tuple[int, ...]:
    """Those of `COLUMNS` that a block may have."""
    return COLUMNS[1:] if boxed else COLUMNS


def is_boxed(op: Conv, program: Program) -> bool:
    """Whether the copy engine can store y, and read what is added to it: one tensor of float16 at most, in vectors of 8 channels
    and with its pixels at one stride, as those of y."""
    y, loads = program.tensors[op.y], epilogue.loads_by_row(op, program)
    target = epilogue.describe(op, program, epilogue.frame_of(op, program)).form.y
    if target.shuffled or target.mode != "vector" or target.rows == "general" or len(loads) > 1:
        return False
    if any(load.step is None or not load.vector for load in loads):
        return False
    return all(t.dtype is DType.F16 and not _may_move(t, program) for t in (y, *(load.tensor for load in loads)))


def _may_move(t: Tensor, program: Program) -> bool:
    """Whether its address may change, which tensor maps hold."""
    return t.storage in program.inputs or t.storage in program.outputs


def patch_of(op: Conv, program: Program, config: Config) -> Patch:
    w, boxed = program.tensors[op.w], is_boxed(op, program)
    tile = config["across"], config["down"], config["columns"]
    added = boxed and bool(epilogue.loads_by_row(op, program))
    return Patch(*tile, w.shape[2], w.shape[3], program.tensors[op.x].shape[1], boxed, added, "spread" in config)


def tiles_of(op: Conv, program: Program, patch: Patch) -> tuple[int, int, int, int]:
    """Into how many shares the output channels go, one a block; images; and tiles along their rows' way down and across."""
    n, _, p, q = program.op_shape(op)
    shares = epilogue.lane_groups(op, program, epilogue.frame_of(op, program), patch.columns)
    return shares, n, ceil_div(p, patch.down), ceil_div(q, patch.across)


def steps(patch: Patch, sixteens: int) -> tuple[tuple[int, int], ...]:
    """Of the products of a box of channels, where their operands begin: at a tap's pixel, and at its weights."""
    if patch.spread:
        return tuple((32 * i, 32 * i) for i in range(sixteens))
    places = [(r, s, i) for r in range(patch.height) for s in range(patch.width) for i in range(sixteens)]
    return tuple(((r * patch.pitch + s) * ROW + 32 * i, (r * patch.width + s) * patch.tap + 32 * i) for r, s, i in places)


def _map(t: Tensor, channels: int, box: tuple[int, ...], swizzle: int) -> TiledMap:
    """Of (channels, columns, rows, images)."""
    extents = (channels, t.shape[3], t.shape[2], t.shape[0])
    strides = tuple(2 * t.strides[a] if t.shape[a] > 1 else 16 for a in (3, 2, 0))
    return TiledMap(t.name, 0, extents, strides, box, (1, 1, 1, 1), swizzle)


def _map_weights(problem: Problem, patch: Patch) -> TiledMap:
    """Of (taps · channels, output channels), or of (channels, taps, output channels)."""
    w, ones = problem.w, (1, 1, 1)
    step = 2 * w.strides[0] if w.shape[0] > 1 else 16
    if patch.spread:
        extents = problem.padded, patch.taps, w.shape[0]
        return TiledMap(w.name, 0, extents, (2 * problem.padded, step), (DEPTH, patch.taps, patch.columns), ones)
    return TiledMap(w.name, 0, (patch.taps * problem.padded, w.shape[0], 1), (step, 16), (DEPTH, patch.columns, 1), ones)


def _map_added(load: epilogue.RowLoad, y: Tensor, box: tuple[int, ...], swizzle: int) -> TiledMap:
    """The same of what is added to y, whose pixels lie `step` elements apart, one after the other."""
    _, channels, p, q = y.shape
    assert load.step is not None
    strides = tuple(2 * n * load.step for n in (1, q, p * q))
    return TiledMap(load.tensor.name, 2 * load.offset, (channels, q, p, y.shape[0]), strides, box, (1, 1, 1, 1), swizzle)


def lines(patch: Patch, stages: int, constant: bool) -> list[str]:
    """The kernel's source. x, y: maps of (channels, columns, rows, images); w: as `_map_weights` has it; z: as y, what is added
    to it."""
    at = patch.layout(stages)
    count = patch.chunks + 2 * GROUPS * stages + WARPS * patch.added
    return [
        f"{numbers_of(patch)} = numbers",
        "tid = i32(cuda.threadIdx.x)",
        "warp, lane = uniform(i32(tid >> i32(5))), tid & i32(31)",
        "memory = base()",
        f"there = i32(memory + i32({at['weights there']}))",
        f"full, empty = i32(there + i32({at['ring full'] - at['weights there']})), "
        f"i32(there + i32({at['ring empty'] - at['weights there']}))",
        "if tid == 0:",
        *(f"    barrier_init(i32(there + i32({BARRIER * i})), i32(1))" for i in range(count)),
        "    fence_barrier_init()",
        *(f"    prefetch_map({name})" for name in ("xwy" if patch.boxed else "xw")),
        "cuda.syncthreads()",
        *image_walk.begin(patch.columns),
        "slot = i32(0)",
        "group = i32(warp >> i32(2))",
        f"if group == i32({GROUPS}):",
        f"    if tid == i32({GROUP * GROUPS}):",
        *(f"        {line}" for line in _produce(patch, stages, at, constant)),
        "else:",
        *(f"    {line}" for line in _consume(patch, stages, at)),
    ]


def _onward(stages: int, indent: str) -> list[str]:
    """Text that goes one buffer of a warpgroup's ring on."""
    text = ["slot = i32(slot + i32(1))", f"if slot == i32({stages}):", "    slot, parity = i32(0), i32(parity ^ i32(1))"]
    return [indent + t for t in text]


def _ask_for_weights(patch: Patch, at: SharedLayout) -> list[str]:
    """Text of the one thread that has the weights of a block's output channels copied, for each 64 input channels a barrier."""
    text = []
    for chunk in range(patch.chunks):
        barrier = f"i32(there + i32({BARRIER * chunk}))"
        text.append(f"barrier_expect({barrier}, i32({patch.taps * patch.tap}))")
        if patch.spread:
            to = f"i32(memory + i32({at['weights'] + chunk * patch.filters}))"
            text.append(f"copy_box({to}, w, {barrier}, i32({DEPTH * chunk}), i32(0), first)")
            continue
        for tap in range(patch.taps):
            to = f"i32(memory + i32({at['weights'] + (chunk * patch.taps + tap) * patch.tap}))"
            k = f"i32(i32({tap}) * padded + i32({DEPTH * chunk}))"
            text.append(f"copy_box({to}, w, {barrier}, {k}, first, i32(0))")
    return text


def _produce(patch: Patch, stages: int, at: SharedLayout, constant: bool) -> list[str]:
    """Text of the thread that asks for copies: weights, then tile by tile, for the two warpgroups in turn, boxes of the image."""
    weights = _ask_for_weights(patch, at)
    return [
        *(weights if constant else []),
        "wait_for_earlier_grids()",
        *([] if constant else weights),
        "parity, other, other_parity, number = i32(1), i32(0), i32(1), i32(0)",
        "while tile < tiles:",
        *(f"    {line}" for line in image_walk.place(patch.across, patch.down)),
        f"    for chunk in range({patch.chunks}):",
        f"        buffer = i32(number * i32({stages}) + slot)",
        "        barrier_wait(i32(empty + buffer * i32(8)), parity)",
        "        barrier = i32(full + buffer * i32(8))",
        f"        barrier_expect(barrier, i32({patch.box}))",
        f"        at, c = i32(memory + i32({at['ring']}) + buffer * i32({patch.slot})), i32(i32(chunk) * i32({DEPTH}))",
        "        copy_box4(at, x, barrier, c, i32(column - left_pad), i32(row - top), image)",
        *_onward(stages, "        "),
        "    slot, parity, other, other_parity, number = other, other_parity, slot, parity, i32(number ^ i32(1))",
        "    tile = i32(tile + stride)",
    ]


def _multiply(patch: Patch, at: SharedLayout, name: str, indent: str) -> list[str]:
    """Text that waits for a buffer and multiplies it by `name`, for all of a tile's blocks of 64 pixels."""
    text = [
        "barrier_wait(i32(there + i32(chunk) * i32(8)), i32(0))",
        "buffer = i32(mine + slot)",
        "barrier_wait(i32(full + buffer * i32(8)), parity)",
        f"a = operand(left, i32(memory + i32({at['ring']}) + buffer * i32({patch.slot})))",
        f"b = operand(right, i32(memory + i32(chunk) * i32({patch.filters})))",
    ]
    for block in range(patch.blocks):
        along, below = block % (patch.across // SIDE), block // (patch.across // SIDE)
        pixel = block * SIDE**2 if patch.spread else below * SIDE * patch.pitch + along * SIDE
        text.append(f"acc{block} = {name}(acc{block}, a + u64({pixel * ROW >> 4}), b, i32(chunk))")
    return [indent + t for t in text]


def _consume(patch: Patch, stages: int, at: SharedLayout) -> list[str]:
    """Text of a warpgroup: tile by tile, products of all boxes of channels, and then results."""
    release = "barrier_arrive(i32(empty + before * i32(8)))"
    ahead, ask, store, after = (by_boxes if patch.boxed else by_sums if patch.spread else by_threads)(patch, at)
    all_but_the_last = [
        f"    while chunk < i32({patch.chunks - 1}):",
        *_multiply(patch, at, "multiply", "        "),
        "        ended_before()",
        "        if chunk > i32(0) and leads:",
        f"            {release}",
        "        before = buffer",
        *_onward(stages, "        "),
        "        chunk = i32(chunk + i32(1))",
    ]
    return [
        "wait_for_earlier_grids()",
        "let_later_grids_start()",
        "parity = i32(0)",
        "tile = i32(tile + group * stride)",
        f"mine = i32(group * i32({stages}))",
        *ahead,
        "warp = i32(warp & i32(3))",
        "c = i32(first + (lane & i32(3)) * i32(2))",
        "leads = (tid & i32(127)) == 0",
        "while tile < tiles:",
        *(f"    {line}" for line in image_walk.place(patch.across, patch.down)),
        *(f"    {line}" for line in ask),
        *(f"    acc{block} = accumulators()" for block in range(patch.blocks)),
        "    before = mine",
        "    chunk = i32(0)",
        *(all_but_the_last if patch.chunks > 1 else []),
        *_multiply(patch, at, "multiply_last", "    "),
        "    ended()",
        "    if leads:",
        *([f"        {release}"] if patch.chunks > 1 else []),
        "        barrier_arrive(i32(empty + buffer * i32(8)))",
        *_onward(stages, "    "),
        *(f"    {t}" for t in store),
        f"    tile = i32(tile + i32({GROUPS}) * stride)",
        *after,
    ]


Ending = tuple[list[str], list[str], list[str], list[str]]
"""Text of what becomes of results: ahead of all tiles, ahead of a tile's products, behind them, and behind all tiles."""


def _result(patch: Patch, block: int) -> tuple[str, str]:
    """The first column and row of the pixels of which a warp has results: two rows of `SIDE`."""
    along, below = block % (patch.across // SIDE) * SIDE, block // (patch.across // SIDE) * SIDE
    return f"i32(column + i32({along}))", f"i32(row + i32({below}) + warp * i32(2))"


def by_boxes(patch: Patch, at: SharedLayout) -> Ending:
    """Results go to a warp's boxes, which the copy engine stores."""
    ahead = [
        f"own = i32(memory + i32({at['results']}) + warp * i32({patch.staged}))",
        *([f"landed = i32(there + i32({at['landed'] - at['weights there']}) + warp * i32(8))"] if patch.added else []),
        boxes.key(patch.columns),
        "turn = i32(0)",
    ]
    ask = [
        "if lane == 0:",
        "    boxes_read()",
        f"    barrier_expect(landed, i32({patch.staged}))",
    ]
    store = ["barrier_wait(landed, turn)"] if patch.added else []
    for block in range(patch.blocks):
        along, below = _result(patch, block)
        ask.append(f"    copy_box4(i32(own + i32({block * patch.box_out})), z, landed, first, {along}, {below}, image)")
        store.append(f"if {below} < P:")
        if not patch.added:
            store += ["    if lane == 0:", "        one_box_left()", "    sync_warp()"]
        store.append(f"    box = i32(own + {f'i32({block})' if patch.added else 'turn'} * i32({patch.box_out}))")
        store += [f"    {line}" for line in boxes.fill(f"acc{block}", patch.columns, patch.added)]
        store.append("    if lane == 0:")
        store.append(f"        store_box4(y, box, first, {along}, {below}, image)")
        store += [] if patch.added else ["    turn = i32(turn ^ i32(1))"]
    if patch.added:
        store.append("turn = i32(turn ^ i32(1))")
    return ahead, ask if patch.added else [], store, ["if lane == 0:", "    boxes_read()"]


def by_threads(patch: Patch, at: SharedLayout) -> Ending:
    """Lanes store what they have: of a pixel, and of the one in the row below, two neighbours of every 8 channels."""
    store = ["column, end = i32(column + (lane >> i32(2))), i32((image + i32(1)) * P * Q)"]
    for block in range(patch.blocks):
        along, below = _result(patch, block)
        store += [f"if {along} < Q and {below} < P:", f"    m = i32((image * P + {below}) * Q + {along})"]
        for eight in range(patch.columns // 8):
            store.append(f"    store(acc{block}[{4 * eight}:{4 * eight + 4}], m, Q, end, i32(c + i32({8 * eight})), e)")
    return [], [], [*store, "sync_warp()"], []  # a warp multiplies together


def by_sums(patch: Patch, at: SharedLayout) -> Ending:
    """Parts of results go to shared memory, a column a row there; a thread adds up the taps of its pixels, and stores them."""
    ahead = [
        f"own = i32(memory + i32({at['results']}) + group * i32({4 * patch.staged}))",
        f"at = i32(own + (lane & i32(3)) * i32({2 * patch.parts}) + ((warp & i32(3)) * i32(16) + (lane >> i32(2))) * i32(4))",
        f"along, below = tid & i32({patch.across - 1}), (tid & i32({GROUP - 1})) >> i32({patch.across.bit_length() - 1})",
        "meeting = i32(group + i32(1))",
    ]
    store = ["sync_group(meeting)"]  # nobody reads the parts before any more
    for block in range(patch.blocks):
        store.append(f"put_parts(acc{block}, i32(at + i32({4 * SIDE**2 * block})), i32(0))")
    store += ["sync_group(meeting)", "column = i32(column + along)"]
    for turn in range(patch.pixels // GROUP):
        store += [
            f"line = i32(below + i32({turn * GROUP // patch.across}))",
            "if column < Q and row + line < P:",
            f"    sum = sums(i32(own + (line * i32({patch.pitch}) + along) * i32(4))) + (f32(0),)",
            "    m = i32((image * P + row + line) * Q + column)",
            *(f"    store(sum[{c} : {c + 2}], m, i32({c}), e)" for c in range(0, patch.columns, 2)),
        ]
    return ahead, [], [*store, "sync_warp()"], []


def sums(patch: Patch) -> str:
    """PTX that adds up a pixel's taps, of each column of a block; the pixel's first tap of the first column lies at the address
    behind them."""
    text = ["{ .reg .f32 part;"]
    for column in range(patch.columns):
        for tap in range(patch.taps):
            at = (column * patch.taps + tap) * patch.parts + 4 * (tap // patch.width * patch.pitch + tap % patch.width)
            to = "part" if tap else f"${column}"
            text.append(f"ld.shared.f32 {to}, [${patch.columns}+{at}];")
            text += [f"add.f32 ${column}, ${column}, part;"] if tap else []
    return " ".join([*text, "}"])
