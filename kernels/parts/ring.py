"""Stages between a thread that asks for copies and the warpgroups that read what has come: filled once, or in a ring."""

from __future__ import annotations

from typing import Any, NamedTuple

from tccompile.kernels.parts.layout import SharedLayout
from tccompile.kernels.parts.part import Part
from tccompile.kernels.ptx import hopper as hw
from tccompile.kernels.ptx.core import i32, inline, u32


class Filled(NamedTuple):
    """Addresses of the first stage and of the first barrier `full` (uint32)."""

    stages: Any
    full: Any


class Buffers(NamedTuple):
    """Addresses of a ring's first stage, and of the first of each kind of barriers (uint32)."""

    stages: Any
    full: Any
    empty: Any


class Stages(Part):
    """Stages in shared memory that are filled once, each with a barrier `full` that completes when the bytes that are expected
    have come.

    buffers(base)                   addresses; `base`: that of the block's shared memory, from which the layout counts
    init(buffers)                   by one thread, before all others use them; then `hw.fence_barrier_init`
    target(buffers, slot)           where copies go: addresses of the barrier that they complete, and of the stage
    expect(target, n)               say that the copies to it bring n bytes, for which `wait` waits
    wait(buffers, slot, parity)     wait until they have come; of what is filled once, the phase of parity 0
    """

    def __init__(self, layout: SharedLayout, name: str, stages: int, stage_bytes: int) -> None:
        super().__init__()
        first, full = layout[name], layout[f"{name} full"]
        self.stages, self.stage_bytes, self.first = stages, stage_bytes, first

        @inline
        def buffers(base):
            return Filled(u32(base + first), u32(base + full))

        @inline
        def init(buffers):
            for s in range(stages):
                hw.barrier_init(u32(buffers.full + 8 * s), 1)

        @inline
        def target(buffers, slot):
            return u32(buffers.full + slot * 8), u32(buffers.stages + slot * stage_bytes)

        @inline
        def expect(target, count):
            hw.barrier_expect(target[0], count)

        @inline
        def wait(buffers, slot, parity):
            hw.barrier_wait(u32(buffers.full + slot * 8), parity)

        self.buffers, self.init = buffers, init
        self.target, self.expect, self.wait = target, expect, wait


class Ring(Stages):
    """Stages that are filled and read in turn, and have a second barrier each: `empty` completes when `readers` threads have
    released the stage. Beside what `Stages` has:

    writer(), reader()              (slot, parity) to begin with, of the thread that fills stages, or of one that reads them
    advance(slot, parity)           those of the next stage
    skip(slot, parity, count)       those of the stage that so many others come before
    acquire(buffers, slot, parity)  wait until the stage may be filled
    release(held)                   say that this thread has read the stage of `held = hold(buffers, slot)`
    none(buffers)                   in place of `hold` before there is a stage to release
    stage(number, slot)             of `rings` rings of so many stages side by side, a stage's number among those of all, which
                                    takes the place of `slot` in all but `advance`

    shared  blocks of a cluster that fill each other's stages: one is released to all of them, by the readers of all
    `slot` is a stage's number, and `parity` that of the phase of its barrier which is waited for next (int32 both). A loop has
    them as two variables, since the compiler makes worse code of a tuple that goes round.
    """

    def __init__(
        self, layout: SharedLayout, name: str, stages: int, stage_bytes: int, readers: int, rings: int = 1, shared: int = 1
    ) -> None:
        super().__init__(layout, name, stages, stage_bytes)
        readers *= shared
        first, full, empty = layout[name], layout[f"{name} full"], layout[f"{name} empty"]

        @inline
        def buffers(base):
            return Buffers(u32(base + first), u32(base + full), u32(base + empty))

        @inline
        def init(buffers):
            for s in range(rings * stages):
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
        def skip(slot, parity, count):
            at = u32(slot + count)
            turns = u32(at // u32(stages))
            return i32(at - turns * u32(stages)), i32(parity ^ (turns & 1))

        @inline
        def stage(number, slot):
            return i32(number * stages + slot)

        @inline
        def hold(buffers, slot):
            return u32(buffers.empty + slot * 8)

        @inline
        def none(buffers):
            return buffers.empty

        @inline
        def acquire(buffers, slot, parity):
            hw.barrier_wait(hold(buffers, slot), parity)

        self.buffers, self.init, self.reader, self.writer, self.advance = buffers, init, reader, writer, advance
        self.skip, self.stage, self.hold, self.none, self.acquire = skip, stage, hold, none, acquire
        self.release = hw.barrier_arrive if shared == 1 else _release_everywhere(shared)


def _release_everywhere(shared: int) -> Any:
    """`release` of a stage that so many blocks of a cluster fill."""

    @inline
    def release(held):
        for rank in range(shared):
            hw.barrier_arrive_in(held, i32(rank))

    return release
