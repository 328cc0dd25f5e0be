"""Models as other exporters, tools and opsets write them: through every stage but machine code, beside ONNX Runtime."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from tccompile.ir.program import Program
from tccompile.runtime.session import Session
from tests.networks import feeds, reference, relative_error, skeleton
from tests.plans import without_code
from tests.rewrites.common import Net
from tests.tiers import usually

FLOAT = TensorProto.FLOAT


def agrees(model: onnx.ModelProto, shapes: Mapping[str, tuple[int, ...]] | None = None, fp16: float = 3e-3) -> Program:
    """Hold the CPU engine to ONNX Runtime in both precisions, or in fp16 alone if the inputs are; gives the fused program."""
    given = feeds(model, 1, shapes)
    expected = reference(model, given)
    half = any(value.dtype == np.float16 for value in given.values())
    for precision, bound in (("fp32", 1e-5), ("fp16", fp16))[half:]:
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


def test_keys_and_values_of_no_step_yet():
    """An LLM's decoder with a cache, at its first step: the cache is an input without elements."""
    net = Net(opset=17, x=("b", "new", 16), past=("b", "old", 16))
    q, k = net("MatMul", "x", net.normal(16, 16, scale=0.25)), net("MatMul", "x", net.normal(16, 16, scale=0.25))
    present = net("Concat", "past", k, axis=1)
    weights = net("Softmax", net("MatMul", q, net("Transpose", present, perm=[0, 2, 1])), axis=-1)
    model = net.out(net("MatMul", weights, present), present).model()
    agrees(model, {"x": (1, 5, 16), "past": (1, 0, 16)})


def test_an_enlargement_whose_weights_a_style_scales():
    """A layer of StyleGAN2, by torch: modulated and demodulated weights, a group for each image, then a blur."""
    n = Net(opset=17, x=(2, 6, 5, 4), style=(2, 8))
    scale = n("Reshape", n("Add", n("MatMul", "style", n.normal(8, 6, scale=0.3)), np.float32(1)), np.array([2, 1, 6, 1, 1]))
    w = n("Mul", n.normal(1, 7, 6, 3, 3), scale)
    norm = n("ReduceSum", n("Mul", w, w), np.array([2, 3, 4]))
    w = n("Div", w, n("Sqrt", n("Reshape", n("Add", norm, np.float32(1e-8)), np.array([2, 7, 1, 1, 1]))))
    w = n("Reshape", n("Transpose", w, perm=[0, 2, 1, 3, 4]), np.array([12, 7, 3, 3]))
    y = n("ConvTranspose", n("Reshape", "x", np.array([1, 12, 5, 4])), w, strides=[2, 2], group=2)
    y = n("Reshape", y, np.array([14, 1, 11, 9]))
    blur = np.outer([1, 3, 3, 1], [1, 3, 3, 1]).astype(np.float32)[None, None] / 16
    y = n("Reshape", n("Conv", y, blur, pads=[1, 1, 1, 1]), np.array([2, 7, 10, 8]))
    agrees(n.out(n("LeakyRelu", y, alpha=0.2)).model())


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
    # input, the gate, a slice, the enlargement, and the second output
    assert ops(program) == {"Pointwise": 5, "Conv": 5, "Mlp": 1, "Reduce": 2, "Gemm": 1, "Softmax": 1, "Pool": 1}


# --- Caffe2 and MXNet: opsets 7 and 8, weights among the inputs, nodes without names ------------------------------------


