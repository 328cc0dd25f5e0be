"""Values that come when the model runs: each input of ONNX's operators that decides a shape or a meaning is given late.

The model says what shape its result has, as exporters do that saw one value. A model is refused, naming the node, or it is right
beside ONNX Runtime for every value: never of the shape that the model says with some elements left out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import onnx
import onnx.defs
import pytest
from onnx import TensorProto, helper

from tccompile.errors import ModelError, UnsupportedError
from tccompile.load.valid import DECIDES
from tccompile.pipeline import without_code
from tccompile.plan.file import from_bytes, to_bytes
from tccompile.runtime.session import Session
from tests.networks import feeds as random_feeds
from tests.networks import reference, relative_error
from tests.random_graphs import Graph
from tests.rewrites.common import Net

F, INT = TensorProto.FLOAT, TensorProto.INT64
NODE = "the node"


def ints(*values: int) -> np.ndarray:
    return np.array(values, np.int64)


def number(value: Any, dtype: Any = np.int64) -> np.ndarray:
    return np.array(value, dtype)


def floats(*shape: int) -> np.ndarray:
    return np.random.default_rng(sum(shape)).uniform(0.1, 1, shape).astype(np.float32)


@dataclass
class Late:
    """A node of which one input, number `at`, comes late: several `values`, the first of which made the shape that is said."""

    op: str
    inputs: tuple[np.ndarray | None, ...]
    at: int
    values: tuple[np.ndarray, ...]
    outputs: int = 1
    opset: int = 22
    attributes: Mapping[str, Any] = field(default_factory=dict)
    right: bool = False  # whether it must be compiled

    def __str__(self) -> str:
        return f"{self.op}-{self.at}"


X = floats(3, 4)
IMAGE = floats(1, 2, 4, 4)
REDUCE = ("L1", "L2", "LogSum", "LogSumExp", "Max", "Mean", "Min", "Prod", "Sum", "SumSquare")
BODY = helper.make_graph(
    [helper.make_node("Identity", ["c"], ["c2"]), helper.make_node("Add", ["h", "h"], ["h2"])], "body",
    [helper.make_tensor_value_info("i", INT, ()), helper.make_tensor_value_info("c", TensorProto.BOOL, ()),
     helper.make_tensor_value_info("h", F, (3, 4))],
    [helper.make_tensor_value_info("c2", TensorProto.BOOL, ()), helper.make_tensor_value_info("h2", F, (3, 4))],
)  # fmt: skip
SCALE, ZERO = np.float32(0.1), np.uint8(3)
BYTES = np.arange(12, dtype=np.uint8).reshape(3, 4)

CASES = (
    # what decides the shape
    Late("AffineGrid", (floats(2, 2, 3), None), 1, (ints(2, 3, 4, 5), ints(2, 3, 5, 4))),
    Late("BlackmanWindow", (None,), 0, (number(5), number(7))),
    Late("HammingWindow", (None,), 0, (number(5), number(7))),
    Late("HannWindow", (None,), 0, (number(5), number(7))),
    Late("CenterCropPad", (X, None), 1, (ints(2, 6), ints(3, 4))),
    Late("Col2Im", (floats(1, 4, 4), None, ints(2, 2)), 1, (ints(4, 4), ints(2, 8)), attributes={"strides": [2, 2]}),
    Late("Col2Im", (floats(1, 4, 4), ints(4, 4), None), 2, (ints(2, 2), ints(1, 4)), attributes={"strides": [2, 2]}),
    Late("ConstantOfShape", (None,), 0, (ints(2, 3), ints(3, 2))),
    Late("DFT", (floats(1, 8, 1), None), 1, (number(8), number(6)), opset=20),
    Late("DFT", (floats(1, 8, 8, 1), None, None), 2, (number(1), number(2)), opset=20),
    Late("Expand", (floats(1, 4), None), 1, (ints(3, 4), ints(2, 4), ints(1, 4))),
    Late("MaxUnpool", (floats(1, 1, 2, 2), np.arange(4).reshape(1, 1, 2, 2), None), 2, (ints(1, 1, 5, 5), ints(1, 1, 4, 4)),
         attributes={"kernel_shape": [2, 2], "strides": [2, 2]}),
    Late("MelWeightMatrix", (None, number(16), number(8000), np.float32(0), np.float32(4000)), 0, (number(8), number(6))),
    Late("MelWeightMatrix", (number(8), None, number(8000), np.float32(0), np.float32(4000)), 1, (number(16), number(8))),
    Late("MelWeightMatrix", (number(8), number(16), None, np.float32(0), np.float32(4000)), 2, (number(8000), number(9000))),
    Late("MelWeightMatrix", (number(8), number(16), number(8000), None, np.float32(4000)), 3, (np.float32(0), np.float32(10))),
    Late("MelWeightMatrix", (number(8), number(16), number(8000), np.float32(0), None), 4, (np.float32(4000), np.float32(3000))),
    Late("NonMaxSuppression", (floats(1, 4, 4), floats(1, 1, 4), None), 2, (number(3), number(1))),
    Late("NonMaxSuppression", (floats(1, 4, 4), floats(1, 1, 4), number(3), None), 3, (np.float32(0.5), np.float32(0.1))),
    Late("NonMaxSuppression", (floats(1, 4, 4), floats(1, 1, 4), number(3), np.float32(0.5), None), 4,
         (np.float32(0.5), np.float32(0.1))),
    Late("OneHot", (ints(0, 2, 1), None, np.float32([0, 1])), 1, (number(3), number(5))),
    Late("OneHot", (ints(0, 2, 1), number(3), None), 2, (np.float32([0, 1]), np.float32([5, -1])), right=True),
    Late("Pad", (X, None), 1, (ints(0, 1, 0, 0), ints(0, 0, 0, 1), ints(1, 0, 0, 0))),
    Late("Pad", (X, ints(0, 1, 0, 0), None), 2, (np.float32(0), np.float32(2))),
    Late("Pad", (X, ints(1, 1), None, None), 3, (ints(0), ints(1))),
    Late("Range", (None, number(6), number(2)), 0, (number(0), number(2))),
    Late("Range", (number(0), None, number(2)), 1, (number(6), number(4))),
    Late("Range", (number(0), number(6), None), 2, (number(2), number(3))),
    Late("Reshape", (X, None), 1, (ints(4, 3), ints(2, 6), ints(-1, 2), ints(0, 4))),
    Late("Resize", (IMAGE, None, None), 2, (np.float32([1, 1, 2, 2]), np.float32([1, 1, 1, 2]))),
    Late("Resize", (IMAGE, None, None, None), 3, (ints(1, 2, 8, 8), ints(1, 2, 8, 6))),
    Late("Resize", (IMAGE, None, None, ints(1, 2, 4, 4)), 1,
         (np.float32([0, 0, 0, 0, 1, 1, 1, 1]), np.float32([0, 0, .5, 0, 1, 1, 1, 1])),
         attributes={"coordinate_transformation_mode": "tf_crop_and_resize", "mode": "linear"}),
    Late("STFT", (floats(1, 16, 1), None, None, number(8)), 1, (number(8), number(4))),
    Late("STFT", (floats(1, 16, 1), number(4), floats(8), None), 3, (number(8),)),
    Late("Slice", (X, None, ints(3), ints(0)), 1, (ints(1), ints(0))),
    Late("Slice", (X, ints(0), None, ints(0)), 2, (ints(2), ints(3))),
    Late("Slice", (X, ints(0), ints(2), None), 3, (ints(0), ints(1))),
    Late("Slice", (X, ints(0), ints(3), ints(0), None), 4, (ints(2), ints(1))),
    Late("Split", (X, None), 1, (ints(1, 2), ints(2, 1)), outputs=2),
    Late("Squeeze", (floats(1, 4, 1), None), 1, (ints(0), ints(2))),
    Late("Tile", (X, None), 1, (ints(2, 1), ints(1, 2), ints(1, 1))),
    Late("TopK", (X, None), 1, (ints(2), ints(1), ints(3)), outputs=2),
    Late("Unique", (None,), 0, (floats(4), np.ones(4, np.float32))),
    Late("Unsqueeze", (X, None), 1, (ints(0), ints(1), ints(2))),
    Late("Upsample", (IMAGE, None), 1, (np.float32([1, 1, 2, 2]), np.float32([1, 1, 2, 1])), opset=9),
    *(Late(f"Reduce{kind}", (X, None), 1, (ints(0), ints(1))) for kind in REDUCE),
    *(Late(f"Reduce{kind}", (X, None), 1, (ints(0), ints(1)), attributes={"keepdims": 0}) for kind in REDUCE[-2:]),
    # what decides a meaning
    Late("CumSum", (X, None), 1, (number(0), number(1))),
    Late("CumProd", (X, None), 1, (number(0), number(1)), opset=26),
    Late("Trilu", (X, None), 1, (number(0), number(1), number(-1))),
    Late("Dropout", (X, np.float32(0.5), None), 2, (number(False, bool),)),
    Late("Dropout", (X, None, number(False, bool)), 1, (np.float32(0.5), np.float32(0)), right=True),
    Late("Dropout", (X, None, number(True, bool)), 1, (np.float32(0), np.float32(0.5))),
    Late("Clip", (X, None, np.float32(0.8)), 1, (np.float32(0.2), np.float32(0.5)), right=True),
    Late("Clip", (X, np.float32(0.2), None), 2, (np.float32(0.8), np.float32(0.5), np.float32(0.1)), right=True),
    Late("Loop", (None, number(True, bool), X), 0, (number(2), number(3)), attributes={"body": BODY}),
    Late("Loop", (number(2), None, X), 1, (number(True, bool), number(False, bool)), attributes={"body": BODY}),
    Late("ReverseSequence", (X, None), 1, (ints(1, 3, 2, 1), ints(2, 2, 3, 3)), right=True),
    Late("Gather", (X, None), 1, (ints(0, 2), ints(-1, -3)), right=True),
    Late("GatherElements", (X, None), 1, (number([[0, 1, 2, 0]]), number([[-1, -2, -3, 0]])), right=True),
    Late("GatherND", (X, None), 1, (number([[0, 1], [2, 3]]), number([[-1, -2], [0, 0]])), right=True),
    Late("ScatterND", (X, None, floats(1, 4)), 1, (number([[0]]), number([[-1]])), right=True),
    Late("ScatterElements", (X, None, floats(1, 4)), 1, (number([[0, 1, 2, 0]]), number([[-1, -2, -3, 0]])), right=True),
    Late("PRelu", (-X, None), 1, (floats(4), -floats(4)), right=True),
    Late("GridSample", (IMAGE, None), 1, (floats(1, 3, 3, 2), -floats(1, 3, 3, 2)), right=True),
    Late("RoiAlign", (IMAGE, None, ints(0)), 1, (np.float32([[0, 0, 3, 3]]), np.float32([[1, 1, 2, 3]])), right=True, opset=16,
         attributes={"sampling_ratio": 2, "output_height": 2, "output_width": 2}),
    Late("RoiAlign", (floats(2, 1, 4, 4), np.float32([[0, 0, 3, 3]]), None), 2, (ints(0), ints(1)), right=True, opset=16,
         attributes={"sampling_ratio": 2, "output_height": 2, "output_width": 2}),
    Late("GRU", (floats(3, 2, 4), floats(1, 6, 4), floats(1, 6, 2), None, None), 4,
         (np.int32([3, 1]), np.int32([2, 3])), outputs=2, right=True, attributes={"hidden_size": 2}),
    Late("Conv", (IMAGE, None), 1, (floats(2, 2, 3, 3), -floats(2, 2, 3, 3)), right=True),
    Late("ConvTranspose", (IMAGE, None), 1, (floats(2, 2, 3, 3), -floats(2, 2, 3, 3)), right=True),
    Late("ConvTranspose", (IMAGE, floats(2, 2, 3, 3), None), 2, (floats(2), -floats(2)), right=True),
    Late("BatchNormalization", (IMAGE, floats(2), floats(2), None, floats(2)), 3, (floats(2), -floats(2)), right=True),
    Late("BatchNormalization", (IMAGE, floats(2), floats(2), floats(2), None), 4, (floats(2), 2 * floats(2)), right=True),
    # scales and zero points
    Late("QuantizeLinear", (X, None, ZERO), 1, (np.float32(0.1), np.float32(0.01)), right=True),
    Late("QuantizeLinear", (X, SCALE, None), 2, (np.uint8(3), np.uint8(250)), right=True),
    Late("QuantizeLinear", (X, None), 1, (np.float32([0.1, 0.2, 0.3, 0.4]), np.float32([0.4, 0.3, 0.2, 0.1])), right=True),
    Late("DequantizeLinear", (BYTES, None, ZERO), 1, (np.float32(0.1), np.float32(0.01)), right=True),
    Late("DequantizeLinear", (BYTES, SCALE, None), 2, (np.uint8(3), np.uint8(250)), right=True),
    Late("MatMulInteger", (BYTES, BYTES.T.copy(), None, ZERO), 2, (np.uint8(1), np.uint8(9)), right=True),
    Late("MatMulInteger", (BYTES, BYTES.T.copy(), ZERO, None), 3, (np.uint8(1), np.uint8(9)), right=True),
    *(Late("QLinearMatMul", tuple(None if i == at else v for i, v in enumerate(
        (BYTES, SCALE, ZERO, BYTES.T.copy(), SCALE, ZERO, np.float32(0.4), ZERO))), at, late, right=True)
      for at, late in ((1, (SCALE, np.float32(0.2))), (2, (ZERO, np.uint8(5))), (4, (SCALE, np.float32(0.2))),
                       (5, (ZERO, np.uint8(5))), (6, (np.float32(0.4), np.float32(0.3))), (7, (ZERO, np.uint8(5))))),
    *(Late("QLinearConv", tuple(None if i == at else v for i, v in enumerate(
        (BYTES.reshape(1, 1, 3, 4), SCALE, ZERO, BYTES[:2, :2].reshape(1, 1, 2, 2).copy(), SCALE, ZERO, SCALE, ZERO))),
        at, late, right=True)
      for at, late in ((1, (SCALE, np.float32(0.2))), (2, (ZERO, np.uint8(5))), (4, (SCALE, np.float32(0.2))),
                       (5, (ZERO, np.uint8(5))), (6, (SCALE, np.float32(0.3))), (7, (ZERO, np.uint8(5))))),
    Late("ConvInteger", (BYTES.reshape(1, 1, 3, 4), BYTES[:2, :2].reshape(1, 1, 2, 2).copy(), None), 2,
         (np.uint8(1), np.uint8(9)), right=True),
)  # fmt: skip


def model(case: Late) -> onnx.ModelProto:
    """The node, whose result is said to be of the shape that the first value gives; its first input, if not late, is `x`."""
    names = [f"in{i}" if v is not None else "late" if i == case.at else "" for i, v in enumerate(case.inputs)]
    given = {n: v for n, v in zip(names, case.inputs, strict=True) if v is not None} | {"late": case.values[0]}
    late = [n for n in given if n == "late" or (n == "in0" and 0 not in DECIDES.get(case.op, ()))]
    outputs = [f"y{i}" for i in range(case.outputs)]
    node = helper.make_node(case.op, names, outputs, NODE, **case.attributes)
    elem = {n: helper.np_dtype_to_tensor_dtype(np.asarray(v).dtype) for n, v in given.items()}
    inputs = [helper.make_tensor_value_info(n, elem[n], np.shape(given[n])) for n in late]
    weights = [onnx.numpy_helper.from_array(np.asarray(v), n) for n, v in given.items() if n not in late]
    graph = helper.make_graph([node], "late", inputs, [helper.make_empty_tensor_value_info(y) for y in outputs], weights)
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", case.opset)], ir_version=8 if case.opset < 19 else 10)
    found = expected(made, case, case.values[0])
    del made.graph.output[:]
    for y, v in found.items():
        made.graph.output.append(helper.make_tensor_value_info(y, helper.np_dtype_to_tensor_dtype(v.dtype), v.shape))
    return made


def expected(made: onnx.ModelProto, case: Late, late: np.ndarray) -> dict[str, np.ndarray]:
    """The outputs by ONNX Runtime, or by ONNX's evaluator for operators that it has not."""
    inputs = feeds(made, case, late)
    if case.op in ("CumProd",):
        from onnx.reference import ReferenceEvaluator

        return dict(zip((o.name for o in made.graph.output), ReferenceEvaluator(made).run(None, inputs), strict=True))
    return reference(made, inputs)


