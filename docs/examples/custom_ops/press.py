"""Operators for prints that no runtime has: a halftone screen, and cells around seeds, whose distances Tensor Cores make."""

import math

import numpy as np
from numba import cuda, float32

import tccompile as tc
from tccompile.kernels.ptx import mma, simt


@tc.op("press::Halftone", out=lambda x, pitch, depth: x.like(), elementwise=True)
def halftone(x, pitch, depth):
    across, along = (tc.index(2) + tc.index(3)) * (np.pi / pitch), (tc.index(2) - tc.index(3)) * (np.pi / pitch)
    return x + depth * tc.cos(across) * tc.cos(along)  # dots on a grid that is turned by 45 degrees


def cells_numpy(x, seeds):  # how far each pixel's 16 features are from the nearest seed's
    return np.sqrt(np.square(x[:, None] - seeds[None, :, :, None, None]).sum(2).min(1, keepdims=True))


@cuda.jit(device=True, inline="always")
def two(x, i, c):  # features c and c + 1 of pixel i
    n, p, q = min(i // (x.shape[2] * x.shape[3]), x.shape[0] - 1), i // x.shape[3] % x.shape[2], i % x.shape[3]
    return float32(x[n, c, p, q]), float32(x[n, c + 1, p, q])


CELLS = {"out": lambda x: x.like((x.shape[0], 1, *x.shape[2:])), "reference": cells_numpy, "layout": "channels", "floats": "any"}


@tc.op("press::Cells", grid=lambda y: -(-y.size // 128), threads=128, **CELLS)
def cells(x, seeds, y):  # on any GPU: a thread takes a pixel
    i, nearest = cuda.grid(1), float32(math.inf)
    for k in range(seeds.shape[0]):
        far = float32(0)
        for c in range(0, 16, 2):
            a, b = two(x, i, c)
            far += (a - seeds[k, c]) ** 2 + (b - seeds[k, c + 1]) ** 2
        nearest = min(nearest, far)
    if i < y.size:
        y[i // (y.shape[2] * y.shape[3]), 0, i // y.shape[3] % y.shape[2], i % y.shape[3]] = math.sqrt(nearest)


product = mma.multiply_fragment("mma.m16n8k16")  # of a warp: 16 seeds by 8 pixels, over 16 features


@cells.on("sm_80", grid=lambda y: -(-y.size // 32), threads=128)
def cells_on_tensor_cores(x, seeds, y):  # a warp takes 8 pixels: |x - s|^2 = |x|^2 + |s|^2 - 2 x s
    first, g, t = cuda.grid(1) // 32 * 8, cuda.threadIdx.x % 32 // 4, cuda.threadIdx.x % 4 * 2
    zero, near0, near1, last = float32(0), float32(math.inf), float32(math.inf), seeds.shape[0] - 1
    b0, b1 = mma.halves(*two(x, first + g, t)), mma.halves(*two(x, first + g, t + 8))
    for k in range(g, last + 1 + g, 16):  # a lane has seeds k and k + 8, the last one again where there are no more
        i, j, si, sj = min(k, last), min(k + 8, last), zero, zero
        for c in range(16):
            si, sj = si + seeds[i, c] ** 2, sj + seeds[j, c] ** 2
        a0, a1 = mma.halves(seeds[i, t], seeds[i, t + 1]), mma.halves(seeds[j, t], seeds[j, t + 1])
        a2, a3 = mma.halves(seeds[i, t + 8], seeds[i, t + 9]), mma.halves(seeds[j, t + 8], seeds[j, t + 9])
        d = product(zero, zero, zero, zero, a0, a1, a2, a3, b0, b1)  # x s of two pixels and both seeds
        near0, near1 = min(near0, si - d[0] - d[0], sj - d[2] - d[2]), min(near1, si - d[1] - d[1], sj - d[3] - d[3])
    for lanes in (4, 8, 16):
        near0, near1 = min(near0, simt.shuffle(near0, lanes)), min(near1, simt.shuffle(near1, lanes))
    i, near = first + t + g % 2, near1 if g else near0  # the lanes with g = 0 and 1 write a pixel each
    for c in range(0, 16, 2):
        a, b = two(x, i, c)
        near += a * a + b * b
    if g < 2 and i < y.size:
        y[i // (y.shape[2] * y.shape[3]), 0, i // y.shape[3] % y.shape[2], i % y.shape[3]] = math.sqrt(max(near, zero))
