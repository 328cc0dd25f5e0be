"""The part of a model between tensors: `tccompile MODEL.onnx --input TENSOR --output TENSOR`.

A model is cut as soon as it has been read, before anything is asked of it: what is cut away may be anything.
"""

from __future__ import annotations

import difflib
import math
import shlex
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx
import onnx.defs
import onnx.helper
import onnx.numpy_helper
import onnx.shape_inference

from tccompile.errors import UsageError
from tccompile.ir.weights import SMALL
from tccompile.load.fold import ANY_AXIS
from tccompile.load.nodes import reads, subgraphs
from tccompile.load.valid import EQUATION, attributes, title


@dataclass(frozen=True)
class Part:
    """The part of a model that computes `outputs` from `inputs`, tensors of its main graph by name.

    Without inputs it has those of the model's that it needs; without outputs it ends where the model does.
    """

    model: str | Path | onnx.ModelProto
    inputs: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for what, names in (("input", self.inputs), ("output", self.outputs)):
            if twice := next((n for i, n in enumerate(names) if n in names[:i]), None):
                raise UsageError(f"{twice!r} is named twice as an {what}; name it once")
        if both := next((n for n in self.outputs if n in self.inputs), None):
            raise UsageError(f"{both!r} is an input and an output: there is nothing between; leave one of them away")


def part(model: Any, inputs: Sequence[str], outputs: Sequence[str]) -> Any:
    """The model, or its part between these tensors if any are given."""
    return Part(model, tuple(inputs), tuple(outputs)) if inputs or outputs else model


def cut(proto: onnx.ModelProto, inputs: Sequence[str], outputs: Sequence[str]) -> None:
    """Leaves of a model what computes `outputs` from `inputs`. Raises UsageError where there is nothing such between."""
    graph = Graph(proto.graph)
    for what, names in (("input", inputs), ("output", outputs)):
        for name in names:
            _check_name(what, name, graph, proto)
    ends = list(outputs) or graph.outputs
    needed = graph.needed(ends, inputs)
    sources = _sources(graph, needed, inputs, outputs, ends)
    inference = Inference(graph, proto, sources)
    types = {name: _input_type(name, graph, inference) for name in sources}
    _keep(proto, graph, needed, ends, types)


class Graph:
    """Who computes and who reads what, in a main graph of which nothing has been checked."""

    def __init__(self, proto: onnx.GraphProto) -> None:
        self.proto = proto
        self.constants = {t.name for t in proto.initializer} | {t.values.name for t in proto.sparse_initializer}
        self.inputs = [v.name for v in proto.input if v.name not in self.constants]
        self.outputs = [v.name for v in proto.output]
        self.nodes = list(proto.node)
        self.reads = [[name for name in reads(node) if name] for node in self.nodes]
        self.producer = {y: i for i, node in enumerate(self.nodes) for y in node.output if y}
        self.names = {*self.inputs, *self.constants, *self.producer}

    def needed(self, ends: Iterable[str], stops: Collection[str]) -> Needed:
        """What computes `ends`, when `stops` are given."""
        nodes, tensors, todo = set[int](), set[str](), list(ends)
        while todo:
            name = todo.pop()
            if name in tensors:
                continue
            tensors.add(name)
            if name not in stops and (i := self.producer.get(name)) is not None and i not in nodes:
                nodes.add(i)
                todo += self.reads[i]
        return Needed(nodes, tensors)

    def live(self, sources: Collection[str]) -> set[str]:
        """The tensors that depend on `sources`, and these."""
        out = set(sources)
        for i, node in enumerate(self.nodes):
            if not out.isdisjoint(self.reads[i]):
                out.update(filter(None, node.output))
        return out


@dataclass(frozen=True)
class Needed:
    """The nodes of a part, by number, and the tensors that these read or write and that it ends with."""

    nodes: set[int]
    tensors: set[str]


def nearest(name: str, names: Iterable[str]) -> str:
    """`; the nearest names are 'a', 'b'`, if there are any."""
    found = difflib.get_close_matches(name, sorted(set(names)), 3, 0.5) if len(name) < 1000 else []
    if not found:
        return ""
    return f"; the nearest name{'s are' if len(found) > 1 else ' is'} {', '.join(map(repr, found))}"


def _check_name(what: str, name: str, graph: Graph, proto: onnx.ModelProto) -> None:
    if name in graph.names:
        return
    for i, node in enumerate(graph.nodes):
        if any(name in _inside(inner) for inner in subgraphs(node)):
            raise UsageError(
                f"the {what} {name!r} is inside {title(graph.nodes[i])}, which decides when and how often it is computed: "
                f"a model can be cut in its main graph only, such as at {next(iter(node.output), '')!r}"
            )
    for function in proto.functions:
        if any(name in node.output for node in function.node):
            raise UsageError(
                f"the {what} {name!r} is inside the function {function.name}: a model can be cut in its main graph only, such as "
                "at what a call of it computes"
            )
    if any(name == node.name for node in graph.nodes):
        node = next(node for node in graph.nodes if node.name == name)
        computes = ", ".join(map(repr, filter(None, node.output)))
        raise UsageError(f"the {what} {name!r} is a node; cut the model at a tensor: the node computes {computes}")
    plan = "; the plan to write is named by -o" if name.endswith(".plan") else nearest(name, graph.names)
    plan = plan or "; a viewer such as Netron shows their names"
    raise UsageError(f"the model has no tensor {name!r} to be an {what}{plan}")


