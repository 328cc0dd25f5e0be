"""Attention of decoders as ONNX Runtime has it: grouped heads, rotary positions and a cache; and of tokens without padding."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx

from tccompile.ir.extent import Shape
from tccompile.load.contrib.attention import Tensor, apart_heads, joined_heads
from tccompile.load.contrib.parts import MICROSOFT, Operator, Parts

INT64 = onnx.TensorProto.INT64
MOST_PAIRS = 2**24


def _rotary_embedding(p: Parts) -> None:
    """(x, positions or the first of them, cosines, sines) with x (batch, rows, heads * size) or (batch, heads, rows, size)."""
    x, table = p.shape(0), p.shape(2)
    p.need(len(x) in (3, 4) and len(table) == 2, f"its input is {x}, and its cosines are {table}")
    if p.attributes.get("scale", 1.0) != 1.0 or p.attributes.get("is_packed_batching"):
        raise p.refused("it has a scale or packed batches", "leave both attributes away")
    batch, rows = (x[0], x[1]) if len(x) == 3 else (x[0], x[2])
    more: dict[str, Any] = {name: p.attributes[name] for name in ("interleaved", "rotary_embedding_dim") if name in p.attributes}
    if len(x) == 3:
        more["num_heads"] = p.attributes.get("num_heads") or x[2] // max(2 * table[1], 1)
    positions = _positions(p, p.inputs[1], p.shape(1), batch, rows)
    p.add("RotaryEmbedding", [p.inputs[0], p.inputs[2], p.inputs[3], positions], p.outputs[0], **more)


def _positions(p: Parts, positions: str, shape: Shape, batch: int, rows: int) -> str:
    """(batch, rows), of positions given so, or by the first of them."""
    if shape == (batch, rows) and shape != (1,):
        return positions
    p.need(shape == (1,), f"its positions are {shape}; they must be ({batch}, {rows}) or one number")
    return p.add("Expand", [p.add("Add", [positions, p.counted(rows)]), p.integers(batch, rows)])


# --- Groups of heads that share keys and values, and a cache ---------------------------------------------------------------

UNUSED = ("k_quant_type", "kv_cache_bit_width", "qk_output", "v_quant_type")
"""Attributes of GroupQueryAttention that are taken only where they ask for nothing."""

LEFT_OUT = {12: "k_scale", 13: "v_scale", 16: "query_seqlens"}
"""Inputs of it that are not taken."""


def _group_query_attention(p: Parts) -> None:
    """(queries, keys, values, past keys, past values, each batch's last position, how many positions there are, cosines, sines,
    positions, bias of scores, each head's sink, …, weights of the norms of queries and of keys): new keys and values are written
    into the cache behind those that it holds of each batch."""
    _check_plain(p)
    q, k, v = _grouped(p)
    batch, rows, size = q.shape[0], q.shape[1], q.shape[2] // p.attributes["num_heads"]
    heads, groups = p.attributes["num_heads"], p.attributes["kv_num_heads"]
    p.need_shape(5, "seqlens_k", (batch,), (batch, 1))
    total, past = int(p.value(6, "total_sequence_length").reshape(-1)[0]), p.shape(3)[2] if p.inputs[3] else 0
    for i in (3, 4):
        p.need_shape(i, "past", (batch, groups, past, size))
    cache: _Cache | _Window
    if p.attributes.get("sliding_window_cache", 0) == 1:
        cache = _Window(p, batch, rows, past)
    else:
        p.need(rows <= total <= rows + past, f"it has {total} positions, of which {past} are past and {rows} new")
        cache = _Cache(batch, rows, total, past, first=rows == total)
    positions = cache.positions(p)
    q, k = (_normed(p, t, i, which, size) for t, i, which in ((q, 14, "q"), (k, 15, "k")))
    if p.attributes.get("do_rotary"):
        q, k = (_turned(p, t, n, positions, batch, rows) for t, n in ((q, heads), (k, groups)))
    keys, values = (
        cache.written(p, apart_heads(p, t.name, t.shape, groups), p.inputs[i], positions, y)
        for i, t, y in ((3, k, p.outputs[1]), (4, v, p.outputs[2]))
    )
    seen, sink = cache.seen(p, positions), p.inputs[11] or p.attributes.get("smooth_softmax", -1) == 1
    names = [apart_heads(p, q.name, q.shape, heads), keys, values, seen]
    if sink:
        names[1:] = _with_sink(p, cache, positions, names, (batch, heads, groups, rows, size))
    more = {name: p.attributes[name] for name in ("scale", "softcap") if p.attributes.get(name)}
    y = p.add("Attention", names, is_causal=int(not names[3]), **more)
    joined_heads(p, y, q.shape)


def _check_plain(p: Parts) -> None:
    for i, what in LEFT_OUT.items():
        if p.inputs[i]:
            raise p.refused(f"it has the input {what}", "write the model without it")
    for name in UNUSED:
        if p.attributes.get(name) not in (None, 0, -1, "", "NONE"):
            raise p.refused(f"its {name} is {p.attributes[name]!r}", "write the model without it")
    if not p.attributes.get("causal", 1):
        raise p.refused("its causal is 0", "use MultiHeadAttention")
    if p.outputs[3]:
        raise p.refused("its scores are an output", "leave that output away")


def _grouped(p: Parts) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values, which may be one tensor."""
    heads, groups = (p.attributes.get(name, 0) for name in ("num_heads", "kv_num_heads"))
    shape = p.shape(0)
    sound = heads > 0 and groups > 0 and heads % groups == 0 and len(shape) == 3
    size = shape[-1] // (heads if p.inputs[1] else heads + 2 * groups) if sound else 0
    p.need(sound and size > 0, f"its queries are {shape}, for {heads} heads in {groups} groups")
    sizes = heads * size, groups * size, groups * size
    if p.inputs[1]:
        for i, what in enumerate(("queries", "keys", "values")):
            p.need_shape(i, what, (*shape[:2], sizes[i]))
        names = p.inputs[:3]
    else:
        p.need(shape[2] == sum(sizes), f"its queries, keys and values are {shape}, for {heads} heads in {groups} groups")
        names = p.split(p.inputs[0], sizes, 2)
    return tuple(Tensor(t, (*shape[:2], n)) for t, n in zip(names, sizes, strict=True))  # type: ignore[return-value]


def _normed(p: Parts, x: Tensor, i: int, which: str, size: int) -> Tensor:
    """Each head divided by its root mean square, times the weights that are input i, if it is there."""
    if not p.inputs[i]:
        return x
    p.need_shape(i, f"{which}_norm_weight", (size,))
    epsilon = p.attributes.get(f"{which}_norm_epsilon", p.attributes.get("qk_norm_epsilon", 1e-6))
    batch, rows, width = x.shape
    apart = p.reshaped(x.name, batch, rows, width // size, size)
    return Tensor(p.reshaped(p.add("RMSNormalization", [apart, p.inputs[i]], epsilon=epsilon), *x.shape), x.shape)


def _with_sink(
    p: Parts, cache: _Cache | _Window, positions: str, names: list[str], sizes: tuple[int, int, int, int, int]
) -> list[str]:
    """Keys, values and bias of scores with one more position of zeros, whose score is the head's sink: a part of each sum of
    exponentials."""
    if p.attributes.get("softcap"):
        raise p.refused("it has a softcap beside a sink of each head", "write the model without one of them")
    (batch, heads, groups, rows, size), q = sizes, names[0]
    empty = p.add("Expand", [p.number(0, q), p.integers(batch, groups, 1, size)])
    keys, values = (p.add("Concat", [t, empty], axis=2) for t in names[1:3])
    bias = names[3] or cache.seen(p, positions, causal=False)
    if not p.inputs[10]:
        lowest = p.add("CastLike", [p.constant(np.float32(np.finfo(p.dtype(0)).min)), q])
        bias = p.add("Where", [bias, p.number(0, q), lowest])
    bias = p.add("Expand", [bias, p.integers(batch, heads, rows, cache.keys)])
    sink = p.reshaped(p.add("CastLike", [p.inputs[11], q]), 1, heads, 1, 1) if p.inputs[11] else p.number(0, q)
    return [keys, values, p.add("Concat", [bias, p.add("Expand", [sink, p.integers(batch, heads, rows, 1)])], axis=3)]


class _Window:
    """A cache that holds the last positions of each batch alone, in order, its room at least a window: what it held, and behind
    that what is new, is read, and as much of its end is kept as a count of positions says.

    last   (batch, 1), how many positions there are with the new ones; before, without them
    keys   how many are read
    """

    def __init__(self, p: Parts, batch: int, rows: int, room: int) -> None:
        self.batch, self.rows, self.room, self.keys = batch, rows, room, room + rows
        self.window = p.attributes.get("local_window_size", -1)
        p.need(0 < self.window <= room, f"its cache has room for {room} positions, for a window of {self.window}")
        if p.inputs[10]:
            raise p.refused("it has a bias of scores beside a cache of a window", "write the model without sliding_window_cache")
        one = p.integers(1)
        self.last = p.add("Add", [p.add("Cast", [p.reshaped(p.inputs[5], batch, 1)], to=INT64), one])
        self.before = p.add("Max", [p.add("Sub", [self.last, p.integers(rows)]), p.integers(0)])
        self.had, self.has = (self._kept(p, count) for count in (self.before, self.last))
        self.at = ""

    def _kept(self, p: Parts, count: str) -> str:
        """How many of so many positions are held: room for some more than a window is made at once."""
        more = self.room - self.window + 1
        beyond = p.add("Max", [p.add("Sub", [count, p.integers(self.room)]), p.integers(0)])
        turns = p.add("Div", [p.add("Add", [beyond, p.integers(more - 1)]), p.integers(more)])
        return p.add("Sub", [count, p.add("Mul", [turns, p.integers(more)])])

    def positions(self, p: Parts) -> str:
        """(batch, rows), of what is new."""
        return p.add("Add", [self.before, p.counted(self.rows)])

    def written(self, p: Parts, x: str, past: str, positions: str, present: str) -> str:
        """What was held, and x behind its room; of which the output `present` holds the last."""
        both, (_, heads, _, size) = p.add("Concat", [past, x], axis=2), p.shape(3)
        if not self.at:
            place = p.add("Add", [p.add("Sub", [self.last, self.has]), p.counted(self.room)])
            new = p.add("Sub", [place, self.before])
            here = p.add("Where", [p.add("Less", [new, p.integers(0)]), self.had, p.integers(self.room)])
            self.at = p.add("Min", [p.add("Add", [new, here]), p.integers(self.keys - 1)])
        at = p.add("Expand", [p.reshaped(self.at, self.batch, 1, self.room, 1), p.integers(self.batch, heads, self.room, size)])
        p.add("GatherElements", [both, at], present, axis=2)
        return both

    def seen(self, p: Parts, positions: str, causal: bool = True) -> str:
        """Which of them are seen from each new position."""
        rows = p.counted(self.room)
        held = p.add("Add", [p.add("Sub", [self.before, self.had]), rows])
        held = p.add("Where", [p.add("Less", [rows, self.had]), held, p.integers(2**31)])
        place = p.add("Concat", [held, positions], axis=1)
        return _in_window(p, p.reshaped(place, self.batch, 1, 1, self.keys), self, positions, self.window)


class _Cache:
    """How the cache is written and read.

    rows   how many positions are new
    total  how many there are at most, the new ones included
    past   how many the past keys and values have room for
    first  whether nothing is held yet
    """

    def __init__(self, batch: int, rows: int, total: int, past: int, first: bool) -> None:
        self.batch, self.rows, self.total, self.past, self.first = batch, rows, total, past, first
        self.keys = total

    def positions(self, p: Parts) -> str:
        """(batch, rows), of what is new."""
        if self.first:
            return p.add("Expand", [p.counted(self.rows), p.integers(self.batch, self.rows)])
        last = p.add("Cast", [p.reshaped(p.inputs[5], self.batch, 1)], to=INT64)
        return p.add("Add", [last, p.counted(self.rows, 1 - self.rows)])

    def written(self, p: Parts, x: str, past: str, positions: str, present: str) -> str:
        """The cache with x (batch, heads, rows, size) in it, which is also the output `present`; of which what can be seen."""
        room = max(self.total, self.past)
        _, heads, _, size = p.shape(3) if past else (0, p.attributes["kv_num_heads"], 0, p.shape(0)[2])
        if self.first and room == self.rows:
            return p.add("Identity", [x], present)
        if room > self.past:
            more = p.add("Expand", [p.number(0, x), p.integers(self.batch, heads, room - self.past, size)])
            past = p.add("Concat", [past, more], axis=2)
        at = p.reshaped(positions, self.batch, 1, self.rows, 1)
        if self.rows == 1:
            here = p.add("Equal", [at, p.reshaped(p.counted(room), room, 1)])
            held = p.add("Where", [here, x, past], present)
        else:
            at = p.add("Expand", [at, p.integers(self.batch, heads, self.rows, size)])
            held = p.add("ScatterElements", [past, at, x], present, axis=2)
        return p.sliced(held, 2, 0, self.total) if room > self.total else held

    def seen(self, p: Parts, positions: str, causal: bool = True) -> str:
        """Which positions are seen from each new one, or what is added to their scores; "" for all up to itself, if that may be
        said so."""
        window, bias = p.attributes.get("local_window_size", -1), p.inputs[10]
        p.need(window == -1 or 0 < window < 2**31, f"its local_window_size is {window}; it must be -1 or at least 1")
        if causal and self.first and window < 0 and not bias:
            return ""
        seen = _in_window(p, p.counted(self.total), self, positions, window)
        if not bias:
            return seen
        heads = p.attributes["num_heads"]
        allowed = [(b, h, self.rows, self.total) for b in (1, self.batch) for h in (1, heads)]
        p.need_shape(10, "bias of scores", *allowed)
        lowest = p.add("CastLike", [p.constant(np.float32(np.finfo(p.dtype(0)).min)), bias])
        return p.add("Where", [seen, bias, lowest])


def _turned(p: Parts, x: Tensor, heads: int, positions: str, batch: int, rows: int) -> Tensor:
    """With rotary positions: those of the input, or of the cache."""
    if p.inputs[9]:
        p.need_shape(9, "positions", (batch, rows))
        positions = p.inputs[9]
    more = {"interleaved": p.attributes.get("rotary_interleaved", 0), "num_heads": heads}
    half = p.shape(7)[1]
    if 2 * half != x.shape[2] // heads:
        more["rotary_embedding_dim"] = 2 * half
    return Tensor(p.add("RotaryEmbedding", [x.name, p.inputs[7], p.inputs[8], positions], **more), x.shape)


def _in_window(p: Parts, keys: str, cache: _Cache | _Window, positions: str, window: int) -> str:
    """Whether each key's position is up to each new one's, and within the window."""
    at = p.reshaped(positions, cache.batch, 1, cache.rows, 1)
    seen = p.add("LessOrEqual", [keys, at])
    if window < 0:
        return seen
    return p.add("And", [seen, p.add("Greater", [keys, p.add("Sub", [at, p.integers(window)])])])


# --- Tokens of several sequences, one after the other, without padding -----------------------------------------------------


def _packed_attention(p: Parts) -> None:
    """(tokens, weights, bias, where each token would be with padding, where each sequence begins, bias of scores)"""
    tokens, width = p.shape(0)[0], p.shape(1)[1]
    sizes = [*p.attributes.get("qkv_hidden_sizes", ())] or [width // 3] * 3
    p.need(len(sizes) == 3 and sum(sizes) == width, f"its weights have {width} columns, for queries, keys and values of {sizes}")
    projected = p.add("Add", [p.add("MatMul", p.inputs[:2]), p.inputs[2]])
    names = p.split(projected, sizes, 1)
    _of_tokens(p, [Tensor(t, (tokens, n)) for t, n in zip(names, sizes, strict=True)], 3, 4, 5)


def _packed_multi_head_attention(p: Parts) -> None:
    """(queries, keys, values, their bias, where each token would be with padding, where each sequence begins, bias of scores)"""
    shape, heads = p.shape(0), p.attributes["num_heads"]
    if len(shape) == 4:
        tokens, _, three, size = shape
        p.need(shape[1:3] == (heads, 3) and not p.inputs[1], f"its queries, keys and values are {shape}, for {heads} heads")
        names = [p.reshaped(t, tokens, heads * size) for t in p.split(p.inputs[0], [1] * three, 2)]
        operands = [Tensor(t, (tokens, heads * size)) for t in names]
    else:
        operands = [Tensor(p.inputs[i], p.shape(i)) for i in range(3)]
    if p.inputs[3]:
        biases = p.split(p.inputs[3], [t.shape[1] for t in operands], 0)
        operands = [Tensor(p.add("Add", [t.name, b]), t.shape) for t, b in zip(operands, biases, strict=True)]
    _of_tokens(p, operands, 4, 5, 6)


def _of_tokens(p: Parts, operands: list[Tensor], offset: int, begins: int, bias: int) -> None:
    """Attention of tokens, put where they are with padding and taken from there."""
    (batch, rows), tokens = p.shape(offset), operands[0].shape[0]
    p.need_shape(begins, "cumulative_sequence_length", (batch + 1,))
    p.need(tokens <= batch * rows, f"it has {tokens} tokens, for {batch} sequences of {rows}")
    at = p.add("Cast", [p.sliced(p.reshaped(p.inputs[offset], batch * rows), 0, 0, tokens)], to=INT64)
    names = []
    for t in operands:
        empty = p.add("Expand", [p.number(0, t.name), p.integers(batch * rows, t.shape[1])])
        names.append(p.reshaped(p.add("ScatterND", [empty, p.reshaped(at, tokens, 1), t.name]), batch, rows, t.shape[1]))
    ends, starts = p.sliced(p.inputs[begins], 0, 1, batch + 1), p.sliced(p.inputs[begins], 0, 0, batch)
    more = {name: p.attributes[name] for name in ("num_heads", "scale") if name in p.attributes}
    inputs = [*names, "", p.add("Sub", [ends, starts]), p.inputs[bias]]
    y = p.add("MultiHeadAttention", inputs, domain=MICROSOFT, **more)
    p.add("Gather", [p.reshaped(y, batch * rows, operands[2].shape[1]), at], p.outputs[0])


def _restore_padding(p: Parts) -> None:
    """(tokens, where each would be with padding) to (batch, rows, width), zeros where there is no token."""
    (tokens, width), (batch, rows) = p.shape(0), p.shape(1)
    at = p.add("Cast", [p.sliced(p.reshaped(p.inputs[1], batch * rows), 0, 0, tokens)], to=INT64)
    empty = p.add("Expand", [p.number(0, p.inputs[0]), p.integers(batch * rows, width)])
    placed = p.add("ScatterND", [empty, p.reshaped(at, tokens, 1), p.inputs[0]])
    p.reshaped(placed, batch, rows, width, y=p.outputs[0])


# --- Bias of scores by distance --------------------------------------------------------------------------------------------


def _relative_position_bias(p: Parts) -> None:
    """T5's: (table of buckets and heads, how many queries, how many keys); far distances share a bucket in logarithmic steps."""
    buckets, _ = p.shape(0)
    queries, keys = (int(p.value(i, "length").reshape(-1)[0]) for i in (1, 2))
    both = bool(p.attributes.get("is_bidirectional", 0))
    p.need(queries > 0 and keys > 0 and buckets > 1, f"its lengths are {queries} and {keys}, and it has {buckets} buckets")
    if queries * keys > MOST_PAIRS:
        raise p.refused(f"it is about {queries} queries and {keys} keys", f"at most {MOST_PAIRS} pairs are supported")
    table = p.constant(_buckets(queries, keys, buckets, p.attributes["max_distance"], both))
    scores = p.add("Transpose", [p.add("Gather", [p.inputs[0], table])], perm=[2, 0, 1])
    p.add("Unsqueeze", [scores, p.integers(0)], p.outputs[0])


def _buckets(queries: int, keys: int, buckets: int, furthest: int, both: bool) -> np.ndarray:
    """The bucket of each pair."""
    distance = np.arange(queries)[:, None] - np.arange(keys)
    first = np.zeros_like(distance)
    if both:
        buckets //= 2
        first = np.where(distance < 0, buckets, 0)
        distance = np.abs(distance)
    distance = np.maximum(distance, 0)
    exact = buckets // 2
    steps = np.log(np.maximum(distance, 1).astype(np.float32) / np.float32(exact)) / np.float32(np.log(furthest / exact))
    far = np.minimum(exact + (steps * (buckets - exact)).astype(np.int64), buckets - 1)
    return first + np.where(distance < exact, distance, far)


def _gated_relative_position_bias(p: Parts) -> None:
    """WavLM's: (queries, their bias, bias of scores by distance, weights, bias, a constant a head)
    bias of scores * (u * (r * constant - 1) + 2), with the gates u and r of each query."""
    if p.inputs[6]:
        raise p.refused("its tokens are without padding", "write the model without packing")
    (batch, rows, width), heads, columns = p.shape(0), p.attributes["num_heads"], p.shape(3)[1]
    p.need(width % heads == 0 and columns % 2 == 0, f"its queries are {p.shape(0)}, for {heads} heads and {columns} columns")
    q = apart_heads(p, p.add("Add", p.inputs[:2]), p.shape(0), heads)
    gates = p.add("Add", [p.add("MatMul", [q, p.inputs[3]]), p.inputs[4]])
    gates = p.add("ReduceSum", [p.reshaped(gates, batch, heads, rows, 2, columns // 2), p.integers(4)], keepdims=0)
    u, r = p.split(p.add("Sigmoid", [gates]), [1, 1], 3)
    one, two = (p.number(n, u) for n in (1, 2))
    gate = p.add("Add", [p.add("Mul", [u, p.add("Sub", [p.add("Mul", [r, p.inputs[5]]), one])]), two])
    p.add("Mul", [gate, p.inputs[2]], p.outputs[0])


OPERATORS: dict[str, Operator] = {
    "GatedRelativePositionBias": _gated_relative_position_bias,
    "GroupQueryAttention": _group_query_attention,
    "PackedAttention": _packed_attention,
    "PackedMultiHeadAttention": _packed_multi_head_attention,
    "RelativePositionBias": _relative_position_bias,
    "RestorePadding": _restore_padding,
    "RotaryEmbedding": _rotary_embedding,
}
