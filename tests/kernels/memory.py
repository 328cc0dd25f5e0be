"""The memory of a simulated launch: a program's storages, the workspace, the counters, and what a block shares.

Every access is checked: the address must lie in a tensor's padded extents or between its elements, be a multiple of the access's
width, and be written at most once.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from tccompile.ir.program import Program
from tccompile.ir.storage import elements, from_storage, store, to_storage
from tccompile.kernels.spec import Counters, Ptr, Scratch

SPACE = 1 << 33
"""Distance of the addresses of two storages."""


class Memory:
    """A program's storages, each far from the others, the workspace and the counters; y's and the workspace are poisoned."""

    def __init__(self, program: Program, values: Mapping[str, np.ndarray], y: str, scratch: int = 0, counters: int = 0) -> None:
        self.program = program
        self.buffers: list[np.ndarray] = []
        self.written: list[np.ndarray] = []
        self.base: dict[str, int] = {}
        for name, t in program.tensors.items():
            if t.base is None:
                self.base[name] = len(self.buffers) * SPACE + SPACE // 2
                buffer = np.zeros(t.span, t.dtype.numpy)
                buffer.view(np.uint8)[:] = 0xFF
                self.buffers.append(buffer)
                self.written.append(np.zeros(buffer.nbytes, np.uint8))
        for name, t in program.tensors.items():
            if name in values:
                stored = values[name].dtype == t.dtype.numpy  # bf16 is given as its bits
                buffer = self.buffers[self.base[t.storage] // SPACE]
                store(buffer, t, values[name] if stored else to_storage(values[name], t.dtype))
        self.own = len(self.buffers)
        self.buffers += [np.full(scratch, 0xFF, np.uint8), np.zeros(counters, np.uint8)]
        self.written += [np.zeros(n, np.uint8) for n in (scratch, counters)]
        self.y = program.tensors[y]

    def pointer(self, p: Ptr | Scratch | Counters) -> int:
        if not isinstance(p, Ptr):
            return (self.own + isinstance(p, Counters)) * SPACE + SPACE // 2 + p.bytes
        t = self.program.tensors[p.tensor]
        return self.base[t.storage] + t.offset * t.dtype.size + p.bytes

    def _find(self, address: int, size: int) -> tuple[int, int]:
        k, at = address // SPACE, address % SPACE - SPACE // 2
        assert at % min(16, size) == 0, "an access that is not aligned"
        assert at >= 0 and at + size <= self.buffers[k].nbytes, f"an access {at} bytes into {self.buffers[k].nbytes}"
        return k, at

    def bytes(self, address: int, size: int) -> np.ndarray:
        """What lies at an address, for reading."""
        k, at = self._find(int(address), size)
        return self.buffers[k].view(np.uint8)[at : at + size]

    def write(self, address: int, data: np.ndarray) -> None:
        """Writes bytes, and counts that they were written."""
        k, at = self._find(int(address), data.nbytes)
        self.buffers[k].view(np.uint8)[at : at + data.nbytes] = data.view(np.uint8)
        self.written[k][at : at + data.nbytes] += 1

    def words(self, address: int, n: int = 4) -> tuple[int, ...]:
        """n words of 32 bits."""
        return tuple(map(int, self.bytes(address, 4 * n).view(np.uint32)))

    def atomic_add(self, address: int, value: int) -> int:
        """What was there before."""
        place = self.bytes(address, 4).view(np.int32)
        before = int(place[0])
        place[0] += value
        return before

    def check_written(self, once: bool = True, some: bool = False) -> None:
        """All (or some) of y's padded extents (once), zeros outside its shape, and nothing else."""
        y = self.y
        k = self.base[y.storage] // SPACE
        assert all(not w.any() for i, w in enumerate(self.written) if i != k and i < self.own)
        counts = self._counts()
        expected = np.zeros(len(counts), np.uint8)
        elements(expected, y, y.padded)[...] = 1
        if some:
            assert not (counts > expected).any() and counts.any(), "other elements than y's, or none"
        else:
            assert np.array_equal(counts if once else counts > 0, expected), "not just all of y's padded extents"
        whole = np.where(elements(counts, y, y.padded), elements(self.buffers[k], y, y.padded), self.buffers[k].dtype.type(0))
        whole[tuple(slice(0, n) for n in y.shape)] = 0
        assert not any(whole.tobytes()), "the padding is not zero"

    def _counts(self) -> np.ndarray:
        """How often each element of y's storage was written."""
        counts = self.written[self.base[self.y.storage] // SPACE].reshape(-1, self.y.dtype.size)
        assert (counts == counts[:, :1]).all(), "a part of an element was written"
        return np.ascontiguousarray(counts[:, 0])

    def result(self) -> np.ndarray:
        k = self.base[self.y.storage] // SPACE
        return from_storage(elements(self.buffers[k], self.y), self.y.dtype)

    def there(self) -> np.ndarray:
        """Which of the result's elements were written."""
        return elements(self._counts(), self.y) > 0


class SharedMemory:
    """A block's dynamic shared memory, `size` bytes from address `first` on; floats in it are NaN at first."""

    def __init__(self, size: int, first: int = 0) -> None:
        self.first = first
        self.content = np.full(size, 0xFF, np.uint8)

    def bytes(self, address: int, size: int) -> np.ndarray:
        """What lies at an address."""
        at = int(address) - self.first
        assert at % min(16, size) == 0, "an access of shared memory that is not aligned"
        assert at >= 0 and at + size <= self.content.nbytes, f"{size} bytes of shared memory at {at}"
        return self.content[at : at + size]

    def write(self, address: int, data: np.ndarray) -> None:
        self.bytes(address, data.nbytes)[:] = data.view(np.uint8)
