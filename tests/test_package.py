"""What a newcomer types first: the package's names, with and without the compiler; arguments and errors of Python's functions."""

from __future__ import annotations

import importlib
import io
import pickle
import subprocess
import sys
import tomllib
from pathlib import Path

import ml_dtypes
import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

import tccompile
from tccompile.arch import ARCHS, PTX, TEGRA, arch_named, what_runs_on
from tccompile.errors import DeviceError, InputError, PlanError, TccompileError, UnsupportedError, UsageError
from tccompile.load.model import plausible
from tccompile.pipeline import without_code
from tccompile.plan.file import Plan, from_bytes, to_bytes
from tccompile.python import ARGUMENTS, as_python
from tccompile.runtime.generations import archs_of, native
from tests import user_script

ROOT = Path(__file__).parents[1]
FLOAT = TensorProto.FLOAT


def model(shape: tuple[int | str, ...] = (2, 4), elem: int = FLOAT, ops: tuple[str, ...] = ("Relu", "Neg")) -> onnx.ModelProto:
    """Of one input `x`, an output for each op, called as it."""
    nodes = [helper.make_node(op, ["x"], [op.lower()], f"node {op}") for op in ops]
    outputs = [helper.make_tensor_value_info(op.lower(), elem, None) for op in ops]
    graph = helper.make_graph(nodes, "small", [helper.make_tensor_value_info("x", elem, shape)], outputs)
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8, producer_name="a test")
    made.metadata_props.add(key="names", value="{0: 'cat'}")
    return made


@pytest.fixture(scope="module")
def plan() -> Plan:
    return without_code(model(), precision="fp32")


X = np.float32([[1, -2, 3, -4], [0, 5, -6, 7]])

# --- Names -----------------------------------------------------------------------------------------------------------


def test_a_module_inside_does_not_take_a_functions_place() -> None:
    for module in ("tccompile.check", "tccompile.verify.oracle"):
        importlib.import_module(module)
    assert tccompile.check.__module__ == tccompile.verify.__module__ == "tccompile.api"
    assert all(callable(getattr(tccompile, name)) for name in tccompile.__all__ if name != "errors")


WITHOUT = """
import inspect, pydoc, sys
for name in ("onnx", "onnx_graphsurgeon", "numba", "numba_cuda", "rich"):
    sys.modules[name] = None
import tccompile
assert all(hasattr(tccompile, name) for name in dir(tccompile))
text = pydoc.render_doc(tccompile, renderer=pydoc.plaintext)
assert "run(self, output_names" in text and "needs the extra `compiler`" in text
assert all(inspect.signature(getattr(tccompile, n)) for n in ("compile", "verify", "Session"))
for call in (lambda: tccompile.compile("m.onnx"), lambda: tccompile.check("m.onnx"), lambda: tccompile.weights("m.onnx"),
             lambda: tccompile.verify("m.plan", "m.onnx")):
    try:
        call()
    except ModuleNotFoundError as error:
        assert error.name == "onnx" and "pip install 'tccompile[compiler]'" in str(error)
    else:
        raise AssertionError(call)
assert not any(hasattr(tccompile, name) for name in ("Nope", "pipeline_"))
for module in ("ort", "backend"):
    try:
        __import__(f"tccompile.{module}")
    except ModuleNotFoundError as error:
        assert str(error) == "onnx is not installed: pip install 'tccompile[compiler]'"
    else:
        raise AssertionError(module)
print(sorted(tccompile.inspect(sys.argv[1])))
"""


