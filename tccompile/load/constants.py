"""Constants of a graph that know where their values come from, and whether their values decided anything.

A plan's weights can be replaced (`refit/`), as long as nothing but recipes has looked at them. So whoever reads `Weight.values`
says that what it does next depends on them, and `decisive` collects the names of the model's weights that they are made of. Who
only needs a type or a shape, or makes another constant by a recipe, takes `held`.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import numpy as np
import onnx
import onnx_graphsurgeon as gs

from tccompile.ir.weights import TRANSFORMS, Literal, Recipe, Source, Transform, sources_of, transform
from tccompile.load.types import Type

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


class Remembered:
    """What nodes made of constants, for loads of one model at several shapes: a node of the same constants makes the same.

    Constants are told apart by where they come from: a weight's name, what a remembered node made, or a few numbers.

    types  of nodes' results, by what says them
    """

    def __init__(self) -> None:
        self.made: dict[Hashable, list[Weight]] = {}
        self.types: dict[Hashable, list[Type | None]] = {}
        self.recipes: set[int] = set()

    def key(self, node: onnx.NodeProto, inputs: Sequence[Weight | None]) -> Hashable | None:
        """What says what a node makes; None for a node whose constants are not told apart, and for one of few numbers."""
        if all(w is None or held(w).size <= FEW for w in inputs):
            return None
        parts = [None if w is None else self._origin(w) for w in inputs]
        if any(w is not None and part is None for w, part in zip(inputs, parts, strict=True)):
            return None
        return node.op_type, tuple(a.SerializeToString() for a in node.attribute), len(node.output), tuple(parts)

    def _origin(self, w: Weight) -> Hashable | None:
        values, recipe = held(w), w.recipe
        if isinstance(recipe, Source):
            return recipe.name
        if id(recipe) in self.recipes:
            return id(recipe)
        few = isinstance(recipe, Literal) and values.size <= FEW and values.dtype.kind in "biuf"
        return (values.dtype.str, values.shape, values.tobytes()) if few else None

    def keep(self, key: Hashable, made: list[Weight]) -> None:
        """Remember what a node made, and its recipes, which are alive from then on."""
        self.made[key] = made
        self.recipes |= {id(w.recipe) for w in made}


FEW = 64
"""Numbers that tell constants apart by themselves, and that nodes make something of in no time."""

_remembered: ContextVar[Remembered | None] = ContextVar("remembered", default=None)


@contextmanager
def remembering() -> Iterator[None]:
    """Within it, what nodes make of constants is computed once for all loads of a model."""
    token = _remembered.set(Remembered())
    try:
        yield
    finally:
        _remembered.reset(token)


def remembered() -> Remembered | None:
    """What is remembered, where loads of one model follow each other."""
    return _remembered.get()


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
    if all(isinstance(r, Literal) for r in recipes):
        return Weight(name, result, Literal(result))
    made = transform(fn, *recipes, **attributes)
    if isinstance(made, Transform) and made.depth > DEEP:
        decide_by(*sources_of(made))
        made = Literal(result)
    return Weight(name, result, made)


DEEP = 32
"""Transforms within each other up to which a constant has a recipe; plans hold 128, and later stages add some."""
