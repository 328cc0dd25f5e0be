"""Ranges from the weights alone, beside those of runs."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx
import pytest

from tccompile.dump import Dump
from tccompile.ir.feeds import seeded
from tccompile.ir.ops import OPS, Rnn
from tccompile.ir.program import Program
from tccompile.ir.types import DType
from tccompile.load.model import sources
from tccompile.options import Options
from tccompile.pipeline import to_program
from tccompile.precision import ranges
from tccompile.precision.estimate import estimated
from tccompile.precision.ranges import activations
from tests.gpu.cases import program_of as program_of_case
from tests.kernels.support import few_of
from tests.networks import feeds, skeleton
from tests.plans import without_code
from tests.rewrites.common import Net
from tests.test_precision import Network, branches, errors, growing, linear_attention, mixer, on_tensor_cores
from tests.tiers import usually


def transformer() -> onnx.ModelProto:
    """Token embeddings, two blocks with attention, whose residual stream grows, and a head."""
    n = Network(20)
    x = n("x", "MatMul", n.weight(12, 32))
    for _ in range(2):
        y = n(x, "LayerNormalization", n.weight(32, 1).reshape(32) + 1, n.weight(32, 1).reshape(32))
        q, k, v = (
            n(n(n(y, "MatMul", n.weight(32, 32)), "Reshape", np.array([1, 10, 2, 16])), "Transpose", perm=[0, 2, 1, 3])
            for _ in "qkv"
        )
        scores = n(n(q, "MatMul", n(k, "Transpose", perm=[0, 1, 3, 2])), "Mul", np.array(0.25, np.float32))
        y = n(n(n(n(scores, "Softmax", axis=-1), "MatMul", v), "Transpose", perm=[0, 2, 1, 3]), "Reshape", np.array([1, 10, 32]))
        x = n(x, "Add", n(y, "MatMul", n.weight(32, 32, gain=300)))
        h = n(n(x, "MatMul", n.weight(32, 64, gain=200)), "Gelu")
        x = n(x, "Add", n(h, "MatMul", n.weight(64, 32, gain=3)))
    top = n(n(x, "ReduceMean", np.array([1], np.int64)), "MatMul", n.weight(32, 8))
    return n.model((1, 10, 12), n(top, "Sigmoid"), n(n(x, "Transpose", perm=[0, 2, 1]), "Mul", np.array(1e-6, np.float32)))


def shuffled() -> onnx.ModelProto:
    """Depth to space, slices, padding, powers, divisions by sums of squares, maxima, and a recurrent layer."""
    n = Network(21)
    x = n(n.conv("x", 16, 4, gain=50), "Relu")
    up = n(n.conv(x, 16, 16, 1, gain=40), "DepthToSpace", blocksize=2)
    padded = n(up, "Pad", np.array([0, 0, 1, 1, 0, 0, 1, 1]), mode="constant")
    pooled = n(
        n(padded, "MaxPool", kernel_shape=[3, 3], strides=[2, 2]), "Concat", n(x, "AveragePool", kernel_shape=[1, 1]), axis=1
    )
    norms = n(n(pooled, "ReduceSumSquare", np.array([1])), "Sqrt")
    unit = n(pooled, "Div", norms)
    squares = n(n(pooled, "Pow", np.array(2, np.float32)), "Mul", np.array(1e-8, np.float32))
    rows = n(n(unit, "Reshape", np.array([1, 20, 64])), "Transpose", perm=[2, 0, 1])
    gru = n(rows, "GRU", n.weight(1, 24, 20), n.weight(1, 24, 8), hidden_size=8)
    top = n(pooled, "ReduceMax", np.array([2, 3], np.int64))
    return n.model((1, 4, 8, 8), squares, gru, n(top, "Mul", np.array(1e-3, np.float32)))


def matrices() -> onnx.ModelProto:
    """A constant matrix for each head, a convolution by weights that are computed, and more channels than are told apart."""
    n = Network(23)
    heads = n("x", "MatMul", n.weight(3, 8, 8) * np.array([1, 10, 100], np.float32).reshape(3, 1, 1))
    filters = n(n(n("x", "Reshape", np.array([8, 3, 2, 4])), "Sin"), "Abs")
    filtered = n(n("x", "Reshape", np.array([1, 6, 4, 8])), "Conv", filters, group=2)
    many = n(n("x", "Reshape", np.array([1, 192])), "MatMul", n.weight(70000, 192).T.copy())
    return n.model((1, 3, 8, 8), heads, n(filtered, "Relu"), n(n(many, "Reshape", np.array([7, 10000])), "ReduceMax", keepdims=0))


def squeezed() -> onnx.ModelProto:
    """Squeeze and excitation: two products of one pixel."""
    n = Network(24)
    x = n(n.conv("x", 64, 4, gain=30), "Relu")
    mean = n(x, "GlobalAveragePool")
    squeeze = n(n(mean, "Conv", n.weight(16, 64, 1, 1), n.weight(16, 1).reshape(16)), "Relu")
    gate = n(n(squeeze, "Conv", n.weight(64, 16, 1, 1), n.weight(64, 1).reshape(64)), "Sigmoid")
    return n.model((1, 4, 16, 16), n(n.conv(n(x, "Mul", gate), 8, 64), "Mul", np.array(1e-3, np.float32)))


NETWORKS: dict[str, Callable[[], onnx.ModelProto]] = {
    **{f.__name__: f for f in (mixer, linear_attention, branches, growing, transformer, shuffled)},
    "matrices": matrices,
    "squeezed": squeezed,
    "fsrcnn": lambda: skeleton("more/fsrcnn_opset23"),
    "blazeface": lambda: skeleton("more/blazeface"),
}


def program_of(name: str) -> tuple[Program, onnx.ModelProto]:
    model = NETWORKS[name]()
    shapes = {"x": (2, 1, 20, 28)} if name == "fsrcnn" else {}
    return to_program(model, shapes, Options((shapes,), precision="fp32"), Dump(None)), model


@pytest.mark.parametrize("name", usually(NETWORKS, "transformer", "shuffled", "squeezed", "matrices"))
def test_estimates_are_within_the_headroom_of_what_is_measured(name):
    """`precision.HEADROOM` leaves a factor of 8."""
    program, model = program_of(name)
    runs = [seeded(program, 0), seeded(program, 0, positive=True)]
    measured = activations(program, runs, sources(model))
    estimates = estimated(program, sources(model))
    assert estimates.keys() == measured.keys()
    for tensor, values in measured.items():
        if values.largest:
            assert 1 / 8 < estimates[tensor].largest / values.largest < 8, tensor


@pytest.mark.parametrize("name", usually(NETWORKS, "transformer", "squeezed"))
def test_two_runs_at_once_find_what_they_find_in_turn(name, monkeypatch):
    program, model = program_of(name)
    runs = [seeded(program, 0), seeded(program, 0, positive=True)]
    at_once = activations(program, runs, sources(model))
    monkeypatch.setattr(ranges, "MANY", 0)
    in_turn = activations(program, runs, sources(model))
    assert list(at_once) == list(in_turn)
    for found, other in zip(at_once.values(), in_turn.values(), strict=True):
        assert (found.largest, found.need, found.share, found.bound) == (other.largest, other.need, other.share, other.bound)
        assert found.loss == other.loss and np.array_equal(found.magnitudes, other.magnitudes)


@pytest.mark.parametrize("name", usually(NETWORKS, "transformer", "shuffled", "squeezed", "matrices"))
@pytest.mark.parametrize("size", usually([1e-3, 1, 1e4], 0, 1))
def test_no_input_leaves_the_bounds(name, size):
    program, model = program_of(name)
    inputs = {
        k: (v * size).astype(np.float32) for k, v in feeds(model, 9, {"x": (2, 1, 20, 28)} if name == "fsrcnn" else None).items()
    }
    seen = activations(program, [inputs, {k: np.sign(v) * np.float32(size) for k, v in inputs.items()}], sources(model))
    estimates = estimated(program, sources(model))
    for tensor, values in seen.items():
        assert values.largest <= estimates[tensor].bound * (1 + 1e-5), tensor


def test_what_no_input_can_do():
    """Bounds: of a norm √n, of sums of bounded values, of a table's rows; none of what is not bounded."""
    n = Network(22)
    w = n.weight(4, 6)
    normal = n("x", "LayerNormalization", np.full(6, 3, np.float32), np.zeros(6, np.float32), name="norm")
    gate = n(n(n(normal, "MatMul", w.T.copy()), "Sigmoid"), "MatMul", np.full((4, 8), -0.5, np.float32), name="gate")
    model = n.model((2, 5, 6), n(gate, "Relu", name="nothing"), n(gate, "Abs", name="gates"), n("x", "Exp", name="free"))
    program = to_program(model, {}, Options(precision="fp32"), Dump(None))
    bounds = {op.nodes[0]: estimated(program, sources(model))[program.tensors[op.y].storage].bound for op in program.ops}
    assert bounds["norm"] == pytest.approx(3 * np.sqrt(6)) and bounds["free"] == np.inf
    assert (bounds["nothing"], bounds["gates"]) == (0, pytest.approx(2, 1e-5))


