"""Inverted residuals in one launch: values thread by thread, where they apply, code, the choice of one launch or several."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tccompile.arch import ARCHS
from tccompile.emit import resources
from tccompile.expr import DType
from tccompile.kernels.inverted_residual import INVERTED_RESIDUALS
from tccompile.kernels.spec import Config
from tccompile.place import place
from tccompile.program import Program
from tccompile.schedule import schedule
from tests.gpu.cases import inverted_residual, program_of
from tests.kernels import simulator
from tests.kernels.support import TOLERANCE, error, meaning

KERNELS = {kernel.length: kernel for kernel in INVERTED_RESIDUALS}
ARCH = ARCHS["sm_90a"]


@pytest.mark.parametrize(
    "program, rows, columns, split",
    [
        (inverted_residual("residual", (1, 24, 6, 7), 48, 24, ep="bias residual"), 4, 7, 2),
        (inverted_residual("one_block", (2, 24, 5, 9), 40, 12), 4, 8, 1),
        (inverted_residual("stride_2", (1, 16, 9, 11), 96, 24, stride=2, inner="bias hard_swish"), 7, 7, 2),
        (inverted_residual("odd", (1, 19, 9, 11), 130, 37, inner="bias silu", ep="scale bias relu", to="gap"), 8, 4, 4),
        (inverted_residual("five", (1, 40, 8, 6), 72, 80, window=5, source="slice"), 8, 8, 2),
        (inverted_residual("deep", (1, 72, 4, 4), 40, 40, to="output"), 4, 7, 2),
        (inverted_residual("no_projection", (1, 24, 6, 7), 48, 0, ep="bias silu"), 4, 7, 2),
        (
            inverted_residual("no_projection_2", (2, 40, 9, 11), 100, 0, stride=2, ep="bias residual", source="slice"),
            4,
            8,
            4,
        ),
        (inverted_residual("no_projection_5", (1, 16, 5, 7), 104, 0, window=5, to="tail"), 8, 8, 1),
    ],
    ids=lambda v: v.ops[-1].nodes[0] if isinstance(v, Program) else "",
)
def test_values(program: Program, rows: int, columns: int, split: int) -> None:
    kernel = KERNELS[len(program.ops)]
    config = {"rows": rows, "columns": columns, "split": split}
    assert kernel.supports(program.ops, program, ARCH) is None
    assert config in list(kernel.configs(program.ops, program, ARCH))
    values = {name: recipe.values for name, recipe in program.constants.items()}  # type: ignore[union-attr]
    memory = simulator.run(kernel.work(program.ops, program, config, ARCH), program, values, "y")
    memory.check_written()
    assert error(memory.result(), meaning(program)) <= TOLERANCE[program.tensors["y"].dtype]


@pytest.mark.parametrize(
    "change, reason",
    [
        ({"stride": 3}, "has strides (3, 3)"),
        ({"window": 7}, "(7, 7) taps"),
        ({"inner": "bias residual"}, "reads more than its own weights by pixel"),
        ({"o": 400}, "400 output channels; it takes 320"),
    ],
    ids=str,
)
def test_says_why_not(change: dict, reason: str) -> None:
    program = inverted_residual("other", **{"x": (1, 24, 14, 14), "hidden": 144, "o": 24} | change)
    assert reason in str(KERNELS[3].supports(program.ops, program, ARCH))


def test_needs_clusters_and_fp16() -> None:
    program = program_of("inverted_residual")
    assert "has no clusters" in str(KERNELS[3].supports(program.ops, program, ARCHS["sm_80"]))
    wide = replace(program, tensors={**program.tensors, "hidden": replace(program.tensors["hidden"], dtype=DType.F32)})
    assert "hidden is float32" in str(KERNELS[3].supports(program.ops, wide, ARCH))


@pytest.mark.parametrize("case", ["inverted_residual_deep", "inverted_residual_5x5_stride2", "expand_depthwise_5x5"])
def test_compiles_without_spills(case: str) -> None:
    program = program_of(case)
    kernel = KERNELS[len(program.ops)]
    config: Config = min(kernel.configs(program.ops, program, ARCH), key=lambda c: kernel.cost(program.ops, program, c, ARCH))
    (launch,) = kernel.work(program.ops, program, config, ARCH).launches
    assert resources(launch.code, ARCH).stack == 0


def test_one_step_has_the_launch_and_reads_what_the_others_read() -> None:
    """What the first op reads stays in memory until the last one has run; what lies between is never written."""
    program = program_of("inverted_residual")
    choices = schedule(program, ARCH)
    assert [len(c.work.launches) for c in choices] == [0, 0, 1]
    assert {c.kernel.name for c in choices} == {"inverted_residual"}
    assert "in one launch" in choices[2].reason and "computed with inverted_residual" in choices[0].reason
    assert sum(c.cost for c in choices) < sum(c.cost for c in schedule(program, ARCHS["sm_80"]))
    placement = place(program, [c.work for c in choices])
    assert placement.after == ((), (0,), (1,))


def test_what_others_read_is_stored() -> None:
    """A hidden image that is read twice has its own launch."""
    program = inverted_residual("twice", (1, 24, 14, 14), 144, 144, ep="bias residual")
    last = program.ops[2]
    hidden = replace(last.epilogue.loads[1], tensor="hidden")
    again = replace(last, epilogue=replace(last.epilogue, loads=(last.epilogue.loads[0], hidden)))
    choices = schedule(replace(program, ops=(*program.ops[:2], again)), ARCH)
    assert all(c.work.launches for c in choices)
