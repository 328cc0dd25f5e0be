"""The session and the GPU engine, on a driver made of host memory; and what `import tccompile` costs."""

from __future__ import annotations

import ctypes
import gc
import json
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import tccompile
from tccompile.errors import DeviceError, InputError, LaunchError, PlanError, UsageError, VerificationError
from tccompile.ir.expr import Epilogue, broadcast_view, call, identity_view, load
from tccompile.ir.ops import Pointwise
from tccompile.ir.program import Program
from tccompile.ir.tensor import dense
from tccompile.ir.types import DType
from tccompile.ir.weights import Literal
from tccompile.plan.file import Plan, read_plan
from tccompile.plan.format import Address, Entry, Float, Int, Map, PlacedLaunch, Section, Step
from tccompile.runtime import driver as driver_module
from tccompile.runtime import room
from tccompile.runtime.arrays import IO_ALIGN, KEPT, DeviceArray, _Tensor
from tccompile.runtime.driver import Driver, open_device
from tccompile.runtime.session import Session
from tests.runtime.fake_driver import ILLEGAL_ADDRESS, NO_DEVICE, OUT_OF_MEMORY, FakeApi, FakeArray, floats
from tests.small import image

P, I32, F32 = ctypes.c_uint64, ctypes.c_int32, ctypes.c_float


