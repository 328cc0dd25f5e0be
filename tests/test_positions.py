"""What must be exact for what it is read for: angles, positions, phases, coordinates, counts, differences of near equals."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from tccompile.arch import ARCHS
from tccompile.dump import Dump
from tccompile.errors import UsageError, VerificationError
from tccompile.ir.feeds import InputRange, seeded
from tccompile.ir.ops import Conv, Gemm
from tccompile.ir.types import DType
from tccompile.options import Options, parse_ranges
from tccompile.pipeline import to_program
from tccompile.plan.file import from_bytes, to_bytes
from tccompile.precision.positions import input_ranges, ranges_of
from tccompile.runtime.session import Session
from tccompile.schedule.choose import Choice, schedule
from tccompile.verify.certificate import selftest
from tccompile.verify.oracle import verify
from tests.plans import without_code
from tests.test_precision import Network, errors, storage

INT, FLOAT = TensorProto.INT64, TensorProto.FLOAT
RNG = np.random.default_rng(0)


def model(net: Network, inputs: dict[str, tuple[int, tuple[int, ...]]], *outputs: str, opset: int = 20) -> onnx.ModelProto:
    value = helper.make_tensor_value_info
    ends = [value(name, FLOAT, None) for name in outputs]
    graph = helper.make_graph(net.nodes, "g", [value(n, *t) for n, t in inputs.items()], ends, net.weights)
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=10)
    return onnx.shape_inference.infer_shapes(made, data_prop=True)


def array(*values: float) -> np.ndarray:
    return np.array(values, np.float32)


# --- Angles and positions ----------------------------------------------------------------------------------------------


def rotary(product: str = "MatMul") -> onnx.ModelProto:
    """What language models do with positions: angles, their sines and cosines, and queries turned by these."""
    n = Network(1)
    frequencies = (10000.0 ** (-np.arange(0, 32, 2) / 32)).astype(np.float32)
    at = n(n("at", "Cast", to=FLOAT), "Unsqueeze", np.array([2], np.int64))  # (1, S, 1)
    angles = n(at, product, frequencies.reshape(1, 1, 16))
    angles = n(angles, "Concat", angles, axis=-1)
    sines, cosines = n(angles, "Sin"), n(angles, "Cos")
    q = n("x", "MatMul", n.weight(32, 32))
    half = [n(q, "Slice", np.array([i]), np.array([i + 16]), np.array([2])) for i in (16, 0)]
    turned = n(n(half[0], "Neg"), "Concat", half[1], axis=-1)
    y = n(n(q, "Mul", cosines), "Add", n(turned, "Mul", sines))
    return model(n, {"at": (INT, (1, 8)), "x": (FLOAT, (1, 8, 32))}, n(y, "MatMul", n.weight(32, 32)))


@pytest.mark.parametrize("product", ["MatMul", "Mul"])
@pytest.mark.parametrize("first", [0, 500, 8000, 30000, 10**6])
def test_a_sequence_is_right_at_every_position(product, first):
    made = rotary(product)
    inputs = {"at": first + np.arange(8)[None], "x": RNG.standard_normal((1, 8, 32)).astype(np.float32)}
    assert max(errors(without_code(made, ("sm_80",), precision="mixed"), made, inputs).values()) <= 1e-3


def time_steps() -> tuple[onnx.ModelProto, dict[str, np.ndarray]]:
    """The embedding of a diffusion network: sines of a time step's multiples, and two layers."""
    n = Network(2)
    frequencies = np.exp(-np.log(10000) * np.arange(32) / 32).astype(np.float32)
    angles = n(n("t", "Unsqueeze", np.array([1], np.int64)), "Mul", frequencies[None])
    both = n(n(angles, "Sin"), "Concat", n(angles, "Cos"), axis=1)
    hidden = n(n(both, "MatMul", n.weight(64, 128)), "Sigmoid")
    return model(n, {"t": (FLOAT, (2,))}, n(hidden, "MatMul", n.weight(128, 64))), {"t": array(981, 999)}


def thousandths() -> tuple[onnx.ModelProto, dict[str, np.ndarray]]:
    n = Network(3)
    scaled = n("t", "Mul", array(1000), name="scaled")
    return model(n, {"t": (FLOAT, (4, 4))}, n(scaled, "Cos"), n(scaled, "Sin")), {"t": RNG.random((4, 4), np.float32)}


