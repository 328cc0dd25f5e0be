"""Products of few rows with weights in 4 and 8 bits beside those in fp16, on a GPU: python -m tests.bench.packed [--compile]

Peers in the same run: PyTorch's fp16 product (cuBLAS), and its product with int4 weights (`_weight_int4pack_mm`, in bf16).
What is timed is a graph of many products, one after the other, each with weights of its own; memory of twice the L2 cache is
written before. `--compile` only fills the cache of compiled kernels, which needs no GPU.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from tccompile.arch import ARCHS
from tccompile.ir import packed
from tccompile.ir.extent import round_up
from tccompile.ir.forms import Packed
from tccompile.ir.ops import Gemm
from tccompile.ir.program import Program
from tccompile.ir.tensor import dense
from tccompile.ir.types import DType
from tccompile.ir.weights import Source
from tccompile.schedule.choose import Candidate, candidates
from tccompile.tune import Result, Trial, _compiled, _repetitions, measure, repeated

ARCH = ARCHS["sm_90a"]
ROWS = (1, 4, 16)
SHAPES = ((4096, 4096), (4096, 14336), (14336, 4096), (2048, 8192), (896, 4864))
"""K and N."""

FORMATS = {"int4, 32": (4, 32), "int4, 128": (4, 128), "int8, all of K": (8, 0)}
"""Bits and block; 0: one block, whose zero point is 0."""


@dataclass(frozen=True)
class Row:
    """A product (rows, K) by weights (N, K) in one format."""

    rows: int
    k: int
    n: int
    kind: str

    def program(self) -> Program:
        bits, block = FORMATS[self.kind]
        block = block or round_up(self.k, packed.CHUNK)
        form = Packed("values", "scales", "", bits, block, 1 << bits - 1)
        values, scales, _ = packed.shapes((self.n, self.k), bits, block)
        of_scales = DType.F16 if packed.per(block) > 1 else DType.F32
        tensors = [dense("a", (self.rows, self.k), DType.F16), dense("b", (self.n, self.k), DType.F16)]
        tensors += [dense("values", values, DType.U8), dense("scales", scales, of_scales)]
        tensors.append(dense("y", (self.rows, self.n), DType.F16))
        constants = {name: Source(name, (), "") for name in ("a", "b", "values", "scales")}
        op = Gemm(nodes=(f"{self}",), y="y", a="a", b="b")
        return Program((), (), {t.name: t for t in tensors}, constants, (op,), forms={"b": (form,)})

    def trial(self, count: int) -> Trial:
        program = self.program()
        (op,) = program.ops
        ranked = candidates(op, program, ARCH)
        own = [c for c in ranked if c.kernel.reads_integers]
        others = [c for c in ranked if not c.kernel.reads_integers]
        kept = sorted([*own[:count], *others[:4]], key=lambda c: c.cost)
        return Trial(op, program, kept, len(kept))

    @property
    def nbytes(self) -> int:
        """Of what is read of the weights."""
        tensors = self.program().tensors
        return sum(int(tensors[name].nbytes) for name in ("values", "scales"))


def rows() -> Iterator[Row]:
    for kind in FORMATS:
        for k, n in SHAPES:
            yield from (Row(m, k, n, kind) for m in ROWS)


def _timed(torch: Any, run: Callable[[int], Any], copies: int) -> float:
    """Microseconds of one of `copies` products in a graph."""
    for i in range(min(copies, 3)):
        run(i)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(copies):
            run(i)
    flush = torch.empty(120 << 20, dtype=torch.int8, device="cuda")
    times = []
    for _ in range(12):
        flush.zero_()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / copies)
    return sorted(times)[len(times) // 2]


def peers(m: int, k: int, n: int) -> dict[str, float]:
    """PyTorch's times, by what is multiplied; without those that it refuses."""
    import torch

    found, copies = {}, max(4, min(40, (400 << 20) // (2 * n * k)))
    x = torch.randn(m, k, device="cuda", dtype=torch.half)
    w = [torch.randn(n, k, device="cuda", dtype=torch.half) for _ in range(copies)]
    found["fp16"] = _timed(torch, lambda i: torch.nn.functional.linear(x, w[i]), copies)
    copies = max(4, min(60, (400 << 20) // (n * k // 2)))
    few = x.bfloat16()
    for group in (32, 128):
        try:
            u = torch.randint(0, 256, (n, k // 2), device="cuda", dtype=torch.uint8)
            w4 = [torch.ops.aten._convert_weight_to_int4pack(u, 8) for _ in range(copies)]
            scales = torch.randn(k // group, n, 2, device="cuda", dtype=torch.bfloat16)
            found[f"int4, {group}"] = _timed(
                torch, lambda i, w4=w4, s=scales, g=group: torch.ops.aten._weight_int4pack_mm(few, w4[i], g, s), copies
            )
        except (RuntimeError, AttributeError) as error:
            print(f"int4 in blocks of {group}: {str(error).splitlines()[0]}")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.packed")
    parser.add_argument("--compile", action="store_true", help="fill the cache of compiled kernels, and measure nothing")
    parser.add_argument("--candidates", type=int, default=8, metavar="N", help="configs to measure: the cheapest by estimate")
    parser.add_argument("--every", action="store_true", help="print what each config took")
    given = parser.parse_args()
    wanted = list(rows())
    trials = [row.trial(given.candidates) for row in wanted]
    if given.compile:
        programs = [repeated(t.op, t.program, _repetitions(t)) for t in trials]
        _compiled(trials, programs, ARCH, lambda *_: None, None)
        return
    from tccompile.runtime.driver import open_device

    theirs: dict[tuple[int, int, int], dict[str, float]] = {}
    print("rows K N | format | µs | TB/s | fp16 µs | cuBLAS fp16 | int4pack_mm | what ran")
    for row, (_, results) in zip(wanted, measure(trials, open_device(), ARCH, lambda *_: None), strict=True):
        shape = row.rows, row.k, row.n
        if shape not in theirs:
            theirs[shape] = peers(*shape)
        right = sorted((r for r in results if r.wrong is None), key=lambda r: r.us)
        own = next(r for r in right if _is_packed(r.candidate))
        half = next(r for r in right if not _is_packed(r.candidate))
        cells = [f"{row.rows:2} {row.k:5} {row.n:5}", f"{row.kind:13}", f"{own.us:6.2f}", f"{row.nbytes / own.us / 1e6:.2f}"]
        cells += [f"{half.us:6.2f}", *(f"{theirs[shape].get(kind, 0):6.2f}" for kind in ("fp16", row.kind))]
        print(" | ".join((*cells, _text(own), _text(half))), flush=True)
        for r in results:
            if r.wrong is not None:
                print(f"   {_text(r)}: {r.wrong}")
        if given.every:
            print("  ", " ".join(f"{_short(r)}={r.us:.2f}({r.candidate.cost:.2f})" for r in results), flush=True)


def _short(r: Result) -> str:
    config = r.candidate.config
    return ("m" if r.candidate.kernel.tensor_cores else "p") + "/".join(str(v) for v in config.values())


def _text(r: Result) -> str:
    config = " ".join(f"{key}={value}" for key, value in r.candidate.config.items())
    return f"{r.candidate.kernel.name} {config} ({r.candidate.cost:.2f} est.)"


def _is_packed(c: Candidate) -> bool:
    return c.kernel.reads_integers


if __name__ == "__main__":
    main()
