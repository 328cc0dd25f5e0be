"""Timing tables: what an op's key says, what is chosen by measured times, files, measuring on a driver made of host memory."""

from __future__ import annotations

import ctypes
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
from click.testing import CliRunner
from onnx import TensorProto, helper

from tccompile import tune
from tccompile.arch import ARCHS, Arch
from tccompile.cli import commands as cli
from tccompile.dump import Dump
from tccompile.emit.job import SpillError
from tccompile.errors import DeviceError, LaunchError, UsageError
from tccompile.ir.expr import ACC, Epilogue, View, call, coord, identity_view, load
from tccompile.ir.ops import Conv, Gemm, Op, Pointwise, Rnn
from tccompile.ir.program import Program
from tccompile.ir.storage import from_storage
from tccompile.ir.tensor import dense
from tccompile.ir.types import DType
from tccompile.ir.weights import Source
from tccompile.kernels.spec import I32, Config, Function, Kernel, Launch, Ptr, Work, code
from tccompile.options import Options
from tccompile.pipeline import to_builds, to_program
from tccompile.plan.file import MAGIC
from tccompile.runtime import driver as driver_module
from tccompile.runtime.driver import Driver
from tccompile.schedule import choose as schedule
from tccompile.schedule.choose import uncopied
from tccompile.schedule.timings import FORMAT, Table, Timing, Timings, key, read, source, timings, with_times, write
from tests.gpu.cases import attention, program_of
from tests.networks import skeleton
from tests.runtime.fake_driver import ILLEGAL_ADDRESS, FakeApi, floats
from tests.small import image

NHWC = (0, 2, 3, 1)
SM90 = ARCHS["sm_90a"]


def conv(
    channels: int = 64, whole: int = 0, at: int = 0, bias: str = "bias", scale: float = 6.0, border: bool = False
) -> Program:
    """relu(conv + scale * bias) of an image, whose input is the channels from `at` of a tensor with `whole` of them."""
    wide = dense("x", (1, whole or channels, 14, 14), DType.F16, NHWC)
    x = (
        replace(wide, shape=(1, channels, 14, 14), padded=(1, channels, 14, 14), base="all", offset=at, name="x")
        if whole
        else wide
    )
    y = dense("y", (1, 128, 14, 14), DType.F16, pad=1) if border else dense("y", (1, 128, 14, 14), DType.F16, NHWC)
    tensors = [x, dense("w", (128, channels, 3, 3), DType.F16, NHWC), dense(bias, (128,), DType.F32), y]
    if whole:
        tensors.append(replace(wide, name="all"))
    expr = call("relu", call("add", ACC, call("mul", load(0), scale)))
    op = Conv(
        nodes=(f"{bias}_node",), y="y", x="x", w="w", strides=(1, 1), pads=(1, 1), dilations=(1, 1),
        epilogue=Epilogue(expr, (View(bias, (coord(1),)),)),
    )  # fmt: skip
    constants = {"w": Source("w", (128, channels, 3, 3), "float32"), bias: Source(bias, (128,), "float32")}
    return Program((), ("y",) if border else (), {t.name: t for t in tensors}, constants, (op,))


def key_of(program: Program) -> str:
    return key(program.ops[0], program)


# --- Keys ----------------------------------------------------------------------------------------------------------------


def test_key_is_the_same_whatever_the_names_and_the_values():
    assert key_of(conv()) == key_of(conv(bias="b.0", scale=4.0))


def test_key_says_what_matters_to_kernels():
    different = [conv(), conv(32), conv(whole=256, at=64), conv(whole=256, at=4), conv(border=True)]
    assert len({key_of(p) for p in different}) == len(different)
    program = conv()
    one_by_one = replace(program.ops[0], pads=(0, 0))
    plain = replace(program.ops[0], epilogue=Epilogue())
    assert len({key(op, program) for op in (program.ops[0], one_by_one, plain)}) == 3


