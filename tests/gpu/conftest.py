"""Options of the tests that need a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest

from tccompile.errors import DeviceError


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--plans", type=Path, help="a folder of plans that tests.gpu.build wrote; else they are compiled here")
    parser.addoption("--all", action="store_true", help="every config of every kernel, when they are compiled here")


@pytest.fixture(scope="session")
def gpu():
    """The first GPU; tests that ask for it are skipped where there is none."""
    from tccompile.runtime.driver import open_device

    try:
        return open_device()
    except DeviceError as error:
        pytest.skip(str(error))
