"""Resampling. Each axis becomes a table of taps; nearest neighbours that follow a formula become a view."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import onnx_graphsurgeon as gs

from tccompile.ir.expr import ACC, Epilogue, Expr, Index, View, call, cast, constant, coord, identity_view, quotient, reshape_view
from tccompile.ir.extent import Shape
from tccompile.ir.ops import Resize
from tccompile.ir.tensor import Tensor
from tccompile.ir.types import DType
from tccompile.load.late import is_late
from tccompile.lower.builder import IMAGE, Builder, Reads, shape_of
from tccompile.lower.resize_late import late_axis, late_resize

NARROW = (DType.I8, DType.U8, DType.I16, DType.U16, DType.BOOL)
"""Integers that floats hold exactly."""


BYTES = (DType.I8, DType.U8)

MOST = 1 << 24
"""Elements of an axis, and taps of all of them: tables of them take up to 1 GiB while they are made."""


@dataclass(frozen=True)
class Axis:
    """How one axis is resampled: y[o] = sum over t of weights[o, t] * x[index[o, t]], or the extrapolation value outside."""

    axis: int
    index: np.ndarray  # int32, (output extent, taps)
    weights: np.ndarray  # float32, the same
    inside: np.ndarray  # bool, (output extent,)

    def identity(self, extent: int) -> bool:
        """Whether it leaves the axis, of this extent, as it is."""
        same = self.index.shape == (extent, 1) and np.array_equal(self.index[:, 0], np.arange(extent))
        return same and bool(self.inside.all() and (self.weights == 1).all())


def resize(node: gs.Node, b: Builder) -> None:
    x, y = node.inputs[0], node.outputs[0]
    if any(is_late(late_axis(y.name, a)) for a in range(len(y.shape))):
        late_resize(node, b)
        return
    axes = _axes(node, b)
    if b.attr("mode", "nearest") == "nearest" and all(a.inside.all() for a in axes):
        view = nearest_view(b.value(x).name, {a.axis: a.index[:, 0] for a in axes}, shape_of(x), shape_of(y))
        if view is not None:
            b.copy(view, b.result(y, b.order_for(shape_of(y), x)))
            return
    if not b.dtype(x).is_float and not _takes(b.dtype(x), b):
        raise b.refuse(f"it resamples {b.dtype(x).value} in mode {b.attr('mode', 'nearest')}", "cast its input to float")
    axes = [a for a in axes if not a.identity(x.shape[a.axis])]
    if axes and len(x.shape) in IMAGE and all(a.axis >= 2 for a in axes):
        _resample(b, _floats(b, x), axes, b.result(y, IMAGE[len(y.shape)]))
        return
    source = _floats(b, x)
    for a in axes:
        source = _along(b, source, a)
    reads = Reads(b, shape_of(y))
    b.compute(b.result(y), _replaced(b, axes, reads.view(identity_view(source.name, source.rank)), reads), reads)


def _takes(dtype: DType, b: Builder) -> bool:
    """Whether integers are resampled: as elements, or, of bytes, as sums of them, which are cut off as ONNX Runtime does."""
    mode = b.attr("mode", "nearest")
    return dtype in NARROW if mode == "nearest" else mode == "linear" and dtype in BYTES and not b.attr("antialias", 0)


def nearest_view(tensor: str, index: dict[int, np.ndarray], tensor_shape: Shape, shape: Shape) -> View | None:
    """The view that reads element index[axis][o] along each axis, or None if an axis follows no formula."""
    formulas = []
    for axis, n in enumerate(tensor_shape):
        found = _formula(axis, index[axis], n, shape) if axis in index else coord(axis)
        if found is None:
            return None
        formulas.append(found)
    return View(tensor, tuple(formulas))


def _formula(axis: int, index: np.ndarray, n: int, shape: Shape) -> Index | None:
    """The first of o / s, k * o + c, o * n / m that gives these indices for all o."""
    out = len(index)
    o = coord(axis)
    candidates = [quotient(o, out // n, shape)] if out % n == 0 else []
    if out > 1:
        candidates.append(o * int(index[1] - index[0]) + int(index[0]))
    else:
        candidates.append(constant(int(index[0])))
    common = math.gcd(n, out)
    candidates.append(quotient(o * (n // common), out // common, shape))
    for formula in candidates:
        values = np.broadcast_to(formula.evaluate(shape), [m if a == axis else 1 for a, m in enumerate(shape)])
        if np.array_equal(values.reshape(-1), index):
            return formula
    return None


def _floats(b: Builder, t: gs.Tensor) -> Tensor:
    """The input as floats, as an image where it has the rank of one."""
    if b.dtype(t) is DType.F32:
        return b.image(t) if len(t.shape) in IMAGE else b.operand(t)
    x = b.value(t)
    y = b.new(f"{x.name}.float", x.shape, order=IMAGE.get(x.rank))
    reads = Reads(b, x.shape)
    return b.compute(y, reads.view(identity_view(x.name, x.rank)), reads)


def _resample(b: Builder, x: Tensor, axes: list[Axis], y: Tensor) -> None:
    """y = x, an image, resampled along spatial axes."""
    reads = Reads(b, y.shape)
    expr = _replaced(b, axes, ACC, reads)
    b.emit(
        Resize,
        y,
        x=x.name,
        axes=tuple(a.axis for a in axes),
        index=tuple(b.literal(f"{y.name}.index{a.axis}", a.index).name for a in axes),
        weights=tuple(b.literal(f"{y.name}.weights{a.axis}", a.weights).name for a in axes),
        epilogue=Epilogue(cast(expr, y.dtype.compute), tuple(reads.views)),
    )


def _along(b: Builder, x: Tensor, a: Axis) -> Tensor:
    """x resampled along one axis of any tensor: what comes before it as a batch, and what comes after it as channels."""
    before, n, after = math.prod(x.shape[: a.axis]), x.shape[a.axis], math.prod(x.shape[a.axis + 1 :])
    out = len(a.index)
    shape = (*x.shape[: a.axis], out, *x.shape[a.axis + 1 :])
    batch = reshape_view(x.name, x.shape, (before, n, after)).at([coord(0), coord(2), coord(1)], (before, after, n))
    image = b.copy(batch, b.new(f"{x.name}.image", (before, after, n), order=IMAGE[3]))
    resized = b.new(f"{x.name}.resized", (before, after, out), order=IMAGE[3])
    _resample(b, image, [Axis(2, a.index, a.weights, np.ones(out, bool))], resized)
    i, j, k = reshape_view(resized.name, (before, out, after), shape).index
    return b.copy(View(resized.name, (i, k, j)), b.new(f"{x.name}.whole", shape))


def _replaced(b: Builder, axes: list[Axis], value: Expr, reads: Reads) -> Expr:
    """`value`, or the extrapolation value where an axis reads outside of x."""
    outside = [a for a in axes if not a.inside.all()]
    fill = float(b.attr("extrapolation_value", 0.0))
    for a in outside:
        mask = b.literal(f"{b.nodes[0]}.inside{a.axis}", a.inside.astype(np.float32))
        value = call("where", call("greater", reads.view(View(mask.name, (coord(a.axis),))), 0.0), value, fill)
    return value


# --- Tables ----------------------------------------------------------------------------------------------------------


def _axes(node: gs.Node, b: Builder) -> list[Axis]:
    """The node's tables, for the axes that its scales, sizes and region of interest are about."""
    shape, out = shape_of(node.inputs[0]), shape_of(node.outputs[0])
    axes = [b.axis(a, len(shape)) for a in b.attr("axes") or range(len(shape))]
    given = (b.array(i, what) for i, what in ((1, "region of interest"), (2, "scales"), (3, "sizes")))
    roi, scales, sizes = (None if values is None else values.reshape(-1) for values in given)
    extents = [shape[a] for a in axes]
    if scales is not None and scales.size:
        factors = [np.float32(s) for s in scales]
    else:
        assert sizes is not None
        factors = [np.float32(m) / np.float32(n) for m, n in zip(sizes, extents, strict=True)]
        policy = b.attr("keep_aspect_ratio_policy", "stretch")
        if policy != "stretch":
            factors = [min(factors) if policy == "not_larger" else max(factors)] * len(factors)
    mode = b.attr("coordinate_transformation_mode", "half_pixel")
    half = len(roi) // 2 if roi is not None and mode == "tf_crop_and_resize" else 0  # others have no use for it
    tables = []
    for i, (axis, factor) in enumerate(zip(axes, factors, strict=True)):
        if out[axis] > MOST:
            raise b.refuse(f"it makes {out[axis]} elements along axis {axis}", f"make at most {MOST}")
        region = (float(roi[i]), float(roi[half + i])) if roi is not None and half else (0.0, 1.0)
        at = coordinates(mode, shape[axis], out[axis], factor, region)
        tables.append(_table(b, axis, shape[axis], at, factor))
    return tables


