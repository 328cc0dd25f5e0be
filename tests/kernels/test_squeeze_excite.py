"""Squeeze and excitation in one launch: results as compiled, what is refused, what plans say of it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

from tccompile.arch import ARCHS
from tccompile.dump import Dump
from tccompile.emit.pack import Build, section
from tccompile.errors import PlanError
from tccompile.ir.expr import ACC, Epilogue, Expr, View, call, cast, constant, coord, load
from tccompile.ir.memory import COMPARED, Budget
from tccompile.ir.ops import Conv, Mlp, Op, Pointwise, Reduce
from tccompile.ir.program import Program
from tccompile.ir.reference import compute
from tccompile.ir.storage import elements, from_storage, to_storage
from tccompile.ir.tensor import dense
from tccompile.ir.types import DType
from tccompile.ir.verify import verify
from tccompile.kernels.squeeze_excite import Chain, SqueezeExcite, described
from tccompile.options import Options
from tccompile.pipeline import to_program
from tccompile.plan.format import Entry
from tccompile.plan.rules import check_sections
from tccompile.schedule.choose import schedule
from tccompile.schedule.place import place as place_
from tests.gpu.cases import NHWC, Builder
from tests.kernels import machine
from tests.kernels.memory import SPACE
from tests.small import image
from tests.tiers import thorough

ARCH, KERNEL = ARCHS["sm_90a"], SqueezeExcite()
F16, S8, U8, F32 = DType.F16, DType.I8, DType.U8, DType.F32


def element(kind: DType, scale: float, zero: float, number: Expr) -> Expr:
    """An element of an image as float32."""
    if kind.is_float:
        return number
    exact = Expr(number.fn, (), number.value, DType.I64)
    return call("mul", call("sub", cast(exact, F32), zero), scale)


def stored(kind: DType, value: Expr, scale: float, zero: float) -> Expr:
    """A value as an image's type holds it."""
    if kind is DType.E4M3:
        value = call("ratio", value, scale)
    if kind.is_float:
        return value
    rounded = call("add", call("round", call("ratio", value, scale)), zero)
    return cast(
        Expr("saturate", (rounded, *(Expr("const", (), v, F32) for v in (kind.lowest, kind.largest))), None, F32), DType.I64
    )


