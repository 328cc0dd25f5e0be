"""Convolution and pooling: sums, products and maxima over sliding windows, on channels-last arrays."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

import numpy as np

from tccompile.ir.expr import Shape
from tccompile.ir.program import Conv, Pool

BLOCK = 1 << 20
"""Elements of a block of gathered windows: 4 MB, which a core's caches hold while BLAS reads them."""


def conv(op: Conv, values: Mapping[str, np.ndarray], shape: Shape) -> np.ndarray:
    """Cross-correlation of x (N, C, H, W) with w (O, C/groups, R, S), or of rank 3: `shape` (N, O, P, Q).

    Gathered windows times a matrix of weights, a block of output rows at a time; one group at a time if there are several.
    """
    x, w = _image(values[op.x]), _image(values[op.w])
    n, o, p, q = _image_shape(shape)
    strides, dilations = _pair(op.strides, 1), _pair(op.dilations, 1)
    window = (w.shape[2], w.shape[3])
    x = _padded(x, _pair(op.pads, 0), window, strides, dilations, (p, q), 0.0)
    y = np.empty((n, p, q, o), np.float32)
    if 0 in y.shape or 0 in w.shape:
        y[...] = 0
    elif w.shape[1] == 1 and op.groups > 1:
        _depthwise(x, w, y, strides, dilations)
    else:
        taps = _windows(x, window, strides, dilations, (p, q))  # (N, P, Q, R, S, C), a view
        c, k = w.shape[1], o // op.groups
        for g in range(op.groups):
            matrix = w[g * k : (g + 1) * k].transpose(0, 2, 3, 1).reshape(k, -1).T  # (RSC, K)
            for rows in _blocks(y.shape, taps.shape[3:5], c):
                block = taps[rows][..., g * c : (g + 1) * c]
                y[rows][..., g * k : (g + 1) * k] = (block.reshape(-1, len(matrix)) @ matrix).reshape(*block.shape[:3], k)
    return y.transpose(0, 3, 1, 2).reshape(shape)


def _depthwise(x: np.ndarray, w: np.ndarray, y: np.ndarray, strides: Shape, dilations: Shape) -> None:
    """Each input channel has its own O/C filters: products tap by tap, on a block of output rows at a time."""
    p, q, o = y.shape[1:]
    r, s = w.shape[2:]
    many = o // x.shape[3]
    weights = np.ascontiguousarray(w[:, 0].transpose(1, 2, 0))  # (R, S, O)
    taps = _windows(x, (r, s), strides, dilations, (p, q))
    for rows in _blocks(y.shape, (1, 1), o):
        total = y[rows]
        total[...] = 0
        for i in range(r):
            for j in range(s):
                tap = taps[rows][:, :, :, i, j]
                total += (np.repeat(tap, many, axis=3) if many > 1 else tap) * weights[i, j]


def pool(op: Pool, values: Mapping[str, np.ndarray], shape: Shape) -> np.ndarray:
    """The largest element or the mean of each window of x (N, C, H, W) or (N, C, W)."""
    x = _image(values[op.x])
    p, q = _image_shape(shape)[2:]
    window, strides, dilations = _pair(op.window, 1), _pair(op.strides, 1), _pair(op.dilations, 1)
    pads, ends = _pair(op.pads, 0), _pair(op.end_pads, 0)
    largest = op.kind == "max"
    image = _padded(x, pads, window, strides, dilations, (p, q), -np.inf if largest else 0.0)
    taps = _windows(image, window, strides, dilations, (p, q))
    y = np.full(taps.shape[:3] + taps.shape[5:], -np.inf if largest else 0.0, np.float32)
    rows, columns = (
        _meeting(x.shape[2 + a], extent, window[a], strides[a], pads[a], dilations[a]) for a, extent in enumerate((p, q))
    )
    for i in rows:
        for j in columns:
            if largest:
                np.maximum(y, taps[:, :, :, i, j], out=y)
            else:
                y += taps[:, :, :, i, j]
    if not largest:
        counts = []
        for a, extent in enumerate((p, q)):
            low, high = (-pads[a], x.shape[2 + a] + ends[a]) if op.count_pads else (0, x.shape[2 + a])
            first = np.arange(extent) * strides[a] - pads[a]  # taps at first + k · dilation that lie from low to high
            before, until = (np.clip(-((first - edge) // dilations[a]), 0, window[a]) for edge in (low, high))
            counts.append(until - before)
        with np.errstate(all="ignore"):
            y /= (counts[0][:, None] * counts[1]).astype(np.float32)[:, :, None]
    return y.transpose(0, 3, 1, 2).reshape(shape)


def _meeting(n: int, outputs: int, window: int, stride: int, pad: int, dilation: int) -> list[int]:
    """The taps of a window that any output has on one of `n` elements: not those that all have in the padding."""
    first = np.arange(window) * dilation - pad
    at = first + np.maximum(-(first // stride), 0) * stride  # the first place of a tap that is not before the elements
    return np.flatnonzero((at < n) & (at <= first + (outputs - 1) * stride)).tolist()


def _image(x: np.ndarray) -> np.ndarray:
    """As float32 of rank 4: a signal is an image of one row."""
    x = x.astype(np.float32, copy=False)
    return x if x.ndim == 4 else x[:, :, None]


def _image_shape(shape: Shape) -> tuple[int, int, int, int]:
    n, c, *spatial = shape
    p, q = _pair(tuple(spatial), 1)
    return n, c, p, q


def _pair(values: Shape, row: int) -> tuple[int, int]:
    """One value for each of H and W; a signal's H has `row`."""
    return values if len(values) == 2 else (row, *values)  # type: ignore[return-value]


def _padded(x: np.ndarray, pads: Shape, window: Shape, strides: Shape, dilations: Shape, out: Shape, fill: float) -> np.ndarray:
    """x (N, C, H, W) as a contiguous channels-last array that starts `pads` before its edges and holds just all windows."""
    need = [(o - 1) * s + (k - 1) * d + 1 for o, s, k, d in zip(out, strides, window, dilations, strict=True)]
    last = x.transpose(0, 2, 3, 1)
    if pads == (0, 0) and need[0] <= x.shape[2] and need[1] <= x.shape[3]:
        return np.ascontiguousarray(last)
    image = np.full((x.shape[0], max(need[0], 0), max(need[1], 0), x.shape[1]), fill, np.float32)
    h, w = (max(min(x.shape[2 + a], need[a] - pads[a]), 0) for a in (0, 1))
    image[:, pads[0] : pads[0] + h, pads[1] : pads[1] + w] = last[:, :h, :w]
    return image


def _windows(x: np.ndarray, window: Shape, strides: Shape, dilations: Shape, out: Shape) -> np.ndarray:
    """A view (N, P, Q, R, S, C) of x (N, H, W, C)."""
    n, h, w, c = x.strides
    return np.lib.stride_tricks.as_strided(
        x,
        (x.shape[0], *out, *window, x.shape[3]),
        (n, h * strides[0], w * strides[1], h * dilations[0], w * dilations[1], c),
        writeable=False,
    )


def _blocks(y: Shape, window: Shape, channels: int) -> Iterator[tuple[slice, slice, slice]]:
    """Slices of (N, P, Q) whose windows have about BLOCK elements each."""
    n, p, q, _ = y
    pixels = max(BLOCK // (math.prod(window) * channels), 1)
    images, rows, columns = max(pixels // (p * q), 1), min(max(pixels // q, 1), p), min(pixels, q)
    for i in range(0, n, images):
        for r in range(0, p, rows):
            for c in range(0, q, columns):
                yield slice(i, i + images), slice(r, r + rows), slice(c, c + columns)
