"""Regions of sizes: every point of a range is in one of them."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from tccompile.ranges.box import Box, Region
from tccompile.sizes import Size

BOXES: list[Box] = [
    (Size("batch", 2, 32), Size("tokens", 2, 77)),
    (Size("h", 64, 512, 4), Size("w", 64, 300, 12)),
    (Size("batch", 1, 1), Size("h", 8, 40, 8), Size("w", 3, 30)),
]


def inside(region: Region) -> set[tuple[int, ...]]:
    """The points of a region."""
    least, most = region.product or (0, 1 << 60)
    return {p for p in itertools.product(*(size.all for size in region.box)) if least <= math.prod(p) <= most}


@pytest.mark.parametrize("box", BOXES)
@pytest.mark.parametrize("seed", range(4))
def test_regions_have_each_point_once(box, seed):
    """However a box is divided, by sizes and by their product."""
    draw, regions = np.random.default_rng(seed), [Region(box)]
    while len(regions) < 12:
        region = regions.pop(int(draw.integers(len(regions))))
        points = sorted(inside(region))
        number = int(draw.integers(len(box) + 1))
        at = sorted({p[number] if number < len(box) else math.prod(p) for p in points})
        regions += region.divided(number, int(draw.choice(at[1:]))) if len(at) > 1 else [region]
    parts = [inside(region) for region in regions]
    assert all(parts) and sum(map(len, parts)) == len(set().union(*parts)) == math.prod(len(size.all) for size in box)


def test_a_region_is_the_least_box():
    """And the product of its sizes is none of its bounds where all are within."""
    below, above = Region(BOXES[0]).divided(2, 101)
    assert [(size.low, size.high) for size in below.box] == [(2, 32), (2, 50)] and below.product == (4, 100)
    assert [(size.low, size.high) for size in above.box] == [(2, 32), (4, 77)] and above.product == (101, 2464)
    few, many = below.divided(0, 26)
    assert [(size.low, size.high) for size in many.box] == [(26, 32), (2, 3)] and many.product is None
    assert few.product == (4, 100)


@pytest.mark.parametrize("size", [Size("n", 0, 0), Size("n", 3, 40), Size("n", 3, 40, 7), Size("n", 5, 6, 4)])
def test_the_nearest_size(size):
    """That which is nearest of all, and of two the smaller one."""
    for at in np.arange(-4, 50, 0.5):
        assert size.near(at) == min(size.all, key=lambda n: abs(n - at))
