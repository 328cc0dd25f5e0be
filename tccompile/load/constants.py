"""Constants of a graph that know where their values come from."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_graphsurgeon as gs

from tccompile.ir.weights import TRANSFORMS, Literal, Recipe, transform


class Weight(gs.Constant):
    """A constant with the recipe of its values over the model's own weights.

    Transposes, reshapes and slices of a large weight are views of it, and a weight in a file of its own is mapped: values
    take memory only where a transform computes new ones.
    """

    def __init__(self, name: str, values: np.ndarray, recipe: Recipe) -> None:
        super().__init__(name, values)
        self.recipe = recipe

    def copy(self) -> Weight:
        return Weight(self.name, self.values, self.recipe)


def literal(name: str, values: Any, dtype: Any = None) -> Weight:
    """A constant whose values are not the model's."""
    values = np.asarray(values, dtype)
    return Weight(name, values, Literal(values))


def recipe_of(constant: gs.Constant) -> Recipe:
    """Where the constant's values come from; a plain `gs.Constant` is a literal."""
    return constant.recipe if isinstance(constant, Weight) else Literal(np.asarray(constant.values))


def dequantized(x: gs.Constant, scale: gs.Constant, zero: gs.Constant | None, axis: int) -> Weight:
    """The constant (x - zero) * scale in float32, each of them one number or a vector along `axis` of x."""
    along = tuple(-1 if a == axis % max(x.values.ndim, 1) else 1 for a in range(x.values.ndim))

    def lying(t: gs.Constant) -> Weight:
        number = derived("", "cast", t, dtype="float32")
        return derived("", "reshape", number, shape=along if t.values.size > 1 else (1,) * x.values.ndim if t.values.ndim else ())

    out = derived("", "cast", x, dtype="float32")
    if zero is not None:
        out = derived("", "sub", out, lying(zero))
    return derived("", "mul", out, lying(scale))


def derived(name: str, fn: str, *args: gs.Constant | np.ndarray, **attributes: Any) -> Weight:
    """The constant `TRANSFORMS[fn](*args, **attributes)`; arrays among `args` are literals."""
    values = [a if isinstance(a, np.ndarray) else a.values for a in args]
    recipes = [Literal(a) if isinstance(a, np.ndarray) else recipe_of(a) for a in args]
    result = np.asarray(TRANSFORMS[fn](*values, **attributes))
    known = all(isinstance(r, Literal) for r in recipes)
    return Weight(name, result, Literal(result) if known else transform(fn, *recipes, **attributes))
