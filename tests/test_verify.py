"""A plan beside ONNX Runtime, the certificate that comes of it, and what a self-test makes of a plan that has changed."""

from __future__ import annotations

import sys
from dataclasses import replace

import numpy as np
import onnx
import pytest

from tccompile.cli import report
from tccompile.errors import InputError, UsageError, VerificationError
from tccompile.ir.metric import relative_error
from tccompile.plan.file import from_bytes, to_bytes
from tccompile.plan.rules import SEEDED
from tccompile.precision import ranges
from tccompile.runtime.session import Session
from tccompile.verify.certificate import results_text, selftest
from tccompile.verify.oracle import layers_text, verify
from tests.networks import reference, skeleton
from tests.plans import without_code
from tests.test_precision import Network, branches, chain


def on_cpu(plan):
    with Session(plan, "cpu") as session:
        return selftest(plan, session)


@pytest.fixture(scope="module")
def verified():
    model = chain()
    return verify(model, without_code(model, ("sm_80",)), 1e-2)


def test_a_plan_that_is_right_gets_a_certificate(verified):
    assert verified.passed and verified.layers == ()
    (result,) = verified.results
    assert 1e-5 < result.error < 1e-3 and "CPU" in result.device and result.inputs == "entry 0, seed 1"
    (made,) = verified.plan.certificates
    (expected,) = made.outputs
    assert expected.error == result.error and expected.bound == 1e-2 and len(expected.values) == 1600
    assert np.linalg.norm(expected.values) == pytest.approx(expected.norm, rel=1e-12)


def test_the_certificate_is_part_of_the_file(verified):
    data = to_bytes(verified.plan)
    read = from_bytes(data)
    assert to_bytes(read) == data and len(data) < 1.2 * len(to_bytes(replace(verified.plan, certificates=()))) + 16000
    (result,) = on_cpu(read)
    assert result.passed and result.expected == verified.results[0].error
    assert result.error == pytest.approx(result.expected, rel=1e-6)  # the output is small: all of it is in the certificate
    text = results_text([result])
    assert text.startswith("pass  ") and f"{result.error:.2e}" in text and "1e-02 is allowed" in text
    assert f"errors of random inputs {result.output}: {result.error:.1e}; 1e-02 is allowed" in report.inspect_text(
        {"plan": "p", "bytes": 1, **report.inspect(read)}
    )


@pytest.mark.parametrize("row", [True, False], ids=["in a row", "in batches"])
def test_inputs_held_back_from_calibration_are_in_the_certificate(row, tmp_path, monkeypatch):
    model = chain()
    plan = without_code(model, ("sm_80",))
    (name,), program = plan.entries[0].program.inputs, plan.entries[0].program
    shape = program.tensors[name].shape
    x = np.random.default_rng(0).standard_normal((8, *shape) if row else (8 * shape[0], *shape[1:]), np.float32)
    np.savez(tmp_path / "d.npz", **{name: x})
    made = verify(model, plan, 1e-2, calibrate=tmp_path / "d.npz")
    (certificate,), errors = made.plan.certificates, [r.error for r in made.results[1:]]
    assert len(errors) == certificate.held == 2
    (expected,) = certificate.outputs
    assert expected.held == max(errors) != expected.error and 1e-5 < expected.held < 1e-3
    assert made.results[-1].inputs == "entry 0, held back from calibration, set 1"
    last = x.reshape(8, *shape)[-1]
    with Session(plan, "cpu") as session:
        out = session.run(None, {name: last})[0]
    own = relative_error(out, reference(model, {name: last})[certificate.outputs[0].name])
    assert own == pytest.approx(errors[-1], rel=1e-4)  # this reference is made by one thread, so its sums are in another order
    read = from_bytes(to_bytes(made.plan))
    assert read.certificates[0].held == 2 and read.certificates[0].outputs[0].held == expected.held
    text = report.inspect_text({"plan": "p", "bytes": 1, **report.inspect(read)})
    assert f"errors of 2 sets of inputs held back from calibration {expected.name}: {expected.held:.1e}; of random inputs" in text
    monkeypatch.setattr(ranges, "TOO_MANY", 1)
    assert verify(model, plan, 1e-2, calibrate=tmp_path / "d.npz").plan.certificates[0].held == 0


