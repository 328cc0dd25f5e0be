from __future__ import annotations

import numpy as np
import pytest

from tests.rewrites.common import Net, check

f = np.float32
LAST, FIRST = [0, 2, 3, 1], [0, 3, 1, 2]


def _i(*values: int) -> np.ndarray:
    return np.array(values, np.int64)


ELEMENTWISE = {
    "unary": lambda n, x: n("Relu", x),
    "clip": lambda n, x: n("Clip", x, f(-1), f(1)),
    "clip above": lambda n, x: n("Clip", x, None, f(1)),
    "clip below": lambda n, x: n("Clip", x, f(-1), None),
    "one number a channel": lambda n, x: n("Mul", x, n.normal(6)),
    "one number a row": lambda n, x: n("Add", n.normal(5, 1, 1), x),
    "a whole constant": lambda n, x: n("Sub", x, n.normal(1, 5, 4, 6)),
    "twice the same": lambda n, x: n("Mul", n("Sigmoid", x), x),
    "slopes": lambda n, x: n("PRelu", x, n.normal(1, 1, 6)),
    "where": lambda n, x: n("Where", n("Greater", x, f(0)), x, n("Mul", x, f(0.2))),
    "concat": lambda n, x: n("Concat", x, n("Exp", x), axis=3),
    "pad": lambda n, x: n("Pad", x, _i(0, 1, 2, 0, 0, 0, 3, 4), f(1.5)),
    "reflect": lambda n, x: n("Pad", x, _i(0, 1, 2, 0, 0, 0, 3, 0), mode="reflect"),
    "slice": lambda n, x: n("Slice", x, _i(1, 0), _i(5, 9), _i(-1, 1), _i(2, 1)),
    "softmax": lambda n, x: n("Softmax", x, axis=-1),
    "mean": lambda n, x: n("ReduceMean", x, _i(1, 2)),
    "split": lambda n, x: n("Concat", *n("Split", x, _i(2, 4), axis=3, outputs=2)[::-1], axis=-1),
}


@pytest.mark.parametrize("case", ELEMENTWISE)
def test_meets_its_inverse(case):
    net = Net(x=(2, 6, 5, 4))
    graph = _rewritten(net, net("Transpose", ELEMENTWISE[case](net, net("Transpose", "x", perm=LAST)), perm=FIRST))
    assert not {"Transpose", "Reshape"} & {n.op for n in graph.nodes}


def _rewritten(net: Net, *outputs: str):
    """The graph, its values compared with ONNX Runtime's."""
    from tccompile.load.model import load
    from tccompile.rewrites import rewrite
    from tests.rewrites.common import check_recipes, check_same

    model = net.out(*outputs).model()
    graph = rewrite(load(model))
    check_recipes(graph, model)
    check_same(graph, model, 3e-6)
    return graph


@pytest.mark.parametrize(("axes", "keepdims", "left"), [((1, 2), 0, 0), ((1,), 0, 1), ((3,), 1, 1), ((1, 2, 3), 0, 0)])
def test_reductions(axes, keepdims, left):
    net = Net(x=(2, 6, 5, 4))
    y = net("ReduceSum", net("Relu", net("Transpose", "x", perm=LAST)), _i(*axes), keepdims=keepdims)
    graph = _rewritten(net, y)
    moves = [n for n in graph.nodes if n.op in ("Transpose", "Reshape")]
    assert len(moves) == left, "\n".join(map(str, graph.nodes))


def test_a_gate_computed_from_the_mean_needs_no_move():
    net = Net(x=(2, 6, 5, 4))
    t = net("Transpose", "x", perm=LAST)
    gate = net("Sigmoid", net("Transpose", net("Conv", net("ReduceMean", "x", _i(2, 3)), net.normal(6, 6, 1, 1)), perm=LAST))
    graph = _rewritten(net, net("Transpose", net("Mul", t, gate), perm=FIRST))
    assert not {"Transpose", "Reshape"} & {n.op for n in graph.nodes}


def test_a_scale_in_the_last_axis_reaches_the_convolution():
    net = Net(x=(2, 6, 5, 4))
    y = net("Transpose", net("Conv", "x", net.normal(8, 6, 3, 3)), perm=LAST)
    y = net("Relu", net("Add", net("Mul", y, net.normal(8)), net.normal(8)))
    check(net.out(net("Transpose", y, perm=FIRST)), {"Conv": 1, "Relu": 1})


def test_another_large_operand_stops_it():
    net = Net(x=(2, 6, 5, 4), z=(2, 5, 4, 6))
    check(net.out(net("Add", net("Transpose", "x", perm=LAST), "z")), {"Transpose": 1, "Add": 1})


def test_a_small_transposition_does_not_become_a_large_one():
    net = Net(x=(1, 6, 1, 4), z=(2, 1, 4, 6))
    check(net.out(net("Add", net("Transpose", "x", perm=LAST), "z")), {"Transpose": 1, "Add": 1})


@pytest.mark.parametrize(("op", "number", "moves"), [("Mul", f(2), True), ("Mul", f([[2]]), False), ("Sigmoid", None, True)])
def test_a_reshape_moves_past_elementwise_operators(op, number, moves):
    net = Net(x=(30,))
    args = () if number is None else (number,)
    graph = _rewritten(net, net("Tanh", net(op, net("Reshape", "x", _i(5, 6)), *args)))
    assert [n.op for n in graph.nodes] == ([op, "Tanh", "Reshape"] if moves else ["Reshape", op, "Tanh"])
