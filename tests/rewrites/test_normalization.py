from __future__ import annotations

import numpy as np
import pytest
from onnx import TensorProto

from tests.rewrites.common import Net, check

f = np.float32


def _norm(n: Net, x: str, axes: tuple[int, ...], how: str = "div") -> str:
    """n(x) as exporters write it."""
    a = np.array(axes, np.int64)
    d = n("Sub", x, n("ReduceMean", x, a))
    if how == "twice":  # torch.var computes the deviation again
        again = n("Sub", x, n("ReduceMean", x, a))
        square = n("Mul", again, again)
    else:
        square = n("Pow", d, f(2)) if how == "div" else n("Mul", d, d)
    root = n("Sqrt", n("Add", n("ReduceMean", square, a), f(1e-5)))
    if how == "reciprocal":
        return n("Mul", n("Reciprocal", root), d)
    return n("Mul", d, n("Div", f(1), root)) if how == "inverse" else n("Div", d, root)


def _affine(n: Net, x: str, *shape: int) -> str:
    return n("Add", n.normal(*shape), n("Mul", x, n.normal(*shape)))


@pytest.mark.parametrize("how", ["div", "twice", "reciprocal", "inverse"])
@pytest.mark.parametrize("affine", [True, False])
def test_over_the_last_axis(how, affine):
    net = Net(x=(2, 7, 24))
    y = _norm(net, "x", (-1,), how)
    check(net.out(_affine(net, y, 24) if affine else y), {"LayerNormalization": 1})


def test_over_the_last_two_axes():
    net = Net(x=(2, 3, 5, 6))
    check(net.out(_affine(net, _norm(net, "x", (2, 3, 1)), 3, 5, 6)), {"LayerNormalization": 1})


@pytest.mark.parametrize("how", ["div", "reciprocal", "power"])
@pytest.mark.parametrize("axes", [(-1,), (1, 2)])
@pytest.mark.parametrize("scaled", [True, False])
def test_without_the_mean(how, axes, scaled):
    net = Net(x=(2, 7, 24))
    variance = net("Add", net("ReduceMean", net("Pow", "x", f(2)), np.array(axes)), f(1e-6))
    if how == "power":
        y = net("Mul", "x", net("Pow", variance, f(-0.5)))
    elif how == "div":
        y = net("Div", "x", net("Sqrt", variance))
    else:
        y = net("Mul", net("Reciprocal", net("Sqrt", variance)), "x")
    scale = net.normal(24) if len(axes) == 1 else net.normal(7, 24)
    check(net.out(net("Mul", scale, y) if scaled else y), {"RMSNormalization": 1})


def test_without_the_mean_in_a_wider_type():
    net = Net(x=(2, 7, 24), dtype=np.float16)
    wide = net("Cast", "x", to=TensorProto.FLOAT)
    variance = net("ReduceMean", net("Pow", wide, np.float32(2)), np.array([-1]))
    y = net("Mul", wide, net("Reciprocal", net("Sqrt", net("Add", variance, np.float32(1e-6)))))
    check(net.out(net("Mul", net.normal(24), net("Cast", y, to=TensorProto.FLOAT16))), {"RMSNormalization": 1})


def test_squares_of_something_else_stay():
    net = Net(x=(2, 7, 24))
    variance = net("Add", net("ReduceMean", net("Pow", net("Sin", "x"), f(2)), np.array([-1])), f(1e-6))
    y = net("Div", "x", net("Sqrt", variance))
    check(net.out(y), {"Sin": 1, "Pow": 1, "ReduceMean": 1, "Add": 1, "Sqrt": 1, "Div": 1})


@pytest.mark.parametrize("shape", [(2, 6, 5, 4), (2, 6, 40)])
def test_over_the_spatial_axes(shape):
    net = Net(x=shape)
    y = _norm(net, "x", tuple(range(2, len(shape))))
    check(net.out(_affine(net, y, 6, *(1,) * (len(shape) - 2))), {"InstanceNormalization": 1})


def test_over_the_channels():
    net = Net(x=(2, 24, 5, 4))
    check(net.out(_affine(net, _norm(net, "x", (1,)), 24, 1, 1)), {"LayerNormalization": 1, "Transpose": 2})


@pytest.mark.parametrize("eps", [1e-5, 1e-3])
def test_groups(eps):
    net = Net(x=(2, 24, 5, 4))
    y = net("Reshape", "x", np.array([0, 6, -1]))
    y = net("InstanceNormalization", y, np.ones(6, f), np.zeros(6, f), epsilon=eps)
    y = net("Reshape", y, np.array([2, 24, 5, 4]))
    check(net.out(_affine(net, y, 24, 1, 1)), {"GroupNormalization": 1})


def test_squares_in_a_wider_type():
    net = Net(x=(2, 7, 24), dtype=np.float16)
    d = net("Sub", "x", net("ReduceMean", "x", np.array([-1])))
    wide = net("Cast", d, to=TensorProto.DOUBLE)
    variance = net("ReduceMean", net("Pow", wide, np.float64(2)), np.array([-1]))
    y = net("Div", wide, net("Sqrt", net("Add", variance, np.float64(1e-6))))
    check(net.out(_affine(net, net("Cast", y, to=TensorProto.FLOAT16), 24)), {"LayerNormalization": 1})


@pytest.mark.parametrize("case", ["other axes", "other x", "scaled", "used elsewhere", "scale of another axis"])
def test_near_misses(case):
    net = Net(x=(4, 6, 24))
    a = np.array([-1])
    other = net("Sin", "x") if case == "other x" else "x"
    d = net("Sub", "x", net("ReduceMean", other, a))
    square = net("Mul", d, d)
    variance = net("ReduceMean", square, np.array([1]) if case == "other axes" else a)
    y = net("Div", d, net("Sqrt", net("Add", variance, f(1e-5))))
    left = {"ReduceMean": 2, "Sub": 1, "Mul": 1, "Add": 1, "Sqrt": 1, "Div": 1}
    if case == "other x":
        check(net.out(y), {"Sin": 1, "ReduceMean": 1, "Sub": 1, "RMSNormalization": 1})
    elif case == "other axes":
        check(net.out(y), left)
    elif case == "scale of another axis":
        check(net.out(net("Mul", y, net.normal(4, 1, 1))), {"LayerNormalization": 1, "Mul": 1})
    elif case == "scaled":
        check(net.out(net("Mul", y, f(3))), {"LayerNormalization": 1, "Mul": 1})
    else:
        check(net.out(net("Mul", y, net.normal(24)), y), {"LayerNormalization": 1, "Mul": 1})


def test_groups_that_end_as_a_sequence():
    net = Net(x=(2, 24, 5, 4))
    y = net("InstanceNormalization", net("Reshape", "x", np.array([0, 6, -1])), np.ones(6, f), np.zeros(6, f))
    check(net.out(_affine(net, net("Reshape", y, np.array([2, 24, 20])), 24, 1)), {"GroupNormalization": 1, "Reshape": 1})


def test_groups_with_scales_of_their_own_stay():
    net = Net(x=(2, 24, 5, 4))
    y = net("InstanceNormalization", net("Reshape", "x", np.array([0, 6, -1])), net.normal(6), net.normal(6))
    check(net.out(net("Reshape", y, np.array([2, 24, 5, 4]))), {"Reshape": 2, "InstanceNormalization": 1})