def squeeze(
    shape: tuple[int, int, int, int], hidden: int, kinds: tuple[DType, DType] = (F16, F16), one: bool = True, bias: bool = True
) -> Program:
    """y = x · sigmoid(v @ silu(w @ mean(x) + b) + c), where images of bytes have a zero point.

    kinds  of x and y; one: the products are one op
    """
    b, (n, c, *_) = Builder("squeeze"), shape
    zero = 0.0 if kinds[0].is_float else 7.0
    if kinds[0].is_float:
        b.normal("x", shape, F16, NHWC)
    else:
        b.values("x", b.rng.integers(int(kinds[0].lowest), int(kinds[0].largest) + 1, shape), kinds[0], NHWC, 16)
    b.normal("w", (hidden, c, 1, 1), F16, NHWC, 4 * c**-0.5)
    b.normal("v", (c, hidden, 1, 1), F16, NHWC, hidden**-0.5)
    if bias:
        b.normal("b", (hidden,), F32)
        b.normal("c", (c,), F32)
    wide, few = (n, c, 1, 1), (n, hidden, 1, 1)
    for name, extents, kind in (("mean", wide, F16), ("h", few, F16), ("gate", wide, F16), ("y", shape, kinds[1])):
        b.tensors[name] = dense(name, extents, kind, NHWC, 16 // kind.size)
    biased = {name: call("add", ACC, load(0)) if bias else ACC for name in "bc"}
    views = {name: (View(name, (coord(1),)),) if bias else () for name in "bc"}
    sigmoid = Epilogue(call("sigmoid", biased["c"]), views["c"])
    silu = Epilogue(call("mul", biased["b"], call("sigmoid", biased["b"])), views["b"])
    pixels = float(np.prod(shape[2:]))
    how = {"strides": (1, 1), "pads": (0, 0), "dilations": (1, 1)}
    ops: list[Op] = [
        Reduce(nodes=("mean",), y="mean", x="x", axes=(2, 3), combine="add", pre=element(kinds[0], 0.02, zero, ACC),
               epilogue=Epilogue(call("div", ACC, pixels)))
    ]  # fmt: skip
    if one:
        hidden_of = call("mul", ACC, call("sigmoid", ACC))
        ops.append(
            Mlp(nodes=("mlp",), y="gate", x="mean", w="w", v="v", b="b" if bias else None, hidden=hidden_of, epilogue=sigmoid)
        )
    else:
        ops.append(Conv(nodes=("first",), y="h", x="mean", w="w", epilogue=silu, **how))
        ops.append(Conv(nodes=("second",), y="gate", x="h", w="v", epilogue=sigmoid, **how))
    product = call("mul", element(kinds[0], 0.02, zero, load(0)), load(1))
    read = View("x", tuple(map(coord, range(4)))), View("gate", (coord(0), coord(1), constant(0), constant(0)))
    ops.append(Pointwise(nodes=("mul",), y="y", epilogue=Epilogue(stored(kinds[1], product, 0.015, zero), read)))
    if one:
        del b.tensors["h"]
    program = Program((), (), b.tensors, b.constants, tuple(ops))
    verify(program)
    return program


@thorough
@pytest.mark.parametrize(
    ("program", "config"),
    [
        (lambda: squeeze((2, 48, 9, 7), 12), (2, 2, 128)),
        (lambda: squeeze((1, 64, 14, 14), 20, (U8, U8), one=False), (1, 4, 256)),
        (lambda: squeeze((2, 32, 5, 5), 4, (S8, F16), bias=False), (1, 1, 256)),
        (lambda: squeeze((1, 24, 6, 6), 6, (F16, U8)), (2, 1, 256)),
        (lambda: squeeze((1, 20, 3, 4), 6, (F16, F16)), (1, 2, 256)),
        (lambda: squeeze((1, 48, 6, 6), 6, (F16, DType.E4M3)), (2, 2, 128)),
    ],
)
def test_results_are_right(program, config):
    """Shares of pixels and channels, also some that are not whole; whatever lies in memory before."""
    program = program()
    ((place, members),) = KERNEL.groups(program)
    assert (place, tuple(members)) == (len(program.ops) - 1, tuple(range(len(program.ops))))
    given = {name: recipe.values for name, recipe in program.constants.items()}
    known = replace(program, constants={name: r for name, r in program.constants.items() if name != "x"})
    config = dict(zip(("across", "along", "threads"), config, strict=True))
    assert KERNEL.supports(program.ops, known, ARCH) is None
    work = KERNEL.work(program.ops, known, config, ARCH)
    memory = machine.run(work, known, given, "y", ARCH)
    for op in program.ops:
        y = program.tensors[op.y]
        given[op.y] = from_storage(to_storage(compute(op, program, given), y.dtype), y.dtype)
        if op.y != "y":
            assert not memory.written[memory.base[op.y] // SPACE].any()
    place = memory.base["y"] // SPACE
    found = from_storage(elements(memory.buffers[place], y), y.dtype)
    off = np.abs(found.astype(np.float64) - given["y"])
    if y.dtype.is_float:
        assert np.linalg.norm(off) <= (1e-2 if y.dtype is DType.E4M3 else 1e-3) * np.linalg.norm(given["y"])
    else:
        assert off.max() <= 1 and (off > 0).mean() < 2e-2
    assert (memory.written[place] == 1).all()


def gated(images: int | str = 1) -> onnx.ModelProto:
    """A convolution, a squeeze and excitation of what it gives, and another convolution."""
    rng, weights = np.random.default_rng(0), []

    def conv(x: str, y: str, shape: tuple[int, ...]) -> onnx.NodeProto:
        values = rng.standard_normal(shape) * np.prod(shape[1:]) ** -0.5
        weights.append(numpy_helper.from_array(values.astype(np.float32), f"w{y}"))
        weights.append(numpy_helper.from_array(rng.standard_normal(shape[0]).astype(np.float32), f"b{y}"))
        return helper.make_node("Conv", [x, f"w{y}", f"b{y}"], [y], name=f"conv_{y}")

    nodes = [
        conv("x", "a", (64, 32, 1, 1)),
        helper.make_node("Relu", ["a"], ["image"]),
        helper.make_node("GlobalAveragePool", ["image"], ["mean"], name="mean"),
        conv("mean", "h", (16, 64, 1, 1)),
        helper.make_node("Relu", ["h"], ["hidden"]),
        conv("hidden", "g", (64, 16, 1, 1)),
        helper.make_node("Sigmoid", ["g"], ["gate"]),
        helper.make_node("Mul", ["image", "gate"], ["product"], name="mul"),
        conv("product", "y", (24, 64, 1, 1)),
    ]
    shapes = {"x": (images, 32, 15, 13), "y": (images, 24, 15, 13)}
    ends = [helper.make_tensor_value_info(n, onnx.TensorProto.FLOAT, s) for n, s in shapes.items()]
    graph = helper.make_graph(nodes, "g", ends[:1], ends[1:], weights)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)])


