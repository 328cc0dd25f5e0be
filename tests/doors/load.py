"""Load tests of serving, on one machine: python -m tests.doors.load triton MODEL.plan, python -m tests.doors.load ray MODEL.plan

Clients ask for one example each and wait for the answer, before they ask again (a closed loop), for --seconds; every answer is
compared with what a session gives. Printed, as JSON:

bare       examples a second of `Session.run` alone, by number of rows, with arrays on the host
latency    of one client, in milliseconds: of the model, and of one that returns zeros at once in its place, turn by turn
load       examples a second of all clients, and as a share of the bare session's at --rows; failed and wrong ones; times
memory     of the server's processes, in MiB, after a quarter of the time and at the end
reloads    how often the plan was put in its own place meanwhile (--reload, in seconds)

The server is that of the wheel nvidia-pytriton, or a local cluster of Ray's. Clients are processes of their own with threads.
"""

from __future__ import annotations

import argparse
import json
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from tccompile.runtime.rows import Rows
from tccompile.runtime.session import Session

KINDS = 64
"""Different examples that are asked for."""

Example = dict[str, np.ndarray]
Ask = Callable[[Example], Sequence[np.ndarray]]
"""One example's outputs, in the plan's order; of Triton with an axis of rows, of Ray without."""


@dataclass
class Client:
    """What one thread saw: seconds of each request and of all, and how many went wrong."""

    took: list[float] = field(default_factory=list)
    all: float = 0.0
    failed: list[str] = field(default_factory=list)
    wrong: int = 0


# --- What is asked ---------------------------------------------------------------------------------------------------


def examples(plan: Any, count: int) -> list[Example]:
    """Examples without an axis of rows: normal floats, small integers."""
    program, draw = plan.entries[0].program, np.random.default_rng(0)

    def one(name: str) -> np.ndarray:
        t = program.tensors[name]
        if t.dtype.numpy.kind == "f":
            return draw.standard_normal(t.shape[1:]).astype(t.dtype.numpy)
        return draw.integers(0, 2, t.shape[1:]).astype(t.dtype.numpy)

    return [{name: one(name) for name in program.inputs} for _ in range(count)]


def stacked(given: Sequence[Example], count: int) -> Example:
    return {name: np.stack([given[i % len(given)][name] for i in range(count)]) for name in given[0]}


def bare(rows: Rows, given: Sequence[Example], seconds: float) -> dict[int, float]:
    """Examples a second of a session alone, by the number of rows."""
    out = {}
    for size in rows.sizes:
        feeds, begin, count = stacked(given, size), time.perf_counter(), 0
        rows.session.run(None, feeds)
        while (took := time.perf_counter() - begin) < seconds / len(rows.sizes) or count == 0:
            rows.session.run(None, feeds)
            count += size
        out[size] = round(count / took, 1)
    return out


# --- Clients ---------------------------------------------------------------------------------------------------------


def client(ask: Ask, given: Sequence[Example], right: Sequence[Sequence[np.ndarray]], until: float, seed: int) -> Client:
    """Ask for one example after the other until a time."""
    seen, number, start = Client(), seed, time.perf_counter()
    while time.time() < until:
        which = number % len(given)
        begin = time.perf_counter()
        try:
            made = ask(given[which])
        except Exception as error:  # whatever a library raises: it is what is looked for
            seen.failed.append(f"{type(error).__name__}: {error}"[:300])
            continue
        seen.took.append(time.perf_counter() - begin)
        close = (np.allclose(np.ravel(y), np.ravel(r), 1e-3, 1e-4) for y, r in zip(made, right[which], strict=True))
        seen.wrong += not all(close)
        number += 1
    seen.all = time.perf_counter() - start
    return seen


def clients(opened: Callable[[], Any], count: int, *args: Any) -> list[Client]:
    """Several of them, in threads of this process; `opened` gives what makes a way to ask, one for each thread."""
    seen: list[Client] = []
    with opened() as asking:

        def one(seed: int) -> None:
            seen.append(client(asking(), *args, seed))

        threads = [threading.Thread(target=one, args=(7 * i,)) for i in range(count)]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
    return seen