def test_key_of_a_part_does_not_depend_on_the_whole():
    assert key_of(conv(whole=256, at=64)) == key_of(conv(whole=512, at=128))


# --- Choosing ------------------------------------------------------------------------------------------------------------


def table(program: Program, times: dict[int, float], stale: bool = False, gpu: str = "Some GPU") -> Table:
    """What was measured of the candidates with these numbers, the cheapest estimate being 0."""
    ranked = schedule.candidates(program.ops[0], program, SM90)
    made = [
        Timing(c.kernel.name, dict(c.config), us, "0" if stale else source(c.kernel))
        for c, us in ((ranked[n], us) for n, us in times.items())
    ]
    return with_times(Table(gpu, "sm_90a", {}, FORMAT), key_of(program), made)


def test_measured_beats_estimated():
    program = conv()
    ranked = schedule.candidates(program.ops[0], program, SM90)
    known = Timings((table(program, {0: 9.0, 3: 7.25, 5: 8.0}),))
    (chosen,) = schedule.schedule(program, SM90, timings=known)
    assert (chosen.kernel, dict(chosen.config)) == (ranked[3].kernel, dict(ranked[3].config))
    assert chosen.reason == "measured 7.2 µs on Some GPU, best of 3"
    assert chosen.cost == 7.25
    (slow,) = schedule.schedule(program, SM90, timings=Timings((table(program, {4: 1e6}),)))
    assert dict(slow.config) == dict(ranked[4].config), "what was not measured does not beat what was"


def test_what_no_table_knows_is_estimated():
    known = Timings((table(conv(), {3: 7.0}),))
    other = conv(32)
    ranked = schedule.candidates(other.ops[0], other, SM90)
    (chosen,) = schedule.schedule(other, SM90, timings=known)
    assert (chosen.kernel, dict(chosen.config)) == (ranked[0].kernel, dict(ranked[0].config))
    assert chosen.reason.startswith("estimated")
    (elsewhere,) = schedule.schedule(conv(), ARCHS["sm_80"], timings=known)
    assert elsewhere.reason.startswith("estimated"), "a table is for one generation"


def test_first_table_decides():
    program = conv()
    known = Timings((table(program, {2: 50.0}, gpu="Mine"), table(program, {1: 1.0}, gpu="Shipped")))
    (chosen,) = schedule.schedule(program, SM90, timings=known)
    assert "50.0 µs on Mine" in chosen.reason


def test_times_of_other_sources_rank_and_say_so():
    (chosen,) = schedule.schedule(conv(), SM90, timings=Timings((table(conv(), {0: 9.0, 3: 7.0}, stale=True),)))
    assert chosen.reason == "measured 7.0 µs on Some GPU with another version of the kernel, best of 2"


def test_configs_that_are_gone_are_not_chosen():
    program = conv()
    known = table(program, {3: 7.0})
    gone = [Timing("conv_gone", {"tile": 1}, 0.1, "0"), Timing(known.ops[key_of(program)][0].kernel, {"odd": True}, 0.1, "0")]
    known = with_times(known, key_of(program), (*known.ops[key_of(program)], *gone))
    (chosen,) = schedule.schedule(program, SM90, timings=Timings((known,)))
    assert chosen.reason == "measured 7.0 µs on Some GPU"


def test_refused_code_gives_way_to_the_next_best_measured():
    program = conv()
    known = Timings((table(program, {0: 9.0, 3: 7.0}),))
    (first,) = schedule.schedule(program, SM90, timings=known)
    refused = {launch.code for launch in first.work.launches}
    (second,) = schedule.schedule(program, SM90, refused, known)
    assert not refused & {launch.code for launch in second.work.launches}
    assert second.reason.startswith("measured 9.0 µs") or first.config == second.config