def phase() -> tuple[onnx.ModelProto, dict[str, np.ndarray]]:
    """A vocoder's source: the phase is the running sum of frequencies."""
    n = Network(4)
    total = n(n("f", "Mul", array(2 * np.pi / 24000)), "CumSum", np.array(1, np.int64))
    return model(n, {"f": (FLOAT, (1, 6000))}, n(total, "Sin")), {"f": RNG.uniform(80, 400, (1, 6000)).astype(np.float32)}


def radiance_field() -> tuple[onnx.ModelProto, dict[str, np.ndarray]]:
    """Coordinates times powers of two up to 2**9, their sines and cosines, and layers."""
    n = Network(5)
    octaves = n(n("x", "Unsqueeze", np.array([2], np.int64)), "Mul", (np.pi * 2.0 ** np.arange(10)).astype(np.float32))
    flat = n(octaves, "Reshape", np.array([64, 30], np.int64))
    both = n(n(flat, "Sin"), "Concat", n(flat, "Cos"), axis=1)
    hidden = n(n(both, "MatMul", n.weight(60, 64, gain=4)), "Relu")
    inputs = {"x": RNG.uniform(-1, 1, (64, 3)).astype(np.float32)}
    return model(n, {"x": (FLOAT, (64, 3))}, n(hidden, "MatMul", n.weight(64, 4))), inputs


def warped(size: int) -> tuple[onnx.ModelProto, dict[str, np.ndarray]]:
    """An image read at the places that a flow, computed by a convolution, moves its pixels to."""
    n = Network(6)
    flow = n(n.conv("x", 2, 3, gain=3), "Transpose", perm=[0, 2, 3, 1])
    rows, columns = np.meshgrid(np.arange(size), np.arange(size), indexing="ij")
    places = n(flow, "Add", np.stack([columns, rows], -1)[None].astype(np.float32))
    grid = n(n(places, "Mul", array(2 / (size - 1))), "Sub", array(1))
    y = n("x", "GridSample", grid, align_corners=1)
    return model(n, {"x": (FLOAT, (1, 3, size, size))}, y), {"x": RNG.standard_normal((1, 3, size, size)).astype(np.float32)}


def turned_image() -> tuple[onnx.ModelProto, dict[str, np.ndarray]]:
    """A spatial transformer: the places of an affine map that a layer computes."""
    n = Network(7)
    theta = n(n("x", "GlobalAveragePool"), "Conv", n.weight(6, 3, 1, 1), array(1, 0.1, 0, -0.1, 1, 0))
    grid = n(n(theta, "Reshape", np.array([1, 2, 3])), "AffineGrid", np.array([1, 3, 256, 256], np.int64))
    return model(n, {"x": (FLOAT, (1, 3, 256, 256))}, n("x", "GridSample", grid)), {
        "x": RNG.standard_normal((1, 3, 256, 256)).astype(np.float32)
    }


def deformed() -> tuple[onnx.ModelProto, dict[str, np.ndarray]]:
    n = Network(8)
    offsets = n.conv("x", 18, 4, gain=2)
    y = n("x", "DeformConv", n.weight(8, 4, 3, 3), offsets, pads=[1] * 4, kernel_shape=[3, 3])
    inputs = {"x": RNG.standard_normal((1, 4, 64, 64)).astype(np.float32)}
    return model(n, {"x": (FLOAT, (1, 4, 64, 64))}, y), inputs


def counted() -> tuple[onnx.ModelProto, dict[str, np.ndarray]]:
    """How many tokens there are before each one, which are counted as floats, and the remainders by 7."""
    n = Network(9)
    counts = n(n("mask", "Cast", to=FLOAT), "CumSum", np.array(1, np.int64), name="counts")
    rest = n(counts, "Mod", array(7), fmod=1)
    return model(n, {"mask": (INT, (1, 5000))}, n(counts, "Mul", array(0.5)), n(rest, "Identity")), {
        "mask": np.ones((1, 5000), np.int64)
    }


