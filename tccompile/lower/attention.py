"""Attention: the fused op where a head fits its kernels, else its parts."""

from __future__ import annotations

import numpy as np
import onnx_graphsurgeon as gs

from tccompile.ir.expr import (
    ACC,
    Epilogue,
    Range,
    View,
    broadcast_view,
    call,
    cast,
    const,
    coord,
    identity_view,
    quotient,
    remainder,
)
from tccompile.ir.ops import Attention, Gemm, Softmax
from tccompile.ir.tensor import Tensor
from tccompile.ir.types import DType
from tccompile.lower.builder import Builder, Reads, shape_of
from tccompile.lower.heads import is_one_op

HEADS_INNER = (0, 2, 1, 3)
"""(B, H, M, E) with the heads of a row side by side: what projections write and read."""


def attention(node: gs.Node, b: Builder) -> None:
    """softmax(softcap(scale * q @ kᵀ) + mask) @ v, with q, k and v of rank 4, or of rank 3 with heads side by side."""
    q, k, v = (_heads(node, b, i) for i in range(3))
    past = 0
    if b.input(4) is not None:
        past = shape_of(node.inputs[4])[2]
        k, v = _after(b, node.inputs[4], k), _after(b, node.inputs[5], v)
    for i, present in ((1, k), (2, v)):
        if len(node.outputs) > i and b.used(node.outputs[i]):
            b.copy(identity_view(present.name, 4), b.result(node.outputs[i]))
    if len(node.outputs) > 3 and b.used(node.outputs[3]):
        raise b.refuse("its fourth output, the scores, is used", "compute them by MatMul beside it")
    if b.input(6) is not None:
        raise b.refuse("the number of keys (nonpad_kv_seqlen) is an input", "give a mask instead")
    scale, cap = float(b.attr("scale", q.shape[3] ** -0.5)), float(b.attr("softcap", 0.0))
    mask = _mask(b, k)
    causal = past if b.attr("is_causal", 0) else None
    y = node.outputs[0]
    flat = len(y.shape) == 3
    shape = (*q.shape[:3], v.shape[3])
    out = b.new(f"{y.name}.heads", shape, order=HEADS_INNER) if flat else b.result(y, HEADS_INNER)
    if not is_one_op(node):
        _parts(b, q, k, v, out, scale, cap, mask, causal)
    else:
        names = {"q": q.name, "k": k.name, "v": v.name, "mask": mask.name if mask else None}
        b.emit(Attention, out, scale=scale, causal=causal, **names)
    if flat:
        whole, size = shape_of(y), shape[3]
        b.copy(
            View(out.name, (coord(0), quotient(coord(2), size, whole), coord(1), remainder(coord(2), size, whole))), b.result(y)
        )


def _heads(node: gs.Node, b: Builder, i: int) -> Tensor:
    """Input i as (B, heads, length, head size)."""
    t = node.inputs[i]
    if len(t.shape) == 4:
        x = b.operand(t)
        return x if x.order[-1] == 3 else b.with_order(x, HEADS_INNER)
    heads = int(b.attr("q_num_heads" if i == 0 else "kv_num_heads"))
    n, length, whole = shape_of(t)
    size = whole // heads
    y = b.new(f"{t.name}.heads", (n, heads, length, size), b.dtype(t), order=HEADS_INNER)
    return b.copy(View(b.value(t).name, (coord(0), coord(2), coord(1) * size + coord(3))), y)


def _after(b: Builder, past: gs.Tensor, t: Tensor) -> Tensor:
    """past and t, one after the other: (B, heads, lengths, head size)."""
    first = shape_of(past)[2]
    y = b.new(f"{t.name}.present", (*t.shape[:2], first + t.shape[2], t.shape[3]))
    for source, at, length in ((b.value(past), 0, first), (t, first, t.shape[2])):
        if length:
            part = Tensor(b.unique(f"{y.name}.part"), (*t.shape[:2], length, t.shape[3]), y.dtype,
                          (*t.shape[:2], length, y.padded[3]), y.strides, y.name, at * y.strides[2])  # fmt: skip
            b.copy(identity_view(source.name, 4), b.add(part))
    return y


def _mask(b: Builder, k: Tensor) -> Tensor | None:
    """The mask as a tensor of rank 4; keys beyond its last are masked."""
    t = b.input(3)
    if t is None:
        return None
    own, length = shape_of(t), k.shape[2]
    if len(own) == 4 and own[3] == length:
        return b.operand(t)
    y = b.new(f"{t.name}.mask", (*(1,) * (4 - len(own)), *own[:-1], length), b.dtype(t))
    inside = (Range(coord(3), 0, own[-1]),) if own[-1] < length else ()
    fill = 0.0 if y.dtype is DType.BOOL else -np.inf
    return b.copy(View(b.value(t).name, tuple(coord(a) for a in range(4 - len(own), 4)), inside, fill), y)


def _parts(
    b: Builder, q: Tensor, k: Tensor, v: Tensor, y: Tensor, scale: float, cap: float, mask: Tensor | None, causal: int | None
) -> None:
    """The same as matrix products and a softmax between them."""
    rows = (*q.shape[:3], k.shape[2])
    share = q.shape[1] // k.shape[1]
    head = quotient(coord(1), share, q.shape[:2])
    if share > 1:
        whole = b.new(f"{k.name}.repeated", (*q.shape[:2], *k.shape[2:]))
        k = b.copy(View(k.name, (coord(0), head, coord(2), coord(3))), whole)
    columns = b.new(f"{v.name}.T", (*q.shape[:2], v.shape[3], v.shape[2]))
    b.copy(View(v.name, (coord(0), head, coord(3), coord(2))), columns)
    reads = Reads(b, rows)
    expr = call("mul", ACC, scale)
    if cap:
        expr = call("mul", call("tanh", call("div", expr, cap)), cap)
    for t in (mask, _past(b, rows[2], rows[3], causal)):
        if t is not None:
            value = reads.view(broadcast_view(t.name, t.shape, rows))
            hidden = const(-np.inf)
            expr = call("where", value, expr, hidden) if value.dtype is DType.BOOL else call("add", expr, cast(value, DType.F32))
    scores = b.emit(Gemm, b.new(f"{y.name}.scores", rows), a=q.name, b=k.name, epilogue=Epilogue(expr, tuple(reads.views)))
    seen = call("where", call("is_nan", ACC), 0.0, ACC) if mask is not None or causal is not None else ACC  # rows without any
    weights = b.emit(Softmax, b.new(f"{y.name}.weights", rows), x=scores.name, axis=3, epilogue=Epilogue(seen))
    b.emit(Gemm, y, a=weights.name, b=columns.name)


def _past(b: Builder, rows: int, columns: int, causal: int | None) -> Tensor | None:
    """Whether row m sees column n, as a constant."""
    if causal is None:
        return None
    return b.literal("causal", np.tril(np.ones((rows, columns), bool), causal))