@pytest.mark.parametrize("images", [1, 40])
def test_plans_compute_it_within_one_step(monkeypatch: pytest.MonkeyPatch, images: int) -> None:
    """Whether its two products are one op, or two; and not where there are no clusters, or it takes longer."""
    monkeypatch.setattr(SqueezeExcite, "cost", lambda *_: 0.01)
    program = to_program(gated(images), {}, Options(archs=("sm_90a",), precision="fp16"), Dump(None))
    choices = schedule(program, ARCH)
    (place,) = (
        i for i, c in enumerate(choices) if c.kernel is not None and c.kernel.name == "squeeze_excite" and c.work.launches
    )
    within = [i for i, c in enumerate(choices) if c.work.within == place]
    assert "mul" in program.ops[place].nodes and "mean" in program.ops[within[0]].nodes and len(within) in (2, 3)
    works = [c.work for c in choices]
    images_ = {
        (w.code, ARCH, "cubin"): image("sm_90a", function=f"k{i}") for i, w in enumerate(w for c in works for w in c.launches)
    }
    index = {made: i for i, made in enumerate(images_.values())}
    entry = Entry(program, (section(Build("sm_90a", "cubin", choices, place_(program, works)), images_, index),))
    check_sections(entry, [*index], Budget(COMPARED))
    (made,) = entry.sections
    alone = replace(made, steps=tuple(replace(s, within=-1) if s.op == within[-1] else s for s in made.steps))
    with pytest.raises(PlanError, match="is not all that reads its result"):
        check_sections(replace(entry, sections=(alone,)), [*index], Budget(COMPARED))
    assert not any(c.work.within >= 0 for c in schedule(program, ARCHS["sm_80"]))
    monkeypatch.setattr(SqueezeExcite, "cost", lambda *_: 1e3)
    assert not any(c.work.within >= 0 for c in schedule(program, ARCH))


def test_a_result_that_another_step_reads_is_computed_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """Means that are an output, too; a plan that says otherwise is refused."""
    monkeypatch.setattr(SqueezeExcite, "cost", lambda *_: 0.01)
    model = gated()
    model.graph.output.append(helper.make_tensor_value_info("gate", onnx.TensorProto.FLOAT, (1, 64, 1, 1)))
    program = to_program(model, {}, Options(archs=("sm_90a",), precision="fp16"), Dump(None))
    assert not any(c.work.within >= 0 for c in schedule(program, ARCH))


def test_what_is_no_mean_is_refused() -> None:
    program = squeeze((1, 32, 5, 5), 8)
    mean, *others = program.ops
    squares = replace(mean, pre=call("mul", ACC, ACC))
    assert "not proportional" in str(KERNEL.supports([squares, *others], program, ARCH))
    assert "no mean over all pixels" in str(KERNEL.supports([replace(mean, combine="max"), *others], program, ARCH))
    large = squeeze((1, 64, 5, 5), 300)
    assert "300 hidden units" in str(KERNEL.supports(large.ops, large, ARCH))


def test_what_elements_are_multiplied_by_is_one_factor() -> None:
    """Steps of bytes and the gate: an element of bytes is moved, multiplied, and moved again; one of halves is multiplied."""
    for kinds, expr in (
        ((U8, U8), call("add", call("mul", call("sub", ACC, 7.0), load(0)), 7.0)),
        ((F16, F16), call("mul", ACC, load(0))),
    ):
        program = squeeze((1, 32, 5, 5), 8, kinds)
        found = described(program.ops, program)
        assert isinstance(found, Chain) and found.expr == expr


def test_rows_of_few_bytes_are_not_shared_out() -> None:
    """Blocks of half a pixel's channels would read and write halves of what memory brings together."""
    for kinds in ((F16, F16), (F16, U8)):
        program = squeeze((32, 32, 40, 40), 8, kinds)
        least = min(KERNEL.configs(program.ops, program, ARCH), key=lambda c: KERNEL.cost(program.ops, program, c, ARCH))
        assert least["across"] == 1, least
