"""Each fusion on a small graph: it fires (op counts), near-misses do not, and the values stay what ONNX Runtime computes."""

from __future__ import annotations

import sys
import tracemalloc
from collections import Counter

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from tccompile.arch import ARCHS
from tccompile.fuse import fuse
from tccompile.ir import reference
from tccompile.ir.ops import Conv, Gemm, Mlp, Pointwise
from tccompile.ir.program import Program
from tccompile.ir.verify import verify
from tccompile.load.model import load, sources
from tccompile.lower.graph import lower
from tccompile.schedule.choose import schedule
from tests.networks import feeds
from tests.networks import reference as onnx_runtime
from tests.rewrites.common import Net

RNG = np.random.default_rng(7)


def model(nodes, inputs, weights=(), outputs=("y",)) -> onnx.ModelProto:
    """A model of `nodes` ((op, inputs, outputs, attributes)), inputs {name: shape} and weights {name: array}."""
    listed = [helper.make_node(op, i.split(), o.split(), name=f"{op}_{o.split()[0]}", **kw) for op, i, o, kw in nodes]
    graph = helper.make_graph(
        listed,
        "g",
        [helper.make_tensor_value_info(n, TensorProto.FLOAT, s) for n, s in inputs.items()],
        [helper.make_tensor_value_info(n, TensorProto.FLOAT, None) for n in outputs],
        [numpy_helper.from_array(np.asarray(v), n) for n, v in dict(weights).items()],
    )
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=9)
    return onnx.shape_inference.infer_shapes(made, data_prop=True)


def weight(*shape: int) -> np.ndarray:
    return (RNG.standard_normal(shape) / np.sqrt(max(np.prod(shape[1:]), 1))).astype(np.float32)


def fused(m: onnx.ModelProto, tolerance: float = 1e-6) -> Program:
    """The fused program, after a check that its values are those of ONNX Runtime, and its tensors' rules hold."""
    program = fuse(lower(load(m)))
    verify(program)
    feeds = {i.name: RNG.standard_normal([d.dim_value for d in i.type.tensor_type.shape.dim], np.float32) for i in m.graph.input}
    expected = onnx_runtime(m, feeds)
    got = reference.evaluate(program, feeds, sources(m))
    for name, value in expected.items():
        error = np.linalg.norm(got[name] - value) / np.linalg.norm(value)
        assert error <= tolerance, f"{name}: {error}"
    return program


def ops(program: Program) -> Counter:
    return Counter(type(op).__name__ for op in program.ops)


def test_a_chain_of_pointwise_ops_is_one():
    m = model([("Relu", "x", "a", {}), ("Exp", "a", "b", {}), ("Mul", "b x", "y", {})], {"x": (2, 5, 3)})
    assert ops(fused(m)) == {"Pointwise": 1}


def test_a_long_chain_of_reshapes_and_transpositions_is_a_few_copies():
    """Each doubles the arithmetic of what reads through it: 20 of them took 8 s, and 60 did not end."""
    nodes = [("Relu", "x", "t0", {})]
    for i in range(0, 60, 2):
        nodes += [("Transpose", f"t{i}", f"t{i + 1}", {"perm": [1, 0]}), ("Reshape", f"t{i + 1} s", f"t{i + 2}", {})]
    made = ops(fused(model([*nodes, ("Neg", "t60", "y", {})], {"x": (5, 4)}, {"s": [5, 4]})))
    assert set(made) == {"Pointwise"} and 1 < made.total() < 20


def test_a_value_read_twice_is_computed_once():
    nodes = [("Exp", "x", "a", {}), ("Relu", "a", "b", {}), ("Neg", "a", "c", {})]
    assert ops(fused(model(nodes, {"x": (2, 5)}, outputs=("b", "c")))) == {"Pointwise": 3}


def test_an_expensive_value_is_not_computed_again_for_each_copy_of_it():
    nodes = [("Exp", "x", "a", {}), ("Expand", "a s", "b", {}), ("Relu", "b", "y", {})]
    program = fused(model(nodes, {"x": (1, 5)}, {"s": np.array([64, 5], np.int64)}))
    assert ops(program) == {"Pointwise": 2}


def test_activation_residual_and_scale_go_into_the_convolution():
    nodes = [
        ("Conv", "x w b", "c", {"pads": [1, 1, 1, 1]}),
        ("Add", "c x", "d", {}),
        ("Sigmoid", "d", "s", {}),
        ("Mul", "d s", "y", {}),
    ]
    program = fused(model(nodes, {"x": (2, 9, 6, 5)}, {"w": weight(9, 9, 3, 3), "b": weight(9)}))
    assert ops(program) == {"Conv": 1, "Pointwise": 1}  # the input's layout; the output's is in the epilogue
    assert program.ops[-1].nodes == ("Conv_c", "Add_d", "Sigmoid_s", "Mul_y")


def test_two_convolutions_added_run_one_after_the_other_and_add_once():
    nodes = [("Conv", "x v", "a", {}), ("Conv", "x w", "b", {}), ("Add", "a b", "c", {}), ("Relu", "c", "y", {})]
    program = fused(model(nodes, {"x": (1, 8, 4, 4)}, {"v": weight(8, 8, 1, 1), "w": weight(8, 8, 1, 1)}))
    assert ops(program) == {"Conv": 2, "Pointwise": 1}


def test_the_longer_way_adds_the_shorter_ones_result():
    nodes = [
        ("Conv", "x w1", "a", {"pads": [1] * 4}),
        ("Conv", "a w1", "b", {"pads": [1] * 4}),
        ("Conv", "x w2", "c", {}),  # listed after b, which does not need it
        ("Add", "b c", "y", {}),
    ]
    program = fused(model(nodes, {"x": (1, 8, 6, 6)}, {"w1": weight(8, 8, 3, 3), "w2": weight(8, 8, 1, 1)}))
    adding = next(op for op in program.ops if "Add_y" in op.nodes)
    assert adding.nodes[0] == "Conv_b" and any(v.tensor == "c" for v in adding.epilogue.loads)


