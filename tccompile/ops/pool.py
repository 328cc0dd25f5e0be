"""Pools over spatial windows."""

from __future__ import annotations

import math

import onnx_graphsurgeon as gs

from tccompile.expr import ACC, DType, Epilogue, Expr, call, cast, identity_view
from tccompile.ops.builder import IMAGE, Builder, Reads, shape_of
from tccompile.ops.windows import Window, window
from tccompile.program import Pool, Tensor


def max_pool(node: gs.Node, b: Builder) -> None:
    if len(node.outputs) > 1 and b.used(node.outputs[1]):
        raise b.refuse(f"its output Indices ({node.outputs[1].name}) is used", "compute what needs it outside of the model")
    win = _window(node, b)
    _pool(node, b, _floats(node, b), "max", win)


def average_pool(node: gs.Node, b: Builder) -> None:
    win = _window(node, b)
    _pool(node, b, _floats(node, b), "mean", win, count_pads=bool(b.attr("count_include_pad", 0)))


def lp_pool(node: gs.Node, b: Builder) -> None:
    """(sum of |x|^p)^(1/p): the mean of |x|^p, with everything beyond the edges counted as zero, times the window's size."""
    x, y = node.inputs[0], node.outputs[0]
    p = float(b.attr("p", 2))
    win = _window(node, b)
    ends = tuple(map(max, win.end_pads, win.reach(shape_of(x)[2:], shape_of(y)[2:])))
    win = Window(win.size, win.strides, win.dilations, win.pads, ends)
    reads = Reads(b, shape_of(x))
    powers = b.compute(b.new(f"{y.name}.powers", shape_of(x), order=IMAGE[len(x.shape)]), power(reads.broadcast(x), p), reads)
    total = call("mul", ACC, float(math.prod(win.size)))
    _pool(node, b, powers, "mean", win, count_pads=True, expr=root(total, p))


def power(x: Expr, p: float) -> Expr:
    """|x|^p"""
    return call("mul", x, x) if p == 2 else call("abs", x) if p == 1 else call("pow", call("abs", x), p)


def root(x: Expr, p: float) -> Expr:
    """x^(1/p) for x >= 0"""
    return call("sqrt", x) if p == 2 else x if p == 1 else call("pow", x, 1.0 / p)


def _window(node: gs.Node, b: Builder) -> Window:
    return window(b, shape_of(node.inputs[0])[2:], tuple(b.attr("kernel_shape")))


def _floats(node: gs.Node, b: Builder) -> Tensor:
    """The input as an image of floats; 8-bit integers are exact in them."""
    x = node.inputs[0]
    dtype = b.dtype(x)
    if dtype is DType.F32:
        return b.image(x)
    if dtype not in (DType.I8, DType.U8):
        raise b.refuse(f"a pool of {dtype.value}", "cast its input to float")
    y = b.new(f"{x.name}.float", shape_of(x), order=IMAGE[len(x.shape)])
    reads = Reads(b, shape_of(x))
    return b.compute(y, cast(reads.view(identity_view(b.value(x).name, y.rank)), DType.F32), reads)


def _pool(node: gs.Node, b: Builder, x: Tensor, kind: str, win: Window, count_pads: bool = False, expr: Expr = ACC) -> None:
    y = b.result(node.outputs[0], IMAGE[x.rank])
    b.emit(
        Pool,
        y,
        x=x.name,
        kind=kind,
        window=win.size,
        strides=win.strides,
        pads=win.pads,
        end_pads=win.end_pads,
        dilations=win.dilations,
        count_pads=count_pads,
        epilogue=Epilogue(cast(expr, y.dtype.compute)),
    )
