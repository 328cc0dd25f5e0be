"""Epilogues: what is chosen for which layout, what is stored, and that all of it compiles."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tccompile.arch import ARCHS
from tccompile.emit.ptx import ptx_text
from tccompile.emit.ptxas import assemble
from tccompile.errors import UnsupportedError
from tccompile.ir.expr import ACC, FUNCTIONS, Epilogue, Expr, View, call, cast, const, coord, load
from tccompile.ir.ops import Conv, Gemm, Softmax
from tccompile.ir.program import Program
from tccompile.ir.reference import compute
from tccompile.ir.tensor import Tensor, dense
from tccompile.ir.types import DType
from tccompile.kernels import codegen, epilogue
from tccompile.kernels.spec import F32 as Float
from tccompile.kernels.spec import I32, Function, Ptr
from tccompile.kernels.text import KernelText, compiled
from tests.gpu.cases import NHWC, NWC, Builder
from tests.gpu.cases import epilogue as epilogue_of
from tests.kernels import simulator
from tests.kernels.memory import Memory
from tests.networks import relative_error
from tests.tiers import usually

F16, F32 = DType.F16, DType.F32


def program_of(shape: tuple[int, ...], words: str, to: str = "own", dtype: DType = F16, make: Any = None) -> Program:
    """A 1×1 convolution (or a product of matrices) by the identity, so that acc is x."""
    b = Builder(words)
    image = len(shape) > 2
    order = {4: NHWC, 3: NWC, 2: None}[len(shape)]
    lane = 1
    b.normal("x", shape, F32, order)
    b.values("w", np.eye(shape[1]).reshape(shape[1], shape[1], *(1,) * (len(shape) - 2)), F32)
    ep = make(b) if make else epilogue_of(b, shape, words, lane, order, dtype)
    s = ep.shuffle
    out = shape if s == 1 else (shape[0], shape[1] // (s * s), shape[2] * s, shape[3] * s)
    if to == "own":
        b.result(out, dtype, order)
    elif to == "output":
        b.output(out, dtype)
    elif to == "slice":
        b.slice_of(out, lane, out[lane] + 9, 3, dtype, order)
    elif to == "tail":
        b.slice_of(out, lane, out[lane] + 8, 8, dtype, order)
    one = (1,) * (len(shape) - 2)
    nodes = ("op",)
    if image:
        op: Any = Conv(nodes=nodes, y="y", x="x", w="w", strides=one, pads=(0,) * len(one), dilations=one, epilogue=ep)
    else:
        op = Gemm(nodes=nodes, y="y", a="x", b="w", epilogue=ep)
    return b.program(op)


STEP = 2
"""Rows between those that a call stores when it stores several."""


def stored(program: Program, lanes: int, at_once: int = 1) -> Memory:
    """What the generated function stores when it gets x as the results, with rubbish beyond the result's channels and rows."""
    (op,) = program.ops
    frame = epilogue.frame_of(op, program)
    spec = epilogue.describe(op, program, frame, lanes)
    values = {name: recipe.values for name, recipe in program.constants.items()}  # type: ignore[union-attr]
    memory = Memory(program, values, op.y)
    found = epilogue.source(spec.form, at_once)
    kinds = {Ptr: "address", I32: "int", Float: "float"}
    assert [kinds[type(a)] for a in spec.args] == list(found.kinds)  # type: ignore[index]
    store = simulator.alone(found.function, memory)
    e = tuple(memory.pointer(a) if isinstance(a, Ptr) else a.value for a in spec.args)  # type: ignore[union-attr]
    shape = program.op_shape(op)
    axes = [a for a in frame if a is not None]
    rows = np.moveaxis(values["x"], axes, range(len(axes))).reshape(-1, shape[axes[-1]])
    with np.errstate(all="ignore"):
        for m in range(len(rows)):
            if at_once > 1 and m % (STEP * at_once) >= STEP:
                continue  # stored with an earlier row
            for c in range(0, 64, lanes):  # beyond what y has, too: nothing is stored there
                acc = []
                for r in range(m, m + STEP * at_once, STEP)[:at_once]:
                    row = rows[r] if r < len(rows) else []
                    acc += [np.float32(row[c + i]) if c + i < len(row) else np.float32(np.nan) for i in range(lanes)]
                store(tuple(acc), m, *((STEP, len(rows)) if at_once > 1 else ()), c, e)
    return memory


