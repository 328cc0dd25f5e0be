"""By which power tensors grow with what a model is fed: said, and held against what feeding it more gives."""

from __future__ import annotations

import numpy as np
import pytest

from tccompile.ir.reference import evaluate
from tccompile.load.model import load, sources
from tccompile.lower.graph import lower
from tccompile.precision.growth import growth
from tccompile.rewrites import rewrite
from tests.rewrites.common import Net

MODELS = {
    "a layer": (1, lambda n: n("MatMul", "x", n.normal(8, 8))),
    "a product": (2, lambda n: n("Mul", "x", n("Relu", "x"))),
    "a product of matrices": (2, lambda n: n("MatMul", "x", n("Transpose", "x", perm=[0, 2, 1]))),
    "a square": (2, lambda n: n("ReduceSumSquare", "x", np.array([2]))),
    "a cube": (3, lambda n: n("Mul", n("Mul", "x", "x"), "x")),
    "a quotient": (1, lambda n: n("Div", n("Mul", "x", "x"), n("ReduceMax", n("Abs", "x"), np.array([2])))),
    "a root": (1, lambda n: n("Sqrt", n("ReduceSumSquare", "x", np.array([2])))),
    "an inverse root": (
        0,
        lambda n: n("Mul", "x", n("Reciprocal", n("Sqrt", n("ReduceSum", n("Mul", "x", "x"), np.array([2]))))),
    ),
    "a norm": (0, lambda n: n("LayerNormalization", n("Mul", "x", "x"), n.normal(8))),
    "a softmax": (1, lambda n: n("MatMul", n("Softmax", n("MatMul", "x", n.normal(8, 8))), "x")),
    "a pool": (1, lambda n: n("GlobalAveragePool", "x")),
    "a power": (3, lambda n: n("Pow", n("Abs", "x"), np.array(3, np.float32))),
}
"""The power that a model's result grows by, and the model; x is (2, 8, 8)."""


@pytest.mark.parametrize("case", MODELS)
def test_what_is_twice_as_large(case: str) -> None:
    power, make = MODELS[case]
    net = Net(x=(2, 8, 8))
    model = net.out(make(net)).model()
    program = lower(rewrite(load(model)))
    (y,) = program.outputs
    assert growth(program)[program.tensors[y].storage] == power
    x = np.random.default_rng(0).standard_normal((2, 8, 8)).astype(np.float32)
    once, much = (np.linalg.norm(evaluate(program, {"x": x * 2.0**k}, sources(model))[y]) for k in (4, 8))
    assert abs(np.log2(much / once) / 4 - power) < 0.3


@pytest.mark.parametrize("clip", [("Clip", 0.0, 6.0), ("Tanh",), ("Sigmoid",), ("HardSigmoid",)], ids=lambda c: c[0])
def test_what_is_clipped_stays_as_it_is(clip: tuple) -> None:
    net = Net(x=(2, 8))
    y = net(clip[0], net("Mul", "x", "x"), *(np.array(v, np.float32) for v in clip[1:]))
    program = lower(rewrite(load(net.out(net("Mul", y, "x")).model())))
    (y,) = program.outputs
    assert growth(program)[program.tensors[y].storage] == 1
