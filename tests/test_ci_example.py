"""The workflow in docs/examples/ci: its shell steps are run, one after the other, as Actions would."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import textwrap
import tomllib
from pathlib import Path

import onnx
import pytest

from tccompile.plan.file import read_plan
from tests.plans import without_code
from tests.rewrites.common import Net
from tests.tiers import thorough

ROOT = Path(__file__).parents[1]
WORKFLOW = (ROOT / "docs/examples/ci/plan.yml").read_text(encoding="utf-8")
STEP = re.compile(r"^      - name: (.+)\n        run: (?:\|\n((?:          .*\n)+)|(.+)\n)", re.MULTILINE)
STEPS = {name: textwrap.dedent(block) if block else line for name, block, line in STEP.findall(WORKFLOW)}
BUILD = "Build within budgets"


def network() -> onnx.ModelProto:
    n = Net(x=(1, 16, 8, 8))
    return n.out(n("Relu", n("Conv", "x", n.normal(16, 16, 1, 1, scale=0.2), n.normal(16)))).model()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A repository with a model and the plan that was released, and the commands as an installation has them."""
    onnx.save(network(), tmp_path / "model.onnx")
    without_code(network(), ("sm_86",), precision="bf16").save(tmp_path / "released.plan")
    (tmp_path / "bin").mkdir()
    programs = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["scripts"]
    for name, where in programs.items():
        module, _, function = where.partition(":")
        script = f"#!{sys.executable}\nimport sys\nfrom {module} import {function}\nsys.exit({function}())\n"
        (tmp_path / "bin" / name).write_text(script)
        (tmp_path / "bin" / name).chmod(0o755)
    return tmp_path


def run(folder: Path, script: str) -> subprocess.CompletedProcess[str]:
    """A step, by the shell that Actions takes."""
    path = f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}"
    environment = os.environ | {"PATH": path, "PYTHONPATH": str(ROOT)}
    shell = ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", script]
    return subprocess.run(shell, cwd=folder, capture_output=True, text=True, env=environment)


def test_the_steps_are_read_whole() -> None:
    assert WORKFLOW.count("run:") == len(STEPS) == 6
    assert next(iter(STEPS)) == "Install" and STEPS["Install"].startswith("pip install 'tccompile[compiler]'")


@thorough
def test_every_step(folder: Path) -> None:
    for name, script in STEPS.items():
        if name != "Install":
            done = run(folder, script)
            assert done.returncode == 0, (name, done.stdout, done.stderr)
    built = json.loads((folder / "build.json").read_text())
    assert built["bytes"] == (folder / "model.plan").stat().st_size
    assert "bfloat16" in (folder / "changes.txt").read_text(), "the released plan was another one"
    plan = read_plan(folder / "model.plan")
    assert plan.certificates and plan.identity in (folder / "trusted.json").read_text()
    assert json.loads((folder / "model.cdx.json").read_text())["bomFormat"] == "CycloneDX"
    for name in re.findall(r"^            (\S+)$", WORKFLOW, re.MULTILINE):
        assert (folder / name).exists(), f"{name} is uploaded"


@thorough
def test_a_budget_that_is_exceeded_stops_the_job(folder: Path) -> None:
    script = STEPS[BUILD].replace("--max-plan-size 100MB", "--max-plan-size 1KB")
    assert script != STEPS[BUILD]
    done = run(folder, script)
    assert done.returncode == 9 and "takes more than it may" in done.stderr
    assert not (folder / "model.plan").exists()
