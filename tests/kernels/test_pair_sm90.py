"""Products in one launch on Hopper: results as compiled, what is refused, what plans say of it."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

from tccompile.arch import ARCHS
from tccompile.dump import Dump
from tccompile.emit.pack import Build, section
from tccompile.errors import PlanError
from tccompile.ir.expr import ACC, Epilogue, Expr, View, call, cast, coord, load
from tccompile.ir.memory import COMPARED, Budget
from tccompile.ir.ops import Conv
from tccompile.ir.program import Program
from tccompile.ir.reference import compute
from tccompile.ir.storage import elements, from_storage, to_storage
from tccompile.ir.tensor import dense
from tccompile.ir.types import DType
from tccompile.ir.verify import verify
from tccompile.kernels.pair_sm90 import PairSm90
from tccompile.load.model import load as loaded
from tccompile.load.model import read
from tccompile.options import Options
from tccompile.pipeline import to_program
from tccompile.plan.format import Entry, Image
from tccompile.plan.rules import check_sections
from tccompile.rewrites import rewrite
from tccompile.schedule.choose import Choice, schedule
from tccompile.schedule.place import place
from tccompile.schedule.timings import NO_TIMINGS
from tccompile.stages.times import step_times
from tests.gpu.cases import NHWC, Builder
from tests.kernels import machine
from tests.kernels.memory import SPACE
from tests.small import image
from tests.tiers import usually

ARCH, KERNEL = ARCHS["sm_90a"], PairSm90()
F16, S8, U8 = DType.F16, DType.I8, DType.U8


def values(b: Builder, name: str, shape: tuple[int, ...], kind: DType, scale: float = 1.0) -> None:
    """Random ones: halves, or all that a byte may be."""
    if kind is F16:
        b.normal(name, shape, F16, NHWC, scale)
    else:
        b.values(name, b.rng.integers(int(kind.lowest), int(kind.largest) + 1, shape), kind, NHWC, 16)


def epilogue(b: Builder, tag: str, channels: int, kind: DType, depth: int, added: str) -> Epilogue:
    """max(result + bias + what is added, 0); bytes are scaled by channel, rounded and saturated."""
    views = [View("b" + tag, (coord(1),))]
    if kind is F16:
        b.normal("b" + tag, (channels,), DType.F32)
        out, factor = call("add", ACC, load(0)), 1.0
    else:
        b.integers("b" + tag, (channels,), DType.I32, -4096, 4096)
        b.values("s" + tag, b.rng.uniform(0.5, 2, channels) * 2.0**-8 * depth**-0.5, DType.F32)
        exact = call("add", Expr("acc", (), None, DType.I64), load(0, DType.I64))
        out, factor = call("mul", cast(exact, DType.F32), load(1)), 0.375
        views.append(View("s" + tag, (coord(1),)))
    if added:
        there = load(len(views)) if kind is F16 else cast(load(len(views), DType.I64), DType.F32)
        out = call("add", out, call("mul", there, factor))
        views.append(View(added, tuple(map(coord, range(4)))))
    return Epilogue(call("max", call("round", out) if kind.size == 1 else out, 0.0), tuple(views))


def products(
    x: tuple[int, int, int, int],
    wide: int,
    narrow: int,
    kinds: tuple[DType, DType, DType] = (U8, S8, U8),
    added: DType | None = None,
    made: int = 0,
) -> Program:
    """1×1 convolutions to so many channels, and then to so many.

    kinds  types of what is read and written, of weights, and of the second result
    added  type of what is added to the first result
    made   channels of what that is made of; or 0
    """
    b = Builder("products")
    values(b, "x", x, kinds[0])
    values(b, "w", (wide, x[1], 1, 1), kinds[1], x[1] ** -0.5)
    values(b, "v", (narrow, wide, 1, 1), kinds[1], wide**-0.5)
    shapes = {"y": (x[0], wide, *x[2:]), "z": (x[0], narrow, *x[2:]), "r": (x[0], wide, *x[2:])}
    steps = [("y", "x", "w", kinds[0], x[1]), ("z", "y", "v", kinds[2], wide)]
    if made and added:
        values(b, "o", (x[0], made, *x[2:]), kinds[0])
        values(b, "u", (wide, made, 1, 1), kinds[1], made**-0.5)
        steps.insert(0, ("r", "o", "u", added, made))
    elif added:
        values(b, "r", shapes["r"], added)
    ops = []
    for y, of, w, kind, depth in steps:
        b.tensors[y] = dense(y, shapes[y], kind, NHWC, 16 // kind.size)
        ep = epilogue(b, y, shapes[y][1], kind, depth, "r" if added and y == "y" else "")
        ops.append(Conv(nodes=(f"conv_{y}",), y=y, x=of, w=w, strides=(1, 1), pads=(0, 0), dilations=(1, 1), epilogue=ep))
    program = Program((), (), b.tensors, b.constants, tuple(ops))
    verify(program)
    return program


@pytest.mark.parametrize(
    ("program", "config"),
    usually(
        [
            (lambda: products((1, 32, 13, 11), 192, 32, (F16, F16, F16), F16), (1, 3, 1, 1)),
            (lambda: products((1, 64, 13, 11), 256, 64, added=S8), (2, 3, 2, 1)),
            (lambda: products((2, 192, 5, 11), 256, 128, (S8, S8, S8)), (2, 3, 1, 2)),
            (lambda: products((1, 64, 13, 11), 256, 64, added=S8, made=32), (2, 3, 2, 1)),
            (lambda: products((1, 64, 13, 11), 128, 32, (F16, F16, F16), F16, 40), (1, 3, 1, 1)),
        ],
        0,
    ),
)
def test_results_are_right(program, config):
    """On one block, whose warpgroups have several tiles, the last one beyond the image. Only weights are read before it waits."""
    program = program()
    ops, given = program.ops, {name: recipe.values for name, recipe in program.constants.items()}
    known = replace(program, constants={name: r for name, r in program.constants.items() if name not in ("x", "o", "r")})
    config = dict(zip(("groups", "slots", "ahead", "parts"), config, strict=True))
    assert KERNEL.supports(ops, known, ARCH) is None
    work = KERNEL.work(ops, known, config, ARCH)
    memory = machine.run(replace(work, launches=(replace(work.launches[0], grid=(1, 1, 1)),)), known, given, "z", ARCH)
    for op in ops:
        y = program.tensors[op.y]
        given[op.y] = from_storage(to_storage(compute(op, program, given), y.dtype), y.dtype)
        place = memory.base[op.y] // SPACE
        if op.y == "r":  # which is not written
            assert not memory.written[place].any()
            continue
        found = from_storage(elements(memory.buffers[place], y), y.dtype)
        error = np.linalg.norm(found.astype(np.float64) - given[op.y]) / np.linalg.norm(given[op.y].astype(np.float64))
        assert error <= (5e-4 if y.dtype is F16 else 0), op.y
        assert (memory.written[place] == 1).all(), f"not all of {op.y}, once"
    assert sum(bool(written.any()) for written in memory.written) == 2


def bottlenecks(images: int | str = 1) -> onnx.ModelProto:
    """Three residual blocks of 1×1 and 3×3 convolutions, whose last result but one is an output, too."""
    rng, nodes, weights = np.random.default_rng(0), [], []

    def conv(x: str, y: str, shape: tuple[int, ...], added: str = "") -> str:
        values = rng.standard_normal(shape) * np.prod(shape[1:]) ** -0.5
        weights.append(numpy_helper.from_array(values.astype(np.float32), f"w{y}"))
        nodes.append(helper.make_node("Conv", [x, f"w{y}"], [f"{y}c"], pads=[shape[2] // 2] * 4, name=f"conv_{y}"))
        if added:
            nodes.append(helper.make_node("Add", [f"{y}c", added], [f"{y}a"]))
        nodes.append(helper.make_node("Relu", [f"{y}a" if added else f"{y}c"], [y]))
        return y

    first = conv("x", "first", (32, 8, 1, 1))
    wide = conv(first, "wide", (128, 32, 1, 1))
    for i in range(3):
        narrow = conv(conv(wide if i else first, f"a{i}", (32, 128 if i else 32, 1, 1)), f"b{i}", (32, 32, 3, 3))
        wide = conv(narrow, f"c{i}", (128, 32, 1, 1), wide)
    ends = [
        helper.make_tensor_value_info(n, onnx.TensorProto.FLOAT, s)
        for n, s in (("x", (images, 8, 9, 9)), ("c2", (images, 128, 9, 9)))
    ]
    return helper.make_model(
        helper.make_graph(nodes, "g", ends[:1], ends[1:], weights), opset_imports=[helper.make_opsetid("", 17)]
    )


@pytest.fixture
def joined(monkeypatch: pytest.MonkeyPatch) -> tuple[Program, list[Choice]]:
    """The blocks for sm_90a, where two products in one launch take no time."""
    monkeypatch.setattr(PairSm90, "cost", lambda *_: 0.01)
    program = to_program(bottlenecks(), {}, Options(archs=("sm_90a",), precision="fp16"), Dump(None))
    return program, schedule(program, ARCH)


def entry_of(program: Program, choices: list[Choice]) -> tuple[Entry, list[Image]]:
    works = [c.work for c in choices]
    images = {
        (launch.code, ARCH, "cubin"): image("sm_90a", function=f"k{i}")
        for i, launch in enumerate(w for c in works for w in c.launches)
    }
    index = {made: i for i, made in enumerate(images.values())}
    return Entry(program, (section(Build("sm_90a", "cubin", choices, place(program, works)), images, index),)), [*index]


def test_plans_have_steps_within_others(joined: tuple[Program, list[Choice]]) -> None:
    """Each wide result, what is added to the first of them, and the next narrow one: by one launch, which nothing disturbs."""
    program, choices = joined
    named = [op.nodes[0] for op in program.ops]
    within = {named[i]: named[c.work.within] for i, c in enumerate(choices) if c.work.within >= 0}
    assert within == {"conv_wide": "conv_c0", "conv_a1": "conv_c0", "conv_a2": "conv_c1"}
    reason = choices[named.index("conv_c0")].reason
    assert re.fullmatch(r"estimated 0.0 µs, best of \d+ together with conv_wide, conv_a1, apart [\d.]+ µs", reason)
    entry, images = entry_of(program, choices)
    check_sections(entry, images, Budget(COMPARED))
    assert not any(c.work.within >= 0 for c in schedule(program, ARCHS["sm_80"]))


def test_what_is_computed_together_is_one_step_of_what_bytes_would_save(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its time is that of all its products: none of them counts as free, and is left in floats for that."""
    monkeypatch.setattr(PairSm90, "cost", lambda *_: 0.01)
    graph = rewrite(loaded(read(bottlenecks()), {}))
    steps = step_times(graph, archs=("sm_90a",), known=NO_TIMINGS, ranked={}, ratios={})["sm_90a"]
    together = {"conv_c0", "conv_wide", "conv_a1"}, {"conv_c1", "conv_a2"}
    for names in together:
        assert any(names <= {*nodes} and us > 0 for nodes, us in steps)


