"""Constants of a graph that know where their values come from, and whether their values decided anything.

A plan's weights can be replaced (`refit/`), as long as nothing but recipes has looked at them. So whoever reads `Weight.values`
says that what it does next depends on them, and `decisive` collects the names of the model's weights that they are made of. Who
only needs a type or a shape, or makes another constant by a recipe, takes `held`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import numpy as np
import onnx_graphsurgeon as gs

from tccompile.ir.weights import TRANSFORMS, Literal, Recipe, sources_of, transform

_decided: ContextVar[set[str] | None] = ContextVar("decided", default=None)


@contextmanager
def decisive() -> Iterator[set[str]]:
    """Within it, the names of the model's weights whose values something depends on, beside the constants made of them."""
    names = set[str]()
    token = _decided.set(names)
    try:
        yield names
    finally:
        _decided.reset(token)


class Weight(gs.Constant):
    """A constant with the recipe of its values over the model's own weights.

    Transposes, reshapes and slices of a large weight are views of it, and a weight in a file of its own is mapped: values
    take memory only where a transform computes new ones.
    """

    def __init__(self, name: str, values: np.ndarray, recipe: Recipe) -> None:
        super().__init__(name, values)
        self.recipe = recipe

    @property
    def values(self) -> np.ndarray:
        """What the reader decides by; see `held` for other uses."""
        decide_by(*sources_of(self.recipe))
        return self._values

    @values.setter
    def values(self, values: np.ndarray) -> None:
        self._values = values

    def copy(self) -> Weight:
        return Weight(self.name, self._values, self.recipe)


def held(constant: gs.Constant) -> np.ndarray:
    """A constant's values where nothing is decided by them: for their type and shape, or to make others by a recipe."""
    return constant._values if isinstance(constant, Weight) else constant.values


def decide_by(*names: str) -> None:
    """Say that the values of the model's weights of these names decide something."""
    known = _decided.get()
    if known is not None:
        known.update(names)


def literal(name: str, values: Any, dtype: Any = None) -> Weight:
    """A constant whose values are not the model's."""
    values = np.asarray(values, dtype)
    return Weight(name, values, Literal(values))


def recipe_of(constant: gs.Constant) -> Recipe:
    """Where the constant's values come from; a plain `gs.Constant` is a literal."""
    return constant.recipe if isinstance(constant, Weight) else Literal(np.asarray(constant.values))


def dequantized(x: gs.Constant, scale: gs.Constant, zero: gs.Constant | None, axis: int) -> Weight:
    """The constant (x - zero) * scale in float32, each of them one number or a vector along `axis` of x."""
    rank = len(x.shape)
    along = tuple(-1 if a == axis % max(rank, 1) else 1 for a in range(rank))

    def lying(t: gs.Constant) -> Weight:
        number = derived("", "cast", t, dtype="float32")
        return derived("", "reshape", number, shape=along if held(t).size > 1 else (1,) * rank if t.shape else ())

    out = derived("", "cast", x, dtype="float32")
    if zero is not None:
        out = derived("", "sub", out, lying(zero))
    return derived("", "mul", out, lying(scale))


def derived(name: str, fn: str, *args: gs.Constant | np.ndarray, **attributes: Any) -> Weight:
    """The constant `TRANSFORMS[fn](*args, **attributes)`; arrays among `args` are literals."""
    values = [a if isinstance(a, np.ndarray) else held(a) for a in args]
    recipes = [Literal(a) if isinstance(a, np.ndarray) else recipe_of(a) for a in args]
    result = np.asarray(TRANSFORMS[fn](*values, **attributes))
    known = all(isinstance(r, Literal) for r in recipes)
    return Weight(name, result, Literal(result) if known else transform(fn, *recipes, **attributes))
