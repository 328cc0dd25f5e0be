"""Depthwise convolution of bytes by weights in bytes, on Tensor Cores: sums of integers, which are exact.

mma.sp.m16n8k64 multiplies 16 rows of 64 weights, of whose every four two may differ from 0, by 64 bytes of 8 columns. A column
is two neighbouring pixels of y, a rectangle's row; its bytes are 8 pixels of x by 8 channels: 8 neighbours, or 4 of each of two
rows. The rows are the same 8 channels for the left and for the right one of y's pixels, and hold a row of the filter, or two, for
the right pixel moved on by the stride. A four is 4 channels of a pixel, so that one of its weights differs from 0.

Nothing is moved before it is multiplied: lane (g, t) of 8 × 4 has of a product's bytes those of pixel t of column g, and of 4
pixels further, which it reads from memory as vectors of neighbouring channels: two words are a product's 8. Of the sums it has
one channel, of two columns' four pixels. Once they are bytes, four lanes with neighbouring channels exchange them, so that each
has one pixel; of two products' channels it stores 8 at once.
"""

from __future__ import annotations

from collections.abc import Iterator

from tccompile.arch import Arch, Feature
from tccompile.ir.extent import ceil_div
from tccompile.ir.ops import Conv, Op
from tccompile.ir.program import Program
from tccompile.ir.types import DType
from tccompile.kernels import epilogue
from tccompile.kernels.codegen import divider
from tccompile.kernels.depthwise import BYTES, filter_of, image, image_strides, pair, place, unrolled
from tccompile.kernels.depthwise_sm90_walk import constant
from tccompile.kernels.loops import refusal, vectors
from tccompile.kernels.ptx.atoms import FROM, atoms
from tccompile.kernels.rates import measured
from tccompile.kernels.spec import I32, Config, Launch, Ptr, Value, Work, code, traffic_us
from tccompile.kernels.text import Called, KernelText, TextKernel, intrinsic, parameters

THREADS = 128

COLUMNS = 2
"""Of a rectangle."""

POSITIONS = 4
"""Pixels of x in a product."""

EACH = 8
"""Channels of a product."""

LINE = 128
"""Bytes of a line of the L1 cache."""

ATOM = "mma.sp.m16n8k64.s8"

STORED = (*BYTES, DType.F16)

Tiles = dict[tuple[int, int], int]
"""Rows that a rectangle has and channels that a lane reads, and the blocks of a multiprocessor, which bound the registers."""

TILES: dict[tuple[int, int], Tiles] = {
    (3, 1): {(1, 16): 4, (2, 16): 4, (4, 16): 4, (7, 16): 4, (1, 8): 6, (4, 8): 6, (7, 8): 5},
    (3, 2): {(1, 16): 4, (2, 16): 4, (4, 16): 3, (1, 8): 6, (2, 8): 6, (4, 8): 5},
    (5, 1): {(1, 8): 4, (2, 8): 4, (4, 8): 4, (7, 8): 4},
    (5, 2): {(1, 8): 4, (2, 8): 4, (4, 8): 4},
    (7, 1): {(1, 8): 4, (2, 8): 4, (4, 8): 3},
}
"""By a filter's columns and its stride."""


