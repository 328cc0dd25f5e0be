"""Models as other exporters, tools and opsets write them: through every stage but machine code, beside ONNX Runtime."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

import numpy as np
import onnx
import pytest
from onnx import TensorProto

from tccompile.program import Program
from tccompile.runtime.session import Session
from tests.networks import feeds, reference, relative_error
from tests.plans import without_code
from tests.rewrites.common import Net

FLOAT = TensorProto.FLOAT


def agrees(model: onnx.ModelProto, shapes: Mapping[str, tuple[int, ...]] | None = None, fp16: float = 3e-3) -> Program:
    """Hold the CPU engine to ONNX Runtime in both precisions; the fused program, for a look at how it is done."""
    given = feeds(model, 1, shapes)
    expected = reference(model, given)
    for precision, bound in (("fp32", 1e-5), ("fp16", fp16)):
        plan = without_code(model, ("sm_80",), shapes, precision)
        with Session(plan, device="cpu") as session:
            got = session.run(list(expected), given)
        for out, (name, ref) in zip(got, expected.items(), strict=True):
            assert out.dtype == ref.dtype, name
            error = relative_error(out, ref)
            assert error <= bound, f"{name} in {precision}: {error:.1e}"
    return plan.entries[0].program


def ops(program: Program) -> Counter:
    return Counter(type(op).__name__ for op in program.ops)


# --- Old opsets, and what models leave behind that were exported while they were being trained -------------------------


@pytest.mark.parametrize(("opset", "outputs"), [(9, 5), (13, 5), (14, 3)])
def test_a_batch_norm_in_training_mode_uses_the_statistics_of_its_input(opset, outputs):
    net = Net(opset=opset, x=(3, 6, 5, 4))
    args = net.normal(6), net.normal(6), net.normal(6), net.positive(6)
    attrs = {"training_mode": 1} if opset >= 14 else {}
    y, *_ = net("BatchNormalization", net("Conv", "x", net.normal(6, 6, 1, 1)), *args, outputs=outputs, **attrs)
    agrees(net.out(net("Relu", y)).model())


def test_an_upsampled_extent_is_rounded_as_the_exporter_expects():
    """9 * (129 / 9) is 129 in float32, and 128.999997 before rounding."""
    net = Net(opset=9, x=(1, 8, 9, 9))
    scales = np.array([1, 1, 129, 129], np.float32) / np.array([1, 1, 9, 9], np.float32)
    program = agrees(net.out(net("Upsample", net("Conv", "x", net.normal(8, 8, 1, 1)), scales, mode="linear")).model())
    assert program.tensors[program.outputs[0]].shape == (1, 8, 129, 129)


# --- Sequences --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [np.int64(5), np.array([3, 7, 6]), None], ids=["size", "sizes", "ones"])
def test_a_split_into_a_sequence_is_a_split(size):
    net = Net(opset=18, x=(2, 16, 4, 4))
    conv = net("Conv", "x", net.normal(16, 16, 1, 1))
    parts = net("SplitToSequence", conv, *(() if size is None else (size,)), axis=1)
    first, last = net("SequenceAt", parts, np.int64(0)), net("SequenceAt", parts, np.int64(-1))
    agrees(net.out(net("Concat", net("Relu", last), first, axis=1)).model())


@pytest.mark.parametrize("new_axis", [0, 1])
def test_a_sequence_that_is_put_together_is_a_concatenation(new_axis):
    net = Net(opset=17, x=(2, 8, 4, 4))
    y = net("Relu", "x")
    parts = net("SequenceInsert", net("SequenceConstruct", "x", y), net("Sigmoid", "x"), np.int64(1))
    parts = net("SequenceInsert", parts, y)
    count = net("Cast", net("SequenceLength", parts), to=FLOAT)
    agrees(net.out(net("Mul", net("ConcatFromSequence", parts, axis=1, new_axis=new_axis), count)).model())


@pytest.mark.parametrize("op", ["ArgMax", "ArgMin"])
@pytest.mark.parametrize("attrs", [{"axis": 1}, {"axis": -1, "keepdims": 0}, {"axis": 1, "keepdims": 0, "select_last_index": 1}])
def test_the_place_of_the_largest(op, attrs):
    """Classes of a segmentation: ties, of which a rounded network has many, go to the first, or to the last."""
    net = Net(opset=13, x=(2, 3, 5, 6))
    grid = net("Floor", "x")
    classes = net("Conv", grid, np.round(net.normal(11, 3, 1, 1)))
    agrees(net.out(net(op, classes, **attrs), net("Cast", classes, to=FLOAT)).model())


# --- Keras by way of TensorFlow: channels last, a transposition around every convolution --------------------------------


class Keras(Net):
    """Nodes as tf2onnx writes them before its optimizer."""

    def conv(self, x: str, o: int, c: int, k: int = 3, s: int = 1, depthwise: bool = False, **attrs) -> str:
        """Conv2D or DepthwiseConv2dNative of x (N, H, W, C) with weights in TensorFlow's order, padding SAME."""
        w = self.normal(k, k, c, 1 if depthwise else o, scale=1 / np.sqrt(k * k * (1 if depthwise else c)))
        w = self("Transpose", w, perm=[2, 3, 0, 1] if depthwise else [3, 2, 0, 1])
        moved = self("Transpose", x, perm=[0, 3, 1, 2])
        y = self("Conv", moved, w, strides=[s, s], auto_pad="SAME_UPPER", group=c if depthwise else 1, **attrs)
        return self("Transpose", y, perm=[0, 2, 3, 1])

    def batch_norm(self, x: str, c: int) -> str:
        return self("Add", self("Mul", x, self.positive(c)), self.normal(c))

    def relu6(self, x: str) -> str:
        return self("Min", self("Max", x, np.float32(0)), np.float32(6))

    def hard_swish(self, x: str) -> str:
        return self("Mul", x, self("Mul", self.relu6(self("Add", x, np.float32(3))), np.float32(1 / 6)))

    def squeeze_and_excite(self, x: str, c: int) -> str:
        mean = self("ReduceMean", x, axes=[1, 2], keepdims=0)
        column = self("Reshape", mean, np.array([-1, 1, 1, c]))
        gate = self("Relu", self("Add", self.conv(column, 8, c, 1), self.normal(8)))
        gate = self.relu6(self("Add", self("Add", self.conv(gate, c, 8, 1), self.normal(c)), np.float32(3)))
        return self("Mul", x, self("Mul", gate, np.float32(1 / 6)))