def feeds(made: onnx.ModelProto, case: Late, late: np.ndarray) -> dict[str, np.ndarray]:
    values = {"in0": case.inputs[0], "late": np.asarray(late)}
    return {v.name: values[v.name] for v in made.graph.input}


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_value_that_comes_late_is_not_ignored(case: Late) -> None:
    made = model(case)
    try:
        plan = without_code(made, precision="fp32")
    except UnsupportedError as error:
        assert NODE in str(error) and not case.right
        return
    with Session(plan, "cpu") as session:
        for late in case.values:
            want = expected(made, case, late)
            got = session.run(list(want), feeds(made, case, late))
            for (name, right), found in zip(want.items(), got, strict=True):
                assert found.shape == right.shape and found.dtype == right.dtype, name
                assert relative_error(found, right) <= 1e-5, f"{name} with {late}"


def test_every_input_that_decides_has_a_case() -> None:
    elsewhere = {"If", "SequenceAt", "SequenceInsert", "SplitToSequence"}
    cases = {(case.op, case.at) for case in CASES}
    assert not {(op, at) for op, places in DECIDES.items() for at in places if op not in elsewhere} - cases


SEQUENCES = {
    "SequenceAt": [("SequenceConstruct", "x x", "s"), ("SequenceAt", "s late", "y")],
    "SequenceInsert": [
        ("SequenceConstruct", "x x", "s"), ("SequenceInsert", "s x late", "t"), ("ConcatFromSequence", "t", "y", {"axis": 0})],
    "SequenceErase": [
        ("SequenceConstruct", "x x", "s"), ("SequenceErase", "s late", "t"), ("ConcatFromSequence", "t", "y", {"axis": 0})],
    "SplitToSequence": [("SplitToSequence", "x late", "s"), ("SequenceAt", "s zero", "y")],
}  # fmt: skip


