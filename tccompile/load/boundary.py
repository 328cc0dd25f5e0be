"""Inputs and outputs of a model that are sequences or optional values, or both an input and an output, as tensors of one kind.

A sequence `x` is the tensors `x[0]`, `x[1]` and so on: as many as shapes are given. An optional value is there if shapes are
given for it. An output that is an input is a copy of it, with a name of its own. From here on a model has tensors for inputs;
what its outputs are made of is known when it is folded.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from itertools import count, takewhile

import onnx
import onnx.helper

from tccompile.errors import UsageError
from tccompile.ir.metadata import Form, Kind, copy_of, part

OPTIONAL = "optional_type"
SEQUENCE = "sequence_type"


def kind_of(proto: onnx.TypeProto) -> Kind:
    """What a value is; of maps and sparse tensors, a tensor, which other checks refuse."""
    match proto.WhichOneof("value"):
        case "sequence_type" if proto.sequence_type.elem_type.WhichOneof("value") == "tensor_type":
            return Kind.SEQUENCE
        case "optional_type" if proto.optional_type.elem_type.WhichOneof("value") == "tensor_type":
            return Kind.OPTIONAL
        case "optional_type" if kind_of(proto.optional_type.elem_type) is Kind.SEQUENCE:
            return Kind.OPTIONAL_SEQUENCE
    return Kind.TENSOR


def tensor_of(proto: onnx.TypeProto) -> onnx.TypeProto:
    """The type of the tensors that a value is made of."""
    while (kind := proto.WhichOneof("value")) in (SEQUENCE, OPTIONAL):
        proto = getattr(proto, kind).elem_type
    return proto


def forms(graph: onnx.GraphProto, weights: Container[str]) -> tuple[tuple[Form, ...], tuple[Form, ...]]:
    """What the model's inputs and outputs are, if any is no tensor."""
    given = {v.name for v in _given(graph, weights)}
    inputs = tuple(Form(v.name, kind_of(v.type)) for v in graph.input if v.name not in weights)
    outputs = tuple(Form(v.name, Kind.GIVEN if v.name in given else kind_of(v.type)) for v in graph.output)
    plain = all(form.kind is Kind.TENSOR for form in (*inputs, *outputs))
    return ((), ()) if plain else (inputs, outputs)


def _given(graph: onnx.GraphProto, weights: Container[str]) -> list[onnx.ValueInfoProto]:
    """The outputs that are tensors and inputs of the model."""
    inputs = {v.name for v in graph.input if v.name not in weights}
    return [v for v in graph.output if v.name in inputs and kind_of(v.type) is Kind.TENSOR]


def copy_given(graph: onnx.GraphProto, weights: Container[str]) -> None:
    """Copies in the place of the graph's outputs that are inputs."""
    for value in _given(graph, weights):
        copy = copy_of(value.name)
        graph.node.append(onnx.helper.make_node("Identity", [value.name], [copy], copy))
        value.name = copy


def open_inputs(graph: onnx.GraphProto, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Tensors in the place of the graph's inputs that are sequences or optional values."""
    if all(kind_of(value.type) is Kind.TENSOR for value in graph.input):
        return
    inputs, nodes = list[onnx.ValueInfoProto](), list[onnx.NodeProto]()
    for value in graph.input:
        made, node = _made_of(value, shapes)
        nodes += node
        for name in made:
            inputs.append(onnx.ValueInfoProto(name=name))
            inputs[-1].type.CopyFrom(tensor_of(value.type))
            for dim in inputs[-1].type.tensor_type.shape.dim if name != value.name else ():
                dim.ClearField("dim_param")  # which each tensor of a sequence has for itself
    nodes += [onnx.NodeProto.FromString(node.SerializeToString()) for node in graph.node]
    del graph.input[:], graph.node[:]
    graph.input.extend(inputs)
    graph.node.extend(nodes)


def _made_of(value: onnx.ValueInfoProto, shapes: Mapping[str, tuple[int, ...]]) -> tuple[list[str], list[onnx.NodeProto]]:
    """The names of the tensors that an input is made of, and what makes it of them."""
    kind, name = kind_of(value.type), value.name
    if kind is Kind.TENSOR or (kind is Kind.OPTIONAL and name in shapes):
        return [name], []
    if kind is not Kind.OPTIONAL and name in shapes:
        raise UsageError(
            f"the input {name!r} is a sequence: give the shape of each of its tensors, as --shape '{part(name, 0)}=2x3'"
        )
    made = list(takewhile(shapes.__contains__, (part(name, i) for i in count()))) if kind is not Kind.OPTIONAL else []
    if made or kind is Kind.SEQUENCE:
        return made, [onnx.helper.make_node("SequenceConstruct", made, [name], name)]
    return [], [onnx.helper.make_node("Optional", [], [name], name, type=value.type.optional_type.elem_type)]