def test_what_takes_too_long_to_run_is_estimated(monkeypatch):
    monkeypatch.setattr(ranges, "TOO_LONG", 1)
    model = growing()
    with pytest.warns(RuntimeWarning, match="estimated from the weights, running it would be 0 GFLOP on the CPU: "):
        plan = without_code(model, ("sm_80",), precision="mixed")
    reasons = [s.reason for s in plan.entries[0].program.storage.values()]
    assert reasons and all(r.endswith("by an estimate from the weights") for r in reasons)
    assert max(errors(plan, model, feeds(model, 1)).values()) <= 3e-3
    assert on_tensor_cores(plan) == 1


def test_no_scale_is_made_of_a_far_estimate(monkeypatch):
    """exp(a - max(a)) is at most 1, but not by its estimate, which a scale would follow so far that it leaves zeros."""
    n = Network(4)
    large = n("x", "Mul", np.array(30, np.float32))
    decay = n(n(large, "Sub", n(large, "ReduceMax", np.array([-1], np.int64))), "Exp")
    model = n.model((1, 8, 16), n(n(n(decay, "MatMul", n.weight(16, 16)), "Relu"), "MatMul", n.weight(16, 16)))
    monkeypatch.setattr(ranges, "TOO_LONG", 1)
    with pytest.warns(RuntimeWarning, match="estimated"):
        plan = without_code(model, ("sm_80",), precision="mixed")
    assert max(errors(plan, model, feeds(model, 1)).values()) <= 2e-3


