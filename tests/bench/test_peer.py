"""ONNX Runtime in fp16 computes the same network. Whether PyTorch does, each benchmark with it finds out: `peer.check_same`."""

from __future__ import annotations

import numpy as np
import pytest

from tests.bench.networks import variant
from tests.bench.onnxruntime_peer import measure_onnxruntime
from tests.networks import feeds, reference, relative_error
from tests.tiers import thorough


@thorough
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
