"""Cumulative sums and products along an axis, on every generation: a thread goes along each line, in float32 or int64."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tccompile.arch import Arch
from tccompile.ir.expr import const
from tccompile.ir.extent import ceil_div
from tccompile.ir.ops import Cumulate, Op
from tccompile.ir.program import Program
from tccompile.ir.types import DType
from tccompile.kernels.codegen import COMPUTE, Lines, Parameters, split
from tccompile.kernels.lines import (
    LIMIT,
    THREADS,
    address,
    dividers,
    inner,
    outermost_first,
    padding_filled,
    refusal,
    take_dividers,
)
from tccompile.kernels.rates import measured
from tccompile.kernels.spec import I32, Arg, Config, Launch, Ptr, Work, code, traffic_us
from tccompile.kernels.text import KernelText, TextKernel, indented, intrinsic

COMBINE = {"add": ("{} + {}", 0), "mul": ("{} * {}", 1)}


class CumulateKernel(TextKernel):
    """Every Cumulate of floats or integers."""

    name = "cumulate"
    realises = Cumulate

    def supports(self, op: Op, program: Program, arch: Arch) -> str | None:
        assert isinstance(op, Cumulate)
        x = program.tensors[op.x]
        return f"{op.x} has {x.size} elements; they are counted in 31 bits" if x.size > LIMIT else refusal(op, program)

    def configs(self, op: Op, program: Program, arch: Arch) -> Iterator[Config]:
        yield {}

    def cost(self, op: Op, program: Program, config: Config, arch: Arch) -> float:
        assert isinstance(op, Cumulate)
        x, y = program.tensors[op.x], program.tensors[op.y]
        launches, moving = 1 + (y.padded != y.shape), traffic_us(op, program, arch)
        return launches * measured(arch).launch_us + moving + measured(arch).order.cumulate_us * x.shape[op.axis]

    def work(self, op: Op, program: Program, config: Config, arch: Arch) -> Work:
        assert isinstance(op, Cumulate)
        x, y = program.tensors[op.x], program.tensors[op.y]
        first = padding_filled(op, program, const(0, y.dtype.compute), arch)
        if not y.size:
            return Work(first)
        n = x.shape[op.axis]
        rows = outermost_first([a for a in range(x.rank) if a != op.axis], x)
        args: list[Arg] = [I32(x.size // n), I32(n), *dividers([x.shape[a] for a in rows])]
        for t in (x, y):
            args += [Ptr(t.name), *(I32(t.strides[a]) for a in (*rows, op.axis))]
        params = {"rows": len(rows), "x": x.dtype.value, "y": y.dtype.value, "combine": op.combine,
                  "exclusive": op.exclusive, "reverse": op.reverse}  # fmt: skip
        return Work((*first, Launch(code(self.name, **params), (ceil_div(x.size // n, THREADS), 1, 1), THREADS, tuple(args))))

    def source(self, arch: Arch, **params: Any) -> KernelText:
        return _text(**params)


def _text(rows: int, x: str, y: str, combine: str, exclusive: bool, reverse: bool) -> KernelText:
    """A thread goes along one line of x, which is numbered by the `rows` other axes."""
    taken, out = Parameters(), Lines()
    given, stored = DType(x), DType(y)
    threads, n = taken.take(), taken.take()
    digits_of = take_dividers(taken, rows)
    x_base, *x_steps = taken.take("address"), *(taken.take() for _ in range(rows + 1))
    y_base, *y_steps = taken.take("address"), *(taken.take() for _ in range(rows + 1))
    thread = out.let(f"i32(cuda.blockIdx.x * {THREADS} + cuda.threadIdx.x)")
    row = split(out, thread, digits_of) if rows else []
    x_line = address(out, x_base, row, x_steps[:-1], given.size)
    y_line = address(out, y_base, row, y_steps[:-1], stored.size)
    formula, neutral = COMBINE[combine]
    out.lines.append(f"total = {COMPUTE[given.compute]}({neutral})")
    body = inner(out)
    at = body.let(f"i32({n} - 1 - step)" if reverse else "i32(step)")
    value = body.let(f"get({x_line} + i64({at}) * (i64({x_steps[-1]}) * {given.size}))")
    advance = f"total = {formula.format('total', value)}"
    put = f"put({y_line} + i64({at}) * (i64({y_steps[-1]}) * {stored.size}), total)"
    body.lines += [put, advance] if exclusive else [advance, put]
    first, *rest = out.lines
    lines = [first, f"if {thread} < {threads}:", *indented([*rest, f"for step in range({n}):", *indented(body.lines)])]
    scope = {"get": intrinsic("ptx.memory.load", given), "put": intrinsic("ptx.memory.store", stored)}
    return KernelText(taken.signature, lines, scope, THREADS)
