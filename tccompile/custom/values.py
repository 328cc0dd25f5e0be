"""Values at an element of a result, of which a user's function of an elementwise operator makes the result's.

The function is called once, with these in the place of numbers. What it does with them becomes an expression (`ir/expr.py`),
which is compiled as any other: into the store of the op before it, where it can be.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, NoReturn

from tccompile.ir.evaluate import takes
from tccompile.ir.expr import FUNCTIONS, Expr, call, cast, const
from tccompile.ir.extent import Shape
from tccompile.ir.types import DType

Number = float | int | bool

TYPES = {"float32": DType.F32, "int64": DType.I64, "bool": DType.BOOL}
"""The types that values may have."""


class Value:
    """What a tensor holds at an element of the result, or what was computed of such.

    Floats are float32, integers int64. Python's operators mean what they do in Python: `/` gives a float, `//` and `%` round
    down, and integers with floats give floats. Comparisons give booleans, for `where`, `&`, `|` and `~`.
    """

    __slots__ = ("expr",)
    __hash__ = None  # type: ignore[assignment]

    def __init__(self, expr: Expr) -> None:
        self.expr = expr

    @property
    def dtype(self) -> str:
        """The type that it has here: float32, int64 or bool."""
        return self.expr.dtype.value

    def __add__(self, other: Any) -> Value:
        return _of("add", self, other)

    def __radd__(self, other: Any) -> Value:
        return _of("add", other, self)

    def __sub__(self, other: Any) -> Value:
        return _of("sub", self, other)

    def __rsub__(self, other: Any) -> Value:
        return _of("sub", other, self)

    def __mul__(self, other: Any) -> Value:
        return _of("mul", self, other)

    def __rmul__(self, other: Any) -> Value:
        return _of("mul", other, self)

    def __truediv__(self, other: Any) -> Value:
        return _of("div", self, other, floats=True)

    def __rtruediv__(self, other: Any) -> Value:
        return _of("div", other, self, floats=True)

    def __floordiv__(self, other: Any) -> Value:
        return _floor_divided(self, other)

    def __rfloordiv__(self, other: Any) -> Value:
        return _floor_divided(other, self)

    def __mod__(self, other: Any) -> Value:
        return _of("floor_mod", self, other)

    def __rmod__(self, other: Any) -> Value:
        return _of("floor_mod", other, self)

    def __pow__(self, other: Any) -> Value:
        if type(other) is int and other in (2, 3):
            return self * self if other == 2 else self * self * self
        return _of("pow", self, other)

    def __rpow__(self, other: Any) -> Value:
        return _of("pow", other, self)

    def __neg__(self) -> Value:
        return _of("neg", self)

    def __pos__(self) -> Value:
        return self

    def __abs__(self) -> Value:
        return _of("abs", self)

    def __invert__(self) -> Value:
        return _of("logical_not" if self.expr.dtype is DType.BOOL else "bit_not", self)

    def __and__(self, other: Any) -> Value:
        return _of("bit_and", self, other)

    def __rand__(self, other: Any) -> Value:
        return _of("bit_and", other, self)

    def __or__(self, other: Any) -> Value:
        return _of("bit_or", self, other)

    def __ror__(self, other: Any) -> Value:
        return _of("bit_or", other, self)

    def __xor__(self, other: Any) -> Value:
        return _of("bit_xor", self, other)

    def __rxor__(self, other: Any) -> Value:
        return _of("bit_xor", other, self)

    def __lt__(self, other: Any) -> Value:
        return _of("less", self, other)

    def __le__(self, other: Any) -> Value:
        return _of("less_equal", self, other)

    def __gt__(self, other: Any) -> Value:
        return _of("greater", self, other)

    def __ge__(self, other: Any) -> Value:
        return _of("greater_equal", self, other)

    def __eq__(self, other: Any) -> Value:  # type: ignore[override]
        return _of("equal", self, other)

    def __ne__(self, other: Any) -> Value:  # type: ignore[override]
        return ~(self == other)

    def __array_ufunc__(self, function: Any, method: str, *inputs: Any, **options: Any) -> Any:
        """NumPy's numbers leave arithmetic to it; NumPy's functions it does not take."""
        if method == "__call__" and function.__name__ in _OPERATORS and not options:
            return _OPERATORS[function.__name__](*(x if isinstance(x, Value) else x.item() for x in inputs))
        raise TypeError(f"a value differs from element to element: use tc's functions in place of NumPy's {function.__name__}")

    def __bool__(self) -> NoReturn:
        raise TypeError("what holds differs from element to element: choose by tc.where(condition, a, b), and join by & and |")

    def __float__(self) -> NoReturn:
        raise TypeError("a value differs from element to element: use tc's functions in place of math's and NumPy's")

    __int__ = __index__ = __float__

    def __getitem__(self, key: Any) -> NoReturn:
        raise TypeError("a value is that of one element, and its neighbours cannot be read: that takes a kernel (grid=…)")

    def __iter__(self) -> NoReturn:
        raise TypeError("a value is that of one element: there is nothing to go through")


_OPERATORS: dict[str, Callable[..., Any]] = {
    "add": operator.add, "subtract": operator.sub, "multiply": operator.mul, "true_divide": operator.truediv,
    "divide": operator.truediv, "floor_divide": operator.floordiv, "remainder": operator.mod, "power": operator.pow,
    "less": operator.lt, "less_equal": operator.le, "greater": operator.gt, "greater_equal": operator.ge,
    "equal": operator.eq, "not_equal": operator.ne,
}  # fmt: skip
"""NumPy's names of Python's operators: a number of NumPy's on their left asks for these."""


