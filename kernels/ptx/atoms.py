"""The multiply instructions of Tensor Cores and of CUDA cores, a row each; every text of one is made here.

Shapes, types and the generations that have them are those of the PTX ISA ("Matrix multiply-accumulate operation using mma
instruction", the same for mma.sp, "Asynchronous warpgroup level matrix multiply-accumulate", and for CUDA cores "Floating point
instructions: fma" and "Integer arithmetic instructions: dp4a").
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from tccompile.arch import Arch

BITS = {"f16": 16, "bf16": 16, "tf32": 32, "f32": 32, "s8": 8, "u8": 8, "e4m3": 8, "e5m2": 8, "s32": 32}
"""Of an element of each type, in registers. tf32 is a float32 of whose digits the last 13 are not looked at."""

ROW_OF = {"u8": "s8", "e5m2": "e4m3"}
"""Types that have no rows of their own: an instruction of s8 takes u8 for a, b or both, and one of e4m3 takes e5m2."""

FROM = 0x4B400000
"""What sums of integers may begin with: the bits of 1.5 · 2^23 as a float32, so that with less than 2^22 added to them, or taken
from them, they are the bits of that sum (`simt.float_from`)."""


@dataclass(frozen=True)
class Atom:
    """d (m, n) = a (m, k) @ b (k, n) + c (m, n), by a group of threads, each of which has an equal part of every operand.

    name       as kernels and plans call it
    a, b, acc  PTX's types of the elements of a, of b, and of c and d; s8 stands for u8 too, e4m3 for e5m2, in any mix
    m, n, k    elements; `wgmma` takes any n that `takes` says, up to this
    threads    of a group: 8 of a quad-pair, 32 of a warp, 128 of a warpgroup; 1 for what a thread does by itself, on CUDA cores
    since      the compute capability of the first generation that has it
    only       whether it is for that one generation's own code
    sparse     whether of every four neighbours of K two of a are zero, and are not there
    """

    name: str
    a: str
    b: str
    acc: str
    m: int
    n: int
    k: int
    threads: int
    since: tuple[int, int]
    only: bool = False
    sparse: bool = False

    def __post_init__(self) -> None:
        for elements, kind in ((self.m * self.k, self.a), (self.k * self.n, self.b), (self.m * self.n, self.acc)):
            assert elements * BITS[kind] % (32 * self.threads) == 0, f"{self.name}: parts of a word"
        sparse = ".sp" if self.sparse else ""
        shape = f"wgmma{sparse}" if self.warpgroup else f"mma{sparse}.m{self.m}n{self.n}k{self.k}"
        if self.threads == 1:
            assert (self.m, self.n, self.name) == (1, 1, f"dp{self.k}a" if self.k > 1 else "fma"), self.name
            return
        assert self.name == (shape if self.a == "f16" else f"{shape}.{self.a}"), f"{self.name} is no name of {shape}"

    @property
    def warpgroup(self) -> bool:
        """Whether it reads b, and a if it likes, from shared memory, and runs on while the warps do."""
        return self.threads == 128

    @property
    def rough(self) -> bool:
        """Whether its sums have some 14 digits, cut off and not rounded: those of floats of 8 bits. Long sums are made of its
        short ones elsewhere."""
        return self.a == "e4m3"

    @property
    def words_a(self) -> int:
        """Registers that a thread has of a."""
        return self.m * self.k * BITS[self.a] // (32 * self.threads * (2 if self.sparse else 1))

    @property
    def words_b(self) -> int:
        """Registers that a thread has of b, if they are in registers."""
        return self.k * self.n * BITS[self.b] // (32 * self.threads)

    @property
    def words_acc(self) -> int:
        """Registers that a thread has of c, and of d."""
        return self.m * self.n * BITS[self.acc] // (32 * self.threads)

    @property
    def along_k(self) -> bool:
        """Whether operands in shared memory have to lie along K; a warpgroup's of 16 bits may lie across as well."""
        return BITS[self.a] != 16

    def takes(self, n: int) -> bool:
        """Whether there is an instruction of `n` columns: multiples of 8, of integers above 32 only those of 16."""
        if not self.warpgroup:
            return n == self.n
        return 8 <= n <= self.n and n % (16 if self.acc == "s32" and n > 32 else 8) == 0

    def text(self, n: int | None = None, a: str | None = None, b: str | None = None) -> str:
        """The instruction without its operands: `n` of those that it takes, `a` and `b` types that the row stands for."""
        n, a, b = self.n if n is None else n, a or self.a, b or self.b
        assert self.takes(n), f"{self.name} has no n of {n}"
        assert (ROW_OF.get(a, a), ROW_OF.get(b, b)) == (self.a, self.b), f"{self.name} does not multiply {a} by {b}"
        shape = f"m{self.m}n{n}k{self.k}"
        if self.threads == 1:
            words = (".u32" if kind == "u8" else ".s32" for kind in (a, b))
            return "fma.rn.f32" if self.k == 1 else f"{self.name}{''.join(words)}"
        if self.warpgroup:
            return f"wgmma.mma_async{'.sp' if self.sparse else ''}.sync.aligned.{shape}.{self.acc}.{a}.{b}"
        kind = "mma.sp::ordered_metadata" if self.sparse else "mma"
        return f"{kind}.sync.aligned.{shape}.row.col.{self.acc}.{a}.{b}.{self.acc}"


