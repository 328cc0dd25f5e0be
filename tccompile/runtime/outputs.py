"""Memory that a session's outputs on a GPU are written into: used again, and of plans for ranges from a pool of the driver's."""

from __future__ import annotations

from collections import deque
from contextlib import suppress

from tccompile.errors import LaunchError
from tccompile.ir.extent import round_up
from tccompile.runtime.arrays import Output
from tccompile.runtime.driver import Device, Memory, Pool, PooledMemory

ALIGN = 256
"""Bytes that everything in device memory is aligned to."""

FINE = 4
"""An output has up to 2^(1 - FINE) more memory than it needs, such that others of about its size have as much."""


class Outputs:
    """Memory for outputs of one session.

    kept    bytes of a plan for ranges up to which memory is kept for later outputs; 0 for fixed shapes, of which each output has
            one length
    others  bytes of such a plan that are needed besides
    pooled  whether all of that comes from a pool, which only some devices have
    """

    def __init__(self, device: Device, kept: int = 0, others: int = 0):
        self.device, self.kept = device, kept
        self.pooled = bool(kept and device.attribute("MEMORY_POOLS_SUPPORTED"))
        self._pool = Pool(device, kept + others) if self.pooled else None
        self._spare: dict[tuple[str, int, int], list[Output]] = {}
        """Memory that nobody holds any more, by the output's name, the length and the stream; the last used comes last."""
        self._used = 0
        self._gone: deque[int] = deque()
        """Lengths of memory that has been freed, but still counts as used."""

    def memory(self, size: int, what: str, stream: int) -> Memory | PooledMemory:
        """Memory for what is queued on the stream from now on. LaunchError if there is not enough."""
        return PooledMemory(self.device, self._pool, size, what, stream) if self._pool else Memory(self.device, size, what)

    def take(self, name: str, size: int, stream: int) -> tuple[Output, list[Output]]:
        """Memory for an output of so many bytes, written on the stream, and where it goes when nobody holds it any more.

        It may have been an output's of other sizes of a range, of that name and of about as many bytes.
        """
        size = length(size)
        key = name, size, stream
        spare = self._spare[key] = self._spare.pop(key, [])
        if spare:
            return spare.pop(), spare
        if self.kept:
            self._make_room(size, stream)
        output = Output(self.memory(size, f"output {name!r}", stream), self._gone)
        self._used += size
        return output, spare

    def _make_room(self, size: int, stream: int) -> None:
        """Free what has been used longest ago, until so many bytes more are among those that are kept."""
        while True:
            while self._gone:
                self._used -= self._gone.popleft()
            if self._used + size <= self.kept:
                return
            key = next((key for key, spare in self._spare.items() if spare), None)
            if key is None:
                return
            self._free(key, stream)

    def _free(self, key: tuple[str, int, int], stream: int) -> None:
        """Free what nobody holds any more: of another stream, when all that is queued is done."""
        spare = self._spare.pop(key)
        if key[-1] == stream:
            for output in spare:
                output.memory.free(stream)

    def grow(self, size: int, stream: int) -> None:
        """Have the pool take so many bytes at once, if there are: it takes the driver as long as for any part of them."""
        if self._pool:
            with suppress(LaunchError):
                PooledMemory(self.device, self._pool, size, "outputs", stream).free(stream)

    def close(self) -> None:
        """Free what no array has."""
        self._spare.clear()
        if self._pool:
            self._pool.close()


def length(size: int) -> int:
    """How many bytes an output of so many has."""
    return round_up(size, max(ALIGN, 1 << size.bit_length() >> FINE))
