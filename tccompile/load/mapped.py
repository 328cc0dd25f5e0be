"""A Scan that computes the same of each row, and passes nothing on, as the nodes of its body with one more axis in front.

Distances between samples are exported so, by a turn for each of the samples that a model was trained with.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import onnx
import onnx.helper
from onnx.numpy_helper import from_array

ELEMENTWISE = {"Abs", "Add", "Div", "Exp", "Max", "Min", "Mul", "Neg", "Pow", "Sqrt", "Sub"}
REDUCTIONS = {"ReduceL1", "ReduceL2", "ReduceMax", "ReduceMean", "ReduceMin", "ReduceSum", "ReduceSumSquare"}


def mapped(
    body: Sequence[onnx.NodeProto], rows: Mapping[str, int], others: Mapping[str, int], axes: Mapping[str, Sequence[int]]
) -> tuple[list[onnx.NodeProto], dict[str, str]] | None:
    """The nodes of a body for all rows at once, and what its Identities are other names of; None if it has any other nodes.

    rows    the tensors that have an axis of rows in front, by their rank without it; others: those that are the same in each turn
    axes    the values of integer constants
    """
    rank, same, nodes = dict(rows), dict[str, str](), list[onnx.NodeProto]()

    def constant(values: Sequence[int], name: str) -> str:
        nodes.append(onnx.helper.make_node("Constant", [], [name], name, value=from_array(np.array(values, np.int64))))
        return name

    for node in body:
        inputs, y = [same.get(name, name) for name in node.input], node.output[0]
        ranks = [rank.get(name, others.get(name)) for name in inputs]
        if node.op_type == "Identity":
            same[y] = inputs[0]
            continue
        if inputs[0] not in rank and not (len(inputs) == 2 and inputs[1] in rank):
            return None
        if node.op_type in ELEMENTWISE and None not in ranks:
            rank[y] = max(r for r in ranks if r is not None)
            for i, name in enumerate(inputs):
                if name in rank and (missing := rank[y] - rank[name]):  # their rows stay in front
                    places = constant(range(1, 1 + missing), f"{y}/axes_{i}")
                    nodes.append(onnx.helper.make_node("Unsqueeze", [name, places], [f"{y}/{i}"], node.name))
                    inputs[i] = f"{y}/{i}"
        elif node.op_type in REDUCTIONS and len(inputs) == 2 and axes.get(inputs[1]):
            moved = [a + 1 if a >= 0 else a for a in axes[inputs[1]]]
            inputs[1] = constant(moved, f"{y}/axes")
            keeps = next((a.i for a in node.attribute if a.name == "keepdims"), 1)
            rank[y] = rank[inputs[0]] - (0 if keeps else len(moved))
        else:
            return None
        nodes.append(onnx.NodeProto())
        nodes[-1].CopyFrom(node)
        nodes[-1].input[:] = inputs
    return nodes, same
