"""The peers compute the same network: PyTorch's functions (skipped without PyTorch), and ONNX Runtime in fp16."""

from __future__ import annotations

import numpy as np
import pytest

from tests.bench.networks import variant
from tests.bench.onnxruntime_peer import measure_onnxruntime
from tests.networks import feeds, reference, relative_error


@pytest.mark.parametrize(
    "name", ["googlenet", "densenet121", "mobilenet_v2", "efficientnet_b0", "unet_denoise", "espcn_x3", "bert_base"]
)
def test_the_same_network(name):
    torch = pytest.importorskip("torch")
    from tests.bench.peer import module

    model, shapes = variant(name)
    inputs = feeds(model, 0, shapes)
    with torch.no_grad():
        got = module(model, shapes)(*map(torch.from_numpy, inputs.values()))
    for y, ref in zip(got, reference(model, inputs).values(), strict=True):
        assert relative_error(y.numpy(), ref) < 1e-5


@pytest.mark.parametrize("name", ["resnet18", "lstm_lm"])
def test_onnxruntime_in_half(name):
    model, shapes = variant(name)
    inputs = feeds(model, 0, shapes)
    expected = reference(model, inputs)
    ms, got = measure_onnxruntime(model, inputs, expected, "CPUExecutionProvider", "cpu", calls=2)
    assert ms > 0 and got.keys() == expected.keys()
    for y in expected:
        assert got[y].dtype == np.float16
        assert 0 < relative_error(got[y], expected[y]) < 1e-2
