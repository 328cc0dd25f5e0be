"""Lowering as a whole: inputs and outputs, names, layouts, refusals, and whole networks."""

from __future__ import annotations

import numpy as np
import pytest
from onnx import TensorProto, helper, numpy_helper

from tccompile.errors import UnsupportedError
from tccompile.ir.ops import Conv, Pointwise
from tccompile.ir.reference import evaluate
from tccompile.ir.tensor import dense
from tccompile.ir.types import DType
from tccompile.ir.verify import verify
from tccompile.load.model import load, sources
from tccompile.lower.graph import lower, unsupported
from tccompile.rewrites import rewrite
from tests.networks import feeds, reference, relative_error, skeleton
from tests.ops.common import agrees
from tests.rewrites.common import Net
from tests.tiers import usually

NEWEST = {"opset_imports": [helper.make_opsetid("", 23)], "ir_version": 10}


@pytest.mark.parametrize("name", usually(["resnet18", "mobilenet_v2", "googlenet"], "mobilenet_v2"))
def test_networks(name: str) -> None:
    model = skeleton(name)
    program = lower(rewrite(load(model)))
    verify(program)
    inputs = feeds(model, 0)
    got, want = evaluate(program, inputs, sources(model)), reference(model, inputs)
    assert all(relative_error(got[k], want[k]) < 1e-5 for k in want)
    for op in program.ops:
        y = program.tensors[op.y]
        if isinstance(op, Conv):
            assert y.inner == 1 and y.padded[1] % 8 == 0, f"{op.nodes[0]} does not write channels innermost"


@pytest.mark.parametrize("behind", [False, True], ids=["positions", "positions, then a function"])
def test_pixels_that_become_tokens_are_rows(behind: bool) -> None:
    """What is added before the transposition passes it, but every product reads rows of channels."""
    net = Net(x=(2, 3, 8, 8))
    patches = net("Conv", "x", net.normal(16, 3, 4, 4), kernel_shape=[4, 4], strides=[4, 4])
    tokens = net("Transpose", net("Reshape", patches, np.array([2, 16, 4])), perm=[0, 2, 1])
    placed = net("Add", tokens, net.normal(1, 4, 16))
    placed = net("Tanh", placed) if behind else placed
    normal = net("LayerNormalization", placed, net.normal(16))
    model = net.out(net("MatMul", normal, net.normal(16, 24))).model()
    program, inputs = lower(rewrite(load(model))), feeds(model, 0)
    got, want = evaluate(program, inputs, sources(model)), reference(model, inputs)
    assert all(relative_error(got[k], want[k]) < 2e-6 for k in want)
    inside = [program.tensors[op.y] for op in program.ops if 16 in program.tensors[op.y].shape]
    assert len(inside) > 3 and all(y.inner is not None and y.shape[y.inner] == 16 for y in inside)


def test_float_inputs_and_outputs_keep_their_type_and_layout() -> None:
    for dtype, ours in ((np.float16, DType.F16), (np.float32, DType.F32), (np.float64, DType.F64)):
        net = Net(dtype=dtype, x=(1, 3, 5, 5))
        program = lower(load(net.out(net("Relu", net("Sigmoid", "x"))).model()))
        verify(program)
        assert program.tensors["x"] == dense("x", (1, 3, 5, 5), ours, pad=1)
        assert program.tensors["t1"] == dense("t1", (1, 3, 5, 5), ours, pad=1)
        inside = [program.tensors[op.y] for op in program.ops if op.y not in program.outputs]
        assert len(inside) == 2 and all(t.dtype is DType.F32 for t in inside)


def test_bfloat16_goes_in_and_out() -> None:
    node = helper.make_node("Add", ["x", "x"], ["y"], "twice")
    ends = [helper.make_tensor_value_info(n, TensorProto.BFLOAT16, (2, 3)) for n in "xy"]
    model = helper.make_model(helper.make_graph([node], "g", ends[:1], ends[1:]), **NEWEST)
    program = lower(load(model))
    verify(program)
    assert [program.tensors[n].dtype for n in "xy"] == [DType.BF16, DType.BF16]
    bits = (np.arange(6, dtype=np.float32).view(np.uint32) >> 16).astype(np.uint16).reshape(2, 3)
    assert np.array_equal(evaluate(program, {"x": bits}, {})["y"], 2 * np.arange(6).reshape(2, 3))


def test_an_output_that_is_also_read_inside() -> None:
    net = Net(x=(1, 3, 6, 6))
    y = net("Conv", "x", net.normal(4, 3, 3, 3))
    agrees(net.out(y, net("Relu", y)))


def test_a_constant_as_an_output() -> None:
    values = np.arange(6, dtype=np.float32).reshape(2, 3)
    x, y, c = (helper.make_tensor_value_info(n, TensorProto.FLOAT, (2, 3)) for n in "xyc")
    node = helper.make_node("Relu", ["x"], ["y"], "n")
    graph = helper.make_graph([node], "g", [x], [y, c], [numpy_helper.from_array(values, "c")])
    model = helper.make_model(graph, **NEWEST)
    program = lower(load(model))
    verify(program)
    assert program.outputs == ("y", "c")
    assert np.array_equal(evaluate(program, {"x": -values}, sources(model))["c"], values)


