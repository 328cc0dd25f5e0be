"""The codes that a range is run with: few, since each has to be compiled, and enough, since sizes ask for different tiles.

From the codes that the best candidates use at some sizes, one after the other is taken, always the one that makes inferences
faster by most; then those are left out again without which inferences are not too slow. One pool serves all parts of a range, so
that a batch of one has no codes of its own where those of others are as good.

At other sizes than these only the pool's candidates are looked at: their times are estimated, and those of no others.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from tccompile.arch import Arch
from tccompile.ir.ops import Op
from tccompile.ir.program import Program
from tccompile.kernels.spec import Code, Kernel
from tccompile.ranges.alike import Pattern
from tccompile.ranges.box import Point, between, corners, ladder
from tccompile.schedule.choose import Candidate, candidates, seen
from tccompile.schedule.timings import NO_TIMINGS, Measured, Timings


class Left(NamedTuple):
    """What inferences may be slower than with all codes, by estimates, as shares: at the size where that is most, and in the mean
    of those that are looked at."""

    most: float
    mean: float

    def holds(self, losses: np.ndarray) -> bool:
        return bool(losses.max() <= self.most and losses.mean() <= self.mean)


LESS, LEFT = Left(0.025, 0.01), Left(0.04, 0.02)
"""The first where that takes FEW codes at most."""

FEW = 42
"""Codes that are taken for what they gain alone: more of them take long to compile."""

MORE = 24
"""Points that are looked at besides those where sizes have doubled: between two of these other tiles are filled."""

TIMES = 3.5
"""How many codes are taken at most, for each that the sizes in the middle would take, before the needless are left out; of few
ops twice FEW."""

CLOSE = 1.6
"""How much slower than the best one a candidate may be whose code is looked at."""

ALIGNED = 8
"""Elements of which kernels read rows at once, where rows are multiples of that."""

Codes = frozenset[Code]

Key = tuple[str, str]
"""A kernel and its config, as text."""


def key_of(c: Candidate) -> Key:
    """What tells candidates apart."""
    return c.kernel.name, repr(sorted(c.config.items()))


@dataclass(frozen=True)
class Asked:
    """An op of some program, and its number: the same for ops that are alike."""

    number: int
    op: Op
    program: Program


Coded = list[tuple[Candidate, Codes | None]]
"""Candidates, the cheapest first, and the codes of those that are close to the best one."""


@dataclass
class Known:
    """What has been found for a range: candidates and their codes, of ops that are alike, and the pool.

    timings   measured times, which count before estimates
    patterns  those of the range, for which the pool is chosen; one that is asked for alone has its own
    """

    timings: Timings = NO_TIMINGS
    patterns: Sequence[Pattern] = ()
    numbers: dict[Hashable, int] = field(default_factory=dict)
    at: dict[tuple[int, Point], list[Asked]] = field(default_factory=dict)
    ranked: dict[tuple[str, int], Coded] = field(default_factory=dict)
    partly: dict[tuple[str, int], Coded] = field(default_factory=dict)
    kernels: dict[tuple[str, int], list[set[Kernel]]] = field(default_factory=dict)
    within: dict[tuple[str, int, int], list[Candidate]] = field(default_factory=dict)
    pools: dict[tuple[str, int, int], Pool] = field(default_factory=dict)

    def ops(self, pattern: Pattern, point: Point) -> list[Asked]:
        """The ops of a pattern's program at a point."""
        if (found := self.at.get((id(pattern), point))) is None:
            program = pattern.at(point)
            numbers = [self.numbers.setdefault(seen(op, program), len(self.numbers)) for op in program.ops]
            found = [Asked(number, op, program) for number, op in zip(numbers, program.ops, strict=True)]
            self.at[id(pattern), point] = found
        return found

    def coded(self, asked: Asked, arch: Arch) -> Coded:
        """All of an op's candidates."""
        key = arch.name, asked.number
        if key not in self.ranked:
            self.ranked[key] = self._coded(asked, arch)
        return self.ranked[key]

    def likely(self, asked: Asked, arch: Arch, kernels: Collection[Kernel]) -> Coded:
        """An op's candidates of some kernels, or all, if it has none of these."""
        key = arch.name, asked.number
        if key not in self.ranked and key not in self.partly:
            self.partly[key] = self._coded(asked, arch, kernels)
        return self.ranked.get(key) or self.partly.get(key) or self.coded(asked, arch)

    def _coded(self, asked: Asked, arch: Arch, kernels: Collection[Kernel] | None = None) -> Coded:
        op, program = asked.op, asked.program
        own = _timed(candidates(op, program, arch, kernels), self.timings.of(op, program, arch))
        close = [c.cost <= CLOSE * own[0].cost for c in own]
        return [(c, _codes(c, asked, arch) if near else None) for c, near in zip(own, close, strict=True)]

    def all(self, asked: Asked, arch: Arch, refused: Collection[Code]) -> list[Candidate]:
        """All of an op's candidates but those whose codes are known to be refused."""
        return [c for c, codes in self.coded(asked, arch) if not (codes or frozenset()).intersection(refused)]

    def pooled(self, pattern: Pattern, point: Point, arch: Arch, refused: Collection[Code]) -> list[list[Candidate]]:
        """For each op of a pattern at a point the candidates whose codes are in the pool, the cheapest first."""
        pool, out = self.pool(pattern, arch, refused), []
        for asked, tried in zip(self.ops(pattern, point), pool.tried[id(pattern)], strict=True):
            key = arch.name, asked.number, len(refused)
            if key not in self.within:
                own = arch.name, asked.number
                found = self.ranked.get(own) or self.partly.get(own) or self._tried(asked, tried, arch)
                self.within[key] = [c for c, codes in found if codes is not None and codes <= pool.codes]
            out.append(self.within[key])
        return out

    def _tried(self, asked: Asked, tried: Sequence[Candidate], arch: Arch) -> Coded:
        """Candidates of other sizes, as they are for this op."""
        op, program = asked.op, asked.program
        takes = [c for c in tried if c.kernel.supports(op, program, arch) is None and c.kernel.takes(op, program, c.config, arch)]
        costs = sorted(
            (Candidate(c.kernel.cost(op, program, c.config, arch), c.kernel, c.config) for c in takes), key=lambda c: c.cost
        )
        return [(c, _codes(c, asked, arch)) for c in _timed(costs, self.timings.of(op, program, arch))]

    def pool(self, pattern: Pattern, arch: Arch, refused: Collection[Code]) -> Pool:
        """The codes for all sizes of the range that a pattern is a part of, without those refused."""
        patterns = self.patterns if any(other is pattern for other in self.patterns) else (pattern,)
        key = arch.name, id(patterns[0]), len(refused)
        if key not in self.pools:
            cases = {id(p): [self._cases(p, arch, point, frozenset(refused)) for point in looked_at(p)] for p in patterns}
            points = [of_point for own in cases.values() for of_point in own]
            codes = _codes_for(points, _most(cases.values()))
            self.pools[key] = Pool(codes, _by_use(points, codes), {id(p): self._fitting(p, arch, codes) for p in patterns})
        return self.pools[key]

    def _ranked(self, pattern: Pattern, arch: Arch, point: Point) -> list[Coded]:
        """The candidates of a pattern's ops at a point that is looked at: where no size has doubled, of those kernels alone that
        are close to the best ones where sizes have."""
        ops = self.ops(pattern, point)
        if point in (wide := _wide(pattern)):
            return [self.coded(asked, arch) for asked in ops]
        if (key := (arch.name, id(pattern))) not in self.kernels:
            every = zip(*([self.coded(asked, arch) for asked in self.ops(pattern, p)] for p in wide), strict=True)
            self.kernels[key] = [{c.kernel for own in of_op for c, codes in own if codes is not None} for of_op in every]
        return [self.likely(asked, arch, kernels) for asked, kernels in zip(ops, self.kernels[key], strict=True)]

    def _fitting(self, pattern: Pattern, arch: Arch, pool: Codes) -> list[list[Candidate]]:
        """For each op of a pattern the candidates whose codes are in the pool at one of the sizes that were looked at."""
        found: list[dict[Key, Candidate]] = [{} for _ in pattern.tree.ops]
        for point in looked_at(pattern):
            for own, ranked in zip(found, self._ranked(pattern, arch, point), strict=True):
                for c, codes in ranked:
                    if codes is not None and codes <= pool:
                        own.setdefault(key_of(c), c)
        return [list(own.values()) for own in found]

    def _cases(self, pattern: Pattern, arch: Arch, point: Point, refused: Codes) -> list[Case]:
        """The cases of a point, each for all ops that are alike."""
        numbers = [asked.number for asked in self.ops(pattern, point)]
        counts, ranked = Counter(numbers), dict(zip(numbers, self._ranked(pattern, arch, point), strict=True))
        whole = sum(ranked[number][0][0].cost * count for number, count in counts.items()) or 1.0
        return [
            Case(count / whole, [(c.cost, codes) for c, codes in ranked[number] if codes is not None and not codes & refused])
            for number, count in counts.items()
        ]


