"""Arrays in a file of the format safetensors: 8 bytes with the length of a JSON header, the header, and the arrays' bytes.

Nothing in such a file is run, and all of it is checked before any of it is used. The header names each array with its type, its
shape and where its bytes lie; they fill the rest of the file, one array after the other.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tccompile.errors import PlanError, UsageError
from tccompile.plan.stretch import Stretch

MAX_HEADER = 100 << 20
MAX_RANK = 32

TYPES = {
    "F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2", "I64": "<i8", "I32": "<i4", "I16": "<i2", "I8": "i1", "U64": "<u8",
    "U32": "<u4", "U16": "<u2", "U8": "u1", "BOOL": "?",
}  # fmt: skip
"""NumPy's types by the format's names; bfloat16 is read as its bits, and given as float32."""


@dataclass(frozen=True)
class _Stored:
    """An array in the file, at a byte of it."""

    kind: str
    shape: tuple[int, ...]
    begin: int
    end: int


class SafeTensors(Mapping[str, np.ndarray]):
    """The arrays of a file by name, each read when it is asked for; bfloat16 is widened to float32. `metadata` are its own texts.

    Raises UsageError, which names the array and what is wrong, for a file that is not of the format.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        try:
            self._file = Stretch.of_file(self.path)
        except OSError as error:
            raise UsageError(f"{self.path}: cannot be read: {error.strerror}") from None
        self._size = len(self._file)
        header, self._start = self._header()
        self.metadata = _texts(header.get("__metadata__"))
        self._arrays = {name: self._stored(name, said) for name, said in header.items() if name != "__metadata__"}
        at = 0
        for name, stored in sorted(self._arrays.items(), key=lambda item: (item[1].begin, item[1].end)):
            if stored.begin != at:
                why = f"the array {name!r} begins at byte {stored.begin} of the data, those before it end at {at}"
                raise self._broken(why)
            at = stored.end
        if self._start + at != self._size:
            raise self._broken(f"its arrays end at byte {self._start + at}, the file has {self._size}")

    def _broken(self, why: str) -> UsageError:
        return UsageError(f"{self.path} is not a file of the format safetensors: {why}")

    def _header(self) -> tuple[dict[str, Any], int]:
        """The header, and where the data begin."""
        prefix = self._file[:8].read()
        length = int.from_bytes(prefix, "little")
        if len(prefix) < 8 or not 2 <= length <= min(MAX_HEADER, self._size - 8):
            raise self._broken(f"a header of {length} bytes, in a file of {self._size}")
        try:
            header = json.loads(bytes(self._file[8 : 8 + length].read()).decode("utf-8"), object_pairs_hook=_once)
        except (ValueError, RecursionError) as error:
            raise self._broken(f"its header is no JSON: {str(error) or 'it nests too deep'}") from None
        if type(header) is not dict:
            raise self._broken("its header is no JSON object")
        return header, 8 + length

    def _stored(self, name: str, said: Any) -> _Stored:
        if type(said) is not dict or said.keys() != {"dtype", "shape", "data_offsets"}:
            raise self._broken(f"the array {name!r} has not a dtype, a shape and data_offsets")
        kind, shape, offsets = said["dtype"], said["shape"], said["data_offsets"]
        if type(kind) is not str or kind not in TYPES:
            raise UsageError(f"{self.path}: the array {name!r} is of {kind!r}; {', '.join(TYPES)} can be read: convert it")
        if not _naturals(shape) or len(shape) > MAX_RANK or not _naturals(offsets) or len(offsets) != 2:
            raise self._broken(f"the array {name!r} has the shape {shape!r} and the data_offsets {offsets!r}")
        begin, end = offsets
        size = math.prod(shape) * np.dtype(TYPES[kind]).itemsize
        if end - begin != size or self._start + end > self._size:
            raise self._broken(f"the array {name!r} needs {size} bytes, and is to lie from {begin} to {end} in {self._size}")
        return _Stored(kind, tuple(shape), begin, end)

    def __getitem__(self, name: str) -> np.ndarray:
        stored = self._arrays[name]
        try:
            data = self._file[self._start + stored.begin : self._start + stored.end].read()
        except PlanError as error:
            raise UsageError(f"{self.path}: the array {name!r} cannot be read: {error}") from None
        values = np.frombuffer(data, TYPES[stored.kind]).reshape(stored.shape)
        return (values.astype(np.uint32) << 16).view(np.float32) if stored.kind == "BF16" else values

    def __iter__(self) -> Iterator[str]:
        return iter(self._arrays)

    def __len__(self) -> int:
        return len(self._arrays)


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a name is in it twice")
    return found


def _naturals(values: Any) -> bool:
    return type(values) is list and all(type(n) is int and 0 <= n < 1 << 48 for n in values)


def _texts(said: Any) -> dict[str, str]:
    """A header's metadata, which nothing has to be: what it has of texts."""
    return {name: text for name, text in said.items() if type(text) is str} if type(said) is dict else {}