@pytest.mark.parametrize(
    "case, bound",
    [
        (time_steps, 1e-3), (thousandths, 1e-5), (phase, 1e-3), (radiance_field, 1e-3), (lambda: warped(64), 1.5e-3),
        (turned_image, 1e-3), (deformed, 1.5e-3), (counted, 1e-6),
    ],
)  # fmt: skip
def test_angles_coordinates_and_counts_are_exact(case, bound):
    made, inputs = case()
    for name, error in errors(without_code(made, ("sm_80",), precision="mixed"), made, inputs).items():
        assert error <= bound, (name, error)


def product_and(*ops: str, **attributes: int) -> onnx.ModelProto:
    """A product of 256³, and what is done with its result."""
    n = Network(16)
    y = n("x", "MatMul", n.weight(256, 256), name="product")
    for op in ops:
        more = {"Mul": [array(3)], "QuantizeLinear": [array(0.1), np.array(128, np.uint8)]}.get(op, [])
        y = n(y, op, *more, **(attributes if op == "Cast" else {}))
    return model(n, {"x": (FLOAT, (256, 256))}, n(y, "Cast", to=FLOAT))


@pytest.mark.parametrize(
    "ops, full",
    [
        ((), False), (("Sin",), True), (("Mul", "Cos"), True), (("Mul", "Softmax", "Sin"), False), (("Tanh", "Sin"), False),
        (("Floor",), True), (("Cast",), True), (("Relu", "Transpose", "Floor"), True), (("QuantizeLinear",), False),
        (("CumSum", "Sin"), True),
    ],
)  # fmt: skip
def test_products_of_float32_are_made_in_full_where_their_last_digits_count(ops, full):
    """Large angles and whole numbers: parts of bf16 lose what lies below the 16th digit."""
    made = product_and(*(op for op in ops if op != "CumSum"), to=INT)
    if "CumSum" in ops:
        made.graph.node.insert(1, helper.make_node("CumSum", [made.graph.node[0].output[0], "axis"], ["sums"]))
        made.graph.node[2].input[0] = "sums"
        made.graph.initializer.append(onnx.numpy_helper.from_array(np.array(1, np.int64), "axis"))
    choice = chosen_for_the_product(made, Options(precision="fp32"))
    assert (choice.kernel.name == "gemm_simt", "last digits" in choice.reason) == (full, full), choice.reason


@pytest.mark.parametrize("precision", ["fp32", "mixed"])
def test_a_product_that_the_user_names_is_made_in_full(precision):
    plain, named = (
        chosen_for_the_product(product_and(), Options(precision=precision, fp32=nodes)) for nodes in ((), ("product",))
    )
    assert (plain.kernel.name, named.kernel.name) == ("gemm_mma", "gemm_simt")
    assert "fp32 as asked for 'product'" in named.reason


def chosen_for_the_product(made: onnx.ModelProto, options: Options) -> Choice:
    program = to_program(made, {}, options, Dump(None))
    choices = zip(program.ops, schedule(program, ARCHS["sm_80"]), strict=True)
    return next(c for op, c in choices if isinstance(op, Gemm))


def test_a_flow_that_is_iterated_keeps_its_fraction():
    """Places that a convolution moves by a little each time, of an image that is read at them again."""
    n = Network(10)
    size = 48
    rows, columns = np.meshgrid(np.arange(size), np.arange(size), indexing="ij")
    start = np.stack([columns, rows])[None].astype(np.float32)
    at = n("x", "Conv", n.weight(2, 8, 1, 1, gain=0.3))
    at = n(at, "Add", start)
    for _ in range(4):
        grid = n(n(n(at, "Mul", array(2 / (size - 1))), "Sub", array(1)), "Transpose", perm=[0, 2, 3, 1])
        read = n("x", "GridSample", grid, align_corners=1)
        at = n(at, "Add", n(read, "Conv", n.weight(2, 8, 3, 3, gain=0.5), pads=[1] * 4))
    made = n.model((1, 8, size, size), n(at, "Sub", start))
    inputs = {"x": RNG.standard_normal((1, 8, size, size)).astype(np.float32)}
    assert max(errors(without_code(made, ("sm_80",), precision="mixed"), made, inputs).values()) <= 3e-3


