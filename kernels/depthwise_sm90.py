"""Depthwise convolution on Hopper: the tensor copy engine feeds sparse diagonal matrices on Tensor Cores.

A tap of the filter is an 8 by 8 matrix with 8 channels' weights on its diagonal. mma.sp multiplies by a matrix of whose every
four neighbours along K two are zero, in little more time than by half of it: one mma.sp.m16n8k32 is 4 taps of 8 neighbouring
pixels for two rows of y, one below the other, which see the same pixels through neighbouring rows of the filter. The pixels come
from shared memory: a matrix of 8 pixels by 8 channels is what ldmatrix reads, at any pixel, so that nothing is moved or masked.
What is no number in one channel (an infinity, NaN) makes NaN of the 8 channels that share a matrix with it, in both rows of y.

A block walks down its part of the rows of all images, `columns` pixels wide, of `channels` channels, in steps of two rows of y
each; narrow images lie side by side, so that no matrix has pixels to spare. They come in slabs of a few steps by boxes of a
tensor map, whose zeros outside the image are the padding, into a ring of buffers; with a stride of 2 even and odd columns come as
arrays of their own, of maps that step over two columns, so that pixels of a matrix are neighbours. One warp asks for slabs and
has results stored; each other warp has 8 channels, or twice 8, of a part of the columns. It reads each row once and multiplies it
for all pairs of rows of y that it belongs to. Results are rounded into boxes in shared memory. A warp that is done with a slab
says so and goes on to the next one; when all have, the slab's buffer is filled again and its results are stored.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from math import ceil, hypot

from tccompile.arch import KIB, Arch
from tccompile.ir.ops import Conv, Op
from tccompile.ir.program import Program
from tccompile.ir.tensor import Tensor
from tccompile.ir.types import DType
from tccompile.kernels import epilogue
from tccompile.kernels.codegen import divider
from tccompile.kernels.depthwise import filter_of, image
from tccompile.kernels.loops import refusal, vectors
from tccompile.kernels.spec import I32, Config, Launch, Ptr, TiledMap, Value, Work, code, memory_us, traffic_us
from tccompile.kernels.text import KernelText, TextKernel, intrinsic, parameters

WARPS = 8
"""That multiply, where a box's channels are shared out to so many; one more has rows copied and stored."""

SWIZZLED = (64, 32, 16)
"""Channels of a box whose pixels are twice as many bytes: what the copy engine swizzles. 16 are for images that have no more."""

MOST_CHANNELS = 256
"""Of a box of whole pixels. Their memory is one piece, where pieces of other pixels begin within lines of the L2 cache and end in
others, if their number is no multiple of 64: a copy of 56² by 144 takes 16.7 µs by whole pixels and 18.5 by 64 channels."""

EACH = (1, 2)
"""Vectors of 8 channels of whole pixels that a warp has."""

MOST_WARPS = 15
"""That multiply."""

STRIPS = (1, 2, 4, 7)
"""Parts of a row, of 8 pixels each, that a warp multiplies; and any number up to 7 that rows fill."""

SIDE_BY_SIDE = 8
"""Images, at most."""

STEPS = (2, 1, 4)
"""Of a slab: rows of y, two by two."""

STAGES = 6
"""Slabs of x that shared memory holds, at most."""

RESIDENT = (4, 3, 2, 1)
"""Blocks that a multiprocessor holds at once, which bound the registers."""

REGISTERS = 512
"""Of a quarter of a multiprocessor, for each lane; it holds every fourth warp."""

MOST_REGISTERS = 255
"""Of a thread."""

PATTERN = 8
"""Pixels after which a swizzle's pattern repeats, and the banks that a matrix with pixels of two images meets: rows are multiples
of them, so that they lie alike, and images side by side are so many further apart than they are wide."""

Tap = tuple[int, int]
"""A row of x in a step, and a column of the filter: with them a matrix of 8 pixels is multiplied."""


