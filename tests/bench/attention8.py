"""Attention in E4M3 beside float16, and PyTorch's in float16, on a GPU: python -m tests.bench.attention8 [BxHxNxD …]

Rows are softmax(q · kᵀ / √D) · v of normal numbers with N rows of q, k and v, the result in float16: microseconds of the fastest
config in each type, v's way into the order that wgmma takes included. A C behind a size is for causal. Errors are those of the
first rows of the first head: against sums in float64 of the operands as they are stored; and against those of the numbers before
they were rounded to E4M3. Times are of the step alone, by events around graph replays, operands and result on the device. With
`--rounds` the fastest configs of both types are measured again, in turns so many times: in bursts, each after a pause, so that
the GPU stays below its power limit, and lasting, each for so long that it comes to it. A row for either has medians of the
rounds, the least and greatest speed, and the clock of both types by nvidia-smi, with * where the limit holds it down.
"""

from __future__ import annotations

import argparse
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from typing import Any

import numpy as np

from tccompile.arch import ARCHS, Arch
from tccompile.emit.job import SpillError
from tccompile.emit.many import emit
from tccompile.emit.pack import Build, section
from tccompile.ir.expr import Epilogue, View, constant, coord, load
from tccompile.ir.ops import Attention, Pointwise
from tccompile.ir.program import Program
from tccompile.ir.storage import from_storage, pack_constant, to_storage
from tccompile.ir.tensor import dense
from tccompile.ir.types import DType
from tccompile.ir.weights import Literal
from tccompile.kernels import kernel
from tccompile.kernels.spec import Config
from tccompile.plan.file import Plan
from tccompile.plan.format import Entry
from tccompile.runtime.session import Session
from tccompile.schedule.choose import Choice
from tccompile.schedule.place import place
from tests.bench.layers import _time
from tests.networks import relative_error

SIZES = ("2x16x4096x128", "4x16x4096x64", "1x8x16384x128", "1x16x16384x64", "2x8x4096x256", "16x8x1024x128", "2x16x4096x128C")

E4M3 = DType.E4M3

ROWS = 64
"""Rows of the first head whose errors are measured."""

BOUND = {DType.F16: 2e-3, E4M3: 5e-2}
"""What they may be off by: in E4M3 weights are rounded to 4 digits."""


def program_of(size: tuple[int, int, int, int], dtype: DType, causal: bool, mean: float = 0.0) -> tuple[Program, dict[str, Any]]:
    """Attention of constants, whose result stays inside, as in a network, and the numbers before they were stored; the output is
    the last rows of the first head. mean: of v's elements."""
    (_, _, n, d), rng, inner = size, np.random.default_rng(0), (0, 2, 1, 3)
    numbers = {name: rng.standard_normal(size, np.float32) + (mean if name == "v" else 0) for name in "qkv"}
    given = {name: Literal(from_storage(to_storage(x, dtype), dtype)) for name, x in numbers.items()}
    tensors = [dense(name, size, dtype, inner, 16) for name in "qkv"]
    tensors += [dense("y", size, DType.F16, inner), dense("rows", (ROWS, d), DType.F32, pad=1)]
    at = View("y", (constant(0), constant(0), coord(0) + (n - ROWS), coord(1)))
    op = Attention(nodes=("attention",), q="q", k="k", v="v", y="y", scale=d**-0.5, causal=0 if causal else None)
    rows = Pointwise(nodes=("rows",), y="rows", epilogue=Epilogue(load(0), (at,)))
    return Program((), ("rows",), {t.name: t for t in tensors}, given, (op, rows)), numbers


def exact(q: Any, k: Any, v: Any, causal: bool) -> np.ndarray:
    """The last rows of the first head."""
    q, k, v = (x[0, 0].astype(np.float64) for x in (q, k, v))
    scores = q[-ROWS:] @ k.T / np.sqrt(q.shape[-1])
    if causal:
        seen = np.arange(len(k)) <= np.arange(len(q) - ROWS, len(q))[:, None]
        scores = np.where(seen, scores, -np.inf)
    weights = np.exp(scores - scores.max(1, keepdims=True))
    out: np.ndarray = weights @ v / weights.sum(1, keepdims=True)
    return out


