"""Quantized tensors: integers q that stand for (q - zero point) · scale.

Products of integers are products of floats that hold them: differences to zero points of 8 bits are exact in fp16, and sums are
exact in fp32 as long as they stay below 2^24; scales come afterwards, in the product's epilogue.
"""

from __future__ import annotations

import math

import numpy as np
import onnx_graphsurgeon as gs

from tccompile.constants import derived
from tccompile.expr import ACC, DType, Expr, View, call, cast, coord, quotient
from tccompile.ops import conv, linear
from tccompile.ops.builder import IMAGE, Builder, Order, Reads, shape_of


def quantize(node: gs.Node, b: Builder) -> None:
    """y = saturate(round(x / scale) + zero point), halves rounded to even."""
    x, y = node.inputs[0], node.outputs[0]
    reads = Reads(b, shape_of(y))
    value = cast(reads.broadcast(x), DType.F32)
    scaled = call("div", value, cast(_parameter(b, reads, 1), DType.F32))
    zero = _parameter(b, reads, 2) if b.input(2) is not None else None
    b.compute(b.result(y, b.order_for(shape_of(y), x)), _stored(b, scaled, zero, y), reads)


def dequantize(node: gs.Node, b: Builder) -> None:
    """y = (x - zero point) · scale"""
    x, y = node.inputs[0], node.outputs[0]
    if b.io_dtype(x).is_float:
        raise b.refuse(f"its input is {b.io_dtype(x).value}", "quantize to integers")
    reads = Reads(b, shape_of(y))
    value = reads.broadcast(x)
    if b.input(2) is not None:
        value = call("sub", value, _parameter(b, reads, 2))
    expr = call("mul", cast(value, DType.F32), cast(_parameter(b, reads, 1), DType.F32))
    b.compute(b.result(y, b.order_for(shape_of(y), x)), expr, reads)


def conv_integer(node: gs.Node, b: Builder) -> None:
    """(x - x's zero point) convolved with (w - w's), which is one number or one for each output channel, as int32."""
    (x, w), y = node.inputs[:2], node.outputs[0]
    rank = len(y.shape)
    conv.product(b, _centred(b, x, 2, 1, IMAGE.get(rank)), _centred(b, w, 3, 0), y, lambda reads: _integer(ACC))


def matmul_integer(node: gs.Node, b: Builder) -> None:
    """(a - a's zero point) @ (w - w's), which are one number, or one a row of a and one a column of w, as int32."""
    (a, w), y = node.inputs[:2], node.outputs[0]
    linear.product(b, _centred(b, a, 2, -2), _centred(b, w, 3, -1), y, lambda reads: _integer(ACC))


def qlinear_conv(node: gs.Node, b: Builder) -> None:
    """(x, scale, zero, w, scale, zero, y's scale, zero, bias): the bias has x's scale times w's, and no zero point."""
    x, w, y = node.inputs[0], node.inputs[3], node.outputs[0]
    bias = b.input(8)

    def finish(reads: Reads) -> Expr:
        acc = ACC if bias is None else call("add", ACC, cast(reads.along(bias, 1), DType.F32))
        scales = [cast(reads.along(node.inputs[i], 1), DType.F32) for i in (1, 4, 6)]
        return _stored(b, _rescaled(acc, *scales), reads.along(node.inputs[7], 1), y)

    conv.product(b, _centred(b, x, 2, 1, IMAGE.get(len(y.shape))), _centred(b, w, 5, 0), y, finish)


def qlinear_matmul(node: gs.Node, b: Builder) -> None:
    """(a, scale, zero, w, scale, zero, y's scale, zero): one number each, or one a row of a and y, and one a column of w."""
    a, w, y = node.inputs[0], node.inputs[3], node.outputs[0]

    def finish(reads: Reads) -> Expr:
        rank = len(reads.shape)
        scales = [cast(_of_matrix(reads, node.inputs[i], rank - axis), DType.F32) for i, axis in ((1, 2), (4, 1), (6, 2))]
        return _stored(b, _rescaled(ACC, *scales), _of_matrix(reads, node.inputs[7], rank - 2), y)

    linear.product(b, _centred(b, a, 2, -2), _centred(b, w, 5, -1), y, finish)


def _parameter(b: Builder, reads: Reads, i: int) -> Expr:
    """Scale or zero point: one number, one for each index of `axis`, or one for each block of it."""
    t, rank = b.node.inputs[i], len(reads.shape)
    if math.prod(shape_of(t)) == 1:  # its axis means nothing
        return reads.along(t, 0)
    axis, block = b.axis(b.attr("axis", 1), rank), b.attr("block_size", 0)
    if not block:
        return reads.along(t, axis)
    if not isinstance(t, gs.Constant) and len(t.shape) != rank:
        raise b.refuse(f"{t.name} is {shape_of(t)}, in blocks of {block} along axis {axis}", "give it x's axes")
    index = [coord(a) for a in range(rank)]
    index[axis] = quotient(coord(axis), block, reads.shape)
    return reads.view(View(b.value(t).name, tuple(index)))


def _of_matrix(reads: Reads, t: gs.Tensor, axis: int) -> Expr:
    """One number for all of a product of matrices, one for each index of `axis`, or as many axes as it has."""
    return reads.along(t, axis) if len(t.shape) < 2 else reads.broadcast(t)


def _rescaled(acc: Expr, x: Expr, w: Expr, y: Expr) -> Expr:
    return call("mul", acc, call("div", call("mul", x, w), y))


def _integer(x: Expr) -> Expr:
    """A float that holds an integer, to rounding, as that integer."""
    return cast(call("round", x), DType.I64)


def _stored(b: Builder, value: Expr, zero: Expr | None, y: gs.Tensor) -> Expr:
    """The value rounded, moved to the zero point, and saturated to the integers that y holds."""
    dtype = b.io_dtype(y)
    if dtype.is_float or dtype.size > 2:
        raise b.refuse(f"{y.name} is {dtype.value}", "quantize to integers of 8 or 16 bits")
    limits = np.iinfo(dtype.numpy)
    x = call("round", value)
    if zero is not None:
        x = call("add", x, cast(zero, DType.F32))
    return cast(call("min", call("max", x, float(limits.min)), float(limits.max)), DType.I64)


def _centred(b: Builder, t: gs.Tensor, zero: int, axis: int, order: Order | None = None) -> gs.Tensor:
    """`t` less its zero point, which is input number `zero`, as floats; a vector of them goes along `axis`."""
    z, shape = b.input(zero), shape_of(t)
    axis = b.axis(axis, len(shape))
    if isinstance(t, gs.Constant) and (z is None or isinstance(z, gs.Constant)):
        out = derived(b.unique(f"{t.name}/centred"), "cast", t, dtype="float32")
        if z is None:
            return out
        wide = derived("", "cast", z, dtype="float32")
        if len(z.shape) == 1 and z.shape[0] > 1:
            lie = tuple(-1 if a == axis else 1 for a in range(len(shape)))
            wide = derived("", "reshape", wide, shape=lie)
        elif len(z.shape) == 1:
            wide = derived("", "reshape", wide, shape=())
        return derived(out.name, "sub", out, wide)
    reads = Reads(b, shape)
    value = reads.broadcast(t)
    if z is not None:
        value = call("sub", value, reads.along(z, axis) if len(z.shape) < 2 else reads.broadcast(z))
    y = gs.Variable(b.unique(f"{t.name}/centred"), np.float32, shape)
    b.compute(b.result(y, order or tuple(range(len(shape)))), cast(value, DType.F32), reads)
    return y
