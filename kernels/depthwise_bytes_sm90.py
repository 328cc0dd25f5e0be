"""Depthwise convolution of bytes by weights in bytes on Hopper: as depthwise_bytes.py, of pixels in shared memory.

A warp of that kernel reads 16 bytes of some twenty pixels at once, and stores as few of each: where pixels have many channels,
that takes a line of the L1 cache and a half of a sector for each. So here a block has the copy engine bring boxes of x, whose
zeros outside the image are the padding, and store boxes of y. A block has one tile after the other of the same channels, so that
it reads weights once; the next tiles' boxes come while it multiplies, and the last one's leaves. A multiprocessor holds several
blocks: while some wait, others multiply. A warp has the same channels in all its rectangles.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import NamedTuple

from tccompile.arch import KIB, Arch
from tccompile.ir.expr import walk
from tccompile.ir.extent import Extent, ceil_div, hint, least, round_up
from tccompile.ir.ops import Conv, Op
from tccompile.ir.program import Program
from tccompile.ir.tensor import Tensor
from tccompile.ir.types import DType
from tccompile.kernels import epilogue
from tccompile.kernels.codegen import APPROXIMATE, divider
from tccompile.kernels.depthwise import filter_of, image, unrolled
from tccompile.kernels.depthwise_bytes import COLUMNS, EACH, POSITIONS, Text, functions, parts_of, products_of, unfit
from tccompile.kernels.depthwise_sm90_walk import constant, elsewhere
from tccompile.kernels.parts.maps import image_map, unmapped
from tccompile.kernels.rates import measured
from tccompile.kernels.spec import I32, Config, Launch, Ptr, Value, Work, code, traffic_us
from tccompile.kernels.text import KernelText, TextKernel, indented, intrinsic, parameters

CHANNELS = (32, 48, 80, 96, 112, 144, 160)
"""Of a box: an odd number of 16 bytes, of which pixels lie in other banks, or twice that; or as many as a pixel has, if
these are no other multiple of 16 bytes."""

WASTED = 1.13
"""How many channels boxes may have in all, by the least."""

SECTOR = 32
"""Bytes of the L2 cache that come together."""

NARROW = 14
"""Columns that are not shared out among blocks."""

ROWS = (4, 7)
"""Of a rectangle."""

SIDE_BY_SIDE = (1, 2, 4)
"""Images of a block, whole ones, so that rectangles fill octets."""

MOST_WARPS = 16
"""Of a block, unless its channels are more."""

ALIGNED = 128
"""Bytes: boxes begin at multiples."""


@dataclass(frozen=True)
class Tile:
    """A config: what a block computes.

    taps, stride  of the filter, the same along both axes
    channels      of a box; lanes: those of a warp
    columns       of y, an even number; rows: of a rectangle; bands: rectangles one below the other; images
    along         warps of the same channels
    stages        boxes of x that shared memory holds
    size          bytes of a result
    """

    taps: int
    stride: int
    channels: int
    lanes: int
    columns: int
    rows: int
    bands: int
    images: int
    along: int
    stages: int
    size: int

    @property
    def height(self) -> int:
        """Rows of y."""
        return self.rows * self.bands

    @property
    def rows_in(self) -> int:
        return (self.height - 1) * self.stride + self.taps

    @property
    def columns_in(self) -> int:
        return (self.columns - 1) * self.stride + self.taps

    @property
    def copied(self) -> int:
        """Bytes of the box of x."""
        return self.images * self.rows_in * self.columns_in * self.channels

    @property
    def results(self) -> int:
        """Bytes from the box of y to that of x."""
        return round_up(self.images * self.height * self.columns * self.channels * self.size, ALIGNED)

    @property
    def beyond(self) -> int:
        """Bytes that are read behind a row of x, by weights that are 0."""
        positions = POSITIONS * parts_of(self.taps, self.stride)
        return max(0, positions - self.taps - self.stride) * self.pitch

    @property
    def pitch(self) -> int:
        """Bytes from pixel to pixel of what is multiplied."""
        return self.channels

    @property
    def box(self) -> int:
        """Bytes from a box of x to the next one."""
        return round_up(self.copied + self.beyond, ALIGNED)

    @property
    def barriers(self) -> int:
        """Bytes before the barriers of the boxes of x: two boxes of y, and those of x."""
        return 2 * self.results + self.stages * self.box

    @property
    def smem(self) -> int:
        """Bytes to ask for: 1 KiB more than used, since they begin at a multiple of it."""
        return self.barriers + 8 * self.stages + KIB

    @property
    def pairs(self) -> int:
        return self.columns // COLUMNS

    @property
    def rectangles(self) -> int:
        return self.images * self.bands * self.pairs

    @property
    def octets(self) -> int:
        return ceil_div(self.rectangles, 8)

    @property
    def groups(self) -> int:
        """Warps side by side, of other channels."""
        return self.channels // self.lanes

    @property
    def threads(self) -> int:
        return 32 * self.groups * self.along


HOPPER = (
    "base", "uniform", "barrier_init", "barrier_expect", "barrier_wait", "fence_barrier_init", "prefetch_map",
    "fence_copies", "copy_box4", "store_box4",
)  # fmt: skip
"""Instructions that the text calls by their own names."""

CHOSEN = ("channels", "lanes", "columns", "rows", "bands", "images", "along", "stages")

PARAMS = ("taps", "stride", *CHOSEN, "size")

LANES = {(3, 1): 16, (3, 2): 16, (5, 1): 8, (5, 2): 8, (7, 1): 8}
"""Channels of a warp, by a filter's columns and stride: as its weights leave room in the registers."""


