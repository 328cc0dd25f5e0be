"""Pipelines as scikit-learn's converters write them, as a whole: maps, labels, opsets, precision, distances."""

from __future__ import annotations

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper

from tccompile.errors import UnsupportedError
from tccompile.ir.ops import Trees
from tccompile.load.model import load
from tccompile.lower.graph import lower
from tccompile.pipeline import without_code
from tccompile.runtime.session import Session
from tccompile.verify.oracle import verify
from tests import plans
from tests.networks import relative_error
from tests.ops.test_classical import FEATURES, F, X, normal
from tests.ops.test_trees import forest

CLASSES = [4, 9, 7]


def pipeline(labels: list | None = None) -> onnx.ModelProto:
    """A scaler, a classifier of trees, and maps of its scores."""
    own = {"classlabels_strings" if isinstance((labels or CLASSES)[0], str) else "classlabels_int64s": labels or CLASSES}
    nodes = [
        helper.make_node("Scaler", ["x"], ["scaled"], "scaler", domain="ai.onnx.ml", offset=[0.5], scale=[2.0]),
        helper.make_node("TreeEnsembleClassifier", ["scaled"], ["label", "scores"], "trees", domain="ai.onnx.ml", **own,
                         **forest(7, 4, [0, 1, 2], what="class", positive=True)),
        helper.make_node("ZipMap", ["scores"], ["maps"], "zip", domain="ai.onnx.ml", **own),
    ]  # fmt: skip
    label = TensorProto.STRING if isinstance((labels or CLASSES)[0], str) else TensorProto.INT64
    maps = helper.make_sequence_type_proto(helper.make_map_type_proto(label, helper.make_tensor_type_proto(F, ())))
    outputs = [helper.make_tensor_value_info("label", label, [None]), helper.make_value_info("maps", maps)]
    graph = helper.make_graph(nodes, "net", [helper.make_tensor_value_info("x", F, [None, FEATURES + 1])], outputs)
    opsets = [helper.make_opsetid(*each) for each in (("ai.onnx.ml", 3), ("", 18), ("", 18), ("ai.onnx.ml", 3), ("ai.onnx", 18))]
    return helper.make_model(graph, opset_imports=opsets, ir_version=10)


ROWS = np.round(normal(37, FEATURES + 1), 1)


def reference(proto: onnx.ModelProto, **feeds: np.ndarray) -> list:
    clean = onnx.ModelProto()
    clean.CopyFrom(proto)
    del clean.opset_import[2:]
    return onnxruntime.InferenceSession(clean.SerializeToString(), providers=["CPUExecutionProvider"]).run(None, feeds)


@pytest.mark.parametrize("batch", [1, 37])
def test_maps_at_the_end_are_the_array_that_they_are_made_of(batch: int) -> None:
    """And an opset that is listed twice is one."""
    proto, x = pipeline(), ROWS[:batch]
    label, maps = reference(proto, x=x)
    with pytest.warns(RuntimeWarning, match=r"'maps' is the array.*'zip'.*a column for each class: 4, 9, 7"):
        plan = without_code(proto, {"x": x.shape})
    with Session(plan, "cpu") as session:
        got = session.run(None, {"x": x})
    np.testing.assert_array_equal(got[0], label)
    assert relative_error(got[1], np.array([[row[c] for c in CLASSES] for row in maps])) <= 1e-6


@pytest.mark.filterwarnings("ignore:the output 'maps'")
def test_verify_compares_maps() -> None:
    proto = pipeline()
    del proto.opset_import[2:]
    made = verify(proto, without_code(proto, {"x": ROWS.shape}), 1e-5)
    assert made.passed and {r.output for r in made.results} == {"label", "maps"}


@pytest.mark.filterwarnings("ignore:the output 'maps'")
def test_mixed_is_fp32_where_scores_are_compared() -> None:
    plan = without_code(pipeline(), {"x": ROWS.shape}, "mixed")
    program = plan.entries[0].program
    assert any(isinstance(op, Trees) for op in program.ops)
    assert not any(t.dtype.value == "float16" for t in program.tensors.values())
    plan = plans.without_code(pipeline(), ("sm_80",), {"x": ROWS.shape})
    assert [step.kernel for step in plan.entries[0].sections[0].steps].count("trees") == 1


