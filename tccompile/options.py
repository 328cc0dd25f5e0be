"""What a user can choose, once: the command line's flags and compile()'s arguments come from here."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tccompile.arch import ARCHS
from tccompile.errors import UsageError
from tccompile.sizes import Size, Sum

Shapes = Mapping[str, tuple[int, ...]]
"""Shape of each model input, by its name."""

Axes = tuple[int | Size, ...]
"""Shape of a model input of which some extents are known late."""

PRECISIONS = ("mixed", "fp16", "bf16", "fp32")

QUANTIZATIONS = ("int8", "fp8", "auto")


@dataclass(frozen=True)
class Options:
    """How to compile a model.

    entries        one set of input shapes each; one empty set for a model whose shapes are all fixed
    archs          GPU generations to build for (names in `arch.ARCHS`); the plan also carries PTX for those in `arch.PTX`
    precision      "mixed": fp16 storage and Tensor Cores, with a scale or in fp32 what fp16 would lose; "fp16": fp16 without
                   looking at values; "bf16": bf16, which has fp32's range and a tenth of fp16's digits, but for angles, positions
                   and whole numbers; "fp32": fp32 storage everywhere
    strip_weights  leave large weights out of the plan
    dump           a folder to write every stage into, or None
    jobs           processes that compile kernels; None for one a core
    timing_cache   a file of measured times to choose kernels by, before those that come with tccompile; or None
    tune           measure candidates on this machine's GPU, and write their times into timing_cache
    fp32           nodes, by name or by patterns as for files, that read and write fp32 in any precision
    calibrate      a file of inputs whose values tell "mixed" how large tensors get; None for random ones
    quantize       "int8", "fp8" or "auto": products in bytes, of integers, of E4M3 or of either, where that is faster; the rest
                   of the model as "mixed" has it. None: nowhere
    calibration    the file in which what was chosen for that is kept: read if it is there, else written; or None
    max_error      what outputs may be off by, relative to fp32, on the inputs that are measured with; precision rises for it
    metric         a Python file whose function says what outputs are off by, in place of the relative error; or None
    nchwc_block    how many channels a block has, 8 or 16, where ONNX Runtime has laid the model out for a CPU; None if it shows
    lora           a file of adapters that are merged into the model's weights first, lora_scale times; or None
    lora_names     a file that says what modules the adapters call weights, where names do not show it; or None
    ranges         sizes that are known late, by the names that the model gives dimensions; or the axes of inputs, by their names.
                   There is then no entry but for these, and the only set of shapes is that of inputs without such sizes
    ops            Python files, modules or operators: what the user adds to what is known (`tccompile.op`, `tccompile.rewrite`)
    limits         the most that nodes find whose results' extents the data decide, by the nodes' names, where it is less than it
                   may be
    input_ranges   the least and greatest value of inputs, by name, for random ones; of others the model tells, or they are normal
    """

    entries: tuple[Shapes, ...] = ({},)
    archs: tuple[str, ...] = tuple(ARCHS)
    precision: str = "mixed"
    strip_weights: bool = False
    dump: Path | None = None
    jobs: int | None = None
    timing_cache: Path | None = None
    tune: bool = False
    fp32: tuple[str, ...] = ()
    calibrate: Path | None = None
    nchwc_block: int | None = None
    ranges: Mapping[str, Size | Axes | Sum] = field(default_factory=dict)
    limits: Mapping[str, int] = field(default_factory=dict)
    input_ranges: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    max_error: float | None = None
    metric: Path | None = None
    quantize: str | None = None
    calibration: Path | None = None
    lora: Path | None = None
    lora_scale: float = 1.0
    lora_names: Path | None = None
    ops: tuple[Any, ...] = ()

    def __post_init__(self) -> None:
        for name in self.archs:
            if name not in ARCHS:
                raise UsageError(f"unknown GPU generation {name!r}; choose from {', '.join(ARCHS)}, or all")
        if not self.archs:
            raise UsageError("no GPU generation to build for; leave --arch away for all of them")
        if self.precision in QUANTIZATIONS:
            raise UsageError(
                f"no precision stores everything in {self.precision}: quantize {self.precision}, with real inputs, "
                "multiplies in it where that is faster and the error stays within a bound"
            )
        if self.precision not in PRECISIONS:
            raise UsageError(f"unknown precision {self.precision!r}; choose from {', '.join(PRECISIONS)}")
        if self.nchwc_block not in (None, 8, 16):
            raise UsageError(f"blocks of {self.nchwc_block} channels: ONNX Runtime has those of 8 and of 16")
        if self.calibrate is not None and self.precision != "mixed":
            raise UsageError(f"inputs to calibrate with change nothing in {self.precision}; they are for precision mixed")
        if self.max_error is not None and not isinstance(self.max_error, int | float):
            raise UsageError(f"the error that is allowed is a number such as 1e-3, not {self.max_error!r}")
        if self.max_error is not None and not self.max_error > 0:
            raise UsageError(f"an error of {self.max_error:g} at most cannot be kept to: give a number above 0")
        if self.max_error is not None and self.precision != "mixed":
            raise UsageError(
                f"an error of {self.max_error:g} at most is kept to by raising precision where that is needed: "
                f"it takes precision mixed, not {self.precision}"
            )
        if self.metric is not None and (self.max_error is None or self.calibrate is None):
            raise UsageError(
                f"{self.metric} measures errors on real inputs, and what it says has no bound yet: give --max-error X, and "
                "--calibrate DATA.npz"
            )
        if self.lora is None and (self.lora_names is not None or self.lora_scale != 1.0):
            raise UsageError("a scale and names of adapters say how to merge them; give the adapters, too")
        self._check_quantization()
        if self.ranges and len(self.entries) > 1:
            raise UsageError("ranges of sizes are compiled alone: build another plan for entries of fixed shapes")
        for name, limit in self.limits.items():
            if not 0 < limit < 1 << 31:
                raise UsageError(f"a limit of {limit} for {name!r}: it must be at least 1, and less than 2^31")
        for name, (low, high) in self.input_ranges.items():
            if not (math.isfinite(low) and math.isfinite(high) and low <= high):
                raise UsageError(f"the range of {name!r} is {low:g}..{high:g}: give two finite numbers, the smaller one first")
        if not self.entries:
            raise UsageError("no entry: give at least one set of input shapes")
        texts = [_entry_text(shapes) for shapes in self.entries]
        sets = [{name: tuple(shape) for name, shape in shapes.items()} for shapes in self.entries]
        if twice := next((text for i, text in enumerate(texts) if sets[i] in sets[:i]), None):
            raise UsageError(f"two entries of the same shapes, {twice}; leave one away")
        if self.tune and self.timing_cache is None:
            raise UsageError("nowhere to write what is measured: give a timing cache")

    def _check_quantization(self) -> None:
        if self.quantize is None:
            if self.calibration is not None:
                raise UsageError(f"{self.calibration} is for quantizing; give quantize int8, fp8 or auto, too")
            return
        if self.quantize not in QUANTIZATIONS:
            raise UsageError(f"unknown format {self.quantize!r} to quantize to; choose from {', '.join(QUANTIZATIONS)}")
        if self.precision != "mixed":
            raise UsageError(
                f"{self.quantize} in {self.precision}: what is not quantized is as precision mixed has it; give that"
            )
        if self.calibrate is None and not (self.calibration is not None and self.calibration.exists()):
            raise UsageError(
                f"quantizing to {self.quantize} takes real inputs, which show how large tensors get: --calibrate DATA.npz, with "
                "some dozens of them in a row, or --calibration FILE, which an earlier build has written"
            )


def _entry_text(shapes: Shapes) -> str:
    """A set of shapes as --entry takes it. Raises UsageError for what is none."""
    example = "as {'x': (1, 3, 224, 224)}"
    if not isinstance(shapes, Mapping):
        raise UsageError(f"shapes go by the inputs' names, {example}, not as {shapes!r}")
    for name, shape in shapes.items():
        if not isinstance(shape, Iterable) or not all(hasattr(n, "__index__") for n in shape):
            raise UsageError(f"the shape of {name!r} must be integers, {example}, not {shape!r}")
    return ",".join(f"{name}={'x'.join(map(str, shapes[name]))}" for name in sorted(shapes))


def parse_shapes(texts: Iterable[str], inputs: Collection[str]) -> dict[str, tuple[int, ...]]:
    """The shapes of several of the model's inputs, each as `NAME=1x3x224x224`; a scalar input is `NAME=`."""
    out: dict[str, tuple[int, ...]] = {}
    for text in texts:
        name, shape = _parse_shape(text, inputs)
        if not name or shape is None:
            known = ", ".join(map(repr, inputs)) or "none"
            raise UsageError(f"cannot read the shape {text!r}; write it as NAME=1x3x224x224 (the model's inputs: {known})")
        if name in out:
            raise UsageError(f"two shapes for the input {name!r}; give a set of shapes each with --entry")
        out[name] = shape
    return out


