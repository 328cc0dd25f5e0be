"""Depthwise convolution on Hopper: the tensor copy engine feeds diagonal matrices on Tensor Cores.

As in kernels/depthwise_mma.py a tap of the filter is an 8 by 8 matrix with 8 channels' weights on its diagonal; 16 neighbouring
pixels of a row times two taps are one mma.m16n8k16. Here the pixels come from shared memory: a matrix of 8 pixels by 8 channels
is what ldmatrix reads, at any pixel, so that nothing is moved or masked. Of an odd number of taps the last one is multiplied in
fp32: a lane has the same pixels and channels of a matrix as of the results. What is no number in one channel (an infinity, NaN)
makes NaN of the 8 channels that share a matrix with it.

A block walks down its part of the rows of all images, `columns` pixels wide, of `channels` channels. They come in slabs
by boxes of a tensor map, whose zeros outside the image are the padding, into a ring of `stages` buffers; with a stride of 2 even
and odd columns come as arrays of their own, of maps that step over two columns, so that pixels of a matrix are neighbours.
Each warp has 8 channels of a part of the columns. It reads each row once and multiplies it for all rows of y that it belongs to,
whose accumulators take turns; a slab has as many steps as there are turns. Results are rounded into boxes in shared memory, which
the copy engine stores while the next slab is multiplied. At one barrier a slab all warps say that they have read its rows, so
that the next ones may come to their place, and that its results are there. Only two warps, which ask for both, wait there for the
others, which may be in the next slab, until the results of that before the last one have been read.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from math import ceil
from typing import Any

from tccompile.arch import KIB, Arch
from tccompile.expr import DType
from tccompile.kernels import epilogue
from tccompile.kernels.codegen import divider
from tccompile.kernels.depthwise import filter_of, image
from tccompile.kernels.loops import device, entry, refusal, vectors
from tccompile.kernels.spec import (
    I32,
    LAUNCH_US,
    Config,
    Function,
    Kernel,
    Launch,
    Ptr,
    TiledMap,
    Value,
    Work,
    code,
    memory_us,
    traffic_us,
)
from tccompile.program import Conv, Op, Program, Tensor

WARPS = 8
THREADS = 32 * WARPS

LOADER = 32
"""The thread that asks for slabs; thread 0 has results stored."""

CHANNELS = (64, 32, 16)
"""Of a box, whose pixels are as many bytes twice over: what the copy engine swizzles. 16 are for images that have no more."""

STRIPS = (1, 2, 4)
"""Parts of a row, of 16 pixels each, that a warp multiplies."""

STAGES = 6
"""Slabs of x that shared memory holds, at most."""

RESIDENT = (3, 2, 1)
"""Blocks that a multiprocessor holds at once, which bound the registers."""

HALO = 8
"""Columns of a box beyond those of its results: the swizzle's pattern repeats every 8 pixels, and rows shall lie alike."""