def test_a_difference_of_near_equals_is_taken_of_exact_numbers():
    """A convolution's results, 200 of each 201 parts of which are the same for all, less their mean; then a layer."""
    n = Network(11)
    y = n("x", "Conv", n.weight(16, 8, 3, 3), 200 * np.ones(16, np.float32), pads=[1] * 4, name="large")
    near = n(n(y, "Sub", array(200)), "Relu", name="near")
    made = n.model((1, 8, 12, 12), n(near, "Conv", n.weight(16, 16, 1, 1)), n(y, "Mul", array(0.01)))
    plan = without_code(made, ("sm_80",), precision="mixed")
    assert any("would move what 'near'" in s.reason or "would move what 'Sub" in s.reason for s in storage(plan).values())
    assert max(errors(plan, made, {"x": RNG.standard_normal((1, 8, 12, 12)).astype(np.float32)}).values()) <= 1e-3


def test_what_comes_in_may_lie_far_from_zero_when_its_mean_is_taken_out():
    """Readings of about 1000, made standard before the first layer: only the layers' own norms read fp16."""
    n = Network(15)
    standard = n("x", "LayerNormalization", np.ones(64, np.float32), np.zeros(64, np.float32))
    hidden = n(n(standard, "MatMul", n.weight(64, 64)), "LayerNormalization", np.ones(64, np.float32), np.zeros(64, np.float32))
    made = model(n, {"x": (FLOAT, (4, 64))}, n(hidden, "MatMul", n.weight(64, 8)))
    plan = without_code(made, ("sm_80",), precision="mixed")
    x = 1000 + np.random.default_rng(4).standard_normal((4, 64)).astype(np.float32)
    assert max(errors(plan, made, {"x": x}).values()) <= 1e-3
    assert all("takes its mean out" in s.reason for s in storage(plan).values()) and len(storage(plan)) <= 1


def test_a_series_of_any_size_is_made_relative_to_its_own_statistics_and_back():
    """Amounts of millions, beyond fp16: standardized over time, through a layer, and taken back to their size."""
    n = Network(12)
    mean = n("x", "ReduceMean", array(1).astype(np.int64), keepdims=1)
    apart = n("x", "Sub", mean)
    deviation = n(n(n(apart, "Mul", apart), "ReduceMean", array(1).astype(np.int64), keepdims=1), "Sqrt")
    y = n(n(n(apart, "Div", deviation), "MatMul", n.weight(8, 32)), "Relu")
    y = n(y, "MatMul", n.weight(32, 8))
    made = n.model((2, 24, 8), n(n(y, "Mul", deviation), "Add", mean), n(n(mean, "Mul", mean), "Sqrt"))
    plan = without_code(made, ("sm_80",), precision="mixed")
    assert max(errors(plan, made, {"x": 1e7 + 1e6 * RNG.standard_normal((2, 24, 8)).astype(np.float32)}).values()) <= 1e-3
    assert all("statistics" in s.reason for s in storage(plan).values())


@pytest.mark.parametrize("loud", [3e-4, 1.0, 3e4])
def test_sounds_of_any_loudness_become_logarithms_of_their_bands(loud: float):
    """Power over bins and bands: what is quiet is not rounded to zero, and whole numbers of 16 bits do not overflow."""
    n = Network(19)
    spectrum = n("x", "STFT", np.array(32), np.hanning(64).astype(np.float32), name="spectrum", onesided=0)
    power = n(n(spectrum, "Mul", spectrum), "ReduceSum", np.array([3], np.int64), keepdims=0)
    bands = np.maximum(n.weight(64, 12), 0)
    made = n.model((1, 512), n(n(n(power, "MatMul", bands), "Clip", np.array(1e-10, np.float32)), "Log"))
    plan = without_code(made, ("sm_80",), precision="mixed")
    sound = np.sin(np.arange(512) * 0.3) + 1e-3 * RNG.standard_normal(512)
    assert max(errors(plan, made, {"x": (loud * sound[None]).astype(np.float32)}).values()) <= 1e-3


