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
    """An output of the model, which a session cuts: its counts are outputs, too, which users do not see."""
    x, *sizes = node.inputs
    b.bind(node.outputs[0], b.value(x))
    cuts: dict[str, list[int]] = {}
    said = {}
    for t, axis, limit, name in zip(sizes, *(node.attrs[what] for what in ("axes", "limits", "nodes")), strict=True):
        cuts.setdefault(t.name, []).extend([axis] if axis >= 0 else [])
        said[t.name] = t, limit, name
    for t, limit, name in said.values():
        count = b.counts.get(t.name)
        if count is None:
            value = b.value(t)
            y = b.add(dense(b.unique(f"{t.name}.count"), value.shape, DType.I64, pad=1))
            b.copy(identity_view(value.name, value.rank), y)
            count = Count(y.name, limit, name, {})
        of = {node.outputs[0].name: tuple(cuts[t.name])} if cuts[t.name] else {}
        b.counts[t.name] = Count(count.tensor, count.limit, count.node, {**count.cuts, **of})
