"""The sizes of a range: a box of one interval a size, and those of its points that stand for all."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from tccompile.ir.extent import Extent, Open
from tccompile.sizes import Size

Box = tuple[Size, ...]

MOSTLY = 0.9
"""The share of points that a cut tells from the others at least."""

ALL = 4096
"""Points up to which a box is looked at in full; of others, corners, middles and so many at random."""

Point = tuple[int, ...]
"""One number for each size of a box."""


class Region(NamedTuple):
    """A box, or those of its points alone whose product lies between two numbers, both included: what a product of matrices takes
    follows from its rows, which are a batch's tokens, or an image's pixels."""

    box: Box
    product: tuple[int, int] | None = None

    def divided(self, number: int, at: int) -> tuple[Region, Region]:
        """What is below `at` of a size, by its number, or of the product, by the number after these, and the rest."""
        if number < len(self.box):
            below, above = divided(self.box, number, at)
            return self.within(below), self.within(above)
        least, most = self.product or _products(self.box)
        return Region(self.box, (least, at - 1)).within(self.box), Region(self.box, (at, most)).within(self.box)

    def within(self, box: Box) -> Region:
        """Those of its points that lie in another box, in the least one that has them all."""
        if self.product is None:
            return Region(box)
        out = []
        for number, size in enumerate(box):
            low, high = _products((*box[:number], *box[number + 1 :]))
            least, most = self.product[0] / max(1, high), self.product[1] / max(1, low)
            inside = [n for n in size.all if least <= n <= most] or size.all
            out.append(replace(size, low=inside[0], high=inside[-1]))
        low, high = _products(out)
        return Region(tuple(out), None if self.product[0] <= low and high <= self.product[1] else self.product)


def _products(box: Sequence[Size]) -> tuple[int, int]:
    """The product of the least sizes, and of the greatest ones."""
    return math.prod(size.low for size in box), math.prod(size.all[-1] for size in box)


def count(box: Box) -> int:
    """The points of a box."""
    return math.prod(len(size.all) for size in box)


def corners(box: Box) -> list[Point]:
    """The points at the ends of each interval, the least ones first, and the one in the middle between them."""
    ends = list(itertools.product(*(dict.fromkeys((size.all[0], size.all[-1])) for size in box)))
    middle = tuple(size.all[len(size.all) // 2] for size in box)
    return ends if middle in ends else [*ends[: len(ends) // 2], middle, *ends[len(ends) // 2 :]]


def scattered(box: Box, number: int) -> list[Point]:
    """Points at random, the same at each call."""
    draw = np.random.default_rng(len(box))
    columns = [size.low + size.step * draw.integers(0, len(size.all), number) for size in box]
    return [tuple(int(n) for n in point) for point in zip(*columns, strict=True)]


def points(box: Box) -> list[Point]:
    """The points by which decisions are made: all of a small box. The greatest sizes come last."""
    if count(box) <= ALL:
        return list(itertools.product(*(size.all for size in box)))
    return [*scattered(box, ALL), *corners(box)]


def opened(box: Box) -> list[Extent]:
    """The sizes as extents: open ones, and numbers where there is only one."""
    columns = np.array(points(box), np.int64).T
    sizes: list[Any] = [Open("size", (s.name,), c) if len(s.all) > 1 else s.low for s, c in zip(box, columns, strict=True)]
    return sizes


def divided(box: Box, number: int, at: int) -> tuple[Box, Box]:
    """The box below `at` of a size, by its number, and the rest, which begins there."""
    size = box[number]
    below = replace(size, high=at - size.step)
    above = replace(size, low=at)
    return (*box[:number], below, *box[number + 1 :]), (*box[:number], above, *box[number + 1 :])


def without_ones(box: Box) -> list[Box]:
    """The box divided such that sizes of 0 and 1 are alone: axes of one element are left out of what they are parts of."""
    parts = [box]
    for number, size in enumerate(box):
        for at in [n for n in size.all[1:3] if n in (1, 2) or size.all[0] in (0, 1)]:
            cut = [part for part in parts if part[number].low < at <= part[number].high]
            parts = [
                p for part in parts for p in (divided(part, number, at) if part in cut and part[number].low <= 1 else (part,))
            ]
    return parts


def without_end(box: Box, point: Sequence[int]) -> tuple[Box, Box] | None:
    """The box divided such that an end of a size at which a point lies is alone: what is made of the size may be one element
    there. None where the point lies at no end."""
    for number, (size, at) in enumerate(zip(box, point, strict=False)):
        if len(size.all) > 2 and at in (size.all[0], size.all[-1]):
            return divided(box, number, size.all[1] if at == size.all[0] else at)
    return None


def ladder(box: Box) -> list[Point]:
    """Points from the least sizes to the greatest ones, each about twice as far."""
    rungs = max(1, *(round(doublings(size)) for size in box))
    out = []
    for rung in range(rungs + 1):
        at = [max(size.low, 0.5) * (max(size.all[-1], 0.5) / max(size.low, 0.5)) ** (rung / rungs) for size in box]
        out.append(tuple(size.near(x) for size, x in zip(box, at, strict=True)))
    return list(dict.fromkeys(out))


def between(box: Box, number: int) -> list[Point]:
    """Points that lie evenly between the least sizes and the greatest ones: half of them in how often sizes double."""
    axes = len(box) + 1
    root = 2.0
    for _ in range(30):  # of x^axes = x + 1: the golden ratio, where one size is open
        root = (1 + root) ** (1 / axes)
    out = []
    for k in range(number):
        shares = [(0.5 + (k // 2) * root ** -(i + 1)) % 1 for i in range(len(box))]
        at = [
            size.low + (size.all[-1] - size.low) * share if k % 2 else max(size.low, 0.5) * 2 ** (doublings(size) * share)
            for size, share in zip(box, shares, strict=True)
        ]
        out.append(tuple(size.near(x) for size, x in zip(box, at, strict=True)))
    return list(dict.fromkeys(out))


def doublings(size: Size) -> float:
    """How often the least of a size's values doubles until it is the greatest one."""
    return math.log2(max(size.all[-1], 0.5) / max(size.low, 0.5))


def halves(box: Box) -> tuple[Box, Box] | None:
    """The box divided where a size has about doubled, of the size whose ends are furthest apart; None if it is one point."""
    number = max(range(len(box)), key=lambda i: box[i].all[-1] / max(box[i].low, 0.5))
    size = box[number]
    if len(size.all) < 2:
        return None
    middle = math.sqrt(max(size.low, 0.5) * size.all[-1])
    return divided(box, number, next(n for n in size.all[1:] if n > middle or n == size.all[-1]))


def divided_by(box: Box, seen: Sequence[Point], mask: np.ndarray, share: float = MOSTLY) -> tuple[Box, Box] | None:
    """The box divided such that what is true at some of the points seen is so in one part, as far as one cut can do that.

    None if no cut does it for this share of the points.
    """
    columns, truth = np.array(seen).T, mask
    best: tuple[float, int, int] | None = None
    for number, size in enumerate(box):
        for at in sorted({int(n) for n in columns[number]} - {size.low}):
            below = columns[number] < at
            right = max((below == truth).mean(), (below != truth).mean())
            if best is None or right > best[0]:
                best = right, number, at
    return divided(box, *best[1:]) if best and best[0] >= share else None
