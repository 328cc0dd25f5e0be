"""Extents: numbers that the shapes of a model decide, and what is computed with them.

Where all shapes are known when a model is compiled, an extent is an int. In a plan for a range of sizes some are `Open`: formulas
over the sizes. Code that adds, multiplies, divides and compares extents takes both; where a plain number is needed, `hint` and
`most` say which. `make extents` lists where code relies on an int.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tccompile.errors import TccompileError

Extent = int
"""A number that shapes decide: an extent of a tensor, a stride, an offset, a size in bytes, a dimension of a grid, or a factor or
constant of an index. What no shape decides (an axis, a rank, a tile, a number of threads) is an int."""

Shape = tuple[Extent, ...]
"""One extent an axis."""


def ceil_div(n: Extent, d: Extent) -> Extent:
    """n / d, rounded up: how many parts of at most d make n."""
    return -(-n // d)


def round_up(n: Extent, multiple: Extent) -> Extent:
    """The least multiple that is no less than n."""
    return ceil_div(n, multiple) * multiple


def least(a: Extent, b: Extent) -> Extent:
    """The smaller one."""
    return _made("min", a, b) if isinstance(a, Open) or isinstance(b, Open) else min(a, b)


def greatest(a: Extent, b: Extent) -> Extent:
    """The larger one."""
    return _made("max", a, b) if isinstance(a, Open) or isinstance(b, Open) else max(a, b)


def same(a: Extent, b: Extent) -> bool:
    """Whether two extents are equal, at all sizes if they are open."""
    if not isinstance(a, Open) and not isinstance(b, Open):
        return bool(a == b)  # most are numbers, of which arrays would take long
    return bool((_values(a) == _values(b)).all())


def alike(a: Shape, b: Shape) -> bool:
    """Whether two shapes are equal, at all sizes if they are open."""
    return len(a) == len(b) and all(map(same, a, b))


def divides(d: int, n: Extent) -> bool:
    """Whether a number divides an extent, at all sizes if that is open."""
    return n % d == 0 if type(n) is type(d) is int else same(n % d, 0)


def hint(extent: Extent) -> int:
    """The number to judge an extent by: times and choices may depend on it, what is computed and what is allowed may not."""
    return int(extent.values[-1]) if isinstance(extent, Open) else extent


def fewest(extent: Extent) -> int:
    """The smallest number that it can be: what there is at all sizes."""
    return int(extent.values.min()) if isinstance(extent, Open) else extent


def most(extent: Extent) -> int:
    """The largest number that it can be: what memory is kept for."""
    return int(extent.values.max()) if isinstance(extent, Open) else extent


Asked = dict[tuple[Callable[[str, bool], bool], str, bool], bool]
"""Calls of `worth` and `possible`, with what they returned."""


@dataclass
class Decisions:
    """What has been decided by sizes while programs are made that are to be alike, by what it is about.

    made        what is worth it
    can         what is possible at all sizes so far; `differs`: some was at some of them only
    everywhere  what is possible at some sizes only is done at none of them
    asked       the last program's questions, and what was answered: one who asks the same and is told the same makes the same
    """

    made: dict[str, bool] = field(default_factory=dict)
    can: dict[str, bool] = field(default_factory=dict)
    differs: bool = False
    everywhere: bool = False
    asked: Asked = field(default_factory=dict)


decisions: ContextVar[Decisions | None] = ContextVar("decisions", default=None)
"""Those of the programs that are being made; None where they need not be alike."""


@contextmanager
def deciding(made: Decisions) -> Iterator[None]:
    """In here `worth` and `possible` decide as was decided before, and add to it."""
    token = decisions.set(made)
    try:
        yield
    finally:
        decisions.reset(token)


def not_alike() -> bool:
    """Whether programs are made that need not be alike for several sizes."""
    return decisions.get() is None


def worth(what: str, here: bool) -> bool:
    """Whether something is done that is only faster, or slower, at some sizes: as it is `here`, or was decided for other sizes.

    what  names the decision, the same at all sizes
    """
    known = decisions.get()
    if known is None:
        return here
    told = known.asked[worth, what, here] = known.made.setdefault(what, here)
    return told


def possible(what: str, here: bool) -> bool:
    """Whether something is done that is possible `here`; if programs are to be alike for that, only what is at all sizes.

    Raises ChangedError where it was done at sizes before, and cannot be here: programs are then to be made anew.
    """
    known = decisions.get()
    if known is None:
        return here
    before = known.can.get(what, here)
    known.can[what] = here and before
    known.differs |= here != before
    if known.everywhere and before and not here:
        raise ChangedError(what)
    told = known.asked[possible, what, here] = known.can[what] if known.everywhere else here
    return told


def whole(n: Any) -> Extent:
    """A number of any kind as an int; what is known late as it is."""
    return n if isinstance(n, Open) else int(n)  # type: ignore[return-value]


# --- Extents that are known late ---------------------------------------------------------------------------------------


class UndecidedError(TccompileError):
    """A decision that differs between the sizes of a range, or something that takes a number and got a formula.

    mask  at which of the range's sizes a comparison is true; None where a number was needed
    """

    def __init__(self, what: str, mask: np.ndarray | None = None) -> None:
        super().__init__(what)
        self.mask = mask


OPERATIONS: Mapping[str, Callable[[Any, Any], Any]] = {
    "+": lambda a, b: a + b,
    "-": lambda a, b: a - b,
    "*": lambda a, b: a * b,
    "//": lambda a, b: a // b,
    "%": lambda a, b: a % b,
    "min": np.minimum,
    "max": np.maximum,
    "bits": lambda a, b: np.frexp(a.astype(np.float64))[1].astype(np.int64),
    "<<": lambda a, b: np.left_shift(a, b),
    "/": lambda a, b: a / b,
}
"""What a formula is made of, on arrays. `bits` is how many bits a number below 2^53 has; its second operand stands for nothing.
`/` gives a float, with which nothing else is computed."""


class ChangedError(UndecidedError):
    """What was decided for some sizes cannot be for others: it is decided otherwise now, and programs are to be made anew."""


class Open:
    """An extent that is known late: a size of a range, or a formula over them.

    op      "size", or one of OPERATIONS
    args    the size's name, or two operands, each an Open or an int
    values  what it is at each of the sizes for which something is compiled, in one order for all extents

    Arithmetic gives formulas, or an int where that is the same at all sizes. A comparison is true or false where it is so at all
    sizes; else it raises UndecidedError, as does whatever needs a number.
    """

    __slots__ = ("args", "op", "values")

    def __init__(self, op: str, args: tuple[Any, ...], values: np.ndarray) -> None:
        self.op, self.args, self.values = op, args, values

    def __repr__(self) -> str:
        if self.op == "size":
            return str(self.args[0])
        return f"({self.args[0]!r} {self.op} {self.args[1]!r})"

    def __add__(self, other: Any) -> Any:
        return _made("+", self, other)

    def __radd__(self, other: Any) -> Any:
        return _made("+", other, self)

    def __sub__(self, other: Any) -> Any:
        return _made("-", self, other)

    def __rsub__(self, other: Any) -> Any:
        return _made("-", other, self)

    def __mul__(self, other: Any) -> Any:
        return _made("*", self, other)

    def __rmul__(self, other: Any) -> Any:
        return _made("*", other, self)

    def __floordiv__(self, other: Any) -> Any:
        return _made("//", self, other)

    def __rfloordiv__(self, other: Any) -> Any:
        return _made("//", other, self)

    def __mod__(self, other: Any) -> Any:
        return _made("%", self, other)

    def __rmod__(self, other: Any) -> Any:
        return _made("%", other, self)

    def __truediv__(self, other: Any) -> Any:
        return _made("/", self, other)

    def __rtruediv__(self, other: Any) -> Any:
        return _made("/", other, self)

    def __divmod__(self, other: Any) -> Any:
        return self // other, self % other

    def __rdivmod__(self, other: Any) -> Any:
        return other // self, other % self

    def __neg__(self) -> Any:
        return _made("-", 0, self)

    def __rlshift__(self, other: Any) -> Any:
        return _made("<<", other, self)

    def bit_length(self) -> Any:
        """As an int's."""
        return _made("bits", self, 0)

    def __lt__(self, other: Any) -> bool:
        return _decided(self, other, "<", np.less)

    def __le__(self, other: Any) -> bool:
        return _decided(self, other, "<=", np.less_equal)

    def __gt__(self, other: Any) -> bool:
        return _decided(self, other, ">", np.greater)

    def __ge__(self, other: Any) -> bool:
        return _decided(self, other, ">=", np.greater_equal)

    def __eq__(self, other: Any) -> bool:
        return _decided(self, other, "==", np.equal)

    def __ne__(self, other: Any) -> bool:
        return _decided(self, other, "!=", np.not_equal)

    def __bool__(self) -> bool:
        return _decided(self, 0, "!=", np.not_equal)

    def __hash__(self) -> int:
        return hash(self.values.tobytes())

    def __index__(self) -> int:
        raise UndecidedError(f"{self!r} is known late, where a number is needed")

    __int__ = __float__ = __index__


def _made(op: str, a: Any, b: Any) -> Any:
    """A formula, or the number that it is at all sizes."""
    if not all(isinstance(x, Open | int | np.integer) for x in (a, b)):
        return NotImplemented
    with np.errstate(divide="ignore"):
        values = OPERATIONS[op](_values(a), _values(b))
    if op == "/":
        return Open(op, (a, b), values)
    first = values.flat[0]
    if (values == first).all():
        return first.item()
    for same in (a, b):
        if isinstance(same, Open) and (same.values == values).all():
            return same
    return Open(op, (a, b), values)


def _values(x: Any) -> np.ndarray:
    return x.values if isinstance(x, Open) else np.asarray(x, np.int64)


def _decided(a: Any, b: Any, op: str, compare: Callable[[Any, Any], np.ndarray]) -> bool:
    if not isinstance(b, Open | int | float | np.integer):
        return NotImplemented  # type: ignore[return-value]
    mask = compare(a.values, b.values if isinstance(b, Open) else b)
    if mask.all():
        return True
    if not mask.any():
        return False
    raise UndecidedError(f"{a!r} {op} {b!r} is true at some sizes and false at others", mask)
