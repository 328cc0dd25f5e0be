"""Models that are not valid, or only node by node: an error that names the place, in little time and memory."""

from __future__ import annotations

import random
import time
import warnings
from collections.abc import Callable

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from tccompile.dump import Dump
from tccompile.errors import LaunchError, ModelError, TccompileError, UnsupportedError, blamed_on
from tccompile.load.model import load
from tccompile.options import Options
from tccompile.pipeline import to_program
from tests.plans import without_code
from tests.rewrites.common import Net

HUGE = 2**60

i, f = np.array, np.float32
Case = tuple[int, tuple[int, ...], Callable[[Net], str]]

BROKEN: dict[str, Case] = {
    # name: opset, shape of x, nodes
    "an axis that is none": (17, (2, 3, 4), lambda n: n("Softmax", "x", axis=2**63 - 1)),
    "an axis on which ONNX aborts": (17, (2, 3, 4), lambda n: n("LayerNormalization", "x", n.normal(4), axis=2**31)),
    "fewer parts than outputs": (18, (2, 9), lambda n: n("Split", "x", outputs=4, axis=1, num_outputs=2)[0]),
    "parts along no axis": (17, (2, 8), lambda n: n("Split", "x", i([4, 4]), outputs=2, axis=HUGE)[0]),
    "running sums along no axis": (17, (2, 8), lambda n: n("CumSum", "x", i(2))),
    "a direction that is none": (
        17, (5, 1, 8), lambda n: n("LSTM", "x", n.normal(1, 16, 8), n.normal(1, 16, 4), hidden_size=4, direction="up")),
    "a mode that is none": (17, (1, 2, 4, 4), lambda n: n("Resize", "x", None, f([1, 1, 2, 2]), nearest_mode="x")),
    "groups that do not divide": (
        21, (1, 4, 5), lambda n: n("GroupNormalization", "x", n.normal(4), n.normal(4), num_groups=2**31)),
    "a scale for fewer channels": (17, (3, 4, 8), lambda n: n("LayerNormalization", "x", n.normal(5))),
    "heads without elements": (23, (1, 4, 8), lambda n: n("Attention", "x", "x", "x", q_num_heads=10**6, kv_num_heads=10**6)),
    "an input that is missing": (17, (1, 64, 1), lambda n: n("STFT", "x", i(16))),
    "a constant without a value": (17, (2, 2), lambda n: n("Add", "x", n("Constant"))),
    "a huge window": (17, (1, 1, 8, 8), lambda n: n("AveragePool", "x", kernel_shape=[2, HUGE], auto_pad="SAME_UPPER")),
    "a huge border": (17, (2, 2), lambda n: n("Pad", "x", i([0, HUGE, 0, 0]))),
    "a shape that overflows": (17, (2, 2), lambda n: n("Expand", "x", i([2**40, 2**40, 2, 2]))),
    "a shape of too many elements": (17, (2, 2), lambda n: n("Reshape", "x", i([2**32, 2**32]))),
    "repeated too often": (17, (2, 2), lambda n: n("Tile", "x", i([HUGE, 4]))),
    "a range without an end": (17, (2, 2), lambda n: n("Add", "x", n("Range", i(0), i(2**62), i(1)))),
    "a constant of a huge shape": (17, (2, 2), lambda n: n("Add", "x", n("ConstantOfShape", i([2**33, 2])))),
    "a scale of infinity": (17, (1, 1, 4, 4), lambda n: n("Resize", "x", None, f([1, 1, np.inf, 1e30]))),
}  # fmt: skip


def as_it_is(net: Net, y: str) -> onnx.ModelProto:
    """The model without ONNX's shape inference, which aborts on some."""
    end = [helper.make_tensor_value_info(y, TensorProto.FLOAT, None)]
    graph = helper.make_graph(net.nodes, "net", net.inputs, end, net.weights)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", net.opset)], ir_version=10)


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_model_is_refused(case):
    opset, shape, build = BROKEN[case]
    net = Net(opset=opset, x=shape)
    with pytest.raises((ModelError, UnsupportedError)) as error:
        to_program(as_it_is(net, build(net)), {}, Options(precision="fp16"), Dump(None))
    assert len(str(error.value)) > 20


