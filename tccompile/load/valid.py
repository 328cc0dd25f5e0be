"""What the standard asks of a node and ONNX's own checks leave out: values of attributes, types and shapes of inputs.

Each function gives what is wrong with a node of the standard's own, or None; attributes are those of Microsoft's operators too.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import onnx
import onnx.defs
import onnx.helper

from tccompile.errors import ModelError
from tccompile.ir.extent import Shape, ceil_div
from tccompile.ir.ops.rnn import GATES

FLAGS = frozenset((
    "align_corners", "allowzero", "antialias", "causal", "ceil_mode", "channels_last", "count_include_pad",
    "detect_negative", "detect_positive", "do_rotary", "exclude_outside", "exclusive", "fmod", "input_forget",
    "interleaved", "inverse", "is_bidirectional", "is_causal", "is_inner_broadcast", "keepdims", "largest", "layout",
    "linear_before_reset", "new_axis", "noop_with_empty_axes", "onesided", "past_present_share_buffer", "periodic",
    "reverse", "rotary_interleaved", "saturate", "select_last_index", "sorted", "storage_order", "training_mode", "transA",
    "transB", "transBatchA", "transBatchB", "unidirectional", "upper",
))  # fmt: skip
"""Attributes that are 0 or 1."""

_AUTO_PAD = ("NOTSET", "SAME_UPPER", "SAME_LOWER", "VALID")
_DIRECTIONS = ("forward", "reverse", "bidirectional")
_LOSS = ("none", "mean", "sum")
_PLACES = ("DCR", "CRD")
_UPDATES = ("none", "add", "mul", "min", "max")

CHOICES: dict[tuple[str, str], tuple[Any, ...]] = {
    **{(op, "auto_pad"): _AUTO_PAD for op in (
        "AveragePool", "Conv", "ConvInteger", "ConvTranspose", "LpPool", "MaxPool", "QLinearConv")},
    **{(op, "direction"): _DIRECTIONS for op in ("GRU", "LSTM", "RNN")},
    **{(op, "reduction"): _LOSS for op in ("NegativeLogLikelihoodLoss", "SoftmaxCrossEntropyLoss")},
    **{(op, "reduction"): _UPDATES for op in ("ScatterElements", "ScatterND")},
    **{(op, "round_mode"): ("up", "down", "nearest") for op in ("Cast", "CastLike")},
    ("Attention", "qk_matmul_output_mode"): (0, 1, 2, 3),
    ("BitShift", "direction"): ("LEFT", "RIGHT"),
    ("DepthToSpace", "mode"): _PLACES,
    ("Gelu", "approximate"): ("none", "tanh"),
    ("GridSample", "mode"): ("linear", "nearest", "cubic"),
    ("GridSample", "padding_mode"): ("zeros", "border", "reflection"),
    ("LpNormalization", "p"): (1, 2),
    ("Pad", "mode"): ("constant", "reflect", "edge", "wrap"),
    ("Resize", "coordinate_transformation_mode"): (
        "half_pixel", "half_pixel_symmetric", "pytorch_half_pixel", "align_corners", "asymmetric", "tf_crop_and_resize",
        "tf_half_pixel_for_nn"),
    ("Resize", "keep_aspect_ratio_policy"): ("stretch", "not_larger", "not_smaller"),
    ("Resize", "mode"): ("nearest", "linear", "cubic"),
    ("Resize", "nearest_mode"): ("round_prefer_floor", "round_prefer_ceil", "floor", "ceil"),
    ("ReverseSequence", "batch_axis"): (0, 1),
    ("ReverseSequence", "time_axis"): (0, 1),
    ("RoiAlign", "coordinate_transformation_mode"): ("half_pixel", "output_half_pixel"),
    ("RoiAlign", "mode"): ("avg", "max"),
    ("SpaceToDepth", "mode"): _PLACES,
    ("TensorScatter", "mode"): ("linear", "circular"),
}  # fmt: skip
"""What attributes may be, by operator and name."""

LEAST: dict[tuple[str, str], int] = {
    **{(op, "group"): 1 for op in ("Conv", "ConvInteger", "ConvTranspose", "DeformConv", "QLinearConv")},
    **{(op, "p"): 1 for op in ("GlobalLpPool", "LpPool")},
    **{(op, "block_size"): 0 for op in ("DequantizeLinear", "QuantizeLinear")},
    **{(op, "blocksize"): 1 for op in ("DepthToSpace", "SpaceToDepth")},
    **{("Attention", heads): 1 for heads in ("q_num_heads", "kv_num_heads")},
    ("DeformConv", "offset_group"): 1,
    ("GatherND", "batch_dims"): 0,
    ("GroupNormalization", "num_groups"): 1,
    ("LRN", "size"): 1,
    ("RoiAlign", "sampling_ratio"): 0,
    ("Scan", "num_scan_inputs"): 1,
}
"""The least that integers may be, by operator and name."""


_LETTERS = r"[A-Za-z ]*(?:\.\.\.[A-Za-z ]*)?"
EQUATION = re.compile(rf"{_LETTERS}(?:,{_LETTERS})*(?:->{_LETTERS})?")
"""What an Einsum says: ONNX's rule for its shape never ends at some other signs."""

