"""What a plan keeps of the weights that it was made with, and what it computes of others: magnitudes, losses, sums, digests."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

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
    flat = values.ravel("K")
    largest = squares = 0.0
    tiny = 0
    with np.errstate(all="ignore"):
        for i in range(0, flat.size, PART):
            part = np.abs(flat[i : i + PART].astype(np.float32))
            largest = max(largest, float(np.nan_to_num(part.max(), nan=np.inf, posinf=np.inf)))
            tiny += int(np.count_nonzero((part < SUBNORMAL) & (part > 0)))
            squares += _sum_of_squares(part)
    norm = math.sqrt(squares)
    subnormals = math.sqrt(tiny / 12) * HALF_STEP / norm if tiny and norm else 0.0
    loss = subnormals if tensor.dtype is DType.F16 else 0.0
    of_products = terms is not None and values.ndim > 1
    sums = _sums(values, terms) if terms is not None and _whole(recipe, values, tensor) else ()
    return Held(largest, norm, loss, spread(values) if measured and of_products else math.inf, sums)


def _whole(recipe: Recipe, values: np.ndarray, tensor: Tensor) -> bool:
    """Whether they are integers that are multiplied as such: in bytes, or in fp16, which has all of 8 bits."""
    of_integers = any(isinstance(s, Source) and np.dtype(s.dtype).kind in "iu" for s in leaves(recipe))
    return not tensor.dtype.is_float or (of_integers and not np.any(values % 1))


def _sum_of_squares(x: np.ndarray) -> float:
    """The same on every machine, as no BLAS is asked; infinite if any of them is infinite or NaN."""
    total = float(np.square(x).sum(dtype=np.float64))
    if not math.isfinite(total):  # squares that float32 has not
        total = float(np.square(x, dtype=np.float64).sum())
    return math.inf if math.isnan(total) else total


def spread(values: np.ndarray) -> float:
    """How far the norms for each input channel of (output, input channels, …) are apart, of those that are not 0."""
    norms = _squares(values)
    norms = np.sqrt(norms[norms > 0])
    return float(norms.max() / norms.min()) if norms.size else 1.0


def _squares(values: np.ndarray) -> np.ndarray:
    """Sums of squares of each input channel, of (output, input channels, …): some output channels at a time, to save memory."""
    others, step = (0, *range(2, values.ndim)), max(PART // max(math.prod(values.shape[1:]), 1), 1)
    parts = (np.square(values[i : i + step], dtype=np.float64).sum(others) for i in range(0, len(values), step))
    return sum(parts, np.zeros(values.shape[1]))


def _sums(values: np.ndarray, terms: int) -> tuple[float, float, float]:
    """The largest sum of a row of magnitudes: of the numbers above 0, of those below, and of all."""
    rows = values.reshape(-1, max(math.prod(values.shape[values.ndim - terms :]), 1))
    found = np.zeros(3)
    for i in range(0, len(rows), step := max(PART // rows.shape[1], 1)):
        part = rows[i : i + step].astype(np.float64)
        above, below = np.maximum(part, 0).sum(1), np.maximum(-part, 0).sum(1)
        found = np.maximum(found, [above.max(), below.max(), (above + below).max()])
    return float(found[0]), float(found[1]), float(found[2])
