"""Fourier transforms against NumPy: ONNX Runtime's own lose digits."""

from __future__ import annotations

import numpy as np
import pytest

from tccompile.ir.ops import Gemm
from tccompile.ir.reference import evaluate
from tccompile.ir.verify import verify
from tccompile.load.model import load, sources
from tccompile.lower.graph import lower
from tests.networks import relative_error
from tests.ops.common import Net


def run(net: Net, y: str, inputs: dict[str, np.ndarray]) -> np.ndarray:
    model = net.out(y).model()
    program = lower(load(model))
    verify(program)
    assert sum(isinstance(op, Gemm) for op in program.ops) == 1
    return evaluate(program, inputs, sources(model))[y]


def parts(z: np.ndarray) -> np.ndarray:
    return np.stack([z.real, z.imag], -1)


@pytest.mark.parametrize("length", [None, 7, 13])
@pytest.mark.parametrize("inverse", [0, 1])
@pytest.mark.parametrize("axis", [1, -2])
def test_dft(axis: int, inverse: int, length: int | None) -> None:
    x = np.random.default_rng(0).standard_normal((2, 10, 9, 2)).astype(np.float32)
    net = Net(x=x.shape)
    size = None if length is None else np.array(length)
    out = run(net, net("DFT", "x", size, np.array(axis), inverse=inverse), {"x": x})
    z = x[..., 0] + 1j * x[..., 1]
    expected = (np.fft.ifft if inverse else np.fft.fft)(z, length, axis if axis > 0 else axis + 1)
    assert relative_error(out, parts(expected)) < 1e-6


@pytest.mark.parametrize("n", [8, 9])
def test_one_side_there_and_back(n: int) -> None:
    x = np.random.default_rng(0).standard_normal((3, n, 1)).astype(np.float32)
    net = Net(x=x.shape)
    out = run(net, net("DFT", "x", None, np.array(1), onesided=1), {"x": x})
    assert relative_error(out, parts(np.fft.rfft(x[..., 0], axis=1))) < 1e-6
    net = Net(opset=20, x=out.shape)
    back = run(net, net("DFT", "x", np.array(n), np.array(1), inverse=1, onesided=1), {"x": out})
    assert relative_error(back, x) < 1e-6


@pytest.mark.parametrize("onesided", [0, 1])
@pytest.mark.parametrize("windowed", [False, True])
def test_stft(windowed: bool, onesided: int) -> None:
    x = np.random.default_rng(0).standard_normal((2, 50, 1)).astype(np.float32)
    window = np.hanning(16).astype(np.float32) if windowed else np.ones(16, np.float32)
    net = Net(x=x.shape)
    y = net("STFT", "x", np.array(6), window if windowed else None, None if windowed else np.array(16), onesided=onesided)
    frames = np.stack([x[:, i : i + 16, 0] * window for i in range(0, 35, 6)], 1)
    expected = (np.fft.rfft if onesided else np.fft.fft)(frames, axis=2)
    assert relative_error(run(net, y, {"x": x}), parts(expected)) < 1e-6
