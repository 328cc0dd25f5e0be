"""Results that are rounded to bytes, computed in steps: the same bytes by fewer operations."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tccompile.fuse.steps import in_steps
from tccompile.ir.expr import ACC, Epilogue, Expr, View, call, cast, const, coord, load, walk
from tccompile.ir.ops import Gemm, Pointwise
from tccompile.ir.program import Program
from tccompile.ir.reference import compute
from tccompile.ir.tensor import dense
from tccompile.ir.types import DType
from tccompile.ir.verify import verify
from tccompile.ir.weights import Literal
from tccompile.ir.weights import evaluate as value_of

I8, U8, F16, F32 = DType.I8, DType.U8, DType.F16, DType.F32
SUM = cast(Expr("acc", (), None, DType.I64), F32)
SCALED = call("add", call("mul", SUM, load(0)), load(1))
BYTES = call("mul", call("sub", cast(load(2, DType.I64), F32), 3.0), 0.586483)


def quantized(x: Expr, step: float, zero: float = 0.0, low: float = 0.0) -> Expr:
    """x in steps, as QuantizeLinear has it."""
    moved = call("add", call("round", call("ratio", x, step)), zero)
    return cast(Expr("saturate", (moved, const(low), const(low + 255))), DType.I64)


def program_of(expr: Expr, y: DType = U8) -> Program:
    """A product of bytes with this epilogue: loads are a scale and a constant for each channel, bytes, and halves."""
    rng, rows = np.random.default_rng(1), (40, 24)
    given = {
        "x": rng.integers(-128, 128, (40, 64)).astype(np.int8),
        "w": rng.integers(-128, 128, (24, 64)).astype(np.int8),
        "scale": rng.uniform(1e-4, 4e-4, 24).astype(np.float32),
        "bias": rng.normal(0, 20, 24).astype(np.float32),
        "r": rng.integers(0, 256, rows).astype(np.uint8),
        "h": rng.normal(0, 20, rows).astype(np.float16),
    }
    kinds = {"x": I8, "w": I8, "scale": F32, "bias": F32, "r": U8, "h": F16}
    tensors = {n: dense(n, v.shape, kinds[n], pad=1) for n, v in given.items()} | {"y": dense("y", rows, y, pad=1)}
    views = (View("scale", (coord(1),)), View("bias", (coord(1),)), *(View(n, (coord(0), coord(1))) for n in "rh"))
    used = sorted({e.value for e in walk(expr) if e.fn == "load"})  # type: ignore[type-var]
    assert used == list(range(len(used)))
    op = Gemm(nodes=("product",), a="x", b="w", y="y", epilogue=Epilogue(expr, views[: len(used)]))
    constants = {n: Literal(v) for n, v in given.items() if n in ("x", "w", *(v.tensor for v in views[: len(used)]))}
    made = Program((), ("y",), {n: tensors[n] for n in (*constants, "y")}, constants, (op,))
    verify(made)
    return made


def results(program: Program) -> np.ndarray:
    (op,) = program.ops
    return compute(op, program, {n: value_of(recipe, {}) for n, recipe in program.constants.items()})


def functions(program: Program) -> list[str]:
    return [e.fn for e in walk(program.ops[0].epilogue.expr)]


DIVIDED = {
    "a layer": quantized(SCALED, 0.37),
    "with relu": quantized(call("relu", SCALED), 0.37),
    "a sum of floats": quantized(call("relu", call("add", ACC, load(0))), 370.0),
    "relu, and a zero point": quantized(call("relu", SCALED), 0.37, 4.0),
    "a limit": quantized(call("min", call("relu", SCALED), 6.0), 0.037),
    "a limit that is the type's but for a float's last bits": quantized(call("min", call("relu", SCALED), 9.43499), 0.037),
    "limits beyond the type's": quantized(call("min", call("max", SCALED, 0.0), 100.0), 0.37),
    "a residual": quantized(call("relu", call("add", SCALED, BYTES)), 1.1108),
    "a residual in halves": quantized(call("add", call("add", SCALED, BYTES), load(3)), 0.37),
    "bytes, and bytes of these": quantized(call("relu", call("mul", cast(quantized(SCALED, 0.37, 128.0), F32), 0.37)), 0.21),
}


@pytest.mark.parametrize("case", DIVIDED)
def test_quotients_are_products_by_other_constants(case: str) -> None:
    before = program_of(DIVIDED[case])
    after = in_steps(before)
    verify(after)
    left = int(case == "bytes, and bytes of these")  # of what was rounded quotients stay exact: halves are no accident
    assert functions(before).count("ratio") == left + 1 and functions(after).count("ratio") == left
    assert len(functions(after)) < len(functions(before)) + ("in halves" in case)
    assert ("relu" in functions(after)) == (case == "relu, and a zero point")
    assert ("min" in functions(after)) == (case == "a limit") and "max" not in functions(after)
    wanted, found = results(before), results(after)
    assert len(np.unique(wanted)) > 20 and (found == wanted).mean() > 0.995 and abs(found - wanted).max() <= 1


def test_bounds_of_a_quotient_that_stays() -> None:
    before = program_of(quantized(call("relu", Expr("acc")), 900.0))
    after = in_steps(before)
    assert "ratio" in functions(after) and "relu" not in functions(after) and (results(before) == results(after)).all()
    closer = call("ratio", call("min", Expr("acc"), 900.0 * 254), 900.0)
    assert call("round", closer) in walk(in_steps(program_of(quantized(*closer.args[:1], 900.0))).ops[0].epilogue.expr)


STAYING = {
    "a function of another kind": quantized(call("sigmoid", SCALED), 0.004),
    "two sums multiplied": quantized(call("mul", SCALED, call("relu", SCALED)), 40.0),
}


@pytest.mark.parametrize("case", STAYING)
def test_what_no_constant_can_take_stays(case: str) -> None:
    """But for a zero point of 0, which is left out everywhere."""
    before = program_of(STAYING[case])
    after = in_steps(before)
    assert [f for f in functions(before) if f in ("ratio", "mul", "div")] == [
        f for f in functions(after) if f in ("ratio", "mul", "div")
    ]
    assert len(functions(after)) == len(functions(before)) - 2 and np.array_equal(results(before), results(after))


def test_a_scale_that_others_read_stays_for_them() -> None:
    program = program_of(DIVIDED["a layer"])
    op = program.ops[0]
    other = replace(op, y="z", epilogue=Epilogue(SCALED, op.epilogue.loads))
    program = replace(program, tensors={**program.tensors, "z": dense("z", (40, 24), F32, pad=1)}, ops=(op, other))
    made = in_steps(program)
    assert made.ops[1] == other and made.ops[0].epilogue.loads != op.epilogue.loads


def normed(*factors: Expr | float) -> Program:
    """Bytes by these factors, a constant added, ReLU, and bytes of that: what stands between two products
    where a norm comes first. Loads are the bytes, a scale and a constant for each channel."""
    rng, rows = np.random.default_rng(2), (40, 24)
    given = {
        "x": rng.integers(-128, 128, rows).astype(np.int8),
        "scale": rng.uniform(0.5, 1.5, 24).astype(np.float32),
        "bias": rng.normal(0, 1, 24).astype(np.float32),
    }
    kinds = {"x": I8, "scale": F32, "bias": F32}
    tensors = {n: dense(n, v.shape, kinds[n], pad=1) for n, v in given.items()} | {"y": dense("y", rows, U8, pad=1)}
    x = call("sub", cast(load(0, DType.I64), F32), 0.0)
    for factor in factors:
        x = call("mul", x, factor)
    views = (View("x", (coord(0), coord(1))), View("scale", (coord(1),)), View("bias", (coord(1),)))
    op = Pointwise(nodes=("norm",), y="y", epilogue=Epilogue(quantized(call("relu", call("add", x, load(2))), 0.02), views))
    made = Program((), ("y",), tensors, {n: Literal(v) for n, v in given.items()}, (op,))
    verify(made)
    return made


def test_a_norm_s_constants_take_the_step_and_the_bytes_scale() -> None:
    before = normed(0.03, load(1))
    after = in_steps(before)
    verify(after)
    wanted = ["load", "cast", "sub", "load", "mul", "load", "add", "round", "saturate", "cast"]
    assert [f for f in functions(after) if f != "const"] == wanted
    found, expected = results(after), results(before)
    assert len(np.unique(expected)) > 20 and (found == expected).mean() > 0.995 and abs(found - expected).max() <= 1


def test_a_quotient_of_what_no_channel_scales_stays() -> None:
    """Halves of a step are no accidents there: a byte's scale over another one is."""
    before = replace(normed(0.03, load(1)))
    op = before.ops[0]
    plain = call("mul", call("sub", cast(load(0, DType.I64), F32), 0.0), 0.03)
    same = replace(op, epilogue=Epilogue(quantized(plain, 0.02), op.epilogue.loads[:1]))
    assert "ratio" in functions(in_steps(replace(before, ops=(same,))))
