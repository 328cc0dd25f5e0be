"""The CPU engine against the evaluation of the same program in logical arrays, and the checks that it offers."""

from __future__ import annotations

from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest

from tccompile.errors import InputError, LaunchError, PlanError, UsageError, VerificationError
from tccompile.ir.expr import ACC, Epilogue, View, call, coord, element, identity_view, load
from tccompile.ir.ops import Conv, Pointwise
from tccompile.ir.program import Program
from tccompile.ir.reference import evaluate
from tccompile.ir.storage import from_storage, pack_constant, to_storage
from tccompile.ir.tensor import Tensor, dense
from tccompile.ir.types import DType
from tccompile.ir.verify import verify
from tccompile.ir.weights import Literal
from tccompile.kernels.spec import Work
from tccompile.plan.file import Plan
from tccompile.plan.format import Entry, Section, Step
from tccompile.runtime.cpu import CpuEngine
from tccompile.schedule.place import place
from tests.networks import relative_error
from tests.small import IMAGE, feeds, plan, sources


def engine(plan: Plan, **checks: bool) -> CpuEngine:
    return CpuEngine(plan, plan.entries[0], plan.entries[0].sections[0], **checks)


@pytest.mark.parametrize("storage, bar", [(DType.F32, 1e-6), (DType.F16, 3e-3), (DType.BF16, 3e-2)])
def test_a_program_in_each_precision(storage, bar):
    small = plan(storage)
    program = small.entries[0].program
    out = engine(small, check_finite=True, check_padding=True).run(feeds())
    ref = evaluate(program, feeds(), sources())
    assert list(out) == list(program.outputs)
    assert relative_error(out["y"], ref["y"]) < bar
    assert out["y"].dtype == np.float32 and out["top"].dtype == np.float16
    assert relative_error(out["top"], ref["top"]) < max(bar, 1e-3)


def test_half_precision_is_really_rounded():
    """fp16 storage must differ from fp32's result: an engine that forgot to round would pass the other test."""
    out = engine(plan(DType.F16)).run(feeds())
    ref = evaluate(plan().entries[0].program, feeds(), sources())
    assert relative_error(out["y"], ref["y"]) > 1e-5


def test_every_section_runs_and_gives_the_same():
    small = plan()
    entry = small.entries[0]
    first, second = (CpuEngine(small, entry, s).run(feeds()) for s in entry.sections)
    np.testing.assert_array_equal(first["y"], second["y"])


def test_a_second_run_does_not_see_the_first():
    runner = engine(plan(), check_padding=True)
    first = runner.run(feeds())
    other = runner.run({"x": 2 * feeds()["x"]})
    assert relative_error(other["y"], first["y"]) > 0.1
    np.testing.assert_array_equal(runner.run(feeds())["y"], first["y"])


def test_a_plan_at_the_place_of_one_that_is_gone_has_its_own_weights():
    """Of the first, a view of a weight is left, as an exception's frames may keep it."""
    small = plan()
    zeros = {name: bytes(len(small.weight(name))) for name in small.weights}
    expected = engine(replace(small, weights=zeros)).run(feeds())["y"]
    for _ in range(20):
        first = replace(small)
        runner = engine(first)
        left = [memory[:] for memory in runner._memory.values()]
        del runner, first
        np.testing.assert_array_equal(engine(replace(small, weights=zeros)).run(feeds())["y"], expected)
        assert left


def test_weights_are_needed_whole():
    with pytest.raises(UsageError, match="'w2'"):
        engine(plan(left_out=["w2"]))
    damaged = replace(plan(), digests={"w2": bytes(32)})
    with pytest.raises(PlanError, match="section 'weights w2'"):
        engine(damaged)


def test_an_arena_that_does_not_fit():
    small = plan()
    entry = small.entries[0]
    with pytest.raises(LaunchError, match="no memory for the plan's arena of 4611686018427387904 bytes"):
        CpuEngine(small, entry, replace(entry.sections[0], arena=1 << 62))


