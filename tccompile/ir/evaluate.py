"""Expressions over NumPy arrays: the bodies in `FUNCTIONS`, evaluated in float32, int64 or bool."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import cache

import numpy as np

from tccompile.ir.expr import BUILTINS, FUNCTIONS, Expr, View
from tccompile.ir.extent import Shape
from tccompile.ir.storage import convert
from tccompile.ir.types import DType

_STEPS = 32  # tabulated points of erf in a unit of x
_ERF = np.array([math.erf(i / _STEPS) for i in range(4 * _STEPS + 1)], np.float32)
_SLOPE = np.array([2 / math.sqrt(math.pi) * math.exp(-((i / _STEPS) ** 2)) for i in range(4 * _STEPS + 1)], np.float32)


def erf(x: np.ndarray) -> np.ndarray:
    """The error function to float32 accuracy: its Taylor series of four terms about the nearest tabulated point.

    From 4 on it is 1 in float32. The derivatives are Hermite polynomials times the first one (DLMF 7.10.1).
    """
    a = np.minimum(np.abs(x), 4.0)
    i = np.clip(convert(a * _STEPS + 0.5, np.int64), 0, 4 * _STEPS)
    p = i.astype(np.float32) / _STEPS
    d = a - p
    series = d * (1 + d * (-p + d * ((2 * p * p - 1) / 3 + d * (p - 2 * p * p * p / 3) / 2)))
    return np.copysign(_ERF[i] + _SLOPE[i] * series, x)


def power(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """a to the power b; for integers, a negative power is the exact result truncated (and 0 for a = 0)."""
    if np.result_type(a, b).kind == "f":
        return np.power(a, b)
    down = np.where(a == 1, 1, np.where(a == -1, 1 - 2 * (np.abs(b) & 1), 0))
    return np.where(b >= 0, np.power(a, np.maximum(b, 0)), down)


def trunc_div(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """a / b rounded toward zero; for integers, 0 where b is 0."""
    if np.result_type(a, b).kind == "f":
        return np.trunc(a / b)
    return (a - np.fmod(a, b)) // b


def binade(x: np.ndarray) -> np.ndarray:
    """The power of two that x lies between and its double, for normal float32 numbers."""
    return (np.asarray(x, np.float32).view(np.int32) & np.int32(0x7F800000)).view(np.float32)


NUMPY: dict[str, Callable] = {
    "exp": np.exp, "log": np.log, "log1p": np.log1p, "expm1": np.expm1, "sqrt": np.sqrt, "sin": np.sin, "cos": np.cos,
    "tan": np.tan, "asin": np.arcsin, "acos": np.arccos, "atan": np.arctan, "sinh": np.sinh, "cosh": np.cosh, "tanh": np.tanh,
    "asinh": np.arcsinh, "acosh": np.arccosh, "atanh": np.arctanh, "erf": erf, "floor": np.floor, "ceil": np.ceil,
    "rint": np.rint, "absolute": np.absolute, "minimum": np.minimum, "maximum": np.maximum, "where": np.where, "power": power,
    "fmod": np.fmod, "isnan": np.isnan, "isinf": np.isinf, "logical_not": np.logical_not, "trunc_div": trunc_div,
    "floor_mod": np.mod, "binade": binade, "quick_tanh": np.tanh,
}  # fmt: skip
"""What each name of `BUILTINS` is over arrays."""

assert set(NUMPY) == set(BUILTINS)


@cache
def _function(name: str) -> Callable:
    function = FUNCTIONS[name]
    return eval(f"lambda {', '.join(function.params)}: {function.body}", {"__builtins__": {}, **NUMPY})


@cache
def takes(name: str, dtypes: tuple[DType, ...]) -> bool:
    """Whether the function takes arguments of these types: there are no bits of floats, and no negatives of booleans."""
    try:
        with np.errstate(all="ignore"):
            _function(name)(*(np.ones(1, d.numpy) for d in dtypes))
    except TypeError:
        return False
    return True


def evaluate_expr(
    expr: Expr, views: tuple[View, ...], values: Mapping[str, np.ndarray], shape: Shape, acc: np.ndarray | None = None
) -> np.ndarray:
    """The expression's values: an array of its compute type that broadcasts to `shape`.

    views   what its loads read, from `values` (logical arrays in compute types, by tensor)
    acc     what the op computed, if it is an epilogue
    """
    memo: dict[int, np.ndarray] = {}  # by identity: an expression's parts are often shared

    def value(e: Expr) -> np.ndarray:
        key = id(e)
        if key not in memo:
            memo[key] = convert(np.asarray(compute(e)), e.dtype.numpy)
        return memo[key]

    def compute(e: Expr) -> np.ndarray:
        match e.fn:
            case "acc":
                assert acc is not None
                return acc
            case "const":
                return np.asarray(e.value, e.dtype.numpy)
            case "load":
                view = views[e.value]  # type: ignore[index]
                if not values[view.tensor].size:  # an index can only be clipped into an extent that is not 0
                    return np.full(shape, view.fill, e.dtype.numpy)
                return view.read(values, shape)
            case "cast":
                return value(e.args[0])
        return _function(e.fn)(*map(value, e.args))

    with np.errstate(all="ignore"):
        return value(expr)
