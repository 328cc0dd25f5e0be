"""How blocks walk over images: each takes every so-manieth tile, a rectangle of a result's pixels, for its share of the channels.

Blocks that are neighbours have the shares of one tile, so that what they read of the image comes from memory once.
"""

from __future__ import annotations

from tccompile.ir.extent import Extent
from tccompile.kernels.codegen import divider

NUMBERS = "tiles, shares, shares_m, shares_s, across, across_m, across_s, down, down_m, down_s"
"""Names of the launch's numbers, in the order of `numbers`."""


def numbers(images: Extent, down: Extent, across: Extent, shares: Extent) -> tuple[Extent, ...]:
    """Their values, for so many tiles along the rows' way down and across."""
    tiles = images * down * across
    return (tiles, shares, *divider(shares), across, *divider(across), down, *divider(down))


def begin(columns: int) -> list[str]:
    """Text: a block's first tile, its first channel of `columns`, and how many tiles on the next one is."""
    return [
        "block = i32(cuda.blockIdx.x)",
        "tile = divide(block, shares_m, shares_s)",
        f"first = i32((block - tile * shares) * i32({columns}))",
        "stride = divide(i32(cuda.gridDim.x), shares_m, shares_s)",
    ]


def place(across: int, down: int) -> list[str]:
    """Text: the tile's image, and its first column and row, of tiles of so many pixels."""
    return [
        "band = divide(tile, across_m, across_s)",
        "image = divide(band, down_m, down_s)",
        f"column = i32((tile - band * across) * i32({across}))",
        f"row = i32((band - image * down) * i32({down}))",
    ]
