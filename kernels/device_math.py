"""The device side of `expr.BUILTINS`, casts, and division by numbers that are known at launch.

float32 functions are good to a relative 1e-6; NaN goes through `minimum` and `maximum` as in NumPy. Everything is straight-line
code: choices are selects, not branches.
"""

from __future__ import annotations

import math
from typing import Any

from tccompile.kernels.ptx.core import f32, i32, inline, instruction, intrinsic, since, types, u32, u64

i64, boolean = types.int64, types.boolean


@inline
def at(base, offset, size):
    """The address `offset` units of `size` bytes from `base`."""
    return base + u64(i64(offset) * size)


# --- Choices ---------------------------------------------------------------------------------------------------------


@intrinsic
def select(typingctx, condition, a, b):
    """a if condition else b, both computed; of the same type."""

    def codegen(context, builder, sig, args):
        return builder.select(*args)

    return a(boolean, a, a), codegen


@intrinsic
def within(typingctx, index, low, high):
    """1 if low <= index < high, else 0, all int32"""

    def codegen(context, builder, sig, args):
        index, low, high = args
        test = builder.and_(builder.icmp_signed(">=", index, low), builder.icmp_signed("<", index, high))
        return builder.zext(test, index.type)

    return i32(i32, i32, i32), codegen


def _extremum(symbol: str) -> Any:
    def typer(typingctx, a, b):
        def codegen(context, builder, sig, args):
            x, y = args
            if a is f32:  # a NaN is returned, whichever side it is on
                first = builder.or_(builder.fcmp_ordered(symbol, x, y), builder.fcmp_unordered("uno", x, x))
            else:
                first = builder.icmp_signed(symbol, x, y)
            return builder.select(first, x, y)

        return a(a, a), codegen

    return typer


_less, _more = _extremum("<"), _extremum(">")


@intrinsic
def minimum(typingctx, a, b):
    return _less(typingctx, a, b)


@intrinsic
def maximum(typingctx, a, b):
    return _more(typingctx, a, b)


# --- float32 ---------------------------------------------------------------------------------------------------------

floor = instruction("cvt.rmi.f32.f32 $0, $1;", f32, f32, pure=True)
ceil = instruction("cvt.rpi.f32.f32 $0, $1;", f32, f32, pure=True)
binade = instruction("{ .reg .b32 t; mov.b32 t, $1; and.b32 t, t, 0x7F800000; mov.b32 $0, t; }", f32, f32, pure=True)
"""The power of two that a normal number lies between and its double."""

rint = instruction("cvt.rni.f32.f32 $0, $1;", f32, f32, pure=True)
trunc = instruction("cvt.rzi.f32.f32 $0, $1;", f32, f32, pure=True)
absolute = instruction("abs.f32 $0, $1;", f32, f32, pure=True)
quick_div = instruction("div.full.f32 $0, $1, $2;", f32, f32, f32, pure=True)
"""a / b within 2 ulp: for functions that are not exact anyway."""

over = instruction("{ .reg .f32 t; rcp.approx.ftz.f32 t, $2; mul.f32 $0, $1, t; }", f32, f32, f32, pure=True)
"""a / b within some 2 ulp, for b that is no less than 1: nothing where b is beyond 2^126."""

as_half = instruction("{ .reg .b16 t; cvt.rn.f16.f32 t, $1; cvt.f32.f16 $0, t; }", f32, f32, pure=True)
"""A float32 as it is read again where it has been stored in 16 bits."""

larger = instruction("max.f32 $0, $1, $2;", f32, f32, f32, pure=True)
"""The larger one; that which is no NaN, if one is."""

exp2 = instruction("ex2.approx.ftz.f32 $0, $1;", f32, f32, pure=True)