def test_spectra_of_pixels_are_multiplied_and_taken_back():
    """The first element of a transform is the sum of all: of pixels up to 255 it is beyond fp16."""
    n = Network(20)

    def transform(x: str, inverse: int = 0) -> str:
        for axis in ((2, 3), (3, 2))[inverse]:
            x = n(x, "DFT", "", np.array(axis), inverse=inverse)
        return x

    spectrum = transform(n("x", "Unsqueeze", np.array([4], np.int64)))
    y = n(n(spectrum, "Mul", n.weight(1, 1, 32, 40, 1)), "Mul", spectrum)
    made = n.model((1, 2, 32, 40), transform(y, inverse=1))
    x = RNG.uniform(0, 255, (1, 2, 32, 40)).astype(np.float32)
    assert max(errors(without_code(made, ("sm_80",), precision="mixed"), made, {"x": x}).values()) <= 1e-3


def test_activations_that_a_sine_is_taken_of_stay_in_fp16():
    """A snake activation of a layer's results of about 1: nothing is lost, and Tensor Cores are kept."""
    n = Network(12)
    x = n.conv("x", 16, 16)
    for _ in range(2):
        sine = n(x, "Sin")
        x = n.conv(n(x, "Add", n(sine, "Mul", sine)), 16, 16, gain=0.5)
    made = n.model((1, 16, 12, 12), x)
    plan = without_code(made, ("sm_80",), precision="mixed")
    assert storage(plan) == {}
    assert max(errors(plan, made, {"x": RNG.standard_normal((1, 16, 12, 12)).astype(np.float32)}).values()) <= 2e-3


def test_what_divides_is_not_rounded_to_zero():
    """Vectors over their lengths, which a tiny number keeps from zero: those that are zero stay so."""
    n = Network(18)
    x = n("x", "MatMul", n.weight(32, 32), name="product")
    length = n(n(x, "ReduceL2", np.array([2], np.int64), keepdims=1), "Clip", np.array(1e-12, np.float32), name="length")
    made = n.model((1, 16, 32), n(n(x, "Div", length), "MatMul", n.weight(32, 32)), n(length, "Sqrt"))
    x = RNG.standard_normal((1, 16, 32)).astype(np.float32)
    x[:, ::3] = 0
    assert max(errors(without_code(made, ("sm_80",), precision="mixed"), made, {"x": x}).values()) <= 1e-3


def test_whole_numbers_of_few_digits_stay_in_fp16():
    n = Network(13)
    bytes_ = n("x", "Cast", to=FLOAT, name="bytes")
    y = n(n.conv(bytes_, 8, 3), "Add", n(n(bytes_, "Conv", n.weight(8, 3, 1, 1)), "Relu"))
    made = model(n, {"x": (TensorProto.UINT8, (1, 3, 8, 8))}, y)
    assert storage(without_code(made, ("sm_80",), precision="mixed")) == {}


# --- Inputs that mean something ----------------------------------------------------------------------------------------


def program(made: onnx.ModelProto):
    return to_program(made, {}, Options(precision="fp32"), Dump(None))


def test_inputs_are_in_the_ranges_that_the_model_tells():
    n = Network(14)
    words = n(n.weight(300, 8), "Gather", "ids")
    places = n(n.weight(66, 8), "Gather", n("places", "Add", np.array(2, np.int32)))
    hidden = n(n(n("mask", "Sub", array(1)), "Mul", array(10000)), "Unsqueeze", np.array([2]))
    scores = n(n(n(words, "Add", places), "MatMul", n.weight(8, 16)), "Add", hidden)
    inputs = {"ids": (INT, (1, 16)), "places": (TensorProto.INT32, (1, 16)), "mask": (FLOAT, (1, 16))}
    made = program(model(n, inputs, n(scores, "Softmax", axis=1)))
    assert input_ranges(made) == {
        "ids": InputRange(0, 299, whole=True),
        "places": InputRange(0, 63, whole=True),
        "mask": InputRange(0, 1, whole=True),
    }
    some = [seeded(made, seed, input_ranges(made)) for seed in range(8)]
    assert max(s["ids"].max() for s in some) > 280 and min(s["ids"].min() for s in some) < 20
    assert {*np.unique([s["mask"] for s in some])} == {0.0, 1.0}


