"""Which kernels run a program at all sizes of a box, and where the box is divided.

At corners and middles of the box each op's candidates are ranked as for fixed shapes. One choice for the whole box costs most
where tiles fit one size and not another: where that is more than a share of an inference, the box is divided. So it is where a
kernel's launches follow from the sizes by one rule here and by another one there.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import NamedTuple

from tccompile.arch import ARCHS, Arch
from tccompile.errors import UnsupportedError
from tccompile.ir.extent import UndecidedError
from tccompile.ir.program import Program
from tccompile.kernels.spec import Code, Kernel
from tccompile.ranges.alike import Pattern
from tccompile.ranges.box import Box, Point, corners, count, divided_by, halves, opened, points, spread
from tccompile.ranges.launches import HELD, Key, Launches, key_of
from tccompile.ranges.pool import Known, direct
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

LOSS = 0.02
"""What an inference at some size may be slower than with kernels chosen for that size, by estimates, as a share."""

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

    todo, done, most = judged([pattern.box]), list[Part](), _most(pattern, known.patterns)
    while todo:
        todo.sort(key=lambda own: own.loss * spread(own.box))  # divided first is where one choice costs most, at most sizes
        box, shared = (last := todo.pop()).box, last.shared
        divisible = len(todo) + len(done) + 2 <= most
        if divisible and last.loss > LOSS and (cut := halves(box)):
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
    an inference takes longer with these and the first of each, at the worst point, as a share."""

    candidates: Sequence[Sequence[Candidate]]
    together: Sequence[Group]
    loss: float


class _Judged(NamedTuple):
    """A box, and what its points share for each generation."""

    box: Box
    shared: Mapping[str, _Shared]

    @property
    def loss(self) -> float:
        return max(own.loss for own in self.shared.values())


class _Range:
    """What runs a pattern for one generation, for any box of its sizes."""

    def __init__(self, pattern: Pattern, arch: Arch, refused: Collection[Code], timings: Timings, known: Known):
        self.pattern, self.arch, self.refused, self.timings, self.known = pattern, arch, refused, timings, known
        self.whole = known.launches(pattern, arch)

    def shared(self, box: Box) -> _Shared:
        at = [self.known.ops(self.pattern, point) for point in corners(box)]
        ranked = [self.known.pooled(self.pattern, point, self.arch, self.refused) for point in corners(box)]
        shared = []
        for i in range(len(at[0])):
            own = _shared([of_point[i] for of_point in ranked])
            shared.append(own or _shared([self.known.all(of_point[i], self.arch, self.refused) for of_point in at]))
        costs = _costs(ranked, shared)
        joint = [self._joint(point) for point in corners(box)]
        together = _shared_groups(joint, [taken for taken, _ in costs])
        return _Shared(shared, together, _loss(costs, joint, together, direct(at[0][0].program)))

    def _joint(self, point: Point) -> dict[Member, Whole]:
        """What one launch may compute at a point, with codes of the pool: by the ops, kernel and config, what it takes."""
        pool, program, found = self.known.pool(self.pattern, self.arch, self.refused), self.pattern.at(point), {}
        for group in pool.joint[id(self.pattern)]:
            ops = [program.ops[k] for k in group.members]
            for _, kernel, config in group.ways:
                if kernel.supports(ops, program, self.arch) is None and config in kernel.configs(ops, program, self.arch):
                    whole = Whole(kernel.cost(ops, program, config, self.arch), kernel, config)
                    found[group.place, group.members, key_of(whole)] = whole
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


def _loss(
    costs: Costs, joint: Sequence[Mapping[Member, Whole]], together: Sequence[Group], directs: Sequence[tuple[int, int]]
) -> float:
    """How much longer an inference takes with what is shared, at the worst point, as a share.

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
    return max(losses)
