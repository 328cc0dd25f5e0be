"""Members of families on a GPU: made of what is loaded for another one, and held to memory before they run."""

from __future__ import annotations

import ctypes
import resource
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest

from tccompile.errors import InputError, LaunchError, PlanError
from tccompile.ir.extent import least
from tccompile.ir.tensor import dense
from tccompile.ir.types import DType
from tccompile.plan.file import Plan
from tccompile.plan.format import Address, Entry, Family, Int, Map
from tccompile.plan.formulas import drawn
from tccompile.plan.rules import check_plan
from tccompile.ranges.box import opened
from tccompile.runtime import gpu, outputs, room
from tccompile.runtime.driver import open_device
from tccompile.runtime.engine import RECENT
from tccompile.runtime.outputs import length
from tccompile.runtime.room import touched
from tccompile.runtime.session import Session
from tccompile.sizes import Size
from tests.runtime.fake_driver import ILLEGAL_ADDRESS, OUT_OF_MEMORY
from tests.runtime.test_session import KERNELS, FakeArray, expected, fake, plan, program, same, section, x_of

__all__ = ["fake"]

ROWS = Size("rows", 2, 40)


def of_rows(change=lambda section, rows: section) -> Plan:
    """The toy plan for any number of rows, its section changed."""
    (rows,) = opened((ROWS,))
    own = change(replace(section("sm_80", rows, (0, 1)), arena=1024), rows)
    family = Family((ROWS,), *drawn(Entry(program(rows), (own,)), ["rows"]))
    return replace(plan(), entries=(family.lowest,), families=(family,))


def told(own, step: int, place: int, arg):
    """The section with another argument of a step's launch."""
    (launch,) = own.steps[step].launches
    launch = replace(launch, args=(*launch.args[:place], arg, *launch.args[place + 1 :]))
    return replace(own, steps=(*own.steps[:step], replace(own.steps[step], launches=(launch,)), *own.steps[step + 1 :]))


def of_windows(last) -> Map:
    """A map by im2col whose last window along the width begins so far from an image's edge."""
    return Map(
        "im2col", DType.F16, Address("arena", "", 256), (8, 5, 2, 1), (16, 80, 160), (2, 2), 16,
        lower=(-1, -1), upper=(last, 1), channels=8, pixels=4,
    )  # fmt: skip


@pytest.mark.parametrize("device", ["cpu", "gpu"])
def test_members_of_any_sizes(fake, device):
    fake()
    ranged = of_rows()
    check_plan(ranged)
    with Session(ranged, device) as s:
        for rows in [2, 40, 7, 7, *range(2, 41), 3, 40, 3]:
            same(s.run(None, {"x": x_of(rows)}), expected(x_of(rows)))
        with pytest.raises(InputError, match=r"2\.\.40"):
            s.run(None, {"x": x_of(41)})


def test_sizes_that_are_used_again_are_kept(fake):
    """... also where arrays come in a layout that has been checked before."""
    api = fake()
    s = Session(of_rows(), "gpu")
    arrays = {rows: FakeArray(api, x_of(rows)) for rows in range(2, RECENT + 3)}
    for rows in range(2, RECENT + 3):
        s.run(None, {"x": arrays[2]})
        s.run(None, {"x": arrays[rows]})
    kept = {sizes for _, sizes in s._members}
    assert (2,) in kept and (3,) not in kept and len(kept) == RECENT


def test_a_members_graph_is_that_of_another_one(fake):
    """Nothing is loaded, added, instantiated or allocated for the shapes that come, and known shapes are told nothing."""
    api = fake()
    s = Session(of_rows(), "gpu")
    api.calls.clear()
    for rows in range(2, 41):
        same(s.run(["y"], {"x": x_of(rows)}), expected(x_of(rows))[:1])
    assert not {"cuGraphInstantiateWithParams", "cuMemAlloc", "cuMemHostAlloc"} & {*api.calls}
    assert not {"cuGraphCreate", "cuGraphAddKernelNode", "cuModuleLoadData", "cuModuleGetFunction"} & {*api.calls}
    api.log.clear()
    for rows in (40, 39, 40, 39):
        same(s.run(None, {"x": x_of(rows)}), expected(x_of(rows)))
    assert [what for what, *_ in api.log].count("set") == 0
    s.close()
    assert not api.blocks and not api.modules and not api.graphs


@pytest.fixture(params=[1, 0], ids=["pools", "no pools"])
def pooled(fake, request):
    """A driver that has pools of memory, and one that has none."""

    def install():
        api = fake()
        api.attributes["MEMORY_POOLS_SUPPORTED"] = request.param
        return api

    return install