NAMED: dict[str, tuple[Case, str]] = {
    "a huge matrix of ones": (
        (17, (2**15, 2**15), lambda n: n("Add", "x", n("EyeLike", "x"))), "would be a constant of more than 67108864 bytes"),
    "countless parts": (
        (17, (2**15,), lambda n: n("SequenceAt", n("SplitToSequence", "x", i(1)), i(0))), "makes 32768 tensors"),
    "countless points in a cell": (
        (16, (1, 1, 9, 9), lambda n: n("RoiAlign", "x", n.positive(3, 4), i([0, 0, 0]), sampling_ratio=2**32)),
        "sampling_ratio is 4294967296"),
    "taps far apart": (
        (17, (1, 70, 5), lambda n: n("ConvTranspose", "x", n.normal(70, 1, 2), dilations=[2**20], strides=[3], group=70)),
        r"'dilations': \[1048576\]\} its taps are so far apart"),
    "a stride beyond all": (
        (17, (1, 1, 1), lambda n: n("ConvTranspose", "x", n.normal(1, 1, 2), strides=[2**30])), "its taps are so far apart"),
    "countless neighbours": (
        (17, (1, 10**5, 1, 1), lambda n: n("LRN", "x", size=2**40)), "its size is 1099511627776, for 100000 channels"),
    "a huge image": (
        (17, (1, 1, 8, 8), lambda n: n("Resize", "x", None, f([1, 1, 2**26, 1]))), "it makes 536870912 elements along axis 2"),
    "countless taps": (
        (18, (1, 1, 2**24, 8), lambda n: n("Resize", "x", None, None, i([1, 1, 2, 8]), mode="linear", antialias=1)),
        "it makes 2 elements along axis 2 of 16777216 each"),
    "updates of fewer axes than indices": (
        (18, (1, 5), lambda n: n("ScatterElements", "x", n("Cast", "x", to=7), n("ReduceSum", "x", i([1]), keepdims=0), axis=1)),
        "Scatter"),
}  # fmt: skip


@pytest.mark.parametrize("case", NAMED)
def test_what_is_too_much_or_too_little_is_named(case):
    (opset, shape, build), says = NAMED[case]
    net = Net(opset=opset, x=shape)
    with pytest.raises((ModelError, UnsupportedError), match=says):
        to_program(as_it_is(net, build(net)), {}, Options(precision="fp16"), Dump(None))


CROP = {"coordinate_transformation_mode": "tf_crop_and_resize"}

