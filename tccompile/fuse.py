"""Program → Program: fewer and larger ops, and views instead of copies.

Each pass is an equation that leaves every remaining tensor's values as they were (to rounding):

    unfold_inputs, unfold_outputs                            taps become channels where channels are few: unfold.py
    canonical             x[i] where only i = 0 occurs   =>  x[0]
    flatten_into_weights  gemm(flatten(x), w)            =>  gemm(view(x), permuted w)
    compose               f(g(x))                        =>  (f ∘ g)(x), one Pointwise
    epilogues             f(op(x), y)                    =>  op(x) with epilogue f(acc, y)
                          f(transpose(op(x)), y)         =>  transpose(op(x) with epilogue f(acc, y')), as a view
                          depth_to_space(conv(x, w))     =>  conv(x, permuted w) with a shuffled store; a part of it is a view
    alias                 y = copy(x)                    =>  y is a view of x
    elide_concat          concat(f(x), g(y))             =>  f and g write into slices of one tensor
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

from tccompile.expr import (
    Atom,
    Epilogue,
    Expr,
    Index,
    Quotient,
    Remainder,
    View,
    constant,
    coord,
    identity_view,
    load,
    reshape_view,
    substitute,
    walk,
)
from tccompile.ops.movement import depth_to_space_view
from tccompile.program import PAD, Conv, Gemm, Op, Pointwise, Program, Tensor, dense, renamed
from tccompile.unfold import unfold_inputs, unfold_outputs
from tccompile.weights import Literal, Recipe, transform

MAX_LOADS = 12
"""Views in one expression: each costs a pointer and strides in the kernel's arguments, and registers."""

MAX_NODES = 64
"""Operations in one expression."""

SCATTERED_CHANNELS = 16
"""Up to this many channels a kernel may store its tile into another order of axes (a model's NCHW output): each of a
warp's stores then still covers whole runs of pixels. Beyond that a separate transposing copy is faster."""


def fuse(program: Program) -> Program:
    for equation in (unfold_inputs, unfold_outputs, canonical, flatten_into_weights, compose, epilogues, alias, elide_concat):
        program = without_dead_code(equation(program))
    return program


# --- Editing ---------------------------------------------------------------------------------------------------------


class Editor:
    """A program under change: ops in order, who writes and reads what, kept true by `put` and `drop`."""

    def __init__(self, program: Program):
        self.program = program
        self.tensors = dict(program.tensors)
        self.constants = dict(program.constants)
        self.ops: list[Op | None] = list(program.ops)
        self.position: dict[str, int] = {}
        self.readers: dict[str, set[int]] = {name: set() for name in self.tensors}
        self.viewed = {t.base for t in self.tensors.values() if t.base}
        for i, op in enumerate(program.ops):
            self._enter(i, op)

    def _enter(self, i: int, op: Op) -> None:
        self.position[op.y] = i
        for name in op.inputs:
            self.readers[name].add(i)

    def drop(self, i: int) -> None:
        op = self.ops[i]
        assert op is not None
        self.ops[i] = None
        if self.position.get(op.y) == i:
            del self.position[op.y]
        for name in op.inputs:
            self.readers[name].discard(i)

    def put(self, i: int, op: Op) -> None:
        if self.ops[i] is not None:
            self.drop(i)
        self.ops[i] = op
        self._enter(i, op)

    def add_constant(self, tensor: Tensor, recipe: Recipe) -> None:
        self.tensors[tensor.name] = tensor
        self.constants[tensor.name] = recipe
        self.readers.setdefault(tensor.name, set())

    def writer(self, name: str) -> Op | None:
        i = self.position.get(name)
        return None if i is None else self.ops[i]

    def is_private(self, name: str) -> bool:
        """Whether the tensor is ours to do away with: no model input, output or constant, no view, not seen through one."""
        fixed = name in self.program.inputs or name in self.program.outputs or name in self.constants
        return not fixed and self.tensors[name].base is None and name not in self.viewed

    def result(self) -> Program:
        ops = tuple(op for op in self.ops if op is not None)
        return replace(self.program, tensors=self.tensors, constants=self.constants, ops=ops)


