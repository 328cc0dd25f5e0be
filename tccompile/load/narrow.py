"""Types of 8 bits and fewer that no tensor of a program has: floats become float32, integers int8 or uint8.

What rounds to such a type stays a Cast to it, with one from it behind; between these two alone a tensor has the type:

  cast(x, narrow)                     =  cast(cast(x, narrow), wide)
  quantize_linear(x, s, zero: int4)   =  clip(quantize_linear(x, s, zero: int8), -8, 7)
  quantize_linear(x, s, zero: float8) =  cast(cast(x / s, float8), float)
  dequantize_linear(x: float8, s)     =  x · s

The model's own inputs and outputs keep their type: floats are taken and given as bits, integers as those of 8 bits.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from typing import Any

import onnx
from onnx import TensorProto

from tccompile.errors import UnsupportedError
from tccompile.load.nodes import first_line, rename_inputs, subgraphs, title
from tccompile.load.opset import Scope

FLOATS = {
    TensorProto.FLOAT8E4M3FN, TensorProto.FLOAT8E4M3FNUZ, TensorProto.FLOAT8E5M2, TensorProto.FLOAT8E5M2FNUZ,
    TensorProto.FLOAT4E2M1, TensorProto.FLOAT8E8M0,
}  # fmt: skip

INTEGERS: dict[int, tuple[int, int, int]] = {
    TensorProto.INT4: (TensorProto.INT8, -8, 7), TensorProto.UINT4: (TensorProto.UINT8, 0, 15),
    TensorProto.INT2: (TensorProto.INT8, -2, 1), TensorProto.UINT2: (TensorProto.UINT8, 0, 3),
}  # fmt: skip
"""The type that takes their place, the least and the largest number."""


def wide(elem: int) -> int:
    """The type of ONNX that a tensor of this one has in a program."""
    return TensorProto.FLOAT if elem in FLOATS else INTEGERS[elem][0] if elem in INTEGERS else elem


def widen(model: onnx.ModelProto, weights: Collection[str]) -> None:
    """Change the model's graph; its weights are inputs of it, of these names, whose values are wide already."""
    if any(wide(elem) != elem for elem in _named(model.graph)):
        try:
            known = onnx.shape_inference.infer_shapes(model)
        except Exception as error:
            what = "the model has numbers of 8 bits or fewer, and what has which type is not clear"
            raise UnsupportedError(f"{what}: {first_line(error)}") from error
        _Widener(known.graph, weights).whole(model.graph)


def _named(graph: onnx.GraphProto) -> Iterator[int]:
    """The types that a graph names."""
    yield from (v.type.tensor_type.elem_type for v in (*graph.input, *graph.output))
    for node in graph.node:
        for a in node.attribute:
            if a.name in ("to", "output_dtype", "dtype"):
                yield a.i
            elif a.HasField("t"):
                yield a.t.data_type
        for inner in subgraphs(node):
            yield from _named(inner)


