"""Launches → where everything lies: offsets in one arena, edges between steps, and the arguments as the runtime takes them.

A tensor lives from the first step that writes its storage to the last one that reads it, views included. Areas that live at
the same time never share bytes; edges keep the steps that share bytes in the program's order and leave all others free.
Areas of steps that could run side by side do not share bytes either, as far as the arena does not grow much by that.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import accumulate, combinations
from operator import and_

from tccompile.ir.extent import Extent, most, round_up
from tccompile.ir.memory import NOWHERE, Budget, Span, accesses, lifetimes, ordered, whereabouts
from tccompile.ir.program import Program, earlier
from tccompile.kernels import spec
from tccompile.kernels.spec import Im2colMap, Launch, TiledMap, Work
from tccompile.plan.format import Address, Float, Int, Map, PlanArg

ALIGN = 256
"""Bytes: what tensor maps and the widest vector loads ask for, and a multiple of a memory sector."""


ATTEMPTS = 16
"""How often each way of packing the arena is tried, where it does not come out as small as it can be."""


ROOM = 1.5
"""How much larger the arena may be so that steps that do not need each other's results do not wait for each other's bytes."""

APART = 2000
"""Areas up to which that is tried: it compares each with each."""


@dataclass(frozen=True)
class Placement:
    """Where a program's steps find everything.

    offsets   byte offset in the arena of each tensor that owns storage there
    arena     its bytes; counters, the bytes of the steps' counters
    after     for each step, the earlier ones that it waits for: no edge follows from others
    args      for each step and launch, its arguments
    scratch   for each step, where in the arena its workspace lies; own_counters, where in the counters its own do
    """

    offsets: Mapping[str, int]
    arena: int
    counters: int
    after: tuple[tuple[int, ...], ...]
    args: tuple[tuple[tuple[PlanArg, ...], ...], ...]
    scratch: tuple[Span, ...]
    own_counters: tuple[Span, ...]


def place(program: Program, works: Sequence[Work], greatest: Program | None = None) -> Placement:
    """Place a program whose op number i is realised by `works[i]`, in the order of its ops.

    greatest  the program at the greatest sizes, where some extents are open: what shares bytes there may do so at any sizes
    """
    areas = _areas(program, works)
    at, arena = pack_areas(areas)
    if len(areas) <= APART and any(apart := _apart(program, works, areas)):
        wider = pack_areas(areas, apart)
        if wider[1] <= ROOM * arena:
            at, arena = wider
    offsets = {area.name: offset for area, offset in zip(areas, at, strict=True) if area.name}
    starts = {area.first: offset for area, offset in zip(areas, at, strict=True) if not area.name}
    scratch = tuple((starts[i], most(work.scratch)) if work.scratch else NOWHERE for i, work in enumerate(works))
    *begins, size = accumulate((_aligned(work.counters) for work in works), initial=0)
    counters = tuple((at, most(work.counters)) if work.counters else NOWHERE for at, work in zip(begins, works, strict=True))
    layout = Layout(program, offsets)
    args = tuple(tuple(layout.args(launch, scratch[i], counters[i]) for launch in work.launches) for i, work in enumerate(works))
    edges = _edges(greatest or program, works, offsets, scratch, counters)
    return Placement(offsets, arena, size, edges, args, scratch, counters)


def _aligned(size: Extent) -> int:
    """Bytes to keep for something of this size."""
    return round_up(most(size), ALIGN)


# --- The arena -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Area:
    """Bytes of the arena that are in use from step `first` to step `last`, both included.

    name  the tensor that owns the storage; empty for a step's scratch
    """

    name: str
    size: int
    first: int
    last: int


def _areas(program: Program, works: Sequence[Work]) -> list[Area]:
    areas = [
        Area(name, _aligned(program.tensors[name].nbytes), *life) for name, life in lifetimes(program, _within(works)).items()
    ]
    return areas + [Area("", _aligned(work.scratch), i, i) for i, work in enumerate(works) if work.scratch]


def _within(works: Sequence[Work]) -> list[int]:
    """For each step the other one whose launches compute it too, or -1."""
    return [work.within for work in works]


def _apart(program: Program, works: Sequence[Work], areas: Sequence[Area]) -> list[set[int]]:
    """For each area the others that steps could use at the same time by the data they read, though not in the program's order."""
    before = earlier(program)
    users: dict[str, int] = {}  # of each storage, the steps, as bits
    for i, op in enumerate(program.ops):
        for name in (*op.inputs, *op.results):
            owner = program.tensors[name].storage
            users[owner] = users.get(owner, 0) | 1 << i | (1 << works[i].within if works[i].within >= 0 else 0)
    bits = [users[a.name] if a.name else 1 << a.first for a in areas]
    own = [[i for i in range(a.first, a.last + 1) if b >> i & 1] for a, b in zip(areas, bits, strict=True)]
    waits = [reduce(and_, (before[i] for i in steps)) for steps in own]  # what all users of an area come after
    out: list[set[int]] = [set() for _ in areas]
    for k, j in combinations(range(len(areas)), 2):
        first, second = (k, j) if areas[k].last < areas[j].first else (j, k)
        if areas[first].last < areas[second].first and bits[first] & ~waits[second]:
            out[k].add(j)
            out[j].add(k)
    return out