def without_dead_code(program: Program) -> Program:
    """Drop ops whose results nobody reads, then tensors and constants that no op names."""
    needed = set(program.outputs)
    kept: list[Op] = []
    for op in reversed(program.ops):
        y = program.tensors[op.y]
        if op.y in needed or y.storage in needed:
            kept.append(op)
            for name in op.inputs:
                needed |= {name, program.tensors[name].storage}
    ops = tuple(reversed(kept))
    named = {*program.inputs, *program.outputs}
    for op in ops:
        named |= {op.y, *op.inputs}
    named |= {program.tensors[n].storage for n in named}
    tensors = {n: t for n, t in program.tensors.items() if n in named}
    constants = {n: r for n, r in program.constants.items() if n in named}
    return replace(program, tensors=tensors, constants=constants, ops=ops)


def tidy(expr: Expr, loads: Iterable[View]) -> Epilogue:
    """An epilogue with equal views merged, unread ones dropped, and loads renumbered in the order of first use."""
    loads = tuple(loads)
    order: dict[View, int] = {}
    leaf: dict[Expr, Expr] = {}
    for e in walk(expr):
        if e.fn == "load":
            number = order.setdefault(loads[e.value], len(order))  # type: ignore[index]
            leaf[e] = load(number, e.dtype)
    return Epilogue(substitute(expr, leaf), tuple(order))


def shifted(expr: Expr, by: int) -> Expr:
    """The expression with the numbers of its loads increased."""
    return substitute(expr, {e: load(e.value + by, e.dtype) for e in walk(expr) if e.fn == "load"})  # type: ignore[operator,arg-type]


def fits(epilogue: Epilogue) -> bool:
    return len(epilogue.loads) <= MAX_LOADS and len(walk(epilogue.expr)) <= MAX_NODES


# --- x[i]  =>  x[0] where only i = 0 occurs ----------------------------------------------------------------------------


def canonical(program: Program) -> Program:
    """Equal reads get equal views, whoever wrote them: coordinates along axes of extent 1 become constants."""
    ops = []
    for op in program.ops:
        shape = program.op_shape(op)
        loads = tuple(canonical_view(v, shape) for v in op.views)
        ops.append(replace(op, epilogue=replace(tidy(op.epilogue.expr, loads), shuffle=op.epilogue.shuffle)))
    return replace(program, ops=tuple(ops))


def canonical_view(view: View, shape: tuple[int, ...]) -> View:
    return view.at([coord(a) if n > 1 else constant(0) for a, n in enumerate(shape)], shape)


# --- gemm(flatten(x), w)  =>  gemm(view(x), permuted w) ----------------------------------------------------------------


def flatten_into_weights(program: Program) -> Program:
    """An image flattened in the model's order (C, H, W) lies in memory as (H, W, C): reorder the weights' columns instead."""
    e = Editor(program)
    for i, gemm in enumerate(e.ops):
        if not isinstance(gemm, Gemm) or gemm.b not in e.constants or len(e.readers[gemm.a]) != 1 or not e.is_private(gemm.a):
            continue
        flatten = e.writer(gemm.a)
        if not isinstance(flatten, Pointwise) or flatten.epilogue.expr != load(0) or len(flatten.views) != 1:
            continue
        x, a, b = e.tensors[flatten.views[0].tensor], e.tensors[gemm.a], e.tensors[gemm.b]
        image = x.rank >= 3 and x.inner == 1 and a.rank == 2 and a.shape[0] == x.shape[0]
        if not image or x.base is not None or x.name in e.program.inputs or x.padded != x.shape or math.prod(x.shape[2:]) == 1:
            continue
        if flatten.views[0] != canonical_view(reshape_view(x.name, x.shape, a.shape), a.shape):
            continue
        rows, axes = b.shape[0], (0, *range(2, x.rank), 1)
        recipe = transform("reshape", e.constants[b.name], shape=(rows, *x.shape[1:]))
        recipe = transform("reshape", transform("transpose", recipe, axes=axes), shape=b.shape)
        e.add_constant(replace(b, name=f"{b.name}.hwc"), recipe)
        e.tensors[a.name] = replace(a, padded=a.shape, strides=(a.shape[1], 1), base=x.name)
        e.put(i, renamed(gemm, {b.name: f"{b.name}.hwc"}))
        e.drop(e.position[a.name])
    return e.result()


# --- f(g(x))  =>  (f ∘ g)(x) ------------------------------------------------------------------------------------------


