"""Reductions: how elements are shared out, that every element of every layout is read once, code for every generation."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from tccompile.arch import ARCHS
from tccompile.emit.compile import resources
from tccompile.ir.ops import Reduce
from tccompile.ir.types import DType
from tccompile.kernels.loops import Loops, loops
from tccompile.kernels.reduce import BESIDE, THREADS, ReduceKernel, describe
from tests.gpu.cases import NHWC, program_of, reduce
from tests.kernels.support import ARCH, cases_of, check
from tests.tiers import APART, thorough

KERNEL = ReduceKernel()


def offsets(nest: Loops, tensor: int = 0) -> list[int]:
    """Where the iterations of a nest lie, in order."""
    return [
        sum(i * s for i, s in zip(at, nest.strides[tensor], strict=True)) for at in itertools.product(*map(range, nest.extents))
    ]


@pytest.mark.parametrize("extents", [(3, 4, 5), (2, 1, 6), (1, 1), (), (7,)])
@pytest.mark.parametrize("layout", ["dense", "gaps", "reversed"])
def test_merged_loops_visit_the_same_places(extents: tuple[int, ...], layout: str) -> None:
    strides, step = [], 1
    for n in reversed(extents):
        strides.insert(0, step)
        step *= n + (layout == "gaps")
    if layout == "reversed":
        strides.reverse()
    plain = [sum(i * s for i, s in zip(at, strides, strict=True)) for at in itertools.product(*map(range, extents))]
    nest = loops(extents, strides)
    assert offsets(nest) == plain and nest.size == len(plain)
    assert nest.depth == 1 or layout != "dense"


@pytest.mark.parametrize("case", cases_of(Reduce))
def test_every_element_is_read_once(case: str) -> None:
    program = program_of(case)
    (op,) = program.ops
    x, y = program.tensors[op.x], program.tensors[op.y]
    shares = describe(op, program)
    lane = y.inner if y.inner is not None else y.rank - 1
    kept_lanes = range(0 if lane in op.axes else x.shape[lane])
    lanes = [c * x.strides[lane] for c in kept_lanes] or [0]
    seen = np.zeros(x.span, int)
    for row, k, c in itertools.product(offsets(shares.rows), offsets(shares.inner), lanes):
        seen[row + k + c] += 1
    expected = np.zeros(x.span, int)
    for at in itertools.product(*map(range, x.shape)):
        expected[sum(i * s for i, s in zip(at, x.strides, strict=True))] = 1
    assert np.array_equal(seen, expected)


@pytest.mark.parametrize("case", cases_of(Reduce))
def test_blocks_cover_outputs_and_elements(case: str) -> None:
    program = program_of(case)
    (op,) = program.ops
    for config in KERNEL.configs(op, program, ARCH):
        shares = describe(op, program, config.get("beside", BESIDE))
        work = KERNEL.work(op, program, config, ARCH)
        (launch,) = work.launches
        outputs, _, k, chunk, splits, bits, _, _ = (a.value for a in launch.args[3:11])
        assert 1 << bits == shares.threads and launch.grid[0] * (THREADS >> bits) >= outputs
        assert launch.grid[1] == splits and (splits - 1) * chunk < k <= splits * chunk
        assert chunk % shares.vector == 0
        if splits > 1:
            assert work.counters == 4 * launch.grid[0]
            assert work.scratch >= outputs * splits * shares.lanes * 4


@pytest.mark.parametrize(
    "program",
    [
        *map(
            program_of, ("mean_hw", "mean_rows", "sum_middle", "sum_two_axes", "sum_squares", "max_rows", "min_middle", "product")
        ),
        *map(program_of, ("sum_integers", "max_integers", "mean_hw_odd", "max_many", "sum_of_one")),
        *map(program_of, ("mean_bytes", "mean_rows_of_bytes", "mean_rows_of_16_bits")),
        reduce("long", (2, 9001), (1,), ep="mean"),
        reduce("longer", (1, 5000), (0, 1), combine="max"),
        reduce("split", (1, 8, 40, 50), (2, 3), order=NHWC, ep="mean"),
    ],
    ids=lambda program: program.ops[0].nodes[0],
)
def test_values(program) -> None:
    check(KERNEL, program)


def test_splits_where_outputs_are_few() -> None:
    def best(program) -> int:
        arch = ARCHS["sm_90a"]
        (op,) = program.ops
        return min(KERNEL.configs(op, program, arch), key=lambda c: KERNEL.cost(op, program, c, arch))["splits"]

    assert best(program_of("mean_hw_large")) > 1
    assert best(program_of("mean_hw")) == 1
    assert best(reduce("r", (1, 300000), (1,))) > 1


def test_lanes_are_vectors_where_they_are_kept() -> None:
    def share(*args, **how):
        program = reduce("r", *args, **how)
        return describe(program.ops[0], program)

    assert share((2, 40, 5, 7), (2, 3), order=NHWC).lanes == 8
    assert share((9, 64), (1,)).vector == 8 and share((9, 64), (1,)).width == 8
    assert share((9, 61), (1,)).vector == 8  # the padding is left out in registers
    assert share((9, 64), (1,), dtype=DType.I64).vector == 1
    assert share((9, 64), (1,), dtype=DType.U8).vector == 8
    assert share((2, 40, 5, 7), (2, 3), order=NHWC, dtype=DType.U8).lanes == 8


@thorough
@pytest.mark.parametrize("arch", APART)
def test_compiles(arch: str) -> None:
    for program in (program_of("mean_hw_large"), program_of("sum_squares"), program_of("sum_integers")):
        (op,) = program.ops
        *_, config = KERNEL.configs(op, program, ARCHS[arch])
        (launch,) = KERNEL.work(op, program, config, ARCHS[arch]).launches
        assert resources(launch.code, ARCHS[arch]).stack == 0
