"""Models that are not what they were: nodes, attributes, shapes, types, names, edges, weights, opsets and bytes changed.

    python -m tests.fuzz.models                    100,000 of them, on all cores
    python -m tests.fuzz.models 500 --first 1200   so many from number 1200 on; a number gives the same model each time
    python -m tests.fuzz.models --save 1234        that one, as a file

A model must be compiled and run by the CPU engine, or be refused by an error of ours: within 5 seconds of the processor, and 2 GB
of memory. What it is made from are ONNX's own node cases, random graphs, and graphs with control flow and functions.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import math
import os
import queue
import random
import resource
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.backend.test
from onnx import AttributeProto, GraphProto, ModelProto, NodeProto, TensorProto, TypeProto, helper

from tccompile.errors import TccompileError
from tccompile.pipeline import without_code
from tccompile.plan.file import from_bytes, to_bytes
from tccompile.precision.ranges import largest, total_flops
from tccompile.runtime.session import Session
from tests.random_graphs import Graph

SECONDS, MANY, GIB = 5.0, 1 << 24, 2
"""Of a core, for a model whose inputs are of up to so many elements, and as much more as these are; and of memory."""

FLOPS, ELEMENTS = 1 << 27, 1 << 22
"""Of a model that is run: what is larger is compiled and not run."""

# --- Models to begin with ---------------------------------------------------------------------------------------------


def begun(cases: bool = True) -> list[bytes]:
    """Random graphs, those written here, and ONNX's node cases: these take seconds to make."""
    found = [Graph(number).model() for number in range(RANDOM)] + [make() for make in OWN] * 3
    for path in sorted((Path(onnx.backend.test.__file__).parent / "data").glob("*/*/model.onnx")):
        model = onnx.load(path)
        for opset in model.opset_import:
            opset.version = max(opset.version, 7)
        found.append(model)
    if cases:
        from onnx.backend.test.case.node import collect_testcases

        found += [_with_constants(case) for case in collect_testcases(None) if case.model is not None]
    return [model.SerializeToString() for model in found if model.ByteSize() < 1 << 18]


def _with_constants(case: Any) -> ModelProto:
    """A case whose few integers, which are axes, shapes and the like, are constants: at run time most are refused."""
    inputs = case.data_sets[0][0] if case.data_sets else ()
    for value, given in list(zip(case.model.graph.input, inputs, strict=False))[1:]:
        if isinstance(given, np.ndarray) and given.dtype.kind in "iu" and given.size <= 64:
            case.model.graph.initializer.append(onnx.numpy_helper.from_array(given, value.name))
            case.model.graph.input.remove(value)
    return case.model


def write(models: Sequence[bytes], path: Path) -> None:
    path.write_bytes(b"".join(len(data).to_bytes(8, "little") + data for data in models))


@cache
def models(path: str) -> tuple[bytes, ...]:
    data, found, at = Path(path).read_bytes(), [], 0
    while at < len(data):
        size = int.from_bytes(data[at : at + 8], "little")
        found.append(data[at + 8 : at + 8 + size])
        at += 8 + size
    return tuple(found)


def _value(name: str, kind: int = TensorProto.FLOAT, shape: tuple[int, ...] | None = (2, 3)) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, kind, shape)


def _model(nodes: list[NodeProto], outputs: tuple[str, ...] = ("y",), functions: tuple = (), **more: Any) -> ModelProto:
    graph = helper.make_graph(nodes, "g", [_value("x")], [_value(y, shape=None) for y in outputs], **more)
    opsets = [helper.make_opsetid("", 17), *([helper.make_opsetid("own", 1)] if functions else [])]
    return helper.make_model(graph, functions=functions, opset_imports=opsets, ir_version=10)


def _loop() -> ModelProto:
    inside = [helper.make_node("Identity", ["go"], ["on"]), helper.make_node("Mul", ["v", "v"], ["w"])]
    scanned = helper.make_node("Add", ["w", "x"], ["each"])
    ends = [_value("n", TensorProto.INT64, ()), _value("go", TensorProto.BOOL, ()), _value("v")]
    out = [_value("on", TensorProto.BOOL, ()), _value("w"), _value("each")]
    body = helper.make_graph([*inside, scanned], "body", ends, out)
    constants = [helper.make_tensor("trips", TensorProto.INT64, (), [3]), helper.make_tensor("yes", TensorProto.BOOL, (), [1])]
    return _model([helper.make_node("Loop", ["trips", "yes", "x"], ["y", "all"], body=body)], ("y", "all"), initializer=constants)


