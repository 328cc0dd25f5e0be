"""Convolutions from patches: values by the machine code's PTX, tiles and rings, where the kernel applies, registers."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tccompile.arch import ARCHS, KIB
from tccompile.emit.compile import resources
from tccompile.ir.reference import compute
from tccompile.ir.types import DType
from tccompile.kernels import conv_halo
from tccompile.kernels.conv_halo import ConvHalo, is_boxed, patch_of, steps
from tccompile.kernels.parts.staging import Staging
from tccompile.schedule.choose import candidates
from tests.gpu.cases import conv
from tests.kernels import machine
from tests.kernels.support import check
from tests.networks import relative_error
from tests.tiers import usually

KERNEL = ConvHalo()
ARCH = ARCHS["sm_90a"]


def on(blocks: int):
    """Run a launch on so many blocks, which then have several tiles each."""

    def run(work, *args):
        (launch,) = work.launches
        assert launch.grid[0] >= blocks
        return machine.run(replace(work, launches=(replace(launch, grid=(blocks, 1, 1)),)), *args)

    return run


@pytest.mark.parametrize(
    ("program", "across", "down", "columns", "blocks"),
    usually(
        [
            (conv("partial tiles", (1, 24, 20, 19), 20, (3, 3), ep="bias relu"), 8, 8, 32, 2),
            (conv("three boxes of channels", (1, 136, 12, 9), 16, (3, 3), ep="bias relu"), 8, 8, 16, 1),
            (conv("several columns of blocks", (2, 64, 9, 17), 72, (3, 3), ep="bias"), 16, 8, 32, 6),
            (conv("5x5", (1, 40, 17, 21), 24, (5, 5), ep="bias silu"), 8, 16, 16, 2),
            (conv("9x1, no padding", (1, 16, 25, 9), 12, (9, 1), pad=0), 8, 8, 16, 1),
            (conv("1x4 of 19 channels", (2, 19, 9, 20), 8, (1, 4)), 8, 8, 16, 2),
            (conv("four products a warpgroup", (1, 64, 17, 33), 32, (3, 3), ep="bias relu"), 16, 16, 32, 2),
            (conv("a residual", (2, 72, 17, 17), 40, (3, 3), ep="bias residual"), 16, 8, 32, 4),
            (conv("a residual of 100 channels", (1, 16, 10, 9), 100, (2, 2), ep="bias residual"), 8, 8, 64, 2),
            (conv("slices", (2, 24, 11, 12), 24, (3, 3), ep="bias relu", source="slice", to="slice"), 8, 8, 32, 2),
            (conv("three channels of an output", (2, 72, 19, 21), 3, (3, 3), ep="bias tanh", to="output"), 8, 8, 8, 3),
            (conv("one channel of an output", (3, 16, 9, 7), 1, (5, 5), ep="", to="output"), 8, 16, 8, 2),
            (conv("nine channels, shuffled", (1, 32, 17, 18), 9, (3, 3), ep="bias shuffle3", to="output"), 8, 8, 16, 2),
            (conv("shuffled in two shares", (1, 32, 9, 11), 12, (3, 3), ep="bias shuffle", to="output"), 16, 16, 8, 2),
            (conv("an output of 40 channels", (1, 24, 17, 10), 40, (2, 2), ep="bias residual", to="output"), 8, 8, 32, 2),
            (conv("float32 and its padding", (1, 40, 12, 9), 19, (3, 3), ep="bias relu", to="fp32"), 16, 8, 16, 2),
            (conv("float32 with a residual", (2, 16, 9, 10), 20, (1, 7), ep="bias residual", to="fp32"), 8, 8, 32, 2),
            (conv("two residuals", (1, 64, 10, 17), 24, (3, 3), ep="residual residual bias"), 16, 16, 16, 2),
            (conv("odd slices", (1, 72, 9, 10), 5, (3, 3), ep="bias relu", to="odd"), 8, 8, 8, 2),
            (conv("shuffled with padding", (1, 16, 9, 10), 36, (3, 3), ep="bias shuffle3"), 8, 8, 64, 1),
            (conv("bf16", (2, 24, 9, 17), 40, (3, 3), ep="bias residual", dtype=DType.BF16), 16, 8, 32, 2),
            (conv("rows of tokens", (2, 24, 9, 7), 40, (3, 3), ep="bias residual", to="tokens"), 8, 8, 16, 3),
        ],
        0,
        20,
    ),
    ids=lambda v: v.ops[0].nodes[0] if hasattr(v, "ops") else None,
)
def test_values(program, across: int, down: int, columns: int, blocks: int) -> None:
    config = {"across": across, "down": down, "columns": columns}
    check(KERNEL, program, config, arch=ARCH, run=on(blocks))


@pytest.mark.parametrize(
    ("program", "across", "down", "blocks"),
    usually(
        [
            (conv("three channels of an output", (2, 72, 19, 21), 3, (3, 3), ep="bias tanh", to="output"), 16, 8, 3),
            (conv("one channel, three boxes", (3, 130, 19, 10), 1, (1, 3), ep="", to="output"), 16, 16, 1),
            (conv("shuffled", (1, 72, 17, 18), 4, (3, 3), ep="bias shuffle", to="output"), 8, 16, 2),
            (conv("odd slices", (2, 24, 25, 34), 5, (2, 2), ep="bias residual relu", to="odd"), 16, 8, 4),
        ],
        2,
    ),
    ids=lambda v: v.ops[0].nodes[0] if hasattr(v, "ops") else None,
)
def test_values_of_taps_that_are_columns(program, across: int, down: int, blocks: int) -> None:
    config = {"across": across, "down": down, "columns": program.op_shape(program.ops[0])[1], "spread": True}
    assert config in list(KERNEL.configs(program.ops[0], program, ARCH))
    check(KERNEL, program, config, arch=ARCH, run=on(blocks))


def test_parts_of_both_warpgroups_in_one_place_are_a_race(monkeypatch: pytest.MonkeyPatch) -> None:
    """The test of the test: a warpgroup whose place for parts is as large as a warp's writes into the other's."""
    warps = 4
    monkeypatch.setattr(conv_halo, "Staging", lambda at, each, *rest: Staging(at, each // warps, *rest))
    monkeypatch.setattr(machine, "ptx_of", machine.compiled)
    program = conv("parts", (2, 16, 17, 10), 1, (5, 5), ep="", to="output")
    with pytest.raises(AssertionError, match=r"a race: st\.shared.* what warp . has written"):
        check(KERNEL, program, {"across": 8, "down": 16, "columns": 1, "spread": True}, arch=ARCH, run=on(2))


def test_all_blocks_have_work() -> None:
    check(KERNEL, conv("many blocks", (1, 16, 17, 25), 16, (3, 3)), {"across": 8, "down": 8, "columns": 16}, arch=ARCH,
          run=machine.run)  # fmt: skip


def test_no_multiprocessor_has_room_for_two_blocks() -> None:
    """Of a launch that starts early one would take two, where a block of the launch before has ended, and another one none."""
    program = conv("few channels", (1, 16, 17, 25), 16, (3, 3))
    for config in KERNEL.configs(program.ops[0], program, ARCH):
        (launch,) = KERNEL.work(program.ops[0], program, config, ARCH).launches
        assert ARCH.smem_sm < 2 * (launch.smem + KIB) and launch.smem <= ARCH.smem_block


def test_computed_weights_come_after_the_launches_before() -> None:
    """What is no constant is read behind griddepcontrol.wait."""
    program = conv("computed weights", (1, 24, 9, 12), 24, (3, 3), ep="bias relu")
    values = {name: np.array(recipe.values) for name, recipe in program.constants.items()}
    expected = compute(program.ops[0], program, values)
    computed = replace(program, constants={name: recipe for name, recipe in program.constants.items() if name != "w"})
    work = KERNEL.work(computed.ops[0], computed, {"across": 8, "down": 8, "columns": 32}, ARCH)
    assert relative_error(machine.run(work, program, values, "y", ARCH).result(), expected) <= 5e-4
    text = machine.ptx_of(work.launches[0].code, ARCH)
    assert text.index("griddepcontrol.wait") < text.index("cp.async.bulk.tensor.3d")


def test_taps_begin_at_their_pixels() -> None:
    """Of the box's rows of 10 pixels, 128 bytes each; weights lie tap by tap"""
    program = conv("patch", (1, 64, 16, 16), 32, (3, 3))
    patch = patch_of(program.ops[0], program, {"across": 8, "down": 8, "columns": 32})
    places = steps(patch, 2)
    assert places[:4] == ((0, 0), (32, 32), (128, 4096), (160, 4128))
    assert places[6] == (1280, 3 * 4096) and len(places) == 18


