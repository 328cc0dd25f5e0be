"""The examples of the pages on contributing: their lines are in the code, or run when they are added to it."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

import tccompile.rewrites
from tccompile.arch import ARCHS, Arch
from tccompile.kernels import KERNELS
from tests.gpu.cases import program_of

ROOT = Path(__file__).parents[1]


def blocks(page: str, kind: str) -> list[str]:
    text = (ROOT / "docs/contributing" / page).read_text(encoding="utf-8")
    return re.findall(rf"^```{kind}\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


def module(name: str, text: str, folder: Path) -> ModuleType:
    path = folder / f"{name}.py"
    path.write_text(text, encoding="utf-8")
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    sys.modules[name] = made
    spec.loader.exec_module(made)
    return made


def changes(page: str) -> list[tuple[str, str, str]]:
    """Of each line of a page's diffs its file, its sign and its text."""
    found, file = [], ""
    for line in "".join(blocks(page, "diff")).splitlines():
        if line.startswith("--- "):
            file = line.split()[1]
        else:
            found.append((file, line[0], line[1:]))
    return found


def test_mish_is_the_three_lines_of_the_page() -> None:
    lines = [(file, text) for file, _, text in changes("adding-an-op.md") if "histogram" not in file and "Rnn" not in text]
    assert sum("ish" in text for _, text in lines) == 3
    for file, text in lines:
        if (ROOT / file).name != "__init__.py":
            assert f"{text}\n" in (ROOT / file).read_text(encoding="utf-8"), (file, text)


def test_the_rewrite_passes_its_own_tests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, tests = blocks("adding-a-rewrite.md", "python")[:2]
    added = module("idempotent", source, tmp_path)
    checks = module("test_idempotent", tests, tmp_path)
    monkeypatch.setattr(tccompile.rewrites, "REWRITES", (*added.REWRITES, *tccompile.rewrites.REWRITES))
    for op in added.IDEMPOTENT:
        checks.test_once_is_enough(op)
    checks.test_other_functions_between_stay()
    checks.test_two_outputs_keep_their_names()
    monkeypatch.undo()
    with pytest.raises(AssertionError):
        checks.test_once_is_enough("Abs")
    for file, sign, text in changes("adding-a-rewrite.md"):
        assert sign == "+" or f"{text}\n" in (ROOT / file).read_text(encoding="utf-8")


def test_the_rewrite_with_a_constant_passes_its_own_tests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, tests = blocks("adding-a-rewrite.md", "python")[2:]
    added = module("reciprocal", source, tmp_path)
    checks = module("test_reciprocal", tests, tmp_path)
    checks.test_what_has_no_reciprocal_stays()
    with pytest.raises(AssertionError):
        checks.test_a_constant_becomes_a_factor(np.float32)
    monkeypatch.setattr(tccompile.rewrites, "REWRITES", (*added.REWRITES, *tccompile.rewrites.REWRITES))
    for dtype in (np.float32, np.float16):
        checks.test_a_constant_becomes_a_factor(dtype)
    checks.test_what_has_no_reciprocal_stays()
    checks.test_other_quotients_stay()


@pytest.mark.parametrize("case", ["mean_rows", "conv_3x3"])
def test_a_new_row_runs_the_kernels_of_its_features(case: str) -> None:
    (row,) = (
        text
        for file, sign, text in changes("adding-a-generation.md")
        if sign == "+" and file.endswith("arch.py") and "Arch(" in text
    )
    arch = eval(row.strip().rstrip(","), vars(sys.modules[Arch.__module__]))
    program = program_of(case)
    (op,) = program.ops
    able = {
        name: {k.name for k in KERNELS if isinstance(op, k.realises) and k.supports(op, program, a) is None}
        for name, a in (("new", arch), ("sm_86", ARCHS["sm_86"]))
    }
    assert able["new"] == able["sm_86"] != set()
    for file, sign, text in changes("adding-a-generation.md"):
        assert sign == "+" or f"{text}\n" in (ROOT / file).read_text(encoding="utf-8")
