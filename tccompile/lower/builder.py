"""What converters build a Program with: tensors and their layouts, constants, views, ops, and refusals."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx
import onnx_graphsurgeon as gs

from tccompile.ir.expr import Epilogue, Expr, View, broadcast_view, cast, const, coord, identity_view, load
from tccompile.ir.expr import constant as index_constant
from tccompile.ir.extent import Shape, not_alike
from tccompile.ir.ops import Op, Pointwise
from tccompile.ir.program import Count
from tccompile.ir.tensor import Tensor, dense
from tccompile.ir.types import ELEMENTS, FLOAT8, DType
from tccompile.ir.weights import Literal, Recipe
from tccompile.load.constants import recipe_of
from tccompile.load.issues import Issue, Refusal
from tccompile.lower import float8, narrow

Order = tuple[int, ...]
"""A layout: the axes of a tensor, outermost first."""

IMAGE: dict[int, Order] = {3: (0, 2, 1), 4: (0, 2, 3, 1), 5: (0, 2, 3, 4, 1)}
"""Channels innermost, by rank: (N, C, W), (N, C, H, W) and (N, C, D, H, W)."""

MAX_RANK = 8


def dtype_of(t: gs.Tensor) -> DType | None:
    """The element type of a model's tensor, or None if a program's tensors cannot have it."""
    dtype = t.dtype
    if isinstance(dtype, int):
        dtype = onnx.helper.tensor_dtype_to_np_dtype(dtype)
    try:
        found = DType(np.dtype(dtype).name)
    except (TypeError, ValueError):
        return None
    return found if found in ELEMENTS and found not in FLOAT8 else None


def shape_of(t: gs.Tensor) -> Shape:
    return tuple(int(n) for n in t.shape)


def plain_order(shape: Shape) -> Order:
    """Row-major, with trailing axes of extent 1 moved outwards of the last one that is longer.

    So (N, C, 1, 1) is padded to a multiple of 8 channels, not to 8 columns.
    """
    real = [a for a, n in enumerate(shape) if n > 1]
    inner = real[-1] if real else len(shape) - 1
    return (*(a for a in range(len(shape)) if a != inner), inner) if shape else ()


class Reads:
    """The views of one op in the making, and expressions that load them. `shape` is that of the op's result."""

    def __init__(self, builder: Builder, shape: Shape) -> None:
        self.builder = builder
        self.shape = shape
        self.views: list[View] = []

    def view(self, view: View) -> Expr:
        """The value that a view reads."""
        if view not in self.views:
            self.views.append(view)
        return load(self.views.index(view), self.builder.tensors[view.tensor].dtype.compute)

    def broadcast(self, t: gs.Tensor) -> Expr:
        """The model's tensor, broadcast to the result as ONNX does; a constant of one element becomes a number."""
        number = self.builder.number(t)
        if number is not None and len(t.shape) <= len(self.shape):
            return number
        tensor = self.builder.value(t)
        return self.view(broadcast_view(tensor.name, tensor.shape, self.shape))

    def along(self, t: gs.Tensor, axis: int) -> Expr:
        """A vector of the model, broadcast along every axis of the result but `axis`."""
        number = self.builder.number(t)
        if number is not None:
            return number
        tensor = self.builder.value(t)
        index = tuple(coord(axis) if n > 1 else index_constant(0) for n in tensor.shape)
        return self.view(View(tensor.name, index))


