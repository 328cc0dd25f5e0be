"""What stands for integers is read as integers by all who read it.

f(dequantize(x)), g(dequantize(x))  =>  (f ∘ dequantize)(x), (g ∘ dequantize)(x)
reduce(dequantize(x))               =>  a reduction of x that dequantizes what it reads

x has 8 or 16 bits, one scale and one zero point. Written as floats these numbers take as much memory or more, and fp16 rounds
them, which brings some of what is quantized next to the other side of a half.
"""

from __future__ import annotations

from dataclasses import replace

from tccompile.fuse.editor import Editor, fits, names, shifted, tidy
from tccompile.ir.expr import ACC, Expr, canonical_view, identity_view, load, substitute, walk
from tccompile.ir.extent import worth
from tccompile.ir.ops import Op, Pointwise, Reduce
from tccompile.ir.program import Program
from tccompile.ir.types import DType

INTEGERS = (DType.I8, DType.U8, DType.I16, DType.U16)

LINEAR = ("load", "const", "cast", "sub", "mul")
"""What dequantizing consists of."""


def read_integers(program: Program) -> Program:
    e = Editor(program)
    for i in range(len(e.ops)):
        op = e.ops[i]
        if not isinstance(op, Pointwise) or not _dequantizes(e, op):
            continue
        readers = [(at, reader) for at in sorted(e.readers[op.y]) if (reader := e.ops[at]) is not None]
        largest = max((e.tensors[reader.y].size for _, reader in readers), default=0)
        if all(isinstance(reader, Pointwise) for _, reader in readers) and worth(
            f"{op.y} at once", largest <= e.tensors[op.y].size
        ):
            continue  # `compose` makes one op of them, or the integers' producer computes all of it
        merged = [(at, _of_integers(e, op, reader)) for at, reader in readers]
        for at, reader in merged if all(reader is not None for _, reader in merged) else ():
            assert reader is not None
            e.put(at, reader)
    return e.result()


def _dequantizes(e: Editor, op: Pointwise) -> bool:
    """Whether an op makes floats of integers of a tensor that lies as they do, with one scale and zero point."""
    if len(op.views) != 1 or not e.is_private(op.y) or op.epilogue.expr.dtype is not DType.F32:
        return False
    (view,), y = op.views, e.tensors[op.y]
    x = e.tensors[view.tensor]
    same = x.shape == y.shape and x.order == y.order and view == canonical_view(identity_view(x.name, x.rank), x.shape)
    kinds = {part.fn for part in walk(op.epilogue.expr)}
    return same and x.dtype in INTEGERS and x.name not in e.constants and kinds <= {*LINEAR}


def _of_integers(e: Editor, op: Pointwise, reader: Op) -> Op | None:
    """The reader with what `op` makes of the integers computed where it is read; None if it takes floats alone."""
    if isinstance(reader, Reduce) and reader.x == op.y and all(v.tensor != op.y for v in reader.views):
        (x,) = (view.tensor for view in op.views)
        integer = Expr("acc", (), None, e.tensors[x].dtype.compute)
        value = substitute(op.epilogue.expr, {part: integer for part in walk(op.epilogue.expr) if part.fn == "load"})
        return replace(reader, x=x, pre=substitute(reader.pre, {ACC: value}), nodes=names(op, reader))
    own = [view for view in reader.views if view.tensor == op.y]
    moved = isinstance(reader, Pointwise) and reader.epilogue.expr == load(0)
    if not isinstance(reader, Pointwise) or moved or any(view.valid for view in own):
        return None  # others multiply or normalize what they read; a copy may become a view; beside the valid are fills
    views, leaf = reader.views, {}
    for k, view in enumerate(reader.views):
        if view.tensor == op.y:
            body = shifted(op.epilogue.expr, len(views))
            views += tuple(v.at(view.index, e.tensors[reader.y].shape) for v in op.views)
            leaf[load(k, e.tensors[op.y].dtype.compute)] = body
    epilogue = tidy(substitute(reader.epilogue.expr, leaf), views)
    return replace(reader, epilogue=epilogue, nodes=names(op, reader)) if fits(epilogue) else None
