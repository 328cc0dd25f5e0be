"""Matrix products."""

from __future__ import annotations

import math
from collections.abc import Callable

import onnx_graphsurgeon as gs

from tccompile.ir.expr import ACC, Epilogue, Expr, View, call, constant, coord, reshape_view
from tccompile.ir.extent import Shape
from tccompile.ir.ops import Gemm
from tccompile.ir.tensor import Tensor
from tccompile.ir.weights import transform
from tccompile.load.constants import recipe_of
from tccompile.lower.builder import Builder, Reads, shape_of


def gemm(node: gs.Node, b: Builder) -> None:
    """alpha * A' @ B' + beta * C"""
    a, w = node.inputs[:2]
    y = node.outputs[0]
    _floats_only(b, a)
    given = b.float8.products.get(id(node))
    w = w if given is None else given.numbers
    left = columns(b, a) if b.attr("transA", 0) else b.matrix(a)
    right = b.matrix(w) if b.attr("transB", 0) else columns(b, w)
    reads = Reads(b, shape_of(y))
    expr = _scaled(ACC if given is None else call("mul", ACC, reads.along(given.scale, 1)), b.attr("alpha", 1.0))
    c = b.input(2)
    if c is not None and b.attr("beta", 1.0) != 0.0:
        expr = call("add", expr, _scaled(reads.broadcast(c), b.attr("beta", 1.0)))
    b.emit(Gemm, b.result(y, (0, 1)), a=left.name, b=right.name, epilogue=Epilogue(expr, tuple(reads.views)))


LARGEST = 3
"""Rows of a matrix whose determinant is written out."""


def determinant(node: gs.Node, b: Builder) -> None:
    """Of small matrices, by their first rows: as sums of products of their elements."""
    t, y = node.inputs[0], node.outputs[0]
    _floats_only(b, t)
    *batch, rows, columns_ = shape_of(t)
    if rows != columns_ or not 1 <= rows <= LARGEST:
        raise b.refuse(
            f"matrices of {rows}×{columns_}; determinants of up to {LARGEST}×{LARGEST} are supported",
            "end the model before it, and compute the rest in the application",
        )
    x, reads = b.value(t), Reads(b, tuple(batch))
    here = tuple(coord(a) for a in range(len(batch)))

    def of(row: int, left: tuple[int, ...]) -> Expr:
        """The determinant of the rows from one on, in these columns."""
        out: Expr | None = None
        for sign, j in enumerate(left):
            term = reads.view(View(x.name, (*here, constant(row), constant(j))))
            if row + 1 < rows:
                term = call("mul", term, of(row + 1, tuple(k for k in left if k != j)))
            out = term if out is None else call("sub" if sign % 2 else "add", out, term)
        assert out is not None
        return out

    b.compute(b.result(y), of(0, tuple(range(rows))), reads)


def matmul(node: gs.Node, b: Builder) -> None:
    """NumPy's matmul: leading axes broadcast; a vector is a matrix of one row or column that is dropped from the result."""
    a, w = node.inputs[:2]
    _floats_only(b, a)
    given = b.float8.products.get(id(node))
    if given is None:
        product(b, a, w, node.outputs[0])
        return
    product(b, a, given.numbers, node.outputs[0], lambda reads: call("mul", ACC, reads.along(given.scale, len(reads.shape) - 1)))


