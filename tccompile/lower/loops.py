"""What crosses the border of a loop's body: see `ir/loops.py`, and `load/repeat.py`, which keeps loops."""

from __future__ import annotations

from dataclasses import replace

import onnx_graphsurgeon as gs

from tccompile.ir.ops import Carry
from tccompile.lower.builder import Builder, shape_of
from tccompile.lower.lines import plain


def carry(node: gs.Node, b: Builder) -> None:
    """A value that enters a loop, goes to its next iteration, or leaves it."""
    y, role = node.outputs[0], b.attr("role")
    x, *others = (b.value(t).name for t in node.inputs)
    over = going = None
    if role in ("enter", "leave"):
        out = b.result(y, b.order_for(shape_of(y), node.inputs[0]))
    else:
        over, going, *others = others
        out = b.bind(y, b.add(replace(b.tensors[over], name=b.unique(y.name), base=over)))
    b.emit(
        Carry,
        out,
        role=role,
        loop=b.attr("loop"),
        x=x,
        over=over,
        going=going,
        after=tuple(others),
        most=b.attr("most"),
        epilogue=plain(out.dtype),
    )
