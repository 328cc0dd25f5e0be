"""Memory that engines of a session share: the arena, counters, and places for inputs and outputs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass

import numpy as np

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

PART, MANY, TOUCHING = 1 << 20, 4, 4
"""Bytes of new arrays that one thread touches at once, from how many such parts on several threads do, and how many."""

APART = 512
"""Bytes between what is written of them: in a page, which has 4096 or more, more than once, since NumPy lets other threads run
while it writes 500 elements and more."""


@dataclass(frozen=True)
class Most:
    """The most bytes of anything that an inference on a plan needs."""

    arena: int
    counters: int
    io: int
    pinned: int
    outputs: int


class Room:
    """Memory that engines of a session share, of which one runs at a time: the arena, counters, and inputs and outputs.

    arena, counters  bytes; io and outputs, of a plan for ranges, of its greatest inputs and outputs, and of outputs alone
    """

    def __init__(self, device: Device, arena: int, counters: int, io: int = 0, outputs: int = 0):
        self.device = device
        self.memory = Memory(device, aligned(arena) + counters, f"the arena ({mib(arena)})")
        self.address, self.counters = self.memory.address, self.memory.address + aligned(arena)
        self._last_stream: int | None = None
        self._staged: Memory | PooledMemory | None = None
        self._pinned: PinnedMemory | None = None
        self.outputs = Outputs(device, max(2 * outputs, LEAST), io) if outputs else Outputs(device)
        with device as cu:
            untimed = cu.CUevent_flags.CU_EVENT_DISABLE_TIMING
            self._done = Handle(device, cu.cuEventCreate(untimed), "cuEventDestroy")
            self._earlier = Handle(device, cu.cuEventCreate(untimed), "cuEventDestroy")
            cu.cuMemsetD8(self.address, 0, self.memory.size)

    def prepare(self, most: Most, stream: int) -> None:
        """Take memory that the first inferences on a plan for ranges need not wait for: pinned on the host, and on the device for
        inputs and outputs that come from there, or outputs that stay."""
        self.pinned(most.pinned)
        self.outputs.grow(min(max(most.io, 2 * most.outputs), AHEAD), stream)
        if not self.outputs.pooled and most.io <= AHEAD:
            self.staged(most.io, stream)

    def staged(self, size: int, stream: int) -> Memory | PooledMemory:
        """Memory on the device for so many bytes of inputs and outputs, for an inference that is queued on the stream, and later
        ones: what it held for earlier ones is gone then."""
        if self._staged is None or self._staged.size < size:
            if self._staged is not None:
                self.order_after_last(stream)
                self._staged.free(stream)
            self._staged = self.outputs.memory(length(size), "inputs and outputs", stream)
        return self._staged

    def pinned(self, size: int) -> PinnedMemory:
        """Memory on the host for so many bytes of inputs and outputs, if they are no more than PINNED."""
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
        for part in (self._done, self._earlier, self.memory, self._staged, self._pinned):
            if part is not None:
                part.close()


class Staging:
    """Places in a room's memory for inputs and outputs (`io`) that do not lie on the device: there, and for small ones in pinned
    memory on the host.

    The driver copies others from and to where they lie, by pinned memory of its own: large ones in less time than it takes here,
    small ones, of which there is too much, in a little more.
    """

    def __init__(self, room: Room, io: Mapping[str, Held]):
        self.room, self.device, self.io = room, room.device, io
        self._places: dict[str, tuple[int, int | None]] = {}  # on the device, and on the host
        self._size = self._small = 0

    def place(self, names: Sequence[str], stream: int) -> None:
        """Have places for these, for an inference that is queued on the stream. What was copied to any before is gone then."""
        for name in sorted((name for name in names if name not in self._places), key=lambda name: self.io[name].nbytes):
            size = aligned(self.io[name].nbytes)
            ours = size < DIRECT and self._small + size <= PINNED
            self._places[name] = self._size, self._small if ours else None
            self._size += size
            if ours:
                self._small += size
        self.memory, self._pinned = self.room.staged(self._size, stream), self.room.pinned(self._small)

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
            host = to if to.flags.c_contiguous and to.dtype.isnative else touched([self.io[name]])[0]
        if host.nbytes:
            with self.device as cu:
                cu.cuMemcpyDtoHAsync(host.ctypes.data, self.address(name), host.nbytes, stream)
        return host


def most(plan: Plan) -> Most:
    """... of all its entries: of inputs and outputs (`io`), of those that are copied by pinned memory, and of outputs alone."""
    entries = [*plan.entries, *(family.highest for family in plan.families)]
    sections, programs = [s for entry in entries for s in entry.sections], [entry.program for entry in entries]
    sizes = [[aligned(p.tensors[n].nbytes) for n in (*p.inputs, *p.outputs)] for p in programs]
    pinned = max(sum(min(size, DIRECT) for size in of_one) for of_one in sizes)
    outputs = max(sum(length(p.tensors[n].nbytes) for n in p.outputs) for p in programs)
    return Most(max(s.arena for s in sections), max(s.counters for s in sections), max(map(sum, sizes)), pinned, outputs)


def touched(tensors: Sequence[Held]) -> list[np.ndarray]:
    """Arrays for tensors on the host, whose pages are there: of a large one that is new, the system makes each when it is first
    written to, which takes longer than the copy that would be waiting for it. Several threads write to many."""
    arrays = [np.empty(t.shape, t.dtype.numpy) for t in tensors]
    of_bytes = [array.reshape(-1).view(np.uint8) for array in arrays]
    parts = [flat[at : at + PART] for flat in of_bytes for at in range(0, flat.size, PART)]
    if len(parts) < MANY:
        for part in parts:
            _touch(part)
    else:
        with ThreadPoolExecutor(TOUCHING) as threads:
            list(threads.map(_touch, parts))
    return arrays


def _touch(part: np.ndarray) -> None:
    part[::APART] = 0


def aligned(n: int) -> int:
    """Bytes, up to the next multiple of ALIGN."""
    return (n + ALIGN - 1) & -ALIGN