POSITIVE = ("dilations", "kernel_shape", "output_shape", "strides")
"""Attributes whose numbers are at least 1."""

TYPES = ("dtype", "output_datatype", "output_dtype", "to")
"""Attributes that are element types."""


DECIDES: dict[str, tuple[int, ...]] = {
    "AffineGrid": (1,),
    "BlackmanWindow": (0,),
    "CenterCropPad": (1,),
    "Col2Im": (1, 2),
    "ConstantOfShape": (0,),
    "ConvTranspose": (1, 2),
    "CumProd": (1,),
    "CumSum": (1,),
    "DFT": (1, 2),
    "Dropout": (1, 2),
    "Expand": (1,),
    "HammingWindow": (0,),
    "HannWindow": (0,),
    "If": (0,),
    "Loop": (0, 1),
    "MaxUnpool": (2,),
    "MelWeightMatrix": (0, 1, 2, 3, 4),
    "NonMaxSuppression": (2, 3, 4),
    "OneHot": (1, 2),
    "Pad": (1, 2, 3),
    "Range": (0, 1, 2),
    "Reshape": (1,),
    "Resize": (1, 2, 3),
    "STFT": (1, 3),
    "SequenceAt": (1,),
    "SequenceInsert": (2,),
    "Slice": (1, 2, 3, 4),
    "Split": (1,),
    "SplitToSequence": (1,),
    "Squeeze": (1,),
    "Tile": (1,),
    "TopK": (1,),
    "Trilu": (1,),
    "Unique": (0,),
    "Unsqueeze": (1,),
    "Upsample": (1,),
    **{f"Reduce{kind}": (1,) for kind in ("L1", "L2", "LogSum", "LogSumExp", "Max", "Mean", "Min", "Prod", "Sum", "SumSquare")},
}
"""Inputs, by op and position, whose values are needed to compile: they say a result's shape, or what goes where."""


def title(node: onnx.NodeProto) -> str:
    """What an error calls a node."""
    op = f"{node.domain}.{node.op_type}" if node.domain not in ("", "ai.onnx") else node.op_type
    return f"node {node.name or next(iter(node.output), '')!r} ({op})"


def invalid(node: onnx.NodeProto, why: str) -> ModelError:
    """The error about a node that is not what the standard asks for."""
    return ModelError(f"{title(node)} is not valid: {why}")


def attributes(node: onnx.NodeProto) -> dict[str, Any]:
    """Their values by name, strings as such."""
    values = {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}
    return {name: v.decode(errors="replace") if isinstance(v, bytes) else v for name, v in values.items()}


def wrong_attribute(node: onnx.NodeProto) -> str | None:
    """An attribute whose value has no meaning; of other operators than the standard's, only what all have in common."""
    op = node.op_type if node.domain in ("", "ai.onnx") else ""
    for name, value in attributes(node).items():
        choices = (0, 1) if name in FLAGS else CHOICES.get((op, name))
        if choices is not None and value not in choices:
            return f"its {name} is {value!r}; it must be {', '.join(map(repr, choices[:-1]))} or {choices[-1]!r}"
        least = LEAST.get((op, name))
        if least is not None and not (isinstance(value, int) and value >= least):
            return f"its {name} is {value!r}; it must be at least {least}"
        if name in POSITIVE and min(value, default=1) < 1:
            return f"its {name} are {value}; they must be at least 1"
        if name == "equation" and not EQUATION.fullmatch(value):
            return (
                f"its equation is {value!r}; it must be letters and ... for each input, commas between them, -> before the result"
            )
        if name in TYPES and value not in onnx.TensorProto.DataType.values()[name != "output_dtype" :]:
            return f"its {name} is {value}, which is no element type"
    return None


