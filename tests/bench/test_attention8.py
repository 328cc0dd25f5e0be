"""Attention's benchmark: which clock a type had, of what nvidia-smi says."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.bench.attention8 import clock, watched

SAID = """#!/bin/sh
echo "a warning"
while :; do echo "$(date '+%Y/%m/%d %H:%M:%S.000'), 1605, 0x0000000000000004"; sleep 0.05; done
"""


def test_clocks_in_spans_of_time() -> None:
    said = [(0.0, 1980.0, 0), (1.0, 1600.0, 4), (2.0, 1700.0, 4), (3.0, 1980.0, 1)]
    assert clock(said, [(0.0, 0.5)]) == "1980"
    assert clock(said, [(0.5, 1.5), (1.8, 2.5)]) == "1650*"
    assert clock(said, [(2.9, 3.1)]) == "1980"  # idle, not held down
    assert clock(said, [(4.0, 5.0)]) == clock([], [(0.0, 9.0)]) == "unknown"


def test_clocks_are_read_while_it_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text(SAID)
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    begun = time.time()
    with watched() as said:
        time.sleep(0.4)
        assert not said
    assert said and clock(said, [(begun - 1, time.time())]) == "1605*"