def sessions(name: str, program: Program, arch: Arch, count: int) -> Iterator[Session]:
    """A session for each of a kernel's configs of least estimate, but for those that spill registers."""
    attention, row = program.ops
    found, copies = kernel(name), kernel("pointwise")
    last = next(iter(copies.configs(row, program, arch)))
    ranked = sorted(found.configs(attention, program, arch), key=lambda c: found.cost(attention, program, c, arch))
    for config in ranked[:count]:
        how = [
            (found, config, found.work(attention, program, config, arch)),
            (copies, last, copies.work(row, program, last, arch)),
        ]
        jobs = [(launch.code, arch, "cubin") for _, _, work in how for launch in work.launches]
        try:
            images = emit(jobs)
        except SpillError:
            continue
        index = {image: i for i, image in enumerate(dict.fromkeys(images.values()))}
        chosen = [Choice(*h, np.nan, "forced") for h in how]
        entry = Entry(program, (section(Build(arch.name, "cubin", chosen, place(program, [h[2] for h in how])), images, index),))
        weights = {n: pack_constant(program.tensors[n], r.values) for n, r in program.constants.items()}  # type: ignore[union-attr]
        yield Session(Plan("attention", {}, (entry,), tuple(index), weights), device="gpu")


@dataclass
class Measured:
    """A config that is right: microseconds, and the errors against operands as they are stored and as they were."""

    session: Session
    us: float
    config: Config
    error: float
    rounded: float


def fastest(size: tuple[int, int, int, int], dtype: DType, causal: bool, arch: Arch, count: int, mean: float = 0.0) -> Measured:
    """The fastest of so many configs of least estimate. Raises AssertionError if one is off by more than `BOUND`."""
    program, numbers = program_of(size, dtype, causal, mean)
    stored = exact(*(program.constants[name].values for name in "qkv"), causal)  # type: ignore[union-attr]
    whole = exact(*(numbers[name] for name in "qkv"), causal)
    found = []
    for session in sessions("attention_sm90", program, arch, count):
        (rows,) = session.run(None, {})
        errors = [relative_error(np.asarray(rows), expected) for expected in (stored, whole)]
        config = session.plan.entries[0].sections[0].steps[0].config
        assert errors[0] < BOUND[dtype], f"{size}: its rows are {errors[0]:.1e} off with {config}"
        found.append(Measured(session, session.profile(30).steps[0].us, config, *errors))
    found.sort(key=lambda m: m.us)
    for slower in found[1:]:
        slower.session.close()
    return found[0]


def peer(torch: Any, size: tuple[int, int, int, int], causal: bool) -> float:
    """Microseconds of PyTorch in float16."""
    q, k, v = (torch.randn(size, device="cuda").half() for _ in range(3))
    attend = partial(torch.nn.functional.scaled_dot_product_attention, q, k, v, is_causal=causal)
    return _time(torch, [attend] * 4, torch.empty(1 << 26, device="cuda")) / 4


LIMITS = 0x4 | 0x80
"""Bits of NVML's reasons for a clock that is lower than it could be: power."""

PAUSE, LASTING = 0.08, 0.4
"""Seconds ahead of a burst, and that a type runs on and on."""

BURST = 8
"""Inferences of a burst."""


@contextmanager
def watched() -> Iterator[list[tuple[float, float, int]]]:
    """What nvidia-smi says every 10 ms while the block runs, in the list when it has ended: when, seconds; the clock, MHz; and
    what holds it down, NVML's bits."""
    said: list[tuple[float, float, int]] = []
    asked = "nvidia-smi -i 0 --query-gpu=timestamp,clocks.sm,clocks_throttle_reasons.active --format=csv,noheader,nounits -lms 10"
    with tempfile.TemporaryFile("w+") as log:
        with subprocess.Popen(asked.split(), stdout=log) as watch:
            yield said
            watch.terminate()
        log.seek(0)
        for line in log:
            if line.endswith("\n"):
                when, mhz, bits = line.split(", ")
                said.append((datetime.strptime(when, "%Y/%m/%d %H:%M:%S.%f").timestamp(), float(mhz), int(bits, 16)))