def compose(program: Program) -> Program:
    e = Editor(program)
    for i in range(len(e.ops)):
        while True:
            op = e.ops[i]
            if not isinstance(op, Pointwise):
                break
            merged = next((m for view in op.views if (m := _inlined(e, op, view)) is not None), None)
            if merged is None:
                break
            e.put(i, merged)
            _drop_unread(e)
    return e.result()


def _drop_unread(e: Editor) -> None:
    for name, i in list(e.position.items()):
        if not e.readers[name] and e.is_private(name):
            e.drop(i)


def _inlined(e: Editor, consumer: Pointwise, view: View) -> Pointwise | None:
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
    if len(e.readers[name]) > 1 and not (moves_only and _keeps_lanes(producer.views[0], e.tensors, t)):
        return None
    if not moves_only and y.size > 2 * t.size:
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
    return replace(consumer, epilogue=epilogue, nodes=_names(producer, consumer))


def _names(first: Op, then: Op) -> tuple[str, ...]:
    return tuple(dict.fromkeys(first.nodes + then.nodes))


def _keeps_lanes(view: View, tensors: dict[str, Tensor], y: Tensor) -> bool:
    """Whether neighbours in `y` are neighbours in what the view reads, so that reading through it costs nothing."""
    x = tensors[view.tensor]
    if view.valid or any(i.affine is None for i in view.index):
        return False
    return x.inner is None or y.inner is None or view.index[x.inner].affine == {y.inner: 1}


# --- f(op(x), y)  =>  op(x) with epilogue f(acc, y) -------------------------------------------------------------------


def epilogues(program: Program) -> Program:
    e = Editor(program)
    for i in range(len(e.ops)):
        op = e.ops[i]
        if not isinstance(op, Pointwise):
            continue
        producers = {e.position[n] for v in op.views if (n := v.tensor) in e.position}
        for p in sorted(producers, reverse=True):  # the one that runs last: the others' results are there by then
            producer = e.ops[p]
            assert producer is not None
            merged = _with_epilogue(e, producer, op)
            if merged is not None:
                e.drop(p)
                e.put(i, merged)
                break
    return e.result()


def _with_epilogue(e: Editor, producer: Op, consumer: Pointwise) -> Op | None:
    """`producer` storing what `consumer` makes of its result, or None where that cannot be an epilogue."""
    t, y = e.tensors[producer.y], e.tensors[consumer.y]
    if isinstance(producer, Pointwise) or t.rank > 4 or e.readers[t.name] != {e.position[consumer.y]} or not e.is_private(t.name):
        return None
    own = {v for v in consumer.views if v.tensor == t.name}
    others = tuple(v for v in consumer.views if v.tensor != t.name)
    if len(own) != 1 or producer.epilogue.expr.dtype is not t.dtype.compute:
        return None
    (view,) = own
    if t.shape != y.shape or view != canonical_view(identity_view(t.name, t.rank), t.shape):
        if (merged := _under_other_axes(e, producer, consumer, view)) is not None:
            return merged
        return _with_shuffle(e, producer, consumer, view) if isinstance(producer, Conv) and not others else None
    if producer.epilogue.shuffle != 1 and others:
        return None  # an epilogue's loads are indexed before the shuffle
    if any(v.valid or any(i.affine is None for i in v.index) for v in others):
        return None
    if y.inner != t.inner and y.inner is not None and t.inner is not None and t.shape[t.inner] > SCATTERED_CHANNELS:
        return None
    return _joined(e, producer, consumer, producer.epilogue)


