"""Two products of a vector as one op."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from tccompile.ir.evaluate import evaluate_expr
from tccompile.ir.expr import ACC, Expr
from tccompile.ir.extent import Extent, Shape
from tccompile.ir.moments import SAMPLE, Known, Moments
from tccompile.ir.ops.op import Op, Ref, Weights
from tccompile.ir.ops.rules import in_proportion


@dataclass(frozen=True, kw_only=True)
class Mlp(Op):
    """y = epilogue(f(x @ wᵀ + b) @ vᵀ), of vectors that are images of one pixel: a squeeze's two products as one op.

    x (N, C, 1, 1), w (H, C, 1, 1), b (H,) or None for zeros, v (O, H, 1, 1), y (N, O, 1, 1)

    hidden  f, an expression of `acc`
    """

    x: Ref
    w: Weights
    v: Weights
    b: Ref | None = None
    hidden: Expr = ACC

    def rule(self, shapes: Mapping[str, Shape], y: Shape) -> Iterator[bool]:
        x, w, v = shapes[self.x], shapes[self.w], shapes[self.v]
        yield all(len(s) == 4 and s[2:] == (1, 1) for s in (x, w, v, y))
        yield x[1] == w[1] and w[0] == v[1] and y[:2] == (x[0], v[0])
        yield self.b is None or shapes[self.b] == w[:1]
        yield in_proportion(x[0] * w[0], x, w, v, y)

    def compute(self, values: Mapping[str, np.ndarray], shape: Shape) -> np.ndarray:
        x, w, v = (values[name].astype(np.float32, copy=False)[:, :, 0, 0] for name in (self.x, self.w, self.v))
        acc = x @ w.T
        if self.b is not None:
            acc = acc + values[self.b].astype(np.float32, copy=False)
        hidden = np.broadcast_to(evaluate_expr(self.hidden, (), {}, acc.shape, acc), acc.shape)
        return (np.asarray(hidden, np.float32) @ v.T).reshape(shape)

    def products(self, shapes: Mapping[str, Shape], y: Shape) -> Extent:
        x, w, v = shapes[self.x], shapes[self.w], shapes[self.v]
        return 2 * x[0] * w[0] * (w[1] + v[0])

    def moments(self, known: Known, at: Sequence[np.ndarray]) -> Moments:
        m = known.weighted(known.along(self.x, 1, known.shape(self.x)[1]), self.w)
        if self.b is not None:
            bias = known.constant(self.b).reshape(-1)
            m = Moments(m.mean + bias, m.var, m.low + float(bias.min()), m.high + float(bias.max()))
        drawn = m.drawn(known.noise((SAMPLE, m.mean.size))).astype(np.float32)
        values = evaluate_expr(self.hidden, (), {}, drawn.shape, drawn).astype(np.float64)
        h = Moments(values.mean(0), values.var(0), *known.bounds(self.hidden, (m.low, m.high)))
        return known.weighted(h, self.v).at(at[1])

    def growth(self, of: Callable[[str], float], through: Callable[[Expr, float], float]) -> float:
        return of(self.x)