def clock(said: list[tuple[float, float, int]], spans: list[tuple[float, float]]) -> str:
    """The median clock in these spans of time, with * where power holds it down."""
    seen = [(mhz, bits) for when, mhz, bits in said if any(a <= when <= b for a, b in spans)]
    if not seen:
        return "unknown"
    return f"{np.median([mhz for mhz, _ in seen]):.0f}{'*' if any(bits & LIMITS for _, bits in seen) else ''}"


def burst(m: Measured) -> float:
    """Microseconds after a pause."""
    time.sleep(PAUSE)
    return m.session.profile(BURST).steps[0].us


def lasting(m: Measured) -> float:
    """Microseconds when it has run on for a while."""
    end, found = time.monotonic() + LASTING, []
    while time.monotonic() < end:
        found.append(m.session.profile(30).steps[0].us)
    return float(np.median(found[len(found) // 2 :]))


def in_turns(pair: tuple[Measured, Measured], rounds: int, measure: Callable[[Measured], float]) -> tuple[Any, list[str]]:
    """Microseconds of both types, a line for each round, and their clocks."""
    spans: tuple[list[Any], list[Any]] = ([], [])
    times = np.zeros((rounds, 2))
    with watched() as said:
        for each in times:
            for i, m in enumerate(pair):
                begun = time.time()
                each[i] = measure(m)
                spans[i].append((begun, time.time()))
    return times, [clock(said, s) for s in spans]


def parsed(size: str) -> tuple[tuple[int, int, int, int], bool]:
    b, h, n, d = map(int, size.rstrip("C").split("x"))
    return (b, h, n, d), size.endswith("C")


def rows(torch: Any, text: str, arch: Arch, count: int, rounds: int) -> Iterator[str]:
    """The rows of a size: one, or with rounds one for bursts and one for lasting runs."""
    size, causal = parsed(text)
    flop = 4.0 * size[0] * size[1] * size[2] ** 2 * size[3] * (0.5 if causal else 1.0)
    half, eight = pair = tuple(fastest(size, dtype, causal, arch, count) for dtype in (DType.F16, E4M3))
    found: list[tuple[str, Any, list[str]]] = [(text, np.array([[half.us, eight.us]]), [])]
    if rounds > 1:
        ways = {"bursts": burst, "lasting": lasting}
        found = [(f"{text}, {name}", *in_turns((half, eight), rounds, way)) for name, way in ways.items()]
    for m in pair:
        m.session.close()
    torch_us = peer(torch, size, causal)
    tile = f"{eight.config['warpgroups']} × {eight.config['bn']}"
    for name, times, clocks in found:
        speeds, (half_us, eight_us) = times[:, 0] / times[:, 1], np.median(times, axis=0)
        speed = f"{np.median(speeds):.2f}" + (f" ({min(speeds):.2f} to {max(speeds):.2f})" if rounds > 1 else "")
        rates = [f"{us:.1f}" for us in (half_us, eight_us, torch_us)] + [f"{1e-6 * flop / us:.0f}" for us in (half_us, eight_us)]
        yield f"| {' | '.join([name, *rates, speed, f'{eight.error:.1e}', f'{eight.rounded:.1e}', tile, *clocks])} |"


def main() -> None:
    import torch

    parser = argparse.ArgumentParser()
    parser.add_argument("sizes", nargs="*", default=SIZES)
    parser.add_argument("--arch", default="sm_90a", help="the generation whose code runs")
    parser.add_argument("--configs", type=int, default=4, help="of each type, how many of least estimate are measured")
    parser.add_argument("--rounds", type=int, default=1, help="how often both types are measured in turns")
    args = parser.parse_args()
    heads = [
        "size",
        "float16",
        "E4M3",
        "PyTorch, float16",
        "TFLOP/s, float16",
        "E4M3",
        "speed",
        "error",
        "of rounding too",
        "tile",
        *(("MHz, float16", "E4M3") if args.rounds > 1 else ()),
    ]
    print(torch.cuda.get_device_name(), "; microseconds\n", sep="")
    print(f"| {' | '.join(heads)} |\n|{' --- |' * len(heads)}")
    for size in args.sizes:
        for row in rows(torch, size, ARCHS[args.arch], args.configs, args.rounds):
            print(row, flush=True)


if __name__ == "__main__":
    main()
