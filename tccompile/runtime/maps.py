"""Tensor maps of a section: which there are, and their bytes, which the driver encodes.

A member of a family has its own, and is made between two inferences. The bindings make an object of each extent of each map
whenever they are called, which takes longer than all else that a new size needs. So the driver's functions are called where the
bindings say that they lie, with arguments that are made once, and that numbers are written into.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from tccompile.plan.format import MAPPED, Address, Map, Section
from tccompile.plan.formulas import Slot, slots
from tccompile.runtime.driver import Device
from tccompile.runtime.graph import launches

BYTES = 128
"""Of a tensor map."""

ALIGN = 64
"""Bytes that the driver aligns it to."""

SMALL_MAP = 131_072
"""Bytes under which a tensor's map must have a bit cleared for drivers of CUDA 13.1 or older (docs/facts/hopper.md)."""

SMALL_BIT = np.uint64(1 << 21)
"""That bit, of a map's second word."""

FIELDS: dict[str, tuple[type, int]] = {
    "address": (np.uint64, 1),
    "extents": (np.uint64, 5),
    "strides": (np.uint64, 4),
    "box": (np.uint32, 5),
    "steps": (np.uint32, 5),
    "lower": (np.int32, 3),
    "upper": (np.int32, 3),
    "channels": (np.uint32, 1),
    "pixels": (np.uint32, 1),
}
"""What the driver is told of a map: types, and how many there are at most."""

Args = tuple[Any, ...]
"""What one of the driver's functions is called with."""

Put = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]
"""Where slots' numbers go: the numbers of a field, places among them, slots, and what is added."""


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
        self._told: dict[str, np.ndarray] = {name: np.zeros((len(maps), most), dtype) for name, (dtype, most) in FIELDS.items()}
        self._puts: list[Put] = []
        for name in FIELDS:
            self._fill(name, [_numbers(m, name, address) for m in maps])
        self._rows = np.arange(len(maps))
        self._last = np.array([len(m.extents) - 1 for m in maps], np.int64)
        self._flat = np.array([m.dtype.size if len(m.extents) == 1 else 0 for m in maps], np.uint64)
        self._small = device.driver_version <= 13010
        self._all, self._open = dict[str, list[Args]](), dict[str, list[Args]]()
        for number, m in enumerate(maps):
            name, args = self._call(device, number, m)
            self._all.setdefault(name, []).append(args)
            if slots(m):
                self._open.setdefault(name, []).append(args)

    def __call__(self, numbers: np.ndarray) -> np.ndarray:
        """The words of all maps, where what slots stand for are these numbers. Raises DriverError for one that cannot be."""
        for field, places, which, starts in self._puts:
            field[places] = starts + numbers[which]
        with self._device as cu:
            for name, calls in self._all.items():
                cu.native_calls(name, calls)
        self._all = self._open  # the others stay what they are
        if not self._small:
            return self._words
        inner = self._told["strides"][self._rows, self._last - 1]
        np.copyto(inner, self._flat, where=self._flat > 0)
        words = self._words.copy()
        words[self._told["extents"][self._rows, self._last] * inner < SMALL_MAP, 1] &= ~SMALL_BIT
        return words

    def _fill(self, name: str, rows: Sequence[Sequence[tuple[int, Any]]]) -> None:
        """Write what is known of a field, and note what slots stand for, by its place among the numbers of all maps."""
        field = self._told[name]
        places, which, starts = list[int](), list[int](), list[int]()
        for number, row in enumerate(rows):
            for column, (start, value) in enumerate(row):
                if isinstance(value, Slot):
                    places.append(field.shape[1] * number + column)
                    which.append(value.number)
                    starts.append(start)
                else:
                    field[number, column] = start + value
        if places:
            self._puts.append((field.reshape(-1), np.array(places), np.array(which), np.array(starts, np.int64)))

    def _call(self, device: Device, number: int, m: Map) -> tuple[str, Args]:
        """The name of the driver's function that encodes a map, and its arguments, as ctypes hands them on as they are."""
        cu, rank = device.cu, len(m.extents)

        def at(array: np.ndarray) -> Any:
            return ctypes.byref(ctypes.c_char.from_address(array.ctypes.data))

        def value(name: str, kind: Any) -> Any:
            told = self._told[name][number]
            is_open = slots(m.address if name == "address" else getattr(m, name))
            return kind.from_address(told.ctypes.data) if is_open else kind.from_param(int(told[0]))

        pointers = {name: at(field[number]) for name, field in self._told.items()}
        swizzle = f"CU_TENSOR_MAP_SWIZZLE_{f'{m.swizzle}B' if m.swizzle else 'NONE'}"
        first = (
            at(self._words[number]),
            _constant(cu.CUtensorMapDataType, f"CU_TENSOR_MAP_DATA_TYPE_{MAPPED[m.dtype]}"),
            ctypes.c_uint32.from_param(rank),
            value("address", ctypes.c_uint64),
            pointers["extents"],
            pointers["strides"],
        )
        rest = (
            pointers["steps"],
            _constant(cu.CUtensorMapInterleave, "CU_TENSOR_MAP_INTERLEAVE_NONE"),
            _constant(cu.CUtensorMapSwizzle, swizzle),
            _constant(cu.CUtensorMapL2promotion, "CU_TENSOR_MAP_L2_PROMOTION_L2_256B"),
            _constant(cu.CUtensorMapFloatOOBfill, "CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE"),
        )
        if m.kind == "tiled":
            return "cuTensorMapEncodeTiled", (*first, pointers["box"], *rest)
        pixels = value("channels", ctypes.c_uint32), value("pixels", ctypes.c_uint32)
        return "cuTensorMapEncodeIm2col", (*first, pointers["lower"], pointers["upper"], *pixels, *rest)


def _numbers(m: Map, name: str, address: Callable[[Address], int]) -> list[tuple[int, Any]]:
    """A field's numbers, each as one that is known and one that may be a slot."""
    if name == "address":
        return [(address(Address(m.address.space, m.address.name, 0)), m.address.bytes)]
    value = getattr(m, name)
    if name == "steps" and m.kind == "im2col":
        value = (1, *value, 1)
    return [(0, n) for n in (value if isinstance(value, tuple) else (value,))]


def _constant(names: Any, name: str) -> Any:
    """A member of an enumeration of the driver's, as an argument."""
    return ctypes.c_int.from_param(int(getattr(names, name)))
