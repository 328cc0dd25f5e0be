"""Elementwise ops: tables from ONNX ops to the functions of `expr.FUNCTIONS`."""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce

import onnx_graphsurgeon as gs

from tccompile.ir.expr import Expr, Range, View, call, cast, const, constant, coord, element
from tccompile.ir.extent import Shape
from tccompile.ir.types import DType
from tccompile.lower import narrow
from tccompile.lower.builder import Builder, Reads, dtype_of, shape_of
from tccompile.lower.positions import position
from tccompile.rewrites.float8 import float8_of

Attribute = tuple[str, float]
"""An attribute's name and its default."""

FLOAT: dict[str, tuple[str, tuple[Attribute, ...]]] = {
    "LeakyRelu": ("leaky_relu", (("alpha", 0.01),)),
    "ThresholdedRelu": ("thresholded_relu", (("alpha", 1.0),)),
    "Elu": ("elu", (("alpha", 1.0),)),
    "Selu": ("selu", (("alpha", 1.67326319217681884765625), ("gamma", 1.05070102214813232421875))),
    "Celu": ("celu", (("alpha", 1.0),)),
    "HardSigmoid": ("hard_sigmoid", (("alpha", 0.2), ("beta", 0.5))),
    "Shrink": ("shrink", (("bias", 0.0), ("lambd", 0.5))),
    "HardSwish": ("hard_swish", ()),
    "Sigmoid": ("sigmoid", ()),
    "Softplus": ("softplus", ()),
    "Softsign": ("softsign", ()),
    "Mish": ("mish", ()),
    "Reciprocal": ("reciprocal", ()),
    "Sqrt": ("sqrt", ()),
    "Exp": ("exp", ()),
    "Log": ("log", ()),
    "Erf": ("erf", ()),
    "Sin": ("sin", ()),
    "Cos": ("cos", ()),
    "Tan": ("tan", ()),
    "Asin": ("asin", ()),
    "Acos": ("acos", ()),
    "Atan": ("atan", ()),
    "Sinh": ("sinh", ()),
    "Cosh": ("cosh", ()),
    "Tanh": ("tanh", ()),
    "Asinh": ("asinh", ()),
    "Acosh": ("acosh", ()),
    "Atanh": ("atanh", ()),
    "Floor": ("floor", ()),
    "Ceil": ("ceil", ()),
    "Round": ("round", ()),
    "IsNaN": ("is_nan", ()),
}
"""Functions of floats: their name in `expr.FUNCTIONS` and the attributes that follow the input. Integers are converted."""


def _of_type(floats: str, integers: str) -> Callable[..., Expr]:
    return lambda a, c: call(floats if c.dtype is DType.F32 else integers, a, c)


def _sign(x: Expr) -> Expr:
    if x.dtype is DType.F32:
        return call("sign", x)
    return call("sub", cast(call("greater", x, 0), x.dtype), cast(call("less", x, 0), x.dtype))


def _not_zero(x: Expr) -> Expr:
    return call("logical_not", call("equal", x, 0))


ANY: dict[str, Callable[..., Expr]] = {
    "Add": lambda a, c: call("add", a, c),
    "Sub": lambda a, c: call("sub", a, c),
    "Mul": lambda a, c: call("mul", a, c),
    "Div": _of_type("div", "trunc_div"),
    "Relu": lambda x: call("relu", x) if x.dtype is DType.F32 else call("max", x, 0),
    "PRelu": lambda x, slope: call("leaky_relu", x, slope),
    "Neg": lambda x: call("neg", x),
    "Abs": lambda x: call("abs", x),
    "Sign": _sign,
    "Equal": lambda a, c: call("equal", a, c),
    "Less": lambda a, c: call("less", a, c),
    "LessOrEqual": lambda a, c: call("less_equal", a, c),
    "Greater": lambda a, c: call("greater", a, c),
    "GreaterOrEqual": lambda a, c: call("greater_equal", a, c),
    "And": lambda a, c: call("bit_and", a, c),
    "Or": lambda a, c: call("bit_or", a, c),
    "Xor": lambda a, c: call("bit_xor", a, c),
    "Not": lambda x: call("logical_not", x),
    "BitwiseAnd": lambda a, c: call("bit_and", a, c),
    "BitwiseOr": lambda a, c: call("bit_or", a, c),
    "BitwiseXor": lambda a, c: call("bit_xor", a, c),
    "BitwiseNot": lambda x: call("bit_not", x),
    "Where": lambda c, a, d: call("where", c, a, d),
    "Sum": lambda *xs: reduce(lambda a, c: call("add", a, c), xs),
    "Mean": lambda *xs: call("div", reduce(lambda a, c: call("add", a, c), xs), float(len(xs))),
    "Min": lambda *xs: reduce(lambda a, c: call("min", a, c), xs),
    "Max": lambda *xs: reduce(lambda a, c: call("max", a, c), xs),
}
"""Functions without attributes, of inputs of one type, broadcast."""

