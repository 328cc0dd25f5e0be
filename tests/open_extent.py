"""tccompile/ir/extent.py as it would be if extents could be known late: for mypy, which then finds what treats one as an int.

    make extents

Nothing is run. An open extent can be computed with and compared, and no more: it is no index, no length of a range, no float.
"""

from __future__ import annotations

from typing import Protocol, overload


class UndecidedError(Exception):
    """A comparison that is true at some sizes only."""


class Open(Protocol):
    """An extent that is known late."""

    def __add__(self, other: Extent) -> Open: ...
    def __radd__(self, other: Extent) -> Open: ...
    def __sub__(self, other: Extent) -> Open: ...
    def __rsub__(self, other: Extent) -> Open: ...
    def __mul__(self, other: Extent) -> Open: ...
    def __rmul__(self, other: Extent) -> Open: ...
    def __floordiv__(self, other: Extent) -> Open: ...
    def __rfloordiv__(self, other: Extent) -> Open: ...
    def __mod__(self, other: Extent) -> Open: ...
    def __rmod__(self, other: Extent) -> Open: ...
    def __divmod__(self, other: Extent) -> tuple[Open, Open]: ...
    def __rdivmod__(self, other: Extent) -> tuple[Open, Open]: ...
    def __neg__(self) -> Open: ...
    def __lt__(self, other: Extent) -> bool: ...
    def __le__(self, other: Extent) -> bool: ...
    def __gt__(self, other: Extent) -> bool: ...
    def __ge__(self, other: Extent) -> bool: ...


Extent = int | Open

Shape = tuple[Extent, ...]


@overload
def ceil_div(n: int, d: int) -> int: ...
@overload
def ceil_div(n: Extent, d: Extent) -> Extent: ...
def ceil_div(n: Extent, d: Extent) -> Extent:
    return -(-n // d)


@overload
def round_up(n: int, multiple: int) -> int: ...
@overload
def round_up(n: Extent, multiple: Extent) -> Extent: ...
def round_up(n: Extent, multiple: Extent) -> Extent:
    return ceil_div(n, multiple) * multiple


def least(a: Extent, b: Extent) -> Extent:
    raise NotImplementedError


def greatest(a: Extent, b: Extent) -> Extent:
    raise NotImplementedError


def same(a: Extent, b: Extent) -> bool:
    raise NotImplementedError


def alike(a: Shape, b: Shape) -> bool:
    raise NotImplementedError


def divides(d: int, n: Extent) -> bool:
    raise NotImplementedError


def worth(what: str, here: bool) -> bool:
    raise NotImplementedError


def hint(extent: Extent) -> int:
    raise NotImplementedError


def most(extent: Extent) -> int:
    raise NotImplementedError
