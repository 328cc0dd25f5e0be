"""Reductions over axes, and the softmaxes."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import onnx_graphsurgeon as gs

from tccompile.ir.expr import (
    Epilogue,
    Expr,
    View,
    broadcast_view,
    call,
    cast,
    const,
    constant,
    coord,
    identity_view,
    reshape_view,
)
from tccompile.ir.ops import Reduce, Softmax
from tccompile.ir.tensor import Tensor
from tccompile.ir.types import DType
from tccompile.lower.builder import Builder, Reads, shape_of
from tccompile.lower.pool import power, root
from tccompile.lower.positions import position


@dataclass(frozen=True)
class Reduction:
    """after(combine of before(x), elements that went in); in x's compute type until `after`."""

    combine: str
    before: Callable[[Expr], Expr] = lambda x: x
    after: Callable[[Expr, int], Expr] = lambda x, count: x


def _mean(x: Expr, count: int) -> Expr:
    """Of nothing it is 0, as in ONNX Runtime."""
    return call("div", x, float(max(count, 1))) if x.dtype is DType.F32 else call("trunc_div", x, max(count, 1))


def _square(x: Expr) -> Expr:
    return call("mul", x, x)


def _float(fn: str) -> Callable[[Expr, int], Expr]:
    return lambda x, count: call(fn, cast(x, DType.F32))


REDUCTIONS: dict[str, Reduction] = {
    "ReduceSum": Reduction("add"),
    "ReduceMean": Reduction("add", after=_mean),
    "ReduceMax": Reduction("max"),
    "ReduceMin": Reduction("min"),
    "ReduceProd": Reduction("mul"),
    "ReduceL1": Reduction("add", lambda x: call("abs", x)),
    "ReduceL2": Reduction("add", _square, _float("sqrt")),
    "ReduceSumSquare": Reduction("add", _square),
    "ReduceLogSum": Reduction("add", after=_float("log")),
    "GlobalAveragePool": Reduction("add", after=_mean),
    "GlobalMaxPool": Reduction("max"),
}


def reduce(node: gs.Node, b: Builder) -> None:
    """Any op of REDUCTIONS with `axes` as its second input."""
    x = b.operand(node.inputs[0])
    axes = _axes(b, x.rank)
    _drop_axes(node, b, combine(b, x, _kept(node, b, x, axes), axes, REDUCTIONS[node.op]))


def reduce_log_sum_exp(node: gs.Node, b: Builder) -> None:
    """log(sum(exp(x))) as m + log(sum(exp(x - m))) with m the largest x, or 0 if that is infinite."""
    x = b.operand(node.inputs[0])
    axes = _axes(b, x.rank)
    y = _kept(node, b, x, axes)
    finite = Reduction("max", after=lambda m, count: call("where", call("is_inf", m), 0.0, m))
    largest = combine(b, x, b.new(f"{y.name}.max", y.shape, order=y.order), axes, finite)
    reads = Reads(b, x.shape)
    value = reads.view(identity_view(x.name, x.rank))
    shifted = call("exp", call("sub", value, reads.view(broadcast_view(largest.name, largest.shape, x.shape))))
    terms = b.compute(b.new(f"{y.name}.exp", x.shape, order=x.order), shifted, reads)
    reads = Reads(b, y.shape)
    m = reads.view(identity_view(largest.name, y.rank))
    combine(b, terms, y, axes, Reduction("add", after=lambda s, count: call("add", call("log", s), m)), reads)
    _drop_axes(node, b, y)


def global_pool(node: gs.Node, b: Builder) -> None:
    """GlobalAveragePool and GlobalMaxPool: reductions over all axes but the first two."""
    x = b.operand(node.inputs[0])
    combine(b, x, b.result(node.outputs[0], x.order), tuple(range(2, x.rank)), REDUCTIONS[node.op])


def global_lp_pool(node: gs.Node, b: Builder) -> None:
    """(sum of |x|^p)^(1/p) over all axes but the first two."""
    x = b.operand(node.inputs[0])
    p = float(b.attr("p", 2))
    norm = Reduction("add", lambda v: power(v, p), lambda v, count: root(v, p))
    combine(b, x, b.result(node.outputs[0], x.order), tuple(range(2, x.rank)), norm)


def softmax(node: gs.Node, b: Builder) -> None:
    x = b.operand(node.inputs[0])
    axis = b.axis(b.attr("axis", -1), x.rank)
    b.emit(Softmax, b.result(node.outputs[0], x.order), x=x.name, axis=axis, log=node.op == "LogSoftmax")


def arg(node: gs.Node, b: Builder) -> None:
    """ArgMax and ArgMin: the least place (or greatest) of those whose element equals the largest (or smallest) one.

    NaN is neither, but if the first element is one, its place is taken, as ONNX Runtime does by comparing with the best so far.
    """
    x = b.operand(node.inputs[0])
    axis = b.axis(b.attr("axis", 0), x.rank)
    y = _kept(node, b, x, (axis,))
    _drop_axes(node, b, _place(node, b, x, axis, y, node.op == "ArgMax", bool(b.attr("select_last_index", 0))))


