"""Normalization: what is normalized together, how pixels are split between blocks, code for every generation."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest

from tccompile.arch import ARCHS
from tccompile.emit import resources
from tccompile.expr import DType
from tccompile.kernels import KERNELS, norm_queue
from tccompile.kernels.norm import NormKernel
from tccompile.kernels.norm_queue import NormQueue
from tccompile.kernels.norm_split import RECORD, NormSplit
from tccompile.kernels.spec import I32, Config
from tccompile.program import Norm, Program, dense
from tccompile.reference import compute
from tests.gpu.cases import NHWC, norm, program_of
from tests.kernels import simulator
from tests.kernels.support import ARCH, TOLERANCE, cases_of, check, error
from tests.kernels.test_softmax import check_coverage

NORM, SPLIT, QUEUE = NormKernel(), NormSplit(), NormQueue()


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
    "case, vectors, turns, ahead, blocks",
    [
        ("instance_norm", 3, 1, 1, 3),  # 24 channels: 126 of 128 threads
        ("instance_norm", 1, 1, 4, 5),  # three items of each image, the last pieces in part
        ("group_norm", 6, 1, 1, 2),
        ("group_norm_odd", 15, 1, 1, 4),  # 30 channels in groups of 6: items reach beyond them
        ("instance_norm_tail", 2, 1, 2, 7),
        ("instance_norm_fp32", 3, 1, 2, 3),
        ("group_norm_batch", 3, 2, 2, 3),
        ("group_norm_large", 4, 2, 1, 4),
        ("group_norm_residual", 10, 1, 3, 4),
        ("norm_of_one", 1, 1, 2, 3),
    ],
)
def test_values_from_a_queue(case: str, vectors: int, turns: int, ahead: int, blocks: int) -> None:
    check_queue(program_of(case), {"vectors": vectors, "turns": turns, "ahead": ahead}, blocks)


@pytest.mark.parametrize("blocks", [1, 2, 64])
@pytest.mark.parametrize("ahead", [1, 3, 5])
def test_any_number_of_blocks_empties_the_queue(blocks: int, ahead: int) -> None:
    program = norm("norm", (5, 24, 11, 9), (2, 3), 3, NHWC, ep="scale silu", shift=30.0)
    check_queue(program, {"vectors": 3, "turns": 1, "ahead": ahead}, blocks)


@pytest.mark.parametrize("groups", [0, 2])
def test_first_pixels_far_from_the_others(groups: int) -> None:
    """Sums are taken from a pixel's value on, which may be an outlier."""
    program = norm("norm", (1, 16, 40, 41), (2, 3), groups, NHWC, ep="", dtype=DType.F32)
    x = program.constants["x"].values  # type: ignore[union-attr]
    x[..., 0, 0], x[0, 3, 30, 5] = 300.0, -2000.0
    check_queue(program, {"vectors": 2, "turns": 1, "ahead": 1}, 3, 1e-5)


def check_queue(program: Program, config: Config, blocks: int, limit: float = 0.0) -> None:
    """Right values by so many blocks, whose turns come in order, and counters that are zero again."""
    (op,) = program.ops
    assert isinstance(op, Norm) and QUEUE.supports(op, program, ARCH) is None
    work = QUEUE.work(op, program, config, ARCH)
    (launch,) = work.launches
    work = replace(work, launches=(replace(launch, grid=(blocks, 1, 1)),))
    values = {name: recipe.values for name, recipe in program.constants.items()}  # type: ignore[union-attr]
    memory = simulator.run(work, program, values, op.y)
    memory.check_written()
    assert error(memory.result(), compute(op, program, values)) <= (limit or TOLERANCE[program.tensors[op.y].dtype])
    assert not any(memory.buffers[-1])


