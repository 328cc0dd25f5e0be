"""Every command and every snippet of the README and the guide runs, on small files of the names that they use."""

from __future__ import annotations

import ast
import contextlib
import importlib.util
import io
import re
import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.pages import ROOT, blocks, cheap, commands, prepared, run_command
from tests.tiers import thorough

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs/guide").glob("*.md"))]
ELSEWHERE = {
    "pip": "tests/test_wheel.py installs the wheel",
    "make": "tests/test_readme.py asks what it would do",
    "eval": "tests/test_commands.py asks for completions",
    "_TCCOMPILE_COMPLETE=fish_source": "tests/test_commands.py asks for completions",
    "openssl": "tests/doors/test_sign.py signs",
    "tcsign": "tests/doors/test_sign.py signs",
    "tritonserver": "tests/doors/test_triton.py starts it",
    "python docs/examples/custom_ops/demo.py": "it compiles for two generations what tests/custom runs",
    "tccompile decoder.onnx": "tests/ranges/test_networks.py compiles such a decoder",
    "tccompile model.onnx -o model.plan --arch native": "it takes a GPU",
    "python -m pytest tests/gpu": "it takes a GPU",
    "python -m tests.bench": "it takes minutes",
    "tcinspect model.plan --rebuild": "tests/test_ci_example.py and tests/test_rebuild.py: it takes seconds",
    "tcrun model.plan input.npy --device cpu --trust": "tests/test_ci_example.py, which makes the list",
    "tcrun model.plan input.npy --trust public.pem": "tests/doors/test_sign.py signs",
    "tcrun model.plan --selftest --device gpu": "it takes a GPU",
    "tcrun model.plan x.npy --trust": "tests/test_trust.py runs each line of the page's table",
}
"""What is not run here, by how it begins, and why."""

FAILS = {"dynamic.onnx --check": 2}
"""Exit codes of what does not end with 0: it asks for shapes."""

APART = {
    "custom-operators": "tests/custom/test_docs.py calls what it defines",
    "ray": "tests/doors/test_ray.py starts a cluster",
}
"""Pages whose snippets are not run here, and why."""


def elsewhere(words: list[str]) -> bool:
    return any(shlex.join(words).startswith(start) for start in ELSEWHERE)


def imported(text: str) -> set[str]:
    """The packages that a snippet imports."""
    nodes = list(ast.walk(ast.parse(text)))
    named = [a.name for n in nodes if isinstance(n, ast.Import) for a in n.names]
    return {name.partition(".")[0] for name in (*named, *(n.module or "" for n in nodes if isinstance(n, ast.ImportFrom)))}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pages")
    prepared(folder)
    return folder


@pytest.fixture
def folder(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    shutil.copytree(made, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    yield tmp_path


@thorough
@pytest.mark.parametrize("page", [p for p in PAGES if any(not elsewhere(c) for c in commands(p))], ids=lambda page: page.stem)
def test_commands(page: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """In order, in one folder, each for one generation."""
    for words in commands(page):
        if elsewhere(words):
            continue
        line = shlex.join(words)
        code = run_command(words, monkeypatch)
        told = capsys.readouterr()
        assert code == next((c for option, c in FAILS.items() if option in line), 0), f"{line}\n{told.err}"
        assert told.out or "-o" in words, line


@thorough
@pytest.mark.filterwarnings("ignore:running on the CPU:RuntimeWarning")
@pytest.mark.parametrize("page", [p for p in PAGES if blocks(p, "python") and p.stem not in APART], ids=lambda page: page.stem)
def test_snippets(page: Path, folder: Path) -> None:
    """In order, in one module, but those of packages that are not here; tests/doors runs this where they are."""
    scope: dict[str, object] = {"x": np.load("input.npy"), "__name__": page.stem}
    for text in blocks(page, "python"):
        leaves_out = re.search(r"^ +\.\.\.", text, re.MULTILINE)
        if leaves_out or any(importlib.util.find_spec(name) is None for name in imported(text)):
            continue
        with contextlib.redirect_stdout(io.StringIO()):
            exec(compile(cheap(text), str(page), "exec"), scope)
