from __future__ import annotations

import numpy as np
import pytest
from onnx import TensorProto

from tccompile.load.model import load
from tccompile.rewrites import rewrite
from tests.rewrites.common import Net, check, check_same

f = np.float32
B, H, M, N, D = 2, 3, 5, 7, 8
TRI = np.tri(M, dtype=bool)


def _attention(net: Net, q: str, k: str, v: str, scale: str = "", mask=None, where=None, nan: bool = False) -> str:
    """softmax(q @ k + mask) @ v, with q and k (transposed already) multiplied by numbers as `scale` says."""
    if scale in ("before", "both"):
        q = net("Mul", q, f(0.5))
    if scale == "both":
        k = net("Mul", f(0.7), k)
    s = net("MatMul", q, k)
    s = net("Div", s, f(2.5)) if scale == "after" else s
    s = net("Add", s, mask) if mask is not None else s
    s = net("Where", where[0], s, f(where[1])) if where is not None else s
    p = net("Softmax", s, axis=-1)
    return net("MatMul", net("Where", net("IsNaN", p), f(0), p) if nan else p, v)


@pytest.mark.parametrize("scale", ["", "before", "after", "both"])
@pytest.mark.parametrize("shape", [(), (H,), (B, H)])
def test_scales_and_ranks(scale, shape):
    net = Net(q=(*shape, M, D), k=(*shape, N, D), v=(*shape, N, 6))
    r = len(shape)
    k = net("Transpose", "k", perm=[*range(r), r + 1, r])
    y = _attention(net, "q", k, "v", scale)
    reshapes = {} if r == 2 else {"Reshape": 4}
    assert check(net.out(y), {"Attention": 1, **reshapes}, 2e-6)


def test_heads_of_projections():
    net = Net(x=(B, M, H * D), c=(B, N, H * D))

    def apart(t, n, *perm):
        projected = net("MatMul", t, net.normal(H * D, H * D, scale=0.2))
        return net("Transpose", net("Reshape", projected, np.array([B, n, H, D])), perm=perm)

    q, k, v = apart("x", M, 0, 2, 1, 3), apart("c", N, 0, 2, 3, 1), apart("c", N, 0, 2, 1, 3)
    y = net("Transpose", _attention(net, q, k, v, "after"), perm=[0, 2, 1, 3])
    y = net("Reshape", y, np.array([B, M, H * D]))
    graph = check(net.out(y), {"MatMul": 3, "Reshape": 4, "Transpose": 4, "Attention": 1}, 2e-6)
    (node,) = (n for n in graph.nodes if n.op == "Attention")
    assert node.attrs["scale"] == pytest.approx(0.4)


MASKS = {
    "nothing": (np.zeros((1, 1, M, M), f), {}, False),
    "later": (np.where(TRI, 0, -np.inf).astype(f), {}, True),
    "later, by the lowest number": (np.where(TRI, 0, np.finfo(f).min).astype(f)[None, None], {}, True),
    "a bias": (np.random.default_rng(0).standard_normal((1, H, M, M)).astype(f), {}, False),
}


@pytest.mark.parametrize("case", MASKS)
@pytest.mark.parametrize("nan", [False, True])
def test_constant_masks(case, nan):
    mask, left, causal = MASKS[case]
    net = Net(q=(B, H, M, D), k=(B, H, D, M), v=(B, H, M, D))
    graph = check(net.out(_attention(net, "q", "k", "v", mask=mask, nan=nan)), {"Transpose": 1, "Attention": 1, **left}, 2e-6)
    (node,) = (n for n in graph.nodes if n.op == "Attention")
    assert node.attrs["is_causal"] == causal and len(node.inputs) == (4 if case == "a bias" else 3)


def test_masks_computed_at_run_time():
    net = Net(q=(B, H, M, D), k=(B, H, D, N), v=(B, H, N, D), hidden=(B, 1, 1, N), bias=(H, M, N))
    lowest = net("Mul", net("Relu", "hidden"), f(-1e9))
    y = _attention(net, "q", "k", "v", "after", mask=net("Add", lowest, "bias"))
    check(net.out(y), {"Relu": 1, "Mul": 1, "Add": 1, "Transpose": 1, "Attention": 1}, 2e-6)


@pytest.mark.parametrize("lowest, left", [(-np.inf, {}), (-1e9, {"Where": 1})])
def test_scores_chosen_at_run_time(lowest, left):
    net = Net(q=(B, H, M, D), k=(B, H, D, N), v=(B, H, N, D), x=(B, 1, M, N))
    seen = net("Or", net("Greater", "x", f(0)), np.arange(N) == 0)  # each row sees the first
    y = _attention(net, "q", "k", "v", where=(seen, lowest))
    check(net.out(y), {"Greater": 1, "Or": 1, "Transpose": 1, "Attention": 1, **left}, 2e-6)


def test_softmax_in_a_wider_type():
    net = Net(q=(B, H, M, D), k=(B, H, D, N), v=(B, H, N, D), dtype=np.float16)
    s = net("Mul", net("MatMul", "q", "k"), np.float16(0.3))
    p = net("Softmax", net("Cast", s, to=TensorProto.FLOAT), axis=-1)
    y = net("MatMul", net("Cast", p, to=TensorProto.FLOAT16), "v")
    check(net.out(y), {"Transpose": 1, "Attention": 1})