def test_a_network_in_range_stays_fp16_by_estimate_too(monkeypatch):
    monkeypatch.setattr(ranges, "TOO_LONG", 1)
    for name in ("resnet18", "espcn_x3"):
        with pytest.warns(RuntimeWarning, match="estimated"):
            assert not to_program(skeleton(name), {}, Options(), Dump(None)).storage


@pytest.fixture(scope="module")
def small() -> list[Program]:
    cases = (case for kind in OPS for case in few_of(kind))
    return sorted(map(program_of_case, cases), key=lambda p: max(t.size for t in p.tensors.values()))


@pytest.mark.parametrize("kind", OPS)
def test_each_op_has_moments(small, kind):
    """Programs of one op, sizes of all kinds: what is computed from inputs within the bounds stays within them."""
    mine = [p for p in small if any(type(op) is kind for op in p.ops)][:4]
    assert mine
    for program in mine:
        estimates = estimated(program, {})
        for tensor, values in activations(program, [seeded(program, 4)], {}).items():
            assert values.largest <= estimates[tensor].bound * (1 + 1e-5), program.ops[0].nodes
            assert np.isfinite(estimates[tensor].largest)


def test_networks_of_many_time_steps_are_not_run():
    """NumPy takes them one after the other, however small they are."""
    net = Net(x=(40_000, 1, 2), start=(1, 1, 3))
    net.out(net("GRU", "x", net.normal(1, 9, 2), net.normal(1, 9, 3), None, None, "start", outputs=2, hidden_size=3)[0])
    with pytest.warns(RuntimeWarning, match="estimated from the weights, running it would be 4000. time steps"):
        program = to_program(net.model(), {}, Options(), Dump(None))
    assert all(program.tensors[op.y].dtype is DType.F16 for op in program.ops if isinstance(op, Rnn))
