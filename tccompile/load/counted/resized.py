"""Resize to sizes that are computed of the data: each element is a sum of some at computed places."""

from __future__ import annotations

import numpy as np
import onnx
import onnx.helper

from tccompile.errors import UnsupportedError
from tccompile.load.counted.elements import rows
from tccompile.load.counted.late import numbers
from tccompile.load.sizes import INT64, Number, Size, Sizes
from tccompile.load.valid import title


def resize(s: Sizes, node: onnx.NodeProto) -> bool:
    """Along each axis a sum of elements at computed places: to sizes of which some are computed."""
    x, wanted = node.input[0], numbers(s, 3)
    if wanted is None or not any(isinstance(n, Size) for n in wanted):
        return rows(s, node)
    axes = s.attribute("axes", range(len(s.shape(x))))
    mode, how = s.attribute("mode", b"nearest"), s.attribute("coordinate_transformation_mode", b"half_pixel")
    plain = not s.attribute("antialias", 0) and not s.attribute("exclude_outside", 0)
    if mode not in (b"linear", b"cubic") or how not in PLACES or not plain or len(wanted) != len(axes):
        why = "sizes that are computed at run time are not supported in this mode"
        raise UnsupportedError(f"{title(node)}: {why}; export the model with constant sizes, or end it before this node")
    for axis, n in zip(axes, wanted, strict=True):
        axis %= len(s.shape(x))
        if n != s.of(x).get(axis, s.shape(x)[axis]):
            if axis in s.of(x):
                raise s.refuse(x, axis)
            x = _resized(s, x, axis, n, mode == b"cubic", how)
    s.says(x, s.of(x))
    s.instead("Identity", [x])
    return s.says(node.output[0], s.of(x)) or True


PLACES = (b"half_pixel", b"pytorch_half_pixel", b"align_corners", b"asymmetric")


def _resized(s: Sizes, x: str, axis: int, n: Number, cubic: bool, how: bytes) -> str:
    """x with so many elements along an axis, of two or four that lie next to each other each."""
    own, extent = dict(s.of(x)), s.shape(x)[axis]
    bound = n.limit if isinstance(n, Size) else n
    size = s.add("Cast", [n.count if isinstance(n, Size) else s.constant([n])], to=onnx.TensorProto.FLOAT)
    at = _place(s, s.constant(np.arange(bound), np.float32), size, extent, how)
    if not cubic:
        at = s.add("Min", [s.add("Max", [at, s.constant([0], np.float32)]), s.constant([extent - 1], np.float32)])
    low = s.add("Floor", [at])
    beyond, first = s.add("Sub", [at, low]), s.add("Cast", [low], to=INT64)
    terms = []
    for k, weight in _weights(s, beyond, cubic):
        place = s.add("Add", [first, s.constant([k])])
        place = s.add("Min", [s.add("Max", [place, s.constant([0])]), s.constant([extent - 1])])
        with s.as_bounds(x):
            row = s.add("Gather", [x, place], axis=axis)
            weight = s.add("Reshape", [weight, s.constant([-1, *[1] * (len(s.shape(x)) - 1 - axis)])])
            terms.append(s.add("Mul", [row, weight]))
    y = terms[0]
    for term in terms[1:]:
        y = s.add("Add", [y, term])
    s.says(y, {**own, **({axis: n} if isinstance(n, Size) else {})})
    return y


def _place(s: Sizes, out: str, size: str, extent: int, how: bytes) -> str:
    """Where along an axis of the input the elements of the output lie."""

    def number(value: float) -> str:
        return s.constant([value], np.float32)

    if how == b"align_corners":
        last = s.add("Max", [s.add("Sub", [size, number(1)]), number(1)])
        return s.add("Div", [s.add("Mul", [out, number(extent - 1)]), last])
    scale = s.add("Div", [s.add("Max", [size, number(1)]), number(extent)])
    if how == b"asymmetric":
        return s.add("Div", [out, scale])
    at = s.add("Sub", [s.add("Div", [s.add("Add", [out, number(0.5)]), scale]), number(0.5)])
    if how == b"pytorch_half_pixel":
        return s.add("Where", [s.add("Greater", [size, number(1)]), at, number(0)])
    return at


def _weights(s: Sizes, beyond: str, cubic: bool) -> list[tuple[int, str]]:
    """What the elements about a place count, by how far it is beyond the first of them."""

    def polynomial(t: str, *factors: float) -> str:
        y = s.constant([factors[0]], np.float32)
        for factor in factors[1:]:
            y = s.add("Add", [s.add("Mul", [y, t]), s.constant([factor], np.float32)])
        return y

    rest = s.add("Sub", [s.constant([1], np.float32), beyond])
    if not cubic:
        return [(0, rest), (1, beyond)]
    a = s.attribute("cubic_coeff_a", -0.75)
    far = [polynomial(s.add("Add", [t, s.constant([1], np.float32)]), a, -5 * a, 8 * a, -4 * a) for t in (beyond, rest)]
    near = [polynomial(t, a + 2, -(a + 3), 0, 1) for t in (beyond, rest)]
    return [(-1, far[0]), (0, near[0]), (1, near[1]), (2, far[1])]
