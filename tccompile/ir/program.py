"""The typed program between ONNX and the kernels: tensors with layouts, the ops, and the verifier."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import reduce
from inspect import get_annotations
from operator import or_
from types import NoneType, UnionType
from typing import Annotated, Any, ClassVar, Self, Union, get_args, get_origin

from tccompile.ir.expr import ACC, Coord, Element, Epilogue, Expr, Index, Shape, View, walk
from tccompile.ir.forms import Form
from tccompile.ir.tensor import Storage, Tensor, dense
from tccompile.ir.types import DType
from tccompile.ir.weights import Recipe

# --- Ops -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Operand:
    """Of a field of an op: it names a tensor that the op reads.

    multiplied  Tensor Cores read it as weights
    integers    it holds indices, counts or bits
    """

    multiplied: bool = False
    integers: bool = False


Ref = Annotated[str, Operand()]
Weights = Annotated[str, Operand(multiplied=True)]
Integers = Annotated[str, Operand(integers=True)]


class OneOf:
    """Of a field of an op: it is one of these words."""

    def __init__(self, *words: str) -> None:
        self.words = words


@dataclass(frozen=True, kw_only=True)
class Op:
    """One typed operation. The types of its fields say what they hold; what is asked of every op follows from them.

    A field holds one of these, a tuple of them, or None in its place:

    Ref, Weights, Integers    the name of a tensor that it reads
    Index                     an index, whose elements may be read from tensors
    Expr                      an expression of `acc`
    Annotated[str, OneOf(…)]  a word
    int, float, bool          a number

    nodes  the user's ONNX nodes it stands for, the one that gives it its name first
    y      the tensor that it writes
    """

    nodes: tuple[str, ...]
    y: str
    epilogue: Epilogue = field(default_factory=Epilogue)

    takes_epilogue: ClassVar[bool] = True
    """Whether `epilogue` may be more than what the op computed."""

    holds: ClassVar[Mapping[str, Any]] = {}
    """What each field of its own holds, by the field's name and in their order: an Operand, a OneOf, or a type."""

    def __init_subclass__(cls) -> None:
        cls.holds = {name: _held(hint) for name, hint in get_annotations(cls, eval_str=True).items()}
        for name, held in cls.holds.items():
            if not isinstance(held, Operand | OneOf) and held not in (Index, Expr, int, float, bool):
                raise TypeError(f"{cls.__name__}.{name}: {held} does not say what it holds, see Op")

    @property
    def operands(self) -> tuple[str, ...]:
        """The tensors it reads beside those of its views."""
        return tuple(name for field, held in self.holds.items() if _refers(held) for name in _named(getattr(self, field)))

    @property
    def multiplied(self) -> tuple[str, ...]:
        """The operands that Tensor Cores read as weights."""
        fields = (field for field, held in self.holds.items() if isinstance(held, Operand) and held.multiplied)
        return tuple(name for field in fields for name in _named(getattr(self, field)))

    @property
    def integers(self) -> tuple[str, ...]:
        """The operands that hold indices, counts or bits."""
        fields = (field for field, held in self.holds.items() if isinstance(held, Operand) and held.integers)
        return tuple(name for field in fields for name in _named(getattr(self, field)))

    @property
    def views(self) -> tuple[View, ...]:
        return self.epilogue.loads

    @property
    def inputs(self) -> tuple[str, ...]:
        """All tensors it reads, each once."""
        return tuple(dict.fromkeys((*self.operands, *(name for v in self.views for name in v.tensors))))

    def renamed(self, names: Mapping[str, str]) -> Self:
        """The op with tensors replaced by others, in fields and views."""
        loads = tuple(v.renamed(names) for v in self.epilogue.loads)
        changed = {field: _renamed(getattr(self, field), names) for field, held in self.holds.items() if _refers(held)}
        return replace(self, y=names.get(self.y, self.y), epilogue=replace(self.epilogue, loads=loads), **changed)


def _held(hint: Any) -> Any:
    """What a field of this type holds one of, or several, or none: an Operand, a OneOf, or a type."""
    if get_origin(hint) is Annotated:
        return get_args(hint)[1]
    if get_origin(hint) in (tuple, Union, UnionType):
        parts = {_held(part) for part in get_args(hint)} - {NoneType, Ellipsis}
        return parts.pop() if len(parts) == 1 else hint
    return hint


def _refers(held: Any) -> bool:
    return isinstance(held, Operand) or held is Index


