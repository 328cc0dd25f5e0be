"""Reductions, softmax and normalization over axes. Sums are accumulated in float64."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from tccompile.ir.expr import Shape
from tccompile.ir.program import Norm, Reduce, Softmax
from tccompile.ir.reference.expressions import evaluate_expr

COMBINE = {"add": np.add, "mul": np.multiply, "min": np.minimum, "max": np.maximum}


def reduce(op: Reduce, values: Mapping[str, np.ndarray], shape: Shape) -> np.ndarray:
    """combine over `axes` of pre(x), with extent 1 left in them; in integers if pre(x) is an integer."""
    x = values[op.x]
    terms = np.broadcast_to(evaluate_expr(op.pre, (), {}, x.shape, x), x.shape)
    if terms.dtype.kind == "f" and op.combine in ("add", "mul"):
        return COMBINE[op.combine].reduce(terms, op.axes, np.float64, keepdims=True)
    if not all(x.shape[a] for a in op.axes) and op.combine in ("min", "max"):  # of nothing: the identity
        return np.full(shape, np.inf if op.combine == "min" else -np.inf)
    return COMBINE[op.combine].reduce(terms, op.axes, keepdims=True)


def softmax(op: Softmax, values: Mapping[str, np.ndarray], shape: Shape) -> np.ndarray:
    """exp(x) over its sum along `axis`, or the logarithm of that."""
    x = values[op.x].astype(np.float32, copy=False)
    if not x.size:
        return x
    with np.errstate(all="ignore"):
        shifted = x - x.max(op.axis, keepdims=True)
        e = np.exp(shifted)
        total = e.sum(op.axis, np.float64, keepdims=True)
        return shifted - np.log(total).astype(np.float32) if op.log else e * (1 / total).astype(np.float32)


def norm(op: Norm, values: Mapping[str, np.ndarray], shape: Shape) -> np.ndarray:
    """(x - mean) / sqrt(variance + eps), both over `axes`, and over the channels of each group; or with 0 for the mean."""
    x, axes = values[op.x].astype(np.float32, copy=False), op.axes
    if op.groups:
        x = x.reshape(x.shape[0], op.groups, -1, *x.shape[2:])
        axes = (2, *(a + (a > 1) for a in axes))
    if not x.size:
        return x.reshape(shape)
    with np.errstate(all="ignore"):
        centred = x - x.mean(axes, np.float64, keepdims=True).astype(np.float32) if op.centred else x
        variance = np.square(centred).mean(axes, np.float64, keepdims=True)
        return (centred * (1 / np.sqrt(variance + op.eps)).astype(np.float32)).reshape(shape)
