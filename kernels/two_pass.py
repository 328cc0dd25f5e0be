"""What softmax and normalization share: reduce some elements, reduce them again knowing the first result, compute each.

T threads share an output: the elements that are reduced together, or 8 neighbouring lanes of such. There are 256 / T outputs a
block. Elements are kept in registers between the passes where they fit; else they are read again, mostly from a cache.

The kernel walks over vectors of `unit` lanes. Where the lanes are reduced, a vector holds elements of one output ("along");
where they are kept, it holds one element of each of `unit` outputs ("across").
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tccompile.arch import Arch
from tccompile.expr import DType
from tccompile.kernels import epilogue
from tccompile.kernels.loops import Loops, device, entry, is_vector_type, loops, power, tree, unravel, unravel_args, vectors
from tccompile.kernels.spec import F32, I32, LAUNCH_US, Function, Launch, Ptr, Value, Work, code, traffic_us
from tccompile.program import Op, Program

THREADS = 256
REGISTERS = 4  # vectors that a thread keeps


@dataclass(frozen=True)
class Shares:
    """How the work is shared out; loops move in x, in y's rows and in y's lanes.

    unit    lanes of a vector: 8 or 1
    across  whether a vector's lanes belong to different outputs
    kept    loops over outputs (vectors of them, if across)
    inner   loops over the elements of an output (vectors of them, if along)
    by_k    whether neighbouring threads read neighbouring elements of an output, not neighbouring outputs
    threads T, a power of 2
    held    vectors that a thread keeps in registers, or 0
    count   elements that are reduced together
    """

    unit: int
    across: bool
    kept: Loops
    inner: Loops
    by_k: bool
    threads: int
    held: int
    count: int

    @property
    def blocks(self) -> int:
        return -(-self.kept.size * self.threads // THREADS)


def describe(op: Op, program: Program, axes: tuple[int, ...], groups: int = 0) -> Shares:
    """How an op that reduces `axes` (and within `groups` of axis 1) shares out its work."""
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
    if by_k:
        threads = min(32, power(size)) if size <= 32 * REGISTERS else THREADS
    else:
        threads = min(THREADS // min(8 if unit == 8 else 32, power(outputs)), power(size))
    held = -(-size // threads)
    count = channels if groups else 1
    for axis in axes:
        count *= x.shape[axis]
    return Shares(unit, across, outer, within, by_k, threads, held if held <= REGISTERS else 0, count)


def cost(op: Op, program: Program, shares: Shares, arch: Arch) -> float:
    """Microseconds: the memory's time, or the latency of what each thread reads one after the other."""
    blocks_sm = arch.threads_sm // THREADS
    waves = max(1.0, shares.blocks / (arch.sms * blocks_sm))
    steps = -(-shares.inner.size // shares.threads)
    passes = 1 if shares.held else 3
    latency = waves * (1.5 + 0.25 * passes * steps)
    filled = min(1.0, shares.blocks / arch.sms)  # an SM draws a part of the bandwidth at most
    x = program.tensors[op.x]  # type: ignore[attr-defined]
    again = (passes - 1) * x.size * x.dtype.size / (arch.gbps * 2e3)  # from L2, at twice the bandwidth
    return LAUNCH_US + max((traffic_us(op, program, arch) + again) / max(filled, 0.01), latency)


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
            kept=shares.kept.depth,
            inner=shares.inner.depth,
            by_k=shares.by_k,
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

    first, second  how a pass combines, and its identity
    between, after what is done to the results: of `{r}`, and of `{s}`; inverse (1 / count) and eps may be used
    kept           the output, if registers hold the second pass' terms as `{v}`; empty if they are of no use
    """

    first: tuple[str, str]
    between: str
    term: str
    second: tuple[str, str]
    after: str
    out: str
    kept: str = ""


PARAMS = "x, inverse, eps, outputs, K, bits, channels, present"


def build(passes: Passes, params: dict[str, Any]) -> Function:
    """The kernel for the parameters that `work` gave."""
    from numba.cuda import types

    from tccompile.kernels.ptx.memory import load

    x = DType(params["x"])
    store, extra = epilogue.build(params["epilogue"])
    scope = {
        "store": store,
        "read": load(x, params["unit"], guarded=True, space="global.nc"),
        "kept": unravel(params["kept"], 3),
        "inner": unravel(params["inner"], 3),
    }
    body = device("two_pass", f"{PARAMS}, wo, wk, e", _body(passes, params, x), **scope)
    fixed = (types.int64, types.float32, types.float32, *(types.int32,) * 5)
    counts = unravel_args(params["kept"], 3), unravel_args(params["inner"], 3)
    signature = types.void(*fixed, *(types.int32,) * sum(counts), *extra)
    return Function(entry(body, len(fixed), *counts, len(extra)), signature, THREADS)


def _body(passes: Passes, params: dict[str, Any], x: DType) -> list[str]:
    unit, across, held = params["unit"], params["across"], params["held"]
    accumulators = unit if across else 1
    which = (lambda i: i) if across else (lambda i: 0)
    if params["by_k"]:
        order = ["t = tid & (T - 1)", "o = block * (i32(256) >> bits) + (tid >> bits)", "stride = i32(1)"]
    else:
        order = ["stride = i32(256) >> bits", "t = tid // stride", "o = block * stride + (tid & (stride - 1))"]
    lines = [
        "tid, block = i32(cuda.threadIdx.x), i32(cuda.blockIdx.x)",
        "T = i32(1) << bits",
        *order,
        f"shared = cuda.shared.array({THREADS * accumulators}, f32)",
        "end = K if o < outputs else i32(0)",
        "at_x, at_m, at_c = kept(min(o, outputs - 1), wo)",
    ]

    def read(j: int | str, at: str) -> list[str]:
        """Vector k = `at` into v{j}_0 …, at lane c{j} of row m{j}."""
        values = ", ".join(f"v{j}_{i}" for i in range(unit))
        return [
            f"k{j} = {at}",
            f"x{j}_, m{j}_, c{j}_ = inner(k{j}, wk)",
            f"m{j}, c{j} = i32(at_m + m{j}_), i32(at_c + c{j}_)",
            f"{values} = read(x + (at_x + x{j}_) * i64({x.size}), i32(k{j} < end and c{j} < present))",
        ]

    def combine(j: int, name: str, term: str, how: tuple[str, str]) -> list[str]:
        out = []
        for i in range(unit):
            value = term.format(v=f"v{j}_{i}", r=f"r{which(i)}")
            acc = f"{name}{which(i)}"
            if held and passes.kept and name == "s":
                out.append(f"v{j}_{i} = {value}")
                value = f"v{j}_{i}"
            inside = f"k{j} < end" + ("" if across else f" and c{j} + i32({i}) < channels")
            out.append(f"{acc} = {how[0].format(acc, f'select({inside}, {value}, {how[1]})')}")
        return out

    def write(j: int) -> list[str]:
        text = passes.kept if held and passes.kept else passes.out
        results = [text.format(v=f"v{j}_{i}", r=f"r{which(i)}", s=f"s{which(i)}") for i in range(unit)]
        return [f"if k{j} < end:", f"    store(({', '.join(results)},), m{j}, c{j}, e)"]

    def over(body) -> list[str]:
        """`body(j)` for each vector of the thread: in registers, or read again, two at a time."""
        if held:
            return [line for j in range(held) for line in body(j)]
        loop = [line for j in range(2) for line in read(j, f"k + i32({j}) * T")]
        loop += [line for j in range(2) for line in body(j)]
        return ["k = t", "while k < end:", *(f"    {line}" for line in loop), "    k += i32(2) * T"]

    if held:
        for j in range(held):
            lines += read(j, f"t + i32({j}) * T")
    for name, term, how, then in (("r", "{v}", passes.first, passes.between), ("s", passes.term, passes.second, passes.after)):
        accs = [f"{name}{i}" for i in range(accumulators)]
        lines += [f"{a} = {how[1]}" for a in accs]
        lines += over(lambda j, name=name, term=term, how=how: combine(j, name, term, how))
        lines += tree(accs, how[0], THREADS)
        first = "tid - t * stride"
        lines += [f"{a} = shared[{i * THREADS} + {first}]" for i, a in enumerate(accs)]
        lines.append("cuda.syncthreads()")
        lines += [f"{a} = {then.format(r=a, s=a)}" for a in accs]
    return lines + over(write)
