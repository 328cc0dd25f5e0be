"""Which kernels run a program at all sizes of a box, and where the box is divided.

At corners and middles of the box each op's candidates are ranked as for fixed shapes. One choice for the whole box costs most
where tiles fit one size and not another: where that is more than a share of an inference, the box is divided. So it is where a
kernel's launches follow from the sizes by one rule here and by another one there.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from tccompile.arch import ARCHS, Arch
from tccompile.errors import UnsupportedError
from tccompile.ir.extent import Open, UndecidedError
from tccompile.ir.ops import Op
from tccompile.ir.program import Program
from tccompile.kernels.spec import Code, Config, Kernel, Work
from tccompile.plan.formulas import computed, drawn, filler
from tccompile.ranges.alike import Pattern
from tccompile.ranges.box import Box, Point, corners, count, divided_by, halves, opened, points, scattered
from tccompile.ranges.pool import Key, Known, key_of
from tccompile.schedule.choose import Candidate, Choice, schedule, seen, uncopied
from tccompile.schedule.timings import Timings

LOSS = 0.02
"""What an inference at some size may be slower than with kernels chosen for that size, by estimates, as a share."""

NEAR = 1.03
"""How much slower than the best candidate one may be that is taken since its launches follow from the sizes by one rule."""


HELD = 4
"""Sizes at random, besides the least and the greatest ones, at which launches are compared with those for fixed shapes."""

FASTER, MOST = 20, 64
"""How many parts there are at most where others would only be faster, and where launches follow by other rules."""


class Part(NamedTuple):
    """A box, its program with open extents, and for each generation the choices, whose launches have such extents too."""

    box: Box
    program: Program
    choices: Mapping[str, Sequence[Choice]]


class _Range(NamedTuple):
    """A box, its program with open extents, and the programs at some of its points.

    held  ops whose launches have been compared with those at these points, and how they are made
    """

    box: Box
    program: Program
    fixed: Sequence[tuple[Point, Program]]
    held: set[tuple[Hashable, Key]]


def parts(pattern: Pattern, archs: Sequence[str], refused: Collection[Code], timings: Timings, known: Known) -> list[Part]:
    """The pattern's box in parts, each with choices for all generations.

    refused  codes that do not fit a generation's registers; `known` keeps what is found for later calls
    Raises UnsupportedError where no kernel's launches follow from the sizes by one rule.
    """
    todo, done, most = [pattern.box], list[Part](), _most(pattern, known.patterns)
    while todo:
        box = todo.pop(0)
        left = most - len(todo) - len(done) - 2
        try:
            made = {name: _chosen(pattern, box, ARCHS[name], refused, timings, known, left >= 0) for name in archs}
        except UndecidedError as why:
            cut = divided_by(box, points(box), why.mask) if why.mask is not None else None
            if cut is None:
                cut = halves(box)
            if cut is None or len(todo) + len(done) > MOST:
                raise UnsupportedError(
                    f"no kernel runs all sizes of the range ({why}); give a smaller range, or sizes one by one (--entry)"
                ) from why
            todo[:0] = cut
            continue
        if any(choices is None for choices in made.values()) and (cut := halves(box)):
            todo[:0] = cut
            continue
        done.append(Part(box, pattern.at(opened(box)), {name: choices for name, choices in made.items() if choices}))
    return done


def _most(pattern: Pattern, patterns: Sequence[Pattern]) -> int:
    """FASTER for the pattern of most sizes; others have a share of that."""
    large = [count(other.box) for other in patterns if count(other.box) > 1]
    return FASTER if not large or count(pattern.box) >= max(large) else FASTER // len(large)


def _chosen(
    pattern: Pattern, box: Box, arch: Arch, refused: Collection[Code], timings: Timings, known: Known, divisible: bool
) -> list[Choice] | None:
    """Choices for a box; None if one choice for all of it is too slow somewhere, and it may be divided."""
    ops = [known.ops(pattern, point) for point in corners(box)]
    ranked = [known.pooled(pattern, point, arch, refused) for point in corners(box)]
    shared = []
    for i in range(len(pattern.tree.ops)):
        own = _shared([of_point[i] for of_point in ranked])
        shared.append(own or _shared([known.all(of_point[i], arch, refused) for of_point in ops]))
    if divisible and halves(box) and (not all(shared) or _loss(ranked, shared) > LOSS):
        return None
    middle = corners(box)[len(corners(box)) // 2]
    program, whole = pattern.at(middle), pattern.at(opened(box))
    if missing := [op.nodes[0] for op, own in zip(program.ops, shared, strict=True) if not own]:
        raise UndecidedError(f"node {missing[0]!r}: no kernel is for all of these sizes")
    alike = {seen(op, program): own for op, own in zip(program.ops, shared, strict=True)}
    choices = schedule(program, arch, refused, timings, alike)
    range_ = _Range(
        box, whole, [(p, pattern.at(p)) for p in (*corners(box)[:1], *corners(box)[-1:], *scattered(box, HELD))], set()
    )
    direct, taken = uncopied(program), list(whole.ops)
    for i, (copy, _) in direct.items():
        if not choices[copy].work.launches:
            taken[i] = uncopied(whole)[i][1]
    out = []
    for op, at_middle, choice, own in zip(taken, program.ops, choices, shared, strict=True):
        if not choice.work.launches and program.tensors[at_middle.y].size:
            out.append(choice)  # a copy that nobody makes
        else:
            try:
                out.append(_open(op, range_, choice, own, arch, refused, NEAR))
            except UndecidedError as why:
                if divisible and why.mask is not None and divided_by(box, points(box), why.mask):
                    raise
                others = [*own, *_plain(known.all(ops[len(ops) // 2][len(out)], arch, refused))]
                out.append(_open(op, range_, choice, others, arch, refused, math.inf))  # no cut parts the sizes
    return out


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


def _loss(ranked: Sequence[Sequence[Sequence[Candidate]]], shared: Sequence[Sequence[Candidate]]) -> float:
    """How much longer an inference takes with the best of the shared candidates, at the worst point, as a share."""
    losses = []
    for at_point in ranked:
        best = sum(own[0].cost for own in at_point if own)
        taken = 0.0
        for own, common in zip(at_point, shared, strict=True):
            costs = {key_of(c): c.cost for c in own}
            taken += costs.get(key_of(common[0]), common[0].cost) if common else math.inf
        losses.append(taken / best - 1 if best else 0.0)
    return max(losses)


def _open(
    op: Op, range_: _Range, choice: Choice, ranked: Sequence[Candidate], arch: Arch, refused: Collection[Code], near: float
) -> Choice:
    """The choice with launches for all sizes; where it has none, another candidate that is at most `near` times as slow.

    Raises UndecidedError where none has.
    """
    assert isinstance(choice.kernel, Kernel)
    try:
        return replace(choice, work=_work(op, range_, choice.kernel, choice.config, arch))
    except UndecidedError as why:
        for other in ranked:
            if other.cost > near * choice.cost:
                break
            try:
                work = _work(op, range_, other.kernel, other.config, arch)
            except UndecidedError:
                continue
            if not any(launch.code in refused for launch in work.launches):
                return replace(choice, kernel=other.kernel, config=other.config, work=work, cost=other.cost)
        raise UndecidedError(f"node {op.nodes[0]!r}: {why}", why.mask) from why


def _work(op: Op, range_: _Range, kernel: Kernel, config: Config, arch: Arch) -> Work:
    """The launches for all sizes, which at some of them are held to what the kernel says there."""
    work = _open_work(op, range_.program, kernel, config, arch)
    what = seen(op, range_.program), key_of(Candidate(0.0, kernel, config))
    if what in range_.held:
        return work
    formulas, tree = drawn((op, work), [size.name for size in range_.box])
    fill = filler(tree)
    for point, program in range_.fixed:
        own, made = fill(computed(formulas, point))
        there = kernel.work(own, program, config, arch)
        alike = [a.code for a in made.launches] == [b.code for b in there.launches]  # else a constant is lifted at all sizes
        if len(made.launches) != len(there.launches) or (alike and made != there):
            raise UndecidedError(f"{kernel.name} does not say by one rule how it is launched")
    range_.held.add(what)
    return work


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
