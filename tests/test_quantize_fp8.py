"""`--quantize fp8`: products in floats of 8 bits."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx_graphsurgeon as gs
import pytest

from tccompile.dump import Dump
from tccompile.errors import InputError
from tccompile.fuse import fuse
from tccompile.ir.ops import Attention, Conv, Gemm
from tccompile.ir.program import Program
from tccompile.ir.reference import evaluate
from tccompile.ir.types import DType
from tccompile.ir.weights import float8_scales
from tccompile.load.model import load, sources
from tccompile.lower.graph import lower
from tccompile.options import Options
from tccompile.pipeline import compile, read, to_program
from tccompile.quantize import calibration as files
from tccompile.quantize.calibration import Chosen
from tccompile.quantize.choose import choose
from tccompile.quantize.grid import grid_of, rounded, weight_error
from tccompile.quantize.insert import Tensor
from tccompile.quantize.known import Off, find
from tccompile.quantize.observe import observe, outputs
from tccompile.rewrites import rewrite
from tccompile.runtime.session import Session
from tccompile.stages.quantize import calibrated
from tccompile.stages.quantized_notes import quantization_notes
from tests.networks import feeds, relative_error
from tests.rewrites.common import Net, check_recipes
from tests.tiers import thorough

E4M3 = DType.E4M3


def perceptron() -> Net:
    net = Net(x=(1024, 512))
    h = net("Relu", net("Gemm", "x", net.normal(512, 512, scale=0.04), net.normal(512), transB=1))
    return net.out(net("MatMul", h, net.normal(512, 512, scale=0.04)))


def images() -> Net:
    """A first layer of too few channels, pooling, and a residual sum."""
    net = Net(x=(8, 3, 56, 56))
    h = net("Relu", net("Conv", "x", net.normal(256, 3, 3, 3, scale=0.2), net.normal(256), pads=[1] * 4))
    h = net("MaxPool", h, kernel_shape=[2, 2], strides=[2, 2])
    y = net("Relu", net("Conv", h, net.normal(256, 256, 3, 3, scale=0.02), net.normal(256), pads=[1] * 4))
    y = net("Conv", y, net.normal(256, 256, 3, 3, scale=0.02), net.normal(256), pads=[1] * 4)
    return net.out(net("Relu", net("Add", h, y)))


def saved(net: Net, path: Path, count: int = 4) -> Path:
    rng = np.random.default_rng(5)
    shapes = {x.name: [d.dim_value for d in x.type.tensor_type.shape.dim] for x in net.inputs}
    np.savez(path, **{name: rng.standard_normal((count, *shape)).astype(np.float32) for name, shape in shapes.items()})  # type: ignore[arg-type]
    return path


def operands(program: Program) -> list[set[DType]]:
    return [{program.tensors[name].dtype for name in op.operands} for op in program.ops if isinstance(op, Conv | Gemm)]


def test_the_largest_value_becomes_the_largest_number() -> None:
    x = np.random.default_rng(0).standard_normal(10_000).astype(np.float32) * 3
    grid = grid_of(x, float8=True)
    assert grid.scale == pytest.approx(np.abs(x).max() / 448) and grid.zero == 0 and grid.signed
    assert grid.error == pytest.approx(relative_error(rounded(x, grid), x), rel=1e-3) and 0.02 < grid.error < 0.03
    rows = x.reshape(10, -1)
    np.testing.assert_allclose(float8_scales(rows), np.abs(rows).max(1) / 448, rtol=1e-6)
    assert 0.02 < weight_error(rows, float8=True) < 0.03
    assert grid_of(np.zeros(5, np.float32), float8=True).scale == 1.0


def test_quantizing_by_data_and_then_by_the_file(tmp_path: Path) -> None:
    net, kept = perceptron(), tmp_path / "kept.json"
    options = Options(archs=("sm_90a",), quantize="fp8", calibrate=saved(net, tmp_path / "d.npz"), calibration=kept)
    opened = read(net.model())
    found = calibrated(opened, options)
    head, *_ = quantization_notes(found, options)
    assert head.startswith("fp8: 2 of 2 products; outputs are off by ") and 1e-2 < found.off.largest < 1e-1
    later = Options(archs=("sm_90a",), quantize="fp8", calibration=kept)
    programs = [to_program(opened, {}, later, Dump(None), calibration=c) for c in (found, calibrated(opened, later))]
    assert operands(programs[0]) == [{E4M3}, {E4M3}] and repr(programs[0]) == repr(programs[1])
    changed = json.loads(kept.read_text())
    changed["chosen"]["tensors"]["x"]["grid"]["zero"] = 3
    kept.write_text(json.dumps(changed))
    with pytest.raises(InputError, match="a zero point of 3"):
        files.read(kept)


def test_what_lies_between_products_is_in_float8() -> None:
    """With one scale before and behind what only moves numbers; where others read them too, these read the same."""
    net = Net(x=(1, 16, 8, 8))
    h = net("Relu", net("Conv", "x", net.normal(32, 16, 3, 3, scale=0.1), net.normal(32), pads=[1] * 4))
    h = net("MaxPool", h, kernel_shape=[2, 2], strides=[2, 2])
    y = net("Conv", h, net.normal(32, 32, 1, 1, scale=0.1))
    net.out(net("Relu", net("Add", h, y)))
    graph, weights = rewrite(load(net.model())), sources(net.model())
    x = {"x": np.random.default_rng(3).standard_normal((1, 16, 8, 8)).astype(np.float32)}
    whole = lower(graph)
    seen = observe(whole, [x], weights, {name: 1 for name in ("x", "t1", "t2")}, lambda: None).values
    grids = {"x": grid_of(seen["x"].all(), True), "t1": grid_of(seen["t1"].all(), True)}
    grids["t2"] = grids["t1"]
    tensors = {name: Tensor(grid, seen[name].means, shared=True, tied=True) for name, grid in grids.items()}
    made = Chosen(tensors, {}, ("n0", "n3"), ("n0", "n3"), {}, Off(0.0, 0.0), 1, 0, {}).applied(graph)
    check_recipes(made, net.model())
    program = fuse(lower(rewrite(made)))
    assert operands(program) == [{E4M3}, {E4M3}]
    assert [program.tensors[op.y].dtype for op in program.ops] == [E4M3, E4M3, E4M3, DType.F32, DType.F32]
    (exact,), (found,) = (outputs(p, [x], weights) for p in (whole, program))
    assert 1e-2 < relative_error(*found.values(), *exact.values()) < 1e-1


@thorough
def test_what_stands_between_products_stays_in_bytes(tmp_path: Path) -> None:
    net = images()
    options = Options(archs=("sm_90a",), quantize="fp8", calibrate=saved(net, tmp_path / "d.npz", 2))
    opened = read(net.model())
    found = calibrated(opened, options)
    assert len(found.layers) == 2 and found.off.largest < 1e-1
    program = to_program(opened, {}, options, Dump(None), calibration=found)
    assert [kinds == {E4M3} for kinds in operands(program)] == [False, True, True]
    assert E4M3 in {program.tensors[op.y].dtype for op in program.ops if isinstance(op, Conv)}


def test_a_bound_that_float8_does_not_keep_leaves_halves(tmp_path: Path) -> None:
    net = perceptron()
    data = saved(net, tmp_path / "d.npz")
    found = calibrated(read(net.model()), Options(archs=("sm_90a",), quantize="fp8", calibrate=data, max_error=5e-3))
    assert not found.layers and set(found.floats.values()) == {"the error would be above the bound"}


@thorough
def test_a_plan_computes_what_was_measured(tmp_path: Path) -> None:
    net = perceptron()
    data = saved(net, tmp_path / "d.npz")
    model, x = net.model(), np.load(data)["x"]
    how = {"archs": ("sm_90a",), "calibrate": data}
    with Session(compile(model, **how, quantize="fp8"), "cpu") as session:
        (found,) = session.run(None, {"x": x[-1]})
    with Session(compile(model, **how), "cpu") as session:
        (exact,) = session.run(None, {"x": x[-1]})
    assert 1e-2 < relative_error(found, exact) < 1e-1


def attention(**attrs: float) -> Net:
    """Attention between products, 2 heads of 16 elements."""
    net, to = Net(x=(2, 24, 32)), np.array([2, 24, 2, 16])
    q, k, v = (
        net("Transpose", net("Reshape", net("MatMul", "x", net.normal(32, 32, scale=0.2)), to), perm=[0, 2, 1, 3]) for _ in "qkv"
    )
    y = net("Attention", q, k, v, **attrs)
    y = net("Reshape", net("Transpose", y, perm=[0, 2, 1, 3]), np.array([2, 24, 32]))
    y = net("MatMul", y, net.normal(32, 32, scale=0.2))
    return net.out(y)


def chosen_for(net: Net, wanted: str, formats: tuple[str, ...]) -> tuple[Chosen, gs.Graph, list[dict[str, np.ndarray]]]:
    """What is chosen where steps of nodes of this kind are faster in 8 bits, and no others."""
    model = net.model()
    graph, runs = rewrite(load(model)), [feeds(model, seed) for seed in range(4)]

    def times(graph: gs.Graph) -> dict[str, list[tuple[list[str], float]]]:
        found = {node.name: node.inputs[0].inputs[0].name for node in graph.nodes if node.op == wanted}
        return {"sm_90a": [([name], 1.0 if by.endswith("/DequantizeLinear") else 2.0) for name, by in found.items()]}

    known, measure = find(graph, runs, sources(model), lambda done, total: None, ("fp8",))
    return choose(known.within([graph], (), formats), [graph], 0.2, times, measure)[0], graph, runs


def test_attention_is_in_float8_where_that_is_faster() -> None:
    """Its operands are stored so by what makes them, and what is stated is off by its weights' rounding, too."""
    net = attention()
    chosen, graph, runs = chosen_for(net, "Attention", ("fp8",))
    (name,) = chosen.layers
    assert chosen.float8 == (name,) and len(chosen.tensors) == 3
    program = fuse(lower(rewrite(chosen.applied(graph))))
    (op,) = (op for op in program.ops if isinstance(op, Attention))
    assert all(program.tensors[t].dtype is E4M3 for t in (op.q, op.k, op.v))
    exact, weights = outputs(lower(graph), runs, sources(net.model())), sources(net.model())
    without = [evaluate(program, feed, weights) for feed in runs]
    (y,) = program.outputs
    errors = [relative_error(got[y], own[y]) for got, own in zip(without, exact, strict=True)]
    assert max(errors) < 1.001 * chosen.off.largest < 0.08


@pytest.mark.parametrize(
    ("attrs", "formats", "reason"),
    [({"softcap": 2.0}, ("fp8",), "it is attention with softcap"), ({}, ("int8",), "not multiplied in integers")],
)
def test_attention_that_stays_in_floats(attrs: dict[str, float], formats: tuple[str, ...], reason: str) -> None:
    chosen, graph, _ = chosen_for(attention(**attrs), "Attention", formats)
    (name,) = (node.name for node in graph.nodes if node.op == "Attention")
    assert not chosen.layers and reason in chosen.floats[name]