def test_what_is_read_for_its_angle_is_a_position_or_a_time_step():
    assert input_ranges(program(rotary())) == {"at": InputRange(0, 2**15 - 1, whole=True)}
    assert input_ranges(program(time_steps()[0])) == {"t": InputRange(0, 999, whole=True)}
    assert input_ranges(program(radiance_field()[0])) == {}  # coordinates are of about 1


def test_the_user_says_what_an_input_holds():
    made = program(time_steps()[0])
    given = parse_ranges(["t=0..1"])
    assert ranges_of(made, given) == {"t": InputRange(0, 1)}
    values = seeded(made, 0, ranges_of(made, given))["t"]
    assert ((values >= 0) & (values <= 1)).all() and (values % 1 != 0).all()
    for text, message in [("t=1", "NAME=LOW..HIGH"), ("t=2..x", "NAME=LOW..HIGH"), ("=1..2", "NAME=LOW..HIGH")]:
        with pytest.raises(UsageError, match=message):
            parse_ranges([text])
    with pytest.raises(UsageError, match="no input; there are 't'"):
        ranges_of(made, {"u": (0, 1)})
    with pytest.raises(UsageError, match="finite"):
        Options(input_ranges={"t": (1, 0)})
    ids = program(rotary())
    with pytest.raises(UsageError, match="does not hold"):
        ranges_of(ids, {"at": (0.2, 0.8)})


def test_ranges_that_the_user_gives_count_where_the_model_is_measured():
    """A fourth power of numbers up to 100 leaves fp16's range; of numbers of about 1 it does not."""
    n = Network(15)
    x = n(n("x", "Mul", array(1)), "Pow", array(4), name="power")
    made = n.model((1, 4, 6, 6), n(n.conv(x, 4, 4), "Mul", array(1e-9)))
    small = without_code(made, ("sm_80",), precision="mixed")
    large = without_code(made, ("sm_80",), precision="mixed", input_ranges={"x": (0.0, 100.0)})
    assert storage(large).keys() > storage(small).keys()
    inputs = {"x": RNG.uniform(0, 100, (1, 4, 6, 6)).astype(np.float32)}
    assert max(errors(large, made, inputs).values()) <= 1e-3


def test_verify_uses_late_positions_and_the_certificate_keeps_them():
    made = rotary()
    verified = verify(made, without_code(made, ("sm_80",), precision="mixed"), 1e-3)
    (certificate,) = verified.plan.certificates
    assert verified.passed and certificate.ranges == {"at": InputRange(0, 2**15 - 1, whole=True)}
    again = from_bytes(to_bytes(verified.plan))
    with Session(again, "cpu") as session:
        assert all(r.passed for r in selftest(again, session))
    wrong = without_code(made, ("sm_80",), precision="fp16")
    assert not verify(made, wrong, 1e-3).passed


def test_only_what_is_read_so_is_wide():
    """Of the rotary model: angles and what they come from, nothing behind the sines."""
    plan = without_code(rotary(), ("sm_80",), precision="mixed")
    tensors = plan.entries[0].program.tensors
    wide = {name for name, s in storage(plan).items() if tensors[name].dtype is DType.F32}
    assert len(wide - plan.entries[0].program.constants.keys()) == 2


# --- A budget of errors ------------------------------------------------------------------------------------------------


def layers(depth: int = 6) -> onnx.ModelProto:
    """Layers, of whose results each has some part in the output, and one that is read a hundred times as large as others."""
    n = Network(16)
    x = n.conv("x", 16, 8)
    for _ in range(depth):
        x = n(n.conv(n(x, "Relu"), 16, 16, gain=1.4), "Add", x)
    return n.model((1, 8, 12, 12), x)


@pytest.mark.parametrize("bound", [1e-2, 3e-4, 1e-4, 2e-6])
def test_precision_rises_until_the_error_is_within_the_budget(bound):
    made = layers()
    plan = without_code(made, ("sm_80",), precision="mixed", max_error=bound)
    inputs = {"x": seeded(plan.entries[0].program, 0)["x"]}
    assert max(errors(plan, made, inputs).values()) <= bound * 1.02  # ONNX Runtime's sums differ from ours in their last digits
    kept = [op for op in plan.entries[0].program.ops if plan.entries[0].program.tensors[op.y].dtype is DType.F16]
    assert bool(kept) == (bound >= 3e-4) and (bound < 1e-2 or storage(plan) == {})


