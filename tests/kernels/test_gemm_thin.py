"""Products of many rows with a short K and few columns: values thread by thread and by their PTX, what is refused, registers."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tccompile.arch import ARCHS
from tccompile.emit.compile import resources
from tccompile.ir.expr import ACC, call
from tccompile.ir.ops import Conv
from tccompile.ir.program import Program
from tccompile.ir.types import DType
from tccompile.kernels.gemm_sm90_cost import slots_of
from tccompile.kernels.gemm_thin import MOST_WEIGHTS, THIN, shape_of
from tccompile.kernels.implicit_gemm import describe
from tccompile.schedule.choose import choose
from tests.bench.eight import Product
from tests.gpu.cases import conv, gemm, of_8_bits, of_float8
from tests.kernels import machine
from tests.kernels.support import check, on_two_blocks
from tests.tiers import thorough, usually

FP8 = (DType.E4M3, DType.E5M2, DType.F16)


def kernel(program: Program):
    return THIN[not isinstance(program.ops[0], Conv)]


CASES = [
    (gemm, ((40, 20), 3), {"ep": "bias"}, 1, "sm_75"),
    (gemm, ((150, 75), 19), {"ep": "bias residual"}, 1, "sm_80"),
    (gemm, ((150, 16), 40), {}, 2, "sm_80"),
    (conv, ((2, 24, 5, 9), 12, (1, 1)), {"ep": "bias relu"}, 2, "sm_80"),
    (of_8_bits, ((77, 45), 20), {"kinds": (DType.U8, DType.I8, DType.U8)}, 2, "sm_80"),
    (of_8_bits, ((40, 80), 8), {"kinds": (DType.I8, DType.U8, DType.I32)}, 1, "sm_80"),
    (of_float8, ((70, 144), 24), {"kinds": FP8}, 1, "sm_89"),
    (of_float8, ((70, 16), 96), {"kinds": FP8}, 1, "sm_89"),
    (of_8_bits, ((70, 144), 40), {"kinds": (DType.U8, DType.I8, DType.U8)}, 1, "sm_80"),
    (conv, ((1, 20, 9, 11), 150, (1, 1)), {"ep": "bias relu"}, 2, "sm_80"),
    (of_8_bits, ((40, 128), 8), {"kinds": (DType.U8, DType.I8, DType.F32), "extreme": True}, 1, "sm_80"),
    (of_8_bits, ((40, 160), 8), {"kinds": (DType.U8, DType.I8, DType.F32), "extreme": True}, 1, "sm_80"),
]


@pytest.mark.parametrize(("make", "args", "how", "groups", "arch"), usually(CASES, 0, 1, 4, 7, 10, 11))
def test_values(make, args, how, groups, arch) -> None:
    """Half a step of K and whole ones, 2 to 8 columns of a lane, several times as many, rows that fill no turn, the largest sums
    of integers."""
    program = make("thin", *args, **how)
    check(kernel(program), program, {"groups": groups}, arch=ARCHS[arch])


@pytest.mark.parametrize(("make", "args", "how", "groups", "arch"), usually(CASES[::3], 0))
def test_compiled_code_computes(make, args, how, groups, arch) -> None:
    program = make("thin", *args, **how)
    check(kernel(program), program, {"groups": groups}, arch=ARCHS["sm_90a"], run=machine.run)


@pytest.mark.parametrize("name", ["sigmoid", "silu"])
def test_estimates_count_what_becomes_of_results(name: str) -> None:
    """In halves more than in bytes, in which it is less exact."""
    times = []
    for program in (
        gemm("plain", (400_000, 16), 96),
        of_8_bits("bytes", (400_000, 32), 96, kinds=(DType.U8, DType.I8, DType.U8)),
    ):
        (op,) = program.ops
        expr = call(name, op.epilogue.expr)
        rich = replace(op, epilogue=replace(op.epilogue, expr=expr))
        plain, more = (THIN[1].cost(o, program, {"groups": 1}, ARCHS["sm_90a"]) for o in (op, rich))
        times.append(more - plain)
    assert min(times) > 3 and slots_of(call(name, ACC), DType.F16, ARCHS["sm_90a"]) > slots_of(
        call(name, ACC), DType.U8, ARCHS["sm_90a"]
    )


def test_a_block_goes_through_several_turns() -> None:
    """Fewer blocks than turns, as on a GPU that they fill."""
    program = gemm("turns", (700, 16), 8)
    (op,) = program.ops
    (launch,) = THIN[1].work(op, program, {"groups": 1}, ARCHS["sm_90a"]).launches
    assert launch.grid[0] == 11
    check(THIN[1], program, {"groups": 1}, arch=ARCHS["sm_90a"], run=on_two_blocks)


@pytest.mark.parametrize(
    ("program", "reason"),
    [
        (gemm("wide", (40, 64), 600), "more weights than a warp has registers for"),
        (gemm("fp32", (40, 64), 8, dtype=DType.F32), "Tensor Cores are fed with float16"),
        (gemm("turned", (40, 64), 8, transposed="a"), "is transposed; neighbours along K are read at once"),
        (gemm("batched", (3, 9, 40), 16, batched=True), "it has 3 batches"),
        (gemm("odd", (40, 64), 12, to="odd_tail"), "are not stored at once"),
        (conv("window", (1, 16, 8, 8), 8, (3, 3)), "it gathers its rows from an image"),
    ],
    ids=lambda v: v.ops[0].nodes[0] if isinstance(v, Program) else None,
)
def test_says_why_not(program: Program, reason: str) -> None:
    assert reason in str(kernel(program).supports(program.ops[0], program, ARCHS["sm_90a"]))


def test_needs_an_instruction_of_16_rows() -> None:
    half, eight = gemm("half", (40, 20), 3), of_8_bits("eight", (40, 32), 8)
    for program, since in ((half, 75), (eight, 80)):
        for name in ("sm_61", "sm_70", "sm_75", "sm_80", "sm_90a", "sm_120"):
            said = THIN[1].supports(program.ops[0], program, ARCHS[name])
            assert (said is None) == (int(name[3:].rstrip("a")) >= since), name


@pytest.mark.parametrize(
    ("m", "n", "k"), usually([(100352, 24, 96), (100352, 24, 144), (25088, 32, 144), (401408, 96, 16), (8388608, 3, 32)], 0)
)
def test_rows_that_fill_no_box_are_left_to_it(m: int, n: int, k: int) -> None:
    assert choose(*Product(m, n, k, DType.E4M3).parts()[0], ARCHS["sm_90a"]).kernel.name == "gemm_thin"


@pytest.mark.parametrize(("m", "n", "k"), [(1024, 1024, 1024), (32, 96, 4)])
def test_squares_and_few_rows_are_not(m: int, n: int, k: int) -> None:
    assert choose(*Product(m, n, k, DType.E4M3).parts()[0], ARCHS["sm_90a"]).kernel.name == "gemm_sm90"


@thorough
@pytest.mark.parametrize(("k", "n"), [(144, 24), (16, 128)])
def test_compiles_without_spills(k: int, n: int) -> None:
    """As many weights as there may be, with scales and a bias: the most registers."""
    program = of_float8("most", (600, k), n, kinds=(DType.E4M3, DType.E4M3, DType.F16))
    (op,) = program.ops
    problem = describe(op, program)
    assert not isinstance(problem, str) and shape_of(problem, 1).weights <= MOST_WEIGHTS
    (launch,) = THIN[1].work(op, program, {"groups": 1}, ARCHS["sm_90a"]).launches
    assert resources(launch.code, ARCHS["sm_90a"]).stack == 0
