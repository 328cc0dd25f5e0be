"""Types of 8 bits and fewer: casts, quantizing and dequantizing, beside ONNX's reference evaluator."""

from __future__ import annotations

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator

import tccompile
from tccompile.ir.types import DType
from tccompile.pipeline import without_code
from tests.networks import relative_error
from tests.tiers import usually

FLOAT, INT8 = TensorProto.FLOAT, TensorProto.INT8
FLOATS = ["FLOAT8E4M3FN", "FLOAT8E4M3FNUZ", "FLOAT8E5M2", "FLOAT8E5M2FNUZ", "FLOAT4E2M1"]
INTEGERS = ["INT4", "UINT4", "INT2", "UINT2"]
LIMITS = {"INT4": (-8, 7), "UINT4": (0, 15), "INT2": (-2, 1), "UINT2": (0, 3)}


def model(
    nodes: list[onnx.NodeProto],
    constants: dict[str, onnx.TensorProto] | None = None,
    elem: int = FLOAT,
    columns: int = 32,
    out: int = FLOAT,
) -> onnx.ModelProto:
    """From x, of 6 by 32, to y."""
    x, y = helper.make_tensor_value_info("x", elem, (6, 32)), helper.make_tensor_value_info("y", out, (6, columns))
    for name, tensor in (constants or {}).items():
        tensor.name = name
    graph = helper.make_graph(nodes, "narrow", [x], [y], [*(constants or {}).values()])
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 25)], ir_version=13)
    onnx.checker.check_model(made)
    return made


def run(made: onnx.ModelProto, x: np.ndarray, precision: str = "fp32") -> np.ndarray:
    with tccompile.Session(without_code(made, precision=precision), "cpu") as session:
        (y,) = session.run(None, {"x": x})
    return y


def expected(made: onnx.ModelProto, x: np.ndarray) -> np.ndarray:
    with np.errstate(all="ignore"):
        (y,) = ReferenceEvaluator(made).run(None, {"x": x})
    return y


def tensor(elem: str | int, values: np.ndarray | list | float) -> onnx.TensorProto:
    values = np.asarray(values, np.float32)
    kind = getattr(TensorProto, elem) if isinstance(elem, str) else elem
    return numpy_helper.from_array(values.astype(helper.tensor_dtype_to_np_dtype(kind)))


