"""Figures, tables and quoted messages of the pages beside the code; what make does for the README's two commands."""

from __future__ import annotations

import inspect
import os
import re
import shlex
import subprocess
from pathlib import Path

from tccompile import errors
from tccompile.arch import ARCHS, PTX
from tccompile.cli import bug
from tccompile.cli import command as command_of
from tccompile.cli import commands as commands_of
from tccompile.kernels import JOINTS, KERNELS
from tccompile.load.opset import NEWEST, OLDEST
from tccompile.plan import FORMAT_VERSION
from tests.gpu.cases import CASES
from tests.pages import commands
from tests.tiers import thorough

ROOT = Path(__file__).parents[1]


def page(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


README = page("README.md")


def test_make_targets():
    """`make test` is what runs this, `make demo` is run by hand: here, what make would do."""
    targets = [words[1] for words in commands(ROOT / "README.md") if words[0] == "make"]
    assert targets == ["demo", "test"]
    for target in targets:
        plan = subprocess.run(["make", "-n", target], cwd=ROOT, capture_output=True, text=True)
        assert plan.returncode == 0, plan.stderr
        for script in re.findall(r"python (\S+\.py)", plan.stdout):
            assert (ROOT / script).is_file()


def test_installing():
    (command,) = (shlex.join(words) for words in commands(ROOT / "README.md") if words[0] == "pip")
    assert command == "pip install '.[compiler]'" and "compiler = [" in page("pyproject.toml")


def test_the_readme_has_two_pages():
    assert len(README.split()) <= 1_000 and os.path.getsize(ROOT / "docs" / "demo.png") < 300_000


def test_exit_codes():
    codes = {e.exit_code for e in vars(errors).values() if isinstance(e, type) and issubclass(e, errors.TccompileError)}
    told = re.findall(r"^\| (\d+) \| .* \|$", page("docs/reference/exit-codes.md"), re.MULTILINE)
    assert {int(c) for c in told} == codes | {0, 130}
    sections = re.findall(r"^\| \[(\d+)\]\(#\d+-(\w+)\) \| `(\w+)`", page("docs/guide/troubleshooting.md"), re.MULTILINE)
    assert {int(c) for c, _, _ in sections} == codes - {70}
    for code, anchor, name in sections:
        assert getattr(errors, name).exit_code == int(code) and anchor == name.lower()


def test_messages_are_the_code_s():
    """What the page quotes between its … is in some file of the sources."""
    sources = "\n".join(p.read_text(encoding="utf-8") for p in sorted((ROOT / "tccompile").rglob("*.py")))
    rows = re.findall(r"^\| (`.*?) \| .* \| .* \|$", page("docs/guide/troubleshooting.md"), re.MULTILINE)
    quoted = [part.strip(" :();") for row in rows for text in re.findall(r"`([^`]+)`", row) for part in text.split("…")]
    missing = [part for part in quoted if part not in sources]
    assert len(quoted) > 50 and not missing


def test_generations_and_versions():
    deployment, versions = page("docs/guide/deployment.md"), page("docs/reference/versions.md")
    assert set(re.findall(r"`(sm_\d+a?)`", deployment)) == set(ARCHS)
    assert f"PTX of {' and '.join(f'`{name}`' for name in PTX)}" in deployment
    assert f"opsets {OLDEST} to {NEWEST}" in README and f"| ONNX opsets | {OLDEST} to {NEWEST} |" in versions
    assert f"It is {FORMAT_VERSION} now" in versions
    assert f"The format version is {FORMAT_VERSION};" in page("docs/reference/plan-format.md")


def test_times_are_those_of_the_benchmarks():
    tables, rival = page("docs/benchmarks/networks.md"), page("docs/benchmarks/tensorrt.md")
    row = r"^\| .* \| (\d+) \| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \| ([^|]*\|[^|]*) \| ([\d.]+) \|$"
    rows = re.findall(row, README, re.MULTILINE)
    assert len(rows) >= 6
    for batch, ours, eager, compiled, tensorrt, speed in rows:
        assert re.search(rf"\| {batch} \| {ours} \| [\d.]+ \| {eager} \| {compiled} \|", tables), ours
        assert float(speed) == round(min(float(eager), float(compiled)) / float(ours), 1)
        assert all(re.search(rf"\b{re.escape(time)}\b", rival) for time in re.findall(r"\d\.\d+", tensorrt)), tensorrt


@thorough
def test_the_design_s_table_of_kernels():
    """All kernels, and from which generation on each runs an op of the cases that GPUs are tested by."""
    rows = re.findall(r"^\| [\w ,]*\| (`.*) \| (\w+) \|$", page("docs/design/kernels.md"), re.MULTILINE)
    told = {name: since for text, since in rows for name in re.findall(r"`(\w+)`", text)}
    assert told.keys() == {k.name for k in (*KERNELS, *JOINTS)}
    programs = [make(case) for case, make in CASES.items()]
    for k in KERNELS:
        ops = [(op, p) for p in programs for op in p.ops if isinstance(op, k.realises)]
        since = next(a.name for a in ARCHS.values() if any(k.supports(op, p, a) is None for op, p in ops))
        assert told[k.name] == ("any" if since == next(iter(ARCHS)) else since), k.name


def test_options_and_variables_are_on_some_page():
    pages = "\n".join(
        p.read_text(encoding="utf-8") for folder in ("guide", "reference") for p in (ROOT / "docs" / folder).glob("*.md")
    )
    for command in (commands_of.tccompile, commands_of.tcrun, commands_of.tcinspect, commands_of.tcrefit):
        long = [[o for o in option.opts if o.startswith("--")] for option in command.params]
        assert [names for names in long if names and not any(re.search(rf"{name}\b", pages) for name in names)] == []
    sources = "\n".join(p.read_text(encoding="utf-8") for p in sorted((ROOT / "tccompile").rglob("*.py")))
    read = set(re.findall(r'environ(?:\.get|\.setdefault)?[(\[]\s*"(\w+)"', sources))
    assert read and all(f"`{name}`" in page("docs/reference/environment.md") for name in read)


def test_a_bug_s_report_is_as_told():
    told = page("docs/guide/reporting-a-bug.md")
    assert all(tool in told for tool in bug.TOOLS)
    assert all(
        part in inspect.getsource(command_of._bug) and part in told
        for part in ("this is a bug of tccompile's; please send the file", "tccompile-bug-")
    )
