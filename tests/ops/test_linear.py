"""Matrix products against ONNX Runtime."""

from __future__ import annotations

import numpy as np
import pytest

from tccompile.ir.ops import Gemm, Pointwise
from tests.ops.common import Net, agrees


@pytest.mark.parametrize("constant", [True, False])
@pytest.mark.parametrize("trans_a", [0, 1])
@pytest.mark.parametrize("trans_b", [0, 1])
@pytest.mark.parametrize("c", [None, (1,), (7,), (5, 1), (5, 7), (1, 7)])
def test_gemm(constant: bool, trans_a: int, trans_b: int, c: tuple[int, ...] | None) -> None:
    a, w = (3, 5) if trans_a else (5, 3), (7, 3) if trans_b else (3, 7)
    net = Net(x=a) if constant else Net(x=a, w=w)
    args = [net.normal(*w) if constant else "w", *([net.normal(*c)] if c else [])]
    agrees(net.out(net("Gemm", "x", *args, transA=trans_a, transB=trans_b, alpha=0.5, beta=-1.5)))


SHAPES = (
    ((5, 3), (3, 7)),
    ((2, 5, 3), (3, 7)),
    ((2, 4, 5, 3), (2, 4, 3, 7)),
    ((2, 1, 5, 3), (4, 3, 7)),
    ((5, 3), (2, 3, 7)),
    ((5, 3), (1, 1, 3, 7)),
    ((3,), (3, 7)),
    ((5, 3), (3,)),
    ((3,), (3,)),
    ((2, 5, 3), (3,)),
    ((3,), (2, 3, 7)),
)


@pytest.mark.parametrize("constant", ["", "left", "right"])
@pytest.mark.parametrize(("a", "b"), SHAPES)
def test_matmul(a: tuple[int, ...], b: tuple[int, ...], constant: str) -> None:
    shapes = {n: s for n, s in (("x", a), ("y", b)) if n != {"left": "x", "right": "y"}.get(constant)}
    net = Net(**shapes)
    left = net.normal(*a) if constant == "left" else "x"
    right = net.normal(*b) if constant == "right" else "y"
    agrees(net.out(net("MatMul", left, right)))


def test_constant_weights_are_laid_out_when_compiling() -> None:
    net = Net(x=(4, 10))
    program = agrees(net.out(net("MatMul", net("Relu", "x"), net.normal(10, 6))))
    (gemm,) = (op for op in program.ops if isinstance(op, Gemm))
    weights = program.tensors[gemm.b]
    assert (weights.shape, weights.padded, weights.inner) == ((6, 10), (6, 16), 1)
    assert gemm.b in program.constants
    assert sum(isinstance(op, Pointwise) for op in program.ops) == 2  # the relu and the copy to the output


def test_half_precision_model_computes_in_float32() -> None:
    net = Net(dtype=np.float16, x=(4, 10))
    agrees(net.out(net("MatMul", "x", net.normal(10, 6))), tolerance=2e-3)


@pytest.mark.parametrize("shape", [(1, 1), (4, 2, 2), (2, 3, 3, 3)])
def test_determinant(shape: tuple[int, ...]) -> None:
    net = Net(x=shape)
    agrees(net.out(net("Det", "x")))
