"""Whether an array of floats holds an infinity or a NaN: the one kernel that a session runs beside a plan's own.

It is compiled when it changes, to PTX of the oldest generation, which the driver compiles for the GPU at hand:
`python -m tccompile.emit.finite` writes it beside the runtime, which has no compiler.
"""

from __future__ import annotations

from tccompile.kernels.spec import Function

THREADS = 256
"""Threads of a block."""

NAME = "tc_finite"
"""The name of its entry in the PTX."""


def build() -> Function:
    """The kernel (address, vectors, tail, low, high, pairs, flag): sets the int32 at `flag` to 1 if an element is not finite.

    address      of the array in global memory, a multiple of 16 bytes
    vectors      how many whole groups of 16 bytes it has; tail: the bytes after those, fewer than 16
    low, high    the exponent's bits in a 32-bit word, of the element in its lower half and in its upper half; the same for
                 elements of 32 bits. An element whose exponent is all ones is an infinity or a NaN
    pairs        1 where an element is a pair of words, the exponent in the second; else 0
    """
    from tccompile.ir.types import DType
    from tccompile.kernels.ptx.core import cuda, i32, inline, types, u32, u64
    from tccompile.kernels.ptx.memory import load, read_words, store

    read, half, word, put = read_words(4), load(DType.U16), load(DType.U32), store(DType.I32)

    @inline
    def bad(w, low, high):
        return (u32(w & low) == low) | (u32(w & high) == high)

    def kernel(address, vectors, tail, low, high, pairs, flag):
        found = False
        at, step = i32(cuda.blockIdx.x * THREADS + cuda.threadIdx.x), i32(cuda.gridDim.x * THREADS)
        first = at
        while at < vectors:
            a, b, c, d = read(u64(address + u64(at) * 16))
            found |= bad(b, low, high) | bad(d, low, high)
            if pairs == 0:
                found |= bad(a, low, high) | bad(c, low, high)
            at = i32(at + step)
        end = u64(address + u64(vectors) * 16)
        if low != high and first * 2 < tail:  # elements of 16 bits
            found |= bad(u32(half(u64(end + u64(first) * 2))), low, high)
        if low == high and first * 4 < tail and first & pairs == pairs:
            found |= bad(u32(word(u64(end + u64(first) * 4))), low, high)
        if found:
            put(flag, 1)

    u = types.uint32
    return Function(kernel, types.void(types.uint64, types.int32, types.int32, u, u, types.int32, types.uint64), THREADS)
