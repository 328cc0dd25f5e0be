"""DeepBench's recurrent layers on a GPU, beside cuDNN through PyTorch: python -m tests.bench.recurrent [--quick] [--plans DIR]

A layer is all of it, from its inputs at all steps to its outputs at all steps, in fp16: inputs are as wide as the layer. Both
run in CUDA graphs, timed by events; times are medians in milliseconds. "error" is ours against PyTorch's result in fp16.

    python -m tests.bench.recurrent --build DIR --arch sm_90a      writes the plans, without weights, on a machine without a GPU
"""

from __future__ import annotations

import argparse
import csv
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from tccompile.ir.ops.rnn import GATES
from tccompile.load.model import sources
from tccompile.plan.file import read_plan
from tccompile.plan.weights import fill
from tccompile.runtime.session import Session

DEEPBENCH = Path(__file__).parent / "deepbench"
OPS = {"vanilla": "RNN", "gru": "GRU", "lstm": "LSTM"}
QUICK = 12
"""--quick takes one layer in so many of each list."""

ORDER = {"rnn": (0,), "gru": (1, 0, 2), "lstm": (0, 2, 3, 1)}
"""ONNX's number of each of PyTorch's gates."""


@dataclass(frozen=True)
class Layer:
    cell: str
    units: int
    batch: int
    steps: int

    @property
    def name(self) -> str:
        return f"{self.cell}_{self.units}_{self.batch}x{self.steps}"

    @property
    def gates(self) -> int:
        return GATES[OPS[self.cell].lower()]

    @property
    def flop(self) -> float:
        return 2.0 * self.steps * self.batch * self.gates * self.units * 2 * self.units

    def weights(self) -> dict[str, np.ndarray]:
        """W and R, (1, gates · units, units), and B, (1, 2 · gates · units), such that states neither vanish nor saturate."""
        rng = np.random.default_rng(self.units)
        rows = self.gates * self.units
        shapes = {"w": (1, rows, self.units), "r": (1, rows, self.units), "b": (1, 2 * rows)}
        scale = self.units**-0.5
        return {n: (rng.standard_normal(s, np.float32) * scale).astype(np.float16) for n, s in shapes.items()}

    def model(self) -> onnx.ModelProto:
        x = helper.make_tensor_value_info("x", TensorProto.FLOAT16, (self.steps, self.batch, self.units))
        y = helper.make_tensor_value_info("y", TensorProto.FLOAT16, (self.steps, 1, self.batch, self.units))
        attrs = {"linear_before_reset": 1} if self.cell == "gru" else {}
        node = helper.make_node(OPS[self.cell], ["x", "w", "r", "b"], ["y"], self.name, hidden_size=self.units, **attrs)
        weights = [numpy_helper.from_array(v, n) for n, v in self.weights().items()]
        graph = helper.make_graph([node], self.name, [x], [y], weights)
        return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)

    def peer(self, torch: Any) -> Any:
        """The same layer in PyTorch."""
        module = getattr(torch.nn, OPS[self.cell])(self.units, self.units)
        order = ORDER[OPS[self.cell].lower()]
        given = self.weights()
        biases = np.split(given["b"][0], 2)
        for name, values in zip(module._flat_weights_names, (given["w"][0], given["r"][0], *biases), strict=True):
            parts = np.split(values, self.gates)
            getattr(module, name).data.copy_(torch.from_numpy(np.concatenate([parts[g] for g in order])))
        return module.half().cuda().eval()


def layers(quick: bool) -> Iterator[tuple[str, Layer]]:
    """(list, layer) of DeepBench's lists."""
    for path in sorted(DEEPBENCH.glob("deepbench_*_rnn.csv")):
        with path.open(newline="") as file:
            rows = list(csv.DictReader(file))
        for row in rows[:: QUICK if quick else 1]:
            name = path.stem.removeprefix("deepbench_").removesuffix("_rnn").replace("_", " ")
            yield name, Layer(row["cell"], int(row["hidden"]), int(row["batch"]), int(row["timesteps"]))


def measure(layer: Layer, plans: Path | None, arch: str, repetitions: int) -> dict[str, str]:
    """One row of the table."""
    import torch

    model = layer.model()
    if plans is None:
        from tccompile.pipeline import compile

        plan = compile(model, {}, (arch,), precision="fp16")
    else:
        plan = fill(read_plan(plans / f"{layer.name}.plan"), sources(model))
    x = np.random.default_rng(0).standard_normal((layer.steps, layer.batch, layer.units), np.float32).astype(np.float16)
    with Session(plan, device="gpu") as session:
        (got,) = session.run(None, {"x": x})
        ours = float(np.median(session.bench(repetitions, {"x": x})))
        step = next(s for s in session.plan.entries[0].sections[0].steps if s.kernel.startswith("rnn"))
    module, given = layer.peer(torch), torch.from_numpy(x).cuda()
    stream = torch.cuda.Stream()
    with torch.no_grad(), torch.cuda.stream(stream):
        want = module(given)[0].float().cpu().numpy()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            module(given)
        times = []
        for _ in range(repetitions + 3):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record(stream)
            graph.replay()
            end.record(stream)
            end.synchronize()
            times.append(begin.elapsed_time(end))
    peer = float(np.median(times[3:]))
    error = np.linalg.norm(got[:, 0].astype(np.float64) - want) / np.linalg.norm(want)
    return {
        "layer": f"{layer.cell}, {layer.units} units",
        "batch": str(layer.batch),
        "steps": str(layer.steps),
        "ours, ms": f"{ours:.3f}",
        "a step, µs": f"{ours / layer.steps * 1e3:.2f}",
        "peer, ms": f"{peer:.3f}",
        "speed": f"{peer / ours:.2f}",
        "TFLOP/s": f"{layer.flop / ours / 1e9:.1f}",
        "error": f"{error:.1e}",
        "chosen": f"{step.kernel} {' '.join(f'{k} {v}' for k, v in step.config.items())}",
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--plans", type=Path, help="take the plans from here, and leave out layers without one")
    parser.add_argument("--build", type=Path, help="write the plans here, measure nothing")
    parser.add_argument("--arch", default="sm_90a", help="the generation to build for")
    parser.add_argument("--repetitions", type=int, default=20)
    parser.add_argument("--seconds", type=float, default=1e9, help="measure no other layer after so many seconds")
    args = parser.parse_args()
    begin = time.monotonic()
    header: list[str] = []
    for number, (list_, layer) in enumerate(layers(args.quick)):
        if args.build:
            from tccompile.pipeline import compile

            args.build.mkdir(parents=True, exist_ok=True)
            compile(layer.model(), {}, (args.arch,), precision="fp16", strip_weights=True).save(args.build / f"{layer.name}.plan")
            print(f"{number}: {layer.name}, {time.monotonic() - begin:.0f} s", flush=True)
        elif time.monotonic() - begin < args.seconds and (args.plans is None or (args.plans / f"{layer.name}.plan").exists()):
            row = {"list": list_, **measure(layer, args.plans, args.arch, args.repetitions)}
            if not header:
                header = list(row)
                print(f"| {' | '.join(header)} |\n|{' --- |' * len(header)}")
            print(f"| {' | '.join(row.values())} |", flush=True)


if __name__ == "__main__":
    main()
