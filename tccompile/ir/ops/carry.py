"""What crosses the border of a loop's body, which runs again and again, or of branches: see `ir/loops.py`, `ir/branches.py`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated

import numpy as np

from tccompile.ir.expr import Expr
from tccompile.ir.extent import Shape
from tccompile.ir.moments import Known, Moments
from tccompile.ir.ops.op import Integers, OneOf, Op, Ref, Text

TURNS = 1 << 24
"""Iterations of a loop, at most."""


@dataclass(frozen=True, kw_only=True)
class Carry(Op):
    """y = x, broadcast if x is one number, where a value comes into the body of a loop, goes to its next iteration, or leaves it;
    or where it leaves the one of two branches that a condition says.

    role   "enter": what a loop begins with, or what all iterations read
           "hold": a copy of what an iteration has made, before any of what it read is overwritten
           "next": y is the memory of `over`, which an iteration has read and the next one reads again: it gets x if the iteration
           takes place, by `going`, and stays as it is otherwise
           "again": the same of `going` itself, which says whether another iteration takes place: the last op of the body
           "leave": what the last iteration has left behind
           "pick": x if `going` is true, and else `over`
    loop   the loop's name, or the If's
    over   what entered in that memory, or may be picked
    going  one boolean that entered, or says which is picked
    at     of "next", the number of the row of y that gets x, which is one row then; the others stay
    after  what else must have been computed before
    most   of "again", how many iterations take place at most
    """

    role: Annotated[str, OneOf("enter", "hold", "next", "again", "leave", "pick")]
    loop: Annotated[str, Text()]
    x: Ref
    over: Ref | None = None
    going: Ref | None = None
    at: Integers | None = None
    after: tuple[Ref, ...] = ()
    most: int = 0

    takes_epilogue = False

    @property
    def stays(self) -> bool:
        """Whether it writes into memory that another tensor has."""
        return self.role in ("next", "again")

    def rule(self, shapes: Mapping[str, Shape], y: Shape) -> Iterator[bool]:
        if self.at is None:
            yield shapes[self.x] in (y, ())
        else:
            yield self.role == "next" and bool(y) and shapes[self.x] == (1, *y[1:]) and shapes[self.at] == ()
        yield (self.over is not None) == (self.going is not None) == (self.stays or self.role == "pick")
        yield self.over is None or self.going is None or (shapes[self.over] == y and shapes[self.going] == ())
        yield (self.role == "again") == (self.most > 0) and self.most <= TURNS
        yield self.role != "again" or self.over == self.going

    def compute(self, values: Mapping[str, np.ndarray], shape: Shape) -> np.ndarray:
        if self.over is not None and self.going is not None and not values[self.going].item():
            return values[self.over]
        if self.at is not None and self.over is not None:
            out = values[self.over].copy()
            out[values[self.at].item()] = values[self.x][0]
            return out
        return np.broadcast_to(values[self.x], shape)

    def moments(self, known: Known, at: Sequence[np.ndarray]) -> Moments:
        places = at if self.at is None else (np.zeros_like(at[0]), *at[1:])
        one = known.moments(self.x, places[: len(known.shape(self.x))])
        if self.role != "pick" or self.over is None:
            return one
        other = known.moments(self.over, at[: len(known.shape(self.over))])
        mean = (one.mean + other.mean) / 2
        var = np.maximum((one.square + other.square) / 2 - np.square(mean), 0)
        return Moments(mean, var, min(one.low, other.low), max(one.high, other.high))

    def growth(self, of: Callable[[str], float], through: Callable[[Expr, float], float]) -> float:
        return max(of(self.x), of(self.over)) if self.role == "pick" and self.over is not None else of(self.x)