def coordinates(mode: str, n: int, out: int, scale: np.float32, region: tuple[float, float] = (0.0, 1.0)) -> np.ndarray:
    """Where each output element lies on the input's axis, in float32 as ONNX Runtime computes it.

    n, out  the extents of input and output
    region  start and end of the region of interest, as fractions of the input (tf_crop_and_resize)
    """
    o = np.arange(out, dtype=np.float32)
    one, half = np.float32(1), np.float32(0.5)
    start, end = np.float32(region[0]), np.float32(region[1])
    match mode:
        case "asymmetric":
            return o / scale
        case "half_pixel":
            return (o + half) / scale - half
        case "pytorch_half_pixel":
            return (o + half) / scale - half if out > 1 else o * 0
        case "half_pixel_symmetric":
            adjustment = np.float32(out) / (scale * np.float32(n))
            return np.float32(n) / 2 * (one - adjustment) + (o + half) / scale - half
        case "align_corners":
            return o * np.float32(n - 1) / np.float32(out - 1) if out > 1 else o
        case "tf_half_pixel_for_nn":
            return (o + half) / scale
        case _:  # tf_crop_and_resize
            if out > 1:
                return start * np.float32(n - 1) + o * (end - start) * np.float32(n - 1) / np.float32(out - 1)
            return half * (start + end) * np.float32(n - 1) + o


