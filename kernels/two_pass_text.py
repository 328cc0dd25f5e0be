"""The text of kernels that reduce their elements twice, and then compute each: see two_pass.py."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from tccompile.ir.types import DType
from tccompile.kernels.loops import exchange, tree
from tccompile.kernels.text import indented

THREADS = 256
"""Threads of a block, if an output has not more."""


class Reduction(NamedTuple):
    """How one of the two passes combines its terms.

    formula   of two terms, `{}` and `{}`
    identity  what leaves the result alone, as text
    absorbs   whether what is not there leaves the result alone as it is: in the first pass it is zero, in the second the term of
              the first pass' identity
    """

    formula: str
    identity: str
    absorbs: bool


@dataclass(frozen=True)
class Passes:
    """The op in text: `{v}` is an element, `{r}` and `{s}` are the results of the first and the second pass.

    first, second   how the passes combine: the first one elements, the second one what `term` makes of them
    between, after  what is done to the results: of `{r}`, and of `{s}`; inverse (1 / count) and eps may be used
    out             the output
    kept            the output where registers hold the second pass' terms as `{v}`; empty if they are of no use
    """

    first: Reduction
    between: str
    term: str
    second: Reduction
    after: str
    out: str
    kept: str = ""


def exchanged(threads: int) -> int:
    """Numbers of shared memory that sums of one output over so many threads, all of a block, pass through, in two passes."""
    return 2 * threads // 32


@dataclass(frozen=True)
class Shape:
    """What the text depends on, of `two_pass.Shares`; `threads` is 0 where neighbouring threads have neighbouring outputs."""

    x: DType
    unit: int
    across: bool
    whole: bool
    sure: int
    threads: int
    rows: int
    held: int
    shared: bool
    words: int

    @property
    def block(self) -> int:
        """Threads of a block."""
        return max(THREADS, self.threads)

    @property
    def accumulators(self) -> int:
        """Results of a thread for each of its outputs' vectors: one for each lane, if these belong to different outputs."""
        return self.unit if self.across else 1

    @property
    def converted(self) -> bool:
        """Whether registers hold elements as float32 between the passes, not as words."""
        return bool(self.held) and not self.words


def lane_of(shape: Shape, i: int) -> int:
    """Which of an output's accumulators lane i of a vector belongs to."""
    return i if shape.across else 0


