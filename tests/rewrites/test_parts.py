"""part(f(x)) => f(part(x))."""

from __future__ import annotations

import numpy as np
import pytest

from tests.rewrites.common import Net, check

LAST = np.iinfo(np.int64).max


def gather(net: Net, x: str, index: int, axis: int = 1) -> str:
    return net("Gather", x, np.array(index), axis=axis)


def cut(net: Net, x: str, start: int, end: int, axis: int = 1) -> str:
    return net("Slice", x, np.array([start]), np.array([end]), np.array([axis]))


def layer(net: Net, x: str) -> str:
    """Products with a residual connection, and a norm before them."""
    norm = net("LayerNormalization", x, net.normal(16), net.normal(16), axis=-1)
    wide = net("Gelu", net("Add", net("MatMul", norm, net.normal(16, 32)), net.normal(32)))
    return net("Add", x, net("MatMul", wide, net.normal(32, 16)))


def rows(net: Net) -> list[int]:
    """How many rows each product and norm computes."""
    graph = check(net, None)
    return [n.outputs[0].shape[1] for n in graph.nodes if n.op in ("MatMul", "LayerNormalization", "Attention")]


@pytest.mark.parametrize("index", [0, 3, -1])
def test_one_token_of_a_layer(index: int) -> None:
    net = Net(x=(2, 9, 16))
    assert rows(net.out(gather(net, net("LayerNormalization", layer(net, "x"), net.normal(16), axis=-1), index))) == [1] * 4


def test_what_reads_a_product_twice() -> None:
    net = Net(x=(2, 9, 16))
    wide = net("MatMul", "x", net.normal(16, 32))
    quick = net("Mul", wide, net("Sigmoid", net("Mul", wide, np.float32(1.702))))
    assert rows(net.out(gather(net, net("MatMul", quick, net.normal(32, 16)), 0))) == [1, 1]


def test_some_rows_of_two_layers() -> None:
    net = Net(x=(2, 12, 16))
    assert rows(net.out(cut(net, layer(net, layer(net, "x")), -2, LAST))) == [2] * 6


@pytest.mark.parametrize("masked", [None, (1, 1, 9, 9), (9, 9)])
def test_rows_of_attention(masked: tuple[int, ...] | None) -> None:
    net = Net(x=(2, 9, 16), k=(2, 4, 9, 8), v=(2, 4, 9, 8))
    q = net("Transpose", net("Reshape", net("MatMul", "x", net.normal(16, 32)), np.array([2, 9, 4, 8])), perm=[0, 2, 1, 3])
    mask = [] if masked is None else [net.normal(*masked)]
    heads = net("Transpose", net("Attention", q, "k", "v", *mask), perm=[0, 2, 1, 3])
    y = net("MatMul", net("Reshape", heads, np.array([2, 9, 32])), net.normal(32, 16))
    graph = check(net.out(gather(net, y, 0)), None)
    attention = next(n for n in graph.nodes if n.op == "Attention")
    assert [n.outputs[0].shape[1] for n in graph.nodes if n.op == "MatMul"] == [1, 1] and attention.outputs[0].shape[2] == 1


def test_rows_of_a_product_of_two_axes() -> None:
    net = Net(x=(12, 16), c=(1, 8))
    y = net("Relu", net("Gemm", "x", net.normal(8, 16), "c", transB=1))
    check(net.out(cut(net, y, 1, 3, axis=0)), {"Slice": 1, "Gemm": 1, "Relu": 1})


def test_what_is_broadcast_over_the_rows_stays_whole() -> None:
    net = Net(x=(2, 9, 16), one=(2, 1, 16), each=(9, 16))
    y = net("Add", net("Mul", net("MatMul", "x", net.normal(16, 16)), "one"), "each")
    check(net.out(gather(net, y, 4)), {"Slice": 2, "MatMul": 1, "Mul": 1, "Add": 1, "Reshape": 1})


def near_misses() -> dict[str, Net]:
    found = {}

    def net(name: str) -> Net:
        found[name] = Net(x=(2, 9, 16))
        return found[name]

    n = net("another row is read, too")
    y = n("MatMul", "x", n.normal(16, 16))
    n.out(gather(n, y, 0), gather(n, y, 1))
    n = net("all rows are an output")
    y = n("MatMul", "x", n.normal(16, 16))
    n.out(gather(n, y, 0), y)
    n = net("most rows are read")
    n.out(cut(n, n("MatMul", "x", n.normal(16, 16)), 1, LAST))
    n = net("nothing but activations")
    n.out(cut(n, n("Relu", "x"), 1, 3))
    n = net("columns")
    n.out(cut(n, n("MatMul", "x", n.normal(16, 16)), 1, 3, axis=2))
    n = net("a norm of the axis itself")
    n.out(gather(n, n("LayerNormalization", "x", n.normal(9, 16), axis=1), 0))
    n = net("causal attention")
    q, k, v = (n("Reshape", "x", np.array([2, 1, 9, 16])) for _ in range(3))
    n.out(cut(n, n("Attention", q, k, v, is_causal=1), 0, 1, axis=2))
    return found


@pytest.mark.parametrize("why", near_misses())
def test_stays_behind(why: str) -> None:
    graph = check(near_misses()[why], None)
    assert all(list(n.outputs[0].shape)[-2:] == [9, 16] for n in graph.nodes if n.op in ("MatMul", "Relu", "LayerNormalization"))