# --- Types -----------------------------------------------------------------------------------------------------------


def wrong_type(node: onnx.NodeProto, types: Sequence[int | None], schema: onnx.defs.OpSchema) -> str | None:
    """An input of a type that the operator does not take, or of another than the one that it must share.

    None stands for an input that is left out, which not all may be.
    """
    bound: dict[str, int] = {}
    for i, elem in enumerate(types):
        formal = schema.inputs[min(i, len(schema.inputs) - 1)]
        if elem is None and formal.option != onnx.defs.OpSchema.FormalParameterOption.Optional:
            return f"its {formal.name} is left out; the operator cannot do without"
        if elem is None:
            continue
        own = onnx.TensorProto.DataType.Name(elem).lower()
        narrow = any("float8" in t or "float4" in t for t in formal.types)  # constants of these have been widened
        if f"tensor({own})" not in formal.types and not (narrow and elem == onnx.TensorProto.FLOAT):
            return f"its {formal.name} ({node.input[i]}) is {own}, which the operator does not take there"
        if formal.is_homogeneous and bound.setdefault(formal.type_str, elem) != elem:
            other = onnx.TensorProto.DataType.Name(bound[formal.type_str]).lower()
            return f"its {formal.name} ({node.input[i]}) is {own}, and another input is {other}; they must be of one type"
    return None


# --- Shapes ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Shapes:
    """Those of a node's inputs, None where one is left out, and of its first output, () if that is; and its attributes."""

    inputs: Sequence[Shape | None]
    output: Shape
    attributes: dict[str, Any]

    @property
    def x(self) -> Shape:
        return self[0] or ()

    def __getitem__(self, i: int) -> Shape | None:
        return self.inputs[i] if i < len(self.inputs) else None


Rule = Callable[[Shapes], Iterator[tuple[bool, str]]]
"""What must hold, one after the other, and what to say if it does not."""


def wrong_shapes(op: str, shapes: Shapes) -> str | None:
    """Shapes of inputs that do not fit each other, the attributes, or the output."""
    rule = RULES.get(op)
    return next((why for holds, why in rule(shapes) if not holds), None) if rule else None


def _text(shape: Shape | None) -> str:
    return "×".join(map(str, shape)) or "a scalar" if shape is not None else "left out"


def _broadcasts(shape: Shape, to: Shape) -> bool:
    """Whether a tensor broadcasts to a shape that stays what it is."""
    return len(shape) <= len(to) and all(n in (1, m) for n, m in zip(shape[::-1], to[::-1], strict=False))


def _one(s: Shapes, *inputs: tuple[int, str]) -> Iterator[tuple[bool, str]]:
    """These inputs, with what they are called, have one element."""
    for i, what in inputs:
        shape = s[i]
        yield shape is None or math.prod(shape) == 1, f"its {what} is {_text(shape)}; it must be one number"


def _are(s: Shapes, *inputs: tuple[int, str, Shape]) -> Iterator[tuple[bool, str]]:
    """These inputs, with what they are called, have these shapes."""
    for i, what, shape in inputs:
        yield s[i] in (None, shape), f"its {what} is {_text(s[i])}; it must be {_text(shape)}"


def _broadcast_to_x(s: Shapes) -> Iterator[tuple[bool, str]]:
    for shape in s.inputs[1:]:
        yield shape is None or _broadcasts(shape, s.x), f"{_text(shape)} does not broadcast to {_text(s.x)}"


def _channels(s: Shapes) -> Iterator[tuple[bool, str]]:
    yield len(s.x) >= 2, f"its input is {_text(s.x)}, which has no channels"
    yield from _are(s, (1, "scale", s.x[1:2]), (2, "bias", s.x[1:2]))
    groups = s.attributes.get("num_groups", 1)
    yield s.x[1] % groups == 0, f"its num_groups is {groups}, which does not divide {s.x[1]} channels"


def _lrn(s: Shapes) -> Iterator[tuple[bool, str]]:
    yield len(s.x) >= 2, f"its input is {_text(s.x)}, which has no channels"


