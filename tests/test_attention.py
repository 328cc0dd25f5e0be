"""Blocks of attention networks as exporters write them, on the CPU engine: right, and attention is one step."""

from __future__ import annotations

import numpy as np
import pytest

from tccompile.arch import ARCHS
from tccompile.ir.ops import Attention
from tccompile.schedule.choose import candidates
from tests.rewrites.common import Net
from tests.test_exporters import agrees, ops

f, i = np.float32, np.array
LOWEST = np.finfo(f).min


def heads(net: Net, x: str, rows: int, count: int, size: int, *perm: int, bias: bool = True) -> str:
    """A projection of x (B, rows, width), taken apart into heads."""
    width = 64
    y = net("MatMul", x, net.normal(width, count * size, scale=width**-0.5))
    y = net("Add", net.normal(count * size), y) if bias else y
    return net("Transpose", net("Reshape", y, i([0, rows, count, size])), perm=perm or (0, 2, 1, 3))


def together(net: Net, y: str, rows: int, width: int) -> str:
    """The heads side by side, and a projection of them."""
    y = net("Reshape", net("Transpose", y, perm=[0, 2, 1, 3]), i([0, rows, width]))
    return net("MatMul", y, net.normal(width, 64, scale=width**-0.5))


def rms_norm(net: Net, x: str) -> str:
    root = net("Sqrt", net("Add", net("ReduceMean", net("Pow", x, f(2)), i([-1])), f(1e-6)))
    return net("Mul", net.normal(64), net("Mul", x, net("Reciprocal", root)))


