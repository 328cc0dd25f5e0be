"""Models quantized to floats of 8 bits: what becomes products of these, what only moves them, and results beside ONNX Runtime."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper
from onnxruntime import quantization

import tccompile
from tccompile.errors import UsageError
from tccompile.ir.ops import Attention, Conv, Gemm, Pool
from tccompile.ir.program import Program
from tccompile.ir.storage import from_storage
from tccompile.ir.types import FLOAT8, DType
from tccompile.ir.weights import multiples
from tccompile.load.model import sources
from tccompile.pipeline import without_code
from tccompile.refit.constants import refitted_constants
from tests.networks import relative_error
from tests.tiers import thorough

E4M3, E5M2 = FLOAT8
KINDS = {E4M3: ml_dtypes.float8_e4m3fn, E5M2: ml_dtypes.float8_e5m2}


class Made:
    """A model in the making, as quantizers write it."""

    def __init__(self, kind: DType = E4M3, dtype: Any = np.float32) -> None:
        self.rng, self.kind, self.dtype = np.random.default_rng(7), KINDS[kind], np.dtype(dtype)
        self.nodes: list[onnx.NodeProto] = []
        self.weights: list[onnx.TensorProto] = []

    def node(self, op: str, inputs: list[str], output: str, **attrs: Any) -> str:
        self.nodes.append(helper.make_node(op, inputs, [output], f"{output}/{op}", **attrs))
        return output

    def weight(self, name: str, values: Any, dtype: Any = None) -> str:
        self.weights.append(numpy_helper.from_array(np.asarray(values).astype(dtype or self.dtype), name))
        return name

    def stored(self, x: str, scale: Any = 4 / 448, **attrs: Any) -> str:
        """x through float8."""
        zero = np.zeros(np.shape(scale))
        given = [self.weight(f"{x}/scale", scale), self.weight(f"{x}/zero", zero, self.kind)]
        self.node("QuantizeLinear", [x, *given], f"{x}/8", **attrs)
        return self.node("DequantizeLinear", [f"{x}/8", *given], f"{x}/back", **attrs)

    def filters(self, name: str, shape: tuple[int, ...], axis: int | None = 0) -> str:
        """Weights that are stored in E4M3, with a scale for each output channel, or one."""
        values = self.rng.standard_normal(shape) * float(np.prod(shape[1:])) ** -0.5
        others = None if axis is None else tuple(a for a in range(len(shape)) if a != axis)
        scale = (np.abs(values).max(others) / 448).astype(self.dtype)
        along = scale if axis is None else scale.reshape([-1 if a == axis else 1 for a in range(len(shape))])
        given = [self.weight(name, values / along, ml_dtypes.float8_e4m3fn), self.weight(f"{name}/scale", scale)]
        given.append(self.weight(f"{name}/zero", np.zeros(scale.shape), ml_dtypes.float8_e4m3fn))
        return self.node("DequantizeLinear", given, f"{name}/back", **({} if axis is None else {"axis": axis}))

    def conv(self, x: str, y: str, outputs: int, inputs: int, window: int = 3, **attrs: Any) -> str:
        bias = self.weight(f"{y}/bias", self.rng.standard_normal(outputs) * 0.1)
        weights = self.filters(f"{y}/w", (outputs, inputs, window, window))
        return self.node("Conv", [x, weights, bias], y, pads=[window // 2] * 4, **attrs)

    def model(self, shape: tuple[int, ...], y: str) -> onnx.ModelProto:
        elem = helper.np_dtype_to_tensor_dtype(self.dtype)
        x, out = (helper.make_tensor_value_info(n, elem, s) for n, s in (("x", shape), (y, None)))
        graph = helper.make_graph(self.nodes, "float8", [x], [out], self.weights)
        made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
        return onnx.shape_inference.infer_shapes(made, strict_mode=True)


def lowered(made: onnx.ModelProto, precision: str = "mixed", bar: float = 1e-3) -> Program:
    """The model's program, whose results on the CPU are ONNX Runtime's."""
    (x,) = made.graph.input
    shape = [d.dim_value for d in x.type.tensor_type.shape.dim]
    dtype = helper.tensor_dtype_to_np_dtype(x.type.tensor_type.elem_type)
    feed = {"x": np.random.default_rng(3).standard_normal(shape).astype(dtype)}
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    (expected,) = onnxruntime.InferenceSession(made.SerializeToString(), options).run(None, feed)
    plan = without_code(made, precision=precision)
    with tccompile.Session(plan, "cpu") as session:
        (found,) = session.run(None, feed)
    assert relative_error(found, expected) < bar
    return plan.entries[0].program


def kinds(program: Program, *ops: type) -> list[set[DType]]:
    """Of each such op the types of its operands."""
    return [{program.tensors[name].dtype for name in op.operands} for op in program.ops if isinstance(op, ops)]


def network(made: Made) -> str:
    """What is between products stays in float8: one byte an element, from kernel to kernel."""
    x = made.node("Relu", [made.conv(made.stored("x"), "a", 32, 16)], "b")
    x = made.stored(made.node("MaxPool", [made.stored(x)], "c", kernel_shape=[2, 2], strides=[2, 2]))
    x = made.node("Relu", [made.node("Add", [made.conv(x, "d", 32, 32), x], "e")], "f")
    x = made.node("Flatten", [made.node("GlobalAveragePool", [x], "g")], "h")
    x = made.node("Gemm", [made.stored(x), made.filters("i", (24, 32)), made.weight("ib", np.ones(24))], "j", transB=1)
    return made.node("MatMul", [made.stored(x), made.filters("k", (24, 40), 1)], "y")


def test_a_network() -> None:
    made = Made()
    network(made)
    program = lowered(made.model((2, 16, 12, 12), "y"), bar=1e-6)
    assert kinds(program, Conv, Gemm) == [{E4M3}] * 4
    inner = [program.tensors[op.y].dtype for op in program.ops]
    assert inner == [E4M3, E4M3, E4M3, DType.F16, E4M3, E4M3, DType.F32]
    (pool,) = (op for op in program.ops if isinstance(op, Pool))
    assert pool.nodes == ("c/MaxPool",)


def test_a_network_in_halves() -> None:
    """As float16 models say it: scales are halves, and weights have been rounded to halves."""
    made = Made(dtype=np.float16)
    made.node("Relu", [made.conv(made.stored("x"), "a", 32, 16)], "y")
    assert kinds(lowered(made.model((1, 16, 6, 6), "y")), Conv) == [{E4M3}]


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_weights_that_the_model_itself_quantizes(dtype: Any) -> None:
    """As ModelOpt writes them: floats, with QuantizeLinear and DequantizeLinear behind. Plans have bytes, and take others."""
    made, turned = Made(dtype=dtype), Made(dtype=dtype)
    for m, step in ((made, 1), (turned, -1)):
        w = m.weight("w", m.rng.standard_normal((32, 24))[:, ::step] * 0.2)
        m.node("MatMul", [m.stored("x"), m.stored(w, np.linspace(1, 2, 24) / 448, axis=1)], "y")
    model, other = made.model((5, 32), "y"), turned.model((5, 32), "y")
    program = lowered(model, bar=1e-3)
    assert kinds(program, Gemm) == [{E4M3}] and len(program.ops) == 2
    plan, expected = without_code(model), without_code(other)
    found = refitted_constants(plan, {"w": sources(other)["w"]}, sources(model))
    assert found
    for name, stored in found.items():
        assert stored == expected.weight(name) != plan.weight(name)


MOVED: dict[str, Callable[[Made, str], str]] = {
    "transposed": lambda m, x: m.node("Transpose", [x], "t", perm=[0, 2, 3, 1]),
    "reshaped": lambda m, x: m.node("Reshape", [x, m.weight("shape", [1, 32, 36], np.int64)], "t"),
    "sliced": lambda m, x: m.node("Slice", [x, *(m.weight(n, [v], np.int64) for n, v in (("s", 1), ("e", 5), ("a", 2)))], "t"),
    "joined": lambda m, x: m.node("Concat", [x, m.stored(m.node("Neg", ["x"], "n"))], "t", axis=1),
}


@pytest.mark.parametrize("how", MOVED)
def test_what_only_moves_elements_moves_bytes(how: str) -> None:
    """Quantized before and behind, by the same scale."""
    made = Made()
    moved = made.stored(MOVED[how](made, made.stored("x")))
    if how in ("transposed", "reshaped"):
        last = 32 if how == "transposed" else 36
        made.node("MatMul", [moved, made.filters("w", (last, 24), 1)], "y")
    else:
        made.conv(moved, "y", 24, 64 if how == "joined" else 32)
    program = lowered(made.model((1, 32, 6, 6), "y"))
    assert kinds(program, Conv, Gemm) == [{E4M3}]
    halves = {name for name, t in program.tensors.items() if t.dtype is DType.F16}
    assert len(halves) <= 1 and halves <= {op.y for op in program.ops if isinstance(op, Conv)}  # the result, before it is turned


def test_other_scales_are_rounded_again() -> None:
    made = Made()
    pooled = made.node("MaxPool", [made.stored("x")], "p", kernel_shape=[3, 3])
    made.conv(made.stored(pooled, 3 / 448), "y", 24, 16)
    program = lowered(made.model((1, 16, 8, 8), "y"))
    assert kinds(program, Conv) == [{E4M3}] and sum("on_grid" in str(op.epilogue.expr) for op in program.ops) == 2


def test_both_kinds_and_one_scale_for_all_weights() -> None:
    made = Made(E5M2)
    made.node("MatMul", [made.stored("x", 0.25), made.filters("w", (32, 24), None)], "y")
    assert kinds(lowered(made.model((5, 32), "y")), Gemm) == [{E5M2, E4M3}]


def softmaxed(made: Made) -> None:
    x = made.node("Cast", [made.node("Cast", ["x"], "narrow", to=TensorProto.FLOAT8E4M3FN)], "wide", to=TensorProto.FLOAT)
    made.node("Add", [made.node("Softmax", [x], "s"), made.conv(x, "c", 16, 16)], "y")


REFUSED: dict[str, Callable[[Made], Any]] = {
    "few channels": lambda m: m.conv(m.stored("x"), "y", 16, 2, group=8),
    "depthwise": lambda m: m.conv(m.stored("x"), "y", 16, 1, group=16),
    "scales of channels": lambda m: m.conv(m.stored("x", np.linspace(0.01, 0.02, 16), axis=1), "y", 16, 16),
    "weights in floats": lambda m: m.node("Conv", [m.stored("x"), m.weight("w", m.rng.standard_normal((16, 16, 1, 1)))], "y"),
    "another reader": softmaxed,
}

EXACT = ("few channels", "depthwise")
"""Whose weights are numbers of float8, which halves hold."""


@pytest.mark.parametrize("case", REFUSED)
def test_others_are_multiplied_in_halves(case: str) -> None:
    made = Made()
    REFUSED[case](made)
    program = lowered(made.model((1, 16, 6, 6), "y"), bar=1e-6 if case in EXACT else 1e-3)
    assert not {t.dtype for t in program.tensors.values()} & {*FLOAT8}


def attended(made: Made, stored: str = "qkv", heads: int = 2, size: int = 32, as_node: bool = False) -> str:
    """Attention as exporters take it apart, or as the operator, of projections of x, of which some are stored in float8."""
    found = {}
    for i, name in enumerate("qkv"):
        weight = made.weight(f"w{name}", made.rng.standard_normal((64, heads * size)) * 64**-0.5)
        made.node("MatMul", ["x", weight], name)
        made.node("Reshape", [name, made.weight(f"{name}/shape", [0, 0, heads, size], np.int64)], f"{name}/heads")
        found[name] = made.node("Transpose", [f"{name}/heads"], f"{name}/h", perm=[0, 2, 1, 3])
        if name in stored:
            found[name] = made.stored(found[name], (4 + i) / 448)
    if as_node:
        return made.node("Attention", [*found.values()], "y", scale=0.25)
    made.node("Transpose", [found["k"]], "kt", perm=[0, 1, 3, 2])
    scaled = made.node("Mul", [made.node("MatMul", [found["q"], "kt"], "scores"), made.weight("c", size**-0.5)], "scaled")
    return made.node("MatMul", [made.node("Softmax", [scaled], "weights", axis=-1), found["v"]], "y")


@pytest.mark.parametrize("stored", ["qkv", "qk", "v"])
def test_attention(stored: str) -> None:
    """It reads q, k and v in E4M3 if it reads all of them so, as the products before it have stored them."""
    made = Made()
    attended(made, stored)
    program = lowered(made.model((2, 40, 64), "y"), "fp32")
    kind = E4M3 if stored == "qkv" else DType.F32
    assert kinds(program, Attention) == [{kind}]
    assert {program.tensors[op.y].dtype for op in program.ops if isinstance(op, Gemm)} == {kind}


def test_attention_of_parts_of_a_projection() -> None:
    """Heads side by side, in one tensor with one scale."""
    made = Made()
    made.node("MatMul", ["x", made.weight("w", made.rng.standard_normal((64, 192)) * 0.125)], "qkv")
    made.nodes.append(helper.make_node("Split", [made.stored("qkv")], ["q", "k", "v"], axis=2, num_outputs=3))
    made.node("Attention", ["q", "k", "v"], "y", q_num_heads=2, kv_num_heads=2)
    model = made.model((2, 19, 64), "y")
    model.opset_import[0].version = 23
    assert kinds(lowered(model, "fp32"), Attention) == [{E4M3}]


def test_attention_as_an_operator_and_heads_that_are_too_large() -> None:
    made = Made()
    attended(made, as_node=True)
    model = made.model((2, 40, 64), "y")
    model.opset_import[0].version = 23
    assert kinds(without_code(model).entries[0].program, Attention) == [{E4M3}]
    made = Made()
    attended(made, size=264)
    assert kinds(lowered(made.model((1, 9, 64), "y"), bar=2e-2), Attention) == []


def test_scales_are_found_from_values() -> None:
    rng = np.random.default_rng(0)
    numbers = from_storage(rng.integers(0, 0x7F, (9, 300)).astype(np.uint8), E4M3) * rng.choice([-1, 1], (9, 300))
    numbers[8] = 0
    rows = (numbers * rng.uniform(1e-4, 2, (9, 1))).astype(np.float32) * np.float32(0.37)
    scales = multiples(rows)
    assert (scales > 0).all()
    q = rows / scales[:, None]
    np.testing.assert_allclose(q, from_storage(np.asarray(q).astype(KINDS[E4M3]).view(np.uint8), E4M3), rtol=1e-6)
    rows[3, 7] *= 1.03
    for other in (rows, rng.standard_normal((4, 20)).astype(np.float32)):
        with pytest.raises(ValueError, match="no numbers of float8"):
            multiples(other)


def test_scales_follow_weights_that_are_given_later() -> None:
    """A plan with other weights in it is that of a model with these; weights that are none of float8 are refused."""
    made, turned = Made(), Made()
    for m in (made, turned):
        m.node("MatMul", [m.stored("x"), m.filters("w", (32, 24), 1)], "y")
    at = next(i for i, w in enumerate(turned.weights) if w.name == "w")
    turned.weights[at] = numpy_helper.from_array(numpy_helper.to_array(turned.weights[at])[::-1] / 2, "w")
    model, other = made.model((5, 32), "y"), turned.model((5, 32), "y")
    plan, expected = without_code(model), without_code(other)
    new = sources(other)["w"]
    found = refitted_constants(plan, {"w": new}, sources(model))
    assert len(found) == 2
    for name, stored in found.items():
        assert stored == expected.weight(name) != plan.weight(name)
    with pytest.raises(UsageError, match="no numbers of float8"):
        refitted_constants(plan, {"w": new * np.float32(1.01) + np.float32(1e-3)}, sources(model))


@thorough
@pytest.mark.parametrize("per_channel", [False, True])
def test_what_onnx_runtimes_quantizer_writes(per_channel: bool, tmp_path: Path) -> None:
    made = Made()
    x = made.node("Relu", [made.node("Conv", ["x", made.weight("a", made.rng.standard_normal((32, 16, 3, 3)) * 0.1)], "b")], "c")
    x = made.node("Flatten", [made.node("GlobalAveragePool", [made.node("MaxPool", [x], "d", kernel_shape=[2, 2])], "e")], "f")
    made.node("Gemm", [x, made.weight("g", made.rng.standard_normal((32, 24)) * 0.2), made.weight("h", np.ones(24))], "y")
    onnx.save(made.model((1, 16, 8, 8), "y"), tmp_path / "floats.onnx")

    class Data(quantization.CalibrationDataReader):  # type: ignore[misc]
        def __init__(self) -> None:
            self.left = iter([{"x": made.rng.standard_normal((1, 16, 8, 8)).astype(np.float32)} for _ in range(4)])

        def get_next(self) -> dict[str, np.ndarray] | None:
            return next(self.left, None)

    kinds_ = dict.fromkeys(("activation_type", "weight_type"), quantization.QuantType.QFLOAT8E4M3FN)
    method = quantization.CalibrationMethod.Distribution
    quantization.quantize_static(
        tmp_path / "floats.onnx", tmp_path / "made.onnx", Data(), per_channel=per_channel, calibrate_method=method, **kinds_
    )
    assert kinds(lowered(onnx.load(tmp_path / "made.onnx")), Conv, Gemm) == [{E4M3}] * 2
