"""The order in which blocks take the tiles of a matrix product: some row tiles at a time, column by column."""

from __future__ import annotations

from typing import Any

from tccompile.ir.extent import Extent, greatest
from tccompile.kernels.codegen import divider

GROUP = 8
"""Row tiles that are taken together before the next column of tiles, so that they share B in the L2 cache."""

NUMBERS = 11
"""How many integers `numbers` gives."""


def numbers(tiles_m: Extent, tiles_n: Extent, batches: Extent) -> tuple[Extent, ...]:
    """What `place` needs, with reciprocals for its divisions; first how many tiles there are."""
    rows = tiles_m * batches
    tail = rows % GROUP
    dividers = (*divider(GROUP * tiles_n), *divider(greatest(tail, 1)), *divider(tiles_m))
    return (rows * tiles_n, tiles_n, tiles_m, rows - tail, tail, *dividers)


def placing() -> Any:
    """The device function place(index, numbers) → (row tile within its batch, column tile, batch)."""
    from tccompile.kernels.device_math import divide
    from tccompile.kernels.ptx.core import i32, inline

    by_group, smallest = GROUP.bit_length() - 1, GROUP - 1

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

    return place