NEAREST: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "round_prefer_floor": lambda x: np.ceil(x - np.float32(0.5)),
    "round_prefer_ceil": lambda x: np.floor(x + np.float32(0.5)),
    "floor": np.floor,
    "ceil": np.ceil,
}
"""nearest_mode: which neighbour of a coordinate is the nearest."""


def _table(b: Builder, axis: int, n: int, at: np.ndarray, scale: np.float32) -> Axis:
    mode = b.attr("mode", "nearest")
    inside = np.ones(len(at), bool)
    if b.attr("coordinate_transformation_mode") == "tf_crop_and_resize":
        inside = (at >= 0) & (at <= n - 1)
    if mode == "nearest":
        index = NEAREST[b.attr("nearest_mode", "round_prefer_floor")](at).astype(np.int64)[:, None]
        weights = np.ones(index.shape)
    else:
        shrink = min(float(scale), 1.0) if b.attr("antialias", 0) else 1.0
        radius, weight = (1.0, _triangle) if mode == "linear" else (2.0, _cubic(float(b.attr("cubic_coeff_a", -0.75))))
        reach = math.ceil(2 * radius / shrink)
        if len(at) * reach > MOST:
            raise b.refuse(
                f"it makes {len(at)} elements along axis {axis} of {reach} each", f"make at most {MOST} in all, in several steps"
            )
        index, weights = taps(at.astype(np.float64), radius, shrink, weight)
        if b.attr("exclude_outside", 0):
            weights = np.where((index >= 0) & (index < n), weights, 0.0)
        weights = weights / weights.sum(1, keepdims=True)
    index = np.clip(index, 0, n - 1)
    used = (weights != 0).any(0)
    return Axis(axis, index[:, used].astype(np.int32), weights[:, used].astype(np.float32), inside)


def taps(
    at: np.ndarray, radius: float, shrink: float, weight: Callable[[np.ndarray], np.ndarray]
) -> tuple[np.ndarray, np.ndarray]:
    """The neighbours of each coordinate within radius / shrink, and their weights: weight((neighbour - coordinate) * shrink).

    With shrink < 1 the filter is widened as it must be to remove what a smaller image cannot show (antialias).
    """
    first = np.floor(at - radius / shrink).astype(np.int64) + 1
    count = int(np.ceil(2 * radius / shrink))
    index = first[:, None] + np.arange(count)
    return index, weight((index - at[:, None]) * shrink)


def _triangle(d: np.ndarray) -> np.ndarray:
    return np.maximum(1.0 - np.abs(d), 0.0)


def _cubic(a: float) -> Callable[[np.ndarray], np.ndarray]:
    """Keys' cubic convolution kernel (1981), of support [-2, 2]."""

    def weight(d: np.ndarray) -> np.ndarray:
        d = np.abs(d)
        near = ((a + 2) * d - (a + 3)) * d * d + 1
        far = ((a * d - 5 * a) * d + 8 * a) * d - 4 * a
        return np.where(d <= 1, near, np.where(d < 2, far, 0.0))

    return weight
