"""An ONNX file to a checked graph: one opset, shapes bound, constants folded, every constant with its provenance."""

from __future__ import annotations

import io
import math
import os
import re
import shlex
import stat
import warnings
from collections import Counter
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from heapq import heappop, heappush
from itertools import count
from pathlib import Path
from typing import IO, Any

import numpy as np
import onnx
import onnx.checker
import onnx.defs
import onnx.helper
import onnx.inliner
import onnx.numpy_helper
import onnx_graphsurgeon as gs
from google.protobuf.message import Message
from onnx_graphsurgeon.logger import G_LOGGER

from tccompile.custom.files import added
from tccompile.errors import ModelError, TccompileError, UnsupportedError, UsageError
from tccompile.ir.metadata import Metadata
from tccompile.ir.storage import to_storage
from tccompile.ir.types import DType
from tccompile.ir.weights import SMALL, Source
from tccompile.load import boundary, contrib, custom, narrow
from tccompile.load.constants import Weight, decide_by, decisive, held
from tccompile.load.cut import Part, cut, nearest
from tccompile.load.fold import MAX_BYTES, MAX_EXTENT, MAX_NODES, fold
from tccompile.load.issues import Findings, Issue
from tccompile.load.nodes import all_nodes, dense_values, first_line, reads, rename_inputs, subgraphs, widened
from tccompile.load.opset import NEWEST, OLDEST, UNIFORM, Scope, upgrade_nodes
from tccompile.load.other_files import told_by
from tccompile.load.survey import Survey
from tccompile.load.types import Type
from tccompile.load.valid import title

BF16 = onnx.TensorProto.BFLOAT16
IR_VERSION = 11  # the first that knows opset 23
PACKED = ("int4", "uint4", "int2", "uint2", "float4_e2m1fn")  # several values a byte

MAX_PROTO = 2**31  # bytes of what ONNX's C++ takes


@dataclass(frozen=True)
class Opened:
    """A model that has been read and checked: all of it but the values of its weights, and these by name.

    Weights are inputs of the same name, type and shape there, so that no call into ONNX's C++ ever sees their values.
    """

    proto: onnx.ModelProto
    weights: Mapping[str, np.ndarray]
    block: int | None = None  # how many channels a block has, where the user says it
    limits: Mapping[str, int] | None = None  # the most that nodes find in the data, where the user says it
    told: set[str] = field(default_factory=set)  # outputs of which it was said that their shape is another than the model's

    @cached_property
    def uniform(self) -> tuple[onnx.ModelProto, set[str]]:
        """The model as `load` begins with it whatever its shapes are, and the weights by whose values it is so."""
        with decisive() as names:
            return _guard("the model is not valid ONNX", _one_opset, deepcopy(self.proto), self.weights), names


@dataclass(frozen=True, eq=False)
class Tuned:
    """A model, or a part of one, with other values of some of its initializers, as `sources` gives them."""

    model: str | Path | onnx.ModelProto | Part
    weights: Mapping[str, np.ndarray]


Model = str | Path | onnx.ModelProto | Part | Tuned

Given = Model | os.PathLike[str] | bytes | IO[bytes]
"""A model as users give it: also the bytes of a file, and a file that is open for reading."""


def in_memory(model: Given) -> Model:
    """The model, a ModelProto where it is given as bytes or as an open file, which can be read only once."""
    if isinstance(model, str | Path | onnx.ModelProto | Part | Tuned):
        return model
    if isinstance(model, os.PathLike):
        return Path(model)
    text = isinstance(model, io.TextIOBase)  # which, of other bytes than text, cannot even be read
    data = model.read() if hasattr(model, "read") and not text else model
    if not isinstance(data, bytes | bytearray | memoryview):
        what = "a file that is open as text: open it with 'rb'" if text else f"a {type(data).__name__}"
        raise UsageError(f"a model is a path, an onnx.ModelProto, bytes or an open file, not {what}")
    return _proto("the bytes are not an ONNX file", bytes(data))


def _proto(what: str, data: bytes) -> onnx.ModelProto:
    proto = onnx.ModelProto()
    try:
        proto.ParseFromString(data)
    except Exception as e:  # of protobuf's two implementations
        raise ModelError(f"{what}: {told_by(data)}") from e
    return proto


def metadata(model: Opened) -> Metadata:
    """What the file says of itself."""
    proto = model.proto
    inputs, outputs = boundary.forms(proto.graph, model.weights)
    return Metadata(
        producer_name=_text(proto.producer_name),
        graph_name=_text(proto.graph.name),
        domain=_text(proto.domain),
        description=_text(proto.doc_string),
        graph_description=_text(proto.graph.doc_string),
        version=proto.model_version,
        custom_metadata_map={_text(p.key): _text(p.value) for p in proto.metadata_props},
        inputs=inputs,
        outputs=outputs,
    )


def files_beside(proto: onnx.ModelProto, path: Path) -> list[Path]:
    """The files in a model's folder that it keeps constants in; what is named outside of it is not looked at."""
    sparse = [t for s in proto.graph.sparse_initializer for t in (s.values, s.indices)]
    inside = [t for part in (proto.graph, *proto.functions) for node in part.node for t in _tensors(node)]
    external = [t for t in (*proto.graph.initializer, *sparse, *inside) if t.data_location == onnx.TensorProto.EXTERNAL]
    names = sorted({e.value for t in external for e in t.external_data if e.key == "location"})
    found = ((path.parent / name).resolve() for name in names if ".." not in Path(name).parts)
    return [file for file in found if file.is_file() and _beside(file, path)]