def _branches() -> ModelProto:
    one = helper.make_graph([helper.make_node("Relu", ["x"], ["a"])], "one", [], [_value("a")])
    other = helper.make_graph([helper.make_node("Neg", ["x"], ["b"])], "other", [], [_value("b")])
    nodes = [
        helper.make_node("ReduceMax", ["x"], ["m"], keepdims=0), helper.make_node("Greater", ["m", "zero"], ["yes"]),
        helper.make_node("If", ["yes"], ["y"], then_branch=one, else_branch=other),
    ]  # fmt: skip
    return _model(nodes, initializer=[helper.make_tensor("zero", TensorProto.FLOAT, (), [0.0])])


def _scan() -> ModelProto:
    body = helper.make_graph(
        [helper.make_node("Add", ["s", "r"], ["t"]), helper.make_node("Tanh", ["t"], ["u"])], "body",
        [_value("s", shape=(3,)), _value("r", shape=(3,))], [_value("t", shape=(3,)), _value("u", shape=(3,))],
    )  # fmt: skip
    start = helper.make_tensor("start", TensorProto.FLOAT, (3,), [0.0, 1.0, 2.0])
    node = helper.make_node("Scan", ["start", "x"], ["y", "rows"], num_scan_inputs=1, body=body)
    return _model([node], ("y", "rows"), initializer=[start])


def _function() -> ModelProto:
    nodes = [helper.make_node("Constant", [], ["c"], value_float=2.0), helper.make_node("Mul", ["a", "c"], ["d"])]
    nodes.append(helper.make_node("LeakyRelu", ["d"], ["e"]))
    nodes[-1].attribute.append(AttributeProto(name="alpha", type=AttributeProto.FLOAT, ref_attr_name="slope"))
    made = helper.make_function("own", "twice", ["a"], ["e"], nodes, [helper.make_opsetid("", 17)], ["slope"])
    calls = [helper.make_node("twice", ["x"], ["h"], domain="own", slope=0.1)]
    return _model([*calls, helper.make_node("twice", ["h"], ["y"], domain="own", slope=0.5)], functions=(made,))


def _sparse() -> ModelProto:
    values = helper.make_tensor("w", TensorProto.FLOAT, (2,), [1.0, -2.0])
    places = helper.make_tensor("places", TensorProto.INT64, (2,), [1, 5])
    sparse = helper.make_sparse_tensor(values, places, [3, 4])
    return _model([helper.make_node("MatMul", ["x", "w"], ["y"])], sparse_initializer=[sparse])


def _quantized() -> ModelProto:
    weights = [
        helper.make_tensor("s", TensorProto.FLOAT, (), [0.05]), helper.make_tensor("z", TensorProto.UINT8, (), [128]),
        helper.make_tensor("w", TensorProto.UINT8, (3, 4), bytes(range(120, 132)), raw=True),
    ]  # fmt: skip
    nodes = [
        helper.make_node("QuantizeLinear", ["x", "s", "z"], ["q"]),
        helper.make_node("QLinearMatMul", ["q", "s", "z", "w", "s", "z", "s", "z"], ["p"]),
        helper.make_node("DequantizeLinear", ["p", "s", "z"], ["y"]),
    ]
    return _model(nodes, initializer=weights)


def _sequence() -> ModelProto:
    nodes = [
        helper.make_node("SplitToSequence", ["x"], ["s"], axis=1), helper.make_node("SequenceAt", ["s", "one"], ["e"]),
        helper.make_node("SequenceInsert", ["s", "e"], ["t"]), helper.make_node("ConcatFromSequence", ["t"], ["y"], axis=1),
    ]  # fmt: skip
    return _model(nodes, initializer=[helper.make_tensor("one", TensorProto.INT64, (), [1])])


def _shapes() -> ModelProto:
    nodes = [
        helper.make_node("Shape", ["x"], ["s"]), helper.make_node("Gather", ["s", "one"], ["n"]),
        helper.make_node("Concat", ["minus", "n"], ["to"], axis=0), helper.make_node("Reshape", ["x", "to"], ["r"]),
        helper.make_node("Expand", ["r", "wide"], ["e"]), helper.make_node("Slice", ["e", "one", "to"], ["y"]),
    ]  # fmt: skip
    ints = {"one": [1], "minus": [-1], "wide": [2, 2, 3]}
    return _model(nodes, initializer=[helper.make_tensor(n, TensorProto.INT64, (len(v),), v) for n, v in ints.items()])


