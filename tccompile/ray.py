"""Plans in Ray: batches of a data set, and requests to a service. The extra `ray` brings what this needs.

    import ray
    import tccompile.ray

    pool = ray.data.ActorPoolStrategy(size=4)
    made = images.map_batches(tccompile.ray.Batches, fn_constructor_args=("model.plan",), batch_size=32, num_gpus=1, compute=pool)
    handle = ray.serve.run(tccompile.ray.service("model.plan", num_gpus=1))

A plan is shared by its path, which every node must have; each actor opens a session of its own on the GPU that Ray gives it.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tccompile.errors import InputError, UsageError, extra
from tccompile.plan.format import Plan, read_plan
from tccompile.runtime.session import Session

with extra("ray"):
    import ray

__all__ = ["Batches", "service"]


class _Rows:
    """Runs a plan on any number of rows, as many at once as the plan's entries have; the last ones are filled up with zeros."""

    def __init__(self, plan: str | os.PathLike[str], device: str, trust: str | os.PathLike[str] | None) -> None:
        self.session = Session(plan, device, trust=trust)
        self.plan = self.session.plan
        self.sizes = _sizes(self.plan)
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


def _sizes(plan: Plan) -> list[int]:
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
    """A column as one array: Ray has tensors as arrays, and rows of unequal shapes as objects."""
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


def _device(device: str | None) -> str:
    """The GPU that Ray gives this process, which sees no other; without one, the CPU."""
    if device is not None:
        return device
    return "gpu" if ray.get_runtime_context().get_accelerator_ids().get("GPU") else "cpu"


class Batches:
    """For `Dataset.map_batches`: columns of the inputs' names go in, columns of the outputs' names come with the others.

    plan    the path of a plan, on every node
    device  as for `Session`; by default the GPU that `map_batches(num_gpus=…)` asks Ray for, or the CPU without one
    keep    whether the inputs' columns stay; others always do
    trust   as for `Session`

    A batch may have any number of rows: it is cut to what the plan takes, and the last rows are filled up with zeros.
    """

    def __init__(
        self,
        plan: str | os.PathLike[str],
        device: str | None = None,
        keep: bool = False,
        trust: str | os.PathLike[str] | None = None,
    ) -> None:
        self.rows, self.keep = _Rows(plan, _device(device), trust), keep

    def __call__(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """A batch of Ray's, with NumPy arrays. Raises InputError for one that does not fit the plan."""
        made = self.rows.run(batch)
        kept = {name: column for name, column in batch.items() if self.keep or name not in self.rows.inputs}
        if twice := sorted(kept.keys() & made.keys()):
            raise InputError(f"the data set has a column {twice[0]!r}, as the plan has an output: rename it first")
        return {**kept, **made}


def service(
    plan: str | os.PathLike[str],
    *,
    wait: float = 0.005,
    device: str | None = None,
    trust: str | os.PathLike[str] | None = None,
    name: str = "tccompile",
    **deployment: Any,
) -> Any:
    """A Ray Serve application: `handle.remote({"x": row})` gives the outputs of one example, by name.

    plan        the path of a plan, on every node
    wait        how long a replica gathers requests for a batch, in seconds; a full one starts at once. They are as large as the
                plan's largest entry
    deployment  options of Ray Serve's: num_replicas, autoscaling_config; `num_gpus` is for a replica's actor
    """
    with extra("ray"):
        from ray import serve
    options = dict(deployment.pop("ray_actor_options", {}))
    if (gpus := deployment.pop("num_gpus", None)) is not None:
        options["num_gpus"] = gpus
    largest = _sizes(read_plan(plan))[-1]
    deployment.setdefault("max_ongoing_requests", 2 * largest)  # so that the next batch is there when one ends

    class Replica:
        """A session, and the requests that wait for it."""

        def __init__(self) -> None:
            self.rows = _Rows(plan, _device(device), trust)

        async def __call__(self, example: Mapping[str, Any]) -> dict[str, np.ndarray]:
            answer = await self.batch(example)
            if isinstance(answer, Exception):
                raise answer
            return answer

        @serve.batch(max_batch_size=largest, batch_wait_timeout_s=wait)
        async def batch(self, examples: Sequence[Mapping[str, Any]]) -> list[Any]:
            return await asyncio.to_thread(_answers, self.rows, examples)

    return serve.deployment(Replica, name=name, ray_actor_options=options, **deployment).bind()


def _answers(rows: _Rows, examples: Sequence[Mapping[str, Any]]) -> list[dict[str, np.ndarray] | Exception]:
    """The outputs of each example. One that does not fit gets an error, and the others their outputs all the same."""
    problems = [rows.problem(example) for example in examples]
    fit = [e for e, problem in zip(examples, problems, strict=True) if problem is None]
    made = rows.run({name: np.stack([np.asarray(e[name]) for e in fit]) for name in rows.inputs}) if fit else {}
    one = iter([{name: column[i] for name, column in made.items()} for i in range(len(fit))])
    return [next(one) if problem is None else problem for problem in problems]
