"""ONNX Runtime's API on plans: programs as its documentation shows them run with another import, and give what they gave."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper

import tccompile
import tccompile.ort as ort
from tccompile.errors import InputError, ModelError, UnsupportedError, UsageError
from tests.networks import relative_error

FLOAT, INT = TensorProto.FLOAT, TensorProto.INT64


def save(name: str, nodes: list[Any], inputs: list[Any], outputs: list[Any], **weights: np.ndarray) -> None:
    initializers = [numpy_helper.from_array(w, n) for n, w in weights.items()]
    graph = helper.make_graph(nodes, "torch_jit", inputs, outputs, initializers)
    imports = [helper.make_opsetid("", 17), helper.make_opsetid("ai.onnx.ml", 3)]
    made = helper.make_model(
        graph, opset_imports=imports, ir_version=8, producer_name="pytorch", doc_string="a network", model_version=7
    )
    made.metadata_props.add(key="stride", value="32")
    onnx.save(made, name)


def value(name: str, elem: int, *shape: int | str) -> Any:
    return helper.make_tensor_value_info(name, elem, shape)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The models that documentation takes as there."""
    made = tmp_path_factory.mktemp("ort")
    rng = np.random.default_rng(0)
    w = rng.standard_normal((784, 10)).astype(np.float32)
    flat = helper.make_node("Flatten", ["input"], ["flat"])
    save(
        str(made / "fashion_mnist_model.onnx"),
        [flat, helper.make_node("MatMul", ["flat", "w"], ["output"])],
        [value("input", FLOAT, "batch", 1, 28, 28)],
        [value("output", FLOAT, "batch", 10)],
        w=w,
    )
    bag = [
        helper.make_node("Gather", ["table", "input"], ["rows"]),
        helper.make_node("ReduceMean", ["rows"], ["mean"], axes=[0], keepdims=1),
        helper.make_node("MatMul", ["mean", "w"], ["output"]),
    ]
    save(
        str(made / "ag_news_model.onnx"),
        bag,
        [value("input", INT, "words")],
        [value("output", FLOAT, 1, 4)],
        table=rng.standard_normal((50, 8)).astype(np.float32),
        w=rng.standard_normal((8, 4)).astype(np.float32),
    )
    classifier = [
        helper.make_node("LinearClassifier", ["X"], ["label", "scores"], domain="ai.onnx.ml", multi_class=1,
                         coefficients=rng.standard_normal(12).tolist(), intercepts=[0.1, 0.2, 0.3], classlabels_ints=[0, 1, 2],
                         post_transform="SOFTMAX"),
        helper.make_node("ZipMap", ["scores"], ["probabilities"], domain="ai.onnx.ml", classlabels_int64s=[0, 1, 2]),
    ]  # fmt: skip
    maps = onnx.ValueInfoProto(name="probabilities")
    maps.type.sequence_type.elem_type.map_type.key_type = INT
    maps.type.sequence_type.elem_type.map_type.value_type.tensor_type.elem_type = FLOAT
    save(str(made / "rf_iris.onnx"), classifier, [value("X", FLOAT, None, 4)], [value("label", INT, None), maps])
    save(
        str(made / "model.onnx"),
        [helper.make_node("Mul", ["input", "input"], ["output"])],
        [value("input", FLOAT, 3, 2)],
        [value("output", FLOAT, 3, 2)],
    )
    return made


@pytest.fixture(autouse=True)
def there(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)


