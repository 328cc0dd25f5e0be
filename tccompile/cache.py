"""Compiled kernels on disk: one file an entry, with its own checksum; safe to share between processes, and to delete."""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import json
import os
import sys
import tempfile
import time
from contextlib import suppress
from functools import cache as memoised
from pathlib import Path
from typing import Any

LIMIT = 2 << 30
"""Bytes beyond which the entries that have not been used for longest are deleted."""


def folder() -> Path:
    """Where entries lie: $TCCOMPILE_CACHE_DIR, else the platform's folder for caches."""
    if own := os.environ.get("TCCOMPILE_CACHE_DIR"):
        return Path(own)
    if sys.platform == "win32" and (local := os.environ.get("LOCALAPPDATA")):
        return Path(local) / "tccompile" / "cache"
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tccompile"
    except RuntimeError:  # a user without a home, as in containers: nothing is kept
        return Path(os.devnull) / "tccompile"


def key(*parts: Any) -> str:
    """A name for what is made of `parts` (anything that JSON can hold) and of nothing else."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def get(key: str) -> bytes | None:
    """The entry, or None if there is none or it is damaged."""
    path = _path(key)
    try:
        data = path.read_bytes()
    except OSError:
        return None
    if hashlib.sha256(data[32:]).digest() != data[:32]:
        return None
    with suppress(OSError):
        os.utime(path)  # used now
    return data[32:]


def put(key: str, data: bytes) -> None:
    """Write an entry, all of it or nothing. A folder that cannot be written costs time at the next build, no more."""
    path = _path(key)
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=".", suffix=".new")
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(hashlib.sha256(data).digest() + data)
            os.replace(name, path)
        except BaseException:
            with suppress(FileNotFoundError):  # interrupted when it had its name already
                os.unlink(name)
            raise


def evict(limit: int = LIMIT) -> None:
    """Delete what was not used for longest until the entries take at most `limit` bytes, and what failed writes left behind."""
    entries, now = [], time.time()
    for path in folder().glob("*/*"):
        with suppress(OSError):
            status = path.stat()
            if path.suffix == ".new" and now - status.st_mtime > 3600:
                path.unlink()
            elif path.suffix == ".bin":
                entries.append((status.st_mtime, status.st_size, path))
    total = sum(size for _, size, _ in entries)
    for _, size, path in sorted(entries):
        if total <= limit:
            return
        with suppress(OSError):
            path.unlink()
            total -= size


def _path(key: str) -> Path:
    return folder() / key[:2] / f"{key}.bin"


# --- What a module is made of ----------------------------------------------------------------------------------------


@memoised
def sources_of(module: str, within: str = "") -> str:
    """SHA-256 of the source of a module and of all modules of the same top-level package or of tccompile that it imports.

    Imports are read from the text, those inside functions too. `within` leaves out what is not in that package.
    """
    roots = {"tccompile", module.partition(".")[0]}
    texts: dict[str, bytes] = {}
    waiting = [module]
    while waiting:
        name = waiting.pop()
        if name in texts:
            continue
        texts[name] = _text(name)
        waiting += [i for i in _imports(texts[name], name, frozenset(roots)) if i.startswith(within)]
    digest = hashlib.sha256()
    for name in sorted(texts):
        digest.update(f"{name}:{len(texts[name])}:".encode() + texts[name])
    return digest.hexdigest()


def source_of(module: str) -> str:
    """SHA-256 of the source of one module."""
    return hashlib.sha256(_text(module)).hexdigest()


def _text(module: str) -> bytes:
    loaded = sys.modules.get(module)
    path = getattr(loaded, "__file__", None)
    if path is None:
        spec = importlib.util.find_spec(module)
        path = spec.origin if spec else None
    return Path(path).read_bytes() if path else b""


@memoised
def _imports(source: bytes, module: str, roots: frozenset[str]) -> tuple[str, ...]:
    """The modules below `roots` that the text imports."""
    found = []
    waiting: list[ast.AST] = [ast.parse(source)]
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
    return tuple(found)


@memoised
def _is_module(name: str) -> bool:
    if name in sys.modules:
        return True
    try:
        return importlib.util.find_spec(name) is not None
    except ImportError:
        return False
