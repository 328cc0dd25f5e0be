"""Quantized tensors: integers q that stand for (q - zero point) · scale.

Products of integers are products of floats that hold them (integers.py); scales come afterwards, in the product's epilogue.
"""

from __future__ import annotations

import math

import numpy as np
import onnx_graphsurgeon as gs

from tccompile.ir.expr import Expr, View, call, cast, const, coord, quotient
from tccompile.ir.types import DType
from tccompile.ir.weights import GROWTH
from tccompile.load.constants import held
from tccompile.lower.builder import IMAGE, Builder, Reads, shape_of
from tccompile.lower.byte_products import EXACT
from tccompile.lower.integers import centred, convolution, integer, matmul
from tccompile.lower.pointwise import moderate, wrapped

ONE = const(1.0, DType.F32)
"""A scale that changes nothing, as those of sums in steps of the result have."""


def quantize(node: gs.Node, b: Builder) -> None:
    """y = saturate(round(x / scale) + zero point), halves rounded to even."""
    x, y = node.inputs[0], node.outputs[0]
    reads = Reads(b, shape_of(y))
    scale = floats(_parameter(b, reads, 1))
    scaled = floats(reads.broadcast(x))
    if scale != ONE:
        scaled = call("ratio" if moderate(scale) else "div", scaled, scale)
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
        zero = _parameter(b, reads, 2)
        wide = b.io_dtype(x).size > 2  # the difference of integers of 16 bits is a float32 number
        value = call("sub", value, zero) if wide else call("sub", floats(value), floats(zero))
    scale, value = floats(_parameter(b, reads, 1)), floats(value)
    b.compute(b.result(y, b.order_for(shape_of(y), x)), value if scale == ONE else call("mul", value, scale), reads)


def conv_integer(node: gs.Node, b: Builder) -> None:
    """(x - x's zero point) convolved with (w - w's), which is one number or one for each output channel, as int32."""
    (x, w), y = node.inputs[:2], node.outputs[0]
    factors = centred(b, x, 2, 1, IMAGE.get(len(y.shape))), centred(b, w, 3, 0)
    convolution(b, *factors, y, lambda reads, acc, bound: integer(acc))


def matmul_integer(node: gs.Node, b: Builder) -> None:
    """(a - a's zero point) @ (w - w's), which are one number, or one a row of a and one a column of w, as int32."""
    (a, w), y = node.inputs[:2], node.outputs[0]
    matmul(b, centred(b, a, 2, -2), centred(b, w, 3, -1), y, lambda reads, acc, bound: integer(acc))


def qlinear_conv(node: gs.Node, b: Builder) -> None:
    """(x, scale, zero, w, scale, zero, y's scale, zero, bias): the bias has x's scale times w's, and no zero point."""
    x, w, y = node.inputs[0], node.inputs[3], node.outputs[0]
    bias = b.input(8)

    def finish(reads: Reads, acc: Expr, bound: int) -> Expr:
        if bias is not None:
            acc = _biased(acc, bound, bias, reads.along(bias, 1))
        scales = [floats(reads.along(node.inputs[i], 1)) for i in (1, 4, 6)]
        return _stored(b, _rescaled(acc, *scales), reads.along(node.inputs[7], 1), y)

    convolution(b, centred(b, x, 2, 1, IMAGE.get(len(y.shape))), centred(b, w, 5, 0), y, finish)


def _biased(acc: Expr, bound: int, bias: gs.Tensor, value: Expr) -> Expr:
    """The sum with its bias, which int32 takes modulo 2^32 and float32 only where it stays exact."""
    largest = GROWTH * float(np.abs(held(bias), dtype=np.float64).max(initial=0)) if isinstance(bias, gs.Constant) else math.inf
    if acc.dtype is DType.F32 and bound + largest <= EXACT:
        return call("add", acc, floats(value))
    return wrapped(call("add", integer(acc), value), DType.I32)


def qlinear_matmul(node: gs.Node, b: Builder) -> None:
    """(a, scale, zero, w, scale, zero, y's scale, zero): one number each, or one a row of a and y, and one a column of w."""
    a, w, y = node.inputs[0], node.inputs[3], node.outputs[0]

    def finish(reads: Reads, acc: Expr, bound: int) -> Expr:
        rank = len(reads.shape)
        scales = [floats(_of_matrix(reads, node.inputs[i], rank - axis)) for i, axis in ((1, 2), (4, 1), (6, 2))]
        return _stored(b, _rescaled(acc, *scales), _of_matrix(reads, node.inputs[7], rank - 2), y)

    matmul(b, centred(b, a, 2, -2), centred(b, w, 5, -1), y, finish)


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
    return call("mul", floats(acc), call("div", call("mul", x, w), y))


def _stored(b: Builder, value: Expr, zero: Expr | None, y: gs.Tensor) -> Expr:
    """The value rounded, moved to the zero point, and saturated to the integers that y holds."""
    dtype = b.io_dtype(y)
    if dtype.is_float or dtype.size > 2:
        raise b.refuse(f"{y.name} is {dtype.value}", "quantize to integers of 8 or 16 bits")
    limits = np.iinfo(dtype.numpy)
    x = call("round", value)
    if zero is not None:
        x = call("add", x, floats(zero))
    return cast(call("saturate", x, float(limits.min), float(limits.max)), DType.I64)


def floats(x: Expr) -> Expr:
    """The value in float32."""
    return const(float(x.value)) if x.fn == "const" else cast(x, DType.F32)  # type: ignore[arg-type]