CASES: dict[str, dict[str, Any]] = {
    "plain": {"shape": (2, 16, 3, 2), "words": ""},
    "masked": {"shape": (2, 19, 3, 2), "words": "bias residual silu"},
    "fp32": {"shape": (1, 12, 3, 2), "words": "scale bias relu", "dtype": F32},
    "bf16": {"shape": (1, 12, 3, 2), "words": "bias relu", "dtype": DType.BF16},
    "int8": {"shape": (1, 12, 3, 2), "words": "bias", "dtype": DType.I8},
    "output": {"shape": (2, 5, 3, 4), "words": "bias", "to": "output", "dtype": F32},
    "output_fp16": {"shape": (2, 24, 3, 4), "words": "bias gelu", "to": "output"},
    "slice": {"shape": (2, 12, 3, 2), "words": "bias residual relu", "to": "slice"},
    "tail": {"shape": (2, 12, 3, 2), "words": "bias residual relu", "to": "tail"},
    "signal": {"shape": (2, 20, 7), "words": "bias tanh"},
    "matrix": {"shape": (7, 20), "words": "bias residual"},
    "matrix_output": {"shape": (3, 21), "words": "bias", "to": "output", "dtype": F32},
    "one_row_output": {"shape": (1, 24), "words": "", "to": "output", "dtype": F32},
    "shuffle": {"shape": (2, 32, 3, 2), "words": "bias shuffle"},
    "shuffle_1": {"shape": (1, 4, 3, 2), "words": "bias shuffle"},
    "shuffle_3": {"shape": (2, 12, 3, 2), "words": "bias tanh shuffle"},
    "shuffle_3_output": {"shape": (2, 12, 3, 2), "words": "bias shuffle", "to": "output", "dtype": F32},
    "shuffle_11": {"shape": (1, 44, 2, 2), "words": "shuffle"},
    "shuffle_tail": {"shape": (1, 48, 2, 2), "words": "shuffle", "to": "tail"},
}


@pytest.mark.parametrize("case", ["plain", "masked", "slice", "tail", "signal", "matrix"])
def test_results_of_two_rows_for_a_kernel_that_stores_them(case: str) -> None:
    """As many as y holds, zeros in its padding; what differs by row is handed over, what lies beyond y is read nowhere."""
    program = program_of(**CASES[case])
    (op,) = program.ops
    values = {name: recipe.values for name, recipe in program.constants.items()}  # type: ignore[union-attr]
    frame, shape, y = epilogue.frame_of(op, program), program.op_shape(op), program.tensors["y"]
    axes = [a for a in frame if a is not None]
    lane, by_row = axes[-1], epilogue.loads_by_row(op, program)
    spec = epilogue.describe(op, program, frame, 2)
    memory = Memory(program, values, op.y)
    found = epilogue.source(spec.form, 2, stores=False)
    results = simulator.alone(found.function, memory)
    e = tuple(memory.pointer(a) if isinstance(a, Ptr) else a.value for a in spec.args)  # type: ignore[union-attr]

    def rows(array: np.ndarray) -> np.ndarray:
        padded = np.full((*np.delete(shape, lane), 64), np.nan, np.float32)
        padded[..., : shape[lane]] = np.moveaxis(array, lane, -1)
        return padded.reshape(-1, 64)

    expected = rows(compute(op, program, values))
    expected[:, shape[lane] : y.padded[lane]] = 0
    acc, added = rows(values["x"]), [rows(values[load.tensor.name]) for load in by_row]
    assert len(added) == ("residual" in CASES[case]["words"])
    for c in range(0, 64, 2):
        pair = [tuple(part[r, c + i] for r in (1, 2) for i in (0, 1)) for part in (acc, *added)]
        with np.errstate(all="ignore"):
            got = np.array(results(*pair, c, e)).reshape(2, 2)
        if c < y.padded[lane]:
            assert relative_error(got, expected[1:3, c : c + 2]) <= 1e-3 or not expected[1:3, c : c + 2].any()
            assert not got[:, max(0, shape[lane] - c) :].any(), "padding"


@pytest.mark.parametrize(("lanes", "at_once"), [(1, 1), (2, 1), (4, 1), (8, 1), (8, 2), (8, 4)])
@pytest.mark.parametrize("case", CASES)
def test_stores(case: str, lanes: int, at_once: int) -> None:
    program = program_of(**CASES[case])
    memory = stored(program, lanes, at_once)
    memory.check_written()
    (op,) = program.ops
    expected = compute(op, program, {name: recipe.values for name, recipe in program.constants.items()})  # type: ignore[union-attr]
    y = program.tensors["y"]
    if not y.dtype.is_float:
        expected = np.trunc(expected)
    assert relative_error(memory.result(), expected) <= {F16: 5e-4, DType.BF16: 4e-3, F32: 1e-6}.get(y.dtype, 0)