TAKES = {"cuMemAlloc", "cuMemFree", "cuMemAllocFromPoolAsync", "cuMemFreeAsync", "cuEventCreate"}


def test_outputs_of_other_sizes_have_the_same_memory(pooled):
    """... on a GPU: of about as many bytes, if nobody holds what had it."""
    api = pooled()
    with Session(of_rows(), "gpu") as s:
        arrays = {rows: FakeArray(api, x_of(rows)) for rows in range(2, 41)}
        made = [s.run(["y"], {"x": arrays[rows]})[0].memory for rows in (2, 22, 40)]
        assert [memory.size for memory in made] == [256, 512, 512] and made[1] is made[2]
        for _ in range(2):
            api.calls.clear()
            for rows in range(2, 41):
                same(s.run(None, {"x": arrays[rows]}), expected(x_of(rows)))
        assert not TAKES & {*api.calls}
    assert [length(1 << n) for n in range(10, 30)] == [1 << n for n in range(10, 30)]
    assert length(1_000_001) == 1_048_576 and length(1_100_000) == 1_179_648


def test_new_lengths_of_outputs_wait_for_nothing(fake):
    """... of a plan for ranges: the pool has had its memory from the start, and takes it back in the stream's order"""
    api = fake()
    with Session(of_rows(), "gpu") as s:
        arrays = {rows: FakeArray(api, x_of(rows)) for rows in range(2, 41)}
        held = len(api.blocks)
        api.calls.clear()
        for rows in (2, 40):
            same(s.run(None, {"x": arrays[rows]}, stream=7), expected(x_of(rows)))
        assert api.calls.count("cuMemAllocFromPoolAsync") == 4  # two lengths of each
        assert not {"cuMemAlloc", "cuMemFree", "cuCtxSynchronize"} & {*api.calls} and len(api.blocks) == held + 4
        y = s.run(["y"], {"x": arrays[40]}, stream=7)[0]
    assert ("take", 7) in api.log and s._platform._room.outputs.kept == room.LEAST
    assert not api.pools and y.memory.address in api.blocks  # it outlives the session
    api.calls.clear()
    del y
    done = [call for call in api.calls if call in ("cuCtxSynchronize", "cuMemFree")]
    assert done == ["cuCtxSynchronize", "cuMemFree"]  # the driver does not wait for those who may still read it
    assert len(api.blocks) == len(arrays)


def test_of_outputs_of_many_lengths_some_are_kept(pooled):
    """... those that were used last, in so many bytes; others are given back, and what is held counts"""
    api = pooled()
    kept = outputs.Outputs(open_device(), 4096)

    def made(size, stream=7):
        """Whether memory had to be made for an output, which nobody holds then."""
        before = api.calls.count("cuMemAlloc") + api.calls.count("cuMemAllocFromPoolAsync")
        output, spare = kept.take("y", size, stream)
        spare.append(output)
        return api.calls.count("cuMemAlloc") + api.calls.count("cuMemAllocFromPoolAsync") > before

    assert [made(size) for size in (1024, 2048, 512, 1024, 512, 1024)] == [True] * 3 + [False] * 3
    assert made(1280) and len(api.blocks) == 3  # in the place of the one of 2048 bytes
    assert [made(size) for size in (1024, 512, 1280, 2048)] == [False] * 3 + [True]
    assert sorted(size for (_, size, _), spare in kept._spare.items() if spare) == [512, 1280, 2048]
    held = kept.take("z", 4096, 7)
    assert len(api.blocks) == 1
    assert made(256, 8) and made(256, 8) is False and made(512, 8) and len(api.blocks) == 2
    del held
    assert made(4096, 7) and len(api.blocks) == 1 and kept._used == 4096
    kept.close()
    assert not api.blocks and not api.pools


def test_a_pool_that_cannot_grow(fake):
    """A session opens without the memory that it would have from the start; an inference names what there is no room for"""
    api = fake()
    api.failures["cuMemAllocFromPoolAsync"] = OUT_OF_MEMORY
    with Session(of_rows(), "gpu") as s:
        x = FakeArray(api, x_of(5))
        with pytest.raises(LaunchError, match=r"cannot allocate 0.0 MiB for output 'y': .* are free on Fake GPU"):
            s.run(None, {"x": x})
        api.failures.clear()
        same(s.run(None, {"x": x}), expected(x_of(5)))


