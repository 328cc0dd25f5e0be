"""Inverted residuals in one launch: y = epilogue(project(depthwise(expand(x)))), 1×1, R×S and 1×1, what lies between on chip.
Or without the projection, where all of the hidden image is needed first, as for a squeeze: y = epilogue(depthwise(expand(x))).

`split` blocks share a rectangle of y's pixels; each takes every `split`-th 32 of the hidden channels. For these it multiplies the
pixels of x under the rectangle, its halo included, by the expansion's weights; convolves the results, which it keeps in shared
memory as fp16, channel by channel; and multiplies what comes of it by the projection's weights. So only in the halo something is
computed twice. The blocks are a cluster: they add up the sums of the projection, in the order of their numbers.

Rows of operands are 64 bytes, 32 halves of K, whose four chunks are permuted so that ldmatrix meets no bank twice. Weights come
by asynchronous copies one chunk of hidden channels ahead; the first ones while the launches before still run.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from tccompile.arch import KIB, Arch
from tccompile.expr import DType
from tccompile.kernels import epilogue
from tccompile.kernels.codegen import divider
from tccompile.kernels.depthwise import filter_of
from tccompile.kernels.gemm_sm90 import TOGETHER
from tccompile.kernels.implicit_gemm import describe, unaligned
from tccompile.kernels.loops import device, entry, vectors
from tccompile.kernels.spec import I32, Config, Function, FusedKernel, Launch, Ptr, Value, Work, code, memory_us
from tccompile.program import Conv, Op, Program

HIDDEN = 32
"""Hidden channels that a block computes at a time."""

ROW = 2 * HIDDEN
"""Bytes of a row of an operand."""

PITCH = ROW + 16
"""Bytes from pixel to pixel of the hidden image, so that fragments are written without bank conflicts."""

VECTOR = 8
INSTRUCTION = "mma.m16n8k16"

TILES = ((8, 8), (4, 16), (7, 7), (8, 4), (4, 8), (7, 4), (4, 7), (2, 16))
"""Rows and columns of a rectangle of y."""

SPLITS = (1, 2, 4, 8, 16, 32)
"""Blocks of a rectangle; of a cluster 8 at most."""

NUMBERS = (
    "along, along_m, along_s, down, down_m, down_s, P, Q, H, W, ph, pw, xn, xh, xw, channels, hidden, octets, "
    "wo, dr, ds, outputs, vo, stored"
)
"""The int32 parameters: rectangles along and down an image; extents, pads and strides of x in elements; channels of x in memory,
hidden channels, octets of those; strides of the weights w, d and v; y's channels, and those of them that are stored."""


