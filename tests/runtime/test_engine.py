"""The contract between a session and what it runs on: a platform of this file's own is as good as the CPU or a GPU."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from tccompile.errors import InputError, UsageError
from tccompile.plan.file import Plan
from tccompile.plan.format import Entry
from tccompile.runtime import cpu
from tccompile.runtime.session import Session
from tests.runtime.test_session import expected, plan, same, x_of


class Noting:
    """An engine that computes what the plan means without any of its steps, and notes what it was asked."""

    def __init__(self, entry: Entry, asked: list[tuple]):
        self.entry, self.asked, self.io, self.counts = entry, asked, entry.program.tensors, entry.program.counts

    def describe(self) -> str:
        return "a notebook"

    def run(self, arrays, outputs=None, stream=None):
        self.asked.append(("run", len(self.entry.program.tensors["x"].shape), sorted(outputs), stream))
        results = dict(zip("yz", expected(arrays["x"]), strict=True))
        for name, target in outputs.items():
            if target is not None:
                target[...] = results[name]
        return {name: results[name] for name, target in outputs.items() if target is None}

    def time(self, arrays, iterations, warmup):
        return [float(arrays["x"].size)] * iterations

    def profile(self, arrays, iterations):
        return SimpleNamespace(iterations=iterations, size=arrays["x"].size)

    def close(self) -> None:
        self.asked.append(("close",))


class Notebook:
    name = "notebook:7"

    def __init__(self, made_from: Plan, target: str | None, check_finite: bool):
        self.asked: list[tuple] = []

    def load(self, entry: Entry) -> Noting:
        self.asked.append(("load", entry.program.tensors["x"].shape))
        return Noting(entry, self.asked)

    def load_families(self) -> None: ...

    def close(self) -> None:
        self.asked.append(("close all",))

    def adopt(self, array, stream, what):
        self.asked.append(("adopt", what, stream))
        return np.asarray(array)

    def __enter__(self) -> None: ...

    def __exit__(self, *exc: object) -> None: ...


@pytest.fixture
def of_two_entries(monkeypatch: pytest.MonkeyPatch) -> Session:
    monkeypatch.setattr(cpu, "CpuPlatform", Notebook)
    return Session(plan(rows=(2, 3)), "cpu")


def asked(of: Session) -> list[tuple]:
    """What the platform and its engines have been asked since they were last looked at."""
    noted = of._platform.asked  # type: ignore[attr-defined]
    found = list(noted)
    noted.clear()
    return found


def test_a_session_asks_no_more_of_an_engine_than_the_protocol(of_two_entries):
    """Entries are loaded when arrays of their shapes come, streams are handles, and only what is wanted is asked for"""
    s = of_two_entries
    assert (s.device, s.describe(), asked(s)) == ("notebook:7", "a notebook", [("load", (2, 3))])
    same(s.run(None, {"x": x_of()}), expected(x_of()))
    assert asked(s) == [("adopt", "input 'x'", None), ("run", 2, ["y", "z"], None)]
    z = np.empty((3, 3), np.float32)
    (got,) = s.run(["y"], {"x": x_of(3)}, {"z": z}, stream=SimpleNamespace(cuda_stream=5))
    same([got, z], expected(x_of(3)))
    adopted = [("adopt", "input 'x'", 5), ("adopt", "output 'z'", 5)]
    assert asked(s) == [*adopted, ("load", (3, 3)), ("run", 2, ["y", "z"], 5)]
    assert s.bench(4, {"x": x_of(3)}) == [9.0] * 4
    assert vars(s.profile(2)) == {"iterations": 2, "size": 6}
    asked(s)
    s.close()
    assert asked(s) == [*[("close",)] * 2, ("close all",)]
    with pytest.raises(UsageError, match="closed"):
        s.run(None, {"x": x_of()})


def test_engines_see_only_what_fits(of_two_entries):
    """The session refuses the rest: no engine is asked to run it"""
    wrong = (
        ({"x": x_of(4)}, {}, "no entry for x 4x3"),
        ({"x": x_of().astype(np.float64)}, {}, "type float32, got float64"),
        ({"x": x_of(), "w": x_of()}, {}, "no input 'w'"),
        ({}, {}, "'x' is missing"),
        ({"x": x_of()}, {"y": np.empty((3, 3), np.float32)}, "'y' has shape 2x3, got"),
        ({"x": x_of()}, dict.fromkeys("yz", np.empty((2, 3), np.float32)), "output 'z' and output 'y' overlap"),
    )
    for feeds, outputs, message in wrong:
        with pytest.raises(InputError, match=message):
            of_two_entries.run(None, feeds, outputs)
    assert not [a for a in asked(of_two_entries) if a[0] == "run"]
