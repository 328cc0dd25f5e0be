"""Ensembles of decision trees, ai.onnx.ml's TreeEnsembleRegressor and TreeEnsemble, as one op: records that are walked through.

What is done with the sums beside (base values, averages, transforms) the load stage has made nodes of their own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_graphsurgeon as gs

from tccompile.ir.ops import Trees
from tccompile.ir.ops.trees import EQUAL, GREATER, LESS, TREE, UNORDERED
from tccompile.ir.types import DType
from tccompile.lower.builder import Builder
from tccompile.lower.lines import plain

MODES = {
    "BRANCH_LEQ": LESS | EQUAL,
    "BRANCH_LT": LESS,
    "BRANCH_GTE": GREATER | EQUAL,
    "BRANCH_GT": GREATER,
    "BRANCH_EQ": EQUAL,
    "BRANCH_NEQ": LESS | GREATER | UNORDERED,
}
NUMBERED = (*MODES, "BRANCH_MEMBER")
"""The modes of TreeEnsemble, which are numbers."""

AGGREGATES = {"SUM": "add", "MIN": "min", "MAX": "max"}
NUMBERED_AGGREGATES = ("AVERAGE", "SUM", "MIN", "MAX")
MAX_FEATURES = 1 << 27
AGAIN = "export the model again: ONNX Runtime does not take it either"


@dataclass(frozen=True)
class Forest:
    """Branches first, then leaves; arrays of one number for each branch, and of one for each entry of a leaf.

    roots   numbers of nodes, as `true` and `false` are
    modes   in the bits that Trees has
    leaves  how many there are; `leaf`: the one that each entry belongs to, counted from 0
    """

    roots: np.ndarray
    features: np.ndarray
    thresholds: np.ndarray
    modes: np.ndarray
    true: np.ndarray
    false: np.ndarray
    leaves: int
    leaf: np.ndarray
    targets: np.ndarray
    weights: np.ndarray


def tree_ensemble_regressor(node: gs.Node, b: Builder) -> None:
    """TreeEnsembleRegressor without base values or a transform, of sums, minima or maxima."""
    kinds = [_text(m) for m in b.attr("nodes_modes", ())]
    for kind in dict.fromkeys(kinds):
        if kind not in MODES and kind != "LEAF":
            raise b.refuse(f"the mode {kind!r} of its nodes is none that there is", AGAIN)
    count, branch = len(kinds), np.array([kind != "LEAF" for kind in kinds], bool)
    number = np.where(branch, np.cumsum(branch) - 1, branch.sum() + np.cumsum(~branch) - 1)
    tree = _ints(b, "nodes_treeids", count)
    found = _Lookup(b, tree, _ints(b, "nodes_nodeids", count), number)
    true, false = (found(tree[branch], _ints(b, f"nodes_{side}nodeids", count)[branch]) for side in ("true", "false"))
    roots = np.setdiff1d(number, np.concatenate([true, false]))
    if len(roots) != len(np.unique(tree)) or not len(roots):
        raise b.refuse(f"its {len(np.unique(tree))} trees have {len(roots)} roots", AGAIN)
    missing = _ints(b, "nodes_missing_value_tracks_true", count, 0)[branch] != 0
    modes = np.array([MODES[kind] for kind in kinds if kind != "LEAF"], np.int64) | UNORDERED * missing
    features, values = _ints(b, "nodes_featureids", count)[branch], _numbers(b, "nodes_values", count)[branch]
    targets = _ints(b, "target_ids")
    leaf = found(*(_ints(b, f"target_{what}ids", len(targets)) for what in ("tree", "node"))) - branch.sum()
    kept = leaf >= 0  # weights of branches count for nothing
    weights = _numbers(b, "target_weights", len(targets))
    leaves = int((~branch).sum())
    forest = Forest(roots, features, values, modes, true, false, leaves, leaf[kept], targets[kept], weights[kept])
    _emit(node, b, forest, AGGREGATES[_text(b.attr("aggregate_function", "SUM"))])


def tree_ensemble(node: gs.Node, b: Builder) -> None:
    """TreeEnsemble of sums, minima or maxima without a transform: its branches and leaves are numbered by themselves."""
    modes = _array(b.attr("nodes_modes", ())).astype(np.int64)
    n = len(modes)
    if not ((modes >= 0) & (modes < len(NUMBERED))).all():
        raise b.refuse(f"its nodes have modes up to {modes.max()}; there are {len(NUMBERED)}", AGAIN)
    targets, weights = _ints(b, "leaf_targetids"), _numbers(b, "leaf_weights")
    missing = _ints(b, "nodes_missing_value_tracks_true", n, 0) != 0
    masks = np.array([MODES.get(NUMBERED[m], EQUAL) for m in modes], np.int64) | UNORDERED * missing
    features, values = _ints(b, "nodes_featureids", n), _numbers(b, "nodes_splits", n)
    children = []
    for side in ("true", "false"):
        ids, is_leaf = _ints(b, f"nodes_{side}nodeids", n), _ints(b, f"nodes_{side}leafs", n) != 0
        if ((ids < 0) | (ids >= np.where(is_leaf, len(targets), n))).any():
            raise b.refuse(f"its nodes_{side}nodeids name nodes that there are not", AGAIN)
        children.append(np.where(is_leaf, ~ids, ids))
    branches = _with_members(b, modes, [features, values, masks, *children])
    true, false = (np.where(ids < 0, len(ids) + ~ids, ids) for ids in branches[3:])
    roots, leaves = _ints(b, "tree_roots"), np.arange(len(targets))
    if not ((roots >= 0) & (roots < n)).all():
        raise b.refuse("its tree_roots name nodes that there are not", AGAIN)
    features, values, masks, *_ = branches
    forest = Forest(roots, features, values, masks, true, false, len(targets), leaves, targets, weights)
    _emit(node, b, forest, AGGREGATES[NUMBERED_AGGREGATES[b.attr("aggregate_function", 1)]])


def _with_members(b: Builder, modes: np.ndarray, branches: Sequence[np.ndarray]) -> list[np.ndarray]:
    """The branches (features, values, modes, true, false) with one for each value of those that ask for membership of a set."""
    asking = np.flatnonzero(modes == NUMBERED.index("BRANCH_MEMBER"))
    values = _array(b.attr("membership_values", ())).reshape(-1)
    ends = np.flatnonzero(np.isnan(values))
    sets = np.split(values, ends)
    if len(ends) != len(asking):
        raise b.refuse(f"{len(asking)} of its nodes ask for sets, and its membership_values are {len(ends)}", AGAIN)
    rows = list(zip(*(column.tolist() for column in branches), strict=True))
    for node, members in zip(asking.tolist(), sets, strict=False):
        feature, _, mask, true, false = rows[node]
        first, *others = members[~np.isnan(members)].tolist() or [np.nan]
        last, rows[node] = node, (feature, first, mask, true, false)
        for value in others:  # one after the other: what none of them equals goes on from the last
            rows[last] = (*rows[last][:4], len(rows))
            last = len(rows)
            rows.append((feature, value, EQUAL, true, false))
    return [np.array(column, old.dtype) for column, old in zip(zip(*rows, strict=True), branches, strict=True)]


# --- Attributes ------------------------------------------------------------------------------------------------------


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else value


def _array(value: Any) -> np.ndarray:
    return np.asarray(value.values if isinstance(value, gs.Constant) else value)


def _ints(b: Builder, name: str, count: int | None = None, default: int | None = None) -> np.ndarray:
    """An attribute's integers, as many as are asked for."""
    values = _array(b.attr(name, ())).astype(np.int64).reshape(-1)
    if default is not None and not values.size:
        return np.full(count or 0, default, np.int64)
    if count is not None and len(values) != count:
        raise b.refuse(f"its {name} are {len(values)} where {count} are asked for", AGAIN)
    return values


