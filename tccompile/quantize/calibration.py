"""What is known of a model's activations, what was chosen of it, and the file that keeps both, so that other builds need no data.

The file is JSON of the classes' fields, in the terms of `plan.codec`. What is known is of the network, whatever it is built for.
What was chosen is for one purpose; a build with another one chooses anew.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx_graphsurgeon as gs

from tccompile.errors import InputError
from tccompile.plan.codec import Codec, CodecError, loads
from tccompile.quantize.insert import Tensor
from tccompile.quantize.known import ALL, FLOAT8_ALL, FLOAT8_OPERANDS, FLOATS, FORMATS, WAYS, Activation, Known, Off, made
from tccompile.quantize.products import products
from tccompile.quantize.smooth import smoothed

FORMAT = 5


@dataclass(frozen=True)
class Purpose:
    """What a choice is for.

    shapes  of the model's inputs, at each entry
    archs   the generations whose times decide; `formats`: those that are chosen from
    bound   what outputs may be off by; `metric`: a digest of the script that says it; None for the relative error
    fp32    nodes that are to be in fp32
    """

    shapes: tuple[Mapping[str, tuple[int, ...]], ...]
    archs: tuple[str, ...]
    formats: tuple[str, ...]
    bound: float
    metric: str | None
    fp32: tuple[str, ...]


@dataclass(frozen=True)
class Cost:
    """What products in one format would cost and save, by estimates: those that read one activation, all else in floats; or all
    that may be in it.

    layers  the names of the products
    error   of the outputs, as new inputs are expected to have it
    saves   microseconds, of all entries together, in the mean of all generations
    """

    layers: tuple[str, ...]
    format: str
    error: float
    saves: float


@dataclass(frozen=True)
class Chosen:
    """Which products multiply bytes, and how what they read is stored.

    tensors  by name
    smooth   what the channels of activations are divided by, by name
    layers   the names of the products in bytes; `float8`: of those whose bytes are floats; `floats`: of those that are not in
             bytes, and why
    off      what outputs are off by on `runs` sets of inputs, or an estimate if there are none; by `held` of them nothing was
             chosen but what is in bytes
    times    estimates in microseconds for each generation, of all entries together: in floats, and as it is
    costs    of everything in each format, and then of each activation's products, the largest error first
    """

    tensors: Mapping[str, Tensor]
    smooth: Mapping[str, np.ndarray]
    layers: tuple[str, ...]
    float8: tuple[str, ...]
    floats: Mapping[str, str]
    off: Off
    runs: int
    held: int
    times: Mapping[str, tuple[float, float]]
    costs: tuple[Cost, ...] = ()

    def applied(self, graph: gs.Graph) -> gs.Graph:
        """A copy of the model's rewritten graph with what is in bytes. Raises InputError if it is of another model."""
        known, tensors = products(graph), graph.tensors()
        for name in self.layers:
            layer = known.get(name)
            if layer is None or not layer.reads.keys() <= self.tensors.keys():
                raise InputError(f"the calibration is of another model: this one has no product {name!r} that it could be for")
            for read, axis in layer.reads.items():
                channels = tensors[read].shape[axis]
                if len(self.tensors[read].means) != channels:
                    raise InputError(f"the calibration is of another model: {read!r} has {channels} channels in this one")
        return made(smoothed(graph, self.smooth), self.tensors, self.layers)


@dataclass(frozen=True)
class Calibration:
    """What is in a file."""

    format: int
    known: Known
    purpose: Purpose
    chosen: Chosen


def write(known: Known, purpose: Purpose, chosen: Chosen, path: Path) -> None:
    """Keep what is known, and what was chosen, in a file. Raises OSError."""
    text = json.dumps(_CODEC.encode(Calibration(FORMAT, known, purpose, chosen), Calibration), indent=1)
    path.write_text(text + "\n", encoding="ascii")


