"""The session on a GPU: arrays of other libraries, streams, targets, memory."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from tccompile.errors import InputError, LaunchError, VerificationError
from tccompile.plan.file import Plan, read_plan
from tccompile.runtime.resident import choices
from tccompile.runtime.session import Session
from tests.ops.test_counted import KINDS, detector, found
from tests.rewrites.common import Net
from tests.test_branches import MODELS as BRANCHES
from tests.test_branches import limits
from tests.test_loops import FLOAT, looped
from tests.test_loops import MODELS as LOOPS

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def plan(gpu, request: pytest.FixtureRequest) -> Plan:
    """The network, with all the sections that this GPU runs."""
    folder: Path | None = request.config.getoption("--plans")
    if folder is None:
        from tccompile.arch import ARCHS
        from tests.gpu.build import known, session_plan

        archs = known(a for a in ARCHS.values() if a.cc <= gpu.cc and (not a.suffix or a.cc == gpu.cc))
        own = [(a, "cubin") for a in archs if a.cc[0] == gpu.cc[0]]
        return session_plan([*own, *((a, "ptx") for a in archs if not a.suffix)])
    plans = [read_plan(p) for p in sorted((folder / "session").glob("*.plan"))]
    fitting = [p for p in plans if choices(p, p.entries[0], gpu.cc)]
    if not fitting:
        pytest.skip(f"no plan for {gpu}")
    return max(fitting, key=lambda p: p.kind(p.entries[0].sections[0]) == "cubin")


def x_of(batch: int = 1, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((batch, 3, 20, 24)).astype(np.float32)


def expected(plan: Plan, x: np.ndarray) -> list[np.ndarray]:
    return Session(plan, "cpu").run(None, {"x": x})


def close(got, want) -> None:
    assert len(got) == len(want)
    for a, b in zip(got, want, strict=True):
        a, b = np.asarray(a).astype(np.float64), b.astype(np.float64)
        assert a.shape == b.shape
        assert np.linalg.norm(a - b) <= 2e-3 * np.linalg.norm(b)


def test_numpy(plan):
    session = Session(plan, "gpu")
    for batch in (1, 3, 1):
        for seed in range(3):
            close(session.run(None, {"x": x_of(batch, seed)}), expected(plan, x_of(batch, seed)))
    z = np.zeros((1, 3, 24, 20), np.float16).swapaxes(2, 3)
    assert session.run(["z"], {"x": x_of()}, outputs={"z": z})[0] is z
    close([z], expected(plan, x_of())[1:])


@pytest.fixture
def compiled(gpu, request: pytest.FixtureRequest) -> Callable[..., Plan]:
    """What compiles a model for this GPU, in float32."""
    if request.config.getoption("--plans") is not None:
        pytest.skip("it is compiled here")
    import tccompile
    from tccompile.runtime.generations import native

    return partial(tccompile.compile, archs=native(gpu.cc), precision="fp32")


@pytest.fixture
def loops_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    """Loops are not unrolled, and branches not computed both, however short they are."""
    from tccompile.load import unroll

    monkeypatch.setattr(unroll, "LONG", 0)
    monkeypatch.setattr(unroll, "LONG_COUNTED", 0)
    monkeypatch.setattr("tccompile.ir.branches.LEAST_US", 3.0)


@pytest.fixture(params=["new", "old"])
def driver(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver that there is, and one whose graphs have no conditional nodes."""
    if request.param == "old":
        monkeypatch.setattr("tccompile.runtime.graph.LOOP_DRIVER", 1 << 30)


def as_on_the_cpu(made: Plan, every: Iterable[Mapping[str, np.ndarray]], rtol: float = 1e-5, atol: float = 1e-6) -> None:
    """A plan's outputs for each set of arrays, which may hold more than its inputs."""
    with Session(made, "gpu", check_finite=True) as session, Session(made, "cpu") as other:
        for arrays in every:
            feeds = {x.name: arrays[x.name] for x in session.get_inputs()}
            for got, want in zip(session.run(None, feeds), other.run(None, feeds), strict=True):
                assert got.shape == want.shape
                np.testing.assert_allclose(got, want, rtol, atol)


