"""Where elements are that are not zero, and how many."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from tccompile.ir.extent import Shape
from tccompile.ir.moments import Known, Moments
from tccompile.ir.ops.op import Op, Ref


@dataclass(frozen=True, kw_only=True)
class Places(Op):
    """y (int64) = where along x, of rank 1, elements are not 0, in order, then zeros; its last element is how many there are.

    If there are more than y has room for, the first of them, and how many there are all the same.
    """

    x: Ref

    takes_epilogue = False

    def rule(self, shapes: Mapping[str, Shape], y: Shape) -> Iterator[bool]:
        yield len(shapes[self.x]) == 1 and len(y) == 1 and y[0] >= 1

    def compute(self, values: Mapping[str, np.ndarray], shape: Shape) -> np.ndarray:
        found = np.flatnonzero(values[self.x])
        y = np.zeros(shape, np.int64)
        kept = found[: shape[0] - 1]
        y[: len(kept)], y[-1] = kept, len(found)
        return y

    def moments(self, known: Known, at: Sequence[np.ndarray]) -> Moments:
        n, one = known.shape(self.x)[0], np.ones(at[0].shape)
        return Moments(one * n / 2, one * n**2 / 12, 0.0, float(n))
