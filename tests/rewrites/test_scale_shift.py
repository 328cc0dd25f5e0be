from __future__ import annotations

import numpy as np
import onnx
import pytest

from tests.rewrites.common import Net, check

LINEAR = {
    "conv": (
        lambda n: n("Conv", "x", n.normal(6, 4, 3, 3, scale=0.3), n.normal(6), pads=[1, 1, 1, 1]), (2, 4, 5, 5), (6, 1, 1)),
    "conv without bias": (lambda n: n("Conv", "x", n.normal(6, 2, 3, 3, scale=0.3), group=2), (2, 4, 5, 5), (1, 6, 1, 1)),
    "gemm": (lambda n: n("Gemm", "x", n.normal(4, 6), n.normal(6)), (3, 4), (6,)),
    "gemm transposed": (lambda n: n("Gemm", "x", n.normal(6, 4), transB=1), (3, 4), (1, 6)),
    "gemm with one number as its bias": (lambda n: n("Gemm", "x", n.normal(4, 6), n.normal(1)), (3, 4), (6,)),
}  # fmt: skip


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
@pytest.mark.parametrize("linear", LINEAR)
@pytest.mark.parametrize(
    ("op", "left"), [("Mul", False), ("Mul", True), ("Div", False), ("Add", False), ("Add", True), ("Sub", False), ("Sub", True)]
)
def test_after(linear, op, left, dtype):
    build, x, c = LINEAR[linear]
    net = Net(dtype=dtype, x=x)
    y, values = build(net), net.positive(*c)
    y = net(op, values, y) if left else net(op, y, values)
    check(net.out(y), {"Conv" if "conv" in linear else "Gemm": 1})


def test_chains_converge():
    net = Net(x=(1, 4, 6, 6))
    y = net("Conv", "x", net.normal(8, 4, 3, 3), net.normal(8))
    for op, c in (("Mul", net.positive(8, 1, 1)), ("Add", net.normal(1)), ("Sub", net.normal(8, 1, 1)), ("Div", net.positive())):
        y = net(op, y, c)
    check(net.out(net("Sub", net.normal(1, 8, 1, 1), y)), {"Conv": 1})


@pytest.mark.parametrize("batched", [False, True])
def test_matmul_takes_scales_past_its_bias(batched):
    net = Net(x=(2, 5, 4))
    w = net.normal(1, 4, 6) if batched else net.normal(4, 6)
    y = net("Mul", net("Add", net("MatMul", "x", w), net.normal(6)), net.positive(6))
    check(net.out(net("Div", net("Sub", y, net.normal(6)), net.positive())), {"MatMul": 1, "Add": 1})


