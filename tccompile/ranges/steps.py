"""Which kernels run a program at all sizes of a box, and where the box is divided.

At points of the box each op's candidates are ranked as for fixed shapes. One choice for the whole box costs most where tiles fit
one size and not another: where that is more than a share of an inference, the box is divided such that its parts lose least, by
one of the sizes, or by what is their product where several are open. It is divided, too, where a kernel's launches follow from
the sizes by one rule here and by another one there.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cached_property
from typing import NamedTuple

from tccompile.arch import ARCHS, Arch
from tccompile.errors import UnsupportedError
from tccompile.ir.extent import UndecidedError
from tccompile.ir.program import Program
from tccompile.kernels.spec import Code, Kernel
from tccompile.ranges.alike import Pattern
from tccompile.ranges.box import Box, Region, corners, count, divided_by, halves, opened, points
from tccompile.ranges.grid import Grid, Shared
from tccompile.ranges.launches import HELD, Launches, key_of
from tccompile.ranges.pool import Known, direct
from tccompile.schedule.choose import (
    Candidate,
    Choice,
    Group,
    Together,
    schedule,
    seen,
    uncopied,
    whole_of,
)
from tccompile.schedule.timings import Timings

LOSS = 0.01
"""What an inference at some size may be slower than with kernels chosen for that size, by estimates, as a share."""

NEAR = 1.03
"""How much slower than the best candidate one may be that is taken since its launches follow from the sizes by one rule."""


FASTER, WIDER, MOST = 20, 32, 64
"""How many parts there are at most where others would only be faster, of one size and of several, and where launches follow by
other rules."""


class Part(NamedTuple):
    """A region, its program with open extents, and for each generation the choices, whose launches have such extents too."""

    region: Region
    program: Program
    choices: Mapping[str, Sequence[Choice]]


def parts(pattern: Pattern, archs: Sequence[str], refused: Collection[Code], timings: Timings, known: Known) -> list[Part]:
    """The pattern's box in parts, each with choices for all generations.

    refused  codes that do not fit a generation's registers; `known` keeps what is found for later calls
    Raises UnsupportedError where no kernel's launches follow from the sizes by one rule.
    """
    ranges = {name: _Range(pattern, ARCHS[name], refused, timings, known) for name in archs}

    def judged(regions: Sequence[Region]) -> list[_Judged]:
        return [_Judged(region, {name: own.shared(region) for name, own in ranges.items()}) for region in regions]

    todo, done = judged([Region(pattern.box)]), list[Part]()
    room = min(known.pool(pattern, own.arch, refused).parts for own in ranges.values())
    most = min(_most(pattern, known.patterns), room)
    while todo:
        todo.sort(key=lambda own: own.lost)  # divided first is what loses most, at most points
        region, shared = (last := todo.pop()).region, last.shared
        divisible = len(todo) + len(done) + 2 <= most
        worst = max(shared, key=lambda name: shared[name].worst)
        if divisible and shared[worst].worst > LOSS and (cut := ranges[worst].grid.cut(region)):
            todo += judged(cut)
            continue
        try:
            made = {name: ranges[name].chosen(region, own.candidates, own.together, divisible) for name, own in shared.items()}
        except UndecidedError as why:
            halved = divided_by(region.box, points(region.box), why.mask) if why.mask is not None else None
            if halved is None:
                halved = halves(region.box)
            if halved is None or len(todo) + len(done) > MOST:
                raise UnsupportedError(
                    f"no kernel runs all sizes of the range ({why}); give a smaller range, or sizes one by one (--entry)"
                ) from why
            todo += judged([region.within(box) for box in halved])
            continue
        done.append(Part(region, pattern.at(opened(region.box)), made))
    return sorted(done, key=lambda part: [size.low for size in part.region.box])


def _most(pattern: Pattern, patterns: Sequence[Pattern]) -> int:
    """FASTER, or WIDER, for the pattern of most sizes; others have a share of that."""
    large = [count(other.box) for other in patterns if count(other.box) > 1]
    most = WIDER if sum(len(size.all) > 1 for size in pattern.box) > 1 else FASTER
    return most if not large or count(pattern.box) >= max(large) else WIDER // len(large)


class _Judged(NamedTuple):
    """A region, and what its points share for each generation."""

    region: Region
    shared: Mapping[str, Shared]

    @property
    def lost(self) -> float:
        return max(own.lost for own in self.shared.values())


class _Range:
    """What runs a pattern for one generation, for any region of its sizes."""

    def __init__(self, pattern: Pattern, arch: Arch, refused: Collection[Code], timings: Timings, known: Known):
        self.pattern, self.arch, self.refused, self.timings, self.known = pattern, arch, refused, timings, known
        self.whole = known.launches(pattern, arch)

    @cached_property
    def grid(self) -> Grid:
        return Grid(self.pattern, self.arch, self.refused, self.known)

    def shared(self, region: Region) -> Shared:
        found = self.grid.shared(region)
        if all(found.candidates):
            return found
        spare = self._spare if len(found.candidates) > self.grid.count and all(found.candidates[self.grid.count :]) else {}
        others = [own or spare.get(i) or self._outside(i, region.box) for i, own in enumerate(found.candidates)]
        return found._replace(candidates=others)

    def _outside(self, number: int, box: Box) -> list[Candidate]:
        """Candidates of one of `Known.ops` that the pool has nothing for, at all sizes of a box."""
        at = [self.known.ops(self.pattern, point)[number] for point in corners(box)]
        return _shared([self.known.all(asked, self.arch, self.refused) for asked in at])

    @cached_property
    def _spare(self) -> dict[int, list[Candidate]]:
        """Those of copies, and of what would read them, where the pool has what reads the input itself: they are not taken."""
        least = self.pattern.at(self.grid.points[0])
        every = {k: self._outside(k, self.pattern.box) for both in direct(least) for k in both}
        return {k: [c._replace(cost=math.inf) for c in own] for k, own in every.items()}

    def chosen(
        self, region: Region, shared: Sequence[Sequence[Candidate]], together: Sequence[Group], divisible: bool
    ) -> list[Choice]:
        """Choices for a region. Raises UndecidedError where it is to be divided, or cannot be run."""
        middle = self.grid.middle(region)
        program = self.pattern.at(middle)
        if missing := [op.nodes[0] for op, own in zip(program.ops, shared, strict=False) if not own]:
            raise UndecidedError(f"node {missing[0]!r}: no kernel is for all of these sizes")
        alike = {
            seen(asked.op, program): list(own) for asked, own in zip(self.known.ops(self.pattern, middle), shared, strict=True)
        }
        launches = Launches(self.pattern, region.box, self.arch, HELD, self.whole)
        joint = self._together(launches, program, together)
        choices = schedule(program, self.arch, self.refused, self.timings, alike, joint)
        taken = [False] * len(program.ops)  # convolutions that read what is copied in place of the copy
        for i, (copy, _) in uncopied(program).items():
            taken[i] = not choices[copy].work.launches
        out = []
        for i, (at_middle, choice, own) in enumerate(zip(program.ops, choices, shared, strict=False)):
            if i in joint or (not choice.work.launches and program.tensors[at_middle.y].size):
                out.append(choice)  # of several ops, or of one that is one of these, or a copy that nobody makes
                continue
            try:
                out.append(self._open(launches, i, taken[i], choice, own, NEAR))
            except UndecidedError as why:
                if divisible and why.mask is not None and divided_by(region.box, points(region.box), why.mask):
                    raise
                asked = self.known.ops(self.pattern, middle)[i]
                others = [*own, *_plain(self.known.all(asked, self.arch, self.refused))]
                out.append(self._open(launches, i, taken[i], choice, others, math.inf))  # no cut parts the sizes
        return out

    def _together(self, launches: Launches, program: Program, together: Sequence[Group]) -> Together:
        """What is computed by one launch, with launches for all sizes; what has none is computed one by one."""
        found = {}
        for group in together:
            if (choice := whole_of(group, program, self.arch, self.refused)) is not None:
                with suppress(UndecidedError):
                    work = launches.of(group.members, False, choice.kernel, choice.config)
                    others = ", ".join(program.ops[k].nodes[0] for k in group.members if k != group.place)
                    reason = f"{choice.reason} together with {others}"
                    found[group.place] = group.members, replace(choice, work=work, reason=reason)
        return found

    def _open(
        self, launches: Launches, number: int, direct: bool, choice: Choice, ranked: Sequence[Candidate], near: float
    ) -> Choice:
        """The choice with launches for all sizes; where it has none, another candidate that is at most `near` times as slow.

        Raises UndecidedError where none has.
        """
        assert isinstance(choice.kernel, Kernel)
        try:
            return replace(choice, work=launches.of((number,), direct, choice.kernel, choice.config))
        except UndecidedError as why:
            for other in ranked:
                if other.cost > near * choice.cost:
                    break
                try:
                    work = launches.of((number,), direct, other.kernel, other.config)
                except UndecidedError:
                    continue
                if not any(launch.code in self.refused for launch in work.launches):
                    return replace(choice, kernel=other.kernel, config=other.config, work=work, cost=other.cost)
            op = launches.program.ops[number]
            raise UndecidedError(f"node {op.nodes[0]!r}: {why}", why.mask) from why


def _plain(ranked: Sequence[Candidate]) -> list[Candidate]:
    """Candidates whose configs only share out what is to be done, such that one of some sizes serves others too."""
    return [c for c in ranked if not c.kernel.tensor_cores]


def _shared(ranked: Sequence[Sequence[Candidate]]) -> list[Candidate]:
    """Candidates that there are at all points, by the mean of how much they are slower than the best one there.

    Their costs are scaled to those at the point in the middle.
    """
    if not all(ranked):
        return []
    tables = [{key_of(c): c for c in own} for own in ranked]
    everywhere = [key for key in tables[0] if all(key in table for table in tables)]
    score = {key: sum(table[key].cost / own[0].cost for table, own in zip(tables, ranked, strict=True)) for key in everywhere}
    best = ranked[len(ranked) // 2][0].cost / len(ranked)
    order = sorted(everywhere, key=lambda key: score[key])
    return [Candidate(score[key] * best, *tables[0][key][1:]) for key in order]
