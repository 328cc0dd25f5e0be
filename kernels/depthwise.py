"""Depthwise convolution of channels-last images: each thread computes 4 or 8 channels of a small rectangle of pixels.

A depthwise convolution does few operations a byte, so it is a matter of bandwidth and of instructions (a large batch) or of
latency (a batch of one): the input is read in vectors, each once for all of a thread's pixels, and the filter lies in registers.
"""

from __future__ import annotations

from collections.abc import Iterator

from tccompile.arch import Arch, Feature
from tccompile.ir.extent import ceil_div
from tccompile.ir.ops import Conv, Op
from tccompile.ir.program import Program
from tccompile.ir.tensor import Tensor
from tccompile.ir.types import DType
from tccompile.kernels import epilogue
from tccompile.kernels.codegen import divider
from tccompile.kernels.loops import is_vector_type, refusal, vectors
from tccompile.kernels.rates import measured
from tccompile.kernels.spec import I32, Config, Launch, Ptr, Value, Work, code, traffic_us
from tccompile.kernels.text import Called, KernelText, TextKernel, intrinsic, parameters

LANES = 8
THREADS = 128
BYTES = (DType.I8, DType.U8)


class Depthwise(TextKernel):
    """Conv with as many groups as input and output channels, NHWC or NWC, of fp16, fp32 or bytes by weights in fp16 or fp32."""

    name = "depthwise"
    realises: type[Op] = Conv
    unit = (1, 1)  # the threads that work together: rectangles by neighbouring groups of lanes
    walks = False  # whether the number of rows is an argument

    def supports(self, op: Op, program: Program, arch: Arch) -> str | None:
        assert isinstance(op, Conv)
        x, w = program.tensors[op.x], program.tensors[op.w]
        if not op.groups == x.shape[1] == w.shape[0]:
            return "it is no depthwise convolution: groups, input channels and output channels differ"
        bytes_by_bytes = x.dtype in BYTES and w.dtype is DType.I8
        if not bytes_by_bytes and (not (is_vector_type(x) or x.dtype in BYTES) or not is_vector_type(w)):
            return (
                f"its input is {x.dtype.value} and its weights {w.dtype.value}; these must be float16 or float32, that bytes "
                "too, which int8 may multiply"
            )
        if not vectors(x, 1, LANES):
            return "its input's channels do not lie in aligned vectors of 8"
        if not vectors(w, 0, LANES):
            return "its weights' channels do not lie in aligned vectors of 8"
        frame = epilogue.frame_of(op, program)
        if bytes_by_bytes and epilogue.describe(op, program, frame).form.taken is not DType.F32:
            return "its sums are stored as integers"
        return refusal(op, program, frame)

    def configs(self, op: Op, program: Program, arch: Arch) -> Iterator[Config]:
        assert isinstance(op, Conv)
        tiles = TILES.get(unrolled(op, program)[0], LINES)
        yield from ({"rows": rows, "columns": columns, "lanes": lanes} for rows, columns, lanes in tiles)

    def cost(self, op: Op, program: Program, config: Config, arch: Arch) -> float:
        assert isinstance(op, Conv)
        own = measured(arch).depthwise
        rows, columns, lanes = (config[name] for name in ("rows", "columns", "lanes"))
        n, c, p, q = image(program.op_shape(op))
        r, s = filter_of(program.tensors[op.w])
        threads = n * ceil_div(p, rows) * ceil_div(q, columns) * ceil_div(c, lanes)
        step = op.strides[-1]
        if unrolled(op, program)[0][0]:  # input vectors that a thread reads, and weights
            x, w = ((rows - 1) * step + r) * ((columns - 1) * step + s), r * s
        else:
            x, w = columns * r * s, r * s
        # Instructions: a vector costs some to address and load and one a lane to convert; a multiply-add is one a lane.
        # Bytes take more: two to convert one, and some to round and pack one.
        outputs = rows * columns
        of_x, of_y = (program.tensors[name].dtype.size == 1 for name in (op.x, op.y))
        instructions = (5 + lanes) * (x + w) + lanes * outputs * r * s + (20 + 2 * lanes) * outputs + 60
        instructions += own.of_byte * lanes * of_x * x + own.to_byte * lanes * of_y * outputs
        blocks = TILES.get(unrolled(op, program)[0], LINES)[rows, columns, lanes]
        issue = threads * instructions / (arch.fp32_tflops * 1e6 / 2 * own.busy[blocks])
        sizes = (program.tensors[name].dtype.size for name in (op.x, op.w))
        loading = threads * lanes * sum(n * size for n, size in zip((x, w), sizes, strict=True)) / (arch.sms * own.l1_bytes)
        # Threads beyond those that a multiprocessor holds come in turns; each waits for memory once, or for each row of a loop.
        turns = threads / (arch.sms * THREADS * blocks)
        waits = r if r > MOST_UNROLLED or not unrolled(op, program)[0][0] else 1
        latency = max(1.0, turns) * (own.wait_us * waits + own.instruction_us * instructions)
        parts = (traffic_us(op, program, arch), issue, loading, latency)
        start = own.early_start_us if arch.has(Feature.EARLY_START) else measured(arch).launch_us
        return start + own.from_l2 * (max(parts) + own.exposed * (sum(parts) - max(parts)))  # they do not overlap wholly

    def work(self, op: Op, program: Program, config: Config, arch: Arch) -> Work:
        assert isinstance(op, Conv)
        x, w, y = (program.tensors[name] for name in (op.x, op.w, op.y))
        rows, columns, lanes = (config[name] for name in ("rows", "columns", "lanes"))
        abreast, neighbours = self.unit
        frame = epilogue.frame_of(op, program)
        spec = epilogue.describe(op, program, frame, lanes)
        n, channels, p, q = image(program.op_shape(op))
        _, _, height, width = image(x.shape)
        r, s = filter_of(w)
        groups = ceil_div(max(y.padded[1], channels), neighbours * lanes)
        tiles, bands = ceil_div(q, columns), ceil_div(p, rows)
        rectangles = n * bands * tiles
        units = ceil_div(rectangles, abreast) * groups
        taps, step = unrolled(op, program)
        ahead = arch.has(Feature.EARLY_START) and taps != (0, 0) and (rows, columns, lanes) != CROWDED
        numbers = (
            *(units, rectangles, rows, groups, *divider(groups), tiles, *divider(tiles), bands, *divider(bands)),
            *(p, q, height, width, *image_strides(x), *pair(w.strides[2:], 0), r, s, *pair(op.strides, 1), *pair(op.pads, 0)),
            *(*pair(op.dilations, 1), min(x.padded[1], w.padded[0])),
        )
        launch = Launch(
            code(
                self.name, x=x.dtype.value, w=w.dtype.value, columns=columns, lanes=lanes, taps=taps, stride=step,
                epilogue=spec.params, **({} if self.walks else {"rows": rows, "ahead": ahead}),
            ),
            grid=(ceil_div(units * abreast * neighbours, THREADS), 1, 1),
            block=THREADS,
            args=(Ptr(op.x), Ptr(op.w), *map(I32, numbers), *spec.args),
        )  # fmt: skip
        return Work((launch,))

    def source(self, arch: Arch, **params: Value) -> KernelText:
        lanes = params["lanes"]
        stored = epilogue.source(epilogue.Form.decoded(params["epilogue"]), params["columns"])
        scope: dict[str, Called] = {
            "store": stored.function,
            "zeros": intrinsic("ptx.mma.zeros", lanes),
            "multiply_add": intrinsic("ptx.simt.multiply_add", lanes),
            "ahead": stored.ahead,
            "prefetch": intrinsic("ptx.memory.prefetch"),
            "wait_for_earlier_grids": intrinsic("ptx.hopper.wait_for_earlier_grids"),
            "let_later_grids_start": intrinsic("ptx.hopper.let_later_grids_start"),
        }
        for name in "xw":
            dtype = DType(params[name])
            scope[f"read_{name}"] = intrinsic("ptx.memory.load_words", lanes * dtype.size // 4, "global.nc")
            scope[f"unpack_{name}"] = intrinsic("ptx.memory.floats", dtype, lanes)
        signature = {**parameters("address", "x, w"), **parameters("int", NUMBERS), "e": stored.kinds}
        blocks = TILES.get(tuple(params["taps"]), LINES)[params["rows"], params["columns"], lanes]
        return KernelText(signature, lines(params), scope, THREADS, blocks)


NUMBERS = (
    "total, rectangles, rows, groups, groups_m, groups_s, tiles, tiles_m, tiles_s, bands, bands_m, bands_s, P, Q, H, W, "
    "xn, xh, xw, wr, ws, R, S, sh, sw, ph, pw, dh, dw, padded"
)

Tiles = dict[tuple[int, int, int], int]
"""Rows, columns and lanes that a thread computes, and the blocks of a multiprocessor, which bound the registers."""

LINES: Tiles = {(1, 1, 8): 4, (1, 2, 8): 4, (1, 4, 8): 4}
"""Of any filter."""

TILES: dict[tuple[int, int], Tiles] = {
    (3, 3): {(1, 1, 8): 4, (1, 2, 8): 4, (2, 2, 8): 3, (4, 2, 4): 4, (4, 4, 4): 3, (4, 2, 8): 2},
    (5, 5): {(1, 1, 8): 3, (1, 2, 8): 3, (2, 4, 4): 2},
    (7, 7): {(1, 1, 8): 4, (1, 2, 8): 4, (1, 4, 8): 3},
}
"""Of filters by rows and columns, where code for the filter's taps is unrolled, and pixels share what is read."""

CROWDED = (2, 2, 8)
"""Rows, columns and lanes that leave no registers for addresses of what is asked for ahead of earlier grids."""

MOST_UNROLLED = 5
"""Rows of a filter that are unrolled."""


def unrolled(op: Conv, program: Program) -> tuple[tuple[int, int], int]:
    """Taps and stride of unrolled code that shares what neighbouring pixels read, or ((0, 0), 0) where there is none."""
    r, s = filter_of(program.tensors[op.w])
    square = s in (3, 5, 7) and r in (1, s) and op.strides[-1] in (1, 2) and op.dilations[-1] == 1
    even = len(set(op.strides)) == len(set(op.dilations)) == 1 or r == 1
    return ((r, s), op.strides[-1]) if square and even else ((0, 0), 0)


def pair(spatial: tuple[int, ...], default: int) -> tuple[int, int]:
    """(along H, along W), of one or two numbers."""
    return (default, *spatial)[-2:]  # type: ignore[return-value]


def image(shape: tuple[int, ...]) -> tuple[int, int, int, int]:
    """(N, C, H, W) of a shape of rank 3 or 4."""
    return (*shape[:2], *pair(shape[2:], 1))  # type: ignore[return-value]


def image_strides(t: Tensor) -> tuple[int, int, int]:
    """Strides of N, H and W, in elements."""
    return (t.strides[0], *pair(t.strides[2:], 0))


def filter_of(w: Tensor) -> tuple[int, int]:
    return pair(w.shape[2:], 1)


def lines(params: Value) -> list[str]:
    """The kernel's source. x: (N, H, W, C), w: (R, S, C).

    Thread: `lanes` channels from c of `rows` by `columns` pixels from (n, p0, q0), y's rows m = (n * P + p) * Q + q.
    """
    columns, lanes = params["columns"], params["lanes"]
    x_bytes, w_bytes = DType(params["x"]).size, DType(params["w"]).size
    out = [
        "t = i32(cuda.blockIdx.x) * i32(cuda.blockDim.x) + i32(cuda.threadIdx.x)",
        "if t >= total:",
        "    return",
        "rectangle = divide(i32(t), groups_m, groups_s)",
        f"c = i32((t - rectangle * groups) * i32({lanes}))",
        "inside = within(c, i32(0), padded)",  # y may be padded further than x and w
        *(_ahead(params["taps"], w_bytes) if params["ahead"] else []),
        *place(f"i32({params['rows']})", columns),
        f"base = x + (i64(n) * i64(xn) + i64(c)) * i64({x_bytes})",
        f"filters = w + i64(c) * i64({w_bytes})",
    ]
    body = _shared if params["taps"][1] else _plain
    return out + body(params, x_bytes, w_bytes)


def _ahead(taps: tuple[int, int], w_bytes: int) -> list[str]:
    """Text that waits for the grids before; meanwhile what does not depend on x is to come to the L2 cache, by the threads of one
    rectangle: requests of all of them for the same lines took several times as long as the convolution."""
    taps_of_c = f"w + i64(select(inside != 0, c, i32(0))) * i64({w_bytes})"
    places = (
        f"i64(i32(i32(i32({r}) * wr) + i32(i32({s}) * ws))) * i64({w_bytes})" for r in range(taps[0]) for s in range(taps[1])
    )
    return [
        "if rectangle == i32(0):",
        f"    filters = {taps_of_c}",
        *(f"    prefetch(filters + {place})" for place in places),
        "    ahead(c, e)",
        "wait_for_earlier_grids()",
        "let_later_grids_start()",
    ]


def place(rows: str, columns: int) -> list[str]:
    """Text for the first pixel (n, p0, q0) of a rectangle, its number m in y, and the place (h0, x0) in x that it reads from."""
    return [
        "band = divide(rectangle, tiles_m, tiles_s)",
        f"q0 = i32((rectangle - band * tiles) * i32({columns}))",
        "n = divide(band, bands_m, bands_s)",
        f"p0 = i32((band - n * bands) * {rows})",
        "h0 = i32(p0 * sh - ph)",
        "x0 = i32(q0 * sw - pw)",
        "m = i32((n * P + p0) * Q + q0)",
    ]


def stores(p: str, columns: int, accs: str) -> list[str]:
    """Text that stores row p of a rectangle, all of whose columns `accs` holds."""
    if columns == 1:
        return [f"if p0 + {p} < P:", f"    store({accs}, i32(m + {p} * Q), c, e)"]
    return [f"if p0 + {p} < P:", f"    store({accs}, i32(m + {p} * Q), i32(1), i32(m - q0 + ({p} + i32(1)) * Q), c, e)"]


def _shared(params: Value, x_bytes: int, w_bytes: int) -> list[str]:
    """Straight down the image: each vector of x is read once, and multiplied for all pixels that it is a neighbour of.

    Rows of x and of the filter are read, as words, while the one above is multiplied; in a loop where registers do not hold two
    rows of the filter.
    """
    rows, columns, (taps_h, taps_w), stride = params["rows"], params["columns"], params["taps"], params["stride"]
    height, width = (rows - 1) * stride + taps_h, (columns - 1) * stride + taps_w

    def row(p: int) -> str:
        return " + ".join(f"a{p}_{q}" for q in range(columns))

    def words(name: str, i: int, j: int, size: int) -> str:
        return "".join(f"{name}{i % 2}_{j}_{k}, " for k in range(params["lanes"] * size // 4))

    def read_filter(i: int, r: str) -> list[str]:
        at = f"filters + i64(i32({r} * wr)) * i64({w_bytes})"
        return [
            f"{words('f', i, s, w_bytes)} = read_w({at} + i64(i32(i32({s}) * ws)) * i64({w_bytes}), inside)"
            for s in range(taps_w)
        ]

    def read_row(i: int, r: str) -> list[str]:
        text = [f"h = i32(h0 + {r})", "present = within(h, i32(0), H)", f"line = base + i64(i32(h * xh)) * i64({x_bytes})"]
        return text + [f"{words('x', i, j, x_bytes)} = read_x(line + column{j}, i32(present & present{j}))" for j in range(width)]

    def multiply(i: int, live: list[tuple[int, int]]) -> list[str]:
        """For the rows of y and of the filter that meet in row i of x."""
        text = []
        for j in range(width):
            text.append(f"v = unpack_x({words('x', i, j, x_bytes)})")
            taps = [(q, j - q * stride) for q in range(columns) if 0 <= j - q * stride < taps_w]
            text += [f"a{p}_{q} = multiply_add(a{p}_{q}, v, w{r}_{s})" for p, r in live for q, s in taps]
        return text

    def unpack(i: int, r: int) -> list[str]:
        return [f"w{r}_{s} = unpack_w({words('f', i, s, w_bytes)})" for s in range(taps_w)]

    out = _columns(width, x_bytes)
    if taps_h > MOST_UNROLLED:
        assert rows == 1
        out += [*(f"a0_{q} = zeros()" for q in range(columns)), "for r in range(R):"]
        inner = [*read_filter(0, "r"), *read_row(0, "r"), *unpack(0, 0), *multiply(0, [(0, 0)])]
        return [*out, *(f"    {line}" for line in inner), *stores("i32(0)", columns, row(0))]
    out += [*read_filter(0, "i32(0)"), *read_row(0, "i32(0)")]
    for i in range(height):
        if i + 1 < taps_h:
            out += read_filter(i + 1, f"i32({i + 1})")
        if i + 1 < height:
            out += read_row(i + 1, f"i32({i + 1})")
        if i < taps_h:
            out += unpack(i, i)
        live = [(p, i - p * stride) for p in range(rows) if 0 <= i - p * stride < taps_h]
        out += [f"a{p}_{q} = zeros()" for p, r in live if r == 0 for q in range(columns)]
        out += multiply(i, live)
        for p, r in live:
            if r == taps_h - 1:
                out += stores(f"i32({p})", columns, row(p))
    return out


def _columns(width: int, x_bytes: int) -> list[str]:
    """Where columns of x are, and whether they are there."""
    out = []
    for j in range(width):
        out.append(f"present{j} = i32(within(i32(x0 + i32({j})), i32(0), W) & inside)")
        out.append(f"column{j} = i64(i32((x0 + i32({j})) * xw)) * i64({x_bytes})")
    return out


def _plain(params: Value, x_bytes: int, w_bytes: int) -> list[str]:
    """Any window: tap by tap."""
    columns = range(params["columns"])
    counts = (params["lanes"] * size // 4 for size in (x_bytes, w_bytes))
    x, w = ("".join(f"{name}{k}, " for k in range(count)) for name, count in zip("bf", counts, strict=True))
    out = [
        *(f"a0_{q} = zeros()" for q in columns),
        "for r in range(R):",
        "    h = i32(h0 + r * dh)",
        "    present = i32(within(h, i32(0), H) & inside)",
        f"    line = base + i64(i32(h * xh)) * i64({x_bytes})",
        f"    taps = filters + i64(i32(r * wr)) * i64({w_bytes})",
        "    for s in range(S):",
        f"        {w} = read_w(taps + i64(i32(s * ws)) * i64({w_bytes}), inside)",
        f"        weight = unpack_w({w})",
    ]
    for q in columns:
        out += [
            f"        j = i32(x0 + s * dw + i32({q}) * sw)",
            f"        {x} = read_x(line + i64(i32(j * xw)) * i64({x_bytes}), i32(present & within(j, i32(0), W)))",
            f"        a0_{q} = multiply_add(a0_{q}, unpack_x({x}), weight)",
        ]
    return out + stores("i32(0)", len(columns), " + ".join(f"a0_{q}" for q in columns))