INVALID: dict[str, tuple[Case, str]] = {
    # what the standard does not allow, and what says so
    "keepdims": ((17, (2, 3), lambda n: n("ReduceMax", "x", keepdims=2)), "its keepdims is 2; it must be 0 or 1"),
    "sorted": ((17, (2, 9), lambda n: n("TopK", "x", i([3]), sorted=2, outputs=2)[0]), "its sorted is 2"),
    "an interpolation": (
        (17, (1, 2, 4, 4), lambda n: n("Resize", "x", None, f([1, 1, 2, 2]), mode="spline")),
        "its mode is 'spline'; it must be 'nearest', 'linear' or 'cubic'"),
    "coordinates": (
        (17, (1, 2, 4, 4), lambda n: n("Resize", "x", None, f([1, 1, 2, 2]), coordinate_transformation_mode="y")),
        "its coordinate_transformation_mode is 'y'"),
    "auto_pad": ((17, (1, 2, 4, 4), lambda n: n("MaxPool", "x", kernel_shape=[2, 2], auto_pad="SAME")), "its auto_pad is 'SAME'"),
    "approximate": ((20, (2, 3), lambda n: n("Gelu", "x", approximate="erf")), "its approximate is 'erf'"),
    "a shift": (
        (17, (3,), lambda n: n("BitShift", n("Cast", "x", to=TensorProto.UINT8), np.uint8([1]), direction="UP")),
        "its direction is 'UP'"),
    "places": ((17, (1, 4, 2, 2), lambda n: n("DepthToSpace", "x", blocksize=2, mode="RCD")), "its mode is 'RCD'"),
    "what is done with updates": (
        (18, (4, 2), lambda n: n("ScatterND", "x", i([[1]]), n.normal(1, 2), reduction="div")), "its reduction is 'div'"),
    "a border": ((17, (2, 3), lambda n: n("Pad", "x", i([0, 1, 0, 1]), mode="mirror")), "its mode is 'mirror'"),
    "a norm": ((17, (2, 3), lambda n: n("LpNormalization", "x", p=3)), "its p is 3; it must be 1 or 2"),
    "neighbours": ((17, (1, 4, 3, 3), lambda n: n("LRN", "x", size=-3)), "its size is -3; it must be at least 1"),
    "no steps": (
        (17, (1, 1, 4), lambda n: n("ConvTranspose", "x", n.normal(1, 1, 2), output_shape=[0])), r"its output_shape are \[0\]"),
    "an element type": (
        (17, (2, 2), lambda n: n("Add", "x", n("EyeLike", "x", dtype=99))),
        "its dtype is 99, which is no element type"),
    "both": (
        (17, (1, 2, 4, 4), lambda n: n("Resize", "x", None, f([1, 1, 2, 2]), i([1, 2, 8, 8]))), "Either `sizes` or `scales`"),
    "neither": ((17, (1, 2, 4, 4), lambda n: n("Resize", "x", None, f([]))), "Either `sizes` or `scales`"),
    "fewer scales": ((17, (1, 2, 4, 4), lambda n: n("Resize", "x", None, f([2, 2]))), "must be same as rank"),
    "a negative scale": (
        (17, (1, 2, 4, 4), lambda n: n("Resize", "x", None, f([1, 1, -2, 2]))),
        r"its scales are \[1.0, 1.0, -2.0, 2.0\]"),
    "no region": (
        (17, (1, 1, 4, 4), lambda n: n("Resize", "x", f([0, 1]), f([1, 1, 2, 2]), **CROP)),
        "its roi is 2 for 4 axes"),
    "axes twice": ((17, (2, 3, 4), lambda n: n("Transpose", "x", perm=[0, 2, 2])), r"perm"),
    "axes of another rank": ((17, (2, 3, 4, 5), lambda n: n("Transpose", "x", perm=[0, 2, 1])), r"perm"),
    "other elements": ((17, (2, 3), lambda n: n("Reshape", "x", i([7, 2]))), "it makes 7×2 of 2×3"),
    "an axis beyond": ((17, (2, 3), lambda n: n("Flatten", "x", axis=-(2**40))), "its axis is -1099511627776, for 2×3"),
    "types": ((17, (2, 3), lambda n: n("Add", "x", i([1, 2, 3]))), r"its B \(w0\) is int64, and another input is float"),
    "a type that is not taken": (
        (17, (2, 3), lambda n: n("And", "x", "x")),
        r"its A \(x\) is float, which the operator does not take"),
    "slopes": ((17, (3, 4, 1), lambda n: n("PRelu", "x", n.positive(5))), "5 does not broadcast to 3×4×1"),
    "scales of a norm": (
        (17, (2, 3, 4, 5), lambda n: n("LayerNormalization", "x", n.normal(10))),
        "10 does not broadcast to 2×3×4×5"),
    "biases of a norm": (
        (17, (2, 3, 4), lambda n: n("InstanceNormalization", "x", n.normal(3), n.normal(6))), "its bias is 6; it must be 3"),
    "a bias of a product": ((17, (2, 3), lambda n: n("Gemm", "x", n.normal(3, 4), n.normal(3, 4))), "its C is 3×4"),
    "a bias of filters": (
        (17, (1, 2, 5), lambda n: n("Conv", "x", n.normal(4, 2, 3), n.normal(3))),
        "its bias is 3; it must be 4"),
    "another kernel": (
        (17, (1, 2, 5, 5), lambda n: n("Conv", "x", n.normal(4, 2, 1, 3), kernel_shape=[3, 3])), r"its kernel_shape is \[3, 3\]"),
    "a bias of transposed filters": (
        (17, (1, 2, 5), lambda n: n("ConvTranspose", "x", n.normal(2, 3, 2), n.normal(7))), "its bias is 7; it must be 3"),
    "blocks": ((17, (1, 8, 3, 3), lambda n: n("DepthToSpace", "x", blocksize=3)), "its blocksize is 3, for 1×8×3×3"),
    "indices of a rank": (
        (17, (2, 3), lambda n: n("GatherElements", "x", i([0, 1]), axis=1)),
        "its indices are 2 into 2×3 along axis 1"),
    "rows of indices": (
        (17, (1, 2, 2), lambda n: n("GatherND", "x", i([[0], [1]]), batch_dims=1)),
        "its indices are 2×1 into 1×2×2, with batch_dims 1"),
    "updates": ((18, (4, 2), lambda n: n("ScatterND", "x", i([[1]]), n.normal(2, 2))), "its updates is 2×2; it must be 1×2"),
    "a long condition": (
        (17, (3, 2), lambda n: n("Compress", "x", np.array([False, True, False, True]), axis=1)),
        "its condition is 4, for 2 elements"),
    "sequences": (
        (17, (4, 3), lambda n: n("ReverseSequence", "x", i([1, 2, 3, 4]), batch_axis=1, time_axis=0)),
        "its sequence_lens is 4; it must be 3"),
    "the same axes": (
        (17, (4, 4), lambda n: n("ReverseSequence", "x", i([1, 2, 3, 4]), batch_axis=1, time_axis=1)),
        "its batch_axis is 1, and its time_axis 1"),
    "a bias of gates": (
        (17, (5, 1, 8), lambda n: n("RNN", "x", n.normal(1, 4, 8), n.normal(1, 4, 4), n.normal(1, 7), hidden_size=4)),
        "its B is 1×7; it must be 1×8"),
    "weights of a rank": (
        (17, (5, 1, 8), lambda n: n("GRU", "x", n.normal(12, 8), n.normal(1, 12, 4), hidden_size=4)),
        "its W is 12×8"),
    "keys": (
        (23, (1, 2, 4, 8), lambda n: n("Attention", "x", n.normal(1, 2, 4, 6), "x")),
        "Q, K and V, of 1×2×4×8, 1×2×4×6 and 1×2×4×8"),
    "a scale of nothing": ((23, (1, 2, 4, 8), lambda n: n("Attention", "x", "x", "x", scale=np.nan)), "its scale is nan"),
    "bounds": ((17, (2, 3), lambda n: n("Clip", "x", f([0, 0, 0]))), "its min is 3; it must be one number"),
    "scales of columns": (
        (17, (2, 3), lambda n: n("DequantizeLinear", n("QuantizeLinear", "x", f([1, 2]), np.uint8([0, 0]), axis=1), f(1))),
        "its scale is 2; along axis 1 of 2×3 it must be 3"),
    "a condition of two": (
        (17, (2, 2), lambda n: _branches(n, n("Cast", n("ReduceMax", "x", axes=[1], keepdims=0), to=TensorProto.BOOL))),
        r"its condition \(t1\) is bool of shape \(2,\); it must be one bool"),
    "the largest of nothing": (
        (17, (2, 0, 3), lambda n: n("ArgMax", "x", axis=1)), "it seeks among no elements, along axis 1 of 2×0×3"),
    "elements of nothing": (
        (17, (2, 0), lambda n: n("Gather", "x", i([0]), axis=1)), "it makes 2×1 of 2×0, which has no elements"),
    "a window that is wider than its input": (
        (17, (1, 1, 8, 8), lambda n: n("AveragePool", "x", kernel_shape=[64, 2])), "its output 't0' would be 1×1×-55×7"),
    "a grid of less than nothing": (
        (20, (1, 2, 3), lambda n: n("AffineGrid", "x", i([1, 1, -2, 2]))), "its output 't0' would be 1×-2×2×2"),
    "no sizes": ((17, (1, 1, 4, 4), lambda n: n("Resize", "x", None, None, i([1, 1, -2, 2]))), "they must not be negative"),
    "pixels of nothing": (
        (17, (1, 1, 0, 4), lambda n: n("Resize", "x", None, None, i([1, 1, 2, 2]))), "it makes 1×1×2×2 of 1×1×0×4"),
    "keys without values": (
        (23, (1, 1, 4, 8), lambda n: n("Attention", "x", "x", "x", None, "x")), "it has one of past_key and past_value"),
    "an equation of other signs": (
        (17, (2, 3), lambda n: n("Einsum", "x", equation="i.j")), r"its equation is 'i\.j'; it must be letters and \.\.\."),
    "weights behind an output left out": (
        (17, (3, 1, 2), lambda n: _second(n, n("LSTM", "x", n.normal(12, 2), n.normal(1, 12, 3), outputs=2, hidden_size=3))),
        "its W is 12×2; it must be 1×12×2"),
    "an input left out": (
        (17, (2, 3), lambda n: n("Concat", "x", None, axis=0)), "its inputs is left out; the operator cannot do without"),
    "complex numbers of three": (
        (17, (1, 8, 3), lambda n: n("DFT", "x")), "its input is 1×8×3; its last axis must be of 1 or 2 elements"),
    "values of a constant": (
        (17, (2, 2), lambda n: n("Add", "x", n("Constant", value_int=1, value_float=1.0))),
        "it has 2 values"),
}  # fmt: skip


