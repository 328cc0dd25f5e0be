"""Reductions: sums, products, minima and maxima over axes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated

import numpy as np

from tccompile.ir.evaluate import evaluate_expr
from tccompile.ir.expr import ACC, Expr
from tccompile.ir.extent import Shape
from tccompile.ir.moments import Known, Moments
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

    def moments(self, known: Known, at: Sequence[np.ndarray]) -> Moments:
        n, index = math.prod(known.shape(self.x)[a] for a in self.axes), known.window(self.x, at, self.axes)
        m = known.moments(self.x, index)
        if self.pre != ACC:
            values = evaluate_expr(self.pre, (), {}, m.mean.shape, known.values(self.x, index).astype(np.float32))
            mean = np.broadcast_to(values, m.mean.shape).astype(np.float64)
            m = Moments(mean, np.square(mean - mean.mean(-1, keepdims=True)), *known.bounds(self.pre, (m.low, m.high)))
        match self.combine:
            case "add":  # each of them once: what differs between their means is no variance of the sum
                return replace(m, mean=m.mean.mean(-1), var=m.var.mean(-1)).summed(n)
            case "max":
                return m.mixed().largest(n)
            case "min":
                return m.negative().mixed().largest(n).negative()
        return m.mixed().multiplied(n)

    def growth(self, of: Callable[[str], float], through: Callable[[Expr, float], float]) -> float:
        return through(self.pre, of(self.x))
