"""gemm(a, b, c; alpha, beta, trans_a) = gemm(a', alpha * b, beta * c), where what changes is constant

so that alpha and beta are 1 and a constant a is not transposed. A Gemm with neither bias nor constants stays as it is.
"""

from __future__ import annotations

import numpy as np
import onnx_graphsurgeon as gs

from tccompile.load.constants import derived
from tccompile.rewrites.rule import Editor, Rewrite, calculate, constant, finite, operand, rounded


def _match(node: gs.Node) -> gs.Node | None:
    alpha, beta = node.attrs.get("alpha", 1.0), node.attrs.get("beta", 1.0)
    transposed = node.attrs.get("transA", 0) and constant(node.inputs[0]) is not None
    unused = beta != 1 and operand(node, 2) is None
    scaled = alpha != 1 and constant(node.inputs[1]) is not None
    shifted = beta != 1 and constant(operand(node, 2)) is not None
    return node if transposed or unused or scaled or shifted else None


def _check(edit: Editor, node: gs.Node) -> str | None:
    changed = [rounded(_times(t, node.attrs.get(k, 1.0)), t.dtype) for k, t in _constants(node)]
    return None if finite(*changed) else "the scaled constants leave the range of their type"


def _constants(node: gs.Node) -> list[tuple[str, gs.Constant]]:
    pairs = (("alpha", node.inputs[1]), ("beta", operand(node, 2)))
    return [(k, t) for k, t in pairs if isinstance(t, gs.Constant)]


def _times(t: gs.Constant, factor: float):
    return calculate("mul", t, np.asarray(factor, np.float32))


def _apply(edit: Editor, node: gs.Node) -> None:
    for k, t in _constants(node):
        factor = node.attrs.pop(k, 1.0)
        if factor != 1:
            node.inputs[1 if k == "alpha" else 2] = edit.named(rounded(_times(t, factor), t.dtype), f"{t.name}/scaled")
    if operand(node, 2) is None:
        node.attrs.pop("beta", None)
    a = node.inputs[0]
    if node.attrs.get("transA", 0) and isinstance(a, gs.Constant):
        node.inputs[0] = edit.named(derived("", "transpose", a, axes=(1, 0)), f"{a.name}/transposed")
        del node.attrs["transA"]


REWRITES = (Rewrite("alpha * a @ b + beta * c => a @ (alpha * b) + (beta * c)", ("Gemm",), _match, _check, _apply),)
