"""f(g(x))  =>  (f ∘ g)(x), one Pointwise"""

from __future__ import annotations

from dataclasses import replace

from tccompile.fuse.editor import Editor, copies, fits, names, shifted, tidy
from tccompile.ir.expr import View, canonical_view, identity_view, load, substitute, walk
from tccompile.ir.extent import same, worth
from tccompile.ir.ops import Pointwise
from tccompile.ir.program import Program
from tccompile.ir.tensor import Tensor
from tccompile.ir.types import DType

LARGE, FEW = 1 << 22, 64
"""Of a tensor of so many elements, whoever reads one of so many computes it again, if others need not read it then."""

SHORT, WIDE = 24, 1 << 20
CHEAP = {"abs", "add", "bit_and", "cast", "const", "div", "less", "load", "max", "min", "mul", "neg", "ratio", "round",
         "saturate", "sub", "where"}  # fmt: skip
"""What a number is made of that whoever reads it makes again: so many parts at most, of these, for so many elements at most."""


def compose(program: Program) -> Program:
    e = Editor(program)
    for split in (False, True):  # how parts of a tensor are read shows once all else is composed
        for i in range(len(e.ops)):
            while True:
                op = e.ops[i]
                if not isinstance(op, Pointwise):
                    break
                merged = next((m for view in op.views if (m := _inlined(e, op, view, split)) is not None), None)
                if merged is None:
                    break
                e.put(i, merged)
                _drop_unread(e)
    return e.result()


def _drop_unread(e: Editor) -> None:
    for name, i in list(e.position.items()):
        if not e.readers[name] and e.is_private(name):
            e.drop(i)


def _inlined(e: Editor, consumer: Pointwise, view: View, split: bool) -> Pointwise | None:
    """`consumer` with what `view` reads computed in place, or None where that is not allowed or would not pay."""
    name = view.tensor
    producer, t = e.writer(name), e.tensors[name]
    if not isinstance(producer, Pointwise) or not e.is_private(name) or producer.epilogue.expr.dtype is not t.dtype.compute:
        return None
    moves_only = producer.epilogue.expr == load(0)
    if view.valid and not moves_only:
        return None  # outside `valid` the fill is read, not a function of it
    if view.valid and (producer.views[0].valid and producer.views[0].fill != view.fill):
        return None
    y = e.tensors[consumer.y]
    again = not view.valid and _is_made_again(e, producer, t) and worth(f"{name} again for {consumer.y}", y.size <= WIDE)
    if len(e.readers[name]) > 1 and not again:
        free = moves_only and (_keeps_lanes(producer.views[0], e.tensors, t) or (split and _is_split(e, t)))
        little = not free and worth(f"a little of {name} for {consumer.y}", t.size >= LARGE and y.size * FEW <= t.size)
        free = free or (little and not _joins_its_producer(e, producer))  # whose result would have two readers
        if not free:
            return None
    sums = t.dtype in (DType.I8, DType.U8)
    if not moves_only and (consumer.epilogue.expr == load(0) or sums) and _joins_its_producer(e, producer):
        return None  # it becomes an epilogue, and the consumer a view; or sums leave as bytes, to be added to others, say
    if not moves_only and not again and worth(f"{name} before {consumer.y}", y.size > 2 * t.size):
        return None  # an expansion: compute before it, on fewer elements
    shape = y.shape
    inner = tuple(v.at(view.index, shape) for v in producer.views)
    if view.valid:
        inner = tuple(replace(v, valid=v.valid + view.valid, fill=view.fill) for v in inner)
    base = len(consumer.views)
    body = shifted(producer.epilogue.expr, base)
    leaf = {load(k, t.dtype.compute): body for k, v in enumerate(consumer.views) if v == view}
    epilogue = tidy(substitute(consumer.epilogue.expr, leaf), consumer.views + inner)
    if not fits(epilogue):
        return None
    return replace(consumer, epilogue=epilogue, nodes=names(producer, consumer))


def _is_made_again(e: Editor, op: Pointwise, y: Tensor) -> bool:
    """Whether an op makes one number of others by so little that whoever reads it makes it again: scales and zero points of what
    is quantized by its own extremes, say, of which each would be a launch."""
    if not (_is_number(y) and all(_is_number(e.tensors[v.tensor]) and not v.valid for v in op.views)):
        return False
    parts = {*walk(op.epilogue.expr)}
    return len(parts) <= SHORT and {part.fn for part in parts} <= CHEAP and not _joins_its_producer(e, op)


def _is_number(t: Tensor) -> bool:
    return all(same(n, 1) for n in t.shape)


def _joins_its_producer(e: Editor, op: Pointwise) -> bool:
    """Whether what `op` computes can be an epilogue of what it reads: nobody else reads that, and it does so as it is."""
    shape = e.tensors[op.y].shape
    for view in op.views:
        name, source = view.tensor, e.writer(view.tensor)
        if source is None or isinstance(source, Pointwise) or not source.takes_epilogue:
            continue
        if not e.is_private(name) or len(e.readers[name]) > 1:
            continue
        if e.tensors[name].shape == shape and view == canonical_view(identity_view(name, len(shape)), shape):
            return True
    return False


def _is_split(e: Editor, t: Tensor) -> bool:
    """Whether all who read the tensor copy parts of it, no more together than there is, in another layout: none can be a view."""
    readers = [op for i in e.readers[t.name] if (op := e.ops[i]) is not None]
    if not all(copies(e, op) and not _keeps_lanes(op.views[0], e.tensors, e.tensors[op.y]) for op in readers):
        return False
    return worth(f"{t.name} in parts", sum(e.tensors[op.y].size for op in readers) <= t.size)


def _keeps_lanes(view: View, tensors: dict[str, Tensor], y: Tensor) -> bool:
    """Whether neighbours in `y` are neighbours in what the view reads, so that reading through it costs nothing."""
    x = tensors[view.tensor]
    if view.valid or any(i.affine is None for i in view.index):
        return False
    return x.inner is None or y.inner is None or view.index[x.inner].affine == {y.inner: 1}
