"""Kernels that are bound by memory, as fractions of what a copy reaches: python -m tests.bench.bandwidth [--all] [--only TEXT]

Each tensor counts once: bytes read and written, over the time and the bandwidth of PyTorch's copy of 1 GiB in the same run.
"Of one as large" is the time of a copy of as many bytes, which a small one spends on being launched, over the step's.
Matrix products and fp32 layers also have their TFLOP/s. Times are of the config that the cost model takes and of the best of the
candidates that --tune measures, in CUDA graphs on random values (tccompile/tune.py); --all prints every candidate.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from dataclasses import dataclass

from tccompile.arch import ARCHS
from tccompile.ir.expr import ACC, Epilogue, View, call, coord, load
from tccompile.ir.ops import Conv, Gemm, Norm, Op, Reduce, Softmax
from tccompile.ir.program import Program
from tccompile.ir.tensor import dense
from tccompile.ir.types import DType
from tccompile.schedule.choose import candidates
from tccompile.tune import Trial, gpu_to_measure, measure
from tests.bench.layers import NHWC, ConvLayer, GemmLayer, copy_us, one_op, progress, roof, short

F16, F32 = DType.F16, DType.F32


@dataclass(frozen=True)
class Case:
    """A step, by name; `flop` of what it computes, where that is of interest."""

    group: str
    name: str
    op: Op
    program: Program
    flop: float = 0.0

    @property
    def bytes(self) -> int:
        tensors = (self.program.tensors[name] for name in (*self.op.inputs, self.op.y))
        return sum(math.prod(t.padded) * t.dtype.size for t in tensors)


def affine(axis: int, silu: bool) -> Epilogue:
    """A scale and a shift along an axis, and SiLU or not."""
    expr = call("add", call("mul", ACC, load(0)), load(1))
    expr = call("silu", expr) if silu else expr
    return Epilogue(expr, tuple(View(n, (coord(axis),)) for n in ("scale", "shift")))


def norm(x: tuple[int, ...], axes: tuple[int, ...], groups: int = 0, silu: bool = False) -> tuple[Op, Program]:
    axis = 1 if len(x) == 4 else len(x) - 1
    order = NHWC if len(x) == 4 else None
    op = Norm(nodes=("norm",), y="y", x="x", axes=axes, eps=1e-5, groups=groups, epilogue=affine(axis, silu))
    vectors = [dense(n, (x[axis],), F32) for n in ("scale", "shift")]
    return one_op(op, [dense("x", x, F16, order), *vectors, dense("y", x, F16, order)], ("scale", "shift"))


def softmax(x: tuple[int, ...]) -> tuple[Op, Program]:
    op = Softmax(nodes=("softmax",), y="y", x="x", axis=len(x) - 1)
    return one_op(op, [dense("x", x, F16), dense("y", x, F16)], ())


def mean(x: tuple[int, ...], axes: tuple[int, ...], order: tuple[int, ...] | None = None) -> tuple[Op, Program]:
    shape = tuple(1 if a in axes else n for a, n in enumerate(x))
    ep = Epilogue(call("mul", ACC, 1.0 / math.prod(x[a] for a in axes)))
    op = Reduce(nodes=("mean",), y="y", x="x", axes=axes, combine="add", epilogue=ep)
    return one_op(op, [dense("x", x, F16, order), dense("y", shape, F16, order)], ())


def conv32(n: int, c: int, size: int, o: int, window: int) -> tuple[Op, Program]:
    shapes = {"x": (n, c, size, size), "w": (o, c, window, window), "y": (n, o, size, size)}
    op = Conv(nodes=("conv",), y="y", x="x", w="w", strides=(1, 1), pads=(window // 2,) * 2, dilations=(1, 1))
    return one_op(op, [dense(name, shape, F32, NHWC) for name, shape in shapes.items()], ("w",))


def gemm32(m: int, n: int, k: int) -> tuple[Op, Program]:
    shapes = {"a": (m, k), "b": (n, k), "y": (m, n)}
    return one_op(Gemm(nodes=("gemm",), y="y", a="a", b="b"), [dense(name, shape, F32) for name, shape in shapes.items()], ("b",))


def cases() -> list[Case]:
    out = []
    vectors = [(1, 4096, 25088), (1, 4096, 4096), (1, 1000, 2048), (1, 4096, 1024), (8, 4096, 4096), (16, 4096, 25088)]
    vectors += [(8, 512, 500000), (16, 512, 500000), (16, 1024, 500000), (4, 1000, 2048), (2, 6144, 2048), (32768, 8, 2048)]
    for m, n, k in vectors:
        layer = GemmLayer(m, n, k, bias=True)
        out.append(Case("few rows or columns", f"{m}×{n}×{k}", *layer.parts()[0], layer.flop))
    rows = [(65536, 768), (32768, 1024), (16384, 4096), (8192, 5120), (8192, 8192), (4096, 16384), (2048, 32768)]
    for shape in (*rows, (197, 768), (512, 768)):
        out.append(Case("LayerNorm", "×".join(map(str, shape)), *norm(shape, (1,))))
    images = [
        (16, 320, 64),
        (32, 128, 128),
        (1, 256, 512),
        (1, 128, 512),
        (1, 512, 128),
        (1, 512, 64),
        (1, 320, 64),
        (1, 1280, 8),
    ]
    for n, c, size in images:
        out.append(Case("GroupNorm, 32 groups", f"{n}×{size}²×{c}", *norm((n, c, size, size), (2, 3), 32)))
    for n, c, size in ((1, 128, 512), (1, 320, 64), (1, 128, 64), (1, 128, 32), (1, 256, 16)):
        out.append(Case("GroupNorm, SiLU", f"{n}×{size}²×{c}", *norm((n, c, size, size), (2, 3), 32, silu=True)))
    for n, c, h, w in ((1, 32, 720, 1280), (1, 64, 360, 640), (1, 128, 180, 320)):
        out.append(Case("InstanceNorm", f"{n}×{h}×{w}×{c}", *norm((n, c, h, w), (2, 3))))
    rows = [(196608, 197), (65536, 1024), (65536, 512), (8192, 8192), (4096, 16384), (2048, 32768), (2048, 50257)]
    for shape in (*rows, (1024, 131072), (16, 50257), (2364, 197), (12, 1000)):
        out.append(Case("softmax", "×".join(map(str, shape)), *softmax(shape)))
    out.append(Case("mean of rows", "65536×1024", *mean((65536, 1024), (1,))))
    out.append(Case("mean of pixels", "128×56²×256", *mean((128, 256, 56, 56), (2, 3), NHWC)))
    out.append(Case("mean of pixels", "1×7²×1280", *mean((1, 1280, 7, 7), (2, 3), NHWC)))
    layers = [(32, 32, 112, 3, 1), (32, 96, 112, 3, 2), (32, 144, 56, 3, 1), (32, 192, 28, 3, 1), (32, 576, 14, 3, 1)]
    layers += [(32, 144, 56, 5, 2), (32, 240, 28, 5, 1), (32, 672, 14, 5, 1), (1, 32, 112, 3, 1), (1, 144, 56, 3, 1)]
    layers += [(1, 384, 14, 3, 1), (1, 672, 14, 5, 1), (1, 1152, 7, 5, 1), (1, 96, 56, 7, 1)]
    for n, c, size, window, stride in layers:
        dw = ConvLayer((n, c, size, size), (c, 1, window, window), (window // 2,) * 2, (stride, stride), groups=c)
        name = f"{n}×{size}²×{c}, {window}×{window}" + (f"/{stride}" if stride > 1 else "")
        out.append(Case("depthwise", name, *dw.parts()[0], dw.flop))
    for m, n, k in ((2048, 2048, 2048), (4096, 4096, 4096), (8192, 8192, 8192)):
        out.append(Case("fp32", f"{m}×{n}×{k}", *gemm32(m, n, k), 2.0 * m * n * k))
    out.append(Case("fp32", "conv 32×56²×128, 3×3", *conv32(32, 128, 56, 128, 3), 2.0 * 32 * 56**2 * 128 * 128 * 9))
    layer = GemmLayer(8192, 8192, 8192)
    out.append(Case("mma.sync", "8192×8192×8192", *layer.parts()[0], layer.flop))
    return out


KERNEL = {"mma.sync": "gemm_mma"}
"""The kernel of a group, where it is not the cost model's to choose."""


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.bandwidth")
    parser.add_argument("--all", action="store_true", help="print every candidate's time")
    parser.add_argument("--only", default="", help="cases whose group or name holds one of these texts, separated by ;")
    parser.add_argument("--count", type=int, default=8, help="candidates of each case")
    args = parser.parse_args()
    wanted: Callable[[Case], bool] = lambda c: any(text in f"{c.group} {c.name}" for text in args.only.split(";"))  # noqa: E731
    todo = [c for c in cases() if wanted(c)]
    gpu, arch = gpu_to_measure(tuple(ARCHS))
    trials = []
    for c in todo:
        ranked = [r for r in candidates(c.op, c.program, arch) if r.kernel.name == KERNEL.get(c.group, r.kernel.name)]
        trials.append(Trial(c.op, c.program, ranked, args.count))
    tbps = roof()[1]
    print(f"{gpu}: a copy reads and writes {tbps:.2f} TB/s", flush=True)
    print("| step | case | µs | of a copy | of one as large | TFLOP/s | best | chosen | fastest |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- | --- |")
    for c, (_, results) in zip(todo, measure(trials, gpu, arch, progress), strict=True):
        right = [r for r in results if r.wrong is None]
        names = {id(r): f"{r.candidate.kernel.name} {short(r.candidate.config)}" for r in results}
        for r in results:
            if args.all or r.wrong:
                share = c.bytes / r.us / tbps / 1e6
                print(f"    {names[id(r)]}: {r.us:.2f} µs ({r.candidate.cost:.2f} estimated), {share:.0%} {r.wrong or ''}")
        if not right:
            print(f"| {c.group} | {c.name} | nothing agrees |", flush=True)
            continue
        chosen, best = right[0], min(right, key=lambda r: r.us)
        share, rest = (c.bytes / r.us / tbps / 1e6 for r in (chosen, best))
        speed = f"{c.flop / chosen.us / 1e6:.1f}" if c.flop else ""
        fastest = "the same" if best is chosen else names[id(best)]
        numbers = f"{chosen.us:.2f} | {share:.0%} | {copy_us(c.bytes) / chosen.us:.0%} | {speed} | {rest:.0%}"
        print(f"| {c.group} | {c.name} | {numbers} | {names[id(chosen)]} | {fastest} |", flush=True)


if __name__ == "__main__":
    main()
