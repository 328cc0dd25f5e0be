"""Resampling against ONNX Runtime: every mode, transformation and rounding."""

from __future__ import annotations

import numpy as np
import pytest

from tccompile.ir.ops import Pointwise, Resize
from tccompile.pipeline import without_code
from tccompile.runtime.session import Session
from tests.networks import reference
from tests.ops.common import Net, agrees

MODES = ("half_pixel", "pytorch_half_pixel", "align_corners", "asymmetric", "half_pixel_symmetric")
SCALES = ((1, 1, 2, 3), (1, 1, 0.7, 1.6), (1, 1, 1, 0.25))


def scales(*values: float) -> np.ndarray:
    return np.array(values, np.float32)


@pytest.mark.parametrize("factors", SCALES)
@pytest.mark.parametrize("nearest", ["round_prefer_floor", "round_prefer_ceil", "floor", "ceil"])
@pytest.mark.parametrize("transformation", MODES)
def test_nearest(transformation: str, nearest: str, factors: tuple[float, ...]) -> None:
    net = Net(x=(1, 3, 8, 9))
    attrs = {"coordinate_transformation_mode": transformation, "nearest_mode": nearest}
    agrees(net.out(net("Resize", "x", None, scales(*factors), mode="nearest", **attrs)))


@pytest.mark.parametrize("factors", SCALES)
@pytest.mark.parametrize("mode", ["linear", "cubic"])
@pytest.mark.parametrize("transformation", MODES)
def test_interpolation(transformation: str, mode: str, factors: tuple[float, ...]) -> None:
    net = Net(x=(1, 3, 8, 9))
    y = net("Resize", "x", None, scales(*factors), mode=mode, coordinate_transformation_mode=transformation)
    agrees(net.out(y))


@pytest.mark.parametrize("mode", ["linear", "cubic"])
@pytest.mark.parametrize("size", [(1, 3, 5, 4), (1, 3, 3, 9)])
def test_antialias(mode: str, size: tuple[int, ...]) -> None:
    net = Net(x=(1, 3, 13, 9))
    agrees(net.out(net("Resize", "x", None, None, np.array(size, np.int64), mode=mode, antialias=1)))


def test_cubic_without_what_is_outside() -> None:
    net = Net(x=(1, 3, 8, 9))
    agrees(net.out(net("Resize", "x", None, scales(1, 1, 1.5, 2), mode="cubic", exclude_outside=1, cubic_coeff_a=-0.5)))


@pytest.mark.parametrize("mode", ["nearest", "linear", "cubic"])
def test_crop_with_a_value_outside(mode: str) -> None:
    net = Net(x=(1, 1, 6, 7))
    region = np.array([0, 0, -0.2, 0.1, 1, 1, 0.7, 1.3], np.float32)
    attrs = {"coordinate_transformation_mode": "tf_crop_and_resize", "extrapolation_value": 2.5}
    agrees(net.out(net("Resize", "x", region, None, np.array([1, 1, 5, 8], np.int64), mode=mode, **attrs)))


def test_a_region_that_nobody_asks_about() -> None:
    """Older exporters fill the place with what they have; only tf_crop_and_resize reads it."""
    net = Net(x=(1, 2, 4, 5))
    agrees(net.out(net("Resize", "x", scales(1, 1, 2, 2), scales(1, 1, 2, 2), mode="linear")))


@pytest.mark.parametrize("policy", ["stretch", "not_larger", "not_smaller"])
def test_sizes_of_some_axes(policy: str) -> None:
    net = Net(x=(1, 3, 8, 9))
    attrs = {"axes": [2, 3], "keep_aspect_ratio_policy": policy}
    agrees(net.out(net("Resize", "x", None, None, np.array([12, 20], np.int64), mode="linear", **attrs)))


@pytest.mark.parametrize("shape", [(2, 3, 11), (4, 6), (1, 2, 3, 4, 5)])
def test_other_ranks(shape: tuple[int, ...]) -> None:
    net = Net(x=shape)
    factors = scales(*(1, 1, 2, 1.5, 0.5)[: len(shape)]) if len(shape) > 2 else scales(2, 1.5)
    agrees(net.out(net("Resize", "x", None, factors, mode="linear")))


@pytest.mark.parametrize(("transformation", "nearest"), [("asymmetric", "floor"), ("half_pixel", "round_prefer_floor")])
def test_enlarging_by_an_integer_moves_data_only(transformation: str, nearest: str) -> None:
    net = Net(x=(1, 8, 5, 6))
    attrs = {"coordinate_transformation_mode": transformation, "nearest_mode": nearest}
    y = net("Resize", net("Relu", "x"), None, scales(1, 1, 2, 4), mode="nearest", **attrs)
    program = agrees(net.out(y))
    assert all(isinstance(op, Pointwise) for op in program.ops)


def test_a_table_for_neighbours_that_follow_no_formula() -> None:
    net = Net(x=(1, 8, 5, 9))
    y = net("Resize", "x", None, scales(1, 1, 1, 1.7), mode="nearest", nearest_mode="ceil")
    program = agrees(net.out(y))
    (op,) = (op for op in program.ops if isinstance(op, Resize))
    assert op.axes == (3,) and program.tensors[op.index[0]].shape == (15, 1)


def test_scales_of_two_axes() -> None:
    net = Net(x=(1, 2, 3, 4), opset=9)
    agrees(net.out(net("Upsample", "x", np.array([[1, 1, 2, 3]], np.float32))))


@pytest.mark.parametrize("dtype", [np.uint8, np.int8])
@pytest.mark.parametrize("shape", [(1, 3, 8, 9), (4, 6)])
def test_bytes_are_cut_off(shape: tuple[int, ...], dtype: type) -> None:
    """Not rounded, also where fp16 would move them: ONNX Runtime's quantizer leaves Resize such inputs."""
    net = Net(dtype=dtype, x=shape)
    factors = scales(*(1, 1)[: len(shape) - 2], 2, 4)
    model = net.out(net("Resize", "x", None, factors, mode="linear")).model()
    bits = np.iinfo(dtype)
    x = np.random.default_rng(1).integers(bits.min, bits.max + 1, shape).astype(dtype)
    agrees(model, {"x": x}, 0)
    with Session(without_code(model), "cpu") as session:
        assert np.array_equal(session.run(None, {"x": x})[0], reference(model, {"x": x})["t0"])
