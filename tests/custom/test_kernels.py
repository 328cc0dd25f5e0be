"""Operators with kernels in networks: values on the CPU engine, formats, layouts, outputs, and what a plan holds of them."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
from onnx import helper

import tccompile as tc
from tccompile.arch import ARCHS
from tccompile.custom.files import collected, using
from tccompile.emit import toolchain
from tccompile.emit.compile import compile_code, resources
from tccompile.errors import DeviceError, TccompileError
from tccompile.ir.limits import check_program
from tccompile.ir.ops import Custom
from tccompile.ir.types import DType
from tccompile.kernels.custom import CustomKernel
from tccompile.plan.file import from_bytes, to_bytes
from tccompile.runtime.session import Session
from tccompile.verify.oracle import verify
from tccompile.verify.rebuild import differences
from tests.custom.common import EXAMPLE, OPERATORS, model_of, normal, plan_of, program_of, run
from tests.custom.operators import LANES, peak_numpy, spread_numpy
from tests.networks import relative_error
from tests.plans import without_code
from tests.rewrites.common import Net
from tests.tiers import thorough

PRODUCER = {"tccompile": tc.__version__, **toolchain.versions()}


def example() -> Net:
    """The example's network, smaller."""
    net = Net(x=(1, 3, 9, 12))
    features = net("Conv", "x", net.normal(16, 3, 3, 3, scale=0.2), pads=[1, 1, 1, 1])
    screened = net("Halftone", features, domain="press", pitch=6, depth=0.5)
    return net.out(net("Cells", screened, net.normal(24, 16), domain="press"))


def _by_hand(net: Net, x: np.ndarray) -> np.ndarray:
    """The example by ONNX Runtime and NumPy."""
    conv = Net(x=x.shape)
    conv.nodes, conv.weights = net.nodes[:1], net.weights
    (features,) = onnxruntime.InferenceSession(conv.out("t0").model().SerializeToString()).run(None, {"x": x})
    p, q = np.mgrid[: x.shape[2], : x.shape[3]]
    features += 0.5 * np.cos((p + q) * (np.pi / 6)) * np.cos((p - q) * (np.pi / 6))
    seeds = np.frombuffer(net.weights[1].raw_data, np.float32).reshape(24, 16)
    return np.sqrt(((features[:, None] - seeds[None, :, :, None, None]) ** 2).sum(2).min(1, keepdims=True))


@pytest.mark.parametrize("precision", ["mixed", "fp32", "fp16", "bf16"])
def test_a_network_of_both_kinds(precision: str) -> None:
    x = normal(1, 3, 9, 12)
    (out,) = run(example(), {"x": x}, EXAMPLE / "press.py", precision=precision)
    assert relative_error(out, _by_hand(example(), x)) < {"fp32": 1e-5, "bf16": 1e-2}.get(precision, 2e-3)


def test_the_example_is_two_launches_and_the_kernel_is_the_generation_s() -> None:
    for section in plan_of(example(), EXAMPLE / "press.py").entries[0].sections:
        launched = [step for step in section.steps if step.launches]
        assert [step.kernel for step in launched][1:] == ["custom"] and all(len(step.launches) == 1 for step in launched)
    program = program_of(example(), EXAMPLE / "press.py")
    with using(collected([EXAMPLE / "press.py"])):
        for arch in ARCHS.values():
            (launch,) = CustomKernel().work(program.ops[-1], program, {}, arch).launches
            assert dict(launch.code.params)["since"] == ("sm_80" if arch.cc >= (8, 0) else "")


def test_two_outputs_are_one_launch_and_others_may_be_of_other_types() -> None:
    x, w = normal(5, 19), normal(19, LANES + 6, seed=2)
    net = Net(x=(5, 19), w=w.shape)
    y, largest = net("Spread", "x", "w", outputs=2, domain="test", steps=[1.5, 2.0], scale=0.5)
    value, place = net("Peak", y, outputs=2, domain="test")
    (biased,) = [net("Peak", y, w[0], domain="test")]
    net.out(y, largest, value, place, biased)
    program = program_of(net)
    assert sorted(len(op.outputs) for op in program.ops if isinstance(op, Custom)) == [1, 1, 1, 2]
    found = run(net, {"x": x, "w": w})
    y, largest = spread_numpy(x, w, (1.5, 2.0), 0.5)
    expected = [y, largest, *peak_numpy(y), peak_numpy(y, w[0])[0]]
    assert found[3].dtype == np.int64 and (found[3] == expected[3]).all()
    assert all(relative_error(a, b) < 2e-3 for a, b in zip(found, expected, strict=True))


