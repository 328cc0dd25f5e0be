"""Trees of dataclasses whose integers depend on sizes: one tree for all sizes, with slots, and formulas that fill them.

A plan for a range of sizes holds such a tree for its steps. Nothing here knows what the tree means.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from math import gcd
from typing import Any, NamedTuple

import numpy as np

from tccompile.errors import PlanError
from tccompile.ir.extent import Extent, Open, greatest, least
from tccompile.ir.types import DType
from tccompile.sizes import Size

LIMIT = 1 << 62
"""What formulas compute is smaller than this, and not smaller than its negative."""

SHIFTS = 62
"""Bits by which a formula may shift to the left, at most."""


Formula = tuple[str, int, int]
"""One step of computing: an operation of two numbers, each the result of an earlier formula, by its position. The operation is
one of OPERATIONS; or "size", whose first number is the size's position; or "int", whose first number is the result."""


def _bits(a: Any, b: Any) -> Any:
    return a.bit_length()


def _shifted(a: Any, b: Any) -> Any:
    if not 0 <= b <= SHIFTS:
        raise PlanError(f"a formula shifts by {b} bits")
    return a << b


def _divided(a: Any, b: Any) -> Any:
    if b <= 0:
        raise PlanError(f"a formula divides by {b}")
    return a // b


def _rest(a: Any, b: Any) -> Any:
    if b <= 0:
        raise PlanError(f"a formula divides by {b}")
    return a % b


def _ratio(a: Any, b: Any) -> Any:
    if b == 0:
        raise PlanError("a formula divides by 0")
    return a / b


OPERATIONS: Mapping[str, Callable[[Any, Any], Any]] = {
    "+": lambda a, b: a + b,
    "-": lambda a, b: a - b,
    "*": lambda a, b: a * b,
    "//": _divided,
    "%": _rest,
    "min": least,
    "max": greatest,
    "bits": _bits,
    "<<": _shifted,
    "/": _ratio,
}
"""On two numbers; of "bits" the second one is not used."""


def check_formulas(formulas: Sequence[Formula], sizes: int) -> None:
    """Raises PlanError for formulas that read what there is not, or not yet, of so many sizes."""
    for i, (op, a, b) in enumerate(formulas):
        known = op == "int" or (op == "size" and 0 <= a < sizes) or (op in OPERATIONS and 0 <= a < i and 0 <= b < i)
        if not known:
            raise PlanError(f"formula {i} is {op!r} of {a} and {b}")
        if op in OPERATIONS and "/" in (formulas[a][0], formulas[b][0]):
            raise PlanError(f"formula {i} computes with a quotient, which only a launch's floats may be")


def computed(formulas: Sequence[Formula], sizes: Sequence[Extent]) -> list[Extent]:
    """What each formula gives at these sizes, numbers or open ones.

    Raises PlanError for a division by what is not above 0, and for numbers of 62 bits and more.
    """
    out: list[Extent] = []
    for op, a, b in formulas:
        if op == "int":
            value: Extent = a
        elif op == "size":
            value = sizes[a]
        else:
            value = OPERATIONS[op](out[a], out[b])
        if not isinstance(value, Open) and not -LIMIT < value < LIMIT:
            raise PlanError(f"a formula gives {value}")
        out.append(value)
    return out


class Slot(NamedTuple):
    """Stands in a tree for what a formula gives."""

    number: int


Maker = Callable[[Sequence[Extent]], Any]
"""Makes a part of a tree of what formulas give."""


def filler(tree: Any) -> Maker:
    """What makes the tree for given sizes, of what `computed` gives. What has no slots is shared by all that it makes."""
    return _maker(tree) or (lambda numbers: tree)


def _maker(tree: Any) -> Maker | None:
    """None for a tree without slots."""
    if type(tree) in PLAIN:
        return None
    if type(tree) is Slot:
        number = tree.number
        return lambda numbers: numbers[number]
    if isinstance(tree, tuple | list):
        return None if PLAIN.issuperset(map(type, tree)) else _many(enumerate(tree), list, tuple, tree)
    if isinstance(tree, Mapping):
        return _many(tree.items(), dict, None, tree)
    if names := names_of(type(tree)):
        own, cls = {name: getattr(tree, name) for name in names}, type(tree)
        whole = _many(own.items(), dict, None, own)
        return whole and (lambda numbers: cls(**whole(numbers)))
    return None


