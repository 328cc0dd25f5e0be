"""Padding by format: what each asks for, and that tensors and their parts hold the same values whatever it is."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import onnx
import pytest

from tccompile import layout
from tccompile.ir.limits import check_program
from tccompile.ir.ops import Conv, Gemm
from tccompile.ir.program import Program
from tccompile.ir.tensor import LANES, Tensor, dense
from tccompile.ir.types import DType
from tccompile.ir.weights import Literal
from tccompile.pipeline import without_code
from tccompile.runtime.session import Session
from tests.networks import feeds, reference, relative_error
from tests.plans import without_code as planned
from tests.rewrites.common import Net
from tests.test_groups import conv


def network() -> onnx.ModelProto:
    """Parts of all kinds: with gaps, at the end of an axis and inside it, every other pixel, heads of a row, a window."""
    n = Net(x=(2, 12, 6, 6))

    def convolved(x: str, channels: int, outputs: int) -> str:
        return n("Relu", n("Conv", x, n.normal(outputs, channels, 3, 3, scale=(9 * channels) ** -0.5), pads=[1] * 4))

    first = convolved("x", 12, 12)
    mixed = convolved(n("Concat", first, convolved(first, 12, 20), axis=1), 32, 36)  # the first part gets a gap
    end = n("Slice", mixed, np.array([24]), np.array([36]), np.array([1]))
    inside = n("Slice", mixed, np.array([8]), np.array([16]), np.array([1]))
    grown = n("Concat", end, convolved(end, 12, 12), convolved(inside, 8, 9), axis=1)  # read by more than convolutions
    deep = n("DepthToSpace", convolved(grown, 33, 48), blocksize=2, mode="DCR")
    cut = n("Slice", deep, np.array([1, 1]), np.array([11, 11]), np.array([2, 3]))
    rows = n("Transpose", n("Reshape", convolved(cut, 12, 24), np.array([2, 24, 100])), perm=[0, 2, 1])
    heads = [n("MatMul", rows, n.normal(24, 24, scale=0.2)) for _ in range(3)]
    q, k, v = (n("Transpose", n("Reshape", h, np.array([2, 100, 3, 8])), perm=[0, 2, 1, 3]) for h in heads)
    weights = n("Softmax", n("MatMul", q, n("Transpose", k, perm=[0, 1, 3, 2])), axis=-1)
    seen = n("Transpose", n("MatMul", weights, v), perm=[0, 2, 1, 3])
    return n.out(n("MatMul", n("Reshape", seen, np.array([2, 100, 24])), n.normal(24, 5, scale=0.2)), n("Abs", grown)).model()


@pytest.mark.parametrize("precision", ["fp16", "fp32"])
@pytest.mark.parametrize("unit", [1, 2, 4])
def test_parts_move_with_what_they_are_parts_of(unit: int, precision: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = network()
    usual = without_code(model, precision=precision).entries[0]
    monkeypatch.setattr(layout, "padding", lambda dtype, multiplied: unit)
    plan = without_code(model, precision=precision)
    (entry,) = plan.entries
    check_program(entry.program)
    tensors, before = entry.program.tensors, usual.program.tensors
    parts = [name for name, t in tensors.items() if t.base is not None]
    assert len(parts) >= 8 and {tensors[name].base for name in parts} == {before[name].base for name in parts}
    narrow = before["w0"].padded[1], tensors["w0"].padded[1]
    assert narrow == (16, -(-12 // unit) * unit)
    assert any(tensors[name].offset < before[name].offset for name in parts)
    assert entry.sections[0].arena < usual.sections[0].arena
    inputs = feeds(model, 1)
    with Session(plan, device="cpu") as session:
        found = session.run(None, inputs)
    for (name, expected), got in zip(reference(model, inputs).items(), found, strict=True):
        assert relative_error(got, expected) <= (5e-3 if precision == "fp16" else 1e-5), name


@pytest.mark.parametrize("precision", ["fp16", "fp32", "mixed"])
def test_formats_that_there_are_all_ask_for_what_fusing_assumes(precision: str) -> None:
    """So fusing's places are final: 16 bytes of halves, and as many elements of whatever kernels read eight at a time."""
    for dtype in (DType.F16, DType.BF16, DType.F32):
        assert layout.padding(dtype, True) == layout.padding(dtype, False) == LANES
    program = without_code(network(), precision=precision).entries[0].program
    assert layout.lay_out(program) == program


@pytest.mark.parametrize(
    ("dtype", "channels"), [(DType.E4M3, 32), (DType.I8, 32), (DType.I4, 32), (DType.F16, 24), (DType.F32, 24)]
)
def test_operands_of_products_have_rows_of_16_bytes(dtype: DType, channels: int) -> None:
    names = {"a": (5, 20), "b": (7, 20), "y": (5, 7)}
    tensors = {name: dense(name, shape, DType.F32 if name == "y" else dtype) for name, shape in names.items()}
    program = Program((), (), tensors, {"b": Literal(np.zeros((7, 20)))}, (Gemm(nodes=("gemm",), y="y", a="a", b="b"),))
    laid = layout.lay_out(program).tensors
    assert laid["a"].padded == (5, channels) and laid["b"].padded == (7, channels) and laid["a"].strides == (channels, 1)
    assert laid["a"].strides[0] * dtype.bits % (8 * 16) == 0
    assert laid["y"] == tensors["y"]


