"""Convolution on Hopper from patches of the image: each pixel is copied once for all taps of the filter that read it.

By im2col (gemm_sm90) a pixel comes from the L2 cache once for every tap, and where a convolution has few output channels that is
what bounds it. Here a block's tile is a rectangle of output pixels, and what it needs of the image, 64 channels of the rectangle
and the halo around it, is one box in shared memory. wgmma takes 64 pixels as 8 rows of 8: a row of 8 pixels is a group of its
left operand, and the next row of the image is the next group. So a tap is the same matrix from another address, by some rows and
pixels further on: swizzles follow addresses, and lie the same way wherever a matrix begins. The weights of a block's output
channels stay in shared memory for all of its tiles, and are copied while the launches before this one still run.

All of this is counted in bytes of the channels: 64 halves are 128 bytes, which hold 128 integers of 8 bits. Boxes of so few bytes
that half of a row would be empty have rows of 64.

A block has two warpgroups or more, each with a tile of its own: while one stores its results, others multiply. One thread of a
further warp has boxes copied, a tile's 64 channels after the other, into the rings of buffers that the warpgroups have; two
barriers of each buffer say when it is full, and when it has been read.

Sums of floats of 8 bits are rough on Tensor Cores. So those of a row of the filter, or of a tap, are made by themselves and added
to the others in float32, while the other warpgroup multiplies.

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
from typing import Any

from tccompile.arch import KIB, Arch
from tccompile.ir.extent import Extent, Shape, ceil_div, divides, least, round_up
from tccompile.ir.ops import Conv, Op
from tccompile.ir.program import Program
from tccompile.ir.tensor import Tensor
from tccompile.ir.types import FLOAT8, DType
from tccompile.kernels import epilogue
from tccompile.kernels.gemm_sm90_cost import slots_of
from tccompile.kernels.implicit_gemm import OPERANDS, Problem, describe, unfit
from tccompile.kernels.loops import entry, refusal
from tccompile.kernels.parts import image_order
from tccompile.kernels.parts.layout import Region, SharedLayout, barriers, ring_barriers
from tccompile.kernels.parts.maps import image_map, may_move, unmapped
from tccompile.kernels.parts.operands import ROW, STEP, UNIT
from tccompile.kernels.parts.staging import BOXES, BYTES, RESULT, Staging
from tccompile.kernels.ptx.atoms import BITS, group_atom, of_warpgroups
from tccompile.kernels.rates import measured
from tccompile.kernels.rates.rate import ConvHalo as Rated
from tccompile.kernels.spec import I32, Config, Function, Kernel, Launch, TiledMap, Value, Work, code, traffic_us

TYPES = (DType.F16, DType.BF16, DType.I8, DType.U8, *FLOAT8)
"""Of the image and the weights: both are halves, both integers of 8 bits, or both floats of 8 bits."""

SIDE = 8
"""Pixels along both sides of what one wgmma takes."""

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

MOST_ROUGH = 6
"""Products of 32 bytes of floats of 8 bits whose sums are made at once: a row of the filter's where there are no more, else a
tap's. Tensor Cores cut these sums off after 14 digits."""

MOST_ROUGH_OF_BYTES = 8
"""The same where results have 8 bits: of two taps', where a row's are more. See `gemm_sm90_tile.AT_ONCE`."""

LEAST, MOST = 16, 192
"""Input channels. With 256, im2col took 0.55 to 0.98 of the time in five of six convolutions (H200); why has not been found."""

MOST_STAGES = 4

GROUPS = 2
"""Warpgroups that multiply, each a tile of its own."""

MORE_GROUPS = {3: 64, 4: 32}
"""The same of numbers of 8 bits, which are multiplied in less time than results take, or than floats' sums are waited for: more
warps round at once, or multiply meanwhile. And the accumulators that there are registers for, of a thread; half as many of rough
sums, which it has twice."""

