"""`tcrefit`, and adapters in `tccompile`, as a user meets them."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx
import pytest

from tccompile.load.cut import Part
from tccompile.options import Options
from tccompile.pipeline import adapted
from tccompile.plan.file import read_plan
from tccompile.refit.lora import merged, places, read_adapters
from tccompile.verify.oracle import verify
from tests.commands import Run
from tests.refit.common import bits, plan_of, products, tuned, weights, write_safetensors
from tests.refit.test_lora import exported, named
from tests.refit.test_names import elsewhere
from tests.rewrites.common import Net
from tests.tiers import thorough

RNG = np.random.default_rng(9)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, its plan, the model fine-tuned, and adapters of it."""
    folder = tmp_path_factory.mktemp("refit")
    old = exported().model()
    onnx.save(old, folder / "old.onnx")
    onnx.save(tuned(old), folder / "tuned.onnx")
    plan_of(old).save(folder / "old.plan")
    arrays = {}
    for module in ("fc1", "fc2"):
        arrays[f"base_model.model.layers.0.{module}.lora_A.weight"] = RNG.standard_normal((2, 16)).astype(np.float32) * 0.2
        arrays[f"base_model.model.layers.0.{module}.lora_B.weight"] = RNG.standard_normal((16, 2)).astype(np.float32) * 0.2
    write_safetensors(folder / "adapters.safetensors", arrays)
    return folder


def test_the_weights_of_another_model(run: Run, folder: Path) -> None:
    done = run("tcrefit", folder / "old.plan", folder / "tuned.onnx", "-o", "new.plan")
    assert (
        done.code == 0 and done.out == f"new.plan: the plan {folder / 'old.plan'} with the weights of {folder / 'tuned.onnx'}\n"
    )
    assert bits(read_plan("new.plan")) == bits(plan_of(onnx.load(folder / "tuned.onnx")))
    assert run("tcrefit", folder / "old.plan", folder / "tuned.onnx", "-q").out == ""
    assert Path("tuned.plan").read_bytes() == Path("new.plan").read_bytes()
    back = run("tcrefit", "new.plan", folder / "old.onnx", "-o", "back.plan", "--json")
    assert json.loads(back.out) == {"plan": "back.plan", "bytes": Path("back.plan").stat().st_size, "certificates": 0}
    assert bits(read_plan("back.plan")) == bits(read_plan(folder / "old.plan"))


def test_a_certificate_goes_and_is_made_anew(run: Run, folder: Path) -> None:
    done = run("tcrefit", folder / "old.plan", folder / "old.onnx", "-o", "sure.plan", "--verify")
    assert done.code == 0 and done.out.startswith("pass  t3: error") and read_plan("sure.plan").certificates
    done = run("tcrefit", "sure.plan", folder / "tuned.onnx", "-o", "new.plan")
    assert "its certificate was of the weights before, and is left out: --verify makes one" in done.out
    assert run("tcrun", "new.plan", "--selftest", "--device", "cpu").code == 2
    assert run("tcrefit", "sure.plan", folder / "tuned.onnx", "-o", "new.plan", "--verify", "--json").code == 0
    assert run("tcrun", "new.plan", "--selftest", "--device", "cpu").code == 0
    strict = run("tcrefit", "sure.plan", folder / "tuned.onnx", "-o", "no.plan", "--verify", "--tolerance", "1e-9")
    assert strict.code == 9 and not Path("no.plan").exists() and "compile the model with these weights" in strict.err


def other_graph() -> onnx.ModelProto:
    net = exported()
    net.nodes[1].op_type = "Tanh"
    return net.model()


def other_shape() -> onnx.ModelProto:
    n = Net(x=(4, 16))
    h = n("Relu", n("Gemm", "x", n.normal(24, 16), n.normal(24), transB=1))
    n.out(n("Add", n("MatMul", h, n.normal(24, 16)), n.normal(16)))
    return named(n, {}, {0: "layers.0.fc1.weight", 1: "layers.0.fc1.bias", 2: "onnx::MatMul_12"}).model()


def far() -> onnx.ModelProto:
    old = exported().model()
    values = onnx.numpy_helper.to_array(old.graph.initializer[0]) * np.float32(9)
    old.graph.initializer[0].CopyFrom(onnx.numpy_helper.from_array(values, "layers.0.fc1.weight"))
    return old


