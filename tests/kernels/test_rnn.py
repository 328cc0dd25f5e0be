"""Recurrent layers on GPUs: the text of every cell run thread by thread, all blocks at once; code for every generation."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tccompile.arch import ARCHS, Arch
from tccompile.emit.compile import resources
from tccompile.ir.ops import Rnn
from tccompile.ir.program import Program
from tccompile.ir.reference import compute
from tccompile.ir.storage import from_storage
from tccompile.ir.types import DType
from tccompile.kernels.rnn import RNN
from tccompile.kernels.rnn_text import SIZES
from tccompile.kernels.spec import I32, Config, Kernel, Launch
from tests.gpu.cases import program_of, rnn
from tests.kernels import simulator
from tests.kernels.meanings import MEANINGS
from tests.kernels.memory import SPACE
from tests.kernels.support import cases_of
from tests.networks import relative_error
from tests.tiers import usually

ARCH = ARCHS["sm_80"]
MMA, SIMT = RNN


def numbers(launch: Launch) -> dict[str, int]:
    """The launch's numbers by name."""
    return dict(zip(SIZES, (a.value for a in launch.args if isinstance(a, I32)), strict=False))


def check(kernel: Kernel, program: Program, config: Config, grid: int | None = None, arch: Arch = ARCH) -> None:
    (op,) = program.ops
    assert kernel.supports(op, program, arch) is None
    values: dict[str, Any] = {name: recipe.values for name, recipe in program.constants.items()}  # type: ignore[union-attr]
    work = kernel.work(op, program, config, arch)
    (launch,) = work.launches
    assert launch.cooperative and launch.block <= 1024
    launch = replace(launch, grid=(grid or launch.grid[0], 1, 1))
    memory = simulator.run(replace(work, launches=(launch,)), program, values, op.y, arch)
    memory.check_written(once=False)  # all ones come before what is published
    assert not memory.buffers[-1].any(), "counters that are not zero again"
    y = program.tensors[op.y]
    whole, got = from_storage(memory.buffers[memory.base[y.name] // SPACE], y.dtype), memory.result()
    assert np.isfinite(whole).all()  # padding included
    assert relative_error(got, compute(op, program, values)) <= {DType.F16: 1e-3, DType.BF16: 8e-3, DType.F32: 1e-6}[y.dtype]


QUICK = ("rnn", "gru", "lstm_all", "rnn_fp32", "gru_before_fp32", "lstm_fp32", "lstm_bf16", "gru_wide_state", "rnn_wide_weights")


@pytest.mark.parametrize("case", usually(QUICK, *(case for case in QUICK if case != "gru_before_fp32")))
def test_right_thread_by_thread(case: str) -> None:
    program = program_of(case)
    (op,) = program.ops
    kernel = MMA if MMA.supports(op, program, ARCH) is None else SIMT
    best = min(kernel.configs(op, program, ARCH), key=lambda c: kernel.cost(op, program, c, ARCH))
    check(kernel, program, best)


@pytest.mark.parametrize("arch", ["sm_75", "sm_80"])
def test_fewer_blocks_than_parts(arch: str) -> None:
    """A GPU that runs one block at once has it take all parts, whose weights it then reads in every step."""
    program = rnn("r", "gru", 2, 2, 10, (True,), lengths=(2, 1))
    check(MMA, program, {"units": 6, "batch": 8}, grid=1, arch=ARCHS[arch])


def test_weights_that_do_not_fit() -> None:
    """Chunks beyond those that are kept are read from memory, and sequences are taken in several turns."""
    program = rnn("r", "rnn", 2, 3, 290, functions="relu")
    small = replace(ARCHS["sm_61"], smem_block=8 * 1024)
    config = {"units": 8, "batch": 4}
    (launch,) = SIMT.work(program.ops[0], program, config, small).launches
    assert numbers(launch)["kept"] == 4
    check(SIMT, program, config, grid=2, arch=small)


def test_blocks_that_wait_for_ever_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The test of the test: what nobody publishes never comes."""
    monkeypatch.setitem(MEANINGS, "ptx.exchange.publish", lambda place, dtype: lambda address, value: None)
    with pytest.raises(AssertionError, match="never comes"):
        check(SIMT, program_of("rnn_fp32"), {"units": 8, "batch": 4}, grid=2)


@pytest.mark.parametrize(
    ("arch", "case"),
    usually(
        [
            ("sm_61", "gru_before_lengths"),
            ("sm_70", "lstm_all"),
            ("sm_75", "lstm"),
            ("sm_90a", "gru_before_lengths"),
            ("sm_120", "lstm_650"),
        ],
        3,
    ),
)
def test_compiles(arch: str, case: str) -> None:
    program = program_of(case)
    (op,) = program.ops
    kernel = MMA if MMA.supports(op, program, ARCHS[arch]) is None else SIMT
    config = min(kernel.configs(op, program, ARCHS[arch]), key=lambda c: kernel.cost(op, program, c, ARCHS[arch]))
    (launch,) = kernel.work(op, program, config, ARCHS[arch]).launches
    assert resources(launch.code, ARCHS[arch]).stack == 0


@pytest.mark.parametrize("case", cases_of(Rnn))
def test_shares(case: str) -> None:
    """Every config's blocks fit the generation, its threads have a unit and a sequence each, and its parts cover all units."""
    program = program_of(case)
    (op,) = program.ops
    for arch in ARCHS.values():
        for kernel in RNN:
            if kernel.supports(op, program, arch) is not None:
                continue
            configs = list(kernel.configs(op, program, arch))
            assert configs
            for config in configs:
                shape = kernel.shape(op, program, config, arch)
                (launch,) = kernel.work(op, program, config, arch).launches
                said = numbers(launch)
                assert shape.units * shape.batch <= launch.block and launch.smem <= arch.smem_block
                assert launch.grid[0] == min(arch.sms, said["D"] * said["parts"])
                assert said["parts"] * shape.units >= said["HP"]
                assert said["turns"] * shape.batch >= said["N"]
                assert said["kept"] in (-(-said["HP"] // 32), said["kept"] // (step := shape.warps * shape.unrolled) * step)


def test_tensor_cores_take_fp16_only() -> None:
    for case, arch, reason in (
        ("lstm_bf16", "sm_80", "bfloat16"),
        ("lstm", "sm_61", "no Tensor Core"),
        ("lstm", "sm_70", "no Tensor"),
    ):
        program = program_of(case)
        assert reason in str(MMA.supports(program.ops[0], program, ARCHS[arch]))
        assert SIMT.supports(program.ops[0], program, ARCHS[arch]) is None