def _beside(file: Path, model: Path) -> bool:
    """Whether a file is in the folder of a model, or of the file that the model is a link to, as in the caches of model hubs."""
    return any(file.is_relative_to(folder) for folder in (model.parent.resolve(), model.resolve().parent))


def _text(value: str | bytes) -> str:
    """Of a text that is not UTF-8, which protobuf gives as bytes, what can be read."""
    return value if isinstance(value, str) else value.decode("utf-8", "replace")


def read(model: Model | Opened, block: int | None = None, limits: Mapping[str, int] | None = None) -> Opened:
    """The model, read and checked once for all that look into it. Raises what `load` raises.

    block  how many channels a block has, of a model that ONNX Runtime has laid out for a CPU; None if the model shows it
    limits the most that nodes find whose results' extents the data decide, by the nodes' names
    """
    return model if isinstance(model, Opened) else _guard("the model is not valid ONNX", _read, model, block, limits or {})


def _read(model: Model, block: int | None, limits: Mapping[str, int]) -> Opened:
    proto, path = _parsed(model)
    _list_once(proto)
    _opset(proto)
    if len(proto.graph.node) > MAX_NODES:
        raise UnsupportedError(f"the model has {len(proto.graph.node)} nodes; at most 2^20 are supported")
    _bring_in(proto, path)
    _adopt(proto)
    custom.prepare(proto, added())
    weights = _hold_aside(proto.graph, path)
    _sort(proto.graph)
    _guard("the model's functions are not valid ONNX", _level, proto, weights)
    _check(proto)
    if isinstance(model, Tuned):
        weights |= model.weights
    return Opened(deepcopy(proto), weights, block, limits)  # of what is deleted from it, a message keeps the memory


def load(model: Model | Opened, shapes: Mapping[str, tuple[int, ...]] | None = None, found: Findings | None = None) -> gs.Graph:
    """The model's graph: legal ONNX at opset 23 or the model's own newer one, shapes static, constants folded, nothing unused.

    shapes  the shape of each input that has symbolic dimensions, by the input's name
    found   takes what is wrong with inputs and nodes, in place of an error; the graph is without these, and what depends on them

    Every constant is a `Weight`, so `constants.recipe_of` says where its values come from. Raises ModelError for a file
    that is not valid ONNX, UnsupportedError for a valid one that cannot be compiled, UsageError for shapes that do not fit.
    """
    opened = read(model)
    weights = opened.weights
    uniform, names = opened.uniform
    decide_by(*names)
    proto = deepcopy(uniform)
    boundary.open_inputs(proto.graph, shapes or {})
    boundary.copy_given(proto.graph, weights)
    unknown = _bind(proto.graph, set(weights), shapes or {}, found)
    constants = {name: Weight(name, v, Source(name, v.shape, v.dtype.name)) for name, v in weights.items()}
    domains = {o.domain: o.version for o in proto.opset_import}
    if found is None:
        types = fold(proto.graph, constants, domains, opened.block, opened.limits or {})
    else:
        types = Survey(found, unknown, proto.graph, constants, domains, opened.block, opened.limits or {}).run()
    _name_apart(proto.graph)
    return _import(proto, types, constants, opened.told if found is None else None)


def _name_apart(graph: onnx.GraphProto) -> None:
    """Give nodes names of their own: graphs inside nodes, which are part of this one by now, may have used the same ones."""
    taken = {node.name for node in graph.node}
    seen: set[str] = set()
    for node in graph.node:
        if node.name in seen:
            node.name = next(name for i in count(1) if (name := f"{node.name}~{i}") not in taken)
            taken.add(node.name)
        if node.name:
            seen.add(node.name)


def with_small_weights(model: Model) -> tuple[onnx.ModelProto, Path | None]:
    """The model as its file says, with those weights in it by which ONNX Runtime infers shapes; and the file."""
    proto, path = parsed(model)
    for tensor in proto.graph.initializer:
        if tensor.data_location == onnx.TensorProto.EXTERNAL and math.prod(tensor.dims) * 4 <= SMALL:
            tensor.CopyFrom(onnx.numpy_helper.from_array(_values(tensor, tensor.name, path), tensor.name))
    return proto, path


def sources(model: Model) -> Mapping[str, np.ndarray]:
    """A model's weights, arrays by their names: for `Session.refit`, and for what was left out of a plan (`--strip-weights`).

    model  its file, or an onnx.ModelProto; of it nothing else is checked. Raises ModelError for a file that is no model
    """
    proto, path = parsed(model)
    return _guard("the model is not valid ONNX", _hold_aside, proto.graph, path)


def input_names(model: Model) -> list[str]:
    """The names of the model's inputs, as its file says; nothing else of it is checked."""
    graph = parsed(model)[0].graph
    weights = {t.name for t in graph.initializer} | {t.values.name for t in graph.sparse_initializer}
    return [v.name for v in graph.input if v.name not in weights]


def output_names(model: Model) -> list[str]:
    """The names of the model's outputs, as its file says."""
    return [v.name for v in parsed(model)[0].graph.output]


# --- Reading ---------------------------------------------------------------------------------------------------------


