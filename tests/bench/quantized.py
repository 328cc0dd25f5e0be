"""Networks in bytes beside the same in fp16, on a GPU: python -m tests.bench.quantized [NAME@N …] [--onnxruntime] [--jobs N]

Each network is compiled in fp16 and by `--quantize int8`, calibrated with single random images or texts, with smaller images
where running it would take too long. Plans are made first, in `--jobs` processes, then run one by one. Times are medians by
events around graph replays, in milliseconds, the least of three turns in which the plans of a network alternate. `error` is that
of the quantized plan on a GPU against ONNX Runtime in fp32, on inputs that it was not calibrated with; then how many products are
in bytes, and why others are not. A calibration is made once for a network, and a choice for each batch; --calibrations keeps it.
With more --samples than 8 less is promised of new inputs beyond what was measured, so that more may be in bytes.

    python -m tests.bench.quantized --compile --plans DIR …      makes plans and what outputs should be, which needs no GPU
    python -m tests.bench.quantized --plans DIR …                measures them

With --onnxruntime a row for the network as ONNX Runtime's `quantize_static` writes it (QDQ; unsigned bytes for activations, and
signed ones for weights, with scales by channel), whose error is against ONNX Runtime on a CPU without its optimizations.
"""

from __future__ import annotations

import argparse
import re
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import ExitStack
from dataclasses import dataclass, replace
from multiprocessing import get_context
from pathlib import Path
from statistics import geometric_mean
from typing import Any

import numpy as np
import onnx
import onnxruntime

from tccompile.load.model import load, read
from tccompile.lower.graph import lower
from tccompile.options import Options
from tccompile.pipeline import compile_model
from tccompile.plan.file import Plan, read_plan
from tccompile.precision.ranges import smaller, why_too_long
from tccompile.rewrites import rewrite
from tccompile.runtime.session import Session
from tests.bench.networks import variant
from tests.networks import feeds, relative_error
from tests.networks import reference as in_floats

BATCHED = ("resnet50_dynbatch", "resnet18", "vgg16", "googlenet", "densenet121", "mobilenet_v2", "efficientnet_b0",
           "bert_base", "vit_b_16", "ddpm_unet", "espcn_x3")  # fmt: skip
"""Networks whose batch may be opened."""

OTHERS = ("unet_denoise", "style_transfer", "esrgan_x4", "taesd_decoder", "sd_vae_decoder", "deepspeech_gru", "lstm_lm")
"""Networks of large images, and of fixed shapes."""

NAMES = (*(f"{name}@{batch}" for batch in (1, 32) for name in BATCHED), "resnet50_dynbatch@128", *OTHERS)

TURNS = 3

SAMPLES = 8
"""To calibrate with, a quarter of them held back: what new inputs may be off by is far more than what was measured, by few."""


def samples(model: onnx.ModelProto, shapes: dict[str, tuple[int, ...]], count: int = SAMPLES) -> list[dict[str, Any]]:
    """So many inputs of batch 1, where the network leaves it open; smaller images where running it would take too long."""
    one = {name: (1, *shape[1:]) for name, shape in shapes.items()}
    opened = read(model)
    program = lower(rewrite(load(opened, one)))
    if why_too_long(program):
        _, one = smaller(opened, program)
    return [feeds(model, seed, one) for seed in range(1, 1 + count)]


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


def build(name: str, kind: str, args: argparse.Namespace, folder: Path) -> None:
    """Write a network's plan: `kind` is "fp16", a format of --quantize, or "QDQ"."""
    model, shapes = variant(name)
    if kind == "QDQ":
        model = quantized(model, shapes)
        onnx.save(model, folder / f"{name}.QDQ.onnx")
    options, calibrations = Options((shapes,), (args.arch,), jobs=2), args.calibrations or folder
    if kind not in ("fp16", "QDQ"):
        given, data = samples(model, shapes, args.samples), folder / f"{name}.{kind}.npz"
        np.savez(data, **{n: np.stack([one[n] for one in given]) for n in given[0]})
        own, shared = (calibrations / f"{each}.{kind}.json" for each in (name, name.partition("@")[0]))
        options = replace(options, quantize=kind, calibrate=data, calibration=own if own.exists() else shared)
    compile_model(model, options).save(folder / f"{name}.{kind}.plan")


def expect(name: str, kind: str, folder: Path) -> None:
    """Write what outputs should be: of the network in floats, or as ONNX Runtime has quantized it."""
    model, shapes = variant(name)
    inputs = feeds(model, 0, shapes)
    found = reference(onnx.load(folder / f"{name}.QDQ.onnx"), inputs) if kind == "QDQ" else [*in_floats(model, inputs).values()]
    np.savez(folder / f"{name}.{kind}.expected.npz", *found)


def make(network: str, names: list[str], kinds: list[str], args: argparse.Namespace, folder: Path) -> str:
    """A network's plans of these kinds, at all batches: the first one's calibration serves the others."""
    began = time.perf_counter()
    for name in names:
        for kind in kinds:
            if kind == "fp16" and not (folder / f"{name}.fp16.expected.npz").exists():
                expect(name, kind, folder)
            if not (folder / f"{name}.{kind}.plan").exists():
                build(name, kind, args, folder)
            if kind == "QDQ":
                expect(name, kind, folder)
    return f"{network}, {' '.join(kinds)}: {time.perf_counter() - began:.0f} s"


