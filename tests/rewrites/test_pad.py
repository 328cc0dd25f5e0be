from __future__ import annotations

import numpy as np
import pytest

from tests.rewrites.common import Net, check

AROUND = np.array([0, 0, 1, 2, 0, 0, 3, 0])


@pytest.mark.parametrize("pads", [None, [1, 1, 0, 2]])
@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_into_conv(pads, dtype):
    net = Net(dtype=dtype, x=(1, 3, 6, 7))
    attrs = {"pads": pads} if pads else {"auto_pad": "VALID"}
    check(net.out(net("Conv", net("Pad", "x", AROUND), net.normal(4, 3, 3, 3, scale=0.3), strides=[2, 1], **attrs)), {"Conv": 1})


def test_of_some_axes_and_of_rank_3():
    net = Net(x=(1, 3, 6))
    y = net("Conv", net("Pad", "x", np.array([2, 1]), np.float32(0), np.array([-1])), net.normal(4, 3, 3))
    check(net.out(y), {"Conv": 1})


def test_pads_of_pads():
    net = Net(x=(1, 3, 6, 7))
    y = net("Conv", net("Pad", net("Pad", "x", AROUND), AROUND), net.normal(4, 3, 3, 3))
    check(net.out(y), {"Conv": 1})


@pytest.mark.parametrize("attrs", [{}, {"count_include_pad": 1}, {"count_include_pad": 1, "pads": [1, 0, 0, 1]}])
def test_into_average_pool(attrs):
    net = Net(x=(1, 3, 9, 8))
    y = net("AveragePool", net("Pad", "x", np.array([0, 0, 1, 2, 0, 0, 2, 0])), kernel_shape=[4, 4], strides=[2, 2], **attrs)
    check(net.out(y), {"AveragePool": 1})


def test_into_max_pool():
    net = Net(x=(1, 3, 9, 8))
    y = net("Pad", "x", np.array([0, 0, 1, 1, 0, 0, 1, 1]), np.float32(-np.inf))
    check(net.out(net("MaxPool", y, kernel_shape=[3, 3])), {"MaxPool": 1})


def test_zeros_into_max_pool_where_nothing_is_below():
    net = Net(x=(1, 3, 9, 8))
    y = net("Pad", net("Relu", "x"), np.array([0, 0, 1, 1, 0, 0, 1, 1]))
    check(net.out(net("MaxPool", y, kernel_shape=[3, 3])), {"Relu": 1, "MaxPool": 1})


def _conv(n: Net, *args, **attrs) -> str:
    return n("Conv", n("Pad", *args, **attrs), n.normal(4, 3, 3, 3))


NEAR_MISSES = {
    "not zero": lambda n: _conv(n, "x", AROUND, np.float32(1)),
    "reflected": lambda n: _conv(n, "x", AROUND, mode="reflect"),
    "cut off": lambda n: _conv(n, "x", np.array([0, 0, -1, 0, 0, 0, 0, 1])),
    "channels": lambda n: n("Conv", n("Pad", "x", np.array([0, 1, 0, 0, 0, 0, 0, 0])), n.normal(4, 4, 3, 3)),
    "auto_pad": lambda n: n("Conv", n("Pad", "x", AROUND), n.normal(4, 3, 3, 3), auto_pad="SAME_UPPER", strides=[2, 2]),
    "own padding not counted": lambda n: n("AveragePool", n("Pad", "x", AROUND), kernel_shape=[4, 4], pads=[1, 1, 1, 1]),
    "ceil_mode": lambda n: n("AveragePool", n("Pad", "x", AROUND), kernel_shape=[4, 4], strides=[2, 2], ceil_mode=1),
    "windows in the padding": lambda n: n("AveragePool", n("Pad", "x", AROUND), kernel_shape=[3, 3]),
    "zeros that may be the maximum": lambda n: n("MaxPool", n("Pad", "x", AROUND), kernel_shape=[4, 4]),
}  # fmt: skip


@pytest.mark.parametrize("case", NEAR_MISSES)
def test_near_misses_stay(case):
    net = Net(x=(1, 3, 9, 8))
    y = NEAR_MISSES[case](net)
    check(net.out(y), {"Pad": 1, net.nodes[-1].op_type: 1})


def test_a_pad_that_is_used_twice_stays_for_the_other():
    net = Net(x=(1, 3, 6, 7))
    p = net("Pad", "x", AROUND)
    check(net.out(net("Conv", p, net.normal(4, 3, 3, 3)), net("Relu", p)), {"Pad": 1, "Conv": 1, "Relu": 1})
