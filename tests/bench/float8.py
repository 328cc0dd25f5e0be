"""Products of float8 by each kernel, beside cuBLASLt, on a GPU: python -m tests.bench.float8 [MxNxK …]

Rows are y (M, N) = a (M, K) · b (N, K)ᵀ of random numbers of E4M3: by wgmma, by mma.sync and by CUDA cores, scaled by column, in
float16 and in E4M3; and by PyTorch's `_scaled_mm`, which is cuBLASLt, in float16 with one scale for each operand: with sums that
are added up in float32 (`use_fast_accum=False`), as all kernels here do it, and with those of the Tensor Cores alone. Of each
kernel the fastest of its cheapest configs counts. Errors are those of the first row, in float16, against exact sums; operands are
not negative, so that what is cut off adds up. Times are of the step alone, by events around graph replays, operands and result on
the device.
"""

from __future__ import annotations

import argparse
from functools import partial
from typing import Any

import numpy as np

from tccompile.arch import ARCHS, Arch
from tccompile.ir.expr import ACC, Epilogue, View, call, constant, coord, load
from tccompile.ir.ops import Gemm, Pointwise
from tccompile.ir.program import Program
from tccompile.ir.storage import from_storage, to_storage
from tccompile.ir.tensor import dense
from tccompile.ir.types import DType
from tccompile.ir.weights import Literal
from tccompile.kernels import kernel
from tests.bench.bytes import NAMES, sessions
from tests.bench.layers import _time
from tests.networks import relative_error

SIZES = ("4096x4096x4096", "8192x8192x8192", "1024x1024x65536", "128x3072x768")

E4M3 = DType.E4M3

BOUND = {DType.F16: 1e-3, E4M3: 4e-2}
"""What the first row may be off by: roughness of sums and, of float8, what it rounds off."""


def program_of(m: int, n: int, k: int, dtype: DType) -> Program:
    """The product of two constants, whose result stays inside, as in a network; its first row is the output."""
    rng = np.random.default_rng(0)
    numbers = [np.abs(rng.standard_normal((rows, k), np.float32)) for rows in (m, n)]
    given = {name: Literal(from_storage(to_storage(x, E4M3), E4M3)) for name, x in zip("ab", numbers, strict=True)}
    given["scale"] = Literal(np.full(n, scale_of(k), np.float32))
    tensors = [dense(name, (rows, k), E4M3, pad=16) for name, rows in (("a", m), ("b", n))]
    tensors += [dense("scale", (n,), DType.F32), dense("y", (m, n), dtype, pad=16), dense("row", (n,), DType.F32, pad=1)]
    scaled = Epilogue(call("mul", ACC, load(0)), (View("scale", (coord(1),)),))
    row = Epilogue(load(0), (View("y", (constant(0), coord(0))),))
    ops = (Gemm(nodes=("gemm",), a="a", b="b", y="y", epilogue=scaled), Pointwise(nodes=("row",), y="row", epilogue=row))
    return Program((), ("row",), {t.name: t for t in tensors}, given, ops)


def scale_of(k: int) -> float:
    """By which sums of k products become about 1."""
    return 1 / k


def exact(program: Program) -> np.ndarray:
    """The first row."""
    a, b = (program.constants[n].values.astype(np.float64) for n in "ab")  # type: ignore[union-attr]
    return a[0] @ b.T * scale_of(a.shape[1])


def fastest(name: str, program: Program, arch: Arch, count: int) -> tuple[float, float]:
    """Microseconds of the product by a kernel, and its error. Raises AssertionError if that is too large."""
    expected, best, error = exact(program), np.inf, 0.0
    for session in sessions(name, program, arch, count):
        with session:
            (row,) = session.run(None, {})
            off = relative_error(np.asarray(row), expected)
            assert off < BOUND[program.tensors["y"].dtype], f"{name}: its first row is {off:.1e} off"
            best, error = min(best, session.profile(30).steps[0].us), max(error, off)
    return best, error


def peers(torch: Any, program: Program, flush: Any) -> list[tuple[float, float]]:
    """Microseconds and error of `_scaled_mm`, without and with fast accumulation."""
    a, b = (
        torch.from_numpy(to_storage(program.constants[n].values, E4M3)).cuda().view(torch.float8_e4m3fn)  # type: ignore[union-attr]
        for n in "ab"
    )
    scales = torch.tensor(scale_of(a.shape[1]), device="cuda"), torch.tensor(1.0, device="cuda")
    found = []
    for fast in (False, True):
        multiply = partial(
            torch._scaled_mm, a, b.T, scale_a=scales[0], scale_b=scales[1], out_dtype=torch.float16, use_fast_accum=fast
        )
        off = relative_error(multiply()[0].float().cpu().numpy(), exact(program))
        found.append((_time(torch, [multiply] * 4, flush) / 4, off))
    return found


def row(torch: Any, size: str, arch: Arch, count: int) -> str:
    """A row of the table: microseconds of each with errors, and what the fastest of ours is to the peers."""
    m, n, k = map(int, size.split("x"))
    cells, found = [size], []
    for dtype in (DType.F16, E4M3):
        program = program_of(m, n, k, dtype)
        for name in NAMES:
            if kernel(name).supports(program.ops[0], program, arch) is None:
                us, error = fastest(name, program, arch, count)
                found.append(us)
                cells.append(f"{us:.1f} ({error:.1e})")
            else:
                cells.append("-")
    theirs = peers(torch, program_of(m, n, k, DType.F16), torch.empty(1 << 26, device="cuda"))
    cells += [f"{us:.1f} ({error:.1e})" for us, error in theirs]
    cells += [f"{2e-6 * m * n * k / min(found):.0f}", *(f"{us / min(found):.2f}" for us, _ in theirs)]
    return f"| {' | '.join(cells)} |"


def main() -> None:
    import torch

    parser = argparse.ArgumentParser()
    parser.add_argument("sizes", nargs="*", default=SIZES)
    parser.add_argument("--arch", default="sm_90a", help="the generation whose code runs")
    parser.add_argument("--configs", type=int, default=4, help="of each kernel, how many of least estimate are measured")
    args = parser.parse_args()
    heads = ["product", *(f"{n}, {t}" for t in ("float16", "E4M3") for n in NAMES.values())]
    heads += ["cuBLASLt, float16", "the same, fast", "TFLOP/s", "times cuBLASLt's speed", "times fast cuBLASLt's"]
    print(torch.cuda.get_device_name(), "; microseconds, errors of the first row\n", sep="")
    print(f"| {' | '.join(heads)} |\n|{' --- |' * len(heads)}")
    for size in args.sizes:
        print(row(torch, size, ARCHS[args.arch], args.configs), flush=True)


if __name__ == "__main__":
    main()
