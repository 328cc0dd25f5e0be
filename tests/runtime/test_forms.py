"""Sequences and optional values in and out of a session: lists, and None for what is not there."""

from __future__ import annotations

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper

from tccompile.errors import InputError, UnsupportedError, UsageError
from tccompile.pipeline import without_code
from tccompile.plan.file import from_bytes, to_bytes
from tccompile.runtime.session import Session

FLOAT = TensorProto.FLOAT
ROW, MATRIX = np.float32([1, 2, 3]), np.float32([[1, -2], [3, -4]])


def model() -> onnx.ModelProto:
    """Each tensor of a sequence negated, with one more at the end; the optional value, and whether it is there."""
    tensor = helper.make_tensor_type_proto(FLOAT, None)
    several, maybe = helper.make_sequence_type_proto(tensor), helper.make_optional_type_proto(tensor)
    body = helper.make_graph(
        [helper.make_node("Neg", ["one"], ["negative"])],
        "body",
        [helper.make_tensor_value_info("one", FLOAT, None)],
        [helper.make_tensor_value_info("negative", FLOAT, None)],
    )
    nodes = [
        helper.make_node("SequenceMap", ["x"], ["mapped"], body=body),
        helper.make_node("SequenceInsert", ["mapped", "more"], ["y"]),
        helper.make_node("OptionalHasElement", ["o"], ["there"]),
        helper.make_node("Identity", ["o"], ["same"]),
    ]
    inputs = [helper.make_value_info("x", several), helper.make_value_info("o", maybe)]
    outputs = [helper.make_value_info("y", several), helper.make_value_info("same", maybe)]
    graph = helper.make_graph(
        nodes,
        "forms",
        [*inputs, helper.make_tensor_value_info("more", FLOAT, (1,))],
        [*outputs, helper.make_tensor_value_info("there", TensorProto.BOOL, ())],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)


@pytest.mark.parametrize("there", [True, False])
def test_lists_go_in_and_out(there: bool) -> None:
    shapes = {"x[0]": (3,), "x[1]": (2, 2), **({"o": (2, 2)} if there else {})}
    plan = from_bytes(to_bytes(without_code(model(), shapes)))
    more, given = np.float32([7]), MATRIX if there else None
    with Session(plan, "cpu") as session:
        assert next(v.type for v in session.get_inputs()) == "seq(tensor(float))"
        assert [v.name for v in session.get_outputs()] == ["y", "same", "there"]
        y, same, is_there = session.run(None, {"x": [ROW, MATRIX], "o": given, "more": more})
        assert [part.tolist() for part in y] == [(-ROW).tolist(), (-MATRIX).tolist(), [7]]
        assert bool(is_there) == there and (same is None if not there else (same == MATRIX).all())
        assert session.run(["same"], {"x": (ROW, MATRIX), "o": given, "more": more})[0] is same or there
        with pytest.raises(InputError, match=r"input 'x' has 1 arrays, and the plan is for 2: .* --shape 'x\[0\]=2x3'"):
            session.run(None, {"x": [ROW], "o": given, "more": more})
        with pytest.raises(InputError, match="input 'x' is a sequence: give a list of arrays, not a ndarray"):
            session.run(None, {"x": ROW, "o": given, "more": more})


def test_shapes_are_of_the_tensors_in_it() -> None:
    with pytest.raises(UsageError, match=r"'x' is a sequence: give the shape of each of its tensors, as --shape 'x\[0\]=2x3'"):
        without_code(model(), {"x": (3,)})
    broken = model()
    broken.graph.node.append(helper.make_node("OptionalGetElement", ["o"], ["there2"], "get"))
    broken.graph.output[2].name = "there2"
    broken.graph.output[2].type.tensor_type.elem_type = FLOAT
    with pytest.raises(UnsupportedError, match=r"'get' .* reads 'o', an optional value that is not there: give its shape"):
        without_code(broken, {"x[0]": (3,)})


def test_what_is_made_optional_is_there() -> None:
    """Beside ONNX Runtime"""
    nodes = [
        helper.make_node("Neg", ["more"], ["negative"]),
        helper.make_node("Optional", ["negative"], ["o"]),
        helper.make_node("OptionalHasElement", ["o"], ["there"]),
        helper.make_node("OptionalGetElement", ["o"], ["y"]),
    ]
    outputs = [helper.make_tensor_value_info("y", FLOAT, (3,)), helper.make_tensor_value_info("there", TensorProto.BOOL, ())]
    graph = helper.make_graph(nodes, "made", [helper.make_tensor_value_info("more", FLOAT, (3,))], outputs)
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8)
    expected = onnxruntime.InferenceSession(made.SerializeToString()).run(None, {"more": ROW})
    with Session(without_code(made), "cpu") as session:
        for got, want in zip(session.run(None, {"more": ROW}), expected, strict=True):
            np.testing.assert_array_equal(got, want)


def passed_on() -> onnx.ModelProto:
    """x and its sine."""
    x, y = (helper.make_tensor_value_info(n, FLOAT, ("n", 3)) for n in "xy")
    graph = helper.make_graph([helper.make_node("Sin", ["x"], ["y"])], "passed on", [x], [x, y])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8)


@pytest.mark.parametrize("sizes", [{"shapes": {"x": (2, 3)}}, {"ranges": {"n": (1, 4)}}])
def test_an_output_that_is_an_input_is_a_copy_of_it(sizes: dict) -> None:
    plan = from_bytes(to_bytes(without_code(passed_on(), **sizes)))
    given, target = np.float32([[1, 2, 3], [1e6, -1e-6, np.inf]]), np.empty((2, 3), np.float32)
    with Session(plan, "cpu") as session:
        assert [v.name for v in session.get_outputs()] == ["x", "y"]
        assert session.get_outputs()[0] == session.get_inputs()[0]
        x, y = session.run(None, {"x": given})
        assert (x == given).all() and x is not given and np.allclose(y[0], np.sin(given[0]), atol=1e-3)
        _, x = session.run(["y", "x"], {"x": given}, {"x": target})
        assert x is target and (target == given).all()
