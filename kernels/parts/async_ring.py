"""The ring of stages of kernels whose threads copy for themselves: shared memory for several steps' operands, used in turn."""

from __future__ import annotations

from functools import cache

from tccompile.kernels.parts.part import Part, part
from tccompile.kernels.ptx import mma
from tccompile.kernels.ptx.core import cuda, inline, types, u32

FILLED, MULTIPLIED = range(2)
"""Of a ring: the stage that is filled next, and the one that is multiplied next."""


@cache
def ring(stages: int, stage: int, asynchronous: bool) -> Part:
    """`stages` stages of `stage` bytes. Steps are asked for `ahead` = stages - 1 steps before they are multiplied.

    A kernel makes steps + ahead turns. In each it waits (`arrived`), asks for one step's chunks and says that these were all
    (`asked`), multiplies the step that came, and, if chunks pass through registers, writes them and lets all threads pass
    (`written`). `begin` gives FILLED and MULTIPLIED, as distances from the first stage in bytes; `advance` moves one of them on.
    """
    ahead = stages - 1
    wait = mma.cp_async_wait(ahead - 1)

    @inline
    def arrived(turn):
        """The stage that is multiplied in this turn has come, and nobody reads the one that is filled."""
        if asynchronous and turn >= ahead:
            wait()
            cuda.syncthreads()

    @inline
    def asked():
        if asynchronous:
            mma.cp_async_commit()

    @inline
    def written():
        if not asynchronous:
            cuda.syncthreads()

    @inline
    def begin():
        at = cuda.local.array(2, types.uint32)
        at[FILLED] = u32(0)
        at[MULTIPLIED] = u32(0)
        return at

    @inline
    def advance(at, which):
        at[which] = u32(at[which] + u32(stage)) if at[which] < u32((stages - 1) * stage) else u32(0)

    return part(begin=begin, arrived=arrived, asked=asked, written=written, advance=advance)
