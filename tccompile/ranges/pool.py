"""The codes that a range is run with: few, since each has to be compiled, and enough, since sizes ask for different tiles.

From the codes that the best candidates use somewhere in the range, one after the other is taken, always the one that makes
inferences faster by most.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable
from dataclasses import dataclass, field

from tccompile.arch import Arch
from tccompile.kernels.spec import Code
from tccompile.ranges.alike import Pattern
from tccompile.ranges.box import Point, corners, ladder
from tccompile.schedule.choose import Candidate, candidates, seen
from tccompile.schedule.timings import NO_TIMINGS, Measured, Timings

LEFT = 0.015
"""What inferences may be slower than with all codes, by estimates, at the size where that is most, as a share."""

TIMES = 2.5
"""How many codes are taken at most, for each that the sizes in the middle would take."""

CLOSE = 1.6
"""How much slower than the best one a candidate may be whose code is looked at."""

Codes = frozenset[Code]


@dataclass
class Known:
    """What has been found for a range: candidates and their codes, of ops that are alike, and the pools of patterns.

    timings  measured times, which count before estimates
    """

    timings: Timings = NO_TIMINGS
    ranked: dict[tuple[str, Hashable], list[Candidate]] = field(default_factory=dict)
    codes: dict[tuple[str, Hashable, int], Codes] = field(default_factory=dict)
    at: dict[tuple[str, int, Point], list[Hashable]] = field(default_factory=dict)
    pools: dict[tuple[str, int, int], Codes] = field(default_factory=dict)

    def ops(self, pattern: Pattern, arch: Arch, point: Point) -> list[Hashable]:
        """What each op is at a point, as `seen` has it, with its candidates and those of their codes that are close known."""
        key = arch.name, id(pattern), point
        if key not in self.at:
            program = pattern.at(point)
            self.at[key] = [seen(op, program) for op in program.ops]
            for what, op in zip(self.at[key], program.ops, strict=True):
                if (arch.name, what) not in self.ranked:
                    own = _timed(candidates(op, program, arch), self.timings.of(op, program, arch))
                    self.ranked[arch.name, what] = own
                    for n, c in enumerate(own):
                        if c.cost <= CLOSE * own[0].cost:
                            work = c.kernel.work(op, program, c.config, arch)
                            self.codes[arch.name, what, n] = frozenset(launch.code for launch in work.launches)
        return self.at[key]

    def within(self, arch: Arch, what: Hashable, pool: Codes) -> list[Candidate]:
        """An op's candidates whose codes are in a pool, the cheapest first."""
        ranked = self.ranked[arch.name, what]
        return [c for n, c in enumerate(ranked) if (own := self.codes.get((arch.name, what, n))) is not None and own <= pool]

    def all(self, arch: Arch, what: Hashable, refused: Collection[Code]) -> list[Candidate]:
        """All of an op's candidates but those whose codes are known to be refused."""
        ranked = self.ranked[arch.name, what]
        return [c for n, c in enumerate(ranked) if not self.codes.get((arch.name, what, n), frozenset()).intersection(refused)]

    def pool(self, pattern: Pattern, arch: Arch, refused: Collection[Code]) -> Codes:
        """The codes for all sizes of a pattern, without those refused."""
        key = arch.name, id(pattern), len(refused)
        if key not in self.pools:
            self.pools[key] = _pool(self, pattern, arch, frozenset(refused))
        return self.pools[key]


def _timed(ranked: list[Candidate], known: Measured | None) -> list[Candidate]:
    """Candidates with the times that were measured; what was not measured is not taken for faster than what was."""
    if known is None or known.dense:
        return ranked
    measured = {n: t.us for n, c in enumerate(ranked) if (t := known.of(c.kernel, c.config))}
    least = min(measured.values(), default=0.0)
    costs = [measured.get(n, max(c.cost, least)) for n, c in enumerate(ranked)]
    order = sorted(range(len(ranked)), key=lambda n: (costs[n], n not in measured))
    return [Candidate(costs[n], ranked[n].kernel, ranked[n].config) for n in order]


@dataclass(frozen=True)
class _Case:
    """An op at a point: the share of an inference there that one microsecond is, and the costs and codes of candidates."""

    share: float
    costs: list[tuple[float, Codes]]

    def cost(self, pool: Codes) -> float:
        """What the best candidate takes whose codes are in the pool; half as much again as the worst, if there is none."""
        return next((cost for cost, codes in self.costs if codes <= pool), 1.5 * self.costs[-1][0])


def _pool(known: Known, pattern: Pattern, arch: Arch, refused: Codes) -> Codes:
    points = list(dict.fromkeys((*ladder(pattern.box), *corners(pattern.box))))
    cases = [_cases(known, pattern, arch, point, refused) for point in points]
    middle = cases[len(ladder(pattern.box)) // 2]
    pool: Codes = frozenset(code for case in middle for code in case.costs[0][1])
    most = TIMES * len(pool)
    while len(pool) < most:
        costs = [[case.cost(pool) for case in of_point] for of_point in cases]
        losses = [
            sum((cost - case.costs[0][0]) * case.share for case, cost in zip(of_point, own, strict=True))
            for of_point, own in zip(cases, costs, strict=True)
        ]
        if max(losses) <= LEFT:
            break
        gains: dict[Codes, float] = {}  # in microseconds, by what would be taken
        for of_point, own, loss in zip(cases, costs, losses, strict=True):
            for case, cost in zip(of_point, own, strict=True):
                for other, codes in case.costs:
                    if other >= cost:
                        break
                    gains[codes] = gains.get(codes, 0.0) + (cost - other) * case.share * max(loss, LEFT)
        if not gains:
            break
        best: Codes = max(gains, key=lambda codes: gains[codes])
        pool = frozenset(pool | best)
    return pool


def _cases(known: Known, pattern: Pattern, arch: Arch, point: Point, refused: Codes) -> list[_Case]:
    ops = known.ops(pattern, arch, point)
    whole = sum(known.ranked[arch.name, what][0].cost for what in ops) or 1.0
    out = []
    for what in ops:
        ranked = known.ranked[arch.name, what]
        costs = [(c.cost, known.codes[arch.name, what, n]) for n, c in enumerate(ranked) if (arch.name, what, n) in known.codes]
        out.append(_Case(1 / whole, [(cost, codes) for cost, codes in costs if not codes & refused]))
    return out
