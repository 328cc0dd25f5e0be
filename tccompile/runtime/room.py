"""Memory that engines of a session share: the arena, counters, and places for inputs and outputs."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress

import numpy as np

from tccompile.ir.extent import round_up
from tccompile.plan.file import Plan
from tccompile.runtime.arrays import LEGACY, Output
from tccompile.runtime.driver import Device, DriverError, Handle, Memory, PinnedMemory, mib
from tccompile.runtime.engine import RECENT, Held

ALIGN = 256
"""Bytes that everything in device memory is aligned to."""

DIRECT = 1 << 20
"""Bytes from which an array is copied from and to where it lies. On an H200's machine, 13 MB up take 1.1 ms in place of 1.7, and
down 1.3 in place of 1.7; 1 MB takes as long as by pinned memory of ours, and less takes longer."""

FINE = 4
"""An output has up to 2^(1 - FINE) more memory than it needs, such that others of about its size have as much."""

PAGE = 4096
"""Bytes of the host's memory that the system makes at once, or fewer."""


class Room:
    """Memory that engines of a session share, of which one runs at a time: the arena, counters, and inputs and outputs.

    arena, counters  bytes; io, of inputs and outputs, and pinned, of those that are copied by way of pinned memory, both
                     allocated when they are first needed
    """

    def __init__(self, device: Device, arena: int, counters: int, io: int = 0, pinned: int = 0):
        self.device, self.io, self.pinned = device, io, pinned
        self.memory = Memory(device, aligned(arena) + counters, f"the arena ({mib(arena)})")
        self.address, self.counters = self.memory.address, self.memory.address + aligned(arena)
        self._last_stream: int | None = None
        self._staged: tuple[Memory, PinnedMemory] | None = None
        self._spare: dict[tuple[str, int], dict[int, list[Output]]] = {}
        with device as cu:
            untimed = cu.CUevent_flags.CU_EVENT_DISABLE_TIMING
            self._done = Handle(device, cu.cuEventCreate(untimed), "cuEventDestroy")
            self._earlier = Handle(device, cu.cuEventCreate(untimed), "cuEventDestroy")
            cu.cuMemsetD8(self.address, 0, self.memory.size)

    def staged(self, size: int, pinned: int) -> tuple[Memory, PinnedMemory]:
        """Memory for so many bytes of inputs and outputs on the device, and for so many on the host."""
        if self._staged is None or self._staged[0].size < size or self._staged[1].size < pinned:
            self.wait()
            size, pinned = max(size, self.io), max(pinned, self.pinned)
            self._staged = Memory(self.device, size, "inputs and outputs"), PinnedMemory(self.device, pinned)
        return self._staged

    def spare(self, name: str, size: int, stream: int) -> tuple[int, list[Output]]:
        """For an output of so many bytes, written on the stream: how many to allocate, and what nobody holds any more of outputs
        of that name and of about as many bytes. They may be of other sizes of a range: the driver takes long to allocate."""
        size = round_up(size, max(ALIGN, 1 << size.bit_length() >> FINE))
        pools = self._spare.setdefault((name, stream), {})
        pool = pools[size] = pools.pop(size, [])  # the last used comes last
        if len(pools) > RECENT:
            del pools[next(iter(pools))]
        return size, pool

    def order_after(self, earlier: int, stream: int, own: int) -> None:
        """Make the stream wait for what is queued on another one up to here, unless the driver orders them already.

        own  the stream of the engines, which waits for the legacy default stream
        """
        if not (earlier in LEGACY and (stream == own or stream in LEGACY)):
            with self.device as cu:
                cu.cuEventRecord(self._earlier.value, earlier)
                cu.cuStreamWaitEvent(stream, self._earlier.value, 0)

    def order_after_last(self, stream: int) -> None:
        """Make the stream wait for the last inference, if that was queued on another one and may not be done."""
        if self._last_stream not in (None, stream):
            with self.device as cu:
                cu.cuStreamWaitEvent(stream, self._done.value, 0)

    def mark_last(self, stream: int | None) -> None:
        """What has been queued on the stream up to here is the last inference; None: it is done."""
        if stream is not None:
            self.device.cu.cuEventRecord(self._done.value, stream)
        self._last_stream = stream

    def wait(self) -> None:
        """Until the last inference is done."""
        if self._last_stream is not None:
            with self.device as cu, suppress(DriverError):
                cu.cuEventSynchronize(self._done.value)

    def close(self) -> None:
        self.wait()
        self._spare.clear()
        for part in (self._done, self._earlier, self.memory, *(self._staged or ())):
            part.close()


