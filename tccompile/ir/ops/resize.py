"""Resampling."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from tccompile.ir.expr import Expr
from tccompile.ir.extent import Extent, Shape
from tccompile.ir.moments import Known, Moments
from tccompile.ir.ops.op import Integers, Op, Ref
from tccompile.ir.ops.rules import are_axes, in_proportion


@dataclass(frozen=True, kw_only=True)
class Resize(Op):
    """y = epilogue(x resampled along `axes`): y[…, o, …] = sum over taps t of weights[o, t] * x[…, index[o, t], …].

    index, weights  one constant per axis: int32 and float32, (output extent, taps)
    """

    x: Ref
    axes: tuple[int, ...]
    index: tuple[Integers, ...]
    weights: tuple[Ref, ...]

    def rule(self, shapes: Mapping[str, Shape], y: Shape) -> Iterator[bool]:
        x = shapes[self.x]
        yield len(x) == len(y) and are_axes(self.axes, x) and len(self.axes) == len(self.index) == len(self.weights)
        yield all(n == y[a] for a, n in enumerate(x) if a not in self.axes)
        way = list(x)
        for axis, index, weights in zip(self.axes, self.index, self.weights, strict=True):
            way[axis] = y[axis]
            yield in_proportion(math.prod(way), x, y)
            yield len(shapes[index]) == 2 and shapes[index] == shapes[weights] and shapes[index][0] == y[axis]
            yield shapes[index][1] >= 1 and x[axis] >= 1

    def compute(self, values: Mapping[str, np.ndarray], shape: Shape) -> np.ndarray:
        """One axis after the other, at indices clipped into x."""
        x = np.ascontiguousarray(values[self.x], np.float32)
        if 0 in shape:
            return np.zeros(shape, np.float32)
        for axis, index, factors in zip(self.axes, self.index, self.weights, strict=True):
            at, by = values[index], values[factors]  # (output extent, taps)
            lie = [-1 if a == axis else 1 for a in range(x.ndim)]
            total = np.take(x, at[:, 0], axis, mode="clip") * by[:, 0].reshape(lie)
            for t in range(1, at.shape[1]):
                total += np.take(x, at[:, t], axis, mode="clip") * by[:, t].reshape(lie)
            x = total
        return x

    def flops(self, shapes: Mapping[str, Shape], y: Shape) -> Extent:
        return 2 * math.prod(y) * sum(shapes[name][1] for name in self.index)

    def moments(self, known: Known, at: Sequence[np.ndarray]) -> Moments:
        shape = known.shape(self.x)
        m = known.moments(self.x, [known.random(i.shape, shape[a]) if a in self.axes else i for a, i in enumerate(at)])
        gain = m.bound * math.prod(float(np.abs(known.constant(name)).sum(-1).max()) for name in self.weights)
        return replace(m, low=-gain, high=gain)

    def growth(self, of: Callable[[str], float], through: Callable[[Expr, float], float]) -> float:
        return of(self.x)
