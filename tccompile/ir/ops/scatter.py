"""Updates at given places."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated

import numpy as np

from tccompile.ir.expr import Coord, Element, Expr, Index, View
from tccompile.ir.extent import Shape
from tccompile.ir.moments import Known, Moments
from tccompile.ir.ops.op import OneOf, Op, Ref

COMBINE = {"add": np.add, "mul": np.multiply, "min": np.minimum, "max": np.maximum}


@dataclass(frozen=True, kw_only=True)
class Scatter(Op):
    """y = x, and then for each element i of the updates, in row-major order, y[at(i)] = combine(y[at(i)], updates[i]).

    at       one index for each axis of y over the coordinates of the updates: 0, a coordinate (each at most once), or an
             `Element` at indices that are affine
    combine  "set" (the update itself), "add", "mul", "min" or "max"
    """

    x: Ref
    updates: Ref
    at: tuple[Index, ...]
    combine: Annotated[str, OneOf("set", "add", "mul", "min", "max")] = "set"

    takes_epilogue = False

    def rule(self, shapes: Mapping[str, Shape], y: Shape) -> Iterator[bool]:
        yield shapes[self.x] == y

    @property
    def scattered(self) -> tuple[str, View]:
        return self.updates, View(self.y, self.at)

    def verify(self, where: str) -> None:
        through: list[int] = []
        for index in self.at:
            match index:
                case Index((), 0):
                    continue
                case Index(((Coord(axis), 1),), 0):
                    through.append(axis)
                case Index(((Element(_, inner, _), 1),), 0):
                    assert all(i.affine is not None for i in inner), f"{where}: it reads an index at an index that is not affine"
                case _:
                    raise AssertionError(f"{where}: it writes at {index}")
        assert len(set(through)) == len(through), f"{where}: it writes at one coordinate along two axes"

    def compute(self, values: Mapping[str, np.ndarray], shape: Shape) -> np.ndarray:
        """Of several updates at one place, each after the one before."""
        y, updates = values[self.x].copy(), values[self.updates]
        if not updates.size:
            return y
        where = tuple(np.broadcast_to(index.evaluate(updates.shape, values), updates.shape).reshape(-1) for index in self.at)
        if self.combine == "set":
            last = np.unique(np.ravel_multi_index(where, shape)[::-1], return_index=True)[1] if where else np.array([0])
            keep = updates.size - 1 - last  # the last update of each place
            y[tuple(w[keep] for w in where)] = updates.reshape(-1)[keep]
        else:
            COMBINE[self.combine].at(y, where, updates.reshape(-1))
        return y

    def moments(self, known: Known, at: Sequence[np.ndarray]) -> Moments:
        n = at[0].shape if at else ()
        m, u = known.moments(self.x, at), known.moments(self.updates, [known.random(n, e) for e in known.shape(self.updates)])
        if self.combine in ("add", "mul"):
            return Moments(m.mean + u.mean, m.var + u.var)
        both = Moments(np.stack([m.mean, u.mean], -1), np.stack([m.var, u.var], -1)).mixed()
        return replace(both, low=min(m.low, u.low), high=max(m.high, u.high))

    def growth(self, of: Callable[[str], float], through: Callable[[Expr, float], float]) -> float:
        return max(of(self.x), of(self.updates))
