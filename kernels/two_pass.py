"""What softmax and normalization share: reduce some elements, reduce them again knowing the first result, compute each.

T threads share an output: the elements that are reduced together, or 8 neighbouring lanes of such. There are 256 / T outputs a
block, or twice as many. Elements are kept in registers between the passes where they fit; else they are read again, mostly from
a cache. Where neighbouring threads read neighbouring elements of an output, they add up by exchanges within a warp.

The kernel walks over vectors of `unit` lanes. Where the lanes are reduced, a vector holds elements of one output ("along");
where they are kept, it holds one element of each of `unit` outputs ("across").
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from tccompile.arch import Arch
from tccompile.expr import DType
from tccompile.kernels import epilogue
from tccompile.kernels.loops import (
    Loops,
    device,
    entry,
    exchange,
    is_vector_type,
    loops,
    power,
    tree,
    unravel,
    unravel_args,
    vectors,
)
from tccompile.kernels.spec import F32, I32, LAUNCH_US, Config, Function, Launch, Ptr, Value, Work, code, traffic_us
from tccompile.program import Op, Program

THREADS = 256
REGISTERS = 8  # vectors that a thread keeps


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
    held    vectors that a thread keeps of an output in registers, or 0
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
    held: int
    count: int
    whole: bool
    sure: int

    @property
    def blocks(self) -> int:
        return -(-self.kept.size * self.threads // (THREADS * self.rows))


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
    count = channels if groups else 1
    for axis in axes:
        count *= x.shape[axis]
    if config is None:
        config = ways(size, outputs, unit, by_k)[0]
    threads, rows = int(config["threads"]), int(config["rows"])  # type: ignore[arg-type]
    held = -(-size // threads)
    limit = REGISTERS if not across else REGISTERS // 2
    held = held if held <= limit else 0
    whole = across or bool(groups) or y.padded[lane] == x.shape[lane]  # groups of padding are outputs that nobody reads
    sure = held - 1 if whole else min(held - 1, x.shape[lane] // unit // threads) if within.depth == 1 else 0
    return Shares(unit, across, outer, within, by_k, threads, rows, held, count, whole, max(0, sure))


def ways(size: int, outputs: int, unit: int, by_k: bool) -> list[Config]:
    """Threads of an output of `size` vectors: as few as have registers for it, up to one a vector."""
    if not by_k:
        return [{"threads": min(THREADS // min(8 if unit == 8 else 32, power(outputs)), power(size)), "rows": 1}]
    most = min(THREADS, power(size))
    fit = [t for t in (1 << i for i in range(9)) if t <= most and -(-size // t) <= REGISTERS // 2] or [most]
    both = [t for t in fit[:4] if 2 * -(-size // t) <= REGISTERS // 2]
    return [{"threads": t, "rows": rows} for rows, some in ((1, fit[:4]), (2, both)) for t in some]


def configs(op: Op, program: Program, axes: tuple[int, ...], groups: int = 0) -> Iterator[Config]:
    """The ways to share out the op's work; two outputs a thread where the second one is the next row of y, so many blocks on."""
    shares = describe(op, program, axes, groups)
    plain = shares.kept.depth == 1 and shares.kept.strides[1:] == ((1,), (0,)) and not any(shares.inner.strides[1])
    for way in ways(shares.inner.size, shares.kept.size, shares.unit, shares.by_k):
        if way["rows"] == 1 or plain:
            yield way


