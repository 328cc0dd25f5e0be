"""Convolutions."""

from __future__ import annotations

from collections.abc import Callable

import onnx_graphsurgeon as gs

from tccompile.expr import ACC, Epilogue, Expr, call
from tccompile.ops.builder import IMAGE, Builder, Order, Reads, shape_of
from tccompile.ops.windows import window
from tccompile.program import Conv

WEIGHTS: dict[int, Order] = {3: (0, 2, 1), 4: (0, 2, 3, 1)}
"""Filters (O, C/groups, R, S) as K-major rows [O][R][S][C/groups], by rank."""

DEPTHWISE: dict[int, Order] = {3: (2, 1, 0), 4: (2, 3, 1, 0)}
"""Filters (C, 1, R, S) of a depthwise convolution as [R][S][1][C], by rank."""


def conv(node: gs.Node, b: Builder) -> None:
    bias = b.input(2)
    x, w = node.inputs[:2]
    product(b, x, w, node.outputs[0], lambda reads: ACC if bias is None else call("add", ACC, reads.along(bias, 1)))


def product(b: Builder, x: gs.Tensor, w: gs.Tensor, y: gs.Tensor, finish: Callable[[Reads], Expr]) -> None:
    """y = finish(conv(x, w)) by the current node's attributes; `finish` gives an expression of `acc` and of what it reads."""
    filters = shape_of(w)
    win = window(b, shape_of(x)[2:], filters[2:])
    groups = b.attr("group", 1)
    depthwise = filters[1] == 1 and filters[0] == groups
    order = (DEPTHWISE if depthwise else WEIGHTS)[len(filters)]
    reads = Reads(b, shape_of(y))
    expr = finish(reads)
    b.emit(
        Conv,
        b.result(y, IMAGE[len(filters)]),
        x=b.image(x).name,
        w=b.laid_out(w, order).name,
        strides=win.strides,
        pads=win.pads,
        dilations=win.dilations,
        groups=groups,
        epilogue=Epilogue(expr, tuple(reads.views)),
    )


def conv_transpose(node: gs.Node, b: Builder) -> None:
    """Constant filters make it a convolution of phases before lowering; what is left cannot be written so."""
    if not isinstance(node.inputs[1], gs.Constant):
        raise b.refuse(f"its weights ({node.inputs[1].name}) are computed at run time", "make the weights constant")
    rank = len(node.inputs[0].shape) - 2
    raise b.refuse(f"a transposed convolution over {rank} spatial axes, with {dict(node.attrs)}", "use one or two spatial axes")