def placed(program: Program) -> Plan:
    """A plan of a program whose constants are literals."""
    verify(program)
    p = place(program, [Work(())] * len(program.ops))
    steps = tuple(Step(i, "none", {}, False, "", (), after) for i, after in enumerate(p.after))
    weights = {n: pack_constant(program.tensors[n], r.values) for n, r in program.constants.items() if isinstance(r, Literal)}
    return Plan("p", {}, (Entry(program, (Section("sm_80", steps, p.offsets, p.arena, p.counters),)),), (), weights)


def pointwise(tensors: list[Tensor], ops: dict[str, Epilogue], inputs: tuple[str, ...], outputs: tuple[str, ...]) -> Plan:
    """Pointwise ops by the tensor that each writes."""
    steps = tuple(Pointwise(nodes=(f"node_{y}",), y=y, epilogue=e) for y, e in ops.items())
    return placed(Program(inputs, outputs, {t.name: t for t in tensors}, {}, steps))


def read(name: str, rank: int = 1) -> Epilogue:
    return Epilogue(load(0), (identity_view(name, rank),))


@pytest.mark.parametrize(
    "dtype, given, expected",
    [
        (DType.I8, [1.9, -1.9, 300, -300], [1, -1, 127, -128]),
        (DType.U8, [1.9, -1.9, 300, 255.5], [1, 0, 255, 255]),
        (DType.BOOL, [0, -0.0, 0.1, np.nan], [False, False, True, True]),
        (DType.F16, [65519, 65520, 1e-8, 1 / 3], [65504, np.inf, 0, np.float16(1 / 3)]),
        (DType.F64, [0.1, 1, 2, 3], [np.float32(0.1), 1, 2, 3]),
    ],
)
def test_results_are_stored_in_the_outputs_type(dtype, given, expected):
    tensors = [dense("x", (4,), DType.F32, pad=1), dense("y", (4,), dtype, pad=1)]
    out = engine(pointwise(tensors, {"y": read("x")}, ("x",), ("y",))).run({"x": np.array(given, np.float32)})["y"]
    assert out.dtype == dtype.numpy
    assert out.tolist() == expected


def test_bf16_inputs_and_outputs_are_bits():
    tensors = [dense("x", (3,), DType.BF16, pad=1), dense("y", (3,), DType.BF16, pad=1)]
    double = Epilogue(call("mul", load(0), 2.0), (identity_view("x", 1),))
    x = np.array([1.5, -3, 1e30], ml_dtypes.bfloat16)
    out = engine(pointwise(tensors, {"y": double}, ("x",), ("y",))).run({"x": x.view(np.uint16)})["y"]
    np.testing.assert_array_equal(out.view(ml_dtypes.bfloat16), 2 * x)
    np.testing.assert_array_equal(from_storage(to_storage(np.float32([1.5]), DType.BF16), DType.BF16), [1.5])


def test_transposed_inputs_and_views_of_inputs():
    """Feeds need not be contiguous; a slice of an input and a slice of an output lie in their storage."""
    x = Tensor("half", (2, 3), DType.F32, (2, 3), (6, 1), "x", 3)
    y = Tensor("top", (2, 3), DType.F32, (2, 3), (6, 1), "y", 0)
    z = Tensor("end", (2, 3), DType.F32, (2, 3), (6, 1), "y", 3)
    tensors = [dense("x", (2, 6), DType.F32, pad=1), x, dense("y", (2, 6), DType.F32, pad=1), y, z]
    negated = Epilogue(call("neg", load(0)), (identity_view("half", 2),))
    whole = pointwise(tensors, {"top": read("half", 2), "end": negated}, ("x",), ("y",))
    values = np.arange(12, dtype=np.float32).reshape(6, 2).T
    out = engine(whole, check_padding=True).run({"x": values})["y"]
    np.testing.assert_array_equal(out, np.concatenate([values[:, 3:], -values[:, 3:]], 1))