@dataclass(frozen=True)
class Place:
    """Where values are asked for: the result's shape, and what gives the coordinate along an axis of it."""

    shape: Shape
    coordinate: Callable[[int], Expr]


_place: ContextVar[Place | None] = ContextVar("place", default=None)


def traced(function: Callable[..., Any], arguments: Mapping[str, Any], place: Place) -> Any:
    """What a user's function makes of values and numbers, given by name, at a place."""
    token = _place.set(place)
    try:
        return function(**arguments)
    finally:
        _place.reset(token)


def as_expr(x: Any) -> Expr:
    """The expression of a value or a number."""
    if isinstance(x, Value):
        return x.expr
    if isinstance(x, bool):
        return const(x, DType.BOOL)
    if isinstance(x, int) or hasattr(x, "__index__"):
        return const(int(x), DType.I64)
    if isinstance(x, float) or (hasattr(x, "__float__") and getattr(x, "ndim", 0) == 0):
        return const(float(x))
    raise TypeError(f"{x!r} is neither a value of a tensor nor a number")


def _of(fn: str, *args: Any, floats: bool = False) -> Value:
    """A function of values and numbers, in one type: floats if any of them is one, else integers, else booleans.

    floats  integers are converted in any case
    """
    exprs = [as_expr(a) for a in args]
    kind = _common(exprs)
    if floats or (kind is DType.I64 and not takes(fn, (DType.I64,) * len(exprs))):
        kind = DType.F32
    if kind is DType.BOOL and not takes(fn, (DType.BOOL,) * len(exprs)):
        kind = DType.I64
    _check(fn, kind, len(exprs))
    return Value(call(fn, *(_cast(e, kind) for e in exprs)))


def _common(exprs: list[Expr]) -> DType:
    kinds = {e.dtype for e in exprs}
    return next(kind for kind in (DType.F32, DType.I64, DType.BOOL) if kind in kinds)


def _check(fn: str, kind: DType, count: int) -> None:
    if not takes(fn, (kind,) * count):
        raise TypeError(f"{fn} takes no {kind.value}")


def _cast(e: Expr, kind: DType) -> Expr:
    return const(e.value, kind) if e.fn == "const" and e.value is not None else cast(e, kind)


def _floor_divided(a: Any, b: Any) -> Value:
    if _common([as_expr(a), as_expr(b)]) is DType.F32:
        return _of("floor", _of("div", a, b))
    return _of("trunc_div", _of("sub", a, _of("floor_mod", a, b)), b)


# --- The functions that a user calls -----------------------------------------------------------------------------------


def _float_function(name: str) -> Callable[[Any], Value]:
    """The function of that name of one value, which is converted to a float."""

    def function(x: Any) -> Value:
        return _of(name, x, floats=True)

    function.__name__, function.__doc__ = name, f"{FUNCTIONS[name].body}, for each element."
    return function


exp, log, sqrt, rsqrt = map(_float_function, ("exp", "log", "sqrt", "rsqrt"))
sin, cos, tan, asin, acos, atan = map(_float_function, ("sin", "cos", "tan", "asin", "acos", "atan"))
sinh, cosh, tanh = map(_float_function, ("sinh", "cosh", "tanh"))
asinh, acosh, atanh = map(_float_function, ("asinh", "acosh", "atanh"))
erf, floor, ceil, round = map(_float_function, ("erf", "floor", "ceil", "round"))
relu, sigmoid, silu, gelu, softplus = map(_float_function, ("relu", "sigmoid", "silu", "gelu", "softplus"))


def where(condition: Any, a: Any, b: Any) -> Value:
    """a where the condition holds, b elsewhere; both are computed."""
    held, both = as_expr(condition), [as_expr(a), as_expr(b)]
    if held.dtype is not DType.BOOL:
        raise TypeError("the first argument of tc.where is a condition, such as x > 0")
    kind = _common(both)
    return Value(call("where", held, *(_cast(e, kind) for e in both)))


def minimum(a: Any, b: Any) -> Value:
    """The smaller one; NaN if one is."""
    return _of("min", a, b)


def maximum(a: Any, b: Any) -> Value:
    """The larger one; NaN if one is."""
    return _of("max", a, b)


def clip(x: Any, low: Any, high: Any) -> Value:
    """x between two bounds."""
    return minimum(maximum(x, low), high)


def isnan(x: Any) -> Value:
    """Whether a float is no number."""
    return _of("is_nan", x, floats=True)


def astype(x: Any, dtype: str) -> Value:
    """x as float32, int64 (towards 0) or bool (whether it is not 0)."""
    if dtype not in TYPES:
        raise TypeError(f"values are computed in {', '.join(TYPES)}, not in {dtype!r}; what is stored says out=")
    e, kind = as_expr(x), TYPES[dtype]
    if kind is DType.BOOL and e.dtype is not DType.BOOL:
        return _of("logical_not", _of("equal", x, 0))
    return Value(_cast(e, kind))


def index(axis: int) -> Value:
    """Which element of the result along an axis it is, from 0 on: an integer."""
    place, axis = _along(axis)
    return Value(place.coordinate(axis))


def size(axis: int) -> int:
    """How many elements the result has along an axis."""
    place, axis = _along(axis)
    return int(place.shape[axis])


def _along(axis: int) -> tuple[Place, int]:
    place = _place.get()
    if place is None:
        raise TypeError("tc.index and tc.size say where a result's element lies: they are for an elementwise operator's function")
    rank = len(place.shape)
    if not -rank <= axis < rank:
        raise TypeError(f"axis {axis} of a result of rank {rank}")
    return place, axis % rank
