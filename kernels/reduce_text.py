"""The text of reduce.py's kernel, phase by phase."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from tccompile.ir.expr import Expr
from tccompile.ir.types import DType
from tccompile.kernels.codegen import Lines
from tccompile.kernels.loops import exchange, tree
from tccompile.kernels.text import indented

THREADS = 256

LANES = 8
"""Of a vector."""

READS = 4
"""Vectors that a thread reads at once."""

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
class Writer:
    """Writes the kernel's text. Block: outputs o = blockIdx.x * (256 / T) …, elements blockIdx.y * chunk … of each; a thread
    takes every T-th vector. Its results are a0 …, one for each lane; in the end those of the thread t = 0 are the output's.

    x        x's type
    pre      what is done to each element
    combine  the name of what combines two of them, of COMBINE
    acc      the type that they are combined in
    result   the type that the epilogue takes
    lanes, width, vector, by_k   as `reduce.Shares` has them
    threads  of an output, if they combine their results by exchanges within warps, or 0
    split    whether an output's elements are split between blocks
    """

    x: DType
    pre: Expr
    combine: str
    acc: DType
    result: DType
    lanes: int
    width: int
    vector: int
    by_k: bool
    threads: int
    split: bool

    @property
    def _names(self) -> list[str]:
        return [f"a{i}" for i in range(self.lanes)]

    @property
    def _identity(self) -> str:
        return IDENTITY[self.combine, self.acc]

    def _combined(self, one: str, other: str) -> str:
        return COMBINE[self.combine].format(one, other)

    def lines(self) -> list[str]:
        own = [*self._places(), *self._elements(), *self._over_threads()]
        if self.split:
            return [*own, *self._put_part(), *indented([*self._parts(), *self._over_threads(), *self._stored()])]
        return [*own, *self._stored()]

    def _places(self) -> list[str]:
        """`stride` is how far apart the threads of an output are."""
        if self.by_k:
            order = ["t = tid & (T - 1)", "o = blockIdx * (i32(256) >> bits) + (tid >> bits)", "stride = i32(1)"]
        else:
            order = ["stride = i32(256) >> bits", "t = tid // stride", "o = blockIdx * stride + (tid & (stride - 1))"]
        room = THREADS * self.lanes + (gathered_room(self.threads) if self._gathers else 0)
        return [
            "tid, blockIdx, split = i32(cuda.threadIdx.x), i32(cuda.blockIdx.x), i32(cuda.blockIdx.y)",
            "T = i32(1) << bits",
            *order,
            f"shared = cuda.shared.array({room}, {'f32' if self.acc is DType.F32 else 'i64'})",
            "m = o // groups",
            f"c = (o - m * groups) * i32({self.width})",
        ]

    def _elements(self) -> list[str]:
        """The thread's own. What lies behind the end is combined as the identity."""
        lines = [
            *(f"{a} = {self._identity}" for a in self._names),
            "if o < outputs and c < present:",
            f"    base = x + (rows(m, wr) + i64(c) * i64(xc)) * i64({self.x.size})",
            "    end = i32(min(K, i32((split + 1) * chunk)))",
            f"    k = i32(split * chunk + t * i32({self.vector}))",
            "    while k < end:",
        ]
        for u in range(READS):
            values = ", ".join(f"r{u}_{i}" for i in range(self.lanes * self.vector))
            lines += [
                f"        k{u} = i32(k + i32({u * self.vector}) * T)",
                f"        {values} = read(base + inner(k{u}, wk) * i64({self.x.size}), i32(k{u} < end))",
            ]
        for u in range(READS):
            lines.append(f"        left = i32(end - k{u})")
            for i in range(self.lanes * self.vector):
                lines += indented(indented(self._element(u, i)))
        return [*lines, f"        k = i32(k + i32({READS * self.vector}) * T)"]

    def _element(self, u: int, i: int) -> list[str]:
        """Number i of vector u."""
        out = Lines()
        raw = out.loaded(f"r{u}_{i}", self.x)
        term = out.cast(out.value(self.pre, lambda e: raw), self.pre.dtype, self.acc)
        own = f"u{u}_{i}_"
        valid = f"left > i32({i if self.vector > 1 else 0})"
        target = f"a{i}" if self.lanes > 1 else "a0"
        taken = f"select({valid}, {_renamed(term, own)}, {self._identity})"
        return [*(_renamed(line, own) for line in out.lines), f"{target} = {self._combined(target, taken)}"]

    @property
    def _gathers(self) -> bool:
        return bool(self.threads) and not self.by_k

    def _over_threads(self) -> list[str]:
        formula = COMBINE[self.combine]
        if self._gathers:
            return gather(self._names, formula, self.threads)
        return exchange(self._names, formula, self.threads, THREADS) if self.threads else tree(self._names, formula, THREADS)

    def _stored(self) -> list[str]:
        out = Lines()
        results = [out.cast(a, self.acc, self.result) for a in self._names]
        results += ["f32(0)" if self.result is DType.F32 else results[0]] * (self.width - self.lanes)
        return [
            "if t == 0 and o < outputs:",
            *indented(out.lines),
            f"    store(({', '.join(results)},), m, c, e)",
        ]

    def _put_part(self) -> list[str]:
        """The block's, (outputs, splits, lanes), and the question whether all are there."""
        size = self.lanes * self.acc.size
        return [
            f"parts = scratch + i64(o) * i64(splits) * i64({size})",
            "if t == 0 and o < outputs:",
            f"    store_part(parts + i64(split) * i64({size}), {', '.join(self._names)})",
            "if last_to_arrive(u64(counters + i64(blockIdx) * i64(4)), splits):",
        ]

    def _parts(self) -> list[str]:
        """Every T-th block's, which the last block's threads combine."""
        size, parts = self.lanes * self.acc.size, [f"p{i}" for i in range(self.lanes)]
        return [
            *(f"{a} = {self._identity}" for a in self._names),
            "if o < outputs:",
            "    k = t",
            "    while k < splits:",
            f"        {', '.join(parts)} = load_part(parts + i64(k) * i64({size}))",
            *(f"        {a} = {self._combined(a, part)}" for a, part in zip(self._names, parts, strict=True)),
            "        k += T",
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
