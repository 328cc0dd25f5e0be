"""Nodes of operators of the user's own: what they read and make."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import onnx
import onnx.helper

from tccompile.custom.files import Added
from tccompile.custom.operators import Operator, Shaped
from tccompile.errors import OperatorError
from tccompile.load.types import Type
from tccompile.load.valid import title


def attributes_of(operator: Operator, given: Mapping[str, Any], node: str) -> dict[str, Any]:
    """A node's attributes as Python has them: lists as tuples, text as str. Raises OperatorError for tensors and graphs."""
    found = {}
    for name, value in given.items():
        value = value.decode(errors="replace") if isinstance(value, bytes) else value
        if isinstance(value, list | tuple):
            value = tuple(v.decode(errors="replace") if isinstance(v, bytes) else v for v in value)
        flat = value if isinstance(value, tuple) else (value,)
        if not all(isinstance(v, int | float | str) for v in flat):
            raise operator.wrong(f"{node}: its attribute {name!r} is a {type(value).__name__}; numbers and text are taken")
        found[name] = value
    return found


def shaped(type_: Type) -> Shaped:
    return Shaped(type_.shape, type_.dtype.name)


def types_of(operator: Operator, node: onnx.NodeProto, given: Sequence[Type | None]) -> dict[str, Type]:
    """The types of a node's outputs, by the operator's rule."""
    where = title(node)
    attributes = attributes_of(operator, {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}, where)
    try:
        outputs = operator.shapes(operator.bound([t and shaped(t) for t in given], attributes))
    except OperatorError as error:
        raise OperatorError(f"{error} ({where})") from error
    if len(node.output) > len(outputs):
        raise operator.wrong(f"{where} has {len(node.output)} outputs, and the operator has {len(outputs)}")
    made = zip(node.output, outputs, strict=False)
    return {name: Type(_elem(t.dtype), t.shape) for name, t in made if name}


def _elem(dtype: str) -> int:
    return int(onnx.TensorProto.DataType.Value({"float32": "FLOAT", "float64": "DOUBLE"}.get(dtype, dtype.upper())))


def prepare(proto: onnx.ModelProto, known: Added) -> None:
    """Leaves out what a model says itself of operators that the user says more of, and names domains that it forgot to."""
    kept = [f for f in proto.functions if known.find(f.domain, f.name) is None]
    if len(kept) < len(proto.functions):
        copies = [onnx.FunctionProto.FromString(f.SerializeToString()) for f in kept]
        del proto.functions[:]
        proto.functions.extend(copies)
    named = {o.domain for o in proto.opset_import}
    used = {name.partition("::")[0] for name in _named(proto.graph.node)} & {
        operator.domain for operator in known.operators.values()
    }
    proto.opset_import.extend(onnx.helper.make_opsetid(domain, 1) for domain in sorted(used - named))


def undefined(proto: onnx.ModelProto, known: Added) -> bool:
    """Whether a model has nodes of the user's operators that it says nothing of itself."""
    said = {f"{f.domain}::{f.name}" for f in proto.functions}
    return any(name in known.operators and name not in said for name in _named(proto.graph.node))


def _named(nodes: Iterable[onnx.NodeProto]) -> Iterable[str]:
    """The operators of nodes, and of those of graphs inside them."""
    for node in nodes:
        yield f"{node.domain}::{node.op_type}"
        for attribute in node.attribute:
            for graph in (attribute.g, *attribute.graphs):
                yield from _named(graph.node)