def test_a_residual_that_the_branch_itself_needs_is_no_cycle():
    nodes = [("Conv", "x v", "a", {}), ("Relu", "a", "r", {}), ("Conv", "r w", "b", {}), ("Add", "a b", "y", {})]
    program = fused(model(nodes, {"x": (1, 8, 4, 4)}, {"v": weight(8, 8, 1, 1), "w": weight(8, 8, 1, 1)}))
    assert ops(program) == {"Conv": 2, "Pointwise": 2}  # input's layout, and relu beside the value it is made of


def squeeze(images: int = 1, pixels: int = 1, hidden: int = 6, reads: str = "h") -> onnx.ModelProto:
    """Two 1×1 convolutions with a swish between, of the mean of 3×3 pixels for each of `pixels`²; `reads`: what y adds up."""
    nodes = [
        ("AveragePool", "x", "m", {"kernel_shape": [3, 3], "strides": [3, 3]}),
        ("Conv", "m v a", "g", {}),
        ("Sigmoid", "g", "s", {}),
        ("Mul", "g s", "h", {}),
        ("Conv", "h w b", "e", {}),
        ("Sigmoid", "e", "f", {}),
        ("ReduceSum", f"{reads} axes", "r", {"keepdims": 1}),
        ("Add", "f r", "y", {}),
    ]
    shape = images, 20, 3 * pixels, 3 * pixels
    weights = {"v": weight(hidden, 20, 1, 1), "a": weight(hidden), "w": weight(24, hidden, 1, 1), "b": weight(24)}
    return model(nodes, {"x": shape}, weights | {"axes": np.array([1, 2, 3], np.int64)})


def test_two_products_of_a_vector_are_one():
    assert ops(fused(squeeze(reads="m"))) == {"Pointwise": 1, "Pool": 1, "Mlp": 1, "Reduce": 1}
    (mlp,) = (op for op in fused(squeeze(reads="m", images=2)).ops if isinstance(op, Mlp))
    assert mlp.nodes[:3] == ("Conv_e", "Sigmoid_f", "Add_y") and mlp.b == "a"


@pytest.mark.parametrize("near", [{"reads": "h"}, {"pixels": 2}, {"hidden": 257}, {"images": 1100, "hidden": 100}])
def test_two_products_stay_apart(near):
    """What else is read of the hidden units, more pixels, more units than a block keeps, more images than are few."""
    program = fused(squeeze(**{"reads": "m", **near}))
    assert ops(program)["Mlp"] == 0 and ops(program)["Conv"] == 2


@pytest.mark.parametrize("mode", ["DCR", "CRD"])
@pytest.mark.parametrize("channels", [1, 3, 8])
def test_depth_to_space_is_an_index_in_the_store(mode, channels):
    nodes = [("Conv", "x w b", "c", {}), ("DepthToSpace", "c", "d", {"blocksize": 2, "mode": mode}), ("Tanh", "d", "y", {})]
    program = fused(model(nodes, {"x": (2, 5, 4, 3)}, {"w": weight(4 * channels, 5, 1, 1), "b": weight(4 * channels)}))
    assert ops(program) == {"Conv": 1, "Pointwise": 1}
    assert program.ops[-1].epilogue.shuffle == 2


@pytest.mark.parametrize("mode", ["DCR", "CRD"])
@pytest.mark.parametrize(("starts", "ends"), [((1, 1), (7, 5)), ((0, 3), (8, 4)), ((3, 0), (5, 6))])
def test_a_part_of_a_depth_to_space_is_a_view(mode, starts, ends):
    nodes = [
        ("Conv", "x w b", "c", {}),
        ("DepthToSpace", "c", "d", {"blocksize": 2, "mode": mode}),
        ("Slice", "d starts ends axes", "s", {}),
        ("Tanh", "s", "t", {}),
        ("Conv", "t v", "y", {"pads": [1, 1, 1, 1]}),
    ]
    weights = {"starts": np.array(starts), "ends": np.array(ends), "axes": np.array([2, 3])}
    weights |= {"w": weight(36, 5, 1, 1), "b": weight(36), "v": weight(3, 9, 3, 3)}
    program = fused(model(nodes, {"x": (2, 5, 4, 3)}, weights))
    assert ops(program) == {"Conv": 2, "Pointwise": 1}
    first, second = (op for op in program.ops if isinstance(op, Conv))
    assert first.epilogue.shuffle == 2 and program.tensors[second.x].base == first.y


def test_a_part_of_a_depth_to_space_that_is_an_output_is_copied():
    nodes = [
        ("Conv", "x w", "c", {}),
        ("DepthToSpace", "c", "d", {"blocksize": 2}),
        ("Slice", "d starts ends axes", "y", {}),
    ]
    weights = {"starts": np.array((1, 1)), "ends": np.array((7, 5)), "axes": np.array([2, 3]), "w": weight(12, 5, 1, 1)}
    assert ops(fused(model(nodes, {"x": (2, 5, 4, 3)}, weights))) == {"Conv": 1, "Pointwise": 2}


def test_depth_to_space_of_a_value_that_is_also_used_otherwise_stays():
    nodes = [("Conv", "x w", "c", {}), ("DepthToSpace", "c", "y", {"blocksize": 2}), ("Relu", "c", "z", {})]
    program = fused(model(nodes, {"x": (1, 5, 4, 3)}, {"w": weight(8, 5, 1, 1)}, ("y", "z")))
    assert all(op.epilogue.shuffle == 1 for op in program.ops)


