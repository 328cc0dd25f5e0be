"""attention(q, k, v, f(x))  =>  attention(q, k, v, f(x) once), where f(x) is the same for all rows, heads or batches

Exporters expand a mask of padding to all rows before they compute with it. One row is read faster than as many as there are, and
neither written nor kept as often.
"""

from __future__ import annotations

from tccompile.fuse.editor import Editor
from tccompile.ir.expr import constant, coord
from tccompile.ir.ops import Attention, Pointwise
from tccompile.ir.program import Program
from tccompile.ir.tensor import dense


def masks_once(program: Program) -> Program:
    e = Editor(program)
    for name in {op.mask: None for op in program.ops if isinstance(op, Attention) and op.mask is not None}:
        writer = e.writer(name)
        if not isinstance(writer, Pointwise) or not e.is_private(name) or not all(_masks(e, i, name) for i in e.readers[name]):
            continue
        shape = e.tensors[name].shape
        once = tuple(1 if a < 3 and _same_along(writer, a, shape) else n for a, n in enumerate(shape))
        if once != shape:
            e.tensors[name] = dense(name, once, e.tensors[name].dtype)
    return e.result()


def _masks(e: Editor, i: int, name: str) -> bool:
    """Whether the op is an Attention that the tensor is the mask of, and nothing else."""
    op = e.ops[i]
    return isinstance(op, Attention) and op.inputs.count(name) == 1 and op.mask == name


def _same_along(op: Pointwise, axis: int, shape: tuple[int, ...]) -> bool:
    """Whether what is computed does not depend on the coordinate along an axis."""
    first = [constant(0) if a == axis else coord(a) for a in range(len(shape))]
    return all(view.at(first, shape) == view.at([coord(a) for a in range(len(shape))], shape) for view in op.views)
