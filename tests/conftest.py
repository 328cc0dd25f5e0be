"""Options of the tests."""

from __future__ import annotations

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
