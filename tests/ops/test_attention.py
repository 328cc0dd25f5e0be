"""Attention against ONNX Runtime."""

from __future__ import annotations

import numpy as np
import pytest

from tccompile.ir.ops import Attention, Gemm
from tccompile.ir.reference import evaluate
from tccompile.load.model import load, sources
from tccompile.lower.graph import lower
from tests.networks import feeds
from tests.ops.common import Net, agrees

B, H, M, N, D, E = 2, 4, 5, 7, 12, 6


@pytest.mark.parametrize("causal", [0, 1])
@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize("mask", [None, (M, N), (1, M, N), (B, 1, M, N), (B, H, M, N)])
def test_four_axes(causal: int, groups: int, mask: tuple[int, ...] | None) -> None:
    shapes = {"q": (B, H, M, D), "k": (B, groups, N, D), "v": (B, groups, N, E)}
    net = Net(**shapes, **({"mask": mask} if mask else {}))
    agrees(net.out(net("Attention", "q", "k", "v", *(["mask"] if mask else []), is_causal=causal, scale=0.3)))


@pytest.mark.parametrize("groups", [1, 4])
def test_three_axes(groups: int) -> None:
    net = Net(q=(B, M, H * D), k=(B, N, groups * D), v=(B, N, groups * E))
    agrees(net.out(net("Attention", "q", "k", "v", q_num_heads=H, kv_num_heads=groups)))


def test_mask_of_bool() -> None:
    net = Net(q=(B, H, M, D), k=(B, H, N, D), v=(B, H, N, D), x=(B, 1, M, N))
    seen = net("Or", net("Greater", "x", np.float32(0)), np.arange(N) == 2)
    agrees(net.out(net("Attention", "q", "k", "v", seen)))


@pytest.mark.parametrize("causal", [0, 1])
def test_keys_and_values_from_before(causal: int) -> None:
    net = Net(q=(B, H, M, D), k=(B, H, M, D), v=(B, H, M, E), pk=(B, H, 3, D), pv=(B, H, 3, E))
    agrees(net.out(*net("Attention", "q", "k", "v", None, "pk", "pv", outputs=3, is_causal=causal)))


@pytest.mark.parametrize("how", [{"softcap": 1.5}, {"is_causal": 1}, {}])
@pytest.mark.parametrize("size", [D, 264])
def test_in_parts(how: dict, size: int) -> None:
    net = Net(q=(1, H, M, size), k=(1, 2, N, size), v=(1, 2, N, size), mask=(1, 1, M, N))
    program = agrees(net.out(net("Attention", "q", "k", "v", "mask", **how)))
    apart = size > 256 or "softcap" in how
    assert sum(isinstance(op, Gemm) for op in program.ops) == 2 * apart
    assert sum(isinstance(op, Attention) for op in program.ops) == (not apart)


@pytest.mark.parametrize("size", [8, 264])
def test_rows_that_see_nothing_are_zero(size: int) -> None:
    net = Net(q=(1, 2, M, size), k=(1, 2, N, size), v=(1, 2, N, 8))
    seen = np.ones((M, N), bool)
    seen[3] = False
    model = net.out(net("Attention", "q", "k", "v", seen)).model()
    (y,) = evaluate(lower(load(model)), feeds(model, 0), sources(model)).values()
    assert np.isfinite(y).all() and not y[:, :, 3].any() and y[:, :, 2].any()