def _parse_shape(text: str, inputs: Collection[str]) -> tuple[str, tuple[int, ...] | None]:
    """The name, which is all before the last `=`, and the shape; None if it cannot be read."""
    name, sign, dims = text.rpartition("=")
    name = name if name in inputs else name.strip()
    try:
        shape = tuple(int(d) for d in dims.split("x")) if dims else ()
    except ValueError:
        return name, None
    return name, shape if sign and all(d >= 0 for d in shape) else None


Ranged = Size | tuple[int, int] | tuple[int, int, int]
"""A range as Python says it: the least and the greatest size, and how far sizes are apart."""


def as_sizes(ranges: Mapping[str, str | Ranged | Sequence[int | Ranged]]) -> dict[str, Size | Axes | Sum]:
    """Ranges as Python says them: {"batch": (1, 64)} for a named dimension, {"total": "past+new"} for one that is a sum of
    others, {"high": "8*h"} for so many times one, {"x": ((1, 64), 3, 224, 224)} for an input's axes."""
    out: dict[str, Size | Axes | Sum] = {}
    for name, told in ranges.items():
        if isinstance(told, str) and all(map(str.strip, told.split("+"))):
            out[name] = Sum.of(told)
            continue
        if not isinstance(told, Size | Sequence) or isinstance(told, str):
            raise UsageError(
                f"the range of {name!r} is {told!r}: give (LOW, HIGH) or (LOW, HIGH, STEP), the smaller number first"
            )
        if isinstance(told, Size) or all(isinstance(n, int) for n in told):
            out[name] = _size(name, told)
        else:
            axes = enumerate(told)
            out[name] = tuple(n if isinstance(n, int) else _size(f"{name}[{axis}]", n) for axis, n in axes)
    return out


