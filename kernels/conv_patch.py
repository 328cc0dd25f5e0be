"""Convolution of few input or few output channels on Tensor Cores: a block's patch of the image lies in shared memory, once.

An implicit GEMM gathers each pixel R·S times, in chunks of 8 channels. Where channels are few that is nearly all of its time: 3
channels fill a chunk badly, and with 3 outputs a gathered chunk is hardly multiplied. Here a block copies the patch of the image
under its rows × columns of output pixels once, as fp16, and its warps build the fragments of mma.sync from there: K is walked in
quads of 4 channels (8 bytes), in the order (r, s, channels), and of 4 quads a lane of four takes one, for both operands alike, so
that taps need not be neighbours. Of 1 or 2 channels a quad holds 4 or 2 taps of a row. A block's weights lie in shared memory in
the order of fragments; it stays for as many tiles as there are for it. Columns are given to lanes such that each ends up with
neighbouring channels of a pixel, which go to memory as they are.

Integers of 8 bits lie in the patch as they are, 8 channels in a quad, and are multiplied so. Floats of 8 bits become halves on
their way there: what they save is memory's traffic.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import ceil
from typing import Any

from tccompile.arch import KIB, Arch, Feature
from tccompile.ir.extent import ceil_div, least, round_up
from tccompile.ir.ops import Conv, Op
from tccompile.ir.program import Program
from tccompile.ir.tensor import Tensor
from tccompile.ir.types import FLOAT8, DType
from tccompile.kernels import epilogue
from tccompile.kernels.codegen import divider
from tccompile.kernels.gemm_sm90_cost import slots_of
from tccompile.kernels.implicit_gemm import OPERANDS
from tccompile.kernels.loops import refusal
from tccompile.kernels.ptx.atoms import Atom, warp_atom
from tccompile.kernels.rates import measured
from tccompile.kernels.spec import I32, Config, Launch, Ptr, Value, Work, code, traffic_us
from tccompile.kernels.text import KernelText, TextKernel, intrinsic, parameters

QUAD = 4
"""Halves that a lane reads at once."""

FEW_INPUTS, FEW_OUTPUTS = 4, 32
"""Channels of which one side has at most so many."""

FEW_BYTES = 32
"""The same of inputs of 8 bits: the copy engine brings rows of so few bytes slowly, to kernels with wgmma."""

COLUMNS = 64
"""Output channels of a block."""

VECTOR = 16
"""Bytes of x and w that are read at once."""

OF_BOTH = (((DType.F16, DType.F32), (DType.F16,)), (epilogue.BYTES, epilogue.BYTES), (tuple(FLOAT8), tuple(FLOAT8)))
"""Types of x and of w that go together."""

FLAT = 32
"""Steps of 4 quads up to which they may begin in different taps: each takes a register for where it lies."""

SHORT = 4
"""Tiles of a block up to which later grids may start at once. The blocks of a long grid end at times that are far apart, and
those of the next one, of which one is meant for each multiprocessor, would all go to those that are free first."""

HALVES = ("f16", "f16")

AT_ONCE = 4
"""Vectors that a thread has on their way to shared memory, pixels or weights."""


@dataclass(frozen=True)
class Patch:
    """What the code of a convolution depends on.

    taps, strides, dilations  (along H, along W)
    channels  of x; vector: whether quads of x are read as they lie, two at a time where there are more than one; else x's
              channels are read one by one
    outputs   columns of a block: 8, 16 or a multiple of 32
    warps     rows of output pixels that a block computes; mi, sixteens of pixels along a row
    kinds     PTX's types of the elements of x and w; a float32 becomes a half, too
    """

    taps: tuple[int, int]
    strides: tuple[int, int]
    dilations: tuple[int, int]
    channels: int
    vector: bool
    outputs: int
    warps: int
    mi: int
    kinds: tuple[str, str] = HALVES

    @property
    def integers(self) -> bool:
        """Whether operands are integers, whose sums are int32."""
        return self.kinds[0] in ("s8", "u8")

    @property
    def widened(self) -> bool:
        """Whether they are floats of 8 bits."""
        return self.kinds[0] in ("e4m3", "e5m2")

    @property
    def unit(self) -> int:
        """Channels of a quad."""
        return 2 * QUAD if self.integers else QUAD

    @property
    def sums(self) -> str:
        """PTX's type of accumulators."""
        return "s32" if self.integers else "f32"

    @property
    def threads(self) -> int:
        return 32 * self.warps

    @property
    def together(self) -> int:
        """Taps of a row that share a quad."""
        return max(1, min(QUAD // self.channels, self.taps[1]))

    @property
    def across(self) -> int:
        """Quads' places along a row of the filter."""
        return ceil_div(self.taps[1], self.together)

    @property
    def quads(self) -> int:
        """Of a pixel: one, or an even number, or if the filter is long, a multiple of 4."""
        few = 1 if self.channels <= self.unit else ceil_div(self.channels, 2 * self.unit) * 2
        return few if self.taps[0] * self.across * few <= 4 * FLAT else round_up(few, 4)

    @property
    def flat(self) -> bool:
        """Whether the quads of a step may lie in different taps."""
        return self.quads % 4 != 0

    @property
    def depth(self) -> int:
        """Quads of K."""
        return self.taps[0] * self.across * self.quads

    @property
    def steps(self) -> int:
        """Of K: 4 quads each."""
        return ceil_div(self.depth, 4)

    @property
    def blocks(self) -> int:
        """Blocks of 8 columns in a group, of which a lane has 2 neighbouring columns each."""
        return min(self.outputs // 8, 4)

    @property
    def groups(self) -> int:
        return self.outputs // (8 * self.blocks)

    @property
    def lanes(self) -> int:
        """Neighbouring channels that a lane stores."""
        return 2 * self.blocks

    @property
    def height(self) -> int:
        return (self.warps - 1) * self.strides[0] + (self.taps[0] - 1) * self.dilations[0] + 1

    @property
    def width(self) -> int:
        return (16 * self.mi - 1) * self.strides[1] + (self.across - 1) * self.together * self.dilations[1] + 1

    @property
    def pixel(self) -> int:
        """Bytes from pixel to pixel: of whole steps, such that 4 neighbours are in different banks."""
        return 8 * self.quads + (32 if self.quads % 8 == 0 else 0)

    @property
    def patch_bytes(self) -> int:
        return round_up(self.height * self.width * self.pixel, 16)

    @property
    def weight_bytes(self) -> int:
        return self.steps * self.outputs * 4 * 8

    @property
    def smem(self) -> int:
        return self.patch_bytes + self.weight_bytes + 16

    @property
    def registers(self) -> int:
        """About what a thread needs."""
        return 4 * self.mi * self.outputs // 8 + (self.steps if self.flat else 8) + 48

    def resident(self, arch: Arch) -> int:
        """Blocks that a multiprocessor holds at once."""
        registers = min(255, round_up(self.registers, 8))
        return min(arch.smem_sm // (self.smem + KIB), 65536 // (registers * self.threads), arch.threads_sm // self.threads, 8)


class ConvPatch(TextKernel):
    """Conv in one group of an image with at most 4 channels, or 32 of 8 bits, or with at most 32 output channels, by mma.sync."""

    name = "conv_patch"
    realises = Conv
    tensor_cores = True

    def supports(self, op: Op, program: Program, arch: Arch) -> str | None:
        assert isinstance(op, Conv)
        x, w = program.tensors[op.x], program.tensors[op.w]
        if _atom(kinds_of(x, w), arch) is None:
            return f"{arch.name} has no Tensor Core instruction of 16 rows" + " of bytes" * (x.dtype in epilogue.BYTES)
        if op.groups != 1:
            return f"it has {op.groups} groups; the kernel takes one"
        outputs, channels = w.shape[:2]
        if not any(x.dtype in of_x and w.dtype in of_w for of_x, of_w in OF_BOTH):
            return f"its input is {x.dtype.value} and its weights {w.dtype.value}; Tensor Cores are fed with float16"
        of_8_bits = x.dtype.size == 1
        if of_8_bits and x.padded[1] < w.padded[1]:
            return f"{x.name} has {x.padded[1]} channels in memory, fewer than the {w.padded[1]} of {w.name}"
        few = FEW_BYTES if of_8_bits else FEW_INPUTS
        if channels > few and outputs > FEW_OUTPUTS:
            return f"{channels} input and {outputs} output channels; it takes up to {few} inputs or {FEW_OUTPUTS} outputs"
        together = VECTOR // w.dtype.size
        if (channels > FEW_INPUTS or of_8_bits) and (x.dtype is DType.F32 or not vectors_of(x, together)):
            return f"the channels of {x.name} do not lie in aligned vectors of {together}"
        if not vectors_of(w, together):
            return f"the channels of {w.name} do not lie in aligned vectors of {together}"
        if not any(True for _ in self.configs(op, program, arch)):
            return f"its filter and a patch of {x.name} do not fit {arch.smem_block} bytes of shared memory"
        return refusal(op, program, epilogue.frame_of(op, program))

    def configs(self, op: Op, program: Program, arch: Arch) -> Iterator[Config]:
        for warps in (4, 8):
            for mi in (1, 2, 4):
                patch = _patch(op, program, {"rows": warps, "columns": 16 * mi})
                if patch.smem <= arch.smem_block and patch.resident(arch) and patch.mi * patch.outputs <= 128:
                    yield {"rows": warps, "columns": 16 * mi}

    def cost(self, op: Op, program: Program, config: Config, arch: Arch) -> float:
        own = measured(arch).conv_patch
        patch, (n, p, q) = _patch(op, program, config), _pixels(op, program)
        w = program.tensors[op.operands[1]]
        parts = ceil_div(w.shape[0], patch.outputs)
        tiles = n * ceil_div(p, patch.warps) * ceil_div(q, 16 * patch.mi) * parts
        resident = patch.resident(arch)
        # Microseconds of a multiprocessor for a tile: of Tensor Cores, of shared memory, and of instructions beside them
        rate = min(own.most, own.mma_sync * arch.tensor_tflops * 1e6 / arch.sms)
        steps = patch.warps * patch.steps
        multiplying = steps * patch.mi * patch.outputs / 8 * 4096 / rate
        sharing = steps * (4 * patch.mi + patch.outputs / 4) / own.sharing
        copies = patch.height * patch.width * max(1, patch.quads // 2)
        stores = 16 * patch.warps * patch.mi * patch.outputs / patch.lanes
        functions = slots_of(op.epilogue.expr, program.tensors[op.y].dtype, arch) * stores * patch.lanes
        issuing = (own.copying * copies + own.storing * stores + functions) / (128 * own.sharing)
        tile = max(multiplying, sharing) + own.exposed * min(multiplying, sharing) + issuing
        tile *= max(1.0, 16 / (resident * patch.warps)) ** own.few_warps  # too few warps to hide latencies
        together = min(resident, max(1.0, tiles / arch.sms))
        waves = tiles / (arch.sms * resident)
        turns = max(1.0, ceil(waves) if waves <= 2 else waves + 0.5)
        least = own.tile_us + own.step_us * patch.steps
        start = own.start_us + own.weight_us * ceil_div(4 * patch.steps * patch.outputs, patch.threads)
        computing = start + turns * max(tile * together, least)
        moving = traffic_us(op, program, arch)
        # What large blocks load, multiply and store one after the other overlaps less with what others do.
        apart = own.apart * moving if patch.warps > 4 else 0.0
        apart -= own.of_8_bits_us if patch.kinds != HALVES and patch.depth > patch.quads else 0.0
        return measured(arch).launch_us + max(computing, moving) + own.exposed_moving * min(computing, moving) + apart

    def work(self, op: Op, program: Program, config: Config, arch: Arch) -> Work:
        assert isinstance(op, Conv)
        x, w, y = (program.tensors[name] for name in (op.x, op.w, op.y))
        patch, (n, p, q) = _patch(op, program, config), _pixels(op, program)
        if 0 in (n * p * q, y.size):
            return Work(())
        spec = epilogue.describe(op, program, epilogue.frame_of(op, program), patch.lanes)
        down, along = ceil_div(p, patch.warps), ceil_div(q, 16 * patch.mi)
        tiles = n * down * along
        stored = max(w.shape[0], y.padded[1] if op.epilogue.shuffle == 1 else 0)
        parts = ceil_div(stored, patch.outputs)
        height, width = _pair(x.shape[2:], 1)
        pads = _pair(op.pads, 0)
        numbers = (
            *(tiles, along, *divider(along), down, *divider(down), p, q, height, width, *pads),
            *(x.strides[0], x.strides[1], *_pair(x.strides[2:], 0), w.shape[0], w.padded[1]),
            *(w.strides[0], *_pair(w.strides[2:], 0)),
        )
        launch = Launch(
            code(
                self.name, x=x.dtype.value, taps=patch.taps, strides=patch.strides, dilations=patch.dilations,
                channels=patch.channels, vector=patch.vector, outputs=patch.outputs, warps=patch.warps, mi=patch.mi,
                epilogue=spec.params, **({"kinds": patch.kinds} if patch.kinds != HALVES else {}),
            ),
            grid=(least(tiles, ceil_div(arch.sms * patch.resident(arch), parts)), parts, 1),
            block=patch.threads,
            args=(Ptr(op.x), Ptr(op.w), *map(I32, numbers), *spec.args),
            smem=patch.smem,
        )  # fmt: skip
        return Work((launch,))

    def source(self, arch: Arch, **params: Value) -> KernelText:
        x = DType(params["x"])
        patch = patch_of(params)
        form, kinds = epilogue.Form.decoded(params["epilogue"]), patch.kinds if patch.integers else (None, None)
        stored, of_block = epilogue.source(form, 2), 8 * patch.blocks
        scope = {
            "store": stored.function,
            "base": intrinsic("ptx.patch.base"),
            "zeros": intrinsic("ptx.mma.zeros", 4 * patch.mi * patch.outputs // 8, *([patch.sums] if patch.integers else [])),
            "places": intrinsic("ptx.patch.places", offsets(patch)),
            "pixels": intrinsic("ptx.patch.pixels", patch.mi, 8 * patch.strides[1] * patch.pixel),
            "weights": intrinsic("ptx.patch.weights", patch.outputs // 8),
            "keep": intrinsic("ptx.patch.keep", 4 * patch.mi),
            "multiply": intrinsic("ptx.patch.multiply", _atom(patch.kinds, arch), patch.mi, patch.groups, patch.blocks, kinds),
            "part": intrinsic("ptx.hopper.part", patch.mi * patch.outputs, of_block, patch.sums),
            "halves": intrinsic("ptx.mma.halves"),
            "read_half": intrinsic("ptx.memory.load", DType.F16, 1, True, "global.nc"),
            "read_quad": intrinsic("ptx.memory.load_words", 2, "global.nc"),
            "read_pair": intrinsic("ptx.memory.load_words", 4, "global.nc"),
            "read_x": intrinsic("ptx.memory.load", x, 1, True, "global.nc"),
            **{f"put{n}": intrinsic("ptx.mma.store_shared_words", n) for n in (2, 4)},
            **{name: intrinsic(f"ptx.hopper.{name}") for name in ("wait_for_earlier_grids", "let_later_grids_start")},
        }
        if patch.integers:
            scope["taken"] = intrinsic("ptx.mma.taken", form.taken, of_block // 2)
        if patch.widened:
            scope["read_word"] = intrinsic("ptx.memory.load_words", 1, "global.nc")
            scope |= {f"widen_{name}": intrinsic("ptx.mma.widen", kind) for name, kind in zip("xw", patch.kinds, strict=True)}
        signature = {**parameters("address", "x, w"), **parameters("int", NUMBERS), "e": stored.kinds}
        early = arch.has(Feature.EARLY_START)
        return KernelText(signature, lines(patch, x, early), scope, patch.threads, patch.resident(arch))


def kinds_of(x: Tensor, w: Tensor) -> tuple[str, str]:
    """PTX's types of the elements of two tensors, of which x's may be of float32, which become halves."""
    return OPERANDS.get(x.dtype, "f16"), OPERANDS.get(w.dtype, "f16")


def _atom(kinds: tuple[str, str], arch: Arch) -> Atom | None:
    """What multiplies the patch: integers as they are, everything else as halves."""
    atom = warp_atom(arch, *(kinds if kinds[0] in ("s8", "u8") else HALVES))
    return atom if atom and atom.m == 16 else None


NUMBERS = "tiles, along, along_m, along_s, down, down_m, down_s, P, Q, H, W, ph, pw, xn, xc, xh, xw, outputs, padded, wo, wr, ws"


def _pair(spatial: tuple[int, ...], default: int) -> tuple[int, int]:
    """(along H, along W), of one or two numbers."""
    return (default, *spatial)[-2:]  # type: ignore[return-value]


def _pixels(op: Op, program: Program) -> tuple[int, int, int]:
    """(N, P, Q) of the result before its shuffle."""
    shape = program.op_shape(op)
    return shape[0], *_pair(shape[2:], 1)


def vectors_of(t: Tensor, n: int) -> bool:
    """Whether channels are neighbours, in vectors of n elements at aligned addresses."""
    return t.strides[1] == 1 and all(s % n == 0 for s in (t.offset, *(t.strides[a] for a in range(t.rank) if a != 1)))


def _patch(op: Op, program: Program, config: Config) -> Patch:
    assert isinstance(op, Conv)
    x, w = program.tensors[op.x], program.tensors[op.w]
    stored = max(w.shape[0], program.tensors[op.y].padded[1] if op.epilogue.shuffle == 1 else 0)
    of_8_bits = w.dtype.size == 1  # which lie in vectors, zeros behind them
    channels = w.padded[1] if of_8_bits else w.shape[1]
    vector = of_8_bits or (x.dtype is DType.F16 and vectors_of(x, QUAD if channels <= QUAD else 2 * QUAD) and channels > 2)
    return Patch(
        _pair(w.shape[2:], 1),
        _pair(op.strides, 1),
        _pair(op.dilations, 1),
        channels,
        vector,
        next(n for n in (8, 16, 32, COLUMNS) if n >= min(stored, COLUMNS)),
        int(config["rows"]),  # type: ignore[arg-type]
        int(config["columns"]) // 16,  # type: ignore[arg-type]
        kinds_of(x, w),
    )


def patch_of(params: dict[str, Any]) -> Patch:
    """The patch of a code's parameters."""
    names = ("taps", "strides", "dilations", "channels", "vector", "outputs", "warps", "mi")
    return Patch(**{name: params[name] for name in names}, kinds=params.get("kinds", HALVES))


# --- The code --------------------------------------------------------------------------------------------------------


def lines(patch: Patch, x: DType, early: bool) -> list[str]:
    """The kernel's source. x: (N, C, H, W) at any strides, w: [O][R][S][C]; y's rows are m = (n * P + p) * Q + q.

    Block: tiles blockIdx.x, blockIdx.x + gridDim.x …, columns blockIdx.y * outputs … A warp computes 16·mi pixels of a row.
    """
    early_start = [
        "wait_for_earlier_grids()",
        f"if tiles <= i32(i32(cuda.gridDim.x) * i32({SHORT})):",
        "    let_later_grids_start()",
    ]
    out = [
        "tid = i32(cuda.threadIdx.x)",
        "lane, warp = tid & i32(31), tid >> i32(5)",
        "g, t = lane >> i32(2), lane & i32(3)",
        f"first = i32(i32(cuda.blockIdx.y) * i32({patch.outputs}))",
        "patch = base()",
        f"filters = i32(patch + i32({patch.patch_bytes}))",
        *(early_start if early else []),
        *_weights(patch),
        *_places(patch),
        "tile = i32(cuda.blockIdx.x)",
        "while tile < tiles:",
    ]
    inner = [
        "band = divide(tile, along_m, along_s)",
        f"q0 = i32((tile - band * along) * i32({16 * patch.mi}))",
        "n = divide(band, down_m, down_s)",
        f"p0 = i32((band - n * down) * i32({patch.warps}))",
        f"image = x + i64(n) * (i64(xn) * i64({x.size}))",
        f"h0, w0 = i32(p0 * i32({patch.strides[0]}) - ph), i32(q0 * i32({patch.strides[1]}) - pw)",
        "cuda.syncthreads()",  # nobody reads the tile before any more
        *_fill(patch, x),
        "cuda.syncthreads()",
        *_multiply(patch),
        *_results(patch),
        "tile = i32(tile + i32(cuda.gridDim.x))",
    ]
    return out + [f"    {line}" for line in inner] + (["let_later_grids_start()"] if early else [])


def split(name: str, n: int, whole: str, rest: str) -> list[str]:
    """whole, rest = divmod(name, n)"""
    if n == 1:
        return [f"{whole} = {name}", f"{rest} = i32(0)"]
    multiplier, shift = divider(n)
    return [f"{whole} = divide({name}, i32({multiplier}), i32({shift}))", f"{rest} = i32({name} - {whole} * i32({n}))"]


def _tap_of(patch: Patch, quad: str) -> list[str]:
    """r, s (of its first tap) and c (a quad of channels) of a quad of K."""
    return [
        *split(quad, patch.quads, "tap", "c"),
        *split("tap", patch.across, "r", "s"),
        f"s = i32(s * i32({patch.together}))",
    ]


def _weights(patch: Patch) -> list[str]:
    """The block's weights, by step, group, pair of column blocks and lane: of each block, the quad that the lane multiplies.

    Column 2i + j of block b of a group is channel lanes · i + 2b + j.
    """
    blocks, depth = patch.blocks, 4 * patch.steps
    words = 2 * min(blocks, 2)  # of a lane's vector
    group, lanes, total = 8 * blocks, patch.lanes, patch.outputs * depth
    each = min(AT_ONCE, ceil_div(total, patch.threads))
    size, units = 1 if patch.kinds != HALVES else 2, patch.unit.bit_length() - 1
    out, puts = [], []
    for turn in range(each):
        out += [f"k = i32(at + i32({turn * patch.threads}))", *split("k", depth, "o", "k")]
        out += [
            *_tap_of(patch, "k"),
            f"source = w + (i64(first + o) * i64(wo) + i64(r) * i64(wr) + i64(s) * i64(ws)) * i64({size})",
            f"inside = within(i32(first + o), i32(0), outputs) & within(k, i32(0), i32({patch.depth}))",
            f"inside = inside & within(o, i32(0), i32({patch.outputs}))",
        ]
        names = f"u{turn}, v{turn}"
        if patch.together == 1:
            # A pixel may have more quads than w's channels, padding included.
            out.append(f"inside = i32(inside & within(c << i32({units}), i32(0), padded))")
            if patch.widened:
                out += ["(word,) = read_word(source + i64(c) * i64(4), inside)", f"{names} = widen_w(word)"]
            else:
                out.append(f"{names} = read_quad(source + i64(c) * i64(8), inside)")
        else:
            slots = [(i, c) for i in range(patch.together) for c in range(patch.channels)]
            for slot, (i, c) in enumerate(slots):
                ok = f"inside & within(i32(s + i32({i})), i32(0), i32({patch.taps[1]}))"
                out.append(f"f{slot} = read_half(source + i64({i}) * i64(ws) * i64(2) + i64({2 * c}), i32({ok}))")
            out += [f"f{slot} = f32(0)" for slot in range(len(slots), QUAD)]
            out.append(f"{names} = halves(f0, f1), halves(f2, f3)")
        out += [
            *split("o", group, "number", "o"),
            *split("o", lanes, "i", "j"),
            "b = j >> i32(1)",
            "step = k >> i32(2)",
            "to = ((i * i32(2) + (j & i32(1))) << i32(2)) + (k & i32(3))",  # the lane
            f"to = i32(((step * i32({patch.groups}) + number) * i32({max(1, blocks // 2)}) + (b >> i32(1))) * i32(32) + to)",
            f"to{turn} = i32(filters + to * i32({4 * words}) + (b & i32(1)) * i32(8))",
        ]
        puts += [f"if at < i32({total - turn * patch.threads}):", f"    put2(to{turn}, {names})"]
    loop = [*out, *puts, f"at = i32(at + i32({each * patch.threads}))"]
    return ["at = tid", f"while at < i32({total}):", *(f"    {line}" for line in loop)]


def offsets(patch: Patch) -> tuple[tuple[int, int, int, int], ...]:
    """Where the quads of each step lie in the patch, from a pixel's first on: of the four lanes that share a step."""

    def offset(k: int) -> int:
        tap, c = divmod(min(k, patch.depth - 1), patch.quads)
        r, s = divmod(tap, patch.across)
        row, column = r * patch.dilations[0], s * patch.together * patch.dilations[1]
        return (row * patch.width + column) * patch.pixel + 8 * c

    return tuple((offset(k), offset(k + 1), offset(k + 2), offset(k + 3)) for k in range(0, 4 * patch.steps, 4))


def _places(patch: Patch) -> list[str]:
    """Where a lane finds its quads: of the warp's first pixel, and if they lie in different taps, of each step."""
    start = f"warp * i32({patch.strides[0] * patch.width}) + g * i32({patch.strides[1]})"
    return [
        f"own = i32(patch + ({start}) * i32({patch.pixel}))",
        f"mine = i32(filters + lane * i32({8 * min(patch.blocks, 2)}))",
        "at = places(own, t)" if patch.flat else "own = i32(own + t * i32(8))",
    ]


def _fill(patch: Patch, x: DType) -> list[str]:
    """The patch: zeros where it lies outside the image. All of a turn's reads are under way before the first is waited for."""
    chunks = max(1, patch.quads // 2)
    total, (_, dilation) = patch.height * patch.width * chunks, patch.dilations
    each = min(AT_ONCE, ceil_div(total, patch.threads))
    whole = total % (each * patch.threads) == 0
    out, puts = [], []
    for turn in range(each):
        out += [f"k = i32(k0 + i32({turn * patch.threads}))", *split("k", chunks, "pixel", "c")]
        out += split("pixel", patch.width, "i", "j")
        out += ["h, v = i32(h0 + i), i32(w0 + j)", "present = within(h, i32(0), H)"]
        if not whole:
            out.append(f"present = present & within(k, i32(0), i32({total}))")
        out.append(f"line = image + (i64(i32(h * xh)) + i64(i32(v * xw))) * i64({x.size})")
        names = f"u{turn}_0, u{turn}_1"
        if patch.vector and patch.quads > 1:
            names += f", u{turn}_2, u{turn}_3"
            out.append(f"present = present & within(v, i32(0), W) & within(c << i32({patch.unit.bit_length()}), i32(0), padded)")
            if patch.widened:
                out.append("low, high = read_quad(line + i64(c) * i64(8), i32(present))")
                out += [f"u{turn}_0, u{turn}_1 = widen_x(low)", f"u{turn}_2, u{turn}_3 = widen_x(high)"]
            else:
                out.append(f"{names} = read_pair(line + i64(c) * i64(16), i32(present))")
        elif patch.vector:
            out.append(f"{names} = read_quad(line, i32(present & within(v, i32(0), W)))")
        else:
            slots = [(i, c) for i in range(patch.together) for c in range(patch.channels)]
            for slot, (i, c) in enumerate(slots):
                column = f"i32(v + i32({i * dilation}))"
                source = f"line + i64(i32(xw * i32({i * dilation}) + xc * i32({c}))) * i64({x.size})"
                out.append(f"f{slot} = read_x({source}, i32(present & within({column}, i32(0), W)))")
            out += [f"f{slot} = f32(0)" for slot in range(len(slots), QUAD)]
            out.append(f"{names} = halves(f0, f1), halves(f2, f3)")
        out.append(f"to{turn} = i32(patch + pixel * i32({patch.pixel}) + c * i32(16))")
        put = f"put{names.count(',') + 1}(to{turn}, {names})"
        puts += [put] if whole else [f"if k0 < i32({total - turn * patch.threads}):", f"    {put}"]
    loop = [*out, *puts, f"k0 = i32(k0 + i32({each * patch.threads}))"]
    return ["k0 = tid", f"while k0 < i32({total}):", *(f"    {line}" for line in loop)]


def _multiply(patch: Patch) -> list[str]:
    """A warp's product."""
    step_bytes = patch.outputs * 4 * 8
    out = ["acc = zeros()"]
    if patch.flat:
        for j in range(patch.steps):
            out.append(f"quads = pixels(at[{j}])")
            if j == patch.steps - 1 and patch.depth % 4:  # what lies beyond K need not be finite
                out.append(f"quads = keep(quads, within(t, i32(0), i32({patch.depth % 4})))")
            out.append(f"acc = multiply(acc, quads, weights(i32(mine + i32({j * step_bytes}))))")
        return out
    # A filter row at a time
    per_tap = patch.quads // 4
    per_row = patch.across * per_tap
    out += ["line, row = own, mine", f"for r in range({patch.taps[0]}):"]
    for number in range(per_row):
        s, c = divmod(number, per_tap)
        offset = s * patch.together * patch.dilations[1] * patch.pixel + c * 32
        read = f"pixels(i32(line + i32({offset}))), weights(i32(row + i32({number * step_bytes})))"
        out.append(f"    acc = multiply(acc, {read})")
    out.append(f"    line = i32(line + i32({patch.dilations[0] * patch.width * patch.pixel}))")
    out.append(f"    row = i32(row + i32({per_row * step_bytes}))")
    return out


def _results(patch: Patch) -> list[str]:
    """A lane has `lanes` neighbouring channels of two pixels in each sixteen."""
    return [
        "p = i32(p0 + warp)",
        "m = i32((n * P + p) * Q + q0 + g)",
        "end = select(p < P, i32((n * P + p + i32(1)) * Q), i32(0))",
        f"for number in range({patch.mi * patch.groups}):",
        *(f"    {line}" for line in split("number", patch.groups, "i", "group")),
        "    i = i32(m + i * i32(16))",
        "    if i < end:",
        f"        c = i32(first + group * i32({8 * patch.blocks}) + t * i32({patch.lanes}))",
        f"        store({'taken(part(acc, i32(number)))' if patch.integers else 'part(acc, i32(number))'}, i, i32(8), end, c, e)",
    ]