BEFORE = "import numpy as np\nimport onnxruntime\nimport onnxruntime as ort\nimport onnxruntime as rt\n"
SNIPPETS = {
    "get started: images": """
x = np.random.default_rng(0).random((1, 1, 28, 28)).astype(np.float32)
ort_sess = ort.InferenceSession('fashion_mnist_model.onnx')
outputs = ort_sess.run(None, {'input': x})
predicted = outputs[0][0].argmax(0)
""",
    "get started: text": """
text = np.arange(7, dtype=np.int64)
ort_sess = ort.InferenceSession('ag_news_model.onnx', providers=ort.get_available_providers())
outputs = ort_sess.run(None, {'input': text})
result = outputs[0].argmax(axis=1)+1
""",
    "get started: scikit-learn": """
X_test = np.random.default_rng(0).random((5, 4))
sess = rt.InferenceSession("rf_iris.onnx", providers=rt.get_available_providers())
input_name = sess.get_inputs()[0].name
label_name = sess.get_outputs()[0].name
pred_onx = sess.run([label_name], {input_name: X_test.astype(np.float32)})[0]
""",
    "get started: all outputs of scikit-learn": """
sess = rt.InferenceSession("rf_iris.onnx", providers=["CPUExecutionProvider"])
label, maps = sess.run(None, {"X": np.float32([[1, 2, 3, 4], [4, 3, 2, 1]])})
first = maps[0][0]; classes = sorted(maps[1]); kind = sess.get_outputs()[1].type
""",
    "get started: TensorFlow": """
providers = ['CPUExecutionProvider']
m = rt.InferenceSession("fashion_mnist_model.onnx", providers=providers)
output_names = [n.name for n in m.get_outputs()]
onnx_pred = m.run(output_names, {"input": np.ones((2, 1, 28, 28), np.float32)})
""",
    "load and predict": """
from onnxruntime.datasets import get_example
example1 = get_example("sigmoid.onnx")
sess = rt.InferenceSession(example1, providers=rt.get_available_providers())
input_name = sess.get_inputs()[0].name
input_shape = sess.get_inputs()[0].shape
input_type = sess.get_inputs()[0].type
output_name = sess.get_outputs()[0].name
output_shape = sess.get_outputs()[0].shape
output_type = sess.get_outputs()[0].type
x = np.random.default_rng(0).random((3, 4, 5))
res = sess.run([output_name], {input_name: x.astype(np.float32)})
""",
    "metadata": """
from onnxruntime.datasets import get_example
sess = rt.InferenceSession("model.onnx", providers=rt.get_available_providers())
meta = sess.get_modelmeta()
custom_metadata_map = meta.custom_metadata_map; description = meta.description; domain = meta.domain
graph_name = meta.graph_name; producer_name = meta.producer_name; version = meta.version
""",
    "API: providers in order": """
session = onnxruntime.InferenceSession("model.onnx", providers=['CUDAExecutionProvider', 'CPUExecutionProvider'])
outputs = session.run(["output"], {"input": np.float32([[1, 2], [3, 4], [5, 6]])})
""",
    "API: options of a provider": """
providers = [('CUDAExecutionProvider', {'device_id': 0, 'arena_extend_strategy': 'kNextPowerOfTwo',
             'gpu_mem_limit': 2 * 1024 * 1024 * 1024, 'cudnn_conv_algo_search': 'EXHAUSTIVE'}), 'CPUExecutionProvider']
session = ort.InferenceSession("model.onnx", providers=providers)
outputs = session.run([], {"input": np.ones((3, 2), np.float32)})
""",
    "API: an OrtValue": """
X = np.array([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]], dtype=np.float32)
ortvalue = onnxruntime.OrtValue.ortvalue_from_numpy(X)
device = ortvalue.device_name(); shape = ortvalue.shape(); kind = ortvalue.data_type(); tensor = ortvalue.is_tensor()
same = np.array_equal(ortvalue.numpy(), X)
sess = onnxruntime.InferenceSession('model.onnx', providers=['CPUExecutionProvider'])
results = sess.run(["output"], {"input": ortvalue})
values = [v.numpy() for v in sess.run_with_ort_values(["output"], {"input": ortvalue})]
""",
    "API: binding on the host": """
X = np.float32([[1, 2], [3, 4], [5, 6]])
session = onnxruntime.InferenceSession('model.onnx', providers=['CPUExecutionProvider'])
io_binding = session.io_binding()
io_binding.bind_cpu_input('input', X)
io_binding.bind_output('output')
session.run_with_iobinding(io_binding)
Y = io_binding.copy_outputs_to_cpu()[0]
shapes = [v.shape() for v in io_binding.get_outputs()]
""",
    "API: binding memory": """
X_ortvalue = onnxruntime.OrtValue.ortvalue_from_numpy(np.ones((3, 2), np.float32) * 3)
Y_ortvalue = onnxruntime.OrtValue.ortvalue_from_shape_and_type([3, 2], np.float32)
session = onnxruntime.InferenceSession('model.onnx', providers=['CPUExecutionProvider'])
io_binding = session.io_binding()
io_binding.bind_input(name='input', device_type=X_ortvalue.device_name(), device_id=0, element_type=np.float32,
                      shape=X_ortvalue.shape(), buffer_ptr=X_ortvalue.data_ptr())
io_binding.bind_output(name='output', device_type=Y_ortvalue.device_name(), device_id=0, element_type=np.float32,
                       shape=Y_ortvalue.shape(), buffer_ptr=Y_ortvalue.data_ptr())
session.run_with_iobinding(io_binding)
Y = Y_ortvalue.numpy()
""",
    "optimizations": """
sess_options = rt.SessionOptions()
sess_options.graph_optimization_level = rt.GraphOptimizationLevel.ORT_ENABLE_EXTENDED
session = rt.InferenceSession("model.onnx", sess_options, providers=["CPUExecutionProvider"])
outputs = session.run(None, {"input": np.ones((3, 2), np.float32)})
""",
    "threads": """
sess_options = rt.SessionOptions()
sess_options.intra_op_num_threads = 2
sess_options.execution_mode = rt.ExecutionMode.ORT_SEQUENTIAL
sess_options.add_session_config_entry("session.intra_op.allow_spinning", "0")
sess = rt.InferenceSession('model.onnx', sess_options, providers=["CPUExecutionProvider"])
ro = rt.RunOptions()
ro.log_severity_level = 3
outputs = sess.run(None, {"input": np.ones((3, 2), np.float32)}, ro)
""",
    "a model in memory": """
with open("model.onnx", "rb") as f:
    session = ort.InferenceSession(f.read(), providers=["CPUExecutionProvider"])
names = [i.name for i in session.get_inputs()], session.get_providers()
outputs = session.run(None, {"input": np.ones((3, 2), np.float32)})
""",
    "an extent fixed by its name": """
options = ort.SessionOptions()
options.add_free_dimension_override_by_name("batch", 3)
session = ort.InferenceSession("fashion_mnist_model.onnx", sess_options=options, providers=["CPUExecutionProvider"])
shape = session.get_inputs()[0].shape
outputs = session.run(None, {"input": np.ones((3, 1, 28, 28), np.float32)})
""",
}