def test_an_output_that_nobody_reads_is_left_out() -> None:
    net = Net(x=(5, 19))
    (place,) = net("Peak", "x", outputs=2, domain="test")[1:]
    (op,) = program_of(net.out(place)).ops
    assert isinstance(op, Custom) and op.outputs == (1,) and op.y == place  # which it writes itself


@pytest.mark.parametrize(("floats", "stored"), [("float32", DType.F32), ("any", DType.F16)])
def test_floats_are_stored_as_asked(floats: str, stored: DType) -> None:
    made = tc.op("test::K", out=lambda x: x.like(), grid=1, reference=lambda x: x * 2, floats=floats)(lambda x, y: None)
    net = Net(x=(1, 8, 6, 6))
    t = net("K", net("Conv", "x", net.normal(16, 8, 3, 3, scale=0.1)), domain="test")
    program = program_of(net.out(net("Conv", t, net.normal(8, 16, 1, 1))), made)
    (op,) = [op for op in program.ops if isinstance(op, Custom)]
    assert {program.tensors[name].dtype for name in (*op.inputs, op.y)} == {stored}


@pytest.mark.parametrize(("layout", "order"), [("rows", (0, 1, 2, 3)), ("channels", (0, 2, 3, 1))])
def test_axes_lie_as_asked(layout: str, order: tuple[int, ...]) -> None:
    made = tc.op("test::K", out=lambda x: x.like(), grid=1, reference=lambda x: x * 2, layout=layout)(lambda x, y: None)
    net = Net(x=(2, 8, 6, 6))
    t = net("K", net("Conv", net("K", "x", domain="test"), net.normal(16, 8, 3, 3)), domain="test")
    program = program_of(net.out(net("Relu", t)), made)
    found = [program.tensors[n].order for op in program.ops if isinstance(op, Custom) for n in (*op.inputs, op.y)]
    assert found == [order] * 4


# --- Plans -------------------------------------------------------------------------------------------------------------


def test_a_plan_never_brings_python() -> None:
    """The CPU engine refuses its steps, and nothing is imported; what the user gives must be what the plan was made with."""
    plan = from_bytes(to_bytes(replace(plan_of(example(), EXAMPLE / "press.py"), producer=PRODUCER)))
    spec = importlib.util.spec_from_file_location("another_name", EXAMPLE / "press.py")
    assert spec is not None and spec.loader is not None
    spec.loader.exec_module(module := importlib.util.module_from_spec(spec))
    assert Session(plan, "cpu", ops=[module]).device == Session(plan, "cpu", ops=[EXAMPLE / "press.py"]).device == "cpu"
    before = set(sys.modules)
    for ops in ((), (OPERATORS,)):
        says = r"node 'n2': press::Cells is the user's own operator: give its Python, by --ops"
        with using(collected([])), pytest.raises(DeviceError, match=says):
            Session(plan, "cpu", ops=ops)
    assert not [name for name in set(sys.modules) - before if "press" in name]
    other = tc.op("press::Cells", out=lambda x: x.like((1, 1, 9, 12)), grid=1, reference=lambda x, seeds: x[:, :1])(
        lambda x, seeds, y: None
    )
    with pytest.raises(DeviceError, match="the Python that is given is not what the plan was made with"):
        Session(plan, "cpu", ops=[other])
    with using(collected([])), pytest.raises(DeviceError, match=says):
        differences(plan)


def test_weights_that_a_kernel_reads_can_be_replaced() -> None:
    net, x = example(), normal(1, 3, 9, 12)
    plan = plan_of(net, EXAMPLE / "press.py")
    with Session(plan, "cpu", ops=[EXAMPLE / "press.py"]) as session:
        before = session.run(None, {"x": x})[0]
        session.refit({"w1": normal(24, 16, seed=9)})
        after = session.run(None, {"x": x})[0]
    net.weights[1].raw_data = normal(24, 16, seed=9).tobytes()
    assert relative_error(after, _by_hand(net, x)) < 2e-3 < relative_error(after, before)


