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
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import ceil, prod

from tccompile.arch import KIB, Arch
from tccompile.expr import DType
from tccompile.kernels import epilogue
from tccompile.kernels.codegen import divider
from tccompile.kernels.implicit_gemm import Problem, describe, unfit
from tccompile.kernels.loops import device, entry, refusal
from tccompile.kernels.spec import I32, Config, Function, Kernel, Launch, TiledMap, Value, Work, code, traffic_us
from tccompile.program import Conv, Op, Program, Tensor

SIDE = 8
"""Pixels along both sides of what one wgmma takes."""

DEPTH = 64
"""Channels of a box: a pixel is 128 bytes, the widest swizzle."""

TILES = ((8, 8), (16, 8), (8, 16), (16, 16))
"""Columns and rows of the image in a tile."""

COLUMNS = (16, 32, 64)
"""Output channels of a block."""

MOST_ACCUMULATORS = 64
"""Of a thread."""

LEAST, MOST = 16, 192
"""Input channels. With 256, im2col took 0.55 to 0.98 of the time in five of six convolutions (H200); why has not been found."""

MOST_STAGES = 4

GROUPS = 2
"""Warpgroups that multiply."""

WARPS = 4 * GROUPS
THREADS = 32 * (WARPS + 1)

BOXES = 2
"""Boxes of results of a warp: one is filled while the other one is stored."""


