"""Where a user's operators come from: Python files and modules that are named, and nothing else."""

from __future__ import annotations

import hashlib
import importlib.util
import linecache
import os
import sys
import traceback
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

from tccompile.custom.operators import Operator
from tccompile.errors import OperatorError, TccompileError, UsageError
from tccompile.ir.ops.custom import meaning


class Rewriting:
    """A rewrite of the user's own, as `rewrites/own.py` makes it."""


Given = str | os.PathLike[str] | ModuleType | Operator | Rewriting
"""What users give: a file, a module, an operator or a rewrite."""


@dataclass(frozen=True)
class Added:
    """All that a user adds.

    operators  by name
    """

    operators: Mapping[str, Operator] = field(default_factory=dict)
    rewrites: tuple[Any, ...] = ()

    def find(self, domain: str | None, op: str) -> Operator | None:
        """The operator of that domain and name."""
        return self.operators.get(f"{domain}::{op}")


_in_force: ContextVar[Added] = ContextVar("added", default=Added())  # noqa: B039  it cannot be changed


def added() -> Added:
    """What the user has added to what is being done now."""
    return _in_force.get()


@contextmanager
def using(given: Added) -> Iterator[None]:
    """Within it, these operators and rewrites are known."""
    token = _in_force.set(given)
    try:
        with meaning(given.operators):
            yield
    finally:
        _in_force.reset(token)


def collected(given: Iterable[Given]) -> Added:
    """The operators and rewrites in files and modules, or given as they are.

    Raises UsageError for what holds none or two of a name, and OperatorError for a file that cannot be run.
    """
    if isinstance(given, str | os.PathLike):
        raise UsageError(f"ops is a list of files or modules, as [{os.fspath(given)!r}]")
    operators: dict[str, Operator] = {}
    rewrites: list[Any] = []
    for one in given:
        found = [one] if isinstance(one, Operator | Rewriting) else _within(one)
        for item in found:
            if isinstance(item, Rewriting):
                rewrites += [] if item in rewrites else [item]
            elif operators.setdefault(item.name, item) is not item:
                raise UsageError(f"two operators are called {item.name}: {_where(operators[item.name])} and {_where(item)}")
    return Added(operators, tuple(rewrites))


def _where(operator: Operator) -> str:
    code = operator.meaning.__code__
    return f"{code.co_filename}:{code.co_firstlineno}"


def _within(given: Given) -> list[Any]:
    if not isinstance(given, str | os.PathLike | ModuleType):
        raise UsageError(f"{given!r} holds no operators: give a Python file, a module, or what tc.op and tc.rewrite make")
    module = given if isinstance(given, ModuleType) else _run(Path(given))
    found = [value for value in vars(module).values() if isinstance(value, Operator | Rewriting)]
    if not found:
        raise UsageError(f"{module.__name__ if given is module else given} holds no operators: @tc.op and tc.rewrite make them")
    return found


_files: dict[tuple[str, int, int], ModuleType] = {}
"""What was run, by the file's path, its time and size: once, so that its operators are the same objects."""


def _run(path: Path) -> ModuleType:
    """The module that a file is, whose folder it may import from."""
    try:
        status, real = path.stat(), str(path.resolve())
    except OSError as error:
        raise UsageError(f"cannot read the operators {path}: {error.strerror}") from None
    key = real, status.st_mtime_ns, status.st_size
    if key in _files:
        return _files[key]
    linecache.checkcache(real)
    spec = importlib.util.spec_from_file_location(f"{path.stem}_{hashlib.sha256(real.encode()).hexdigest()[:8]}", real)
    if spec is None or spec.loader is None:
        raise UsageError(f"{path} is no Python file: operators are read from .py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where Numba and dataclasses look a function's module up
    sys.path.insert(0, str(path.parent.resolve()))
    try:
        spec.loader.exec_module(module)
    except TccompileError:
        raise
    except Exception as error:
        raise OperatorError(f"{_line(error, path, real)}: {type(error).__name__}: {error}") from error
    finally:
        sys.path.remove(str(path.parent.resolve()))
    _files[key] = module
    return module


def _line(error: Exception, path: Path, real: str) -> str:
    """The file and the line in which running it failed."""
    if isinstance(error, SyntaxError) and error.filename == real:
        return f"{path}:{error.lineno}"
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == real]
    return f"{path}:{lines[-1]}" if lines else f"{path}"