def parsed(model: Model) -> tuple[onnx.ModelProto, Path | None]:
    """The model, of which nothing is known yet but that it has a graph and names that are text, and the file it comes from."""
    return _guard("the model is not valid ONNX", _parsed, model)


def _parsed(model: Model) -> tuple[onnx.ModelProto, Path | None]:
    if isinstance(model, Tuned):
        proto, path = _parsed(model.model)
        for tensor in _constants_of(proto.graph):
            if tensor.name in model.weights:
                _set_values(tensor, model.weights[tensor.name])
        return proto, path
    if isinstance(model, Part):
        proto, path = _parsed(model.model)
        cut(proto, model.inputs, model.outputs)
        return proto, path
    path = None
    if isinstance(model, onnx.ModelProto):
        proto = deepcopy(model)
    else:
        path = Path(model)
        try:
            if stat.S_ISCHR(path.stat().st_mode):
                raise UsageError(f"cannot read the model {path}: it is a device, not a file")
            data = path.read_bytes()
        except OSError as e:
            raise UsageError(f"cannot read the model {path}: {e.strerror}") from e
        proto = _proto(f"{path} is not an ONNX file", data)
    if not proto.HasField("graph"):
        raise ModelError(f"{path or 'the model'} is not an ONNX model: it holds no graph")
    _check_text(proto)
    return proto, path


def _constants_of(graph: onnx.GraphProto) -> Iterator[onnx.TensorProto]:
    """Its initializers, and the large constants that count as such."""
    yield from graph.initializer
    for node in graph.node:
        if (tensor := _large_constant(node)) is not None:
            tensor.name = node.output[0]
            yield tensor


def _set_values(tensor: onnx.TensorProto, values: np.ndarray) -> None:
    """Other values for a tensor, which keeps its type: bfloat16 rounds them."""
    if tensor.data_type == BF16:
        made = onnx.TensorProto(data_type=BF16, dims=values.shape, raw_data=to_storage(values, DType.BF16).tobytes())
    else:
        made = onnx.numpy_helper.from_array(values)
    made.name = tensor.name
    tensor.CopyFrom(made)


def _sort(graph: onnx.GraphProto) -> None:
    """Puts nodes behind those whose results they read, which some tools leave to who runs the model; others keep their order.

    Nodes of a circle, and all that depends on them, stay at the end, where the checks find them.
    """
    for node in graph.node:
        for inner in subgraphs(node):
            _sort(inner)
    maker = {y: i for i, node in enumerate(graph.node) for y in node.output if y}
    sources = [{maker[x] for x in reads(node) if x in maker} for node in graph.node]
    if all(not needs or max(needs) < i for i, needs in enumerate(sources)):
        return
    readers: dict[int, list[int]] = {}
    for i, needs in enumerate(sources):
        for source in needs:
            readers.setdefault(source, []).append(i)
    missing = [len(needs) for needs in sources]
    ready, order = [i for i, n in enumerate(missing) if not n], list[int]()
    while ready:
        order.append(heappop(ready))
        for i in readers.get(order[-1], ()):
            missing[i] -= 1
            if not missing[i]:
                heappush(ready, i)
    nodes = [graph.node[i] for i in (*order, *(i for i, n in enumerate(missing) if n))]
    copies = [deepcopy(node) for node in nodes]
    del graph.node[:]
    graph.node.extend(copies)


def _check(proto: onnx.ModelProto) -> None:
    """ONNX's own checks, except that inputs and outputs may be without a shape: it is given by the user, or inferred.

    So is the type of an output that the model was cut at.
    """
    names = Counter(v.name for v in proto.graph.output)
    if twice := next((name for name, count in names.items() if count > 1), None):
        raise ModelError(
            f"the model lists its output {twice!r} {names[twice]} times: remove the others, or name copies (Identity)"
        )
    untyped = [v for v in proto.graph.output if not v.HasField("type")]
    for value in untyped:
        value.type.tensor_type.elem_type = onnx.TensorProto.FLOAT
    tensors = [v.type.tensor_type for v in (*proto.graph.input, *proto.graph.output) if v.type.HasField("tensor_type")]
    shapeless = [t for t in tensors if not t.HasField("shape")]
    for tensor in shapeless:
        tensor.shape.SetInParent()
    unnamed = [n for n in proto.graph.node if not n.name and n.output]
    for node in unnamed:  # what the checks say of a node has its name and op, and nothing else
        node.name = node.output[0]
    _check_model(proto)
    for tensor in shapeless:
        tensor.ClearField("shape")
    for value in untyped:
        value.ClearField("type")
    for node in unnamed:
        node.ClearField("name")


def _check_model(proto: onnx.ModelProto) -> None:
    try:
        onnx.checker.check_model(proto)
    except onnx.checker.ValidationError as e:  # the node is on the last of its lines
        found = _unknown_operator(proto) or _unknown_tensor(proto.graph)
        found = found or " ".join(str(e).split()).replace(" ==> Context:", ";")
        raise ModelError(f"the model is not valid ONNX: {found}") from e


def _unknown_operator(proto: onnx.ModelProto) -> str | None:
    """The first of the standard's operators that its opset has not."""
    opset = _opset(proto)
    for node in proto.graph.node:
        if node.domain in ("", "ai.onnx") and not onnx.defs.has(node.op_type, opset, ""):
            since = (s.since_version for s in onnx.defs.get_all_schemas_with_history() if s.name == node.op_type and not s.domain)
            first = min(since, default=None)
            there = (
                f"it is there from opset {first} on: export the model with that" if first else "export it with standard operators"
            )
            return f"{title(node)}: opset {opset} has no such operator; {there}"
    return None


