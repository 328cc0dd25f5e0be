"""Convolution of few input channels on Hopper: wgmma reads overlapping windows of the image where they lie in shared memory.

A pixel is 4 halves, its channels and zeros. Without swizzle wgmma takes the rows of its left operand 16 bytes apart, in groups
of 8, and of each 16 bytes of K after the other, wherever these begin: they may overlap. So where a window begins 2 pixels after
the one before it, K is a row of the filter as it lies in the image, tap after tap, and the next row is the next row of the
image: nothing is gathered. That is so with a stride of 2; with a stride of 1 the windows of every other pixel are read, and
those between them from a second copy of the image, one pixel further on.

A block's threads read the image in any layout and type, as fp32 in planes for instance, round it to fp16 and write the patch
under the block's tile, its copies side by side. While a tile is multiplied they ask for the next one's pixels. A warpgroup has
16 columns and 8 rows of output pixels, as two products of 64. Weights lie in shared memory for all of a block's tiles; the
blocks of a multiprocessor overlap what each of them does in turn.

The taps that fill up K multiply pixels right of the window by zero: where such a pixel is not finite, the result is NaN.

How pixels are read and results stored is text of this kernel, where others have parts: as inlined functions they took 87
registers in place of 80, which leave room for fewer blocks.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from math import ceil
from typing import Any

from tccompile.arch import KIB, Arch
from tccompile.ir.extent import ceil_div, least, round_up
from tccompile.ir.ops import Conv, Op
from tccompile.ir.program import Program
from tccompile.ir.types import DType
from tccompile.kernels import epilogue
from tccompile.kernels.conv_patch import SHORT, split, vectors_of
from tccompile.kernels.gemm_sm90_cost import slots_of
from tccompile.kernels.loops import device, entry, refusal
from tccompile.kernels.parts import image_order
from tccompile.kernels.parts.layout import Region, SharedLayout
from tccompile.kernels.parts.maps import image_map, unmapped
from tccompile.kernels.parts.operands import UNIT
from tccompile.kernels.parts.staging import BOXES, BYTES
from tccompile.kernels.ptx.atoms import of_warpgroups
from tccompile.kernels.rates import measured
from tccompile.kernels.spec import I32, Config, Function, Kernel, Launch, Ptr, Value, Work, code, traffic_us

PIXEL = 4
"""Halves: channels and zeros."""

SIDE = 8
"""Pixels along both sides of what one wgmma takes."""

ACROSS = 2 * SIDE
"""Output pixels along a row of a tile: two products."""

WARPGROUPS = (1, 2)
"""Of a block, one below the other."""

COLUMNS = (16, 32, 64)
"""Output channels of a block."""

BUFFERS = 2
"""Patches: one is read while the next one is written."""

REGISTERS, MORE_REGISTERS = 128, 168
"""Of a thread; more where it holds many pixels beside the results of 64 channels."""

MANY_WORDS, MANY_WORDS_OF_BYTES = 8, 18
"""Words of pixels, with results of halves and of bytes."""


@dataclass(frozen=True)
class Stem:
    """A block's tile, and the layout of shared memory: weights, patches, boxes of results.

    taps, strides  (along H, along W)
    channels       of the image
    vector         whether a pixel is read at once, as 4 halves; else channel by channel
    columns        output channels of a block
    groups         its warpgroups
    y              type of the results
    """

    taps: tuple[int, int]
    strides: tuple[int, int]
    channels: int
    vector: bool
    columns: int
    groups: int
    y: DType = DType.F16

    @property
    def line(self) -> int:
        """Bytes of a pixel in a box of results."""
        return self.y.size * self.columns

    @property
    def threads(self) -> int:
        return 128 * self.groups

    @property
    def phases(self) -> int:
        """Copies of a patch: pixels that lie between one of a product and the next."""
        return 2 // self.strides[1]

    @property
    def across(self) -> int:
        """Taps of a filter row, with those of zeros that fill 16 of K."""
        return round_up(self.taps[1], 4)

    @property
    def width(self) -> int:
        """Pixels of a patch's row that are read."""
        return (ACROSS - 1) * self.strides[1] + self.across

    @property
    def pitch(self) -> int:
        """Bytes from row to row: rows begin at multiples of 16."""
        return 8 * (self.width + self.width % 2)

    @property
    def height(self) -> int:
        return (SIDE * self.groups - 1) * self.strides[0] + self.taps[0]

    @property
    def copy(self) -> int:
        """Bytes of one copy of a patch."""
        return self.pitch * self.height

    @property
    def patch(self) -> int:
        return self.phases * self.copy

    @property
    def quads(self) -> int:
        """Taps of all rows: of each a pixel's 4 weights for each column."""
        return self.taps[0] * self.across

    @property
    def weights(self) -> int:
        """Bytes."""
        return self.quads * 8 * self.columns

    @property
    def box(self) -> int:
        """Bytes of a box of results: 16 pixels."""
        return 16 * self.line

    @cached_property
    def layout(self) -> SharedLayout:
        """Shared memory: weights, patches, and boxes of results where their swizzle begins."""
        return SharedLayout(
            Region("weights", self.weights),
            Region("patches", BUFFERS * self.patch),
            Region("results", 4 * self.groups * BOXES * self.box, KIB),
        )

    @property
    def smem(self) -> int:
        """Bytes to ask for in a launch."""
        return self.layout.smem

    @property
    def turns(self) -> int:
        """In which a block's threads read a patch, a pixel each."""
        return ceil_div(self.width * self.height, self.threads)

    @property
    def by_registers(self) -> int:
        """Blocks of a multiprocessor that its registers are shared out to."""
        words = self.turns * (2 if self.vector else self.channels)
        many = self.columns > 32 and words > (MANY_WORDS_OF_BYTES if self.y in BYTES else MANY_WORDS)
        return 65536 // ((MORE_REGISTERS if many else REGISTERS) * self.threads)

    def resident(self, arch: Arch) -> int:
        """Blocks that a multiprocessor holds at once."""
        return min(arch.smem_sm // (self.smem + KIB), self.by_registers)

    @property
    def steps(self) -> tuple[tuple[int, int], ...]:
        """Of each 16 of K, where its operands begin: in the row of a pixel's first tap, and among the weights."""
        rows, fours = self.taps[0], self.across // 4
        return tuple((r * self.pitch + 32 * i, (r * fours + i) * 32 * self.columns) for r in range(rows) for i in range(fours))


class ConvStem(Kernel):
    """Conv of an image with at most 4 channels, with a stride of 1 or 2 along rows, to NHWC in fp16 or bytes, by wgmma."""

    name = "conv_stem"
    realises = Conv
    tensor_cores = True

    def supports(self, op: Op, program: Program, arch: Arch) -> str | None:
        assert isinstance(op, Conv)
        if not of_warpgroups(arch):
            return f"{arch.name} has no wgmma instructions"
        x, w, y = (program.tensors[name] for name in (op.x, op.w, op.y))
        if x.rank != 4 or op.groups > 1 or max(op.dilations) > 1 or op.strides[1] > 2:
            return "it takes images and filters with a stride of 1 or 2 along rows, without dilations and groups"
        if w.shape[1] > PIXEL:
            return f"{w.shape[1]} input channels; it takes up to {PIXEL}"
        if w.dtype is not DType.F16 or x.dtype not in (DType.F16, DType.F32):
            return f"its input is {x.dtype.value} and its weights {w.dtype.value}; Tensor Cores are fed with float16"
        if not vectors_of(w, 8):
            return f"the channels of {w.name} do not lie in aligned vectors of 8"
        if reason := unmapped((y,), program):
            return reason
        if 0 in (*x.shape, *y.shape):
            return "an extent is 0"
        if y.shape[3] < 2:
            return f"{y.name} has one column"
        if y.dtype not in (DType.F16, *BYTES):
            return f"{y.name} is {y.dtype.value}; the copy engine stores float16, int8 and uint8"
        if any(y.dtype.size * n % UNIT for n in (y.strides[3], y.offset, y.padded[1])):
            return f"the pixels of {y.name} do not begin and end at multiples of {UNIT} bytes"
        frame = epilogue.frame_of(op, program)
        if (reason := refusal(op, program, frame)) is not None:
            return reason
        target = epilogue.describe(op, program, frame).form.y
        if target.shuffled or target.mode != "vector":
            return f"the channels of {y.name} do not lie in aligned vectors of 8, as the copy engine stores them"
        if target.rows == "general":
            return f"the pixels of {y.name} do not lie at one stride"
        if epilogue.loads_by_row(op, program):
            return "its epilogue reads a tensor for each pixel"
        if next(self.configs(op, program, arch), None) is None:
            return f"its filter and patches of {x.name} do not fit {arch.smem_block} bytes of shared memory"
        return None

    def configs(self, op: Op, program: Program, arch: Arch) -> Iterator[Config]:
        assert isinstance(op, Conv)
        stored = program.tensors[op.y].padded[1]
        for columns in COLUMNS:
            for groups in WARPGROUPS:
                config = {"columns": columns, "warpgroups": groups}
                stem = _stem(op, program, config)
                if (columns == COLUMNS[0] or columns < 2 * stored) and stem.smem <= arch.smem_block and stem.resident(arch):
                    yield config

    def cost(self, op: Op, program: Program, config: Config, arch: Arch) -> float:
        assert isinstance(op, Conv)
        own = measured(arch).conv_stem
        stem = _stem(op, program, config)
        shares, n, down, across = _tiles(op, program, stem)
        tiles, resident = n * down * across * shares, stem.resident(arch)
        together = min(resident, max(1.0, tiles / arch.sms))
        waves = tiles / (arch.sms * resident)
        turns = max(1.0, ceil(waves) if waves <= 2 else waves + 0.5)
        multiplying = 2 * stem.groups * len(stem.steps) * (own.multiplying + own.more * stem.columns) / measured(arch).cycles_us
        putting = own.putting * stem.height * stem.width * (stem.phases + (2 if stem.vector else stem.channels))
        storing = own.storing + slots_of(op.epilogue.expr, program.tensors[op.y].dtype, arch)
        issuing = (putting + storing * 128 * stem.groups * stem.columns) / (128 * measured(arch).cycles_us)
        weights = own.weight_us * ceil_div(stem.quads * stem.columns, stem.threads)
        computing = own.start_us + weights + turns * max((multiplying + issuing) * together, own.least_us)
        moving = traffic_us(op, program, arch) * (1 + own.parts * (1 - 1 / shares))
        return own.launching_us + max(computing, moving) + own.exposed * min(computing, moving)

    def work(self, op: Op, program: Program, config: Config, arch: Arch) -> Work:
        assert isinstance(op, Conv)
        stem = _stem(op, program, config)
        x, w, y = (program.tensors[name] for name in (op.x, op.w, op.y))
        shares, n, down, across = _tiles(op, program, stem)
        tiles = n * down * across
        spec = epilogue.describe(op, program, epilogue.frame_of(op, program), 2)
        box, swizzle = (stem.columns, SIDE, 2, 1), stem.line if stem.line > UNIT else 0
        maps = tuple(image_map(y, y.padded[1], box, swizzle, phase, stem.phases) for phase in range(stem.phases))
        numbers = (
            *image_order.numbers(n, down, across, shares),
            *(*x.shape[2:], *op.pads[:2], x.strides[0], x.strides[1], x.strides[2], x.strides[3]),
            *(w.shape[0], w.strides[0], w.strides[2], w.strides[3], y.shape[2]),
        )
        launch = Launch(
            code(
                self.name, x=x.dtype.value, taps=stem.taps, strides=stem.strides, channels=stem.channels, vector=stem.vector,
                columns=stem.columns, groups=stem.groups, y=stem.y.value, constant=w.storage in program.constants,
                epilogue=spec.params,
            ),
            grid=(shares * least(tiles, max(1, arch.sms * stem.resident(arch) // shares)), 1, 1),
            block=stem.threads,
            args=(*maps, Ptr(op.x), Ptr(op.w), *map(I32, numbers), *spec.args),
            smem=stem.smem,
        )  # fmt: skip
        return Work((launch,))

    def build(self, arch: Arch, **params: Value) -> Function:
        from tccompile.kernels.parts.accumulator import BlocksAccumulator
        from tccompile.kernels.ptx import hopper, memory, mma
        from tccompile.kernels.ptx.core import types

        stem, x = stem_of(params), DType(params["x"])
        results, extra = epilogue.build_results(params["epilogue"], groups=2 if stem.y in BYTES else 1)
        descriptors = hopper.descriptor(0, 16, stem.strides[0] * stem.pitch), hopper.descriptor(0, 16 * stem.columns, 16 * SIDE)
        next_block = stem.copy if stem.phases == 2 else 16 * SIDE
        scope = {
            "results": results,
            "product": BlocksAccumulator(stem.columns, descriptors, (0, next_block), stem.steps),
            "start": image_order.starting(stem.columns),
            "place": image_order.placing(ACROSS, SIDE * stem.groups),
            "again": hopper.computed,
            "halves": mma.halves,
            "read_quad": memory.load_words(2, space="global.nc"),
            "read_x": memory.load(x, guarded=True, space="global.nc"),
            "put": mma.store_shared_words(2),
            "put_pair": memory.store(stem.y, 2, space="shared", rounds=stem.y in BYTES),
            "one_box_left": hopper.boxes_read(BOXES - 1),
            "boxes_read": hopper.boxes_read(0),
            **{name: getattr(hopper, name) for name in CALLED},
            "store_matrices": hopper.store_matrices(),
        }
        maps = ", ".join(f"y{phase}" for phase in range(stem.phases))
        body = device("conv_stem", f"{maps}, x, w, order, numbers, e", lines(stem, x, params["constant"]), **scope)
        counts = image_order.NUMBERS, NUMBERS.count(",") + 1
        signature = types.void(*(types.uint64,) * stem.phases, *(types.int64,) * 2, *(types.int32,) * sum(counts), *extra)
        function = entry(body, stem.phases + 2, *counts, len(extra))
        return Function(function, signature, stem.threads, stem.by_registers)


CALLED = ("uniform", "prefetch_map", "sync_warp", "wait_for_earlier_grids", "let_later_grids_start", "fence_copies", "store_box4",
          "base")  # fmt: skip
"""Instructions that the kernel's text calls by their names."""

NUMBERS = "H, W, top, left_pad, xn, xc, xh, xw, outputs, wo, wr, ws, P"
"""Names of the launch's numbers behind those of `image_order`."""


def _stem(op: Conv, program: Program, config: Config) -> Stem:
    x, w = program.tensors[op.x], program.tensors[op.w]
    vector = x.dtype is DType.F16 and vectors_of(x, PIXEL)
    (r, s), (down, along) = w.shape[2:], op.strides
    y = program.tensors[op.y].dtype
    return Stem((r, s), (down, along), w.shape[1], vector, int(config["columns"]), int(config["warpgroups"]), y)  # type: ignore[call-overload]


def stem_of(params: dict[str, Any]) -> Stem:
    """The stem of a code's parameters."""
    sizes = {name: params[name] for name in ("taps", "strides", "channels", "vector", "columns", "groups")}
    return Stem(**sizes, y=DType(params["y"]))


def _tiles(op: Conv, program: Program, stem: Stem) -> tuple[int, int, int, int]:
    """Into how many shares the output channels go, one a block; images; and tiles along their rows' way down and across."""
    n, stored, p, q = program.tensors[op.y].padded
    return ceil_div(stored, stem.columns), n, ceil_div(p, SIDE * stem.groups), ceil_div(q, ACROSS)


# --- The code --------------------------------------------------------------------------------------------------------


def lines(stem: Stem, x: DType, constant: bool) -> list[str]:
    """The kernel's source. x: (N, C, H, W) at any strides; w: [O][R][S][C]; y0, y1: maps of (channels, columns, rows, images)."""
    loop = [
        f"patch = i32(memory + i32({stem.layout['patches']}) + turn * i32({stem.patch}))",
        *_put(stem),
        "fence_copies()",
        "cuda.syncthreads()",  # the patch is whole; and all have read the one before it, which the next one takes the place of
        "column0, row0, image0 = column, row, image",
        "tile = i32(tile + stride)",
        "image, row, column = place(tile, order)",
        *_read(stem, x),  # before the products, which need registers for their results
        f"a = i32(patch + group * i32({SIDE * stem.strides[0] * stem.pitch}))",
        "acc = product.multiply(product.zero(), a, memory, i32(0))",
        "product.wait()",
        *_results(stem),
        "turn = i32(turn ^ i32(1))",
    ]
    return [
        f"{NUMBERS} = numbers",
        "tiles = order[0]",
        "tid = i32(cuda.threadIdx.x)",
        "warp, lane = uniform(i32(tid >> i32(5))), tid & i32(31)",
        "memory = base()",
        "group = i32(warp >> i32(2))",
        "tile, first, stride = start(order)",
        "if tid == 0:",
        *(f"    prefetch_map(y{phase})" for phase in range(stem.phases)),
        *([] if constant else ["wait_for_earlier_grids()"]),
        *_weights(stem),
        f"own = i32(memory + i32({stem.layout['results']}) + warp * i32({BOXES * stem.box}))",
        _key(stem),
        "c = i32(first + (lane & i32(3)) * i32(2))",
        *(["wait_for_earlier_grids()"] if constant else []),
        f"if tiles <= i32(stride * i32({SHORT})):",
        "    let_later_grids_start()",
        "image, row, column = place(tile, order)",
        *_read(stem, x),
        "turn = i32(0)",
        "while tile < tiles:",
        *(f"    {line}" for line in loop),
        "let_later_grids_start()",
        "if lane == 0:",
        "    boxes_read()",
    ]


def _weights(stem: Stem) -> list[str]:
    """The block's weights: of each two taps, the quads of 4 channels of all columns, side by side for a column."""
    total = stem.quads * stem.columns
    reads, puts = [], ["own_tid = again(tid)"]
    for turn in range(ceil_div(total, stem.threads)):

        def quad(number: str, turn: int = turn) -> list[str]:
            return [f"k = i32({number} + i32({turn * stem.threads}))", *split("k", stem.quads, "o", "t")]

        reads += [*quad("tid"), *split("t", stem.across, "r", "s")]
        inside = (
            f"within(i32(first + o), i32(0), outputs) & within(s, i32(0), i32({stem.taps[1]})) & within(k, i32(0), i32({total}))"
        )
        reads.append("source = w + (i64(first + o) * i64(wo) + i64(r) * i64(wr) + i64(s) * i64(ws)) * i64(2)")
        reads.append(f"p{turn}, q{turn} = read_quad(source, i32({inside}))")
        puts += quad("own_tid")
        puts.append(f"to = i32(memory + (t >> i32(1)) * i32({16 * stem.columns}) + o * i32(16) + (t & i32(1)) * i32(8))")
        put, left = f"put(to, p{turn}, q{turn})", total - turn * stem.threads
        puts += [put] if left >= stem.threads else [f"if own_tid < i32({left}):", f"    {put}"]
    return reads + puts


def _read(stem: Stem, x: DType) -> list[str]:
    """A thread's pixels of a tile's patch, as two words each: zeros beside the image, and where there are no more tiles."""
    out = [
        f"h0, w0 = i32(row * i32({stem.strides[0]}) - top), i32(column * i32({stem.strides[1]}) - left_pad)",
        f"base_x = x + i64(image) * (i64(xn) * i64({x.size}))",
        "more = within(tile, i32(0), tiles)",
        "own_tid = again(tid)",
    ]
    for turn in range(stem.turns):
        out += [
            f"k = i32(own_tid + i32({turn * stem.threads}))",
            *split("k", stem.width, "i", "j"),
            "h, v = i32(h0 + i), i32(w0 + j)",
        ]
        out.append("present = i32(more & within(h, i32(0), H) & within(v, i32(0), W))")
        out.append(f"line = base_x + (i64(i32(h * xh)) + i64(i32(v * xw))) * i64({x.size})")
        if stem.vector:
            out.append(f"p{turn}, q{turn} = read_quad(line, present)")
            continue
        for c in range(stem.channels):
            out.append(f"f{turn}_{c} = read_x(line + i64(i32(xc * i32({c}))) * i64({x.size}), present)")
    return out


def _put(stem: Stem) -> list[str]:
    """Writes what `_read` read to the patch, to both copies if there are two."""
    out = ["own_tid = again(tid)"]
    for turn in range(stem.turns):
        if not stem.vector:
            values = [f"f{turn}_{c}" if c < stem.channels else "f32(0)" for c in range(PIXEL)]
            out.append(f"p{turn}, q{turn} = halves({values[0]}, {values[1]}), halves({values[2]}, {values[3]})")
        puts = [f"to = i32(patch + i * i32({stem.pitch}) + j * i32(8))", f"put(to, p{turn}, q{turn})"]
        if stem.phases == 2:
            puts += ["if j > i32(0):", f"    put(i32(to + i32({stem.copy - 8})), p{turn}, q{turn})"]
        left = stem.width * stem.height - turn * stem.threads
        out += [f"k = i32(own_tid + i32({turn * stem.threads}))", *split("k", stem.width, "i", "j")]
        out += puts if left >= stem.threads else [f"if own_tid < i32({left}):", *(f"    {line}" for line in puts)]
    return out


def _results(stem: Stem) -> list[str]:
    """A warp's two boxes of 8 columns and 2 rows: through the epilogue, to shared memory and from there to y."""
    out = [f"row0 = i32(row0 + group * i32({SIDE}) + (warp & i32(3)) * i32(2))"]
    for block in range(2):
        column = "i32(column0 >> i32(1))" if stem.phases == 2 else f"i32(column0 + i32({block * SIDE}))"
        out += ["if row0 < P:", "    if lane == 0:", "        one_box_left()", "    sync_warp()"]
        out.append(f"    box = i32(own + i32({block * stem.box}))")
        out += [f"    {line}" for line in _fill(f"acc[{block}]", stem)]
        out.append("    if lane == 0:")
        out.append(f"        store_box4(y{block if stem.phases == 2 else 0}, box, first, {column}, row0, image0)")
    return out


def _key(stem: Stem) -> str:
    """Text: which of a row's 16 bytes a lane writes first, by what the swizzle makes of the row."""
    alike = 8 - stem.line.bit_length()  # rows of which so many low bits are left out look alike
    row = "(lane >> i32(2))" if stem.y in BYTES else "(lane & i32(15))"
    return f"key = i32(({row} >> i32({alike})) & i32({stem.line // 16 - 1}))"


def _fill(acc: str, stem: Stem) -> list[str]:
    """Text that fills the box at `box` with the results of the sums `acc`, of 16 rows of some columns. The copy engine stores it,
    whose rows are swizzled by as many bytes as they have, 32 to 128; of 16, not.

    As `ImageBoxes` does it, of which ptxas makes one to two instructions more a tile here.
    """
    fill = _fill_bytes if stem.y in BYTES else _fill_halves
    return [*fill(acc, stem), "fence_copies()", "sync_warp()"]


def _fill_halves(acc: str, stem: Stem) -> list[str]:
    text = [f"at = i32(box + (lane & i32(15)) * i32({stem.line}) + ((lane >> i32(4)) ^ key) * i32(16))"]
    for sixteen in range(stem.columns // 16):
        for half, name in enumerate("vu"):
            values = f"{acc}[{8 * sixteen + 4 * half}:{8 * sixteen + 4 * half + 4}]"
            text.append(f"{name} = results({values}, i32(c + i32({16 * sixteen + 8 * half})), e)")
        numbers = ", ".join(f"{name}[{k}]" for name in "vu" for k in range(4))
        text.append(f"store_matrices(i32(at ^ i32({32 * sixteen})), {numbers})")
    return text


def _fill_bytes(acc: str, stem: Stem) -> list[str]:
    """A lane has two neighbours of every 8 columns, in two rows."""
    text = [f"at = i32(box + (lane >> i32(2)) * i32({stem.line}) + key * i32(16) + (lane & i32(3)) * i32(2))"]
    for sixteen in range(stem.columns // 16):
        text.append(f"v = results({acc}[{8 * sixteen}:{8 * sixteen + 8}], i32(c + i32({16 * sixteen})), e)")
        for k, beyond in enumerate((0, 8 * stem.line, 8, 8 * stem.line + 8)):
            text.append(f"put_pair(i32((at ^ i32({16 * sixteen})) + i32({beyond})), v[{2 * k}], v[{2 * k + 1}])")
    return text
