"""Options of the tests."""

from __future__ import annotations

import gc
import os
from pathlib import Path

import pytest
from hypothesis import settings

from tests.commands import Result, Run

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


@pytest.fixture
def run(capfd: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Run a command in an empty folder, in this process. It must end by itself, and say what went wrong in one block."""
    from tccompile.cli import commands

    monkeypatch.chdir(tmp_path)

    def call(command: str, *args: object) -> Result:
        capfd.readouterr()
        with pytest.raises(SystemExit) as stop:
            getattr(commands, command).main([str(a) for a in args], command)
        out, err = capfd.readouterr()
        code = stop.value.code
        assert isinstance(code, int)
        assert "Traceback" not in out + err
        assert (err.count("error: ") == 1) == (code not in (0, 3)) or code == 3, err
        return Result(code, out, err)

    return call
