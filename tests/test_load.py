from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import onnx
import onnx.defs
import onnx.external_data_helper
import onnx_graphsurgeon as gs
import pytest
from onnx import TensorProto, helper, numpy_helper

from tccompile.errors import ModelError, TccompileError, UnsupportedError, UsageError
from tccompile.ir.weights import Source, evaluate, same, sources_of
from tccompile.load.constants import decisive, held, recipe_of, remembering
from tccompile.load.model import in_memory, load, parsed, read, sources
from tccompile.load.opset import NEWEST, UNIFORM, UPGRADES
from tccompile.lower.graph import lower
from tccompile.rewrites import rewrite
from tests.networks import CONVOLUTIONAL, OTHERS, RECURRENT, feeds, reference, relative_error, skeleton
from tests.rewrites.common import Net, check_recipes, check_same
from tests.tiers import usually

i = np.array
f = np.float32


# --- opsets ---

OLD = {
    # name: (opset, shape of x, nodes)
    "Upsample-7 nearest": (7, (1, 2, 3, 4), lambda n: n("Upsample", "x", mode="nearest", scales=[1.0, 1.0, 2.0, 3.0])),
    "Upsample-7 linear": (7, (1, 2, 3, 4), lambda n: n("Upsample", "x", mode="linear", scales=[1.0, 1.0, 2.0, 2.0])),
    "Upsample-9 nearest": (9, (1, 2, 3, 4), lambda n: n("Upsample", "x", f([1, 1, 2, 2]))),
    "Upsample-9 linear": (9, (1, 2, 3, 4), lambda n: n("Upsample", "x", f([1, 1, 3, 2]), mode="linear")),
    "Resize-10 larger": (10, (1, 2, 3, 4), lambda n: n("Resize", "x", f([1, 1, 2, 2.5]))),
    "Resize-10 smaller": (10, (1, 2, 7, 9), lambda n: n("Resize", "x", f([1, 1, 0.6, 0.4]))),
    "Resize-10 both": (10, (1, 2, 7, 9), lambda n: n("Resize", "x", f([1, 1, 1.7, 0.4]))),
    "Resize-10 linear": (10, (1, 2, 7, 9), lambda n: n("Resize", "x", f([1, 1, 2, 0.5]), mode="linear")),
    "Resize-11 sizes": (
        11, (1, 2, 3, 4),
        lambda n: n("Resize", "x", f([]), f([]), i([1, 2, 5, 7]), mode="linear", coordinate_transformation_mode="align_corners")),
    "Resize-11 for nearest": (
        11, (1, 2, 3, 4),
        lambda n: n("Resize", "x", f([]), f([1, 1, 2, 1.5]), coordinate_transformation_mode="tf_half_pixel_for_nn",
                    nearest_mode="floor")),
    "Resize-13": (13, (1, 2, 3, 4), lambda n: n("Resize", "x", None, f([1, 1, 2, 2]), mode="cubic")),
    "Slice-1": (7, (2, 5, 6), lambda n: n("Slice", "x", axes=[2, 1], starts=[-4, 1], ends=[100, -1])),
    "Slice-1 without axes": (7, (2, 5, 6), lambda n: n("Slice", "x", starts=[0, 1], ends=[1, 4])),
    "Slice-10": (10, (2, 5, 6), lambda n: n("Slice", "x", i([4]), i([-9]), i([1]), i([-2]))),
    "Clip-6": (7, (2, 5), lambda n: n("Clip", "x", min=-0.5, max=0.25)),
    "Clip-6 one bound": (10, (2, 5), lambda n: n("Clip", "x", max=0.25)),
    "Clip-11": (11, (2, 5), lambda n: n("Clip", "x", f(-0.5))),
    "Pad-2": (7, (2, 5), lambda n: n("Pad", "x", pads=[1, 2, 0, 1], value=2.5)),
    "Pad-2 reflect": (10, (2, 5), lambda n: n("Pad", "x", pads=[1, 2, 0, 1], mode="reflect")),
    "BatchNormalization-7": (
        7, (2, 3, 4), lambda n: n("BatchNormalization", "x", n.normal(3), n.normal(3), n.normal(3), n.positive(3), spatial=1)),
    "BatchNormalization-9": (
        9, (2, 3, 4), lambda n: n("BatchNormalization", "x", n.normal(3), n.normal(3), n.normal(3), n.positive(3))),
    "BatchNormalization-14": (
        14, (2, 3, 4), lambda n: n("BatchNormalization", "x", n.normal(3), n.normal(3), n.normal(3), n.positive(3))),
    "Dropout-7": (7, (2, 3), lambda n: n("Relu", n("Dropout", "x", ratio=0.3))),
    "Dropout-13": (13, (2, 3), lambda n: n("Relu", n("Dropout", "x", f(0.3)))),
    "Squeeze-1": (7, (2, 1, 3, 1), lambda n: n("Squeeze", "x", axes=[1, 3])),
    "Squeeze-1 without axes": (11, (2, 1, 3, 1), lambda n: n("Squeeze", "x")),
    "Unsqueeze-1": (7, (2, 3), lambda n: n("Unsqueeze", "x", axes=[0, 2])),
    "Softmax-1": (7, (2, 3, 4), lambda n: n("Softmax", "x")),
    "Softmax-11": (11, (2, 3, 4), lambda n: n("Softmax", "x", axis=2)),
    "LogSoftmax-1": (12, (2, 3, 4), lambda n: n("LogSoftmax", "x", axis=0)),
    "Hardmax-11": (11, (2, 3, 4), lambda n: n("Hardmax", "x", axis=1)),
    "ReduceSum-1": (7, (2, 3, 4), lambda n: n("ReduceSum", "x", axes=[1], keepdims=0)),
    "ReduceSum-13": (13, (2, 3, 4), lambda n: n("ReduceSum", "x", i([-1]))),
    "ReduceMean-1": (9, (2, 3, 4), lambda n: n("ReduceMean", "x", axes=[0, 2])),
    "ReduceMax-12": (12, (2, 3, 4), lambda n: n("ReduceMax", "x", keepdims=0)),
    "ReduceL2-13": (17, (2, 3, 4), lambda n: n("ReduceL2", "x", axes=[-1])),
    "Split-2": (7, (2, 6), lambda n: n("Concat", *n("Split", "x", outputs=2, axis=1, split=[2, 4])[::-1], axis=1)),
    "Split-11 evenly": (11, (2, 6), lambda n: n("Concat", *n("Split", "x", outputs=3, axis=1)[::-1], axis=1)),
    "Split-13": (13, (2, 6), lambda n: n("Concat", *n("Split", "x", i([1, 5]), outputs=2, axis=1)[::-1], axis=1)),
    "TopK-1": (7, (2, 6), lambda n: n("TopK", "x", outputs=2, k=3, axis=1)[0]),
    "Scatter-9": (9, (3, 3), lambda n: n("Scatter", "x", i([[1, 0, 2]]), f([[1, 2, 3]]), axis=0)),
    "GridSample-16": (
        16, (1, 2, 4, 4), lambda n: n("GridSample", "x", n.positive(1, 3, 3, 2) - f(1), mode="bicubic")),
    "AveragePool-7": (
        7, (1, 2, 6, 6), lambda n: n("AveragePool", "x", kernel_shape=[3, 3], pads=[1, 1, 1, 1], count_include_pad=1)),
    "Gemm-7": (7, (2, 6), lambda n: n("Gemm", "x", n.normal(6, 3), n.normal(3), alpha=0.5)),
    "ConstantOfShape": (
        9, (2, 6), lambda n: n("Add", "x", n("ConstantOfShape", n("Shape", "x"), value=numpy_helper.from_array(f([2]))))),
    "shape arithmetic": (
        11, (2, 3, 4),
        lambda n: n("Reshape", "x", n("Concat", n("Unsqueeze", n("Gather", n("Shape", "x"), i(0)), axes=[0]), i([-1]), axis=0))),
}  # fmt: skip


