"""What is stored in fp16, scaled, or in fp32: from the values that tensors take, and from what the user says."""

from __future__ import annotations

import re
import subprocess
import sys
import tracemalloc
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from tccompile.dump import Dump
from tccompile.errors import InputError, UnsupportedError, UsageError, VerificationError
from tccompile.ir import halves, weights
from tccompile.ir.expr import walk
from tccompile.ir.feeds import samples, seeded
from tccompile.ir.ops import Conv, Gemm, Scatter, Softmax
from tccompile.ir.program import Program
from tccompile.ir.reference import evaluate
from tccompile.ir.tensor import dense
from tccompile.ir.types import DType
from tccompile.ir.verify import verify
from tccompile.ir.weights import Literal, transform
from tccompile.load.model import sources
from tccompile.options import Options
from tccompile.pipeline import to_program
from tccompile.plan.file import Plan
from tccompile.precision import ranges
from tccompile.precision.formats import _Choice, _scaled, precision
from tccompile.precision.powers import powers_of
from tccompile.precision.ranges import activations, total_flops
from tccompile.precision.sensitivity import LIMIT, Need, _moved_softmax, fp16
from tccompile.runtime.cpu import CpuEngine
from tccompile.stages import measure
from tests.gpu.cases import program_of
from tests.networks import feeds, reference, relative_error, skeleton
from tests.plans import without_code
from tests.rewrites.common import Net
from tests.tiers import thorough, usually

LIGHT = sorted((Path(onnx.__file__).parent / "backend" / "test" / "data" / "light").glob("*.onnx"))
LIGHT = [path for path in LIGHT if path.stem != "light_vgg19"]  # its like is light_zfnet512, in a quarter of the time


