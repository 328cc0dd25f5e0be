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

from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Any

from tccompile.arch import Arch, Feature
from tccompile.ir.extent import ceil_div, divides, fewest, most, same
from tccompile.ir.ops import Op
from tccompile.ir.program import Program
from tccompile.ir.types import DType
from tccompile.kernels import epilogue
from tccompile.kernels.loops import (
    Loops,
    is_vector_type,
    loops,
    power,
    unravel,
    unravel_args,
    vectors,
)
from tccompile.kernels.rates import measured
from tccompile.kernels.spec import F32, I32, Config, Launch, Ptr, Value, Work, code, traffic_us
from tccompile.kernels.text import Called, KernelText, intrinsic, parameters
from tccompile.kernels.two_pass_text import THREADS, Passes, Shape, Writer, exchanged

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
    held    vectors that a thread keeps of an output, or 0; over a range of sizes as many as of the longest
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
        return ceil_div(self.kept.size * self.threads, self.block * self.rows)

    @property
    def smem(self) -> int:
        """Bytes of a block's dynamic shared memory: what `exchange` needs, and the vectors of all threads"""
        return 4 * (exchanged(self.threads) + self.threads * self.held * self.words) if self.shared else 0


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
    unit = 8 if is_vector_type(x) and vectors(x, lane, 8) and divides(8, y.padded[lane]) else 1
    if groups and lane == 1 and channels % 8:
        unit = 1
    kept: list[tuple[int, ...]] = []  # extent, and steps in x, rows and lanes
    inner: list[tuple[int, ...]] = []
    # In x's order of memory, so that neighbouring iterations are neighbours; all lanes, those of the padding too.
    for axis in sorted(range(x.rank), key=lambda a: (-x.strides[a], a == lane)):
        u = unit if axis == lane else 1
        extent = ceil_div(y.padded[axis], u) if axis == lane else x.shape[axis]
        steps = (x.strides[axis] * u, row_step[axis], u if axis == lane else 0)
        if groups and axis == 1:
            share = channels // u
            kept.append((ceil_div(extent, share), *(s * share for s in steps)))
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
    vectors_of_thread = ceil_div(size, threads)
    limit = REGISTERS if not across else REGISTERS // 2
    held = most(vectors_of_thread) if shared or most(vectors_of_thread) <= limit else 0
    sure = fewest(vectors_of_thread) if held else 0
    words = straight if shared or threads > THREADS or held * rows > REGISTERS // 2 else 0
    of_padding = bool(groups) and lane == 1  # groups of it are outputs that nobody reads
    whole = across or of_padding or same(y.padded[lane], x.shape[lane])
    if not (words and whole and divides(threads, size)):
        sure = sure - 1 if whole else min(sure - 1, fewest(x.shape[lane]) // unit // threads) if within.depth == 1 else 0
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
        held = {t: ceil_div(size, t) for t in (128, 256, 512, 1024)}
        fit = [t for t, n in held.items() if 2 < n <= REGISTERS and (t < 1024 or n * straight <= WORDS)]
        both = [t for t in fit if 2 * held[t] <= REGISTERS and 2 * held[t] * straight <= WORDS]
        again = [512] if fit == [1024] else [] if fit else [1024, 512]  # for rows, or epilogues, that need more registers
        staged = [] if fit and fit != [1024] else [way(512, 1, 1)]
        return [way(t, rows) for rows, some in ((1, fit + again), (2, both)) for t in some] + staged
    most = min(THREADS, power(size))
    fit = [t for t in (1 << i for i in range(9)) if t <= most and ceil_div(size, t) <= REGISTERS // 2] or [most]
    both = [t for t in fit[:4] if 2 * ceil_div(size, t) <= REGISTERS // 2]
    return [way(t, rows) for rows, some in ((1, fit[:4]), (2, both)) for t in some]


def configs(op: Op, program: Program, axes: tuple[int, ...], arch: Arch, groups: int = 0) -> Iterator[Config]:
    """The ways to share out the op's work; two outputs a thread where the second one is the next row of y, so many blocks on."""
    shares = describe(op, program, axes, groups)
    plain = _is_plain(shares)
    for way in ways(shares.inner.size, shares.kept.size, shares.unit, shares.by_k, shares.straight):
        if way["shared"]:
            if arch.has(Feature.ASYNC_COPIES) and describe(op, program, axes, groups, way).smem <= arch.smem_block:
                yield way
        elif way["rows"] == 1 or plain:
            yield way


def takes(op: Op, program: Program, axes: tuple[int, ...], config: Config, groups: int = 0) -> bool:
    """Whether a config of other sizes runs the op: outputs of any length can be shared out among so many threads, some of
    which may have nothing to do, but shared memory and large blocks are for vectors side by side."""
    shares = describe(op, program, axes, groups, config)
    if shares.shared:
        return config in ways(shares.inner.size, shares.kept.size, shares.unit, shares.by_k, shares.straight)
    return (shares.threads <= THREADS or shares.straight > 0) and (shares.rows == 1 or _is_plain(shares))


def _is_plain(shares: Shares) -> bool:
    """Whether the outputs are the rows of y, one after the other."""
    return shares.kept.depth == 1 and shares.kept.strides[1:] == ((1,), (0,)) and not any(shares.inner.strides[1])


def cost(op: Op, program: Program, shares: Shares, arch: Arch) -> float:
    """Microseconds: the memory's time, the instructions', or the latency of what each thread reads one after the other."""
    steps = ceil_div(shares.inner.size, shares.threads)
    passes = 1 if shares.held else 3
    x = program.tensors[op.x]  # type: ignore[attr-defined]
    own = measured(arch).two_pass
    lane = own.element * (passes if shares.by_k else 1) + own.words * (shares.held > 0 and shares.words > 0)
    partial = own.partly if shares.by_k and shares.unit == 8 and shares.count % 8 else 0
    instructions = own.setup + shares.rows * (steps * lane * shares.unit + partial)
    issue = shares.blocks * shares.block * instructions / (arch.fp32_tflops * 1e6 / 2 * own.issue)
    # Words, a guess: all vectors are on their way at once, in 64 registers a thread.
    threads_sm, ahead = (min(arch.threads_sm, 1024), 4) if shares.words else (arch.threads_sm, REGISTERS)
    if shares.shared:
        threads_sm, ahead = min(threads_sm, arch.smem_sm // (shares.smem + 1024) * shares.threads), shares.held
    waves = max(1.0, shares.blocks / (arch.sms * (threads_sm // shares.block)))
    size = x.size * x.dtype.size
    # What is read again comes from L2, at twice the bandwidth, if all blocks' rows fit.
    cached = not shares.words or size / waves <= arch.l2 * 2**20
    again = (passes - 1) * size / (arch.gbps * (2e3 if cached else 1e3))
    reads = min(shares.held, ahead) + max(shares.held - ahead, 0) / 8 if shares.held else 3 * steps * own.together
    once = own.once_us + own.read_us * reads + own.row_us * (shares.rows - 1) + (0.0 if shares.by_k else own.exchange_us)
    filled = min(1.0, 2 * shares.blocks / arch.sms)  # an SM draws a part of the bandwidth at most
    moved = (traffic_us(op, program, arch) + again) / max(filled, 0.01)
    latency = once if waves == 1 else once * own.waves * waves
    longest = max(moved, issue, latency)
    return measured(arch).launch_us + longest + own.apart * (moved + issue + latency - longest)


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


def text(passes: Passes, params: dict[str, Any]) -> KernelText:
    """The kernel for the parameters that `work` gave."""
    shape = Shape(x=DType(params["x"]), **{f.name: params[f.name] for f in fields(Shape) if f.name != "x"})
    x, words = shape.x, shape.words
    form = epilogue.Form.decoded(params["epilogue"])
    stored = epilogue.source(form, shape.rows)
    scope: dict[str, Called] = {
        "store": stored.function,
        "read": intrinsic("ptx.memory.load", x, shape.unit, True, "global.nc"),
        "shuffle": intrinsic("ptx.simt.shuffle"),
        "kept": unravel(params["kept"], 3),
        "inner": unravel(params["inner"], 3),
    }
    blocks = 1
    if words:
        scope |= {
            "read_x": intrinsic("ptx.memory.load_words", words, "global.nc"),
            "unpack_x": intrinsic("ptx.memory.floats", x, shape.unit),
            "anew": intrinsic("ptx.memory.anew", words),
            "power_of_2": intrinsic("ptx.softmax.exp2"),
            "store_inside": epilogue.source(form.unmasked, shape.rows).function,
            "held_x": intrinsic("ptx.memory.load_words", words, "shared"),
            "copy": intrinsic("ptx.mma.cp_async"),
            "commit": intrinsic("ptx.mma.cp_async_commit"),
            "landed": intrinsic("ptx.mma.cp_async_wait", 0),
            "shared_address": intrinsic("ptx.mma.shared_address"),
        }
        registers = 0 if shape.shared else shape.rows * shape.held * words
        few = registers <= WORDS and len(form.loads) <= LOADS
        blocks = max(1, (1024 if few else 512) // shape.block)
    signature = {
        "x": "address",
        **parameters("float", "inverse, eps"),
        **parameters("int", "outputs, K, bits, channels, present"),
        "wo": unravel_args(params["kept"], 3),
        "wk": unravel_args(params["inner"], 3),
        "e": stored.kinds,
    }
    return KernelText(signature, Writer(passes, shape).lines(), scope, shape.block, blocks)