@pytest.mark.parametrize("case", OLD)
def test_old_opsets(case):
    opset, shape, build = OLD[case]
    net = Net(opset=opset, x=shape)
    model = net.out(build(net)).model()
    graph = load(model)
    assert graph.opset == UNIFORM
    check_recipes(graph, model)
    check_same(graph, model, 2e-6)


def test_roi_align_10_had_half_pixels_in_its_output():
    net = Net(opset=10, x=(1, 2, 8, 8))
    (node,) = load(net.out(net("RoiAlign", "x", f([[0, 0, 5, 6]]), i([0]), output_height=3, output_width=2)).model()).nodes
    assert node.attrs["coordinate_transformation_mode"] == "output_half_pixel"


def test_group_norm_18_had_a_scale_a_group():
    net = Net(opset=18, x=(2, 6, 3, 3))
    scale, bias = net.normal(2), net.normal(2)
    model = net.out(net("GroupNormalization", "x", scale, bias, num_groups=2, epsilon=1e-3)).model()
    graph = load(model)
    check_recipes(graph, model)
    given = feeds(model, 0)
    groups = given["x"].reshape(2, 2, 3, 3, 3).astype(np.float64)
    axes = (2, 3, 4)
    ref = (groups - groups.mean(axes, keepdims=True)) / np.sqrt(groups.var(axes, keepdims=True) + 1e-3)
    ref = ref * scale.reshape(1, 2, 1, 1, 1) + bias.reshape(1, 2, 1, 1, 1)
    (out,) = reference(gs.export_onnx(graph), given).values()
    assert relative_error(out, ref.reshape(2, 6, 3, 3)) < 1e-6


