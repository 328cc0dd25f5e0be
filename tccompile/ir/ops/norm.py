"""Normalization over axes."""

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
class Norm(Op):
    """y = epilogue((x - mean) / sqrt(variance + eps)), both over `axes` of x; scale and bias are the epilogue's.

    If it is not `centred`, 0 stands for the mean, and the variance is the mean of squares. With `groups` g > 0, axis 1 is
    taken as g groups of neighbouring channels, and each group is one more reduced axis.
    """

    x: Ref
    axes: tuple[int, ...]
    eps: float
    groups: int = 0
    centred: bool = True

    def rule(self, shapes: Mapping[str, Shape], y: Shape) -> Iterator[bool]:
        yield shapes[self.x] == y and are_axes(self.axes, y)
        yield self.groups == 0 or (self.groups > 0 and len(y) >= 2 and y[1] % self.groups == 0 and 1 not in self.axes)

    def compute(self, values: Mapping[str, np.ndarray], shape: Shape) -> np.ndarray:
        """Sums are accumulated in float64."""
        x, axes = values[self.x].astype(np.float32, copy=False), self.axes
        if self.groups:
            x = x.reshape(x.shape[0], self.groups, -1, *x.shape[2:])
            axes = (2, *(a + (a > 1) for a in axes))
        if not x.size:
            return x.reshape(shape)
        with np.errstate(all="ignore"):
            centred = x - x.mean(axes, np.float64, keepdims=True).astype(np.float32) if self.centred else x
            variance = np.square(centred).mean(axes, np.float64, keepdims=True)
            return (centred * (1 / np.sqrt(variance + self.eps)).astype(np.float32)).reshape(shape)

    def moments(self, known: Known, at: Sequence[np.ndarray]) -> Moments:
        shape = known.shape(self.x)
        m, together = known.moments(self.x, at), known.moments(self.x, known.window(self.x, at, self.axes, self.groups)).mixed()
        n = math.prod(shape[a] for a in self.axes) * (shape[1] // self.groups if self.groups else 1)
        size = np.sqrt((together.var if self.centred else together.square) + self.eps)
        mean = (m.mean - together.mean * self.centred) / size
        return Moments(mean, m.var / np.square(size), -math.sqrt(n), math.sqrt(n))
