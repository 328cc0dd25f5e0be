"""Operators of the user's own: an elementwise one is a Pointwise of what its function makes of values, another one a Custom."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx_graphsurgeon as gs

from tccompile.custom.operators import Operator, Shaped, blamed_on_user
from tccompile.custom.values import Place, Value, as_expr, traced
from tccompile.errors import OperatorError
from tccompile.ir.expr import Epilogue, Expr, View, coord, load, reshape_view
from tccompile.ir.expr import cast as cast_to
from tccompile.ir.extent import Shape
from tccompile.ir.ops.custom import Custom, starts
from tccompile.ir.tensor import Tensor
from tccompile.ir.types import FLOAT8, DType
from tccompile.load.custom import attributes_of
from tccompile.lower.builder import IMAGE, Builder, Order, Reads, dtype_of, shape_of
from tccompile.lower.pointwise import truncated, wrapped


def custom(operator: Operator, node: gs.Node, b: Builder) -> None:
    """A node of an operator. Raises OperatorError, which names the user's line and the node."""
    where = f"node {b.nodes[0]!r}"
    try:
        attributes = attributes_of(operator, node.attrs, where)
        tensors = [b.input(i) for i in range(len(node.inputs))]
        shaped = [None if t is None else Shaped(shape_of(t), _type_of(t, b)) for t in tensors]
        outputs = operator.shapes(operator.bound(shaped, attributes))
        (_elementwise if operator.elementwise else _with_kernel)(operator, b, tensors, attributes, outputs)
    except OperatorError as error:
        if where in str(error):
            raise
        raise OperatorError(f"{error} ({where})") from error


def _type_of(t: gs.Tensor, b: Builder) -> str:
    return (dtype_of(t) or b.io_dtype(t)).value


LARGEST = 1 << 11
"""Operations of an expression, each counted wherever it stands; and 20 times how deep they nest."""


def _size(expr: Expr) -> tuple[int, int]:
    """How many operations an expression has, and 20 times its depth."""
    known: dict[int, tuple[int, int]] = {}

    def of(e: Expr) -> tuple[int, int]:
        if id(e) not in known:
            parts = [of(a) for a in e.args]
            known[id(e)] = 1 + sum(n for n, _ in parts), 20 + max((depth for _, depth in parts), default=0)
        return known[id(e)]

    return of(expr)


# --- Elementwise -------------------------------------------------------------------------------------------------------


def _elementwise(
    operator: Operator, b: Builder, tensors: Sequence[gs.Tensor | None], attributes: Mapping[str, Any], outputs: Sequence[Shaped]
) -> None:
    for k, (t, said) in enumerate(zip(b.node.outputs, outputs, strict=False)):
        if not b.used(t):
            continue
        reads = Reads(b, said.shape)
        values = [None if x is None else Value(_read(operator, x, reads)) for x in tensors]
        made = _traced(operator, operator.bound(values, attributes), reads)
        results = made if isinstance(made, tuple | list) else (made,)
        if len(results) != len(outputs):
            raise operator.wrong(f"it gives {len(results)} values, and its rule says {len(outputs)} outputs")
        order = b.order_for(said.shape, *(x for x in tensors if x is not None))
        y = b.result(t, order)
        with blamed_on_user(operator.meaning, operator.name):
            expr = as_expr(results[k])
        if max(_size(expr)) > LARGEST:
            what = "a value that is used twice counts twice, with all that it is made of"
            raise operator.wrong(
                f"its expression has more than {LARGEST} operations ({what}): write a kernel, or several operators"
            )
        b.compute(y, _stored(expr, y.dtype), reads)


def _read(operator: Operator, t: gs.Tensor, reads: Reads) -> Expr:
    shape = shape_of(t)
    try:
        fits = np.broadcast_shapes(shape, reads.shape) == reads.shape
    except ValueError:
        fits = False
    if not fits:
        raise operator.wrong(f"its input {t.name!r} of {shape} does not broadcast to its output of {reads.shape}")
    return reads.broadcast(t)


