"""Networks quantized by ONNX Runtime beside the same in fp16, on a GPU: python -m tests.bench.quantized [NAME@N …]

Each network is quantized by `quantize_static` (QDQ; bytes for activations, unsigned, and for weights, with scales by channel;
calibrated with three random images), and both are compiled. Times are medians by events around graph replays. `error` is the
quantized plan's on a GPU against ONNX Runtime on a CPU, without its optimizations; `its own` is what these change in ONNX
Runtime's result. Both are large here: the weights are random, and so a byte that is rounded to the other side grows in every
layer (docs/precision.md).
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime

from tccompile.pipeline import compile
from tccompile.runtime.session import Session
from tests.bench.networks import variant
from tests.networks import feeds, relative_error

NAMES = ("resnet50_dynbatch@1", "resnet50_dynbatch@32", "resnet50_dynbatch@128", "mobilenet_v2")

IMAGES = 3
"""To calibrate with."""


def quantized(model: onnx.ModelProto, shapes: dict[str, tuple[int, ...]]) -> onnx.ModelProto:
    """The model as ONNX Runtime's quantizer writes it."""
    from onnxruntime.quantization import CalibrationDataReader, QuantFormat, QuantType, quantize_static
    from onnxruntime.quantization.shape_inference import quant_pre_process

    class Images(CalibrationDataReader):
        def __init__(self) -> None:
            one = {name: (1, *shape[1:]) for name, shape in shapes.items()}
            self.left = iter([feeds(model, seed, one) for seed in range(1, 1 + IMAGES)])

        def get_next(self) -> dict[str, Any] | None:
            return next(self.left, None)

    with tempfile.TemporaryDirectory() as folder:
        before, ready, after = (Path(folder) / name for name in ("before.onnx", "ready.onnx", "after.onnx"))
        onnx.save(model, before)
        quant_pre_process(str(before), str(ready), skip_symbolic_shape=True)
        kinds = {"activation_type": QuantType.QUInt8, "weight_type": QuantType.QInt8}
        quantize_static(ready, after, Images(), quant_format=QuantFormat.QDQ, per_channel=True, **kinds)
        return onnx.load(after)


def reference(model: onnx.ModelProto, inputs: dict[str, np.ndarray], optimized: bool) -> list[np.ndarray]:
    """What ONNX Runtime gives on a CPU."""
    options = onnxruntime.SessionOptions()
    if not optimized:
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return session.run(None, inputs)


def row(name: str, arch: str) -> str:
    """A row of the table."""
    model, shapes = variant(name)
    inputs = feeds(model, 0, shapes)
    small, times = quantized(model, shapes), {}
    for kind, one in (("fp16", model), ("int8", small)):
        with Session(compile(one, shapes, [arch]), device="gpu") as session:
            times[kind] = float(np.median(session.bench(200, inputs)))
            got = session.run(None, inputs)
    expected = reference(small, inputs, optimized=False)
    error = max(relative_error(a, b) for a, b in zip(got, expected, strict=True))
    own = max(relative_error(a, b) for a, b in zip(reference(small, inputs, optimized=True), expected, strict=True))
    cells = [
        name,
        f"{times['fp16']:.3f}",
        f"{times['int8']:.3f}",
        f"{times['fp16'] / times['int8']:.2f}",
        f"{error:.1e}",
        f"{own:.1e}",
    ]
    return f"| {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("names", nargs="*", default=NAMES)
    parser.add_argument("--arch", default="sm_90a", help="the generation to build for")
    args = parser.parse_args()
    print("| network | fp16, ms | int8, ms | speed | error | its own |\n|" + " --- |" * 6)
    for name in args.names:
        print(row(name, args.arch), flush=True)


if __name__ == "__main__":
    main()