def _unknown_tensor(graph: onnx.GraphProto) -> str | None:
    """The first tensor that is read and that nothing computes, or only what depends on who reads it."""
    known = {v.name for v in graph.input} | {t.name for t in graph.initializer}
    makers = {y: node for node in reversed(graph.node) for y in node.output}
    for node in graph.node:
        seen = set[str]()
        while name := next((x for x in reads(node) if x and x not in known), None):
            if name not in makers:
                return f"{title(node)} reads {name!r}, which nothing computes{nearest(name, {*known, *makers})}"
            node, reader = makers[name], node
            if name in seen:
                return f"{title(reader)} reads {name!r}, which {title(node)} computes from what {title(reader)} is to make"
            seen.add(name)
        known.update(node.output)
    return None


def _check_text(message: Message) -> None:
    """Raises ModelError for names that are not UTF-8, which protobuf gives as bytes; what only people read may be anything."""
    if isinstance(message, onnx.TensorProto):  # of its other fields one may be most of what the file holds, and would be copied
        known = message.DESCRIPTOR.fields_by_name
        fields = [(known[name], getattr(message, name)) for name in ("name", "external_data")]
    else:
        fields = message.ListFields()
    for described, value in fields:
        parts = [value] if isinstance(value, str | bytes | Message) else value
        if described.type == described.TYPE_STRING and described.name != "doc_string":
            for text in parts:
                if isinstance(text, bytes):
                    raise ModelError(
                        f"the model is not valid ONNX: the {described.name} {text!r} of a {message.DESCRIPTOR.name} is not UTF-8"
                    )
        elif described.type == described.TYPE_MESSAGE and described.name != "metadata_props":
            for part in parts:
                _check_text(part)


def _guard(what: str, fn: Callable[..., Any], *args: Any) -> Any:
    """fn(*args), with whatever another library raises about a broken model as a ModelError."""
    try:
        return fn(*args)
    except TccompileError:
        raise
    except Exception as e:
        raise ModelError(f"{what}: {first_line(e)}") from e


def _list_once(proto: onnx.ModelProto) -> None:
    """Each operator set is named once: tools name the same one twice, and by both of the standard's names.

    A model that has none of the standard's operators need not name a version of them.
    """
    imports = {("" if o.domain == "ai.onnx" else o.domain, o.version) for o in proto.opset_import}
    if (
        imports
        and not any(domain == "" for domain, _ in imports)
        and all(n.domain not in ("", "ai.onnx") for n in proto.graph.node)
    ):
        imports.add(("", UNIFORM))
    del proto.opset_import[:]
    proto.opset_import.extend(onnx.helper.make_opsetid(*each) for each in sorted(imports))


def _opset(proto: onnx.ModelProto) -> int:
    versions = [o.version for o in proto.opset_import if o.domain == ""]
    if len(versions) != 1:
        raise ModelError(f"the model names {len(versions)} versions of ONNX's operator set; it must name one")
    if not OLDEST <= versions[0] <= NEWEST:
        raise UnsupportedError(
            f"the model uses opset {versions[0]}; opsets {OLDEST} to {NEWEST} are supported: export it with one of these, "
            "or convert it with onnx.version_converter"
        )
    return versions[0]


def _hold_aside(graph: onnx.GraphProto, path: Path | None) -> dict[str, np.ndarray]:
    """Takes the values out of a graph: all initializers, and large Constant nodes."""
    weights: dict[str, np.ndarray] = {}
    inputs = {i.name for i in graph.input}

    def hold(name: str, values: np.ndarray, elem: int, shape: tuple[int, ...]) -> None:
        if name in weights:
            raise ModelError(f"two constants are called {name!r}")
        weights[name] = widened(values)
        if name not in inputs:  # before IR version 4 initializers were inputs as well
            graph.input.append(onnx.helper.make_tensor_value_info(name, elem, shape))

    texts = [t for t in graph.initializer if t.data_type == onnx.TensorProto.STRING]
    for tensor in [t for t in graph.initializer if t.data_type != onnx.TensorProto.STRING]:
        hold(tensor.name, _values(tensor, tensor.name, path), tensor.data_type, tuple(tensor.dims))
    for sparse in graph.sparse_initializer:
        values = _guard(f"the sparse constant {sparse.values.name!r} is broken", dense_values, sparse)
        hold(sparse.values.name, values, sparse.values.data_type, tuple(sparse.dims))
    kept = [onnx.helper.make_node("Constant", [], [t.name], t.name, value=t) for t in texts]
    for node in graph.node:
        tensor = _large_constant(node)
        if tensor is not None:
            hold(node.output[0], _values(tensor, node.output[0], path), tensor.data_type, tuple(tensor.dims))
        else:
            kept.append(node)
    del graph.initializer[:], graph.sparse_initializer[:]
    _drop_inputs(graph, {t.name for t in texts})
    if texts or len(kept) < len(graph.node):
        del graph.node[:]
        graph.node.extend(kept)
    return weights


def _drop_inputs(graph: onnx.GraphProto, names: Container[str]) -> None:
    """Initializers that were inputs as well are constants only."""
    for value in [v for v in graph.input if v.name in names]:
        graph.input.remove(value)


