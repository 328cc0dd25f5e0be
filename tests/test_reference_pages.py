"""docs/reference is what the code says: the committed pages are those that are made.

The page of operators is held to ONNX's own cases in tests/test_backend.py, which has read them.
"""

from __future__ import annotations

import re
from pathlib import Path

from tccompile.load import contrib
from tests.reference import ANEW, api, commands, committed, operators
from tests.reference.operators import CLASSICAL, SEQUENCES

ROOT = Path(__file__).parents[1]


def test_the_pages_of_python_and_of_the_commands() -> None:
    assert committed("api.md") == api.page(), ANEW
    assert committed("commands.md") == commands.page(), ANEW


def test_everything_public_says_what_it_is() -> None:
    page = committed("api.md")
    assert not re.search(r"`: ?$", page, re.MULTILINE), "a docstring is missing"
    assert not re.search(r"^### .+\n\n```python\n[^`]+```\n\n(?:#|$)", page, re.MULTILINE), "a docstring is missing"
    for name in (*api.PACKAGE, *api.CUSTOM, "ort.", "torch."):
        assert name in page


def test_operators_of_other_domains_are_tested_by_name() -> None:
    """Of ONNX Runtime's own, of ai.onnx.ml, and those of sequences, there are tests beside ONNX Runtime.

    Blocks of channels are tested as ONNX Runtime writes them: tests/ops/test_contrib.py.
    """
    text = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("test_*.py"))
    names = [*operators.listed(CLASSICAL), *operators.listed(contrib.MICROSOFT)]
    names += [line.split()[1] for line in committed("operators.md").splitlines() if SEQUENCES in line]
    assert len(names) > 70
    assert not [name for name in names if f'"{name}"' not in text]
