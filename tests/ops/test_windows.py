"""Convolutions and pools against ONNX Runtime."""

from __future__ import annotations

from typing import Any

import pytest

from tccompile.errors import UnsupportedError
from tccompile.load import load
from tccompile.lower import lower
from tccompile.program import Conv, Pool
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


def test_volumes_are_refused_with_the_node_and_the_way_out() -> None:
    net = Net(x=(1, 2, 5, 5, 5))
    net.out(net("Conv", "x", net.normal(3, 2, 3, 3, 3)))
    with pytest.raises(
        UnsupportedError, match=r"n0 \(Conv of 1×2×5×5×5, 3×2×3×3×3\): it has 3 spatial axes; images of one or two"
    ):
        lower(load(net.model()))
