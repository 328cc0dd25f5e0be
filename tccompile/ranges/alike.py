"""Programs at some sizes → one program for all sizes, if they differ by numbers only, and formulas give those.

What formulas are found by a few programs is compared with others, from sizes all over the range: where a program there is made
by other rules, the range is divided.
"""

from __future__ import annotations

import logging
import re
from bisect import bisect_left
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, is_dataclass, replace
from functools import cache, cached_property, partial
from typing import Any, TypeVar

import numpy as np

from tccompile.errors import PlanError, UnsupportedError
from tccompile.ir.extent import ChangedError, Decisions, Extent, UndecidedError
from tccompile.ir.limits import check_program
from tccompile.ir.program import Program
from tccompile.ir.verify import verify
from tccompile.plan.formulas import Formula, Maker, computed, drawn, filler, names_of
from tccompile.ranges.box import (
    MOSTLY,
    Box,
    Point,
    corners,
    count,
    divided,
    divided_by,
    halves,
    opened,
    scattered,
    without_end,
    without_ones,
)
from tccompile.ranges.fit import as_counts, derived, fit, padded

LOG = logging.getLogger(__name__)
"""Tells at INFO where a range is divided, and why."""

COMPARED = 24
"""Programs at sizes at random that a formula is held to, besides those at corners; half as many where only one size is open."""

NEAR = 10
"""Neighbours that a formula is found by: more than the multiples that layouts pad to."""

GRAIN = 8
"""What most layouts pad to."""

FAR = 2
"""Points besides that differ from the first one in several sizes: a product of sums is a sum where only one of them changes."""

AGAIN = 4
"""How often formulas are found at most, each time by one more point, where those of before did not hold."""

BOXES = 24
"""Parts of a range that are made at most."""

BUDGET = 1 << 18
"""Ops of all programs that have been made, from which on a range is divided no more: some 20 minutes of a processor."""

ALONE = 6
"""Sizes of a part that may have a program each: next to the least ones, slices of one element come up."""

LARGE = 1 << 53
"""No formula is looked for of larger numbers: they are no extents."""


class _ElsewhereError(UndecidedError):
    """What formulas give at a point that they were not found by is not the program there."""

    def __init__(self, point: Point, what: str) -> None:
        super().__init__(what)
        self.point = point


ProgramAt = Callable[[Point], Program]

Agree = Callable[[Program, Program], bool]
"""Whether two programs of the same inputs compute the same."""


@dataclass(frozen=True)
class Pattern:
    """A program for all sizes of a box."""

    box: Box
    formulas: tuple[Formula, ...]
    tree: Program

    def at(self, sizes: Sequence[Extent]) -> Program:
        """The program at these sizes, numbers or open ones."""
        program: Program = self._fill(computed(self.formulas, sizes))
        return program

    @cached_property
    def _fill(self) -> Maker:
        return filler(self.tree)


def patterns(
    box: Box, program_of: Callable[[Box, Decisions], ProgramAt], agree: Agree, spent: Callable[[], int] = lambda: 0
) -> list[Pattern]:
    """The range in parts, each with its program.

    program_of  gives what makes programs in a part, alike in what they decide by sizes
    agree       is asked of a program and a simpler one, at sizes where two extents are the same by chance
    spent       of how many ops all programs are that have been made
    Raises UnsupportedError where programs differ from size to size by more than numbers.
    """
    made: list[Decisions] = []
    try:
        return _parts_of(box, program_of, agree, spent, made, everywhere=False)
    except UnsupportedError:
        if not any(decided.differs and not decided.everywhere for decided in made):
            raise
    return _parts_of(box, program_of, agree, spent, made, everywhere=True)


