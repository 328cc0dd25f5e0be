"""Which kernels run a program at all sizes of a box, and where the box is divided.

At points of the box each op's candidates are ranked as for fixed shapes. One choice for the whole box costs most where tiles fit
one size and not another: where that is more than a share of an inference, the box is divided such that its parts lose least. It
is divided, too, where a kernel's launches follow from the sizes by one rule here and by another one there.
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
from tccompile.ranges.box import Box, Point, between, corners, count, divided, divided_by, halves, opened, points
from tccompile.ranges.launches import HELD, Key, Launches, key_of
from tccompile.ranges.pool import Known, direct, looked_at
from tccompile.schedule.choose import (
    Candidate,
    Choice,
    Group,
    Together,
    Whole,
    compatible,
    gained,
    schedule,
    seen,
    uncopied,
    whole_of,
)
from tccompile.schedule.timings import Timings
from tccompile.sizes import Size

LOSS = 0.01
"""What an inference at some size may be slower than with kernels chosen for that size, by estimates, as a share."""

GRID, JUDGED = 100, 16
"""Points at which candidates are compared, besides those by which codes are chosen; and of a box, by which it is judged."""

ABSENT = 1.0
"""What it counts, as a share of an inference, that a candidate is none at some point."""

NEAR = 1.03
"""How much slower than the best candidate one may be that is taken since its launches follow from the sizes by one rule."""


FASTER, WIDER, MOST = 20, 32, 64
"""How many parts there are at most where others would only be faster, of one size and of several, and where launches follow by
other rules."""


class Part(NamedTuple):
    """A box, its program with open extents, and for each generation the choices, whose launches have such extents too."""

    box: Box
    program: Program
    choices: Mapping[str, Sequence[Choice]]


def parts(pattern: Pattern, archs: Sequence[str], refused: Collection[Code], timings: Timings, known: Known) -> list[Part]:
    """The pattern's box in parts, each with choices for all generations.

    refused  codes that do not fit a generation's registers; `known` keeps what is found for later calls
    Raises UnsupportedError where no kernel's launches follow from the sizes by one rule.
    """
    ranges = {name: _Range(pattern, ARCHS[name], refused, timings, known) for name in archs}

    def judged(boxes: Sequence[Box]) -> list[_Judged]:
        return [_Judged(box, {name: own.shared(box) for name, own in ranges.items()}) for box in boxes]

    todo, done = judged([pattern.box]), list[Part]()
    room = min(known.pool(pattern, own.arch, refused).parts for own in ranges.values())
    most = min(_most(pattern, known.patterns), room)
    while todo:
        todo.sort(key=lambda own: own.lost)  # divided first is where one choice costs most, at most points
        box, shared = (last := todo.pop()).box, last.shared
        divisible = len(todo) + len(done) + 2 <= most
        worst = max(shared, key=lambda name: shared[name].worst)
        if divisible and shared[worst].worst > LOSS and (cut := ranges[worst].grid.cut(box)):
            todo += judged(cut)
            continue
        try:
            made = {name: ranges[name].chosen(box, own.candidates, own.together, divisible) for name, own in shared.items()}
        except UndecidedError as why:
            cut = divided_by(box, points(box), why.mask) if why.mask is not None else None
            if cut is None:
                cut = halves(box)
            if cut is None or len(todo) + len(done) > MOST:
                raise UnsupportedError(
                    f"no kernel runs all sizes of the range ({why}); give a smaller range, or sizes one by one (--entry)"
                ) from why
            todo += judged(cut)
            continue
        done.append(Part(box, pattern.at(opened(box)), made))
    return sorted(done, key=lambda part: [size.low for size in part.box])


def _most(pattern: Pattern, patterns: Sequence[Pattern]) -> int:
    """FASTER, or WIDER, for the pattern of most sizes; others have a share of that."""
    large = [count(other.box) for other in patterns if count(other.box) > 1]
    most = WIDER if sum(len(size.all) > 1 for size in pattern.box) > 1 else FASTER
    return most if not large or count(pattern.box) >= max(large) else WIDER // len(large)


class _Shared(NamedTuple):
    """For each op the candidates that there are at all points of a box, what is computed by one launch at all of them, and what
    an inference takes longer with these and the first of each, as shares: at the worst point, and at all together."""

    candidates: Sequence[Sequence[Candidate]]
    together: Sequence[Group]
    worst: float
    lost: float


class _Judged(NamedTuple):
    """A box, and what its points share for each generation."""

    box: Box
    shared: Mapping[str, _Shared]

    @property
    def lost(self) -> float:
        return max(own.lost for own in self.shared.values())


class _Kind:
    """Ops that are alike at all sizes: their candidates, a row for each of the microseconds that it takes at points, or infinity
    where it is none, and what a microsecond of all such ops is there, as a share of an inference."""

    def __init__(self) -> None:
        self.found: list[Candidate] = []
        self.rows: dict[Key, int] = {}
        self.us, self.scale = np.zeros((0, 0)), np.zeros(0)

    def add(self, ranked: Sequence[Candidate], scale: float) -> None:
        """One more point."""
        for c in ranked:
            if self.rows.setdefault(key_of(c), len(self.found)) == len(self.found):
                self.found.append(c)
        grown = np.full((len(self.found), len(self.scale) + 1), math.inf)
        grown[: len(self.us), :-1] = self.us
        for c in ranked:
            grown[self.rows[key_of(c)], -1] = c.cost
        self.us, self.scale = grown, np.append(self.scale, scale)

    def shares(self, inside: np.ndarray) -> np.ndarray:
        """What each takes at points, as shares of inferences. Where there are no candidates, none is better than another."""
        us = self.us[:, inside]
        there = np.isfinite(us)
        shares: np.ndarray = np.where(there, us * self.scale[inside], np.where(there.any(0), ABSENT, 0.0))
        return shares


class _Grid:
    """What candidates of the pool take at points of a pattern's box, for each of `Known.ops`."""

    def __init__(self, pattern: Pattern, arch: Arch, refused: Collection[Code], known: Known):
        self.pattern, self.arch, self.refused, self.known = pattern, arch, refused, known
        self.of_op = known.kinds(pattern, arch)
        self.kinds = {kind: _Kind() for kind in self.of_op}
        self.points: list[Point] = []
        self.add((*looked_at(pattern), *between(pattern.box, GRID)))

    def add(self, points: Sequence[Point]) -> None:
        """Have more points to compare candidates at."""
        count, first = len(self.pattern.tree.ops), {kind: i for i, kind in enumerate(self.of_op)}
        counts = Counter(self.of_op[:count])  # those behind are other ways for some of them
        for point in dict.fromkeys(points):
            if point not in self.points:
                ranked = self.known.pooled(self.pattern, point, self.arch, self.refused)
                whole = sum(own[0].cost for own in ranked[:count] if own) or 1.0
                for kind, i in first.items():
                    self.kinds[kind].add(ranked[i], counts[kind] / whole)
                self.points.append(point)

    def inside(self, box: Box) -> np.ndarray:
        """The numbers of the points in a box, those at its ends too."""
        self.add(corners(box))
        columns = np.array(self.points).T
        within = [(column >= size.low) & (column <= size.high) for column, size in zip(columns, box, strict=True)]
        return np.flatnonzero(np.logical_and.reduce(within))

    def shared(self, inside: np.ndarray) -> list[list[Candidate]]:
        """For each op the candidates that there are at all of these points, that first which takes least in all. Their costs are
        scaled to those in the middle."""
        ranked = dict[int, list[Candidate]]()
        for number, kind in self.kinds.items():
            us = kind.us[:, inside]
            everywhere = [int(k) for k in np.flatnonzero(np.isfinite(us).all(1))]
            sums, least = (us / us.min(0)).sum(1) if everywhere else us.sum(1), us[:, len(inside) // 2].min(initial=math.inf)
            everywhere.sort(key=lambda k: sums[k])
            ranked[number] = [Candidate(float(least * sums[k] / sums[everywhere[0]]), *kind.found[k][1:]) for k in everywhere]
        return [ranked[kind] for kind in self.of_op]

    def cut(self, box: Box) -> tuple[Box, Box] | None:
        """The box divided where its parts lose least together; None if its points are one."""
        inside = self.inside(box)
        best: tuple[float, int, int] | None = None
        for number, size in enumerate(box):
            at = np.array([self.points[k][number] for k in inside])
            order = np.argsort(at, kind="stable")
            ends = np.flatnonzero(np.diff(at[order]))
            if not len(ends):
                continue
            total = np.zeros(len(ends))
            for kind in self.kinds.values():
                shares = kind.shares(inside[order])
                below = np.cumsum(shares, 1)[:, ends].min(0, initial=np.inf)
                above = np.cumsum(shares[:, ::-1], 1)[:, len(order) - 2 - ends].min(0, initial=np.inf)
                total += np.where(np.isfinite(below), below + above, 0.0)
            end = int(total.argmin())
            if best is None or total[end] < best[0]:
                low, high = (int(at[order][k]) for k in (ends[end], ends[end] + 1))
                best = float(total[end]), number, _roundest(size, low, high)
        return divided(box, *best[1:]) if best else None


def _roundest(size: Size, low: int, high: int) -> int:
    """Where to divide between two values of a size: after the one that most tiles end with."""
    return max((n for n in size.all if low <= n < high), key=lambda n: n & -n) + size.step


class _Range:
    """What runs a pattern for one generation, for any box of its sizes."""

    def __init__(self, pattern: Pattern, arch: Arch, refused: Collection[Code], timings: Timings, known: Known):
        self.pattern, self.arch, self.refused, self.timings, self.known = pattern, arch, refused, timings, known
        self.whole = known.launches(pattern, arch)
        self.joint: dict[Point, dict[Member, Whole]] = {}

    @cached_property
    def grid(self) -> _Grid:
        return _Grid(self.pattern, self.arch, self.refused, self.known)

    def shared(self, box: Box) -> _Shared:
        grid = self.grid
        inside = grid.inside(box)
        shared = grid.shared(inside)
        if not all(shared):  # what the pool has nothing for
            at = [self.known.ops(self.pattern, point) for point in corners(box)]
            shared = [
                own or _shared([self.known.all(of_point[i], self.arch, self.refused) for of_point in at])
                for i, own in enumerate(shared)
            ]
        judged = [grid.points[int(inside[k])] for k in np.linspace(0, len(inside) - 1, min(len(inside), JUDGED)).astype(int)]
        ranked = [self.known.pooled(self.pattern, point, self.arch, self.refused) for point in judged]
        costs, joint = _costs(ranked, shared), [self._joint(point) for point in judged]
        together = _shared_groups(joint, [taken for taken, _ in costs])
        losses = _losses(costs, joint, together, direct(self.pattern.at(judged[0])))
        return _Shared(shared, together, max(losses), sum(losses) * len(inside) / len(judged))

    def _joint(self, point: Point) -> dict[Member, Whole]:
        """What one launch may compute at a point, with codes of the pool: by the ops, kernel and config, what it takes."""
        if point in self.joint:
            return self.joint[point]
        pool, program, found = self.known.pool(self.pattern, self.arch, self.refused), self.pattern.at(point), {}
        for group in pool.joint[id(self.pattern)]:
            ops = [program.ops[k] for k in group.members]
            for _, kernel, config in group.ways:
                if kernel.supports(ops, program, self.arch) is None and config in kernel.configs(ops, program, self.arch):
                    whole = Whole(kernel.cost(ops, program, config, self.arch), kernel, config)
                    found[group.place, group.members, key_of(whole)] = whole
        self.joint[point] = found
        return found

    def chosen(self, box: Box, shared: Sequence[Sequence[Candidate]], together: Sequence[Group], divisible: bool) -> list[Choice]:
        """Choices for a box. Raises UndecidedError where it is to be divided, or cannot be run."""
        middle = corners(box)[len(corners(box)) // 2]
        program = self.pattern.at(middle)
        if missing := [op.nodes[0] for op, own in zip(program.ops, shared, strict=False) if not own]:
            raise UndecidedError(f"node {missing[0]!r}: no kernel is for all of these sizes")
        alike = {
            seen(asked.op, program): list(own) for asked, own in zip(self.known.ops(self.pattern, middle), shared, strict=True)
        }
        launches = Launches(self.pattern, box, self.arch, HELD, self.whole)
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
                if divisible and why.mask is not None and divided_by(box, points(box), why.mask):
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


Costs = Sequence[tuple[Sequence[float], Sequence[float]]]
"""For each point what each op takes with the first of the shared candidates, and with the best one there."""


def _costs(ranked: Sequence[Sequence[Sequence[Candidate]]], shared: Sequence[Sequence[Candidate]]) -> Costs:
    """An op for which a point has no candidates takes what it takes at others: there is no better choice."""
    found = []
    for at_point in ranked:
        best, taken = [], []
        for own, common in zip(at_point, shared, strict=True):
            costs = {key_of(c): c.cost for c in own}
            taken.append(costs.get(key_of(common[0]), common[0].cost) if common else math.inf)
            best.append(own[0].cost if own else taken[-1] if common else 0.0)
        found.append((taken, best))
    return found


Member = tuple[int, tuple[int, ...], Key]
"""The op in whose step several are computed, all of them, and by which kernel and config."""


def _shared_groups(joint: Sequence[Mapping[Member, Whole]], apart: Sequence[Sequence[float]]) -> list[Group]:
    """What is computed by one launch at all points, where that takes less in the mean than the ops one by one."""
    best: dict[tuple[int, tuple[int, ...]], tuple[float, Whole]] = {}
    for place, members, key in joint[0]:
        if all((place, members, key) in at_point for at_point in joint):
            wholes = [at_point[place, members, key] for at_point in joint]
            shares = [whole.cost / sum(own[k] for k in members) for whole, own in zip(wholes, apart, strict=True)]
            told = sum(shares) / len(shares), wholes[len(wholes) // 2]
            best[place, members] = min(best.get((place, members), told), told, key=lambda own: own[0])
    middle = apart[len(apart) // 2]
    gains = []
    for (_, members), (share, _) in best.items():
        one_by_one = sum(middle[k] for k in members)
        gains.append((gained(share * one_by_one, one_by_one), members))
    groups = [Group(*own, [whole]) for own, (_, whole) in best.items()]
    return [groups[i] for i in compatible(gains)]


def _losses(
    costs: Costs, joint: Sequence[Mapping[Member, Whole]], together: Sequence[Group], directs: Sequence[tuple[int, int]]
) -> list[float]:
    """How much longer an inference takes with what is shared, at each point, as a share.

    directs  what reads an input in place of a copy where that is faster, whose costs come last
    """
    middle, losses = costs[len(costs) // 2][0], []
    count = len(middle) - len(directs)
    numbers = {members: count + j for j, members in enumerate(directs)}
    for (taken, best), there in zip(costs, joint, strict=True):
        whole = {group.members: there[group.place, group.members, key_of(group.ways[0])].cost for group in together}
        whole |= {members: taken[j] for members, j in numbers.items() if middle[j] < sum(middle[k] for k in members)}
        inside = {k for members in whole for k in members}
        takes = sum(whole.values()) + sum(cost for k, cost in enumerate(taken[:count]) if k not in inside)
        gains = [(gained(way.cost, sum(best[k] for k in members)), members) for (_, members, _), way in there.items()]
        gains += [(sum(best[k] for k in members) - best[j], members) for members, j in numbers.items() if best[j]]
        least = sum(best[:count]) - sum(gains[i][0] for i in compatible(gains))
        losses.append(takes / least - 1 if least else 0.0)
    return losses
