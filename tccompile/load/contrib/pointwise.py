"""Activations, norms and embeddings that ONNX Runtime's optimizers fuse with what is around them."""

from __future__ import annotations

import numpy as np
import onnx

from tccompile.load.contrib.parts import MICROSOFT, Operator, Parts

# --- Activations ------------------------------------------------------------------------------------------------------------


def _gelu(p: Parts) -> None:
    """gelu(x + bias)"""
    x, bias = p.inputs[:2]
    x = p.add("Add", [x, bias]) if bias else x
    p.add("Gelu", [x], p.outputs[0], approximate="tanh" if p.node.op_type == "FastGelu" else "none")


def _gemm_fast_gelu(p: Parts) -> None:
    """FastGelu(x·w + bias)"""
    p.add("FastGelu", [p.add("MatMul", p.inputs[:2]), p.inputs[2]], p.outputs[0], MICROSOFT)


def _quick_gelu(p: Parts) -> None:
    """x * sigmoid(alpha * x)"""
    x = p.inputs[0]
    gate = p.add("Sigmoid", [p.add("Mul", [x, p.number(p.attributes.get("alpha", 1.702), x)])])
    p.add("Mul", [x, gate], p.outputs[0])


def _scaled_silu(p: Parts) -> None:
    """y * sigmoid(y) of y = scale * x, the scale an input or alpha"""
    x, scale = p.inputs[:2]
    p.need_shape(1, "scale", (), (1,))
    scale = p.add("CastLike", [p.reshaped(scale), x]) if scale else p.number(p.attributes.get("alpha", 1.0), x)
    y = p.add("Mul", [x, scale])
    p.add("Mul", [y, p.add("Sigmoid", [y])], p.outputs[0])


