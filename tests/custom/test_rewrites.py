"""Rewrites of users' own: what matches, what does not and why, what takes its place, and what the user did wrong."""

from __future__ import annotations

import numpy as np
import pytest

import tccompile as tc
from tccompile.custom.files import collected, using
from tccompile.errors import OperatorError
from tccompile.load.model import load
from tccompile.rewrites import rewrite
from tests.custom.common import OPERATORS, model_of, normal, run
from tests.networks import relative_error
from tests.rewrites.common import Net

RAMP = tc.rewrite(
    "clip((x - 0.25) * 2) => test::Ramp(x)",
    lambda op, x, low, high: op.Clip(op.Mul(op.Sub(x, 0.25), 2), low, high),
    lambda op, x: op("test::Ramp", x, low=0.25, high=0.75),
    check=lambda x: None if len(x.shape) == 2 else "it is no matrix",
)


def clipped(net: Net, by: float = 2.0, turned: bool = False) -> str:
    t, two = net("Sub", "x", np.float32(0.25)), np.float32(by)
    return net("Clip", net("Mul", *((two, t) if turned else (t, two))), np.float32(0), np.float32(1))


def left(net: Net, *given: object) -> list[str]:
    with using(collected([OPERATORS, *given])):
        return [node.op for node in rewrite(load(model_of(net))).nodes]


@pytest.mark.parametrize("turned", [False, True])
def test_a_pattern_becomes_an_operator_of_the_user_s(turned: bool) -> None:
    net, x = Net(x=(3, 5)), normal(3, 5)
    net.out(clipped(net, turned=turned))
    assert left(net, RAMP) == ["Ramp"]
    (out,) = run(net, {"x": x}, OPERATORS, RAMP)
    assert relative_error(out, np.clip((x - 0.25) * 2, 0, 1)) < 1e-6


def test_near_misses_stay() -> None:
    other, cube, read = Net(x=(3, 5)), Net(x=(3, 5, 2)), Net(x=(3, 5))
    assert "Ramp" not in left(other.out(clipped(other, by=2.5)), RAMP)
    assert "Ramp" not in left(cube.out(clipped(cube)), RAMP)  # as its check says
    y = clipped(read)
    assert "Ramp" not in left(read.out(y, read("Abs", "t0")), RAMP)  # what is between is read by others


def test_right_sides_of_standard_operators_and_attributes() -> None:
    made = tc.rewrite(
        "leaky_relu(x, 0.2) => max(x, 0.2 x)",
        lambda op, x: op.LeakyRelu(x, alpha=0.2),
        lambda op, x: op.Max(x, op.Mul(x, 0.2)),
    )
    x = normal(3, 5)
    for alpha, ops in ((0.2, {"Max", "Mul"}), (0.3, {"LeakyRelu"})):
        net = Net(x=(3, 5))
        net.out(net("LeakyRelu", "x", alpha=alpha))
        assert set(left(net, made)) == ops
        (out,) = run(net, {"x": x}, OPERATORS, made, precision="fp32")
        assert relative_error(out, np.where(x > 0, x, alpha * x)) < 1e-6


def test_one_tensor_twice_is_one_tensor() -> None:
    made = tc.rewrite("x * tanh(x) => relu(x)", lambda op, x: op.Mul(x, op.Tanh(x)), lambda op, x: op.Relu(x))
    same, other = Net(x=(4,)), Net(x=(4,), y=(4,))
    assert left(same.out(same("Mul", same("Tanh", "x"), "x")), made) == ["Relu"]
    assert "Relu" not in left(other.out(other("Mul", other("Tanh", "x"), "y")), made)


@pytest.mark.parametrize(
    ("right", "message"),
    [
        (lambda op, x: op("test::Nothing", x), "nobody says what test::Nothing is"),
        (lambda op, x: op.ReduceSum(x, keepdims=0), r"its right side is float32 \(\), and its left side float32 \(4,\)"),
        (lambda op, z: op.Relu(z), "the right side has 'z', the left one has not"),
        (lambda op, x: op.Relu("x"), r"TypeError: Relu of 'x'"),
        (lambda op, x: x, "a side is a node"),
        (lambda op, x: op.Rleu(x), "Rleu"),
    ],
)
def test_mistakes_are_told_at_their_line(right: object, message: str) -> None:
    net = Net(x=(4,))
    net.out(net("Abs", "x"))
    with pytest.raises(OperatorError, match=rf"test_rewrites\.py:\d+: .*{message}"):
        left(net, tc.rewrite("abs(x) => …", lambda op, x: op.Abs(x), right))
