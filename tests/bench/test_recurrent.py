"""The benchmark of recurrent layers: DeepBench's lists, and models that are what ONNX Runtime takes them for."""

from __future__ import annotations

import numpy as np
import pytest

from tccompile.ir.ops.rnn import GATES
from tests.bench.recurrent import OPS, ORDER, QUICK, Layer, layers
from tests.networks import reference


def test_lists() -> None:
    every, quick = list(layers(False)), list(layers(True))
    assert {name for name, _ in every} == {"inference", "inference device", "training"} and len(every) > 100
    assert len(every) / QUICK <= len(quick) <= len(every) / QUICK + 3 and set(quick) <= set(every)
    assert {layer.cell for _, layer in every} == set(OPS)


@pytest.mark.parametrize("cell", OPS)
def test_models(cell: str) -> None:
    """States neither vanish nor saturate; PyTorch's gates are all of ONNX's, each once."""
    layer = Layer(cell, 24, 3, 40)
    x = np.random.default_rng(0).standard_normal((40, 3, 24)).astype(np.float32)
    model = layer.model()
    for tensor in (*model.graph.input, *model.graph.output):
        tensor.type.tensor_type.elem_type = 1
    for weight in model.graph.initializer:
        values = np.frombuffer(weight.raw_data, np.float16).astype(np.float32)
        weight.data_type, weight.raw_data = 1, values.tobytes()
    (y,) = reference(model, {"x": x}).values()
    assert y.shape == (40, 1, 3, 24) and 0.05 < np.abs(y[-1]).mean() < 0.8
    assert sorted(ORDER[OPS[cell].lower()]) == list(range(GATES[OPS[cell].lower()])) and layer.flop > 0
