"""A user's own measure of what outputs are off by: a Python file with a function `error`."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np

from tccompile.errors import UsageError

Arrays = Mapping[str, np.ndarray]

Metric = Callable[[Sequence[Arrays], Sequence[Arrays], Sequence[Arrays]], float]
"""What is lost, as a number from 0 on, or NaN: from outputs, the same in fp32, and inputs, by names, a mapping for each set."""


def read_metric(path: Path) -> Metric:
    """The function `error(found, exact, inputs)` in a Python file, which is run.

    What it says below zero, of outputs that are better than those in fp32, counts as zero. Raises UsageError, also when it is
    called, for a file without one, and for what it raises or gives that is no number.
    """
    names: dict[str, object] = {"__file__": str(path), "__name__": path.stem}
    try:
        exec(compile(path.read_text(encoding="utf-8"), str(path), "exec"), names)
    except Exception as error:
        raise UsageError(f"--metric {path} does not run: {type(error).__name__}: {error}") from error
    error_of = names.get("error")
    if not callable(error_of):
        raise UsageError(f"--metric {path} has no function error(found, exact, inputs), which gives a number")

    def metric(found: Sequence[Arrays], exact: Sequence[Arrays], inputs: Sequence[Arrays]) -> float:
        try:
            number = float(error_of([*found], [*exact], [*inputs]))
        except Exception as error:
            raise UsageError(f"--metric {path}: error() raised {type(error).__name__}: {error}") from error
        return number if math.isnan(number) else max(number, 0.0)

    return metric