def results(program: str, name: str) -> dict[str, Any]:
    """What a program computes, when `onnxruntime` is the module of that name."""
    found: dict[str, Any] = {}
    exec(re.sub(r"(?m)^import onnxruntime\b", f"import {name}", program), found)
    kept = int | float | str | bool | list | tuple | dict | np.ndarray | np.generic
    return {k: v for k, v in found.items() if isinstance(v, kept) and not k.startswith("__") and not k.startswith("providers")}


def check(got: Any, want: Any) -> None:
    if isinstance(want, dict):
        assert got.keys() == want.keys()
        got, want = [got[k] for k in want], [want[k] for k in want]
    if isinstance(want, list | tuple):
        assert len(got) == len(want)
        for g, w in zip(got, want, strict=True):
            check(g, w)
    elif isinstance(want, np.ndarray | float):
        assert np.shape(got) == np.shape(want) and np.asarray(got).dtype == np.asarray(want).dtype
        assert relative_error(np.asarray(got), np.asarray(want)) <= 1e-5
    else:
        assert got == want


@pytest.mark.filterwarnings("ignore:.*is not in available provider names:UserWarning")
@pytest.mark.filterwarnings("ignore:the output 'probabilities' is the array:RuntimeWarning")
@pytest.mark.parametrize("snippet", SNIPPETS)
def test_published_programs(snippet: str) -> None:
    program = BEFORE + SNIPPETS[snippet]
    want = results(program, "onnxruntime")
    got = results(program.replace("import onnxruntime\n", "import tccompile.ort as onnxruntime\n"), "tccompile.ort")
    assert got.keys() == want.keys() and len(want) > 0
    for name in want:
        check(got[name], want[name])


