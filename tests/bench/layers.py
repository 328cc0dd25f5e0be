"""Single layers on a GPU, beside cuBLAS and cuDNN: python -m tests.bench.layers [--quick] [--batch 1,8,32] [--plot FILE]

zoo        every distinct Conv and Gemm of the networks, at each batch; a convolution with bias and ReLU, a Gemm with bias
square     products of 1024 to 8192 rows, columns and K
attention  heads of 64 and 128 elements, sequences of 512 to 4096, and those of networks; the peer is scaled_dot_product_attention
masked     attention with masks of keys and of rows
decoders   attention of few rows that see many
inference  DeepBench's lists for server and device inference: weights as the kernels read them
training   DeepBench's lists for training: operands as the lists store them, transposed or not; where their rows do not begin
           at multiples of 16 bytes, the copy that kernels read is timed too

Ours is the config that the cost model takes, without a table; "best" is the fastest of those measured, the --candidates cheapest
by their estimates, as many as --tune measures. The peer is PyTorch in fp16: channels-last and cudnn.benchmark for a convolution,
its bias and `relu_`; `mm` or `linear` for a Gemm. Both run as tccompile/tune.py says: repetitions in a CUDA graph, constants that
are not in the L2 cache, random values. Times are microseconds; every time, ours and theirs, is a median.
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import random
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from tccompile.arch import ARCHS
from tccompile.errors import TccompileError, UsageError
from tccompile.fuse.unfold import unfold_inputs, unfold_outputs
from tccompile.ir.expr import ACC, Epilogue, View, call, coord, load
from tccompile.ir.ops import Attention, Conv, Gemm, Op, Pointwise
from tccompile.ir.program import Program
from tccompile.ir.tensor import Tensor, dense
from tccompile.ir.types import DType
from tccompile.ir.weights import Source
from tccompile.layout import in_lines
from tccompile.load.model import load as read_model
from tccompile.lower.graph import lower
from tccompile.rewrites import rewrite
from tccompile.schedule.choose import Candidate, candidates
from tccompile.tune import COUNT, REPETITIONS, Trial, gpu_to_measure, measure
from tests.networks import CONVOLUTIONAL, skeleton

NHWC, DEPTHWISE = (0, 2, 3, 1), (2, 3, 1, 0)
DEEPBENCH = Path(__file__).parent / "deepbench"
F16, F32 = DType.F16, DType.F32
QUICK = 8
"""--quick takes one layer in so many of each list."""


@dataclass(frozen=True)
class ConvLayer:
    """relu(conv(x, w) + bias): x (N, C, H, W), w (O, C / groups, R, S); pads on both sides of H and W.

    Where the compiler makes two steps of it, as for few channels, ours is both.
    """

    x: tuple[int, int, int, int]
    w: tuple[int, int, int, int]
    pads: tuple[int, int]
    strides: tuple[int, int]
    dilations: tuple[int, int] = (1, 1)
    groups: int = 1

    @property
    def y(self) -> tuple[int, int, int, int]:
        sizes = zip(self.x[2:], self.w[2:], self.pads, self.strides, self.dilations, strict=True)
        p, q = ((n + 2 * pad - (taps - 1) * step - 1) // stride + 1 for n, taps, pad, stride, step in sizes)
        return self.x[0], self.w[0], p, q

    @property
    def flop(self) -> float:
        return 2.0 * math.prod(self.y) * math.prod(self.w[1:])

    @property
    def bytes(self) -> float:
        return 2.0 * (math.prod(self.x) + math.prod(self.w) + math.prod(self.y))

    def __str__(self) -> str:
        n, c, h, w = self.x
        how = f"{self.w[2]}×{self.w[3]}" + (f"/{self.strides[0]}" if self.strides != (1, 1) else "")
        kind = "depthwise" if 1 < self.groups == c else f"{self.groups} groups" if self.groups > 1 else "conv"
        return f"{kind} {n}×{h}×{w}, {c}→{self.w[0]}, {how}"

    def parts(self) -> list[tuple[Op, Program]]:
        depthwise = 1 < self.groups == self.x[1] == self.w[0]
        tensors = [
            dense("x", self.x, F16, NHWC),
            dense("w", self.w, F16, DEPTHWISE if depthwise else NHWC),
            dense("bias", (self.w[0],), F32),
            dense("y", self.y, F16, NHWC),
        ]
        biased = Epilogue(call("relu", call("add", ACC, load(0))), (View("bias", (coord(1),)),))
        op = Conv(
            nodes=(str(self),), y="y", x="x", w="w", strides=self.strides, pads=self.pads, dilations=self.dilations,
            groups=self.groups, epilogue=biased,
        )  # fmt: skip
        _, program = one_op(op, tensors, ("w", "bias"))
        program = in_lines(unfold_outputs(unfold_inputs(program)))
        return [(part, program) for part in program.ops]

    def peer(self, torch: Any) -> tuple[Callable[..., Any], Sequence[Any], Sequence[Any]]:
        """The function, what it reads each time, and the constants that rotate."""
        x = torch.randn(self.x, device="cuda", dtype=torch.half).to(memory_format=torch.channels_last)
        w = (torch.randn(self.w, device="cuda") * math.prod(self.w[1:]) ** -0.5).half().to(memory_format=torch.channels_last)
        bias = torch.randn(self.w[0], device="cuda", dtype=torch.half)

        def run(x: Any, w: Any, bias: Any) -> Any:
            y = torch.nn.functional.conv2d(x, w, bias, self.strides, self.pads, self.dilations, self.groups)
            return y.relu_()

        return run, (x,), (w, bias)


@dataclass(frozen=True)
class GemmLayer:
    """y (M, N) = a (M, K) · b (N, K)ᵀ, with a bias or not.

    stored  of a and b: whether it is handed over with K innermost; None for an operand that is as the kernels read it
    """

    m: int
    n: int
    k: int
    bias: bool = False
    stored: tuple[bool | None, bool | None] = (None, None)

    @property
    def flop(self) -> float:
        return 2.0 * self.m * self.n * self.k

    @property
    def bytes(self) -> float:
        return 2.0 * (self.m * self.k + self.n * self.k + self.m * self.n)

    def __str__(self) -> str:
        operands = list(zip("ab", (self.m, self.n), self.stored, strict=True))
        transposed = "".join(f"{name}ᵀ" for name, _, inner in operands if inner is False)
        copied = " and ".join(name for name, rows, inner in operands if self._copied(rows, inner))
        return f"gemm {self.m}×{self.n}×{self.k}" + f" {transposed}" * bool(transposed) + f", {copied} copied" * bool(copied)

    def _copied(self, rows: int, inner: bool | None) -> bool:
        return inner is not None and (self.k if inner else rows) % 8 > 0

    def parts(self) -> list[tuple[Op, Program]]:
        made = []
        orders = []
        for rows, inner in zip((self.m, self.n), self.stored, strict=True):
            copied = self._copied(rows, inner)
            orders.append((1, 0) if inner is False and not copied else (0, 1))
            if copied:
                shape, index = ((rows, self.k), (coord(0), coord(1))) if inner else ((self.k, rows), (coord(1), coord(0)))
                copied = Pointwise(nodes=(str(self),), y="y", epilogue=Epilogue(load(0), (View("x", index),)))
                made.append(one_op(copied, [dense("x", shape, F16, pad=1), dense("y", (rows, self.k), F16)], (), ("x",)))
        a, b = (dense(name, (n, self.k), F16, order) for name, n, order in zip("ab", (self.m, self.n), orders, strict=True))
        tensors = [a, b, dense("y", (self.m, self.n), F16)]
        epilogue = Epilogue()
        if self.bias:
            tensors.append(dense("bias", (self.n,), F32))
            epilogue = Epilogue(call("add", ACC, load(0)), (View("bias", (coord(1),)),))
        constants = ("b", "bias") if self.bias else ("b",)
        return [*made, one_op(Gemm(nodes=(str(self),), y="y", a="a", b="b", epilogue=epilogue), tensors, constants)]

    def peer(self, torch: Any) -> tuple[Callable[..., Any], Sequence[Any], Sequence[Any]]:
        def operand(rows: int, inner: bool | None, scale: float) -> Any:
            shape = (self.k, rows) if inner is False else (rows, self.k)
            values = (torch.randn(shape, device="cuda") * scale).half()
            return values.t() if inner is False else values

        a, b = operand(self.m, self.stored[0], 1.0), operand(self.n, self.stored[1], self.k**-0.5)
        if self.bias:
            bias = torch.randn(self.n, device="cuda", dtype=torch.half)
            return torch.nn.functional.linear, (a,), (b, bias)
        return lambda a, b: torch.mm(a, b.t()), (a,), (b,)


@dataclass(frozen=True)
class AttentionLayer:
    """softmax(q · kᵀ / √d + mask) · v: q, k and v (batch, heads, length, d), as one projection writes them.

    keys  rows of k and v, if they are not q's: then each is a tensor of its own
    mask  fp32: "keys", one for each batch and row of k; "rows", for each head and row of q too; or none
    """

    batch: int
    heads: int
    length: int
    d: int
    causal: bool = False
    keys: int | None = None
    mask: str = ""

    @property
    def columns(self) -> int:
        return self.length if self.keys is None else self.keys

    @property
    def mask_shape(self) -> tuple[int, int, int, int]:
        rows = (self.heads, self.length) if self.mask == "rows" else (1, 1)
        return (self.batch, *rows, self.columns)

    @property
    def flop(self) -> float:
        return 4.0 * self.batch * self.heads * self.length * self.columns * self.d * (0.5 if self.causal else 1.0)

    @property
    def bytes(self) -> float:
        moved = 4.0 * self.batch * self.heads * (self.length + self.columns) * self.d
        return moved + (4.0 * math.prod(self.mask_shape) if self.mask else 0)

    def __str__(self) -> str:
        lengths = str(self.length) if self.keys is None else f"({self.length}, {self.keys})"
        more = (", causal" if self.causal else "") + (f", a mask of {self.mask}" if self.mask else "")
        return f"attention {self.batch}×{self.heads}×{lengths}×{self.d}{more}"

    def parts(self) -> list[tuple[Op, Program]]:
        shape, width, inner = (self.batch, self.heads, self.length, self.d), self.heads * self.d, (0, 2, 1, 3)
        if self.keys is None:
            whole = dense("qkv", (self.batch, self.length, 3 * width), F16)
            strides = (whole.strides[0], self.d, whole.strides[1], 1)
            tensors = [whole, *(Tensor(name, shape, F16, shape, strides, "qkv", i * width) for i, name in enumerate("qkv"))]
        else:
            rows = {"q": self.length, "k": self.keys, "v": self.keys}
            tensors = [dense(name, (self.batch, self.heads, n, self.d), F16, inner) for name, n in rows.items()]
        if self.mask:
            tensors.append(dense("mask", self.mask_shape, F32))
        causal, mask = 0 if self.causal else None, "mask" if self.mask else None
        op = Attention(nodes=(str(self),), y="y", q="q", k="k", v="v", mask=mask, scale=self.d**-0.5, causal=causal)
        return [one_op(op, [*tensors, dense("y", shape, F16, inner)], ())]

    def peer(self, torch: Any) -> tuple[Callable[..., Any], Sequence[Any], Sequence[Any]]:
        rows = (self.length, self.columns, self.columns)
        qkv = [torch.randn(self.batch, self.heads, n, self.d, device="cuda").half() for n in rows]
        mask = torch.randn(self.mask_shape, device="cuda").half() if self.mask else None
        return partial(torch.nn.functional.scaled_dot_product_attention, attn_mask=mask, is_causal=self.causal), qkv, ()


Layer = ConvLayer | GemmLayer | AttentionLayer


def one_op(op: Op, tensors: Sequence[Tensor], constants: Sequence[str], inputs: Sequence[str] = ()) -> tuple[Op, Program]:
    """A program of one op; what is neither constant nor input is what a step before would have made."""
    named = {t.name: t for t in tensors}
    return op, Program(tuple(inputs), (), named, {n: Source(n, named[n].shape, "float32") for n in constants}, (op,))


# --- The lists -----------------------------------------------------------------------------------------------------------


def zoo(batch: int) -> list[Layer]:
    """Every distinct layer of the networks, with the batch multiplied."""
    found: dict[Layer, None] = {}
    for name in CONVOLUTIONAL:
        if name == "resnet50_dynbatch":  # resnet50's layers
            continue
        program = lower(rewrite(read_model(skeleton(name), {})))
        for op in program.ops:
            if isinstance(op, Conv) and len(op.pads) == 2:
                x, w = program.tensors[op.x].shape, program.tensors[op.w].shape
                layer = ConvLayer((x[0] * batch, *x[1:]), w, op.pads, op.strides, op.dilations, op.groups)  # type: ignore[arg-type]
                found[layer] = None
            elif isinstance(op, Gemm) and len(program.tensors[op.a].shape) == 2:
                (m, k), n = program.tensors[op.a].shape, program.tensors[op.b].shape[0]
                found[GemmLayer(m * batch, n, k, bias=True)] = None
    return list(found)


def deepbench(which: str) -> list[Layer]:
    """ "inference" or "training". C (m, n) = A · B in column-major order is the Gemm y (n, m) = Bᵀ · Aᵀᵀ: A is our weights."""
    found: dict[Layer, None] = {}
    for path in sorted(p for kind in ("conv", "gemm") for p in DEEPBENCH.glob(f"deepbench_{which}*_{kind}.csv")):
        with path.open(newline="") as file:
            for text in csv.DictReader(file):
                row = {name: int(value) for name, value in text.items() if name != "gflop"}
                if "_conv" in path.name:
                    x, w = (row["n"], row["c"], row["h"], row["w"]), (row["k"], row["c"], row["r"], row["s"])
                    strides, pads = (row["stride_h"], row["stride_w"]), (row["pad_h"], row["pad_w"])
                    found[ConvLayer(x, w, pads, strides)] = None
                else:
                    stored = (None, None) if which == "inference" else (row["b_t"] == 0, row["a_t"] == 1)
                    found[GemmLayer(row["n"], row["m"], row["k"], stored=stored)] = None
    return list(found)


ATTENTION = (
    *(AttentionLayer(16384 // n, 16 if d == 64 else 8, n, d) for d in (64, 128) for n in (512, 1024, 2048, 4096)),
    AttentionLayer(8, 12, 512, 64), AttentionLayer(4, 16, 2048, 64), AttentionLayer(2, 16, 4096, 128),
    AttentionLayer(2, 8, 4096, 40), AttentionLayer(2, 16, 4096, 128, causal=True), AttentionLayer(1, 12, 197, 64),
    AttentionLayer(1, 12, 128, 64),
)  # fmt: skip
"""Sixteen thousand tokens at several lengths; sizes of networks."""


MASKED = (
    *(AttentionLayer(8, 12, n, 64, mask="keys") for n in (128, 512, 1024)), AttentionLayer(8, 12, 512, 64, mask="rows"),
    AttentionLayer(64, 3, 49, 32, mask="rows"), AttentionLayer(4, 16, 1024, 128, mask="keys"),
    AttentionLayer(4, 16, 1024, 128, mask="rows"), AttentionLayer(1, 20, 224, 64, keys=1500, mask="keys"),
)  # fmt: skip
"""Masks of padding and of positions: encoders of text, windows of an image."""

DECODERS = (
    *(AttentionLayer(1, 12, m, 64, keys=n) for m in (1, 4, 16) for n in (512, 2048, 8192, 32768)),
    *(AttentionLayer(b, 32, 1, 128, keys=4096) for b in (1, 4, 16)), AttentionLayer(1, 20, 1, 64, keys=1500),
    AttentionLayer(1, 12, 1, 64, keys=4096, mask="keys"),
)  # fmt: skip
"""Few rows that see many."""


# --- Measuring -----------------------------------------------------------------------------------------------------------


@dataclass
class Row:
    """One layer's times: of the config that the cost model takes, of the best candidate, and of the peer."""

    group: str
    layer: Layer
    ours: float = 0.0
    best: float = 0.0
    peer: float = math.nan
    chosen: str = ""
    fastest: str = ""
    wrong: list[str] = field(default_factory=list)
    times: list[tuple[str, float, float]] = field(default_factory=list)
    """Of each candidate of its last op: its name, estimate and time."""

    @property
    def ratio(self) -> float:
        return self.peer / self.ours


