"""Normalisations."""

from __future__ import annotations

import onnx_graphsurgeon as gs

from tccompile.ir.expr import ACC, Epilogue, Expr, Range, View, broadcast_view, call, coord, identity_view
from tccompile.ir.ops import Norm
from tccompile.ir.tensor import Tensor
from tccompile.lower.builder import IMAGE, Builder, Reads, shape_of
from tccompile.lower.reduce import REDUCTIONS, Reduction, combine

MOST_NEIGHBOURS = 101
"""Channels that LocalResponseNormalization sums: one expression reads them all."""


def batch_normalization(node: gs.Node, b: Builder) -> None:
    """(x - mean) / sqrt(variance + epsilon) * scale + bias, all per channel; in training mode with x's own statistics."""
    x, scale, bias, mean, variance = node.inputs[:5]
    y = node.outputs[0]
    if b.attr("training_mode", 0):
        if any(map(b.used, node.outputs[1:])):
            raise b.refuse("training_mode is 1 and the running statistics are used", "export the model for inference")
        _per_channel(node, b, groups=0, together=(0,))
        return
    reads = Reads(b, shape_of(y))
    centred = call("sub", reads.broadcast(x), reads.along(mean, 1))
    inverse = call("rsqrt", call("add", reads.along(variance, 1), float(b.attr("epsilon", 1e-5))))
    scaled = call("mul", call("mul", centred, inverse), reads.along(scale, 1))
    b.compute(b.result(y, b.order_for(reads.shape, x)), call("add", scaled, reads.along(bias, 1)), reads)


def instance_normalization(node: gs.Node, b: Builder) -> None:
    _per_channel(node, b, groups=0)


def group_normalization(node: gs.Node, b: Builder) -> None:
    _per_channel(node, b, groups=int(b.attr("num_groups")))


def layer_normalization(node: gs.Node, b: Builder) -> None:
    x = b.operand(node.inputs[0])
    axes = tuple(range(b.axis(b.attr("axis", -1), x.rank), x.rank))
    if any(map(b.used, node.outputs[1:])):
        _statistics(node, b, x, axes)
    reads = Reads(b, x.shape)
    expr = call("mul", ACC, reads.broadcast(node.inputs[1]))
    if (bias := b.input(2)) is not None:
        expr = call("add", expr, reads.broadcast(bias))
    _norm(node, b, x, axes, expr, reads)


def rms_normalization(node: gs.Node, b: Builder) -> None:
    """x / sqrt(mean(x²) + epsilon) * scale"""
    x = b.operand(node.inputs[0])
    axes = tuple(range(b.axis(b.attr("axis", -1), x.rank), x.rank))
    reads = Reads(b, x.shape)
    _norm(node, b, x, axes, call("mul", ACC, reads.broadcast(node.inputs[1])), reads, centred=False)


def _statistics(node: gs.Node, b: Builder, x: Tensor, axes: tuple[int, ...]) -> None:
    """The second and third output of LayerNormalization: the mean, and one over the standard deviation."""
    shape = tuple(1 if a in axes else n for a, n in enumerate(x.shape))
    mean = combine(b, x, b.new(f"{node.outputs[0].name}.mean", shape, order=x.order), axes, REDUCTIONS["ReduceMean"])
    reads = Reads(b, x.shape)
    value, middle = reads.view(identity_view(x.name, x.rank)), reads.view(broadcast_view(mean.name, shape, x.shape))
    centred = call("sub", value, middle)
    squares = b.new(f"{node.outputs[0].name}.squares", x.shape, order=x.order)
    b.compute(squares, call("mul", centred, centred), reads)
    eps = float(b.attr("epsilon", 1e-5))
    inverse = Reduction("add", after=lambda s, n: call("rsqrt", call("add", call("div", s, float(n)), eps)))
    b.bind(node.outputs[1], mean)
    if len(node.outputs) > 2 and b.used(node.outputs[2]):
        combine(b, squares, b.result(node.outputs[2], x.order), axes, inverse)


def lrn(node: gs.Node, b: Builder) -> None:
    """x / (bias + alpha / size * sum of x² over `size` neighbouring channels)^beta"""
    x, y = node.inputs[0], node.outputs[0]
    size, shape = int(b.attr("size")), shape_of(x)
    source = b.value(x)
    reads = Reads(b, shape)
    own = identity_view(source.name, source.rank)
    total: Expr | None = None
    far = shape[1] - 1  # there are no channels beyond
    shifts = range(-min((size - 1) // 2, far), min(size // 2, far) + 1)
    if len(shifts) > MOST_NEIGHBOURS:
        raise b.refuse(f"its size is {size}, for {shape[1]} channels", f"use a size of at most {MOST_NEIGHBOURS}")
    for shift in shifts:
        channel = coord(1) + shift
        valid = (Range(channel, 0, shape[1]),) if shift else ()
        v = reads.view(View(source.name, (own.index[0], channel, *own.index[2:]), valid))
        square = call("mul", v, v)
        total = square if total is None else call("add", total, square)
    assert total is not None
    denominator = call("add", call("mul", total, float(b.attr("alpha", 1e-4)) / size), float(b.attr("bias", 1.0)))
    beta = float(b.attr("beta", 0.75))
    expr = call("div", reads.view(own), call("pow", denominator, beta))
    b.compute(b.result(y, b.order_for(shape, x)), expr, reads)


def _per_channel(node: gs.Node, b: Builder, groups: int, together: tuple[int, ...] = ()) -> None:
    """A norm over the spatial axes (and a group's channels, and axes `together`), then a scale and a bias for each channel."""
    t = node.inputs[0]
    x = b.image(t) if len(t.shape) in IMAGE else b.operand(t)
    reads = Reads(b, x.shape)
    expr = call("add", call("mul", ACC, reads.along(node.inputs[1], 1)), reads.along(node.inputs[2], 1))
    _norm(node, b, x, (*together, *range(2, x.rank)), expr, reads, groups)


def _norm(
    node: gs.Node, b: Builder, x: Tensor, axes: tuple[int, ...], expr: Expr, reads: Reads, groups: int = 0, centred: bool = True
) -> None:
    eps = float(b.attr("epsilon", 1e-5))
    y = b.result(node.outputs[0], x.order)
    b.emit(Norm, y, x=x.name, axes=axes, eps=eps, groups=groups, centred=centred, epilogue=Epilogue(expr, tuple(reads.views)))
