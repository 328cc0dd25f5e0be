"""The order in which blocks take the tiles of a matrix product: some row tiles at a time, column by column."""

from __future__ import annotations

from typing import Any

from tccompile.ir.extent import Extent, greatest
from tccompile.kernels.codegen import divider

GROUP = 8
"""Row tiles that are taken together before the next column of tiles, so that they share B in the L2 cache."""

NUMBERS = 11
"""How many integers `numbers` gives."""


def numbers(tiles_m: Extent, tiles_n: Extent, batches: Extent, beside: int = 1) -> tuple[Extent, ...]:
    """What `place` needs, with reciprocals for its divisions; first how many tiles there are. `beside`: as `placing` has it; the
    columns of tiles are a multiple of it."""
    rows, wide = tiles_m * batches, tiles_n // beside
    tail = rows % GROUP
    dividers = (*divider(GROUP * wide), *divider(greatest(tail, 1)), *divider(tiles_m))
    return (rows * tiles_n, wide, tiles_m, rows - tail, tail, *dividers)


def placing(beside: int = 1) -> Any:
    """The device function place(index, numbers) → (row tile within its batch, column tile, batch).

    beside  tiles of the same rows that follow each other, a power of two
    """
    from tccompile.kernels.device_math import divide
    from tccompile.kernels.ptx.core import i32, inline

    by_group, smallest = GROUP.bit_length() - 1, GROUP - 1
    by_beside, last = beside.bit_length() - 1, beside - 1

    @inline
    def place_beside(index, order):
        row, column, batch = place(i32(index >> by_beside), order)
        return row, i32((column << by_beside) + (index & last)), batch

    @inline
    def place(index, order):
        _, tiles_n, tiles_m, whole, tail, group_m, group_s, tail_m, tail_s, batch_m, batch_s = order
        first = i32(divide(index, group_m, group_s) << by_group)
        rest = i32(index - first * tiles_n)
        if first < whole:
            column = i32(rest >> by_group)
            row = i32(first + (rest & smallest))
        else:
            column = divide(rest, tail_m, tail_s)
            row = i32(first + rest - column * tail)
        batch = divide(row, batch_m, batch_s)
        return i32(row - batch * tiles_m), column, batch

    return place_beside if beside > 1 else place
