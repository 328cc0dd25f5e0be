"""Products of int8 by each kernel, beside cuBLASLt, on a GPU: python -m tests.bench.bytes [MxNxK …]

Rows are y (M, N) = a (M, K) · b (N, K)ᵀ of random bytes: by wgmma, by mma.sync and by CUDA cores, with sums as int32, and as
float16 scaled by column; and by PyTorch's `_int_mm`, which is cuBLASLt with sums as int32. Of each kernel the fastest of its
cheapest configs counts. The first row of each result is held to exact sums. Times are of the step alone, by events around graph
replays, operands and result on the device.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np

from tccompile.arch import ARCHS, Arch
from tccompile.emit.job import SpillError
from tccompile.emit.many import emit
from tccompile.emit.pack import Build, section
from tccompile.ir.expr import ACC, Epilogue, Expr, View, call, cast, constant, coord, load
from tccompile.ir.ops import Gemm, Pointwise
from tccompile.ir.program import Program
from tccompile.ir.storage import pack_constant
from tccompile.ir.tensor import dense
from tccompile.ir.types import DType
from tccompile.ir.weights import Literal
from tccompile.kernels import kernel
from tccompile.plan.file import Plan
from tccompile.plan.format import Entry
from tccompile.runtime.session import Session
from tccompile.schedule.choose import Choice
from tccompile.schedule.place import place
from tests.bench.layers import _time

SIZES = ("1024x1024x1024", "4096x4096x4096", "8192x8192x8192", "128x3072x768", "100352x256x64", "6272x512x2048")

NAMES = {"gemm_sm90": "wgmma", "gemm_mma": "mma.sync", "gemm_simt": "CUDA cores"}

SCALE = 2.0**-10


def program_of(m: int, n: int, k: int, dtype: DType) -> Program:
    """The product of two constants, whose result stays inside, as in a network; its first row is the output."""
    rng = np.random.default_rng(0)
    given = {name: Literal(rng.integers(-128, 128, (rows, k)).astype(np.int8)) for name, rows in (("a", m), ("b", n))}
    given["scale"] = Literal(np.full(n, SCALE, np.float32))
    tensors = [dense(name, (rows, k), DType.I8, pad=16) for name, rows in (("a", m), ("b", n))]
    tensors += [dense("scale", (n,), DType.F32), dense("y", (m, n), dtype), dense("row", (n,), DType.F32, pad=1)]
    exact, scale = Expr("acc", (), None, DType.I64), View("scale", (coord(1),))
    epilogue = Epilogue(exact) if dtype is DType.I32 else Epilogue(call("mul", ACC, load(0)), (scale,))
    row = Epilogue(cast(load(0, dtype.compute), DType.F32), (View("y", (constant(0), coord(0))),))
    ops = (Gemm(nodes=("gemm",), a="a", b="b", y="y", epilogue=epilogue), Pointwise(nodes=("row",), y="row", epilogue=row))
    return Program((), ("row",), {t.name: t for t in tensors}, given, ops)


def sessions(name: str, program: Program, arch: Arch, count: int) -> Iterator[Session]:
    """A session for each of a kernel's configs of least estimate, but for those that spill registers."""
    gemm, row = program.ops
    found, copies = kernel(name), kernel("pointwise")
    last = next(iter(copies.configs(row, program, arch)))
    ranked = sorted(found.configs(gemm, program, arch), key=lambda c: found.cost(gemm, program, c, arch))
    for config in ranked[:count]:
        how = [(found, config, found.work(gemm, program, config, arch)), (copies, last, copies.work(row, program, last, arch))]
        jobs = [(launch.code, arch, "cubin") for _, _, work in how for launch in work.launches]
        try:
            images = emit(jobs)
        except SpillError:
            continue
        index = {image: i for i, image in enumerate(dict.fromkeys(images.values()))}
        chosen = [Choice(*h, np.nan, "forced") for h in how]
        entry = Entry(program, (section(Build(arch.name, "cubin", chosen, place(program, [h[2] for h in how])), images, index),))
        weights = {n: pack_constant(program.tensors[n], r.values) for n, r in program.constants.items()}  # type: ignore[union-attr]
        yield Session(Plan("bytes", {}, (entry,), tuple(index), weights), device="gpu")


def fastest(name: str, program: Program, arch: Arch, count: int) -> float:
    """Microseconds of the product by a kernel. Raises AssertionError if its first row is wrong."""
    a, b = (program.constants[n].values.astype(np.int64) for n in "ab")  # type: ignore[union-attr]
    sums = a[0] @ b.T
    best = np.inf
    for session in sessions(name, program, arch, count):
        with session:
            (row,) = session.run(None, {})
            exact = program.tensors["y"].dtype is DType.I32
            expected = sums if exact else (sums.astype(np.float32) * np.float32(SCALE)).astype(np.float16)
            assert (np.asarray(row) == expected.astype(np.float32)).all(), name
            best = min(best, session.profile(30).steps[0].us)
    return best


def row(torch: Any, size: str, arch: Arch, count: int) -> str:
    """A row of the table: microseconds of each, and what the fastest of ours is to the peer."""
    m, n, k = map(int, size.split("x"))
    cells, found = [size], []
    for dtype in (DType.I32, DType.F16):
        program = program_of(m, n, k, dtype)
        for name in NAMES:
            if kernel(name).supports(program.ops[0], program, arch) is None:
                found.append(fastest(name, program, arch, count))
                cells.append(f"{found[-1]:.1f}")
            else:
                cells.append("-")
    flush = torch.empty(1 << 26, device="cuda")
    a, b = (torch.randint(-128, 128, (rows, k), dtype=torch.int8, device="cuda") for rows in (m, n))
    us = _time(torch, [partial(torch._int_mm, a, b.T)] * 4, flush) / 4
    cells += [f"{us:.1f}", f"{2e-6 * m * n * k / min(found):.0f}", f"{us / min(found):.2f}"]
    return f"| {' | '.join(cells)} |"


def main() -> None:
    import torch

    parser = argparse.ArgumentParser()
    parser.add_argument("sizes", nargs="*", default=SIZES)
    parser.add_argument("--arch", default="sm_90a", help="the generation whose code runs")
    parser.add_argument("--configs", type=int, default=4, help="of each kernel, how many of least estimate are measured")
    args = parser.parse_args()
    heads = ["product", *(f"{n}, {t}" for t in ("int32", "float16") for n in NAMES.values()), "cuBLASLt, int32"]
    print(torch.cuda.get_device_name(), "; microseconds\n", sep="")
    print(f"| {' | '.join(heads)} | TOP/s | times cuBLASLt's speed |\n|{' --- |' * (len(heads) + 2)}")
    for size in args.sizes:
        print(row(torch, size, ARCHS[args.arch], args.configs), flush=True)


if __name__ == "__main__":
    main()