def _add(x: int, w: int, h: int, count: int) -> None:
    floats(h, count)[:] = floats(x, count) + np.tile(floats(w, 3), count // 3)


def _scale(h: int, y: int, factor: float, count: int) -> None:
    floats(y, count)[:] = floats(h, count) * np.float32(factor)


KERNELS = {"tc_add": ((P, P, P, I32), _add), "tc_scale": ((P, P, F32, I32), _scale)}
WEIGHT = np.array([1.0, 10.0, 100.0], np.float32)


def program(rows: int) -> Program:
    """h = x + w; y = 2 h; z = -h"""
    shape = (rows, 3)
    tensors = {n: dense(n, shape, DType.F32, pad=1) for n in "xhyz"} | {"w": dense("w", (3,), DType.F32, pad=1)}
    x, h = identity_view("x", 2), identity_view("h", 2)
    ops = (
        Pointwise(
            nodes=("Add_0",), y="h", epilogue=Epilogue(call("add", load(0), load(1)), (x, broadcast_view("w", (3,), shape)))
        ),
        Pointwise(nodes=("Mul_1",), y="y", epilogue=Epilogue(call("mul", load(0), 2.0), (h,))),
        Pointwise(nodes=("Neg_2",), y="z", epilogue=Epilogue(call("neg", load(0)), (h,))),
    )
    return Program(("x",), ("y", "z"), tensors, {"w": Literal(WEIGHT)}, ops)


def section(arch: str, rows: int, images: tuple[int, int]) -> Section:
    def step(op: int, image: int, args: tuple, after: tuple[int, ...]) -> Step:
        return Step(op, "toy", {}, False, "the only one", (PlacedLaunch(images[image], (1, 1, 1), 32, 50_000, args),), after)

    x, w, h = Address("io", "x", 0), Address("weights", "w", 0), Address("arena", "", 256)
    n = Int(3 * rows)
    steps = (
        step(0, 0, (x, w, h, n), ()),
        step(1, 1, (h, Address("io", "y", 0), Float(2.0), n), (0,)),
        step(2, 1, (h, Address("io", "z", 0), Float(-1.0), n), (0,)),
    )
    return Section(arch, steps, {"h": 256}, 512, 64)


def plan(archs: tuple[tuple[str, str], ...] = (("sm_80", "cubin"),), rows: tuple[int, ...] = (2,)) -> Plan:
    """One entry for each number of rows; each has a section for each of (generation, "cubin" or "ptx")."""
    images = tuple(image(a, kind, f) for a, kind in archs for f in ("tc_add", "tc_scale"))
    entries = tuple(Entry(program(r), tuple(section(a, r, (2 * i, 2 * i + 1)) for i, (a, _) in enumerate(archs))) for r in rows)
    return Plan("toy", {}, entries, images, {"w": WEIGHT.tobytes()})


def x_of(rows: int = 2) -> np.ndarray:
    return np.random.default_rng(rows).standard_normal((rows, 3)).astype(np.float32)


def expected(x: np.ndarray) -> list[np.ndarray]:
    return [2 * (x + WEIGHT), -(x + WEIGHT)]


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Callable[..., FakeApi]:
    """Puts a fake driver in place."""

    def install(**how) -> FakeApi:
        api = FakeApi(KERNELS, **how)
        cu = Driver(api)
        monkeypatch.setattr(driver_module, "driver", lambda: cu)
        monkeypatch.setattr(driver_module, "_devices", type(driver_module._devices)())
        return api

    return install


def same(got: list, want: list) -> None:
    assert len(got) == len(want)
    for a, b in zip(got, want, strict=True):
        np.testing.assert_array_equal(np.asarray(a), b)


# --- Running ---------------------------------------------------------------------------------------------------------


def test_the_same_on_the_gpu_and_the_cpu(fake):
    fake()
    for device in ("gpu", "gpu:0", "auto", "cpu"):
        with Session(plan(), device) as session:
            same(session.run(None, {"x": x_of()}), expected(x_of()))
            same(session.run(["z"], {"x": x_of()}), expected(x_of())[1:])
            assert session.device == ("cpu" if device == "cpu" else "gpu:0")
            x = session.get_inputs()[0]
            assert (x.name, x.shape, x.type, x.dtype) == ("x", (2, 3), "tensor(float)", np.float32)
            assert [y.name for y in session.get_outputs()] == ["y", "z"]


def test_entries_of_other_ranks():
    """Of an input whose rank the model leaves open, too, a session says what is known."""
    shapes = (2,), (2, 3)
    entries = []
    for shape in shapes:
        tensors = {n: dense(n, shape, DType.F32, pad=1) for n in "xy"}
        op = Pointwise(nodes=("Neg",), y="y", epilogue=Epilogue(call("neg", load(0)), (identity_view("x", len(shape)),)))
        steps = (Step(0, "toy", {}, False, "the only one", (), ()),)
        entries.append(Entry(Program(("x",), ("y",), tensors, {}, (op,)), (Section("sm_80", steps, {}, 0, 0),)))
    with Session(Plan("toy", {}, tuple(entries), (), {}), device="cpu") as session:
        (x,), (y,) = session.get_inputs(), session.get_outputs()
        assert x.shape is None and y.shape is None
        for shape in shapes:
            same(session.run(None, {"x": np.ones(shape, np.float32)}), [-np.ones(shape)])


def test_bits_of_bf16_in_another_order_of_bytes():
    tensors = {n: dense(n, (2,), t, pad=1) for n, t in (("x", DType.BF16), ("y", DType.F32))}
    op = Pointwise(nodes=("Cast",), y="y", epilogue=Epilogue(load(0), (identity_view("x", 1),)))
    steps = (Step(0, "toy", {}, False, "the only one", (), ()),)
    entry = Entry(Program(("x",), ("y",), tensors, {}, (op,)), (Section("sm_80", steps, {}, 0, 0),))
    with Session(Plan("toy", {}, (entry,), (), {}), device="cpu") as session:
        for order in "<>":
            same(session.run(None, {"x": np.array([0x3F80, 0x4000], f"{order}u2")}), [np.float32([1, 2])])


def test_a_tensor_map_that_the_driver_refuses(fake):
    api = fake()
    api.failures["cuTensorMapEncodeTiled"] = ILLEGAL_ADDRESS
    whole = plan()
    entry = whole.entries[0]
    steps = list(entry.sections[0].steps)
    launch = steps[0].launches[0]
    tensor_map = Map("tiled", DType.F16, Address("arena", "", 0), (8, 2), (16,), (1, 1), 0, (8, 2))
    steps[0] = replace(steps[0], launches=(replace(launch, args=(*launch.args, tensor_map)),))
    entry = replace(entry, sections=(replace(entry.sections[0], steps=tuple(steps)),))
    with pytest.raises(LaunchError, match="cuTensorMapEncodeTiled: CUDA_ERROR_ILLEGAL_ADDRESS"):
        Session(replace(whole, entries=(entry,)), device="gpu")


def test_blocks_that_run_at_once_are_no_more_than_the_gpu_has_room_for(fake):
    api = fake()
    (entry,) = plan().entries
    (part,) = entry.sections
    for wanted, given in ((107, 107), (200, 108)):  # 54 multiprocessors with two blocks each
        steps = tuple(
            replace(step, launches=(replace(step.launches[0], grid=(wanted, 1, 1), cooperative=step.op == 1),))
            for step in part.steps
        )
        session = Session(replace(plan(), entries=(replace(entry, sections=(replace(part, steps=steps),)),)), "gpu")
        same(session.run(None, {"x": x_of()}), expected(x_of()))
        nodes = [node for graph in api.graphs.values() for node in graph]
        assert {launch[0] for handle, *_, launch in nodes if handle in api.together} == {given}
        assert {launch[0] for handle, *_, launch in nodes if handle not in api.together} == {wanted}
        once = len(api.together)
        session.profile(3, {"x": x_of()})
        assert len(api.together) == once + 2  # in the graphs that time each step, and all of them, too
        session.close()
        api.graphs.clear()


@pytest.mark.parametrize(
    ("version", "starts"), [(13000, (False, True, True)), (13000, (True, False, True)), (12020, (True,) * 3)]
)
def test_launches_that_wait_themselves_start_early(fake, version, starts):
    """By programmatic edges, where the driver has them, and between launches only"""
    api = fake(version=version)
    (entry,) = plan().entries
    (part,) = entry.sections
    steps = tuple(replace(s, launches=(replace(s.launches[0], early=e),)) for s, e in zip(part.steps, starts, strict=True))
    session = Session(replace(plan(), entries=(replace(entry, sections=(replace(part, steps=steps),)),)), "gpu")
    (nodes,) = {tuple(node[0] for node in graph) for graph in api.graphs.values()}
    want = [(nodes[0], nodes[i]) for i in (1, 2) if starts[i] and version > 12020]
    assert api.early == want
    for _ in range(2):
        same(session.run(None, {"x": x_of()}), expected(x_of()))
    session.profile(3, {"x": x_of()})  # one after the other: between events, and without
    assert len(api.early) == len(want) + (sum(starts[1:]) if version > 12020 else 0)  # not those between events
    same(session.run(None, {"x": x_of()}), expected(x_of()))


def test_host_arrays_of_any_strides(fake):
    fake()
    session = Session(plan(), "gpu")
    wide = np.random.default_rng(0).standard_normal((3, 4)).astype(np.float32)
    same(session.run(None, {"x": wide.T[::2]}), expected(wide.T[::2]))
    read_only = x_of()
    read_only.flags.writeable = False
    same(session.run(None, {"x": read_only}), expected(read_only))


def test_outputs_into_given_arrays(fake):
    fake()
    for device in ("gpu", "cpu"):
        session = Session(plan(), device)
        y, z = np.zeros((3, 2), np.float32).T, np.zeros((2, 3), np.float32)
        got = session.run(None, {"x": x_of()}, outputs={"y": y, "z": z})
        assert got[0] is y and got[1] is z
        same([y, z], expected(x_of()))


def test_device_arrays_are_read_and_written_in_place(fake):
    api = fake()
    session = Session(plan(), "gpu")
    x, y = FakeArray(api, x_of()), FakeArray(api, np.zeros((2, 3), np.float32))
    before = len(api.blocks)
    got = session.run(None, {"x": x}, outputs={"y": y})
    assert got[0] is y
    same([y.numpy(), got[1]], expected(x_of()))
    assert not any(entry[0] == "copy" for entry in api.log)
    assert len(api.blocks) == before + 1  # z's
    assert got[1].__dlpack_device__() == (2, 0) and got[1].__cuda_array_interface__["shape"] == (2, 3)


def test_outputs_that_overlap_are_refused(fake):
    fake()
    room = np.zeros(12, np.float32)
    whole, shifted = room[:6].reshape(2, 3), room[3:9].reshape(2, 3)
    every_other, between = room[::2].reshape(2, 3), room[1::2].reshape(2, 3)
    stacked = np.lib.stride_tricks.as_strided(room, (2, 3), (4, 4))
    for device in ("gpu", "cpu"):
        with Session(plan(), device) as session:
            with pytest.raises(InputError, match="output 'z' and output 'y' overlap in memory"):
                session.run(None, {"x": x_of()}, outputs={"y": whole, "z": shifted})
            with pytest.raises(InputError, match="output 'y': elements of the array lie in the same memory"):
                session.run(None, {"x": x_of()}, outputs={"y": stacked})
            same(session.run(None, {"x": x_of()}, outputs={"y": every_other, "z": between}), expected(x_of()))
            same(session.run(None, {"x": x_of()}, outputs={"y": whole, "z": whole[::-1] + 0}), expected(x_of()))


def test_on_the_host_an_output_may_take_the_place_of_an_input(fake):
    fake()
    for device in ("gpu", "cpu"):
        room = np.zeros(9, np.float32)
        room[:6] = x_of().ravel()
        x, y = room[:6].reshape(2, 3), room[2:8].reshape(2, 3)
        with Session(plan(), device) as session:
            same(session.run(None, {"x": x}, outputs={"y": y}), expected(x_of()))


def test_on_the_gpu_an_output_must_not_overlap_another_array(fake):
    api = fake()
    room = FakeArray(api, np.zeros((5, 3), np.float32))
    address = room.__cuda_array_interface__["data"][0]

    def part(row: int) -> FakeArray:
        out = FakeArray(api, x_of())
        out.__cuda_array_interface__ |= {"data": (address + 12 * row, False)}
        return out

    with Session(plan(), "gpu") as session:
        for feeds, outputs, message in (
            ({"x": part(0)}, {"y": part(1)}, "output 'y' and input 'x' overlap"),
            ({"x": part(0)}, {"z": part(0)}, "output 'z' and input 'x' overlap"),
            ({"x": x_of()}, {"z": part(0), "y": part(1)}, "output 'y' and output 'z' overlap"),
        ):
            with pytest.raises(InputError, match=message):
                session.run(None, feeds, outputs=outputs)
        got = session.run(None, {"x": FakeArray(api, x_of())}, outputs={"y": part(0), "z": part(2)})
        same([a.numpy() for a in got], expected(x_of()))


def test_addresses_are_set_only_when_they_change(fake):
    api = fake()
    session = Session(plan(), "gpu")
    x, y, z = (FakeArray(api, v) for v in (x_of(), *expected(x_of())))
    session.run(None, {"x": x}, outputs={"y": y, "z": z})
    api.log.clear()
    session.run(None, {"x": x}, outputs={"y": y, "z": z}, stream=7)
    assert [e[0] for e in api.log if e[0] in ("set", "launch", "copy", "synchronize")] == ["launch"]
    other = FakeArray(api, x_of() + 1)
    api.log.clear()
    session.run(None, {"x": other}, outputs={"y": y, "z": z}, stream=7)
    assert [e[0] for e in api.log].count("set") == 1
    same([y.numpy(), z.numpy()], expected(x_of() + 1))


@pytest.mark.parametrize(
    ("stream", "given", "wanted"),
    [
        (None, True, ["cuCtxPushCurrent", "cuGraphLaunch", "cuStreamSynchronize", "cuCtxPopCurrent"]),
        (7, True, ["cuCtxPushCurrent", "cuGraphLaunch", "cuEventRecord", "cuCtxPopCurrent"]),
        # an event, for whoever reads the outputs
        (7, False, ["cuCtxPushCurrent", "cuGraphLaunch", *["cuEventRecord"] * 2, "cuCtxPopCurrent"]),
    ],
)
def test_what_an_inference_asks_of_the_driver(fake, stream, given, wanted):
    """Once it has run: no allocation, no event made, no node set, one change of the context"""
    api = fake()
    session = Session(plan(), "gpu")
    x, y, z = (FakeArray(api, v) for v in (x_of(), *expected(x_of())))
    outputs = {"y": y, "z": z} if given else None
    session.run(None, {"x": x}, outputs=outputs, stream=stream)
    api.calls.clear()
    got = session.run(None, {"x": x}, outputs=outputs, stream=stream)
    assert api.calls == wanted
    same([y.numpy(), z.numpy()] if given else got, expected(x_of()))


def test_memory_of_outputs_is_used_again(fake):
    """... unless somebody may still read it: on a stream that does not come before the next inference"""
    api = fake()
    session = Session(plan(), "gpu")
    x = FakeArray(api, x_of())

    def run(stream: int | None, session: Session = session) -> DeviceArray:
        return session.run(["y"], {"x": x}, stream=stream)[0]

    def address(y: DeviceArray) -> int:
        return y.memory.address

    y = run(None)
    first = address(y)
    kept = run(None)
    assert address(kept) != first  # it is still held
    torch = y.__dlpack__(stream=1)  # the legacy default stream, which the session's own waits for
    del y
    assert address(run(None)) not in (first, address(kept))
    del torch
    assert address(run(None)) == first
    for seen in (lambda y: y.__dlpack__(stream=5), lambda y: y.__dlpack__(stream=-1), lambda y: y.__cuda_array_interface__):
        y = run(None)
        where = address(y)
        seen(y)
        del y
        assert where not in api.blocks
    y = run(7)
    where = address(y)
    y.__dlpack__(stream=7)
    del y
    other = run(8)
    assert address(other) != where and address(run(7)) == where
    assert ("wait", 8) in api.log
    many = [run(7) for _ in range(20)]
    held = len(api.blocks)
    del many
    assert len(api.blocks) == held - (20 - KEPT)
    session.close()
    del session, run, kept, other
    gc.collect()
    assert len(api.blocks) == 1  # x


def test_a_librarys_own_table_of_functions(fake):
    """DLPack's exchange table, which PyTorch has: no capsules, and its current stream is waited for"""
    api = fake()
    session = Session(plan(), "gpu")
    own = int(session._engines[0].stream.value)
    works_on = [0]

    def describe(array, tensor: int) -> int:
        data = array.held.__cuda_array_interface__["data"][0]
        described = _Tensor(data, 2, 0, 2, 2, 32, 1, ctypes.addressof(array.shape), None, 0)
        ctypes.memmove(tensor, ctypes.addressof(described), ctypes.sizeof(_Tensor))
        return 0

    def current(device_type: int, device: int, stream: int) -> int:
        assert (device_type, device) == (2, 0)
        ctypes.c_void_p.from_address(stream).value = works_on[0]
        return 0

    functions = (
        ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.c_void_p)(describe),
        ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_int32, ctypes.c_int32, ctypes.c_void_p)(current),
    )
    pointers = [ctypes.cast(f, ctypes.c_void_p).value for f in functions]
    table = (ctypes.c_uint64 * 7)(1 | 3 << 32, 0, 0, 0, 0, *pointers)
    new = ctypes.pythonapi.PyCapsule_New
    new.restype, new.argtypes = ctypes.py_object, (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)

    class Tensor:
        __dlpack_c_exchange_api__ = new(ctypes.addressof(table), b"dlpack_exchange_api", None)

        def __init__(self, values: np.ndarray):
            self.held = FakeArray(api, values)
            self.shape = (ctypes.c_int64 * 2)(*values.shape)

        def __dlpack_device__(self):
            raise AssertionError("the table comes first")

        __dlpack__ = __dlpack_device__

    for works_on[0], waited in ((0, False), (5, True)):
        api.log.clear()
        x, y = Tensor(x_of()), Tensor(np.zeros((2, 3), np.float32))
        assert session.run(["y"], {"x": x}, outputs={"y": y}) == [y]
        same([y.held.numpy()], expected(x_of())[:1])
        assert ((("record", 5) in api.log) and ("wait", own) in api.log) == waited
    with pytest.raises(InputError, match="output 'y' has shape 2x3, got an array of shape 3x3"):
        session.run(["y"], {"x": x}, outputs={"y": Tensor(x_of(3))})