@pytest.mark.parametrize(
    ("shape", "dtype", "step"),
    [
        ((7, 144, 1, 1), DType.I8, 256),
        ((7, 64, 1, 1), DType.E4M3, 128),
        ((7, 160, 1), DType.E4M3, 256),  # an image of height 1
        ((7, 256, 1, 1), DType.I8, 256),
        ((7, 144, 1, 1), DType.F16, 192),
        ((7, 528, 1, 1), DType.F16, 528),  # more than eight lines
        ((7, 992, 1, 1), DType.I8, 1024),
        ((7, 144, 1, 1), DType.F32, 144),
        ((7, 64, 3, 3), DType.I8, 576),
    ],
)
def test_rows_of_weights_begin_with_lines(shape: tuple[int, ...], dtype: DType, step: int) -> None:
    """Those whose window is one pixel of several, which the copy engine reads a line at a time."""
    before, program = _convolution(shape, dtype, pixels=4)
    w = layout.lay_out(program).tensors["w"]
    assert w.strides[0] == step and w.padded == before.padded and w.strides[1:] == before.strides[1:]


def test_rows_of_other_weights_lie_close() -> None:
    """Of those that are read once, or that are no constants."""
    before, program = _convolution((7, 144, 1, 1), DType.I8, pixels=1)
    assert layout.lay_out(program).tensors["w"] == before
    before, program = _convolution((7, 144, 1, 1), DType.I8, pixels=4)
    assert layout.lay_out(replace(program, constants={})).tensors["w"] == before


def _convolution(shape: tuple[int, ...], dtype: DType, pixels: int) -> tuple[Tensor, Program]:
    """Weights and a convolution by them."""
    order, pads = (0, *range(2, len(shape)), 1), tuple(n // 2 for n in shape[2:])
    image = (pixels,) * len(pads)
    x, w, y = (
        dense("x", (1, shape[1], *image), dtype, order),
        dense("w", shape, dtype, order),
        dense("y", (1, 7, *image), DType.F16),
    )
    op = Conv(nodes=("conv",), y="y", x="x", w="w", strides=(1,) * len(pads), pads=pads, dilations=(1,) * len(pads))
    return w, Program((), (), {t.name: t for t in (x, w, y)}, {"w": Literal(np.zeros(shape))}, (op,))


def test_other_forms_of_weights_are_operands_too() -> None:
    program, _ = conv(24, 24, 3)
    bytes_ = {name: replace(t, dtype=DType.E4M3) for name, t in program.tensors.items()}
    laid = layout.lay_out(replace(program, tensors=bytes_)).tensors
    (form,) = program.forms["w"]
    assert program.tensors[form.tensor].padded[1] == 24 and laid[form.tensor].padded[1] == 32


@pytest.mark.parametrize(("first", "second"), [(24, 40), (12, 20)])
def test_parts_of_bytes_feed_tensor_cores(first: int, second: int) -> None:
    """What a product reads in bytes begins and ends at multiples of 16 elements, however its parts are cut."""
    n = Net(x=(1, 16, 8, 8))

    def quantized(x: str) -> str:
        return n("DequantizeLinear", n("QuantizeLinear", x, np.float32(0.05), np.int8(0)), np.float32(0.05), np.int8(0))

    def convolved(x: str, channels: int, outputs: int) -> str:
        weights = n.rng.integers(-127, 128, (outputs, channels, 3, 3)).astype(np.int8)
        scale = np.float32(0.005 * channels**-0.5)
        return quantized(n("Relu", n("Conv", x, n("DequantizeLinear", weights, scale, np.int8(0)), pads=[1] * 4)))

    one = convolved(quantized("x"), 16, first)
    both = n("Concat", one, convolved(one, first, second), axis=1)
    model = n.out(convolved(quantized(both), first + second, 16)).model()
    plan = planned(model, ("sm_90a", "sm_80"))
    (entry,) = plan.entries
    check_program(entry.program)
    parts = [t for t in entry.program.tensors.values() if t.base is not None and t.dtype is DType.I8]
    assert len(parts) == 2 and all(t.offset % 16 == t.padded[1] % 16 == 0 for t in parts)
    for section in entry.sections:
        assert sum(step.tensor_cores for step in section.steps) == 3, section.arch
    inputs = feeds(model, 1)
    with Session(plan, device="cpu") as session:
        (got,) = session.run(None, inputs)
    (expected,) = reference(model, inputs).values()
    steps = np.abs(got - expected) / 0.05
    assert expected.any() and steps.max() < 1.5 and (steps > 0.5).mean() < 0.02  # sums that lie between two steps
