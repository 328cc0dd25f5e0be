"""Functions that are as exact as 8 bits need, where kernels store so many."""

from __future__ import annotations

import numpy as np
import pytest

from tccompile.arch import ARCHS, Arch
from tccompile.emit.ptx import ptx_text
from tccompile.ir.evaluate import evaluate_expr
from tccompile.ir.expr import Expr, View, call, cast, const, coord, identity_view, load
from tccompile.ir.types import DType
from tccompile.kernels.codegen import COARSE, RECIPROCAL, coarse
from tccompile.kernels.pointwise import PointwiseKernel
from tests.gpu.cases import Builder, pointwise
from tests.kernels import machine
from tests.kernels.support import ARCH

KERNEL = PointwiseKernel()
LARGE = np.array([-1e30, -200, 200, 1e30, np.inf, np.nan])


def evaluated(expr: Expr, x: np.ndarray) -> np.ndarray:
    return evaluate_expr(expr, (View("x", (coord(0),)),), {"x": x}, x.shape)


@pytest.mark.parametrize("name", [*COARSE])
def test_they_are_far_closer_than_a_step(name: str) -> None:
    x = np.concatenate([np.linspace(-40, 40, 80_001), LARGE]).astype(np.float32)
    exact, found = evaluated(call(name, load(0)), x), evaluated(call(COARSE[name], load(0), 0.5), x)
    finite = np.isfinite(exact)
    assert np.abs(exact[finite] - found[finite]).max() < 3e-4
    assert found[-2] == exact[-2] and np.isnan(found[-1])


@pytest.mark.parametrize("name", [*COARSE])
def test_they_are_for_8_bits_alone(name: str) -> None:
    expr, quotient = call("mul", call(name, load(0)), 3.0), call("round", call("ratio", call(name, load(0)), 8.0))
    for dtype in (DType.I8, DType.U8, DType.E4M3, DType.E5M2):
        assert coarse(expr, dtype) == call("mul", call(COARSE[name], load(0), 0.5), 3.0)
        assert coarse(quotient, dtype) == call("round", call(COARSE[name], load(0), 0.0625))
    for dtype in (DType.F16, DType.F32, DType.BOOL):
        assert coarse(expr, dtype) is expr


@pytest.mark.parametrize("arch", [ARCHS["sm_70"], ARCH], ids=lambda arch: arch.name)
@pytest.mark.parametrize("name", [*COARSE])
def test_bytes_are_as_near_as_those_of_the_exact_function(name: str, arch: Arch) -> None:
    """A few are another step, as near as the one; of instructions for tanh that all generations have"""
    x, step = np.linspace(-6, 3.9, 2048, dtype=np.float32).reshape(-1, 8), 4 / 200
    zero = 60.0 if name == "tanh" else 20.0

    def stored(b: Builder) -> tuple[Expr, tuple[View, ...]]:
        b.values("x", x, DType.F32)
        b.result(x.shape, DType.U8)
        moved = call("add", call("round", call("ratio", call(name, load(0)), step)), zero)
        return cast(Expr("saturate", (moved, const(0.0), const(255.0))), DType.I64), (identity_view("x", 2),)

    program = pointwise("bytes", stored)
    (op,) = program.ops
    work = KERNEL.work(op, program, next(KERNEL.configs(op, program, arch)), arch)
    assert COARSE[name] in repr(work.launches[0].code)
    found = machine.run(work, program, {"x": x}, "y", arch).result()
    exact = evaluated(call(name, load(0)), x.reshape(-1)).reshape(x.shape) / np.float32(step) + zero
    nearest = np.rint(exact)
    assert np.abs(found - nearest).max() <= 1 and np.mean(found == nearest) > 0.97
    assert np.square(found - exact).mean() < 1.02 * np.square(nearest - exact).mean()


@pytest.mark.parametrize("name", RECIPROCAL)
def test_sigmoids_take_two_instructions_of_approximations(name: str) -> None:
    """As exact as float32 but for its last digits, at infinities too, without a division."""
    x = np.concatenate([np.linspace(-80, 80, 2034), [-np.inf, -200, -100, 100, 200, np.inf]]).astype(np.float32).reshape(-1, 8)
    more = (0.5,) if name == "swish" else ()

    def stored(b: Builder) -> tuple[Expr, tuple[View, ...]]:
        b.values("x", x, DType.F32)
        b.result(x.shape, DType.F32)
        return call(name, load(0), *more), (identity_view("x", 2),)

    program = pointwise("floats", stored)
    (op,) = program.ops
    work = KERNEL.work(op, program, next(KERNEL.configs(op, program, ARCH)), ARCH)
    with np.errstate(over="ignore", invalid="ignore"):
        found = machine.run(work, program, {"x": x}, op.y, ARCH).result()
        exact = evaluated(call(name, load(0), *more), x.reshape(-1).astype(np.float64)).reshape(x.shape)
    assert np.array_equal(np.isnan(found), np.isnan(exact))
    large, small = np.isfinite(exact) & (np.abs(exact) > 1e-30), np.abs(exact) <= 1e-30
    assert (np.abs(found[large] - exact[large]) <= 2e-5 * np.abs(exact[large])).all() and np.abs(found[small]).max() <= 1e-30
    (launch,) = work.launches
    text = ptx_text(KERNEL.build(ARCH, **dict(launch.code.params)), ARCH, "k")
    assert "rcp.approx" in text and "div." not in text
