"""A model of bf16 or float64 as one of float32, for ONNX Runtime, which on CPUs has few of its operators in these types.

What it computes is what plans are compared with, and that is in fp32 anyhow.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np
import onnx
from onnx import TensorProto, numpy_helper

from tccompile.load.nodes import widened

OTHER = (TensorProto.BFLOAT16, TensorProto.DOUBLE)


def in_float32(model: onnx.ModelProto, weights: Mapping[str, np.ndarray]) -> onnx.ModelProto | None:
    """The model with float32 in the place of bf16 and float64; None if it has neither.

    weights  its initializers by name, as those that lie in other files are not in the model
    """
    made, changed = onnx.ModelProto(), False
    made.CopyFrom(model)
    nodes = [node for function in made.functions for node in function.node]
    for graph in _graphs(made.graph):
        nodes += graph.node
        for value in (*graph.input, *graph.output, *graph.value_info):
            if value.type.tensor_type.elem_type in OTHER:
                value.type.tensor_type.elem_type, changed = TensorProto.FLOAT, True
        for tensor in graph.initializer:
            changed |= _widen(tensor, weights.get(tensor.name))
    for attribute in (a for node in nodes for a in node.attribute):
        if attribute.name in ("to", "dtype", "output_dtype") and attribute.i in OTHER:
            attribute.i, changed = TensorProto.FLOAT, True
        if attribute.HasField("t"):
            changed |= _widen(attribute.t, None)
    return made if changed else None


def _graphs(graph: onnx.GraphProto) -> Iterator[onnx.GraphProto]:
    yield graph
    for attribute in (a for node in graph.node for a in node.attribute):
        for inner in (*((attribute.g,) if attribute.HasField("g") else ()), *attribute.graphs):
            yield from _graphs(inner)


def _widen(tensor: onnx.TensorProto, values: np.ndarray | None) -> bool:
    """Make the tensor one of float32 if it is one of another type; whether it was."""
    if tensor.data_type not in OTHER:
        return False
    values = widened(numpy_helper.to_array(tensor)) if values is None else values
    tensor.CopyFrom(numpy_helper.from_array(values.astype(np.float32), tensor.name))
    return True
