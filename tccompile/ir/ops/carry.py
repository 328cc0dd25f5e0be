"""What crosses the border of a loop's body, which runs again and again: see `ir/loops.py`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated

import numpy as np

from tccompile.ir.expr import Expr
from tccompile.ir.extent import Shape
from tccompile.ir.moments import Known, Moments
from tccompile.ir.ops.op import OneOf, Op, Ref, Text

TURNS = 1 << 24
"""Iterations of a loop, at most."""


@dataclass(frozen=True, kw_only=True)
class Carry(Op):
    """y = x, broadcast if x is one number, where a value comes into the body of a loop, goes to its next iteration, or leaves it.

    role   "enter": what a loop begins with, or what all iterations read
           "hold": a copy of what an iteration has made, before any of what it read is overwritten
           "next": y is the memory of `over`, which an iteration has read and the next one reads again: it gets x if the iteration
           takes place, by `going`, and stays as it is otherwise
           "again": the same of `going` itself, which says whether another iteration takes place: the last op of the body
           "leave": what the last iteration has left behind
    loop   the loop's name
    over   what entered in that memory
    going  one boolean that entered
    after  what else must have been computed before
    most   of "again", how many iterations take place at most
    """

    role: Annotated[str, OneOf("enter", "hold", "next", "again", "leave")]
    loop: Annotated[str, Text()]
    x: Ref
    over: Ref | None = None
    going: Ref | None = None
    after: tuple[Ref, ...] = ()
    most: int = 0

    takes_epilogue = False

    @property
    def stays(self) -> bool:
        """Whether it writes into memory that another tensor has."""
        return self.role in ("next", "again")

    def rule(self, shapes: Mapping[str, Shape], y: Shape) -> Iterator[bool]:
        yield shapes[self.x] in (y, ())
        yield (self.over is not None) == (self.going is not None) == self.stays
        yield self.over is None or self.going is None or (shapes[self.over] == y and shapes[self.going] == ())
        yield (self.role == "again") == (self.most > 0) and self.most <= TURNS
        yield self.role != "again" or self.over == self.going

    def compute(self, values: Mapping[str, np.ndarray], shape: Shape) -> np.ndarray:
        if self.over is not None and self.going is not None and not values[self.going].item():
            return values[self.over]
        return np.broadcast_to(values[self.x], shape)

    def moments(self, known: Known, at: Sequence[np.ndarray]) -> Moments:
        return known.moments(self.x, at[: len(known.shape(self.x))])

    def growth(self, of: Callable[[str], float], through: Callable[[Expr, float], float]) -> float:
        return of(self.x)
