"""What building costs, on a machine that does nothing else: python -m tests.bench.building [NAME …] [--arch sm_90a]

Each model of tests/models/, with complete weights, is built from an empty kernel cache and again with what that left there; and
transformer@N, with N layers of 2048 channels for 77 tokens: 50 million weights each, fp32, in a file beside the model. A row has
the seconds, the processor's seconds (all processes), the largest process's memory (mapped files included), and the plan's size.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import helper

from tccompile.ir.extent import Shape
from tests.bench.networks import variant
from tests.networks import CONVOLUTIONAL, OTHERS, RECURRENT


def transformer(layers: int, folder: Path) -> onnx.ModelProto:
    """The model, whose weights are written to a file of the folder."""
    n, rng = 2048, np.random.default_rng(0)
    nodes: list[onnx.NodeProto] = []
    weights = [onnx.numpy_helper.from_array(np.ones(n, np.float32), "one")]

    def add(op: str, *inputs: str, **attributes: Any) -> str:
        nodes.append(helper.make_node(op, inputs, [f"t{len(nodes)}"], **attributes))
        return nodes[-1].output[0]

    with (folder / "weights").open("wb") as file:

        def product(x: str, k: int, m: int) -> str:
            where = {"location": "weights", "offset": str(file.tell()), "length": str(4 * k * m)}
            file.write((rng.standard_normal((k, m), np.float32) * np.float32(k**-0.5)).data)
            weights.append(onnx.TensorProto(name=f"w{len(weights)}", data_type=onnx.TensorProto.FLOAT, dims=(k, m)))
            weights[-1].data_location = onnx.TensorProto.EXTERNAL
            weights[-1].external_data.extend(onnx.StringStringEntryProto(key=key, value=value) for key, value in where.items())
            return add("MatMul", x, weights[-1].name)

        x = "x"
        for _ in range(layers):
            y = add("LayerNormalization", x, "one")
            y = add("Attention", *(product(y, n, n) for _ in range(3)), q_num_heads=n // 64, kv_num_heads=n // 64)
            x = add("Add", x, product(y, n, n))
            y = add("Gelu", product(add("LayerNormalization", x, "one"), n, 4 * n))
            x = add("Add", x, product(y, 4 * n, n))
    values = [helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, (1, 77, n)) for name in ("x", x)]
    return helper.make_model(helper.make_graph(nodes, "transformer", values[:1], values[1:], weights))


def write(name: str, path: Path) -> Mapping[str, Shape]:
    """Write the model; the shapes that it needs."""
    base, _, layers = name.partition("@")
    model, shapes = (transformer(int(layers), path.parent), {}) if base == "transformer" else variant(name)
    onnx.save(model, path)
    return shapes


def build(model: Path, plan: Path, archs: str, cache: Path, shapes: Mapping[str, Shape]) -> tuple[float, float, float]:
    """Seconds, processor seconds and MB of memory of one `tccompile`."""
    program = "from tccompile.cli.commands import tccompile; tccompile()"
    command = [sys.executable, "-c", program, str(model), "-o", str(plan), "--arch", archs]
    for name, shape in shapes.items():
        command += ["--shape", f"{name}={'x'.join(map(str, shape))}"]
    begin = time.perf_counter()
    environment = os.environ | {"TCCOMPILE_CACHE_DIR": str(cache)}
    process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL)
    _, status, used = os.wait4(process.pid, 0)  # with what its own processes used
    seconds = time.perf_counter() - begin
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, command)
    return seconds, used.ru_utime + used.ru_stime, used.ru_maxrss / 1e3


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.building")
    everything = (*CONVOLUTIONAL, *OTHERS, *RECURRENT, "transformer@12")
    parser.add_argument("names", nargs="*", default=everything, help="models of tests/models/, or transformer@N")
    parser.add_argument("--arch", default="sm_90a", help="generations to build for")
    args = parser.parse_args()
    print("| network | s | processor s | memory, MB | warm, s | processor s | memory, MB | plan, MB |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    for name in args.names:
        with tempfile.TemporaryDirectory() as folder:
            model, plan, cache = (Path(folder) / part for part in (f"{name}.onnx", f"{name}.plan", "cache"))
            with ProcessPoolExecutor(1, get_context("spawn")) as other:  # a process begins with its parent's largest memory
                shapes = other.submit(write, name, model).result()
            figures = []
            for _ in range(2):
                seconds, busy, memory = build(model, plan, args.arch, cache, shapes)
                figures += [f"{seconds:.1f}", f"{busy:.0f}", f"{memory:.0f}"]
            print(f"| {name} | {' | '.join(figures)} | {plan.stat().st_size / 1e6:.1f} |", flush=True)


if __name__ == "__main__":
    main()