@pytest.mark.parametrize("group", [1, 2])
@pytest.mark.parametrize("c", [(4, 1, 1), (1,), ()])
def test_a_scale_before_a_convolution_with_padding(c, group):
    net = Net(x=(1, 4, 6, 6))
    y = net("Conv", net("Mul", "x", net.positive(*c)), net.normal(6, 4 // group, 3, 3), pads=[1, 0, 1, 2], group=group)
    check(net.out(y), {"Conv": 1})


@pytest.mark.parametrize("far", [1e-5, 1e6])
def test_a_scale_that_brings_far_values_near_stays_before_a_convolution(far):
    net = Net(x=(1, 4, 6, 6))
    y = net("Conv", net("Mul", "x", np.float32(far)), net.normal(6, 4, 3, 3))
    check(net.out(y), {"Mul": 1, "Conv": 1})


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("group", [1, 4])
def test_a_normalised_image_before_a_convolution_without_padding(group, bias):
    net = Net(x=(1, 4, 6, 6))
    y = net("Div", net("Sub", "x", net.normal(1, 4, 1, 1)), net.positive(1, 4, 1, 1))
    args = [net.normal(8, 4 // group, 3, 3)] + ([net.normal(8)] if bias else [])
    check(net.out(net("Conv", y, *args, group=group)), {"Conv": 1})


def test_a_shift_before_a_convolution_with_padding_stays():
    net = Net(x=(1, 4, 6, 6))
    y = net("Conv", net("Add", "x", net.normal(4, 1, 1)), net.normal(6, 4, 3, 3), pads=[1, 1, 1, 1])
    check(net.out(y), {"Add": 1, "Conv": 1})


def test_the_scale_of_sums_of_bytes_stays_before_a_convolution():
    """Without it they would be stored as float32: fp16 does not hold them."""
    net = Net(x=(np.uint8, (1, 16, 6, 6)))
    sums = net("ConvInteger", "x", net.rng.integers(-127, 128, (16, 16, 1, 1)).astype(np.int8))
    scaled = net("Mul", net("Cast", sums, to=onnx.TensorProto.FLOAT), net.positive(16, 1, 1) * np.float32(1e-4))
    check(
        net.out(net("Conv", scaled, net.normal(6, 16, 3, 3), pads=[1, 1, 1, 1])),
        {"ConvInteger": 1, "Cast": 1, "Mul": 1, "Conv": 1},
    )


def test_chains_of_constants():
    net = Net(x=(2, 3, 4))
    y = net("Mul", net("Mul", "x", net.normal(4)), net.normal())
    check(net.out(net("Relu", net("Sub", net("Add", y, net.normal(1)), net.normal(4)))), {"Mul": 1, "Add": 1, "Relu": 1})


NEAR_MISSES = {
    "one number a row": lambda n: n("Mul", n("Conv", "x", n.normal(6, 4, 1, 1)), n.normal(5, 1)),
    "one number an element": lambda n: n("Add", n("Conv", "x", n.normal(6, 4, 1, 1)), n.normal(6, 5, 5)),
    "it widens": lambda n: n("Mul", n("Conv", "x", n.normal(1, 4, 1, 1)), n.normal(6, 1, 1)),
    "more axes": lambda n: n("Mul", n("Conv", "x", n.normal(6, 4, 1, 1)), n.normal(1, 1, 6, 1, 1)),
    "a quotient with the value below": lambda n: n(
        "Div", n.positive(6, 1, 1), n("Conv", "x", n.positive(6, 4, 1, 1), n.normal(6))
    ),
    "two values": lambda n: n("Mul", n("Conv", "x", n.normal(6, 4, 1, 1)), n("Relu", n("Conv", "x", n.normal(6, 4, 1, 1)))),
}


@pytest.mark.parametrize("case", NEAR_MISSES)
def test_near_misses_stay(case):
    net = Net(x=(2, 4, 5, 5))
    net.out(NEAR_MISSES[case](net))
    left: dict[str, int] = {}
    for node in net.nodes:
        left[node.op_type] = left.get(node.op_type, 0) + 1
    check(net, left)


def test_a_scale_that_fp16_cannot_hold_stays():
    net = Net(dtype=np.float16, x=(1, 4, 5, 5))
    y = net("Conv", net("Tanh", net("Mul", "x", np.asarray(1e-4, np.float16))), np.full((4, 4, 1, 1), 10, np.float16))
    check(net.out(net("Mul", y, np.asarray(3e4, np.float16))), {"Mul": 2, "Tanh": 1, "Conv": 1})


def test_a_gemm_in_normal_form():
    net = Net(x=(3, 4))
    y = net("Gemm", "x", net.normal(6, 4), net.normal(3, 6), alpha=0.5, beta=0.25, transB=1)
    graph = check(net.out(y), {"Gemm": 1})
    assert graph.nodes[0].attrs == {"transB": 1}


def test_a_constant_left_operand_is_transposed_ahead():
    net = Net(x=(4, 5))
    graph = check(net.out(net("Gemm", net.normal(4, 3), "x", transA=1, beta=3.0)), {"Gemm": 1})
    assert not graph.nodes[0].attrs
