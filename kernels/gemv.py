"""Matrix products with few rows or few columns, whose time is that of reading the other operand once.

That operand streams from memory into registers, in vectors and without a detour through shared memory; the small one is read
again by every block, from a cache. A warp follows `rows` rows of the streamed operand; the warps of a block have
other rows (`across`) or other parts of K (`along`), and K is split between blocks where there are too few rows to fill the GPU.
Warps, then blocks add their parts in a fixed order.

plain         a lane takes every 32nd vector of its warp's four rows, so that a warp reads 512 neighbouring bytes of fp16; float32
              multiply-adds, then a sum over the warp
Tensor Cores  the warp's 16 rows are an mma's rows, the small operand its columns. Both operands may permute K alike, so a lane
              takes as fragments what one vector of 16 bytes holds: halves 8t … 8t + 7 of 32 for lane t of four, or 16 bytes of
              64; sums of integers are int32, and those of floats of 8 bits are added up in float32 vector by vector
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod

from tccompile.arch import Arch, Feature
from tccompile.ir.extent import ceil_div, round_up
from tccompile.ir.ops import Conv, Gemm, Op
from tccompile.ir.program import Program
from tccompile.ir.tensor import Tensor
from tccompile.ir.types import FLOAT8, DType
from tccompile.kernels import epilogue
from tccompile.kernels.codegen import divider
from tccompile.kernels.gemm_mma import AS_HALVES
from tccompile.kernels.implicit_gemm import CHUNK, CHUNK_BYTES, MOST_SCRATCH, OPERANDS, Problem, describe, unaligned, unfit
from tccompile.kernels.ptx.atoms import Atom, warp_atom
from tccompile.kernels.rates import measured
from tccompile.kernels.spec import I32, Config, Counters, Launch, Ptr, Scratch, Value, Work, code
from tccompile.kernels.text import Called, KernelText, TextKernel, intrinsic, parameters

WARPS = 8
THREADS = 32 * WARPS


def resident(tensor_cores: bool, few: int) -> int:
    """Blocks that a multiprocessor holds: as many as have registers for the vectors under way."""
    return 3 if tensor_cores and few <= 8 else 2


LANES = 8
"""Results that are stored at once."""


@dataclass(frozen=True)
class Shape:
    """What a warp computes at once.

    rows     rows of the streamed operand
    vectors  vectors that a warp reads of a row in one turn: `lanes` neighbouring lanes read one each, `turns` times
    few      rows of the small operand, padded
    """

    rows: int
    lanes: int
    turns: int
    few: int

    @property
    def vectors(self) -> int:
        return self.lanes * self.turns


def shape_of(tensor_cores: bool, few: int) -> Shape:
    """The warp's work for `few` rows of the small operand."""
    if tensor_cores:
        return Shape(16, 4, 2, round_up(few, 8))
    return Shape(4, 32, 2 if few <= 4 else 1, 1 << (few - 1).bit_length())


@dataclass(frozen=True)
class Streams:
    """A problem as a product of a streamed operand with a small one. `swapped`: the streamed one is x, and y's rows are its."""

    swapped: bool
    streamed: Tensor
    small: Tensor
    many: int
    few: int
    pitches: tuple[int, int]  # elements from row to row: of the streamed operand, of the small one
    batches: tuple[tuple[int, int], tuple[int, int]]  # (outer, inner) strides of each


def streams(problem: Problem) -> Streams:
    """The operand with fewer rows is the small one."""
    rows, columns = (problem.rows, problem.x, problem.x_pixel[2], problem.x_batch), (
        problem.columns, problem.w, problem.w_column, problem.w_batch,
    )  # fmt: skip
    swapped = problem.columns < problem.rows
    many, few = (rows, columns) if swapped else (columns, rows)
    return Streams(swapped, many[1], few[1], many[0], few[0], (many[2], few[2]), (many[3], few[3]))