def test_data_are_taken_as_for_measuring(tmp_path):
    """One input after the other along the first axis, put together to batches."""
    model = chain()
    plan = without_code(model, ("sm_80",))
    (name,), program = plan.entries[0].program.inputs, plan.entries[0].program
    batch, *rest = program.tensors[name].shape
    x = np.random.default_rng(0).standard_normal((3 * batch, *rest), np.float32)
    np.savez(tmp_path / "d.npz", **{name: x})
    made = verify(model, plan, 1e-2, tmp_path / "d.npz")
    assert [r.inputs for r in made.results[1:]] == [f"d.npz, set {i}" for i in range(3)] and made.passed
    np.savez(tmp_path / "d.npz", **{name: x[..., :-1]})
    with pytest.raises(InputError, match="fit the inputs of no entry"):
        verify(model, plan, 1e-2, tmp_path / "d.npz")


def test_a_plan_that_computes_something_else_fails(verified):
    """The weights of one channel of 16 have the other sign."""
    plan = verified.plan
    name = next(n for n, t in plan.entries[0].program.tensors.items() if n in plan.weights and t.shape == (16, 16, 3, 3))
    weights = np.frombuffer(plan.weights[name], np.float16).copy()
    weights[:144] *= -1
    (result,) = on_cpu(replace(plan, weights={**plan.weights, name: weights.tobytes()}))
    assert not result.passed and result.error > 1e-2 and results_text([result]).startswith("FAIL  ")


