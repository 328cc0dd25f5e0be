"""Compiled kernels on disk: one file an entry, with its key and a checksum; safe to share between processes, and to delete."""

from __future__ import annotations

import ast
import atexit
import hashlib
import importlib.util
import json
import os
import shutil
import stat
import sys
import tempfile
import time
import warnings
from contextlib import suppress
from functools import cache as memoised
from pathlib import Path
from typing import Any

LIMIT = 2 << 30
"""Bytes beyond which the entries that have not been used for longest are deleted."""


def folder() -> Path:
    """Where entries lie: $TCCOMPILE_CACHE_DIR, else the platform's folder for caches; see `_wanted`.

    What is in an entry ends up in plans, so a folder that somebody else could have written to is not used: a warning says so,
    and this process has one of its own until it ends.
    """
    wanted = _wanted()
    try:
        why = _foreign(os.stat(wanted))
    except OSError:  # there is none yet: `put` makes it, for us alone
        return wanted
    return _private(wanted, why) if why else wanted


def _wanted() -> Path:
    if own := os.environ.get("TCCOMPILE_CACHE_DIR"):
        return Path(own)
    if sys.platform == "win32" and (local := os.environ.get("LOCALAPPDATA")):
        return Path(local) / "tccompile" / "cache"
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tccompile"
    except RuntimeError:  # a user without a home, as in containers: nothing is kept
        return Path(os.devnull) / "tccompile"


def _foreign(status: os.stat_result) -> str:
    """Why somebody else could have written a file or a folder; empty if only we can. Windows keeps such things elsewhere."""
    if not hasattr(os, "geteuid"):
        return ""
    if status.st_uid != os.geteuid():
        return f"it belongs to user {status.st_uid}"
    return f"others can write to it (mode {stat.S_IMODE(status.st_mode):o})" if status.st_mode & 0o022 else ""


@memoised
def _private(instead_of: Path, why: str) -> Path:
    """A folder that goes with the process."""
    made = tempfile.mkdtemp(prefix="tccompile-")
    atexit.register(shutil.rmtree, made, ignore_errors=True)
    way_out = "delete it, or name another one with TCCOMPILE_CACHE_DIR"
    warnings.warn(f"the kernel cache {instead_of} is not used, {why}: {way_out}", RuntimeWarning, stacklevel=2)
    return Path(made)


def key(*parts: Any) -> str:
    """A name for what is made of `parts` (anything that JSON can hold) and of nothing else."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


_SIZE = 32
"""Bytes of a digest."""


def get(key: str) -> bytes | None:
    """The entry, or None if there is none, it is damaged or another key's, or somebody else could have written it."""
    path = _path(key)
    try:
        with open(path, "rb") as file:
            data = b"" if _foreign(os.fstat(file.fileno())) else file.read()
    except OSError:
        return None
    digest, content = data[:_SIZE], data[_SIZE:]
    if hashlib.sha256(content).digest() != digest or content[:_SIZE] != bytes.fromhex(key):
        return None
    with suppress(OSError):
        os.utime(path)  # used now
    return content[_SIZE:]


def put(key: str, data: bytes) -> None:
    """Write an entry, all of it or nothing. A folder that cannot be written costs time at the next build, no more."""
    path, content = _path(key), bytes.fromhex(key) + data
    with suppress(OSError):
        path.parent.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        path.parent.mkdir(mode=0o700, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=".", suffix=".new")
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(hashlib.sha256(content).digest() + content)
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
        waiting += [i for i in imports if i.startswith(within)]
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
    _outline(tree, parts)
    return hashlib.sha256(" ".join(parts).encode(errors="surrogatepass")).hexdigest(), tuple(_imports(tree, module, roots))


LAYOUT = {"ctx", "kind", "type_comment", "type_ignores"}
"""Fields of a syntax tree that follow from others, or are comments."""


def _outline(node: Any, parts: list[str]) -> None:
    """What a syntax tree says, the same in every version of Python: nodes and their fields in order, but for strings that are
    statements, such as docstrings, and fields that are empty, which versions add."""
    if isinstance(node, ast.AST):
        parts.append(type(node).__name__)
        for name in node._fields:
            value = getattr(node, name, None)
            if value is not None and value != [] and name not in LAYOUT:
                parts.append(name)
                _outline(value, parts)
        parts.append(")")
    elif isinstance(node, list):
        for item in node:
            if not (isinstance(item, ast.Expr) and isinstance(item.value, ast.Constant) and isinstance(item.value.value, str)):
                _outline(item, parts)
        parts.append("]")
    else:
        parts.append(repr(node))


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


@memoised
def _is_module(name: str) -> bool:
    if name in sys.modules:
        return True
    try:
        return importlib.util.find_spec(name) is not None
    except ImportError:
        return False
