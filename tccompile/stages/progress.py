"""How a build says how far it is: to a caller, and in the log."""

from __future__ import annotations

import logging
from collections.abc import Callable

Progress = Callable[[str, int, int], None]
"""Called with a stage, how much of it is done, and how much there is."""


def quiet(stage: str, done: int, total: int) -> None:
    """No progress."""


LOG = logging.getLogger("tccompile")
"""Tells each stage of a build as it begins, at INFO."""


def logged(progress: Progress) -> Progress:
    """The same progress, with stages in the log."""
    now = ""

    def told(stage: str, done: int, total: int) -> None:
        nonlocal now
        if stage != now:
            LOG.info("%s", stage)
        now = stage
        progress(stage, done, total)

    return told
