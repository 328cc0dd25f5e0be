"""Outputs whose extents the data decide: what says how much of them there is, and cutting them to it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tccompile.errors import InputError
from tccompile.ir.program import Count, Program
from tccompile.runtime.arrays import DeviceArray


def open_axes(program: Program, name: str) -> set[int]:
    """The axes of an output along which the data decide how much there is."""
    return {axis for count in program.counts for axis in count.cuts.get(name, ())}


def wanted(program: Program) -> dict[str, np.ndarray]:
    """An array for each count, which the inference is to write: to know them takes its end."""
    return {count.tensor: np.zeros(program.tensors[count.tensor].shape, np.int64) for count in program.counts}


def cut(counts: Sequence[Count], found: Mapping[str, np.ndarray], made: dict[str, Any]) -> None:
    """Cuts the arrays that an inference made. Raises InputError that names the node if there was no room for what it found."""
    for count in counts:
        there = int(found[count.tensor].item())
        if not 0 <= there <= count.limit:
            raise InputError(
                f"{count.node} finds {there} elements in the data, and the plan has room for {count.limit}: "
                "compile it with a larger --limit"
            )
        for name, axes in count.cuts.items():
            for axis in axes if name in made else ():
                made[name] = _shortened(made[name], axis, there, name)


def check_made(program: Program, given: Mapping[str, Any]) -> None:
    """Raises InputError if the caller gives an array for an output that is cut."""
    for count in program.counts:
        if name := next((name for name in count.cuts if name in given), None):
            raise InputError(
                f"how much there is of output {name!r} is known only when the model has run, as {count.node} decides it: "
                "give no array for it"
            )


def _shortened(array: Any, axis: int, there: int, name: str) -> Any:
    """The first elements along an axis."""
    if isinstance(array, np.ndarray):
        return np.ascontiguousarray(array[(slice(None),) * axis + (slice(there),)])
    assert isinstance(array, DeviceArray)
    if max(array.shape[:axis], default=1) > 1:
        raise InputError(
            f"output {name!r} is cut along axis {axis}, and what is left does not lie together on the GPU: give inputs on the "
            "host, or have the model put that axis first"
        )
    array.shape = (*array.shape[:axis], there, *array.shape[axis + 1 :])
    return array
