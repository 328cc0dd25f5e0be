"""How often a loop goes round whose condition counts: as exporters of TensorFlow write recurrences, with M beside a counter."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx
import onnx.helper
import onnx.numpy_helper
import onnx.reference

from tccompile.load.constants import Weight, held
from tccompile.load.nodes import first_line

log = logging.getLogger(__name__)

COUNTING = {
    "Abs", "Add", "And", "Cast", "Constant", "Div", "Equal", "Greater", "GreaterOrEqual", "Identity", "Less", "LessOrEqual",
    "Max", "Min", "Mod", "Mul", "Neg", "Not", "Or", "Reshape", "Squeeze", "Sub", "Unsqueeze", "Where", "Xor",
}  # fmt: skip
"""Operators that a condition is computed by: each makes one number of others, the same each time."""

MOST = 2**14
"""Turns that are counted."""


def turns(
    body: onnx.GraphProto, most: int | None, first: Sequence[np.ndarray | None], around: Mapping[str, Weight],
    opsets: Sequence[onnx.OperatorSetIdProto],
) -> int | None:  # fmt: skip
    """How often a loop goes round whose condition is true at first: None if the data decide it, or if it takes more than MOST.

    most    at most so often
    first   of what is carried, the numbers at first; None for those that are not known, or several
    around  constants that the body may read
    """
    nodes = _computing(body, {v.name: i for i, v in enumerate(body.input)}, first, around)
    if nodes is None:
        return None
    try:
        return _counted(body, nodes, MOST + 1 if most is None else most, first, around, opsets)
    except Exception as e:
        log.debug("the iterations of %s are not counted: %s", body.name, first_line(e))
        return None


def _counted(
    body: onnx.GraphProto, nodes: Sequence[onnx.NodeProto], most: int, first: Sequence[np.ndarray | None],
    around: Mapping[str, Weight], opsets: Sequence[onnx.OperatorSetIdProto],
) -> int | None:  # fmt: skip
    """As `turns`, of a condition that these nodes compute, by running them."""
    carried, needed = [v.name for v in body.input[2:]], {name for node in nodes for name in node.input}
    kept = [i for i, name in enumerate(carried) if name in {*needed, body.output[0].name}]
    results = [body.output[0].name, *(body.output[1 + i].name for i in kept)]
    needed.update(results)
    inputs = [body.input[0].name, *(carried[i] for i in kept)]
    known = [onnx.numpy_helper.from_array(np.array(held(around[name])), name) for name in needed if name in around]
    known += [t for t in body.initializer if t.name in needed]
    empty = onnx.helper.make_empty_tensor_value_info
    graph = onnx.helper.make_graph(nodes, "turns", [*map(empty, inputs)], [*map(empty, dict.fromkeys(results))], known)
    run = onnx.reference.ReferenceEvaluator(onnx.helper.make_model(graph, opset_imports=opsets))
    values: list[np.ndarray | None] = [first[i] for i in kept]
    for turn in range(min(most, MOST)):
        with np.errstate(all="ignore"):
            made: Any = run.run(results, dict(zip(inputs, [np.array(turn), *values], strict=True)))
        values = list(made[1:])
        if not np.asarray(made[0]).all():
            return turn + 1
    return most if most <= MOST else None


def _computing(
    body: onnx.GraphProto, inputs: Mapping[str, int], first: Sequence[np.ndarray | None], around: Mapping[str, Weight]
) -> list[onnx.NodeProto] | None:
    """The nodes that the condition is computed by, and what is carried to it; None if anything else decides it."""
    writers = {y: node for node in body.node for y in node.output if y}
    own = {t.name: t for t in body.initializer}
    rest, seen, found = [body.output[0].name], set[str](), set[int]()
    while rest:
        name = rest.pop()
        if name in seen:
            continue
        seen.add(name)
        if (place := inputs.get(name)) is not None:
            if place == 1 or (place > 1 and first[place - 2] is None):
                return None
            rest += [body.output[place - 1].name] if place > 1 else []
        elif (node := writers.get(name)) is not None:
            if node.domain not in ("", "ai.onnx") or node.op_type not in COUNTING or not all(map(_is_one, node.attribute)):
                return None
            found.add(id(node))
            rest += [x for x in node.input if x]
        elif not _is_number(own.get(name), around.get(name)):
            return None
    return [node for node in body.node if id(node) in found]


def _is_one(attribute: onnx.AttributeProto) -> bool:
    return math.prod(attribute.t.dims) <= 1 and len(attribute.ints) + len(attribute.floats) <= 1


def _is_number(own: onnx.TensorProto | None, around: Weight | None) -> bool:
    """Whether a name is a constant of one element, or of none as the shape of a scalar."""
    if own is not None:
        return math.prod(own.dims) <= 1
    return around is not None and held(around).size <= 1