def test_reason_for_no_tensor_cores_says_what_they_took():
    program = conv()
    ranked = schedule.candidates(program.ops[0], program, SM90)
    plain = next(n for n, c in enumerate(ranked) if not c.kernel.tensor_cores)
    (chosen,) = schedule.schedule(program, SM90, timings=Timings((table(program, {0: 9.0, plain: 8.0}),)))
    assert chosen.reason.endswith("; no Tensor Cores: with them it took 9.0 µs")


# --- Files ---------------------------------------------------------------------------------------------------------------


def test_file_gives_back_what_was_written(tmp_path):
    path = tmp_path / "gpu.json"
    written = table(conv(), {0: 9.0, 3: 7.0})
    entry = Timing("norm_split", {"tile": (128, 64), "swizzle": True, "mode": "wide", "share": 0.5}, 3.5, "ab")
    written = with_times(written, "Norm é", [entry])
    write(written, path)
    again = read(path)
    assert again == written
    write(again, tmp_path / "again.json")
    assert (tmp_path / "again.json").read_bytes() == path.read_bytes()
    assert sum("conv" in line.lower() for line in path.read_text().splitlines()) == 1, "an op a line"
    assert {p.name for p in tmp_path.iterdir()} == {"gpu.json", "again.json"}


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda d: d.update(format=2), "format 2"),
        (lambda d: d.update(arch="sm_1"), "sm_1"),
        (lambda d: d.pop("gpu"), "lacks gpu"),
        (lambda d: next(iter(d["ops"].values()))[0].update(us=-1.0), "-1.0 µs"),
        (lambda d: next(iter(d["ops"].values()))[0].update(us="nan"), "nan µs"),
        (lambda d: next(iter(d["ops"].values()))[0].update(us="fast"), "us: expected a number"),
        (lambda d: next(iter(d["ops"].values()))[0].pop("kernel"), "lacks kernel"),
    ],
)
def test_file_that_is_no_table_is_refused(tmp_path, change, says):
    path = tmp_path / "gpu.json"
    write(table(conv(), {0: 9.0}), path)
    data = json.loads(path.read_text())
    change(data)
    path.write_text(json.dumps(data))
    with pytest.raises(UsageError, match="is no timing table") as error:
        read(path)
    assert says in str(error.value) and "gpu.json" in str(error.value)


@pytest.mark.skipif(not Path("/dev/zero").exists(), reason="no file without an end")
def test_file_without_an_end_is_refused():
    with pytest.raises(UsageError, match="larger than 64 MiB"):
        read(Path("/dev/zero"))


def test_file_that_is_not_json_is_refused(tmp_path):
    (tmp_path / "x.json").write_bytes(b"\x93NUMPY")
    with pytest.raises(UsageError, match=r"x\.json is no timing table: not JSON"):
        read(tmp_path / "x.json")
    with pytest.raises(UsageError, match=r"cannot read the timing table .*none\.json: No such file"):
        read(tmp_path / "none.json")
    with pytest.raises(UsageError, match="cannot write the timing table"):
        write(table(conv(), {0: 9.0}), tmp_path / "none" / "x.json")


# --- Measuring -----------------------------------------------------------------------------------------------------------

P, N = ctypes.c_uint64, ctypes.c_int32
SPEEDS = {"first": 40.0, "fast": 10.0, "wrong": 1.0, "slow": 90.0}
"""Microseconds of each kernel, in the order of its estimates."""


class Toy(Kernel):
    """y = x + w in float32; one candidate is fast and wrong."""

    name, realises, tensor_cores = "toy", Pointwise, False

    def supports(self, op: Op, program: Program, arch: Arch) -> str | None:
        return None

    def configs(self, op: Op, program: Program, arch: Arch) -> Iterator[Config]:
        yield from ({"speed": speed} for speed in reversed(SPEEDS))

    def cost(self, op: Op, program: Program, config: Config, arch: Arch) -> float:
        return float(list(SPEEDS).index(str(config["speed"])))

    def work(self, op: Op, program: Program, config: Config, arch: Arch) -> Work:
        x, w = (view.tensor for view in op.views)
        args = (Ptr(x), Ptr(w), Ptr(op.y), I32(program.tensors[op.y].span))
        return Work((Launch(code("toy", **config), (1, 1, 1), 32, args),), scratch=256)

    def build(self, arch: Arch, **params: object) -> Function:
        raise AssertionError("nothing is compiled")


