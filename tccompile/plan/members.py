"""What the launches of a family's member are held to before they run, in a fraction of a millisecond.

Reading a plan holds a family's entries for the least and for the greatest sizes to all rules (`check_plan`). What is between them
differs by numbers only, so it is enough that these keep what runs inside memory: tensors are no larger than at the greatest
sizes, where everything has its place, and what launches are told is what a GPU takes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from tccompile.errors import PlanError
from tccompile.ir.limits import SIZE, require
from tccompile.ir.tensor import Tensor
from tccompile.plan.format import Address, Family, Int, Map
from tccompile.plan.formulas import Slot, computed
from tccompile.plan.rules import GRID

WIDE = float(1 << 62)
"""What extents of a tensor are multiplied to is less."""


class Bounds:
    """The rules for members of a family, of those of whose sections one is run, by its number."""

    def __init__(self, family: Family, number: int):
        self._constants: list[int] = []
        self._formulas = len(family.formulas)
        section, program = family.entry.sections[number], family.entry.program
        self._names = list(program.tensors)
        place = {name: i for i, name in enumerate(self._names)}
        tensors = list(program.tensors.values())
        rank = max(t.rank for t in tensors)
        self._padded = self._table([(*t.padded, *[1] * (rank - t.rank)) for t in tensors])
        self._strides = self._table([(*t.strides, *[1] * (rank - t.rank)) for t in tensors])
        self._offsets = self._table([(t.offset,) for t in tensors])[:, 0]
        self._bits = np.array([t.dtype.bits for t in tensors])
        self._bases = np.array([place[t.storage] for t in tensors])
        self._spaces = self._table([(step.scratch[1], step.counters[1]) for step in section.steps], 2)
        launches = [launch for step in section.steps for launch in step.launches]
        args = [arg for launch in launches for arg in launch.args]
        self._grids = self._table([launch.grid for launch in launches if any(isinstance(n, Slot) for n in launch.grid)], 3)
        self._shared = self._table([(launch.smem,) for launch in launches], 1)[:, 0]
        ints = [arg.value for arg in args if isinstance(arg, Int)]
        self._ints = self._table([(n,) for n in ints if isinstance(n, Slot)], 1)
        maps = [arg for arg in dict.fromkeys(args) if isinstance(arg, Map)]
        self._map_extents = self._table([(*m.extents, *[1] * (5 - len(m.extents))) for m in maps], 5)
        self._map_strides = self._table([(*m.strides, *[16] * (4 - len(m.strides))) for m in maps], 4)
        self._map_sizes = np.array([m.dtype.size for m in maps], np.int64)
        addresses = [(m.address, i) for i, m in enumerate(maps)]
        addresses += [(arg, -1) for arg in dict.fromkeys(args) if isinstance(arg, Address)]
        self._begin = self._table([(a.bytes,) for a, _ in addresses], 1)[:, 0]
        self._of_map = np.array([i for _, i in addresses], np.int64)
        self._owner = np.array([place.get(a.name, -1) for a, _ in addresses], np.int64)
        ends = {"arena": section.arena, "counters": section.counters}
        self._end = np.array([ends.get(a.space, 0) for a, _ in addresses], np.int64)
        self._values = np.array(self._constants, np.int64)
        self._most = np.full(len(tensors), SIZE, np.int64)
        values = self._all(computed(family.formulas, [size.all[-1] for size in family.sizes]))
        self._most, self._most_space, self._most_shared = self._bytes(values), values[self._spaces], values[self._shared]
        lowest = self._all(computed(family.formulas, [size.low for size in family.sizes]))
        self._most_shared = np.maximum(self._most_shared, lowest[self._shared])

    def check(self, numbers: Sequence[Any]) -> None:
        """Raises PlanError for the member whose numbers these are, as `computed` gives them, if it breaks a rule."""
        values = self._all(numbers)
        sizes = self._bytes(values)
        if (over := sizes > self._most).any():
            raise PlanError(f"tensor {self._names[int(np.argmax(over))]!r} has more bytes than at the greatest sizes")
        spaces = values[self._spaces]
        require((spaces >= 0).all() and (spaces <= self._most_space).all(), "a workspace larger than at the greatest sizes")
        shared = values[self._shared]
        require((shared >= 0).all() and (shared <= self._most_shared).all(), "more shared memory than at the greatest sizes")
        grids = values[self._grids]
        require((grids >= 1).all() and (grids <= GRID).all(), "a grid that there is not")
        told = values[self._ints]
        require((told >= -(1 << 31)).all() and (told < 1 << 32).all(), "a number in more than 32 bits")
        extents, strides = values[self._map_extents], values[self._map_strides]
        fits = (extents >= 1).all() and (extents < 1 << 32).all() and (strides > 0).all() and (strides < SIZE).all()
        require(fits and not (strides % 16).any(), "a tensor map that the hardware does not have")
        wide = ((extents[:, 1:] - 1.0) * strides).sum(1)
        require((wide < SIZE).all(), "a tensor map of more than there is")
        spans = extents[:, 0] * self._map_sizes + ((extents[:, 1:] - 1) * strides).sum(1)
        begin = values[self._begin]
        end = np.where(self._owner < 0, self._end, sizes[self._owner])
        span = np.where(self._of_map < 0, 0, spans[self._of_map]) if len(spans) else 0
        require((begin >= 0).all() and (begin + span <= end).all(), "an address outside of what there is")

    def _table(self, rows: Iterable[Sequence[Any]], columns: int = 0) -> np.ndarray:
        """Where the numbers of rows are among all values: those of formulas, then constants."""
        out = [[n.number if isinstance(n, Slot) else self._constant(n) for n in row] for row in rows]
        return np.array(out, np.int64).reshape(len(out), -1 if out else columns)

    def _constant(self, value: int) -> int:
        self._constants.append(value)
        return self._formulas + len(self._constants) - 1

    def _all(self, numbers: Sequence[Any]) -> np.ndarray:
        """The values of formulas, where quotients, which are for launches' floats, do not count, and the constants."""
        return np.concatenate([np.array([n if type(n) is int else 0 for n in numbers], np.int64), self._values])

    def _bytes(self, values: np.ndarray) -> np.ndarray:
        """The bytes of each tensor; PlanError for one that is none, or that ends behind what it lies in."""
        padded, strides, offsets = values[self._padded], values[self._strides], values[self._offsets]
        require((padded >= 0).all() and (strides >= 0).all() and (offsets >= 0).all(), "a negative extent")
        require(((padded + 1.0) * (strides + 1.0)).sum(1).max(initial=0.0) < SIZE, "a tensor of more than there is")
        require(offsets.max(initial=0) < SIZE, "a tensor that begins behind what there is")
        spans = np.where((padded == 0).any(1), 0, 1 + ((padded - 1) * strides).sum(1))
        sizes = (spans * self._bits + 7) // 8
        ends = (offsets * self._bits) // 8 + sizes
        if (over := ends > sizes[self._bases]).any():
            raise PlanError(f"tensor {self._names[int(np.argmax(over))]!r} ends behind what it lies in")
        return sizes


def io_of(family: Family) -> dict[str, Tensor]:
    """A family's inputs and outputs, with slots."""
    program = family.entry.program
    return {name: program.tensors[name] for name in (*program.inputs, *program.outputs)}