def ours(rows: Sequence[Row], count: int) -> Iterator[Row]:
    """Each row with our times filled in. All kernels are compiled before the first comes."""
    gpu, arch = gpu_to_measure(tuple(ARCHS))
    parts = [(row, op, program) for row in rows for op, program in row.layer.parts()]
    trials = [Trial(op, program, candidates(op, program, arch), count) for _, op, program in parts]
    for number, (_, results) in enumerate(measure(trials, gpu, arch, progress)):
        row = parts[number][0]
        row.wrong += [f"{r.candidate.kernel.name} {dict(r.candidate.config)}: {r.wrong}" for r in results if r.wrong]
        right = [r for r in results if r.wrong is None]
        if not right:
            raise UsageError(f"{row.layer}: nothing was measured that agrees")
        fastest = min(right, key=lambda r: r.us)
        row.ours, row.best = row.ours + right[0].us, row.best + fastest.us
        row.chosen, row.fastest = (named(r.candidate) for r in (right[0], fastest))
        row.times = [(named(r.candidate), r.candidate.cost, r.us) for r in right]
        if number + 1 == len(parts) or parts[number + 1][0] is not row:
            yield row


def named(candidate: Candidate) -> str:
    return f"{candidate.kernel.name} {short(candidate.config)}"


def short(config: Any) -> str:
    return " ".join(f"{k}={v}" for k, v in config.items())