class _Widener:
    def __init__(self, graph: onnx.GraphProto, weights: Collection[str]) -> None:
        self.weights = set(weights)
        self.types: dict[str, int] = {}
        self.shapes: dict[str, list[int | None]] = {}
        taken = {name for node in graph.node for name in (*node.input, *node.output)} | self.weights
        self.scope = Scope(lambda name: None, taken)
        self.learn(graph)

    def learn(self, graph: onnx.GraphProto) -> None:
        """What inference says of a graph, and of those inside it."""
        for v in (*graph.input, *graph.output, *graph.value_info):
            tensor = v.type.tensor_type
            self.types[v.name] = tensor.elem_type
            if tensor.HasField("shape"):
                self.shapes[v.name] = [d.dim_value if d.HasField("dim_value") else None for d in tensor.shape.dim]
        for node in graph.node:
            for a in node.attribute:
                if node.op_type == "Constant" and a.HasField("t"):
                    self.types[node.output[0]], self.shapes[node.output[0]] = a.t.data_type, list(a.t.dims)
            for inner in subgraphs(node):
                self.learn(inner)

    def whole(self, graph: onnx.GraphProto) -> None:
        """Change the model's graph, whose inputs and outputs keep their types, but for weights."""
        named = [(v.name, v.type.tensor_type.elem_type) for v in (*graph.input, *graph.output)]
        kept = {name: elem for name, elem in named if name not in self.weights and wide(elem) != elem}
        given = [v.name for v in graph.input if v.name in kept]
        self.inside(graph)
        names = {name: self.scope.name(f"{name}/wide") for name in kept}
        for node in graph.node:
            rename_inputs(node, names)
            node.output[:] = [names.get(y, y) for y in node.output]
        before = [_cast(x, names[x], wide(kept[x])) for x in given]
        after = [_cast(names[y], y, elem, saturate=0) for y, elem in kept.items() if y not in given]  # an infinity stays one
        nodes = [*before, *graph.node, *after]
        del graph.node[:]
        graph.node.extend(nodes)
        for v in (*graph.input, *graph.output):
            if v.name in kept:
                v.type.tensor_type.elem_type = kept[v.name]

    def inside(self, graph: onnx.GraphProto) -> None:
        """Change a graph and those inside it."""
        nodes: list[onnx.NodeProto] = []
        for node in graph.node:
            for inner in subgraphs(node):
                self.inside(inner)
            last = self.instead(node)
            nodes += [*self.scope.before, *last]
            self.scope.before.clear()
        del graph.node[:]
        graph.node.extend(nodes)
        for v in (*graph.value_info, *graph.input, *graph.output):
            v.type.tensor_type.elem_type = wide(v.type.tensor_type.elem_type)

    def instead(self, node: onnx.NodeProto) -> list[onnx.NodeProto]:
        """What takes a node's place; what that needs is in the scope."""
        if node.domain in ("", "ai.onnx"):
            match node.op_type:
                case "Constant":
                    return [node]
                case "Cast":
                    return self.cast(node, _attribute(node, "to"))
                case "CastLike":
                    return self.cast(node, self.type_of(node.input[1], node))
                case "QuantizeLinear":
                    return self.quantize(node)
                case "DequantizeLinear" if self.type_of(node.input[0], node) in FLOATS:
                    return self.dequantize(node)
        for a in node.attribute:
            if a.name in ("to", "dtype", "output_dtype") and wide(a.i) != a.i:
                name = TensorProto.DataType.Name(a.i).lower()
                raise UnsupportedError(f"{title(node)} makes numbers of type {name}: cast to it what it makes in another type")
        return [node]

    def type_of(self, name: str, node: onnx.NodeProto) -> int:
        elem = self.types.get(name, 0)
        if not elem:
            what = "whose type is not clear in a model with numbers of 8 bits or fewer: give its type in value_info"
            raise UnsupportedError(f"{title(node)} reads {name!r}, {what}")
        return elem

    def cast(self, node: onnx.NodeProto, to: int) -> list[onnx.NodeProto]:
        if wide(to) == to:
            return [node]
        between = self.scope.name(f"{node.output[0]}/narrow")
        how = {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute if a.name in ("saturate", "round_mode")}
        first = onnx.helper.make_node("Cast", node.input[:1], [between], node.name, to=to, **how)
        return [first, _cast(between, node.output[0], wide(to))]

    def quantize(self, node: onnx.NodeProto) -> list[onnx.NodeProto]:
        zero = node.input[2] if len(node.input) > 2 else ""
        elem = self.type_of(zero, node) if zero else _attribute(node, "output_dtype") or TensorProto.UINT8
        if elem in INTEGERS:
            return self.saturated(node, *INTEGERS[elem])
        if elem not in FLOATS:
            return [node]
        y, given = node.output[0], [(node.input[0], node.input[0]), (node.input[1], self.scale(node))]
        scaled = self.scope.node("Div", [self.floats(name, of, node) for of, name in given], y)
        cast = onnx.helper.make_node("Cast", [scaled], [y], node.name, to=elem)
        cast.attribute.extend(a for a in node.attribute if a.name == "saturate")
        return self.cast(cast, elem)

    def saturated(self, node: onnx.NodeProto, elem: int, low: int, high: int) -> list[onnx.NodeProto]:
        """Integers of fewer bits than 8: as those of 8, cut off at their own limits."""
        y, dtype = node.output[0], onnx.helper.tensor_dtype_to_np_dtype(elem).type
        limits = [self.scope.constant(value, f"{y}/{which}", dtype) for which, value in (("least", low), ("most", high))]
        node.output[0] = self.scope.name(f"{y}/byte")
        for a in node.attribute:
            if a.name == "output_dtype":
                a.i = elem
        return [node, onnx.helper.make_node("Clip", [node.output[0], *limits], [y], f"{node.name}/limits")]

    def floats(self, name: str, of: str, node: onnx.NodeProto) -> str:
        """A tensor, of another's type, in float32: as ONNX Runtime divides, whatever the type."""
        return (
            name if self.type_of(of, node) == TensorProto.FLOAT else self.scope.node("Cast", [name], name, to=TensorProto.FLOAT)
        )

    def dequantize(self, node: onnx.NodeProto) -> list[onnx.NodeProto]:
        """A product: zero points of floats are 0."""
        x, y, scale = node.input[0], node.output[0], self.scale(node)
        to = _attribute(node, "output_dtype") or self.type_of(node.input[1], node)
        if to == TensorProto.FLOAT:
            return [onnx.helper.make_node("Mul", [x, scale], [y], node.name)]
        floats = self.scope.node("Cast", [scale], scale, to=TensorProto.FLOAT)
        return [_cast(self.scope.node("Mul", [x, floats], y), y, to)]

    def scale(self, node: onnx.NodeProto) -> str:
        """The scale as what is broadcast to x."""
        x, scale = node.input[:2]
        own, block = self.shape_of(scale, node), _attribute(node, "block_size", 0)
        if math.prod(own) == 1:
            return scale
        shape = self.shape_of(x, node)
        axis = _attribute(node, "axis", 1) % len(shape)
        if not block:
            return self.with_shape("Reshape", scale, [-1 if a == axis else 1 for a in range(len(shape))])
        if len(own) != len(shape):
            raise UnsupportedError(f"{title(node)} has scales of {own} in blocks of {shape}: give them an axis for each of x's")
        scale = self.with_shape("Reshape", scale, [*own[: axis + 1], 1, *own[axis + 1 :]])
        scale = self.with_shape("Expand", scale, [*own[: axis + 1], block, *own[axis + 1 :]])
        scale = self.with_shape("Reshape", scale, [n * block if a == axis else n for a, n in enumerate(own)])
        if own[axis] * block == shape[axis]:
            return scale
        kept = self.scope.constant(range(shape[axis]), f"{scale}/kept")  # the last block is shorter
        return self.scope.node("Gather", [scale, kept], scale, axis=axis)

    def with_shape(self, op: str, x: str, shape: list[int]) -> str:
        return self.scope.node(op, [x, self.scope.constant(shape, f"{x}/shape")], x)

    def shape_of(self, name: str, node: onnx.NodeProto) -> list[int]:
        known = self.shapes.get(name)
        if known is None or None in known:
            what = "whose shape is not known, as scales of float8 and float4 need: give it in value_info"
            raise UnsupportedError(f"{title(node)} reads {name!r}, {what}")
        return list(known)  # type: ignore[arg-type]


def _cast(x: str, y: str, to: int, **how: Any) -> onnx.NodeProto:
    return onnx.helper.make_node("Cast", [x], [y], y, to=to, **how)


def _attribute(node: onnx.NodeProto, name: str, default: Any = None) -> Any:
    return next((onnx.helper.get_attribute_value(a) for a in node.attribute if a.name == name), default)
