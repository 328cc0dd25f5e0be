"""Normalizations that exporters take apart, put together again as the standard operators.

With d = x - mean(x) over some axes, and n(x) = d / sqrt(mean(d * d) + eps):

    n(x) * s + b over the last axes             = layer_norm(x, s, b)
    n(x) * s + b over the spatial axes          = instance_norm(x, s, b)            s and b one number a channel
    n(x) * s + b over the channels              = layer_norm(x', s, b)'             ' moves the channels last, and back
    x / sqrt(mean(x * x) + eps) * s             = rms_norm(x, s)                    over the last axes
    reshape(instance_norm(reshape(x))) * s + b  = group_norm(x, s, b)               in the middle x is (N, groups, …);
                                                                                    reshaped, where it ends in other extents

s and b are constants; without them they are 1 and 0. Beside having fewer steps, the whole is computed in float32, where
squares of small numbers do not vanish and those of large ones do not overflow.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import onnx_graphsurgeon as gs

from tccompile.load.constants import Weight, literal
from tccompile.rewrites.rule import (
    Editor,
    Rewrite,
    constant,
    ints,
    is_float,
    name_of,
    operand,
    past_casts,
    producer,
    rank,
    reshaped,
    rounded,
    scalar,
    shape_constant,
)  # fmt: skip


@dataclass
class Normalized:
    """y = n(x) over `axes`, which `node` computes last."""

    node: gs.Node
    x: gs.Tensor
    axes: tuple[int, ...]
    eps: float


def _mean(tensor: gs.Tensor) -> tuple[gs.Tensor, tuple[int, ...]] | None:
    """x and the axes, if the tensor is the mean of x over constant axes, which it keeps with extent 1."""
    node = producer(past_casts(tensor), "ReduceMean")
    if node is None or not node.attrs.get("keepdims", 1):
        return None
    given = operand(node, 1)
    axes = tuple(range(rank(tensor))) if given is None else ints(given)
    return None if not axes else (past_casts(node.inputs[0]), tuple(sorted(a % rank(tensor) for a in axes)))


def _deviation(tensor: gs.Tensor) -> tuple[gs.Tensor, tuple[int, ...]] | None:
    """x and the axes, if the tensor is x - mean(x)."""
    node = producer(past_casts(tensor), "Sub")
    mean = _mean(node.inputs[1]) if node else None
    return mean if node and mean and mean[0] is past_casts(node.inputs[0]) else None


def _square(tensor: gs.Tensor) -> gs.Tensor | None:
    """x, if the tensor is x * x."""
    node = producer(past_casts(tensor), "Mul", "Pow")
    if node is None:
        return None
    same = node.inputs[1] is node.inputs[0] if node.op == "Mul" else scalar(node.inputs[1]) == 2
    return node.inputs[0] if same else None


def _deviation_root(tensor: gs.Tensor) -> tuple[tuple[gs.Tensor, tuple[int, ...]], float] | None:
    """(x, axes) and eps, if the tensor is sqrt(mean((x - mean(x))²) + eps)."""
    root = producer(past_casts(tensor), "Sqrt")
    add = producer(past_casts(root.inputs[0]), "Add") if root else None
    if add is None:
        return None
    for i in (0, 1):
        eps, variance = scalar(add.inputs[i]), _mean(add.inputs[1 - i])
        squared = _square(variance[0]) if variance else None
        x = _deviation(squared) if squared is not None else None
        if eps is not None and variance and x and x[1] == variance[1]:
            return x, eps
    return None


def _match(node: gs.Node) -> Normalized | None:
    """d / sqrt(…), or d * (1 / sqrt(…))"""
    if not is_float(node.outputs[0]):
        return None
    pairs = [(0, 1)] if node.op == "Div" else [(0, 1), (1, 0)]
    for i, j in pairs:
        x, divisor = _deviation(node.inputs[i]), node.inputs[j]
        if node.op == "Mul":
            inverse = producer(divisor, "Reciprocal", "Div")
            divisor = inverse.inputs[-1] if inverse and (inverse.op == "Reciprocal" or scalar(inverse.inputs[0]) == 1) else None
        root = _deviation_root(divisor) if x and divisor is not None else None
        if x and root and root[0][0] is x[0] and root[0][1] == x[1]:
            return Normalized(node, x[0], x[1], root[1])
    return None


def _form(m: Normalized) -> tuple[str, tuple[int, ...]] | None:
    """The operator to use, and the axes that its scale and bias are along."""
    axes, r = m.axes, rank(m.x)
    spatial = r > 2 and axes == tuple(range(2, r))
    last = axes == tuple(range(r - len(axes), r))
    if spatial and (not last or r > 3 or _parameter(m.node.outputs[0], "Mul", (1,)) is not None):
        return "InstanceNormalization", (1,)
    if last:
        return "LayerNormalization", axes
    return ("Transposed", (1,)) if axes == (1,) and r > 2 else None


def _result(edit: Editor, m: Normalized) -> gs.Tensor | None:
    """n(x) in x's type: the node's own result, or what a cast makes of it."""
    y = m.node.outputs[0]
    if y.dtype != m.x.dtype and edit.only_use(y) and y.outputs[0].op == "Cast":
        y = y.outputs[0].outputs[0]
    return y if y.dtype == m.x.dtype else None


def _check(edit: Editor, m: Normalized) -> str | None:
    if _result(edit, m) is None:
        return "its result has another type than its input"
    return "its axes are those of no standard normalization" if _form(m) is None else None


def _parameter(y: gs.Tensor, op: str, axes: tuple[int, ...]) -> tuple[gs.Node, Weight] | None:
    """The only reader of y, if it is this operator with a constant that has these axes alone."""
    reader = y.outputs[0] if len(y.outputs) == 1 else None
    if reader is None or reader.op != op or reader.domain not in (None, "", "ai.onnx"):
        return None
    c = constant(next((t for t in reader.inputs if t is not y), None))
    if c is None or list(reader.outputs[0].shape) != list(y.shape):
        return None
    full = (1,) * (rank(y) - rank(c)) + tuple(c.shape)
    whole = all(n == (y.shape[a] if a in axes else 1) for a, n in enumerate(full))
    return (reader, c) if whole else None


def _affine(edit: Editor, y: gs.Tensor, axes: tuple[int, ...]) -> tuple[gs.Tensor, Weight | None, Weight | None]:
    """y * s + b where that is what becomes of y: the result, s and b."""
    parameters: list[Weight | None] = []
    for op in ("Mul", "Add"):
        found = _parameter(y, op, axes) if edit.only_use(y) else None
        parameters.append(found[1] if found else None)
        y = found[0].outputs[0] if found else y
    return y, parameters[0], parameters[1]


def _vector(edit: Editor, w: Weight | None, n: int, like: gs.Node, default: float) -> Weight:
    """A parameter as a vector of n, or n times the default."""
    dtype = like.outputs[0].dtype
    if w is None:
        return literal(edit.name(f"{name_of(like)}/{default:g}"), np.full(n, default), dtype)
    return edit.named(rounded(reshaped(w, n), dtype), f"{w.name}/vector")


def _apply(edit: Editor, m: Normalized) -> None:
    op, axes = _form(m)  # type: ignore[misc]
    shape = list(m.x.shape)
    y, s, b = _affine(edit, _result(edit, m), axes)  # type: ignore[arg-type]
    last = y.inputs[0]
    n = math.prod(shape[a] for a in axes)
    scale, bias = _vector(edit, s, n, last, 1), _vector(edit, b, n, last, 0)
    if op == "InstanceNormalization":
        edit.add(op, [m.x, scale, bias], last, into=y, epsilon=m.eps)
        return
    parameters = [scale] if b is None else [scale, bias]
    if op == "LayerNormalization":
        parameters = [edit.named(reshaped(p, *(shape[a] for a in axes)), f"{p.name}/shaped") for p in parameters]
        edit.add(op, [m.x, *parameters], last, into=y, axis=axes[0] - rank(m.x), epsilon=m.eps)
        return
    to = [0, *range(2, rank(m.x)), 1]
    moved = [shape[a] for a in to]
    x = edit.add("Transpose", [m.x], last, moved, perm=to)
    inner = edit.add("LayerNormalization", [x, *parameters], last, moved, axis=-1, epsilon=m.eps)
    edit.add("Transpose", [inner], last, into=y, perm=[0, rank(m.x) - 1, *range(1, rank(m.x) - 1)])


# --- without the mean ---


def _root(tensor: gs.Tensor) -> tuple[gs.Tensor, tuple[int, ...], float] | None:
    """x, axes and eps, if the tensor is sqrt(mean(x²) + eps)."""
    root = producer(past_casts(tensor), "Sqrt", "Pow")
    if root is None or (root.op == "Pow" and scalar(root.inputs[1]) != 0.5):
        return None
    return _mean_of_squares(root.inputs[0])


def _inverse_root(tensor: gs.Tensor) -> tuple[gs.Tensor, tuple[int, ...], float] | None:
    """The same of 1 / sqrt(mean(x²) + eps)."""
    node = producer(past_casts(tensor), "Reciprocal", "Div", "Pow")
    if node is None or (node.op == "Div" and scalar(node.inputs[0]) != 1):
        return None
    if node.op == "Pow":
        return _mean_of_squares(node.inputs[0]) if scalar(node.inputs[1]) == -0.5 else None
    return _root(node.inputs[-1])


def _mean_of_squares(tensor: gs.Tensor) -> tuple[gs.Tensor, tuple[int, ...], float] | None:
    """x, axes and eps, if the tensor is mean(x²) + eps."""
    add = producer(past_casts(tensor), "Add")
    if add is None:
        return None
    for i in (0, 1):
        eps, mean = scalar(add.inputs[i]), _mean(add.inputs[1 - i])
        x = _square(mean[0]) if mean else None
        if eps is not None and mean and x is not None:
            return past_casts(x), mean[1], eps
    return None


def _match_rms(node: gs.Node) -> Normalized | None:
    """x / sqrt(…), or x * (1 / sqrt(…))"""
    if not is_float(node.outputs[0]):
        return None
    for i, j in [(0, 1)] if node.op == "Div" else [(0, 1), (1, 0)]:
        root = _root(node.inputs[j]) if node.op == "Div" else _inverse_root(node.inputs[j])
        if root and root[0] is past_casts(node.inputs[i]):
            return Normalized(node, *root)
    return None


def _check_rms(edit: Editor, m: Normalized) -> str | None:
    if _result(edit, m) is None:
        return "its result has another type than its input"
    return None if m.axes == tuple(range(rank(m.x) - len(m.axes), rank(m.x))) else "its axes are not the last ones"


def _apply_rms(edit: Editor, m: Normalized) -> None:
    y = _result(edit, m)
    assert y is not None
    found = _parameter(y, "Mul", m.axes) if edit.only_use(y) else None
    y, s = (found[0].outputs[0], found[1]) if found else (y, None)
    last, shape = y.inputs[0], [m.x.shape[a] for a in m.axes]
    scale = _vector(edit, s, math.prod(shape), last, 1)
    if len(shape) > 1:
        scale = edit.named(reshaped(scale, *shape), f"{scale.name}/shaped")
    edit.add("RMSNormalization", [m.x, scale], last, into=y, axis=m.axes[0] - rank(m.x), epsilon=m.eps)


# --- groups ---


@dataclass
class Grouped:
    before: gs.Node
    norm: gs.Node
    after: gs.Node


def _match_groups(node: gs.Node) -> Grouped | None:
    norm = producer(node.inputs[0], "InstanceNormalization")
    before = producer(norm.inputs[0], "Reshape") if norm else None
    return Grouped(before, norm, node) if before and norm else None


def _check_groups(edit: Editor, m: Grouped) -> str | None:
    x, middle = list(m.before.inputs[0].shape), list(m.norm.inputs[0].shape)
    if x[:2] != list(m.after.outputs[0].shape)[:2]:
        return "images and channels do not come back"
    if len(x) < 3 or middle[0] != x[0] or not middle[1] or x[1] % middle[1]:
        return "its instances are not groups of channels"
    if not edit.only_use(m.norm.outputs[0]):
        return "the grouped result is used elsewhere as well"
    for t, value in zip(m.norm.inputs[1:], (1, 0), strict=True):
        if constant(t) is None or (np.asarray(t.values) != value).any():
            return "groups have scales or biases of their own"
    return None


def _apply_groups(edit: Editor, m: Grouped) -> None:
    x = m.before.inputs[0]
    y, s, b = _affine(edit, m.after.outputs[0], (1,))
    last = y.inputs[0]
    parameters = [_vector(edit, s, x.shape[1], last, 1), _vector(edit, b, x.shape[1], last, 0)]
    eps = m.norm.attrs.get("epsilon", 1e-5)
    whole = {"num_groups": m.norm.inputs[0].shape[1], "epsilon": eps}
    if list(x.shape) == list(y.shape):
        edit.add("GroupNormalization", [x, *parameters], last, into=y, **whole)
        return
    normal = edit.add("GroupNormalization", [x, *parameters], last, x.shape, **whole)
    edit.add("Reshape", [normal, shape_constant(edit, y.shape, last)], last, into=y)


REWRITES = (
    Rewrite("(x - mean) / sqrt(var + eps) * s + b => norm(x, s, b)", ("Div", "Mul"), _match, _check, _apply),
    Rewrite("x / sqrt(mean(x²) + eps) * s => rms_norm(x, s)", ("Div", "Mul"), _match_rms, _check_rms, _apply_rms),
    Rewrite("reshape(instance_norm(reshape(x))) * s + b => group_norm(x, s, b)", ("Reshape",), _match_groups, _check_groups,
            _apply_groups),
)  # fmt: skip