@dataclass(frozen=True)
class Pool:
    """The codes of a range, also in the order of how much they are used, and for each op of its patterns, by their identity, the
    candidates that have such somewhere."""

    codes: Codes
    by_use: Sequence[Code]
    tried: Mapping[int, Sequence[Sequence[Candidate]]]


def looked_at(pattern: Pattern) -> list[Point]:
    """The points by which the codes are chosen."""
    return list(dict.fromkeys((*_wide(pattern), *between(pattern.box, MORE))))


def _wide(pattern: Pattern) -> list[Point]:
    """Those where sizes have doubled, and one whose rows are not aligned, if any are not."""
    found = list(dict.fromkeys((*ladder(pattern.box), *corners(pattern.box))))
    odd = tuple(next((n for n in size.all[len(size.all) // 2 :] if n % ALIGNED), size.all[-1]) for size in pattern.box)
    covered = all(any(p[i] % ALIGNED for p in found) or not n % ALIGNED for i, n in enumerate(odd))
    return found if covered else [*found, odd]


def _codes(c: Candidate, asked: Asked, arch: Arch) -> Codes:
    return frozenset(launch.code for launch in c.kernel.work(asked.op, asked.program, c.config, arch).launches)


def _timed(ranked: list[Candidate], known: Measured | None) -> list[Candidate]:
    """Candidates with the times that were measured; what was not measured is not taken for faster than what was."""
    if known is None or known.dense:
        return ranked
    measured = {n: t.us for n, c in enumerate(ranked) if (t := known.of(c.kernel, c.config))}
    least = min(measured.values(), default=0.0)
    costs = [measured.get(n, max(c.cost, least)) for n, c in enumerate(ranked)]
    order = sorted(range(len(ranked)), key=lambda n: (costs[n], n not in measured))
    return [Candidate(costs[n], ranked[n].kernel, ranked[n].config) for n in order]


# --- The choice ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """Ops that are alike at a point: the share of an inference there that one microsecond of each is, and what candidates cost,
    the cheapest first, and are made of."""

    share: float
    costs: list[tuple[float, Codes]]


class _Costs:
    """What the candidates of all cases cost, in rows, and by which codes, as numbers of sets of them. Where the pool has none of
    them, it is half as much again as the worst."""

    def __init__(self, points: Sequence[Sequence[Case]]) -> None:
        cases = [case for of_point in points for case in of_point]
        self.sets = list(dict.fromkeys(codes for case in cases for _, codes in case.costs))
        number = {codes: i for i, codes in enumerate(self.sets)}
        longest = max(len(case.costs) for case in cases)
        self.costs = np.array(
            [[c for c, _ in case.costs] + [1.5 * case.costs[-1][0]] * (longest + 1 - len(case.costs)) for case in cases]
        )
        self.numbers = np.full(self.costs.shape, len(self.sets))
        for row, case in zip(self.numbers, cases, strict=True):
            row[: len(case.costs)] = [number[codes] for _, codes in case.costs]
        self.shares = np.array([case.share for case in cases])
        self.points = np.repeat(np.arange(len(points)), [len(of_point) for of_point in points])

    def taken(self, pool: Codes) -> np.ndarray:
        """What each case takes with a pool's codes."""
        held = np.array([codes <= pool for codes in self.sets] + [True])
        first = held[self.numbers].argmax(1)
        found: np.ndarray = self.costs[np.arange(len(first)), first]
        return found

    def losses(self, pool: Codes) -> np.ndarray:
        """What an inference takes longer at each point than with all codes, as a share."""
        return np.bincount(self.points, (self.taken(pool) - self.costs[:, 0]) * self.shares)

    def gains(self, pool: Codes, weights: np.ndarray) -> np.ndarray:
        """What each set of codes would gain, in shares of inferences, by how much those of a point count."""
        faster = np.maximum(self.taken(pool)[:, None] - self.costs, 0) * (self.shares * weights[self.points])[:, None]
        return np.bincount(self.numbers.ravel(), faster.ravel(), len(self.sets) + 1)[: len(self.sets)]


def _most(patterns: Iterable[Sequence[Sequence[Case]]]) -> int:
    """How many codes are taken at most, which grows with those that the sizes in the middle of each pattern would take."""
    alone = [frozenset(code for case in points[len(points) // 2] for code in case.costs[0][1]) for points in patterns]
    return max(2 * FEW, int(TIMES * max(map(len, alone))))


def _codes_for(points: Sequence[Sequence[Case]], most: int) -> Codes:
    """The codes for the cases of some points."""
    costs = _Costs(points)
    few = _pool(costs, most, LESS)
    return few if len(few) <= FEW else _pool(costs, most, LEFT)


def _pool(costs: _Costs, most: int, left: Left) -> Codes:
    """Codes with which inferences are not slower than with all of them by more than may be left."""
    taken: list[Codes] = []
    pool: Codes = frozenset()
    while len(pool) < most and not left.holds(losses := costs.losses(pool)):
        gains = costs.gains(pool, np.maximum(losses, left.mean))
        gains /= [max(len(codes - pool), 1) for codes in costs.sets]
        if not gains.max() > 0:
            break
        taken.append(costs.sets[int(gains.argmax())])
        pool |= taken[-1]
    return _without_needless(costs, taken, left)


def _by_use(points: Sequence[Sequence[Case]], pool: Codes) -> list[Code]:
    """The codes, that first with which most of inferences' time is spent."""
    used = dict.fromkeys(sorted(pool, key=repr), 0.0)
    for case in (case for of_point in points for case in of_point):
        cost, codes = next((own for own in case.costs if own[1] <= pool), (0.0, frozenset[Code]()))
        for code in codes:
            used[code] += cost * case.share
    return sorted(used, key=lambda code: -used[code])


def _without_needless(costs: _Costs, taken: Sequence[Codes], left: Left) -> Codes:
    """What is taken, but for what inferences are not too slow without: one after the other, that which they lose least by."""
    kept = list(dict.fromkeys(taken))
    while True:
        best: tuple[float, Codes] | None = None
        for codes in kept:
            losses = costs.losses(frozenset(code for other in kept if other is not codes for code in other))
            if left.holds(losses) and (best is None or losses.mean() < best[0]):
                best = float(losses.mean()), codes
        if best is None:
            return frozenset(code for codes in kept for code in codes)
        kept.remove(best[1])