def _affine_grid(s: Shapes) -> Iterator[tuple[bool, str]]:
    n = len(s.output) - 2
    yield from _are(s, (1, "size", (n + 2,)), (0, "theta", (*s.output[:1], n, n + 1)))


def _clip(s: Shapes) -> Iterator[tuple[bool, str]]:
    yield from _one(s, (1, "min"), (2, "max"))


def _stft(s: Shapes) -> Iterator[tuple[bool, str]]:
    yield from _one(s, (1, "frame_step"), (3, "frame_length"))


def _trilu(s: Shapes) -> Iterator[tuple[bool, str]]:
    yield from _one(s, (1, "k"))


def _arg(s: Shapes) -> Iterator[tuple[bool, str]]:
    axis = s.attributes.get("axis", 0)
    yield bool(s.x) and s.x[axis] > 0, f"it seeks among no elements, along axis {axis} of {_text(s.x)}"


def _reads(s: Shapes) -> Iterator[tuple[bool, str]]:
    yield 0 not in s.x or 0 in s.output, f"it makes {_text(s.output)} of {_text(s.x)}, which has no elements"


def _flatten(s: Shapes) -> Iterator[tuple[bool, str]]:
    axis = s.attributes.get("axis", 1)
    yield -len(s.x) <= axis <= len(s.x), f"its axis is {axis}, for {_text(s.x)}"