@pytest.mark.parametrize("heads_inner", [False, True])
def test_einsum(heads_inner):
    q, k, v = ((B, n, H, D) if heads_inner else (B, H, n, D) for n in (M, N, N))
    net = Net(q=q, k=k, v=v)
    scores, result = ("bqhd,bkhd->bhqk", "bhqk,bkhd->bqhd") if heads_inner else ("bhqd,bhkd->bhqk", "bhqk,bhkd->bhqd")
    p = net("Softmax", net("Mul", net("Einsum", "q", "k", equation=scores), f(0.3)), axis=-1)
    left = {"Attention": 1, "Transpose": 4} if heads_inner else {"Attention": 1}
    check(net.out(net("Einsum", p, "v", equation=result)), left, 2e-6)


def test_a_number_for_each_head():
    net = Net(q=(B, H, M, D), k=(B, H, D, N), v=(B, H, N, D))
    s = net("Add", net("Mul", net("MatMul", "q", "k"), net.positive(H, 1, 1)), net.normal(1, H, M, N))
    graph = check(net.out(net("MatMul", net("Softmax", s, axis=-1), "v")), {"Mul": 1, "Transpose": 1, "Attention": 1}, 2e-6)
    assert next(n for n in graph.nodes if n.op == "Attention").attrs["scale"] == 1


@pytest.mark.parametrize("perm, attention", [((0, 2, 1, 3), True), ((0, 2, 3, 1), False)])
def test_between_pixels_it_is_one_step_between_channels_products(perm, attention):
    net = Net(x=(B, N, 3 * H * D))
    parts = net("Split", net("Reshape", "x", np.array([B, N, 3 * H, D])), np.array([H, H, H]), outputs=3, axis=2)
    q, k, v = (net("Transpose", t, perm=perm) for t in parts)
    q = net("Div", q, net("Clip", net("ReduceL2", q, np.array([-1])), f(1e-12)))
    s = net("Mul", net("MatMul", q, net("Transpose", k, perm=[0, 1, 3, 2])), net.positive(H, 1, 1))
    model = net.out(net("MatMul", net("Softmax", s, axis=-1), v)).model()
    graph = rewrite(load(model))
    assert sum(n.op == "Attention" for n in graph.nodes) == attention
    check_same(graph, model, 2e-6)


def test_causal_by_choice():
    net = Net(q=(B, H, M, D), k=(B, H, D, M), v=(B, H, M, D))
    y = _attention(net, "q", "k", "v", "after", where=(TRI[None, None], -1e10))
    graph = check(net.out(y), {"Transpose": 1, "Attention": 1}, 2e-6)
    assert next(n for n in graph.nodes if n.op == "Attention").attrs["is_causal"] == 1


def test_groups_of_heads():
    net = Net(q=(B, 6, M, D), k=(B, 2, N, D), v=(B, 2, N, D))

    def repeated(t):
        wide = net("Expand", net("Unsqueeze", t, np.array([2])), np.array([B, 2, 3, N, D]))
        return net("Reshape", wide, np.array([B, 6, N, D]))

    y = _attention(net, "q", net("Transpose", repeated("k"), perm=[0, 1, 3, 2]), repeated("v"))
    graph = check(net.out(y), {"Attention": 1}, 2e-6)
    assert list(next(n for n in graph.nodes if n.op == "Attention").inputs[1].shape) == [B, 2, N, D]


@pytest.mark.parametrize("images", [1, 2])
def test_masks_of_windows(images):
    windows = 4
    net = Net(q=(images * windows, H, M, D), k=(images * windows, H, D, M), v=(images * windows, H, M, D))
    s = net("Add", net("MatMul", net("Mul", "q", f(0.3)), "k"), net.normal(1, H, M, M))
    hidden = np.where(np.random.default_rng(1).random((windows, 1, M, M)) < 0.3, -100, 0).astype(f)
    s = net("Add", net("Reshape", s, np.array([images, windows, H, M, M])), hidden)
    p = net("Softmax", net("Reshape", s, np.array([images * windows, H, M, M])), axis=-1)
    graph = check(net.out(net("MatMul", p, "v")), {"Transpose": 1, "Attention": 1}, 2e-6)
    (node,) = (n for n in graph.nodes if n.op == "Attention")
    assert list(node.inputs[3].shape) == [images * windows, H, M, M]


@pytest.mark.parametrize("case", ["scores used", "other axis", "five axes", "scaled mask", "small number", "keys broadcast"])
def test_near_misses(case):
    lead = (B, 2, H) if case == "five axes" else (B, H)
    net = Net(q=(*lead, M, D), k=(1, H, D, N) if case == "keys broadcast" else (*lead, D, N), v=(*lead, N, D))
    s = net("MatMul", "q", "k")
    left = {"MatMul": 2, "Softmax": 1}
    outputs = []
    if case == "scores used":
        outputs.append(s)
    if case == "scaled mask":
        s, left = net("Mul", net("Add", s, net.normal(M, N)), f(0.5)), left | {"Add": 1, "Mul": 1}
    if case == "small number":
        s, left = net("Where", net.normal(M, N) > 0, s, f(-5)), left | {"Where": 1}
    p = net("Softmax", s, axis=-2 if case == "other axis" else -1)
    check(net.out(net("MatMul", p, "v"), *outputs), left)
