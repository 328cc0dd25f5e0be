"""The codes that a range is run with: few, since each has to be compiled, and enough, since sizes ask for different tiles.

From the codes that the best candidates use at some sizes, one after the other is taken, always the one that makes inferences
faster by most; then those are left out again without which inferences are not too slow. One pool serves all parts of a range, so
that a batch of one has no codes of its own where those of others are as good.

At other sizes than these only the pool's candidates are looked at: their times are estimated, and those of no others.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np

from tccompile.arch import Arch
from tccompile.ir.extent import UndecidedError
from tccompile.ir.ops import Op
from tccompile.ir.program import Program
from tccompile.kernels.spec import Code, Kernel
from tccompile.ranges.alike import Pattern
from tccompile.ranges.box import Point, between, corners, ladder
from tccompile.ranges.launches import HELD_IN_ALL, Key, Launches, key_of
from tccompile.schedule.choose import Candidate, Group, Whole, candidates, compatible, gained, groups, seen, uncopied
from tccompile.schedule.timings import NO_TIMINGS, Measured, Timings


class Left(NamedTuple):
    """What inferences may be slower than with all codes, by estimates, as shares: at the size where that is most, and in the mean
    of those that are looked at."""

    most: float
    mean: float

    def holds(self, losses: np.ndarray) -> bool:
        return bool(losses.max() <= self.most and losses.mean() <= self.mean)


LITTLE, LESS, LEFT = Left(0.005, 0.002), Left(0.02, 0.007), Left(0.04, 0.02)
"""The first where that takes FEWEST codes at most, the second where it takes FEW. An inference of short kernels takes a third
less than its kernels one by one, of which these are shares."""

WORST = 0.3
"""What the size at which inferences lose most counts beside the mean, where a code is left out."""

FEWEST, FEW = 20, 42
"""Codes that are taken for what they gain alone, little or more: more of them take long to compile."""

MORE = 24
"""Points that are looked at besides those where sizes have doubled: between two of these other tiles are filled."""

MANY, TWICE = 32, 2
"""Of how many ops that differ there are so many points; where fewer do, there are more, up to so many times as many."""

TIMES, OVER, ENOUGH = 4.5, 1.5, 32
"""How many codes are taken at most, for each that the sizes in the middle would take; and where that is more than so many codes,
which take long to compile."""

GROWS, LEAST = 0.26, 64 << 10
"""How much larger a plan becomes by what ranges ask for, of what it is for fixed sizes, and bytes that it may become larger."""

CODE, STEP, PARTS = 7000, 170, 0.2
"""Bytes in a plan, compressed: of a code, and of a step in one part; and of what it becomes larger, what parts take."""

CLOSE = 1.6
"""How much slower than the best one a candidate may be whose code is looked at."""

WITHOUT = 1.5
"""How many times as long as the worst candidate it is taken to be that the pool has none; of several ops, as one by one."""

SURE = 6
"""Codes that a pool for fewer sizes uses most, and which the one for all has: of resnet50's seven, of bert_base's six."""

ALIGNED = 8
"""Elements of which kernels read rows at once, where rows are multiples of that."""

Codes = frozenset[Code]


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
    surely    told of codes that will nearly surely be in a generation's pool, while it is still chosen
    """

    timings: Timings = NO_TIMINGS
    patterns: Sequence[Pattern] = ()
    surely: Callable[[Arch, Sequence[Code]], object] = lambda arch, codes: None
    numbers: dict[Hashable, int] = field(default_factory=dict)
    chosen_by: dict[int, list[Point]] = field(default_factory=dict)
    at: dict[tuple[int, Point], list[Asked]] = field(default_factory=dict)
    ranked: dict[tuple[str, int], Coded] = field(default_factory=dict)
    partly: dict[tuple[str, int], Coded] = field(default_factory=dict)
    within: dict[tuple[str, int, int, int], list[Candidate]] = field(default_factory=dict)
    looked: dict[tuple[str, int, Point], list[Coded]] = field(default_factory=dict)
    together: dict[tuple[str, int, Point], list[tuple[Group, Sequence[Codes]]]] = field(default_factory=dict)
    wide: dict[tuple[str, int], list[tuple[set[Kernel], list[Candidate]]]] = field(default_factory=dict)
    pools: dict[tuple[str, int, int], Pool] = field(default_factory=dict)
    whole: dict[tuple[str, int], Launches] = field(default_factory=dict)
    open: dict[tuple[str, int], list[int]] = field(default_factory=dict)
    plain: dict[tuple[str, int, Key], Codes | None] = field(default_factory=dict)

    def launches(self, pattern: Pattern, arch: Arch) -> Launches:
        """The launches for all sizes of a pattern."""
        key = arch.name, id(pattern)
        if key not in self.whole:
            self.whole[key] = Launches(pattern, pattern.box, arch, HELD_IN_ALL)
        return self.whole[key]

    def kinds(self, pattern: Pattern, arch: Arch) -> list[int]:
        """For each of `ops` a number, the same for those that are alike at all sizes."""
        key = arch.name, id(pattern)
        if key not in self.open:
            kinds = self.launches(pattern, arch).kinds
            self.open[key] = [self.numbers.setdefault(kind, len(self.numbers)) for kind in kinds]
        return self.open[key]

    def points(self, pattern: Pattern) -> list[Point]:
        """The points by which the codes are chosen."""
        if id(pattern) not in self.chosen_by:
            first = doubled(pattern)
            differ = len({asked.number for asked in self.ops(pattern, first[0])})
            more = between(pattern.box, int(MORE * min(max(MANY / differ, 1), TWICE)))
            self.chosen_by[id(pattern)] = list(dict.fromkeys((*first, *more)))
        return self.chosen_by[id(pattern)]

    def ops(self, pattern: Pattern, point: Point) -> list[Asked]:
        """The ops of a pattern's program at a point, and then those that may read an input in place of its copy, as they are if
        they do."""
        if (found := self.at.get((id(pattern), point))) is None:
            program = pattern.at(point)
            ops = *program.ops, *(conv for _, conv in uncopied(program).values())
            numbers = [self.numbers.setdefault(seen(op, program), len(self.numbers)) for op in ops]
            found = [Asked(number, op, program) for number, op in zip(numbers, ops, strict=True)]
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
        own, known = candidates(op, program, arch, kernels), self.timings.of(op, program, arch)
        shared = [(c.kernel, also) for c in own for also in c.kernel.shareable(op, program, c.config, arch)]
        own += [Candidate(kernel.cost(op, program, also, arch), kernel, also) for kernel, also in shared]
        own = _timed(sorted(own, key=lambda c: c.cost), known)
        close = [c.cost <= CLOSE * own[0].cost for c in own]
        return [(c, _codes(c, asked, arch) if near else None) for c, near in zip(own, close, strict=True)]

    def all(self, asked: Asked, arch: Arch, refused: Collection[Code]) -> list[Candidate]:
        """All of an op's candidates but those whose codes are known to be refused."""
        return [c for c, codes in self.coded(asked, arch) if not (codes or frozenset()).intersection(refused)]

    def pooled(self, pattern: Pattern, point: Point, arch: Arch, refused: Collection[Code]) -> list[list[Candidate]]:
        """For each of `ops` at a point the candidates whose codes are in the pool, the cheapest first."""
        pool, out = self.pool(pattern, arch, refused), []
        kinds = self.kinds(pattern, arch)
        for i, (asked, tried) in enumerate(zip(self.ops(pattern, point), pool.tried[id(pattern)], strict=True)):
            key = arch.name, asked.number, kinds[i], len(refused)
            if key not in self.within:
                ranked = self.ranked.get((arch.name, asked.number)) or self.partly.get((arch.name, asked.number)) or []
                found = self._also(asked, ranked, tried, arch)
                own = [(c, self._everywhere(pattern, i, c, codes, arch)) for c, codes in found]
                self.within[key] = [c for c, codes in own if codes is not None and codes <= pool.codes]
            out.append(self.within[key])
        return out

    def _looked_at(self, pattern: Pattern, point: Point, arch: Arch) -> list[Coded]:
        """For each of `ops` at a point by which the codes are chosen its candidates, also those that share out work as is best at
        another such point. Where no size has doubled, of those kernels alone that are close to the best ones where sizes have."""
        key = arch.name, id(pattern), point
        if key not in self.looked:
            kinds, wide = self.kinds(pattern, arch), self._wide(pattern, arch)
            everywhere, found = point in doubled(pattern), dict[tuple[int, int], Coded]()
            for i, (asked, (kernels, plain)) in enumerate(zip(self.ops(pattern, point), wide, strict=True)):
                if (asked.number, kinds[i]) not in found:
                    ranked = self.coded(asked, arch) if everywhere else self.likely(asked, arch, kernels)
                    own = [
                        (c, self._everywhere(pattern, i, c, codes, arch)) for c, codes in self._also(asked, ranked, plain, arch)
                    ]
                    found[asked.number, kinds[i]] = own
            self.looked[key] = [found[asked.number, kind] for asked, kind in zip(self.ops(pattern, point), kinds, strict=True)]
        return self.looked[key]

    def _wide(self, pattern: Pattern, arch: Arch) -> list[tuple[set[Kernel], list[Candidate]]]:
        """For each of `ops` what is close to the best ones where sizes have doubled: the kernels, and candidates that only share
        out work."""
        key = arch.name, id(pattern)
        if key not in self.wide:
            every = zip(*([self.coded(asked, arch) for asked in self.ops(pattern, p)] for p in doubled(pattern)), strict=True)
            close = [[c for own in of_op for c, codes in own if codes is not None] for of_op in every]
            self.wide[key] = [
                ({c.kernel for c in own}, list({key_of(c): c for c in own if not c.kernel.tensor_cores}.values()))
                for own in close
            ]
        return self.wide[key]

    def _everywhere(self, pattern: Pattern, i: int, c: Candidate, codes: Codes | None, arch: Arch) -> Codes | None:
        """The codes of a candidate for one of `ops`. Those of Tensor Cores are the same at all sizes. Of others it may be that
        one serves some sizes and another one all: they are what the range is run with."""
        if c.kernel.tensor_cores or codes is None:
            return codes
        launches = self.launches(pattern, arch)
        key = arch.name, self.kinds(pattern, arch)[i], key_of(c)
        if key not in self.plain:
            try:
                self.plain[key] = frozenset(launch.code for launch in launches.of_asked(i, c.kernel, c.config).launches)
            except UndecidedError:
                self.plain[key] = None
        return self.plain[key] or codes

    def groups(self, pattern: Pattern, point: Point, arch: Arch) -> list[tuple[Group, Sequence[Codes]]]:
        """What one launch may compute of a pattern's program at a point, and the codes of each way."""
        key = arch.name, id(pattern), point
        if key not in self.together:
            program = pattern.at(point)
            self.together[key] = [(g, [_codes_of(way, g, program, arch) for way in g.ways]) for g in groups(program, arch)]
        return self.together[key]

    def joint(
        self, pattern: Pattern, point: Point, arch: Arch, refused: Collection[Code]
    ) -> dict[tuple[int, tuple[int, ...]], list[Whole]]:
        """What one launch may compute at a point, with codes of the pool: by the op in whose step it is, and all of them."""
        pool, program = self.pool(pattern, arch, refused), pattern.at(point)
        found: dict[tuple[int, tuple[int, ...]], list[Whole]] = {}
        for group in pool.joint[id(pattern)]:
            ops = [program.ops[k] for k in group.members]
            for _, kernel, config in group.ways:
                if kernel.supports(ops, program, arch) is None and config in kernel.configs(ops, program, arch):
                    whole = Whole(kernel.cost(ops, program, config, arch), kernel, config)
                    found.setdefault((group.place, group.members), []).append(whole)
        return {key: sorted(ways, key=lambda way: way.cost) for key, ways in found.items()}

    def time_us(self, asked: Sequence[Asked], c: Candidate | Whole, arch: Arch) -> float:
        """What a candidate takes for an op, or for several together; infinitely long where it does not take them."""
        ops, program = [own.op for own in asked], asked[0].program
        if isinstance(c, Whole):
            takes = c.kernel.supports(ops, program, arch) is None and c.config in c.kernel.configs(ops, program, arch)
            return c.kernel.cost(ops, program, c.config, arch) if takes else math.inf
        own = [found for found, _ in self._also(asked[0], [], [c], arch)]
        return own[0].cost if own else math.inf

    def _also(self, asked: Asked, found: Coded, tried: Sequence[Candidate], arch: Arch) -> Coded:
        """Candidates that are known of an op, and those of other sizes as they are for it, however slow."""
        op, program, known = asked.op, asked.program, {key_of(c) for c, codes in found if codes is not None}
        tried = [c for c in tried if key_of(c) not in known]
        slow = {key_of(c) for c in tried}
        found = [(c, codes) for c, codes in found if key_of(c) not in slow]
        takes = [c for c in tried if c.kernel.supports(op, program, arch) is None and c.kernel.takes(op, program, c.config, arch)]
        costs = sorted(
            (Candidate(c.kernel.cost(op, program, c.config, arch), c.kernel, c.config) for c in takes), key=lambda c: c.cost
        )
        more = [(c, _codes(c, asked, arch)) for c in _timed(costs, self.timings.of(op, program, arch))]
        return sorted([*found, *more], key=lambda own: own[0].cost) if more else found

    def pool(self, pattern: Pattern, arch: Arch, refused: Collection[Code]) -> Pool:
        """The codes for all sizes of the range that a pattern is a part of, without those refused."""
        patterns = self.patterns if any(other is pattern for other in self.patterns) else (pattern,)
        key = arch.name, id(patterns[0]), len(refused)
        if key not in self.pools:
            cases = {id(p): [self._cases(p, arch, point, frozenset(refused)) for point in doubled(p)] for p in patterns}
            self._told(arch, cases, patterns)
            for p in patterns:
                more = self.points(p)[len(cases[id(p)]) :]
                cases[id(p)] += [self._cases(p, arch, point, frozenset(refused)) for point in more]
            points = [of_point for own in cases.values() for of_point in own]
            most, parts = _most(list(cases.values()), [p.at([size.low for size in p.box]) for p in patterns])
            codes = _codes_for(points, most)
            fitting = {id(p): self._fitting(p, arch, codes) for p in patterns}
            joint = {id(p): self._joint(p, arch, codes) for p in patterns}
            self.pools[key] = Pool(codes, _by_use(points, codes), fitting, joint, parts)
        return self.pools[key]

    def _told(self, arch: Arch, cases: Mapping[int, Sequence[Sequence[Case]]], patterns: Sequence[Pattern]) -> None:
        """Tell of the codes that are used most by a pool for the cases where sizes have doubled."""
        points = [of_point for own in cases.values() for of_point in own]
        most, _ = _most(list(cases.values()), [p.at([size.low for size in p.box]) for p in patterns])
        self.surely(arch, _by_use(points, _codes_for(points, most))[:SURE])

    def _fitting(self, pattern: Pattern, arch: Arch, pool: Codes) -> list[list[Candidate]]:
        """For each of `ops` the candidates whose codes are in the pool at one of the sizes that were looked at."""
        found: list[dict[Key, Candidate]] = [{} for _ in self.ops(pattern, self.points(pattern)[0])]
        for point in self.points(pattern):
            for own, there in zip(found, self._looked_at(pattern, point, arch), strict=True):
                for c, codes in there:
                    if codes is not None and codes <= pool:
                        own.setdefault(key_of(c), c)
        return [list(own.values()) for own in found]

    def _joint(self, pattern: Pattern, arch: Arch, pool: Codes) -> list[Group]:
        """What one launch with codes of the pool may compute at one of the sizes that were looked at, by kernels and configs."""
        found: dict[tuple[tuple[int, ...], Key], tuple[int, Whole]] = {}
        for point in self.points(pattern):
            for group, codes in self.groups(pattern, point, arch):
                ways = [way for way, own in zip(group.ways, codes, strict=True) if own <= pool]
                found |= {(group.members, key_of(way)): (group.place, way) for way in ways}
        members = dict.fromkeys(members for members, _ in found)
        of = {own: [pair for (others, _), pair in found.items() if others == own] for own in members}
        return [Group(pairs[0][0], own, [way for _, way in pairs]) for own, pairs in of.items()]

    def _cases(self, pattern: Pattern, arch: Arch, point: Point, refused: Codes) -> list[Case]:
        """The cases of a point, each for all ops that are alike, or for several that are computed by one launch."""
        asked, program = self.ops(pattern, point), pattern.at(point)
        there = self._looked_at(pattern, point, arch)
        costs = [[(c.cost, codes) for c, codes in own if codes is not None and not codes & refused] for own in there]
        least = [own[0][0] if own else math.inf for own in costs]
        several: list[tuple[tuple[int, ...], list[tuple[float, Codes]]]] = [
            (group.members, [(way.cost, own) for way, own in zip(group.ways, codes, strict=True) if not own & refused])
            for group, codes in self.groups(pattern, point, arch)
        ]
        several = [(members, ways) for members, ways in several if ways]
        gains = [(gained(ways[0][0], sum(least[k] for k in members)), members) for members, ways in several]
        for both, ways in zip(direct(program), costs[len(program.ops) :], strict=True):
            several.append((both, ways))
            gains.append((sum(least[k] for k in both) - ways[0][0] if ways else 0.0, both))
        counts = Counter(a.number for a in asked[: len(program.ops)])
        by_number = {a.number: own for a, own in zip(asked, costs, strict=True)}
        cases = list[Case]()
        for i in compatible(gains):
            members, ways = several[i]
            counts -= Counter(asked[k].number for k in members)
            cases.append(Case(1.0, ways, WITHOUT * sum(least[k] for k in members)))
        cases += [Case(count, by_number[k], WITHOUT * by_number[k][-1][0]) for k, count in counts.items()]
        whole = sum(case.costs[0][0] * case.share for case in cases) or 1.0
        return [replace(case, share=case.share / whole) for case in cases]