def _second(n: Net, outputs: list[str]) -> str:
    n.nodes[-1].output[0] = ""
    return outputs[1]


CLAIMED: dict[str, tuple[Case, tuple[int, ...], str]] = {
    # nodes whose outputs ONNX's rules say nothing about, what the model says of them, and what is said of that
    "values of one axis less": (
        (23, (1, 1, 4, 8), lambda n: n("Attention", "x", "x", n.normal(1, 4, 8))), (1, 1, 4, 8), "they must have 3 or 4 axes"),
    "no equation": ((17, (2, 3), lambda n: n("Einsum", "x", "x", equation="")), (2, 3), "its equation, '', is about 1 inputs"),
    "a size of many axes": (
        (20, (1, 2, 3), lambda n: n("AffineGrid", "x", np.ones(2**20, np.int64))), (1, 1, 1, 2),
        "its size is 1048576; it must be 4"),
    "scales of other axes": (
        (19, (1, 1, 4, 4), lambda n: n("Resize", "x", None, f([[[2]]]))), (1, 1, 8, 8), "its scales are 1×1×1 for 4 axes"),
    "one end of two": (
        (17, (2, 1), lambda n: n("Slice", "x", i([0, 1]), n("Cast", "x", to=TensorProto.INT64))),
        (2, 1), "its ends is 2×1; it must be 2"),
}  # fmt: skip


