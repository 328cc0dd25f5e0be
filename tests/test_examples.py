"""The examples of docs/examples that draw a picture: each script is run, on plans without machine code, and held to a quality."""

from __future__ import annotations

import importlib.util
import json
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from PIL import Image

import tccompile
from tccompile.pipeline import without_code
from tests.tiers import usually

EXAMPLES = Path(__file__).parents[1] / "docs/examples"
GALLERY = ("superres", "stream", "search", "speech", "diffusion", "ci")
QUALITY = {"stream": 0.9, "search": 0.95, "speech": 0.9, "diffusion": 0.95}
"""What each script's number must be: overlap of the person, sentences found, words told, digits read as they were asked for."""

LONGEST = 60  # lines of a script
LARGEST = 300 * 1024  # bytes of a model


def script(name: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """An example's demo.py, which imports what is beside it; and nothing of it stays."""
    monkeypatch.syspath_prepend(EXAMPLES / name)
    for beside in (EXAMPLES / name).glob("*.py"):
        monkeypatch.delitem(sys.modules, beside.stem, raising=False)
    spec = importlib.util.spec_from_file_location(f"demo_of_{name}", EXAMPLES / name / "demo.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", usually(QUALITY))
def test_an_example_runs_and_is_as_good_as_it_says(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def compiled(model: Path, shapes: Any = None, archs: Any = (), **options: Any) -> Any:
        assert archs == ["sm_86"]
        return without_code(model, shapes, **options)

    monkeypatch.setattr(tccompile, "compile", compiled, raising=False)
    with pytest.warns(RuntimeWarning, match="running on the CPU"):
        found = script(name, monkeypatch).main("sm_86", tmp_path / "out")
    assert found >= QUALITY[name]
    made, shown = (np.asarray(Image.open(path)) for path in (tmp_path / "out" / f"{name}.png", EXAMPLES / name / f"{name}.png"))
    assert made.shape[:2] == shown.shape[:2] and made.std() > 20


@pytest.mark.parametrize("script", sorted(EXAMPLES.glob("*/demo.py")), ids=lambda path: path.parent.name)
def test_a_script_is_short(script: Path) -> None:
    assert len(script.read_text(encoding="utf-8").splitlines()) <= LONGEST


@pytest.mark.parametrize("name", QUALITY)
def test_an_example_is_whole_and_small(name: str) -> None:
    folder = EXAMPLES / name
    (model,) = folder.glob("*.onnx")
    assert model.stat().st_size <= LARGEST
    page = (folder / "README.md").read_text(encoding="utf-8")
    assert f"]({name}.png)" in page and "python demo.py" in page and "python train.py" in (folder / "train.py").read_text()
    measured = json.loads((folder / "quality.json").read_text(encoding="utf-8"))
    numbers = {float(n) for n in re.findall(r"\d+(?:\.\d+)?", page)}
    shares = [v for v in measured.values() if isinstance(v, float) and v <= 1]
    assert all(round(100 * v, 1) in numbers or round(v, 3) in numbers for v in shares), "the page says what was measured"


def test_the_index_shows_every_example() -> None:
    index = (EXAMPLES / "README.md").read_text(encoding="utf-8")
    for folder in (f for f in EXAMPLES.iterdir() if f.is_dir() and f.name != "__pycache__"):
        assert f"({folder.name}/" in index, f"{folder.name} is not in the index"
    assert all(f"| [{name}]({name}/README.md) |" in index for name in GALLERY)
    for target in re.findall(r"\]\(([^)#]+)\)", index):
        assert (EXAMPLES / target).exists(), target