def test_decoder_with_rotary_positions_and_grouped_heads():
    n, count, groups, size = 24, 4, 2, 16
    net = Net(x=(2, n, 64))
    x = net("Tanh", "x")
    angles = np.arange(n)[:, None] * 100.0 ** (-np.arange(0, size, 2) / size)
    cos, sin = (fn(np.concatenate([angles, angles], -1)[None, None]).astype(f) for fn in (np.cos, np.sin))

    def rotary(t: str) -> str:
        first, second = net("Slice", t, i([0]), i([8]), i([3])), net("Slice", t, i([8]), i([2**62]), i([3]))
        return net("Add", net("Mul", t, cos), net("Mul", net("Concat", net("Neg", second), first, axis=-1), sin))

    def repeated(t: str) -> str:
        wide = net("Expand", net("Unsqueeze", t, i([2])), i([2, groups, count // groups, n, size]))
        return net("Reshape", wide, i([2, count, n, size]))

    h = rms_norm(net, x)
    q, k = rotary(heads(net, h, n, count, size, bias=False)), rotary(heads(net, h, n, groups, size, bias=False))
    v = heads(net, h, n, groups, size, bias=False)
    scores = net("Mul", net("MatMul", q, net("Transpose", repeated(k), perm=[0, 1, 3, 2])), f(size**-0.5))
    scores = net("Add", scores, np.where(np.tri(n, dtype=bool), 0, LOWEST).astype(f)[None, None])
    x = net("Add", x, together(net, net("MatMul", net("Softmax", scores, axis=-1), repeated(v)), n, 64))
    h = rms_norm(net, x)
    gate, up = (net("MatMul", h, net.normal(64, 128, scale=0.125)) for _ in range(2))
    gated = net("Mul", net("Mul", gate, net("Sigmoid", gate)), up)
    x = net("Add", x, net("MatMul", gated, net.normal(128, 64, scale=0.1)))
    program = agrees(net.out(rms_norm(net, x)).model())
    (op,) = (op for op in program.ops if isinstance(op, Attention))
    assert op.causal == 0 and program.tensors[op.k].shape[1] == groups
    assert ops(program) == {"Pointwise": 3, "Norm": 3, "Gemm": 7, "Attention": 1}  # two of the first are rotary


def test_encoder_with_a_mask_of_tokens():
    n = 20
    net = Net(opset=11, x=(2, n, 64), mask=(2, n))
    x = net("Tanh", "x")
    hidden = net("Unsqueeze", net("Unsqueeze", net("Clip", net("Ceil", "mask"), f(0), f(1)), axes=[1]), axes=[2])
    hidden = net("Mul", net("Sub", f(1), hidden), f(-10000))
    q, k, v = heads(net, x, n, 4, 16), heads(net, x, n, 4, 16, 0, 2, 3, 1), heads(net, x, n, 4, 16)
    scores = net("Add", net("Div", net("MatMul", q, k), f(4)), hidden)
    y = together(net, net("MatMul", net("Softmax", scores, axis=3), v), n, 64)
    program = agrees(net.out(net("Add", x, y)).model())
    (op,) = (op for op in program.ops if isinstance(op, Attention))
    assert op.mask is not None and program.tensors[op.mask].shape == (2, 1, 1, n) and op.scale == pytest.approx(0.25)
    assert ops(program)["Gemm"] == 2  # q, k and v are one


def test_decoder_that_chooses_scores():
    n = 20
    net = Net(opset=13, x=(1, n, 64))
    qkv = net("Add", net("MatMul", net("Tanh", "x"), net.normal(64, 192, scale=0.125)), net.normal(192))
    parts = net("Split", qkv, i([64, 64, 64]), outputs=3, axis=2)
    q, k, v = (
        net("Transpose", net("Reshape", t, i([1, n, 4, 16])), perm=p)
        for t, p in zip(parts, ((0, 2, 1, 3), (0, 2, 3, 1), (0, 2, 1, 3)), strict=True)
    )
    scores = net("Where", np.tri(n, dtype=bool)[None, None], net("Div", net("MatMul", q, k), f(4)), f(LOWEST))
    y = together(net, net("MatMul", net("Softmax", scores, axis=-1), v), n, 64)
    program = agrees(net.out(y).model())
    assert ops(program) == {"Pointwise": 1, "Gemm": 2, "Attention": 1}
    (op,) = (op for op in program.ops if isinstance(op, Attention))
    assert op.causal == 0 and program.tensors[op.q].storage == program.tensors[op.v].storage


def test_sequence_first_with_products_of_three_axes():
    n, b, count, size = 20, 3, 4, 16
    net = Net(opset=17, x=(n, b, 64))
    x = net("Tanh", "x")

    def apart(*perm: int) -> str:
        y = net("Add", net("MatMul", x, net.normal(64, 64, scale=0.125)), net.normal(64))
        return net("Transpose", net("Reshape", y, i([n, b * count, size])), perm=perm)

    scores = net("MatMul", net("Mul", apart(1, 0, 2), f(0.25)), apart(1, 2, 0))
    y = net("MatMul", net("Softmax", scores, axis=-1), apart(1, 0, 2))
    y = net("Reshape", net("Transpose", y, perm=[1, 0, 2]), i([n * b, 64]))
    y = net("Gemm", y, net.normal(64, 64, scale=0.125), net.normal(64), transB=1)
    program = agrees(net.out(net("Reshape", y, i([n, b, 64]))).model())
    assert ops(program) == {"Pointwise": 2, "Gemm": 4, "Attention": 1}  # in and out


def test_shifted_windows():
    windows, n, count = 4, 9, 4
    net = Net(opset=17, x=(2 * windows, n, 64))
    x = net("Tanh", "x")
    q, k, v = (heads(net, x, n, count, 16) for _ in range(3))
    scores = net("MatMul", net("Mul", q, f(0.25)), net("Transpose", k, perm=[0, 1, 3, 2]))
    scores = net("Add", scores, net.normal(1, count, n, n))
    hidden = np.where(net.rng.random((windows, 1, n, n)) < 0.3, -100, 0).astype(f)
    scores = net("Add", net("Reshape", scores, i([2, windows, count, n, n])), hidden[None])
    weights = net("Softmax", net("Reshape", scores, i([-1, count, n, n])), axis=-1)
    program = agrees(net.out(together(net, net("MatMul", weights, v), n, 64)).model())
    assert ops(program) == {"Pointwise": 1, "Gemm": 2, "Attention": 1}


def test_pixels_attend_to_a_text():
    net = Net(opset=18, x=(1, 64, 6, 5), text=(1, 11, 64))
    image = net("Conv", "x", net.normal(64, 64, 1, 1, scale=0.125), net.normal(64))
    sequence = net("Transpose", net("Reshape", image, i([1, 64, 30])), perm=[0, 2, 1])
    q = heads(net, sequence, 30, 2, 40, bias=False)
    k, v = (heads(net, "text", 11, 2, 40, bias=False) for _ in range(2))
    scores = net("Mul", net("MatMul", q, net("Transpose", k, perm=[0, 1, 3, 2])), f(40**-0.5))
    y = together(net, net("MatMul", net("Softmax", scores, axis=-1), v), 30, 80)
    y = net("Reshape", net("Transpose", net("Add", sequence, y), perm=[0, 2, 1]), i([1, 64, 6, 5]))
    program = agrees(net.out(net("Relu", y)).model())
    assert ops(program)["Attention"] == 1 and ops(program)["Gemm"] == 3  # k and v are one


def test_operands_that_lie_across_are_copied_for_tensor_cores():
    n, count, size = 24, 4, 16
    net = Net(x=(2, n, 64))
    x = net("Tanh", "x")
    q, k, v = (heads(net, x, n, count, size, 0, 2, 3, 1) for _ in range(3))  # attention between channels
    scores = net("Mul", net("MatMul", q, net("Transpose", k, perm=[0, 1, 3, 2])), f(0.2))
    y = net("MatMul", net("Softmax", scores, axis=-1), v)
    y = net("Reshape", net("Transpose", y, perm=[0, 3, 1, 2]), i([2, n, 64]))
    program = agrees(net.out(net("MatMul", y, net.normal(64, 64, scale=0.125))).model())
    (op,) = (op for op in program.ops if isinstance(op, Attention))
    (kernel, *_) = candidates(op, program, ARCHS["sm_80"])
    assert kernel.kernel.name == "attention_mma"


def expanded(net: Net, seen: str, n: int) -> str:
    """A mask as exporters of text encoders write it: expanded to all rows, then 1 - x, then the lowest number where that is 1."""
    rest = net("Sub", f(1), net("Expand", net("Cast", seen, to=1), i([2, 1, n, n])))
    return net("Where", net("Cast", rest, to=9), LOWEST, rest)


MASKS = {
    "added": (lambda net, seen, s, n: net("Add", s, expanded(net, seen, n)), (2, 1, 1, 24)),
    "chosen by": (lambda net, seen, s, n: net("Where", net("Expand", seen, i([2, 4, n, n])), s, f(-np.inf)), (2, 1, 1, 24)),
    "and causal": (
        lambda net, seen, s, n: net("Where", net("And", seen, np.tri(n, dtype=bool)[None, None]), s, LOWEST),
        (2, 1, 24, 24),
    ),
}


@pytest.mark.parametrize("case", MASKS)
def test_masks_that_are_the_same_for_all_rows_or_heads_are_computed_once(case):
    mask, shape = MASKS[case]
    n, net = 24, Net(x=(2, 24, 64), m=(2, 24))
    x = net("Tanh", "x")
    q, k, v = (heads(net, x, n, 4, 16) for _ in range(3))
    scores = net("Mul", net("MatMul", q, net("Transpose", k, perm=[0, 1, 3, 2])), f(0.25))
    seen = net("Greater", net("Reshape", "m", i([2, 1, 1, n])), f(0))
    weights = net("Softmax", mask(net, seen, scores, n), axis=-1)
    program = agrees(net.out(together(net, net("MatMul", weights, v), n, 64)).model())
    (op,) = (op for op in program.ops if isinstance(op, Attention))
    assert program.tensors[op.mask].shape == shape
