"""Around operators of users' own, which take no epilogue:

y = copy(custom(x))  =>  custom writes y, where y is an output of the model
custom(x)            =>  custom(copy(x)), where x no longer lies as the operator's kernels ask for
"""

from __future__ import annotations

from dataclasses import replace

from tccompile.fuse.editor import Editor, copies
from tccompile.ir.expr import Epilogue, canonical_view, identity_view, load
from tccompile.ir.ops import Custom, Op, Pointwise
from tccompile.ir.program import Program
from tccompile.ir.tensor import Tensor, dense


def write_outputs(program: Program) -> Program:
    e = Editor(program)
    for i, op in enumerate(e.ops):
        if op is None or op.y not in program.outputs or not copies(e, op):
            continue
        y, (view,) = e.tensors[op.y], op.views
        x, writer = e.tensors[view.tensor], e.writer(view.tensor)
        whole = x.shape == y.shape and canonical_view(view, y.shape) == canonical_view(identity_view(x.name, x.rank), y.shape)
        if not whole or not isinstance(writer, Custom) or not e.is_private(x.name) or len(e.readers[x.name]) > 1:
            continue
        if writer.layout == "any" or len(writer.outputs) > 1 or _lies(y, writer.layout):
            e.drop(i)
            e.put(e.position[x.name], writer.renamed({x.name: y.name}))
    return e.result()


def lay_as_asked(program: Program) -> Program:
    tensors, ops = dict(program.tensors), list[Op]()
    for op in program.ops:
        layout = op.layout if isinstance(op, Custom) else "any"
        for name in op.operands if layout != "any" else ():
            if _lies(t := tensors[name], layout):
                continue
            copy = dense(f"{name}.{layout}", t.shape, t.dtype, _order(t.rank, layout))
            if copy.name not in tensors:
                tensors[copy.name] = copy
                view = Epilogue(load(0, t.dtype.compute), (identity_view(name, t.rank),))
                ops.append(Pointwise(nodes=op.nodes[:1], y=copy.name, epilogue=view))
            op = op.renamed({name: copy.name})
        ops.append(op)
    return replace(program, tensors=tensors, ops=tuple(ops))


def _order(rank: int, layout: str) -> tuple[int, ...]:
    return (0, *range(2, rank), 1) if layout == "channels" and 3 <= rank <= 5 else tuple(range(rank))


def _lies(t: Tensor, layout: str) -> bool:
    """Whether a tensor's axes lie in the order that is asked for, with neighbours along the last of them side by side."""
    wanted = [a for a in _order(t.rank, layout) if t.shape[a] > 1]
    strides = [t.strides[a] for a in wanted]
    return strides == sorted(strides, reverse=True) and (not strides or strides[-1] == 1)
