"""Extents: numbers that the shapes of a model decide, and what is computed with them.

All shapes are known when a model is compiled, so an extent is an int. Code that adds, multiplies, divides and compares extents
does not rely on that; where a plain number is needed, `hint` and `most` say which. `make extents` lists where code relies on it.
"""

from __future__ import annotations

Extent = int
"""A number that shapes decide: an extent of a tensor, a stride, an offset, a size in bytes, a dimension of a grid, or a factor or
constant of an index. What no shape decides (an axis, a rank, a tile, a number of threads) is an int."""

Shape = tuple[Extent, ...]
"""One extent an axis."""


def ceil_div(n: Extent, d: Extent) -> Extent:
    """n / d, rounded up: how many parts of at most d make n."""
    return -(-n // d)


def round_up(n: Extent, multiple: Extent) -> Extent:
    """The least multiple that is no less than n."""
    return ceil_div(n, multiple) * multiple


def hint(extent: Extent) -> int:
    """The number to judge an extent by: times and choices may depend on it, what is computed and what is allowed may not."""
    return extent


def most(extent: Extent) -> int:
    """The largest number that it can be: what memory is kept for."""
    return extent
