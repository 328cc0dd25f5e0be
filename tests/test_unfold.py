"""Convolutions with few channels, taps made channels: the values stay those of ONNX Runtime, near-misses stay as they are."""

from __future__ import annotations

import numpy as np
import pytest

from tccompile.ir.ops import Conv
from tccompile.ir.program import Program
from tests.test_fuse import fused, model, ops, weight


def convs(program: Program) -> list[tuple[int, ...]]:
    """The weights' shapes of the program's convolutions."""
    return [program.tensors[op.w].shape for op in program.ops if isinstance(op, Conv)]


@pytest.mark.parametrize("channels", [1, 3, 4])
@pytest.mark.parametrize(
    ("kernel", "strides", "pads", "dilations"),
    [
        ((4, 4), (4, 4), (0, 0, 0, 0), (1, 1)),
        ((3, 3), (3, 3), (1, 1, 1, 1), (1, 1)),
        ((5, 3), (1, 4), (0, 2, 1, 0), (1, 1)),
        ((5, 3), (3, 3), (2, 1, 0, 1), (1, 2)),
        ((2, 4), (3, 5), (1, 0, 0, 3), (2, 3)),
        ((1, 150), (1, 4), (0, 90, 0, 90), (1, 1)),
    ],
)
def test_taps_of_windows_apart_become_input_channels(channels, kernel, strides, pads, dilations):
    attributes = {"strides": strides, "pads": pads, "dilations": dilations}
    nodes = [("Conv", "x w b", "c", attributes), ("Relu", "c", "y", {})]
    program = fused(model(nodes, {"x": (2, channels, 17, 19)}, {"w": weight(6, channels, *kernel), "b": weight(6)}))
    together = strides[0] if strides[0] <= kernel[0] and dilations[0] == 1 else 1
    assert convs(program) == [(6, together * kernel[1] * channels, -(-kernel[0] // together), 1)]
    assert ops(program) == {"Pointwise": 1, "Conv": 1}


@pytest.mark.parametrize(
    ("kernel", "stride", "size", "stays"),
    [((3, 3), 1, 19, True), ((5, 5), 4, 19, True), ((7, 7), 2, 19, True), ((7, 20), 1, 140, False), ((7, 20), 1, 30, False)],
)
def test_windows_that_overlap_stay_unless_they_have_many_taps(kernel, stride, size, stays):
    nodes = [("Conv", "x w", "y", {"strides": [stride, stride], "pads": [2, 2, 2, 2]})]
    program = fused(model(nodes, {"x": (1, 3, size, size)}, {"w": weight(2, 3, *kernel)}))
    assert (convs(program) == [(2, 3, *kernel)]) == stays


def test_taps_of_a_1d_convolution_become_input_channels():
    nodes = [("Conv", "x w", "y", {"strides": [10], "pads": [4, 3], "dilations": [2]})]
    program = fused(model(nodes, {"x": (2, 2, 50)}, {"w": weight(40, 2, 9)}))
    assert convs(program) == [(40, 18, 1)]


@pytest.mark.parametrize(("channels", "taps", "group"), [(5, 3, 1), (3, 2, 1), (4, 3, 2)])
def test_enough_channels_too_few_taps_or_groups_stay(channels, taps, group):
    w = weight(8, channels // group, 3, taps)
    nodes = [("Conv", "x w", "y", {"group": group, "strides": [1, 4]})]
    program = fused(model(nodes, {"x": (1, channels, 9, 9)}, {"w": w}))
    assert convs(program) == [w.shape]


@pytest.mark.parametrize(
    ("kernel", "strides", "pads", "dilations"),
    [
        ((9, 9), (1, 1), (0, 0, 0, 0), (1, 1)),
        ((5, 3), (1, 2), (2, 1, 1, 0), (1, 1)),
        ((5, 5), (1, 1), (6, 4, 6, 4), (3, 2)),
    ],
)
def test_filter_rows_become_output_channels(kernel, strides, pads, dilations):
    attributes = {"strides": strides, "pads": pads, "dilations": dilations}
    nodes = [("Conv", "x w b", "c", attributes), ("Add", "c r", "s", {}), ("Tanh", "s", "y", {})]
    width = (260 + pads[1] + pads[3] - dilations[1] * (kernel[1] - 1) - 1) // strides[1] + 1
    height = 140 + pads[0] + pads[2] - dilations[0] * (kernel[0] - 1)
    inputs = {"x": (1, 8, 140, 260), "r": (1, 3, height, width)}
    program = fused(model(nodes, inputs, {"w": weight(3, 8, *kernel), "b": weight(3)}))
    assert convs(program) == [(3 * kernel[0], 8, 1, kernel[1])]


@pytest.mark.parametrize("channels", [8, 16])
def test_filter_rows_of_integers_stay(channels):
    """Where channels are too few for integers they are multiplied as floats, whose results are rounded."""
    w = np.random.default_rng(0).integers(-127, 128, (3, channels, 5, 3)).astype(np.int8)
    nodes = [
        ("QuantizeLinear", "x s z", "q", {}),
        ("ConvInteger", "q w z", "c", {"pads": [2, 1, 2, 1]}),
        ("Cast", "c", "y", {"to": 1}),
    ]
    scale = {"s": np.array(0.02, np.float32), "z": np.array(0, np.int8)}
    program = fused(model(nodes, {"x": (1, channels, 130, 130)}, {"w": w, **scale}))
    assert convs(program) == [(15, 8, 1, 3) if channels == 8 else (3, 16, 5, 3)]
    assert ops(program) == {"Pointwise": 2 if channels == 8 else 1, "Conv": 1}


@pytest.mark.parametrize(("outputs", "rows", "stride", "size"), [(5, 5, 1, 140), (3, 3, 1, 140), (3, 5, 2, 300), (3, 5, 1, 60)])
def test_enough_outputs_few_rows_strides_or_small_images_stay(outputs, rows, stride, size):
    w = weight(outputs, 8, rows, 5)
    program = fused(model([("Conv", "x w", "y", {"strides": [stride, 1]})], {"x": (1, 8, size, 140)}, {"w": w}))
    assert convs(program) == [w.shape]


def test_a_convolution_with_few_inputs_and_few_outputs():
    nodes = [("Conv", "x w", "y", {"pads": [2, 2, 2, 2]})]
    program = fused(model(nodes, {"x": (1, 1, 140, 140)}, {"w": weight(1, 1, 5, 5)}))
    assert np.prod(convs(program)[0]) >= 25
