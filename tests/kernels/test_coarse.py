"""Functions that are as exact as 8 bits need, where kernels store so many."""

from __future__ import annotations

import numpy as np
import pytest

from tccompile.ir.evaluate import evaluate_expr
from tccompile.ir.expr import Expr, View, call, coord, load
from tccompile.ir.types import DType
from tccompile.kernels.codegen import COARSE, coarse

LARGE = np.array([-1e30, -200, 200, 1e30, np.inf, np.nan])


def evaluated(expr: Expr, x: np.ndarray) -> np.ndarray:
    return evaluate_expr(expr, (View("x", (coord(0),)),), {"x": x}, x.shape)


@pytest.mark.parametrize("name", [*COARSE])
def test_they_are_far_closer_than_a_step(name: str) -> None:
    x = np.concatenate([np.linspace(-40, 40, 80_001), LARGE]).astype(np.float32)
    exact, found = (evaluated(call(fn, load(0)), x) for fn in (name, COARSE[name]))
    finite = np.isfinite(exact)
    assert np.abs(exact[finite] - found[finite]).max() < 3e-5
    assert found[-2] == np.inf and np.isnan(found[-1])


@pytest.mark.parametrize("name", [*COARSE])
def test_they_are_for_8_bits_alone(name: str) -> None:
    expr = call("mul", call(name, load(0)), 3.0)
    for dtype in (DType.I8, DType.U8, DType.E4M3, DType.E5M2):
        assert coarse(expr, dtype) == call("mul", call(COARSE[name], load(0)), 3.0)
    for dtype in (DType.F16, DType.F32, DType.BOOL):
        assert coarse(expr, dtype) is expr
