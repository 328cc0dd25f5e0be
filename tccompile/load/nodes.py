"""What nodes hold and read: constants, the graphs inside them, names."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping

import numpy as np
import onnx
import onnx.helper
import onnx.numpy_helper

from tccompile.errors import ModelError, UnsupportedError
from tccompile.load.constants import Weight, literal
from tccompile.load.valid import invalid, title

LARGE = 2**26  # bytes from which a folded constant must not be much larger than what it is made of
SPARSE = 2**10  # how often a large sparse constant may be what its values take


def first_line(error: Exception) -> str:
    """What another library says about a failure, in one line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__


def subgraphs(node: onnx.NodeProto) -> Iterable[onnx.GraphProto]:
    for attribute in node.attribute:
        if attribute.HasField("g"):
            yield attribute.g
        yield from attribute.graphs


def all_nodes(nodes: Iterable[onnx.NodeProto]) -> Iterator[onnx.NodeProto]:
    """These and those of the graphs inside them."""
    for node in nodes:
        yield node
        for graph in subgraphs(node):
            yield from all_nodes(graph.node)


def new_name(like: str, taken: set[str]) -> str:
    """A name that is not taken yet, and is now: the same on every run."""
    n, name = 0, like
    while name in taken:
        n, name = n + 1, f"{like}_{n + 1}"
    taken.add(name)
    return name


def reads(node: onnx.NodeProto) -> list[str]:
    """The names a node reads, those that graphs inside it take from around it included."""
    names = list(node.input)
    for graph in subgraphs(node):
        inside = {v.name for v in graph.input} | {t.name for t in graph.initializer}
        for inner in graph.node:
            names += [name for name in reads(inner) if name not in inside]
            inside.update(inner.output)
        names += [v.name for v in graph.output if v.name not in inside]
    return list(dict.fromkeys(names))


def rename_inputs(node: onnx.NodeProto, names: Mapping[str, str]) -> None:
    for i, name in enumerate(node.input):
        if name in names:
            node.input[i] = names[name]
    for graph in subgraphs(node):
        own = {v.name for v in (*graph.input, *graph.initializer)} | {y for inner in graph.node for y in inner.output}
        outer = {old: new for old, new in names.items() if old not in own}
        for inner in graph.node:
            rename_inputs(inner, outer)
        for value in graph.output:
            value.name = outer.get(value.name, value.name)


def tensor_values(tensor: onnx.TensorProto, where: str) -> np.ndarray:
    try:
        return widened(onnx.numpy_helper.to_array(tensor))
    except Exception as e:
        raise ModelError(f"{where}: the constant in it is broken: {first_line(e)}") from e


def widened(values: np.ndarray) -> np.ndarray:
    """Values in a type that NumPy has: bf16, fp8 and fp4 as float32, int4 as int8."""
    if values.dtype.isbuiltin == 1:  # ml_dtypes calls some of its types floats, as NumPy's own
        return values
    return values.astype(
        {"int4": np.int8, "int2": np.int8, "uint4": np.uint8, "uint2": np.uint8}.get(values.dtype.name, np.float32)
    )


def constant_node(node: onnx.NodeProto) -> Weight:
    if len(node.attribute) != 1:
        raise invalid(node, f"it has {len(node.attribute)} values; it must have one")
    (attribute,) = node.attribute
    value = onnx.helper.get_attribute_value(attribute)
    match attribute.name:
        case "value":
            if value.data_type == onnx.TensorProto.STRING:
                raise UnsupportedError(
                    f"the constant {node.output[0]!r} holds strings; only numbers and booleans can be compiled"
                )
            return literal("", tensor_values(value, title(node)))
        case "value_float" | "value_floats":
            return literal("", value, np.float32)
        case "value_int" | "value_ints":
            return literal("", value, np.int64)
        case "sparse_value":
            return literal("", dense_values(value))
    raise UnsupportedError(f"the constant {node.output[0]!r} holds strings; only numbers and booleans can be compiled")


def dense_values(sparse: onnx.SparseTensorProto) -> np.ndarray:
    """The values of a sparse tensor, zeros filled in."""
    values, indices = widened(onnx.numpy_helper.to_array(sparse.values)), onnx.numpy_helper.to_array(sparse.indices)
    if math.prod(sparse.dims) * values.itemsize > max(LARGE, SPARSE * values.nbytes):
        shape = "×".join(map(str, sparse.dims))
        raise UnsupportedError(
            f"the sparse constant {sparse.values.name!r} of {shape} holds {values.size} values, too few to fill "
            "zeros in; store it densely"
        )
    out = np.zeros(tuple(sparse.dims), values.dtype)
    if indices.ndim == 1:
        out.reshape(-1)[indices] = values
    else:
        out[tuple(indices.T)] = values
    return out
