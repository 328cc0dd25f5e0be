"""Cumulative ops, TopK and scatters, against ONNX Runtime."""

from __future__ import annotations

import numpy as np
import pytest

from tccompile.fuse import fuse
from tccompile.ir.ops import Scatter
from tccompile.ir.verify import verify
from tests.ops.common import Net, agrees

INT = np.int64


@pytest.mark.parametrize("flags", [{}, {"exclusive": 1}, {"reverse": 1}, {"exclusive": 1, "reverse": 1}])
@pytest.mark.parametrize("axis", [1, -1])
def test_cumsum(axis: int, flags: dict) -> None:
    net = Net(x=(2, 8, 3, 5))
    image = net("Conv", "x", net.normal(8, 8, 1, 1))
    agrees(net.out(net("Relu", net("CumSum", image, np.array(axis, INT), **flags))))


@pytest.mark.parametrize("largest", [0, 1])
@pytest.mark.parametrize(("axis", "k"), [(1, 3), (-1, 5), (0, 1)])
def test_top_k(axis: int, k: int, largest: int) -> None:
    net = Net(x=(2, 8, 3, 5))
    image = net("Conv", "x", net.normal(8, 8, 1, 1))
    values, places = net("TopK", image, np.array([k], INT), outputs=2, axis=axis, largest=largest)
    agrees(net.out(net("Mul", values, np.float32(2)), net("Add", places, np.array(1, INT))))


@pytest.mark.parametrize("known", [False, True])
@pytest.mark.parametrize("reduction", ["none", "add", "mul", "max", "min"])
def test_scatter_elements(reduction: str, known: bool) -> None:
    rng = np.random.default_rng(0)
    rows = np.stack([rng.permutation(9)[:4] for _ in range(30)], 1).reshape(4, 5, 6) - 9  # no duplicates: their order is free
    if reduction != "none":
        rows = rng.integers(-9, 9, rows.shape)
    net = Net(x=(9, 8, 6), i=(INT, rows.shape), u=rows.shape)
    y = net("ScatterElements", net("Relu", "x"), rows if known else "i", net("Neg", "u"), axis=0, reduction=reduction)
    program = agrees(net.out(net("Relu", y)), {"i": rows})
    assert sum(isinstance(op, Scatter) for op in program.ops) == 1
    fused = fuse(program)
    verify(fused)
    assert sum(isinstance(op, Scatter) for op in fused.ops) == 1


@pytest.mark.parametrize("reduction", ["none", "add", "max"])
@pytest.mark.parametrize("k", [1, 2, 3])
def test_scatter_rows(k: int, reduction: str) -> None:
    rng = np.random.default_rng(k)
    shape = (7, 4, 5)
    rows = np.stack([a.reshape(-1) for a in np.indices(shape[:k])], 1)
    rows = rows[rng.permutation(len(rows))[:6]].reshape(2, 3, k)
    net = Net(x=shape, i=(INT, rows.shape), u=(2, 3, *shape[k:]))
    agrees(net.out(net("ScatterND", "x", "i", "u", reduction=reduction)), {"i": rows})


def test_a_scatter_of_booleans_and_one_of_nothing() -> None:
    net = Net(x=(bool, (5, 3)), i=(INT, (2, 3)), u=(bool, (2, 3)))
    agrees(net.out(net("ScatterElements", "x", "i", "u", axis=0)), {"i": np.array([[0, 1, 2], [4, 3, 0]])})
    net = Net(x=(5, 3))
    agrees(net.out(net("ScatterND", "x", np.zeros((0, 1), INT), np.zeros((0, 3), np.float32))))