@dataclass(frozen=True)
class Walk:
    """A config: how a block's shared memory is laid out.

    taps, stride  of the filter, the same along both axes
    channels      of a box; strips, eights of columns that a warp has
    steps         of a slab, of two rows of y each
    blocks        on a multiprocessor
    images        side by side, whole rows of each; or 1 and any part of its columns
    each          vectors of 8 channels that a warp has
    width         pixels of an image in a row of a box
    """

    taps: int
    stride: int
    channels: int
    strips: int
    steps: int
    blocks: int
    images: int
    each: int
    width: int

    @property
    def rows(self) -> int:
        """Of x in a step."""
        return 2 * self.stride

    @property
    def reach(self) -> int:
        """Steps whose rows of x two rows of y see."""
        return -(-(self.stride + self.taps) // self.rows)

    @property
    def groups(self) -> int:
        """Of 8 channels."""
        return self.channels // 8

    @property
    def abreast(self) -> int:
        """Warps with the same columns."""
        return self.groups // self.each

    @property
    def along(self) -> int:
        """Warps with the same channels."""
        return max(1, WARPS // self.abreast)

    @property
    def warps(self) -> int:
        """That multiply."""
        return self.abreast * self.along

    @property
    def threads(self) -> int:
        return 32 * (self.warps + 1)

    @property
    def columns(self) -> int:
        return 8 * self.strips * self.along

    @property
    def window(self) -> int:
        """Columns of an image."""
        return self.columns // self.images

    @property
    def pixel(self) -> int:
        """Bytes."""
        return 2 * self.channels

    @property
    def swizzle(self) -> int:
        """Bytes, or 0 for none."""
        return self.pixel if self.channels in SWIZZLED else 0

    @property
    def line(self) -> int:
        """Bytes of a row of a box of x."""
        return self.images * self.width * self.pixel

    @property
    def copied(self) -> int:
        """Bytes of a box of x: of all columns, or of the even or odd ones."""
        return self.steps * self.rows * self.line

    @property
    def box(self) -> int:
        """Bytes from a box of x to the next one: they begin at multiples of 128."""
        return -(-self.copied // 128) * 128

    @property
    def slab(self) -> int:
        return self.stride * self.box

    @property
    def beyond(self) -> int:
        """Bytes behind the ring that are read for columns of the last row that the image does not have."""
        pixels = self.columns + (self.taps - 1) // self.stride - self.width if self.images == 1 else 0
        return -(-max(0, pixels) // PATTERN) * PATTERN * self.pixel

    @property
    def line_out(self) -> int:
        """Bytes of a row of results."""
        return self.columns * self.pixel

    @property
    def results(self) -> int:
        """Bytes of a slab's."""
        return self.steps * 2 * self.line_out

    def smem(self, stages: int) -> int:
        """Bytes to ask for: 1 KiB more than used, since swizzled boxes begin at multiples of it."""
        return stages * self.slab + self.beyond + 2 * self.results + 8 * (stages + 4) + KIB

    def stages(self, arch: Arch) -> int:
        """Buffers of the ring: as many as shared memory holds, at most 6; 0 if it does not hold two."""
        most = min(arch.smem_block, arch.smem_sm // self.blocks - KIB)
        return next((n for n in range(STAGES, 1, -1) if self.smem(n) <= most), 0)

    @property
    def products(self) -> list[tuple[Tap, ...]]:
        """A step's taps that one instruction multiplies: 4, or 2 in the end; of an odd number the last one is there twice."""
        taps = [(i, s) for i in range(self.rows) for s in range(self.taps)]
        found = [tuple(taps[at : at + 4]) for at in range(0, len(taps), 4)]
        return [*found[:-1], found[-1] + found[-1][-1:] * (len(found[-1]) % 2)]

    def weights(self, age: int, number: int) -> list[list[Tap | None]]:
        """For each of two rows of y, `age` steps after their first one: row and column of the filter of the product's taps.

        None where a row of y does not see the tap's row of x, or where the tap is there again.
        """
        taps = self.products[number]
        rows = [[(age * self.rows + i - y * self.stride, s) for i, s in taps] for y in (0, 1)]
        return [[w if 0 <= w[0] < self.taps and w not in row[:at] else None for at, w in enumerate(row)] for row in rows]

    def live(self, age: int) -> list[int]:
        """The products that the two rows of y which began `age` steps before have a part in."""
        return [k for k in range(len(self.products)) if any(w for row in self.weights(age, k) for w in row)]

    @property
    def spares(self) -> bool:
        """Whether rows of x are multiplied only for those rows of y that a block has: branches cost more if little is saved."""
        return self.steps == 1 and self.reach > 2

    @property
    def registers(self) -> int:
        """About what a thread needs: sums, weights, matrices of two strips, results of two, addresses."""
        weights = sum(len(self.products[k]) for age in range(self.reach) for k in self.live(age))
        matrices = min(self.strips * self.each, 2) * sum(map(len, self.products))
        apart = self.strips if self.images > 1 else 0
        return self.each * (4 * (self.reach - 1) * self.strips + weights) + matrices + apart + 22

    @property
    def most_registers(self) -> int:
        """What a thread may have."""
        return min(MOST_REGISTERS, REGISTERS // ceil(self.blocks * (self.warps + 1) / 4) // 8 * 8)


class DepthwiseSm90(TextKernel):
    """Conv with as many groups as input and output channels, NHWC, in fp16, by TMA and mma.sp, on sm_90a."""

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
        target = epilogue.describe(op, program, epilogue.frame_of(op, program)).form.y
        if target.shuffled or target.mode != "vector":
            return f"the channels of {y.name} do not lie in aligned vectors of 8, as the copy engine stores them"
        if loads := epilogue.loads_by_row(op, program):
            return f"its epilogue reads {loads[0].tensor.name} for each pixel"
        return None

    def configs(self, op: Op, program: Program, arch: Arch) -> Iterator[Config]:
        """The ones of least estimated cost, of equals those with fewer blocks on a multiprocessor."""
        found = [
            {"parts": parts, **{name: getattr(w, name) for name in CHOSEN}}
            for w in walks(op, program, arch)
            for parts in partitions(op, program, w, arch)
        ]
        yield from sorted(found, key=lambda config: (self.cost(op, program, config, arch), config["blocks"]))[:12]

    def cost(self, op: Op, program: Program, config: Config, arch: Arch) -> float:
        assert isinstance(op, Conv)
        walk, shares = walk_of(op, program, config), share(op, program, config, arch)
        clock = arch.fp32_tflops * 1e6 / 2 / 128 / arch.sms  # cycles of a microsecond
        # Cycles of a step: of a Tensor Core, which has a quarter of a block's warps, and of shared memory for all of them:
        # matrices read, results written and read, the rows' arrival; and of the copy engine for the pixels of the boxes.
        products = (PRODUCT[len(walk.products[k])] for age in range(walk.reach) for k in walk.live(age))
        tensor = walk.warps / 4 * walk.each * walk.strips * sum(products)
        lines = 8 // len({n * walk.groups % 8 for n in range(8)}) if not walk.swizzle else 1  # cycles that a matrix takes
        vectors = walk.warps * walk.each * walk.strips
        accesses = vectors * (sum(map(len, walk.products)) + 2) * lines + (walk.slab + walk.results) / walk.steps / 128
        pixels = walk.stride * walk.rows * walk.images * walk.width
        # A block's slabs come one after the other; what they take of a multiprocessor, they take from its other blocks too.
        together, stages = ceil(shares.blocks / arch.sms), walk.stages(arch)
        slabs, steps, all_steps = longest(shares.height, shares.strips, shares.parts, walk.reach, walk.steps, shares.skipped)
        pairs = ceil(shares.height * shares.strips / shares.parts)
        multiplied = pairs + PARTLY * (steps - pairs) if walk.spares else steps
        step_us = max(tensor, accesses) / clock
        computing = ceil(together / walk.blocks) * slabs * SLAB_US + together * multiplied * step_us
        copying = together * slabs * walk.steps * pixels * PIXEL / clock
        # Rows and columns that neighbours read too come from the L2 cache, mostly.
        x = program.tensors[op.x]
        along = (shares.across - 1) * (walk.width - walk.window) * walk.stride / image(x.shape)[3]
        down = all_steps / (shares.height * shares.strips) - 1
        straddling = STRADDLING if (walk.swizzle or walk.stride > 1) and 2 * x.strides[3] % 128 else 0
        moving = MOVING * (1 + straddling) * traffic_us(op, program, arch) + AGAIN * (down + along) * memory_us([x], arch)
        waiting = FIRST * walk.steps * step_us + REFILL_US * max(0, slabs - stages) / stages
        return START_US + waiting + hypot(computing, copying, moving)

    def work(self, op: Op, program: Program, config: Config, arch: Arch) -> Work:
        assert isinstance(op, Conv)
        w, y = program.tensors[op.w], program.tensors[op.y]
        walk, shares = walk_of(op, program, config), share(op, program, config, arch)
        stages = walk.stages(arch)
        if 0 in y.shape:
            return Work(())
        spec = epilogue.describe(op, program, epilogue.frame_of(op, program), 1)
        _, _, _, q = image(y.shape)
        x_maps, begins = inputs(op, program, walk)
        y_map = _map(y, y.padded[1], q, 0, 1, (walk.channels, walk.window, walk.images, 2), walk.swizzle)
        numbers = (
            *(shares.chunks, *divider(shares.chunks), *shares.rows, *divider(shares.parts)),
            *(shares.height, *divider(shares.height), shares.across, *divider(shares.across), q),
            *(shares.skipped, shares.ended, -op.pads[0]),
            *(begins[0], begins[-1], w.strides[2], w.strides[3], w.padded[0], y.padded[1]),
        )
        launch = Launch(
            code(
                self.name, **{name: getattr(walk, name) for name in PARAMS},
                stages=stages, constant=constant(op, program), epilogue=spec.params,
            ),
            grid=(shares.blocks, 1, 1),
            block=walk.threads,
            args=(*x_maps, y_map, Ptr(op.w), *map(I32, numbers), *spec.args),
            smem=walk.smem(stages),
        )  # fmt: skip
        return Work((launch,))

    def source(self, arch: Arch, **params: Value) -> KernelText:
        walk = Walk(*(params[name] for name in PARAMS))
        stored = epilogue.source(epilogue.Form.decoded(params["epilogue"]), 4, stores=False, keeps=True)
        assert stored.kept
        hopper = (
            "base", "uniform", "computed", "barrier_init", "barrier_arrive", "barrier_expect", "barrier_wait",
            "fence_barrier_init", "prefetch_map", "sync_warp", "wait_for_earlier_grids", "let_later_grids_start", "fence_copies",
            "copy_box4", "store_box4",
        )  # fmt: skip
        scope = {
            **{name: intrinsic(f"ptx.hopper.{name}") for name in hopper},
            "kept": stored.kept,
            "results": stored.function,
            "boxes_read": intrinsic("ptx.hopper.boxes_read", 0),
            "read_word": intrinsic("ptx.memory.load_words", 1, "global.nc" if params["constant"] else "global"),
            "take": intrinsic("ptx.mma.take", 1),
            "zeros": intrinsic("ptx.mma.zeros", 4),
            "put_turned": intrinsic("ptx.hopper.store_turned_x2"),
            **{f"matrices{n}": intrinsic("ptx.hopper.read_matrices", n) for n in (2, 4)},
            **{f"multiply{n}": intrinsic("ptx.mma.multiply_sparse", n) for n in (2, 4)},
        }
        signature = {
            **parameters("map", maps(walk)),
            "w": "address",
            **parameters("int", NUMBERS),
            "e": stored.kinds,
        }
        return KernelText(signature, lines(walk, params["stages"], params["constant"]), scope, walk.threads, walk.blocks)


NUMBERS = (
    "chunks, chunks_m, chunks_s, rows, more, parts_m, parts_s, P, P_m, P_s, across, across_m, across_s, Q, skipped, ended, top, "
    "begin0, begin1, wr, ws, padded, stored"
)

PRODUCT = {4: 10.7, 2: 8.4}
"""Cycles of a Tensor Core for an mma.sp of so many taps: measured on an H200, with 8 warps of a multiprocessor."""

# Fitted to the times of 2,900 configs of 65 layers on an H200.
SLAB_US = 0.04
"""What a slab takes a block beyond its steps."""

PARTLY = 0.3
"""Of a step's products, what those of a part's first and last rows take where they are not multiplied in full."""

PIXEL = 1.5
"""Cycles of the copy engine for a pixel of a box."""

MOVING = 0.61
"""Of the time that each tensor's bytes take once: a part of x is in the L2 cache, where the step before left it."""

STRADDLING = 0.2
"""More of it, for pieces of rows that begin within lines of the L2 cache: parts of pixels, or every second pixel."""

AGAIN = 0.2
"""Of the time that x takes, for what of it is read again."""

START_US, FIRST, REFILL_US = 1.6, 0.3, 0.6
"""A launch, the first rows' way in and the last results' way out; of the products' time of a slab, what the first one adds; and
the way in of rows that find no free buffer at first."""

CHOSEN = ("channels", "strips", "steps", "blocks", "images", "each")
"""Of a config, what the layout of shared memory depends on."""

PARAMS = ("taps", "stride", *CHOSEN, "width")
"""Of a walk."""


def walk_of(op: Op, program: Program, config: Config) -> Walk:
    assert isinstance(op, Conv)
    taps, chosen = filter_of(program.tensors[op.w])[0], {name: config[name] for name in CHOSEN}
    walk = Walk(taps=taps, stride=op.strides[0], width=0, **chosen)
    return replace(walk, width=width(walk, image(program.op_shape(op))[3]))


def width(walk: Walk, q: int) -> int:
    """Pixels that results of an image of q columns need of a row."""
    if walk.images > 1:
        return walk.window + PATTERN
    needed = min(walk.columns, q) + (walk.taps - 1) // walk.stride
    return -(-needed // PATTERN) * PATTERN if walk.swizzle else needed


def walks(op: Op, program: Program, arch: Arch) -> list[Walk]:
    """Those that fit: boxes hardly wider than the image, and the two largest numbers of blocks that there is room for."""
    assert isinstance(op, Conv)
    n, c, _, q = image(program.op_shape(op))
    stored = max(c, program.tensors[op.y].padded[1])
    widths = [(m, 1) for m in SWIZZLED if 16 < m < 2 * c] if c > 16 else [(16, 1)]
    if stored % 64 and stored not in SWIZZLED and stored <= MOST_CHANNELS:
        widths += [(stored, m) for m in EACH if stored // 8 % m == 0 and stored // 8 // m <= MOST_WARPS]
    strips, side_by_side = range(1, max(STRIPS) + 1), range(1, min(n, SIDE_BY_SIDE) + 1)
    found = []
    for (channels, each), strip, images, steps in product(widths, strips, side_by_side, STEPS):
        config = {"channels": channels, "strips": strip, "steps": steps, "images": images, "each": each}
        every = [walk_of(op, program, {**config, "blocks": blocks}) for blocks in RESIDENT]
        columns = every[0].columns
        narrow = images == 1 and strip in STRIPS and (strip == 1 or columns // 2 < q)
        if (images * q == columns or narrow) and every[0].width <= 256:
            found += [w for w in every if w.stages(arch) and w.registers <= w.most_registers][:2]
    return found


def constant(op: Conv, program: Program) -> bool:
    """Whether all that warps read by themselves, weights and what the epilogue adds, is the same in every run."""
    return all(program.tensors[name].storage in program.constants for name in (op.w, *(v.tensor for v in op.epilogue.loads)))


@dataclass(frozen=True)
class Share:
    """How images are shared out: `chunks` of channels, and of each as many `parts`, of which a block has one.

    A strip is an image's rows of y, two by two, of one of `across` parts of its columns, or those of images side by side;
    `height` is their number. Parts are of those of all strips, one strip below the other. The first steps of a strip that bring
    only rows above the image, `skipped`, are left out; its last one need not be multiplied if its rows are below, `ended`.
    """

    chunks: int
    parts: int
    across: int
    strips: int
    height: int
    skipped: int
    ended: int

    @property
    def blocks(self) -> int:
        return self.chunks * self.parts

    @property
    def rows(self) -> tuple[int, int]:
        """Of a part, two by two, and those left over: part b begins at b * rows + b * more // parts."""
        return divmod(self.strips * self.height, self.parts)


def share(op: Op, program: Program, config: Config, arch: Arch) -> Share:
    assert isinstance(op, Conv)
    walk, y = walk_of(op, program, config), program.tensors[op.y]
    n, c, p, q = image(y.shape)
    chunks, across, height = -(-max(c, y.padded[1]) // walk.channels), -(-q // walk.window), -(-p // 2)
    skipped = min(op.pads[0] // walk.rows, walk.reach - 1)
    last = (height + walk.reach - 2) * walk.rows - op.pads[0]  # the first row of x of a strip's last step
    ended = int(last >= program.tensors[op.x].shape[2])
    return Share(chunks, config["parts"], across, -(-n // walk.images) * across, height, skipped, ended)


def partitions(op: Op, program: Program, walk: Walk, arch: Arch) -> set[int]:
    """Numbers of parts: as many as there is room for, ones that end where strips do, and of few rows in whole slabs."""
    config = {"parts": 1, **{name: getattr(walk, name) for name in CHOSEN}}
    whole = share(op, program, config, arch)
    rows = whole.strips * whole.height
    most = max(1, min(rows, arch.sms * walk.blocks // whole.chunks))
    even = {whole.strips * min(most // whole.strips, whole.height), ceil(whole.strips / ceil(whole.strips / most))}
    short = {ceil(rows / (walk.steps * slabs + 1)) for slabs in range(4)}
    return {n for n in {most, *even, *short} if 0 < n <= most}


@cache
def longest(height: int, strips: int, parts: int, reach: int, steps_of_slab: int, skipped: int) -> tuple[int, int, int]:
    """The most slabs and steps of a part, and the steps of all of them."""
    rows, found = strips * height, []
    for part in range(parts):
        row, last = (b * rows // parts for b in (part, part + 1))
        slabs = steps = 0
        while row < last:
            end = min(last, row // height * height + height)
            its = end - row + reach - 1 - (0 if row % height else skipped)
            slabs, steps, row = slabs + -(-its // steps_of_slab), steps + its, end
        found.append((slabs, steps))
    return max(s for s, _ in found), max(s for _, s in found), sum(s for _, s in found)


# --- What the copy engine reads and writes -----------------------------------------------------------------------------


def _map(t: Tensor, channels: int, columns: int, first: int, step: int, box: tuple[int, ...], swizzle: int) -> TiledMap:
    """Of (channels, columns, images, rows): every `step`th column from `first` on. Rows of images side by side are neighbours."""
    extents = (channels, columns, t.shape[0], t.shape[2])
    apart = zip(extents[1:], (step * t.strides[3], t.strides[0], t.strides[2]), strict=True)
    strides = tuple(2 * s if n > 1 else 16 for n, s in apart)
    return TiledMap(t.name, 2 * first * t.strides[3], extents, strides, box, (1, 1, 1, 1), swizzle)


def inputs(op: Conv, program: Program, walk: Walk) -> tuple[list[TiledMap], list[int]]:
    """For each of a stride's columns from the first one that column 0 of y reads: its map, and where it begins there."""
    x, box = program.tensors[op.x], (walk.channels, walk.width, walk.images, walk.steps * walk.rows)
    found, begins = [], []
    for f in range(walk.stride):
        begin, parity = divmod(f - op.pads[1], walk.stride)
        columns = -(-(x.shape[3] - parity) // walk.stride)
        found.append(_map(x, x.shape[1], columns, parity, walk.stride, box, walk.swizzle))
        begins.append(begin)
    return found, begins


# --- The code --------------------------------------------------------------------------------------------------------


def maps(walk: Walk) -> str:
    """The parameters that are tensor maps."""
    return ", ".join([f"map{f}" for f in range(walk.stride)] + ["map_y"])


def lines(walk: Walk, stages: int, early: bool) -> list[str]:
    """The kernel's source. x, y: (N, H, W, C) by their maps, w: (R, S, C). early: weights do not wait for earlier grids.

    Shared memory: `stages` slabs [column mod stride][row][image][column][channel], then results [slab mod 2][row][image][column]
    [channel], then barriers: for each slab that its rows are there; for each half of the results that all warps are done with a
    slab, of which they have written them there; and for each half that they have been read.
    """
    return [
        "tid = i32(cuda.threadIdx.x)",
        "warp, lane = uniform(i32(tid >> i32(5))), tid & i32(31)",
        "ring = base()",
        f"staged = i32(ring + i32({stages * walk.slab + walk.beyond}))",
        f"full = i32(staged + i32({2 * walk.results}))",
        f"done, free = i32(full + i32({8 * stages})), i32(full + i32({8 * stages + 16}))",
        "if tid == 0:",
        *(f"    barrier_init(i32(full + i32({8 * s})), i32(1))" for s in range(stages)),
        *(f"    barrier_init(i32(done + i32({8 * s})), i32({walk.warps}))" for s in range(2)),
        *(f"    barrier_init(i32(free + i32({8 * s})), i32(1))" for s in range(2)),
        "    fence_barrier_init()",
        *(f"    prefetch_map({name})" for name in maps(walk).split(", ")),
        "cuda.syncthreads()",
        "block = i32(cuda.blockIdx.x)",
        "part = divide(block, chunks_m, chunks_s)",
        f"c0 = i32((block - part * chunks) * i32({walk.channels}))",
        "row = i32(part * rows + divide(i32(part * more), parts_m, parts_s))",
        "last = i32((part + i32(1)) * rows + divide(i32((part + i32(1)) * more), parts_m, parts_s))",
        f"if warp == i32({walk.warps}):",
        *_indented(_copying(walk, stages)),
        "else:",
        *([] if early else ["    wait_for_earlier_grids()"]),
        *_indented(_multiplying(walk, stages)),
    ]


ON = (
    "if side == i32(1):",
    "    round = i32(i32(1) - round)",
    "side = i32(i32(1) - side)",
    "turn = i32(turn + i32(1))",
    "if turn == i32({stages}):",
    "    turn, parity = i32(0), i32(i32(1) - parity)",
    "i = i32(i + i32({steps}))",
)
"""On to the next slab: its buffer and half of the results, and of each of them whether it is used for an even or odd time."""


def _walking(walk: Walk, stages: int, piece: list[str], slab: list[str]) -> list[str]:
    """Text that does `slab` for each of the block's slabs; i: the step, counted from the one that ends the piece's first rows."""
    on = [line.format(stages=stages, steps=walk.steps) for line in ON]
    return [
        "turn, parity, side, round = i32(0), i32(0), i32(0), i32(0)",
        "while row < last:",
        *_indented(_piece(walk, "row", "n", "p0", "q0", "count", "i") + piece),
        "    while i < count:",
        *_indented(_indented(slab + on)),
        "    row = i32(row + count)",
    ]


def _indented(text: list[str]) -> list[str]:
    return [f"    {line}" for line in text]


def _copying(walk: Walk, stages: int) -> list[str]:
    """Text of the warp that has slabs copied and results stored."""
    find = [
        *_piece(walk, "ahead", "its_n", "its_row", "its_column", "its_count", "its_step"),
        "its_step = i32(its_step + asked)",
        f"its_row = i32(i32(its_row + its_step + i32({walk.reach - 1})) * i32({walk.rows}) + top)",  # of x
    ]
    ask = [
        "if ahead < last:",
        f"    barrier, at = i32(full + turn * i32(8)), i32(ring + turn * i32({walk.slab}))",
        "    if lane == 0:",
        f"        barrier_expect(barrier, i32({walk.stride * walk.copied}))",
        *(
            f"        copy_box4(i32(at + i32({f * walk.box})), map{f}, barrier, c0, i32(its_column + begin{f}), its_n, its_row)"
            for f in range(walk.stride)
        ),
        f"    asked = i32(asked + i32({walk.steps}))",
        f"    if i32(its_step + i32({walk.steps})) >= its_count:",
        "        ahead, asked = i32(ahead + its_count), i32(0)",
        *_indented(find),
    ]
    store = []
    for step in range(walk.steps):
        store += [
            f"if within(i32(i + i32({step})), i32(0), count):",
            f"    y_row = i32(i32(p0 + i + i32({step})) * i32(2))",
            f"    store_box4(map_y, i32(to + i32({2 * step * walk.line_out})), c0, q0, n, y_row)",
        ]
    slab = [
        "barrier_wait(i32(done + side * i32(8)), round)",
        *ask,
        "if lane == 0:",
        f"    to = i32(staged + side * i32({walk.results}))",
        *_indented(store),
        # They must have been read before others come to their place, which may be another block's shared memory.
        "    boxes_read()",
        "    barrier_arrive(i32(free + side * i32(8)))",
    ]
    return [
        "ahead, asked, turn = row, i32(0), i32(0)",  # the slab to come: from which row on, and how many of its steps came
        *find,
        "wait_for_earlier_grids()",
        "let_later_grids_start()",
        f"while turn < i32({stages}):",
        *_indented(ask),
        "    turn = i32(turn + i32(1))",
        *_walking(walk, stages, [], slab),
    ]


def _multiplying(walk: Walk, stages: int) -> list[str]:
    """Text of the others."""
    piece = [
        f"column = i32(q0 + along * i32({8 * walk.strips}))",
        f"active = within(i32(c0 + group * i32(8)), i32(0), stored) & within(column, i32(0), {_width(walk)})",
        "empty = select(i32(p0 + count) == P, ended, i32(0))",
        *(f"s{v}_{age}_{j} = zeros()" for v in range(walk.each) for age in range(walk.reach - 1) for j in range(walk.strips)),
    ]
    slab = [
        "barrier_wait(i32(full + turn * i32(8)), parity)",
        "if active:",
        *_indented(_steps(walk)),
        "else:",
        "    barrier_wait(i32(free + side * i32(8)), i32(i32(1) - round))",
        "fence_copies()",
        "sync_warp()",
        "if lane == 0:",
        "    barrier_arrive(i32(done + side * i32(8)))",
    ]
    further = [f"i32(warp >= i32({m * walk.abreast}))" for m in range(1, walk.along)]
    return [
        f"along = i32({' + '.join(further) or 'i32(0)'})",
        f"group = i32(warp - along * i32({walk.abreast}))",
        *_weights(walk),
        *_places(walk),
        *_walking(walk, stages, piece, slab),
    ]


def _piece(walk: Walk, number: str, n: str, row: str, column: str, count: str, first: str) -> list[str]:
    """Text for what a part has of a strip from a row on: image, first row and column of y, rows, and the row that step 0 ends."""
    return [
        f"strip = divide({number}, P_m, P_s)",
        f"{row} = i32({number} - strip * P)",
        f"{n} = divide(strip, across_m, across_s)",
        f"{column} = i32(i32(strip - {n} * across) * i32({walk.window}))",
        *([f"{n} = i32({n} * i32({walk.images}))"] if walk.images > 1 else []),
        f"{count} = i32(min(i32(P - {row}), i32(last - {number})))",
        f"{first} = i32(select({row} == i32(0), skipped, i32(0)) - i32({walk.reach - 1}))",
    ]


def _weights(walk: Walk) -> list[str]:
    """The lane's words of the sparse matrices of weights, w{vector}_{age}_{product}; `which` of every four neighbours they are.

    Of lane (g, t) of 8 × 4 words 0 and 2 belong to channel g for the first row of y, 1 and 3 for the second one; 0 and 1 to the
    product's first two taps, 2 and 3 to the others (PTX ISA, "Matrix fragments for sparse mma.m16n8k32"). Of two taps it has
    neighbours 0 and 1 or else 2 and 3 of the channels from 4 · (t mod 2) on of tap t / 2: the weight, and a zero beside it.
    """
    out = [
        "g, t = lane >> i32(2), lane & i32(3)",
        "own = select(g & i32(1) == i32(0), i32(0xffff), i32(-0x10000))",
        "own = select(t & i32(1) == g >> i32(2), own, i32(0))",
        "which = select(g & i32(2) == i32(0), i32(0x44444444), i32(-0x11111112))",
    ]
    for v in range(walk.each):
        out += [
            f"channel{v} = computed(i32(c0 + i32(group + i32({v * walk.abreast})) * i32(8) + g))",
            f"inside = within(channel{v}, i32(0), padded)",
            f"filters = w + i64(channel{v} & i32(-2)) * i64(2)",
        ]
        for age in range(walk.reach):
            for k in walk.live(age):
                words: list[str] = []
                for pair in range(0, len(walk.products[k]), 2):
                    for row in walk.weights(age, k):
                        words.append(f"w{v}_{age}_{k}_{len(words)}")
                        out += _word(words[-1], row[pair : pair + 2])
                out.append(f"w{v}_{age}_{k} = " + " + ".join(words))
    return [*out, *(f"read{v} = kept(channel{v}, e)" for v in range(walk.each))]


def _word(name: str, taps: list[Tap | None]) -> list[str]:
    """Text for the word of a tap of the filter, of lanes with t < 2, or of another one, where there are such."""
    places = [f"i32(i32(i32({tap[0]}) * wr) + i32(i32({tap[1]}) * ws))" if tap else "i32(0)" for tap in taps]
    there = ["inside" if tap else "i32(0)" for tap in taps]
    place, ok = (f"select(t < i32(2), {near}, {far})" if near != far else near for near, far in (places, there))
    return [f"{name} = take(read_word(filters + i64({place}) * i64(2), {ok}), own, own)"]


def _width(walk: Walk) -> str:
    """Text for the columns of y that a block's rows have."""
    return f"i32({walk.columns})" if walk.images > 1 else "Q"


def _place(walk: Walk, pixel: str) -> str:
    """Text for the byte of the warp's first channels in a pixel of a row."""
    if not walk.swizzle:
        return f"i32(i32({pixel} * i32({walk.pixel})) + i32(group << i32(4)))"
    shift = {64: 0, 32: 1, 16: 2}[walk.channels]
    key = f"({pixel} >> i32({shift})) & i32({walk.groups - 1})"
    return f"i32(i32({pixel} * i32({walk.pixel})) + i32(i32(group ^ i32({key})) << i32(4)))"


def _places(walk: Walk) -> list[str]:
    """Where a lane reads its row of a product's matrices, from a slab's first byte on, and writes its row of results.

    Lanes 8m to 8m + 7 have the 8 pixels of matrix m: of a tap, or of the first or second row of y. Those of other images than a
    row's first one lie further on: apart{strip} bytes.
    """

    def pick(each: list[int]) -> str:
        text = f"i32({each[-1]})"
        for m in reversed(range(len(each) - 1)):
            text = f"select(matrix == i32({m}), i32({each[m]}), {text})" if len(set(each[m:])) > 1 else text
        return text

    out = [f"matrix, first = lane >> i32(3), i32((lane & i32(7)) + along * i32({8 * walk.strips}))"]
    for k, taps in enumerate(walk.products):
        out += [
            f"pixel = i32(first + {pick([s // walk.stride for _, s in taps])})",
            f"row_of_box = {pick([i * walk.line + s % walk.stride * walk.box for i, s in taps])}",
            f"place{k} = computed(i32(row_of_box + {_place(walk, 'pixel')}))",
        ]
    for j in range(walk.strips if walk.images > 1 else 0):
        before = [f"i32(first >= i32({m * walk.window - 8 * j}))" for m in range(1, walk.images)]
        out.append(f"apart{j} = computed(i32(i32({' + '.join(before)}) * i32({PATTERN * walk.pixel})))")
    return [*out, f"mine = computed(i32(i32(staged + {pick([0, walk.line_out])}) + {_place(walk, 'first')}))"]


def _steps(walk: Walk) -> list[str]:
    """Text for the steps of a slab: a strip's matrices are read before those of the strip before are multiplied, and its results
    are rounded after those of the next strip have been multiplied.

    Of a slab of one step, a part's first and last rows may be multiplied only for the rows of y that it has (`Walk.spares`).
    """
    last = walk.reach - 1
    free = "barrier_wait(i32(free + side * i32(8)), i32(i32(1) - round))"
    # Vectors of channels of a strip, in turn.
    parts = [(v, j) for j in range(walk.strips) for v in range(walk.each)]

    def place(v: int, j: int) -> int:
        """Byte of a part in a row."""
        return 8 * j * walk.pixel + 16 * v * walk.abreast

    def read(step: int, at: int) -> list[str]:
        if at == len(parts):
            return []
        (v, j), text = parts[at], []
        for k, taps in enumerate(walk.products):
            lane = f"i32(from{k} + apart{j})" if walk.images > 1 else f"from{k}"
            text.append(f"x{k}_{at} = matrices{len(taps)}(i32({lane} + i32({step * walk.rows * walk.line + place(v, j)})))")
        return text

    def multiply(at: int, ages: range) -> list[str]:
        v, j = parts[at]
        text = [] if ages else [f"d{at} = s{v}_{last - 1}_{j}"]
        for age in reversed(ages):
            before = f"s{v}_{age - 1}_{j}" if age else "zeros()"
            after = f"d{at}" if age == last else f"s{v}_{age}_{j}"
            for k in walk.live(age):
                text.append(f"{after} = multiply{len(walk.products[k])}({before}, w{v}_{age}_{k}, x{k}_{at}, which)")
                before = after
        return text

    def finish(step: int, at: int) -> list[str]:
        v, j = parts[at]
        put = f"put_turned(i32(to + i32({2 * step * walk.line_out + place(v, j)})), y[0], y[1], y[2], y[3])"
        return [f"y = results(d{at}, read{v}, channel{v}, e)", put]

    def whole(step: int, ages: range, ends: str | None = None) -> list[str]:
        """A step whose first matrices have been read, for rows of y of those ages; `ends`: whether its results are to be kept."""
        text = []
        for at in range(len(parts) + 1):
            if at < len(parts):
                text += (read(step, at + 1) if ages else []) + multiply(at, ages)
                text += [free] if step == at == 0 else []
            if at and (not ages or last in ages):
                text += [f"if {ends}:", *_indented(finish(step, at - 1))] if ends else finish(step, at - 1)
        return text

    out = [
        f"at = i32(ring + turn * i32({walk.slab}))",
        *(f"from{k} = i32(at + place{k})" for k in range(len(walk.products))),
        f"to = i32(mine + side * i32({walk.results}))",
    ]
    if walk.spares:
        out += [*read(0, 0), "left = i32(count - i)", "if left <= empty:", *_indented(whole(0, range(0)))]
        for age in range(last):
            out += [f"elif i == i32({age - last}):", *_indented(whole(0, range(age + 1)))]
        for age in range(last, 0, -1):
            out += [f"elif left == i32({last - age + 1}):", *_indented(whole(0, range(age, last + 1)))]
        return [*out, "else:", *_indented(whole(0, range(walk.reach)))]
    nest = ""
    for step in range(walk.steps):
        if step:
            out.append(f"{nest}if i32(i + i32({step})) < count:")
            nest += "    "
        text = read(step, 0) + whole(step, range(walk.reach), f"i32(i + i32({step})) >= 0")
        out += [nest + line for line in text]
    return out
