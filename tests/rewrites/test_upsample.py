from __future__ import annotations

import numpy as np
import pytest

from tccompile.load.model import load
from tccompile.rewrites import rewrite
from tests.rewrites.common import Net, check, check_recipes, check_same

FLOOR = {"mode": "nearest", "coordinate_transformation_mode": "asymmetric", "nearest_mode": "floor"}
HALF = {"mode": "nearest", "coordinate_transformation_mode": "half_pixel"}


def _net(
    factors=(2, 2), w=(4, 6, 3, 3), pads=(1, 1, 1, 1), bias=True, dtype=np.float32, how=FLOOR, between=None, size=(5, 4), **attrs
) -> Net:
    net = Net(dtype=dtype, x=(2, 6, *size)[: 2 + len(factors)])
    scales = np.array([1, 1, *factors], np.float32)
    u = net("Resize", "x", None, scales, **how)
    if between:
        mode, amounts = between
        u = net("Pad", u, np.array(amounts, np.int64), mode=mode)
    args = [net.normal(*w)] + ([net.normal(w[0])] if bias else [])
    return net.out(net("Conv", u, *args, pads=pads, **attrs))


AROUND = ("reflect", [0, 0, 1, 1, 0, 0, 1, 1])
NONE = (0, 0, 0, 0)


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"how": HALF},
        {"how": HALF, "factors": (3, 3), "bias": False},
        {"factors": (2, 3), "w": (4, 6, 3, 5), "pads": (0, 2, 1, 1)},
        {"factors": (1, 2)},
        {"factors": (4, 4), "w": (4, 6, 2, 2), "pads": NONE},
        {"factors": (2,), "w": (4, 6, 5), "pads": (2, 2)},
        {"w": (4, 6, 5, 5), "pads": (2, 2, 2, 2)},
        {"between": AROUND, "pads": NONE},
        {"between": ("edge", AROUND[1]), "pads": NONE, "how": HALF},
        {"between": ("reflect", [0, 0, 1, 2, 0, 0, 2, 1]), "factors": (3, 3), "w": (4, 6, 5, 3), "pads": NONE},
        {"w": (16, 6, 3, 3)},
    ],
    ids=str,
)
def test_the_enlarged_image_is_never_stored(given):
    model = _net(**given).model()
    graph = rewrite(load(model))
    ops = [n.op for n in graph.nodes]
    assert ops.count("Conv") == 1 and "Resize" not in ops and "ConvTranspose" not in ops
    assert ops.count("Pad") == ("between" in given)
    check_recipes(graph, model)
    check_same(graph, model, 3e-6)


def test_the_taps_are_fewer():
    """Of a 3×3 filter over an image twice as large each phase needs 2×2 taps, once the shuffle is cut by a pixel."""
    graph = rewrite(load(_net(w=(16, 6, 3, 3)).model()))
    (conv,) = (n for n in graph.nodes if n.op == "Conv")
    assert list(conv.inputs[1].shape) == [64, 6, 2, 2]


def test_fp16():
    check(_net(dtype=np.float16, pads=(1, 1, 1, 1)), {"Conv": 1, "DepthToSpace": 1})


@pytest.mark.parametrize(
    ("given", "left"),
    [
        ({"how": {**HALF, "nearest_mode": "floor"}}, "Resize"),
        ({"how": {"mode": "linear", "coordinate_transformation_mode": "half_pixel"}}, "Resize"),
        ({"factors": (2.2, 2.2), "size": (4, 4)}, "Resize"),
        ({"w": (4, 6, 1, 1), "pads": NONE}, "Resize"),
        ({"w": (6, 3, 3, 3), "group": 2}, "Resize"),
        ({"strides": [2, 2]}, "Resize"),
        ({"dilations": [2, 2], "pads": (2, 2, 2, 2)}, "Resize"),
        ({"between": ("reflect", [0, 0, 2, 2, 0, 0, 2, 2]), "pads": NONE}, "Resize"),
        ({"between": ("reflect", [0, 0, 1, 0, 0, 0, 1, 0]), "pads": NONE}, "Resize"),
        ({"between": AROUND}, "Resize"),
        ({"pads": (3, 3, 3, 3)}, "Resize"),
        ({"factors": (8, 8), "size": (2, 2), "w": (16, 6, 3, 3)}, "Resize"),
    ],
    ids=str,
)
def test_what_is_something_else_stays(given, left):
    model = _net(**given).model()
    graph = rewrite(load(model))
    assert left in [n.op for n in graph.nodes]
    check_same(graph, model, 3e-6)


def test_an_enlarged_image_with_another_reader_stays():
    net = Net(x=(1, 6, 4, 4))
    u = net("Resize", "x", None, np.array([1, 1, 2, 2], np.float32), **FLOOR)
    check(net.out(net("Conv", u, net.normal(4, 6, 3, 3)), net("Relu", u)), {"Resize": 1, "Conv": 1, "Relu": 1})