@pytest.mark.parametrize("case", CLAIMED)
def test_what_a_model_claims_is_held_to_the_standard(case):
    (opset, shape, build), claimed, says = CLAIMED[case]
    net = Net(opset=opset, x=shape)
    model = as_it_is(net, build(net))
    model.graph.output[0].CopyFrom(helper.make_tensor_value_info(model.graph.output[0].name, TensorProto.FLOAT, claimed))
    with pytest.raises(ModelError, match=f"is not valid: .*{says}"):
        load(model)


def _branches(n: Net, condition: str) -> str:
    y = helper.make_tensor_value_info("inner", TensorProto.FLOAT, None)
    one, other = (helper.make_graph([helper.make_node(op, ["x"], ["inner"])], op, [], [y]) for op in ("Relu", "Neg"))
    return n("If", condition, then_branch=one, else_branch=other)


@pytest.mark.parametrize("case", INVALID)
def test_what_the_standard_does_not_allow_is_named(case):
    (opset, shape, build), says = INVALID[case]
    net = Net(opset=opset, x=shape)
    with pytest.raises(ModelError, match=f"is not valid: .*{says}"):
        to_program(as_it_is(net, build(net)), {}, Options(precision="fp16"), Dump(None))


def test_a_contradiction_is_blamed_on_a_node():
    with (
        pytest.raises(ModelError, match=r"node 'a' contradicts itself or what it reads \(KeyError: 'up'\)"),
        blamed_on("node 'a'"),
    ):
        {}["up"]


