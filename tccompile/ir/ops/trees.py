"""Decision trees."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated

import numpy as np

from tccompile.errors import PlanError
from tccompile.ir.extent import Shape
from tccompile.ir.moments import Known, Moments
from tccompile.ir.ops.op import Integers, OneOf, Op, Ref

TREE = 1 << 14
"""Branches from the root of a decision tree to a leaf: at most."""

AT_ONCE = 1 << 20
"""Walks that are taken at once: what they need takes some times their memory."""

LESS, EQUAL, GREATER, UNORDERED = 1, 2, 4, 8
"""The bits of a branch's mode."""


@dataclass(frozen=True, kw_only=True)
class Trees(Op):
    """y = what the leaves say that the rows of x come to, in each of so many trees: x (N, F), y (N, K).

    branches  (4 M,), int32: a record of four numbers for each node; the first `trees` of them are the roots. Of a branch they are
              the bits of a float32 t, 16 f + mode, c, and 0: it is left for record c if what feature f is to t is in `mode`
              (bits 0 to 3: less, equal, greater, or neither as one of them is NaN), and for record c + 1 otherwise. Of a leaf
              they are 0, 0, the first of its entries, and how many it has plus 1
    leaves    (2 E,), int32: the entries: a target k, and the bits of a float32 that is combined with y[:, k]
    depth     a walk ends after so many branches
    combine   "add", "min" or "max"; targets of which none of the leaves says anything are 0
    """

    x: Ref
    branches: Integers
    leaves: Integers
    trees: int
    depth: int
    combine: Annotated[str, OneOf("add", "min", "max")] = "add"

    takes_epilogue = False

    def rule(self, shapes: Mapping[str, Shape], y: Shape) -> Iterator[bool]:
        x, branches, leaves = shapes[self.x], shapes[self.branches], shapes[self.leaves]
        yield len(x) == len(y) == 2 and x[0] == y[0] and x[1] >= 1
        yield len(branches) == len(leaves) == 1 and branches[0] % 4 == 0 and branches[0] >= 8 and leaves[0] % 2 == 0
        yield 1 <= self.trees <= branches[0] // 4 and 0 <= self.depth < branches[0] // 4 and self.depth <= TREE

    def compute(self, values: Mapping[str, np.ndarray], shape: Shape) -> np.ndarray:
        """Each row walks from every root to a leaf. Raises PlanError for trees that lead out of themselves."""
        x = values[self.x].astype(np.float32, copy=False)
        records = values[self.branches].astype(np.int32).reshape(-1, 4)
        entries = values[self.leaves].astype(np.int32).reshape(-1, 2)
        _check(self, records, entries, x.shape[1], shape[1])
        out = np.empty(shape, np.float32)
        step = max(AT_ONCE // self.trees, 1)
        for i in range(0, shape[0], step):
            rows = x[i : i + step]
            out[i : i + step] = _combined(self, entries, *_walk(self, rows, records), (len(rows), shape[1]))
        return out

    def moments(self, known: Known, at: Sequence[np.ndarray]) -> Moments:
        said = known.constant(self.leaves)[1::2].astype(np.int32).view(np.float32).astype(np.float64)
        one = np.ones(at[0].shape)
        m = Moments(one * said.mean(), one * said.var(), float(said.min()), float(said.max()))
        return (m.summed(self.trees) if self.combine == "add" else m).with_zero()


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
