"""What a plan keeps of the weights that it was made with, and what it computes of others: magnitudes, losses, sums, digests."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from tccompile.ir.halves import rows_at_once, scratch
from tccompile.ir.ops import Conv, Mlp, Op
from tccompile.ir.program import Program
from tccompile.ir.tensor import Tensor
from tccompile.ir.types import DType
from tccompile.ir.weights import Literal, Recipe, Source, Transform, evaluate, leaves
from tccompile.plan.format import Held

LOSS = 2.0**-10
"""The relative error from which on rounding to fp16 is a loss; of values in its normal range it is about 2**-12."""

EVEN = 64.0
"""How far apart, at most, the norms of weights for each input channel are that do not make up for inputs far apart."""

SUBNORMAL, HALF_STEP = 2.0**-14, 2.0**-24
"""Magnitudes below which fp16 has steps of one size, and that size: rounding to them moves numbers by its part of √12."""

PART = 1 << 18
"""Elements that are looked at at once: what is computed of them takes a few times their memory."""


def terms_of(op: Op, w: Tensor) -> int:
    """How many of the last axes of an op's weights it sums over."""
    return w.rank - 1 if isinstance(op, Conv | Mlp) else 1


def summed(program: Program) -> dict[str, int]:
    """The constants that ops multiply, and how many of their last axes are summed over."""
    return {
        name: terms_of(op, program.tensors[name]) for op in program.ops for name in op.multiplied if name in program.constants
    }


def exact(recipe: Recipe) -> Recipe:
    """The recipe without the rounding to float16 that comes last."""
    if isinstance(recipe, Transform) and (recipe.fn == "rounded" or (recipe.fn, recipe.attributes) == HALVES):
        return recipe.args[0]
    return recipe


HALVES = "cast", (("dtype", "float16"),)


def rounded(recipe: Recipe, values: np.ndarray) -> np.ndarray:
    """What the recipe makes of the values that it has without that rounding."""
    if exact(recipe) is recipe:
        return values
    assert isinstance(recipe, Transform)
    return evaluate(replace(recipe, args=(Literal(values),)), {})


def of_values(recipe: Recipe, values: np.ndarray, tensor: Tensor, terms: int | None, measured: bool) -> Held:
    """What a constant's values are, before they are rounded to float16.

    terms     how many of its last axes are summed over, if it is the weights of a product
    measured  whether it counts how far its channels are apart
    """
    of_products = terms is not None and values.ndim > 1
    with np.errstate(all="ignore"):
        largest, tiny, squares = _looked_at(values, tensor.dtype is DType.F16)
    norm = math.sqrt(squares.sum())
    loss = math.sqrt(tiny / 12) * HALF_STEP / norm if tiny and norm else 0.0
    sums = _sums(values, terms) if terms is not None and _whole(recipe, values, tensor) else ()
    return Held(largest, norm, loss, _apart(squares) if measured and of_products else math.inf, sums)


def _whole(recipe: Recipe, values: np.ndarray, tensor: Tensor) -> bool:
    """Whether they are integers that are multiplied as such: in bytes, or in fp16, which has all of 8 bits."""
    of_integers = any(isinstance(s, Source) and np.dtype(s.dtype).kind in "iu" for s in leaves(recipe))
    return not tensor.dtype.is_float or (of_integers and not np.any(values % 1))


def spread(values: np.ndarray) -> float:
    """How far the norms for each input channel of (output, input channels, …) are apart, of those that are not 0."""
    return _apart(_looked_at(values, False)[2])


def _apart(squares: np.ndarray) -> float:
    norms = np.sqrt(squares[squares > 0])
    most = norms.max(initial=0)
    return 1.0 if not norms.size else float(most / norms.min()) if most < np.inf else math.inf


def _looked_at(values: np.ndarray, halves: bool) -> tuple[float, int, np.ndarray]:
    """The largest magnitude, how many are subnormal in float16 if that counts, and the sum of squares of each input channel of
    (output, input channels, …), or of all: infinite where a value is, or is no number.

    Some at a time, as they lie in memory.
    """
    order = sorted(range(values.ndim), key=lambda axis: -abs(values.strides[axis]))
    at = order.index(1) if values.ndim > 1 else values.ndim
    lies = values.transpose(order)
    channels = lies.shape[at : at + 1] or (1,)
    lies = lies.reshape(math.prod(lies.shape[:at]), *channels, math.prod(lies.shape[at + 1 :]))
    squares = np.zeros(channels)
    largest, tiny = 0.0, 0
    along = int(len(lies) == 1)
    rows = lies.shape[along]
    for i in range(0, rows, step := rows_at_once(rows, max(lies.size // max(rows, 1), 1))):
        here = slice(i, i + step)
        part = lies[:, here] if along else lies[here]
        size, square, *_ = (room.reshape(part.shape) for room in scratch(part.size))
        np.copyto(size, part, "unsafe")
        np.abs(size, out=size)
        most = float(np.nan_to_num(size.max(initial=0), nan=np.inf, posinf=np.inf))
        largest = max(largest, most)
        if halves:
            tiny += int(np.count_nonzero((size < SUBNORMAL) & (size > 0)))
        np.square(size, out=square)
        found = square.sum((0, 2), dtype=np.float64)
        if not most < 2.0**60 or 0 < most < 2.0**-40:  # squares that float32 has not
            found = np.nan_to_num(np.square(size, dtype=np.float64).sum((0, 2)), nan=np.inf, posinf=np.inf)
        squares[here if along else slice(None)] += found
    return largest, tiny, squares


def _sums(values: np.ndarray, terms: int) -> tuple[float, float, float]:
    """The largest sum of a row of magnitudes: of the numbers above 0, of those below, and of all."""
    rows = values.reshape(-1, max(math.prod(values.shape[values.ndim - terms :]), 1))
    found = np.zeros(3)
    for i in range(0, len(rows), step := max(PART // rows.shape[1], 1)):
        part = rows[i : i + step].astype(np.float64)
        above, below = np.maximum(part, 0).sum(1), np.maximum(-part, 0).sum(1)
        found = np.maximum(found, [above.max(), below.max(), (above + below).max()])
    return float(found[0]), float(found[1]), float(found[2])