ATOMS = {
    atom.name: atom
    for atom in (
        #    name                 a       b       acc     m   n   k   threads since
        Atom("mma.m8n8k4",        "f16",  "f16",  "f32",   8,   8,  4,   8, (7, 0)),
        Atom("mma.m16n8k8",       "f16",  "f16",  "f32",  16,   8,  8,  32, (7, 5)),
        Atom("mma.m16n8k16",      "f16",  "f16",  "f32",  16,   8, 16,  32, (8, 0)),
        Atom("mma.m16n8k16.bf16", "bf16", "bf16", "f32",  16,   8, 16,  32, (8, 0)),
        Atom("mma.m16n8k8.tf32",  "tf32", "tf32", "f32",  16,   8,  8,  32, (8, 0)),
        Atom("mma.m8n8k16.s8",    "s8",   "s8",   "s32",   8,   8, 16,  32, (7, 5)),
        Atom("mma.m16n8k32.s8",   "s8",   "s8",   "s32",  16,   8, 32,  32, (8, 0)),
        Atom("mma.m16n8k32.e4m3", "e4m3", "e4m3", "f32",  16,   8, 32,  32, (8, 9)),
        Atom("mma.sp.m16n8k16",   "f16",  "f16",  "f32",  16,   8, 16,  32, (8, 0), sparse=True),
        Atom("mma.sp.m16n8k32",   "f16",  "f16",  "f32",  16,   8, 32,  32, (8, 0), sparse=True),
        Atom("mma.sp.m16n8k64.s8",   "s8",   "s8",   "s32", 16, 8, 64, 32, (8, 0), sparse=True),
        Atom("mma.sp.m16n8k64.e4m3", "e4m3", "e4m3", "f32", 16, 8, 64, 32, (8, 9), sparse=True),
        Atom("wgmma",             "f16",  "f16",  "f32",  64, 256, 16, 128, (9, 0), only=True),
        Atom("wgmma.bf16",        "bf16", "bf16", "f32",  64, 256, 16, 128, (9, 0), only=True),
        Atom("wgmma.tf32",        "tf32", "tf32", "f32",  64, 256,  8, 128, (9, 0), only=True),
        Atom("wgmma.s8",          "s8",   "s8",   "s32",  64, 256, 32, 128, (9, 0), only=True),
        Atom("wgmma.e4m3",        "e4m3", "e4m3", "f32",  64, 256, 32, 128, (9, 0), only=True),
        Atom("wgmma.sp",          "f16",  "f16",  "f32",  64, 256, 32, 128, (9, 0), only=True, sparse=True),
        Atom("wgmma.sp.bf16",     "bf16", "bf16", "f32",  64, 256, 32, 128, (9, 0), only=True, sparse=True),
        Atom("wgmma.sp.s8",       "s8",   "s8",   "s32",  64, 256, 64, 128, (9, 0), only=True, sparse=True),
        Atom("wgmma.sp.e4m3",     "e4m3", "e4m3", "f32",  64, 256, 64, 128, (9, 0), only=True, sparse=True),
        Atom("fma",               "f32",  "f32",  "f32",   1,   1,  1,   1, (2, 0)),
        Atom("dp4a",              "s8",   "s8",   "s32",   1,   1,  4,   1, (6, 1)),
    )
}  # fmt: skip


def atoms(arch: Arch, a: str = "f16", b: str = "f16", sparse: bool = False) -> list[Atom]:
    """What a generation's Tensor Cores multiply two types of elements by, the largest product first; none if it has none."""
    return [*_atoms(arch.cc, arch.suffix, a, b, sparse)]


@cache
def _atoms(cc: tuple[int, int], suffix: str, a: str, b: str, sparse: bool) -> tuple[Atom, ...]:
    wanted = (ROW_OF.get(a, a), ROW_OF.get(b, b), sparse)
    found = [x for x in ATOMS.values() if (x.a, x.b, x.sparse) == wanted and x.since <= cc]
    there = [x for x in found if x.threads > 1 and (not x.only or (x.since == cc and suffix))]
    return tuple(sorted(there, key=lambda x: -x.m * x.n * x.k))


def of_warpgroups(arch: Arch) -> bool:
    """Whether a generation has products of whole warpgroups, which run on while the warps do: wgmma."""
    return any(x.warpgroup for x in atoms(arch))


@cache
def group_atom(a: str, b: str, sparse: bool = False) -> Atom:
    """The product of two types of elements that a warpgroup makes, where `of_warpgroups` says that there are such."""
    wanted = ROW_OF.get(a, a), ROW_OF.get(b, b), sparse
    return next(x for x in ATOMS.values() if x.warpgroup and (x.a, x.b, x.sparse) == wanted)


def warp_atom(arch: Arch, a: str = "f16", b: str = "f16", quads: bool = False, sparse: bool = False) -> Atom | None:
    """The largest product of operands in registers that a warp makes as a whole; with `quads`, or that its quad-pairs make."""
    groups = (8, 32) if quads else (32,)
    return next((x for x in atoms(arch, a, b, sparse) if x.threads in groups), None)


def thread_atom(arch: Arch, a: str, b: str) -> Atom | None:
    """What a thread multiplies two types of elements by, on CUDA cores; other floats become float32 before."""
    wanted = ROW_OF.get(a, a), ROW_OF.get(b, b)
    return next((x for x in ATOMS.values() if x.threads == 1 and (x.a, x.b) == wanted and x.since <= arch.cc), None)