# --- What only this one does -----------------------------------------------------------------------------------------


def no_compiling(*_: object, **__: object) -> None:
    raise AssertionError("it was compiled")


def test_what_was_compiled_is_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """By content and options, for other sessions: a file of the same name with other weights is another model."""
    monkeypatch.setenv("TCCOMPILE_CACHE_DIR", str(tmp_path / "cache"))
    made, count = ort.without_code, []
    monkeypatch.setattr(ort, "without_code", lambda *a, **k: count.append(1) or made(*a, **k))
    net, x = tmp_path / "net.onnx", np.float32([[1, 2]])

    def run(scale: float, shape: tuple[int, ...] = (1, 2), precision: str = "fp32") -> np.ndarray:
        node = helper.make_node("Mul", ["x", "w"], ["y"])
        save(str(net), [node], [value("x", FLOAT, "n", 2)], [value("y", FLOAT, "n", 2)], w=np.float32(scale))
        options = ort.SessionOptions()
        options.add_session_config_entry("tccompile.precision", precision)
        return ort.InferenceSession(net, options, ["CPUExecutionProvider"]).run(None, {"x": np.broadcast_to(x, shape).copy()})[0]

    assert run(2).tolist() == [[2, 4]] and run(2).tolist() == [[2, 4]] and len(count) == 1
    assert run(3).tolist() == [[3, 6]] and len(count) == 2
    assert run(3, (2, 2)).shape == (2, 2) and len(count) == 3
    run(3, precision="fp16")
    assert len(count) == 4
    monkeypatch.setattr(ort, "without_code", no_compiling)
    assert run(3, (2, 2)).tolist() == [[3, 6]] * 2


@pytest.mark.parametrize("constant", [False, True], ids=["an initializer", "a Constant"])
def test_weights_in_a_file_of_their_own_are_content(constant: bool, tmp_path: Path) -> None:
    net, given = tmp_path / "net.onnx", {"x": np.ones((1, 2048), np.float32)}
    for scale in (1.0, 2.0):
        w = np.full(2048, scale, np.float32)
        nodes = [helper.make_node("Constant", [], ["w"], value=numpy_helper.from_array(w, "w"))] if constant else []
        nodes.append(helper.make_node("Mul", ["x", "w"], ["y"]))
        save(str(net), nodes, [value("x", FLOAT, 1, 2048)], [value("y", FLOAT, 1, 2048)], **({} if constant else {"w": w}))
        of = {"save_as_external_data": True, "location": "net.data", "size_threshold": 0, "convert_attribute": True}
        onnx.save(onnx.load(net), net, **of)
        assert (tmp_path / "net.data").exists()
        assert ort.InferenceSession(str(net)).run([], given)[0][0, 0] == scale
        (tmp_path / "net.data").unlink()


def test_files_outside_the_models_folder_are_not_read(tmp_path: Path) -> None:
    (tmp_path / "inner").mkdir()
    (tmp_path / "secret").write_bytes(bytes(4))
    for place in ("../secret", str(tmp_path / "secret"), "/dev/zero"):
        tensor = onnx.TensorProto(name="w", data_type=FLOAT, dims=[1], data_location=onnx.TensorProto.EXTERNAL)
        tensor.external_data.add(key="location", value=place)
        graph = helper.make_graph(
            [helper.make_node("Mul", ["x", "w"], ["y"])], "g", [value("x", FLOAT, 1)], [value("y", FLOAT, 1)]
        )
        graph.initializer.append(tensor)
        made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
        (tmp_path / "inner" / "m.onnx").write_bytes(made.SerializeToString())
        with pytest.raises(ModelError, match="outside the model's folder; it will not be read"):
            ort.InferenceSession(tmp_path / "inner" / "m.onnx")


