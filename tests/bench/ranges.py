"""A plan for a range of sizes beside plans for fixed shapes, at some sizes: `python -m tests.bench.ranges MODEL.onnx --range …`.

`--at batch=3,h=64` names sizes. Each is timed in both plans in turn, by CUDA events around launches of the graph, and the median
of the rounds is printed; so are the ratios of single rounds, the largest difference between their outputs, what ONNX Runtime says
of the smaller sizes, and what the first inference at a size takes longer than the second, each with arrays of its own. `--steps`
names the steps that take longer than in the plan for fixed shapes.

`--many N` runs N sizes once each, and prints what memory the session takes between them. `--build` only builds, which needs no
GPU, and prints what that takes; `--plans FOLDER` keeps plans, and takes those that are there.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import math
import resource
import time
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from statistics import geometric_mean, median
from typing import TYPE_CHECKING

import numpy as np
import onnx

import tccompile
from tccompile.ir.metric import relative_error
from tccompile.options import Options, parse_sizes
from tccompile.pipeline import compile_model
from tccompile.plan.file import encoded_size, read_plan, write_plan
from tccompile.runtime.driver import open_device
from tccompile.runtime.session import Session

if TYPE_CHECKING:
    import onnxruntime

ROUNDS, ITERATIONS = 5, 30

COMPARED = 1 << 22
"""Elements of inputs up to which ONNX Runtime computes the reference."""

Point = Mapping[str, int]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--range", action="append", required=True, help="as tccompile takes it, of named dimensions")
    parser.add_argument("--at", action="append", default=[], help="sizes to measure at, as batch=3,h=64; repeat for others")
    parser.add_argument("--many", type=int, default=0, metavar="N", help="sizes to run once each, for what memory that takes")
    parser.add_argument("--steps", action="store_true", help="name the steps that take longest beside the fixed plan's")
    parser.add_argument("--build", action="store_true", help="build the plans and no more")
    parser.add_argument("--plans", type=Path, help="where plans are kept")
    parser.add_argument("--jobs", type=int, help="processes that compile kernels; one a core if not said")
    parser.add_argument("--arch", default="sm_90a")
    args = parser.parse_args()
    plan = _built(args, "range", Options(archs=(args.arch,), ranges=parse_sizes(args.range), jobs=args.jobs))
    points = [_point(text) for text in args.at]
    if args.build:
        for point in points:
            _fixed(args, point)
        return
    with Session(plan) as ranged:
        if points:
            gc.collect()
            gc.freeze()  # else looking for garbage is in the times
            compared = [_compared(args, plan, ranged, point) for point in points]
            print(f"geometric mean {geometric_mean(compared):.3f}, most {max(compared):.3f}")
        if args.many:
            _many(args, plan, ranged)


def _point(text: str) -> dict[str, int]:
    return {name: int(n) for name, _, n in (part.partition("=") for part in text.split(","))}


def _fixed(args: argparse.Namespace, point: Point) -> tccompile.Plan:
    """The plan for one point alone."""
    name = ",".join(f"{name}={n}" for name, n in point.items())
    return _built(args, name, Options((_shapes(args.model, point),), archs=(args.arch,), jobs=args.jobs))


def _built(args: argparse.Namespace, name: str, options: Options) -> tccompile.Plan:
    path = args.plans / f"{args.model.stem}-{name}.plan" if args.plans else None
    if path and path.exists():
        return read_plan(path)
    begin, before = time.perf_counter(), _seconds()
    plan = compile_model(args.model, options)
    took, here, others = time.perf_counter() - begin, *(b - a for a, b in zip(before, _seconds(), strict=True))
    fixed = len(plan.entries) - len(plan.families)
    print(
        f"{args.model.stem} {name}: {len(plan.families)} families, {fixed} fixed entries, {len(plan.images)} kernels, "
        f"{encoded_size(plan) / 2**20:.1f} MiB, built in {took:.1f} s; processor {here:.1f} and {others:.1f} s",
        flush=True,
    )
    if path:
        args.plans.mkdir(parents=True, exist_ok=True)
        write_plan(plan, path)
    return plan


def _seconds() -> tuple[float, float]:
    """The processor's, of this process and of those that it had."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return used[0].ru_utime + used[0].ru_stime, used[1].ru_utime + used[1].ru_stime


# --- Times -------------------------------------------------------------------------------------------------------------


def _compared(args: argparse.Namespace, plan: tccompile.Plan, ranged: Session, point: Point) -> float:
    """How much longer an inference takes in the plan for the range, at one point."""
    shapes = _shapes(args.model, point)
    feeds, others = (_feeds(plan, shapes, seed) for seed in (0, 1))
    first, second = _timed(ranged, feeds), _timed(ranged, others)
    fixed_plan = _fixed(args, point)
    with Session(fixed_plan) as fixed:
        outputs, theirs = ranged.run(None, feeds), fixed.run(None, feeds)
        apart = max(relative_error(a, b) for a, b in zip(outputs, theirs, strict=True))
        error = _error(args.model, feeds, outputs)
        rounds = [[median(s.bench(ITERATIONS, feeds)) for s in (ranged, fixed)] for _ in range(ROUNDS)]
        slower = _slower(ranged, fixed, feeds) if args.steps else []
    ours, own = (median(column) for column in zip(*rounds, strict=True))
    ratios = [a / b for a, b in rounds]
    single = f"{min(ratios):.3f} to {max(ratios):.3f}"
    at = ", ".join(f"{name} {n}" for name, n in point.items())
    size = encoded_size(plan) / encoded_size(fixed_plan)
    launches = sum(len(step.launches) for step in fixed_plan.entries[0].sections[0].steps)
    print(
        f"  {at:24} {ours:9.4f} ms, fixed {own:9.4f} ms: {ours / own:.3f} ({single}); apart {apart:.1e}, error {error:.1e}; "
        f"first +{(first - second) * 1e3:.2f} ms, {launches} launches; plan {size:.2f} times as large",
        *slower,
        sep="\n      ",
        flush=True,
    )
    return ours / own