def test_new_sizes_do_not_wait_for_what_is_queued(fake):
    """On a stream, more sizes than a session keeps: what was queued of a size that has gone runs as it was told"""
    api = fake()
    with Session(of_rows(), "gpu") as s:
        arrays = {rows: FakeArray(api, x_of(rows)) for rows in range(2, 41)}
        api.calls.clear()
        for rows in range(2, 41):
            s.run(None, {"x": arrays[rows]}, stream=7)
        assert not {"cuEventSynchronize", "cuStreamSynchronize", "cuCtxSynchronize"} & {*api.calls}
        api.calls.clear()
    assert api.calls.index("cuEventSynchronize") < api.calls.index("cuGraphExecDestroy")


def test_threads_with_sizes_in_turn(fake):
    """... each more than a session keeps: every one gets what is its own, and nothing is left"""
    api = fake()
    with Session(of_rows(), "gpu") as s, ThreadPoolExecutor(16) as threads:

        def work(seed):
            for rows in np.random.default_rng(seed).integers(2, 41, 12).tolist():
                same(s.run(None, {"x": seed + x_of(rows)}), expected(seed + x_of(rows)))

        list(threads.map(work, range(16)))
        assert len(s._members) == RECENT
    assert not api.blocks and not api.modules and not api.graphs


def test_graphs_have_run_and_host_memory_is_there_before_the_first_inference(fake):
    """... since the driver loads code, and takes memory, when these are first used"""
    api = fake()
    s = Session(of_rows(), "gpu")
    assert api.calls.count("cuGraphLaunch") == 1 and api.calls.count("cuMemHostAlloc") == 1
    api.calls.clear()
    same(s.run(None, {"x": x_of(40)}), expected(x_of(40)))
    assert not {"cuMemAlloc", "cuMemHostAlloc", "cuGraphInstantiateWithParams"} & set(api.calls)


@pytest.mark.parametrize("ahead", [True, False])
def test_tensor_maps_of_members(fake, ahead, monkeypatch):
    """A map's address is that in the member's own table, and its extents are the member's: of few sizes from the start"""
    monkeypatch.setattr("tccompile.runtime.family.AHEAD", 2 * 39 if ahead else 2 * 39 - 1)
    seen: list[tuple[int, int]] = []
    api = fake()

    def scale(h, y, factor, count):
        encoded = ctypes.c_uint64.from_address(h).value  # which of all that have been encoded
        seen.append((h, api.maps[encoded - 1][1][3][-1]))

    api.kernels = {**KERNELS, "tc_scale": (KERNELS["tc_scale"][0], scale)}

    def mapped(own, rows):
        m = Map("tiled", DType.F32, Address("arena", "", 256), (4, rows), (16,), (1, 1), 0, (4, 8))
        fixed = replace(m, extents=(4, 2))  # the same for the least sizes alone
        return told(told(own, 1, 0, m), 2, 0, fixed)

    s = Session(of_rows(mapped), "gpu")
    made = len(api.maps)
    tables = {}
    for rows in (2, 9, 5, 9):
        s.run(None, {"x": x_of(rows)})
        (first, height), (second, other) = seen[-2:]
        assert abs(first - second) == 128 and {height, other} == {rows, 2}
        tables.setdefault(rows, min(first, second))
        assert tables[rows] == min(first, second)
    assert len({*tables.values()}) == 3
    assert len(api.maps) - made == (0 if ahead else 3)


