"""Boxes of which no better one covers too much: the greedy part of NonMaxSuppression."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from tccompile.ir.extent import Shape
from tccompile.ir.moments import Known, Moments
from tccompile.ir.ops.op import Integers, Op, Ref


@dataclass(frozen=True, kw_only=True)
class Suppress(Op):
    """y (bool), of boxes (N, P, 4): whether class c of image n keeps the box that is place i of its order, y (N, C, P).

    A box is kept if its score is above `least`, fewer than `most` boxes before it are kept, and the intersection with none of
    these is more than `iou` of their union.

    scores   (N, C, P), the largest first, NaN before them
    order    (N, C, P): which boxes they are of
    least    None: boxes are kept whatever their scores
    centred  boxes are (x, y, width, height) of their centres, and not two opposite corners
    """

    boxes: Ref
    scores: Ref
    order: Integers
    most: int
    iou: float
    least: float | None = None
    centred: bool = False

    takes_epilogue = False

    def rule(self, shapes: Mapping[str, Shape], y: Shape) -> Iterator[bool]:
        boxes, scores, order = shapes[self.boxes], shapes[self.scores], shapes[self.order]
        yield len(y) == 3 and scores == order == y and boxes == (y[0], y[2], 4)
        yield self.most >= 1 and self.iou == self.iou and (self.least is None or self.least == self.least)

    def compute(self, values: Mapping[str, np.ndarray], shape: Shape) -> np.ndarray:
        boxes, scores, order = (values[name] for name in (self.boxes, self.scores, self.order))
        y = np.zeros(shape, bool)
        for n, c in np.ndindex(*shape[:2]):
            own = np.ones(shape[2], bool) if self.least is None else scores[n, c] > np.float32(self.least)
            at = np.flatnonzero(own)
            with np.errstate(all="ignore"):
                y[n, c, at[self._kept(boxes[n, np.clip(order[n, c, at], 0, shape[2] - 1)].astype(np.float32))]] = True
        return y

    def _kept(self, boxes: np.ndarray) -> list[int]:
        """Which of these boxes, the best first."""
        low, high = corners(boxes, self.centred)
        area = (high - low).prod(1)
        alive, kept = np.ones(len(boxes), bool), list[int]()
        for i in range(len(boxes)):
            if not alive[i]:
                continue
            kept.append(i)
            if len(kept) == self.most:
                break
            sides = np.minimum(high[i], high[i + 1 :]) - np.maximum(low[i], low[i + 1 :])
            common = np.where((sides > 0).all(1), sides.prod(1), np.float32(0))
            union = area[i] + area[i + 1 :] - common
            sound = (common > 0) & (area[i] > 0) & (area[i + 1 :] > 0) & (union > 0)
            alive[i + 1 :] &= ~(sound & (common / union > np.float32(self.iou)))
        return kept

    def moments(self, known: Known, at: Sequence[np.ndarray]) -> Moments:
        one = np.ones(at[0].shape)
        return Moments(one / 2, one / 4, 0.0, 1.0)


def corners(boxes: np.ndarray, centred: bool) -> tuple[np.ndarray, np.ndarray]:
    """The least and the greatest coordinates of boxes (P, 4)."""
    a, b = boxes[:, :2], boxes[:, 2:]
    if centred:
        half = b / np.float32(2)
        return a - half, a + half
    return np.minimum(a, b), np.maximum(a, b)