def _size(name: str, told: Any) -> Size:
    if isinstance(told, Size):
        return told
    if not 2 <= len(told) <= 3 or told[0] < 0 or told[1] < told[0] or told[-1] < 1:
        raise UsageError(f"the range of {name!r} is {told!r}: give (LOW, HIGH) or (LOW, HIGH, STEP), the smaller number first")
    return _held_to_extents(Size(name, *told), told)


def _held_to_extents(size: Size, told: Any) -> Size:
    if size.high >= 1 << 31:
        raise UsageError(f"the range {told!r} has sizes that no input can have: extents below 2^31 are supported")
    return size


def parse_sizes(texts: Iterable[str]) -> dict[str, Size | Axes | Sum]:
    """Ranges of sizes: a named dimension's as `batch=1..64`, `h=64..2160:8` or, if it is a sum of others, `total=past+new`, or
    `high=8*h`; an input's axes as `x=1..64x3x224x224`."""
    out: dict[str, Size | Axes | Sum] = {}
    for text in texts:
        name, _, dims = text.rpartition("=")
        if name in out:
            raise UsageError(f"two ranges for {name!r}; give one")
        if name and re.match(r"(\d+\*)?[^\d+*][^+]*(\+[^+]+)*$|\d+(\+[^+]+)+$", dims):
            out[name] = Sum.of(dims)
            continue
        axes = tuple(_parse_axis(part, f"{name}[{axis}]") for axis, part in enumerate(dims.split("x")))
        if not name or any(axis is None for axis in axes) or not any(isinstance(axis, Size) for axis in axes):
            raise UsageError(
                f"cannot read the range {text!r}; write it as batch=1..64, h=64..2160:8, x=1..64x3x224x224, or total=past+new"
            )
        known = tuple(axis for axis in axes if axis is not None)
        out[name] = replace(known[0], name=name) if len(known) == 1 and isinstance(known[0], Size) else known
    return out


