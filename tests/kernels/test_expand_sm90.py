"""A 1×1 convolution and the depthwise one behind it in one launch: values by its PTX, what is refused, code."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

from tccompile.arch import ARCHS
from tccompile.emit.compile import resources
from tccompile.ir.expr import Epilogue, Expr, View, call, cast, const, coord, load, substitute
from tccompile.ir.ops import Conv
from tccompile.ir.program import Program
from tccompile.ir.reference import compute
from tccompile.ir.storage import from_storage, to_storage
from tccompile.ir.tensor import dense
from tccompile.ir.types import DType
from tccompile.ir.verify import verify
from tccompile.kernels.expand_sm90 import CHOSEN, ExpandSm90
from tccompile.options import Options
from tccompile.pipeline import compile_model
from tccompile.plan.file import Plan
from tests.gpu.cases import DEPTHWISE, NHWC, Builder
from tests.kernels import machine
from tests.kernels.memory import SPACE
from tests.networks import relative_error
from tests.tiers import thorough, usually

KERNEL, ARCH = ExpandSm90(), ARCHS["sm_90a"]
U8, I8, F16, F32 = DType.U8, DType.I8, DType.F16, DType.F32


def epilogue(b: Builder, tag: str, channels: int, y: DType, depth: int) -> Epilogue:
    """The sum by a factor and with a bias for each channel; bytes are rounded and saturated, halves between 0 and 6."""
    b.values(f"scale_{tag}", b.rng.uniform(0.5, 2, channels) * 2.0**-7 * depth**-0.5, F32)
    b.values(f"bias_{tag}", b.rng.uniform(-20, 40, channels), F32)
    value = call("add", call("mul", cast(Expr("acc", (), None, DType.I64), F32), load(0)), load(1))
    if y is F16:
        value = call("min", call("max", call("mul", value, 2.0**-5), 0.0), 6.0)
    else:
        value = cast(Expr("saturate", (call("round", value), const(y.lowest), const(y.largest))), DType.I64)
    return Epilogue(value, tuple(View(f"{name}_{tag}", (coord(1),)) for name in ("scale", "bias")))


def pair(
    x: tuple[int, int, int, int], wide: int, window: int = 3, kinds: tuple[DType, DType, DType] = (I8, U8, U8), stride: int = 1
) -> Program:
    """A 1×1 convolution to so many channels, and a depthwise one of a square filter; kinds: types of x and of both results."""
    b = Builder("pair")
    b.values("x", b.rng.integers(int(kinds[0].lowest), int(kinds[0].largest) + 1, x), kinds[0], NHWC, 16)
    b.values("v", b.rng.integers(-127, 128, (wide, x[1], 1, 1)), I8, NHWC, 16)
    b.values("w", b.rng.integers(-127, 128, (wide, 1, window, window)), I8, DEPTHWISE, 16)
    p, q = ((n - 1) // stride + 1 for n in x[2:])
    for name, of, kind in (("made", x[2:], kinds[1]), ("y", (p, q), kinds[2])):
        b.tensors[name] = dense(name, (x[0], wide, *of), kind, NHWC, 16)
    of_first, of_second = epilogue(b, "made", wide, kinds[1], x[1]), epilogue(b, "y", wide, kinds[2], window**2)
    flat = {"strides": (1, 1), "pads": (0, 0), "dilations": (1, 1)}
    over = {"strides": (stride,) * 2, "pads": (window // 2,) * 2, "dilations": (1, 1), "groups": wide}
    ops = (
        Conv(nodes=("first",), y="made", x="x", w="v", **flat, epilogue=of_first),  # type: ignore[arg-type]
        Conv(nodes=("second",), y="y", x="made", w="w", **over, epilogue=of_second),  # type: ignore[arg-type]
    )
    program = Program((), (), b.tensors, b.constants, ops)
    verify(program)
    return program


# Boxes over the edges of channels, rows, columns and images; pixels of 16, 32, 48 and 96 bytes; eights that are no whole ones.
CASES = {
    "3x3": (lambda: pair((3, 24, 9, 13), 48), (48, 16, 8, 4, 2, 1, 1, 2, 3, 4)),
    "3x3/2": (lambda: pair((2, 16, 13, 11), 128, stride=2), (64, 16, 6, 4, 1, 1, 1, 2, 2, 4)),
    "halves": (lambda: pair((2, 40, 9, 7), 64, kinds=(U8, U8, F16)), (64, 16, 8, 4, 1, 1, 1, 2, 4, 5)),
    "side by side": (lambda: pair((3, 96, 7, 7), 64, kinds=(I8, I8, I8)), (64, 16, 8, 7, 1, 2, 1, 2, 2, 8)),
    "5x5": (lambda: pair((1, 24, 8, 9), 48, 5), (48, 8, 10, 4, 2, 1, 2, 2, 3, 12)),
}


@thorough
@pytest.mark.parametrize("case", usually(CASES, "3x3/2"))
def test_values_of_the_ptx(case: str) -> None:
    """Only weights are read before a thread waits, and what is between the two convolutions is never written."""
    program, chosen = CASES[case][0](), CASES[case][1]
    ops, given = program.ops, {name: recipe.values for name, recipe in program.constants.items()}  # type: ignore[union-attr]
    known = replace(program, constants={name: r for name, r in program.constants.items() if name != "x"})
    assert KERNEL.supports(ops, known, ARCH) is None
    config = {**dict(zip(CHOSEN, chosen, strict=True)), "held": 1}
    memory = machine.run(KERNEL.work(ops, known, config, ARCH), known, given, "y", ARCH)
    for op in ops:
        y = program.tensors[op.y]
        given[op.y] = from_storage(to_storage(compute(op, program, given), y.dtype), y.dtype)
    assert relative_error(memory.result(), given["y"]) <= (5e-4 if y.dtype is F16 else 0)
    memory.check_written(True)
    assert not memory.written[memory.base["made"] // SPACE].any()


def test_says_why_not() -> None:
    program = pair((2, 24, 9, 9), 48)
    first, second = program.ops
    for changed, reason in [
        (replace(program, outputs=("made",)), "not only a tensor between"),
        (replace(program, ops=(first, second, second)), "other readers"),
        (replace(program, tensors={**program.tensors, "x": replace(program.tensors["x"], dtype=F16)}), "not made of bytes"),
    ]:
        assert reason in str(KERNEL.supports((first, second), changed, ARCH))
    assert "pixel by pixel" in str(KERNEL.supports((replace(first, strides=(2, 2)), second), program, ARCH))
    assert "up to 160" in str(KERNEL.supports(wide := pair((1, 176, 9, 9), 48).ops, pair((1, 176, 9, 9), 48), ARCH)) and wide
    assert "no tensor copy engine" in str(KERNEL.supports((first, second), program, ARCHS["sm_89"]))


def test_functions_of_what_is_made_take_time() -> None:
    """More of it is made than is in the image, as tiles share borders."""
    program = pair((8, 24, 28, 28), 144)
    first, second = program.ops
    expr = first.epilogue.expr
    rounded = expr.args[0].args[0]
    value = rounded.args[0]
    silu = substitute(expr, {value: call("mul", value, call("sigmoid", value))})
    slower = replace(first, epilogue=replace(first.epilogue, expr=silu))
    config = next(iter(KERNEL.configs(program.ops, program, ARCH)))
    plain, other = (KERNEL.cost((op, second), program, config, ARCH) for op in (first, slower))
    assert other > 1.05 * plain


@thorough
@pytest.mark.parametrize("deep, wide, window, stride", [(16, 96, 3, 2), (24, 144, 3, 1), (96, 576, 3, 1), (40, 240, 5, 1)])
def test_compiles(deep: int, wide: int, window: int, stride: int) -> None:
    program = pair((8, deep, 28, 28), wide, window, stride=stride)
    config = max(KERNEL.configs(program.ops, program, ARCH), key=lambda c: (c["channels"], c["rows"]))
    (launch,) = KERNEL.work(program.ops, program, config, ARCH).launches
    assert resources(launch.code, ARCH).stack == 0


def widening(images: int | str = 2) -> onnx.ModelProto:
    """An inverted residual block, as MobileNetV2 has them, between two other convolutions."""
    rng, nodes, weights = np.random.default_rng(0), [], []

    def conv(x: str, y: str, shape: tuple[int, ...], stride: int = 1, clipped: bool = True) -> str:
        groups = shape[0] if shape[1] == 1 else 1
        values = rng.standard_normal(shape) * np.prod(shape[1:]) ** -0.5
        weights.append(numpy_helper.from_array(values.astype(np.float32), f"w_{y}"))
        how = {"pads": [shape[2] // 2] * 4, "strides": [stride] * 2, "group": groups, "name": f"conv_{y}"}
        nodes.append(helper.make_node("Conv", [x, f"w_{y}"], [f"{y}_sum" if clipped else y], **how))
        if clipped:
            nodes.append(helper.make_node("Clip", [f"{y}_sum", "low", "high"], [y]))
        return y

    weights += [numpy_helper.from_array(np.array(v, np.float32), n) for n, v in (("low", 0.0), ("high", 6.0))]
    x = conv(conv("x", "stem", (32, 3, 3, 3)), "before", (24, 32, 1, 1), 2, clipped=False)
    conv(conv(conv(x, "wide", (144, 24, 1, 1)), "over", (144, 1, 3, 3)), "narrow", (24, 144, 1, 1), clipped=False)
    nodes.append(helper.make_node("Add", ["before", "narrow"], ["sum"]))
    conv("sum", "y", (32, 24, 1, 1), clipped=False)
    of_x, of_y = (
        helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, (images, *shape))
        for name, shape in (("x", (3, 56, 56)), ("y", (32, 28, 28)))
    )
    return helper.make_model(helper.make_graph(nodes, "g", [of_x], [of_y], weights), opset_imports=[helper.make_opsetid("", 17)])


def in_one_launch(monkeypatch: pytest.MonkeyPatch, folder: Path, images: int | str = 2, **options: Any) -> Plan:
    """The plan of `widening` in bytes, whose blocks are computed so wherever they may be."""
    monkeypatch.setattr(ExpandSm90, "cost", lambda *_: 0.01)
    np.savez(folder / "data.npz", x=np.random.default_rng(1).standard_normal((4, 1, 3, 56, 56)).astype(np.float32))
    return compile_model(
        widening(images), Options(archs=("sm_90a",), quantize="int8", max_error=0.3, calibrate=folder / "data.npz", **options)
    )


@thorough
def test_blocks_of_a_quantized_network(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (section,) = in_one_launch(monkeypatch, tmp_path).entries[0].sections
    assert [section.steps[s.within].kernel for s in section.steps if s.within >= 0] == ["expand_sm90"]
