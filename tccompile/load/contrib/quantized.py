"""Operators on quantized tensors, as ONNX Runtime's quantization tools and its optimizer write them: standard ones between
numbers taken apart and put together again, or products of integers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import onnx
import onnx.helper

from tccompile.ir.extent import Shape, ceil_div
from tccompile.load.contrib.parts import FLOAT, Operator, Parts

OWN = ("channels_last", "opset")
"""Attributes that the standard operators have not."""


def _kept(p: Parts) -> dict[str, Any]:
    return {name: value for name, value in p.attributes.items() if name not in OWN}


def _take(p: Parts, x: str, scale: str, zero: str = "", **attributes: Any) -> str:
    return p.add("DequantizeLinear", [x, scale, zero], **attributes)


def _standard(p: Parts) -> None:
    """The operator of the same name."""
    p.add(p.node.op_type, p.inputs, p.outputs[0], **_kept(p))


def _store(p: Parts, x: str, scale: str, zero: str) -> None:
    p.add("QuantizeLinear", [x, scale, zero], p.outputs[0])


def _store_steps(p: Parts, steps: str, zero: str) -> None:
    """Rounds numbers of y's steps with the zero point in them, as ONNX Runtime does on x86: a half goes to the even byte.
    QuantizeLinear rounds before it adds a zero point; where that is odd, it takes the other byte."""
    moved = p.add("Add", [steps, p.add("Cast", [zero], to=FLOAT)])
    _store(p, moved, p.constant(np.float32(1.0)), p.constant(np.zeros((), p.dtype(0))))


def _store_quotient(p: Parts, x: str, scale: str, zero: str) -> None:
    _store_steps(p, p.add("Div", [x, scale]), zero)


def _zero(p: Parts, zero: str) -> str:
    """y's zero point: 0 of the first operand's type if it is left out."""
    return zero or p.constant(np.zeros((), p.dtype(0)))


def _unary(op: str, store: Callable[[Parts, str, str, str], None] = _store) -> Operator:
    """Of (x, scale, zero point, y's scale, zero point), maybe with channels last."""

    def operator(p: Parts) -> None:
        last, rank = p.attributes.get("channels_last", 0), len(p.shape(0))
        x = _take(p, *p.inputs[:3])
        x = p.add(op, [p.channels_first(x, rank) if last else x], **_kept(p))
        store(p, p.channels_last(x, rank) if last else x, p.inputs[3], _zero(p, p.inputs[4]))

    return operator


def _qlinear_add(p: Parts) -> None:
    """(a, scale, zero point, b, scale, zero point, y's scale, zero point): a and b in y's steps, by quotients of scales, as ONNX
    Runtime adds them. Where one scale is a multiple of another many sums are halves, which other factors would make no halves."""
    a, a_scale, a_zero, b, b_scale, b_zero, scale, zero = p.inputs[:8]
    steps = [_take(p, x, p.add("Div", [own, scale]), its) for x, own, its in ((a, a_scale, a_zero), (b, b_scale, b_zero))]
    _store_steps(p, p.add("Add", steps), _zero(p, zero))


def _qlinear_mul(p: Parts) -> None:
    """(a, scale, zero point, b, scale, zero point, y's scale, zero point): a product of integers times one number."""
    a, a_scale, a_zero, b, b_scale, b_zero, scale, zero = p.inputs[:8]
    one, factor = p.constant(np.float32(1.0)), p.add("Div", [p.add("Mul", [a_scale, b_scale]), scale])
    product = p.add("Mul", [_take(p, a, one, a_zero), _take(p, b, one, b_zero)])
    _store_steps(p, p.add("Mul", [product, factor]), _zero(p, zero))


def _qlinear_global_average_pool(p: Parts) -> None:
    """(x, scale, zero point, y's scale, zero point), maybe with channels last: sums of integers times one number, as ONNX Runtime
    has it, which rounds before it adds the zero point."""
    last, rank = p.attributes.get("channels_last", 0), len(p.shape(0))
    x, x_scale, x_zero, scale, zero = p.inputs[:5]
    one, x = p.constant(np.float32(1.0)), p.channels_first(x, rank) if last else x
    axes = p.integers(*range(2, rank))
    sums = p.add("ReduceSum", [_take(p, x, one, x_zero), axes])
    size = p.add("Cast", [p.add("ReduceProd", [p.add("Shape", [x], start=2)], keepdims=0)], to=FLOAT)
    steps = p.add("Mul", [sums, p.add("Div", [x_scale, p.add("Mul", [scale, size])])])
    _store(p, p.channels_last(steps, rank) if last else steps, one, _zero(p, zero))


def _qlinear_softmax(p: Parts) -> None:
    """Before opset 13 all axes from `axis` on were one."""
    old = p.attributes.get("opset", 13) < 13
    shape = p.shape(0)
    axis = p.attributes.get("axis", -1)
    x = _take(p, *p.inputs[:3])
    if old and axis % len(shape) != len(shape) - 1:
        x = p.reshaped(p.add("Softmax", [p.add("Flatten", [x], axis=axis)], axis=-1), *shape)
    else:
        x = p.add("Softmax", [x], axis=axis)
    _store(p, x, *p.inputs[3:5])


def _qlinear_where(p: Parts) -> None:
    x = p.inputs
    _store(p, p.add("Where", [x[0], _take(p, *x[1:4]), _take(p, *x[4:7])]), *x[7:9])


def _qlinear_concat(p: Parts) -> None:
    """(y's scale, zero point, and of each part x, scale, zero point)"""
    x = [*p.node.input]
    taken = [_take(p, *x[i : i + 3]) for i in range(2, len(x), 3)]
    _store(p, p.add("Concat", taken, **_kept(p)), *x[:2])


def _qlinear_reduce_mean(p: Parts) -> None:
    axes = p.integers(*p.attributes.get("axes", ()))
    mean = p.add("ReduceMean", [_take(p, *p.inputs[:3]), axes], keepdims=p.attributes.get("keepdims", 1))
    _store(p, mean, *p.inputs[3:5])


def _qlinear_conv(p: Parts) -> None:
    """The standard's, maybe with channels last; the filters are as the standard has them."""
    if not p.attributes.get("channels_last"):
        _standard(p)
        return
    rank = len(p.shape(0))
    first = p.add("QLinearConv", [p.channels_first(p.inputs[0], rank), *p.inputs[1:9]], **_kept(p))
    p.channels_last(first, rank, p.outputs[0])


def _qgemm(p: Parts) -> None:
    """(a, scale, zero, b, scale, zero, c, y's scale, zero): c has a's scale times b's and alpha; without y's scale y is float."""
    x, attributes = p.inputs, p.attributes
    c, y_scale, y_zero = x[6:9]
    a, b = (
        p.add("Transpose", [name], perm=[1, 0]) if attributes.get(flag) else name
        for name, flag in ((x[0], "transA"), (x[3], "transB"))
    )
    alpha = p.constant(np.float32(attributes.get("alpha", 1.0)))
    scale = p.add("Mul", [p.add("Mul", [alpha, x[1]]), x[4]])
    total = p.add("MatMulInteger", [a, b, x[2], x[5]])
    total = p.add("Cast", [p.add("Add", [total, c]) if c else total], to=FLOAT)
    if y_scale:
        _store(p, p.add("Mul", [total, p.add("Div", [scale, y_scale])]), p.constant(np.float32(1.0)), y_zero)
    else:
        p.add("Mul", [total, scale], p.outputs[0])


# --- Products of integers whose results are floats ----------------------------------------------------------------------


def scaled_product(p: Parts, operands: Sequence[str], scales: Sequence[str], bias: str, y: str = "") -> str:
    """MatMulInteger of (a, b, a's zero point, b's zero point) times both scales, plus bias."""
    product = p.add("Cast", [p.add("MatMulInteger", operands)], to=FLOAT)
    product = p.add("Mul", [product, p.add("Mul", scales)], "" if bias else y)
    return p.add("Add", [product, bias], y) if bias else product


def _matmul_integer_to_float(p: Parts) -> None:
    """(a, b, a's scale, b's scale, a's zero point, b's zero point, bias)"""
    a, b, a_scale, b_scale, a_zero, b_zero, bias = p.inputs[:7]
    if np.prod(p.shape(2)) != 1:
        raise p.refused("a's scale is not one number", "quantize a with one scale")
    y = scaled_product(p, [a, b, a_zero, b_zero], [a_scale, b_scale], bias)
    p.add("CastLike", [y, a_scale], p.outputs[0])


def _dynamic_quantize_matmul(p: Parts) -> None:
    """(a, b, b's scale, b's zero point, bias): a is quantized by its own range."""
    a, b, b_scale, b_zero, bias = p.inputs[:5]
    quantized, a_scale, a_zero = p.add_many("DynamicQuantizeLinear", [a], ["", "", ""])
    scaled_product(p, [quantized, b, a_zero, b_zero], [a_scale, b_scale], bias, p.outputs[0])


# --- Weights that are kept in few bits ------------------------------------------------------------------------------------


def _digits(p: Parts, packed: str, shape: Sequence[int], bits: int) -> str:
    """Numbers of so many bits, unpacked along the last axis of what has this shape, the lowest bits first."""
    if bits == 8:
        return packed
    digits = []
    for shift in range(0, 8, bits):
        moved = p.add("BitShift", [packed, p.constant(np.uint8(shift))], direction="RIGHT") if shift else packed
        low = p.add("BitwiseAnd", [moved, p.constant(np.uint8(2**bits - 1))])
        digits.append(p.reshaped(low, *shape, 1))
    return p.reshaped(p.add("Concat", digits, axis=-1), *shape[:-1], shape[-1] * 8 // bits)


def _few_bits(p: Parts, *choices: int) -> int:
    bits = p.attributes.get("bits", 4)
    if bits not in choices:
        raise p.refused(f"its bits are {bits}", f"quantize to {' or '.join(map(str, choices))} bits")
    return bits


def _matmul_n_bits(p: Parts) -> None:
    """x times the transpose of weights (N, blocks, bytes of a block), dequantized: (x, weights, scales, zero points, …, bias)."""
    bits, block = _few_bits(p, 2, 4, 8), p.attributes["block_size"]
    rows, terms = p.attributes["N"], p.attributes["K"]
    p.need(
        rows > 0 and terms > 0 and block >= 16 and not block & (block - 1), f"its N, K and block_size are {rows, terms, block}"
    )
    blocks = ceil_div(terms, block)
    if p.inputs[4] or p.attributes.get("weight_prepacked"):
        raise p.refused("its weights are in the order of one device or another", "leave g_idx and weight_prepacked away")
    p.need_shape(1, "weights", (rows, blocks, block * bits // 8))
    p.need_shape(2, "scales", (rows, blocks), (rows * blocks,))
    weights = _digits(p, p.inputs[1], p.shape(1), bits)
    weights = p.reshaped(weights, rows, blocks * block)
    scales = p.reshaped(p.inputs[2], rows, blocks)
    if p.inputs[3] and p.dtype(3).kind == "f":
        p.need_shape(3, "zero points", (rows, blocks), (rows * blocks,))
        apart = p.add("CastLike", [p.reshaped(weights, rows, blocks, block), scales])
        apart = p.add("Sub", [apart, p.add("CastLike", [p.reshaped(p.inputs[3], rows, blocks, 1), scales])])
        weights = p.reshaped(p.add("Mul", [apart, p.reshaped(scales, rows, blocks, 1)]), rows, blocks * block)
    else:
        zeros = _zero_points(p, rows, blocks, bits)
        weights = p.add("DequantizeLinear", [weights, scales, zeros], axis=1, block_size=block)
    weights = p.sliced(weights, 1, 0, terms)
    product = p.add("MatMul", [p.inputs[0], p.add("Transpose", [weights], perm=[1, 0])], "" if p.inputs[5] else p.outputs[0])
    if p.inputs[5]:
        p.need_shape(5, "bias", (rows,))
        p.add("Add", [product, p.inputs[5]], p.outputs[0])


def _zero_points(p: Parts, rows: int, blocks: int, bits: int) -> str:
    """Of blocks of few bits, packed as these are; the middle of the range where there are none."""
    if not p.inputs[3]:
        return p.add("Expand", [p.constant(np.uint8(2 ** (bits - 1))), p.integers(rows, blocks)])
    packed = ceil_div(blocks * bits, 8)
    p.need_shape(3, "zero points", (rows, packed), (rows * packed,))
    return p.sliced(_digits(p, p.reshaped(p.inputs[3], rows, packed), (rows, packed), bits), 1, 0, blocks)


FP4 = np.array([0, 0.0625 / 12, 8 / 12, 1, 4 / 12, 6 / 12, 2 / 12, 3 / 12], np.float32)
NF4 = np.array(
    [-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
     -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
     0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0], np.float32,
)  # fmt: skip
"""What the numbers 0 to 15 stand for in bitsandbytes' types of four bits; FP4's upper half are the negative ones."""


def _matmul_bnb4(p: Parts) -> None:
    """x times the transpose of weights (N, K) in bitsandbytes' four bits: (x, weights, largest magnitude of each block)."""
    if not p.attributes.get("transB", 1):
        raise p.refused("its weights are not transposed (transB is 0), as in training", "export the model for inference")
    rows, terms, block = p.attributes["N"], p.attributes["K"], p.attributes["block_size"]
    size, kind = rows * terms, p.attributes["quant_type"]
    p.need(kind in (0, 1), f"its quant_type is {kind}; it must be 0 or 1")
    p.need(rows > 0 and terms > 0 and block >= 16, f"its N, K and block_size are {rows, terms, block}")
    blocks = ceil_div(size, block)
    p.need_shape(1, "weights", (ceil_div(size, 2),), (ceil_div(size, 2), 1))
    p.need_shape(2, "absmax", (blocks,))
    table = NF4 if kind else np.concatenate([FP4, -FP4])
    pairs = p.constant(np.stack([np.repeat(table, 16), np.tile(table, 16)], 1))  # the first is the upper half of a byte
    values = p.add("Gather", [pairs, p.add("Cast", [p.reshaped(p.inputs[1], -1)], to=onnx.TensorProto.INT32)])
    values = p.sliced(p.reshaped(values, -1), 0, 0, size)
    if size % block:
        values = p.add("Pad", [values, p.integers(0, blocks * block - size)])
    largest = p.add("Cast", [p.reshaped(p.inputs[2], blocks, 1)], to=FLOAT)
    weights = p.reshaped(p.add("Mul", [p.reshaped(values, blocks, block), largest]), -1)
    weights = p.reshaped(p.sliced(weights, 0, 0, size), rows, terms)
    weights = p.add("Transpose", [weights], perm=[1, 0])
    if p.dtype(0) != np.float32:
        weights = p.add("CastLike", [weights, p.inputs[0]])
    p.add("MatMul", [p.inputs[0], weights], p.outputs[0])


def _gather_block_quantized(p: Parts) -> None:
    """Gather from a table that is dequantized: (table, indices, scales, zero points), in blocks along one axis."""
    rank, block = len(p.shape(0)), p.attributes.get("block_size", 128)
    axis, along = (p.attributes.get(name, default) for name, default in (("quantize_axis", 1), ("gather_axis", 0)))
    p.need(-rank <= axis < rank and -rank <= along < rank, f"its axes are {axis} and {along}, for {rank} axes")
    if p.dtype(0).kind not in "iu" or block < 16:
        raise p.refused("its table is of floats of few bits", "quantize it to integers, in blocks of 16 or more")
    axis, table, shape, bits = axis % rank, p.inputs[0], p.shape(0), _few_bits(p, 2, 4, 8)
    wide = (*shape[:-1], shape[-1] * 8 // bits)
    packed = p.dtype(0) == np.uint8 and _is_packed(p, shape, wide, axis, block)
    if packed:
        table, shape = _digits(p, table, shape, bits), wide
    p.need(p.shape(2) == _in_blocks(shape, axis, block), f"its scales are {p.shape(2)}, for {shape}")
    zero = p.inputs[3]
    if zero and packed:
        zero = p.sliced(_digits(p, zero, p.shape(3), bits), -1, 0, p.shape(2)[-1])
    elif packed:
        zero = p.add("Expand", [p.constant(np.uint8(2 ** (bits - 1))), p.integers(*p.shape(2))])
    floats = p.add("DequantizeLinear", [table, p.inputs[2], zero], axis=axis, block_size=block)
    p.add("Gather", [floats, p.inputs[1]], p.outputs[0], axis=along)


def _in_blocks(shape: Shape, axis: int, block: int) -> Shape:
    return tuple(ceil_div(n, block) if a == axis else n for a, n in enumerate(shape))


def _is_packed(p: Parts, shape: Shape, wide: Shape, axis: int, block: int) -> bool:
    """Whether bytes hold several numbers each, or one of a type of four bits: their scales say it, or bytes beyond 15."""
    narrow, packed = (p.shape(2) == _in_blocks(s, axis, block) for s in (shape, wide))
    if narrow and packed and shape != wide:
        if p.value(0, "table").max(initial=0) < 16:
            raise p.refused("its bytes may hold one number or several", "use blocks no larger than the axis that they are along")
        return True
    return packed


def _dynamic_quantize_lstm(p: Parts) -> None:
    """An LSTM by weights (directions, inputs, gates), dequantized; what it multiplies them by is not rounded to 8 bits:
    (x, w, r, bias, lengths, h, c, peepholes, w's scale, w's zero point, r's scale, r's zero point)"""
    weights = []
    for i, scale, zero in (1, 8, 9), (2, 10, 11):
        directions, _, gates = shape = p.shape(i)
        floats = p.add("Cast", [p.inputs[i]], to=FLOAT)
        for op, j in ("Sub", zero), ("Mul", scale):
            p.need_shape(j, "scale or zero point", (directions,), (directions, gates), (directions, 1), (1,), ())
            rows, columns = (*p.shape(j), 1, 1)[:2]
            floats = p.add(op, [floats, p.add("Cast", [p.reshaped(p.inputs[j], rows, 1, columns)], to=FLOAT)])
        p.need(len(shape) == 3, f"its weights are {shape}")
        weights.append(p.add("Transpose", [floats], perm=[0, 2, 1]))
    p.attributes.setdefault("hidden_size", p.shape(2)[1])
    p.add_many("LSTM", [p.inputs[0], *weights, *p.inputs[3:8]], p.node.output, **p.attributes)


OPERATORS: dict[str, Operator] = {
    **dict.fromkeys(("DequantizeLinear", "QuantizeLinear"), _standard),
    "DynamicQuantizeLSTM": _dynamic_quantize_lstm,
    "DynamicQuantizeMatMul": _dynamic_quantize_matmul,
    "GatherBlockQuantized": _gather_block_quantized,
    "MatMulBnb4": _matmul_bnb4,
    "MatMulIntegerToFloat": _matmul_integer_to_float,
    "MatMulNBits": _matmul_n_bits,
    "QGemm": _qgemm,
    "QLinearAdd": _qlinear_add,
    "QLinearAveragePool": _unary("AveragePool", _store_quotient),
    "QLinearConcat": _qlinear_concat,
    "QLinearConv": _qlinear_conv,
    "QLinearGlobalAveragePool": _qlinear_global_average_pool,
    "QLinearLeakyRelu": _unary("LeakyRelu"),
    "QLinearMul": _qlinear_mul,
    "QLinearReduceMean": _qlinear_reduce_mean,
    "QLinearSigmoid": _unary("Sigmoid"),
    "QLinearSoftmax": _qlinear_softmax,
    "QLinearWhere": _qlinear_where,
}
