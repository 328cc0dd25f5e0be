"""What candidates of a range's pool take at points of its box, and where a region of it is divided.

Where a region is divided, points are added between the two at which it is, until they are close: tiles fill up somewhere between.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from tccompile.arch import Arch
from tccompile.kernels.spec import Code
from tccompile.ranges.alike import Pattern
from tccompile.ranges.box import Point, Region, between, corners
from tccompile.ranges.launches import Key, key_of
from tccompile.ranges.pool import Known, direct
from tccompile.schedule.choose import DOUBTED, Candidate, Group, Whole, compatible
from tccompile.sizes import Size

GRID = 100
"""Points at which candidates are compared, besides those by which codes are chosen."""

FINE, CLOSER = 1 / 64, 6
"""How far apart the two sizes are between which a region is divided, as a share of the greater one; and how many points are added
at most until they are so close."""

SINGLE = 0.8
"""Of what the parts lose of a region that is divided by the product of sizes, those that are divided by one of these may lose
this share: any size tells few points apart."""

ABSENT, SLOWEST = 1.0, 0.99
"""What it counts, as a share of an inference, that a candidate is none at some point, and the most that one counts."""


class Shared(NamedTuple):
    """For each of `Known.ops` the candidates that there are at all points of a region, what is computed by one launch at all of
    them, and what an inference takes longer with these and the first of each, as shares: at the worst point, and at all of them
    together."""

    candidates: Sequence[Sequence[Candidate]]
    together: Sequence[Group]
    worst: float
    lost: float


@dataclass(eq=False)
class _Kind:
    """Ops that are alike at all points: their candidates, a row for each of what one of them takes at the points, as shares of
    inferences there, and the microseconds of the fastest."""

    found: dict[Key, Candidate | Whole]
    shares: np.ndarray
    us: list[float]

    def everywhere(self, inside: np.ndarray) -> list[int]:
        """The rows of candidates that there are at all of these points, the fastest first."""
        shares = self.shares[:, inside]
        sums = shares.sum(1)
        return sorted((int(k) for k in np.flatnonzero((shares < ABSENT).all(1))), key=lambda k: sums[k])

    def of(self, row: int) -> Candidate | Whole:
        """The candidate of a row."""
        return list(self.found.values())[row]

    def add(self, ranked: Sequence[Candidate | Whole], scale: float) -> None:
        """One more point, with its candidates."""
        for c in ranked:
            if key_of(c) not in self.found:
                self.found[key_of(c)] = c
                self.shares = np.vstack([self.shares, np.full(len(self.us), ABSENT)])
        costs = {key_of(c): min(c.cost * scale, SLOWEST) for c in ranked}
        column = [costs.get(key, ABSENT if ranked else 0.0) for key in self.found]
        self.shares = np.column_stack([self.shares, column])
        self.us.append(ranked[0].cost if ranked else 0.0)


class _Several(NamedTuple):
    """Ops that one launch may compute, by number, and the one in whose step it is; or a copy and what may read an input in place
    of it, which are not `joint`. Of what the ops take one by one, that has to take `least` at most."""

    place: int
    members: tuple[int, ...]
    kind: _Kind
    least: float
    joint: bool


_There = tuple[Sequence[Sequence[Candidate]], Mapping[tuple[int, tuple[int, ...]], Sequence[Whole]]]
"""The pool's candidates at a point, for each of `Known.ops`, and what is computed by one launch."""