def test_every_changed_operator_is_upgraded():
    """An operator whose attributes went away, or whose inputs moved, between opsets 7 and 28 has an entry."""
    history = [s for s in onnx.defs.get_all_schemas_with_history() if not s.domain]
    gone = set()
    for schema in history:
        if not onnx.defs.has(schema.name) or schema.since_version > NEWEST:
            continue
        if schema.deprecated:
            gone.add(schema.name)
            continue
        now = onnx.defs.get_schema(schema.name, NEWEST, "")
        until = [s.since_version for s in history if s.name == schema.name and s.since_version > schema.since_version]
        if min(until, default=99) <= 7:  # it is not this one that opset 7 means
            continue
        lost = set(schema.attributes) - set(now.attributes)
        moved = any(a.name != b.name and a.type_str != b.type_str for a, b in zip(schema.inputs, now.inputs, strict=False))
        if lost - {"seed"} or (moved and not now.deprecated):
            gone.add(schema.name)
    gone.discard("Scan")  # control flow is refused
    assert gone <= set(UPGRADES), gone - set(UPGRADES)


@pytest.mark.parametrize("opset", [6, 29])
def test_other_opsets_are_refused(opset):
    model = _relu()
    model.opset_import[0].version = opset
    with pytest.raises(UnsupportedError, match=f"opset {opset}; opsets 7 to 28"):
        load(model)


# --- shapes ---


def _relu(*dims) -> onnx.ModelProto:
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, list(dims or (2, 3)))
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, None)
    graph = helper.make_graph([helper.make_node("Relu", ["x"], ["y"], "relu")], "g", [x], [y])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def test_symbolic_extents_are_bound():
    graph = load(_relu("batch", 3), {"x": (5, 3)})
    assert graph.inputs[0].shape == [5, 3] and graph.outputs[0].shape == [5, 3]


def test_an_extent_that_two_inputs_share_is_given_once():
    xs = [helper.make_tensor_value_info(n, TensorProto.FLOAT, ["n", 3]) for n in "ab"]
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, None)
    graph = helper.make_graph([helper.make_node("Add", ["a", "b"], ["y"])], "g", xs, [y])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    assert [t.shape for t in load(model, {"b": (4, 3)}).inputs] == [[4, 3], [4, 3]]
    with pytest.raises(UsageError, match="'n' is 4 in one input and 5"):
        load(model, {"a": (4, 3), "b": (5, 3)})


@pytest.mark.parametrize(
    ("shapes", "says"),
    [
        (
            None,
            "'batch' can be anything: say what it is, as in --shape x=1x3, or between what, as in --range batch=1..8",
        ),
        ({"x": (1, 4)}, "--shape x=1x4 does not fit: the input is batchx3"),
        ({"x": (1, 3, 1)}, "--shape x=1x3x1 has 3 extents"),
        ({"x": (-1, 3)}, "does not fit"),
        ({"z": (1, 3)}, "no input 'z'; its inputs are 'x'"),
    ],
)
def test_shapes_that_do_not_fit(shapes, says):
    with pytest.raises(UsageError) as e:
        load(_relu("batch", 3), shapes)
    assert says in str(e.value)


# --- constants, names, types ---


def test_an_initializer_that_is_also_an_input_is_a_constant():
    net = Net(x=(2, 3))
    model = net.out(net("Add", "x", net.normal(3))).model()
    model.graph.input.append(helper.make_tensor_value_info("w0", TensorProto.FLOAT, [3]))
    model.ir_version = 3
    model.opset_import[0].version = 9
    graph = load(model)
    assert [t.name for t in graph.inputs] == ["x"]
    check_recipes(graph, model)


def test_what_is_not_needed_goes():
    net = Net(opset=13, x=(2, 3))
    y = net("Identity", net("Cast", net("Dropout", net("Relu", net("Identity", "x"))), to=TensorProto.FLOAT))
    net("Exp", "x")
    graph = load(net.out(y).model())
    assert [(n.op, n.outputs[0].name) for n in graph.nodes] == [("Relu", y)]