def read(path: Path) -> Calibration:
    """The calibration in a file. Raises InputError for what is none."""
    try:
        given = loads(path.read_bytes())
        if type(given) is not dict or given.get("format") != FORMAT:
            says = given.get("format") if type(given) is dict else None
            raise CodecError(f"its format is {says!r}, and this version reads {FORMAT}: calibrate it again")
        calibration: Calibration = _CODEC.decode(given, Calibration)
        _check(calibration)
        return calibration
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror or error}") from None
    except CodecError as error:
        raise InputError(f"{path} is no calibration that --quantize wrote: {error}") from None


def _decode_array(given: Any) -> np.ndarray:
    if type(given) is not list or not all(type(x) in (int, float) for x in given):
        raise CodecError("expected an array of numbers")
    try:
        return np.array(given, np.float64)
    except OverflowError:
        raise CodecError("a number beyond float64's") from None


_CODEC = Codec({}, {np.ndarray: (lambda array: [float(x) for x in array], _decode_array)})


def _check(c: Calibration) -> None:
    """Raises CodecError for what could not have been written."""
    known, chosen = c.known, c.chosen
    for part in (known.alone, known.tied):
        _require(len({a.name for a in part}) == len(part), "two activations of one name")
        names = [name for a in part for name in a.layers]
        _require(len(set(names)) == len(names), "two activations for one product")
        for a in part:
            _require(bool(a.layers), f"{a.name!r} has no products")
            _check_activation(a, tuple(w for w in WAYS if w not in (ALL, FLOAT8_ALL)), tuple(WAYS), (FLOATS, FLOAT8_OPERANDS))
    for a in known.added:
        _check_activation(a, (FLOATS, ALL, FLOAT8_ALL))
    for name, tensor in chosen.tensors.items():
        _check_tensor(name, tensor)
    for name, f in (*known.smooth.items(), *chosen.smooth.items()):
        positive = np.float32(f.min(initial=1.0)) > 0 and np.isfinite(f.astype(np.float32)).all()
        _require(bool(positive), f"{name!r} is not divided by positive numbers")
    tried = (x for t in known.tried for x in (t.int8, t.fp8, t.off))
    own = [] if chosen.off.own is None else [chosen.off.own]
    times = (x for pair in chosen.times.values() for x in pair)
    _numbers("errors and times", (chosen.off.largest, chosen.off.expected, *own, *times, c.purpose.bound, *tried))
    _numbers("errors of products", (cost.error for cost in chosen.costs))
    _require(all(math.isfinite(cost.saves) for cost in chosen.costs), "times of products that are no numbers")
    _require({*chosen.float8} <= {*chosen.layers}, "products in bytes of floats that are in no bytes")
    _require(min(chosen.runs, chosen.held) >= 0, "a negative number of inputs")


def _check_activation(a: Activation, *ways: tuple[int, ...]) -> None:
    whole = len(a.how) == len(a.squares) == len(WAYS)
    _require(whole and a.ways in ways and not a.how[FLOATS], f"{a.name!r}: its ways are {a.ways}")
    _numbers(f"the errors of {a.name!r}", a.squares)
    for way in a.ways:
        for name, tensor in a.how[way].items():
            _check_tensor(name, tensor)
            _require(tensor.grid.float8 == (way in FORMATS["fp8"]), f"{name!r}: a tensor in bytes of another format")


def _check_tensor(name: str, t: Tensor) -> None:
    limits = np.iinfo(t.grid.dtype)
    with np.errstate(over="ignore"):
        fine = 0 < np.float32(t.grid.scale) < np.inf and limits.min <= t.grid.zero <= limits.max
        fine &= not t.grid.float8 or (t.grid.signed and t.grid.zero == 0)
    _require(bool(fine), f"{name!r}: a scale of {t.grid.scale:g} and a zero point of {t.grid.zero}")
    _numbers(f"the error of {name!r}", (t.grid.error,))
    _require(bool(np.isfinite(t.means).all()), f"{name!r}: means that are no numbers")


def _numbers(what: str, numbers: Iterable[float]) -> None:
    _require(all(math.isfinite(x) and x >= 0 for x in numbers), f"{what} are no finite numbers from 0 on")


def _require(holds: bool, otherwise: str) -> None:
    if not holds:
        raise CodecError(otherwise)