SIGN_FREE = ("Add", "Sub", "Mul", "Sum", "Equal", "Where", "BitwiseAnd", "BitwiseOr", "BitwiseXor", "BitwiseNot", "Cast")
"""Ops that are right for uint64 though they compute in int64."""


ORDERED = ("Less", "LessOrEqual", "Greater", "GreaterOrEqual", "Min", "Max")
"""Ops that are right for uint64 if it is shifted to the range of int64."""

OVERFLOW = ("Add", "Sub", "Mul", "Sum", "Div", "Neg", "Abs", "BitwiseNot", "BitShift", "Pow", "Cast", "CastLike")
"""Ops whose result may not fit the integer type that it has in the model."""


def any_type(node: gs.Node, b: Builder) -> None:
    """An op of ANY."""
    check_uint64(node, b)
    reads = Reads(b, shape_of(node.outputs[0]))
    operands = list(map(reads.broadcast, node.inputs))
    if node.op == "Div" and _is_quantized(node.outputs[0]) and moderate(operands[1]):
        _write(node, b, call("ratio", *operands), reads)
        return
    if node.op not in ORDERED or dtype_of(node.inputs[0]) is not DType.U64:
        _write(node, b, ANY[node.op](*operands), reads)
        return
    value = ANY[node.op](*map(_shifted, operands))
    _write(node, b, value if value.dtype is DType.BOOL else _shifted(value), reads)


def _is_quantized(t: gs.Tensor) -> bool:
    """Whether it is only rounded to a float of 8 bits."""
    return len(t.outputs) == 1 and t.outputs[0].op == "Cast" and float8_of(t.outputs[0].outputs[0]) is not None


def moderate(scale: Expr) -> bool:
    """Whether a scale is constant, and numbers may be divided by it by way of its reciprocal."""
    return scale.fn == "const" and scale.dtype is DType.F32 and 2.0**-60 < abs(scale.value or 0) < 2.0**60


def _shifted(x: Expr) -> Expr:
    """The bits of a uint64 as an int64 of the same order, and back."""
    return call("bit_xor", x, -(1 << 63))


def float_function(node: gs.Node, b: Builder) -> None:
    """An op of FLOAT."""
    check_uint64(node, b)
    fn, attributes = FLOAT[node.op]
    reads = Reads(b, shape_of(node.outputs[0]))
    x = cast(reads.broadcast(node.inputs[0]), DType.F32)
    _write(node, b, call(fn, x, *(float(b.attr(name, default)) for name, default in attributes)), reads)


def gelu(node: gs.Node, b: Builder) -> None:
    reads = Reads(b, shape_of(node.outputs[0]))
    fn = "gelu_tanh" if b.attr("approximate", "none") == "tanh" else "gelu"
    _write(node, b, call(fn, reads.broadcast(node.inputs[0])), reads)


def swish(node: gs.Node, b: Builder) -> None:
    reads = Reads(b, shape_of(node.outputs[0]))
    x, alpha = reads.broadcast(node.inputs[0]), float(b.attr("alpha", 1.0))
    _write(node, b, call("silu", x) if alpha == 1.0 else call("swish", x, alpha), reads)