def _traced(operator: Operator, bound: Mapping[str, Any], reads: Reads) -> Any:
    def coordinate(axis: int) -> Expr:
        """Elements of a vector that counts, which a store can read as it reads a bias."""
        numbers = np.arange(reads.shape[axis], dtype=np.int64)
        counted = reads.builder.literal(f"{reads.builder.node.outputs[0].name}.index{axis}", numbers)
        return reads.view(View(counted.name, (coord(axis),)))

    made: dict[int, Expr] = {}

    def once(axis: int) -> Expr:
        if axis not in made:
            made[axis] = coordinate(axis)
        return made[axis]

    with blamed_on_user(operator.meaning, operator.name):
        return traced(operator.meaning, bound, Place(reads.shape, once))


def _stored(expr: Expr, dtype: DType) -> Expr:
    """A value as the output's type has it, as ONNX's Cast converts."""
    if dtype is DType.BOOL and expr.dtype is not DType.BOOL:
        return as_expr(~(Value(expr) == 0))
    if expr.dtype is DType.F32 and dtype.compute is DType.I64:
        expr = truncated(expr, dtype)
    return wrapped(cast_to(expr, dtype.compute), dtype)


# --- With a kernel -----------------------------------------------------------------------------------------------------


def _with_kernel(
    operator: Operator, b: Builder, tensors: Sequence[gs.Tensor | None], attributes: Mapping[str, Any], outputs: Sequence[Shaped]
) -> None:
    """A Custom for each type that its outputs have: all of a type are one tensor, of which each is a part."""
    reads = tuple(None if t is None else _operand(operator, t, b).name for t in tensors)
    types = ["" if t is None else _type_of(t, b) for t in tensors]
    by_type: dict[DType, list[int]] = {}
    for k, t in enumerate(b.node.outputs[: len(outputs)]):
        if b.used(t):
            by_type.setdefault(b.dtype(t), []).append(k)
    fields = {
        "operator": operator.name, "digest": operator.digest, "reads": reads, "floats": operator.floats,
        "layout": operator.layout,
        "settings": json.dumps({"types": types, "attributes": attributes}, sort_keys=True),
    }  # fmt: skip
    inputs = [t for t in tensors if t is not None]
    for dtype, which in by_type.items():
        if len(which) == 1:
            t = b.node.outputs[which[0]]
            y = b.result(t, _order(operator, shape_of(t), b, inputs))
        else:
            total = starts([outputs[k].size for k in which])[-1]
            y = b.new(f"{b.nodes[0]}.outputs", (total,), dtype)
        plain = Epilogue(Expr("acc", (), None, y.dtype.compute))
        b.emit(Custom, y, outputs=tuple(which), epilogue=plain, **fields)
        if len(which) > 1:
            _take_apart(b, y, which, outputs)


def _take_apart(b: Builder, y: Tensor, which: Sequence[int], outputs: Sequence[Shaped]) -> None:
    """Each output as what it is: elements of the vector that all of them lie in."""
    for k, start in zip(which, starts([outputs[k].size for k in which]), strict=False):
        shape = outputs[k].shape
        (linear,) = reshape_view(y.name, (max(outputs[k].size, 1),), shape).index
        view = View(y.name, (linear + start,))
        b.compute(b.result(b.node.outputs[k]), load(0, y.dtype.compute), [view])


def _operand(operator: Operator, t: gs.Tensor, b: Builder) -> Tensor:
    """A tensor as the operator's kernels read it."""
    if operator.layout != "any":
        x = b.laid_out(t, _order(operator, shape_of(t), b, ()))
    else:
        x = b.value(t)
        wanted = (DType.F32,) if operator.floats == "float32" else (DType.F32, DType.F16, DType.F64)
        if x.dtype.is_float and x.dtype not in wanted:
            x = b.with_order(x, x.order)
    if x.dtype in FLOAT8:
        raise b.refuse(
            f"its input {t.name} is stored as {x.dtype.value}", "kernels of your own read wider floats: leave the Cast out"
        )
    return x


def _order(operator: Operator, shape: Shape, b: Builder, inputs: Sequence[gs.Tensor]) -> Order:
    rows = tuple(range(len(shape)))
    match operator.layout:
        case "any":
            return b.order_for(shape, *inputs)
        case "channels":
            return IMAGE.get(len(shape), rows)
    return rows