def _parse_axis(text: str, name: str) -> int | Size | None:
    """`224`, `1..64` or `64..2160:8`; None for anything else."""
    match = re.fullmatch(r"(\d+)(?:\.\.(\d+)(?::(\d+))?)?", text)
    if match is None:
        return None
    low, high, step = match.groups()
    if high is None:
        return int(low)
    size = Size(name, int(low), int(high), int(step or 1))
    if size.step < 1 or size.high < size.low:
        raise UsageError(f"the range {text!r} holds no size: write LOW..HIGH, or LOW..HIGH:STEP, the smaller number first")
    return _held_to_extents(size, text)


def parse_ranges(texts: Iterable[str]) -> dict[str, tuple[float, float]]:
    """Ranges of inputs' values, each as `NAME=LOW..HIGH`."""
    out: dict[str, tuple[float, float]] = {}
    for text in texts:
        name, _, numbers = text.rpartition("=")
        low, dots, high = numbers.partition("..")
        try:
            out[name] = float(low), float(high)
        except ValueError:
            dots = ""
        if not (name and dots):
            raise UsageError(f"cannot read the range {text!r}; write it as NAME=LOW..HIGH, such as position_ids=0..4095")
    return out


def parse_limits(texts: Iterable[str]) -> dict[str, int]:
    """How much nodes find at most, each as `NODE=N`."""
    out: dict[str, int] = {}
    for text in texts:
        name, _, number = text.rpartition("=")
        if not (name and number.isdecimal()):
            raise UsageError(f"cannot read the limit {text!r}; write it as NODE=N, such as /NonMaxSuppression=100")
        out[name] = int(number)
    return out


def parse_entry(text: str, inputs: Collection[str]) -> dict[str, tuple[int, ...]]:
    """`x=1x3x224x224,y=1x10`: one set of shapes of the model's inputs. Their names may hold `,` and `=`."""
    parts = text.split(",")
    whole = _joined(parts, inputs)
    if whole is None:  # a shape that cannot be read is known by its input's name
        for name in sorted(inputs, key=len, reverse=True):
            start = f",{text}".find(f",{name}=")
            wrong = f"{name}={text[start + len(name) + 1 :].partition(',')[0]}"
            if start >= 0 and _parse_shape(wrong, inputs)[1] is None:
                parts = [wrong]
                break
    return parse_shapes(whole or parts, inputs)


def _joined(parts: Sequence[str], inputs: Collection[str]) -> list[str] | None:
    """The parts between commas, joined so that each is the shape of an input: as few as can be. None if there is no such way."""
    if not parts:
        return []
    for n in range(len(parts), 0, -1):
        name, shape = _parse_shape(first := ",".join(parts[:n]), inputs)
        if shape is not None and name in inputs and (rest := _joined(parts[n:], inputs)) is not None:
            return [first, *rest]
    return None