@pytest.mark.parametrize("op", SEQUENCES)
def test_a_place_in_a_sequence_that_comes_late(op: str) -> None:
    nodes = [helper.make_node(o, x.split(), [y], o, **(a[0] if a else {})) for o, x, y, *a in SEQUENCES[op]]
    inputs = [helper.make_tensor_value_info("x", F, (3, 4)), helper.make_tensor_value_info("late", INT, ())]
    outputs = [helper.make_tensor_value_info("y", F, None)]
    graph = helper.make_graph(nodes, "g", inputs, outputs, [onnx.numpy_helper.from_array(number(0), "zero")])
    with pytest.raises(UnsupportedError, match=f"node '{op}' "):
        without_code(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10))


@pytest.mark.parametrize("op", ["NonZero", "Unique"])
def test_what_there_is_in_a_constant_is_known(op: str) -> None:
    values = np.float32([0, 2, 2, 1, 0])
    nodes = [helper.make_node(op, ["c"], ["found"]), helper.make_node("Cast", ["found"], ["f"], to=F)]
    nodes += [helper.make_node("ReduceSum", ["f"], ["n"], keepdims=0), helper.make_node("Add", ["x", "n"], ["y"])]
    inputs, outputs = ([helper.make_tensor_value_info(n, F, (2, 3))] for n in "xy")
    graph = helper.make_graph(nodes, "g", inputs, outputs, [onnx.numpy_helper.from_array(values, "c")])
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
    given = random_feeds(made, 0)
    with Session(without_code(made, precision="fp32"), "cpu") as session:
        assert relative_error(session.run(["y"], given)[0], reference(made, given)["y"]) <= 1e-5