def test_misaligned_device_arrays_are_copied(fake):
    api = fake()
    session = Session(plan(), "gpu")
    x, y = FakeArray(api, x_of(), offset=4), FakeArray(api, np.zeros((2, 3), np.float32), offset=8)
    got = session.run(None, {"x": x}, outputs={"y": y})
    same([y.numpy(), got[1]], expected(x_of()))


def test_streams(fake):
    api = fake()
    session = Session(plan(), "gpu")
    own = int(session._engines[0].stream.value)
    x = FakeArray(api, x_of(), stream=5)
    session.run(None, {"x": x})
    order = [api.log.index(e) for e in (("record", 5), ("wait", own), ("launch", own), ("synchronize", own))]
    assert order == sorted(order)
    api.log.clear()

    class Torch:
        cuda_stream = 9

    class Protocol:
        def __cuda_stream__(self):
            return (0, 11)

    outs = session.run(None, {"x": FakeArray(api, x_of())}, stream=Torch())
    assert ("launch", 9) in api.log and ("synchronize", 9) not in api.log
    assert ("wait", 9) not in api.log  # the inference before is done
    assert outs[0].__cuda_array_interface__["stream"] == 9
    session.run(None, {"x": FakeArray(api, x_of())}, stream=Protocol())
    assert ("launch", 11) in api.log
    assert ("wait", 11) in api.log  # for the inference before, on another stream
    same(session.run(None, {"x": x_of()}, stream=13), expected(x_of()))  # host arrays: it waits
    assert ("synchronize", 13) in api.log
    with pytest.raises(InputError, match="is not a CUDA stream"):
        session.run(None, {"x": x_of()}, stream="fast")


