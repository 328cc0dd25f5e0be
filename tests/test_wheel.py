"""The package as pip installs it: what the wheel holds and says, and what runs from it with the compiler and without."""

from __future__ import annotations

import email
import gzip
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from email.message import Message
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

import tccompile
from tccompile.pipeline import without_code

ROOT = Path(__file__).parents[1]
SITE = Path(np.__file__).parents[1]
TOLD = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]

pytestmark = pytest.mark.thorough


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy of the sources, as nothing else that lies about may get into it."""
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for name in ("tccompile", "kernels"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__", "kernels"))
    for name in ("pyproject.toml", "LICENSE", "MANIFEST.in", "docs/package.md"):
        (source / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, source / name)
    done = subprocess.run(
        [sys.executable, "-m", "pip", "wheel", "--no-deps", "-q", "-w", out, source], capture_output=True, text=True
    )
    if done.returncode and re.search(r"No matching distribution|Could not (find|fetch)|connection", done.stderr):
        pytest.skip("setuptools cannot be had")
    assert done.returncode == 0, done.stderr
    (made,) = out.glob("*.whl")
    return made


@pytest.fixture(scope="module")
def told(wheel: Path) -> Message:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
        return email.message_from_string(archive.read(name).decode())


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, what the base install asks for beside it, and nothing else."""
    folder = tmp_path_factory.mktemp("site")
    done = [sys.executable, "-m", "pip", "install", "--no-deps", "--no-index", "-q", "--target", folder, wheel]
    subprocess.run(done, check=True)
    for name in ("numpy", "numpy.libs", "click", "cuda/bindings", "cuda/pathfinder"):
        if (SITE / name).exists():
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).symlink_to(SITE / name)
    return folder


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("work")
    value = [helper.make_tensor_value_info(n, TensorProto.FLOAT, (2, 3)) for n in ("x", "y")]
    graph = helper.make_graph([helper.make_node("Neg", ["x"], ["y"], "n")], "g", value[:1], value[1:])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    onnx.save(model, folder / "m.onnx")
    without_code(model).save(folder / "m.plan")
    np.save(folder / "x.npy", np.ones((2, 3), np.float32))
    return folder


def python(code: str, site: Path, work: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """Run Python with the packages in a folder before all others; with the option -S they are all."""
    start = f"import sys\nsys.path.insert(0, {str(site)!r})\n{code}"
    environment = os.environ | {"TCCOMPILE_CACHE_DIR": str(work / "cache")}
    return subprocess.run(
        [sys.executable, "-I", *options, "-c", start], cwd=work, capture_output=True, text=True, env=environment
    )


RUN = """
import importlib.util, runpy
opened = []
sys.addaudithook(lambda event, args: opened.append(str(args[0])) if event == "open" else None)
assert not any(importlib.util.find_spec(name) for name in ("onnx", "numba", "rich"))
import numpy as np, tccompile
with tccompile.Session("m.plan", "cpu") as session:
    assert session.run(None, {"x": np.ones((2, 3), np.float32)})[0].tolist() == [[-1] * 3] * 2
assert opened and not [path for path in opened if "/kernels" in path], "that is for compiling"
assert "compile" in dir(tccompile) and "float32" in str(tccompile.inspect("m.plan"))
try:
    tccompile.compile("m.onnx")
except ModuleNotFoundError as error:
    print(error)
from tccompile.cli.commands import tcrun
tcrun.main(["m.plan", "x.npy", "--device", "cpu", "-o", "y.npy"], "tcrun")
"""


def test_the_base_install_runs_plans(installed: Path, work: Path) -> None:
    done = python(RUN, installed, work, "-S")
    assert done.returncode == 0, done.stderr
    assert "pip install 'tccompile[compiler]'" in done.stdout and "y.npy: y 2x3" in done.stdout
    code = "sys.argv = ['x', 'm.onnx']\nimport runpy\nrunpy.run_module('tccompile', run_name='__main__')"
    asked = python(code, installed, work, "-S")
    assert asked.returncode == 2 and "pip install 'tccompile[compiler]'" in asked.stderr


def test_with_the_compiler_it_compiles(installed: Path, work: Path) -> None:
    code = "import tccompile\nassert tccompile.__file__.startswith(sys.path[0])\n"
    code += "print(repr(tccompile.compile('m.onnx', archs=['8.6'])), tccompile.check('m.onnx').missing)\n"
    code += "from tccompile.schedule.timings import timings\nprint([t.gpu for t in timings(None, ()).tables])"
    done = python(code, installed, work)
    assert done.stdout == "<Plan 'm': x 2x3 → y 2x3, for sm_86> ()\n['NVIDIA H200']\n", done.stderr


def test_what_is_in_it(wheel: Path) -> None:
    assert wheel.name == f"tccompile-{TOLD['version']}-py3-none-any.whl"  # pure Python
    names = set(zipfile.ZipFile(wheel).namelist())
    top = {name.partition("/")[0] for name in names}
    assert top == {"tccompile", f"tccompile-{TOLD['version']}.dist-info"}
    with zipfile.ZipFile(wheel) as archive:
        table = gzip.decompress(archive.read("tccompile/kernels/timings/h200.json.gz"))
    assert table == (ROOT / "kernels/timings/h200.json").read_bytes()
    data = {name for name in names if not name.endswith(".py") and name.startswith("tccompile/")}
    ptx = {f"tccompile/runtime/{name}.ptx" for name in ("finite", "loop")}
    assert data == {"tccompile/py.typed", "tccompile/kernels/timings/h200.json.gz", *ptx}


def test_what_it_says_of_itself(told: Message) -> None:
    assert told["Author"] == "The tccompile authors" and told["License-Expression"] == "Apache-2.0" and told["Keywords"]
    assert "Typing :: Typed" in told.get_all("Classifier", [])
    pythons = re.findall(r"Python :: (3\.\d+)$", "\n".join(told.get_all("Classifier", [])), re.MULTILINE)
    assert told["Requires-Python"] == f">={pythons[0]}"
    assert "example." not in str(told)
    text = str(told.get_payload())
    links = re.findall(r"\]\(([^)]*)\)", text)
    assert text.startswith("# tccompile") and all(link.startswith("https://") for link in links)


@pytest.mark.parametrize("version", ["3.12", "3.13", "3.14"])
def test_newer_pythons_read_it(version: str, installed: Path) -> None:
    other = shutil.which(f"python{version}")
    if other is None or subprocess.run([other, "-V"], capture_output=True).returncode:
        pytest.skip("it is not on this machine")
    code = "import ast, pathlib, sys; [ast.parse(p.read_bytes()) for p in pathlib.Path(sys.argv[1]).rglob('*.py')]"
    subprocess.run([other, "-W", "error", "-c", code, installed / "tccompile"], check=True)


@pytest.mark.filterwarnings("ignore:running on the CPU:RuntimeWarning")
@pytest.mark.parametrize("page", [TOLD["readme"], "docs/guide/python.md"])
def test_programs_on_pages_run(page: str, work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As they stand, but that they compile for one generation that is not here."""
    programs = re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(encoding="utf-8"), re.DOTALL)
    shutil.copy(work / "m.onnx", work / "model.onnx")
    monkeypatch.chdir(work)
    assert len(programs) == 2
    for program in programs:
        exec(re.sub('"(sm_90a|native)"', '"sm_86"', program), {"tccompile": tccompile, "x": np.ones((2, 3), np.float32)})