# --- What a model says of its tensors and is not so


def corrupted(clean: onnx.ModelProto, seed: int) -> onnx.ModelProto:
    """The model with lies about the shapes of its outputs and of the tensors between, and about types of these."""
    rng = np.random.default_rng(seed)
    made = onnx.shape_inference.infer_shapes(clean)
    for value in (*made.graph.value_info, *made.graph.output):
        kind = value.type.tensor_type
        dims = kind.shape.dim
        if rng.random() < 0.5 or not dims:
            continue
        one, other = rng.integers(0, len(dims), 2)
        match rng.integers(0, 6 if value in made.graph.value_info else 5):
            case 0:
                dims[one].dim_value = int(rng.integers(0, 20))
            case 1:
                dims.add().dim_value = int(rng.integers(1, 3))
            case 2:
                del dims[one]
            case 3:  # as many elements in another order
                dims[one].dim_value, dims[other].dim_value = dims[other].dim_value, dims[one].dim_value
            case 4:
                dims[one].dim_param = "anything"
            case 5:
                kind.elem_type = int(rng.choice([TensorProto.FLOAT16, TensorProto.INT64, TensorProto.BOOL]))
    return made


@pytest.mark.filterwarnings("ignore:the model says that its output:RuntimeWarning")
@pytest.mark.parametrize("seed", range(12))
def test_lies_about_shapes_change_nothing(seed: int) -> None:
    clean = Graph(seed).model()
    inputs = random_feeds(clean, seed + 1)
    with Session(without_code(corrupted(clean, seed), precision="fp32"), "cpu") as session:
        for name, right in reference(clean, inputs).items():
            (found,) = session.run([name], inputs)
            assert relative_error(found, right) <= 1e-5