class Builder:
    """A Program in the making. Converters are called with `node` set to the node that they convert.

    All floats inside the program are F32, but for those that `float8` stores in 8 bits; integers and booleans keep the model's
    type. Model inputs and outputs keep their own type, row-major and without padding.
    """

    def __init__(self, graph: gs.Graph) -> None:
        self.node = gs.Node("Graph", name=graph.name or "graph")
        self.tensors: dict[str, Tensor] = {}
        self.constants: dict[str, Recipe] = {}
        self.ops: list[Op] = []
        self.inputs: list[str] = []
        self.counts: list[Count] = []
        self._values: dict[str, str] = {}  # the model's name of a tensor → ours
        self._copies: dict[tuple[str, Order], str] = {}  # (ours, order) → a copy of it in another layout
        self._outputs = {t.name for t in graph.outputs}
        self.float8 = float8.found(graph)
        self._taken = {t.name for t in (*graph.inputs, *graph.outputs)}

    # --- errors

    @property
    def nodes(self) -> tuple[str, ...]:
        """The name under which the user knows the current node."""
        return (self.node.name or (self.node.outputs[0].name if self.node.outputs else self.node.op),)

    def refuse(self, reason: str, way_out: str) -> Refusal:
        """An error to raise: the current node, the rule it breaks with the value that breaks it, and the way out."""
        shapes = tuple(shape_of(t) for t in self.node.inputs if t.name and t.shape is not None)
        domain = "" if self.node.domain in (None, "ai.onnx") else self.node.domain
        outputs = tuple(t.name for t in self.node.outputs if t.name)
        return Refusal(Issue(self.nodes[0], self.node.op, shapes, reason, way_out, domain, outputs))

    # --- the node's inputs and attributes

    def attr(self, name: str, default: Any = None) -> Any:
        value = self.node.attrs.get(name)
        return default if value is None else value

    def input(self, i: int) -> gs.Tensor | None:
        """Input number i of the current node, or None where it is left out."""
        inputs = self.node.inputs
        return inputs[i] if i < len(inputs) and (inputs[i].name or isinstance(inputs[i], gs.Constant)) else None

    def used(self, t: gs.Tensor) -> bool:
        """Whether anyone reads an output of the current node."""
        return bool(t.name) and (bool(t.outputs) or t.name in self._outputs)

    def number(self, t: gs.Tensor) -> Expr | None:
        """The value of a constant of one element."""
        if not isinstance(t, gs.Constant) or int(np.prod(t.shape)) != 1:
            return None
        value = np.asarray(t.values).reshape(())
        if value.dtype == np.uint64:
            value = value.view(np.int64)  # the type that it is computed in
        return const(value.item(), self.dtype(t).compute)

    def array(self, i: int, what: str) -> np.ndarray | None:
        """The values of input i, which must be a constant; None where it is left out."""
        t = self.input(i)
        if t is None:
            return None
        if not isinstance(t, gs.Constant):
            verb = "are" if what.endswith("s") else "is"
            raise self.refuse(f"its {what} ({t.name}) {verb} computed at run time", f"export the model with constant {what}")
        return np.asarray(t.values)

    def ints(self, i: int, what: str) -> list[int] | None:
        """The values of input i, which must be constant integers; None where it is left out."""
        values = self.array(i, what)
        return None if values is None else [int(v) for v in values.reshape(-1)]

    def axis(self, value: int, rank: int) -> int:
        """An axis of a tensor of this rank, which counts from the end if it is negative."""
        if not -rank <= value < rank:
            raise self.refuse(f"axis {value} of a tensor of rank {rank}", "export the model with an axis that there is")
        return value + rank if value < 0 else value

    def dtype(self, t: gs.Tensor) -> DType:
        """The type in which the program holds a model's tensor between inputs and outputs."""
        if t.name in self.float8.stored:
            return self.float8.stored[t.name]
        dtype = self.io_dtype(t)
        return DType.F32 if dtype.is_float else dtype

    def io_dtype(self, t: gs.Tensor) -> DType:
        dtype = dtype_of(t) or self._narrow(t)
        if dtype is None:
            name = onnx.TensorProto.DataType.Name(t.dtype).lower() if isinstance(t.dtype, int) else t.dtype
            raise self.refuse(f"{t.name} has element type {name}", "use floats of 16 to 64 bits, integers or booleans")
        return dtype

    def _narrow(self, t: gs.Tensor) -> DType | None:
        """The type that holds what is rounded to a type that no tensor has."""
        elem = narrow.elem_of(t)
        return None if elem is None else narrow.held_in(elem, outside=not t.inputs or self.is_output(t))

    def is_output(self, t: gs.Tensor) -> bool:
        """Whether a tensor is an output of the model."""
        return t.name in self._outputs

    # --- tensors

    def unique(self, name: str) -> str:
        """`name`, or with a number if a tensor has it already."""
        out, i = name, 1
        while out in self._taken:
            out, i = f"{name}~{i}", i + 1
        self._taken.add(out)
        return out

    def add(self, tensor: Tensor) -> Tensor:
        if tensor.rank > MAX_RANK:
            raise self.refuse(
                f"{tensor.name} has {tensor.rank} axes", f"at most {MAX_RANK} axes are supported: merge some by Reshape"
            )
        self.tensors[tensor.name] = tensor
        return tensor

    def new(self, name: str, shape: Shape, dtype: DType = DType.F32, order: Order | None = None) -> Tensor:
        """A tensor between ops."""
        return self.add(dense(self.unique(name), shape, dtype, plain_order(shape) if order is None else order))

    def result(self, t: gs.Tensor, order: Order | None = None) -> Tensor:
        """The tensor that will hold the node's output `t`."""
        return self.bind(t, self.new(t.name, shape_of(t), self.dtype(t), order))

    def bind(self, t: gs.Tensor, tensor: Tensor) -> Tensor:
        """From here on, `tensor` is the value of the model's `t`."""
        self._values[t.name] = tensor.name
        return tensor

    def model_input(self, t: gs.Tensor) -> None:
        tensor = self.add(dense(t.name, shape_of(t), self.io_dtype(t), pad=1))
        self.inputs.append(tensor.name)
        self.bind(t, tensor)

    def constant(self, name: str, recipe: Recipe, shape: Shape, dtype: DType = DType.F32, order: Order | None = None) -> Tensor:
        """A constant tensor of logical `shape`."""
        tensor = self.new(name, shape, dtype, order)
        self.constants[tensor.name] = recipe
        return tensor

    def literal(self, name: str, values: np.ndarray) -> Tensor:
        """A constant that is not one of the model's."""
        return self.constant(name, Literal(values), values.shape, DType(values.dtype.name))

    def known(self, t: gs.Tensor) -> bool:
        """Whether a tensor of the model has been given a value."""
        return t.name in self._values

    def value(self, t: gs.Tensor) -> Tensor:
        """The tensor that holds the model's `t`, in whatever layout it has: what a view may read."""
        name = self._values.get(t.name)
        if name is not None:
            return self.tensors[name]
        if not isinstance(t, gs.Constant):
            raise self.refuse(f"its input {t.name} is computed by no node", "check the model with onnx.checker")
        shape, dtype = shape_of(t), self.dtype(t)
        if 0 in shape and not not_alike():  # a size may decide how long its other axes are: nothing is stored
            return self.bind(t, self.compute(self.new(t.name, shape, dtype), const(0.0), ()))
        tensor = self.constant(t.name, recipe_of(t), shape, dtype)
        return self.bind(t, tensor)

    def laid_out(self, t: gs.Tensor, order: Order) -> Tensor:
        """The model's `t` in a dense padded layout with axes in `order`: what an op's operand must be."""
        if isinstance(t, gs.Constant) and t.name not in self._values:
            return self.bind(t, self.constant(t.name, recipe_of(t), shape_of(t), self.dtype(t), order))
        return self.with_order(self.value(t), order)

    def with_order(self, x: Tensor, order: Order) -> Tensor:
        """`x`, or a copy of it in a dense padded layout with axes in `order` and the type that the program computes in."""
        dtype = DType.F32 if x.dtype.is_float and x.dtype not in FLOAT8 else x.dtype
        if x.name not in self.inputs and x == dense(x.name, x.shape, dtype, order):
            return x
        key = x.name, order
        if key not in self._copies:
            if x.name in self.constants:
                y = self.constant(x.name, self.constants[x.name], x.shape, dtype, order)
            else:
                y = self.new(x.name, x.shape, dtype, order)
                self.copy(identity_view(x.name, x.rank), y)
            self._copies[key] = y.name
        return self.tensors[self._copies[key]]

    def image(self, t: gs.Tensor) -> Tensor:
        """`t` with channels innermost: (N, C, W), (N, C, H, W) or (N, C, D, H, W)."""
        return self.laid_out(t, IMAGE[len(t.shape)])

    def matrix(self, t: gs.Tensor) -> Tensor:
        """`t` row-major, its last axis padded."""
        return self.laid_out(t, tuple(range(len(t.shape))))

    def operand(self, t: gs.Tensor) -> Tensor:
        """`t` in the program's types and padding, in the order of axes that it has."""
        x = self.value(t)
        return self.with_order(x, plain_order(x.shape) if x.name in self.inputs else x.order)

    def order_for(self, shape: Shape, *inputs: gs.Tensor) -> Order:
        """The layout of a result whose axes correspond to those of `inputs`: an input's of the same rank, images first.

        Inputs of the result's own shape go before smaller ones, and row-major is taken where nothing else is asked for.
        """
        rank = len(shape)
        known = [self.tensors[self._values[t.name]] for t in inputs if t.name in self._values and len(t.shape) == rank]
        inside = [x for x in known if x.name not in self.inputs and x.name not in self.constants]
        for x in sorted(inside, key=lambda x: x.shape != shape):
            if x.order != tuple(range(rank)):
                return x.order
        return plain_order(shape)

    # --- ops

    def emit(self, op: type[Op], y: Tensor, **fields: Any) -> Tensor:
        """Add an op that writes `y` to the program, under the current node's name."""
        self.ops.append(op(nodes=self.nodes, y=y.name, **fields))
        return y

    def compute(self, y: Tensor, expr: Expr, reads: Reads | Sequence[View]) -> Tensor:
        """Add the Pointwise that writes `expr`, converted to y's type, to `y`."""
        views = reads.views if isinstance(reads, Reads) else reads
        return self.emit(Pointwise, y, epilogue=Epilogue(cast(expr, y.dtype.compute), tuple(views)))

    def copy(self, view: View, y: Tensor) -> Tensor:
        """Add the Pointwise that writes what `view` reads to `y`."""
        return self.compute(y, load(0, self.tensors[view.tensor].dtype.compute), [view])
