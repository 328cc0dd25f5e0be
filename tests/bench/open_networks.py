"""Networks with open sizes, for `tests.bench.ranges`: `python -m tests.bench.open_networks bert_base FOLDER` writes
FOLDER/bert_base.onnx.

They are those of tests/models, with what their exporter fixed left open, and some that are made here, with random weights.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from tests.bench.networks import open_batch
from tests.networks import skeleton
from tests.ranges.models import Graph

# --- Networks of tests/models ------------------------------------------------------------------------------------------


def bert_base() -> onnx.ModelProto:
    """BERT with its count of tokens open: shapes have -1 where they had it, positions are cut off a table, and the mask of ones
    that the exporter folded is left out."""
    model = skeleton("bert_base")
    graph = model.graph
    held = {t.name: t for t in graph.initializer}
    opened = {(1, 128, -1, 64): (1, -1, 12, 64), (1, 128, -1): (1, -1, 768)}
    for name, t in held.items():
        if t.data_type == TensorProto.INT64 and (shape := tuple(numpy_helper.to_array(t).ravel())) in opened:
            held[name].CopyFrom(numpy_helper.from_array(np.array(opened[shape]), name))
    held["slice_1"].CopyFrom(numpy_helper.from_array(np.arange(512)[None], "slice_1"))
    held["expand"].CopyFrom(numpy_helper.from_array(np.zeros((1, 1), np.int64), "expand"))
    for name, n in (("zero", 0), ("one", 1), ("two", 2)):
        graph.initializer.append(numpy_helper.from_array(np.array([n]), name))
    nodes = [
        helper.make_node("Shape", ["a_0"], ["shape"]),
        helper.make_node("Slice", ["shape", "one", "two", "zero"], ["count"]),
        helper.make_node("Slice", ["slice_1", "zero", "count", "one"], ["positions"]),
        helper.make_node("Expand", ["expand", "shape"], ["gather"]),
    ]
    made, same = {y: n for n in graph.node for y in n.output}, dict[str, str]()
    for node in graph.node:
        kind, before = node.op_type, [made.get(x) for x in node.input]
        if kind == "GatherElements":
            continue
        if kind == "Gather" and node.input[1] == "slice_1":
            node.input[1] = "positions"
        if kind == "Reshape" and tuple(numpy_helper.to_array(held[node.input[1]])) == (1, 12, 64, 128):  # of keys, turned
            keys = made[made[node.input[0]].input[0]].input[0]
            node = helper.make_node("Transpose", [keys], node.output, perm=[0, 1, 3, 2])
        if kind == "Add" and before[1] is not None and before[1].op_type == "Where":
            same[node.output[0]] = node.input[0]
        elif kind == "Where" and before[0] is not None and before[0].op_type == "IsNaN":
            same[node.output[0]] = node.input[2]
        else:
            node.input[:] = [same.get(x, x) for x in node.input]
            nodes.append(node)
    while True:
        read = {x for n in nodes for x in n.input} | {y.name for y in graph.output}
        kept = [n for n in nodes if read.intersection(n.output)]
        if len(kept) == len(nodes):
            break
        nodes = kept
    weights = [t for t in graph.initializer if t.name in read]
    del graph.node[:], graph.initializer[:], graph.value_info[:]
    graph.node.extend(nodes)
    graph.initializer.extend(weights)
    for value in (*graph.input, *graph.output):
        value.type.tensor_type.shape.dim[1].dim_param = "tokens"
    return model


def vit_b_16() -> onnx.ModelProto:
    """ViT with its batch open."""
    model = skeleton("vit_b_16")
    open_batch(model)
    for value in (*model.graph.input, *model.graph.output):
        value.type.tensor_type.shape.dim[0].dim_param = "batch"
    return model


def resnet50() -> onnx.ModelProto:
    """ResNet-50, whose batch the exporter left open."""
    return skeleton("resnet50_dynbatch")


def _image_network(name: str) -> onnx.ModelProto:
    """A network of convolutions with both sides of its image open."""
    model = skeleton(name)
    del model.graph.value_info[:]
    for axis, size in ((2, "h"), (3, "w")):
        model.graph.input[0].type.tensor_type.shape.dim[axis].dim_param = size
        model.graph.output[0].type.tensor_type.shape.dim[axis].dim_param = f"{size}_out"
    return model


def unet_denoise() -> onnx.ModelProto:
    """A U-Net with both sides of its image open, multiples of 8."""
    return _image_network("unet_denoise")


def esrgan_x4() -> onnx.ModelProto:
    """ESRGAN with both sides of its image open."""
    return _image_network("esrgan_x4")


# --- Networks made here ------------------------------------------------------------------------------------------------


def _linear(g: Graph, x: str, inner: int, outer: int, biased: bool = True) -> str:
    y = g.op("MatMul", x, g.weight(inner, outer, scale=inner**-0.5))
    return g.op("Add", y, g.weight(outer, scale=0.02)) if biased else y


def _attention(g: Graph, x: str, width: int, heads: int, scale: float, bias: str, biased: bool) -> str:
    """Self-attention; `bias`: what is added to its scores."""
    size = width // heads
    split, order = g.numbers(0, 0, heads, size), [0, 2, 1, 3]
    q, k, v = (g.op("Reshape", _linear(g, x, width, width, biased), split) for _ in range(3))
    q, v = (g.op("Transpose", y, perm=order) for y in (q, v))
    scores = g.op("MatMul", q, g.op("Transpose", k, perm=[0, 2, 3, 1]))
    if scale != 1:
        scores = g.op("Mul", scores, g.value(np.float32(scale)))
    mixed = g.op("MatMul", g.op("Softmax", g.op("Add", scores, bias), axis=-1), v)
    return _linear(g, g.op("Reshape", g.op("Transpose", mixed, perm=order), g.numbers(0, 0, width)), width, width, biased)


def clip_text(layers: int = 12, width: int = 512, heads: int = 8, longest: int = 77) -> onnx.ModelProto:
    """CLIP's text encoder: causal attention, x · sigmoid(1.702 x), norms in front."""
    g = Graph()
    count = g.extent("tokens_in", 1)
    x = g.op("Gather", g.weight(49408, width, scale=0.02), "tokens_in")
    x = g.op("Add", x, g.op("Slice", g.weight(1, longest, width, scale=0.01), g.numbers(0), count, g.numbers(1)))
    causal = g.value(np.triu(np.full((longest, longest), -1e4, np.float32), 1))
    mask = g.op("Slice", causal, g.numbers(0, 0), g.op("Concat", count, count, axis=0), g.numbers(0, 1))

    def norm(x: str) -> str:
        return g.op("LayerNormalization", x, g.value(np.ones(width, np.float32)), g.weight(width, scale=0.02))

    for _ in range(layers):
        x = g.op("Add", x, _attention(g, norm(x), width, heads, (width // heads) ** -0.5, mask, True))
        y = _linear(g, norm(x), width, 4 * width)
        y = g.op("Mul", y, g.op("Sigmoid", g.op("Mul", y, g.value(np.float32(1.702)))))
        x = g.op("Add", x, _linear(g, y, 4 * width, width))
    return g.model("tokens_in", TensorProto.INT64, ["batch", "tokens"], norm(x))


def t5_encoder(layers: int = 6, width: int = 512, heads: int = 8, longest: int = 256) -> onnx.ModelProto:
    """T5's encoder: no biases, RMS norms, ReLU, and what positions' distance adds to scores, as a part of one table."""
    g = Graph()
    count = g.extent("tokens_in", 1)
    x = g.op("Gather", g.weight(32128, width, scale=1), "tokens_in")
    table = g.weight(1, heads, longest, longest, scale=0.3)
    bias = g.op("Slice", table, g.numbers(0, 0), g.op("Concat", count, count, axis=0), g.numbers(2, 3))

    def norm(x: str) -> str:
        mean = g.op("ReduceMean", g.op("Mul", x, x), axes=[-1], keepdims=1)
        root = g.op("Sqrt", g.op("Add", mean, g.value(np.float32(1e-6))))
        return g.op("Mul", g.op("Div", x, root), g.value(np.ones(width, np.float32)))

    for _ in range(layers):
        x = g.op("Add", x, _attention(g, norm(x), width, heads, 1, bias, False))
        x = g.op("Add", x, _linear(g, g.op("Relu", _linear(g, norm(x), width, 4 * width, False)), 4 * width, width, False))
    return g.model("tokens_in", TensorProto.INT64, ["batch", "tokens"], norm(x))


def style(width: int = 32) -> onnx.ModelProto:
    """A small network that transfers styles: norms by image behind each convolution, of channels and of groups of them."""
    g = Graph()

    def conv(x: str, inner: int, outer: int, side: int, stride: int = 1) -> str:
        return g.op("Conv", x, g.weight(outer, inner, side, side), strides=[stride] * 2, pads=[side // 2] * 4)

    def by_channel(x: str, channels: int) -> str:
        return g.op("InstanceNormalization", x, g.value(np.ones(channels, np.float32)), g.weight(channels, scale=0.1))

    def by_group(x: str, channels: int, groups: int = 8) -> str:
        flat = g.op("Reshape", x, g.numbers(0, groups, -1))
        ones, zeros = g.value(np.ones(groups, np.float32)), g.value(np.zeros(groups, np.float32))
        found = g.op("Reshape", g.op("InstanceNormalization", flat, ones, zeros), g.op("Shape", x))
        scaled = g.op("Mul", found, g.value(np.ones((1, channels, 1, 1), np.float32)))
        return g.op("Add", scaled, g.weight(1, channels, 1, 1, scale=0.1))

    x = g.op("Relu", by_channel(conv("x", 3, width, 9), width))
    x = g.op("Relu", by_group(conv(x, width, 2 * width, 3, 2), 2 * width))
    y = g.op("Relu", by_group(conv(x, 2 * width, 2 * width, 3), 2 * width))
    x = g.op("Add", x, by_channel(conv(y, 2 * width, 2 * width, 3), 2 * width))
    twice = {"mode": "nearest", "coordinate_transformation_mode": "asymmetric", "nearest_mode": "floor"}
    x = g.op("Resize", x, "", g.value(np.array([1, 1, 2, 2], np.float32)), **twice)
    x = g.op("Relu", by_channel(conv(x, 2 * width, width, 3), width))
    return g.model("x", TensorProto.FLOAT, [1, 3, "h", "w"], conv(x, width, 3, 9))


def whisper_decoder(layers: int = 6, width: int = 512, heads: int = 8, words: int = 51865, longest: int = 448) -> onnx.ModelProto:
    """Whisper's decoder for one token: earlier ones' keys and values are inputs, and so are those of what was heard."""
    g, size = Graph(), width // heads
    inputs: dict[str, list[int | str]] = {}
    presents, split, order = list[str](), g.numbers(0, 0, heads, size), [0, 2, 1, 3]
    past = g.extent("past_0", 2)
    words_of, positions = g.weight(words, width, scale=0.02), g.weight(longest, width, scale=0.02)
    position = g.op("Slice", positions, past, g.op("Add", past, g.numbers(1)), g.numbers(0))
    x = g.op("Add", g.op("Gather", words_of, "token"), position)

    def norm(x: str) -> str:
        return g.op("LayerNormalization", x, g.value(np.ones(width, np.float32)), g.weight(width, scale=0.02))

    def by_head(x: str) -> str:
        return g.op("Transpose", g.op("Reshape", x, split), perm=order)

    def given(name: str, count: int | str) -> str:
        inputs[name] = [1, heads, count, size]
        return name

    def attended(q: str, k: str, v: str) -> str:
        scores = g.op("MatMul", g.op("Mul", by_head(q), g.value(np.float32(size**-0.5))), g.op("Transpose", k, perm=[0, 1, 3, 2]))
        mixed = g.op("Transpose", g.op("MatMul", g.op("Softmax", scores, axis=-1), v), perm=order)
        return _linear(g, g.op("Reshape", mixed, g.numbers(0, 0, width)), width, width)

    for layer in range(layers):
        y = norm(x)
        own = [by_head(_linear(g, y, width, width, biased)) for biased in (False, True)]
        k, v = (g.op("Concat", given(f"past_{2 * layer + i}", "past"), new, axis=2) for i, new in enumerate(own))
        presents += [k, v]
        x = g.op("Add", x, attended(_linear(g, y, width, width), k, v))
        k, v = (given(f"heard_{2 * layer + i}", 1500) for i in range(2))
        x = g.op("Add", x, attended(_linear(g, norm(x), width, width), k, v))
        y = g.op("Gelu", _linear(g, norm(x), width, 4 * width))
        x = g.op("Add", x, _linear(g, y, 4 * width, width))
    logits = g.op("MatMul", norm(x), g.op("Transpose", words_of, perm=[1, 0]))
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name, shape in inputs.items()]
    token = helper.make_tensor_value_info("token", TensorProto.INT64, [1, 1])
    outputs = [helper.make_tensor_value_info(y, TensorProto.FLOAT, None) for y in (logits, *presents)]
    graph = helper.make_graph(g.nodes, "whisper_decoder", [token, *values], outputs, g.weights)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=9)


NETWORKS: dict[str, Callable[[], onnx.ModelProto]] = {
    f.__name__: f for f in (bert_base, vit_b_16, resnet50, unet_denoise, esrgan_x4, clip_text, t5_encoder, style, whisper_decoder)
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name", choices=sorted(NETWORKS))
    parser.add_argument("folder", type=Path)
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    onnx.save(NETWORKS[args.name](), args.folder / f"{args.name}.onnx")


if __name__ == "__main__":
    main()
