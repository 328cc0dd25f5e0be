"""What a kernel is made of, as a digest: the code of its module and of all that it imports, without comments and docstrings.

A module that a kernel's text calls is not imported by it, but named: `intrinsic("ptx.simt.shuffle")` counts as an import of it.
"""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import json
import sys
from functools import cache as memoised
from pathlib import Path
from typing import Any

from tccompile.custom.digest import outline

RATES = "tccompile.kernels.rates"
"""What was measured of GPUs: it decides which kernel and config is chosen, and is in no code."""


def key(*parts: Any) -> str:
    """A name for what is made of `parts` (anything that JSON can hold) and of nothing else."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


@memoised
def sources_of(module: str, within: str = "") -> str:
    """SHA-256 of the code of a module and of all modules of the same top-level package or of tccompile that it imports.

    Imports are read from the text, those inside functions too. `within` leaves out what is not in that package. Comments,
    docstrings and how the text is laid out are no part of the code.
    """
    roots = {"tccompile", module.partition(".")[0]}
    found: dict[str, str] = {}
    waiting = [module]
    while waiting:
        name = waiting.pop()
        if name in found:
            continue
        found[name], imports = _read(_text(name), name, frozenset(roots))
        waiting += [i for i in imports if i.startswith(within) and not i.startswith(RATES)]
    return hashlib.sha256("".join(f"{name}:{found[name]}\n" for name in sorted(found)).encode()).hexdigest()


def source_of(module: str) -> str:
    """SHA-256 of the code of one module."""
    return _read(_text(module), module, frozenset())[0]


def _text(module: str) -> bytes:
    loaded = sys.modules.get(module)
    path = getattr(loaded, "__file__", None)
    if path is None:
        spec = importlib.util.find_spec(module)
        path = spec.origin if spec else None
    return Path(path).read_bytes() if path else b""


@memoised
def _read(source: bytes, module: str, roots: frozenset[str]) -> tuple[str, tuple[str, ...]]:
    """SHA-256 of the text's code, and the modules below `roots` that it imports."""
    tree = ast.parse(source)
    parts: list[str] = []
    outline(tree, parts)
    imports = [*_imports(tree, module, roots), *(_intrinsics(tree) if b"intrinsic" in source else ())]
    return hashlib.sha256(" ".join(parts).encode(errors="surrogatepass")).hexdigest(), tuple(imports)


def _imports(tree: ast.AST, module: str, roots: frozenset[str]) -> list[str]:
    """The modules below `roots` that are imported."""
    found: list[str] = []
    waiting = [tree]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names if alias.name.partition(".")[0] in roots]
        elif isinstance(node, ast.ImportFrom):
            package = module.rsplit(".", node.level)[0] + "." if node.level else ""
            parent = (package + (node.module or "")).rstrip(".")
            if parent.partition(".")[0] in roots:
                names = (f"{parent}.{alias.name}" for alias in node.names)
                found += [name if _is_module(name) else parent for name in names]
        for part in ("body", "orelse", "finalbody", "handlers", "cases"):  # imports are statements: expressions have none
            within = getattr(node, part, ())
            waiting += within if isinstance(within, list) else ()
    return found


def _intrinsics(tree: ast.AST) -> list[str]:
    """The modules that text calls: see `kernels.text.Intrinsic`. A name that is put together begins with the module's."""
    found = []
    for node in ast.walk(tree):
        match node:
            case ast.Call(ast.Name("intrinsic"), [ast.Constant(str(name)), *_]):
                found.append(name)
            case ast.Call(ast.Name("intrinsic"), [ast.JoinedStr([ast.Constant(str(name)), *_]), *_]):
                found.append(name)
    return [f"tccompile.kernels.{name.rpartition('.')[0]}" for name in dict.fromkeys(found)]


@memoised
def _is_module(name: str) -> bool:
    if name in sys.modules:
        return True
    try:
        # Of a name in a module it would import that one, which may be all of Numba
        return _is_package(name.rpartition(".")[0]) and importlib.util.find_spec(name) is not None
    except ImportError:
        return False


@memoised
def _is_package(name: str) -> bool:
    if (loaded := sys.modules.get(name)) is not None:
        return hasattr(loaded, "__path__")
    spec = importlib.util.find_spec(name)
    return spec is not None and spec.submodule_search_locations is not None
