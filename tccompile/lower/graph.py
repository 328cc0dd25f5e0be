"""From a graph of standard ONNX ops to the typed Program: one converter an ONNX op, in `ops/`.

Needs: one opset, static shapes, constants folded. Guarantees: what `verify` checks; floats are F32 (the precision
stage chooses fp16 later), images NHWC, the innermost axis padded as `tensor.dense` does (by format: later too).
"""

from __future__ import annotations

from dataclasses import replace

import onnx_graphsurgeon as gs

from tccompile.custom.files import added
from tccompile.errors import ModelError, PlanError, blamed_on
from tccompile.ir.branches import in_order
from tccompile.ir.expr import identity_view
from tccompile.ir.limits import check_program
from tccompile.ir.program import Program
from tccompile.ir.tensor import dense
from tccompile.load.fold import RANDOM
from tccompile.load.issues import Issue, Refusal
from tccompile.load.sizes import OWN
from tccompile.lower.builder import Builder, shape_of
from tccompile.lower.custom import custom
from tccompile.lower.registry import CLASSICAL, CONVERTERS, COUNTED
from tccompile.rewrites.rule import name_of

SIZED_BY_VALUES = {
    "Unique": "how many elements differ is known only when the model runs",
}
"""Operators whose results have no static shape, unless they fold."""


def lower(graph: gs.Graph) -> Program:
    """The Program that a graph stands for.

    Raises UnsupportedError for the first node that no converter handles, naming the node, the rule, the value and the way out.
    """
    b = Builder(graph)
    for t in graph.inputs:
        _model_input(t, b)
    for node in graph.nodes:
        _convert(node, b)
    outputs = []
    for t in graph.outputs:
        _model_output(t, b)
        outputs.append(t.name)
    outputs += [count.tensor for count in b.counts]
    return in_order(Program(tuple(b.inputs), tuple(outputs), b.tensors, b.constants, tuple(b.ops), counts=tuple(b.counts)))


def check_together(program: Program) -> None:
    """Raises ModelError for nodes that are right one by one, but not together."""
    try:
        check_program(program)
    except PlanError as error:
        raise ModelError(f"the model contradicts itself: {error}") from error


def unsupported(graph: gs.Graph) -> list[Issue]:
    """All inputs, nodes and outputs that cannot be lowered, each with the reason and the way out; none if the graph can be."""
    b, issues = Builder(graph), []
    for t in graph.inputs:
        try:
            _model_input(t, b)
        except Refusal as e:
            issues.append(e.issue)
    for node in graph.nodes:
        masked = any(t.name and not isinstance(t, gs.Constant) and not b.known(t) for t in node.inputs)
        if masked and not missing(node.op, node.domain):
            continue  # an earlier refusal is the cause
        try:
            _convert(node, b)
        except Refusal as e:
            issues.append(e.issue)
            _assume(node, b)
        except ModelError as e:
            reason = str(e).removeprefix(_called(node)).strip()
            issues.append(replace(b.refuse(reason, "").issue, invalid=True))
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
    if why := missing(node.op, node.domain):
        raise b.refuse(*why)
    with blamed_on(_called(node)):
        if (operator := added().find(node.domain, node.op)) is not None:
            custom(operator, node, b)
        else:
            BY_DOMAIN[node.domain][node.op](node, b)


def _called(node: gs.Node) -> str:
    return f"node {name_of(node)!r} ({node.op})"


BY_DOMAIN = {None: CONVERTERS, "": CONVERTERS, "ai.onnx": CONVERTERS, "ai.onnx.ml": CLASSICAL, OWN: COUNTED}


def missing(op: str, domain: str | None) -> tuple[str, str] | None:
    """Why there is no converter for an operator, and the way out; None if there is one."""
    if op in BY_DOMAIN.get(domain, {}) or added().find(domain, op) is not None:
        return None
    if domain not in (None, "", "ai.onnx"):
        way_out = "say what it is in Python, --ops FILE.py, replace it by supported ops, or split the model there"
        return f"the op {op} of domain {domain} is not supported", way_out
    if op in RANDOM:
        return "it draws values at random", "draw them in the application: make them an input of the model"
    if op in SIZED_BY_VALUES:
        return SIZED_BY_VALUES[op], "end the model before it, and compute the rest in the application"
    return f"the op {op} is not supported", "replace it by supported ops, or split the model there"


def _model_input(t: gs.Tensor, b: Builder) -> None:
    b.node = gs.Node("Input", name=t.name, outputs=[gs.Variable(t.name)])
    b.model_input(t)


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
