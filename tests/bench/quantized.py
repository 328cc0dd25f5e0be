"""Networks in bytes beside the same in fp16, on a GPU: python -m tests.bench.quantized [NAME@N …] [--onnxruntime] [--jobs N]

Each network is compiled in fp16 and by `--quantize int8`, calibrated with single random images or texts. Plans are made first, in
`--jobs` processes, then run one by one. Times are medians by events around graph replays, in milliseconds; `error` is that of the
quantized plan on a GPU against ONNX Runtime in fp32, on inputs that it was not calibrated with; the last column says how many
products are in bytes. A calibration is made once for a network, whatever its batch; --calibrations keeps it.

With --onnxruntime a row for the network as ONNX Runtime's `quantize_static` writes it (QDQ; unsigned bytes for activations, and
signed ones for weights, with scales by channel), whose error is against ONNX Runtime on a CPU without its optimizations.
"""

from __future__ import annotations

import argparse
import tempfile
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime

from tccompile.options import Options
from tccompile.pipeline import compile_model
from tccompile.plan.file import read_plan
from tccompile.runtime.session import Session
from tests.bench.networks import variant
from tests.networks import feeds, relative_error, skeleton
from tests.networks import reference as in_floats

NAMES = ("resnet50_dynbatch@1", "resnet50_dynbatch@32", "resnet50_dynbatch@128", "resnet18", "mobilenet_v2", "googlenet",
         "densenet121", "efficientnet_b0", "vgg16", "bert_base", "vit_b_16")  # fmt: skip

SAMPLES = 8
"""To calibrate with, the last two of them held back: what new inputs may be off by is far more than what was measured, by few."""


def samples(model: onnx.ModelProto, shapes: dict[str, tuple[int, ...]]) -> list[dict[str, Any]]:
    """Inputs of batch 1, where the network leaves it open."""
    one = {name: (1, *shape[1:]) for name, shape in shapes.items()}
    return [feeds(model, seed, one) for seed in range(1, 1 + SAMPLES)]


def quantized(model: onnx.ModelProto, shapes: dict[str, tuple[int, ...]]) -> onnx.ModelProto:
    """The model as ONNX Runtime's quantizer writes it."""
    from onnxruntime.quantization import CalibrationDataReader, QuantFormat, QuantType, quantize_static
    from onnxruntime.quantization.shape_inference import quant_pre_process

    class Images(CalibrationDataReader):
        def __init__(self) -> None:
            self.left = iter(samples(model, shapes))

        def get_next(self) -> dict[str, Any] | None:
            return next(self.left, None)

    with tempfile.TemporaryDirectory() as folder:
        before, ready, after = (Path(folder) / name for name in ("before.onnx", "ready.onnx", "after.onnx"))
        onnx.save(model, before)
        quant_pre_process(str(before), str(ready), skip_symbolic_shape=True)
        kinds = {"activation_type": QuantType.QUInt8, "weight_type": QuantType.QInt8}
        quantize_static(ready, after, Images(), quant_format=QuantFormat.QDQ, per_channel=True, **kinds)
        return onnx.load(after)


def reference(model: onnx.ModelProto, inputs: dict[str, np.ndarray]) -> list[np.ndarray]:
    """What ONNX Runtime gives on a CPU, without its optimizations."""
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return session.run(None, inputs)


def build(name: str, kind: str, arch: str, folder: Path, calibrations: Path) -> None:
    """Write a network's plan: `kind` is "fp16", a format of --quantize, or "QDQ"."""
    model, shapes = variant(name)
    if kind == "QDQ":
        model = quantized(model, shapes)
        onnx.save(model, folder / f"{name}.QDQ.onnx")
    options = Options((shapes,), (arch,), jobs=2)
    if kind not in ("fp16", "QDQ"):
        given, file = samples(model, shapes), calibrations / f"{name.partition('@')[0]}.{kind}.json"
        data = folder / f"{name}.{kind}.npz"
        np.savez(data, **{n: np.stack([one[n] for one in given]) for n in given[0]})
        known = None if file.exists() else data
        options = Options((shapes,), (arch,), jobs=2, quantize=kind, calibrate=known, calibration=file)
    compile_model(model, options).save(folder / f"{name}.{kind}.plan")


def row(name: str, kind: str, folder: Path) -> str:
    """A row of the table."""
    model, shapes = variant(name)
    inputs, times, notes = feeds(model, 0, shapes), {}, ()
    for each in ("fp16", kind):
        plan = read_plan(folder / f"{name}.{each}.plan")
        with Session(plan, device="gpu") as session:
            times[each] = float(np.median(session.bench(200, inputs)))
            got = session.run(None, inputs)
        notes = plan.notes
    if kind == "QDQ":
        expected = reference(onnx.load(folder / f"{name}.QDQ.onnx"), inputs)
    else:
        expected = list(in_floats(skeleton(name.partition("@")[0]), inputs).values())
    error = max(relative_error(a, b) for a, b in zip(got, expected, strict=True))
    part = next((note.split(":")[1].split(",")[0].strip() for note in notes if note.startswith(f"{kind}:")), "")
    cells = [name, kind, f"{times['fp16']:.3f}", f"{times[kind]:.3f}", f"{times['fp16'] / times[kind]:.2f}", f"{error:.1e}", part]
    return f"| {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("names", nargs="*", default=NAMES)
    parser.add_argument("--arch", default="sm_90a", help="the generation to build for")
    parser.add_argument("--quantize", default="int8", help="formats, separated by commas")
    parser.add_argument("--onnxruntime", action="store_true", help="a row for what ONNX Runtime's quantizer makes, too")
    parser.add_argument("--calibrations", type=Path, help="a folder that keeps what was found")
    parser.add_argument("--jobs", type=int, default=1, help="processes that make plans")
    args = parser.parse_args()
    kinds = [*args.quantize.split(","), *(["QDQ"] if args.onnxruntime else [])]
    with tempfile.TemporaryDirectory() as made, ProcessPoolExecutor(args.jobs, get_context("spawn")) as pool:
        folder = Path(made)
        kept = args.calibrations or folder
        wanted = [(name, kind, args.arch, folder, kept) for kind in (*kinds, "fp16") for name in args.names]
        for done in [pool.submit(build, *job) for job in wanted]:
            done.result()
        print("| network | format | fp16, ms | in bytes, ms | speed | error | in bytes |\n|" + " --- |" * 7)
        for name in args.names:
            for kind in kinds:
                print(row(name, kind, folder), flush=True)


if __name__ == "__main__":
    main()