def test_corners_of_maps_by_im2col_are_a_members_own(fake):
    """With strides the last window begins further from an image's edge or less far, as the stride meets the size"""
    api = fake()

    def mapped(own, rows):
        m = of_windows((rows - 3) // 2 * 2 - (rows - 1))
        return told(told(own, 1, 0, m), 2, 0, m)

    s = Session(of_rows(mapped), "gpu")
    assert s._platform._families[0]._bounds.proven
    seen: list[int] = []
    api.kernels = {**KERNELS, "tc_scale": (KERNELS["tc_scale"][0], lambda h, *args: seen.append(h))}
    for rows, last in ((9, -2), (10, -3), (9, -2)):
        s.run(None, {"x": x_of(rows)})
        encoded = ctypes.c_uint64.from_address(seen[-1]).value  # which of all that have been encoded
        assert api.maps[encoded - 1][1][6] == [last, 1]


def test_shared_memory_is_a_members_own(fake):
    """Of launches that ask for more of it at greater sizes: the code may have the most, each launch has its own"""
    api = fake()

    def growing(own, rows):
        (launch,) = own.steps[1].launches
        grown = replace(own.steps[1], launches=(replace(launch, smem=50_000 + 256 * rows),))
        return replace(own, steps=(own.steps[0], grown, own.steps[2]))

    with Session(of_rows(growing), "gpu") as s:
        assert max(api.limits.values()) == 50_000 + 256 * 40
        for rows in (30, 3):
            same(s.run(None, {"x": x_of(rows)}), expected(x_of(rows)))
            graph = api.graphs[s._members[0, (rows,)]._exec.instance.value]
            assert [launch[2] for *_, launch in graph] == [50_000, 50_000 + 256 * rows, 50_000]


def test_what_numbers_are_at_all_sizes_proves_rules_that_their_formulas_alone_do_not(fake):
    """Of a quotient of two that grow together: then no size that comes is looked at"""
    fake()

    def growing(own, rows):
        (launch,) = own.steps[1].launches
        grown = replace(own.steps[1], launches=(replace(launch, smem=50_000 + 256 * (rows // least(rows, 5))),))
        return replace(own, steps=(own.steps[0], grown, own.steps[2]))

    with Session(of_rows(growing), "gpu") as s:
        assert s._platform._families[0]._bounds.proven
        same(s.run(None, {"x": x_of(30)}), expected(x_of(30)))


def test_arrays_for_outputs_are_made_while_the_gpu_works(fake, monkeypatch):
    """... since their pages take longer than the copies that would wait for them"""
    api = fake()
    monkeypatch.setattr(gpu, "touched", lambda new: (api.log.extend(("made", t.shape) for t in new), touched(new))[1])
    with Session(of_rows(), "gpu") as s:
        api.log.clear()
        same(s.run(None, {"x": x_of(30)}), expected(x_of(30)))
        done = [what for what, *_ in api.log]
        assert done[-1] == "synchronize" and done.index("launch") < done.index("made") and done.count("made") == 2


@pytest.mark.parametrize("most", [1, 1 << 30])
def test_pages_of_new_arrays_are_there(monkeypatch, most):
    """... by several threads, and by this one: nothing that is written then makes the system wait"""
    names = list[str]()
    monkeypatch.setattr(room, "MANY", most)
    monkeypatch.setattr(
        room, "_touch", lambda part, said=room._touch: (names.append(threading.current_thread().name), said(part))
    )
    shapes = [(3, 1 << 20), (5, 7), (), (0, 4)]
    tensors = [dense(f"y{i}", shape, DType.F32) for i, shape in enumerate(shapes)]
    arrays = touched(tensors)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    arrays[0][:] = 1
    assert resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before < 100  # of 3072
    assert [a.shape for a in arrays] == shapes and {a.dtype for a in arrays} == {np.dtype(np.float32)}
    assert (threading.current_thread().name in names) == (most > 1) and len(names) == 14


def test_pinned_memory_is_for_the_smallest_arrays(fake, monkeypatch):
    """... up to so many bytes, which are there from the start; others are copied from and to where they lie"""
    api = fake()
    monkeypatch.setattr(room, "PINNED", 512)
    with Session(of_rows(), "gpu") as s:
        pinned = s._platform._room._pinned
        assert pinned.size == 512
        api.calls.clear()
        for rows in (40, 3, 40):
            same(s.run(None, {"x": x_of(rows)}), expected(x_of(rows)))
        assert "cuMemHostAlloc" not in api.calls
        places = s._members[0, (3,)]._staging._places
        assert [where for _, where in places.values()] == [0, 256, None]
        assert [where for _, where in s._members[0, (40,)]._staging._places.values()] == [0, None, None]


def test_staged_memory_is_for_what_needs_it(pooled):
    """... on the device: of the arrays that come from the host or go there, and it grows with what comes, for all sizes"""
    api = pooled()
    with Session(of_rows(), "gpu") as s:
        shared = s._platform._room
        assert (shared._staged is None) == bool(api.attributes["MEMORY_POOLS_SUPPORTED"])  # then it takes microseconds
        x, y = FakeArray(api, x_of(40)), np.empty((40, 3), np.float32)
        same(s.run(None, {"x": x}, outputs={"y": y}), expected(x_of(40)))
        assert list(s._members[0, (40,)]._staging._places) == ["y"]
        assert shared._staged.size == (512 if shared.outputs.pooled else 1536)
        held = len(api.blocks)
        for stream, rows in ((None, 2), (7, 40), (None, 2), (8, 21), (None, 40)):
            same(s.run(None, {"x": x_of(rows)}, stream=stream), expected(x_of(rows)))
        assert shared._staged.size >= 3 * 480 and len(api.blocks) == held


def test_large_arrays_are_copied_from_and_to_where_they_lie(fake, monkeypatch):
    """... without host memory of ours, unless they lie there in another order or with other bytes first"""
    monkeypatch.setattr(room, "DIRECT", 512)
    api = fake()
    copies = []
    copied = api.cuMemcpyHtoDAsync
    api.cuMemcpyHtoDAsync = lambda to, source, size, stream: copies.append(source) or copied(to, source, size, stream)[1]
    api.cuMemcpyDtoHAsync = lambda to, source, size, stream: copies.append(to) or copied(to, source, size, stream)[1]
    with Session(of_rows(), "gpu") as s:
        assert s._members == {} and s._platform._room._pinned.size == 3 * 512
        for rows in (40, 3):
            x, want, direct = x_of(rows), expected(x_of(rows)), rows == 40
            y, z = np.empty_like(x), np.empty((rows, 3), np.float32)
            copies.clear()
            same(s.run(None, {"x": x}, outputs={"y": y, "z": z}), want)
            assert [a.ctypes.data in copies for a in (x, y, z)] == [direct] * 3
            turned, others = np.empty((3, rows), np.float32).T, np.empty((rows, 3), ">f4")
            copies.clear()
            same(s.run(None, {"x": x.astype(">f4")}, outputs={"y": turned, "z": others}), want)
            same(s.run(["z"], {"x": np.asfortranarray(x)}), want[1:])
            assert not {turned.ctypes.data, others.ctypes.data} & {*copies}
    with Session(of_rows(), "gpu") as s:
        api.failures["cuMemcpyDtoHAsync"] = ILLEGAL_ADDRESS
        with pytest.raises(LaunchError, match=r"running toy on Fake GPU .* failed: cuMemcpyDtoHAsync"):
            s.run(None, {"x": x_of(40)})


def test_nodes_whose_numbers_no_size_decides_are_told_nothing(fake):
    """... but where inputs and outputs lie; also if tensor maps are among what they are told, each graph having its own"""
    api = fake()

    def half_fixed(own, rows):
        own = told(own, 1, 3, Int(6))
        return told(own, 1, 1, Address("arena", "", 768))

    with Session(of_rows(half_fixed), "gpu") as s:
        for rows, count in ((30, 2), (4, 2), (30, 0)):
            api.log.clear()
            same(s.run(["z"], {"x": x_of(rows)}), expected(x_of(rows))[1:])
            assert [what for what, *_ in api.log].count("set") == count


def test_grids_of_members(fake):
    """... of which those whose blocks all run at once are no larger than the GPU, also after a larger member"""
    api = fake()

    def growing(own, rows):
        (launch,) = own.steps[1].launches
        grown = replace(own.steps[1], launches=(replace(launch, grid=(10 * rows, rows, 1), cooperative=True),))
        return replace(own, steps=(own.steps[0], grown, own.steps[2]))

    with Session(of_rows(growing), "gpu") as s:
        for rows, blocks in ((40, 2 * 54), (3, 30), (10, 100), (11, 108)):
            same(s.run(None, {"x": x_of(rows)}), expected(x_of(rows)))
            graph = api.graphs[s._members[0, (rows,)]._exec.instance.value]
            assert [launch[0] for *_, launch in graph][1] == blocks


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda own, rows: told(own, 1, 3, Int((rows - 2) * (40 - rows) * 3_000_000_000)), "more bits"),
        (lambda own, rows: told(own, 1, 0, of_windows((rows - 2) * (40 - rows))), "more bits"),
        (lambda own, rows: told(own, 1, 0, Address("arena", "", (rows - 2) * (40 - rows) * 100)), "outside"),
        (lambda own, rows: told(own, 1, 1, Address("io", "y", (rows - 2) * (40 - rows) * 100)), "outside"),
    ],
)
def test_members_that_leave_memory_are_refused(fake, change, message):
    """Numbers that are right at the least and the greatest sizes, and wrong in between"""
    fake()
    ranged = of_rows(change)
    s = Session(ranged, "gpu")
    with pytest.raises(PlanError, match=message):
        s.run(None, {"x": x_of(20)})


def test_single_sizes_are_loaded_when_the_session_is_opened_and_share_the_room(fake):
    api = fake()
    ranged = of_rows()
    alone = Entry(program(1), (section("sm_80", 1, (0, 1)),))
    with Session(replace(ranged, entries=(alone, *ranged.entries)), "gpu") as s:
        api.calls.clear()
        same(s.run(None, {"x": x_of(1)}), expected(x_of(1)))
        same(s.run(None, {"x": x_of(30)}), expected(x_of(30)))
        assert "cuGraphCreate" not in api.calls and s._engines[0].room is s._members[0, (30,)].room