def _inside(graph: onnx.GraphProto) -> set[str]:
    """The names of the tensors in a graph inside a node."""
    names = {v.name for v in graph.input} | {t.name for t in graph.initializer}
    for node in graph.node:
        names.update(node.output)
        for inner in subgraphs(node):
            names |= _inside(inner)
    return names


def _sources(graph: Graph, needed: Needed, inputs: Sequence[str], outputs: Sequence[str], ends: Sequence[str]) -> list[str]:
    """The part's inputs, in their order."""
    live = graph.live({*inputs, *graph.inputs})
    for name in outputs:
        if name not in live:
            raise UsageError(f"the output {name!r} depends on no input: it is a constant of the model; leave it away")
    if not inputs:
        return [name for name in graph.inputs if name in needed.tensors]
    for name in graph.inputs:
        if name in needed.tensors and name not in inputs:
            which = next(y for y in ends if name in graph.needed([y], inputs).tensors)
            choose = "" if outputs else ", or choose with --output what needs it not"
            option = f"--input {quoted(name)}"
            raise UsageError(f"the output {which!r} still needs the model's input {name!r}: give it too, as {option}{choose}")
    for name in inputs:
        if name not in needed.tensors:
            what = ", ".join(map(repr, ends[:3])) + (" …" if len(ends) > 3 else "")
            raise UsageError(f"nothing between the inputs and {what} needs the input {name!r}; leave it away")
    return list(inputs)


def _keep(
    proto: onnx.ModelProto, graph: Graph, needed: Needed, ends: Sequence[str], types: Mapping[str, onnx.ValueInfoProto]
) -> None:
    """Leaves the part alone: its nodes, and what these refer to."""
    g = proto.graph
    infos = {v.name: v for v in (*g.value_info, *g.output)}
    outputs = [_copy(infos[name]) if name in infos else onnx.ValueInfoProto(name=name) for name in ends]
    weights = [_copy(v) for v in g.input if v.name in graph.constants and v.name in needed.tensors and v.name not in types]
    nodes = [_copy(graph.nodes[i]) for i in sorted(needed.nodes)]
    for node in nodes:  # of its results one is an input now, and another is still computed
        node.output[:] = [f"{y}/cut" if y in types else y for y in node.output]
    for name, field in (("initializer", lambda t: t.name), ("sparse_initializer", lambda t: t.values.name)):
        _filter(getattr(g, name), lambda t, of=field: of(t) in needed.tensors and of(t) not in types)
    written = {y for node in nodes for y in node.output}
    _filter(g.value_info, lambda v: v.name in written and v.name not in ends)
    _filter(g.quantization_annotation, lambda a: a.tensor_name in written)
    for field, values in ((g.node, nodes), (g.input, [*types.values(), *weights]), (g.output, outputs)):
        del field[:]
        field.extend(values)
    called = _called(nodes, {(f.domain, f.name): f for f in proto.functions})
    _filter(proto.functions, lambda f: (f.domain, f.name) in called)


def _copy(message: Any) -> Any:
    out = type(message)()
    out.CopyFrom(message)
    return out


def _filter(field: Any, holds: Any) -> None:
    """Leaves in a repeated field what a test holds for, without a copy of the rest."""
    for i in reversed([i for i, value in enumerate(field) if not holds(value)]):
        del field[i]


def _called(nodes: Iterable[onnx.NodeProto], functions: Mapping[tuple[str, str], onnx.FunctionProto]) -> set[tuple[str, str]]:
    """The functions that the nodes call, and those that these do."""
    called, todo = set[tuple[str, str]](), list(nodes)
    while todo:
        node = todo.pop()
        todo += [inner for graph in subgraphs(node) for inner in graph.node]
        key = node.domain, node.op_type
        if key in functions and key not in called:
            called.add(key)
            todo += functions[key].node
    return called


# --- The types of new inputs -----------------------------------------------------------------------------------------


def _input_type(name: str, graph: Graph, inference: Inference) -> onnx.ValueInfoProto:
    """What is known of a tensor that becomes an input: its element type, and what is known of its shape."""
    both = (inference.said.get(name), inference.types.get(name))
    kind = max((t for t in both if t is not None), key=_known_extents, default=None)
    if kind is None and (elem := inference.by_readers(name)):
        kind = onnx.TypeProto(tensor_type=onnx.TypeProto.Tensor(elem_type=elem))
    if kind is None:
        who = title(graph.nodes[graph.producer[name]]) if name in graph.producer else "nobody"
        raise UsageError(
            f"the type of the input {name!r} is not known: {who} computes it, and what reads it takes several types; choose a "
            "tensor behind a Cast, or write its type into the model's value_info"
        )
    return onnx.helper.make_value_info(name, kind)


