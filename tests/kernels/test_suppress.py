"""The greedy part of NonMaxSuppression: values thread by thread and by their PTX, code for every generation."""

from __future__ import annotations

import numpy as np
import pytest

from tccompile.arch import ARCHS
from tccompile.emit.compile import resources
from tccompile.ir.program import Program
from tccompile.kernels import suppress as kernel
from tccompile.kernels.suppress import SuppressKernel
from tests.gpu.cases import program_of, suppress
from tests.kernels import machine
from tests.kernels.support import check
from tests.tiers import APART, thorough, usually

KERNEL = SuppressKernel()
CASES = ("suppress", "suppress_one", "suppress_all", "suppress_ties")


@pytest.mark.parametrize("case", usually(CASES, "suppress", "suppress_one"))
def test_values(case: str) -> None:
    check(KERNEL, program_of(case), once=False)


def rows(kept: str) -> Program:
    """270 squares of a class: side by side, all of which are kept; in one place; 40 each half over the one before, of which every
    second one is kept, and others; or some whose scores are too low."""
    at = np.arange(270.0)
    left = {"all": at, "first": at * 0, "chain": np.where(at < 40, at / 2, at), "none": at}[kept]
    program = suppress(kept, 1, 1, 270, most=265, iou=0.3, least=0.5)
    boxes = np.stack([left, at * 0, left + 1, at * 0 + 1], 1)
    for name, values in {"boxes": boxes, "order": at, "scores": np.where(kept == "none", at * 0, 1)}.items():
        program.constants[name].values[...] = values  # type: ignore[union-attr]
    return program


@thorough
@pytest.mark.parametrize("kept", ["all", "first", "chain", "none"])
def test_rounds(kept: str) -> None:
    """What earlier rounds have kept covers boxes of later ones; all are done where enough are kept, or scores are too low."""
    check(KERNEL, rows(kept), {"round": 256}, once=False)


@thorough
@pytest.mark.parametrize(("case", "boxes"), [("suppress", 1024), ("suppress_ties", 256)])
def test_values_of_code(case: str, boxes: int) -> None:
    check(KERNEL, program_of(case), {"round": boxes}, once=False, arch=ARCHS["sm_90a"], run=machine.run)


def test_rounds_are_no_larger_than_there_is_room_for() -> None:
    few, many = suppress("few", 1, 1, 9000), suppress("many", 1, 300, 9000)
    assert [c["round"] for c in KERNEL.configs(few.ops[0], few, ARCHS["sm_80"])] == list(kernel.ROUNDS)
    assert [c["round"] for c in KERNEL.configs(many.ops[0], many, ARCHS["sm_80"])] == [kernel.ROUNDS[0]]


@thorough
@pytest.mark.parametrize("arch", APART)
def test_compiles(arch: str) -> None:
    program = program_of("suppress_classes")
    for launch in KERNEL.work(program.ops[0], program, {"round": kernel.ROUNDS[0]}, ARCHS[arch]).launches:
        if launch.code.kernel == KERNEL.name:
            assert resources(launch.code, ARCHS[arch]).stack == 0
