"""The rooms of the house: who may import whom."""

from __future__ import annotations

import ast
import tomllib
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

FLOORS: tuple[tuple[str, ...], ...] = (
    ("errors", "garbage", "terminal", "sizes"),
    ("arch", "python"),
    ("options",),
    ("ir",),
    ("layout",),
    ("custom",),
    ("kernels",),
    ("plan",),
    ("load",),
    ("refit",),
    ("rewrites", "runtime"),
    ("lower",),
    ("fuse",),
    ("precision",),
    ("quantize",),
    ("schedule",),
    ("emit",),
    ("ranges",),
    ("check", "dump", "tune"),
    ("stages",),
    ("pipeline",),
    ("verify", "backend", "torch", "ray", "triton"),
    ("dynamo",),
    ("ort",),
    ("cli",),
    ("api", "__main__"),
)
"""Rooms and modules of tccompile, lowest first. A room imports itself and what is on floors below it."""

PUBLIC = "tccompile"
"""The package itself, which gives users names of all floors, when they are first asked for."""


@cache
def modules() -> dict[str, Path]:
    """All modules of the package by name."""
    out = {}
    for folder, package in ((ROOT / "tccompile", PUBLIC), (ROOT / "kernels", f"{PUBLIC}.kernels")):
        for path in folder.rglob("*.py"):
            parts = path.relative_to(folder).with_suffix("").parts
            if parts[0] != "kernels" or folder.name == "kernels":
                out[".".join((package, *parts)).removesuffix(".__init__")] = path
    return out


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def imports(name: str, known: set[str]) -> set[str]:
    """The modules of the package that a module imports, inside functions and for types only too."""
    found = set()
    for node in ast.walk(parsed(modules()[name])):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name} imports relatively"
            found |= {
                f"{node.module}.{alias.name}" if f"{node.module}.{alias.name}" in known else node.module for alias in node.names
            }
    return found & known


@pytest.fixture(scope="module")
def arrows() -> dict[str, set[str]]:
    names = set(modules())
    return {name: imports(name, names) - {PUBLIC, name} for name in names - {PUBLIC}}


def floor(name: str) -> int:
    room = name.split(".")[1]
    return next(i for i, rooms in enumerate(FLOORS) if room in rooms)


def test_no_arrow_goes_up(arrows: dict[str, set[str]]) -> None:
    def room(name: str) -> str:
        return name.split(".")[1]

    up = [
        f"{name} -> {other}"
        for name, others in arrows.items()
        for other in others
        if room(name) != room(other) and floor(other) >= floor(name)
    ]
    assert not up, "\n".join(sorted(up))


def test_no_modules_import_each_other_in_a_circle(arrows: dict[str, set[str]]) -> None:
    left = dict(arrows)
    while leaves := [name for name, others in left.items() if not others & left.keys() - {name}]:
        for name in leaves:
            del left[name]
    assert not left, f"in circles, or above them: {sorted(left)}"


DOORS = {"tccompile.kernels.ptx.core", "tccompile.emit.numba", "tccompile.emit.quicker"}
"""The modules that know the compiler of Python for GPUs: as what kernels are written in, as what compiles them, and as what
makes that quicker."""


def test_numba_is_behind_two_doors() -> None:
    """So that another compiler takes its place there, and nowhere else"""
    behind = set()
    for name, path in modules().items():
        for node in ast.walk(parsed(path)):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            behind |= {name for n in names if n.partition(".")[0] in ("numba", "numba_cuda", "llvmlite")}
    assert behind == DOORS


def test_every_module_is_installed() -> None:
    """What setuptools is told of is where it looks, and misses no folder but that of its own commands"""
    told = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]
    commands = {f"tccompile.{command.rpartition('.')[0]}" for command in told["cmdclass"].values()}
    for name, path in modules().items():
        if name in commands:
            continue
        package = name if path.name == "__init__.py" else name.rpartition(".")[0]
        assert package in told["packages"], f"{path.relative_to(ROOT)} is in no package that is installed"
        assert ROOT / told["package-dir"].get(package, package.replace(".", "/")) == path.parent


def test_functions_of_kernels_can_be_read() -> None:
    """At most 120 lines and eight parameters, `self` aside, those of functions in functions included."""
    for path in (ROOT / "kernels").rglob("*.py"):
        for node in ast.walk(parsed(path)):
            if isinstance(node, ast.FunctionDef):
                given = [a.arg for a in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs) if a.arg != "self"]
                where = f"{path.relative_to(ROOT)}: {node.name}"
                assert (node.end_lineno or 0) - node.lineno < 120, f"{where} is longer than 120 lines"
                assert len(given) <= 8, f"{where} has {len(given)} parameters"


def test_no_function_is_there_twice() -> None:
    """The same statements under another name, or in another place, are one function; those of three or fewer are let be."""
    seen: dict[str, str] = {}
    for name, path in modules().items():
        for node in ast.walk(parsed(path)):
            if not isinstance(node, ast.FunctionDef) or node.end_lineno is None or node.end_lineno - node.lineno < 4:
                continue
            body = node.body[1:] if ast.get_docstring(node) is not None else node.body
            if sum(isinstance(part, ast.stmt) for statement in body for part in ast.walk(statement)) > 3:
                where = f"{name}:{node.lineno} {node.name}"
                assert seen.setdefault(ast.dump(ast.Module(body, [])), where) == where, where
