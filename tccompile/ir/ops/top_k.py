"""The places of the largest elements."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from tccompile.ir.extent import Shape
from tccompile.ir.moments import Known, Moments
from tccompile.ir.ops.op import Op, Ref
from tccompile.ir.ops.rules import are_axes


@dataclass(frozen=True, kw_only=True)
class TopK(Op):
    """y (int64) = where along `axis` x's largest (or smallest) elements are, the first of equals first.

    NaN is larger than all others, and as large as NaN.

    As many as y has along the axis.
    """

    x: Ref
    axis: int
    largest: bool = True

    takes_epilogue = False

    def rule(self, shapes: Mapping[str, Shape], y: Shape) -> Iterator[bool]:
        x = shapes[self.x]
        yield are_axes((self.axis,), x) and len(y) == len(x) and y[self.axis] <= x[self.axis]
        yield all(n == y[a] for a, n in enumerate(x) if a != self.axis)

    def compute(self, values: Mapping[str, np.ndarray], shape: Shape) -> np.ndarray:
        """Where the first elements of each line would be in a stable sort."""
        x = values[self.x]
        if x.dtype.kind == "f":
            floats = -x if self.largest else x
            found = np.argsort(floats, self.axis, kind="stable")  # NaN last
            if self.largest:  # those come first then: a stable sort by whether they are none
                sound = ~np.isnan(np.take_along_axis(x, found, self.axis))
                found = np.take_along_axis(found, np.argsort(sound, self.axis, kind="stable"), self.axis)
            order = found
        else:
            order = np.argsort(~x if self.largest else x, self.axis, kind="stable")  # -x - 1, which does not overflow
        return np.take(order, np.arange(shape[self.axis]), self.axis).astype(np.int64)

    def moments(self, known: Known, at: Sequence[np.ndarray]) -> Moments:
        n, one = known.shape(self.x)[self.axis], np.ones(at[0].shape)
        return Moments(one * n / 2, one * n**2 / 12, 0.0, n - 1.0)