@dataclass(frozen=True)
class Walk:
    """A config: how a block's shared memory is laid out.

    taps, stride  of the filter, the same along both axes
    channels      of a box; strips, sixteens of columns that a warp has
    blocks        on a multiprocessor
    """

    taps: int
    stride: int
    channels: int
    strips: int
    blocks: int

    @property
    def slots(self) -> int:
        """Rows of y that a row of x may belong to; steps of a slab, of one row of y each."""
        return -(-self.taps // self.stride)

    @property
    def groups(self) -> int:
        """Of 8 channels."""
        return self.channels // 8

    @property
    def columns(self) -> int:
        return 16 * self.strips * WARPS // self.groups

    @property
    def pixel(self) -> int:
        """Bytes."""
        return 2 * self.channels

    @property
    def line(self) -> int:
        """Bytes of a row of a box of x."""
        return (self.columns + HALO) * self.pixel

    @property
    def rows(self) -> int:
        """Of x in a slab."""
        return self.slots * self.stride

    @property
    def box(self) -> int:
        """Bytes of a box of x: of all columns, or of the even or odd ones."""
        return self.rows * self.line

    @property
    def slab(self) -> int:
        return self.stride * self.box

    @property
    def line_out(self) -> int:
        """Bytes of a row of results."""
        return self.columns * self.pixel

    @property
    def staging(self) -> int:
        """Bytes of two slabs' results."""
        return 2 * self.slots * self.line_out

    def smem(self, stages: int) -> int:
        """Bytes to ask for: 1 KiB more than used, since swizzled boxes begin at multiples of it."""
        return stages * self.slab + self.staging + 8 * (stages + 2) + KIB

    def stages(self, arch: Arch) -> int:
        """Buffers of the ring: as many as shared memory holds, at most 6; 0 if it does not hold two."""
        most = min(arch.smem_block, arch.smem_sm // self.blocks - KIB)
        return next((n for n in range(STAGES, 1, -1) if self.smem(n) <= most), 0)

    @property
    def registers(self) -> int:
        """About what a thread needs: accumulators, weights, matrices of a step, addresses."""
        matrices = self.stride * self.strips * 2 * self.taps
        return 4 * self.slots * self.strips + self.taps * (self.taps + 1) + matrices + 4 * self.strips + 24

    @property
    def pairs(self) -> list[tuple[int, ...]]:
        """Taps of a row of the filter that are multiplied at once: two and two by matrices, the last one by itself, in fp32."""
        return [tuple(range(s, min(s + 2, self.taps))) for s in range(0, self.taps, 2)]

    def live(self, u: int) -> list[tuple[int, int]]:
        """Of row u of a step: (e, r), row r of the filter for the row of y that began e steps before."""
        return [(e, u + e * self.stride) for e in range(self.slots) if u + e * self.stride < self.taps]


class DepthwiseSm90(Kernel):
    """Conv with as many groups as input and output channels, NHWC, in fp16, by TMA and mma.sync, on sm_90a."""

    name = "depthwise_sm90"
    realises: type[Op] = Conv
    tensor_cores = True

    def supports(self, op: Op, program: Program, arch: Arch) -> str | None:
        assert isinstance(op, Conv)
        if arch.name != "sm_90a":
            return f"{arch.name}: the kernel is made for sm_90a, its copy engine and its registers"
        x, w, y = (program.tensors[name] for name in (op.x, op.w, op.y))
        if not op.groups == x.shape[1] == w.shape[0]:
            return "it is no depthwise convolution: groups, input channels and output channels differ"
        for t in (x, w, y):
            if t.dtype is not DType.F16:
                return f"{t.name} is {t.dtype.value}; Tensor Cores multiply float16, and the copy engine stores it"
        r, s = filter_of(w)
        square = x.rank == 4 and r == s and r in (3, 5, 7) and op.strides in ((1, 1), (2, 2)) and op.dilations == (1, 1)
        if not square:
            return f"its filter is {r}×{s}: it takes 3×3, 5×5 and 7×7 with stride 1 or 2 along both axes, without dilation"
        if x.shape[3] < op.strides[1]:
            return f"{x.name} is narrower than the stride"
        for t in (x, y):
            if t.storage in program.inputs or t.storage in program.outputs:
                return f"{t.name} is a model input or output, whose address may change; tensor maps hold addresses"
        if not vectors(w, 0, 8):
            return f"the channels of {w.name} do not lie in aligned vectors of 8"
        if x.strides[1] != 1 or any(s % 8 for s in (x.offset, *(x.strides[a] for a in (0, 2, 3) if x.shape[a] > 1))):
            return f"pixels of {x.name} do not begin at multiples of 16 bytes, or their channels are no neighbours"
        if not walks(op, program, arch):
            return f"slabs of {r} rows of its image do not fit {arch.smem_block} bytes of shared memory"
        if (reason := refusal(op, program, epilogue.frame_of(op, program))) is not None:
            return reason
        _, _, (_, mode, _, _, shuffle), _, _ = epilogue.describe(op, program, epilogue.frame_of(op, program)).params
        if shuffle or mode != "vector":
            return f"the channels of {y.name} do not lie in aligned vectors of 8, as the copy engine stores them"
        if loads := epilogue.loads_by_row(op, program):
            return f"its epilogue reads {loads[0].tensor.name} for each pixel"
        return None

    def configs(self, op: Op, program: Program, arch: Arch) -> Iterator[Config]:
        """The ones of least estimated cost."""
        found = [
            {"parts": parts, **{name: getattr(w, name) for name in CHOSEN}}
            for w in walks(op, program, arch)
            for parts in partitions(op, program, w, arch)
        ]
        yield from sorted(found, key=lambda config: self.cost(op, program, config, arch))[:12]

    def cost(self, op: Op, program: Program, config: Config, arch: Arch) -> float:
        assert isinstance(op, Conv)
        walk, shares = walk_of(op, program, config), share(op, program, config, arch)
        clock = arch.fp32_tflops * 1e6 / 2 / 128 / arch.sms  # cycles of a microsecond
        # Cycles for a slab of a scheduler, which has two of a block's warps: their instructions (counted), and products of its
        # Tensor Core; and of shared memory for all eight warps: matrices read, results written and read, the slab's arrival.
        pairs, live = len(walk.pairs), sum(len(walk.live(u)) for u in range(walk.stride))
        issue = SLAB + walk.slots * (STEP + walk.strips * (STRIP + walk.stride * (pairs + 4) + live * (pairs + 3)))
        rate = MMA_SYNC * arch.tensor_tflops * 1e6 / 2 / arch.sms / 4 / clock
        tensor = walk.slots * walk.strips * live * (pairs - 1) * 2048 / rate
        accesses = WARPS * walk.strips * walk.slots * (walk.stride * walk.taps * 2 + 2) + (walk.slab + walk.staging / 2) / 128
        each = max(2 * issue, 2 * tensor, accesses) / walk.slots / clock
        # A block's slabs come one after the other; what they take of a multiprocessor, they take from its other blocks too.
        together = ceil(shares.blocks / arch.sms)
        slabs, steps, all_steps = longest(shares.height, shares.strips, shares.parts, walk.slots, shares.skipped)
        alone = ceil(together / walk.blocks) * (slabs * SLAB_US + steps * STEP_US)
        computing = alone + together * steps * each
        # Rows and columns that neighbours read too come from the L2 cache, mostly.
        x = program.tensors[op.x]
        along = (shares.across - 1) * HALO * walk.stride / image(x.shape)[3]
        down = all_steps / (shares.height * shares.strips) - 1
        moving = traffic_us(op, program, arch) + 0.1 * (down + along) * memory_us([x], arch)
        moving *= EVERY_SECOND if walk.stride == 2 else 1
        start = LAUNCH_US + START_US + TAP_US * walk.taps**2
        return start + max(computing, moving) + 0.32 * min(computing, moving)  # they do not overlap wholly

    def work(self, op: Op, program: Program, config: Config, arch: Arch) -> Work:
        assert isinstance(op, Conv)
        w, y = program.tensors[op.w], program.tensors[op.y]
        walk, shares = walk_of(op, program, config), share(op, program, config, arch)
        stages = walk.stages(arch)
        if 0 in y.shape:
            return Work(())
        spec = epilogue.describe(op, program, epilogue.frame_of(op, program), 2)
        _, _, p, q = image(y.shape)
        x_maps, begins = inputs(op, program, walk)
        y_map = _map(y, y.padded[1], q, 0, 1, (walk.channels, walk.columns, 1, 1))
        numbers = (
            *(shares.chunks, *divider(shares.chunks), *shares.rows, *divider(shares.parts)),
            *(p, *divider(p), shares.across, *divider(shares.across), q, shares.skipped, -op.pads[0]),
            *(begins[0], begins[-1], w.strides[2], w.strides[3], w.padded[0], y.padded[1]),
        )
        launch = Launch(
            code(
                self.name, taps=walk.taps, stride=walk.stride, channels=walk.channels, strips=walk.strips, blocks=walk.blocks,
                stages=stages, epilogue=spec.params,
            ),
            grid=(shares.blocks, 1, 1),
            block=THREADS,
            args=(*x_maps, y_map, Ptr(op.w), *map(I32, numbers), *spec.args),
            smem=walk.smem(stages),
        )  # fmt: skip
        return Work((launch,))

    def build(self, arch: Arch, **params: Value) -> Function:
        from numba import cuda
        from numba.cuda import types

        from tccompile.kernels.device_math import inline
        from tccompile.kernels.ptx import hopper, memory, mma, simt
        from tccompile.kernels.ptx.core import i32, u32

        walk = Walk(*(params[name] for name in ("taps", "stride", *CHOSEN)))
        results, extra = epilogue.build_results(params["epilogue"], 2 * walk.strips)

        @inline
        def base():
            return i32((hopper.shared_address(cuda.shared.array(0, types.uint8)) + u32(1023)) & u32(0xFFFFFC00))

        scope: dict[str, Any] = {
            "base": base,
            "results": results,
            "uniform": hopper.uniform,
            "computed": hopper.computed,
            "barrier_init": hopper.barrier_init,
            "barrier_arrive": hopper.barrier_arrive,
            "barrier_expect": hopper.barrier_expect,
            "barrier_wait": hopper.barrier_wait,
            "fence_barrier_init": hopper.fence_barrier_init,
            "prefetch_map": hopper.prefetch_map,
            "sync_named": hopper.sync_named,
            "arrive_named": hopper.arrive_named,
            "wait_for_earlier_grids": hopper.wait_for_earlier_grids,
            "let_later_grids_start": hopper.let_later_grids_start,
            "fence_copies": hopper.fence_copies,
            "copy_box4": hopper.copy_box4,
            "store_box4": hopper.store_box4,
            "boxes_read": hopper.boxes_read(0),
            "read_word": memory.load_words(1, space="global.nc"),
            "take": mma.take(1),
            "zeros": mma.zeros(4),
            "multiply_diagonal": mma.multiply_diagonal("mma.m16n8k16", 1),
            "multiply_add": simt.multiply_add(4),
            **{f"floats{n}": memory.floats(DType.F16, n) for n in (2, 4)},
            "put_matrices": hopper.store_two_matrices,
            **{f"matrices{n}": hopper.read_matrices(n) for n in (2, 4)},
        }
        body = device("depthwise", f"{maps(walk)}, w, numbers, e", lines(walk, params["stages"]), **scope)
        count, first = NUMBERS.count(",") + 1, walk.stride + 2
        signature = types.void(*(types.uint64,) * (first - 1), types.int64, *(types.int32,) * count, *extra)
        return Function(entry(body, first, count, len(extra)), signature, THREADS, walk.blocks)


NUMBERS = (
    "chunks, chunks_m, chunks_s, rows, more, parts_m, parts_s, P, P_m, P_s, across, across_m, across_s, Q, skipped, top, "
    "begin0, begin1, wr, ws, padded, stored"
)

MMA_SYNC = 0.6
"""Of the Tensor Cores' rate with wgmma, what mma.sync reaches."""

SLAB, STEP, STRIP = 25, 9, 7
"""Instructions of a warp: for a slab, a step of it, and a strip of that but for its matrices and products."""

# Fitted to the times of 168 configs of 14 layers on an H200. What the copy engine takes for rows of boxes explained none of them.
SLAB_US, STEP_US = 0.27, 0.03
"""What a slab and a step take beyond those cycles, one thing waiting for the other."""

START_US, TAP_US = 0.35, 0.018
"""Beyond a launch: until the first rows are there, and a tap's weights."""

EVERY_SECOND = 1.1
"""By which pixels at every second place take longer to move."""

CHOSEN = ("channels", "strips", "blocks")
"""Of a config, what the layout of shared memory depends on."""


def walk_of(op: Op, program: Program, config: Config) -> Walk:
    assert isinstance(op, Conv)
    return Walk(filter_of(program.tensors[op.w])[0], op.strides[0], *(config[name] for name in CHOSEN))


def walks(op: Op, program: Program, arch: Arch) -> list[Walk]:
    """Those that fit: boxes hardly wider than the image, and the two largest numbers of blocks that there is room for."""
    _, c, _, q = image(program.op_shape(op))
    found = []
    for channels in (m for m in CHANNELS if 16 < m < 2 * c) if c > 16 else (16,):
        for strips in STRIPS:
            every = [walk_of(op, program, {"channels": channels, "strips": strips, "blocks": blocks}) for blocks in RESIDENT]
            wide = every[0].columns + HALO > 256 or (strips > 1 and every[0].columns // 2 >= q)
            fit = [w for w in every if w.stages(arch) and w.registers <= min(256 // w.blocks, 255)]
            found += [] if wide else fit[:2]
    return found


@dataclass(frozen=True)
class Share:
    """How images are shared out: `chunks` of channels, and of each as many `parts`, of which a block has one.

    A strip is an image's rows of y, of one of `across` parts of its columns; parts are of the rows of all strips, one strip below
    the other. The first steps of a strip that bring nothing but rows above the image, `skipped`, are left out.
    """

    chunks: int
    parts: int
    across: int
    strips: int
    height: int
    skipped: int

    @property
    def blocks(self) -> int:
        return self.chunks * self.parts

    @property
    def rows(self) -> tuple[int, int]:
        """Of a part, and rows left over: part b begins at row b * rows + b * more // parts."""
        return divmod(self.strips * self.height, self.parts)


def share(op: Op, program: Program, config: Config, arch: Arch) -> Share:
    assert isinstance(op, Conv)
    walk, y = walk_of(op, program, config), program.tensors[op.y]
    n, c, p, q = image(y.shape)
    chunks, across = -(-max(c, y.padded[1]) // walk.channels), -(-q // walk.columns)
    return Share(chunks, config["parts"], across, n * across, p, min(op.pads[0] // walk.stride, walk.slots - 1))


def partitions(op: Op, program: Program, walk: Walk, arch: Arch) -> set[int]:
    """Numbers of parts: as many as there is room for, ones that end where strips do, and of few rows in whole slabs."""
    config = {"parts": 1, **{name: getattr(walk, name) for name in CHOSEN}}
    whole = share(op, program, config, arch)
    rows = whole.strips * whole.height
    most = max(1, min(rows, arch.sms * walk.blocks // whole.chunks))
    even = {whole.strips * min(most // whole.strips, whole.height), ceil(whole.strips / ceil(whole.strips / most))}
    short = {ceil(rows / (walk.slots * slabs + 1)) for slabs in range(4)}
    return {n for n in {most, *even, *short} if 0 < n <= most}


@cache
def longest(height: int, strips: int, parts: int, slots: int, skipped: int) -> tuple[int, int, int]:
    """The most slabs and steps of a part, and the steps of all of them."""
    rows, found = strips * height, []
    for part in range(parts):
        row, last = (b * rows // parts for b in (part, part + 1))
        slabs = steps = 0
        while row < last:
            end = min(last, row // height * height + height)
            its = end - row + slots - 1 - (0 if row % height else skipped)
            slabs, steps, row = slabs + -(-its // slots), steps + its, end
        found.append((slabs, steps))
    return max(s for s, _ in found), max(s for _, s in found), sum(s for _, s in found)


# --- What the copy engine reads and writes -----------------------------------------------------------------------------


def _map(t: Tensor, channels: int, columns: int, first: int, step: int, box: tuple[int, ...]) -> TiledMap:
    """Of (channels, columns, rows, images): every `step`th column from `first` on."""
    extents = (channels, columns, t.shape[2], t.shape[0])
    apart = zip(extents[1:], (step * t.strides[3], t.strides[2], t.strides[0]), strict=True)
    strides = tuple(2 * s if n > 1 else 16 for n, s in apart)
    return TiledMap(t.name, 2 * first * t.strides[3], extents, strides, box, (1, 1, 1, 1), 2 * box[0])


def inputs(op: Conv, program: Program, walk: Walk) -> tuple[list[TiledMap], list[int]]:
    """For each of a stride's columns from the first one that column 0 of y reads: its map, and where it begins there."""
    x, box = program.tensors[op.x], (walk.channels, walk.columns + HALO, walk.rows, 1)
    found, begins = [], []
    for f in range(walk.stride):
        begin, parity = divmod(f - op.pads[1], walk.stride)
        columns = -(-(x.shape[3] - parity) // walk.stride)
        found.append(_map(x, x.shape[1], columns, parity, walk.stride, box))
        begins.append(begin)
    return found, begins


# --- The code --------------------------------------------------------------------------------------------------------


def maps(walk: Walk) -> str:
    """The parameters that are tensor maps."""
    return ", ".join([f"map{f}" for f in range(walk.stride)] + ["map_y"])


def lines(walk: Walk, stages: int) -> list[str]:
    """The kernel's source. x, y: (N, H, W, C) by their maps, w: (R, S, C).

    Shared memory: `stages` slabs [column mod stride][row][column][channel], then results [slab mod 2][row][column][channel],
    then a barrier for each slab: its rows are there; and one for each half of the results: those of two slabs ago have been read.
    """
    slots, strips, groups = walk.slots, walk.strips, walk.groups
    staging, barriers = stages * walk.slab, stages * walk.slab + walk.staging
    by_group = groups.bit_length() - 1
    out = [
        f"{NUMBERS} = numbers",
        "tid = i32(cuda.threadIdx.x)",
        "warp, lane = uniform(i32(tid >> i32(5))), tid & i32(31)",
        "ring = base()",
        f"staged, full, free = i32(ring + i32({staging})), i32(ring + i32({barriers})), i32(ring + i32({barriers + 8 * stages}))",
        "if tid == 0:",
        *(f"    barrier_init(i32(full + i32({8 * s})), i32(1))" for s in range(stages + 2)),
        "    fence_barrier_init()",
        *(f"    prefetch_map({name})" for name in maps(walk).split(", ")),
        "cuda.syncthreads()",
        "wait_for_earlier_grids()",
        "let_later_grids_start()",
        "block = i32(cuda.blockIdx.x)",
        "part = divide(block, chunks_m, chunks_s)",
        f"c0 = i32((block - part * chunks) * i32({walk.channels}))",
        "row = i32(part * rows + divide(i32(part * more), parts_m, parts_s))",
        "last = i32((part + i32(1)) * rows + divide(i32((part + i32(1)) * more), parts_m, parts_s))",
        # The slabs to come: from which row on, and how many of its steps have been asked for
        "ahead, asked = row, i32(0)",
        f"if warp == i32({LOADER // 32}):",
        "    turn = i32(0)",
        f"    while turn < i32({stages}):",
        *(f"        {line}" for line in _ask(walk)),
        "        turn = i32(turn + i32(1))",
        f"group, along = warp & i32({groups - 1}), warp >> i32({by_group})",
        *_weights(walk),
        *_places(walk),
        "turn, parity, side, room = i32(0), i32(0), i32(0), i32(1)",
        "while row < last:",
    ]
    inner = [
        *_piece(walk, "row", "n", "p0", "q0", "count", "i"),  # i: the row of y, from p0 on, that the slab's first step ends
        f"column = i32(q0 + along * i32({16 * strips}))",
        "active = within(i32(c0 + group * i32(8)), i32(0), stored) & within(column, i32(0), Q)",
        *(f"a{number}_{j} = zeros()" for number in range(slots) for j in range(strips)),
        "while i < count:",
    ]
    slab = [
        "barrier_wait(i32(full + turn * i32(8)), parity)",
        "if active:",
        *(f"    {line}" for line in _steps(walk)),
        "else:",
        "    barrier_wait(i32(free + side * i32(8)), room)",
        "fence_copies()",
        "if tid == 0:",
        "    boxes_read()",  # of the slab before: the next one may write there
        "    barrier_arrive(i32(free + (i32(1) - side) * i32(8)))",
        "if warp < i32(2):",
        "    sync_named(i32(side + i32(1)))",
        "else:",
        "    arrive_named(i32(side + i32(1)))",
        "if warp == i32(0):",
        *(f"    {line}" for line in _store(walk)),
        f"if warp == i32({LOADER // 32}):",
        *(f"    {line}" for line in _ask(walk)),
        "if side == i32(0):",  # phases of the second half begin with one for no slab
        "    room = i32(i32(1) - room)",
        "side = i32(i32(1) - side)",
        "turn = i32(turn + i32(1))",
        f"if turn == i32({stages}):",
        "    turn, parity = i32(0), i32(i32(1) - parity)",
        f"i = i32(i + i32({slots}))",
    ]
    inner += [f"    {line}" for line in slab] + ["row = i32(row + count)"]
    # What is stored must have been read before the block's shared memory is another's.
    return [*out, *(f"    {line}" for line in inner), "if tid == 0:", "    boxes_read()"]


def _piece(walk: Walk, number: str, n: str, row: str, column: str, count: str, first: str) -> list[str]:
    """Text for what a part has of a strip from a row on: image, first row and column of y, rows, and the row that step 0 ends."""
    return [
        f"strip = divide({number}, P_m, P_s)",
        f"{row} = i32({number} - strip * P)",
        f"{n} = divide(strip, across_m, across_s)",
        f"{column} = i32(i32(strip - {n} * across) * i32({walk.columns}))",
        f"{count} = i32(min(i32(P - {row}), i32(last - {number})))",
        f"{first} = i32(select({row} == i32(0), skipped, i32(0)) - i32({walk.slots - 1}))",
    ]


def _ask(walk: Walk) -> list[str]:
    """Text that has the next slab copied to buffer `turn`, by one thread of the warp."""
    text = [
        *_piece(walk, "ahead", "its_n", "its_row", "its_column", "its_count", "its_step"),
        "its_step = i32(its_step + asked)",
        f"its_row = i32(i32(its_row + its_step + i32({walk.slots - 1})) * i32({walk.stride}) + top)",  # of x
        f"barrier, at = i32(full + turn * i32(8)), i32(ring + turn * i32({walk.slab}))",
        f"if lane == i32({LOADER % 32}):",
        f"    barrier_expect(barrier, i32({walk.slab}))",
        *(
            f"    copy_box4(i32(at + i32({f * walk.box})), map{f}, barrier, c0, i32(its_column + begin{f}), its_row, its_n)"
            for f in range(walk.stride)
        ),
        f"asked = i32(asked + i32({walk.slots}))",
        f"if i32(its_step + i32({walk.slots})) >= its_count:",
        "    ahead, asked = i32(ahead + its_count), i32(0)",
    ]
    return ["if ahead < last:", *(f"    {line}" for line in text)]


def _weights(walk: Walk) -> list[str]:
    """The lane's numbers of the diagonal matrices: 2 * t and 2 * t + 1 of column g, for lane (g, t) of 8 × 4.

    Of the tap that has no second one, the weights of the lane's two channels, once for each of its two pixels.
    """
    out = [
        "g, t = lane >> i32(2), lane & i32(3)",
        "c = computed(i32(c0 + group * i32(8) + t * i32(2)))",
        "inside = within(c, i32(0), padded)",
        "diagonal = select(g & i32(1) == i32(0), i32(0xffff), i32(-0x10000))",
        "diagonal = select(i32(g >> i32(1)) == t, diagonal, i32(0))",
        "filters = w + i64(c) * i64(2)",
    ]
    for r in range(walk.taps):
        for pair in walk.pairs:
            for s in pair:
                word = f"read_word(filters + i64(i32(i32({r}) * wr) + i32(i32({s}) * ws)) * i64(2), inside)"
                if len(pair) == 2:
                    out.append(f"w{r}_{s} = take({word}, diagonal, diagonal)")
                else:
                    out += [f"weights = floats2({word}[0])", f"w{r}_{s} = weights + weights"]
    return out


def _swizzled(walk: Walk, pixel: str) -> str:
    """Text for the byte of the warp's channels in a pixel of a row."""
    shift = {64: 0, 32: 1, 16: 2}[walk.channels]
    key = f"({pixel} >> i32({shift})) & i32({walk.groups - 1})"
    return f"i32(i32({pixel} * i32({walk.pixel})) + i32(i32(group ^ i32({key})) << i32(4)))"


def _places(walk: Walk) -> list[str]:
    """Where a lane reads its row of matrices, from a slab's first byte on, and writes its row of results.

    Lanes 0 to 15 have the 16 pixels of a pair's first tap, the others those of its second one.
    """
    out = [f"first = i32((lane & i32(15)) + along * i32({16 * walk.strips}))"]
    for k, pair in enumerate(walk.pairs):
        shifts, boxes = ([f(s, walk.stride) for s in (pair[0], pair[-1])] for f in (int.__floordiv__, int.__mod__))
        out += [
            f"pixel = i32(first + select(lane < i32(16), i32({shifts[0]}), i32({shifts[1]})))",
            f"box = select(lane < i32(16), i32({boxes[0] * walk.box}), i32({boxes[1] * walk.box}))",
            f"place{k} = computed(i32(box + {_swizzled(walk, 'pixel')}))",
        ]
    return [*out, f"mine = computed(i32(staged + {_swizzled(walk, 'first')}))"]


def _steps(walk: Walk) -> list[str]:
    """Text for the steps of a slab: a step's matrices are read before the results of the one before are rounded."""
    strips, slots = range(walk.strips), walk.slots
    strip = 16 * walk.pixel

    def read(step: int) -> list[str]:
        text = []
        for u in range(walk.stride):
            row = (step * walk.stride + u) * walk.line
            for k, pair in enumerate(walk.pairs):
                text += [f"x{u}_{k}_{j} = matrices{2 * len(pair)}(i32(from{k} + i32({row + j * strip})))" for j in strips]
        return text

    def multiply(step: int) -> list[str]:
        text = [f"a{step}_{j} = zeros()" for j in strips]
        for u in range(walk.stride):
            for k, pair in enumerate(walk.pairs):
                if len(pair) == 1:
                    text += [f"v{j} = floats4(x{u}_{k}_{j}[0], x{u}_{k}_{j}[1])" for j in strips]
                for e, r in walk.live(u):
                    a = (step - e) % slots
                    for j in strips:
                        if len(pair) == 2:
                            product = f"multiply_diagonal(a{a}_{j}, x{u}_{k}_{j}, w{r}_{pair[0]} + w{r}_{pair[1]})"
                        else:
                            product = f"multiply_add(a{a}_{j}, v{j}, w{r}_{pair[0]})"
                        text.append(f"a{a}_{j} = {product}")
        return text

    def finish(step: int) -> list[str]:
        done = " + ".join(f"a{(step + 1) % slots}_{j}" for j in strips)
        inner = [f"y = results({done}, c, e)"]
        for j in strips:
            values = ", ".join(f"y[{4 * j + v}]" for v in range(4))
            inner.append(f"put_matrices(i32(to + i32({step * walk.line_out + j * strip})), {values})")
        return [f"if i32(i + i32({step})) >= 0:", *(f"    {line}" for line in inner)]

    out = [
        f"at = i32(ring + turn * i32({walk.slab}))",
        *(f"from{k} = i32(at + place{k})" for k in range(len(walk.pairs))),
        f"to = i32(mine + side * i32({walk.staging // 2}))",
        *read(0),
    ]
    nest = ""
    for step in range(slots):
        if step:
            out.append(f"{nest}if i32(i + i32({step})) < count:")
            nest += "    "
        text = multiply(step) + (read(step + 1) if step + 1 < slots else [])
        text += [*(["barrier_wait(i32(free + side * i32(8)), room)"] if step == 0 else []), *finish(step)]
        out += [nest + line for line in text]
    return out


def _store(walk: Walk) -> list[str]:
    """Text that has a slab's rows of results stored, by one thread of the warp."""
    out = [f"to = i32(staged + side * i32({walk.staging // 2}))"]
    for step in range(walk.slots):
        out += [
            f"if within(i32(i + i32({step})), i32(0), count) & i32(lane == i32(0)):",
            f"    store_box4(map_y, i32(to + i32({step * walk.line_out})), c0, q0, i32(p0 + i + i32({step})), n)",
        ]
    return out
