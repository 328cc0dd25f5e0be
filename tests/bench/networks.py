"""Whole networks on a GPU: python -m tests.bench.networks [NAME …] [--plans DIR] [--cpu] [--target sm_80] [--peers …]

For each network: median latency of one inference by CUDA events around graph replays, inputs on the device; relative L2 error of
each output against ONNX Runtime in fp32 on random inputs; with --cpu also against the CPU engine on the same plan; with
--peers the latency of PyTorch (tests/bench/peer.py) and of ONNX Runtime's CUDA provider (onnxruntime_peer.py) in the same run,
and ours beside the fastest of them.
Prints a Markdown table: docs/benchmarks/networks.md is made of it.

    python -m tests.bench.networks --build DIR --arch sm_90a      writes the plans, without weights, on a machine without a GPU
    python -m tests.bench.networks --build DIR --arch sm_61,sm_75,sm_80 --ptx resnet18     older generations' code, for newer GPUs
    python -m tests.bench.networks --plans DIR --target sm_61 resnet18
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from pathlib import Path
from unittest.mock import patch

import numpy as np
import onnx
from onnx import numpy_helper

from tccompile.load.model import sources
from tccompile.plan.file import Plan, read_plan
from tccompile.plan.weights import fill
from tccompile.runtime.session import Session
from tests.bench.onnxruntime_peer import is_installed, measure_onnxruntime
from tests.networks import CONVOLUTIONAL, OTHERS, RECURRENT, feeds, half, reference, relative_error, skeleton

VARIANTS = ("resnet50.fp16", "resnet50_dynbatch@1", "resnet50_dynbatch@32", "resnet50_dynbatch@128")

SHAPES = {"resnet50_dynbatch": {"input": (4, 3, 224, 224)}}
"""For the inputs that a model leaves open."""


def variant(name: str) -> tuple[onnx.ModelProto, dict[str, tuple[int, ...]]]:
    """A network and the shapes it needs; NAME@N has batch N; NAME.fp16 is exported in fp16."""
    base, _, batch = name.partition("@")
    model = half(skeleton(base.removesuffix(".fp16"))) if base.endswith(".fp16") else skeleton(base)
    if not batch:
        return model, SHAPES.get(base, {})
    dims = {x.name: x.type.tensor_type.shape.dim for x in model.graph.input}
    if any(first.dim_value for first, *_ in dims.values()):
        open_batch(model)
    return model, {name: (int(batch), *(d.dim_value for d in rest)) for name, (_, *rest) in dims.items()}


def open_batch(model: onnx.ModelProto) -> None:
    """Leave the batch of a model open that was exported for a batch of 1."""
    graph, constants = model.graph, {t.name: t for t in model.graph.initializer}
    for value in (*graph.input, *graph.output):
        value.type.tensor_type.shape.dim[0].dim_param = "N"
    del graph.value_info[:]
    reshapes = [node for node in graph.node if node.op_type == "Reshape" and node.input[1] in constants]
    for node in reshapes:
        del node.attribute[:]  # of which there is allowzero
    for shape in (constants[name] for name in {node.input[1] for node in reshapes}):
        values = numpy_helper.to_array(shape).copy()
        values[0] = 0 if -1 in values[1:] else -1  # as many as before, or what is left
        shape.CopyFrom(numpy_helper.from_array(values, shape.name))
    joined = {name for node in graph.node if node.op_type == "Concat" for name in node.input} & constants.keys()
    for name in sorted(joined):  # tokens, one for each of a batch
        rank, many = len(constants[name].dims), f"{name}.many"
        ones = numpy_helper.from_array(np.ones(rank - 1, np.int64), f"{name}.ones")
        graph.initializer.append(ones)
        nodes = [
            onnx.helper.make_node("Shape", [graph.input[0].name], [f"{name}.batch"], start=0, end=1),
            onnx.helper.make_node("Concat", [f"{name}.batch", ones.name], [f"{name}.shape"], axis=0),
            onnx.helper.make_node("Expand", [name, f"{name}.shape"], [many]),
        ]
        for node in graph.node:
            if node.op_type == "Concat":
                node.input[:] = [many if x == name else x for x in node.input]
        for node in reversed(nodes):
            graph.node.insert(0, node)


def build(name: str, archs: tuple[str, ...], precision: str, folder: Path, ptx: bool) -> None:
    """Write the network's plan without its weights, which `sources` of the same network fill in; `ptx`: as PTX, too."""
    from tccompile import pipeline

    model, shapes = variant(name)
    start = time.perf_counter()
    with patch.object(pipeline, "PTX", archs if ptx else pipeline.PTX):
        plan = pipeline.compile(model, shapes, archs, precision=precision, strip_weights=True)
    plan.save(folder / f"{name}.plan")
    print(f"{name}: {time.perf_counter() - start:.1f} s, {(folder / f'{name}.plan').stat().st_size / 1e6:.1f} MB", flush=True)