def unfit(op: Op, program: Program, arch: Arch) -> str | None:
    """Why this is no depthwise convolution of bytes in integers on Tensor Cores; None if it is one."""
    assert isinstance(op, Conv)
    x, w, y = (program.tensors[name] for name in (op.x, op.w, op.y))
    if not op.groups == x.shape[1] == w.shape[0]:
        return "it is no depthwise convolution: groups, input channels and output channels differ"
    if x.dtype not in BYTES or w.dtype is not DType.I8 or y.dtype not in STORED:
        return f"it multiplies {x.dtype.value} by {w.dtype.value} to {y.dtype.value}: not bytes by int8 to bytes or float16"
    if ATOM not in (atom.name for atom in atoms(arch, "s8", "s8", sparse=True)):
        return f"{arch.name} has no Tensor Core instruction with 16 rows and 8 columns of bytes"
    (r, s), stride = unrolled(op, program)
    if (s, stride) not in TILES:
        r, s = filter_of(w)
        return f"its filter is {r}×{s}: it takes 3×3, 5×5 with stride 1 or 2, and 7×7 with stride 1, without dilation"
    for t in (x, y):
        if not vectors(t, 1, EACH):
            return f"the channels of {t.name} do not lie in aligned vectors of {EACH}"
    if (reason := refusal(op, program, epilogue.frame_of(op, program))) is not None:
        return reason
    form = epilogue.describe(op, program, epilogue.frame_of(op, program), EACH).form
    if form.y.shuffled or form.y.mode != "vector":
        return f"the channels of {y.name} do not lie in aligned vectors of {EACH}"
    if form.taken is not DType.F32 or form.also is not None:
        return "its sums are stored as integers, or beside something else"
    if loads := epilogue.loads_by_row(op, program):
        return f"its epilogue reads {loads[0].tensor.name} for each pixel"
    return None


