"""Depthwise convolutions read bytes as they lie.

conv(s · x, w)  =>  s · conv(x, w)        x integers of 8 bits whose zero point is 0, a filter for each channel

Products of numbers and bytes have kernels only where each channel has a filter of its own: CUDA cores make these, which take any
types. So what such a convolution reads is not written as floats first.
"""

from __future__ import annotations

from dataclasses import replace

from tccompile.fuse.editor import Editor, fits, names
from tccompile.ir.expr import ACC, Expr, call, canonical_view, identity_view, substitute
from tccompile.ir.ops import Conv, Pointwise
from tccompile.ir.program import Program
from tccompile.ir.types import DType

BYTES = (DType.I8, DType.U8)


def read_bytes(program: Program) -> Program:
    e = Editor(program)
    for i, op in enumerate(e.ops):
        if not isinstance(op, Conv) or e.tensors[op.w].shape[1] != 1 or op.groups == 1 or not e.tensors[op.w].dtype.is_float:
            continue
        found = _scaled(e, op.x)
        if found is not None:
            x, scale, copy = found
            acc = ACC if scale == 1.0 else call("mul", ACC, scale)
            epilogue = replace(op.epilogue, expr=substitute(op.epilogue.expr, {ACC: acc}))
            if fits(epilogue):
                e.put(i, replace(op, x=x, epilogue=epilogue, nodes=names(op, copy)))
    return e.result()


def _scaled(e: Editor, name: str) -> tuple[str, float, Pointwise] | None:
    """The bytes x and the number s of a tensor that is s · x, and what makes it."""
    op = e.writer(name)
    if not isinstance(op, Pointwise) or len(op.views) != 1 or not e.is_private(name):
        return None
    (view,), y = op.views, e.tensors[name]
    x = e.tensors[view.tensor]
    whole = canonical_view(identity_view(x.name, x.rank), x.shape)
    if x.dtype not in BYTES or x.shape != y.shape or x.order != y.order or canonical_view(view, x.shape) != whole:
        return None
    scale = _factor(op.epilogue.expr)
    return None if scale is None else (x.name, scale, op)


def _factor(expr: Expr) -> float | None:
    """The number that an expression multiplies what it loads by; None if it does something else."""
    match expr.fn:
        case "load":
            return 1.0
        case "cast":
            return _factor(expr.args[0])
        case "sub":
            x, zero = expr.args
            return _factor(x) if zero.fn == "const" and zero.value == 0 else None
        case "mul":
            for x, factor in (expr.args, expr.args[::-1]):
                if factor.fn == "const" and (inner := _factor(x)) is not None:
                    return inner * float(factor.value)  # type: ignore[arg-type]
    return None
