"""Where a constant's values come from: a recipe over the model's own weights, so that they can be left out and filled in.

A recipe is a small tree: sources (initializers of the user's model, by name), literals (values that are not the model's, or
are too small to matter), and transforms of `TRANSFORMS`. It is part of the plan; evaluating one needs NumPy only.
"""

from __future__ import annotations

import hashlib
import inspect
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from tccompile.ir.halves import rounded
from tccompile.ir.packed import packed_scales, packed_values, packed_zeros
from tccompile.ir.packed import shapes as packed
from tccompile.ir.sparse import shapes as compressed
from tccompile.ir.sparse import sparse_places, sparse_values
from tccompile.ir.storage import nearest
from tccompile.ir.types import DType

Attributes = tuple[tuple[str, Any], ...]
"""A transform's parameters by name: integers, floats, strings, and tuples of them."""

GROWTH = 1.25
"""How far sums of integer weights, and integers that are added to them, may grow when others take their place (`refit/`): what is
decided by them holds for that."""

SMALL = 4096
"""Bytes up to which a constant is kept by value even when weights are left out of a plan."""


@dataclass(frozen=True)
class Source:
    """The initializer `name` of the user's model, as the model stores it (bf16 and fp8 widened to float32)."""

    name: str
    shape: tuple[int, ...]
    dtype: str  # NumPy's name


@dataclass(frozen=True, eq=False)
class Literal:
    """Values that are kept as they are."""

    values: np.ndarray


@dataclass(frozen=True)
class Transform:
    """`TRANSFORMS[fn](*args, **attributes)`"""

    fn: str
    args: tuple[Recipe, ...]
    attributes: Attributes = ()

    @cached_property
    def depth(self) -> int:
        """How many transforms lie within each other."""
        return 1 + max((a.depth for a in self.args if isinstance(a, Transform)), default=0)


Recipe = Source | Literal | Transform


def _cast(x: np.ndarray, dtype: str) -> np.ndarray:
    with np.errstate(all="ignore"):  # infinities become what the model asks for, and no warning
        return x.astype(dtype)


def _take(x: np.ndarray, indices: np.ndarray, axis: int) -> np.ndarray:
    return np.take(x, indices.astype(np.int64), axis)


def _slice(x: np.ndarray, starts: tuple, ends: tuple, steps: tuple) -> np.ndarray:
    """Basic slicing; a start or end of None is the edge."""
    return x[tuple(slice(*c) for c in zip(starts, ends, steps, strict=True))]


def _pad(x: np.ndarray, before: tuple, after: tuple) -> np.ndarray:
    widths = [pair for _, *pair in zip(x.shape, before, after, strict=True)]  # NumPy would take one pair for all axes
    return np.pad(x, widths) if widths else x


def byte_scales(x: np.ndarray) -> np.ndarray:
    """The scale of each row, of its first axis, that leaves the least error in signed bytes without a zero point."""
    rows = x.reshape(len(x), -1)
    most = np.abs(rows).max(1, initial=0.0)
    best, least = np.ones(len(rows)), np.full(len(rows), np.inf)
    for cut in BYTE_CUTS:
        scale = np.maximum(most * cut / BYTE, np.finfo(np.float32).tiny).astype(np.float32)
        q = np.clip(np.rint(rows / scale[:, None]), -BYTE, BYTE)
        errors = np.square(q * scale[:, None] - rows).sum(1, dtype=np.float64)
        better = errors < least
        best[better], least[better] = scale[better], errors[better]
    return np.where(most > 0, best, 1.0).astype(np.float32)


BYTE_CUTS = (1.0, 0.95, 0.9, 0.85, 0.8, 0.75, 0.7, 0.6)
"""Shares of a row's greatest magnitude beyond which values are cut off, of which the one with the least error is taken."""


def float8_scale(most: np.ndarray | np.floating) -> np.ndarray:
    """The scale of E4M3 for values up to this magnitude."""
    return np.maximum(most / np.float32(DType.E4M3.largest), np.finfo(np.float32).tiny).astype(np.float32)


