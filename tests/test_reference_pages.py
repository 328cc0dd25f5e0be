"""docs/reference is what the code says: the committed pages are those that are made, and what they list is so."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tccompile.load import contrib
from tests.backend import LISTED
from tests.reference import FOLDER, api, commands, operators
from tests.reference.operators import CLASSICAL, SEQUENCES, STANDARD
from tests.tiers import thorough

ROOT = Path(__file__).parents[1]
ANEW = "python -m tests.reference writes it anew"


def committed(name: str) -> str:
    return (FOLDER / name).read_text(encoding="utf-8")


def test_the_pages_of_python_and_of_the_commands() -> None:
    assert committed("api.md") == api.page(), ANEW
    assert committed("commands.md") == commands.page(), ANEW


def test_everything_public_says_what_it_is() -> None:
    page = committed("api.md")
    assert not re.search(r"`: ?$", page, re.MULTILINE), "a docstring is missing"
    assert not re.search(r"^### .+\n\n```python\n[^`]+```\n\n(?:#|$)", page, re.MULTILINE), "a docstring is missing"
    for name in (*api.PACKAGE, *api.CUSTOM, "ort.", "torch."):
        assert name in page


def test_every_variable_and_exit_code_is_there() -> None:
    page, read = committed("commands.md"), set[str]()
    for path in (ROOT / "tccompile").rglob("*.py"):
        read |= {*re.findall(r"environ(?:\.get\(|\.setdefault\(|\[)\"(\w+)\"", path.read_text(encoding="utf-8"))}
    assert read == {*commands.ENVIRONMENT}
    assert all(f"| {code} |" in page for code in commands.exit_codes())


of_this_release = pytest.mark.skipif(not LISTED, reason="the page is of another release of ONNX")


@thorough
@of_this_release
def test_the_page_of_operators() -> None:
    """All of it, but the types of seven operators in eight: `python -m tests.reference` tries each type of each."""
    page, ops = committed("operators.md"), operators.listed(STANDARD)
    rows = [line for line in page.splitlines() if re.match(r"\| \w+ \| \d+–\d+ \|", line)]
    assert [row.split()[1] for row in rows] == ops, ANEW
    without = "\n".join(line for line in page.splitlines() if line not in rows)
    assert without + "\n" == operators.with_rows(()), ANEW
    made = [*operators.table([operators.row(op) for op in ops[::8]])][2:]
    assert made == rows[::8], ANEW


@thorough
@of_this_release
def test_every_operator_that_is_listed_checks_out() -> None:
    rows = {line.split()[1]: line for line in committed("operators.md").splitlines() if re.match(r"\| \w+ \| \d+–", line)}
    for op in operators.listed(STANDARD):
        if SEQUENCES not in rows[op]:  # a node of these alone is no model
            assert isinstance(operators.checked(STANDARD, op), tuple), op


@thorough
@of_this_release
@pytest.mark.parametrize("domain", [STANDARD, CLASSICAL, "ai.onnx.preview", "ai.onnx.preview.training"])
def test_every_operator_that_is_not_listed_is_refused(domain: str) -> None:
    known = {*operators.listed(domain)} if domain in (STANDARD, CLASSICAL) else set()
    others = sorted({*operators.schemas(domain)} - known)
    assert others
    for op in others:
        assert operators.not_listed(domain, op), f"{op} is taken, and not listed"


def test_operators_of_other_domains_are_tested_by_name() -> None:
    """Of ONNX Runtime's own, of ai.onnx.ml, and those of sequences, there are tests beside ONNX Runtime.

    Blocks of channels are tested as ONNX Runtime writes them: tests/ops/test_contrib.py.
    """
    text = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("test_*.py"))
    names = [*operators.listed(CLASSICAL), *operators.listed(contrib.MICROSOFT)]
    names += [line.split()[1] for line in committed("operators.md").splitlines() if SEQUENCES in line]
    assert len(names) > 70
    assert not [name for name in names if f'"{name}"' not in text]
