"""Which bytes steps touch, and so which of them must run one after the other. `place` makes a plan's edges by this rule, and
`check_plan` holds plans to it.

Two steps that touch the same bytes, one of them writing, run in the program's order. Neighbouring slices of a tensor may have
their first and last bytes on either side of each other's: slices are compared by coordinates.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

from tccompile.errors import PlanError
from tccompile.ir.extent import Extent
from tccompile.ir.loops import kept
from tccompile.ir.program import Program
from tccompile.ir.tensor import Tensor

Block = tuple[tuple[Extent, Extent], ...]
"""The first coordinate and the last plus one along each axis of a storage."""

Span = tuple[int, int]
"""Where some bytes begin, and how many they are."""

NOWHERE: Span = 0, 0


# --- Blocks ----------------------------------------------------------------------------------------------------------


def block_of(tensor: Tensor, base: Tensor) -> Block | None:
    """The block of `base` that a view of it is. It may count its axes otherwise, as an image does that is a row of tokens."""
    if tensor is base:
        return tuple((0, n) for n in base.padded)
    if not tensor.span:
        return None
    loops = sorted(((s, n) for s, n in zip(tensor.strides, tensor.padded, strict=True) if n > 1), reverse=True)
    block: list[tuple[Extent, Extent]] = [(0, 1)] * base.rank
    rest = tensor.offset
    axes = [a for a in base.order if base.padded[a] > 1]
    for axis in axes:
        start, rest = divmod(rest, base.strides[axis])
        block[axis] = (start, start + 1)
    for axis in reversed(axes):
        step, most = base.strides[axis], base.padded[axis]
        count: Extent = 1
        while loops and loops[-1][0] == step * count and count < most:
            stride, n = loops.pop()
            if count * n > most:  # on along the next axis
                turns = most // count
                if n % turns:
                    return None
                loops.append((stride * turns, n // turns))
                n = turns
            count *= n
        start = block[axis][0]
        block[axis] = (start, start + count)
        if start + count > most:
            return None
    return None if rest or loops else tuple(block)


def common(a: Block, b: Block) -> Extent:
    """Elements that two blocks of one storage share."""
    return math.prod(max(0, min(q, s) - max(p, r)) for (p, q), (r, s) in zip(a, b, strict=True))


# --- Accesses --------------------------------------------------------------------------------------------------------


class Access(NamedTuple):
    """Bytes `low` to `high` of the arena, of the counters, or of an output, that a step reads or writes.

    space  "arena", "counters", or "io" and the output's name
    owner  the storage, and the block of it where the access is one
    solid  whether it touches all bytes in between
    """

    step: int
    writes: bool
    space: str
    low: Extent
    high: Extent
    owner: str
    block: Block | None
    solid: bool

    def conflicts(self, other: Access) -> bool:
        """Whether two steps that touch bytes of one range, one of them writing, may not run at once."""
        if self.owner != other.owner or self.solid or other.solid or not self.block or not other.block:
            return True
        return all(p < s and r < q for (p, q), (r, s) in zip(self.block, other.block, strict=True))


def accesses(
    program: Program, offsets: Mapping[str, int], scratch: Sequence[Span], counters: Sequence[Span], within: Sequence[int]
) -> list[list[Access]]:
    """What each step touches. What nobody writes while steps run, inputs and constants, is left out.

    scratch, counters  where each step's own are
    within             for each step the other one whose launches compute it too, and touch what it does; or -1
    """
    elsewhere = {*program.inputs, *program.constants}
    known: dict[str, tuple[str, Extent, Extent, str, Block | None, bool] | None] = {}

    def where(name: str) -> tuple[str, Extent, Extent, str, Block | None, bool] | None:
        tensor = program.tensors[name]
        if not tensor.span or tensor.storage in elsewhere:
            return None
        space, owner, low = whereabouts(program, offsets, name)
        base = program.tensors[tensor.storage]
        return f"io {owner}" if owner else space, low, low + tensor.nbytes, base.name, block_of(tensor, base), tensor is base

    out: list[list[Access]] = []
    for step, op in enumerate(program.ops):
        own: list[Access] = []
        for name, writes in (*((name, False) for name in op.inputs), *((name, True) for name in op.results)):
            if name not in known:
                known[name] = where(name)
            if (at := known[name]) is not None:
                own.append(Access(step, writes, *at))
        for space, (start, size) in (("arena", scratch[step]), ("counters", counters[step])):
            if size:
                own.append(Access(step, True, space, start, start + size, "", None, True))
        out.append(own)
    for step, other in enumerate(within):
        if other >= 0:
            out[other] += [access._replace(step=other) for access in out[step]]
    return out


def whereabouts(program: Program, offsets: Mapping[str, int], name: str) -> tuple[str, str, Extent]:
    """Where a tensor begins: the space and the name as an `Address` has them, and the byte."""
    tensor = program.tensors[name]
    owner, start = tensor.storage, tensor.offset * tensor.dtype.size
    if owner in offsets:
        return "arena", "", offsets[owner] + start
    return "weights" if owner in program.constants else "io", owner, start


T = TypeVar("T")


COMPARED = 1 << 22
"""Accesses that `check_plan` compares in a plan, at most: some ten for each step are usual."""


@dataclass
class Budget:
    """How many accesses may still be compared."""

    left: float = math.inf

    def spend(self, count: int) -> None:
        self.left -= count
        if self.left < 0:
            raise PlanError("its steps touch each other's bytes more often than is checked: compile the model again")


class Line(Generic[T]):
    """A line of numbers, cut into pieces that each hold some things. What is looked at is taken from a budget."""

    def __init__(self, budget: Budget) -> None:
        self._budget = budget
        self._starts: list[Extent] = [0]
        self._held: list[list[T]] = [[]]

    def between(self, low: Extent, high: Extent) -> list[T]:
        """What the pieces from `low` to `high` hold, which are cut there."""
        pieces = self._held[self._cut(low) : self._cut(high)]
        found = pieces[0] if len(pieces) == 1 else [thing for held in pieces for thing in held]
        self._budget.spend(len(pieces) + len(found))
        return found

    def add(self, low: Extent, high: Extent, thing: T) -> None:
        """Have all pieces between hold one thing more."""
        for held in self._held[self._cut(low) : self._cut(high)]:
            self._budget.spend(1)
            held.append(thing)

    def put(self, low: Extent, high: Extent, *held: T) -> None:
        """Make one piece of all between, which holds these things only."""
        first, last = self._cut(low), self._cut(high)
        self._starts[first:last], self._held[first:last] = [low], [[*held]]

    def _cut(self, at: Extent) -> int:
        k = bisect_left(self._starts, at)
        if k == len(self._starts) or self._starts[k] != at:
            self._starts.insert(k, at)
            self._held.insert(k, [*self._held[k - 1]])
            self._budget.spend(len(self._held[k]))
        return k


def ordered(own: Sequence[Sequence[Access]], cooperative: Sequence[bool], budget: Budget) -> Iterator[set[int]]:
    """For each step earlier ones that it must come after, by what they touch; those that these come after may be missing.

    cooperative  of each step, whether its blocks must run at once: two of those at once could each wait for room that the
                 other has
    """
    reads: dict[str, Line[Access]] = {}
    writes: dict[str, Line[Access]] = {}
    last: set[int] = set()
    for i, (touched, alone) in enumerate(zip(own, cooperative, strict=True)):
        needed: set[int] = set()
        for access in touched:
            for lines in (writes, reads) if access.writes else (writes,):
                line = lines.setdefault(access.space, Line(budget))
                for other in line.between(access.low, access.high):
                    if other.step not in needed and access.conflicts(other):
                        needed.add(other.step)
        for access in touched:
            line = (writes if access.writes else reads).setdefault(access.space, Line(budget))
            if access.writes and access.solid:  # whatever conflicts with one before from now on, conflicts with this too
                line.put(access.low, access.high, access)
                reads[access.space].put(access.low, access.high)
            else:
                line.add(access.low, access.high, access)
        if alone:
            needed |= last
            last = {i}
        yield needed


def lifetimes(program: Program, within: Sequence[int] = ()) -> dict[str, tuple[int, int]]:
    """The first and the last op that use each tensor that owns storage in the arena, in the order in which they come up; what the
    body of a loop reads of outside is in use to the body's end.

    within  for each op, if given, the other one with which it is computed, or -1
    """
    elsewhere = {*program.inputs, *program.outputs, *program.constants}
    out: dict[str, tuple[int, int]] = {}
    for i, op in enumerate(program.ops):
        for name in (*op.inputs, *op.results):
            owner = program.tensors[name].storage
            if owner not in elsewhere:
                other = within[i] if within and within[i] >= 0 else i
                first, last = out.get(owner, (i, i))
                out[owner] = min(first, other), max(last, i, other)
    return kept(out, program)
