"""Reductions, softmaxes and norms against ONNX Runtime."""

from __future__ import annotations

import numpy as np
import pytest
from onnx import TensorProto, helper

from tccompile.ir.ops import Norm, Reduce
from tccompile.lower.reduce import REDUCTIONS
from tests.ops.common import Net, agrees

OPS = [op for op in REDUCTIONS if op.startswith("Reduce")] + ["ReduceLogSumExp"]


def axes_of(*axes: int) -> np.ndarray:
    return np.array(axes, np.int64)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("keepdims", [0, 1])
@pytest.mark.parametrize("axes", [(1,), (-1,), (2, 3), (0, -2), None])
def test_reductions(op: str, keepdims: int, axes: tuple[int, ...] | None) -> None:
    net = Net(x=(2, 5, 4, 3))
    x = np.random.default_rng(3).uniform(0.5, 1.5, (2, 5, 4, 3)).astype(np.float32)
    args = [] if axes is None else [axes_of(*axes)]
    agrees(net.out(net(op, "x", *args, keepdims=keepdims)), {"x": x})


@pytest.mark.parametrize("op", OPS)
def test_no_axes_is_no_reduction_if_the_node_says_so(op: str) -> None:
    net = Net(x=(2, 5))
    x = np.random.default_rng(3).uniform(0.5, 1.5, (2, 5)).astype(np.float32)
    program = agrees(net.out(net("ReduceSum", net(op, "x", keepdims=1), noop_with_empty_axes=1)), {"x": x})
    assert sum(isinstance(o, Reduce) for o in program.ops) == (2 if op == "ReduceLogSumExp" else 1)


def test_log_sum_exp_of_large_numbers() -> None:
    net = Net(x=(4, 9))
    x = np.random.default_rng(3).standard_normal((4, 9)).astype(np.float32) * 1000
    agrees(net.out(net("ReduceLogSumExp", "x", axes_of(1))), {"x": x})


@pytest.mark.parametrize("op", ["ReduceSum", "ReduceMax", "ReduceProd", "ReduceMean"])
def test_integers(op: str) -> None:
    net = Net(dtype=np.int32, x=(4, 9))
    x = np.random.default_rng(3).integers(1, 7, (4, 9)).astype(np.int32)
    agrees(net.out(net(op, "x", axes_of(1))), {"x": x}, tolerance=0)


def test_an_image_is_reduced_where_it_lies() -> None:
    net = Net(x=(1, 3, 8, 8))
    y = net("ReduceMean", net("Conv", "x", net.normal(12, 3, 3, 3)), axes_of(2, 3), keepdims=0)
    program = agrees(net.out(net("Relu", y)))
    (op,) = (op for op in program.ops if isinstance(op, Reduce))
    assert op.x == "t0" and program.tensors[op.y].padded == (1, 16, 1, 1)


@pytest.mark.parametrize("op", ["Softmax", "LogSoftmax"])
@pytest.mark.parametrize("axis", [0, 1, -1])
def test_softmax(op: str, axis: int) -> None:
    net = Net(x=(3, 5, 7))
    agrees(net.out(net(op, "x", axis=axis)))


@pytest.mark.parametrize("op", ["Softmax", "LogSoftmax"])
def test_the_old_softmax_flattens(op: str) -> None:
    net = Net(opset=11, x=(3, 5, 7))
    agrees(net.out(net(op, "x", axis=1)))


def test_batch_normalization() -> None:
    net = Net(x=(2, 5, 4, 3))
    args = [net.normal(5), net.normal(5), net.normal(5), net.positive(5)]
    agrees(net.out(net("BatchNormalization", "x", *args, epsilon=0.01)))


@pytest.mark.parametrize("shape", [(2, 6, 9, 7), (2, 6, 19)])
@pytest.mark.parametrize("groups", [0, 1, 2, 6])
def test_norms_over_space(shape: tuple[int, ...], groups: int) -> None:
    net = Net(x=shape)
    if groups:
        y = net("GroupNormalization", "x", net.normal(6), net.normal(6), num_groups=groups, epsilon=1e-3)
    else:
        y = net("InstanceNormalization", "x", net.normal(6), net.normal(6), epsilon=1e-3)
    model = net.out(y).model()
    model.graph.output[0].CopyFrom(helper.make_tensor_value_info(y, TensorProto.FLOAT, shape))  # a function: not inferred
    program = agrees(model)
    (op,) = (op for op in program.ops if isinstance(op, Norm))
    assert program.tensors[op.x].inner == 1


@pytest.mark.parametrize("axis", [-1, 1])
def test_rms_normalization(axis: int) -> None:
    net = Net(x=(3, 4, 10))
    size = (4, 10)[axis - 1 if axis > 0 else axis :]
    agrees(net.out(net("RMSNormalization", "x", net.normal(*size), axis=axis, epsilon=0.01)))


@pytest.mark.parametrize("axis", [-1, 1, -2])
def test_layer_normalization_with_its_statistics(axis: int) -> None:
    net = Net(x=(3, 4, 9))
    size = (3, 4, 9)[axis:]
    y, mean, inverse = net("LayerNormalization", "x", net.normal(*size), net.normal(*size), outputs=3, axis=axis)
    agrees(net.out(y, mean, inverse))


@pytest.mark.parametrize("size", [1, 3, 5, 23])
def test_local_response_normalization(size: int) -> None:
    net = Net(x=(2, 7, 4, 3))
    agrees(net.out(net("LRN", "x", size=size, alpha=0.1, beta=0.6, bias=1.5)))


@pytest.mark.parametrize("axes", [(0, 2, 3), (0, 1), (-1,)])
def test_mean_variance_of_values_far_from_zero(axes: tuple[int, ...]) -> None:
    """By differences from the mean."""
    net = Net(x=(2, 3, 5, 7))
    x = np.random.default_rng(0).standard_normal((2, 3, 5, 7)).astype(np.float32) + 1000
    agrees(net.out(net("MeanVarianceNormalization", "x", axes=axes)), {"x": x}, 1e-3)