def test_a_smaller_budget_keeps_fewer_tensors_in_fp16():
    counts = []
    for bound in (1e-2, 3e-4, 1e-4, 2e-6):
        program = without_code(layers(), ("sm_80",), precision="mixed", max_error=bound).entries[0].program
        counts.append(sum(t.dtype is DType.F16 for t in program.tensors.values()))
    assert counts == sorted(counts, reverse=True) and len(set(counts)) >= 3


def test_a_budget_that_fp32_does_not_meet_is_refused():
    """Outputs that are fp16 by the model's own word are off by 2**-12, which the message says."""
    n = Network(17)
    made = n.model((1, 8, 8, 8), n(n.conv("x", 8, 8), "Cast", to=TensorProto.FLOAT16))
    made.graph.output[0].type.tensor_type.elem_type = TensorProto.FLOAT16
    told = rf"1e-06: .* \d\.\de-04 with everything .* in fp32; the model itself .* '{made.graph.output[0].name}' to float16"
    with pytest.raises(VerificationError, match=told):
        without_code(made, ("sm_80",), precision="mixed", max_error=1e-6)


def test_a_budget_below_what_fp32_holds_is_refused():
    """All in fp32 would be equal to itself, and yet no plan's outputs are within that: sums differ in their last digits."""
    with pytest.raises(VerificationError, match=r"1e-09: fp32 itself is off by about \de-08, .*; what is rounded in 'Conv"):
        without_code(layers(), ("sm_80",), precision="mixed", max_error=1e-9)
    moved = Network(16)
    moved = moved.model((1, 8, 12, 12), moved("x", "Relu"))
    assert without_code(moved, ("sm_80",), precision="mixed", max_error=1e-9)  # a program without products is exact in fp32


def test_a_budget_needs_mixed_precision():
    with pytest.raises(UsageError, match="precision mixed"):
        Options(precision="fp16", max_error=1e-3)
    with pytest.raises(UsageError, match="above 0"):
        Options(max_error=-1.0)


# --- Boxes -------------------------------------------------------------------------------------------------------------


def detector() -> onnx.ModelProto:
    """One convolution gives what boxes are moved and scaled by, another one scores; of the boxes that are kept, their corners."""
    n = Network(5)
    features = n("x", "Conv", n.weight(16, 8, 3, 3))
    heads = [n(n(features, "Conv", n.weight(k, 16, 1, 1)), "Reshape", np.array([1, k, 36], np.int64)) for k in (4, 3)]
    deltas, scores = n(heads[0], "Transpose", perm=[0, 2, 1]), n(heads[1], "Sigmoid")
    anchors = RNG.uniform(100, 600, (1, 36, 2)).astype(np.float32)
    shift, size = (n(deltas, "Slice", np.array([i]), np.array([i + 2]), np.array([2])) for i in (0, 2))
    middle, half = n(n(shift, "Mul", array(20.0)), "Add", anchors), n(n(size, "Exp"), "Mul", array(9.0))
    boxes = n(n(middle, "Sub", half), "Concat", n(middle, "Add", half), axis=2)
    kept = n(boxes, "NonMaxSuppression", scores, np.array([9]), array(0.5), array(0.2))
    which = n(n(kept, "Slice", np.array([2]), np.array([3]), np.array([1])), "Squeeze", np.array([1]))
    found = n(n(boxes, "Squeeze", np.array([0])), "Gather", which, axis=0)
    return model(n, {"x": (FLOAT, (1, 8, 8, 8))}, n(found, "Mul", array(2.0)))


def test_boxes_are_exact_from_the_last_layers_on() -> None:
    program = without_code(detector(), ("sm_90a",), precision="mixed").entries[0].program
    assert [op.nodes[0] for op in program.ops if program.tensors[op.y].dtype is DType.F16 and isinstance(op, Conv)] == ["Conv_0"]
    assert all(program.tensors[op.y].dtype is not DType.F16 for op in program.ops if op.nodes[0] != "Conv_0")


