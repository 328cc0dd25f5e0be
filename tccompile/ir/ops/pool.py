"""Pooling."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated

import numpy as np

from tccompile.ir.expr import Expr
from tccompile.ir.extent import Extent, Shape
from tccompile.ir.moments import Known, Moments
from tccompile.ir.ops.op import OneOf, Op, Ref
from tccompile.ir.ops.rules import EXTENT
from tccompile.ir.ops.windows import as_image, cover_no_more, fit, image_shape, padded, pair, trimmed, windows


@dataclass(frozen=True, kw_only=True)
class Pool(Op):
    """y = epilogue(max or mean of x's windows), x (N, C, H, W) or (N, C, W).

    Elements beyond the edges do not take part; `count_pads` counts as zeros those within `pads` of an edge, as ONNX does.
    """

    x: Ref
    kind: Annotated[str, OneOf("max", "mean")]
    window: tuple[int, ...]  # one per spatial axis, as strides and dilations
    strides: tuple[int, ...]
    pads: tuple[Extent, ...]  # at the start of each spatial axis
    end_pads: tuple[Extent, ...]  # at the end of each: counts for `count_pads`; ceil_mode may read beyond it
    dilations: tuple[int, ...]
    count_pads: bool = False

    def rule(self, shapes: Mapping[str, Shape], y: Shape) -> Iterator[bool]:
        x = shapes[self.x]
        yield len(x) == len(y) and x[:2] == y[:2]
        yield fit(self.window, self.strides, self.pads, self.dilations, y)
        yield cover_no_more(x, self.window, self.strides, self.pads, self.dilations, y)
        yield len(self.end_pads) == len(self.pads) and all(0 <= p < EXTENT for p in self.end_pads)

    def compute(self, values: Mapping[str, np.ndarray], shape: Shape) -> np.ndarray:
        x = as_image(values[self.x]).astype(np.float32, copy=False)
        p, q = image_shape(shape)[2:]
        window, strides, dilations = pair(self.window, 1), pair(self.strides, 1), pair(self.dilations, 1)
        pads, ends = pair(self.pads, 0), pair(self.end_pads, 0)
        largest = self.kind == "max"
        taps_at, starts = trimmed(x.shape[2:], (p, q), window, strides, pads, dilations)
        kept = tuple(map(len, taps_at))
        image = padded(x, starts, kept, strides, dilations, (p, q), -np.inf if largest else 0.0)
        taps = windows(image, kept, strides, dilations, (p, q))
        y = np.full(taps.shape[:3] + taps.shape[5:], -np.inf if largest else 0.0, np.float32)
        rows, columns = (
            _meeting(x.shape[2 + a], extent, kept[a], strides[a], starts[a], dilations[a]) for a, extent in enumerate((p, q))
        )
        for i in rows:
            for j in columns:
                if largest:
                    np.maximum(y, taps[:, :, :, i, j], out=y)
                else:
                    y += taps[:, :, :, i, j]
        if not largest:
            counts = []
            for a, extent in enumerate((p, q)):
                low, high = (-pads[a], x.shape[2 + a] + ends[a]) if self.count_pads else (0, x.shape[2 + a])
                first = np.arange(extent) * strides[a] - pads[a]  # taps at first + k · dilation that lie from low to high
                before, until = (np.clip(-((first - edge) // dilations[a]), 0, window[a]) for edge in (low, high))
                counts.append(until - before)
            with np.errstate(all="ignore"):
                y /= (counts[0][:, None] * counts[1]).astype(np.float32)[:, :, None]
        return y.transpose(0, 3, 1, 2).reshape(shape)

    def flops(self, shapes: Mapping[str, Shape], y: Shape) -> Extent:
        return math.prod(y) * math.prod(self.window)

    def moments(self, known: Known, at: Sequence[np.ndarray]) -> Moments:
        m, n = known.moments(self.x, at), math.prod(self.window)
        return m.largest(n) if self.kind == "max" else replace(m, var=m.var / n).with_zero()

    def growth(self, of: Callable[[str], float], through: Callable[[Expr, float], float]) -> float:
        return of(self.x)


def _meeting(n: int, outputs: int, window: int, stride: int, pad: int, dilation: int) -> list[int]:
    """The taps of a window that any output has on one of `n` elements: not those that all have in the padding."""
    first = np.arange(window) * dilation - pad
    at = first + np.maximum(-(first // stride), 0) * stride  # the first place of a tap that is not before the elements
    return np.flatnonzero((at < n) & (at <= first + (outputs - 1) * stride)).tolist()