def _many(
    parts: Iterable[tuple[Any, Any]], copied: Callable[[Any], Any], kept: Callable[[Any], Any] | None, whole: Any
) -> Maker | None:
    """The maker of something with these parts: a copy of it in which those with slots are replaced."""
    makers = [(key, maker) for key, part in parts if (maker := _maker(part)) is not None]
    if not makers:
        return None

    def make(numbers: Sequence[Extent]) -> Any:
        out = copied(whole)
        for key, maker in makers:
            out[key] = maker(numbers)
        return kept(out) if kept else out

    return make


def slots(tree: Any) -> int:
    """One more than the largest slot of a tree; 0 without any."""
    return max(used(tree), default=-1) + 1


def used(tree: Any) -> set[int]:
    """The slots of a tree."""
    found, left = set[int](), [tree]
    while left:
        part = left.pop()
        if type(part) in PLAIN:
            continue
        if type(part) is Slot:
            found.add(part.number)
        elif isinstance(part, tuple | list):
            if not PLAIN.issuperset(map(type, part)):
                left += part
        elif isinstance(part, Mapping):
            left += part.values()
        else:
            left += [getattr(part, name) for name in names_of(type(part))]
    return found


PLAIN = frozenset((int, str, float, bool, bytes, type(None), DType, np.ndarray))
"""Types that hold no other parts of a tree; most parts are of these."""


_fields: dict[type, tuple[str, ...]] = {}


def names_of(cls: type) -> tuple[str, ...]:
    """The fields of a class of dataclasses; none of others."""
    if cls not in _fields:
        _fields[cls] = tuple(f.name for f in fields(cls)) if is_dataclass(cls) else ()
    return _fields[cls]


def integers(numbers: Sequence[Any]) -> np.ndarray:
    """What `computed` gives of numbers; quotients, which are for launches' floats alone, are 0 in it."""
    return np.array([n if type(n) is int else 0 for n in numbers], np.int64)


class Span(NamedTuple):
    """What a formula is at all sizes of a family: no less and no more than these, and a multiple of that."""

    low: int
    high: int
    multiple: int


ANY = Span(-LIMIT, LIMIT, 1)


def spans(formulas: Sequence[Formula], sizes: Sequence[Size]) -> list[Span]:
    """The span of each formula, or a wider one; of a quotient, with which nothing is computed, none."""
    out: list[Span] = []
    for op, a, b in formulas:
        if op == "int":
            out.append(Span(a, a, abs(a)))
        elif op == "size":
            size = sizes[a]
            out.append(Span(size.low, size.all[-1], gcd(size.low, size.step if len(size.all) > 1 else 0)))
        elif op == "/":
            out.append(Span(0, 0, 0))
        else:
            span = _span(op, out[a], out[b])
            out.append(span if span.low > -LIMIT and span.high < LIMIT else ANY)
    return out


