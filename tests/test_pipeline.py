"""The whole way with machine code, the promises of a build, and what may not be imported."""

from __future__ import annotations

import subprocess
import sys
import tracemalloc
from pathlib import Path

import numpy as np
import onnx
import pytest

import tccompile
from tccompile.dump import Dump
from tccompile.emit.pack import pack
from tccompile.errors import UsageError
from tccompile.ir.limits import check_program
from tccompile.load.model import read, sources
from tccompile.options import Options
from tccompile.pipeline import to_program
from tccompile.plan.file import to_bytes
from tccompile.plan.format import Address
from tccompile.plan.rules import check_plan
from tccompile.plan.weights import fill
from tests.networks import feeds, reference, relative_error, skeleton
from tests.rewrites.common import Net
from tests.tiers import thorough


@pytest.fixture(scope="module")
def espcn() -> onnx.ModelProto:
    """A small network whose code compiles in seconds."""
    return skeleton("espcn_x3")


@pytest.fixture(scope="module")
def plan(espcn) -> tccompile.Plan:
    return tccompile.compile(espcn, archs=("sm_80",))


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"archs": "sm_86"}, r"archs is a list of names, as \['sm_86'\]"),
        ({"precision": "fp8"}, "no precision stores everything in fp8: quantize fp8, with real inputs"),
        ({"fp32": "conv"}, r"fp32 is a list of names, as \['conv'\]"),
        ({"shapes": {"x": "1x3x8x8"}}, r"the shape of 'x' must be integers, as \{'x': \(1, 3, 224, 224\)\}, not '1x3x8x8'"),
        ({"shapes": {"x": (None, 3)}}, "the shape of 'x' must be integers"),
        ({"shapes": (1, 3, 8, 8)}, "shapes go by the inputs' names"),
        ({"shapes": {"x": (1,)}, "entries": [{"x": (1,)}]}, "with entries, give all of them there"),
        ({"entries": [{"x": (1, 3)}, {"x": [1, 3]}]}, "two entries of the same shapes, x=1x3"),
    ],
)
def test_arguments_that_do_not_make_sense(espcn, arguments, says):
    with pytest.raises(UsageError, match=says):
        tccompile.compile(espcn, **arguments)


def test_compile_save_load_run(espcn, plan, tmp_path):
    plan.save(tmp_path / "espcn.plan")
    inputs = feeds(espcn, 5)
    (expected,) = reference(espcn, inputs).values()
    with tccompile.Session(tmp_path / "espcn.plan", device="cpu") as session:
        (out,) = session.run(None, inputs)
    assert relative_error(out, expected) <= 3e-3
    assert plan.notes == ("floats between inputs and outputs are stored in fp16",)


def test_sections_for_a_generation_and_its_ptx(plan):
    kinds = [{plan.images[launch.image].kind for step in s.steps for launch in step.launches} for s in plan.entries[0].sections]
    assert [s.arch for s in plan.entries[0].sections] == ["sm_80", "sm_80"] and kinds == [{"cubin"}, {"ptx"}]


@thorough
def test_the_same_input_gives_the_same_bytes(espcn, tmp_path):
    """In another process, with an empty cache, and where there is no ONNX Runtime, which compiling does not need."""
    onnx.save(espcn, tmp_path / "m.onnx")
    code = (
        "import sys\n"
        "sys.modules['onnxruntime'] = None\n"
        "import tccompile\n"
        "if __name__ == '__main__':\n"
        "    tccompile.compile(sys.argv[1], archs=('sm_80',)).save(sys.argv[2])\n"
    )
    (tmp_path / "build.py").write_text(code)
    package = str(Path(tccompile.__file__).parents[1])
    environment = {"TCCOMPILE_CACHE_DIR": str(tmp_path / "cache"), "PATH": "", "HOME": str(tmp_path), "PYTHONPATH": package}
    command = [sys.executable, tmp_path / "build.py", tmp_path / "m.onnx", tmp_path / "other.plan"]
    subprocess.run(command, env=environment, check=True)
    tccompile.compile(tmp_path / "m.onnx", archs=("sm_80",)).save(tmp_path / "own.plan")
    assert (tmp_path / "own.plan").read_bytes() == (tmp_path / "other.plan").read_bytes()


