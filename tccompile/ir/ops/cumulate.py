"""Cumulative sums and products."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated

import numpy as np

from tccompile.ir.expr import Expr
from tccompile.ir.extent import Shape
from tccompile.ir.moments import Known, Moments
from tccompile.ir.ops.op import OneOf, Op, Ref
from tccompile.ir.ops.rules import are_axes


@dataclass(frozen=True, kw_only=True)
class Cumulate(Op):
    """y = the sums or products of x's elements along `axis` up to each one, or of those before it if `exclusive`.

    reverse  from the end of the axis on
    """

    x: Ref
    axis: int
    combine: Annotated[str, OneOf("add", "mul")]
    exclusive: bool = False
    reverse: bool = False

    takes_epilogue = False

    def rule(self, shapes: Mapping[str, Shape], y: Shape) -> Iterator[bool]:
        yield shapes[self.x] == y and are_axes((self.axis,), y)

    def compute(self, values: Mapping[str, np.ndarray], shape: Shape) -> np.ndarray:
        x = np.flip(values[self.x], self.axis) if self.reverse else values[self.x]
        y = (np.cumsum if self.combine == "add" else np.cumprod)(x, self.axis, x.dtype)
        if self.exclusive and shape[self.axis]:
            first = np.full((*shape[: self.axis], 1, *shape[self.axis + 1 :]), self.combine == "mul", x.dtype)
            y = np.concatenate([first, np.delete(y, -1, self.axis)], self.axis)
        return np.flip(y, self.axis) if self.reverse else y

    def moments(self, known: Known, at: Sequence[np.ndarray]) -> Moments:
        n, m = known.shape(self.x)[self.axis], known.moments(self.x, at)
        return m.summed(n).with_zero() if self.combine == "add" else m.multiplied(n)

    def growth(self, of: Callable[[str], float], through: Callable[[Expr, float], float]) -> float:
        return of(self.x)
