"""Axes whose extent the data decide: the operators that `load/sizes.py` adds to the standard's."""

from __future__ import annotations

import onnx_graphsurgeon as gs

from tccompile.ir.expr import identity_view
from tccompile.ir.ops import Places, Suppress
from tccompile.ir.program import Count
from tccompile.ir.tensor import dense
from tccompile.ir.types import DType
from tccompile.lower.builder import Builder, shape_of
from tccompile.lower.lines import plain


def places(node: gs.Node, b: Builder) -> None:
    """Where a vector is not zero."""
    b.emit(Places, b.result(node.outputs[0]), x=b.operand(node.inputs[0]).name, epilogue=plain(DType.I64))


def suppress(node: gs.Node, b: Builder) -> None:
    """Which boxes no better one covers."""
    boxes, scores, order = (b.operand(t).name for t in node.inputs)
    least = b.attr("least")
    b.emit(
        Suppress,
        b.result(node.outputs[0], tuple(range(len(shape_of(node.outputs[0]))))),
        boxes=boxes,
        scores=scores,
        order=order,
        most=b.attr("most"),
        iou=float(b.attr("iou")),
        least=None if least is None else float(least),
        centred=bool(b.attr("centred")),
        epilogue=plain(DType.BOOL),
    )


def counted(node: gs.Node, b: Builder) -> None:
    """An output of the model, which a session cuts: its counts are outputs, too, which users do not see.

    They are called after the output and the axis: entries of one plan have the same ones, whatever their shapes make of the rest.
    """
    x, *sizes = node.inputs
    y = node.outputs[0].name
    b.bind(node.outputs[0], b.value(x))
    attributes = (node.attrs[what] for what in ("axes", "limits", "nodes"))
    for i, (t, axis, limit, name) in enumerate(zip(sizes, *attributes, strict=True)):
        value = b.value(t)
        called = f"{y}.count{axis}" if axis >= 0 else f"{y}.limit{i}"
        count = b.add(dense(b.unique(called), value.shape, DType.I64, pad=1))
        b.copy(identity_view(value.name, value.rank), count)
        b.counts.append(Count(count.name, limit, name, {y: (axis,)} if axis >= 0 else {}))
