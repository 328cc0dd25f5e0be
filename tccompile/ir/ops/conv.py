"""Convolution."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from tccompile.ir.expr import Expr
from tccompile.ir.extent import Extent, Shape
from tccompile.ir.moments import Known, Moments
from tccompile.ir.ops.op import Op, Ref, Weights, multiplied_in, summed
from tccompile.ir.ops.windows import as_image, blocks, cover_no_more, fit, image_shape, padded, pair, trimmed, windows


@dataclass(frozen=True, kw_only=True)
class Conv(Op):
    """y = epilogue(conv(x, w)): cross-correlation of x (N, C, H, W) with w (O, C/groups, R, S), or of rank 3 (N, C, W).

    Before the epilogue's shuffle y is (N, O, P, Q); beyond the edges x reads as zero. Sums are of the types that Gemm's are.
    """

    x: Ref
    w: Weights
    strides: tuple[int, ...]  # one per spatial axis
    pads: tuple[Extent, ...]  # at the start of each spatial axis; at the end is what y's extents need
    dilations: tuple[int, ...]
    groups: int = 1

    def rule(self, shapes: Mapping[str, Shape], y: Shape) -> Iterator[bool]:
        x, w = shapes[self.x], shapes[self.w]
        yield len(x) == len(w) == len(y) and fit(w[2:], self.strides, self.pads, self.dilations, y)
        yield cover_no_more(x, w[2:], self.strides, self.pads, self.dilations, y)
        yield self.groups >= 1 and x[0] == y[0] and w[0] == y[1] and w[0] % self.groups == 0 and x[1] == w[1] * self.groups

    def compute(self, values: Mapping[str, np.ndarray], shape: Shape) -> np.ndarray:
        """Gathered windows times a matrix of weights, a block of output rows and one group at a time."""
        kind = multiplied_in(values[self.x], values[self.w])
        x, w = (as_image(values[name]).astype(kind, copy=False) for name in (self.x, self.w))
        n, o, p, q = image_shape(shape)
        strides, dilations = pair(self.strides, 1), pair(self.dilations, 1)
        (down, across), pads = trimmed(x.shape[2:], (p, q), w.shape[2:], strides, pair(self.pads, 0), dilations)
        w = w[:, :, down.start : down.stop, across.start : across.stop]  # other taps meet zeros only
        window = w.shape[2:]
        x = padded(x, pads, window, strides, dilations, (p, q), 0.0)
        y = np.empty((n, p, q, o), kind)
        if 0 in y.shape or 0 in w.shape:
            y[...] = 0
        elif w.shape[1] == 1 and self.groups > 1:
            _depthwise(x, w, y, strides, dilations)
        else:
            taps = windows(x, window, strides, dilations, (p, q))  # (N, P, Q, R, S, C), a view
            c, k = w.shape[1], o // self.groups
            for g in range(self.groups):
                matrix = w[g * k : (g + 1) * k].transpose(0, 2, 3, 1).reshape(k, -1).T  # (RSC, K)
                for rows in blocks(y.shape, taps.shape[3:5], c):
                    block = taps[rows][..., g * c : (g + 1) * c]
                    y[rows][..., g * k : (g + 1) * k] = (block.reshape(-1, len(matrix)) @ matrix).reshape(*block.shape[:3], k)
        return summed(y).transpose(0, 3, 1, 2).reshape(shape)

    def products(self, shapes: Mapping[str, Shape], y: Shape) -> Extent:
        return 2 * math.prod(y) * math.prod(shapes[self.w][1:])

    def moments(self, known: Known, at: Sequence[np.ndarray]) -> Moments:
        terms = math.prod(known.shape(self.w)[1:])
        return known.product(self.x, 1, self.w, 1, terms, self.groups).at(at[1])

    def growth(self, of: Callable[[str], float], through: Callable[[Expr, float], float]) -> float:
        return sum(map(of, self.operands))


def _depthwise(x: np.ndarray, w: np.ndarray, y: np.ndarray, strides: Shape, dilations: Shape) -> None:
    """Each input channel has its own O/C filters: products tap by tap, on a block of output rows at a time."""
    p, q, o = y.shape[1:]
    r, s = w.shape[2:]
    many = o // x.shape[3]
    weights = np.ascontiguousarray(w[:, 0].transpose(1, 2, 0))  # (R, S, O)
    taps = windows(x, (r, s), strides, dilations, (p, q))
    for rows in blocks(y.shape, (1, 1), o):
        total = y[rows]
        total[...] = 0
        for i in range(r):
            for j in range(s):
                tap = taps[rows][:, :, :, i, j]
                total += (np.repeat(tap, many, axis=3) if many > 1 else tap) * weights[i, j]
