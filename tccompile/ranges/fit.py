"""Numbers at some sizes → a formula: how the integers of programs that are alike but for their sizes depend on these.

What a program says of sizes is few forms of numbers: an extent of a layer, (a * d + b) // c * e + f of one dimension d of the
model's inputs, at most so much, and products of these, which are strides and counts; what such a number leaves of a
dimension, and halves of that. Strides divide, padding adds, pooling and upsampling do both; divisions one after the other are
one, and a is 1 but for images that become half as large again. So a formula that fits the sizes looked at can only be wrong
where a program is made by other rules at other sizes; `alike` compares it there.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial, reduce
from math import gcd
from operator import mul

import numpy as np

from tccompile.ir.extent import Extent, least, round_up
from tccompile.plan.formulas import computed, drawn, filler

DIVISORS = (1, 2, 4, 8, 16, 32, 64, 3, 5, 6, 7, 9, 10, 12, 14, 20, 24, 28, 40, 48, 56)
"""What extents are divided by: products of strides, and the multiples that layouts pad to."""

MOST = 64
"""What extents are multiplied by at most before they are divided."""

SURE = 4
"""Sizes by which such a line is found: through fewer there are many."""


@dataclass(frozen=True)
class Line:
    """(a * d + b) // c * e + f, or `most` where that is less."""

    b: int
    c: int
    e: int
    f: int
    a: int = 1
    most: int | None = None

    def of(self, d: Extent) -> Extent:
        whole = (d * self.a + self.b) // self.c if self.c > 1 else d + self.b
        line = whole * self.e + self.f
        return line if self.most is None else least(line, self.most)


@dataclass(frozen=True)
class Lack(Line):
    """(what d + b lacks to a multiple of c, and a, in `parts`) * e + f: a border to a multiple, or what of it is on one side."""

    a: int = 0
    parts: int = 2

    def of(self, d: Extent) -> Extent:
        return (round_up(d + self.b, self.c) - d - self.b + self.a) // self.parts * self.e + self.f


def fit(numbers: Sequence[int], at: Sequence[Mapping[str, int]], sizes: Mapping[str, Extent]) -> Extent | None:
    """The formula of `sizes` that gives these numbers at these sizes; None if there is none of the forms known.

    at  for each number the sizes that it was seen at: those of the first, others that differ from it in one size each, and more
    """
    if len(set(numbers)) == 1:
        return numbers[0]
    ways = [
        partial(_product, numbers, at, at, sizes),
        *(partial(_of_sum, numbers, at, sizes, pair) for pair in itertools.combinations(sizes, 2)),
        partial(_beside, numbers, at, sizes),
        partial(_product, numbers, at, at, sizes, any_quotient=True),
        partial(_beside, numbers, at, sizes, any_quotient=True),
    ]
    return next((found for way in ways if (found := way()) is not None), None)