def test_values_that_decide_shapes_are_compiled_in(tmp_path: Path) -> None:
    node = helper.make_node("Reshape", ["x", "shape"], ["y"])
    save(str(tmp_path / "r.onnx"), [node], [value("x", FLOAT, 2, 3), value("shape", INT, 2)], [value("y", FLOAT, "a", "b")])
    session, x = ort.InferenceSession(tmp_path / "r.onnx"), np.arange(6, dtype=np.float32).reshape(2, 3)
    for shape in ((3, 2), (1, 6), (3, 2)):
        np.testing.assert_array_equal(session.run(None, {"x": x, "shape": np.array(shape)})[0], x.reshape(shape))


def test_what_is_refused_says_so_in_python(tmp_path: Path) -> None:
    nodes = [helper.make_node("Neg", ["x"], ["n"], "good"), helper.make_node("Det", ["n"], ["y"], "the determinant")]
    save(str(tmp_path / "d.onnx"), nodes, [value("x", FLOAT, 4, 4)], [value("y", FLOAT)])
    with pytest.raises(UnsupportedError, match="the determinant") as error:
        ort.InferenceSession(tmp_path / "d.onnx", providers=["CPUExecutionProvider"])
    assert "--" not in str(error.value)


def test_a_plan_by_its_path(tmp_path: Path) -> None:
    tccompile.pipeline.without_code("model.onnx", precision="fp32").save(tmp_path / "m.plan")
    session = ort.InferenceSession(str(tmp_path / "m.plan"), providers=["CPUExecutionProvider"])
    assert session.run(None, {"input": np.full((3, 2), 3, np.float32)})[0].tolist() == [[9, 9]] * 3
    assert session.get_modelmeta().custom_metadata_map == {"stride": "32"}
    assert repr(session) == "<InferenceSession: input → output, on cpu>"
    assert repr(session.get_inputs()[0]) == "NodeArg(name='input', type='tensor(float)', shape=[3, 2])"


@pytest.mark.parametrize(
    ("call", "error", "says"),
    [
        (lambda s: s.run(None, {}), InputError, "input 'input' is missing"),
        (lambda s: s.run(None, {"image": 1}), InputError, "no input 'image'; it has 'input'"),
        (lambda s: s.run(["nope"], {"input": np.ones((1, 1, 28, 28), np.float32)}), InputError, "no output 'nope'"),
        (lambda s: s.run(None, {"input": np.ones((1, 28, 28), np.float32)}), InputError, "has shape batchx1x28x28, got 1x28x28"),
        (lambda s: s.run(None, {"input": np.ones((1, 1, 28, 28))}), InputError, "float64"),
        (lambda _: ort.InferenceSession("nowhere.onnx"), UsageError, "nowhere.onnx"),
        (lambda _: ort.InferenceSession(b"nothing"), ModelError, "not an ONNX file"),
        (lambda _: ort.SessionOptions().register_custom_ops_library("x.so"), UsageError, "x.so"),
    ],
)
def test_errors(call: Callable[[Any], object], error: type[Exception], says: str) -> None:
    session = ort.InferenceSession("fashion_mnist_model.onnx", providers=["CPUExecutionProvider"])
    with pytest.raises(error, match=says):
        call(session)


def test_providers_that_are_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ort, "_gpu_there", lambda _: False)
    with pytest.warns(RuntimeWarning, match="nothing to run CUDAExecutionProvider on: the session runs on the CPU"):
        session = ort.InferenceSession("model.onnx", providers=["CUDAExecutionProvider"])
    assert session.get_providers() == ["CPUExecutionProvider"] and ort.get_device() == "CPU"


def test_it_has_what_onnx_runtime_has() -> None:
    for name in ("InferenceSession", "IOBinding", "OrtValue", "SessionOptions", "RunOptions", "GraphOptimizationLevel",
                 "ExecutionMode", "NodeArg", "get_available_providers", "get_all_providers", "get_device"):  # fmt: skip
        assert hasattr(ort, name) and hasattr(onnxruntime, name)
    for level in ort.GraphOptimizationLevel:
        assert hasattr(onnxruntime.GraphOptimizationLevel, level.name)
