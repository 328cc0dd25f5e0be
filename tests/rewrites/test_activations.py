from __future__ import annotations

import math

import numpy as np
import pytest

from tests.rewrites.common import Net, check

f = np.float32


def _clip3(n: Net, x: str) -> str:
    return n("Clip", n("Add", x, f(3)), f(0), f(6))


def _erf(n: Net, x: str, divide: bool = True) -> str:
    inside = n("Div", x, f(math.sqrt(2))) if divide else n("Mul", x, f(math.sqrt(0.5)))
    return n("Add", n("Erf", inside), f(1))


def _cube(n: Net, x: str) -> str:
    return n("Add", x, n("Mul", n("Pow", x, f(3)), f(0.044715)))


def _tanh(n: Net, inside: str) -> str:
    return n("Add", n("Tanh", n("Mul", inside, f(0.7978845608))), f(1))


CASES = {
    "hard swish, product first": (lambda n, x: n("Div", n("Mul", x, _clip3(n, x)), f(6)), "HardSwish"),
    "hard swish, quotient first": (lambda n, x: n("Mul", x, n("Div", _clip3(n, x), f(6))), "HardSwish"),
    "hard swish, gate first": (lambda n, x: n("Mul", n("Mul", _clip3(n, x), f(1 / 6)), x), "HardSwish"),
    "hard swish of hard sigmoid": (lambda n, x: n("Mul", x, n("HardSigmoid", x, alpha=1 / 6, beta=0.5)), "HardSwish"),
    "hard sigmoid": (lambda n, x: n("Div", _clip3(n, x), f(6)), "HardSigmoid"),
    "gelu, half last": (lambda n, x: n("Mul", n("Mul", x, _erf(n, x)), f(0.5)), "Gelu"),
    "gelu, half first": (lambda n, x: n("Mul", n("Mul", f(0.5), x), _erf(n, x, False)), "Gelu"),
    "gelu, half in the middle": (lambda n, x: n("Mul", x, n("Mul", f(0.5), _erf(n, x))), "Gelu"),
    "gelu, divided by 2": (lambda n, x: n("Div", n("Mul", _erf(n, x), x), f(2)), "Gelu"),
    "gelu by tanh": (lambda n, x: n("Mul", n("Mul", f(0.5), x), _tanh(n, _cube(n, x))), "Gelu"),
    "gelu by tanh of a polynomial": (
        lambda n, x: n("Mul", n("Mul", f(0.5), x), _tanh(n, n("Mul", x, n("Add", f(1), n("Mul", n("Mul", f(0.044715), x), x))))),
        "Gelu",
    ),
    "mish": (lambda n, x: n("Mul", x, n("Tanh", n("Softplus", x))), "Mish"),
    "mish of a logarithm": (lambda n, x: n("Mul", x, n("Tanh", n("Log", n("Add", n("Exp", x), f(1))))), "Mish"),
    "softplus": (lambda n, x: n("Log", n("Add", f(1), n("Exp", x))), "Softplus"),
    "clip of relu": (lambda n, x: n("Clip", n("Relu", x), f(-1), f(0.7)), "Clip"),
    "relu of clip": (lambda n, x: n("Relu", n("Clip", x, f(-1), f(0.7))), "Clip"),
}


@pytest.mark.parametrize("case", CASES)
def test_is_put_together(case):
    build, op = CASES[case]
    net = Net(x=(3, 50))
    check(net.out(build(net, net("Sin", net("Mul", "x", f(3))))), {"Mul": 1, "Sin": 1, op: 1})


def _ops(net: Net) -> dict[str, int]:
    return {op: sum(n.op_type == op for n in net.nodes) for op in {n.op_type for n in net.nodes}}


NEAR_MISSES = {
    "another bound": lambda n: n("Mul", "x", n("Clip", n("Add", "x", f(3)), f(0), f(5))),
    "another shift": lambda n: n("Mul", "x", n("Clip", n("Add", "x", f(2)), f(0), f(6))),
    "another slope": lambda n: n("Mul", "x", n("HardSigmoid", "x", alpha=0.2, beta=0.5)),
    "gelu of two values": lambda n: n("Mul", n("Sin", "x"), _erf(n, "x")),
    "gelu of another number": lambda n: n("Mul", n("Mul", "x", n("Add", n("Erf", n("Mul", "x", f(0.8))), f(1))), f(0.5)),
    "silu": lambda n: n("Mul", "x", n("Sigmoid", "x")),
    "log(2 + exp)": lambda n: n("Log", n("Add", n("Exp", "x"), f(2))),
    "another cubic": lambda n: n("Mul", "x", _tanh(n, n("Add", "x", n("Mul", n("Pow", "x", f(3)), f(0.05))))),
}


@pytest.mark.parametrize("case", NEAR_MISSES)
def test_near_misses_stay(case):
    net = Net(x=(3, 50))
    net.out(NEAR_MISSES[case](net))
    check(net, _ops(net))


def test_a_gate_that_is_used_elsewhere_stays():
    net = Net(x=(3, 50))
    gate = _erf(net, "x")
    net.out(net("Mul", net("Mul", "x", gate), f(0.5)), gate)
    check(net, _ops(net))
