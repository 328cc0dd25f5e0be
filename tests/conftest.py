"""Options of the tests."""

from __future__ import annotations

import gc
import os
from pathlib import Path

import pytest
from hypothesis import settings

settings.register_profile("repeatable", derandomize=True)  # what passes once passes again; HYPOTHESIS_PROFILE=default for others
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "repeatable"))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all", action="store_true", help="every config of every kernel, not a few that represent them")
    parser.addoption(
        "--plans", type=Path, help="a folder of plans that tests.gpu.build wrote, for tests/gpu; else they are compiled here"
    )


def pytest_collection_finish(session: pytest.Session) -> None:
    """What tests are made of stays to the end, and looking for garbage among Numba's objects takes a twentieth of the time."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(100_000, 50, 100)
