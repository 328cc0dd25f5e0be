"""Elementwise ops, and those that only move data."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from tccompile.ir.extent import Shape
from tccompile.ir.moments import Known
from tccompile.ir.ops.op import Op


@dataclass(frozen=True, kw_only=True)
class Pointwise(Op):
    """y = expr over views, for each element of y: elementwise ops, and all ops that only move data.

    `expr` is the epilogue's, over its `loads`; it has no `acc`, and here a load's index may be anything.
    """

    def rule(self, shapes: Mapping[str, Shape], y: Shape) -> Iterator[bool]:
        """It has no parameters."""
        yield from ()

    def compute(self, values: Mapping[str, np.ndarray], shape: Shape) -> None:
        """None: it is all epilogue."""

    def moments(self, known: Known, at: Sequence[np.ndarray]) -> None:
        """None: it is all epilogue."""
