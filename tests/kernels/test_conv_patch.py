"""Convolutions of few channels: values thread by thread, where the kernel applies, code for every generation."""

from __future__ import annotations

import numpy as np
import pytest

from tccompile.arch import ARCHS
from tccompile.emit.compile import resources
from tccompile.ir.types import DType
from tccompile.kernels.conv_patch import ConvPatch, Patch
from tccompile.schedule.choose import choose
from tests.gpu.cases import conv, of_8_bits, of_float8
from tests.kernels import machine, simulator
from tests.kernels.support import ARCH, check
from tests.tiers import usually

KERNEL = ConvPatch()
I8, U8, E4M3, E5M2 = DType.I8, DType.U8, DType.E4M3, DType.E5M2


@pytest.mark.parametrize(
    "program, rows, columns",
    usually(
        [
            (conv("7x7, stride 2", (1, 3, 21, 37), 33, (7, 7), stride=2), 4, 16),
            (conv("3x3 of a model's input", (2, 3, 9, 21), 20, (3, 3), source="plain"), 4, 16),
            (conv("one channel", (1, 1, 7, 19), 9, (5, 5), ep="bias relu"), 4, 16),
            (conv("two channels", (1, 2, 9, 20), 40, (3, 4), dilation=2), 4, 16),
            (conv("four channels", (1, 4, 8, 36), 5, (3, 3), ep="bias residual"), 4, 32),
            (conv("few outputs", (1, 32, 7, 20), 9, (3, 3), ep="shuffle3"), 4, 16),
            (conv("few outputs to a model's", (1, 16, 6, 18), 3, (3, 3), to="output"), 4, 16),
            (conv("8 channels", (1, 8, 6, 18), 12, (3, 3), stride=2), 4, 16),
            (conv("12 channels", (1, 12, 6, 18), 17, (3, 5)), 4, 16),
            (conv("a line", (2, 1, 40), 70, (9,), stride=3), 4, 16),
        ],
        0,
        3,
        5,
        7,
    ),
    ids=lambda v: v.ops[0].nodes[0] if hasattr(v, "ops") else None,
)
def test_values(program, rows: int, columns: int) -> None:
    check(KERNEL, program, {"rows": rows, "columns": columns})


@pytest.mark.parametrize("arch", usually(["sm_75", "sm_80"], "sm_80"))
def test_values_by_machine_code(arch: str) -> None:
    """mma.m16n8k8 and m16n8k16, steps that begin in different taps and rows of whole ones"""
    for program in (
        conv("planes", (1, 3, 12, 20), 20, (5, 5), stride=2, source="planes"),
        conv("few outputs", (1, 32, 6, 18), 9, (3, 3)),
    ):
        check(KERNEL, program, {"rows": 4, "columns": 16}, arch=ARCHS[arch], run=machine.run)


OF_8_BITS = {
    "pixels": (of_8_bits, (2, 32, 5, 20), 3, (1, 1), {"kinds": (U8, I8, U8)}),
    "two quads": (of_8_bits, (1, 16, 6, 18), 12, (3, 3), {"kinds": (I8, I8, I8)}),
    "six quads, to halves": (of_8_bits, (1, 40, 9, 21), 24, (3, 3), {"kinds": (U8, I8, DType.F16), "stride": 2}),
    "sums beyond 2^24": (of_8_bits, (1, 32, 10, 18), 3, (9, 9), {"kinds": (U8, I8, DType.I32), "extreme": True}),
    "a residual": (of_8_bits, (1, 48, 5, 20), 20, (1, 3), {"kinds": (U8, I8, U8), "residual": U8}),
    "few inputs": (of_8_bits, (1, 16, 5, 20), 70, (1, 1), {"kinds": (U8, I8, U8)}),
    "floats": (of_float8, (1, 20, 6, 18), 12, (3, 3), {"kinds": (E4M3, E5M2, DType.F16), "fn": "relu"}),
    "floats to a model's output": (of_float8, (1, 64, 6, 18), 30, (1, 3), {"kinds": (E5M2, E4M3, DType.F32), "to": "output"}),
}


@pytest.mark.parametrize("case", usually(OF_8_BITS, "pixels", "two quads", "floats"))
def test_8_bits(case: str) -> None:
    make, x, n, window, how = OF_8_BITS[case]
    check(KERNEL, make(case, x, n, window, **how), {"rows": 4, "columns": 16})