def _numbers(b: Builder, name: str, count: int | None = None) -> np.ndarray:
    """An attribute's floats, or doubles of the attribute that has them as a tensor."""
    given = b.attr(f"{name}_as_tensor")
    values = _array(b.attr(name, ()) if given is None else given).reshape(-1)
    values = values.astype(np.float64) if values.dtype == np.float64 and _is_tensor(b, name) else values.astype(np.float32)
    if count is not None and len(values) != count:
        raise b.refuse(f"its {name} are {len(values)} where {count} are asked for", AGAIN)
    return values.astype(np.float64)


def _is_tensor(b: Builder, name: str) -> bool:
    return any(isinstance(b.attr(n), gs.Constant) for n in (name, f"{name}_as_tensor"))


class _Lookup:
    """The numbers of nodes by their tree and their number there."""

    def __init__(self, b: Builder, tree: np.ndarray, node: np.ndarray, number: np.ndarray) -> None:
        self.b, self.numbers = b, dict(zip(zip(tree.tolist(), node.tolist(), strict=True), number.tolist(), strict=True))
        if len(self.numbers) < len(number):
            raise b.refuse("two of its nodes have the same tree and number", AGAIN)

    def __call__(self, tree: np.ndarray, node: np.ndarray) -> np.ndarray:
        try:
            return np.array([self.numbers[key] for key in zip(tree.tolist(), node.tolist(), strict=True)], np.int64)
        except KeyError as error:
            raise self.b.refuse(f"tree {error.args[0][0]} has no node {error.args[0][1]}, which is named", AGAIN) from None


# --- Records ---------------------------------------------------------------------------------------------------------


