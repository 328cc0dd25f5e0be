"""Equations on standard ONNX ops, applied until none fits any more: the graph stays legal ONNX at every step."""

from __future__ import annotations

import logging

import onnx_graphsurgeon as gs

from tccompile.errors import blamed_on
from tccompile.rewrites import (
    activations,
    attention,
    batch_norm,
    conv_transpose,
    einsum,
    float8,
    gemm,
    lanes,
    movement,
    normalization,
    pad,
    parts,
    pixel_shuffle,
    quantized,
    rotary,
    scale_shift,
    transposes,
    upsample,
)
from tccompile.rewrites.own import apply_own
from tccompile.rewrites.rule import Applied, Editor, Rewrite, name_of

log = logging.getLogger(__name__)

REWRITES: tuple[Rewrite, ...] = (
    *quantized.REWRITES,
    *movement.REWRITES,
    *pixel_shuffle.REWRITES,
    *transposes.REWRITES,
    *activations.REWRITES,
    *normalization.REWRITES,
    *batch_norm.REWRITES,
    *attention.REWRITES,
    *float8.ATTENTION,
    *rotary.REWRITES,
    *einsum.REWRITES,
    *gemm.REWRITES,
    *scale_shift.REWRITES,
    *pad.REWRITES,
    *upsample.REWRITES,
    *conv_transpose.REWRITES,
    *parts.REWRITES,
)
"""In the order in which they are tried at a node."""

LATE: tuple[Rewrite, ...] = (*upsample.REWRITES, *conv_transpose.REWRITES, *parts.REWRITES)
"""Those that wait until no other applies: scales and shifts find their way into a convolution before it is split, and what
is many nodes of the model becomes one before parts are taken ahead of it."""


def rewrite(graph: gs.Graph, applied: Applied | None = None) -> gs.Graph:
    """The graph after all rewrites, in topological order, without unused nodes. Changes `graph` itself.

    applied  gets what was applied where

    Each application makes the graph smaller or moves it towards a normal form, so there is an end; why one does not apply is
    logged at level DEBUG.
    """
    edit = Editor(graph)
    apply_own(edit)
    of_integers = (*conv_transpose.PRODUCTS, *quantized.PRODUCTS, *float8.REWRITES)
    to_fixpoint(edit, of_integers)  # while weights are integers, and scales where they were
    tidy(graph)
    to_fixpoint(edit, lanes.REWRITES)  # early: what was a loop is many nodes
    to_fixpoint(edit, tuple(r for r in REWRITES if r not in LATE))
    to_fixpoint(edit, REWRITES)
    if applied is not None:
        for equation, names in edit.applied.items():
            applied.setdefault(equation, {}).update(names)
    return graph


def to_fixpoint(edit: Editor, rewrites: tuple[Rewrite, ...]) -> None:
    """Apply the rewrites to the graph, the first that applies to each node, until none does."""
    by_op: dict[str, list[Rewrite]] = {}
    for entry in rewrites:
        for op in entry.ops:
            by_op.setdefault(op, []).append(entry)
    changed = True
    while changed:
        changed = False
        for node in list(edit.graph.nodes):
            entries = by_op.get(node.op, ())
            if entries and node.outputs and node.domain in (None, "", "ai.onnx"):
                with blamed_on(f"node {name_of(node)!r} ({node.op})"):
                    changed |= any(_applied(edit, entry, node) for entry in entries if node.outputs)
        if changed:
            tidy(edit.graph)


def _applied(edit: Editor, entry: Rewrite, node: gs.Node) -> bool:
    found = entry.match(node)
    if found is None:
        return False
    why_not, name = entry.check(edit, found), name_of(node)
    log.debug("%s at %s: %s", entry.equation, name, why_not or "applied")
    if why_not is None:
        entry.apply(edit, found)
        edit.note(entry.equation, name)
    return why_not is None


def tidy(graph: gs.Graph) -> None:
    """Nodes in topological order, as near to their old order as it allows, and only those that the outputs need."""
    order: list[gs.Node] = []
    own, done = {id(n) for n in graph.nodes}, set[int]()  # nodes of graphs inside nodes are not moved out
    wanted = {id(n) for t in graph.outputs for n in t.inputs}
    stack = [n for n in reversed(graph.nodes) if id(n) in wanted]
    while stack:
        node = stack[-1]
        todo = [n for t in _reads(node) for n in t.inputs if id(n) in own and id(n) not in done]
        if id(node) in done:
            todo = []
        if todo:
            stack += reversed(todo)
        else:
            stack.pop()
            if id(node) not in done:
                done.add(id(node))
                order.append(node)
    for node in graph.nodes:
        if id(node) not in done:
            node.inputs.clear()
            node.outputs.clear()
    graph.nodes = order


def _reads(node: gs.Node) -> list[gs.Tensor]:
    inner = [t for graph in node.subgraphs() for n in graph.nodes for t in (*n.inputs, *graph.outputs)]
    return [*node.inputs, *inner]
