"""What every stage may rely on in a program: the verifier."""

from __future__ import annotations

from tccompile.ir.expr import Epilogue, Expr, walk
from tccompile.ir.loops import verify_loops
from tccompile.ir.ops import Op, Pointwise
from tccompile.ir.program import Program
from tccompile.ir.tensor import dense
from tccompile.ir.types import DType


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
