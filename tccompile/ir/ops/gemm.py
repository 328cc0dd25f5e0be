"""Matrix products."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from tccompile.ir.expr import Expr
from tccompile.ir.extent import Extent, Shape
from tccompile.ir.moments import Known, Moments
from tccompile.ir.ops.op import Op, Ref, Weights, multiplied_in, summed


@dataclass(frozen=True, kw_only=True)
class Gemm(Op):
    """y = epilogue(a @ bᵀ): a (…, M, K), b (N, K) or (…, N, K) with the same leading axes, y (…, M, N).

    Sums of floats are float32. Where both operands are integers, of 8 bits, sums are int32, modulo 2^32; the type of the
    epilogue's `acc` says whether it takes them exactly, as int64, or each rounded to float32.
    """

    a: Ref
    b: Weights

    def rule(self, shapes: Mapping[str, Shape], y: Shape) -> Iterator[bool]:
        a, b = shapes[self.a], shapes[self.b]
        yield len(a) >= 2 and len(b) >= 2 and a[-1] == b[-1] and y == (*a[:-1], b[-2]) and (len(b) == 2 or b[:-2] == a[:-2])

    def compute(self, values: Mapping[str, np.ndarray], shape: Shape) -> np.ndarray:
        kind = multiplied_in(values[self.a], values[self.b])
        a, b = values[self.a].astype(kind, copy=False), values[self.b].astype(kind, copy=False)
        if b.ndim == 2:  # one matrix product instead of many
            return summed(a.reshape(math.prod(a.shape[:-1]), a.shape[-1]) @ b.T).reshape(shape)
        return summed(a @ b.swapaxes(-1, -2))

    def products(self, shapes: Mapping[str, Shape], y: Shape) -> Extent:
        return 2 * math.prod(y) * shapes[self.a][-1]

    def moments(self, known: Known, at: Sequence[np.ndarray]) -> Moments:
        a, b = known.shape(self.a), known.shape(self.b)
        return known.product(self.a, len(a) - 1, self.b, len(b) - 1, a[-1]).at(at[-1])

    def growth(self, of: Callable[[str], float], through: Callable[[Expr, float], float]) -> float:
        return sum(map(of, self.operands))
