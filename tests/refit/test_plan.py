"""Other weights in a plan: the bits of a fresh compile where choices are the same; what is refused, and why."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

from tccompile.dump import Dump
from tccompile.emit.pack import pack
from tccompile.errors import PlanError, UsageError, VerificationError
from tccompile.ir.weights import Source, Transform, sources_of
from tccompile.load.constants import Weight, decisive
from tccompile.load.identity import digests, first_other
from tccompile.load.model import read
from tccompile.options import Options
from tccompile.pipeline import Told, origin_of, to_program
from tccompile.plan.file import Plan, from_bytes, to_bytes
from tccompile.plan.rules import check_plan
from tccompile.refit.constants import refitted_constants, sources
from tccompile.refit.plan import REFITTED, refitted
from tccompile.rewrites.lanes import _constants
from tests.networks import RECURRENT, reference, relative_error, skeleton
from tests.ops.test_float8 import Made
from tests.refit.common import KINDS, bits, convolutions, feeds, of_bytes, outputs, plan_of, products, tuned, weights
from tests.rewrites.common import Net
from tests.tiers import thorough, usually


@pytest.mark.parametrize("precision", usually(["mixed", "fp16", "fp32", "bf16"], "mixed", "bf16"))
@pytest.mark.parametrize("kind", KINDS)
def test_a_fine_tuned_model_in_the_old_plan(kind: str, precision: str) -> None:
    """The worked example: a model is compiled, fine-tuned, refitted, and is what a fresh compile makes of it, to the bit."""
    old = KINDS[kind]().model()
    new = tuned(old)
    plan = from_bytes(to_bytes(plan_of(old, precision)))
    fresh = plan_of(new, precision)
    made = from_bytes(to_bytes(refitted(plan, weights(new))))

    assert fresh.entries[0].program.ops == plan.entries[0].program.ops, "the choices are the same, so the weights must be"
    assert bits(made) == bits(fresh) != bits(plan)
    for a, b in zip(outputs(made), outputs(fresh), strict=True):
        np.testing.assert_array_equal(a, b)
    expected = reference(new, feeds(plan))
    for (name, want), got in zip(expected.items(), outputs(made), strict=True):
        assert relative_error(got, want) < (3e-2 if precision == "bf16" or kind == "bytes" else 3e-3), name


@pytest.mark.parametrize("kind", KINDS)
def test_the_old_weights_give_the_old_plan(kind: str) -> None:
    old = KINDS[kind]().model()
    plan = plan_of(old)
    made = refitted(refitted(plan, weights(tuned(old))), weights(old))
    assert bits(made) == bits(plan)
    assert made.notes == (*plan.notes, REFITTED)
    assert to_bytes(refitted(plan, weights(old))) == to_bytes(plan), "the same weights change nothing at all"


def test_some_weights_are_enough_where_a_constant_is_made_of_them_alone() -> None:
    old = products().model()
    plan, new = plan_of(old), weights(tuned(old, ("w0",)))
    made = refitted(plan, {"w0": new["w0"]})
    changed = {name for name in bits(plan) if bits(made)[name] != bits(plan)[name]}
    assert len(changed) == 1
    assert bits(made) == bits(refitted(plan, new))


def test_weights_that_make_a_constant_together_are_given_together() -> None:
    plan, new = plan_of(convolutions().model()), weights(convolutions().model())
    with pytest.raises(UsageError, match=r"'w0', 'w2', 'w5' are one constant of the plan: give 'w2', 'w5' too"):
        refitted(plan, {"w0": new["w0"]})


def test_a_stripped_plan_is_filled() -> None:
    old = products().model()
    plan = plan_of(old)
    assert bits(refitted(replace(plan, weights={}), weights(old))) == bits(plan)


def test_a_certificate_is_of_the_weights_that_it_was_made_with() -> None:
    from tccompile.verify.oracle import verify

    old = products().model()
    plan = verify(old, plan_of(old), 1e-2).plan
    assert plan.certificates
    assert refitted(plan, weights(old)).certificates == plan.certificates
    assert not refitted(plan, weights(tuned(old))).certificates


# --- What cannot change ----------------------------------------------------------------------------------------------


def folded() -> Net:
    """A scale of one number, which becomes a part of an expression; one that is squared, which makes it a literal; a product."""
    n = Net(x=(2, 8))
    h = n("Mul", n("MatMul", "x", n.normal(8, 8)), np.array([1.5], np.float32))
    return n.out(n("Add", h, n("Abs", n.normal(8))))


@pytest.mark.parametrize("name", ["w1", "w2"])
def test_what_was_folded_cannot_change(name: str) -> None:
    old = folded().model()
    plan, new = plan_of(old), weights(old)
    assert {*plan.origin.decided} == {"w1", "w2"}
    new[name] = new[name] * np.float32(1.01)
    with pytest.raises(UsageError, match=f"the weight '{name}' has other values .* was decided by them .* compile the model"):
        refitted(plan, new)


def test_lookups_that_decide_nothing_are_not_told_of() -> None:
    for kind in ("convolutions", "products", "recurrent"):
        assert not plan_of(KINDS[kind]().model()).origin.decided
    cut = KINDS["taken apart"]().model()
    assert {weights(cut)[name].dtype.kind for name in plan_of(cut).origin.decided} == {"i"}, "where it is cut, and nothing else"
    old = of_bytes().model()
    free = {name for name in weights(old) if name not in plan_of(old).origin.decided}
    assert {weights(old)[name].shape for name in free} == {(16, 16, 3, 3), (16,)} and len(free) == 3, "weights, scales, biases"


def test_equal_lanes_of_different_weights_are_told_of() -> None:
    """What is computed once, as two weights are equal, must stay so; if they are not, nothing is decided by them."""
    values = np.arange(4, dtype=np.float32)
    for others, told in (([values.copy()], {"a0", "a1"}), ([values + 1], set())):
        lanes = [Weight(f"a{i}", v, Source(f"a{i}", v.shape, "float32")) for i, v in enumerate((values, *others))]
        with decisive() as decided:
            stack = _constants(lanes)
        assert stack is not None and stack.same == bool(told) and decided == told


@pytest.mark.parametrize(
    "change, why",
    [
        (lambda w: w[:8], r"'w0' is float32 \(16, 16\) in the plan, the new one float32 \(8, 16\)"),
        (lambda w: w.astype(np.float64), r"'w0' is float32 \(16, 16\) in the plan, the new one float64"),
    ],
)
def test_another_shape_or_type(change, why: str) -> None:
    old = products().model()
    with pytest.raises(UsageError, match=why):
        refitted(plan_of(old), {"w0": change(weights(old)["w0"])})


def test_a_weight_that_the_plan_does_not_have() -> None:
    with pytest.raises(UsageError, match=r"the plan has no weight 'fc.weight'; tcinspect --weights"):
        refitted(plan_of(products().model()), {"fc.weight": np.zeros(3, np.float32)})


def test_a_plan_that_says_nothing_of_its_model() -> None:
    from tests.small import plan

    with pytest.raises(UsageError, match="does not say what it was made from"):
        refitted(plan(), {"conv1": np.zeros((9, 3, 3, 3), np.float32)})


# --- What precision allows -------------------------------------------------------------------------------------------


def _with(plan: Plan, old: dict[str, np.ndarray], **new: np.ndarray) -> None:
    refitted(plan, old | new)


@pytest.mark.parametrize(
    "precision, factor, why",
    [
        ("mixed", 2.5, r"the weight 'w0': values up to .*; precision was chosen with .*, and holds for .*: compile the model"),
        ("mixed", 0.4, r"the weight 'w0': a norm of .*; precision was chosen with .*, and holds for 1/2 of that"),
        ("fp16", 1e6, r"the weight 'w0': values up to .*e\+0., and the plan has it in fp16, which ends at 65504"),
        ("fp16", 1e-6, r"the weight 'w0': in fp16 its subnormals would cost .* of its norm; the plan allows for 9.8e-04"),
        ("fp32", np.inf, r"the weight 'w0': not all values are finite, as they were"),
    ],
)
def test_values_that_the_plan_s_formats_do_not_hold(precision: str, factor: float, why: str) -> None:
    old = products().model()
    plan, w = plan_of(old, precision), weights(old)
    with np.errstate(all="ignore"), pytest.raises(VerificationError, match=why) as raised:
        _with(plan, w, w0=(w["w0"] * np.float32(factor)))
    assert raised.value.exit_code == 9


@pytest.mark.parametrize("precision, factor", [("mixed", 1.9), ("mixed", 0.6), ("fp16", 100.0), ("fp32", 1e6), ("bf16", 1e6)])
def test_values_that_they_hold(precision: str, factor: float) -> None:
    old = products().model()
    w = weights(old)
    _with(plan_of(old, precision), w, w0=(w["w0"] * np.float32(factor)))


def test_one_far_channel_where_the_others_were_even() -> None:
    n = Net(x=(4, 64))
    old = n.out(n("MatMul", "x", n.normal(64, 32))).model()
    plan, w = plan_of(old), weights(old)["w0"].copy()
    w[0] *= 1e-3
    with pytest.raises(VerificationError, match=r"norms of input channels that are .* apart; precision was chosen for up to 64"):
        refitted(plan, {"w0": w})


def test_a_bias_may_be_as_large_as_the_results_that_it_is_added_to() -> None:
    """One that was zero, as before training, is free to grow; beyond that, ranges were not seen."""
    n = Net(x=(4, 16))
    old = n.out(n("Relu", n("Gemm", "x", n.normal(16, 16), np.zeros(16, np.float32), transB=1))).model()
    plan, w = plan_of(old), weights(old)
    refitted(plan, w | {"w1": np.full(16, 1.0, np.float32)})
    with pytest.raises(VerificationError, match="'w1': values up to 1e\\+03; precision was chosen with 0, and holds for"):
        refitted(plan, w | {"w1": np.full(16, 1e3, np.float32)})


def test_bytes_keep_to_the_sums_that_were_found_exact() -> None:
    old = of_bytes().model()
    plan, w = plan_of(old), weights(old)
    name = next(name for name, values in w.items() if values.shape == (16, 16, 3, 3))
    held = next(h for h in plan.origin.held.values() if h.sums)
    assert held.sums[2] == np.abs(w[name].astype(int)).reshape(16, -1).sum(1).max()
    with pytest.raises(VerificationError, match=f"'{name}'.*: values above 0 add up to .* in a row; sums are known to be exact"):
        refitted(plan, w | {name: np.full_like(w[name], 127)})
    bias = next(name for name, values in w.items() if values.dtype == np.int32)
    with pytest.raises(VerificationError, match=f"'{bias}': integers up to 100000; the plan was made for"):
        refitted(plan, w | {bias: np.full_like(w[bias], 100_000)})


def test_differences_to_zero_points_stay_bytes() -> None:
    """Weights less a zero point that is not 0: what fitted into a byte need not."""
    n = Net(x=(2, 32))
    x = n("QuantizeLinear", "x", np.float32(0.1), np.uint8(3))
    w = np.random.default_rng(0).integers(20, 120, (32, 16), np.uint8)
    old = n.out(n("Cast", n("MatMulInteger", x, w, np.uint8(3), np.uint8(50)), to=onnx.TensorProto.FLOAT)).model()
    plan, given = plan_of(old), weights(old)
    name = next(name for name, values in given.items() if values.ndim == 2)
    far = w.copy()
    far[0, 0] = 250
    with pytest.raises(VerificationError, match=f"'{name}'.*: values from .* to 200 in int8, as which the plan has them"):
        refitted(plan, given | {name: far})
    assert bits(refitted(plan, given)) == bits(plan)


# --- The graph -------------------------------------------------------------------------------------------------------


def test_graphs_are_compared_by_what_they_compute() -> None:
    one, other = read(products().model()), products()
    other.nodes[1].op_type = "Sigmoid"
    known = set(digests(one).values())
    assert first_other(read(tuned(products().model())), known) is None
    assert first_other(read(other.model()), known) == "node 'n1' (Sigmoid), which computes 't1'"
    renamed = products()
    for node in renamed.nodes:
        node.name, node.input[:], node.output[:] = f"a{node.name}", [f"r{x}" for x in node.input], [f"r{y}" for y in node.output]
    for weight in renamed.weights:
        weight.name = f"r{weight.name}"
    renamed.inputs[0].name, renamed.outputs = "rx", ["rt3"]
    assert first_other(read(renamed.model()), known) == "node 'an0' (Gemm), which computes 'rt0'", "inputs have names"
    renamed.inputs[0].name = "x"
    renamed.nodes[0].input[0] = "x"
    assert first_other(read(renamed.model()), known) is None


def test_attributes_and_shapes_of_weights_count() -> None:
    def digest_of(opset: int = 23, **attributes: float) -> str:
        n = Net(opset=opset, x=(2, 8))
        return list(digests(read(n.out(n("LeakyRelu", n("MatMul", "x", n.normal(8, 4)), **attributes)).model())).values())[-1]

    assert digest_of(alpha=0.1) == digest_of(alpha=0.1) != digest_of(alpha=0.2)
    assert digest_of(22, alpha=0.1) != digest_of(alpha=0.1), "an operator may mean something else"


# --- What the plan keeps ---------------------------------------------------------------------------------------------


def test_all_that_a_plan_says_of_its_model_is_read_back() -> None:
    plan = plan_of(convolutions().model())
    assert from_bytes(to_bytes(plan)).origin == plan.origin
    assert sources(plan).keys() <= plan.origin.weights.keys()


@pytest.mark.parametrize(
    "change, why",
    [
        (lambda o: replace(o, decided=("none",)), "'none' decided something, and is none of the model's weights"),
        (lambda o: replace(o, held={"none": next(iter(o.held.values()))}), "values of 'none', which is no constant"),
        (lambda o: replace(o, held={n: replace(h, norm=np.nan) for n, h in o.held.items()}), "numbers that are no magnitudes"),
        (lambda o: replace(o, held={n: replace(h, sums=(1.0,)) for n, h in o.held.items()}), "1 sums in place of 3"),
    ],
)
def test_what_a_plan_says_is_checked(change, why: str) -> None:
    plan = plan_of(products().model())
    with pytest.raises(PlanError, match=why):
        check_plan(replace(plan, origin=change(plan.origin)))


def test_a_plan_that_would_make_too_much() -> None:
    """As where weights are left out: a small file must not ask for all memory."""
    old = products().model()
    plan = plan_of(old)
    entry = plan.entries[0]
    name, recipe = next((n, r) for n, r in entry.program.constants.items() if sources_of(r) == {"w1"})
    many = Transform("expand", (recipe,), (("shape", (1 << 30, 16)),))
    bomb = Transform("slice", (many,), (("starts", (0,)), ("ends", (1,)), ("steps", (1,))))
    program = replace(entry.program, constants={**entry.program.constants, name: bomb})
    with pytest.raises(PlanError, match=r"the recipe of the constant .* makes .* elements, .* are not filled in"):
        refitted(replace(plan, entries=(replace(entry, program=program),)), weights(old))


def test_a_recipe_that_makes_something_else() -> None:
    """Of a plan with its weights recipes are not evaluated when it is read: here they are held to the tensor."""
    old = products().model()
    plan = plan_of(old)
    entry = plan.entries[0]
    for recipe in (Source("w0", (16, 16), "float32"), Transform("cast", (Source("w1", (16,), "float32"),), (("dtype", "none"),))):
        name = next(n for n, r in entry.program.constants.items() if sources_of(r) == {"w1"})
        program = replace(entry.program, constants={**entry.program.constants, name: recipe})
        with pytest.raises((UsageError, PlanError), match=r"cannot take the values given|cannot be evaluated"):
            refitted(replace(plan, entries=(replace(entry, program=program),)), weights(old))


def test_a_constant_of_which_nothing_is_known() -> None:
    old = products().model()
    plan = plan_of(old)
    with pytest.raises(PlanError, match=r"does not say what .* was"):
        refitted_constants(replace(plan, origin=replace(plan.origin, held={})), weights(old))


def test_a_large_constant_node_is_a_weight_too() -> None:
    n = Net(x=(4, 48))
    w = n.normal(48, 48, scale=0.1)
    n.nodes.append(helper.make_node("Constant", [], ["large"], "large", value=numpy_helper.from_array(w)))
    old = n.out(n("MatMul", "x", "large")).model()
    plan = plan_of(old)
    made = refitted(plan, {"large": w * np.float32(1.1)})
    assert bits(made) != bits(plan)


@thorough
@pytest.mark.parametrize("name", ["resnet18", "mobilenet_v2", "densenet121", "unet_denoise", *RECURRENT])
def test_networks(name: str) -> None:
    """Nothing is decided by weights of any size, but for shapes, masks, and initial states of zeros."""
    old = skeleton(name)
    new, plan = tuned(old, by=0.01), plan_of(old, "fp16")
    decided = [weights(old)[w] for w in plan.origin.decided]
    assert all(v.dtype.kind in "ib" or v.size == 1 or not v.any() for v in decided)
    given = weights(new) | {w: weights(old)[w] for w in plan.origin.decided}
    made, fresh = bits(refitted(plan, given)), bits(plan_of(new, "fp16"))
    assert [name for name in fresh if made[name] != fresh[name]] == []
    assert any(made[name] != data for name, data in bits(plan).items())


def test_entries_of_several_shapes() -> None:
    """They share constants where these are the same, and have their own where they are not."""
    n = Net(x=("n", 16))
    h = n("Add", n("MatMul", "x", n.normal(16, 16, scale=0.25)), n.normal(16))
    old = n.out(n("Div", h, n("ReduceSum", n("Abs", h), np.array([0]), keepdims=1))).model()

    def made(model: onnx.ModelProto) -> Plan:
        told, opened = Told(), read(model)
        with decisive() as told.decided:
            shapes = ({"x": (2, 16)}, {"x": (5, 16)})
            programs = [to_program(opened, s, Options((s,)), Dump(None), told=told) for s in shapes]
        origin = origin_of(opened, told)
        return pack("two", {}, [(p, ()) for p in programs], {}, opened.weights, False, origin=origin, rooms=told.rooms)

    plan, new = made(old), tuned(old)
    assert len(plan.entries) == 2
    assert bits(refitted(plan, weights(new))) == bits(made(new)) != bits(plan)


def test_new_scales_of_floats_of_8_bits() -> None:
    """Those of a weight's channels, which lie along another axis: only their shape is read."""
    made = Made()
    old = made.model((1, 16, 6, 6), made.conv(made.stored("x"), "y", 24, 16))
    new = tuned(old, ("y/w/scale",))
    plan = plan_of(old)
    assert "y/w/scale" not in plan.origin.decided
    assert bits(refitted(plan, weights(new))) == bits(plan_of(new)) != bits(plan)