RANDOM = 60
OWN = (_loop, _branches, _scan, _function, _sparse, _quantized, _sequence, _shapes)


# --- Changes ----------------------------------------------------------------------------------------------------------

INTEGERS = (
    -(2**63),
    -(2**31),
    -65,
    -3,
    -2,
    -1,
    0,
    1,
    2,
    3,
    4,
    5,
    7,
    8,
    16,
    255,
    1000,
    2**16,
    2**24,
    2**31 - 1,
    2**31,
    2**40,
    2**63 - 1,
)
SMALL = (-2, -1, 0, 1, 2, 3, 4, 5)
FLOATS = (0.0, -0.0, 1.0, -1.0, 0.5, 1e-30, 1e30, 3.4e38, float("inf"), float("-inf"), float("nan"))
STRINGS = (b"", b"x", b"NOTSET", b"SAME_UPPER", b"VALID", b"linear", b"bidirectional", b"\xff\xfe", b"\x1b[2J", b"a" * 5000)
NAMES = ("", "x", "y", "\n", "\x1b[31m", "a" * 3000, "é", "../up", "t0", "None")


def changed(number: int, begun: Sequence[bytes]) -> bytes:
    """The model of this number, as a file."""
    rng = random.Random(number)
    data = rng.choice(begun)
    if rng.random() < 0.08:
        return _bytes(rng, data)
    model = ModelProto.FromString(data)
    for _ in range(rng.choice((1, 1, 1, 2, 2, 3, 5))):
        change = rng.choice(CHANGES)
        try:
            change(rng, model)
        except Exception:  # nothing of that kind is there, or protobuf or NumPy does not hold it
            _attribute_or_dims(rng, model)
    data = model.SerializeToString()
    return _bytes(rng, data) if rng.random() < 0.05 else data


def _bytes(rng: random.Random, data: bytes) -> bytes:
    out = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 4, 16))):
        at, n = rng.randrange(len(out) + 1), rng.choice((1, 1, 2, 4, 8, 64))
        match rng.randrange(6):
            case 0 if at < len(out):
                out[at] ^= 1 << rng.randrange(8)
            case 1:
                out[at : at + n] = bytes(rng.randrange(256) for _ in range(n))
            case 2:
                del out[at : at + n]
            case 3:
                out[at:at] = out[max(0, at - n) : at]
            case 4:
                out[at : at + 1] = bytes([rng.choice((0, 1, 0x7F, 0x80, 0xFF))])
            case 5 if rng.random() < 0.2:
                del out[at:]
    return bytes(out)


def _graphs(model: ModelProto) -> list[GraphProto]:
    """The main graph and those within, functions' too."""
    found: list[Any] = [model.graph, *model.functions]
    for graph in found:
        found += [a.g for node in graph.node for a in node.attribute if a.type == AttributeProto.GRAPH]
    return found


def _graph(rng: random.Random, model: ModelProto) -> Any:
    return rng.choice(_graphs(model))


def _node(rng: random.Random, model: ModelProto) -> NodeProto:
    return rng.choice(_graph(rng, model).node)


def _names(graph: Any) -> list[str]:
    """Of a graph's tensors."""
    found = [name for node in graph.node for name in (*node.input, *node.output)]
    if isinstance(graph, GraphProto):
        found += [t.name for t in (*graph.initializer, *graph.input, *graph.output)]
    return found


def _attribute(rng: random.Random, model: ModelProto) -> None:
    node = _node(rng, model)
    if not node.attribute or rng.random() < 0.05:
        return _new_attribute(rng, node)
    a = rng.choice(node.attribute)
    match rng.randrange(12):
        case 0:
            node.attribute.remove(a)
        case 1:
            a.name = rng.choice((rng.choice(NAMES), "axis", "axes", "to", "pads", "kernel_shape", "value"))
        case 2:
            a.type = rng.randrange(0, 15)
        case 3:
            node.attribute.append(a)
        case _:
            _new_value(rng, a)
    return None


