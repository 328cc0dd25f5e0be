"""Attention as ONNX Runtime's transformer optimizer writes it, with projections, masks and caches of many forms, as the standard
operator of queries, keys and values (https://github.com/microsoft/onnxruntime/blob/main/docs/ContribOperators.md)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import onnx

from tccompile.ir.extent import Shape
from tccompile.load.contrib.parts import Operator, Parts
from tccompile.load.contrib.quantized import scaled_product


@dataclass
class Tensor:
    """(batch, rows, heads * size), or (batch, heads, rows, size)"""

    name: str
    shape: Shape

    @property
    def rows(self) -> int:
        return self.shape[-2]


@dataclass
class Scored:
    """What is done to scores before the softmax, by the inputs' numbers, and what was seen before, by their names.

    mask, bias             inputs, None where the operator has none
    past_keys, past_values (batch, heads, rows, size)
    past                   how many rows these have
    """

    mask: int | None
    bias: int | None
    past_keys: str = ""
    past_values: str = ""
    past: int = 0


def _heads(p: Parts, name: str = "num_heads") -> int:
    heads = p.attributes.get(name, 0)
    p.need(isinstance(heads, int) and heads >= 1, f"its {name} is {heads!r}; it must be at least 1")
    return heads


def _attention(p: Parts) -> None:
    """Attention with its projection: x (batch, rows, width) times weights (width, queries, keys and values)."""
    projected = p.add("MatMul", p.inputs[:2])
    if p.inputs[2]:
        p.need_shape(2, "bias", p.shape(1)[1:])
        projected = p.add("Add", [projected, p.inputs[2]])
    if p.inputs[6]:
        raise _buffer(p)
    _of_projection(p, projected, mask=3, past=4, bias=5)


def _quantized_attention(p: Parts) -> None:
    """The same of integers:
    (x, weights, bias, x's scale, weights' scale, mask, x's zero point, weights' zero point, past)."""
    x, weights, bias, x_scale, w_scale, _, x_zero, w_zero = p.inputs[:8]
    p.need_shape(2, "bias", p.shape(1)[1:])
    projected = p.add("CastLike", [scaled_product(p, [x, weights, x_zero, w_zero], [x_scale, w_scale], ""), bias])
    _of_projection(p, p.add("Add", [projected, bias]), mask=5, past=8, bias=None)


def _of_projection(p: Parts, projected: str, mask: int, past: int, bias: int | None) -> None:
    """Attention of (batch, rows, queries, keys and values), and keys and values together, with the past's, as a second output."""
    (batch, rows, _), width, heads = p.shape(0), p.shape(1)[1], _heads(p)
    if p.attributes.get("do_rotary"):
        raise p.refused(
            "it turns queries and keys by their positions (do_rotary)", "use RotaryEmbedding before MultiHeadAttention"
        )
    if p.attributes.get("past_present_share_buffer"):
        raise _buffer(p)
    sizes = [*p.attributes.get("qkv_hidden_sizes", ())] or [width // 3] * 3
    fits = len(sizes) == 3 and sum(sizes) == width and sizes[0] == sizes[1] and not any(n % heads for n in sizes)
    p.need(fits, f"its weights have {width} columns, for queries, keys and values of {sizes} in {heads} heads")
    q, k, v = (Tensor(t, (batch, rows, n)) for t, n in zip(p.split(projected, sizes, 2), sizes, strict=True))
    scored = Scored(mask, bias)
    if p.inputs[past]:
        (two, *kept, size), scored.past = p.shape(past), p.shape(past)[3]
        p.need([two, *kept[:2], size] == [2, batch, heads, sizes[0] // heads], f"its past is {p.shape(past)}")
        both = p.split(p.inputs[past], [1, 1], 0)
        scored.past_keys, scored.past_values = (p.add("Squeeze", [t, p.integers(0)]) for t in both)
    if not p.outputs[1]:
        _attend(p, q, k, v, scored, ["", ""])
        return
    present = [p.fresh() + " keys", p.fresh() + " values"]
    _attend(p, q, k, v, scored, present)
    p.add("Concat", [p.add("Unsqueeze", [t, p.integers(0)]) for t in present], p.outputs[1], axis=0)


def _multi_head_attention(p: Parts) -> None:
    """(queries, keys, values, their bias, mask, bias of scores, past keys, past values, …), projected, in one of many forms."""
    q, k, v = _unpacked(p, _heads(p))
    scored = Scored(4, 5, p.inputs[6], p.inputs[7])
    if p.inputs[8] or p.inputs[9]:
        raise _buffer(p)
    if p.outputs[3]:
        raise p.refused("its scores are an output", "leave that output away")
    _with_past(p, 6, q, k, v, scored, 3)


def _decoder_attention(p: Parts) -> None:
    """Of one row of queries: (queries, keys, values, mask, bias of scores, past keys, past values, …, their bias)."""
    q, k, v = _unpacked(p, _heads(p))
    p.need(q.rows == 1, f"its queries are {q.shape}; they must have one row")
    if p.attributes.get("past_present_share_buffer") or any(p.inputs[7:10]):
        raise _buffer(p)
    if p.outputs[3]:
        raise p.refused("its scores are an output", "leave that output away")
    _with_past(p, 5, q, k, v, Scored(3, 4, p.inputs[5], p.inputs[6]), 10)


def _with_past(p: Parts, past: int, q: Tensor, k: Tensor, v: Tensor, scored: Scored, bias: int) -> None:
    """Attention where `past` is the number of the past keys' input, and `bias` that of what is added to projections."""
    p.need(bool(scored.past_keys) == bool(scored.past_values), "it has one of past keys and past values")
    if scored.past_keys:
        scored.past = p.shape(past)[2]
        for i, of in (past, k), (past + 1, v):
            p.need_shape(i, "past", (of.shape[0], _heads(p), scored.past, _size(of, _heads(p))))
    q, k, v = _biased(p, bias, q, k, v)
    _attend(p, q, k, v, scored, p.outputs[1:3])


def _size(x: Tensor, heads: int) -> int:
    return x.shape[3] if len(x.shape) == 4 else x.shape[2] // heads


def _buffer(p: Parts) -> Exception:
    return p.refused(
        "its past and present share a buffer of which a part is in use",
        "export the model with a cache of which every row counts (past_present_share_buffer=0), or without a cache",
    )


def _unpacked(p: Parts, heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values, which may come together: (batch, rows, heads, 3, size) and (batch, rows, heads, 2, size)."""
    shape = p.shape(0)
    if len(shape) == 5:
        p.need(shape[2:4] == (heads, 3) and not p.inputs[1], f"its queries, keys and values are {shape}, for {heads} heads")
        return _taken(p, p.inputs[0], shape)  # type: ignore[return-value]
    p.need(len(shape) == 3 and shape[2] % heads == 0, f"its queries are {shape}, for {heads} heads")
    if not p.inputs[1]:
        p.need(shape[2] % (3 * heads) == 0, f"its queries, keys and values are {shape}, for {heads} heads")
        parts = p.split(p.inputs[0], [shape[2] // 3] * 3, 2)
        return tuple(Tensor(t, (*shape[:2], shape[2] // 3)) for t in parts)  # type: ignore[return-value]
    q, k = Tensor(p.inputs[0], shape), p.shape(1)
    if len(k) == 5:
        p.need(k[2:4] == (heads, 2) and not p.inputs[2], f"its keys and values are {k}, for {heads} heads")
        return (q, *_taken(p, p.inputs[1], k))  # type: ignore[return-value]
    v = p.shape(2)
    sound = len(k) == len(v) and (k[1] == v[1] == heads if len(k) == 4 else len(k) == 3 and not (k[2] % heads or v[2] % heads))
    p.need(sound and k[-2] == v[-2], f"its keys are {k}, and its values {v}, for {heads} heads")
    return q, Tensor(p.inputs[1], k), Tensor(p.inputs[2], v)


def _taken(p: Parts, x: str, shape: Shape) -> Sequence[Tensor]:
    """The parts of (batch, rows, heads, parts, size)."""
    batch, rows, heads, parts, size = shape
    taken = p.split(x, [1] * parts, 3)
    return [Tensor(p.reshaped(t, batch, rows, heads * size), (batch, rows, heads * size)) for t in taken]


def _biased(p: Parts, bias: int, *operands: Tensor) -> Sequence[Tensor]:
    """With the bias of projections, of which keys and values that have their heads apart have got theirs already."""
    if not p.inputs[bias]:
        return operands
    heads = _heads(p)
    sizes = [_size(t, heads) * heads for t in operands]
    p.need_shape(bias, "bias", (sum(sizes),))
    parts = p.split(p.inputs[bias], sizes, 0)
    pairs = zip(operands, parts, strict=True)
    return [Tensor(p.add("Add", [t.name, b]), t.shape) if len(t.shape) == 3 else t for t, b in pairs]


def _attend(p: Parts, q: Tensor, k: Tensor, v: Tensor, scored: Scored, present: Sequence[str]) -> None:
    """Attention into the first output, and keys and values with the past's into `present`, where these are names."""
    heads, keys = _heads(p), scored.past + k.rows
    batch, rows, _ = q.shape
    causal = bool(p.attributes.get("unidirectional"))
    scores = _masks(p, batch, rows, keys, scored)
    if causal and scored.past:
        at = p.reshaped(p.counted(rows, scored.past), rows, 1)
        seen = p.add("LessOrEqual", [p.counted(keys), at])
        lowest = p.add("CastLike", [p.constant(_lowest(p, -np.inf)), q.name])
        scores = p.add("Where", [seen, scores or p.number(0, q.name), lowest])
    more = {"scale": p.attributes["scale"]} if p.attributes.get("scale") else {}
    more["is_causal"] = int(causal and not scored.past)
    if len(k.shape) == 3 and not scored.past_keys and not any(present):
        names = [q.name, k.name, v.name, scores]
        p.add("Attention", names, p.outputs[0], q_num_heads=heads, kv_num_heads=heads, **more)
        return
    apart = [apart_heads(p, t.name, t.shape, heads) for t in (q, k, v)]
    for i, (past, name) in enumerate(zip((scored.past_keys, scored.past_values), present, strict=True), 1):
        if past:
            apart[i] = p.add("Concat", [past, apart[i]], name, axis=2)
        elif name:
            apart[i] = p.add("Identity", [apart[i]], name)
    y = p.add("Attention", [*apart, scores], **more)
    joined_heads(p, y, (batch, rows, heads * _size(v, heads)))


def apart_heads(p: Parts, x: str, shape: Shape, heads: int) -> str:
    """(batch, heads, rows, size)"""
    if len(shape) == 4:
        return x
    batch, rows, width = shape
    return p.add("Transpose", [p.reshaped(x, batch, rows, heads, width // heads)], perm=[0, 2, 1, 3])


def joined_heads(p: Parts, x: str, shape: Shape) -> None:
    """The first output, of this shape: (batch, rows, heads * size)."""
    p.reshaped(p.add("Transpose", [x], perm=[0, 2, 1, 3]), *shape, y=p.outputs[0])


# --- Masks ----------------------------------------------------------------------------------------------------------------


def _lowest(p: Parts, value: float) -> np.float32:
    """A number for what does not count, finite in the type of the scores."""
    half = p.dtype(0) == np.float16
    return np.float32(max(value, float(np.finfo(np.float16 if half else np.float32).min)))


def _masks(p: Parts, batch: int, rows: int, keys: int, scored: Scored) -> str:
    """What is added to the scores (batch, heads, rows, keys), "" for nothing."""
    bias = p.inputs[scored.bias] if scored.bias is not None else ""
    if bias:
        heads = _heads(p)
        allowed = [(b, h, rows, keys) for b in (1, batch) for h in (1, heads)]
        p.need_shape(scored.bias, "bias of scores", *allowed)  # type: ignore[arg-type]
    if scored.mask is None or not p.inputs[scored.mask]:
        return bias
    counts = _counting(p, scored.mask, batch, rows, keys, scored.past)
    like = bias or next(t for i, t in enumerate(p.inputs) if t and p.dtype(i).kind == "f")
    lowest = p.add("CastLike", [p.constant(_lowest(p, p.attributes.get("mask_filter_value", -10000.0))), like])
    hidden = p.add("Where", [counts, p.number(0, like), lowest])
    return p.add("Add", [hidden, bias]) if bias else hidden


def _counting(p: Parts, mask: int, batch: int, rows: int, keys: int, past: int) -> str:
    """Which keys count, broadcast to (batch, heads, rows, keys): the mask is 1 there, or says where keys begin and end."""
    name, shape = p.inputs[mask], p.shape(mask)
    if shape in ((batch,), (2 * batch,), (3 * batch + 2,)):
        at = p.counted(keys, dtype=np.int32)
        ends = p.reshaped(p.sliced(name, 0, 0, batch), batch, 1, 1, 1)
        counts = p.add("Less", [at, p.add("Cast", [ends], to=onnx.TensorProto.INT32)])
        if shape == (2 * batch,):
            starts = p.add("Cast", [p.reshaped(p.sliced(name, 0, batch, 2 * batch), batch, 1, 1, 1)], to=onnx.TensorProto.INT32)
            counts = p.add("And", [counts, p.add("GreaterOrEqual", [at, starts])])
        return counts
    if len(shape) == 4 and shape[:2] == (batch, 1) and shape[2] >= past + rows and shape[3] >= keys:
        name = p.sliced(p.sliced(name, 2, past, past + rows), 3, 0, keys)
    elif shape == (batch, rows, keys):
        name = p.reshaped(name, batch, 1, rows, keys)
    else:
        p.need_shape(mask, "mask", (batch, keys), (batch, rows, keys), (batch,), (2 * batch,), (3 * batch + 2,))
        name = p.reshaped(name, batch, 1, 1, keys)
    zero = p.add("CastLike", [p.constant(np.int32(0)), name])
    return p.add("Greater", [name, zero])


OPERATORS: dict[str, Operator] = {
    "Attention": _attention,
    "DecoderMaskedMultiHeadAttention": _decoder_attention,
    "MultiHeadAttention": _multi_head_attention,
    "QAttention": _quantized_attention,
}
