"""Products of float32 by each kernel, beside cuBLAS, on a GPU: python -m tests.bench.single_precision [MxNxK …]

Rows are y (M, N) = a (M, K) · b (N, K)ᵀ, all in float32: by Tensor Cores from parts of bf16 (kernels/parts/compensated.py), by
CUDA cores, and by cuBLAS in fp32 and in tf32. Of each kernel the fastest of its cheapest configs counts. Errors are relative L2
against PyTorch's product of float64, of normal values and of values from 0 to 1; times are medians by events around graph
replays, operands and result on the device.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np

from tccompile.arch import ARCHS, Arch
from tccompile.emit.many import emit
from tccompile.ir.ops import Gemm
from tccompile.ir.program import Program
from tccompile.ir.tensor import dense
from tccompile.ir.types import DType
from tccompile.kernels import kernel
from tccompile.runtime.session import Session
from tests.bench.layers import _time
from tests.gpu.build import Variant, build_plan

SIZES = ("512x512x512", "1024x1024x1024", "2048x2048x2048", "4096x4096x4096", "8192x8192x8192", "1024x1024x65536", "128x3072x768")

NAMES = {"gemm_mma": "Tensor Cores", "gemm_simt": "CUDA cores"}

Sides = dict[str, Any]
"""a and b as PyTorch's arrays on the GPU."""


def product(m: int, n: int, k: int) -> Program:
    """The product, of two inputs as the kernels read them."""
    tensors = [dense(name, shape, DType.F32) for name, shape in (("a", (m, k)), ("b", (n, k)), ("y", (m, n)))]
    return Program(("a", "b"), ("y",), {t.name: t for t in tensors}, {}, (Gemm(nodes=("gemm",), a="a", b="b", y="y"),))


def sessions(name: str, program: Program, arch: Arch, count: int) -> Iterator[Session]:
    """A session for each of a kernel's configs of least estimate, but for those that spill registers."""
    from tccompile.emit.job import SpillError

    found, (op,) = kernel(name), program.ops
    ranked = sorted(found.configs(op, program, arch), key=lambda c: found.cost(op, program, c, arch))
    for config in ranked[:count]:
        variant = Variant(found, config, found.work(op, program, config, arch), arch, "cubin")
        try:
            yield Session(build_plan("gemm", program, [variant], emit(variant.jobs)), device="gpu")
        except SpillError:
            continue


def error(torch: Any, y: Any, sides: Sides) -> float:
    exact = sides["a"].double() @ sides["b"].double().T
    return float((torch.as_tensor(y).to(exact.device).double() - exact).norm() / exact.norm())


def row(torch: Any, size: str, arch: Arch, count: int) -> str:
    """A row of the table: microseconds and both errors of each."""
    m, n, k = map(int, size.split("x"))
    program, flush = product(m, n, k), torch.empty(1 << 26, device="cuda")
    normal = {name: torch.randn(rows, k, device="cuda") for name, rows in (("a", m), ("b", n))}
    positive = {name: torch.rand_like(x) for name, x in normal.items()}
    cells, found = [size], []
    for name in NAMES:
        best = (np.inf, "")
        for session in sessions(name, program, arch, count):
            with session:
                us = 1e3 * float(np.median(session.bench(50, normal)))
                errors = [error(torch, session.run(None, sides)[0], sides) for sides in (normal, positive)]
            best = min(best, (us, f"{us:.1f}; {errors[0]:.1e}, {errors[1]:.1e}"))
        found.append(best[0])
        cells.append(best[1])
    for tf32 in (False, True):
        torch.backends.cuda.matmul.allow_tf32 = tf32
        us = _time(torch, [partial(torch.mm, normal["a"], normal["b"].T)] * 4, flush) / 4
        errors = [error(torch, s["a"] @ s["b"].T, s) for s in (normal, positive)]
        found.append(us)
        cells.append(f"{us:.1f}; {errors[0]:.1e}, {errors[1]:.1e}")
    torch.backends.cuda.matmul.allow_tf32 = False
    cells += [f"{2e-6 * m * n * k / found[0]:.1f}", f"{found[1] / found[0]:.2f}", f"{found[2] / found[0]:.2f}"]
    return f"| {' | '.join(cells)} |"


def main() -> None:
    import torch

    parser = argparse.ArgumentParser()
    parser.add_argument("sizes", nargs="*", default=SIZES)
    parser.add_argument("--arch", default="sm_90a", help="the generation whose code runs")
    parser.add_argument("--configs", type=int, default=4, help="of each kernel, how many of least estimate are measured")
    args = parser.parse_args()
    heads = ["product", *NAMES.values(), "cuBLAS fp32", "cuBLAS tf32"]
    print(torch.cuda.get_device_name(), "; microseconds; errors on normal and on positive values\n", sep="")
    print(f"| {' | '.join(heads)} | TFLOP/s | times CUDA cores' speed | times cuBLAS' |\n|{' --- |' * (len(heads) + 3)}")
    for size in args.sizes:
        print(row(torch, size, ARCHS[args.arch], args.configs), flush=True)


if __name__ == "__main__":
    main()