def test_a_network_of_opset_7():
    n = Net(opset=7, x=(1, 3, 32, 32))
    y = n("Pad", "x", mode="constant", pads=[0, 0, 3, 3, 0, 0, 3, 3], value=0.0)
    y = n("Conv", y, n.normal(16, 3, 7, 7, scale=0.1), strides=[2, 2], kernel_shape=[7, 7])
    y = n("BatchNormalization", y, n.positive(16), n.normal(16), n.normal(16), n.positive(16), spatial=1, momentum=0.9)
    y = n("LeakyRelu", y, alpha=0.1)
    y = n("LRN", n("MaxPool", y, kernel_shape=[3, 3], strides=[2, 2], pads=[0, 0, 1, 1]), size=5, alpha=1e-4, beta=0.75)
    a = n("PRelu", n("Conv", y, n.normal(8, 8, 3, 3, scale=0.2), pads=[1, 1, 1, 1], group=2), n.positive(8, 1, 1))
    b = n("Clip", n("Conv", y, n.normal(12, 16, 1, 1, scale=0.3), n.normal(12)), min=0.0, max=6.0)
    y = n("Upsample", n("Concat", a, b, axis=1), mode="nearest", scales=[1.0, 1.0, 2.0, 2.0])
    y = n("Slice", y, axes=[2, 3], starts=[1, 0], ends=[-1, 9223372036854775807])
    y = n("Dropout", n("AveragePool", y, kernel_shape=[2, 2], strides=[2, 2], auto_pad="SAME_LOWER"), ratio=0.5)
    y = n("Sum", y, n("Mul", y, n("Sigmoid", n("GlobalAveragePool", y))), y)
    y = n("Reshape", n("GlobalMaxPool", y), np.array([0, -1]))
    y = n("Gemm", y, n.normal(10, 20), n.normal(10), transB=1)
    model = n.out(n("Softmax", y)).model()
    for node in model.graph.node:
        node.name = ""
    listed = [helper.make_tensor_value_info(t.name, t.data_type, t.dims) for t in model.graph.initializer]
    model.graph.input.extend(listed)
    model.ir_version = 3
    agrees(model)


# --- Local functions ----------------------------------------------------------------------------------------------------


def test_layers_as_functions_of_their_own():
    """As torch.export and onnxscript write modules: functions that call functions, with attributes handed down."""
    swish = helper.make_function(
        "pkg", "Swish", ["x"], ["y"],
        [helper.make_node("Sigmoid", ["x"], ["s"]), helper.make_node("Mul", ["x", "s"], ["y"])], [helper.make_opsetid("", 18)],
    )  # fmt: skip
    conv = helper.make_node("Conv", ["x", "w"], ["c"])
    conv.attribute.append(onnx.AttributeProto(name="strides", type=onnx.AttributeProto.INTS, ref_attr_name="strides"))
    layer = helper.make_function(
        "pkg", "Layer", ["x", "w"], ["y"], [conv, helper.make_node("Swish", ["c"], ["y"], domain="pkg")],
        [helper.make_opsetid("", 18), helper.make_opsetid("pkg", 1)], ["strides"],
    )  # fmt: skip
    rng = np.random.default_rng(0)
    weights = {"w1": rng.standard_normal((16, 3, 3, 3)) * 0.3, "w2": rng.standard_normal((8, 16, 1, 1)) * 0.3}
    nodes = [
        helper.make_node("Layer", ["x", "w1"], ["a"], "first", domain="pkg", strides=[2, 2]),
        helper.make_node("Layer", ["a", "w2"], ["y"], "second", domain="pkg", strides=[1, 1]),
    ]
    graph = helper.make_graph(
        nodes, "g",
        [helper.make_tensor_value_info("x", FLOAT, ("N", 3, 17, 17))], [helper.make_tensor_value_info("y", FLOAT, None)],
        [numpy_helper.from_array(w.astype(np.float32), name) for name, w in weights.items()],
    )  # fmt: skip
    opsets = [helper.make_opsetid("", 18), helper.make_opsetid("pkg", 1)]
    program = agrees(
        helper.make_model(graph, opset_imports=opsets, functions=[swish, layer], ir_version=8), {"x": (2, 3, 17, 17)}
    )
    assert ops(program)["Conv"] == 2


def test_a_function_has_defaults_for_attributes():
    """Of calls that leave them out: in the graph, and in another function."""
    inner = helper.make_node("LeakyRelu", ["x"], ["y"])
    inner.attribute.append(onnx.AttributeProto(name="alpha", type=onnx.AttributeProto.FLOAT, ref_attr_name="slope"))
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("pkg", 1)]
    slope = [helper.make_attribute("slope", 0.3)]
    leaky = helper.make_function("pkg", "Leaky", ["x"], ["y"], [inner], opsets[:1], [], slope)
    calls = [
        helper.make_node("Leaky", ["x"], ["a"], domain="pkg"),
        helper.make_node("Leaky", ["a"], ["y"], domain="pkg", slope=0.5),
    ]
    twice = helper.make_function("pkg", "Twice", ["x"], ["y"], calls, opsets)
    nodes = [helper.make_node("Twice", ["x"], ["a"], domain="pkg"), helper.make_node("Leaky", ["a"], ["y"], domain="pkg")]
    ends = [helper.make_tensor_value_info(name, FLOAT, (3, 4)) for name in "xy"]
    graph = helper.make_graph(nodes, "g", ends[:1], ends[1:])
    agrees(helper.make_model(graph, opset_imports=opsets, functions=[leaky, twice], ir_version=10), {"x": (3, 4)})