class _Gemv(TextKernel):
    """A product, of a Gemm or a 1×1 Conv, of which one operand has few rows and the other is read once."""

    most: int  # rows of the small operand

    def supports(self, op: Op, program: Program, arch: Arch) -> str | None:
        if self.tensor_cores and warp_atom(arch) is None:
            return f"{arch.name} has no Tensor Core instruction with 16 rows and 8 columns"
        problem = describe(op, program)
        if isinstance(problem, str):
            return problem
        few = min(problem.rows, problem.columns)
        if few > self.most:
            return f"it has {problem.rows} rows and {problem.columns} columns; one of them must be at most {self.most}"
        for t, k_major in zip((problem.x, problem.w), problem.k_major, strict=True):
            if not k_major:
                return f"{t.name} is transposed; neighbours along K are read at once"
        if not problem.linear:
            return "it gathers its rows from an image"
        if problem.batch[1] > 1 and problem.column_batch:
            return "it has groups of channels"
        if problem.batches > 65535:
            return f"it has {problem.batches} batches; a grid has 65535 layers"
        if self.tensor_cores:
            if (reason := unfit(problem, MULTIPLIED)) is not None:
                return reason
            if _atom(arch, problem.x.dtype, problem.w.dtype) is None:
                return f"{arch.name} has no Tensor Core instruction of 16 rows for {problem.x.dtype.value}"
            return None
        for t in (problem.x, problem.w):
            if t.dtype not in (DType.F16, DType.BF16, DType.F32):
                return f"{t.name} is {t.dtype.value}; it multiplies float16, bfloat16 and float32"
        return unaligned(problem)

    def configs(self, op: Op, program: Program, arch: Arch) -> Iterator[Config]:
        problem = describe(op, program)
        assert isinstance(problem, Problem)
        warp = shape_of(self.tensor_cores, min(problem.rows, problem.columns))
        ranked: list[tuple[float, Config]] = []
        for across in (1, 2, 4, 8):
            if across * warp.rows < LANES:
                continue
            most = max(1, _vectors(problem) // (WARPS // across * warp.vectors))
            for wanted in (1, 2, 3, 4, 6, 8, 12, 16, 24, 33, 48, 66):
                splits, _ = _share(problem, wanted)
                config: Config = {"across": across, "splits": splits}
                fits = splits == 1 or _scratch(problem, across * warp.rows, warp.few, splits) <= MOST_SCRATCH
                if fits and wanted <= most and config not in [c for _, c in ranked]:
                    ranked.append((self.cost(op, program, config, arch), config))
        ranked.sort(key=lambda r: r[0])
        yield from (config for _, config in ranked[:8])

    def cost(self, op: Op, program: Program, config: Config, arch: Arch) -> float:
        own = measured(arch).gemv
        problem = describe(op, program)
        assert isinstance(problem, Problem)
        s, across = streams(problem), int(config["across"])  # type: ignore[arg-type]
        warp = shape_of(self.tensor_cores, s.few)
        splits, each = _share(problem, int(config["splits"]))  # type: ignore[arg-type]
        rows = across * warp.rows
        tiles = ceil_div(s.many, rows) * problem.batches
        blocks = tiles * splits
        turns = ceil_div(each, WARPS // across * warp.vectors)
        slots = arch.sms * resident(self.tensor_cores, s.few)
        waves = ceil_div(blocks, slots)
        vector = width(s.streamed.dtype) * s.streamed.dtype.size
        # Little's law: what the blocks at work have under way arrives once in a latency, and no faster than memory gives it. It
        # is not all of a warp's turn at any time.
        ahead = 2 if self.tensor_cores else 1  # turns that are under way
        of_row = min(warp.vectors, _vectors(problem))
        flying = min(blocks, slots) * WARPS * warp.rows * of_row * ahead * vector * own.under_way
        rate = min(
            arch.gbps * 1e3 * (own.tensor_cores if self.tensor_cores else 1.0), flying / own.latency_us
        )  # as measured on an H200
        if self.tensor_cores and s.streamed.dtype in FLOAT8 and arch.cc[0] in AS_HALVES:
            rate *= own.widened * (1 - own.unfilled * max(0.0, 1 - blocks / slots))
        rate /= 1 + own.across * (across.bit_length() - 1)  # rows that are read at once lie apart in memory
        moved = sum(prod(t.padded) * t.dtype.size for t in (problem.x, problem.w, problem.y))
        again = (
            blocks * s.few * each * width(s.small.dtype) * s.small.dtype.size / (arch.gbps * own.again)
        )  # from L2, which also gives what streams
        # A streamed vector takes, beside its load, 8 conversions and 8 multiply-adds for each row of the small operand; of that
        # a vector is converted once for the warp's rows.
        work = 16 + 2 * warp.few if self.tensor_cores else 16 + CHUNK * (1 + warp.few) + 12 * warp.few / warp.rows
        issue = blocks * rows * each * work / (arch.fp32_tflops * 1e6 / 3)
        results = own.result_us * rows * warp.few if s.swapped else 0.0  # that a block stores row by row
        waiting = waves * (ceil_div(turns, ahead) * own.latency_us + own.start_us + results) - own.start_us
        longest = max(moved / rate + again, issue, waiting)
        ragged = (waves * slots / blocks - 1) * moved / rate / waves if waves > 1 else 0.0  # the last wave's gaps
        finish = 0.0
        if splits > 1:
            part = rows * warp.few * 4
            finish = measured(arch).reduce_us + splits * part / own.part + tiles * splits * part / (arch.gbps * own.parts)
        # Few blocks find room while those of the launch before still run (measured with one row of up to 1400).
        room = max(0.0, own.room_us - 2 * blocks / slots)
        beside = own.exposed * (min(issue, moved / rate + again) + ragged)
        return measured(arch).launch_us - room + own.ramp_us + own.turn_us * min(turns / ahead, 10) + longest + beside + finish

    def work(self, op: Op, program: Program, config: Config, arch: Arch) -> Work:
        problem = describe(op, program)
        assert isinstance(problem, Problem)
        if problem.batches * problem.rows * problem.stored == 0:
            return Work(())
        s, across = streams(problem), int(config["across"])  # type: ignore[arg-type]
        warp = shape_of(self.tensor_cores, s.few)
        splits, each = _share(problem, int(config["splits"]))  # type: ignore[arg-type]
        rows = across * warp.rows
        spec = epilogue.describe(op, program, epilogue.frame_of(op, program), LANES)
        tiles = ceil_div(problem.rows if s.swapped else problem.stored, rows)
        numbers = [s.many, s.few, _vectors(problem), each, problem.rows, problem.stored, ceil_div(problem.stored, LANES)]
        numbers += [problem.row_batch, problem.batch[1], *divider(problem.batch[1])]
        for pitch, batch in zip(s.pitches, s.batches, strict=True):
            numbers += [v // width(s.streamed.dtype) for v in (pitch, *batch)]
        launch = Launch(
            code(
                _PLAIN if not self.tensor_cores else _MMA,
                streamed=s.streamed.dtype.value,
                small=s.small.dtype.value,
                few=warp.few,
                across=across,
                swapped=s.swapped,
                split=splits > 1,
                epilogue=spec.params,
            ),
            grid=(tiles, splits, problem.batches),
            block=THREADS,
            args=(Ptr(s.streamed.name), Ptr(s.small.name), Scratch(), Counters(), *map(I32, numbers), *spec.args),
        )
        if splits == 1:
            return Work((launch,))
        return Work((launch,), tiles * problem.batches * splits * rows * warp.few * 4, tiles * problem.batches * 4)

    def source(self, arch: Arch, **params: Value) -> KernelText:
        stored = epilogue.source(epilogue.Form.decoded(params["epilogue"]))
        streamed, small = DType(params["streamed"]), DType(params["small"])
        sums = DType.I32 if streamed.size == 1 and not streamed.is_float else DType.F32
        scope: dict[str, Called] = {
            "store": stored.function,
            "read_part": intrinsic("ptx.memory.load", sums),
            "store_part": intrinsic("ptx.memory.store", sums),
            "last_to_arrive": intrinsic("parts.split.last_to_arrive", arch.has(Feature.FENCES)),
        }
        if self.tensor_cores:
            scope["read"] = intrinsic("ptx.mma.load_chunk")
            atom = _atom(arch, streamed, small)
            assert atom is not None
            scope["multiply"] = intrinsic("ptx.mma.warp_multiply", atom.name, OPERANDS[streamed], OPERANDS[small])
        else:
            scope["shuffle"] = intrinsic("ptx.simt.shuffle")
            scope["dot"] = intrinsic("ptx.simt.dot", CHUNK)
            for name, dtype in (("s", streamed), ("t", small)):
                scope[f"read_{name}"] = intrinsic("ptx.memory.load_words", CHUNK * dtype.size // 4, "global.nc")
                scope[f"unpack_{name}"] = intrinsic("ptx.memory.floats", dtype, CHUNK)
        signature = {**parameters("address", ADDRESSES), **parameters("int", NUMBERS), "e": stored.kinds}
        blocks = resident(self.tensor_cores, params["few"])
        return KernelText(signature, lines(self.tensor_cores, params), scope, THREADS, blocks)


MULTIPLIED = (DType.F16, DType.I8, DType.U8, DType.E4M3, DType.E5M2)
"""What Tensor Cores multiply here."""


def _atom(arch: Arch, streamed: DType, small: DType) -> Atom | None:
    """The instruction of 16 rows that multiplies these, if the generation has one."""
    atom = warp_atom(arch, OPERANDS[streamed], OPERANDS[small])
    return atom if atom is not None and atom.m == 16 else None


def width(dtype: DType) -> int:
    """Elements of a vector."""
    return max(CHUNK, CHUNK_BYTES // dtype.size)


def _vectors(problem: Problem) -> int:
    """Vectors of a row."""
    return ceil_div(problem.channels, width(problem.x.dtype))


def _share(problem: Problem, splits: int) -> tuple[int, int]:
    """(splits, vectors of each) that cover K with at most `splits` parts; a part begins at a multiple of 8 of them."""
    each = max(8, round_up(ceil_div(_vectors(problem), splits), 8))
    return max(1, ceil_div(_vectors(problem), each)), each


def _scratch(problem: Problem, rows: int, few: int, splits: int) -> int:
    return ceil_div(max(problem.rows, problem.stored), rows) * problem.batches * splits * rows * few * 4


ADDRESSES = "streamed, small, scratch, counters"
NUMBERS = (
    "many, few, chunks, each, rows, stored, groups, row_batch, inner, inner_m, inner_s, "
    "s_row, s_outer, s_inner, t_row, t_outer, t_inner"
)


def lines(tensor_cores: bool, params: dict[str, Value]) -> list[str]:
    """The kernel's source.

    Block: rows blockIdx.x * across * R … of the streamed operand, vectors blockIdx.y * each … of K, batch blockIdx.z. Results
    of a block lie in shared memory as (along, row, row of the small operand).
    """
    warp, across, few = shape_of(tensor_cores, params["few"]), params["across"], params["few"]
    along, rows = WARPS // across, across * warp.rows
    count = rows * few
    streamed, small = (DType(params[name]) for name in ("streamed", "small"))
    s_bytes, t_bytes = (width(dtype) * dtype.size for dtype in (streamed, small))
    integers, taken = not streamed.is_float, epilogue.Form.decoded(params["epilogue"]).taken
    kind, total, result = ("i32", "i64", "i64" if taken is DType.I64 else "f32") if integers else ("f32",) * 3
    out = [
        "tid, tile, part, batch = i32(cuda.threadIdx.x), i32(cuda.blockIdx.x), i32(cuda.blockIdx.y), i32(cuda.blockIdx.z)",
        f"shared = cuda.shared.array({along * count}, {kind})",
        "lane, warp = tid & i32(31), tid >> i32(5)",
        f"at_k, at_row = warp // i32({across}), warp % i32({across})",
        "outer = divide(batch, inner_m, inner_s)",
        "within = i32(batch - outer * inner)",
        f"s_base = streamed + (i64(outer) * i64(s_outer) + i64(within) * i64(s_inner)) * i64({s_bytes})",
        f"t_base = small + (i64(outer) * i64(t_outer) + i64(within) * i64(t_inner)) * i64({t_bytes})",
        "end = min(chunks, i32((part + i32(1)) * each))",
        f"row = (tile * i32({across}) + at_row) * i32({warp.rows})",
        f"begin = i32(part * each + at_k * i32({warp.vectors}))",
        *(_mma_loop(warp, s_bytes, along, streamed) if tensor_cores else _plain_loop(warp, s_bytes, t_bytes, along)),
        *added(params, along, rows, few, kind, total),
    ]
    return out + stored(params, rows, few, result)


def added(params: Mapping[str, Value], along: int, rows: int, few: int, kind: str = "f32", total: str = "f32") -> list[str]:
    """A thread adds the parts of some results: of the block's warps, then of all blocks. They lie in shared memory then."""
    count = rows * few
    out = [
        "cuda.syncthreads()",
        "at = tid",
        f"while at < {count}:",
        f"    total = {total}(shared[at])",
        f"    for i in range(1, {along}):",
        f"        total += {total}(shared[at + i * {count}])",
        f"    shared[at] = {kind}(total)",
    ]
    if params["split"]:
        size = 4 * count
        out += [
            "    place = (i64(batch) * i64(cuda.gridDim.x) + i64(tile)) * i64(cuda.gridDim.y)",
            f"    store_part(scratch + (place + i64(part)) * i64({size}) + i64(at) * i64(4), total)",
            f"    at += i32({THREADS})",
            "parts = i32(cuda.gridDim.y)",
            "number = i64(batch) * i64(cuda.gridDim.x) + i64(tile)",
            "if not last_to_arrive(u64(counters + number * i64(4)), parts):",
            "    return",
            "at = tid",
            f"while at < {count}:",
            f"    first = scratch + number * i64(parts) * i64({size}) + i64(at) * i64(4)",
            f"    total = {total}(0)",
            "    i = i32(0)",
            "    while i + i32(4) <= parts:",  # four loads at once
            *(f"        v{j} = read_part(first + i64(i + i32({j})) * i64({size}))" for j in range(4)),
            "        total = total + v0 + v1 + v2 + v3",
            "        i += i32(4)",
            "    while i < parts:",
            f"        total += read_part(first + i64(i) * i64({size}))",
            "        i += i32(1)",
            f"    shared[at] = {kind}(total)",
        ]
    return [*out, f"    at += i32({THREADS})", "cuda.syncthreads()"]


def stored(params: Mapping[str, Value], rows: int, few: int, result: str = "f32") -> list[str]:
    """Each thread stores groups of 8 neighbouring columns."""
    out = ["at = tid"]
    if params["swapped"]:
        # y's padding may reach further than the small operand's; what it is given does not matter.
        values = [f"{result}(shared[r * i32({few}) + min(c + i32({i}), i32({few - 1}))])" for i in range(LANES)]
        out += [
            f"while at < i32({rows}) * groups:",
            "    r, g = at // groups, at % groups",
            f"    m, c = i32(tile * i32({rows}) + r), i32(g * i32({LANES}))",
            "    if m < rows:",
        ]
    else:
        groups = rows // LANES
        values = [f"{result}(shared[(g * i32({LANES}) + i32({i})) * i32({few}) + m])" for i in range(LANES)]
        out += [
            f"while at < i32({groups}) * few:",
            f"    m, g = at // i32({groups}), at % i32({groups})",
            f"    c = i32(tile * i32({rows}) + g * i32({LANES}))",
            "    if c < stored:",
        ]
    out += [f"        store(({', '.join(values)}), i32(batch * row_batch + m), c, e)", f"    at += i32({THREADS})"]
    return out


def _plain_loop(warp: Shape, s_bytes: int, t_bytes: int, along: int) -> list[str]:
    """Sums of a lane's products, then over the lanes: R·H numbers a warp, which its first lane hands on."""
    rows, few, turns = range(warp.rows), range(warp.few), range(warp.turns)

    def words(name: str, u: int, i: int, size: int) -> str:
        return ", ".join(f"{name}{u}_{i}[{k}]" for k in range(size // 4))

    out = [f"a{r}_{j} = f32(0)" for r in rows for j in few]
    for r in rows:
        out.append(f"s{r} = s_base + i64(row + i32({r})) * (i64(s_row) * i64({s_bytes}))")
        out.append(f"s_end{r} = end if row + i32({r}) < many else i32(0)")
    for j in few:
        out.append(f"t{j} = t_base + i64({j}) * (i64(t_row) * i64({t_bytes}))")
        out.append(f"t_end{j} = end if i32({j}) < few else i32(0)")
    out += ["k = i32(begin + lane)", "while k < end:"]
    for u in turns:
        out.append(f"    k{u} = i32(k + i32({u * warp.lanes}))")
        out += [f"    x{u}_{r} = read_s(s{r} + i64(k{u}) * i64({s_bytes}), i32(k{u} < s_end{r}))" for r in rows]
        out += [f"    z{u}_{j} = read_t(t{j} + i64(k{u}) * i64({t_bytes}), i32(k{u} < t_end{j}))" for j in few]
    for u in turns:
        out += [f"    v{r} = unpack_s({words('x', u, r, s_bytes)})" for r in rows]
        for j in few:
            out.append(f"    w = unpack_t({words('z', u, j, t_bytes)})")
            out += [f"    a{r}_{j} = dot(a{r}_{j}, v{r}, w)" for r in rows]
    out.append(f"    k = i32(k + i32({along * warp.vectors}))")
    for half in (16, 8, 4, 2, 1):
        for a in (f"a{r}_{j}" for r in rows for j in few):
            out += [f"other = shuffle({a}, i32({half}))", f"{a} = {a} + other"]
    out += ["if lane == 0:", f"    to = (warp * i32({warp.rows})) * i32({warp.few})"]
    return out + [f"    shared[to + i32({r * warp.few + j})] = a{r}_{j}" for r in rows for j in few]


def _mma_loop(warp: Shape, size: int, along: int, streamed: DType) -> list[str]:
    """Lane (g, t) reads vectors of `size` bytes, t, t + 4 … of rows g and g + 8, and of rows g (and g + 8) of the small operand.

    One turn's vectors are read while those of the turn before are multiplied.
    """
    blocks = range(warp.few // 8)
    step, zero, rough = along * warp.vectors, "f32(0)" if streamed.is_float else "i32(0)", streamed in FLOAT8
    out = ["g, t = lane >> i32(2), lane & i32(3)"]
    out += [f"a{b}_{i} = {zero}" for b in blocks for i in range(4)]
    for r in range(2):
        out.append(f"s{r} = s_base + i64(row + g + i32({8 * r})) * (i64(s_row) * i64({size}))")
        out.append(f"s_end{r} = end if row + g + i32({8 * r}) < many else i32(0)")
    for b in blocks:
        out.append(f"t{b} = t_base + i64(g + i32({8 * b})) * (i64(t_row) * i64({size}))")
        out.append(f"t_end{b} = end if g + i32({8 * b}) < few else i32(0)")

    def read(turn: int, at: str) -> list[str]:
        text = []
        for u in range(warp.turns):
            text.append(f"k = i32({at} + t + i32({u * warp.lanes}))")
            for name, n in (("s", 2), ("t", len(blocks))):
                for r in range(n):
                    words = ", ".join(f"{name}{turn}{u}_{r}_{i}" for i in range(4))
                    text.append(f"{words} = read(u64({name}{r} + i64(k) * i64({size})), i32(k < {name}_end{r}))")
        return text

    def multiply(turn: int) -> list[str]:
        text = []
        for u in range(warp.turns):
            for b in blocks:
                acc = ", ".join(f"{'p' if rough else 'a'}{b}_{i}" for i in range(4))
                text += [f"{acc} = {', '.join([zero] * 4)}"] if rough else []
                for i in (0, 2):  # words i and i + 1 of a vector are 8 bytes of K, 32 over the four lanes
                    words = [f"s{turn}{u}_{r}_{j}" for j in (i, i + 1) for r in range(2)]
                    words += [f"t{turn}{u}_{b}_{j}" for j in (i, i + 1)]
                    text.append(f"{acc} = multiply({acc}, {', '.join(words)})")
                text += [f"a{b}_{i} += p{b}_{i}" for i in range(4)] if rough else []
        return text

    out += [*read(0, "begin"), "first = begin", "while first < end:"]
    for turn in range(2):
        out += [f"    {line}" for line in (*read(1 - turn, f"first + i32({(turn + 1) * step})"), *multiply(turn))]
    out.append(f"    first = i32(first + i32({2 * step}))")
    for b in blocks:
        for i in range(4):
            at = f"(warp * i32(16) + g + i32({i // 2 * 8})) * i32({warp.few}) + t * i32(2) + i32({8 * b + i % 2})"
            out.append(f"shared[{at}] = a{b}_{i}")
    return out


_PLAIN, _MMA = "gemv", "gemv_mma"


class Gemv(_Gemv):
    """Gemm with at most 8 rows or columns on any generation."""

    name = _PLAIN
    realises: type[Op] = Gemm
    most = 8


class ConvGemv(Gemv):
    """The same for a Conv that is such a product: 1×1, of few pixels or into few channels."""

    name = "conv_gemv"
    realises = Conv


class GemvMma(_Gemv):
    """Gemm with at most 16 rows or columns: fp16 from sm_75 on, integers of 8 bits from sm_80, floats of 8 bits from sm_89."""

    name = _MMA
    realises: type[Op] = Gemm
    tensor_cores = True
    most = 16


class ConvGemvMma(GemvMma):
    """The same for a Conv that is such a product."""

    name = "conv_gemv_mma"
    realises = Conv


GEMV = (ConvGemvMma(), GemvMma(), ConvGemv(), Gemv())
