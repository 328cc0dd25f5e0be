"""Matrix products with few rows or columns: values thread by thread, where the kernels apply, code for every generation."""

from __future__ import annotations

import pytest

from tccompile.arch import ARCHS
from tccompile.emit.compile import resources
from tccompile.ir.types import DType
from tccompile.kernels.gemv import THREADS, Gemv, GemvMma, streams
from tccompile.kernels.implicit_gemm import describe
from tccompile.kernels.spec import Kernel
from tccompile.schedule.choose import choose
from tests.bench.layers import GemmLayer
from tests.gpu.cases import gemm, of_8_bits, of_float8, program_of
from tests.kernels.support import ARCH, check
from tests.tiers import APART, thorough

PLAIN, MMA = Gemv(), GemvMma()


@pytest.mark.parametrize(
    "kernel, program, config",
    [
        (PLAIN, gemm("one row", (1, 600), 21), {"across": 2, "splits": 1}),
        (PLAIN, gemm("one row, split", (1, 1100), 12, ep="bias relu"), {"across": 4, "splits": 3}),
        (PLAIN, gemm("three rows", (3, 75), 19, ep="bias residual"), {"across": 8, "splits": 1}),
        (PLAIN, gemm("five columns", (21, 300), 5), {"across": 2, "splits": 2}),
        (PLAIN, gemm("fp32", (2, 40), 11, dtype=DType.F32), {"across": 2, "splits": 1}),
        (PLAIN, gemm("batched", (2, 1, 40), 17, batched=True), {"across": 2, "splits": 1}),
        (MMA, gemm("one row", (1, 600), 21), {"across": 1, "splits": 1}),
        (MMA, gemm("eleven rows, split", (11, 1100), 40, ep="bias residual"), {"across": 1, "splits": 3}),
        (MMA, gemm("three columns", (40, 300), 3, to="output"), {"across": 2, "splits": 2}),
        (MMA, of_8_bits("u8 by s8, split", (3, 2064), 21, kinds=(DType.U8, DType.I8, DType.U8)), {"across": 1, "splits": 3}),
        (MMA, of_8_bits("few columns", (40, 304), 3, kinds=(DType.I8, DType.U8, DType.I32)), {"across": 2, "splits": 2}),
        (MMA, gemm("batched", (2, 2, 9, 40), 17, batched=True, to="odd_tail"), {"across": 8, "splits": 1}),
    ],
    ids=lambda v: getattr(v, "name", None) or (v.ops[0].nodes[0] if hasattr(v, "ops") else None),
)
def test_values(kernel, program, config) -> None:
    check(kernel, program, config)


def test_sums_of_floats_of_8_bits_are_added_up_in_float32() -> None:
    check(
        MMA,
        of_float8("fp8", (5, 720), 40, kinds=(DType.E4M3, DType.E5M2, DType.F16)),
        {"across": 2, "splits": 2},
        arch=ARCHS["sm_89"],
    )


def test_the_operand_with_fewer_rows_is_the_small_one() -> None:
    for program, swapped, many, few in ((gemm("a", (3, 64), 40), False, 40, 3), (gemm("b", (40, 64), 3), True, 40, 3)):
        s = streams(describe(program.ops[0], program))
        assert (s.swapped, s.many, s.few) == (swapped, many, few)
        assert s.small.name == ("b" if swapped else "a")


@pytest.mark.parametrize(
    "kernel, program, reason",
    [
        (PLAIN, gemm("nine", (9, 64), 9), "one of them must be at most 8"),
        (MMA, gemm("seventeen", (17, 64), 17), "one of them must be at most 16"),
        (MMA, gemm("fp32", (1, 64), 40, dtype=DType.F32), "Tensor Cores are fed with float16"),
        (PLAIN, gemm("int", (1, 64), 40, dtype=DType.I32), "it multiplies float16"),
    ],
    ids=["9", "17", "fp32", "int"],
)
def test_says_why_not(kernel, program, reason: str) -> None:
    assert reason in kernel.supports(program.ops[0], program, ARCH)


def test_needs_an_instruction_of_16_rows() -> None:
    program = program_of("gemm_1_row")
    said = [MMA.supports(program.ops[0], program, ARCHS[name]) is None for name in ("sm_61", "sm_70", "sm_75", "sm_80", "sm_90a")]
    assert said == [False, False, True, True, True]


@pytest.mark.parametrize("arch", APART)
def test_a_classifier_at_batch_1_is_left_to_it(arch: str) -> None:
    for k, n in ((25088, 4096), (4096, 4096), (2048, 1000)):
        choice = choose(*GemmLayer(1, n, k, bias=True).parts()[0], ARCHS[arch])
        if arch == "sm_90a" and n == 1000:  # weights that come ahead of the wait: 64×64 of gemm_sm90 are as fast
            continue
        assert choice.kernel.name in ("gemv", "gemv_mma")
        (launch,) = choice.work.launches
        assert launch.block == THREADS and launch.grid[0] * launch.grid[1] >= min(2 * ARCHS[arch].sms // 3, 32)


def test_many_rows_are_not() -> None:
    assert choose(*GemmLayer(512, 512, 512).parts()[0], ARCHS["sm_90a"]).kernel.name not in ("gemv", "gemv_mma")


@thorough
@pytest.mark.parametrize("arch", APART)
def test_compiles(arch: str) -> None:
    """As many rows of the small operand as there may be: the most registers"""
    plain = arch in ("sm_61", "sm_70", "sm_100")
    op, program = GemmLayer(8 if plain else 16, 512, 4096).parts()[0]
    kernel: Kernel = PLAIN if plain else MMA
    (launch,) = kernel.work(op, program, {"across": 2, "splits": 2}, ARCHS[arch]).launches
    assert resources(launch.code, ARCHS[arch]).stack == 0