def product(b: Builder, a: gs.Tensor, w: gs.Tensor, y: gs.Tensor, finish: Callable[[Reads], Expr] = lambda reads: ACC) -> None:
    """y = finish(matmul(a, w)); `finish` gives an expression of `acc` and of what it reads."""
    ashape, bshape = shape_of(a), shape_of(w)
    lead = shape_of(y)[: len(y.shape) - (len(ashape) > 1) - (len(bshape) > 1)]
    m = ashape[-2] if len(ashape) > 1 else 1
    n = bshape[-1] if len(bshape) > 1 else 1
    right = _right(b, w, lead)
    left = _left(b, a, lead)
    whole = (*lead, m, n)
    order = tuple(range(len(whole)))
    reads = Reads(b, whole)
    epilogue = Epilogue(finish(reads), tuple(reads.views))
    if len(ashape) > 1 and len(bshape) > 1:
        b.emit(Gemm, b.result(y, order), a=left.name, b=right.name, epilogue=epilogue)
        return
    matrix = b.emit(Gemm, b.new(y.name, whole, b.dtype(y), order), a=left.name, b=right.name, epilogue=epilogue)
    b.copy(reshape_view(matrix.name, whole, shape_of(y)), b.result(y))


def columns(b: Builder, t: gs.Tensor) -> Tensor:
    """The transpose of a matrix, row-major: what Gemm takes as `b`."""
    k, n = shape_of(t)
    if isinstance(t, gs.Constant):
        return b.constant(t.name, transform("transpose", recipe_of(t), axes=(1, 0)), (n, k), b.dtype(t), (0, 1))
    x = b.value(t)
    return b.copy(View(x.name, (coord(1), coord(0))), b.new(f"{t.name}.T", (n, k), b.dtype(t), (0, 1)))


def _left(b: Builder, t: gs.Tensor, lead: Shape) -> Tensor:
    """Operand a as (*lead, M, K)."""
    shape = shape_of(t)
    if len(shape) > 1 and shape[:-2] == lead:
        return b.matrix(t)
    x, rank = b.value(t), len(lead) + 2
    index = _broadcast(shape[:-2], lead)
    index += (coord(rank - 2), coord(rank - 1)) if len(shape) > 1 else (coord(rank - 1),)
    m, k = shape[-2:] if len(shape) > 1 else (1, shape[0])
    y = b.new(f"{t.name}.rows", (*lead, m, k), b.dtype(t), tuple(range(rank)))
    return b.copy(View(x.name, index), y)


def _right(b: Builder, t: gs.Tensor, lead: Shape) -> Tensor:
    """Operand b as (N, K) if all its leading extents are 1, else as (*lead, N, K)."""
    shape = shape_of(t)
    k, n = shape[-2:] if len(shape) > 1 else (shape[0], 1)
    if math.prod(shape[:-2]) == 1 and isinstance(t, gs.Constant):
        matrix = transform("reshape", recipe_of(t), shape=(k, n))
        return b.constant(t.name, transform("transpose", matrix, axes=(1, 0)), (n, k), b.dtype(t), (0, 1))
    lead = () if math.prod(shape[:-2]) == 1 else lead
    rank = len(lead) + 2
    if shape[:-2] == lead and len(shape) > 1 and isinstance(t, gs.Constant):
        axes = (*range(rank - 2), rank - 1, rank - 2)
        recipe = transform("transpose", recipe_of(t), axes=axes)
        return b.constant(t.name, recipe, (*lead, n, k), b.dtype(t), tuple(range(rank)))
    x = b.value(t)
    index = _broadcast(shape[:-2], lead) + ((coord(rank - 1), coord(rank - 2)) if len(shape) > 1 else (coord(rank - 1),))
    y = b.new(f"{t.name}.T", (*lead, n, k), b.dtype(t), tuple(range(rank)))
    return b.copy(View(x.name, index), y)


def _broadcast(own: Shape, lead: Shape) -> tuple:
    """Indices of leading axes `own` that are broadcast to `lead`."""
    skip = len(lead) - len(own)
    return tuple(constant(0) if n == 1 else coord(skip + i) for i, n in enumerate(own))


def _scaled(x: Expr, factor: float) -> Expr:
    return x if factor == 1.0 else call("mul", x, float(factor))


def _floats_only(b: Builder, t: gs.Tensor) -> None:
    if not b.io_dtype(t).is_float:
        raise b.refuse(f"a matrix product of {b.io_dtype(t).value}", "cast the operands to float")
