"""Ops that go along lines of elements: cumulative sums and products, the largest elements, updates at given places."""

from __future__ import annotations

import onnx_graphsurgeon as gs

from tccompile.ir.expr import Epilogue, Expr, Index, View, constant, coord, element, identity_view
from tccompile.ir.ops import Cumulate, Scatter, TopK
from tccompile.ir.tensor import Tensor
from tccompile.ir.types import DType
from tccompile.lower.builder import Builder, shape_of
from tccompile.lower.pointwise import check_uint64

COMBINE = {"none": "set", "add": "add", "mul": "mul", "min": "min", "max": "max"}


def plain(dtype: DType) -> Epilogue:
    """That of an op that takes none."""
    return Epilogue(Expr("acc", (), None, dtype.compute))


def cumulative(node: gs.Node, b: Builder) -> None:
    """CumSum and CumProd along an axis that is an input."""
    axis = b.ints(1, "axis")
    assert axis is not None
    x = b.operand(node.inputs[0])
    y = b.result(node.outputs[0], x.order)
    flags = {name: bool(b.attr(name, 0)) for name in ("exclusive", "reverse")}
    combine = "add" if node.op == "CumSum" else "mul"
    if not x.rank:
        raise b.refuse("its input is a scalar, which has no axis", "give it an axis by Unsqueeze")
    b.emit(Cumulate, y, x=x.name, axis=b.axis(axis[0], x.rank), combine=combine, epilogue=plain(y.dtype), **flags)


def top_k(node: gs.Node, b: Builder) -> None:
    """Where the k first elements are in order, then those elements."""
    check_uint64(node, b)
    x, (values, places) = b.operand(node.inputs[0]), node.outputs
    axis, shape = b.axis(b.attr("axis", -1), x.rank), shape_of(values)
    found = b.result(places, x.order) if b.used(places) else b.new(f"{values.name}.places", shape, DType.I64, x.order)
    b.emit(TopK, found, x=x.name, axis=axis, largest=bool(b.attr("largest", 1)), epilogue=plain(DType.I64))
    if b.used(values):
        here = [coord(a) for a in range(x.rank)]
        index = [element(found.name, here, x.shape[axis]) if a == axis else here[a] for a in range(x.rank)]
        b.copy(View(x.name, tuple(index)), b.result(values, x.order))


def scatter_elements(node: gs.Node, b: Builder) -> None:
    """Updates, each at its own coordinates but along one axis, where an index says the place."""
    x, indices, updates = b.value(node.inputs[0]), b.value(node.inputs[1]), b.value(node.inputs[2])
    axis, here = b.axis(b.attr("axis", 0), x.rank), [coord(a) for a in range(x.rank)]
    at = [element(indices.name, here, x.shape[axis]) if a == axis else here[a] for a in range(x.rank)]
    scatter(node, b, x, updates, at)


def scatter_rows(node: gs.Node, b: Builder) -> None:
    """ScatterND: rows of indices (…, k) each name a part of x, which is updated."""
    x, indices, updates = b.value(node.inputs[0]), b.value(node.inputs[1]), b.value(node.inputs[2])
    rows, k = indices.rank - 1, indices.shape[-1]
    here = [coord(a) for a in range(rows)]
    at = [element(indices.name, [*here, constant(j)], x.shape[j]) for j in range(k)]
    scatter(node, b, x, updates, [*at, *(coord(rows + a) for a in range(x.rank - k))])


def scatter(node: gs.Node, b: Builder, x: Tensor, updates: Tensor, at: list[Index]) -> None:
    reduction = b.attr("reduction", "none")
    if reduction != "none":
        check_uint64(node, b)
        if x.dtype is DType.BOOL:
            raise b.refuse(f"a reduction ({reduction}) of booleans", "cast them to int32")
    t = node.outputs[0]
    y = b.result(t, b.order_for(shape_of(t), node.inputs[0]))
    if not updates.size:
        b.copy(identity_view(x.name, x.rank), y)
    else:
        b.emit(Scatter, y, x=x.name, updates=updates.name, at=tuple(at), combine=COMBINE[reduction], epilogue=plain(y.dtype))