class Peer:
    """PyTorch, set up as its users do."""

    def __init__(self) -> None:
        try:
            import torch
        except ImportError:
            raise UsageError(
                "the comparison is with PyTorch, which is not installed: pip install torch; --no-peer measures without it"
            ) from None
        torch.backends.cudnn.benchmark = True
        torch.set_grad_enabled(False)
        self.torch = torch
        self.flush = torch.empty(2 * torch.cuda.get_device_properties(0).L2_cache_size, dtype=torch.uint8, device="cuda")

    def time(self, row: Row) -> float:
        """Its median time in microseconds; NaN for what it does not take."""
        run, inputs, constants = row.layer.peer(self.torch)
        size = sum(c.numel() * c.element_size() for c in constants)
        copies = max(2, min(REPETITIONS, int(4000 / row.ours), (1 << 30) // max(size, 1)))
        sets = [[c.clone(memory_format=self.torch.preserve_format) for c in constants] for _ in range(copies)]
        try:
            return _time(self.torch, [partial(run, *inputs, *own) for own in sets], self.flush) / copies
        except RuntimeError as error:
            print(f"{row.layer}: PyTorch: {str(error).splitlines()[0]}", file=sys.stderr)
            return math.nan


def _time(torch: Any, calls: Sequence[Callable[[], Any]], flush: Any) -> float:
    """Median microseconds of a graph of the calls, launched when the L2 cache holds something else."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            calls[0]()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for one in calls:
            one()
    begin = time.perf_counter()
    for _ in range(2):
        graph.replay()
    torch.cuda.synchronize()
    count = max(5, min(50, int(0.02 / (time.perf_counter() - begin))))
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(count)]
    for first, last in events:
        flush.zero_()
        first.record()
        graph.replay()
        last.record()
    torch.cuda.synchronize()
    return 1e3 * float(np.median([first.elapsed_time(last) for first, last in events]))


def roof() -> tuple[float, float]:
    """What this GPU reaches: TFLOP/s of PyTorch's product of 8192³, and TB/s, read and written, of a kernel that copies 1 GiB."""
    import torch

    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.half) for _ in range(2))
    x, y = (torch.empty(1 << 28, device="cuda") for _ in range(2))
    product = _time(torch, [lambda: torch.mm(a, b)] * 4, y[:1]) / 4
    copy = _time(torch, [lambda: torch.neg(x, out=y)] * 4, y[:1]) / 4
    return 2 * 8192**3 / product / 1e6, 2 * x.nbytes / copy / 1e6