def hardmax(node: gs.Node, b: Builder) -> None:
    """1 at the first of the largest elements along an axis, 0 elsewhere."""
    x, t = b.operand(node.inputs[0]), node.outputs[0]
    axis = b.axis(b.attr("axis", -1), x.rank)
    shape = (*x.shape[:axis], 1, *x.shape[axis + 1 :])
    place = _place(node, b, x, axis, b.new(f"{t.name}.place", shape, DType.I32, x.order), True, False)
    reads = Reads(b, x.shape)
    number = position(reads, t.name, coord(axis), x.shape[axis])
    here = call("equal", number, reads.view(broadcast_view(place.name, shape, x.shape)))
    b.compute(b.result(t, x.order), cast(here, DType.F32), reads)


def lp_normalization(node: gs.Node, b: Builder) -> None:
    """x / (sum of |x|^p)^(1/p) along an axis; 0 where that is 0."""
    x, t = b.operand(node.inputs[0]), node.outputs[0]
    axis, p = b.axis(b.attr("axis", -1), x.rank), float(b.attr("p", 2))
    shape = (*x.shape[:axis], 1, *x.shape[axis + 1 :])
    norm = Reduction("add", lambda v: power(v, p), lambda v, count: root(v, p))
    length = combine(b, x, b.new(f"{t.name}.norm", shape, order=x.order), (axis,), norm)
    reads = Reads(b, x.shape)
    value, by = reads.view(identity_view(x.name, x.rank)), reads.view(broadcast_view(length.name, shape, x.shape))
    b.compute(b.result(t, x.order), call("where", call("equal", by, 0.0), 0.0, call("div", value, by)), reads)


def _place(node: gs.Node, b: Builder, x: Tensor, axis: int, y: Tensor, largest: bool, last: bool) -> Tensor:
    """y (extent 1 along the axis) = the first or last place of the largest or smallest element."""
    name, n, shape = node.outputs[0].name, x.shape[axis], y.shape
    floats = x.dtype.is_float
    combined, worst = ("max", -math.inf) if largest else ("min", math.inf)
    extreme = Reduction(combined, (lambda v: call("where", call("is_nan", v), const(worst), v)) if floats else (lambda v: v))
    best = combine(b, x, b.new(f"{name}.best", shape, b.dtype(node.inputs[0]), x.order), (axis,), extreme)
    reads = Reads(b, x.shape)
    value, wanted = reads.view(identity_view(x.name, x.rank)), reads.view(broadcast_view(best.name, shape, x.shape))
    number = position(reads, name, coord(axis), n)
    place = call("where", call("equal", value, wanted), number, const(0 if last else n - 1, DType.I64))
    places = b.compute(b.new(f"{name}.places", x.shape, DType.I32, x.order), place, reads)
    chosen = Reduction("max" if last else "min")
    if not floats:
        return combine(b, places, y, (axis,), chosen)
    reads = Reads(b, y.shape)
    first = reads.view(View(x.name, tuple(constant(0) if a == axis else coord(a) for a in range(x.rank))))

    def unless_first(p: Expr, count: int) -> Expr:
        return call("where", call("is_nan", first), const(0, DType.I64), p)

    return combine(b, places, y, (axis,), replace(chosen, after=unless_first), reads)


def combine(b: Builder, x: Tensor, y: Tensor, axes: tuple[int, ...], r: Reduction, reads: Reads | None = None) -> Tensor:
    """y = r over `axes` of x, which y keeps with extent 1; without axes it is a Pointwise."""
    reads = reads or Reads(b, y.shape)
    count = math.prod(x.shape[a] for a in axes)
    if not axes:
        value = reads.view(identity_view(x.name, x.rank))
        return b.compute(y, r.after(r.before(value), count), reads)
    if count == 0:
        return b.compute(y, cast(r.after(_identity(r.combine, x.dtype), count), y.dtype.compute), reads)
    acc = Expr("acc", (), None, x.dtype.compute)
    epilogue = Epilogue(cast(r.after(acc, count), y.dtype.compute), tuple(reads.views))
    return b.emit(Reduce, y, x=x.name, axes=axes, combine=r.combine, pre=r.before(acc), epilogue=epilogue)


def _identity(combine: str, dtype: DType) -> Expr:
    """What a reduction of no elements gives."""
    if combine in ("add", "mul"):
        return const(combine == "mul", dtype.compute)
    if dtype.is_float:
        return const(-math.inf if combine == "max" else math.inf)
    if dtype is DType.BOOL:
        return const(combine == "min", DType.BOOL)
    info = np.iinfo(dtype.numpy)
    return const(int(info.min if combine == "max" else info.max), DType.I64)


def _axes(b: Builder, rank: int) -> tuple[int, ...]:
    axes = b.ints(1, "axes")
    if not axes:
        return () if b.attr("noop_with_empty_axes", 0) else tuple(range(rank))
    return tuple(sorted({b.axis(a, rank) for a in axes}))


def _kept(node: gs.Node, b: Builder, x: Tensor, axes: tuple[int, ...]) -> Tensor:
    """The tensor for the result with the reduced axes kept: the node's output itself unless it drops them."""
    y = node.outputs[0]
    shape = tuple(1 if a in axes else n for a, n in enumerate(x.shape))
    if shape == shape_of(y):
        return b.result(y, x.order)
    return b.new(f"{y.name}.kept", shape, b.dtype(y), x.order)


def _drop_axes(node: gs.Node, b: Builder, kept: Tensor) -> None:
    y = node.outputs[0]
    if not b.known(y):
        b.copy(reshape_view(kept.name, kept.shape, shape_of(y)), b.result(y))