def _under_other_axes(e: Editor, producer: Op, consumer: Pointwise, view: View) -> Op | None:
    """`producer` with the consumer's expression, where the consumer calls the axes differently but lies in memory just so.

    A matrix product over (N, H, W, C), say, and what adds it to an image (N, C, H, W). The consumer's result becomes a view.
    """
    t, y = e.tensors[producer.y], e.tensors[consumer.y]
    if producer.epilogue.shuffle != 1 or not e.is_private(y.name) or y.dtype is not t.dtype or y.size != t.size:
        return None
    axes: dict[int, int] = {}  # of y → of t
    for a, i in enumerate(view.index):
        if t.shape[a] == 1 and t.padded[a] == 1:
            continue
        if i.constant or i.affine is None or list(i.affine.values()) != [1]:
            return None
        (axis,) = i.affine
        if (y.shape[axis], y.padded[axis], y.strides[axis]) != (t.shape[a], t.padded[a], t.strides[a]):
            return None
        axes[axis] = a
    if any(n > 1 and axis not in axes for axis, n in enumerate(y.padded)):
        return None
    index = [coord(axes[axis]) if axis in axes else constant(0) for axis in range(y.rank)]
    views = tuple(v.at(index, t.shape) for v in consumer.views)
    if any(v.valid or any(i.affine is None for i in v.index) for v in views):
        return None
    moved = replace(consumer, y=t.name, epilogue=tidy(consumer.epilogue.expr, views))
    merged = _joined(e, producer, moved, producer.epilogue)
    if merged is not None:
        e.tensors[y.name] = replace(y, base=t.name, offset=0)
        e.viewed.add(t.name)
    return merged


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
    return replace(producer, y=consumer.y, epilogue=epilogue, nodes=_names(producer, consumer))


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
        permuted = _permute_channels(e, conv, _crd_to_dcr(t.shape[1], block))
        if permuted is None:
            return None
        conv, before = permuted, permuted.epilogue
    if y.shape == whole:
        return _joined(e, conv, consumer, replace(before, shuffle=block))
    order = sorted(range(4), key=lambda a: -y.strides[a])
    base = dense(f"{y.name}.whole", whole, y.dtype, (*(a for a in order if a != 1), 1))
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


def _permute_channels(e: Editor, conv: Conv, order: list[int]) -> Conv | None:
    """The convolution with its output channels taken in `order`: weights, and every constant that varies along them."""
    import numpy as np

    names, take = {}, Literal(np.array(order, np.int64))
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
        names[name] = f"{name}.dcr"
        recipe = transform("take", e.constants[name], take, axis=axis)
        e.add_constant(replace(e.tensors[name], name=names[name]), recipe)
    return renamed(conv, names)  # type: ignore[return-value]


# --- y = copy(x)  =>  y is a view of x --------------------------------------------------------------------------------


def alias(program: Program) -> Program:
    e = Editor(program)
    for i, op in enumerate(e.ops):
        if op is None or not _copies(e, op):
            continue
        y = e.tensors[op.y]
        if not e.is_private(y.name):
            continue
        view = _as_view(e.tensors[op.views[0].tensor], y, op.views[0])
        if view is not None:
            e.tensors[y.name] = view
            e.viewed.add(view.storage)
            e.drop(i)
    return e.result()


def _copies(e: Editor, op: Op) -> bool:
    """Whether `op` only moves a tensor of ours that has memory in the arena, without changing its type."""
    if not isinstance(op, Pointwise) or op.epilogue.expr.fn != "load" or op.views[0].valid:
        return False
    x = e.tensors[op.views[0].tensor]
    outside = {*e.program.inputs, *e.program.outputs, *e.constants}
    return x.dtype is e.tensors[op.y].dtype and x.name not in outside and x.storage not in outside


def _as_view(x: Tensor, y: Tensor, view: View) -> Tensor | None:
    """`y` as a view of `x` with padding that is there and zero, or None."""
    address = constant(0)
    for index, stride in zip(view.index, x.strides, strict=True):
        address = address + index * stride
    affine = _rejoined(address).affine
    if affine is None or any(k <= 0 for k in affine.values()):
        return None
    strides = tuple(affine.get(a, 1) if n > 1 else 1 for a, n in enumerate(y.shape))
    if any(n > 1 and a not in affine for a, n in enumerate(y.shape)):
        return None  # a broadcast
    offset = _rejoined(address).constant
    padded = list(y.shape)
    if x.inner is not None:
        index = view.index[x.inner]
        lo, hi = index.bounds(y.shape)
        lanes = [a for a, k in affine.items() if k == 1]
        if index.affine is None or len(index.terms) > 1 or (index.terms and not lanes) or lo % PAD or x.offset % PAD:
            return None
        if hi == x.shape[x.inner] - 1:  # reaches the end: x's padding is y's
            if lanes:
                padded[lanes[0]] += x.padded[x.inner] - x.shape[x.inner]
            elif x.padded[x.inner] != 1:
                return None
        elif not lanes or y.shape[lanes[0]] % PAD:
            return None
    return Tensor(y.name, y.shape, y.dtype, tuple(padded), strides, x.storage, x.offset + offset)