def float8_scales(x: np.ndarray) -> np.ndarray:
    """The scale of E4M3 for each row, of its first axis."""
    most = np.abs(x.reshape(len(x), -1)).max(1, initial=0.0)
    return np.where(most > 0, float8_scale(most), 1.0).astype(np.float32)


NEAR = {np.dtype(np.float16): (2.0**-9, 2.0**-25), np.dtype(np.float32): (2.0**-20, 0.0)}
"""How far weights are from a number of float8 times their scale at most, relative to it, and by how much more: they have been
rounded, more than once where scales were multiplied into them."""

SOME = 64
"""Weights of each channel that are looked at first."""


def multiples(x: np.ndarray) -> np.ndarray:
    """The scale of each row, of its first axis, by which all of its values are numbers of E4M3.

    Raises ValueError where a row has none.
    """
    rows = x.reshape(len(x), -1)
    largest = np.abs(rows).max(1, initial=0).astype(np.float32)
    some = rows[:, :: max(1, rows.shape[1] // SOME)]
    scales = _first_of(some, largest)
    if some.shape == rows.shape:
        return scales
    wrong = ~_fits(rows, scales)
    if wrong.any():  # by some weights of a row there may be several
        scales[wrong] = _first_of(rows[wrong], largest[wrong])
    return scales


def _first_of(rows: np.ndarray, largest: np.ndarray) -> np.ndarray:
    """For each row the first scale that fits."""
    scales, left = np.zeros(len(rows), np.float32), np.arange(len(rows))
    for scale in _candidates(largest):
        fits = _fits(rows[left], scale[left])
        scales[left[fits]] = scale[left[fits]]
        left = left[~fits]
    if left.size:
        raise ValueError("weights that are no numbers of float8 times a scale for each output channel")
    return scales


def _fits(rows: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """Of which rows all weights are numbers of E4M3 times the row's scale."""
    near, more = NEAR[rows.dtype]
    q = np.divide(rows, scales[:, None], dtype=np.float32)
    off = np.abs(nearest(q, DType.E4M3) - q)
    found: np.ndarray = (off <= near * np.abs(q) + more / scales[:, None]).all(1)
    return found


def _candidates(largest: np.ndarray) -> Iterator[np.ndarray]:
    """The scales that make the largest weight of each row one of E4M3's largest numbers of each fraction."""
    for number in (448, 416, 384, 352, 320, 288, 256, 240):
        yield np.where(largest > 0, largest / np.float32(number), np.float32(1))


def _in_bytes(x: np.ndarray, scale: np.ndarray, means: np.ndarray) -> np.ndarray:
    """As int8, each row less its own scale, such that sums over a row weighted by `means` stay: they are of its second axis.

    To nearest, but for those few elements that lie about halfway to the next number, and by which rounding adds up. Where there
    are more means than the axis is long, as in a convolution with groups, each group of rows has its own.
    """
    k = math.prod(x.shape[1:])
    groups = len(means) // max(x.shape[1], 1)
    if groups > 1:
        parts = zip(*(np.split(a, groups) for a in (x, scale, means)), strict=True)
        return np.concatenate([_in_bytes(*part) for part in parts])
    weight = np.repeat(means.astype(np.float32), k // max(len(means), 1))
    lines, out = x.reshape(-1, k), np.empty((len(x), k), np.int8)
    for i in range(0, len(lines), step := max((1 << 20) // max(k, 1), 1)):
        exact = lines[i : i + step] / scale[i : i + step, None]
        out[i : i + step] = _mean_kept(exact, weight)
    return out.reshape(x.shape)


BYTE = 127
"""The largest magnitude of weights in bytes, on either side of zero."""


def _mean_kept(exact: np.ndarray, weight: np.ndarray) -> np.ndarray:
    """The rows as integers, each with about the weighted sum that it has."""
    near = np.clip(np.rint(exact), -BYTE, BYTE)
    off = near - exact
    total = (off @ weight.astype(np.float64))[:, None]
    side = np.where(off > 0, -1, 1).astype(np.float32)  # where the next number on the other side is
    moves = side * weight
    against = (moves * np.sign(total) < 0) & (np.abs(near + side) <= BYTE) & (np.abs(off) <= 0.5)
    with np.errstate(divide="ignore", invalid="ignore"):
        cost = np.where(against, (1 - 2 * np.abs(off)) / np.abs(weight), np.inf)  # of the error's square, for what it brings
    k = exact.shape[1]
    some = min(k, 4 * math.isqrt(k) + 8)
    at = np.argpartition(cost, some - 1, 1)[:, :some] if some < k else np.broadcast_to(np.arange(k), cost.shape)
    at = np.take_along_axis(at, np.take_along_axis(cost, at, 1).argsort(1, kind="stable"), 1)
    usable = np.isfinite(np.take_along_axis(cost, at, 1))
    brings = np.where(usable, np.abs(weight)[at], 0)
    flips = usable & (brings.cumsum(1, dtype=np.float64) - brings / 2 < np.abs(total))
    row, which = np.nonzero(flips)
    column = at[row, which]
    near[row, column] += side[row, column]
    return near.astype(np.int8)


TRANSFORMS: dict[str, Callable[..., np.ndarray]] = {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "div": np.divide,
    "sqrt": np.sqrt,
    "neg": np.negative,
    "right_shift": np.right_shift,
    "bitwise_and": np.bitwise_and,
    "matmul": np.matmul,
    "reshape": lambda x, shape: x.reshape(shape),
    "transpose": lambda x, axes: x.transpose(axes),
    "cast": _cast,
    "rounded": rounded,
    "byte_scales": byte_scales,
    "float8_scales": float8_scales,
    "multiples": multiples,
    "in_bytes": _in_bytes,
    "sparse_values": sparse_values,
    "sparse_places": sparse_places,
    "packed_values": packed_values,
    "packed_scales": packed_scales,
    "packed_zeros": packed_zeros,
    "float8": lambda x: nearest(x, DType.E4M3),
    "concat": lambda *xs, axis: np.concatenate(xs, axis),
    "slice": _slice,
    "pad": _pad,
    "flip": lambda x, axes: np.flip(x, axes),
    "take": _take,
    "expand": lambda x, shape: np.broadcast_to(x, shape),
}


def transform(fn: str, *args: Recipe, **attributes: Any) -> Recipe:
    """A recipe for `TRANSFORMS[fn]` of other recipes, evaluated at once when only literals go in."""
    frozen = tuple(sorted((k, _frozen(v)) for k, v in attributes.items()))
    recipe = Transform(fn, args, frozen)
    if all(isinstance(a, Literal) for a in args):
        return Literal(np.ascontiguousarray(evaluate(recipe, {})))
    return recipe


def _frozen(value: Any) -> Any:
    return tuple(map(_frozen, value)) if isinstance(value, list | tuple) else value


def evaluate(recipe: Recipe, sources: Mapping[str, np.ndarray]) -> np.ndarray:
    """The values, from the model's weights by name. Raises KeyError with the name of a weight that is missing."""
    match recipe:
        case Source(name=name):
            return sources[name]
        case Literal(values=values):
            return values
        case Transform(fn, args, attributes):
            return TRANSFORMS[fn](*(evaluate(a, sources) for a in args), **dict(attributes))


def digest(values: np.ndarray) -> str:
    """The SHA-256 of an array: its type, its shape and its bytes."""
    whole = hashlib.sha256(f"{values.dtype.name} {values.shape}".encode())
    whole.update(np.ascontiguousarray(values).reshape(-1).view(np.uint8).data)
    return whole.hexdigest()


def extents(recipe: Recipe) -> tuple[tuple[int, ...], int]:
    """The shape of the values, and how many elements evaluating would make on the way to them and in them.

    An extent of 0 counts as 1. Raises ArithmeticError, LookupError, TypeError or ValueError if it could not be evaluated.
    """
    match recipe:
        case Source(shape=shape):
            return shape, 0
        case Literal(values=values):
            return values.shape, 0
        case Transform(fn, args, attributes):
            shapes, made = zip(*map(extents, args), strict=True)
            shape = _extents(fn, *shapes, **dict(attributes))
            return shape, sum(made) + math.prod(max(n, 1) for n in shape)


def _extents(fn: str, *shapes: tuple[int, ...], **given: Any) -> tuple[int, ...]:
    """The shape of `TRANSFORMS[fn]` of arrays of these shapes."""
    function, x = TRANSFORMS[fn], shapes[0]
    if isinstance(function, np.ufunc):  # they take more: where to write, and as what
        if len(shapes) != function.nin or given:
            raise TypeError(f"{fn} takes {function.nin} arrays and nothing else")
    else:
        inspect.signature(function).bind(*shapes, **given)
    match fn:
        case "add" | "sub" | "mul" | "div" | "right_shift" | "bitwise_and":
            return np.broadcast_shapes(*shapes)
        case "matmul":
            a, b = shapes
            return (*np.broadcast_shapes(a[:-2], b[:-2]), *a[-2:-1], *b[-2:][1:])
        case "reshape":
            known = math.prod(n for n in given["shape"] if n != -1)
            return tuple(math.prod(x) // known if n == -1 else n for n in given["shape"])
        case "expand":
            return np.broadcast_shapes(x, given["shape"])
        case "transpose":
            return tuple(x[a] for a in given["axes"])
        case "slice":
            cuts = [slice(*cut) for cut in zip(given["starts"], given["ends"], given["steps"], strict=True)]
            return (*(len(range(n)[cut]) for n, cut in zip(x, cuts, strict=False)), *x[len(cuts) :])
        case "pad":
            return tuple(map(sum, zip(x, given["before"], given["after"], strict=True)))
        case "concat":
            axis = range(len(x))[given["axis"]]
            return (*x[:axis], sum(shape[axis] for shape in shapes), *x[axis + 1 :])
        case "take":
            axis = range(max(len(x), 1))[given["axis"]]  # a single number is taken from as a row of one
            return (*x[:axis], *shapes[1], *x[axis + 1 :])
        case "byte_scales" | "float8_scales" | "multiples":
            return x[:1]
        case "sparse_values" | "sparse_places":
            return compressed(x, given["whole"])[fn == "sparse_places"]
        case "packed_values":
            return packed(x, given["bits"], given["block"])[0]
        case "packed_scales" | "packed_zeros":
            n, blocks = x
            return packed((n, blocks * given["block"]), 8, given["block"])[1 + (fn == "packed_zeros")]
        case "cast" if np.dtype(given["dtype"]).itemsize > 8:
            raise TypeError(f"elements of {np.dtype(given['dtype']).itemsize} bytes")
    return x


def leaves(recipe: Recipe) -> Iterator[Source | Literal]:
    """What the recipe's values come from."""
    if isinstance(recipe, Transform):
        for a in recipe.args:
            yield from leaves(a)
    else:
        yield recipe


def sources_of(recipe: Recipe) -> set[str]:
    """The names of the weights that a recipe needs."""
    match recipe:
        case Source(name=name):
            return {name}
        case Transform(args=args):
            return set().union(*map(sources_of, args))
    return set()


def same(a: Recipe, b: Recipe) -> bool:
    """Whether two recipes are equal, literals by their values."""
    match a, b:
        case Literal(values=x), Literal(values=y):
            return x.dtype == y.dtype and x.shape == y.shape and x.tobytes() == y.tobytes()
        case Transform(fn, args, attributes), Transform(other, others, more):
            return fn == other and attributes == more and len(args) == len(others) and all(map(same, args, others))
    return a == b