def _tanh() -> str:
    """One instruction from sm_75 on, else 1 - 2 / (1 + e^2x)."""
    if since((7, 5)):
        return "tanh.approx.f32 $0, $1;"
    power = "mul.f32 t, $1, 0f4038AA3B; ex2.approx.ftz.f32 t, t; add.f32 t, t, 0f3F800000;"
    return f"{{ .reg .f32 t; {power} rcp.approx.ftz.f32 t, t; fma.rn.f32 $0, t, 0fC0000000, 0f3F800000; }}"


quick_tanh = instruction(_tanh, f32, f32, pure=True)
"""tanh with a relative error of 2^-11, or an absolute one of less than that."""


@inline
def quick_exp(x):
    """e to the power x, with a relative error of about 1e-7 times (1 + |x|): for x that are not far above zero"""
    return exp2(x * f32(1.4426950408889634))


@inline
def fmod(a, b):
    return math.fmod(a, b)


@inline
def floor_mod(a, b):
    """The rest with the sign of b"""
    r = math.fmod(a, b)
    return select((r != 0) & ((r < 0) != (b < 0)), r + b, r)


@inline
def trunc_div(a, b):
    return trunc(a / b)


@inline
def isinf(x):
    return absolute(x) == f32(math.inf)


# --- int64 -----------------------------------------------------------------------------------------------------------

_quotient = instruction("div.s64 $0, $1, $2;", i64, i64, i64, pure=True)
_rest = instruction("rem.s64 $0, $1, $2;", i64, i64, i64, pure=True)
int_absolute = instruction("abs.s64 $0, $1;", i64, i64, pure=True)


@inline
def int_trunc_div(a, b):
    """a / b rounded toward zero, 0 where b is 0"""
    return select(b == 0, i64(0), _quotient(a, b))


@inline
def int_fmod(a, b):
    """a - b * trunc(a / b), 0 where b is 0"""
    return select(b == 0, i64(0), _rest(a, b))


@inline
def int_floor_mod(a, b):
    """The rest with the sign of b, 0 where b is 0"""
    r = int_fmod(a, b)
    return select((r != 0) & ((r ^ b) < 0), r + b, r)


@inline
def int_power(a, b):
    """a to the power b, modulo 2**64; a negative power is the exact result truncated, and 0 for a = 0"""
    result, square, n = i64(1), a, b
    while n > 0:
        result = select((n & 1) != 0, result * square, result)
        square, n = square * square, n >> 1
    unit = select(a == 1, i64(1), select(a == -1, 1 - 2 * (b & 1), i64(0)))
    return select(b < 0, unit, result)


_fma = instruction("fma.rn.f32 $0, $1, $2, $3;", f32, f32, f32, f32, pure=True)


@inline
def ratio(x, by, inverse):
    """x / by, rounded as a quotient is: what the product with the reciprocal leaves over is a float32, and so corrects it"""
    quotient = f32(x * inverse)
    rest = _fma(f32(-by), quotient, x)
    return select(rest == rest, _fma(rest, inverse, quotient), quotient)  # no rest where x is infinite


saturate = instruction("{ .reg .f32 t; max.f32 t, $1, $2; min.f32 $0, t, $3; }", f32, f32, f32, f32, pure=True)
"""Between limits, which are no NaN: as these instructions give the other operand of one, it becomes the least."""


_whole = instruction(
    "{ .reg .f32 t; max.f32 t, $1, $2; min.f32 t, t, $3; add.rn.f32 t, t, 0f4B400000; mov.b32 $0, t; }",
    i32,
    f32,
    f32,
    f32,
    pure=True,
)
rounded_within = instruction(
    "{ .reg .f32 t; max.f32 t, $1, $2; min.f32 t, t, $3; add.rn.f32 t, t, 0f4B400000; add.rn.f32 $0, t, 0fCB400000; }",
    f32, f32, f32, f32, pure=True,
)  # fmt: skip
"""To the nearest integer, halves to even ones, between small limits: 1.5 · 2^23 has no bits left for fractions."""


