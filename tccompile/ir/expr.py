"""Index arithmetic, views and pointwise expressions: what every op's meaning and every kernel's code are written in.

An `Index` is an integer expression over the coordinates of an output element, a `View` reads one tensor at such
indices, and an `Expr` computes a value from views, constants and (in an epilogue) the value that the op computed.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

import numpy as np

from tccompile.errors import InputError
from tccompile.ir.extent import Extent, Shape, ceil_div, not_alike, possible
from tccompile.ir.extent import greatest as larger
from tccompile.ir.extent import least as smaller
from tccompile.ir.types import DType

# --- Index -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Coord:
    """The output element's coordinate along `axis`."""

    axis: int


@dataclass(frozen=True)
class Quotient:
    """floor(index / divisor)"""

    index: Index
    divisor: Extent


@dataclass(frozen=True)
class Remainder:
    """index - divisor * floor(index / divisor), so never negative"""

    index: Index
    divisor: Extent


@dataclass(frozen=True)
class Least:
    """The smaller of two indices."""

    a: Index
    b: Index


@dataclass(frozen=True)
class Greatest:
    """The larger of two indices."""

    a: Index
    b: Index


@dataclass(frozen=True)
class Element:
    """The element of an integer tensor at `index` (one per axis), as an index into an axis of `extent` elements.

    Negative elements count from the axis's end. Others outside the axis are clamped into it on a GPU and an InputError on
    the CPU. Where `index` itself lies outside the tensor, which only a view with `valid` may ask for, it is any in the axis.
    """

    tensor: str
    index: tuple[Index, ...]
    extent: Extent


Atom = Coord | Quotient | Remainder | Least | Greatest | Element


@dataclass(frozen=True)
class Index:
    """`sum(coefficient * atom) + constant`, with terms in a canonical order: equal expressions compare equal."""

    terms: tuple[tuple[Atom, Extent], ...] = ()
    constant: Extent = 0

    def __add__(self, other: Index | Extent) -> Index:
        if not isinstance(other, Index):
            return Index(self.terms, self.constant + other)
        if not self.terms or not other.terms:
            return Index(self.terms or other.terms, self.constant + other.constant)
        total = dict(self.terms)
        for atom, k in other.terms:
            total[atom] = total.get(atom, 0) + k
        return _index(total, self.constant + other.constant)

    __radd__ = __add__

    def __mul__(self, k: Extent) -> Index:
        if type(k) is int and k == 1:  # an open one would not say
            return self
        return _index({atom: c * k for atom, c in self.terms}, self.constant * k)

    __rmul__ = __mul__

    def __neg__(self) -> Index:
        return self * -1

    def __sub__(self, other: Index | Extent) -> Index:
        return self + (-other)

    def bounds(self, shape: Shape) -> tuple[Extent, Extent]:
        """The least and greatest value (both included, perhaps not tight) over an output of this shape."""
        lo = hi = self.constant
        for atom, k in self.terms:
            a, b = _bounds(atom, shape)
            lo, hi = lo + smaller(k * a, k * b), hi + larger(k * a, k * b)
        return lo, hi

    def at(self, indices: Sequence[Index], shape: Shape) -> Index:
        """This expression with coordinate i replaced by `indices[i]`, which range over an output of `shape`."""
        out = Index((), self.constant)
        for atom, k in self.terms:
            out = out + _at(atom, indices, shape) * k
        return out

    def evaluate(self, shape: Shape, values: Mapping[str, np.ndarray] = MappingProxyType({})) -> np.ndarray:
        """Its values over an output of `shape`: an int64 array that broadcasts to it, of size 1 in every unused axis.

        values  the tensors that its elements are of, logical arrays by name. Raises InputError for one outside its axis
        """
        out = np.full((1,) * len(shape), self.constant, np.int64)
        for atom, k in self.terms:
            out = out + k * _evaluate(atom, shape, values)
        return out

    def renamed(self, names: Mapping[str, str]) -> Index:
        """This expression with tensors called by other names."""
        return _index({_renamed(atom, names): k for atom, k in self.terms}, self.constant)

    @property
    def elements(self) -> Iterator[Element]:
        """The elements of tensors that occur in it, at any depth."""
        for atom, _ in self.terms:
            if isinstance(atom, Element):
                yield atom
            for inner in parts(atom):
                yield from inner.elements

    @property
    def affine(self) -> dict[int, Extent] | None:
        """Coefficient by axis if only coordinates occur in it, else None."""
        if all(isinstance(atom, Coord) for atom, _ in self.terms):
            return {atom.axis: k for atom, k in self.terms}  # type: ignore[union-attr]
        return None


