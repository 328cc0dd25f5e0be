"""Carry, Scatter, TopK, Cumulate and Places, simulated and compiled."""

from __future__ import annotations

import numpy as np
import pytest

from tccompile.arch import ARCHS
from tccompile.emit.compile import resources
from tccompile.ir.ops import OPS, Carry, Cumulate, Places, Scatter, TopK
from tccompile.ir.program import Program
from tccompile.ir.reference import compute
from tccompile.ir.types import DType
from tccompile.kernels.carry import CarryKernel
from tccompile.kernels.cumulate import CumulateKernel
from tccompile.kernels.scan import PlacesKernel, ScanKernel
from tccompile.kernels.scatter import ScatterKernel
from tccompile.kernels.sort import SortKernel
from tccompile.kernels.spec import I32, Config, Kernel
from tccompile.kernels.top_k import TopKKernel
from tccompile.lower.lines import plain
from tests.gpu.cases import CASES as ALL
from tests.gpu.cases import F16, F32, I64, Builder, cumulate, program_of, top_k
from tests.kernels import machine, simulator
from tests.kernels.support import ARCH, cases_of, check
from tests.tiers import APART, thorough

KERNELS: dict[type, Kernel] = {Carry: CarryKernel(), Scatter: ScatterKernel(), TopK: TopKKernel(), Cumulate: CumulateKernel()}
OF_BLOCKS: dict[type, Kernel] = {TopK: SortKernel(), Cumulate: ScanKernel(), Places: PlacesKernel()}
CASES = [(kind, case) for kind in KERNELS for case in cases_of(kind)]


LONG = ("top_k_in_tiles", "top_k_of_bytes", "cumsum_in_chunks", "cumprod_in_chunks")
"""Cases for kernels whose blocks share a line."""


@pytest.mark.parametrize(
    ("kind", "case"), [pytest.param(kind, case, id=case, marks=[thorough] * (case in LONG)) for kind, case in CASES]
)
def test_values(kind: type, case: str) -> None:
    check(KERNELS[kind], program_of(case), once=False)


@pytest.mark.parametrize(("going", "row"), [(True, 3), (True, 0), (False, 2)])
@pytest.mark.parametrize("shape", [(5, 3, 20), (4, 6), (5, 3, 3), (4,)])
@pytest.mark.parametrize("dtype", [F16, F32])
def test_a_row_that_an_iteration_gives(shape: tuple[int, ...], dtype: DType, going: bool, row: int) -> None:
    """Over what it lies in: no other row is written."""
    b = Builder("row")
    b.normal("x", (1, *shape[1:]), dtype)
    b.normal("over", shape, F32)
    b.values("at", np.array(row), I64)
    b.values("going", np.array(going), DType.BOOL)
    b.result(shape, F32)
    fields = {"role": "next", "loop": "loop", "over": "over", "going": "going", "at": "at"}
    op = Carry(nodes=("row",), y="y", x="x", epilogue=plain(F32), **fields)
    program = Program((), (), b.tensors, b.constants, (op,))
    values = {name: recipe.values for name, recipe in program.constants.items()}
    wanted = values["over"].copy()
    wanted[row] = values["x"][0] if going else wanted[row]
    np.testing.assert_array_equal(compute(op, program, values), wanted)
    for config in CarryKernel().configs(op, program, ARCH):
        memory = simulator.run(CarryKernel().work(op, program, config, ARCH), program, values, "y", ARCH)
        np.testing.assert_array_equal(memory.result()[row], wanted[row])
        assert (memory.there() == (np.arange(shape[0]) == row).reshape(-1, *[1] * (len(shape) - 1))).all()


SMALL = ("top_k_integers", "cumsum_in_chunks", "places")


@thorough
def test_cases_are_of_the_op_that_their_makers_have() -> None:
    for kind in OPS:
        assert cases_of(kind) == [case for case in ALL if isinstance(program_of(case).ops[0], kind)], kind


@pytest.mark.parametrize(
    ("kind", "case"),
    [pytest.param(kind, case, id=case, marks=[thorough] * (case not in SMALL)) for kind in OF_BLOCKS for case in cases_of(kind)],
)
def test_values_by_blocks(kind: type, case: str) -> None:
    """Tiles and chunks of a line by several blocks, in each config of the smallest tile."""
    kernel, program = OF_BLOCKS[kind], program_of(case)
    for config in kernel.configs(program.ops[0], program, ARCH):
        if config.get("tile", 128) == 128:
            check(kernel, program, config, once=False)


IN_PTX: list[tuple[Kernel, str, Config]] = [
    (SortKernel(), "top_k_in_tiles", {"tile": 128, "fan": 2}),
    (SortKernel(), "top_k_of_bytes", {"tile": 128, "fan": 8}),
    (ScanKernel(), "cumsum_in_chunks", {"chunks": 3}),
    (PlacesKernel(), "places_in_chunks", {"chunks": 3}),
]


@thorough
@pytest.mark.parametrize(("kernel", "case", "config"), IN_PTX)
def test_values_of_code(kernel: Kernel, case: str, config: Config) -> None:
    check(kernel, program_of(case), config, once=False, arch=ARCHS["sm_90a"], run=machine.run)


def test_the_faster_kernel_is_chosen() -> None:
    """By estimates: few elements are counted or added up by a thread each, long lines are sorted and scanned."""
    few_and_many = [
        (top_k("few", (4, 50), 0, 2), top_k("many", (1, 8400), 1, 300)),
        (cumulate("few", (5, 64), 0, "add"), cumulate("many", (2, 8400), 1, "add")),
    ]
    for programs in few_and_many:
        kind = type(programs[0].ops[0])
        for blocks, program in enumerate(programs):
            costs = [
                min(kernel.cost(program.ops[0], program, c, ARCH) for c in kernel.configs(program.ops[0], program, ARCH))
                for kernel in (KERNELS[kind], OF_BLOCKS[kind])
            ]
            assert costs[blocks] == min(costs)


def test_sequences_are_shared_where_threads_are_few() -> None:
    """A thread for each channel of each row, and buckets of places where that is not enough."""
    masks = {}
    for case in ("scatter_elements", "scatter_points"):
        program = program_of(case)
        (op,) = program.ops
        *_, launch = ScatterKernel().work(op, program, {}, ARCH).launches
        assert isinstance(launch.args[2], I32)
        masks[case] = launch.args[2].value
    assert masks == {"scatter_elements": 1, "scatter_points": 63}


def test_the_order_of_updates_is_theirs() -> None:
    """In the reference: 4 + 1 + 2 and 8 set twice, the last of them counts."""
    program = program_of("scatter_last_wins")
    (op,) = program.ops
    values = {name: recipe.values for name, recipe in program.constants.items()}  # type: ignore[union-attr]
    expected = values["x"].copy()
    for place, update in zip(values["i"], values["updates"], strict=True):
        expected[place] = update
    np.testing.assert_array_equal(compute(op, program, values), expected)


@thorough
@pytest.mark.parametrize("arch", APART)
def test_compiles(arch: str) -> None:
    others = [(TopK, "top_k_nhwc"), (Cumulate, "cumsum_nhwc"), (Places, "places")] if arch in ("sm_61", "sm_90a") else []
    for kind, case in [(Scatter, "scatter_rows"), *others]:
        program = program_of(case)
        for kernel in (kernels[kind] for kernels in (KERNELS, OF_BLOCKS) if kind in kernels):
            config = next(kernel.configs(program.ops[0], program, ARCH))
            *_, launch = kernel.work(program.ops[0], program, config, ARCH).launches
            assert resources(launch.code, ARCHS[arch]).stack == 0
