"""Which of a file's arrays is which of a plan's weights, where names differ: exporters rename what they transpose."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tccompile.errors import UsageError
from tccompile.ir.weights import Source, digest
from tccompile.plan.file import Plan
from tccompile.refit.constants import sources

Arrays = Mapping[str, np.ndarray]


@dataclass(frozen=True)
class Called:
    """What an array is called in a file, and whether it lies there transposed: with its last two axes the other way round."""

    name: str
    transposed: bool = False


def read_map(path: Path) -> dict[str, Called]:
    """What the plan's weights are called elsewhere: {"weight": "name"}, or {"weight": {"name": …, "transposed": true}}."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UsageError(f"{path}: cannot be read as JSON: {error}") from None
    if type(data) is not dict:
        raise UsageError(f"{path}: it must be an object, as {{{EXAMPLE}}}")
    return {weight: _called(path, weight, value) for weight, value in data.items()}


EXAMPLE = '"onnx::MatMul_12": {"name": "layers.0.q_proj.weight", "transposed": true}'


def _called(path: Path, weight: str, value: Any) -> Called:
    given = {"name": value} if type(value) is str else value
    fits = type(given) is dict and {"name"} <= given.keys() <= {"name", "transposed"} and type(given["name"]) is str
    if not fits or type(given.get("transposed", False)) is not bool:
        raise UsageError(f"{path}: {weight!r} must be a name, or as {{{EXAMPLE}}}")
    return Called(**given)


def by_content(plan: Plan, was: Arrays) -> dict[str, Called]:
    """What the plan's weights are called in a file of the values that they had when the plan was made.

    An array of the weight's own name comes first. Raises UsageError for a weight that is not there, or may be several arrays.
    """
    shapes: dict[tuple[int, ...], list[str]] = {}
    for name, values in was.items():
        shapes.setdefault(tuple(sorted(values.shape)), []).append(name)
    found: dict[str, Called] = {}
    known: dict[tuple[Called, str], str] = {}
    for weight, source in sources(plan).items():
        fits: list[Called] = []
        for called in _candidates(weight, source, was, shapes.get(tuple(sorted(source.shape)), ())):
            key = called, source.dtype
            if key not in known:
                known[key] = digest(taken(was, called, source))
            if known[key] == plan.origin.weights[weight]:
                fits.append(called)
                if called == Called(weight):
                    break
        if not fits:
            raise UsageError(f"no array has the values that the plan's weight {weight!r} was made of: say which with --map")
        found[weight] = _only(weight, fits)
    return found | _decided(plan, was)


def _only(weight: str, fits: list[Called]) -> Called:
    """Which of the arrays that have a weight's values it is, its own name's being the last of them."""
    if len(fits) > 1 and fits[-1] != Called(weight):
        several = ", ".join(f"{called.name!r}{' transposed' if called.transposed else ''}" for called in fits)
        raise UsageError(f"the weight {weight!r} has the values of {several}: say which with --map")
    return fits[-1]


def _decided(plan: Plan, was: Arrays) -> dict[str, Called]:
    """The same of weights that were folded, as far as they are there: a checkpoint need not have them."""
    known, found = sources(plan), dict[str, list[Called]]()
    folded = {plan.origin.weights[weight]: weight for weight in plan.origin.decided if weight not in known}
    for name, values in was.items() if folded else ():
        wide = [values.astype(np.float32)] if values.dtype == np.float16 else []
        for weight in {folded[d] for d in map(digest, (values, *wide)) if d in folded}:
            found.setdefault(weight, []).append(Called(name))
    return {weight: _only(weight, sorted(fits, key=lambda called: called.name == weight)) for weight, fits in found.items()}


def _candidates(weight: str, source: Source, was: Arrays, names: Iterable[str]) -> Iterator[Called]:
    """What might be the weight: by its own name first, as it lies and transposed."""
    for name in sorted(names, key=lambda name: name != weight):
        values = was[name]
        if not _widens(values.dtype, np.dtype(source.dtype)):
            continue
        if values.shape == source.shape:
            yield Called(name)
        turned = values.swapaxes(-1, -2).shape if values.ndim > 1 else None
        if turned == source.shape and (turned != values.shape or turned[-1] > 1):
            yield Called(name, True)


def _widens(given: np.dtype, wanted: np.dtype) -> bool:
    """Whether a type's values are all values of another one."""
    return given == wanted or (given.kind == wanted.kind == "f" and given.itemsize < wanted.itemsize)


def taken(arrays: Arrays, called: Called, source: Source) -> np.ndarray:
    """An array of a file as the weight that it is, in a type that has all its values."""
    values = arrays[called.name]
    values = values.swapaxes(-1, -2) if called.transposed and values.ndim > 1 else values
    return values.astype(source.dtype) if _widens(values.dtype, np.dtype(source.dtype)) else values


def named(plan: Plan, new: Arrays, called: Mapping[str, Called], whole: bool) -> dict[str, np.ndarray]:
    """The plan's weights from a file's arrays, by the names that they have there, or else by their own.

    whole  whether they are all of a model's: then those that were folded must be there, too, so that it shows if they differ
    """
    known = sources(plan)
    for weight in called:
        if weight not in known and weight not in plan.origin.weights:
            raise UsageError(f"the plan has no weight {weight!r}; tcinspect --weights lists those that it has")
    out: dict[str, np.ndarray] = {}
    for weight in (*known, *(weight for weight in plan.origin.decided if weight not in known)):
        there = called.get(weight, Called(weight))
        if there.name in new:
            out[weight] = taken(new, there, known[weight]) if weight in known else new[there.name]
        elif weight in known or weight in called or whole:
            raise UsageError(
                f"the plan's weight {weight!r} is not there{f' as {there.name!r}' if there.name != weight else ''}: "
                "give the old weights by the new names (--was OLD), or say what it is called (--map NAMES.json)"
            )
    return out