@pytest.mark.parametrize(
    "model, code, why",
    [
        (other_graph, 2, "the plan has not node 'n1' (Tanh), which computes 't1'; compile the model"),
        (other_shape, 2, "the weight 'layers.0.fc1.bias' has the shape (16,) in the plan, and (24,) in the model"),
        (far, 9, "the weight 'layers.0.fc1.weight': values up to"),
    ],
)
def test_what_does_not_fit(run: Run, folder: Path, model, code: int, why: str) -> None:
    onnx.save(model(), "new.onnx")
    done = run("tcrefit", folder / "old.plan", "new.onnx", "-o", "new.plan")
    assert done.code == code and why in done.err and not Path("new.plan").exists()


def test_weights_by_other_names(run: Run, folder: Path) -> None:
    old = products().model()
    plan_of(old).save("old.plan")
    write_safetensors(Path("was.safetensors"), elsewhere(weights(old)))
    write_safetensors(Path("new.safetensors"), elsewhere(weights(tuned(old))))
    assert run("tcrefit", "old.plan", "new.safetensors").code == 2
    assert run("tcrefit", "old.plan", "new.safetensors", "--was", "was.safetensors").code == 0
    names = {"w0": "fc1.weight", "w1": "fc1.bias", "w2": {"name": "fc2.weight", "transposed": True}, "w3": "fc2.bias"}
    Path("names.json").write_text(json.dumps(names))
    assert run("tcrefit", "old.plan", "new.safetensors", "--map", "names.json", "-o", "mapped.plan").code == 0
    assert bits(read_plan("new.plan")) == bits(read_plan("mapped.plan")) == bits(plan_of(tuned(old)))
    no = run("tcrefit", "old.plan", "new.safetensors", "--was", "was.safetensors", "-o", "no.plan", "--verify")
    assert no.code == 2 and "holds weights alone; give the model" in no.err


def test_adapters_before_compiling_and_after(run: Run, folder: Path) -> None:
    """The same bits, as the same choices are made."""
    done = run("tcrefit", folder / "old.plan", folder / "old.onnx", "--lora", folder / "adapters.safetensors",
               "--lora-scale", "0.5", "-o", "new.plan", "--verify", "--json")  # fmt: skip
    assert done.code == 0, done.err
    made = read_plan("new.plan")
    old = onnx.load(folder / "old.onnx")
    base = weights(old)
    changed = merged(base, places([plan_of(old).entries[0].program]), read_adapters(folder / "adapters.safetensors"), 0.5)
    assert set(changed) == {"layers.0.fc1.weight", "onnx::MatMul_12"}
    for tensor in old.graph.initializer:
        tensor.CopyFrom(onnx.numpy_helper.from_array((base | changed)[tensor.name], tensor.name))
    assert bits(made) == bits(plan_of(old))
    before = adapted(folder / "old.onnx", Options(lora=folder / "adapters.safetensors", lora_scale=0.5))
    assert bits(made) == bits(plan_of(before))
    assert verify(before, made, 1e-2).passed and not verify(folder / "old.onnx", made, 1e-2).passed


@thorough
def test_adapters_before_compiling(run: Run, folder: Path) -> None:
    command = ("tccompile", folder / "old.onnx", "--arch", "sm_80", "--lora", folder / "adapters.safetensors")
    done = run(*command, "--lora-scale", "0.5", "-o", "compiled.plan", "--verify", "-q")
    assert done.code == 0, done.err
    before = adapted(folder / "old.onnx", Options(lora=folder / "adapters.safetensors", lora_scale=0.5))
    assert bits(read_plan("compiled.plan")) == bits(plan_of(before))


def test_adapters_that_belong_nowhere(run: Run, folder: Path) -> None:
    onnx.save(products().model(), "model.onnx")
    for command in (("tccompile", "model.onnx", "--arch", "sm_80"), ("tcrefit", folder / "old.plan", folder / "old.onnx")):
        ones = {"z.lora_A.weight": np.ones((1, 16), np.float32), "z.lora_B.weight": np.ones((16, 1), np.float32)}
        write_safetensors(Path("far.safetensors"), ones)
        done = run(*command, "--lora", "far.safetensors", "-o", "no.plan")
        assert done.code == 2 and "the adapter 'z': no product's weight is called so" in done.err
        assert run(*command, "--lora-scale", "2").code == 2