def _named(value: Any) -> Iterator[str]:
    """The tensors that what a field holds refers to."""
    if isinstance(value, tuple):
        for part in value:
            yield from _named(part)
    elif isinstance(value, Index):
        yield from (element.tensor for element in value.elements)
    elif value is not None:
        yield value


def _renamed(value: Any, names: Mapping[str, str]) -> Any:
    if isinstance(value, tuple):
        return tuple(_renamed(part, names) for part in value)
    return value.renamed(names) if isinstance(value, Index) else names.get(value, value)


@dataclass(frozen=True, kw_only=True)
class Pointwise(Op):
    """y = expr over views, for each element of y: elementwise ops, and all ops that only move data.

    `expr` is the epilogue's, over its `loads`; it has no `acc`, and here a load's index may be anything.
    """


@dataclass(frozen=True, kw_only=True)
class Conv(Op):
    """y = epilogue(conv(x, w)): cross-correlation of x (N, C, H, W) with w (O, C/groups, R, S), or of rank 3 (N, C, W).

    Before the epilogue's shuffle y is (N, O, P, Q); beyond the edges x reads as zero.
    """

    x: Ref
    w: Weights
    strides: tuple[int, ...]  # one per spatial axis
    pads: tuple[int, ...]  # at the start of each spatial axis; at the end is what y's extents need
    dilations: tuple[int, ...]
    groups: int = 1


@dataclass(frozen=True, kw_only=True)
class Gemm(Op):
    """y = epilogue(a @ bᵀ): a (…, M, K), b (N, K) or (…, N, K) with the same leading axes, y (…, M, N)."""

    a: Ref
    b: Weights


@dataclass(frozen=True, kw_only=True)
class Mlp(Op):
    """y = epilogue(f(x @ wᵀ + b) @ vᵀ), of vectors that are images of one pixel: a squeeze's two products as one op.

    x (N, C, 1, 1), w (H, C, 1, 1), b (H,) or None for zeros, v (O, H, 1, 1), y (N, O, 1, 1)

    hidden  f, an expression of `acc`
    """

    x: Ref
    w: Weights
    v: Weights
    b: Ref | None = None
    hidden: Expr = ACC


@dataclass(frozen=True, kw_only=True)
class Attention(Op):
    """y = epilogue(softmax(scale * q @ kᵀ + mask) @ v): the softmax is over the rows of k, and 0 where a row sees none of them.

    q (B, H, M, D), k (B, G, N, D), v (B, G, N, E), y (B, H, M, E); head h of q meets head h // (H / G) of k and v.

    mask    (B, H, M, N) or 1 in place of any; added, or if it is bool, a row sees what it is true for
    causal  row m sees rows n <= m + causal of k and v; None: all of them
    """

    q: Ref
    k: Ref
    v: Ref
    scale: float
    mask: Ref | None = None
    causal: int | None = None


@dataclass(frozen=True, kw_only=True)
class Cumulate(Op):
    """y = the sums or products of x's elements along `axis` up to each one, or of those before it if `exclusive`.

    reverse  from the end of the axis on
    """

    x: Ref
    axis: int
    combine: Annotated[str, OneOf("add", "mul")]
    exclusive: bool = False
    reverse: bool = False

    takes_epilogue = False


@dataclass(frozen=True, kw_only=True)
class TopK(Op):
    """y (int64) = where along `axis` x's largest (or smallest) elements are, the first of equals first.

    NaN is larger than all others, and as large as NaN.

    As many as y has along the axis.
    """

    x: Ref
    axis: int
    largest: bool = True

    takes_epilogue = False


@dataclass(frozen=True, kw_only=True)
class Scatter(Op):
    """y = x, and then for each element i of the updates, in row-major order, y[at(i)] = combine(y[at(i)], updates[i]).

    at       one index for each axis of y over the coordinates of the updates: 0, a coordinate (each at most once), or an
             `Element` at indices that are affine
    combine  "set" (the update itself), "add", "mul", "min" or "max"
    """

    x: Ref
    updates: Ref
    at: tuple[Index, ...]
    combine: Annotated[str, OneOf("set", "add", "mul", "min", "max")] = "set"

    takes_epilogue = False


