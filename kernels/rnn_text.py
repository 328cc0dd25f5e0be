"""The text of the time loop of a recurrent layer: see rnn.py, which says what a block computes."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from tccompile.arch import Arch
from tccompile.ir.expr import Expr
from tccompile.ir.extent import ceil_div, round_up
from tccompile.ir.ops.rnn import GATES
from tccompile.ir.types import DType
from tccompile.kernels.codegen import Lines, constant, decode
from tccompile.kernels.text import KernelText, Scope, indented, intrinsic

ADDRESSES = ("x", "r", "y", "counters", "hidden", "cell", "update", "first", "reset")
"""Addresses that every code takes: tensors, then parts of the scratch memory.

hidden, cell  the state, float32; update: a GRU's σ(z), where a step has two rounds
first         the hidden state before the first step, in y's type; reset: σ(r) h of every step, the same
"""

OPTIONAL = {"b": 1, "p": 2, "h": 2, "c": 2, "lengths": 0}
"""Operands that may be missing, and how many strides of each are taken (of all axes but the last)."""

SIZES = ("T", "N", "H", "HP", "D", "parts", "turns", "kept", "pitch", "xt", "xn", "rd", "rg", "rj", "yt", "yd", "yn")
"""Numbers that every code takes: extents (HP: units with padding), parts a direction, turns of `batch` sequences, chunks of 32
elements of K whose weights a block keeps, bytes from one row of them to the next, and strides in elements."""


@dataclass(frozen=True)
class Shape:
    """How a block computes: `units` of all gates, `batch` sequences at a time; `mma` is the Tensor Core instruction, or None."""

    gates: int
    units: int
    batch: int
    mma: str | None
    size: int  # bytes of a weight
    state: int  # bytes of an element of y

    @property
    def warps(self) -> int:
        return 8 if self.mma else 4

    @property
    def threads(self) -> int:
        return 32 * self.warps

    @property
    def rows(self) -> int:
        return self.gates * self.units

    @property
    def tiles(self) -> int:
        """Of 16 rows, or 8 without Tensor Cores."""
        return ceil_div(self.rows, 16 if self.mma else 8)

    @property
    def sums(self) -> int:
        """Partial sums of each result: one a warp, or one a lane that has its own elements of K."""
        return self.warps * (1 if self.mma else 4)

    @property
    def stripes(self) -> int:
        """Rows and columns of 8 sequences, each a vector to wait for and a Tensor Core instruction's columns."""
        return self.batch // 8

    @property
    def unrolled(self) -> int:
        """Chunks that a warp has in flight."""
        return max(1, min(8 // self.tiles, 4 // self.stripes, 4)) if self.mma else 1

    @property
    def results(self) -> int:
        """Bytes of shared memory for partial sums, twice: those of a turn are read while the next one's are written."""
        return 2 * self.sums * self.tiles * (16 if self.mma else 8) * self.batch * 4

    def pitch(self, kept: int) -> int:
        """Bytes from row to row of the weights in shared memory, such that the lanes of a vector access spread over the banks."""
        row = kept * 32 * self.size
        return row + (64 if self.size == 2 and kept % 2 == 0 else 16 if self.size == 4 else 0) if kept else 0

    def kept(self, chunks: int, arch: Arch) -> int:
        """Chunks of K whose weights fit into a block's shared memory: all, or what all warps take at once times a number."""
        step = self.warps * self.unrolled
        room = arch.smem_block - self.results
        return next(k for k in (chunks, *range(chunks // step * step, -1, -step)) if self.rows * self.pitch(k) <= room)

    def smem(self, kept: int) -> int:
        return self.rows * self.pitch(kept) + self.results


def rounds(cell: str, reset_after: bool) -> tuple[tuple[int, ...], ...]:
    """The gates whose products are taken together, for each round of a step."""
    return ((0, 1), (2,)) if cell == "gru" and not reset_after else (tuple(range(GATES[cell])),)


def _shape_of(params: Any) -> Shape:
    r, y = (DType(t).size for t in params["types"][1:])
    return Shape(GATES[params["cell"]], params["units"], params["batch"], params["mma"] or None, r, y)


def _vectors(shape: Shape) -> int:
    """Vectors that a lane waits for at once: its elements of each sequence."""
    return shape.unrolled * shape.stripes if shape.mma else shape.batch * shape.state // 2


# --- Source ----------------------------------------------------------------------------------------------------------


def text_of(**params: Any) -> KernelText:
    """The kernel's text: parameters are addresses, then numbers."""
    writer = Writer(params)
    addresses = (*ADDRESSES, *writer.optional)
    numbers = (*SIZES, *(_stride(name, k) for name in writer.optional for k in range(OPTIONAL[name])))
    signature = {**dict.fromkeys(addresses, "address"), **dict.fromkeys(numbers, "int")}
    return KernelText(signature, [*writer.setup(), *writer.loop()], writer.scope(), writer.shape.threads)


def _stride(operand: str, axis: int) -> str:
    return f"{operand}_stride{axis}"


class Writer:
    """Writes the kernel's text. Variables of a thread:

    d, j0     direction and first unit of the part; n, j, at: the thread's sequence and unit, and where its state lies
    row, q    which row of 8, and which of the 4 groups of elements of a chunk of K, are the lane's
    """

    def __init__(self, params: Any) -> None:
        self.params = params
        self.shape = _shape_of(params)
        self.optional = dict(params["optional"])
        self.x, self.r, self.y = (DType(t).size for t in params["types"])
        self.cell, self.backward = params["cell"], params["backward"]
        self.rounds = rounds(self.cell, params["reset_after"])
        self.functions = [list(map(decode, of_one)) for of_one in params["functions"]]
        self.padded = self.shape.tiles * (16 if self.shape.mma else 8)  # rows of partial sums

    def scope(self) -> Scope:
        """What the text calls."""
        x, r, y = map(DType, self.params["types"])
        products = {"mma": intrinsic("ptx.mma.multiply_fragment", self.shape.mma)} if self.shape.mma else {}
        return {
            **{f"read_{name}": intrinsic("ptx.memory.load", DType(t), 1, True) for name, t in self.optional.items()},
            "grid_barrier": intrinsic("ptx.exchange.grid_barrier"),
            "wait": intrinsic("ptx.exchange.wait", y, _vectors(self.shape), bool(self.shape.mma)),
            "publish": intrinsic("ptx.exchange.publish", y),
            "withhold": intrinsic("ptx.exchange.withhold", y),
            "values": intrinsic("ptx.exchange.values", y),
            "weights": intrinsic("ptx.exchange.values", r),
            "read_x": intrinsic("ptx.memory.load", x, 1, True),
            "read_state": intrinsic("ptx.memory.load", DType.F32, 1, True),
            "write_state": intrinsic("ptx.memory.store", DType.F32, 1),
            "read_sum": intrinsic("ptx.memory.load", DType.F32, 1, False, "shared"),
            "write_sum": intrinsic("ptx.memory.store", DType.F32, 1, False, "shared"),
            "write_sums": intrinsic("ptx.memory.store", DType.F32, 2, False, "shared"),
            "quotient": intrinsic("ptx.mma.divide"),
            "copy_in": intrinsic("ptx.mma.load_chunk"),
            "copy_out": intrinsic("ptx.mma.store_chunk"),
            "shared_weights": intrinsic("ptx.memory.load_words", 4, "shared"),
            "global_weights": intrinsic("ptx.mma.load_chunk"),
            "shared_address": intrinsic("ptx.mma.shared_address"),
            **products,
        }

    # --- addresses

    def operand(self, name: str, inside: str, *index: str) -> str:
        """The text that reads an optional operand at (…, j), or zero where there is none."""
        if name not in self.optional:
            return "f32(0)"
        size = DType(self.optional[name]).size
        terms = [f"{i} * {_stride(name, k)}" for k, i in enumerate(index)]
        return f"read_{name}({name} + i64({' + '.join([*terms, 'j'])}) * {size}, {inside})"

    def in_y(self, t: str, n: str = "n", unit: str = "j") -> str:
        return f"y + (i64({t}) * yt + d * yd + {n} * yn + {unit}) * {self.y}"

    def in_reset(self, n: str = "n", unit: str = "j") -> str:
        return f"reset + (((i64(s) * D + d) * N + {n}) * HP + {unit}) * {self.y}"

    def length(self, n: str, inside: str) -> str:
        """The text that gives a sequence's number of steps."""
        if "lengths" not in self.optional:
            return "T"
        return f"i32(min(max(read_lengths(lengths + i64({n}) * 4, {inside}), 0), T))"

    def is_backward(self) -> str:
        """The text that says whether direction d is read from its end."""
        return {(False,): "False", (True,): "True", (False, True): "d == 1"}.get(self.backward, "d == 0")

    # --- before the first step

    def setup(self) -> list[str]:
        shape, units = self.shape, self.shape.units
        elements = 16 // self.r
        first = ["publish(first + at * " + f"{self.y}, state)", "write_state(hidden + at * 4, state)"]
        if self.cell == "lstm":
            first.append(f"write_state(cell + at * 4, {self.operand('c', 'i32(j < H)', 'd', 'n')})")
        held = [f"withhold({self.in_y('t')})"]
        if len(self.rounds) > 1:
            held += ["s = t", f"withhold({self.in_reset()})"]
        return [
            "tid, block, blocks = i32(cuda.threadIdx.x), i32(cuda.blockIdx.x), i32(cuda.gridDim.x)",
            "lane, warp = i32(tid & 31), i32(tid >> 5)",
            "row, q = i32(lane >> 2), i32(lane & 3)",
            f"u, nn = i32(tid % {units}), i32(tid // {units})",
            "sums = i32(shared_address(cuda.shared.array(0, f32)))",
            f"kept_weights = i32(sums + {shape.results})",
            "total, chunks = i32(D * parts), i32((HP + 31) >> 5)",
            "part = block",
            "while part < total:",
            "    d = i32(quotient(part, parts))",
            f"    j = i32((part - d * parts) * {units} + u)",
            "    turn = i32(0)",
            "    while turn < turns:",
            f"        n = i32(turn * {shape.batch} + nn)",
            f"        if nn < {shape.batch} and n < N and j < HP:",
            "            at = (i64(d) * N + n) * HP + j",
            f"            state = {self.operand('h', 'i32(j < H)', 'd', 'n')}",
            *indented(first, 3),
            "            t = i32(0)",
            "            while t < T:",
            *indented(held, 4),
            "                t = i32(t + 1)",
            "        turn = i32(turn + 1)",
            "    part = i32(part + blocks)",
            # The weights of the first part, row by row; beyond the last unit another one's, which nobody reads.
            "d = i32(quotient(block, parts))",
            f"j0 = i32((block - d * parts) * {units})",
            f"vectors = i32(kept * {2 * self.r})",
            "v = tid",
            f"while v < {shape.rows} * vectors:",
            "    i = i32(quotient(v, vectors))",
            f"    k = i32((v - i * vectors) * {elements})",
            f"    g = i32(i // {units})",
            f"    j = i32(min(i32(j0 + i - g * {units}), i32(H - 1)))",
            f"    w0, w1, w2, w3 = copy_in(r + (i64(d) * rd + g * rg + i64(j) * rj + k) * {self.r}, i32(k < HP))",
            f"    copy_out(i32(kept_weights + i * pitch + k * {self.r}), w0, w1, w2, w3)",
            f"    v = i32(v + {shape.threads})",
            "grid_barrier(counters, blocks, tid)",
        ]

    # --- the steps

    def loop(self) -> list[str]:
        rounds_ = [line for number in range(len(self.rounds)) for line in self.round(number)]
        return ["buffer = sums", "s = i32(0)", "while s < T:", *indented([*rounds_, "s = i32(s + 1)"])]

    def round(self, number: int) -> list[str]:
        """All parts and turns of a block, for the gates of one round."""
        shape, gates = self.shape, self.rounds[number]
        turn = [
            f"n, j = i32(turn * {shape.batch} + nn), i32(j0 + u)",
            f"mine = i32(nn < {shape.batch}) & i32(n < N) & i32(j < HP)",
            "real = mine & i32(j < H)",
            f"length = {self.length('n', 'mine')}",
            "active = s < length",
            f"t = i32(select(active & ({self.is_backward()}), i32(length - 1 - s), s))",
            "at = (i64(d) * N + n) * HP + j",
            *(f"x{g} = read_x(x + (i64(t) * xt + n * xn + (d * {shape.gates} + {g}) * H + j) * {self.x}, real)" for g in gates),
            *self.old_states(number),
            *self.sources(number),
            *self.product(len(gates) * shape.units),
            "cuda.syncthreads()",
            "if mine != 0:",
            *indented(self.finish(number)),
            f"buffer = i32({shape.results // 2} - (buffer - sums) + sums)",
            "turn = i32(turn + 1)",
        ]
        return [
            "part, resident = block, kept",
            "while part < total:",
            "    d = i32(quotient(part, parts))",
            f"    j0 = i32((part - d * parts) * {shape.units})",
            *indented(self.rows(gates)),
            "    turn = i32(0)",
            "    while turn < turns:",
            *indented(turn, 2),
            "    part, resident = i32(part + blocks), i32(0)",
        ]

    def rows(self, gates: tuple[int, ...]) -> list[str]:
        """Where the lane's rows of weights lie, in shared memory (s…) and in global memory (g…)."""
        lines = []
        count, units = len(gates) * self.shape.units, self.shape.units
        for k, start in enumerate(self.row_starts(count)):
            lines += [
                f"i = i32(min(i32(row + {start}), i32({count - 1})))",
                f"g = i32(i // {units})",
                f"j = i32(min(i32(j0 + i - g * {units}), i32(H - 1)))",
                f"s{k} = i32(kept_weights + (i + {gates[0] * units}) * pitch + q * {8 * self.r})",
                f"g{k} = r + (i64(d) * rd + (g + {gates[0]}) * rg + i64(j) * rj + q * 8) * {self.r}",
            ]
        return lines

    def row_starts(self, count: int) -> range:
        """The first row of each group of 8: two groups a tile of Tensor Cores'."""
        tile = 16 if self.shape.mma else 8
        return range(0, round_up(count, tile), 8)

    def old_states(self, number: int) -> list[str]:
        lines = []
        if self.cell == "gru" or "lengths" in self.optional:
            lines.append("old = read_state(hidden + at * 4, mine)")
        if self.cell == "lstm":
            lines.append("old_cell = read_state(cell + at * 4, mine)")
        if number == 1:
            lines.append("z = read_state(update + at * 4, mine)")
        return lines

    def sources(self, number: int) -> list[str]:
        """Where the lane's elements of the multiplied state lie (h…), and whether they exist (n…)."""
        shape, lines = self.shape, []
        for b in range(shape.stripes if shape.mma else shape.batch):
            lines.append(f"m = i32(turn * {shape.batch} + {f'{8 * b} + row' if shape.mma else b})")
            lines.append(f"n{b} = i32(m < N)")
            if number == 1:
                lines.append(f"h{b} = {self.in_reset('m', 'q * 8')}")
                continue
            lines += [
                f"before = {self.length('m', f'n{b}')}",
                f"before = i32(select((s <= before) & ({self.is_backward()}), i32(before - s), i32(s - 1)))",
                f"h{b} = {self.in_y('before', 'm', 'q * 8')}",
                "if s == 0:",
                f"    h{b} = first + ((i64(d) * N + m) * HP + q * 8) * {self.y}",
            ]
        return lines

    def product(self, count: int) -> list[str]:
        """The warp's partial sums, written to shared memory."""
        shape = self.shape
        chunk = self.chunk_mma if shape.mma else self.chunk_simt
        groups = range(len(self.row_starts(count)))
        if shape.mma:
            names = [f"c{g}_{b}_{e}" for g in groups for b in range(shape.stripes) for e in (0, 1)]
        else:
            names = [f"c{g}_{b}" for g in groups for b in range(shape.batch)]
        lines = [f"{name} = f32(0)" for name in names]
        lines += ["k = warp", "while k < resident:", *indented(chunk(count, kept=True))]
        lines += ["while k < chunks:", *indented(chunk(count, kept=False))]
        for g in groups:
            if shape.mma:
                lines.append(f"o = i32(buffer + ((warp * {self.padded} + {8 * g} + row) * {shape.batch} + q * 2) * 4)")
                lines += [f"write_sums(i32(o + {32 * b}), c{g}_{b}_0, c{g}_{b}_1)" for b in range(shape.stripes)]
            else:
                lines.append(f"o = i32(buffer + ((warp * 4 + q) * {self.padded} + {8 * g} + row) * {4 * shape.batch})")
                lines += [f"write_sum(i32(o + {4 * b}), c{g}_{b})" for b in range(shape.batch)]
        return lines

    def chunk_mma(self, count: int, kept: bool) -> list[str]:
        """The lane's weights are on their way before it waits for the state, which comes last."""
        shape, lines, waits = self.shape, [], []
        groups = range(len(self.row_starts(count)))
        for v in range(shape.unrolled):
            lines += [
                f"k{v} = i32(k + {v * shape.warps})",
                f"in{v} = i32(k{v} < {'resident' if kept else 'chunks'})",
                f"there{v} = in{v} & i32(k{v} * 32 + q * 8 < HP)",
            ]
            for g in groups:
                names = ", ".join(f"a{v}_{g}_{e}" for e in range(4))
                read = (
                    f"shared_weights(i32(s{g} + k{v} * 64), in{v})"
                    if kept
                    else f"global_weights(g{g} + i64(k{v}) * 64, there{v})"
                )
                lines.append(f"{names} = {read}")
            waits += [f"h{b} + i64(k{v}) * 64, there{v} & n{b}" for b in range(shape.stripes)]
        states = [f"b{v}_{b}_{e}" for v in range(shape.unrolled) for b in range(shape.stripes) for e in range(4)]
        lines.append(f"{', '.join(states)} = wait({', '.join(waits)})")
        words = 2 if shape.mma == "mma.m16n8k16" else 1  # of a row, that one instruction takes
        for v in range(shape.unrolled):
            for e in range(0, 4, words):
                for g in groups[::2]:
                    a = ", ".join(f"a{v}_{g + half}_{e + k}" for k in range(words) for half in (0, 1))
                    for b in range(shape.stripes):
                        acc = ", ".join(f"c{g + half}_{b}_{k}" for half in (0, 1) for k in (0, 1))
                        lines.append(f"{acc} = mma({acc}, {a}, {', '.join(f'b{v}_{b}_{e + k}' for k in range(words))})")
        return [*lines, f"k = i32(k + {shape.unrolled * shape.warps})"]

    def chunk_simt(self, count: int, kept: bool) -> list[str]:
        shape, lines = self.shape, ["there = i32(k * 32 + q * 8 < HP)"]
        pieces = shape.state // 2  # vectors of a lane's 8 elements
        waits = [
            f"h{b} + i64(k) * {32 * shape.state} + {16 * i}, there & n{b}" for b in range(shape.batch) for i in range(pieces)
        ]
        words = [[f"b{b}_{i}_{e}" for e in range(4)] for b in range(shape.batch) for i in range(pieces)]
        lines.append(f"{', '.join(w for of_one in words for w in of_one)} = wait({', '.join(waits)})")
        each = 16 // shape.state
        for b in range(shape.batch):
            for i in range(pieces):
                names = ", ".join(f"f{b}_{i * each + e}" for e in range(each))
                lines.append(f"{names} = values({', '.join(words[b * pieces + i])})")
        parts, each = self.r // 2, 16 // self.r
        for g in range(len(self.row_starts(count))):
            for i in range(parts):
                at = f"k * {32 * self.r} + {16 * i}"
                read = (
                    f"shared_weights(i32(s{g} + {at}), i32(1))"
                    if kept
                    else f"global_weights(g{g} + i64(k) * {32 * self.r} + {16 * i}, there)"
                )
                lines += [
                    f"w0, w1, w2, w3 = {read}",
                    f"{', '.join(f'a{i * each + e}' for e in range(each))} = weights(w0, w1, w2, w3)",
                ]
            for b in range(shape.batch):
                products = [f"a{e} * f{b}_{e}" for e in range(8)]
                lines.append(f"c{g}_{b} = {' + '.join([f'c{g}_{b}', *products])}")
        return [*lines, f"k = i32(k + {shape.warps})"]

    # --- one unit of one sequence

    def finish(self, number: int) -> list[str]:
        """From partial sums to what the round gives."""
        shape, gates = self.shape, self.rounds[number]
        out = Lines()
        lines = []
        for k, g in enumerate(gates):
            at = f"buffer + (({k * shape.units} + u) * {shape.batch} + nn) * 4"
            lines.append(f"o = i32({at})")
            reads = [f"read_sum(i32(o + {4 * w * self.padded * shape.batch}))" for w in range(shape.sums)]
            lines.append(f"p{g} = {' + '.join(reads)}")

        def peephole(k: int, state: str) -> str:
            return f" + {self.operand('p', 'real', 'd', str(k))} * {state}" if "p" in self.optional else ""

        if self.cell == "rnn":
            new = self.function(out, 0, out.let("x0 + p0"))
        elif self.cell == "gru" and number == 1:
            new = self.gru(out, "z", self.function(out, 1, out.let("x2 + p2")))
        elif self.cell == "gru":
            z, reset = (self.function(out, 0, out.let(f"x{g} + p{g}")) for g in (0, 1))
            if len(self.rounds) > 1:
                scaled = out.let(f"select(real != 0, {reset} * old, f32(0))")
                writes = [f"write_state(update + at * 4, {z})", f"publish({self.in_reset()}, {scaled})"]
                return [*lines, *_renamed(out.lines + writes, number)]
            bias = f" + {self.operand('b', 'real', 'd')}" if "b" in self.optional else ""
            new = self.gru(out, z, self.function(out, 1, out.let(f"x2 + {reset} * (p2{bias})")))
        else:
            i = self.function(out, 0, out.let(f"x0 + p0{peephole(0, 'old_cell')}"))
            if self.params["coupled"]:
                f = out.let(f"f32(1) - {i}")
            else:
                f = self.function(out, 0, out.let(f"x2 + p2{peephole(2, 'old_cell')}"))
            candidate = self.function(out, 1, out.let("x3 + p3"))
            cell = out.let(f"{f} * old_cell + {i} * {candidate}")
            o = self.function(out, 0, out.let(f"x1 + p1{peephole(1, cell)}"))
            new = out.let(f"{o} * {self.function(out, 2, cell, clipped=False)}")
        state, last = new, []
        if "lengths" in self.optional:
            state = out.let(f"select(active, {new}, old)")
            new = out.let(f"select(active, {new}, f32(0))")
        shown = out.let(f"select(real != 0, {new}, f32(0))")
        writes = [f"publish({self.in_y('t')}, {shown})"]
        if self.cell == "gru" or "lengths" in self.optional:
            writes.append(f"write_state(hidden + at * 4, {state})")
        there = "(real != 0) & (length > 0)" if "lengths" in self.optional else "real != 0"
        last.append(f"publish({self.in_y('T')}, {out.let(f'select({there}, {state}, f32(0))')})")
        if self.cell == "lstm":
            if "lengths" in self.optional:
                cell = out.let(f"select(active, {cell}, old_cell)")
            writes.append(f"write_state(cell + at * 4, {cell})")
            last.append(f"publish({self.in_y('T + 1')}, {out.let(f'select({there}, {cell}, f32(0))')})")
        return [*lines, *_renamed([*out.lines, *writes, "if s == T - 1:", *indented(last)], number)]

    def gru(self, out: Lines, z: str, new: str) -> str:
        return out.let(f"(f32(1) - {z}) * {new} + {z} * old")

    def function(self, out: Lines, k: int, a: str, clipped: bool = True) -> str:
        """The name that holds activation k of `a`."""
        clip = float(self.params["clip"])
        if clipped and clip != float("inf"):
            a = out.let(f"minimum(maximum({a}, {constant(-clip, DType.F32)}), {constant(clip, DType.F32)})")

        def of(function: Expr) -> str:
            return out.value(function, lambda e: a)

        one, *other = dict.fromkeys(of_one[k] for of_one in self.functions)
        return out.let(f"select(d == 0, {of(one)}, {of(other[0])})") if other else of(one)


def _renamed(lines: list[str], number: int) -> list[str]:
    """The lines with the names v0, v1 … of one round's expressions made its own."""
    return [re.sub(r"\bv(\d+)\b", rf"e{number}_\1", line) for line in lines]
