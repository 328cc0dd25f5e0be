"""A digest of what a user's functions say: of their syntax, and of all that they refer to.

Comments, docstrings and how the text is laid out do not count, nor do modules of others but by their names.
"""

from __future__ import annotations

import ast
import hashlib
import linecache
import re
import sys
import sysconfig
from collections.abc import Iterator, Mapping
from types import CodeType, FunctionType, ModuleType
from typing import Any

import numpy as np


def digest_of(*values: Any) -> str:
    """SHA-256 of functions, and of data."""
    parts: list[str] = []
    seen: dict[int, int] = {}
    for value in values:
        _say(value, parts, seen)
    return hashlib.sha256("\n".join(parts).encode(errors="surrogatepass")).hexdigest()


def _say(value: Any, parts: list[str], seen: dict[int, int]) -> None:
    """Append what a value is, each function and object once."""
    value = plain(value)
    if value is None or isinstance(value, str | bytes | int | float | complex | np.generic):
        parts.append(repr(value))
    elif isinstance(value, np.ndarray):
        parts.append(f"{value.dtype} {value.shape} {hashlib.sha256(np.ascontiguousarray(value).tobytes()).hexdigest()}")
    elif isinstance(value, set | frozenset):
        parts.append(f"set of {sorted(map(repr, value))}")
    elif isinstance(value, ModuleType):
        parts.append(f"module {value.__name__}")
    elif isinstance(value, Mapping):
        for key in value:
            _say(key, parts, seen)
            _say(value[key], parts, seen)
    elif isinstance(value, tuple | list):
        parts.append(f"{len(value)} values")
        for item in value:
            _say(item, parts, seen)
    elif id(value) in seen:
        parts.append(f"number {seen[id(value)]}")
    else:
        seen[id(value)] = len(seen)
        _say_object(value, parts, seen)


def _say_object(value: Any, parts: list[str], seen: dict[int, int]) -> None:
    """What is no data. Of the user's own, modules' names do not count: a file has another one wherever it lies."""
    named = value if hasattr(value, "__qualname__") else type(value)
    name = f"{named.__module__}.{named.__qualname__}"
    if isinstance(value, FunctionType) and _is_own(value):
        parts.append(_syntax(value))
        _say([*_named(value)], parts, seen)
    elif isinstance(function := getattr(value, "_defn", None), FunctionType):  # an intrinsic of Numba's: what it is made with
        typer = function.__globals__.get("typer", function)  # as ptx/core.py makes them
        _say([*_closure(function), *_closure(typer), function.__name__], parts, seen)
        _say(function if _is_own(function) else None, parts, seen)
    elif isinstance(value, type) and _is_of_user(_file_of(value), value.__module__):
        _say({name: v for name, v in sorted(vars(value).items()) if not name.startswith("__")}, parts, seen)
    elif isinstance(value, type | FunctionType):
        parts.append(name)
    elif type(value).__module__.partition(".")[0] != "tccompile":
        parts.append(re.sub(r"0x[0-9a-f]+", "", repr(value)))
    else:
        parts.append(f"{name} {getattr(value, 'name', '')}")


def _file_of(kind: type) -> str:
    return getattr(sys.modules.get(kind.__module__), "__file__", None) or sysconfig.get_path("stdlib")


def plain(value: Any) -> Any:
    """The function that was decorated to be one of Numba's; anything else as it is."""
    return getattr(value, "py_func", value)


def _is_own(function: FunctionType) -> bool:
    """Whether a function is the user's, not an installed package's or Python's."""
    return _is_of_user(function.__code__.co_filename, function.__module__ or "")


def _is_of_user(path: str, module: str) -> bool:
    installed = "site-packages" in path or "dist-packages" in path or path.startswith(sysconfig.get_path("stdlib"))
    return not installed and module.partition(".")[0] not in ("tccompile", "numba", "numpy")


def _syntax(function: FunctionType) -> str:
    """The syntax of what begins on a function's first line; its bytecode where there is no text, as in an interactive session."""
    code = function.__code__
    try:
        tree = ast.parse("".join(linecache.getlines(code.co_filename, function.__globals__)))
    except SyntaxError:
        return _code(code)
    kinds = (ast.FunctionDef, ast.Lambda)
    found = [node for node in ast.walk(tree) if isinstance(node, kinds) and _first_line(node) == code.co_firstlineno]
    return "".join(map(_dumped, found)) or _code(code)


def _first_line(node: ast.FunctionDef | ast.Lambda) -> int:
    decorators = node.decorator_list if isinstance(node, ast.FunctionDef) else []
    return min([node.lineno, *(d.lineno for d in decorators)])


def _dumped(node: ast.FunctionDef | ast.Lambda) -> str:
    """What a function says, without its decorators: what an operator's say counts by itself."""
    parts: list[str] = [node.name] if isinstance(node, ast.FunctionDef) else []
    outline([node.args, node.body], parts)
    return " ".join(parts)


def _code(code: CodeType) -> str:
    inner = [_code(c) if isinstance(c, CodeType) else repr(c) for c in code.co_consts]
    return f"{code.co_code.hex()} {inner} {code.co_names} {code.co_varnames}"


def _named(function: FunctionType) -> Iterator[tuple[str, Any]]:
    """The values of the names that a function takes from outside, and of what it takes from modules, in order of the alphabet:
    versions of Python have orders of their own."""
    names = sorted(_names(function.__code__))
    yield from _closure(function)
    for name in names:
        if name in function.__globals__:
            value = function.__globals__[name]
            yield name, value
            if isinstance(value, ModuleType) and not hasattr(value, "__path__"):
                for attribute in names:
                    if isinstance(plain(found := vars(value).get(attribute)), FunctionType | int | float | str | tuple):
                        yield f"{name}.{attribute}", found
    yield "defaults", (function.__defaults__, dict(sorted((function.__kwdefaults__ or {}).items())))


def _closure(function: FunctionType) -> list[tuple[str, Any]]:
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    return sorted(((name, _held(cell)) for name, cell in cells), key=lambda pair: pair[0])


def _names(code: CodeType) -> dict[str, None]:
    found = dict.fromkeys(code.co_names)
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            found |= _names(inner)
    return found


def _held(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not set yet, as a function's own name within it
        return None


# --- Syntax ------------------------------------------------------------------------------------------------------------

LAYOUT = {"ctx", "kind", "type_comment", "type_ignores"}
"""Fields of a syntax tree that follow from others, or are comments."""


def outline(node: Any, parts: list[str]) -> None:
    """What a syntax tree says, the same in every version of Python: nodes and their fields in order, but for strings that are
    statements, such as docstrings, and fields that are empty, which versions add."""
    if isinstance(node, ast.AST):
        parts.append(type(node).__name__)
        for name in node._fields:
            value = getattr(node, name, None)
            if value is not None and value != [] and name not in LAYOUT:
                parts.append(name)
                outline(value, parts)
        parts.append(")")
    elif isinstance(node, list):
        for item in node:
            if not (isinstance(item, ast.Expr) and isinstance(item.value, ast.Constant) and isinstance(item.value.value, str)):
                outline(item, parts)
        parts.append("]")
    else:
        parts.append(repr(node))
