"""How blocks walk over images: each takes every so-manieth tile, a rectangle of a result's pixels, for its share of the channels.

Blocks that are neighbours have the shares of one tile, so that what they read of the image comes from memory once.
"""

from __future__ import annotations

from typing import Any

from tccompile.ir.extent import Extent
from tccompile.kernels.codegen import divider

NUMBERS = 10
"""How many integers `numbers` gives."""


def numbers(images: Extent, down: Extent, across: Extent, shares: Extent) -> tuple[Extent, ...]:
    """What `start` and `place` need, for so many tiles along the rows' way down and across; first how many tiles there are."""
    tiles = images * down * across
    return (tiles, shares, *divider(shares), across, *divider(across), down, *divider(down))


def starting(columns: int) -> Any:
    """The device function start(numbers) → (the block's first tile, its first channel of `columns`, how many tiles on the next
    one is)."""
    from tccompile.kernels.device_math import divide
    from tccompile.kernels.ptx.core import cuda, i32, inline

    @inline
    def start(order):
        shares, shares_m, shares_s = order[1:4]
        block = i32(cuda.blockIdx.x)
        tile = divide(block, shares_m, shares_s)
        first = i32((block - tile * shares) * columns)
        return tile, first, divide(i32(cuda.gridDim.x), shares_m, shares_s)

    return start


def placing(across: int, down: int) -> Any:
    """The device function place(tile, numbers) → (the tile's image, its first row, its first column), of tiles of so many
    pixels."""
    from tccompile.kernels.device_math import divide
    from tccompile.kernels.ptx.core import i32, inline

    @inline
    def place(tile, order):
        tiles_across, across_m, across_s, tiles_down, down_m, down_s = order[4:]
        band = divide(tile, across_m, across_s)
        image = divide(band, down_m, down_s)
        column = i32((tile - band * tiles_across) * across)
        return image, i32((band - image * tiles_down) * down), column

    return place
