"""Attention in E4M3: values by the kernels' PTX, v as it lies turned, what is refused, code.

Weights are powers of two in these cases, which E4M3 holds, so that results are as exact as sums are.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tccompile.arch import ARCHS
from tccompile.emit.compile import resources
from tccompile.ir.ops import Attention
from tccompile.ir.program import Program
from tccompile.ir.reference import compute
from tccompile.ir.types import DType
from tccompile.kernels import attention_sm90_tile
from tccompile.kernels.attention import AttentionKernel
from tccompile.kernels.attention_mma import AttentionMma
from tccompile.kernels.attention_sm90 import AttentionSm90
from tccompile.kernels.attention_turn import LINE, ORDER, columns
from tccompile.kernels.spec import Config, Kernel, Work
from tests.bench.layers import AttentionLayer
from tests.gpu.cases import LOWEST, attention, program_of
from tests.kernels import machine
from tests.kernels.support import check
from tests.networks import relative_error
from tests.tiers import thorough, usually

MMA, SM90 = AttentionMma(), AttentionSm90()

SUMS = 1e-3
"""What Tensor Cores' sums of E4M3 may be off by."""

KEPT = 5e-3
"""The same with sums that are kept in bf16 meanwhile."""


def eight(*shape: Any, **more: Any) -> Program:
    """Attention of operands in E4M3, with results in halves."""
    return attention("a", *shape, dtype=DType.E4M3, stored=DType.F16, **more)


def tile(warpgroups: int, bn: int) -> Config:
    return {"warpgroups": warpgroups, "bn": bn, "persistent": False}


def off(kernel: Kernel, program: Program, config: Config, arch: str) -> float:
    """The error of what a kernel's PTX computes."""
    (op,) = program.ops
    assert kernel.supports(op, program, ARCHS[arch]) is None
    values = {name: recipe.values for name, recipe in program.constants.items()}  # type: ignore[union-attr]
    memory = machine.run(kernel.work(op, program, config, ARCHS[arch]), program, values, op.y, ARCHS[arch])
    memory.check_written(True)
    return relative_error(memory.result(), compute(op, program, values))


RUN: list[tuple[Any, ...]] = [
    (SM90, "sm_90a", tile(1, 64), eight((1, 2, 70, 32), 100)),
    (SM90, "sm_90a", tile(2, 64), eight((2, 2, 70, 40), 200, share=2, causal=-9)),
    (SM90, "sm_90a", tile(1, 64), eight((2, 2, 65, 32), 199, mask=(2, 1, 1, 199), hidden=LOWEST, unseen=True)),
    (MMA, "sm_80", {"bn": 64, "splits": 1}, eight((1, 4, 16, 40), 130, share=2, causal=115)),
    (MMA, "sm_75", {"bn": 32, "splits": 1}, eight((2, 1, 17, 16), 70, mask=(2, 1, 1, 70), unseen=True)),
]


@pytest.mark.parametrize(("kernel", "arch", "config", "program"), usually(RUN, 0))
def test_compiled_code_computes(kernel: Kernel, arch: str, config: Config, program: Program) -> None:
    assert off(kernel, program, config, arch) < SUMS


def test_every_generation_has_a_kernel() -> None:
    check(AttentionKernel(), eight((1, 2, 3, 16), 5, share=2, e=9))


@thorough
def test_sums_of_many_rows_are_kept_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is kept meanwhile lies where results are staged afterwards, which two blocks of rows show."""
    monkeypatch.setattr(attention_sm90_tile, "ROUGH", 128)
    monkeypatch.setattr(machine, "ptx_of", machine.compiled)
    assert off(SM90, eight((1, 1, 70, 48), 460, e=16), tile(1, 64), "sm_90a") < KEPT


def test_v_lies_turned() -> None:
    program = eight((2, 2, 3, 16), 70, share=2, e=20)
    (op,) = program.ops
    work = SM90.work(op, program, tile(1, 64), ARCHS["sm_90a"])
    values = {name: recipe.values for name, recipe in program.constants.items()}  # type: ignore[union-attr]
    memory = machine.run(Work(work.launches[:1], work.scratch), program, values, op.y, ARCHS["sm_90a"])
    found = memory.buffers[memory.own].reshape(2, 128 // LINE, columns(24), LINE)
    v = program.tensors["v"]
    stored = memory.buffers[memory.base["v"] // machine.SPACE]
    rows = np.zeros((2, 128, 24), np.uint8)
    rows[:, :70, :20] = np.lib.stride_tricks.as_strided(stored, (2, 70, 20), (v.strides[0], v.strides[2], v.strides[3]))
    lines = rows.reshape(2, -1, LINE, 24)[:, :, ORDER]
    assert (found[:, :, :24] == lines.swapaxes(2, 3)).all()
    assert (found[:, :, 24] == 0x38).all() and not found[:, :, 25:].any()  # ones, for the sums of weights


def test_says_why_not() -> None:
    arch, program = ARCHS["sm_90a"], eight((1, 2, 40, 64), 40)
    (op,) = program.ops
    assert SM90.supports(op, program, arch) is None and MMA.supports(op, program, ARCHS["sm_75"]) is None
    mixed = replace(program, tensors={n: replace(t, dtype=DType.F16) if n == "q" else t for n, t in program.tensors.items()})
    assert "not all of one type" in str(SM90.supports(op, mixed, arch)) and MMA.supports(op, mixed, arch) is None
    odd = replace(program, tensors={n: replace(t, offset=t.offset + 8 * (n == "k")) for n, t in program.tensors.items()})
    assert "rows of k do not begin at multiples of 16 bytes" in str(SM90.supports(op, odd, arch))


@pytest.mark.parametrize("d", [64, 128, 256])
def test_many_rows_take_less_time_than_in_halves(d: int) -> None:
    arch = ARCHS["sm_90a"]
    ((op, program),) = AttentionLayer(2, 16, 4096, d).parts()
    eights = {n: replace(t, dtype=t.dtype if n == "y" else DType.E4M3) for n, t in program.tensors.items()}
    halves, bytes_ = (
        min(SM90.cost(op, p, config, arch) for config in SM90.configs(op, p, arch))
        for p in (program, replace(program, tensors=eights))
    )
    assert 1.1 < halves / bytes_ < 2


@thorough
@pytest.mark.parametrize(("case", "config"), [("fp8_attention_long", tile(2, 192)), ("fp8_attention_bool", tile(3, 64))])
def test_compiles(case: str, config: Config) -> None:
    program = program_of(case)
    (op,) = program.ops
    assert isinstance(op, Attention)
    for launch in SM90.work(op, program, config, ARCHS["sm_90a"]).launches:
        assert resources(launch.code, ARCHS["sm_90a"]).stack == 0