# --- Indexing as PyTorch writes it --------------------------------------------------------------------------------------


@pytest.mark.parametrize("axis", [1, 3])
@pytest.mark.parametrize("indices", [[2, 0, 1], [0, 1, 2, 5, 4, 3, 0], [-1, 0, 0, 4], [[5, 2], [3, 1]]], ids=str)
def test_constant_indices_at_unequal_distances(axis, indices):
    net = Net(opset=13, x=(2, 6, 5, 6))
    y = net("Gather", net("Conv", "x", net.normal(6, 6, 1, 1)), np.array(indices), axis=axis)
    agrees(net.out(net("Relu", y)).model())


@pytest.mark.parametrize("box", [np.s_[:, :, :, 0:2], np.s_[:, 1:3, ::2], np.s_[1], np.s_[:, :, 4, 2:5:2]], ids=str)
def test_an_assignment_to_a_slice(box):
    """What x[box] = f(x[box]) becomes, as in detection heads that were written in place."""
    shape = (2, 3, 5, 6)
    places = np.stack(np.meshgrid(*map(np.arange, shape), indexing="ij"), -1)[box]
    net = Net(opset=16, x=shape)
    y = net("Sigmoid", net("Conv", "x", net.normal(3, 3, 1, 1)))
    update = net("Mul", net.normal(*places.shape[:-1]), np.float32(2))
    y = net("ScatterND", y, places, update)
    agrees(net.out(net("Add", y, np.float32(1))).model())


# --- SegNet: pooling that remembers where its maxima were ---------------------------------------------------------------


@pytest.mark.parametrize("shape", [(2, 12, 8, 6), (1, 3, 9, 7), (2, 5, 10)])
def test_maxima_go_back_to_where_they_came_from(shape):
    """After Relu many windows hold several zeros: the first of them counts."""
    net, k, c = Net(opset=13, x=shape), [2] * (len(shape) - 2), shape[1]
    y = net("Relu", net("Conv", "x", net.normal(c, c, *[1] * len(k))))
    top, places = net("MaxPool", y, kernel_shape=k, strides=k, outputs=2)
    top = net("Conv", top, net.normal(c, c, *[1] * len(k)), net.normal(c))
    size = () if not any(n % 2 for n in shape[2:]) else (np.array(shape),)
    agrees(net.out(net("MaxUnpool", top, places, *size, kernel_shape=k, strides=k)).model())


def test_places_of_maxima_of_windows_that_overlap():
    net = Net(opset=13, x=(2, 3, 9, 8))
    y = net("Floor", net("Mul", "x", np.float32(2)))
    top, places = net("MaxPool", y, kernel_shape=[3, 3], strides=[2, 2], pads=[1, 1, 1, 1], outputs=2)
    agrees(net.out(net("Cast", places, to=FLOAT), top).model())


# --- Networks as exporters write them ----------------------------------------------------------------------------------

NETWORKS: dict[str, tuple[dict[str, tuple[int, ...]], int]] = {
    "resnet50_gn_torch_export": ({}, 1),
    "edgenext_opset17": ({"input": (2, 3, 64, 64)}, 25),
    "ghostnet_opset9": ({"input": (2, 3, 64, 64)}, 30),
    "yolov8_sequences": ({"x": (2, 3, 96, 128)}, 26),
    "deeplabv3_fp16": ({}, 2),
    "resnetblur18": ({}, 5),
    "cyclegan_opset11": ({"input": (1, 3, 40, 56)}, 8),
    "unet_bicubic_opset11": ({"input": (2, 3, 64, 64)}, 1),
    "fsrcnn_opset23": ({"x": (2, 1, 20, 28)}, 1),
    "hifigan": ({"input": (2, 20, 32)}, 5),
    "ssd_head": ({"input": (2, 3, 64, 64)}, 7),
    "blazeface": ({}, 7),
    "retinanet_head": ({}, 13),
    "erfnet_opset9": ({}, 3),
}
"""Each with the shapes that it leaves open, and at most so many steps that only move data or compute elementwise."""


@pytest.mark.parametrize("name", usually(NETWORKS, "fsrcnn_opset23", "ssd_head", "hifigan", "blazeface"))
def test_network(name):
    shapes, copies = NETWORKS[name]
    program = agrees(skeleton(f"more/{name}"), shapes, fp16=5e-3)
    assert ops(program)["Pointwise"] <= copies
