"""Discrete Fourier transforms, as products with matrices of sines and cosines.

A transform of n elements takes n² multiplications this way, which Tensor Cores do faster than memory moves for the lengths of
audio's windows. Complex numbers are a last axis of 2: the real part, then the imaginary one.
"""

from __future__ import annotations

import math

import numpy as np
import onnx_graphsurgeon as gs

from tccompile.ir.expr import Expr, Index, Range, View, call, cast, const, constant, coord, quotient, remainder
from tccompile.ir.ops import Gemm
from tccompile.ir.tensor import Tensor
from tccompile.ir.types import DType
from tccompile.load.late import is_late
from tccompile.lower.builder import Builder, Reads, shape_of
from tccompile.lower.positions import position

LONGEST = 4096
"""Elements of the longest transform: its matrix is the square."""


def dft(node: gs.Node, b: Builder) -> None:
    """Along one axis of x (…, 1 or 2), to the length that is given: zeros are added, or elements left out."""
    x, t = b.value(node.inputs[0]), node.outputs[0]
    given, axes = b.ints(1, "length"), b.ints(2, "axis")
    axis = b.axis(axes[0] if axes else -2, x.rank)
    inverse, parts, shape = bool(b.attr("inverse", 0)), x.shape[-1], shape_of(t)
    half = inverse and bool(b.attr("onesided", 0))
    length = given[0] if given else 2 * (x.shape[axis] - 1) if half else x.shape[axis]
    outer = [a for a in range(x.rank - 1) if a != axis]
    rows = math.prod(x.shape[a] for a in outer)
    kept = min(length // 2 + 1 if half else length, x.shape[axis])
    # row r is what the outer axes count; column j * parts + p is part p of element j
    wide = (rows, kept * parts)
    index, rest = {}, coord(0)
    for a in reversed(outer):
        index[a] = remainder(rest, x.shape[a], wide)
        rest = quotient(rest, x.shape[a], wide)
    index |= {axis: quotient(coord(1), parts, wide), x.rank - 1: remainder(coord(1), parts, wide)}
    matrix = b.copy(View(x.name, tuple(index[a] for a in range(x.rank))), b.new(f"{t.name}.rows", wide, order=(0, 1)))
    out = shape[axis]
    made = (rows, out * shape[-1])
    y = b.new(f"{t.name}.spectrum", made, order=(0, 1))
    b.emit(Gemm, y, a=matrix.name, b=_matrix(b, t.name, kept, length, out, parts, shape[-1], inverse, half).name)
    linear = constant(0)
    for a in outer:
        linear = linear * x.shape[a] + coord(a)
    b.copy(View(y.name, (linear, coord(axis) * shape[-1] + coord(x.rank - 1))), b.result(t))


def stft(node: gs.Node, b: Builder) -> None:
    """The transforms of windows of a signal (N, L, 1 or 2), `step` apart: (N, frames, bins, 2)."""
    x, t = b.value(node.inputs[0]), node.outputs[0]
    steps = b.ints(1, "frame_step")
    assert steps is not None
    shape, parts = shape_of(t), x.shape[-1] if x.rank == 3 else 1
    window, given = b.input(2), b.ints(3, "frame_length")
    length = given[0] if given else shape_of(window)[0]  # type: ignore[arg-type]
    wide = (shape[0], shape[1], length * parts)
    reads = Reads(b, wide)
    at = (coord(0), coord(1) * steps[0] + quotient(coord(2), parts, wide))
    value = reads.view(View(x.name, at if x.rank == 2 else (*at, remainder(coord(2), parts, wide))))
    if window is not None:
        n = shape_of(window)[0]
        element = quotient(coord(2), parts, wide)
        inside = (Range(element, 0, n),) if n < length else ()
        value = call("mul", value, reads.view(View(b.value(window).name, (element,), inside)))
    frames = b.compute(b.new(f"{t.name}.frames", wide, order=(0, 1, 2)), value, reads)
    y = b.new(f"{t.name}.spectra", (*wide[:2], shape[2] * 2), order=(0, 1, 2))
    b.emit(Gemm, y, a=frames.name, b=_matrix(b, t.name, length, length, shape[2], parts, 2, False).name)
    b.copy(View(y.name, (coord(0), coord(1), coord(2) * 2 + coord(3))), b.result(t))


def late_matrix(y: str) -> str:
    """What `is_late` calls the matrix of a transform whose length depends on a size."""
    return f"{y}.matrix"


def _matrix(
    b: Builder, name: str, n: int, length: int, out: int, parts: int, wanted: int, inverse: bool, half: bool = False
) -> Tensor:
    """Row k * wanted + q gives part q of bin k from part p of element j, in column j * parts + p.

    half  the elements are one side of a spectrum of real values: each but the first and the middle one stands for two
    """
    if length > LONGEST:
        raise b.refuse(f"a transform of {length} elements", f"at most {LONGEST} are supported")
    if is_late(late_matrix(name)):
        return _computed_matrix(b, name, n, length, out, parts, wanted, inverse, half)
    turns = np.outer(np.arange(out), np.arange(n)) % length  # exact, where the angle would lose digits
    angle = 2 * np.pi * turns / length * (1 if inverse else -1)
    rotation = np.array([[np.cos(angle), -np.sin(angle)], [np.sin(angle), np.cos(angle)]])  # (q, p, bin, element)
    values = rotation[:wanted, :parts].transpose(2, 0, 3, 1) / (length if inverse else 1)
    if half:
        twice = [1 if 2 * j % length == 0 else 2 for j in range(n)]
        values = values * np.array(twice)[:, None]
    return b.literal(f"{name}.matrix", values.reshape(out * wanted, n * parts).astype(np.float32))


def _computed_matrix(
    b: Builder, name: str, n: int, length: int, out: int, parts: int, wanted: int, inverse: bool, half: bool
) -> Tensor:
    """The same, computed when the plan runs.

    Angles are counted in quarters of 1 / length turns, as integers: what is -sin or sin is a cosine a quarter of a turn further.
    So nothing is lost before the cosine, and its argument is between -pi and pi.
    """
    shape = (out * wanted, n * parts)
    reads = Reads(b, shape)
    rows, columns = coord(0), coord(1)

    def place(text: str, index: Index, count: int) -> Expr:
        return position(reads, f"{name}.{text}", index, count) if count > 1 else const(0, DType.I64)

    bin_, element = place("bin", quotient(rows, wanted, shape), out), place("element", quotient(columns, parts, shape), n)
    q, p = place("q", remainder(rows, wanted, shape), wanted), place("p", remainder(columns, parts, shape), parts)
    turns = call("mul", call("mul", bin_, element), 4 if inverse else -4)
    turns = call("add", turns, call("mul", call("sub", p, q), length))
    from_middle = call("sub", call("floor_mod", turns, 4 * length), 2 * length)
    angle = call("mul", call("div", cast(from_middle, DType.F32), float(length)), math.pi / 2)
    value = call("neg", call("cos", angle))  # half a turn further
    if half:
        alone = call("equal", call("floor_mod", call("mul", element, 2), length), 0)
        value = call("mul", value, call("where", alone, const(1.0), const(2.0)))
    if inverse:
        value = call("div", value, float(length))
    return b.compute(b.new(f"{name}.matrix", shape, order=(0, 1)), value, reads)
