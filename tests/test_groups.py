"""Groups of a convolution joined for Tensor Cores: the same values, what is offered, what a plan holds."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import onnx
import pytest

from tccompile import tune
from tccompile.arch import ARCHS
from tccompile.cli.report import explain
from tccompile.fuse.groups import join_groups
from tccompile.ir import reference
from tccompile.ir.ops import Conv, Pointwise
from tccompile.ir.program import Program
from tccompile.ir.storage import pack_constant
from tccompile.ir.tensor import dense
from tccompile.ir.types import DType
from tccompile.ir.weights import Literal, Source, evaluate
from tccompile.kernels import KERNELS
from tccompile.kernels.gemm_mma import ConvMma
from tccompile.kernels.implicit_gemm import ways
from tccompile.load.model import sources
from tccompile.plan.file import Plan
from tccompile.plan.format import Address, Map, Section
from tccompile.plan.weights import fill
from tccompile.runtime.session import Session
from tccompile.schedule.choose import candidates, schedule
from tests.gpu import cases
from tests.kernels import machine
from tests.kernels.support import check
from tests.networks import feeds, relative_error
from tests.networks import reference as onnx_runtime
from tests.plans import without_code
from tests.rewrites.common import Net
from tests.tiers import usually

NHWC, NWC = (0, 2, 3, 1), (0, 2, 1)


def conv(channels: int, outputs: int, groups: int, taps: tuple[int, ...] = (3, 3), size: int = 7, dtype: DType = DType.F16):
    """One convolution of images or lines with random values, and what they are."""
    rng, order = np.random.default_rng(0), NHWC if len(taps) == 2 else NWC
    space, pads = (size,) * len(taps), tuple(n // 2 for n in taps)
    x = dense("x", (2, channels, *space), dtype, order)
    y = dense("y", (2, outputs, *space), dtype, order)
    w = dense("w", (outputs, channels // groups, *taps), dtype, order)
    one = (1,) * len(taps)
    op = Conv(nodes=("conv",), y="y", x="x", w="w", strides=one, pads=pads, dilations=one, groups=groups)
    values = {t.name: rng.standard_normal(t.shape).astype(np.float16).astype(np.float32) for t in (x, w)}
    program = Program((), (), {t.name: t for t in (x, y, w)}, {"w": Literal(values["w"])}, (op,))
    return join_groups(program), values


# --- Weights -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("channels", "outputs", "groups", "taps", "offered"),
    [
        (136, 136, 4, (1, 1), [1]),  # 34 wide
        (272, 272, 4, (1, 1), [2, 1]),  # 68
        (128, 128, 32, (3, 3), [16, 8, 4, 2, 1]),  # 4
        (240, 60, 3, (1, 1), [1]),  # 80 → 20
        (144, 144, 12, (3, 3), [6, 3, 1]),  # 12
        (153, 153, 17, (3, 3), [1]),  # 9
        (15, 21, 3, (3, 3), [1]),
        (24, 48, 24, (3, 3), [3, 1]),  # a depthwise convolution with twice as many filters
        (64, 64, 4, (3, 3), [2, 1]),  # 16 wide: nothing is missing, but tiles are wider
        (48, 48, 4, (5,), [2, 1]),
        (256, 256, 2, (3, 3), [1]),
        (512, 512, 2, (3, 3), []),
        (2048, 2048, 32, (3, 3), []),  # zeros would be 32 times the weights, or twice without need
        (2040, 2040, 2, (3, 3), [1]),  # 1020 wide: large, but the only way
        (32, 32, 32, (3, 3), []),  # depthwise
    ],
)
def test_weights_with_joined_groups_give_the_same(channels, outputs, groups, taps, offered):
    program, values = conv(channels, outputs, groups, taps, size=3 if channels > 500 else 7)
    (op,) = program.ops
    first, *joined = ways(op, program)
    assert first == op and [way.groups for way in joined] == offered
    expected = reference.compute(op, program, values)
    for way in joined if channels < 2000 else []:
        t = program.tensors[way.w]
        held = evaluate(program.constants[way.w], {})
        assert t.dtype is DType.F16 and held.shape == t.shape == (outputs, channels // way.groups, *taps)
        assert np.count_nonzero(held) == np.count_nonzero(values["w"])
        got = reference.compute(way, program, values | {way.w: held.astype(np.float32)})
        assert relative_error(got, expected) <= 1e-6


def test_only_constant_weights_in_fp16_are_joined():
    assert not conv(136, 136, 4, dtype=DType.F32)[0].forms
    program, _ = conv(136, 136, 4)
    assert not join_groups(replace(program, constants={}, forms={})).forms


# --- Kernels -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("arch", ["sm_75", "sm_80", "sm_90a"])
@pytest.mark.parametrize("case", [(136, 136, 4, (1, 1)), (64, 64, 16, (3, 3)), (240, 60, 3, (1, 1)), (40, 40, 2, (5,))])
def test_a_config_in_fewer_groups_launches_what_the_joined_convolution_would(case, arch):
    program, _ = conv(*case)
    (op,) = program.ops
    found = [c for c in candidates(op, program, ARCHS[arch]) if "groups" in c.config]
    assert {c.config["groups"] for c in found} >= {way.groups for way in ways(op, program)[1:]}
    for c in found:
        (way,) = (way for way in ways(op, program) if way.groups == c.config["groups"])
        plain = {name: value for name, value in c.config.items() if name != "groups"}
        alone = replace(program, forms={})
        assert c.kernel.supports(way, alone, ARCHS[arch]) is None and c.kernel.tensor_cores
        assert c.kernel.work(op, program, c.config, ARCHS[arch]) == c.kernel.work(way, alone, plain, ARCHS[arch])
        assert c.cost == c.kernel.cost(way, alone, plain, ARCHS[arch])
    assert any("groups" not in c.config and not c.kernel.tensor_cores for c in candidates(op, program, ARCHS[arch]))


def test_groups_that_tensor_cores_cannot_be_fed_with_say_so():
    program, _ = conv(136, 136, 4, dtype=DType.F32)
    (choice,) = schedule(program, ARCHS["sm_80"])
    assert choice.reason.endswith("its groups have 34 input channels, not a multiple of 8")
    (choice,) = schedule(conv(32, 32, 32)[0], ARCHS["sm_80"])
    assert choice.reason.endswith("its groups have 1 input channels, not a multiple of 8")


def test_repetitions_that_are_measured_have_joined_weights_of_their_own():
    program, _ = conv(136, 136, 4)
    program = replace(program, constants={"w": Source("w", program.tensors["w"].shape, "float16")})
    again = tune.repeated(program.ops[0], program, 3)
    assert len({form.tensor for forms in again.forms.values() for form in forms}) == 3
    data = tune._data(program.ops[0], program)
    w = reference.elements(np.frombuffer(data["w"], np.float16), program.tensors["w"])
    held = tune._forms(again, data)
    for op in again.ops:
        (_, way) = ways(op, again)
        t = again.tensors[way.w]
        got = reference.elements(np.frombuffer(held[way.w], np.float16), t)
        assert got.shape == (136, 136, 3, 3) and np.array_equal(got[34:68, 34:68], w[34:68])
        assert np.count_nonzero(got) == np.count_nonzero(w)


@pytest.mark.parametrize("groups", usually([4, 2], 1))
def test_compiled_code_multiplies_groups_together(groups):
    """mma.sync's kernel as it was compiled, on groups of 4 channels, thread by thread."""
    program = cases.conv("joined", (1, 32, 5, 6), 32, (3, 3), groups=8, ep="bias relu")
    config = {"bm": 16, "bn": 64, "bk": 64, "splits": 1, "groups": groups}
    check(ConvMma(), program, config, arch=ARCHS["sm_80"], run=machine.run)


