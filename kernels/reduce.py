"""Reductions over any axes of tensors of any layout, by groups of threads that share the elements of an output.

There are `T` threads for an output, and 256 / T outputs a block. Where the lanes of y are lanes of x, an output is 8 of them,
read as one vector; otherwise an output is one number. Where there are too few outputs to fill the GPU, a block has fewer of them,
and so more threads for each; or the elements of each are split between blocks: partial results go to the workspace, and the
block that arrives last combines them, in a fixed order.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

from tccompile.arch import Arch, Feature
from tccompile.ir.expr import walk
from tccompile.ir.extent import ceil_div, divides, hint, least, round_up, same, whole
from tccompile.ir.ops import Op, Reduce
from tccompile.ir.program import Program
from tccompile.ir.tensor import Tensor
from tccompile.ir.types import DType
from tccompile.kernels import epilogue
from tccompile.kernels.codegen import decode, encode
from tccompile.kernels.loops import (
    Loops,
    is_vector_type,
    loops,
    power,
    refusal,
    unravel,
    unravel_args,
    vectors,
)
from tccompile.kernels.rates import measured
from tccompile.kernels.reduce_text import LANES, THREADS, Writer
from tccompile.kernels.spec import I32, Config, Counters, Launch, Ptr, Scratch, Value, Work, code, traffic_us
from tccompile.kernels.text import KernelText, TextKernel, intrinsic, parameters

BESIDE, NARROW, WIDE = 8, 2, 32
"""Outputs of a block that are neighbouring vectors: 128 bytes of a row, or a sector of 32; or more, of which each has fewer
threads, and so less to combine."""


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
        shared_out = {name: params[name] for name in ("combine", "lanes", "width", "vector", "by_k", "threads", "split")}
        writer = Writer(x, pre, acc=acc, result=DType(params["acc"]), **shared_out)
        return KernelText(signature, writer.lines(), scope, THREADS)


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
    fixed = hint if _accumulator(op) is DType.F32 else whole  # where the code has the number of threads, one at all sizes
    if (
        lane not in op.axes
        and vectors(x, lane, LANES)
        and _in_vectors(x)
        and x.shape[lane] > 1
        and divides(LANES, y.padded[lane])
    ):
        outputs = row_count * (y.padded[lane] // LANES)
        threads = fixed(least(THREADS // least(beside, power(outputs)), power(inner.size)))
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
        filled = divides(8, inner.extents[-1]) or (alone and divides(8, x.padded[last]))
        vector = 8 if filled and all(divides(8, s) for s in steps) else 1
    outputs_first = not unit and x.inner == lane and lane not in op.axes
    if outputs_first:
        threads = least(8, power(inner.size))
    else:
        items = ceil_div(inner.size, vector)
        threads = fixed(least(32, power(items))) if items <= 256 else THREADS
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
