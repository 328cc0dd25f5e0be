"""conv(concat(f(x), g(y)), w)  =>  conv(z, w'), where z has gaps, so that f and g can write it though they fill no vectors

A part of a concatenation can only be written by the op that makes it if it begins and ends at a multiple of 8 channels, or 16 of
bytes. So each part gets channels of zeros at its end, and the weights of the convolutions that read them zeros to match.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from tccompile.fuse.editor import Editor
from tccompile.ir.extent import round_up
from tccompile.ir.ops import Conv, Op
from tccompile.ir.program import Program
from tccompile.ir.tensor import Tensor, dense
from tccompile.ir.weights import Literal, transform

LARGER = 1.5
"""The most by which gaps may multiply the channels: beyond, a copy costs less than what is multiplied with zeros."""


def leave_gaps(program: Program) -> Program:
    e = Editor(program)
    parts: dict[str, list[Op]] = {}
    for op in program.ops:
        if (base := e.tensors[op.y].base) is not None:
            parts.setdefault(base, []).append(op)
    for name, ops in parts.items():
        ops.sort(key=lambda op: e.tensors[op.y].offset)
        if _pays(e, e.tensors[name], ops):
            _spread(e, e.tensors[name], ops)
    return e.result()


def _pays(e: Editor, whole: Tensor, parts: list[Op]) -> bool:
    """Whether the tensor is a concatenation of channels that only convolutions read, with a part that is not aligned."""
    fixed = {*e.program.inputs, *e.program.outputs, *e.constants}
    if whole.rank not in (3, 4) or whole.inner != 1 or whole.base is not None or whole.name in fixed or not e.readers[whole.name]:
        return False
    at, channels = 0, []
    for op in parts:
        y = e.tensors[op.y]
        across = (*y.shape[:1], whole.shape[1], *y.shape[2:]) == whole.shape
        if not across or y.offset != at or y.strides != whole.strides or e.readers[y.name]:
            return False
        at += y.shape[1]
        channels.append(y.shape[1])
    views = {t.name for t in e.tensors.values() if t.base == whole.name}
    if at != whole.shape[1] or views != {op.y for op in parts} or whole.name in e.position:
        return False
    grain = e.grain(whole.name)
    spread = sum(round_up(n, grain) for n in channels)
    readers = [e.ops[i] for i in e.readers[whole.name]]
    convolved = all(op is not None and mixes(e, op, whole.name) for op in readers)
    return convolved and any(n % grain for n in channels[:-1]) and spread <= LARGER * at


def mixes(e: Editor, op: Op, name: str) -> bool:
    """Whether it is a convolution that mixes all channels of the tensor by constant weights, and reads it in no other way."""
    plain = isinstance(op, Conv) and op.x == name and op.groups == 1 and op.w in e.constants
    return plain and all(name not in view.tensors for view in op.views)


def _spread(e: Editor, whole: Tensor, parts: list[Op]) -> None:
    channels = [e.tensors[op.y].shape[1] for op in parts]
    room = [round_up(n, e.grain(whole.name)) for n in channels]
    spread = dense(whole.name, (whole.shape[0], sum(room), *whole.shape[2:]), whole.dtype, whole.order)
    e.tensors[whole.name] = spread
    taken, start, at = np.full(sum(room), whole.shape[1], np.int64), 0, 0
    for op, n, size in zip(parts, channels, room, strict=True):
        part = e.tensors[op.y]
        padded = (part.shape[0], size, *part.shape[2:])
        e.tensors[part.name] = replace(part, padded=padded, strides=spread.strides, offset=at)
        taken[at : at + n] = np.arange(start, start + n)
        start, at = start + n, at + size
    for i in list(e.readers[whole.name]):
        conv = e.ops[i]
        assert isinstance(conv, Conv)
        e.put(i, with_inputs(e, conv, taken, f"gaps.{whole.name}"))


def with_inputs(e: Editor, conv: Conv, taken: np.ndarray, suffix: str) -> Conv:
    """The convolution of an image with other channels; `taken`: which one each of them was, or how many there were if none."""
    w = e.tensors[conv.w]
    after = tuple(int(a == 1) for a in range(w.rank))
    zero = transform("pad", e.constants[w.name], before=(0,) * w.rank, after=after)  # the channel that is not there
    shape = (w.shape[0], len(taken), *w.shape[2:])
    weights = dense(f"{w.name}.{suffix}", shape, w.dtype, w.order)
    e.add_constant(weights, transform("take", zero, Literal(taken), axis=1))
    return replace(conv, w=weights.name)