def edges(elem: str) -> np.ndarray:
    """All numbers of a type, what lies halfway between them, a little more and less, and far beyond: 6 by 32 at a time."""
    dtype = helper.tensor_dtype_to_np_dtype(getattr(TensorProto, elem))
    values = (
        np.arange(256, dtype=np.uint8).view(dtype) if "8" in elem else np.arange(16, dtype=np.uint8).astype(np.uint8).view(dtype)
    )
    numbers = np.unique(values.astype(np.float32)[np.isfinite(values.astype(np.float32))])
    halves = (numbers[1:] + numbers[:-1]) / 2
    more = np.concatenate([np.nextafter(halves, np.float32(s)) for s in (-np.inf, np.inf)])
    large = np.float32(numbers[-1]) * np.float32([1.01, 1.06, 1.2, 1.9, 3, 1e6])
    found = np.concatenate([numbers, halves, more, large, -large]).astype(np.float32)
    return np.resize(found, (-(-len(found) // 192), 6, 32))


@pytest.mark.parametrize(
    ("elem", "saturate"), usually([(elem, saturate) for elem in FLOATS for saturate in (1, 0)], 0, 3, 4, 7, 8)
)
def test_floats_are_rounded_as_a_cast_rounds_them(elem: str, saturate: int) -> None:
    made = model(
        [
            helper.make_node("Cast", ["x"], ["t"], to=getattr(TensorProto, elem), saturate=saturate),
            helper.make_node("Cast", ["t"], ["y"], to=FLOAT),
        ]
    )
    for x in edges(elem):
        np.testing.assert_array_equal(run(made, x), expected(made, x))
    x = np.full((6, 32), np.nan, np.float32)
    if elem != "FLOAT4E2M1":
        assert np.isnan(run(made, x)).all()
        x[:] = np.inf
        np.testing.assert_array_equal(run(made, x), expected(made, x))


@pytest.mark.parametrize("elem", INTEGERS)
@pytest.mark.parametrize("source", [FLOAT, INT8])
def test_integers_keep_their_low_bits(elem: str, source: int) -> None:
    nodes = [
        helper.make_node("Cast", ["x"], ["i"], to=source),
        helper.make_node("Cast", ["i"], ["t"], to=getattr(TensorProto, elem)),
        helper.make_node("Cast", ["t"], ["y"], to=FLOAT),
    ]
    low, high = LIMITS[elem]
    x = np.resize(np.arange(low, high + 1, 0.25, np.float32), (6, 32))
    x = np.trunc(x) if source == INT8 else x
    made = model(nodes)
    np.testing.assert_array_equal(run(made, x), expected(made, x))


@pytest.mark.parametrize("elem", FLOATS + INTEGERS)
@pytest.mark.parametrize("axis", [None, 1])
def test_quantizing_and_back(elem: str, axis: int | None) -> None:
    scale = 0.07 if axis is None else np.linspace(0.02, 0.3, 32)
    low, high = LIMITS.get(elem, (0, 0))
    constants = {"s": tensor(FLOAT, scale), "z": tensor(elem, np.full(np.shape(scale), (low + high + 1) // 2))}
    how = {} if axis is None else {"axis": axis}
    nodes = [
        helper.make_node("QuantizeLinear", ["x", "s", "z"], ["q"], **how),
        helper.make_node("DequantizeLinear", ["q", "s", "z"], ["y"], **how),
    ]
    made, x = model(nodes, constants), np.random.default_rng(0).standard_normal((6, 32)).astype(np.float32) * 3
    np.testing.assert_allclose(run(made, x), expected(made, x), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("elem", FLOATS + INTEGERS)
def test_constants_are_rounded_while_compiling(elem: str) -> None:
    constants = {"s": tensor(FLOAT, 0.07), "z": tensor(elem, 0), "w": tensor(FLOAT, np.linspace(-40, 40, 192).reshape(6, 32))}
    nodes = [
        helper.make_node("QuantizeLinear", ["w", "s", "z"], ["q"]),
        helper.make_node("DequantizeLinear", ["q", "s", "z"], ["d"]),
        helper.make_node("Add", ["x", "d"], ["y"]),
    ]
    made, x = model(nodes, constants), np.zeros((6, 32), np.float32)
    np.testing.assert_array_equal(run(made, x), expected(made, x))
    (entry,) = without_code(made).entries
    assert [op.nodes for op in entry.program.ops] == [("y",)]


def test_a_constant_of_such_a_type_is_given_as_bits() -> None:
    number = TensorProto.FLOAT8E4M3FN
    graph = helper.make_graph(
        [helper.make_node("Cast", ["w"], ["y"], to=number), helper.make_node("Neg", ["x"], ["z"])],
        "narrow",
        [helper.make_tensor_value_info("x", FLOAT, (4,))],
        [helper.make_tensor_value_info("y", number, (4,)), helper.make_tensor_value_info("z", FLOAT, (4,))],
        [numpy_helper.from_array(np.array([0, 1, -2, 448], np.float32), "w")],
    )
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 25)], ir_version=13)
    with tccompile.Session(without_code(made), "cpu") as session:
        y, _ = session.run(None, {"x": np.zeros(4, np.float32)})
    np.testing.assert_array_equal(y, np.array([0, 0x38, 0xC0, 0x7E], np.uint8))


@pytest.mark.parametrize("elem", ["FLOAT8E4M3FN", "FLOAT8E5M2", "INT8", "UINT8"])
@pytest.mark.parametrize("constant", [False, True])
def test_halves_are_divided_in_float32_as_by_onnx_runtime(elem: str, constant: bool) -> None:
    number, x = getattr(TensorProto, elem), np.random.default_rng(0).standard_normal((600, 32)).astype(np.float16)
    w = [numpy_helper.from_array(x, "w")] if constant else []
    graph = helper.make_graph(
        [
            helper.make_node("QuantizeLinear", ["w" if constant else "x", "s", "z"], ["q"]),
            helper.make_node("Cast", ["q"], ["f"], to=FLOAT),
            helper.make_node("Cast", ["x"], ["g"], to=FLOAT),
            helper.make_node("Add", ["f", "g"], ["y"]),
        ],
        "halves",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT16, x.shape)],
        [helper.make_tensor_value_info("y", FLOAT, x.shape)],
        [*w, numpy_helper.from_array(np.float16(0.017), "s"), helper.make_tensor("z", number, [], [0])],
    )
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 19)], ir_version=9)
    plain = onnxruntime.SessionOptions()
    plain.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    feeds = {"x": np.zeros_like(x) if constant else x}
    (y,) = onnxruntime.InferenceSession(made.SerializeToString(), plain).run(None, feeds)
    np.testing.assert_array_equal(run(made, feeds["x"]), y)