EACH = [
    (case, arch)
    for case in OF_8_BITS
    for arch in ("sm_75", "sm_80", "sm_90a")
    if arch != "sm_75" or case.startswith("floats")  # which has an instruction of 8 rows for integers
]


@pytest.mark.parametrize(("case", "arch"), usually(EACH, EACH.index(("two quads", "sm_90a"))))
def test_8_bits_by_machine_code(case: str, arch: str) -> None:
    make, x, n, window, how = OF_8_BITS[case]
    check(KERNEL, make(case, x, n, window, **how), {"rows": 4, "columns": 16}, arch=ARCHS[arch], run=machine.run)


def test_what_lies_beyond_the_filter_need_not_be_finite() -> None:
    """The last step of K has places for more taps than there are: of an infinite pixel, only its neighbours are infinite."""
    program = conv("an infinite pixel", (1, 3, 9, 40), 8, (3, 3), ep="")
    values = {name: np.array(recipe.values) for name, recipe in program.constants.items()}
    values["x"][0, 0, 4, 20] = np.inf
    work = KERNEL.work(program.ops[0], program, {"rows": 4, "columns": 16}, ARCH)
    result = simulator.run(work, program, values, "y", ARCH).result()
    finite = np.isfinite(result).all(axis=(0, 1))
    assert not finite[3:6, 19:22].any() and finite.sum() == finite.size - 9


@pytest.mark.parametrize(
    "program, reason",
    [
        (conv("many", (1, 8, 9, 9), 40, (3, 3)), "8 input and 40 output channels; it takes up to 4 inputs or 32 outputs"),
        (conv("groups", (1, 8, 9, 9), 8, (3, 3), groups=2), "it has 2 groups"),
        (conv("fp32", (1, 3, 9, 9), 8, (3, 3), dtype=DType.F32), "Tensor Cores are fed with float16"),
        (conv("rows of channels", (1, 8, 9, 9), 8, (3, 3), source="plain"), "do not lie in aligned vectors of 8"),
        (conv("large", (1, 512, 30, 30), 32, (5, 5)), "do not fit"),
        (of_8_bits("bytes", (1, 40, 9, 9), 40, (3, 3)), "40 input and 40 output channels; it takes up to 32 inputs"),
    ],
    ids=lambda v: v.ops[0].nodes[0] if hasattr(v, "ops") else None,
)
def test_says_why_not(program, reason: str) -> None:
    assert reason in KERNEL.supports(program.ops[0], program, ARCH)


def test_needs_an_instruction_of_16_rows() -> None:
    program = conv("first", (1, 3, 9, 9), 8, (3, 3))
    takes = [name for name, arch in ARCHS.items() if KERNEL.supports(program.ops[0], program, arch) is None]
    assert takes == ["sm_75", "sm_80", "sm_86", "sm_89", "sm_90a", "sm_100", "sm_120"]


@pytest.mark.parametrize("name", ["7x7, stride 2", "3x3, stride 2", "9x9"])
def test_first_layers_are_left_to_it(name: str) -> None:
    taps, stride = int(name[0]), 2 if "stride" in name else 1
    program = conv(name, (32, 3, 224, 224), 64, (taps, taps), stride=stride, ep="bias relu")
    assert choose(program.ops[0], program, ARCHS["sm_80"]).kernel.name == "conv_patch"


def test_quads_of_a_pixel_do_not_share_banks() -> None:
    """Four neighbouring pixels' quads of a step, 32 bytes each, lie in different banks, whatever their channels."""
    for channels in range(16, 200, 16):
        patch = Patch((3, 3), (1, 1), (1, 1), channels, True, 32, 4, 1)
        assert len({(pixel * patch.pixel + 8 * lane) // 4 % 32 for pixel in range(4) for lane in range(4)}) == 16


@pytest.mark.parametrize("arch", usually(["sm_75", "sm_80", "sm_90a", "sm_120"]))
def test_compiles(arch: str) -> None:
    """The most registers: steps that begin in different taps and many columns; and rows of whole steps"""
    for program in (conv("few inputs", (4, 3, 224, 224), 64, (7, 7), stride=2), conv("few outputs", (1, 32, 99, 99), 27, (3, 3))):
        *_, config = KERNEL.configs(program.ops[0], program, ARCHS[arch])
        (launch,) = KERNEL.work(program.ops[0], program, config, ARCHS[arch]).launches
        assert resources(launch.code, ARCHS[arch]).stack == 0