def _new_attribute(rng: random.Random, node: NodeProto) -> None:
    names = (
        "axis",
        "axes",
        "keepdims",
        "to",
        "alpha",
        "group",
        "strides",
        "dilations",
        "pads",
        "auto_pad",
        "mode",
        "perm",
        "epsilon",
    )
    value = rng.choice(
        (
            rng.choice(INTEGERS),
            rng.choice(FLOATS),
            rng.choice(STRINGS),
            [rng.choice(INTEGERS) for _ in range(rng.randrange(1, 5))],
        )
    )
    node.attribute.append(helper.make_attribute(rng.choice(names), value))


def _new_value(rng: random.Random, a: AttributeProto) -> None:
    match a.type:
        case AttributeProto.INT:
            a.i = rng.choice((a.i + rng.choice((-1, 1)), rng.choice(SMALL), rng.choice(INTEGERS)))
        case AttributeProto.FLOAT:
            a.f = rng.choice(FLOATS)
        case AttributeProto.STRING:
            a.s = rng.choice(STRINGS)
        case AttributeProto.INTS:
            _list(rng, a.ints, rng.choice((SMALL, SMALL, INTEGERS)))
        case AttributeProto.FLOATS:
            _list(rng, a.floats, FLOATS)
        case AttributeProto.STRINGS:
            _list(rng, a.strings, STRINGS)
        case AttributeProto.TENSOR:
            _tensor(rng, a.t)
        case AttributeProto.GRAPH if rng.random() < 0.5:
            del a.g.output[:]
        case _:
            a.ref_attr_name = rng.choice(NAMES)


def _list(rng: random.Random, values: Any, others: tuple) -> None:
    match rng.randrange(5):
        case 0:
            values.append(rng.choice(others))
        case 1 if values:
            del values[rng.randrange(len(values))]
        case 2 if len(values) > 1:
            i, j = rng.sample(range(len(values)), 2)
            values[i], values[j] = values[j], values[i]
        case 3:
            del values[:]
        case _ if values:
            values[rng.randrange(len(values))] = rng.choice(others)


def _type(rng: random.Random, model: ModelProto) -> None:
    """Of an input, an output, or a tensor between."""
    graph = rng.choice([g for g in _graphs(model) if isinstance(g, GraphProto)])
    value = rng.choice([*graph.input, *graph.input, *graph.output, *graph.value_info])
    kind: TypeProto.Tensor = value.type.tensor_type
    dims = kind.shape.dim
    match rng.randrange(9):
        case 0:
            kind.elem_type = rng.randrange(0, 25)
        case 1:
            value.type.ClearField("tensor_type") if rng.random() < 0.5 else kind.ClearField("shape")
        case 2:
            value.name = rng.choice((*NAMES, *_names(graph)))
        case 3:
            value.type.sequence_type.elem_type.tensor_type.elem_type = 1
        case 4 if dims:
            del dims[rng.randrange(len(dims))]
        case 5:
            dims.add().dim_value = rng.choice(INTEGERS)
        case 6 if dims:
            rng.choice(dims).dim_param = rng.choice(NAMES)
        case _ if dims:
            dim = rng.choice(dims)
            dim.dim_value = rng.choice((dim.dim_value + rng.choice((-1, 1)), rng.choice(SMALL), rng.choice(INTEGERS)))


def _edge(rng: random.Random, model: ModelProto) -> None:
    graph = _graph(rng, model)
    node, names = rng.choice(graph.node), _names(graph)
    match rng.randrange(8):
        case 0 if node.input:
            del node.input[rng.randrange(len(node.input))]
        case 1:
            node.input.append(rng.choice((*names, "")))
        case 2 if node.output:
            node.output[rng.randrange(len(node.output))] = rng.choice((*names, *NAMES))
        case 3:
            node.output.append(rng.choice((*NAMES, "new")))
        case 4 if node.output:
            del node.output[rng.randrange(len(node.output))]
        case _ if node.input:
            node.input[rng.randrange(len(node.input))] = rng.choice((*names, *names, "", "nowhere"))


def _operator(rng: random.Random, model: ModelProto) -> None:
    node = _node(rng, model)
    match rng.randrange(4):
        case 0:
            node.domain = rng.choice(("", "ai.onnx", "ai.onnx.ml", "com.microsoft", "com.microsoft.nchwc", "own", "\x1b"))
        case 1:
            node.name = rng.choice(NAMES)
        case _:
            if rng.random() < 0.7:  # one that takes as many
                node.op_type = rng.choice(
                    [s.name for s in onnx.defs.get_all_schemas() if s.min_input <= len(node.input) <= s.max_input]
                )
            else:
                node.op_type = rng.choice(operators())