def _large_constant(node: onnx.NodeProto) -> onnx.TensorProto | None:
    """The tensor of a Constant that is held aside."""
    if node.op_type != "Constant" or len(node.attribute) != 1 or node.attribute[0].name != "value":
        return None
    tensor = node.attribute[0].t
    if tensor.data_type == onnx.TensorProto.STRING:  # refused where it is, if it is needed
        return None
    return tensor if math.prod(tensor.dims) * 4 > SMALL else None


def _bring_in(proto: onnx.ModelProto, path: Path | None) -> None:
    """Puts into the model what lies in files and is not held aside: ONNX would look for these files where the process runs."""
    inside = [(t, sparse.values.name) for sparse in proto.graph.sparse_initializer for t in (sparse.values, sparse.indices)]
    for part in (proto.graph, *proto.functions):
        nodes = (n for n in part.node if part is not proto.graph or _large_constant(n) is None)
        inside += [(t, t.name or next(iter(n.output), n.name)) for n in nodes for t in _tensors(n)]
    size = 0
    for tensor, name in inside:
        if tensor.data_location == onnx.TensorProto.EXTERNAL:
            values = _values(tensor, name, path)
            size += values.nbytes
            if size > MAX_PROTO:
                raise UnsupportedError(f"constants inside nodes, as {name!r}, take more than 2^31 bytes; make them initializers")
            tensor.CopyFrom(onnx.numpy_helper.from_array(values, tensor.name))


def _tensors(node: onnx.NodeProto) -> Iterator[onnx.TensorProto]:
    """The constants inside a node."""
    for a in node.attribute:
        yield from (*([a.t] if a.HasField("t") else []), *a.tensors)
        for sparse in (*([a.sparse_tensor] if a.HasField("sparse_tensor") else []), *a.sparse_tensors):
            yield from (sparse.values, sparse.indices)
    for graph in subgraphs(node):
        yield from graph.initializer
        for sparse in graph.sparse_initializer:
            yield from (sparse.values, sparse.indices)
        for inner in graph.node:
            yield from _tensors(inner)


def _values(tensor: onnx.TensorProto, name: str, path: Path | None) -> np.ndarray:
    """A tensor's values: a view of the file or of the message where its type is one that NumPy has."""
    where = f"the constant {name!r} is broken"
    if tensor.data_type == onnx.TensorProto.STRING:
        raise UnsupportedError(f"the constant {name!r} holds strings; only numbers and booleans can be compiled")
    dtype = _guard(where, onnx.helper.tensor_dtype_to_np_dtype, tensor.data_type)
    if any(d < 0 for d in tensor.dims):
        raise ModelError(f"{where}: its shape is {tuple(tensor.dims)}")
    size = math.prod(tensor.dims) * dtype.itemsize
    if size > MAX_BYTES:
        raise UnsupportedError(f"the constant {name!r} takes {size} bytes; at most 2^40 are supported")
    packed = dtype.name in PACKED
    if tensor.data_location == onnx.TensorProto.EXTERNAL:
        raw = _external(tensor, name, path, None if packed else size)
    elif tensor.HasField("raw_data"):
        raw = np.frombuffer(tensor.raw_data, np.uint8)
    else:
        return _guard(where, onnx.numpy_helper.to_array, tensor)
    if packed:
        bare = onnx.TensorProto(data_type=tensor.data_type, dims=tensor.dims, raw_data=raw.tobytes())
        return _guard(where, onnx.numpy_helper.to_array, bare)
    if raw.size != size:
        raise ModelError(f"{where}: it has {raw.size} bytes, its type and shape need {size}")
    return raw.view(dtype).reshape(tuple(tensor.dims))


def _external(tensor: onnx.TensorProto, name: str, model: Path | None, size: int | None) -> np.ndarray:
    """The bytes of a tensor that lies in a file beside the model, mapped. Never reads outside the model's folder."""
    entries = {e.key: e.value for e in tensor.external_data}
    location = entries.get("location", "")
    if model is None:
        raise ModelError(f"the constant {name!r} lies in the file {location!r}: give the model's path, not its ModelProto")
    path = (model.parent / location).resolve()
    if not location or Path(location).is_absolute() or ".." in Path(location).parts or not _beside(path, model):
        raise ModelError(f"the constant {name!r} lies in {location!r}, outside the model's folder; it will not be read")
    if not path.is_file():
        raise ModelError(f"the constant {name!r} lies in {location!r}, and there is no such file beside the model: put it there")
    available = path.stat().st_size
    try:
        offset = int(entries.get("offset", 0))
        length = int(entries.get("length", available - offset if size is None else size))
    except ValueError as e:
        raise ModelError(f"the constant {name!r} has an offset or length in {location!r} that is not a number") from e
    if offset < 0 or not 0 <= length <= available - offset or (size is not None and length != size):
        raise ModelError(
            f"the constant {name!r} needs {size} bytes; the model says they are the {length} from {offset} on of {location!r}, "
            f"which has {available}: copy or download it anew"
        )
    return np.memmap(path, np.uint8, "r", offset, (length,)) if length else np.empty(0, np.uint8)


# --- Opset, functions, types -----------------------------------------------------------------------------------------


