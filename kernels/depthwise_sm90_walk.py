"""How the blocks of depthwise_sm90.py's kernel go through images: configs, shared memory, and who has which rows."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache, cached_property
from itertools import product

from tccompile.arch import KIB, Arch, Feature
from tccompile.ir.extent import Extent, ceil_div, round_up
from tccompile.ir.ops import Conv, Op
from tccompile.ir.program import Program
from tccompile.ir.types import DType
from tccompile.kernels.depthwise import filter_of, image
from tccompile.kernels.remembered import remembered
from tccompile.kernels.spec import Config

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

    @cached_property
    def reach(self) -> int:
        """Steps whose rows of x two rows of y see."""
        return ceil_div(self.stride + self.taps, self.rows)

    @property
    def groups(self) -> int:
        """Of 8 channels."""
        return self.channels // 8

    @cached_property
    def abreast(self) -> int:
        """Warps with the same columns."""
        return self.groups // self.each

    @cached_property
    def along(self) -> int:
        """Warps with the same channels."""
        return max(1, WARPS // self.abreast)

    @cached_property
    def warps(self) -> int:
        """That multiply."""
        return self.abreast * self.along

    @property
    def threads(self) -> int:
        return 32 * (self.warps + 1)

    @cached_property
    def columns(self) -> int:
        return 8 * self.strips * self.along

    @property
    def window(self) -> int:
        """Columns of an image."""
        return self.columns // self.images

    @property
    def pixel(self) -> int:
        """Bytes."""
        return DType.F16.size * self.channels

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

    @cached_property
    def box(self) -> int:
        """Bytes from a box of x to the next one: they begin at multiples of 128."""
        return round_up(self.copied, 128)

    @property
    def slab(self) -> int:
        return self.stride * self.box

    @cached_property
    def beyond(self) -> int:
        """Bytes behind the ring that are read for columns of the last row that the image does not have."""
        pixels = self.columns + (self.taps - 1) // self.stride - self.width if self.images == 1 else 0
        return round_up(max(0, pixels), PATTERN) * self.pixel

    @property
    def line_out(self) -> int:
        """Bytes of a row of results."""
        return self.columns * self.pixel

    @cached_property
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

    @cached_property
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
        return self._live[age]

    @cached_property
    def _live(self) -> list[list[int]]:
        numbers = range(len(self.products))
        return [[k for k in numbers if any(w for row in self.weights(age, k) for w in row)] for age in range(self.reach)]

    @property
    def spares(self) -> bool:
        """Whether rows of x are multiplied only for those rows of y that a block has: branches cost more if little is saved."""
        return self.steps == 1 and self.reach > 2

    @cached_property
    def registers(self) -> int:
        """About what a thread needs: sums, weights, matrices of two strips, results of two, addresses."""
        weights = sum(len(self.products[k]) for age in range(self.reach) for k in self.live(age))
        matrices = min(self.strips * self.each, 2) * sum(map(len, self.products))
        apart = self.strips if self.images > 1 else 0
        return self.each * (4 * (self.reach - 1) * self.strips + weights) + matrices + apart + 22

    @property
    def most_registers(self) -> int:
        """What a thread may have."""
        return min(MOST_REGISTERS, REGISTERS // ceil_div(self.blocks * (self.warps + 1), 4) // 8 * 8)


CHOSEN = ("channels", "strips", "steps", "blocks", "images", "each")
"""Of a config, what the layout of shared memory depends on."""

PARAMS = ("taps", "stride", *CHOSEN, "width")
"""Of a walk."""


def elsewhere(arch: Arch) -> str | None:
    """Why kernels with such blocks do not run on a generation; None if they do."""
    if not arch.has(Feature.TENSOR_COPIES):
        return f"{arch.name} has no tensor copy engine"
    if arch.name != "sm_90a":
        return f"{arch.name}: the kernel's tiles are made for sm_90a, its shared memory and its registers"
    return None


def walk_of(op: Op, program: Program, config: Config) -> Walk:
    assert isinstance(op, Conv)
    taps, q = filter_of(program.tensors[op.w])[0], image(program.op_shape(op))[3]
    made = _walk_of if isinstance(q, int) else _walk_of.__wrapped__
    return made(taps, op.strides[0], q, *[config[name] for name in CHOSEN])


@cache  # also since a walk remembers what was computed of it
def _walk_of(taps: int, stride: int, q: Extent, *chosen: int) -> Walk:
    walk = Walk(taps=taps, stride=stride, width=0, **dict(zip(CHOSEN, chosen, strict=True)))
    return replace(walk, width=width(walk, q))


def width(walk: Walk, q: int) -> int:
    """Pixels that results of an image of q columns need of a row."""
    if walk.images > 1:
        return walk.window + PATTERN
    needed = min(walk.columns, q) + (walk.taps - 1) // walk.stride
    return round_up(needed, PATTERN) if walk.swizzle else needed


@remembered
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
    chunks, across, height = ceil_div(max(c, y.padded[1]), walk.channels), ceil_div(q, walk.window), ceil_div(p, 2)
    skipped = min(op.pads[0] // walk.rows, walk.reach - 1)
    last = (height + walk.reach - 2) * walk.rows - op.pads[0]  # the first row of x of a strip's last step
    ended = int(last >= program.tensors[op.x].shape[2])
    return Share(chunks, config["parts"], across, ceil_div(n, walk.images) * across, height, skipped, ended)


def partitions(op: Op, program: Program, walk: Walk, arch: Arch) -> set[int]:
    """Numbers of parts: as many as there is room for, ones that end where strips do, and of few rows in whole slabs."""
    config = {"parts": 1, **{name: getattr(walk, name) for name in CHOSEN}}
    whole = share(op, program, config, arch)
    rows = whole.strips * whole.height
    most = max(1, min(rows, arch.sms * walk.blocks // whole.chunks))
    even = {whole.strips * min(most // whole.strips, whole.height), ceil_div(whole.strips, ceil_div(whole.strips, most))}
    short = {ceil_div(rows, walk.steps * slabs + 1) for slabs in range(4)}
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
            slabs, steps, row = slabs + ceil_div(its, steps_of_slab), steps + its, end
        found.append((slabs, steps))
    return max(s for s, _ in found), max(s for _, s in found), sum(s for _, s in found)
