"""`--quantize`: what bytes stand for, which products multiply them, and what a bound on the error and times make of it."""

from __future__ import annotations

import functools
import json
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_graphsurgeon as gs
import pytest
from hypothesis import given
from hypothesis import strategies as st
from onnx import numpy_helper

from tccompile.arch import ARCHS, Arch
from tccompile.dump import Dump
from tccompile.emit.pack import pack
from tccompile.errors import InputError, UsageError, VerificationError
from tccompile.fuse import fuse
from tccompile.ir import weights as recipes
from tccompile.ir.evaluate import evaluate_expr
from tccompile.ir.expr import call, cast, identity_view, load
from tccompile.ir.ops import Conv, Gemm, Mlp, Pointwise
from tccompile.ir.program import Program
from tccompile.ir.types import DType
from tccompile.ir.weights import TRANSFORMS, byte_scales
from tccompile.kernels import KERNELS
from tccompile.kernels.spec import Work
from tccompile.layout import lay_out
from tccompile.load.constants import decisive, held
from tccompile.load.model import load as load_model
from tccompile.load.model import sources
from tccompile.lower.graph import lower
from tccompile.options import Options
from tccompile.pipeline import Told, origin_of, read, to_program
from tccompile.plan.file import Plan
from tccompile.precision import ranges
from tccompile.precision.formats import precision
from tccompile.precision.metric import read_metric
from tccompile.precision.sensitivity import _not_rounded
from tccompile.quantize import calibration as files
from tccompile.quantize import grid, insert
from tccompile.quantize.calibration import Chosen, Purpose
from tccompile.quantize.choose import Entries, Steps, Timed, Times, choose, exchanged, joined, select, share_out, within
from tccompile.quantize.grid import Grid, grid_of, rounded, weight_error
from tccompile.quantize.insert import Rounded, Tensor
from tccompile.quantize.known import (
    ALL,
    ELSEWHERE,
    FLOATS,
    GATES,
    NAMED,
    OPERANDS,
    WAYS,
    Activation,
    Known,
    Off,
    Tried,
    estimated,
    find,
    made,
    stored,
)
from tccompile.quantize.margin import expected, of_new
from tccompile.quantize.observe import MOST, Values, observe, outputs, rarer, rooms
from tccompile.quantize.products import OPS, layers
from tccompile.quantize.smooth import factors, smoothed
from tccompile.refit.plan import refitted
from tccompile.rewrites import rewrite
from tccompile.schedule.choose import Choice, schedule
from tccompile.schedule.timings import NO_TIMINGS
from tccompile.stages import budget, quantize, times
from tccompile.stages.measure import inputs_of
from tccompile.stages.quantize import calibrated, formats_of
from tccompile.stages.quantized_notes import quantization_notes
from tests import random_graphs
from tests.networks import feeds, reference, relative_error
from tests.refit.common import bits, tuned, weights
from tests.rewrites.common import Net, check_recipes
from tests.tiers import thorough, usually

# --- Grids -----------------------------------------------------------------------------------------------------------


def test_values_that_are_not_negative_take_all_256_steps() -> None:
    x = np.abs(np.random.default_rng(0).standard_normal(10_000)).astype(np.float32)
    grid = grid_of(x)
    assert not grid.signed and grid.zero == 0
    assert 0.5 * x.max() / 255 < grid.scale <= x.max() / 255 * 1.0001


def test_a_zero_point_is_taken_where_it_halves_the_error() -> None:
    even = np.random.default_rng(0).standard_normal(10_000).astype(np.float32)
    assert grid_of(even).signed and grid_of(even).zero == 0
    skew = np.where(even > 0, 10 * even, 0.2 * even)
    grid = grid_of(skew)
    assert not grid.signed and 0 < grid.zero < 32
    assert abs(rounded(np.zeros(1, np.float32), grid)[0]) == 0


def test_outliers_are_cut_off_where_that_costs_less() -> None:
    x = np.random.default_rng(0).standard_normal(100_000).astype(np.float32)
    x[0] = 60.0
    grid = grid_of(x)
    assert grid.scale * 127 < 60.0
    uncut = np.clip(np.rint(x / (60 / 127)), -127, 127) * (60 / 127)
    assert relative_error(rounded(x, grid), x) < 0.8 * relative_error(uncut, x)
    assert grid.error == pytest.approx(relative_error(rounded(x, grid), x), rel=1e-3)


@pytest.mark.parametrize("x", [np.zeros(5, np.float32), np.full(3, 1e30, np.float32)], ids=["zeros", "beyond float32's squares"])
def test_a_grid_for_what_has_no_scale(x: np.ndarray) -> None:
    assert grid_of(x).scale == 1.0