def test_labels_that_are_strings_are_refused_by_their_node() -> None:
    with pytest.raises(
        UnsupportedError, match=r"'trees' \(ai.onnx.ml.TreeEnsembleClassifier\): its output 'label' is of strings"
    ):
        load(pipeline(["a", "b", "c"]), {"x": ROWS.shape})


@pytest.mark.filterwarnings("ignore:the output 'maps'")
def test_labels_that_nobody_reads_may_be_strings() -> None:
    proto = pipeline(["a", "b", "c"])
    _, maps = reference(proto, x=ROWS)
    del proto.graph.output[0]
    with Session(without_code(proto, {"x": ROWS.shape}), "cpu") as session:
        (got,) = session.run(None, {"x": ROWS})
    assert relative_error(got, np.array([[row[c] for c in "abc"] for row in maps])) <= 1e-6


@pytest.mark.parametrize("op", ["DictVectorizer", "CategoryMapper", "CastMap"])
def test_operators_of_strings_and_maps_are_refused_by_name(op: str) -> None:
    attributes = {"cats_int64s": [1], "cats_strings": ["a"]} if op == "CategoryMapper" else {}
    node = helper.make_node(op, ["x"], ["y"], "mine", domain="ai.onnx.ml", **attributes)
    values = [helper.make_tensor_value_info("x", TensorProto.INT64, [3]), helper.make_tensor_value_info("y", F, [3])]
    graph = helper.make_graph([node], "net", values[:1], values[1:])
    opsets = [helper.make_opsetid("", 18), helper.make_opsetid("ai.onnx.ml", 3)]
    proto = helper.make_model(graph, opset_imports=opsets, ir_version=10)
    with pytest.raises(UnsupportedError, match=f"'mine' \\(ai.onnx.ml.{op}\\)"):
        load(proto)


SAMPLES = normal(50, FEATURES, seed=3)


def scan(*nodes: tuple[str, list[str], str], keeps: str = "state") -> onnx.ModelProto:
    """Distances as they are exported: a turn for each of 50 samples, in which the rows x stay as they are."""
    made = [helper.make_node(op, inputs, [y], **({"keepdims": 0} if op.startswith("Reduce") else {})) for op, inputs, y in nodes]
    made.append(helper.make_node("Identity", [keeps], ["kept"]))
    info = helper.make_tensor_value_info
    body = helper.make_graph(
        made, "body", [info("state", F, [None, FEATURES]), info("row", F, [FEATURES])],
        [info("kept", F, [None, None]), info("out", F, None)], [numpy_helper.from_array(np.array([1]), "axes")],
    )  # fmt: skip
    node = helper.make_node("Scan", ["x", "samples"], ["same", "y"], "scan", body=body, num_scan_inputs=1)
    graph = helper.make_graph(
        [node], "net", [info("x", F, X.shape)], [info("y", F, None)], [numpy_helper.from_array(SAMPLES, "samples")]
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)


SCANS = {
    "euclidean": [("Sub", ["state", "row"], "d"), ("ReduceSumSquare", ["d", "axes"], "out")],
    "manhattan": [("Sub", ["row", "state"], "d"), ("Abs", ["d"], "a"), ("ReduceSum", ["a", "axes"], "out")],
    "of a sum": [("Add", ["state", "row"], "d"), ("ReduceMax", ["d", "axes"], "m"), ("Exp", ["m"], "out")],
    "of a mean": [("Mul", ["state", "row"], "d"), ("Identity", ["d"], "e"), ("ReduceMean", ["e", "axes"], "out")],
}


@pytest.mark.parametrize("case", SCANS)
def test_distances_to_many_samples_take_few_steps(case: str) -> None:
    proto = scan(*SCANS[case])
    (want,) = reference(proto, x=X)
    assert len(lower(load(proto)).ops) < 10
    with Session(without_code(proto, precision="fp32"), "cpu") as session:
        (got,) = session.run(None, {"x": X})
    assert got.shape == want.shape and relative_error(got, want) <= 1e-6


def test_a_scan_that_passes_something_on_is_unrolled() -> None:
    proto = scan(("Add", ["state", "row"], "sum"), ("ReduceSum", ["sum", "axes"], "out"), keeps="sum")
    (want,) = reference(proto, x=X)
    with Session(without_code(proto, precision="fp32"), "cpu") as session:
        (got,) = session.run(None, {"x": X})
    assert relative_error(got, want) <= 1e-5