@dataclass(frozen=True)
class Patch:
    """A tile, and the layout of shared memory: weights, the ring, boxes of results, barriers.

    across, down    pixels of a tile
    columns         output channels of a block
    height, width   of the filter
    channels        of the input
    added           whether something that differs by pixel is added to results
    """

    across: int
    down: int
    columns: int
    height: int
    width: int
    channels: int
    added: bool

    @property
    def blocks(self) -> int:
        """Products of 64 pixels."""
        return self.across * self.down // SIDE**2

    @property
    def chunks(self) -> int:
        """Boxes of channels."""
        return ceil(self.channels / DEPTH)

    @property
    def taps(self) -> int:
        return self.height * self.width

    @property
    def last(self) -> int:
        """Products of 16 channels in the last box of channels."""
        return ceil((self.channels - (self.chunks - 1) * DEPTH) / 16)

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
        return self.pitch * self.rows * 2 * DEPTH

    @property
    def slot(self) -> int:
        """Bytes of a buffer: swizzles repeat after 1 KiB."""
        return -(-self.box // KIB) * KIB

    @property
    def tap(self) -> int:
        """Bytes of a tap's weights, of 64 channels."""
        return self.columns * 2 * DEPTH

    @property
    def weights(self) -> int:
        """Bytes of all."""
        return self.chunks * self.taps * self.tap

    @property
    def box_out(self) -> int:
        """Bytes of a box of results: 16 pixels."""
        return 16 * 2 * self.columns

    @property
    def boxes_out(self) -> int:
        """Boxes of a warp: all of a tile's where something is added, which comes into their places meanwhile."""
        return self.blocks if self.added else BOXES

    @property
    def staged(self) -> int:
        """Bytes of a warp's boxes."""
        return self.boxes_out * self.box_out

    def smem(self, stages: int) -> int:
        """Bytes to ask for: 1 KiB more than used, since swizzled boxes begin at multiples of it."""
        barriers = self.chunks + 2 * GROUPS * stages + (WARPS if self.added else 0)
        return self.weights + GROUPS * stages * self.slot + WARPS * self.staged + 8 * barriers + KIB

    def stages(self, arch: Arch) -> int:
        """Buffers of a warpgroup's ring, at most `MOST_STAGES`; 0 if there is no room for two."""
        return next((n for n in range(min(MOST_STAGES, self.chunks + 1), 1, -1) if self.smem(n) <= arch.smem_block), 0)


class ConvHalo(Kernel):
    """Conv with stride 1 and a filter of several taps, NHWC, in fp16, by TMA and wgmma."""

    name = "conv_halo"
    realises: type[Op] = Conv
    tensor_cores = True

    def supports(self, op: Op, program: Program, arch: Arch) -> str | None:
        assert isinstance(op, Conv)
        if arch.mma != "wgmma":
            return f"{arch.name} has no wgmma instructions"
        x, w, y = (program.tensors[name] for name in (op.x, op.w, op.y))
        if x.rank != 4 or op.groups > 1 or max(op.strides) > 1 or max(op.dilations) > 1 or prod(w.shape[2:]) == 1:
            return "it takes images and filters of several taps, without strides, dilations and groups"
        problem = describe(op, program)
        if isinstance(problem, str):
            return problem
        if reason := unfit(problem):
            return reason
        by_pixel = [load.tensor for load in epilogue.loads_by_row(op, program)]
        for t in (x, w, y, *by_pixel):
            if t.storage in program.inputs or t.storage in program.outputs:
                return f"{t.name} is a model input or output, whose address may change; tensor maps hold addresses"
        if 0 in (*x.shape, *y.shape):
            return "an extent is 0"
        if not LEAST <= problem.channels <= MOST:
            return f"{problem.channels} input channels; it takes {LEAST} to {MOST}"
        if y.dtype is not DType.F16:
            return f"{y.name} is {y.dtype.value}; the copy engine stores float16"
        frame = epilogue.frame_of(op, program)
        if (reason := refusal(op, program, frame)) is not None:
            return reason
        _, _, (_, mode, rows, _, shuffle), _, _ = epilogue.describe(op, program, frame).params
        if shuffle or mode != "vector":
            return f"the channels of {y.name} do not lie in aligned vectors of 8, as the copy engine stores them"
        if rows == "general":
            return f"the pixels of {y.name} do not lie at one stride"
        loads = epilogue.loads_by_row(op, program)
        if len(loads) > 1:
            return f"its epilogue reads {len(loads)} tensors for each pixel; the kernel takes one"
        for load in loads:
            if load.step is None or not load.vector or load.tensor.dtype is not DType.F16:
                return f"its epilogue reads {load.tensor.name} for each pixel, whose channels do not lie in vectors of 8 float16"
        if next(self.configs(op, program, arch), None) is None:
            return (
                f"the weights of {min(COLUMNS)} output channels and two boxes do not fit {arch.smem_block} bytes of shared memory"
            )
        return None

    def configs(self, op: Op, program: Program, arch: Arch) -> Iterator[Config]:
        assert isinstance(op, Conv)
        stored = program.tensors[op.y].padded[1]
        for columns in COLUMNS:
            if columns > 16 and columns >= 2 * stored:
                continue
            for across, down in TILES:
                config = {"across": across, "down": down, "columns": columns}
                patch = patch_of(op, program, config)
                fits = patch.blocks * columns // 2 <= MOST_ACCUMULATORS and patch.stages(arch)
                if fits and ceil(stored / columns) <= arch.sms and max(patch.pitch, patch.rows) <= 256:
                    yield config

    def cost(self, op: Op, program: Program, config: Config, arch: Arch) -> float:
        assert isinstance(op, Conv)
        patch = patch_of(op, program, config)
        shares, n, down, across = tiles_of(op, program, patch)
        tiles = n * down * across
        each = ceil(tiles / min(tiles, arch.sms // shares))
        depth = ((patch.chunks - 1) * 4 + patch.last) * patch.taps
        multiplying = patch.blocks * depth * max(patch.columns, NARROW) * MULTIPLYING / CYCLES
        copying = patch.pitch * patch.rows * (COPYING * patch.chunks + (BEYOND if patch.channels % DEPTH else 0)) / CYCLES
        computing = each * max(multiplying, copying) + patch.weights / WEIGHTS
        moving = traffic_us(op, program, arch)
        return START_US + max(computing, moving) + 0.43 * min(computing, moving)

    def work(self, op: Op, program: Program, config: Config, arch: Arch) -> Work:
        assert isinstance(op, Conv)
        patch = patch_of(op, program, config)
        x, w, y = (program.tensors[name] for name in (op.x, op.w, op.y))
        shares, n, down, across = tiles_of(op, program, patch)
        tiles = n * down * across
        problem = describe(op, program)
        assert isinstance(problem, Problem)
        spec = epilogue.describe(op, program, epilogue.frame_of(op, program), 2)
        extents, step = (patch.taps * problem.padded, w.shape[0], 1), 2 * w.strides[0] if w.shape[0] > 1 else 16
        results = patch.columns, SIDE, 2, 1
        maps = (
            _map(x, problem.channels, (DEPTH, patch.pitch, patch.rows, 1), 128),
            TiledMap(w.name, 0, extents, (step, 16), (DEPTH, patch.columns, 1), (1, 1, 1)),
            _map(y, y.padded[1], results, 2 * patch.columns),
            *(_map_added(load, y, results, 2 * patch.columns) for load in epilogue.loads_by_row(op, program)),
        )
        numbers = (
            *(tiles, shares, *divider(shares), across, *divider(across), down, *divider(down), *op.pads[:2]),
            *(problem.padded, y.shape[2]),
        )
        stages = patch.stages(arch)
        launch = Launch(
            code(
                self.name, across=patch.across, down=patch.down, columns=patch.columns, height=patch.height, width=patch.width,
                channels=patch.channels, added=patch.added, stages=stages, constant=w.storage in program.constants,
                epilogue=spec.params,
            ),
            grid=(shares * min(tiles, arch.sms // shares), 1, 1),
            block=THREADS,
            args=(*maps, *map(I32, numbers), *spec.args),
            smem=patch.smem(stages),
        )  # fmt: skip
        return Work((launch,))

    def build(self, arch: Arch, **params: Value) -> Function:
        from numba import cuda
        from numba.cuda import types

        from tccompile.kernels.device_math import inline
        from tccompile.kernels.ptx import hopper
        from tccompile.kernels.ptx.core import i32, instruction, u32, u64, void

        patch = Patch(*(params[name] for name in ("across", "down", "columns", "height", "width", "channels", "added")))
        results, extra = epilogue.build_results(params["epilogue"])

        @inline
        def base():
            return i32((hopper.shared_address(cuda.shared.array(0, types.uint8)) + u32(1023)) & u32(0xFFFFFC00))

        @inline
        def operand(half, address):
            return half | (u64(address & i32(0x3FFFF)) >> u64(4))

        scope = {
            "base": base,
            "operand": operand,
            "results": results,
            "accumulators": hopper.accumulators(patch.columns),
            "multiply": hopper.multiply(patch.columns, steps(patch, DEPTH // 16), (True, True)),
            "multiply_last": hopper.multiply(patch.columns, steps(patch, patch.last), (True, True)),
            "ended": hopper.wgmma_wait_all,
            "ended_before": instruction(f"wgmma.wait_group.sync.aligned {patch.blocks};", void),
            "left": types.uint64(hopper.descriptor(128, 0, patch.pitch * 2 * DEPTH)),
            "right": types.uint64(hopper.descriptor(128, 0, SIDE * 2 * DEPTH)),
            "u64": u64,
            "one_box_left": hopper.boxes_read(BOXES - 1),
            "boxes_read": hopper.boxes_read(0),
            **{name: getattr(hopper, name) for name in CALLED},
        }
        maps = ["x", "w", "y", *(["z"] if patch.added else [])]
        body = device("conv_halo", f"{', '.join(maps)}, numbers, e", lines(patch, params["stages"], params["constant"]), **scope)
        count = NUMBERS.count(",") + 1
        signature = types.void(*(types.uint64,) * len(maps), *(types.int32,) * count, *extra)
        return Function(entry(body, len(maps), count, len(extra)), signature, THREADS)


CYCLES = 1660
"""Of a microsecond, at the clock that a GPU keeps under load."""

# Fitted to 531 times of 133 convolutions on an H200, from which estimates are 10 % off; choices are 1 % slower than the best.
MULTIPLYING, NARROW = 0.44, 48
"""Cycles of a product of 64 pixels by 16 channels for each output channel, and for how many at least: it waits for its pixels."""

COPYING, BEYOND = 1.33, 3.6
"""Cycles of a pixel of a box, and more for one that reaches beyond the channels."""

WEIGHTS = 185_000
"""Bytes of weights that come in a microsecond, as far as launches before do not hide it."""

START_US = 1.7

CALLED = (
    "uniform", "barrier_init", "barrier_arrive", "barrier_expect", "barrier_wait", "fence_barrier_init", "prefetch_map",
    "sync_warp", "wait_for_earlier_grids", "let_later_grids_start", "fence_copies", "copy_box", "copy_box4", "store_box4",
    "store_matrices", "load_matrices",
)  # fmt: skip
"""Instructions that the kernel's text calls by their names."""

NUMBERS = "tiles, shares, shares_m, shares_s, across, across_m, across_s, down, down_m, down_s, top, left_pad, padded, P"


def patch_of(op: Conv, program: Program, config: Config) -> Patch:
    w, added = program.tensors[op.w], bool(epilogue.loads_by_row(op, program))
    tile = config["across"], config["down"], config["columns"]
    return Patch(*tile, w.shape[2], w.shape[3], program.tensors[op.x].shape[1], added)


def tiles_of(op: Conv, program: Program, patch: Patch) -> tuple[int, int, int, int]:
    """Into how many shares the output channels go, one a block; images; and tiles along their rows' way down and across."""
    n, stored, p, q = program.tensors[op.y].padded
    return ceil(stored / patch.columns), n, ceil(p / patch.down), ceil(q / patch.across)


def steps(patch: Patch, sixteens: int) -> tuple[tuple[int, int], ...]:
    """Of the products of a box of channels, where their operands begin: at a tap's pixel, and at its weights."""
    places = [(r, s, i) for r in range(patch.height) for s in range(patch.width) for i in range(sixteens)]
    return tuple(((r * patch.pitch + s) * 2 * DEPTH + 32 * i, (r * patch.width + s) * patch.tap + 32 * i) for r, s, i in places)


def _map(t: Tensor, channels: int, box: tuple[int, ...], swizzle: int) -> TiledMap:
    """Of (channels, columns, rows, images)."""
    extents = (channels, t.shape[3], t.shape[2], t.shape[0])
    strides = tuple(2 * t.strides[a] if t.shape[a] > 1 else 16 for a in (3, 2, 0))
    return TiledMap(t.name, 0, extents, strides, box, (1, 1, 1, 1), swizzle)


def _map_added(load: epilogue.RowLoad, y: Tensor, box: tuple[int, ...], swizzle: int) -> TiledMap:
    """The same of what is added to y, whose pixels lie `step` elements apart, one after the other."""
    _, channels, p, q = y.shape
    assert load.step is not None
    strides = tuple(2 * n * load.step for n in (1, q, p * q))
    return TiledMap(load.tensor.name, 2 * load.offset, (channels, q, p, y.shape[0]), strides, box, (1, 1, 1, 1), swizzle)


def lines(patch: Patch, stages: int, constant: bool) -> list[str]:
    """The kernel's source. x, y: maps of (channels, columns, rows, images); w: of (taps · channels, output channels); z: as y,
    what is added to it."""
    chunks, taps, blocks = patch.chunks, patch.taps, range(patch.blocks)
    buffers, ring = GROUPS * stages, patch.weights
    staged = ring + buffers * patch.slot
    barriers = staged + WARPS * patch.staged

    def result(block: int) -> tuple[str, str]:
        """The first column and row of a warp's box of results."""
        along, below = block % (patch.across // SIDE) * SIDE, block // (patch.across // SIDE) * SIDE
        return f"i32(column + i32({along}))", f"i32(row + i32({below}) + warp * i32(2))"

    def onward(indent: str) -> list[str]:
        """Text that goes one buffer on."""
        text = ["slot = i32(slot + i32(1))", f"if slot == i32({stages}):", "    slot, parity = i32(0), i32(parity ^ i32(1))"]
        return [indent + t for t in text]

    def place(indent: str) -> list[str]:
        """Text for a tile's image, and its first column and row."""
        text = [
            "band = divide(tile, across_m, across_s)",
            "image = divide(band, down_m, down_s)",
            f"column = i32((tile - band * across) * i32({patch.across}))",
            f"row = i32((band - image * down) * i32({patch.down}))",
        ]
        return [indent + t for t in text]

    weights = []
    for chunk in range(chunks):
        weights.append(f"barrier_expect(i32(there + i32({8 * chunk})), i32({taps * patch.tap}))")
        for tap in range(taps):
            at = f"i32(memory + i32({(chunk * taps + tap) * patch.tap}))"
            k = f"i32(i32({tap}) * padded + i32({DEPTH * chunk}))"
            weights.append(f"copy_box({at}, w, i32(there + i32({8 * chunk})), {k}, first, i32(0))")
    produce = [
        *(weights if constant else []),
        "wait_for_earlier_grids()",
        *([] if constant else weights),
        "parity, other, other_parity, number = i32(1), i32(0), i32(1), i32(0)",
        "while tile < tiles:",
        *place("    "),
        f"    for chunk in range({chunks}):",
        f"        buffer = i32(number * i32({stages}) + slot)",
        "        barrier_wait(i32(empty + buffer * i32(8)), parity)",
        "        barrier = i32(full + buffer * i32(8))",
        f"        barrier_expect(barrier, i32({patch.box}))",
        f"        at, c = i32(memory + i32({ring}) + buffer * i32({patch.slot})), i32(i32(chunk) * i32({DEPTH}))",
        "        copy_box4(at, x, barrier, c, i32(column - left_pad), i32(row - top), image)",
        *onward("        "),
        "    slot, parity, other, other_parity, number = other, other_parity, slot, parity, i32(number ^ i32(1))",
        "    tile = i32(tile + stride)",
    ]

    def multiply(name: str, indent: str) -> list[str]:
        text = [
            "barrier_wait(i32(there + i32(chunk) * i32(8)), i32(0))",
            "buffer = i32(mine + slot)",
            "barrier_wait(i32(full + buffer * i32(8)), parity)",
            f"a = operand(left, i32(memory + i32({ring}) + buffer * i32({patch.slot})))",
            f"b = operand(right, i32(memory + i32(chunk) * i32({taps * patch.tap})))",
        ]
        for block in blocks:
            along, below = block % (patch.across // SIDE), block // (patch.across // SIDE)
            at = (below * SIDE * patch.pitch + along * SIDE) * 2 * DEPTH >> 4
            text.append(f"acc{block} = {name}(acc{block}, a + u64({at}), b, i32(chunk))")
        return [indent + t for t in text]

    release = "barrier_arrive(i32(empty + before * i32(8)))"
    rows_alike, keys = 7 - patch.columns.bit_length(), patch.columns // 8 - 1
    ask = [
        "if lane == 0:",
        "    boxes_read()",
        f"    barrier_expect(landed, i32({patch.staged}))",
    ]
    store = ["barrier_wait(landed, turn)"] if patch.added else []
    for block in blocks:
        along, below = result(block)
        ask.append(f"    copy_box4(i32(own + i32({block * patch.box_out})), z, landed, first, {along}, {below}, image)")
        store.append(f"if {below} < P:")
        if not patch.added:
            store += ["    if lane == 0:", "        one_box_left()", "    sync_warp()"]
        store.append(f"    box = i32(own + {f'i32({block})' if patch.added else 'turn'} * i32({patch.box_out}))")
        store.append(f"    at = i32(box + (lane & i32(15)) * i32({2 * patch.columns}) + ((lane >> i32(4)) ^ key) * i32(16))")
        for sixteen in range(patch.columns // 16):
            if patch.added:
                store.append(f"    read = load_matrices(i32(at ^ i32({32 * sixteen})))")
            for half, name in enumerate("vu"):
                values = f"acc{block}[{8 * sixteen + 4 * half}:{8 * sixteen + 4 * half + 4}]"
                more = f", read[{4 * half}:{4 * half + 4}]" if patch.added else ""
                store.append(f"    {name} = results({values}{more}, i32(c + i32({16 * sixteen + 8 * half})), e)")
            numbers = ", ".join(f"{name}[{k}]" for name in "vu" for k in range(4))
            store.append(f"    store_matrices(i32(at ^ i32({32 * sixteen})), {numbers})")
        store += ["    fence_copies()", "    sync_warp()", "    if lane == 0:"]
        store.append(f"        store_box4(y, box, first, {along}, {below}, image)")
        store += [] if patch.added else ["    turn = i32(turn ^ i32(1))"]
    if patch.added:
        store.append("turn = i32(turn ^ i32(1))")
    consume = [
        "wait_for_earlier_grids()",
        "let_later_grids_start()",
        "parity = i32(0)",
        "tile = i32(tile + group * stride)",
        f"mine = i32(group * i32({stages}))",
        f"own = i32(memory + i32({staged}) + warp * i32({patch.staged}))",
        *([f"landed = i32(there + i32({8 * (chunks + 2 * buffers)}) + warp * i32(8))"] if patch.added else []),
        "warp = i32(warp & i32(3))",
        f"key = i32(((lane & i32(15)) >> i32({rows_alike})) & i32({keys}))",
        "c = i32(first + (lane & i32(3)) * i32(2))",
        "turn = i32(0)",
        "leads = (tid & i32(127)) == 0",
        "while tile < tiles:",
        *place("    "),
        *(f"    {line}" for line in (ask if patch.added else [])),
        *(f"    acc{block} = accumulators()" for block in blocks),
        "    before = mine",
        "    chunk = i32(0)",
        *(
            [
                f"    while chunk < i32({chunks - 1}):",
                *multiply("multiply", "        "),
                "        ended_before()",
                "        if chunk > i32(0) and leads:",
                f"            {release}",
                "        before = buffer",
                *onward("        "),
                "        chunk = i32(chunk + i32(1))",
            ]
            if chunks > 1
            else []
        ),
        *multiply("multiply_last", "    "),
        "    ended()",
        "    if leads:",
        *([f"        {release}"] if chunks > 1 else []),
        "        barrier_arrive(i32(empty + buffer * i32(8)))",
        *onward("    "),
        *(f"    {t}" for t in store),
        f"    tile = i32(tile + i32({GROUPS}) * stride)",
        "if lane == 0:",
        "    boxes_read()",
    ]
    return [
        f"{NUMBERS} = numbers",
        "tid = i32(cuda.threadIdx.x)",
        "warp, lane = uniform(i32(tid >> i32(5))), tid & i32(31)",
        "memory = base()",
        f"there = i32(memory + i32({barriers}))",
        f"full, empty = i32(there + i32({8 * chunks})), i32(there + i32({8 * (chunks + buffers)}))",
        "if tid == 0:",
        *(f"    barrier_init(i32(there + i32({8 * i})), i32(1))" for i in range(chunks + 2 * buffers + WARPS * patch.added)),
        "    fence_barrier_init()",
        *(f"    prefetch_map({name})" for name in "xwy"),
        "cuda.syncthreads()",
        "block = i32(cuda.blockIdx.x)",
        "tile = divide(block, shares_m, shares_s)",
        f"first = i32((block - tile * shares) * i32({patch.columns}))",
        "stride = divide(i32(cuda.gridDim.x), shares_m, shares_s)",
        "slot = i32(0)",
        "group = i32(warp >> i32(2))",
        f"if group == i32({GROUPS}):",
        f"    if tid == i32({128 * GROUPS}):",
        *(f"        {line}" for line in produce),
        "else:",
        *(f"    {line}" for line in consume),
    ]