def copy_us(size: int) -> float:
    """Microseconds of PyTorch's kernel that reads and writes so many bytes in all, one of several on the same input."""
    import torch

    halves = size // 4
    x, flush = torch.randn(halves, device="cuda", dtype=torch.half), torch.empty(1 << 28, device="cuda")
    many = max(2, min(20, (1 << 30) // size))
    results = [torch.empty_like(x) for _ in range(many)]
    return _time(torch, [partial(torch.neg, x, out=y) for y in results], flush) / many


def progress(stage: str, done: int, total: int) -> None:
    if sys.stderr.isatty() or done % 50 == 0:
        print(f"\r{stage} {done} of {total} ", end="", file=sys.stderr, flush=True)


# --- What comes out ------------------------------------------------------------------------------------------------------


def mean(values: Sequence[float]) -> float:
    """The geometric mean of those that are numbers."""
    logs = [math.log(v) for v in values if v == v]
    return math.exp(sum(logs) / len(logs)) if logs else math.nan


def summary(rows: Sequence[Row]) -> Iterator[str]:
    """Markdown: for each group the geometric means against the peer and against the best candidate, then the ten worst."""
    yield "| layers | number | speed ÷ peer's, geometric mean | least | with the best candidate | cost model's choice ÷ best |"
    yield "| --- | --- | --- | --- | --- | --- |"
    for group in sorted({r.group for r in rows}):
        of = [r for r in rows if r.group == group]
        ratios = [r.ratio for r in of if r.ratio == r.ratio]
        least = min(ratios, default=math.nan)
        best, quality = mean([r.peer / r.best for r in of]), mean([r.best / r.ours for r in of])
        yield f"| {group} | {len(of)} | {mean(ratios):.2f} | {least:.2f} | {best:.2f} | {quality:.2f} |"
    yield f"\nThe cost model's choice is as fast as the best by {mean([r.best / r.ours for r in rows]):.2f} (geometric mean).\n"
    yield "The ten worst:\n"
    yield "| layers | layer | ours µs | best µs | peer µs | speed | chosen | fastest |"
    yield "| --- | --- | --- | --- | --- | --- | --- | --- |"
    for r in sorted((r for r in rows if r.ratio == r.ratio), key=lambda r: r.ratio)[:10]:
        times = f"{r.ours:.1f} | {r.best:.1f} | {r.peer:.1f} | {r.ratio:.2f}"
        yield f"| {r.group} | {r.layer} | {times} | {r.chosen} | {r.fastest} |"
    for r in rows:
        for wrong in r.wrong:
            yield f"WRONG: {r.layer}: {wrong}"


def plot(rows: Sequence[Row], roof: tuple[float, float], path: Path) -> None:
    """Achieved TFLOP/s against arithmetic intensity, with the measured roof."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    tflops, tbps = roof
    figure, axes = plt.subplots(figsize=(9, 6))
    axes.set_prop_cycle(color=plt.get_cmap("tab20").colors)  # there are up to 17 groups
    for group in sorted({r.group for r in rows}):
        of = [r for r in rows if r.group == group]
        axes.scatter([r.layer.flop / r.layer.bytes for r in of], [r.layer.flop / r.ours / 1e6 for r in of], s=12, label=group)
    x = np.geomspace(0.5, 4000)
    axes.plot(x, np.minimum(x * tbps, tflops), "k-", lw=1, label=f"measured: {tflops:.0f} TFLOP/s, {tbps:.2f} TB/s")
    axes.set(xscale="log", yscale="log", xlabel="FLOP a byte (each tensor moved once)", ylabel="TFLOP/s")
    axes.legend(fontsize=8)
    figure.savefig(path, dpi=120, bbox_inches="tight")


ALONE: dict[str, Sequence[Layer]] = {
    "square": [GemmLayer(n, n, n) for n in (1024, 2048, 4096, 8192)],
    "attention": ATTENTION,
    "masked": MASKED,
    "decoders": DECODERS,
}
"""Lists of which --quick takes all."""


def lists(batches: Sequence[int], wanted: Sequence[str], quick: bool) -> list[Row]:
    """The rows to measure."""
    rows = []
    for name in wanted:
        if name in ALONE:
            rows += [Row(name, layer) for layer in ALONE[name]]
            continue
        groups = [(f"zoo, batch {b}", zoo(b)) for b in batches] if name == "zoo" else [(f"DeepBench {name}", deepbench(name))]
        for group, layers in groups:
            for kind, of in (("conv", ConvLayer), ("gemm", GemmLayer)):
                picked = [layer for layer in layers if isinstance(layer, of)][:: QUICK if quick else 1]
                rows += [Row(f"{group}, {kind}", layer) for layer in picked]
    return [
        Row(r.group.replace("conv", "depthwise"), r.layer) if isinstance(r.layer, ConvLayer) and r.layer.groups > 1 else r
        for r in rows
    ]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.layers")
    parser.add_argument("--quick", action="store_true", help=f"one layer in {QUICK}")
    parser.add_argument("--batch", default="1,8,32", help="of the networks' layers")
    parser.add_argument("--lists", default="zoo,inference,training,square,attention,masked,decoders")
    parser.add_argument(
        "--candidates", type=int, default=COUNT, metavar="N", help="configs to measure: those of least estimated time"
    )
    parser.add_argument("--seconds", type=float, help="stop after so long, with what there is by then")
    parser.add_argument("--no-peer", action="store_true", help="without PyTorch")
    parser.add_argument("--json", type=Path, help="write every row here")
    parser.add_argument("--plot", type=Path, help="write a plot here (needs matplotlib)")
    args = parser.parse_args()
    begin = time.monotonic()
    todo = lists([int(b) for b in args.batch.split(",")], args.lists.split(","), args.quick)
    random.Random(0).shuffle(todo)  # so that a clock that changes with the temperature hits all groups alike
    peer = None if args.no_peer else Peer()
    rows = []
    for r in ours(todo, args.candidates):
        if peer:
            r.peer = peer.time(r)
        rows.append(r)
        speed = f"{r.layer.flop / r.ours / 1e6:7.1f} TFLOP/s"
        line = f"{r.group:32} {r.layer!s:46} {r.ours:9.1f} µs {r.best:9.1f} best {r.peer:9.1f} peer {r.ratio:6.2f}× {speed}"
        print(line, flush=True)
        if args.seconds and time.monotonic() - begin > args.seconds:
            print(f"stopped after {len(rows)} of {len(todo)} layers")
            break
    if args.json:
        args.json.write_text(json.dumps([{**vars(r), "layer": str(r.layer)} for r in rows], indent=0))
    print("\n" + "\n".join(summary(rows)))
    if peer:
        measured = roof()
        print(f"\nThe GPU reaches {measured[0]:.0f} TFLOP/s (PyTorch, 8192³) and {measured[1]:.2f} TB/s (copy)")
        if args.plot:
            plot(rows, measured, args.plot)


if __name__ == "__main__":
    try:
        main()
    except TccompileError as error:
        sys.exit(f"error: {error}")