class Writer:
    """Writes the kernel's text.

    Thread t of T: vectors t, t + T … of `rows` outputs from o, each as many outputs after the one before as a block has at once.
    Names of output u and vector j: x_u, m_u, c_u say where the output begins in x, in y's rows and in y's lanes; k_j, x_j, m_j,
    c_j which vector of it, and where it lies from there; w_u_j_i are words of the vector, v_u_j_i elements; r_u_i and s_u_i
    results of the first and the second pass; end_u is the number of vectors, 0 for an output that there is not.
    """

    def __init__(self, passes: Passes, shape: Shape) -> None:
        self.passes, self.shape = passes, shape

    def lines(self) -> list[str]:
        passes = self.passes
        lines = [*self._numbers(), *self._outputs(), *self._read_all()]
        lines += self._pass(0, "r", "{v}", passes.first, passes.between)
        lines += self._pass(1, "s", passes.term, passes.second, passes.after)
        return lines + self._over(2, self._write)

    # --- Where everything lies

    def _numbers(self) -> list[str]:
        """The thread's numbers, and shared memory."""
        s = self.shape
        if not s.threads:
            return [
                "tid, block = i32(cuda.threadIdx.x), i32(cuda.blockIdx.x)",
                "T = i32(1) << bits",
                "stride = i32(256) >> bits",
                "t = tid // stride",
                "o = block * stride + (tid & (stride - 1))",
                f"shared = cuda.shared.array({THREADS * s.accumulators}, f32)",
            ]
        lines = [
            f"tid, T, apart = i32(cuda.threadIdx.x), i32({s.threads}), i32({s.block // s.threads})",
            f"t = tid & i32({s.threads - 1})",
            f"o = i32(i32(cuda.blockIdx.x) * i32({s.rows}) * apart + tid // i32({s.threads}))",
        ]
        if s.shared:
            lines.append("shared = cuda.shared.array(0, f32)")
            lines.append(f"slots = i32(i32(shared_address(shared)) + i32({4 * exchanged(s.threads)}) + tid * i32({4 * s.words}))")
        elif s.threads > 32:
            lines.append(f"shared = cuda.shared.array({2 * s.rows * s.accumulators * s.block // 32}, f32)")
        return lines

    def _outputs(self) -> list[str]:
        lines = []
        for u in range(self.shape.rows):
            number = f"o + i32({u}) * apart" if u else "o"
            lines.append(f"end{u} = K if {number} < outputs else i32(0)")
            lines.append(f"x_{u}, m_{u}, c_{u} = kept(i32(min({number}, outputs - 1)), wo)")
        return lines

    def _place(self, j: int, at: str) -> list[str]:
        """Where vector j, number `at`, lies."""
        s = self.shape
        if s.words:
            return [
                f"k{j} = i32({at} + i32({j * s.threads}))",
                f"c{j} = i64({at}) * i64({s.unit}) + i64({j * s.threads * s.unit})",
            ]
        at = f"{at} + i32({j}) * T"
        return [f"k{j} = i32({at})", f"x{j}, m{j}, c{j}_ = inner(k{j}, wk)", f"c{j} = i32(c_0 + c{j}_)"]

    # --- Reading

    def _read_all(self) -> list[str]:
        """Reads what is kept between the passes."""
        s = self.shape
        if s.shared:
            return [
                "k, slot = t, slots",
                f"while k < i32({s.held * s.threads}):",
                f"    at = x + (x_0 + i64(k) * i64({s.unit})) * i64({s.x.size})",
                f"    inside = i32(i32(k < end0 and k * i32({s.unit}) < present) << i32(4))",
                *(f"    copy(i32(slot + i32({b})), at + i64({b}), inside)" for b in range(0, 4 * s.words, 16)),
                f"    k, slot = i32(k + i32({s.threads})), i32(slot + i32({4 * s.words * s.threads}))",
                "commit()",
                "landed()",
            ]
        lines = []
        for j in range(s.held):
            lines += self._place(j, "t")
            lines += [self._read(u, j, j < s.sure) for u in range(s.rows)]
        return lines

    def _read(self, u: int, j: int, full: bool) -> str:
        s = self.shape
        name, function, n = ("w", "read_x", s.unit * s.x.size // 4) if s.words else ("v", "read", s.unit)
        names = ", ".join(f"{name}{u}_{j}_{i}" for i in range(n))
        if s.shared:
            return f"{names} = held_x(i32(slot + i32({4 * s.words * s.threads * j})), i32(1))"
        inside = "i32(1)" if s.words and full else f"i32(k{j} < end{u} and c{j} < present)"
        return f"{names} = {function}(x + (x_{u} + {'c' if s.words else 'x'}{j}) * i64({s.x.size}), {inside})"

    def _unpack(self, j: int, turn: int) -> list[str]:
        """The elements of vector j, of all outputs, out of its words.

        In later passes of words that look changed, by zeros that only the launch knows: else ptxas would find that it has these
        elements already, and keep them in the registers that words are to save.
        """
        s, out = self.shape, []
        for u in range(s.rows if s.words else 0):
            given = ", ".join(f"w{u}_{j}_{i}" for i in range(s.words))
            if s.held and turn and not s.shared:
                taken = ", ".join(f"a{i}" for i in range(s.words))
                out.append(f"{taken} = anew({given}, bits >> i32({20 + turn}))")
                given = taken
            out.append(f"{', '.join(f'v{u}_{j}_{i}' for i in range(s.unit))} = unpack_x({given})")
        return out

    def _over(self, turn: int, body: Callable[[int, bool], list[str]]) -> list[str]:
        """`body(j, full)` for each vector of the thread, some at a time unless in registers; `full`: all its lanes are there."""
        s, ahead = self.shape, 4 if self.shape.words else 2
        if s.held and not s.shared:
            return [line for j in range(s.held) for line in (*self._unpack(j, turn), *body(j, j < s.sure))]

        def some(count: int, full: int) -> list[str]:
            out = [line for j in range(count) for line in self._place(j, "k")]
            out += [self._read(0, j, False) for j in range(count)]
            return out + [line for j in range(count) for line in (*self._unpack(j, turn), *body(j, j < full))]

        if not s.shared:
            return ["k = t", "while k < end0:", *indented(some(ahead, 0)), f"    k = i32(k + i32({ahead}) * T)"]
        turns, rest = divmod(s.sure, ahead)
        on = [f"k = i32(k + i32({ahead * s.threads}))", f"slot = i32(slot + i32({4 * s.words * ahead * s.threads}))"]
        loop = [f"while k < i32({turns * ahead * s.threads}):", *indented([*some(ahead, ahead), *on])] if turns else []
        return ["k, slot = t, slots", *loop, *some(s.held - turns * ahead, rest)]

    # --- Reducing

    def _pass(self, turn: int, name: str, term: str, how: Reduction, then: str) -> list[str]:
        """One of the two passes: `name` is that of its results, `term` what is reduced, `then` what is done to the results."""
        results = [(u, i) for u in range(self.shape.rows) for i in range(self.shape.accumulators)]

        def add(j: int, full: bool) -> list[str]:
            out = []
            for u in range(self.shape.rows):
                out += self._mask(u, j, full) if name == "r" or not self.shape.converted else []
                out += self._combine(u, j, full, name, term, how)
            return out

        return [
            *(f"{name}{u}_{i} = {how.identity}" for u, i in results),
            *self._over(turn, add),
            *self._finish(name, how.formula, turn),
            *(f"{name}{u}_{i} = {then.format(r=f'{name}{u}_{i}', s=f'{name}{u}_{i}')}" for u, i in results),
        ]

    def _mask(self, u: int, j: int, full: bool) -> list[str]:
        """Elements that are not there become the first pass' identity."""
        s, first = self.shape, self.passes.first
        if s.across or full or (s.whole and first.absorbs):
            return []
        if s.whole:
            out = [f"there = k{j} < end{u}"]
            return out + [f"v{u}_{j}_{i} = select(there, v{u}_{j}_{i}, {first.identity})" for i in range(s.unit)]
        out = [f"left = i32(channels - c{j}) if k{j} < end{u} else i32(0)"]
        return out + [f"v{u}_{j}_{i} = select(left > i32({i}), v{u}_{j}_{i}, {first.identity})" for i in range(s.unit)]

    def _combine(self, u: int, j: int, full: bool, name: str, term: str, how: Reduction) -> list[str]:
        """Vector j of output u into its accumulators: lane by lane, or pairwise where all of the vector belongs to one output."""
        s, out, values = self.shape, [], []
        for i in range(s.unit):
            value = term.format(v=f"v{u}_{j}_{i}", r=f"r{u}_{lane_of(s, i)}")
            if s.converted and self.passes.kept and name == "s":
                out.append(f"v{u}_{j}_{i} = {value}")
                value = f"v{u}_{j}_{i}"
            values.append(value)
        if s.across:
            for i, value in enumerate(values):
                taken = f"select(k{j} < end{u}, {value}, {how.identity})"
                out.append(f"{name}{u}_{i} = {how.formula.format(f'{name}{u}_{i}', taken)}")
            return out
        if name == "s" and not how.absorbs and not full:
            out.append(f"left = i32(channels - c{j}) if k{j} < end{u} else i32(0)")
            values = [f"select(left > i32({0 if s.whole else i}), {value}, {how.identity})" for i, value in enumerate(values)]
        while len(values) > 1:
            pairs = [how.formula.format(*values[i : i + 2]) for i in range(0, len(values), 2)]
            names = [f"p{i}" for i in range(len(pairs))]
            out += [f"{n} = {pair}" for n, pair in zip(names, pairs, strict=True)]
            values = names
        return [*out, f"{name}{u}_0 = {how.formula.format(f'{name}{u}_0', values[0])}"]

    def _finish(self, name: str, how: str, turn: int) -> list[str]:
        """Every thread of an output gets its result."""
        s = self.shape
        accs = [f"{name}{u}_{i}" for u in range(s.rows) for i in range(s.accumulators)]
        if not s.threads:
            back = [f"{a} = shared[{i * THREADS} + tid - t * stride]" for i, a in enumerate(accs)]
            return [*tree(accs, how, THREADS), *back, "cuda.syncthreads()"]
        warps = s.block // 32
        first = turn * len(accs) * warps
        if s.threads <= THREADS:
            return exchange(accs, how, s.threads, s.block, first)
        # One output a block, of up to 32 warps: each lane takes the result of one of these, and all warps add them up again.
        places = [f"shared[i32({first + i * warps}) + {{}}]" for i in range(len(accs))]
        share = [f"    {p.format('(tid >> i32(5))')} = {a}" for p, a in zip(places, accs, strict=True)]
        take = [f"{a} = {p.format(f'(tid & i32({warps - 1}))')}" for p, a in zip(places, accs, strict=True)]
        within, among = exchange(accs, how, 32, s.block), exchange(accs, how, warps, s.block)
        return [*within, "if tid & i32(31) == 0:", *share, "cuda.syncthreads()", *take, *among]

    # --- Results

    def _write(self, j: int, full: bool) -> list[str]:
        """Stores what becomes of vector j."""
        s = self.shape
        text = self.passes.kept if s.converted and self.passes.kept else self.passes.out
        results = [
            text.format(v=f"v{u}_{j}_{i}", r=f"r{u}_{lane_of(s, i)}", s=f"s{u}_{lane_of(s, i)}")
            for u in range(s.rows)
            for i in range(s.unit)
        ]
        where = f"i32({'m_0' if s.words else f'm_0 + m{j}'}){'' if s.rows == 1 else ', apart, outputs'}"
        store = "store_inside" if s.words and full else "store"
        return [f"if k{j} < end0:", f"    {store}(({', '.join(results)},), {where}, c{j}, e)"]
