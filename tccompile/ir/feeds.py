"""Inputs of a program: made from a seed, the same on every machine, or read from a file. NumPy only."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np

from tccompile.errors import InputError
from tccompile.ir.extent import Shape
from tccompile.ir.program import Program
from tccompile.ir.storage import to_storage
from tccompile.ir.types import DType
from tccompile.terminal import member_name, plain

AT_ONCE = 1 << 16
"""Elements that are made at once: what they are made of takes some times their memory."""


@dataclass(frozen=True)
class InputRange:
    """Between what numbers an input's values lie, both included; `whole` if those of floats are integers too."""

    low: float
    high: float
    whole: bool = False

    def __str__(self) -> str:
        return f"{self.low:g}..{self.high:g}"


Ranges = Mapping[str, InputRange]
"""By the input's name."""


def seeded(program: Program, seed: int, ranges: Ranges = MappingProxyType({}), positive: bool = False) -> dict[str, np.ndarray]:
    """Values for each input by name, in its storage type, from the seed alone.

    Where a range is given, they are evenly spread over it. Other floats are the sum of four uniform numbers, of mean 0 and
    variance 1, within ±3.5, or the magnitudes of that. uint8, as images are stored, is any byte; other integers are 0 or 1.
    They come from the raw words of Philox (Salmon et al., 2011), whose stream NumPy keeps, and not from its distributions,
    which it may change.
    """
    out = {}
    for number, name in enumerate(program.inputs):
        t = program.tensors[name]
        generator = np.random.Philox(key=(seed << 32) + number)
        values = np.empty(t.size, np.float32 if t.dtype.is_float else t.dtype.numpy)
        for part in np.split(values, range(AT_ONCE, t.size, AT_ONCE)):
            words = generator.random_raw(part.size)
            if name in ranges:
                part[:] = _between(words, ranges[name], t.dtype)
            elif t.dtype.is_float:
                numbers = words.view(np.uint16)
                total = sum(numbers[i::4].astype(np.int32) for i in range(4))
                part[:] = (total - 2 * 0xFFFF) / np.sqrt((2**32 - 1) / 3)
            else:
                part[:] = words >> 32 & (0xFF if t.dtype is DType.U8 else 1)
        values = values.reshape(t.shape)
        values = np.abs(values) if positive and name not in ranges else values
        out[name] = to_storage(values, t.dtype) if t.dtype.is_float else values
    return out


def _between(words: np.ndarray, r: InputRange, dtype: DType) -> np.ndarray:
    """Numbers of the range, from 64 random bits each."""
    share = (words >> np.uint64(11)).astype(np.float64) * 2.0**-53  # from 0 to 1, without 1
    if dtype.is_float and not r.whole:
        return r.low + share * (r.high - r.low)
    return np.floor(math.ceil(r.low) + share * (math.floor(r.high) - math.ceil(r.low) + 1))


def read_arrays(path: str | os.PathLike[str], names: Sequence[str]) -> dict[str, np.ndarray]:
    """The arrays of a .npy or .npz file by the name of the input they are for. Raises InputError."""
    what = f"{os.fspath(path)} is not a .npy or .npz file of plain arrays"
    try:
        with open(path, "rb") as file:
            begin = file.read(len(_NPY))
        if not begin.startswith((_NPY, *_ZIP)):
            raise ValueError("numpy.save and numpy.savez write such files")
        if begin == _NPY:
            arrays: Any = np.load(path, mmap_mode="r", allow_pickle=False)  # mapped: a header may claim any size
        else:
            with np.load(path, allow_pickle=False) as data:
                _check_size(sum(m.file_size for m in data.zip.infolist()), os.path.getsize(path))
                known = {member_name(name): name for name in names}  # as tcrun wrote them
                arrays = {known.get(name, name): data[name] for name in data.files}
    except OSError as error:
        raise InputError(f"{os.fspath(path)} cannot be read: {error.strerror or error}") from None
    except Exception as error:  # the readers of zip archives and headers raise types of many kinds
        says = str(error)  # they may repeat what the file holds
        raise InputError(f"{what}: {says if len(says) <= 200 else says[:200] + '…'}") from None
    if isinstance(arrays, dict):
        for name, array in arrays.items():
            if not isinstance(array, np.ndarray):
                raise InputError(f"{what}: {name!r} is no array")
        return arrays
    if not names:
        raise InputError(f"the model has no inputs, and {os.fspath(path)} is one; leave it away")
    if len(names) != 1:
        raise InputError(
            f"the model has {len(names)} inputs ({', '.join(map(plain, names))}): give an .npz file with an array for each"
        )
    return {names[0]: arrays}


_NPY, _ZIP = b"\x93NUMPY", (b"PK\x03\x04", b"PK\x05\x06")
"""What files begin with: of one array, and archives."""


def _check_size(unpacked: int, packed: int) -> None:
    """Refuse an archive that swells when it is read."""
    if unpacked > max(1 << 30, 64 * packed):
        raise ValueError(f"{packed} bytes would become {unpacked}; numpy.savez does not compress")


def samples(program: Program, arrays: Mapping[str, np.ndarray]) -> list[dict[str, np.ndarray]] | None:
    """The sets of inputs that arrays hold: each has its input's shape, or one axis more in front, an element a set.

    None if they fit the program's input shapes in neither way. Raises InputError for a name that is missing or unknown,
    another type, and NaN.
    """
    for name in arrays:
        if name not in program.inputs:
            raise InputError(f"the model has no input {name!r}; it has {', '.join(map(repr, program.inputs))}")
    shapes: dict[str, Shape] = {}
    for name in program.inputs:
        if name not in arrays:
            raise InputError(f"input {name!r} is missing")
        t, array = program.tensors[name], arrays[name]
        if array.dtype != t.dtype.numpy:
            raise InputError(f"input {name!r} has type {t.dtype.value}, got {array.dtype.name}; convert it with .astype")
        if array.dtype.kind == "f" and np.isnan(array).any():
            raise InputError(f"the array for input {name!r} holds NaN, by which nothing can be measured; give others")
        shapes[name] = array.shape
    if all(shapes[n] == program.tensors[n].shape for n in program.inputs):
        return [dict(arrays)]
    counts = {s[0] for s in shapes.values() if s}
    if len(counts) != 1 or any(shapes[n][1:] != program.tensors[n].shape for n in program.inputs):
        return None
    return [{n: arrays[n][i] for n in program.inputs} for i in range(counts.pop())]
