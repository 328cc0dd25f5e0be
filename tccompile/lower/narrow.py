"""Casts to types of 8 bits and fewer, which no tensor has: what they round to, held in float32, int8 or uint8.

What floats become follows ONNX's table of casts to float8: rounded to the nearest, halves to even ones; what is too large becomes
the largest, or without `saturate` what the type has for it.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import onnx
import onnx_graphsurgeon as gs
from onnx import TensorProto

from tccompile.ir.expr import Expr, call, cast, const
from tccompile.ir.types import DType
from tccompile.load.narrow import INTEGERS


class Grid(NamedTuple):
    """The numbers of a float type: binary digits, the exponent of the least one, the largest, and what is beyond it."""

    digits: int
    least: int
    largest: float
    beyond: float


GRIDS: dict[int, Grid] = {
    TensorProto.FLOAT8E4M3FN: Grid(4, -9, 448.0, math.nan),
    TensorProto.FLOAT8E4M3FNUZ: Grid(4, -10, 240.0, math.nan),
    TensorProto.FLOAT8E5M2: Grid(3, -16, 57344.0, math.inf),
    TensorProto.FLOAT8E5M2FNUZ: Grid(3, -17, 57344.0, math.nan),
    TensorProto.FLOAT4E2M1: Grid(2, -1, 6.0, 6.0),
}


def elem_of(t: gs.Tensor) -> int | None:
    """ONNX's number of a tensor's type, if it is one of those that no tensor of a program has."""
    dtype = t.dtype
    try:
        elem = dtype if isinstance(dtype, int) else onnx.helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    except (KeyError, TypeError, ValueError):
        return None
    return elem if elem in GRIDS or elem in INTEGERS else None


def held_in(elem: int) -> DType:
    """The type of a program's tensor that holds its numbers."""
    return DType.F32 if elem in GRIDS else DType(onnx.helper.tensor_dtype_to_np_dtype(INTEGERS[elem][0]).name)


def rounded(x: Expr, elem: int, saturate: bool) -> Expr:
    """A value as a cast to the type leaves it: integers keep their low bits."""
    if elem in INTEGERS:
        _, low, high = INTEGERS[elem]
        whole = cast(x, DType.I64)
        bits = call("bit_and", whole if low == 0 else call("sub", whole, low), high - low)
        return bits if low == 0 else call("add", bits, low)
    grid, value = GRIDS[elem], cast(x, DType.F32)
    limit = grid.largest if saturate or grid.beyond == grid.largest else 2 * grid.largest
    inside = call("min", call("max", value, -limit), limit)
    y = call("on_grid", inside, 2.0 ** (1 - grid.digits), 2.0**grid.least)
    if limit == grid.largest:
        return y
    beyond = call("mul", call("sign", value), grid.beyond) if math.isinf(grid.beyond) else const(math.nan)
    return call("where", call("greater", call("abs", y), grid.largest), beyond, y)
