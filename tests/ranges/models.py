"""Small models with open dimensions, as exporters write them: sizes are read by Shape, and go to Reshape, Slice and Expand."""

from __future__ import annotations

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

DRAW = np.random.default_rng(7)


class Graph:
    """Collects nodes and weights of a model."""

    def __init__(self) -> None:
        self.nodes: list[onnx.NodeProto] = []
        self.weights: list[onnx.TensorProto] = []

    def op(self, kind: str, *inputs: str, **attributes: object) -> str:
        """A node's output."""
        out = f"{kind}_{len(self.nodes)}"
        self.nodes.append(helper.make_node(kind, list(inputs), [out], name=out, **attributes))
        return out

    def weight(self, *shape: int, scale: float = 0.0) -> str:
        scale = scale or float(np.prod(shape[1:]) or 1) ** -0.5
        return self.value((DRAW.standard_normal(shape) * scale).astype(np.float32))

    def value(self, values: np.ndarray) -> str:
        name = f"w{len(self.weights)}"
        self.weights.append(numpy_helper.from_array(np.asarray(values), name))
        return name

    def numbers(self, *values: int) -> str:
        return self.value(np.array(values, np.int64))

    def extent(self, x: str, axis: int) -> str:
        """An extent of a tensor, as a vector of one number."""
        return self.op("Gather", self.op("Shape", x), self.numbers(axis))

    def model(self, x: str, dtype: int, shape: list[int | str], y: str) -> onnx.ModelProto:
        inputs = [helper.make_tensor_value_info(x, dtype, shape)]
        outputs = [helper.make_tensor_value_info(y, TensorProto.FLOAT, None)]
        graph = helper.make_graph(self.nodes, "open", inputs, outputs, self.weights)
        return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)


def image() -> onnx.ModelProto:
    """Convolutions with strides, pooling, a residual, upsampling, a concatenation, normalization by image, a border."""
    g = Graph()
    a = g.op("Relu", g.op("Conv", "x", g.weight(16, 3, 3, 3), strides=[2, 2], pads=[1, 1, 1, 1]))
    b = g.op("InstanceNormalization", g.op("Conv", a, g.weight(16, 16, 3, 3), pads=[1, 1, 1, 1]), g.weight(16), g.weight(16))
    b = g.op("Add", g.op("Relu", b), a)
    c = g.op("MaxPool", b, kernel_shape=[2, 2], strides=[2, 2])
    c = g.op("Conv", c, g.weight(8, 16, 1, 1))
    twice = {"mode": "nearest", "coordinate_transformation_mode": "asymmetric", "nearest_mode": "floor"}
    c = g.op("Resize", c, "", g.value(np.array([1, 1, 2, 2], np.float32)), **twice)
    size = g.op("Concat", g.extent(b, 0), g.extent(c, 1), g.extent(c, 2), g.extent(c, 3), axis=0)
    b = g.op("Slice", b, g.numbers(0, 0), g.op("Slice", size, g.numbers(2), g.numbers(4)), g.numbers(2, 3))
    both = g.op("Concat", b, c, axis=1)
    out = g.op("Pad", g.op("Conv", both, g.weight(3, 24, 1, 1)), g.numbers(0, 0, 1, 1, 0, 0, 1, 1), mode="reflect")
    return g.model("x", TensorProto.FLOAT, ["batch", 3, "h", "w"], out)


def tokens(width: int = 32, heads: int = 4) -> onnx.ModelProto:
    """A layer of a transformer: embeddings, positions, attention with a causal mask, a mean over what is there."""
    g = Graph()
    positions = g.op("Slice", g.weight(1, 64, width, scale=1), g.numbers(0), g.extent("x", 1), g.numbers(1))
    x = g.op("Add", g.op("Gather", g.weight(50, width, scale=1), "x"), positions)
    whole = [g.extent("x", 0), g.extent("x", 1)]
    split = g.op("Concat", *whole, g.numbers(heads), g.numbers(width // heads), axis=0)

    def head(order: list[int]) -> str:
        return g.op("Transpose", g.op("Reshape", g.op("MatMul", x, g.weight(width, width)), split), perm=order)

    q, k, v = head([0, 2, 1, 3]), head([0, 2, 3, 1]), head([0, 2, 1, 3])
    causal = g.value(np.triu(np.full((64, 64), -1e4, np.float32), 1))
    mask = g.op("Slice", causal, g.numbers(0, 0), g.op("Concat", whole[1], whole[1], axis=0), g.numbers(0, 1))
    scores = g.op("Add", g.op("Mul", g.op("MatMul", q, k), g.value(np.float32((width // heads) ** -0.5))), mask)
    mixed = g.op("Transpose", g.op("MatMul", g.op("Softmax", scores, axis=-1), v), perm=[0, 2, 1, 3])
    x = g.op("Add", x, g.op("Reshape", mixed, g.op("Concat", *whole, g.numbers(width), axis=0)))
    x = g.op("LayerNormalization", x, g.weight(width, scale=1), g.weight(width))
    pooled = g.op("ReduceMean", x, axes=[1], keepdims=1)
    return g.model("x", TensorProto.INT64, ["batch", "tokens"], g.op("Sub", x, pooled))