def said(shape: tuple[int | str, ...] | None, elem: int = F) -> onnx.ModelProto:
    graph = helper.make_graph(
        [helper.make_node("Transpose", ["x"], ["y"], NODE)], "g", [helper.make_tensor_value_info("x", F, (3, 4))],
        [helper.make_tensor_value_info("y", elem, shape)],
    )  # fmt: skip
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)


@pytest.mark.parametrize(("shape", "says"), [((4, 4), "4x4"), ((3, 1, 4), "3x1x4"), ((), "a scalar"), (("n", 5), r"\?x5")])
def test_an_output_of_another_shape_is_said(shape: tuple[int | str, ...], says: str) -> None:
    with pytest.warns(RuntimeWarning, match=f"says that its output 'y' is {says}, and its nodes make it 4x3, which it will be"):
        plan = without_code(said(shape))
    assert plan.entries[0].program.tensors["y"].shape == (4, 3)


def test_an_output_of_another_shape_is_said_once_for_a_range() -> None:
    net = Net(x=("n", 3))
    model = net.out(net("Softmax", net("MatMul", "x", net("Transpose", "x", perm=[1, 0])))).model()
    model.graph.output[0].type.tensor_type.shape.dim[1].dim_value = 24
    with pytest.warns(RuntimeWarning, match="says that its output") as told:
        without_code(model, ranges={"n": (1, 40)})
    assert len([w for w in told if "says that its output" in str(w.message)]) == 1