def test_a_mask_that_nobody_could_store_is_refused():
    node = helper.make_node("Dropout", ["x"], ["y", "z"], name="n")
    model = _model([node], (3, 4, 5, 2**24))
    model.graph.output.append(helper.make_tensor_value_info("z", TensorProto.BOOL, None))
    with pytest.raises(UnsupportedError, match=r"'n' \(Dropout\) .* bytes for its mask, .*: leave that output out"):
        to_program(model, {}, Options(), Dump(None))


def test_memory_that_runs_out_is_not_the_models_contradiction():
    says = "the model takes more memory than there is: Unable to allocate 1.00 EiB"
    with pytest.raises(LaunchError, match=says), blamed_on("the model"):
        np.zeros(2**57)


def _model(nodes: list[onnx.NodeProto], shape: tuple[int, ...] = (2, 3), **more) -> onnx.ModelProto:
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, shape)
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, None)
    return helper.make_model(helper.make_graph(nodes, "g", [x], [y], **more), opset_imports=[helper.make_opsetid("", 17)])


def test_names_that_are_not_text():
    model = _model([helper.make_node("Relu", ["x"], ["y"], "named")])
    model.doc_string = "words"
    broken = model.SerializeToString().replace(b"words", b"\xffords")
    load(onnx.ModelProto.FromString(broken))
    with pytest.raises(ModelError, match=r"the name b'\\xffamed' of a NodeProto is not UTF-8"):
        load(onnx.ModelProto.FromString(broken.replace(b"named", b"\xffamed")))


def test_an_output_that_is_listed_twice():
    net = Net(x=(2, 3))
    model = net.out(net("Relu", "x")).model()
    model.graph.output.add().CopyFrom(model.graph.output[0])
    with pytest.raises(ModelError, match=r"lists its output 't0' 2 times: remove the others"):
        load(model)


def test_nodes_in_a_circle():
    nodes = [helper.make_node("Add", ["x", "y"], ["a"]), helper.make_node("Relu", ["a"], ["y"])]
    with pytest.raises(ModelError):
        to_program(_model(nodes), {}, Options(), Dump(None))


@pytest.mark.parametrize("extent", [2**31, HUGE])
def test_an_input_that_no_gpu_holds(extent):
    with pytest.raises(UnsupportedError, match=r"the input 'x' is .* extents below 2\^31"):
        to_program(_model([helper.make_node("Relu", ["x"], ["y"])], (3, extent)), {}, Options(), Dump(None))


def test_a_tensor_too_large_to_run_through_is_estimated():
    model = _model([helper.make_node("Relu", ["x"], ["y"])], (1, 2**30))
    with pytest.warns(
        RuntimeWarning, match="estimated from the weights, running it would make a tensor of 1074 million elements"
    ):
        to_program(model, {}, Options(), Dump(None))


SLOW = {
    "countless taps of a window": (
        (17, (1, 1, 8, 8), lambda n: n("MaxPool", "x", kernel_shape=[2000, 2000], pads=[1999] * 4)), "running it would be"),
    "a head's countless scores": (
        (23, (1, 2**15, 8), lambda n: n("Attention", "x", "x", "x", q_num_heads=1, kv_num_heads=1)),
        "it would make a tensor of 1074 million elements"),
}  # fmt: skip


@pytest.mark.parametrize("case", SLOW)
def test_what_takes_too_long_is_not_run(case):
    (opset, shape, build), says = SLOW[case]
    net = Net(opset=opset, x=shape)
    with pytest.warns(RuntimeWarning, match=f"estimated from the weights, .*{says}"):
        to_program(as_it_is(net, build(net)), {}, Options(), Dump(None))


def test_a_loop_of_countless_trips():
    x = helper.make_tensor_value_info
    inside = [helper.make_node("Identity", ["go"], ["on"]), helper.make_node("Relu", ["v"], ["w"])]
    ends = [x("n", TensorProto.INT64, ()), x("go", TensorProto.BOOL, ()), x("v", TensorProto.FLOAT, None)]
    body = helper.make_graph(inside, "body", ends, [x("on", TensorProto.BOOL, ()), x("w", TensorProto.FLOAT, None)])
    constants = [helper.make_tensor("trips", TensorProto.INT64, (), [HUGE]), helper.make_tensor("yes", TensorProto.BOOL, (), [1])]
    node = helper.make_node("Loop", ["trips", "yes", "x"], ["y"], body=body)
    with pytest.raises(UnsupportedError):
        to_program(_model([node], initializer=constants), {}, Options(), Dump(None))


