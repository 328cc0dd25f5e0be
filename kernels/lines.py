"""Text of kernels whose threads each follow a line of elements: what scatter.py, top_k.py and cumulate.py share.

They write some elements of y, in no order of memory; a Pointwise that runs before has written all of y, its padding included.
"""

from __future__ import annotations

from collections.abc import Sequence

from tccompile.arch import Arch
from tccompile.ir.expr import Epilogue, Expr, View
from tccompile.ir.extent import Extent, same
from tccompile.ir.ops import Op, Pointwise
from tccompile.ir.program import Program
from tccompile.ir.tensor import Tensor
from tccompile.ir.types import DType
from tccompile.kernels.codegen import COMPUTE, Lines, Parameters, divider
from tccompile.kernels.pointwise import LIMIT, PointwiseKernel
from tccompile.kernels.spec import I32, Arg, Launch

THREADS = 256


def filled(op: Op, program: Program, expr: Expr, views: tuple[View, ...], arch: Arch) -> tuple[Launch, ...]:
    """The launches that write `expr` to all of y."""
    first = Pointwise(nodes=op.nodes, y=op.y, epilogue=Epilogue(expr, views))
    kernel = PointwiseKernel()
    return kernel.work(first, program, next(kernel.configs(first, program, arch)), arch).launches


def padding_filled(op: Op, program: Program, expr: Expr, arch: Arch) -> tuple[Launch, ...]:
    """The launches that write `expr` to all of y, ahead of what does not write its padding; none where it never has any."""
    y = program.tensors[op.y]
    padded = not all(same(a, b) for a, b in zip(y.padded, y.shape, strict=True))
    return filled(op, program, expr, (), arch) if padded else ()


def refusal(op: Op, program: Program) -> str | None:
    """Why the op cannot be computed with indices of 32 bits, or None."""
    for name in (*op.inputs, op.y):
        if (span := program.tensors[name].span) >= LIMIT:
            return f"{name} spans {span} elements; offsets are counted in 31 bits"
    return None


def outermost_first(axes: Sequence[int], tensor: Tensor) -> list[int]:
    """The axes in the order in which threads are numbered: neighbouring threads on neighbouring elements."""
    return sorted(axes, key=lambda a: -tensor.strides[a])


def dividers(extents: Sequence[Extent]) -> list[Arg]:
    """The arguments for taking numbers apart into digits: of all extents but the first."""
    return [I32(v) for n in extents[1:] for v in (n, *divider(n))]


def take_dividers(taken: Parameters, count: int) -> list[tuple[str, str, str]]:
    """The parameters of `dividers` for so many extents."""
    return [taken.divider() for _ in range(count - 1)]


def address(out: Lines, base: str, digits: Sequence[str], steps: Sequence[str], size: int) -> str:
    """base + the sum of digits times steps (elements of `size` bytes)"""
    return out.let(base + "".join(f" + i64({d}) * (i64({s}) * {size})" for d, s in zip(digits, steps, strict=True)))


def zero(dtype: DType) -> str:
    """0 of the compute type."""
    return f"{COMPUTE[dtype.compute]}(0)"


def inner(out: Lines) -> Lines:
    """Lines of a loop's body, which may name what stands before the loop."""
    body = Lines()
    body.known = dict(out.known)
    return body