def make_all(args: argparse.Namespace, kinds: list[str], folder: Path) -> None:
    """All plans, side by side; what fails is named, and the others are made."""
    networks = dict[str, list[str]]()
    for name in args.names:
        networks.setdefault(name.partition("@")[0], []).append(name)
    with ProcessPoolExecutor(args.jobs, get_context("spawn")) as pool:
        made = {
            pool.submit(make, network, names, [kind], args, folder): f"{network}, {kind}"
            for kind in (*kinds, "fp16")
            for network, names in networks.items()
        }
        for done in as_completed(made):
            error = done.exception()
            print(done.result() if error is None else f"{made[done]}: {error!r}", file=sys.stderr, flush=True)


@dataclass(frozen=True)
class Row:
    """What was measured of a network: milliseconds in fp16 and in bytes, and the error in bytes."""

    name: str
    kind: str
    fp16: float
    own: float
    error: float
    some: str
    others: str

    @property
    def speed(self) -> float:
        return self.fp16 / self.own

    def __str__(self) -> str:
        cells = [self.name, self.kind, f"{self.fp16:.3f}", f"{self.own:.3f}", f"{self.speed:.2f}", f"{self.error:.1e}"]
        return f"| {' | '.join((*cells, self.some, self.others))} |"


def rows(name: str, kinds: list[str], folder: Path) -> Iterator[Row]:
    """The rows of a network's plans, those of them that could be made."""
    model, shapes = variant(name)
    inputs, every = feeds(model, 0, shapes), [k for k in ("fp16", *kinds) if (folder / f"{name}.{k}.plan").exists()]
    if every[:1] != ["fp16"]:
        return
    with ExitStack() as stack:
        plans = {kind: read_plan(folder / f"{name}.{kind}.plan") for kind in every}
        sessions = {kind: stack.enter_context(Session(plan, device="gpu")) for kind, plan in plans.items()}
        turns = [{kind: float(np.median(s.bench(100, inputs))) for kind, s in sessions.items()} for _ in range(TURNS)]
        times = {kind: min(turn[kind] for turn in turns) for kind in every}
        for kind in every[1:]:
            with np.load(folder / f"{name}.{'QDQ' if kind == 'QDQ' else 'fp16'}.expected.npz") as kept:
                expected = [kept[n] for n in kept.files]
            got = sessions[kind].run(None, inputs)
            error = max(relative_error(a, b) for a, b in zip(got, expected, strict=True))
            yield Row(name, kind, times["fp16"], times[kind], error, *_notes(plans[kind], kind))


def _notes(plan: Plan, kind: str) -> tuple[str, str]:
    """How many products are in bytes, and how many others are not, by the reason."""
    head = f"{kind}: "
    some = next((note.removeprefix(head).split(" products")[0] for note in plan.notes if note.startswith(head)), "")
    reasons = [re.match("not in .*?, since (.*?): (.*)", note) for note in plan.notes]
    return some, "; ".join(f"{found[2].count(',') + 1} {found[1]}" for found in reasons if found)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("names", nargs="*", default=NAMES)
    parser.add_argument("--arch", default="sm_90a", help="the generation to build for")
    parser.add_argument("--quantize", default="int8", help="formats, separated by commas")
    parser.add_argument("--onnxruntime", action="store_true", help="a row for what ONNX Runtime's quantizer makes, too")
    parser.add_argument("--plans", type=Path, help="a folder that keeps plans; those that are there are not made again")
    parser.add_argument("--compile", action="store_true", help="make the plans, and measure nothing")
    parser.add_argument("--calibrations", type=Path, help="a folder that keeps what was found")
    parser.add_argument("--samples", type=int, default=SAMPLES, help="inputs to calibrate with, and to measure choices on")
    parser.add_argument("--jobs", type=int, default=1, help="processes that make plans")
    args = parser.parse_args()
    kinds = [*args.quantize.split(","), *(["QDQ"] if args.onnxruntime else [])]
    with tempfile.TemporaryDirectory() as made:
        folder = args.plans or Path(made)
        folder.mkdir(parents=True, exist_ok=True)
        if args.compile or not args.plans:
            make_all(args, kinds, folder)
        if not args.compile:
            measure(args.names, kinds, folder)


def measure(names: Sequence[str], kinds: list[str], folder: Path) -> None:
    """Print the table, and for each kind and batch the geometric mean of speeds."""
    print("| network | format | fp16, ms | in bytes, ms | speed | error | in bytes | not |\n|" + " --- |" * 8)
    speeds = dict[tuple[str, str], list[float]]()
    for name in names:
        for row in rows(name, kinds, folder):
            speeds.setdefault((row.kind, row.name.partition("@")[2]), []).append(row.speed)
            print(row, flush=True)
    for (kind, batch), found in speeds.items():
        at = f"batch {batch}" if batch else "own shapes"
        print(f"{kind}, {at}: {len(found)} networks, geometric mean {geometric_mean(found):.3f}, least {min(found):.3f}")


if __name__ == "__main__":
    main()