# --- Plans ---------------------------------------------------------------------------------------------------------------


def network() -> onnx.ModelProto:
    """Groups of 17, 68, 4, 9 and 12 channels, with bias, activation, a residual and a stride, and a shuffle between two."""
    n = Net(x=(1, 68, 9, 10))

    def grouped(x: str, channels: int, outputs: int, groups: int, taps: int, **attrs: object) -> str:
        fan_in = channels // groups * taps * taps
        w, b = n.normal(outputs, channels // groups, taps, taps, scale=fan_in**-0.5), n.normal(outputs)
        return n("Conv", x, w, b, group=groups, pads=[taps // 2] * 4, **attrs)

    a = n("Relu", grouped("x", 68, 272, 4, 1))
    a = n("Reshape", a, np.array([1, 4, 68, 9, 10]))
    a = n("Reshape", n("Transpose", a, perm=[0, 2, 1, 3, 4]), np.array([1, 272, 9, 10]))
    a = n("Add", grouped(a, 272, 272, 4, 1), a)
    a = grouped(a, 272, 128, 16, 1)
    a = n("Relu", grouped(a, 128, 128, 32, 3, strides=[2, 2]))
    a = grouped(n("Conv", a, n.normal(153, 128, 1, 1, scale=0.1)), 153, 153, 17, 3)
    a = n("Sigmoid", grouped(n("Conv", a, n.normal(144, 153, 1, 1, scale=0.1)), 144, 24, 12, 3))
    return n.out(a).model()


def unit(groups: int, wide: int) -> onnx.ModelProto:
    """A unit of a ShuffleNet: a grouped convolution, its channels shuffled, a depthwise convolution, and another grouped one."""
    n, c = Net(x=(2, wide, 6, 6)), 48
    a = n("Relu", n("Conv", "x", n.normal(c, wide // groups, 1, 1, scale=2 * wide**-0.5), n.normal(c), group=groups))
    a = n("Reshape", a, np.array([2, groups, c // groups, 6, 6]))
    a = n("Reshape", n("Transpose", a, perm=[0, 2, 1, 3, 4]), np.array([2, c, 6, 6]))
    a = n("Conv", a, n.normal(c, 1, 3, 3, scale=0.3), pads=[1, 1, 1, 1], group=c)
    return n.out(n("Add", n("Conv", a, n.normal(wide, c // groups, 1, 1, scale=0.2), group=groups), "x")).model()


@pytest.mark.parametrize(
    ("groups", "wide", "precision", "copies"),
    [(4, 96, "fp16", 0), (3, 96, "mixed", 0), (16, 96, "fp16", 0), (4, 680, "fp16", 0), (4, 688, "fp16", 1), (4, 96, "fp32", 1)],
)
def test_a_shuffle_goes_into_the_weights_where_all_groups_become_one(groups, wide, precision, copies):
    model = unit(groups, wide)
    plan = without_code(model, ("sm_80",), precision=precision)
    program = plan.entries[0].program
    first = next(op for op in program.ops if isinstance(op, Conv))
    assert first.groups == (groups if copies else 1)
    assert sum(isinstance(op, Pointwise) for op in program.ops) == 2 + copies  # the layouts of input and output
    inputs = feeds(model, 1)
    (expected,) = onnx_runtime(model, inputs).values()
    with Session(plan, device="cpu") as session:
        (got,) = session.run(None, inputs)
    assert relative_error(got, expected) <= (1e-5 if precision == "fp32" else 2e-3)


def taken(section: Section) -> Iterator[tuple[int, set[str]]]:
    """For each step the constants whose addresses it takes."""
    for step in section.steps:
        args = [arg for launch in step.launches for arg in launch.args]
        addresses = [arg.address if isinstance(arg, Map) else arg for arg in args]
        yield step.op, {a.name for a in addresses if isinstance(a, Address) and a.space == "weights"}


def as_multiplied(plan: Plan, section: Section) -> Program:
    """The program with each convolution by the weights that its step reads."""
    program = plan.entries[0].program
    ops = list(program.ops)
    for i, read in taken(section):
        op, step = ops[i], section.steps[i]
        if isinstance(op, Conv) and "groups" in step.config:
            (w,) = (n for n in read if program.tensors[n].rank == 4)
            assert w != op.w and op.w not in read
            ops[i] = replace(op, w=w, groups=step.config["groups"])
    return replace(program, ops=tuple(ops))


@pytest.mark.parametrize("arch", usually(["sm_80", "sm_90a"], "sm_90a"))
def test_a_network_of_odd_groups_runs_on_tensor_cores(arch):
    model = network()
    plan = without_code(model, (arch,))
    section = plan.entries[0].sections[0]
    program = plan.entries[0].program
    convs = [i for i, op in enumerate(program.ops) if isinstance(op, Conv)]
    slower = "with them it is estimated to take"
    assert len(convs) == 8 and all(section.steps[i].tensor_cores or slower in section.steps[i].reason for i in convs)
    assert sum(section.steps[i].tensor_cores for i in convs) >= 7
    chosen = as_multiplied(plan, section)
    assert sum(a != b for a, b in zip(chosen.ops, program.ops, strict=True)) >= 5
    inputs = feeds(model, 1)
    ((name, expected),) = onnx_runtime(model, inputs).items()
    with Session(plan, device="cpu") as session:
        (got,) = session.run(None, inputs)
    assert relative_error(got, expected) <= 2e-3
    assert relative_error(reference.evaluate(chosen, inputs, sources(model))[name], expected) <= 2e-3


def test_a_plan_holds_the_weights_that_its_steps_read():
    both, old = without_code(network(), ("sm_61", "sm_90a")), without_code(network(), ("sm_61",))
    held, own = set(both.entries[0].program.constants), set(old.entries[0].program.constants)
    joined = held - own
    assert own < held and set(both.weights) == held
    first, *_, second = both.entries[0].sections
    assert not joined & set().union(*(read for _, read in taken(first)))
    assert joined == joined & set().union(*(read for _, read in taken(second)))
    assert not any("groups" in step.config for step in old.entries[0].sections[0].steps)


def test_a_report_says_what_is_multiplied_together():
    plan = without_code(network(), ("sm_80",))
    steps = explain(plan)[0]["steps"]
    assert [s["padding"] for s in steps if "groups" in s["config"] and s["config"]["groups"] == 3] == [["groups 12→3"]]
    assert all(not any("weights" in p for p in s["padding"]) for s in steps if "groups" in s["config"])


def test_joined_weights_that_were_left_out_are_filled_in():
    model = network()
    plan = without_code(model, ("sm_80",))
    program = plan.entries[0].program
    filled = fill(replace(plan, weights={}), sources(model))
    assert dict(filled.weights) == dict(plan.weights)
    name = next(n for n in program.constants if n.endswith("of32"))
    assert plan.weights[name] == pack_constant(program.tensors[name], evaluate(program.constants[name], sources(model)))


def test_kernels_that_take_groups_together_are_those_of_tensor_cores():
    program, _ = conv(136, 136, 4)
    (op,) = program.ops
    for kernel in KERNELS:
        if isinstance(op, kernel.realises) and kernel.supports(op, program, ARCHS["sm_90a"]) is None:
            groups = {"groups" in config for config in kernel.configs(op, program, ARCHS["sm_90a"])}
            assert groups == {kernel.tensor_cores}