def _parts_of(
    box: Box,
    program_of: Callable[[Box, Decisions], ProgramAt],
    agree: Agree,
    spent: Callable[[], int],
    made: list[Decisions],
    everywhere: bool,
) -> list[Pattern]:
    """The parts, whose decisions are added to those `made`; `everywhere`: what is possible at some sizes only is done nowhere."""
    todo, done = [(part, Decisions(everywhere=everywhere)) for part in without_ones(box)], list[Pattern]()
    while todo:
        part, decided = todo.pop(0)
        made.append(decided)
        program_at = _settled(partial(program_of, part, decided))
        try:
            done.append(_settled(partial(pattern, part, program_at, agree)))
        except UndecidedError as why:
            seen = star(part, _settled(partial(fixed_of, part, program_at)))
            nowhere = decided.differs and not decided.everywhere  # another way: what is possible at some sizes is done at none
            told = why.mask if why.mask is not None and len(why.mask) == len(seen) else None
            parts = None if told is None else divided_by(part, seen, told, 1.0 if nowhere else MOSTLY)
            parts = parts and _settled(partial(_sharpened, parts, seen, program_at))
            own = _each_its_own(part, program_at, agree)
            if (own or parts is None) and nowhere:
                todo.insert(0, (part, replace(decided, everywhere=True)))
                continue
            parts = parts or without_end(part, why.point if isinstance(why, _ElsewhereError) else ()) or halves(part)
            where = ", ".join(f"{s.name} {s.low} to {s.high}" for s in part)
            if parts is None or len(todo) + len(done) + 2 > BOXES or own or spent() > BUDGET:
                raise UnsupportedError(
                    f"the model does not do the same at all sizes of the range ({where}: {why}); "
                    "give the sizes that are needed one by one (--entry), or a step between them (--range SIZE=LOW..HIGH:STEP)"
                ) from why
            LOG.info("range: %s is divided: %s", where, why)
            todo[:0] = [(half, Decisions(everywhere=everywhere)) for half in parts]
    return done


T = TypeVar("T")


def _settled(make: Callable[[], T]) -> T:
    """What is made, anew until what is decided by sizes is the same for all."""
    while True:
        with suppress(ChangedError):
            return make()


def _sharpened(parts: tuple[Box, Box], seen: Sequence[Point], program_at: ProgramAt) -> tuple[Box, Box]:
    """A box in two parts, divided where programs begin to be alike, not just at one of the points seen: else each part would be
    divided again until that place is found."""
    below, above = parts
    number = next(i for i, (one, other) in enumerate(zip(below, above, strict=True)) if one != other)
    box = (*above[:number], replace(above[number], low=below[number].low), *above[number + 1 :])
    first = next(point for point in seen if point[number] == above[number].low)
    low = max(point[number] for point in seen if point[number] < above[number].low)
    fixed, own = fixed_of(box, program_at), program_at(first)
    between = [(*first[:number], n, *first[number + 1 :]) for n in box[number].all if low < n < first[number]]
    points = [point for point in between if is_generic(point, box, fixed)]
    at = bisect_left(points, True, key=lambda point: _differ_in_numbers(program_at(point), own))
    return divided(box, number, points[at][number] if at < len(points) else first[number])


def _differ_in_numbers(one: Program, other: Program) -> bool:
    """Whether programs may be those of two sizes of one part: they are the same but for numbers."""
    try:
        merge([one, other], lambda numbers: 1, ())
    except UndecidedError:
        return False
    return True


def _each_its_own(box: Box, program_at: ProgramAt, agree: Agree) -> bool:
    """Whether even the greatest sizes of a box, which are neighbours, have different programs."""
    if count(box) <= ALONE:
        return False
    last = tuple(replace(size, low=size.all[-2:][0], high=size.all[-1]) for size in box)
    for number, size in enumerate(last):
        one = tuple(replace(other, low=other.high) if i != number else other for i, other in enumerate(last))
        try:
            if len(size.all) > ALONE:
                _settled(partial(pattern, one, program_at, agree))
        except UndecidedError:
            return True
    return False


