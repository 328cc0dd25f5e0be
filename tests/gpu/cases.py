"""Programs of one op for testing kernels: odd sizes, strides, padding, groups, layouts, types and epilogues.

What the op reads are constants, so that it may have any layout; what it writes lies in the arena, or is a model output.
"""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cache
from inspect import signature
from pathlib import Path
from typing import Any

import numpy as np

from tccompile.custom.files import collected, using
from tccompile.custom.operators import Operator
from tccompile.fuse.groups import join_groups
from tccompile.fuse.sparse import compress
from tccompile.ir.expr import (
    ACC,
    Epilogue,
    Expr,
    Range,
    View,
    broadcast_view,
    call,
    cast,
    const,
    constant,
    coord,
    element,
    identity_view,
    load,
    quotient,
    remainder,
    reshape_view,
)
from tccompile.ir.forms import Packed
from tccompile.ir.ops import (
    Attention,
    Carry,
    Conv,
    Cumulate,
    Custom,
    Gemm,
    Mlp,
    Norm,
    Op,
    Places,
    Pointwise,
    Pool,
    Reduce,
    Resize,
    Rnn,
    Scatter,
    Softmax,
    Suppress,
    TopK,
    Trees,
)
from tccompile.ir.ops.rnn import GATES
from tccompile.ir.packed import packed_scales, packed_values, packed_zeros
from tccompile.ir.program import Program
from tccompile.ir.storage import from_storage, to_storage
from tccompile.ir.tensor import LANES, Tensor, dense
from tccompile.ir.types import DType
from tccompile.ir.verify import verify
from tccompile.ir.weights import Literal
from tccompile.layout import in_lines

ROOT = Path(__file__).parents[2]
F16, F32, I64 = DType.F16, DType.F32, DType.I64
NHWC, NWC, DEPTHWISE = (0, 2, 3, 1), (0, 2, 1), (2, 3, 1, 0)


class Builder:
    """Collects the tensors of a program; values are random, the same for the same case."""

    def __init__(self, case: str):
        self.rng = np.random.default_rng(zlib.crc32(case.encode()))
        self.tensors: dict[str, Tensor] = {}
        self.constants: dict[str, Literal] = {}

    def values(self, name: str, values: np.ndarray, dtype: DType, order: Sequence[int] | None = None, pad: int = LANES) -> str:
        """A constant."""
        self.tensors[name] = dense(name, values.shape, dtype, tuple(order) if order else None, pad)
        self.constants[name] = Literal(from_storage(to_storage(values, dtype), dtype))
        return name

    def normal(
        self, name: str, shape: tuple[int, ...], dtype: DType = F16, order: Sequence[int] | None = None, scale: float = 1.0
    ) -> str:
        return self.values(name, self.rng.standard_normal(shape) * scale, dtype, order)

    def integers(self, name: str, shape: tuple[int, ...], dtype: DType, low: int = -5, high: int = 6) -> str:
        return self.values(name, self.rng.integers(low, high, shape), dtype)

    def part(self, name: str, shape: tuple[int, ...], axis: int, whole: int, at: int, dtype: DType, order: Sequence[int]) -> str:
        """Constant elements `at` onwards along `axis` of a tensor with `whole` of them."""
        base = self.normal(f"whole_{name}", (*shape[:axis], whole, *shape[axis + 1 :]), dtype, order)
        self.tensors[name] = _view(name, self.tensors[base], shape, axis, at)
        return name

    def result(self, shape: tuple[int, ...], dtype: DType = F16, order: Sequence[int] | None = None) -> str:
        """What the op writes: a tensor of its own."""
        self.tensors["y"] = dense("y", shape, dtype, tuple(order) if order else None, LANES)
        return "y"

    def slice_of(
        self, shape: tuple[int, ...], axis: int, whole: int, at: int, dtype: DType = F16, order: Sequence[int] | None = None
    ) -> str:
        """What the op writes: elements `at` onwards along `axis` of a tensor with `whole` of them."""
        extents = (*shape[:axis], whole, *shape[axis + 1 :])
        base = dense("whole", extents, dtype, tuple(order) if order else None, LANES)
        self.tensors["whole"] = base
        self.tensors["y"] = _view("y", base, shape, axis, at)
        return "y"

    def output(self, shape: tuple[int, ...], dtype: DType = F32) -> str:
        """What the op writes: a model output."""
        self.tensors["y"] = dense("y", shape, dtype, pad=1)
        return "y"

    def program(self, op: Op) -> Program:
        is_output = self.tensors["y"].base is None and self.tensors["y"] == dense(
            "y", self.tensors["y"].shape, self.tensors["y"].dtype, pad=1
        )
        program = in_lines(Program((), ("y",) if is_output else (), self.tensors, self.constants, (op,)))
        verify(program)
        return program


def _view(name: str, base: Tensor, shape: tuple[int, ...], axis: int, at: int) -> Tensor:
    """Elements `at` onwards along `axis`; with the padding, if they are the last ones."""
    padded = list(base.padded)
    padded[axis] = base.padded[axis] - at if at + shape[axis] == base.shape[axis] else shape[axis]
    return Tensor(name, shape, base.dtype, tuple(padded), base.strides, base.name, at * base.strides[axis])


# --- Epilogues -------------------------------------------------------------------------------------------------------


def epilogue(
    b: Builder, shape: tuple[int, ...], text: str, axis: int = 1, order: Sequence[int] | None = None, dtype: DType = F16
) -> Epilogue:
    """From words: bias, scale (vectors along `axis`), residual (like the result), shuffle (2 or 3), up or down (by the powers of
    two that tensors beyond fp16 are stored with), or names of functions.
    """
    expr: Expr = ACC
    loads: list[View] = []
    shuffle = 1
    for word in text.split():
        name = f"{word}{len(loads)}"
        if word in ("bias", "scale"):
            b.normal(name, (shape[axis],), F32)
            loads.append(View(name, (coord(axis),)))
            expr = call("add" if word == "bias" else "mul", expr, load(len(loads) - 1))
        elif word == "residual":
            b.normal(name, shape, dtype, order)
            loads.append(identity_view(name, len(shape)))
            expr = call("add", expr, load(len(loads) - 1))
        elif word in ("shuffle", "shuffle3"):
            shuffle = 3 if word == "shuffle3" else 2
        elif word in ("up", "down"):
            expr = call("mul", expr, 2.0 ** (104 if word == "up" else -104))
        else:
            expr = call(word, expr)
    return Epilogue(expr, tuple(loads), shuffle)


def extent(n: int, before: int, after: int, window: int, stride: int, dilation: int) -> int:
    return (n + before + after - (window - 1) * dilation - 1) // stride + 1


# --- The ops ---------------------------------------------------------------------------------------------------------