class Grid:
    """What candidates of the pool take at points of a pattern's box."""

    def __init__(self, pattern: Pattern, arch: Arch, refused: Collection[Code], known: Known):
        self.pattern, self.arch, self.refused, self.known = pattern, arch, refused, known
        self.points = list(dict.fromkeys((*known.points(pattern), *between(pattern.box, GRID))))
        self.columns = self._columns(self.points)
        self.count = len(pattern.tree.ops)
        at = [known.ops(pattern, point) for point in self.points]
        there = [self._there(point) for point in self.points]
        ranked, scale = [own for own, _ in there], np.array([self._scale(own) for own in there])
        numbers = list(zip(*([asked.number for asked in own] for own in at), strict=True))
        self.firsts = [numbers.index(own) for own in dict.fromkeys(numbers)]
        alike = {numbers[i]: _kind([of_point[i] for of_point in ranked], scale) for i in self.firsts}
        self.of_op = [alike[own] for own in numbers]
        several = [
            _Several(*key, _kind([joint.get(key, []) for _, joint in there], scale), DOUBTED, True)
            for key in dict.fromkeys(key for _, joint in there for key in joint)
        ]
        several += [
            _Several(both[1], both, self.of_op[self.count + j], 1.0, False) for j, both in enumerate(direct(at[0][0].program))
        ]
        whole = np.arange(len(self.points))
        gains = [(float((self._apart(own, whole) - self._best(own, whole)).sum()), own.members) for own in several]
        self.several = [several[i] for i in compatible(gains)]
        inside = {k for own in self.several for k in own.members}
        counts = Counter(numbers[i] for i in range(self.count) if i not in inside)
        self.kinds = [(kind, counts[own]) for own, kind in alike.items() if counts[own]]

    def _columns(self, points: Sequence[Point]) -> np.ndarray:
        """The sizes at points; where several are open, their product, too."""
        columns = np.array(points).T
        several_open = sum(len(size.all) > 1 for size in self.pattern.box) > 1
        return np.array([*columns, columns.prod(0)]) if several_open else columns

    def _there(self, point: Point) -> _There:
        of_ops = self.known.pooled(self.pattern, point, self.arch, self.refused)
        return of_ops, self.known.joint(self.pattern, point, self.arch, self.refused)

    def _scale(self, there: _There) -> float:
        """The share of an inference at a point that a microsecond is."""
        return 1 / (sum(own[0].cost for own in there[0][: self.count] if own) or 1.0)

    def _add(self, point: Point) -> None:
        """Compare candidates at one more point."""
        there = self._there(point)
        scale = self._scale(there)
        for i in self.firsts:
            self.of_op[i].add(there[0][i], scale)
        for own in self.several:
            if own.joint:
                own.kind.add(there[1].get((own.place, own.members), []), scale)
        self.points.append(point)
        self.columns = np.column_stack([self.columns, self._columns([point])])

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

    def shared(self, region: Region) -> Shared:
        """What a region shares, by the points in it."""
        inside = self.inside(region)
        middle, lost, together = int(inside[len(inside) // 2]), np.zeros(len(inside)), list[Group]()
        for kind, number in self.kinds:
            if first := kind.everywhere(inside)[:1]:
                lost += number * (kind.shares[first[0], inside] - _least(kind, inside))
        for own in self.several:
            apart, whole = _first([self.of_op[k] for k in own.members], inside), _first([own.kind], inside)
            is_whole = whole is not None and (apart is None or whole.sum() < own.least * apart.sum())
            if (taken := whole if is_whole else apart) is not None:
                lost += taken - self._best(own, inside)
            if is_whole and own.joint:
                first_of = own.kind.of(own.kind.everywhere(inside)[0])
                together.append(Group(own.place, own.members, [Whole(0.0, *first_of[1:])]))
        ranked = {id(kind): _ranked(kind, inside, middle) for kind in self.of_op}
        return Shared([ranked[id(kind)] for kind in self.of_op], together, float(lost.max()), float(lost.sum()))

    def cut(self, region: Region) -> tuple[Region, Region] | None:
        """The region divided where its parts lose least together; None if its points are one."""
        inside = self.inside(region)
        least = sum(number * float(_least(kind, inside).sum()) for kind, number in self.kinds)
        least += sum(float(self._best(own, inside).sum()) for own in self.several)
        best: tuple[float, int] | None = None
        for number in reversed(range(len(self.columns))):
            if (found := self._divided(number, inside)) is not None:
                lost = (found[0] - least) / (SINGLE if number < len(region.box) < len(self.columns) else 1)
                best = min(best or (lost, number), (lost, number), key=lambda own: own[0])
        return region.divided(best[1], self._end(region, best[1])) if best else None

    def _divided(self, number: int, inside: np.ndarray) -> tuple[float, int, int] | None:
        """What parts take together that are divided by a size, and between which two values of it; None if it has only one."""
        at = self.columns[number][inside]
        order = np.argsort(at, kind="stable")
        ends = np.flatnonzero(np.diff(at[order]))
        if not len(ends):
            return None
        total = np.zeros(len(ends))
        for kind, count in self.kinds:
            sides = _sides(kind, inside[order], ends)
            total += count * np.where(np.isfinite(sides[0]), sides[0] + sides[1], 0.0)
        for own in self.several:
            apart = np.sum([_sides(self.of_op[k], inside[order], ends) for k in own.members], 0)
            whole = _sides(own.kind, inside[order], ends)
            total += np.nan_to_num(np.where(whole < own.least * apart, whole, apart), posinf=0.0).sum(0)
        end = int(total.argmin())
        low, high = (int(at[order][k]) for k in (ends[end], ends[end] + 1))
        return float(total[end]), low, high

    def _end(self, region: Region, number: int) -> int:
        """Where the second of two parts begins that are divided by a size."""
        for last in [False] * CLOSER + [True]:
            found = self._divided(number, self.inside(region))
            assert found is not None
            _, low, high = found
            if last or high - low <= FINE * high or (point := self._amid(region, number, low, high)) is None:
                break
            self._add(point)
        return _roundest(region.box[number] if number < len(region.box) else Size("product", low, high), low, high)

    def _amid(self, region: Region, number: int, low: int, high: int) -> Point | None:
        """A point of a region, about in the middle between those at which a size, or the product, has two values."""
        middle = (low + high) / 2
        inside = self.inside(region)
        near = [self.points[inside[list(self.columns[number][inside]).index(end)]] for end in (low, high)]
        near.append(tuple(size.near(math.sqrt(a * b)) for size, a, b in zip(region.box, *near, strict=True)))
        found = list[tuple[float, Point]]()
        for point in near:
            for i in (number,) if number < len(point) else range(len(point)):
                others = 1 if number < len(point) else max(math.prod((*point[:i], *point[i + 1 :])), 1)
                other = *point[:i], region.box[i].near(middle / others), *point[i + 1 :]
                value = int(self._columns([other])[number, 0])
                if low < value < high and other not in self.points:
                    found.append((abs(value - middle), other))
        return min(found)[1] if found else None


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
        Candidate(kind.us[middle] * float(sums[k] / sums[everywhere[0]]), *kind.of(k)[1:])  # type: ignore[arg-type]
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
    return _Kind(found, shares, [own[0].cost if own else 0.0 for own in ranked])