def _one_opset(proto: onnx.ModelProto, weights: Mapping[str, np.ndarray]) -> onnx.ModelProto:
    """The model at opset 23 or its own newer one, without local functions, bf16 and narrower types widened inside."""
    opset = _opset(proto)
    proto.ir_version = max(proto.ir_version, IR_VERSION)
    if proto.functions:
        _check_calls(proto)
        _give_defaults(proto)
        proto = _guard("the model's functions cannot be inlined", onnx.inliner.inline_local_functions, proto)
    _upgrade(proto.graph, opset, weights)
    _set_opset(proto.opset_import, max(opset, UNIFORM))
    narrow.widen(proto, weights)
    _widen(proto.graph, weights)
    return proto


def _give_defaults(proto: onnx.ModelProto) -> None:
    """Attributes that calls of functions leave out get the functions' defaults, of which ONNX's inliner knows nothing."""
    functions = {(f.domain, f.name, f.overload): f for f in proto.functions}
    for part in (proto.graph, *proto.functions):
        for node in all_nodes(part.node):
            if (called := functions.get((node.domain, node.op_type, node.overload))) is not None:
                given = {a.name for a in node.attribute}
                node.attribute.extend(a for a in called.attribute_proto if a.name not in given)


def _check_calls(proto: onnx.ModelProto) -> None:
    """Raises UnsupportedError where functions that call functions stand for too many nodes."""
    functions = {(f.domain, f.name, f.overload): f for f in proto.functions}
    sizes: dict[tuple[str, str, str], int] = {}

    def size(nodes: Sequence[onnx.NodeProto]) -> int:
        total = len(nodes)
        for node in nodes:
            key = node.domain, node.op_type, node.overload
            if key in functions and key not in sizes:
                sizes[key] = size(functions[key].node)
            total += sizes.get(key, 0) + sum(size(graph.node) for graph in subgraphs(node))
        return total

    if size(proto.graph.node) > MAX_NODES:
        raise UnsupportedError("the model's functions, which call each other, stand for more than 2^20 nodes")


def _level(proto: onnx.ModelProto, weights: Mapping[str, np.ndarray]) -> None:
    """Brings model and functions to one opset, 23 or newer, ahead of ONNX's checker and inliner where these would refuse them.

    That is if they are of several opsets, use operators of newer ones, or GroupNormalization-18, which was deprecated after
    models had been made of it.
    """
    opset = _opset(proto)
    nodes = [n for part in (proto.graph, *proto.functions) for n in all_nodes(part.node)]
    own = [next((o.version for o in f.opset_import if o.domain in ("", "ai.onnx")), opset) for f in proto.functions]
    deprecated = 18 <= opset < 21 and any(n.op_type == "GroupNormalization" for n in nodes)
    newer = any(n.domain == "" and not onnx.defs.has(n.op_type, opset) and onnx.defs.has(n.op_type, UNIFORM) for n in nodes)
    if not deprecated and not newer and all(version == opset for version in own):
        return
    for function, version in zip(proto.functions, own, strict=True):
        _upgrade(function, version, {})
    _upgrade(proto.graph, opset, weights)
    proto.ir_version = max(proto.ir_version, IR_VERSION)
    for imports in (proto.opset_import, *(f.opset_import for f in proto.functions)):
        _set_opset(imports, max(UNIFORM, opset, *own))


def _adopt(proto: onnx.ModelProto) -> None:
    """Names the domain of ONNX Runtime's operators where its optimizer has put them into the default one, or has not said it."""
    newest = max(_opset(proto), UNIFORM)
    own = {op for op in contrib.OPERATORS[contrib.MICROSOFT] if not onnx.defs.has(op, newest)}
    for part in (proto.graph, *proto.functions):
        used = set()
        for node in all_nodes(part.node):
            if node.domain == "" and node.op_type in own:
                node.domain = contrib.MICROSOFT
            used.add(node.domain)
        imports = proto.opset_import if part is proto.graph else part.opset_import
        missing = contrib.DOMAINS & used - {o.domain for o in imports}
        imports.extend(onnx.helper.make_opsetid(domain, 1) for domain in sorted(missing))


def _set_opset(imports: Any, version: int) -> None:
    others = [o for o in imports if o.domain not in ("", "ai.onnx")]
    del imports[:]
    imports.extend([onnx.helper.make_opsetid("", version), *others])


def _upgrade(graph: onnx.GraphProto | onnx.FunctionProto, opset: int, weights: Mapping[str, np.ndarray]) -> None:
    if opset >= UNIFORM:
        return
    small = {n.output[0]: a.t for n in graph.node if n.op_type == "Constant" for a in n.attribute if a.HasField("t")}

    def values(name: str) -> np.ndarray | None:
        if name in weights:
            decide_by(name)
            return weights[name]
        return onnx.numpy_helper.to_array(small[name]) if name in small else None

    taken = {name for n in graph.node for name in (*n.input, *n.output)} | set(weights)
    nodes = upgrade_nodes(graph.node, opset, Scope(values, taken))
    del graph.node[:]
    graph.node.extend(nodes)


