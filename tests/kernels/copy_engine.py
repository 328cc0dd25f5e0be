"""The tensor copy engine, mbarriers and exchanges of matrices through shared memory (ldmatrix, stmatrix) of a simulated block."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tccompile.kernels.spec import Ptr, TiledMap
from tests.kernels.memory import SPACE, Memory


class CopyEngine:
    """The tensor copy engine and mbarriers of one block.

    A copy is done at once or when nothing else can go on, at random, and boxes are stored as late as may be: so what is read
    before it is waited for is old, and so is what is stored of shared memory that was filled again too early.
    """

    def __init__(self, memory: Memory, shared: np.ndarray, seed: int) -> None:
        self.memory, self.shared = memory, shared
        self.random = np.random.default_rng(seed)
        self.phases: dict[int, list[int]] = {}  # by barrier: phases completed, threads and bytes to come, threads of a phase
        self.copies: list[tuple] = []
        self.stores: list[tuple] = []

    def finish(self) -> None:
        assert not self.copies, "a block ends before its copies"
        self.boxes_read()

    def advance(self) -> bool:
        """Do the copy that has waited longest."""
        if not self.copies:
            return False
        self._copy(*self.copies.pop(0))
        return True

    def barrier_init(self, at: int, threads: int) -> None:
        self.phases[at] = [0, threads, 0, threads]

    def barrier_arrive(self, at: int) -> None:
        self.barrier_expect(at, 0)

    def barrier_expect(self, at: int, size: int) -> None:
        phase = self.phases[at]
        phase[1:3] = [phase[1] - 1, phase[2] + size]
        assert phase[1] >= 0, "more arrivals than a phase has"
        self._complete(at)

    def completed(self, at: int, parity: int) -> bool:
        """Whether a wait for the phase of that parity is over."""
        return self.phases[at][0] % 2 != parity

    def _complete(self, at: int) -> None:
        phase = self.phases[at]
        if phase[1] == phase[2] == 0:
            phase[:2] = [phase[0] + 1, phase[3]]

    def copy_box(self, at: int, map_: TiledMap, barrier: int, *first: int) -> None:
        if self.random.integers(2):
            self._copy(at, map_, barrier, first)
        else:
            self.copies.append((at, map_, barrier, first))

    def store_box(self, map_: TiledMap, at: int, *first: int) -> None:
        self.stores.append((map_, at, first))

    def boxes_read(self) -> None:
        for map_, at, first in self.stores:
            k, offsets, inside = self._box(map_, first)
            kind = self._kind(k)
            box = self.shared[self._places(at, map_)].view(kind).reshape(inside.shape)
            target, written = self.memory.buffers[k].view(kind), self.memory.written[k].reshape(-1, kind.itemsize)
            target[offsets[inside]] = box[inside]
            np.add.at(written, offsets[inside], 1)
        self.stores.clear()

    def _copy(self, at: int, map_: TiledMap, barrier: int, first: Sequence[int]) -> None:
        k, offsets, inside = self._box(map_, first)
        stored = self.memory.buffers[k].view(self._kind(k))
        box = np.where(inside, stored[np.where(inside, offsets, 0)], stored.dtype.type(0))
        self.shared[self._places(at, map_)] = box.reshape(-1).view(np.uint8)
        self.phases[barrier][2] -= box.nbytes
        self._complete(barrier)

    def _kind(self, k: int) -> np.dtype:
        """As what a buffer's elements are copied, of one byte or two."""
        return np.dtype({1: np.uint8, 2: np.uint16}[self.memory.buffers[k].itemsize])

    def _box(self, map_: TiledMap, first: Sequence[int]) -> tuple[int, np.ndarray, np.ndarray]:
        """The buffer, the elements of a box in it, innermost dimension last, and whether each is in the array."""
        k, at = divmod(self.memory.pointer(Ptr(map_.tensor, map_.bytes)), SPACE)
        size = self._kind(k).itemsize
        assert at % 16 == 0 and all(s % 16 == 0 for s in map_.strides) and set(map_.steps) == {1}, "a map that cannot be encoded"
        assert all(0 < n <= 256 for n in map_.box), "a box that cannot be copied"
        assert map_.swizzle in (0, size * map_.box[0]), "rows that are narrower or wider than their swizzle"
        assert size * map_.box[0] % 16 == 0, "a box that is no whole vectors wide"
        assert all(n > 0 for n in map_.extents), "an array without elements"
        offsets, inside = np.array((at - SPACE // 2) // size), np.array(True)
        for n, count, extent, stride in zip(first, map_.box, map_.extents, (size, *map_.strides), strict=True):
            index = np.arange(n, n + count).reshape(-1, *[1] * offsets.ndim)
            offsets = offsets + index * (stride // size)
            inside = inside & (index >= 0) & (index < extent)
        return k, offsets, inside

    def _places(self, at: int, map_: TiledMap) -> np.ndarray:
        """The bytes of shared memory of a box: chunks of 16 bytes are swapped as lines of 128 bytes go on."""
        assert at % (8 * map_.swizzle or 128) == 0, "a box that is not aligned to its swizzle's pattern"
        k, _ = divmod(self.memory.pointer(Ptr(map_.tensor, 0)), SPACE)
        places = np.arange(at, at + self._kind(k).itemsize * math.prod(map_.box))
        return places ^ ((places >> 7) & max(map_.swizzle // 16 - 1, 0)) << 4

    def matrices(self, asked: Mapping[int, tuple], n: int) -> dict[int, Any]:
        """ldmatrix: lanes 8m to 8m + 7 give the addresses of matrix m's rows, of which lane (g, t) gets word t of row g."""
        rows = [self._row(asked, m * 8 + g) for m in range(n) for g in range(8)]
        words = np.array([self.shared[row].view(np.uint32) for row in rows])
        return {i: tuple(int(words[8 * m + i % 32 // 4, i % 4]) for m in range(n)) for i in asked}

    def put_turned(self, asked: Mapping[int, tuple]) -> dict[int, Any]:
        """stmatrix of two matrices, transposed and rounded to halves: lane (g, t) has numbers 2t and 2t + 1 of column g."""
        for i, (_, *values) in asked.items():
            g, t = i % 32 // 4, i % 4
            for at, value in enumerate(values):
                row = self._row(asked, 8 * (at // 2) + 2 * t + at % 2)
                self.shared[row[2 * g : 2 * g + 2]] = np.array([value], np.float32).astype(np.float16).view(np.uint8)
        return dict.fromkeys(asked)

    def _row(self, asked: Mapping[int, tuple], lane: int) -> np.ndarray:
        at = asked[min(asked) + lane][0]
        assert at % 16 == 0, "a row that is not aligned"
        return np.arange(at, at + 16)