def test_outputs_that_are_one_tensor_keep_their_names():
    net = Net(x=(2, 3))
    r = net("Relu", "x")
    model = net.out(r, net("Identity", r), net("Identity", "x"), net("Identity", net.normal(4))).model()
    graph = load(model)
    assert Counter(n.op for n in graph.nodes) == {"Relu": 1, "Identity": 2}
    check_same(graph, model, 0)
    check_recipes(graph, model)


def test_folded_weights_remember_where_they_come_from():
    net = Net(x=(2, 8))
    w = net("Transpose", net("Mul", net("Cast", net.normal(6, 8).astype(np.float16), to=TensorProto.FLOAT), f(2)), perm=[1, 0])
    model = net.out(net("MatMul", "x", net("Concat", w, net.normal(8, 3), axis=1))).model()
    graph = load(model)
    (matmul,) = graph.nodes
    recipe = recipe_of(matmul.inputs[1])
    assert sources_of(recipe) == {"w0", "w1", "w2"}
    others = {k: np.asarray(v * 3, v.dtype) for k, v in sources(model).items()}  # the recipe holds for other weights too
    for tensor in model.graph.initializer:
        tensor.CopyFrom(numpy_helper.from_array(others[tensor.name], tensor.name))
    np.testing.assert_array_equal(evaluate(recipe, others), load(model).nodes[0].inputs[1].values)


def test_weights_that_many_nodes_change_are_kept_as_they_are():
    """Plans hold no recipe of so many steps. Who replaces the weights is told that they decided something."""
    net = Net(x=(2, 3))
    w = net.normal(3, 3)
    for _ in range(150):
        w = net("Mul", w, f(0.99))
    model = net.out(net("MatMul", "x", w)).model()
    with decisive() as decided:
        graph = load(model)
    check_same(graph, model, 1e-6)
    lower(graph)  # which checks the program
    assert "w0" in decided


def test_outputs_that_are_one_result_by_several_names():
    """The first gives it its name; the other is a copy, also of what was a copy of a copy."""
    net = Net(x=(2, 3))
    y = net("Identity", net("Relu", "x"))
    model = net.out(y, net("Identity", y)).model()
    check_same(load(model), model, 0)


def test_large_constant_nodes_are_weights():
    net = Net(x=(2, 64))
    big = net("Constant", value=numpy_helper.from_array(net.normal(64, 64)))
    model = net.out(net("MatMul", "x", big)).model()
    assert recipe_of(load(model).nodes[0].inputs[1]) == Source(big, (64, 64), "float32")
    assert list(sources(model)) == [big]


def test_bf16_is_float32_inside():
    import ml_dtypes

    bf16 = ml_dtypes.bfloat16
    w = numpy_helper.from_array(np.random.default_rng(0).standard_normal((4, 5)).astype(bf16), "w")
    x, y = (helper.make_tensor_value_info(n, TensorProto.BFLOAT16, [2, k]) for n, k in (("x", 4), ("y", 5)))
    nodes = [helper.make_node("MatMul", ["x", "w"], ["m"]), helper.make_node("Relu", ["m"], ["y"])]
    model = helper.make_model(
        helper.make_graph(nodes, "g", [x], [y], [w]), opset_imports=[helper.make_opsetid("", 17)], ir_version=8
    )
    graph = load(model)
    assert [n.op for n in graph.nodes] == ["Cast", "MatMul", "Relu", "Cast"]
    assert graph.inputs[0].dtype == graph.outputs[0].dtype == TensorProto.BFLOAT16
    assert graph.nodes[1].inputs[1].dtype == np.float32
    exported = gs.export_onnx(graph)
    onnx.checker.check_model(exported, full_check=True)


def test_a_dequantized_weight_is_a_constant():
    rng = np.random.default_rng(0)
    net = Net(x=(2, 6))
    w = net("DequantizeLinear", rng.integers(-99, 99, (6, 4), np.int8), net.positive(4), rng.integers(-5, 5, 4, np.int8), axis=1)
    model = net.out(net("MatMul", "x", w)).model()
    graph = load(model)
    assert [n.op for n in graph.nodes] == ["MatMul"]
    check_recipes(graph, model)
    check_same(graph, model, 1e-6)