def _beside(
    numbers: Sequence[int], at: Sequence[Mapping[str, int]], sizes: Mapping[str, Extent], any_quotient: bool = False
) -> Extent | None:
    """A formula less a size or so, as what is added to a signal to fill its last window; or and one more, as places have that
    end with a sum."""
    common = max(gcd(*numbers), 1)  # of rows with one more, say
    beside = [("", k) for k in (1, -1)] + list(itertools.product(sizes, (-1, 1, -2, 2)))
    for name, k in beside:
        rest = [n // common - k * (p[name] if name else 1) for n, p in zip(numbers, at, strict=True)]
        if len(set(rest)) > 1 and (found := _product(rest, at, at, sizes, any_quotient)) is not None:
            return (found + k * (sizes[name] if name else 1)) * common
    return None


def derived(numbers: Sequence[int], known: Mapping[tuple[int, ...], Extent | None]) -> Extent | None:
    """A formula that is known, or so much where that is less, as of all places of an image the best ones; a share of one, as of
    layers that become half as large again; the sum of two or three, as of parts that lie one behind the other, so many times or
    as rows of so many; the last part with the padding of all. None if it is none of these."""
    most, formulas = max(numbers), {others: formula for others, formula in known.items() if formula is not None}
    for others, formula in formulas.items():
        if all(n == min(other, most) for n, other in zip(numbers, others, strict=True)):
            return least(formula, most)
        line = _slanted(np.array(others), np.array(numbers)) if len(set(others)) >= SURE else None
        if line is not None:
            return line.of(formula)
    common = gcd(*numbers)
    times = _divisors(common)
    rows: list[tuple[tuple[int, ...], Extent]] = [((n,) * len(numbers), n) for n in (*times, common) if n]
    for others, formula in (*rows, *formulas.items()):
        if all(other and not n % other for n, other in zip(numbers, others, strict=True)):
            rest = tuple(n // other for n, other in zip(numbers, others, strict=True))
            if (found := _of_parts(rest, formulas)) is not None or (found := _times(rest, formulas)) is not None:
                return found * formula
    return _behind(tuple(numbers), formulas)


def _times(numbers: tuple[int, ...], formulas: Mapping[tuple[int, ...], Extent]) -> Extent | None:
    """A formula so many times."""
    ways = ((n, formulas.get(tuple(x // n for x in numbers))) for n in _divisors(gcd(*numbers)))
    return next((found * n for n, found in ways if found is not None), None)


def _divisors(number: int) -> list[int]:
    """What divides a number, up to MOST."""
    return [n for n in range(1, min(number, MOST) + 1) if not number % n]


def _behind(numbers: tuple[int, ...], formulas: Mapping[tuple[int, ...], Extent]) -> Extent | None:
    """A formula and what it lacks to the multiple at which it ends behind another one, as the last part of a concatenation has
    the padding of the whole."""
    rows, v = np.array(list(formulas)), np.array(numbers)
    for own, formula in formulas.items():
        if not all(0 <= n - other < max(PADDED) for n, other in zip(numbers, own, strict=True)):
            continue
        for c in PADDED:
            ends = -(-(rows + np.array(own)) // c) * c
            if len(found := np.flatnonzero((ends == rows + v).all(1))):
                first = list(formulas.values())[int(found[0])]
                return round_up(first + formula, c) - first
    return None


def _of_parts(numbers: tuple[int, ...], formulas: Mapping[tuple[int, ...], Extent], parts: int = 3) -> Extent | None:
    """The sum of so many formulas at most."""
    if numbers in formulas or parts < 2 or min(numbers) < 0:
        return formulas.get(numbers)
    for others, formula in formulas.items():
        rest = tuple(n - other for n, other in zip(numbers, others, strict=True))
        if (found := _of_parts(rest, formulas, parts - 1)) is not None:
            return formula + found
    return None


def padded(numbers: Sequence[int], known: Mapping[tuple[int, ...], Extent | None]) -> Extent | None:
    """The formula of numbers that are those of a known formula, padded, or so many times as much; None if there is none."""
    v = np.array(numbers, np.int64)
    for others, formula in known.items():
        if formula is None or isinstance(formula, int):
            continue
        whole = np.array(others, np.int64)
        for c in PADDED:
            up = -(-whole // c) * c
            times = int(v[0] // up[0]) if up[0] > 0 else 0
            if times and (up * times == v).all():
                return round_up(formula, c) * times
    return None


def _of_sum(
    numbers: Sequence[int], at: Sequence[Mapping[str, int]], sizes: Mapping[str, Extent], pair: tuple[str, str]
) -> Extent | None:
    """A formula of the sum of two sizes, as of earlier tokens and new ones, or one of the two times such a formula."""
    one, other = pair
    both = [p[one] + p[other] for p in at]
    apart = [{k: n for k, n in p.items() if k not in pair} | {SUM: s} for p, s in zip(at, both, strict=True)]
    wide = {k: size for k, size in sizes.items() if k not in pair} | {SUM: sizes[one] + sizes[other]}
    factors = [None, *((name, line) for name in pair for line in _alone())]
    for factor in factors:
        by = [1 if factor is None else int(factor[1].of(p[factor[0]])) for p in at]
        if 0 in by or any(n % f for n, f in zip(numbers, by, strict=True)):
            continue
        rest = [n // f for n, f in zip(numbers, by, strict=True)]
        found = rest[0] if len(set(rest)) == 1 else _product(rest, apart, at, wide)
        if found is not None:
            return found if factor is None else factor[1].of(sizes[factor[0]]) * found
    return None


SUM = "+"
"""What the sum of two sizes is called, which is no name of one."""


def _alone() -> list[Line]:
    """What extents are factors as: as they are, and padded."""
    return [Line(0, 1, 1, 0), *(Line(c - 1, c, c, 0) for c in PADDED)]


def _product(
    numbers: Sequence[int],
    at: Sequence[Mapping[str, int]],
    points: Sequence[Mapping[str, int]],
    sizes: Mapping[str, Extent],
    any_quotient: bool = False,
) -> Extent | None:
    """A product of a line of each size.

    at      the sizes at which the numbers were seen, by which lines are found
    points  what these, as extents, are made of
    any_quotient  the product may be a quotient of lines that something is added to. A product of sizes and one more is such a
            quotient, too, where only one of them changes
    """
    lines = list[tuple[str, Line]]()
    for name in sizes:
        alone = {p[name]: n for p, n in zip(at, numbers, strict=True) if all(p[k] == at[0][k] for k in sizes if k != name)}
        if len(set(alone.values())) > 1:
            own = _lines(alone)
            if not own:
                return None
            lines += [(name, line) for line in own]
    if not lines:
        return None
    found = [partial(_of, line if len(lines) == 1 else _primitive(line), name) for name, line in lines]
    product: Extent = reduce(mul, (factor(sizes) for factor in found))
    if len(found) > 1:  # of each factor all but its own part is common to the whole line
        first = reduce(mul, (factor(at[0]) for factor in found))
        if first == 0:
            return None
        common = gcd(first, numbers[0]) * (1 if first > 0 else -1)  # what is divided by is above 0
        if first != common and any(line.f for _, line in lines) and not any_quotient:
            return None
        product = product * (numbers[0] // common) // (first // common)
    return product if [_at(product, p) for p in points] == list(numbers) else None


def _of(line: Line, name: str, sizes: Mapping[str, Extent]) -> Extent:
    return line.of(sizes[name])


def _lines(numbers: Mapping[int, int]) -> list[Line]:
    """The line through numbers at values of one size; or two, whose product they are but for a factor. None: no such lines."""
    if (line := _line(numbers)) is not None:
        return [line]
    if (line := _capped(numbers)) is not None:
        return [line]
    if (line := _lacking(numbers)) is not None:
        return [line]
    d, v = list(numbers), list(numbers.values())
    for c in PADDED:
        for first in (Line(0, 1, 1, 0), Line(c - 1, c, c, 0)):
            factors = [int(first.of(n)) for n in d]
            if all(f and not n % f for f, n in zip(factors, v, strict=True)):
                second = _line({n: x // f for n, f, x in zip(d, factors, v, strict=True)})
                if second is not None:
                    return [first, second]
    return []


PADDED = (8, 16, 2, 4, 32)
"""What extents are padded to, and patches of images."""


def _line(numbers: Mapping[int, int]) -> Line | None:
    """The line through numbers at values of one size, the simplest one."""
    d, v = np.array(list(numbers)), np.array(list(numbers.values()))
    for c in DIVISORS:
        for b in dict.fromkeys((c - 1, *range(c))):  # rounding up and down come first, should there be several lines
            whole = (d + b) // c
            i, j = int(whole.argmin()), int(whole.argmax())
            if whole[i] == whole[j] or (v[j] - v[i]) % (whole[j] - whole[i]):
                continue
            e = int((v[j] - v[i]) // (whole[j] - whole[i]))
            f = int(v[i] - e * whole[i])
            if (whole * e + f == v).all():
                return Line(b, c, e, f) if c > 1 else Line(0, 1, e, f)
    return _slanted(d, v)


def _capped(numbers: Mapping[int, int]) -> Line | None:
    """The line through numbers up to the largest one, which larger sizes have, too: of what is looked for, so much at most."""
    most = max(numbers.values())
    below = {d: v for d, v in numbers.items() if v < most}
    line = _line(below) if 1 < len(below) < len(numbers) - 1 else None
    if line is None or (line.c > 1 and len(below) < SURE) or any(int(line.of(d)) < most for d in numbers if d not in below):
        return None
    return replace(line, most=most)


def _lacking(numbers: Mapping[int, int]) -> Lack | None:
    """The line through numbers that go up and down, as what is lacking to a multiple does."""
    d, v = (np.array(row) for row in zip(*sorted(numbers.items()), strict=True))
    steps = np.diff(v)
    if len(d) < SURE or not ((steps > 0).any() and (steps < 0).any()):
        return None
    for c in sorted(DIVISORS[1:]):
        lack = -(d + np.arange(c)[:, None]) % c  # a row for each b
        for parts, a in ((1, 0), (2, 0), (2, 1)):
            whole = (lack + a) // parts
            i, j = whole.argmin(1), whole.argmax(1)
            rows = np.arange(c)
            rise = np.maximum(whole[rows, j] - whole[rows, i], 1)
            e = (v[j] - v[i]) // rise
            f = v[i] - e * whole[rows, i]
            found = np.flatnonzero((whole * e[:, None] + f[:, None] == v).all(1))
            if len(found):
                b = int(found[0])
                return Lack(b, c, int(e[b]), int(f[b]), a, None, parts)
    return None


def _slanted(d: np.ndarray, v: np.ndarray) -> Line | None:
    """The line of a share of d that is no whole part of it, as three halves."""
    i, j, e = int(d.argmin()), int(d.argmax()), int(np.gcd.reduce(v - v[0]))
    if e == 0 or len(d) < SURE:
        return None
    for c in sorted(DIVISORS[1:]):  # of fractions that are nearly the same the simplest one
        a = round(int(v[j] - v[i]) * c / (int(d[j] - d[i]) * e))
        if not 1 < a < MOST or gcd(a, c) > 1:
            continue
        for b in range(c):
            whole = (d * a + b) // c
            f = int(v[i] - e * whole[i])
            if (whole * e + f == v).all():
                return Line(b, c, e, f, a)
    return None


def _primitive(line: Line) -> Line:
    """The line without a factor that all its values have."""
    common = gcd(line.e, line.f, line.most or 0)
    return replace(line, e=line.e // common, f=line.f // common, most=line.most and line.most // common)


def _at(formula: Extent, sizes: Mapping[str, int]) -> int:
    """What a formula is at these sizes."""
    steps, tree = drawn(formula, list(sizes))
    return int(filler(tree)(computed(steps, list(sizes.values()))))
