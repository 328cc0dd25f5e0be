"""What is estimated of an op's result without running it: means, variances, and bounds that no input exceeds.

`precision/estimate.py` carries these from op to op, and says how each op's file is asked for its own.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from tccompile.ir.expr import Expr
from tccompile.ir.extent import Shape

CHANNELS = 1 << 16
"""Channels that are told apart, at most."""

SAMPLE = 1 << 6
"""Elements that stand for all those that a reduction adds up."""


@dataclass(frozen=True)
class Moments:
    """Mean and variance of some elements, arrays that broadcast to each other, and between what numbers all of them are."""

    mean: np.ndarray
    var: np.ndarray
    low: float = -math.inf
    high: float = math.inf

    @property
    def square(self) -> np.ndarray:
        """The mean of squares."""
        return self.var + np.square(self.mean)

    @property
    def bound(self) -> float:
        return max(-self.low, self.high)

    def mixed(self) -> Moments:
        """Of elements that may be any of those along the last axis."""
        mean = self.mean.mean(-1)
        return replace(self, mean=mean, var=np.maximum(self.square.mean(-1) - np.square(mean), 0))

    def with_zero(self) -> Moments:
        """What is mean of them and zeros has their bounds and 0."""
        return replace(self, low=min(self.low, 0.0), high=max(self.high, 0.0))

    def summed(self, n: int) -> Moments:
        """Of the sum of n independent ones of each."""
        return Moments(self.mean * n, self.var * n, self.low * n, self.high * n)

    def multiplied(self, n: int) -> Moments:
        """Of the product of n independent ones of each."""
        return Moments(self.mean**n, np.maximum(self.square**n - self.mean ** (2 * n), 0))

    def negative(self) -> Moments:
        return Moments(-self.mean, self.var, -self.high, -self.low)

    def largest(self, n: int) -> Moments:
        """Of the largest of n of them."""
        mean = np.minimum(self.mean + np.sqrt(self.var * 2 * math.log(max(n, 1))), self.high)
        return replace(self, mean=mean, var=self.var / math.sqrt(max(n, 1)))

    def at(self, places: np.ndarray) -> Moments:
        """Those at places along the only axis; of a number, that number."""
        return self if self.mean.ndim == 0 else replace(self, mean=self.mean[places], var=self.var[places])

    def drawn(self, noise: np.ndarray) -> np.ndarray:
        """Values of these moments, from noise of mean 0 and variance 1.

        Normal, clipped into the bounds; but log-normal above a bound well below the mean, so that sums of what is positive, by
        which networks divide, come no nearer to 0 than they do.
        """
        normal = self.mean + np.sqrt(self.var) * noise
        if math.isfinite(self.low):
            above = self.mean - self.low
            share = self.var / np.square(above)
            steep = np.log1p(share)
            skewed = self.low + above * np.exp(np.sqrt(steep) * noise - steep / 2)
            normal = np.where((above > 0) & (share < 1), skewed, normal)
        return np.clip(normal, self.low, self.high)


class Known(Protocol):
    """What is known of the tensors that an op reads. Indices are arrays, one for each axis; tensors go by their names."""

    def shape(self, name: str) -> Shape:
        """The tensor's extents."""

    def constant(self, name: str) -> np.ndarray:
        """All values of a constant."""

    def moments(self, name: str, index: Sequence[np.ndarray]) -> Moments:
        """Of the tensor's elements at an index."""

    def values(self, name: str, index: Sequence[np.ndarray]) -> np.ndarray:
        """Random values of the tensor's elements at an index, the same whenever one is read."""

    def along(self, name: str, axis: int, most: int = CHANNELS) -> Moments:
        """Of the elements at each place of the axis, or so many of them at most, wherever else they lie."""

    def window(self, name: str, at: Sequence[np.ndarray], axes: tuple[int, ...], groups: int = 0) -> list[np.ndarray]:
        """Where some of those elements lie, SAMPLE of them along one more axis, that a reduction over `axes` takes together.

        at  elements of the result; groups, if not 0: into how many the channels are divided, each reduced too
        """

    def product(self, a: str, k: int, w: str, wk: int, terms: int, groups: int = 1) -> Moments:
        """Of sums of so many terms: a's elements along axis k times those of w along axis wk.

        For each of w's first axis if w is constant, (O, K, …); of any if it is computed, or differs from one matrix to the next.
        """

    def weighted(self, x: Moments, w: str, groups: int = 1) -> Moments:
        """Of the sums of K elements, or as many for each of the groups, times constant weights (O, K, …), for each O."""

    def random(self, shape: Shape, below: int) -> np.ndarray:
        """Random integers from 0 on."""

    def noise(self, shape: Shape) -> np.ndarray:
        """Random numbers of mean 0 and variance 1."""

    def bounds(self, expr: Expr, acc: tuple[float, float]) -> tuple[float, float]:
        """Between what numbers an expression of `acc` is when `acc` is between these."""
