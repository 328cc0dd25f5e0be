from __future__ import annotations

import pytest

from tccompile.load import load
from tccompile.rewrites import rewrite
from tests.rewrites.common import Net, check_same

EXTENTS = {"b": 2, "c": 3, "h": 4, "w": 5, "d": 6, "k": 7}


def _net(equation: str) -> Net:
    terms = equation.replace(" ", "").split("->")[0].split(",")
    net = Net(**{f"x{i}": [EXTENTS[c] for c in letters] for i, letters in enumerate(terms)})
    return net.out(net("Einsum", *(f"x{i}" for i in range(len(terms))), equation=equation))


@pytest.mark.parametrize(
    "equation",
    ["bchw, bc -> bhw", "bhd,bkd->bhk", "bchw,kc->bkhw", "bc,bd->bcd", "bchw->bwc", "hk,kd", "bhw,bhw->", "bdhc,bkhc->bhdk",
     "bc,bchw->cbhw", "bhw,bhw->bhw", "bck,dh->bh"],
)  # fmt: skip
def test_is_a_product_of_matrices(equation):
    model = _net(equation).model()
    graph = rewrite(load(model))
    assert "Einsum" not in {n.op for n in graph.nodes}
    check_same(graph, model, 3e-6)


@pytest.mark.parametrize("equation", ["...c,cd->...d", "...hd,...kd->...hk", "b...,b...->...b", "...dw->w...d"])
def test_an_ellipsis_stands_for_the_axes_left(equation):
    shapes = {"...c,cd->...d": [(2, 5, 3), (3, 6)], "...hd,...kd->...hk": [(2, 3, 4, 6), (2, 3, 7, 6)],
              "b...,b...->...b": [(2, 3, 4), (2, 3, 4)], "...dw->w...d": [(2, 3, 6, 5)]}[equation]  # fmt: skip
    net = Net(**{f"x{i}": shape for i, shape in enumerate(shapes)})
    model = net.out(net("Einsum", *(f"x{i}" for i in range(len(shapes))), equation=equation)).model()
    graph = rewrite(load(model))
    assert "Einsum" not in {n.op for n in graph.nodes}
    check_same(graph, model, 3e-6)


@pytest.mark.parametrize("shapes", [[(2, 3), (3, 6), (6, 7)], [(1, 3), (2, 3)], [(3, 3)]], ids=["three", "broadcast", "diagonal"])
def test_others_stay(shapes):
    equation = {3: "bc,cd,dk->bk", 2: "bc,bc->bc", 1: "bb->b"}[len(shapes)]
    net = Net(**{f"x{i}": shape for i, shape in enumerate(shapes)})
    model = net.out(net("Einsum", *(f"x{i}" for i in range(len(shapes))), equation=equation)).model()
    assert [n.op for n in rewrite(load(model)).nodes] == ["Einsum"]
