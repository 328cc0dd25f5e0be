"""A 1×1 convolution and the depthwise one that reads its result, in bytes, in one launch on Hopper: what a network widens to go
over images is never in memory.

As depthwise_bytes_sm90.py, whose pixels are made from boxes of the 1×1 convolution's input: before a block multiplies a tile, its
warps multiply the pixels of the box by `channels` of the 1×1 weights, by mma.sync, scale and round the sums to bytes, and write
them where the depthwise part reads them. Pixels outside the image are zeros there, whatever the 1×1 convolution makes of them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product

from tccompile.arch import Arch
from tccompile.ir.extent import ceil_div, hint, round_up
from tccompile.ir.ops import Conv, Op
from tccompile.ir.program import Program
from tccompile.ir.types import DType
from tccompile.kernels import epilogue
from tccompile.kernels.depthwise import BYTES, filter_of, image
from tccompile.kernels.depthwise_bytes import COLUMNS, OPERANDS, functions, parts_of, products_of, unfit
from tccompile.kernels.depthwise_bytes import EACH as EIGHT
from tccompile.kernels.depthwise_bytes_sm90 import (
    ALIGNED,
    HOPPER,
    LANES,
    ROWS,
    WASTED,
    Tile,
    Walking,
    most_held,
    over,
    shared_out,
    shares,
    unboxed,
)
from tccompile.kernels.depthwise_bytes_sm90 import CHOSEN as OF_TILE
from tccompile.kernels.depthwise_bytes_sm90 import NUMBERS as OF_DEPTHWISE
from tccompile.kernels.depthwise_sm90_walk import constant, elsewhere
from tccompile.kernels.gemm_sm90_cost import slots_of
from tccompile.kernels.parts.maps import image_map
from tccompile.kernels.ptx.atoms import FROM
from tccompile.kernels.rates import measured
from tccompile.kernels.spec import I32, Config, Function, Joint, Launch, Ptr, Value, Work, code, memory_us
from tccompile.kernels.text import KernelText, compiled, indented, intrinsic, parameters

ATOM = "mma.m16n8k32.s8"

ROW = 16
"""Channels of a product: lane (g, t) of 8 × 4 has 2g and 2g + 1."""

DEEP = 32
"""Bytes of a pixel that a product takes; lane t has 8 of them."""

MOST_DEEP = 160
"""Bytes of a pixel of x."""

SUMS = 1 << 22
"""What sums stay below, which begin with 1.5 · 2^23."""

CHANNELS = (64, 96, 128, 160, 192)
"""That a block makes: as many as a pixel has, where they are no more than the last, or whole sectors of 32 bytes. Boxes of parts
of pixels, let alone of sectors, take far longer than their bytes."""

EACH = (2, 3, 4)
"""Products of a warp by the same pixels."""

WARPS = (8, 12, 16)
"""Of a block, where the depthwise part does not need more."""


@dataclass(frozen=True)
class Expanded(Tile):
    """A config, as of the depthwise part.

    each   products of a warp by the same pixels
    warps  of a block; the depthwise part may leave some idle
    deep   bytes of a pixel of x
    """

    each: int
    warps: int
    deep: int

    @property
    def columns_in(self) -> int:
        """Whole eights, of which each is in one row."""
        return round_up(super().columns_in, 8)

    @property
    def pixels(self) -> int:
        """Of a box."""
        return self.images * self.rows_in * self.columns_in

    @property
    def copied(self) -> int:
        return self.pixels * self.deep

    @property
    def pitch(self) -> int:
        """An odd number of 16 bytes, of which pixels lie in other banks."""
        return self.channels + ROW * (self.channels // ROW % 2 == 0)

    @property
    def box(self) -> int:
        return round_up(self.copied, ALIGNED)

    @property
    def eights(self) -> int:
        """Of pixels."""
        return self.pixels // 8

    @property
    def made(self) -> int:
        """Bytes of the pixels that the depthwise part reads."""
        return round_up(self.pixels * self.pitch + self.beyond, ALIGNED)

    @property
    def barriers(self) -> int:
        return super().barriers + self.made

    @property
    def threads(self) -> int:
        return 32 * self.warps

    @property
    def abreast(self) -> int:
        """Warps that make other channels of the same pixels."""
        return self.channels // ROW // self.each

    @property
    def registers(self) -> int:
        """About what a thread needs: weights of both, what is added to sums, pixels of x."""
        weights = self.each * (ceil_div(self.deep, DEEP) * 4 + 4)
        return weights + 24 + 36 + 24


MOST_CONFIGS = 12

CHOSEN = (*OF_TILE, "each", "warps")

PARAMS = ("taps", "stride", *OF_TILE, "size", "each", "warps", "deep")


class ExpandSm90(Joint):
    """A 1×1 Conv, and the depthwise Conv that alone reads its result, both of bytes."""

    name = "expand_sm90"
    tensor_cores = True

    def groups(self, program: Program) -> Iterator[tuple[int, Sequence[int]]]:
        writers = {op.y: i for i, op in enumerate(program.ops) if isinstance(op, Conv)}
        for second, op in enumerate(program.ops):
            if isinstance(op, Conv) and op.groups > 1 and op.x in writers:
                yield writers[op.x], (writers[op.x], second)

    def supports(self, ops: Sequence[Op], program: Program, arch: Arch) -> str | None:
        first, second = ops
        assert isinstance(first, Conv) and isinstance(second, Conv)
        if (reason := elsewhere(arch) or unfit(second, program, arch) or _unmade(first, second, program)) is not None:
            return reason
        x, y, made = (program.tensors[name] for name in (first.x, second.y, first.y))
        if reason := unboxed(x, program.tensors[second.w], y, program):
            return reason
        if next(_tiles(first, second, program, arch), None) is None:
            return f"boxes of {x.name} and of {made.name} do not fit {arch.smem_block} bytes of shared memory"
        return None

    def configs(self, ops: Sequence[Op], program: Program, arch: Arch) -> Iterator[Config]:
        """Those of least estimated cost."""
        first, second = ops
        every = [
            {"held": most_held(tile, tile.registers, arch), **{name: getattr(tile, name) for name in CHOSEN}}
            for tile in _tiles(first, second, program, arch)
        ]
        yield from sorted(every, key=lambda config: self.cost(ops, program, config, arch))[:MOST_CONFIGS]

    def cost(self, ops: Sequence[Op], program: Program, config: Config, arch: Arch) -> float:
        first, second = ops
        assert isinstance(first, Conv)
        own, tile = measured(arch).expand_sm90, tile_of(first, second, program, config)
        chunks, tiles, parts = shares(second, program, tile, config["held"], arch)
        turns, clock = ceil_div(tiles, parts), arch.fp32_tflops * 1e6 / 2 / 128 / arch.sms
        # Cycles of 128 results: of the 1×1 convolution, whose warps find pixels' places for some products each; of the other one.
        of_first, of_second = (own.slot * slots_of(op.epilogue.expr, program.tensors[op.y].dtype, arch) for op in ops)
        made = 16 + 12 / tile.each + 9 * ceil_div(tile.deep, DEEP) + of_first
        halves = own.half if tile.size > 1 else 0.0
        products = len(products_of(tile.taps, parts_of(tile.taps, tile.stride)))
        row = (20 + halves + 9 * products + of_second) * tile.lanes / EIGHT
        eights = tile.eights * tile.channels // ROW
        busy = turns * ceil_div(chunks * parts, arch.sms) * (eights * made + tile.groups * tile.octets * tile.rows * row) / 4
        alone = ceil_div(eights, tile.warps) * made + ceil_div(tile.octets, tile.along) * tile.rows * row
        alone = turns * (own.tile_us * clock + own.alone * alone)
        moving = own.moving * memory_us([program.tensors[first.x], program.tensors[second.y]], arch)
        return own.start_us + math.cbrt((own.busy * busy / clock) ** 3 + (alone / clock) ** 3 + moving**3)

    def work(self, ops: Sequence[Op], program: Program, config: Config, arch: Arch) -> Work:
        first, second = ops
        assert isinstance(first, Conv) and isinstance(second, Conv)
        x, v, y = (program.tensors[name] for name in (first.x, first.w, second.y))
        if 0 in y.shape:
            return Work(())
        tile = tile_of(first, second, program, config)
        specs = [epilogue.describe(op, program, epilogue.frame_of(op, program), 1) for op in ops]
        blocks, numbers = shared_out(second, program, tile, config["held"], arch)
        numbers += (x.shape[2], x.shape[3], v.strides[0], v.padded[0])
        launch = Launch(
            code(
                self.name, x=x.dtype.value, **{name: getattr(tile, name) for name in PARAMS}, held=config["held"],
                ahead=constant(first, program) and constant(second, program), epilogues=tuple(spec.params for spec in specs),
            ),
            grid=(blocks, 1, 1),
            block=tile.threads,
            args=(
                image_map(x, x.padded[1], (tile.deep, tile.columns_in, tile.rows_in, tile.images), 0),
                image_map(y, y.padded[1], (tile.channels, tile.columns, tile.height, tile.images), 0),
                Ptr(second.w), Ptr(first.w), *map(I32, numbers), *specs[1].args, *specs[0].args,
            ),
            smem=tile.smem,
        )  # fmt: skip
        return Work((launch,))

    def source(self, arch: Arch, **params: Value) -> KernelText:
        made, form = (epilogue.Form.decoded(params["epilogues"][i]) for i in range(2))
        tile = Expanded(*(params[name] for name in PARAMS))
        scope, kinds = functions({**params, "x": made.y.dtype.value}, form, "shared")
        stored = epilogue.source(made, 2, stores=False, keeps=True)
        assert stored.kept
        scope |= {
            "read": intrinsic("ptx.memory.read_words", tile.lanes // 4, "shared"),
            "boxes_read": intrinsic("ptx.hopper.boxes_read", 0),
            "kept_made": stored.kept,
            "results_made": stored.function,
            "rounded_made": intrinsic("ptx.memory.rounded", made.y.dtype),
            "multiply_made": intrinsic("ptx.mma.warp_multiply", ATOM, "s8", OPERANDS[params["x"]]),
            **{f"weights{n}": intrinsic("ptx.memory.load_words", n, "global.nc") for n in (1, 2)},
            **{f"pixels{n}": intrinsic("ptx.memory.load_words", n, "shared") for n in (1, 2)},
            "put_two": intrinsic("ptx.memory.store_apart", tile.pitch),
            **{name: intrinsic(f"ptx.hopper.{name}") for name in HOPPER},
        }
        signature = {
            **parameters("map", "map_x, map_y"), **parameters("address", "w, v"), **parameters("int", NUMBERS),
            "e": kinds, "f": stored.kinds,
        }  # fmt: skip
        return KernelText(signature, _Text(params, tile, form.y.dtype).lines(), scope, tile.threads, params["held"])

    def build(self, arch: Arch, **params: Value) -> Function:
        return compiled(self.source(arch, **params))


NUMBERS = f"{OF_DEPTHWISE}, H, W, vo, v_padded"


def _unmade(first: Conv, second: Conv, program: Program) -> str | None:
    """Why the first one's result cannot be made where the second one reads it."""
    x, v, made = (program.tensors[name] for name in (first.x, first.w, first.y))
    if first.groups != 1 or filter_of(v) != (1, 1) or first.strides != (1, 1) or any(first.pads):
        return f"{made.name} is not made pixel by pixel"
    if x.dtype not in BYTES or v.dtype is not DType.I8 or made.dtype not in BYTES:
        return f"{made.name} is not made of bytes by int8"
    if second.x != made.name or made.base or made.name in program.outputs or first.also is not None:
        return f"{made.name} is not only a tensor between the two"
    if sum(program.tensors[name].storage == made.storage for op in program.ops for name in op.inputs) != 1:
        return f"{made.name} has other readers"
    if x.padded[1] % ROW or x.padded[1] > MOST_DEEP or v.strides[1] != 1 or v.padded[1] != x.padded[1]:
        return f"{x.name} has {x.padded[1]} channels, its weights {v.padded[1]}: it takes multiples of {ROW} up to {MOST_DEEP}"
    if x.shape[1] * 128 * max(-x.dtype.lowest, x.dtype.largest) >= SUMS:
        return f"sums of {x.shape[1]} products of {x.dtype.value} have more digits than a float32 holds beside 1.5 · 2^23"
    if v.strides[0] % 8 or v.offset % 8:
        return f"weights of {v.name} do not begin at multiples of 8 bytes"
    if epilogue.loads_by_row(first, program):
        return f"what is added to {made.name} differs by pixel"
    form = epilogue.describe(first, program, epilogue.frame_of(first, program), 1).form
    if form.y.shuffled or form.taken is not DType.F32:
        return f"sums of {made.name} are stored as integers, or shuffled"
    return None