def optimizer() -> tuple[onnx.ModelProto, dict[str, np.ndarray]]:
    """A step of Adam; means of squares of gradients of 1e-4 are 1e-8."""
    n = Network(1)
    means = [n(n("m", "Mul", array(0.9)), "Add", n("g", "Mul", array(0.1)))]
    means.append(n(n("v", "Mul", array(0.999)), "Add", n(n("g", "Mul", "g"), "Mul", array(0.001))))
    step = n(means[0], "Div", n(n(means[1], "Sqrt"), "Add", array(1e-8)))
    feeds = {"m": RNG.standard_normal((4, 5)) * 1e-4, "g": RNG.standard_normal((4, 5)) * 1e-4, "v": RNG.random((4, 5)) * 1e-8}
    made = model(n, dict.fromkeys("mgv", (FLOAT, (4, 5))), step, *means)
    return made, {name: values.astype(np.float32) for name, values in feeds.items()}


def squares() -> tuple[onnx.ModelProto, dict[str, np.ndarray]]:
    """Read twice, and larger than fp16 holds."""
    n = Network(2)
    square = n("x", "Mul", "x")
    made = model(
        n, {"x": (FLOAT, (4, 5))}, n(square, "Div", n(square, "Add", array(1.0))), n(n(square, "Add", array(1.0)), "Log")
    )
    return made, {"x": 3000 * RNG.standard_normal((4, 5)).astype(np.float32)}


def normed() -> tuple[onnx.ModelProto, dict[str, np.ndarray]]:
    """By the root of its mean square, before a layer: 1e5 is infinite in fp16."""
    n = Network(3)
    norm = n("x", "RMSNormalization", np.ones(48, np.float32))
    made = model(n, {"x": (FLOAT, (4, 48))}, n(norm, "MatMul", n.weight(48, 8)), opset=23)
    return made, {"x": 1e5 * RNG.standard_normal((4, 48)).astype(np.float32)}


def chosen() -> tuple[onnx.ModelProto, dict[str, np.ndarray]]:
    """Shares, means of neighbours and twice as many of them, of 1e5."""
    n = Network(4)
    pooled = n(n("x", "Relu"), "AveragePool", kernel_shape=[2, 2])
    made = model(n, {"x": (FLOAT, (1, 3, 6, 6))}, n("x", "Softmax", axis=-1), n(pooled, "Tanh"), n(pooled, "Sqrt"))
    return made, {"x": 1e5 + RNG.standard_normal((1, 3, 6, 6)).astype(np.float32)}


def covariance() -> tuple[onnx.ModelProto, dict[str, np.ndarray]]:
    """Of values that deviate from their mean by 1e-4: no layer, so its result may have any size, too."""
    n = Network(5)
    apart = n("x", "Sub", n("x", "ReduceMean", array(0).astype(np.int64), keepdims=1))
    c = n(n(apart, "Transpose", perm=[1, 0]), "MatMul", apart)
    return model(n, {"x": (FLOAT, (40, 8))}, c, n(n(c, "Abs"), "Sqrt")), {"x": 1e-4 * RNG.random((40, 8)).astype(np.float32) ** 2}


def image_of_16_bits() -> tuple[onnx.ModelProto, dict[str, np.ndarray]]:
    """Divided by 65535 before its first layer."""
    n = Network(6)
    made = model(n, {"x": (FLOAT, (1, 3, 8, 8))}, n(n("x", "Div", array(65535)), "Conv", n.weight(8, 3, 3, 3)))
    return made, {"x": 65535 * RNG.integers(0, 2, (1, 3, 8, 8)).astype(np.float32)}


def amounts() -> tuple[onnx.ModelProto, dict[str, np.ndarray]]:
    """Integers up to a million, in millions."""
    n = Network(7)
    made = model(
        n, {"x": (TensorProto.INT64, (4, 30))}, n(n(n("x", "Cast", to=FLOAT), "Div", array(1e6)), "MatMul", n.weight(30, 3))
    )
    return made, {"x": RNG.integers(0, 10**6, (4, 30))}


@pytest.mark.parametrize("case", [optimizer, squares, normed, chosen, covariance, image_of_16_bits, amounts])
def test_what_is_computed_of_inputs_alone_may_be_of_any_size(case) -> None:
    made, feeds = case()
    assert max(errors(without_code(made, ("sm_80",), precision="mixed"), made, feeds).values()) <= 1e-3