@cache
def operators() -> tuple[str, ...]:
    return tuple(sorted({s.name for s in onnx.defs.get_all_schemas()} | {"", "Nothing", "BiasGelu", "FusedMatMul", "QAttention"}))


def _order(rng: random.Random, model: ModelProto) -> None:
    graph = _graph(rng, model)
    nodes = graph.node
    match rng.randrange(4):
        case 0:
            del nodes[rng.randrange(len(nodes))]
        case 1:
            nodes.append(rng.choice(nodes))
        case 2:
            other = rng.choice(rng.choice(_graphs(model)).node)
            nodes.append(other)
        case _:
            kept = list(nodes)
            rng.shuffle(kept)
            del nodes[:]
            nodes.extend(kept)


def _weight(rng: random.Random, model: ModelProto) -> None:
    graph = rng.choice([g for g in _graphs(model) if isinstance(g, GraphProto) and (g.initializer or g.input)])
    if not graph.initializer or rng.random() < 0.1:
        value = rng.choice(graph.input)  # what was given at run time becomes a constant
        shape = [d.dim_value for d in value.type.tensor_type.shape.dim]
        if np.prod(shape, dtype=float) < 1e5:
            dtype = helper.tensor_dtype_to_np_dtype(value.type.tensor_type.elem_type)
            values = np.array([rng.choice((0, 1, 2, 3, -1)) for _ in range(int(np.prod(shape)))]).astype(dtype)
            graph.initializer.append(onnx.numpy_helper.from_array(values.reshape(shape), value.name))
        return
    _tensor(rng, rng.choice(graph.initializer))


def _tensor(rng: random.Random, t: TensorProto) -> None:
    match rng.randrange(11):
        case 0 if t.dims:
            t.dims[rng.randrange(len(t.dims))] = rng.choice(INTEGERS)
        case 1:
            t.dims.append(rng.choice((1, 1, 0, 2, -1, 2**33)))
        case 2 if t.dims:
            del t.dims[rng.randrange(len(t.dims))]
        case 3:
            t.data_type = rng.randrange(0, 25)
        case 4:
            t.raw_data = t.raw_data[: rng.randrange(len(t.raw_data) + 1)]
        case 5:
            t.raw_data = t.raw_data + bytes(rng.choice((1, 4, 8)))
        case 6:
            t.float_data.append(rng.choice(FLOATS))
        case 7:
            t.name = rng.choice(NAMES)
        case 8:
            t.data_location = TensorProto.EXTERNAL
            place = rng.choice(("weights", "../weights", "/etc/passwd", "", "/dev/zero", "."))
            for key, value in (("location", place), ("offset", str(rng.choice(INTEGERS))), ("length", str(rng.choice(INTEGERS)))):
                t.external_data.add(key=key, value=value)
        case _:
            _values(rng, t)


def _values(rng: random.Random, t: TensorProto) -> None:
    """Some of a tensor's numbers, in its own type."""
    values = onnx.numpy_helper.to_array(t).copy()
    if not values.size or values.size > 1 << 16:
        return
    others: tuple = FLOATS if values.dtype.kind == "f" else rng.choice((SMALL, SMALL, INTEGERS))
    for _ in range(rng.choice((1, 1, 3))):
        values.reshape(-1)[rng.randrange(values.size)] = np.array(rng.choice(others)).astype(values.dtype)
    t.CopyFrom(onnx.numpy_helper.from_array(values, t.name))


def _opset(rng: random.Random, model: ModelProto) -> None:
    match rng.randrange(5):
        case 0:
            model.ir_version = rng.choice((-1, 0, 1, 3, 4, 8, 10, 99, 2**40))
        case 1:
            model.opset_import.append(
                helper.make_opsetid(rng.choice(("", "ai.onnx", "ai.onnx.ml", "com.microsoft", "own")), rng.randrange(30))
            )
        case 2:
            del model.opset_import[rng.randrange(len(model.opset_import))]
        case _:
            rng.choice(model.opset_import).version = rng.choice((-1, 0, *range(1, 30), 2**31, 2**62))