@pytest.mark.parametrize(
    ("program", "reason"),
    [
        (conv("stride", (1, 16, 9, 9), 16, (3, 3), stride=2), "without strides"),
        (conv("groups", (1, 16, 9, 9), 16, (3, 3), groups=2), "without strides, dilations and groups"),
        (conv("1x1", (1, 16, 9, 9), 16, (1, 1)), "several taps"),
        (conv("a line", (1, 16, 9), 16, (3,)), "it takes images"),
        (conv("fp32", (1, 16, 9, 9), 16, (3, 3), dtype=DType.F32), "Tensor Cores are fed with float16"),
        (replace(conv("input", (1, 16, 9, 9), 16, (3, 3)), inputs=("x",)), "model input or output"),
        (conv("large", (1, 192, 30, 30), 32, (7, 7)), "the weights of 16 output channels and two boxes do not fit"),
        (conv("large, output", (1, 192, 30, 30), 3, (9, 9), to="output"), "the weights of 8 output channels"),
        (conv("few channels", (1, 8, 9, 9), 16, (3, 3)), "8 input channels; it takes 16 to 192"),
        (conv("many channels", (1, 256, 9, 9), 16, (3, 3)), "256 input channels; it takes 16 to 192"),
    ],
    ids=lambda v: v.ops[0].nodes[0] if hasattr(v, "ops") else None,
)
def test_says_why_not(program, reason: str) -> None:
    assert reason in str(KERNEL.supports(program.ops[0], program, ARCH))


