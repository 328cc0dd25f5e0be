"""Pages of docs/reference, written from what the code says: `python -m tests.reference` writes them, a test compares."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

FOLDER = Path(__file__).parents[2] / "docs/reference"


ANEW = "python -m tests.reference writes it anew"


def committed(name: str) -> str:
    """A page as it is in docs/reference."""
    return (FOLDER / name).read_text(encoding="utf-8")


def pages() -> dict[str, Callable[[], str]]:
    """What makes each page, by its file's name."""
    from tests.reference import api, commands, operators

    return {"operators.md": operators.page, "api.md": api.page, "commands.md": commands.page}