def test_an_input_passed_through_is_copied() -> None:
    x, y = (helper.make_tensor_value_info(n, TensorProto.INT64, (3,)) for n in "xy")
    model = helper.make_model(helper.make_graph([helper.make_node("Identity", ["x"], ["y"], "n")], "g", [x], [y]), **NEWEST)
    program = lower(load(model))
    verify(program)
    assert evaluate(program, {"x": np.array([1, -(1 << 60), 3])}, {})["y"].tolist() == [1, -(1 << 60), 3]


def test_a_constant_used_in_two_layouts_is_stored_in_each() -> None:
    net = Net(x=(1, 3, 8, 8))
    w = net("Identity", net.normal(8, 3, 3, 3))
    program = agrees(net.out(net("Conv", "x", w), net("Add", w, np.float32(1))))
    assert sorted(program.tensors[c].inner or 0 for c in program.constants) in ([1], [1, 3])


def test_ops_carry_the_names_that_the_user_knows() -> None:
    net = Net(x=(1, 3, 8, 8))
    program = lower(load(net.out(net("Relu", net("Conv", "x", net.normal(8, 3, 3, 3)))).model()))
    assert [op.nodes for op in program.ops] == [("n0",), ("n0",), ("n1",), ("n1",)]
    assert [type(op) for op in program.ops] == [Pointwise, Conv, Pointwise, Pointwise]


def test_a_node_without_a_name_goes_by_its_output() -> None:
    ends = [helper.make_tensor_value_info(n, TensorProto.FLOAT, (3,)) for n in "xy"]
    model = helper.make_model(helper.make_graph([helper.make_node("Relu", ["x"], ["y"])], "g", ends[:1], ends[1:]), **NEWEST)
    assert {op.nodes for op in lower(load(model)).ops} == {("y",)}


def test_all_refusals_are_collected() -> None:
    net = Net(x=(1, 2, 4, 4, 4, 4), z=(4, 4))
    volume = net("Relu", net("MaxPool", "x", kernel_shape=[2] * 4))
    number = net("Relu", net("Det", "z"))
    graph = load(net.out(volume, number, net("Relu", "z")).model())
    issues = unsupported(graph)
    assert [(i.node, i.op) for i in issues] == [("n0", "MaxPool"), ("n2", "Det")]
    assert issues[0].shapes == ((1, 2, 4, 4, 4, 4),) and "4 spatial axes" in issues[0].reason and issues[0].way_out
    with pytest.raises(UnsupportedError, match=r"n0 .MaxPool of 1×2×4×4×4×4.: it has 4 spatial axes"):
        lower(graph)


def test_a_sequence_that_is_an_input_and_an_output_is_refused_and_listed() -> None:
    several = helper.make_sequence_type_proto(helper.make_tensor_type_proto(TensorProto.FLOAT, (3,)))
    x, y = helper.make_value_info("x", several), helper.make_tensor_value_info("y", TensorProto.FLOAT, (3,))
    nodes = [helper.make_node("SequenceAt", ["x", "i"], ["y"], "n")]
    at = numpy_helper.from_array(np.array(0), "i")
    model = helper.make_model(helper.make_graph(nodes, "g", [x], [y, x], [at]), **NEWEST)
    graph = load(model, {"x[0]": (3,)})
    (issue,) = unsupported(graph)
    assert str(issue).startswith("x[0] (Identity of 3): the output x[0] is an input of the model; ")
    with pytest.raises(UnsupportedError, match=r"^x\[0\] .*: the output x\[0\] is an input"):
        lower(graph)


@pytest.mark.parametrize("op", ["RandomNormal", "RandomUniform"])
def test_noise_is_an_input(op: str) -> None:
    net = Net(x=(2, 3))
    (issue,) = unsupported(load(net.out(net("Add", "x", net(op, shape=[2, 3]))).model()))
    assert str(issue) == f"n0 ({op}): it draws values at random; draw them in the application: make them an input of the model"


def test_a_model_that_can_be_compiled_has_no_issues() -> None:
    net = Net(x=(2, 3))
    assert unsupported(load(net.out(net("Relu", "x")).model())) == []


def test_parameters_that_are_computed_are_refused() -> None:
    net = Net(x=(2, 3), p=(4,))
    pads = net("Cast", "p", to=TensorProto.INT64)
    ends = helper.make_tensor_value_info("y", TensorProto.FLOAT, (4, 5))
    graph = helper.make_graph(
        [*net.nodes, helper.make_node("Pad", ["x", pads], ["y"], "padding")], "g", net.inputs, [ends], net.weights
    )
    model = helper.make_model(graph, **NEWEST)
    with pytest.raises(UnsupportedError):
        lower(load(model))


def test_more_axes_than_a_view_can_have() -> None:
    net = Net(x=(1,) * 9)
    with pytest.raises(UnsupportedError, match=r"9 axes.*at most 8"):
        lower(load(net.out(net("Relu", "x")).model()))