def test_dlpack_out_and_in(fake):
    api = fake()
    session = Session(plan(), "gpu")
    y, _ = session.run(None, {"x": FakeArray(api, x_of())})
    got = session.run(["y"], {"x": y})[0]  # by DLPack, from where it lies
    same([got], [expected(expected(x_of())[0])[0]])
    held = len(api.blocks)
    capsule = y.__dlpack__(stream=-1)
    del y
    gc.collect()
    assert len(api.blocks) == held, "a capsule keeps the array"
    del capsule
    gc.collect()
    assert len(api.blocks) == held - 1
    with pytest.raises(BufferError):
        got.__dlpack__(dl_device=(1, 0))


class HostDLPack:
    """A host array that only speaks DLPack."""

    def __init__(self, values: np.ndarray):
        self.values = values

    def __dlpack__(self, **how):
        return self.values.__dlpack__()

    def __dlpack_device__(self):
        return self.values.__dlpack_device__()


def test_host_dlpack(fake):
    fake()
    for device in ("gpu", "cpu"):
        session = Session(plan(), device)
        same(session.run(None, {"x": HostDLPack(x_of().T.copy().T)}), expected(x_of()))
        target = HostDLPack(np.zeros((2, 3), np.float32))
        assert session.run(["z"], {"x": x_of()}, outputs={"z": target}) == [target]
        same([target.values], expected(x_of())[1:])


def test_entries_are_chosen_by_shape(fake):
    for device in ("gpu", "cpu"):
        api = fake()
        session = Session(plan(rows=(2, 5)), device)
        for rows in (5, 2, 5):
            same(session.run(None, {"x": x_of(rows)}), expected(x_of(rows)))
        assert session.get_inputs()[0].shape == (None, 3)
        with pytest.raises(InputError, match="no entry for x 4x3; it was compiled for x 2x3; or x 5x3"):
            session.run(None, {"x": x_of(4)})
        assert device == "cpu" or len(api.blocks) == 2 * 3 + 1  # arena, staging and pinned of each entry; weights


def test_sessions_share_weights_and_free_everything(fake):
    api = fake()
    one_plan = plan()
    a, b = Session(one_plan, "gpu"), Session(one_plan, "gpu")
    assert len(api.blocks) == 3  # two arenas, one copy of the weights
    assert len(api.modules) == 2
    a.run(None, {"x": x_of()})
    a.close()
    with pytest.raises(UsageError, match="closed"):
        a.run(None, {"x": x_of()})
    same(b.run(None, {"x": x_of()}), expected(x_of()))
    del a, b
    gc.collect()
    assert not api.blocks and not api.modules and not api.graphs and not api.stack
    assert api.log[-1] == ("release", 0)