def odd_loads(b: Builder) -> Epilogue:
    """Loads along a row, along q only, of a broadcast image, backwards, of integers, of booleans"""
    shape = (2, 12, 3, 4)
    b.normal("p", (3,), F32)
    b.normal("image", (2, 1, 3, 4), F16, NHWC)
    b.normal("back", shape, F16, NHWC)
    b.integers("i", (12,), DType.I32)
    b.values("mask", b.rng.integers(0, 2, (2, 4)).astype(bool), DType.BOOL)
    loads = (
        View("p", (coord(2),)),
        View("image", (coord(0), coord(2) * 0, coord(2), coord(3))),
        View("back", (coord(0), coord(1), -coord(2) + 2, -coord(3) + 3)),
        View("i", (coord(1),)),
        View("mask", (coord(0), coord(3))),
    )
    total = call("add", call("add", call("mul", ACC, load(0)), load(1)), load(2))
    total = call("add", total, cast(load(3, DType.I64), F32))
    return Epilogue(call("where", load(4, DType.BOOL), total, call("neg", total)), loads)


@pytest.mark.parametrize("lanes", [2, 8])
def test_odd_loads(lanes: int) -> None:
    program = program_of((2, 12, 3, 4), "odd", make=odd_loads)
    memory = stored(program, lanes)
    memory.check_written()
    (op,) = program.ops
    expected = compute(op, program, {name: recipe.values for name, recipe in program.constants.items()})  # type: ignore[union-attr]
    assert relative_error(memory.result(), expected) <= 5e-4


# --- Constants as arguments --------------------------------------------------------------------------------------------


def quantized(scale: float, zero: int, x: Expr = ACC) -> Expr:
    """x as int8 with a scale and a zero point, and back, as QuantizeLinear and DequantizeLinear are lowered."""
    moved = call("add", call("round", call("div", x, scale)), cast(const(zero, DType.I64), F32))
    bounded = call("min", call("where", call("greater", moved, -128.0), moved, -128.0), 127.0)
    return call("mul", cast(call("sub", cast(bounded, DType.I64), const(zero, DType.I64)), F32), scale)


def spec_of(expr: Expr, lanes: int = 8) -> epilogue.EpilogueSpec:
    program = program_of((2, 19, 3, 2), "", make=lambda b: Epilogue(expr), dtype=F32)
    return epilogue.describe(program.ops[0], program, epilogue.frame_of(program.ops[0], program), lanes)


@pytest.mark.parametrize(("scale", "zero"), [(0.0123, -4), (0.1, 127), (0.25, -128), (3e-5, 0), (1 / 3, 1)])
def test_quantization_stores_the_same_bits_as_the_reference(scale: float, zero: int) -> None:
    """To the last bit: the scale is rounded to float32 once, wherever it lies"""
    x = quantized(scale, zero)
    program = program_of((2, 19, 3, 2), "", make=lambda b: Epilogue(call("mul", x, call("sigmoid", x))), dtype=F32)
    memory = stored(program, 4, 2)
    expected = compute(program.ops[0], program, {n: recipe.values for n, recipe in program.constants.items()})  # type: ignore[union-attr]
    np.testing.assert_allclose(memory.result(), expected, rtol=2e-7)
    program = program_of((2, 19, 3, 2), "", make=lambda b: Epilogue(x), dtype=F32)
    expected = compute(program.ops[0], program, {n: recipe.values for n, recipe in program.constants.items()})  # type: ignore[union-attr]
    np.testing.assert_array_equal(stored(program, 4, 2).result(), expected)


def test_calibrations_share_a_code() -> None:
    one, other = (spec_of(quantized(scale, zero)) for scale, zero in ((0.0123, -4), (0.7, 100)))
    assert one.params == other.params and one.args[:-4] == other.args[:-4]
    assert one.args[-4:] == (Float(0.0123), Float(-4.0), I32(-4), Float(0.0123))
    assert other.args[-4:] == (Float(0.7), Float(100.0), I32(100), Float(0.7))


