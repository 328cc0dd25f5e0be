"""Reductions: sums, products, minima and maxima over axes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated

import numpy as np

from tccompile.ir.evaluate import evaluate_expr
from tccompile.ir.expr import ACC, Expr, Shape
from tccompile.ir.ops.op import OneOf, Op, Ref
from tccompile.ir.ops.rules import are_axes

COMBINE = {"add": np.add, "mul": np.multiply, "min": np.minimum, "max": np.maximum}


@dataclass(frozen=True, kw_only=True)
class Reduce(Op):
    """y = epilogue(combine over `axes` of pre(x)); y has extent 1 in those axes.

    A mean is the sum with an epilogue that scales; `pre` is an expression of `acc`, which stands for an element of x.
    """

    x: Ref
    axes: tuple[int, ...]
    combine: Annotated[str, OneOf("add", "mul", "min", "max")]
    pre: Expr = ACC

    def rule(self, shapes: Mapping[str, Shape], y: Shape) -> Iterator[bool]:
        x = shapes[self.x]
        yield are_axes(self.axes, x) and y == tuple(1 if a in self.axes else n for a, n in enumerate(x))

    def compute(self, values: Mapping[str, np.ndarray], shape: Shape) -> np.ndarray:
        """In integers if pre(x) is an integer; sums and products of floats are accumulated in float64."""
        x = values[self.x]
        terms = np.broadcast_to(evaluate_expr(self.pre, (), {}, x.shape, x), x.shape)
        if terms.dtype.kind == "f" and self.combine in ("add", "mul"):
            return COMBINE[self.combine].reduce(terms, self.axes, np.float64, keepdims=True)
        if not all(x.shape[a] for a in self.axes) and self.combine in ("min", "max"):  # of nothing: the identity
            return np.full(shape, np.inf if self.combine == "min" else -np.inf)
        return COMBINE[self.combine].reduce(terms, self.axes, keepdims=True)
