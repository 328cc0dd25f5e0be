"""First layers on Hopper: values by the machine code's PTX, windows and copies, where the kernel applies, registers."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tccompile.arch import ARCHS
from tccompile.emit.compile import resources
from tccompile.ir.expr import call, cast
from tccompile.ir.reference import compute
from tccompile.ir.tensor import dense
from tccompile.ir.types import DType
from tccompile.kernels.conv_stem import ConvStem, Stem
from tccompile.schedule.choose import candidates
from tests.gpu.cases import conv
from tests.kernels import machine
from tests.kernels.support import check
from tests.networks import relative_error
from tests.tiers import thorough, usually

KERNEL = ConvStem()
ARCH = ARCHS["sm_90a"]


def on(blocks: int):
    """Run a launch on so many blocks, which then have several tiles each."""

    def run(work, *args):
        (launch,) = work.launches
        assert launch.grid[0] > blocks
        return machine.run(replace(work, launches=(replace(launch, grid=(blocks, 1, 1)),)), *args)

    return run


@pytest.mark.parametrize(
    ("program", "columns", "groups", "blocks"),
    usually(
        [
            (conv("7x7, stride 2, fp32 planes", (2, 3, 37, 35), 24, (7, 7), stride=2, ep="bias relu", source="planes"), 32, 1, 3),
            (conv("7x7, stride 2", (1, 3, 67, 35), 40, (7, 7), stride=2, ep="bias relu"), 64, 2, 2),
            (conv("3x3, fp16 planes", (1, 3, 19, 36), 16, (3, 3), ep="bias silu", source="plain"), 16, 1, 4),
            (conv("3x3 in two parts", (2, 4, 21, 18), 48, (3, 3), ep="bias"), 32, 2, 4),
            (conv("9x9, no padding", (1, 1, 30, 41), 20, (9, 9), pad=0, ep="", source="planes"), 32, 1, 2),
            (conv("5x2 of two channels", (1, 2, 20, 33), 8, (5, 2), stride=2, pad=1, ep="bias tanh"), 16, 2, 1),
            (conv("a slice", (1, 3, 18, 33), 24, (3, 4), ep="bias relu", to="slice"), 32, 1, 4),
            (conv("two columns", (3, 3, 9, 3), 8, (2, 2), pad=0, source="planes"), 16, 1, 2),
        ],
        0,
    ),
    ids=lambda v: v.ops[0].nodes[0] if hasattr(v, "ops") else None,
)
def test_values(program, columns: int, groups: int, blocks: int) -> None:
    check(KERNEL, program, {"columns": columns, "warpgroups": groups}, arch=ARCH, run=on(blocks))


@pytest.mark.parametrize(("y", "columns", "stride"), usually([(DType.U8, 64, 2), (DType.I8, 32, 1), (DType.I8, 16, 2)], 2))
def test_results_in_bytes(y: DType, columns: int, stride: int) -> None:
    """Rounded, moved by a zero point and saturated, as a quantized network's first layer stores them; none is off by a step."""
    program = conv("bytes", (1, 3, 35, 37), 40, (3, 3), stride=stride, ep="bias")
    op, low = program.ops[0], float(y.lowest)
    steps = call("add", call("round", call("mul", op.epilogue.expr, 31.0)), low + 120.0)
    rounded = cast(call("saturate", steps, low, float(y.largest)), DType.I64)
    stored = dense("y", program.tensors["y"].shape, y, (0, 2, 3, 1), 16)
    program = replace(
        program, tensors={**program.tensors, "y": stored}, ops=(replace(op, epilogue=replace(op.epilogue, expr=rounded)),)
    )
    values = {name: np.array(recipe.values) for name, recipe in program.constants.items()}
    memory = on(-(-stored.padded[1] // columns))(
        KERNEL.work(program.ops[0], program, {"columns": columns, "warpgroups": 1}, ARCH), program, values, "y", ARCH
    )
    memory.check_written(True)
    off = memory.result().astype(int) - compute(program.ops[0], program, values)
    assert abs(off).max() <= 1 and (off == 0).mean() > 0.999


@thorough
def test_all_blocks_have_work() -> None:
    program = conv("many blocks", (1, 3, 20, 34), 40, (3, 3), stride=2, ep="bias relu", source="planes")
    check(KERNEL, program, arch=ARCH, run=machine.run)


@pytest.mark.parametrize("constant", usually([True, False], 1))
def test_computed_weights_come_after_the_launches_before(constant: bool) -> None:
    """What is no constant is read behind griddepcontrol.wait."""
    program = conv("weights", (1, 3, 9, 12), 24, (3, 3), ep="bias relu")
    values = {name: np.array(recipe.values) for name, recipe in program.constants.items()}
    expected = compute(program.ops[0], program, values)
    if not constant:
        program = replace(program, constants={name: recipe for name, recipe in program.constants.items() if name != "w"})
    work = KERNEL.work(program.ops[0], program, {"columns": 32, "warpgroups": 1}, ARCH)
    assert relative_error(machine.run(work, program, values, "y", ARCH).result(), expected) <= 5e-4
    text = machine.ptx_of(work.launches[0].code, ARCH)
    assert (text.index("griddepcontrol.wait") > text.index("ld.global.v2.b32")) == constant


def test_rows_of_the_filter_are_read_as_they_lie() -> None:
    """7 taps fill two wgmmas, of 4 taps each, whose weights follow each other; windows are 2 pixels of 8 bytes apart."""
    stem = Stem((7, 7), (2, 2), 3, False, 64, 2)
    assert (stem.phases, stem.across, stem.width, stem.height) == (1, 8, 38, 37)
    assert stem.steps[:3] == ((0, 0), (32, 2048), (stem.pitch, 4096)) and len(stem.steps) == 14
    assert stem.pitch == 8 * 38 and stem.weights == 7 * 8 * 8 * 64


def test_with_a_stride_of_1_every_other_window_has_a_copy() -> None:
    stem = Stem((3, 3), (1, 1), 3, True, 32, 1)
    assert (stem.phases, stem.width, stem.pitch) == (2, 19, 8 * 20)
    assert stem.patch == 2 * stem.copy == 2 * 10 * 8 * 20


@pytest.mark.parametrize(
    ("program", "reason"),
    [
        (conv("stride 3", (1, 3, 19, 19), 16, (3, 3), stride=3), "a stride of 1 or 2 along rows"),
        (conv("dilated", (1, 3, 19, 19), 16, (3, 3), dilation=2), "without dilations"),
        (conv("groups", (1, 4, 9, 9), 16, (3, 3), groups=2), "without dilations and groups"),
        (conv("a line", (1, 3, 9), 16, (3,)), "it takes images"),
        (conv("many channels", (1, 5, 9, 9), 16, (3, 3)), "5 input channels; it takes up to 4"),
        (conv("fp32", (1, 3, 9, 9), 16, (3, 3), dtype=DType.F32), "Tensor Cores are fed with float16"),
        (conv("to fp32", (1, 3, 9, 9), 16, (3, 3), to="fp32"), "the copy engine stores float16"),
        (conv("output", (1, 3, 9, 9), 16, (3, 3), to="output"), "model input or output"),
        (conv("shuffle", (1, 3, 9, 9), 36, (3, 3), ep="shuffle3"), "aligned vectors of 8"),
        (conv("residual", (1, 3, 9, 9), 16, (3, 3), ep="residual"), "reads a tensor for each pixel"),
        (conv("one column", (1, 3, 9, 1), 16, (3, 1)), "has one column"),
        (conv("large", (1, 3, 300, 300), 16, (100, 100), pad=0), "do not fit"),
        (conv("tokens", (2, 3, 9, 7), 40, (3, 3), to="tokens"), "do not lie at one stride"),
    ],
    ids=lambda v: v.ops[0].nodes[0] if hasattr(v, "ops") else None,
)
def test_says_why_not(program, reason: str) -> None:
    assert reason in str(KERNEL.supports(program.ops[0], program, ARCH))


def test_needs_wgmma() -> None:
    program = conv("3x3", (1, 3, 9, 9), 16, (3, 3))
    assert [n for n, arch in ARCHS.items() if KERNEL.supports(program.ops[0], program, arch) is None] == ["sm_90a"]


@pytest.mark.parametrize("x", [(1, 3, 224, 224), (32, 3, 224, 224)])
@pytest.mark.parametrize("source", ["own", "planes"])
def test_first_layers_are_left_to_it(x, source: str) -> None:
    program = conv("first layer", x, 64, (7, 7), stride=2, ep="bias relu", source=source)
    assert candidates(program.ops[0], program, ARCH)[0].kernel.name == "conv_stem"


@pytest.mark.parametrize(
    ("window", "stride", "columns", "groups", "source"),
    usually([(7, 2, 64, 1, "planes"), (7, 2, 32, 2, "own"), (3, 1, 64, 2, "planes"), (9, 1, 32, 2, "own")]),
)
def test_does_not_spill(window: int, stride: int, columns: int, groups: int, source: str) -> None:
    program = conv("stem", (1, 3, 100, 100), 64, (window, window), stride=stride, ep="bias relu", source=source)
    (launch,) = KERNEL.work(program.ops[0], program, {"columns": columns, "warpgroups": groups}, ARCH).launches
    assert resources(launch.code, ARCH).stack == 0