class TimedApi(FakeApi):
    """Events at the times that the kernels take, by a clock of the GPU's own; and what each launch read."""

    def __init__(self) -> None:
        super().__init__({f"tc_{name}": ((P, P, P, N), self.kernel(name)) for name in SPEEDS}, memory=1 << 24)
        self.clock, self.events, self.read = 0.0, {}, []

    def kernel(self, name: str):
        def run(x: int, w: int, y: int, count: int) -> None:
            self.clock += SPEEDS[name] * (3 if (x, w) in self.read else 1)  # nothing may be read from the cache
            self.read.append((x, w))
            floats(y, count)[:] = floats(x, count) + floats(w, count) * (1.5 if name == "wrong" else 1)

        return run

    def cuMemsetD8Async(self, address: int, byte: int, size: int, stream: int) -> None:
        ctypes.memset(address, byte, size)
        self.read.clear()

    def cuEventRecord(self, event: int, stream: int) -> None:
        self.events[event] = self.clock

    def cuEventElapsedTime(self, begin: int, end: int) -> float:
        return (self.events[end] - self.events[begin]) / 1e3


@pytest.fixture
def api(monkeypatch) -> TimedApi:
    api = TimedApi()
    monkeypatch.setattr(driver_module, "driver", lambda: Driver(api))
    monkeypatch.setattr(driver_module, "_devices", type(driver_module._devices)())
    monkeypatch.setattr(schedule, "KERNELS", (Toy(),))
    monkeypatch.setattr(tune, "KERNELS", (Toy(),))
    monkeypatch.setattr(
        tune, "emit", lambda jobs, *_: {j: image("sm_80", "cubin", f"tc_{dict(j[0].params)['speed']}") for j in jobs}
    )
    return api


def sum_program(rows: int, border: bool = False) -> Program:
    """y = x + w; x is what an earlier step would have made, or a model input."""
    names = {n: dense(n, (rows, 8), DType.F32) for n in "xwy"}
    op = Pointwise(
        nodes=(f"Add_{rows}",),
        y="y",
        epilogue=Epilogue(call("add", load(0), load(1)), (identity_view("x", 2), identity_view("w", 2))),
    )
    io = ("x",) if border else (), ("y",) if border else ()
    return Program(*io, names, {"w": Source("w", (rows, 8), "float32")}, (op,))


def quiet(*_: object) -> None:
    pass


def tuned(api: TimedApi, programs: list[Program], path) -> Table:
    gpu, arch = tune.gpu_to_measure(("sm_75", "sm_80"))
    return tune.tune(programs, gpu, arch, path, quiet)


@pytest.mark.parametrize("border", [False, True], ids=["inside", "model_input_and_output"])
def test_tuning_measures_and_leaves_out_what_is_wrong(api, tmp_path, border):
    program = sum_program(3, border)
    with pytest.warns(RuntimeWarning, match=r"Add_3: toy \{'speed': 'wrong'\} is left out: its result differs"):
        made = tuned(api, [program, sum_program(3, border)], tmp_path / "t.json")
    assert made == read(tmp_path / "t.json")
    assert (made.gpu, made.arch) == ("Fake GPU", "sm_80")
    (times,) = made.ops.values()
    assert [(t.config["speed"], pytest.approx(t.us)) for t in times] == [("fast", 10.0), ("first", 40.0), ("slow", 90.0)]
    (chosen,) = schedule.schedule(program, ARCHS["sm_80"], timings=Timings((made,)))
    assert chosen.config == {"speed": "fast"} and chosen.reason == "measured 10.0 µs on Fake GPU, best of 3"
    assert not api.stack


