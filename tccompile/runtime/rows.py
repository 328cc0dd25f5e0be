"""Plans on any number of examples, one a row: for libraries that bring batches of sizes of their own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tccompile.errors import InputError, UsageError
from tccompile.ir.program import Program
from tccompile.plan.file import Plan
from tccompile.runtime.engine import RECENT
from tccompile.runtime.session import Session


class Rows:
    """Runs a plan on any number of rows, as many at once as `row_sizes` says; the last ones are filled up with zeros."""

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

    def warm(self) -> None:
        """Run every size once, so that no request is the first one of its size."""
        tensors = self.plan.entries[0].program.tensors
        for size in self.sizes:
            self.run({name: np.zeros((size, *tensors[name].shape[1:]), tensors[name].dtype.numpy) for name in self.inputs})

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
    """How many rows are run at once, the fewest first: those of the plan's entries, and of a range's sizes the greatest, halves
    of it and the least, as many as a session keeps ready. Raises UsageError if the first axis is not that of rows."""
    fixed = [e.program for e in plan.entries[: len(plan.entries) - len(plan.families)]]
    ends = [(family.lowest.program, family.highest.program) for family in plan.families]
    rows = [_rows_of(program) for program in (*fixed, *(p for pair in ends for p in pair))]
    kinds = {_of_a_row(program) for program in (*fixed, *(p for pair in ends for p in pair))}
    if len(set(rows[: len(fixed)])) < len(fixed) or len(kinds) > 1 or any(len(family.sizes) != 1 for family in plan.families):
        raise UsageError("the plan's entries and ranges must differ in the number of rows, and in nothing else")
    return sorted({*rows[: len(fixed)], *_rungs(sorted(n for family in plan.families for n in family.sizes[0].all))})


def _rows_of(program: Program) -> int:
    """The rows of all inputs and outputs."""
    shapes = {name: program.tensors[name].shape for name in (*program.inputs, *program.outputs)}
    rows = {shape[0] if shape else None for shape in shapes.values()}
    if not program.inputs or len(rows) != 1 or None in rows or 0 in rows:
        said = ", ".join(f"{n} {'x'.join(map(str, s)) or '(a scalar)'}" for n, s in shapes.items())
        raise UsageError(f"the plan's inputs and outputs must have one row for each example, along the first axis: {said}")
    return int(min(n for n in rows if n is not None))


def _rungs(sizes: Sequence[int]) -> list[int]:
    """Of ordered sizes the greatest, the least that are at least half of that, and so on, and the least of all."""
    if len(sizes) <= RECENT:
        return list(sizes)
    out = [sizes[-1]]
    while len(out) < RECENT - 1 and out[-1] > sizes[0]:
        out.append(next(n for n in sizes if 2 * n >= out[-1]))
    return [*out, sizes[0]]


def _of_a_row(program: Program) -> tuple:
    return tuple(program.tensors[name].shape[1:] for name in (*program.inputs, *program.outputs))


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