@dataclass(frozen=True)
class Tile:
    """What a block computes, and where its shared memory holds what.

    rows, columns  of a rectangle of y; split, blocks that share it
    stride, taps   of the depthwise convolution
    depth          32 channels of x, so many times; across, 32 channels of y, so many times, or 0 without a projection
    """

    rows: int
    columns: int
    split: int
    stride: int
    taps: tuple[int, int]
    depth: int
    across: int

    @property
    def pixels(self) -> int:
        return self.rows * self.columns

    @property
    def row_warps(self) -> int:
        """Warps along the projection's pixels, 16 each; two along its channels."""
        return 4 if self.pixels > 32 else 2

    @property
    def threads(self) -> int:
        return 64 * self.row_warps

    @property
    def height(self) -> int:
        """Of the hidden image under the rectangle."""
        return (self.rows - 1) * self.stride + self.taps[0]

    @property
    def width(self) -> int:
        return (self.columns - 1) * self.stride + self.taps[1]

    @property
    def blocks(self) -> int:
        """16 pixels of the hidden image, so many times."""
        return -(-self.height * self.width // 16)

    @property
    def turns(self) -> int:
        """Blocks of 16 pixels that a warp expands."""
        return -(-self.blocks // (2 * self.row_warps))

    @property
    def image(self) -> int:
        """Bytes of x's pixels."""
        return self.depth * self.blocks * 16 * ROW

    @property
    def stage(self) -> int:
        """Bytes of the weights of 32 hidden channels: the expansion's, the projection's, the depthwise convolution's."""
        return (self.depth * HIDDEN + 32 * self.across + self.taps[0] * self.taps[1]) * ROW

    @property
    def hidden_at(self) -> int:
        return self.image + 2 * self.stage

    @property
    def rows_at(self) -> int:
        """Where the depthwise convolution's results lie, as rows of the projection's operand."""
        return (self.hidden_at + self.blocks * 16 * PITCH + 127) // 128 * 128

    @property
    def pitch(self) -> int:
        """Floats from row to row of the sums: 8 modulo 32, for accesses without bank conflicts."""
        return 32 * self.across + 8

    @property
    def smem(self) -> int:
        """Bytes to ask for; the sums lie where everything else was."""
        sums = 16 * self.row_warps * self.pitch * 4 if self.across else 0
        return max(self.rows_at + (16 * self.row_warps * ROW if self.across else 0), sums) + 128

    def resident(self, arch: Arch) -> int:
        """Blocks of a multiprocessor."""
        return 2 if self.threads == 128 and 2 * (self.smem + KIB) <= arch.smem_sm else 1


class InvertedResidual(FusedKernel):
    """Expansion, depthwise convolution and, if it has three ops, projection of fp16 images, channels last.

    From sm_90 on: the generations with clusters are also those that start a launch while others end.
    """

    tensor_cores = True

    def __init__(self, name: str, length: int) -> None:
        self.name, self.length = name, length

    def supports(self, ops: Sequence[Op], program: Program, arch: Arch) -> str | None:
        if not arch.tma:
            return f"{arch.name} has no clusters of blocks"
        tensors = program.tensors
        for op in ops:
            if not isinstance(op, Conv) or len(op.strides) != 2:
                return f"{op.nodes[0]} is no convolution of images"
            w = tensors[op.w]
            for t in (tensors[op.x], w):
                if t.dtype is not DType.F16:
                    return f"{t.name} is {t.dtype.value}; Tensor Cores are fed with float16"
            if w.storage not in program.constants:
                return f"{w.name} is computed"
        expand, depthwise, *project = _convolutions(ops)
        for op in (expand, *project):
            if op.groups != 1 or filter_of(tensors[op.w]) != (1, 1) or op.strides != (1, 1) or any(op.pads):
                return f"{op.nodes[0]} is no 1×1 convolution of single pixels"
            problem = describe(op, program)
            if reason := problem if isinstance(problem, str) else unaligned(problem):
                return reason
        filters = tensors[depthwise.w]
        count, taps = filters.shape[0], filter_of(filters)
        if not depthwise.groups == count == tensors[depthwise.x].shape[1]:
            return f"{depthwise.nodes[0]} is not depthwise"
        if depthwise.strides not in ((1, 1), (2, 2)) or depthwise.dilations != (1, 1) or max(taps) > 5:
            return f"{depthwise.nodes[0]} has strides {depthwise.strides}, dilations {depthwise.dilations} and {taps} taps"
        if not vectors(filters, 0, VECTOR) or filters.padded[0] < -(-count // VECTOR) * VECTOR:
            return f"channels of {filters.name} do not lie in aligned vectors of {VECTOR}"
        for op in ops[:-1]:
            if op.epilogue.shuffle > 1 or epilogue.loads_by_row(op, program):
                return f"{op.nodes[0]} reads more than its own weights by pixel"
        stored = _stored(ops[-1], program)
        if project and stored > 320:
            return f"{stored} output channels; it takes 320"
        if not project and stored > -(-count // VECTOR) * VECTOR:
            return f"{stored} channels are stored of {count}"
        if not any(self.configs(ops, program, arch)):
            return "a rectangle of x does not fit shared memory"
        return None

    def configs(self, ops: Sequence[Op], program: Program, arch: Arch) -> Iterator[Config]:
        chunks = -(-program.tensors[ops[1].y].shape[1] // HIDDEN)
        _, _, p, q = program.op_shape(ops[-1])
        for rows, columns in TILES:
            if rows >= 2 * p or columns >= 2 * q:
                continue
            for split in SPLITS:
                config = {"rows": rows, "columns": columns, "split": split}
                fits = split <= min(chunks, 8 if self.length == 3 else chunks)
                if fits and _tile(ops, program, config).smem <= arch.smem_block:
                    yield config

    def cost(self, ops: Sequence[Op], program: Program, config: Config, arch: Arch) -> float:
        """Not fitted: cycles of the instructions, at 1.6 GHz."""
        t = _tile(ops, program, config)
        n, _, p, q = program.op_shape(ops[-1])
        chunks = -(-program.tensors[ops[1].y].shape[1] // HIDDEN)
        together = t.row_warps / 2  # warps of a quarter of a multiprocessor
        expanding = t.turns * (2 * t.depth * max(45.0, 4 * 13 * together) + 220)
        convolving = t.taps[0] * t.taps[1] * 26 * together + 150
        projecting = 4 * t.across * 13 * together + 120
        chunk = (expanding + convolving + projecting + 100) / 1600
        joining = 0.3 if t.split == 1 or not t.across else 0.9 + 0.1 * t.across
        blocks = n * -(-p // t.rows) * -(-q // t.columns) * t.split
        room = (TOGETHER[t.split] if t.across else arch.sms) * t.resident(arch)
        waves = -(-blocks // room)
        moving = memory_us([program.tensors[ops[0].operands[0]], program.tensors[ops[-1].y]], arch)
        computing = waves * (0.9 + -(-chunks // t.split) * chunk + joining)
        return 1.35 + max(computing, moving) + 0.3 * min(computing, moving)

    def work(self, ops: Sequence[Op], program: Program, config: Config, arch: Arch) -> Work:
        expand, depthwise, *project = _convolutions(ops)
        last = ops[-1]
        x, w, d = (program.tensors[name] for name in (expand.x, expand.w, depthwise.w))
        v = program.tensors[project[0].w] if project else d
        t = _tile(ops, program, config)
        (n, outputs, p, q), hidden = program.op_shape(last), d.shape[0]
        along, down = -(-q // t.columns), -(-p // t.rows)
        if n * p * q == 0:
            return Work(())
        frame = epilogue.frame_of(last, program)
        lanes = {2: (2, 4), 3: (2, 4, 8)}[self.length]
        specs = [epilogue.describe(op, program, frame, lane) for op, lane in zip(ops, lanes, strict=True)]
        numbers = (
            *(along, *divider(along), down, *divider(down), p, q, *x.shape[2:], *depthwise.pads),
            *(x.strides[0], x.strides[2], x.strides[3], w.padded[1], hidden, -(-hidden // VECTOR)),
            *(w.strides[0], d.strides[2], d.strides[3], outputs, v.strides[0], _stored(last, program)),
        )
        launch = Launch(
            code(
                self.name, rows=t.rows, columns=t.columns, split=t.split, stride=t.stride, taps=t.taps, depth=t.depth,
                across=t.across, inner=tuple(spec.params for spec in specs[:-1]), epilogue=specs[-1].params,
            ),
            grid=(n * down * along * t.split, 1, 1),
            block=t.threads,
            args=(*map(Ptr, (x.name, w.name, d.name, v.name)), *map(I32, numbers), *(arg for spec in specs for arg in spec.args)),
            smem=t.smem,
        )  # fmt: skip
        handed_on = {op.y for op in ops[:-1]}
        inputs = {name for op in ops[:-1] for name in op.inputs if program.tensors[name].storage not in program.constants}
        return Work((launch,), reads=tuple(sorted(inputs - handed_on)))

    def build(self, arch: Arch, **params: Value) -> Function:
        from numba import cuda
        from numba.cuda import types

        from tccompile.kernels.device_math import inline
        from tccompile.kernels.ptx import hopper, memory, mma, simt
        from tccompile.kernels.ptx.core import i32, u32, u64

        t = tile_of(params)

        @inline
        def base():
            return i32((mma.shared_address(cuda.shared.array(0, types.uint8)) + u32(127)) & u32(0xFFFFFF80))

        @inline
        def copy(to, source, inside):
            mma.cp_async(u32(to), u64(source), i32(16) if inside else i32(0))

        @inline
        def words(a, b, inside):
            return i32(mma.halves(a, b) & u32(inside))

        inner = [epilogue.build_results(spec) for spec in params["inner"]]
        store, extra = epilogue.build(params["epilogue"])
        scope: dict[str, Any] = {
            "base": base, "copy": copy, "words": words, "expand": mma.multiply_stage(INSTRUCTION, 1, HIDDEN // 16, HIDDEN),
            "expanded": inner[0][0], "store": store, "part_of": hopper.part(HIDDEN, 8), "commit": mma.cp_async_commit,
            "wait_copies": mma.cp_async_wait(0), "hidden_zeros": mma.zeros(HIDDEN // 2), "zeros4": mma.zeros(4),
            "put1": mma.store_shared_words(1), "put2": mma.store_shared_words(2),
            "read4": memory.load(DType.F16, 4, space="shared"), "multiply_add": simt.multiply_add(4),
            "wait_for_earlier_grids": hopper.wait_for_earlier_grids,
            "let_later_grids_start": hopper.let_later_grids_start,
        }  # fmt: skip
        if t.across:
            scope |= {
                "convolved": inner[1][0], "zeros": mma.zeros(8 * t.across),
                "project": mma.multiply_stage(INSTRUCTION, 1, t.across, HIDDEN),
                "spill": mma.spill_block(INSTRUCTION, 1, t.across, t.pitch), "cluster_arrive": hopper.cluster_arrive,
                "cluster_leave": hopper.cluster_leave, "cluster_wait": hopper.cluster_wait, "in_block": hopper.in_block,
                "get4": hopper.load_cluster_f32x4,
            }  # fmt: skip
        tuples = ["eh", "ed", "e"] if t.across else ["eh", "e"]
        body = device("inverted_residual", ", ".join(["x, w, d, v, numbers", *tuples]), lines(t), **scope)
        extras = *(kinds for _, kinds in inner), extra
        counts = 4, NUMBERS.count(",") + 1, *map(len, extras)
        signature = types.void(*(types.int64,) * 4, *(types.int32,) * counts[1], *(kind for kinds in extras for kind in kinds))
        cluster = t.split if t.across else 1
        return Function(entry(body, *counts), signature, t.threads, t.resident(arch), cluster=cluster)


INVERTED_RESIDUALS = InvertedResidual("inverted_residual", 3), InvertedResidual("expand_depthwise", 2)


def _convolutions(ops: Sequence[Op]) -> list[Conv]:
    return [op for op in ops if isinstance(op, Conv)]


def _stored(op: Op, program: Program) -> int:
    """Channels of y that are stored, its padding included."""
    channels = program.op_shape(op)[1]
    return channels if op.epilogue.shuffle > 1 else max(channels, program.tensors[op.y].padded[1])


def _tile(ops: Sequence[Op], program: Program, config: Config) -> Tile:
    expand, depthwise, *project = _convolutions(ops)
    return Tile(
        config["rows"],
        config["columns"],
        config["split"],
        depthwise.strides[0],
        filter_of(program.tensors[depthwise.w]),
        -(-program.tensors[expand.w].shape[1] // 32),
        -(-_stored(project[0], program) // 32) if project else 0,
    )


def tile_of(params: Value) -> Tile:
    """The tile of a code's parameters."""
    names = ("rows", "columns", "split", "stride", "taps", "depth", "across")
    return Tile(**{name: params[name] for name in names})


# --- The code --------------------------------------------------------------------------------------------------------


def lines(t: Tile) -> list[str]:
    """The kernel's source. x: (N, H, W, C), w: [hidden][C], d: [R][S][hidden], v: [O][hidden]; y's rows: m = (n * P + p) * Q + q.

    `split` neighbouring blocks share a rectangle of y; the one of number `rank` takes hidden channels rank * 32 …,
    (rank + split) * 32 …
    """
    chunk = [
        # Before the first chunk: its weights and the pixels. Afterwards the next one's weights, while this one is computed.
        "if begun:",
        "    wait_copies()",
        "    cuda.syncthreads()",  # all copies have come, and nobody reads the other stage or the rows any more
        f"ahead = i32(part + i32({t.split}) * begun)",
        f"weights = i32(now + i32({t.stage})) if now == first_stage else first_stage",
        "if ahead * i32(4) < octets:",
        *(f"    {line}" for line in _weights(t)),
        "commit()",
        "if begun:",
        *(f"    {line}" for line in _compute(t)),
        "    part = ahead",
        "else:",
        "    wait_for_earlier_grids()",
        "    let_later_grids_start()",
        *(f"    {line}" for line in _image(t)),
        "    commit()",
        "    begun = i32(1)",
        "now = weights",
    ]
    return [
        f"{NUMBERS} = numbers",
        "tid = i32(cuda.threadIdx.x)",
        "lane, warp = i32(tid & i32(31)), i32(tid >> i32(5))",
        "g, u = i32(lane >> i32(2)), i32(lane & i32(3))",
        "block = i32(cuda.blockIdx.x)",
        f"number, rank = i32(block >> i32({t.split.bit_length() - 1})), i32(block & i32({t.split - 1}))",
        "band = divide(number, along_m, along_s)",
        f"q0 = i32((number - band * along) * i32({t.columns}))",
        "n = divide(band, down_m, down_s)",
        f"p0 = i32((band - n * down) * i32({t.rows}))",
        f"h0, w0 = i32(p0 * i32({t.stride}) - ph), i32(q0 * i32({t.stride}) - pw)",
        "pixels = base()",
        *_places(t),
        f"first_stage = i32(pixels + i32({t.image}))",
        f"now, begun, part = i32(first_stage + i32({t.stage})), i32(0), rank",
        *(["acc = zeros()"] if t.across else []),
        "while part * i32(4) < octets:",
        *(f"    {line}" for line in chunk),
        *(_sum(t) if t.across else []),
    ]


def _split(name: str, n: int, whole: str, rest: str) -> list[str]:
    """whole, rest = divmod(name, n)"""
    multiplier, shift = divider(n)
    return [f"{whole} = divide({name}, i32({multiplier}), i32({shift}))", f"{rest} = i32({name} - {whole} * i32({n}))"]


def _turns(number: str, apart: int, count: int, body: list[str]) -> list[str]:
    """`body` for each of `count` things, of which one with a number has every `apart`-th: `turn` counts them."""
    turns = -(-count // apart)
    if turns * apart > count:
        body = [f"if {number} + i32(turn) * i32({apart}) < i32({count}):", *(f"    {line}" for line in body)]
    return [f"for turn in range({turns}):", *(f"    {line}" for line in body)]


def _inside(t: Tile) -> list[str]:
    """h, k: where pixel `row` of the hidden image lies in x; present: 1 if it does."""
    return [
        *_split("row", t.width, "i", "j"),
        "h, k = i32(h0 + i), i32(w0 + j)",
        f"present = i32(within(row, i32(0), i32({t.height * t.width})) & within(h, i32(0), H) & within(k, i32(0), W))",
    ]


def _places(t: Tile) -> list[str]:
    """Where a thread copies, reads and writes what."""
    out = [
        # Copies: rows of 64 bytes, four threads each. A thread's rows have one swizzle, as they are 16 or more apart.
        "line, column = i32(tid >> i32(2)), i32(tid & i32(3))",
        "own = i32(line * i32(64) + ((column ^ ((line >> i32(1)) & i32(3))) << i32(4)))",
        # ldmatrix: rows of A, a chunk of K in the lower or the upper 16 lanes; rows of B, one in every other 8 lanes
        "row, half = i32(lane & i32(15)), i32(lane >> i32(4))",
        "from_a = i32(row * i32(64) + ((half ^ ((row >> i32(1)) & i32(3))) << i32(4)))",
        "row, half = i32((lane & i32(7)) + (lane >> i32(4) << i32(3))), i32((lane >> i32(3)) & i32(1))",
        "from_b = i32(row * i32(64) + ((half ^ ((row >> i32(1)) & i32(3))) << i32(4)))",
        "from_pixels = i32(pixels + warp * i32(1024) + from_a)",
        f"hidden_at = i32(pixels + i32({t.hidden_at}))",
        f"to_hidden = i32(hidden_at + (warp * i32(16) + g) * i32({PITCH}) + u * i32(4))",
        # The hidden pixels that this thread's accumulators are of: beyond the image they are the padding, zeros
        "kept = i32(0)",
        f"for turn in range({2 * t.turns}):",
        f"    row = i32((warp + i32(turn >> 1) * i32({2 * t.row_warps})) * i32(16) + g + i32(turn & 1) * i32(8))",
        *(f"    {line}" for line in _inside(t)),
        "    kept = i32(kept | (present << i32(turn)))",
        # The depthwise convolution: four channels of two pixels
        "quad, pixel = i32(tid & i32(7)), i32(tid >> i32(3))",
    ]
    for k in (0, 1):
        at = f"i32(pixel + i32({8 * t.row_warps * k}))"
        out += [
            f"row = select({at} < i32({t.pixels}), {at}, i32(0))",
            *_split("row", t.columns, "i", "j"),
            f"window{k} = i32(hidden_at + (i * i32({t.stride * t.width}) + j * i32({t.stride})) * i32({PITCH}) + quad * i32(8))",
        ]
        if not t.across:
            out += [
                "p, q = i32(p0 + i), i32(q0 + j)",
                f"there = within({at}, i32(0), i32({t.pixels})) & within(p, i32(0), P) & within(q, i32(0), Q)",
                f"m{k} = select(there != 0, i32((n * P + p) * Q + q), i32(-1))",
            ]
    if t.across:
        out += [
            f"rows = i32(pixels + i32({t.rows_at}))",
            "from_rows = i32(rows + (warp >> i32(1)) * i32(1024) + from_a)",
            "to_rows = i32(((quad >> i32(1)) ^ ((pixel >> i32(1)) & i32(3))) << i32(4))",
            "to_rows = i32(rows + pixel * i32(64) + to_rows + (quad & i32(1)) * i32(8))",
        ]
    return out


def _weights(t: Tile) -> list[str]:
    """Ask for the weights of 32 hidden channels, `ahead` * 32 and up, into the stage at `weights`; zeros beyond the channels."""
    apart = 16 * t.row_warps  # rows of a turn

    filters = (32 * t.depth + 32 * t.across) * ROW
    of_w = [
        f"k = i32(i32(turn) * i32({apart // 32}) + (line >> i32(5)))",
        "ok = i32(inside & within(i32((k * i32(4) + column) << i32(3)), i32(0), channels))",
        f"copy(i32(weights + own + i32(turn) * i32({apart * ROW})), source + i64(k) * i64(64), ok)",
    ]
    of_v = [
        f"row = i32(line + i32(turn) * i32({apart}))",
        "ok = i32(inside & within(row, i32(0), outputs))",
        f"to = i32(weights + own + i32({32 * t.depth * ROW}) + i32(turn) * i32({apart * ROW}))",
        "copy(to, source + i64(row) * i64(vo) * i64(2), ok)",
    ]
    return [
        "first = i32(ahead * i32(32))",
        # w: for each 32 of x's channels, 32 rows
        "row = i32(first + (line & i32(31)))",
        "inside = within(row, i32(0), hidden)",
        "source = w + (i64(row) * i64(wo) + i64(column) * i64(8)) * i64(2)",
        *_turns("line", apart, 32 * t.depth, of_w),
        # v: a row for each of y's channels
        "inside = within(i32(ahead * i32(4) + column), i32(0), octets)",
        "source = v + (i64(first) + i64(column) * i64(8)) * i64(2)",
        *(_turns("line", apart, 32 * t.across, of_v) if t.across else []),
        # d: a row for each tap
        f"if line < i32({t.taps[0] * t.taps[1]}):",
        *(f"    {text}" for text in _split("line", t.taps[1], "r", "s")),
        "    source = d + (i64(r) * i64(dr) + i64(s) * i64(ds) + i64(first) + i64(column) * i64(8)) * i64(2)",
        f"    copy(i32(weights + i32({filters}) + line * i32(64) + column * i32(16)), source, i32(inside))",
    ]


def _image(t: Tile) -> list[str]:
    """Ask for x's pixels: rows of 32 channels at a time, zeros outside the image."""
    apart, total = 16 * t.row_warps, 16 * t.blocks
    pixel = [
        f"row = i32(line + i32(turn) * i32({apart}))",
        *_inside(t),
        "source = x + (i64(n) * i64(xn) + i64(i32(h * xh)) + i64(i32(k * xw)) + i64(column) * i64(8)) * i64(2)",
        f"to = i32(pixels + own + i32(turn) * i32({apart * ROW}))",
        f"for k in range({t.depth}):",
        "    ok = i32(present & within(i32((i32(k) * i32(4) + column) << i32(3)), i32(0), channels))",
        f"    copy(i32(to + i32(k) * i32({total * ROW})), source + i64(k) * i64(64), ok)",
    ]
    return _turns("line", apart, total, pixel)


def _compute(t: Tile) -> list[str]:
    """32 hidden channels: expansion, depthwise convolution, and projection or stores."""
    warps, half, total = 2 * t.row_warps, 8 * t.row_warps, 16 * t.blocks
    filters = (32 * t.depth + 32 * t.across) * ROW
    expansion = [
        "hs = hidden_zeros()",
        f"a, b = i32(from_pixels + i32(turn) * i32({warps * 16 * ROW})), i32(now + from_b)",
        f"for k in range({t.depth}):",
        f"    hs = expand(hs, i32(a + i32(k) * i32({total * ROW})), i32(b + i32(k) * i32({HIDDEN * ROW})))",
        "keep0, keep1 = i32(-((kept >> i32(2 * turn)) & i32(1))), i32(-((kept >> i32(2 * turn + 1)) & i32(1)))",
        f"to = i32(to_hidden + i32(turn) * i32({warps * 16 * PITCH}))",
        f"for octet in range({HIDDEN // 8}):",
        "    a, b = i32(0), i32(0)",
        "    if i32(first >> i32(3)) + i32(octet) < octets:",
        "        z = expanded(part_of(hs, i32(octet)), i32(first + i32(octet) * i32(8) + u * i32(2)), eh)",
        "        a, b = words(z[0], z[1], keep0), words(z[2], z[3], keep1)",
        "    put1(i32(to + i32(octet) * i32(16)), a)",
        f"    put1(i32(to + i32(octet) * i32(16) + i32({8 * PITCH})), b)",
    ]
    out = [
        "first = i32(part * i32(32))",
        *_turns("warp", warps, t.blocks, expansion),
        "cuda.syncthreads()",
        "a0, a1 = zeros4(), zeros4()",
        f"for r in range({t.taps[0]}):",
        f"    for s in range({t.taps[1]}):",
        f"        weight = read4(i32(now + i32({filters}) + (i32(r) * i32({t.taps[1]}) + i32(s)) * i32({ROW}) + quad * i32(8)))",
        f"        at = i32((i32(r) * i32({t.width}) + i32(s)) * i32({PITCH}))",
        "        a0 = multiply_add(a0, read4(i32(window0 + at)), weight)",
        "        a1 = multiply_add(a1, read4(i32(window1 + at)), weight)",
    ]
    if not t.across:
        out += ["c = i32(first + quad * i32(4))", "if c < stored:"]
        return out + [line for k in (0, 1) for line in (f"    if m{k} >= 0:", f"        store(a{k}, m{k}, c, e)")]
    return [
        *out,
        "a, b, c, f = i32(0), i32(0), i32(0), i32(0)",
        "if i32(first >> i32(3)) + i32(quad >> i32(1)) < octets:",
        "    z = convolved(a0 + a1, i32(first + quad * i32(4)), ed)",
        "    a, b = words(z[0], z[1], i32(-1)), words(z[2], z[3], i32(-1))",
        "    c, f = words(z[4], z[5], i32(-1)), words(z[6], z[7], i32(-1))",
        "put2(to_rows, a, b)",
        f"put2(i32(to_rows + i32({half * ROW})), c, f)",
        "cuda.syncthreads()",
        f"b = i32(now + from_b + i32({32 * t.depth * ROW}) + (warp & i32(1)) * i32({16 * t.across * ROW}))",
        "acc = project(acc, from_rows, b)",
    ]


def _sum(t: Tile) -> list[str]:
    """The cluster's sums: each block adds up and stores every `split`-th pixel."""
    groups = 4 * t.across
    return [
        "wait_copies()",
        "cuda.syncthreads()",
        f"to = i32(pixels + ((warp >> i32(1)) * i32(16) + g) * i32({4 * t.pitch}))",
        f"spill(acc, i32(to + (warp & i32(1)) * i32({64 * t.across}) + u * i32(8)), i32(0))",
        "cluster_arrive()",
        "cluster_wait()",
        "at = tid",
        f"while at < i32({-(-t.pixels // t.split) * groups}):",
        *(f"    {line}" for line in _split("at", groups, "line", "c")),
        f"    c, row = i32(c * i32(8)), i32(line * i32({t.split}) + rank)",
        *(f"    {line}" for line in _split("row", t.columns, "i", "j")),
        "    p, q = i32(p0 + i), i32(q0 + j)",
        f"    if row < i32({t.pixels}) and p < P and q < Q and c < stored:",
        f"        place = i32(pixels + row * i32({4 * t.pitch}) + c * i32(4))",
        "        total = get4(in_block(place, i32(0))) + get4(in_block(i32(place + i32(16)), i32(0)))",
        f"        for other in range(1, {t.split}):",
        "            more = get4(in_block(place, i32(other))) + get4(in_block(i32(place + i32(16)), i32(other)))",
        f"            total = ({', '.join(f'total[{k}] + more[{k}]' for k in range(8))})",
        "        store(total, i32((n * P + p) * Q + q), c, e)",
        f"    at = i32(at + i32({t.threads}))",
        "cluster_leave()",
        "cluster_wait()",
    ]
