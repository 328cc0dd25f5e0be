"""Bytes of a file that are read when they are asked for."""

from __future__ import annotations

import os
import weakref
from threading import Lock
from typing import Any, Protocol

import numpy as np

from tccompile.errors import PlanError


class Stretch:
    """A part of a file, or of memory: its parts are Stretches too, and `read` gives the bytes.

    A file is not mapped: memory that is mapped changes with the file, and ends the process where that has become shorter. What
    has been read stays as it was, whatever becomes of the file, and is checked there.
    """

    __slots__ = ("_size", "_source", "_start")

    def __init__(self, source: _Source, start: int, size: int) -> None:
        self._source, self._start, self._size = source, start, size

    @staticmethod
    def of(data: bytes | memoryview) -> Stretch:
        """All of these bytes."""
        view = memoryview(data).cast("B")
        return Stretch(_Memory(view), 0, len(view))

    @staticmethod
    def of_file(path: str | os.PathLike[str]) -> Stretch:
        """All of a file, which stays open: one that takes its name later changes nothing. Raises OSError."""
        file = _File(path)
        return Stretch(file, 0, file.size)

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, part: slice) -> Stretch:
        start, stop, step = part.indices(self._size)
        assert step == 1
        return Stretch(self._source, self._start + start, max(stop - start, 0))

    def __eq__(self, other: object) -> bool:
        """Whether the bytes are the same."""
        if isinstance(other, Stretch):
            other = other.read()
        return self.read() == other if isinstance(other, bytes | memoryview) else NotImplemented

    __hash__ = None  # type: ignore[assignment]

    def read(self) -> memoryview:
        """The bytes, of a file in memory of their own. Raises PlanError if they cannot be read any more."""
        return self._source.read(self._start, self._size).toreadonly()


class _Source(Protocol):
    def read(self, start: int, size: int) -> memoryview: ...


class _Memory:
    def __init__(self, data: memoryview) -> None:
        self.data = data

    def read(self, start: int, size: int) -> memoryview:
        return self.data[start : start + size]


class _File:
    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._file = open(path, "rb", buffering=0)  # noqa: SIM115
        weakref.finalize(self, self._file.close)
        self.size = os.fstat(self._file.fileno()).st_size
        self._lock = Lock()

    def read(self, start: int, size: int) -> memoryview:
        out = memoryview(np.empty(size, np.uint8).data)  # whose pages, unlike a bytearray's, are not written twice
        done = 0
        while done < size:  # an operating system may give less than was asked for
            try:
                count = self._read_into(out[done:], start + done)
            except OSError as error:
                raise PlanError(f"the file cannot be read any more: {error.strerror}") from None
            if not count:
                raise PlanError(f"the file ends at {start + done} bytes: it was cut off after it was opened")
            done += count
        return out

    def _read_into(self, out: Any, start: int) -> int:
        """Bytes from a place on; how many. Other threads, and processes that share the open file, move no place of ours."""
        if hasattr(os, "preadv"):
            return os.preadv(self._file.fileno(), [out], start)
        with self._lock:
            self._file.seek(start)
            return self._file.readinto(out) or 0
