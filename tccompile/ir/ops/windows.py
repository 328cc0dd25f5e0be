"""What convolution and pooling share: windows that slide over images, channels last."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from tccompile.ir.extent import Shape
from tccompile.ir.ops.rules import EXTENT, in_proportion


def fit(window: Shape, strides: Shape, pads: Shape, dilations: Shape, y: Shape) -> bool:
    """Whether parameters of a convolution or a pooling fit their rank, and what all windows cover is no more than EXTENT."""
    return (
        len(y) in (3, 4)
        and len(window) == len(strides) == len(pads) == len(dilations) == len(y) - 2
        and all(p >= 0 for p in pads)
        and all(k >= 1 and s >= 1 and d >= 1 for k, s, d in zip(window, strides, dilations, strict=True))
        and all(p * s + k * d < EXTENT for p, s, k, d in zip(y[2:], strides, window, dilations, strict=True))
    )


def meeting(n: int, outputs: int, window: int, stride: int, pad: int, dilation: int) -> range:
    """The taps of a window but those at either end that all outputs have in the padding around `n` elements."""
    first = max(min(-(((outputs - 1) * stride - pad) // dilation), pad // dilation), 0)
    return range(first, max(min(window, -(-(n + pad) // dilation)), first))


def trimmed(
    extents: Shape, out: Shape, window: Shape, strides: Shape, pads: Shape, dilations: Shape
) -> tuple[tuple[range, ...], tuple[int, ...]]:
    """The taps along each axis that can meet the image, and the pads of a window of these alone."""
    taps = tuple(meeting(*side) for side in zip(extents, out, window, strides, pads, dilations, strict=True))
    return taps, tuple(pad - kept.start * d for pad, kept, d in zip(pads, taps, dilations, strict=True))


def cover_no_more(x: Shape, window: Shape, strides: Shape, pads: Shape, dilations: Shape, y: Shape) -> bool:
    """Whether windows, without taps that are in the padding everywhere, cover no more than an image and some padding."""
    taps, _ = trimmed(x[2:], y[2:], window, strides, pads, dilations)
    each = zip(y[2:], taps, strides, dilations, strict=True)
    sides = (max(p - 1, 0) * s + max(len(kept) - 1, 0) * d + 1 for p, kept, s, d in each)
    return in_proportion(math.prod(x[:2]) * math.prod(sides), x, y)


BLOCK = 1 << 20
"""Elements of a block of gathered windows: 4 MB, which a core's caches hold while BLAS reads them."""


def as_image(x: np.ndarray) -> np.ndarray:
    """As float32 of rank 4: a signal is an image of one row."""
    x = x.astype(np.float32, copy=False)
    return x if x.ndim == 4 else x[:, :, None]


def image_shape(shape: Shape) -> tuple[int, int, int, int]:
    n, c, *spatial = shape
    p, q = pair(tuple(spatial), 1)
    return n, c, p, q


def pair(values: Shape, row: int) -> tuple[int, int]:
    """One value for each of H and W; a signal's H has `row`."""
    return values if len(values) == 2 else (row, *values)  # type: ignore[return-value]


def padded(x: np.ndarray, pads: Shape, window: Shape, strides: Shape, dilations: Shape, out: Shape, fill: float) -> np.ndarray:
    """x (N, C, H, W) as a contiguous channels-last array that starts `pads` before its edges and holds just all windows."""
    need = [(o - 1) * s + (k - 1) * d + 1 for o, s, k, d in zip(out, strides, window, dilations, strict=True)]
    last = x.transpose(0, 2, 3, 1)
    if pads == (0, 0) and need[0] <= x.shape[2] and need[1] <= x.shape[3]:
        return np.ascontiguousarray(last)
    image = np.full((x.shape[0], max(need[0], 0), max(need[1], 0), x.shape[1]), fill, np.float32)
    h, w = (max(min(x.shape[2 + a], need[a] - pads[a]), 0) for a in (0, 1))
    image[:, pads[0] : pads[0] + h, pads[1] : pads[1] + w] = last[:, :h, :w]
    return image


def windows(x: np.ndarray, window: Shape, strides: Shape, dilations: Shape, out: Shape) -> np.ndarray:
    """A view (N, P, Q, R, S, C) of x (N, H, W, C)."""
    n, h, w, c = x.strides
    return np.lib.stride_tricks.as_strided(
        x,
        (x.shape[0], *out, *window, x.shape[3]),
        (n, h * strides[0], w * strides[1], h * dilations[0], w * dilations[1], c),
        writeable=False,
    )


def blocks(y: Shape, window: Shape, channels: int) -> Iterator[tuple[slice, slice, slice]]:
    """Slices of (N, P, Q) whose windows have about BLOCK elements each."""
    n, p, q, _ = y
    pixels = max(BLOCK // (math.prod(window) * channels), 1)
    images, rows, columns = max(pixels // (p * q), 1), min(max(pixels // q, 1), p), min(pixels, q)
    for i in range(0, n, images):
        for r in range(0, p, rows):
            for c in range(0, q, columns):
                yield slice(i, i + images), slice(r, r + rows), slice(c, c + columns)
