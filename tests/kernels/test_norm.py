"""Normalization: what is normalized together, how pixels are split between blocks, code for every generation."""

from __future__ import annotations

import pytest

from tccompile.arch import ARCHS
from tccompile.emit import resources
from tccompile.expr import DType
from tccompile.kernels import KERNELS
from tccompile.kernels.norm import NormKernel
from tccompile.kernels.norm_split import RECORD, NormSplit
from tccompile.program import Norm
from tests.gpu.cases import NHWC, norm, program_of
from tests.kernels.support import ARCH, cases_of, check
from tests.kernels.test_softmax import check_coverage

NORM, SPLIT = NormKernel(), NormSplit()


@pytest.mark.parametrize("case", [c for c in cases_of(Norm) if c != "instance_norm_large"])
def test_every_element_has_one_output(case: str) -> None:
    program = program_of(case)
    (op,) = program.ops
    check_coverage(op, program, op.axes, op.groups)


@pytest.mark.parametrize(
    "case",
    [
        "layer_norm_3", "layer_norm_long", "layer_norm_odd", "group_norm_odd", "instance_norm_1d",
        "layer_norm_of_input", "layer_norm_2d", "layer_norm_2d_of_input",
    ],
)  # fmt: skip
def test_values(case: str) -> None:
    check(NORM, program_of(case))


@pytest.mark.parametrize(
    "case, splits", [("instance_norm", 3), ("group_norm", 2), ("group_norm_odd", 5), ("instance_norm_tail", 1)]
)
def test_values_of_split_images(case: str, splits: int) -> None:
    check(SPLIT, program_of(case), {"splits": splits})


@pytest.mark.parametrize(
    "shape, axes, groups, order",
    [
        ((2, 24, 4, 6), (2, 3), 3, None),
        ((2, 30, 3, 4), (2, 3), 3, NHWC),
        ((2, 24, 3, 3), (1, 2, 3), 0, NHWC),
        ((1, 10, 2, 3, 4), (2, 3, 4), 0, (0, 2, 3, 4, 1)),
        ((4, 3, 2, 24), (2, 3), 0, None),
    ],
)
def test_of_other_axes(shape, axes, groups, order) -> None:
    program = norm("norm", shape, axes, groups, order)
    check_coverage(program.ops[0], program, axes, groups)


@pytest.mark.parametrize(
    "shape, groups, order, reason",
    [
        ((1, 16, 9, 9), 0, None, "channels do not lie in aligned vectors"),
        ((1, 4080, 4, 4), 3, NHWC, None),
        ((1, 6006, 2, 2), 3, NHWC, "more channels than a block"),
    ],
)
def test_split_says_why_not(shape, groups, order, reason) -> None:
    program = norm("norm", shape, (2, 3), groups, order)
    found = SPLIT.supports(program.ops[0], program, ARCH)
    assert found is None if reason is None else reason in found


def test_split_needs_whole_images() -> None:
    program = norm("norm", (4, 16, 9, 9), (3,), order=NHWC)
    assert "all pixels" in SPLIT.supports(program.ops[0], program, ARCH)


@pytest.mark.parametrize("case", ["instance_norm", "instance_norm_large", "group_norm", "group_norm_odd"])
def test_blocks_cover_pixels_and_channels(case: str) -> None:
    program = program_of(case)
    (op,) = program.ops
    x = program.tensors[op.x]
    pixels = x.shape[2] * x.shape[3]
    for config in SPLIT.configs(op, program, ARCH):
        work = SPLIT.work(op, program, config, ARCH)
        statistics, apply = work.launches
        splits, tiles, images = statistics.grid
        vectors, threads, k, chunk = (a.value for a in statistics.args[5:9])
        assert k == pixels and (splits - 1) * chunk < pixels <= splits * chunk
        assert images == x.shape[0] and tiles * vectors * 8 >= x.padded[1]
        assert statistics.block == vectors * threads <= 256 and threads & (threads - 1) == 0
        if op.groups:  # no group is cut
            assert vectors * 8 % (x.shape[1] // op.groups) == 0
        lanes, _, step = (a.value for a in apply.args[2:5])
        assert (apply.grid[0] - 1) * step < pixels <= apply.grid[0] * step and apply.grid[1] * lanes * 8 >= x.padded[1]
        assert work.counters == 4 * images * tiles
        assert work.scratch == images * (splits + 1) * tiles * vectors * RECORD


def test_only_a_kernel_that_knows_how_leaves_the_mean_in() -> None:
    for shape, axes, order in (((40, 768), (1,), None), ((1, 64, 60, 60), (2, 3), NHWC), ((2, 3, 4000), (2,), None)):
        program = norm("norm", shape, axes, order=order, centred=False)
        kernels = [k for k in KERNELS if k.realises is Norm and k.supports(program.ops[0], program, ARCHS["sm_90a"]) is None]
        for kernel in kernels:  # without the mean there is other code
            for config in kernel.configs(program.ops[0], program, ARCHS["sm_90a"]):
                own, other = (
                    [launch.code for launch in kernel.work(p.ops[0], p, config, ARCHS["sm_90a"]).launches]
                    for p in (program, norm("norm", shape, axes, order=order))
                )
                assert own != other, kernel.name


def test_large_images_are_split() -> None:
    arch = ARCHS["sm_90a"]

    def costs(shape) -> tuple[float, float]:
        program = norm("norm", shape, (2, 3), order=NHWC)
        (op,) = program.ops
        (config,) = SPLIT.configs(op, program, arch)
        whole = min(NORM.cost(op, program, c, arch) for c in NORM.configs(op, program, arch))
        return whole, SPLIT.cost(op, program, config, arch)

    whole, split = costs((1, 32, 360, 320))
    assert split < whole / 5
    whole, split = costs((64, 256, 4, 4))
    assert whole < split


@pytest.mark.parametrize("arch", ARCHS)
def test_compiles(arch: str) -> None:
    for kernel, program in (
        (NORM, norm("norm", (3, 700), (1,))),
        (NORM, norm("norm", (3, 700), (1,), centred=False)),
        (NORM, norm("norm", (1, 6, 5, 7), (2, 3), order=NHWC, dtype=DType.F32)),
        (SPLIT, program_of("group_norm")),
    ):
        (op,) = program.ops
        config = next(iter(kernel.configs(op, program, ARCHS[arch])))
        for launch in kernel.work(op, program, config, ARCHS[arch]).launches:
            assert resources(launch.code, ARCHS[arch]).stack == 0