def clip(node: gs.Node, b: Builder) -> None:
    check_uint64(node, b)
    reads = Reads(b, shape_of(node.outputs[0]))
    x = reads.broadcast(node.inputs[0])
    for i, fn in ((1, "max"), (2, "min")):
        bound = b.input(i)
        if bound is not None:
            x = call(fn, x, reads.broadcast(bound))
    _write(node, b, x, reads)


def pow_(node: gs.Node, b: Builder) -> None:
    """In the base's type; a float exponent of an integer base computes in floats, and the result is truncated."""
    check_uint64(node, b)
    reads = Reads(b, shape_of(node.outputs[0]))
    x, e = map(reads.broadcast, node.inputs)
    if x.dtype is not e.dtype:
        x, e = cast(x, DType.F32), cast(e, DType.F32)
    if e.fn == "const" and e.value in (1, 2, 3):
        _write(node, b, reduce(lambda a, c: call("mul", a, c), [x] * int(e.value)), reads)
    elif e.fn == "const" and e.value == 0.5:
        _write(node, b, call("sqrt", x), reads)
    else:
        _write(node, b, call("pow", x, e), reads)


def mod(node: gs.Node, b: Builder) -> None:
    """With fmod the result has the dividend's sign, else the divisor's."""
    check_uint64(node, b)
    reads = Reads(b, shape_of(node.outputs[0]))
    x, divisor = map(reads.broadcast, node.inputs)
    if not b.attr("fmod", 0):
        expr = call("floor_mod", x, divisor)
    elif x.dtype is DType.F32:
        expr = call("fmod", x, divisor)
    else:
        expr = call("sub", x, call("mul", call("trunc_div", x, divisor), divisor))
    _write(node, b, expr, reads)


def is_inf(node: gs.Node, b: Builder) -> None:
    reads = Reads(b, shape_of(node.outputs[0]))
    x = reads.broadcast(node.inputs[0])
    expr = call("is_inf", x)
    if not b.attr("detect_negative", 1):
        expr = call("bit_and", expr, call("greater", x, 0.0))
    if not b.attr("detect_positive", 1):
        expr = call("bit_and", expr, call("less", x, 0.0))
    _write(node, b, expr, reads)


MAX_SHIFT = 62
"""2 to this power is the largest that an int64 holds."""


def bit_shift(node: gs.Node, b: Builder) -> None:
    """x * 2^n, or floor(x / 2^n). Fewer than no bits are as all of them: only the sign is left."""
    right = b.attr("direction") == "RIGHT"
    if right:
        check_uint64(node, b)
    reads = Reads(b, shape_of(node.outputs[0]))
    x, n = map(reads.broadcast, node.inputs)
    if right:
        n = call("where", call("less", n, 0), const(MAX_SHIFT, DType.I64), call("min", n, const(MAX_SHIFT, DType.I64)))
    power = call("pow", const(2, DType.I64), n)
    _write(
        node, b, call("trunc_div", call("sub", x, call("floor_mod", x, power)), power) if right else call("mul", x, power), reads
    )


def one_hot(node: gs.Node, b: Builder) -> None:
    """values[1] where the coordinate along a new axis is the index (which may count from the end), values[0] elsewhere."""
    depth, t = b.ints(1, "depth"), node.outputs[0]
    assert depth is not None
    shape, indices, values = shape_of(t), b.value(node.inputs[0]), b.value(node.inputs[2])
    axis = b.axis(b.attr("axis", -1), len(shape))
    reads = Reads(b, shape)
    index = reads.view(View(indices.name, tuple(coord(a) for a in range(len(shape)) if a != axis)))
    index = cast(index, DType.I64)
    index = call("where", call("less", index, 0), call("add", index, depth[0]), index)
    off, on = (reads.view(View(values.name, (constant(i),))) for i in range(2))
    here = call("equal", index, position(reads, t.name, coord(axis), depth[0]))
    b.compute(b.result(t), call("where", here, on, off), reads)