def test_functions_are_inlined():
    body = [helper.make_node("Relu", ["a"], ["r"]), helper.make_node("Squeeze", ["r"], ["b"], axes=[0])]
    for opset in (11, 17):
        function = helper.make_function("mine", "F", ["a"], ["b"], body, [helper.make_opsetid("", 11)])
        x = helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, 3])
        y = helper.make_tensor_value_info("y", TensorProto.FLOAT, [3])
        graph = helper.make_graph([helper.make_node("F", ["x"], ["y"], "f", domain="mine")], "g", [x], [y])
        imports = [helper.make_opsetid("", opset), helper.make_opsetid("mine", 1)]
        model = helper.make_model(graph, opset_imports=imports, functions=[function], ir_version=8)
        assert [n.op for n in load(model).nodes] == ["Relu", "Squeeze"]


def test_an_if_whose_condition_is_known_is_one_of_its_branches():
    def branch(op):
        return helper.make_graph([helper.make_node(op, ["x"], ["r"])], op, [], [helper.make_empty_tensor_value_info("r")])

    net = Net(opset=17, x=(2, 3))
    condition = net("Greater", net("Size", "x"), i(5))
    y = net("If", condition, then_branch=branch("Relu"), else_branch=branch("Neg"))
    net("Exp", y)
    x = helper.make_tensor_value_info("y", TensorProto.FLOAT, [2, 3])
    net.nodes[-1].output[0] = "y"
    graph = helper.make_graph(net.nodes, "g", net.inputs, [x], net.weights)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    assert [n.op for n in load(model).nodes] == ["Relu", "Exp"]


# --- bad files ---


def _external(model: onnx.ModelProto, **entries) -> onnx.ModelProto:
    tensor = model.graph.initializer[0]
    tensor.ClearField("raw_data")
    tensor.data_location = TensorProto.EXTERNAL
    for key, value in entries.items():
        tensor.external_data.add(key=key, value=str(value))
    return model


def _linear() -> onnx.ModelProto:
    net = Net(opset=17, x=(2, 3))
    return net.out(net("MatMul", "x", net.normal(3, 4))).model()


def _changed(change) -> onnx.ModelProto:
    model = _linear()
    change(model)
    return model


def _dims(model: onnx.ModelProto) -> None:
    model.graph.initializer[0].dims[0] = 7


def _cut(model: onnx.ModelProto) -> None:
    model.graph.initializer[0].raw_data = b"123"


FILES = {
    b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n": "git lfs pull",
    b"<!DOCTYPE html><html>": "a web page",
    b"PK\x03\x04\x00\x00\x08\x08archive/data.pkl": "torch.onnx.export",
    b"\x80\x02}q\x00.": "skl2onnx",
    b"\x1c\x00\x00\x00TFL3\x14\x00": "tf2onnx --tflite",
    b"\x89TCPLAN\n\x0c\x00\x00\x00": "a plan already",
    b'\x40\x00\x00\x00\x00\x00\x00\x00{"w":{"dtype":"F32"': "safetensors",
}
"""How files begin that are taken for models, and what is said of them."""


@pytest.mark.parametrize("begin", FILES, ids=FILES.get)
def test_files_of_other_kinds(begin: bytes, tmp_path: Path) -> None:
    (tmp_path / "m.onnx").write_bytes(begin)
    for given in (tmp_path / "m.onnx", begin):
        with pytest.raises(ModelError, match=f"not an ONNX file: it .*{FILES[begin]}"):
            parsed(in_memory(given))


