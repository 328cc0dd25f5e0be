"""What each Op means, in NumPy only: the CPU engine runs it, and the kernels' tests compare with it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import numpy as np

from tccompile.ir import weights
from tccompile.ir.expr import Shape
from tccompile.ir.program import (
    Attention,
    Conv,
    Cumulate,
    Gemm,
    Mlp,
    Norm,
    Op,
    Pointwise,
    Pool,
    Program,
    Reduce,
    Resize,
    Rnn,
    Scatter,
    Softmax,
    TopK,
    Trees,
)
from tccompile.ir.reference.expressions import evaluate_expr
from tccompile.ir.reference.lines import cumulate, scatter, top_k
from tccompile.ir.reference.recurrent import rnn
from tccompile.ir.reference.reductions import norm, reduce, softmax
from tccompile.ir.reference.storage import convert, elements, from_storage, store, to_storage
from tccompile.ir.reference.trees import trees
from tccompile.ir.reference.windows import conv, pool

__all__ = [
    "MEANING",
    "Observer",
    "begin",
    "compute",
    "convert",
    "elements",
    "evaluate",
    "finish",
    "from_storage",
    "store",
    "to_storage",
    "unobserved",
    "unwatched",
]


def gemm(op: Gemm, values: Mapping[str, np.ndarray], shape: Shape) -> np.ndarray:
    """a @ bᵀ: a (…, M, K), b (N, K) or (…, N, K)."""
    a, b = values[op.a].astype(np.float32, copy=False), values[op.b].astype(np.float32, copy=False)
    if b.ndim == 2:  # one matrix product instead of many
        return (a.reshape(math.prod(a.shape[:-1]), a.shape[-1]) @ b.T).reshape(shape)
    return a @ b.swapaxes(-1, -2)


def attention(op: Attention, values: Mapping[str, np.ndarray], shape: Shape) -> np.ndarray:
    """softmax(scale * q @ kᵀ + mask) @ v, one head and some of its rows at a time; rows that see nothing are 0."""
    q, k, v = (values[name].astype(np.float32, copy=False) for name in (op.q, op.k, op.v))
    mask = None if op.mask is None else np.broadcast_to(values[op.mask], (*q.shape[:3], k.shape[2]))
    out, share = np.zeros(shape, np.float32), q.shape[1] // k.shape[1]
    if not out.size:
        return out
    rows = max(SCORES // max(k.shape[2], 1), 1)
    for b, h, first in np.ndindex(*q.shape[:2], -(-q.shape[2] // rows)):
        part = slice(first * rows, min((first + 1) * rows, q.shape[2]))
        scores = q[b, h, part] @ k[b, h // share].T * np.float32(op.scale)
        if mask is not None:
            seen = mask[b, h, part]
            scores = np.where(seen, scores, -np.inf) if seen.dtype == bool else scores + seen
        if op.causal is not None:
            future = np.arange(k.shape[2]) > np.arange(part.start, part.stop)[:, None] + op.causal
            scores = np.where(future, -np.inf, scores)
        with np.errstate(all="ignore"):
            highest = scores.max(1, keepdims=True, initial=-np.inf)
            e = np.exp(scores - np.where(np.isneginf(highest), 0, highest), dtype=np.float32)
            total = e.sum(1, np.float64, keepdims=True)
            out[b, h, part] = e @ v[b, h // share] / np.where(total == 0, 1, total)
    return out


SCORES = 1 << 24
"""Of an attention, how many are held at a time: 64 MB."""


def mlp(op: Mlp, values: Mapping[str, np.ndarray], shape: Shape) -> np.ndarray:
    """f(x @ wᵀ + b) @ vᵀ"""
    x, w, v = (values[name].astype(np.float32, copy=False)[:, :, 0, 0] for name in (op.x, op.w, op.v))
    acc = x @ w.T
    if op.b is not None:
        acc = acc + values[op.b].astype(np.float32, copy=False)
    hidden = np.broadcast_to(evaluate_expr(op.hidden, (), {}, acc.shape, acc), acc.shape)
    return (np.asarray(hidden, np.float32) @ v.T).reshape(shape)


def resize(op: Resize, values: Mapping[str, np.ndarray], shape: Shape) -> np.ndarray:
    """x resampled along one axis after the other: a weighted sum of taps, at indices clipped into x."""
    x = np.ascontiguousarray(values[op.x], np.float32)
    if 0 in shape:
        return np.zeros(shape, np.float32)
    for axis, index, factors in zip(op.axes, op.index, op.weights, strict=True):
        at, by = values[index], values[factors]  # (output extent, taps)
        lie = [-1 if a == axis else 1 for a in range(x.ndim)]
        total = np.take(x, at[:, 0], axis, mode="clip") * by[:, 0].reshape(lie)
        for t in range(1, at.shape[1]):
            total += np.take(x, at[:, t], axis, mode="clip") * by[:, t].reshape(lie)
        x = total
    return x


MEANING: dict[type[Op], Callable[..., np.ndarray]] = {
    Attention: attention,
    Conv: conv,
    Cumulate: cumulate,
    Gemm: gemm,
    Mlp: mlp,
    Norm: norm,
    Pool: pool,
    Reduce: reduce,
    Resize: resize,
    Rnn: rnn,
    Scatter: scatter,
    Softmax: softmax,
    TopK: top_k,
    Trees: trees,
}
"""meaning(op, values, shape): what the op computes before its epilogue. A Pointwise is all epilogue."""


def compute(op: Op, program: Program, values: Mapping[str, np.ndarray]) -> np.ndarray:
    """What `op` writes, epilogue and shuffle included: y's logical shape, in the type its expression computes in.

    values  the logical arrays it reads, by tensor: in storage type (bf16 as its bits) or in compute type
    """
    typed = {name: _typed(values[name], program, name) for name in op.inputs}
    return finish(op, program, typed, begin(op, program, typed))


def begin(op: Op, program: Program, values: Mapping[str, np.ndarray]) -> np.ndarray | None:
    """What `op` computes before its epilogue, from values in compute types; None for a Pointwise, which is all epilogue."""
    return None if isinstance(op, Pointwise) else MEANING[type(op)](op, values, program.op_shape(op))


def finish(op: Op, program: Program, values: Mapping[str, np.ndarray], acc: np.ndarray | None) -> np.ndarray:
    """What `op` writes, from what it computed before its epilogue."""
    shape = program.op_shape(op)
    out = evaluate_expr(op.epilogue.expr, op.epilogue.loads, values, shape, acc)
    out = np.broadcast_to(out, shape)
    b = op.epilogue.shuffle
    if b > 1:
        n, c, p, q = shape
        out = out.reshape(n, b, b, c // (b * b), p, q).transpose(0, 3, 4, 1, 5, 2)  # (N, C, P, i, Q, j)
    return out.reshape(program.tensors[op.y].shape)


def _typed(values: np.ndarray, program: Program, name: str) -> np.ndarray:
    dtype = program.tensors[name].dtype
    return values if values.dtype == dtype.compute.numpy else from_storage(values, dtype)


Observer = Callable[[str, np.ndarray], None]
"""Called with a tensor's name and its values."""


