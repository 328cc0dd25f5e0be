"""Scatter on every generation: y = x, then updates at indices that are read, in an order that is always the same.

An axis of y that a coordinate of the updates goes through unchanged is free: threads at different coordinates never meet.
For the others (the sequence) a thread goes through all updates in their order, and takes those whose place is in its bucket,
so that no two threads write one element, duplicates come in order, and sums are the same on every run.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from tccompile.arch import Arch
from tccompile.ir.expr import Coord, Element, identity_view, load
from tccompile.ir.extent import ceil_div
from tccompile.ir.ops import Op, Scatter
from tccompile.ir.program import Program
from tccompile.ir.types import DType
from tccompile.kernels.codegen import Lines, Parameters, split
from tccompile.kernels.lines import LIMIT, THREADS, address, dividers, filled, inner, refusal, take_dividers
from tccompile.kernels.rates import measured
from tccompile.kernels.spec import I32, Arg, Config, Launch, Ptr, Value, Work, code, traffic_us
from tccompile.kernels.text import Intrinsic, KernelText, TextKernel, indented, intrinsic

COMBINE = {
    "set": "{1}",
    "add": "{0} + {1}",
    "mul": "{0} * {1}",
    "min": "minimum({0}, {1})",
    "max": "maximum({0}, {1})",
}

BUCKETS = 1024
"""At most so many threads go through one sequence."""

FILL = 1 << 15
"""Threads that fill a GPU: with fewer, a sequence is shared by buckets."""


@dataclass(frozen=True)
class _Shares:
    """free: axes of the updates that are axes of y; sequence: the others, outermost first; buckets: a power of 2."""

    free: tuple[int, ...]
    sequence: tuple[int, ...]
    buckets: int
    threads: int
    steps: int


def _shares(op: Scatter, program: Program) -> _Shares:
    updates = program.tensors[op.updates]
    through = {atom.axis for index in op.at for atom, _ in index.terms if isinstance(atom, Coord)}
    free = tuple(sorted(through, key=lambda a: -updates.strides[a]))
    sequence = tuple(a for a in range(updates.rank) if a not in through)
    threads, steps = math.prod(updates.shape[a] for a in free), math.prod(updates.shape[a] for a in sequence)
    buckets = 1
    while 2 * buckets <= min(BUCKETS, steps // 4) and threads * 2 * buckets <= FILL:
        buckets *= 2
    return _Shares(free, sequence, buckets, threads * buckets, steps)


class ScatterKernel(TextKernel):
    """Every Scatter."""

    name = "scatter"
    realises = Scatter

    def supports(self, op: Op, program: Program, arch: Arch) -> str | None:
        assert isinstance(op, Scatter)
        shares = _shares(op, program)
        if max(shares.threads, shares.steps) > LIMIT:
            return "it has 2**31 updates or more"
        return refusal(op, program)

    def configs(self, op: Op, program: Program, arch: Arch) -> Iterator[Config]:
        yield {}

    def cost(self, op: Op, program: Program, config: Config, arch: Arch) -> float:
        assert isinstance(op, Scatter)
        moving, steps = traffic_us(op, program, arch), _shares(op, program).steps
        return 2 * measured(arch).launch_us + moving + measured(arch).order.scatter_us * steps

    def work(self, op: Op, program: Program, config: Config, arch: Arch) -> Work:
        assert isinstance(op, Scatter)
        x, updates, y = (program.tensors[n] for n in (op.x, op.updates, op.y))
        first = filled(op, program, load(0, x.dtype.compute), (identity_view(x.name, x.rank),), arch)
        if not updates.size:
            return Work(first)
        shares = _shares(op, program)
        axes = (*shares.free, *shares.sequence)
        args: list[Arg] = [I32(shares.threads), I32(shares.steps), I32(shares.buckets - 1)]
        args += dividers([shares.buckets, *(updates.shape[a] for a in shares.free)])
        args += dividers([updates.shape[a] for a in shares.sequence])
        args += [Ptr(updates.name), *(I32(updates.strides[a]) for a in axes), Ptr(y.name)]
        kinds: list[Value] = []
        for index, stride, extent in zip(op.at, y.strides, y.shape, strict=True):
            args.append(I32(stride))
            ((atom, _),) = index.terms or ((None, 0),)
            if atom is None:
                kinds.append("zero")
            elif isinstance(atom, Coord):
                kinds.append(shares.free.index(atom.axis))
            else:
                assert isinstance(atom, Element)
                source = program.tensors[atom.tensor]
                steps, offset = dict.fromkeys(axes, 0), 0
                for i, s in zip(atom.index, source.strides, strict=True):
                    offset += i.constant * s
                    for axis, k in (i.affine or {}).items():
                        steps[axis] += k * s
                kinds.append(source.dtype.value)
                args += [Ptr(source.name, offset * source.dtype.size), *map(I32, steps.values()), I32(extent)]
        params: dict[str, Value] = {
            "combine": op.combine, "free": len(shares.free), "sequence": len(shares.sequence), "axes": tuple(kinds),
            "updates": updates.dtype.value, "y": y.dtype.value,
        }  # fmt: skip
        grid = (ceil_div(shares.threads, THREADS), 1, 1)
        return Work((*first, Launch(code(self.name, **params), grid, THREADS, tuple(args))))

    def source(self, arch: Arch, **params: Any) -> KernelText:
        return _Writer(**params).text()


class _Writer:
    """Writes the kernel's text, and takes the launch's arguments in the order in which `work` gives them.

    combine         what is done with the element that is there and the update, of COMBINE
    free, sequence  how many axes of the updates are free, and how many a thread goes through
    axes            for each axis of y: the free axis that goes through it; "zero" where its index is 0; or the name of the type
                    of the indices that are read
    """

    def __init__(self, combine: str, free: int, sequence: int, axes: Any, updates: str, y: str) -> None:
        self.combine, self.free, self.sequence, self.axes = combine, free, sequence, axes
        self.updates, self.y = DType(updates), DType(y)
        self.taken = Parameters()
        self.scope: dict[str, Intrinsic] = {
            "update": intrinsic("ptx.memory.load", self.updates),
            "put": intrinsic("ptx.memory.store", self.y),
        }
        if combine != "set":
            self.scope["get"] = intrinsic("ptx.memory.load", self.y)

    def text(self) -> KernelText:
        taken, out = self.taken, Lines()
        threads, steps, mask = taken.take(), taken.take(), taken.take()
        outer, inside = take_dividers(taken, self.free + 1), take_dividers(taken, self.sequence)
        update, update_steps = taken.take("address"), [taken.take() for _ in range(self.free + self.sequence)]
        target = taken.take("address")
        described = [self._described(kind) for kind in self.axes]
        thread = out.let(f"i32(cuda.blockIdx.x * {THREADS} + cuda.threadIdx.x)")
        bucket, *here = split(out, thread, outer)
        body = inner(out)
        number = body.let("i32(step)")
        digits = [*here, *(split(body, number, inside) if self.sequence else [])]
        where, place = self._place(body, target, digits, described)
        mine = body.let(f"({place} & {mask}) == {bucket}")
        take = inner(body)
        where = take.let(where)
        self._update(take, where, address(take, update, digits, update_steps, self.updates.size))
        first, *rest = out.lines
        loop = [f"for step in range({steps}):", *indented([*body.lines, f"if {mine}:", *indented(take.lines)])]
        lines = [first, f"if {thread} < {threads}:", *indented([*rest, *loop])]
        return KernelText(taken.signature, lines, self.scope, THREADS)

    def _described(self, kind: int | str) -> tuple[int | str, str, str, list[str], str]:
        """An axis of y: its kind, the name of its stride and, if its indices are read, of their address, strides and limit."""
        stride = self.taken.take()
        if isinstance(kind, int) or kind == "zero":
            return kind, stride, "", [], ""
        self.scope[f"index_{kind}"] = intrinsic("ptx.memory.load", DType(kind))
        base = self.taken.take("address")
        return kind, stride, base, [self.taken.take() for _ in range(self.free + self.sequence)], self.taken.take()

    def _place(self, body: Lines, target: str, digits: list[str], described: list) -> tuple[str, str]:
        """The update's address in y, and its number among the places that the indices that are read can name."""
        where, place = target, "i32(0)"
        for kind, stride, base, index_steps, extent in described:
            if isinstance(kind, int):
                where += f" + i64({digits[kind]}) * (i64({stride}) * {self.y.size})"
            elif kind != "zero":
                value = body.let(f"index_{kind}({address(body, base, digits, index_steps, DType(kind).size)})")
                value = body.let(f"select({value} < i64(0), {value} + i64({extent}), {value})")
                value = body.let(f"i32(maximum(minimum({value}, i64({extent}) - i64(1)), i64(0)))")
                where += f" + i64({value}) * (i64({stride}) * {self.y.size})"
                place = body.let(f"i32({place} * {extent} + {value})")
        return where, place

    def _update(self, take: Lines, where: str, update: str) -> None:
        """Takes the update at one address to the element at the other."""
        value = take.loaded(take.let(f"update({update})"), self.updates)
        if self.combine != "set":
            value = take.let(COMBINE[self.combine].format(take.let(f"get({where})"), value))
        take.lines.append(f"put({where}, {take.stored(value, self.updates.compute, self.y)})")
