"""Convolutions."""

from __future__ import annotations

from collections.abc import Callable

import onnx_graphsurgeon as gs

from tccompile.ir.expr import ACC, Epilogue, Expr, Range, View, always_inside, call, coord, quotient, remainder
from tccompile.ir.ops import Conv
from tccompile.ir.weights import transform
from tccompile.load.constants import recipe_of
from tccompile.lower.builder import IMAGE, Builder, Order, Reads, shape_of
from tccompile.lower.windows import Window, window

WEIGHTS: dict[int, Order] = {3: (0, 2, 1), 4: (0, 2, 3, 1)}
"""Filters (O, C/groups, R, S) as K-major rows [O][R][S][C/groups], by rank."""

DEPTHWISE: dict[int, Order] = {3: (2, 1, 0), 4: (2, 3, 1, 0)}
"""Filters (C, 1, R, S) of a depthwise convolution as [R][S][1][C], by rank."""


def conv(node: gs.Node, b: Builder) -> None:
    bias = b.input(2)
    x, w = node.inputs[:2]
    given = b.float8.products.get(id(node))

    def finish(reads: Reads) -> Expr:
        total = ACC if given is None else call("mul", ACC, reads.along(given.scale, 1))
        return total if bias is None else call("add", total, reads.along(bias, 1))

    product(b, x, w if given is None else given.numbers, node.outputs[0], finish)


def product(b: Builder, x: gs.Tensor, w: gs.Tensor, y: gs.Tensor, finish: Callable[[Reads], Expr]) -> None:
    """y = finish(conv(x, w)) by the current node's attributes; `finish` gives an expression of `acc` and of what it reads."""
    filters = shape_of(w)
    win = window(b, shape_of(x)[2:], filters[2:])
    groups = b.attr("group", 1)
    if len(filters) == 5:
        _volume(b, x, w, y, finish, win, groups)
        return
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


def _volume(
    b: Builder, t: gs.Tensor, w: gs.Tensor, z: gs.Tensor, finish: Callable[[Reads], Expr], win: Window, groups: int
) -> None:
    """A convolution over (D, H, W): one over (H, W) of frames whose channels are those of all frames that the filter covers."""
    x, (o, share, taps, *size) = b.image(t), shape_of(w)
    n, _, depth, height, width = x.shape
    _, _, out, p, q = shape_of(z)
    shape = (n * out, groups * taps * share, height, width)
    image, at = quotient(coord(0), out, shape), remainder(coord(0), out, shape)
    group, tap = quotient(coord(1), taps * share, shape), remainder(quotient(coord(1), share, shape), taps, shape)
    frame = at * win.strides[0] + tap * win.dilations[0] - win.pads[0]
    inside = () if always_inside(frame, 0, depth, shape) else (Range(frame, 0, depth),)
    channel = group * share + remainder(coord(1), share, shape)
    frames = b.new(f"{z.name}.frames", shape, order=IMAGE[4])
    b.copy(View(x.name, (image, channel, frame, coord(2), coord(3)), inside), frames)
    flat = (o, taps * share, *size)
    if isinstance(w, gs.Constant):
        moved = transform("transpose", recipe_of(w), axes=(0, 2, 1, 3, 4))
        filters = b.constant(w.name, transform("reshape", moved, shape=flat), flat, order=WEIGHTS[4])
    else:
        filters = b.new(f"{w.name}.flat", flat, order=WEIGHTS[4])
        index = (coord(0), remainder(coord(1), share, flat), quotient(coord(1), share, flat), coord(2), coord(3))
        b.copy(View(b.value(w).name, index), filters)
    y = b.new(f"{z.name}.flat", (n * out, o, p, q), order=IMAGE[4])
    reads = Reads(b, y.shape)
    expr = finish(reads)
    b.emit(
        Conv,
        y,
        x=frames.name,
        w=filters.name,
        strides=win.strides[1:],
        pads=win.pads[1:],
        dilations=win.dilations[1:],
        groups=groups,
        epilogue=Epilogue(expr, tuple(reads.views)),
    )
    b.copy(View(y.name, (coord(0) * out + coord(2), coord(1), coord(3), coord(4))), b.result(z, IMAGE[5]))


def conv_transpose(node: gs.Node, b: Builder) -> None:
    """A rewrite makes it a convolution of phases before lowering; what is left cannot be written so."""
    rank = len(node.inputs[0].shape) - 2
    if 1 <= rank <= 3:
        far = {name: list(node.attrs[name]) for name in ("strides", "dilations") if name in node.attrs}
        raise b.refuse(f"with {far} its taps are so far apart that zeros between them would fill memory", "use smaller ones")
    raise b.refuse(f"a transposed convolution over {rank} spatial axes, with {dict(node.attrs)}", "use one to three spatial axes")
