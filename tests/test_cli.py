"""The commands as a user meets them: what they print, where, and with which exit code; never a traceback."""

from __future__ import annotations

import json
import os
import re
import resource
import signal
import subprocess
import sys
import time
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import tccompile
from tccompile.errors import PlanError, UsageError
from tccompile.options import parse_entry, parse_shapes
from tccompile.plan import FORMAT_VERSION
from tccompile.plan.file import Plan, write_plan
from tests.networks import reference, relative_error
from tests.plans import without_code
from tests.tiers import thorough, usually

FLOAT = TensorProto.FLOAT
GPU = subprocess.run([sys.executable, "-c", "from tccompile.runtime.driver import open_device; open_device(0)"],
                     capture_output=True).returncode == 0  # fmt: skip


# --- Models ----------------------------------------------------------------------------------------------------------


def conv(shape: Sequence[int | str] = (1, 3, 8, 8), scale: float = 1.0, opset: int = 17) -> onnx.ModelProto:
    """Two convolutions with a Relu between; `scale` multiplies the first one's weights. 16384 bytes of weights and more."""
    rng = np.random.default_rng(0)
    weights = {
        "w1": rng.standard_normal((48, 3, 3, 3)).astype(np.float32) * np.float32(scale / 5),
        "w2": rng.standard_normal((32, 48, 3, 3)).astype(np.float32) / np.float32(20),
    }
    nodes = [
        helper.make_node("Conv", ["x", "w1"], ["a"], name="first", pads=[1, 1, 1, 1]),
        helper.make_node("Relu", ["a"], ["b"], name="positive"),
        helper.make_node("Conv", ["b", "w2"], ["y"], name="second", pads=[1, 1, 1, 1]),
    ]
    out = helper.make_tensor_value_info("y", FLOAT, (shape[0], 32, *shape[2:]))
    return model(nodes, [helper.make_tensor_value_info("x", FLOAT, shape)], [out], weights, opset)


def model(
    nodes: list[Any], inputs: list[Any], outputs: list[Any], weights: Mapping[str, np.ndarray] | None = None, opset: int = 17
) -> onnx.ModelProto:
    initializers = [numpy_helper.from_array(v, n) for n, v in (weights or {}).items()]
    graph = helper.make_graph(nodes, "g", inputs, outputs, initializers)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=8)


def two() -> onnx.ModelProto:
    """Two inputs and two outputs."""
    nodes = [helper.make_node("Add", ["x", "z"], ["sum"]), helper.make_node("Sub", ["x", "z"], ["file"])]
    return model(
        nodes,
        [helper.make_tensor_value_info(n, FLOAT, (2, 5)) for n in ("x", "z")],
        [helper.make_tensor_value_info(n, FLOAT, (2, 5)) for n in ("sum", "file")],
    )


