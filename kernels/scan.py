"""Cumulative sums and products along an axis by many threads, and where elements are that are not zero: on every generation.

A line is cut into chunks, one for each block. A first launch makes the total of each chunk; in a second one every block begins
with the totals of the chunks before its own. In a block, each of 256 threads has four neighbouring elements, and their threads
scan what these come to in shared memory. Sums are made in an order that depends on the shapes alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tccompile.arch import Arch
from tccompile.ir.expr import const
from tccompile.ir.extent import Extent, ceil_div, greatest
from tccompile.ir.ops import Cumulate, Op, Places
from tccompile.ir.program import Program
from tccompile.ir.types import DType
from tccompile.kernels.codegen import COMPUTE, Lines, Parameters, split
from tccompile.kernels.cumulate import COMBINE
from tccompile.kernels.lines import THREADS, address, dividers, filled, outermost_first, padding_filled, refusal, take_dividers
from tccompile.kernels.rates import measured
from tccompile.kernels.spec import I32, Arg, Config, Launch, Ptr, Scratch, Work, code, traffic_us
from tccompile.kernels.text import Called, KernelText, TextKernel, indented, intrinsic

EACH = 4
"""Neighbouring elements of a thread."""

TILE = EACH * THREADS
"""Elements that a block scans at once."""

CHUNKS = 1024
"""Blocks of a line, at most."""

LIMIT = 2**30
"""Elements that a tensor may have."""

COUNT = "count"
"""What is combined where it is counted which elements are not zero."""


class _Scan(TextKernel):
    """What both kernels share: what they refuse, chunks, launches and text."""

    def supports(self, op: Op, program: Program, arch: Arch) -> str | None:
        assert isinstance(op, Cumulate | Places)
        x = program.tensors[op.x]
        return f"{op.x} has {x.size} elements; they are counted in 30 bits" if x.size > LIMIT else refusal(op, program)

    def configs(self, op: Op, program: Program, arch: Arch) -> Iterator[Config]:
        n, lines = _line(op, program)
        tiles = ceil_div(n, TILE)
        for chunks in sorted({1, max(1, min(tiles, CHUNKS, 2 * arch.sms // max(lines, 1)))}):
            yield {"chunks": chunks}

    def cost(self, op: Op, program: Program, config: Config, arch: Arch) -> float:
        n, lines = _line(op, program)
        chunks = config["chunks"]
        waves = max(1.0, lines * chunks * THREADS / (arch.sms * arch.threads_sm))
        tiles = ceil_div(ceil_div(n, TILE), chunks)
        y = program.tensors[op.y]
        launches = (1 if chunks == 1 else 2) + (isinstance(op, Places) or y.padded != y.shape)
        own = measured(arch).order
        each = own.scan_us if chunks == 1 else own.scan_chunks_us
        return measured(arch).launch_us * launches + traffic_us(op, program, arch) + waves * tiles * each

    def launches(self, op: Cumulate | Places, program: Program, config: Config, params: Any, axis: int) -> Work:
        """The launches, after those that fill what they do not write."""
        x, y = program.tensors[op.x], program.tensors[op.y]
        n, lines = _line(op, program)
        rows = outermost_first([a for a in range(x.rank) if a != axis], x)
        chunk = ceil_div(ceil_div(n, TILE), config["chunks"]) * TILE
        chunks = ceil_div(n, chunk)
        read: list[Arg] = [I32(n), I32(chunk), *dividers([*(x.shape[a] for a in rows), chunks])]
        read += [Ptr(x.name), *(I32(x.strides[a]) for a in (*rows, axis)), Scratch()]
        params = {"rows": len(rows), "x": x.dtype.value, "y": y.dtype.value, **params}
        grid = (lines * chunks, 1, 1)
        target: tuple[Arg, ...] = (Ptr(y.name), *(I32(y.strides[a]) for a in (*rows, axis)), I32(y.shape[axis]))
        out = [Launch(code(self.name, phase="totals", alone=False, **params), grid, THREADS, tuple(read))] if chunks > 1 else []
        scan = code(self.name, phase="scan", alone=chunks == 1, **params)
        return Work((*out, Launch(scan, grid, THREADS, (*read, *target))), scratch=8 * lines * chunks if chunks > 1 else 0)

    def source(self, arch: Arch, **params: Any) -> KernelText:
        return _Writer(**params).text()


def _line(op: Op, program: Program) -> tuple[Extent, Extent]:
    """How many elements a line has, and how many lines there are."""
    assert isinstance(op, Cumulate | Places)
    x = program.tensors[op.x]
    n = x.shape[op.axis if isinstance(op, Cumulate) else 0]
    return n, x.size // greatest(n, 1)


class ScanKernel(_Scan):
    """Every Cumulate of floats or integers."""

    name = "scan"
    realises = Cumulate

    def work(self, op: Op, program: Program, config: Config, arch: Arch) -> Work:
        assert isinstance(op, Cumulate)
        y = program.tensors[op.y]
        first = padding_filled(op, program, const(0, y.dtype.compute), arch)
        if not y.size:
            return Work(first)
        params = {"combine": op.combine, "exclusive": op.exclusive, "reverse": op.reverse}
        work = self.launches(op, program, config, params, op.axis)
        return Work((*first, *work.launches), work.scratch)


class PlacesKernel(_Scan):
    """Every Places."""

    name = "places"
    realises = Places

    def work(self, op: Op, program: Program, config: Config, arch: Arch) -> Work:
        assert isinstance(op, Places)
        first = filled(op, program, const(0, DType.I64), (), arch)
        if not program.tensors[op.x].size:
            return Work(first)
        work = self.launches(op, program, config, {"combine": COUNT, "exclusive": True, "reverse": False}, 0)
        return Work((*first, *work.launches), work.scratch)


class _Writer:
    """Writes the text of one phase: "totals", of each chunk, or "scan". `alone`: a line is one chunk."""

    def __init__(self, phase: str, alone: bool, rows: int, x: str, y: str, combine: str, exclusive: bool, reverse: bool) -> None:
        self.phase, self.alone, self.combine = phase, alone, combine
        self.exclusive, self.reverse = exclusive, reverse
        self.given, self.stored, self.rows = DType(x), DType(y), rows
        self.formula, neutral = COMBINE["add" if combine == COUNT else combine]
        self.compute = DType.I64 if combine == COUNT else self.given.compute
        self.neutral = f"{COMPUTE[self.compute]}({neutral})"
        self.taken, self.out = Parameters(), Lines()

    def text(self) -> KernelText:
        taken, out, scans = self.taken, self.out, self.phase == "scan"
        n, chunk = taken.take(), taken.take()
        digits_of = take_dividers(taken, self.rows + 1)
        base, *steps = taken.take("address"), *(taken.take() for _ in range(self.rows + 1))
        totals = taken.take("address")
        block = out.let("i32(cuda.blockIdx.x)")
        *row, part = split(out, block, digits_of)
        line = address(out, base, row, steps[:-1], self.given.size)
        lines = [f"shared = cuda.shared.array({2 * THREADS}, {COMPUTE[self.compute]})", "t = i32(cuda.threadIdx.x)", *out.lines]
        lines.append(f"total = {self.neutral}")
        if scans and not self.alone:
            lines += self._before(totals, block, part)
        lines += [f"first = i32({part} * {chunk})", f"end = minimum(i32(first + {chunk}), {n})", "while first < end:"]
        lines += indented(
            [*self._read(line, steps[-1], n), *(self._scan(row, n) if scans else [self._joined("total", f"p{EACH - 1}")])]
        )
        lines.append(f"    first = i32(first + {TILE})")
        if not scans:
            lines += [*self._together(), "if t == 0:", f"    keep({totals} + i64({block}) * 8, total)"]
        elif self.combine == COUNT:
            lines += [
                f"if (t == 0) & (end == {n}):",
                f"    put({self.target} + i64({self.room}) * (i64({self.target_steps[-1]}) * 8), total)",
            ]
        return KernelText(taken.signature, lines, self._scope(scans), THREADS)

    def _scope(self, scans: bool) -> dict[str, Called]:
        scope: dict[str, Called] = {"get": intrinsic("ptx.memory.load", self.given, 1, True)}
        if scans:
            scope["put"] = intrinsic("ptx.memory.store", self.stored)
        if not self.alone:
            scope["keep" if not scans else "kept"] = intrinsic(
                "ptx.memory.store" if not scans else "ptx.memory.load", self.compute
            )
        return scope

    def _joined(self, name: str, other: str) -> str:
        return f"{name} = {self.formula.format(name, other)}"

    def _together(self) -> list[str]:
        """Combines what the block's threads have in `total`, for all of them."""
        lines, half = ["shared[t] = total", "cuda.syncthreads()"], THREADS // 2
        while half:
            lines += [f"if t < {half}:", f"    shared[t] = {self.formula.format('shared[t]', f'shared[t + {half}]')}"]
            lines.append("cuda.syncthreads()")
            half //= 2
        return [*lines, "total = shared[0]", "cuda.syncthreads()"]

    def _before(self, totals: str, block: str, part: str) -> list[str]:
        """What the chunks before come to."""
        return [
            "at = t",
            f"while at < {part}:",
            f"    {self._joined('total', f'kept({totals} + (i64({block}) - i64({part}) + i64(at)) * 8)')}",
            f"    at = i32(at + {THREADS})",
            *self._together(),
        ]

    def _read(self, line: str, step: str, n: str) -> list[str]:
        """e…: the thread's elements; p…: what they come to up to each one."""
        lines = []
        for i in range(EACH):
            lines += [f"at{i} = i32(first + {EACH} * t + {i})", f"inside{i} = at{i} < end"]
            place = f"i32({n} - 1 - at{i})" if self.reverse else f"at{i}"
            value = f"get({line} + i64({place}) * (i64({step}) * {self.given.size}), i32(inside{i}))"
            if self.combine == COUNT:
                lines.append(f"e{i} = select({value} != 0, i64(1), i64(0))")
            else:
                lines.append(f"e{i} = select(inside{i}, {value}, {self.neutral})")
            lines.append(f"p{i} = " + (self.formula.format(f"p{i - 1}", f"e{i}") if i else "e0"))
        return lines

    def _scan(self, row: list[str], n: str) -> list[str]:
        """What comes before each thread's elements, by doubling; then the results."""
        lines, to, step = [f"mine = p{EACH - 1}", "shared[t] = mine", "cuda.syncthreads()"], 0, 1
        while step < THREADS:
            lines += [f"if t >= {step}:", f"    mine = {self.formula.format(f'shared[t + {to * THREADS - step}]', 'mine')}"]
            to = 1 - to
            lines += [f"shared[t + {to * THREADS}] = mine", "cuda.syncthreads()"]
            step *= 2
        lines += [
            "before = total",
            "if t > 0:",
            f"    before = {self.formula.format('total', f'shared[t + {to * THREADS - 1}]')}",
        ]
        lines += [self._joined("total", f"shared[{(to + 1) * THREADS - 1}]"), "cuda.syncthreads()"]
        self.target, *self.target_steps = self.taken.take("address"), *(self.taken.take() for _ in range(self.rows + 1))
        self.room = f"i32({self.taken.take()} - 1)"
        rows = "".join(f" + i64({d}) * (i64({s}) * {self.stored.size})" for d, s in zip(row, self.target_steps, strict=False))
        for i in range(EACH):
            up_to = self.formula.format("before", f"p{i - 1}") if i else "before"
            if not self.exclusive:
                up_to = self.formula.format("before", f"p{i}")
            place = f"i32({n} - 1 - at{i})" if self.reverse else f"at{i}"
            condition, value = f"inside{i}", up_to
            if self.combine == COUNT:
                lines.append(f"rank = {up_to}")
                condition, place, value = f"(e{i} != 0) & (rank < i64({self.room}))", "rank", f"i64(at{i})"
            where = f"{self.target}{rows} + i64({place}) * (i64({self.target_steps[-1]}) * {self.stored.size})"
            lines += [f"if {condition}:", f"    put({where}, {value})"]
        return lines