@pytest.mark.filterwarnings("ignore:.*is left out")
def test_tuning_extends_a_file_and_measures_nothing_twice(api, tmp_path):
    path = tmp_path / "t.json"
    first = tuned(api, [sum_program(3)], path)
    api.kernels.clear()  # no kernel can run
    assert tuned(api, [sum_program(3)], path) == first
    api.kernels = {f"tc_{name}": ((P, P, P, N), api.kernel(name)) for name in SPEEDS}
    second = tuned(api, [sum_program(3), sum_program(5)], path)
    assert set(first.ops) < set(second.ops) and len(second.ops) == 2


@pytest.mark.filterwarnings("ignore:.*is left out")
def test_tuning_measures_again_what_older_sources_gave(api, tmp_path):
    path = tmp_path / "t.json"
    made = tuned(api, [sum_program(3)], path)
    (name,) = made.ops
    write(with_times(made, name, [replace(t, us=77.0, source="older") for t in made.ops[name]]), path)
    assert tuned(api, [sum_program(3)], path) == made


def test_every_kernel_near_the_least_estimate_is_measured():
    """Though all configs of one come before the others"""
    program = program_of("depthwise_5x5")
    ranked = schedule.candidates(program.ops[0], program, SM90)
    kernels = {c.kernel.name: c for c in reversed(ranked)}
    assert kernels["conv_direct"].cost > tune.NEAR * ranked[0].cost >= kernels["depthwise"].cost > ranked[3].cost
    (trial,) = tune.trials_of([program], SM90, Table("GPU", "sm_90a", {}, FORMAT), 4).values()
    assert tune.worth_measuring(trial.ranked, trial.count) == [*ranked[:3], kernels["depthwise"]]
    assert tune.worth_measuring(ranked, len(ranked)) == ranked


def test_what_spills_gives_way_to_the_next_config(api, tmp_path, monkeypatch):
    """Each in turn, though only two are to be measured"""
    compiled = tune.emit

    def emit(jobs, *_):
        for speed in ("first", "wrong"):
            if spills := [j for j in jobs if dict(j[0].params)["speed"] == speed]:
                raise SpillError("it spills registers", tuple(spills))
        return compiled(jobs)

    monkeypatch.setattr(tune, "emit", emit)
    gpu, arch = tune.gpu_to_measure(("sm_80",))
    (times,) = tune.tune([sum_program(3)], gpu, arch, tmp_path / "t.json", quiet, count=2).ops.values()
    assert [t.config["speed"] for t in times] == ["fast", "slow"]


def test_tuning_with_another_gpus_file_is_refused(api, tmp_path):
    write(Table("Other GPU", "sm_80", {}, FORMAT), tmp_path / "t.json")
    with pytest.raises(UsageError, match="sm_80 code on Other GPU, and this GPU is Fake GPU: give it a file of its own"):
        tuned(api, [sum_program(3)], tmp_path / "t.json")


def test_tuning_for_another_generation_is_refused(api):
    with pytest.raises(UsageError, match="runs code for sm_80, which is not among --arch sm_75,sm_90a"):
        tune.gpu_to_measure(("sm_75", "sm_90a"))


def test_kernel_that_fails_is_named(api, tmp_path):
    api.failures["cuStreamSynchronize"] = ILLEGAL_ADDRESS
    with pytest.raises(LaunchError, match=r"toy \{'speed': 'first'\}: .*CUDA_ERROR_ILLEGAL_ADDRESS"):
        tuned(api, [sum_program(3)], tmp_path / "t.json")


