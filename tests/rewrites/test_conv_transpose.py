from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from tccompile.load.model import load
from tccompile.rewrites import rewrite
from tests.rewrites.common import Net, check, check_recipes, check_same

CASES = {
    # name: (x, w, attributes, bias)
    "unet": ((1, 6, 5, 4), (6, 4, 2, 2), {"strides": [2, 2]}, True),
    "dcgan": ((2, 4, 4, 5), (4, 3, 4, 4), {"strides": [2, 2], "pads": [1, 1, 1, 1]}, True),
    "output padding": ((1, 4, 5, 4), (4, 6, 3, 3), {"strides": [2, 2], "pads": [1, 1, 1, 1], "output_padding": [1, 1]}, False),
    "stride 1": ((1, 4, 5, 6), (4, 6, 3, 3), {"pads": [1, 1, 1, 1]}, True),
    "stride 1, nothing cut off": ((1, 4, 5, 6), (4, 6, 3, 2), {}, False),
    "stride 3": ((1, 4, 3, 4), (4, 2, 5, 5), {"strides": [3, 3], "pads": [1, 2, 2, 1]}, True),
    "kernel smaller than stride": ((1, 4, 3, 4), (4, 2, 2, 2), {"strides": [3, 3]}, True),
    "unequal strides": ((1, 4, 5, 3), (4, 2, 3, 4), {"strides": [2, 3], "pads": [1, 0, 0, 1]}, True),
    "a stride of 1 and one of 2": ((1, 4, 5, 3), (4, 2, 3, 3), {"strides": [1, 2]}, True),
    "dilation": ((1, 4, 5, 3), (4, 2, 3, 3), {"strides": [2, 2], "dilations": [2, 3], "pads": [1, 1, 1, 1]}, False),
    "groups": ((2, 6, 4, 4), (6, 2, 4, 4), {"strides": [2, 2], "pads": [1, 1, 1, 1], "group": 3}, True),
    "depthwise": ((1, 5, 4, 4), (5, 1, 4, 4), {"strides": [2, 2], "pads": [1, 1, 1, 1], "group": 5}, False),
    "groups, unequal strides": ((1, 6, 4, 4), (6, 2, 3, 3), {"strides": [2, 1], "group": 2}, True),
    "rank 3": ((2, 4, 7), (4, 6, 5), {"strides": [3], "pads": [2, 1]}, True),
    "rank 3, groups": ((2, 4, 7), (4, 3, 4), {"strides": [2], "group": 2}, True),
    "rank 3, stride 1": ((2, 4, 7), (4, 3, 4), {}, True),
    "pads beyond the kernel": ((1, 3, 9, 9), (3, 2, 2, 2), {"strides": [2, 2], "pads": [3, 4, 5, 3]}, True),
    "SAME_UPPER": ((1, 3, 4, 5), (3, 2, 3, 4), {"strides": [2, 2], "auto_pad": "SAME_UPPER"}, True),
    "SAME_LOWER": ((1, 3, 4, 5), (3, 2, 3, 4), {"strides": [2, 2], "auto_pad": "SAME_LOWER"}, True),
    "VALID": ((1, 3, 4, 5), (3, 2, 3, 4), {"strides": [2, 2], "auto_pad": "VALID"}, True),
    "output_shape": ((1, 3, 4, 5), (3, 2, 3, 3), {"strides": [2, 2], "output_shape": [8, 10]}, True),
    "output_shape, odd": ((1, 3, 4, 5), (3, 2, 4, 4), {"strides": [2, 2], "output_shape": [9, 11]}, False),
    "decoder": ((1, 8, 4, 5), (8, 16, 4, 4), {"strides": [2, 2], "pads": [1, 1, 1, 1]}, True),
    "1x1": ((1, 3, 4, 5), (3, 2, 1, 1), {"strides": [2, 2]}, True),
}  # fmt: skip


def _net(case: str, dtype=np.float32) -> Net:
    x, w, attrs, bias = CASES[case]
    net = Net(dtype=dtype, x=x)
    args = [net.normal(*w)] + ([net.normal(w[1] * attrs.get("group", 1))] if bias else [])
    return net.out(net("ConvTranspose", "x", *args, **attrs))


@pytest.mark.parametrize("case", CASES)
def test_is_a_convolution_and_a_shuffle(case):
    model = _net(case).model()
    graph = rewrite(load(model))
    ops = Counter(n.op for n in graph.nodes)
    assert ops.pop("Conv") == 1 and set(ops) <= {"DepthToSpace", "Reshape", "Transpose", "Slice"}, ops
    check_recipes(graph, model)
    check_same(graph, model, 3e-6)


@pytest.mark.parametrize("case", ["unet", "dcgan", "output padding"])
def test_the_usual_ones_need_no_slice(case):
    check(_net(case), {"Conv": 1, "DepthToSpace": 1})


def test_a_wide_one_has_the_fewest_taps_unless_it_is_concatenated():
    graph = rewrite(load(_net("decoder").model()))
    (conv,) = (n for n in graph.nodes if n.op == "Conv")
    assert list(conv.inputs[1].shape) == [64, 8, 2, 2]
    net = Net(x=(1, 8, 4, 5), z=(1, 3, 8, 10))
    y = net("Relu", net("ConvTranspose", "x", net.normal(8, 16, 4, 4), strides=[2, 2], pads=[1, 1, 1, 1]))
    check(net.out(net("Concat", y, "z", axis=1)), {"Conv": 1, "DepthToSpace": 1, "Relu": 1, "Concat": 1})


@pytest.mark.parametrize("case", ["unet", "groups"])
def test_fp16(case):
    check(_net(case, np.float16), {"Conv": 1, "DepthToSpace": 1})


def test_the_node_that_ends_it_keeps_its_name():
    graph = rewrite(load(_net("unet").model()))
    assert [n.name for n in graph.nodes] == ["n0/Conv", "n0"]


@pytest.mark.parametrize("case", CASES)
def test_weights_and_biases_that_are_computed(case):
    x, w, attrs, bias = CASES[case]
    net = Net(x=x, w=w, b=(w[1] * attrs.get("group", 1),))
    model = net.out(net("ConvTranspose", "x", net("Tanh", "w"), *([net("Neg", "b")] if bias else []), **attrs)).model()
    graph = rewrite(load(model))
    ops = Counter(n.op for n in graph.nodes)
    assert ops["Conv"] == 1 and "ConvTranspose" not in ops
    check_same(graph, model, 3e-6)


def test_a_bias_alone_that_is_computed():
    net = Net(x=(1, 4, 4, 4), b=(2,))
    check(net.out(net("ConvTranspose", "x", net.normal(4, 2, 3, 3), "b", strides=[2, 2])),
          {"Conv": 1, "DepthToSpace": 1, "Slice": 1, "Reshape": 2, "Expand": 1})  # fmt: skip


def test_four_spatial_axes_stay():
    net = Net(x=(1, 3, 4, 4, 2, 2))
    graph = rewrite(load(net.out(net("ConvTranspose", "x", net.normal(3, 2, 2, 2, 2, 2))).model()))
    assert [n.op for n in graph.nodes] == ["ConvTranspose"]


def test_filters_beyond_all_images_stay():
    """Their phases would take a table of seconds."""
    net = Net(x=(1, 1, 3, 3), w=(1, 2, 2**21, 3))
    graph = rewrite(load(net.out(net("ConvTranspose", "x", "w", strides=[3, 2], pads=[2**21 - 4, 1, 1, 1])).model()))
    assert [n.op for n in graph.nodes] == ["ConvTranspose"]