def test_weights_can_be_left_out_and_filled_in(plan, tmp_path):
    model = skeleton("mobilenet_v2")
    from tests.plans import without_code

    whole = without_code(model, ("sm_80",))
    small = type(whole)(**{**vars(whole), "weights": {n: w for n, w in whole.weights.items() if len(w) <= 4096}})
    assert len(to_bytes(small)) < 0.1 * len(to_bytes(whole))
    filled = fill(small, sources(model))
    assert {n: bytes(w) for n, w in filled.weights.items()} == {n: bytes(w) for n, w in whole.weights.items()}


@thorough
def test_entries_for_several_shapes_share_weights(tmp_path):
    model = skeleton("espcn_x3")
    for value in (*model.graph.input, *model.graph.output):
        for axis, name in ((2, "h"), (3, "w")):
            value.type.tensor_type.shape.dim[axis].dim_param = f"{value.name}_{name}"
    del model.graph.value_info[:]
    shapes = [{"input": (1, 1, 12, 20)}, {"input": (1, 1, 7, 9)}]
    plan = tccompile.compile(model, archs=("sm_80",), entries=shapes)
    single = tccompile.compile(model, shapes[0], archs=("sm_80",))
    assert sum(map(len, plan.weights.values())) == sum(map(len, single.weights.values()))
    with tccompile.Session(plan, device="cpu") as session:
        for shape in shapes:
            inputs = feeds(model, 6, shape)
            (expected,) = reference(model, inputs).values()
            (out,) = session.run(None, inputs)
            assert relative_error(out, expected) <= 3e-3


def test_every_stage_is_dumped(tmp_path):
    from tccompile.options import Options
    from tccompile.pipeline import compile_model

    net = Net(x=(4, 40))
    h = net("Gemm", "x", net.normal(24, 40), net.normal(24), transB=1)
    model = net.out(net("Clip", net("Relu", h), np.float32(-1), np.float32(6))).model()
    plan = compile_model(model, Options(archs=("sm_80",), dump=tmp_path))
    names = {p.name for p in tmp_path.iterdir()}
    assert {"00-load.onnx", "01-rewrite.onnx", "02-lower.txt", "03-fuse.txt", "04-precision.txt", "05-layout.txt"} <= names
    assert {"06-schedule.sm_80.txt", "07-place.sm_80.txt", "kernels"} <= names
    (done,) = plan.rewrites
    assert (tmp_path / "01-rewrite.txt").read_text() == f"{done.equation}\n    n2\n" and done.nodes == ("n2",)
    inputs = feeds(model, 5)
    (expected,) = reference(model, inputs).values()
    (got,) = reference(onnx.load(tmp_path / "01-rewrite.onnx"), inputs).values()
    assert np.linalg.norm(got - expected) / np.linalg.norm(expected) <= 1e-6


def test_running_imports_no_compiler(plan, espcn, tmp_path):
    plan.save(tmp_path / "m.plan")
    np.save(tmp_path / "x.npy", next(iter(feeds(espcn, 0).values())))
    code = (
        "import sys\n"
        "sys.argv = ['tcrun', sys.argv[1], sys.argv[2], '--device', 'cpu']\n"
        "from tccompile.cli.commands import tcrun\n"
        "try:\n    tcrun()\nexcept SystemExit as stop:\n    assert stop.code == 0, stop.code\n"
        "loaded = {'onnx', 'onnx_graphsurgeon', 'numba', 'numba_cuda', 'llvmlite', 'rich'} & set(sys.modules)\n"
        "assert not loaded, loaded\n"
    )
    subprocess.run([sys.executable, "-c", code, tmp_path / "m.plan", tmp_path / "x.npy"], check=True, capture_output=True)


