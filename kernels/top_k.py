"""Where the k largest or smallest elements of each line lie, in order, on every generation.

A thread for each element counts the elements of its line that come before it, and writes its place if they are fewer than k.
That is n² comparisons of a line of n elements, all of them independent: fewer steps than sorting up to some 10,000 elements,
and the same result on every run. A line's elements are read by all threads of a warp at once.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tccompile.arch import Arch
from tccompile.ir.expr import const
from tccompile.ir.extent import ceil_div
from tccompile.ir.ops import Op, TopK
from tccompile.ir.program import Program
from tccompile.ir.types import DType
from tccompile.kernels.codegen import Lines, Parameters, split
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


class TopKKernel(TextKernel):
    """Every TopK of floats or integers."""

    name = "top_k"
    realises = TopK

    def supports(self, op: Op, program: Program, arch: Arch) -> str | None:
        assert isinstance(op, TopK)
        x = program.tensors[op.x]
        return f"{op.x} has {x.size} elements; they are counted in 31 bits" if x.size > LIMIT else refusal(op, program)

    def configs(self, op: Op, program: Program, arch: Arch) -> Iterator[Config]:
        yield {}

    def cost(self, op: Op, program: Program, config: Config, arch: Arch) -> float:
        assert isinstance(op, TopK)
        x, y = program.tensors[op.x], program.tensors[op.y]
        n, launches = x.shape[op.axis], 1 + (y.padded != y.shape)
        own = measured(arch).order
        compared = n * max(own.compare * x.size / (arch.sms * 128), own.load_cycles) / own.compare_cycles_us
        return launches * measured(arch).launch_us + traffic_us(op, program, arch) + compared

    def work(self, op: Op, program: Program, config: Config, arch: Arch) -> Work:
        assert isinstance(op, TopK)
        x, y = program.tensors[op.x], program.tensors[op.y]
        first = padding_filled(op, program, const(0, DType.I64), arch)
        if not y.size:
            return Work(first)
        rows = outermost_first([a for a in range(x.rank) if a != op.axis], x)
        args: list[Arg] = [I32(x.size), I32(x.shape[op.axis]), I32(y.shape[op.axis])]
        args += dividers([*(x.shape[a] for a in rows), x.shape[op.axis]])
        for t in (x, y):
            args += [Ptr(t.name), *(I32(t.strides[a]) for a in (*rows, op.axis))]
        params = {"rows": len(rows), "x": x.dtype.value, "y": y.dtype.value, "largest": op.largest}
        return Work((*first, Launch(code(self.name, **params), (ceil_div(x.size, THREADS), 1, 1), THREADS, tuple(args))))

    def source(self, arch: Arch, **params: Any) -> KernelText:
        return _text(**params)


def _text(rows: int, x: str, y: str, largest: bool) -> KernelText:
    """A thread counts the elements of its line that come before its own one, and writes its place to that of their number."""
    taken, out = Parameters(), Lines()
    given, stored = DType(x), DType(y)
    threads, n, k = taken.take(), taken.take(), taken.take()
    digits_of = take_dividers(taken, rows + 1)
    x_base, *x_steps = taken.take("address"), *(taken.take() for _ in range(rows + 1))
    y_base, *y_steps = taken.take("address"), *(taken.take() for _ in range(rows + 1))
    thread = out.let(f"i32(cuda.blockIdx.x * {THREADS} + cuda.threadIdx.x)")
    *row, own = split(out, thread, digits_of)
    line = address(out, x_base, row, x_steps[:-1], given.size)

    def element(lines: Lines, at: str) -> str:
        return lines.let(f"get({line} + i64({at}) * (i64({x_steps[-1]}) * {given.size}))")

    mine = element(out, own)
    of_mine = out.let(f"isnan({mine})") if given.is_float else ""
    out.lines.append("before = i32(0)")
    body = inner(out)
    other_at = body.let("i32(step)")
    other = element(body, other_at)
    ahead = body.let(f"({other} {'>' if largest else '<'} {mine}) | (({other} == {mine}) & ({other_at} < {own}))")
    if given.is_float:  # NaN is the largest
        none = body.let(f"isnan({other})")
        level = body.let(f"({none} == {of_mine}) & ({other_at} < {own})")
        if largest:
            ahead = body.let(f"select({of_mine}, {level}, {ahead} | {none})")
        else:
            ahead = body.let(f"select({of_mine}, {level} | ({none} != {of_mine}), {ahead})")
    body.lines.append(f"before = i32(before + select({ahead}, i32(1), i32(0)))")
    take = inner(body)
    where = address(take, y_base, [*row, "before"], y_steps, stored.size)
    take.lines.append(f"put({where}, i64({own}))")
    first, *rest = out.lines
    found = [f"for step in range({n}):", *indented(body.lines), f"if before < {k}:", *indented(take.lines)]
    lines = [first, f"if {thread} < {threads}:", *indented([*rest, *found])]
    scope = {"get": intrinsic("ptx.memory.load", given), "put": intrinsic("ptx.memory.store", stored)}
    return KernelText(taken.signature, lines, scope, THREADS)
