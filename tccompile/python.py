"""Messages for those who call from Python: where a message tells of a command's option, they are told of the argument.

Messages are written for the commands. At the door of each public function they are turned over:

    --shape 'image=1x3x224x224'      =>  shapes={'image': (1, 3, 224, 224)}
    --max-error                      =>  max_error
    --fp32 NODE                      =>  fp32=['NODE']
    tccompile m.onnx --output y      =>  tccompile.compile('m.onnx', outputs=['y'])
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import wraps
from typing import ParamSpec, TypeVar

from tccompile.errors import TccompileError

P = ParamSpec("P")
R = TypeVar("R")

VALUES = {
    "list": r"'[^']*'|[A-Z]+\b|sm_\w+(?:,sm_\w+)*",
    "shape": r"'[^']*=[0-9x]*'|[^\s']+=[0-9x]+|NAME=…",
    "range": r"'[^']*=[0-9x]*[0-9]\.\.[0-9x]*'|[^\s']+=[0-9x]*[0-9]\.\.[0-9x]+",
    "number": r"[0-9][0-9.]*(?:e[-+]?[0-9]+)?",
    "text": r"[A-Z]+(?:\.\w+)?\b|(?:mixed|fp16|bf16|fp32|int8|fp8)\b",
    "none": r"(?!)",
}
"""How messages write the values of an option, by what they are in Python; what else follows an option is the sentence."""

ARGUMENTS: Mapping[str, tuple[str, str]] = {
    "arch": ("archs", "list"), "calibrate": ("calibrate", "text"), "calibration": ("calibration", "text"),
    "check": ("tccompile.check(model)", "none"), "entry": ("entries", "none"),
    "explain": ("tccompile.inspect(plan, steps=True)", "none"), "fp32": ("fp32", "list"), "input": ("inputs", "list"),
    "input-range": ("input_ranges", "none"), "lora": ("lora", "text"), "lora-scale": ("lora_scale", "number"),
    "map": ("lora_names", "text"), "max-error": ("max_error", "number"), "nchwc-block": ("nchwc_block", "number"),
    "output": ("outputs", "list"), "precision": ("precision", "text"), "quantize": ("quantize", "text"),
    "range": ("ranges", "range"),
    "shape": ("shapes", "shape"), "strip-weights": ("strip_weights=True", "none"), "timing-cache": ("timing_cache", "text"),
    "tolerance": ("tolerance", "number"), "tune": ("tune=True", "none"), "verify": ("tccompile.verify(plan, model)", "none"),
}  # fmt: skip
"""What an option of tccompile's is called in Python, and what its value is there."""

_OPTION = re.compile(
    "|".join(rf"--{name}(?![\w-])(?: (?P<{name.replace('-', '_')}>{VALUES[kind]}))?" for name, (_, kind) in ARGUMENTS.items())
)
_COMMAND = re.compile(r"(?<![\w.])(?P<program>tccompile|tcrun|tcinspect|tcrefit) (?P<words>[^\n;]*--[^\n;]*)")


def as_python(message: str) -> str:
    """The message with arguments of Python's functions in place of the options of commands.

    A whole command that compiles becomes a call; other commands stay what they are, for somebody to type.
    """
    out, end = "", 0
    for command in _COMMAND.finditer(message):
        call = _call(command["words"]) if command["program"] == "tccompile" else None
        out += _OPTION.sub(_argument, message[end : command.start()]) + (call or command[0])
        end = command.end()
    return out + _OPTION.sub(_argument, message[end:])


def _argument(found: re.Match[str]) -> str:
    name = found[0].removeprefix("--").partition(" ")[0]
    argument, kind = ARGUMENTS[name]
    value = found[name.replace("-", "_")]
    return argument if value is None else f"{argument}={_value(kind, shlex.split(value))}"


def _value(kind: str, texts: Sequence[str]) -> str:
    """The values of an option, given once or several times, as one in Python."""
    if kind == "list":
        return repr([part for text in texts for part in (text.split(",") if text.startswith("sm_") else [text])])
    if kind == "shape":
        pairs = (text.rpartition("=") for text in texts)
        return "{" + ", ".join(f"{name!r}: {_shape(extents)}" for name, _, extents in pairs) + "}"
    if kind == "range":
        pairs = (text.rpartition("=") for text in texts)
        return "{" + ", ".join(f"{name!r}: {_range(extents)}" for name, _, extents in pairs) + "}"
    return texts[0] if kind == "number" else repr(texts[0])


def _shape(extents: str) -> str:
    parts = extents.split("x") if extents else []
    return f"({', '.join(parts)}{',' if len(parts) == 1 else ''})"


def _range(extents: str) -> str:
    """`1..8` as `(1, 8)`, and `1..8x3`, an input's axes, as `((1, 8), 3)`."""
    axes = [f"({part.replace('..', ', ')})" if ".." in part else part for part in extents.split("x")]
    return axes[0] if len(axes) == 1 else f"({', '.join(axes)})"


def _call(words: str) -> str | None:
    """The command `tccompile MODEL --option VALUE …` as a call of `compile`; None where an option has no such argument."""
    with suppress(ValueError):
        model, *options = shlex.split(words)
        given: dict[str, list[str]] = {}
        for option, value in zip(options[::2], options[1::2], strict=True):
            name = option.removeprefix("--")
            if ARGUMENTS.get(name, ("", ""))[1] not in ("list", "shape"):
                return None
            given.setdefault(name, []).append(value)
        values = [f"{ARGUMENTS[name][0]}={_value(ARGUMENTS[name][1], texts)}" for name, texts in given.items()]
        return f"tccompile.compile({', '.join(['model' if model == 'MODEL.onnx' else repr(model), *values])})"
    return None


def speaking_python(function: Callable[P, R]) -> Callable[P, R]:
    """The function with its errors in Python's words."""

    @wraps(function)
    def spoken(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return function(*args, **kwargs)
        except TccompileError as error:
            error.args = (as_python(str(error)),)
            raise

    return spoken
