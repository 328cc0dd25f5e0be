"""Softmax: values thread by thread, in any layout; where rows are kept; code for every generation."""

from __future__ import annotations

import pytest

from tccompile.arch import ARCHS
from tccompile.emit.compile import resources
from tccompile.emit.job import SpillError
from tccompile.ir.types import DType
from tccompile.kernels.softmax import SoftmaxKernel
from tccompile.kernels.two_pass import REGISTERS, THREADS, Shares, describe
from tccompile.schedule.choose import candidates
from tests.bench.bandwidth import softmax as large
from tests.gpu.cases import MANY, NHWC, program_of, softmax
from tests.kernels.support import ARCH, check
from tests.tiers import APART, thorough, usually

KERNEL = SoftmaxKernel()


@pytest.mark.parametrize("shape, axis, order", [((2, 3, 4, 5, 12), 1, None), ((2, 20, 5, 7), 2, NHWC), ((3, 1, 9), 1, None)])
def test_of_other_axes(shape: tuple[int, ...], axis: int, order) -> None:
    check(KERNEL, softmax("softmax", shape, axis, order=order))


@pytest.mark.parametrize(
    "case",
    [
        "softmax_rows", "softmax_channels", "log_softmax", "softmax_long", "softmax_odd", "softmax_middle", "softmax_many",
        "softmax_of_input", "softmax_transposed", "log_softmax_transposed",
    ],
)  # fmt: skip
def test_values(case: str) -> None:
    check(KERNEL, program_of(case))


def test_values_of_rows_that_are_read_again() -> None:
    program = softmax("softmax", (1, 8 * THREADS * REGISTERS + 13), 1)
    check(KERNEL, program, {"threads": THREADS, "rows": 1, "shared": 0})


@pytest.mark.parametrize("log", [False, True])
@pytest.mark.parametrize(
    "shape, dtype, threads, rows, held",
    usually(
        [
            ((3, 4101), DType.F16, 128, 1, 5),  # two outputs a block
            ((3, 4101), DType.F16, 256, 2, 3),
            ((3, 4101), DType.F32, 256, 2, 3),
            ((1, 14336), DType.F16, 256, 1, 7),  # all vectors of all threads
            ((3, 4101), DType.F16, 512, 2, 2),
            ((1, 8203), DType.F16, 1024, 1, 2),
            ((1, 36871), DType.F16, 512, 1, 0),
        ],
        2,
        3,
        5,
    ),
)
def test_values_of_rows_kept_as_words(shape, dtype, threads: int, rows: int, held: int, log: bool) -> None:
    program = softmax("softmax", shape, 1, log, dtype=dtype, ep="scale")
    config = {"threads": threads, "rows": rows, "shared": 0}
    shares = describe(program.ops[0], program, (1,), config=config)
    assert shares.held == held and shares.words == 2 * dtype.size
    check(KERNEL, program, config)


@pytest.mark.parametrize("log", [False, True])
@pytest.mark.parametrize(
    "shape, dtype",
    usually([((2, 36871), DType.F16), ((1, 36871), DType.F32), ((1, 40960), DType.F16)], 1, 2),  # all vectors of all threads
)
def test_values_of_rows_in_shared_memory(shape, dtype, log: bool) -> None:
    program = softmax("softmax", shape, 1, log, dtype=dtype, ep="scale")
    config = {"threads": 512, "rows": 1, "shared": 1}
    assert config in KERNEL.configs(program.ops[0], program, ARCHS["sm_90a"])
    shares = describe(program.ops[0], program, (1,), config=config)
    assert shares.held == 10 and shares.words == 2 * dtype.size
    check(KERNEL, program, config)