def _tiles(first: Op, second: Op, program: Program, arch: Arch) -> Iterator[Expanded]:
    assert isinstance(second, Conv)
    n, c, p, q = image(program.op_shape(second))
    c = max(c, program.tensors[second.y].padded[1])
    taps, stride = filter_of(program.tensors[second.w])[0], second.strides[0]
    lanes = LANES[taps, stride]
    fewest = min(round_up(c, channels) for channels in CHANNELS)
    whole = c % ROW == 0 and c <= min(CHANNELS[-1], lanes * WARPS[-1])
    widths = [c] if whole else [w for w in CHANNELS if round_up(c, w) <= WASTED * fewest]
    across = sorted({round_up(ceil_div(q, parts), COLUMNS) for parts in (1, 2, 4, 8) if q > 14 * (parts - 1)})
    down = sorted({(min(p, rows), bands) for rows in ROWS for bands in (1, 2, 4) if rows * bands < p + rows})
    for channels, columns, (rows, bands) in product(widths, across, down):
        for images, each in product((1, 2, 4) if rows * bands >= p and columns >= q else (1,), EACH):
            octets, groups = ceil_div(images * bands * ceil_div(columns, COLUMNS), 8), channels // lanes
            for warps in sorted({groups, *(w for w in WARPS if w > groups)}):
                if images > hint(n) or channels // ROW % each or warps > WARPS[-1] or warps % (channels // ROW // each):
                    continue
                chosen = (channels, lanes, columns, rows, bands, images, min(octets, warps // groups), 2, each, warps)
                tile = tile_of(first, second, program, dict(zip(CHOSEN, chosen, strict=True)))
                if tile.columns_in <= 256 and tile.registers <= 168 and most_held(tile, tile.registers, arch):
                    yield tile


def tile_of(first: Op, second: Op, program: Program, config: Config) -> Expanded:
    assert isinstance(first, Conv) and isinstance(second, Conv)
    chosen, size = {name: config[name] for name in CHOSEN}, program.tensors[second.y].dtype.size
    taps, deep = filter_of(program.tensors[second.w])[0], program.tensors[first.x].padded[1]
    return Expanded(taps=taps, stride=second.strides[0], size=size, deep=deep, **chosen)


class _Text(Walking):
    """The kernel's source. Shared memory: two boxes of y, boxes of x, the pixels made of one of them, barriers."""

    tile: Expanded
    of_x = "i32(0)"

    def weights(self) -> list[str]:
        """Those of the depthwise part, and the lane's words of the 1×1 weights, v{word}_{piece}_{product}."""
        out = [*super().weights(), f"made = i32(ring + i32({self.tile.stages * self.tile.box}))"]
        out += [
            f"apart = divide(warp, {over(self.tile.abreast)})",
            f"its = i32((warp - apart * i32({self.tile.abreast})) * i32({ROW * self.tile.each}))",
        ]
        for m in range(self.tile.each):
            for i, letter in enumerate("ab"):  # rows g and g + 8
                name = f"{letter}{m}"
                out += [
                    f"channel_{name} = i32(c0 + its + i32({ROW * m + i}) + g * i32(2))",
                    f"known_{name} = within(channel_{name}, i32(0), v_padded)",
                    f"kept_{name} = kept_made(channel_{name}, f)",
                ]
                for k, (at, words) in enumerate(self._pieces()):
                    place = f"v + i64(i32(channel_{name} * vo) + i32({at}) + t * i32({4 * words}))"
                    out.append(f"v{k}_{name} = weights{words}({place}, known_{name})")
        return out

    def _pieces(self) -> list[tuple[int, int]]:
        """Of a pixel: where a product's bytes begin, and how many words of them a lane has: 2, or 1 of the last 16 bytes."""
        return [(at, 2 if at + DEEP <= self.tile.deep else 1) for at in range(0, self.tile.deep, DEEP)]

    def _tile(self) -> list[str]:
        tile = self.tile
        return [
            f"slab, out = i32(ring + turn * i32({tile.box})), i32(staged + side * i32({tile.results}))",
            *self._find("number"),
            "barrier_wait(i32(full + turn * i32(8)), parity)",
            *self._make(),
            "cuda.syncthreads()",
            "if tid == 0:",
            *indented(self._ask_next()),
            "slab = made",
            *self._octets(),
            "if tid == 0:",
            *indented(self._find("number")),
            "    store_box4(map_y, out, c0, q0, p0, n0)",
            *self._on(),
        ]

    def _make(self) -> list[str]:
        """The pixels that the depthwise part reads."""
        tile = self.tile
        return [
            f"top, left = i32(p0 * i32({tile.stride}) - ph), i32(q0 * i32({tile.stride}) - pw)",
            "eight = apart",
            f"while eight < i32({tile.eights}):",
            *indented(self._eight()),
            f"    eight = i32(eight + i32({tile.warps // tile.abreast}))",
        ]

    def _eight(self) -> list[str]:
        """8 pixels: lane (g, t) reads pixel g, and writes 2t and 2t + 1."""
        tile = self.tile
        across, rows = tile.columns_in // 8, tile.rows_in
        out = [
            f"row = divide(eight, {over(across)})",
            f"column = i32(i32(i32(eight - row * i32({across})) * i32(8)) + i32(t * i32(2)) + left)",
            *([f"row = i32(row - divide(row, {over(rows)}) * i32({rows}))"] if tile.images > 1 else []),
            "there = within(i32(row + top), i32(0), H)",
            "mask = select(i32(there & within(column, i32(0), W)) != 0, i32(0xffff), i32(0))",
            "mask = mask | select(i32(there & within(i32(column + i32(1)), i32(0), W)) != 0, i32(-0x10000), i32(0))",
            f"to = i32(i32(made + eight * i32({8 * tile.pitch})) + i32(t * i32({2 * tile.pitch}) + g * i32(2) + its))",
            f"at = i32(i32(slab + eight * i32({8 * tile.deep})) + g * i32({tile.deep}))",
        ]
        for k, (at, words) in enumerate(self._pieces()):
            out.append(f"x{k} = pixels{words}(i32(at + i32({at}) + t * i32({4 * words})), i32(1))")
        for m in range(tile.each):
            sums = ", ".join([f"i32({FROM})"] * 4)
            for k, (_, words) in enumerate(self._pieces()):
                halves = [[f"v{k}_a{m}[{i}]", f"v{k}_b{m}[{i}]", f"x{k}[{i}]"] if i < words else ["i32(0)"] * 3 for i in (0, 1)]
                operands = ", ".join([*halves[0][:2], *halves[1][:2], halves[0][2], halves[1][2]])
                out.append(f"s0, s1, s2, s3 = multiply_made({sums}, {operands})")
                sums = "s0, s1, s2, s3"
            out += [
                f"u = results_made((float_from(s0), float_from(s1)), kept_a{m}, channel_a{m}, f)",
                f"o = results_made((float_from(s2), float_from(s3)), kept_b{m}, channel_b{m}, f)",
                f"put_two(i32(to + i32({ROW * m})), rounded_made(u[0], o[0], u[1], o[1]) & mask)",
            ]
        return out
