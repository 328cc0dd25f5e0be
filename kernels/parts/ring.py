"""The ring of stages between a thread that asks for copies and the warpgroups that read what has come."""

from __future__ import annotations

from typing import Any, NamedTuple

from tccompile.kernels.parts.layout import SharedLayout
from tccompile.kernels.parts.part import Part
from tccompile.kernels.ptx import hopper as hw
from tccompile.kernels.ptx.core import i32, inline, u32


class Buffers(NamedTuple):
    """Addresses of a ring's first stage, and of the first of each kind of barriers (uint32)."""

    stages: Any
    full: Any
    empty: Any


class Ring(Part):
    """Stages in shared memory that are filled and read in turn, each with two barriers: `full` completes when the bytes that
    are expected have come, `empty` when `readers` threads have released the stage.

    buffers(base)                   addresses; `base`: that of the block's shared memory, from which the layout counts
    init(buffers)                   by one thread, before all others use the ring; then `hw.fence_barrier_init`
    writer(), reader()              (slot, parity) to begin with, of the thread that fills stages, or of one that reads them
    advance(slot, parity)           those of the next stage
    acquire(buffers, slot, parity)  wait until the stage may be filled
    target(buffers, slot)           where copies go: addresses of the barrier that they complete, and of the stage
    expect(target, n)               say that the copies to it bring n bytes, for which `wait` waits
    wait(buffers, slot, parity)     wait until they have come
    release(held)                   say that this thread has read the stage of `held = hold(buffers, slot)`
    none(buffers)                   in place of `hold` before there is a stage to release

    `slot` is a stage's number, and `parity` that of the phase of its barrier which is waited for next (int32 both). A loop has
    them as two variables, since the compiler makes worse code of a tuple that goes round.
    """

    def __init__(self, layout: SharedLayout, name: str, stages: int, stage_bytes: int, readers: int) -> None:
        super().__init__()
        first, full, empty = layout[name], layout[f"{name} full"], layout[f"{name} empty"]
        self.stages, self.stage_bytes, self.first = stages, stage_bytes, first

        @inline
        def buffers(base):
            return Buffers(u32(base + first), u32(base + full), u32(base + empty))

        @inline
        def init(buffers):
            for s in range(stages):
                hw.barrier_init(u32(buffers.full + 8 * s), 1)
                hw.barrier_init(u32(buffers.empty + 8 * s), readers)

        @inline
        def reader():
            return i32(0), i32(0)

        @inline
        def writer():  # a fresh barrier counts as one whose phase of parity 1 has completed: all stages are empty
            return i32(0), i32(1)

        @inline
        def advance(slot, parity):
            slot = i32(slot + 1)
            if slot == stages:
                slot, parity = i32(0), i32(parity ^ 1)
            return slot, parity

        @inline
        def target(buffers, slot):
            return u32(buffers.full + slot * 8), u32(buffers.stages + slot * stage_bytes)

        @inline
        def hold(buffers, slot):
            return u32(buffers.empty + slot * 8)

        @inline
        def none(buffers):
            return buffers.empty

        @inline
        def acquire(buffers, slot, parity):
            hw.barrier_wait(hold(buffers, slot), parity)

        @inline
        def expect(target, count):
            hw.barrier_expect(target[0], count)

        @inline
        def wait(buffers, slot, parity):
            hw.barrier_wait(u32(buffers.full + slot * 8), parity)

        self.buffers, self.init, self.reader, self.writer, self.advance = buffers, init, reader, writer, advance
        self.target, self.hold, self.none = target, hold, none
        self.acquire, self.expect, self.wait, self.release = acquire, expect, wait, hw.barrier_arrive