def test_infinities_fail(verified):
    plan = verified.plan
    weights = {n: b"\x00\x7c" * (len(w) // 2) for n, w in plan.weights.items()}
    (result,) = on_cpu(replace(plan, weights=weights))
    assert not result.passed and np.isnan(result.error) and "not finite" in results_text([result])
    assert result.to_json()["error"] is None and result.to_json()["passed"] is False


def test_inputs_that_are_not_those_of_the_certificate(verified):
    (made,) = verified.plan.certificates
    with pytest.raises(VerificationError, match="seed 2 gives other inputs"):
        on_cpu(replace(verified.plan, certificates=(replace(made, seed=2),)))
    with pytest.raises(UsageError, match="--verify"):
        on_cpu(replace(verified.plan, certificates=()))


def test_large_outputs_are_sampled():
    model = skeleton("espcn_x3")
    model.graph.input[0].type.tensor_type.shape.dim[2].dim_value = 40
    model.graph.input[0].type.tensor_type.shape.dim[3].dim_value = 44
    model.graph.output[0].type.tensor_type.ClearField("shape")
    del model.graph.value_info[:]
    made = verify(model, without_code(model, ("sm_80",)), 1e-2)
    (expected,) = made.plan.certificates[0].outputs
    assert expected.values.shape == (SEEDED,)
    (result,) = on_cpu(made.plan)
    assert result.passed and result.error == pytest.approx(made.results[0].error, rel=0.2)


def test_a_plan_that_overflows_does_not_pass():
    model = branches()
    with pytest.warns(RuntimeWarning, match="it gets no certificate"):
        made = verify(model, without_code(model, ("sm_80",), precision="fp16"), 1e-2)
    assert not made.passed and any(np.isnan(r.error) for r in made.results) and not made.plan.certificates


def test_every_tensor_is_compared_as_the_model_means_it():
    """Scaled tensors too: what is compared is their value."""
    model = branches()
    plan = without_code(model, ("sm_80",), precision="mixed")
    program = plan.entries[0].program
    made = verify(model, plan, 1e-2, layers=True)
    compared = {x.tensor: x for x in made.layers}
    assert len(compared) >= 10 and all(x.error <= 5e-3 for x in made.layers), layers_text(made.layers)
    assert any(program.storage[n].scale != 1.0 for n in compared if n in program.storage)
    exact = verify(model, without_code(model, ("sm_80",), precision="fp32"), 1e-4, layers=True)
    assert exact.passed and all(x.error <= 1e-5 for x in exact.layers), layers_text(exact.layers)
    assert len(layers_text(exact.layers).splitlines()) == len(exact.layers) + 1


def test_data_of_the_user(tmp_path):
    model = chain()
    plan = without_code(model, ("sm_80",))
    np.savez(tmp_path / "data.npz", x=np.random.default_rng(0).standard_normal((2, 1, 8, 10, 10)).astype(np.float32))
    made = verify(model, plan, 1e-2, tmp_path / "data.npz")
    assert [r.inputs for r in made.results] == ["entry 0, seed 1", "data.npz, set 0", "data.npz, set 1"] and made.passed
    np.savez(tmp_path / "data.npz", x=np.zeros((1, 8, 9, 9), np.float32))
    with pytest.raises(InputError, match="no entry"):
        verify(model, plan, 1e-2, tmp_path / "data.npz")


def test_no_certificate_of_what_is_not_finite():
    n = Network(1)
    model = n.model((1, 8), n("x", "Log"))
    with pytest.warns(RuntimeWarning, match="it gets no certificate"):
        made = verify(model, without_code(model, ("sm_80",)), 1e-2)
    assert made.passed and made.plan.certificates == ()  # of half of the elements there is a logarithm


def test_nothing_but_nan_does_not_pass():
    """Where the reference is NaN throughout, nothing was compared"""
    n = Network(1)
    model = n.model((1, 8), n(n(n("x", "Sqrt"), "ReduceSum", keepdims=1), "Neg"))
    with pytest.warns(RuntimeWarning, match="--input-range"):
        made = verify(model, without_code(model, ("sm_80",)), 1e-2)
    assert not made.passed and "not finite" in results_text(made.results)


def test_without_onnx_runtime(monkeypatch):
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    model = chain()
    with pytest.raises(UsageError, match="pip install onnxruntime"):
        verify(model, without_code(model, ("sm_80",)), 1e-2)


def test_a_model_that_onnx_runtime_does_not_take():
    model = chain()
    plan = without_code(model, ("sm_80",))
    model.graph.node.append(onnx.helper.make_node("Nothing", ["x"], ["nothing"]))
    with pytest.raises(UsageError, match=r"ONNX Runtime .* does not take the model"):
        verify(model, plan, 1e-2)


@pytest.mark.parametrize("elem", [onnx.TensorProto.BFLOAT16, onnx.TensorProto.DOUBLE], ids=["bf16", "float64"])
def test_types_that_onnx_runtime_has_few_operators_in(elem, tmp_path):
    """Weights in another file, in an attribute, a cast, and a branch of an If."""
    dtype = onnx.helper.tensor_dtype_to_np_dtype(elem)
    w = np.random.default_rng(1).standard_normal((8, 8, 1, 1)).astype(dtype)
    one = onnx.numpy_helper.from_array(np.array([0.5], dtype), "half")
    make, info = onnx.helper.make_node, onnx.helper.make_tensor_value_info
    branches = {
        f"{name}_branch": onnx.helper.make_graph([make(op, ["c"], [name])], name, [], [info(name, elem, (1, 8, 4, 4))])
        for name, op in (("then", "Relu"), ("else", "Neg"))
    }
    nodes = [
        make("Conv", ["x", "w"], ["a"]), make("Constant", [], ["half"], value=one), make("Mul", ["a", "half"], ["b"]),
        make("Cast", ["b"], ["c"], to=elem), make("If", ["yes"], ["y"], **branches),
    ]  # fmt: skip
    weights = [onnx.numpy_helper.from_array(w, "w"), onnx.numpy_helper.from_array(np.array(True), "yes")]
    x, y = (info(n, elem, (1, 8, 4, 4)) for n in ("x", "y"))
    model = onnx.helper.make_model(
        onnx.helper.make_graph(nodes, "g", [x], [y], weights), opset_imports=[onnx.helper.make_opsetid("", 22)], ir_version=10
    )
    onnx.save(model, tmp_path / "m.onnx", save_as_external_data=True, location="w.bin", size_threshold=0)
    made = verify(tmp_path / "m.onnx", without_code(tmp_path / "m.onnx", ("sm_80",)), 1e-2)
    assert made.passed and 0 < made.results[0].error < 1e-2
    assert made.plan.certificates[0].oracle.endswith("(bf16 and float64 as fp32)")


def test_relative_error():
    a = np.array([3.0, 4.0])
    assert relative_error(a, a) == 0 and relative_error(a + np.array([0, 0.5]), a) == pytest.approx(0.1)
    assert np.isnan(relative_error(np.array([np.nan, 4]), a)) and np.isnan(relative_error(a, np.array([np.inf, 4])))
    assert relative_error(np.array([np.inf, 4]), np.array([np.inf, 4])) == 0
    assert np.isnan(relative_error(np.array([-np.inf, 4]), np.array([np.inf, 4])))
    assert relative_error(np.ones(2), np.zeros(2)) == pytest.approx(2**0.5)
