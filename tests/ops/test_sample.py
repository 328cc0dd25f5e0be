"""Ops that read at computed places, against ONNX Runtime."""

from __future__ import annotations

import numpy as np
import pytest

from tests.ops.common import Net, agrees

INT = np.int64


@pytest.mark.parametrize("align_corners", [0, 1])
@pytest.mark.parametrize("padding_mode", ["zeros", "border", "reflection"])
@pytest.mark.parametrize("mode", ["linear", "nearest", "cubic"])
def test_grid_sample(mode: str, padding_mode: str, align_corners: int) -> None:
    """Places up to half an image beyond the edges, of an image that lies with its channels innermost."""
    grid = np.random.default_rng(0).uniform(-2, 2, (2, 5, 4, 2)).astype(np.float32)
    net = Net(x=(2, 3, 6, 7), g=grid.shape)
    image = net("Conv", "x", net.normal(3, 3, 1, 1))
    y = net("GridSample", image, "g", mode=mode, padding_mode=padding_mode, align_corners=align_corners)
    agrees(net.out(net("Relu", y)), {"g": grid})


def test_grid_sample_of_a_volume() -> None:
    grid = np.random.default_rng(0).uniform(-1.3, 1.3, (1, 2, 3, 4, 3)).astype(np.float32)
    net = Net(x=(1, 2, 4, 5, 6), g=grid.shape)
    agrees(net.out(net("GridSample", "x", "g", mode="linear")), {"g": grid})


@pytest.mark.parametrize(("how", "points"), [("half_pixel", 2), ("output_half_pixel", 1), ("output_half_pixel", 3)])
@pytest.mark.parametrize("mode", ["avg", "max"])
def test_roi_align(mode: str, how: str, points: int) -> None:
    rois = np.array([[0, 0, 9, 9], [-3, 2.5, 6, 12], [4, 4, 4.5, 5], [1, -8, 13, -2]], np.float32)
    net = Net(opset=16, x=(2, 5, 10, 11), rois=rois.shape)
    batch = np.array([0, 1, 1, 0])
    attrs = {"output_height": 3, "output_width": 2, "sampling_ratio": points, "spatial_scale": 0.8}
    y = net("RoiAlign", "x", "rois", batch, mode=mode, coordinate_transformation_mode=how, **attrs)
    agrees(net.out(y), {"rois": rois})


@pytest.mark.parametrize(
    "attrs", [{}, {"strides": [2, 3]}, {"dilations": [2, 1]}, {"pads": [1, 0, 2, 1], "strides": [1, 2], "dilations": [1, 2]}]
)
def test_col2im(attrs: dict) -> None:
    extents, block = (9, 10), (4, 3)
    strides, dilations = attrs.get("strides", [1, 1]), attrs.get("dilations", [1, 1])
    pads = attrs.get("pads", [0] * 4)
    count = [(extents[a] + pads[a] + pads[2 + a] - dilations[a] * (block[a] - 1) - 1) // strides[a] + 1 for a in range(2)]
    net = Net(x=(2, 3 * 12, count[0] * count[1]))
    agrees(net.out(net("Relu", net("Col2Im", "x", np.array(extents), np.array(block), **attrs))))


def test_affine_grid_and_what_samples_it() -> None:
    theta = np.random.default_rng(0).standard_normal((2, 2, 3)).astype(np.float32) / 2
    for corners in (0, 1):
        net = Net(x=(2, 3, 5, 6), theta=theta.shape)
        grid = net("AffineGrid", "theta", np.array([2, 3, 4, 7]), align_corners=corners)
        agrees(net.out(net("GridSample", "x", grid, align_corners=corners), grid), {"theta": theta})


@pytest.mark.parametrize(("batch", "time"), [(1, 0), (0, 1)])
def test_reverse_sequence(batch: int, time: int) -> None:
    lengths = np.array([3, 1, 7, 5])
    shape = (7, 4, 3) if time == 0 else (4, 7, 3)
    net = Net(x=shape, n=(INT, (4,)))
    agrees(net.out(net("ReverseSequence", net("Relu", "x"), "n", batch_axis=batch, time_axis=time)), {"n": lengths})


def test_one_hot_hardmax_and_norms() -> None:
    index = np.array([[1, -2, 0], [9, 3, -10]])
    net = Net(i=(INT, (2, 3)), x=(4, 6, 5))
    hot = net("OneHot", "i", np.array([10]), np.array([-1.0, 3.0], np.float32), axis=1)
    norms = [net("LpNormalization", "x", axis=axis, p=p) for axis in (0, 2) for p in (1, 2)]
    agrees(net.out(hot, net("Hardmax", "x", axis=1), *norms), {"i": index})


@pytest.mark.parametrize("p", [1, 2])
def test_norms_of_a_constant(p: int) -> None:
    net = Net(x=(2, 5))
    agrees(net.out(net("Mul", "x", net("LpNormalization", net.normal(2, 5), p=p))))


def test_compress_by_a_constant() -> None:
    net = Net(x=(4, 6, 5))
    keep = np.array([True, False, True, True])
    agrees(net.out(net("Compress", "x", keep, axis=0), net("Compress", "x", keep), net("Compress", "x", keep, axis=-1)))


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(
    "attrs",
    [
        {"pads": [1, 1, 1, 1]},
        {"group": 2, "strides": [2, 1], "pads": [0, 1, 2, 0], "dilations": [1, 2]},
        {"offset_group": 2, "group": 4},
    ],
)
def test_deformable_convolution(attrs: dict, masked: bool) -> None:
    """Offsets of up to some pixels, beyond the edges too."""
    pads, strides, dilations = attrs.get("pads", [0] * 4), attrs.get("strides", [1, 1]), attrs.get("dilations", [1, 1])
    out = [
        (n + pads[a] + pads[a + 2] - dilations[a] * (k - 1) - 1) // strides[a] + 1 for a, (n, k) in enumerate(((9, 3), (8, 2)))
    ]
    moved = attrs.get("offset_group", 1) * 6
    net = Net(opset=19, x=(2, 8, 9, 8), d=(2, 2 * moved, *out), m=(2, moved, *out))
    w, bias = net.normal(12, 8 // attrs.get("group", 1), 3, 2), net.normal(12)
    y = net("DeformConv", net("Relu", "x"), w, "d", bias, *(["m"] if masked else []), kernel_shape=[3, 2], **attrs)
    agrees(net.out(net("Relu", y)))
