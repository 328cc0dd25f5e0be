from __future__ import annotations

import numpy as np
import pytest

from tests.rewrites.common import Net, check

f, i = np.float32, np.array


def _halves(net: Net, x: str, how: str, at: int = 4):
    if how == "split":
        return net("Split", x, i([at, 8 - at]), outputs=2, axis=-1)
    end = 2**62 if how == "slice" else 8
    return net("Slice", x, i([0]), i([at]), i([3]), i([1])), net("Slice", x, i([at - 8]), i([end]), i([-1]))


@pytest.mark.parametrize("how", ["split", "slice", "slice to the end"])
def test_halves_are_rotated(how):
    net = Net(x=(2, 3, 5, 8))
    first, second = _halves(net, "x", how)
    rotated = net("Concat", net("Neg", second), first, axis=-1)
    y = net("Add", net("Mul", "x", net.normal(5, 8)), net("Mul", rotated, net.normal(5, 8)))
    graph = check(net.out(y), {"Gather": 1, "Mul": 2, "Add": 1})
    assert len(graph.nodes) == 4


@pytest.mark.parametrize("case", ["not halves", "swapped", "both negative", "other x"])
def test_near_misses(case):
    net = Net(x=(2, 3, 5, 8))
    first, second = _halves(net, "x", "split", 3 if case == "not halves" else 4)
    left = {"Split": 1, "Neg": 1, "Concat": 1}
    if case == "swapped":
        first, second = second, first
    if case == "other x":
        first, left = _halves(net, net("Sin", "x"), "split")[0], left | {"Split": 2, "Sin": 1}
    if case == "both negative":
        first, left = net("Neg", first), left | {"Neg": 2}
    check(net.out(net("Concat", net("Neg", second), first, axis=-1)), left)
