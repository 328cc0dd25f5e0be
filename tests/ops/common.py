"""A small model through load → lower → the NumPy reference, beside ONNX Runtime."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import onnx

from tccompile.ir.program import Program
from tccompile.ir.reference import evaluate
from tccompile.ir.verify import verify
from tccompile.load.model import load, sources
from tccompile.lower.graph import lower
from tests.networks import feeds, reference, relative_error
from tests.rewrites.common import Net

__all__ = ["Net", "agrees"]


def agrees(net: Net | onnx.ModelProto, inputs: Mapping[str, np.ndarray] | None = None, tolerance: float = 1e-5) -> Program:
    """Hold the lowered model to ONNX Runtime's outputs; returns the program, unfused, for a look at how it was done."""
    model = net.model() if isinstance(net, Net) else net
    program = lower(load(model))
    verify(program)
    inputs = feeds(model, 0) | dict(inputs or {})
    got, want = evaluate(program, inputs, sources(model)), reference(model, inputs)
    for name, expected in want.items():
        assert np.isfinite(expected.astype(np.float64)).all(), f"{name}: choose inputs that keep it finite"
        error = relative_error(got[name], expected)
        assert error <= tolerance, f"{name} is {error:.1e} off"
    return program
