"""From a graph of standard ONNX ops to the typed Program: one converter an ONNX op, in `ops/`.

Needs: one opset, static shapes, constants folded. Guarantees: what `program.verify` checks; floats are F32 (the precision
stage chooses fp16 later), images NHWC, the innermost axis padded to a multiple of `program.PAD` elements.
"""

from __future__ import annotations

import onnx_graphsurgeon as gs

from tccompile.errors import blamed_on
from tccompile.expr import identity_view
from tccompile.fold import RANDOM
from tccompile.ops import CONVERTERS
from tccompile.ops.builder import Builder, Issue, Refusal, shape_of
from tccompile.program import Program, dense
from tccompile.rewrites.rule import name_of


def lower(graph: gs.Graph) -> Program:
    """The Program that a graph stands for.

    Raises UnsupportedError for the first node that no converter handles, naming the node, the rule, the value and the way out.
    """
    b = Builder(graph)
    for t in graph.inputs:
        b.model_input(t)
    for node in graph.nodes:
        _convert(node, b)
    outputs = []
    for t in graph.outputs:
        _model_output(t, b)
        outputs.append(t.name)
    return Program(tuple(b.inputs), tuple(outputs), b.tensors, b.constants, tuple(b.ops))


def unsupported(graph: gs.Graph) -> list[Issue]:
    """All inputs, nodes and outputs that cannot be lowered, each with the reason and the way out; none if the graph can be."""
    b, issues = Builder(graph), []
    for t in graph.inputs:
        try:
            b.model_input(t)
        except Refusal as e:
            issues.append(e.issue)
    for node in graph.nodes:
        if any(t.name and not isinstance(t, gs.Constant) and not b.known(t) for t in node.inputs):
            continue  # an earlier refusal is the cause
        try:
            _convert(node, b)
        except Refusal as e:
            issues.append(e.issue)
            _assume(node, b)
    for t in graph.outputs:
        if not isinstance(t, gs.Constant) and not b.known(t):
            continue
        try:
            _model_output(t, b)
        except Refusal as e:
            issues.append(e.issue)
    return issues


def _convert(node: gs.Node, b: Builder) -> None:
    b.node = node
    converter = CONVERTERS.get(node.op) if node.domain in (None, "", "ai.onnx") else None
    if node.op in RANDOM:
        raise b.refuse("it draws values at random", "draw them in the application: make them an input of the model")
    if converter is None:
        domain = f" of domain {node.domain}" if node.domain else ""
        raise b.refuse(f"the op {node.op}{domain} is not supported", "replace it by supported ops, or split the model there")
    with blamed_on(f"node {name_of(node)!r} ({node.op})"):
        converter(node, b)


def _assume(node: gs.Node, b: Builder) -> None:
    """Give the outputs of a refused node some tensors, so that the nodes after it can be judged."""
    for t in node.outputs:
        if t.name and t.shape is not None:
            try:
                b.result(t)
            except Refusal:
                continue


def _model_output(t: gs.Tensor, b: Builder) -> None:
    """Copy the value of an output into the tensor that the user sees, in the model's own type and row-major."""
    b.node = t.inputs[0] if t.inputs else gs.Node("Output", name=t.name)
    if t.name in b.inputs:
        raise b.refuse(f"the output {t.name} is an input of the model", "remove the output: it is what was given")
    x = b.value(t)
    y = b.add(dense(t.name, shape_of(t), b.io_dtype(t), pad=1))
    b.copy(identity_view(x.name, x.rank), y)
