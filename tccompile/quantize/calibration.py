"""What was chosen for a model's activations, and the file that keeps it: JSON, so that other builds need no data."""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import numpy as np
import onnx_graphsurgeon as gs

from tccompile.errors import InputError
from tccompile.quantize.grid import Grid
from tccompile.quantize.insert import Tensor, quantized
from tccompile.quantize.products import layers
from tccompile.quantize.smooth import smoothed
from tccompile.rewrites import tidy

FORMAT = 1

NAMED = "--fp32 names it"
"""Why a product is not in bytes that the user wants in fp32."""


@dataclass(frozen=True)
class Calibration:
    """Which products multiply bytes, and how what they read is stored.

    tensors  by name
    smooth   what the channels of activations are divided by, by name
    layers   the names of the products in bytes; `floats`: of the others, and why they are not
    error    of the outputs, the largest on `runs` sets of inputs; by `held` of them nothing was chosen but what is in bytes
    times    estimates in microseconds: in floats, and as it is
    """

    tensors: dict[str, Tensor]
    smooth: dict[str, np.ndarray]
    layers: tuple[str, ...]
    floats: dict[str, str]
    error: float
    runs: int
    held: int
    times: tuple[float, float]

    def without(self, fp32: Collection[str]) -> Calibration:
        """The same without those products that are to be in fp32, by names or patterns."""
        out = [name for name in self.layers if named(name, fp32)]
        kept = tuple(name for name in self.layers if name not in out)
        return replace(self, layers=kept, floats=self.floats | dict.fromkeys(out, NAMED))

    def applied(self, graph: gs.Graph) -> gs.Graph:
        """A copy of the model's rewritten graph with what is in bytes. Raises InputError if it is of another model."""
        known = {layer.name: layer for layer in layers(graph)[0]}
        for name in self.layers:
            layer = known.get(name)
            if layer is None or layer.x.name not in self.tensors:
                raise InputError(f"the calibration is of another model: this one has no product {name!r} that it could be for")
            channels = layer.x.shape[layer.channels]
            if len(self.tensors[layer.x.name].means) != channels:
                raise InputError(f"the calibration is of another model: {layer.x.name!r} has {channels} channels in this one")
        for name, f in self.smooth.items():
            if name not in self.tensors or len(f) != len(self.tensors[name].means):
                raise InputError(f"the calibration is of another model: {name!r} cannot be smoothed")
        made = quantized(smoothed(graph, self.smooth), self.tensors, self.layers)
        tidy(made)
        return made


def named(node: str, patterns: Collection[str]) -> bool:
    """Whether a node has one of these names, which may be patterns as for files."""
    return any(fnmatchcase(node, pattern) for pattern in patterns)


def write(calibration: Calibration, path: Path) -> None:
    """Keep a calibration in a file. Raises OSError."""
    tensors = {
        name: {
            "scale": t.grid.scale,
            "zero": t.grid.zero,
            "signed": t.grid.signed,
            "float8": t.grid.float8,
            "error": t.grid.error,
            "shared": t.shared,
            "tied": t.tied,
            "means": [float(m) for m in t.means],
        }
        for name, t in calibration.tensors.items()
    }
    smooth = {name: f.tolist() for name, f in calibration.smooth.items()}
    rest = {name: getattr(calibration, name) for name in ("floats", "error", "runs", "held", "times")}
    text = {"format": FORMAT, "layers": list(calibration.layers), **rest, "smooth": smooth, "tensors": tensors}
    path.write_text(json.dumps(text, indent=1) + "\n", encoding="utf-8")


def read(path: Path) -> Calibration:
    """The calibration in a file. Raises InputError for what is none."""
    try:
        with open(path, encoding="utf-8") as file:
            given = json.load(file)
        if given.get("format") != FORMAT:
            raise ValueError(f"its format is {given.get('format')!r}, and this version reads {FORMAT}")
        tensors = {str(name): _tensor(t) for name, t in given["tensors"].items()}
        return Calibration(
            tensors,
            {str(name): _factors(f) for name, f in given["smooth"].items()},
            tuple(map(str, given["layers"])),
            {str(k): str(v) for k, v in given["floats"].items()},
            _number(given["error"]),
            int(given["runs"]),
            int(given["held"]),
            (_number(given["times"][0]), _number(given["times"][1])),
        )
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror or error}") from None
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError) as error:
        raise InputError(f"{path} is no calibration that --quantize wrote: {error}") from None


def _tensor(given: Mapping[str, Any]) -> Tensor:
    scale, zero, signed = _number(given["scale"]), int(given["zero"]), bool(given["signed"])
    float8 = bool(given.get("float8", False))
    limits = np.iinfo(np.int8 if signed else np.uint8)
    if not (np.float32(scale) > 0 and limits.min <= zero <= limits.max) or (float8 and (zero or not signed)):
        raise ValueError(f"a scale of {scale:g} and a zero point of {zero}")
    means = np.array([_number(m) for m in given["means"]])
    return Tensor(Grid(scale, zero, signed, _number(given["error"]), float8), means, bool(given["shared"]), bool(given["tied"]))


def _factors(given: Sequence[Any]) -> np.ndarray:
    factors = np.array([_number(f) for f in given])
    if not (np.float32(factors.min(initial=1.0)) > 0):
        raise ValueError("channels are divided by positive numbers")
    return factors


def _number(given: Any) -> float:
    number = float(given)
    if not math.isfinite(number):
        raise ValueError(f"{number} is no finite number")
    return number
