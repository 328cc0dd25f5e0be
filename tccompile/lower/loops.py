"""What crosses the border of a loop's body or leaves a branch: see `ir/loops.py`, `ir/branches.py`, and `load/repeat.py`."""

from __future__ import annotations

from dataclasses import replace

import onnx_graphsurgeon as gs

from tccompile.ir.expr import call, identity_view
from tccompile.ir.ops import Carry
from tccompile.ir.tensor import dense
from tccompile.ir.types import DType
from tccompile.lower.builder import Builder, Reads, shape_of
from tccompile.lower.lines import plain


def pick(node: gs.Node, b: Builder) -> None:
    """One of two tensors, by a condition."""
    y, (going, x, over) = node.outputs[0], (b.value(t).name for t in node.inputs)
    if _is_given(node.inputs[0]):
        going = _held(b, f"{b.attr('branch')}.going", going)
    out = b.result(y, b.order_for(shape_of(y), node.inputs[1]))
    b.emit(Carry, out, role="pick", loop=b.attr("branch"), x=x, over=over, going=going, epilogue=plain(out.dtype))


def _is_given(t: gs.Tensor) -> bool:
    """Whether a tensor is an input of the model, perhaps in another shape: it lies where each inference says."""
    while t.inputs and t.inputs[0].op in ("Reshape", "Squeeze", "Unsqueeze", "Flatten"):
        t = t.inputs[0].inputs[0]
    return not t.inputs and not isinstance(t, gs.Constant)


def _held(b: Builder, name: str, going: str) -> str:
    """A condition that is an input of the model, in memory of the plan's own."""
    if name not in b.tensors:
        reads = Reads(b, ())
        value = reads.view(identity_view(going, 0))
        b.compute(b.add(dense(name, (), DType.BOOL, ())), call("logical_not", call("logical_not", value)), reads)
    return name


def carry(node: gs.Node, b: Builder) -> None:
    """A value that enters a loop, goes to its next iteration, or leaves it."""
    y, role = node.outputs[0], b.attr("role")
    x, *others = (b.value(t).name for t in node.inputs)
    over = going = place = None
    if role in ("enter", "leave"):
        out = b.result(y, b.order_for(shape_of(y), node.inputs[0]))
    else:
        over, going, *others = others
        if b.attr("row"):
            place, *others = others
        out = b.bind(y, b.add(replace(b.tensors[over], name=b.unique(y.name), base=over)))
    b.emit(
        Carry,
        out,
        role=role,
        loop=b.attr("loop"),
        x=x,
        over=over,
        going=going,
        at=place,
        after=tuple(others),
        most=b.attr("most"),
        epilogue=plain(out.dtype),
    )