def cast_to(node: gs.Node, b: Builder) -> None:
    """Cast and CastLike: the output's type says to what."""
    x, y = node.inputs[0], node.outputs[0]
    if {x.name, y.name} <= b.float8.stored.keys():
        b.bind(y, b.value(x))
        return
    reads = Reads(b, shape_of(y))
    source, to = narrow.elem_of(x), narrow.elem_of(y)
    if source is not None and narrow.is_bits(source) and not x.inputs:  # an input of the model
        table = b.literal(f"{x.name}/numbers", narrow.numbers_of(source))
        value = reads.view(View(table.name, (element(b.value(x).name, [coord(a) for a in range(len(reads.shape))], 256),)))
    else:
        value = reads.broadcast(x)
    if to is not None:
        value = narrow.rounded(value, to, bool(b.attr("saturate", 1)), b.attr("round_mode", "up"))
        if narrow.is_bits(to) and b.is_output(y):
            value = narrow.bits_of(value, to)
        _write(node, b, value, reads)
        return
    if b.io_dtype(y) is DType.BOOL and value.dtype is not DType.BOOL:
        value = _not_zero(value)
    if DType.U64 in (dtype_of(x), dtype_of(y)) and value.dtype is not b.dtype(y).compute:
        raise b.refuse(f"a cast from {b.io_dtype(x).value} to {b.io_dtype(y).value}", "use int64: uint64 is computed as int64")
    if value.dtype is DType.F32 and b.dtype(y).compute is DType.I64:
        value = truncated(value, b.dtype(y))
    _write(node, b, value, reads)


def truncated(x: Expr, dtype: DType) -> Expr:
    """A float as an integer, as x86 and with it ONNX Runtime converts it: by way of int32, or int64 for larger types, whose least
    number stands for all floats that it does not hold, and for NaN."""
    bits = 31 if dtype.size < 4 or dtype is DType.I32 else 63
    held = call("less", call("abs", x), 2.0**bits)
    return call("where", held, cast(x, DType.I64), const(-(1 << bits), DType.I64))


def trilu(node: gs.Node, b: Builder) -> None:
    """The upper triangle (column - row >= k) or the lower one (column - row <= k), zeros elsewhere."""
    x, y = node.inputs[0], node.outputs[0]
    shape = shape_of(y)
    k = min(max((b.ints(1, "diagonal") or [0])[0], -shape[-2]), shape[-1])
    source = b.value(x)
    b.copy(triangle_view(source.name, shape, k, bool(b.attr("upper", 1))), b.result(y, b.order_for(shape, x)))


def triangle_view(tensor: str, shape: Shape, k: int, upper: bool) -> View:
    rank = len(shape)
    ahead = coord(rank - 1) - coord(rank - 2)
    far = sum(shape)
    valid = Range(ahead, k, max(far, k)) if upper else Range(ahead, min(-far, k + 1), k + 1)
    return View(tensor, tuple(map(coord, range(rank))), (valid,))


def _write(node: gs.Node, b: Builder, expr: Expr, reads: Reads) -> None:
    y = node.outputs[0]
    if node.op in OVERFLOW and expr.dtype is DType.I64:
        expr = wrapped(expr, b.dtype(y))
    b.compute(b.result(y, b.order_for(shape_of(y), *node.inputs)), expr, reads)


def wrapped(x: Expr, dtype: DType) -> Expr:
    """An int64 reduced to the range of a narrower integer as its arithmetic does: modulo 2^bits.

    Storing it would do the same, but a later stage may keep the value in a register.
    """
    if dtype.compute is not DType.I64 or dtype.size == 8:
        return x
    half = 1 << (8 * dtype.size - 1)
    mask = 2 * half - 1
    if dtype.numpy.kind == "u":
        return call("bit_and", x, mask)
    return call("sub", call("bit_and", call("add", x, half), mask), half)


def check_uint64(node: gs.Node, b: Builder) -> None:
    if node.op not in (*SIGN_FREE, *ORDERED) and any(dtype_of(t) is DType.U64 for t in node.inputs if t.name):
        raise b.refuse("its operands are uint64, which is computed as int64", "use int64, or uint32")
