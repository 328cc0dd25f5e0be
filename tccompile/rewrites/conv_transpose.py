"""conv_transpose(x, w) = depth_to_space(conv(x, w')): no element is multiplied with the zeros between stretched inputs.

Along one axis, with stride s, dilation d and p elements cut off at the start, y[o] = sum over k of x[i] * w[k] where
i * s + k * d = o + p. Write o = s * q + f with phase f < s: then i = q + (f + p - k * d) / s, wherever that divides. So each
phase is an ordinary convolution over the same x with its own few taps of w, at offsets (f + p - k * d) / s from q; over all
phases the offsets are lo … hi. Hence one convolution with s times the channels, a kernel of hi - lo + 1 taps (zero where a
phase has none), -lo of padding at the start, and a shuffle that puts phase f of q at s * q + f. (W. Shi et al., "Is the
deconvolution layer the same as a convolutional layer?", 2016.)

The phases may count from c elements before y's first one, which are cut off afterwards: with p - c for p another number of
taps can do. A kernel of 4 with stride 2 that cuts off 1 (the usual one of decoders) needs offsets -1 … 1 as it is and -1 … 0
with c = 1: 2×2 taps instead of 3×3. The memory then holds the elements to cut off too, and y is a view of it.

Channels are in the order that DepthToSpace wants: phases outermost (DCR), or innermost (CRD) if there are groups, because a
group's channels must be neighbours.

Weights and biases that are computed, as by networks whose styles scale them, are brought into this form by nodes of the graph.
Bytes that weights are dequantized from are brought into it as bytes, so that the convolution becomes one of integers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import onnx_graphsurgeon as gs

from tccompile.ir.extent import ceil_div
from tccompile.load.constants import derived, literal
from tccompile.rewrites.quantized import Product, product
from tccompile.rewrites.rule import Editor, Rewrite, constant, itself, name_of, operand, rank, reshaped, shape_constant


@dataclass(frozen=True)
class Axis:
    """One spatial axis of the convolution that replaces the transposed one.

    taps   (stride, width): which k of w is at each tap of each phase; len(w) for none
    cut    elements of the shuffled result before y's first one
    """

    stride: int
    pads: tuple[int, int]
    taps: np.ndarray
    extent: int  # of the convolution's result, before the shuffle
    cut: int = 0


def axis_of(n: int, out: int, kernel: int, stride: int, dilation: int, start: int, cut: int = 0) -> Axis:
    """For an axis of x of extent n and of y of extent `out`, with `start` elements cut off at the start."""
    start, out = start - cut, out + cut
    k = np.arange(kernel)
    f = (k * dilation - start) % stride
    offsets = (f + start - k * dilation) // stride
    q = ceil_div(out, stride)
    lo, hi = min(int(offsets.min(initial=0)), 0), max(int(offsets.max(initial=0)), 0)
    end = max(q - 1 + hi - (n - 1), 0)
    taps = np.full((stride, hi - lo + 1), kernel)
    taps[f, offsets - lo] = k
    return Axis(stride, (-lo, end), taps, n - lo + end - (hi - lo), cut)


MOST, SPARSEST = 1 << 26, 64
"""Weights, mostly zeros, that phases may have: so many, or so many times those there are."""

LONGEST = 1 << 20
"""Taps of all phases along an axis: each has its number in a table."""

MOST_CUTS = 64
"""How many of them are tried: each phase lies at another place after as many as a stride has."""

WIDE = 16
"""Output channels from which fewer taps are worth it that y is not stored by itself: with fewer a tile is padding anyway."""


def _concatenated(y: gs.Tensor) -> bool:
    """Whether y, or what one op makes of it, goes into a Concat: its writer can then write there, but a view would be copied."""
    readers = list(y.outputs)
    after = readers[0].outputs[0].outputs if len(readers) == 1 else []
    return any(node.op == "Concat" for node in (*readers, *after))


def _fewest_taps(axis: tuple[int, int, int, int, int, int], wide: bool) -> Axis:
    """The axis with the elements cut off afterwards that leave the fewest taps; none where that makes no difference."""
    cuts = range(min(axis[3], MOST_CUTS)) if wide else (0,)
    return min((axis_of(*axis, cut=c) for c in cuts), key=lambda a: a.taps.shape[1] * a.extent)


def _axes(node: gs.Node) -> list[Axis]:
    x, w, y = node.inputs[0], node.inputs[1], node.outputs[0]
    m = rank(x) - 2
    kernel, extents, out = list(w.shape[2:]), list(x.shape[2:]), list(y.shape[2:])
    strides = node.attrs.get("strides", [1] * m)
    dilations = node.attrs.get("dilations", [1] * m)
    starts = list(node.attrs.get("pads", [0] * 2 * m))[:m]
    auto = node.attrs.get("auto_pad", "NOTSET")
    if auto == "VALID":
        starts = [0] * m
    if node.attrs.get("output_shape") or auto.startswith("SAME"):
        more = node.attrs.get("output_padding", [0] * m)
        for a in range(m):
            full = strides[a] * (extents[a] - 1) + more[a] + (kernel[a] - 1) * dilations[a] + 1
            total = max(full - out[a], 0)
            starts[a] = total // 2 if auto == "SAME_UPPER" else total - total // 2
    square = m == 2 and strides[0] == strides[1] and node.attrs.get("group", 1) == 1
    wide = square and y.shape[1] >= WIDE and not _concatenated(y)
    return [_fewest_taps(a, wide) for a in zip(extents, out, kernel, strides, dilations, starts, strict=True)]


def _check(edit: Editor, node: gs.Node) -> str | None:
    if rank(node.inputs[0]) not in (3, 4, 5):
        return "only one to three spatial axes are supported"
    w, spatial = node.inputs[1], rank(node.inputs[0]) - 2
    strides, dilations = (node.attrs.get(name, [1] * spatial) for name in ("strides", "dilations"))
    taps = [(k - 1) * d + 2 * s for k, d, s in zip(w.shape[2:], dilations, strides, strict=True)]  # of all phases, about
    if max(taps) > LONGEST:
        return f"filters of {max(taps)} taps along an axis, with their strides and dilations, are more than {LONGEST}"
    elements, size = math.prod((*w.shape[:2], *taps)), math.prod(w.shape)
    if elements > max(MOST, SPARSEST * size):
        return f"strides of {list(strides)} and dilations of {list(dilations)} would make {elements} weights of {size}"
    return None


def _split(node: gs.Node, axes: list[Axis], groups: int) -> tuple[list[int], tuple[int, ...], list[int]]:
    """From w (C, O/g, taps…), its taps those of all phases: the shape in which it is transposed, by which axes, and the last."""
    w, m = node.inputs[1], len(axes)
    c, o = w.shape[0] // groups, w.shape[1]
    phases, taps = [3 + 2 * i for i in range(m)], [4 + 2 * i for i in range(m)]
    order = (0, 2, *phases, 1, *taps) if groups > 1 else (0, *phases, 2, 1, *taps)
    whole = [groups * o * math.prod(a.stride for a in axes), c, *(a.taps.shape[1] for a in axes)]
    return [groups, c, o, *(n for a in axes for n in a.taps.shape)], order, whole


def _of_constant(edit: Editor, node: gs.Node, w: gs.Constant, axes: list[Axis], groups: int, none: int = 0) -> gs.Tensor:
    """As `_weights`, where w is constant; `none` is at the tap that is not there."""
    split, order, whole = _split(node, axes, groups)
    out = w if none else derived("", "pad", w, before=(0,) * rank(w), after=(0, 0) + (1,) * len(axes))
    for i, a in enumerate(axes):
        if none:
            missing = np.full([1 if axis == 2 + i else n for axis, n in enumerate(out.shape)], none, np.dtype(w.dtype))
            out = derived("", "concat", out, missing, axis=2 + i)
        out = derived("", "take", out, a.taps.reshape(-1), axis=2 + i)
    out = derived("", "transpose", reshaped(out, *split), axes=order)
    return edit.named(reshaped(out, *whole), f"{w.name}/phases")


def _weights(edit: Editor, node: gs.Node, axes: list[Axis], groups: int) -> gs.Tensor:
    """(phases * O, C/g, taps…), or (O * phases, C/g, taps…) with groups, from w (C, O/g, kernel…)."""
    w, m = node.inputs[1], len(axes)
    if (values := constant(w)) is not None:
        return _of_constant(edit, node, values, axes, groups)
    split, order, whole = _split(node, axes, groups)
    before, after = (0,) * (m + 2), (0, 0) + (1,) * m
    shape = [n + more for n, more in zip(w.shape, after, strict=True)]
    y = edit.add("Pad", [w, shape_constant(edit, (*before, *after), node)], node, shape)
    for i, a in enumerate(axes):
        shape[2 + i] = a.taps.size
        y = edit.add("Gather", [y, shape_constant(edit, a.taps.reshape(-1).tolist(), node)], node, shape, axis=2 + i)
    y = edit.add("Reshape", [y, shape_constant(edit, split, node)], node, split)
    y = edit.add("Transpose", [y], node, [split[axis] for axis in order], perm=list(order))
    return edit.add("Reshape", [y, shape_constant(edit, whole, node)], node, whole)


def _bias(edit: Editor, node: gs.Node, b: gs.Tensor, channels: int, phases: int, groups: int) -> gs.Tensor:
    """The bias of each of the channels that `_weights` makes."""
    column = (channels, 1) if groups > 1 else (1, channels)
    spread = (channels, phases) if groups > 1 else (phases, channels)
    if isinstance(b, gs.Constant):
        out = derived("", "expand", reshaped(b, *column), shape=spread)
        return edit.named(reshaped(out, -1), f"{b.name}/phases")
    y = edit.add("Reshape", [b, shape_constant(edit, column, node)], node, column)
    y = edit.add("Expand", [y, shape_constant(edit, spread, node)], node, spread)
    return edit.add("Reshape", [y, shape_constant(edit, [-1], node)], node, [channels * phases])


def _apply(edit: Editor, node: gs.Node) -> None:
    axes, groups = _axes(node), node.attrs.get("group", 1)
    _shuffled(edit, node, axes, groups, _weights(edit, node, axes, groups))


def _shuffled(edit: Editor, node: gs.Node, axes: list[Axis], groups: int, weights: gs.Tensor) -> None:
    """The convolution with the weights of all phases, and what brings its results in order."""
    x, y, b = node.inputs[0], node.outputs[0], operand(node, 2)
    m, batch, channels = len(axes), x.shape[0], y.shape[1]
    strides, extents = [a.stride for a in axes], [a.extent for a in axes]
    phases = math.prod(strides)
    inputs = [x, weights]
    if b is not None:
        inputs.append(_bias(edit, node, b, channels, phases, groups))
    pads = [a.pads[0] for a in axes] + [a.pads[1] for a in axes]
    grown = [e * s for e, s in zip(extents, strides, strict=True)]
    exact = grown == list(y.shape[2:])

    def last(done: bool) -> gs.Tensor | None:
        return y if done and exact else None

    out = edit.add("Conv", inputs, node, (batch, channels * phases, *extents), last(phases == 1), group=groups, pads=pads)
    if phases > 1 and m == 2 and strides[0] == strides[1]:
        mode = "CRD" if groups > 1 else "DCR"
        out = edit.add("DepthToSpace", [out], node, (batch, channels, *grown), last(True), blocksize=strides[0], mode=mode)
    elif phases > 1:
        out = _shuffle(edit, node, out, strides, extents, groups, last(True))
    if not exact:
        cuts = [a.cut for a in axes]
        ends = literal(edit.name(f"{name_of(node)}/ends"), [c + n for c, n in zip(cuts, y.shape[2:], strict=True)], np.int64)
        starts = literal(edit.name(f"{name_of(node)}/starts"), cuts, np.int64)
        which = literal(edit.name(f"{name_of(node)}/axes"), list(range(2, m + 2)), np.int64)
        edit.add("Slice", [out, starts, ends, which], node, into=y)


def _shuffle(
    edit: Editor, node: gs.Node, x: gs.Tensor, strides: list[int], extents: list[int], groups: int, into: gs.Tensor | None
) -> gs.Tensor:
    """DepthToSpace for any block: reshape, transpose, reshape."""
    m, batch, channels = len(strides), x.shape[0], x.shape[1] // math.prod(strides)
    split = [batch, channels, *strides, *extents] if groups > 1 else [batch, *strides, channels, *extents]
    block, c = (2, 1) if groups > 1 else (1, 1 + m)
    perm = [0, c] + [axis for i in range(m) for axis in (2 + m + i, block + i)]
    out = edit.add("Reshape", [x, shape_constant(edit, split, node)], node, split)
    out = edit.add("Transpose", [out], node, [split[a] for a in perm], perm=perm)
    grown = [batch, channels, *(e * s for e, s in zip(extents, strides, strict=True))]
    return edit.add("Reshape", [out, shape_constant(edit, grown, node)], node, grown, into)


def _check_bytes(edit: Editor, found: Product) -> str | None:
    w, zero, bias = found.w, found.w.zero, operand(found.node, 2)
    if constant(w.integers) is None or (bias is not None and constant(bias) is None):
        return "its weights or its bias are computed"
    if w.axis is not None and (w.axis != 1 or found.node.attrs.get("group", 1) > 1):
        return "the scales of its weights do not go along the result's channels"
    if zero is not None and np.ptp(zero.values.astype(np.int64)):
        return "its weights have several zero points"
    return _check(edit, found.node)


def _apply_bytes(edit: Editor, found: Product) -> None:
    node, w = found.node, found.w
    axes, groups = _axes(node), node.attrs.get("group", 1)
    zero = 0 if w.zero is None else int(w.zero.values.flat[0])
    integers = _of_constant(edit, node, w.integers, axes, groups, zero)
    scale = edit.named(w.scale.copy(), f"{w.integers.name}/scale")
    if w.axis is not None:
        scale = _bias(edit, node, scale, w.scale.shape[0], math.prod(a.stride for a in axes), groups)
    operands = [integers, scale]
    if zero:
        points = np.full(scale.shape, zero, np.dtype(integers.dtype))
        operands.append(literal(edit.name(f"{w.integers.name}/zero"), points, points.dtype))
    weights = edit.add("DequantizeLinear", operands, node, list(integers.shape), axis=0)
    _shuffled(edit, node, axes, groups, weights)


PRODUCTS = (
    Rewrite(
        "conv_transpose(x, dequantize(w)) => depth_to_space(conv(x, dequantize(w')))", ("ConvTranspose",), product, _check_bytes,
        _apply_bytes,
    ),
)  # fmt: skip
"""Those that go before weights are no integers any more."""

REWRITES = (Rewrite("conv_transpose(x, w) => depth_to_space(conv(x, w'))", ("ConvTranspose",), itself, _check, _apply),)
