"""The GPU that tests run on."""

from __future__ import annotations

import pytest

from tccompile.errors import DeviceError


@pytest.fixture(scope="session")
def gpu():
    """The first GPU; tests that ask for it are skipped where there is none."""
    from tccompile.runtime.driver import open_device

    try:
        return open_device()
    except DeviceError as error:
        pytest.skip(str(error))
