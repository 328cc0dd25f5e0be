"""Iterations that do the same with consecutive slices become one set of operators, and others stay what they are."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import onnx
import onnx_graphsurgeon as gs
import pytest
from onnx import TensorProto, helper, numpy_helper

from tccompile.load.model import load
from tccompile.pipeline import without_code
from tccompile.rewrites import rewrite
from tccompile.runtime.session import Session
from tests.networks import feeds, reference, relative_error
from tests.rewrites.common import Net, check_recipes, check_same
from tests.tiers import usually

Body = Callable[[Net, str, int], str]
FLOAT, INT64 = TensorProto.FLOAT, TensorProto.INT64


def i(*values: int) -> np.ndarray:
    return np.array(values, np.int64)


def f(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng((seed, *shape)).standard_normal(shape).astype(np.float32)


def unrolled(body: Body, shape: tuple[int, ...], ends: Sequence[int], axis: int = 0, along: int = 0, **inputs: Any) -> Net:
    """The body of each slice of x along an axis, slices one after the other; its results concatenated along another axis."""
    net = Net(x=shape, **inputs)
    starts = [0, *ends[:-1]]
    parts = [body(net, net("Slice", "x", i(a), i(b), i(axis)), n) for n, (a, b) in enumerate(zip(starts, ends, strict=True))]
    return net.out(net("Concat", *parts, axis=along))


def once(model: Net | onnx.ModelProto, most: int, tolerance: float = 3e-6, **inputs: np.ndarray) -> gs.Graph:
    """Rewritten, the model has so many nodes at most, and computes what it did; in mixed precision too."""
    made = model.model() if isinstance(model, Net) else model
    graph = rewrite(load(made))
    assert len(graph.nodes) <= most, Counter(n.op for n in graph.nodes)
    check_recipes(graph, made)
    check_same(graph, made, tolerance, **inputs)
    given = feeds(made, 1) | inputs
    with Session(without_code(made), "cpu") as session:
        for name, right in reference(made, given).items():
            assert relative_error(session.run([name], given)[0], right) <= 3e-3
    return graph


EVEN = tuple(range(2, 26, 2))  # 12 lanes of two elements
UNEVEN = (3, 4, 8, 10, 11, 14, 15, 19, 21, 22, 25)
W, V = f(5, 7), f(5)

BODIES: dict[str, tuple[Body, int]] = {
    "elementwise": (lambda n, s, k: n("Mul", n("Relu", s), V), 3),
    "numbers of its own": (lambda n, s, k: n("Add", s, np.float32(k)), 5),
    "vectors of its own": (lambda n, s, k: n("Mul", s, f(1, 5, seed=k)), 5),
    "broadcast from less": (lambda n, s, k: n("Add", n("Mul", s, s), n("ReduceSum", s, i(1), keepdims=1)), 6),
    "a product": (lambda n, s, k: n("Tanh", n("Add", n("MatMul", s, W), f(7))), 6),
    "a Gemm": (lambda n, s, k: n("Gemm", s, W.T.copy(), f(7), transB=1, alpha=0.5), 6),
    "a normalization": (lambda n, s, k: n("LayerNormalization", s, n.positive(5) * 0 + 1, V), 4),
    "a softmax": (lambda n, s, k: n("Softmax", s, axis=1), 4),
    "as floats and back": (lambda n, s, k: n("Cast", n("Greater", s, np.float32(0)), to=FLOAT), 4),
    "another order": (lambda n, s, k: n("Reshape", n("Transpose", s, perm=[1, 0]), i(-1, 5)), 6),
    "parts of it": (lambda n, s, k: n("Concat", n("Slice", s, i(0), i(2), i(1)), n("Neg", s), axis=1), 8),
    "a choice": (lambda n, s, k: n("Where", n("Less", s, np.float32(0)), V, n("Exp", s)), 6),
    "more axes": (lambda n, s, k: n("Squeeze", n("Unsqueeze", n("Sqrt", n("Abs", s)), i(0)), i(0)), 4),
    "clipped": (lambda n, s, k: n("Clip", s, np.float32(-0.5), np.float32(0.5)), 4),
    "a mean": (lambda n, s, k: n("ReduceMean", n("Exp", s), i(0), keepdims=1), 6),
    "a sum of squares": (lambda n, s, k: n("ReduceSumSquare", s, i(0), keepdims=1), 6),
    "a product of elements": (lambda n, s, k: n("ReduceProd", s, i(0), keepdims=1), 6),
    "a length": (lambda n, s, k: n("ReduceL2", s, i(0), keepdims=1), 6),
    "a largest one": (lambda n, s, k: n("ReduceMax", n("Neg", s), i(0, 1), keepdims=1), 6),
    "a least one": (lambda n, s, k: n("Unsqueeze", n("ReduceMin", s, i(0), keepdims=0), i(0)), 6),
}  # fmt: skip


@pytest.mark.parametrize("ends", [EVEN, UNEVEN], ids=["even", "uneven"])
@pytest.mark.parametrize("body", BODIES)
def test_a_body_is_computed_once(body: str, ends: Sequence[int]) -> None:
    if body == "another order" and ends is UNEVEN:
        return
    function, most = BODIES[body]
    once(unrolled(function, (25, 5), ends), most + (1 if ends is EVEN else 5))


def test_images_are_one_batch() -> None:
    w, norm = f(4, 3, 3, 3), [np.abs(f(4, seed=s)) for s in range(4)]

    def body(n: Net, s: str, k: int) -> str:
        y = n("BatchNormalization", n("Conv", s, w, pads=[1, 1, 1, 1]), *norm)
        return n("MaxPool", n("Relu", y), kernel_shape=[2, 2], strides=[2, 2])

    graph = once(unrolled(body, (10, 3, 6, 6), range(1, 11)), 7)
    assert sum(n.op == "Conv" for n in graph.nodes) == 1


def test_results_side_by_side() -> None:
    once(unrolled(lambda n, s, k: n("Exp", s), (4, 24, 3), range(2, 26, 2), axis=1, along=2), 6)


def test_parts_of_a_split_each_with_weights_of_its_own() -> None:
    net = Net(x=(3, 20))
    parts = net("Split", "x", outputs=10, axis=1, num_outputs=10)
    once(net.out(net("Concat", *(net("MatMul", p, f(2, 4, seed=k)) for k, p in enumerate(parts)), axis=1)), 8)


def test_two_results_share_what_they_are_made_of() -> None:
    net = Net(x=(12, 5))
    rows = [net("Tanh", net("MatMul", net("Gather", "x", i(k), axis=0), W)) for k in range(12)]
    net.out(net("Concat", *rows, axis=0), net("Concat", *(net("Exp", r) for r in rows), axis=0))
    assert Counter(n.op for n in once(net, 8).nodes)["MatMul"] == 1


def test_lanes_that_are_read_elsewhere_too() -> None:
    net = Net(x=(12, 5))
    rows = [net("Exp", net("Gather", "x", i(k), axis=0)) for k in range(12)]
    once(net.out(net("Concat", *rows, axis=0), rows[-1]), 5)


def test_some_are_of_another_kind() -> None:
    """As in a loop whose last iteration divides by what is left, and whose empty slices are zeros."""

    def body(n: Net, s: str, k: int) -> str:
        y = n("ReduceSum", s, i(0), keepdims=1)
        return n("Div", y, np.float32(3)) if k == 10 else n("Mul", y, y) if k == 4 else y

    once(unrolled(body, (25, 5), UNEVEN), 16)


def test_lengths_that_are_far_from_each_other_are_padded_among_their_like() -> None:
    ends = [*range(1, 41), *range(140, 941, 100)]
    graph = once(unrolled(lambda n, s, k: n("ReduceSum", s, i(0), keepdims=1), (940, 5), ends), 12)
    assert sum(int(np.prod(t.shape)) for t in graph.tensors().values()) < 5 * 940 * 5


def test_a_result_that_grows_by_an_iteration() -> None:
    net = Net(x=(13, 5))
    grown = net("Slice", "x", i(12), i(13), i(0))
    for k in range(12):
        grown = net("Concat", grown, net("Exp", net("Slice", "x", i(k), i(k + 1), i(0))), axis=0)
    once(net.out(grown), 6)


def test_a_sum_over_iterations() -> None:
    net = Net(x=(12, 5), z=(7,))
    total = "z"
    for k in range(12):
        row = net("Tanh", net("MatMul", net("Gather", "x", i(k)[0], axis=0), W))
        total = net("Add", total, row) if k % 2 else net("Add", row, total)
    once(net.out(net("Relu", total)), 6)


def test_sums_that_are_read_on_the_way_stay() -> None:
    net = Net(x=(12, 5))
    total, sums = net("Exp", net("Gather", "x", i(0), axis=0)), []
    for k in range(1, 12):
        total = net("Add", total, net("Exp", net("Gather", "x", i(k), axis=0)))
        sums.append(total)
    model = net.out(total, sums[5]).model()
    check_same(rewrite(load(model)), model, 3e-6)
    assert nodes_left(net.out(net("Concat", *sums, axis=0))) >= 11


# --- Loops


def value(name: str, elem: int = FLOAT, shape: Any = None) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, elem, shape)


def embedding_bag(mode: str, lengths: Sequence[int], weighted: bool) -> tuple[onnx.ModelProto, dict[str, np.ndarray]]:
    """A Loop over bags, as torch.onnx writes EmbeddingBag."""
    total, ends = sum(lengths), np.cumsum(lengths)
    node = helper.make_node
    nodes = [
        node("Gather", ["starts", "i"], ["start"]), node("Gather", ["ends", "i"], ["end"]),
        node("Unsqueeze", ["start", "zero"], ["start1"]), node("Unsqueeze", ["end", "zero"], ["end1"]),
        node("Slice", ["ids", "start1", "end1", "zero"], ["bag"]), node("Gather", ["table", "bag"], ["rows"], axis=0),
        node("Slice", ["weights", "start1", "end1", "zero"], ["ws"]), node("Unsqueeze", ["ws", "one"], ["wide"]),
        node("Mul", ["rows", "wide"], ["weighted"]),
        node(f"Reduce{mode}", ["weighted" if weighted else "rows", "zero"], ["part"], keepdims=0),
        node("Identity", ["go"], ["go_on"]),
    ]  # fmt: skip
    inner = [value("i", INT64, ()), value("go", TensorProto.BOOL, ())]
    body = helper.make_graph(nodes, "body", inner, [value("go_on", TensorProto.BOOL, ()), value("part")])
    weights = {
        "n": np.array(len(lengths)), "true": np.array(True), "zero": i(0), "one": i(1), "table": f(30, 6),
        "starts": ends - lengths, "ends": ends,
    }  # fmt: skip
    loop = node("Loop", ["n", "true"], ["y"], "bags", body=body)
    inputs = [value("ids", INT64, (total,)), *([value("weights", FLOAT, (total,))] if weighted else [])]
    kept = body.node if weighted else [n for n in body.node if not {"weights", "wide", "weighted"} & {*n.input, *n.output}]
    kept = [*kept]
    del loop.attribute[0].g.node[:]
    loop.attribute[0].g.node.extend(kept)
    initializers = [numpy_helper.from_array(v, k) for k, v in weights.items()]
    graph = helper.make_graph([loop], "g", inputs, [value("y")], initializers)
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8)
    return made, {"ids": np.random.default_rng(0).integers(0, 30, total)}


BAGS = [
    (mode, weighted, bags)
    for bags in ("even", "uneven", "some empty")
    for mode in ("Sum", "Mean", "Max")
    for weighted in (False, True)
    if bags != "some empty" or mode == "Sum"  # a mean of nothing is no number
]


@pytest.mark.parametrize(("mode", "weighted", "bags"), usually(BAGS, *range(0, len(BAGS), 3)))
def test_an_embedding_bag_is_a_few_steps(mode: str, weighted: bool, bags: str) -> None:
    lengths = {"even": [3] * 20, "uneven": [1, 4, 2, 7, 3] * 4, "some empty": [1, 4, 0, 7, 3] * 4}[bags]
    model, inputs = embedding_bag(mode, lengths, weighted)
    once(model, 9, **inputs)


def test_a_scan_that_carries_nothing() -> None:
    body = helper.make_graph(
        [helper.make_node("MatMul", ["row", "w"], ["p"]), helper.make_node("Softmax", ["p"], ["part"])], "body",
        [value("row", FLOAT, (3, 5))], [value("part")],
    )  # fmt: skip
    scan = helper.make_node("Scan", ["x"], ["y"], "scan", body=body, num_scan_inputs=1, scan_output_directions=[1])
    graph = helper.make_graph([scan], "g", [value("x", FLOAT, (10, 3, 5))], [value("y")], [numpy_helper.from_array(W, "w")])
    once(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8), 6)


# --- What stays


def nodes_left(net: Net) -> int:
    model = net.model()
    graph = rewrite(load(model))
    check_same(graph, model, 3e-6)
    return len(graph.nodes)


def test_what_one_iteration_needs_of_the_last_stays() -> None:
    net = Net(x=(12, 5))
    h, states = f(1, 7), []
    for k in range(12):
        h = net("Tanh", net("Add", net("MatMul", net("Slice", "x", i(k), i(k + 1), i(0)), W), h))
        states.append(h)
    assert nodes_left(net.out(net("Concat", *states, axis=0))) >= 12


def test_a_few_branches_stay() -> None:
    assert nodes_left(unrolled(lambda n, s, k: n("Exp", s), (8, 5), (2, 4, 6, 8))) >= 9


def test_branches_that_differ_stay() -> None:
    assert nodes_left(unrolled(lambda n, s, k: n("LeakyRelu", s, alpha=0.1 * k), (24, 5), range(2, 26, 2))) >= 24


# --- Random bodies


def random_body(rng: np.random.Generator) -> Body:
    """Some operators after each other, the same in each lane."""
    steps: list[Body] = [
        lambda n, s, k: n("Relu", s),
        lambda n, s, k: n("Mul", s, np.float32(k + 1)),
        lambda n, s, k: n("Add", s, f(5)),
        lambda n, s, k: n("Sub", s, n("ReduceMax", s, i(1), keepdims=1)),
        lambda n, s, k: n("Div", s, n("Add", n("ReduceSum", n("Abs", s), i(0), keepdims=1), np.float32(1))),
        lambda n, s, k: n("MatMul", s, f(5, 5)),
        lambda n, s, k: n("MatMul", s, f(5, 5, seed=k)),
        lambda n, s, k: n("Softmax", s, axis=1),
        lambda n, s, k: n("Transpose", n("Tanh", n("Transpose", s, perm=[1, 0])), perm=[1, 0]),
        lambda n, s, k: n("Reshape", n("Sigmoid", n("Unsqueeze", s, i(1))), i(-1, 5)),
        lambda n, s, k: n("Slice", n("Concat", s, s, axis=1), i(2), i(7), i(1)),
        lambda n, s, k: n("Gather", s, i(4, 3, 2, 1, 0), axis=1),
        lambda n, s, k: n("LayerNormalization", s, f(5), f(5)),
        lambda n, s, k: n("Gemm", s, f(5, 5), f(1, 5)),
        lambda n, s, k: n("Where", n("Greater", s, np.float32(0.2)), s, n("Neg", s)),
        lambda n, s, k: n("Max", s, np.float32([[0.1 * k]])),
    ]
    ends: list[Body] = [
        lambda n, s, k: s,
        lambda n, s, k: n("ReduceMean", s, i(0), keepdims=1),
        lambda n, s, k: n("ReduceMin", s, i(-2), keepdims=1),
    ]
    chosen = [steps[j] for j in rng.integers(0, len(steps), rng.integers(1, 5))] + [ends[rng.integers(0, len(ends))]]

    def body(n: Net, s: str, k: int) -> str:
        for step in chosen:
            s = step(n, s, k)
        return s

    return body


def random_lanes(seed: int) -> Net:
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, 5, rng.integers(8, 14)) if rng.random() < 0.6 else np.full(9, rng.integers(1, 4))
    return unrolled(random_body(rng), (int(lengths.sum()), 5), [int(e) for e in np.cumsum(lengths)])


@pytest.mark.parametrize("seed", range(16))
def test_a_random_body(seed: int) -> None:
    model = random_lanes(seed).model()
    check_same(rewrite(load(model)), model, 1e-5)