def _known_extents(kind: onnx.TypeProto) -> int:
    shape = kind.tensor_type.shape
    return sum(d.WhichOneof("value") == "dim_value" for d in shape.dim) + kind.tensor_type.HasField("shape")


class Inference:
    """The types of tensors by ONNX's rules, from the model's inputs on, of whatever opset; nothing where they say nothing.

    said   what the model itself says of tensors
    types  that, or what the rules say, as far as it takes to know those of `wanted`
    """

    def __init__(self, graph: Graph, proto: onnx.ModelProto, wanted: Sequence[str]) -> None:
        self.graph = graph
        self.opsets = list(proto.opset_import)
        self.versions = {_domain(o.domain): o.version for o in self.opsets}
        g = proto.graph
        infos = (v for v in (*g.value_info, *g.output, *g.input) if v.type.WhichOneof("value"))
        self.said = {v.name: v.type for v in infos if _is_typed(v.type)}
        self.types = dict(self.said)
        self.data = {t.name: t for t in g.initializer if math.prod(t.dims) * 4 <= SMALL and not _is_outside(t)}
        self.types |= {t.name: onnx.helper.make_tensor_type_proto(t.data_type, list(t.dims)) for t in g.initializer}
        for sparse in g.sparse_initializer:
            self.types[sparse.values.name] = onnx.helper.make_tensor_type_proto(sparse.values.data_type, list(sparse.dims))
        for i in sorted(graph.needed(wanted, graph.inputs).nodes):
            self.infer(graph.nodes[i])

    def schema(self, node: onnx.NodeProto) -> onnx.defs.OpSchema | None:
        domain = _domain(node.domain)
        version = self.versions.get(domain, 1)
        return onnx.defs.get_schema(node.op_type, version, domain) if onnx.defs.has(node.op_type, version, domain) else None

    def infer(self, node: onnx.NodeProto) -> None:
        """Sets the types of the node's outputs."""
        value = next((a.t for a in node.attribute if a.name == "value"), None)
        if node.op_type == "Constant" and value is not None and not _is_outside(value):
            self.data[node.output[0]] = value
        names, schema = [name for name in reads(node) if name], self.schema(node)
        if schema is None or any(n not in self.types for n in names) or self.aborts(node):
            return
        types, data = {n: self.types[n] for n in names}, {n: self.data[n] for n in names if n in self.data}
        try:
            found = onnx.shape_inference.infer_node_outputs(schema, node, types, data, opset_imports=self.opsets)
        except Exception:  # what is wrong with it is cut away, or will be found
            return
        self.types |= {name: kind for name, kind in found.items() if _is_typed(kind)}

    def aborts(self, node: onnx.NodeProto) -> bool:
        """Whether ONNX's rules might end the process, or never end: axes that there are not, parts that are not as many."""
        values = attributes(node)
        if node.op_type == "Einsum" and not EQUATION.fullmatch(str(values.get("equation"))):
            return True
        if node.op_type == "Split" and values.get("num_outputs", len(node.output)) != len(node.output):
            return True
        axis = values.get("axis")
        if not isinstance(axis, int) or not node.input or node.op_type in ANY_AXIS:
            return False
        first = self.types[node.input[0]].tensor_type if node.input[0] else onnx.TypeProto.Tensor()
        rank = len(first.shape.dim) if first.HasField("shape") else 64
        return not -rank <= axis < rank

    def by_readers(self, name: str) -> int:
        """The element type that those who read a tensor take there: the only one, or that of an input of the same type; or 0."""
        for node in self.graph.nodes:
            schema = self.schema(node) if name in node.input else None
            if schema is None:
                continue
            formal = [schema.inputs[min(i, len(schema.inputs) - 1)] for i in range(len(node.input))]
            own = formal[list(node.input).index(name)]
            kinds = [t[len("tensor(") : -1] for t in own.types if t.startswith("tensor(")]
            if len(own.types) == len(kinds) == 1:
                return int(onnx.TensorProto.DataType.Value(kinds[0].upper()))
            for other, of in zip(node.input, formal, strict=True):
                if other != name and of.type_str == own.type_str and other in self.types:
                    return int(self.types[other].tensor_type.elem_type)
        return 0


def _domain(domain: str) -> str:
    return "" if domain == "ai.onnx" else domain


def _is_typed(kind: onnx.TypeProto) -> bool:
    """Whether it says what the elements are."""
    return bool(kind.tensor_type.elem_type) if kind.HasField("tensor_type") else bool(kind.WhichOneof("value"))


def _is_outside(tensor: onnx.TensorProto) -> bool:
    """Whether a tensor's values lie in another file."""
    return tensor.data_location == onnx.TensorProto.EXTERNAL


def quoted(text: str) -> str:
    """A word as a shell takes it, on one line and without signs that a terminal acts on."""
    if text.isprintable():
        return shlex.quote(text)
    plain = (c if c.isprintable() and c not in "'\\" else _octal(c) for c in text)
    return f"$'{''.join(plain)}'"


def _octal(text: str) -> str:
    return "".join(f"\\{byte:03o}" for byte in text.encode("utf-8", "surrogateescape"))
