"""Convolutions and pools against ONNX Runtime."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tccompile import backend
from tccompile.errors import UnsupportedError
from tccompile.ir.limits import check_program
from tccompile.ir.ops import Conv, Pool
from tccompile.load.model import load
from tccompile.lower.graph import lower
from tests.networks import feeds, reference, relative_error
from tests.ops.common import Net, agrees

CONVS: tuple[tuple[tuple[int, ...], tuple[int, ...], dict[str, Any]], ...] = (
    ((2, 3, 9, 11), (5, 3, 3, 3), {}),
    ((1, 8, 7, 7), (16, 8, 1, 1), {"strides": [2, 2]}),
    ((1, 3, 17, 13), (4, 3, 7, 5), {"strides": [2, 3], "pads": [3, 1, 2, 4]}),
    ((1, 4, 15, 15), (6, 2, 3, 3), {"group": 2, "dilations": [2, 3], "pads": [1, 2, 3, 4]}),
    ((2, 9, 8, 8), (9, 1, 3, 3), {"group": 9, "pads": [1, 1, 1, 1]}),
    ((1, 4, 8, 9), (8, 1, 5, 3), {"group": 4, "strides": [2, 1]}),
    ((1, 3, 10, 11), (4, 3, 4, 4), {"auto_pad": "SAME_UPPER", "strides": [2, 2]}),
    ((1, 3, 10, 11), (4, 3, 4, 4), {"auto_pad": "SAME_LOWER", "strides": [3, 2]}),
    ((1, 3, 10, 11), (4, 3, 4, 4), {"auto_pad": "VALID"}),
    ((2, 3, 21), (7, 3, 4), {"strides": [2], "pads": [2, 1], "dilations": [2]}),
    ((2, 6, 21), (6, 1, 3), {"group": 6, "auto_pad": "SAME_UPPER"}),
    ((1, 3, 5, 9), (4, 3, 5, 3), {"dilations": [7, 8], "pads": [14, 8, 14, 8]}),
    ((1, 3, 4, 30), (4, 3, 2, 4), {"dilations": [9, 12], "strides": [2, 50], "pads": [8, 5, 8, 3]}),
    ((1, 4, 2, 3), (4, 1, 3, 3), {"dilations": [4, 4], "group": 4, "pads": [6, 4, 6, 6], "strides": [3, 1]}),
)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("x", "w", "attrs"), CONVS)
def test_convolution(x: tuple[int, ...], w: tuple[int, ...], attrs: dict[str, Any], bias: bool) -> None:
    net = Net(x=x)
    args = [net.normal(*w), *([net.normal(w[0])] if bias else [])]
    program = agrees(net.out(net("Conv", "x", *args, **attrs)))
    (op,) = (op for op in program.ops if isinstance(op, Conv))
    weights = program.tensors[op.w]
    assert weights.inner == (0 if w[1] == 1 and w[0] == x[1] else 1), "depthwise filters have channels innermost"
    assert program.tensors[op.x].inner == 1 and program.tensors[op.x].padded[1] % 8 == 0


def test_taps_that_never_meet_the_image_need_no_padding_around_it() -> None:
    """As in networks of segmentation on small images, whose filters reach 36 pixels far."""
    net = Net(x=(3, 2048, 8, 8))
    net.out(net("Conv", "x", net.normal(4, 2048, 3, 3), dilations=[36, 36], pads=[36, 36, 36, 36]))
    check_program(lower(load(net.model())))


def test_filters_that_are_computed() -> None:
    net = Net(x=(1, 3, 8, 8), w=(4, 3, 3, 3), b=(4,))
    agrees(net.out(net("Conv", "x", net("Tanh", "w"), "b")))


POOLS: tuple[tuple[tuple[int, ...], dict[str, Any]], ...] = (
    ((1, 3, 9, 9), {"kernel_shape": [2, 2], "strides": [2, 2]}),
    ((1, 3, 10, 9), {"kernel_shape": [3, 3], "strides": [2, 2], "pads": [1, 1, 1, 1]}),
    ((2, 9, 10, 11), {"kernel_shape": [3, 2], "strides": [2, 3], "pads": [0, 1, 1, 0], "ceil_mode": 1}),
    ((1, 2, 7, 7), {"kernel_shape": [3, 3], "strides": [3, 3], "pads": [1, 1, 1, 1], "ceil_mode": 1}),
    ((1, 2, 8, 9), {"kernel_shape": [3, 3], "strides": [2, 2], "auto_pad": "SAME_UPPER"}),
    ((1, 2, 8, 9), {"kernel_shape": [4, 2], "strides": [3, 1], "auto_pad": "SAME_LOWER"}),
    ((2, 3, 19), {"kernel_shape": [4], "strides": [3], "pads": [1, 2]}),
    ((1, 3, 1, 9), {"kernel_shape": [3, 2], "dilations": [1, 3], "pads": [1, 1, 1, 1], "strides": [1, 4]}),
    ((1, 3, 12, 12), {"kernel_shape": [3, 2], "dilations": [2, 3], "pads": [1, 1, 1, 1], "ceil_mode": 1, "strides": [2, 2]}),
)


@pytest.mark.parametrize(("x", "attrs"), POOLS)
def test_max_pool(x: tuple[int, ...], attrs: dict[str, Any]) -> None:
    net = Net(x=x)
    program = agrees(net.out(net("MaxPool", "x", **attrs)))
    assert sum(isinstance(op, Pool) for op in program.ops) == 1


@pytest.mark.parametrize("count_include_pad", [0, 1])
@pytest.mark.parametrize(("x", "attrs"), POOLS)
def test_average_pool(x: tuple[int, ...], attrs: dict[str, Any], count_include_pad: int) -> None:
    net = Net(x=x)
    agrees(net.out(net("AveragePool", "x", count_include_pad=count_include_pad, **attrs)))


@pytest.mark.parametrize("p", [1, 2, 3])
@pytest.mark.parametrize(("x", "attrs"), [c for c in POOLS if "dilations" not in c[1]])
def test_lp_pool(x: tuple[int, ...], attrs: dict[str, Any], p: int) -> None:
    net = Net(x=x)
    agrees(net.out(net("LpPool", "x", p=p, **attrs)))


@pytest.mark.parametrize("op", ["GlobalAveragePool", "GlobalMaxPool", "GlobalLpPool"])
@pytest.mark.parametrize("x", [(2, 5, 7, 3), (1, 3, 9), (1, 2, 3, 4, 5)])
def test_global_pools(op: str, x: tuple[int, ...]) -> None:
    net = Net(opset=21, x=x)  # ONNX Runtime has no newer GlobalLpPool
    agrees(net.out(net(op, "x")))


def test_more_axes_are_refused_with_the_node_and_the_way_out() -> None:
    net = Net(x=(1, 2, 5, 5, 5, 5))
    net.out(net("Conv", "x", net.normal(3, 2, 3, 3, 3, 3)))
    with pytest.raises(
        UnsupportedError, match=r"n0 \(Conv of 1×2×5×5×5×5, 3×2×3×3×3×3\): it has 4 spatial axes; images of one to three"
    ):
        lower(load(net.model()))


VOLUMES: tuple[tuple[tuple[int, ...], tuple[int, ...], dict[str, Any]], ...] = (
    ((2, 3, 6, 7, 8), (5, 3, 3, 3, 3), {"pads": [1, 1, 1, 1, 1, 1]}),
    ((1, 4, 9, 8, 7), (6, 2, 2, 3, 1), {"group": 2, "strides": [2, 1, 2], "dilations": [3, 1, 1], "pads": [2, 0, 0, 3, 1, 0]}),
    ((1, 6, 5, 5, 5), (6, 1, 3, 3, 3), {"group": 6, "auto_pad": "SAME_UPPER", "strides": [2, 2, 2]}),
    ((2, 8, 4, 3, 5), (16, 8, 1, 1, 1), {}),
)


@pytest.mark.parametrize("whole", [False, True])  # whether the weights are constant, and all stages run
@pytest.mark.parametrize(("x", "w", "attrs"), VOLUMES)
def test_convolution_over_a_volume(x: tuple[int, ...], w: tuple[int, ...], attrs: dict[str, Any], whole: bool) -> None:
    net = Net(x=x, **({} if whole else {"w": w}))
    y = net("Relu", net("Conv", net("Relu", "x"), net.normal(*w) if whole else "w", net.normal(w[0]), **attrs))
    model = net.out(net("MaxPool", y, kernel_shape=[2, 1, 2]) if whole else y).model()
    if whole:
        inputs = feeds(model, 0)
        (out,), (expected,) = backend.run_model(model, inputs, precision="fp32"), reference(model, inputs).values()
        assert relative_error(out, expected) < 1e-5
    else:
        agrees(model)


@pytest.mark.parametrize("attrs", [{}, {"pads": [1, 0, 1, 0, 1, 1], "strides": [2, 1, 2], "ceil_mode": 1}])
@pytest.mark.parametrize("op", ["MaxPool", "AveragePool", "LpPool"])
def test_pools_over_a_volume(op: str, attrs: dict[str, Any]) -> None:
    net = Net(x=(2, 5, 6, 7, 8))
    more = [{"count_include_pad": 1}, {"count_include_pad": 0}] if op == "AveragePool" else [{}]
    outs = [net(op, "x", kernel_shape=[3, 2, 2], **attrs, **m) for m in more]
    agrees(net.out(*outs))


def test_transposed_convolution_over_a_volume() -> None:
    net = Net(x=(2, 4, 3, 4, 5))
    y = net("ConvTranspose", "x", net.normal(4, 3, 3, 2, 4), net.normal(3), strides=[2, 1, 3], pads=[1, 0, 1, 0, 1, 2])
    model = net.out(net("Relu", y)).model()
    inputs = feeds(model, 0)
    (out,), (expected,) = backend.run_model(model, inputs, precision="fp32"), reference(model, inputs).values()
    assert relative_error(out, expected) < 1e-5


def test_unpooling_of_any_windows() -> None:
    """Windows that overlap, and places that are an input."""
    net = Net(x=(2, 3, 7, 9), i=(np.int64, (2, 3, 2, 3)), z=(2, 3, 2, 3))
    values, places = net("MaxPool", "x", outputs=2, kernel_shape=[3, 3], strides=[2, 2])
    rows = np.stack([np.random.default_rng(k).permutation(24)[:6] + 24 * k for k in range(6)]).reshape(2, 3, 2, 3)
    y = net("MaxUnpool", values, places, kernel_shape=[3, 3], strides=[2, 2])
    agrees(net.out(y, net("MaxUnpool", "z", "i", kernel_shape=[2, 2], strides=[2, 2])), {"i": rows})