def _slower(ranged: Session, fixed: Session, feeds: Mapping[str, np.ndarray]) -> list[str]:
    """Lines on the steps that take longer in the plan for the range, and on what runs them."""
    ours, theirs = (session.profile(ITERATIONS, feeds).steps for session in (ranged, fixed))
    if len(ours) != len(theirs):
        return [f"{len(ours)} steps, of the fixed plan {len(theirs)}"]
    alike: dict[str, list[tuple[float, float]]] = {}
    for a, b in zip(ours, theirs, strict=True):
        run_by = f"{a.kernel} {_brief(a.config)}", f"{b.kernel} {_brief(b.config)}"
        name = run_by[0] if run_by[0] == run_by[1] else " beside ".join(run_by)
        node = a.nodes[0].rsplit("/", 1)[-1].rstrip("0123456789").rstrip("_")  # of layers that are alike
        alike.setdefault(f"{name}: {node} {'×'.join(map(str, a.shape))}", []).append((a.us, b.us))
    sums = {name: tuple(map(sum, zip(*times, strict=True))) for name, times in alike.items()}
    order = sorted(alike, key=lambda name: sums[name][1] - sums[name][0])
    return [
        f"{len(alike[name])} steps {sums[name][0]:.2f} µs, fixed {sums[name][1]:.2f}: {name}"
        for name in (*order[:5], *order[-2:])
    ]


def _brief(config: Mapping[str, object]) -> str:
    return ",".join(f"{name}={value}" for name, value in config.items())


def _shapes(model: Path, point: Point) -> dict[str, tuple[int, ...]]:
    graph = _graph(model)
    held = {t.name for t in graph.initializer}
    inputs = {v.name: v.type.tensor_type.shape.dim for v in graph.input if v.name not in held}
    return {name: tuple(point[d.dim_param] if d.dim_param else d.dim_value for d in dims) for name, dims in inputs.items()}


@cache
def _graph(model: Path) -> onnx.GraphProto:
    return onnx.load(model, load_external_data=False).graph


def _feeds(plan: tccompile.Plan, shapes: Mapping[str, tuple[int, ...]], seed: int) -> dict[str, np.ndarray]:
    """Random inputs; integers are small, as token ids that every vocabulary has, and masks of ones."""
    draw = np.random.default_rng(seed)
    out = {}
    for name, shape in shapes.items():
        dtype = plan.entries[0].program.tensors[name].dtype
        if dtype.is_float:
            out[name] = draw.standard_normal(shape, np.float32).astype(dtype.numpy)
        else:
            out[name] = np.ones(shape, dtype.numpy) if "mask" in name else draw.integers(0, 1000, shape).astype(dtype.numpy)
    return out


def _timed(session: Session, feeds: Mapping[str, np.ndarray]) -> float:
    begin = time.perf_counter()
    session.run(None, feeds)
    return time.perf_counter() - begin


def _error(model: Path, feeds: Mapping[str, np.ndarray], outputs: list[np.ndarray]) -> float:
    if sum(a.size for a in feeds.values()) > COMPARED:
        return math.nan
    return max(relative_error(a, b) for a, b in zip(outputs, _oracle(model).run(None, feeds), strict=True))


@cache
def _oracle(model: Path) -> onnxruntime.InferenceSession:
    import onnxruntime

    return onnxruntime.InferenceSession(str(model), providers=["CPUExecutionProvider"])


# --- Memory ------------------------------------------------------------------------------------------------------------


def _many(args: argparse.Namespace, plan: tccompile.Plan, session: Session) -> None:
    """Runs sizes that differ, in random order, and prints what memory is used."""
    sizes = parse_sizes(args.range)
    every = list(itertools.product(*(size.all for size in sizes.values())))
    order = np.random.default_rng(0).permutation(len(every))[: args.many]
    print(f"  {len(order)} of {len(every)} sizes, each once")
    begin = time.perf_counter()
    for count, number in enumerate(order, 1):
        shapes = _shapes(args.model, dict(zip(sizes, every[number], strict=True)))
        session.run(None, {n: np.zeros(s, plan.entries[0].program.tensors[n].dtype.numpy) for n, s in shapes.items()})
        if count in (1, 100, 1000, len(order)) or count % 2500 == 0:
            device, host = _used()
            took = time.perf_counter() - begin
            print(f"  {count:6} sizes, {took:5.1f} s: device {device:.1f} MiB, host {host:.1f} MiB", flush=True)


def _used() -> tuple[float, float]:
    """MiB that are taken of the device's memory, and of the host's by this process."""
    with open_device() as cu:
        free, total = cu.cuMemGetInfo()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return (total - free) / 2**20, pages * resource.getpagesize() / 2**20


if __name__ == "__main__":
    main()
