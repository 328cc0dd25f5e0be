"""What GPU code is written in: Python as Numba compiles it, and PTX instructions as functions of it, one line an instruction.

Numba stands behind this door for what kernels are written in, and behind `emit/numba.py` for compiling it. Kernels take:

cuda       blockDim, blockIdx, gridDim, threadIdx; local.array, shared.array; syncthreads, syncthreads_or, syncwarp, threadfence
types      of numbers, tuples of them and a kernel's arguments
inline     decorates a helper that is expanded where it is called, which works without a GPU
intrinsic  decorates a function that builds LLVM IR by `ir` for each call
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import cuda
from numba.cuda import types
from numba.cuda.core.targetconfig import ConfigStack
from numba.cuda.extending import intrinsic

__all__ = ["cuda", "intrinsic", "ir", "types"]

inline = cuda.jit(device=True, inline="always")

i16, i32, u16, u32, u64 = types.int16, types.int32, types.uint16, types.uint32, types.uint64
f32, void = types.float32, types.void

_REGISTER = {
    i16: (ir.IntType(16), "h"),
    u16: (ir.IntType(16), "h"),
    i32: (ir.IntType(32), "r"),
    u32: (ir.IntType(32), "r"),
    types.int64: (ir.IntType(64), "l"),
    u64: (ir.IntType(64), "l"),
    f32: (ir.FloatType(), "f"),
    types.float64: (ir.DoubleType(), "d"),
}


def since(capability: tuple[int, int]) -> bool:
    """Whether the code that is being made is for a generation of at least this compute capability."""
    found: bool = ConfigStack().top().compute_capability >= capability
    return found


def instruction(text: str | Callable[[], str], result: Any, *params: Any, pure: bool = False) -> Any:
    """A device function that emits `text` with operands $0, $1 … : first the results, then the parameters.

    text    or what gives it, asked when code is made, for a text that depends on the generation: see `since`
    result  a Numba type, `void`, or a tuple of types (the function then returns a tuple)
    pure    arithmetic on registers: may be moved or removed. Everything else keeps its place and orders memory
    """
    results = () if result is void else tuple(result) if isinstance(result, tuple) else (result,)
    returned = types.Tuple(results) if isinstance(result, tuple) else result
    constraints = ["=" + _REGISTER[r][1] for r in results] + [_REGISTER[p][1] for p in params]
    constraints += [] if pure else ["~{memory}"]

    def typer(typingctx, *args):
        def codegen(context, builder, sig, args):
            llvm = [_REGISTER[r][0] for r in results]
            out = ir.VoidType() if not llvm else llvm[0] if len(llvm) == 1 else ir.LiteralStructType(llvm)
            function = ir.FunctionType(out, [_REGISTER[p][0] for p in params])
            written = text if isinstance(text, str) else text()
            value = builder.call(ir.InlineAsm(function, written, ",".join(constraints), side_effect=not pure), args)
            if not results:
                return context.get_dummy_value()
            if not isinstance(result, tuple):
                return value
            parts = [builder.extract_value(value, i) for i in range(len(llvm))] if len(llvm) > 1 else [value]
            return context.make_tuple(builder, sig.return_type, parts)

        return returned(*params), codegen

    return _declared(typer, len(params))


def of_tuples(text: str | Callable[[], str], result: tuple[Any, int], *params: tuple[Any, int]) -> Any:
    """A device function of tuples to a tuple, by pure arithmetic: as `instruction`, with types and lengths of tuples.

    A long text with many operands costs Numba as little as one line does.
    """
    kind, n = result
    constraints = ["=&" + _REGISTER[kind][1]] * n + [_REGISTER[p][1] for p, many in params for _ in range(many)]
    signature = types.UniTuple(kind, n)(*(types.UniTuple(p, many) for p, many in params))

    def typer(typingctx, *args):
        def codegen(context, builder, sig, args):
            given = [v for a, (_, many) in zip(args, params, strict=True) for v in unpacked(builder, a, many)]
            out = ir.LiteralStructType([_REGISTER[kind][0]] * n)
            function = ir.FunctionType(out, [v.type for v in given])
            written = text if isinstance(text, str) else text()
            value = builder.call(ir.InlineAsm(function, written, ",".join(constraints), side_effect=False), given)
            return packed(builder, unpacked(builder, value, n))

        return signature, codegen

    return _declared(typer, len(params))


def _declared(typer: Any, n: int) -> Any:
    """The intrinsic that `typer` types, of n parameters. It must have a fixed number of them, so its head is generated."""
    names, scope = "".join(f", a{i}" for i in range(n)), {"typer": typer}
    exec(f"def declared(typingctx{names}):\n    return typer(typingctx{names})", scope)
    return intrinsic(scope["declared"])


def unpacked(builder: ir.IRBuilder, pack: Any, n: int) -> list:
    """The n values of a tuple."""
    return [builder.extract_value(pack, i) for i in range(n)]


def packed(builder: ir.IRBuilder, values: list) -> Any:
    """Values of one type as a Numba UniTuple's."""
    out = ir.Constant(ir.ArrayType(values[0].type, len(values)), ir.Undefined)
    for i, v in enumerate(values):
        out = builder.insert_value(out, v, i)
    return out
