"""gemm(x, w), gemm(x, v)  =>  parts of gemm(x, [w v]), where one attention reads both: its q, k and v, or two of them

Rows of x are read once, and there is one launch, whose tiles fill a GPU better than those of each product by itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from tccompile.fuse.editor import Editor, names
from tccompile.ir.expr import View, coord
from tccompile.ir.ops import Attention, Gemm
from tccompile.ir.program import Program
from tccompile.ir.tensor import Tensor, dense
from tccompile.ir.weights import transform

GRAIN = 16
"""Multiples of so many elements at which parts of the joined result begin, whatever format it gets."""


def join_products(program: Program) -> Program:
    e = Editor(program)
    lying: dict[str, list[str]] = {}  # the tensors that lie where one does, itself included
    for name, t in program.tensors.items():
        lying.setdefault(t.storage, []).append(name)
    for op in program.ops:
        if isinstance(op, Attention):
            products = [found for name in (op.q, op.k, op.v) if (found := _product(e, name, op, lying)) is not None]
            for first in products:
                alike = [p for p in products if _are_alike(e, first, p)]
                if len(alike) > 1 and len({p.y for p in alike}) == len(alike) and e.writer(first.y) is first:
                    _join(e, sorted(alike, key=lambda p: e.position[p.y]), lying)
    return e.result()


def _product(e: Editor, name: str, attention: Attention, lying: Mapping[str, list[str]]) -> Gemm | None:
    """The product that an operand of the attention is the result of, which nothing else reads, if it can be joined to others."""
    y = e.tensors[e.tensors[name].storage]
    op = e.writer(y.name)
    if not isinstance(op, Gemm) or y.name in e.program.outputs or 0 in y.shape:
        return None
    views = [e.tensors[other] for other in lying[y.name]]
    others = {i for t in views for i in e.readers[t.name]} - {e.position[attention.y]}
    w, last = e.tensors[op.b], y.rank - 1
    plain = op.b in e.constants and w.rank == 2 and w == dense(w.name, w.shape, w.dtype) and op.epilogue.shuffle == 1
    by_column = all(v.index == (coord(last),) and v.tensor in e.constants and not v.valid for v in op.views)
    dense_y = y == dense(y.name, y.shape, y.dtype) and y.shape[last] % GRAIN == 0
    fits = not others and plain and by_column and dense_y and all(_in_rows(t, y.shape[last]) for t in views)
    return op if fits else None


def _in_rows(t: Tensor, row: int) -> bool:
    """Whether each axis of a view goes along rows of so many elements, or from row to row."""
    steps = [divmod(s, row) if n > 1 else (0, 0) for n, s in zip(t.padded, t.strides, strict=True)]
    along = sum((n - 1) * s for n, (_, s) in zip(t.padded, steps, strict=True) if s)
    return all(rows == 0 or lanes == 0 for rows, lanes in steps) and t.offset % row + along < row


def _are_alike(e: Editor, first: Gemm, other: Gemm) -> bool:
    """Whether two products read the same rows, and do the same with what they compute."""
    kinds = [[e.tensors[name].dtype for name in (op.b, op.y, *(v.tensor for v in op.views))] for op in (first, other)]
    return first.a == other.a and first.epilogue.expr == other.epilogue.expr and kinds[0] == kinds[1]


def _join(e: Editor, products: Sequence[Gemm], lying: dict[str, list[str]]) -> None:
    first = products[0]
    ys = [e.tensors[op.y] for op in products]
    y = dense(f"{first.y}/joined", (*ys[0].shape[:-1], sum(t.shape[-1] for t in ys)), ys[0].dtype)
    b = _concatenated(e, [op.b for op in products], f"{y.name}/weights")
    views = zip(*(op.views for op in products), strict=True)
    loads = [View(_concatenated(e, [v.tensor for v in own], f"{y.name}/{k}"), own[0].index) for k, own in enumerate(views)]
    e.tensors[y.name], e.readers[y.name] = y, set()
    start = 0
    for part in ys:
        for name in lying[part.name]:
            e.tensors[name] = _moved(e.tensors[name], part.shape[-1], y, start)
        start += part.shape[-1]
    lying[y.name] = [y.name, *(name for part in ys for name in lying.pop(part.name))]
    at = e.position[first.y]
    for op in products:
        e.drop(e.position[op.y])
    joined = replace(first, nodes=names(*products), y=y.name, b=b, epilogue=replace(first.epilogue, loads=tuple(loads)))
    e.put(at, joined)


def _concatenated(e: Editor, parts: Sequence[str], name: str) -> str:
    """A constant of others, one behind the other along their first axes."""
    tensors = [e.tensors[part] for part in parts]
    shape = (sum(t.shape[0] for t in tensors), *tensors[0].shape[1:])
    recipe = transform("concat", *(e.constants[part] for part in parts), axis=0)
    e.add_constant(dense(name, shape, tensors[0].dtype), recipe)
    return name


def _moved(t: Tensor, row: int, y: Tensor, start: int) -> Tensor:
    """A view of a tensor of dense rows, whose rows lie in those of y, from `start` on."""
    own = y.padded[-1]
    strides = tuple(s // row * own + s % row if n > 1 else s for n, s in zip(t.padded, t.strides, strict=True))
    return replace(t, strides=strides, base=y.name, offset=t.offset // row * own + t.offset % row + start)
