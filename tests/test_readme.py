"""What the README says its commands and its Python do; its tables and the design's beside the code; links of all pages."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from tccompile import errors
from tccompile.arch import ARCHS, PTX
from tccompile.kernels import KERNELS
from tccompile.load.opset import NEWEST, OLDEST
from tests.gpu.cases import CASES
from tests.plans import without_code
from tests.refit.common import write_safetensors
from tests.tiers import thorough

ROOT = Path(__file__).parents[1]
README_FILE = ROOT / "README.md"
README = README_FILE.read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```", README, re.MULTILINE | re.DOTALL)
SHELL = [line.partition(" #")[0].strip() for kind, text in BLOCKS if kind == "bash" for line in text.splitlines() if line]
CHEAP = "sm_86"
PROGRAMS = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["scripts"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What commands are about: model.onnx, whose only weights are a small convolution's, the same with an open batch, others."""
    folder = tmp_path_factory.mktemp("readme")
    w = np.random.default_rng(0).standard_normal((8, 8, 1, 1)).astype(np.float32)
    x, y = (helper.make_tensor_value_info(n, TensorProto.FLOAT, (1, 8, 4, 4)) for n in ("input", "output"))
    node = helper.make_node("Conv", ["input", "w"], ["output"], "layer")
    for name, values in (("model", w), ("tuned", w * np.float32(1.1))):
        graph = helper.make_graph([node], "g", [x], [y], [numpy_helper.from_array(values, "w")])
        onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), folder / f"{name}.onnx")
    open_batch = [helper.make_tensor_value_info(n, TensorProto.FLOAT, ("batch", 8, 4, 4)) for n in ("input", "output")]
    graph = helper.make_graph([node], "g", open_batch[:1], open_batch[1:], [numpy_helper.from_array(w, "w")])
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), folder / "dynamic.onnx")
    down, up = np.full((2, 8, 1, 1), 0.1, np.float32), np.full((8, 2, 1, 1), 0.1, np.float32)
    adapters = {"layer.lora_A.weight": down, "layer.lora_B.weight": up}
    write_safetensors(folder / "adapters.safetensors", adapters)
    inputs = np.random.default_rng(1).standard_normal((5, 1, 8, 4, 4)).astype(np.float32)
    np.save(folder / "input.npy", inputs[0])
    np.savez(folder / "data.npz", input=inputs)
    without_code(onnx.load(folder / "model.onnx"), (CHEAP,)).save(folder / "old.plan")
    return folder


@thorough
def test_commands(folder):
    """In order, in one folder. Every generation takes minutes, so a build takes the first of those named, or a cheap one."""
    commands = [shlex.split(line) for line in SHELL if line.startswith("tc")]
    assert {c[0] for c in commands} == {"tccompile", "tcrun", "tcinspect", "tcrefit"} and len(commands) >= 7
    for command in commands:
        if "--arch" in command:
            where = command.index("--arch") + 1
            assert set(command[where].split(",")) <= set(ARCHS)
            command[where] = CHEAP
        elif command[0] == "tccompile" and "--check" not in command:
            command += ["--arch", CHEAP]
        module, _, function = PROGRAMS[command[0]].partition(":")  # as the installed script does
        start = f"import sys; from {module} import {function}; sys.argv[0] = {command[0]!r}; sys.exit({function}())"
        environment = os.environ | {"PYTHONPATH": str(ROOT)}
        done = subprocess.run(
            [sys.executable, "-c", start, *command[1:]], cwd=folder, capture_output=True, text=True, env=environment
        )
        assert done.returncode == 0, (command, done.stderr)
        assert done.stdout or "-o" in command, command
    assert np.load(folder / "output.npy").shape == (1, 8, 4, 4)


def test_python(folder):
    (code,) = (text for kind, text in BLOCKS if kind == "python")
    script = folder / "example.py"
    script.write_text(code.replace('archs=["sm_90a"]', f'archs=["{CHEAP}"]') + "print(y.shape, float(abs(y).max()))\n")
    done = subprocess.run([sys.executable, script], cwd=folder, capture_output=True, text=True)
    assert done.stdout == "(1, 8, 4, 4) 0.0\n", done.stderr


def test_make_targets():
    """`make test` is what runs this, `make demo` is run by hand: here, what make would do."""
    targets = [shlex.split(line)[1] for line in SHELL if line.startswith("make")]
    assert targets == ["demo", "test"]
    for target in targets:
        plan = subprocess.run(["make", "-n", target], cwd=ROOT, capture_output=True, text=True)
        assert plan.returncode == 0, plan.stderr
        for script in re.findall(r"python (\S+\.py)", plan.stdout):
            assert (ROOT / script).is_file()


def test_installing():
    (command,) = (line for line in SHELL if line.startswith("pip"))
    assert command == "pip install '.[compiler]'" and "compiler = [" in (ROOT / "pyproject.toml").read_text()


@pytest.mark.parametrize("page", [README_FILE, *sorted(ROOT.glob("docs/**/*.md"))], ids=lambda page: page.stem)
def test_links_lead_somewhere(page):
    for link in re.findall(r"\]\(([^)]+)\)", page.read_text(encoding="utf-8")):
        path, _, heading = link.partition("#")
        there = page.parent / path if path else page
        assert there.exists(), link
        if heading:
            assert f"## {heading.replace('-', ' ')}" in there.read_text(encoding="utf-8").lower(), link


def test_the_picture_is_small():
    assert os.path.getsize(ROOT / "docs" / "demo.png") < 300_000


def test_tables_and_figures_are_the_code_s():
    told = {int(c): text for c, text in re.findall(r"^\| (\d+) \| (.*) \|$", README, re.MULTILINE)}
    codes = {e.exit_code for e in vars(errors).values() if isinstance(e, type) and issubclass(e, errors.TccompileError)}
    assert set(told) == codes | {0, 130}
    assert set(re.findall(r"`(sm_\d+a?)`", README)) == set(ARCHS)
    assert f"PTX of {' and '.join(f'`{name}`' for name in PTX)}" in README
    assert f"opsets {OLDEST} to {NEWEST}" in README


def test_times_are_those_of_the_benchmarks():
    tables = (ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| .* \| (\d+) \| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \|$", README, re.MULTILINE)
    assert len(rows) >= 6
    for batch, ours, eager, compiled, speed in rows:
        assert re.search(rf"\| {batch} \| {ours} \| [\d.]+ \| {eager} \| {compiled} \|", tables), ours
        assert float(speed) == round(min(float(eager), float(compiled)) / float(ours), 1)


def test_the_design_s_table_of_kernels():
    """All kernels, and from which generation on each runs an op of the cases that GPUs are tested by."""
    design = (ROOT / "docs" / "design.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| [\w ,]*\| (`.*) \| (\w+) \|$", design, re.MULTILINE)
    told = {name: since for text, since in rows for name in re.findall(r"`(\w+)`", text)}
    assert told.keys() == {k.name for k in KERNELS}
    programs = [make(case) for case, make in CASES.items()]
    for k in KERNELS:
        ops = [(op, p) for p in programs for op in p.ops if isinstance(op, k.realises)]
        since = next(a.name for a in ARCHS.values() if any(k.supports(op, p, a) is None for op, p in ops))
        assert told[k.name] == ("any" if since == next(iter(ARCHS)) else since), k.name
