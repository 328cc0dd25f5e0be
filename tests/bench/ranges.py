"""A plan for a range of sizes beside plans for fixed shapes, at some sizes: `python -m tests.bench.ranges MODEL.onnx --range …`.

Each size is timed in both plans in turn, by CUDA events around launches of the graph, and the median of the rounds is printed; so
are the largest difference between their outputs, what ONNX Runtime says of the smaller sizes, and what the first inference at a
size takes longer than the second.
"""

from __future__ import annotations

import argparse
import math
import time
from pathlib import Path
from statistics import geometric_mean, median

import numpy as np

import tccompile
from tccompile.ir.metric import relative_error
from tccompile.options import Options, parse_sizes
from tccompile.pipeline import compile_model
from tccompile.plan.file import encoded_size
from tccompile.runtime.session import Session

ROUNDS, ITERATIONS = 5, 30

COMPARED = 1 << 22
"""Elements of inputs up to which ONNX Runtime computes the reference."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--range", action="append", required=True, help="as tccompile takes it, of named dimensions")
    parser.add_argument("--at", action="append", required=True, help="sizes to measure at, as batch=3,h=64; repeat for others")
    parser.add_argument("--arch", default="sm_90a")
    args = parser.parse_args()
    ranges = parse_sizes(args.range)
    begin = time.perf_counter()
    plan = compile_model(args.model, Options(archs=(args.arch,), ranges=ranges))
    took, fixed = time.perf_counter() - begin, len(plan.entries) - len(plan.families)
    print(f"{args.model.stem}: {len(plan.families)} families, {fixed} fixed entries, {len(plan.images)} kernels, ", end="")
    print(f"{encoded_size(plan) / 2**20:.1f} MiB, built in {took:.0f} s")
    with Session(plan) as ranged:
        compared = [_compared(args, plan, ranged, point) for point in map(_point, args.at)]
    print(f"geometric mean {geometric_mean(compared):.3f}, most {max(compared):.3f}")


def _point(text: str) -> dict[str, int]:
    return {name: int(n) for name, _, n in (part.partition("=") for part in text.split(","))}


def _compared(args: argparse.Namespace, plan: tccompile.Plan, ranged: Session, point: dict[str, int]) -> float:
    """How much longer an inference takes in the plan for the range, at one point."""
    shapes = _shapes(args.model, point)
    begin = time.perf_counter()
    fixed_plan = compile_model(args.model, Options((shapes,), archs=(args.arch,)))
    built = time.perf_counter() - begin
    feeds = _feeds(fixed_plan, args.model)
    first, second = (_timed(ranged, feeds) for _ in range(2))
    with Session(fixed_plan) as fixed:
        outputs, others = ranged.run(None, feeds), fixed.run(None, feeds)
        apart = max(relative_error(a, b) for a, b in zip(outputs, others, strict=True))
        error = _error(args.model, feeds, outputs)
        times = [[median(s.bench(ITERATIONS, feeds)) for s in (ranged, fixed)] for _ in range(ROUNDS)]
    ours, theirs = (median(column) for column in zip(*times, strict=True))
    at = ", ".join(f"{name} {n}" for name, n in point.items())
    size = encoded_size(plan) / encoded_size(fixed_plan)
    print(
        f"  {at:24} {ours:9.4f} ms, fixed {theirs:9.4f} ms: {ours / theirs:.3f}; apart {apart:.1e}, error {error:.1e}; "
        f"first +{(first - second) * 1e3:.1f} ms; fixed built in {built:.0f} s; plan {size:.2f} times as large",
        flush=True,
    )
    return ours / theirs


def _shapes(model: Path, point: dict[str, int]) -> dict[str, tuple[int, ...]]:
    import onnx

    graph = onnx.load(model, load_external_data=False).graph
    held = {t.name for t in graph.initializer}
    inputs = {v.name: v.type.tensor_type.shape.dim for v in graph.input if v.name not in held}
    return {name: tuple(point[d.dim_param] if d.dim_param else d.dim_value for d in dims) for name, dims in inputs.items()}


def _feeds(plan: tccompile.Plan, model: Path) -> dict[str, np.ndarray]:
    """Random inputs; integers are small, as token ids that every vocabulary has, and masks of ones."""
    draw = np.random.default_rng(0)
    out = {}
    for name in plan.entries[0].program.inputs:
        tensor = plan.entries[0].program.tensors[name]
        dtype = tensor.dtype.numpy
        if tensor.dtype.is_float:
            out[name] = draw.standard_normal(tensor.shape).astype(dtype)
        else:
            out[name] = np.ones(tensor.shape, dtype) if "mask" in name else draw.integers(0, 1000, tensor.shape).astype(dtype)
    return out


def _timed(session: Session, feeds: dict[str, np.ndarray]) -> float:
    begin = time.perf_counter()
    session.run(None, feeds)
    return time.perf_counter() - begin


def _error(model: Path, feeds: dict[str, np.ndarray], outputs: list[np.ndarray]) -> float:
    import onnxruntime

    if sum(a.size for a in feeds.values()) > COMPARED:
        return math.nan
    session = onnxruntime.InferenceSession(str(model), providers=["CPUExecutionProvider"])
    return max(relative_error(a, b) for a, b in zip(outputs, session.run(None, feeds), strict=True))


if __name__ == "__main__":
    main()