def measure(name: str, plan: Plan | None, args: argparse.Namespace) -> dict[str, str]:
    """One row of the table; without a plan, after compiling."""
    model, shapes = variant(name)
    if plan is None:
        from tccompile.pipeline import compile

        plan = compile(model, shapes, args.arch.split(","), precision=args.precision)
    inputs = feeds(model, 0, shapes)
    oracle = skeleton(name.partition("@")[0].removesuffix(".fp16"))
    expected = reference(oracle, {n: v.astype(np.float32) if v.dtype == np.float16 else v for n, v in inputs.items()})
    plan = fill(plan, sources(model))
    with Session(plan, device="gpu", target=args.target) as session:
        got = dict(zip(expected, session.run(list(expected), inputs), strict=True))
        times = session.bench(200, inputs)
        device = session.describe()
    row = {
        "network": name,
        "ms": f"{np.median(times):.3f}",
        "p99": f"{np.percentile(times, 99):.3f}",
        "error": " ".join(f"{relative_error(got[n], expected[n]):.1e}" for n in expected),
    }
    peers, times_of, errors = args.peers.split(","), {}, {}
    if "eager" in peers or "compiled" in peers:
        from tests.bench.peer import measure_peers

        found = measure_peers(model, shapes, inputs, expected, "compiled" in peers)
        times_of |= {f"PyTorch {peer}": found[peer] for peer in ("eager", "compiled") if peer in found}
        of_each = (f"{relative_error(y, expected[n]):.1e}" for y, n in zip(found["outputs"], expected, strict=True))
        errors["PyTorch's error"] = " ".join(of_each)
    if "onnxruntime" in peers and is_installed():
        times_of["ONNX Runtime"] = math.nan
        try:
            times_of["ONNX Runtime"], _ = measure_onnxruntime(oracle, inputs, expected)
        except Exception as failure:  # of whatever type; the other peers' times are still wanted
            print(f"{name}: ONNX Runtime: {str(failure).splitlines()[0]}", file=sys.stderr)
    row |= {peer: "" if math.isnan(ms) else f"{ms:.3f}" for peer, ms in times_of.items()}
    if times_of:
        row["speed"] = f"{np.nanmin(list(times_of.values())) / float(np.median(times)):.2f}"
    row |= errors
    if args.cpu:
        with Session(plan, device="cpu") as session:
            own = dict(zip(expected, session.run(list(expected), inputs), strict=True))
        row["CPU engine's error"] = " ".join(f"{relative_error(own[n], expected[n]):.1e}" for n in expected)
        row["GPU against CPU"] = " ".join(f"{relative_error(got[n], own[n]):.1e}" for n in expected)
    entry = plan.entries[0]
    section = next((s for s in entry.sections if s.arch in device), entry.sections[0])
    row["steps"] = f"{len(section.steps)}, {sum(s.tensor_cores for s in section.steps)} on Tensor Cores"
    row["arena"] = f"{section.arena / 2**20:.0f} MiB"
    row["device"] = device
    return row


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("names", nargs="*", default=[])
    parser.add_argument("--plans", type=Path, help="take the plans from here")
    parser.add_argument("--build", type=Path, help="write the plans here, measure nothing")
    parser.add_argument("--arch", default="sm_90a", help="generations to build for")
    parser.add_argument("--precision", default="mixed", help="mixed, fp16, bf16 or fp32")
    parser.add_argument("--ptx", action="store_true", help="with --build: PTX of all these generations too")
    parser.add_argument("--target", help="run this generation's section")
    parser.add_argument(
        "--peers", default="", help="eager, compiled: PyTorch beside; onnxruntime: its CUDA provider, if installed"
    )
    parser.add_argument("--cpu", action="store_true", help="compare with the CPU engine too")
    args = parser.parse_args()
    names = args.names or [n for n in (*CONVOLUTIONAL, *RECURRENT, *OTHERS) if n != "resnet50_dynbatch"] + list(VARIANTS)
    if args.build:
        args.build.mkdir(parents=True, exist_ok=True)
        for name in names:
            build(name, tuple(args.arch.split(",")), args.precision, args.build, args.ptx)
        return
    rows = []
    for name in names:
        plan = read_plan(args.plans / f"{name}.plan") if args.plans else None
        rows.append(measure(name, plan, args))
        print(rows[-1], flush=True)
    print(f"\n{rows[0].pop('device')}\n\n| {' | '.join(rows[0])} |\n|{' --- |' * len(rows[0])}")
    for row in rows:
        row.pop("device", None)
        print(f"| {' | '.join(row.values())} |")


if __name__ == "__main__":
    main()