def test_a_map_of_adapters(run: Run) -> None:
    old = products().model()
    onnx.save(old, "old.onnx")
    plan_of(old).save("old.plan")
    a, b = np.full((1, 16), 0.1, np.float32), np.full((16, 1), 0.1, np.float32)
    write_safetensors(Path("a.safetensors"), {"deep.z.lora_A.weight": a, "deep.z.lora_B.weight": b})
    Path("names.json").write_text('{"w2": "deep.z"}')
    done = run("tcrefit", "old.plan", "old.onnx", "--lora", "a.safetensors", "--map", "names.json", "-o", "new.plan")
    assert done.code == 0, done.err
    changed = {n for n, data in bits(read_plan("new.plan")).items() if data != bits(read_plan("old.plan"))[n]}
    assert len(changed) == 1


def test_weights_of_a_plan_are_listed(run: Run, folder: Path) -> None:
    done = run("tcinspect", folder / "old.plan", "--weights")
    lines = done.out.splitlines()
    assert done.code == 0 and len(lines) == 4
    assert lines[0].startswith("layers.0.fc1.bias: float32[16]  in ")
    found = json.loads(run("tcinspect", folder / "old.plan", "--weights", "--json").out)["weights"]
    assert [w["name"] for w in found] == ["layers.0.fc1.bias", "layers.0.fc1.weight", "onnx::MatMul_12", "w3"]
    assert not any(w["decided"] for w in found)
    assert run("tcinspect", folder / "old.plan", "--weights", "--steps").code == 2


def test_files_are_not_replaced(run: Run, folder: Path) -> None:
    onnx.save(products().model(), "model.onnx")
    plan_of(products().model()).save("model.plan")
    assert run("tcrefit", "model.plan", "model.onnx").code == 2, "by default it would be the plan that is read"
    assert run("tcrefit", "model.plan", "model.onnx", "-o", "model.onnx").code == 2
    assert run("tcrefit", "model.plan", "model.onnx", "-o", "a.plan", "--tolerance", "1").code == 2
    assert run("tcrefit", "model.plan", "model.onnx", "-o", "a.plan", "--verify", "model.npz").code == 2


def test_a_stripped_plan_takes_the_weights_that_it_was_made_with(run: Run) -> None:
    n = Net(x=(1, 64))
    old = n.out(n("MatMul", "x", n.normal(64, 64))).model()
    onnx.save(old, "old.onnx")
    onnx.save(tuned(old), "new.onnx")
    np.save("x.npy", n.normal(1, 64))
    done = run("tccompile", "old.onnx", "--arch", "sm_80", "--strip-weights", "-q", "-o", "m.plan")
    assert done.code == 0 and not read_plan("m.plan").weights
    assert run("tcrun", "m.plan", "x.npy", "--device", "cpu", "--weights", "old.onnx").code == 0
    done = run("tcrun", "m.plan", "x.npy", "--device", "cpu", "--weights", "new.onnx")
    assert done.code == 2 and "the weight 'w0' has other values than those that the plan was made with; tcrefit" in done.err
    assert run("tcrefit", "m.plan", "new.onnx", "-q").code == 0
    assert run("tcrun", "new.plan", "x.npy", "--device", "cpu").code == 0


def test_a_plan_of_a_part_takes_the_part_s_weights_from_the_whole(run: Run) -> None:
    old = products().model()
    onnx.save(tuned(old), "tuned.onnx")
    for inputs, outputs in (((), ("t1",)), (("t0",), ()), (("t0",), ("t2",))):
        plan_of(Part(old, inputs, outputs)).save("part.plan")
        done = run("tcrefit", "part.plan", "tuned.onnx", "-o", "new.plan", "--verify", "-q")
        assert done.code == 0, done.err
        assert bits(read_plan("new.plan")) == bits(plan_of(Part(tuned(old), inputs, outputs))) != bits(read_plan("part.plan"))
