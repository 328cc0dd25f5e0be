"""Operators of a user's, for the tests: with kernels that take what kernels may take."""

from __future__ import annotations

import numpy as np
from numba import cuda, float32, int64

import tccompile as tc

LANES = 64


def spread_numpy(x, w, steps, scale, names=""):
    y = x @ w * scale + steps[0]
    return y, y.max(1) - steps[1]


@cuda.jit(device=True, inline="always")
def dot(x, w, row, column):
    total = float32(0)
    for k in range(x.shape[1]):
        total += float32(x[row, k]) * float32(w[k, column])
    return total


@tc.op(
    "test::Spread",
    out=lambda x, w: (x.like((x.shape[0], w.shape[1])), x.like((x.shape[0],))),
    grid=lambda x: x.shape[0],
    threads=LANES,
    shared=4 * LANES,
    scratch=lambda y: y.like(dtype="float32"),
    reference=spread_numpy,
    floats="any",
)
def spread(scratch, x, w, y, largest, steps, scale):
    """Two outputs, numbers and tuples of them, working memory, shared memory, a helper; a block takes a row."""
    row, lane = cuda.blockIdx.x, cuda.threadIdx.x
    held = cuda.shared.array(0, float32)
    for column in range(lane, w.shape[1], LANES):
        scratch[row, column] = dot(x, w, row, column) * float32(scale) + float32(steps[0])
    cuda.syncthreads()
    held[lane] = float32(-np.inf)
    for column in range(lane, w.shape[1], LANES):
        y[row, column] = scratch[row, column]
        held[lane] = max(held[lane], scratch[row, column])
    cuda.syncthreads()
    if lane == 0:
        for k in range(LANES):
            held[0] = max(held[0], held[k])
        largest[row] = held[0] - float32(steps[1])


def peak_numpy(x, bias=None):
    x = x if bias is None else x + bias
    return x.max(1), x.argmax(1)


@tc.op(
    "test::Peak",
    out=lambda x: (x.like((x.shape[0],)), x.like((x.shape[0],), "int64")),
    grid=lambda x: -(-x.shape[0] // 32),
    threads=32,
    reference=peak_numpy,
)
def peak(x, bias, value, place):
    """Outputs of two types, and an input that may be left out; in any layout."""
    row = cuda.grid(1)
    if row >= x.shape[0]:
        return
    best, found = float32(-np.inf), 0
    for k in range(x.shape[1]):
        v = x[row, k]
        if bias is not None:
            v += bias[k]
        if v > best:
            best, found = v, k
    value[row], place[row] = best, int64(found)


@tc.op(
    "test::Names",
    out=lambda function: function.like(),
    grid=1,
    threads=32,
    reference=lambda function, i32, cuda=(1, 2): function * i32 + cuda[1],
)
@cuda.jit
def names(kernel, function, i32, cuda):
    """Parameters of any names, in any order; a function that Numba has been told of."""
    for k in range(function.shape[0]):
        kernel[k] = function[k] * float32(i32) + float32(cuda[1])


@tc.op("test::Ramp", out=lambda x, low, high: x.like(), elementwise=True)
def ramp(x, low, high=1.0):
    return tc.clip((x - low) / (high - low), 0.0, 1.0)


@tc.op(
    "test::Parts",
    out=lambda x, y: (x.like(np.broadcast_shapes(x.shape, y.shape)), x.like(np.broadcast_shapes(x.shape, y.shape), "int32")),
    elementwise=True,
)
def parts(x, y):
    """Two outputs, of which one is of integers, of inputs that are broadcast."""
    return tc.where(x > y, tc.sin(x), abs(y) ** 1.5), x * 3 // 1 + tc.index(-1) % 2
