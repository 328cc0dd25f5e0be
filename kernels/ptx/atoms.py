"""The multiply instructions of Tensor Cores, a row each; every text of one is made here.

Shapes, types and the generations that have them are those of the PTX ISA ("Matrix multiply-accumulate operation using mma
instruction", the same for mma.sp, and "Asynchronous warpgroup level matrix multiply-accumulate").
"""

from __future__ import annotations

from dataclasses import dataclass

from tccompile.arch import Arch

BITS = {"f16": 16, "bf16": 16, "tf32": 32, "f32": 32}
"""Of an element of each type, in registers. tf32 is a float32 of whose digits the last 13 are not looked at."""


@dataclass(frozen=True)
class Atom:
    """d (m, n) = a (m, k) @ b (k, n) + c (m, n), by a group of threads, each of which has an equal part of every operand.

    name       as kernels and plans call it
    a, b, acc  PTX's types of the elements of a, of b, and of c and d
    m, n, k    elements; `wgmma` takes any multiple of 8 up to n
    threads    of a group: 8 of a quad-pair, 32 of a warp, 128 of a warpgroup
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
        shape = "wgmma" if self.warpgroup else f"mma.{'sp.' if self.sparse else ''}m{self.m}n{self.n}k{self.k}"
        assert self.name == (shape if self.a == "f16" else f"{shape}.{self.a}"), f"{self.name} is no name of {shape}"

    @property
    def warpgroup(self) -> bool:
        """Whether it reads b, and a if it likes, from shared memory, and runs on while the warps do."""
        return self.threads == 128

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

    def text(self, n: int | None = None) -> str:
        """The instruction without its operands; `n` of those that it takes."""
        n = self.n if n is None else n
        assert n == self.n or (self.warpgroup and n % 8 == 0 and 8 <= n <= self.n), f"{self.name} has no n of {n}"
        shape = f"m{self.m}n{n}k{self.k}"
        if self.warpgroup:
            return f"wgmma.mma_async.sync.aligned.{shape}.{self.acc}.{self.a}.{self.b}"
        kind = "mma.sp::ordered_metadata" if self.sparse else "mma"
        return f"{kind}.sync.aligned.{shape}.row.col.{self.acc}.{self.a}.{self.b}.{self.acc}"


ATOMS = {
    atom.name: atom
    for atom in (
        #    name                 a       b       acc     m   n   k   threads since
        Atom("mma.m8n8k4",        "f16",  "f16",  "f32",   8,   8,  4,   8, (7, 0)),
        Atom("mma.m16n8k8",       "f16",  "f16",  "f32",  16,   8,  8,  32, (7, 5)),
        Atom("mma.m16n8k16",      "f16",  "f16",  "f32",  16,   8, 16,  32, (8, 0)),
        Atom("mma.m16n8k16.bf16", "bf16", "bf16", "f32",  16,   8, 16,  32, (8, 0)),
        Atom("mma.m16n8k8.tf32",  "tf32", "tf32", "f32",  16,   8,  8,  32, (8, 0)),
        Atom("mma.sp.m16n8k16",   "f16",  "f16",  "f32",  16,   8, 16,  32, (8, 0), sparse=True),
        Atom("mma.sp.m16n8k32",   "f16",  "f16",  "f32",  16,   8, 32,  32, (8, 0), sparse=True),
        Atom("wgmma",             "f16",  "f16",  "f32",  64, 256, 16, 128, (9, 0), only=True),
        Atom("wgmma.bf16",        "bf16", "bf16", "f32",  64, 256, 16, 128, (9, 0), only=True),
        Atom("wgmma.tf32",        "tf32", "tf32", "f32",  64, 256,  8, 128, (9, 0), only=True),
    )
}  # fmt: skip


def atoms(arch: Arch, a: str = "f16", b: str = "f16", sparse: bool = False) -> list[Atom]:
    """What a generation multiplies two types of elements by, the largest product first; none without Tensor Cores for them."""
    found = [x for x in ATOMS.values() if (x.a, x.b, x.sparse) == (a, b, sparse) and x.since <= arch.cc]
    there = [x for x in found if not x.only or (x.since == arch.cc and arch.suffix)]
    return sorted(there, key=lambda x: -x.m * x.n * x.k)


def of_warpgroups(arch: Arch) -> bool:
    """Whether a generation has products of whole warpgroups, which run on while the warps do: wgmma."""
    return any(x.warpgroup for x in atoms(arch))


def warp_atom(arch: Arch, a: str = "f16", b: str = "f16", quads: bool = False) -> Atom | None:
    """The largest product of operands in registers that a warp makes as a whole; with `quads`, or that its quad-pairs make."""
    groups = (8, 32) if quads else (32,)
    return next((x for x in atoms(arch, a, b) if x.threads in groups), None)
