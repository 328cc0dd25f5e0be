"""Reductions over any axes of tensors of any layout, by groups of threads that share the elements of an output.

There are `T` threads for an output, and as many outputs a block as it has threads for. Where the lanes of y are lanes of x, an
output is 8 of them, read as one vector; otherwise an output is one number. Where there are too few outputs to fill the GPU, a
block has few of them and many threads, which read all elements at once; or the elements of each are split between blocks:
partial results go to the workspace, and the block that arrives last combines them, in a fixed order.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

from tccompile.arch import Arch
from tccompile.expr import DType, Expr, walk
from tccompile.kernels import epilogue
from tccompile.kernels.codegen import Lines, decode, encode
from tccompile.kernels.loops import (
    Loops,
    device,
    entry,
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
from tccompile.kernels.spec import (
    I32,
    LAUNCH_US,
    Config,
    Counters,
    Function,
    Kernel,
    Launch,
    Ptr,
    Scratch,
    Value,
    Work,
    code,
    traffic_us,
)
from tccompile.program import Op, Program, Reduce

THREADS = 256

BESIDE, NARROW = 8, 2
"""Vectors of neighbouring outputs that a block has: 128 bytes of a row, or a sector of 32."""

MANY_THREADS = 1024

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

    lanes    numbers of an output: 8 (the lanes of a vector) or 1
    width    lanes that it stores: more than 1 number only because y's single lane is padded to 8
    vector   neighbouring elements of an output that a thread reads at once
    rows     loops over y's rows, moving in x
    inner    loops over the reduced elements, moving in x
    by_k     whether neighbouring threads read neighbouring elements of an output, not neighbouring outputs
    threads  T, a power of 2
    outputs  including those that are padding
    block    threads of a block
    """

    lanes: int
    width: int
    vector: int
    rows: Loops
    inner: Loops
    by_k: bool
    threads: int
    outputs: int
    block: int = THREADS

    @property
    def blocks(self) -> int:
        return -(-self.outputs * self.threads // self.block)


class ReduceKernel(Kernel):
    """Every Reduce: sums, products, minima and maxima, in float32 or int64."""

    name = "reduce"
    realises = Reduce

    def supports(self, op: Op, program: Program, arch: Arch) -> str | None:
        return refusal(op, program, epilogue.frame_of(op, program))

    def configs(self, op: Op, program: Program, arch: Arch) -> Iterator[Config]:
        assert isinstance(op, Reduce)
        shares = describe(op, program)
        yield {"splits": 1}
        if shares.lanes == 8 and shares.blocks < arch.sms:
            yield from ({"splits": 1, "threads": threads} for threads in (THREADS, MANY_THREADS))
        step = shares.threads * shares.vector
        most = -(-shares.inner.size // (4 * step))  # so that each thread has some elements
        splits = min(-(-2 * arch.sms // max(shares.blocks, 1)), most, 1024)
        if splits > 1:
            yield {"splits": splits}

    def cost(self, op: Op, program: Program, config: Config, arch: Arch) -> float:
        assert isinstance(op, Reduce)
        shares, splits = describe(op, program, config.get("threads")), config["splits"]
        steps = -(-shares.inner.size // (shares.threads * shares.vector * splits))
        waves = max(1.0, shares.blocks * splits / (arch.sms * (arch.threads_sm // shares.block)))
        latency = waves * (1.0 + (0.12 if shares.vector > 1 else 0.07) * steps)  # four loads in flight a thread
        return LAUNCH_US + max(traffic_us(op, program, arch), latency) + (2.0 if splits > 1 else 0.0)

    def work(self, op: Op, program: Program, config: Config, arch: Arch) -> Work:
        assert isinstance(op, Reduce)
        x, y = program.tensors[op.x], program.tensors[op.y]
        if not prod(y.padded):
            return Work(())
        frame = epilogue.frame_of(op, program)
        lane = frame[-1]
        assert lane is not None
        shares, dtype = describe(op, program, config.get("threads")), _accumulator(op)
        spec = epilogue.describe(op, program, frame, shares.width)
        step = shares.threads * shares.vector
        share = -(-shares.inner.size // config["splits"])
        chunk = -(-share // step) * step
        splits = max(1, -(-shares.inner.size // chunk)) if chunk else 1
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
            threads=shares.threads if shares.by_k and dtype is DType.F32 else 0,  # what an exchange within warps must know
            rows=shares.rows.depth,
            inner=shares.inner.depth,
            split=splits > 1,
            block=shares.block,
            epilogue=spec.params,
        )
        groups = -(-y.padded[lane] // shares.width)
        present = x.padded[lane] if shares.lanes > 1 else x.shape[lane] if lane not in op.axes else 1
        numbers = (shares.outputs, groups, shares.inner.size, chunk, splits, shares.threads.bit_length() - 1, present)
        step_c = x.strides[lane] if lane not in op.axes else 0
        launch = Launch(
            params,
            grid=(shares.blocks, splits, 1),
            block=shares.block,
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
            scratch=shares.blocks * shares.block // shares.threads * splits * shares.lanes * dtype.size,
            counters=4 * shares.blocks,
        )

    def build(self, arch: Arch, **params: Value) -> Function:
        from numba.cuda import types

        from tccompile.kernels.gemm_walk import last_to_arrive
        from tccompile.kernels.ptx.core import u64
        from tccompile.kernels.ptx.memory import load, store
        from tccompile.kernels.ptx.simt import shuffle

        x, pre = DType(params["x"]), decode(params["pre"])
        acc = DType.F32 if pre.dtype is DType.F32 else DType.I64
        put, extra = epilogue.build(params["epilogue"])
        n = params["lanes"] * params["vector"]
        scope = {
            "store": put,
            "read": load(x, n, guarded=True, space="global.nc"),
            "load_part": load(acc, params["lanes"]),
            "store_part": store(acc, params["lanes"]),
            "rows": unravel(params["rows"]),
            "inner": unravel(params["inner"]),
            "last_to_arrive": last_to_arrive(arch.cp_async),
            "u64": u64,
            "shuffle": shuffle,
        }
        body = device("reduce", f"{PARAMS}, wr, wk, e", source(params, x, pre, acc), **scope)
        fixed = (types.int64,) * 3 + (types.int32,) * (PARAMS.count(",") - 2)
        loop_args = unravel_args(params["rows"]), unravel_args(params["inner"])
        signature = types.void(*fixed, *(types.int32,) * sum(loop_args), *extra)
        return Function(entry(body, len(fixed), *loop_args, len(extra)), signature, params["block"])


PARAMS = "x, scratch, counters, outputs, groups, K, chunk, splits, bits, present, xc"


def describe(op: Reduce, program: Program, block: int | None = None) -> Shares:
    """How the op's work is shared out between threads.

    block  threads of one that has few outputs, each of them a vector; None: as many as are best for many outputs
    """
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
    if lane not in op.axes and vectors(x, lane, 8) and is_vector_type(x) and x.shape[lane] > 1 and y.padded[lane] % 8 == 0:
        outputs = row_count * (y.padded[lane] // 8)
        neighbours, block = min(NARROW if block else BESIDE, power(outputs)), block or THREADS
        threads = min(block // neighbours, power(inner.size))
        return Shares(8, 8, 1, rows, inner, False, threads, outputs, block)
    width = 8 if y.shape[lane] == 1 and y.padded[lane] == 8 else 1
    outputs = row_count * (y.padded[lane] // width)
    vector = 1
    if unit and is_vector_type(x):
        steps = [
            *rows.strides[0],
            *inner.strides[0][:-1],
            x.offset,
            x.strides[lane] if lane not in op.axes and x.shape[lane] > 1 else 0,
        ]
        last = reduced[-1]
        whole = inner.extents[-1] % 8 == 0 or (inner.depth == 1 and inner.extents[0] == x.shape[last] and x.padded[last] % 8 == 0)
        vector = 8 if whole and all(s % 8 == 0 for s in steps) else 1
    outputs_first = not unit and x.inner == lane and lane not in op.axes
    if outputs_first:
        threads = min(8, power(inner.size))
    else:
        items = -(-inner.size // vector)
        threads = min(32, power(items)) if items <= 256 else THREADS
    return Shares(1, width, vector, rows, inner, not outputs_first, threads, outputs)


def _accumulator(op: Reduce) -> DType:
    return DType.F32 if op.pre.dtype is DType.F32 else DType.I64


def _result_type(op: Reduce) -> DType:
    """The compute type that the epilogue takes the result in."""
    return next((e.dtype for e in walk(op.epilogue.expr) if e.fn == "acc"), _accumulator(op))


def source(params: dict[str, Value], x: DType, pre: Expr, acc: DType) -> list[str]:
    """The kernel's source.

    Block: outputs o = blockIdx.x * (its threads / T) …, elements blockIdx.y * chunk … of each; a thread takes every T-th vector.
    """
    lanes, vector, combine, block = params["lanes"], params["vector"], COMBINE[params["combine"]], params["block"]
    identity = IDENTITY[params["combine"], acc]
    accs = [f"a{i}" for i in range(lanes)]
    listed = ", ".join(accs)
    if params["by_k"]:  # stride: how far apart the threads of an output are
        order = ["t = tid & (T - 1)", f"o = blockIdx * (i32({block}) >> bits) + (tid >> bits)", "stride = i32(1)"]
    else:
        order = [f"stride = i32({block}) >> bits", "t = tid // stride", "o = blockIdx * stride + (tid & (stride - 1))"]
    lines = [
        "tid, blockIdx, split = i32(cuda.threadIdx.x), i32(cuda.blockIdx.x), i32(cuda.blockIdx.y)",
        "T = i32(1) << bits",
        *order,
        f"shared = cuda.shared.array({block * lanes}, {'f32' if acc is DType.F32 else 'i64'})",
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
    threads = params["threads"]
    halves = exchange(accs, combine, threads, block) if threads else tree(accs, combine, block)
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


def _renamed(text: str, prefix: str) -> str:
    """The text with the names v0, v1 … of one expression's lines made its own."""
    return re.sub(r"\bv(\d+)\b", rf"{prefix}\1", text)