def pattern(box: Box, program_at: ProgramAt, agree: Agree) -> Pattern:
    """The program for all sizes of a box. Raises UndecidedError, which names the place, if there is none."""
    if count(box) == 1:
        return Pattern(box, (), program_at(tuple(size.low for size in box)))
    program_at = cache(program_at)
    fixed = fixed_of(box, program_at)
    seen = star(box, fixed)
    wrong: UndecidedError | None = None
    for _ in range(AGAIN):
        try:
            found = _laid_over(box, seen, program_at)
        except UndecidedError as why:
            raise (why if wrong is None or isinstance(why, ChangedError) else wrong) from why
        if (other := _other(found, seen, fixed, program_at, agree)) is None:
            return found
        point, how = other
        wrong = _ElsewhereError(point, _of_node(str(how), [program_at(point)]))
        seen = [*seen[:-1], point, seen[-1]]
    assert wrong is not None
    raise wrong


def _laid_over(box: Box, seen: Sequence[Point], program_at: ProgramAt) -> Pattern:
    """The program with formulas that hold at some points."""
    names = [size.name for size in box]
    programs = [program_at(point) for point in seen]
    at = [dict(zip(names, point, strict=True)) for point in seen]
    sizes = {name: size for name, size in zip(names, opened(box), strict=True) if not isinstance(size, int)}
    known: dict[tuple[int, ...], Extent | None] = {}

    def formula(numbers: tuple[int, ...]) -> Extent | None:
        if numbers not in known:
            ways = partial(padded, numbers, known), partial(fit, numbers, at, sizes), partial(derived, numbers, known)
            few = max(map(abs, numbers)) < LARGE  # which times what extents are multiplied by has 64 bits
            known[numbers] = next((found for way in ways if (found := way()) is not None), None) if few else None
        return known[numbers]

    try:
        return Pattern(box, *drawn(merge(programs, formula, ()), names))
    except UndecidedError as why:
        raise UndecidedError(_of_node(str(why), programs), why.mask) from why


def _of_node(what: str, programs: Sequence[Program]) -> str:
    """Where programs differ, with the node of the model that it is about: of an op of that number, or of a tensor named."""
    names = {word.strip(",:") for word in what.split()}
    number = next((int(n) for n in re.findall(r"^ops (\d+) ", what)), None)
    of_number = [program.ops[number] for program in programs if number is not None and number < len(program.ops)]
    named = (op for program in programs for op in program.ops if op.y in names)
    op = next(iter((*of_number[-1:], *named)), None)
    return what if op is None else f"node {op.nodes[0]!r}: {what}"