@pytest.mark.parametrize("name", LOOPS)
def test_loops(compiled, loops_stay, driver, name):
    """In a while node, and in a graph for drivers that have none: as on the CPU, however often they go round."""
    model = LOOPS[name]()
    made = compiled(model, limits={node.name: 4 for node in model.graph.node if node.op_type == "Loop"})
    rng = np.random.default_rng(0)
    tensors = made.entries[0].program.tensors
    drawn = {x: rng.uniform(0.5, 2, tensors[x].shape).astype(np.float32) for x in made.entries[0].program.inputs}
    turns = ((3, True), (4, True), (0, True), (1, True), (2, False), (4, True))
    as_on_the_cpu(made, ({**drawn, "n": np.array(n), "go": np.array(go)} for n, go in turns))


@pytest.mark.parametrize("name", BRANCHES)
def test_branches(compiled, loops_stay, driver, name):
    """In conditional nodes, in each other and in loops, and run all the same where drivers have none: as on the CPU."""
    model = BRANCHES[name][0]()
    made = compiled(model, limits=limits(model))
    x = np.random.default_rng(0).uniform(0.1, 1, (6, 3, 4)).astype(np.float32)
    taken = ((k % 2 == 0, k % 3 == 0, min(k, 4), (-1) ** k * x[k]) for k in range(6))
    as_on_the_cpu(made, ({"c": np.array(c), "d": np.array(d), "n": np.array(n), "x": x} for c, d, n, x in taken))


def test_a_loop_in_a_plan_for_ranges(compiled, loops_stay):
    """A graph with a while node can be instantiated once: such plans have the body in theirs as often as it may run."""
    model = looped([("Tanh", "a", "a_")], {"a": (FLOAT, ("b", 4))}, ("a_",))
    made = compiled(model, limits={"Loop_a_end": 6}, ranges={"b": (1, 5)})
    ones = {"go": np.array(True), "x": np.ones((3, 4), np.float32)}
    turns = ((1, 3), (5, 6), (3, 0), (5, 2))
    as_on_the_cpu(made, ({**ones, "n": np.array(n), "a_0": np.ones((b, 4), np.float32)} for b, n in turns))


def test_outputs_that_the_data_cut(compiled):
    """Boxes that are kept, few or none, on the host and on the GPU: one graph for all of them."""
    torch = pytest.importorskip("torch")
    for then in KINDS:
        net = detector(Net(boxes=(1, 30, 4), scores=(1, 1, 30), line=(30,)), then)
        made = compiled(net.model())
        program = made.entries[0].program
        cut = {(name, axis) for count in program.counts for name, axes in count.cuts.items() for axis in axes}
        apart = {name for name, axis in cut if max(program.tensors[name].shape[:axis], default=1) > 1}
        leading = [name for name in net.outputs if name not in apart]
        with Session(made, "gpu") as session, Session(made, "cpu") as on_cpu:
            for count in (20, 3, 5):
                given = {**found(count, count), "line": np.arange(30, dtype=np.float32)}
                want = on_cpu.run(None, given)
                close(session.run(None, given), want)
                there = {name: torch.from_numpy(x).cuda() for name, x in given.items()}
                got = session.run(leading, there)
                close(got, [y for n, y in zip(net.outputs, want, strict=True) if n in leading])


def test_every_section(plan, gpu):
    sections = choices(plan, plan.entries[0], gpu.cc)
    for section in sections:
        session = Session(plan, "gpu", target=section.arch)
        assert section.arch in session.describe()
        close(session.run(None, {"x": x_of()}), expected(plan, x_of()))