def test_a_keras_network():
    n = Keras(opset=13, x=("unk__6", 33, 33, 3))
    y = n("Sub", n("Mul", "x", np.float32(1 / 127.5)), np.float32(1))
    y = n.hard_swish(n.batch_norm(n.conv(y, 16, 3, s=2), 16))
    short = y
    y = n.relu6(n.batch_norm(n.conv(y, 16, 16, k=5, depthwise=True), 16))
    y = n.squeeze_and_excite(y, 16)
    y = n("Add", n.batch_norm(n.conv(y, 16, 16, k=1), 16), short)
    padded = n("Pad", y, np.array([0, 0, 0, 0, 0, 1, 1, 0]))
    w = n("Transpose", n.normal(3, 3, 16, 24, scale=0.1), perm=[3, 2, 0, 1])
    down = n("Conv", n("Transpose", padded, perm=[0, 3, 1, 2]), w, strides=[2, 2], auto_pad="VALID")
    down = n("Relu", n.batch_norm(n("Transpose", down, perm=[0, 2, 3, 1]), 24))
    pool = n("MaxPool", n("Transpose", y, perm=[0, 3, 1, 2]), kernel_shape=[3, 3], strides=[2, 2], auto_pad="SAME_UPPER")
    pool = n("Slice", n("Transpose", pool, perm=[0, 2, 3, 1]), np.array([0, 0]), np.array([8, 8]), np.array([1, 2]))
    both = n("Concat", down, pool, axis=3)
    up = n("Resize", n("Transpose", both, perm=[0, 3, 1, 2]), None, np.array([1, 1, 2, 2], np.float32), mode="nearest",
           coordinate_transformation_mode="asymmetric", nearest_mode="floor")  # fmt: skip
    y = n("Relu", n("Add", n.conv(n("Transpose", up, perm=[0, 2, 3, 1]), 20, 40, k=1), n.normal(20)))
    shape = n("Shape", y)
    batch = n("Slice", shape, np.array([0]), np.array([1]), np.array([0]))
    flat = n("Reshape", n("ReduceMean", y, axes=[1, 2]), n("Concat", batch, np.array([-1]), axis=0))
    logits = n("Add", n("MatMul", flat, n.normal(20, 10)), n.normal(10))
    program = agrees(n.out(n("Softmax", logits, axis=-1), up).model(), {"x": (2, 33, 33, 3)})
    # input, the first filter spread out, the gate, a slice, the enlargement, and the second output
    assert ops(program) == {"Pointwise": 6, "Conv": 7, "Reduce": 2, "Gemm": 1, "Softmax": 1, "Pool": 1}