def _whole(rng: random.Random, model: ModelProto) -> None:
    """Graphs put into each other, functions, lists of inputs and outputs."""
    graph = model.graph
    match rng.randrange(6):
        case 0:
            node = rng.choice(graph.node)
            node.attribute.append(
                helper.make_attribute(rng.choice(("body", "then_branch", "else_branch")), rng.choice(_graphs(model)))
            )
            node.op_type = rng.choice((node.op_type, "If", "Loop", "Scan"))
        case 1:
            del graph.output[rng.randrange(len(graph.output))]
        case 2:
            graph.output.append(_value(rng.choice(_names(graph)), rng.randrange(1, 14), None))
        case 3:
            graph.input.append(_value(rng.choice((*_names(graph), *NAMES)), rng.randrange(1, 14), (2, 3)))
        case 4:
            node = rng.choice(graph.node)
            inside = [rng.choice(graph.node) for _ in range(rng.randrange(4))]
            imports = [helper.make_opsetid("", 17)]
            model.functions.append(
                helper.make_function(node.domain, node.op_type, node.input[:2], node.output[:1], inside, imports)
            )
        case _:
            sparse = helper.make_sparse_tensor(
                helper.make_tensor(rng.choice(_names(graph)), 1, (2,), [1.0, 2.0]),
                helper.make_tensor("i", 7, (2,), [rng.choice(INTEGERS) for _ in range(2)]), [rng.choice(INTEGERS)],
            )  # fmt: skip
            graph.sparse_initializer.append(sparse)


CHANGES = (
    *[_attribute] * 8, *[_type] * 5, *[_edge] * 3, *[_operator] * 3, _order, *[_weight] * 8, _opset, _whole,
)  # fmt: skip
"""What is changed, the most often what leaves most models whole."""


def _attribute_or_dims(rng: random.Random, model: ModelProto) -> None:
    nodes = [node for graph in _graphs(model) for node in graph.node]
    if nodes:
        _new_attribute(rng, rng.choice(nodes))


# --- One of them ------------------------------------------------------------------------------------------------------


def tried(data: bytes, precision: str, path: Path) -> str:
    """What becomes of a model: "ran", "compiled", or the name of the error that refuses it; anything else is raised."""
    path.write_bytes(data)
    try:
        plan = without_code(path, precision=precision)
        file = to_bytes(plan)
        again = from_bytes(file)
        if to_bytes(again) != file:
            raise AssertionError("the plan that was written is not the one that is read")
        program = again.entries[0].program
        if total_flops(program) > FLOPS or largest(program) > ELEMENTS:
            return "compiled"
        with Session(again, "cpu") as session:
            _check(session, program)
        return "ran"
    except TccompileError as error:
        if type(error) is TccompileError:  # "internal error", exit code 70
            raise
        if not str(error):
            raise AssertionError("an error that says nothing") from error
        return type(error).__name__


def _check(session: Session, program: Any) -> None:
    from tccompile.ir.feeds import seeded

    for name, value in zip(program.outputs, session.run(None, seeded(program, 1)), strict=True):
        tensor = program.tensors[name]
        if value.shape != tensor.shape or value.dtype != tensor.dtype.numpy:
            raise AssertionError(f"output {name!r} is {value.dtype} {value.shape}, declared {tensor.dtype.value} {tensor.shape}")


def precision_of(number: int) -> str:
    return ("mixed", "mixed", "fp32", "fp16")[number % 4]