@pytest.mark.parametrize("elem", ["FLOAT8E4M3FN", "INT4"])
@pytest.mark.parametrize("zero", ["identity", "reshaped", "cast", "node", "output_dtype", "cast like"])
def test_the_type_counts_however_it_is_said(elem: str, zero: str) -> None:
    number = getattr(TensorProto, elem)
    constants, how, before = {"s": tensor(FLOAT, 0.05), "z": tensor(elem, 0)}, {}, []
    given = ["x", "s", "z"]
    match zero:
        case "identity":
            before, given = [helper.make_node("Identity", ["z"], ["same"])], ["x", "s", "same"]
        case "reshaped":
            constants |= {"z": tensor(elem, [0]), "to": numpy_helper.from_array(np.zeros(0, np.int64))}
            before, given = [helper.make_node("Reshape", ["z", "to"], ["same"])], ["x", "s", "same"]
        case "cast":
            constants["z"] = tensor(FLOAT, 0)
            before, given = [helper.make_node("Cast", ["z"], ["same"], to=number)], ["x", "s", "same"]
        case "node":
            before, given = [helper.make_node("Constant", [], ["same"], value=constants.pop("z"))], ["x", "s", "same"]
        case "output_dtype":
            how, given = {"output_dtype": number}, ["x", "s"]
    last = [helper.make_node("QuantizeLinear", given, ["q"], **how), helper.make_node("Cast", ["q"], ["y"], to=FLOAT)]
    if zero == "cast like":
        last[0] = helper.make_node("CastLike", ["x", "z"], ["q"])
    made = model(
        [*before, *last], {n: t for n, t in constants.items() if n in {i for node in (*before, *last) for i in node.input}}
    )
    x = np.random.default_rng(0).uniform(-3, 3, (6, 32)).astype(np.float32)
    np.testing.assert_array_equal(run(made, x), expected(made, x))


def test_inside_a_branch() -> None:
    inner = helper.make_graph(
        [helper.make_node("Cast", ["x"], ["t"], to=TensorProto.FLOAT8E5M2), helper.make_node("Cast", ["t"], ["b"], to=FLOAT)],
        "then",
        [],
        [helper.make_tensor_value_info("b", FLOAT, (6, 32))],
    )
    other = helper.make_graph(
        [helper.make_node("Neg", ["x"], ["c"])], "else", [], [helper.make_tensor_value_info("c", FLOAT, (6, 32))]
    )
    made = model(
        [helper.make_node("If", ["yes"], ["y"], then_branch=inner, else_branch=other)],
        {"yes": numpy_helper.from_array(np.array(True))},
    )
    x = np.random.default_rng(0).standard_normal((6, 32)).astype(np.float32)
    np.testing.assert_array_equal(run(made, x), expected(made, x))


