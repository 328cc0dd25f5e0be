"""Members of a family on a GPU: what is loaded for its least sizes, told other numbers.

A member is made when its sizes are first seen, between two inferences. So nothing is checked, encoded or made then that is the
same for all members: as many graphs and tables as a session keeps members are there from the start, and those of members that
have gone are used again.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from tccompile.ir.extent import Shape, ceil_div
from tccompile.ir.program import Count
from tccompile.ir.tensor import Tensor
from tccompile.ir.types import DType
from tccompile.plan.format import Address, Entry, Family, Float, Int, Map
from tccompile.plan.formulas import Slot, filler
from tccompile.plan.members import Bounds, io_of
from tccompile.runtime.driver import Memory
from tccompile.runtime.engine import RECENT, Held
from tccompile.runtime.graph import TOLD, Executable, launches
from tccompile.runtime.loaded import Loaded, copy_maps

WORDS = TOLD.itemsize // 4
"""Words of 32 bits that the driver is told of a node."""

SHAPE = (2, 3, 4, 8)
"""Those of them that are the grid and the bytes of shared memory."""


AHEAD = 1 << 13
"""Tensor maps of all members of a family up to which all are encoded when a session opens: the driver takes a microsecond each,
and a table 128 bytes of the GPU's memory."""


@dataclass(frozen=True)
class Member:
    """What is a member's own.

    io         its inputs and outputs; `counts`, what of these the data decide; `entry` makes the whole entry
    give_back  lets other members have its graph; what is queued of it runs as it was told
    """

    executable: Executable
    io: Mapping[str, Held]
    counts: Sequence[Count]
    entry: Callable[[], Entry]
    give_back: Callable[[], None]


class Buffer(NamedTuple):
    """What is to be known of a member's input or output."""

    shape: Shape
    dtype: DType
    nbytes: int


class Tables:
    """Where tensor maps of a family's members lie: of few members those of all, which are encoded when the session opens.

    Of others there is a table for each graph. Raises DriverError for a map that cannot be.
    """

    def __init__(self, loaded: Loaded, bounds: Bounds):
        self._loaded, self._formulas = loaded, bounds.formulas
        assert loaded.table is not None
        self._size = loaded.table.size
        kept = bounds.formulas.kept
        self.ahead = bounds.proven and kept is not None and kept * len(loaded.maps.maps) <= AHEAD
        count = kept if self.ahead and kept is not None else RECENT + 1
        self._memory = Memory(loaded.device, count * self._size, "tensor maps")
        self.close = self._memory.close
        if self.ahead:
            encoded = np.empty((count, self._size), np.uint8)
            for number, row in enumerate(encoded):
                row[:] = loaded.encode(bounds.formulas.whole(number)).view(np.uint8).reshape(-1)
            copy_maps(loaded.device, self._memory.address, encoded)

    def own(self, number: int) -> int:
        """Where the table of a graph is, if not all maps are encoded."""
        return self._memory.address + self._size * number

    def address(self, number: int, sizes: Sequence[int], ints: np.ndarray) -> int:
        """Where the maps for these sizes are, whose numbers these are; it may be the table of the graph of this number."""
        if self.ahead:
            return self._memory.address + self._size * self._formulas.row(sizes)
        table = self.own(number)
        encoded, room, own = self._loaded.encode(ints), self._loaded.room, self._loaded.stream.value
        with self._loaded.device as cu:  # as an inference is queued: the next one comes after it, on whatever stream
            room.order_after_last(own)
            cu.cuMemcpyHtoDAsync(table, encoded.ctypes.data, encoded.nbytes, own)
            room.mark_last(own)
        return table