def serve() -> None:
    """A worker: a number a line from the standard input; what became of it, a JSON object a line, to the standard output."""
    results = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print goes elsewhere
    warnings.simplefilter("ignore")
    faulthandler.register(signal.SIGPROF, chain=True)  # says where it was, and ends
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "model.onnx")
        for line in sys.stdin:
            number = int(line)
            data = changed(number, models(sys.argv[1]))
            Path("/proc/self/clear_refs").write_text("5")  # the peak of memory begins again
            before = _memory("VmRSS")
            limit = _memory("VmData") + (GIB << 30)
            resource.setrlimit(resource.RLIMIT_DATA, (limit, resource.RLIM_INFINITY))
            signal.setitimer(signal.ITIMER_PROF, SECONDS * max(1.0, _elements(data) / MANY))
            begin = time.process_time()
            try:
                result: dict[str, Any] = {"what": tried(data, precision_of(number), path)}
            except BaseException as error:
                says = traceback.format_exc()
                result = {"what": "UNDOCUMENTED", "why": f"{type(error).__name__}: {str(error)[:300]}", "where": says[-1500:]}
            signal.setitimer(signal.ITIMER_PROF, 0)
            resource.setrlimit(resource.RLIMIT_DATA, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
            result |= {"number": number, "seconds": time.process_time() - begin, "mib": (_memory("VmHWM") - before) >> 20}
            results.write(json.dumps(result) + "\n")
            results.flush()


def _elements(data: bytes) -> int:
    """Of the largest input that a model declares, or of none that it could hold."""
    try:
        shapes = [v.type.tensor_type.shape.dim for v in onnx.load_from_string(data).graph.input]
    except Exception:  # of whatever kind: it is tried all the same
        return 0
    sizes = [math.prod(d.dim_value for d in shape) for shape in shapes]
    return max((n for n in sizes if 0 < n < 1 << 31), default=0)


def _memory(what: str) -> int:
    """Bytes of this process, as the kernel counts them."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(what + ":"))


# --- Many -------------------------------------------------------------------------------------------------------------


SERVE = "from tests.fuzz.models import serve; serve()"


class Worker:
    """A process that tries one number after another, of models in a file; a new one takes its place when it ends."""

    def __init__(self, models: Path) -> None:
        self.log = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(p for p in sys.path if p),
            "OMP_NUM_THREADS": "1",
            "OPENBLAS_NUM_THREADS": "1",
        }
        self.process = subprocess.Popen(
            [sys.executable, "-c", SERVE, str(models)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.log,
            text=True,
            env=environment,
        )

    def tried(self, number: int) -> dict[str, Any]:
        assert self.process.stdin and self.process.stdout
        self.log.seek(0)
        self.log.truncate()
        print(number, file=self.process.stdin, flush=True)
        line = self.process.stdout.readline()
        if line:
            return json.loads(line)
        code = self.process.wait()
        self.log.seek(0)
        said = self.log.read()[-3000:]
        what = "HANG" if code == -signal.SIGPROF else "CRASH"
        return {"number": number, "what": what, "why": f"exit code {code}", "where": said, "seconds": SECONDS, "mib": 0}

    def close(self) -> None:
        assert self.process.stdin
        self.process.stdin.close()
        self.process.wait()
        self.log.close()


def results(numbers: Iterator[int], jobs: int, begun: Sequence[bytes]) -> Iterator[dict[str, Any]]:
    """What became of each, in any order."""
    with tempfile.TemporaryDirectory() as folder:
        write(begun, path := Path(folder, "models"))
        yield from _results(numbers, jobs, path)


def _results(numbers: Iterator[int], jobs: int, models: Path) -> Iterator[dict[str, Any]]:
    found: queue.Queue = queue.Queue()
    lock = threading.Lock()

    def work() -> None:
        worker = Worker(models)
        while True:
            with lock:
                number = next(numbers, None)
            if number is None:
                break
            found.put(result := worker.tried(number))
            if result["what"] in ("HANG", "CRASH"):
                worker.close()
                worker = Worker(models)
        worker.close()
        found.put(None)

    threads = [threading.Thread(target=work, daemon=True) for _ in range(jobs)]
    for thread in threads:
        thread.start()
    left = jobs
    while left:
        if (result := found.get()) is None:
            left -= 1
        else:
            yield result


def failed(result: dict[str, Any]) -> bool:
    return result["what"] in ("HANG", "CRASH", "UNDOCUMENTED") or result["mib"] > GIB << 10


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("count", type=int, nargs="?", default=100_000)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--save", type=int, metavar="NUMBER", help="only write that model to NUMBER.onnx")
    args = parser.parse_args()
    start = begun()
    if args.save is not None:
        Path(f"{args.save}.onnx").write_bytes(changed(args.save, start))
        print(f"{args.save}.onnx, compiled in {precision_of(args.save)}")
        return 0
    counts: Counter[str] = Counter()
    bad = 0
    for result in results(iter(range(args.first, args.first + args.count)), args.jobs, start):
        counts[result["what"]] += 1
        if failed(result):
            bad += 1
            print(
                f"{result['number']}: {result['what']} {result.get('why', '')} ({result['seconds']:.1f} s, {result['mib']} MiB)"
            )
            print("    " + result.get("where", "").replace("\n", "\n    "), flush=True)
        if sum(counts.values()) % 1000 == 0:
            print(f"{sum(counts.values())} tried, {bad} failed", file=sys.stderr, flush=True)
    print(f"{sum(counts.values())} models: " + ", ".join(f"{n} {what}" for what, n in counts.most_common()) + f"; {bad} failed")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