def _widen(graph: onnx.GraphProto, weights: Container[str]) -> None:
    """float32 in place of bf16 everywhere inside; the model's own inputs and outputs keep their type behind a Cast."""
    inputs = [v.name for v in graph.input if v.name not in weights and v.type.tensor_type.elem_type == BF16]
    outputs = [v.name for v in graph.output if v.type.tensor_type.elem_type == BF16]
    _widen_nodes(graph)
    wide = {name: f"{name}/float32" for name in (*inputs, *outputs)}
    for node in graph.node:
        rename_inputs(node, wide)
        node.output[:] = [wide.get(y, y) for y in node.output]
    before = [onnx.helper.make_node("Cast", [x], [wide[x]], wide[x], to=onnx.TensorProto.FLOAT) for x in inputs]
    after = [onnx.helper.make_node("Cast", [wide[y]], [y], f"{y}/bfloat16", to=BF16) for y in outputs]
    nodes = [*before, *graph.node, *after]
    del graph.node[:]
    graph.node.extend(nodes)


def _widen_nodes(graph: onnx.GraphProto) -> None:
    for value in graph.value_info:
        if value.type.tensor_type.elem_type == BF16:
            value.type.tensor_type.elem_type = onnx.TensorProto.FLOAT
    for node in graph.node:
        for attribute in node.attribute:
            if attribute.name in ("to", "dtype") and attribute.i == BF16:
                attribute.i = onnx.TensorProto.FLOAT
            elif attribute.name == "value" and attribute.t.data_type == BF16:
                attribute.t.CopyFrom(onnx.numpy_helper.from_array(widened(onnx.numpy_helper.to_array(attribute.t))))
        for inner in subgraphs(node):
            _widen_nodes(inner)


# --- Shapes ----------------------------------------------------------------------------------------------------------


def _bind(graph: onnx.GraphProto, weights: set[str], shapes: Mapping[str, tuple[int, ...]], found: Findings | None) -> list[str]:
    """Gives the model's inputs the shapes that the user says; all are static afterwards. Gives the names of those left out."""
    _drop_inputs(graph, weights)
    names = [v.name for v in graph.input]
    for name in shapes:
        if name not in names:
            raise UsageError(f"the model has no input {name!r}; its inputs are {', '.join(map(repr, names)) or 'none'}")
    symbols: dict[str, int] = {}  # an extent that is called the same in two inputs is the same
    left_out = []
    for value in sorted(graph.input, key=lambda v: v.name not in shapes):
        bound = partial(_bind_input, value, shapes.get(value.name), symbols)
        if found is None:
            bound()
            continue
        issue = Issue(value.name, "Input", (), "", "", outputs=(value.name,))
        try:
            refused = found.catch(bound, issue, f"the input {value.name!r}")
        except OpenShape as error:
            found.issues.append(replace(issue, reason=f"it {error.reason}", way_out=error.way_out, open=True))
            refused = error.example is None
            if error.example is not None:
                _bind_input(value, error.example, symbols)
        if refused:
            left_out.append(value.name)
    _drop_inputs(graph, left_out)
    return left_out


class OpenShape(UsageError):
    """An input whose shape the model leaves open and nobody has given.

    example  a shape that it may well have, by which the rest of the model can be looked at; None if its rank is open too
    """

    def __init__(self, reason: str, way_out: str, name: str, example: tuple[int, ...] | None = None) -> None:
        super().__init__(f"the input {name!r} {reason}: {way_out}")
        self.reason, self.way_out, self.example = reason, way_out, example


CALLED = (
    (r"batch|^[nb]$|num_?(images|samples)", 1), (r"seq|len|token|context|past|position", 128), (r"chan|^c$|rgb", 3), (r"head", 8),
    (r"height|width|^[hw]$|size|spatial|^[xy]$", 224), (r"time|frame|audio|sample", 400), (r"depth|^d$", 16),
)  # fmt: skip
"""How large what is called so may well be."""

BY_RANK = {2: (1, 128), 3: (1, 128, 128), 4: (1, 3, 224, 224), 5: (1, 3, 16, 112, 112)}
"""The same, of extents whose names say nothing: rows of numbers, sequences, images, films."""


def plausible(said: Sequence[int | str]) -> tuple[int, ...]:
    """A shape that an input may well have: its fixed extents, and examples for those that are open."""

    def example(axis: int, called: str) -> int:
        for pattern, extent in CALLED:
            if re.search(pattern, called.lower()):
                return extent
        return 1 if axis == 0 else BY_RANK.get(len(said), (64,) * len(said))[axis]

    channels_last = len(said) == 4 and said[3] in (1, 3, 4)
    out = [d if isinstance(d, int) else example(axis, d) for axis, d in enumerate(said)]
    if channels_last and isinstance(said[1], str):
        out[1] = max(out[1], out[2] if isinstance(said[2], int) else 224)
    return tuple(out)


KINDS = {
    "map_type": "a map", "optional_type": "an optional value", "sequence_type": "a sequence",
    "sparse_tensor_type": "a sparse tensor",
}  # fmt: skip
"""What values are that are no tensors."""


