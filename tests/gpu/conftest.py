"""The GPU that tests run on, and the table of what its kernels did."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from tccompile.errors import DeviceError

RESULTS = pytest.StashKey[list[Any]]()
"""A `test_kernels.Result` for each variant that ran."""

SPILLED = pytest.StashKey[list[str]]()
"""Kernels and generations of the variants left out, once for each."""


def pytest_configure(config: pytest.Config) -> None:
    config.stash[RESULTS] = []
    config.stash[SPILLED] = []


@pytest.fixture(scope="session")
def gpu():
    """The first GPU; tests that ask for it are skipped where there is none."""
    from tccompile.runtime.driver import open_device

    try:
        return open_device()
    except DeviceError as error:
        pytest.skip(str(error))


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    results, line = config.stash[RESULTS], terminalreporter.write_line
    if results:
        terminalreporter.section("kernels")
        line(f"{'code':<14} {'kernel':<14} {'variants':>8} {'passed':>8} {'worst error':>12}")
        for target, kernel in sorted({(r.target, r.kernel) for r in results}):
            mine = [r for r in results if (r.target, r.kernel) == (target, kernel)]
            passed = sum(not r.wrong for r in mine)
            line(f"{target:<14} {kernel:<14} {len(mine):>8} {passed:>8} {max(r.error for r in mine):>12.1e}")
        line(f"{len(results)} variants, {sum(not r.wrong for r in results)} passed")
    for what, n in sorted(Counter(config.stash[SPILLED]).items()):
        line(f"{n} variants of {what} spill registers and were left out")
