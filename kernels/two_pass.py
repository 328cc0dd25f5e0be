"""What softmax and normalization share: reduce some elements, reduce them again knowing the first result, compute each.

T threads share an output: the elements that are reduced together, or 8 neighbouring lanes of such. There are 256 / T outputs a
block, or one of more threads, or twice as many. Elements are kept in registers between the passes where they fit: as float32, or
where these would be many as the words that were read, which each pass converts again. What is too long for that is kept in
shared memory, where two rows of a multiprocessor's have room, or read again, mostly from a cache. Where neighbouring threads
read neighbouring elements of an output, they add up by exchanges within a warp.

The kernel walks over vectors of `unit` lanes. Where the lanes are reduced, a vector holds elements of one output ("along");
where they are kept, it holds one element of each of `unit` outputs ("across").
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from tccompile.arch import Arch
from tccompile.ir.ops import Op
from tccompile.ir.program import Program
from tccompile.ir.types import DType
from tccompile.kernels import epilogue
from tccompile.kernels.loops import (
    Loops,
    exchange,
    is_vector_type,
    loops,
    power,
    tree,
    unravel,
    unravel_args,
    vectors,
)
from tccompile.kernels.spec import F32, I32, LAUNCH_US, Config, Launch, Ptr, Value, Work, code, traffic_us
from tccompile.kernels.text import Called, KernelText, intrinsic, parameters

THREADS = 256
REGISTERS = 8  # vectors that a thread keeps
WORDS, LOADS = 32, 3  # that these may be, and an epilogue may read, for 64 registers: 1024 threads a multiprocessor; else half


@dataclass(frozen=True)
class Shares:
    """How the work is shared out; loops move in x, in y's rows and in y's lanes.

    unit    lanes of a vector: 8 or 1
    across  whether a vector's lanes belong to different outputs
    kept    loops over outputs (vectors of them, if across)
    inner   loops over the elements of an output (vectors of them, if along)
    by_k    whether neighbouring threads read neighbouring elements of an output, not neighbouring outputs
    threads T, a power of 2
    rows    outputs of a thread: their scales and shifts are read once
    straight words of a vector, if an output's vectors lie side by side in x and y, or 0
    held    vectors that a thread keeps of an output, or 0
    shared  whether shared memory keeps them, not registers
    words   words of a vector, if it is kept, or read again, as words that each pass converts, or 0
    count   elements that are reduced together
    whole   whether no vector that is reduced has lanes, or consists of lanes, of the padding
    sure    a thread's first vectors, of those held, that are there with all their lanes
    """

    unit: int
    across: bool
    kept: Loops
    inner: Loops
    by_k: bool
    threads: int
    rows: int
    straight: int
    held: int
    shared: bool
    words: int
    count: int
    whole: bool
    sure: int

    @property
    def block(self) -> int:
        """Threads of a block"""
        return max(THREADS, self.threads)

    @property
    def blocks(self) -> int:
        return -(-self.kept.size * self.threads // (self.block * self.rows))

    @property
    def smem(self) -> int:
        """Bytes of a block's dynamic shared memory: what `exchange` needs, and the vectors of all threads"""
        return 4 * (_exchanged(self.threads) + self.threads * self.held * self.words) if self.shared else 0


def _exchanged(threads: int) -> int:
    """Numbers of shared memory that sums of one output over so many threads, all of a block, pass through, in two passes."""
    return 2 * threads // 32


