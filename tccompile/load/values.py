"""What one node makes of constants: as a transform whose provenance stays, or as literals by ONNX's evaluator."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
import onnx.defs
import onnx.helper
import onnx.numpy_helper
import onnx.reference
import onnx.shape_inference

from tccompile.ir.extent import ceil_div
from tccompile.load.constants import Weight, dequantized, derived, held, literal
from tccompile.load.narrow import wide
from tccompile.load.nodes import (
    tensor_values,
    widened,
)
from tccompile.load.types import Type
from tccompile.load.valid import title


def attribute(node: onnx.NodeProto, name: str, default: Any = None) -> Any:
    return next((onnx.helper.get_attribute_value(a) for a in node.attribute if a.name == name), default)


def reference(node: onnx.NodeProto, inputs: list[Weight | None], opsets: list[onnx.OperatorSetIdProto]) -> list[Weight]:
    """The node's outputs by ONNX's reference evaluator, as literals."""
    names = list(dict.fromkeys(name for name in node.input if name))
    graph = onnx.helper.make_graph(
        [node], "constant", [onnx.helper.make_empty_tensor_value_info(n) for n in names],
        [onnx.helper.make_empty_tensor_value_info(y) for y in node.output if y],
    )  # fmt: skip
    feeds = {name: w.values for name, w in zip(node.input, inputs, strict=True) if w is not None}
    with np.errstate(all="ignore"):
        out = onnx.reference.ReferenceEvaluator(onnx.helper.make_model(graph, opset_imports=opsets)).run(None, feeds)
    values = iter(out)
    return [literal("", widened(np.asarray(next(values)))) if y else literal("", 0) for y in node.output]


How = Callable[[onnx.NodeProto, list[Any], Type], "list[Weight] | None"]
"""A node as a transform of its constant inputs, so that the provenance stays; None if no transform says what it does."""


def _plain(fn: str, floats_only: bool = False) -> How:
    def how(node: onnx.NodeProto, x: list[Any], y: Type) -> list[Weight] | None:
        if floats_only and y.dtype.kind != "f":
            return None
        with np.errstate(all="ignore"):
            return [derived("", fn, *x)]

    return how


def _reshape(node: onnx.NodeProto, x: list[Any], y: Type) -> list[Weight]:
    return [derived("", "reshape", x[0], shape=y.shape)]


def _expand(node: onnx.NodeProto, x: list[Any], y: Type) -> list[Weight]:
    return [derived("", "expand", x[0], shape=y.shape)]


def _constant_of_shape(node: onnx.NodeProto, x: list[Any], y: Type) -> list[Weight]:
    value = attribute(node, "value")
    number = np.zeros((), np.float32) if value is None else tensor_values(value, title(node)).reshape(())
    return [derived("", "expand", number, shape=y.shape)]


def _transpose(node: onnx.NodeProto, x: list[Any], y: Type) -> list[Weight]:
    axes = attribute(node, "perm", tuple(reversed(range(len(y.shape)))))
    return [derived("", "transpose", x[0], axes=tuple(axes))]


def _cast(node: onnx.NodeProto, x: list[Any], y: Type) -> list[Weight] | None:
    if y.elem == onnx.TensorProto.FLOAT8E4M3FN and attribute(node, "saturate", 1) and x[0].dtype.kind == "f":
        return [derived("", "float8", derived("", "cast", x[0], dtype="float32"))]
    if y.dtype.kind not in "biuf" or y.elem != wide(y.elem):
        return None
    with np.errstate(all="ignore"):
        return [derived("", "cast", x[0], dtype=y.dtype.name)]


def _concat(node: onnx.NodeProto, x: list[Any], y: Type) -> list[Weight]:
    return [derived("", "concat", *x, axis=attribute(node, "axis"))]


def _gather(node: onnx.NodeProto, x: list[Any], y: Type) -> list[Weight]:
    return [derived("", "take", *x, axis=attribute(node, "axis", 0))]


def _slice(node: onnx.NodeProto, x: list[Any], y: Type) -> list[Weight]:
    shape = x[0].shape
    starts, ends = x[1].values.tolist(), x[2].values.tolist()
    axes = x[3].values.tolist() if len(x) > 3 and x[3] is not None else range(len(starts))
    steps = x[4].values.tolist() if len(x) > 4 and x[4] is not None else [1] * len(starts)
    cut: list[tuple[int, int | None, int]] = [(0, n, 1) for n in shape]
    for start, end, axis, step in zip(starts, ends, axes, steps, strict=True):
        first, last, _ = slice(start, end, step).indices(shape[axis])
        cut[axis] = first, (None if last < 0 else last), step
    bounds = zip(*cut, strict=True)
    return [derived("", "slice", x[0], **dict(zip(("starts", "ends", "steps"), bounds, strict=True)))]


def _split(node: onnx.NodeProto, x: list[Any], y: Type) -> list[Weight]:
    axis, shape = attribute(node, "axis", 0) % len(y.shape), x[0].shape
    size, count = y.shape[axis], len(node.output)
    ends = np.cumsum(x[1].values).tolist() if len(x) > 1 and x[1] is not None else [(i + 1) * size for i in range(count)]
    parts, begin, first = [], 0, (0,) * len(shape)
    for end in (min(end, shape[axis]) for end in ends):
        starts, stops = (*first[:axis], begin, *first[axis + 1 :]), (*shape[:axis], end, *shape[axis + 1 :])
        parts.append(derived("", "slice", x[0], starts=starts, ends=stops, steps=(1,) * len(shape)))
        begin = end
    return parts


def _tile(node: onnx.NodeProto, x: list[Any], y: Type) -> list[Weight]:
    pairs = list(zip(x[1].values.tolist(), x[0].shape, strict=True))
    apart = derived("", "reshape", x[0], shape=[n for _, extent in pairs for n in (1, extent)])
    return [derived("", "reshape", derived("", "expand", apart, shape=[n for pair in pairs for n in pair]), shape=y.shape)]


def _norm(node: onnx.NodeProto, x: list[Any], y: Type) -> list[Weight] | None:
    """The root of the sum of squares, by a product with ones: weights that are normalized come so."""
    rank = len(x[0].shape)
    axes = [axis % rank for axis in x[1].values.tolist()] if len(x) > 1 and x[1] is not None else [*range(rank)]
    if y.dtype != np.float32 or not axes or not all(x[0].shape):
        return None
    order = [*(axis for axis in range(rank) if axis not in axes), *axes]
    terms = math.prod(x[0].shape[axis] for axis in axes)
    rows = derived("", "reshape", derived("", "transpose", x[0], axes=order), shape=(-1, terms))
    sums = derived("", "matmul", derived("", "mul", rows, rows), np.ones((terms, 1), np.float32))
    return [derived("", "reshape", derived("", "sqrt", sums), shape=y.shape)]


def _pad(node: onnx.NodeProto, x: list[Any], y: Type) -> list[Weight] | None:
    zero = len(x) < 3 or x[2] is None or not x[2].values.any()
    pads = x[1].values.tolist()
    if attribute(node, "mode", b"constant") != b"constant" or not zero or min(pads, default=0) < 0 or len(x) > 3:
        return None
    rank = len(pads) // 2
    return [derived("", "pad", x[0], before=tuple(pads[:rank]), after=tuple(pads[rank:]))]


def _gather_elements(node: onnx.NodeProto, x: list[Any], y: Type) -> list[Weight]:
    axis = attribute(node, "axis", 0)
    return [literal("", np.take_along_axis(x[0].values, x[1].values, axis))]


def _shift(node: onnx.NodeProto, x: list[Any], y: Type) -> list[Weight] | None:
    return [derived("", "right_shift", *x)] if attribute(node, "direction") == b"RIGHT" else None


def _dequantize(node: onnx.NodeProto, x: list[Any], y: Type) -> list[Weight] | None:
    """(x - zero_point) * scale, with one scale a tensor, one an extent of `axis`, or one a block along it."""
    block, shape = attribute(node, "block_size", 0), list(y.shape)
    if not block or not shape or x[1].dtype.kind != "f":
        return _dequantize_along(node, x, y)
    axis = attribute(node, "axis", 1) % len(shape)
    blocks = ceil_div(shape[axis], block)

    missing = blocks * block - shape[axis]  # of the last block, which may be shorter
    apart, once = ((*shape[:axis], blocks, n, *shape[axis + 1 :]) for n in (block, 1))
    numbers = derived("", "cast", x[0], dtype="float32")
    if missing:
        numbers = derived("", "pad", numbers, before=(0,) * len(shape), after=[missing * (a == axis) for a in range(len(shape))])
    out = derived("", "reshape", numbers, shape=apart)
    if len(x) > 2 and x[2] is not None:
        out = derived("", "sub", out, derived("", "reshape", derived("", "cast", x[2], dtype="float32"), shape=once))
    out = derived("", "mul", out, derived("", "reshape", derived("", "cast", x[1], dtype="float32"), shape=once))
    out = derived("", "reshape", out, shape=(*shape[:axis], blocks * block, *shape[axis + 1 :]))
    if missing:
        out = derived("", "slice", out, starts=(0,) * len(shape), ends=tuple(shape), steps=(1,) * len(shape))
    return [out if y.dtype == np.float32 else derived("", "cast", out, dtype=y.dtype.name)]


def _dequantize_along(node: onnx.NodeProto, x: list[Any], y: Type) -> list[Weight] | None:
    """The same without blocks."""
    scale = x[1]
    if held(scale).ndim > 1 or attribute(node, "block_size", 0) or scale.dtype.kind != "f":
        return None
    out = dequantized(x[0], scale, x[2] if len(x) > 2 else None, attribute(node, "axis", 1))
    return [out if y.dtype == np.float32 else derived("", "cast", out, dtype=y.dtype.name)]


def _quantize(node: onnx.NodeProto, x: list[Any], y: Type) -> list[Weight] | None:
    """round(x / scale) + zero point, saturated: ONNX's evaluator is wrong beyond int32, and divides halves as such, which ONNX
    Runtime does in float32. NaN becomes the least number."""
    values, scale, zero = x[0].values, x[1].values, x[2].values if len(x) > 2 and x[2] is not None else np.zeros((), y.dtype)
    if not {values.dtype, scale.dtype} <= HALVES_AND_FLOATS or str(y.dtype) not in QUANTIZED:
        return None
    axis, block = attribute(node, "axis", 1), attribute(node, "block_size", 0)

    def lying(parameter: np.ndarray) -> np.ndarray:
        """Scales or zero points as what is broadcast to the values."""
        numbers = parameter.astype(np.float32)
        if block and numbers.ndim == values.ndim:
            return np.repeat(numbers, block, axis).take(range(values.shape[axis]), axis)  # the last block may be shorter
        shape = [-1 if a == axis % values.ndim else 1 for a in range(values.ndim)] if numbers.size > 1 else [1] * values.ndim
        return numbers.reshape(shape if numbers.ndim else ())

    limits = np.iinfo(y.dtype)
    with np.errstate(all="ignore"):
        moved = np.rint(values.astype(np.float32) / lying(scale)) + lying(zero)
    return [literal("", np.where(moved > limits.min, np.minimum(moved, limits.max), limits.min).astype(y.dtype))]


HALVES_AND_FLOATS = {np.dtype(np.float16), np.dtype(np.float32)}

QUANTIZED = ("int8", "uint8", "int16", "uint16")

TRANSFORMED: dict[str, How] = {
    "Add": _plain("add"),
    "BitShift": _shift,
    "BitwiseAnd": _plain("bitwise_and"),
    "Cast": _cast,
    "Concat": _concat,
    "ConstantOfShape": _constant_of_shape,
    "DequantizeLinear": _dequantize,
    "Div": _plain("div", floats_only=True),
    "Expand": _expand,
    "Flatten": _reshape,
    "Gather": _gather,
    "GatherElements": _gather_elements,
    "MatMul": _plain("matmul", floats_only=True),
    "Mul": _plain("mul"),
    "Neg": _plain("neg"),
    "Pad": _pad,
    "QuantizeLinear": _quantize,
    "ReduceL2": _norm,
    "Reshape": _reshape,
    "Slice": _slice,
    "Split": _split,
    "Sqrt": _plain("sqrt"),
    "Squeeze": _reshape,
    "Sub": _plain("sub"),
    "Tile": _tile,
    "Transpose": _transpose,
    "Unsqueeze": _reshape,
}