@dataclass(frozen=True, kw_only=True)
class Trees(Op):
    """y = what the leaves say that the rows of x come to, in each of so many trees: x (N, F), y (N, K).

    branches  (4 M,), int32: a record of four numbers for each node; the first `trees` of them are the roots. Of a branch they are
              the bits of a float32 t, 16 f + mode, c, and 0: it is left for record c if what feature f is to t is in `mode`
              (bits 0 to 3: less, equal, greater, or neither as one of them is NaN), and for record c + 1 otherwise. Of a leaf
              they are 0, 0, the first of its entries, and how many it has plus 1
    leaves    (2 E,), int32: the entries: a target k, and the bits of a float32 that is combined with y[:, k]
    depth     a walk ends after so many branches
    combine   "add", "min" or "max"; targets of which none of the leaves says anything are 0
    """

    x: Ref
    branches: Integers
    leaves: Integers
    trees: int
    depth: int
    combine: Annotated[str, OneOf("add", "min", "max")] = "add"

    takes_epilogue = False


@dataclass(frozen=True, kw_only=True)
class Pool(Op):
    """y = epilogue(max or mean of x's windows), x (N, C, H, W) or (N, C, W).

    Elements beyond the edges do not take part; `count_pads` counts as zeros those within `pads` of an edge, as ONNX does.
    """

    x: Ref
    kind: Annotated[str, OneOf("max", "mean")]
    window: tuple[int, ...]  # one per spatial axis, as strides and dilations
    strides: tuple[int, ...]
    pads: tuple[int, ...]  # at the start of each spatial axis
    end_pads: tuple[int, ...]  # at the end of each: counts for `count_pads`; ceil_mode may read beyond it
    dilations: tuple[int, ...]
    count_pads: bool = False


@dataclass(frozen=True, kw_only=True)
class Reduce(Op):
    """y = epilogue(combine over `axes` of pre(x)); y has extent 1 in those axes.

    A mean is the sum with an epilogue that scales; `pre` is an expression of `acc`, which stands for an element of x.
    """

    x: Ref
    axes: tuple[int, ...]
    combine: Annotated[str, OneOf("add", "mul", "min", "max")]
    pre: Expr = ACC


@dataclass(frozen=True, kw_only=True)
class Softmax(Op):
    """y = epilogue(softmax of x along `axis`, or its logarithm)"""

    x: Ref
    axis: int
    log: bool = False


@dataclass(frozen=True, kw_only=True)
class Norm(Op):
    """y = epilogue((x - mean) / sqrt(variance + eps)), both over `axes` of x; scale and bias are the epilogue's.

    If it is not `centred`, 0 stands for the mean, and the variance is the mean of squares. With `groups` g > 0, axis 1 is
    taken as g groups of neighbouring channels, and each group is one more reduced axis.
    """

    x: Ref
    axes: tuple[int, ...]
    eps: float
    groups: int = 0
    centred: bool = True


@dataclass(frozen=True, kw_only=True)
class Resize(Op):
    """y = epilogue(x resampled along `axes`): y[…, o, …] = sum over taps t of weights[o, t] * x[…, index[o, t], …].

    index, weights  one constant per axis: int32 and float32, (output extent, taps)
    """

    x: Ref
    axes: tuple[int, ...]
    index: tuple[Integers, ...]
    weights: tuple[Ref, ...]


@dataclass(frozen=True, kw_only=True)
class Rnn(Op):
    """y = the hidden state after each step, and then the last state: of T steps, N sequences, D directions and H units.

    A step computes, from the hidden state h of the step before, one pre-activation a for each of G gates,
    a = x + h @ rᵀ, and from those the next state, with functions f, g and k (the model's f, g and h), σ meaning f:

        rnn   (G = 1)            h = f(a)
        gru   (G = 3: z, r, n)   h = (1 - σ(z)) g(n) + σ(z) h, with n = x + (σ(r) h) @ rᵀ, or, with `reset_after`,
                                 n = x + σ(r) (h @ rᵀ + b)
        lstm  (G = 4: i, o, f, c)  c = σ(f + p₂ c) c + σ(i + p₀ c) g(c'), then h = σ(o + p₁ c) k(c)

    x        (T, N, D·G·H): the inputs' part of the pre-activations, biases included
    r        (D, G, H, H): the recurrent weights; r[d, g, j] are those of unit j
    b        (D, H), or None: a bias of n that is reset with the hidden state; p, (D, 3, H), or None: the peepholes
    h, c     (D, N, H), or None for zeros: the state before the first step
    lengths  (N,), or None: how many of the T steps each sequence has. Beyond them y is zero, and the state stays; of a sequence
             without steps the last state is zero, as in ONNX Runtime
    y        (T + 1, D, N, H), for lstm (T + 2, D, N, H): row t is h after step t, row T is the last h, row T + 1 the last c
    backward   for each direction, whether a sequence is read from its end
    functions  for each direction, the functions as expressions of `acc`: f; f and g; or f, g and k
    clip       pre-activations are clipped to ±clip; infinity for none
    coupled    an LSTM's forget gate is 1 - its input gate

    It has no epilogue.
    """

    x: Ref
    r: Weights
    cell: Annotated[str, OneOf("rnn", "gru", "lstm")]
    backward: tuple[bool, ...]
    functions: tuple[tuple[Expr, ...], ...]
    b: Ref | None = None
    p: Ref | None = None
    h: Ref | None = None
    c: Ref | None = None
    lengths: Integers | None = None
    clip: float = math.inf
    reset_after: bool = False
    coupled: bool = False

    takes_epilogue = False


