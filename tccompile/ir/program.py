"""The typed program between ONNX and the kernels: tensors with layouts, the ops in order, and the verifier."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from operator import or_

from tccompile.ir.expr import Epilogue, Expr, walk
from tccompile.ir.extent import Extent, Shape, hint
from tccompile.ir.forms import Form, Packed
from tccompile.ir.loops import kept, verify_loops
from tccompile.ir.ops import Op, Pointwise
from tccompile.ir.tensor import Storage, Tensor, dense
from tccompile.ir.types import DType
from tccompile.ir.weights import Recipe


@dataclass(frozen=True)
class Count:
    """How many elements there are along axes whose extent the data decide.

    tensor  an output that holds it, one int64: it is no result that users see
    limit   there is room for so many; with more an inference has failed
    node    the user's node that decides it
    cuts    outputs that are cut to it, and along which axes
    """

    tensor: str
    limit: Extent
    node: str
    cuts: Mapping[str, tuple[int, ...]]


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
    counts           of elements of outputs that the data decide
    """

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    tensors: Mapping[str, Tensor]
    constants: Mapping[str, Recipe]
    ops: tuple[Op, ...]
    storage: Mapping[str, Storage] = field(default_factory=dict)
    forms: Mapping[str, tuple[Form, ...]] = field(default_factory=dict)
    counts: tuple[Count, ...] = ()

    @property
    def results(self) -> tuple[str, ...]:
        """The outputs that users see."""
        hidden = {count.tensor for count in self.counts}
        return tuple(name for name in self.outputs if name not in hidden)

    def op_shape(self, op: Op) -> Shape:
        """The shape of what `op` computes, which its epilogue's coordinates range over: y's before the shuffle."""
        y, b = self.tensors[op.y].shape, op.epilogue.shuffle
        return y if b == 1 else (y[0], y[1] * b * b, y[2] // b, y[3] // b)

    def products(self, op: Op) -> int:
        """See `Op.products`."""
        return hint(op.products(self._shapes(op), self.op_shape(op)))

    def flops(self, op: Op) -> int:
        """See `Op.flops`."""
        return hint(op.flops(self._shapes(op), self.op_shape(op)))

    def _shapes(self, op: Op) -> dict[str, Shape]:
        return {name: self.tensors[name].shape for name in op.operands}

    def forms_of(self, op: Op) -> list[Form]:
        """Other forms of the constants that `op` reads."""
        return [form for name in op.inputs for form in self.forms.get(name, ())]

    def packed(self, name: str) -> Packed | None:
        """The form of integers that is all that a plan has of a constant; None if it has the constant itself."""
        return next((form for form in self.forms.get(name, ()) if isinstance(form, Packed) and form.alone), None)

    def readers(self) -> dict[str, list[Op]]:
        """The ops that read each tensor."""
        out: dict[str, list[Op]] = {name: [] for name in self.tensors}
        for op in self.ops:
            for name in op.inputs:
                out[name].append(op)
        return out

    def writer(self) -> dict[str, Op]:
        """The op that writes each tensor."""
        return {name: op for op in self.ops for name in op.results}


def needs(program: Program) -> list[list[int]]:
    """For each op the ones that write what it reads."""
    writers: dict[str, list[int]] = {}  # of each storage
    out = []
    for i, op in enumerate(program.ops):
        owners = {program.tensors[name].storage for name in op.inputs}
        out.append(sorted({k for owner in owners for k in writers.get(owner, ())}))
        for name in op.results:
            writers.setdefault(program.tensors[name].storage, []).append(i)
    return out


def earlier(program: Program) -> list[int]:
    """For each op all that must have run before it, by the data they read: bit i of the number stands for op i."""
    out: list[int] = []
    for direct in needs(program):
        out.append(reduce(or_, (out[k] | 1 << k for k in direct), 0))
    return out


def lifetimes(program: Program, within: Sequence[int] = ()) -> dict[str, tuple[int, int]]:
    """The first and the last op that use each tensor that owns storage in the arena, in the order in which they come up; what the
    body of a loop reads of outside is in use to the body's end.

    within  for each op, if given, the other one with which it is computed, or -1
    """
    elsewhere = {*program.inputs, *program.outputs, *program.constants}
    out: dict[str, tuple[int, int]] = {}
    for i, op in enumerate(program.ops):
        for name in (*op.inputs, *op.results):
            owner = program.tensors[name].storage
            if owner not in elsewhere:
                other = within[i] if within and within[i] >= 0 else i
                first, last = out.get(owner, (i, i))
                out[owner] = min(first, other), max(last, i, other)
    return kept(out, program)


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
        for name in op.results:
            assert name not in written, f"{where} writes {name}, which has been written"
            written |= {name, tensors[name].storage}
        if op.also is not None:
            y, second = tensors[op.y], tensors[op.also.y]
            assert (y.shape, y.padded, y.strides) == (second.shape, second.padded, second.strides), (
                f"{where}: {second} lies apart"
            )
        _verify_expressions(program, op, where)
    for name in program.outputs:
        assert name in written, f"nothing writes the output {name}"
    verify_loops(program)


def _verify_expressions(program: Program, op: Op, where: str) -> None:
    shape = program.op_shape(op)
    if not op.takes_epilogue:
        plain = Epilogue(Expr("acc", (), None, program.tensors[op.y].dtype.compute))
        assert op.epilogue == plain, f"{where}: it takes no epilogue"
    op.verify(where)
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
    taken = {e.dtype for e in walk(op.epilogue.expr) if e.fn == "acc"}
    assert len(taken) <= 1, f"{where}: its epilogue takes what it computed as {' and '.join(sorted(t.value for t in taken))}"
    for e in walk(op.epilogue.expr):
        assert e.fn != "acc" or not isinstance(op, Pointwise), f"{where}: a Pointwise has no acc"
        if e.fn == "load":
            view = op.views[e.value]  # type: ignore[index]
            assert e.dtype is program.tensors[view.tensor].dtype.compute, f"{where}: loads {view.tensor} as {e.dtype}"