def _index(terms: dict[Atom, Extent], constant: Extent) -> Index:
    kept = [(a, k) for a, k in terms.items() if k]
    if len(kept) > 1:
        kept.sort(key=_order)
    return Index(tuple(kept), constant)


def _order(term: tuple[Atom, Extent]) -> tuple[bool, int, str]:
    """What terms are sorted by: coordinates come first."""
    atom = term[0]
    return (False, atom.axis, "") if isinstance(atom, Coord) else (True, 0, repr(atom))


def parts(atom: Atom) -> tuple[Index, ...]:
    """The indices that an atom is made of."""
    match atom:
        case Coord():
            return ()
        case Quotient(index, _) | Remainder(index, _):
            return (index,)
        case Least(a, b) | Greatest(a, b):
            return a, b
        case Element(_, index, _):
            return index


def coord(axis: int) -> Index:
    return Index(((Coord(axis), 1),))


def constant(value: Extent) -> Index:
    return Index((), value)


def element(tensor: str, index: Sequence[Index], extent: Extent) -> Index:
    """What an integer tensor holds at `index`, as an index into an axis of `extent`: see `Element`."""
    return Index(((Element(tensor, tuple(index), extent), 1),))


def quotient(index: Index, divisor: Extent, shape: Shape) -> Index:
    """floor(index / divisor), simplified with what `shape` says of the coordinates' ranges."""
    whole, rest = _divide(index, divisor)
    lo, hi = rest.bounds(shape)
    if _simpler("quotient", (rest,), lo // divisor == hi // divisor):
        return whole + lo // divisor
    parts = _scaled(rest, divisor, shape)
    if _simpler("scaled", (rest,), parts is not None) and parts is not None:
        g, high, _ = parts
        return whole + quotient(high, divisor // g, shape)
    match rest:
        case Index(((Quotient(inner, k), 1),), 0):  # floor(floor(i / k) / d) = floor(i / (k * d))
            return whole + quotient(inner, k * divisor, shape)
    return whole + Index(((Quotient(rest, divisor), 1),))


def remainder(index: Index, divisor: Extent, shape: Shape) -> Index:
    """index mod divisor (never negative), simplified with what `shape` says of the coordinates' ranges."""
    _, rest = _divide(index, divisor)
    lo, hi = rest.bounds(shape)
    if _simpler("remainder", (rest,), lo // divisor == hi // divisor):
        return rest - divisor * (lo // divisor)
    parts = _scaled(rest, divisor, shape)
    if _simpler("scaled", (rest,), parts is not None) and parts is not None:
        g, high, low = parts
        return remainder(high, divisor // g, shape) * g + low
    return Index(((Remainder(rest, divisor), 1),))


def least(a: Index, b: Index, shape: Shape) -> Index:
    (alo, ahi), (blo, bhi) = a.bounds(shape), b.bounds(shape)
    if _simpler("least is first", (a, b), ahi <= blo):
        return a
    return b if _simpler("least is second", (a, b), bhi <= alo) else Index(((Least(a, b), 1),))


def greatest(a: Index, b: Index, shape: Shape) -> Index:
    (alo, ahi), (blo, bhi) = a.bounds(shape), b.bounds(shape)
    if _simpler("greatest is first", (a, b), alo >= bhi):
        return a
    return b if _simpler("greatest is second", (a, b), blo >= ahi) else Index(((Greatest(a, b), 1),))


def always_inside(index: Index, low: Extent, high: Extent, shape: Shape) -> bool:
    """Whether low <= index < high for all elements of an output of `shape`, so that nobody has to look."""
    lo, hi = index.bounds(shape)
    return _simpler("inside", (index,), lo >= low and hi < high)


def _simpler(what: str, of: Sequence[Index], here: bool) -> bool:
    """Whether something is left out that changes nothing here; of programs that are to be alike, in all or none of them."""
    return here if not_alike() else possible(" ".join((what, *map(_kind, of))), here)


def _kind(index: Index) -> str:
    """What an index is made of, without numbers: the same at all sizes."""
    return f"({', '.join(_kind_of_atom(atom) for atom, _ in index.terms)})"


def _kind_of_atom(atom: Atom) -> str:
    match atom:
        case Coord(axis):
            return str(axis)
        case Element(tensor):
            return tensor
    return type(atom).__name__ + "".join(map(_kind, parts(atom)))


def _divide(index: Index, divisor: Extent) -> tuple[Index, Index]:
    """index = divisor * whole + rest, with the terms that divide evenly in `whole` and 0 <= rest.constant < divisor."""
    whole = {a: k // divisor for a, k in index.terms if k % divisor == 0}
    rest = {a: k for a, k in index.terms if k % divisor}
    return _index(whole, index.constant // divisor), _index(rest, index.constant % divisor)


def _scaled(index: Index, divisor: Extent, shape: Shape) -> tuple[Extent, Index, Index] | None:
    """index = g * high + low for the largest g > 1 that divides `divisor` and leaves 0 <= low < g; None if there is none.

    Then floor(index / divisor) = floor(high / (divisor / g)), and the remainder is g times high's plus low.
    """
    for g in sorted({math.gcd(k, divisor) for _, k in index.terms} - {1}, reverse=True):
        high, low = _divide(index, g)
        lo, hi = low.bounds(shape)
        if lo >= 0 and hi < g:
            return g, high, low
    return None


def _bounds(atom: Atom, shape: Shape) -> tuple[Extent, Extent]:
    match atom:
        case Coord(axis):
            return 0, larger(shape[axis] - 1, 0)
        case Quotient(index, k):
            lo, hi = index.bounds(shape)
            return lo // k, hi // k
        case Remainder(index, k):
            return 0, k - 1
        case Least(a, b):
            (alo, ahi), (blo, bhi) = a.bounds(shape), b.bounds(shape)
            lo, hi = smaller(alo, blo), smaller(ahi, bhi)
            return (lo, hi) if (a + b).terms else (lo, smaller(hi, (a + b).constant // 2))  # min(i, c - i) <= c / 2
        case Greatest(a, b):
            (alo, ahi), (blo, bhi) = a.bounds(shape), b.bounds(shape)
            lo, hi = larger(alo, blo), larger(ahi, bhi)
            return (lo, hi) if (a + b).terms else (larger(lo, ceil_div((a + b).constant, 2)), hi)  # max(i, c - i) >= c / 2
        case Element(_, _, extent):
            return 0, larger(extent - 1, 0)


def _at(atom: Atom, indices: Sequence[Index], shape: Shape) -> Index:
    match atom:
        case Coord(axis):
            return indices[axis]
        case Quotient(index, k):
            return quotient(index.at(indices, shape), k, shape)
        case Remainder(index, k):
            return remainder(index.at(indices, shape), k, shape)
        case Least(a, b):
            return least(a.at(indices, shape), b.at(indices, shape), shape)
        case Greatest(a, b):
            return greatest(a.at(indices, shape), b.at(indices, shape), shape)
        case Element(tensor, index, extent):
            return element(tensor, [i.at(indices, shape) for i in index], extent)


def _renamed(atom: Atom, names: Mapping[str, str]) -> Atom:
    match atom:
        case Coord():
            return atom
        case Quotient(index, k) | Remainder(index, k):
            return type(atom)(index.renamed(names), k)
        case Least(a, b) | Greatest(a, b):
            return type(atom)(a.renamed(names), b.renamed(names))
        case Element(tensor, index, extent):
            return Element(names.get(tensor, tensor), tuple(i.renamed(names) for i in index), extent)


def _evaluate(atom: Atom, shape: Shape, values: Mapping[str, np.ndarray]) -> np.ndarray:
    match atom:
        case Coord(axis):
            return np.arange(shape[axis], dtype=np.int64).reshape([-1 if i == axis else 1 for i in range(len(shape))])
        case Quotient(index, k):
            return index.evaluate(shape, values) // k
        case Remainder(index, k):
            return index.evaluate(shape, values) % k
        case Least(a, b):
            return np.minimum(a.evaluate(shape, values), b.evaluate(shape, values))
        case Greatest(a, b):
            return np.maximum(a.evaluate(shape, values), b.evaluate(shape, values))
        case Element(tensor, index, extent):
            found = _at_indices(values[tensor], index, shape, values)
            wrong = found[(found < -extent) | (found >= extent)]
            if wrong.size:
                raise InputError(f"{tensor!r} holds the index {wrong.flat[0]} into an axis of {extent} elements")
            return np.where(found < 0, found + extent, found)


# --- View ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Range:
    """The condition `low <= index < high` on an output element."""

    index: Index
    low: Extent
    high: Extent


@dataclass(frozen=True)
class View:
    """Reads `tensor` for each output element at `index` (one per axis of the tensor, in its logical order).

    Where a condition in `valid` does not hold, nothing is read and the value is `fill`.
    """

    tensor: str
    index: tuple[Index, ...]
    valid: tuple[Range, ...] = ()
    fill: float = 0.0

    @property
    def tensors(self) -> tuple[str, ...]:
        """All tensors that it reads: its own, and those whose elements are indices."""
        indices = (*self.index, *(r.index for r in self.valid))
        return tuple(dict.fromkeys((self.tensor, *(e.tensor for i in indices for e in i.elements))))

    def renamed(self, names: Mapping[str, str]) -> View:
        """This view of tensors that are called by other names."""
        index, valid = (i.renamed(names) for i in self.index), (replace(r, index=r.index.renamed(names)) for r in self.valid)
        return View(names.get(self.tensor, self.tensor), tuple(index), tuple(valid), self.fill)

    def at(self, indices: Sequence[Index], shape: Shape) -> View:
        """This view with output coordinate i replaced by `indices[i]`, which range over an output of `shape`."""
        valid = []
        for r in self.valid:
            index = r.index.at(indices, shape)
            if not always_inside(index, r.low, r.high, shape):
                valid.append(Range(index, r.low, r.high))
        return View(self.tensor, tuple(i.at(indices, shape) for i in self.index), tuple(valid), self.fill if valid else 0.0)

    def read(self, values: Mapping[str, np.ndarray], shape: Shape) -> np.ndarray:
        """What it reads from `values` (logical arrays by tensor), broadcastable to an output of `shape`."""
        x = values[self.tensor]
        out = _sliced(self.index, x, shape)
        if out is None:
            out = _at_indices(x, self.index, shape, values)
        if not self.valid:
            return out
        inside = np.ones((1,) * len(shape), bool)
        for r in self.valid:
            i = r.index.evaluate(shape, values)
            inside = inside & (i >= r.low) & (i < r.high)
        return np.where(inside, out, np.asarray(self.fill, x.dtype))


def _at_indices(x: np.ndarray, index: tuple[Index, ...], shape: Shape, values: Mapping[str, np.ndarray]) -> np.ndarray:
    """The elements of x at an index (clipped into x) for each element of an output of `shape`."""
    if not index:
        return x.reshape((1,) * len(shape))
    where = [np.clip(i.evaluate(shape, values), 0, n - 1) for i, n in zip(index, x.shape, strict=True)]
    along = next((a for a, n in enumerate(shape) if n == x.shape[-1] and index[-1] == coord(a)), None)
    if along is None or any(i.shape[along] > 1 for i in where[:-1]) or not (x.size and x.flags.c_contiguous):
        return x[tuple(where)]
    row = np.zeros((1,) * len(shape), np.int64)  # rows of x are read whole, which takes an eighth of the time
    for i, n in zip(where[:-1], x.shape, strict=False):
        row = row * n + i
    return np.take(x.reshape(-1, x.shape[-1]), row, axis=0).swapaxes(along, -1)[..., 0]


def _sliced(index: tuple[Index, ...], values: np.ndarray, shape: Shape) -> np.ndarray | None:
    """Basic slicing and transposition where every index is `k * coordinate + c`, each coordinate used once; else None."""
    axes: list[int] = []
    cut: list[slice] = []
    for i, extent in zip(index, values.shape, strict=True):
        if i.affine is None or len(i.terms) > 1:
            return None
        if not i.terms:
            if not 0 <= i.constant < extent:  # never valid
                return None
            cut.append(slice(i.constant, i.constant + 1))
            axes.append(-1)
        else:
            ((axis, k),) = i.affine.items()
            last = i.constant + k * (shape[axis] - 1)
            if axis in axes or k < 1 or i.constant < 0 or last >= extent:
                return None
            cut.append(slice(i.constant, last + 1, k))
            axes.append(axis)
    used = [a for a in axes if a >= 0]
    part = values[tuple(cut)]
    order = sorted(range(len(axes)), key=lambda d: axes[d])
    part = part.transpose(order).reshape([shape[a] for a in sorted(used)])
    return part.reshape([shape[a] if a in used else 1 for a in range(len(shape))])


def identity_view(tensor: str, rank: int) -> View:
    """Reads the tensor at the output's own coordinates."""
    return View(tensor, tuple(coord(a) for a in range(rank)))


def canonical_view(view: View, shape: Shape) -> View:
    """The view with 0 for the index along each axis of one element, so that equal views are equal."""
    return view.at([coord(a) if n > 1 else constant(0) for a, n in enumerate(shape)], shape)


def broadcast_view(tensor: str, tensor_shape: Shape, shape: Shape) -> View:
    """Reads a tensor that is broadcast to `shape` as NumPy and ONNX do: axes aligned at the end, extent 1 repeated."""
    skip = len(shape) - len(tensor_shape)
    index = [constant(0) if n == 1 else coord(skip + a) for a, n in enumerate(tensor_shape)]
    return View(tensor, tuple(index))


def reshape_view(tensor: str, tensor_shape: Shape, shape: Shape) -> View:
    """Reads a tensor as if its elements, in row-major order of its logical shape, had been given `shape`."""
    if 0 in tensor_shape:  # nothing is read
        return View(tensor, (constant(0),) * len(tensor_shape))
    linear = constant(0)
    step: Extent = 1
    for axis in reversed(range(len(shape))):
        linear, step = linear + coord(axis) * step, step * shape[axis]
    index = []
    step = 1
    for n in reversed(tensor_shape):
        index.append(remainder(quotient(linear, step, shape), n, shape) if n > 1 else constant(0))
        step *= n
    return View(tensor, tuple(reversed(index)))


# --- Expr ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Function:
    """A pointwise function: its parameters and its body, one Python expression over them.

    The same text is evaluated by the CPU reference (over NumPy arrays) and compiled into the kernels (over scalars), with
    the names of `BUILTINS` bound to the one or the other.
    """

    params: tuple[str, ...]
    body: str
    result: str = "same"  # "same" as its last argument's type, or "bool"


BUILTINS = (
    "exp", "log", "log1p", "expm1", "sqrt", "sin", "cos", "tan", "asin", "acos", "atan", "sinh", "cosh", "tanh", "asinh", "acosh",
    "atanh", "erf", "floor", "ceil", "rint", "absolute", "minimum", "maximum", "where", "power", "fmod", "isnan", "isinf",
    "logical_not", "trunc_div", "floor_mod", "binade", "quick_tanh",
)  # fmt: skip
"""What a function's body may call, beside Python's arithmetic, comparison and bit operators."""


def _functions(**bodies: str | tuple[str, str]) -> dict[str, Function]:
    """name="a, b: body" or name=("a, b: body", result)"""
    table = {}
    for name, entry in bodies.items():
        text, result = (entry, "same") if isinstance(entry, str) else entry
        params, body = text.split(":", 1)
        table[name] = Function(tuple(p.strip() for p in params.split(",")), body.strip(), result)
    return table


FUNCTIONS: dict[str, Function] = _functions(
    # arithmetic, of floats or integers
    add="a, b: a + b",
    sub="a, b: a - b",
    mul="a, b: a * b",
    div="a, b: a / b",
    ratio="a, b: a / b",  # b a constant neither tiny nor huge: kernels multiply by its reciprocal, and correct that
    trunc_div="a, b: trunc_div(a, b)",
    floor_mod="a, b: floor_mod(a, b)",
    fmod="a, b: fmod(a, b)",
    pow="a, b: power(a, b)",
    min="a, b: minimum(a, b)",
    max="a, b: maximum(a, b)",
    neg="x: -x",
    abs="x: absolute(x)",
    sign="x: where(x > 0, 1.0, where(x < 0, -1.0, x * 0))",
    bit_and="a, b: a & b",
    bit_or="a, b: a | b",
    bit_xor="a, b: a ^ b",
    bit_not="x: ~x",
    # comparison, logic, choice
    equal=("a, b: a == b", "bool"),
    less=("a, b: a < b", "bool"),
    less_equal=("a, b: a <= b", "bool"),
    greater=("a, b: a > b", "bool"),
    greater_equal=("a, b: a >= b", "bool"),
    logical_not=("x: logical_not(x)", "bool"),
    is_nan=("x: isnan(x)", "bool"),
    is_inf=("x: isinf(x)", "bool"),
    where="c, a, b: where(c, a, b)",
    # to the nearest multiple of x's power of two times eps, or of the least: 1.5 · 2^23 of these have no bits left for less
    binade="x: binade(x)",
    on_grid="x, eps, least: x + maximum(binade(x) * eps, least) * 12582912.0 - maximum(binade(x) * eps, least) * 12582912.0",
    saturate="x, low, high: where(x > low, minimum(x, high), low)",  # NaN becomes the least, too
    # float functions
    reciprocal="x: 1.0 / x",
    exp="x: exp(x)",
    log="x: log(x)",
    sqrt="x: sqrt(x)",
    rsqrt="x: 1.0 / sqrt(x)",
    sin="x: sin(x)",
    cos="x: cos(x)",
    tan="x: tan(x)",
    asin="x: asin(x)",
    acos="x: acos(x)",
    atan="x: atan(x)",
    sinh="x: sinh(x)",
    cosh="x: cosh(x)",
    tanh="x: tanh(x)",
    asinh="x: asinh(x)",
    acosh="x: acosh(x)",
    atanh="x: atanh(x)",
    erf="x: erf(x)",
    floor="x: floor(x)",
    ceil="x: ceil(x)",
    round="x: rint(x)",
    # activations
    relu="x: maximum(x, 0.0)",
    affine="x, alpha, beta: alpha * x + beta",
    scaled_tanh="x, alpha, beta: alpha * tanh(beta * x)",
    leaky_relu="x, alpha: where(x >= 0.0, x, alpha * x)",
    thresholded_relu="x, alpha: where(x > alpha, x, 0.0)",
    elu="x, alpha: where(x > 0.0, x, alpha * expm1(minimum(x, 0.0)))",
    selu="x, alpha, gamma: gamma * where(x > 0.0, x, alpha * expm1(minimum(x, 0.0)))",
    celu="x, alpha: maximum(x, 0.0) + minimum(alpha * expm1(minimum(x, 0.0) / alpha), 0.0)",
    sigmoid="x: 1.0 / (1.0 + exp(-x))",
    hard_sigmoid="x, alpha, beta: minimum(maximum(alpha * x + beta, 0.0), 1.0)",
    hard_swish="x: x * minimum(maximum(x / 6.0 + 0.5, 0.0), 1.0)",
    silu="x: x / (1.0 + exp(-x))",
    swish="x, alpha: x / (1.0 + exp(-alpha * x))",
    softplus="x: maximum(x, 0.0) + log1p(exp(-absolute(x)))",
    softsign="x: x / (1.0 + absolute(x))",
    mish="x: x * tanh(maximum(x, 0.0) + log1p(exp(-absolute(x))))",
    gelu="x: 0.5 * x * (1.0 + erf(x * 0.7071067811865476))",
    gelu_tanh="x: 0.5 * x * (1.0 + tanh(0.7978845608028654 * (x + 0.044715 * x * x * x)))",
    # 2 · half times the same, within 2.8e-4 and what `quick_tanh` is off: where kernels store 8 bits (kernels/codegen.py)
    coarse_gelu="x, half: half * x + half * x * quick_tanh(x * (0.034706024 * (x * x) + 0.80014581))",
    coarse_gelu_tanh="x, half: half * x + half * x * quick_tanh(x * (0.035677408 * (x * x) + 0.79788456))",
    coarse_silu="x, half: half * x + half * x * quick_tanh(0.5 * x)",
    coarse_sigmoid="x, half: half + half * quick_tanh(0.5 * x)",
    coarse_tanh="x, half: (half + half) * quick_tanh(x)",
    shrink="x, bias, lambd: where(x < -lambd, x + bias, where(x > lambd, x - bias, 0.0))",
)


@dataclass(frozen=True)
class Expr:
    """A value for each output element: a leaf (`acc`, `load`, `const`), a `cast`, or a function of other values.

    fn     "acc": what the op computed (epilogues only); "load": what view number `value` reads; "const": `value`;
           "cast": its argument as `dtype` (float to integer truncates); "scalar": argument `value` of a launch, only where
           kernels have taken constants out of the text (kernels/codegen.py); else a name in FUNCTIONS.
    dtype  the type it is computed in: F32, I64 or BOOL
    """

    fn: str
    args: tuple[Expr, ...] = ()
    value: float | int | bool | None = None
    dtype: DType = DType.F32


ACC = Expr("acc")


def const(value: float | int | bool, dtype: DType = DType.F32) -> Expr:
    cast = {DType.F32: float, DType.I64: int, DType.BOOL: bool}[dtype]
    return Expr("const", (), cast(value), dtype)


def load(view: int, dtype: DType = DType.F32) -> Expr:
    """What view number `view` of the op's `loads` reads, in compute type `dtype`."""
    return Expr("load", (), view, dtype)


def cast(x: Expr, dtype: DType) -> Expr:
    """`x` in another type. What is an integer in float32, between limits, goes to int64 and back as it is."""
    if x.dtype is dtype:
        return x
    if dtype is DType.F32 and x.fn == "cast" and x.args[0].dtype is dtype and x.args[0].fn == "saturate" and is_whole(x.args[0]):
        return x.args[0]
    return Expr("cast", (x,), None, dtype)


def is_whole(x: Expr) -> bool:
    """Whether a float is an integer, or no number."""
    if x.fn == "const":
        return float(x.value).is_integer()  # type: ignore[arg-type]
    return x.fn in ("round", "floor", "ceil") or (x.fn in ("add", "sub", "saturate") and all(map(is_whole, x.args)))


def call(fn: str, *args: Expr | float) -> Expr:
    """`fn(*args)` for a name in FUNCTIONS; Python numbers become constants of the other arguments' type."""
    if fn not in FUNCTIONS:  # no error about a model, which has no such names
        raise NameError(f"no function {fn!r}: add its line to FUNCTIONS in tccompile/ir/expr.py")
    function = FUNCTIONS[fn]
    if len(args) != len(function.params):
        raise TypeError(f"{fn} takes ({', '.join(function.params)}), got {len(args)} arguments")
    typed = [a for a in args if isinstance(a, Expr)]
    like = typed[-1].dtype if typed else DType.F32
    exprs = tuple(a if isinstance(a, Expr) else const(a, like) for a in args)
    return Expr(fn, exprs, None, DType.BOOL if function.result == "bool" else exprs[-1].dtype)


def is_sum(x: Expr) -> bool:
    """Whether a float is made of a sum that no rounding to integers has come after: a quotient's last bit says nothing of it."""
    return x.fn == "acc" or (x.fn not in ("round", "saturate", "floor", "ceil") and any(map(is_sum, x.args)))


def walk(expr: Expr) -> list[Expr]:
    """The expression and everything in it, arguments before what uses them."""
    out: list[Expr] = []

    def visit(e: Expr) -> None:
        for a in e.args:
            visit(a)
        out.append(e)

    visit(expr)
    return out


def _made_of(e: Expr, args: list[Expr]) -> Expr:
    """The same operation of other arguments. What was quantized is dequantized without its zero point: (r + z) - z = r."""
    if e.fn == "cast":
        return cast(args[0], e.dtype)
    if e.fn == "sub" and args[0].fn == "saturate" and args[1].fn == "const" and is_whole(args[0]):
        (x, *limits), zero = args[0].args, args[1]
        if x.fn == "add" and x.args[1] == zero and all(a.fn == "const" for a in limits):
            return call("saturate", x.args[0], *(a.value - zero.value for a in limits))  # type: ignore[operator]
    return Expr(e.fn, tuple(args), e.value, e.dtype)


def substitute(expr: Expr, leaf: dict[Expr, Expr]) -> Expr:
    """The expression with every occurrence of a key of `leaf` replaced. What was one object stays one, and is computed once."""
    kinds = {e.fn for e in leaf}  # most parts are of another one, and need no hash, which is as deep as they are
    done: dict[int, Expr] = {}  # by identity

    def visit(e: Expr) -> Expr:
        if (found := done.get(id(e))) is None:
            if e.fn in kinds and e in leaf:
                found = leaf[e]
            else:
                args = [visit(a) for a in e.args]
                found = _made_of(e, args) if args else e
            done[id(e)] = found
        return found

    return visit(expr)


@dataclass(frozen=True)
class Epilogue:
    """What an op does with each value before it stores it: `expr` over `acc` and `loads`, then where it stores it.

    Coordinates in `loads` are those of the op's own result, before `shuffle`; every index is affine and has no `valid`.

    shuffle  block b > 1: depth-to-space in the store: channel (i*b + j)*C + c of pixel (p, q), with C channels left, goes
             to channel c of pixel (b*p + i, b*q + j). ONNX's CRD order is this one after a permutation of the weights.
    """

    expr: Expr = ACC
    loads: tuple[View, ...] = ()
    shuffle: int = 1