@pytest.mark.parametrize("reads", [("settings", "{}"), ("settings", "[" * 5000), ("outputs", (1, 0)), ("outputs", (99,))])
def test_a_plan_s_operators_are_checked(reads: tuple[str, Any]) -> None:
    program = program_of(example(), EXAMPLE / "press.py")
    ops = tuple(replace(op, **dict([reads])) if isinstance(op, Custom) else op for op in program.ops)
    with pytest.raises(TccompileError, match="Custom 'n2': shapes"):
        check_program(replace(program, ops=ops))


def test_what_is_verified_are_the_references() -> None:
    with using(collected([EXAMPLE / "press.py"])):
        found = verify(model_of(example()), plan_of(example(), EXAMPLE / "press.py"), 2e-3)
    assert found.passed and "the user's references" in found.plan.certificates[0].oracle


@thorough
def test_the_example_s_kernels_are_compiled_for_all_generations() -> None:
    program = program_of(example(), EXAMPLE / "press.py")
    with using(collected([EXAMPLE / "press.py"])):
        for arch in ARCHS.values():
            (launch,) = CustomKernel().work(program.ops[-1], program, {}, arch).launches
            assert resources(launch.code, arch).stack == 0
            text = compile_code(launch.code, arch, "ptx").code
            assert (b"mma.sync" in text) == (arch.cc >= (8, 0)) and str(EXAMPLE).encode() not in text


@thorough
def test_a_plan_s_code_is_made_again_with_the_user_s_python() -> None:
    net = Net(x=(33, 5))
    plan = tc.compile(model_of(net.out(net("Peak", "x", domain="test"))), archs=["sm_86"], ops=[OPERATORS])
    assert [image.kernel for image in plan.images] == ["custom"]
    with using(collected([OPERATORS])):
        assert differences(plan) == []
        changed = replace(plan, images=(replace(plan.images[0], code=plan.images[0].code[:-1] + b"!"),))
        assert "bytes that are not the" in differences(changed)[0].what


@thorough
def test_the_example_runs(tmp_path: Path) -> None:
    command = [sys.executable, str(EXAMPLE / "demo.py"), "sm_80"]
    environment = os.environ | {"PYTHONPATH": str(EXAMPLE.parents[2])}
    text = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True).stdout
    assert "sm_80 launches features + screen, cells\n" in text
    assert re.search(r"distances from 2\.\d\d to \d\.\d\d, on ", text) and (tmp_path / "press.plan").exists()


def test_a_model_s_own_function_of_the_name_is_what_onnx_runtime_runs() -> None:
    """The user's kernel takes its place here, and --verify compares the two."""
    net = Net(x=(7, 5))
    model = model_of(net.out(net("Peak", "x", domain="test")))
    body = [helper.make_node("ReduceMax", ["x", "axis"], ["y"], keepdims=0)]
    body.insert(0, helper.make_node("Constant", [], ["axis"], value_ints=[1]))
    opsets = [helper.make_opsetid("", 23)]
    model.functions.append(helper.make_function("test", "Peak", ["x"], ["y"], body, opsets))
    model.opset_import.append(helper.make_opsetid("test", 1))
    model.graph.output[0].CopyFrom(helper.make_tensor_value_info(net.outputs[0], 1, None))
    with using(collected([OPERATORS])):
        plan = without_code(model, ("sm_80",))
        assert [type(op) for op in plan.entries[0].program.ops] == [Custom]
        found = verify(model, plan, 1e-6)
    assert found.passed and found.plan.certificates[0].oracle.startswith("ONNX Runtime")


def test_a_generation_gets_the_newest_kernel_that_it_runs() -> None:
    made = tc.op("test::K", out=lambda x: x.like(), grid=1, reference=lambda x: x)(lambda x, y: None)
    for since in ("sm_90a", "sm_75"):
        made = made.on(since, grid=2)(lambda x, y: None)
    chosen = {name: made.program(arch).since for name, arch in ARCHS.items()}
    assert chosen == dict.fromkeys(("sm_61", "sm_70"), "") | dict.fromkeys([*ARCHS][2:], "sm_75") | {"sm_90a": "sm_90a"}