@thorough
def test_a_config_whose_code_spills_gives_way_to_the_next(monkeypatch):
    from tccompile import pipeline
    from tccompile.emit.job import SpillError

    whole, refused, net = pipeline.emit, [], Net(x=(1, 3, 40, 40))
    model = net.out(net("Conv", "x", np.ones((16, 3, 3, 3), np.float32), pads=[1, 1, 1, 1])).model()
    plan = tccompile.compile(model, archs=("sm_80",))

    def first_spills(jobs, *rest):
        if not refused:
            refused.extend(job for job in jobs if job[0].kernel == "conv_patch")
            raise SpillError("it spills registers", tuple(refused))
        assert not {job[0] for job in refused} & {job[0] for job in jobs}
        return whole(jobs, *rest)

    monkeypatch.setattr(pipeline, "emit", first_spills)
    other = tccompile.compile(model, archs=("sm_80",))
    steps = [[(s.kernel, dict(s.config)) for s in p.entries[0].sections[0].steps] for p in (plan, other)]
    assert len(steps[0]) == len(steps[1]) and steps[0] != steps[1]


def test_a_plan_says_what_is_not_computed_in_its_own_type():
    net = Net(dtype=np.float64, x=(2, 3))
    plan = tccompile.compile(net.out(net("Relu", "x")).model(), archs=("sm_80",))
    assert plan.notes[-1] == "x, t0: float64, computed in float32"


def test_entries_read_their_own_constants_of_one_name():
    """Of a resampled image, the places and weights that depend on its shape."""
    net = Net(x=(1, 8, "h", "w"))
    model = net.out(net("Resize", "x", None, np.array([1, 1, 1.7, 1.7], np.float32), mode="linear")).model()
    plan = tccompile.compile(model, archs=("sm_80",), entries=[{"x": (1, 8, 5, 6)}, {"x": (1, 8, 9, 7)}])
    check_plan(plan)
    taken = []
    for entry in plan.entries:
        args = [arg for step in entry.sections[0].steps for launch in step.launches for arg in launch.args]
        taken.append({arg.name for arg in args if isinstance(arg, Address) and arg.space == "weights"})
        assert taken[-1] == set(entry.program.constants)
    assert len(taken[0]) == 4 and not taken[0] & taken[1]


def test_what_is_said_of_a_constant_goes_with_its_new_name():
    """Where entries store a weight of one name differently, the second has it under another name, with its reason and scale."""
    net = Net(x=("n", 32))
    model = read(net.out(net("MatMul", "x", net.normal(32, 8))).model())
    options = [Options(), Options(fp32=("n0",))]
    programs = [to_program(model, {"x": (n, 32)}, o, Dump(None)) for n, o in zip((2, 3), options, strict=True)]
    plan = pack("cpu", {}, [(program, ()) for program in programs], {}, model.weights, False)
    for entry in plan.entries:
        check_program(entry.program)
    ((weight, recipe),) = plan.entries[1].program.constants.items()
    assert weight not in programs[1].tensors and recipe == programs[1].constants[weight.partition("@")[0]]
    assert plan.entries[1].program.storage[weight].reason.startswith("fp32")


def test_weights_are_neither_copied_nor_rearranged_to_measure(tmp_path):
    """They stay in the file beside the model, mapped."""
    net = Net(x=(1, 1024))
    y = "x"
    for _ in range(8):
        y = net("MatMul", y, net.normal(1024, 1024, scale=0.03))
    path, size = tmp_path / "wide.onnx", 8 * 1024 * 1024 * 4
    onnx.save(net.out(y).model(), path, save_as_external_data=True, location="weights")
    tracemalloc.start()
    to_program(path, {}, Options(), Dump(None))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < size / 2
