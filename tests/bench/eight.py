"""Layers of 8 bits for the benchmarks: products and convolutions of bytes or E4M3, as quantized networks have them.

Activations are what a step before would have made, weights constants that the L2 cache does not hold, as in `tests.bench.layers`.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from tccompile.fuse.unfold import unfold_inputs, unfold_outputs
from tccompile.ir.expr import ACC, Epilogue, Expr, View, call, cast, coord, load
from tccompile.ir.extent import round_up
from tccompile.ir.ops import Conv, Gemm, Op
from tccompile.ir.program import Program
from tccompile.ir.tensor import dense
from tccompile.ir.types import DType
from tccompile.ir.weights import Literal, Recipe, Source
from tccompile.layout import in_lines
from tests.bench.layers import QUICK, ConvLayer, GemmLayer, Peer, Row, deepbench, ours, zoo

NHWC = (0, 2, 3, 1)
F32, I32, I64, E4M3 = DType.F32, DType.I32, DType.I64, DType.E4M3

SQUARES = (1024, 2048, 4096, 8192)
LISTS = ("square", "DeepBench inference", "DeepBench training", "zoo, batch 1", "zoo, batch 32")


@dataclass(frozen=True)
class Product:
    """y (M, N) = a (M, K) · b (N, K)ᵀ of bytes or E4M3.

    result  "int32", the sums; or "float16", scaled by column
    fast    whether the peer leaves sums of E4M3 to Tensor Cores alone
    """

    m: int
    n: int
    k: int
    kind: DType
    result: str = "float16"
    fast: bool = False

    @property
    def flop(self) -> float:
        return 2.0 * self.m * self.n * self.k

    @property
    def padded(self) -> tuple[int, int, int]:
        """The sizes that cuBLASLt takes instead: of bytes more than 16 rows, and the rest in eights; of E4M3 in sixteens."""
        if self.kind is E4M3:
            return self.m, round_up(self.n, 16), round_up(self.k, 16)
        return max(self.m, 17), round_up(self.n, 8), round_up(self.k, 8)

    def __str__(self) -> str:
        return f"{self.m}×{self.n}×{self.k}, {self.kind.value}" + (
            "" if self.padded == (self.m, self.n, self.k) else " (padded for the peer)"
        )

    def parts(self) -> list[tuple[Op, Program]]:
        exact = self.result == "int32"
        tensors = [dense(name, (rows, self.k), self.kind, pad=16) for name, rows in (("a", self.m), ("b", self.n))]
        tensors += [dense("scale", (self.n,), F32), dense("y", (self.m, self.n), I32 if exact else DType.F16, pad=16)]
        given: dict[str, Recipe] = {"b": Source("b", (self.n, self.k), "")}
        epilogue = Epilogue(Expr("acc", (), None, I64))
        if exact:
            del tensors[2]
        else:
            epilogue = Epilogue(call("mul", ACC, load(0)), (View("scale", (coord(1),)),))
            each = self.k**-0.5 * (1.0 if self.kind is E4M3 else 2.0**-12)
            given["scale"] = Literal(np.full(self.n, each, np.float32))
        op = Gemm(nodes=(str(self),), a="a", b="b", y="y", epilogue=epilogue)
        return [(op, Program((), (), {t.name: t for t in tensors}, given, (op,)))]

    def peer(self, torch: Any) -> tuple[Callable[..., Any], Sequence[Any], Sequence[Any]]:
        """cuBLASLt: the function, what it reads each time, and the weights."""
        m, n, k = self.padded
        if self.kind is E4M3:
            a, b = (torch.randn(rows, k, device="cuda").to(torch.float8_e4m3fn) for rows in (m, n))
            one = torch.ones((), device="cuda")
            how = {"scale_a": one, "scale_b": one, "out_dtype": torch.float16, "use_fast_accum": self.fast}
            return lambda a, b: torch._scaled_mm(a, b.t(), **how), (a,), (b,)
        a, b = (torch.randint(-128, 128, (rows, k), dtype=torch.int8, device="cuda") for rows in (m, n))
        return lambda a, b: torch._int_mm(a, b.t()), (a,), (b,)


@dataclass(frozen=True)
class Convolution:
    """relu(conv(x, w) · scale + bias) of a layer in 8 bits and stored so: of unsigned bytes and signed weights, or of E4M3."""

    layer: ConvLayer
    kind: DType

    @property
    def flop(self) -> float:
        return self.layer.flop

    def __str__(self) -> str:
        return f"{self.layer}, {self.kind.value}"

    def parts(self) -> list[tuple[Op, Program]]:
        layer, of_bytes = self.layer, self.kind is not E4M3
        outer, x, w = layer.w[0], self.kind, DType.I8 if of_bytes else E4M3
        fan_in = math.prod(layer.w[1:]) ** -0.5
        given: dict[str, Recipe] = {"w": Source("w", layer.w, "")}
        given["scale"] = Literal(np.full(outer, fan_in * (2.0**-8 if of_bytes else 1), np.float32))
        given["bias"] = Literal(np.zeros(outer, np.float32))
        tensors = [dense("x", layer.x, x, NHWC, 16), dense("w", layer.w, w, NHWC, 16), dense("scale", (outer,), F32)]
        tensors += [dense("bias", (outer,), F32), dense("y", layer.y, x, NHWC, 16)]
        acc = cast(Expr("acc", (), None, I64), F32) if of_bytes else ACC
        value = call("add", call("mul", acc, load(0)), load(1))
        steps = cast(call("saturate", call("round", value), 0.0, 255.0), I64)  # as networks have it; limits do what ReLU does
        expr = steps if of_bytes else call("relu", value)
        views = tuple(View(name, (coord(1),)) for name in ("scale", "bias"))
        op = Conv(
            nodes=(str(self),), y="y", x="x", w="w", strides=layer.strides, pads=layer.pads, dilations=layer.dilations,
            groups=layer.groups, epilogue=Epilogue(expr, views),
        )  # fmt: skip
        program = in_lines(unfold_outputs(unfold_inputs(Program((), (), {t.name: t for t in tensors}, given, (op,)))))
        return [(part, program) for part in program.ops]


def products(kind: DType, result: str, quick: bool = False, only: Sequence[str] = LISTS) -> Iterator[Row]:
    """Squares, DeepBench's products, and those of the zoo's networks at batch 1 and 32: its Gemms and 1×1 convolutions."""
    for name in only:
        if name == "square":
            sizes = [(n, n, n) for n in SQUARES]
        elif name.startswith("DeepBench"):
            sizes = [(g.m, g.n, g.k) for g in deepbench(name.split()[1]) if isinstance(g, GemmLayer)]
        else:
            sizes = [size for layer in zoo(int(name.split()[2])) if (size := _as_product(layer))]
        for m, n, k in list(dict.fromkeys(sizes))[:: QUICK if quick and name != "square" else 1]:
            yield Row(name, Product(m, n, k, kind, result))  # type: ignore[arg-type]


def _as_product(layer: Any) -> tuple[int, int, int] | None:
    """The sizes of a Gemm, or of a convolution that is one."""
    if isinstance(layer, GemmLayer):
        return layer.m, layer.n, layer.k
    if isinstance(layer, ConvLayer) and layer.w[2:] == layer.strides == (1, 1) and layer.groups == 1:
        return math.prod(layer.y) // layer.w[0], layer.w[0], layer.w[1]
    return None


def sizes_of(texts: Sequence[str], kind: DType, result: str) -> list[Row]:
    """Products MxNxK."""
    return [Row("given", Product(*map(int, text.split("x")), kind, result)) for text in texts]  # type: ignore[call-arg, arg-type]


def compared(todo: Sequence[Row], count: int, peers: Sequence[dict[str, Any]]) -> list[list[Row]]:
    """The rows with our times, once for each peer, which is the layer's with these fields. Prints a line of each as it comes."""
    peer, found = Peer(), [[] for _ in peers]  # type: list[list[Row]]
    for row in ours(todo, count):
        for own, fields in zip(found, peers, strict=True):
            own.append(replace(row, peer=peer.time(replace(row, layer=replace(row.layer, **fields)))))  # type: ignore[arg-type]
        last = [rows[-1] for rows in found]
        times = [row.ours, row.best, *(r.peer for r in last)]
        cells = [row.group, str(row.layer), *(f"{us:.1f}" for us in times), f"{row.layer.flop / row.ours / 1e6:.0f}"]
        print(f"| {' | '.join([*cells, *(f'{r.ratio:.2f}' for r in last), row.chosen, row.fastest])} |", flush=True)
    return found


def arguments(name: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=f"python -m tests.bench.{name}")
    parser.add_argument("sizes", nargs="*", help="MxNxK; without any, all lists")
    parser.add_argument("--quick", action="store_true", help=f"one of {QUICK} of the lists' products")
    parser.add_argument("--list", choices=LISTS, action="append", help="this list, and others that are named so; all without any")
    parser.add_argument(
        "--candidates", type=int, default=2, metavar="N", help="configs to measure: those of least estimated time"
    )
    return parser
