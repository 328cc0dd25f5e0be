"""ONNX Runtime's API on a GPU: which device providers name, and memory of the caller's there. The driver is a fake."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

import tccompile
import tccompile.ort as ort
from tccompile.errors import InputError
from tests.runtime.fake_driver import FakeApi
from tests.runtime.test_session import expected, fake, plan, x_of

__all__ = ["fake"]  # a fixture


@pytest.fixture
def path(tmp_path: Path) -> str:
    plan().save(tmp_path / "m.plan")
    return str(tmp_path / "m.plan")


GPU = [("CUDAExecutionProvider", {"device_id": 0}), "CPUExecutionProvider"]


def test_memory_of_the_callers(fake: Callable[..., FakeApi], path: str) -> None:
    """Inputs and outputs that are bound stay where they are, run after run."""
    fake()
    session = ort.InferenceSession(path, providers=GPU)
    assert session.get_providers()[0] == "CUDAExecutionProvider" and ort.get_device() == "GPU"
    x, y = (
        ort.OrtValue.ortvalue_from_numpy(x_of(), "cuda", 0),
        ort.OrtValue.ortvalue_from_shape_and_type([2, 3], np.float32, "cuda"),
    )
    assert (x.device_name(), x.shape(), x.data_type(), x.element_type()) == ("cuda", [2, 3], "tensor(float)", 1)
    binding = session.io_binding()
    binding.bind_ortvalue_input("x", x)
    binding.bind_output("y", y.device_name(), 0, np.float32, y.shape(), y.data_ptr())
    binding.bind_output("z", "cpu")
    for scale in (1, 2):
        x.update_inplace(scale * x_of())
        binding.synchronize_inputs()
        session.run_with_iobinding(binding)
        np.testing.assert_array_equal(y.numpy(), expected(scale * x_of())[0])
        for got, want in zip(binding.copy_outputs_to_cpu(), expected(scale * x_of()), strict=True):
            np.testing.assert_array_equal(got, want)
    assert binding.get_outputs()[0].data_ptr() == y.data_ptr()
    with pytest.raises(InputError, match=r"shape \(2, 3\) cannot take an array of shape \(3, 3\)"):
        x.update_inplace(np.zeros((3, 3), np.float32))


@pytest.mark.parametrize(
    ("providers", "device"),
    [
        (None, "gpu:0"),
        (GPU, "gpu:0"),
        (["TensorrtExecutionProvider", "CUDAExecutionProvider"], "gpu:0"),
        (["CPUExecutionProvider", "CUDAExecutionProvider"], "cpu"),
        ([("CUDAExecutionProvider", {"device_id": 7}), "CPUExecutionProvider"], "cpu"),
        (["OpenVINOExecutionProvider", "CPUExecutionProvider"], "cpu"),
    ],
)
def test_the_first_provider_that_there_is(providers: Any, device: str, fake: Callable[..., FakeApi], path: str) -> None:
    fake()
    session = ort.InferenceSession(path, providers=providers)
    assert session._fixed.device == device
    np.testing.assert_array_equal(session.run(["y"], {"x": x_of()})[0], expected(x_of())[0])


def test_other_providers_later(fake: Callable[..., FakeApi], path: str) -> None:
    fake()
    session = ort.InferenceSession(path, providers=GPU)
    for providers, device in ((["CPUExecutionProvider"], "cpu"), (GPU, "gpu:0")):
        session.set_providers(providers)
        assert session._fixed.device == device
        np.testing.assert_array_equal(session.run(["y"], {"x": x_of()})[0], expected(x_of())[0])


def test_a_model_is_compiled_for_the_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TCCOMPILE_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(ort, "open_device", lambda _: SimpleNamespace(cc=(8, 7)))
    asked = []
    made = tccompile.pipeline.without_code
    monkeypatch.setattr(ort, "compile_model", lambda model, options: asked.append(options) or made(model, options.entries[0]))
    monkeypatch.setattr(ort, "Session", lambda plan, device: asked.append(device) or tccompile.Session(plan, "cpu"))
    values = [helper.make_tensor_value_info(n, TensorProto.FLOAT, ("n", 2)) for n in ("x", "y")]
    graph = helper.make_graph([helper.make_node("Neg", ["x"], ["y"])], "g", values[:1], values[1:])
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), tmp_path / "m.onnx")
    session = ort.InferenceSession(tmp_path / "m.onnx")
    assert not asked and session.run(None, {"x": np.ones((3, 2), np.float32)})[0].tolist() == [[-1, -1]] * 3
    options, device = asked
    assert device == "gpu:0" and options.archs == ("sm_80",) and options.precision == "mixed"
    assert options.entries == ({"x": (3, 2)},)