def describe(op: Op, program: Program, axes: tuple[int, ...], groups: int = 0, config: Config | None = None) -> Shares:
    """How an op that reduces `axes` (and within `groups` of axis 1) shares out its work; without a config, in the first way."""
    x, y = program.tensors[op.x], program.tensors[op.y]  # type: ignore[attr-defined]
    frame = epilogue.frame_of(op, program)
    lane = frame[-1]
    assert lane is not None
    row_step, step = {lane: 0}, 1
    for axis in reversed(frame[:-1]):
        if axis is not None:
            row_step[axis], step = step, step * x.shape[axis]
    channels = x.shape[1] // groups if groups else 0
    unit = 8 if is_vector_type(x) and vectors(x, lane, 8) and y.padded[lane] % 8 == 0 else 1
    if groups and lane == 1 and channels % 8:
        unit = 1
    kept: list[tuple[int, ...]] = []  # extent, and steps in x, rows and lanes
    inner: list[tuple[int, ...]] = []
    # In x's order of memory, so that neighbouring iterations are neighbours; all lanes, those of the padding too.
    for axis in sorted(range(x.rank), key=lambda a: (-x.strides[a], a == lane)):
        u = unit if axis == lane else 1
        extent = -(-y.padded[axis] // u) if axis == lane else x.shape[axis]
        steps = (x.strides[axis] * u, row_step[axis], u if axis == lane else 0)
        if groups and axis == 1:
            share = channels // u
            kept.append((-(-extent // share), *(s * share for s in steps)))
            inner.append((share, *steps))
        else:
            (inner if axis in axes else kept).append((extent, *steps))
    outer, within = (
        loops([n for n, *_ in nest], *zip(*(s for _, *s in nest), strict=True)) if nest else loops([], (), (), ())
        for nest in (kept, inner)
    )
    across = lane not in axes and not (groups and lane == 1)
    size, outputs = within.size, outer.size
    by_k = x.inner is None or x.inner in axes or bool(groups and x.inner == 1)
    neighbours = unit == 8 and within.strides == ((unit,), (0,), (unit,)) and not any(outer.strides[2])
    straight = unit * x.dtype.size // 4 if neighbours else 0
    count = channels if groups else 1
    for axis in axes:
        count *= x.shape[axis]
    if config is None:
        config = ways(size, outputs, unit, by_k, straight)[0]
    threads, rows, shared = (int(config[name]) for name in ("threads", "rows", "shared"))  # type: ignore[arg-type]
    held = -(-size // threads)
    limit = REGISTERS if not across else REGISTERS // 2
    held = held if shared or held <= limit else 0
    words = straight if shared or threads > THREADS or held * rows > REGISTERS // 2 else 0
    of_padding = bool(groups) and lane == 1  # groups of it are outputs that nobody reads
    whole = across or of_padding or y.padded[lane] == x.shape[lane]
    sure = held - 1 if whole else min(held - 1, x.shape[lane] // unit // threads) if within.depth == 1 else 0
    if words and whole and size % threads == 0:
        sure = held
    return Shares(
        unit, across, outer, within, by_k, threads, rows, straight, held, bool(shared), words, count, whole, max(0, sure)
    )


def ways(size: int, outputs: int, unit: int, by_k: bool, straight: int) -> list[Config]:
    """Threads of an output of `size` vectors: as few as have registers for it, up to one a vector; `straight` as in Shares."""

    def way(threads: int, rows: int = 1, shared: int = 0) -> Config:
        return {"threads": threads, "rows": rows, "shared": shared}

    if not by_k:
        return [way(min(THREADS // min(8 if unit == 8 else 32, power(outputs)), power(size)))]
    if straight and size > THREADS * REGISTERS // 4:  # more than half a block keeps as float32
        held = {t: -(-size // t) for t in (128, 256, 512, 1024)}
        fit = [t for t, n in held.items() if 2 < n <= REGISTERS and (t < 1024 or n * straight <= WORDS)]
        both = [t for t in fit if 2 * held[t] <= REGISTERS and 2 * held[t] * straight <= WORDS]
        again = [512] if fit == [1024] else [] if fit else [1024, 512]  # for rows, or epilogues, that need more registers
        staged = [] if fit and fit != [1024] else [way(512, 1, 1)]
        return [way(t, rows) for rows, some in ((1, fit + again), (2, both)) for t in some] + staged
    most = min(THREADS, power(size))
    fit = [t for t in (1 << i for i in range(9)) if t <= most and -(-size // t) <= REGISTERS // 2] or [most]
    both = [t for t in fit[:4] if 2 * -(-size // t) <= REGISTERS // 2]
    return [way(t, rows) for rows, some in ((1, fit[:4]), (2, both)) for t in some]


def configs(op: Op, program: Program, axes: tuple[int, ...], arch: Arch, groups: int = 0) -> Iterator[Config]:
    """The ways to share out the op's work; two outputs a thread where the second one is the next row of y, so many blocks on."""
    shares = describe(op, program, axes, groups)
    plain = shares.kept.depth == 1 and shares.kept.strides[1:] == ((1,), (0,)) and not any(shares.inner.strides[1])
    for way in ways(shares.inner.size, shares.kept.size, shares.unit, shares.by_k, shares.straight):
        if way["shared"]:
            if arch.cp_async and describe(op, program, axes, groups, way).smem <= arch.smem_block:
                yield way
        elif way["rows"] == 1 or plain:
            yield way


def cost(op: Op, program: Program, shares: Shares, arch: Arch) -> float:
    """Microseconds: the memory's time, the instructions', or the latency of what each thread reads one after the other."""
    steps = -(-shares.inner.size // shares.threads)
    passes = 1 if shares.held else 3
    x = program.tensors[op.x]  # type: ignore[attr-defined]
    # Measured on an H200: a vector of 8 takes 110 instructions in all, about 100 more if it may lack lanes.
    lane = 14 * (passes if shares.by_k else 1) + 2 * (shares.held > 0 and shares.words > 0)  # conversions
    partial = 100 if shares.by_k and shares.unit == 8 and shares.count % 8 else 0
    instructions = 100 + shares.rows * (steps * lane * shares.unit + partial)
    issue = shares.blocks * shares.block * instructions / (arch.fp32_tflops * 1e6 / 2 * 0.6)
    # Words, a guess: all vectors are on their way at once, in 64 registers a thread.
    threads_sm, ahead = (min(arch.threads_sm, 1024), 4) if shares.words else (arch.threads_sm, REGISTERS)
    if shares.shared:
        threads_sm, ahead = min(threads_sm, arch.smem_sm // (shares.smem + 1024) * shares.threads), shares.held
    waves = max(1.0, shares.blocks / (arch.sms * (threads_sm // shares.block)))
    size = x.size * x.dtype.size
    # What is read again comes from L2, at twice the bandwidth, if all blocks' rows fit.
    cached = not shares.words or size / waves <= arch.l2 * 2**20
    again = (passes - 1) * size / (arch.gbps * (2e3 if cached else 1e3))
    reads = min(shares.held, ahead) + max(shares.held - ahead, 0) / 8 if shares.held else 3 * steps * 0.6
    once = 0.4 + 0.4 * reads + 0.3 * (shares.rows - 1) + (0.0 if shares.by_k else 0.8)
    filled = min(1.0, 2 * shares.blocks / arch.sms)  # an SM draws a part of the bandwidth at most
    moved = (traffic_us(op, program, arch) + again) / max(filled, 0.01)
    latency = once if waves == 1 else once * 0.3 * waves
    longest = max(moved, issue, latency)
    return LAUNCH_US + longest + 0.1 * (moved + issue + latency - longest)


def work(kernel: str, op: Op, program: Program, shares: Shares, eps: float, **params: Value) -> Work:
    """The launch, for `build` with the same `params`."""
    x, y = program.tensors[op.x], program.tensors[op.y]  # type: ignore[attr-defined]
    if 0 in y.padded:
        return Work(())
    frame = epilogue.frame_of(op, program)
    lane = frame[-1]
    assert lane is not None
    spec = epilogue.describe(op, program, frame, shares.unit)
    present = x.padded[lane] if shares.unit > 1 else x.shape[lane]
    launch = Launch(
        code(
            kernel,
            x=x.dtype.value,
            unit=shares.unit,
            across=shares.across,
            whole=shares.whole,
            sure=shares.sure,
            kept=shares.kept.depth,
            inner=shares.inner.depth,
            threads=shares.threads if shares.by_k else 0,
            rows=shares.rows,
            held=shares.held,
            shared=shares.shared,
            words=shares.words,
            epilogue=spec.params,
            **params,
        ),
        grid=(shares.blocks, 1, 1),
        block=shares.block,
        args=(
            Ptr(op.x),  # type: ignore[attr-defined]
            F32(1 / max(shares.count, 1)),
            F32(eps),
            *map(I32, (shares.kept.size, shares.inner.size, power(shares.threads).bit_length() - 1, x.shape[lane], present)),
            *shares.kept.args,
            *shares.inner.args,
            *spec.args,
        ),
        smem=shares.smem,
    )
    return Work((launch,))


@dataclass(frozen=True)
class Passes:
    """The op in text: `{v}` an element, `{r}` and `{s}` the results of the first and second pass.

    first, second  how a pass combines; its identity; and whether what is not there leaves its result alone: zeros that of the
                   first pass, the first pass' identity that of the second
    between, after what is done to the results: of `{r}`, and of `{s}`; inverse (1 / count) and eps may be used
    kept           the output, if registers hold the second pass' terms as `{v}`; empty if they are of no use
    """

    first: tuple[str, str, bool]
    between: str
    term: str
    second: tuple[str, str, bool]
    after: str
    out: str
    kept: str = ""


def text(passes: Passes, params: dict[str, Any]) -> KernelText:
    """The kernel for the parameters that `work` gave."""
    x = DType(params["x"])
    words, block = params["words"], max(THREADS, params["threads"])
    form = epilogue.Form.decoded(params["epilogue"])
    stored = epilogue.source(form, params["rows"])
    scope: dict[str, Called] = {
        "store": stored.function,
        "read": intrinsic("ptx.memory.load", x, params["unit"], True, "global.nc"),
        "shuffle": intrinsic("ptx.simt.shuffle"),
        "kept": unravel(params["kept"], 3),
        "inner": unravel(params["inner"], 3),
    }
    blocks = 1
    if words:
        scope |= {
            "read_x": intrinsic("ptx.memory.load_words", words, "global.nc"),
            "unpack_x": intrinsic("ptx.memory.floats", x, params["unit"]),
            "anew": intrinsic("ptx.memory.anew", words),
            "power_of_2": intrinsic("ptx.softmax.exp2"),
            "store_inside": epilogue.source(form.unmasked, params["rows"]).function,
            "held_x": intrinsic("ptx.memory.load_words", words, "shared"),
            "copy": intrinsic("ptx.mma.cp_async"),
            "commit": intrinsic("ptx.mma.cp_async_commit"),
            "landed": intrinsic("ptx.mma.cp_async_wait", 0),
            "shared_address": intrinsic("ptx.mma.shared_address"),
        }
        registers = 0 if params["shared"] else params["rows"] * params["held"] * words
        few = registers <= WORDS and len(form.loads) <= LOADS
        blocks = max(1, (1024 if few else 512) // block)
    signature = {
        "x": "address",
        **parameters("float", "inverse, eps"),
        **parameters("int", "outputs, K, bits, channels, present"),
        "wo": unravel_args(params["kept"], 3),
        "wk": unravel_args(params["inner"], 3),
        "e": stored.kinds,
    }
    return KernelText(signature, source(passes, params), scope, block, blocks)


def source(passes: Passes, params: dict[str, Any]) -> list[str]:
    """The kernel's source.

    Thread t of T: vectors t, t + T … of `rows` outputs from o, each as many outputs after the one before as a block has at once.
    """
    unit, across, held, sure, rows, threads = (params[name] for name in ("unit", "across", "held", "sure", "rows", "threads"))
    block, words, converted = max(THREADS, threads), params["words"], held and not params["words"]
    staged = params["shared"]
    x = DType(params["x"])
    accumulators, ahead = unit if across else 1, 4 if words else 2
    which = (lambda i: i) if across else (lambda i: 0)
    if threads:
        lines = [
            f"tid, T, apart = i32(cuda.threadIdx.x), i32({threads}), i32({block // threads})",
            f"t = tid & i32({threads - 1})",
            f"o = i32(i32(cuda.blockIdx.x) * i32({rows}) * apart + tid // i32({threads}))",
        ]
        if staged:
            lines.append("shared = cuda.shared.array(0, f32)")
            lines.append(f"slots = i32(i32(shared_address(shared)) + i32({4 * _exchanged(threads)}) + tid * i32({4 * words}))")
        elif threads > 32:
            lines.append(f"shared = cuda.shared.array({2 * rows * accumulators * block // 32}, f32)")
    else:
        lines = [
            "tid, block = i32(cuda.threadIdx.x), i32(cuda.blockIdx.x)",
            "T = i32(1) << bits",
            "stride = i32(256) >> bits",
            "t = tid // stride",
            "o = block * stride + (tid & (stride - 1))",
            f"shared = cuda.shared.array({THREADS * accumulators}, f32)",
        ]
    for u in range(rows):
        number = f"o + i32({u}) * apart" if u else "o"
        lines.append(f"end{u} = K if {number} < outputs else i32(0)")
        lines.append(f"x_{u}, m_{u}, c_{u} = kept(i32(min({number}, outputs - 1)), wo)")

    def indented(text: list[str]) -> list[str]:
        return [f"    {line}" for line in text]

    def place(j: int, at: str) -> list[str]:
        """Where vector k = `at` lies: x{j}, m{j}, c{j} from the output's own."""
        if words:
            return [f"k{j} = i32({at} + i32({j * threads}))", f"c{j} = i64({at}) * i64({unit}) + i64({j * threads * unit})"]
        at = f"{at} + i32({j}) * T"
        return [f"k{j} = i32({at})", f"x{j}, m{j}, c{j}_ = inner(k{j}, wk)", f"c{j} = i32(c_0 + c{j}_)"]

    def read(u: int, j: int, full: bool) -> str:
        name, function, n = ("w", "read_x", unit * x.size // 4) if words else ("v", "read", unit)
        names = ", ".join(f"{name}{u}_{j}_{i}" for i in range(n))
        if staged:
            return f"{names} = held_x(i32(slot + i32({4 * words * threads * j})), i32(1))"
        inside = "i32(1)" if words and full else f"i32(k{j} < end{u} and c{j} < present)"
        return f"{names} = {function}(x + (x_{u} + {'c' if words else 'x'}{j}) * i64({x.size}), {inside})"

    def unpack(j: int, turn: int) -> list[str]:
        """The elements of vector j, of all outputs, out of its words.

        In later passes of words that look changed, by zeros that only the launch knows: else ptxas would find that it has these
        elements already, and keep them in the registers that words are to save.
        """
        out = []
        for u in range(rows if words else 0):
            given = ", ".join(f"w{u}_{j}_{i}" for i in range(words))
            if held and turn and not staged:
                taken = ", ".join(f"a{i}" for i in range(words))
                out.append(f"{taken} = anew({given}, bits >> i32({20 + turn}))")
                given = taken
            out.append(f"{', '.join(f'v{u}_{j}_{i}' for i in range(unit))} = unpack_x({given})")
        return out

    def mask(u: int, j: int, full: bool) -> list[str]:
        """Elements that are not there become the first pass' identity."""
        if across or full or (params["whole"] and passes.first[2]):
            return []
        if params["whole"]:
            out = [f"there = k{j} < end{u}"]
            return out + [f"v{u}_{j}_{i} = select(there, v{u}_{j}_{i}, {passes.first[1]})" for i in range(unit)]
        out = [f"left = i32(channels - c{j}) if k{j} < end{u} else i32(0)"]
        return out + [f"v{u}_{j}_{i} = select(left > i32({i}), v{u}_{j}_{i}, {passes.first[1]})" for i in range(unit)]

    def combine(u: int, j: int, full: bool, name: str, term: str, how: tuple[str, str, bool]) -> list[str]:
        """Vector j of output u into its accumulators: lane by lane, or pairwise where all of the vector belongs to one output."""
        out, values = [], []
        for i in range(unit):
            value = term.format(v=f"v{u}_{j}_{i}", r=f"r{u}_{which(i)}")
            if converted and passes.kept and name == "s":
                out.append(f"v{u}_{j}_{i} = {value}")
                value = f"v{u}_{j}_{i}"
            values.append(value)
        if across:
            for i, value in enumerate(values):
                out.append(f"{name}{u}_{i} = {how[0].format(f'{name}{u}_{i}', f'select(k{j} < end{u}, {value}, {how[1]})')}")
            return out
        if name == "s" and not how[2] and not full:
            out.append(f"left = i32(channels - c{j}) if k{j} < end{u} else i32(0)")
            values = [f"select(left > i32({0 if params['whole'] else i}), {value}, {how[1]})" for i, value in enumerate(values)]
        while len(values) > 1:
            pairs = [how[0].format(*values[i : i + 2]) for i in range(0, len(values), 2)]
            names = [f"p{i}" for i in range(len(pairs))]
            out += [f"{n} = {pair}" for n, pair in zip(names, pairs, strict=True)]
            values = names
        return [*out, f"{name}{u}_0 = {how[0].format(f'{name}{u}_0', values[0])}"]

    def finish(name: str, how: str, turn: int) -> list[str]:
        """Every thread of an output gets its result."""
        accs = [f"{name}{u}_{i}" for u in range(rows) for i in range(accumulators)]
        if not threads:
            back = [f"{a} = shared[{i * THREADS} + tid - t * stride]" for i, a in enumerate(accs)]
            return [*tree(accs, how, THREADS), *back, "cuda.syncthreads()"]
        first = turn * len(accs) * (block // 32)
        if threads <= THREADS:
            return exchange(accs, how, threads, block, first)
        # One output a block, of up to 32 warps: each lane takes the result of one of these, and all warps add them up again.
        places = [f"shared[i32({first + i * (block // 32)}) + {{}}]" for i in range(len(accs))]
        share = [f"    {p.format('(tid >> i32(5))')} = {a}" for p, a in zip(places, accs, strict=True)]
        take = [f"{a} = {p.format(f'(tid & i32({block // 32 - 1}))')}" for p, a in zip(places, accs, strict=True)]
        within = exchange(accs, how, 32, block)
        return [*within, "if tid & i32(31) == 0:", *share, "cuda.syncthreads()", *take, *exchange(accs, how, block // 32, block)]

    def write(j: int, full: bool) -> list[str]:
        text = passes.kept if converted and passes.kept else passes.out
        results = [
            text.format(v=f"v{u}_{j}_{i}", r=f"r{u}_{which(i)}", s=f"s{u}_{which(i)}") for u in range(rows) for i in range(unit)
        ]
        where = f"i32({'m_0' if words else f'm_0 + m{j}'}){'' if rows == 1 else ', apart, outputs'}"
        store = "store_inside" if words and full else "store"
        return [f"if k{j} < end0:", f"    {store}(({', '.join(results)},), {where}, c{j}, e)"]

    def over(turn: int, body: Callable[[int, bool], list[str]]) -> list[str]:
        """`body(j, full)` for each vector of the thread, some at a time unless in registers; `full`: all its lanes are there."""
        if held and not staged:
            return [line for j in range(held) for line in (*unpack(j, turn), *body(j, j < sure))]

        def some(count: int, full: int) -> list[str]:
            out = [line for j in range(count) for line in place(j, "k")]
            out += [read(0, j, False) for j in range(count)]
            return out + [line for j in range(count) for line in (*unpack(j, turn), *body(j, j < full))]

        if not staged:
            return ["k = t", "while k < end0:", *indented(some(ahead, 0)), f"    k = i32(k + i32({ahead}) * T)"]
        loops_, rest = divmod(sure, ahead)
        next_ = [f"k = i32(k + i32({ahead * threads}))", f"slot = i32(slot + i32({4 * words * ahead * threads}))"]
        whole = [f"while k < i32({loops_ * ahead * threads}):", *indented(some(ahead, ahead)), *indented(next_)] if loops_ else []
        return ["k, slot = t, slots", *whole, *some(held - loops_ * ahead, rest)]

    if staged:
        lines += [
            "k, slot = t, slots",
            f"while k < i32({held * threads}):",
            f"    at = x + (x_0 + i64(k) * i64({unit})) * i64({x.size})",
            f"    inside = i32(i32(k < end0 and k * i32({unit}) < present) << i32(4))",
            *(f"    copy(i32(slot + i32({b})), at + i64({b}), inside)" for b in range(0, 4 * words, 16)),
            f"    k, slot = i32(k + i32({threads})), i32(slot + i32({4 * words * threads}))",
            "commit()",
            "landed()",
        ]
    elif held:
        for j in range(held):
            lines += place(j, "t")
            lines += [read(u, j, j < sure) for u in range(rows)]
    parts = (("r", "{v}", passes.first, passes.between), ("s", passes.term, passes.second, passes.after))
    for turn, (name, term, how, then) in enumerate(parts):
        lines += [f"{name}{u}_{i} = {how[1]}" for u in range(rows) for i in range(accumulators)]

        def add(j: int, full: bool, of: tuple[str, str, tuple[str, str, bool]] = (name, term, how)) -> list[str]:
            first = mask if of[0] == "r" or not converted else lambda *_: []
            return [line for u in range(rows) for line in (*first(u, j, full), *combine(u, j, full, *of))]

        lines += over(turn, add)
        lines += finish(name, how[0], turn)
        for u in range(rows):
            for i in range(accumulators):
                lines.append(f"{name}{u}_{i} = {then.format(r=f'{name}{u}_{i}', s=f'{name}{u}_{i}')}")
    return lines + over(len(parts), write)