def _bind_input(value: onnx.ValueInfoProto, shape: tuple[int, ...] | None, symbols: dict[str, int]) -> None:
    name, kind = value.name, value.type.WhichOneof("value")
    if kind != "tensor_type":
        what = KINDS.get(kind, "a value without a type")
        raise UnsupportedError(f"the input {name!r} is {what}; only tensors can be compiled")
    tensor = value.type.tensor_type
    if tensor.elem_type == onnx.TensorProto.STRING:
        raise UnsupportedError(f"the input {name!r} holds strings; only numbers and booleans can be compiled")
    if not tensor.HasField("shape"):
        if shape is None:
            example = shlex.quote(f"{name}=1x3x224x224")
            raise OpenShape("has no shape", f"give it with --shape {example} (its own extents)", name)
        tensor.shape.SetInParent()
        tensor.shape.dim.extend(onnx.TensorShapeProto.Dimension() for _ in shape)
    dims = tensor.shape.dim
    said = [d.dim_value if d.WhichOneof("value") == "dim_value" and d.dim_value >= 0 else d.dim_param or "?" for d in dims]
    text = "x".join(map(str, said))
    if shape is None:
        said = [symbols.get(d, d) if isinstance(d, str) else d for d in said]
        bound = tuple(d for d in said if isinstance(d, int))
        if len(bound) == len(said):
            shape = bound
    if shape is None:
        likely = plausible(said)
        asked = shlex.quote(f"{name}={'x'.join(map(str, likely))}")
        at = next(i for i, d in enumerate(said) if not isinstance(d, int))
        some = f"1..{max(2 * likely[at], 8)}"
        of_input = "x".join([*map(str, likely[:at]), some, *map(str, likely[at + 1 :])])
        between = shlex.quote(f"{name}={of_input}" if said[at] == "?" else f"{said[at]}={some}")
        free = ", ".join(repr(d) for d in said if not isinstance(d, int))
        way_out = f"say what it is, as in --shape {asked}, or between what, as in --range {between}"
        raise OpenShape(f"is {text}, and {free} can be anything", way_out, name, likely)
    if len(shape) != len(said):
        raise UsageError(f"--shape {name}={'x'.join(map(str, shape))} has {len(shape)} extents; the input is {text}")
    dtype = _guard(f"the input {name!r} is of no known type", onnx.helper.tensor_dtype_to_np_dtype, tensor.elem_type)
    if max(shape, default=0) >= MAX_EXTENT or math.prod(shape) * dtype.itemsize > MAX_BYTES:
        asked = "x".join(map(str, shape))
        raise UnsupportedError(f"the input {name!r} is {asked}; extents below 2^31 and at most 2^40 bytes are supported")
    for dim, extent, fixed in zip(dims, shape, said, strict=True):
        if extent < 0 or (isinstance(fixed, int) and fixed != extent):
            raise UsageError(f"--shape {name}={'x'.join(map(str, shape))} does not fit: the input is {text}")
        if isinstance(fixed, str) and fixed != "?" and symbols.setdefault(fixed, extent) != extent:
            raise UsageError(f"{fixed!r} is {symbols[fixed]} in one input and {extent} in {name!r}: it is one extent")
        dim.dim_value = extent


# --- gs.Graph --------------------------------------------------------------------------------------------------------


def _import(
    proto: onnx.ModelProto, types: Mapping[str, Type], constants: Mapping[str, Weight], told: set[str] | None
) -> gs.Graph:
    inputs = {v.name for v in proto.graph.input}
    known = {name: t.proto for name, t in types.items() if name not in inputs}
    known |= {
        c.name: onnx.helper.make_tensor_type_proto(onnx.helper.np_dtype_to_tensor_dtype(c.dtype), c.shape)
        for c in constants.values()
    }
    proto.graph.value_info.extend(onnx.helper.make_value_info(name, t) for name, t in known.items())
    for value in proto.graph.output:
        if (made := known.get(value.name)) is not None:
            _hold_to(value, made, told)
            value.type.CopyFrom(made)
    with G_LOGGER.suppress():  # it prints warnings where results go
        graph = _guard("the model cannot be imported", gs.import_onnx, proto)
    for name, tensor in graph.tensors().items():
        if name in constants:
            tensor.to_constant(held(constants[name]))
            tensor.__class__, tensor.recipe = Weight, constants[name].recipe
    return graph


_PLAIN = {e for e in onnx.TensorProto.DataType.values() if e and onnx.helper.tensor_dtype_to_np_dtype(e).kind in "biuf"}


def _hold_to(value: onnx.ValueInfoProto, made: onnx.TypeProto, told: set[str] | None) -> None:
    """What the model says of an output beside what its nodes make of it, as ONNX Runtime holds it: another type is an error.

    Another shape is the model's word against its nodes', which compute what they do: a warning, unless it was told; None if
    nobody is to be told.
    """
    said, found = value.type.tensor_type, made.tensor_type
    name_of = onnx.TensorProto.DataType.Name
    if said.elem_type in _PLAIN and said.elem_type != found.elem_type:  # others have been widened
        kinds = [name_of(e).lower() for e in (said.elem_type, found.elem_type)]
        raise ModelError(
            f"the model says that its output {value.name!r} is {kinds[0]}, and its nodes make it {kinds[1]}: correct it"
        )
    extents = [d.dim_value for d in found.shape.dim]
    fixed = [d.dim_value if d.WhichOneof("value") == "dim_value" else None for d in said.shape.dim]
    differs = len(fixed) != len(extents) or any(n not in (None, m) for n, m in zip(fixed, extents, strict=True))
    if said.HasField("shape") and differs and told is not None and value.name not in told:
        told.add(value.name)
        shapes = ["x".join("?" if n is None else str(n) for n in shape) or "a scalar" for shape in (fixed, extents)]
        warnings.warn(
            f"the model says that its output {value.name!r} is {shapes[0]}, and its nodes make it {shapes[1]}, which it will be",
            RuntimeWarning,
            stacklevel=2,
        )