def test_equal_constants_of_different_parts_are_arguments_of_their_own() -> None:
    """So that a model where they are equal has the code of one where they are not; what is one part is computed once."""
    first, second = call("mul", ACC, 0.3), call("add", ACC, 0.7)
    same = spec_of(call("max", call("mul", first, 0.3), call("mul", second, 0.3)))
    other = spec_of(call("max", call("mul", first, 5.5), call("mul", second, 0.6)))
    assert same.params == other.params and sorted(a.value for a in other.args[-4:]) == [0.3, 0.6, 0.7, 5.5]  # type: ignore[union-attr]
    twice = quantized(0.3, 5)
    assert len(spec_of(call("mul", twice, call("tanh", twice))).args) == len(spec_of(twice).args)


@pytest.mark.parametrize(
    "stays",
    [
        lambda v: call("mul", ACC, v),
        lambda v: call("div", ACC, v),
        lambda v: call("pow", ACC, v + 0.5),
        lambda v: call("min", ACC, 0.3 * v),
        lambda v: call("fmod", ACC, 0.3 * v),
        lambda v: call("leaky_relu", ACC, 0.01 * v),
        lambda v: call("add", ACC, v * float("inf")),
        lambda v: call("mul", ACC, v * 1e-44),
        lambda v: cast(call("mul", cast(ACC, DType.I64), const(int(8 * v) + 1, DType.I64)), F32),
        lambda v: cast(call("add", cast(ACC, DType.I64), const(int(8 * v) << 40, DType.I64)), F32),
    ],
)
def test_constants_that_the_code_depends_on_stay_in_it(stays: Any) -> None:
    """Powers of two in products, exponents, bounds, divisors of remainders, and what no argument holds"""
    for value in (2.0, 0.25, -1.0):
        assert not any(isinstance(a, Float) for a in spec_of(stays(value)).args)
    assert spec_of(stays(2.0)).params != spec_of(stays(-1.0)).params


def test_nan_and_infinity_are_stored() -> None:
    inf = float("inf")
    for value in (inf, -inf, float("nan"), 1e39, -0.0):
        total = call("add", call("mul", ACC, 0.3), value)
        program = program_of((2, 19, 3, 2), "", make=lambda b, e=total: Epilogue(e), dtype=F32)
        with np.errstate(all="ignore"):
            expected = compute(program.ops[0], program, {n: r.values for n, r in program.constants.items()})  # type: ignore[union-attr]
        np.testing.assert_array_equal(stored(program, 8).result(), expected)


def test_many_constants() -> None:
    """Beyond a number of them they stay in the text, and are right all the same"""
    total = ACC
    for i in range(50):
        total = call("add", total, 0.1 + i)
    spec = spec_of(total)
    assert sum(isinstance(a, Float) for a in spec.args) == codegen.SCALARS
    program = program_of((2, 19, 3, 2), "", make=lambda b: Epilogue(total), dtype=F32)
    expected = compute(program.ops[0], program, {n: r.values for n, r in program.constants.items()})  # type: ignore[union-attr]
    np.testing.assert_array_equal(stored(program, 8).result(), expected)


# --- Choices -----------------------------------------------------------------------------------------------------------


def described(program: Program, lanes: int = 8) -> tuple[tuple, list[tuple]]:
    """How y is stored (mode, rows, masked), and how each load reads (mode, rows)."""
    (op,) = program.ops
    form = epilogue.describe(op, program, epilogue.frame_of(op, program), lanes).form
    return (form.y.mode, form.y.rows, form.y.masked), [(load.mode, load.rows) for load in form.loads]


def test_choices() -> None:
    assert described(program_of((2, 16, 3, 2), "bias residual")) == (
        ("vector", "linear", False),
        [("vector", "none"), ("vector", "linear")],
    )
    assert described(program_of((2, 19, 3, 2), ""))[0] == ("vector", "linear", True)
    assert described(program_of((2, 16, 3, 2), "", "output"))[0] == ("strided", "general", False)
    assert described(program_of((1, 16, 3, 2), "", "output"))[0] == ("strided", "linear", False)
    assert described(program_of((2, 19, 3, 2), "", "slice"))[0] == ("guarded", "linear", False)
    assert described(program_of((2, 19, 3, 2), "", "tail"))[0] == ("vector", "linear", True)
    # Rows of 21 floats do not begin at multiples of 16 bytes; one row does.
    assert described(program_of((3, 24), "", "output", F32))[0] == ("vector", "linear", False)
    assert described(program_of((3, 21), "", "output", F32))[0] == ("guarded", "linear", False)
    assert described(program_of((2, 12, 3, 4), "odd", make=odd_loads))[1] == [
        ("same", "general"),
        ("same", "linear"),
        ("vector", "general"),
        ("vector", "none"),
        ("same", "general"),
    ]


