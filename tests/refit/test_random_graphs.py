"""Random small graphs with other weights, beside a fresh compile: whether all that decides something is known to have."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from tccompile.errors import TccompileError
from tccompile.plan.file import Plan
from tccompile.refit.plan import refitted
from tests.random_graphs import Graph
from tests.refit.common import bits, plan_of, weights
from tests.tiers import thorough


def moved(model: onnx.ModelProto, plan: Plan, rng: np.random.Generator) -> onnx.ModelProto:
    """The model with other values of all weights by which nothing was decided, of floats and of bytes."""
    out = onnx.ModelProto()
    out.CopyFrom(model)
    for tensor in out.graph.initializer:
        values = numpy_helper.to_array(tensor)
        if tensor.name in plan.origin.decided or not (values.dtype.kind == "f" or values.dtype.itemsize == 1):
            continue
        if values.dtype.kind == "f":
            values = (values * (1 + 0.2 * rng.standard_normal(values.shape))).astype(values.dtype)
        elif values.dtype.kind in "iu":
            limits = np.iinfo(values.dtype)
            values = (values.astype(int) + rng.integers(-1, 2, values.shape)).clip(limits.min, limits.max).astype(values.dtype)
        tensor.CopyFrom(numpy_helper.from_array(values, tensor.name))
    return out


def holds(seed: int, precision: str) -> None:
    old = Graph(seed).model()
    try:
        plan = plan_of(old, precision)
    except TccompileError:
        return
    new = moved(old, plan, np.random.default_rng(seed))
    made, fresh = refitted(plan, weights(new)), plan_of(new, precision)
    assert fresh.entries[0].program.ops == plan.entries[0].program.ops
    assert [name for name, data in bits(fresh).items() if bits(made)[name] != data] == []


@pytest.mark.parametrize("seed", range(10))
def test_a_random_graph(seed: int) -> None:
    holds(seed, "fp32")


@thorough
@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_random_graphs(precision: str) -> None:
    for seed in range(2000, 2080):
        holds(seed, precision)