class Staging:
    """A room's memory for every input and output (`io`) on the device, and pinned on the host for those that are small.

    The driver copies others from and to where they lie, by pinned memory of its own, in less time than it takes here.
    """

    def __init__(self, room: Room, io: Mapping[str, Held]):
        self.device, self.io = room.device, io
        self._places: dict[str, tuple[int, int]] = {}  # on the device, and on the host
        total = pinned = 0
        for name, t in io.items():
            self._places[name] = total, pinned
            size = aligned(t.nbytes)
            total += size
            pinned += size if size < DIRECT else 0
        self.memory, self._pinned = room.staged(total, pinned)

    def address(self, name: str) -> int:
        """Where an input or output lies on the device."""
        return self.memory.address + self._places[name][0]

    def _host(self, name: str) -> np.ndarray:
        """Where a small one lies on the host: an array in pinned memory."""
        t, (_, start) = self.io[name], self._places[name]
        return self._pinned.bytes[start : start + t.nbytes].view(t.dtype.numpy).reshape(t.shape)

    def put(self, name: str, value: np.ndarray, stream: int) -> None:
        """Queue the copy of an input to the device; the value may change when this has returned, unless its memory is pinned."""
        t = self.io[name]
        if aligned(t.nbytes) < DIRECT:
            host = self._host(name)
            np.copyto(host, value)
        else:
            host = np.ascontiguousarray(value, t.dtype.numpy)
        if host.nbytes:
            with self.device as cu:
                cu.cuMemcpyHtoDAsync(self.address(name), host.ctypes.data, host.nbytes, stream)

    def fetch(self, name: str, to: np.ndarray, stream: int) -> np.ndarray:
        """Queue the copy of an output to the host: where it then lies, which is `to` if it can be."""
        t = self.io[name]
        if aligned(t.nbytes) < DIRECT:
            host = self._host(name)
        else:
            host = to if to.flags.c_contiguous and to.dtype.isnative else touched(t)
        if host.nbytes:
            with self.device as cu:
                cu.cuMemcpyDtoHAsync(host.ctypes.data, self.address(name), host.nbytes, stream)
        return host


def most(plan: Plan) -> tuple[int, int, int, int]:
    """The largest arena and counters of a plan's entries, and the most bytes of inputs and outputs: see `Room`."""
    entries = [*plan.entries, *(family.highest for family in plan.families)]
    sections, programs = [s for entry in entries for s in entry.sections], [entry.program for entry in entries]
    sizes = [[aligned(p.tensors[n].nbytes) for n in (*p.inputs, *p.outputs)] for p in programs]
    pinned = max(sum(min(size, DIRECT) for size in of_one) for of_one in sizes)
    return max(s.arena for s in sections), max(s.counters for s in sections), max(map(sum, sizes)), pinned


def touched(t: Held) -> np.ndarray:
    """An array for a tensor on the host, whose pages are there: of a large one that is new, the system makes each when it is
    first written to, which takes longer than the copy that would be waiting for it."""
    array = np.empty(t.shape, t.dtype.numpy)
    array.reshape(-1).view(np.uint8)[::PAGE] = 0
    return array


def aligned(n: int) -> int:
    """Bytes, up to the next multiple of ALIGN."""
    return round_up(n, ALIGN)