def direct(program: Program) -> list[tuple[int, int]]:
    """A copy and what may read an input in place of it, by number, for each of the last of `Known.ops`."""
    return [(copy, i) for i, (copy, _) in uncopied(program).items()]


@dataclass(frozen=True)
class Pool:
    """The codes of a range, also in the order of how much they are used; and for its patterns, by their identity, the candidates
    of each of `Known.ops` that have such somewhere, and what one launch may compute with such.

    parts  that a plan has room for
    """

    codes: Codes
    by_use: Sequence[Code]
    tried: Mapping[int, Sequence[Sequence[Candidate]]]
    joint: Mapping[int, Sequence[Group]]
    parts: int


def doubled(pattern: Pattern) -> list[Point]:
    """Those where sizes have doubled, and one whose rows are not aligned, if any are not."""
    found = list(dict.fromkeys((*ladder(pattern.box), *corners(pattern.box))))
    odd = tuple(next((n for n in size.all[len(size.all) // 2 :] if n % ALIGNED), size.all[-1]) for size in pattern.box)
    covered = all(any(p[i] % ALIGNED for p in found) or not n % ALIGNED for i, n in enumerate(odd))
    return found if covered else [*found, odd]


def _codes(c: Candidate, asked: Asked, arch: Arch) -> Codes:
    return c.kernel.codes(asked.op, asked.program, c.config, arch)


def _codes_of(way: Whole, group: Group, program: Program, arch: Arch) -> Codes:
    ops = [program.ops[k] for k in group.members]
    return frozenset(launch.code for launch in way.kernel.work(ops, program, way.config, arch).launches)


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
    """Ops that are alike at a point, or several that one launch computes: the share of an inference there that one microsecond of
    each is; what candidates cost, the cheapest first, and are made of; and what is taken for the cost without any."""

    share: float
    costs: list[tuple[float, Codes]]
    without: float


class _Costs:
    """What the candidates of all cases cost, in rows, and by which codes, as numbers of sets of them; last what is taken for the
    cost without any."""

    def __init__(self, points: Sequence[Sequence[Case]]) -> None:
        cases = [case for of_point in points for case in of_point]
        self.sets = list(dict.fromkeys(codes for case in cases for _, codes in case.costs))
        number = {codes: i for i, codes in enumerate(self.sets)}
        longest = max(len(case.costs) for case in cases)
        self.costs = np.array([[c for c, _ in case.costs] + [case.without] * (longest + 1 - len(case.costs)) for case in cases])
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


def _most(cases: Sequence[Sequence[Sequence[Case]]], programs: Sequence[Program]) -> tuple[int, int]:
    """How many codes are taken at most, and parts of a range. Codes grow with those that the sizes in the middle of each pattern
    would take; a plan whose weights are few becomes too large by what a large one has room for."""
    alone = [len(frozenset(code for case in points[len(points) // 2] for code in case.costs[0][1])) for points in cases]
    number = max(range(len(alone)), key=lambda i: alone[i])
    program = programs[number]
    weights = sum(program.tensors[name].nbytes for name in program.constants)
    room = max(LEAST, GROWS * (weights + CODE * alone[number]))
    parts = max(1, int(PARTS * room / (STEP * len(program.ops))))
    most = min(int(TIMES * alone[number]), max(ENOUGH, int(OVER * alone[number])))
    return min(most, alone[number] + int((1 - PARTS) * room / CODE)), parts


def _codes_for(points: Sequence[Sequence[Case]], most: int) -> Codes:
    """The codes for the cases of some points."""
    costs = _Costs(points)
    for left, number in ((LITTLE, FEWEST), (LESS, FEW)):
        codes = _pool(costs, most, left)
        if len(codes) <= number:
            return codes
    return _pool(costs, most, LEFT)


def _pool(costs: _Costs, most: int, left: Left) -> Codes:
    """Codes, so many at most, with which inferences are not slower than with all of them by more than may be left."""
    taken: list[Codes] = []
    pool: Codes = frozenset()
    while len(pool) < 2 * most and not left.holds(losses := costs.losses(pool)):
        gains = costs.gains(pool, np.maximum(losses, left.mean))
        gains /= [max(len(codes - pool), 1) for codes in costs.sets]
        if not gains.max() > 0:
            break
        taken.append(costs.sets[int(gains.argmax())])
        pool |= taken[-1]
    return _without_needless(costs, taken, most, left)


def _by_use(points: Sequence[Sequence[Case]], pool: Codes) -> list[Code]:
    """The codes, that first with which most of inferences' time is spent."""
    used = dict.fromkeys(sorted(pool, key=repr), 0.0)
    for case in (case for of_point in points for case in of_point):
        cost, codes = next((own for own in case.costs if own[1] <= pool), (0.0, frozenset[Code]()))
        for code in codes:
            used[code] += cost * case.share
    return sorted(used, key=lambda code: -used[code])


def _without_needless(costs: _Costs, taken: Sequence[Codes], most: int, left: Left) -> Codes:
    """What is taken, but for what inferences are not too slow without, or what is too many: one after the other, that which they
    lose least by, in the mean and at the worst size."""
    kept = list(dict.fromkeys(taken))
    while True:
        pool = frozenset(code for codes in kept for code in codes)
        best: tuple[float, Codes] | None = None
        for codes in kept:
            losses = costs.losses(frozenset(code for other in kept if other is not codes for code in other))
            lost = float(losses.mean() + WORST * losses.max())
            if (len(pool) > most or left.holds(losses)) and (best is None or lost < best[0]):
                best = lost, codes
        if best is None:
            return pool
        kept.remove(best[1])
