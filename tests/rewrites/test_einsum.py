from __future__ import annotations

import numpy as np
import pytest

from tccompile.load.constants import Weight
from tccompile.load.model import load
from tccompile.rewrites import rewrite
from tests.rewrites.common import Net, check_recipes, check_same

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


@pytest.mark.parametrize(
    ("equation", "shapes"),
    [
        ("bc,cd,dk->bk", [(2, 3), (3, 6), (6, 7)]),
        ("bi,oij,bj->bo", [(2, 3), (4, 3, 5), (2, 5)]),
        ("bhid,bhjd,bhje,b->bhie", [(2, 3, 4, 5), (2, 3, 6, 5), (2, 3, 6, 7), (2,)]),
        ("i,j,k->kij", [(2,), (3,), (4,)]),
        ("...i,...j,ijk", [(2, 3), (2, 4), (3, 4, 5)]),
        ("bc,bc->bc", [(2, 3), (1, 3)]),
        ("bc,bc->b", [(2, 1), (2, 3)]),
        ("...ij,...jk->...ik", [(2, 1, 3, 4), (1, 5, 4, 6)]),
        ("bc,bc->", [(1, 3), (2, 1)]),
        ("bb->b", [(3, 3)]),
        ("ii", [(3, 3)]),
        ("ibic,c->cbi", [(3, 2, 3, 4), (4,)]),
        ("iiij,j->i", [(3, 3, 3, 2), (2,)]),
        ("...ii->...i", [(2, 3, 3)]),
        ("bii,i->b", [(0, 3, 3), (3,)]),
    ],
)
def test_others_are_made_products_of_two(equation, shapes):
    net = Net(**{f"x{i}": shape for i, shape in enumerate(shapes)})
    model = net.out(net("Einsum", *(f"x{i}" for i in range(len(shapes))), equation=equation)).model()
    graph = rewrite(load(model))
    assert "Einsum" not in {n.op for n in graph.nodes}
    check_same(graph, model, 3e-6)


def test_a_diagonal_takes_no_infinity_from_beside_it():
    net = Net(x=(3, 3))
    model = net.out(net("Einsum", "x", equation="ii->i")).model()
    x = np.full((3, 3), np.inf, np.float32)
    np.fill_diagonal(x, [1, 2, 3])
    check_same(rewrite(load(model)), model, 0, x=x)


def test_the_smallest_product_comes_first():
    net = Net(x=(2, 50), y=(50, 40), z=(40, 3))
    graph = rewrite(load(net.out(net("Einsum", "x", "y", "z", equation="ab,bc,cd->ad")).model()))
    assert [tuple(n.outputs[0].shape) for n in graph.nodes if n.op == "MatMul"] == [(2, 40), (2, 3)]


def test_an_extent_that_was_inferred_wrong_stays():
    net = Net(x=(1, 3), y=(2, 3))
    model = net.out(net("Einsum", "x", "y", equation="bc,bc->bc")).model()
    assert [n.op for n in rewrite(load(model)).nodes] == ["Einsum"]


def test_of_integers_it_stays():
    net = Net(dtype=np.int64, x=(2, 3), y=(3, 4))
    model = net.out(net("Einsum", "x", "y", equation="ij,jk->ik")).model()
    assert [n.op for n in rewrite(load(model)).nodes] == ["Einsum"]


def test_weights_are_constants_in_the_order_that_products_read() -> None:
    """As those of attention's heads: such a product is one by constant weights."""
    net = Net(x=(2, 6, 32))
    h = net("Einsum", "x", net.normal(32, 4, 16), equation="bsd,dhe->bshe")
    model = net.out(net("Einsum", h, net.normal(16, 4, 24), equation="bshe,ehd->bsd")).model()
    graph = rewrite(load(model))
    products = [n for n in graph.nodes if n.op == "MatMul"]
    assert [list(n.inputs[1].shape) for n in products] == [[32, 64], [64, 24]]
    assert all(isinstance(n.inputs[1], Weight) for n in products) and len(graph.nodes) == 4
    check_recipes(graph, model)
    check_same(graph, model, 3e-6)
