"""The cases of `onnx.backend.test` for single nodes, as the compiler's front half can take them."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import onnx
from onnx import numpy_helper

from tccompile.ops import CONVERTERS

OPSET = 23

PARAMETERS: dict[str, tuple[int, ...]] = {
    "Reshape": (1,),
    "Squeeze": (1,),
    "Unsqueeze": (1,),
    "Slice": (1, 2, 3, 4),
    "Split": (1,),
    "Expand": (1,),
    "Tile": (1,),
    "Pad": (1, 2, 3),
    "Resize": (1, 2, 3),
    "Trilu": (1,),
    "ConvTranspose": (1, 2),
    **{op: (1,) for op in CONVERTERS if op.startswith("Reduce")},
}
"""Inputs that a compiled model must have as constants: they say what the result's shape is, or which elements go where."""


@dataclass(frozen=True)
class Case:
    """A model of one node, or of the few that a function is made of, with its inputs and what should come out."""

    name: str
    model: onnx.ModelProto
    feeds: dict[str, np.ndarray]
    expected: dict[str, np.ndarray]


def cases() -> Iterator[Case]:
    """The cases of ops with a converter, at the opset of `load`, with PARAMETERS turned into initializers."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from onnx.backend.test.case.node import collect_testcases

        collected = collect_testcases(None)
    for case in collected:
        model = case.model
        ops = {n.op_type for n in model.graph.node}
        if not ops <= set(CONVERTERS) or any(n.domain not in ("", "ai.onnx") for n in model.graph.node):
            continue
        if any(not onnx.defs.has(op) or onnx.defs.get_schema(op).since_version > OPSET for op in ops):
            continue
        adapted = onnx.ModelProto()
        adapted.CopyFrom(model)
        adapted.ir_version = 10
        for opset in adapted.opset_import:
            opset.version = min(max(opset.version, 7), OPSET)  # the oldest and newest that `load` takes
        for number, (inputs, outputs) in enumerate(case.data_sets):
            feeds = {v.name: _array(x) for v, x in zip(model.graph.input, inputs, strict=False)}
            expected = {v.name: _array(x) for v, x in zip(model.graph.output, outputs, strict=False)}
            if all(isinstance(x, np.ndarray) for x in (*feeds.values(), *expected.values())):
                yield Case(case.name + (f"#{number}" if number else ""), *_with_constants(adapted, feeds), expected)


def _array(x: object) -> object:
    return numpy_helper.to_array(x) if isinstance(x, onnx.TensorProto) else x


def _with_constants(model: onnx.ModelProto, feeds: dict[str, np.ndarray]) -> tuple[onnx.ModelProto, dict[str, np.ndarray]]:
    """The model with PARAMETERS among its inputs as initializers, and the inputs that are left."""
    fixed = {n.input[i] for n in model.graph.node for i in PARAMETERS.get(n.op_type, ()) if i < len(n.input) and n.input[i]}
    out = onnx.ModelProto()
    out.CopyFrom(model)
    for value in [v for v in out.graph.input if v.name in fixed]:
        out.graph.input.remove(value)
        out.graph.initializer.append(numpy_helper.from_array(feeds[value.name], value.name))
    return out, {k: v for k, v in feeds.items() if k not in fixed}