def turns(first: Ask, second: Ask, given: Sequence[Example], seconds: float) -> dict[str, dict[str, float]]:
    """Times of one client that asks one and then the other, always the same example."""
    took: tuple[list[float], list[float]] = ([], [])
    until = time.time() + seconds
    while time.time() < until:
        for ask, own in zip((first, second), took, strict=True):
            begin = time.perf_counter()
            ask(given[0])
            own.append(time.perf_counter() - begin)
    model, echo = (times(own[len(own) // 10 :]) for own in took)
    return {"model": model, "echo": echo, "above": {n: round(model[n] - echo[n], 3) for n in model if n != "count"}}


def times(took: Sequence[float]) -> dict[str, float]:
    """Milliseconds."""
    middle, late = np.percentile(took, [50, 99]) * 1e3
    return {"p50": round(middle, 3), "p99": round(late, 3), "count": len(took)}


# --- The servers -----------------------------------------------------------------------------------------------------

ECHO = """import numpy as np
import triton_python_backend_utils as utils


class TritonPythonModel:
    def initialize(self, args):
        import json

        config = json.loads(args["model_config"])
        self.made = [
            (o["name"], tuple(int(n) for n in o["dims"]), utils.triton_string_to_numpy(o["data_type"])) for o in config["output"]
        ]

    def execute(self, requests):
        answers = []
        for r in requests:
            rows = len(r.inputs()[0].as_numpy())
            made = [utils.Tensor(name, np.zeros((rows, *shape), dtype)) for name, shape, dtype in self.made]
            answers.append(utils.InferenceResponse(output_tensors=made))
        return answers
"""
"""A model that takes and gives the same tensors as another one, and computes nothing."""


@contextmanager
def triton_asked(port: int, inputs: Sequence[str], outputs: Sequence[str], model: str) -> Iterator[Callable[[], Ask]]:
    """Ways to ask the server over gRPC, each with a connection of its own."""
    import tritonclient.grpc as library
    from tritonclient.utils import np_to_triton_dtype

    def ask(connection: Any, example: Example) -> list[np.ndarray]:
        values = [library.InferInput(n, [1, *example[n].shape], np_to_triton_dtype(example[n].dtype)) for n in inputs]
        for value, name in zip(values, inputs, strict=True):
            value.set_data_from_numpy(example[name][None])
        found = connection.infer(model, values)
        return [found.as_numpy(n) for n in outputs]

    # By default connections of one process share one channel
    options = [("grpc.use_local_subchannel_pool", 1)]
    yield lambda: partial(ask, library.InferenceServerClient(f"127.0.0.1:{port}", channel_args=options))


@dataclass
class Door:
    """A server with a plan. ask: as for `clients`, in any process; echo: the same of a model that computes nothing;
    processes: whose memory counts; reload: puts the plan in its own place."""

    ask: Callable[[], Any]
    echo: Callable[[], Any] | None
    processes: int
    reload: Callable[[], None]


@contextmanager
def triton(plan: Path, folder: Path, cpu: bool, wait_us: int) -> Iterator[Door]:
    import tritonclient.grpc as library

    from tccompile.plan.file import read_plan
    from tccompile.triton import write_repository
    from tests.doors.server import serving

    repository = folder / "repository"
    write_repository(plan, repository, "model", cpu=cpu, wait_us=wait_us)
    (repository / "echo/1").mkdir(parents=True)
    text = (repository / "model/config.pbtxt").read_text().replace('"model"', '"echo"').replace("KIND_GPU", "KIND_CPU")
    (repository / "echo/config.pbtxt").write_text(text)
    (repository / "echo/1/model.py").write_text(ECHO)
    program = read_plan(plan).entries[0].program
    with serving(repository, folder, ("model", "echo"), "--model-control-mode=explicit", "--load-model=*") as server:
        asks = [partial(triton_asked, server.grpc, program.inputs, program.outputs, name) for name in ("model", "echo")]

        def reload() -> None:
            write_repository(plan, repository, "model", cpu=cpu, wait_us=wait_us, update=True)
            with library.InferenceServerClient(f"127.0.0.1:{server.grpc}") as connection:
                connection.load_model("model")

        yield Door(asks[0], asks[1], server.process.pid, reload)


@contextmanager
def ray_asked(address: str, outputs: Sequence[str]) -> Iterator[Callable[[], Ask]]:
    import ray
    from ray import serve

    ray.init(address, log_to_driver=False, configure_logging=False, ignore_reinit_error=True)
    handle = serve.get_app_handle("model")

    def ask(example: Example) -> list[np.ndarray]:
        made = handle.remote(example).result(timeout_s=60)
        return [made[n] for n in outputs]

    yield lambda: ask


@contextmanager
def ray_serve(plan: Path, folder: Path, cpu: bool, wait_us: int) -> Iterator[Door]:
    import ray
    from ray import serve

    import tccompile.ray
    from tccompile.plan.file import read_plan

    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False, configure_logging=False)

    def start() -> None:
        app = tccompile.ray.service(plan, wait=wait_us / 1e6, **({} if cpu else {"num_gpus": 0.5}))
        serve.run(app, name="model", route_prefix=None)

    start()
    address = ray.get_runtime_context().gcs_address
    outputs = read_plan(plan).entries[0].program.outputs
    try:
        yield Door(partial(ray_asked, address, outputs), None, os.getpid(), start)
    finally:
        serve.shutdown()
        ray.shutdown()


# --- The load --------------------------------------------------------------------------------------------------------


def resident(root: int, without: Sequence[int]) -> float:
    """MiB of a process and all below it."""
    parents, pages = {}, {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdecimal():
            try:
                parents[int(folder.name)] = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
                pages[int(folder.name)] = int((folder / "statm").read_text().split()[1])
            except OSError:  # it has ended
                pass
    family, more = {root}, True
    while more:
        found = {p for p, parent in parents.items() if parent in family and p not in without} - family
        more = bool(found)
        family |= found
    return sum(pages.get(p, 0) for p in family) * os.sysconf("SC_PAGESIZE") / 2**20


def load(door: Door, args: argparse.Namespace, given: Sequence[Example], right: Any) -> dict[str, Any]:
    """All clients at once, and what happens meanwhile."""
    share, memory, reloads, begin = -(-args.clients // args.processes), [], 0, time.time()
    with ProcessPoolExecutor(args.processes, get_context("spawn")) as pool:
        until = time.time() + args.seconds + 5  # processes take a while to start
        works = [pool.submit(clients, door.ask, share, given, right, until) for _ in range(args.processes)]
        own = set(pool._processes)
        while not all(work.done() for work in works):
            time.sleep(1)
            memory.append(resident(door.processes, [*own]))
            if args.reload and time.time() - begin > (reloads + 1) * args.reload and time.time() < until - 5:
                door.reload()
                reloads += 1
        seen = [one for work in works for one in work.result()]
    took = [t for one in seen for t in one.took]
    failed = [why for one in seen for why in one.failed]
    speed = sum(len(one.took) / one.all for one in seen)
    return {
        "clients": share * args.processes, "examples": len(took), "each second": round(speed, 1),
        "failed": len(failed), "reasons": sorted(set(failed))[:3], "wrong": sum(one.wrong for one in seen),
        "took": times(took), "reloads": reloads,
        "memory": [round(m, 1) for m in (memory[len(memory) // 4], memory[len(memory) // 2], memory[-3])],
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description="a load test of serving")
    parser.add_argument("server", choices=("triton", "ray"))
    parser.add_argument("plan", type=Path)
    parser.add_argument("--gpu", action="store_true", help="on the first GPU; default: the CPU engine")
    parser.add_argument("--seconds", type=float, default=30)
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--processes", type=int, default=2, help="that the clients are threads of")
    parser.add_argument("--rows", type=int, help="the size of a batch to compare with; default: the largest")
    parser.add_argument("--reload", type=float, default=0, help="seconds between reloads of the plan; 0: none")
    parser.add_argument("--wait-us", type=int, default=0, help="how long requests are gathered")
    args = parser.parse_args()
    with Session(args.plan, "gpu" if args.gpu else "cpu") as session:
        rows = Rows(session)
        given = examples(session.plan, KINDS)
        right = [list(rows.run({n: x[None] for n, x in e.items()}).values()) for e in given]
        alone = bare(rows, given, 5)
    args.plan = args.plan.resolve()
    report: dict[str, Any] = {"bare": alone}
    with TemporaryDirectory() as folder:
        server = triton if args.server == "triton" else ray_serve
        with server(args.plan, Path(folder), not args.gpu, args.wait_us) as door:
            if door.echo is not None:
                with door.ask() as model, door.echo() as echo:
                    report["latency"] = turns(model(), echo(), given, 5)
            report["load"] = load(door, args, given, right)
    size = args.rows or max(alone)
    report["share"] = round(report["load"]["each second"] / alone[size], 3)
    print(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