def _emit(node: gs.Node, b: Builder, forest: Forest, combine: str) -> None:
    """The op, and the constants that it walks through."""
    x, y = b.value(node.inputs[0]), b.result(node.outputs[0])
    features = x.shape[-1] if x.rank == 2 else 0
    for what, ids, count in (("features", forest.features, features), ("targets", forest.targets, y.shape[1])):
        if ids.size and not 0 <= ids.min() <= ids.max() < count:
            raise b.refuse(f"its trees name {what} {ids.min()} to {ids.max()} of {count}", AGAIN)
    if features > MAX_FEATURES:
        raise b.refuse(f"rows have {features} features", f"at most {MAX_FEATURES} are supported")
    limits = _rounded(forest, not _narrow(node.inputs[0]))
    starts, entries = _entries(b, forest, combine)
    branches, depth = _records(b, forest, *limits, starts)
    if x.dtype is not DType.F32:
        x = b.operand(node.inputs[0])
    b.emit(
        Trees, y, x=x.name, branches=b.literal(f"{y.name}.branches", branches.reshape(-1)).name,
        leaves=b.literal(f"{y.name}.leaves", entries.reshape(-1)).name, trees=len(forest.roots), depth=depth, combine=combine,
        epilogue=plain(DType.F32),
    )  # fmt: skip


def _narrow(t: gs.Tensor) -> bool:
    """Whether all values are float32, if only in a wider type."""
    casts = [n for n in t.inputs if n.op == "Cast"]
    return np.dtype(casts[0].inputs[0].dtype if casts else t.dtype) == np.float32


def _rounded(forest: Forest, wide: bool) -> tuple[np.ndarray, np.ndarray]:
    """The thresholds as float32, and the modes, such that float32 features fall on the sides that they have with doubles.

    Of features that are doubles themselves (`wide`) and become float32, equals stay equal if both are rounded to nearest.
    """
    values, modes = forest.thresholds, forest.modes.copy()
    with np.errstate(over="ignore"):
        near = values.astype(np.float32)
    if not wide:
        between = near.astype(np.float64) != values
        sides = modes & (LESS | EQUAL | GREATER)
        down = np.where(near > values, np.nextafter(near, np.float32(-np.inf)), near)
        up = np.where(near < values, np.nextafter(near, np.float32(np.inf)), near)
        near = np.where(np.isin(sides, (LESS | EQUAL, GREATER)), down, up)
        modes[between & (sides == EQUAL)] &= ~EQUAL
        modes[between & (sides == LESS | GREATER)] |= EQUAL
    nothing = np.isnan(near)  # which no feature is less than, equal to, or greater than
    other = (modes & LESS != 0) & (modes & GREATER != 0)
    modes[nothing] = (modes[nothing] & UNORDERED) | np.where(other[nothing], LESS | EQUAL | GREATER, 0)
    return np.where(nothing, np.float32(0), near).astype(np.float32), modes


def _entries(b: Builder, forest: Forest, combine: str) -> tuple[np.ndarray, np.ndarray]:
    """Where the entries of each leaf begin and, at last, end; and the entries."""
    order = np.argsort(forest.leaf, kind="stable")
    leaf, targets = forest.leaf[order], forest.targets[order]
    with np.errstate(over="ignore"):
        weights = forest.weights[order].astype(np.float32)
    if combine != "add" and np.isinf(weights).any():
        raise b.refuse("a leaf of its trees has an infinite weight", "export the model with finite weights")
    entries = np.stack([targets.astype(np.int32), weights.view(np.int32)], 1) if len(leaf) else np.zeros((1, 2), np.int32)
    return np.searchsorted(leaf, np.arange(forest.leaves + 1)), entries


def _records(b: Builder, forest: Forest, limits: np.ndarray, modes: np.ndarray, starts: np.ndarray) -> tuple[np.ndarray, int]:
    """The records of Trees, level after level, and how many branches the longest way from a root has."""
    n = len(forest.features)
    own = np.zeros((n + forest.leaves, 4), np.int64)
    own[:n, 0], own[:n, 1] = limits.view(np.int32), 16 * forest.features + modes
    own[n:, 2], own[n:, 3] = starts[:-1], np.diff(starts) + 1
    rank, levels = np.full(n, -1), list[np.ndarray]()
    level = np.unique(forest.roots[forest.roots < n])
    taken = 0
    while level.size:
        if len(levels) >= min(n, TREE):
            raise b.refuse(
                f"its trees have ways of more than {len(levels)} branches", f"cycles and more than {TREE} are not supported"
            )
        levels.append(level)
        new = level[rank[level] < 0]
        rank[new] = taken + np.arange(len(new))
        taken += len(new)
        following = np.unique(np.concatenate([forest.true[level], forest.false[level]]))
        level = following[following < n]
    trees, reached = len(forest.roots), np.flatnonzero(rank >= 0)
    own[reached, 2] = trees + 2 * rank[reached]
    out = np.zeros((max(trees + 2 * taken, 2), 4), np.int64)
    out[len(out) - 1, 3] = 1  # if there is one leaf only
    out[:trees] = own[forest.roots]
    out[own[reached, 2]], out[own[reached, 2] + 1] = own[forest.true[reached]], own[forest.false[reached]]
    return out.astype(np.int32), len(levels)