@given(st.integers(1, 9), st.integers(1, 40), st.integers(1, 9), st.integers(0, 2**31))
def test_rounded_weights_keep_the_sums_that_activations_make_on_average(o: int, c: int, taps: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    w = rng.standard_normal((o, c, taps)).astype(np.float32)
    w[0] *= rng.integers(0, 2)
    means = (rng.standard_normal(c) * rng.integers(0, 2, c)).astype(np.float32)
    scales = byte_scales(w.reshape(o, -1))
    stored = TRANSFORMS["in_bytes"](w, scales, means)
    assert stored.dtype == np.int8 and stored.shape == w.shape and stored.min() >= -127
    exact = w / scales[:, None, None]
    inside = np.abs(exact) <= 127
    assert np.abs(stored - exact)[inside].max(initial=0) <= 1.0001
    nearest = np.clip(np.rint(exact), -127, 127)

    def off(q: np.ndarray) -> np.ndarray:
        return np.abs(np.einsum("oct,c->o", (q - exact).astype(np.float64), means))

    assert (off(stored) <= np.maximum(off(nearest), 0) + 1e-3).all()
    if c * taps >= 64 and np.abs(means).min() > 0.1:
        assert (off(stored) <= np.abs(means).max() / 2 + 1e-3).all()


def test_weights_are_cut_where_that_costs_less() -> None:
    w = np.random.default_rng(0).standard_normal((4, 40_000)).astype(np.float32)
    w[1, 7] = 6.0
    scales = byte_scales(w)
    assert scales[1] * 127 < 5.9 and (scales > 0).all()
    assert 5e-3 < weight_error(w) < 1.5e-2
    assert weight_error(np.zeros((3, 5), np.float32)) == 0.0


# --- Products --------------------------------------------------------------------------------------------------------


def rewritten(net: Net) -> gs.Graph:
    return rewrite(load_model(net.model()))


def test_products_that_may_be_in_bytes_and_why_others_may_not() -> None:
    net = Net(image=(1, 32, 8, 8), rows=(4, 32), other=(32, 16))
    conv = net("Conv", "image", net.normal(32, 32, 3, 3), pads=[1, 1, 1, 1])
    depthwise = net("Conv", conv, net.normal(32, 1, 3, 3), group=32)
    few = net("Conv", "image", net.normal(32, 8, 1, 1), group=4)
    gemm, matmul = net("Gemm", "rows", net.normal(16, 32), transB=1), net("MatMul", "rows", net.normal(32, 16))
    computed = net("MatMul", "rows", "other")
    stack = net("MatMul", "rows", net.normal(3, 32, 16))
    long = net("MatMul", net("Reshape", net("Concat", *["image"] * 20, axis=0), np.array([1, 40960])), net.normal(40960, 8))
    graph = rewritten(net.out(depthwise, few, gemm, matmul, computed, stack, long))
    found, refused = layers(graph)
    assert [(layer.name, layer.columns, layer.channels) for layer in found] == [
        ("n0", 0, 1),
        ("n1", 0, 1),
        ("n3", 0, 1),
        ("n4", 1, 1),
        ("n9", 1, 1),
    ]
    assert [layer.name for layer in found if layer.not_in_float8] == ["n1"]
    assert [layer.not_in_integers for layer in found] == [None] * 4 + ["its sums of 40960 products may exceed int32"]
    reasons = {name: reason.split(",")[0] for name, reason in refused.items()}
    assert reasons == {
        "n2": "it has 8 input channels; bytes are multiplied from 16 on",
        "n5": "its weights are computed",
        "n6": "its weights are several matrices",
    }


def test_convolutions_that_no_tensor_core_multiplies_in_bytes_are_not_named_as_if_one_did() -> None:
    net = Net(image=(1, 72, 6, 6), volume=(1, 32, 4, 4, 4))
    uneven = net("Conv", "image", net.normal(72, 24, 3, 3), group=3)
    even = net("Conv", net("Concat", "image", "image", axis=1), net.normal(36, 48, 1, 1), group=3)
    found, refused = layers(rewritten(net.out(uneven, even, net("Conv", "volume", net.normal(8, 32, 1, 1, 1)))))
    assert [layer.name for layer in found] == ["n2"]
    assert refused["n0"] == "its groups have 24 input channels; bytes are multiplied in multiples of 16"
    assert refused["n3"] == "it is a convolution of volumes"


@pytest.mark.parametrize("signed", [False, True])
def test_a_depthwise_convolution_is_in_bytes(signed: bool) -> None:
    """No zero point, which its padding would stand for; the scale is behind its sum."""
    net = Net(x=(1, 32, 8, 8))
    h = net("Conv", "x", net.normal(48, 32, 1, 1, scale=0.2))
    h = net("Mul", h, net("Sigmoid", h)) if signed else net("Relu", h)
    h = net("Relu", net("Conv", h, net.normal(48, 1, 3, 3), net.normal(48), pads=[1, 1, 1, 1], group=48))
    model = net.out(net("Conv", h, net.normal(32, 48, 1, 1, scale=0.2))).model()
    graph, runs = rewrite(load_model(model)), [feeds(model, seed) for seed in range(3)]
    known, _ = find(graph, runs, sources(model), lambda done, total: None)
    found = known.within([graph], (), ("int8",)).alone
    program = fuse(lower(rewrite(made(graph, *stored(found, {a.name: OPERANDS for a in found})))))
    first, op, _ = (op for op in program.ops if isinstance(op, Conv))
    read = DType.I8 if signed else DType.U8
    assert [program.tensors[t].dtype for t in (first.y, op.x, op.w, op.y)] == [read, read, DType.I8, DType.U8]
    assert known.tried[0].off < 0.1
    assert known.no_float8.keys() == known.within([graph], (), ("fp8",)).floats.keys()


def test_half_precision_is_refused_with_a_way_out() -> None:
    net = Net(dtype=np.float16, x=(4, 32))
    _, refused = layers(rewritten(net.out(net("MatMul", "x", net.normal(32, 16)))))
    assert refused == {"n0": "it is computed in float16: give the model in float32"}


# --- Graphs ----------------------------------------------------------------------------------------------------------


def residual(size: int = 12) -> Net:
    """Two convolutions with a sum around them, as residual networks have, pooled and multiplied by a matrix."""
    net = Net(x=(1, 32, size, size))
    a = net("Relu", net("Conv", "x", net.normal(32, 32, 3, 3, scale=0.06), net.normal(32, scale=0.1), pads=[1, 1, 1, 1]))
    b = net("Conv", a, net.normal(32, 32, 3, 3, scale=0.06), pads=[1, 1, 1, 1])
    c = net("Relu", net("Add", b, a))
    pooled = net("Flatten", net("GlobalAveragePool", c))
    return net.out(net("MatMul", pooled, net.normal(32, 40, scale=0.2)))


def runs_of(net: Net, count: int, seed: int = 3) -> list[dict[str, np.ndarray]]:
    rng = np.random.default_rng(seed)
    shapes = {i.name: [d.dim_value for d in i.type.tensor_type.shape.dim] for i in net.inputs}
    return [{n: rng.standard_normal(s).astype(np.float32) for n, s in shapes.items()} for _ in range(count)]


def calibration(net: Net, shared: bool) -> Chosen:
    graph, weights = rewritten(net), sources(net.model())
    found, _ = layers(graph)
    seen = observe(lower(graph), runs_of(net, 2), weights, {x.x.name: x.channels for x in found}, lambda: None)
    outputs_ = {t.name for t in (*graph.outputs, *graph.inputs)}
    tensors = {n: Tensor(grid_of(v.all()), v.means, shared and n not in outputs_) for n, v in seen.values.items()}
    return Chosen(tensors, {}, tuple(x.name for x in found), (), {}, Off(0.0, 0.0), 1, 0, {})


def grouped() -> Net:
    """A convolution whose groups see other channels' means, behind one with channels of very different sizes."""
    net = Net(x=(1, 32, 8, 8))
    sizes = np.exp2(net.rng.integers(-3, 4, 64)).astype(np.float32)
    h = net("Relu", net("Conv", "x", net.normal(64, 32, 1, 1) * sizes[:, None, None, None], net.normal(64) * sizes))
    return net.out(net("Conv", h, net.normal(48, 32, 3, 3), group=2))


def test_groups_keep_their_own_channels_means() -> None:
    net = grouped()
    found = chosen(net, 5e-1)
    assert found.layers == ("n0", "n2") and not found.smooth
    graph, rng = rewritten(net), np.random.default_rng(0)
    made = found.applied(graph)
    (stored,) = (n.inputs[1].inputs[0].inputs[0].values for n in made.nodes if n.name == "n2")
    w = next(n.inputs[1].values for n in graph.nodes if n.name == "n2")
    scales, means = byte_scales(w.reshape(48, -1)), found.tensors["t1"].means.astype(np.float32)
    halves = [TRANSFORMS["in_bytes"](w[i : i + 24], scales[i : i + 24], means[j : j + 32]) for i, j in ((0, 0), (24, 32))]
    np.testing.assert_array_equal(stored, np.concatenate(halves))
    x = rng.standard_normal((1, 32, 8, 8)).astype(np.float32)
    (exact,), (got,) = reference(net.model(), {"x": x}).values(), reference(gs.export_onnx(made), {"x": x}).values()
    assert relative_error(got, exact) < 5e-2


def test_what_is_put_together_of_parts_is_seen() -> None:
    net = Net(x=(4, 32))
    h = net("Concat", net("Relu", "x"), net("Neg", "x"), axis=1)
    net.out(net("MatMul", h, net.normal(64, 16)))
    found = chosen(net, 5e-2)
    assert found.layers == ("n3",) and found.tensors[h].grid.scale * 127 > 2 and len(found.tensors[h].means) == 64


@pytest.mark.parametrize("shared", [False, True])
def test_a_quantized_graph_is_onnx_and_its_bytes_are_multiplied(shared: bool) -> None:
    """ONNX Runtime computes the same from it; and so does the program, whose products are of bytes."""
    net = residual()
    graph, model = rewritten(net), net.model()
    before = Counter(n.op for n in graph.nodes)
    made = calibration(net, shared).applied(graph)
    assert Counter(n.op for n in graph.nodes) == before  # the graph itself stays
    exported = gs.export_onnx(made)
    onnx.checker.check_model(exported, full_check=True)
    (feeds,) = runs_of(net, 1, seed=9)
    (exact,), (expected,) = reference(model, feeds).values(), reference(exported, feeds).values()
    assert 1e-3 < relative_error(expected, exact) < 2e-2
    program = lower(rewrite(made))
    (got,) = outputs(program, [feeds], sources(model))
    assert relative_error(*got.values(), expected) <= 2e-3  # a byte that lies about halfway is one more or less
    products = [op for op in program.ops if program.products(op)]
    assert len(products) == 3
    assert {program.tensors[name].dtype for op in products for name in op.multiplied} <= {DType.I8, DType.U8}


def test_what_stays_in_floats_reads_floats() -> None:
    net = residual()
    whole = calibration(net, shared=False)
    one = Chosen(whole.tensors, {}, whole.layers[1:2], (), {}, Off(0.0, 0.0), 1, 0, {})
    ops = Counter(n.op for n in one.applied(rewritten(net)).nodes)
    assert ops["QuantizeLinear"] == 1 and ops["DequantizeLinear"] == 2


# --- Channels of different sizes ---------------------------------------------------------------------------------------

SIZES = np.exp2(np.random.default_rng(5).integers(-4, 5, 64)).astype(np.float32)


def normed() -> Net:
    """A layer norm with channels of very different sizes, and two products that make up for it."""
    net = Net(x=(64, 64))
    h = net("LayerNormalization", "x", SIZES, net.normal(64) * SIZES, axis=-1)
    return net.out(net("MatMul", h, net.normal(64, 32) / SIZES[:, None]), net("Gemm", h, net.normal(48, 64) / SIZES, transB=1))


def chained(last: str = "Relu") -> Net:
    """A product whose channels are of very different sizes, with its bias beside it, a function, and another product."""
    net = Net(x=(64, 64))
    h = net("Add", net("MatMul", "x", net.normal(64, 64, scale=0.1) * SIZES), net.normal(64) * SIZES)
    return net.out(net("MatMul", net(last, h), net.normal(64, 32) / SIZES[:, None]))


def convolutions() -> Net:
    net, sizes = Net(x=(1, 16, 9, 9)), SIZES[:32]
    h = net("Conv", "x", net.normal(32, 16, 3, 3, scale=0.1) * sizes[:, None, None, None], net.normal(32) * sizes)
    h = net("MaxPool", net("LeakyRelu", h, alpha=0.1), kernel_shape=[2, 2])
    return net.out(net("Conv", h, net.normal(24, 32, 3, 3) / sizes[:, None, None]))


@pytest.mark.parametrize(
    ("net", "name"), [(normed(), "t0"), (chained(), "t2"), (convolutions(), "t2")], ids=["norm", "product", "conv"]
)
def test_channels_are_made_alike_and_results_stay(net: Net, name: str) -> None:
    graph, model = rewritten(net), net.model()
    wanted = {x.x.name: x.channels for x in layers(graph)[0]}
    seen = observe(lower(graph), runs_of(net, 2), sources(model), wanted, lambda: None)
    found = factors(graph, seen.values)
    assert found.keys() == {name}
    assert (np.log2(found[name]) % 1 == 0).all()
    made, (feeds,) = smoothed(graph, found), runs_of(net, 1, seed=8)
    check_recipes(made, model)
    for ref, got in zip(reference(model, feeds).values(), reference(gs.export_onnx(made), feeds).values(), strict=True):
        assert relative_error(got, ref) <= 1e-6
    again = observe(lower(made), runs_of(net, 2), sources(model), wanted, lambda: None)
    spread = [np.std(np.log(m[m > 0])) for m in (v.values[name].magnitudes for v in (seen, again))]
    assert spread[1] < spread[0] / 2
    whole, plain = chosen(net, 1.0), Chosen({n: t for n, t in calibration(net, shared=True).tensors.items()}, {}, *rest(net))
    runs = runs_of(net, 6)[-1:]
    exact = [*reference(model, runs[0]).values()]
    errors = [
        max(map(relative_error, reference(gs.export_onnx(c.applied(rewritten(net))), runs[0]).values(), exact))
        for c in (whole, plain)
    ]
    assert whole.smooth.keys() == {name} and errors[0] < 0.6 * errors[1]


def rest(net: Net) -> tuple:
    """What a calibration has beside tensors and factors, with all layers in bytes."""
    return tuple(x.name for x in layers(rewritten(net))[0]), (), {}, Off(0.0, 0.0), 1, 0, {}


def test_channels_stay_as_they_are_where_others_see_them() -> None:
    """Behind a function that no factor passes, as outputs of the model, and where not only products read them."""
    gelu, shown, added = chained("Gelu"), chained(), normed()
    shown.out("t2")
    added.out(added("Add", "t0", "x"))
    alike = Net(x=(64, 64))
    alike.out(alike("MatMul", alike("LayerNormalization", "x", np.ones(64, np.float32), axis=-1), alike.normal(64, 32)))
    for net in (gelu, shown, added, alike):
        graph = rewritten(net)
        wanted = {x.x.name: x.channels for x in layers(graph)[0]}
        assert not factors(graph, observe(lower(graph), runs_of(net, 2), sources(net.model()), wanted, lambda: None).values)


@pytest.mark.parametrize("pixels", [32, 40])
def test_products_along_different_axes_of_an_activation(pixels: int) -> None:
    """Its channels of one are not those of the other: no factors, and only one of them in bytes."""
    net, sizes = Net(x=(2, 32, pixels)), np.exp2(np.arange(32) % 9 - 4).astype(np.float32)
    h = net("Relu", net("Conv", "x", net.normal(32, 32, 1) * sizes[:, None, None], net.normal(32) * sizes))
    net.out(net("Conv", h, net.normal(24, 32, 1)), net("MatMul", h, net.normal(pixels, 16)))
    found = chosen(net, 1.0)
    assert found.layers == ("n0", "n2") and not found.smooth
    assert found.floats == {"n3": "it reads along another axis what another product has in bytes"}
    assert len(found.tensors[h].means) == 32
    (feeds,) = runs_of(net, 1, seed=9)
    made = gs.export_onnx(found.applied(rewritten(net)))
    for got, exact in zip(*(reference(m, feeds).values() for m in (made, net.model())), strict=True):
        assert relative_error(got, exact) < 3e-2


def test_channels_that_are_always_zero_have_no_size() -> None:
    net, sizes = Net(x=(16, 64)), np.where(np.arange(64) % 5, 0, np.exp2(np.arange(64) % 9)).astype(np.float32)
    h = net("LayerNormalization", "x", sizes, axis=-1)
    net.out(net("MatMul", h, net.normal(64, 32)))
    graph = rewritten(net)
    seen = observe(lower(graph), runs_of(net, 2), sources(net.model()), {h: 1}, lambda: None)
    with np.errstate(all="raise"):
        (f,) = factors(graph, seen.values).values()
    assert (np.log2(f) % 1 == 0).all()


# --- What is moved between products ------------------------------------------------------------------------------------


def branches() -> Net:
    """As in detectors: split, convolutions of a half with a sum around them, and all parts joined again; pooled and resized."""
    net = Net(x=(1, 32, 8, 8))

    def conv(x: str, o: int, i: int, k: int = 1) -> str:
        w = net.normal(o, i, k, k, scale=(2 / (i * k * k)) ** 0.5)
        return net("Relu", net("Conv", x, w, net.normal(o, scale=0.1), pads=[k // 2] * 4))

    first, second = net("Split", conv("x", 64, 32), axis=1, num_outputs=2, outputs=2)
    inner = net("Add", conv(conv(second, 32, 32, 3), 32, 32, 3), second)
    joined = net("Concat", first, second, inner, axis=1)
    deep = net("MaxPool", conv(joined, 32, 96), kernel_shape=[2, 2], strides=[2, 2])
    wide = net("Resize", deep, None, np.array([1, 1, 2, 2], np.float32), mode="nearest")
    return net.out(conv(net("Concat", wide, joined, axis=1), 16, 128))


def test_what_is_moved_has_one_scale_and_is_moved_in_bytes() -> None:
    net = branches()
    graph, model = rewritten(net), net.model()

    def times(made: gs.Graph) -> list[tuple[tuple[str, ...], float]]:
        p = fuse(lower(rewrite(made.copy())))
        return [(op.nodes, 4.0 if any(p.tensors[n].dtype is DType.F32 for n in op.multiplied) else 1.0) for op in p.ops]

    found = picked(net, 1.0, times)
    assert not found.floats and len(found.layers) == 5
    scales = Counter((t.grid.scale, t.grid.zero) for t in found.tensors.values() if t.tied)
    assert max(scales.values()) >= 6  # what is split, joined, and joined with what is resized
    made, (feeds,) = found.applied(graph), runs_of(net, 1, seed=9)
    exact, got = (reference(m, feeds).values() for m in (model, gs.export_onnx(made)))
    assert 1e-4 < relative_error(*got, *exact) < 5e-2
    graph = rewrite(made)
    ops = Counter(
        (n.op, str(n.inputs[0].dtype)) for n in graph.nodes if n.op in ("Concat", "MaxPool", "Resize", "Slice", "Split")
    )
    assert set(ops) <= {(op, "uint8") for op in ("Concat", "MaxPool", "Resize", "Slice", "Split")} and ops["Concat", "uint8"] == 2
    check_recipes(graph, model)
    onnx.checker.check_model(gs.export_onnx(graph), full_check=True)
    (again,) = outputs(lower(graph), [feeds], sources(model))
    assert relative_error(*again.values(), *got) <= 2e-3
    program, plain = fuse(lower(graph)), fuse(lower(rewritten(net)))
    assert sum(isinstance(op, Pointwise) for op in program.ops) <= sum(isinstance(op, Pointwise) for op in plain.ops)
    assert relative_error(*outputs(program, [feeds], sources(model))[0].values(), *got) <= 2e-3


@pytest.mark.parametrize("gain", [True, pytest.param(False, marks=thorough)])
def test_what_is_joined_for_ops_of_single_elements_is_in_bytes_if_that_is_faster(gain: bool) -> None:
    """A densely connected block: each layer reads all results before it, scaled anew."""
    net = Net(x=(1, 32, 8, 8))

    def conv(x: str, o: int, i: int) -> str:
        return net("Conv", x, net.normal(o, i, 3, 3, scale=(2 / (9 * i)) ** 0.5), pads=[1] * 4)

    parts = [conv("x", 32, 32)]
    for k in range(1, 3):
        h = net("Concat", *parts, axis=1) if k > 1 else parts[0]
        parts.append(conv(net("Relu", net("Mul", h, net.normal(32 * k, 1, 1))), 32, 32 * k))
    joined = net("Concat", *parts, axis=1)
    net.out(conv(net("Relu", net("Mul", joined, net.normal(96, 1, 1))), 16, 96))

    def times(made: gs.Graph) -> list[tuple[tuple[str, ...], float]]:
        p = fuse(lower(rewrite(made.copy())))
        wide = [any(p.tensors[n].dtype is DType.F32 for n in op.multiplied or op.inputs[:1]) for op in p.ops]
        return [(op.nodes, 3.0 if w and (gain or op.multiplied) else 1.0) for op, w in zip(p.ops, wide, strict=True)]

    found = picked(net, 1.0, times)
    assert len(found.layers) == 4 and (joined in found.tensors) == gain
    scales = {found.tensors[t].grid.scale for t in (*parts, joined) if gain}
    assert len(scales) == gain
    made, (feeds,) = found.applied(rewritten(net)), runs_of(net, 1, seed=9)
    exact, got = (reference(m, feeds).values() for m in (net.model(), gs.export_onnx(made)))
    assert 1e-4 < relative_error(*got, *exact) < 5e-2
    program = fuse(lower(rewrite(made)))
    assert [op for op in program.ops if isinstance(op, Pointwise) and program.tensors[op.inputs[0]].dtype.bits == 8] or not gain


def test_activations_of_other_sizes_are_not_tied() -> None:
    net = Net(x=(1, 16, 8, 8))
    big = net("Conv", "x", net.normal(16, 16, 1, 1, scale=30))
    small = net("Conv", "x", net.normal(16, 16, 1, 1, scale=0.1))
    joined = net("Concat", big, small, axis=1)
    net.out(net("Conv", joined, net.normal(16, 32, 1, 1)))
    assert not [t for t in chosen(net, 1.0).tensors.values() if t.tied]


# --- Choices ---------------------------------------------------------------------------------------------------------


def steps(graph: gs.Graph, floats: float, bytes_: float) -> list[tuple[tuple[str, ...], float]]:
    """Each product takes so long in floats, and so long in bytes."""
    quantized = {n.name for n in graph.nodes if n.op in OPS and n.inputs[1].inputs}
    return [((n.name,), bytes_ if n.name in quantized else floats) for n in graph.nodes if n.op in OPS]


def picked(net: Net, bound: float, times: Callable[[gs.Graph], Steps], count: int = 4, fp32: tuple[str, ...] = ()) -> Chosen:
    """What is chosen by so many inputs, measured with them."""
    graph, weights, runs = rewritten(net), sources(net.model()), runs_of(net, count)
    known, measure = find(graph, runs, weights, lambda done, total: None)
    return choose(known.within([graph], fp32, ("int8",)), [graph], bound, on_one(times), measure)[0]


def on_one(times: Callable[[gs.Graph], Steps]) -> Times:
    """Times of one generation."""
    return lambda graph: {"sm_90a": times(graph)}


def chosen(net: Net, bound: float, floats: float = 2.0, bytes_: float = 1.0, count: int = 6) -> Chosen:
    return picked(net, bound, lambda g: steps(g, floats, bytes_), count)


def test_all_products_are_in_bytes_where_the_error_allows() -> None:
    found = chosen(residual(), 5e-2)
    assert found.layers == ("n0", "n2", "n7") and not found.floats
    assert found.times["sm_90a"] == (6.0, 3.0) and found.held == 1 and found.runs == 6
    net = residual()
    made, feeds = found.applied(rewritten(net)), runs_of(net, 6)[-1]
    (exact,), (got,) = reference(net.model(), feeds).values(), reference(gs.export_onnx(made), feeds).values()
    assert found.off.largest >= relative_error(got, exact) * 0.95 and found.off.largest <= 2e-2


def test_a_bound_keeps_those_in_floats_that_cost_most_and_says_so() -> None:
    whole = chosen(residual(), 5e-2)
    some = chosen(residual(), 0.7 * whole.off.expected)
    assert 0 < len(some.layers) < 3 and some.off.expected <= 0.7 * whole.off.expected
    assert {*some.floats.values()} == {"the error would be above the bound"}
    assert {*some.layers, *some.floats} == {"n0", "n2", "n7"}
    none = chosen(residual(), 1e-6)
    assert not none.layers and none.off.expected == 0.0 and none.times["sm_90a"] == (6.0, 6.0)


@pytest.mark.parametrize(("extra", "kept"), [(0.5, 4), (5.0, 2), (40.0, 0)])
def test_some_are_kept_where_all_together_are_slower(extra: float, kept: int) -> None:
    """A step that no activation is known to cause: it comes with the third product in bytes, or, for more, with the first."""
    net, h = Net(x=(16, 64)), "x"
    for _ in range(4):
        h = net("Relu", net("MatMul", h, net.normal(64, 64, scale=0.17)))
    net.out(h)

    def times(made: gs.Graph) -> list[tuple[tuple[str, ...], float]]:
        count = sum(bool(n.inputs[1].inputs) for n in made.nodes if n.op == "MatMul")
        first = 2 if extra < 10 else 0
        return [*steps(made, 2.0, 1.0), (("other",), extra if count > first else 0.0)]

    found = picked(net, 1.0, times)
    assert len(found.layers) == kept and len(found.floats) == 4 - kept
    assert found.times["sm_90a"][1] == {4: 4.5, 2: 6.0, 0: 8.0}[kept]


@pytest.mark.parametrize(("own", "kept"), [(2.1, ("n0", "n2", "n4", "n6")), (6.0, ("n0", "n6"))])
def test_what_is_between_bytes_is_in_bytes_if_all_are_faster_by_it(own: float, kept: tuple[str, ...]) -> None:
    """The third product is no faster in bytes, but one in bytes before one in floats takes four times as long. If the third one
    is far slower, both stay in floats."""
    net, h = Net(x=(16, 64)), "x"
    for _ in range(4):
        h = net("Relu", net("MatMul", h, net.normal(64, 64, scale=0.17)))
    net.out(h)

    def times(made: gs.Graph) -> list[tuple[tuple[str, ...], float]]:
        found = steps(made, 2.0, 1.0)
        some = {nodes[0]: time for nodes, time in found}
        some["n4"] = own if some["n4"] == 1.0 else 2.0
        some["n2"] += 3.0 if some["n2"] == 1.0 and some["n4"] == 2.0 else 0.0
        return [((name, f"n{int(name[1:]) + 1}"), time) for name, time in some.items()]

    assert picked(net, 1.0, times).layers == kept


def test_nothing_is_in_bytes_where_that_is_no_faster() -> None:
    found = chosen(residual(), 5e-2, bytes_=2.0)
    assert not found.layers and {*found.floats.values()} == {"bytes are estimated to be no faster"}


def test_products_of_one_name_in_branches_are_two() -> None:
    net, weights = Net(x=(16, 64)), {n: np.eye(64, dtype=np.float32) + i for i, n in enumerate(("v", "w"))}
    for y, w in (("then", "v"), ("else", "w")):
        net.nodes.append(onnx.helper.make_node("MatMul", ["x", w], [y], "product"))
    ends = [[onnx.helper.make_tensor_value_info(y, onnx.TensorProto.FLOAT, (16, 64))] for y in ("then", "else")]
    branches = [onnx.helper.make_graph([net.nodes.pop(0)], y[0].name, [], y) for y in ends]
    net.weights = [onnx.numpy_helper.from_array(w, n) for n, w in weights.items()]
    total = net("Greater", net("ReduceSum", "x", keepdims=0), np.float32(0))
    h = net("If", total, then_branch=branches[0], else_branch=branches[1])
    net.nodes.append(onnx.helper.make_node("MatMul", [h, "v"], ["y"], "product"))
    found = chosen(net.out("y"), 5e-2)
    assert sorted((*found.layers, *found.floats)) == ["product", "product~1", "product~2"]
    found.applied(rewritten(net))


@pytest.mark.parametrize(("count", "held"), [(1, 0), (2, 1), (8, 2), (40, 8)])
def test_what_is_stated_is_the_largest_error_of_up_to_eight_inputs(count: int, held: int) -> None:
    net = Net(x=(1, 32))
    net.out(net("MatMul", "x", net.normal(32, 16)))
    found, graph = chosen(net, 2e-1, count=count), rewritten(net)
    assert found.layers and found.held == held and found.runs == min(count, 8)
    made, runs = found.applied(graph), runs_of(net, count)[-8:]
    exact, got = (outputs(lower(g), runs, sources(net.model())) for g in (graph, made))
    assert found.off.largest == pytest.approx(max(relative_error(a["t0"], b["t0"]) for a, b in zip(got, exact, strict=True)))


def test_a_choice_that_eight_inputs_leave_open_is_run_on_more() -> None:
    whole = chosen(residual(), 5e-2, count=40)
    assert len(whole.layers) == 3 and whole.runs == 8
    assert whole.off.largest < 0.85 * whole.off.expected
    more = chosen(residual(), 0.9 * whole.off.expected, count=40)
    assert len(more.layers) == 3 and more.runs == 32 and more.off.expected < 0.9 * whole.off.expected
    assert len(chosen(residual(), 0.9 * whole.off.expected, count=8).layers) < 3
    assert len(chosen(residual(), 0.5 * whole.off.expected, count=40).layers) < 3


def test_halves_are_measured_by_as_many_inputs_as_bytes_were(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(quantize, "step_times", lambda graph, archs, **_: {archs[0]: eight(graph)})
    measured, of_runs = list[int](), budget.within

    def within(program: Program, bound: float, raising: Any, spreads: Any, runs: Any, *more: Any) -> Any:
        measured.append(len(runs))
        return of_runs(program, bound, raising, spreads, runs, *more)

    monkeypatch.setattr(budget, "within", within)
    net, told = perceptron(8, 64), Told()
    options = Options(archs=("sm_90a",), quantize="int8", calibrate=saved(net, tmp_path / "d.npz", 40))
    opened = read(net.model())
    loose = calibrated(opened, options)
    for found, allowed in ((loose, 5e-2), (None, 0.95 * loose.off.expected)):
        tight = replace(options, max_error=allowed)
        found = found or calibrated(opened, tight)
        program = to_program(opened, {}, tight, Dump(None), told=told, calibration=found)
        assert len(found.layers) == 2 and found.runs == measured[-1]
        assert "nothing had to be raised for it" in told.notes[-1] and not program.storage
    assert measured == [8, 32]


def test_inputs_that_are_not_finite_keep_a_layer_in_floats() -> None:
    net = Net(x=(4, 32))
    net.out(net("MatMul", net("Log", "x"), net.normal(32, 16)))
    found = chosen(net, 5e-2)
    assert not found.layers and found.floats == {"n1": "its input is not finite, or too large to be squared"}


def test_inputs_that_are_zero_or_too_large_keep_a_layer_in_floats() -> None:
    net = Net(x=(4, 32))
    zero, large = (net("Mul", "x", np.float32(f)) for f in (0, 1e25))
    net.out(*(net("MatMul", h, net.normal(32, 16)) for h in (zero, large)))
    assert chosen(net, 5e-2).floats == {
        "n2": "its input is zero in all that it was calibrated with",
        "n3": "its input is not finite, or too large to be squared",
    }


def test_what_the_user_wants_in_fp32_is_not_in_bytes() -> None:
    """Nor does it read bytes that others of its activation's readers read."""
    net = residual()
    found = picked(net, 5e-2, lambda g: steps(g, 2.0, 1.0), fp32=("n[2-3]",))
    assert found.layers == ("n0", "n7") and found.floats == {"n2": NAMED}
    net = Net(x=(16, 64))
    h = net("Relu", net("MatMul", "x", net.normal(64, 64, scale=0.2)))
    net.out(net("MatMul", h, net.normal(64, 64)), net("MatMul", h, net.normal(64, 32)), net("Add", h, h))
    known, _ = find(graph := rewritten(net), runs_of(net, 2), sources(net.model()), lambda done, total: None)
    for fp32, own, ways in (((), ("n2", "n3"), (FLOATS, OPERANDS, ALL)), (("n3",), ("n2",), (FLOATS, OPERANDS))):
        (last,) = (a for a in known.within([graph], fp32, ("int8",)).alone if a.name == h)
        assert last.layers == own and last.ways == ways


def test_a_node_in_fp32_that_writes_or_multiplies_bytes_is_no_contradiction(tmp_path: Path) -> None:
    net = residual()
    options = Options(archs=("sm_90a",), quantize="int8", calibrate=saved(net, tmp_path / "d.npz"), fp32=("n0", "n1"))
    for names in (("n0", "n2", "n7"), ("n2",)):
        whole = calibration(net, shared=True)
        program = to_program(read(net.model()), {}, options, Dump(None), calibration=replace(whole, layers=names))
        assert sum(program.products(op) > 0 for op in program.ops) == 3


def test_a_step_belongs_to_the_product_whose_sums_it_makes() -> None:
    """Also where what is made of the sums has become another step, with the product's own name."""
    found = Activation("x", ("n0",), HOW, (FLOATS, OPERANDS), (0, 1, 1, 1, 1))
    made = [(("n0/ConvInteger",), 3.0), (("n0/Cast", "n0", "n1"), 2.0), (("n5",), 7.0)]
    assert share_out(made, [found], {"x": OPERANDS}, {}) == {"x": 5.0}


@pytest.mark.parametrize("way", [FLOATS, OPERANDS])
def test_a_step_that_makes_what_is_stored_in_bytes_counts_in_floats_too(way: int) -> None:
    """Else a norm's whole time would be what its bytes cost; but not a step that is another product."""
    grid = Tensor(grid_of(np.ones(4, np.float32)), np.zeros(4), shared=False)
    x, y = (Activation(n, (f"of {n}",), ({}, *[{n: grid}] * 4), (FLOATS, OPERANDS), (0, 1, 1, 1, 1)) for n in "xy")
    made = [(("norm",), 4.0), (("of x",), 3.0), (("of y",), 2.0)]
    assert share_out(made, [x, y], {"x": way, "y": way}, {"x": ("norm",), "y": ("of x",)}) == {"x": 7.0, "y": 2.0}


def test_what_is_only_moved_is_made_by_the_layer_before() -> None:
    """It is that one which stores bytes then, as a first layer before a max pool does."""
    net = Net(image=(1, 3, 8, 8))
    pooled = net("MaxPool", net("Relu", net("Conv", "image", net.normal(32, 3, 3, 3))), kernel_shape=[2, 2])
    graph = rewritten(net.out(net("Conv", pooled, net.normal(32, 32, 1, 1))))
    entries = Entries([graph], lambda graph: {"sm_90a": []})
    relu, pool = (next(n for n in graph.nodes if n.op == op) for op in ("Relu", "MaxPool"))
    assert entries.makers[pool.outputs[0].name] == (pool.name, relu.name)


def test_products_that_are_one_step_in_floats_are_chosen_together() -> None:
    ways = {"a": (OPERANDS,), "b": (OPERANDS, ALL), "c": (OPERANDS,)}
    parts = [Activation(n, (f"of {n}",), HOW, (FLOATS, *w), (0, 1, 4, 9, 9)) for n, w in ways.items()]
    one, other = joined(parts, [(("of a", "of b"), 3.0), (("of c",), 2.0)])
    assert one.layers == ("of a", "of b") and one.ways == (FLOATS, OPERANDS, ALL) and one.squares == (0, 2, 5, 18, 18)
    assert other == parts[2]


HOW = tuple({} for _ in WAYS)  # type: ignore[var-annotated]
"""Nothing that is stored in any way."""


def activation(name: str, squares: list[float], times: list[float], ways: tuple[int, ...] = (FLOATS, OPERANDS, ALL)) -> Timed:
    return Timed(Activation(name, (), HOW, ways, tuple(squares)), tuple(times))


def test_selection_spends_the_error_where_it_saves_most() -> None:
    given_ = [
        activation("cheap", [0, 1e-4, 2e-4], [10, 8, 4]),
        activation("dear", [0, 1e-2, 1e-2], [10, 9, 9]),
        activation("slower", [0, 1e-9, 1e-9], [10, 11, 12]),
        activation("operand", [0, 1e-4, 1e-4], [10, 5, 0], (FLOATS, OPERANDS)),
    ]
    assert select(given_, 1.0) == {"cheap": ALL, "dear": OPERANDS, "slower": FLOATS, "operand": OPERANDS}
    assert select(given_, math.sqrt(3e-4)) == {"cheap": ALL, "dear": FLOATS, "slower": FLOATS, "operand": OPERANDS}
    assert select(given_, math.sqrt(2e-4)) == {"cheap": FLOATS, "dear": FLOATS, "slower": FLOATS, "operand": OPERANDS}
    assert not any(select(given_, 1e-9).values())


def test_how_many_are_within_the_bound_is_found_by_running_them() -> None:
    """However far off estimates are: here one activation is said to cost a million times what it does."""
    found = [activation(f"x{i}", [0, 1e-4 * (i + 1), 1], [10, 9, 9], (FLOATS, OPERANDS)) for i in range(23)]
    found.append(activation("x23", [0, 1e8, 1], [10, 9, 9], (FLOATS, OPERANDS)))
    runs = list[int]()

    def error(choice: Mapping[str, int]) -> float:
        runs.append(sum(map(bool, choice.values())))
        return 0.01 * runs[-1]

    for bound in (0.055, 0.125, 0.235):
        choice, measured = within(found, bound, error)
        count = sum(map(bool, choice.values()))
        assert 100 * bound - 1.5 <= count <= 100 * bound and measured == pytest.approx(0.01 * count)
        assert all(choice[t.name] for t in found[:count])
    assert len(runs) <= 24
    assert within(found, 1e-3, error) == ({t.name: FLOATS for t in found}, 0.0)


class TwoSteps:
    """In place of `Entries`: two activations, each with a step of its own."""

    beside: Mapping[str, set[str]] = {}

    def __init__(self, times: Mapping[str, Sequence[float]]) -> None:
        self._times = times

    def steps(self, _: object, choice: Mapping[str, int]) -> list[tuple[tuple[str, ...], float]]:
        return [((name,), own[choice[name]]) for name, own in self._times.items()]

    def time(self, _: object, choice: Mapping[str, int]) -> float:
        return sum(time for _, time in self.steps(_, choice))


def test_a_choice_at_the_bound_gives_up_what_saves_little_for_what_saves_more() -> None:
    """Both are beyond the bound together: each alone is within it."""
    times, squares = {"little": [10, 9, 9], "more": [10, 5, 5]}, {"little": [0, 1e-3, 1e-3], "more": [0, 1.5e-3, 1.5e-3]}
    found = [Timed(Activation(n, (n,), HOW, (FLOATS, ALL), tuple(squares[n])), tuple(times[n])) for n in times]
    entries: Any = TwoSteps(times)
    errors = list[float]()

    def error(choice: Mapping[str, int]) -> float:
        errors.append(math.sqrt(sum(squares[name][way] for name, way in choice.items())))
        return errors[-1]

    choice = exchanged(found, {"little": ALL, "more": FLOATS}, 600.0, math.sqrt(2e-3), entries, error)
    assert choice == {"little": FLOATS, "more": ALL}
    assert len(errors) <= 3


def test_gains_say_what_moves_the_outputs() -> None:
    """Of y = relu(x @ w) twice, an error in the first sums moves the second about as much as itself; a large addend hides it."""
    net = Net(x=(16, 64))
    h = net("Relu", net("MatMul", "x", net.normal(64, 64, scale=0.125)))
    last = net("MatMul", h, net.normal(64, 64, scale=0.125))
    plain, hidden = rewritten(net.out(last)), Net(x=(16, 64))
    h = hidden("Relu", hidden("MatMul", "x", net.normal(64, 64, scale=0.125)))
    hidden.out(hidden("Add", hidden("MatMul", h, net.normal(64, 64, scale=0.125)), np.full((1, 64), 100, np.float32)))
    gains = [
        observe(lower(g), runs_of(net, 1), sources(n.model()), {}, lambda: None).gains["t1"]
        for g, n in ((plain, net), (rewritten(hidden), hidden))
    ]
    assert 0.5 < gains[0] < 2 and gains[1] < 0.05


def test_gains_do_not_add_up_where_nothing_grows() -> None:
    """Of x · sigmoid(x) again and again, and of three parts of one tensor: what noise moves results by, measured."""
    net, rng, h = Net(x=(64, 64)), np.random.default_rng(1), "x"
    ws = [net.normal(64, 64, scale=0.2) for _ in range(6)]
    for w in ws:
        h = net("MatMul", h, w)
        h = net("Mul", h, net("Sigmoid", h))
        h = net("Concat", *net("Split", h, axis=1, num_outputs=2, outputs=2), axis=1)
    net.out(h)
    gains = observe(lower(rewritten(net)), runs_of(net, 1), sources(net.model()), {}, lambda: None).gains

    def behind(y: np.ndarray) -> np.ndarray:
        for w in (*ws[1:], None):
            y = y / (1 + np.exp(-y))
            y = y if w is None else y @ w
        return y

    first = runs_of(net, 1)[0]["x"] @ ws[0]
    moved = relative_error(behind(first * (1 + 1e-3 * rng.standard_normal(first.shape))), behind(first)) / 1e-3
    assert moved / 1.7 < gains["t0"] < 1.7 * moved


def squeeze(factor: str = "x") -> Net:
    """Two products of a vector, which are one step in floats: of a squeeze and excitation, if they multiply the image."""
    net = Net(x=(1, 64, 7, 7))
    h = net("GlobalAveragePool", net("Relu", "x"))
    h = net("Relu", net("Conv", h, net.normal(32, 64, 1, 1, scale=0.1), net.normal(32)))
    return net.out(net("Mul", factor, net("Sigmoid", net("Conv", h, net.normal(64, 32, 1, 1, scale=0.2)))))


@pytest.mark.parametrize("layers_", [("n2",), ("n4",), ("n2", "n4"), ()])
def test_two_products_of_which_one_is_in_bytes_are_two_steps(layers_: tuple[str, ...]) -> None:
    net = squeeze()
    made = replace(calibration(net, shared=False), layers=layers_).applied(rewritten(net))
    program = lay_out(precision(fuse(lower(rewrite(made))), "fp16", {}, ()))
    assert [isinstance(op, Mlp) for op in program.ops].count(True) == (not layers_)
    for arch in ("sm_75", "sm_90a"):
        assert len(schedule(program, ARCHS[arch])) == len(program.ops)


def test_the_step_that_is_lost_counts() -> None:
    """One product in bytes seems to save half of what was half of a common step, and others save more, and less."""
    net = squeeze("t1")
    net.outputs.clear()
    first = net("Conv", "t6", net.normal(64, 64, 1, 1))
    net.out(net("Conv", first, net.normal(64, 64, 1, 1)))

    def times(made: gs.Graph) -> list[tuple[tuple[str, ...], float]]:
        own = {n.name: bool(n.inputs[1].inputs) for n in made.nodes if n.op == "Conv"}
        both = [(("n2",), 1.0 if own["n2"] else 3.0), (("n4",), 4.0)] if own["n2"] or own["n4"] else [(("n2", "n4"), 4.0)]
        return [*both, (("n7",), 1.0 if own["n7"] else 4.0), (("n8",), 1.0 if own["n8"] else 1.5)]

    found = picked(net, 1.0, times)
    assert found.layers == ("n7", "n8") and found.times["sm_90a"] == (9.5, 6.0)


def downsampled() -> Net:
    """A residual block whose other branch is a product, too."""
    net = Net(x=(1, 32, 12, 12))

    def conv(x: str, o: int, i: int, k: int, stride: int = 1) -> str:
        w, pads, strides = net.normal(o, i, k, k, scale=(2 / (i * k * k)) ** 0.5), [k // 2] * 4, [stride, stride]
        return net("Conv", x, w, net.normal(o, scale=0.1), pads=pads, strides=strides)

    h = net("Relu", conv("x", 32, 32, 3))
    y = net("Add", conv(net("Relu", conv(h, 32, 32, 3, 2)), 64, 32, 3), conv(h, 64, 32, 1, 2))
    return net.out(conv(net("Relu", y), 32, 64, 1))


@pytest.mark.parametrize(
    ("slower", "bound", "names"),
    usually([((), 1.0, ["t4", "t5"]), (("t4",), 1.0, ["t5"]), ((), 0.0, []), (("t4", "t5"), 1.0, [])], 1, 2),
    ids=["both", "the one that is stored", "beyond the bound", "neither is faster"],
)
def test_what_is_only_added_to_another_result_is_in_bytes_too(slower: tuple, bound: float, names: list[str]) -> None:
    net = downsampled()

    def times(made: gs.Graph) -> list[tuple[tuple[str, ...], float]]:
        found = {n.inputs[0].name for n in made.nodes if n.op == "QuantizeLinear"} & {"t4", "t5"}
        return [*steps(made, 2.0, 1.0), (("n6",), 1.0 + sum(0.5 if t in slower else -0.25 for t in found))]

    plain = picked(net, 1.0, lambda g: steps(g, 2.0, 1.0))
    assert len(plain.layers) == 5 and not {"t4", "t5"} & plain.tensors.keys()
    found = picked(net, bound or plain.off.expected * 1.0001, times)
    assert found.layers == plain.layers and sorted({"t4", "t5"} & found.tensors.keys()) == names
    assert found.times["sm_90a"][1] == 6.0 - 0.25 * len(names) and (found.off.largest > plain.off.largest) == bool(names)
    (feeds,), model = runs_of(net, 1, seed=9), net.model()
    made = found.applied(rewritten(net))
    (exact,), (expected,) = reference(model, feeds).values(), reference(gs.export_onnx(made), feeds).values()
    program = fuse(lower(rewrite(made)))
    assert relative_error(expected, exact) < 3e-2
    assert relative_error(*outputs(program, [feeds], sources(model))[0].values(), expected) <= 2e-3
    stored = [program.tensors[op.y].dtype for op in program.ops if program.products(op)]
    assert Counter(t.bits for t in stored) == ({8: 4, 32: 1} if "t5" in names else {8: 3, 32: 2})
    of_floats = replace(found, layers=(), smooth={}, tensors={n: t for n, t in found.tensors.items() if n == "t5"})
    program = fuse(lower(rewrite(of_floats.applied(rewritten(net)))))
    stored = [program.tensors[op.y].dtype.bits for op in program.ops if program.products(op)]
    assert sorted(stored) == [8 if "t5" in names else 32, 32, 32, 32, 32]


@pytest.mark.parametrize("faster", [True, False])
def test_what_is_multiplied_by_numbers_made_of_its_means_is_in_bytes_too(faster: bool) -> None:
    net = Net(x=(1, 32, 12, 12))
    image = net("Relu", net("Conv", "x", net.normal(32, 32, 1, 1, scale=0.2)))
    gate = net("Sigmoid", net("Conv", net("GlobalAveragePool", image), net.normal(32, 32, 1, 1, scale=0.2)))
    net = net.out(net("Conv", net("Mul", image, gate), net.normal(32, 32, 1, 1, scale=0.2)))

    def times(made: gs.Graph) -> Steps:
        stored = any(n.op == "QuantizeLinear" and n.inputs[0].name == image for n in made.nodes)
        return [*steps(made, 2.0, 1.0), (("n5",), 0.5 if stored == faster else 1.0)]

    found = picked(net, 1.0, times)
    assert len(found.layers) == 2 and (image in found.tensors) == faster
    assert [*found.floats.values()] == [GATES]


def test_products_that_are_one_launch_with_a_sum_in_bytes_are_chosen_with_it() -> None:
    """Two products whose sum is a launch of its own in bytes only where what is added is stored so: it is not what they cost."""

    def times(made: gs.Graph) -> list[tuple[tuple[str, ...], float]]:
        own = {nodes[0]: us for nodes, us in steps(made, 2.0, 1.0)}
        both = 3.0 if own["n4"] + own["n5"] == 4.0 else 4.0
        if any(n.op == "QuantizeLinear" and n.inputs[0].name == "t5" for n in made.nodes):
            both = 1.0
        return [*(((n,), own[n]) for n in ("n0", "n2", "n8")), (("n4", "n5"), both)]

    found = picked(downsampled(), 1.0, times)
    assert sorted(found.layers) == ["n0", "n2", "n4", "n5", "n8"]
    assert "t5" in found.tensors and found.times["sm_90a"] == (9.0, 4.0)


@pytest.mark.parametrize("seed", usually(range(60, 80), 2))
def test_random_graphs_are_off_by_what_is_stated(seed: int, monkeypatch: Any) -> None:
    """Whatever is beside products: ONNX Runtime finds the same error in what is quantized."""
    monkeypatch.setattr(random_graphs, "CHANNELS", (16, 17, 24, 32, 48))
    model = random_graphs.Graph(seed).model()
    graph, runs = rewrite(load_model(model)), [feeds(model, 100 * seed + i) for i in range(4)]
    known, measure = find(graph, runs, sources(model), lambda done, total: None)
    found, _ = choose(known.within([graph], (), ("int8",)), [graph], 0.1, on_one(lambda g: steps(g, 2.0, 1.0)), measure)
    assert len(found.layers) + len(found.floats) == sum(n.op in (*OPS, "Attention") for n in graph.nodes)
    made = gs.export_onnx(found.applied(graph))
    errors = [0.0]
    for run in runs:
        exact, got = reference(model, run), reference(made, run)
        errors += [relative_error(got[n], exact[n]) for n in exact if np.isfinite(exact[n]).all()]
    assert found.off.largest * 0.8 - 1e-3 <= max(errors) <= found.off.largest * 1.2 + 1e-3
    assert max(errors) <= 0.12


# --- Files -----------------------------------------------------------------------------------------------------------


def test_outputs_that_bytes_make_infinite_are_kept_in_floats_and_out_of_the_file(tmp_path: Path) -> None:
    """Logarithms of what is hardly above zero in floats, and below it in bytes."""
    net = Net(x=(16, 64))
    w = net.normal(64, 32)
    least = np.min([run["x"] @ w for run in runs_of(net, 4)], (0, 1))
    net.out(net("Log", net("Sub", net("MatMul", "x", w), (least - 1e-4).astype(np.float32))))
    graph = rewritten(net)
    known, measure = find(graph, runs_of(net, 4), sources(net.model()), lambda done, total: None)
    found, tried = choose(known.within([graph], (), ("int8",)), [graph], 1.0, on_one(lambda g: steps(g, 2.0, 1.0)), measure)
    assert not known.tried and not tried and found.floats == {"n0": "the error would be above the bound"}
    files.write(known, PURPOSE, found, tmp_path / "c.json")
    files.read(tmp_path / "c.json")


PURPOSE = Purpose(({"x": (1, 32, 12, 12)},), ("sm_90a",), ("int8", "fp8"), 5e-2, None, ("n*",))


def written(path: Path) -> tuple[Known, Chosen]:
    """What is known of a network with what is tied and smoothed, and what was chosen of it, in a file."""
    net = branches()
    known, _ = find(rewritten(net), runs_of(net, 4), sources(net.model()), lambda done, total: None)
    known = replace(known, smooth={"x": np.array([1.0, 0.5])}, floats={"n9": "why"})
    found, _ = choose(replace(known, smooth={}), [rewritten(net)], 5e-2, on_one(lambda g: steps(g, 2.0, 1.0)), None)
    files.write(known, PURPOSE, found, path)
    return known, found


def test_a_calibration_is_kept_in_a_file(tmp_path: Path) -> None:
    known, found = written(tmp_path / "c.json")
    again = files.read(tmp_path / "c.json")
    assert again.purpose == PURPOSE and known.tied and known.tried
    files.write(again.known, again.purpose, again.chosen, tmp_path / "again.json")
    assert (tmp_path / "again.json").read_bytes() == (tmp_path / "c.json").read_bytes()
    assert (again.known.floats, again.known.tried, again.chosen.layers) == (known.floats, known.tried, found.layers)
    for one, other in zip(again.known.tied, known.tied, strict=True):
        assert (one.layers, one.ways, one.squares) == (other.layers, other.ways, other.squares)
        for name, t in other.how[OPERANDS].items():
            assert one.how[OPERANDS][name].grid == t.grid and one.how[OPERANDS][name].shared == t.shared
            np.testing.assert_array_equal(one.how[OPERANDS][name].means, t.means)


WRONG = {
    "an error that is no number": ("chosen", "off", "largest", "nan"),
    "a negative error": ("chosen", "off", "expected", -1.0),
    "a time is missing": ("chosen", "times", "sm_90a", [1]),
    "floats that are in no bytes": ("chosen", "float8", ["n99"]),
    "no grid": ("chosen", "tensors", "x", "grid", {}),
    "a scale of zero": ("chosen", "tensors", "x", "grid", "scale", 0),
    "a scale below float32's": ("chosen", "tensors", "x", "grid", "scale", 1e-60),
    "a scale beyond float32's": ("chosen", "tensors", "x", "grid", "scale", 1e60),
    "a zero point beyond bytes": ("chosen", "tensors", "x", "grid", "zero", 256),
    "an infinite mean": ("chosen", "tensors", "x", "means", [1e999]),
    "a mean of many digits": ("chosen", "tensors", "x", "means", [10**400]),
    "means that are text": ("chosen", "tensors", "x", "means", ["1"]),
    "division by zero": ("known", "smooth", "x", [0.0, 1.0]),
    "division by text": ("known", "smooth", "x", "1"),
    "two activations of one name": ("known", "alone", 1, "name", "x"),
    "two activations for one product": ("known", "alone", 1, "layers", ["n0"]),
    "a way that there is not": ("known", "alone", 0, "ways", [0, 5]),
    "bytes of another format": ("known", "alone", 0, "how", 1, "x", "grid", "float8", True),
    "ways without floats": ("known", "alone", 0, "ways", [1]),
    "an infinite square": ("known", "alone", 0, "squares", [0, "inf", 0]),
    "bytes that floats are": ("known", "alone", 0, "how", 0, {"x": {"grid": {}}}),
    "a way more": ("known", "alone", 0, "how", [{}] * 6),
    "a negative number of runs": ("chosen", "runs", -1),
    "a field more": ("known", "more", 1),
    "shapes that are none": ("purpose", "shapes", [{"x": [1.5]}]),
}


@pytest.mark.parametrize(
    "wrong", ["", "[1]", "{}", '{"format": 2}', '{"format": 3}', "[" * 100_000, *WRONG], ids=lambda w: w[:40]
)
def test_a_file_that_is_no_calibration_is_refused(wrong: str, tmp_path: Path, whole: str) -> None:
    text = wrong
    if wrong in WRONG:
        *way, last, value = WRONG[wrong]
        data = json.loads(whole)
        part = functools.reduce(lambda at, key: at[key], way, data)
        part[last] = value
        text = json.dumps(data).replace("Infinity", "1e999")
    (path := tmp_path / "c.json").write_text(text)
    with pytest.raises(InputError, match="is no calibration that --quantize wrote"):
        files.read(path)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> str:
    written(path := tmp_path_factory.mktemp("c") / "c.json")
    files.read(path)
    return path.read_text()


def test_a_calibration_of_another_model_is_refused() -> None:
    found, other = chosen(residual(), 5e-2), Net(x=(4, 64))
    other.out(other("MatMul", "x", other.normal(64, 8)))
    with pytest.raises(InputError, match="of another model: this one has no product 'n2'"):
        Chosen(found.tensors, {}, ("n2",), (), {}, Off(0.0, 0.0), 1, 0, {}).applied(rewritten(other))
    wider = Net(x=(1, 64, 8, 8))
    wider.out(wider("Conv", "x", wider.normal(8, 64, 1, 1)))
    only = Chosen(found.tensors, {}, ("n0",), (), {}, Off(0.0, 0.0), 1, 0, {})
    with pytest.raises(InputError, match="of another model: 'x' has 64 channels in this one"):
        only.applied(rewritten(wider))


def test_products_that_are_not_there_at_all_shapes_are_in_floats() -> None:
    net, fewer = Net(x=(4, 32)), Net(x=(2, 32))
    h = net("MatMul", "x", net.normal(32, 32))
    net.out(net("MatMul", net("Relu", h), net.normal(32, 16)))
    fewer.out(fewer("MatMul", "x", fewer.normal(32, 32)))
    graphs = [rewritten(net), rewritten(fewer)]
    known, measure = find(graphs[0], runs_of(net, 2), sources(net.model()), lambda done, total: None)
    usable = known.within(graphs, (), ("int8",))
    assert usable.floats == {"n2": ELSEWHERE} and [a.layers for a in usable.alone] == [("n0",)]
    found, _ = choose(usable, graphs, 1.0, on_one(lambda g: steps(g, 2.0, 1.0)), measure)
    assert found.layers == ("n0",) and found.times["sm_90a"] == (6.0, 4.0)
    for graph in graphs:
        assert any(n.op == "QuantizeLinear" for n in found.applied(graph).nodes)
    other = Net(x=(4, 64))
    other.out(other("MatMul", "x", other.normal(64, 8)))
    with pytest.raises(InputError, match="of another model: this one has no product 'n0'"):
        known.within([rewritten(other)], (), ("int8",))


def test_what_a_file_says_of_tensors_that_are_others_here_is_refused() -> None:
    for net, name, count in ((residual(), "x", 32), (residual(), "t1", 32), (chained(), "t2", 3)):
        whole = calibration(net, shared=False)
        with pytest.raises(InputError, match=f"the channels of '{name}' cannot be divided in this one"):
            replace(whole, smooth={name: np.ones(count)}).applied(rewritten(net))
    ids = Net(x=(2, 32), i=(np.int64, (2,)))
    h = ids("Gather", ids.normal(9, 32), "i", axis=0)
    ids.out(ids("MatMul", ids("Add", "x", h), ids.normal(32, 16)))
    how = replace(next(iter(whole.tensors.values())), tied=True)
    with pytest.raises(InputError, match="'i' is no activation of float32 in this one"):
        Chosen({"i": how}, {}, (), (), {}, Off(0.0, 0.0), 1, 0, {}).applied(rewritten(ids))


# --- The pipeline ----------------------------------------------------------------------------------------------------


def perceptron(rows: int = 256, width: int = 768) -> Net:
    net, scale = Net(x=(rows, width)), width**-0.5
    h = net("Relu", net("Gemm", "x", net.normal(width, width, scale=scale), net.normal(width), transB=1))
    return net.out(net("Gemm", h, net.normal(width, width, scale=scale), net.normal(width), transB=1))


def test_quantizing_by_data_and_then_by_the_file(tmp_path: Path) -> None:
    net = perceptron()
    model, data, kept = net.model(), tmp_path / "data.npz", tmp_path / "kept.json"
    runs = runs_of(net, 4)
    np.savez(data, x=np.stack([r["x"] for r in runs]))
    options = Options(archs=("sm_90a",), quantize="int8", calibrate=data, calibration=kept)
    opened = read(model)
    found = calibrated(opened, options)
    head, *_ = quantization_notes(found, options)
    assert head.startswith("int8: 2 of 2 products; outputs are off by ") and "sm_90a" in head
    assert "on 4 examples of the data, 1 of them held back" in head
    data.unlink()
    later = Options(archs=("sm_90a",), quantize="int8", calibration=kept)
    programs = [to_program(opened, {}, later, Dump(None), calibration=c) for c in (found, calibrated(opened, later))]
    for program in programs:
        assert [program.tensors[op.x if hasattr(op, "x") else op.a].dtype for op in program.ops if program.products(op)] == [
            DType.I8,
            DType.U8,
        ]
    assert repr(programs[0]) == repr(programs[1])
    calibrated(read(trained_on(model, 0.02)), later)
    with pytest.raises(InputError, match="of other weights: the model's differ in 2 of 2 products"):
        calibrated(read(trained_on(model, 1.0)), later)


def trained_on(model: onnx.ModelProto, moved: float) -> onnx.ModelProto:
    """The model with weights that so much of their deviation is added to."""
    rng, other = np.random.default_rng(1), onnx.ModelProto()
    other.CopyFrom(model)
    for t in other.graph.initializer:
        w = numpy_helper.to_array(t)
        t.CopyFrom(numpy_helper.from_array((w + moved * np.std(w) * rng.standard_normal(w.shape)).astype(w.dtype), t.name))
    return other


def block() -> Net:
    """What a transformer's layer does with images' pixels: norms, products of rows of a matrix, sums beside them."""
    net = Net(x=(1, 8, 8, 64))
    h = net("LayerNormalization", "x", net.positive(64), net.normal(64, scale=0.1), axis=-1)
    h = net("Gemm", net("Reshape", h, np.array([64, 64])), net.normal(64, 64, scale=0.1), net.normal(64))
    h = net("Add", net("Reshape", h, np.array([1, 8, 8, 64])), "x")
    h = net("LayerNormalization", h, net.positive(64), net.normal(64, scale=0.1), axis=-1)
    h = net("MatMul", h, net.normal(64, 128, scale=0.1))
    return net.out(net("MatMul", net("Gelu", h), net.normal(128, 64, scale=0.1)))


def saved(net: Net, path: Path, count: int = 4) -> Path:
    np.savez(path, **{n: np.stack([r[n] for r in runs_of(net, count)]) for n in runs_of(net, 1)[0]})
    return path


@pytest.mark.parametrize("shared", [False, True])
def test_quantizing_adds_no_copies_and_no_fp32(shared: bool, tmp_path: Path) -> None:
    """Bytes are written by what computes the numbers, and halves are good enough for these."""
    net = block()
    data, opened = saved(net, tmp_path / "d.npz"), read(net.model())
    options = Options(archs=("sm_90a",), quantize="int8", calibrate=data)
    programs = [to_program(opened, {}, options, Dump(None), calibration=c) for c in (None, calibration(net, shared))]
    ops = [Counter(type(op).__name__ for op in p.ops) for p in programs]
    assert ops[0] == ops[1] == {"Norm": 2, "Gemm": 3, "Pointwise": 2}
    assert programs[0].storage.keys() == programs[1].storage.keys()
    written = [programs[1].tensors[op.y].dtype for op in programs[1].ops if type(op) is not Pointwise]
    assert written == [DType.I8, DType.F16, DType.I8, DType.U8, DType.F32]


def test_bytes_are_padded_as_the_kernel_that_writes_them_pads() -> None:
    """Heads of one number write channels of an image: 24 of them, which bytes pad to 32, and attention does not."""
    net = Net(x=(3, 24, 1, 1))
    q, v = (net("MatMul", "x", net.normal(1, 1)) for _ in range(2))
    p = net("Softmax", net("MatMul", q, net("Transpose", "x", perm=[0, 1, 3, 2])), axis=-1)
    net.out(net("Conv", net("MatMul", p, v), net.normal(40, 24, 1, 1)))
    made = calibration(net, shared=False).applied(rewritten(net))
    program = lay_out(precision(fuse(lower(rewrite(made))), "fp16", {}, ()))
    assert len(schedule(program, ARCHS["sm_90a"])) == len(program.ops)


def test_what_is_added_to_bytes_with_a_zero_point_may_be_halves(tmp_path: Path) -> None:
    """The sum of a product of floats and of what bytes stand for becomes bytes, of which fp16 moves some by one."""
    net = Net(x=(1, 32, 12, 12))
    h = net("Relu", net("Conv", "x", net.normal(32, 32, 1, 1, scale=0.2)))
    first = net("Conv", h, net.normal(32, 32, 1, 1, scale=0.2))
    halves = net("Tanh", net("Mul", "x", np.float32(2)))
    y = net("Relu", net("Add", net("Conv", halves, net.normal(32, 32, 1, 1, scale=0.2)), h))
    net.out(first, net("Conv", y, net.normal(8, 32, 1, 1)))
    grids = {h: Grid(0.1, 17, False, 1e-2), y: Grid(0.3, 3, False, 1e-2)}
    tensors = {name: Tensor(grid, np.zeros(32), shared=True) for name, grid in grids.items()}
    options = Options(archs=("sm_90a",), quantize="int8", calibrate=saved(net, tmp_path / "d.npz"))
    found = Chosen(tensors, {}, ("n2", "n8"), (), {}, Off(0.0, 0.0), 1, 0, {})
    program = to_program(read(net.model()), {}, options, Dump(None), calibration=found)
    adding = next(op for op in program.ops if "n6" in op.nodes)
    assert program.tensors[adding.y].dtype is DType.U8 and program.tensors[adding.operands[0]].dtype is DType.F16
    assert not program.storage


@pytest.mark.parametrize("zero", [0, 5])
def test_bytes_without_their_rounding_are_the_numbers_that_they_stand_for(zero: int) -> None:
    x = load(0)
    stored = cast(call("saturate", call("add", call("round", call("ratio", x, 0.1)), float(zero)), 0.0, 255.0), DType.I64)
    back = call("mul", cast(call("sub", stored, zero), DType.F32), 0.1)
    again = cast(call("saturate", call("round", call("ratio", call("relu", back), 0.05)), 0.0, 255.0), DType.I64)
    values = {"x": np.random.default_rng(0).uniform(0, 12, (1000,)).astype(np.float32)}
    views = (identity_view("x", 1),)
    for expr, step in ((stored, 1.0), (back, 0.1), (again, 3.0)):
        exact, smooth = (evaluate_expr(e, views, values, (1000,)) for e in (expr, _not_rounded(expr, {})))
        assert smooth.dtype == np.float32 and 0 < np.abs(smooth - exact).max() <= 0.51 * step
        assert len(np.unique(smooth)) > 900


def test_sums_of_bytes_are_floats_before_they_are_shuffled_or_moved() -> None:
    net = Net(x=(1, 16, 6, 6))
    h = net("DepthToSpace", net("Conv", "x", net.normal(64, 16, 1, 1), net.normal(64)), blocksize=2, mode="CRD")
    net.out(net("Conv", net("Relu", h), net.normal(8, 16, 1, 1)))
    program = fuse(lower(rewrite(calibration(net, shared=False).applied(rewritten(net)))))
    assert [type(op).__name__ for op in program.ops] == ["Pointwise", "Conv", "Conv"]
    assert program.ops[1].epilogue.shuffle == 2 and program.tensors[program.ops[1].y].dtype in (DType.I8, DType.U8)


def test_a_bound_holds_for_bytes_and_halves_together(tmp_path: Path, monkeypatch: Any) -> None:
    """By the user's inputs against the model in floats; from a file alone, by what it says and random inputs."""
    monkeypatch.setattr(quantize, "step_times", lambda graph, archs, **_: {archs[0]: steps(graph, 2.0, 1.0)})
    net, kept, told = perceptron(64, 256), tmp_path / "kept.json", Told()
    data, opened = saved(net, tmp_path / "d.npz"), read(net.model())
    options = Options(archs=("sm_90a",), quantize="int8", calibrate=data, calibration=kept, max_error=2e-2)
    found = calibrated(opened, options)
    program = to_program(opened, {}, options, Dump(None), told=told, calibration=found)
    assert len(found.layers) == 2 and not program.storage and "nothing had to be raised" in told.notes[0]
    stated = float(told.notes[0].split()[3])
    assert stated == pytest.approx(found.off.expected, rel=0.1) and stated > 1.2 * found.off.largest
    later = replace(options, calibrate=None, max_error=5e-2)
    to_program(opened, {}, later, Dump(None), told=told, calibration=calibrated(opened, later))
    assert float(f"{found.off.largest:.1e}") <= float(told.notes[1].split()[3]) <= 5e-2


def test_of_several_entries_data_need_to_fit_one(tmp_path: Path) -> None:
    net = Net(x=("n", 32))
    model = net.out(net("MatMul", "x", net.normal(32, 16))).model()
    np.savez(tmp_path / "d.npz", x=net.normal(4, 8, 32))
    entries = ({"x": (2, 32)}, {"x": (8, 32)})
    options = Options(entries, ("sm_90a",), quantize="int8", calibrate=tmp_path / "d.npz", max_error=5e-2)
    opened = read(model)
    found = calibrated(opened, options)
    for shapes in entries:
        to_program(opened, shapes, options, Dump(None), calibration=found)


def perceptrons(batch: int | str) -> Net:
    """Two products of each of so many rows, and what of them stays beside others in a batch."""
    net = Net(x=(batch, 32))
    h = net("Relu", net("MatMul", "x", net.normal(32, 64, scale=0.2)))
    return net.out(net("MatMul", h, net.normal(64, 16, scale=0.2)))


def of_one() -> Net:
    """As exporters write it that know the batch: the number stands inside, too."""
    net = Net(x=(1, 32))
    h = net("ReduceMean", net("Reshape", "x", np.array([1, 2, 16])), np.array([1]), keepdims=0)
    return net.out(net("MatMul", h, net.normal(16, 16)))


def mixed_up() -> Net:
    """Rows less their mean over the batch: a row alone is zero."""
    net = Net(x=("n", 32))
    h = net("Sub", "x", net("ReduceMean", "x", np.array([0])))
    return net.out(net("MatMul", h, net.normal(32, 16)))


@pytest.mark.parametrize(
    ("net", "entry", "data", "shape", "count"),
    [
        (perceptrons("n"), {"x": (8, 32)}, (12, 32), (1, 32), 12),
        (perceptrons("n"), {"x": (8, 32)}, (3, 4, 32), (1, 32), 12),
        (perceptrons(8), {}, (12, 32), (1, 32), 12),
        (perceptrons(8), {}, (3, 8, 32), (8, 32), 3),
        (of_one(), {}, (12, 32), (1, 32), 12),
        (mixed_up(), {"x": (8, 32)}, (12, 32), (12, 32), 1),
        (mixed_up(), {"x": (8, 32)}, (3, 4, 32), (4, 32), 3),
    ],
    ids=[
        "in a batch",
        "in batches",
        "for another batch",
        "as they fit",
        "for one alone",
        "beside each other",
        "in a row beside each other",
    ],
)
def test_shapes_that_data_are_run_at(
    net: Net, entry: dict, data: tuple[int, ...], shape: tuple[int, ...], count: int, tmp_path: Path, monkeypatch: Any
) -> None:
    np.savez(tmp_path / "d.npz", x=(x := net.normal(*data)))
    options = Options((entry,), ("sm_90a",), quantize="int8", calibrate=tmp_path / "d.npz")
    seen = list[tuple[gs.Graph, list]]()
    monkeypatch.setattr(quantize, "find", lambda graph, runs, *rest: seen.append((graph, runs)) or find(graph, runs, *rest))
    opened = read(net.model())
    found = calibrated(opened, options)
    ((graph, runs),) = seen
    assert tuple(graph.inputs[0].shape) == shape and len(runs) == count
    np.testing.assert_array_equal(np.concatenate([r["x"].reshape(-1, 32) for r in runs]), x.reshape(-1, 32))
    to_program(opened, entry, options, Dump(None), calibration=found)


@pytest.mark.parametrize(("data", "real"), [((12, 32), True), ((3, 4, 32), True), ((12, 2, 3), False)])
def test_a_bound_is_measured_in_batches_of_the_data(data: tuple[int, ...], real: bool, tmp_path: Path) -> None:
    net = perceptrons("n")
    np.savez(tmp_path / "d.npz", x=(x := net.normal(*data)))
    options = Options(({"x": (8, 32)},), ("sm_90a",), quantize="int8", calibrate=tmp_path / "d.npz", max_error=5e-2)
    runs, own = inputs_of(lower(rewrite(load_model(net.model(), {"x": (8, 32)}))), options)
    assert own is real and all(r["x"].shape == (8, 32) for r in runs)
    if real:  # the last is filled up
        np.testing.assert_array_equal(np.concatenate([r["x"] for r in runs]), np.concatenate([x.reshape(-1, 32)] * 2)[:16])
        opened, told = read(net.model()), Told()
        to_program(opened, {"x": (8, 32)}, options, Dump(None), told=told, calibration=calibrated(opened, options))
        assert "nothing had to be raised" in told.notes[0]


def test_what_takes_too_long_in_a_batch_is_calibrated_one_by_one(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(ranges, "TOO_MANY", 1000)
    net = perceptrons(32)
    options = Options(archs=("sm_90a",), quantize="int8", calibrate=saved(net, tmp_path / "d.npz"))
    opened = read(net.model())
    to_program(opened, {}, options, Dump(None), calibration=calibrated(opened, options))
    monkeypatch.setattr(ranges, "TOO_MANY", 30)
    with pytest.raises(UsageError, match="running it would write 0 million elements on the CPU: calibrate it for smaller"):
        calibrated(opened, options)


@pytest.mark.parametrize("max_error", [None, 2e-2])
def test_a_model_of_large_images_is_calibrated_with_smaller_ones(
    max_error: float | None, tmp_path: Path, monkeypatch: Any
) -> None:
    """Whatever size it is exported for; where its own may be run, smaller images are a mistake."""
    data = saved(residual(6), tmp_path / "d.npz")
    opened = read(residual(12).model())
    options = Options(archs=("sm_90a",), quantize="int8", calibrate=data, max_error=max_error)
    with pytest.raises(InputError, match="the arrays fit the inputs' shapes neither alone nor in a row: 'x' \\(1, 32, 12, 12\\)"):
        calibrated(opened, options)
    monkeypatch.setattr(ranges, "TOO_MANY", 10000)
    found = calibrated(opened, options)
    assert found.runs == 4 and {*found.floats.values()} == {"bytes are estimated to be no faster"}
    program = to_program(opened, {}, options, Dump(None), calibration=found)
    assert program.tensors["x"].shape == (1, 32, 12, 12)


@pytest.mark.parametrize(("quantize", "data"), [(None, False), (None, True), ("int8", True)])
def test_a_bound_for_what_takes_too_long_is_met_at_other_shapes(
    quantize: str | None, data: bool, tmp_path: Path, monkeypatch: Any
) -> None:
    net = perceptrons(32)
    opened, path = read(net.model()), saved(net, tmp_path / "d.npz", 2)
    options = Options(archs=("sm_90a",), quantize=quantize, calibrate=path if data else None, max_error=1e-4)
    found = calibrated(opened, options) if quantize else None
    monkeypatch.setattr(ranges, "TOO_MANY", 1000)
    monkeypatch.setattr(ranges, "MANY", 1000)
    told = Told()
    program = to_program(opened, {}, options, Dump(None), told=told, calibration=found)
    assert "in fp32: by estimates" in told.notes[0] and told.notes[0].endswith(
        "since running it would write 0 million elements on the CPU"
    )
    assert all(program.tensors[op.y].dtype is DType.F32 for op in program.ops)
    assert "measured at smaller shapes" in told.notes[0] and float(told.notes[0].split()[3]) < 1e-4
    loose = replace(options, max_error=2e-2)
    found = calibrated(opened, loose) if quantize else None
    program = to_program(opened, {}, loose, Dump(None), told=told, calibration=found)
    assert "nothing had to be raised for it; measured at smaller shapes" in told.notes[1] and not program.storage
    tight = replace(options, max_error=1e-9)
    found = calibrated(opened, tight) if quantize else None
    assert found is None or not found.layers
    with pytest.raises(VerificationError, match=r"--max-error 1e-09: fp32 itself is off by about \de-08"):
        to_program(opened, {}, tight, Dump(None), calibration=found)
    monkeypatch.setattr(ranges, "TOO_MANY", 10)
    with pytest.raises(UsageError, match="--max-error runs the model on the CPU, and running it would write"):
        to_program(opened, {}, options, Dump(None), calibration=found)


def test_a_file_serves_other_shapes_generations_and_bounds(tmp_path: Path, monkeypatch: Any) -> None:
    """What is known is not run again; what is chosen is for all that is built, and says that its error is an estimate."""
    net, times = perceptrons("n"), list[str]()

    def steps_of(graph: gs.Graph, archs: Sequence[str], **_: object) -> dict[str, Steps]:
        """Bytes are faster for more than a hundred rows, by as much as they are more."""
        rows = graph.inputs[0].shape[0]
        times.append(f"{rows} on {', '.join(archs)}")
        return dict.fromkeys(archs, steps(graph, float(rows), 100.0))

    monkeypatch.setattr(quantize, "step_times", steps_of)
    np.savez(tmp_path / "d.npz", x=net.normal(12, 32))
    options = Options(({"x": (1, 32)},), ("sm_90a",), quantize="int8", calibrate=tmp_path / "d.npz", calibration=tmp_path / "c")
    options, opened = replace(options, max_error=1e-1), read(net.model())
    assert not calibrated(opened, options).layers
    later = replace(options, calibrate=None)
    monkeypatch.setattr(quantize, "find", None)
    for rows, count in (((128,), 2), ((1, 90), 0), ((1, 128), 0), ((90, 128), 2)):
        found = calibrated(opened, some := replace(later, entries=tuple({"x": (n, 32)} for n in rows)))
        assert len(found.layers) == count and found.runs == 0
        head = quantization_notes(found, some)[0]
        assert ("estimated by what was calibrated for other builds: --calibrate DATA.npz" in head) is bool(count)
    some = replace(later, entries=({"x": (128, 32)},))
    assert not calibrated(opened, replace(some, max_error=found.off.largest / 4)).layers
    assert len(calibrated(opened, replace(some, fp32=("n0",))).layers) == 1
    again = calibrated(opened, replace(some, calibrate=tmp_path / "d.npz"))
    assert again.runs == 8 and again.held == 3 and again.off.expected == pytest.approx(found.off.expected, rel=0.2)
    np.savez(tmp_path / "one.npz", x=net.normal(1, 32))
    again = calibrated(opened, some := replace(some, calibrate=tmp_path / "one.npz"))
    assert " on 1 example of the data, none of them held back from calibration" in quantization_notes(again, some)[0]
    times.clear()
    calibrated(opened, later)
    assert not times
    calibrated(opened, replace(later, archs=("sm_75",)))
    assert {*times} == {"1 on sm_75"}


@pytest.mark.parametrize(
    ("how", "says"),
    [
        ({"quantize": "int8"}, "quantizing to int8 takes real inputs"),
        ({"quantize": "int8", "calibration": Path("missing.json")}, "--calibration FILE, which an earlier build has written"),
        ({"quantize": "int9"}, "unknown format 'int9'"),
        ({"quantize": "int8", "precision": "fp16"}, "int8 in fp16"),
        ({"calibration": Path("x.json")}, "is for quantizing"),
    ],
)
def test_options_that_do_not_make_sense(how: dict, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        Options(**how)


def test_data_that_the_model_does_not_take_is_refused(tmp_path: Path) -> None:
    np.savez(tmp_path / "d.npz", x=np.zeros((3, 7, 7), np.float32))
    with pytest.raises(InputError, match="fit the inputs' shapes neither alone nor in a row"):
        calibrated(read(perceptron().model()), Options(quantize="int8", calibrate=tmp_path / "d.npz"))
    np.savez(tmp_path / "d.npz", x=np.zeros((0, 256, 768), np.float32))
    with pytest.raises(InputError, match="hold no set of inputs, being empty"):
        calibrated(read(perceptron().model()), Options(quantize="int8", calibrate=tmp_path / "d.npz"))


def test_other_weights_take_the_scales_that_they_need(tmp_path: Path) -> None:
    """A plan of bytes with weights fine-tuned is what the same choices make of these; activations keep their grids."""
    net, kept = perceptron(), tmp_path / "kept.json"
    old = net.model()
    options = Options(archs=("sm_90a",), quantize="int8", calibrate=saved(net, tmp_path / "d.npz"), calibration=kept)
    found = calibrated(read(old), options)

    def made(model: onnx.ModelProto) -> Plan:
        told, opened = Told(), read(model)
        with decisive() as told.decided:
            program = to_program(opened, {}, options, Dump(None), told=told, calibration=found)
        return pack("bytes", {}, [(program, ())], {}, opened.weights, False, origin=origin_of(opened, told), rooms=told.rooms)

    plan, new = made(old), tuned(old, by=0.02)
    assert len(found.layers) == 2 and not plan.origin.decided and plan.origin.factor == 1.25
    fitted, fresh = refitted(plan, weights(new)), made(new)
    assert fresh.entries[0].program.ops == plan.entries[0].program.ops
    assert bits(fitted) == bits(fresh) != bits(plan)
    assert any(h.sums for h in plan.origin.held.values())
    with pytest.raises(VerificationError, match=r"precision was chosen with .*, and holds for"):
        refitted(plan, weights(old) | {"w0": weights(old)["w0"] * np.float32(1.4)})


def test_images_padded_by_a_zero_point_find_kernels() -> None:
    """Sums of the padding are a constant for each pixel, which is no image itself."""
    net = Net(x=(1, 32, 12, 12))
    h = net("Elu", net("Conv", "x", net.normal(32, 32, 1, 1)))
    net.out(net("Relu", net("Conv", h, net.normal(32, 32, 3, 3), pads=[1] * 4)))
    whole = calibration(net, shared=False)
    how = {name: replace(t, grid=replace(t.grid, zero=9, signed=False)) for name, t in whole.tensors.items()}
    program = fuse(lower(rewrite(replace(whole, tensors=how).applied(rewritten(net)))))
    program = lay_out(precision(program, "fp16", {}, ()))
    for arch in ("sm_75", "sm_90a"):
        assert len(schedule(program, ARCHS[arch])) == len(program.ops)


def test_estimates_are_compared_with_what_is_measured(monkeypatch: Any) -> None:
    """Of the model in floats one product took three times its estimate: so do others, and those of bytes a little more."""
    net = perceptron()
    graph = rewritten(net)

    def choices(program: Program, arch: Arch, refused: object, timings: object, ranked: object) -> list[Choice]:
        known = [i for i, op in enumerate(program.ops) if isinstance(op, Gemm) and program.tensors[op.a].dtype is DType.F16][:1]
        return [Choice(KERNELS[0], {}, Work(()), *((3.0, "", 1.0) if i in known else (1.0, ""))) for i in range(len(program.ops))]

    monkeypatch.setattr(times, "schedule", choices)
    ratios: dict[str, Any] = {}
    how = {"archs": ("sm_90a",), "known": NO_TIMINGS, "ranked": {}, "ratios": ratios}
    floats = times.step_times(graph, **how)["sm_90a"]
    assert sorted(us for _, us in floats) == [1.0, 3.0, 3.0] and ratios == {"sm_90a": {(Gemm, ""): 3.0}}
    bytes_ = times.step_times(calibration(net, shared=False).applied(graph), **how)["sm_90a"]
    assert [us for _, us in bytes_ if us > 2] == [pytest.approx(3.0 * times.UNSURE["int8"])] * 2


# --- Formats, new inputs, and users' own measures ------------------------------------------------------------------------


def tails() -> Net:
    """Products of normal numbers, and of such with a few that are far larger than the others."""
    net = Net(x=(16, 64))
    far = net("Mul", "x", net("Pow", "x", np.float32(8)))
    return net.out(net("MatMul", "x", net.normal(64, 32)), net("MatMul", far, net.normal(64, 32)))


def eight(graph: gs.Graph, bytes_: float = 1.0) -> list[tuple[tuple[str, ...], float]]:
    """Each product takes half as long in 8 bits, whichever these are."""
    narrow = {n.name for n in graph.nodes if n.op in OPS and (n.inputs[1].inputs or n.inputs[1].name.endswith("/float8"))}
    return [((n.name,), bytes_ if n.name in narrow else 2.0) for n in graph.nodes if n.op in OPS]


BOTH = ("int8", "fp8")


def automatic(net: Net, bound: float, times: Times, formats: tuple[str, ...] = BOTH) -> Chosen:
    graph, weights = rewritten(net), sources(net.model())
    known, measure = find(graph, runs_of(net, 4), weights, lambda done, total: None, formats)
    return choose(known.within([graph], (), formats), [graph], bound, times, measure)[0]


def test_progress_goes_on_while_weights_are_rounded_and_choices_are_run(monkeypatch: Any) -> None:
    told = list[tuple[int, int]]()
    for module in (grid, insert):
        monkeypatch.setattr(module, "BLOCK", 1 << 10)
    net = perceptron(8, 64)
    graph, weights = rewritten(net), sources(net.model())
    known, measure = find(graph, runs_of(net, 4), weights, lambda done, total: told.append((done, total)))
    found = len(told)
    choose(known.within([graph], (), ("int8",)), [graph], 2e-2, on_one(eight), measure)
    runs = len(lower(graph).ops) * (3 + 2 + 2 * 4)
    assert found >= runs + 2 * 3 * 4, "for two weights, three times, four blocks of each"
    assert len(told) > found and told == sorted(told) and all(done <= total for done, total in told)


def test_weights_that_are_rounded_in_blocks_are_what_their_recipe_makes(monkeypatch: Any) -> None:
    monkeypatch.setattr(insert, "BLOCK", 1 << 10)
    graph = rewritten(perceptron(8, 64))
    (layer, *_), rounded_ = layers(graph)[0], Rounded()
    means = np.random.default_rng(0).uniform(0, 1, 64)
    whole, scales = insert._rounded(layer, Tensor(grid_of(np.ones(4, np.float32)), means, shared=True), rounded_)
    for weight in (whole, scales):
        np.testing.assert_array_equal(held(weight), recipes.evaluate(weight.recipe, sources(perceptron(8, 64).model())))
    assert len(rounded_.kept) == 2


def test_what_each_format_would_cost_is_told_whatever_is_chosen() -> None:
    net = tails()
    found, tight = automatic(net, 2e-1, on_one(eight)), automatic(net, 1e-4, on_one(eight))
    assert not tight.layers
    whole, own = found.costs[:2], found.costs[2:]
    assert [(c.format, c.layers, c.saves) for c in whole] == [(f, ("n2", "n3"), 2.0) for f in BOTH]
    assert len(own) == 4 and [c.error for c in own] == sorted((c.error for c in own), reverse=True)
    for c in whole:
        assert c.error == pytest.approx(np.sqrt(sum(o.error**2 for o in own if o.format == c.format)))
    assert {c.layers for c in tight.costs} == {c.layers for c in found.costs}
    text = "\n".join(quantization_notes(found, Options(archs=("sm_90a",), quantize="auto", calibrate=Path("d.npz"))))
    assert f"all 2 products that may be in int8: new inputs would be off by about {whole[0].error:.1e}; 2.0 µs faster" in text
    assert "off in int8, 1.0 µs faster; is in fp8: n3" in text


def test_each_product_has_the_format_that_it_loses_least_by() -> None:
    net = tails()
    found = automatic(net, 2e-1, on_one(eight))
    assert found.layers == ("n2", "n3") and found.float8 == ("n3",)
    only = automatic(net, 2e-1, on_one(eight), ("int8",))
    assert only.layers == ("n2",)  # integers lose more than the bound
    made, (feeds_,) = found.applied(rewritten(net)), runs_of(net, 1, seed=9)
    for got, exact in zip(*(reference(m, feeds_).values() for m in (gs.export_onnx(made), net.model())), strict=True):
        assert relative_error(got, exact) < 6e-2


def test_error_that_buys_no_time_is_not_made() -> None:
    """Floats of 8 bits that are hardly faster than integers are not worth three times their error."""

    def times(graph: gs.Graph) -> list[tuple[tuple[str, ...], float]]:
        float8 = {n.name for n in graph.nodes if n.op in OPS and n.inputs[1].name.endswith("/float8")}
        return [(nodes, time - 0.0005 * (nodes[0] in float8)) for nodes, time in eight(graph)]

    found = automatic(residual(), 5e-2, on_one(times))
    assert len(found.layers) == 3 and not found.float8


@pytest.mark.parametrize(("share", "count"), [(0.95, 0), (0.88, 0), (0.8, 3)])
def test_floats_of_8_bits_are_chosen_where_they_are_surely_faster_than_integers(share: float, count: int) -> None:
    """However much error is allowed: estimates of the two are a few percent off beside each other."""

    def times(graph: gs.Graph) -> list[tuple[tuple[str, ...], float]]:
        float8 = {n.name for n in graph.nodes if n.op in OPS and n.inputs[1].name.endswith("/float8")}
        return [(nodes, time * (share if nodes[0] in float8 else 1.0)) for nodes, time in eight(graph)]

    found = automatic(residual(), 0.5, on_one(times))
    assert len(found.layers) == 3 and len(found.float8) == count


@pytest.mark.parametrize(("other", "count"), [(1.5, 3), (2.7, 3), (3.3, 0)])
def test_generations_count_alike(other: float, count: int) -> None:
    """Whatever their speed: half the time on a fast one makes up for half as much again on one that is ten times as slow."""

    def times(graph: gs.Graph) -> dict[str, Steps]:
        return {"sm_90a": eight(graph), "sm_61": [(nodes, 10 * time) for nodes, time in eight(graph, other)]}

    found = automatic(residual(), 5e-2, times, ("int8",))
    assert len(found.layers) == count and found.times["sm_61"] == (60.0, 10 * other * count or 60.0)


@pytest.mark.parametrize(
    ("quantize", "archs", "formats"),
    [
        ("auto", ("sm_89", "sm_90a", "sm_120"), BOTH),
        ("auto", ("sm_80", "sm_90a"), ("int8",)),
        ("fp8", ("sm_80", "sm_90a"), ("fp8",)),
        ("int8", ("sm_90a",), ("int8",)),
    ],
)
def test_floats_of_8_bits_are_chosen_where_all_generations_have_them(
    quantize: str, archs: tuple, formats: tuple, tmp_path: Path
) -> None:
    options = Options(archs=archs, quantize=quantize, calibrate=tmp_path)
    assert formats_of(options) == formats
    found = Chosen({}, {}, ("a", "b"), ("b",) * (len(formats) > 1), {"c": "why"}, Off(1e-3, 2e-3), 8, 2, {"sm_90a": (9.0, 7.0)})
    head, *rest_ = quantization_notes(found, options)
    assert head.startswith("auto: 1 in int8 and 1 in fp8 of 3 products; " if formats == BOTH else f"{quantize}: 2")
    assert any("of sm_80 do not multiply" in note for note in rest_) == (quantize == "auto" and formats != BOTH)
    assert rest_[-1] == f"not in {'bytes' if quantize == 'auto' else quantize}, since why: c"


def test_sums_that_integers_cannot_hold_are_of_floats(tmp_path: Path) -> None:
    net = Net(x=(2, 40960))
    net.out(net("MatMul", "x", net.normal(40960, 8, scale=0.01)))
    whole = automatic(net, 2e-1, on_one(eight))
    assert whole.layers == whole.float8 == ("n0",)
    assert automatic(net, 2e-1, on_one(eight), ("int8",)).floats == {"n0": "its sums of 40960 products may exceed int32"}
    program = lay_out(precision(fuse(lower(rewrite(whole.applied(rewritten(net))))), "fp16", {}, ()))
    assert [program.tensors[n].dtype for op in program.ops if program.products(op) for n in op.operands] == [DType.E4M3] * 2
    for arch in ("sm_80", "sm_90a"):
        assert len(schedule(program, ARCHS[arch])) == len(program.ops)


def test_new_inputs_get_a_margin_that_few_inputs_make_wide() -> None:
    rng = np.random.default_rng(0)
    for count, spread in ((1, 0.25), (2, 0.25), (8, 0.25), (8, 0.05), (8, 0.5), (32, 0.25), (32, 0.5)):
        trials = np.exp(spread * rng.standard_normal((2000, count + 1)))
        within_ = np.array([new <= expected([*seen]) for *seen, new in trials])
        assert within_.mean() > 0.97, (count, spread)
    assert expected([1.0]) > 2 * expected([1.0] * 8) > 2
    assert 1.2 < expected([1.0] * 32) < 0.85 * expected([1.0] * 8)
    assert of_new([1.0], 1) == expected([1.0]) and of_new([1.0], 99) == expected([1.0] * 32)
    assert of_new([1.0, 2.0], 3) == expected([1.0, 2.0, 1.0]) and of_new([1.0, 2.0], 0) == expected([1.0, 2.0])
    assert expected([0.0, 0.0]) == 0.0 and math.isnan(expected([1.0, math.nan])) and math.isnan(expected([math.inf]))


SCRIPT = """
def error(found, exact, inputs):
    assert len(found) == len(exact) == len(inputs)
    return sum((f["t2"].argmax(1) != e["t2"].argmax(1)).mean() for f, e in zip(found, exact)) / len(found) / 100
"""


def test_a_users_own_measure_is_held_to_the_bound(tmp_path: Path, monkeypatch: Any) -> None:
    """By it all may be in bytes, whose relative error is far above that number."""
    monkeypatch.setattr(quantize, "step_times", lambda graph, archs, **_: {archs[0]: eight(graph)})
    net, script, told = perceptron(8, 64), tmp_path / "same.py", Told()
    script.write_text(SCRIPT)
    data = saved(net, tmp_path / "d.npz")
    options = Options(archs=("sm_90a",), quantize="auto", calibrate=data, max_error=1e-3)
    opened = read(net.model())
    assert not calibrated(opened, options).layers
    own = replace(options, metric=script)
    found = calibrated(opened, own)
    assert len(found.layers) == 2 and found.off.own < 1e-3 < found.off.largest
    assert f"by {script} {found.off.own:.3g}; " in quantization_notes(found, own)[0]
    program = to_program(opened, {}, own, Dump(None), told=told, calibration=found)
    assert " of 0.001 allowed; nothing had to be raised for it" in told.notes[0] and not program.storage


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("1 +", "does not run: SyntaxError"),
        ("import nothing_of_this_name", "does not run: ModuleNotFoundError"),
        ("def loss(a): pass", "has no function error"),
        ("def error(found, exact, inputs): return 'much'", "raised ValueError"),
        ("def error(found): return 0", "raised TypeError"),
    ],
)
def test_a_measure_that_is_none_is_refused(text: str, says: str, tmp_path: Path) -> None:
    (path := tmp_path / "own.py").write_text(text)
    with pytest.raises(UsageError, match=says):
        read_metric(path)([], [], [])


def test_a_measure_below_zero_is_zero_and_one_that_is_no_number_passes_nothing(tmp_path: Path) -> None:
    (path := tmp_path / "own.py").write_text("def error(found, exact, inputs): return inputs[0]['x']")
    measure = read_metric(path)
    assert measure([], [], [{"x": np.float32(-1)}]) == 0.0 and math.isnan(measure([], [], [{"x": np.float32("nan")}]))
    with pytest.raises(UsageError, match="give --max-error X"):
        Options(metric=path, max_error=1e-2)


@pytest.mark.parametrize(
    ("tried", "said", "off"),
    [
        ([], (0.01, 0.0), 0.01),
        ([Tried(0.01, 0.0, 0.02), Tried(0.0, 0.01, 0.05)], (0.01, 0.0), 0.02),
        ([Tried(0.01, 0.0, 0.02), Tried(0.0, 0.01, 0.05)], (0.0, 0.02), 0.1),
        ([Tried(0.01, 0.0, 0.02), Tried(0.0, 0.01, 0.05)], (0.02, 0.01), np.hypot(0.04, 0.05)),
        ([Tried(0.01, 0.0, 0.02), Tried(0.03, 0.04, 0.15)], (0.0, 0.01), 0.03),
        ([Tried(0.01, 0.0, 0.01), Tried(0.0, 0.01, 0.01), Tried(0.03, 0.04, 0.1)], (0.03, 0.04), 0.1),
    ],
)
def test_estimates_are_as_far_off_as_others_of_their_format(tried: list[Tried], said: tuple[float, float], off: float) -> None:
    assert estimated(tried, *said) == pytest.approx(off)


def test_error_costs_as_much_from_a_file_as_in_the_first_build() -> None:
    """A file tells of runs of some activations, too, whose errors may be far less than estimates of them."""
    net = residual()
    graph, more = rewritten(net), Tried(10.0, 0.0, 1e-3)
    known, measure = find(graph, runs_of(net, 4), sources(net.model()), lambda done, total: None, ("int8",))

    def taken(known: Known, saves: float) -> int:
        return len(choose(known, [graph], 1.5e-2, on_one(lambda g: eight(g, 2.0 - saves)), measure)[0].layers)

    usable = known.within([graph], (), ("int8",))
    again = replace(usable, tried=(*usable.tried, more))
    saves = [0.02 * 1.4**k for k in range(10)]
    counts = [taken(usable, s) for s in saves]
    assert counts == [taken(again, s) for s in saves] and 0 in counts and 3 in counts


def test_grids_have_room_where_runs_differ() -> None:
    values = {}
    for name, sizes in {"alike": [1.0] * 8, "apart": [0.5, 1, 0.7, 1.4, 0.6, 1, 0.8, 1.1]}.items():
        values[name] = Values(1, 1 << 12)
        for seed, size in enumerate(sizes):
            values[name].add(np.random.default_rng(seed).uniform(0, size, (4, 64)).astype(np.float32))
        (values[name].room,) = rooms([values[name].largest])
    assert values["alike"].likely().max() < 1.05
    assert 2 < values["apart"].likely().max() < 4 and grid_of(values["apart"].likely()).scale * 255 > 1.9
    assert values["alike"].likely(float8=True).max() == MOST * values["alike"].all().max()


def test_grids_have_no_room_beyond_what_values_are_cut_off_at() -> None:
    net = Net(x=(1, 16, 8, 8))
    cut, rectified = net("Clip", "x", np.float32(0), np.float32(6)), net("Relu", "x")
    net.out(*(net("Conv", x, net.normal(8, 16, 1, 1)) for x in (cut, rectified)))
    runs = [{"x": size * run["x"]} for size, run in zip((1.0, 2.0, 1.5, 1.2), runs_of(net, 4), strict=True)]
    seen = observe(lower(rewritten(net)), runs, sources(net.model()), {cut: 1, rectified: 1}, lambda: None).values
    assert seen[rectified].room > 1.05 and seen[rectified].likely().max() > 6.2
    assert seen[cut].likely().max() == pytest.approx(6.0)


def test_how_far_new_inputs_go_is_told_by_all_tensors_of_a_network() -> None:
    assert rooms([]) == [] and rooms([[], [3.0], [0.0, 0.0], [2.0, 2.0, 0.0], [1e-3, 1.0]]) == [1, 1, 1, 1, MOST]
    apart = [0.5, 1.0, 0.7, 1.4, 0.6]
    alone, others = rooms([[1.0, 1.02, 1.01, 1.0, 0.99]])[0], rooms([[1.0, 1.02, 1.01, 1.0, 0.99], apart])[0]
    assert alone < 1.05 and others > 1.5
    assert rooms([[6.0] * 5, apart])[0] == 1.0  # where all are cut off at 6


@pytest.mark.parametrize(
    ("kind", "least", "most"), [("laplace", 1.25, 1.8), ("standard_normal", 1.1, 1.4), ("uniform", 1.0, 1.02)]
)
def test_a_grid_has_room_for_what_is_rare_by_how_fast_values_become_rare(kind: str, least: float, most: float) -> None:
    """One input in a thousand of the next has a value beyond it."""
    draw = getattr(np.random.default_rng(0), kind)
    seen = draw(size=(6, 4096))
    more = rarer(seen.ravel(), 6)
    assert least <= more <= most and rarer(seen.ravel(), 1000) == rarer(np.zeros(64), 6) == rarer(np.ones(2), 6) == 1.0
    assert (np.abs(draw(size=(300, 4096))).max(1) > more * np.abs(seen).max()).sum() <= 3


def test_few_new_inputs_go_beyond_a_grid() -> None:
    """Sixteen tensors whose greatest values vary together and for themselves: of 6 runs, what the next one does."""
    rng, beyond = np.random.default_rng(0), 0
    for _ in range(200):
        logs = 0.2 * (rng.standard_normal((1, 7)) + rng.standard_normal((16, 7)))
        largest = np.exp(logs)
        room = largest[:, :6].max(1) * rooms(largest[:, :6].tolist())
        beyond += bool((largest[:, 6] > room).any())
    assert beyond <= 6
