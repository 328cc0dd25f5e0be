"""Arrays in global memory as Numba's: what kernels of users' own operators read and write."""

from __future__ import annotations

from functools import cache
from typing import Any

from tccompile.kernels.ptx.core import intrinsic, ir, types

I64 = ir.IntType(64)
GLOBAL = 1
"""The number by which LLVM knows a GPU's global memory."""


@cache
def array_at(dtype: str, rank: int, layout: str, readonly: bool) -> Any:
    """The device function (address, extents, strides) → the array that lies there; strides are counted in elements.

    layout  "C" if it is row-major without padding, for which the compiler makes simpler addresses; else "A"
    """
    kind = types.boolean if dtype == "bool" else getattr(types, dtype)
    made = types.Array(kind, rank, layout, readonly=readonly)
    given = types.UniTuple(types.int32, rank)

    @intrinsic
    def array(typingctx, address, extents, strides):
        def codegen(context, builder, sig, args):
            out = context.make_array(made)(context, builder)
            size = context.get_abi_sizeof(context.get_data_type(kind))
            extents, strides = ([builder.sext(builder.extract_value(pack, i), I64) for i in range(rank)] for pack in args[1:])
            steps = [builder.mul(s, I64(size)) for s in strides]
            count = I64(1)
            for n in extents:
                count = builder.mul(count, n)
            here = builder.inttoptr(args[0], context.get_data_type(kind).as_pointer(GLOBAL))
            out.data = builder.addrspacecast(here, out.data.type)  # by which the compiler sees in which memory it lies
            out.shape, out.strides = (context.make_tuple(builder, types.UniTuple(types.intp, rank), v) for v in (extents, steps))
            out.itemsize, out.nitems = I64(size), count
            out.meminfo, out.parent = (ir.Constant(part.type, None) for part in (out.meminfo, out.parent))
            return out._getvalue()

        return made(types.int64, given, given), codegen

    return array
