"""Depthwise convolution by the tensor copy engine: where it applies, values thread by thread, shared memory, code."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import partial

import pytest

from tccompile.arch import ARCHS
from tccompile.emit.compile import resources
from tccompile.ir.program import Program
from tccompile.ir.types import DType
from tccompile.kernels import depthwise_sm90
from tccompile.kernels.depthwise_sm90 import DepthwiseSm90
from tccompile.kernels.depthwise_sm90_walk import STEPS, STRIPS, SWIZZLED, Walk, share, walk_of, walks, width
from tccompile.kernels.spec import Config, TiledMap
from tests.gpu.cases import conv, program_of
from tests.kernels import machine
from tests.kernels.support import check
from tests.tiers import usually

KERNEL, ARCH = DepthwiseSm90(), ARCHS["sm_90a"]
SMALL = replace(ARCH, sms=1)
"""So few multiprocessors that a block comes to several images, and its ring round."""


def depthwise(channels: int = 24, size: int = 14, window: int = 3, batch: int = 2, **how) -> Program:
    return conv("depthwise", (batch, channels, size, size + 1), channels, (window, window), groups=channels, **how)


def config(parts: int, channels: int = 32, strips: int = 1, steps: int = 2, images: int = 1, each: int = 1) -> Config:
    how = {"channels": channels, "strips": strips, "steps": steps, "blocks": 1, "images": images, "each": each}
    return {"parts": parts, **how}


@pytest.mark.parametrize(
    "program",
    [
        depthwise(),
        depthwise(33, window=5, stride=2),
        depthwise(window=7, stride=2, ep="bias silu"),
        depthwise(20, source="slice", to="tail"),
        depthwise(to="gap"),
        depthwise(pad=0),
    ],
    ids=["3x3", "5x5/2", "7x7/2", "slices", "gap", "no padding"],
)
def test_supports(program: Program) -> None:
    assert KERNEL.supports(program.ops[0], program, ARCH) is None
    assert list(KERNEL.configs(program.ops[0], program, ARCH))


@pytest.mark.parametrize(
    "program, arch, reason",
    [
        (depthwise(), "sm_80", "sm_80 has no tensor copy engine"),
        (depthwise(), "sm_100", "made for sm_90a"),
        (program_of("conv_groups_4"), "sm_90a", "no depthwise convolution"),
        (depthwise(dtype=DType.F32), "sm_90a", "float32"),
        (depthwise(to="fp32"), "sm_90a", "y is float32"),
        (depthwise(dilation=2), "sm_90a", "3×3, 5×5 and 7×7"),
        (depthwise(window=9, size=20), "sm_90a", "9×9"),
        (depthwise(stride=3), "sm_90a", "stride 1 or 2"),
        (program_of("depthwise_1d"), "sm_90a", "1×9"),
        (replace(depthwise(), inputs=("x",)), "sm_90a", "model input or output"),
        (depthwise(source="odd"), "sm_90a", "multiples of 16 bytes"),
        (depthwise(20, to="slice"), "sm_90a", "channels of y"),
        (depthwise(ep="bias residual"), "sm_90a", "reads residual1 for each pixel"),
        (conv("narrow", (1, 8, 9, 1), 8, (3, 3), stride=2, groups=8), "sm_90a", "narrower than the stride"),
    ],
    ids=[
        "sm_80", "sm_100", "groups", "fp32", "to fp32", "dilated", "9x9", "stride 3", "a line", "input", "odd", "unpadded",
        "residual", "narrow",
    ],
)  # fmt: skip
def test_says_why_not(program: Program, arch: str, reason: str) -> None:
    assert reason in KERNEL.supports(program.ops[0], program, ARCHS[arch])


# --- Values ----------------------------------------------------------------------------------------------------------

# Extents that fill no box, parts that end within an image or hold several, boxes beyond the channels.
CASES = {
    "bands": (conv("bands", (1, 40, 9, 35), 40, (3, 3), groups=40, ep="bias relu"), config(5), ARCH),
    "padded channels": (conv("padded", (1, 20, 9, 8), 20, (3, 3), stride=2, groups=20), config(3, 16), ARCH),
    "5x5": (conv("5x5", (1, 12, 8, 13), 12, (5, 5), groups=12, ep="bias silu"), config(3, 64), ARCH),
    "5x5, one band": (conv("5x5", (1, 8, 12, 6), 8, (5, 5), groups=8), config(1, 64), ARCH),
    "5x5/2": (conv("5x5/2", (1, 24, 12, 7), 24, (5, 5), stride=2, pad=1, groups=24), config(2), ARCH),
    "7x7": (conv("7x7", (1, 8, 7, 9), 8, (7, 7), groups=8), config(2, 64, 2, 1), ARCH),
    "7x7/2": (conv("7x7/2", (1, 16, 13, 9), 16, (7, 7), stride=2, groups=16), config(1, 64, 1, 1), ARCH),
    "7x7 of 3x3": (conv("7x7", (1, 8, 3, 3), 8, (7, 7), groups=8), config(2, 64), ARCH),
    "2 columns": (conv("2", (1, 8, 1, 2), 8, (3, 3), stride=2, groups=8), config(1, 64), ARCH),
    "slices": (depthwise(20, 9, batch=1, source="slice", to="tail"), config(2), ARCH),
    "gap": (depthwise(16, 9, batch=1, stride=2, pad=0, to="gap"), config(2), ARCH),
    "strips": (conv("strips", (1, 16, 5, 70), 16, (3, 3), groups=16), config(3, 64, 4), ARCH),
    "items": (conv("items", (3, 16, 13, 20), 16, (3, 3), groups=16), config(1), SMALL),
    "items of parts": (conv("items", (2, 24, 7, 40), 24, (5, 5), stride=2, groups=24), config(3), SMALL),
    "chunks": (conv("chunks", (1, 136, 4, 5), 136, (3, 3), groups=136, ep="bias"), config(1, 64), SMALL),
    "side by side": (conv("side", (5, 40, 6, 4), 40, (3, 3), groups=40, ep="bias"), config(2, 64, 1, 2, 2), ARCH),
    "side by side, 5x5": (conv("side", (4, 64, 7, 14), 64, (5, 5), groups=64, ep="bias"), config(3, 64, 7, 2, 4), SMALL),
    "side by side, 5x5/2": (conv("side", (5, 20, 12, 28), 20, (5, 5), stride=2, groups=20), config(2, 64, 7, 1, 4), SMALL),
    "whole pixels": (conv("whole", (1, 140, 7, 11), 140, (3, 3), groups=140, ep="bias relu"), config(2, 144, 2, each=2), ARCH),
    "whole pixels, 5x5": (conv("whole", (2, 48, 6, 9), 48, (5, 5), groups=48), config(3, 48, 2, 1, each=3), ARCH),
    "whole pixels, 5x5/2": (conv("whole", (1, 80, 12, 11), 80, (5, 5), stride=2, groups=80), config(2, 80, 1, 1), ARCH),
    "whole pixels, side by side": (
        conv("whole", (3, 40, 5, 16), 40, (3, 3), groups=40, ep="bias"),
        config(1, 40, 6, 1, 3),
        ARCH,
    ),
    "side by side, 7x7": (conv("side", (3, 8, 9, 4), 8, (7, 7), groups=8), config(2, 64, 1, 2, 2), ARCH),
    "few rows": (conv("few", (4, 8, 3, 8), 8, (7, 7), groups=8), config(5, 64, 1, 1), ARCH),
    "rows below": (conv("below", (2, 8, 9, 8), 8, (5, 5), pad=3, groups=8), config(2, 64, 1, 4), ARCH),
}


LARGEST = ("side by side, 5x5", "whole pixels, 5x5", "whole pixels, side by side", "items of parts")
"""What others show together, at smaller sizes."""


@pytest.mark.parametrize("name", usually(CASES, *(CASES.keys() - {*LARGEST})))
def test_values(name: str) -> None:
    program, chosen, arch = CASES[name]
    check(KERNEL, program, chosen, arch=arch)


@pytest.mark.parametrize("name", usually(["5x5/2", "items", "slices"], "items"))
def test_values_as_compiled(name: str) -> None:
    """Matrices of the last pixels are read beyond their slab: what is there shows in no result."""
    program, chosen, arch = CASES[name]
    check(KERNEL, program, chosen, arch=arch, run=partial(machine.run, beyond=True))


@pytest.mark.parametrize(
    "line, other",
    [
        ("barrier_wait(i32(full + turn * i32(8)), parity)", "pass"),  # rows are not waited for
        ("i32(mine + side * i32(", "i32(mine + i32(0) * i32("),  # results over those that are being stored
        ("    boxes_read()", "    pass"),
        ("barrier_wait(i32(free + side * i32(8)), i32(i32(1) - round))", "pass"),
        ("barrier_wait(i32(done + side * i32(8)), round)", "pass"),
        ("    turn, parity = i32(0), i32(i32(1) - parity)", "    turn = i32(0)"),
    ],
    ids=["no wait", "one side", "unread", "no room", "not done", "parity"],
)
def test_the_simulator_finds_races(monkeypatch: pytest.MonkeyPatch, line: str, other: str) -> None:
    """What is wrong only if copies take their time"""
    program, chosen, arch = CASES["items"]
    whole = depthwise_sm90.lines
    assert any(line in text for text in whole(walk_of(program.ops[0], program, chosen), 2, True))
    monkeypatch.setattr(depthwise_sm90, "lines", lambda *a: [text.replace(line, other) for text in whole(*a)])
    with pytest.raises(AssertionError):
        check(KERNEL, program, chosen, arch=arch)


# --- Shared memory -----------------------------------------------------------------------------------------------------


def walk_for(taps: int, stride: int, channels: int, strips: int, steps: int, columns: int) -> Walk:
    """Of images so wide."""
    walk = Walk(taps, stride, channels, strips, steps, blocks=1, images=1, each=1, width=0)
    return replace(walk, width=width(walk, columns))


EVERY = [
    walk_for(taps, stride, channels, strips, steps, columns)
    for columns in (7, 30, 500)
    for taps in (3, 5, 7)
    for stride in (1, 2)
    for channels in SWIZZLED
    for strips in STRIPS
    for steps in STEPS
]


@pytest.mark.parametrize("walk", EVERY, ids=str)
def test_boxes_lie_as_the_copy_engine_swizzles_them(walk: Walk) -> None:
    """And rows alike, so that a lane's place in one is its place in all"""
    pattern = 8 * walk.pixel
    assert (
        not any(n % pattern for n in (walk.line, walk.box, walk.slab, walk.beyond, walk.line_out, walk.results))
        and 1024 % pattern == 0
    )