def _bias_split_gelu(p: Parts) -> None:
    """a * gelu(b) of the halves a and b of x + bias"""
    shape = p.shape(0)
    p.need(bool(shape) and shape[-1] % 2 == 0, f"its input is {shape}")
    a, b = p.split(p.add("Add", p.inputs[:2]), [shape[-1] // 2] * 2, -1)
    p.add("Mul", [a, p.add("Gelu", [b])], p.outputs[0])


def _bias_add(p: Parts) -> None:
    """x + bias + skip"""
    p.add("Add", [p.add("Add", p.inputs[:2]), p.inputs[2]], p.outputs[0])


def _bias_dropout(p: Parts) -> None:
    """x + bias + residual: nothing is dropped when a model runs."""
    x, bias, residual, ratio, training = p.inputs[:5]
    dropped = p.add_many("Dropout", [p.add("Add", [x, bias]), ratio, training], ["", p.outputs[1]])
    if residual:
        p.add("Add", [dropped[0], residual], p.outputs[0])
    else:
        p.add("Identity", [dropped[0]], p.outputs[0])


def _bias_softmax(p: Parts) -> None:
    """softmax(x + bias) over all axes from `axis` on: the bias lacks the axes before it, or has ones between batch and it."""
    shape, bias, axis = p.shape(0), p.shape(1), p.attributes.get("axis", 1)
    p.need(-len(shape) <= axis <= len(shape), f"its axis is {axis}, for {shape}")
    axis %= len(shape) + (axis == len(shape))
    name = p.inputs[1]
    if p.attributes.get("is_inner_broadcast") and len(bias) < len(shape):
        p.need(len(bias) >= len(shape) - axis, f"its bias is {bias}, for {shape}")
        kept = len(bias) - (len(shape) - axis)
        name = p.reshaped(name, *bias[:kept], *[1] * (len(shape) - len(bias)), *bias[kept:])
    x = p.add("Add", [p.inputs[0], name])
    if axis < len(shape) - 1:
        x = p.add("Softmax", [p.add("Flatten", [x], axis=axis)], axis=-1)
        p.reshaped(x, *shape, y=p.outputs[0])
    else:
        p.add("Softmax", [x], p.outputs[0], axis=-1)


# --- Norms ------------------------------------------------------------------------------------------------------------------


def _norm(p: Parts) -> None:
    """LayerNormalization and SimplifiedLayerNormalization, which ONNX Runtime has in the default domain at every opset."""
    more = {name: p.attributes[name] for name in ("axis", "epsilon", "stash_type") if name in p.attributes}
    if p.node.op_type == "LayerNormalization":
        p.add_many("LayerNormalization", p.inputs[:3], [p.outputs[0], *p.node.output[1:3]], **more)
        return
    p.only()
    p.add("RMSNormalization", p.inputs[:2], p.outputs[0], **more)


def _skip_norm(p: Parts) -> None:
    """norm(x + skip + bias), and the sum as the fourth output; the second and third are of training."""
    simplified = p.node.op_type == "SkipSimplifiedLayerNormalization"
    x, skip, scale, *rest = p.inputs
    beta, bias = ("", rest[0]) if simplified else rest[:2]
    p.only(3)
    total = p.add("Add", [x, skip], "" if bias else p.outputs[3])
    total = p.add("Add", [total, bias], p.outputs[3]) if bias else total
    epsilon = p.attributes.get("epsilon", 1e-12)
    op, more = ("RMSNormalization", []) if simplified else ("LayerNormalization", [beta])
    p.add(op, [total, scale, *more], p.outputs[0], axis=-1, epsilon=epsilon)


def _group_norm(p: Parts) -> None:
    """Groups of channels, which may be last, normalized; then SiLU where activation is 1. Of x, or of the sum x + skip + bias,
    which is the second output then."""
    x, scale, beta, skip, bias = p.inputs[:5]
    shape, last = p.shape(0), p.attributes.get("channels_last", 1)
    p.need(len(shape) >= 3, f"its input is {shape}")
    channels = shape[-1] if last else shape[1]
    if skip:
        p.need_shape(4, "bias", (channels,))
        ones = (1,) * (len(shape) - 2)
        if p.shape(3) != shape:
            wide = (shape[0], *ones, channels) if last else (shape[0], channels, *ones)
            p.need_shape(3, "skip", wide, (shape[0], channels))
            skip = p.reshaped(skip, *wide)
        x = p.add("Add", [x, skip], "" if bias else p.outputs[1])
        if bias:
            x = p.add("Add", [x, bias if last else p.reshaped(bias, channels, *ones)], p.outputs[1])
    first = p.channels_first(x, len(shape)) if last else x
    scale, beta = (p.add("CastLike", [t, x]) for t in (scale, beta))
    groups, epsilon = p.attributes["groups"], p.attributes.get("epsilon", 1e-5)
    y = p.add("GroupNormalization", [first, scale, beta], num_groups=groups, epsilon=epsilon)
    y = p.channels_last(y, len(shape)) if last else y
    activation = p.attributes.get("activation", 0)
    p.need(activation in (0, 1), f"its activation is {activation}; it must be 0 or 1")
    p.add(*(("Mul", [y, p.add("Sigmoid", [y])]) if activation else ("Identity", [y])), p.outputs[0])


# --- Embeddings -------------------------------------------------------------------------------------------------------------


def _embed_norm(p: Parts) -> None:
    """norm(words[ids] + positions[0, 1, … or ids] + segments[ids]), how many ones a row of the mask has, and the sum:
    (ids, segment ids, words, positions, segments, scale, bias, mask, position ids)"""
    ids, segment_ids, words, positions, segments, scale, beta, mask, position_ids = p.inputs[:9]
    p.need(len(p.shape(0)) == 2, f"its ids are {p.shape(0)}")
    batch, rows = p.shape(0)
    if position_ids:
        p.need_shape(8, "position ids", (batch, rows), (1, rows))
        placed = p.add("Gather", [positions, position_ids])
    else:
        p.need(rows <= p.shape(3)[0], f"its ids are {p.shape(0)}, and its table has {p.shape(3)[0]} positions")
        placed = p.sliced(positions, 0, 0, rows)
    total = p.add("Add", [p.add("Gather", [words, ids]), placed], "" if segments else p.outputs[2])
    if segments:
        total = p.add("Add", [total, p.add("Gather", [segments, segment_ids])], p.outputs[2])
    epsilon = p.attributes.get("epsilon", 1e-12)
    p.add("LayerNormalization", [total, scale, beta], p.outputs[0], axis=-1, epsilon=epsilon)
    _count_words(p, mask, batch)


def _count_words(p: Parts, mask: str, batch: int) -> None:
    """The second output: how many ones a row of the mask has, nothing without a mask."""
    if not p.outputs[1]:
        return
    if not mask:
        p.add("Expand", [p.constant(np.int32(0)), p.integers(batch)], p.outputs[1])
        return
    one = p.add("CastLike", [p.constant(np.int32(1)), mask])
    ones = p.add("Cast", [p.add("Equal", [mask, one])], to=onnx.TensorProto.INT32)
    p.add("ReduceSum", [ones, p.integers(1)], p.outputs[1], keepdims=0)


def _quantized_embed_norm(p: Parts) -> None:
    """The same of quantized tables, scale and bias: each with its scale and zero point further on."""
    tables = [2, 3, 4, 5, 6]
    floats = [
        p.add("DequantizeLinear", [p.inputs[i], p.inputs[8 + n], p.inputs[13 + n]]) if p.inputs[i] else ""
        for n, i in enumerate(tables)
    ]
    inputs = [*p.inputs[:2], *floats, p.inputs[7]]
    epsilon = p.attributes.get("epsilon", 1e-12)
    p.add_many("EmbedLayerNormalization", inputs, [p.outputs[0], p.outputs[1]], MICROSOFT, epsilon=epsilon)


# --- Others -----------------------------------------------------------------------------------------------------------------


def _same(p: Parts) -> None:
    """The standard's operator of the same name."""
    p.add_many(p.node.op_type, p.inputs, p.node.output, **p.attributes)


def _expand_dims(p: Parts) -> None:
    """Unsqueeze along one axis, of those that the result has."""
    axis = p.value(1, "axis").reshape(-1)
    p.add("Unsqueeze", [p.inputs[0], p.integers(*axis)], p.outputs[0])


def _grid_sample(p: Parts) -> None:
    """The standard's, whose modes are called otherwise."""
    mode = p.attributes.get("mode", "bilinear")
    names = {"bilinear": "linear", "bicubic": "cubic"}
    p.add("GridSample", p.inputs[:2], p.outputs[0], **{**p.attributes, "mode": names.get(mode, mode)})


def _distances(p: Parts) -> None:
    """Of each row of a from each row of b, squared or not."""
    metric = p.attributes.get("metric", "sqeuclidean")
    if metric not in ("sqeuclidean", "euclidean"):
        raise p.refused(f"its metric is {metric!r}", "use sqeuclidean or euclidean")
    a, b = p.add("Unsqueeze", [p.inputs[0], p.integers(1)]), p.add("Unsqueeze", [p.inputs[1], p.integers(0)])
    p.need(len(p.shape(0)) == len(p.shape(1)) == 2, f"its rows are {p.shape(0)} and {p.shape(1)}")
    op = "ReduceSumSquare" if metric == "sqeuclidean" else "ReduceL2"
    p.add(op, [p.add("Sub", [a, b]), p.integers(2)], p.outputs[0], keepdims=0)


def _complex_product(p: Parts) -> None:
    """Of numbers whose real and imaginary parts are the last axis; b, or what is conjugate to it."""
    p.need(p.shape(0)[-1:] == p.shape(1)[-1:] == (2,), f"its inputs are {p.shape(0)} and {p.shape(1)}")
    (a, b), (c, d) = (p.split(x, [1, 1], -1) for x in p.inputs[:2])
    signs = ("Add", "Sub") if p.node.op_type == "ComplexMulConj" else ("Sub", "Add")
    real = p.add(signs[0], [p.add("Mul", [a, c]), p.add("Mul", [b, d])])
    imaginary = p.add(signs[1], [p.add("Mul", [b, c]), p.add("Mul", [a, d])])
    p.add("Concat", [real, imaginary], p.outputs[0], axis=-1)


def _gated_add(p: Parts) -> None:
    """x + y * gate"""
    if p.inputs[3]:
        raise p.refused("its gate is a projection", "use MatMul and Sigmoid before it")
    p.add("Add", [p.inputs[0], p.add("Mul", [p.inputs[1], p.inputs[2]])], p.outputs[0])


OPERATORS: dict[str, Operator] = {
    **dict.fromkeys(("BiasGelu", "FastGelu", "Gelu"), _gelu),
    **dict.fromkeys(("ComplexMul", "ComplexMulConj"), _complex_product),
    **dict.fromkeys(("GatherND", "Pad", "Range", "Trilu"), _same),
    **dict.fromkeys(("GroupNorm", "SkipGroupNorm"), _group_norm),
    **dict.fromkeys(("LayerNormalization", "SimplifiedLayerNormalization"), _norm),
    **dict.fromkeys(("SkipLayerNormalization", "SkipSimplifiedLayerNormalization"), _skip_norm),
    "BiasAdd": _bias_add,
    "BiasDropout": _bias_dropout,
    "BiasSoftmax": _bias_softmax,
    "BiasSplitGelu": _bias_split_gelu,
    "CDist": _distances,
    "EmbedLayerNormalization": _embed_norm,
    "ExpandDims": _expand_dims,
    "GatedAdd": _gated_add,
    "GemmFastGelu": _gemm_fast_gelu,
    "GridSample": _grid_sample,
    "QEmbedLayerNormalization": _quantized_embed_norm,
    "QuickGelu": _quick_gelu,
    "ScaledSiLU": _scaled_silu,
}
