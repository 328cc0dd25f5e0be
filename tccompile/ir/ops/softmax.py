"""Softmax and its logarithm."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from tccompile.ir.extent import Shape
from tccompile.ir.moments import Known, Moments
from tccompile.ir.ops.op import Op, Ref
from tccompile.ir.ops.rules import are_axes


@dataclass(frozen=True, kw_only=True)
class Softmax(Op):
    """y = epilogue(softmax of x along `axis`, or its logarithm)"""

    x: Ref
    axis: int
    log: bool = False

    def rule(self, shapes: Mapping[str, Shape], y: Shape) -> Iterator[bool]:
        yield shapes[self.x] == y and are_axes((self.axis,), y)

    def compute(self, values: Mapping[str, np.ndarray], shape: Shape) -> np.ndarray:
        """The sum is accumulated in float64."""
        x = values[self.x].astype(np.float32, copy=False)
        if not x.size:
            return x
        with np.errstate(all="ignore"):
            shifted = x - x.max(self.axis, keepdims=True)
            e = np.exp(shifted)
            total = e.sum(self.axis, np.float64, keepdims=True)
            return shifted - np.log(total).astype(np.float32) if self.log else e * (1 / total).astype(np.float32)

    def moments(self, known: Known, at: Sequence[np.ndarray]) -> Moments:
        n, m = known.shape(self.x)[self.axis], known.moments(self.x, at)
        if self.log:
            return Moments(-math.log(n) - m.var / 2, m.var, high=0.0)
        return Moments(np.ones(m.mean.shape) / n, np.minimum(np.expm1(m.var), n) / n**2, 0.0, 1.0)