@pytest.mark.parametrize("case", ["instance_norm", "instance_norm_large", "group_norm", "group_norm_odd", "instance_norm_tail"])
@pytest.mark.parametrize("arch", ["sm_61", "sm_90a"])
def test_queue_holds_all_pixels_and_channels(case: str, arch: str) -> None:
    program = program_of(case)
    (op,) = program.ops
    x, y = program.tensors[op.x], program.tensors[op.y]
    pixels = x.shape[2] * x.shape[3]
    configs = list(QUEUE.configs(op, program, ARCHS[arch]))
    assert len({tuple(c.items()) for c in configs}) == len(configs) > 0
    for config in configs:
        (launch,) = (work := QUEUE.work(op, program, config, ARCHS[arch])).launches
        vectors, threads, k, chunk, pieces, items, tiles, ahead = [a.value for a in launch.args if isinstance(a, I32)][:8]
        assert k == pixels and (pieces - 1) * chunk < pixels <= pieces * chunk
        assert items == tiles * x.shape[0] and tiles * vectors * 8 >= max(x.padded[1], y.padded[1])
        assert vectors * 8 <= launch.block == vectors * threads <= norm_queue.THREADS and 1 <= ahead <= items
        if op.groups:  # no group is cut
            assert vectors * 8 % (x.shape[1] // op.groups) == 0
        assert not launch.cooperative and launch.grid[0] <= items * (2 * pieces + 1)
        assert work.counters == norm_queue.COUNTER * (items + 2) and work.scratch == items * (pieces + 1) * vectors * 64


@pytest.mark.parametrize(
    "shape, groups, reason",
    [
        ((3, 64, 60, 60), 8, None),
        ((1, 128, 9, 9), 1, None),
        ((1, 136, 9, 9), 1, "items of 128 channels"),
        ((1, 60, 9, 9), 4, None),
        ((1, 68, 9, 9), 4, "items of 128 channels"),  # 17 channels: whole vectors hold 8 groups
    ],
)
def test_queue_says_why_not(shape: tuple[int, ...], groups: int, reason: str | None) -> None:
    program = norm("norm", shape, (2, 3), groups, NHWC)
    found = QUEUE.supports(program.ops[0], program, ARCH)
    assert found is None if reason is None else reason in str(found)


def test_queue_for_large_images_and_batches() -> None:
    """Estimated below two launches where pixels are many, above one block for each group where they are few."""
    arch = ARCHS["sm_90a"]
    small = norm("norm", (1, 32, 2, 2), (2, 3), 8, NHWC, ep="")
    (op,) = small.ops
    for shape, queue in (
        ((32, 128, 128, 128), True),
        ((1, 32, 720, 1280), True),
        ((1, 64, 256, 256), True),
        ((8, 32, 8, 8), False),
    ):
        program = replace(small, tensors={n: dense(n, shape, DType.F16, NHWC) for n in ("x", "y")}, constants={})
        times = [min(k.cost(op, program, c, arch) for c in k.configs(op, program, arch)) for k in (NORM, SPLIT, QUEUE)]
        assert (times[2] < min(times[:2])) == queue, times


def test_order_of_the_queue() -> None:
    """Every piece once; statistics before what merges them, that before what is normalized by them, `ahead` items apart."""
    for items, pieces, ahead in ((1, 1, 1), (1, 5, 1), (4, 3, 1), (4, 3, 2), (5, 2, 5)):
        order = queue_order(items, pieces, ahead)
        at = {piece: n for n, piece in enumerate(order)}
        assert len(at) == len(order) == items * (2 * pieces + 1)
        for item in range(items):
            assert max(at[item, 0, p] for p in range(pieces)) < at[item, 1, 0] < min(at[item, 2, p] for p in range(pieces))
        merged = [item for item, kind, _ in order if kind == 1]
        assert merged == sorted(merged)
        between = [piece for item, kind, piece in order if kind == 2 and item + ahead < items]
        assert all(b == (a - 1) % pieces for a, b in pairwise(between))  # from an item's end to its beginning


def queue_order(items: int, pieces: int, ahead: int) -> list[tuple[int, int, int]]:
    """(item, kind, piece) of everything in the queue; of a merging, piece 0."""
    text = "def at(n):\n" + "".join(f"    {line}\n" for line in (*norm_queue.ORDER, "return item, kind, piece"))
    scope = {"i32": int, "quotient": lambda a, b: a // b, "items": items, "pieces": pieces, "ahead": ahead}
    exec(text, scope)
    found = [scope["at"](n) for n in range(items * (2 * pieces + 1))]  # type: ignore[operator]
    return [(item, kind, 0 if kind == norm_queue.MERGE else piece) for item, kind, piece in found]


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
        (QUEUE, program_of("group_norm")),
        (QUEUE, program_of("group_norm_residual")),
    ):
        (op,) = program.ops
        config = next(iter(kernel.configs(op, program, ARCHS[arch])))
        for launch in kernel.work(op, program, config, ARCHS[arch]).launches:
            assert resources(launch.code, ARCHS[arch]).stack == 0