def test_values_that_are_not_finite(plan):
    """The first step that writes one is named, as on the CPU; inferences around it are as ever."""
    session, other = Session(plan, "gpu", check_finite=True), Session(plan, "cpu", check_finite=True)
    for bad in (np.nan, np.inf):
        close(session.run(None, {"x": x_of()}), expected(plan, x_of()))
        x = x_of()
        x[0, 1, 4, 5] = bad
        with pytest.raises(VerificationError) as there:
            other.run(None, {"x": x})
        with pytest.raises(VerificationError) as here:
            session.run(None, {"x": x})
        node = str(there.value).split(" writes ")[0]
        assert str(here.value).startswith(node)
    close(session.run(None, {"x": x_of()}), expected(plan, x_of()))


def test_torch(plan):
    torch = pytest.importorskip("torch")
    session = Session(plan, "gpu")
    x = torch.from_numpy(x_of()).cuda()
    y, z = session.run(None, {"x": x})
    close([torch.from_dlpack(y).cpu().numpy(), torch.from_dlpack(z).cpu().numpy()], expected(plan, x_of()))
    assert torch.from_dlpack(y).data_ptr() == y.__cuda_array_interface__["data"][0]
    kept = torch.from_dlpack(y)
    del y
    gc.collect()
    close([kept.cpu().numpy()], expected(plan, x_of())[:1])
    into = torch.full((1, 16, 20, 24), float("nan"), device="cuda")
    assert session.run(["y"], {"x": x * 2}, outputs={"y": into})[0] is into
    close([into.cpu().numpy()], expected(plan, 2 * x_of())[:1])
    shifted = torch.zeros(1 + x.numel(), device="cuda")[1:].view(x.shape)  # not aligned to 16 bytes
    shifted.copy_(x)
    close(session.run(None, {"x": shifted}), expected(plan, x_of()))
    with pytest.raises(InputError, match="contiguous"):
        session.run(None, {"x": x.transpose(2, 3).contiguous().transpose(2, 3)})
    close(session.run(None, {"x": torch.from_numpy(x_of())}), expected(plan, x_of()))  # torch's, on the host


def test_streams(plan):
    """Asynchronous on the caller's stream: between work of PyTorch's before and after, without a wait on the host"""
    torch = pytest.importorskip("torch")
    session = Session(plan, "gpu")
    outs = [torch.empty(1, 16, 20, 24, device="cuda"), torch.empty(1, 3, 20, 24, dtype=torch.half, device="cuda")]
    streams = [torch.cuda.Stream() for _ in range(3)]
    x = torch.from_numpy(x_of()).cuda()
    torch.cuda.synchronize()
    results = []
    for i in range(30):
        stream = streams[i % 3]
        with torch.cuda.stream(stream):
            busy = torch.randn(2000, 2000, device="cuda")
            scaled = x * (1 + i) + (busy @ busy).sum() * 0
            y, z = session.run(None, {"x": scaled}, stream=stream)
            results.append((torch.from_dlpack(y) + 0, torch.from_dlpack(z) + 0, scaled, y, z))
    torch.cuda.synchronize()
    for i, (y, z, *_) in enumerate(results):
        close([y.cpu().numpy(), z.cpu().numpy()], expected(plan, x_of() * np.float32(1 + i)))
    with torch.cuda.stream(streams[0]):
        session.run(None, {"x": x}, outputs={"y": outs[0], "z": outs[1]}, stream=streams[0].cuda_stream)
    streams[0].synchronize()
    close([o.cpu().numpy() for o in outs], expected(plan, x_of()))


def test_cupy(plan):
    cupy = pytest.importorskip("cupy")
    session = Session(plan, "gpu")
    x = cupy.asarray(x_of())
    y, z = session.run(None, {"x": x})
    close([cupy.asnumpy(cupy.asarray(y)), cupy.asnumpy(cupy.from_dlpack(z))], expected(plan, x_of()))


def test_launches_start_early(plan):
    """Thousands of inferences in a row on two inputs: none sees what an earlier one left in the arena, or a later one brings"""
    torch = pytest.importorskip("torch")
    session = Session(plan, "gpu")
    inputs = [torch.from_numpy(x_of(1, seed)).cuda() for seed in range(2)]
    want = [torch.from_dlpack(session.run(["y"], {"x": x})[0]).clone() for x in inputs]
    for rounds in range(20):
        session._engines[0].fill_arena(255)
        got = [torch.from_dlpack(session.run(["y"], {"x": inputs[i % 2]})[0]) for i in range(200)]
        torch.cuda.synchronize()
        assert all(torch.equal(y, want[i % 2]) for i, y in enumerate(got)), rounds


