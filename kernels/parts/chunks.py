"""Chunks of 16 bytes in shared memory: where they lie, and two ways for them to come there from global memory."""

from __future__ import annotations

from functools import cache

from tccompile.kernels.parts.part import Part, part
from tccompile.kernels.ptx import mma
from tccompile.kernels.ptx.core import cuda, i32, inline, types, u32

BYTES = 16


@inline
def base():
    """The address of the block's dynamic shared memory, rounded up to 128 bytes."""
    return (mma.shared_address(cuda.shared.array(0, types.uint8)) + u32(127)) & u32(0xFFFFFF80)


@inline
def swizzled(line, chunk, across):
    """Where a chunk of a line of `across` chunks lies in it: at chunk ^ key(line), so that the same chunk of eight neighbouring
    lines is in different banks."""
    return i32(chunk ^ (line // max(1, 8 // across) % min(8, across)))


@cache
def copies(asynchronous: bool, count: int) -> Part:
    """How a thread's `count` chunks of a step come to shared memory: by cp.async, or through registers.

    `fetch` asks for one, or for zeros; `store` writes to shared memory what registers hold, if they do.
    """

    words = 4 * count

    @inline
    def registers():
        """Words for the chunks on their way."""
        return cuda.local.array(words, types.uint32)

    @inline
    def fetch(held, i, to, source, inside):
        if asynchronous:
            mma.cp_async(to, source, i32(16) if inside else i32(0))
        else:
            held[4 * i], held[4 * i + 1], held[4 * i + 2], held[4 * i + 3] = mma.load_chunk(source, i32(inside))

    @inline
    def store(held, i, to):
        mma.store_chunk(to, held[4 * i], held[4 * i + 1], held[4 * i + 2], held[4 * i + 3])

    return part(registers=registers, fetch=fetch, store=store)