def unobserved(name: str, values: np.ndarray) -> None:
    """Nobody looks."""


Watcher = Callable[[Op, Mapping[str, np.ndarray], np.ndarray | None, np.ndarray], None]
"""Called with an op, the values that it reads, what it computed before its epilogue (see `begin`), and what it writes."""


def unwatched(op: Op, values: Mapping[str, np.ndarray], acc: np.ndarray | None, y: np.ndarray) -> None:
    """Nobody looks."""


def evaluate(
    program: Program,
    feeds: Mapping[str, np.ndarray],
    sources: Mapping[str, np.ndarray],
    watch: Watcher = unwatched,
    stored: bool = False,
) -> dict[str, np.ndarray]:
    """The program's outputs by name, computed in float32, int64 and bool throughout: nothing is rounded to storage types.

    feeds    the inputs' values by name; sources, the model's weights by name (see `weights.evaluate`)
    watch    sees what each op reads and writes
    stored   round every tensor to its storage type after all
    """
    tensors = program.tensors
    last = {tensors[name].storage: i for i, op in enumerate(program.ops) for name in (*op.inputs, op.y)}
    last |= dict.fromkeys((*program.inputs, *program.outputs), len(program.ops))
    memory: dict[str, np.ndarray] = {}  # by the tensor that owns the storage
    views = {tensors[name].storage for op in program.ops for name in op.inputs if tensors[name].base}
    plain = program.constants.keys() - views  # whose values are as good where they are

    def put(name: str, values: np.ndarray) -> None:
        owner = tensors[tensors[name].storage]
        if owner.name not in memory:
            memory[owner.name] = np.zeros(owner.span, owner.dtype.compute.numpy)
        if stored:
            values = from_storage(to_storage(values, owner.dtype), owner.dtype)
        store(memory[owner.name], tensors[name], convert(values, owner.dtype.compute.numpy))

    def get(name: str) -> np.ndarray:
        if name in plain:
            return memory[name]
        return elements(memory[tensors[name].storage], tensors[name])

    for name in program.inputs:
        put(name, _typed(np.asarray(feeds[name]), program, name))
    for i, op in enumerate(program.ops):
        for name in op.inputs:
            owner = tensors[name].storage
            if owner in program.constants and owner not in memory:
                given = weights.evaluate(program.constants[owner], sources)
                if owner in plain:
                    t = tensors[owner]
                    memory[owner] = np.broadcast_to(convert(given, t.dtype.compute.numpy), t.shape)
                else:
                    put(owner, given)
        read = {name: get(name) for name in op.inputs}
        acc = begin(op, program, read)
        values = finish(op, program, read, acc)
        watch(op, read, acc, values)
        put(op.y, values)
        for owner in [o for o in memory if last.get(o, -1) <= i]:
            del memory[owner]
    return {name: get(name).copy() for name in program.outputs}