def test_results_are_judged_by_their_median():
    rng = np.random.default_rng(0)
    right = [rng.standard_normal(100)] * 3
    right[1] = right[0] * (1 + 1e-3)
    off = right[0] * 1.01
    hole = right[0].copy()
    hole[7] = np.nan
    found = tune.disagreement([off, *right, hole], DType.F16)
    assert [w is None for w in found] == [False, True, True, True, False]
    assert tune.disagreement([right[0], off], DType.F16).count(None) == 0, "nobody knows which of two is right"
    whole = np.arange(9.0)
    assert [w is None for w in tune.disagreement([whole, whole, whole + 1e-6], DType.I32)] == [True, True, False]
    infinite = np.array([np.inf, np.nan, 1.0])
    assert tune.disagreement([infinite] * 2, DType.F32) == [None, None]


def test_repetitions_read_constants_of_their_own():
    program = conv(whole=256, at=64)
    again = tune.repeated(program.ops[0], program, 3)
    assert len(again.ops) == 3
    assert len({op.y for op in again.ops}) == len({op.w for op in again.ops}) == 3
    assert {again.tensors[op.x].storage for op in again.ops} == {"all"}
    assert {n for n in again.constants} == {"all", *(f"{n}@{i}" for n in ("w", "bias") for i in range(3))}
    for op in again.ops:
        assert key(replace(op, nodes=program.ops[0].nodes), again).replace("const", "") == key_of(program).replace("const", "")


# --- The command ---------------------------------------------------------------------------------------------------------


def test_tuning_without_a_gpu_ends_with_exit_code_6(tmp_path, monkeypatch):
    def nothing() -> Driver:
        raise DeviceError("no NVIDIA driver is installed")

    monkeypatch.setattr(driver_module, "driver", nothing)
    monkeypatch.chdir(tmp_path)
    onnx.save(model(), "m.onnx")
    done = CliRunner().invoke(cli.tccompile, ["m.onnx", "--tune", "--arch", "sm_80"])
    assert done.exit_code == 6
    assert "no NVIDIA driver is installed; tune on a machine that has one" in done.output and "--timing-cache FILE" in done.output
    assert [p.name for p in tmp_path.iterdir()] == ["m.onnx"]


def test_plan_and_times_cannot_be_one_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    onnx.save(model(), "m.onnx")
    done = CliRunner().invoke(cli.tccompile, ["m.onnx", "--tune", "--timing-cache", "one", "-o", "./one"])
    assert done.exit_code == 2 and "cannot both be one" in done.output


def test_an_older_plan_does_not_keep_from_tuning_into_a_new_file(tmp_path, monkeypatch):
    monkeypatch.setattr(driver_module, "driver", lambda: Driver(TimedApi()))
    monkeypatch.setattr(driver_module, "_devices", type(driver_module._devices)())
    monkeypatch.chdir(tmp_path)
    onnx.save(model(), "m.onnx")
    (tmp_path / "m.plan").write_bytes(MAGIC + b"older")
    done = CliRunner().invoke(cli.tccompile, ["m.onnx", "--tune", "--arch", "sm_90a"])
    assert done.exit_code == 2 and "runs code for sm_80, which is not among --arch sm_90a" in done.output


def test_times_of_another_generation_have_no_effect_and_say_so(tmp_path):
    write(table(conv(), {0: 9.0}), tmp_path / "t.json")
    with pytest.warns(RuntimeWarning, match=r"t\.json holds times of sm_90a code, and this builds for sm_80: it has no effect"):
        timings(tmp_path / "t.json", ("sm_80",))


