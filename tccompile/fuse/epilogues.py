"""What follows an op goes into its epilogue.

f(op(x), y)                  =>  op(x) with epilogue f(acc, y); the scales and constants of sums of bytes before all else
f(transpose(op(x)), y)       =>  transpose(op(x) with epilogue f(acc, y')), as a view; a reshape too, also into a part of a tensor
depth_to_space(conv(x, w))   =>  conv(x, permuted w) with a shuffled store; a part of it is a view
f(channels of conv(x, w) in another order, y)  =>  conv(x, permuted w) with epilogue f(acc, y)
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from tccompile.fuse.editor import Editor, channels_of, fits, names, tidy
from tccompile.ir.expr import Epilogue, Expr, Index, View, canonical_view, constant, coord, identity_view, load, substitute, walk
from tccompile.ir.extent import Shape, possible, worth
from tccompile.ir.ops import Attention, Conv, Gemm, Op, Pointwise
from tccompile.ir.program import Program
from tccompile.ir.tensor import Tensor, dense
from tccompile.ir.types import DType
from tccompile.ir.weights import Literal, transform
from tccompile.lower.movement import depth_to_space_view

SCATTERED_CHANNELS = 16
"""Up to this many channels a kernel may store its tile into another order of axes (a model's NCHW output): each of a
warp's stores then still covers whole runs of pixels. Beyond that a separate transposing copy is faster."""


def epilogues(program: Program) -> Program:
    e = Editor(program)
    depths = _depths(program)
    for i in range(len(e.ops)):
        op = e.ops[i]
        if not isinstance(op, Pointwise):
            continue
        producers = {e.position[n] for v in op.views if (n := v.tensor) in e.position}
        # The one with the longest way to it: the others can run beside that way, and their results are there by then
        for p in sorted(producers, key=lambda p: (depths[p], p), reverse=True):
            producer = e.ops[p]
            assert producer is not None
            merged = with_epilogue(e, producer, op)
            if merged is not None:
                e.drop(p)
                e.put(i, merged)
                break
    return e.result()


def finish_sums(program: Program) -> Program:
    """What scales sums of bytes and adds constants to them goes into their product's epilogue, before it becomes one with what
    moves the results."""
    e = Editor(program)
    for i in range(len(e.ops)):
        op = e.ops[i]
        if not isinstance(op, Pointwise):
            continue
        read = {v.tensor for v in op.views if v.tensor not in e.constants}
        producer = e.writer(next(iter(read))) if len(read) == 1 else None
        if producer is None or not producer.multiplied or e.tensors[producer.y].shape != e.tensors[op.y].shape:
            continue
        if e.tensors[producer.y].dtype in (DType.I8, DType.U8):
            continue  # sums that are bytes again are finished: who reads what these stand for may read them
        if all(e.tensors[x].dtype in (DType.I8, DType.U8) for x in producer.multiplied):
            merged = with_epilogue(e, producer, op)
            if merged is not None:
                e.drop(e.position[producer.y])
                e.put(i, merged)
    return e.result()


def _depths(program: Program) -> list[int]:
    """For each op, how many ops before it wait for one another."""
    depth: dict[str, int] = {}
    for op in program.ops:
        read = {*op.inputs, *(program.tensors[n].storage for n in op.inputs)}
        written = {op.y, program.tensors[op.y].storage}
        at = 1 + max((depth.get(n, -1) for n in read), default=-1)
        depth |= {n: max(at, depth.get(n, 0)) for n in written}
    return [depth[op.y] for op in program.ops]


def with_epilogue(e: Editor, producer: Op, consumer: Pointwise) -> Op | None:
    """`producer` storing what `consumer` makes of its result, or None where that cannot be an epilogue."""
    t, y = e.tensors[producer.y], e.tensors[consumer.y]
    if (
        isinstance(producer, Pointwise)
        or not producer.takes_epilogue
        or t.rank > 4
        or e.readers[t.name] != {e.position[consumer.y]}
        or not e.is_private(t.name)
    ):
        return None
    own = {v for v in consumer.views if v.tensor == t.name}
    others = tuple(v for v in consumer.views if v.tensor != t.name)
    if len(own) != 1 or producer.epilogue.expr.dtype is not t.dtype.compute:
        return None
    (view,) = own
    plain = isinstance(producer, Conv) and producer.groups == 1 and producer.epilogue.shuffle == 1
    straight = canonical_view(identity_view(t.name, t.rank), t.shape)
    if plain and view != straight and t.shape == y.shape and (order := channels_of(view, t.shape, y.shape)):
        permuted = _permute_channels(e, producer, order, f"for.{y.name}")  # type: ignore[arg-type]
        if permuted is None:
            return None
        producer, view = permuted, straight
        loads = tuple(view if v.tensor == t.name else v for v in consumer.views)
        consumer = replace(consumer, epilogue=replace(consumer.epilogue, loads=loads))
    if t.shape != y.shape or view != straight:
        if (merged := _under_other_axes(e, producer, consumer, view)) is not None:
            return merged
        return _with_shuffle(e, producer, consumer, view) if isinstance(producer, Conv) and not others else None
    if producer.epilogue.shuffle != 1 and others:
        return None  # an epilogue's loads are indexed before the shuffle
    if any(v.valid or any(i.affine is None for i in v.index) for v in others):
        return None
    turned = y.inner is not None and t.inner is not None and y.inner != t.inner
    if turned and worth(f"{t.name} before it is turned", t.shape[t.inner or 0] > SCATTERED_CHANNELS):
        return None
    lane = {Conv: 1, Gemm: t.rank - 1, Attention: t.rank - 1}.get(type(producer), y.inner)
    padded = any(n != more and axis != lane for axis, (n, more) in enumerate(zip(y.shape, y.padded, strict=True)))
    if not possible(f"{y.name} without padding but of its lanes", not padded):
        return None  # its kernels write the padding along their lanes only
    return _joined(e, producer, consumer, producer.epilogue)


def _under_other_axes(e: Editor, producer: Op, consumer: Pointwise, view: View) -> Op | None:
    """`producer` with the consumer's expression, where the consumer calls the axes differently: a product over (N, H, W, C), say,
    and what adds it to an image (N, C, H, W), or an image's pixels as the rows of a matrix.

    Either both lie in memory just so, and the consumer's result becomes a view; or the consumer writes a part of a tensor, of
    which the producer's result becomes a view.
    """
    y = e.tensors[consumer.y]
    t = _stored_as(e.tensors[producer.y], y.dtype)
    if producer.epilogue.shuffle != 1 or y.size != t.size:
        return None
    found = _inverse(view, t, y)
    if (
        not possible(f"{t.name} in the order of {y.name}", found is not None)
        or found is None
        or y.base in e.program.outputs
        or not (y.base or e.is_private(y.name))
    ):
        return None
    index, strides = found
    views = tuple(v.at(index, t.shape) for v in consumer.views)
    if any(v.valid or any(i.affine is None for i in v.index) for v in views):
        return None
    if y.base is None and not possible(f"{t.name} as {y.name} lies", strides == t.strides):
        return None
    part = replace(t, strides=strides, base=y.base, offset=y.offset)
    steps = [y.offset, *(s for a, s in enumerate(strides) if a != t.inner and t.padded[a] > 1)]
    if y.base is not None and (part.inner != t.inner or any(n % e.grain(y.name, t.name) for n in steps)):
        return None
    moved = replace(consumer, y=t.name, epilogue=tidy(consumer.epilogue.expr, views))
    merged = _joined(e, producer, moved, producer.epilogue)
    if merged is None:
        return None
    e.tensors[t.name] = part
    if y.base is None:
        e.tensors[y.name] = replace(y, base=t.name, offset=0)
        e.viewed.add(t.name)
    return merged


def _stored_as(t: Tensor, dtype: DType) -> Tensor:
    """The tensor in another type, with as much padding as `dense` gives it if that is what it has."""
    usual = t == dense(t.name, t.shape, t.dtype, t.order)
    return dense(t.name, t.shape, dtype, t.order) if usual else replace(t, dtype=dtype)


def _inverse(view: View, t: Tensor, y: Tensor) -> tuple[list[Index], Shape] | None:
    """y's coordinates by those of t, of which `view` reads each element once, and what strides t's elements have in y; or None.

    Where an axis of y is made of several of t, none of them has padding.
    """
    index, strides, missing = [constant(0)] * y.rank, list(t.strides), {a for a, n in enumerate(t.padded) if n > 1}
    for axis, extent in enumerate(y.shape):
        alone = [coord(0) if j == axis else constant(0) for j in range(y.rank)]
        of = [a for a, i in enumerate(view.index) if i.at(alone, (extent,)).terms]
        padded = [t.padded[a] for a in of] or [1]
        if padded != [y.padded[axis]] and (math.prod(padded) != extent or y.padded[axis] != extent):
            return None
        missing -= {*of}
        step = 1
        for a in sorted(of, key=lambda a: t.strides[a]):
            index[axis], strides[a], step = index[axis] + coord(a) * step, y.strides[axis] * step, step * t.shape[a]
    same = canonical_view(identity_view(t.name, t.rank), t.shape).index
    back = tuple(i.at(index, t.shape) for i in view.index)
    return (index, tuple(strides)) if back == same and not missing else None


def _joined(e: Editor, producer: Op, consumer: Pointwise, before: Epilogue) -> Op | None:
    """`producer`, its epilogue being `before`, with the consumer's expression after it."""
    t = e.tensors[producer.y]
    count = len(before.loads)
    leaf = {load(k, t.dtype.compute): before.expr for k, v in enumerate(consumer.views) if v.tensor == t.name}
    other = {load(k, x.dtype): load(k + count, x.dtype) for k, x in _loads(consumer) if consumer.views[k].tensor != t.name}
    # Renumber the consumer's loads first: substitution does not look into what it has put in.
    expr = substitute(consumer.epilogue.expr, leaf | other)
    epilogue = replace(tidy(expr, before.loads + consumer.views), shuffle=before.shuffle)
    if not fits(epilogue):
        return None
    return replace(producer, y=consumer.y, epilogue=epilogue, nodes=names(producer, consumer))


def _loads(op: Op) -> list[tuple[int, Expr]]:
    return [(x.value, x) for x in walk(op.epilogue.expr) if x.fn == "load"]  # type: ignore[misc]


def _with_shuffle(e: Editor, conv: Conv, consumer: Pointwise, view: View) -> Op | None:
    """`conv` storing each block of channels as a block of pixels. Where some rows or columns are left out of the consumer's
    result, all are stored, and the result is a view of them."""
    t, y = e.tensors[conv.y], e.tensors[consumer.y]
    if t.rank != 4 or y.rank != 4 or conv.epilogue.shuffle != 1 or conv.groups != 1 or 0 in y.shape:
        return None
    block = math.isqrt(t.shape[1] // y.shape[1])
    whole = (t.shape[0], y.shape[1], t.shape[2] * block, t.shape[3] * block)
    if block < 2 or t.shape[1] != y.shape[1] * block * block or any(n > m for n, m in zip(y.shape, whole, strict=True)):
        return None
    _, first, h, w = (i.constant for i in view.at([constant(0)] * 4, y.shape).index)  # what y's first element reads
    before = conv.epilogue
    for mode, phase in (("DCR", first // y.shape[1]), ("CRD", first)):
        start = h * block + phase // block, w * block + phase % block
        index = [coord(0), coord(1), coord(2) + start[0], coord(3) + start[1]]
        if view == canonical_view(depth_to_space_view(t.name, whole, block, mode).at(index, y.shape), y.shape):
            break
    else:
        return None
    if y.shape != whole and not e.is_private(y.name):
        return None
    if mode == "CRD":
        permuted = _permute_channels(e, conv, _crd_to_dcr(t.shape[1], block), "dcr")
        if permuted is None:
            return None
        conv, before = permuted, permuted.epilogue
    if y.shape == whole:
        if any(n != padded for axis, (n, padded) in enumerate(zip(y.shape, y.padded, strict=True)) if axis != 1):
            return None  # a convolution's kernels write the padding along channels only
        return _joined(e, conv, consumer, replace(before, shuffle=block))
    base = dense(f"{y.name}.whole", whole, y.dtype, (*(a for a in y.order if a != 1), 1))
    merged = _joined(e, conv, replace(consumer, y=base.name), replace(before, shuffle=block))
    if merged is not None:
        e.tensors[base.name] = base
        e.readers[base.name] = set()
        offset = start[0] * base.strides[2] + start[1] * base.strides[3]
        padded = (*y.shape[:1], base.padded[1], *y.shape[2:])
        e.tensors[y.name] = replace(y, padded=padded, strides=base.strides, base=base.name, offset=offset)
        e.viewed.add(base.name)
    return merged


def _crd_to_dcr(depth: int, block: int) -> list[int]:
    """Which channel of CRD order stands at each place of DCR order."""
    channels = depth // (block * block)
    return [c * block * block + k for k in range(block * block) for c in range(channels)]


def _permute_channels(e: Editor, conv: Conv, order: list[int], suffix: str) -> Conv | None:
    """The convolution with its output channels taken in `order`: weights, and every constant that varies along them."""
    new, take = {}, Literal(np.array(order, np.int64))
    along = {conv.w: 0}
    for v in conv.epilogue.loads:
        axes = [a for a, i in enumerate(v.index) if i.affine and 1 in i.affine]
        if axes and v.tensor not in e.constants:
            return None
        if axes:
            along[v.tensor] = axes[0]
    if conv.w not in e.constants:
        return None
    for name, axis in along.items():
        new[name] = f"{name}.{suffix}"
        recipe = transform("take", e.constants[name], take, axis=axis)
        e.add_constant(replace(e.tensors[name], name=new[name]), recipe)
    return conv.renamed(new)  # type: ignore[return-value]