def test_a_loop_without_nodes():
    x = helper.make_tensor_value_info
    ends = [x("n", TensorProto.INT64, ()), x("go", TensorProto.BOOL, ()), x("v", TensorProto.FLOAT, None)]
    body = helper.make_graph([], "body", ends, ends[1:])
    yes = helper.make_tensor("yes", TensorProto.BOOL, (), [1])
    node = helper.make_node("Loop", ["", "yes", "x"], ["y"], body=body)
    with pytest.raises(UnsupportedError, match="'y': iterations of its loop, of 0 nodes each"):
        to_program(_model([node], initializer=[yes]), {}, Options(), Dump(None))


def test_branches_in_branches_take_no_more_time_each():
    shape = helper.make_tensor_value_info("y0", TensorProto.FLOAT, None)
    node = helper.make_node("Relu", ["x"], ["y0"])
    for depth in range(22):
        inner = helper.make_graph([node], "inner", [], [helper.make_tensor_value_info(f"y{depth}", TensorProto.FLOAT, None)])
        other = helper.make_graph([helper.make_node("Neg", ["x"], ["y0"])], "other", [], [shape])
        node = helper.make_node("If", ["yes"], [f"y{depth + 1}"], then_branch=inner, else_branch=other)
    model = _model(
        [node, helper.make_node("Exp", ["y22"], ["y"])], initializer=[helper.make_tensor("yes", TensorProto.BOOL, (), [1])]
    )
    begin = time.process_time()
    assert [n.op for n in load(model).nodes] == ["Relu", "Exp"]
    assert time.process_time() - begin < 20


def test_functions_that_stand_for_countless_nodes():
    imports = [helper.make_opsetid("", 17), helper.make_opsetid("own", 1)]
    functions = []
    for level in range(10):
        called = ("Relu", "") if level == 0 else (f"f{level - 1}", "own")
        nodes = [helper.make_node(called[0], [f"a{k}"], [f"a{k + 1}"], domain=called[1]) for k in range(8)]
        functions.append(helper.make_function("own", f"f{level}", ["a0"], ["a8"], nodes, imports))
    model = _model([helper.make_node("f9", ["x"], ["y"], domain="own")])
    model.functions.extend(functions)
    model.opset_import.append(imports[1])
    with pytest.raises(UnsupportedError, match=r"functions.* stand for more than 2\^20 nodes"):
        load(model)


LONG: dict[str, Callable[[Net], str]] = {
    # windows, samples and products of few bytes, which ONNX's evaluator would take minutes for
    "windows": lambda n: n("MaxPool", n("ConstantOfShape", i([1, 1, 1000, 1000])), kernel_shape=[500, 500], pads=[250] * 4),
    "filters": lambda n: n("Conv", n("ConstantOfShape", i([1, 1, 2000, 2000])), n("ConstantOfShape", i([1, 1, 500, 500]))),
    "samples": lambda n: n("GridSample", f([[[[1, 2], [3, 4]]]]), n("ConstantOfShape", i([1, 1000, 1000, 2]))),
    "scores": lambda n: n("Attention", *[n("ConstantOfShape", i([1, 1, 20000, 8]))] * 3),
    "letters": lambda n: n(
        "Einsum", *[n("ConstantOfShape", i([64, 64, 64]))] * 3, n("ConstantOfShape", i([64] * 3)), equation="abc,cde,efa,bdf->"),
    "integers": lambda n: n("MatMulInteger", *[n("Cast", n("ConstantOfShape", i([3000, 3000])), to=TensorProto.INT8)] * 2),
}  # fmt: skip


@pytest.mark.parametrize("case", LONG)
def test_what_takes_too_long_is_not_folded(case):
    net = Net(opset=23, x=(1,))
    y = LONG[case](net)
    begin = time.process_time()
    nodes = load(as_it_is(net, net("Add", "x", net("Cast", y, to=TensorProto.FLOAT)))).nodes
    assert net.nodes[-3].op_type in [n.op for n in nodes]
    assert time.process_time() - begin < 10