def cost(op: Op, program: Program, shares: Shares, arch: Arch) -> float:
    """Microseconds: the memory's time, the instructions', or the latency of what each thread reads one after the other."""
    steps = -(-shares.inner.size // shares.threads)
    passes = 1 if shares.held else 3
    x = program.tensors[op.x]  # type: ignore[attr-defined]
    again = (passes - 1) * x.size * x.dtype.size / (arch.gbps * 2e3)  # from L2, at twice the bandwidth
    # Measured on an H200: a vector of 8 takes 110 instructions in all, about 100 more if it may lack lanes.
    lane = 14 * (passes if shares.by_k else 1)
    partial = 100 if shares.by_k and shares.unit == 8 and shares.count % 8 else 0
    instructions = 100 + shares.rows * (steps * lane * shares.unit + partial)
    issue = shares.blocks * THREADS * instructions / (arch.fp32_tflops * 1e6 / 2 * 0.6)
    waves = max(1.0, shares.blocks / (arch.sms * (arch.threads_sm // THREADS)))
    once = 0.4 + 0.4 * (shares.held or 3 * steps * 0.6) + 0.3 * (shares.rows - 1) + (0.0 if shares.by_k else 0.8)
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
            epilogue=spec.params,
            **params,
        ),
        grid=(shares.blocks, 1, 1),
        block=THREADS,
        args=(
            Ptr(op.x),  # type: ignore[attr-defined]
            F32(1 / max(shares.count, 1)),
            F32(eps),
            *map(I32, (shares.kept.size, shares.inner.size, power(shares.threads).bit_length() - 1, x.shape[lane], present)),
            *shares.kept.args,
            *shares.inner.args,
            *spec.args,
        ),
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


PARAMS = "x, inverse, eps, outputs, K, bits, channels, present"


def build(passes: Passes, params: dict[str, Any]) -> Function:
    """The kernel for the parameters that `work` gave."""
    from numba.cuda import types

    from tccompile.kernels.ptx.memory import load
    from tccompile.kernels.ptx.simt import shuffle

    x = DType(params["x"])
    store, extra = epilogue.build(params["epilogue"], params["rows"])
    scope = {
        "store": store,
        "read": load(x, params["unit"], guarded=True, space="global.nc"),
        "shuffle": shuffle,
        "kept": unravel(params["kept"], 3),
        "inner": unravel(params["inner"], 3),
    }
    body = device("two_pass", f"{PARAMS}, wo, wk, e", source(passes, params), **scope)
    fixed = (types.int64, types.float32, types.float32, *(types.int32,) * 5)
    counts = unravel_args(params["kept"], 3), unravel_args(params["inner"], 3)
    signature = types.void(*fixed, *(types.int32,) * sum(counts), *extra)
    return Function(entry(body, len(fixed), *counts, len(extra)), signature, THREADS)


def source(passes: Passes, params: dict[str, Any]) -> list[str]:
    """The kernel's source.

    Thread t of T: vectors t, t + T … of `rows` outputs from o, each as many outputs after the one before as a block has at once.
    """
    unit, across, held, sure, rows, threads = (params[name] for name in ("unit", "across", "held", "sure", "rows", "threads"))
    x = DType(params["x"])
    accumulators = unit if across else 1
    which = (lambda i: i) if across else (lambda i: 0)
    if threads:
        lines = [
            f"tid, T, apart = i32(cuda.threadIdx.x), i32({threads}), i32({THREADS // threads})",
            f"t = tid & i32({threads - 1})",
            f"o = i32(i32(cuda.blockIdx.x) * i32({rows}) * apart + tid // i32({threads}))",
        ]
        if threads > 32:
            lines.append(f"shared = cuda.shared.array({2 * rows * accumulators * THREADS // 32}, f32)")
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

    def place(j: int, at: str) -> list[str]:
        """Where vector k = `at` lies: x{j}, m{j}, c{j} from the output's own."""
        return [f"k{j} = i32({at})", f"x{j}, m{j}, c{j}_ = inner(k{j}, wk)", f"c{j} = i32(c_0 + c{j}_)"]

    def read(u: int, j: int) -> str:
        values = ", ".join(f"v{u}_{j}_{i}" for i in range(unit))
        return f"{values} = read(x + (x_{u} + x{j}) * i64({x.size}), i32(k{j} < end{u} and c{j} < present))"

    def mask(u: int, j: int) -> list[str]:
        """Elements that are not there become the first pass' identity."""
        if across or j < sure or (params["whole"] and passes.first[2]):
            return []
        if params["whole"]:
            out = [f"there = k{j} < end{u}"]
            return out + [f"v{u}_{j}_{i} = select(there, v{u}_{j}_{i}, {passes.first[1]})" for i in range(unit)]
        out = [f"left = i32(channels - c{j}) if k{j} < end{u} else i32(0)"]
        return out + [f"v{u}_{j}_{i} = select(left > i32({i}), v{u}_{j}_{i}, {passes.first[1]})" for i in range(unit)]

    def combine(u: int, j: int, name: str, term: str, how: tuple[str, str, bool]) -> list[str]:
        """Vector j of output u into its accumulators: lane by lane, or pairwise where all of the vector belongs to one output."""
        out, values = [], []
        for i in range(unit):
            value = term.format(v=f"v{u}_{j}_{i}", r=f"r{u}_{which(i)}")
            if held and passes.kept and name == "s":
                out.append(f"v{u}_{j}_{i} = {value}")
                value = f"v{u}_{j}_{i}"
            values.append(value)
        if across:
            for i, value in enumerate(values):
                out.append(f"{name}{u}_{i} = {how[0].format(f'{name}{u}_{i}', f'select(k{j} < end{u}, {value}, {how[1]})')}")
            return out
        if name == "s" and not how[2] and j >= sure:
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
        return exchange(accs, how, threads, THREADS, turn * len(accs) * (THREADS // 32))

    def write(j: int) -> list[str]:
        text = passes.kept if held and passes.kept else passes.out
        results = [
            text.format(v=f"v{u}_{j}_{i}", r=f"r{u}_{which(i)}", s=f"s{u}_{which(i)}") for u in range(rows) for i in range(unit)
        ]
        where = f"i32(m_0 + m{j})" if rows == 1 else f"i32(m_0 + m{j}), apart, outputs"
        return [f"if k{j} < end0:", f"    store(({', '.join(results)},), {where}, c{j}, e)"]

    def over(body: Callable[[int], list[str]]) -> list[str]:
        """`body(j)` for each vector of the thread: in registers, or read again, two at a time."""
        if held:
            return [line for j in range(held) for line in body(j)]
        loop = [line for j in range(2) for line in place(j, f"k + i32({j}) * T")]
        loop += [read(0, j) for j in range(2)]
        loop += [line for j in range(2) for line in body(j)]
        return ["k = t", "while k < end0:", *(f"    {line}" for line in loop), "    k = i32(k + i32(2) * T)"]

    if held:
        for j in range(held):
            lines += place(j, f"t + i32({j}) * T")
            lines += [read(u, j) for u in range(rows)]
    parts = (("r", "{v}", passes.first, passes.between), ("s", passes.term, passes.second, passes.after))
    for turn, (name, term, how, then) in enumerate(parts):
        lines += [f"{name}{u}_{i} = {how[1]}" for u in range(rows) for i in range(accumulators)]

        def add(j: int, of: tuple[str, str, tuple[str, str, bool]] = (name, term, how)) -> list[str]:
            first = mask if of[0] == "r" or not held else lambda u, j: []
            return [line for u in range(rows) for line in (*first(u, j), *combine(u, j, *of))]

        lines += over(add)
        lines += finish(name, how[0], turn)
        for u in range(rows):
            for i in range(accumulators):
                lines.append(f"{name}{u}_{i} = {then.format(r=f'{name}{u}_{i}', s=f'{name}{u}_{i}')}")
    return lines + over(write)