@inline
def whole_within(x, low, high):
    """The same as an int64."""
    return i64(i32(_whole(x, low, high) - 0x4B400000))


@inline
def bits_within(x, low, high):
    """An int64 whose lowest byte is that of the same."""
    return i64(_whole(x, low, high))


# --- casts -----------------------------------------------------------------------------------------------------------

_to_s64 = instruction("cvt.rzi.s64.f32 $0, $1;", i64, f32, pure=True)
_to_u64 = instruction("cvt.rzi.u64.f32 $0, $1;", i64, f32, pure=True)
to_float = instruction("cvt.rn.f32.s64 $0, $1;", f32, i64, pure=True)
_to_s32 = instruction("cvt.rzi.s32.f32 $0, $1;", i32, f32, pure=True)
_from_s32 = instruction("cvt.rn.f32.s32 $0, $1;", f32, i32, pure=True)
_from_byte = instruction(
    "{ .reg .b32 t; .reg .f32 u; add.s32 t, $1, 0x4B400000; mov.b32 u, t; add.rn.f32 $0, u, 0fCB400000; }", f32, i32, pure=True
)


@inline
def to_int(x):
    """x truncated and saturated, NaN gives 0"""
    return select(x == x, _to_s64(x), i64(0))


@inline
def narrow_to_int(x):
    """The same of what is within int32, at several times the rate"""
    return i64(_to_s32(x))


@inline
def narrow_to_float(x):
    """An int64 within int32 as float32, at several times the rate"""
    return _from_s32(i32(x))


@inline
def byte_to_float(x):
    """An int64 of a few bits as float32: as those of 1.5 · 2^23, which a byte's own conversion takes four times as long as"""
    return _from_byte(i32(x))


@inline
def to_unsigned(x):
    """The same for the range of uint64, as its bits"""
    return select(x == x, _to_u64(x), i64(0))


# --- division of 32-bit numbers by a launch argument -----------------------------------------------------------------

divide = instruction(
    "{ .reg .b64 t; mul.wide.u32 t, $1, $2; shr.u64 t, t, $3; cvt.u32.u64 $0, t; }", i32, i32, i32, u32, pure=True
)
"""divide(n, multiplier, shift): n // d for 0 <= n < 2**31 and (multiplier, shift) = `codegen.divider(d)`."""

# --- The table -------------------------------------------------------------------------------------------------------

NAMES: dict[str, Any] = {
    # of float32
    **{n: getattr(math, n) for n in ("exp", "log", "log1p", "expm1", "sqrt", "sin", "cos", "tan", "asin", "acos", "atan")},
    **{n: getattr(math, n) for n in ("sinh", "cosh", "tanh", "asinh", "acosh", "atanh", "erf", "isnan")},
    "floor": floor, "ceil": ceil, "rint": rint, "absolute": absolute, "power": math.pow, "fmod": fmod, "isinf": isinf,
    "trunc_div": trunc_div, "floor_mod": floor_mod, "binade": binade, "quick_div": quick_div, "quick_exp": quick_exp,
    "over": over, "quick_tanh": quick_tanh, "as_half": as_half, "larger": larger, "ratio": ratio, "saturate": saturate,
    "rounded_within": rounded_within, "whole_within": whole_within, "bits_within": bits_within,
    # of any type
    "minimum": minimum, "maximum": maximum, "select": select, "within": within,
    # of int64
    "int_absolute": int_absolute, "int_power": int_power, "int_fmod": int_fmod, "int_trunc_div": int_trunc_div,
    "int_floor_mod": int_floor_mod,
    # casts and divisions
    "to_int": to_int, "to_unsigned": to_unsigned, "to_float": to_float, "byte_to_float": byte_to_float,
    "narrow_to_int": narrow_to_int, "narrow_to_float": narrow_to_float, "divide": divide,
}  # fmt: skip
"""By the names that generated text calls them (see codegen.py)."""
