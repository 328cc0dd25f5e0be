"""The whole kernel of the page on adding one: added to a copy of the sources as the page says, it passes the page's own test."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from tests.tiers import thorough

ROOT = Path(__file__).parents[1]


def added(path: Path, after: str, line: str) -> None:
    text = path.read_text(encoding="utf-8")
    assert text.count(after) == 1
    path.write_text(text.replace(after, f"{after}\n{line}"), encoding="utf-8")


@thorough
def test_the_whole_kernel(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "contributing" / "a-whole-kernel.md").read_text(encoding="utf-8")
    module, case, test = re.findall(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    listed, smallest = re.findall(r"`(\w+\(\),)` in `KERNELS`", page), re.findall(r"`CASES` of `\S+` `(.*?)`;", page)
    assert len(listed) == len(smallest) == 1
    for folder in ("tccompile", "kernels", "tests"):
        shutil.copytree(ROOT / folder, tmp_path / folder, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    (tmp_path / "kernels" / "sum_rows.py").write_text(module, encoding="utf-8")
    (tmp_path / "tests" / "kernels" / "test_sum_rows.py").write_text(test, encoding="utf-8")
    kernels = tmp_path / "kernels" / "__init__.py"
    added(kernels, "from tccompile.kernels.spec import Family, Joint, Kernel", "from tccompile.kernels.sum_rows import SumRows")
    added(kernels, "KERNELS: tuple[Kernel, ...] = (", listed[0])
    added(tmp_path / "tests" / "gpu" / "cases.py", "CASES: Cases = {", case)
    added(tmp_path / "tests" / "kernels" / "test_waiting.py", "CASES = {", f"{smallest[0]},")
    tests = [f"tests/kernels/test_{name}.py" for name in ("sum_rows", "waiting", "races")]
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-k", "sum_rows", *tests]
    done = subprocess.run(command, cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(tmp_path)}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