@pytest.mark.parametrize("elem", ["FLOAT8E4M3FN", "FLOAT8E5M2", "FLOAT4E2M1", "INT4"])
@pytest.mark.parametrize("block", [0, 16, 12])
def test_products_of_weights_in_these_types(elem: str, block: int) -> None:
    """As quantizers write them: activations with one scale, weights with one for each column, or for each block of a column."""
    rng = np.random.default_rng(1)
    blocks = -(-32 // block) if block else 1
    scales = rng.uniform(0.01, 0.03, (blocks, 24) if block else 24)
    constants = {
        "w": tensor(elem, np.clip(rng.standard_normal((32, 24)) * 3, *LIMITS.get(elem, (-6, 6)))),
        "ws": tensor(FLOAT, scales), "wz": tensor(elem, np.zeros(scales.shape)),
        "s": tensor(FLOAT, 0.02), "z": tensor("FLOAT8E4M3FN", 0),
    }  # fmt: skip
    how = {"axis": 0, "block_size": block} if block else {"axis": 1}
    nodes = [
        helper.make_node("QuantizeLinear", ["x", "s", "z"], ["q"]),
        helper.make_node("DequantizeLinear", ["q", "s", "z"], ["d"]),
        helper.make_node("DequantizeLinear", ["w", "ws", "wz"], ["wd"], **how),
        helper.make_node("MatMul", ["d", "wd"], ["y"]),
    ]
    made, x = model(nodes, constants, columns=24), rng.standard_normal((6, 32)).astype(np.float32)
    assert relative_error(run(made, x), expected(made, x)) <= 1e-6
    assert relative_error(run(made, x, "mixed"), expected(made, x)) <= 3e-3
    program = without_code(made).entries[0].program
    kind = DType.F16 if block else DType.E4M3  # of all these types the numbers are numbers of E4M3
    assert {program.tensors[name].dtype for op in program.ops for name in op.multiplied} == {kind}


@pytest.mark.parametrize("elem", FLOATS + INTEGERS + ["FLOAT8E8M0"])
def test_inputs_and_outputs_of_these_types(elem: str) -> None:
    """Floats are given as their bits, integers as those of 8."""
    number = getattr(TensorProto, elem)
    dtype = helper.tensor_dtype_to_np_dtype(number)
    if elem in INTEGERS:
        numbers = np.resize(np.arange(LIMITS[elem][0], LIMITS[elem][1] + 1), (6, 32)).astype(dtype)
        given = numbers.astype(np.uint8 if elem[0] == "U" else np.int8)
    else:
        given = np.resize(np.arange(16 if elem == "FLOAT4E2M1" else 256, dtype=np.uint8), (6, 32))
        numbers = given.view(dtype)
    made = model([helper.make_node("Cast", ["x"], ["y"], to=FLOAT)], elem=number)
    np.testing.assert_array_equal(run(made, given), numbers.astype(np.float32))
    how = {"saturate": 0} if "FLOAT8" in elem else {}  # an infinity stays one
    out = model([helper.make_node("Cast", ["x"], ["y"], to=number, **how)], out=number)
    again = run(out, numbers.astype(np.float32))
    assert again.dtype == given.dtype
    if elem in INTEGERS:
        np.testing.assert_array_equal(again, given)
    else:
        np.testing.assert_array_equal(again.view(dtype).astype(np.float32), numbers.astype(np.float32))


@pytest.mark.parametrize("mode", ["up", "down", "nearest"])
def test_powers_of_two(mode: str) -> None:
    out = model([helper.make_node("Cast", ["x"], ["y"], to=TensorProto.FLOAT8E8M0, round_mode=mode)], out=TensorProto.FLOAT8E8M0)
    x = np.exp2(np.linspace(-126, 127.99, 192)).astype(np.float32).reshape(6, 32)
    x[0, :6] = 1.5, 3.0, 1.4999999, -6.0, np.inf, np.nan
    np.testing.assert_array_equal(run(out, x), expected(out, x).view(np.uint8))


def test_what_is_rounded_to_eight_bits_may_be_rounded_to_sixteen_first() -> None:
    """A step of float8 here or there is no more than rounding to float8 is, and no reason for fp32."""
    constants = {
        "s": tensor(FLOAT, 0.02),
        "z": tensor("FLOAT8E4M3FN", 0),
        "w": tensor(FLOAT, np.random.default_rng(1).normal(size=(32, 32)) * 0.2),
    }
    nodes, t = [], "x"
    for i in range(3):
        nodes += [
            helper.make_node("QuantizeLinear", [t, "s", "z"], [f"q{i}"]),
            helper.make_node("DequantizeLinear", [f"q{i}", "s", "z"], [f"d{i}"]),
            helper.make_node("MatMul", [f"d{i}", "w"], [f"m{i}"]),
            helper.make_node("Add", [f"m{i}", t], [f"a{i}"]),
            helper.make_node("Relu", [f"a{i}"], [t := f"r{i}" if i < 2 else "y"]),
        ]
    program = without_code(model(nodes, constants), precision="mixed").entries[0].program
    assert {program.tensors[op.y].dtype for op in program.ops if op.y not in program.outputs} == {
        DType.F16
    } and not program.storage