def test_shapes_are_no_parameters() -> None:
    def params(n: int):
        program = program_of((n, 24, 5 * n, 7), "bias residual relu")
        return epilogue.describe(program.ops[0], program, epilogue.frame_of(program.ops[0], program)).params

    assert params(1) == params(3)


def test_frames() -> None:
    assert epilogue.frame_of(program_of((2, 16, 3, 2), "").ops[0], program_of((2, 16, 3, 2), "")) == (0, 2, 3, 1)
    assert epilogue.frame_of(program_of((2, 16, 3), "").ops[0], program_of((2, 16, 3), "")) == (0, None, 2, 1)
    assert epilogue.frame_of(program_of((5, 16), "").ops[0], program_of((5, 16), "")) == (None, None, 0, 1)
    y = dense("y", (2, 20, 3, 5), F16, NHWC)
    op = Softmax(nodes=("s",), y="y", x="x", axis=3)
    assert epilogue.frame_of(op, Program((), (), {"y": y}, {}, (op,))) == (0, 2, 3, 1)


def test_a_stride_beyond_32_bits_is_refused() -> None:
    y = Tensor("y", (2, 8), F16, (2, 8), (2**31, 1))
    op = Gemm(nodes=("g",), y="y", a="a", b="b")
    program = Program((), (), {"y": y}, {}, (op,))
    with pytest.raises(UnsupportedError, match="stride of 2147483648"):
        epilogue.describe(op, program, (None, None, 0, 1))


# --- Code --------------------------------------------------------------------------------------------------------------


def kernel_of(params: tuple, lanes: int) -> Function:
    """A kernel that stores a row a thread."""
    stored = epilogue.source(epilogue.Form.decoded(params))
    acc = ", ".join(f"f32(m + {i})" for i in range(lanes))
    lines = ["m = i32(cuda.grid(1))", "if m < rows:", f"    store(({acc},), m, i32(0), e)"]
    return compiled(KernelText({"rows": "int", "e": stored.kinds}, lines, {"store": stored.function}, 128))


@pytest.mark.parametrize("arch", usually(ARCHS, "sm_61"))
def test_compiles(arch: str) -> None:
    for case, lanes in (("masked", 8), ("shuffle_3", 1)):
        program = program_of(**CASES[case])
        spec = epilogue.describe(program.ops[0], program, epilogue.frame_of(program.ops[0], program), lanes)
        _, used = assemble(ptx_text(kernel_of(spec.params, lanes), ARCHS[arch], "k"), arch)
        assert used.stack == 0 and used.registers <= 64


def test_more_arguments_than_numba_puts_into_a_tuple() -> None:
    """An epilogue of nine residuals, each of them a tensor with padding of its own"""
    words = " ".join(["bias", *["residual"] * 9])
    program = program_of((2, 19, 5, 6), words)
    spec = epilogue.describe(program.ops[0], program, epilogue.frame_of(program.ops[0], program), 1)
    function = kernel_of(spec.params, 1)
    assert len(function.signature.args) > 31
    _, used = assemble(ptx_text(function, ARCHS["sm_75"], "k"), "sm_75")
    assert used.stack == 0


BITS = ("bit_and", "bit_or", "bit_xor", "bit_not")


def test_every_function_compiles() -> None:
    """Of float32, or where it has them of integers and booleans; for the oldest generation"""
    exprs = []
    for name, function in FUNCTIONS.items():
        n = len(function.params)
        if not name.startswith(("bit_", "logical")):
            exprs.append(call(name, *([ACC] * n)) if name != "where" else call(name, call("less", ACC, 0.5), ACC, 1.0))
        if name in (
            "bit_and",
            "bit_or",
            "bit_xor",
            "bit_not",
            "add",
            "trunc_div",
            "floor_mod",
            "fmod",
            "pow",
            "min",
            "abs",
            "sign",
            "div",
        ):
            exprs.append(call(name, *[cast(ACC, DType.I64)] * n))
        if name in (*BITS, "logical_not", "equal", "min", "max"):
            exprs.append(call(name, *[cast(ACC, DType.BOOL)] * n))
    total = ACC
    for e in exprs:
        total = call("add", total, cast(e, F32))
    program = program_of((2, 16, 3, 2), "", make=lambda b: Epilogue(total))
    (op,) = program.ops
    spec = epilogue.describe(op, program, epilogue.frame_of(op, program), 1)
    ptx_text(kernel_of(spec.params, 1), ARCHS["sm_61"], "k")