def pack_areas(areas: Sequence[Area], apart: Sequence[Collection[int]] = ()) -> tuple[list[int], int]:
    """An offset for each area, such that areas in use at the same time do not overlap, and the size of the arena.

    apart  for each area, if given, others that it must not overlap with whenever they are in use

    Greedy by size and greedy by breadth, each into the smallest gap that fits (Pisarchyk and Lee, "Efficient Memory
    Management for Deep Neural Net Inference", 2020). While more is used than ever lives at once, the areas that stick out
    furthest are placed first in the next attempt (Joslin and Clements, "Squeaky Wheel Optimization", 1999).
    """
    steps = max((a.last for a in areas), default=-1) + 1
    breadth = [0] * steps
    for a in areas:
        for i in range(a.first, a.last + 1):
            breadth[i] += a.size
    widest = [max(breadth[a.first : a.last + 1]) for a in areas]
    by_size = sorted(range(len(areas)), key=lambda k: (-areas[k].size, areas[k].first))
    by_breadth = sorted(range(len(areas)), key=lambda k: (-widest[k], -areas[k].size, areas[k].first))
    best: tuple[list[int], int] = [], -1
    for order in (by_size, by_breadth):
        for _ in range(ATTEMPTS):
            offsets, arena = _packed(areas, order, apart)
            if best[1] < 0 or arena < best[1]:
                best = offsets, arena
            if arena == max(breadth, default=0):
                return best
            below = {k for k in order if offsets[k] + areas[k].size < arena}
            order = sorted(order, key=below.__contains__)
    return best


def _packed(areas: Sequence[Area], order: Sequence[int], apart: Sequence[Collection[int]]) -> tuple[list[int], int]:
    offsets = [0] * len(areas)
    placed: list[int] = []  # by offset
    arena = 0
    for k in order:
        area, end, best, slack = areas[k], 0, None, 0
        for other in placed:
            meet = area.first <= areas[other].last and areas[other].first <= area.last
            if not meet and not (apart and other in apart[k]):
                continue
            gap = offsets[other] - end
            if gap >= area.size and (best is None or gap < slack):
                best, slack = end, gap
            end = max(end, offsets[other] + areas[other].size)
        offsets[k] = end if best is None else best
        arena = max(arena, offsets[k] + area.size)
        insort(placed, k, key=offsets.__getitem__)
    return offsets, arena


# --- Addresses -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Layout:
    program: Program
    offsets: Mapping[str, int]

    def address(self, name: str, more: Extent = 0) -> Address:
        """The address of a tensor's first element plus `more` bytes."""
        space, owner, start = whereabouts(self.program, self.offsets, name)
        return Address(space, owner, start + more)

    def args(self, launch: Launch, scratch: Span, counters: Span) -> tuple[PlanArg, ...]:
        """The arguments of a launch of a step whose workspace and counters lie there."""
        return tuple(self._arg(arg, scratch[0], counters[0]) for arg in launch.args)

    def _arg(self, arg: spec.Arg, scratch: int, counters: int) -> PlanArg:
        match arg:
            case spec.Ptr(name, more):
                return self.address(name, more)
            case spec.Scratch(more):
                return Address("arena", "", scratch + more)
            case spec.Counters(more):
                return Address("counters", "", counters + more)
            case spec.I32(value):
                return Int(value)
            case spec.F32(value):
                return Float(value)
            case TiledMap(name, more, extents, strides, box, steps, swizzle):
                dtype = self.program.tensors[name].dtype
                return Map("tiled", dtype, self.address(name, more), extents, strides, steps, swizzle, box=box)
            case Im2colMap(name, extents, strides, lower, upper, steps, channels, pixels, swizzle):
                dtype, address = self.program.tensors[name].dtype, self.address(name)
                return Map(
                    "im2col", dtype, address, extents, strides, steps, swizzle,
                    lower=lower, upper=upper, channels=channels, pixels=pixels,
                )  # fmt: skip


# --- Edges -----------------------------------------------------------------------------------------------------------


def _edges(
    program: Program, works: Sequence[Work], offsets: Mapping[str, int], scratch: Sequence[Span], counters: Sequence[Span]
) -> tuple[tuple[int, ...], ...]:
    """The earlier steps that each step waits for: those whose bytes it reads or overwrites, less what follows from others."""
    own = accesses(program, offsets, scratch, counters, _within(works))
    cooperative = [any(launch.cooperative for launch in work.launches) for work in works]
    reach: list[int] = []  # for each step, the set of all steps that it comes after, as bits
    after: list[tuple[int, ...]] = []
    for needed in ordered(own, cooperative, Budget()):
        kept, reached = [], 0
        for step in sorted(needed, reverse=True):
            if not reached >> step & 1:
                kept.append(step)
                reached |= reach[step] | 1 << step
        reach.append(reached)
        after.append(tuple(reversed(kept)))
    return tuple(after)
