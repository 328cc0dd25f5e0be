"""Models as other exporters, tools and opsets write them: through every stage but machine code, beside ONNX Runtime."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from tccompile.program import Program
from tccompile.runtime.session import Session
from tests.networks import feeds, reference, relative_error
from tests.plans import without_code
from tests.rewrites.common import Net

FLOAT = TensorProto.FLOAT


def agrees(model: onnx.ModelProto, shapes: Mapping[str, tuple[int, ...]] | None = None, fp16: float = 3e-3) -> Program:
    """Hold the CPU engine to ONNX Runtime in both precisions; the fused program, for a look at how it is done."""
    given = feeds(model, 1, shapes)
    expected = reference(model, given)
    for precision, bound in (("fp32", 1e-5), ("fp16", fp16)):
        plan = without_code(model, ("sm_80",), shapes, precision)
        with Session(plan, device="cpu") as session:
            got = session.run(list(expected), given)
        for out, (name, ref) in zip(got, expected.items(), strict=True):
            assert out.dtype == ref.dtype, name
            error = relative_error(out, ref)
            assert error <= bound, f"{name} in {precision}: {error:.1e}"
    return plan.entries[0].program


def ops(program: Program) -> Counter:
    return Counter(type(op).__name__ for op in program.ops)


# --- Old opsets, and what models leave behind that were exported while they were being trained -------------------------


@pytest.mark.parametrize(("opset", "outputs"), [(9, 5), (13, 5), (14, 3)])
def test_a_batch_norm_in_training_mode_uses_the_statistics_of_its_input(opset, outputs):
    net = Net(opset=opset, x=(3, 6, 5, 4))
    args = net.normal(6), net.normal(6), net.normal(6), net.positive(6)
    attrs = {"training_mode": 1} if opset >= 14 else {}
    y, *_ = net("BatchNormalization", net("Conv", "x", net.normal(6, 6, 1, 1)), *args, outputs=outputs, **attrs)
    agrees(net.out(net("Relu", y)).model())


def test_an_upsampled_extent_is_rounded_as_the_exporter_expects():
    """9 * (129 / 9) is 129 in float32, and 128.999997 before rounding."""
    net = Net(opset=9, x=(1, 8, 9, 9))
    scales = np.array([1, 1, 129, 129], np.float32) / np.array([1, 1, 9, 9], np.float32)
    program = agrees(net.out(net("Upsample", net("Conv", "x", net.normal(8, 8, 1, 1)), scales, mode="linear")).model())
    assert program.tensors[program.outputs[0]].shape == (1, 8, 129, 129)


# --- Sequences --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [np.int64(5), np.array([3, 7, 6]), None], ids=["size", "sizes", "ones"])
def test_a_split_into_a_sequence_is_a_split(size):
    net = Net(opset=18, x=(2, 16, 4, 4))
    conv = net("Conv", "x", net.normal(16, 16, 1, 1))
    parts = net("SplitToSequence", conv, *(() if size is None else (size,)), axis=1)
    first, last = net("SequenceAt", parts, np.int64(0)), net("SequenceAt", parts, np.int64(-1))
    agrees(net.out(net("Concat", net("Relu", last), first, axis=1)).model())


@pytest.mark.parametrize("new_axis", [0, 1])
def test_a_sequence_that_is_put_together_is_a_concatenation(new_axis):
    net = Net(opset=17, x=(2, 8, 4, 4))
    y = net("Relu", "x")
    parts = net("SequenceInsert", net("SequenceConstruct", "x", y), net("Sigmoid", "x"), np.int64(1))
    parts = net("SequenceInsert", parts, y)
    count = net("Cast", net("SequenceLength", parts), to=FLOAT)
    agrees(net.out(net("Mul", net("ConcatFromSequence", parts, axis=1, new_axis=new_axis), count)).model())