def test_a_plan_with_constants_of_its_own_is_the_same_read_and_written_again() -> None:
    """Which are numbered in the file by their names, not as the model happens to make them."""
    net = Net(x=(4096,))
    ends = [[np.array(n, np.float32) for n in (k, k + 4096, 1)] for k in range(12)]
    results = [net("Add", "x", net("Mul", net("Range", *numbers), net.normal(1))) for numbers in ends]
    data = to_bytes(without_code(net.out(*results).model(), precision="fp32"))
    again = from_bytes(data)
    turned = dict(reversed(again.entries[0].program.constants.items()))
    other = replace(again.entries[0], program=replace(again.entries[0].program, constants=turned))
    assert to_bytes(again) == to_bytes(replace(again, entries=(other,))) == data


def test_a_type_that_there_is_not_is_none() -> None:
    assert without_code(said((4, 3), 273930)).entries[0].program.outputs == ("y",)


@pytest.mark.parametrize("precision", ["mixed", "fp32"])
def test_a_model_without_results(precision: str) -> None:
    model = said((4, 3))
    del model.graph.output[:]
    with Session(without_code(model, precision=precision), "cpu") as session:
        assert session.run(None, {"x": np.zeros((3, 4), np.float32)}) == []


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("shape", [None, ("n", "m"), (4, "m"), (4, 3)])
def test_an_output_of_its_own_shape(shape: tuple[int | str, ...] | None) -> None:
    without_code(said(shape))


@pytest.mark.parametrize("elem", [TensorProto.FLOAT16, TensorProto.INT64, TensorProto.BOOL])
def test_an_output_of_another_type_is_an_error(elem: int) -> None:
    with pytest.raises(ModelError, match=r"its output 'y' is (float16|int64|bool), and its nodes make it float: correct it"):
        without_code(said((4, 3), elem))