def _rotary_embedding(s: Shapes) -> Iterator[tuple[bool, str]]:
    x, heads, ids = s.x, s.attributes.get("num_heads", 0), s[3]
    yield len(x) == 4 or (len(x) == 3 and heads > 0 and x[2] % heads == 0), f"its num_heads is {heads}, for {_text(x)}"
    batch, steps, size = (x[0], x[2], x[3]) if len(x) == 4 else (x[0], x[1], x[2] // heads)
    half = (s.attributes.get("rotary_embedding_dim", 0) or size) // 2
    rows = (batch, steps) if ids is None else (s[1] or (0,))[:1]
    yield from _are(s, (3, "position_ids", (batch, steps)), (1, "cos_cache", (*rows, half)), (2, "sin_cache", (*rows, half)))


def _gemm(s: Shapes) -> Iterator[tuple[bool, str]]:
    yield s[2] is None or _broadcasts(s[2], s.output), f"its C is {_text(s[2])}, which does not broadcast to {_text(s.output)}"


def _filters(s: Shapes, w: int, bias: int | None, transposed: bool = False) -> Iterator[tuple[bool, str]]:
    """Of a convolution: `w` and `bias` are the inputs of these numbers."""
    x, f, group = s.x, s[w] or (), s.attributes.get("group", 1)
    yield len(x) == len(f) >= 3, f"its input is {_text(x)}, and its filters are {_text(f)}"
    kernel = tuple(s.attributes.get("kernel_shape", f[2:]))
    yield kernel == f[2:], f"its kernel_shape is {list(kernel)}, and its filters are {_text(f)}"
    inputs, outputs = (f[0], f[1] * group) if transposed else (f[1] * group, f[0])
    yield x[1] == inputs and f[0] % group == 0, f"its filters {_text(f)} in {group} groups do not fit {x[1]} channels"
    if bias is not None:
        yield from _are(s, (bias, "bias", (outputs,)))


def _conv(s: Shapes) -> Iterator[tuple[bool, str]]:
    yield from _filters(s, 1, 2)


def _conv_transpose(s: Shapes) -> Iterator[tuple[bool, str]]:
    yield from _filters(s, 1, 2, transposed=True)


def _conv_integer(s: Shapes) -> Iterator[tuple[bool, str]]:
    yield from _filters(s, 1, None)
    yield from _one(s, (2, "x_zero_point"))
    yield from _vectors(s, (3, "w_zero_point", s.inputs[1] or (), 0))


def _qlinear_conv(s: Shapes) -> Iterator[tuple[bool, str]]:
    yield from _filters(s, 3, 8)
    yield from _one(s, (1, "x_scale"), (2, "x_zero_point"), (6, "y_scale"), (7, "y_zero_point"))
    yield from _vectors(s, (4, "w_scale", s.inputs[3] or (), 0), (5, "w_zero_point", s.inputs[3] or (), 0))


def _deform_conv(s: Shapes) -> Iterator[tuple[bool, str]]:
    yield from _filters(s, 1, 3)
    taps, around = math.prod((s[1] or ())[2:]) * s.attributes.get("offset_group", 1), s.output[2:]
    yield from _are(s, (2, "offset", (s.x[0], taps * (len(s.x) - 2), *around)), (4, "mask", (s.x[0], taps, *around)))


def _vectors(s: Shapes, *inputs: tuple[int, str, Shape, int]) -> Iterator[tuple[bool, str]]:
    """These inputs, with what they are called, are one number, or one for each index of an axis of `of`, or broadcast to it."""
    for i, what, of, axis in inputs:
        shape = s[i]
        along = shape is not None and len(shape) == 1 and -len(of) <= axis < len(of) and shape[0] == of[axis]
        fits = shape is None or math.prod(shape) == 1 or along or (len(shape) > 1 and _broadcasts(shape, of))
        yield fits, f"its {what} is {_text(shape)}, which does not fit {_text(of)}"


def _matmul_integer(s: Shapes) -> Iterator[tuple[bool, str]]:
    yield from _vectors(s, (2, "a_zero_point", s.x, -2), (3, "b_zero_point", s.inputs[1] or (), -1))


def _qlinear_matmul(s: Shapes) -> Iterator[tuple[bool, str]]:
    a, b, y = s.x, s.inputs[3] or (), s.output
    yield from _vectors(s, (1, "a_scale", a, -2), (2, "a_zero_point", a, -2), (4, "b_scale", b, -1))
    yield from _vectors(s, (5, "b_zero_point", b, -1), (6, "y_scale", y, -2), (7, "y_zero_point", y, -2))


def _quantization(s: Shapes) -> Iterator[tuple[bool, str]]:
    x, scale, block, axis = s.x, s[1] or (), s.attributes.get("block_size", 0), s.attributes.get("axis", 1)
    yield (
        s[2] is None or s[2] == scale or math.prod((*s[2], *scale)) == 1,
        (f"its scale is {_text(scale)}, and its zero point {_text(s[2])}"),
    )
    if math.prod(scale) != 1:
        yield -len(x) <= axis < len(x), f"its axis is {axis}, and its input is {_text(x)}"
        axis %= len(x)
        wanted = tuple(ceil_div(n, block) if a == axis else n for a, n in enumerate(x)) if block else (x[axis],)
        yield scale == wanted, f"its scale is {_text(scale)}; along axis {axis} of {_text(x)} it must be {_text(wanted)}"


def _rnn(gates: int) -> Rule:
    def rule(s: Shapes) -> Iterator[tuple[bool, str]]:
        x, r = s.x, s[2] or ()
        yield len(x) == len(r) == 3, f"its X is {_text(x)}, and its R {_text(r)}; both have 3 axes"
        d, h = 2 if s.attributes.get("direction") == "bidirectional" else 1, r[2]
        batch_first = s.attributes.get("layout", 0)
        batch = x[0] if batch_first else x[1]
        state = (batch, d, h) if batch_first else (d, batch, h)
        yield from _are(s, (1, "W", (d, gates * h, x[2])), (2, "R", (d, gates * h, h)), (3, "B", (d, 2 * gates * h)))
        yield from _are(s, (4, "sequence_lens", (batch,)), (5, "initial_h", state), (6, "initial_c", state), (7, "P", (d, 3 * h)))
        size = s.attributes.get("hidden_size", h)
        yield size == h, f"its hidden_size is {size}, and R is {_text(r)}"

    return rule


def _attention(s: Shapes) -> Iterator[tuple[bool, str]]:
    scale = s.attributes.get("scale", 1.0)
    yield math.isfinite(scale), f"its scale is {scale}"
    shapes = [s[i] or () for i in range(3)]
    yield (
        len({len(shape) for shape in shapes}) == 1 and len(s.x) in (3, 4),
        (f"its Q, K and V are {', '.join(map(_text, shapes))}; they must have 3 or 4 axes"),
    )
    if len(s.x) == 3:
        heads = [s.attributes.get(name, 0) for name in ("q_num_heads", "kv_num_heads", "kv_num_heads")]
        fits = all(n and shape[2] % n == 0 for n, shape in zip(heads, shapes, strict=True))
        yield fits, f"its Q, K and V are {', '.join(map(_text, shapes))}, with {heads[0]} and {heads[1]} heads"
        shapes = [(b, n, rows, whole // n) for n, (b, rows, whole) in zip(heads, shapes, strict=True)]
    q, k, v = shapes
    fits = q[0] == k[0] and q[3] == k[3] and k[:3] == v[:3] and k[1] > 0 and q[1] % k[1] == 0
    yield fits, f"its Q, K and V, of {_text(q)}, {_text(k)} and {_text(v)}, do not fit each other"
    past = s[4]
    yield (past is None) == (s[5] is None), "it has one of past_key and past_value; it must have both or neither"
    if past is not None:
        yield len(past) == 4, f"its past_key is {_text(past)}; it must have 4 axes"
        yield from _are(s, (4, "past_key", (*k[:2], past[2], k[3])), (5, "past_value", (*v[:2], past[2], v[3])))
    keys, mask = k[2] + (past[2] if past is not None else 0), s[3]
    if mask is not None:
        fits = 1 <= len(mask) <= 4 and _broadcasts(mask[:-1], q[:3]) and mask[-1] <= keys
        yield fits, f"its attn_mask is {_text(mask)}, for {_text((*q[:3], keys))}"


def _reshape(s: Shapes) -> Iterator[tuple[bool, str]]:
    yield math.prod(s.x) == math.prod(s.output), f"it makes {_text(s.output)} of {_text(s.x)}"


def _transpose(s: Shapes) -> Iterator[tuple[bool, str]]:
    perm = list(s.attributes.get("perm", range(len(s.x))))
    yield sorted(perm) == list(range(len(s.x))), f"its perm is {perm}, for {_text(s.x)}"


def _depth_to_space(s: Shapes) -> Iterator[tuple[bool, str]]:
    b = s.attributes["blocksize"]
    yield len(s.x) == 4 and s.x[1] % (b * b) == 0, f"its blocksize is {b}, for {_text(s.x)}"


def _space_to_depth(s: Shapes) -> Iterator[tuple[bool, str]]:
    b = s.attributes["blocksize"]
    yield len(s.x) == 4 and s.x[2] % b == s.x[3] % b == 0, f"its blocksize is {b}, for {_text(s.x)}"


def _elements(s: Shapes) -> Iterator[tuple[bool, str]]:
    """GatherElements and ScatterElements: indices for a part of x."""
    x, indices = s.x, s[1] or ()
    axis = s.attributes.get("axis", 0) % max(len(x), 1)
    fits = len(x) == len(indices) and all(a == axis or n <= x[a] for a, n in enumerate(indices))
    yield fits, f"its indices are {_text(indices)} into {_text(x)} along axis {axis}"
    yield from _are(s, (2, "updates", indices))


def _gather_nd(s: Shapes) -> Iterator[tuple[bool, str]]:
    x, indices, batch = s.x, s[1] or (), s.attributes.get("batch_dims", 0)
    fits = batch < min(len(x), len(indices)) and x[:batch] == indices[:batch] and 1 <= indices[-1] <= len(x) - batch
    yield fits, f"its indices are {_text(indices)} into {_text(x)}, with batch_dims {batch}"
    yield from _reads(s)


def _scatter_nd(s: Shapes) -> Iterator[tuple[bool, str]]:
    x, indices = s.x, s[1] or ()
    yield bool(indices) and 1 <= indices[-1] <= len(x), f"its indices are {_text(indices)} into {_text(x)}"
    yield from _are(s, (2, "updates", (*indices[:-1], *x[indices[-1] :])))


def _reverse_sequence(s: Shapes) -> Iterator[tuple[bool, str]]:
    batch, time = s.attributes.get("batch_axis", 1), s.attributes.get("time_axis", 0)
    yield batch != time and len(s.x) >= 2, f"its batch_axis is {batch}, and its time_axis {time}, of {_text(s.x)}"
    yield from _are(s, (1, "sequence_lens", (s.x[batch],)))


def _compress(s: Shapes) -> Iterator[tuple[bool, str]]:
    axis, condition = s.attributes.get("axis"), s[1] or ()
    n = math.prod(s.x) if axis is None else s.x[axis]
    yield len(condition) == 1 and condition[0] <= n, f"its condition is {_text(s[1])}, for {n} elements"


def _cumulative(s: Shapes) -> Iterator[tuple[bool, str]]:
    yield from _one(s, (1, "axis"))


def _top_k(s: Shapes) -> Iterator[tuple[bool, str]]:
    yield from _one(s, (1, "K"))


def _one_hot(s: Shapes) -> Iterator[tuple[bool, str]]:
    yield from _one(s, (1, "depth"))
    yield from _are(s, (2, "values", (2,)))


def _roi_align(s: Shapes) -> Iterator[tuple[bool, str]]:
    n = (s[1] or (0,))[0]
    yield len(s.x) == 4, f"its input is {_text(s.x)}; it must have 4 axes"
    yield from _are(s, (1, "rois", (n, 4)), (2, "batch_indices", (n,)))


def _max_unpool(s: Shapes) -> Iterator[tuple[bool, str]]:
    yield (
        len(s.x) == len(s.attributes["kernel_shape"]) + 2,
        f"its kernel_shape is {s.attributes['kernel_shape']}, for {_text(s.x)}",
    )
    yield from _are(s, (1, "indices", s.x))
    yield s.output[:2] == s.x[:2], f"it makes {_text(s.output)} of {_text(s.x)}"


def _dft(s: Shapes) -> Iterator[tuple[bool, str]]:
    yield len(s.x) >= 2 and s.x[-1] in (1, 2), f"its input is {_text(s.x)}; its last axis must be of 1 or 2 elements"


def _einsum(s: Shapes) -> Iterator[tuple[bool, str]]:
    equation = s.attributes["equation"]
    terms = equation.partition("->")[0].count(",") + 1
    yield terms == len(s.inputs), f"its equation, {equation!r}, is about {terms} inputs, and it has {len(s.inputs)}"


def _slice(s: Shapes) -> Iterator[tuple[bool, str]]:
    yield s[1] is not None and len(s[1]) == 1, f"its starts are {_text(s[1])}; they must be a list"
    yield from _are(s, (2, "ends", s[1] or ()), (3, "axes", s[1] or ()), (4, "steps", s[1] or ()))


def _resize(s: Shapes) -> Iterator[tuple[bool, str]]:
    yield from _reads(s)
    axes = len(s.attributes.get("axes", s.x))
    for i, what in (2, "scales"), (3, "sizes"):
        yield math.prod(s[i] or (0,)) in (0, axes), f"its {what} are {_text(s[i])} for {axes} axes"
    if s.attributes.get("coordinate_transformation_mode") == "tf_crop_and_resize":
        yield s[1] == (2 * axes,), f"its roi is {_text(s[1])} for {axes} axes"


RULES: dict[str, Rule] = {
    **dict.fromkeys(("ArgMax", "ArgMin"), _arg),
    **dict.fromkeys(("Gather", "GridSample"), _reads),
    **dict.fromkeys(("LayerNormalization", "PRelu", "RMSNormalization"), _broadcast_to_x),
    **dict.fromkeys(("GroupNormalization", "InstanceNormalization"), _channels),
    **dict.fromkeys(("DequantizeLinear", "QuantizeLinear"), _quantization),
    **dict.fromkeys(("CumProd", "CumSum"), _cumulative),
    **dict.fromkeys(("GatherElements", "ScatterElements"), _elements),
    **{op.upper(): _rnn(gates) for op, gates in GATES.items()},
    "AffineGrid": _affine_grid,
    "Attention": _attention,
    "Clip": _clip,
    "Compress": _compress,
    "Conv": _conv,
    "ConvInteger": _conv_integer,
    "ConvTranspose": _conv_transpose,
    "DFT": _dft,
    "DeformConv": _deform_conv,
    "DepthToSpace": _depth_to_space,
    "Einsum": _einsum,
    "Flatten": _flatten,
    "GatherND": _gather_nd,
    "Gemm": _gemm,
    "LRN": _lrn,
    "MatMulInteger": _matmul_integer,
    "MaxUnpool": _max_unpool,
    "OneHot": _one_hot,
    "QLinearConv": _qlinear_conv,
    "QLinearMatMul": _qlinear_matmul,
    "Reshape": _reshape,
    "Resize": _resize,
    "ReverseSequence": _reverse_sequence,
    "RoiAlign": _roi_align,
    "RotaryEmbedding": _rotary_embedding,
    "ScatterND": _scatter_nd,
    "STFT": _stft,
    "Slice": _slice,
    "SpaceToDepth": _space_to_depth,
    "TopK": _top_k,
    "Transpose": _transpose,
    "Trilu": _trilu,
}
"""By operator, at the opset that `load` gives."""