BAD = {
    "not protobuf": (b"no model at all", ModelError, "not an ONNX file: it is something else, or was cut off"),
    "empty": (b"", ModelError, "holds no graph"),
    "truncated": (_linear().SerializeToString()[:-40], ModelError, "not an ONNX file"),
    "weights too short": (_changed(_cut), ModelError, "'w0' is broken: it has 3 bytes"),
    "shape and bytes disagree": (_changed(_dims), ModelError, "'w0' is broken: it has 48 bytes"),
    "unknown operator": (_changed(lambda m: setattr(m.graph.node[0], "op_type", "Frobnicate")), ModelError, "Frobnicate"),
    "reads what nobody wrote": (_changed(lambda m: m.graph.node[0].input.__setitem__(0, "q")), ModelError, "q"),
    "output that nobody wrote": (_changed(lambda m: setattr(m.graph.output[0], "name", "q")), ModelError, "'q'"),
    "no opset": (_changed(lambda m: m.ClearField("opset_import")), ModelError, "operator set"),
    "shapes that do not match": (_changed(lambda m: m.graph.input[0].type.tensor_type.shape.dim[1].__setattr__("dim_value", 5)),
                                 ModelError, "'n0' (MatMul) is not valid"),
    "two constants of one name": (_changed(lambda m: m.graph.initializer.append(m.graph.initializer[0])), ModelError, "'w0'"),
    "another type": (_changed(lambda m: setattr(m.graph.input[0].type.tensor_type, "elem_type", TensorProto.INT32)), ModelError,
                     "'n0' (MatMul) is not valid"),
    "outside the folder": (_external(_linear(), location="../secret"), ModelError, "outside the model's folder"),
    "absolute": (_external(_linear(), location="/etc/passwd"), ModelError, "outside the model's folder"),
    "through a link": (_external(_linear(), location="link"), ModelError, "outside the model's folder"),
    "missing": (_external(_linear(), location="nothing.bin"), ModelError, "no such file"),
    "beyond the end": (_external(_linear(), location="w.bin", offset=8), ModelError, "which has 48"),
    "a negative offset": (_external(_linear(), location="w.bin", offset=-8), ModelError, "which has 48"),
    "another length": (_external(_linear(), location="w.bin", length=40), ModelError, "needs 48 bytes"),
    "an offset that is no number": (_external(_linear(), location="w.bin", offset="x"), ModelError, "not a number"),
    "huge": (_changed(lambda m: m.graph.initializer[0].dims.__setitem__(0, 1 << 45)), UnsupportedError, "2^40"),
    "a sequence": (_changed(lambda m: m.graph.input[0].type.sequence_type.elem_type.tensor_type.__setattr__("elem_type", 1)),
                   TccompileError, "'n0' (MatMul) reads the sequence 'x'"),
    "an operator of somebody's": (_changed(lambda m: (setattr(m.graph.node[0], "domain", "com.acme"),
                                                      m.opset_import.append(helper.make_opsetid("com.acme", 1)),
                                                      m.graph.output[0].type.tensor_type.ClearField("shape"))),
                                  UnsupportedError, "'n0' (com.acme.MatMul)"),
}  # fmt: skip


FORBIDDEN = {
    "an operator that there is not": lambda node: setattr(node, "op_type", "Frobnicate"),
    "an attribute that the operator has not": lambda node: node.attribute.append(helper.make_attribute("alpha", 1.0)),
    "a value that comes later, or never": lambda node: node.input.__setitem__(0, "q"),
}


@pytest.mark.parametrize("change", FORBIDDEN.values(), ids=FORBIDDEN)
@pytest.mark.parametrize("name", ["", "my/node"])
def test_what_the_standard_forbids_is_said_with_the_node(change, name):
    model = _linear()
    (node,) = model.graph.node
    node.name = name
    change(node)
    with pytest.raises(ModelError) as error:
        load(model)
    assert (name or node.output[0]) in str(error.value) and node.op_type in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("case", BAD)
def test_bad_files(case, tmp_path):
    content, error, says = BAD[case]
    (tmp_path / "secret").write_bytes(b"x" * 48)
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "w.bin").write_bytes(b"\0" * 48)
    (folder / "link").symlink_to(tmp_path / "secret")
    path = folder / "model.onnx"
    path.write_bytes(content if isinstance(content, bytes) else content.SerializeToString())
    with pytest.raises(error) as e:
        load(path)
    assert says in str(e.value) and "\n" not in str(e.value)


def test_nodes_in_any_order():
    """ONNX Runtime takes them, but for those of graphs inside nodes, and some tools leave them so."""
    net = Net(x=(2, 3))
    y = net("Softmax", net("Relu", "x"))
    half = helper.make_node("Constant", [], ["half"], value_float=0.5)
    out = helper.make_tensor_value_info("mul", TensorProto.FLOAT, (2, 3))
    inner = helper.make_graph([half, helper.make_node("Mul", ["half", y], ["mul"])], "inner", [], [out])
    model = net.out(net("If", np.array(True), then_branch=inner, else_branch=inner)).model()
    ordered = onnx.ModelProto()
    ordered.CopyFrom(model)
    last = next(n for n in model.graph.node if n.op_type == "If")
    for graph in (model.graph, *(a.g for a in last.attribute)):
        graph.node.reverse()
    assert [n.op_type for n in model.graph.node] == ["If", "Softmax", "Relu"]
    check_same(load(model), ordered, 1e-6)
    model.graph.node[2].input[0] = y
    with pytest.raises(ModelError, match=r"\(Relu\) reads 't1', which .* \(Softmax\) computes from what .* \(Relu\)"):
        load(model)


def test_a_file_that_is_not_there():
    with pytest.raises(UsageError, match="cannot read"):
        load("nowhere.onnx")


