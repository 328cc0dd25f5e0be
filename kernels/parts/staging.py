"""How results lie in shared memory on their way out."""

from __future__ import annotations

from typing import NamedTuple

from tccompile.ir.types import DType

RESULT = 2
"""Bytes of a result in a box that stmatrix fills: 16 bits."""

KINDS = {DType.F16: "f16", DType.BF16: "bf16"}
"""Types of such results, and what instructions call them."""

BYTES = (DType.I8, DType.U8)
"""Types of results that may be in boxes beside halves, and of what is added to them."""

BOXES = 2
"""Boxes of results that a warp has: one is filled while the other is stored. With a residual, as many as its part of a tile, or
as its parts of two tiles."""


class Staging(NamedTuple):
    """Places of results in shared memory, one for each warp or warpgroup that has some.

    at      offset of the first place
    each    bytes of a place
    landed  offset of the places' barriers, which complete when what is added to the results has come there; None where nothing
            is added
    result  bytes of a result in a box
    sums    PTX's type of the sums that become results
    tiles   parts of a place, each for one tile and with a barrier of its own: with two, what is added comes a tile ahead
    """

    at: int
    each: int
    landed: int | None
    result: int = RESULT
    sums: str = "f32"
    tiles: int = 1
