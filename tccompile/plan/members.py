"""What the launches of a family's member are held to before they run, in a fraction of a millisecond.

Reading a plan holds a family's entries for the least and for the greatest sizes to all rules (`check_plan`). What is between them
differs by numbers only, so it is enough that these keep what runs inside memory: tensors are no larger than at the greatest
sizes, where everything has its place, and what launches are told is what a GPU takes.

Most of that follows from what numbers can be at all sizes (`formulas.spans`), and is looked at once. What lies in something whose
own extent depends on sizes is looked at for all members at once, or for each, where there are too many.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from tccompile.errors import PlanError
from tccompile.ir.limits import SIZE, require
from tccompile.ir.tensor import Tensor
from tccompile.plan.format import Address, Family, Int, Map
from tccompile.plan.formulas import Prepared, Slot, Span, computed, everywhere, integers, narrowed, spans, used
from tccompile.plan.rules import CORNER, GRID

WIDE = float(1 << 62)
"""What extents of a tensor are multiplied to is less."""


Left = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]
"""Launches' integers and maps' corners, tensors that lie in others, addresses in tensors, each by number, and the tensors that
are concerned."""


class Bounds:
    """The rules for members of a family, of those of whose sections one is run, by its number.

    formulas  the family's, to be computed at its sizes
    """

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
        maps = [arg for arg in dict.fromkeys(args) if isinstance(arg, Map)]
        narrow: list[tuple[Any, int, int]] = [(arg.value, -(1 << 31), 1 << 32) for arg in args if isinstance(arg, Int)]
        narrow += [(n, -CORNER, CORNER) for m in maps for n in m.upper]
        self._narrow, self._from, self._below = self._of_few_bits([row for row in narrow if isinstance(row[0], Slot)])
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
        values = self._all(integers(computed(family.formulas, [size.all[-1] for size in family.sizes])))
        self._most, self._most_space, self._most_shared = self._bytes(values), values[self._spaces], values[self._shared]
        lowest = self._all(integers(computed(family.formulas, [size.low for size in family.sizes])))
        self._most_shared = np.maximum(self._most_shared, lowest[self._shared])
        found = spans(family.formulas, family.sizes)
        at_all = everywhere(family.formulas, family.sizes, found)
        if at_all is not None:
            found = narrowed(found, at_all)
        self._left = self._unproven(found)
        self.proven = self._left is not None and at_all is not None and self._left_holds(at_all, self._left)
        """Whether the rules hold for all members."""
        needed = used((launches, io_of(family), program.counts)) if self.proven else None
        self.formulas = Prepared(family.formulas, family.sizes, at_all, needed)

    def check(self, numbers: np.ndarray) -> None:
        """Raises PlanError for the member whose numbers these are, as `integers` gives them, if it breaks a rule."""
        if self.proven:
            return
        values = self._all(numbers)
        if self._left is None:
            self._check_all(values)
        else:
            self._check_left(values[:, None], self._left)

    def _left_holds(self, numbers: np.ndarray, left: Left) -> bool:
        """Whether what spans did not prove holds for all members, whose numbers these are."""
        constants = np.broadcast_to(self._values[:, None], (len(self._values), numbers.shape[1]))
        try:
            self._check_left(np.concatenate([numbers, constants]), left)
        except PlanError:  # of some member, which is told when it is asked for
            return False
        return True

    def _check_left(self, values: np.ndarray, left: Left) -> None:
        """Look at what spans did not prove, of some members, each a column."""
        narrow, views, owned, tensors = left
        self._check_narrow(values, narrow)
        if not tensors.size:
            return
        sizes = np.zeros((len(self._names), values.shape[1]), np.int64)
        sizes[tensors] = self._sizes(values, tensors)
        ends = (values[self._offsets[views]] * self._bits[views, None]) // 8 + sizes[views]
        if (over := (ends > sizes[self._bases[views]]).any(1)).any():
            raise PlanError(f"tensor {self._names[int(views[np.argmax(over)])]!r} ends behind what it lies in")
        maps = self._of_map[owned]
        span = np.where(maps[:, None] < 0, 0, self._span(values)[maps]) if len(self._map_sizes) else 0
        require((values[self._begin[owned]] + span <= sizes[self._owner[owned]]).all(), "an address outside of what there is")

    def _check_narrow(self, values: np.ndarray, which: np.ndarray) -> None:
        """Hold these of launches' integers and maps' corners to their bits; of several members, each a column."""
        told = values[self._narrow[which]]
        fits = (told >= self._from[which, None]).all() and (told < self._below[which, None]).all()
        require(fits, "a number in more bits than its place has")

    def _check_all(self, values: np.ndarray) -> None:
        sizes = self._bytes(values)
        if (over := sizes > self._most).any():
            raise PlanError(f"tensor {self._names[int(np.argmax(over))]!r} has more bytes than at the greatest sizes")
        spaces = values[self._spaces]
        require((spaces >= 0).all() and (spaces <= self._most_space).all(), "a workspace larger than at the greatest sizes")
        shared = values[self._shared]
        require((shared >= 0).all() and (shared <= self._most_shared).all(), "more shared memory than at the greatest sizes")
        grids = values[self._grids]
        require((grids >= 1).all() and (grids <= GRID).all(), "a grid that there is not")
        self._check_narrow(values[:, None], np.arange(len(self._narrow)))
        extents, strides = values[self._map_extents], values[self._map_strides]
        fits = (extents >= 1).all() and (extents < 1 << 32).all() and (strides > 0).all() and (strides < SIZE).all()
        require(fits and not (strides % 16).any(), "a tensor map that the hardware does not have")
        wide = ((extents[:, 1:] - 1.0) * strides).sum(1)
        require((wide < SIZE).all(), "a tensor map of more than there is")
        begin = values[self._begin]
        end = np.where(self._owner < 0, self._end, sizes[self._owner])
        span = np.where(self._of_map < 0, 0, self._span(values)[self._of_map]) if len(self._map_sizes) else 0
        require((begin >= 0).all() and (begin + span <= end).all(), "an address outside of what there is")

    def _unproven(self, found: Sequence[Span]) -> Left | None:
        """What does not hold at all sizes by what numbers can be; None if more than that does not."""
        low, high, multiple = (
            np.array([*column, *(abs(n) if i == 2 else n for n in self._constants)], np.int64)
            for i, column in enumerate(zip(*found, strict=True))
        )
        padded, strides, alone = high[self._padded], high[self._strides], self._bases == np.arange(len(self._bases))
        extents, steps = high[self._map_extents], high[self._map_strides]
        positive = all(
            (low[table] >= 0).all() for table in (self._padded, self._strides, self._offsets, self._spaces, self._shared)
        )
        if not (
            positive
            and ((padded + 1.0) * (strides + 1.0)).sum(1).max(initial=0.0) < SIZE
            and high[self._offsets].max(initial=0) < SIZE
            and not high[self._offsets][alone].any()
            and (high[self._spaces] <= self._most_space).all()
            and (high[self._shared] <= self._most_shared).all()
            and (low[self._grids] >= 1).all()
            and (high[self._grids] <= GRID).all()
            and (low[self._map_extents] >= 1).all()
            and (extents < 1 << 32).all()
            and (low[self._map_strides] > 0).all()
            and not (multiple[self._map_strides] % 16).any()
            and (((extents[:, 1:] - 1.0) * steps).sum(1) < SIZE).all()
            and (low[self._begin] >= 0).all()
            and (high[self._begin] < SIZE).all()
        ):
            return None
        every = np.arange(len(self._names))
        sizes, least = self._sizes(high, every), self._sizes(low, every)
        span = np.where(self._of_map < 0, 0, self._span(high)[self._of_map]) if len(self._map_sizes) else 0
        ends = high[self._begin] + span
        if (sizes > self._most).any() or (ends > self._end)[self._owner < 0].any():
            return None
        views = np.flatnonzero((high[self._offsets] * self._bits) // 8 + sizes > least[self._bases])
        views = views[~alone[views]]
        owned = np.flatnonzero((self._owner >= 0) & (ends > least[self._owner]))
        narrow = np.flatnonzero((low[self._narrow] < self._from) | (high[self._narrow] >= self._below))
        touched = sorted({*views, *self._bases[views], *self._owner[owned]})  # not np.unique: as in precision/sensitivity.py
        return narrow, views, owned, np.array(touched, np.int64)

    def _table(self, rows: Iterable[Sequence[Any]], columns: int = 0) -> np.ndarray:
        """Where the numbers of rows are among all values: those of formulas, then constants."""
        out = [[n.number if isinstance(n, Slot) else self._constant(n) for n in row] for row in rows]
        return np.array(out, np.int64).reshape(len(out), -1 if out else columns)

    def _of_few_bits(self, rows: Sequence[tuple[Any, int, int]]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Where these numbers are among all values, and for each the least that its place takes, and what is too much."""
        bounds = np.array([row[1:] for row in rows], np.int64).reshape(-1, 2)
        return self._table([(row[0],) for row in rows], 1)[:, 0], bounds[:, 0], bounds[:, 1]

    def _constant(self, value: int) -> int:
        self._constants.append(value)
        return self._formulas + len(self._constants) - 1

    def _all(self, numbers: np.ndarray) -> np.ndarray:
        """The values of formulas, and the constants."""
        return np.concatenate([numbers, self._values])

    def _bytes(self, values: np.ndarray) -> np.ndarray:
        """The bytes of each tensor; PlanError for one that is none, or that ends behind what it lies in."""
        padded, strides, offsets = values[self._padded], values[self._strides], values[self._offsets]
        require((padded >= 0).all() and (strides >= 0).all() and (offsets >= 0).all(), "a negative extent")
        require(((padded + 1.0) * (strides + 1.0)).sum(1).max(initial=0.0) < SIZE, "a tensor of more than there is")
        require(offsets.max(initial=0) < SIZE, "a tensor that begins behind what there is")
        sizes = self._sizes(values, np.arange(len(self._names)))
        ends = (offsets * self._bits) // 8 + sizes
        if (over := ends > sizes[self._bases]).any():
            raise PlanError(f"tensor {self._names[int(np.argmax(over))]!r} ends behind what it lies in")
        return sizes

    def _sizes(self, values: np.ndarray, tensors: np.ndarray) -> np.ndarray:
        """The bytes of these tensors, from their first element to their last one; of several members, each a column."""
        padded = values[self._padded[tensors]]
        ends = np.where((padded == 0).any(1), 0, 1 + ((padded - 1) * values[self._strides[tensors]]).sum(1))
        sizes: np.ndarray = (ends.T * self._bits[tensors] + 7).T // 8
        return sizes

    def _span(self, values: np.ndarray) -> np.ndarray:
        """The bytes that each tensor map reaches over; of several members, each a column."""
        extents = values[self._map_extents]
        reach: np.ndarray = (extents[:, 0].T * self._map_sizes).T + ((extents[:, 1:] - 1) * values[self._map_strides]).sum(1)
        return reach


def io_of(family: Family) -> dict[str, Tensor]:
    """A family's inputs and outputs, with slots."""
    program = family.entry.program
    return {name: program.tensors[name] for name in (*program.inputs, *program.outputs)}
