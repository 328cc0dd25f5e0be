"""What README and guide tell readers to type, run as it stands: commands and Python, on small files of the names that pages use.

Everything runs in this process: what compiles once is in the cache, and no interpreter is started for each of a hundred commands.
"""

from __future__ import annotations

import importlib
import re
import runpy
import shlex
import shutil
import sys
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from tests.refit.common import write_safetensors

ROOT = Path(__file__).parents[1]
CHEAP = "sm_86"
PROGRAMS = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["scripts"]


def blocks(page: Path, *kinds: str) -> list[str]:
    """A page's fenced blocks of these kinds."""
    found = re.findall(r"^```(\w+)\n(.*?)^```", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    return [text for kind, text in found if kind in kinds]


def commands(page: Path) -> Iterator[list[str]]:
    """The words of each command on a page: those that its text names with their files, then the lines of its blocks."""
    told = re.findall(r"`(tc\w+ [^`]*\b(?:model|dynamic)\.(?:onnx|plan)[^`]*)`", page.read_text(encoding="utf-8"))
    for text in ("\n".join(told), *blocks(page, "bash")):
        for line in text.splitlines():
            if words := shlex.split(line, comments=True):
                yield words


def program(name: str) -> Callable[..., None]:
    """One of the project's commands, as its installed script calls it."""
    module, _, function = PROGRAMS[name].partition(":")
    called: Callable[..., None] = getattr(importlib.import_module(module), function)
    return called


def prepared(folder: Path) -> None:
    """Files of the names that pages use: models of one small convolution `layer`, their plans, and arrays for them."""
    w = np.random.default_rng(0).standard_normal((8, 8, 1, 1)).astype(np.float32)
    node = helper.make_node("Conv", ["input", "w"], ["output"], "layer")
    for name, batch, values in (("model", 1, w), ("tuned", 1, w * np.float32(1.1)), ("dynamic", "batch", w)):
        x, y = (helper.make_tensor_value_info(n, TensorProto.FLOAT, (batch, 8, 4, 4)) for n in ("input", "output"))
        graph = helper.make_graph([node], "g", [x], [y], [numpy_helper.from_array(values, "w")])
        onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), folder / f"{name}.onnx")
    down, up = np.full((2, 8, 1, 1), 0.1, np.float32), np.full((8, 2, 1, 1), 0.1, np.float32)
    write_safetensors(folder / "adapters.safetensors", {"layer.lora_A.weight": down, "layer.lora_B.weight": up})
    write_safetensors(folder / "tuned.safetensors", {"w": w * np.float32(1.1)})
    write_safetensors(folder / "old.safetensors", {"w": w})
    inputs = np.random.default_rng(1).standard_normal((5, 1, 8, 4, 4)).astype(np.float32)
    np.save(folder / "input.npy", inputs[0])
    np.savez(folder / "data.npz", input=inputs)
    words = [str(folder / "model.onnx"), "-o", str(folder / "model.plan"), "--arch", CHEAP, "--verify", "-q"]
    with pytest.raises(SystemExit, match="0"):
        program("tccompile")(words)
    shutil.copy(folder / "model.plan", folder / "old.plan")
    shutil.copy(ROOT / "docs/examples/custom_ops/press.py", folder / "my_ops.py")
    shutil.copy(ROOT / "kernels/timings/h200.json", folder / "model.timings.json")
    (metric,) = blocks(ROOT / "docs/guide/quantizing.md", "python")
    (folder / "same_class.py").write_text(metric, encoding="utf-8")


def cheap(text: str) -> str:
    """For one generation, in place of those that are named, and on the CPU."""
    return re.sub(r'device=f?"(gpu|cuda).*?"', 'device="cpu"', re.sub(r'"(sm_90a|native)"', f'"{CHEAP}"', text))


def run_command(words: list[str], monkeypatch: pytest.MonkeyPatch) -> int:
    """The exit code of one of the project's commands, or of a script of its own."""
    name, *rest = words
    if name == "python":
        monkeypatch.setattr(sys, "argv", [str(ROOT / rest[0]), *rest[1:]])
        runpy.run_path(sys.argv[0], run_name="__main__")
        return 0
    if "--arch" in rest:
        rest[rest.index("--arch") + 1] = CHEAP
    elif name == "tccompile" and any(word.endswith(".onnx") for word in rest) and "--check" not in rest:
        rest += ["--arch", CHEAP]
    monkeypatch.setattr(sys, "argv", [name, *rest])
    with pytest.raises(SystemExit) as ended:
        program(name)()
    return int(ended.value.code or 0)
