"""Tensor maps of a section: which there are, and their bytes, which the driver encodes.

A member of a family has its own, and is made between two inferences. The bindings make an object of each extent of each map
whenever they are called, which takes longer than all else that a new size needs. So the driver's functions are called where the
bindings say that they lie, with arguments that are made once, and that numbers are written into.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from itertools import accumulate
from typing import Any

import numpy as np

from tccompile.plan.format import MAPPED, Address, Map, Section
from tccompile.plan.formulas import Slot, slots
from tccompile.runtime.driver import Device, Driver
from tccompile.runtime.graph import launches

BYTES = 128
"""Of a tensor map."""

ALIGN = 64
"""Bytes that the driver aligns it to."""

SMALL_MAP = 131_072
"""Bytes under which a tensor's map must have a bit cleared for drivers of CUDA 13.1 or older (docs/facts/hopper.md)."""

SMALL_BIT = np.uint64(1 << 21)
"""That bit, of a map's second word."""

WIDE = {"address": 1, "extents": 5, "strides": 4}
"""What the driver is told of a map in 64 bits each, and how many there are at most."""

NARROW = {"box": 5, "steps": 5, "lower": 3, "upper": 3, "channels": 1, "pixels": 1}
"""The same in 32 bits each."""

Args = tuple[Any, ...]
"""What one of the driver's functions is called with."""


class Told:
    """Numbers that the driver is told of maps, the same fields of each; those that are slots are written again for each size."""

    def __init__(self, fields: Mapping[str, int], dtype: type, rows: Sequence[Mapping[str, Sequence[tuple[int, Any]]]]):
        """Each row has the numbers of some fields, each as one that is known and one that may be a slot."""
        starts = [0, *accumulate(fields.values())]
        self.columns = dict(zip(fields, starts, strict=False))
        self.numbers: np.ndarray = np.zeros((len(rows), starts[-1]), dtype)
        open_ones: list[tuple[int, int, int]] = []
        for number, row in enumerate(rows):
            for name in fields:
                for column, (start, value) in enumerate(row[name], self.columns[name]):
                    if isinstance(value, Slot):
                        open_ones.append((starts[-1] * number + column, value.number, start))
                    else:
                        self.numbers[number, column] = (start + value) % (1 << 8 * self.numbers.itemsize)
        self._flat = self.numbers.reshape(-1)
        self._places, self._which, self._starts = np.array(open_ones, np.int64).reshape(-1, 3).T

    def fill(self, numbers: np.ndarray) -> None:
        """Write what slots stand for."""
        self._flat[self._places] = self._starts + numbers[self._which]

    def address(self, number: int, name: str) -> int:
        """Where a field of a map lies."""
        return self.numbers.ctypes.data + self.numbers.itemsize * (self.numbers.shape[1] * number + self.columns[name])


class MapTable:
    """The tensor maps of a section's launches: which there are, each once, and of each argument that is one, which it is.

    Those of a family's section are told apart by their formulas, and are then the same maps in all of its members.
    """

    def __init__(self, section: Section):
        known: dict[Map, int] = {}
        self._numbers = [known.setdefault(m, len(known)) for m in _maps(section)]
        self.maps = list(known)

    def places(self, start: int) -> list[int]:
        """Where the map of each argument lies in a table that begins there."""
        return [start + BYTES * number for number in self._numbers]


def _maps(section: Section) -> Iterator[Map]:
    return (arg for launch in launches(section) for arg in launch.args if isinstance(arg, Map))