LANES_ABREAST = 128
"""Of a multiprocessor."""

LANE_REGISTERS = 65536
"""Of a multiprocessor."""

REGISTERS = {(3, 1): 80, (3, 2): 112, (5, 1): 84, (5, 2): 96, (7, 1): 92}
"""About what a thread needs."""

MOST_CONFIGS = 12


def _tiles(op: Op, program: Program, arch: Arch) -> Iterator[Tile]:
    """Those of which two blocks fit a multiprocessor: small ones, since what blocks wait for then overlaps."""
    assert isinstance(op, Conv)
    n, c, p, q = image(program.op_shape(op))
    c = max(c, program.tensors[op.y].padded[1])
    (taps, _), stride = unrolled(op, program)
    fewest = min(round_up(c, channels) for channels in CHANNELS)
    widths = {w for w in CHANNELS if round_up(c, w) <= WASTED * fewest}
    if c % 16 == 0 and c % 64 and c <= MOST_WARPS * LANES[taps, stride]:
        widths.add(c)
    across = sorted({round_up(ceil_div(q, parts), COLUMNS) for parts in (1, 2, 4, 8) if q > NARROW * (parts - 1)})
    down = sorted({(min(p, rows), bands) for rows in ROWS for bands in (1, 2, 4) if rows * bands < p + rows})
    for channels, columns, (rows, bands) in product(sorted(widths), across, down):
        beside = next((i for i in SIDE_BY_SIDE if i * bands * columns // COLUMNS >= 8), SIDE_BY_SIDE[-1])
        images = min(beside, n) if rows * bands >= p else 1
        octets = ceil_div(images * bands * ceil_div(columns, COLUMNS), 8)
        groups = channels // LANES[taps, stride]
        for along in sorted({ceil_div(octets, turns) for turns in (1, 2, 3, 4)}):
            if not (2 <= groups * along <= MOST_WARPS or along == 1):
                continue
            for stages in (2, 3):
                chosen = (channels, LANES[taps, stride], columns, rows, bands, images, along, stages)
                tile = tile_of(op, program, dict(zip(CHOSEN, chosen, strict=True)))
                if tile.smem <= arch.smem_sm // 2 - KIB and tile.columns_in <= 256:
                    yield tile


def tile_of(op: Op, program: Program, config: Config) -> Tile:
    assert isinstance(op, Conv)
    chosen, size = {name: config[name] for name in CHOSEN}, program.tensors[op.y].dtype.size
    return Tile(taps=filter_of(program.tensors[op.w])[0], stride=op.strides[0], size=size, **chosen)


class Shares(NamedTuple):
    """Boxes of channels, tiles of each, and the blocks that share these."""

    chunks: int
    tiles: int
    parts: int


def shares(op: Op, program: Program, tile: Tile, held: int, arch: Arch) -> Shares:
    """held: blocks of a multiprocessor."""
    assert isinstance(op, Conv)
    n, c, p, q = image(program.op_shape(op))
    chunks = ceil_div(max(c, program.tensors[op.y].padded[1]), tile.channels)
    tiles = ceil_div(q, tile.columns) * ceil_div(p, tile.height) * ceil_div(n, tile.images)
    return Shares(chunks, tiles, least(tiles, max(1, arch.sms * held // chunks)))


NUMBERS = "chunks, chunks_m, chunks_s, parts, tiles, across, across_m, across_s, down, down_m, down_s, ph, pw, wr, ws, w_padded"


def shared_out(op: Conv, program: Program, tile: Tile, held: int, arch: Arch) -> tuple[Extent, tuple[Extent, ...]]:
    """How many blocks there are, and the NUMBERS that they take; held: blocks of a multiprocessor."""
    chunks, tiles, parts = shares(op, program, tile, held, arch)
    w, y = (program.tensors[name] for name in (op.w, op.y))
    across, down = (ceil_div(n, of) for n, of in zip(y.shape[:1:-1], (tile.columns, tile.height), strict=True))
    return chunks * parts, (
        *(chunks, *divider(chunks), parts, tiles),
        *(across, *divider(across), down, *divider(down)),
        *(op.pads[0], op.pads[1], w.strides[2], w.strides[3], w.padded[0]),
    )


def unboxed(x: Tensor, w: Tensor, y: Tensor, program: Program) -> str | None:
    """Why the copy engine does not bring boxes of x, or store those of y, for a filter w; None if it does."""
    if x.rank != 4 or len(set(filter_of(w))) > 1:
        return "it goes along a line: its boxes are of images"
    if reason := unmapped((x, y), program):
        return reason
    for t in (x, y):
        if t.strides[1] != 1 or any(t.dtype.size * s % 16 for s in (t.offset, *(t.strides[a] for a in (0, 2, 3)))):
            return f"pixels of {t.name} do not begin at multiples of 16 bytes"
    return None


def most_held(tile: Tile, registers: int, arch: Arch) -> int:
    """Blocks that a multiprocessor has room for."""
    return min(arch.smem_sm // (tile.smem + KIB), LANE_REGISTERS // (tile.threads * registers), arch.blocks_sm)


class DepthwiseBytesSm90(TextKernel):
    """Conv with as many groups as input and output channels, NHWC, in 8 bits, by TMA and mma.sync, on sm_90a."""

    name = "depthwise_bytes_sm90"
    realises: type[Op] = Conv
    tensor_cores = True

    def supports(self, op: Op, program: Program, arch: Arch) -> str | None:
        assert isinstance(op, Conv)
        if (reason := elsewhere(arch) or unfit(op, program, arch)) is not None:
            return reason
        x, y = (program.tensors[name] for name in (op.x, op.y))
        if reason := unboxed(x, program.tensors[op.w], y, program):
            return reason
        if next(_tiles(op, program, arch), None) is None:
            return f"boxes of {x.name} do not fit {arch.smem_block} bytes of shared memory"
        return None

    def configs(self, op: Op, program: Program, arch: Arch) -> Iterator[Config]:
        """Those of least estimated cost."""
        every = (
            {
                "held": max(1, most_held(tile, REGISTERS[tile.taps, tile.stride], arch)),
                **{name: getattr(tile, name) for name in CHOSEN},
            }
            for tile in _tiles(op, program, arch)
        )
        yield from sorted(every, key=lambda config: self.cost(op, program, config, arch))[:MOST_CONFIGS]

    def cost(self, op: Op, program: Program, config: Config, arch: Arch) -> float:
        assert isinstance(op, Conv)
        own, tile = measured(arch).depthwise_bytes_sm90, tile_of(op, program, config)
        (chunks, tiles, parts), clock = (
            shares(op, program, tile, config["held"], arch),
            arch.fp32_tflops * 1e6 / 2 / 128 / arch.sms,
        )
        turns = ceil_div(tiles, parts)
        # Cycles of a row of 128 results: products come one after the other, and so do a warp's rows and a block's tiles.
        row = 20 + 9 * len(products_of(tile.taps, parts_of(tile.taps, tile.stride)))
        rows = tile.rows * tile.lanes // EACH
        busy = own.busy * turns * ceil_div(chunks * parts, arch.sms) * tile.groups * tile.octets * rows * row / 4
        alone = turns * (own.tile_us * clock + own.alone * ceil_div(tile.octets, tile.along) * rows * row)
        whole = tile.channels >= program.tensors[op.y].padded[1]
        sectors = not any(n % SECTOR for n in (tile.channels, program.tensors[op.x].strides[3]))
        more = 0.0 if whole else own.apart if sectors else own.straddling
        moving = own.moving * (1 + more) * traffic_us(op, program, arch)
        results = hint(math.prod(program.op_shape(op))) / (LANES_ABREAST * arch.sms * clock)
        curved = own.half * results if tile.size > 1 and any(e.fn in APPROXIMATE for e in walk(op.epilogue.expr)) else 0.0
        return own.start_us + math.cbrt((busy / clock) ** 3 + (alone / clock) ** 3 + moving**3) + curved

    def work(self, op: Op, program: Program, config: Config, arch: Arch) -> Work:
        assert isinstance(op, Conv)
        x, y = (program.tensors[name] for name in (op.x, op.y))
        if 0 in y.shape:
            return Work(())
        tile, spec = tile_of(op, program, config), epilogue.describe(op, program, epilogue.frame_of(op, program), 1)
        blocks, numbers = shared_out(op, program, tile, config["held"], arch)
        launch = Launch(
            code(
                self.name, x=x.dtype.value, **{name: getattr(tile, name) for name in PARAMS}, held=config["held"],
                ahead=constant(op, program), epilogue=spec.params,
            ),
            grid=(blocks, 1, 1),
            block=tile.threads,
            args=(
                image_map(x, x.shape[1], (tile.channels, tile.columns_in, tile.rows_in, tile.images), 0),
                image_map(y, y.padded[1], (tile.channels, tile.columns, tile.height, tile.images), 0),
                Ptr(op.w), *map(I32, numbers), *spec.args,
            ),
            smem=tile.smem,
        )  # fmt: skip
        return Work((launch,))

    def source(self, arch: Arch, **params: Value) -> KernelText:
        form, tile = epilogue.Form.decoded(params["epilogue"]), Tile(*(params[name] for name in PARAMS))
        scope, kinds = functions(params, form, "shared")
        scope["read"] = intrinsic("ptx.memory.read_words", tile.lanes // 4, "shared")
        scope["boxes_read"] = intrinsic("ptx.hopper.boxes_read", 0)
        scope |= {name: intrinsic(f"ptx.hopper.{name}") for name in HOPPER}
        signature = {**parameters("map", "map_x, map_y"), "w": "address", **parameters("int", NUMBERS), "e": kinds}
        return KernelText(signature, Walking(params, tile, form.y.dtype).lines(), scope, tile.threads, params["held"])


class Walking(Text):
    """The kernel's source. Shared memory: two boxes of y [image][row][column][channel], boxes of x likewise, and a barrier for
    each of these."""

    of_x = "c0"
    """A box's first channel."""

    def __init__(self, params: Value, tile: Tile, y: DType) -> None:
        whole = {"rows": tile.rows, "lanes": tile.lanes, "taps": (tile.taps, tile.taps), "stride": tile.stride}
        super().__init__({**whole, "down": tile.stride, "ahead": params["ahead"]}, y)
        self.tile = tile

    def lines(self) -> list[str]:
        tile = self.tile
        return [
            "tid = i32(cuda.threadIdx.x)",
            "warp, g, t = uniform(i32(tid >> i32(5))), (tid >> i32(2)) & i32(7), tid & i32(3)",
            "staged = base()",
            f"ring = i32(staged + i32({2 * tile.results}))",
            f"full = i32(staged + i32({tile.barriers}))",
            "if tid == 0:",
            *(f"    barrier_init(i32(full + i32({8 * stage})), i32(1))" for stage in range(tile.stages)),
            "    fence_barrier_init()",
            "    prefetch_map(map_x)",
            "    prefetch_map(map_y)",
            "cuda.syncthreads()",
            "part = divide(i32(cuda.blockIdx.x), chunks_m, chunks_s)",
            f"c0 = i32((i32(cuda.blockIdx.x) - part * chunks) * i32({tile.channels}))",
            *([] if self.early else ["wait_for_earlier_grids()"]),
            "if warp == i32(0):",
            *(["    wait_for_earlier_grids()"] if self.early else []),
            "    let_later_grids_start()",
            "    if tid == 0:",
            "        asked, turn = part, i32(0)",
            f"        while turn < i32({tile.stages}):",
            *indented(self._ask(), 3),
            "            asked, turn = i32(asked + parts), i32(turn + i32(1))",
            f"along = divide(warp, {over(tile.groups)})",
            f"own = i32((warp - along * i32({tile.groups})) * i32({tile.lanes}))",
            "c = i32(c0 + own)",
            "upper = g >> i32(2)",
            *self.weights(),
            "number, turn, parity, side = part, i32(0), i32(0), i32(0)",
            "while number < tiles:",
            *indented(self._tile()),
            "if tid == 0:",
            "    boxes_read()",
        ]

    def _ask(self) -> list[str]:
        """Has the copy engine bring a tile's box of x, if there is such a tile."""
        tile = self.tile
        return [
            "if asked < tiles:",
            *indented(self._find("asked")),
            "    barrier = i32(full + turn * i32(8))",
            f"    barrier_expect(barrier, i32({tile.copied}))",
            f"    into = i32(ring + turn * i32({tile.box}))",
            f"    left, top = i32(q0 * i32({tile.stride}) - pw), i32(p0 * i32({tile.stride}) - ph)",
            f"    copy_box4(into, map_x, barrier, {self.of_x}, left, top, n0)",
        ]

    def _find(self, number: str) -> list[str]:
        """A tile's place."""
        tile = self.tile
        return [
            f"band = divide({number}, across_m, across_s)",
            f"q0 = i32(({number} - band * across) * i32({tile.columns}))",
            "n0 = divide(band, down_m, down_s)",
            f"p0 = i32((band - n0 * down) * i32({tile.height}))",
            f"n0 = i32(n0 * i32({tile.images}))",
        ]

    def _tile(self) -> list[str]:
        """A tile's results, while the boxes of later ones come and those of the one before leave."""
        tile = self.tile
        return [
            f"slab, out = i32(ring + turn * i32({tile.box})), i32(staged + side * i32({tile.results}))",
            "barrier_wait(i32(full + turn * i32(8)), parity)",
            *self._octets(),
            "if tid == 0:",
            *indented(self._find("number")),
            "    store_box4(map_y, out, c0, q0, p0, n0)",
            *indented(self._ask_next()),
            *self._on(),
        ]

    def _octets(self) -> list[str]:
        """A tile's results, to shared memory."""
        tile = self.tile
        spare = tile.threads > 32 * tile.groups * tile.along  # warps that have none
        straight = tile.octets == tile.along and not spare
        loop = [
            f"octet = select(along < i32({tile.along}), along, i32({tile.octets}))" if spare else "octet = along",
            f"while octet < i32({tile.octets}):",
            *indented(self._octet()),
            f"    octet = i32(octet + i32({tile.along}))",
        ]
        return [
            *(["octet = along", *self._octet()] if straight else loop),
            "fence_copies()",
            # The box of y before this one must have been read before the next tile's comes to its place.
            "if tid == 0:",
            "    boxes_read()",
            "cuda.syncthreads()",
        ]

    def _ask_next(self) -> list[str]:
        """Has the copy engine bring the box that comes to the place of this tile's."""
        return [f"asked = i32(number + parts * i32({self.tile.stages}))", *self._ask()]

    def _on(self) -> list[str]:
        """To the next tile."""
        return [
            "number, side, turn = i32(number + parts), i32(side ^ i32(1)), i32(turn + i32(1))",
            f"if turn == i32({self.tile.stages}):",
            "    turn, parity = i32(0), i32(parity ^ i32(1))",
        ]

    def _octet(self) -> list[str]:
        """The rows of y of eight rectangles. One too many reads what the last one does, and is not stored."""
        tile = self.tile
        line_in, line_out = tile.columns_in * tile.pitch, tile.columns * tile.channels * tile.size
        out = [
            "rectangle = i32(octet * i32(8) + t * i32(2) + ((g >> i32(1)) & i32(1)))",
            f"stored = within(rectangle, i32(0), i32({tile.rectangles}))",
            *self._place(),
            f"to = i32(out + i32(its_band * i32({tile.rows * line_out})))",
            f"pixel = i32(i32(its_pair * i32({COLUMNS})) + (g & i32(1)))",
            f"to = i32(to + i32(i32(pixel * i32({tile.channels})) + own + upper * i32({tile.lanes // 2})) * i32({tile.size}))",
            "rectangle = i32(octet * i32(8) + g)",
            f"rectangle = select(rectangle < i32({tile.rectangles}), rectangle, i32({tile.rectangles - 1}))",
            *self._place(),
            f"image = divide(its_band, {over(tile.bands)})",
            f"band = i32((its_band - image * i32({tile.bands})) * i32({tile.rows * tile.stride}))",
            f"line = i32(i32(image * i32({tile.rows_in})) + band)",
            f"pixel = i32(i32(its_pair * i32({COLUMNS * tile.stride})) + t)",
            f"at = i32(i32(slab + own) + i32(i32(line * i32({line_in})) + i32(pixel * i32({tile.pitch}))))",
        ]
        for i in range((tile.rows - 1) * tile.stride + tile.taps):
            for part in self.parts:
                out.append(f"x{i}_{part} = read(i32(at + i32({i * line_in + part * POSITIONS * tile.pitch})))")
        return out + [line for p in range(tile.rows) for line in self.row(p, f"i32(to + i32({p * line_out}))", "stored")]

    def _place(self) -> list[str]:
        return [
            f"its_band = divide(rectangle, {over(self.tile.pairs)})",
            f"its_pair = i32(rectangle - its_band * i32({self.tile.pairs}))",
        ]


def over(n: int) -> str:
    """What `divide` takes of a number that the text knows."""
    multiplier, shift = divider(n)
    return f"i32({multiplier}), i32({shift})"
