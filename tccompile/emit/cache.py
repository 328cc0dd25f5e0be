"""Compiled kernels on disk: one file an entry, with its key and a checksum; safe to share between processes, and to delete."""

from __future__ import annotations

import atexit
import hashlib
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

LIMIT = 2 << 30
"""Bytes beyond which the entries that have not been used for longest are deleted."""


NOWHERE = Path(os.devnull) / "tccompile"
"""A folder that nobody can make."""


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
        return NOWHERE


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


def is_empty() -> bool:
    """Whether there are no entries at all."""
    return next(folder().glob("*/*.bin"), None) is None


def size() -> tuple[int, int]:
    """How many entries there are, and their bytes."""
    sizes = []
    for path in folder().glob("*/*.bin"):
        with suppress(OSError):
            sizes.append(path.stat().st_size)
    return len(sizes), sum(sizes)


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
