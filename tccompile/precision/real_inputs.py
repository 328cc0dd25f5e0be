"""A user's real inputs, and the shapes at which a model is run on them, which need not be those that it is built for."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import onnx_graphsurgeon as gs

from tccompile.errors import TccompileError
from tccompile.ir.metric import relative_error
from tccompile.ir.program import Program
from tccompile.ir.reference import evaluate
from tccompile.load.model import Opened, load
from tccompile.lower.graph import lower
from tccompile.precision.ranges import resized, why_too_long
from tccompile.rewrites import rewrite

Feeds = Mapping[str, np.ndarray]

Declared = dict[str, tuple[int | None, ...]]
"""The extents of each input that the model says; None where any will do."""

ALIKE = 1e-3
"""How far the results of two inputs together may be from those of each alone, by the order of sums, say."""


def at_own_shapes(model: Opened, arrays: Feeds, other_sizes: bool = False) -> tuple[gs.Graph, list[Feeds]] | None:
    """The model's rewritten graph at shapes that the arrays fit and at which it can be run, and the sets of inputs in them.

    Each for itself if inputs are in a batch and results do not depend on which others are in it, whatever batch the model is
    exported for; or else of the arrays' own shapes, if the model leaves them open. None if it takes them in neither way. The
    arrays are such as `feeds.samples` takes: of all inputs, of their types.

    other_sizes  images, which are inputs of rank 4, may be of other sizes than the model says
    """
    declared = _declared(model)
    if other_sizes:
        declared = {name: (*dims[:2], None, None) if len(dims) == 4 else dims for name, dims in declared.items()}
    return _one_by_one(model, declared, arrays) or _as_they_are(model, declared, arrays)


def in_batches(program: Program, arrays: Feeds, last: Callable[[int], int] = lambda count: count) -> list[Feeds] | None:
    """The inputs in the arrays put together, in their order, to batches as large as the program's; the last is filled up from the
    first on. None if they do not go together so.

    last  of so many inputs, how many are taken, from the end
    """
    ranks = {name: program.tensors[name].rank for name in program.inputs}
    rows = _rows(arrays, ranks)
    batches = {program.tensors[name].shape[0] for name in program.inputs} if rows else set()
    if rows is None or len(batches) != 1 or any(rows[n].shape[1:] != program.tensors[n].shape[1:] for n in program.inputs):
        return None
    whole, batch = len(next(iter(rows.values()))), batches.pop()
    first, count = whole - last(whole), last(whole)
    takes = [first + np.arange(i, i + batch) % count for i in range(0, count, max(batch, 1))]
    return [{name: rows[name][take] for name in program.inputs} for take in takes]


def _rows(arrays: Feeds, ranks: Mapping[str, int]) -> dict[str, np.ndarray] | None:
    """The arrays such that each has its input's rank, and along the first axis one input after the other; None if they cannot."""
    rows = {}
    for name, rank in ranks.items():
        array = arrays[name]
        if rank < 1 or array.ndim not in (rank, rank + 1):
            return None
        rows[name] = array if array.ndim == rank else array.reshape(-1, *array.shape[2:])
    counts = {len(array) for array in rows.values()}
    return rows if len(counts) == 1 and counts != {0} else None


def _one_by_one(model: Opened, declared: Declared, arrays: Feeds) -> tuple[gs.Graph, list[Feeds]] | None:
    rows = _rows(arrays, {name: len(dims) for name, dims in declared.items()})
    if rows is None or not all(_takes(declared[name][1:], array.shape[1:]) for name, array in rows.items()):
        return None
    count = len(next(iter(rows.values())))
    one = _at(model, {name: (1, *array.shape[1:]) for name, array in rows.items()})
    if one is None or why_too_long(lower(one)):
        return None
    runs: list[Feeds] = [{name: array[i : i + 1] for name, array in rows.items()} for i in range(count)]
    if all(dims[0] == 1 for dims in declared.values()):  # that is how it is exported, and it may hold that number inside
        return one, runs
    two = _at(model, {name: (2, *array.shape[1:]) for name, array in rows.items()})
    if two is None:
        return None
    both = {name: array[np.arange(2) % count] for name, array in rows.items()}
    return (one, runs) if _alike(model, one, two, [runs[0], runs[1 % count]], both) else None


def _alike(model: Opened, one: gs.Graph, two: gs.Graph, apart: Sequence[Feeds], both: Feeds) -> bool:
    """Whether two inputs together give what each of them gives alone."""
    single, double = lower(one), lower(two)
    with np.errstate(all="ignore"):
        alone = [evaluate(single, feeds, model.weights) for feeds in apart]
        together = evaluate(double, both, model.weights)
    for name, y in together.items():
        parts = [a[name] for a in alone]
        if not y.ndim or any(p.ndim != y.ndim for p in parts) or sum(len(p) for p in parts) != len(y):
            return False
        joined = np.concatenate(parts)
        if joined.shape != y.shape or not relative_error(y, joined) <= ALIKE:
            return False
    return True


def _as_they_are(model: Opened, declared: Declared, arrays: Feeds) -> tuple[gs.Graph, list[Feeds]] | None:
    more = {arrays[name].ndim - len(dims) for name, dims in declared.items()}
    if more not in ({0}, {1}):
        return None
    row = more == {1}
    shapes = {name: arrays[name].shape[row:] for name in declared}
    if not all(_takes(dims, shapes[name]) for name, dims in declared.items()):
        return None
    counts = {len(arrays[name]) for name in declared} if row else {1}
    graph = _at(model, shapes) if len(counts) == 1 and counts != {0} else None
    if graph is None or why_too_long(lower(graph)):
        return None
    return graph, [{n: arrays[n][i] if row else arrays[n] for n in declared} for i in range(counts.pop())]


def _declared(model: Opened) -> Declared:
    """The extents of each input that the model says; None where it leaves one open."""
    given = {value.name: value.type.tensor_type.shape.dim for value in model.proto.graph.input if value.name not in model.weights}
    fixed = {name: [d.WhichOneof("value") == "dim_value" and d.dim_value >= 0 for d in dims] for name, dims in given.items()}
    return {n: tuple(d.dim_value if f else None for d, f in zip(dims, fixed[n], strict=True)) for n, dims in given.items()}


def _takes(declared: Sequence[int | None], shape: Sequence[int]) -> bool:
    same = len(declared) == len(shape) and all(d in (None, n) for d, n in zip(declared, shape, strict=True))
    return same and math.prod(shape) > 0


def _at(model: Opened, shapes: Mapping[str, tuple[int, ...]]) -> gs.Graph | None:
    """The model's rewritten graph at other shapes than it says; None if it does not take them."""
    try:
        return rewrite(load(resized(model, shapes), shapes))
    except TccompileError:
        return None
