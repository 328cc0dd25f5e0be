"""Products of bytes whose sums come as close to 2^24 as they may: every kernel's code must make the very integers."""

from __future__ import annotations

import pytest

from tccompile.arch import ARCHS, Arch
from tccompile.ir.program import Program
from tccompile.kernels import KERNELS
from tccompile.kernels.gemm_mma import GemmMma
from tccompile.kernels.spec import Config, Kernel
from tests.gpu.cases import program_of
from tests.kernels import machine
from tests.kernels.support import check


def configs(kernel: Kernel, program: Program, arch: Arch) -> tuple[Config, Config]:
    """A kernel's cheapest config, and the one whose sums are taken in the most parts."""
    assert kernel.supports(program.ops[0], program, arch) is None
    found = list(kernel.configs(program.ops[0], program, arch))
    return found[0], max(found, key=lambda c: c.get("splits", c.get("split", 1)))


@pytest.mark.parametrize(
    ("kernel", "case"),
    [
        ("gemv", "bytes_gemm_1_row"),
        ("gemv_mma", "bytes_gemm_1_row"),
        ("conv_patch", "bytes_conv_1x1"),
        ("reduce", "sum_int32"),
    ],
)
def test_generated_text(kernel: str, case: str) -> None:
    (found,) = [k for k in KERNELS if k.name == kernel]
    program, arch = program_of(case), ARCHS["sm_80"]
    for config in configs(found, program, arch):
        check(found, program, config, once=False, arch=arch)


def test_machine_code() -> None:
    program, arch = program_of("bytes_gemm_1_row"), ARCHS["sm_75"]
    kernel = GemmMma()
    _, config = configs(kernel, program, arch)
    check(kernel, program, config, once=False, arch=arch, run=machine.run)
