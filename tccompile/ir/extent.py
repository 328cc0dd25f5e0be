"""Extents: the numbers that the shapes of a model decide, and what is computed with them.

All shapes are known when a model is compiled, so an int does for an extent. What is written here in words is what an int can do
and a size that is known only later cannot do in the same way: everything that rounds, compares, or needs a number at once.
"""

from __future__ import annotations

Extent = int
"""An extent of a tensor, a stride, an offset, a size in bytes, a grid dimension, or a factor or constant of an index.

What no shape decides (an axis, a rank, a tile, a number of threads) is an int and stays one.
"""

Shape = tuple[Extent, ...]
"""One extent an axis."""


def ceil_div(n: Extent, d: Extent) -> Extent:
    """n / d, rounded up: how many parts of at most d make n."""
    return -(-n // d)


def round_up(n: Extent, multiple: Extent) -> Extent:
    """The least multiple that is no less than n."""
    return -(-n // multiple) * multiple