def test_timing_cache_that_is_no_table_ends_with_exit_code_2(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    onnx.save(model(), "m.onnx")
    done = CliRunner().invoke(cli.tccompile, ["m.onnx", "--timing-cache", "t.json", "--arch", "sm_80"])
    assert done.exit_code == 2 and "cannot read the timing table t.json" in done.output


def model() -> onnx.ModelProto:
    """y = x · w"""
    w = onnx.numpy_helper.from_array(np.ones((64, 32), np.float32), "w")
    values = [helper.make_tensor_value_info(n, TensorProto.FLOAT, s) for n, s in (("x", [16, 64]), ("y", [16, 32]))]
    graph = helper.make_graph([helper.make_node("MatMul", ["x", "w"], ["y"])], "m", values[:1], values[1:], [w])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def test_compiling_takes_measured_times():
    options = Options(archs=("sm_90a",))
    program = to_program(model(), {}, options, Dump(None))
    (op,) = (op for op in program.ops if isinstance(op, Gemm))
    ranked = schedule.candidates(op, program, SM90)
    made = Timing(ranked[-1].kernel.name, dict(ranked[-1].config), 2.0, source(ranked[-1].kernel))
    known = Timings((Table("Some GPU", "sm_90a", {key(op, program): (made,)}, FORMAT),))
    (build,) = to_builds(program, options, Dump(None), known=known)
    chosen = build.choices[program.ops.index(op)]
    assert (chosen.kernel, dict(chosen.config)) == (ranked[-1].kernel, dict(ranked[-1].config))
    assert chosen.reason.startswith("measured 2.0 µs on Some GPU")


def test_times_that_come_with_tccompile() -> None:
    """Networks that they were measured for find them, and the fastest config of each layer is still among its candidates."""
    options = Options(archs=("sm_90a",), precision="fp16")
    program = to_program(skeleton("resnet18"), {}, options, Dump(None))
    known = timings(None, options.archs)
    (build,) = to_builds(program, options, Dump(None), known=known)
    direct = {i: conv for i, (_, conv) in uncopied(program).items()}
    for i, choice in enumerate(build.choices):
        if isinstance(op := direct.get(i, program.ops[i]), Conv | Gemm):
            assert choice.reason.startswith("measured"), op.nodes
            times = known.of(op, program, SM90).times.values()
            assert choice.cost == min(t.us for t in times) or choice.reason.endswith("beside others"), op.nodes


def test_recurrent_layers_keep_their_range_over_all_steps() -> None:
    """Weights of a model's own range, not of random numbers' (states would be chaotic), and sequences as long as they can be."""
    program = program_of("lstm_all")
    (op,) = program.ops
    assert isinstance(op, Rnn) and op.lengths is not None
    own = {n: Source(n, program.tensors[n].shape, "float32") for n in program.constants}
    data = tune._data(op, replace(program, constants=own))
    r = np.frombuffer(data[op.r], np.float16).astype(np.float32)
    assert 0.7 < r[r != 0].std() * program.tensors[op.r].shape[-1] ** 0.5 < 1.3
    lengths = np.frombuffer(data[op.lengths], np.int32)[: program.tensors[op.lengths].size]
    assert (lengths == program.tensors[op.x].shape[0]).all()


def test_floats_of_8_bits_are_no_subnormals() -> None:
    """Numbers of E4M3 have all of their digits from 2**-6 on, whatever sums they are parts of."""
    shapes = {"x": (1, 256, 8, 8), "w": (64, 256, 3, 3), "y": (1, 64, 8, 8)}
    tensors = {n: dense(n, shape, DType.F16 if n == "y" else DType.E4M3, NHWC) for n, shape in shapes.items()}
    op = replace(conv().ops[0], epilogue=Epilogue(ACC, ()))
    program = Program(("x",), ("y",), tensors, {"w": Source("w", shapes["w"], "float32")}, (op,))
    data = tune._data(op, program)
    assert data.keys() == {"x", "w"}
    for name, stored in data.items():
        values = from_storage(np.frombuffer(stored, np.uint8), DType.E4M3)
        assert (np.abs(values) < 2**-6).mean() < 0.02, name


def test_weights_of_attention_are_as_rough_as_its_operands() -> None:
    for kind, expected in ((DType.E4M3, DType.E4M3), (DType.F16, DType.F16)):
        program = attention("a", (1, 2, 8, 16), 8, dtype=kind, stored=DType.F16)
        assert tune._roughest(program.ops[0], program, DType.F16) is expected
