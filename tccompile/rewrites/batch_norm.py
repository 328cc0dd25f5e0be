"""batch_norm(x) = (x - mean) / sqrt(var + eps) * gamma + beta = x * s + t

with s = gamma / sqrt(var + eps) and t = beta - mean * s, one number a channel (axis 1). After a convolution or a linear layer
both go on into its weights and bias (`scale_shift`).
"""

from __future__ import annotations

import numpy as np
import onnx_graphsurgeon as gs

from tccompile.rewrites.rule import Editor, Rewrite, calculate, constant, itself, rank, reshaped, rounded


def _check(edit: Editor, node: gs.Node) -> str | None:
    if node.attrs.get("training_mode", 0) or len(node.outputs) > 1:
        return "it is in training mode"
    if any(constant(t) is None for t in node.inputs[1:]):
        return "its parameters are not constant"
    return None


def _apply(edit: Editor, node: gs.Node) -> None:
    x, gamma, beta, mean, var = node.inputs
    y = node.outputs[0]
    eps = np.asarray(node.attrs.get("epsilon", 1e-5), np.float32)
    s = calculate("div", gamma, calculate("sqrt", calculate("add", var, eps)))
    t = calculate("sub", beta, calculate("mul", mean, s))
    shape = (-1,) + (1,) * (rank(x) - 2)
    scale = edit.named(rounded(reshaped(s, *shape), x.dtype), f"{gamma.name}/scale")
    shift = edit.named(rounded(reshaped(t, *shape), x.dtype), f"{beta.name}/shift")
    scaled = edit.add("Mul", (x, scale), node, x.shape)
    edit.add("Add", (scaled, shift), node, into=y)


REWRITES = (Rewrite("batch_norm(x) => x * s + t", ("BatchNormalization",), itself, _check, _apply),)