def test_an_index_outside_its_axis_is_the_nodes() -> None:
    tensors = [dense("ids", (2,), DType.I64, pad=1), dense("x", (5,), DType.F32, pad=1), dense("y", (2,), DType.F32, pad=1)]
    taken = Epilogue(load(0), (View("x", (element("ids", [coord(0)], 5),)),))
    runner = engine(pointwise(tensors, {"y": taken}, ("ids", "x"), ("y",)))
    x = np.arange(5, dtype=np.float32)
    assert runner.run({"ids": np.array([3, -1]), "x": x})["y"].tolist() == [3, 4]
    with pytest.raises(InputError, match="node 'node_y': 'ids' holds the index 7 into an axis of 5 elements"):
        runner.run({"ids": np.array([3, 7]), "x": x})


# --- Checks ----------------------------------------------------------------------------------------------------------


def growing() -> Plan:
    """x, then its third power, then that squared, in fp16."""
    cube = Epilogue(call("mul", call("mul", load(0), load(0)), load(0)), (identity_view("x", 1),))
    square = Epilogue(call("mul", load(0), load(0)), (identity_view("a", 1),))
    tensors = [dense("x", (4,), DType.F32, pad=1), dense("a", (4,), DType.F16), dense("b", (4,), DType.F16)]
    return pointwise([*tensors, dense("y", (4,), DType.F32, pad=1)], {"a": cube, "b": square, "y": read("b")}, ("x",), ("y",))


def test_the_first_tensor_out_of_range_is_named():
    runner = engine(growing(), check_finite=True)
    assert runner.run({"x": np.full(4, 2, np.float32)})["y"].tolist() == [64] * 4
    with pytest.raises(
        VerificationError, match=r"node 'node_b' writes an infinity into 'b' \(4,\) float16; .* 7.294e\+08, .*fp32"
    ):
        runner.run({"x": np.full(4, 30, np.float32)})
    with pytest.raises(VerificationError, match=r"node 'node_a' writes NaN into 'a'.*an input holds it"):
        runner.run({"x": np.full(4, np.nan, np.float32)})
    assert np.isinf(engine(growing()).run({"x": np.full(4, 30, np.float32)})["y"]).all()


def test_padding_that_is_not_zero_is_found(monkeypatch):
    """An engine whose steps forget the padding, or write beyond their own channels, does not pass its own check."""

    def forgetful(buffer, tensor, values):
        from tccompile.ir.storage import elements

        elements(buffer, tensor)[...] = values

    assert np.isfinite(engine(plan(), check_padding=True).run(feeds())["y"]).all()
    monkeypatch.setattr("tccompile.runtime.cpu.store", forgetful)
    with pytest.raises(VerificationError, match=r"node 'first' reads 'xh' \(1, 3, 6, 6\), whose padding is not zero"):
        engine(plan(), check_padding=True).run(feeds())


def test_functions_that_move_zero_do_not_reach_the_padding():
    """exp(0) is 1: the padding of what an epilogue writes stays zero all the same."""
    tensors = [
        dense("x", (1, 3, 4, 4), DType.F32, pad=1),
        dense("xh", (1, 3, 4, 4), DType.F16, IMAGE),
        dense("w", (5, 3, 1, 1), DType.F16, IMAGE),
        dense("a", (1, 5, 4, 4), DType.F16, IMAGE),
        dense("y", (1, 5, 4, 4), DType.F32, pad=1),
    ]
    w = np.random.default_rng(1).standard_normal((5, 3, 1, 1)).astype(np.float32)
    ops = (
        Pointwise(nodes=("in",), y="xh", epilogue=read("x", 4)),
        Conv(
            nodes=("conv",), y="a", x="xh", w="w", strides=(1, 1), pads=(0, 0), dilations=(1, 1),
            epilogue=Epilogue(call("exp", ACC)),
        ),
        Pointwise(nodes=("out",), y="y", epilogue=Epilogue(load(0), (View("a", tuple(coord(i) for i in range(4))),))),
    )  # fmt: skip
    program = Program(("x",), ("y",), {t.name: t for t in tensors}, {"w": Literal(w)}, ops)
    x = np.random.default_rng(2).standard_normal((1, 3, 4, 4)).astype(np.float32)
    out = engine(placed(program), check_padding=True).run({"x": x})["y"]
    assert relative_error(out, np.exp(np.einsum("oc,nchw->nohw", w[:, :, 0, 0], x))) < 3e-3
