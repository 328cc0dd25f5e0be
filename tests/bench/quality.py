"""Trained networks in fp32, fp16 and 8 bits, on inputs that they were not trained with: python -m tests.bench.quality [--arch …]

The two networks of docs/examples: digits by the share of them that is right, a photograph that is enlarged by its PSNR. Each is
calibrated once, for `auto`, with inputs of its training set; formats are chosen from that. Results are those of the CPU engine,
which stores what a GPU would. "All" has every product in 8 bits that may be, whatever times are estimated.
"""

from __future__ import annotations

import argparse
import math
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import numpy as np
import onnx_graphsurgeon as gs
from PIL import Image

from tccompile.dump import Dump
from tccompile.ir.reference import evaluate
from tccompile.load.model import Opened, read
from tccompile.options import Options, Shapes
from tccompile.pipeline import to_program
from tccompile.quantize.products import OPS
from tccompile.stages import quantize
from tccompile.stages.quantize import calibrated

EXAMPLES = Path(__file__).parents[2] / "docs" / "examples"

FORMATS = ("fp32", "fp16", "int8", "fp8", "auto")


@dataclass(frozen=True)
class Trained:
    """A trained network.

    shapes   that it is built for
    data     to calibrate with, as `--calibrate` takes it
    held     its inputs that were held out from training; `quality`: of the outputs for these, the larger the better
    bar      how much of that 8 bits may lose
    """

    name: str
    model: Path
    shapes: Shapes
    data: Mapping[str, np.ndarray]
    held: Mapping[str, np.ndarray]
    quality: Callable[[np.ndarray], float]
    unit: str
    bar: float


def digits(count: int | None = None) -> Trained:
    """A small residual classifier of 8×8 pixels, calibrated with all images that are there for it, or with fewer."""
    folder = EXAMPLES / "digits"
    with np.load(folder / "digits.npz") as kept:
        held, labels, data = kept["held_out"], kept["labels"], kept["calibrate"][:count]

    def right(scores: np.ndarray) -> float:
        return 100 * float((scores.argmax(1) == labels).mean())

    images = [(x / 16).astype(np.float32) for x in (data, held)]
    shapes = {"image": images[1].shape}
    return Trained("digits", folder / "digits.onnx", shapes, {"image": images[0]}, {"image": images[1]}, right, "%", 0.3)


def photograph() -> Trained:
    """Super-resolution of the demo's photograph."""
    folder = EXAMPLES / "superres"
    truth = np.asarray(Image.open(folder / "chelsea.png").convert("RGB"))
    size = truth.shape[1] // 3, truth.shape[0] // 3
    small = Image.fromarray(truth).resize(size, Image.Resampling.BICUBIC)
    image = np.ascontiguousarray((np.asarray(small, np.float32) / 255).transpose(2, 0, 1)[None])

    def psnr(enlarged: np.ndarray) -> float:
        found = (enlarged[0].transpose(1, 2, 0).clip(0, 1) * 255).round()
        return 10 * math.log10(255**2 / np.mean((found - truth)[3:-3, 3:-3] ** 2))

    with np.load(folder / "calibration.npz") as kept:
        data = {"image": kept["image"]}
    return Trained("superres", folder / "superres_x3.onnx", {"image": image.shape}, data, {"image": image}, psnr, " dB", 0.1)


def qualities(trained: Trained, archs: tuple[str, ...], everything: bool, folder: Path) -> dict[str, tuple[float, int, float]]:
    """In each format the quality on what was held out, how many products are in 8 bits, and what they may be off by."""
    opened, data, kept, out = read(trained.model), folder / "data.npz", folder / f"{trained.name}.json", {}
    np.savez(data, **trained.data)  # type: ignore[arg-type]
    for name in ("auto", *(f for f in FORMATS if f != "auto")):
        quantize = None if name in ("fp32", "fp16") else name
        options = Options((trained.shapes,), archs, precision="fp32" if name == "fp32" else "mixed")
        if quantize:
            options = Options((trained.shapes,), archs, quantize=quantize, calibrate=data, calibration=kept)
        out[name] = _quality(trained, opened, options, everything)
    return {name: out[name] for name in FORMATS}


def _quality(trained: Trained, opened: Opened, options: Options, everything: bool) -> tuple[float, int, float]:
    times = mock.patch.object(quantize, "step_times", _products) if everything else mock.MagicMock()
    with times:
        found = calibrated(opened, options) if options.quantize else None
    program = to_program(opened, trained.shapes, options, Dump(None), calibration=found)
    (y,) = evaluate(program, trained.held, opened.weights, stored=True).values()
    return trained.quality(y), len(found.layers) if found else 0, found.off.expected if found else 0.0


def _products(graph: gs.Graph, archs: tuple[str, ...], **_: object) -> dict[str, list]:
    """Times by which every product is twice as fast in 8 bits."""
    narrow = {n.name for n in graph.nodes if n.op in OPS and (n.inputs[1].inputs or n.inputs[1].name.endswith("/float8"))}
    return {archs[0]: [((n.name,), 1.0 if n.name in narrow else 2.0) for n in graph.nodes if n.op in OPS]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arch", default="sm_89")
    args = parser.parse_args()
    for trained in (digits(), photograph()):
        for everything in (False, True):
            with tempfile.TemporaryDirectory() as folder:
                found = qualities(trained, (args.arch,), everything, Path(folder))
            cells = [f"{q:.2f}{trained.unit} ({count}, {error:.1e})" for q, count, error in found.values()]
            print(" | ".join([f"{trained.name}, {'all' if everything else args.arch}", *cells]))


if __name__ == "__main__":
    main()