def _rejoined(index: Index) -> Index:
    """k·d·floor(e/d) + k·(e mod d) = k·e, as often as it applies: what a reshape of neighbouring axes leaves."""
    terms = dict(index.terms)
    for atom, k in index.terms:
        if isinstance(atom, Remainder):
            whole = _whole_of(atom)
            if terms.get(whole) == k * atom.divisor:
                rest = index - Index(((atom, k),)) - Index(((whole, k * atom.divisor),))
                return _rejoined(rest + atom.index * k)
    return index


def _whole_of(atom: Remainder) -> Atom:
    """floor(e / d) for e mod d, as `quotient` writes it where it does not simplify."""
    (term, *more) = atom.index.terms
    if not more and not atom.index.constant and isinstance(term[0], Quotient) and term[1] == 1:
        return Quotient(term[0].index, term[0].divisor * atom.divisor)
    return Quotient(atom.index, atom.divisor)


# --- concat(f(x), g(y))  =>  f and g write into slices -----------------------------------------------------------------


@dataclass(frozen=True)
class Piece:
    """One input of a concatenation: the op that copies `source` into `slice`."""

    position: int
    source: str
    slice: Tensor


def elide_concat(program: Program) -> Program:
    """Largest concatenations first: a smaller one whose inputs then lie side by side becomes a view of the larger."""
    e = Editor(program)
    pieces: dict[str, list[Piece]] = {}
    for i, op in enumerate(e.ops):
        if op is None:
            continue
        y = e.tensors[op.y]
        if (
            y.base is not None
            and _copies(e, op)
            and op.views[0] == canonical_view(identity_view(op.views[0].tensor, y.rank), y.shape)
        ):
            pieces.setdefault(y.base, []).append(Piece(i, op.views[0].tensor, y))
    for parent in sorted(pieces, key=lambda name: -e.tensors[name].span):
        if e.tensors[parent].base is None and not _joins_neighbours(e, parent, pieces[parent]):
            for piece in pieces[parent]:
                _write_in_place(e, piece)
    return e.result()


def _writers(e: Editor, parent: str) -> list[int]:
    return [i for name, i in e.position.items() if name == parent or e.tensors[name].base == parent]


def _joins_neighbours(e: Editor, parent: str, pieces: list[Piece]) -> bool:
    """Make `parent` a view if its inputs already lie in one tensor as they would lie in `parent`; else False."""
    whole = e.tensors[parent]
    if len(_writers(e, parent)) != len(pieces) or parent in e.program.outputs:
        return False
    first = e.tensors[pieces[0].source]
    if first.base is None:
        return False
    start = first.offset - pieces[0].slice.offset
    for p in pieces:
        source = e.tensors[p.source]
        if source.base != first.base or source.strides != first.strides or source.offset - p.slice.offset != start:
            return False
    last = pieces[-1]
    if e.tensors[last.source].padded != last.slice.padded or start < 0:
        return False
    if any(t.base == parent and t.strides != whole.strides for t in e.tensors.values()):
        return False
    moved = replace(whole, strides=first.strides, base=first.base, offset=start)
    e.tensors[parent] = moved
    for name, t in list(e.tensors.items()):  # views of the former parent are now views of its base
        if t.base == parent:
            e.tensors[name] = _moved(t, whole, moved)
    for p in pieces:
        e.drop(p.position)
    return True


def _moved(view: Tensor, old: Tensor, new: Tensor) -> Tensor:
    """A view of `old` with old's strides, when `old` itself has become the view `new`: the same elements."""
    offset, rest = new.offset, view.offset
    for axis in sorted(range(old.rank), key=lambda a: -old.strides[a]):
        if old.padded[axis] > 1:
            offset, rest = offset + rest // old.strides[axis] * new.strides[axis], rest % old.strides[axis]
    return replace(view, strides=new.strides, base=new.base, offset=offset)


def _write_in_place(e: Editor, piece: Piece) -> None:
    """Let the op that writes the source write the slice itself, where the source's lanes stay aligned in it."""
    source, part = e.tensors[piece.source], piece.slice
    if not e.is_private(source.name) or e.writer(source.name) is None or source.inner != part.inner:
        return
    lanes = source.inner
    if lanes is not None and (part.offset % PAD or part.padded[lanes] % PAD or source.padded != part.padded):
        return
    if any(t.base == source.name for t in e.tensors.values()):
        return
    e.tensors[source.name] = replace(part, name=source.name)
    e.drop(piece.position)