def test_flattening_an_image_reorders_the_weights():
    nodes = [("MaxPool", "x", "p", {"kernel_shape": [2, 2]}), ("Flatten", "p", "f", {}), ("Gemm", "f w b", "y", {"transB": 1})]
    program = fused(model(nodes, {"x": (3, 16, 5, 4)}, {"w": weight(7, 16 * 4 * 3), "b": weight(7)}))
    assert ops(program) == {"Pointwise": 1, "Pool": 1, "Gemm": 1}
    (gemm,) = (op for op in program.ops if isinstance(op, Gemm))
    assert program.tensors[gemm.a].base is not None


def test_flattening_an_image_with_padded_channels_copies():
    nodes = [("MaxPool", "x", "p", {"kernel_shape": [2, 2]}), ("Flatten", "p", "f", {}), ("Gemm", "f w", "y", {"transB": 1})]
    program = fused(model(nodes, {"x": (3, 12, 5, 4)}, {"w": weight(7, 12 * 4 * 3)}))
    assert ops(program) == {"Pointwise": 2, "Pool": 1, "Gemm": 1}


CONCAT = [("Conv", "x v", "a", {}), ("Conv", "x w", "b", {}), ("Concat", "a b", "c", {"axis": 1}), ("Conv", "c u", "y", {})]


@pytest.mark.parametrize(("first", "second"), [(16, 8), (8, 12), (12, 8), (3, 5)])
def test_concatenated_convolutions_write_into_one_tensor(first, second):
    weights = {"v": weight(first, 8, 1, 1), "w": weight(second, 8, 1, 1), "u": weight(40, first + second, 3, 3)}
    program = fused(model(CONCAT, {"x": (2, 8, 6, 6)}, weights))
    assert ops(program)["Pointwise"] == 2  # the layouts of input and output (40 channels are too many to scatter)
    a, b, _ = (program.tensors[op.y] for op in program.ops if isinstance(op, Conv))
    gap = -first % 8 if (first, second) == (12, 8) else 0  # where as many zeros as channels would come in, there is none
    assert a.base == b.base == "c" and b.offset == first + gap and a.padded[1] == first + gap


