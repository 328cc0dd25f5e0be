"""Ops that go along lines of elements: cumulative sums, places of the largest elements, and updates at given places."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from tccompile.ir.expr import Shape
from tccompile.ir.program import Cumulate, Scatter, TopK


def cumulate(op: Cumulate, values: Mapping[str, np.ndarray], shape: Shape) -> np.ndarray:
    """Sums or products up to each element along an axis."""
    x = np.flip(values[op.x], op.axis) if op.reverse else values[op.x]
    y = (np.cumsum if op.combine == "add" else np.cumprod)(x, op.axis, x.dtype)
    if op.exclusive and shape[op.axis]:
        first = np.full((*shape[: op.axis], 1, *shape[op.axis + 1 :]), op.combine == "mul", x.dtype)
        y = np.concatenate([first, np.delete(y, -1, op.axis)], op.axis)
    return np.flip(y, op.axis) if op.reverse else y


def top_k(op: TopK, values: Mapping[str, np.ndarray], shape: Shape) -> np.ndarray:
    """Where the first elements of each line would be in a stable sort."""
    x = values[op.x]
    if x.dtype.kind == "f":
        floats = -x if op.largest else x
        found = np.argsort(floats, op.axis, kind="stable")  # NaN last
        if op.largest:  # those come first then: a stable sort by whether they are none
            sound = ~np.isnan(np.take_along_axis(x, found, op.axis))
            found = np.take_along_axis(found, np.argsort(sound, op.axis, kind="stable"), op.axis)
        order = found
    else:
        order = np.argsort(~x if op.largest else x, op.axis, kind="stable")  # -x - 1, which does not overflow
    return np.take(order, np.arange(shape[op.axis]), op.axis).astype(np.int64)


COMBINE = {"add": np.add, "mul": np.multiply, "min": np.minimum, "max": np.maximum}


def scatter(op: Scatter, values: Mapping[str, np.ndarray], shape: Shape) -> np.ndarray:
    """x with updates: of several at one place, each after the one before."""
    y, updates = values[op.x].copy(), values[op.updates]
    if not updates.size:
        return y
    where = tuple(np.broadcast_to(index.evaluate(updates.shape, values), updates.shape).reshape(-1) for index in op.at)
    if op.combine == "set":
        last = np.unique(np.ravel_multi_index(where, shape)[::-1], return_index=True)[1] if where else np.array([0])
        keep = updates.size - 1 - last  # the last update of each place
        y[tuple(w[keep] for w in where)] = updates.reshape(-1)[keep]
    else:
        COMBINE[op.combine].at(y, where, updates.reshape(-1))
    return y
