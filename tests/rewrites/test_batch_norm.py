from __future__ import annotations

import numpy as np
import pytest

from tests.rewrites.common import Net, check


def _batch_norm(net: Net, x: str, channels: int, **attrs) -> str:
    p = net.positive
    return net("BatchNormalization", x, p(channels), net.normal(channels), net.normal(channels), p(channels), **attrs)


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("group", [1, 2, 4])
def test_into_conv(dtype, bias, group):
    net = Net(dtype=dtype, x=(2, 4, 7, 9))
    args = ("x", net.normal(12, 4 // group, 3, 3, scale=0.3), *([net.normal(12)] if bias else []))
    y = net("Conv", *args, pads=[1, 1, 1, 1], group=group)
    check(net.out(_batch_norm(net, y, 12, epsilon=1e-3)), {"Conv": 1})


def test_into_conv_of_rank_3_at_an_old_opset():
    net = Net(opset=7, x=(2, 4, 11))
    y = net("Conv", "x", net.normal(6, 4, 3))
    check(net.out(_batch_norm(net, y, 6)), {"Conv": 1})


@pytest.mark.parametrize("group", [1, 3])
def test_into_conv_transpose(group):
    net = Net(x=(1, 6, 5, 4))
    y = net("ConvTranspose", "x", net.normal(6, 2, 3, 3), strides=[2, 3], group=group)
    graph = check_transposed(net.out(_batch_norm(net, y, 2 * group)))
    assert not {"BatchNormalization", "Mul", "Add"} & {n.op for n in graph.nodes}


def check_transposed(net: Net):
    from collections import Counter

    from tccompile.load.model import load
    from tccompile.rewrites import rewrite

    left = Counter(n.op for n in rewrite(load(net.model())).nodes)
    return check(net, left)


@pytest.mark.parametrize("trans_b", [0, 1])
def test_into_gemm(trans_b):
    net = Net(x=(5, 8))
    w = net.normal(7, 8) if trans_b else net.normal(8, 7)
    y = net("Gemm", "x", w, net.normal(7), transB=trans_b, alpha=0.5, beta=2.0)
    check(net.out(_batch_norm(net, y, 7)), {"Gemm": 1})


def test_into_matmul_and_past_its_bias():
    net = Net(x=(5, 8))
    y = net("Add", net("MatMul", "x", net.normal(8, 7)), net.normal(7))
    check(net.out(_batch_norm(net, y, 7)), {"MatMul": 1, "Add": 1})


def test_alone_it_is_a_scale_and_a_shift():
    net = Net(x=(2, 5, 4, 4))
    check(net.out(net("Relu", _batch_norm(net, "x", 5))), {"Mul": 1, "Add": 1, "Relu": 1})


def test_a_convolution_used_twice_keeps_its_weights():
    net = Net(x=(1, 3, 6, 6))
    y = net("Conv", "x", net.normal(4, 3, 1, 1))
    check(net.out(_batch_norm(net, y, 4), y), {"Conv": 1, "Mul": 1, "Add": 1})