@pytest.mark.parametrize("channels, together", [(3, 0), (8, 1)])
def test_what_reads_an_input_in_place_of_its_copy_stays_apart(
    monkeypatch: pytest.MonkeyPatch, channels: int, together: int
) -> None:
    """The copy that the launch would read is not made."""
    monkeypatch.setattr(PairSm90, "cost", lambda *_: 0.01)
    model = plain([(128, channels, 1, 1), (32, 128, 1, 1)])
    program = to_program(model, {}, Options(archs=("sm_90a",), precision="fp16"), Dump(None))
    choices = schedule(program, ARCH)
    assert sum(c.work.within >= 0 for c in choices) == together
    assert any(not c.work.launches and c.work.within < 0 for c in choices) == (not together)


def plain(shapes: list[tuple[int, ...]]) -> onnx.ModelProto:
    """Convolutions one after the other, of weights of these shapes."""
    rng = np.random.default_rng(0)
    weights = [numpy_helper.from_array(rng.standard_normal(s).astype(np.float32), f"w{i}") for i, s in enumerate(shapes)]
    nodes = [helper.make_node("Conv", [f"x{i}", f"w{i}"], [f"x{i + 1}"]) for i in range(len(shapes))]
    ends = (("x0", shapes[0][1]), (f"x{len(shapes)}", shapes[-1][0]))
    x, y = (helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, (1, channels, 64, 64)) for name, channels in ends)
    return helper.make_model(helper.make_graph(nodes, "g", [x], [y], weights), opset_imports=[helper.make_opsetid("", 17)])


def test_what_one_launch_takes_too_long_for_stays_apart(joined, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PairSm90, "cost", lambda *_: 1e3)
    assert not any(c.kernel.name == "pair_sm90" for c in schedule(joined[0], ARCH))


def test_plans_whose_launches_write_too_early_are_refused(joined: tuple[Program, list[Choice]]) -> None:
    program, choices = joined
    entry, images = entry_of(program, choices)
    (made,) = entry.sections
    number = max(i for i, s in enumerate(made.steps) if s.within >= 0)
    others = [n for n in made.offsets if n == program.ops[made.steps[number].within].inputs[0]]
    over = replace(made, offsets={**made.offsets, program.ops[number].y: made.offsets[others[0]]})
    for wrong, what in (
        (
            replace(made, steps=tuple(replace(s, within=-1) if s.op == number else s for s in made.steps)),
            "are none of its tensors",
        ),
        (
            replace(made, steps=tuple(replace(s, within=number) if s.op == number else s for s in made.steps)),
            f"is computed within step {number}",
        ),
        (over, "lies over"),
    ):
        with pytest.raises(PlanError, match=what):
            check_sections(replace(entry, sections=(wrong,)), images, Budget(COMPARED))
