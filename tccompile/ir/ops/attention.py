"""Attention."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from tccompile.ir.expr import Expr
from tccompile.ir.extent import Extent, Shape, ceil_div
from tccompile.ir.moments import Known, Moments
from tccompile.ir.ops.op import Op, Ref
from tccompile.ir.ops.rules import EXTENT

SCORES = 1 << 24
"""Scores that are held at a time: 64 MB."""


@dataclass(frozen=True, kw_only=True)
class Attention(Op):
    """y = epilogue(softmax(scale * q @ kᵀ + mask) @ v): the softmax is over the rows of k, and 0 where a row sees none of them.

    q (B, H, M, D), k (B, G, N, D), v (B, G, N, E), y (B, H, M, E); head h of q meets head h // (H / G) of k and v.

    mask    (B, H, M, N) or 1 in place of any; added, or if it is bool, a row sees what it is true for
    causal  row m sees rows n <= m + causal of k and v; None: all of them
    """

    q: Ref
    k: Ref
    v: Ref
    scale: float
    mask: Ref | None = None
    causal: Extent | None = None

    def rule(self, shapes: Mapping[str, Shape], y: Shape) -> Iterator[bool]:
        q, k, v = shapes[self.q], shapes[self.k], shapes[self.v]
        yield len(q) == len(k) == len(v) == len(y) == 4 and q[3] == k[3] and k[:3] == v[:3] and y == (*q[:3], v[3])
        yield q[0] == k[0] and k[1] >= 1 and q[1] % k[1] == 0
        yield math.isfinite(self.scale) and (self.causal is None or -EXTENT < self.causal < EXTENT)
        if self.mask is not None:
            scores = (*q[:3], k[2])
            yield len(shapes[self.mask]) == 4 and all(n in (1, s) for n, s in zip(shapes[self.mask], scores, strict=True))

    def compute(self, values: Mapping[str, np.ndarray], shape: Shape) -> np.ndarray:
        """One head and some of its rows at a time."""
        q, k, v = (values[name].astype(np.float32, copy=False) for name in (self.q, self.k, self.v))
        mask = None if self.mask is None else np.broadcast_to(values[self.mask], (*q.shape[:3], k.shape[2]))
        out, share = np.zeros(shape, np.float32), q.shape[1] // k.shape[1]
        if not out.size:
            return out
        rows = max(SCORES // max(k.shape[2], 1), 1)
        for b, h, first in np.ndindex(*q.shape[:2], ceil_div(q.shape[2], rows)):
            part = slice(first * rows, min((first + 1) * rows, q.shape[2]))
            scores = q[b, h, part] @ k[b, h // share].T * np.float32(self.scale)
            if mask is not None:
                seen = mask[b, h, part]
                scores = np.where(seen, scores, -np.inf) if seen.dtype == bool else scores + seen
            if self.causal is not None:
                future = np.arange(k.shape[2]) > np.arange(part.start, part.stop)[:, None] + self.causal
                scores = np.where(future, -np.inf, scores)
            with np.errstate(all="ignore"):
                highest = scores.max(1, keepdims=True, initial=-np.inf)
                e = self.weights(np.exp(scores - np.where(np.isneginf(highest), 0, highest), dtype=np.float32))
                total = e.sum(1, np.float64, keepdims=True)
                out[b, h, part] = e @ v[b, h // share] / np.where(total == 0, 1, total)
        return out

    def weights(self, e: np.ndarray) -> np.ndarray:
        """The weights that rows of v are multiplied by and that are added up, from what they are relative to the highest."""
        return e

    def products(self, shapes: Mapping[str, Shape], y: Shape) -> Extent:
        q, k, v = shapes[self.q], shapes[self.k], shapes[self.v]
        return 2 * math.prod(q[:3]) * k[2] * (q[3] + v[3])  # each row of q meets each row of k and of v

    def moments(self, known: Known, at: Sequence[np.ndarray]) -> Moments:
        return known.along(self.v, 3).with_zero().at(at[3])

    def growth(self, of: Callable[[str], float], through: Callable[[Expr, float], float]) -> float:
        return of(self.v)
