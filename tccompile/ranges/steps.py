"""Which kernels run a program at all sizes of a box, and where the box is divided.

At points of the box each op's candidates are ranked as for fixed shapes. One choice for the whole box costs most where tiles fit
one size and not another: where that is more than a share of an inference, the box is divided such that its parts lose least. It
is divided, too, where a kernel's launches follow from the sizes by one rule here and by another one there.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Hashable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from tccompile.arch import ARCHS, Arch
from tccompile.errors import UnsupportedError
from tccompile.ir.extent import Open, UndecidedError
from tccompile.ir.ops import Op
from tccompile.ir.program import Program
from tccompile.kernels.spec import Code, Config, Kernel, Work
from tccompile.plan.formulas import Formula, Maker, computed, drawn, filler
from tccompile.ranges.alike import Pattern
from tccompile.ranges.box import Box, Point, between, corners, count, divided, divided_by, halves, opened, points, scattered
from tccompile.ranges.pool import Key, Known, key_of, looked_at
from tccompile.schedule.choose import Candidate, Choice, schedule, seen, uncopied
from tccompile.schedule.timings import Timings
from tccompile.sizes import Size

LOSS = 0.01
"""What an inference at some size may be slower than with kernels chosen for that size, by estimates, as a share."""

GRID = 100
"""Points at which candidates are compared, besides those by which codes are chosen."""

ABSENT = 1.0
"""What it counts, as a share of an inference, that a candidate is none at some point."""

NEAR = 1.03
"""How much slower than the best candidate one may be that is taken since its launches follow from the sizes by one rule."""


HELD, HELD_IN_ALL = 4, 8
"""Sizes at random, besides the least and the greatest ones, at which launches are compared with those for fixed shapes: of a
part's own launches, and of those that all parts have."""

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
        todo.sort(key=lambda own: own.lost)  # divided first is what loses most, at most points
        box, shared = (last := todo.pop()).box, last.shared
        divisible = len(todo) + len(done) + 2 <= most
        worst = max(shared, key=lambda name: shared[name].worst)
        if divisible and shared[worst].worst > LOSS and (cut := ranges[worst].grid.cut(box)):
            todo += judged(cut)
            continue
        try:
            made = {name: ranges[name].chosen(box, own.candidates, divisible) for name, own in shared.items()}
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
    """For each op the candidates that there are at all points of a box, and what an inference takes longer with the first of
    each, as shares: at the worst point, and at all of them together."""

    candidates: Sequence[Sequence[Candidate]]
    worst: float
    lost: float


class _Judged(NamedTuple):
    """A box, and what its points share for each generation."""

    box: Box
    shared: Mapping[str, _Shared]

    @property
    def lost(self) -> float:
        return max(own.lost for own in self.shared.values())


class _Kind(NamedTuple):
    """Ops that are alike at all points: their candidates, a row for each of what it takes at the points, as shares of inferences
    there, and the microseconds of the fastest."""

    found: Sequence[Candidate]
    shares: np.ndarray
    us: Sequence[float]