def test_a_shape_that_depends_on_values_is_refused():
    net = Net(x=(2, 3))
    with pytest.raises(UnsupportedError, match=r"'n0' \(Unique\).*only sorted: end the model before it"):
        load(_untyped(net, net("Unique", "x", sorted=0)))


def _untyped(net: Net, y: str) -> onnx.ModelProto:
    out = helper.make_tensor_value_info(y, TensorProto.INT64, None)
    graph = helper.make_graph(net.nodes, "g", net.inputs, [out], net.weights)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def test_weights_in_a_file_of_their_own_are_mapped(tmp_path):
    model = _linear()
    expected = numpy_helper.to_array(model.graph.initializer[0]).copy()
    onnx.save(model, tmp_path / "m.onnx", save_as_external_data=True, location="w.bin", size_threshold=0)
    graph = load(tmp_path / "m.onnx")
    values = graph.nodes[0].inputs[1].values
    np.testing.assert_array_equal(values, expected)
    base = values
    while base.base is not None and not isinstance(base, np.memmap):
        base = base.base
    assert isinstance(base, np.memmap)
    cache = tmp_path / "snapshot"  # as model hubs keep files: links into a folder of blobs
    cache.mkdir()
    for name in ("m.onnx", "w.bin"):
        (cache / name).symlink_to(tmp_path / name)
    np.testing.assert_array_equal(load(cache / "m.onnx").nodes[0].inputs[1].values, expected)
    with pytest.raises(ModelError, match="give the model's path"):
        load(onnx.load(tmp_path / "m.onnx", load_external_data=False))


def _inside(tensor: TensorProto) -> dict[str, onnx.GraphProto]:
    """Graphs of one model each that computes x + tensor, which lies in a node, in a branch, or among few values of many."""
    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, (4,)) for name in "xy")
    add = helper.make_node("Add", ["x", tensor.name], ["y"])
    node = helper.make_node("Constant", [], [tensor.name], value=tensor)
    branch = helper.make_graph([add], "branch", [], [y], [tensor])
    yes = numpy_helper.from_array(i(True), "yes")
    choice = helper.make_node("If", ["yes"], ["y"], then_branch=branch, else_branch=branch)
    few = onnx.SparseTensorProto(values=tensor, indices=numpy_helper.from_array(np.arange(4)), dims=[4])
    return {
        "node": helper.make_graph([node, add], "g", [x], [y]),
        "branch": helper.make_graph([choice], "g", [x], [y], [yes]),
        "sparse": helper.make_graph([add], "g", [x], [y], sparse_initializer=[few]),
    }


@pytest.mark.parametrize("place", ["node", "branch", "sparse"])
def test_constants_inside_nodes_lie_beside_the_model_too(place, tmp_path, monkeypatch):
    """Not in the folder where the process runs, whose files ONNX would read."""
    tensor = TensorProto(name="w", data_type=TensorProto.FLOAT, dims=[4], data_location=TensorProto.EXTERNAL)
    tensor.external_data.add(key="location", value="w.bin")
    model = helper.make_model(_inside(tensor)[place], opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "m.onnx").write_bytes(model.SerializeToString())
    np.full(4, 6, f).tofile(tmp_path / "w.bin")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelError, match=r"'w' lies in 'w\.bin', and there is no such file beside the model"):
        load(folder / "m.onnx")
    np.arange(4, dtype=f).tofile(folder / "w.bin")
    (node,) = load(folder / "m.onnx").nodes
    np.testing.assert_array_equal(node.inputs[1].values, np.arange(4))


# --- real networks ---


def _shapes(model: onnx.ModelProto) -> dict[str, tuple[int, ...]]:
    return {v.name: tuple(d.dim_value or 2 for d in v.type.tensor_type.shape.dim) for v in model.graph.input}


FAST = ("resnet18", "googlenet", "densenet121", "mobilenet_v2", "espcn_x3", "deepspeech_gru", "lstm_lm")


EVERY = [n for n in CONVOLUTIONAL + RECURRENT + OTHERS if n not in ("vgg16", "resnet50", "vit_b_16")]


