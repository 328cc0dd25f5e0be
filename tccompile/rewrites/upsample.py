"""conv(nearest(x, s), w) = conv_transpose(x, w'): a convolution of an image that was enlarged by whole numbers.

Along one axis u[i] = x[floor(i / s)] and y[o] = sum over r < R of w[r] * u[o + r - p]. The taps that read x[i] are those with
s * i <= o + r - p < s * (i + 1), so with t = o - s * i + R - 1 - p

    y[o] = sum over i of x[i] * w'[o - s * i + R - 1 - p],   w'[t] = sum over j < s of w[R - 1 - t + j],   0 <= t < R + s - 1

which is a transposed convolution with stride s that cuts R - 1 - p elements off. Instead of R taps over s times as many
elements, each phase of its result has ceil((R + s - 1) / s) taps over x: of 3×3 and s = 2 four of nine are left, and the
enlarged image is never stored. Zeros beyond the edges are the same zeros.

An image padded by P < s elements after it was enlarged, with its edge or with its reflection (which then is its edge), is an
image padded with one element of its edge and then enlarged, of which s - P elements are cut off: p = P - s.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import onnx_graphsurgeon as gs

from tccompile.ir.extent import round_up
from tccompile.load.constants import Weight, literal
from tccompile.rewrites.pad import amounts_of
from tccompile.rewrites.rule import Editor, Rewrite, calculate, constant, name_of, operand, producer, rank, rounded

GROWTH = 4
"""How many times larger weights may become; they may become as large as the enlarged image in any case."""


@dataclass
class Enlarged:
    resize: gs.Node
    pad: gs.Node | None
    conv: gs.Node


def _match(node: gs.Node) -> Enlarged | None:
    pad = producer(node.inputs[0], "Pad")
    resize = producer(pad.inputs[0] if pad else node.inputs[0], "Resize")
    return Enlarged(resize, pad, node) if resize else None


def _factors(resize: gs.Node) -> list[int] | None:
    """How often each element is repeated along each spatial axis, or None if Resize does something else."""
    x, y, scales = resize.inputs[0], resize.outputs[0], operand(resize, 2)
    if rank(x) < 3 or 0 in x.shape or resize.attrs.get("mode", "nearest") != "nearest" or list(x.shape[:2]) != list(y.shape[:2]):
        return None
    mode = resize.attrs.get("coordinate_transformation_mode", "half_pixel")
    rounding = resize.attrs.get("nearest_mode", "round_prefer_floor")
    nearest = mode in ("half_pixel", "pytorch_half_pixel", "half_pixel_symmetric") and rounding.startswith("round_")
    if not nearest and (mode, rounding) != ("asymmetric", "floor"):
        return None
    if any(n % m for m, n in zip(x.shape, y.shape, strict=True)):
        return None
    factors = [n // m for m, n in zip(x.shape, y.shape, strict=True)]
    if scales is not None:
        given = constant(scales)
        exact = [1.0] * rank(x)
        for axis, s in zip(resize.attrs.get("axes", range(rank(x))), given.values.tolist() if given else (), strict=False):
            exact[axis] = s
        if given is None or exact != factors:
            return None
    return factors[2:]


def _pads(m: Enlarged, factors: list[int]) -> list[int] | str:
    """The convolution's padding of the enlarged image, starts before ends, or why there is none; less than 0 cuts off."""
    attrs, k = m.conv.attrs, len(factors)
    if attrs.get("auto_pad", "NOTSET") not in ("NOTSET", "VALID"):
        return "auto_pad depends on the enlarged extents"
    own = list(attrs.get("pads", [0] * 2 * k))
    if m.pad is None:
        return own
    amounts = amounts_of(m.pad)
    if m.pad.attrs.get("mode", "constant") not in ("reflect", "edge") or amounts is None or amounts[:, :2].any() or any(own):
        return "the padding between them does not repeat the edge"
    across = amounts[:, 2:].reshape(-1)
    if any(not 0 < a < s for a, s in zip(across, factors * 2, strict=True)):
        return "the padding between them is none, or reaches beyond the outermost pixel"
    return [int(a) - s for a, s in zip(across, factors * 2, strict=True)]


def _check(edit: Editor, m: Enlarged) -> str | None:
    factors, attrs = _factors(m.resize), m.conv.attrs
    if factors is None or max(factors) == 1:
        return "it does not repeat each pixel of an image so many times"
    if not all(edit.only_use(n.outputs[0]) for n in (m.resize, m.pad) if n):
        return "the enlarged image is used otherwise too"
    w, b = m.conv.inputs[1], operand(m.conv, 2)
    if constant(w) is None or (b is not None and constant(b) is None):
        return "weights and bias are not constant"
    if attrs.get("group", 1) != 1 or any(v != 1 for key in ("strides", "dilations") for v in attrs.get(key, ())):
        return "it has groups, strides or dilations"
    if any(s > 1 and r == 1 for s, r in zip(factors, w.shape[2:], strict=True)):
        return "a kernel of one tap has as much to do afterwards"
    taps = math.prod(round_up(r + s - 1, s) for s, r in zip(factors, w.shape[2:], strict=True))
    size = taps * w.shape[0] * w.shape[1]
    if size > max(GROWTH * math.prod(w.shape), math.prod(m.resize.outputs[0].shape)):
        return f"its weights would become {size} numbers"
    pads = _pads(m, factors)
    if isinstance(pads, str):
        return pads
    if any(p >= r for p, r in zip(pads, [*w.shape[2:]] * 2, strict=True)):
        return "it pads with whole kernels"
    return None


def _weights(w: gs.Constant, factors: list[int]) -> Weight:
    """(C, O, R + s - 1, …) of w (O, C, R, …)."""
    m = len(factors)
    out = calculate("pad", w, before=(0,) * (m + 2), after=(0, 0) + (1,) * m)  # the tap that is not there
    for axis, s in enumerate(factors, 2):
        r = w.shape[axis]
        taps = [np.array([r - 1 - t + j if 0 <= r - 1 - t + j < r else r for t in range(r + s - 1)]) for j in range(s)]
        parts = [calculate("take", out, k, axis=axis) for k in taps]
        out = parts[0]
        for part in parts[1:]:
            out = calculate("add", out, part)
    return rounded(calculate("transpose", out, axes=(1, 0, *range(2, m + 2))), w.dtype)


def _apply(edit: Editor, m: Enlarged) -> None:
    factors, x, w, y = _factors(m.resize), m.resize.inputs[0], m.conv.inputs[1], m.conv.outputs[0]
    assert factors is not None
    pads = _pads(m, factors)
    assert not isinstance(pads, str)
    if m.pad is not None:
        one = [0, 0] + [1] * len(factors)
        shape = [n + 2 * p for n, p in zip(x.shape, one, strict=True)]
        amounts = literal(edit.name(f"{name_of(m.pad)}/amounts"), one * 2, np.int64)
        x = edit.add("Pad", [x, amounts], m.pad, shape, mode="edge")
    cut = [r - 1 - p for r, p in zip([*w.shape[2:]] * 2, pads, strict=True)]
    inputs = [x, edit.named(_weights(w, factors), f"{w.name}/enlarged"), *m.conv.inputs[2:3]]
    edit.add("ConvTranspose", inputs, m.conv, into=y, strides=factors, pads=cut)


REWRITES = (Rewrite("conv(nearest(x), w) => conv_transpose(x, w')", ("Conv",), _match, _check, _apply),)
