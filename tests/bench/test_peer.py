"""The peer computes the same network: PyTorch's functions against ONNX Runtime. Skipped without PyTorch."""

from __future__ import annotations

import pytest

from tests.bench.networks import variant
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
