"""Work that several blocks share: who of them comes last, and sums over K whose parts they make."""

from __future__ import annotations

from functools import cache
from typing import Any

from tccompile.kernels.device_math import at
from tccompile.kernels.parts.part import Part, part
from tccompile.kernels.ptx import mma
from tccompile.kernels.ptx.core import cuda, i32, inline, types, u32


@cache
def last_to_arrive(in_order: bool) -> Any:
    """The device function (counter, parts) → whether this block is the last of `parts` to come here.

    What the others wrote before is then visible, and the counter 0. `in_order`: by one thread's atomic operation that orders
    memory (sm_70 and newer), which takes less time than every thread's fences.
    """

    @inline
    def arrived(counter, parts):
        if not in_order:
            mma.fence_device()
        cuda.syncthreads()
        before = i32(0)
        if cuda.threadIdx.x == 0:
            before = i32(mma.count_up_in_order(counter)) if in_order else i32(mma.count_up(counter))
            if before == parts - 1:
                mma.store_word(counter, u32(0))
        last = cuda.syncthreads_or(i32(cuda.threadIdx.x == 0 and before == parts - 1))
        if not in_order:
            mma.fence_device()
        return last != 0

    return arrived


@cache
def split_k(count: int, threads: int, in_order: bool, kind: str = "f32") -> Part:
    """Sums of which each of a tile's blocks has a part, in `count` numbers of each of its threads, of a type of `mma.SUMS`.

    Parts of a tile lie in the workspace one after the other. The block that comes last adds all of them in their order, so that
    results do not depend on timing; each thread reads what its like wrote. `in_order`: see `last_to_arrive`.
    """
    put, add, zeros = mma.store_partial(count, threads, kind), mma.add_partial(count, threads, kind), mma.zeros(count, kind)
    arrived, size = last_to_arrive(in_order), count * threads

    @inline
    def place(partial, tid):
        """The address of the thread's numbers in the tile's first part."""
        return at(partial, types.int64(cuda.blockIdx.x) * i32(cuda.gridDim.y) * size + tid * 4, 4)

    @inline
    def is_last(acc, place, part, counter):
        """Writes the block's part; whether all others of the tile have been written."""
        put(acc, at(place, types.int64(part) * size, 4))
        return arrived(at(counter, cuda.blockIdx.x, 4), i32(cuda.gridDim.y))

    @inline
    def total(place):
        """The sum of the parts."""
        acc = zeros()
        for i in range(i32(cuda.gridDim.y)):
            acc = add(acc, at(place, types.int64(i) * size, 4))
        return acc

    return part(place=place, is_last=is_last, total=total)