class Encoder:
    """Encodes these tensor maps; where they have slots, again for each size.

    address  where something lies in memory, whose offset is a number
    """

    def __init__(self, device: Device, maps: Sequence[Map], address: Callable[[Address], int]):
        self._device = device
        room = np.zeros(BYTES * len(maps) + ALIGN, np.uint8)
        start = -room.ctypes.data % ALIGN
        self._words = room[start : start + BYTES * len(maps)].view(np.uint64).reshape(-1, BYTES // 8)
        rows = [{name: _numbers(m, name, address) for name in (*WIDE, *NARROW)} for m in maps]
        self._wide, self._narrow = Told(WIDE, np.uint64, rows), Told(NARROW, np.uint32, rows)
        self._all, self._open = dict[str, list[Args]](), dict[str, list[Args]]()
        for number, m in enumerate(maps):
            name, args = self._call(device.cu, number, m)
            self._all.setdefault(name, []).append(args)
            if slots(m):
                self._open.setdefault(name, []).append(args)
        self._small = device.driver_version <= 13010
        last, extent, stride = [len(m.extents) - 1 for m in maps], self._wide.columns["extents"], self._wide.columns["strides"]
        places = self._wide.numbers.shape[1] * np.arange(len(maps))
        self._outer = places + extent + np.array(last, np.int64)
        self._steps = places + stride + np.array([max(n - 1, 0) for n in last], np.int64)
        for number, m in enumerate(maps):
            if not last[number]:  # a single row has no stride; the driver does not look
                self._wide.numbers[number, stride] = m.dtype.size

    def __call__(self, numbers: np.ndarray) -> np.ndarray:
        """The words of all maps, until the next call, where what slots stand for are these numbers.

        Raises DriverError for one that cannot be.
        """
        self._wide.fill(numbers)
        self._narrow.fill(numbers)
        with self._device as cu:
            for name, calls in self._all.items():
                cu.native_calls(name, calls)
        self._all = self._open  # the others stay what they are
        if self._small:
            told, second = self._wide.numbers.reshape(-1), self._words[:, 1]
            np.bitwise_and(second, ~SMALL_BIT, out=second, where=told[self._outer] * told[self._steps] < SMALL_MAP)
        return self._words

    def _call(self, cu: Driver, number: int, m: Map) -> tuple[str, Args]:
        """The name of the driver's function that encodes a map, and its arguments, as ctypes hands them on as they are."""

        def at(name: str) -> Any:
            told = self._wide if name in WIDE else self._narrow
            return ctypes.c_void_p.from_param(told.address(number, name))

        def value(name: str, kind: Any) -> Any:
            told = self._wide if name in WIDE else self._narrow
            if slots(m.address if name == "address" else getattr(m, name)):
                return kind.from_address(told.address(number, name))
            return kind.from_param(int(told.numbers[number, told.columns[name]]))

        swizzle = f"CU_TENSOR_MAP_SWIZZLE_{f'{m.swizzle}B' if m.swizzle else 'NONE'}"
        first = (
            ctypes.c_void_p.from_param(self._words.ctypes.data + BYTES * number),
            _constant(cu.CUtensorMapDataType, f"CU_TENSOR_MAP_DATA_TYPE_{MAPPED[m.dtype]}"),
            _rank(len(m.extents)),
            value("address", ctypes.c_uint64),
            at("extents"),
            at("strides"),
        )
        rest = (
            at("steps"),
            _constant(cu.CUtensorMapInterleave, "CU_TENSOR_MAP_INTERLEAVE_NONE"),
            _constant(cu.CUtensorMapSwizzle, swizzle),
            _constant(cu.CUtensorMapL2promotion, "CU_TENSOR_MAP_L2_PROMOTION_L2_256B"),
            _constant(cu.CUtensorMapFloatOOBfill, "CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE"),
        )
        if m.kind == "tiled":
            return "cuTensorMapEncodeTiled", (*first, at("box"), *rest)
        pixels = value("channels", ctypes.c_uint32), value("pixels", ctypes.c_uint32)
        return "cuTensorMapEncodeIm2col", (*first, at("lower"), at("upper"), *pixels, *rest)


def _numbers(m: Map, name: str, address: Callable[[Address], int]) -> list[tuple[int, Any]]:
    """A field's numbers, each as one that is known and one that may be a slot."""
    if name == "address":
        return [(address(Address(m.address.space, m.address.name, 0)), m.address.bytes)]
    value = getattr(m, name)
    if name == "steps" and m.kind == "im2col":
        value = (1, *value, 1)
    return [(0, n) for n in (value if isinstance(value, tuple) else (value,))]


@cache
def _constant(names: Any, name: str) -> Any:
    """A member of an enumeration of the driver's, as an argument."""
    return ctypes.c_int.from_param(int(getattr(names, name)))


@cache
def _rank(rank: int) -> Any:
    """A number of axes, as an argument."""
    return ctypes.c_uint32.from_param(rank)