def _span(op: str, a: Span, b: Span) -> Span:
    either = gcd(a.multiple, b.multiple)
    match op:
        case "+":
            return Span(a.low + b.low, a.high + b.high, either)
        case "-":
            return Span(a.low - b.high, a.high - b.low, either)
        case "*":
            products = [x * y for x in a[:2] for y in b[:2]]
            return Span(min(products), max(products), a.multiple * b.multiple)
        case "//" if b.low > 0:
            quotients = [x // y for x in a[:2] for y in b[:2]]
            exact = b.low == b.high and a.multiple % b.low == 0
            return Span(min(quotients), max(quotients), a.multiple // b.low if exact else 1)
        case "%" if b.low > 0:
            return Span(0, b.high - 1, either)
        case "min":
            return Span(min(a.low, b.low), min(a.high, b.high), either)
        case "max":
            return Span(max(a.low, b.low), max(a.high, b.high), either)
        case "bits" if a.low >= 0:
            return Span(a.low.bit_length(), a.high.bit_length(), 1)
        case "<<" if a.low >= 0 and 0 <= b.low <= b.high <= SHIFTS:
            return Span(a.low << b.low, a.high << b.high, a.multiple << b.low)
    return ANY


ALL = 1 << 22
"""Numbers up to which formulas are computed at all sizes when a plan is opened."""

UNCHECKED: Mapping[str, Callable[[Any, Any], Any]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "//": operator.floordiv,
    "%": operator.mod,
    "min": min,
    "max": max,
    "bits": _bits,
    "<<": operator.lshift,
    "/": operator.truediv,
}
"""OPERATIONS on numbers of which it is known that they give numbers."""

ARRAYS: Mapping[str, Callable[[Any, Any], Any]] = {
    **UNCHECKED,
    "min": np.minimum,
    "max": np.maximum,
    "bits": lambda a, b: np.frexp(a.astype(np.float64))[1],
    "<<": lambda a, b: a * 2**b,
}
"""The same on arrays; of "bits" numbers below EXACT."""

EXACT = 1 << 53


KEPT = 1 << 18
"""Numbers up to which what formulas give at all sizes is kept: a megabyte, if none has more than 32 bits."""


class Prepared:
    """Formulas that are computed again and again.

    known   what they give at all sizes, as `everywhere` says: then numbers are not looked at again, and of few sizes only found
    needed  those whose numbers are asked for, if not all: where formulas are known, others may be 0
    """

    def __init__(
        self, formulas: Sequence[Formula], sizes: Sequence[Size], known: np.ndarray | None, needed: Collection[int] | None = None
    ):
        self.formulas, self._sizes = formulas, [size.all for size in sizes]
        self._proven = known is not None
        wanted = {*range(len(formulas))} if needed is None else {*needed}
        self._quotients = [(i, a, b) for i, (op, a, b) in enumerate(formulas) if op == "/" and i in wanted]
        wanted |= {n for _, a, b in self._quotients for n in (a, b)}
        self._columns = np.array(sorted(wanted), np.int64)
        few = known is not None and len(wanted) * known.shape[1] <= KEPT
        self._kept = _narrow(known[self._columns].T) if known is not None and few else None
        for i in range(len(formulas) - 1, -1, -1):  # what is computed on the way
            op, a, b = formulas[i]
            if i in wanted and op in UNCHECKED:
                wanted |= {a, b}
        self._numbers = [a if op == "int" else 0 for op, a, _ in formulas]
        self._of_sizes = [(i, a) for i, (op, a, _) in enumerate(formulas) if op == "size"]
        self._steps = [(i, UNCHECKED[op], a, b) for i, (op, a, b) in enumerate(formulas) if op in UNCHECKED and i in wanted]

    @property
    def kept(self) -> int | None:
        """How many sizes there are, if numbers of all of them are kept."""
        return None if self._kept is None else len(self._kept)

    def whole(self, row: int) -> np.ndarray:
        """The numbers that are kept of sizes, by their row."""
        assert self._kept is not None
        out = np.zeros(len(self.formulas), np.int64)
        out[self._columns] = self._kept[row]
        return out

    def at(self, sizes: Sequence[int]) -> tuple[list[Any], np.ndarray]:
        """What `computed` gives at these sizes, which are some of all, and that as `integers`."""
        if self._kept is not None:
            whole = self.whole(self.row(sizes))
            numbers: list[Any] = whole.tolist()
            for i, a, b in self._quotients:
                numbers[i] = numbers[a] / numbers[b]
            return numbers, whole
        numbers = self._computed(sizes) if self._proven else computed(self.formulas, sizes)
        return numbers, self._integers(numbers)

    def row(self, sizes: Sequence[int]) -> int:
        """Which of all sizes these are."""
        row = 0
        for size, every in zip(sizes, self._sizes, strict=True):
            row = row * len(every) + every.index(size)
        return row

    def _computed(self, sizes: Sequence[int]) -> list[Any]:
        out: list[Any] = self._numbers.copy()
        for i, size in self._of_sizes:
            out[i] = sizes[size]
        for i, operation, a, b in self._steps:
            out[i] = operation(out[a], out[b])
        return out

    def _integers(self, numbers: Sequence[Any]) -> np.ndarray:
        whole = list(numbers)
        for i, _, _ in self._quotients:
            whole[i] = 0
        return np.array(whole, np.int64)


def _narrow(known: np.ndarray) -> np.ndarray:
    """A copy, in 32 bits if none of the numbers needs more."""
    small = np.abs(known).max(initial=0) < 1 << 31
    return np.ascontiguousarray(known, np.int32 if small else np.int64)


def everywhere(formulas: Sequence[Formula], sizes: Sequence[Size], found: Sequence[Span]) -> np.ndarray | None:
    """What each formula is, a row, at all sizes, as `integers`; None if these are many, or if some formula gives no number.

    found  the formulas' spans
    """
    count = math.prod(len(size.all) for size in sizes)
    known = [n for span in found if span != ANY for n in span[:2]]
    if count * len(formulas) > ALL or not all(-LIMIT < n < LIMIT for n in (*known, *(size.all[-1] for size in sizes))):
        return None
    columns = np.meshgrid(*(np.array(size.all, np.int64) for size in sizes), indexing="ij")
    out = np.zeros((len(formulas), count), np.int64)
    for i, (op, a, b) in enumerate(formulas):
        if op == "int":
            out[i] = a
        elif op == "size":
            out[i] = columns[a].reshape(-1)
        elif (found[i] == ANY or op in ("/", "bits")) and not _gives_numbers(op, out[a], out[b]):
            return None
        elif op != "/":
            out[i] = ARRAYS[op](out[a], out[b])
    return out


def narrowed(found: Sequence[Span], known: np.ndarray) -> list[Span]:
    """Spans with what formulas are at all sizes, as `everywhere` says, in the place of what they might be: of a quotient of two
    that grow together, a span knows each alone."""
    least, most = known.min(1).tolist(), known.max(1).tolist()
    return [Span(low, high, span.multiple) for low, high, span in zip(least, most, found, strict=True)]


def _gives_numbers(op: str, a: np.ndarray, b: np.ndarray) -> bool:
    """Whether an operation on arrays gives what `computed` would, with no more bits than that takes."""
    if op == "bits":
        return bool((np.abs(a) < EXACT).all())
    if (op in ("//", "%", "/") and (b <= 0).any()) or (op == "<<" and ((b < 0) | (b > SHIFTS)).any()):
        return False
    return op in ("%", "/") or bool((np.abs(ARRAYS[op](a.astype(np.float64), b.astype(np.float64))) < LIMIT / 2).all())


# --- From open extents -------------------------------------------------------------------------------------------------


def drawn(tree: Any, sizes: Sequence[str]) -> tuple[tuple[Formula, ...], Any]:
    """A tree with open extents as formulas over the sizes of these names, and the same tree with slots."""
    table = _Table(sizes)
    tree = table.visit(tree)
    return tuple(table.formulas), tree


class _Table:
    """The formulas of open extents, each once, in an order in which they can be computed."""

    def __init__(self, sizes: Sequence[str]) -> None:
        self.sizes = list(sizes)
        self.formulas: list[Formula] = []
        self.known: dict[Any, int] = {}

    def visit(self, tree: Any) -> Any:
        """The tree with slots."""
        cls = type(tree)
        if cls in PLAIN:
            return tree
        if cls is Open:
            return Slot(self.number(tree))
        if isinstance(tree, tuple | list):
            if PLAIN.issuperset(map(type, tree)):
                return tree
            parts = [self.visit(part) for part in tree]
            return tree if all(map(operator.is_, parts, tree)) else tuple(parts)
        if names := names_of(cls):
            parts = [getattr(tree, name) for name in names]
            made = [part if type(part) in PLAIN else self.visit(part) for part in parts]
            return tree if all(map(operator.is_, made, parts)) else cls(**dict(zip(names, made, strict=True)))
        if isinstance(tree, Mapping):
            made = [part if type(part) in PLAIN else self.visit(part) for part in tree.values()]
            return tree if all(map(operator.is_, made, tree.values())) else dict(zip(tree, made, strict=True))
        return tree

    def number(self, extent: Any) -> int:
        """The position of the formula that gives an extent."""
        if not isinstance(extent, Open):
            return self._put(("int", extent, 0))
        if (found := self.known.get(id(extent))) is None:
            if extent.op == "size":
                found = self._put(("size", self.sizes.index(extent.args[0]), 0))
            else:
                a, b = map(self.number, extent.args)
                found = self._put((extent.op, a, b))
            self.known[id(extent)] = found
        return found

    def _put(self, formula: Formula) -> int:
        if formula not in self.known:
            self.known[formula] = len(self.formulas)
            self.formulas.append(formula)
        return self.known[formula]
