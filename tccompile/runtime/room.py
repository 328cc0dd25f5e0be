"""Memory that engines of a session share: the arena, counters, and places for inputs and outputs."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass

import numpy as np

from tccompile.ir.extent import round_up
from tccompile.plan.file import Plan
from tccompile.runtime.arrays import LEGACY
from tccompile.runtime.driver import Device, DriverError, Handle, Memory, PinnedMemory, PooledMemory, mib
from tccompile.runtime.engine import Held
from tccompile.runtime.outputs import ALIGN, Outputs, length

DIRECT = 1 << 20
"""Bytes from which an array is copied from and to where it lies. On an H200's machine, 13 MB up take 1.1 ms in place of 1.7, and
down 1.3 in place of 1.7; 1 MB takes as long as by pinned memory of ours, and less takes longer."""

PINNED = 16 << 20
"""Bytes of pinned memory that a session has at most: the driver takes 0.6 ms to make a megabyte of it. The smallest of an
inference's arrays get it."""

AHEAD = 256 << 20
"""Bytes that a plan for ranges takes of the GPU's memory from the start, at most, for its greatest inputs and outputs."""

LEAST = 32 << 20
"""Bytes that are kept for outputs of a plan for ranges, at least: a pool of the driver's grows by that."""

PAGE = 4096
"""Bytes of the host's memory that the system makes at once, or fewer."""


class Room:
    """Memory that engines of a session share, of which one runs at a time: the arena, counters, and inputs and outputs.

    arena, counters  bytes; io, of inputs and outputs, allocated when they are first needed
    outputs          bytes of a plan's greatest outputs, if it is for ranges: see Outputs
    """

    def __init__(self, device: Device, arena: int, counters: int, io: int = 0, outputs: int = 0):
        self.device, self.io = device, io
        self.memory = Memory(device, aligned(arena) + counters, f"the arena ({mib(arena)})")
        self.address, self.counters = self.memory.address, self.memory.address + aligned(arena)
        self._last_stream: int | None = None
        self._io: Memory | PooledMemory | None = None
        self._pinned: PinnedMemory | None = None
        self.outputs = Outputs(device, max(io + 2 * outputs, LEAST) if outputs else 0)
        with device as cu:
            untimed = cu.CUevent_flags.CU_EVENT_DISABLE_TIMING
            self._done = Handle(device, cu.cuEventCreate(untimed), "cuEventDestroy")
            self._earlier = Handle(device, cu.cuEventCreate(untimed), "cuEventDestroy")
            cu.cuMemsetD8(self.address, 0, self.memory.size)

    def prepare(self, pinned: int, outputs: int, stream: int) -> None:
        """Take memory that the first inferences on a plan for ranges need not wait for: on the host, where of inputs and outputs
        so many bytes are small; and on the device, for all of them, and for outputs that stay there."""
        self._on_host(pinned)
        if self.io <= AHEAD:
            self._on_device(self.io, stream)
        self.outputs.grow(min(outputs, AHEAD), stream)

    def staged(self, size: int, pinned: int, stream: int) -> tuple[Memory | PooledMemory, PinnedMemory]:
        """Memory for so many bytes of inputs and outputs on the device, and for so many on the host."""
        return self._on_device(max(size, self.io), stream), self._on_host(pinned)

    def _on_device(self, size: int, stream: int) -> Memory | PooledMemory:
        if self._io is None or self._io.size < size:
            self._io = self.outputs.memory(size, "inputs and outputs", stream)
        return self._io

    def _on_host(self, size: int) -> PinnedMemory:
        if self._pinned is None or self._pinned.size < size:
            self.wait()
            self._pinned = PinnedMemory(self.device, min(size, PINNED))
        return self._pinned

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
        self.outputs.close()
        for part in (self._done, self._earlier, self.memory, self._io, self._pinned):
            if part is not None:
                part.close()


class Staging:
    """A room's memory for every input and output (`io`) on the device, and pinned on the host for those that are small.

    The driver copies others from and to where they lie, by pinned memory of its own: large ones in less time than it takes here,
    small ones, of which there is too much, in a little more.
    """

    def __init__(self, room: Room, io: Mapping[str, Held], stream: int):
        self.device, self.io = room.device, io
        self._places: dict[str, tuple[int, int | None]] = {}  # on the device, and on the host
        total = pinned = 0
        for name, t in sorted(io.items(), key=lambda of_one: of_one[1].nbytes):
            size = aligned(t.nbytes)
            ours = size < DIRECT and pinned + size <= PINNED
            self._places[name] = total, pinned if ours else None
            total += size
            pinned += size if ours else 0
        self.memory, self._pinned = room.staged(total, pinned, stream)

    def address(self, name: str) -> int:
        """Where an input or output lies on the device."""
        return self.memory.address + self._places[name][0]

    def _host(self, name: str) -> np.ndarray | None:
        """Where a small one lies on the host: an array in pinned memory."""
        t, (_, start) = self.io[name], self._places[name]
        return None if start is None else self._pinned.bytes[start : start + t.nbytes].view(t.dtype.numpy).reshape(t.shape)

    def put(self, name: str, value: np.ndarray, stream: int) -> None:
        """Queue the copy of an input to the device; the value may change when this has returned, unless its memory is pinned."""
        host = self._host(name)
        if host is not None:
            np.copyto(host, value)
        else:
            host = np.ascontiguousarray(value, self.io[name].dtype.numpy)
        if host.nbytes:
            with self.device as cu:
                cu.cuMemcpyHtoDAsync(self.address(name), host.ctypes.data, host.nbytes, stream)

    def fetch(self, name: str, to: np.ndarray, stream: int) -> np.ndarray:
        """Queue the copy of an output to the host: where it then lies, which is `to` if it can be."""
        host = self._host(name)
        if host is None:
            host = to if to.flags.c_contiguous and to.dtype.isnative else touched(self.io[name])
        if host.nbytes:
            with self.device as cu:
                cu.cuMemcpyDtoHAsync(host.ctypes.data, self.address(name), host.nbytes, stream)
        return host


@dataclass(frozen=True)
class Most:
    """The most bytes of anything that an inference on a plan needs."""

    arena: int
    counters: int
    io: int
    pinned: int
    outputs: int


def most(plan: Plan) -> Most:
    """... of all its entries: of inputs and outputs (`io`), of those that are copied by pinned memory, and of outputs alone."""
    entries = [*plan.entries, *(family.highest for family in plan.families)]
    sections, programs = [s for entry in entries for s in entry.sections], [entry.program for entry in entries]
    sizes = [[aligned(p.tensors[n].nbytes) for n in (*p.inputs, *p.outputs)] for p in programs]
    pinned = max(sum(min(size, DIRECT) for size in of_one) for of_one in sizes)
    outputs = max(sum(length(p.tensors[n].nbytes) for n in p.outputs) for p in programs)
    return Most(max(s.arena for s in sections), max(s.counters for s in sections), max(map(sum, sizes)), pinned, outputs)


def touched(t: Held) -> np.ndarray:
    """An array for a tensor on the host, whose pages are there: of a large one that is new, the system makes each when it is
    first written to, which takes longer than the copy that would be waiting for it."""
    array = np.empty(t.shape, t.dtype.numpy)
    array.reshape(-1).view(np.uint8)[::PAGE] = 0
    return array


def aligned(n: int) -> int:
    """Bytes, up to the next multiple of ALIGN."""
    return round_up(n, ALIGN)
