"""A product and what makes its operand in one launch on Hopper: results as compiled, what is refused, what is chosen."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

from tccompile.arch import ARCHS
from tccompile.dump import Dump
from tccompile.emit.compile import resources
from tccompile.ir.expr import Epilogue, Expr, View, call, cast, const, coord, load
from tccompile.ir.memory import COMPARED, Budget
from tccompile.ir.ops import Conv, Pointwise
from tccompile.ir.program import Program
from tccompile.ir.reference import compute
from tccompile.ir.storage import elements, from_storage, to_storage
from tccompile.ir.tensor import dense
from tccompile.ir.types import DType
from tccompile.ir.verify import verify
from tccompile.kernels.prologue_sm90 import PrologueSm90
from tccompile.kernels.spec import TiledMap
from tccompile.options import Options
from tccompile.pipeline import to_program
from tccompile.plan.rules import check_sections
from tccompile.schedule.choose import schedule
from tests.gpu.cases import NHWC, Builder, _view
from tests.kernels import machine
from tests.kernels.memory import SPACE
from tests.kernels.test_pair_sm90 import entry_of, epilogue, values
from tests.tiers import thorough, usually

ARCH, KERNEL = ARCHS["sm_90a"], PrologueSm90()
F16, S8, U8 = DType.F16, DType.I8, DType.U8


def layer(
    x: tuple[int, int, int, int], columns: int, kinds: tuple[DType, DType, DType] = (S8, U8, U8), wider: int = 0
) -> Program:
    """A factor and an addend for each channel, ReLU, bytes of that, and a 1×1 convolution to so many columns.

    kinds  types of what is read, of what is multiplied, and of the result
    wider  channels of what x is the first part of, beyond its own
    """
    b, (n, channels, height, width) = Builder("layer"), x
    values(b, "all", (n, channels + wider, height, width), kinds[0])
    if wider:
        b.tensors["x"] = replace(_view("x", b.tensors["all"], x, 1, 0), padded=x)
    b.values("s", b.rng.uniform(-1.5, 1.5, channels), DType.F32)
    b.values("t", b.rng.uniform(-40, 90, channels), DType.F32)
    views = View("x" if wider else "all", tuple(map(coord, range(4)))), View("s", (coord(1),)), View("t", (coord(1),))
    there = load(0) if kinds[0] is F16 else cast(load(0, DType.I64), DType.F32)
    made = call("round", call("add", call("mul", there, call("mul", load(1), 60.0) if kinds[0] is F16 else load(1)), load(2)))
    made = Expr("saturate", (made, const(float(kinds[1].lowest)), const(float(kinds[1].largest))), None, DType.F32)
    b.tensors["y"] = dense("y", x, kinds[1], NHWC, 16)
    first = Pointwise(nodes=("norm",), y="y", epilogue=Epilogue(cast(made, DType.I64), views))
    values(b, "w", (columns, channels, 1, 1), S8)
    b.tensors["z"] = dense("z", (n, columns, height, width), kinds[2], NHWC, 16 // kinds[2].size)
    ep = epilogue(b, "z", columns, S8, channels, "")
    conv = Conv(nodes=("conv",), y="z", x="y", w="w", strides=(1, 1), pads=(0, 0), dilations=(1, 1), epilogue=ep)
    program = Program((), (), b.tensors, b.constants, (first, conv))
    verify(program)
    return program


CASES = [
    (lambda: layer((1, 160, 13, 11), 64), (64, 2, 2, 3)),
    (lambda: layer((2, 64, 9, 11), 128, (U8, U8, S8)), (128, 2, 1, 2)),
    (lambda: layer((1, 288, 13, 11), 128, (S8, S8, F16), 96), (64, 2, 1, 2)),
    (lambda: layer((1, 400, 13, 11), 64), (64, 4, 2, 2)),
    (lambda: layer((1, 288, 13, 11), 64, (F16, U8, U8), 96), (64, 2, 1, 2)),
    (lambda: layer((2, 160, 9, 11), 32, (F16, S8, S8)), (32, 2, 2, 3)),
    (lambda: layer((1, 96, 13, 11), 32, (S8, U8, U8)), (32, 1, 1, 4)),
]


@thorough
@pytest.mark.parametrize(("program", "config"), usually(CASES, 0))
def test_results_are_right(program, config):
    """On one block, whose warpgroups have several tiles, the last one beyond the image. Only weights are read before it waits."""
    program = program()
    ops, given = program.ops, {name: recipe.values for name, recipe in program.constants.items()}
    if "x" in program.tensors:
        given["x"] = given["all"][:, : program.tensors["x"].shape[1]]
    known = replace(program, constants={name: r for name, r in program.constants.items() if name != "all"})
    config = dict(zip(("columns", "groups", "share", "slots"), config, strict=True))
    assert KERNEL.supports(ops, known, ARCH) is None
    work = KERNEL.work(ops, known, config, ARCH)
    (launch,) = work.launches
    memory = machine.run(replace(work, launches=(replace(launch, grid=(1, *launch.grid[1:])),)), known, given, "z", ARCH)
    for op in ops:
        y = program.tensors[op.y]
        given[op.y] = from_storage(to_storage(compute(op, program, given), y.dtype), y.dtype)
    z, place = program.tensors["z"], memory.base["z"] // SPACE
    found = from_storage(elements(memory.buffers[place], z), z.dtype).astype(np.float64)
    error = np.linalg.norm(found - given["z"]) / np.linalg.norm(given["z"].astype(np.float64))
    assert error <= (5e-4 if z.dtype is F16 else 0)
    assert (memory.written[place] == 1).all()
    assert sum(bool(written.any()) for written in memory.written) == 1


@thorough
@pytest.mark.parametrize(("kinds",), usually([((F16, U8, U8),), ((S8, U8, U8),), ((S8, U8, F16),), ((F16, S8, S8),)], 0))
def test_machine_code_without_spills(kinds: tuple[DType, DType, DType]) -> None:
    """Of a config of each kind: the assembler has crashed at other orders of the same."""
    program = layer((32, 608, 14, 14), 128, kinds)
    configs = {(c["share"], c["groups"] > 2): c for c in KERNEL.configs(program.ops, program, ARCH)}
    assert len(configs) >= 3
    for config in configs.values():
        (launch,) = KERNEL.work(program.ops, program, config, ARCH).launches
        assert resources(launch.code, ARCH).stack == 0


def dense_layer(halves: bool, images: int | str = 1) -> onnx.ModelProto:
    """A norm as an inference has it, ReLU, and a 1×1 convolution, in bytes, between other convolutions; halves: but for what the
    norm reads."""
    rng, weights, nodes = np.random.default_rng(0), [], []

    def constant(name: str, values: np.ndarray) -> str:
        weights.append(numpy_helper.from_array(values, name))
        return name

    def conv(x: str, y: str, shape: tuple[int, ...]) -> str:
        names = (
            constant(f"{y}w", rng.integers(-127, 128, shape).astype(np.int8)),
            constant(f"{y}s", np.float32(shape[1] ** -0.5 / 70)),
        )
        nodes.append(helper.make_node("DequantizeLinear", names, [f"{y}d"]))
        nodes.append(helper.make_node("Conv", [x, f"{y}d"], [y], pads=[shape[2] // 2] * 4, name=f"conv_{y}"))
        return y

    def stored(x: str, kind: type) -> str:
        by = constant(f"{x}_scale", np.float32(0.02)), constant(f"{x}_zero", np.zeros((), kind))
        nodes.append(helper.make_node("QuantizeLinear", [x, *by], [f"{x}_bytes"]))
        nodes.append(helper.make_node("DequantizeLinear", [f"{x}_bytes", *by], [f"{x}_stored"]))
        return f"{x}_stored"

    first = conv("x", "first", (160, 16, 3, 3))
    first = first if halves else stored(first, np.int8)
    ranges = {"s": (0.5, 1.5), "b": (-1, 1), "mean": (-1, 1), "var": (0.5, 1.5)}
    of_norm = [constant(name, rng.uniform(*of, 160).astype(np.float32)) for name, of in ranges.items()]
    nodes.append(helper.make_node("BatchNormalization", [first, *of_norm], ["normed"], name="norm"))
    nodes.append(helper.make_node("Relu", ["normed"], ["positive"], name="relu"))
    narrow = stored(conv(stored("positive", np.uint8), "narrow", (64, 160, 1, 1)), np.int8)
    ends = conv(narrow, "last", (16, 64, 3, 3)), conv(first, "other", (16, 160, 3, 3))
    nodes.append(helper.make_node("Add", ends, ["y"], name="sum"))
    outside = [helper.make_tensor_value_info(n, onnx.TensorProto.FLOAT, (images, 16, 9, 9)) for n in ("x", "y")]
    graph = helper.make_graph(nodes, "g", outside[:1], outside[1:], weights)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)])


@pytest.mark.parametrize("halves", [False, True])
def test_a_norm_and_the_product_behind_it_are_one_launch(monkeypatch: pytest.MonkeyPatch, halves: bool) -> None:
    """The norm's result is neither written nor read. Where that would take longer, they stay apart; and on other generations."""
    program = to_program(dense_layer(halves), {}, Options(archs=("sm_90a",), precision="fp16"), Dump(None))
    named = [op.nodes for op in program.ops]
    monkeypatch.setattr(PrologueSm90, "cost", lambda *_: 0.01)
    choices = schedule(program, ARCH)
    ((number, choice),) = [(i, c) for i, c in enumerate(choices) if c.work.within >= 0]
    assert "relu" in named[number] and any("conv_narrow" in name for name in named[choice.work.within])
    launch = choices[choice.work.within].work.launches[0]
    assert program.ops[number].y not in {arg.tensor for arg in launch.args if isinstance(arg, TiledMap)}
    entry, images = entry_of(program, choices)
    check_sections(entry, images, Budget(COMPARED))
    assert not any(c.work.within >= 0 for c in schedule(program, ARCHS["sm_80"]))
    monkeypatch.setattr(PrologueSm90, "cost", lambda *_: 1e3)
    assert not any(c.work.within >= 0 for c in schedule(program, ARCH))


def test_what_is_refused() -> None:
    """What is read twice, what is no image of bytes, results that no box has."""
    program = layer((1, 160, 13, 11), 64)
    first, conv = program.ops
    again = replace(conv, y="again")
    twice = replace(program, tensors={**program.tensors, "again": dense("again", (1, 64, 13, 11), U8, NHWC, 16)})
    assert "is not only multiplied" in KERNEL.supports((first, conv), replace(twice, ops=(first, conv, again)), ARCH)
    moved = replace(first.epilogue.loads[0], index=tuple(map(coord, (0, 1, 2, 2))))
    turned = replace(first, epilogue=replace(first.epilogue, loads=(moved, *first.epilogue.loads[1:])))
    assert "element by element" in KERNEL.supports((turned, conv), program, ARCH)
    narrow = layer((1, 160, 13, 11), 16)
    assert "has 16 channels" in KERNEL.supports(narrow.ops, narrow, ARCH)
    assert "wgmma" in KERNEL.supports(program.ops, program, ARCHS["sm_89"])
