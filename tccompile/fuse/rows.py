"""scatter(x, at = rows i, u)  =>  u[the last place of the row in i], or x where i does not have it

Exporters put what was computed of some rows back in their order, as by an index that is expanded to all that a row holds. Rows
that are read where they lie can be computed with in the op that reads them; a scatter copies x first, and its threads each go
through all of i. That pays where rows are long and most of them are written.
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from tccompile.fuse.compose import compose
from tccompile.fuse.editor import Editor
from tccompile.ir.expr import (
    ACC,
    Coord,
    Element,
    Epilogue,
    Index,
    View,
    call,
    const,
    constant,
    coord,
    element,
    identity_view,
    load,
)
from tccompile.ir.extent import worth
from tccompile.ir.ops import Op, Pointwise, Reduce, Scatter
from tccompile.ir.program import Program
from tccompile.ir.tensor import Tensor, dense
from tccompile.ir.types import DType
from tccompile.ir.weights import Literal

LONG = 32
"""Elements of a row from which on it pays."""

PAIRS = 1 << 22
"""Rows times places in i, which are compared with each other, at most."""


def gather_rows(program: Program) -> Program:
    e, changed = Editor(program), False
    ops: list[Op] = []
    for op in program.ops:
        made = _made(e, op) if isinstance(op, Scatter) else None
        ops += made or [op]
        changed |= made is not None
    if not changed:
        return program
    return compose(replace(program, tensors=e.tensors, constants=e.constants, ops=tuple(ops)))


def _made(e: Editor, op: Scatter) -> list[Op] | None:
    """The ops in the scatter's place; None where it is another one, or where they would not pay."""
    y, u = e.tensors[op.y], e.tensors[op.updates]
    places = [a for a, index in enumerate(op.at) if any(isinstance(atom, Element) for atom, _ in index.terms)]
    if op.combine != "set" or len(places) != 1 or e.tensors[op.y].base is not None:
        return None
    (axis,) = places
    through = {index.terms[0][0].axis: a for a, index in enumerate(op.at) if index.terms and isinstance(index.terms[0][0], Coord)}
    along = [a for a in range(u.rank) if a not in through]
    if len(along) != 1 or len(through) != y.rank - 1:
        return None
    n, m = y.shape[axis], u.shape[along[0]]
    if not worth(f"{y.name} by rows", math.prod(y.shape) >= LONG * n and n * m <= PAIRS and 2 * m >= n):
        return None
    (atom, _), = op.at[axis].terms  # fmt: skip
    assert isinstance(atom, Element)
    return _in_order(e, op, atom, axis, along[0], through)


def _in_order(e: Editor, op: Scatter, atom: Element, axis: int, along: int, through: dict[int, int]) -> list[Op] | None:
    """Where each row was last written, by comparing rows with all that i holds; then the rows.

    axis     of y, along which i says where updates go
    along    of the updates, along which i goes
    through  axes of y by those of the updates that go along them
    """
    y, u = e.tensors[op.y], e.tensors[op.updates]
    n, m = y.shape[axis], u.shape[along]
    out: list[Op] = []

    def tensor(what: str, shape: tuple[int, ...], epilogue: Epilogue) -> str:
        made = dense(f"{y.name}.{what}", shape, DType.I64)
        e.tensors[made.name] = made
        out.append(Pointwise(nodes=op.nodes, y=made.name, epilogue=epilogue))
        return made.name

    given = _rows(e, atom, along)
    if given is None:
        return None
    places, updates = _numbers(e, y, "places", n), _numbers(e, y, "updates", m)
    rows = tensor("rows", (m,), given)
    there = tensor("there", (m,), Epilogue(load(0, DType.I64), (View(places, (element(rows, [coord(0)], n), constant(0))),)))
    views = (View(there, (coord(1),)), View(places, (coord(0), constant(0))), View(updates, (coord(1), constant(0))))
    same = call("equal", load(0, DType.I64), load(1, DType.I64))
    pairs = tensor("pairs", (n, m), Epilogue(call("where", same, load(2, DType.I64), const(-1, DType.I64)), views))
    last = dense(f"{y.name}.last", (n, 1), DType.I64)
    e.tensors[last.name] = last
    integer = replace(ACC, dtype=DType.I64)
    out.append(Reduce(nodes=op.nodes, y=last.name, x=pairs, axes=(1,), combine="max", pre=integer, epilogue=Epilogue(integer)))
    index: list[Index] = [
        element(last.name, [coord(axis), constant(0)], m) if a == along else coord(through[a]) for a in range(u.rank)
    ]
    compute = y.dtype.compute
    value = call("where", call("greater_equal", load(0, DType.I64), const(0, DType.I64)), load(1, compute), load(2, compute))
    views = (View(last.name, (coord(axis), constant(0))), View(u.name, tuple(index)), identity_view(op.x, y.rank))
    out.append(Pointwise(nodes=op.nodes, y=op.y, epilogue=Epilogue(value, views)))
    return out


def _numbers(e: Editor, y: Tensor, what: str, count: int) -> str:
    """The constant 0, 1, … below `count`: a column, so that a shorter one is a part of a longer one."""
    made = dense(f"{y.name}.all_{what}", (count, 1), DType.I64, pad=1)
    e.add_constant(made, Literal(np.arange(count)[:, None]))
    return made.name


def _rows(e: Editor, atom: Element, along: int) -> Epilogue | None:
    """What gives i as a vector; None where it differs along other axes of the updates."""
    i = e.tensors[atom.tensor]
    if all(_axes(index) <= {along} for index in atom.index):
        index = tuple(coord(0) if index == coord(along) else index for index in atom.index)
        return Epilogue(load(0, i.dtype.compute), (View(i.name, index),)) if not any(_axes(v) - {0} for v in index) else None
    writer, whole = e.writer(i.name), tuple(coord(a) for a in range(i.rank))
    if not isinstance(writer, Pointwise) or any(v != w and n > 1 for v, w, n in zip(atom.index, whole, i.shape, strict=True)):
        return None
    read = [index for view in writer.views for index in (*view.index, *(r.index for r in view.valid))]
    if not {axis for index in read for axis in _axes(index)} <= {along}:
        return None
    here = tuple(coord(0) if a == along else constant(0) for a in range(i.rank))
    return replace(writer.epilogue, loads=tuple(v.at(here, (i.shape[along],)) for v in writer.views))


def _axes(index: Index) -> set[int]:
    """The axes whose coordinates an index depends on."""
    found: set[int] = set()
    for atom, _ in index.terms:
        if isinstance(atom, Coord):
            found.add(atom.axis)
        else:
            inner = [x for part in vars(atom).values() for x in (part if isinstance(part, tuple) else (part,))]
            found |= {axis for x in inner if isinstance(x, Index) for axis in _axes(x)}
    return found
