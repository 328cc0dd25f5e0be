"""conv(f(conv(x, w) + b), v)  =>  mlp(x, w, b, v), for images of one pixel

The two products of a squeeze and excitation, say: each is so small that its launch is what it costs.
"""

from __future__ import annotations

from tccompile.fuse.editor import Editor, names
from tccompile.ir.expr import ACC, Expr, call, coord, load, substitute, walk
from tccompile.ir.extent import ceil_div
from tccompile.ir.ops import Conv, Mlp, Op
from tccompile.ir.program import Program
from tccompile.ir.tensor import LANES

HIDDEN = 256
"""The most hidden units: the kernel keeps them in shared memory."""

READ = 1 << 21
"""The most elements of the first weights that blocks read together. Each block computes all hidden units for itself, and stores
64 results of one image: many blocks are better off with two products."""


def two_products(program: Program) -> Program:
    e = Editor(program)
    for i, second in enumerate(program.ops):
        first = e.writer(second.x) if isinstance(second, Conv) else None
        merged = _merged(e, first, second) if first is not None else None
        if merged is not None and first is not None:
            e.drop(e.position[first.y])
            e.put(i, merged)
    return e.result()


def _merged(e: Editor, first: Op, second: Op) -> Mlp | None:
    if not (_is_product(e, first) and _is_product(e, second)):
        return None
    assert isinstance(first, Conv) and isinstance(second, Conv)
    (images, hidden), results = e.tensors[first.y].shape[:2], e.program.op_shape(second)[1]
    alone = e.readers[first.y] == {e.position[second.y]} and e.is_private(first.y)
    if not alone or any(first.y in view.tensors for view in second.views) or first.epilogue.shuffle != 1:
        return None
    channels = e.tensors[first.x].shape[1]
    if hidden > HIDDEN or images * ceil_div(results, 64) * hidden * channels > READ:
        return None
    function = _function(e, first)
    if function is None:
        return None
    bias = first.epilogue.loads[0].tensor if first.epilogue.loads else None
    return Mlp(
        nodes=names(second, first),
        y=second.y,
        epilogue=second.epilogue,
        x=first.x,
        w=first.w,
        v=second.w,
        b=bias,
        hidden=function,
    )


def _is_product(e: Editor, op: Op) -> bool:
    """Whether it is a product of vectors of floats, with weights whose rows are neighbouring elements."""
    if not isinstance(op, Conv) or op.groups != 1 or any(op.pads) or op.w not in e.constants:
        return False
    x, w = e.tensors[op.x], e.tensors[op.w]
    if not (x.dtype.is_float and w.dtype.is_float):
        return False
    whole = w.strides[1] == 1 and not any(n % LANES for n in (w.padded[1], w.strides[0], w.offset))
    return x.rank == 4 and x.shape[2:] == w.shape[2:] == (1, 1) and whole


def _function(e: Editor, op: Conv) -> Expr | None:
    """The epilogue as a function of the sum of the product and a bias; None if it is none."""
    expr, loads = op.epilogue.expr, op.epilogue.loads
    if loads:
        if len(loads) > 1 or loads[0].index != (coord(1),) or loads[0].valid or loads[0].tensor not in e.constants:
            return None
        biased = call("add", ACC, load(0))
        expr = substitute(expr, {biased: _SUM})
        if any(x.fn == "load" or x == ACC for x in walk(expr)):
            return None
        expr = substitute(expr, {_SUM: ACC})
    return expr if all(x.fn != "load" for x in walk(expr)) else None


_SUM = Expr("sum", (), None, ACC.dtype)
"""Stands for the sum while it is looked for."""
