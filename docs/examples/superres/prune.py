"""Prune a network 2:4: of every four neighbouring weights along what is summed over, the two smallest become zero.

    python prune.py superres_x3.onnx -o superres_2of4.onnx

Convolutions of one group and products with a matrix are pruned, along their input channels; where there are fewer than four, or
no multiple of four, weights stay. What is pruned so has lost accuracy: train it on with the same zeros (docs/guide/sparsity.md).
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import onnx
from onnx import numpy_helper


def axis_of(node: onnx.NodeProto) -> int | None:
    """The axis of the node's weights that it sums over; None if it has none to prune."""
    attributes = {a.name: a.i for a in node.attribute}
    if node.op_type == "Conv":
        return 1 if attributes.get("group", 1) == 1 else None
    if node.op_type == "Gemm":
        return 1 if attributes.get("transB", 0) else 0
    return 0 if node.op_type == "MatMul" else None


def pruned(weights: np.ndarray, axis: int) -> np.ndarray:
    """The weights with two zeros in every four neighbours along an axis."""
    rows = np.moveaxis(weights, axis, -1)
    fours = rows.reshape(*rows.shape[:-1], -1, 4).copy()
    np.put_along_axis(fours, np.abs(fours).argsort(-1)[..., :2], 0, -1)
    return np.ascontiguousarray(np.moveaxis(fours.reshape(rows.shape), -1, axis))


def prune(model: onnx.ModelProto) -> list[str]:
    """Prune a model's weights where they are; the names of the nodes whose weights were pruned."""
    weights, names = {t.name: t for t in model.graph.initializer}, []
    for node in model.graph.node:
        axis, tensor = axis_of(node), weights.get(node.input[1]) if len(node.input) > 1 else None
        if axis is None or tensor is None:
            continue
        values = numpy_helper.to_array(tensor)
        if values.ndim > (4 if node.op_type == "Conv" else 2) or values.ndim < 2 or values.shape[axis] % 4:
            continue
        tensor.CopyFrom(numpy_helper.from_array(pruned(values, axis), tensor.name))
        names.append(node.name)
    return names


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model", type=Path)
    parser.add_argument("-o", "--out", type=Path, required=True)
    args = parser.parse_args()
    model = onnx.load(args.model)
    names = prune(model)
    onnx.save(model, args.out)
    print(f"{args.out}: {len(names)} nodes' weights are 2:4")


if __name__ == "__main__":
    main()
