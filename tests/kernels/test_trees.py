"""Decision trees, simulated and compiled."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tccompile.arch import ARCHS
from tccompile.emit.compile import resources
from tccompile.errors import PlanError
from tccompile.ir.ops import Trees
from tccompile.ir.program import Program
from tccompile.ir.reference import compute
from tccompile.ir.tensor import dense
from tccompile.ir.types import DType
from tccompile.ir.weights import Literal
from tccompile.kernels.trees import TreesKernel
from tests.gpu.cases import program_of
from tests.kernels import machine, simulator
from tests.kernels.support import ARCH, cases_of, check
from tests.tiers import usually

LONG = "trees_of_many_rows"  # of which the simulator runs some blocks only


@pytest.mark.parametrize("case", [case for case in cases_of(Trees) if case != LONG])
def test_values(case: str) -> None:
    check(TreesKernel(), program_of(case))


@pytest.mark.parametrize("case", ["trees_of_one", "trees_max"])
def test_values_by_the_ptx(case: str) -> None:
    check(TreesKernel(), program_of(case), {"lanes": 2}, arch=ARCHS["sm_90a"], run=machine.run)


def test_a_walk_by_hand() -> None:
    """x < 1 goes left, NaN goes right where the mode does not have it, and to the left where it has."""
    bits = int(np.float32(1).view(np.int32))
    weights = np.array([5, 7], np.float32).view(np.int32)
    for mode, expected in ((1, [5, 7, 7, 7]), (3, [5, 5, 7, 7]), (4, [7, 7, 5, 7]), (9, [5, 7, 7, 5])):
        records = [[bits, mode, 1, 0], [0, 0, 0, 2], [0, 0, 1, 2]]
        values = {
            "x": np.array([[0], [1], [2], [np.nan]], np.float32), "branches": np.array(records).reshape(-1),
            "leaves": np.array([0, weights[0], 0, weights[1]], np.int64),
        }  # fmt: skip
        program = program_of("trees")
        (op,) = program.ops
        op = replace(op, trees=1, depth=1)
        tensors = dict(program.tensors) | {"y": replace(program.tensors["y"], shape=(4, 1))}
        out = compute(op, replace(program, tensors=tensors), values)
        np.testing.assert_array_equal(out[:, 0], expected)


def broken(change: str) -> Program:
    """Trees whose constants lead out of themselves, or round in circles."""
    program = program_of("trees_min")
    records, entries = (program.constants[name].values.copy() for name in ("branches", "leaves"))  # type: ignore[union-attr]
    rows = records.reshape(-1, 4)
    (branches,) = np.nonzero(rows[:, 3] == 0)
    (leaves,) = np.nonzero(rows[:, 3])
    match change:
        case "cycle":
            rows[branches, 2] = 0
        case "child":
            rows[branches, 2] = 2**31 - 1
        case "negative child":
            rows[branches, 2] = -5
        case "feature":
            rows[branches, 1] |= 2**30
        case "entry":
            rows[leaves, 2] = 2**31 - 2
        case "entries":
            rows[leaves, 3] = 2**31 - 1
        case "target":
            entries[::2] = 99
    constants = dict(program.constants) | {"branches": Literal(records), "leaves": Literal(entries)}
    return replace(program, constants=constants)


@pytest.mark.parametrize("change", ["cycle", "child", "negative child", "feature", "entry", "entries", "target"])
def test_constants_that_lead_astray(change: str) -> None:
    """A kernel ends, reads what is there and writes y alone, whatever its constants hold; the reference says what is wrong."""
    program = broken(change)
    (op,) = program.ops
    values = {name: recipe.values for name, recipe in program.constants.items()}  # type: ignore[union-attr]
    with pytest.raises(PlanError, match="node 'trees_min'"):
        compute(op, program, values)
    config = {"lanes": 32}
    simulator.run(TreesKernel().work(op, program, config, ARCH), program, values, op.y, ARCH, blocks=1).check_written(some=True)


def test_few_rows_share_their_trees_and_many_do_not() -> None:
    kernel, program = TreesKernel(), program_of("trees")
    (op,) = program.ops
    assert isinstance(op, Trees)
    op, lanes = replace(op, trees=500, depth=8), []
    for rows in (1, 10**6):
        sized = {name: dense(name, (rows, program.tensors[name].shape[1]), DType.F32) for name in ("x", "y")}
        large = replace(program, tensors={**program.tensors, **sized})
        costs = {config["lanes"]: kernel.cost(op, large, config, ARCH) for config in kernel.configs(op, large, ARCH)}
        lanes.append(min(costs, key=lambda n: costs[n]))
    assert lanes[0] == 256 and lanes[1] < 32


@pytest.mark.parametrize("arch", usually(ARCHS, "sm_61", "sm_90a"))
def test_compiles(arch: str) -> None:
    for case in ("trees_max",) if arch == "sm_61" else ("trees_of_classes",):
        program = program_of(case)
        (launch,) = TreesKernel().work(program.ops[0], program, {"lanes": 8}, ARCH).launches
        assert resources(launch.code, ARCHS[arch]).stack == 0
