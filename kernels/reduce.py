"""Reductions over any axes of tensors of any layout, by groups of threads that share the elements of an output.

There are `T` threads for an output, and 256 / T outputs a block. Where the lanes of y are lanes of x, an output is 8 of them,
read as one vector; otherwise an output is one number. Where there are too few outputs to fill the GPU, a block has fewer of them,
and so more threads for each; or the elements of each are split between blocks: partial results go to the workspace, and the
block that arrives last combines them, in a fixed order.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod

from tccompile.arch import Arch, Feature
from tccompile.ir.expr import Expr, walk
from tccompile.ir.extent import ceil_div, divides, round_up, same
from tccompile.ir.ops import Op, Reduce
from tccompile.ir.program import Program
from tccompile.ir.tensor import Tensor
from tccompile.ir.types import DType
from tccompile.kernels import epilogue
from tccompile.kernels.codegen import Lines, decode, encode
from tccompile.kernels.loops import (
    Loops,
    exchange,
    is_vector_type,
    loops,
    power,
    refusal,
    tree,
    unravel,
    unravel_args,
    vectors,
)
from tccompile.kernels.rates import measured
from tccompile.kernels.spec import I32, Config, Counters, Launch, Ptr, Scratch, Value, Work, code, traffic_us
from tccompile.kernels.text import KernelText, TextKernel, intrinsic, parameters

THREADS = 256

BESIDE, NARROW, WIDE = 8, 2, 32
"""Outputs of a block that are neighbouring vectors: 128 bytes of a row, or a sector of 32; or more, of which each has fewer
threads, and so less to combine."""

LANES = 8
"""Of a vector."""

COMBINE = {"add": "{} + {}", "mul": "{} * {}", "min": "minimum({}, {})", "max": "maximum({}, {})"}

IDENTITY = {
    ("add", DType.F32): "f32(0)",
    ("mul", DType.F32): "f32(1)",
    ("min", DType.F32): "f32(inf)",
    ("max", DType.F32): "f32(-inf)",
    ("add", DType.I64): "i64(0)",
    ("mul", DType.I64): "i64(1)",
    ("min", DType.I64): f"i64({2**63 - 1})",
    ("max", DType.I64): f"i64({-(2**63)})",
}


@dataclass(frozen=True)
class Shares:
    """How the work is shared out.

    lanes    numbers of an output: LANES (of a vector) or 1
    width    lanes that it stores: more than 1 number only because y's single lane is padded to 8
    vector   neighbouring elements of an output that a thread reads at once
    rows     loops over y's rows, moving in x
    inner    loops over the reduced elements, moving in x
    by_k     whether neighbouring threads read neighbouring elements of an output, not neighbouring outputs
    threads  T, a power of 2
    outputs  including those that are padding
    """

    lanes: int
    width: int
    vector: int
    rows: Loops
    inner: Loops
    by_k: bool
    threads: int
    outputs: int

    @property
    def blocks(self) -> int:
        return ceil_div(self.outputs * self.threads, THREADS)


class ReduceKernel(TextKernel):
    """Every Reduce: sums, products, minima and maxima, in float32 or int64."""

    name = "reduce"
    realises = Reduce

    def supports(self, op: Op, program: Program, arch: Arch) -> str | None:
        return refusal(op, program, epilogue.frame_of(op, program))

    def configs(self, op: Op, program: Program, arch: Arch) -> Iterator[Config]:
        assert isinstance(op, Reduce)
        shares = describe(op, program)
        yield {"splits": 1}
        if shares.lanes == LANES and shares.blocks < arch.sms:
            yield {"splits": 1, "beside": NARROW}
        if shares.lanes == LANES and arch.sms <= describe(op, program, WIDE).blocks < shares.blocks:
            yield {"splits": 1, "beside": WIDE}
        step = shares.threads * shares.vector
        most = ceil_div(shares.inner.size, 4 * step)  # so that each thread has some elements
        splits = min(ceil_div(2 * arch.sms, max(shares.blocks, 1)), most, 1024)
        if splits > 1:
            yield {"splits": splits}

    def cost(self, op: Op, program: Program, config: Config, arch: Arch) -> float:
        assert isinstance(op, Reduce)
        own, shares, splits = measured(arch).reduce, describe(op, program, config.get("beside", BESIDE)), config["splits"]
        steps = ceil_div(shares.inner.size, shares.threads * shares.vector * splits)
        waves = max(1.0, shares.blocks * splits / (arch.sms * (arch.threads_sm // THREADS)))
        if shares.lanes > 1:  # four loads in flight a thread
            gathered = max(0.0, shares.blocks * splits / arch.sms - 1) if shares.threads > LANES else 0.0
            latency = waves * (own.lanes_us * steps - own.lanes_early_us) + own.gather_us * gathered
            adding = own.split_lanes_us
        else:
            each = own.vector_us if shares.vector > 1 else own.step_us
            latency, adding = waves * (own.start_us + each * steps), own.split_us
        return measured(arch).launch_us + max(traffic_us(op, program, arch), latency) + (adding if splits > 1 else 0.0)

    def work(self, op: Op, program: Program, config: Config, arch: Arch) -> Work:
        assert isinstance(op, Reduce)
        x, y = program.tensors[op.x], program.tensors[op.y]
        if not prod(y.padded):
            return Work(())
        frame = epilogue.frame_of(op, program)
        lane = frame[-1]
        assert lane is not None
        shares, dtype = describe(op, program, config.get("beside", BESIDE)), _accumulator(op)
        spec = epilogue.describe(op, program, frame, shares.width)
        step = shares.threads * shares.vector
        share = ceil_div(shares.inner.size, config["splits"])
        chunk = round_up(share, step)
        splits = max(1, ceil_div(shares.inner.size, chunk)) if chunk else 1
        params = code(
            self.name,
            x=x.dtype.value,
            combine=op.combine,
            pre=encode(op.pre),
            acc=_result_type(op).value,
            lanes=shares.lanes,
            width=shares.width,
            vector=shares.vector,
            by_k=shares.by_k,
            threads=shares.threads if _exchanges(shares, dtype) else 0,
            rows=shares.rows.depth,
            inner=shares.inner.depth,
            split=splits > 1,
            epilogue=spec.params,
        )
        groups = ceil_div(y.padded[lane], shares.width)
        present = x.padded[lane] if shares.lanes > 1 else x.shape[lane] if lane not in op.axes else 1
        numbers = (shares.outputs, groups, shares.inner.size, chunk, splits, shares.threads.bit_length() - 1, present)
        step_c = x.strides[lane] if lane not in op.axes else 0
        launch = Launch(
            params,
            grid=(shares.blocks, splits, 1),
            block=THREADS,
            args=(
                *(Ptr(op.x), Scratch(), Counters()),
                *map(I32, (*numbers, step_c)),
                *shares.rows.args,
                *shares.inner.args,
                *spec.args,
            ),
        )
        if splits == 1:
            return Work((launch,))
        return Work(
            (launch,),
            scratch=shares.blocks * THREADS // shares.threads * splits * shares.lanes * dtype.size,
            counters=4 * shares.blocks,
        )

    def source(self, arch: Arch, **params: Value) -> KernelText:
        x, pre = DType(params["x"]), decode(params["pre"])
        acc = DType.F32 if pre.dtype is DType.F32 else DType.I64
        stored = epilogue.source(epilogue.Form.decoded(params["epilogue"]))
        scope = {
            "store": stored.function,
            "read": intrinsic("ptx.memory.load", x, params["lanes"] * params["vector"], True, "global.nc"),
            "load_part": intrinsic("ptx.memory.load", acc, params["lanes"]),
            "store_part": intrinsic("ptx.memory.store", acc, params["lanes"]),
            "rows": unravel(params["rows"]),
            "inner": unravel(params["inner"]),
            "last_to_arrive": intrinsic("parts.split.last_to_arrive", arch.has(Feature.FENCES)),
            "shuffle": intrinsic("ptx.simt.shuffle"),
        }
        signature = {
            **parameters("address", "x, scratch, counters"),
            **parameters("int", "outputs, groups, K, chunk, splits, bits, present, xc"),
            "wr": unravel_args(params["rows"]),
            "wk": unravel_args(params["inner"]),
            "e": stored.kinds,
        }
        return KernelText(signature, lines(params, x, pre, acc), scope, THREADS)


def describe(op: Reduce, program: Program, beside: int = BESIDE) -> Shares:
    """How the op's work is shared out between threads, if outputs are vectors at least for `beside` of them in a block."""
    x, y = program.tensors[op.x], program.tensors[op.y]
    frame = epilogue.frame_of(op, program)
    lane = frame[-1]
    assert lane is not None
    axes = [a for a in frame[:-1] if a is not None and a not in op.axes]
    # Reduced axes in the order of memory, so that neighbours can be merged and the innermost comes last.
    reduced = sorted(op.axes, key=lambda a: -x.strides[a])
    rows = loops([x.shape[a] for a in axes], [x.strides[a] for a in axes])
    inner = loops([x.shape[a] for a in reduced], [x.strides[a] for a in reduced])
    row_count = prod(y.shape[a] for a in range(y.rank) if a != lane)
    unit = inner.strides[0][-1] == 1
    if (
        lane not in op.axes
        and vectors(x, lane, LANES)
        and _in_vectors(x)
        and x.shape[lane] > 1
        and divides(LANES, y.padded[lane])
    ):
        outputs = row_count * (y.padded[lane] // LANES)
        threads = min(THREADS // min(beside, power(outputs)), power(inner.size))
        return Shares(LANES, LANES, 1, rows, inner, False, threads, outputs)
    width = 8 if y.shape[lane] == 1 and y.padded[lane] == 8 else 1
    outputs = row_count * (y.padded[lane] // width)
    vector = 1
    if unit and _in_vectors(x):
        steps = [
            *rows.strides[0],
            *inner.strides[0][:-1],
            x.offset,
            x.strides[lane] if lane not in op.axes and x.shape[lane] > 1 else 0,
        ]
        last = reduced[-1]
        alone = inner.depth == 1 and same(inner.extents[0], x.shape[last])
        whole = divides(8, inner.extents[-1]) or (alone and divides(8, x.padded[last]))
        vector = 8 if whole and all(divides(8, s) for s in steps) else 1
    outputs_first = not unit and x.inner == lane and lane not in op.axes
    if outputs_first:
        threads = min(8, power(inner.size))
    else:
        items = ceil_div(inner.size, vector)
        threads = min(32, power(items)) if items <= 256 else THREADS
    return Shares(1, width, vector, rows, inner, not outputs_first, threads, outputs)


def _in_vectors(x: Tensor) -> bool:
    """Whether a thread reads 8 neighbours at once: they have 4 bytes at most."""
    return is_vector_type(x) or x.dtype in (DType.I8, DType.U8, DType.I16, DType.U16)


def _exchanges(shares: Shares, acc: DType) -> bool:
    """Whether an output's threads combine what they have by exchanges within warps, for which their number must be known."""
    return acc is DType.F32 and (shares.by_k or (shares.lanes == LANES and shares.threads > LANES))


def _accumulator(op: Reduce) -> DType:
    return DType.F32 if op.pre.dtype is DType.F32 else DType.I64


def _result_type(op: Reduce) -> DType:
    """The compute type that the epilogue takes the result in."""
    return next((e.dtype for e in walk(op.epilogue.expr) if e.fn == "acc"), _accumulator(op))


def lines(params: dict[str, Value], x: DType, pre: Expr, acc: DType) -> list[str]:
    """The kernel's source.

    Block: outputs o = blockIdx.x * (256 / T) …, elements blockIdx.y * chunk … of each; a thread takes every T-th vector.
    """
    lanes, vector, combine = params["lanes"], params["vector"], COMBINE[params["combine"]]
    identity, threads = IDENTITY[params["combine"], acc], params["threads"]
    gathers = threads and not params["by_k"]
    room = THREADS * lanes + (gathered_room(threads) if gathers else 0)
    accs = [f"a{i}" for i in range(lanes)]
    listed = ", ".join(accs)
    if params["by_k"]:  # stride: how far apart the threads of an output are
        order = ["t = tid & (T - 1)", "o = blockIdx * (i32(256) >> bits) + (tid >> bits)", "stride = i32(1)"]
    else:
        order = ["stride = i32(256) >> bits", "t = tid // stride", "o = blockIdx * stride + (tid & (stride - 1))"]
    lines = [
        "tid, blockIdx, split = i32(cuda.threadIdx.x), i32(cuda.blockIdx.x), i32(cuda.blockIdx.y)",
        "T = i32(1) << bits",
        *order,
        f"shared = cuda.shared.array({room}, {'f32' if acc is DType.F32 else 'i64'})",
        "m = o // groups",
        f"c = (o - m * groups) * i32({params['width']})",
        *(f"{a} = {identity}" for a in accs),
        "if o < outputs and c < present:",
        f"    base = x + (rows(m, wr) + i64(c) * i64(xc)) * i64({x.size})",
        "    end = i32(min(K, i32((split + 1) * chunk)))",
        f"    k = i32(split * chunk + t * i32({vector}))",
        "    while k < end:",
    ]
    reads = 4
    values = [[f"r{u}_{i}" for i in range(lanes * vector)] for u in range(reads)]
    for u in range(reads):
        at = f"i32(k + i32({u * vector}) * T)"
        lines += [
            f"        k{u} = {at}",
            f"        {', '.join(values[u])} = read(base + inner(k{u}, wk) * i64({x.size}), i32(k{u} < end))",
        ]
    for u in range(reads):
        lines.append(f"        left = i32(end - k{u})")
        for i, value in enumerate(values[u]):
            out = Lines()
            raw = out.loaded(value, x)
            term = out.cast(out.value(pre, lambda e, raw=raw: raw), pre.dtype, acc)  # type: ignore[misc]
            prefix = f"u{u}_{i}_"
            body = [_renamed(line, prefix) for line in out.lines]
            lines += [f"        {line}" for line in body]
            valid = f"left > i32({i if vector > 1 else 0})"
            target = accs[i] if lanes > 1 else "a0"
            taken = f"select({valid}, {_renamed(term, prefix)}, {identity})"
            lines.append(f"        {target} = {combine.format(target, taken)}")
    lines.append(f"        k = i32(k + i32({reads * vector}) * T)")
    if gathers:
        halves = gather(accs, combine, threads)
    else:
        halves = exchange(accs, combine, threads, THREADS) if threads else tree(accs, combine, THREADS)
    lines += halves
    finish = Lines()
    results = [finish.cast(a, acc, DType(params["acc"])) for a in accs]
    results += ["f32(0)" if DType(params["acc"]) is DType.F32 else results[0]] * (params["width"] - lanes)
    stored = [
        "if t == 0 and o < outputs:",
        *(f"    {line}" for line in finish.lines),
        f"    store(({', '.join(results)},), m, c, e)",
    ]
    if not params["split"]:
        return [*lines, *stored]
    size = lanes * acc.size
    return [
        *lines,
        # Partial results: (outputs, splits, lanes).
        f"parts = scratch + i64(o) * i64(splits) * i64({size})",
        "if t == 0 and o < outputs:",
        f"    store_part(parts + i64(split) * i64({size}), {listed})",
        "if last_to_arrive(u64(counters + i64(blockIdx) * i64(4)), splits):",
        *(f"    {a} = {identity}" for a in accs),
        "    if o < outputs:",
        "        k = t",
        "        while k < splits:",
        f"            {', '.join(f'p{i}' for i in range(lanes))} = load_part(parts + i64(k) * i64({size}))",
        *(f"            {a} = {combine.format(a, f'p{i}')}" for i, a in enumerate(accs)),
        "            k += T",
        *(f"    {line}" for line in halves),
        *(f"    {line}" for line in stored),
    ]


def gather(accs: Sequence[str], combine: str, threads: int) -> list[str]:
    """Text that combines the vectors of an output's `threads` threads, those at o + t * stride, through `shared`.

    Each of a vector's lanes becomes the matter of a part of the threads, which are neighbours: they read the lane of all
    vectors, and exchange the rest. So a number takes a few exchanges, where a tree would take as many barriers as levels. The
    thread t = 0 ends up with the results. `shared` has a row of numbers for each lane, and `gathered_room` more.
    """
    each, stride = threads // LANES, THREADS // threads
    rest = THREADS * LANES
    results = rest + THREADS // 32
    return [
        *(f"shared[i32({i * THREADS}) + tid] = {a}" for i, a in enumerate(accs)),
        "cuda.syncthreads()",
        f"number = tid >> i32({each.bit_length() - 1})",  # lane · stride + o
        f"at = (number >> i32({stride.bit_length() - 1})) * i32({THREADS}) + (number & i32({stride - 1}))",
        f"at = i32(at + (tid & i32({each - 1})) * i32({stride}))",
        "total = shared[at]",
        *(f"total = {combine.format('total', f'shared[at + i32({i * each * stride})]')}" for i in range(1, LANES)),
        *exchange(["total"], combine, each, THREADS, rest),
        f"if tid & i32({each - 1}) == 0:",
        f"    shared[i32({results}) + number] = total",
        "cuda.syncthreads()",
        *(f"{a} = shared[i32({results + i * stride}) + (tid & i32({stride - 1}))]" for i, a in enumerate(accs)),
    ]


def gathered_room(threads: int) -> int:
    """Numbers that `gather` needs beside the vectors: one of each warp, and the results."""
    return THREADS // 32 + LANES * (THREADS // threads)


def _renamed(text: str, prefix: str) -> str:
    """The text with the names v0, v1 … of one expression's lines made its own."""
    return re.sub(r"\bv(\d+)\b", rf"{prefix}\1", text)