@pytest.mark.parametrize("channels", [(12, 20, 7), (20, 16, 9), (13, 12, 12)])
@pytest.mark.parametrize("window", [1, 3])
def test_parts_that_fill_no_vectors_get_gaps_and_the_weights_zeros(channels, window):
    nodes = [("Conv", f"x w{i}", f"c{i}", {}) for i in range(3)] + [("Relu", f"c{i}", f"r{i}", {}) for i in range(3)]
    nodes += [("Concat", "r0 r1 r2", "c", {"axis": 1}), ("Conv", "c u b", "y", {"pads": [window // 2] * 4})]
    nodes += [("Conv", "c u b", "z", {"strides": [2, 2]}), ("MaxPool", "r1", "p", {"kernel_shape": [2, 2]})]
    weights = {f"w{i}": weight(n, 8, 1, 1) for i, n in enumerate(channels)}
    weights |= {"u": weight(40, sum(channels), window, window), "b": weight(40)}
    program = fused(model(nodes, {"x": (2, 8, 6, 7)}, weights, ("y", "z", "p")))
    parts = sorted((t for t in program.tensors.values() if t.base == "c"), key=lambda t: t.offset)
    room = [-(-n // 8) * 8 for n in channels]
    assert [t.offset for t in parts] == [0, room[0], room[0] + room[1]] and [t.padded[1] for t in parts] == room
    assert all(program.tensors[op.w].shape[1] == sum(room) for op in program.ops if isinstance(op, Conv) and op.x == "c")


@pytest.mark.parametrize("reader", ["MaxPool", "Relu", "grouped", "output"])
def test_what_is_not_only_convolved_has_no_gaps(reader):
    nodes = [("Conv", "x v", "a", {}), ("Conv", "x w", "b", {}), ("Concat", "a b", "c", {"axis": 1}), ("Conv", "c u", "y", {})]
    more = {
        "MaxPool": [("MaxPool", "c", "z", {"kernel_shape": [2, 2]})],
        "Relu": [("Relu", "c", "z", {})],
        "grouped": [("Conv", "c g", "z", {"group": 2})],
        "output": [],
    }[reader]
    weights = {"v": weight(12, 8, 1, 1), "w": weight(12, 8, 1, 1), "u": weight(9, 24, 1, 1), "g": weight(8, 12, 1, 1)}
    outputs = ("y", "c") if reader == "output" else ("y", "z")
    program = fused(model([*nodes, *more], {"x": (2, 8, 6, 7)}, weights, outputs))
    assert program.tensors["c"].shape[1] == 24


def test_a_concatenation_that_grows_is_one_tensor_seen_in_parts():
    """As in DenseNet: every layer reads all that came before."""
    nodes = [
        ("Conv", "x u", "a", {}),
        ("Conv", "a v", "b", {}),
        ("Concat", "a b", "ab", {"axis": 1}),
        ("Conv", "ab w", "c", {}),
        ("Concat", "a b c", "abc", {"axis": 1}),
        ("GlobalAveragePool", "abc", "y", {}),
    ]
    weights = {"u": weight(16, 8, 1, 1), "v": weight(8, 16, 1, 1), "w": weight(8, 24, 1, 1)}
    program = fused(model(nodes, {"x": (1, 8, 5, 5)}, weights))
    owners = {program.tensors[op.y].storage for op in program.ops if isinstance(op, Conv)}
    assert len(owners) == 1 and ops(program)["Pointwise"] == 1


TOKENS = [
    ("MatMul", "x w", "p", {}),
    ("Concat", "first p", "c", {"axis": 1}),
    ("Add", "c positions", "d", {}),
    ("Relu", "d", "e", {}),
    ("MatMul", "e v", "y", {}),
]
TOKEN_SHAPES = {"w": (16, 24), "first": (2, 1, 24), "positions": (1, 8, 24), "v": (24, 8)}
TOKEN_WEIGHTS = {
    name: np.random.default_rng(i).standard_normal(s, np.float32) / 4 for i, (name, s) in enumerate(TOKEN_SHAPES.items())
}


def test_what_is_computed_of_a_concatenation_is_computed_of_its_parts():
    """The product writes its tokens, their positions added, beside the first one"""
    program = fused(model(TOKENS, {"x": (2, 7, 16)}, TOKEN_WEIGHTS))
    assert ops(program) == {"Pointwise": 2, "Gemm": 2}  # the input in fp16, and the first token
    product = next(op for op in program.ops if isinstance(op, Gemm))
    assert program.tensors[product.y].base is not None and {"MatMul_p", "Add_d", "Relu_e"} <= set(product.nodes)


def test_a_concatenation_with_another_reader_is_one_tensor():
    more = [*TOKENS[:-1], ("Mul", "c e", "f", {}), ("MatMul", "f v", "y", {})]
    program = fused(model(more, {"x": (2, 7, 16)}, TOKEN_WEIGHTS))
    assert ops(program) == {"Pointwise": 3, "Gemm": 2}  # and all that reads the concatenation
    more = [*TOKENS, ("Relu", "p", "q", {}), ("MatMul", "q v", "z", {})]
    program = fused(model(more, {"x": (2, 7, 16)}, TOKEN_WEIGHTS, outputs=("y", "z")))
    assert ops(program)["Pointwise"] == 4  # the tokens are read by themselves: they lie in the concatenation


def test_a_part_is_shifted_to_what_it_meets_of_the_others():
    nodes = [
        ("Conv", "x v", "a", {}), ("Conv", "x w", "b", {}), ("Concat", "a b", "c", {"axis": 1}),
        ("Mul", "c s", "d", {}), ("Sigmoid", "d", "e", {}), ("Conv", "e u", "y", {}),
    ]  # fmt: skip
    weights = {"v": weight(8, 5, 1, 1), "w": weight(16, 5, 1, 1), "s": weight(1, 24, 6, 4) + 1, "u": weight(3, 24, 1, 1)}
    program = fused(model(nodes, {"x": (2, 5, 6, 4)}, weights))
    assert ops(program) == {"Pointwise": 1, "Conv": 3}  # the input's layout


def patches(channels: int, first: bool, batch: int = 2) -> onnx.ModelProto:
    """An image's patches as tokens, beside a first one or not, with their positions added"""
    rng = np.random.default_rng(5)
    weights = {"w": (channels, 3, 2, 2), "b": (channels,), "one": (batch, 1, channels), "p": (1, 12 + first, channels)}
    values = {name: rng.standard_normal(shape, np.float32) / 3 for name, shape in weights.items()}
    nodes = [
        ("Conv", "x w b", "c", {"strides": [2, 2]}),
        ("Reshape", "c shape", "r", {}),
        ("Transpose", "r", "t", {"perm": [0, 2, 1]}),
        ("Concat", "one t", "k", {"axis": 1}),
        ("Add", ("k" if first else "t") + " p", "e", {}),
        ("MatMul", "e v", "y", {}),
    ]
    if not first:
        del nodes[3], values["one"]
    more = {"shape": np.array([batch, channels, 12]), "v": rng.standard_normal((channels, 8), np.float32)}
    return model(nodes, {"x": (batch, 3, 6, 8)}, values | more)


@pytest.mark.parametrize("batch", [1, 2])
def test_a_convolution_writes_tokens_among_others(batch):
    program = fused(patches(16, first=True, batch=batch))
    assert ops(program) == {"Pointwise": 2, "Conv": 1, "Gemm": 1}  # the input's columns and the first token
    conv = next(op for op in program.ops if isinstance(op, Conv))
    y = program.tensors[conv.y]
    assert (y.base, y.shape, y.strides[1:], y.offset) == ("e", (batch, 16, 3, 4), (1, 64, 16), 16) and "Add_e" in conv.nodes


@pytest.mark.parametrize("batch", [1, 2])
def test_a_convolution_adds_what_a_matrix_of_its_pixels_is_added_to(batch):
    program = fused(patches(16, first=False, batch=batch))
    assert ops(program) == {"Pointwise": 1, "Conv": 1, "Gemm": 1}
    assert program.tensors["e"].base is not None


def test_tokens_with_padding_are_written_too_and_those_that_begin_in_a_vector_are_copied():
    assert ops(fused(patches(12, first=True)))["Pointwise"] == 2
    beside = patches(12, first=True)
    graph = beside.graph
    concat = next(node for node in graph.node if node.op_type == "Concat")
    concat.attribute[0].i = 2
    sizes = {"one": (2, 12, 12), "p": (1, 12, 24), "v": (24, 8)}
    for tensor in graph.initializer:
        if tensor.name in sizes:
            values = np.random.default_rng(6).standard_normal(sizes[tensor.name], np.float32)
            tensor.CopyFrom(numpy_helper.from_array(values, tensor.name))
    del graph.value_info[:]
    assert ops(fused(onnx.shape_inference.infer_shapes(beside, data_prop=True)))["Pointwise"] == 3


def test_a_concatenation_that_is_a_model_output_is_copied():
    nodes = [("Conv", "x v", "a", {}), ("Conv", "x w", "b", {}), ("Concat", "a b", "y", {"axis": 1})]
    fused(model(nodes, {"x": (1, 8, 4, 4)}, {"v": weight(8, 8, 1, 1), "w": weight(8, 8, 1, 1)}))


def test_the_same_tensor_twice_in_a_concatenation():
    nodes = [("Conv", "x v", "a", {}), ("Concat", "a a", "c", {"axis": 1}), ("Conv", "c w", "y", {})]
    fused(model(nodes, {"x": (1, 8, 4, 4)}, {"v": weight(8, 8, 1, 1), "w": weight(8, 16, 1, 1)}))


@pytest.mark.parametrize(("split", "views"), [([8, 16], 2), ([12, 12], 1)])
def test_parts_of_the_channels_are_views_where_they_stay_aligned(split, views):
    nodes = [("Conv", "x v", "a", {}), ("Split", "a s", "b c", {"axis": 1}), ("Conv", "b w", "d", {}), ("Conv", "c u", "e", {})]
    nodes.append(("Add", "d e", "y", {}))
    weights = {
        "v": weight(24, 8, 1, 1),
        "s": np.array(split, np.int64),
        "w": weight(8, split[0], 1, 1),
        "u": weight(8, split[1], 1, 1),
    }
    program = fused(model(nodes, {"x": (1, 8, 4, 4)}, weights))
    read = [program.tensors[op.x] for op in program.ops if isinstance(op, Conv)][1:]
    assert sum(t.base is not None for t in read) == (2 if views == 2 else 0)


@pytest.mark.parametrize(("before", "after"), [((4, 6, 16), (24, 16)), ((24, 16), (4, 6, 16)), ((2, 3, 16), (3, 2, 16))])
def test_reshaping_rows_is_a_view(before, after):
    nodes = [("MatMul", "x v", "a", {}), ("Reshape", "a s", "b", {}), ("MatMul", "b w", "y", {})]
    m = model(nodes, {"x": before}, {"v": weight(16, 16), "s": np.array(after, np.int64), "w": weight(16, 5)})
    assert ops(fused(m))["Gemm"] == 2 and ops(fused(m))["Pointwise"] == 1  # the input's precision


def test_a_padded_copy_of_a_function_keeps_zeros_outside():
    """exp(0) is 1: a constant pad after exp must read its fill, not exp of the padding."""
    nodes = [("Exp", "x", "a", {}), ("Pad", "a p", "y", {})]
    fused(model(nodes, {"x": (1, 3, 4, 4)}, {"p": np.array([0, 0, 1, 1, 0, 0, 1, 1], np.int64)}))


def test_a_matrix_product_takes_over_what_follows_under_other_names_of_its_axes():
    nodes = [
        ("Conv", "x w", "c", {}),
        ("Transpose", "c", "t", {"perm": [0, 2, 3, 1]}),
        ("MatMul", "t m", "p", {}),
        ("Transpose", "p", "u", {"perm": [0, 3, 1, 2]}),
        ("Mul", "u s", "v", {}),
        ("Add", "v c", "d", {}),
        ("Conv", "d w2", "y", {}),
    ]
    weights = {"w": weight(24, 3, 3, 3), "m": weight(24, 24), "s": weight(24, 1, 1), "w2": weight(4, 24, 1, 1)}
    program = fused(model(nodes, {"x": (2, 3, 7, 6)}, weights))
    (gemm,) = [op for op in program.ops if isinstance(op, Gemm)]
    assert "Add_d" in gemm.nodes
    assert program.tensors["d"].base == gemm.y
    assert ops(program)["Gemm"] == 1 and all("Add_d" not in op.nodes for op in program.ops if op is not gemm)


def test_a_product_in_another_order_of_memory_stays_apart():
    nodes = [("MatMul", "x m", "p", {}), ("Transpose", "p", "u", {"perm": [0, 2, 1]}), ("Add", "u z", "y", {})]
    program = fused(model(nodes, {"x": (2, 9, 16), "z": (2, 24, 9)}, {"m": weight(16, 24)}))
    (gemm,) = [op for op in program.ops if isinstance(op, Gemm)]
    assert len(gemm.nodes) == 1


def padded(
    mode: str, pads: tuple[int, ...], size: tuple[int, int] = (9, 11), more=(), value: float = 1.5, **kw
) -> onnx.ModelProto:
    """conv(pad(relu(conv(x)))), the pads given as ONNX does for two axes."""
    nodes = [
        ("Conv", "x w", "c", {"pads": [1, 1, 1, 1]}),
        ("Relu", "c", "r", {}),
        ("Pad", "r p value" if mode == "constant" else "r p", "q", {"mode": mode}),
        ("Conv", "q v", "y", {}),
    ]
    weights = {"w": weight(12, 3, 3, 3), "v": weight(4, 12, 3, 3), "p": np.array([0, 0, *pads[:2], 0, 0, *pads[2:]])}
    weights |= {"value": np.float32(value)}
    return model([*nodes, *more], {"x": (2, 3, *size)}, weights, **kw)


@pytest.fixture
def every_image_is_large(monkeypatch):
    monkeypatch.setattr("tccompile.fuse.pad.LARGE", 1)
    monkeypatch.setattr("tccompile.fuse.pad.BORDER", 0.7)


@pytest.mark.parametrize("mode", ["reflect", "edge", "wrap", "constant"])
@pytest.mark.parametrize(("pads", "strips"), [((1, 1, 1, 1), 4), ((2, 0, 1, 3), 3), ((0, 4, 0, 0), 1)])
def test_an_image_is_written_into_the_middle_of_a_padded_one(every_image_is_large, mode, pads, strips):
    program = fused(padded(mode, pads))
    assert ops(program) == {"Conv": 2, "Pointwise": 1 + strips}
    first, second = (op for op in program.ops if isinstance(op, Conv))
    assert first.nodes == ("Conv_c", "Relu_r") and program.tensors[first.y].base == second.x


def test_a_small_image_is_padded_in_one_piece():
    assert ops(fused(padded("reflect", (1, 1, 1, 1)))) == {"Conv": 2, "Pointwise": 2}


def test_what_is_padded_twice_can_only_lie_in_one(every_image_is_large):
    more = [("Pad", "r p", "s", {"mode": "edge"}), ("Conv", "s v", "z", {})]
    program = fused(padded("reflect", (1, 1, 1, 1), more=more, outputs=("y", "z")))
    assert ops(program) == {"Conv": 3, "Pointwise": 1 + 4 + 1}


def test_what_a_concatenation_wants_is_padded_in_one_piece(every_image_is_large):
    more = [("Concat", "r c", "s", {"axis": 1}), ("Conv", "s u", "z", {})]
    m = padded("reflect", (1, 1, 1, 1), more=more, outputs=("y", "z"))
    m.graph.initializer.append(numpy_helper.from_array(weight(4, 24, 1, 1), "u"))
    program = fused(m)
    assert sum("Pad_q" in op.nodes for op in program.ops) == 1


def test_looking_at_padding_takes_no_memory_for_each_element():
    """A tensor that nobody could store: how its elements lie is asked of expressions, not of all its indices."""
    nodes = [("Relu", "x", "r", {}), ("Pad", "r p", "q", {"mode": "edge"}), ("Relu", "q", "y", {})]
    m = model(nodes, {"x": (1 << 29,)}, {"p": np.array([1, 1])})
    tracemalloc.start()
    program = fuse(lower(load(m)))
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < 1 << 26 and program.tensors["y"].shape == ((1 << 29) + 2,)


def test_a_model_input_is_padded_in_one_piece(every_image_is_large):
    nodes = [("Pad", "x p", "q", {"mode": "reflect"}), ("MaxPool", "q", "y", {"kernel_shape": [2, 2]})]
    m = model(nodes, {"x": (1, 8, 6, 7)}, {"p": np.array([0, 0, 1, 1, 0, 0, 1, 1])})
    assert ops(fused(m)) == {"Pointwise": 1, "Pool": 1}


def test_padding_of_channels_is_a_copy(every_image_is_large):
    nodes = [("Conv", "x w", "c", {}), ("Pad", "c p", "q", {"mode": "edge"}), ("Conv", "q v", "y", {})]
    m = model(
        nodes, {"x": (1, 8, 9, 9)}, {"w": weight(16, 8, 1, 1), "v": weight(3, 24, 1, 1), "p": np.array([0, 8, 0, 0, 0, 0, 0, 0])}
    )
    assert ops(fused(m)) == {"Conv": 2, "Pointwise": 2}


def test_heads_of_projections_are_views():
    net = Net(x=(2, 9, 48))
    heads = []
    for _ in range(3):
        y = net("Add", net("MatMul", "x", net.normal(48, 32, scale=0.2)), net.normal(32))
        heads.append(net("Transpose", net("Reshape", y, np.array([2, 9, 4, 8])), perm=[0, 2, 1, 3]))
    y = net("Reshape", net("Transpose", net("Attention", *heads), perm=[0, 2, 1, 3]), np.array([2, 9, 32]))
    p = fused(net.out(net("MatMul", y, net.normal(32, 48))).model(), 2e-6)
    assert ops(p) == {"Gemm": 2, "Attention": 1, "Pointwise": 1}  # the input as the program holds it
    (attention,) = (op for op in p.ops if type(op).__name__ == "Attention")
    parts = [p.tensors[name] for name in (attention.q, attention.k, attention.v)]
    assert [t.strides for t in parts] == [(9 * 96, 8, 96, 1)] * 3 and [t.offset for t in parts] == [0, 32, 64]


JOINED = {
    "of one input": (2, {}),
    "of one input, k and v narrower": (2, {"groups": 2}),
    "k and v of another input": (3, {"inputs": "xzz"}),
    "q with a function": (3, {"also": "Relu"}),
    "all of other inputs": (4, {"inputs": "xzt"}),
    "q read by something else": (3, {"output": True}),
    "parts that begin within rows": (4, {"size": 9}),
}
"""Products beside an attention, that after it included, by what differs."""


@pytest.mark.parametrize("name", JOINED)
def test_products_that_one_attention_reads_are_one(name: str) -> None:
    products, how = JOINED[name]
    inputs, also, groups, size = how.get("inputs", "xxx"), how.get("also"), how.get("groups", 4), how.get("size", 8)
    net = Net(**dict.fromkeys(sorted({*inputs}), (2, 9, 48)))
    heads, output = [], None
    for k, x in enumerate(inputs):
        n = groups if k else 4
        y = net("Add", net("MatMul", x, net.normal(48, n * size, scale=0.2)), net.normal(n * size))
        y = net(also, y) if also and not k else y
        output = net("Neg", y) if how.get("output") and not k else output
        heads.append(net("Transpose", net("Reshape", y, np.array([2, 9, n, size])), perm=[0, 2, 1, 3]))
    y = net("Reshape", net("Transpose", net("Attention", *heads), perm=[0, 2, 1, 3]), np.array([2, 9, 4 * size]))
    net.out(net("MatMul", y, net.normal(4 * size, 48)))
    if output:
        net.out(output)
    assert ops(fused(net.model(), 3e-6))["Gemm"] == products


def test_heads_that_are_no_multiple_of_8_are_copied():
    net = Net(x=(2, 9, 48))
    y = net("Reshape", net("MatMul", "x", net.normal(48, 24)), np.array([2, 9, 4, 6]))
    p = fused(net.out(net("Softmax", net("Transpose", y, perm=[0, 2, 1, 3]))).model(), 2e-6)
    assert ops(p)["Pointwise"] == 2


def test_channels_stay_innermost_where_pixels_become_a_sequence():
    net = Net(x=(2, 8, 6, 5))
    y = net("Reshape", net("Conv", "x", net.normal(16, 8, 3, 3), kernel_shape=[3, 3]), np.array([2, 16, 12]))
    p = fused(net.out(net("LayerNormalization", net("Transpose", y, perm=[0, 2, 1]), net.normal(16))).model(), 2e-6)
    assert ops(p) == {"Conv": 1, "Norm": 1, "Pointwise": 1}


def test_a_product_of_one_column_stays_apart_from_what_pads_its_rows():
    """The result of the activation is padded along its rows, which no kernel of a product does."""
    net = Net(x=(2, 5, 6))
    column = net("Tanh", net("MatMul", "x", net.normal(6, 1)))
    program = fused(net.out(net("Mul", column, "x"), net("Softmax", column, axis=1)).model())
    assert ops(program)["Pointwise"] >= 2
    schedule(program, ARCHS["sm_61"])


def test_attention_stays_apart_from_an_image_of_one_head():
    """An image's padding lies along its channels; Attention's kernels write theirs along the elements of a head."""
    net = Net(x=(2, 1, 5, 8))
    y = net("Attention", "x", net("Relu", "x"), "x")
    program = fused(net.out(net("Conv", y, net.normal(8, 1, 2, 2))).model(), 2e-6)
    schedule(program, ARCHS["sm_61"])


def test_rows_at_more_than_three_strides_are_copied():
    """Channels shuffled ahead of a product: as a view its rows would lie at four."""
    net = Net(x=(2, 8, 3, 5))
    x = net("Relu", "x")
    y = net("Transpose", net("Reshape", x, np.array([2, 4, 2, 3, 5])), perm=[0, 2, 1, 3, 4])
    program = fused(net.out(net("MatMul", y, net.normal(5, 6)), net("Softmax", x)).model(), 2e-6)
    schedule(program, ARCHS["sm_61"])


def test_matrices_of_a_batch_at_more_than_two_strides_are_copied():
    net = Net(x=(2, 8, 3, 5))
    y = net("Transpose", net("Reshape", net("Relu", "x"), np.array([2, 4, 2, 3, 5])), perm=[2, 1, 0, 3, 4])
    program = fused(net.out(net("MatMul", y, net("Transpose", y, perm=[0, 1, 2, 4, 3]))).model(), 2e-6)
    schedule(program, ARCHS["sm_61"])


def test_pixels_of_blocks_stay_apart_from_the_rows_of_a_product():
    """Rows of two pixels are padded to eight; a convolution's kernels write padding along channels only."""
    net = Net(x=(2, 9, 13, 2))
    y = net("DepthToSpace", net("Conv", "x", net.normal(16, 9, 3, 2)), blocksize=2)
    program = fused(net.out(net("MatMul", y, net.normal(2, 7))).model(), 2e-6)
    schedule(program, ARCHS["sm_61"])


# --- Channel shuffles --------------------------------------------------------------------------------------------------------


def shuffled(x: str, y: str, shape: tuple[int, ...], groups: int) -> tuple[list, dict[str, np.ndarray]]:
    """The nodes of a channel shuffle from x to y, and their constants."""
    n, c, *space = shape
    axes = [0, 2, 1, *range(3, len(shape) + 1)]
    nodes = [("Reshape", f"{x} {y}.in", f"{y}.a", {}), ("Transpose", f"{y}.a", f"{y}.b", {"perm": axes})]
    shapes = {f"{y}.in": np.array([n, groups, c // groups, *space]), f"{y}.out": np.array(shape)}
    return [*nodes, ("Reshape", f"{y}.b {y}.out", y, {})], shapes


@pytest.mark.parametrize("space", [(6, 7), (9,)])
def test_a_shuffle_of_channels_goes_into_the_weights(space):
    shape = (2, 24, *space)
    nodes, shapes = shuffled("c", "d", shape, 3)
    conv = ("Conv", "x w b", "a", {"pads": [1] * 2 * len(space)})
    nodes = [conv, ("Relu", "a", "c", {}), *nodes, ("Add", "d x", "e", {}), ("Sigmoid", "e", "f", {}), ("Conv", "f u", "y", {})]
    weights = {"w": weight(24, 24, *[3] * len(space)), "b": weight(24), "u": weight(40, 24, *[1] * len(space))}
    program = fused(model(nodes, {"x": shape}, weights | shapes))
    assert ops(program) == {"Conv": 2, "Pointwise": 2}  # the layouts of input and output


@pytest.mark.parametrize("case", ["grouped", "read twice", "before it an image", "a channel twice"])
def test_a_shuffle_of_channels_that_stays(case):
    nodes, shapes = shuffled("c", "d", (1, 24, 6, 7), 3)
    groups, before = (2 if case == "grouped" else 1), "Add" if case == "before it an image" else "Mul"
    scale = "x" if case == "before it an image" else "s"
    nodes = [("Conv", "x w", "a", {"group": groups}), (before, f"a {scale}", "c", {}), *nodes]
    nodes += [("MaxPool", "d", "y", {"kernel_shape": [2, 2]})]
    weights = {"w": weight(24, 24 // groups, 1, 1), "s": weight(1, 24, 1, 1)} | shapes
    outputs = ("y",)
    if case == "read twice":
        nodes, outputs = [*nodes, ("MaxPool", "c", "z", {"kernel_shape": [2, 2]})], ("y", "z")
    if case == "a channel twice":
        nodes[2:5] = [("Gather", "c i", "d", {"axis": 1})]
        weights["i"] = np.array([0, *range(23)])
    program = fused(model(nodes, {"x": (1, 24, 6, 7)}, weights, outputs))
    assert ops(program)["Pointwise"] == 3 + (case == "read twice")


def test_an_image_in_another_layout_is_copied_for_a_convolution():
    """A shuffled image that is added to what a convolution makes of it: Tensor Cores read its channels side by side."""
    nodes, shapes = shuffled("a", "d", (1, 24, 6, 7), 3)
    nodes = [("Conv", "x v", "a", {}), *nodes]
    nodes += [("Conv", "d u", "e", {}), ("Add", "e d", "f", {}), ("MaxPool", "a", "z", {"kernel_shape": [2, 2]})]
    weights = {"v": weight(24, 24, 1, 1), "u": weight(24, 24, 1, 1)} | shapes
    program = fused(model(nodes, {"x": (1, 24, 6, 7)}, weights, ("f", "z")))
    assert all(program.tensors[op.x].strides[1] == 1 for op in program.ops if isinstance(op, Conv))


@pytest.mark.parametrize("half", [0, 1])
@pytest.mark.parametrize("channels", [58, 24, 20])
def test_channels_of_a_shuffled_image_are_read_where_they_are(channels, half):
    """As in a ShuffleNet of the second version: of two halves shuffled, one is convolved, the other one goes on as it is."""
    shape = (2, 2 * channels, 6, 5)
    nodes, shapes = shuffled("c", "d", shape, 2)
    parts = ["p q", "q p"][half]
    nodes = [("Conv", "x v", "a", {}), ("Relu", "x", "b", {}), ("Concat", "a b", "c", {"axis": 1}), *nodes]
    nodes += [("Split", "d", parts, {"num_outputs": 2, "axis": 1}), ("Conv", "p w", "e", {"pads": [1] * 4, "strides": [2, 1]})]
    nodes += [("AveragePool", "q", "f", {"kernel_shape": [3, 3], "pads": [1] * 4, "strides": [2, 1]})]
    weights = {"v": weight(channels, channels, 1, 1), "w": weight(channels, channels, 3, 3)} | shapes
    program = fused(model(nodes, {"x": (2, channels, 6, 5)}, weights, ("e", "f")))
    convs = [op for op in program.ops if isinstance(op, Conv)]
    assert convs[1].x == "c" and program.tensors[convs[1].w].shape[1] == 2 * channels
    assert not {"d", "p"} & {op.y for op in program.ops}


@pytest.mark.parametrize(
    ("case", "copied"), [("few", 0), ("3x3 of many", 1), ("grouped", 1), ("pooled too", 1), ("a channel twice", 1)]
)
def test_channels_that_are_copied_for_a_convolution(case, copied):
    nodes = [("Conv", "x v", "a", {}), ("Gather", "a i", "b", {"axis": 1}), ("Conv", "b w", "y", {"pads": [1] * 4})]
    order, outputs = np.arange(3, 27), ("y",)
    weights = {"v": weight(48, 8, 1, 1), "w": weight(60 if case == "3x3 of many" else 8, 24, 3, 3)}
    if case == "grouped":
        nodes[2] = ("Conv", "b w", "y", {"pads": [1] * 4, "group": 2})
        weights["w"] = weight(8, 12, 3, 3)
    if case == "pooled too":
        nodes, outputs = [*nodes, ("MaxPool", "b", "z", {"kernel_shape": [2, 2]})], ("y", "z")
    if case == "a channel twice":
        order = np.array([0, *range(23)])
    program = fused(model(nodes, {"x": (1, 8, 6, 7)}, weights | {"i": order}, outputs))
    assert ("b" in {op.y for op in program.ops}) == copied


def test_what_reads_neighbours_in_other_parts_is_computed_of_the_whole():
    """Local response normalization: an element's neighbouring channels lie in both parts."""
    net = Net(x=(1, 12, 4, 13))
    x = net("Concat", "x", "x", axis=1)
    program = fused(net.out(net("GlobalAveragePool", net("LRN", x, size=3, alpha=0.1))).model())
    assert ops(program) == {"Pointwise": 3, "Reduce": 1}


def rows_put_back(n: int = 13, m: int = 12, width: int = 40, each: bool = False, reduction: str = "none") -> Net:
    """What torchvision does with regions of several sizes: an index, expanded to whole rows or another one for `each` element."""
    net = Net(x=(n, width), u=(m, width), i=(m, width if each else 1))
    index = net("Expand", net("Cast", "i", to=TensorProto.INT64), np.array([m, width]))
    return net.out(net("Neg", net("ScatterElements", net("Relu", "x"), index, "u", axis=0, reduction=reduction)))


@pytest.mark.parametrize("low", [0, -13])
def test_rows_that_are_scattered_are_read_where_they_lie(low: int) -> None:
    """The last one of those that go to the same place; those that nothing goes to stay."""
    m = rows_put_back().model()
    program, rng = fuse(lower(load(m))), np.random.default_rng(0)
    verify(program)
    assert ops(program) == {"Pointwise": 4, "Reduce": 1}
    inputs = feeds(m, 0) | {"i": rng.integers(low, 13, (12, 1)).astype(np.float32)}
    (got,), (want,) = (r.values() for r in (reference.evaluate(program, inputs, sources(m)), onnx_runtime(m, inputs)))
    assert np.array_equal(got, want)


@pytest.mark.parametrize("near", [{"m": 6}, {"width": 31}, {"each": True}, {"reduction": "add"}, {"n": 2050, "m": 2048}])
def test_other_updates_are_scattered(near: dict) -> None:
    """Of few of the rows, of short ones, of elements, of sums, of more rows than are compared with each other."""
    assert ops(fuse(lower(load(rows_put_back(**near).model()))))["Scatter"] == 1


def test_a_token_of_sums_leaves_them_to_their_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """However large what it is taken of: it would read each product beside the sum."""
    monkeypatch.setattr(sys.modules["tccompile.fuse.compose"], "LARGE", 1)
    net = Net(x=(2, 65, 16))
    y = net("MatMul", "x", net.normal(16, 16))
    for _ in range(2):
        y = net("Add", y, net("MatMul", net("Tanh", y), net.normal(16, 16)))
    token = net("Tanh", net("Gather", net("Mul", y, net.normal(16)), np.array(0), axis=1))
    program = fused(net.out(net("MatMul", token, net.normal(16, 8)), net("Tanh", y)).model(), 2e-6)
    sums = [op for op in program.ops if isinstance(op, Pointwise) and op.epilogue.expr.fn == "add"]
    assert not sums and sum(len(op.epilogue.loads) > 0 for op in program.ops if isinstance(op, Gemm)) >= 2
