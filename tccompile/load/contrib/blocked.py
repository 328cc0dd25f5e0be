"""ONNX Runtime's layout of images for the CPU that it optimizes on: channels in blocks of 8 or 16, filled up with zeros.

What is computed does not depend on where numbers lie: tensors become ordinary ones of as many channels as the blocks have,
and filters, which a model has in the order of the blocks, are put into the standard's order. How large the blocks are is not
written anywhere: it shows where a number of channels tells 8 from 16, and must not be guessed otherwise.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import onnx
import onnx.helper

from tccompile.errors import UnsupportedError, UsageError
from tccompile.ir.extent import Shape
from tccompile.load.contrib.parts import Operator, Parts
from tccompile.load.contrib.products import CONV, POOL, activate_convolution, kept
from tccompile.load.valid import title

DOMAIN = "com.microsoft.nchwc"


ELEMENTWISE = frozenset((
    "Add", "Clip", "Concat", "Elu", "FastGelu", "Gelu", "HardSigmoid", "HardSwish", "LeakyRelu", "Mul", "QuickGelu", "Relu",
    "Sigmoid", "Sum", "Tanh",
))  # fmt: skip
"""Operators that ONNX Runtime leaves between those on blocks, where all that they read is in blocks: the same for any order."""


def block_of(nodes: Iterable[onnx.NodeProto], shapes: Mapping[str, Shape], said: int | None) -> int | None:
    """How many channels a block has, or None where neither the model nor the user tells; `shapes` are those of constants.

    Raises UnsupportedError where other operators read what is in blocks: in which order they would find it, nobody says.
    """
    found: set[int] = set()
    made: dict[str, onnx.NodeProto] = {}  # what is in blocks, and what makes it
    for node in nodes:
        if node.domain == DOMAIN:
            _check_own(node, made, shapes)
            found.update(_evidence(node, made, shapes))
            if node.op_type != "ReorderOutput":
                made[node.output[0]] = node
        elif any(x in made for x in node.input):
            _check_other(node, made)
            made[node.output[0]] = node
    if said and found - {said}:
        raise UsageError(f"blocks of {said} channels do not fit the model: there are filters for blocks of {max(found - {said})}")
    return said or (found.pop() if len(found) == 1 else None)


def _check_own(node: onnx.NodeProto, made: Mapping[str, onnx.NodeProto], shapes: Mapping[str, Shape]) -> None:
    """An operator on blocks reads blocks, but for a convolution of few channels and what makes blocks."""
    filters = shapes.get(node.input[1]) if node.op_type == "Conv" else None
    if node.op_type == "Conv" and (filters is None or len(filters) != 4):
        raise UnsupportedError(f"{title(node)} is not supported: its filters are computed; {_ANEW}")
    few = node.op_type == "ReorderInput" or (filters is not None and filters[1] < 16)
    images = [*([] if few else node.input[:1]), *(x for x in node.input[3:4] if x)]
    if any(x not in made for x in images) or (node.op_type == "ReorderInput" and node.input[0] in made):
        raise UnsupportedError(f"{title(node)} is not supported: the layout of what it reads is not the one it asks for; {_ANEW}")


def _check_other(node: onnx.NodeProto, made: Mapping[str, onnx.NodeProto]) -> None:
    axis = next((a.i for a in node.attribute if a.name == "axis"), 1)
    if node.op_type not in ELEMENTWISE or axis != 1 or any(x and x not in made for x in node.input):
        name = next(x for x in node.input if x in made)
        raise UnsupportedError(
            f"{title(node)} is not supported: it reads {name!r}, whose channels lie in blocks, in an order of its own; {_ANEW}"
        )


_ANEW = "optimize the model anew: it was changed after the layout for a CPU, which ORT_ENABLE_EXTENDED and opt_level=2 leave out"


def _evidence(node: onnx.NodeProto, made: Mapping[str, onnx.NodeProto], shapes: Mapping[str, Shape]) -> Iterator[int]:
    """The sizes of blocks without which this node would not be as it is."""
    if node.op_type == "Conv":
        outputs, inputs = shapes[node.input[1]][:2]
        if outputs % 16 or (inputs > 16 and inputs % 16) or (inputs == 8 and node.input[0] in made):
            yield 8
        elif 8 <= inputs < 16:  # fewer than a block, and not filled up
            yield 16
    before = made.get(node.input[0])
    if node.op_type == "ReorderOutput" and before is not None and before.domain == DOMAIN and before.op_type == "Conv":
        channels = next((a.i for a in node.attribute if a.name == "channels"), 0)
        if shapes[before.input[1]][0] - channels >= 8:
            yield 16


def _sized(p: Parts) -> int:
    if p.block is None:
        raise p.refused(
            "it is laid out for the CPU that the model was optimized on, in blocks of 8 or 16 channels, and nothing in the model "
            "tells which",
            "optimize the model anew without that: InferenceSession(…, disabled_optimizers=['NchwcTransformer']), "
            "ORT_ENABLE_EXTENDED, or opt_level=2; or say it: --nchwc-block 16 for CPUs with AVX-512, --nchwc-block 8 for others "
            "of Intel and AMD",
        )
    return p.block


def _reorder_input(p: Parts) -> None:
    """Zeros for the channels that the last block has more."""
    shape, last, block = p.shape(0), p.attributes.get("channels_last", 0), _sized(p)
    p.need(len(shape) == 4, f"its input is {shape}")
    x = p.channels_first(p.inputs[0], 4) if last else p.inputs[0]
    missing = -(shape[3] if last else shape[1]) % block
    if missing:
        p.add("Pad", [x, p.integers(0, 0, 0, 0, 0, missing, 0, 0)], p.outputs[0])
    else:
        p.add("Identity", [x], p.outputs[0])


def _reorder_output(p: Parts) -> None:
    """The channels that the image has."""
    shape, channels = p.shape(0), p.attributes.get("channels", 0)
    p.need(len(shape) == 4 and 0 < channels <= shape[1], f"its channels are {channels}, of {shape}")
    _sized(p)
    if not p.attributes.get("channels_last", 0):
        p.sliced(p.inputs[0], 1, 0, channels, p.outputs[0])
    else:
        p.channels_last(p.sliced(p.inputs[0], 1, 0, channels), 4, p.outputs[0])


def _conv(p: Parts) -> None:
    """FusedConv of filters (outputs, inputs, height, width) that lie in the order outputs' blocks, inputs' blocks, height,
    width, inputs of a block, outputs of a block; inputs fewer than a block are not in blocks."""
    block, shape = _sized(p), p.shape(1)
    outputs, inputs, height, width = shape
    p.need(outputs % block == 0 and (inputs < block or inputs % block == 0), f"its filters are {shape}, for blocks of {block}")
    deep = block if inputs >= block else 1
    lying = p.reshaped(p.inputs[1], outputs // block, inputs // deep, height, width, deep, block)
    filters = p.reshaped(p.add("Transpose", [lying], perm=[0, 5, 1, 4, 2, 3]), *shape)
    activate_convolution(p, p.add("Conv", [p.inputs[0], filters, p.inputs[2]], **kept(p, CONV)), p.inputs[3])


def _pool(p: Parts) -> None:
    _sized(p)
    p.add(p.node.op_type, p.inputs[:1], p.outputs[0], **kept(p, POOL))


def _upsample(p: Parts) -> None:
    """By whole numbers."""
    _sized(p)
    scales = p.constant([float(s) for s in p.attributes["scales"]])
    scales = p.add("Cast", [scales], to=onnx.TensorProto.FLOAT)
    mode = {"coordinate_transformation_mode": p.attributes.get("coordinate_transformation_mode", "asymmetric")}
    nearest = p.attributes.get("mode", "nearest") == "nearest"
    more = {"mode": "nearest", "nearest_mode": "floor"} if nearest else {"mode": "linear"}
    p.add("Resize", [p.inputs[0], "", scales], p.outputs[0], **mode, **more)


OPERATORS: dict[str, Operator] = {
    **dict.fromkeys(("AveragePool", "GlobalAveragePool", "GlobalMaxPool", "MaxPool"), _pool),
    "Conv": _conv,
    "ReorderInput": _reorder_input,
    "ReorderOutput": _reorder_output,
    "Upsample": _upsample,
}