GROUP = 128
"""Threads of a warpgroup."""


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
    kinds           PTX's types of the elements of the image and of the weights, which have the same size
    result          bytes of a result in a box
    groups          warpgroups that multiply
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
    kinds: tuple[str, str] = ("f16", "f16")
    result: int = RESULT
    groups: int = GROUPS

    @property
    def warps(self) -> int:
        """That multiply."""
        return 4 * self.groups

    @property
    def threads(self) -> int:
        return 32 * (self.warps + 1)

    @property
    def size(self) -> int:
        """Bytes of an element of the image and the weights."""
        return BITS[self.kinds[0]] // 8

    @property
    def row(self) -> int:
        """Bytes of a pixel in a box, as swizzles take them: of halves always 128, the widest one."""
        return ROW // 2 if self.size * self.channels <= ROW // 2 and self.size < 2 else ROW

    @property
    def depth(self) -> int:
        """Channels of a box."""
        return self.row // self.size

    @property
    def pixels(self) -> int:
        """Of a tile."""
        return self.across * self.down

    @property
    def blocks(self) -> int:
        """Products of 64 pixels."""
        return ceil_div(self.pitch * self.rows if self.spread else self.pixels, SIDE**2)

    @property
    def places(self) -> tuple[tuple[int, int], ...]:
        """The first column and row in a tile of each of these, where they are squares of a tile's pixels."""
        return tuple((n % (self.across // SIDE) * SIDE, n // (self.across // SIDE) * SIDE) for n in range(self.blocks))

    @property
    def wide(self) -> int:
        """Columns of a product."""
        return round_up(self.taps * self.columns, 8) if self.spread else self.columns

    @property
    def most(self) -> int:
        """Accumulators that a thread may have."""
        if self.spread or not self.boxed:
            return MOST_SPREAD if self.spread else MOST_STORED
        more = MORE_GROUPS.get(self.groups)
        return MOST_BOXED if more is None else more // 2 if self.rough else more

    @property
    def chunks(self) -> int:
        """Boxes of channels."""
        return ceil_div(self.channels, self.depth)

    @property
    def taps(self) -> int:
        return self.height * self.width

    @property
    def rough(self) -> bool:
        """Whether sums of few products are added up: see `MOST_ROUGH`."""
        return group_atom(*self.kinds).rough

    def rounds(self, products: int) -> tuple[int, int]:
        """How often these sums are made of a box that is so many products deep, along the filter's rows and down."""
        if self.spread:
            return 1, 1
        return 1 if products * self.width <= MOST_ROUGH else self.width, self.height

    def in_pairs(self, products: int) -> bool:
        """Whether those of two taps are made at once."""
        of_taps = self.rounds(products)[0] == self.width > 1
        return of_taps and self.result < RESULT and 2 * products <= MOST_ROUGH_OF_BYTES

    @property
    def last(self) -> int:
        """Products of 32 bytes in the last box of channels; `whole`, in those before."""
        return ceil_div(self.size * (self.channels - (self.chunks - 1) * self.depth), STEP)

    @property
    def whole(self) -> int:
        return self.row // STEP

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
        return self.pitch * self.rows * self.row

    @property
    def slot(self) -> int:
        """Bytes of a buffer, all that products read: swizzles repeat after 1 KiB."""
        return self.blocks * SIDE**2 * self.row if self.spread else round_up(self.box, KIB)

    @property
    def tap(self) -> int:
        """Bytes of a tap's weights, of a box of channels."""
        return self.columns * self.row

    @property
    def filters(self) -> int:
        """Bytes of all taps' weights, of a box of channels."""
        return self.wide * self.row if self.spread else self.taps * self.tap

    @property
    def weights(self) -> int:
        """Bytes of all."""
        return self.chunks * self.filters

    @property
    def line(self) -> int:
        """Bytes of a pixel in a box of results."""
        return self.result * self.columns

    @property
    def box_out(self) -> int:
        """Bytes of a box of results: 16 pixels."""
        return 16 * self.line

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
            Region("ring", self.groups * stages * self.slot, KIB),
            Region("results", self.warps * self.staged),
            barriers("weights full", self.chunks),
            *ring_barriers("ring", self.groups * stages),
            barriers("landed", self.warps if self.added else 0),
        )

    def smem(self, stages: int) -> int:
        """Bytes to ask for in a launch."""
        return self.layout(stages).smem

    def stages(self, arch: Arch) -> int:
        """Buffers of a warpgroup's ring, at most `MOST_STAGES`; 0 if there is no room for two."""
        return next((n for n in range(min(MOST_STAGES, self.chunks + 1), 1, -1) if self.smem(n) <= arch.smem_block), 0)


class ConvHalo(Kernel):
    """Conv with stride 1 and a filter of several taps, of an image of halves or bytes in NHWC, by TMA and wgmma."""

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
        if reason := unfit(problem, TYPES):
            return reason
        if problem.integers and not is_boxed(op, program):
            return f"{y.name}, with what is added to it, is not stored by the copy engine; sums of integers leave no other way"
        if reason := unmapped((x, w), program):
            return reason
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
        of_8_bits = boxed and program.tensors[op.x].dtype.size == 1
        crowded = [{**config, "groups": groups} for config in tiled for groups in MORE_GROUPS] if of_8_bits else []
        for config in [*tiled, *crowded, *spread]:
            patch = patch_of(op, program, config)
            short = boxed or patch.blocks == 1 or len(steps(patch, patch.whole if patch.chunks > 1 else patch.last)) <= MOST_STEPS
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
        cycles, narrow = measured(arch).cycles_us, float(own.narrow if patch.boxed else own.narrow_stored)
        multiplying = sum(
            chunks * _multiplying_cycles(patch, products, max(patch.wide, narrow), own) / cycles
            for products, chunks in ((patch.whole, patch.chunks - 1), (patch.last, 1))
        )
        copying = (
            patch.pitch * patch.rows * (own.copying * patch.chunks + (own.beyond if patch.channels % patch.depth else 0)) / cycles
        )
        accesses = 0 if patch.boxed else 1 + len(epilogue.loads_by_row(op, program))
        # Parts to shared memory, and back: a warp's pixels, of two rows and more, meet in some banks.
        adding = (patch.wide * patch.parts + 2 * patch.taps * patch.columns * 4 * patch.pixels) / 128 if patch.spread else 0
        bytes_ = own.storing_bytes * patch.pixels / SIDE**2 * patch.columns if patch.result < RESULT else 0
        storing = (
            adding
            + bytes_
            + slots_of(op.epilogue.expr, program.tensors[op.y].dtype, arch) * patch.pixels * patch.columns / 128
            + patch.pixels / SIDE**2 * patch.columns * (own.shuffling if op.epilogue.shuffle > 1 else own.storing) * accesses
        ) / cycles
        computing = each * max((multiplying + storing) * own.of_groups[patch.groups], copying) + patch.weights / own.weights
        if patch.size * patch.channels <= UNIT and not patch.spread:
            computing += patch.taps * patch.columns * own.short_row / cycles
        if each == 1:  # its results are those of one warpgroup, and nothing is multiplied meanwhile
            computing += own.alone_us * patch.pixels * patch.columns / 1000
        moving = traffic_us(op, program, arch)
        return own.start_us + max(computing, moving) + own.exposed * min(computing, moving)

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
        maps = [
            image_map(x, problem.channels, (patch.depth, patch.pitch, patch.rows, 1), patch.row),
            _map_weights(problem, patch),
        ]
        if patch.boxed:
            swizzle = patch.line if patch.line > UNIT else 0
            maps.append(image_map(y, y.padded[1], results, swizzle))
            maps += [_map_added(load, y, results, swizzle) for load in epilogue.loads_by_row(op, program)]
        numbers = (
            *(*image_order.numbers(n, down, across, shares), *op.pads[:2]),
            *(problem.padded, *problem.pixels[1 : 2 if patch.boxed else 3]),
        )
        stages = patch.stages(arch)
        launch = Launch(
            code(
                self.name, across=patch.across, down=patch.down, columns=patch.columns, height=patch.height, width=patch.width,
                channels=patch.channels, boxed=patch.boxed, added=patch.added, spread=patch.spread, kinds=patch.kinds,
                result=patch.result, groups=patch.groups, stages=stages, constant=w.storage in program.constants,
                epilogue=spec.params,
            ),
            grid=(shares * least(tiles, arch.sms // shares), 1, 1),
            block=patch.threads,
            args=(*maps, *map(I32, numbers), *spec.args),
            # No multiprocessor has room for two: of launches that start early it would take two where one of the grid before
            # has ended, and leave others without one.
            smem=max(patch.smem(stages), arch.smem_sm // 2),
        )  # fmt: skip
        return Work((launch,))

    def build(self, arch: Arch, **params: Value) -> Function:
        patch = Patch(*(params[field.name] for field in fields(Patch)))
        return _function(patch, params["stages"], params["constant"], params["epilogue"])


def _multiplying_cycles(patch: Patch, products: int, columns: float, own: Rated) -> float:
    """Of a box of channels that is so many products deep."""
    cycles = patch.blocks * products * (1 if patch.spread else patch.taps) * columns * own.multiplying
    if not patch.rough:
        return cycles
    along, down = patch.rounds(products)
    rounds = ceil_div(along * down, 2) if patch.in_pairs(products) else along * down
    waiting = rounds * (patch.wide / 2 + own.rough)  # while one warpgroup waits and adds, others multiply
    return max(cycles, (cycles + waiting) / patch.groups)


def columns_of(boxed: bool) -> tuple[int, ...]:
    """Those of `COLUMNS` that a block may have."""
    return COLUMNS[1:] if boxed else COLUMNS


def is_boxed(op: Conv, program: Program) -> bool:
    """Whether the copy engine can store y, and read what is added to it: one tensor at most, in vectors of 8 channels, or a part
    of one. Both are of halves, or both of 8 bits."""
    y, loads = program.tensors[op.y], epilogue.loads_by_row(op, program)
    target = epilogue.describe(op, program, epilogue.frame_of(op, program)).form.y
    if target.shuffled or target.mode != "vector" or target.rows == "general" or len(loads) > 1:
        return False
    apart = [n for load in loads for n in _bytes_apart(load, program.op_shape(op))]
    if not all(load.vector for load in loads) or any(n <= 0 or not divides(UNIT, n) for n in apart):
        return False
    boxes = y, *(load.tensor for load in loads)
    if any(t.rank != y.rank for t in boxes):  # a constant for each pixel, which zero points of padded images make
        return False
    if any(may_move(t, program) or t.dtype.size * n % UNIT for t in boxes for n in (t.strides[3], t.padded[1])):
        return False
    return any(all(t.dtype in kinds for t in boxes) for kinds in ((DType.F16,), (DType.BF16,), FLOAT8, BYTES))


def patch_of(op: Conv, program: Program, config: Config) -> Patch:
    x, w, y, boxed = (*(program.tensors[name] for name in (op.x, op.w, op.y)), is_boxed(op, program))
    tile = config["across"], config["down"], config["columns"]
    added, kinds = boxed and bool(epilogue.loads_by_row(op, program)), (OPERANDS[x.dtype], OPERANDS[w.dtype])
    result = y.dtype.size if boxed else RESULT
    groups = config.get("groups", GROUPS)
    return Patch(*tile, w.shape[2], w.shape[3], x.shape[1], boxed, added, "spread" in config, kinds, result, groups)


def tiles_of(op: Conv, program: Program, patch: Patch) -> tuple[int, int, int, int]:
    """Into how many shares the output channels go, one a block; images; and tiles along their rows' way down and across."""
    n, _, p, q = program.op_shape(op)
    shares = epilogue.lane_groups(op, program, epilogue.frame_of(op, program), patch.columns)
    return shares, n, ceil_div(p, patch.down), ceil_div(q, patch.across)


def steps(patch: Patch, products: int) -> tuple[tuple[int, int], ...]:
    """Where the operands of a box of channels' products begin, at a tap's pixel and at its weights: so many for each tap."""
    if patch.spread:
        return tuple((STEP * i, STEP * i) for i in range(products))
    places = [(r, s, STEP * i) for r in range(patch.height) for s in range(patch.width) for i in range(products)]
    return tuple(((r * patch.pitch + s) * patch.row + at, (r * patch.width + s) * patch.tap + at) for r, s, at in places)


def _map_weights(problem: Problem, patch: Patch) -> TiledMap:
    """Of (taps · channels, output channels), or of (channels, taps, output channels)."""
    w, ones = problem.w, (1, 1, 1)
    step = patch.size * w.strides[0] if w.shape[0] > 1 else UNIT
    if patch.spread:
        extents = problem.padded, patch.taps, w.shape[0]
        box = patch.depth, patch.taps, patch.columns
        return TiledMap(w.name, 0, extents, (patch.size * problem.padded, step), box, ones, patch.row)
    extents, box = (patch.taps * problem.padded, w.shape[0], 1), (patch.depth, patch.columns, 1)
    return TiledMap(w.name, 0, extents, (step, UNIT), box, ones, patch.row)


def _map_added(load: epilogue.RowLoad, y: Tensor, box: tuple[int, ...], swizzle: int) -> TiledMap:
    """The same of what is added to y."""
    (n, channels, p, q), size = y.shape, load.tensor.dtype.size
    apart = _bytes_apart(load, y.shape)
    return TiledMap(load.tensor.name, size * load.offset, (channels, q, p, n), apart, box, (1, 1, 1, 1), swizzle)


def _bytes_apart(load: epilogue.RowLoad, shape: Shape) -> tuple[Extent, ...]:
    """Bytes from column to column, row to row and image to image of what is added to a result of this shape."""
    return tuple(load.tensor.dtype.size * load.strides[axis] if shape[axis] > 1 else UNIT for axis in (3, 2, 0))


# --- The code --------------------------------------------------------------------------------------------------------

GEOMETRY = 3
"""How many integers say how the image and the weights lie: rows and columns of padding, padded channels of a tap's weights."""


def _accumulators(patch: Patch) -> tuple[Any, Any]:
    """What multiplies a box of channels by its taps' weights, for all of a tile's blocks of 64 pixels; and the last box."""
    from tccompile.kernels.parts.accumulator import BlocksAccumulator, PromotedBlocks
    from tccompile.kernels.ptx import hopper as hw

    row = patch.row
    descriptors = hw.descriptor(row, 0, (SIDE if patch.spread else patch.pitch) * row), hw.descriptor(row, 0, SIDE * row)
    pixels = [n * SIDE**2 if patch.spread else below * patch.pitch + along for n, (along, below) in enumerate(patch.places)]
    places = tuple(pixel * row for pixel in pixels)

    def of(products: int) -> Any:
        if not patch.rough:
            return BlocksAccumulator(patch.wide, descriptors, places, steps(patch, products), patch.kinds)
        times = patch.rounds(products)
        taps = patch.width // times[0]
        apart = taps * row, patch.pitch * row, taps * patch.tap
        of_round, pairs = steps(patch, products)[: taps * products], patch.in_pairs(products)
        return PromotedBlocks(patch.wide, descriptors, places, of_round, patch.kinds, times, apart, pairs)

    return of(patch.whole), of(patch.last)


def _results(patch: Patch, layout: SharedLayout, params: tuple[Value, ...]) -> Any:
    """How the results of a tile leave."""
    from tccompile.kernels.parts import image_results as results

    each = patch.staged * (4 if patch.spread else 1)
    sums = group_atom(*patch.kinds).acc
    staging = Staging(layout["results"], each, layout["landed"] if patch.added else None, patch.result, sums)
    if patch.boxed:
        return results.ImageBoxes(patch.columns, patch.places, patch.warps, staging, params)
    if patch.spread:
        tile, window = (patch.across, patch.down), (patch.columns, patch.height, patch.width)
        return results.ImageSums(tile, window, patch.pitch, patch.blocks, patch.parts, staging, params)
    return results.ImageLanes(patch.columns, patch.places, params)


def _produce(patch: Patch, ring: Any, weights: Any, constant: bool) -> Any:
    """The device function of the thread that asks for copies: weights, then tile by tile, for the warpgroups in turn, boxes
    of the image. (maps, buffers, order, geometry, start)

    buffers  of the ring, and of the weights; start: as `image_order.starting` has it
    """
    from tccompile.kernels.parts import halo
    from tccompile.kernels.ptx import hopper as hw
    from tccompile.kernels.ptx.core import i32, inline

    if patch.spread:
        ask = halo.weights_of_all_taps(weights, patch.depth, patch.taps * patch.tap)
    else:
        ask = halo.weights_by_tap(weights, patch.depth, patch.taps, patch.tap)
    fill, place = halo.Halo(ring, patch.chunks, patch.depth, patch.box).fill, image_order.placing(patch.across, patch.down)
    groups = patch.groups

    @inline
    def produce(maps, buffers, order, geometry, start):
        tile, first, stride = start
        if constant:  # they come while the grids before run, which have no part in them
            ask(maps[1], buffers[1], first, geometry[2])
        hw.wait_for_earlier_grids()
        if not constant:
            ask(maps[1], buffers[1], first, geometry[2])
        slot, parity = ring.writer()
        while tile < order[0]:
            # In each round all warpgroups' rings are at the same stage.
            begin, begin_parity = slot, parity
            for number in range(groups):
                if tile < order[0]:
                    slot, parity = fill(maps[0], buffers[0], place(tile, order), i32(number), begin, begin_parity, geometry[:2])
                tile = i32(tile + stride)

    return produce


def _sum_up(patch: Patch, ring: Any, weights: Any, accumulators: tuple[Any, Any]) -> Any:
    """The device function (buffers, number, slot, parity, leads) → the sums of a tile, whose boxes are in the ring `number`, and
    where in the ring they end. `leads`: whether the thread is the one of its warpgroup that gives buffers back."""
    from tccompile.kernels.ptx.core import i32, inline

    (whole, last), before_last = accumulators, patch.chunks - 1

    @inline
    def sum_up(buffers, number, slot, parity, leads):
        boxes, filters = buffers
        acc, chunk, before = whole.zero(), i32(0), ring.stage(number, i32(0))
        if before_last > 0:
            while chunk < before_last:
                weights.wait(filters, chunk, 0)
                stage = ring.stage(number, slot)
                ring.wait(boxes, stage, parity)
                acc = whole.multiply(acc, ring.target(boxes, stage)[1], weights.target(filters, chunk)[1], chunk)
                whole.wait_before()
                if chunk > 0 and leads:
                    ring.release(ring.hold(boxes, before))
                before = stage
                slot, parity = ring.advance(slot, parity)
                chunk = i32(chunk + 1)
        weights.wait(filters, chunk, 0)
        stage = ring.stage(number, slot)
        ring.wait(boxes, stage, parity)
        acc = last.multiply(acc, ring.target(boxes, stage)[1], weights.target(filters, chunk)[1], chunk)
        last.wait()
        if leads:
            if before_last > 0:
                ring.release(ring.hold(boxes, before))
            ring.release(ring.hold(boxes, stage))
        slot, parity = ring.advance(slot, parity)
        return acc, slot, parity

    return sum_up


def _consume(patch: Patch, ring: Any, sum_up: Any, results: Any) -> Any:
    """The device function of the warpgroups that multiply: (thread, buffers, order, bounds, start, e).

    thread  as `parts.image_results` has it; bounds: rows, and columns, of the results; e: the arguments of the results
    """
    from tccompile.kernels.ptx import hopper as hw
    from tccompile.kernels.ptx.core import i32, inline

    place, groups = image_order.placing(patch.across, patch.down), patch.groups

    @inline
    def consume(thread, buffers, order, bounds, start, e):
        _, warp, lane, tid = thread
        tile, first, stride = start
        group = i32(warp >> 2)
        hw.wait_for_earlier_grids()
        hw.let_later_grids_start()
        (slot, parity), turn, leads = ring.reader(), i32(0), (tid & 127) == 0
        own = results.own(thread, first, e)
        tile = i32(tile + group * stride)
        while tile < order[0]:
            image, row, column = place(tile, order)
            where = image, row, column, bounds
            results.ask(own, where, turn, e)
            acc, slot, parity = sum_up(buffers, group, slot, parity, leads)
            turn = results.finish(acc, own, where, turn, e)
            tile = i32(tile + groups * stride)
        results.drain(lane)

    return consume


def _function(patch: Patch, stages: int, constant: bool, params: tuple[Value, ...]) -> Function:
    """The kernel of a patch: the code that `ConvHalo.work` gives its arguments to.

    Its maps are of x, w, y and what is added to it: of (channels, columns, rows, images), of w as `_map_weights` has it.
    """
    from tccompile.kernels.parts.ring import Ring, Stages
    from tccompile.kernels.ptx import hopper as hw
    from tccompile.kernels.ptx.core import cuda, i32, inline, types, u32

    layout = patch.layout(stages)
    weights = Stages(layout, "weights", patch.chunks, patch.filters)
    ring = Ring(layout, "ring", stages, patch.slot, 1, patch.groups)
    results, begin = _results(patch, layout, params), image_order.starting(patch.columns)
    produce, sum_up = _produce(patch, ring, weights, constant), _sum_up(patch, ring, weights, _accumulators(patch))
    consume, stored, warps = _consume(patch, ring, sum_up, results), patch.boxed, patch.warps
    geometry_at = image_order.NUMBERS
    bounds_at = geometry_at + GEOMETRY

    @inline
    def body(maps, numbers, e):
        order, geometry, bounds = numbers[:geometry_at], numbers[geometry_at:bounds_at], numbers[bounds_at:]
        base = u32(hw.base())
        tid = i32(cuda.threadIdx.x)
        warp, lane = hw.uniform(i32(tid >> 5)), i32(tid & 31)
        buffers = ring.buffers(base), weights.buffers(base)
        if tid == 0:
            weights.init(buffers[1])
            ring.init(buffers[0])
            results.init(base)
            hw.fence_barrier_init()
            hw.prefetch_map(maps[0])
            hw.prefetch_map(maps[1])
            if stored:
                hw.prefetch_map(maps[2])
        cuda.syncthreads()
        start = begin(order)
        if warp >= warps:
            if tid == 32 * warps:
                produce(maps, buffers, order, geometry, start)
        else:
            consume((base, warp, lane, tid), buffers, order, bounds, start, maps[2:] + e)

    maps, integers = 2 + results.maps, bounds_at + (1 if patch.boxed else 2)
    extra = results.types[results.maps :]
    signature = types.void(*[types.uint64] * maps, *[types.int32] * integers, *extra)
    return Function(entry(body, 0, maps, integers, len(extra)), signature, patch.threads)
