"""Commands, run in this process: what comes of one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass
class Result:
    """The exit code, and what was printed."""

    code: int
    out: str
    err: str


Run = Callable[..., Result]
"""What the fixture `run` is: (command, arguments …)."""