class _Grid:
    """What candidates of the pool take at points of a pattern's box."""

    def __init__(self, pattern: Pattern, arch: Arch, refused: Collection[Code], known: Known):
        self.box = pattern.box
        self.points = list(dict.fromkeys((*looked_at(pattern), *between(pattern.box, GRID))))
        at = [known.ops(pattern, point) for point in self.points]
        ranked = [known.pooled(pattern, point, arch, refused) for point in self.points]
        numbers = list(zip(*([asked.number for asked in own] for own in at), strict=True))
        whole = np.array([sum(own[0].cost for own in of_point if own) or 1.0 for of_point in ranked])
        self.kinds: list[_Kind] = []
        self.of_op: list[int] = []
        known_kinds: dict[tuple[int, ...], int] = {}
        counts = Counter(numbers)
        for i, own in enumerate(numbers):
            if own not in known_kinds:
                known_kinds[own] = len(self.kinds)
                self.kinds.append(_kind([of_point[i] for of_point in ranked], counts[own] / whole))
            self.of_op.append(known_kinds[own])

    def inside(self, box: Box) -> np.ndarray:
        """The numbers of the points in a box; of the nearest one, where there are none."""
        columns = np.array(self.points).T
        off = [np.maximum(np.maximum(size.low - c, c - size.high), 0) for c, size in zip(columns, box, strict=True)]
        apart = np.sum(off, 0)
        return np.flatnonzero(apart == apart.min())

    def shared(self, box: Box) -> _Shared:
        """What a box shares, by the points in it."""
        inside = self.inside(box)
        ranked, lost = list[list[Candidate]](), np.zeros(len(inside))
        for kind in self.kinds:
            shares = kind.shares[:, inside]
            everywhere = [int(k) for k in np.flatnonzero((shares < ABSENT).all(1))]
            sums = shares.sum(1)
            everywhere.sort(key=lambda k: sums[k])
            us = kind.us[int(inside[len(inside) // 2])]
            ranked.append([Candidate(us * float(sums[k] / sums[everywhere[0]]), *kind.found[k][1:]) for k in everywhere])
            if everywhere:
                lost += shares[everywhere[0]] - shares.min(0)
        return _Shared([ranked[kind] for kind in self.of_op], float(lost.max()), float(lost.sum()))

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
            for kind in self.kinds:
                shares = kind.shares[:, inside[order]]
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


def _kind(ranked: Sequence[Sequence[Candidate]], scale: np.ndarray) -> _Kind:
    """Of the candidates at each point. Where there are none, none is better than another."""
    found = {key_of(c): c for own in ranked for c in own}
    rows = {key: i for i, key in enumerate(found)}
    shares = np.full((len(found), len(ranked)), ABSENT)
    for k, own in enumerate(ranked):
        if not own:
            shares[:, k] = 0.0
        for c in own:
            shares[rows[key_of(c)], k] = c.cost * scale[k]
    return _Kind(list(found.values()), shares, [own[0].cost if own else 0.0 for own in ranked])


class _Range:
    """What runs a pattern for one generation, for any box of its sizes."""

    def __init__(self, pattern: Pattern, arch: Arch, refused: Collection[Code], timings: Timings, known: Known):
        self.pattern, self.arch, self.refused, self.timings, self.known = pattern, arch, refused, timings, known
        self.whole = _Launches(pattern, pattern.box, arch, HELD_IN_ALL)

    @cached_property
    def grid(self) -> _Grid:
        return _Grid(self.pattern, self.arch, self.refused, self.known)

    def shared(self, box: Box) -> _Shared:
        found = self.grid.shared(box)
        if all(found.candidates):
            return found
        at = [self.known.ops(self.pattern, point) for point in corners(box)]  # what the pool has nothing for
        others = [
            own or _shared([self.known.all(of_point[i], self.arch, self.refused) for of_point in at])
            for i, own in enumerate(found.candidates)
        ]
        return found._replace(candidates=others)

    def chosen(self, box: Box, shared: Sequence[Sequence[Candidate]], divisible: bool) -> list[Choice]:
        """Choices for a box. Raises UndecidedError where it is to be divided, or cannot be run."""
        middle = corners(box)[len(corners(box)) // 2]
        program = self.pattern.at(middle)
        if missing := [op.nodes[0] for op, own in zip(program.ops, shared, strict=True) if not own]:
            raise UndecidedError(f"node {missing[0]!r}: no kernel is for all of these sizes")
        alike = {seen(op, program): list(own) for op, own in zip(program.ops, shared, strict=True)}
        choices = schedule(program, self.arch, self.refused, self.timings, alike, joins=False)
        launches = _Launches(self.pattern, box, self.arch, HELD, self.whole)
        taken = [False] * len(program.ops)  # convolutions that read what is copied in place of the copy
        for i, (copy, _) in uncopied(program).items():
            taken[i] = not choices[copy].work.launches
        out = []
        for i, (at_middle, choice, own) in enumerate(zip(program.ops, choices, shared, strict=True)):
            if not choice.work.launches and program.tensors[at_middle.y].size:
                out.append(choice)  # a copy that nobody makes
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

    def _open(
        self, launches: _Launches, number: int, direct: bool, choice: Choice, ranked: Sequence[Candidate], near: float
    ) -> Choice:
        """The choice with launches for all sizes; where it has none, another candidate that is at most `near` times as slow.

        Raises UndecidedError where none has.
        """
        assert isinstance(choice.kernel, Kernel)  # ops of ranges are computed one by one
        try:
            return replace(choice, work=launches.of(number, direct, choice.kernel, choice.config))
        except UndecidedError as why:
            for other in ranked:
                if other.cost > near * choice.cost:
                    break
                try:
                    work = launches.of(number, direct, other.kernel, other.config)
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


class _Launches:
    """The launches of a pattern's ops for all sizes of a box, each compared with those for fixed shapes at some of its points.

    whole  those for a larger box, which are taken where there are any: they follow from the sizes by one rule here, too
    """

    def __init__(self, pattern: Pattern, box: Box, arch: Arch, held: int, whole: _Launches | None = None):
        self.box, self.arch, self.whole, self.sizes = box, arch, whole, opened(box)
        self.program = pattern.at(self.sizes)
        self._points = dict.fromkeys((*corners(box)[:1], *corners(box)[-1:], *scattered(box, held)))
        self._pattern, self._fixed = pattern, dict[Point, Program]()
        self._rules: dict[tuple[int, bool, Key], tuple[Sequence[Formula], Maker] | UndecidedError] = {}
        self._held: set[tuple[Hashable, Key]] = set()

    def of(self, number: int, direct: bool, kernel: Kernel, config: Config) -> Work:
        """The launches of the op of that number; `direct`: of what it is where it reads what it would read a copy of.

        Raises UndecidedError if they do not follow from the sizes by one rule.
        """
        if self.whole is not None:
            with suppress(UndecidedError):
                formulas, fill = self.whole.rule(number, direct, kernel, config)
                return fill(computed(formulas, self.sizes))  # type: ignore[no-any-return]
        formulas, fill = self.rule(number, direct, kernel, config)
        return fill(computed(formulas, self.sizes))  # type: ignore[no-any-return]

    def rule(self, number: int, direct: bool, kernel: Kernel, config: Config) -> tuple[Sequence[Formula], Maker]:
        """The launches as formulas of the sizes, and what makes them of what these give."""
        key = number, direct, key_of(Candidate(0.0, kernel, config))
        if key not in self._rules:
            try:
                self._rules[key] = self._rule(number, direct, kernel, config)
            except UndecidedError as why:
                self._rules[key] = why
        if isinstance(made := self._rules[key], UndecidedError):
            raise made
        return made

    def _rule(self, number: int, direct: bool, kernel: Kernel, config: Config) -> tuple[Sequence[Formula], Maker]:
        op = _direct(self.program, number, direct)
        work = _open_work(op, self.program, kernel, config, self.arch)
        formulas, tree = drawn(work, [size.name for size in self.box])
        fill = filler(tree)
        what = seen(op, self.program), key_of(Candidate(0.0, kernel, config))
        for point in self._points if what not in self._held else ():
            program = self._at(point)
            own, made = _direct(program, number, direct), fill(computed(formulas, point))
            there = kernel.work(own, program, config, self.arch)
            more = len(made.launches) - len(there.launches)  # padding is filled first, at sizes that have none, too
            made = replace(made, launches=made.launches[max(more, 0) :])
            alike = [a.code for a in made.launches] == [b.code for b in there.launches]  # else a constant is lifted at all sizes
            if more < 0 or (alike and made != there):
                raise UndecidedError(f"{kernel.name} does not say by one rule how it is launched")
        self._held.add(what)
        return formulas, fill

    def _at(self, point: Point) -> Program:
        if point not in self._fixed:
            self._fixed[point] = self._pattern.at(point)
        return self._fixed[point]


def _direct(program: Program, number: int, direct: bool) -> Op:
    """An op of a program; `direct`: of what another one copies for it."""
    return uncopied(program)[number][1] if direct else program.ops[number]


def _open_work(op: Op, program: Program, kernel: Kernel, config: Config, arch: Arch) -> Work:
    """What the kernel says of a program with open extents."""
    try:
        refusal = kernel.supports(op, program, arch)
        if refusal is None:
            work = kernel.work(op, program, config, arch)
            if not any(_is_open(launch.code.params) for launch in work.launches):
                return work
            refusal = f"{kernel.name}'s code would be another one at each size"
    except (TypeError, AttributeError) as error:  # what takes an int for granted
        raise UndecidedError(f"{kernel.name} takes fixed sizes ({error})") from error
    raise UndecidedError(refusal)


def _is_open(value: Any) -> bool:
    """Whether an open extent is among a code's parameters."""
    return isinstance(value, Open) or (isinstance(value, tuple) and any(map(_is_open, value)))