@pytest.mark.parametrize(
    ("program", "boxed", "columns"),
    [
        (conv("boxes", (1, 16, 20, 20), 3, (3, 3)), True, {16}),
        (conv("residual", (1, 16, 20, 20), 24, (3, 3), ep="bias residual"), True, {16, 32}),
        (conv("residuals", (1, 16, 20, 20), 24, (3, 3), ep="residual residual"), False, {8, 16, 32}),
        (conv("fp32", (1, 16, 20, 20), 24, (3, 3), to="fp32"), False, {8, 16, 32}),
        (conv("output", (1, 16, 20, 20), 3, (3, 3), to="output"), False, {8}),
        (conv("shuffle", (1, 16, 20, 20), 9, (3, 3), ep="shuffle3"), False, {8, 16}),
        (conv("odd", (1, 16, 20, 20), 16, (3, 3), to="odd"), False, {8, 16}),
        (conv("tokens", (2, 16, 20, 20), 16, (3, 3), to="tokens"), False, {8, 16}),
    ],
    ids=lambda v: v.ops[0].nodes[0] if hasattr(v, "ops") else None,
)
def test_results_leave_in_boxes_where_the_copy_engine_can_store_them(program, boxed: bool, columns: set[int]) -> None:
    op = program.ops[0]
    assert is_boxed(op, program) == boxed
    assert {config["columns"] for config in KERNEL.configs(op, program, ARCH) if "spread" not in config} == columns


def test_long_filters_have_small_tiles() -> None:
    """With more pixels, what their products begin with would spill."""
    sides = [
        {(c["across"], c["down"]) for c in KERNEL.configs(p.ops[0], p, ARCH) if "spread" not in c}
        for p in (conv("filter", (1, 64, 60, 60), 1, (5, s), to="output") for s in (4, 5))
    ]
    assert sides == [{(8, 8), (16, 8), (8, 16), (16, 16)}, {(8, 8)}]


def test_needs_wgmma() -> None:
    program = conv("3x3", (1, 16, 9, 9), 16, (3, 3))
    assert [n for n, arch in ARCHS.items() if KERNEL.supports(program.ops[0], program, arch) is None] == ["sm_90a"]


@pytest.mark.parametrize(("x", "o"), usually([((1, 64, 180, 320), 32), ((1, 160, 180, 320), 32), ((8, 96, 180, 320), 32)], 0, 1))
def test_few_output_channels_of_large_images_are_left_to_it(x, o) -> None:
    program = conv("dense block", x, o, (3, 3), ep="bias relu")
    assert candidates(program.ops[0], program, ARCH)[0].kernel.name == "conv_halo"


@pytest.mark.parametrize(
    ("x", "o", "ep"),
    usually([((1, 64, 720, 1280), 3, "bias"), ((1, 128, 512, 512), 3, "bias"), ((1, 32, 360, 640), 9, "bias shuffle3")], 1, 2),
)
def test_last_layers_of_large_images_are_left_to_it(x, o: int, ep: str) -> None:
    program = conv("last layer", x, o, (3, 3), ep=ep, to="output")
    assert candidates(program.ops[0], program, ARCH)[0].kernel.name == "conv_halo"


@pytest.mark.parametrize(
    ("channels", "o", "across", "down", "columns", "ep", "to", "more"),
    usually(
        [
            (160, 32, 16, 8, 32, "bias relu", "own", {}),
            (64, 64, 16, 8, 64, "bias residual", "own", {}),
            (128, 3, 16, 16, 8, "bias tanh", "output", {}),
            (64, 64, 8, 8, 64, "bias residual gelu", "fp32", {}),
            (32, 9, 16, 16, 16, "bias shuffle3", "output", {}),
            (64, 7, 16, 8, 7, "bias residual gelu", "output", {"spread": True}),
        ],
        0,
    ),
)
def test_compiles_without_spills(
    channels: int, o: int, across: int, down: int, columns: int, ep: str, to: str, more: dict[str, bool]
) -> None:
    """`resources` raises on spills and on serialised wgmma"""
    program = conv("compiled", (1, channels, 60, 60), o, (3, 3), ep=ep, to=to)
    config = {"across": across, "down": down, "columns": columns, **more}
    (launch,) = KERNEL.work(program.ops[0], program, config, ARCH).launches
    assert resources(launch.code, ARCH).stack == 0
    assert np.prod(launch.grid) <= ARCH.sms and launch.smem <= ARCH.smem_block