def _other(
    found: Pattern, seen: Sequence[Point], fixed: Collection[int], program_at: ProgramAt, agree: Agree
) -> tuple[Point, UndecidedError] | None:
    """A point that was not seen whose program is another one, and how it differs; None if there is none."""
    several = sum(len(size.all) > 1 for size in found.box) > 1
    near = [point for line in _lines(found.box, seen[0]) for point in line]  # those that are not generic are not seen
    others = scattered(found.box, COMPARED if several else COMPARED // 2)
    for point in dict.fromkeys((*corners(found.box), *near, *others)):
        if point in seen:
            continue
        made, own = found.at(point), program_at(point)
        try:
            verify(made)
            check_program(made)
        except (AssertionError, PlanError) as why:
            return point, UndecidedError(str(why))
        try:
            differ(made, own, ())
        except UndecidedError as why:
            if is_generic(point, found.box, fixed) or not _same_shapes(made, own) or not agree(made, own):
                return point, why
    return None


def with_forms(found: Pattern, offer: Callable[[Program], Program]) -> Pattern:
    """The pattern with the forms that `offer` gives constants of its program at some sizes, if they are the same at all."""
    tree, program = found.tree, found.at([size.low for size in found.box])
    offered = offer(program)
    same = [name for name in offered.forms if tree.constants.get(name) is program.constants[name]]
    more = {name: offered.forms[name][len(program.forms.get(name, ())) :] for name in same}
    names = {part for own in more.values() for form in own for part in form.tensors}
    forms = {name: (*tree.forms.get(name, ()), *own) for name, own in more.items()}
    whole = replace(
        tree,
        tensors={**tree.tensors, **{part: offered.tensors[part] for part in names}},
        constants={**tree.constants, **{part: offered.constants[part] for part in names}},
        forms={**tree.forms, **forms},
    )
    return replace(found, tree=whole)


def _same_shapes(a: Program, b: Program) -> bool:
    """Whether outputs have the same shapes, and so have all other tensors of one name that have as many axes."""
    both = [(a.tensors[name].shape, b.tensors[name].shape) for name in a.tensors.keys() & b.tensors.keys()]
    named = all(a.tensors[x].shape == b.tensors[y].shape for x, y in zip(a.outputs, b.outputs, strict=True))
    return named and all(one == other for one, other in both if len(one) == len(other))


def fixed_of(box: Box, program_at: ProgramAt) -> frozenset[int]:
    """The extents of a program that are no size."""
    first = first_of(box)
    program = program_at(first)
    extents = {n for t in program.tensors.values() for n in t.shape} - set(first)
    return frozenset(extents | {size.low for size in box if len(size.all) == 1}) - {0, 1}


def is_generic(point: Point, box: Box, fixed: Collection[int]) -> bool:
    """Whether no two extents are the same by chance. Where they are, a program may be simpler, as two axes of one length can
    be taken for each other. The program for other sizes computes the same there, unless the model itself decides by the size."""
    own = [n for n, size in zip(point, box, strict=True) if len(size.all) > 1]
    return len(set(own)) == len(own) and not any(n in fixed for n in own)


def first_of(box: Box) -> Point:
    """A point near the least sizes, of sizes that differ."""
    return tuple(size.all[min(1 + i, len(size.all) - 1)] for i, size in enumerate(box))


def star(box: Box, fixed: Collection[int]) -> list[Point]:
    """A first point, others that differ from it in one size each, near it and far, and some that differ in several, the greatest
    one last; generic ones, if there are enough."""
    first = next((p for p in (first_of(box), *scattered(box, COMPARED)) if is_generic(p, box, fixed)), first_of(box))
    out = [first]
    for number, line in enumerate(_lines(box, first)):
        generic = [point for point in line if is_generic(point, box, fixed)]
        out += [*generic, *_of_other_remainders(generic, number, box, fixed)] if len(generic) > 3 else line
    greatest = tuple(size.all[-1] for size in box)
    far = [point for point in (greatest, *scattered(box, COMPARED)) if is_generic(point, box, fixed)]
    return list(dict.fromkeys([*out, *reversed(far[:FAR])]))


def _of_other_remainders(line: Sequence[Point], number: int, box: Box, fixed: Collection[int]) -> Iterator[Point]:
    """Points of a line of one size that leave what none of those seen leaves of a multiple that layouts pad to: n and n + 1 are
    padded alike but at multiples, which are extents of many models."""
    sizes = box[number].all
    missing = {n % GRAIN for n in sizes[:GRAIN]} - {point[number] % GRAIN for point in line}
    for n in sizes:
        if not missing:  # soon, as few sizes are not generic: there may be billions
            return
        point = (*line[0][:number], n, *line[0][number + 1 :])
        if n % GRAIN in missing and is_generic(point, box, fixed):
            missing.remove(n % GRAIN)
            yield point


def usual(box: Box) -> int:
    """How many programs it takes about to find one for all sizes of a box, and to compare it."""
    return min(count(box), COMPARED + sum(min(len(size.all), NEAR + GRAIN) for size in box if len(size.all) > 1))


def _lines(box: Box, first: Point) -> Iterator[list[Point]]:
    """Of each size, points that differ from the first one in it alone: its least values, some in the middle, and the greatest."""
    for i, size in enumerate(box):
        last = len(size.all) - 1
        steps = dict.fromkeys((*range(NEAR), *range(last // 2, last // 2 + 5), last // 3, last - 1, last))
        yield [(*first[:i], size.all[k], *first[i + 1 :]) for k in steps if 0 <= k <= last]


def merge(trees: Sequence[Any], formula: Callable[[tuple[int, ...]], Extent | None], path: tuple[str, ...]) -> Any:
    """What all of the trees are, with formulas in the place of integers that differ.

    formula  gives one for the numbers of all trees; None if there is none
    Raises UndecidedError, which says where and by its mask which are unlike the last one, if they differ by more.
    """
    last, cls = trees[-1], type(trees[-1])
    if any(type(tree) is not cls for tree in trees):
        raise _unlike(path, mask=[type(tree) is cls for tree in trees])
    if cls is int:
        if all(tree == last for tree in trees):
            return last
        if path[:1] == ("constants",) or (found := formula(tuple(trees))) is None:  # a plan holds values, not how to make them
            raise _unlike(path, ", ".join(map(str, trees[:6])))
        return found
    parts = [_parts(tree) for tree in trees]
    if cls is float and len(set(trees)) > 1 and (quotient := _quotient(trees, formula)) is not None:
        return quotient
    if parts[-1] is None:
        if not all(same := [_same(last, tree) for tree in trees]):
            raise _unlike(path, ", ".join(map(str, trees[:6])) if cls is float else "", same)
        return last
    if not all(same := [list(part) == list(parts[-1]) for part in parts]):  # type: ignore[arg-type]
        others = {str(k) for part in parts for k in {*(part or ())} ^ {*parts[-1]}}
        raise _unlike(path, ", ".join(sorted(others)[:4]), same)
    made = {key: merge([part[key] for part in parts], formula, (*path, str(key))) for key in parts[-1]}  # type: ignore[index]
    return last if all(made[key] is part for key, part in parts[-1].items()) else _of_parts(last, made)


def _quotient(numbers: Sequence[float], formula: Callable[[tuple[int, ...]], Extent | None]) -> Any:
    """Floats that are counts, halves of counts, or one or two parts of a count as an open float; None for others."""
    if (found := as_counts(numbers)) is None:
        return None
    parts, divides, counts = found
    count = formula(counts)
    return None if count is None else parts / count if divides else count / parts


def differ(made: Any, other: Any, path: tuple[str, ...]) -> None:
    """Raises UndecidedError, which says where, if two trees are not the same."""
    if type(made) is not type(other):
        raise _unlike(path)
    parts, others = _parts(made), _parts(other)
    if parts is None or others is None:
        if not _same(made, other):
            raise _unlike(path, f"{made} and {other}")
        return
    if list(parts) != list(others):
        raise _unlike(path)
    if made is not other:
        for key, part in parts.items():
            if part is not others[key]:
                differ(part, others[key], (*path, str(key)))


def _parts(tree: Any) -> Mapping[Any, Any] | None:
    """The parts of a tree, by name or number; None for what has none."""
    if names := names_of(type(tree)):
        return {name: getattr(tree, name) for name in names}
    if isinstance(tree, tuple | list):
        return dict(enumerate(tree))
    return tree if isinstance(tree, Mapping) else None


def _of_parts(like: Any, parts: dict[Any, Any]) -> Any:
    if is_dataclass(like):
        return type(like)(**parts)  # type: ignore[misc, operator]
    return parts if isinstance(like, Mapping) else tuple(parts.values())


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, np.ndarray):
        return a.dtype == b.dtype and a.shape == b.shape and np.array_equal(a, b, equal_nan=a.dtype.kind == "f")
    if type(a) is float and type(b) is float:  # kernels compute in float32, to which parts of a count may have been rounded
        with np.errstate(over="ignore"):
            a, b = np.float32(a), np.float32(b)
    return bool(a == b) or (a != a and b != b)


def _unlike(path: Sequence[str], what: str = "", mask: Sequence[bool] | None = None) -> UndecidedError:
    return UndecidedError(f"{' '.join(path)} differs{f': {what}' if what else ''}", None if mask is None else np.array(mask))
