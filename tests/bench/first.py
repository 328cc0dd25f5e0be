"""What the first inference at a size takes longer than the second: `python -m tests.bench.first MODEL.onnx PLAN --at h=64,w=72`.

The plan is one for a range of the model's named dimensions, and `--at` may come several times. All arrays are made before, those
of each inference apart. Where they lie: on the host, with outputs that nobody keeps, that are kept, or that are given; and on the
GPU (as PyTorch's), with outputs that are made or given; "mixed", with integers, as token ids, on the host, and all else there.
"""

from __future__ import annotations

import argparse
import gc
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import onnx

import tccompile
from tccompile.runtime.session import Session

WHERE = ("host", "host, kept", "host, given", "GPU", "GPU, given", "mixed")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.first", description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("plan", type=Path)
    parser.add_argument("--at", action="append", required=True, metavar="NAME=N,…", help="a size; again for others")
    parser.add_argument("--where", action="append", choices=WHERE, help="where arrays lie; everywhere if not given")
    args = parser.parse_args()
    plan = tccompile.Plan.load(args.plan)
    points = [{name: int(n) for name, _, n in (part.partition("=") for part in at.split(","))} for at in args.at]
    launches = sum(len(step.launches) for step in plan.families[0].lowest.sections[0].steps)
    print(
        f"{args.plan}: {launches} launches at the least sizes; ms that the first inference has more, and of the first and second"
    )
    dims = _dims(args.model)
    shapes = [{name: tuple(point.get(n, n) for n in own) for name, own in dims.items()} for point in points]
    with Session(plan, "gpu"):  # keeps weights and code there
        for where in args.where or WHERE:
            print(f"  {where:12} {_measured(plan, points, shapes, where)}", flush=True)


def _measured(plan: tccompile.Plan, points: Sequence[Mapping[str, int]], shapes: Sequence[Mapping[str, Any]], where: str) -> str:
    feeds = [[_inputs(plan, own, where) for _ in range(2)] for own in shapes]
    outputs: list[list[Any]] = [[None, None] for _ in feeds]
    if "given" in where:
        with Session(plan, "gpu") as session:
            outputs = [[_outputs(session, feed, where) for feed in both] for both in feeds]
    gc.collect()
    gc.freeze()
    with Session(plan, "gpu") as session:
        times = _times(session, feeds, outputs, "kept" in where)
    gc.unfreeze()
    more = [first - second for first, second in times]
    each = "; ".join(
        f"{' '.join(map(str, point.values()))} {first:.2f} {second:.2f}"
        for point, (first, second) in zip(points, times, strict=True)
    )
    return f"median +{median(more):.2f}, most +{max(more):.2f}: {each}"


def _times(session: Session, feeds: Sequence[Any], outputs: Sequence[Any], keep: bool) -> list[tuple[float, float]]:
    """Milliseconds of the first and second inference at each size."""
    kept, times = [], []
    for both, given in zip(feeds, outputs, strict=True):
        pair = []
        for feed, into in zip(both, given, strict=True):
            begin = time.perf_counter()
            made = session.run(None, feed, into)
            pair.append((time.perf_counter() - begin) * 1e3)
            if keep:
                kept.append(made)
            del made
        times.append((pair[0], pair[1]))
    return times


def _dims(model: Path) -> dict[str, list[int | str]]:
    """Of each input its extents, or what they are called."""
    graph = onnx.load(model, load_external_data=False).graph
    held = {t.name for t in graph.initializer}
    inputs = {v.name: v.type.tensor_type.shape.dim for v in graph.input if v.name not in held}
    return {name: [d.dim_param or d.dim_value for d in dims] for name, dims in inputs.items()}


def _inputs(plan: tccompile.Plan, shapes: Mapping[str, Any], where: str) -> dict[str, Any]:
    made: dict[str, Any] = {}
    for name, shape in shapes.items():
        array = np.ones(shape, plan.entries[0].program.tensors[name].dtype.numpy)
        stays = where.startswith("host") or (where == "mixed" and array.dtype.kind == "i")
        made[name] = array if stays else _on_gpu(array)
    return made


def _outputs(session: Session, feed: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Arrays for all outputs."""
    names = [value.name for value in session.get_outputs()]
    made = [np.asarray(y) + 0 for y in session.run(names, feed)]
    return dict(zip(names, made if where.startswith("host") else map(_on_gpu, made), strict=True))


def _on_gpu(array: np.ndarray) -> Any:
    import torch

    there = torch.from_numpy(array).cuda()
    torch.cuda.synchronize()
    return there


if __name__ == "__main__":
    main()
