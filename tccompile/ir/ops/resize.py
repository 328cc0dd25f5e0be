"""Resampling."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from tccompile.ir.expr import Shape
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

    def flops(self, shapes: Mapping[str, Shape], y: Shape) -> int:
        return 2 * math.prod(y) * sum(shapes[name][1] for name in self.index)