GATES = {"rnn": 1, "gru": 3, "lstm": 4}
"""By the cell of an Rnn."""

OPS: tuple[type[Op], ...] = (
    Pointwise, Conv, Gemm, Mlp, Attention, Cumulate, TopK, Scatter, Trees, Pool, Reduce, Softmax, Norm, Resize, Rnn,
)  # fmt: skip


# --- Program ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Program:
    """One set of input shapes of a model: ops in an order in which they can run.

    inputs, outputs  tensors with the model's own names, dtypes and shapes, row-major and without padding
    constants        how the values of a constant tensor come from the model's weights; logical shape, before the padding
                     and order of axes that its entry in `tensors` says
    storage          of tensors whose precision or scale is a choice of their own, by the tensor that owns the memory. The ops'
                     expressions hold the scales already: this is for whoever looks at memory or asks why
    forms            of constants: other constants that hold the same in another form, which a kernel may read in their place. A
                     plan has those that its steps read
    """

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    tensors: Mapping[str, Tensor]
    constants: Mapping[str, Recipe]
    ops: tuple[Op, ...]
    storage: Mapping[str, Storage] = field(default_factory=dict)
    forms: Mapping[str, tuple[Form, ...]] = field(default_factory=dict)

    def op_shape(self, op: Op) -> Shape:
        """The shape of what `op` computes, which its epilogue's coordinates range over: y's before the shuffle."""
        y, b = self.tensors[op.y].shape, op.epilogue.shuffle
        return y if b == 1 else (y[0], y[1] * b * b, y[2] // b, y[3] // b)

    def forms_of(self, op: Op) -> list[Form]:
        """Other forms of the constants that `op` reads."""
        return [form for name in op.inputs for form in self.forms.get(name, ())]

    def readers(self) -> dict[str, list[Op]]:
        """The ops that read each tensor."""
        out: dict[str, list[Op]] = {name: [] for name in self.tensors}
        for op in self.ops:
            for name in op.inputs:
                out[name].append(op)
        return out

    def writer(self) -> dict[str, Op]:
        """The op that writes each tensor."""
        return {op.y: op for op in self.ops}


def needs(program: Program) -> list[list[int]]:
    """For each op the ones that write what it reads."""
    writers: dict[str, list[int]] = {}  # of each storage
    out = []
    for i, op in enumerate(program.ops):
        owners = {program.tensors[name].storage for name in op.inputs}
        out.append(sorted({k for owner in owners for k in writers.get(owner, ())}))
        writers.setdefault(program.tensors[op.y].storage, []).append(i)
    return out


def earlier(program: Program) -> list[int]:
    """For each op all that must have run before it, by the data they read: bit i of the number stands for op i."""
    out: list[int] = []
    for direct in needs(program):
        out.append(reduce(or_, (out[k] | 1 << k for k in direct), 0))
    return out


def lifetimes(program: Program) -> dict[str, tuple[int, int]]:
    """The first and the last op that use each tensor that owns storage in the arena, in the order in which they come up."""
    elsewhere = {*program.inputs, *program.outputs, *program.constants}
    out: dict[str, tuple[int, int]] = {}
    for i, op in enumerate(program.ops):
        for name in (*op.inputs, op.y):
            owner = program.tensors[name].storage
            if owner not in elsewhere:
                out[owner] = out.get(owner, (i, i))[0], i
    return out


def products(op: Op, program: Program) -> int:
    """Operations of an op's convolution or matrix products, two for a multiplication with an addition; 0 for ops without any."""
    shape = {name: program.tensors[name].shape for name in op.operands}
    match op:
        case Conv(w=w):
            return 2 * math.prod(program.op_shape(op)) * math.prod(shape[w][1:])
        case Gemm(a=a):
            return 2 * math.prod(program.op_shape(op)) * shape[a][-1]
        case Mlp(x=x, w=w, v=v):
            return 2 * shape[x][0] * shape[w][0] * (shape[w][1] + shape[v][0])
        case Attention(q=q, k=k, v=v):  # each row of q meets each row of k and of v
            return 2 * math.prod(shape[q][:3]) * shape[k][2] * (shape[q][3] + shape[v][3])
        case Rnn(x=x, r=r):
            return 2 * math.prod((*shape[x][:2], *shape[r]))
    return 0


def verify(program: Program) -> None:
    """Hold a program to what every stage may rely on; raises AssertionError that names the op and the rule (a bug of ours)."""
    tensors = program.tensors
    for name, t in tensors.items():
        assert t.name == name, f"tensor {name!r} calls itself {t.name!r}"
        assert len(t.shape) == len(t.padded) == len(t.strides), f"{name}: shape, padded and strides differ in length"
        assert all(0 <= n <= p for n, p in zip(t.shape, t.padded, strict=True)), f"{name}: padded {t.padded} < shape {t.shape}"
        if t.base is not None:
            base = tensors[t.base]
            assert base.base is None, f"{name}: its base {t.base} is itself a view"
            assert base.dtype is t.dtype, f"{name}: {t.dtype} in storage of {base.dtype}"
            assert t.offset >= 0 and t.offset + t.span <= base.span, f"{name}: reaches outside the storage of {t.base}"
    for name in program.inputs + program.outputs:
        t = tensors[name]
        plain = dense(name, t.shape, t.dtype, pad=1)
        assert t == plain, f"model input or output {name} is not row-major without padding"
    written = {*program.inputs, *program.constants}
    assert not set(program.outputs) & set(program.inputs), "an output is an input"
    for op in program.ops:
        where = f"{type(op).__name__} {op.nodes[0]}"
        for name in op.inputs:
            owner = tensors[name].storage
            assert name in written or owner in written, f"{where} reads {name}, which nothing before it writes"
        assert op.y not in written, f"{where} writes {op.y}, which has been written"
        written |= {op.y, tensors[op.y].storage}
        _verify_expressions(program, op, where)
    for name in program.outputs:
        assert name in written, f"nothing writes the output {name}"


def _verify_places(op: Scatter, where: str) -> None:
    through: list[int] = []
    for index in op.at:
        match index:
            case Index((), 0):
                continue
            case Index(((Coord(axis), 1),), 0):
                through.append(axis)
            case Index(((Element(_, inner, _), 1),), 0):
                assert all(i.affine is not None for i in inner), f"{where}: it reads an index at an index that is not affine"
            case _:
                raise AssertionError(f"{where}: it writes at {index}")
    assert len(set(through)) == len(through), f"{where}: it writes at one coordinate along two axes"


def _verify_expressions(program: Program, op: Op, where: str) -> None:
    shape = program.op_shape(op)
    if not op.takes_epilogue:
        plain = Epilogue(Expr("acc", (), None, program.tensors[op.y].dtype.compute))
        assert op.epilogue == plain, f"{where}: it takes no epilogue"
    if isinstance(op, Scatter):
        _verify_places(op, where)
    for view in op.views:
        assert len(view.index) == program.tensors[view.tensor].rank, f"{where}: the view of {view.tensor} has another rank"
        if not isinstance(op, Pointwise):
            affine = all(i.affine is not None for i in view.index) and not view.valid
            assert affine, f"{where}: an epilogue reads {view.tensor} at an index that is not affine"
        indexed = [(e.tensor, e.index) for i in (*view.index, *(r.index for r in view.valid)) for e in i.elements]
        for name, _ in indexed:
            assert program.tensors[name].dtype.compute is DType.I64, f"{where}: an index is read from {name}, not of integers"
        for name, index in [(view.tensor, view.index), *indexed] if not view.valid and 0 not in shape else ():
            for i, n in zip(index, program.tensors[name].shape, strict=True):
                lo, hi = i.bounds(shape)
                assert lo >= 0 and hi < n, f"{where}: reads {name} at {lo}…{hi} of {n}"
    for e in walk(op.epilogue.expr):
        assert e.fn != "acc" or not isinstance(op, Pointwise), f"{where}: a Pointwise has no acc"
        if e.fn == "load":
            view = op.views[e.value]  # type: ignore[index]
            assert e.dtype is program.tensors[view.tensor].dtype.compute, f"{where}: loads {view.tensor} as {e.dtype}"