class Network:
    """A model in the making: `x = net(x, "Conv", w, …)`; every node is called as its output."""

    def __init__(self, seed: int = 0):
        self.nodes: list[onnx.NodeProto] = []
        self.weights: list[onnx.TensorProto] = []
        self.rng = np.random.default_rng(seed)

    def __call__(self, x: str | np.ndarray, op: str, *more: str | np.ndarray, name: str = "", **attributes) -> str:
        inputs: list[str] = []
        for value in (x, *more):
            if isinstance(value, np.ndarray):
                self.weights.append(numpy_helper.from_array(value, f"w{len(self.weights)}"))
                value = self.weights[-1].name
            inputs.append(value)
        name = name or f"{op}_{len(self.nodes)}"
        self.nodes.append(helper.make_node(op, inputs, [name], name=name, **attributes))
        return name

    def weight(self, *shape: int, gain: float = 1.0) -> np.ndarray:
        """Random weights that multiply the size of what they are applied to by `gain`."""
        return (self.rng.standard_normal(shape) * gain / np.sqrt(np.prod(shape[1:]))).astype(np.float32)

    def conv(self, x: str, o: int, c: int, k: int = 3, gain: float = 1.0, groups: int = 1, **attributes) -> str:
        w, b = self.weight(o, c // groups, k, k, gain=gain), self.weight(o, 1).reshape(o)
        return self(x, "Conv", w, b, group=groups, pads=[k // 2] * 4, **attributes)

    def model(self, shape: tuple[int, ...], *outputs: str, opset: int = 20) -> onnx.ModelProto:
        value = helper.make_tensor_value_info
        ends = [value(name, TensorProto.FLOAT, None) for name in outputs]
        graph = helper.make_graph(self.nodes, "g", [value("x", TensorProto.FLOAT, shape)], ends, self.weights)
        made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=10)
        return onnx.shape_inference.infer_shapes(made, data_prop=True)


def run(plan: Plan, inputs: dict[str, np.ndarray], check_finite: bool = False) -> dict[str, np.ndarray]:
    entry = plan.entries[0]
    return CpuEngine(plan, entry, entry.sections[0], check_padding=True, check_finite=check_finite).run(inputs)


def errors(plan: Plan, model: onnx.ModelProto, inputs: dict[str, np.ndarray]) -> dict[str, float]:
    """The relative error of each output; NaN where either is not finite."""
    out, expected = run(plan, inputs), reference(model, inputs)
    assert all(np.isfinite(e).all() for e in expected.values())
    return {name: relative_error(out[name], e) if np.isfinite(out[name]).all() else np.nan for name, e in expected.items()}


def on_tensor_cores(plan: Plan) -> float:
    """The part of the floating-point operations of convolutions and products that runs there."""
    program, steps = plan.entries[0].program, plan.entries[0].sections[0].steps
    return sum(program.flops(program.ops[s.op]) for s in steps if s.tensor_cores) / total_flops(program)


def test_threads_load_nothing_of_numpy() -> None:
    """Which does so when asked for a part of it: by two threads at once, that ended in endless recursion."""
    code = """
import threading
import numpy
from tests.test_precision import Network
def load(name, loads=numpy.__getattr__):
    assert threading.current_thread() is threading.main_thread(), name
    return loads(name)
net = Network()
model = net.model((1, 4, 8, 8), net(net(net("x", "Relu"), "Conv", numpy.ones((4, 4, 3, 3), "float32")), "Relu"))
numpy.__getattr__ = load
from tests.plans import without_code
without_code(model, ("sm_90a",), precision="mixed")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert not done.returncode, done.stderr


# --- Networks whose values leave fp16's range --------------------------------------------------------------------------


def mixer() -> onnx.ModelProto:
    """Depthwise and pointwise convolutions with GELU, each batch of them larger than the last."""
    n = Network(1)
    x = n("x", "Conv", n.weight(32, 3, 4, 4), strides=[4, 4])
    for _ in range(6):
        x = n(n(n.conv(x, 32, 32, 5, gain=20, groups=32), "Gelu"), "Add", x)
        x = n(n.conv(x, 32, 32, 1, gain=20), "Gelu")
    return n.model((1, 3, 32, 32), n(n(x, "GlobalAveragePool"), "Conv", n.weight(16, 32, 1, 1)))


def linear_attention() -> onnx.ModelProto:
    """Products of unnormalized keys and values over all tokens, divided by the sum of what they were weighted with."""
    n = Network(2)
    w = [n.weight(24, 24, gain=g) for g in (60, 60, 40)]
    q, k, v = (n("x", "MatMul", m) for m in w)
    q, k = n(q, "Relu"), n(k, "Relu")
    kv = n(n(k, "Transpose", perm=[0, 2, 1]), "MatMul", v)
    total = n(k, "ReduceSum", np.array([1], np.int64), keepdims=1)
    numbers = n(q, "MatMul", kv)
    weights = n(n(q, "Mul", total), "ReduceSum", np.array([2], np.int64), keepdims=1)
    return n.model((1, 512, 24), n(numbers, "Div", n(weights, "Add", np.array(1e-15, np.float32))))


def branches() -> onnx.ModelProto:
    """Convolutions side by side, added or concatenated, pooled, normalized in the end: scales of all kinds meet."""
    n = Network(3)
    x = n(n.conv("x", 16, 3), "Relu")
    for i in range(5):
        a, b = n.conv(x, 16, 16, gain=30), n.conv(x, 16, 16, 1, gain=3)
        x = n(n(n(a, "Add", b), "LeakyRelu", alpha=0.1), "Add", x)
        if i == 2:
            pooled = n(x, "AveragePool", kernel_shape=[3, 3], pads=[1, 1, 1, 1], count_include_pad=1)
            x = n(n.conv(n(pooled, "Concat", n(x, "MaxPool", kernel_shape=[3, 3], pads=[1] * 4), axis=1), 16, 32), "Relu")
    sigmoid = n(n(x, "Mul", np.array(1e-6, np.float32)), "Sigmoid")
    up = n(x, "Resize", "", np.array([1, 1, 2, 2], np.float32), mode="linear")
    normal = n(x, "InstanceNormalization", np.ones(16, np.float32), np.zeros(16, np.float32))
    squares = n(n(x, "ReduceSumSquare", np.array([2, 3], np.int64)), "Sqrt")
    return n.model((1, 3, 12, 12), sigmoid, n(up, "Mul", np.array(1e-3, np.float32)), normal, squares)


@pytest.mark.parametrize("network", [mixer, linear_attention, branches])
def test_values_beyond_fp16_are_scaled(network):
    model = network()
    inputs = {"x": seeded(without_code(model, ("sm_80",)).entries[0].program, 5)["x"]}
    assert not all(error <= 0.1 for error in errors(without_code(model, ("sm_80",)), model, inputs).values())
    plan = without_code(model, ("sm_80",), precision="mixed")
    says = "fp32: values up to .*; a product of activations" if network is linear_attention else "fp16 times 2.-.*: values up to "
    assert any(re.match(says, s.reason) for s in storage(plan).values())
    for name, error in errors(plan, model, inputs).items():
        assert error <= 3e-3, (name, error)
    exact = {t.name for t in operands(plan.entries[0].program) if t.dtype is DType.F32}
    assert network is linear_attention or not exact


def storage(plan: Plan):
    return plan.entries[0].program.storage


def operands(program: Program):
    """What Conv and Gemm multiply."""
    return [program.tensors[name] for op in program.ops if isinstance(op, Conv | Gemm) for name in op.operands]


def test_values_that_drown_are_scaled():
    """Numbers of 1e-8 before a convolution: in fp16 they are 0 or of a few bits."""
    n = Network(4)
    x = n(n(n(n.conv("x", 8, 8), "Tanh"), "Mul", np.array(1e-8, np.float32)), "Tanh")
    x = n(x, "Conv", n.weight(16, 8, 3, 3))
    model = n.model((1, 8, 9, 9), n(x, "Mul", np.array(3e7, np.float32)))
    inputs = feeds(model, 1)
    with pytest.raises(UnsupportedError, match="beyond 65504"):  # 3e7 is folded into the weights
        without_code(model, ("sm_80",))
    plan = without_code(model, ("sm_80",), precision="mixed")
    signs = {name in plan.entries[0].program.constants: np.sign(np.log2(s.scale)) for name, s in storage(plan).items()}
    assert signs == {True: -1, False: 1}
    assert max(errors(plan, model, inputs).values()) <= 1e-3


@pytest.mark.parametrize("size", [0.1, 1, 30])
def test_powers_of_activations_have_no_scale_that_larger_inputs_leave(size):
    """Fourth powers of 1e-2 before a convolution, a million times as large where inputs are 30 times as large."""
    n = Network(4)
    x = n(n("x", "Mul", np.array(1e-2, np.float32)), "Pow", np.array(4, np.float32))
    model = n.model((1, 8, 9, 9), n(x, "Conv", n.weight(16, 8, 3, 3)))
    inputs = {name: size * x for name, x in feeds(model, 1).items()}
    assert max(errors(without_code(model, ("sm_80",), precision="mixed"), model, inputs).values()) <= 1e-3


@pytest.mark.parametrize("size", [1e6, 1e-8])
def test_weights_that_fp16_does_not_hold_are_scaled(size):
    n = Network(5)
    x = n("x", "Conv", n.weight(16, 8, 3, 3, gain=size), pads=[1] * 4)
    x = n(x, "InstanceNormalization", np.ones(16, np.float32), np.zeros(16, np.float32), epsilon=1e-30)
    model = n.model((1, 8, 9, 9), n(n(x, "Flatten"), "MatMul", n.weight(16 * 81, 8, gain=size)))
    plan = without_code(model, ("sm_80",), precision="mixed")
    scaled = [s.scale for name, s in storage(plan).items() if name in plan.entries[0].program.constants]
    assert len(scaled) == 2 and all((s < 1) == (size > 1) for s in scaled)
    assert max(errors(plan, model, feeds(model, 1)).values()) <= 1e-3
    assert {t.dtype for t in operands(plan.entries[0].program)} == {DType.F16}


def test_values_too_far_apart_for_fp16_stay_in_fp32():
    """A mask's -1e30 beside scores of 1: no scale keeps both, and Softmax takes none."""
    n = Network(6)
    scores = n("x", "MatMul", n.weight(16, 16))
    mask = np.where(np.arange(16) % 3 == 0, np.float32(-1e30), np.float32(0))
    masked = n(scores, "Add", mask, name="masked")
    probabilities = n(n(masked, "Identity"), "Softmax", axis=-1)
    model = n.model((1, 16, 16), probabilities, n(masked, "Max", np.array(-4, np.float32)))
    plan = without_code(model, ("sm_80",), precision="mixed")
    (wide,) = [s for name, s in storage(plan).items() if plan.entries[0].program.tensors[name].dtype is DType.F32]
    assert wide.reason.startswith("fp32: values up to 1.0e+30, most around ") and wide.scale == 1.0
    assert max(errors(plan, model, feeds(model, 1)).values()) <= 1e-3
    assert on_tensor_cores(plan) == 1


@pytest.mark.parametrize("size", [1.0, 2.0**-4, 2.0**-8])
def test_products_of_activations_are_right_for_smaller_inputs_too(size):
    """Attention without a softmax, as vision networks have it: the numerator is a cube of what comes in, and what it is divided
    by a square, far beyond fp16 for inputs as they are measured."""
    net = Network()
    rows = net("x", "MatMul", net.weight(32, 32, gain=40.0))
    q, k = (net(net(rows, "MatMul", net.weight(32, 16)), "Relu") for _ in range(2))
    v = net(rows, "MatMul", net.weight(32, 16))
    over = net(q, "MatMul", net(net(k, "Transpose", perm=[0, 2, 1]), "MatMul", v))
    total = net(k, "ReduceSum", np.array([1]))
    under = net(net(q, "Mul", total), "ReduceSum", np.array([2]))
    model = net.model((2, 64, 32), net(net(over, "Div", under), "MatMul", net.weight(16, 8)))
    inputs = {"x": np.random.default_rng(1).standard_normal((2, 64, 32), np.float32) * np.float32(size)}
    out, expected = run(without_code(model, ("sm_80",), precision="mixed"), inputs), reference(model, inputs)
    for name, ref in expected.items():
        assert relative_error(out[name], ref) <= 1e-3


def test_the_lowest_float_as_a_mask_hides_whole_rows_evenly():
    """fp16 times a power of two would round it up to infinity: rows that see nothing would be NaN, or 0."""
    n = Network(18)
    lowest, zero = np.array(np.finfo(np.float32).min), np.zeros((), np.float32)
    padding = n("x", "Greater", np.array(-10, np.float32), name="padding")
    hidden = n(padding, "Where", lowest, zero, name="hidden")
    rows = n(n(n("x", "Relu"), "Mul", np.array(0.1, np.float32)), "Add", n(hidden, "Identity"))
    weights = n(rows, "Softmax", axis=-1)
    model = n.model((1, 4, 16, 16), n(weights, "MatMul", n.weight(16, 16)), n(hidden, "Transpose", perm=[0, 1, 3, 2]))
    plan = without_code(model, ("sm_80",), precision="mixed")
    assert max(errors(plan, model, feeds(model, 1)).values()) <= 1e-3


def test_a_convolution_of_values_too_far_apart_runs_in_fp32():
    n = Network(7)
    x = n(n("x", "Mul", np.geomspace(1e-9, 1e9, 16, dtype=np.float32).reshape(1, 16, 1, 1)), "Relu", name="wide")
    w = n.weight(8, 16, 1, 1) / np.geomspace(1e-9, 1e9, 16, dtype=np.float32).reshape(1, 16, 1, 1)
    model = n.model((1, 16, 8, 8), n(x, "Conv", w.astype(np.float32)))
    plan = without_code(model, ("sm_80",), precision="mixed")
    assert {t.dtype for t in operands(plan.entries[0].program)} == {DType.F32}
    assert max(errors(plan, model, feeds(model, 1)).values()) <= 1e-5
    assert on_tensor_cores(plan) == 0


@pytest.mark.parametrize("between", ["nothing", "concatenation", "rows", "factor"])
@pytest.mark.parametrize("offset", [3e2, 1e6])
def test_what_a_norm_subtracts_is_not_what_rounding_is_measured_by(between, offset):
    """Means of 300 and deviations of 1: rounded to fp16, values are 1/4 apart. Products read fp16 all the same."""
    n = Network(19)
    x = n("x", "Conv", n.weight(16, 8, 3, 3, gain=offset / 300), np.full(16, offset, np.float32))
    if between == "factor":  # and what is added to it, and a part of the result
        x = n(
            n(n(x, "Mul", n.rng.uniform(0.5, 2, (16, 1, 1)).astype(np.float32)), "Add", x),
            "Slice",
            *(np.array([i]) for i in (1, 7, 2)),
        )
    if between == "concatenation":
        x = n(x, "Concat", n(n("x", "Conv", n.weight(16, 8, 3, 3)), "Tanh"), axis=1)
    if between == "rows":
        x = n(n(x, "Reshape", np.array([1, 16, 64])), "Transpose", perm=[0, 2, 1])
        y = n(x, "LayerNormalization", np.ones(16, np.float32), axis=-1)
    else:
        c = {"concatenation": 32}.get(between, 16)
        y = n(x, "InstanceNormalization", np.ones(c, np.float32), np.zeros(c, np.float32))
    model = n.model((1, 8, 10, 10), y)
    plan = without_code(model, ("sm_80",), precision="mixed")
    assert any("it would move what " in s.reason for s in storage(plan).values())
    assert max(errors(plan, model, feeds(model, 1)).values()) <= 1e-3
    assert {t.dtype for t in operands(plan.entries[0].program)} == {DType.F16}


@pytest.mark.parametrize("op", ["Softmax", "LogSoftmax"])
@pytest.mark.parametrize("between", ["nothing", "mask", "rows"])
def test_what_a_softmax_subtracts_is_not_what_rounding_is_measured_by(between, op):
    """Logits of mean 1000 and deviation 1: rounded to fp16, they are 1/2 apart. Products read fp16 all the same."""
    n = Network(20)
    x = n(n("x", "MatMul", n.weight(24, 32) / 5), "Add", np.full(32, 1e3, np.float32), name="logits")
    if between == "mask":  # most of a row is far below what counts
        hidden = np.where(np.arange(32) % 3 > 0, -1e4, 0).astype(np.float32)
        x = n(n(x, "Relu"), "Add", hidden)
    if between == "rows":
        x = n(x, "Transpose", perm=[1, 0])
    model = n.model((16, 24), n(x, op, axis=0 if between == "rows" else -1))
    plan = without_code(model, ("sm_80",), precision="mixed")
    assert any("it would move what " in s.reason for s in storage(plan).values())
    assert max(errors(plan, model, feeds(model, 1)).values()) <= 1e-3
    assert {t.dtype for t in operands(plan.entries[0].program)} == {DType.F16}


@pytest.mark.parametrize("kind", ["small", "far apart", "one number", "all masked", "masked", "not finite", "nothing"])
def test_logits_that_no_offset_drowns_stay_in_fp16(kind):
    x = np.random.default_rng(21).standard_normal((64, 50)).astype(np.float32)
    match kind:
        case "far apart":  # their sums are no more exact than this
            x *= 40
        case "one number":
            x[:] = 1000
        case "all masked":
            x[:] = -np.inf
        case "masked":
            x[:, ::3] = -np.inf
        case "not finite":
            x[::2, 3], x[5, 4], x[7, 7] = np.inf, np.nan, -np.inf
        case "nothing":
            x = x[:, :0]
    for log in (False, True):
        with np.errstate(all="ignore"):
            assert _moved_softmax(Softmax(nodes=("s",), y="y", x="x", axis=1, log=log), x, fp16(x)) <= LIMIT


def test_what_was_measured_of_a_network_of_other_shapes_may_have_no_reader():
    """A Softmax of the smaller images that were run may be an Attention's of this program."""
    n = Network(22)
    model = n.model((4, 8), n(n(n("x", "MatMul", n.weight(8, 8)), "Relu", name="y"), "MatMul", n.weight(8, 8)))
    program = to_program(model, {}, Options(precision="fp32"), Dump(None))
    spread = ranges.Spread(largest=1.0, need=Need("a softmax", 1.0))
    assert precision(program, "mixed", {name: spread for name in program.tensors}).storage == {}


def test_a_scaled_tensor_that_overflows_is_named_with_its_range():
    """Inputs far larger than those that were seen: where fp16 ends is told of the values, not of what is stored."""
    n = Network(17)
    x = n(n.conv("x", 8, 3, gain=1e6), "LeakyRelu", alpha=0.5)
    model = n.model((1, 3, 10, 10), n(n.conv(x, 8, 8), "Mul", np.array(1e-9, np.float32)))
    plan = without_code(model, ("sm_80",), precision="mixed")
    inputs = {"x": 5000 * feeds(model, 1)["x"]}
    with pytest.raises(VerificationError, match=r"float16 times 2\^(\d+) ends at ([\d.e+]+): compile with --calibrate") as caught:
        run(plan, inputs, check_finite=True)
    power, end = re.findall(r"times 2\^(\d+) ends at ([\d.e+]+):", str(caught.value))[0]
    largest = re.findall(r"its largest magnitude is ([\d.e+]+),", str(caught.value))[0]
    assert float(end) == pytest.approx(65504 * 2.0 ** int(power), rel=1e-4) and float(largest) > float(end)


def test_what_takes_no_epilogue_takes_no_scale():
    """Running sums beyond fp16, whose op computes nothing else."""
    n = Network(16)
    total = n(n("x", "Relu"), "CumSum", np.array(1, np.int64))
    model = n.model((1, 60000, 2), n(n(total, "Mul", np.array(1e-3, np.float32)), "Tanh"))
    plan = without_code(model, ("sm_80",), precision="mixed")
    assert [s.reason.split(", and ")[1] for s in storage(plan).values()] == ["Cumulate 'CumSum_1' takes no scale"]
    assert max(errors(plan, model, feeds(model, 1)).values()) <= 1e-3


@pytest.mark.parametrize("softmax", [False, True])
def test_a_huge_constant_that_no_run_put_anywhere_is_no_infinity(softmax):
    """Random inputs leave no row out; one that is left out has the lowest float32 throughout."""
    n = Network(18)
    left_out = n("x", "Less", np.array(-50, np.float32))
    rows = n(left_out, "Where", np.array(np.finfo(np.float32).min), n("x", "MatMul", n.weight(16, 16)), name="rows")
    model = n.model((1, 4, 16), n(rows, "Softmax", axis=-1) if softmax else n(rows, "Transpose", perm=[0, 2, 1]))
    plan = without_code(model, ("sm_80",), precision="mixed")
    x = feeds(model, 1)["x"]
    x[0, 1] = -100
    assert max(errors(plan, model, {"x": x}).values()) <= 1e-3
    assert any(s.reason.startswith("fp32: 'rows' puts numbers beyond fp16") for s in storage(plan).values())


def test_exponentials_are_fp32_whatever_was_seen():
    """exp(15) is beyond fp16, and random inputs of about 1 do not show it."""
    n = Network(13)
    total = n(n("x", "Exp"), "ReduceSum", np.array([1], np.int64), keepdims=0)
    model = n.model((1, 40), n(n(total, "Unsqueeze", np.array([0, 1], np.int64)), "Log"))
    plan = without_code(model, ("sm_80",), precision="mixed")
    reasons = [s.reason for s in storage(plan).values()]
    assert len(reasons) >= 2 and set(reasons) == {"fp32: exp of 'Exp_0', which other inputs make far larger"}
    assert max(errors(plan, model, {"x": np.linspace(0, 15, 40, dtype=np.float32)[None]}).values()) <= 1e-3


@pytest.mark.parametrize("mode", ["mixed", "fp16"])
def test_places_of_maxima_are_exact(mode):
    """ArgMax compares a model's fp32 input with its largest elements."""
    n = Network(14)
    model = n.model((1, 8, 30), n("x", "ArgMax", axis=2))
    model.graph.output[0].type.tensor_type.elem_type = TensorProto.INT64
    plan = without_code(model, ("sm_80",), precision=mode)
    assert max(errors(plan, model, feeds(model, 2)).values()) == 0
    assert any(s.reason.startswith("fp32: ") for s in storage(plan).values())


# --- The light models of the onnx package ------------------------------------------------------------------------------


@pytest.mark.parametrize("path", usually(LIGHT, 6), ids=lambda p: p.stem)
def test_light_model(path):
    """Activations up to 1e31. Softmax of equal logits hides all errors, so the logits are looked at too. Beyond 2^13 their last
    digit alone decides what softmax makes of them, and that is another one on each kind of processor: there only they are.

    All weights of a layer are one number: rounded to nearest, all would be off to the same side, by 2**-12 on average, and that
    would add up by the layer to 1.2e-2.
    """
    model = onnx.load(path)
    given = {t.name for t in model.graph.initializer}
    (value,) = (i for i in model.graph.input if i.name not in given)
    softmax = {n.output[0]: n.input[0] for n in model.graph.node if n.op_type == "Softmax"}
    logits = [*softmax.values()]
    model.graph.output.extend(helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in logits)
    inputs = {value.name: np.random.default_rng(0).random([d.dim_value for d in value.type.tensor_type.shape.dim], np.float32)}
    plan = without_code(model, ("sm_80",), precision="mixed")
    out, expected = run(plan, inputs, check_finite=True), reference(model, inputs)
    for name, ref in expected.items():
        if name not in softmax or np.abs(expected[softmax[name]]).max() < 2**13:
            assert relative_error(out[name], ref) <= 1e-3, name
    assert (max(np.abs(expected[name]).max() for name in logits or expected) > 65504) == bool(storage(plan))
    assert not any(t.dtype is DType.F32 for t in operands(plan.entries[0].program))


@pytest.mark.parametrize("kind", ["random", "positive", "one number", "subnormal", "two sizes"])
def test_sums_of_rounded_weights_stay(kind):
    """Each weight is one of the two numbers of fp16 beside it, and the error that is left of a sum is that of its last flip."""
    rng = np.random.default_rng(3)
    w = rng.standard_normal((12, 24, 3, 3)).astype(np.float32)
    match kind:
        case "positive":
            w = np.abs(w)
        case "one number":
            w[:] = 0.02
        case "subnormal":
            w *= 1e-6
        case "two sizes":
            w[:, ::2] *= 1e-3
    nearest, got = (
        weights.evaluate(recipe, {}).astype(np.float64)
        for recipe in (transform("cast", Literal(w), dtype="float16"), transform("rounded", Literal(w), terms=3))
    )
    gap = np.spacing(np.abs(nearest).astype(np.float16)).astype(np.float64)
    assert (np.abs(got - w) <= gap).all() and (got == got.astype(np.float16)).all()
    off, was = (np.abs((values - w).sum((1, 2, 3))) for values in (got, nearest))
    assert (off <= gap.max((1, 2, 3)) / 2 * 1.001).all() and off.sum() <= was.sum() / 5
    if kind != "one number":
        assert np.linalg.norm(got - w) <= 1.02 * np.linalg.norm(nearest - w)


@pytest.mark.parametrize("shape", [(40, 7), (5, 300), pytest.param((3, 70000), marks=thorough)])
def test_the_cheapest_are_found_without_sorting_all(shape):
    """Also in rows that need most of their elements, and where the next number is infinite or costs as much as others"""
    rng = np.random.default_rng(5)
    x = (rng.standard_normal(shape) * rng.lognormal(0, 4, (shape[0], 1))).astype(np.float32)
    x[:2] = np.abs(x[:2]).clip(0, 60000) + np.float32(5)
    x[0, :4], x[-1] = 65504, np.float32(0.02)
    near = x.astype(np.float16)
    expected = near.copy()
    for row, (values, rounded) in enumerate(zip(x, near, strict=True)):
        off = rounded.astype(np.float32) - values
        total = off.sum(dtype=np.float64)
        off = -off if total < 0 else off
        other = np.nextafter(rounded, np.float16(np.inf if total < 0 else -np.inf))
        gap = np.where((off > 0) & (rounded != 0), np.abs(other.astype(np.float32) - rounded), 0).astype(np.float32)
        gap[~np.isfinite(gap)] = 0
        cost = np.where(gap > 0, np.clip((gap - 2 * off) / max(gap.max(), 1e-30), 0, 1), 2).astype(np.float16)
        for i in cost.argsort(kind="stable"):
            if gap[i] and gap[cost < cost[i]].sum() + gap[:i][cost[:i] == cost[i]].sum() + gap[i] / 2 < abs(total):
                expected[row, i] = other[i]
            elif gap[i]:
                break
    got = np.empty_like(near)
    halves._round_lines(x, order := np.arange(shape[1]), order, got)
    assert (expected != near).any() and (got == expected).all()


def test_weights_that_fp16_holds_stay():
    w = np.random.default_rng(4).standard_normal((8, 64)).astype(np.float16)
    assert (weights.evaluate(transform("rounded", Literal(w.astype(np.float32)), terms=1), {}) == w).all()


def test_rows_are_rounded_by_themselves_however_they_lie():
    w = np.random.default_rng(6).standard_normal((96, 1500)).astype(np.float32)
    expected = halves.rounded(w, 1)
    assert (halves.rounded(np.asfortranarray(w), 1) == expected).all()
    w[7, 3], w[8, 5] = np.nan, 7e4
    got = halves.rounded(w, 1)
    assert (np.delete(got, (7, 8), 0) == np.delete(expected, (7, 8), 0)).all() and np.isnan(got[7, 3]) and np.isinf(got[8, 5])


# --- Networks whose values stay in range -------------------------------------------------------------------------------

IN_RANGE = ("resnet18", "googlenet", "mobilenet_v2", "efficientnet_b0", "espcn_x3")


@pytest.mark.parametrize("name", usually(IN_RANGE, "mobilenet_v2"))
def test_nothing_is_decided_for_networks_in_range(name):
    """So all of their operations read fp16, which the bar of 5 % outside allows for."""
    mixed, plain = (to_program(skeleton(name), {}, Options(precision=p), Dump(None)) for p in ("mixed", "fp16"))
    assert not mixed.storage and mixed.tensors == plain.tensors and mixed.ops == plain.ops
    assert {t.dtype for t in operands(mixed)} == {DType.F16}


def attention() -> onnx.ModelProto:
    n = Network(12)
    q, k, v = (n("x", "MatMul", n.weight(16, 16)) for _ in range(3))
    return n.model((1, 2, 12, 16), n(n(q, "Attention", k, v), "MatMul", n.weight(16, 16)), opset=23)


@pytest.mark.parametrize("network", [mixer, linear_attention, branches, attention])
def test_a_scale_changes_no_value(network):
    """Any scales of any tensors: what the program computes is the same, to the rounding of eps and of reordered factors."""
    model = network()
    program = to_program(model, {}, Options(precision="fp32"), Dump(None))
    choice, rng = _Choice(program, DType.F16), np.random.default_rng(8)
    owners = sorted({t.storage for t in program.tensors.values() if choice.is_free(t.storage)})
    for draw in range(6):  # powers of two, as are chosen, and any numbers
        factors = 2.0 ** (8 * rng.integers(-3, 4, len(owners))) if draw < 3 else rng.uniform(0.01, 100, len(owners))
        scaled = _scaled(program, dict(zip(owners, factors.tolist(), strict=True)))
        verify(scaled)
        inputs = seeded(program, 1)
        expected, got = (evaluate(p, inputs, sources(model)) for p in (program, scaled))
        for name in expected:
            assert relative_error(got[name], expected[name]) <= 1e-5, name


def test_equal_scales_cost_nothing():
    """relu(conv(x) + b) with x and y of one scale: the factors cancel, and the bias has the scale in it."""
    n = Network(9)
    model = n.model((1, 8, 6, 6), n(n(n.conv(n("x", "Relu"), 8, 8), "Relu"), "GlobalMaxPool"))
    program = to_program(model, {}, Options(precision="fp32"), Dump(None))
    conv = next(op for op in program.ops if isinstance(op, Conv))
    for y, factors in ((16, 0), (8, 1)):
        scaled = next(op for op in _scaled(program, {conv.x: 2.0**16, conv.y: 2.0**y}).ops if isinstance(op, Conv))
        assert sum(e.fn == "mul" for e in walk(scaled.epilogue.expr)) == factors
        assert scaled.epilogue.loads[0].tensor.endswith(f"*2^{y}")


# --- What the user says --------------------------------------------------------------------------------------------------


def chain() -> onnx.ModelProto:
    n = Network(10)
    x = n.conv("x", 16, 8, name="first")
    x = n.conv(n(x, "Relu"), 16, 16, name="second")
    return n.model((1, 8, 10, 10), n(n.conv(n(x, "Relu"), 16, 16, name="third"), "Sigmoid"))


def named(model: onnx.ModelProto, *fp32: str, mode: str = "mixed") -> Program:
    return to_program(model, {}, Options(precision=mode, fp32=fp32), Dump(None))


@pytest.mark.parametrize("mode", ["mixed", "fp16"])
def test_a_node_is_kept_in_fp32(mode):
    program = named(chain(), "second", mode=mode)
    first, second, third = (op for op in program.ops if isinstance(op, Conv))
    t = program.tensors
    assert {t[second.x].dtype, t[second.w].dtype, t[second.y].dtype, t[first.y].dtype} == {DType.F32}
    assert {t[first.x].dtype, t[first.w].dtype, t[third.x].dtype, t[third.w].dtype} == {DType.F16}
    assert program.storage[second.w].reason == "fp32 as asked for 'second'"
    (copy,) = (op for op in program.ops if op.y == third.x)
    assert copy.epilogue.loads[0].tensor == second.y


def test_patterns_name_nodes():
    convolutions = [op for op in named(chain(), "*d").ops if isinstance(op, Conv)]
    program = named(chain(), "*d")
    assert [program.tensors[op.w].dtype for op in convolutions] == [DType.F16, DType.F32, DType.F32]
    with pytest.raises(UsageError, match="--fp32 fourth: no node has this name"):
        named(chain(), "fourth")


def test_all_in_fp32_by_a_pattern_is_fp32():
    assert {t.dtype for t in named(chain(), "*", mode="fp16").tensors.values()} == {DType.F32}


def test_calibration_reads_real_inputs(tmp_path):
    """Images of 0 to 255 leave the range that random ones of about 1 do not."""
    n = Network(11)
    x = n("x", "Relu")
    for _ in range(3):
        x = n(n.conv(x, 8, 8, gain=12), "Relu")
    model = n.model((1, 8, 10, 10), n(x, "Mul", np.array(1e-4, np.float32)))
    assert not named(model).storage
    images = np.random.default_rng(0).uniform(0, 255, (3, 1, 8, 10, 10)).astype(np.float32)
    np.savez(tmp_path / "data.npz", x=images)
    options = Options(calibrate=tmp_path / "data.npz")
    assert min(s.scale for s in to_program(model, {}, options, Dump(None)).storage.values()) < 1.0
    np.savez(tmp_path / "data.npz", x=images[:, :, :4])
    with pytest.raises(InputError, match="neither alone nor in a row"):
        to_program(model, {}, options, Dump(None))
    with pytest.raises(UsageError, match="precision mixed"):
        Options(precision="fp16", calibrate=tmp_path / "data.npz")


def growing() -> onnx.ModelProto:
    n = Network(15)
    x = n.conv("x", 8, 3, gain=100)
    for _ in range(3):
        x = n.conv(n(x, "Relu"), 8, 8, gain=20)
    return n.model((1, 3, 256, 128), n(x, "Mul", np.array(1e-4, np.float32)))


def test_long_networks_are_measured_on_smaller_images(monkeypatch):
    whole = named(growing())
    operations = total_flops(whole)
    seen: list[int] = []

    def measuring(program, *rest):
        seen.append(total_flops(program))
        return activations(program, *rest)

    monkeypatch.setattr(ranges, "LONG", operations / 4)
    monkeypatch.setattr(measure, "activations", measuring)
    small = named(growing())
    assert 0.05 * operations < seen[0] < 0.3 * operations
    assert {n: s.scale for n, s in small.storage.items()} == {n: s.scale for n, s in whole.storage.items()} != {}


@pytest.mark.parametrize("batch", [5, 64])
def test_long_batches_are_measured_as_shorter_ones(monkeypatch, batch):
    """Their images as they are."""
    net = Network()
    model = net.model((batch, 8, 24, 24), net.conv("x", 8, 8))
    shapes: list[tuple[int, ...]] = []

    def measuring(program, runs, *rest):
        shapes.extend(run["x"].shape for run in runs)
        return activations(program, runs, *rest)

    monkeypatch.setattr(measure, "activations", measuring)
    monkeypatch.setattr(ranges, "MANY", 8 * 24 * 24 * 80)
    to_program(model, {}, Options(), Dump(None))
    assert {*shapes} == {(5 if batch == 5 else 20, 8, 24, 24)}


def test_inputs_that_a_model_refuses_are_not_the_end(monkeypatch):
    """Random inputs may be none that the model takes, such as places outside a table."""

    def refusing(*_):
        raise InputError("index 1 is outside an axis of 1")

    monkeypatch.setattr(measure, "activations", refusing)
    with pytest.warns(RuntimeWarning, match="estimated from the weights, random inputs do not fit: index 1"):
        assert named(growing()).storage


def test_sets_of_inputs():
    program = named(chain())
    one = np.zeros((1, 8, 10, 10), np.float32)
    assert len(samples(program, {"x": one}) or ()) == 1
    assert [s["x"].shape for s in samples(program, {"x": np.stack([one] * 4)}) or ()] == [one.shape] * 4
    assert samples(program, {"x": one[0]}) is None
    for wrong, words in (({"y": one}, "no input 'y'"), ({}, "'x' is missing"), ({"x": one.astype(int)}, "int64")):
        with pytest.raises(InputError, match=words):
            samples(program, wrong)


def test_seeded_inputs_are_the_same_everywhere():
    """To the bit: a plan's certificate holds what they must give."""
    x = seeded(named(chain()), 3)["x"]
    assert x.dtype == np.float32 and abs(x.mean()) < 0.1 and abs(x.std() - 1) < 0.1
    np.testing.assert_array_equal(x.reshape(-1)[:3].view(np.uint32), [3194453978, 3215104165, 3216173658])


def test_seeded_inputs_take_little_memory_beside_their_own():
    large = Program(("x",), ("x",), {"x": dense("x", (2**21 + 3,), DType.F32, pad=1)}, {}, ())
    tracemalloc.start()
    x = seeded(large, 3)["x"]
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 1.5 * x.nbytes
    np.testing.assert_array_equal(x[-3:].view(np.uint32), [3213680835, 3192557978, 3214762743])


def test_a_smaller_image_keeps_its_channels(monkeypatch):
    monkeypatch.setattr(ranges, "LONG", 1e6)
    net = Network()
    net.conv("x", 8, 64)
    program = to_program(net.model((1, 64, 64, 96), net.nodes[-1].output[0]), {}, Options(), Dump(None))
    assert total_flops(program) > 1e6


def test_the_operations_of_recurrent_layers_and_attention_count():
    """Networks of these ops alone would seem to take no time to measure."""
    gru = program_of("gru_wide")  # 12 steps of 1 sequence, 2 directions, 3 gates of 512 units
    assert gru.flops(gru.ops[0]) == 2 * 12 * 2 * 3 * 512**2
    attention = program_of("attention_small")  # 2 heads of 5 rows, 24 elements and 7 rows, 16 elements
    assert attention.flops(attention.ops[0]) == 2 * 2 * 5 * 7 * (24 + 16)


# --- bf16 ----------------------------------------------------------------------------------------------------------------


def wide_range() -> onnx.ModelProto:
    """Layers whose results are about 1e7, which fp16 does not hold, and one that brings them back."""
    n = Network(3)
    up = n(n("x", "MatMul", n.weight(32, 32, gain=3e3)), "Relu")
    return n.model((4, 32), n(n(n(up, "MatMul", n.weight(32, 32, gain=3e3)), "Relu"), "MatMul", n.weight(32, 8, gain=1e-3)))


def test_bf16_holds_what_fp16_does_not():
    made = wide_range()
    given = feeds(made, 0, {})
    of = {mode: max(errors(without_code(made, ("sm_80",), precision=mode), made, given).values()) for mode in ("bf16", "fp16")}
    assert of["bf16"] < 1e-2 and not of["fp16"] < 1


def test_bf16_is_for_activations_and_weights_and_not_for_angles():
    program = to_program(wide_range(), {}, Options(precision="bf16"), Dump(None))
    assert {t.dtype for t in operands(program)} == {DType.BF16}
    n = Network(1)
    angle = n(n("x", "Mul", n.weight(1, 16)), "Add", n.weight(1, 16))
    made = n.model((4, 1), n(n(n(angle, "Cos"), "MatMul", n.weight(16, 16)), "MatMul", n.weight(16, 8)))
    given = {"x": np.array([[3.0], [4001.0], [30000.0], [9.0]], np.float32)}
    assert max(errors(without_code(made, ("sm_80",), precision="bf16"), made, given).values()) < 2e-2


# --- Output channels of very different sizes -----------------------------------------------------------------------------

SIZES = {
    "one far larger": [1.0, 1, 1, 2.0**18],
    "one far smaller": [1.0, 2.0**-20, 1, 1],
    "of all sizes, and none": [1e-12, 1, 1e5, 0],
}


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_output_channels_of_any_size_keep_their_digits(sizes: list[float]) -> None:
    """Each by itself: of what the model gives, and of a convolution whose range keeps its result in fp32."""
    net, size = Network(), np.resize(np.float32(sizes), 32)
    w, b = net.weight(64, 32) * size, size.copy()
    filters = np.ascontiguousarray(w.T)[:, :, None, None]
    dense_ = net(net("x", "MatMul", w), "Add", b)
    image = net(net("x", "Reshape", np.array([3, 64, 1, 1])), "Conv", filters, b)
    model = net.model((3, 64), dense_, *[image] * (max(sizes) > 1))
    x = np.random.default_rng(1).standard_normal((3, 64)).astype(np.float32)
    exact = x.astype(np.float64) @ w + b
    for name, found in run(without_code(model, ("sm_80",), precision="mixed"), {"x": x}).items():
        error = np.linalg.norm(found.reshape(3, 32) - exact, axis=0) / np.maximum(np.linalg.norm(exact, axis=0), 1e-30)
        assert error.max() < 1e-3, name


def test_channels_of_about_one_size_share_a_power() -> None:
    rng = np.random.default_rng(0)
    for size in (1.0, 1e-9, 1e9):
        assert powers_of(rng.standard_normal((16, 9)) * size) is None
    assert powers_of(np.array([[1.0], [0], [0.3]])) is None and powers_of(np.zeros((3, 4))) is None
    assert powers_of(np.array([[np.inf], [1e-9]])) is None
    assert powers_of(np.array([[1.0, 0.5], [2.0**-30, 0], [0, 0], [2.0**20, 1]])).tolist() == [0, 32, 0, -16]


@pytest.mark.parametrize("precision", ["mixed", "fp16", "bf16"])
@pytest.mark.parametrize(("reduction", "dtype"), [("add", DType.F32), ("mul", DType.F32), ("max", None)])
def test_what_updates_are_added_to_is_fp32(precision, reduction, dtype):
    """They are added one after the other where the sum is stored: one of ones in fp16 ends at 2048."""
    net = Net(x=(2, 4), updates=(3000, 4))
    at = np.zeros((3000, 4), np.int64)
    y = net("ScatterElements", net("Relu", "x"), at, net("Relu", "updates"), axis=0, reduction=reduction)
    program = without_code(net.out(net("Relu", y)).model(), ("sm_80",), precision=precision).entries[0].program
    (scatter,) = (op for op in program.ops if isinstance(op, Scatter))
    half = DType.BF16 if precision == "bf16" else DType.F16
    assert program.tensors[scatter.y].dtype is (dtype or half)
    assert program.tensors[scatter.updates].dtype is half