def conv(
    case: str,
    x: tuple[int, ...],
    o: int,
    window: tuple[int, ...],
    stride: int = 1,
    pad: int | None = None,
    dilation: int = 1,
    groups: int = 1,
    ep: str = "bias",
    to: str = "own",
    dtype: DType = F16,
    source: str = "own",
    weights: DType | None = None,
) -> Program:
    """x (N, C, …spatial); `to` as `_destination` takes it; `source`: own, slice, odd (slices at channels 16 and 3), plain, or
    planes (plain, and fp32 whatever `dtype`); `weights`: their type, if it is another one. Kernels may take groups together, as
    in a network.
    """
    b = Builder(case)
    spatial = len(window)
    order = NHWC if spatial == 2 else NWC
    pads = tuple((w - 1) * dilation // 2 if pad is None else pad for w in window)
    out = (x[0], o, *(extent(n, p, p, w, stride, dilation) for n, p, w in zip(x[2:], pads, window, strict=True)))
    if source in ("plain", "planes"):  # as a model input
        b.values("x", b.rng.standard_normal(x), F32 if source == "planes" else dtype, pad=1)
    elif source == "own":
        b.normal("x", x, dtype, order)
    else:
        b.part("x", x, 1, x[1] + 40, {"slice": 16, "odd": 3}[source], dtype, order)
    depthwise = groups == x[1] == o
    fan_in = x[1] // groups * int(np.prod(window))
    worder = ((2, 3, 1, 0) if spatial == 2 else (2, 1, 0)) if depthwise else order
    b.normal("w", (o, x[1] // groups, *window), weights or dtype, worder, fan_in**-0.5)
    ep_ = epilogue(b, out, ep, 1, order, dtype)
    s = ep_.shuffle
    shape = out if s == 1 else (out[0], o // (s * s), out[2] * s, out[3] * s)
    y = _destination(b, shape, 1, to, dtype, order)
    one = (stride,) * spatial
    op = Conv(
        nodes=(case,), y=y, x="x", w="w", strides=one, pads=pads, dilations=(dilation,) * spatial, groups=groups, epilogue=ep_
    )
    return join_groups(b.program(op))


def _destination(b: Builder, shape: tuple[int, ...], axis: int, to: str, dtype: DType, order: Sequence[int] | None) -> str:
    """y: a tensor of its own (fp32 if so named), a model output (fp32, row-major), or a part of another along `axis`.

    Of the parts, slice and odd have none of the padding, at a multiple of 16 bytes and not; tail and odd_tail end the other;
    gap has padding of its own, in the middle of the other. Of an image, tokens has the pixels as rows among others.
    """
    if to == "own":
        return b.result(shape, dtype, order)
    if to == "fp32":
        return b.result(shape, F32, order)
    if to == "output":
        return b.output(shape)
    if to == "gap":
        y = b.slice_of(shape, axis, 16 + -(-shape[axis] // 8) * 8 + 24, 16, dtype, order)
        padded = tuple(-(-n // 8) * 8 if a == axis else n for a, n in enumerate(shape))
        b.tensors[y] = replace(b.tensors[y], padded=padded)
        return y
    if to == "tokens":
        n, c, h, w = shape
        whole = b.tensors["whole"] = dense("whole", (n, h * w + 2, c), dtype)
        step = whole.strides[1]
        padded, strides = (n, whole.padded[2], h, w), (whole.strides[0], 1, w * step, step)
        b.tensors["y"] = Tensor("y", shape, dtype, padded, strides, "whole", step)
        return "y"
    at, after = {"slice": (16, 24), "odd": (3, 6), "tail": (16, 0), "odd_tail": (3, 0)}[to]
    return b.slice_of(shape, axis, at + shape[axis] + after, at, dtype, order)


def mlp(
    case: str,
    x: tuple[int, int],
    hidden: int,
    results: int,
    inner: str = "silu",
    bias: bool = True,
    ep: str = "bias sigmoid",
    to: str = "own",
    dtype: DType = F16,
    source: str = "own",
) -> Program:
    """x (images, channels); `inner`: the hidden units' function; the others as of `conv`."""
    b = Builder(case)
    shape, out = (*x, 1, 1), (x[0], results, 1, 1)
    if source == "own":
        b.normal("x", shape, dtype, NHWC)
    else:
        b.part("x", shape, 1, x[1] + 40, {"slice": 16, "odd": 3}[source], dtype, NHWC)
    b.normal("w", (hidden, x[1], 1, 1), dtype, NHWC, x[1] ** -0.5)
    b.normal("v", (results, hidden, 1, 1), dtype, NHWC, hidden**-0.5)
    name = b.normal("b", (hidden,), F32) if bias else None
    y = _destination(b, out, 1, to, dtype, NHWC)
    ep_ = epilogue(b, out, ep, 1, NHWC, dtype)
    return b.program(Mlp(nodes=(case,), y=y, x="x", w="w", v="v", b=name, hidden=call(inner, ACC), epilogue=ep_))


def gemm(
    case: str,
    a: tuple[int, ...],
    n: int,
    ep: str = "bias",
    batched: bool = False,
    to: str = "own",
    dtype: DType = F16,
    transposed: str = "",
) -> Program:
    """a (…, M, K) by b (N, K) or (…, N, K); of those named in `transposed`, K is not the innermost axis."""
    b = Builder(case)
    k = a[-1]

    def operand(name: str, shape: tuple[int, ...], scale: float = 1.0) -> None:
        order = tuple(range(len(shape)))
        b.normal(name, shape, dtype, (*order[:-2], order[-1], order[-2]) if name in transposed else order, scale)

    operand("a", a)
    operand("b", (*a[:-2], n, k) if batched else (n, k), k**-0.5)
    shape = (*a[:-1], n)
    ep_ = epilogue(b, shape, ep, len(shape) - 1, None, dtype)
    y = _destination(b, shape, len(shape) - 1, to, dtype, None)
    return b.program(Gemm(nodes=(case,), y=y, a="a", b="b", epilogue=ep_))


def packed(
    case: str,
    a: tuple[int, int],
    n: int,
    bits: int = 4,
    block: int = 32,
    zeros: bool = True,
    scales: DType = F32,
    ep: str = "bias",
    dtype: DType = F16,
) -> Program:
    """a (M, K) by weights (N, K) that have a form of integers in blocks of K. Scales are such that halves hold the weights."""
    b, k = Builder(case), a[1]
    blocks = -(-k // block)
    b.normal("a", a, dtype)
    u, zero = (b.rng.integers(0, 1 << bits, shape) for shape in ((n, k), (n, blocks)))
    zero = zero if zeros else np.full_like(zero, 1 << bits - 1)
    scale = b.rng.integers(4, 8, (n, blocks)) * 2.0 ** (b.rng.integers(-2, 1, (n, blocks)) - bits - round(np.log2(k) / 2))
    each = [np.repeat(x, block, 1)[:, :k] for x in (zero, scale)]
    b.values("b", (u - each[0]) * each[1], dtype)
    b.values("u", packed_values(u, bits, block, 0), DType.U8)
    b.values("scales", packed_scales(scale, block, scales.value), scales)
    if zeros:
        b.values("zeros", packed_zeros(zero, block, 0), DType.U8)
    shape = (a[0], n)
    ep_ = epilogue(b, shape, ep, 1, None, dtype)
    y = b.result(shape, dtype)
    form = Packed("u", "scales", "zeros" if zeros else "", bits, block, 0 if zeros else 1 << bits - 1)
    return replace(b.program(Gemm(nodes=(case,), y=y, a="a", b="b", epilogue=ep_)), forms={"b": (form,)})


def product_of_bytes(case: str, a: tuple[int, ...], n: int, batched: bool = False, window: tuple[int, ...] = ()) -> Program:
    """Integers up to ±255 whose sums come as close to 2^24 as they may, as int32: a Gemm, or with a window a Conv."""
    b = Builder(case)
    shape = (n, a[1], *window) if window else (*a[:-2], n, a[-1]) if batched else (n, a[-1])
    x, w = (b.rng.choice((-255, -254, 253, 255), size) for size in (a, shape))
    x[0], w[0] = 255, -255  # of one sign, so that every partial sum counts
    order = NHWC if window else None
    b.values("a", x, F16, order)
    b.values("b", w, F16, order)
    out = (a[0], n, *a[2:]) if window else (*a[:-1], n)
    y = b.result(out, DType.I32, order)
    ep = Epilogue(cast(call("round", ACC), I64))
    if window:
        pads = tuple(k // 2 for k in window)
        return b.program(Conv(nodes=(case,), y=y, x="a", w="b", strides=(1, 1), pads=pads, dilations=(1, 1), epilogue=ep))
    return b.program(Gemm(nodes=(case,), y=y, a="a", b="b", epilogue=ep))


def of_8_bits(
    case: str,
    x: tuple[int, ...],
    n: int,
    window: tuple[int, ...] = (),
    kinds: tuple[DType, DType, DType] = (DType.I8, DType.I8, DType.I32),
    stride: int = 1,
    groups: int = 1,
    extreme: bool = False,
    residual: DType | None = None,
) -> Program:
    """A Gemm, of batches if x has more than two axes, or with a window a Conv, of integers of 8 bits.

    kinds    types of the operands and of the result. An int32 is the sum; floats are scaled per channel; bytes have a bias of
             int32, and are scaled, rounded and saturated
    extreme  operands are the ends of their types, nine tenths of them the upper one
    residual  type of what is added to results of bytes before they are rounded
    """
    b, order = Builder(case), NHWC if window else None
    for name, shape, kind in zip("xw", (x, (n, x[1] // groups, *window) if window else (*x[:-2], n, x[-1])), kinds, strict=False):
        low, high = int(kind.lowest), int(kind.largest)
        values = np.where(b.rng.random(shape) < 0.9, high, low) if extreme else b.rng.integers(low, high + 1, shape)
        b.values(name, values, kind, order, 16)
    pads = tuple(k // 2 for k in window)
    spatial = (extent(m, p, p, k, stride, 1) for m, p, k in zip(x[2:], pads, window, strict=True)) if window else ()
    out = (x[0], n, *spatial) if window else (*x[:-1], n)
    axis, y, ep = 1 if window else len(out) - 1, kinds[2], Epilogue(Expr("acc", (), None, I64))
    if y is not DType.I32:
        b.values("scale", b.rng.uniform(0.5, 2, n) * 2.0 ** b.rng.integers(-9, -5, n), F32)
        biased = ACC
        if y.size == 1:
            b.integers("bias", (n,), DType.I32, -4096, 4096)
            biased = cast(call("add", ep.expr, load(1, I64)), F32)
        scaled = call("mul", biased, load(0))
        views = tuple(View(name, (coord(axis),)) for name in ("scale", "bias") if name in b.tensors)
        if residual:
            b.values("r", b.rng.integers(int(residual.lowest), int(residual.largest) + 1, out), residual, order, 16)
            scaled = call("add", scaled, call("mul", cast(load(len(views), I64), F32), 0.375))
            views = *views, View("r", tuple(map(coord, range(len(out)))))
        ep = Epilogue(call("round", scaled) if y.size == 1 else scaled, views)
    name, fields = b.result(out, y, order), {"nodes": (case,), "epilogue": ep}
    if not window:
        return b.program(Gemm(y=name, a="x", b="w", **fields))
    one = (1,) * len(window)
    return b.program(
        Conv(y=name, x="x", w="w", strides=(stride,) * len(window), pads=pads, dilations=one, groups=groups, **fields)
    )


def of_float8(
    case: str,
    x: tuple[int, ...],
    n: int,
    window: tuple[int, ...] = (),
    kinds: tuple[DType, DType, DType] = (DType.E4M3, DType.E4M3, F16),
    stride: int = 1,
    groups: int = 1,
    bias: bool = True,
    fn: str = "",
    residual: DType | None = None,
    sign: bool = True,
    to: str = "own",
) -> Program:
    """A Gemm, of batches if x has more than two axes, or with a window a Conv, of floats of 8 bits: a scale per channel, a bias,
    a function, and something that is added.

    kinds  types of the operands and of the result; residual, of what is added
    sign   whether operands have both signs
    to     "own", a tensor of its own; or "output", a model's
    """
    b, order = Builder(case), NHWC if window else None
    for name, shape, kind in zip("xw", (x, (n, x[1] // groups, *window) if window else (*x[:-2], n, x[-1])), kinds, strict=False):
        values = b.rng.standard_normal(shape) * 4
        b.values(name, values if sign else abs(values), kind, order, 16)
    pads = tuple(k // 2 for k in window)
    spatial = (extent(m, p, p, k, stride, 1) for m, p, k in zip(x[2:], pads, window, strict=True)) if window else ()
    out = (x[0], n, *spatial) if window else (*x[:-1], n)
    axis, (_, *taps) = 1 if window else len(out) - 1, b.tensors["w"].shape if window else (0, x[-1])
    b.values("scale", b.rng.uniform(0.5, 2, n) * float(np.prod(taps)) ** -0.5 / 8, F32)
    expr, views = call("mul", ACC, load(0)), [View("scale", (coord(axis),))]
    if bias:
        b.normal("bias", (n,), F32)
        views.append(View("bias", (coord(axis),)))
        expr = call("add", expr, load(len(views) - 1))
    if residual:
        b.normal("r", out, residual, order)
        expr = call("add", expr, call("mul", load(len(views)), 0.375))
        views.append(View("r", tuple(map(coord, range(len(out))))))
    expr = call(fn, expr) if fn else expr
    name = b.output(out, kinds[2]) if to == "output" else b.result(out, kinds[2], order)
    fields = {"nodes": (case,), "epilogue": Epilogue(expr, tuple(views))}
    if not window:
        return b.program(Gemm(y=name, a="x", b="w", **fields))
    one = (1,) * len(window)
    return b.program(
        Conv(y=name, x="x", w="w", strides=(stride,) * len(window), pads=pads, dilations=one, groups=groups, **fields)
    )


def halves_to_bytes(case: str, x: tuple[int, int, int, int], n: int, window: tuple[int, int], stride: int = 1) -> Program:
    """A Conv of small integers in halves, whose sums are exact, stored in bytes: moved by a zero point and saturated."""
    b = Builder(case)
    b.values("x", b.rng.integers(-4, 5, x), F16, NHWC)
    b.values("w", b.rng.integers(-4, 5, (n, x[1], *window)), F16, NHWC)
    b.integers("bias", (n,), F32, -40, 41)
    pads = tuple(k // 2 for k in window)
    spatial = tuple(extent(m, p, p, k, stride, 1) for m, p, k in zip(x[2:], pads, window, strict=True))
    y = b.result((x[0], n, *spatial), DType.I8, NHWC)
    b.tensors[y] = dense(y, b.tensors[y].shape, DType.I8, NHWC, 16)
    steps = call("add", call("round", call("add", ACC, load(0))), 5.0)
    rounded = cast(Expr("saturate", (steps, const(-128.0), const(127.0))), I64)
    op = Conv(
        nodes=(case,), y=y, x="x", w="w", strides=(stride, stride), pads=pads, dilations=(1, 1),
        epilogue=Epilogue(rounded, (View("bias", (coord(1),)),)),
    )  # fmt: skip
    return b.program(op)


def depthwise_of_bytes(
    case: str, x: tuple[int, ...], window: tuple[int, ...], kinds: tuple[DType, DType, DType], stride: int = 1
) -> Program:
    """A depthwise Conv of bytes, by floats or int8; a result in bytes is rounded and saturated. `kinds`: types of x, w, y."""
    b, channels, order = Builder(case), x[1], NHWC if len(window) == 2 else NWC
    low, high = int(kinds[0].lowest), int(kinds[0].largest)
    b.values("x", b.rng.integers(low, high + 1, x), kinds[0], order, 16)
    shape, factor, across = (channels, 1, *window), 0.125, DEPTHWISE if len(window) == 2 else (2, 1, 0)
    if kinds[1] is DType.I8:
        b.values("w", b.rng.integers(-127, 128, shape), DType.I8, across, 16)
        factor = 2.0**-11
    else:
        b.normal("w", shape, kinds[1], across, 0.1)
    b.normal("bias", (channels,), F32)
    pads = tuple(k // 2 for k in window)
    spatial = tuple(extent(m, p, p, k, stride, 1) for m, p, k in zip(x[2:], pads, window, strict=True))
    y = b.result((x[0], channels, *spatial), kinds[2], order)
    expr = call("add", call("mul", ACC, factor), load(0))
    if kinds[2].size == 1:
        limits = (const(kinds[2].lowest), const(kinds[2].largest))
        expr = cast(Expr("saturate", (call("round", expr), *limits)), I64)
    many, ep = len(window), Epilogue(expr, (View("bias", (coord(1),)),))
    op = Conv(
        nodes=(case,), y=y, x="x", w="w", strides=(stride,) * many, pads=pads, dilations=(1,) * many, groups=channels, epilogue=ep
    )
    return b.program(op)


def pool(
    case: str,
    x: tuple[int, ...],
    kind: str,
    window: tuple[int, ...],
    stride: int = 1,
    pad: int = 0,
    end_pad: int | None = None,
    dilation: int = 1,
    count_pads: bool = False,
    ep: str = "",
    to: str = "own",
    dtype: DType = F16,
    order: Sequence[int] | None = None,
) -> Program:
    b = Builder(case)
    spatial = len(window)
    order = order or (NHWC if spatial == 2 else NWC)
    end = pad if end_pad is None else end_pad
    out = (*x[:2], *(extent(n, pad, end, w, stride, dilation) for n, w in zip(x[2:], window, strict=True)))
    if dtype in (DType.I8, DType.U8):
        limits = np.iinfo(dtype.numpy)
        b.values("x", b.rng.integers(limits.min, limits.max + 1, x), dtype, order)
    else:
        b.normal("x", x, dtype, order)
    ep_ = epilogue(b, out, ep, 1, order, dtype)
    y = _destination(b, out, 1, to, dtype, order)
    every = (stride,) * spatial
    op = Pool(
        nodes=(case,), y=y, x="x", kind=kind, window=window, strides=every, pads=(pad,) * spatial, end_pads=(end,) * spatial,
        dilations=(dilation,) * spatial, count_pads=count_pads, epilogue=ep_,
    )  # fmt: skip
    return b.program(op)


def reduce(
    case: str,
    x: tuple[int, ...],
    axes: tuple[int, ...],
    combine: str = "add",
    pre: str = "",
    order: Sequence[int] | None = None,
    ep: str = "",
    dtype: DType = F16,
    to: str = "own",
) -> Program:
    b = Builder(case)
    if dtype.is_float:
        scale = 0.2 if combine == "mul" else 1.0
        b.values("x", b.rng.standard_normal(x) * scale + (combine == "mul"), dtype, order)
    else:
        low = 0 if dtype.kind == "uint" else -3
        b.values("x", b.rng.integers(low, low + 7, x), dtype, order)
    shape = tuple(1 if a in axes else n for a, n in enumerate(x))
    acc = Expr("acc", (), None, dtype.compute)
    inner = call("mul", acc, acc) if pre == "square" else call(pre, acc) if pre and pre != "dequantize" else acc
    if pre == "dequantize":
        inner, acc, dtype = call("mul", call("sub", cast(acc, F32), 2.0), 0.25), ACC, F16
    outer = acc
    loads: tuple[View, ...] = ()
    if ep == "mean":
        outer = call("mul", ACC, float(1 / np.prod([x[a] for a in axes])))
    elif ep:
        made = epilogue(b, shape, ep, 1, order, dtype)
        outer, loads = made.expr, made.loads
    y = _destination(b, shape, 1, to, dtype, order)
    return b.program(Reduce(nodes=(case,), y=y, x="x", axes=axes, combine=combine, pre=inner, epilogue=Epilogue(outer, loads)))


def rnn(
    case: str,
    cell: str,
    steps: int,
    n: int,
    units: int,
    backward: tuple[bool, ...] = (False,),
    dtype: DType = F16,
    functions: str = "",
    given: str = "",
    lengths: Sequence[int] = (),
    scale: float = 1.0,
    r: DType | None = None,
    **how,
) -> Program:
    """`functions` of every direction in turn; `given`: the optional operands b, p, h, c."""
    b = Builder(case)
    d, gates = len(backward), GATES[cell]
    b.normal("x", (steps, n, d * gates * units), dtype)
    b.normal("r", (d, gates, units, units), r or dtype, scale=scale * units**-0.5)
    shapes = {"b": (d, units), "p": (d, 3, units), "h": (d, n, units), "c": (d, n, units)}
    operands = {name: b.normal(name, shapes[name], F32 if name in "bp" else dtype) for name in given}
    if lengths:
        operands["lengths"] = b.values("lengths", np.array(lengths), DType.I32)
    b.result((steps + 1 + (cell == "lstm"), d, n, units), dtype, (0, 2, 1, 3))
    usual = {"rnn": ["tanh"], "gru": ["sigmoid", "tanh"], "lstm": ["sigmoid", "tanh", "tanh"]}[cell]
    names = functions.split() or usual * d
    numbers = {"leaky_relu": (0.3,), "hard_sigmoid": (0.2, 0.5), "affine": (0.5, 0.1)}
    exprs = [call(name, ACC, *numbers.get(name, ())) for name in names]
    each = tuple(tuple(exprs[len(usual) * i : len(usual) * (i + 1)]) for i in range(d))
    return b.program(Rnn(nodes=(case,), y="y", x="x", r="r", cell=cell, backward=backward, functions=each, **operands, **how))


LOWEST = float(np.finfo(np.float32).min)


def attention(
    case: str,
    q: tuple[int, ...],
    n: int,
    e: int | None = None,
    share: int = 1,
    mask: tuple[int, ...] | None = None,
    kind: DType = F32,
    causal: int | None = None,
    hidden: float = -np.inf,
    unseen: bool = False,
    packed: bool = False,
    ep: str = "",
    to: str = "own",
    dtype: DType = F16,
    stored: DType | None = None,
) -> Program:
    """q (B, H, M, D) with n rows of k and v; `packed`: q, k and v (n = M) lie side by side, as one projection writes them.

    stored  type of the result, if it is another than q's. Of operands in E4M3 weights are powers of two, which it holds
    hidden  what a mask adds where it hides
    unseen  whether in the last batch every fifth row of the mask hides all
    """
    b = Builder(case)
    batch, heads, m, d = q
    e, inner = e or d, (0, 2, 1, 3)
    if packed:
        whole = b.normal("qkv", (batch, m, 3 * heads * d), dtype)
        (outer, row, _), base = b.tensors[whole].strides, b.tensors[whole]
        for i, name in enumerate("qkv"):
            b.tensors[name] = Tensor(name, q, dtype, q, (outer, d, row, 1), base.name, i * heads * d)
    elif dtype is DType.E4M3:
        for name, shape, order in (("q", q, inner), ("k", (batch, heads // share, n, d), None)):
            b.values(name, b.rng.integers(-1, 2, shape), dtype, order, 16)
        b.values("v", b.rng.standard_normal((batch, heads // share, n, e)), dtype, inner, 16)
    else:
        b.normal("q", q, dtype, inner)
        b.normal("k", (batch, heads // share, n, d), dtype)
        b.normal("v", (batch, heads // share, n, e), dtype, inner)
    whole = dtype is DType.E4M3 and not packed
    if mask is not None:
        values = np.zeros(mask) if whole else b.rng.standard_normal(mask)
        hides = b.rng.random(mask) < 0.4
        if unseen:
            hides[-1, :, ::5] = True
        b.values("mask", ~hides if kind is DType.BOOL else np.where(hides, hidden, values), kind)
    shape = (batch, heads, m, e)
    y = _destination(b, shape, 3, to, stored or dtype, inner)
    names = {"q": "q", "k": "k", "v": "v", "mask": None if mask is None else "mask"}
    over, scale = epilogue(b, shape, ep, 3, inner, stored or dtype), math.log(2) if whole else d**-0.5
    return b.program(Attention(nodes=(case,), y=y, epilogue=over, scale=scale, causal=causal, **names))


def softmax(
    case: str,
    x: tuple[int, ...],
    axis: int,
    log: bool = False,
    order: Sequence[int] | None = None,
    ep: str = "",
    dtype: DType = F16,
    to: str = "own",
    source: Sequence[int] | None = None,
    pad: int = 8,
) -> Program:
    """source: x's order of axes, if it is not y's."""
    b = Builder(case)
    b.values("x", b.rng.standard_normal(x) * 3.0, dtype, source or order, pad)
    ep_ = epilogue(b, x, ep, len(x) - 1, order, dtype)
    y = _destination(b, x, len(x) - 1 if order is None else 1, to, dtype, order)
    return b.program(Softmax(nodes=(case,), y=y, x="x", axis=axis, log=log, epilogue=ep_))


def norm(
    case: str,
    x: tuple[int, ...],
    axes: tuple[int, ...],
    groups: int = 0,
    order: Sequence[int] | None = None,
    ep: str = "scale bias",
    axis: int = 1,
    shift: float = 0.5,
    dtype: DType = F16,
    to: str = "own",
    centred: bool = True,
    pad: int = 8,
) -> Program:
    b = Builder(case)
    b.values("x", b.rng.standard_normal(x) + shift, dtype, order, pad)
    ep_ = epilogue(b, x, ep, axis, order, dtype)
    y = _destination(b, x, axis, to, dtype, order)
    return b.program(Norm(nodes=(case,), y=y, x="x", axes=axes, eps=1e-5, groups=groups, centred=centred, epilogue=ep_))


def resize(
    case: str, x: tuple[int, ...], axes: dict[int, tuple[int, int]], ep: str = "", to: str = "own", dtype: DType = F16
) -> Program:
    """axes: output extent and taps of each resampled axis."""
    b = Builder(case)
    order = {4: NHWC, 3: NWC}.get(len(x))
    b.normal("x", x, dtype, order)
    index, weights, shape = [], [], list(x)
    for axis, (n, taps) in axes.items():
        shape[axis] = n
        at = np.floor(np.arange(n)[:, None] * (x[axis] / n)).astype(int) + np.arange(taps) - (taps - 1) // 2
        factors = b.rng.random((n, taps))
        index.append(b.values(f"index{axis}", np.clip(at, 0, x[axis] - 1), DType.I32, pad=1))
        weights.append(b.values(f"weights{axis}", factors / factors.sum(1, keepdims=True), F32, pad=1))
    ep_ = epilogue(b, tuple(shape), ep, 1, order, dtype)
    y = _destination(b, tuple(shape), 1, to, dtype, order)
    op = Resize(nodes=(case,), y=y, x="x", axes=tuple(axes), index=tuple(index), weights=tuple(weights), epilogue=ep_)
    return b.program(op)


def pointwise(case: str, make: Callable[[Builder], tuple[Expr, tuple[View, ...]]]) -> Program:
    """`make` declares tensors, y among them, and returns the expression over its views."""
    b = Builder(case)
    expr, views = make(b)
    return b.program(Pointwise(nodes=(case,), y="y", epilogue=Epilogue(expr, views)))


def _copy(x: tuple[int, ...], source: DType, source_order, to: DType, to_order, output: bool = False):
    def make(b: Builder):
        if source_order == "plain":
            b.values("x", b.rng.standard_normal(x), source, pad=1)
        else:
            b.normal("x", x, source, source_order)
        if output:
            b.output(x, to)
        else:
            b.result(x, to, to_order)
        return cast(load(0, source.compute), to.compute), (identity_view("x", len(x)),)

    return make


def _embedding(b: Builder):
    """Rows of a table, by ids some of which count from its end, and a row of positions"""
    shape = (2, 7, 40)
    b.normal("x", (50, 40), F16)
    b.integers("ids", (2, 7), I64, -50, 50)
    b.normal("p", (9, 40), F16)
    b.result(shape, F16)
    table = View("x", (element("ids", (coord(0), coord(1)), 50), coord(2)))
    return call("add", load(0), load(1)), (table, View("p", (coord(1) + 1, coord(2))))


def _gather_elements(b: Builder):
    """An index of its own for each lane, which is divided first, and the last of which have no neighbours"""
    shape = (3, 5, 21)
    b.normal("x", (3, 5, 13), F32)
    b.integers("at", shape, DType.I32, -26, 26)
    b.result(shape, F16)
    return load(0), (View("x", (coord(0), coord(1), quotient(element("at", [coord(a) for a in range(3)], 26), 2, shape))),)


def _gather_nd(b: Builder):
    """Two coordinates a row, and a window beyond which neither they nor what they name are read"""
    shape = (6, 11)
    b.normal("x", (4, 5, 11), F16)
    b.integers("at", (4, 2), DType.I32, 0, 4)
    b.result(shape, F32)
    row = coord(0) - 1
    index = (element("at", (row, constant(0)), 4), element("at", (row, constant(1)), 5), coord(1))
    return load(0), (View("x", index, (Range(row, 0, 4),), -1.0),)


def cumulate(case: str, x: tuple[int, ...], axis: int, combine: str, dtype: DType = F16, order=None, **flags: bool) -> Program:
    """A cumulative sum or product, of numbers near 1 for a product."""
    b = Builder(case)
    values = b.rng.standard_normal(x) if dtype.is_float else b.rng.integers(-9, 9, x)
    b.values("x", values if combine == "add" else 1 + values / 50, dtype, order)
    b.result(x, dtype, order)
    return b.program(Cumulate(nodes=(case,), y="y", x="x", axis=axis, combine=combine, epilogue=_plain(dtype), **flags))


def top_k(case: str, x: tuple[int, ...], axis: int, k: int, dtype: DType = F16, order=None, largest: bool = True) -> Program:
    """Of few different values, so that many are equal; floats with infinities and NaN."""
    b = Builder(case)
    values = b.rng.integers(-20, 20, x)
    if dtype.is_float:
        values = np.where(values == 7, np.nan, np.where(values == -3, np.inf, values / 8))
    b.values("x", values, dtype, order)
    b.result((*x[:axis], k, *x[axis + 1 :]), I64, order)
    return b.program(TopK(nodes=(case,), y="y", x="x", axis=axis, largest=largest, epilogue=_plain(I64)))


KEPT = ExitStack()
"""What this process goes by until it ends."""


@cache
def operators() -> Mapping[str, Operator]:
    """Operators of users', which are known from here on. Their files import Numba."""
    added = collected([ROOT / "tests/custom/operators.py", ROOT / "docs/examples/custom_ops/press.py"])
    KEPT.enter_context(using(added))
    return added.operators


def custom(
    case: str, name: str, reads: Sequence[tuple[int, ...]], y: tuple[int, ...], outputs: tuple[int, ...] = (0,),
    dtype: DType = F32, dtypes: Sequence[DType] | None = None, orders: Sequence[Any] = (), order=None, **attributes,
) -> Program:  # fmt: skip
    """An operator of the user's, of random tensors; some of its outputs."""
    b, operator = Builder(case), operators()[name]
    names = [f"x{i}" for i in range(len(reads))]
    for i, shape in enumerate(reads):
        b.normal(names[i], shape, dtypes[i] if dtypes else F32, orders[i] if orders else None)
    b.result(y, dtype, order)
    settings = json.dumps({"types": ["float32"] * len(reads), "attributes": attributes})
    fields = {"operator": name, "digest": operator.digest, "settings": settings, "floats": operator.floats}
    return b.program(Custom(nodes=(case,), y="y", reads=tuple(names), outputs=outputs, epilogue=_plain(dtype), **fields))


def places(case: str, n: int, room: int, dtype: DType = DType.BOOL) -> Program:
    """Where a third of n elements are, as far as there is room."""
    b = Builder(case)
    b.values("x", b.rng.integers(0, 3, (n,)) == 0, dtype)
    b.result((room + 1,), I64)
    return b.program(Places(nodes=(case,), y="y", x="x", epilogue=_plain(I64)))


def carry(case: str, x: tuple[int, ...], y: tuple[int, ...], dtype: DType = F32, order=None) -> Program:
    """What enters a loop, in another layout, or one number for all elements."""
    b = Builder(case)
    b.normal("x", x, dtype)
    b.result(y, F32, order)
    return b.program(Carry(nodes=(case,), y="y", x="x", role="enter", loop="loop", epilogue=_plain(F32)))


def suppress(
    case: str, images: int, classes: int, count: int, dtype: DType = F32, space: float = 4, whole: bool = False, **how
) -> Program:
    """Boxes of which many overlap, some upside down, or no boxes; scores of which many are equal, in their order, and NaN.

    space  how far they lie apart
    whole  their corners are whole numbers: of many pairs what they have in common is just as much as the limit says
    """
    b = Builder(case)
    middle, size = b.rng.uniform(0, space, (images, count, 2)), b.rng.uniform(-1, 1, (images, count, 2))
    if how.get("centred"):
        boxes = np.concatenate([middle, np.abs(size) * 2], -1)
    else:
        boxes = np.concatenate([middle - size, middle + size], -1)
    boxes = np.round(boxes) if whole else boxes
    for value in (np.nan, np.inf, -np.inf, 0):
        boxes[b.rng.random(boxes.shape) < 0.005] = value
    b.values("boxes", boxes, dtype)
    scores = np.where(b.rng.random((images, classes, count)) < 0.02, np.nan, b.rng.integers(0, 9, (images, classes, count)) / 8)
    b.values("scores", np.sort(scores)[..., ::-1], F32)
    b.values("order", np.argsort(b.rng.random((images, classes, count))), I64)
    b.result((images, classes, count), DType.BOOL)
    fields = {"most": 20, "iou": 0.4, "least": 0.3, **how}
    op = Suppress(nodes=(case,), y="y", boxes="boxes", scores="scores", order="order", epilogue=_plain(DType.BOOL), **fields)
    return b.program(op)


def trees(
    case: str,
    x: tuple[int, int],
    targets: int,
    count: int,
    depth: int,
    combine: str = "add",
    each: int = 1,
    dtype: DType = F32,
    order=None,
) -> Program:
    """Random trees, whose leaves have `each` entries; features that equal thresholds, and NaN."""
    b = Builder(case)
    values = b.rng.integers(-4, 5, x) / 8
    b.values("x", np.where(b.rng.random(x) < 0.1, np.nan, values), dtype, order)
    b.result((x[0], targets), F32)
    records: list[list[int]] = [[]] * count
    entries: list[tuple[int, int]] = []
    rest = [(i, 0) for i in range(count)]
    while rest:
        at, level = rest.pop()
        if level == depth or (level and b.rng.random() < 0.2):
            records[at] = [0, 0, len(entries), 1 + each]
            chosen = b.rng.choice(targets, each, replace=False)
            entries += [(int(k), int(np.float32(2 + b.rng.standard_normal()).view(np.int32))) for k in chosen]
        else:
            limit = int(np.float32(b.rng.integers(-4, 5) / 8).view(np.int32))
            records[at] = [limit, 16 * int(b.rng.integers(x[1])) + int(b.rng.integers(1, 16)), len(records), 0]
            rest += [(len(records), level + 1), (len(records) + 1, level + 1)]
            records += [[], []]
    b.values("branches", np.array(records).reshape(-1), DType.I32)
    b.values("leaves", np.array(entries).reshape(-1), DType.I32)
    op = Trees(nodes=(case,), y="y", x="x", branches="branches", leaves="leaves", trees=count, depth=depth, combine=combine,
               epilogue=_plain(F32))  # fmt: skip
    return b.program(op)


def scatter(
    case: str, x: tuple[int, ...], updates: tuple[int, ...], at: Sequence[int | str], combine: str, dtype: DType = F16, order=None
) -> Program:
    """at: for each axis of x an axis of the updates, or the name of an index that is read at the updates' first axes."""
    b = Builder(case)
    numbers = dtype is I64
    for name, shape in (("x", x), ("updates", updates)):
        if numbers:
            b.integers(name, shape, dtype)
        else:
            b.normal(name, shape, dtype, order if name == "x" else None)
    b.result(x, dtype, order)
    places = []
    for axis, how in enumerate(at):
        if isinstance(how, int):
            places.append(coord(how))
        else:
            b.integers(how, updates[: len(how)], DType.I32, -x[axis], x[axis])
            places.append(element(how, [coord(a) for a in range(len(how))], x[axis]))
    op = Scatter(nodes=(case,), y="y", x="x", updates="updates", at=tuple(places), combine=combine, epilogue=_plain(dtype))
    return b.program(op)


def _plain(dtype: DType) -> Epilogue:
    return Epilogue(Expr("acc", (), None, dtype.compute))


def _chain(b: Builder):
    """(x·scale + r) through silu and a clip, broadcast along two ways"""
    shape = (2, 35, 7, 9)
    b.normal("x", shape, F16, NHWC)
    b.normal("r", (35, 1, 1), F32)
    b.normal("s", (2, 1, 7, 9), F16, NHWC)
    b.result(shape, F16, NHWC)
    total = call("add", call("mul", load(0), load(1)), load(2))
    views = (identity_view("x", 4), broadcast_view("r", (35, 1, 1), shape), broadcast_view("s", (2, 1, 7, 9), shape))
    return call("min", call("silu", total), 1.5), views


def _transposed(b: Builder):
    b.normal("x", (5, 70, 33), F16)
    b.result((33, 5, 70), F16)
    return load(0), (View("x", (coord(1), coord(2), coord(0))),)


def _to_float8(b: Builder):
    """Some values are too large, and saturate"""
    b.normal("x", (2, 35, 7, 9), F16, NHWC, 300.0)
    b.result((2, 35, 7, 9), DType.E4M3, NHWC)
    return call("mul", load(0), 0.7), (identity_view("x", 4),)


def _of_float8_turned(b: Builder):
    b.normal("x", (5, 70, 33), DType.E4M3)
    b.result((33, 5, 70), DType.E4M3)
    return load(0), (View("x", (coord(1), coord(2), coord(0))),)


def _reshaped(b: Builder):
    b.normal("x", (2, 40, 6, 5), F16, NHWC)
    b.result((2, 1200), F16)
    return load(0), (reshape_view("x", (2, 40, 6, 5), (2, 1200)),)


def _padded(b: Builder):
    """An edge of one value around an image: not everything is read"""
    b.normal("x", (1, 12, 5, 6), F16, NHWC)
    b.result((1, 12, 8, 9), F16, NHWC)
    index = (coord(0), coord(1), coord(2) + -1, coord(3) + -2)
    valid = (Range(index[2], 0, 5), Range(index[3], 0, 6))
    return load(0), (View("x", index, valid, 0.25),)


def _shuffled(b: Builder):
    """Channels in another order: quotients and remainders"""
    shape = (1, 24, 5, 7)
    b.normal("x", shape, F16, NHWC)
    b.result(shape, F16, NHWC)
    c = coord(1)
    return load(0), (View("x", (coord(0), quotient(c, 3, shape) + remainder(c, 3, shape) * 8, coord(2), coord(3))),)


def _integers(b: Builder):
    b.integers("x", (3, 21), I64)
    b.integers("d", (21,), I64, 1, 5)
    b.result((3, 21), I64)
    x, d = load(0, I64), load(1, I64)
    return call("add", call("floor_mod", x, d), call("trunc_div", x, d)), (
        identity_view("x", 2),
        broadcast_view("d", (21,), (3, 21)),
    )


def _booleans(b: Builder):
    b.normal("x", (4, 30), F16)
    b.normal("z", (4, 30), F32)
    b.result((4, 30), DType.BOOL)
    both = call("bit_and", call("less", load(0), load(1)), call("greater", load(0), -0.5))
    return both, (identity_view("x", 2), identity_view("z", 2))


def _half_step(b: Builder):
    """Into a slice of another tensor, from every other column backwards"""
    b.normal("x", (6, 5, 32), F32)
    b.slice_of((6, 5, 16), 2, 40, 8, F16)
    return call("exp", load(0)), (View("x", (coord(0), coord(1), coord(2) * -2 + 31)),)


def _batch_norm(b: Builder):
    """A scale and a shift a channel, and ReLU, from one slice of a concatenation into another (as DenseNet has them)"""
    shape = (2, 58, 7, 9)
    b.part("x", shape, 1, 82, 12, F16, NHWC)
    b.normal("s", (58,), F32)
    b.normal("t", (58,), F32)
    b.slice_of(shape, 1, 75, 17, F16, NHWC)
    channel = (coord(1),)
    total = call("add", call("mul", load(0), load(1)), load(2))
    return call("relu", total), (identity_view("x", 4), View("s", channel), View("t", channel))


def _concatenation(at: int, channels: int, whole: int):
    """A copy of an image into channels `at` onwards of `whole`"""

    def make(b: Builder):
        b.normal("x", (2, channels, 6, 7), F16, NHWC)
        b.slice_of((2, channels, 6, 7), 1, whole, at, F16, NHWC)
        return load(0), (identity_view("x", 4),)

    return make


def _many(b: Builder):
    """More tensors than fit one tuple of Numba's"""
    shape = (2, 19, 5, 6)
    views = []
    for i in range(12):
        b.normal(f"x{i}", shape, F16, NHWC)
        views.append(identity_view(f"x{i}", 4))
    b.result(shape, F16, NHWC)
    total = load(0)
    for i in range(1, 12):
        total = call("add" if i % 3 else "mul", total, load(i))
    return total, tuple(views)


MANY = "bias scale residual residual tanh residual residual residual scale residual bias"
"""An epilogue with more arguments than fit one tuple of Numba's."""


@dataclass(frozen=True)
class Case:
    """What makes a program of one op, given its name, and what is done to that program."""

    make: Callable[..., Program]
    args: tuple[Any, ...]
    how: dict[str, Any]
    then: Callable[[Program], Program] | None = None

    def __call__(self, case: str) -> Program:
        made = self.make(case, *self.args, **self.how)
        return self.then(made) if self.then else made

    @property
    def kind(self) -> tuple[Callable[..., Program], bool]:
        """What the type of its op follows from: who makes it, and whether it has a window."""
        return self.make, bool(signature(self.make).bind("", *self.args, **self.how).arguments.get("window"))


Cases = dict[str, Case]


def _case(make: Callable[..., Program], *args, **how) -> Case:
    return Case(make, args, how)


def pruned(w: np.ndarray, seed: int = 0) -> np.ndarray:
    """Weights (O, C, …) with two of every four neighbouring channels, or fewer, somewhere."""
    rows = np.moveaxis(w, 1, -1)
    fours = np.pad(rows, [(0, 0)] * (rows.ndim - 1) + [(0, -rows.shape[-1] % 4)]).reshape(*rows.shape[:-1], -1, 4).copy()
    rng = np.random.default_rng(seed)
    np.put_along_axis(fours, rng.permuted(np.broadcast_to(np.arange(4), fours.shape), axis=-1)[..., :2], 0, -1)
    return np.moveaxis(fours.reshape(*rows.shape[:-1], -1)[..., : rows.shape[-1]], -1, 1).copy()


def _with_pruned(dense: Program) -> Program:
    """With weights that are 2:4, which are there in their compressed form, too."""
    (op,) = dense.ops
    name = op.w if isinstance(op, Conv) else op.b if isinstance(op, Gemm) else ""
    w = dense.constants[name]
    assert isinstance(w, Literal)
    return compress(replace(dense, constants={**dense.constants, name: Literal(pruned(w.values))}), {})


def _sparse(make: Callable[..., Program], *args, **how) -> Case:
    return Case(make, args, how, _with_pruned)


CASES: Cases = {
    # weights that are 2:4
    "packed_row": _case(packed, (1, 600), 40),
    "packed_halves": _case(packed, (5, 1100), 70, block=64, zeros=False, scales=F16, ep="bias residual"),
    "packed_blocks_of_16": _case(packed, (11, 300), 45, block=16, scales=F16),
    "packed_bytes": _case(packed, (16, 2100), 21, bits=8, block=2176, zeros=False, ep="bias relu"),
    "packed_bytes_in_blocks": _case(packed, (3, 900), 200, bits=8, block=128),
    "packed_of_floats": _case(packed, (2, 300), 45, block=256, dtype=F32),
    "sparse_gemm": _sparse(gemm, (77, 200), 130, ep="bias relu"),
    "sparse_gemm_tiles": _sparse(gemm, (600, 1032), 198),
    "sparse_gemm_residual": _sparse(gemm, (300, 528), 270, ep="bias residual"),
    "sparse_gemm_few": _sparse(gemm, (5, 2064), 300),
    "sparse_conv": _sparse(conv, (2, 40, 13, 11), 72, (3, 3), ep="bias relu"),
    "sparse_conv_stride": _sparse(conv, (1, 67, 15, 9), 21, (5, 3), stride=2),
    "sparse_conv_1x1": _sparse(conv, (3, 144, 14, 14), 256, (1, 1), ep="bias residual"),
    "sparse_s8_gemm": _sparse(of_8_bits, (300, 1040), 198, kinds=(DType.U8, DType.I8, F16)),
    "sparse_conv_whole": _sparse(conv, (2, 64, 13, 11), 72, (3, 3), 1, None, 1, 1, "bias relu"),
    "sparse_s8_conv_whole": _sparse(of_8_bits, (1, 128, 13, 11), 72, (3, 3), (DType.U8, DType.I8, DType.I8)),
    "sparse_s8_conv": _sparse(of_8_bits, (2, 144, 15, 14), 96, (3, 3), (DType.I8, DType.I8, F16)),
    "sparse_gemm_blocks": _sparse(gemm, (1000, 196), 250, ep="bias relu"),
    "sparse_s8_gemm_blocks": _sparse(of_8_bits, (1000, 390), 250, kinds=(DType.U8, DType.I8, F16)),
    "sparse_fp8_gemm": _sparse(of_float8, (300, 700), 198),
    "sparse_fp8_gemm_shared": _sparse(of_float8, (4700, 330), 1500),
    "sparse_fp8_conv": _sparse(of_float8, (2, 144, 15, 14), 96, (3, 3), (DType.E4M3, DType.E4M3, F16)),
    # integers of 8 bits, whose sums are int32
    "s8_gemm": _case(of_8_bits, (77, 200), 45),
    "s8_gemm_extreme": _case(of_8_bits, (33, 1040), 40, kinds=(DType.U8, DType.U8, DType.I32), extreme=True),
    "s8_gemm_rounded": _case(of_8_bits, (33, 1040), 40, kinds=(DType.U8, DType.U8, F32), extreme=True),
    "s8_gemm_batches": _case(of_8_bits, (2, 3, 19, 40), 21, kinds=(DType.I8, DType.U8, F16)),
    "s8_gemm_few": _case(of_8_bits, (5, 2064), 300, kinds=(DType.U8, DType.I8, DType.U8)),
    "s8_conv": _case(of_8_bits, (2, 48, 13, 11), 40, (3, 3), (DType.U8, DType.I8, DType.I8)),
    "s8_conv_stride": _case(of_8_bits, (1, 67, 15, 9), 21, (5, 3), (DType.I8, DType.U8, F16), stride=2),
    "s8_gemm_tiles": _case(of_8_bits, (600, 528), 270, kinds=(DType.U8, DType.I8, DType.I8)),
    "s8_gemm_halves": _case(of_8_bits, (300, 1040), 198, kinds=(DType.I8, DType.U8, F16)),
    "s8_conv_wide": _case(of_8_bits, (2, 144, 15, 14), 96, (3, 3), (DType.U8, DType.I8, DType.U8)),
    "s8_conv_1x1": _case(of_8_bits, (3, 64, 14, 14), 256, (1, 1), (DType.U8, DType.I8, DType.I8)),
    "s8_conv_five_stages": _case(of_8_bits, (1, 640, 8, 10), 1280, (1, 1), (DType.U8, DType.I8, DType.U8)),
    "s8_gemm_thin_shares": _case(of_8_bits, (300, 144), 40, kinds=(DType.U8, DType.I8, DType.U8)),
    "s8_conv_short": _case(of_8_bits, (3, 352, 14, 14), 48, (1, 1), (DType.U8, DType.I8, DType.U8), residual=DType.U8),
    "s8_conv_1x1_stride": _case(of_8_bits, (2, 256, 14, 14), 128, (1, 1), (DType.I8, DType.I8, F16), stride=2),
    "s8_conv_1x1_residual": _case(of_8_bits, (3, 64, 14, 14), 256, (1, 1), (DType.U8, DType.I8, DType.I8), residual=DType.I8),
    "s8_conv_residual": _case(of_8_bits, (2, 48, 13, 11), 48, (3, 3), (DType.I8, DType.I8, DType.U8), residual=DType.I8),
    "s8_gemm_residual": _case(of_8_bits, (300, 528), 270, kinds=(DType.I8, DType.I8, DType.I8), residual=DType.U8),
    "halves_to_bytes_stem": _case(halves_to_bytes, (2, 3, 37, 45), 40, (7, 7), stride=2),
    "halves_to_bytes_stem_3x3": _case(halves_to_bytes, (1, 3, 19, 36), 24, (3, 3)),
    "halves_to_bytes_1x1": _case(halves_to_bytes, (3, 72, 13, 14), 96, (1, 1)),
    "halves_to_bytes_3x3": _case(halves_to_bytes, (2, 64, 13, 14), 48, (3, 3)),
    "s8_conv_groups": _case(of_8_bits, (1, 64, 9, 10), 48, (3, 3), (DType.U8, DType.I8, DType.U8), groups=2),
    "s8_conv_narrow_groups": _case(of_8_bits, (1, 18, 9, 10), 27, (3, 3), (DType.I8, DType.I8, DType.I32), groups=3),
    # floats of 8 bits, of both kinds in any mix
    "fp8_gemm": _case(of_float8, (77, 200), 45),
    "fp8_gemm_mixed": _case(of_float8, (70, 300), 72, kinds=(DType.E5M2, DType.E4M3, F32), fn="relu"),
    "fp8_gemm_long": _case(of_float8, (33, 16384), 40, kinds=(DType.E4M3, DType.E4M3, F32), sign=False),
    "fp8_gemm_batches": _case(of_float8, (2, 3, 19, 40), 21, kinds=(DType.E4M3, DType.E5M2, F16)),
    "fp8_gemm_few": _case(of_float8, (5, 2064), 300, kinds=(DType.E4M3, DType.E4M3, DType.E4M3)),
    "fp8_gemm_tiles": _case(of_float8, (600, 528), 270, kinds=(DType.E4M3, DType.E4M3, DType.E4M3), fn="gelu"),
    "fp8_gemm_residual": _case(of_float8, (300, 528), 270, residual=F16),
    "fp8_conv": _case(of_float8, (2, 48, 13, 11), 40, (3, 3), (DType.E4M3, DType.E4M3, DType.E4M3), fn="relu"),
    "fp8_conv_stride": _case(of_float8, (1, 67, 15, 9), 21, (5, 3), (DType.E4M3, DType.E5M2, F16), stride=2, bias=False),
    "fp8_conv_wide": _case(of_float8, (2, 144, 15, 14), 96, (3, 3), (DType.E4M3, DType.E4M3, F16), fn="silu"),
    "fp8_conv_residual": _case(of_float8, (2, 72, 19, 37), 48, (3, 3), (DType.E4M3,) * 3, residual=DType.E4M3),
    "fp8_conv_few_outputs": _case(of_float8, (2, 136, 21, 18), 3, (5, 3), (DType.E4M3, DType.E5M2, F32)),
    "fp8_conv_output_of_3": _case(of_float8, (2, 64, 37, 51), 3, (3, 3), (DType.E4M3, DType.E4M3, F32), to="output"),
    "fp8_conv_1x1_residual": _case(of_float8, (3, 64, 14, 14), 256, (1, 1), (DType.E4M3,) * 3, fn="relu", residual=DType.E4M3),
    "fp8_gemm_thin": _case(of_float8, (1000, 144), 24, (), (DType.E4M3, DType.E5M2, F16)),
    "fp8_gemm_thin_wide": _case(of_float8, (300, 16), 96, (), (DType.E4M3,) * 3, fn="relu"),
    "fp8_gemm_thin_shares": _case(of_float8, (300, 40), 168, kinds=(DType.E4M3,) * 3, fn="relu"),
    "fp8_gemm_thin_long": _case(of_float8, (70000, 32), 3),
    "fp8_conv_five_stages": _case(of_float8, (1, 640, 8, 10), 1280, (1, 1), (DType.E4M3,) * 3, fn="relu"),
    "fp8_conv_once": _case(of_float8, (3, 96, 14, 13), 160, (1, 1), (DType.E4M3,) * 3, fn="relu"),
    "fp8_conv_once_two": _case(of_float8, (3, 256, 14, 13), 160, (1, 1), (DType.E4M3,) * 3, fn="relu"),
    "fp8_conv_pairs": _case(of_float8, (2, 736, 9, 10), 72, (1, 1), (DType.E4M3,) * 3, fn="relu"),
    "fp8_conv_once_halves": _case(of_float8, (2, 128, 19, 14), 264, (1, 1), (DType.E4M3, DType.E5M2, F16)),
    "fp8_conv_short": _case(of_float8, (3, 352, 14, 14), 48, (1, 1), (DType.E4M3,) * 3, fn="relu", residual=DType.E4M3),
    "fp8_conv_1x1_stride": _case(of_float8, (2, 256, 14, 14), 128, (1, 1), (DType.E4M3, DType.E4M3, F32), stride=2),
    "fp8_conv_groups": _case(of_float8, (1, 64, 9, 10), 48, (3, 3), (DType.E4M3, DType.E4M3, DType.E4M3), groups=2),
    "fp8_conv_narrow_groups": _case(of_float8, (1, 18, 9, 10), 27, (3, 3), groups=3),
    "fp8_conv_depthwise": _case(of_float8, (1, 24, 9, 10), 24, (3, 3), groups=24),
    "fp8_pool": _case(pool, (2, 24, 9, 10), "max", (3, 3), stride=2, pad=1, dtype=DType.E4M3),
    "fp8_pool_odd": _case(pool, (1, 13, 7, 6), "max", (2, 2), dtype=DType.E5M2),
    "fp8_from_halves": _case(pointwise, _to_float8),
    "fp8_transposed": _case(pointwise, _of_float8_turned),
    # convolution: sizes that fill no tile, strides, dilations, groups, epilogues, destinations
    "bytes_conv": _case(product_of_bytes, (1, 24, 6, 7), 40, window=(3, 3)),
    "bytes_conv_1x1": _case(product_of_bytes, (2, 256, 5, 5), 24, window=(1, 1)),
    "conv_3x3": _case(conv, (1, 32, 14, 14), 64, (3, 3), ep="bias relu"),
    "conv_3x3_odd": _case(conv, (2, 19, 13, 11), 37, (3, 3), ep="bias residual relu"),
    "conv_3x3_stride2": _case(conv, (3, 40, 15, 17), 72, (3, 3), stride=2, ep="bias silu"),
    "conv_1x1": _case(conv, (1, 64, 28, 28), 256, (1, 1), ep="bias residual relu"),
    "conv_1x1_of_16": _case(conv, (2, 16, 9, 11), 96, (1, 1), ep="bias relu"),
    "conv_1x1_of_24": _case(conv, (2, 24, 9, 11), 144, (1, 1), ep="bias relu"),
    "conv_1x1_of_32": _case(conv, (3, 32, 9, 11), 16, (1, 1)),
    "conv_1x1_of_40": _case(conv, (2, 40, 9, 11), 120, (1, 1), ep="bias silu"),
    "conv_1x1_of_144": _case(conv, (2, 144, 9, 11), 24, (1, 1), ep="bias residual"),
    "conv_1x1_stride2": _case(conv, (2, 128, 14, 14), 96, (1, 1), stride=2),
    "conv_7x7_stem": _case(conv, (1, 3, 61, 63), 64, (7, 7), stride=2, ep="bias relu"),
    "conv_5x1": _case(conv, (1, 24, 20, 9), 40, (5, 1), ep="bias hard_swish"),
    "conv_dilated": _case(conv, (1, 32, 17, 17), 32, (3, 3), dilation=2, ep="bias gelu"),
    "conv_unpadded": _case(conv, (1, 16, 9, 9), 8, (3, 3), pad=0, ep=""),
    "conv_wide": _case(conv, (1, 16, 65, 130), 136, (3, 3), ep="bias relu"),
    "conv_wide_residual": _case(conv, (2, 40, 70, 130), 136, (1, 1), ep="bias residual relu"),
    "conv_deep": _case(conv, (1, 512, 7, 7), 512, (3, 3), ep="bias residual relu"),
    "conv_batch": _case(conv, (9, 64, 7, 7), 200, (1, 1), ep="bias sigmoid"),
    "conv_to_3": _case(conv, (1, 64, 21, 33), 3, (3, 3), ep="bias"),
    "conv_slice": _case(conv, (1, 48, 14, 14), 32, (3, 3), ep="bias relu", to="slice"),
    "conv_tail": _case(conv, (1, 48, 14, 14), 30, (3, 3), ep="bias relu", to="tail"),
    "conv_output": _case(conv, (2, 40, 12, 10), 20, (3, 3), ep="bias", to="output"),
    "conv_shuffle": _case(conv, (1, 32, 11, 13), 48, (3, 3), ep="bias shuffle"),
    "conv_shuffle_3": _case(conv, (1, 32, 11, 13), 12, (3, 3), ep="bias tanh shuffle"),
    "conv_shuffle_1": _case(conv, (3, 12, 9, 7), 4, (3, 3), ep="bias shuffle"),
    "conv_shuffle_5": _case(conv, (1, 20, 9, 7), 20, (3, 3), ep="bias shuffle"),
    "conv_shuffle_7_by_3": _case(conv, (1, 16, 6, 7), 63, (3, 3), ep="bias shuffle3"),
    "conv_shuffle_output": _case(conv, (2, 32, 11, 13), 27, (3, 3), ep="bias shuffle3", to="output"),
    "conv_from_input": _case(conv, (2, 3, 20, 22), 16, (3, 3), stride=2, ep="bias relu", dtype=F32, source="plain"),
    "conv_border_to_border": _case(conv, (1, 3, 20, 22), 3, (3, 3), dtype=F32, source="plain", to="output"),
    "conv_residual_output": _case(conv, (1, 24, 10, 12), 12, (1, 1), ep="bias residual relu", to="output"),
    "conv_1x1_output": _case(conv, (3, 58, 7, 7), 58, (1, 1), to="output"),
    "conv_from_slice": _case(conv, (1, 32, 12, 12), 40, (3, 3), source="slice", ep="bias relu"),
    "conv_from_odd": _case(conv, (1, 29, 12, 12), 40, (3, 3), source="odd", ep="bias relu"),
    "conv_to_odd": _case(conv, (3, 32, 9, 9), 20, (3, 3), ep="bias relu", to="odd"),
    "conv_to_gap": _case(conv, (2, 48, 15, 14), 35, (3, 3), ep="bias residual relu", to="gap"),
    "conv_to_odd_tail": _case(conv, (1, 32, 9, 9), 20, (1, 1), ep="bias residual", to="odd_tail"),
    "conv_to_tokens": _case(conv, (2, 24, 9, 7), 40, (3, 3), ep="bias residual", to="tokens"),
    "conv_to_tokens_odd": _case(conv, (1, 48, 5, 9), 29, (1, 1), ep="bias relu", to="tokens"),
    "conv_58": _case(conv, (3, 58, 14, 14), 58, (1, 1), ep="bias relu"),
    "conv_650": _case(conv, (1, 650, 7, 7), 26, (1, 1), ep="bias relu"),
    "conv_12_to_12": _case(conv, (1, 12, 13, 9), 12, (3, 3), ep="bias"),
    "conv_many": _case(conv, (1, 32, 9, 9), 35, (3, 3), ep=MANY),
    "conv_of_one": _case(conv, (1, 1, 1, 1), 1, (1, 1)),
    "conv_of_one_pixel": _case(conv, (1, 40, 1, 1), 33, (3, 3)),
    "conv_scaled": _case(conv, (1, 40, 12, 10), 28, (3, 3), ep="up relu down bias"),
    "conv_fp32_result": _case(conv, (1, 40, 12, 10), 28, (3, 3), ep="bias residual", to="fp32"),
    "conv_fp32_weights": _case(conv, (1, 40, 12, 10), 28, (3, 3), weights=F32),
    "conv_fp32": _case(conv, (1, 20, 13, 11), 24, (3, 3), ep="bias residual relu", dtype=F32),
    "conv_1d": _case(conv, (2, 40, 57), 48, (9,), ep="bias relu"),
    "conv_1d_stride3": _case(conv, (1, 16, 100), 33, (5,), stride=3),
    "conv_1_channel": _case(conv, (1, 1, 21, 37), 70, (5, 5), ep="bias tanh"),
    "conv_2_channels": _case(conv, (2, 2, 15, 40), 20, (3, 4), dilation=2, ep="bias relu"),
    "conv_4_channels_to_150": _case(conv, (1, 4, 19, 35), 150, (3, 3), ep="bias residual"),
    "conv_9x9": _case(conv, (1, 3, 30, 45), 32, (9, 9), pad=0),
    "conv_11x11_stride4": _case(conv, (2, 3, 57, 60), 64, (11, 11), stride=4, pad=2, ep="bias relu"),
    "conv_plain_fp16": _case(conv, (2, 3, 20, 22), 24, (3, 3), stride=2, ep="bias relu", source="plain"),
    "conv_planes": _case(conv, (2, 3, 37, 60), 72, (7, 7), stride=2, ep="bias relu", source="planes"),
    "conv_planes_of_many_tiles": _case(conv, (3, 3, 150, 271), 32, (3, 3), ep="bias silu", source="planes"),
    "conv_planes_of_1": _case(conv, (1, 1, 33, 47), 64, (5, 5), ep="bias tanh", source="planes", to="tail"),
    "conv_planes_of_4": _case(conv, (1, 4, 40, 41), 40, (3, 4), stride=2, pad=0, ep="", source="planes", to="slice"),
    "conv_1d_1_channel": _case(conv, (2, 1, 300), 48, (10,), stride=5, ep="bias relu"),
    "conv_9x9_to_27": _case(conv, (1, 32, 30, 37), 27, (1, 9), pad=0, ep=""),
    "conv_groups_4": _case(conv, (1, 64, 14, 14), 64, (3, 3), groups=4, ep="bias relu"),
    "conv_groups_32": _case(conv, (2, 128, 9, 9), 128, (3, 3), groups=32, ep="bias relu"),
    "conv_groups_odd": _case(conv, (1, 15, 9, 9), 21, (3, 3), groups=3, ep="bias"),
    "conv_groups_stride2": _case(conv, (3, 32, 11, 13), 64, (3, 3), stride=2, groups=2, ep="bias relu"),
    "conv_groups_tail": _case(conv, (1, 48, 9, 9), 48, (3, 3), groups=3, ep="bias", to="tail"),
    "conv_groups_1x1": _case(conv, (1, 60, 9, 9), 60, (1, 1), groups=3, ep="bias residual"),
    "conv_multiplier": _case(conv, (1, 12, 10, 10), 24, (3, 3), groups=12, ep="bias"),
    "depthwise_3x3": _case(conv, (1, 96, 28, 28), 96, (3, 3), groups=96, ep="bias hard_swish"),
    "depthwise_5x5_stride2": _case(conv, (2, 20, 15, 17), 20, (5, 5), stride=2, groups=20, ep="bias silu"),
    "depthwise_7x7": _case(conv, (1, 24, 14, 14), 24, (7, 7), groups=24, ep="bias residual"),
    "depthwise_dilated": _case(conv, (1, 33, 16, 16), 33, (3, 3), dilation=3, groups=33),
    "depthwise_1d": _case(conv, (2, 40, 50), 40, (9,), groups=40, ep="bias relu"),
    "depthwise_fp32": _case(conv, (1, 24, 9, 11), 24, (3, 3), groups=24, dtype=F32),
    "depthwise_3x3_stride2": _case(conv, (3, 40, 31, 30), 40, (3, 3), stride=2, groups=40, ep="bias relu"),
    "depthwise_5x5": _case(conv, (2, 48, 17, 14), 48, (5, 5), groups=48, ep="bias silu"),
    "depthwise_5x5_wide": _case(conv, (2, 72, 20, 35), 72, (5, 5), groups=72, ep="bias residual"),
    "depthwise_3x3_wide": _case(conv, (2, 72, 40, 150), 72, (3, 3), groups=72, ep="bias relu"),
    "depthwise_3x3_many_images": _case(conv, (300, 40, 9, 10), 40, (3, 3), groups=40, ep="bias relu"),
    "depthwise_3x3_unpadded": _case(conv, (2, 16, 19, 21), 16, (3, 3), stride=2, pad=0, groups=16),
    "depthwise_3x3_whole_pixels": _case(conv, (9, 144, 14, 14), 144, (3, 3), groups=144, ep="bias relu"),
    "conv_halo_many_tiles": _case(conv, (2, 96, 70, 190), 32, (3, 3), ep="bias relu"),
    "conv_halo_residual": _case(conv, (1, 64, 75, 90), 64, (3, 3), ep="bias residual"),
    "conv_halo_three_boxes": _case(conv, (1, 184, 61, 83), 72, (3, 3), ep="bias relu"),
    "conv_halo_5x5_slices": _case(conv, (3, 40, 50, 47), 24, (5, 5), ep="bias relu", source="slice", to="tail"),
    "conv_halo_output_of_3": _case(conv, (2, 72, 61, 83), 3, (3, 3), ep="bias tanh", to="output"),
    "conv_halo_output_of_1": _case(conv, (5, 16, 33, 90), 1, (5, 5), ep="", to="output"),
    "conv_halo_output_shuffled": _case(conv, (1, 32, 75, 91), 9, (3, 3), ep="bias shuffle3", to="output"),
    "conv_halo_fp32": _case(conv, (3, 130, 29, 41), 19, (3, 3), ep="bias residual relu", to="fp32"),
    "depthwise_5x5_many_images": _case(conv, (90, 200, 14, 14), 200, (5, 5), groups=200, ep="bias silu"),
    "depthwise_7x7_gelu": _case(conv, (2, 104, 28, 27), 104, (7, 7), groups=104, ep="bias gelu"),
    "depthwise_7x7_stride2": _case(conv, (2, 40, 29, 33), 40, (7, 7), stride=2, groups=40),
    "depthwise_slices": _case(conv, (2, 20, 15, 14), 20, (5, 5), stride=2, groups=20, ep="bias", source="slice", to="tail"),
    "depthwise_gap": _case(conv, (2, 36, 20, 20), 36, (3, 3), groups=36, ep="bias", to="gap"),
    "depthwise_58": _case(conv, (3, 58, 15, 15), 58, (3, 3), stride=2, groups=58),
    "depthwise_from_odd": _case(conv, (1, 36, 9, 9), 36, (3, 3), groups=36, ep="bias relu", source="odd"),
    "depthwise_to_odd": _case(conv, (1, 36, 9, 9), 36, (3, 3), groups=36, ep="bias relu", to="odd"),
    "depthwise_tail": _case(conv, (1, 20, 9, 9), 20, (3, 3), groups=20, ep="bias", to="tail"),
    "depthwise_output": _case(conv, (1, 20, 9, 9), 20, (3, 3), groups=20, ep="bias", to="output"),
    "depthwise_u8": _case(depthwise_of_bytes, (2, 40, 15, 18), (3, 3), (DType.U8, F16, DType.U8)),
    "depthwise_s8_stride2": _case(depthwise_of_bytes, (2, 36, 17, 14), (5, 5), (DType.I8, F16, F16), stride=2),
    "depthwise_s8_7x7": _case(depthwise_of_bytes, (1, 24, 14, 14), (7, 7), (DType.I8, F16, DType.I8)),
    "depthwise_bytes_3x3": _case(depthwise_of_bytes, (3, 40, 13, 17), (3, 3), (DType.U8, DType.I8, DType.U8)),
    "depthwise_bytes_3x3_stride2": _case(depthwise_of_bytes, (2, 80, 15, 14), (3, 3), (DType.I8, DType.I8, F16), stride=2),
    "depthwise_bytes_5x5": _case(depthwise_of_bytes, (2, 24, 11, 9), (5, 5), (DType.I8, DType.I8, DType.I8)),
    "depthwise_bytes_5x5_stride2": _case(depthwise_of_bytes, (5, 144, 14, 14), (5, 5), (DType.U8, DType.I8, F16), stride=2),
    "depthwise_bytes_7x7": _case(depthwise_of_bytes, (1, 16, 7, 7), (7, 7), (DType.U8, DType.I8, DType.U8)),
    "depthwise_bytes_1d": _case(depthwise_of_bytes, (2, 40, 50), (5,), (DType.U8, DType.I8, F16)),
    "depthwise_bytes_9": _case(depthwise_of_bytes, (2, 40, 50), (9,), (DType.I8, DType.I8, F32)),
    "depthwise_u8_1d": _case(depthwise_of_bytes, (2, 40, 50), (9,), (DType.U8, F32, F32)),
    "depthwise_many": _case(conv, (1, 24, 9, 11), 24, (3, 3), groups=24, ep=MANY),
    # matrix products
    "gemm": _case(gemm, (77, 200), 130),
    "gemm_1_row": _case(gemm, (1, 512), 1000),
    "gemm_large": _case(gemm, (300, 1024), 512, ep="bias gelu"),
    "gemm_short_k": _case(gemm, (65, 8), 24, ep="bias relu"),
    "gemm_odd_k": _case(gemm, (33, 75), 19, ep="bias residual"),
    "gemm_rank_3": _case(gemm, (3, 50, 96), 64, ep="bias tanh"),
    "mlp": _case(mlp, (1, 600), 48, 130),
    "mlp_large": _case(mlp, (1, 1152), 48, 1152),
    "mlp_small": _case(mlp, (3, 32), 8, 35, inner="relu", bias=False),
    "mlp_two_rows": _case(mlp, (2, 481), 20, 480, ep="bias tanh"),
    "mlp_200": _case(mlp, (1, 300), 200, 70, to="odd_tail"),
    "mlp_from_odd": _case(mlp, (2, 60), 13, 50, source="odd", to="output"),
    "mlp_fp32": _case(mlp, (1, 77), 10, 40, dtype=F32),
    "gemm_batched": _case(gemm, (4, 35, 64), 50, batched=True, ep=""),
    "gemm_batched_4": _case(gemm, (2, 3, 40, 32), 40, batched=True, ep="residual"),
    "gemm_slice": _case(gemm, (64, 96), 64, to="slice"),
    "gemm_output": _case(gemm, (5, 256), 10, to="output"),
    "gemm_a_transposed": _case(gemm, (77, 200), 130, transposed="a"),
    "gemm_b_transposed": _case(gemm, (150, 203), 131, ep="bias residual", transposed="b"),
    "gemm_both_transposed": _case(gemm, (307, 1030), 270, ep="bias relu", transposed="ab"),
    "gemm_both_transposed_short": _case(gemm, (30, 9), 12, transposed="ab"),
    "gemm_b_transposed_1_row": _case(gemm, (1, 300), 100, transposed="b"),
    "gemm_rank_3_b_transposed": _case(gemm, (3, 50, 96), 64, transposed="b"),
    "gemm_batched_b_transposed": _case(gemm, (2, 3, 40, 37), 72, batched=True, transposed="b"),
    "gemm_batched_transposed": _case(gemm, (4, 35, 67), 50, batched=True, transposed="ab"),
    "gemm_transposed_fp32": _case(gemm, (40, 100), 60, dtype=F32, transposed="ab"),
    "gemm_scaled": _case(gemm, (40, 100), 60, ep="up relu down bias", to="tail"),
    "gemm_fp32_result": _case(gemm, (40, 100), 60, to="fp32"),
    "gemm_fp32": _case(gemm, (40, 100), 60, ep="bias relu", dtype=F32),
    "gemm_to_odd": _case(gemm, (33, 64), 30, to="odd"),
    "gemm_tail": _case(gemm, (33, 64), 30, ep="bias gelu", to="tail"),
    "gemm_many": _case(gemm, (65, 64), 50, ep=MANY),
    "gemm_of_one": _case(gemm, (1, 1), 1),
    "bytes_gemm": _case(product_of_bytes, (40, 256), 72),
    "bytes_gemm_batched": _case(product_of_bytes, (3, 17, 256), 24, batched=True),
    "bytes_gemm_1_row": _case(product_of_bytes, (1, 256), 40),
    "bytes_gemm_8_columns": _case(product_of_bytes, (70, 256), 8),
    "gemm_3_rows": _case(gemm, (3, 2300), 530, ep="bias residual"),
    "gemm_16_rows": _case(gemm, (16, 3000), 520, ep="bias relu"),
    "gemm_11_rows_long": _case(gemm, (11, 20000), 70, to="odd_tail"),
    "gemm_8_columns": _case(gemm, (1300, 512), 8),
    "gemm_13_columns": _case(gemm, (700, 77), 13, ep="bias gelu", to="odd"),
    "gemm_2_rows_fp32": _case(gemm, (2, 900), 300, dtype=F32),
    "conv_squeeze": _case(conv, (2, 672, 1, 1), 28, (1, 1), ep="bias silu"),
    "gemm_batched_1_row": _case(gemm, (5, 1, 40), 17, batched=True),
    "gemm_batched_output": _case(gemm, (3, 20, 40), 17, batched=True, to="output"),
    # pools
    "max_pool_3x3": _case(pool, (1, 64, 23, 25), "max", (3, 3), stride=2, pad=1),
    "max_pool_2x2": _case(pool, (2, 24, 14, 14), "max", (2, 2), stride=2),
    "max_pool_5x5": _case(pool, (1, 19, 13, 13), "max", (5, 5), pad=2, ep="relu"),
    "max_pool_bytes": _case(pool, (2, 24, 9, 10), "max", (3, 3), stride=2, pad=1, dtype=DType.U8),
    "max_pool_signed_bytes": _case(pool, (2, 24, 9, 10), "max", (3, 3), stride=2, pad=1, dtype=DType.I8),
    "max_pool_bytes_odd": _case(pool, (1, 13, 7, 6), "max", (2, 2), dtype=DType.I8),
    "max_pool_ceil": _case(pool, (1, 16, 12, 12), "max", (3, 3), stride=2, end_pad=1),
    "max_pool_dilated": _case(pool, (1, 8, 17, 17), "max", (3, 3), dilation=2),
    "max_pool_gap": _case(pool, (1, 12, 9, 9), "max", (3, 3), pad=1, to="gap"),
    "max_pool_tail": _case(pool, (1, 12, 9, 9), "max", (3, 3), pad=1, to="tail"),
    "max_pool_1d": _case(pool, (2, 20, 31), "max", (4,), stride=3, pad=1),
    "mean_pool_3x3": _case(pool, (1, 40, 14, 14), "mean", (3, 3), pad=1, ep="residual"),
    "mean_pool_counted": _case(pool, (1, 40, 14, 14), "mean", (3, 3), pad=1, count_pads=True),
    "mean_pool_ceil": _case(pool, (1, 16, 12, 12), "mean", (3, 3), stride=2, pad=1, end_pad=2, count_pads=True),
    "mean_pool_7x7": _case(pool, (2, 48, 7, 7), "mean", (7, 7)),
    "mean_pool_fp32": _case(pool, (1, 12, 9, 11), "mean", (2, 3), stride=2, dtype=F32),
    "max_pool_rows": _case(pool, (1, 5, 9, 12), "max", (3, 3), pad=1, order=(0, 1, 2, 3)),
    "max_pool_odd": _case(pool, (1, 12, 9, 9), "max", (3, 3), pad=1, to="odd"),
    "max_pool_output": _case(pool, (3, 20, 9, 9), "max", (3, 3), stride=2, to="output"),
    "mean_pool_many": _case(pool, (1, 20, 9, 9), "mean", (3, 3), pad=1, ep=MANY),
    "mean_pool_of_one": _case(pool, (1, 1, 1, 1), "mean", (1, 1)),
    # reductions
    "mean_hw": _case(reduce, (2, 200, 7, 7), (2, 3), order=NHWC, ep="mean"),
    "mean_hw_large": _case(reduce, (1, 32, 112, 113), (2, 3), order=NHWC, ep="mean"),
    "mean_rows": _case(reduce, (37, 500), (1,), ep="mean"),
    "sum_channels": _case(reduce, (2, 37, 9, 5), (1,), order=NHWC),
    "sum_middle": _case(reduce, (3, 50, 41), (1,)),
    "sum_two_axes": _case(reduce, (5, 6, 7, 24), (0, 2)),
    "sum_all": _case(reduce, (13, 17, 19), (0, 1, 2), dtype=F32),
    "sum_squares": _case(reduce, (9, 300), (1,), pre="square", ep="sqrt"),
    "max_rows": _case(reduce, (9, 77), (1,), combine="max"),
    "min_middle": _case(reduce, (3, 40, 24), (1,), combine="min", pre="abs"),
    "product": _case(reduce, (6, 12), (1,), combine="mul"),
    "sum_integers": _case(reduce, (6, 45), (1,), dtype=I64),
    "mean_bytes": _case(reduce, (2, 37, 9, 5), (2, 3), pre="dequantize", order=NHWC, ep="mean", dtype=DType.U8),
    "mean_rows_of_bytes": _case(reduce, (3, 9, 77), (1, 2), pre="dequantize", ep="mean", dtype=DType.I8),
    "mean_rows_of_16_bits": _case(reduce, (9, 64), (1,), pre="dequantize", ep="mean", dtype=DType.U16),
    "sum_int32": _case(reduce, (70, 3, 45), (0,), dtype=DType.I32),
    "max_integers": _case(reduce, (6, 45), (0,), combine="max", dtype=DType.I32),
    "mean_hw_output": _case(reduce, (3, 58, 7, 7), (2, 3), order=NHWC, ep="mean", to="output"),
    "mean_hw_odd": _case(reduce, (1, 20, 7, 7), (2, 3), order=NHWC, ep="mean", to="odd"),
    "max_many": _case(reduce, (3, 20, 24), (1,), combine="max", ep=MANY),
    "sum_of_one": _case(reduce, (1, 1), (1,)),
    # recurrent layers
    "rnn": _case(rnn, "rnn", 5, 3, 20),
    "rnn_relu": _case(rnn, "rnn", 9, 17, 72, (True,), functions="relu", given="h", scale=0.5),
    "gru": _case(rnn, "gru", 4, 2, 24, (False, True), given="b", reset_after=True),
    "gru_before": _case(rnn, "gru", 3, 3, 13, (True,), given="h"),
    "gru_before_lengths": _case(rnn, "gru", 6, 9, 40, (False, True), lengths=(6, 1, 3, 5, 2, 0, 6, 4, 1), given="h"),
    "gru_wide": _case(rnn, "gru", 12, 1, 512, (False, True), given="b", reset_after=True),
    "gru_streamed": _case(rnn, "gru", 4, 2, 2816, reset_after=True),
    "lstm": _case(rnn, "lstm", 4, 3, 18, given="hc"),
    "lstm_all": _case(
        rnn,
        "lstm",
        5,
        4,
        11,
        (False, True),
        given="phc",
        lengths=(3, 5, 1, 4),
        clip=0.8,
        coupled=True,
        functions="sigmoid tanh affine hard_sigmoid leaky_relu tanh",
    ),
    "lstm_650": _case(rnn, "lstm", 8, 8, 650),
    "lstm_batch": _case(rnn, "lstm", 5, 70, 256, (False, True)),
    "lstm_1200": _case(rnn, "lstm", 3, 16, 1200),
    "rnn_fp32": _case(rnn, "rnn", 4, 2, 20, dtype=F32),
    "gru_before_fp32": _case(rnn, "gru", 4, 5, 37, (False, True), dtype=F32, lengths=(1, 2, 3, 0, 4), given="h"),
    "lstm_fp32": _case(rnn, "lstm", 3, 3, 11, (True,), dtype=F32, given="phc"),
    "gru_wide_state": _case(rnn, "gru", 3, 2, 21, dtype=F32, r=F16, given="b", reset_after=True),
    "rnn_wide_weights": _case(rnn, "rnn", 3, 3, 19, (True,), r=F32),
    "conv_bf16": _case(conv, (2, 40, 13, 9), 56, (3, 3), stride=2, ep="bias relu", dtype=DType.BF16),
    "conv_bf16_groups": _case(conv, (1, 64, 9, 7), 64, (3, 3), groups=4, dtype=DType.BF16, to="tail"),
    "gemm_bf16": _case(gemm, (3, 77, 136), 72, ep="bias gelu", dtype=DType.BF16),
    "gemm_bf16_batched": _case(gemm, (2, 3, 50, 64), 40, batched=True, dtype=DType.BF16, transposed="b"),
    "gemm_f32_deep": _case(gemm, (70, 2000), 100, dtype=F32),
    "conv_f32_halves": _case(conv, (1, 48, 12, 10), 40, (3, 3), dtype=F32, to="slice"),
    "conv_bf16_1x1_residual": _case(conv, (1, 64, 28, 28), 256, (1, 1), ep="bias residual relu", dtype=DType.BF16),
    "conv_bf16_halo": _case(conv, (1, 64, 75, 90), 64, (3, 3), ep="bias residual", dtype=DType.BF16),
    "conv_bf16_deep": _case(conv, (1, 512, 7, 7), 512, (3, 3), ep="bias residual relu", dtype=DType.BF16),
    "gemm_bf16_large": _case(gemm, (300, 1024), 512, ep="bias gelu", dtype=DType.BF16),
    "gemm_bf16_transposed": _case(gemm, (307, 1030), 270, ep="bias relu", transposed="ab", dtype=DType.BF16),
    "attention_bf16": _case(attention, (2, 3, 100, 64), 130, ep="residual", dtype=DType.BF16),
    "attention_bf16_causal": _case(attention, (1, 4, 150, 128), 150, share=2, causal=0, dtype=DType.BF16),
    "attention_bf16_mask": _case(attention, (2, 3, 70, 40), 75, mask=(2, 1, 70, 75), ep="scale bias", dtype=DType.BF16),
    "attention_bf16_decode": _case(attention, (1, 4, 1, 64), 333, dtype=DType.BF16),
    "lstm_bf16": _case(rnn, "lstm", 4, 3, 30, dtype=DType.BF16, given="c"),
    # attention
    "attention": _case(attention, (2, 3, 100, 64), 130, ep="residual"),
    "attention_packed": _case(attention, (2, 3, 197, 64), 197, packed=True),
    "attention_small": _case(attention, (1, 2, 5, 24), 7, e=16),
    "attention_wide": _case(attention, (1, 2, 70, 128), 200, packed=False),
    "attention_widest": _case(attention, (1, 2, 65, 256), 70),
    "attention_40": _case(attention, (1, 3, 129, 40), 300),
    "attention_causal": _case(attention, (1, 2, 150, 64), 150, causal=0),
    "attention_causal_past": _case(attention, (1, 2, 37, 128), 90, causal=53),
    "attention_grouped": _case(attention, (2, 6, 66, 64), 66, share=3, causal=0),
    "attention_mask": _case(attention, (2, 3, 90, 32), 75, mask=(2, 1, 90, 75), ep="scale bias"),
    "attention_mask_row": _case(attention, (2, 3, 90, 64), 70, mask=(2, 1, 1, 70), kind=DType.BOOL),
    "attention_mask_causal": _case(attention, (1, 3, 80, 64), 80, mask=(1, 3, 80, 80), causal=0),
    "attention_mask_keys": _case(attention, (2, 3, 90, 64), 130, mask=(2, 1, 1, 130), hidden=LOWEST, unseen=True),
    "attention_mask_keys_half": _case(attention, (2, 3, 65, 40), 199, mask=(2, 1, 1, 199), kind=F16, unseen=True, causal=140),
    "attention_mask_windows": _case(attention, (4, 3, 49, 32), 49, mask=(4, 3, 49, 49), packed=True),
    "attention_mask_bias": _case(attention, (2, 3, 100, 64), 150, mask=(1, 3, 100, 150), kind=F16),
    "attention_mask_bool": _case(attention, (2, 2, 70, 64), 190, mask=(2, 1, 70, 190), kind=DType.BOOL, unseen=True),
    "attention_mask_lowest": _case(attention, (2, 2, 70, 64), 330, mask=(2, 2, 70, 330), hidden=LOWEST, unseen=True),
    "attention_mask_long": _case(attention, (1, 2, 200, 128), 700, mask=(1, 2, 200, 700), causal=500, ep="residual"),
    "attention_many": _case(attention, (3, 130, 100, 64), 130),
    "attention_many_causal": _case(attention, (2, 90, 200, 128), 250, causal=50, share=3, packed=False),
    "attention_many_masked": _case(attention, (4, 90, 100, 64), 140, mask=(4, 1, 1, 140), hidden=LOWEST, unseen=True),
    "attention_unseen": _case(attention, (1, 2, 40, 64), 40, causal=-9),
    "attention_decode": _case(attention, (3, 4, 1, 64), 259),
    "attention_decode_long": _case(attention, (1, 4, 1, 64), 3000),
    "attention_decode_few": _case(attention, (2, 3, 9, 128), 1100, mask=(2, 1, 1, 1100), causal=1091, ep="residual"),
    "attention_decode_grouped": _case(attention, (1, 8, 3, 80), 2000, share=4, causal=1997),
    "attention_few_tiles": _case(attention, (1, 1, 100, 64), 2100, to="tail"),
    "attention_odd": _case(attention, (1, 2, 33, 20), 35, e=12, ep="residual"),
    "attention_fp32": _case(attention, (2, 2, 40, 36), 45, dtype=F32, causal=5),
    "attention_output": _case(attention, (1, 2, 50, 64), 64, to="output"),
    "attention_tail": _case(attention, (1, 2, 50, 24), 64, to="tail"),
    "attention_long": _case(attention, (1, 2, 600, 128), 1100),
    "fp8_attention": _case(attention, (2, 3, 100, 64), 130, ep="residual", dtype=DType.E4M3, stored=F16),
    "fp8_attention_wide": _case(attention, (1, 2, 70, 128), 200, dtype=DType.E4M3, stored=F16),
    "fp8_attention_widest": _case(attention, (1, 2, 65, 256), 70, dtype=DType.E4M3, stored=F16),
    "fp8_attention_odd": _case(attention, (1, 2, 33, 40), 35, e=12, dtype=DType.E4M3, stored=F32),
    "fp8_attention_80": _case(attention, (2, 4, 129, 80), 300, share=2, dtype=DType.E4M3, stored=F16),
    "fp8_attention_causal": _case(attention, (1, 2, 150, 64), 150, causal=0, dtype=DType.E4M3, stored=DType.E4M3),
    "fp8_attention_mask": _case(attention, (2, 3, 90, 32), 76, mask=(2, 1, 90, 76), dtype=DType.E4M3, stored=F16, unseen=True),
    "fp8_attention_keys": _case(attention, (2, 3, 90, 64), 130, mask=(2, 1, 1, 130), hidden=LOWEST, dtype=DType.E4M3, stored=F16),
    "fp8_attention_bool": _case(
        attention, (2, 2, 70, 64), 190, mask=(2, 1, 70, 190), kind=DType.BOOL, dtype=DType.E4M3, stored=F16
    ),
    "fp8_attention_long": _case(attention, (1, 2, 200, 128), 3500, dtype=DType.E4M3, stored=F16),
    "fp8_attention_decode": _case(attention, (1, 8, 3, 80), 2000, share=4, causal=1997, dtype=DType.E4M3, stored=F16),
    # softmax
    "softmax_rows": _case(softmax, (33, 100), 1),
    "softmax_long": _case(softmax, (5, 3000), 1),
    "softmax_longer": _case(softmax, (3, 9001), 1),
    "softmax_longer_many": _case(softmax, (3, 9001), 1, ep=MANY),
    "softmax_longer_fp32": _case(softmax, (3, 9001), 1, dtype=F32),
    "softmax_very_long": _case(softmax, (2, 40000), 1),
    "softmax_of_words": _case(softmax, (3, 50257), 1),
    "log_softmax_too_long": _case(softmax, (2, 70001), 1, log=True),
    "softmax_middle": _case(softmax, (2, 60, 25), 1),
    "softmax_channels": _case(softmax, (2, 21, 9, 11), 1, order=NHWC),
    "log_softmax": _case(softmax, (4, 1000), 1, log=True),
    "softmax_scaled": _case(softmax, (7, 65), 1, ep="scale"),
    "softmax_fp32": _case(softmax, (9, 130), 1, dtype=F32),
    "softmax_output": _case(softmax, (9, 130), 1, to="output"),
    "softmax_channels_output": _case(softmax, (2, 21, 9, 11), 1, order=NHWC, to="output"),
    "softmax_odd": _case(softmax, (9, 30), 1, to="odd"),
    "softmax_tail": _case(softmax, (9, 30), 1, to="tail"),
    "softmax_many": _case(softmax, (9, 50), 1, ep=MANY),
    "softmax_of_one": _case(softmax, (3, 1), 1),
    "softmax_of_input": _case(softmax, (9, 35), 1, pad=1),
    "softmax_transposed": _case(softmax, (2, 3, 5, 13), 3, source=(0, 1, 3, 2)),
    "log_softmax_transposed": _case(softmax, (2, 3, 5, 130), 3, log=True, source=(0, 1, 3, 2)),
    # normalisations
    "instance_norm": _case(norm, (2, 24, 19, 23), (2, 3), order=NHWC, ep="scale bias relu"),
    "instance_norm_large": _case(norm, (1, 32, 180, 160), (2, 3), order=NHWC, shift=3.0),
    "group_norm": _case(norm, (2, 48, 9, 11), (2, 3), groups=6, order=NHWC, ep="scale bias silu"),
    "instance_norm_fp32": _case(norm, (2, 20, 15, 17), (2, 3), order=NHWC, shift=50.0, dtype=F32),
    "group_norm_batch": _case(norm, (3, 48, 8, 9), (2, 3), groups=8, order=NHWC, shift=10.0, ep="scale bias silu"),
    "group_norm_residual": _case(norm, (3, 160, 13, 17), (2, 3), groups=10, order=NHWC, ep="scale bias residual"),
    "group_norm_odd": _case(norm, (1, 30, 8, 8), (2, 3), groups=5, order=NHWC),
    "group_norm_rows": _case(norm, (2, 24, 4, 6), (2, 3), groups=3, shift=3.0),
    "layer_norm": _case(norm, (40, 768), (1,), ep="scale bias"),
    "layer_norm_3": _case(norm, (2, 7, 100), (2,), axis=2),
    "layer_norm_long": _case(norm, (3, 5000), (1,)),
    "layer_norm_longer": _case(norm, (3, 16384), (1,)),
    "layer_norm_longer_many": _case(norm, (3, 9001), (1,), ep=MANY),
    "layer_norm_longer_fp32": _case(norm, (3, 9001), (1,), shift=10.0, dtype=F32),
    "layer_norm_very_long": _case(norm, (2, 40000), (1,)),
    "layer_norm_too_long": _case(norm, (2, 70001), (1,)),
    "rms_norm_longer": _case(norm, (3, 9001), (1,), ep="scale", shift=2.0, centred=False),
    "layer_norm_fp32": _case(norm, (9, 130), (1,), shift=10.0, dtype=F32),
    "layer_norm_output": _case(norm, (2, 7, 100), (2,), axis=2, to="output"),
    "rms_norm": _case(norm, (9, 700), (1,), ep="scale", shift=2.0, centred=False),
    "layer_norm_of_input": _case(norm, (7, 35), (1,), pad=1),
    "layer_norm_2d": _case(norm, (6, 5, 13), (1, 2), axis=2),
    "layer_norm_2d_of_input": _case(norm, (6, 5, 13), (1, 2), axis=2, pad=1),
    "layer_norm_odd": _case(norm, (7, 100), (1,), to="odd"),
    "layer_norm_many": _case(norm, (9, 130), (1,), ep=MANY),
    "instance_norm_1d": _case(norm, (2, 24, 50), (2,), order=NWC),
    "instance_norm_tail": _case(norm, (3, 20, 9, 9), (2, 3), order=NHWC, to="tail"),
    "instance_norm_output": _case(norm, (1, 3, 60, 61), (2, 3), order=NHWC, to="output"),
    "instance_norm_large_many": _case(norm, (1, 20, 90, 91), (2, 3), order=NHWC, ep=MANY),
    "group_norm_large": _case(norm, (1, 32, 96, 100), (2, 3), groups=8, order=NHWC, ep="scale bias silu"),
    "norm_of_one": _case(norm, (3, 5, 1, 1), (2, 3), order=NHWC),
    # resampling
    "resize_nearest": _case(resize, (1, 24, 9, 7), {2: (18, 1), 3: (14, 1)}),
    "resize_linear": _case(resize, (2, 19, 8, 10), {2: (17, 2), 3: (23, 2)}, ep="residual"),
    "resize_down": _case(resize, (1, 16, 20, 20), {2: (7, 4), 3: (9, 4)}),
    "resize_one_axis": _case(resize, (1, 16, 12, 10), {3: (25, 2)}),
    "resize_1d": _case(resize, (2, 20, 15), {2: (31, 2)}),
    "resize_output": _case(resize, (1, 3, 9, 9), {2: (18, 2), 3: (18, 2)}, to="output"),
    "resize_fp32": _case(resize, (1, 8, 6, 6), {2: (12, 2), 3: (12, 2)}, dtype=F32),
    "resize_odd": _case(resize, (1, 12, 6, 6), {2: (12, 1), 3: (12, 1)}, to="odd"),
    "resize_tail": _case(resize, (1, 12, 6, 6), {2: (12, 2), 3: (12, 2)}, to="tail"),
    "resize_many": _case(resize, (1, 20, 5, 6), {2: (9, 2), 3: (8, 2)}, ep=MANY),
    # pointwise: a model's borders, movement, chains, types
    "to_nhwc": _case(pointwise, _copy((2, 3, 45, 37), F32, "plain", F16, NHWC)),
    "to_nhwc_wide": _case(pointwise, _copy((1, 70, 13, 37), F32, "plain", F16, NHWC)),
    "from_nhwc": _case(pointwise, _copy((2, 35, 13, 21), F16, NHWC, F32, None, output=True)),
    "from_nhwc_fp16": _case(pointwise, _copy((1, 3, 33, 40), F16, NHWC, F16, None, output=True)),
    "cast_to_int": _case(pointwise, _copy((9, 31), F32, None, DType.I32, None)),
    "cast_bf16": _case(pointwise, _copy((9, 31), F32, None, DType.BF16, None)),
    "cast_i8": _case(pointwise, _copy((9, 40), F16, None, DType.I8, None)),
    "from_bf16": _case(pointwise, _copy((2, 5, 9, 31), DType.BF16, "plain", F16, NHWC)),
    "to_bf16": _case(pointwise, _copy((2, 5, 9, 31), F16, NHWC, DType.BF16, None, output=True)),
    "from_fp64": _case(pointwise, _copy((9, 31), DType.F64, "plain", F32, None)),
    "to_fp64": _case(pointwise, _copy((9, 31), F32, None, DType.F64, None, output=True)),
    "to_bool": _case(pointwise, _copy((9, 31), F32, None, DType.BOOL, None, output=True)),
    "from_1d": _case(pointwise, _copy((3, 12, 77), F32, "plain", F16, NWC)),
    "chain": _case(pointwise, _chain),
    "transpose": _case(pointwise, _transposed),
    "reshape": _case(pointwise, _reshaped),
    "pad": _case(pointwise, _padded),
    "channel_shuffle": _case(pointwise, _shuffled),
    "cumsum": _case(cumulate, (3, 17, 20), 1, "add"),
    "cumsum_of_lanes": _case(cumulate, (3, 5, 100), 2, "add", F32, exclusive=True),
    "cumsum_nhwc": _case(cumulate, (2, 13, 5, 7), 1, "add", F16, NHWC, reverse=True),
    "cumsum_integers": _case(cumulate, (40,), 0, "add", I64, exclusive=True, reverse=True),
    "cumprod": _case(cumulate, (6, 90), 1, "mul", F32),
    "cumsum_in_chunks": _case(cumulate, (2, 2500), 1, "add", F32),
    "cumprod_in_chunks": _case(cumulate, (1100, 2), 0, "mul", F16, exclusive=True, reverse=True),
    "carry": _case(carry, (2, 12, 5, 6), (2, 12, 5, 6), F16, NHWC),
    "carry_of_one_number": _case(carry, (), (3, 20)),
    "places": _case(places, 90, 90),
    "places_in_chunks": _case(places, 3000, 700, F32),
    "suppress": _case(suppress, 1, 1, 45),
    "suppress_one": _case(suppress, 1, 2, 1, least=None),
    "suppress_classes": _case(suppress, 2, 3, 45, most=100, iou=0.1),
    "suppress_all": _case(suppress, 1, 2, 200, F16, least=None, most=1000, centred=True),
    "suppress_ties": _case(suppress, 1, 1, 300, whole=True, most=300, iou=1 / 3, least=0.1),
    "suppress_rounds": _case(suppress, 1, 1, 9000, space=60, most=9000, least=None),
    "suppress_most": _case(suppress, 2, 1, 5000, space=40, most=1500),
    "suppress_chains": _case(suppress, 1, 3, 3000, space=6, most=3000, iou=0.6, least=0.2),
    "top_k": _case(top_k, (5, 90), 1, 10),
    "top_k_in_tiles": _case(top_k, (2, 300), 1, 150, F32),
    "top_k_of_bytes": _case(top_k, (1, 260, 2), 1, 20, DType.U8, largest=False),
    "top_k_all": _case(top_k, (2, 37, 3), 1, 37, F32, largest=False),
    "top_k_nhwc": _case(top_k, (1, 21, 6, 5), 1, 3, F16, NHWC),
    "top_k_integers": _case(top_k, (4, 50), 0, 2, DType.I32, largest=False),
    "scatter_elements": _case(scatter, (3, 40, 11), (3, 9, 11), (0, "iii", 2), "set"),
    "scatter_elements_add": _case(scatter, (3, 5, 4), (3, 60, 4), (0, "iii", 2), "add", F32),
    "scatter_rows": _case(scatter, (7, 6, 24), (30, 24), ("a", "b", 1), "max"),
    "scatter_points": _case(scatter, (300,), (400,), ("i",), "add", F32),
    "scatter_last_wins": _case(scatter, (100,), (200,), ("i",), "set", F32),
    "scatter_integers": _case(scatter, (9, 4), (40, 4), ("i", 1), "min", I64),
    "scatter_nhwc": _case(scatter, (2, 19, 4, 5), (2, 6, 4, 5), (0, "iiii", 2, 3), "mul", F16, NHWC),
    "custom_tensor_cores": _case(
        custom,
        "press::Cells",
        [(2, 16, 5, 7), (21, 16)],
        (2, 1, 5, 7),
        dtype=F16,
        dtypes=(F16, F32),
        orders=(NHWC, None),
        order=NHWC,
    ),
    "custom_tensor_cores_output": _case(
        custom, "press::Cells", [(1, 16, 9, 8), (64, 16)], (1, 1, 9, 8), dtype=F16, dtypes=(F32, F32), orders=(NHWC, None)
    ),
    "custom_outputs": _case(
        custom, "test::Spread", [(5, 19), (19, 70)], (360,), (0, 1), dtypes=(F16, F32), steps=(1, 2), scale=0.5, names="no matter"
    ),
    "custom_one_of_two": _case(custom, "test::Spread", [(5, 19), (19, 70)], (5, 70), dtype=F16, steps=(1.5, 2), scale=2),
    "custom_integers": _case(custom, "test::Peak", [(45, 11)], (45,), (1,), I64, orders=((1, 0),)),
    "custom_names": _case(custom, "test::Names", [(9,)], (9,), i32=3, cuda=[1, 5]),
    "custom_optional": _case(custom, "test::Peak", [(45, 11), (11,)], (45,)),
    "trees": _case(trees, (19, 11), 1, 20, 4),
    "trees_of_a_row": _case(trees, (1, 5), 1, 300, 4),
    "trees_of_many_rows": _case(trees, (1000, 7), 3, 10, 4),
    "trees_of_classes": _case(trees, (11, 9), 5, 12, 4, each=5),
    "trees_of_many_targets": _case(trees, (3, 9), 40, 20, 3, each=3),
    "trees_min": _case(trees, (13, 6), 4, 9, 4, "min", each=2),
    "trees_max": _case(trees, (13, 6), 4, 9, 4, "max", each=2, order=(1, 0)),
    "trees_fp16": _case(trees, (13, 6), 1, 9, 4, dtype=F16),
    "trees_of_one": _case(trees, (1, 3), 1, 2, 2),
    "embedding": _case(pointwise, _embedding),
    "gather_elements": _case(pointwise, _gather_elements),
    "gather_nd": _case(pointwise, _gather_nd),
    "integers": _case(pointwise, _integers),
    "booleans": _case(pointwise, _booleans),
    "slice_backwards": _case(pointwise, _half_step),
    "batch_norm_slice": _case(pointwise, _batch_norm),
    "concat_first": _case(pointwise, _concatenation(0, 24, 60)),
    "concat_odd": _case(pointwise, _concatenation(3, 12, 36)),
    "concat_last": _case(pointwise, _concatenation(35, 12, 47)),
    "many_tensors": _case(pointwise, _many),
}


def program_of(case: str) -> Program:
    return CASES[case](case)


def network(batch: int) -> Program:
    """x (batch, 3, 20, 24) fp32; y: a convolution with ReLU, fp32; z = silu(x), fp16. Constants do not depend on the batch."""
    b = Builder("network")
    shape, wide = (batch, 3, 20, 24), (batch, 16, 20, 24)
    b.normal("w", (16, 3, 3, 3), F16, NHWC, 27**-0.5)
    b.normal("bias", (16,), F32)
    for name, extents, dtype in (("x", shape, F32), ("y", wide, F32), ("z", shape, F16)):
        b.tensors[name] = dense(name, extents, dtype, pad=1)
    for name, extents in (("h", shape), ("c", wide)):
        b.tensors[name] = dense(name, extents, F16, NHWC)
    relu = Epilogue(call("relu", call("add", ACC, load(0))), (View("bias", (coord(1),)),))
    one = (1, 1)
    ops = (
        Pointwise(nodes=("Cast_0",), y="h", epilogue=Epilogue(load(0), (identity_view("x", 4),))),
        Conv(nodes=("Conv_1",), y="c", x="h", w="w", strides=one, pads=one, dilations=one, epilogue=relu),
        Pointwise(nodes=("Silu_2",), y="z", epilogue=Epilogue(call("silu", load(0)), (identity_view("h", 4),))),
        Pointwise(nodes=("Cast_3",), y="y", epilogue=Epilogue(load(0), (identity_view("c", 4),))),
    )
    program = Program(("x",), ("y", "z"), b.tensors, b.constants, ops)
    verify(program)
    return program
