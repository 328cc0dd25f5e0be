"""What candidates of a range's pool take at points of its box, and where a region of it is divided.

Where a region is divided, what the two parts take is compared at points between, until the place is known closely: there the
tiles of one of them are just as many as the multiprocessors have room for, and a few more would take twice as long.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Sequence
from typing import NamedTuple

import numpy as np

from tccompile.arch import Arch
from tccompile.kernels.spec import Code
from tccompile.ranges.alike import Pattern
from tccompile.ranges.box import Point, Region, between, corners
from tccompile.ranges.launches import key_of
from tccompile.ranges.pool import Known, direct
from tccompile.schedule.choose import DOUBTED, Candidate, Group, Whole, compatible

GRID, PLANE = 100, 200
"""Points at which candidates are compared, besides those by which codes are chosen: of one size, and of several."""

FINE = 1 / 256
"""How far apart the two sizes are between which a region is divided, as a share of the greater one, where there are such between
them."""

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


class _Kind(NamedTuple):
    """Ops that are alike at all points, the first of `Known.ops`: their candidates, a row for each of what one of them takes at
    the points, as shares of inferences there, and the microseconds of the fastest; how many ops there are, but for those that are
    in a `_Several`."""

    first: int
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


_Taken = dict[tuple[int, ...], tuple[int, Candidate | Whole]]
"""For ops that are alike, or several that one launch computes, how many such there are and what is taken."""


class Grid:
    """What candidates of the pool take at points of a pattern's box."""

    def __init__(self, pattern: Pattern, arch: Arch, refused: Collection[Code], known: Known):
        self.pattern, self.arch, self.known = pattern, arch, known
        several_open = sum(len(size.all) > 1 for size in pattern.box) > 1
        more = between(pattern.box, PLANE if several_open else GRID)
        self.points = list(dict.fromkeys((*known.points(pattern), *more)))
        columns = np.array(self.points).T
        self.columns = np.array([*columns, columns.prod(0)]) if several_open else columns  # their product, too
        at = [known.ops(pattern, point) for point in self.points]
        ranked = [known.pooled(pattern, point, arch, refused) for point in self.points]
        self.count = len(pattern.tree.ops)
        numbers = list(zip(*([asked.number for asked in own] for own in at), strict=True))
        scale = 1 / np.array([sum(own[0].cost for own in of_point[: self.count] if own) or 1.0 for of_point in ranked])
        order = {own: i for i, own in reversed(list(enumerate(numbers)))}
        alike = {own: _kind(i, [of_point[i] for of_point in ranked], scale) for own, i in order.items()}
        self.of_op = [alike[own] for own in numbers]
        joint = [known.joint(pattern, point, arch, refused) for point in self.points]
        several = [
            _Several(*key, _kind(key[0], [of_point.get(key, []) for of_point in joint], scale), DOUBTED, True)
            for key in dict.fromkeys(key for of_point in joint for key in of_point)
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

    def shared(self, region: Region) -> Shared:
        """What a region shares, by the points in it."""
        inside = self.inside(region)
        middle, lost, together = int(inside[len(inside) // 2]), np.zeros(len(inside)), list[Group]()
        for kind in self.kinds:
            if first := kind.everywhere(inside)[:1]:
                lost += kind.number * (kind.shares[first[0], inside] - _least(kind, inside))
        for own in self.several:
            apart, whole = self._first(own, inside)
            if (taken := apart if whole is None else whole) is not None:
                lost += taken - self._best(own, inside)
            if whole is not None and own.joint:
                together.append(Group(own.place, own.members, [Whole(0.0, *own.kind.found[own.kind.everywhere(inside)[0]][1:])]))
        ranked = {id(kind.shares): _ranked(kind, inside, middle) for kind in self.of_op}
        return Shared([ranked[id(kind.shares)] for kind in self.of_op], together, float(lost.max()), float(lost.sum()))

    def _first(self, own: _Several, inside: np.ndarray) -> tuple[np.ndarray | None, np.ndarray | None]:
        """What the fastest candidates that there are at all points take of ops one by one, None where there are none; and
        together, None where that is not taken."""
        apart, whole = _first([self.of_op[k] for k in own.members], inside), _first([own.kind], inside)
        taken = whole is not None and (apart is None or whole.sum() < own.least * apart.sum())
        return apart, whole if taken else None

    def cut(self, region: Region) -> tuple[Region, Region] | None:
        """The region divided where its parts lose least together; None if its points are one."""
        inside = self.inside(region)
        least = sum(kind.number * float(_least(kind, inside).sum()) for kind in self.kinds)
        least += sum(float(self._best(own, inside).sum()) for own in self.several)
        best: tuple[float, int, tuple[int, int]] | None = None
        for number in range(len(self.columns)):
            if found := self._divided(number, inside):
                single = number < len(region.box) < len(self.columns)
                lost = (found[0] - least) / (SINGLE if single else 1)
                if best is None or lost < best[0]:
                    best = lost, number, found[1]
        return region.divided(best[1], self._end(region, *best[1:])) if best else None

    def _divided(self, number: int, inside: np.ndarray) -> tuple[float, tuple[int, int]] | None:
        """What two parts take together that are divided by a size, and between which values of it; None if it has but one."""
        at = self.columns[number][inside]
        order = np.argsort(at, kind="stable")
        ends = np.flatnonzero(np.diff(at[order]))
        if not len(ends):
            return None
        total = np.zeros(len(ends))
        for kind in self.kinds:
            sides = _sides(kind, inside[order], ends)
            total += kind.number * np.where(np.isfinite(sides[0]), sides[0] + sides[1], 0.0)
        for own in self.several:
            apart = np.sum([_sides(self.of_op[k], inside[order], ends) for k in own.members], 0)
            whole = _sides(own.kind, inside[order], ends)
            total += np.nan_to_num(np.where(whole < own.least * apart, whole, apart), posinf=0.0).sum(0)
        end = int(total.argmin())
        return float(total[end]), (int(at[order][ends[end]]), int(at[order][ends[end] + 1]))

    def _end(self, region: Region, number: int, ends: tuple[int, int]) -> int:
        """Where the second of two parts begins that are divided between two values of a size: first it is asked whether the one
        that most tiles end with is in the first part."""
        inside, (low, high) = self.inside(region), ends
        at = self.columns[number][inside]
        below, above = self._taken(inside[at <= low]), self._taken(inside[at >= high])
        wanted = _roundest(region, number, low, high)
        point = _near(region, number, wanted, wanted, wanted) if wanted > low else None
        while point := point or _amid(region, number, low, high):
            value = math.prod(point) if number == len(point) else point[number]
            if self._time_us(below, above, point) > self._time_us(above, below, point):
                high = value
            else:
                low = value
            point = None
        return _roundest(region, number, low, high) + (region.box[number].step if number < len(region.box) else 1)

    def _taken(self, inside: np.ndarray) -> _Taken:
        """What is taken where these points are one part."""
        kinds: list[tuple[tuple[int, ...], _Kind, int]] = [((kind.first,), kind, kind.number) for kind in self.kinds]
        for own in self.several:
            if self._first(own, inside)[1] is None:
                kinds += [((self.of_op[k].first,), self.of_op[k], 1) for k in own.members]
            else:
                kinds.append((own.members if own.joint else (own.kind.first,), own.kind, 1))
        taken: _Taken = {}
        for members, kind, number in kinds:
            for row in kind.everywhere(inside)[:1]:
                taken[members] = taken.get(members, (0,))[0] + number, kind.found[row]
        return taken

    def _time_us(self, taken: _Taken, other: _Taken, point: Point) -> float:
        """Microseconds of what is taken at a point, but for what the other place has, too."""
        asked, us = self.known.ops(self.pattern, point), 0.0
        for members, (number, c) in taken.items():
            if members not in other or number != other[members][0] or key_of(c) != key_of(other[members][1]):
                us += number * self.known.time_us([asked[k] for k in members], c, self.arch)
        return us


def _amid(region: Region, number: int, low: int, high: int) -> Point | None:
    """A point of a region at which a size, or the product, is about in the middle between two values, if these are not close."""
    near = (high - low) / 4
    return _near(region, number, (low + high) / 2, low + near, high - near) if high - low > FINE * high else None


def _near(region: Region, number: int, wanted: float, low: float, high: float) -> Point | None:
    """A point of a region at which a size, or the product, is about what is wanted, between two values, both included."""
    box = region.box
    point = [size.near(math.sqrt(max(size.low, 1) * size.high)) for size in box]
    if number < len(box):
        point[number] = box[number].near(wanted)
        return tuple(point) if low <= point[number] <= high else None
    rest, found = math.prod(point[1:-1]), list[tuple[float, Point]]()
    for first in box[0].all:
        other = first, *point[1:-1], box[-1].near(wanted / max(first * rest, 1))
        if low <= math.prod(other) <= high:  # of such, the one that is neither long nor wide
            found.append((abs(math.log(max(first, 1) / max(other[-1], 1) * max(point[-1], 1) / max(point[0], 1))), other))
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
        Candidate(kind.us[middle] * float(sums[k] / sums[everywhere[0]]), *kind.found[k][1:])  # type: ignore[arg-type]
        for k in everywhere
    ]


def _sides(kind: _Kind, order: np.ndarray, ends: np.ndarray) -> np.ndarray:
    """What the fastest candidate takes for all points in this order up to each end, and what another does for those behind."""
    shares = kind.shares[:, order]
    below = np.cumsum(shares, 1)[:, ends].min(0, initial=np.inf)
    above = np.cumsum(shares[:, ::-1], 1)[:, len(order) - 2 - ends].min(0, initial=np.inf)
    return np.array([below, above])


def _roundest(region: Region, number: int, low: int, high: int) -> int:
    """From a value of a size, or of the product, up to another one, which is not included: the one that most tiles end with."""
    values = range(low, high, region.box[number].step if number < len(region.box) else 1)
    return max(values, key=lambda n: n & -n)


def _kind(first: int, ranked: Sequence[Sequence[Candidate | Whole]], scale: np.ndarray) -> _Kind:
    """Of the candidates at each point. Where there are none, none is better than another."""
    found = {key_of(c): c for own in ranked for c in own}
    rows = {key: i for i, key in enumerate(found)}
    shares = np.full((len(found), len(ranked)), ABSENT)
    for k, own in enumerate(ranked):
        if not own:
            shares[:, k] = 0.0
        for c in own:
            shares[rows[key_of(c)], k] = min(c.cost * scale[k], SLOWEST)
    return _Kind(first, list(found.values()), shares, [own[0].cost if own else 0.0 for own in ranked])