class GpuFamily:
    """A family whose entry for the least sizes is loaded: it makes members of that."""

    def __init__(self, family: Family, loaded: Loaded):
        self.family, self.loaded = family, loaded
        self._bounds = Bounds(family, loaded.number)
        self._kinds, self._io = _kinds(io_of(family))
        self._counts: Callable[[Sequence[Any]], Sequence[Count]] = filler(family.entry.program.counts)
        self._tables = Tables(loaded, self._bounds) if loaded.table else None
        self._map_places = np.array(loaded.graph.map_places, np.int64)
        self._map_offsets = np.array(loaded.maps.places(0), np.uint64)
        self._patches()
        graph = loaded.graph
        # One more than a session has recent sizes: it also has a member for the least sizes of all.
        self._spares = [(Executable(graph, graph.instantiated(), graph.numbers.copy()), i) for i in range(RECENT + 1)]
        with loaded.device as cu:
            for executable, number in self._spares:
                if self._tables and not self._tables.ahead:  # then a graph's maps stay where they are
                    executable.numbers.values[self._map_places] = self._tables.own(number) + self._map_offsets
                    executable.tell(cu, self._mapped)
                cu.cuGraphUpload(executable.instance.value, loaded.stream.value)

    def _patches(self) -> None:
        """Finds which of the launches' numbers are formulas: their places, and the formulas'; and of which nodes they are."""
        ints: list[tuple[int, int, int]] = []
        floats: list[tuple[int, int]] = []
        shapes: list[tuple[int, int]] = []
        together: list[tuple[int, int]] = []
        uses: dict[str, list[tuple[int, int, Any]]] = {}
        mapped: list[int] = []
        section = self.family.entry.sections[self.loaded.number]
        for number, (node, launch) in enumerate(zip(self.loaded.graph.nodes, launches(section), strict=True)):
            for column, extent in zip(SHAPE, (*launch.grid, launch.smem), strict=True):
                if isinstance(extent, Slot):
                    shapes.append((WORDS * number + column, extent.number))
            if launch.cooperative and isinstance(launch.grid[0], Slot):
                together.append((WORDS * number + SHAPE[0], node.most))
            for place, arg in enumerate(launch.args, node.first):
                match arg:
                    case Map():
                        mapped.append(number)
                    case Int(Slot() as slot):
                        ints.append((place, slot.number, 0))
                    case Float(Slot() as slot):
                        floats.append((place, slot.number))
                    case Address("io", name, offset):
                        uses.setdefault(name, []).append((number, place, offset))
                    case Address(space, name, Slot() as slot):
                        ints.append((place, slot.number, self.loaded.address(Address(space, name, 0))))
        self._ints, self._floats, self._shapes = _columns(ints, 3), _columns(floats, 2), _columns(shapes, 2)
        self._together = _columns(together, 2)
        self._uses = filler({name: tuple(own) for name, own in uses.items()})
        self._mapped = sorted({*mapped})
        first = np.array([node.first for node in self.loaded.graph.nodes])
        places = [place for place, *_ in (*ints, *floats)]
        changing = {int(n) for n in np.searchsorted(first, places, "right") - 1} | {word // WORDS for word, _ in shapes}
        self._changing = sorted(changing | {*mapped} if self._tables and self._tables.ahead else changing)

    def member(self, sizes: Sequence[int]) -> Member:
        """The member for these sizes. Raises PlanError for numbers that break a rule, LaunchError if memory does not suffice."""
        numbers, ints = self._bounds.formulas.at(sizes)
        self._bounds.check(ints)
        executable, number = spare = self._spares[-1]
        values, told = executable.numbers.values, executable.numbers.told.view(np.uint32)
        if self._tables:
            values[self._map_places] = self._tables.address(number, sizes, ints) + self._map_offsets
        where, which, starts = self._ints
        values[where] = ints[which] + starts
        if self._floats.size:
            where, which = self._floats
            values[where] = np.array([numbers[n] for n in which], np.float32).view(np.uint32)
        where, which = self._shapes
        told[where] = ints[which]
        if self._together.size:
            where, most = self._together
            told[where] = np.minimum(told[where], most)
        executable.renumbered(self._uses(numbers), self._changing)
        self._spares.pop()
        give_back = partial(self._spares.append, spare)
        held = [kind(numbers) for kind in self._kinds]
        io = {name: held[number] for name, number in self._io}
        return Member(executable, io, self._counts(numbers), partial(self.family.at, tuple(sizes)), give_back)

    def close(self) -> None:
        """Free what no member has; all have given back what they had."""
        for executable, _ in self._spares:
            executable.close()
        if self._tables:
            self._tables.close()
        self.loaded.close()


def _kinds(io: Mapping[str, Tensor]) -> tuple[list[Callable[[Sequence[Any]], Buffer]], list[tuple[str, int]]]:
    """What makes the buffers of a member, each kind once, and of which kind each input and output is: of a decoder's caches all
    are of one."""
    known: dict[tuple[Any, DType], int] = {}
    named = [(name, known.setdefault((t.shape, t.dtype), len(known))) for name, t in io.items()]
    return [partial(_buffer, shape, dtype) for shape, dtype in known], named


def _buffer(shape: Sequence[Any], dtype: DType, numbers: Sequence[Any]) -> Buffer:
    extents = tuple([numbers[n.number] if type(n) is Slot else n for n in shape])
    return Buffer(extents, dtype, ceil_div(math.prod(extents) * dtype.bits, 8))


def _columns(rows: Sequence[tuple[int, ...]], number: int) -> np.ndarray:
    """The so many columns of rows."""
    return np.array(rows, np.int64).reshape(-1, number).T
