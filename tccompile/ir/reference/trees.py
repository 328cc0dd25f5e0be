"""Decision trees: each row of the features walks from every root to a leaf."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from tccompile.errors import PlanError
from tccompile.ir.expr import Shape
from tccompile.ir.program import Trees

AT_ONCE = 1 << 20
"""Walks that are taken at once: what they need takes some times their memory."""

LESS, EQUAL, GREATER, UNORDERED = 1, 2, 4, 8
"""The bits of a branch's mode."""


def trees(op: Trees, values: Mapping[str, np.ndarray], shape: Shape) -> np.ndarray:
    """The entries of the leaves that rows come to, combined. Raises PlanError for trees that lead out of themselves."""
    x = values[op.x].astype(np.float32, copy=False)
    records = values[op.branches].astype(np.int32).reshape(-1, 4)
    entries = values[op.leaves].astype(np.int32).reshape(-1, 2)
    _check(op, records, entries, x.shape[1], shape[1])
    out = np.empty(shape, np.float32)
    step = max(AT_ONCE // op.trees, 1)
    for i in range(0, shape[0], step):
        rows = x[i : i + step]
        out[i : i + step] = _combined(op, entries, *_walk(op, rows, records), (len(rows), shape[1]))
    return out


def _check(op: Trees, records: np.ndarray, entries: np.ndarray, features: int, targets: int) -> None:
    leaf = records[:, 3] != 0
    branch, first, count = records[~leaf], records[leaf, 2].astype(np.int64), records[leaf, 3].astype(np.int64) - 1
    inside = [
        (branch[:, 1] >= 0) & (branch[:, 1] >> 4 < features) & (branch[:, 2] >= 0) & (branch[:, 2] < len(records) - 1),
        (first >= 0) & (count >= 0) & (first + count <= len(entries)),
        (entries[:, 0] >= 0) & (entries[:, 0] < targets),
    ]
    if not all(part.all() for part in inside):
        raise PlanError(f"node {op.nodes[0]!r}: the constants of its trees name features, nodes or targets that there are not")


def _walk(op: Trees, x: np.ndarray, records: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """For each row and tree, the first entry of the leaf it comes to, and how many there are."""
    at = np.tile(np.arange(op.trees), len(x))
    row = np.repeat(np.arange(len(x)), op.trees)
    going = np.arange(at.size)
    for _ in range(op.depth + 1):
        going = going[records[at[going], 3] == 0]
        if not going.size:
            break
        bits, packed, child, _ = records[at[going]].T
        value, limit = x[row[going], packed >> 4], np.ascontiguousarray(bits).view(np.float32)
        is_ = np.where(value < limit, LESS, np.where(value == limit, EQUAL, np.where(value > limit, GREATER, UNORDERED)))
        at[going] = child + ((packed & is_) == 0)
    if going.size:
        raise PlanError(f"node {op.nodes[0]!r}: a walk through its trees takes more than {op.depth} steps")
    return records[at, 2].reshape(len(x), op.trees), records[at, 3].reshape(len(x), op.trees) - 1


def _combined(op: Trees, entries: np.ndarray, first: np.ndarray, count: np.ndarray, shape: Shape) -> np.ndarray:
    weights = np.ascontiguousarray(entries[:, 1]).view(np.float32)
    neutral = {"add": 0.0, "min": np.inf, "max": -np.inf}[op.combine]
    out = np.full(shape, neutral, np.float64)
    for i in range(int(count.max(initial=0))):
        rows, tree = np.nonzero(count > i)
        at = first[rows, tree] + i
        combine = {"add": np.add, "min": np.minimum, "max": np.maximum}[op.combine]
        combine.at(out, (rows, entries[at, 0]), weights[at])
    return np.where(out == neutral, 0.0, out).astype(np.float32)