def test_rows_are_kept_in_registers_while_they_fit() -> None:
    def shares(length: int, dtype: DType = DType.F16, pad: int = 8) -> list[Shares]:
        """In each way that is tried."""
        program = softmax("softmax", (4, length), 1, dtype=dtype, pad=pad)
        (op,) = program.ops
        return [describe(op, program, (1,), config=config) for config in KERNEL.configs(op, program, ARCHS["sm_75"])]

    def kept(*args) -> list[tuple[int, int, int, bool]]:
        return [(s.threads, s.rows, s.held, s.words > 0) for s in shares(*args)]

    assert shares(100)[0].unit == 8
    assert kept(1000)[0] == (32, 1, 4, False)
    assert kept(4096) == [(128, 1, 4, False), (256, 1, 2, False), (256, 2, 2, False)]
    assert kept(5120) == [(128, 1, 5, True), (256, 1, 3, False), (256, 2, 3, True)]
    assert kept(8 * THREADS * REGISTERS) == [(256, 1, REGISTERS, True), (512, 1, 4, True), (512, 2, 4, True)]
    assert kept(50257) == [(1024, 1, 7, True), (512, 1, 0, True)]
    assert kept(8 * 1024 * REGISTERS + 8) == [(1024, 1, 0, True), (512, 1, 0, True)]
    assert kept(8 * THREADS * REGISTERS, DType.F32) == [(256, 1, REGISTERS, True), (512, 1, 4, True)]
    assert kept(8 * 512 * REGISTERS, DType.F32) == [(512, 1, REGISTERS, True), (1024, 1, 4, True)]
    assert kept(2001, DType.F16, 1) == [(256, 1, REGISTERS, False)]  # one element at a time
    assert kept(4101, DType.F16, 1) == [(256, 1, 0, False)]


def test_rows_are_kept_in_shared_memory_while_they_fit() -> None:
    def blocks(length: int, name: str) -> list[int]:
        """That a multiprocessor has room for, in each way that is tried."""
        program, arch = softmax("softmax", (4, length), 1), ARCHS[name]
        (op,) = program.ops
        configs = [c for c in KERNEL.configs(op, program, arch) if c["shared"]]
        return [arch.smem_sm // (describe(op, program, (1,), config=c).smem + 1024) for c in configs]

    assert blocks(32768, "sm_90a") == []  # registers are faster
    assert blocks(36871, "sm_90a") == blocks(50257, "sm_90a") == [2]
    assert blocks(50257, "sm_80") == blocks(36871, "sm_86") == [1]
    assert blocks(50257, "sm_86") == blocks(50257, "sm_75") == blocks(131072, "sm_90a") == []


@pytest.mark.parametrize("length, shared", [(197, False), (1024, True), (1025, True)])
def test_many_rows_take_few_threads_each_and_few_rows_many(length: int, shared: bool) -> None:
    def threads(rows: int) -> int:
        return candidates(*large((rows, length)), ARCH)[0].config["threads"]

    assert threads(100_000) < threads(64)
    assert (threads(64) > 32) == shared


def test_says_why_not() -> None:
    program = softmax("softmax", (4, 10), 1, dtype=DType.I32)
    assert "no float type" in KERNEL.supports(program.ops[0], program, ARCH)


def test_a_launch_covers_the_outputs() -> None:
    program = program_of("softmax_rows")
    (launch,) = KERNEL.work(program.ops[0], program, {"threads": 8, "rows": 1, "shared": 0}, ARCH).launches
    outputs, bits = launch.args[3].value, launch.args[5].value
    assert outputs == 33 and (launch.grid[0] - 1) * (THREADS >> bits) < outputs <= launch.grid[0] * (THREADS >> bits)


@pytest.mark.parametrize("length", usually([4101, 16409, 70001]))
def test_rows_with_many_operands_have_a_way(length: int) -> None:
    program = softmax("softmax", (2, length), 1, ep=MANY)
    (op,) = program.ops
    arch = ARCHS["sm_90a"]
    works = [KERNEL.work(op, program, config, arch) for config in KERNEL.configs(op, program, arch)]
    for code in (launch.code for work in reversed(works) for launch in work.launches):
        try:
            assert resources(code, arch).stack == 0
            return
        except SpillError:
            continue
    pytest.fail("all configs spill registers")


@thorough
@pytest.mark.parametrize("arch", APART)
def test_compiles(arch: str) -> None:
    for case in ("softmax_long", "softmax_middle", "softmax_longer_fp32", "softmax_of_words", "log_softmax_too_long"):
        program = program_of(case)
        config = candidates(program.ops[0], program, ARCHS[arch])[0].config
        (launch,) = KERNEL.work(program.ops[0], program, config, ARCHS[arch]).launches
        assert resources(launch.code, ARCHS[arch]).stack == 0