@pytest.mark.parametrize("name", usually(EVERY, "resnet18", "mobilenet_v2"))
def test_networks(name):
    """Every network loads and is rewritten; the lighter ones are compared with ONNX Runtime, and their recipes evaluated."""
    model = skeleton(name)
    shapes = _shapes(model)
    graph = rewrite(load(model, shapes))
    ops = Counter(n.op for n in graph.nodes)
    assert not {"BatchNormalization", "Identity", "Dropout", "Shape", "ConvTranspose", "Constant", "ConstantOfShape"} & set(ops)
    for node in graph.nodes:
        if node.op in ("Conv", "AveragePool"):
            assert all(p.op != "Pad" or p.attrs.get("mode", "constant") != "constant" for p in node.inputs[0].inputs)
        assert any(isinstance(t, gs.Variable) for t in node.inputs), f"{node.name} has constant inputs only"
        for y in node.outputs:
            assert y.dtype is not None and all(isinstance(n, int) for n in y.shape)
    if name in FAST:
        check_recipes(graph, model)
        given = feeds(model, 0, shapes)
        expected, found = reference(model, given), reference(gs.export_onnx(graph), given)
        for y, ref in expected.items():
            assert relative_error(found[y], ref) <= 2e-6


LIGHT = sorted((Path(onnx.__file__).parent / "backend" / "test" / "data" / "light").glob("light_*.onnx"))


@pytest.mark.parametrize("path", usually(LIGHT, 0, 7), ids=lambda p: p.stem)
def test_light_models(path):
    graph = rewrite(load(path))
    ops = Counter(n.op for n in graph.nodes)
    assert not {"BatchNormalization", "Dropout", "Identity", "Constant", "ConstantOfShape"} & set(ops)
    size = sum(t.values.nbytes for t in graph.tensors().values() if isinstance(t, gs.Constant))
    if size < 1e8:
        onnx.checker.check_model(gs.export_onnx(graph), full_check=True)


def test_loads_of_one_model_share_what_nodes_make_of_constants():
    """By where constants come from: two weights of the same values stay two."""
    net, w = Net(x=(np.float32, ("n", 96))), np.random.default_rng(0).integers(-9, 9, (96, 96)).astype(np.int8)
    a, b = (net("Mul", net("Cast", w, to=1), np.float32([0.5])) for _ in range(2))
    model = net.out(net("Add", net("MatMul", "x", a), net("MatMul", "x", b))).model()
    opened = read(model)
    with remembering():
        loaded = [constants_of(load(opened, {"x": (n, 96)})) for n in (2, 3)]
    alone = constants_of(load(opened, {"x": (2, 96)}))
    assert [len(c) for c in (*loaded, alone)] == [2] * 3
    for first, second, own in zip(*loaded, alone, strict=True):
        assert held(first) is held(second) and held(first) is not held(own) and np.array_equal(held(first), held(own))
        assert same(recipe_of(first), recipe_of(own)) and same(recipe_of(first), recipe_of(second))
    assert set.intersection(*(set(sources_of(recipe_of(c))) for c in loaded[0])) <= {"w1", "w3"}


def constants_of(graph):
    """Constants of many numbers, in the order in which nodes read them."""
    return [t for node in graph.nodes for t in node.inputs if isinstance(t, gs.Constant) and held(t).size > 99]


def test_neither_loading_nor_rewriting_needs_onnx_runtime():
    code = (
        "import sys; sys.modules['onnxruntime'] = None\n"
        "from tests.networks import skeleton\n"
        "from tccompile.load.model import load\nfrom tccompile.rewrites import rewrite\n"
        "print(len(rewrite(load(skeleton('style_transfer'))).nodes))\n"
    )
    root = Path(__file__).parents[1]
    env = {**os.environ, "PYTHONPATH": str(root)}
    done = subprocess.run([sys.executable, "-c", code], cwd=root, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == str(len(rewrite(load(skeleton("style_transfer"))).nodes))


def test_loads_of_one_model_ask_for_a_type_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """... by ONNX's rules, for the same types, attributes and numbers; other numbers are asked for again"""
    net = Net(x=(np.float32, ("n", 4)))
    t = "x"
    for _ in range(5):
        t = net("Reshape", net("Relu", t), np.array([-1, 4]))
    model, asked = net.out(net("Reshape", t, np.array([-1, 2]))).model(), list[str]()
    said = onnx.shape_inference.infer_node_outputs
    monkeypatch.setattr(
        onnx.shape_inference,
        "infer_node_outputs",
        lambda schema, *more, **own: asked.append(schema.name) or said(schema, *more, **own),
    )
    opened = read(model)
    with remembering():
        shapes = [load(opened, {"x": (n, 4)}).outputs[0].shape for n in (6, 6, 8)]
    assert [tuple(shape) for shape in shapes] == [(12, 2), (12, 2), (16, 2)]
    assert sorted(asked) == ["Relu", "Relu", *["Reshape"] * 4]