@pytest.mark.parametrize("channels", SWIZZLED)
@pytest.mark.parametrize("first", range(8))
def test_matrices_meet_no_bank_twice(channels: int, first: int) -> None:
    """8 neighbouring pixels, at whichever column they begin"""
    for group in range(channels // 8):
        at = [2 * channels * (first + i) + 16 * group for i in range(8)]
        swizzled = [a ^ (a >> 7 & channels // 8 - 1) << 4 for a in at]
        assert len({a // 16 % 8 for a in swizzled}) == 8


@pytest.mark.parametrize("taps, stride", [(t, s) for t in (3, 5, 7) for s in (1, 2)])
def test_every_tap_is_multiplied_once(taps: int, stride: int) -> None:
    """By its own row and column of x, for both rows of y, in live products only"""
    walk, met = walk_for(taps, stride, 64, 1, 1, 7), Counter()
    for age in range(walk.reach):
        for k, product in enumerate(walk.products):
            for y, row in enumerate(walk.weights(age, k)):
                for (i, s), weight in zip(product, row, strict=True):
                    assert weight is None or weight == (age * walk.rows + i - y * stride, s)
                    met[y, weight] += weight is not None
                    assert weight is None or k in walk.live(age)
    expected = Counter((y, (r, s)) for y in (0, 1) for r in range(taps) for s in range(taps))
    assert +met == expected and all(7 + s // stride <= walk.width for product in walk.products for _, s in product)


@pytest.mark.parametrize("window, stride", [(w, s) for w in (3, 5, 7) for s in (1, 2)])
@pytest.mark.parametrize("channels, size", usually([(16, 7), (40, 14), (144, 56), (672, 112)], 0, 2))
def test_configs_fit(channels: int, size: int, window: int, stride: int) -> None:
    program = depthwise(channels, size, window, stride=stride)
    for walk in walks(program.ops[0], program, ARCH):
        assert walk.stages(ARCH) >= 2 and walk.blocks * (walk.smem(walk.stages(ARCH)) + 1024) <= ARCH.smem_sm
    for chosen in KERNEL.configs(program.ops[0], program, ARCH):
        (launch,) = KERNEL.work(program.ops[0], program, chosen, ARCH).launches
        shares = share(program.ops[0], program, chosen, ARCH)
        assert launch.grid[0] == shares.blocks <= max(shares.chunks, ARCH.sms * chosen["blocks"])
        assert launch.smem <= ARCH.smem_block
        for map_ in (a for a in launch.args if isinstance(a, TiledMap)):
            assert max(map_.box) <= 256 and not any(s % 16 for s in (map_.bytes, *map_.strides)) and min(map_.extents) > 0


@pytest.mark.parametrize("window, stride", usually([(3, 1), (5, 2), (7, 1)]))
def test_compiles(window: int, stride: int) -> None:
    program = depthwise(40, 56, window, stride=stride, ep="bias silu")
    walk = walks(program.ops[0], program, ARCH)[-1]
    chosen = {"parts": 8, **{name: getattr(walk, name) for name in depthwise_sm90.CHOSEN}}
    (launch,) = KERNEL.work(program.ops[0], program, chosen, ARCH).launches
    used = resources(launch.code, ARCH)
    assert used.stack == 0 and used.registers <= walk.most_registers