def test_a_small_convolution_of_constants_folds():
    """As networks compute positions."""
    net = Net(opset=17, x=(1, 8, 6, 6))
    places = net("Conv", net.normal(1, 4, 6, 6), net.normal(8, 4, 1, 1))
    assert [n.op for n in load(as_it_is(net, net("Add", "x", places))).nodes] == ["Add"]


def test_products_fold_as_far_as_there_is_work(monkeypatch):
    """All of a model's share one amount: more nodes take no more time."""
    monkeypatch.setattr("tccompile.load.fold.WORK", 100_000)
    net = Net(opset=17, x=(2, 2))
    c = net("ConstantOfShape", i([64, 64]))
    for _ in range(9):
        c = net("MatMul", c, c)
    nodes = load(as_it_is(net, net("Add", "x", net("ReduceSum", c, keepdims=0)))).nodes
    assert [n.op for n in nodes].count("MatMul") == 5


def test_constants_fold_as_far_as_there_is_room(monkeypatch):
    """32 times what the model's own take, and ROOM: what is made of a few bytes by many nodes stays a node."""
    monkeypatch.setattr("tccompile.load.fold.ROOM", 2**20)
    net = Net(opset=17, x=(2, 2))
    c = net.normal(16, 16)
    for _ in range(14):
        c = net("Concat", c, c, axis=0)
    nodes = load(as_it_is(net, net("Add", "x", net("ReduceSum", c, keepdims=0)))).nodes
    assert 3 <= [n.op for n in nodes].count("Concat") <= 5
    assert sum(t.values.nbytes for n in nodes for t in n.inputs if hasattr(t, "values")) < 2**21


def test_few_values_that_claim_to_be_many():
    few = [helper.make_tensor("w", TensorProto.FLOAT, (1,), [1]), helper.make_tensor("i", TensorProto.INT64, (1,), [0])]
    sparse = helper.make_sparse_tensor(*few, [2**17, 2**17])
    model = _model([helper.make_node("Add", ["x", "w"], ["y"])], (2**17, 2**17), sparse_initializer=[sparse])
    with pytest.raises(UnsupportedError, match="'w' of 131072×131072 holds 1 values"):
        load(model)


def test_a_window_that_is_wider_than_its_axis():
    net = Net(opset=17, x=(1, 4, 3, 3))
    program = to_program(as_it_is(net, net("LRN", "x", size=2**40 + 1)), {}, Options(precision="fp16"), Dump(None))
    assert len(program.ops) == 1 and len(program.ops[0].views) == 7  # at distances from -3 to 3


def test_random_damage():
    """Bytes of a small network turned at random: it compiles, or is refused; nothing else."""
    net = Net(opset=17, x=(1, 4, 8, 8))
    y = net("Relu", net("Conv", "x", net.normal(8, 4, 3, 3), net.normal(8), pads=[1] * 4))
    y = net("Resize", net("MaxPool", y, kernel_shape=[2, 2], strides=[2, 2]), None, f([1, 1, 2, 2]), mode="nearest")
    y = net("Transpose", net("Reshape", y, i([1, 8, -1])), perm=[0, 2, 1])
    y = net("Softmax", net("MatMul", net("LayerNormalization", y, net.normal(8)), net.normal(8, 5)), axis=-1)
    data = net.out(net("Concat", *net("Split", y, i([2, 3]), axis=2, outputs=2)[::-1], axis=2)).model().SerializeToString()
    rng, refused = random.Random(3), 0
    for _ in range(150):
        damaged = bytearray(data)
        for _ in range(rng.choice((1, 3))):
            damaged[rng.randrange(len(data))] = rng.randrange(256)
        model = onnx.ModelProto()
        try:
            model.ParseFromString(bytes(damaged[: rng.choice((len(data), len(data), rng.randrange(len(data))))]))
        except Exception:  # protobuf's own error, whose type depends on its version
            continue
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                without_code(model, ("sm_80",))
            except TccompileError:
                refused += 1
    assert refused > 20
