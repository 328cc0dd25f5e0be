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

from tccompile.errors import InputError, extra
from tccompile.plan.file import read_plan
from tccompile.runtime.rows import Rows, row_sizes
from tccompile.runtime.session import Session

with extra("ray"):
    import ray

__all__ = ["Batches", "service"]


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
        self.rows, self.keep = Rows(Session(plan, _device(device), trust=trust)), keep

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
                plan's largest entry or the end of its range
    deployment  options of Ray Serve's: num_replicas, autoscaling_config; `num_gpus` is for a replica's actor
    """
    with extra("ray"):
        from ray import serve
    options = dict(deployment.pop("ray_actor_options", {}))
    if (gpus := deployment.pop("num_gpus", None)) is not None:
        options["num_gpus"] = gpus
    plan, trust = os.path.abspath(plan), None if trust is None else os.path.abspath(trust)  # replicas work in other folders
    largest = row_sizes(read_plan(plan))[-1]
    deployment.setdefault("max_ongoing_requests", 2 * largest)  # so that the next batch is there when one ends

    class Replica:
        """A session, and the requests that wait for it."""

        def __init__(self) -> None:
            self.rows = Rows(Session(plan, _device(device), trust=trust))
            self.rows.warm()

        async def __call__(self, example: Mapping[str, Any]) -> dict[str, np.ndarray]:
            answer = await self.batch(example)
            if isinstance(answer, Exception):
                raise answer
            return answer

        @serve.batch(max_batch_size=largest, batch_wait_timeout_s=wait)
        async def batch(self, examples: Sequence[Mapping[str, Any]]) -> list[Any]:
            return await asyncio.to_thread(_answers, self.rows, examples)

    return serve.deployment(Replica, name=name, ray_actor_options=options, **deployment).bind()


def _answers(rows: Rows, examples: Sequence[Mapping[str, Any]]) -> list[dict[str, np.ndarray] | Exception]:
    """The outputs of each example. One that does not fit gets an error, and the others their outputs all the same."""
    problems = [rows.problem(example) for example in examples]
    fit = [e for e, problem in zip(examples, problems, strict=True) if problem is None]
    made = rows.run({name: np.stack([np.asarray(e[name]) for e in fit]) for name in rows.inputs}) if fit else {}
    one = iter([{name: column[i] for name, column in made.items()} for i in range(len(fit))])
    return [next(one) if problem is None else problem for problem in problems]
