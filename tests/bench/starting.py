"""What a plan costs before and beside the kernels, on a GPU: python -m tests.bench.starting MODEL.plan

Milliseconds from a process that has a CUDA context to its first result, and microseconds of the CPU that a call takes on arrays
that lie on the GPU: the least of many rounds, each of calls that need not wait for the ones before. The arrays are PyTorch's.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

ROUNDS, CALLS = 30, 20
"""Twenty calls fit into the driver's queue: none waits for the GPU."""


def starting(path: Path) -> None:
    """A table of the steps from a context to the first result."""
    from cuda.bindings import driver

    driver.cuInit(0)
    _, device = driver.cuDeviceGet(0)
    _, context = driver.cuDevicePrimaryCtxRetain(device)
    driver.cuCtxSetCurrent(context)
    driver.cuMemAlloc(1 << 20)  # the first one takes longer
    begin = last = time.perf_counter()

    def row(what: str) -> None:
        nonlocal last
        now = time.perf_counter()
        print(f"| {what} | {(now - last) * 1e3:.1f} |", flush=True)
        last = time.perf_counter()

    from tccompile.plan.file import read_plan
    from tccompile.runtime import gpu  # noqa: F401
    from tccompile.runtime.session import Session

    row("importing the runtime")
    plan = read_plan(path)
    row("reading the plan")
    session = Session(plan, "gpu")
    row("session")
    feeds = {x.name: np.ones(tuple(n or 1 for n in x.shape), x.dtype) for x in session.get_inputs()}
    last = time.perf_counter()
    session.run(None, feeds)
    row("first inference, NumPy to NumPy")
    print(f"| all of it | {(last - begin) * 1e3:.1f} |")
    session.run(None, feeds)
    row("second inference")


def calling(path: Path) -> None:
    """A table of the time that calls take on the CPU."""
    import torch

    from tccompile.runtime.session import Session

    session = Session(path, "gpu")
    stream = torch.cuda.Stream()
    queue = stream.cuda_stream
    x = session.get_inputs()[0]
    inputs = [{x.name: torch.randn([n or 1 for n in x.shape], device="cuda")} for _ in range(2)]
    outputs = {y.name: torch.empty([n or 1 for n in y.shape], device="cuda") for y in session.get_outputs()}
    turn = 0

    def another() -> None:
        nonlocal turn
        turn = 1 - turn
        session.run(None, inputs[turn], outputs, stream=queue)

    def row(what: str, call: Callable[[], object]) -> None:
        least = float("inf")
        for _ in range(ROUNDS):
            torch.cuda.synchronize()
            begin = time.perf_counter()
            for _ in range(CALLS):
                call()
            least = min(least, time.perf_counter() - begin)
        print(f"| {what} | {least / CALLS * 1e6:.1f} |", flush=True)

    with torch.cuda.stream(stream):
        row("on a stream, outputs given", lambda: session.run(None, inputs[0], outputs, stream=queue))
        row("on a stream, outputs made", lambda: session.run(None, inputs[0], stream=queue))
        row("on a stream, outputs given, another input each time", another)
    row("on a stream that PyTorch does not work on", lambda: session.run(None, inputs[0], outputs, stream=queue))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("plan", type=Path)
    args = parser.parse_args()
    starting(args.plan)
    calling(args.plan)


if __name__ == "__main__":
    main()