def test_memory(plan, gpu):
    def used() -> int:
        gc.collect()
        with gpu as cu:
            free, total = cu.cuMemGetInfo()
        return total - free

    used_after = []
    for _ in range(4):  # the driver keeps some memory from the first rounds
        sessions = [Session(plan, "gpu") for _ in range(3)]
        for session in sessions:
            session.run(None, {"x": x_of(3)})
        sessions[0].close()
        del sessions, session
        used_after.append(used())
    assert used_after[-1] == used_after[1]
    section = plan.entries[0].sections[0]
    huge = replace(plan, entries=(replace(plan.entries[0], sections=(replace(section, arena=1 << 42),)),))
    with pytest.raises(LaunchError, match=r"cannot allocate 4194304.0 MiB for the arena"):
        Session(huge, "gpu", target=section.arch)


def test_bench(plan, capsys):
    session = Session(plan, "gpu")
    times = session.bench(200)
    assert len(times) == 200 and min(times) > 0
    with capsys.disabled():
        print(f"\n{session.describe()}: median {np.median(times) * 1e3:.1f} µs over 4 kernels")


def test_profile(plan):
    """Steps take time, together about what an inference of dependent steps takes, and running is as before"""
    session = Session(plan, "gpu")
    before = session.run(None, {"x": x_of()})
    profile = session.profile(50, {"x": x_of()})
    program = plan.entries[0].program
    assert [s.nodes for s in profile.steps] == [op.nodes for op in program.ops]
    assert all(s.us > 0 for s in profile.steps) and profile.roof is not None
    assert 0.3 * profile.us < sum(s.us for s in profile.steps) < 5 * profile.us
    for a, b in zip(session.run(None, {"x": x_of()}), before, strict=True):
        np.testing.assert_array_equal(a, b)


def test_outputs_are_not_written_while_they_are_read(plan):
    """PyTorch reads an output on a stream of its own, after the array is gone, while later inferences run"""
    torch = pytest.importorskip("torch")
    session, reader = Session(plan, "gpu"), torch.cuda.Stream()
    want = expected(plan, x_of())[0]
    inputs = [torch.from_numpy(x_of() * np.float32(1 + i)).cuda() for i in range(20)]
    torch.cuda.synchronize()
    kept = []
    for x in inputs:
        y = session.run(["y"], {"x": x})[0]
        with torch.cuda.stream(reader):
            torch.cuda._sleep(200_000)
            kept.append(torch.from_dlpack(y) + 0)
        del y
    torch.cuda.synchronize()
    close([kept[0].cpu().numpy()], [want])
    for i, y in enumerate(kept):
        close([y.cpu().numpy()], expected(plan, x_of() * np.float32(1 + i))[:1])


def test_other_weights_where_the_old_ones_lie(plan):
    """Constants are swapped under graphs and tensor maps, while inferences on streams may be queued, and swapped back."""
    own = replace(plan, weights=dict(plan.weights))  # which shares its memory with no other session
    old, other = {n: bytes(plan.weight(n)) for n in plan.weights}, {}
    for name, data in old.items():
        values = np.frombuffer(data, own.entries[0].program.tensors[name].dtype.numpy)
        other[name] = (values / 2).astype(values.dtype).tobytes() if values.dtype.kind == "f" else data
    session = Session(own, "gpu")
    before = [np.asarray(y) for y in session.run(None, {"x": x_of()})]
    for constants in (other, old):
        with session._platform:
            session._platform.refit(session._engines.values(), constants)
        held = replace(plan, weights=constants, digests={})
        for batch in (1, 3):
            close(session.run(None, {"x": x_of(batch)}), expected(held, x_of(batch)))
    for a, b in zip(session.run(None, {"x": x_of()}), before, strict=True):
        np.testing.assert_array_equal(np.asarray(a), b)