def unsupported() -> onnx.ModelProto:
    nodes = [
        helper.make_node("Relu", ["x"], ["a"], name="fine"),
        helper.make_node("Det", ["a"], ["d"], name="the_determinant"),
        helper.make_node("Neg", ["d"], ["y"], name="after"),
    ]
    x, y = (helper.make_tensor_value_info(n, FLOAT, s) for n, s in (("x", (2, 4, 4)), ("y", (2,))))
    return model(nodes, [x], [y])


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of models and other files."""
    folder = tmp_path_factory.mktemp("models")
    onnx.save(conv(), folder / "conv.onnx")
    onnx.save(conv(("batch", 3, "height", 8)), folder / "open.onnx")
    onnx.save(conv(scale=1e6), folder / "weights.onnx")
    onnx.save(conv(opset=30), folder / "newer.onnx")
    onnx.save(two(), folder / "two.onnx")
    onnx.save(unsupported(), folder / "unsupported.onnx")
    for name, elem in (("relu", FLOAT), ("bf16", TensorProto.BFLOAT16)):
        x, y = (helper.make_tensor_value_info(n, elem, (2, 4)) for n in ("x", "y"))
        onnx.save(model([helper.make_node("Relu", ["x"], ["y"])], [x], [y]), folder / f"{name}.onnx")
    onnx.save(conv(), folder / "outside.onnx", save_as_external_data=True, location="outside.data")
    np.save(folder / "nan.npy", np.full((1, 3, 8, 8), np.nan, np.float32))
    (folder / "truncated.onnx").write_bytes((folder / "conv.onnx").read_bytes()[:3000])
    (folder / "text.onnx").write_text("hello, world: this is no model\n" * 5)
    (folder / "empty.onnx").write_bytes(b"")
    return folder


@pytest.fixture(scope="module")
def plans(models: Path) -> Path:
    """The same folder with plans, which only the CPU engine can run, and inputs."""

    def write(name: str, plan: Plan) -> None:
        write_plan(plan, models / name)

    whole = without_code(conv(), ("sm_80", "sm_90a"))
    write("conv.plan", whole)
    write("two.plan", without_code(two(), ("sm_80",)))
    write("overflow.plan", without_code(conv(scale=6e4), ("sm_80",)))
    write("stripped.plan", replace(whole, weights={n: w for n, w in whole.weights.items() if len(w) <= 4096}))
    data = (models / "conv.plan").read_bytes()
    (models / "cut.plan").write_bytes(data[: len(data) // 2])
    (models / "version.plan").write_bytes(data[:8] + (99).to_bytes(4, "little") + data[12:])
    (models / "damaged.plan").write_bytes(data[:-5000] + bytes(b ^ 1 for b in data[-5000:]))
    (models / "text.plan").write_text("hello, world: this is no plan\n" * 5)
    rng = np.random.default_rng(1)
    x = rng.standard_normal((1, 3, 8, 8)).astype(np.float32)
    np.save(models / "x.npy", x)
    np.save(models / "x64.npy", x.astype(np.float64))
    np.save(models / "x9.npy", rng.standard_normal((1, 3, 9, 8)).astype(np.float32))
    np.save(models / "x3.npy", x[0])
    np.savez(models / "x.npz", x=x)
    np.savez(models / "wrong.npz", picture=x)
    np.savez(models / "two.npz", x=x[0, 0, :2, :5], z=x[0, 1, :2, :5])
    np.savez(models / "half.npz", x=x[0, 0, :2, :5])
    np.save(models / "pickled.npy", np.array([{"a": 1}], dtype=object), allow_pickle=True)
    np.savez(models / "pickled.npz", x=np.array([{"a": 1}], dtype=object))
    (models / "cut.npy").write_bytes((models / "x.npy").read_bytes()[:200])
    (models / "cut.npz").write_bytes((models / "x.npz").read_bytes()[:200])
    (models / "text.npy").write_text("1, 2, 3")
    (models / "long.npy").write_bytes(b"\x93NUMPY\x01\x00\x70\x17" + b"(" * 3000 + b")" * 3000)
    (models / "x.png").write_bytes(b"\x89PNG\r\n\x1a\n" + bytes(99))
    with zipfile.ZipFile(models / "bomb.npz", "w", zipfile.ZIP_DEFLATED) as bomb:
        for i in range(20):
            bomb.writestr(f"{i}.npy", bytes(1 << 26))
    with open(models / "huge.npy", "wb") as file:
        np.lib.format.write_array_header_1_0(file, {"descr": "<f4", "fortran_order": False, "shape": (1 << 40,)})
    return models


# --- What goes wrong -------------------------------------------------------------------------------------------------

COMPILING = {
    "no arguments": ("", 2, "MODEL.onnx"),
    "unknown option": ("conv.onnx --fast", 2, "--fast"),
    "no such file": ("nowhere.onnx", 2, "nowhere.onnx", "does not exist"),
    "a folder": (".", 2, "is a directory"),
    "no ONNX": ("text.onnx", 4, "text.onnx", "not an ONNX"),
    "empty": ("empty.onnx", 4, "empty.onnx", "not an ONNX"),
    "truncated": ("truncated.onnx", 4, "truncated.onnx", "not an ONNX"),
    "unsupported op": ("unsupported.onnx", 3, "the_determinant", "Det", "2×4×4", "up to 3×3", "end the model before it"),
    "opset too new": ("newer.onnx", 3, "opset 30", "7 to 28", "export it"),
    "weights beyond fp16": ("weights.onnx --arch sm_86 --precision fp16", 3, "w1", "'first'", "65504", "mixed"),
    "unknown generation": ("conv.onnx --arch rtx3080", 2, "rtx3080", "did you mean sm_86?", "sm_90a", "sm_61", "native"),
    "generation of another device": ("conv.onnx --arch 8.7", 2, "'8.7' (Jetson Orin)", "PTX of sm_80", "--arch sm_80"),
    "no generation": ("conv.onnx --arch ,", 2, "--arch"),
    "no shape": ("conv.onnx --shape x", 2, "'x'", "NAME=1x3x224x224"),
    "half a shape": ("conv.onnx --shape x=1x3xx", 2, "x=1x3xx", "NAME=1x3x224x224"),
    "negative extent": ("open.onnx --shape x=-1x3x8x8", 2, "x=-1x3x8x8"),
    "open dimensions": ("open.onnx", 2, "'x'", "batch", "--shape x="),
    "rank": ("open.onnx --shape x=1x3x8", 2, "x=1x3x8", "batchx3xheightx8"),
    "contradicts a fixed shape": ("conv.onnx --shape x=2x3x8x8", 2, "x=2x3x8x8", "1x3x8x8"),
    "contradicts a fixed extent": ("open.onnx --shape x=1x4x8x8", 2, "x=1x4x8x8", "3"),
    "unknown input": ("open.onnx --shape image=1x3x8x8", 2, "'image'", "'x'"),
    "two shapes": ("open.onnx --shape x=1x3x8x8 --shape x=2x3x8x8", 2, "'x'", "--entry"),
    "shape and entry": ("open.onnx --shape x=1x3x8x8 --entry x=1x3x8x8", 2, "--entry"),
    "quiet and verbose": ("conv.onnx -q -v", 2, "--quiet", "--verbose"),
    "precision": ("conv.onnx --precision fp8", 2, "fp8", "fp16"),
    "jobs": ("conv.onnx --jobs 0", 2, "--jobs"),
    "verify without data": ("conv.onnx --verify nowhere.npz", 2, "--verify", "nowhere.npz", "MODEL.onnx before it"),
    "layers alone": ("conv.onnx --layers", 2, "--layers", "--verify"),
    "unknown node": ("conv.onnx --fp32 nobody", 2, "--fp32 nobody", "--explain"),
    "calibrate in fp16": ("conv.onnx --precision fp16 --calibrate text.onnx", 2, "calibrate", "mixed"),
    "calibrate with no arrays": ("conv.onnx --calibrate text.onnx", 7, "text.onnx", "plain arrays"),
    "an extent beyond 64 bits": ("open.onnx --shape x=1x3x99999999999999999999x8", 3, "x", "1x3x99999999999999999999x8", "2^31"),
    "an index beyond 32 bits": (
        "open.onnx --shape x=1x3x100000000x8 --arch sm_86 --precision fp16",
        3,
        "'first'",
        "no kernel",
        "32 bits",
        "smaller inputs",
    ),
    "two entries of one shape": ("open.onnx --entry x=1x3x8x8 --entry x=1x3x8x8", 2, "two entries", "x=1x3x8x8"),
    "no tolerance": ("conv.onnx --verify --tolerance nan", 2, "--tolerance nan", "1e-2"),
    "NaN to calibrate with": ("conv.onnx --calibrate nan.npy", 7, "'x'", "NaN"),
    "no folder for the calibration": (
        "conv.onnx --quantize int8 --calibrate nan.npy --calibration nowhere/c.json",
        2,
        "nowhere",
        "make it first",
    ),
    "the calibration is the plan": (
        "conv.onnx -o c.plan --quantize int8 --calibrate nan.npy --calibration c.plan",
        2,
        "c.plan",
        "another name",
    ),
    "output is the weights": ("outside.onnx -o outside.data", 2, "outside.data", "no plan", "another name"),
    "no such folder": ("conv.onnx -o nowhere/conv.plan", 2, "nowhere", "make it first"),
    "output is the model": ("conv.onnx -o conv.onnx", 2, "conv.onnx", "another name"),
    "model is a device": ("/dev/zero", 2, "/dev/zero", "a device"),
    "output is a device": ("conv.onnx -o /dev/null", 2, "/dev/null", "regular file"),
}


@pytest.mark.parametrize("case", COMPILING, ids=lambda c: c.replace(" ", "-"))
def test_bad_input_of_tccompile(case, run, models, monkeypatch):
    text, code, *named = COMPILING[case]
    before = {p: p.stat().st_mtime_ns for p in models.iterdir()}
    monkeypatch.chdir(models)
    result = run("tccompile", *text.split())
    assert result.code == code, result
    assert result.out == "" and all(n in result.err for n in named), result.err
    assert len(result.err.splitlines()) <= 4, result.err
    assert {p: p.stat().st_mtime_ns for p in models.iterdir()} == before


NAMED = {
    "one comma": ("a,b=1x3", {"a,b": (1, 3)}),
    "and others": ("c=2,a,b=1x3,x=4=5x6", {"c": (2,), "a,b": (1, 3), "x=4": (5, 6)}),
    "a shape in a name": ("c=2,d=3,c=7", {"c=2,d": (3,), "c": (7,)}),
    "the same in parts": ("d=3,c=2", {"d": (3,), "c": (2,)}),
    "longest first, if the rest can be read": ("c=2,d=3,e=4", {"c": (2,), "d=3,e": (4,)}),
    "scalars": ("a,b=,c=,=1==", {"a,b": (), "c": (), "=1=": ()}),
    "spaces": (" s =3, c=4", {" s ": (3,), "c": (4,)}),
    "of a comma": (",=8", {",": (8,)}),
    "nothing yet, such as keys and values before the first step": ("c=1x0x4", {"c": (1, 0, 4)}),
}
NAMES = ("c", "a,b", "x=4", "d", "c=2,d", "d=3,e", "=1=", " s ", ",")


@pytest.mark.parametrize("text, shapes", NAMED.values(), ids=NAMED)
def test_inputs_of_any_name_take_shapes(text, shapes):
    assert parse_entry(text, NAMES) == shapes
    for name, shape in shapes.items():
        assert parse_shapes([f"{name}={'x'.join(map(str, shape))}"], NAMES) == {name: shape}


UNREADABLE = {
    "a,b=1x3x": "'a,b=1x3x'",
    "c=1,a,b=1y3,d=2": "'a,b=1y3'",
    "c=2,d=-3": "'c=2,d=-3'",
    "c=1,c=2": "'c'",
    "q,r=1x3": "'q'.*'a,b'",
    "": "''",
}


@pytest.mark.parametrize("text", UNREADABLE)
def test_a_shape_that_cannot_be_read_is_named_with_its_input(text):
    with pytest.raises(UsageError, match=UNREADABLE[text]):
        parse_entry(text, NAMES)


def test_entries_of_a_model_whose_inputs_have_commas(run, tmp_path):
    values = [helper.make_tensor_value_info(name, FLOAT, [extent]) for name, extent in (("a,b=1", "n"), ("c d", "m"))]
    y = helper.make_tensor_value_info("y", FLOAT, None)
    graph = helper.make_graph([helper.make_node("Add", ["a,b=1", "c d"], ["y"])], "g", values, [y])
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)]), tmp_path / "odd.onnx")
    assert run("tccompile", "odd.onnx", "--check", "--entry", "a,b=1=3,c d=3").code == 0
    assert run("tccompile", "odd.onnx", "--check", "--shape", "a,b=1=3", "--shape", "c d=3").code == 0
    assert "--shape a,b=1=1" in run("tccompile", "odd.onnx", "--check").out
    assert "--shape 'c d=1'" in run("tccompile", "odd.onnx", "--check", "--shape", "a,b=1=1").out


RUNNING = {
    "no arguments": ("", 2, "MODEL.plan"),
    "no such plan": ("nowhere.plan x.npy", 2, "nowhere.plan"),
    "no such input": ("conv.plan nowhere.npy", 2, "nowhere.npy"),
    "no input": ("conv.plan", 2, "INPUT", "'x'"),
    "iterations alone": ("conv.plan x.npy --iterations 3", 2, "--bench"),
    "a page that is the input": ("conv.plan --profile x.npy", 2, ".html", "x.npy", "put INPUT before it"),
    "a page in no folder": ("conv.plan x.npy --profile nowhere/p.html", 2, "nowhere"),
    "outputs of random inputs": ("conv.plan --bench -o y.npy", 2, "INPUT"),
    "no plan": ("text.plan x.npy", 5, "text.plan", "is not a plan"),
    "a model": ("conv.onnx x.npy", 5, "conv.onnx", "is not a plan"),
    "cut off": ("cut.plan x.npy", 5, "cut.plan"),
    "damaged": ("damaged.plan x.npy", 5, "damaged.plan: ", "the file is damaged"),
    "another version": ("version.plan x.npy", 5, "version.plan", "99", "compile the model again"),
    "unknown device": ("conv.plan x.npy --device tpu", 2, "tpu", "cpu"),
    "target": ("conv.plan x.npy --device cpu --target sm_75", 6, "sm_75", "sm_80, sm_90a"),
    "shape": ("conv.plan x9.npy --device cpu", 7, "'x'", "1x3x8x8", "1x3x9x8", "--shape"),
    "rank": ("conv.plan x3.npy --device cpu", 7, "'x'", "1x3x8x8", "3x8x8"),
    "dtype": ("conv.plan x64.npy --device cpu", 7, "'x'", "float32", "float64", "astype"),
    "name": ("conv.plan wrong.npz --device cpu", 7, "'picture'", "'x'"),
    "missing key": ("two.plan half.npz --device cpu", 7, "'z'", "missing"),
    "npy for two": ("two.plan x.npy --device cpu", 7, "x, z", ".npz"),
    "an image": ("conv.plan x.png --device cpu", 7, "x.png", "numpy.save"),
    "a bomb": ("conv.plan bomb.npz --device cpu", 7, "bomb.npz", "would become 1342177"),
    "a header that lies": ("conv.plan huge.npy --device cpu", 7, "huge.npy"),
    "outputs into an image": ("conv.plan x.npy --device cpu -o y.png", 2, "y.png", ".npz", "y.npy"),
    "pickled": ("conv.plan pickled.npy --device cpu", 7, "pickled.npy", "plain arrays"),
    "pickled inside": ("conv.plan pickled.npz --device cpu", 7, "pickled.npz", "plain arrays"),
    "npy cut off": ("conv.plan cut.npy --device cpu", 7, "cut.npy"),
    "npz cut off": ("conv.plan cut.npz --device cpu", 7, "cut.npz"),
    "a header of brackets": ("conv.plan long.npy --device cpu", 7, "long.npy", "…"),
    "no array": ("conv.plan text.npy --device cpu", 7, "text.npy"),
    "two outputs into npy": ("two.plan two.npz -o y.npy --device cpu", 2, "sum, file", "y.npz"),
    "no such folder": ("conv.plan x.npy -o nowhere/y.npy --device cpu", 2, "nowhere", "make it first"),
    "output is the input": ("conv.plan x.npy -o x.npy --device cpu", 2, "x.npy", "another name"),
    "no weights": ("stripped.plan x.npy --device cpu", 2, "--weights MODEL.onnx"),
    "another model's weights": ("stripped.plan x.npy --weights two.onnx --device cpu", 2, "another model"),
    "no certificate": ("conv.plan --selftest --device cpu", 2, "no certificate", "--verify"),
    "self-test of an input": ("conv.plan x.npy --selftest", 2, "--selftest", "alone"),
    "beyond fp16": ("overflow.plan x.npy --check-finite --device cpu", 9, "'first'", "65504", "--precision fp32"),
}


@pytest.mark.parametrize("case", RUNNING, ids=lambda c: c.replace(" ", "-"))
def test_bad_input_of_tcrun(case, run, plans, monkeypatch):
    text, code, *named = RUNNING[case]
    before = {p: p.stat().st_mtime_ns for p in plans.iterdir()}
    monkeypatch.chdir(plans)
    result = run("tcrun", *text.split())
    assert result.code == code, result
    assert result.out == "" and all(n in result.err for n in named), result.err
    assert len(result.err.splitlines()) <= 3, result.err
    assert {p: p.stat().st_mtime_ns for p in plans.iterdir()} == before


@pytest.mark.skipif(GPU, reason="there is a GPU")
def test_without_a_gpu(run, plans):
    refused = run("tcrun", plans / "conv.plan", plans / "x.npy", "--device", "gpu")
    assert refused.code == 6 and "NVIDIA" in refused.err
    fallen_back = run("tcrun", plans / "conv.plan", plans / "x.npy")
    assert fallen_back.code == 0 and "warning: running on the CPU" in fallen_back.err and "warning" not in fallen_back.out


@pytest.mark.parametrize("name", ["cut.plan", "text.plan", "version.plan"])
def test_bad_input_of_tcinspect(name, run, plans):
    result = run("tcinspect", plans / name)
    assert result.code == 5 and name in result.err and result.out == ""


def test_check_lists_every_unsupported_node_and_writes_nothing(run, models, tmp_path):
    bad = run("tccompile", models / "unsupported.onnx", "--check", "-o", "m.plan")
    assert bad.code == 3 and bad.err == ""
    assert "the_determinant (Det of 2×4×4)" in bad.out and "1 node is not supported" in bad.out
    (issue,) = json.loads(run("tccompile", models / "unsupported.onnx", "--check", "--json").out)
    assert issue["node"] == "the_determinant" and issue["op"] == "Det" and issue["shapes"] == [[2, 4, 4]]
    assert issue["reason"] and issue["way_out"]
    good = run("tccompile", models / "conv.onnx", "--check")
    assert good.code == 0 and good.out == "every node is supported\n"
    assert list(tmp_path.iterdir()) == []


def test_a_bug_of_ours_leaves_a_file_to_send(run, models, tmp_path, monkeypatch):
    def broken(*_: object) -> None:
        raise ZeroDivisionError("by accident")

    monkeypatch.setattr("tccompile.pipeline.lower", broken)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    result = run("tccompile", models / "conv.onnx", "-o", "m.plan")
    assert result.code == 70 and "ZeroDivisionError: by accident" in result.err
    (report,) = tmp_path.glob("tccompile-bug-*.txt")
    assert str(report) in result.err
    assert "Traceback" in report.read_text() and "by accident" in report.read_text()
    assert not (tmp_path / "m.plan").exists()


def test_a_bug_of_ours_is_told_where_no_file_can_be_written(run, models, monkeypatch):
    def no_room(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("tccompile.pipeline.lower", lambda *_: 1 / 0)
    monkeypatch.setattr("tempfile.NamedTemporaryFile", no_room)
    monkeypatch.setattr("traceback.format_exception", lambda *_: ["where it was"])
    result = run("tccompile", models / "conv.onnx", "-o", "m.plan")
    assert result.code == 70 and "no file can be written" in result.err and result.err.endswith("where it was\n")


@pytest.mark.parametrize("name", ["y.npy", "y.npz"])
def test_a_full_disk_is_named(name, plans, tmp_path):
    """As a limit of the sizes of files, which the system tells of in the same way."""
    command = [Path(sys.executable).parent / "tcrun", plans / "conv.plan", plans / "x.npy", "-o", name, "--device", "cpu", "-q"]
    limit = partial(resource.setrlimit, resource.RLIMIT_FSIZE, (1000, 1000))
    done = subprocess.run(command, cwd=tmp_path, preexec_fn=limit, stderr=subprocess.PIPE, text=True)
    assert (done.returncode, done.stderr) == (2, f"error: {name}: File too large\n") and list(tmp_path.iterdir()) == []


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no file that is always full")
def test_no_room_for_messages():
    with open("/dev/full", "w") as full:
        done = subprocess.run([Path(sys.executable).parent / "tcinspect", __file__], stderr=full)
    assert done.returncode == PlanError.exit_code


def test_output_that_is_closed(plans):
    command = [Path(sys.executable).parent / "tcrun", plans / "conv.plan", plans / "x.npy", "--device", "cpu", "-q"]
    done = subprocess.run(command, preexec_fn=lambda: os.close(1), stderr=subprocess.PIPE, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_what_is_not_installed_is_named_with_the_command_that_installs_it(run, models, monkeypatch):
    from importlib import util

    find = util.find_spec
    monkeypatch.setattr(util, "find_spec", lambda name, *a: None if name in ("numba_cuda", "onnx") else find(name, *a))
    result = run("tccompile", models / "conv.onnx")
    assert result.code == 2 and "onnx, numba_cuda" in result.err and "pip install 'tccompile[compiler]'" in result.err


def test_python_says_what_is_not_installed():
    code = (
        "import sys\nsys.modules['onnx_graphsurgeon'] = None\nimport tccompile\n"
        "assert hasattr(tccompile, 'compile')\n"
        "try:\n    tccompile.compile('m.onnx')\nexcept ImportError as error:\n    print(error)\n"
    )
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout
    assert "onnx_graphsurgeon" in said and "pip install 'tccompile[compiler]'" in said


@pytest.mark.skipif(not os.path.isdir("/proc/self/task"), reason="Linux lists a process's threads")
def test_networks_are_measured_in_one_thread(models):
    """What is read before NumPy is imported is set by then: NumPy starts no threads"""
    code = (
        "import os, sys\nfrom tccompile.cli.commands import tccompile\n"
        "try:\n    tccompile([sys.argv[1], '--check', '--quiet'])\nfinally:\n"
        "    print('numpy' in sys.modules, len(os.listdir('/proc/self/task')))\n"
    )
    environment = {name: value for name, value in os.environ.items() if name != "OPENBLAS_NUM_THREADS"}
    said = subprocess.run([sys.executable, "-c", code, models / "conv.onnx"], env=environment, capture_output=True, text=True)
    assert said.stdout.splitlines()[-1] == "True 1", said.stderr


def test_an_interrupt_stops_a_build_and_leaves_nothing(models, tmp_path):
    environment = {**os.environ, "TCCOMPILE_CACHE_DIR": str(tmp_path / "cache"), "TMPDIR": str(tmp_path / "tmp")}
    (tmp_path / "tmp").mkdir()
    (tmp_path / "out").mkdir()
    command = [Path(sys.executable).parent / "tccompile", models / "conv.onnx", "-v", "-o", tmp_path / "out" / "m.plan"]
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    # these tests may run in the background of a shell, where interrupts are ignored
    with subprocess.Popen(
        command, env=environment, process_group=0, preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL), **streams
    ) as build:
        assert build.stderr and build.stdout
        said = ""
        while "schedule" not in said:  # this stage is over, so kernels are being compiled
            line = build.stderr.readline()
            assert line, said
            said += line
        time.sleep(0.5)
        os.killpg(build.pid, signal.SIGINT)  # as a terminal does
        said += build.stderr.read()
        assert build.wait(60) == 130
    assert "error: stopped" in said and "Traceback" not in said
    assert list((tmp_path / "out").iterdir()) == [] and list((tmp_path / "tmp").iterdir()) == []


@pytest.mark.parametrize("command", ["tccompile", "tcrun", "tcinspect"])
def test_help_and_version(command, run):
    shown = run(command, "--help")
    assert shown.code == 0 and shown.out.startswith(f"Usage: {command} ") and shown.err == ""
    says = f"{command}, version {tccompile.__version__}, which writes and reads plan format {FORMAT_VERSION}\n"
    assert run(command, "--version").out == says


# --- What goes right -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def compiled(models: Path) -> Path:
    """A plan made by the real command, for one generation that needs no PTX beside its machine code."""
    path = models / "compiled.plan"
    command = [Path(sys.executable).parent / "tccompile", models / "conv.onnx", "-o", path, "--arch", "sm_86", "-q"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    return path


def test_compile_and_run(run, compiled, plans, tmp_path):
    x = np.load(plans / "x.npy")
    expected = reference(conv(), {"x": x})["y"]
    printed = run("tcrun", compiled, plans / "x.npy", "--device", "cpu")
    assert printed.code == 0 and printed.out.startswith("y: float32[1, 32, 8, 8]  min ") and "CPU" in printed.err
    for suffix in ("npy", "npz"):
        written = run("tcrun", compiled, plans / f"x.{suffix}", "-o", f"y.{suffix}", "--device", "cpu", "-q")
        assert (written.code, written.out, written.err) == (0, "", "")
        y = np.load(tmp_path / f"y.{suffix}")
        y = y if suffix == "npy" else y["y"]
        assert y.dtype == np.float32 and relative_error(y, expected) <= 3e-3
    umask = os.umask(0)
    os.umask(umask)
    assert (tmp_path / "y.npy").stat().st_mode & 0o777 == compiled.stat().st_mode & 0o777 == 0o666 & ~umask
    summary = json.loads(run("tcrun", compiled, plans / "x.npy", "--device", "cpu", "--json").out)
    (output,) = summary["outputs"]
    assert output["name"] == "y" and output["shape"] == [1, 32, 8, 8] and output["not_finite"] == 0
    assert output["mean"] == pytest.approx(float(y.mean()), rel=1e-6)


def test_several_inputs_and_outputs_go_by_name(run, plans, tmp_path):
    feeds = np.load(plans / "two.npz")
    assert run("tcrun", plans / "two.plan", plans / "two.npz", "-o", "y.npz", "--device", "cpu").code == 0
    with np.load(tmp_path / "y.npz") as got:
        assert set(got.files) == {"sum", "file"}
        assert relative_error(got["sum"], feeds["x"] + feeds["z"]) <= 1e-3
        assert relative_error(got["file"], feeds["x"] - feeds["z"]) <= 1e-3


def test_bench_prints_sensible_figures(run, compiled, plans):
    begin = time.perf_counter()
    result = run("tcrun", compiled, "--bench", "--iterations", "5", "--device", "cpu", "--json")
    elapsed = (time.perf_counter() - begin) * 1e3
    figures = json.loads(result.out)["bench"]
    assert figures["iterations"] == 5
    assert 0 < figures["median_ms"] <= figures["p90_ms"] <= figures["p99_ms"] < elapsed
    assert figures["median_ms"] * 3 < elapsed  # at least three of the five took that long
    assert figures["per_second"] == pytest.approx(1000 / figures["median_ms"])
    text = run("tcrun", compiled, plans / "x.npy", "--bench", "--device", "cpu")
    assert text.out.startswith("y: ") and "of 10 inferences" in text.out


def test_profile_tells_of_each_step(run, compiled, plans):
    result = run("tcrun", compiled, plans / "x.npy", "--profile", "--iterations", "2", "--device", "cpu", "--json")
    profile = json.loads(result.out)["profile"]
    nodes = [node for step in profile["steps"] for node in step["nodes"]]
    assert {"first", "second"} <= set(nodes) and profile["iterations"] == 2 and profile["on_cpu"]
    assert all(step["us"] > 0 for step in profile["steps"])
    text = run("tcrun", compiled, "--device", "cpu", "--profile", "p.html")
    assert text.code == 0 and all(node in text.out for node in nodes) and "NumPy" in text.out
    page = Path("p.html").read_text()
    assert page.startswith("<!doctype html>") and all(node in page for node in nodes)


def test_weights_left_out_are_filled_in(run, models, plans, tmp_path):
    x = plans / "x.npy"
    assert run("tccompile", models / "conv.onnx", "--arch", "sm_86", "-o", "small.plan", "--strip-weights", "-q").code == 0
    without = run("tcrun", "small.plan", x, "--device", "cpu")
    assert without.code == 2 and "--weights MODEL.onnx" in without.err
    assert run("tcrun", "small.plan", x, "-o", "y.npy", "--weights", models / "conv.onnx", "--device", "cpu").code == 0
    assert relative_error(np.load(tmp_path / "y.npy"), reference(conv(), {"x": np.load(x)})["y"]) <= 3e-3
    assert "left out (tcrun --weights MODEL.onnx fills them in)" in run("tcinspect", "small.plan").out


def test_inspect(run, compiled):
    text = run("tcinspect", compiled).out
    for part in ("input    x: float32[1, 3, 8, 8]", "output   y: float32[1, 32, 8, 8]", "sm_86", "arena", "weights", "code"):
        assert part in text, text
    data = json.loads(run("tcinspect", compiled, "--json").out)
    assert data["bytes"] == compiled.stat().st_size
    (section,) = data["entries"][0]["sections"]
    assert section["arch"] == "sm_86" and section["tensor_core_steps"] >= 1
    assert section["launches"] == section["steps"] - 1 >= 2  # the first layer reads the input itself, in place of a copy
    assert data["weights"]["bytes"] >= 2 * 32 * 48 * 9 and data["code"]["bytes"] > 0
    assert "second" in run("tcinspect", compiled, "--steps").out


def test_explain_lists_every_step(run, models, tmp_path):
    args = ("tccompile", models / "open.onnx", "--arch", "sm_86,sm_61", "-o", "m.plan", "--explain", "-q")
    entries = ("--entry", "x=1x3x8x8", "--entry", "x=2x3x16x8")
    text = run(*args, *entries).out
    assert text.count("entry 0, sm_86 (cubin)") == text.count("entry 1, sm_61 (cubin, ptx)") == 1
    assert text.count("  first + positive\n       Conv") == text.count("  second\n       Conv") == 4
    assert re.search(r"padding: input \d+→\d+", text) and re.search("on Tensor Cores; (estimated|measured) ", text)
    assert "no Tensor Cores: sm_61 has none" in text
    data = json.loads(run(*args, *entries, "--json").out)
    assert [(s["entry"], s["arch"]) for s in data["explain"]] == [(0, "sm_86"), (0, "sm_61"), (1, "sm_86"), (1, "sm_61")]
    for section in data["explain"]:
        assert {n for step in section["steps"] for n in step["nodes"]} >= {"first", "positive", "second"}
        for step in section["steps"]:
            reasons = ("estimated ", "measured ") if step["launches"] else "nothing to do: "
            assert step["kernel"] and step["reason"].startswith(reasons)
            if "second" in step["nodes"] and step["op"] == "Conv":
                assert step["tensor_cores"] == (section["arch"] == "sm_86") and isinstance(step["config"], dict)
    np.save(tmp_path / "x.npy", np.zeros((2, 3, 16, 8), np.float32))
    assert run("tcrun", "m.plan", "x.npy", "--device", "cpu").out.startswith("y: float32[2, 32, 16, 8]  min 0, max 0")
    np.save(tmp_path / "x.npy", np.zeros((3, 3, 16, 8), np.float32))
    other = run("tcrun", "m.plan", "x.npy", "--device", "cpu")
    assert other.code == 7 and "1x3x8x8" in other.err and "2x3x16x8" in other.err


def test_quiet_and_verbose(run, models, tmp_path):
    plain = run("tccompile", models / "conv.onnx", "--arch", "sm_86")
    assert plain.err == "" and plain.out.startswith("conv.plan: ") and plain.out.endswith(", for sm_86\n")
    assert (tmp_path / "conv.plan").exists()
    quiet = run("tccompile", models / "conv.onnx", "--arch", "sm_86", "-q")
    assert (quiet.out, quiet.err) == ("", "")
    verbose = run("tccompile", models / "conv.onnx", "--arch", "sm_86", "-v")
    stages = [line.split()[0] for line in verbose.err.splitlines()]
    assert stages == ["load", "rewrite", "lower", "fuse", "measure", "precision", "schedule", "emit", "pack"]
    assert "on Tensor Cores" in verbose.out
    assert json.loads(run("tccompile", models / "conv.onnx", "--arch", "sm_86", "--json").out)["plan"] == "conv.plan"


def test_verify_and_selftest(run, models, tmp_path):
    np.savez(tmp_path / "x.npz", x=np.random.default_rng(2).standard_normal((1, 3, 8, 8)).astype(np.float32))
    verified = run("tccompile", models / "conv.onnx", "--arch", "sm_86", "--verify", "x.npz", "--layers", "--json")
    data = json.loads(verified.out)
    assert verified.code == 0 and data["verify"]["passed"] and [r["output"] for r in data["verify"]["outputs"][:2]] == ["y", "y"]
    assert {x["tensor"] for x in data["verify"]["layers"]} and data["certificates"][0]["outputs"][0]["name"] == "y"
    tested = run("tcrun", "conv.plan", "--selftest", "--device", "cpu")
    assert tested.code == 0 and tested.out.startswith("pass  y: error ") and "when it was made" in tested.out
    assert json.loads(run("tcrun", "conv.plan", "--selftest", "--device", "cpu", "--json").out)["passed"]
    assert "  verified beside ONNX Runtime " in run("tcinspect", "conv.plan").out
    (tmp_path / "conv.plan").unlink()
    failed = run("tccompile", models / "conv.onnx", "--arch", "sm_86", "--verify", "--tolerance", "1e-9")
    assert failed.code == 9 and failed.out.startswith("FAIL  y: error ") and "--fp32 NODE" in failed.err
    assert not (tmp_path / "conv.plan").exists()


def test_quantize_says_what_it_did_and_is_verified_by_what_it_was_allowed(run, tmp_path):
    """Also with inputs between 0 and 1 only, where bytes hold no negative numbers."""
    rng = np.random.default_rng(0)
    weights = {f"w{i}": (rng.standard_normal((512, 512)) / 16).astype(np.float32) for i in (1, 2)}
    nodes = [
        helper.make_node("MatMul", ["x", "w1"], ["a"], name="first"),
        helper.make_node("Relu", ["a"], ["b"]),
        helper.make_node("MatMul", ["b", "w2"], ["y"], name="second"),
    ]
    x, y = (helper.make_tensor_value_info(n, FLOAT, (1024, 512)) for n in ("x", "y"))
    onnx.save(model(nodes, [x], [y], weights), tmp_path / "mlp.onnx")
    np.savez(tmp_path / "x.npz", x=rng.uniform(0, 1, (3, 1024, 512)).astype(np.float32))
    build = ("tccompile", tmp_path / "mlp.onnx", "--arch", "sm_90a", "--quantize", "int8", "--calibrate", "x.npz")
    made = run(*build, "--calibration", "c.json", "--verify", "--max-error", "4e-2")
    assert made.code == 0, made.err
    lines = made.out.splitlines()
    assert "; 4e-02 is allowed" in lines[0] and lines[-2].startswith("mlp.plan: ")
    assert lines[-1].startswith("int8: 2 of 2 products; outputs are off by ")
    assert "held back from calibration, set 0" in lines[1] and lines[1].startswith("pass  y: error ")
    assert "errors of 1 set of inputs held back from calibration y: " in run("tcinspect", "mlp.plan").out
    assert run("tcrun", "mlp.plan", "--selftest", "--device", "cpu").code == 0
    tight = run(*build[:-4], "--quantize", "auto", "--calibration", "c.json", "--max-error", "1e-3", "--explain")
    assert tight.code == 0 and tight.out.count("auto: 0 of 2 products: all is in fp16") == 1, "among the notes alone"
    assert "note  not in bytes, since the error would be above the bound: first, second" in tight.out.splitlines()


def test_layers_of_a_model_that_becomes_one_step(run, models):
    result = run("tccompile", models / "relu.onnx", "--arch", "sm_86", "--verify", "--layers", "--json")
    data = json.loads(result.out)
    assert data["verify"]["passed"] and "layers" not in data["verify"]


def test_nothing_but_json_is_printed(run, models):
    """onnx-graphsurgeon prints warnings of bf16."""
    result = run("tccompile", models / "bf16.onnx", "--arch", "sm_86", "--json")
    assert json.loads(result.out)["entries"][0]["inputs"][0]["dtype"] == "bfloat16"


def test_dump_writes_every_stage(run, models, tmp_path):
    assert run("tccompile", models / "conv.onnx", "--arch", "sm_86", "-q", "--dump", "stages").code == 0
    sizes = {p: p.stat().st_size for p in (tmp_path / "stages").iterdir()}
    assert run("tccompile", models / "conv.onnx", "--arch", "sm_86", "-q", "--dump", "stages").code == 0
    assert {p: p.stat().st_size for p in sizes} == sizes
    names = sorted(p.name for p in (tmp_path / "stages").iterdir() if p.suffix in (".onnx", ".txt"))
    assert [n[:2] for n in names] == ["00", "01", "01", "02", "03", "04", "05", "06", "07"]
    assert len(list((tmp_path / "stages" / "kernels").glob("*-*.sm_86.cubin"))) >= 3


# --- The light models of the onnx package ------------------------------------------------------------------------------

LIGHT = Path(onnx.__file__).parent / "backend" / "test" / "data" / "light"


@pytest.mark.parametrize(
    "path", usually([LIGHT / f"light_{name}.onnx" for name in ("squeezenet", "shufflenet", "zfnet512")], 1), ids=lambda p: p.stem
)
def test_light_model(path, run, tmp_path):
    """It runs, or --check-finite names the first tensor that leaves fp16's range: ONNX Runtime says whether that is true."""
    proto = onnx.load(path)
    plan = without_code(proto, ("sm_80",))
    write_plan(plan, tmp_path / "m.plan")
    (value,) = (i for i in proto.graph.input if i.name not in {t.name for t in proto.graph.initializer})
    shape = [d.dim_value for d in value.type.tensor_type.shape.dim]
    x = np.random.default_rng(0).random(shape, dtype=np.float32)
    np.save(tmp_path / "x.npy", x)
    result = run("tcrun", "m.plan", "x.npy", "--check-finite", "--device", "cpu", "-o", "y.npy", "-q")

    nodes = list(proto.graph.node)
    watched = [node.output[0] for node in nodes]
    proto.graph.output.extend(helper.make_empty_tensor_value_info(n) for n in watched if n != proto.graph.output[0].name)
    truth = reference(proto, {value.name: x})
    beyond = {n for n in watched if np.abs(truth[n]).max() > 65504}
    assert (result.code == 9) == bool(beyond), result.err
    if result.code == 9:
        named = re.search(r"^error: node '(.+)' writes an infinity into '(.+)' ", result.err)
        assert named and "--precision fp32" in result.err, result.err
        ops = plan.entries[0].program.ops
        first = next(i for i, op in enumerate(ops) if op.y == named[2])
        assert named[1] in ops[first].nodes and named[1] in {n.name for n in nodes}
        stored = [op.y.partition("[")[0] for op in ops[: first + 1]]  # r37[1] is a part of the concatenation r37
        assert stored[-1] in beyond and not beyond & {n for n in stored[:-1] if n != stored[-1]}, result.err
    else:
        assert relative_error(np.load(tmp_path / "y.npy"), truth[proto.graph.output[0].name]) <= 1e-2


@thorough
def test_a_model_beyond_fp16_runs_in_fp32(run, tmp_path):
    proto = onnx.load(LIGHT / "light_resnet50.onnx")
    write_plan(without_code(proto, ("sm_80",), precision="fp32"), tmp_path / "m.plan")
    x = np.random.default_rng(0).random((1, 3, 224, 224), dtype=np.float32)
    np.save(tmp_path / "x.npy", x)
    assert run("tcrun", "m.plan", "x.npy", "--check-finite", "--device", "cpu", "-o", "y.npy", "-q").code == 0
    (value,) = (i for i in proto.graph.input if i.name not in {t.name for t in proto.graph.initializer})
    (expected,) = reference(proto, {value.name: x}).values()
    assert relative_error(np.load(tmp_path / "y.npy"), expected) <= 1e-5
