"""Some changed models of `tests.fuzz.models`, and that it sees what it is for."""

from __future__ import annotations

import json
from collections import Counter

import pytest

from tccompile.errors import TccompileError
from tests.fuzz import models

COUNT = 150


def test_some_changed_models():
    found = list(models.results(iter(range(COUNT)), 1, models.begun(cases=False)))
    assert [json.dumps(result) for result in found if models.failed(result)] == []
    counts = Counter(result["what"] for result in found)
    assert len(found) == COUNT and counts["ran"] > COUNT / 10 and counts["ModelError"] > COUNT / 10


@pytest.mark.parametrize("error", [ValueError("of Python"), MemoryError(), TccompileError("of nobody"), AssertionError("x")])
def test_an_error_that_is_not_ours_is_seen(monkeypatch, tmp_path, error):
    def fails(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(models, "without_code", fails)
    with pytest.raises(type(error)):
        models.tried(b"", "fp32", tmp_path / "model.onnx")


@pytest.mark.parametrize(("does", "seen"), [("os.abort()", "CRASH"), ("while True: pass", "HANG")])
def test_what_ends_a_process_or_does_not_end_is_seen(monkeypatch, tmp_path, does, seen):
    """In C++ too, where no exception can be raised"""
    models.write([b"model"], path := tmp_path / "models")
    patch = f"import os\nfrom tests.fuzz import models\nmodels.SECONDS = 0.3\ndef tried(*_):\n    {does}\nmodels.tried = tried\n"
    monkeypatch.setattr(models, "SERVE", patch + "models.serve()")
    worker = models.Worker(path)
    assert worker.tried(0)["what"] == seen
    worker.close()


def test_a_number_gives_the_same_model_each_time():
    begun = models.begun(cases=False)
    assert [models.changed(n, begun) for n in range(20)] == [models.changed(n, begun) for n in range(20)]
    assert len({models.changed(n, begun) for n in range(20)}) == 20