def test_without_the_compiler_everything_can_be_looked_at(plan: Plan, tmp_path: Path) -> None:
    plan.save(tmp_path / "small.plan")
    done = subprocess.run([sys.executable, "-c", WITHOUT, tmp_path / "small.plan"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "entries" in done.stdout and "weights" in done.stdout


ON_WINDOWS = """
import os, pkgutil, sys
from importlib import import_module
import click, ctypes, multiprocessing, numpy as np, pathlib, subprocess, tempfile
for name in ("fcntl", "grp", "pty", "pwd", "resource", "syslog", "termios", "tty", "onnx", "numba", "numba_cuda", "rich", "cuda"):
    sys.modules[name] = None
unix = "fork fchown geteuid getuid mkfifo posix_fadvise pread preadv sched_getaffinity statvfs uname"
for name in unix.split():
    delattr(os, name)
sys.platform = "win32"
import tccompile
for part in ("runtime", "plan", "refit", "ir"):
    package = import_module(f"tccompile.{part}")
    for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
        import_module(module.name)
try:
    tccompile.Session(sys.argv[1], "gpu")
except tccompile.errors.DeviceError as error:
    print(error)
with tccompile.Session(sys.argv[1], "cpu") as session:
    print(session.run(["neg"], {"x": np.ones((2, 4), np.float32)})[0].tolist())
from tccompile.cli.commands import tcinspect
tcinspect.main([sys.argv[1]], "tcinspect")
"""


def test_the_runtime_takes_nothing_that_windows_has_not(plan: Plan, tmp_path: Path) -> None:
    """As far as it shows here: without modules and functions of Unix, and text only in encodings that are named."""
    plan.save(tmp_path / "small.plan")
    options = ("-X", "warn_default_encoding", "-W", "error::EncodingWarning")
    command = [sys.executable, *options, "-c", ON_WINDOWS, tmp_path / "small.plan"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    gpu, values, *told = done.stdout.splitlines()
    assert (
        "pip install cuda-bindings" in gpu
        and values == str([[-1.0] * 4] * 2)
        and told[0].startswith(str(tmp_path / "small.plan"))
    )


def test_a_users_program_that_is_typed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`make check` holds its types; what it does, but for building for a GPU, it does."""
    assert "tests.user_script" in tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["mypy"]["modules"]
    made = without_code(model(), precision="fp32")
    monkeypatch.setattr(tccompile, "compile", lambda *_, **__: made, raising=False)
    onnx.save(model(), tmp_path / "m.onnx")
    read = user_script.compiled(tmp_path / "m.onnx")
    relu, neg = user_script.run(read, X)
    for y, again in zip((relu, neg), user_script.by_onnx_runtimes_api((tmp_path / "m.onnx").read_bytes(), X), strict=True):
        np.testing.assert_array_equal(y, again)


def test_as_a_module() -> None:
    done = subprocess.run([sys.executable, "-m", "tccompile", "-h"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.startswith("Usage: python -m tccompile [OPTIONS] MODEL.onnx")


# --- Models and plans, however they are given -------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["str", "Path", "proto", "bytes", "file", "BytesIO"])
def test_models_in_every_form(form: str, tmp_path: Path) -> None:
    proto, path = model(ops=("Relu",)), tmp_path / "m.onnx"
    onnx.save(proto, path)
    with open(path, "rb") as file:
        given = {"str": str(path), "Path": path, "proto": proto, "bytes": path.read_bytes(), "file": file}
        given["BytesIO"] = io.BytesIO(path.read_bytes())
        assert not tccompile.check(given[form]).missing


@pytest.mark.parametrize(
    ("given", "says"), [(b"nothing", "not an ONNX file"), (io.StringIO("x"), "open it with 'rb'"), (7, "int")]
)
def test_what_is_no_model(given: object, says: str) -> None:
    with pytest.raises(TccompileError, match=says):
        tccompile.check(given)  # type: ignore[arg-type]


@pytest.mark.parametrize("form", ["bytes", "file", "BytesIO"])
def test_sessions_of_bytes(form: str, plan: Plan, tmp_path: Path) -> None:
    path = tmp_path / "m.plan"
    plan.save(path)
    with open(path, "rb") as file:
        given = {"bytes": path.read_bytes(), "file": file, "BytesIO": io.BytesIO(path.read_bytes())}[form]
        with tccompile.Session(given, "CPU") as session:
            np.testing.assert_array_equal(session.run([], {"x": X})[0], np.maximum(X, 0))


@pytest.mark.parametrize("given", [model(), io.StringIO("x"), 7], ids=["a model", "text", "a number"])
def test_what_is_no_plan(given: object) -> None:
    with pytest.raises(UsageError, match="a session takes a Plan, a path, bytes or an open file, not a"):
        tccompile.Session(given, "cpu")  # type: ignore[arg-type]


def test_bytes_of_no_plan() -> None:
    with pytest.raises(PlanError, match="what was given in memory: this is not a plan"):
        tccompile.Session(b"nothing", "cpu")


# --- The session -----------------------------------------------------------------------------------------------------


def test_a_binary_file_that_is_open_as_text(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"\xe9\xff\x00")  # as text it cannot even be read
    for take in (tccompile.Session, tccompile.check):
        with open(tmp_path / "file", encoding="utf-8") as file, pytest.raises(UsageError, match="open as text: open it"):
            take(file)


def test_the_way_to_other_shapes_is_said_for_commands_and_for_python(plan: Plan) -> None:
    with pytest.raises(InputError, match=r"got 3x4\..* tccompile --shape x=3x4, in Python shapes=\{'x': \(3, 4\)\}$"):
        tccompile.Session(plan, "cpu").run(None, {"x": np.zeros((3, 4), np.float32)})


def test_runs_as_onnx_runtimes_do(plan: Plan) -> None:
    with pytest.warns(RuntimeWarning, match=r"providers are ONNX Runtime's: this session runs on device='cpu'"):
        session = tccompile.Session(plan, "cpu", providers=["CUDAExecutionProvider"])
    for names in (None, [], ("relu", "neg"), np.array(["relu", "neg"])):
        relu, neg = session.run(output_names=names, input_feed={"x": X})  # type: ignore[arg-type]
        np.testing.assert_array_equal(relu, np.maximum(X, 0))
        np.testing.assert_array_equal(neg, -X)
    meta = session.get_modelmeta()
    assert (meta.producer_name, meta.graph_name, meta.custom_metadata_map) == ("a test", "small", {"names": "{0: 'cat'}"})
    assert from_bytes(to_bytes(plan)).metadata == meta
    assert session.entries == ({"x": (2, 4)},) and session.get_providers() == ["CPUExecutionProvider"]
    assert repr(session) == "<Session of <Plan 'cpu': x 2x4 → relu 2x4, neg 2x4, for cpu>, cpu>"
    session.close()
    assert repr(session).endswith(">, closed>")


@pytest.mark.parametrize("device", ["cuda", "CUDA:0", "gpu", "GPU:0"])
def test_a_gpu_by_each_of_its_names(device: str, plan: Plan) -> None:
    with pytest.raises(DeviceError, match=r"no code|no NVIDIA|no usable"):
        tccompile.Session(plan, device)


def test_pickled_by_path(plan: Plan, tmp_path: Path) -> None:
    plan.save(tmp_path / "m.plan")
    with tccompile.Session(tmp_path / "m.plan", "cpu") as session, pickle.loads(pickle.dumps(session)) as again:
        np.testing.assert_array_equal(again.run(["neg"], {"x": X})[0], -X)
    with pytest.raises(TypeError, match="save the plan, and open a Session of its path"):
        pickle.dumps(tccompile.Session(plan, "cpu"))
    assert to_bytes(pickle.loads(pickle.dumps(Plan.load(tmp_path / "m.plan")))) == to_bytes(plan)


def test_a_session_of_other_weights_is_not_pickled(tmp_path: Path) -> None:
    """It would be opened again with the plan's own."""
    w = np.float32([[1, 2], [3, 4]])
    node = helper.make_node("MatMul", ["x", "w"], ["y"])
    values = [helper.make_tensor_value_info(n, FLOAT, (2, 2)) for n in ("x", "y")]
    graph = helper.make_graph([node], "g", values[:1], values[1:], [onnx.numpy_helper.from_array(w, "w")])
    made = without_code(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), precision="fp32")
    made.save(tmp_path / "m.plan")
    with tccompile.Session(tmp_path / "m.plan", "cpu") as session:
        session.refit({"w": w + 1})
        with pytest.raises(TypeError, match="other weights than its plan's cannot be pickled: tcrefit writes a plan"):
            pickle.dumps(session)
        session.refit({"w": w})
        assert pickle.dumps(session)


def test_bf16_of_other_libraries() -> None:
    """As PyTorch's: a CPU tensor hands out DLPack's bfloat16, and takes what is written into its memory."""
    made = without_code(model((3,), TensorProto.BFLOAT16, ("Neg",)), precision="bf16")
    x, y = (np.array(v, ml_dtypes.bfloat16) for v in ([1.5, -3, 1e30], [0, 0, 0]))

    class Tensor:
        def __init__(self, values: np.ndarray) -> None:
            self.values = values

        def __dlpack_device__(self) -> tuple[int, int]:
            return 1, 0

        def __dlpack__(self, **_: object) -> object:
            return capsule(self.values)

    with tccompile.Session(made, "cpu") as session:
        session.run(None, {"x": Tensor(x)}, {"neg": Tensor(y)})
    np.testing.assert_array_equal(y, -x)


def capsule(values: np.ndarray) -> object:
    """DLPack's description of values on the host as bfloat16."""
    from tccompile.runtime import arrays

    made = arrays._capsule(values, values.ctypes.data, values.shape, arrays.DType.BF16, 0)
    managed = next(m for owner, m, *_ in arrays._exported.values() if owner is values)
    managed.tensor.device_type = 1
    return made


# --- Errors in Python's words -----------------------------------------------------------------------------------------

SPOKEN = {
    "as in --shape image=1x3x224x224": "as in shapes={'image': (1, 3, 224, 224)}",
    "as in --shape 'an image=7' (its own": "as in shapes={'an image': (7,)} (its own",
    "say it: --nchwc-block 16 for CPUs": "say it: nchwc_block=16 for CPUs",
    "compile with --calibrate INPUT, or --precision fp32": "compile with calibrate='INPUT', or precision='fp32'",
    "--fp32 'a b'); leave it out (--arch)": "fp32=['a b']); leave it out (archs)",
    "--max-error runs the model": "max_error runs the model",
    "give --arch sm_80": "give archs=['sm_80']",
    "5 more things are missing: --check lists all": "5 more things are missing: tccompile.check(model) lists all",
    "nodes: tccompile 'm m.onnx' --output y --output z --shape x=1x2": (
        "nodes: tccompile.compile('m m.onnx', outputs=['y', 'z'], shapes={'x': (1, 2)})"
    ),
    "nodes: tccompile MODEL.onnx --input x": "nodes: tccompile.compile(model, inputs=['x'])",
    "(tcrun --weights MODEL.onnx)": "(tcrun --weights MODEL.onnx)",
    "tccompile MODEL.onnx --verify": "tccompile MODEL.onnx --verify",
    "say which with --mapping": "say which with --mapping",
}


@pytest.mark.parametrize("said", SPOKEN)
def test_messages_name_arguments(said: str) -> None:
    assert as_python(said) == SPOKEN[said]


def test_every_argument_that_messages_name_is_there() -> None:
    import inspect

    known = {*inspect.signature(tccompile.compile).parameters, *inspect.signature(tccompile.verify).parameters}
    for argument, _ in ARGUMENTS.values():
        assert argument.startswith("tccompile.") or argument.partition("=")[0] in known, argument


def test_an_open_shape_is_asked_for_in_python() -> None:
    for open_axis, sizes in (("batch", r"\{'batch': \(1, 8\)\}"), (None, r"\{'x': \(\(1, 8\), 3, 224, 224\)\}")):
        says = r"as in shapes=\{'x': \(1, 3, 224, 224\)\}, or between what, as in ranges=" + sizes
        with pytest.raises(UsageError, match=f"{says}$"):
            tccompile.compile(model((open_axis, 3, "h", "w")), archs=["sm_86"])
    with pytest.raises(UsageError, match=r"--fp32|unknown GPU generation 'h10'; did you mean sm_90a\?"):
        tccompile.compile(model(), archs=["h10"])


def test_a_refusal_is_a_call_that_compiles() -> None:
    """The cut that an error names can be typed as it stands."""
    made = model((2, 4, 4), ops=("Relu", "Det"))
    with pytest.raises(UnsupportedError) as error:
        tccompile.compile(made, archs=["sm_86"])
    call = str(error.value).splitlines()[-1].partition("nodes: ")[2]
    assert call == "tccompile.compile(model, outputs=['relu'])"


SIZES = {
    ("batch", 3, "height", "width"): (1, 3, 224, 224),
    ("N", "?", "?", 3): (1, 224, 224, 3),
    ("?", "?", "?", "?"): (1, 3, 224, 224),
    ("batch_size", "sequence_length"): (1, 128),
    ("b", "num_heads", "past_len", 64): (1, 8, 128, 64),
    ("unk__1", "unk__2", 768): (1, 128, 768),
    ("n",): (1,),
}


@pytest.mark.parametrize("said", SIZES)
def test_sizes_that_are_suggested_are_plausible(said: tuple[int | str, ...]) -> None:
    assert plausible(said) == SIZES[said]


# --- GPU generations -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["{}", "{major}.{minor}", "{major}{minor}", "sm_{major}{minor}", "compute_{major}{minor}"])
def test_generations_by_each_of_their_names(form: str) -> None:
    for name, arch in ARCHS.items():
        assert arch_named(form.format(name, major=arch.cc[0], minor=arch.cc[1])) == name


def test_generations_that_nothing_is_built_for() -> None:
    """What an error advises for a GPU is what `native` builds for it."""
    for cc in [*TEGRA, (5, 2), (6, 0), (8, 8), (10, 3), (12, 1), (13, 0)]:
        advised = what_runs_on(cc).partition("--arch ")[2]
        assert (advised,) == native(cc) or (not advised and native(cc) == ())
        assert advised in PTX or cc not in TEGRA or not advised
        with pytest.raises(UsageError, match="no code is built for"):
            arch_named(f"{cc[0]}.{cc[1]}")


def test_native_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    def none(_: int) -> None:
        raise DeviceError("no NVIDIA driver is installed")

    monkeypatch.setattr("tccompile.runtime.generations.open_device", none)
    with pytest.raises(DeviceError, match="native means the GPU of this machine: no NVIDIA driver is installed; name the"):
        archs_of(["native"])
    assert archs_of(["all", " 86"]) == tuple(ARCHS)
    assert archs_of([(8, 6), 8.6, 86, "sm_86"]) == ("sm_86",) and archs_of([(10, 0), 9.0]) == ("sm_100", "sm_90a")


def test_a_plan_is_not_compiled_again(plan: Plan, tmp_path: Path) -> None:
    plan.save(tmp_path / "m.plan")
    with pytest.raises(UsageError, match=r"m\.plan is a plan already: open a Session of it"):
        tccompile.compile(tmp_path / "m.plan")


WRONG = {
    "calibrate": ({"x": X}, r"calibrate is the path of a file, not an object of type dict; numpy.savez\('data.npz'"),
    "metric": (len, "metric is the path of a file, not an object of type builtin_function_or_method$"),
    "ranges": ({"batch": 5}, r"the range of 'batch' is 5: give \(LOW, HIGH\)"),
    "max_error": ("1e-3", "the error that is allowed is a number such as 1e-3, not '1e-3'"),
}


@pytest.mark.parametrize("argument", WRONG)
def test_arguments_of_another_type(argument: str) -> None:
    given, says = WRONG[argument]
    with pytest.raises(UsageError, match=says):
        tccompile.compile(model(), archs=["sm_86"], **{argument: given})  # type: ignore[arg-type]


def test_a_plan_that_cannot_be_written_names_its_own_file(plan: Plan, tmp_path: Path) -> None:
    """And not the one that it is written into until it is whole."""
    (tmp_path / "folder").mkdir()
    for path, kind in ((tmp_path / "nowhere" / "m.plan", FileNotFoundError), (tmp_path / "folder", OSError)):
        with pytest.raises(kind) as error:
            plan.save(path)
        assert error.value.filename == str(path) and error.value.filename2 is None
    assert [p.name for p in tmp_path.iterdir()] == ["folder"]


def test_a_batch_beside_a_number() -> None:
    """As a diffusion step has them: what other shapes take says nothing of the number."""
    graph = helper.make_graph(
        [helper.make_node("Mul", ["sample", "t"], ["y"])], "g",
        [helper.make_tensor_value_info("sample", FLOAT, ("batch", 4)), helper.make_tensor_value_info("t", FLOAT, ())],
        [helper.make_tensor_value_info("y", FLOAT, None)],
    )  # fmt: skip
    proto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    sample, t = np.ones((1, 4), np.float32), np.float32(3)
    with tccompile.Session(without_code(proto, {"sample": (1, 4)}), "cpu") as session:
        assert session.run(None, {"sample": sample, "t": t})[0].tolist() == [[3] * 4]
        with pytest.raises(InputError, match=r"type float is not an array; numpy.asarray makes one of numbers"):
            session.run(None, {"sample": sample, "t": 3.0})
        with pytest.raises(InputError, match=r"tccompile --shape sample=2x4, in Python shapes=\{'sample': \(2, 4\)\}$"):
            session.run(None, {"sample": np.ones((2, 4), np.float32), "t": t})


def test_names_and_layouts_that_were_meant() -> None:
    image = [helper.make_tensor_value_info(n, FLOAT, (1, 3, 4, 8)) for n in ("pixel_values", "pixel_mask", "y")]
    graph = helper.make_graph([helper.make_node("Add", ["pixel_values", "pixel_mask"], ["y"])], "g", image[:2], image[2:])
    made = without_code(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), precision="fp32")
    x = np.zeros((1, 3, 4, 8), np.float32)
    with tccompile.Session(made, "cpu") as session:
        with pytest.raises(InputError, match=r"no input 'Pixel-Values' \(did you mean 'pixel_values'\?\); it has"):
            session.run(None, {"Pixel-Values": x, "pixel_mask": x})
        with pytest.raises(InputError, match=r"Its channels come first: give pixel_mask as array.transpose\(0, 3, 1, 2\)$"):
            session.run(None, {"pixel_values": x, "pixel_mask": x.transpose(0, 2, 3, 1)})


def test_reports_are_printed() -> None:
    report = tccompile.check(model(("batch", 3, "h", "w")))
    assert "--shape x=1x3x224x224" in report.text and "shapes={'x': (1, 3, 224, 224)}" in str(report)
    verification = tccompile.verify(without_code(model(), precision="fp32"), model())
    assert str(verification).startswith("pass  relu: error 0") and verification.passed
