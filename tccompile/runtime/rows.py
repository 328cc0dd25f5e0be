"""Plans on any number of examples, one a row: for libraries that bring batches of sizes of their own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from tccompile.errors import InputError, UsageError
from tccompile.plan.format import Plan
from tccompile.runtime.session import Session


class Rows:
    """Runs a plan on any number of rows, as many at once as the plan's entries have; the last ones are filled up with zeros."""

    def __init__(self, session: Session) -> None:
        """Raises UsageError for a plan whose first axes are not those of rows."""
        self.session, self.plan = session, session.plan
        self.sizes = row_sizes(self.plan)
        program = self.plan.entries[0].program
        self.inputs, self.outputs = program.inputs, program.outputs

    def problem(self, example: Mapping[str, Any]) -> InputError | None:
        """Why one example does not fit the plan."""
        tensors = self.plan.entries[0].program.tensors
        for name in self.inputs:
            if not isinstance(example, Mapping) or name not in example:
                return InputError(f"the example has no {name!r}: it is a dictionary of {', '.join(map(repr, self.inputs))}")
            row, t = np.asarray(example[name]), tensors[name]
            if row.shape != t.shape[1:] or row.dtype != t.dtype.numpy:
                wanted = f"{t.dtype.numpy} {t.shape[1:]}"
                return InputError(f"{name!r} of an example is {wanted}, without an axis of rows; got {row.dtype} {row.shape}")
        return None

    def run(self, columns: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """The outputs' rows, by name. Raises InputError for columns that do not fit."""
        for name in self.inputs:
            if name not in columns:
                raise InputError(
                    f"the batch has no column {name!r}, which the plan takes; it has {', '.join(map(repr, columns))}"
                )
        given = {name: _stacked(name, columns[name]) for name in self.inputs}
        count = {len(rows) for rows in given.values()}
        if len(count) != 1:
            raise InputError(f"columns of {', '.join(map(str, sorted(count)))} rows are no batch")
        (left,) = count
        made: list[list[np.ndarray]] = []
        at = 0
        while at < left or not made:
            size = next((n for n in self.sizes if n >= left - at), self.sizes[-1])
            part = {name: _filled(rows[at : at + size], size) for name, rows in given.items()}
            results = self.session.run(None, part)
            made.append([np.asarray(y)[: left - at] for y in results])
            at += size
        return {name: np.concatenate(parts) for name, parts in zip(self.outputs, zip(*made, strict=True), strict=True)}


def row_sizes(plan: Plan) -> list[int]:
    """How many rows each entry takes, the fewest first. Raises UsageError if the first axis is not that of rows."""
    sizes = []
    for entry in plan.entries:
        program = entry.program
        shapes = {name: program.tensors[name].shape for name in (*program.inputs, *program.outputs)}
        rows = {shape[0] if shape else None for shape in shapes.values()}
        if not program.inputs or len(rows) != 1 or None in rows or 0 in rows:
            said = ", ".join(f"{n} {'x'.join(map(str, s)) or '(a scalar)'}" for n, s in shapes.items())
            raise UsageError(f"the plan's inputs and outputs must have one row for each example, along the first axis: {said}")
        sizes.append(int(min(n for n in rows if n is not None)))
    if len(set(sizes)) < len(sizes) or len({_of_a_row(e.program) for e in plan.entries}) > 1:
        raise UsageError("the plan's entries must differ in the number of rows, and in nothing else")
    return sorted(sizes)


def _of_a_row(program: Any) -> tuple:
    return tuple(program.tensors[name].shape[1:] for name in program.inputs)


def _stacked(name: str, rows: Any) -> np.ndarray:
    """A column as one array: some libraries have rows of their own each as an object."""
    array = np.asarray(rows)
    if array.dtype == object:
        try:
            array = np.stack([np.asarray(row) for row in rows])
        except ValueError as error:
            raise InputError(f"the rows of {name!r} have several shapes ({error}); make them alike first") from error
    return array


def _filled(rows: np.ndarray, size: int) -> np.ndarray:
    if len(rows) == size:
        return rows
    return np.concatenate([rows, np.zeros((size - len(rows), *rows.shape[1:]), rows.dtype)])
