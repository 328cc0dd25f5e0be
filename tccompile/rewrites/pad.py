"""conv(pad(x), pads) = conv(x, pads + pad), for zeros put around the spatial axes; and the same for pooling.

A mean counts the zeros that Pad put there, so average pooling takes them over with count_include_pad, which is exact where
it had no padding of its own or counted that too. A maximum takes over -inf, which is what it pads with itself, and zeros
where nothing in x is below zero.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx_graphsurgeon as gs

from tccompile.rewrites.rule import Editor, Rewrite, constant, ints, operand, producer, rank, scalar

NEVER_NEGATIVE = ("Relu", "Sigmoid", "HardSigmoid", "Softplus", "Exp", "Softmax", "Abs")


@dataclass
class Padded:
    pad: gs.Node
    node: gs.Node


def _match(node: gs.Node) -> Padded | None:
    pad = producer(node.inputs[0], "Pad")
    return Padded(pad, node) if pad else None


def amounts_of(pad: gs.Node) -> np.ndarray | None:
    """What is added before and after each axis, (2, rank), if that is constant."""
    values = ints(pad.inputs[1])
    axes = ints(operand(pad, 3)) if operand(pad, 3) is not None else tuple(range(rank(pad.outputs[0])))
    if values is None or axes is None:
        return None
    amounts = np.zeros((2, rank(pad.outputs[0])), np.int64)
    amounts[:, list(axes)] = np.reshape(values, (2, -1))
    return amounts


def _check(edit: Editor, m: Padded) -> str | None:
    amounts = amounts_of(m.pad)
    if m.pad.attrs.get("mode", "constant") != "constant":
        return "the padding is not constant"
    if amounts is None:
        return "how much is padded is not constant"
    if (amounts < 0).any():
        return "it cuts off instead of padding"
    if amounts[:, :2].any():
        return "it pads batch or channels"
    if m.node.attrs.get("auto_pad", "NOTSET") not in ("NOTSET", "VALID"):
        return "auto_pad depends on the padded extents"
    value = 0.0 if operand(m.pad, 2) is None else scalar(operand(m.pad, 2))
    if m.node.op == "Conv":
        return None if value == 0 else "it pads with something else than 0"
    return _check_pool(m, amounts[:, 2:].reshape(-1), value)


def _check_pool(m: Padded, amounts: np.ndarray, value: float | None) -> str | None:
    attrs = m.node.attrs
    total = amounts + np.asarray(attrs.get("pads", [0] * amounts.size))
    window = [(k - 1) * d + 1 for k, d in zip(attrs["kernel_shape"], attrs.get("dilations", [1] * amounts.size), strict=False)]
    if (total >= np.tile(window, 2)).any():
        return "a whole window would lie in the padding"
    if attrs.get("ceil_mode", 0):
        return "ceil_mode depends on the padded extents"
    if m.node.op == "AveragePool":
        if value != 0:
            return "it pads with something else than 0"
        if any(attrs.get("pads", ())) and not attrs.get("count_include_pad", 0):
            return "the pooling counts the zeros of Pad, and not those of its own padding"
        return None
    if len(m.node.outputs) > 1:
        return "the indices of the maxima would change"
    lowest = value is not None and value <= np.finfo(np.dtype(m.pad.outputs[0].dtype)).min
    nothing_below = value == 0 and (producer(m.pad.inputs[0], *NEVER_NEGATIVE) or _clipped_at_0(m.pad.inputs[0]))
    return None if lowest or nothing_below else "it pads with a number that could be the maximum"


def _clipped_at_0(x: gs.Tensor) -> bool:
    clip = producer(x, "Clip")
    low = scalar(operand(clip, 1)) if clip else None
    return low is not None and low >= 0


def _apply(edit: Editor, m: Padded) -> None:
    amounts = amounts_of(m.pad)
    assert amounts is not None
    spatial = amounts[:, 2:].reshape(-1)
    own = m.node.attrs.get("pads", [0] * spatial.size)
    m.node.attrs["pads"] = (np.asarray(own) + spatial).tolist()
    m.node.attrs.pop("auto_pad", None)
    if m.node.op == "AveragePool":
        m.node.attrs["count_include_pad"] = 1
    m.node.inputs[0] = m.pad.inputs[0]


def _match_pool(node: gs.Node) -> Padded | None:
    m = _match(node)
    return m if m and constant(m.pad.inputs[1]) is not None and np.dtype(m.pad.outputs[0].dtype).kind == "f" else None


REWRITES = (
    Rewrite("conv(pad(x, p), pads) => conv(x, pads + p)", ("Conv",), _match, _check, _apply),
    Rewrite("pool(pad(x, p), pads) => pool(x, pads + p)", ("AveragePool", "MaxPool"), _match_pool, _check, _apply),
)
