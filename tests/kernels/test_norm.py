"""Normalization: what is normalized together, how pixels are split between blocks, code for every generation."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tccompile.arch import ARCHS, Arch, Feature
from tccompile.emit.compile import resources
from tccompile.ir.expr import Expr, call, cast, const, load
from tccompile.ir.ops import Norm
from tccompile.ir.ops.op import Also
from tccompile.ir.program import Program
from tccompile.ir.reference import beside, compute
from tccompile.ir.storage import to_storage
from tccompile.ir.types import DType
from tccompile.kernels import KERNELS
from tccompile.kernels.norm import NormKernel
from tccompile.kernels.norm_split import RECORD, NormSplit
from tccompile.kernels.norm_team import NormTeam, resident_of
from tccompile.kernels.spec import I32, Config
from tccompile.kernels.two_pass import describe
from tests.gpu.cases import NHWC, norm, program_of
from tests.kernels import machine, simulator
from tests.kernels.support import ARCH, TOLERANCE, check
from tests.networks import relative_error
from tests.tiers import APART, thorough, usually

NORM, SPLIT, TEAM = NormKernel(), NormSplit(), NormTeam()


@pytest.mark.parametrize(
    "case",
    [
        "layer_norm_3", "layer_norm_long", "layer_norm_odd", "group_norm_odd", "instance_norm_1d",
        "layer_norm_of_input", "layer_norm_2d", "layer_norm_2d_of_input",
    ],
)  # fmt: skip
def test_values(case: str) -> None:
    check(NORM, program_of(case))


@pytest.mark.parametrize("centred", [False, True])
@pytest.mark.parametrize(
    "shape, dtype, threads, rows, held",
    usually(
        [
            ((3, 5120), DType.F16, 128, 1, 5),  # two outputs a block, all vectors of all threads
            ((3, 4101), DType.F16, 128, 1, 5),
            ((3, 4101), DType.F16, 256, 2, 3),
            ((3, 4101), DType.F32, 256, 2, 3),
            ((3, 4101), DType.F16, 512, 2, 2),
            ((1, 8203), DType.F16, 1024, 1, 2),
            ((1, 36871), DType.F16, 512, 1, 0),
        ],
        0,
        3,
        5,
    ),
)
def test_values_of_rows_kept_as_words(shape, dtype, threads: int, rows: int, held: int, centred: bool) -> None:
    program = norm("norm", shape, (1,), dtype=dtype, centred=centred)
    config = {"threads": threads, "rows": rows, "shared": 0}
    shares = describe(program.ops[0], program, (1,), config=config)
    assert shares.held == held and shares.words == 2 * dtype.size
    check(NORM, program, config)


@pytest.mark.parametrize("dtype, centred", usually([(d, c) for d in (DType.F16, DType.F32) for c in (False, True)], 0, 3))
def test_values_of_rows_in_shared_memory(dtype, centred: bool) -> None:
    program = norm("norm", (1, 36871), (1,), dtype=dtype, centred=centred)
    config = {"threads": 512, "rows": 1, "shared": 1}
    assert config in NORM.configs(program.ops[0], program, ARCHS["sm_90a"])
    shares = describe(program.ops[0], program, (1,), config=config)
    assert shares.held == 10 and shares.words == 2 * dtype.size
    check(NORM, program, config)


QUANTIZED = {
    DType.I8: cast(Expr("saturate", (call("round", call("ratio", load(0), 0.03)), const(-128.0), const(127.0))), DType.I64),
    DType.U8: cast(
        Expr("saturate", (call("add", call("round", call("ratio", load(0), 0.03)), 7.0), const(0.0), const(255.0))), DType.I64
    ),
    DType.E4M3: call("mul", load(0), 20.0),
}
"""What is stored beside y, by type."""


@pytest.mark.parametrize(
    "shape, rows, dtype, run",
    [
        ((5, 72), 2, DType.I8, machine.run),
        ((5, 768), 2, DType.U8, simulator.run),
        ((2, 4101), 1, DType.I8, simulator.run),
        ((3, 3, 13), 1, DType.U8, simulator.run),
        ((3, 768), 1, DType.E4M3, simulator.run),
    ],
)
def test_bytes_beside_halves_are_those_of_the_halves(shape, rows: int, dtype: DType, run) -> None:
    program = norm("norm", shape, (len(shape) - 1,), dtype=DType.F16)
    (op,) = program.ops
    assert op.y == "y"
    op = replace(op, also=Also("z", QUANTIZED[dtype]))
    program = replace(
        program, ops=(op,), tensors={**program.tensors, "z": replace(program.tensors["y"], name="z", dtype=dtype)}, outputs=()
    )
    config = next(c for c in NORM.configs(op, program, ARCH) if c["rows"] == rows)
    work, values = NORM.work(op, program, config, ARCH), {n: r.values for n, r in program.constants.items()}  # type: ignore[union-attr]
    both = {name: run(work, program, values, name, ARCH) for name in op.results}
    y, z = (memory.result() for memory in both.values())
    assert all(memory.there().all() for memory in both.values())
    assert relative_error(y, compute(op, program, values)) < TOLERANCE[DType.F16]
    expected = to_storage(beside(op, program, y.astype(np.float32)), dtype)
    assert np.array_equal(to_storage(z, dtype), expected)


@pytest.mark.parametrize(
    "case, splits", [("instance_norm", 3), ("group_norm", 2), ("group_norm_odd", 5), ("instance_norm_tail", 1)]
)
def test_values_of_split_images(case: str, splits: int) -> None:
    check(SPLIT, program_of(case), {"splits": splits})


@pytest.mark.parametrize(
    "case, vectors, sms, room, held",
    usually(
        [
            ("instance_norm", 3, 7, 163, 152),
            ("instance_norm", 3, 4, 8, 120),  # of 219 pixels of a block
            ("group_norm", 6, 5, 163, 52),
            ("group_norm_odd", 3, 5, 163, 32),
            ("instance_norm_tail", 2, 12, 163, 48),
            ("instance_norm_fp32", 3, 4, 163, 128),
            ("instance_norm_fp32", 3, 4, 8, 56),
            ("group_norm_residual", 4, 20, 9, 96),
            ("instance_norm_tail", 2, 11, 163, 96),
        ],
        1,
        2,
        3,
        4,
        6,
    ),
)
def test_values_of_images_held(case: str, vectors: int, sms: int, room: int, held: int) -> None:
    """Several pixels at a time are stored to plain results, two to others."""
    config = {"vectors": vectors, "threads": 32, "cluster": 0, "teams": 0}
    check_team(program_of(case), config, replace(ARCH, sms=sms, smem_block=room * 1024), held)


@pytest.mark.parametrize("groups", [0, 3])
@pytest.mark.parametrize("cluster", [0, 2])
def test_means_far_from_zero_cancel_nothing(groups: int, cluster: int) -> None:
    program = norm("norm", (2, 24, 19, 23), (2, 3), groups, NHWC, dtype=DType.F32, shift=1000.0)
    config = {"vectors": 3, "threads": 96, "cluster": cluster, "teams": 0}
    check_team(program, config, ARCHS["sm_90a"] if cluster else replace(ARCH, sms=4), 224)


@pytest.mark.parametrize("blocks", [1, 3])
@pytest.mark.parametrize("teams", [1, 3])
def test_a_gpu_that_runs_fewer_blocks(blocks: int, teams: int) -> None:
    """Teams get smaller, and have more pixels than shared memory was asked for; or take one image after the other."""
    program = norm("norm", (3, 24, 7, 9), (2, 3), 3, NHWC, ep="scale silu", shift=30.0)
    config = {"vectors": 3, "threads": 32, "cluster": 0, "teams": teams}
    check_team(program, config, replace(ARCH, sms=6), 16 if teams == 1 else 32, blocks)


@pytest.mark.parametrize(
    "case, vectors, cluster, threads, held",
    usually(
        [
            ("instance_norm", 3, 4, 32, 112),
            ("instance_norm", 1, 8, 32, 64),
            ("group_norm", 6, 4, 32, 28),
            ("group_norm_odd", 3, 8, 32, 8),
            ("instance_norm_tail", 2, 2, 32, 48),
            ("instance_norm_fp32", 3, 4, 32, 64),
            ("group_norm_batch", 3, 2, 64, 48),
            ("group_norm_batch", 3, 2, 128, 64),  # groups are added up by several threads
            ("instance_norm", 2, 4, 64, 128),
        ],
        2,
        3,
        4,
        5,
        7,
    ),
)
def test_values_of_images_held_by_clusters(case: str, vectors: int, cluster: int, threads: int, held: int) -> None:
    config = {"vectors": vectors, "threads": threads, "cluster": cluster, "teams": 0}
    check_team(program_of(case), config, ARCHS["sm_90a"], held)


def check_team(program: Program, config: Config, arch: Arch, held: int, blocks: int | None = None) -> None:
    """Right values, by blocks of one warp that hold so many pixels of an image, and on fewer blocks than planned."""
    (op,) = program.ops
    assert isinstance(op, Norm)
    work = TEAM.work(op, program, config, arch)
    (launch,) = work.launches
    if config["cluster"]:
        assert not launch.cooperative and launch.grid[0] % config["cluster"] == 0
    else:
        assert launch.cooperative and launch.grid[0] <= arch.sms
    assert [a.value for a in launch.args if isinstance(a, I32)][6] == held
    launch = replace(launch, grid=(blocks or launch.grid[0], 1, 1))
    values = {name: recipe.values for name, recipe in program.constants.items()}  # type: ignore[union-attr]
    memory = simulator.run(replace(work, launches=(launch,)), program, values, op.y, arch)
    memory.check_written()
    assert relative_error(memory.result(), compute(op, program, values)) <= TOLERANCE[program.tensors[op.y].dtype]
    assert not any(memory.buffers[-1])  # the counters


@pytest.mark.parametrize(
    "shape, groups, reason",
    [
        ((1, 64, 60, 60), 8, None),
        ((1, 64, 96, 100), 0, None),  # a good half of it
        ((1, 64, 400, 300), 0, "do not fit"),
        ((40, 64, 16, 16), 0, None),  # many images: clusters
        ((40, 64, 5, 5), 0, "do not fit"),  # of fewer pixels than a cluster has threads
        ((1, 6006, 2, 2), 3, "do not fit"),  # and groups of more channels than a block takes
        ((1, 16, 9, 9), 0, None),
    ],
)
def test_team_says_why_not(shape: tuple[int, ...], groups: int, reason: str | None) -> None:
    program = norm("norm", shape, (2, 3), groups, NHWC)
    found = TEAM.supports(program.ops[0], program, replace(ARCHS["sm_90a"], sms=4))
    assert found is None if reason is None else reason in str(found)


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
    check(NORM, norm("norm", shape, axes, groups, order))


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


@pytest.mark.parametrize(
    "arch", [*(a for a in ARCHS.values() if a.has(Feature.CLUSTERS)), replace(ARCHS["sm_120"], threads_sm=768)], ids=str
)
def test_clusters_are_counted_as_the_generation_has_room_for_them(arch: Arch) -> None:
    """Its threads too, of which there are 2048 a multiprocessor on some alone"""
    program = norm("norm", (40, 64, 40, 40), (2, 3), 0, NHWC)
    (op,) = program.ops
    configs = [c for c in TEAM.configs(op, program, arch) if c["cluster"]]
    assert {c["threads"] for c in configs} == {128, 256, 512}
    for config in configs:
        (launch,) = TEAM.work(op, program, config, arch).launches
        blocks = resident_of(launch.smem, config["threads"], arch)
        assert blocks >= 1 and blocks * config["threads"] <= arch.threads_sm and blocks * (launch.smem + 1024) <= arch.smem_sm
        assert 0 < TEAM.cost(op, program, config, arch) < 1e4


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


@thorough
@pytest.mark.parametrize("arch", APART)
def test_compiles(arch: str) -> None:
    cases = [
        (NORM, norm("norm", (3, 700), (1,))),
        (NORM, norm("norm", (1, 6, 5, 7), (2, 3), order=NHWC, dtype=DType.F32)),
        (TEAM, program_of("group_norm")),
        (NORM, norm("norm", (3, 700), (1,), centred=False)),
        (NORM, norm("norm", (3, 5120), (1,))),
        (NORM, norm("norm", (3, 40000), (1,))),
        (SPLIT, program_of("group_norm")),
        (TEAM, program_of("instance_norm_fp32")),
    ]
    for kernel, program in cases if arch == "sm_90a" else cases[:3]:
        (op,) = program.ops
        config = next(iter(kernel.configs(op, program, ARCHS[arch])))
        for launch in kernel.work(op, program, config, ARCHS[arch]).launches:
            assert resources(launch.code, ARCHS[arch]).stack == 0