def test_sessions_of_a_file_share_weights(fake, tmp_path):
    api = fake()
    path = tmp_path / "toy.plan"
    plan().save(path)
    a, b = Session(path, "gpu"), Session(str(path), "gpu")
    assert a.plan is b.plan and len(api.blocks) == 3
    plan(rows=(2, 5)).save(path)
    c = Session(path, "gpu")
    assert len(c.plan.entries) == 2 and len(api.blocks) == 5  # the new one's weights and arena
    same(c.run(None, {"x": x_of(5)}), expected(x_of(5)))
    del a, b, c
    gc.collect()
    assert not api.blocks


@pytest.mark.parametrize("how", ["cut off", "other weights", "empty", "replaced"])
@pytest.mark.parametrize("device", ["gpu", "cpu"])
def test_a_file_that_is_rewritten_under_a_session(fake, tmp_path, how, device):
    """What was loaded stays as it was, and what is loaded later is right or an error; a mapped file would end the process"""
    fake()
    path = tmp_path / "toy.plan"
    plan().save(path)
    later = read_plan(path)
    with Session(path, device) as session:
        same(session.run(None, {"x": x_of()}), expected(x_of()))
        content = path.read_bytes()
        match how:
            case "cut off":
                with path.open("r+b") as file:
                    file.truncate(len(content) // 2)
            case "other weights":
                with path.open("r+b") as file:
                    file.seek(content.rindex(WEIGHT.tobytes()))
                    file.write((WEIGHT + 1).tobytes())
            case "empty":
                path.write_bytes(b"")
            case "replaced":
                replace(plan(), weights={"w": (WEIGHT + 1).tobytes()}).save(path)
        same(session.run(None, {"x": x_of()}), expected(x_of()))
    if how == "replaced":  # by another file of the same name, as `save` does
        with Session(later, device) as session:
            same(session.run(None, {"x": x_of()}), expected(x_of()))
        with Session(path, device) as session:
            more = WEIGHT + 1
            same(session.run(None, {"x": x_of()}), [2 * (x_of() + more), -(x_of() + more)])
    else:
        with pytest.raises(PlanError, match=r"written to since it was opened|was cut off after it was opened"):
            Session(later, device)


def test_threads_load_weights_once(fake, monkeypatch):
    api = fake()
    one_plan, sessions = plan(), []
    threads = [threading.Thread(target=lambda: sessions.append(Session(one_plan, "gpu"))) for _ in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert len(sessions) == 4 and len(api.blocks) == 5 and len(api.modules) == 2


def test_threads(fake):
    fake()
    session, wrong = Session(plan(), "gpu"), []

    def work(seed: int) -> None:
        x = x_of() * seed
        for _ in range(20):
            got = session.run(None, {"x": x})
            if not all(np.array_equal(g, w) for g, w in zip(got, expected(x), strict=True)):
                wrong.append(seed)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not wrong


def test_bench(fake):
    fake()
    assert Session(plan(), "gpu").bench(3) == [0.75] * 3  # the fake driver's kernels take a quarter of a millisecond
    times = Session(plan(), "cpu").bench(3, {"x": x_of()})
    assert len(times) == 3 and min(times) > 0


def test_the_arena_can_be_poisoned_and_read(fake):
    fake()
    session = Session(plan(), "gpu")
    engine = session._engines[0]
    engine.fill_arena(0xFF)
    same(session.run(None, {"x": x_of()}), expected(x_of()))
    arena = engine.read_arena()
    assert arena.size == 512 and (arena[:256] == 0xFF).all()
    np.testing.assert_array_equal(arena[256:280].view(np.float32).reshape(2, 3), x_of() + WEIGHT)
    assert not engine.read_counters().any() and engine.read_counters().size == 64


# --- Which code ------------------------------------------------------------------------------------------------------

EVERYTHING = (("sm_61", "ptx"), ("sm_75", "cubin"), ("sm_80", "cubin"), ("sm_80", "ptx"), ("sm_86", "cubin"), ("sm_90a", "cubin"))


@pytest.mark.parametrize(
    ("cc", "target"),
    [
        ((6, 1), "sm_61 (PTX)"),
        ((7, 0), "sm_61 (PTX)"),
        ((7, 5), "sm_75"),
        ((8, 0), "sm_80"),
        ((8, 7), "sm_86"),
        ((9, 0), "sm_90a"),
        ((9, 1), "sm_80 (PTX)"),
        ((12, 0), "sm_80 (PTX)"),
    ],
)
def test_the_best_code_for_a_device(fake, cc, target):
    fake(cc=cc)
    session = Session(plan(EVERYTHING), "gpu")
    assert session._engines[0].target == target
    assert f"compute capability {cc[0]}.{cc[1]}), code for {target}" in session.describe()
    same(session.run(None, {"x": x_of()}), expected(x_of()))


def test_a_target_can_be_forced(fake):
    fake(cc=(9, 0))
    assert Session(plan(EVERYTHING), "gpu", target="sm_80")._engines[0].target == "sm_80 (PTX)"
    assert Session(plan(EVERYTHING), "gpu", target="sm_61")._engines[0].target == "sm_61 (PTX)"
    for device, more in (("gpu", ""), ("auto", "; on the device cpu, NumPy runs the steps for sm_75")):
        with pytest.raises(
            DeviceError,
            match=r"no code for sm_75 in the plan runs on Fake GPU .* machine code for sm_75, sm_80, sm_86, sm_90a; PTX for "
            f"sm_61, sm_80; without a target it takes the code for sm_90a{more}$",
        ):
            Session(plan(EVERYTHING), device, target="sm_75")
    assert "sm_86" in Session(plan(EVERYTHING), "cpu", target="sm_86").describe()
    with pytest.raises(DeviceError, match="the plan has nothing for sm_70"):
        Session(plan(EVERYTHING), "cpu", target="sm_70")


def test_nothing_fits(fake):
    fake(cc=(7, 5))
    with pytest.raises(DeviceError, match=r"it has machine code for sm_80; compile it for sm_75, or run it on the device cpu"):
        Session(plan(), "gpu")
    with pytest.warns(RuntimeWarning, match="running on the CPU, which is slow: no code in the plan runs on"):
        session = Session(plan(), "auto")
    assert session.device == "cpu" and session.describe().startswith("CPU")
    same(session.run(None, {"x": x_of()}), expected(x_of()))


def test_a_gpu_that_nothing_can_be_built_for(fake):
    fake(cc=(5, 2))
    with pytest.raises(
        DeviceError, match=r"the GPU is older than sm_61, the first that can be built for: run it on the device cpu"
    ):
        Session(plan(EVERYTHING), "gpu")
    with pytest.raises(DeviceError, match=r"no code for sm_61 in the plan runs on .* the GPU is older than sm_61"):
        Session(plan(EVERYTHING), "gpu", target="sm_61")


def test_ptx_that_the_driver_refuses(fake):
    fake(cc=(9, 0))
    both = plan((("sm_61", "ptx"), ("sm_80", "ptx")))
    images = tuple(replace(i, code=b"too new") if i.arch == "sm_80" else i for i in both.images)
    assert Session(replace(both, images=images), "gpu")._engines[0].target == "sm_61 (PTX)"
    images = tuple(replace(i, code=b"too new") for i in both.images)
    with pytest.raises(
        DeviceError,
        match=r"refused the code for sm_80: .*too new: 9.9.*CUDA_ERROR_INVALID_PTX.*refused the code for sm_61"
        r".*; a newer driver than this one, of CUDA \d+\.\d, may take it; compile it for sm_90a",
    ):
        Session(replace(both, images=images), "gpu")


def test_ptx_is_compiled_in_threads(fake, monkeypatch):
    """All images at once, in a context of the thread's own; when one fails, the others are unloaded"""
    api = fake(cc=(9, 0))
    together = threading.Barrier(2, timeout=20)
    load = FakeApi.cuModuleLoadDataEx

    def slow(self, code, *rest):
        assert self.stack, "no current context"
        together.wait()
        return load(self, code, *rest)

    monkeypatch.setattr(FakeApi, "cuModuleLoadDataEx", slow)
    both = plan((("sm_80", "ptx"),))
    session = Session(both, "gpu")
    same(session.run(None, {"x": x_of()}), expected(x_of()))
    assert len(api.modules) == 2
    del session
    gc.collect()
    images = (replace(both.images[0], code=b"too new"), both.images[1])
    with pytest.raises(DeviceError, match=r"too new: 9\.9"):
        Session(replace(both, images=images), "gpu")
    gc.collect()
    assert not api.modules


# --- Memory, maps, failures ------------------------------------------------------------------------------------------


def test_shared_memory_over_the_default_is_asked_for(fake):
    api = fake()
    session = Session(plan(), "gpu")
    assert session and set(api.limits.values()) == {50_000}


@pytest.mark.parametrize(("version", "height", "cleared"), [(13010, 8, True), (13020, 8, False), (13010, 2048, False)])
def test_tensor_maps(fake, version, height, cleared):
    api = fake(version=version)
    seen: list[tuple] = []
    api.kernels = {"tc_add": ((P, P), lambda *a: seen.append(a)), "tc_scale": KERNELS["tc_scale"]}
    tiled = Map("tiled", DType.F32, Address("arena", "", 256), (32, height), (128,), (1, 1), 128, box=(32, 8))
    im2col = Map(
        "im2col", DType.F16, Address("weights", "w", 0), (8, 5, height, 1), (16, 80, 80 * height), (2, 2), 64,
        lower=(-1, -1), upper=(1, 1), channels=8, pixels=4,
    )  # fmt: skip
    base = plan()
    s = base.entries[0].sections[0]
    launch = replace(s.steps[0].launches[0], args=(tiled, im2col))
    s = replace(s, steps=(replace(s.steps[0], launches=(launch, launch)), *s.steps[1:]))
    session = Session(replace(base, entries=(replace(base.entries[0], sections=(s,)),)), "gpu")
    arena = session._engines[0].room.address
    (kind, args), (kind2, args2) = api.maps  # each once
    assert kind == "tiled" and args[:7] == (
        "CU_TENSOR_MAP_DATA_TYPE_FLOAT32", 2, arena + 256, [32, height], [128], [32, 8], [1, 1],
    )  # fmt: skip
    assert args[8] == "CU_TENSOR_MAP_SWIZZLE_128B"
    assert kind2 == "im2col" and args2[0] == "CU_TENSOR_MAP_DATA_TYPE_FLOAT16" and args2[3:] == (
        [8, 5, height, 1], [16, 80, 80 * height], [-1, -1], [1, 1], 8, 4, [1, 2, 2, 1],
        "CU_TENSOR_MAP_INTERLEAVE_NONE", "CU_TENSOR_MAP_SWIZZLE_64B", "CU_TENSOR_MAP_L2_PROMOTION_L2_256B",
        "CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE",
    )  # fmt: skip
    session.run(None, {"x": x_of()})
    (first, second), again = seen
    assert again == (first, second) and first % 64 == 0 and second == first + 128
    words = np.ctypeslib.as_array((ctypes.c_uint64 * 2).from_address(first))
    assert words[1] == (5 if cleared else 1 << 21 | 5)


def test_empty_launches_are_left_out(fake):
    api = fake()
    base = plan()
    s = base.entries[0].sections[0]
    nothing = replace(s.steps[1], launches=(replace(s.steps[1].launches[0], grid=(0, 1, 1)),))
    s = replace(s, steps=(s.steps[0], nothing, replace(s.steps[2], after=(1,))))
    session = Session(replace(base, entries=(replace(base.entries[0], sections=(s,)),)), "gpu")
    same(session.run(["z"], {"x": x_of()}), expected(x_of())[1:])  # the edge to step 0 goes through step 1
    assert [len(n) for n in api.graphs.values()] == [2, 2]


def test_out_of_memory(fake):
    fake(memory=256)
    with pytest.raises(
        LaunchError, match=r"cannot allocate 0.0 MiB for the arena .* are free on Fake GPU .*CUDA_ERROR_OUT_OF_MEMORY"
    ):
        Session(plan(), "gpu")
    api = fake()
    session = Session(plan(), "gpu")
    api.failures["cuMemHostAlloc"] = OUT_OF_MEMORY
    with pytest.raises(LaunchError, match="pinned host memory"):
        session.run(None, {"x": x_of()})
    api.failures.clear()
    same(session.run(None, {"x": x_of()}), expected(x_of()))


@pytest.mark.parametrize("change", [lambda a: a[:-1], lambda a: (*a, Int(1)), lambda a: (*a[:-1], a[0]), lambda a: ()])
def test_arguments_that_the_code_does_not_take(fake, change):
    """The driver would read as many as the code has parameters, wherever that leads it."""
    fake()
    good = plan()
    (entry,) = good.entries
    first, *rest = (own := entry.sections[0]).steps
    (launch,) = first.launches
    bad = replace(first, launches=(replace(launch, args=change(launch.args)),))
    damaged = replace(good, entries=(replace(entry, sections=(replace(own, steps=(bad, *rest)),)),))
    with pytest.raises(PlanError, match=r"step 0 hands \d arguments to kernel tc_add, whose code takes others"):
        Session(damaged, "gpu")


def test_drivers_that_do_not_say_what_code_takes_are_trusted_with_it(fake):
    api = fake(version=12030)
    same(Session(plan(), "gpu").run(None, {"x": x_of()}), expected(x_of()))
    assert "cuFuncGetParamInfo" not in api.calls


@pytest.mark.parametrize("call", ["cuGraphAddKernelNode", "instantiate"])
def test_a_refused_launch_names_the_node(fake, call):
    api = fake()
    api.failures[call] = ILLEGAL_ADDRESS
    node = "Add_0" if call == "cuGraphAddKernelNode" else "Neg_2"
    with pytest.raises(
        LaunchError,
        match=rf"node {node} \((x 2x3, w 3, h 2x3|h 2x3, z 2x3)\): kernel toy, grid \(1, 1, 1\), 32 threads, 50000 bytes",
    ):
        Session(plan(), "gpu")
    gc.collect()
    assert not api.blocks and not api.stack


@pytest.mark.parametrize("call", ["cuGraphLaunch", "cuStreamSynchronize"])
def test_a_failed_run(fake, call):
    api = fake()
    session = Session(plan(), "gpu")
    api.failures[call] = ILLEGAL_ADDRESS
    with pytest.raises(LaunchError, match=r"toy on Fake GPU .* failed: .*CUDA_ERROR_ILLEGAL_ADDRESS"):
        session.run(None, {"x": x_of()})
    assert not api.stack


def test_no_gpu(monkeypatch, fake):
    api = fake(count=1)
    for device, message in (("gpu:1", "no GPU number 1: there is only gpu:0"),):
        with pytest.raises(DeviceError, match=message):
            Session(plan(), device)
    api.failures["cuDevicePrimaryCtxRetain"] = OUT_OF_MEMORY
    with pytest.raises(DeviceError, match=r"cannot use Fake GPU \(gpu:0"):
        open_device()
    fake(count=0)
    with pytest.warns(RuntimeWarning, match="there is no GPU"):
        assert Session(plan()).device == "cpu"


def test_no_driver(monkeypatch):
    import cuda.bindings

    class Missing:
        def cuInit(self, flags):
            raise RuntimeError("libcuda.so.1 not found")

    class Unusable:
        def cuInit(self, flags):
            return (NO_DEVICE,)

    for api, message in (
        (Missing(), "no NVIDIA driver is installed .libcuda.so.1 not found"),
        (Unusable(), "CUDA_ERROR_NO_DEVICE"),
    ):
        driver_module.driver.cache_clear()
        monkeypatch.setattr(cuda.bindings, "driver", api, raising=False)
        monkeypatch.setitem(sys.modules, "cuda.bindings.driver", api)
        with pytest.raises(DeviceError, match=message):
            Session(plan(), "gpu")
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    with pytest.raises(DeviceError, match="pip install cuda-bindings"):
        Session(plan(), "gpu")
    driver_module.driver.cache_clear()


# --- Mistakes of the caller ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("feeds", "message"),
    [
        ({}, "input 'x' is missing"),
        ({"X": x_of()}, "the model has no input 'X'; it has 'x'"),
        ({"x": x_of().astype(np.float64)}, r"input 'x' has type float32, got float64; convert it with .astype\(np.float32\)"),
        ({"x": x_of().view(np.uint16)[:, :3]}, r"got uint16 \(as which bfloat16 comes\); .* with .to\(torch.float32\)"),
        ({"x": x_of(3)}, "input 'x' has shape 2x3, got 3x3"),
        ({"x": x_of()[0]}, "input 'x' has shape 2x3, got 3$"),
        ({"x": [[1.0, 2.0]]}, "input 'x': a value of type list is not an array; numpy.asarray"),
        ({"x": np.array([["a"] * 3] * 2)}, "input 'x' has type float32, got str"),
    ],
)
def test_wrong_inputs(fake, feeds, message):
    fake()
    for device in ("gpu", "cpu"):
        with pytest.raises(InputError, match=message):
            Session(plan(), device).run(None, feeds)


def test_arguments_of_another_kind(fake):
    fake()
    session = Session(plan(), "cpu")
    with pytest.raises(InputError, match=r"by name, as \{'x': array\}, not as a ndarray"):
        session.run(None, x_of())
    with pytest.raises(InputError, match=r"arrays to write into go by name, as \{'y': array\}, not as a list"):
        session.run(None, {"x": x_of()}, [x_of()])  # type: ignore[arg-type]
    with pytest.raises(InputError, match=r"a list, as \['y'\], or None"):
        session.run("y", {"x": x_of()})
    with pytest.raises(UsageError, match="0 iterations measure nothing"):
        session.profile(0)
    session.close()
    for method in (session.describe, session.profile):
        with pytest.raises(UsageError, match="the session is closed"):
            method()


def test_wrong_outputs(fake):
    api = fake()
    read_only = np.zeros((2, 3), np.float32)
    read_only.flags.writeable = False
    for device in ("gpu", "cpu"):
        session = Session(plan(), device)
        for names, outputs, message in (
            (["nope"], None, "no output 'nope'; it has 'y', 'z'"),
            (None, {"nope": x_of()}, "no output 'nope'"),
            (None, {"y": x_of(3)}, "output 'y' has shape 2x3, got an array of shape 3x3"),
            (None, {"y": x_of().astype(np.float16)}, "output 'y' has type float32, got float16"),
            (None, {"y": read_only}, "read-only"),
        ):
            with pytest.raises(InputError, match=message):
                session.run(names, {"x": x_of()}, outputs=outputs)
    gpu_array = FakeArray(api, x_of())
    with pytest.raises(InputError, match="input 'x' lies on a GPU, and the session runs on the CPU"):
        Session(plan(), "cpu").run(None, {"x": gpu_array})
    strided = FakeArray(api, x_of(), strides=(4, 8))
    with pytest.raises(InputError, match="input 'x' on the GPU is not contiguous"):
        Session(plan(), "gpu").run(None, {"x": strided})


def test_another_gpu(fake):
    api = fake(count=2)
    session, other = Session(plan(), "gpu:1"), Session(plan(), "gpu:0")
    assert session.device == "gpu:1"
    y = other.run(["y"], {"x": FakeArray(api, x_of())})[0]
    with pytest.raises(InputError, match="input 'x' lies on gpu:0, and the session runs on gpu:1"):
        session.run(None, {"x": y})


@pytest.mark.parametrize("device", ["tpu", "gpu:", "gpu:x", "cpu:0", "gpu:-1", "", 0, None])
def test_unknown_devices(device):
    with pytest.raises(UsageError, match="unknown device"):
        Session(plan(), device)


@pytest.mark.parametrize("where", ["host", "device"])
def test_values_that_are_not_finite(fake, where):
    """The first step that writes one is named, with what it should have written; finite ones pass, also afterwards."""
    api = fake()
    x = x_of()
    with Session(plan(), "gpu", check_finite=True) as session:
        given = {"x": FakeArray(api, x) if where == "device" else x}
        same(session.run(None, given), expected(x))
        x[1, 1] = 3e38
        with (
            np.errstate(over="ignore"),
            pytest.raises(VerificationError, match=r"'Mul_1' writes an infinity into 'y'.*magnitude is [0-9.]+: the model"),
        ):
            session.run(None, {"x": FakeArray(api, x) if where == "device" else x})
        x[1, 1] = np.nan
        with pytest.raises(VerificationError, match=r"'Add_0' writes NaN into 'h'"):
            session.run(["z"], {"x": x})
        same(session.run(None, {"x": x_of()}), expected(x_of()))
    with Session(plan(), "gpu") as session:
        assert np.isnan(session.run(None, {"x": x})[0]).any()


def test_values_of_a_copy_that_no_step_makes(fake):
    """Its reader's kernel reads what it is a copy of; the CPU engine names the copy, and so does the search on a GPU."""
    fake()
    whole = plan()
    (entry,) = whole.entries
    (part,) = entry.sections
    first, *rest = entry.program.ops
    tensors = entry.program.tensors | {"c": dense("c", (2, 3), DType.F16, pad=1)}
    copy = Pointwise(nodes=("Copy",), y="c", epilogue=Epilogue(load(0), (identity_view("x", 2),)))
    views = replace(first.epilogue, loads=(identity_view("c", 2), first.epilogue.loads[1]))
    ops = (copy, replace(first, epilogue=views), *rest)
    steps = [replace(s, op=s.op + 1, after=tuple(a + 1 for a in s.after)) for s in part.steps]
    steps = [replace(steps[0], op=0, launches=(), after=()), *steps]
    part = replace(part, steps=tuple(steps), offsets=part.offsets | {"c": 0})
    entry = replace(entry, program=replace(entry.program, ops=ops, tensors=tensors), sections=(part,))
    x = x_of()
    x[1, 1] = 1e6
    for device in ("cpu", "gpu"):
        with Session(replace(whole, entries=(entry,)), device, check_finite=True) as session:
            if device == "gpu":
                session.run(None, {"x": x})  # the kernel rounds nothing, and all is well
                x[1, 1] = np.inf
            with pytest.raises(VerificationError, match="'Copy' writes an infinity into 'c'"):
                session.run(None, {"x": x})


def test_a_value_that_is_finite_the_next_time(fake, monkeypatch):
    """A kernel that is wrong once is not explained away."""
    fake()
    left = [np.float32(np.inf)]

    def scale(h: int, y: int, factor: float, count: int) -> None:
        floats(y, count)[:] = left.pop() if left else 1

    monkeypatch.setitem(KERNELS, "tc_scale", ((P, P, F32, I32), scale))
    with Session(plan(), "gpu", check_finite=True) as session, pytest.raises(VerificationError, match="one by one"):
        session.run(None, {"x": x_of()})


def test_a_stripped_plan(fake):
    fake()
    with pytest.raises(UsageError, match=r"'w'.*--weights"):
        Session(replace(plan(), weights={}), "gpu")


def test_alignment_is_a_promise():
    assert room.ALIGN % 256 == 0 and IO_ALIGN == 16  # kernels rely on both


# --- What is imported ------------------------------------------------------------------------------------------------


def test_running_imports_no_compiler(tmp_path):
    path = tmp_path / "toy.plan"
    plan().save(path)
    program = f"""
import json, sys
import numpy as np, tccompile
session = tccompile.Session({str(path)!r}, "cpu")
session.run(None, {{"x": np.zeros((2, 3), np.float32)}})
import tccompile.runtime.gpu, tccompile.runtime.arrays
heavy = ["onnx", "numba", "onnx_graphsurgeon", "onnxruntime", "llvmlite", "cuda.bindings.driver", "rich"]
heavy += ["tccompile.kernels", "tccompile.emit.compile"]
print(json.dumps([m for m in heavy if m in sys.modules]))
"""
    out = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert json.loads(out) == []


def test_the_top_of_the_package():
    assert tccompile.Session is Session and tccompile.Plan is Plan
    assert {*tccompile.__all__, "__version__"} == set(dir(tccompile))
    with pytest.raises(AttributeError, match="no attribute 'nope'"):
        _ = tccompile.nope
    assert f'version = "{tccompile.__version__}"' in Path("pyproject.toml").read_text()
