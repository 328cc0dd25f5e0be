"""Casts to types of 8 bits and fewer, which no tensor has: what they round to, held in float32, int8 or uint8.

What floats become follows ONNX's table of casts to float8: rounded to the nearest, halves to even ones; what is too large becomes
the largest, or without `saturate` what the type has for it. An input or output of the model that has a type of floats is uint8,
its bits; one of integers is int8 or uint8, its values.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import onnx_graphsurgeon as gs
from onnx import TensorProto, helper

from tccompile.ir.expr import Expr, call, cast, const
from tccompile.ir.types import DType
from tccompile.load.narrow import INTEGERS


class Grid(NamedTuple):
    """The numbers of a float type: binary digits, the exponent of the least one, the largest, and what is beyond it.

    sign  the bit of negative numbers; `nan`: the bits of what is no number
    """

    digits: int
    least: int
    largest: float
    beyond: float
    sign: int
    nan: int


GRIDS: dict[int, Grid] = {
    TensorProto.FLOAT8E4M3FN: Grid(4, -9, 448.0, math.nan, 0x80, 0x7F),
    TensorProto.FLOAT8E4M3FNUZ: Grid(4, -10, 240.0, math.nan, 0x80, 0x80),
    TensorProto.FLOAT8E5M2: Grid(3, -16, 57344.0, math.inf, 0x80, 0x7E),
    TensorProto.FLOAT8E5M2FNUZ: Grid(3, -17, 57344.0, math.nan, 0x80, 0x80),
    TensorProto.FLOAT4E2M1: Grid(2, -1, 6.0, 6.0, 8, 8),
}

POWERS = TensorProto.FLOAT8E8M0
"""Powers of two from 2^-127 to 2^127; its bits are the exponent and 127, or 255 for what is no number."""

LOG2_E = 1 / math.log(2)


def elem_of(t: gs.Tensor) -> int | None:
    """ONNX's number of a tensor's type, if it is one of those that no tensor of a program has."""
    dtype = t.dtype
    try:
        elem = dtype if isinstance(dtype, int) else helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    except (KeyError, TypeError, ValueError):
        return None
    return elem if elem in GRIDS or elem in INTEGERS or elem == POWERS else None


def is_bits(elem: int) -> bool:
    """Whether inputs and outputs of the model that have the type are bits, not values."""
    return elem not in INTEGERS


def held_in(elem: int, outside: bool) -> DType:
    """The type of a program's tensor that holds its numbers; `outside`: one that is an input or an output of the model."""
    if is_bits(elem):
        return DType.U8 if outside else DType.F32
    return DType(helper.tensor_dtype_to_np_dtype(INTEGERS[elem][0]).name)


def rounded(x: Expr, elem: int, saturate: bool, mode: str = "up") -> Expr:
    """A value as a cast to the type leaves it: integers keep their low bits. `mode`: how powers of two are rounded to."""
    if elem in INTEGERS:
        _, low, high = INTEGERS[elem]
        whole = cast(x, DType.I64)
        bits = call("bit_and", whole if low == 0 else call("sub", whole, low), high - low)
        return bits if low == 0 else call("add", bits, low)
    value = cast(x, DType.F32)
    if elem == POWERS:
        return _power(value, saturate, mode)
    grid = GRIDS[elem]
    limit = grid.largest if saturate or grid.beyond == grid.largest else 2 * grid.largest
    inside = call("min", call("max", value, -limit), limit)
    y = call("on_grid", inside, 2.0 ** (1 - grid.digits), 2.0**grid.least)
    if limit == grid.largest:
        return y
    beyond = call("mul", call("sign", value), grid.beyond) if math.isinf(grid.beyond) else const(math.nan)
    return call("where", call("greater", call("abs", y), grid.largest), beyond, y)


def _power(value: Expr, saturate: bool, mode: str) -> Expr:
    """A power of two: the magnitude's own one, or the next."""
    size = call("abs", value)
    own = call("max", call("binade", size), 2.0**-127)
    if mode != "down":
        more = call("greater", size, own) if mode == "up" else call("greater_equal", size, call("mul", own, 1.5))
        next_ = call("mul", own, 2.0)
        own = call("where", more, call("min", next_, 2.0**127) if saturate else next_, own)
    finite = call("less_equal", call("max", size, own), DType.F32.largest)
    return call("where", finite, own, const(math.nan))


def bits_of(y: Expr, elem: int) -> Expr:
    """The bits of a number that the type has, as an integer."""
    is_nan, binade = call("is_nan", y), call("binade", call("abs", y))
    exponent = call("round", call("mul", call("log", binade), LOG2_E))
    if elem == POWERS:
        code = call("where", call("less", y, 2.0**-126), const(0.0), call("add", exponent, 127.0))
        return cast(call("where", is_nan, const(255.0), code), DType.I64)
    grid = GRIDS[elem]
    size, steps, least = call("abs", y), 2.0 ** (grid.digits - 1), grid.least + grid.digits - 1
    normal = call("add", call("mul", call("sub", exponent, float(least)), steps), call("mul", call("div", size, binade), steps))
    code = call("where", call("less", size, 2.0**least), call("mul", size, 2.0**-grid.least), normal)
    if math.isinf(grid.beyond):
        code = call("where", call("is_inf", y), const(float(bits_of_infinity(grid))), code)
    code = call("add", code, call("where", call("less", y, 0.0), const(float(grid.sign)), const(0.0)))
    return cast(call("where", is_nan, const(float(grid.nan)), code), DType.I64)


def bits_of_infinity(grid: Grid) -> int:
    """The bits behind those of the largest number."""
    return grid.nan + 2 - (1 << grid.digits - 1)


def numbers_of(elem: int) -> np.ndarray:
    """What each byte stands for as the bits of a number, as float32."""
    every = np.arange(256, dtype=np.uint8)
    bits = every & 15 if elem == TensorProto.FLOAT4E2M1 else every
    numbers: np.ndarray = bits.view(helper.tensor_dtype_to_np_dtype(elem)).astype(np.float32)
    return numbers