def functions(params: Value, form: epilogue.Form, space: str) -> tuple[dict[str, Called], tuple[str, ...]]:
    """What `Text` calls but for `read`, and the kinds of what the epilogue takes; `space`: where results are stored."""
    stored = epilogue.source(form, 2 * COLUMNS, stores=False, keeps=True)
    assert stored.kept
    scope: dict[str, Called] = {
        "kept": stored.kept,
        "results": stored.function,
        "read_byte": intrinsic("ptx.memory.load_bytes", 1),
        "multiply": intrinsic("ptx.mma.warp_multiply_sparse", ATOM, "s8", OPERANDS[params["x"]]),
        "float_from": intrinsic("ptx.simt.float_from"),
        "shifted": intrinsic("ptx.simt.shifted"),
        "shuffle": intrinsic("ptx.simt.shuffle_int"),
        "permute": intrinsic("ptx.simt.permute"),
        "put": intrinsic("ptx.memory.store", DType.I32, form.y.dtype.size * params["lanes"] // EACH, True, space),
        "wait_for_earlier_grids": intrinsic("ptx.hopper.wait_for_earlier_grids"),
        "let_later_grids_start": intrinsic("ptx.hopper.let_later_grids_start"),
    }
    if form.y.dtype is DType.F16:
        scope["halves"] = intrinsic("ptx.mma.halves")
    else:
        scope["rounded"] = intrinsic("ptx.memory.rounded", form.y.dtype)
    return scope, stored.kinds


class DepthwiseBytes(TextKernel):
    """Conv with as many groups as input and output channels, NHWC or NWC, in 8 bits, by mma.sync; from sm_80 on."""

    name = "depthwise_bytes"
    realises: type[Op] = Conv
    tensor_cores = True

    def supports(self, op: Op, program: Program, arch: Arch) -> str | None:
        return unfit(op, program, arch)

    def configs(self, op: Op, program: Program, arch: Arch) -> Iterator[Config]:
        assert isinstance(op, Conv)
        (r, s), stride = unrolled(op, program)
        wide = vectors(program.tensors[op.x], 1, 16)
        height = image(program.op_shape(op))[2]
        for rows, lanes in TILES[s, stride]:
            if (wide or lanes == EACH) and (rows == 1 or (r > 1 and rows < 2 * height)):
                yield {"rows": rows, "lanes": lanes}

    def cost(self, op: Op, program: Program, config: Config, arch: Arch) -> float:
        assert isinstance(op, Conv)
        own = measured(arch).depthwise_bytes
        rows, lanes = config["rows"], config["lanes"]
        n, c, p, q = image(program.op_shape(op))
        (r, s), stride = unrolled(op, program)
        warps = ceil_div(n * ceil_div(p, rows) * ceil_div(q, COLUMNS), 8) * ceil_div(c, lanes)
        size, parts, read = program.tensors[op.y].dtype.size, parts_of(s, stride), (rows - 1) * op.strides[0] + r
        # Instructions: a weight, a vector of x and a row of results cost some each. A vector's pixels lie in lines of their own,
        # unless they have few channels; so do those that are stored.
        products = lanes // EACH * len(products_of(r, parts))
        instructions = 120 + 30 * products + 7 * read * parts + rows * (products + lanes // EACH * (20 + 8 * size))
        pixels = min(32, max(POSITIONS, 16 * stride * c // LINE + 1))
        lines = read * parts * pixels + rows * min(16, max(2, 16 * c * size // LINE))
        clock = arch.fp32_tflops * 1e6 / 2 / 128 / arch.sms
        issue, reading = warps * instructions / (4 * arch.sms * clock), warps * lines / (arch.sms * clock)
        return own.start_us + own.issue * issue + own.line * reading + own.moving * traffic_us(op, program, arch)

    def work(self, op: Op, program: Program, config: Config, arch: Arch) -> Work:
        assert isinstance(op, Conv)
        x, w, y = (program.tensors[name] for name in (op.x, op.w, op.y))
        rows, lanes = config["rows"], config["lanes"]
        spec = epilogue.describe(op, program, epilogue.frame_of(op, program), 1)
        n, channels, p, q = image(program.op_shape(op))
        _, _, height, width = image(x.shape)
        groups = ceil_div(max(y.padded[1], channels), lanes)
        tiles, bands = ceil_div(q, COLUMNS), ceil_div(p, rows)
        rectangles = n * bands * tiles
        units = ceil_div(rectangles, 8) * groups
        numbers = (
            *(units, rectangles, groups, *divider(groups), tiles, *divider(tiles), bands, *divider(bands)),
            *(p, q, height, width, *image_strides(x), *image_strides(y), *pair(w.strides[2:], 0)),
            *(*pair(op.strides, 1), *pair(op.pads, 0), x.padded[1], w.padded[0], y.padded[1]),
        )
        taps, stride = unrolled(op, program)
        launch = Launch(
            code(
                self.name, x=x.dtype.value, rows=rows, lanes=lanes, taps=taps, stride=stride, down=op.strides[0],
                ahead=arch.has(Feature.EARLY_START) and constant(op, program), epilogue=spec.params,
            ),
            grid=(ceil_div(32 * units, THREADS), 1, 1),
            block=THREADS,
            args=(Ptr(op.x), Ptr(op.w), Ptr(op.y), *map(I32, numbers), *spec.args),
        )  # fmt: skip
        return Work((launch,) if units else ())

    def source(self, arch: Arch, **params: Value) -> KernelText:
        form = epilogue.Form.decoded(params["epilogue"])
        scope, kinds = functions(params, form, "global")
        scope["read"] = intrinsic("ptx.memory.load_words", params["lanes"] // 4, "global.nc")
        signature = {**parameters("address", "x, w, y"), **parameters("int", NUMBERS), "e": kinds}
        blocks = TILES[params["taps"][1], params["stride"]][params["rows"], params["lanes"]]
        return KernelText(signature, Text(params, form.y.dtype).lines(), scope, THREADS, blocks)


NUMBERS = (
    "total, rectangles, groups, groups_m, groups_s, tiles, tiles_m, tiles_s, bands, bands_m, bands_s, P, Q, H, W, "
    "xn, xh, xw, yn, yh, yw, wr, ws, sh, sw, ph, pw, x_padded, w_padded, y_padded"
)

OPERANDS = {DType.I8.value: "s8", DType.U8.value: "u8"}
"""What instructions call the types of x."""


def parts_of(columns: int, stride: int) -> int:
    """Products of a filter's row: it and the same moved on by the stride go over so many times 4 pixels."""
    return ceil_div(columns + stride, POSITIONS)


Half = tuple[int, int]
"""A row of the filter, and which 4 pixels of x from its first one on: half of a product."""


def products_of(down: int, parts: int) -> list[tuple[Half, Half | None]]:
    """The products of a row of y, by the halves of K: a row of the filter each, or two rows that need no more than 4 pixels."""
    halves = [(r, part) for r in range(down) for part in range(parts)]
    return [(half, halves[at + 1] if at + 1 < len(halves) else None) for at, half in enumerate(halves) if at % 2 == 0]


class Text:
    """The kernel's source. x, y: (N, H, W, C), w: (R, S, C).

    A warp: the rectangles from 8 · octet on, `rows` by 2 pixels each, by `lanes` channels from c on. Of two products side by
    side, number j has words j and j + 2 of a lane's vector, and of its sums lane (g, t) has channel `first{j}`: both products'
    channels of a lane are neighbours.
    """

    def __init__(self, params: Value, y: DType) -> None:
        self.rows, self.lanes, self.y = params["rows"], params["lanes"], y
        (self.down, self.across), self.step, self.stride = params["taps"], params["down"], params["stride"]
        self.parts, self.eights = range(parts_of(self.across, self.stride)), range(self.lanes // EACH)
        self.products = products_of(self.down, len(self.parts))
        self.early = params["ahead"]

    def lines(self) -> list[str]:
        return [
            "t = i32(cuda.blockIdx.x) * i32(cuda.blockDim.x) + i32(cuda.threadIdx.x)",
            "warp, g, t = t >> i32(5), (t >> i32(2)) & i32(7), t & i32(3)",
            "if warp >= total:",
            "    return",
            "octet = divide(warp, groups_m, groups_s)",
            f"c = i32((warp - octet * groups) * i32({self.lanes}))",
            "upper = g >> i32(2)",  # which half of a product's words
            *self.weights(),
            *(["wait_for_earlier_grids()", "let_later_grids_start()"] if self.early else []),
            *self._to(),
            *self._pixels(),
            *(
                line
                for p in range(self.rows)
                for line in self.row(
                    p,
                    f"to + i64(i32(i32({p}) * yh)) * i64({self.y.size})",
                    f"i32({p} < ends)",
                )
            ),
        ]

    def weights(self) -> list[str]:
        """The lane's words of a, a{word}_{product}_{j}: of the fours of K from 8t on two weights each, of which one is its
        channel's; `which` of every four they are. Words 0 and 2 are for the left pixel, 1 and 3 for the right one.

        A four is 4 channels of a pixel, so lanes 0 and 1 have the lower channels of pixels 0 to 3, and lanes 2 and 3 the others.
        """
        out = [
            "mine = i32(i32(t >> i32(1)) == upper)",
            "near = i32((g & i32(1)) << i32(3))",
            "which = select(g & i32(2) == i32(0), i32(0x44444444), i32(-0x11111112))",
        ]
        for j in self.eights:
            out += [
                f"first{j} = i32(c + upper * i32({self.lanes // 2}) + i32({EACH // 2 * j}) + (g & i32(3)))",
                f"known = i32(within(first{j}, i32(0), w_padded) & mine)",
                f"filters = w + i64(first{j})",
                f"kept{j} = kept(first{j}, e)",
            ]
            for m, halves in enumerate(self.products):
                for number, half in enumerate(halves):
                    for pixel in range(COLUMNS):
                        out += self._word(f"a{2 * number + pixel}_{m}_{j}", half, pixel)
        return out

    def _word(self, name: str, half: Half | None, pixel: int) -> list[str]:
        """A word of two pixels of x, for the left or the right one of y."""
        if half is None:
            return [f"{name} = i32(0)"]
        r, part = half
        out = []
        for at in range(2):
            out += [
                f"tap = i32(i32((t & i32(1)) << i32(1)) + i32({POSITIONS * part - pixel * self.stride + at}))",
                f"inside = i32(within(tap, i32(0), i32({self.across})) & known)",
                f"byte{at} = read_byte(filters + i64(i32(i32(i32({r}) * wr) + i32(tap * ws))), inside)",
            ]
        return [*out, f"{name} = shifted(byte0, near) | shifted(byte1, i32(near + i32(16)))"]

    def _to(self) -> list[str]:
        """Where the lane stores, and how many rows of it there are: pixel g mod 4 of those whose sums four lanes have."""
        return [
            "rectangle = i32(octet * i32(8) + t * i32(2) + ((g >> i32(1)) & i32(1)))",
            *place(f"i32({self.rows})", COLUMNS),
            "q = i32(q0 + (g & i32(1)))",
            f"channel = i32(c + upper * i32({self.lanes // 2}))",
            "stored = i32(within(rectangle, i32(0), rectangles) & within(q, i32(0), Q) & within(channel, i32(0), y_padded))",
            "ends = select(stored != 0, i32(P - p0), i32(0))",
            f"to = y + (i64(n) * i64(yn) + i64(i32(i32(p0 * yh) + i32(q * yw))) + i64(channel)) * i64({self.y.size})",
        ]

    def _pixels(self) -> list[str]:
        """The words of x that the lane multiplies, x{row}_{part}: all are asked for before the first one is needed."""
        out = [
            "rectangle = i32(octet * i32(8) + g)",
            "real = within(rectangle, i32(0), rectangles)",
            "rectangle = select(real != 0, rectangle, i32(0))",
            *place(f"i32({self.rows})", COLUMNS),
            "real = i32(real & within(c, i32(0), x_padded))",
            "base = x + i64(n) * i64(xn) + i64(c)",
        ]
        for part in self.parts:
            needed = self.across + self.stride - POSITIONS * part
            spare = f" & within(t, i32(0), i32({needed}))" if needed < POSITIONS else ""
            out += [
                f"column = i32(x0 + t + i32({POSITIONS * part}))",
                f"there{part} = i32(real & within(column, i32(0), W){spare})",
                f"column{part} = i64(i32(column * xw))",
            ]
        for i in range((self.rows - 1) * self.step + self.down):
            out += [f"h = i32(h0 + i32({i}))", "present = within(h, i32(0), H)", "line = base + i64(i32(h * xh))"]
            out += [f"x{i}_{part} = read(line + column{part}, i32(present & there{part}))" for part in self.parts]
        return out

    def row(self, p: int, to: str, there: str) -> list[str]:
        """A row of y: its sums, what becomes of them, and the store: to where, and whether the lane stores."""
        out = list[str]()
        for j in self.eights:
            sums = ", ".join([f"i32({FROM})"] * 4)
            for m, halves in enumerate(self.products):
                weights = ", ".join(f"a{word}_{m}_{j}" for word in range(4))
                places = [half or halves[0] for half in halves]  # what weights of 0 are multiplied by makes no difference
                pixels = ", ".join(f"x{p * self.step + r}_{part}[{k}]" for r, part in places for k in (j, j + len(self.eights)))
                out.append(f"s0, s1, s2, s3 = multiply({sums}, {weights}, {pixels}, which)")
                sums = "s0, s1, s2, s3"
            # Sums of both columns for the left pixels, then for the right ones: results in the order of the pixels.
            out.append(f"v = results((float_from(s0), float_from(s2), float_from(s1), float_from(s3)), kept{j}, first{j}, e)")
            out += self._halves(j) if self.y is DType.F16 else self._bytes(j)
        words = ", ".join(f"u{j}, v{j}" if self.y is DType.F16 else f"u{j}" for j in self.eights)
        return [*out, f"put({to}, {words}, {there})"]

    def _bytes(self, j: int) -> list[str]:
        """Of four lanes' words, of four pixels each, the lane's own pixel."""
        return [
            f"u{j} = rounded(v[0], v[1], v[2], v[3])",
            f"u{j} = permute(u{j}, shuffle(u{j}, i32(4)), select(g & i32(1) == i32(0), i32(0x6240), i32(0x3715)))",
            f"u{j} = permute(u{j}, shuffle(u{j}, i32(8)), select(g & i32(2) == i32(0), i32(0x5410), i32(0x3276)))",
        ]

    def _halves(self, j: int) -> list[str]:
        """The same of halves, two words of each lane."""
        return [
            "pick = select(g & i32(1) == i32(0), i32(0x5410), i32(0x3276))",
            f"u{j}, v{j} = halves(v[0], v[1]), halves(v[2], v[3])",
            f"u{j}, v{j} = permute(u{j}, shuffle(u{j}, i32(4)), pick), permute(v{j}, shuffle(v{j}, i32(4)), pick)",
            "right = i32(g & i32(2)) != i32(0)",
            f"other = shuffle(select(right, u{j}, v{j}), i32(8))",
            f"u{j}, v{j} = select(right, other, u{j}), select(right, v{j}, other)",
        ]
