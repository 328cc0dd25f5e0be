"""Which kernels run a program at all sizes of a box, and where the box is divided.

At points of the box each op's candidates are ranked as for fixed shapes. One choice for the whole box costs most where tiles fit
one size and not another: where that is more than a share of an inference, the box is divided such that its parts lose least, by
one of the sizes, or by what is their product where several are open. It is divided, too, where a kernel's launches follow from
the sizes by one rule here and by another one there.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cached_property
from typing import NamedTuple

import numpy as np

from tccompile.arch import ARCHS, Arch
from tccompile.errors import UnsupportedError
from tccompile.ir.extent import UndecidedError
from tccompile.ir.program import Program
from tccompile.kernels.spec import Code, Kernel
from tccompile.ranges.alike import Pattern
from tccompile.ranges.box import Point, Region, between, corners, count, divided_by, halves, opened, points
from tccompile.ranges.launches import HELD, Launches, key_of
from tccompile.ranges.pool import Known, direct
from tccompile.schedule.choose import (
    DOUBTED,
    Candidate,
    Choice,
    Group,
    Together,
    Whole,
    compatible,
    schedule,
    seen,
    uncopied,
    whole_of,
)
from tccompile.schedule.timings import Timings
from tccompile.sizes import Size

LOSS = 0.01
"""What an inference at some size may be slower than with kernels chosen for that size, by estimates, as a share."""

GRID = 100
"""Points at which candidates are compared, besides those by which codes are chosen."""

ABSENT, SLOWEST = 1.0, 0.99
"""What it counts, as a share of an inference, that a candidate is none at some point, and the most that one counts."""

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


class _Shared(NamedTuple):
    """For each of `Known.ops` the candidates that there are at all points of a region, what is computed by one launch at all of
    them, and what an inference takes longer with these and the first of each, as shares: at the worst point, and at all of them
    together."""

    candidates: Sequence[Sequence[Candidate]]
    together: Sequence[Group]
    worst: float
    lost: float


class _Judged(NamedTuple):
    """A region, and what its points share for each generation."""

    region: Region
    shared: Mapping[str, _Shared]

    @property
    def lost(self) -> float:
        return max(own.lost for own in self.shared.values())


class _Kind(NamedTuple):
    """Ops that are alike at all points: their candidates, a row for each of what one of them takes at the points, as shares of
    inferences there, and the microseconds of the fastest; how many ops there are, but for those that are in a `_Several`."""

    found: Sequence[Candidate | Whole]
    shares: np.ndarray
    us: Sequence[float]
    number: int = 1

    def everywhere(self, inside: np.ndarray) -> list[int]:
        """The rows of candidates that there are at all of these points, the fastest first."""
        shares = self.shares[:, inside]
        sums = shares.sum(1)
        return sorted((int(k) for k in np.flatnonzero((shares < ABSENT).all(1))), key=lambda k: sums[k])


class _Several(NamedTuple):
    """Ops that one launch may compute, by number, and the one in whose step it is; or a copy and what may read an input in place
    of it, which are not `joint`. Of what the ops take one by one, that has to take `least` at most."""

    place: int
    members: tuple[int, ...]
    kind: _Kind
    least: float
    joint: bool


class _Grid:
    """What candidates of the pool take at points of a pattern's box."""

    def __init__(self, pattern: Pattern, arch: Arch, refused: Collection[Code], known: Known):
        self.points = list(dict.fromkeys((*known.points(pattern), *between(pattern.box, GRID))))
        columns = np.array(self.points).T
        several_open = sum(len(size.all) > 1 for size in pattern.box) > 1
        self.columns = np.array([*columns, columns.prod(0)]) if several_open else columns  # their product, too
        at = [known.ops(pattern, point) for point in self.points]
        ranked = [known.pooled(pattern, point, arch, refused) for point in self.points]
        self.count = len(pattern.tree.ops)
        numbers = list(zip(*([asked.number for asked in own] for own in at), strict=True))
        scale = 1 / np.array([sum(own[0].cost for own in of_point[: self.count] if own) or 1.0 for of_point in ranked])
        order = {own: i for i, own in reversed(list(enumerate(numbers)))}
        alike = {own: _kind([of_point[i] for of_point in ranked], scale) for own, i in order.items()}
        self.of_op = [alike[own] for own in numbers]
        joint = [known.joint(pattern, point, arch, refused) for point in self.points]
        several = [
            _Several(place, members, _kind([of_point.get((place, members), []) for of_point in joint], scale), DOUBTED, True)
            for place, members in dict.fromkeys(key for of_point in joint for key in of_point)
        ]
        several += [
            _Several(both[1], both, self.of_op[self.count + j], 1.0, False) for j, both in enumerate(direct(at[0][0].program))
        ]
        whole = np.arange(len(self.points))
        gains = [(float((self._apart(own, whole) - self._best(own, whole)).sum()), own.members) for own in several]
        self.several = [several[i] for i in compatible(gains)]
        inside = {k for own in self.several for k in own.members}
        counts = Counter(numbers[i] for i in range(self.count) if i not in inside)
        self.kinds = [kind._replace(number=counts[own]) for own, kind in alike.items() if counts[own]]

    def _apart(self, own: _Several, inside: np.ndarray) -> np.ndarray:
        """What the ops take one by one at each of some points, at least."""
        found: np.ndarray = np.sum([_least(self.of_op[k], inside) for k in own.members], 0)
        return found

    def _best(self, own: _Several, inside: np.ndarray) -> np.ndarray:
        """The same, or what one launch takes where that is taken."""
        apart, whole = self._apart(own, inside), _least(own.kind, inside)
        return np.where(whole < own.least * apart, whole, apart)

    def inside(self, region: Region) -> np.ndarray:
        """The numbers of the points in a region; of the nearest one, where there are none."""
        ends = [(size.low, size.high) for size in region.box] + ([region.product] if region.product else [])
        off = [np.maximum(np.maximum(low - c, c - high), 0) for c, (low, high) in zip(self.columns, ends, strict=False)]
        apart = np.sum(off, 0)
        return np.flatnonzero(apart == apart.min())

    def middle(self, region: Region) -> Point:
        """A point that stands for a region."""
        ends = corners(region.box)
        inside = self.inside(region)
        return self.points[inside[len(inside) // 2]] if region.product else ends[len(ends) // 2]

    def shared(self, region: Region) -> _Shared:
        """What a region shares, by the points in it."""
        inside = self.inside(region)
        middle, lost, together = int(inside[len(inside) // 2]), np.zeros(len(inside)), list[Group]()
        for kind in self.kinds:
            if first := kind.everywhere(inside)[:1]:
                lost += kind.number * (kind.shares[first[0], inside] - _least(kind, inside))
        for own in self.several:
            apart, whole = _first([self.of_op[k] for k in own.members], inside), _first([own.kind], inside)
            is_whole = whole is not None and (apart is None or whole.sum() < own.least * apart.sum())
            if (taken := whole if is_whole else apart) is not None:
                lost += taken - self._best(own, inside)
            if is_whole and own.joint:
                together.append(Group(own.place, own.members, [Whole(0.0, *own.kind.found[own.kind.everywhere(inside)[0]][1:])]))
        ranked = {id(kind.shares): _ranked(kind, inside, middle) for kind in self.of_op}
        return _Shared([ranked[id(kind.shares)] for kind in self.of_op], together, float(lost.max()), float(lost.sum()))

    def cut(self, region: Region) -> tuple[Region, Region] | None:
        """The region divided where its parts lose least together; None if its points are one."""
        inside = self.inside(region)
        best: tuple[float, int, int] | None = None
        for number, column in enumerate(self.columns):
            at = column[inside]
            order = np.argsort(at, kind="stable")
            ends = np.flatnonzero(np.diff(at[order]))
            if not len(ends):
                continue
            total = np.zeros(len(ends))
            for kind in self.kinds:
                sides = _sides(kind, inside[order], ends)
                total += kind.number * np.where(np.isfinite(sides[0]), sides[0] + sides[1], 0.0)
            for own in self.several:
                apart = np.sum([_sides(self.of_op[k], inside[order], ends) for k in own.members], 0)
                whole = _sides(own.kind, inside[order], ends)
                total += np.nan_to_num(np.where(whole < own.least * apart, whole, apart), posinf=0.0).sum(0)
            end = int(total.argmin())
            if best is None or total[end] < best[0]:
                low, high = (int(at[order][k]) for k in (ends[end], ends[end] + 1))
                size = region.box[number] if number < len(region.box) else Size("product", low, high)
                best = float(total[end]), number, _roundest(size, low, high)
        return region.divided(*best[1:]) if best else None


def _least(kind: _Kind, inside: np.ndarray) -> np.ndarray:
    """What the fastest candidate takes at each point."""
    found: np.ndarray = kind.shares[:, inside].min(0, initial=ABSENT)
    return found


def _first(kinds: Sequence[_Kind], inside: np.ndarray) -> np.ndarray | None:
    """What the fastest candidates that there are at all points take together; None where there are none."""
    rows = [kind.everywhere(inside)[:1] for kind in kinds]
    if not all(rows):
        return None
    return np.sum([kind.shares[row[0], inside] for kind, row in zip(kinds, rows, strict=True)], 0)


def _ranked(kind: _Kind, inside: np.ndarray, middle: int) -> list[Candidate]:
    """A kind's candidates that there are at all points, with what they take at the middle one; none, if no point has any."""
    everywhere, sums = kind.everywhere(inside), kind.shares[:, inside].sum(1)
    if not sums.any():
        return []
    return [
        Candidate(kind.us[middle] * float(sums[k] / sums[everywhere[0]]), *kind.found[k][1:])  # type: ignore[arg-type]
        for k in everywhere
    ]


def _sides(kind: _Kind, order: np.ndarray, ends: np.ndarray) -> np.ndarray:
    """What the fastest candidate takes for all points in this order up to each end, and what another does for those behind."""
    shares = kind.shares[:, order]
    below = np.cumsum(shares, 1)[:, ends].min(0, initial=np.inf)
    above = np.cumsum(shares[:, ::-1], 1)[:, len(order) - 2 - ends].min(0, initial=np.inf)
    return np.array([below, above])


def _roundest(size: Size, low: int, high: int) -> int:
    """Where to divide between two values of a size: after the one that most tiles end with."""
    return max((n for n in size.all if low <= n < high), key=lambda n: n & -n) + size.step


def _kind(ranked: Sequence[Sequence[Candidate | Whole]], scale: np.ndarray) -> _Kind:
    """Of the candidates at each point. Where there are none, none is better than another."""
    found = {key_of(c): c for own in ranked for c in own}
    rows = {key: i for i, key in enumerate(found)}
    shares = np.full((len(found), len(ranked)), ABSENT)
    for k, own in enumerate(ranked):
        if not own:
            shares[:, k] = 0.0
        for c in own:
            shares[rows[key_of(c)], k] = min(c.cost * scale[k], SLOWEST)
    return _Kind(list(found.values()), shares, [own[0].cost if own else 0.0 for own in ranked])


class _Range:
    """What runs a pattern for one generation, for any region of its sizes."""

    def __init__(self, pattern: Pattern, arch: Arch, refused: Collection[Code], timings: Timings, known: Known):
        self.pattern, self.arch, self.refused, self.timings, self.known = pattern, arch, refused, timings, known
        self.whole = known.launches(pattern, arch)

    @cached_property
    def grid(self) -> _Grid:
        return _Grid(self.pattern, self.arch, self.refused, self.known)

    def shared(self, region: Region) -> _Shared:
        found = self.grid.shared(region)
        if all(found.candidates):
            return found
        at = [self.known.ops(self.pattern, point) for point in corners(region.box)]  # what the pool has nothing for
        others = [
            own or _shared([self.known.all(of_point[i], self.arch, self.refused) for of_point in at])
            for i, own in enumerate(found.candidates)
        ]
        return found._replace(candidates=others)

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
