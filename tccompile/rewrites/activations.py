"""Activations that exporters take apart, put together again as the standard operators.

    hard_swish(x) = x * clip(x + 3, 0, 6) / 6 = x * hard_sigmoid(x; 1/6, 1/2)
    hard_sigmoid(x; 1/6, 1/2) = clip(x + 3, 0, 6) / 6
    gelu(x) = x * (1 + erf(x / sqrt(2))) / 2
    gelu(x; tanh) = x * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 * x^3))) / 2
    mish(x) = x * tanh(softplus(x))
    softplus(x) = log(1 + exp(x))
    clip(relu(x), a, b) = clip(x, max(a, 0), b), and relu(clip(x, a, b)) = clip(x, max(a, 0), max(b, 0))

A product is taken apart into its factors and one number first, so that the order in which they are multiplied, and whether
by c or divided by 1 / c, does not matter. x * sigmoid(x) has no operator of its own in opset 23 and stays.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import onnx_graphsurgeon as gs

from tccompile.load.constants import literal
from tccompile.rewrites.rule import Editor, Rewrite, is_float, name_of, operand, producer, scalar

CLOSE = 2e-3  # relative, between a constant that may have been rounded to fp16 and what it stands for


def near(value: float | None, expected: float) -> bool:
    return value is not None and abs(value - expected) <= CLOSE * abs(expected)


@dataclass
class Product:
    """number * the product of `factors`; `inner` are results on the way that must not be used elsewhere."""

    number: float = 1.0
    factors: list[gs.Tensor] = field(default_factory=list)
    inner: list[gs.Tensor] = field(default_factory=list)


def product(tensor: gs.Tensor, depth: int = 4) -> Product:
    """The tensor as a product, taken apart at Mul, and Div by a number."""
    node = producer(tensor, "Mul", "Div")
    value = scalar(tensor)
    if value is not None:
        return Product(value)
    if node is None or depth == 0 or (node.op == "Div" and not scalar(node.inputs[1])):
        return Product(1.0, [tensor])
    a = product(node.inputs[0], depth - 1)
    b = product(node.inputs[1], depth - 1)
    if node.op == "Div":
        b = Product(1 / b.number)
    return Product(a.number * b.number, a.factors + b.factors, [*a.inner, *b.inner, tensor])


def _plus(tensor: gs.Tensor, number: float) -> gs.Tensor | None:
    """t, if the tensor is t + number."""
    node = producer(tensor, "Add")
    if node is None:
        return None
    return next((node.inputs[1 - i] for i in (0, 1) if near(scalar(node.inputs[i]), number)), None)


@dataclass
class Found:
    """y = op(x; attrs), in place of nodes whose results are `inner`."""

    node: gs.Node
    x: gs.Tensor
    op: str
    attrs: dict[str, Any]
    inner: list[gs.Tensor]


def _match_product(node: gs.Node) -> Found | None:
    y = node.outputs[0]
    if not is_float(y):
        return None
    p = product(y)
    inner = [t for t in p.inner if t is not y]
    if len(p.factors) == 1 and (x := _shifted_clip(p.factors[0])) is not None and near(p.number, 1 / 6):
        return Found(node, x, "HardSigmoid", {"alpha": 1 / 6, "beta": 0.5}, [*inner, p.factors[0]])
    if len(p.factors) != 2:
        return None
    for x, gate in (p.factors, p.factors[::-1]):
        how = _gated(x, gate, p.number)
        if how:
            return Found(node, x, how[0], how[1], [*inner, gate])
    return None


def _gated(x: gs.Tensor, gate: gs.Tensor, number: float) -> tuple[str, dict[str, Any]] | None:
    """The activation that number * x * gate is, where gate is a function of x."""
    if near(number, 1 / 6) and _shifted_clip(gate) is x:
        return "HardSwish", {}
    node = producer(gate, "HardSigmoid", "Tanh")
    if node and near(number, 1):
        if node.op == "HardSigmoid" and node.inputs[0] is x:
            exact = near(node.attrs.get("alpha", 0.2), 1 / 6) and near(node.attrs.get("beta", 0.5), 0.5)
            return ("HardSwish", {}) if exact else None
        soft = producer(node.inputs[0], "Softplus")
        return ("Mish", {}) if soft and soft.inputs[0] is x else None
    curve = _plus(gate, 1.0)
    node = producer(curve, "Erf", "Tanh") if curve is not None and near(number, 0.5) else None
    if node is None:
        return None
    inside = product(node.inputs[0])
    if node.op == "Erf":
        only = len(inside.factors) == 1 and inside.factors[0] is x
        return ("Gelu", {}) if only and near(inside.number, math.sqrt(0.5)) else None
    return ("Gelu", {"approximate": "tanh"}) if _is_cubic(x, inside) else None


def _shifted_clip(tensor: gs.Tensor) -> gs.Tensor | None:
    """x, if the tensor is clip(x + 3, 0, 6)."""
    clip = producer(tensor, "Clip")
    if clip is None or scalar(operand(clip, 1)) != 0 or scalar(operand(clip, 2)) != 6:
        return None
    return _plus(clip.inputs[0], 3.0)


def _is_cubic(x: gs.Tensor, p: Product) -> bool:
    """Whether p is sqrt(2 / pi) * (x + 0.044715 * x^3), or sqrt(2 / pi) * x * (1 + 0.044715 * x^2)."""
    if not near(p.number, math.sqrt(2 / math.pi)):
        return False
    if len(p.factors) == 1:
        add = producer(p.factors[0], "Add")
        return add is not None and any(add.inputs[i] is x and _is_power(add.inputs[1 - i], x, 3, 0.044715) for i in (0, 1))
    if len(p.factors) != 2 or not any(t is x for t in p.factors):
        return False
    other = p.factors[0] if p.factors[1] is x else p.factors[1]
    square = _plus(other, 1.0)
    return square is not None and _is_power(square, x, 2, 0.044715)


def _is_power(tensor: gs.Tensor, x: gs.Tensor, power: int, number: float) -> bool:
    """Whether the tensor is number * x^power."""
    p = product(tensor)
    total = 0
    for factor in p.factors:
        pow_ = producer(factor, "Pow")
        if factor is x:
            total += 1
        elif pow_ and pow_.inputs[0] is x and (exponent := scalar(pow_.inputs[1])) is not None and exponent == int(exponent):
            total += int(exponent)
        else:
            return False
    return total == power and near(p.number, number)


def _match_log(node: gs.Node) -> Found | None:
    exp_ = _plus(node.inputs[0], 1.0)
    exp_node = producer(exp_, "Exp") if exp_ is not None else None
    return Found(node, exp_node.inputs[0], "Softplus", {}, [node.inputs[0]]) if exp_node else None


def _check(edit: Editor, m: Found) -> str | None:
    if list(m.x.shape) != list(m.node.outputs[0].shape):
        return "a constant widens the value"
    if any(not edit.only_use(t) for t in m.inner):
        return "a result on the way is used elsewhere as well"
    return None


def _apply(edit: Editor, m: Found) -> None:
    edit.add(m.op, [m.x], m.node, into=m.node.outputs[0], **m.attrs)


# --- clip and relu ---


@dataclass
class Clipped:
    node: gs.Node
    x: gs.Tensor
    low: float
    high: float | None


def _match_clip(node: gs.Node) -> Clipped | None:
    inner = producer(node.inputs[0], "Relu" if node.op == "Clip" else "Clip")
    if inner is None or not is_float(node.outputs[0]):
        return None
    clip = node if node.op == "Clip" else inner
    bounds = []
    for t in (operand(clip, 1), operand(clip, 2)):
        if t is not None and scalar(t) is None:
            return None
        bounds.append(scalar(t))
    low, high = max(bounds[0] or 0.0, 0.0), bounds[1]
    return Clipped(node, inner.inputs[0], low, max(high, 0.0) if high is not None and node.op == "Relu" else high)


def _check_clip(edit: Editor, m: Clipped) -> str | None:
    if not edit.only_use(m.node.inputs[0]):
        return "the value between is used elsewhere as well"
    if m.high is not None and m.high < m.low:
        return "its bounds cross"
    return None


def _apply_clip(edit: Editor, m: Clipped) -> None:
    dtype, where = m.node.outputs[0].dtype, name_of(m.node)
    bounds = [literal(edit.name(f"{where}/low"), m.low, dtype)]
    if m.high is not None:
        bounds.append(literal(edit.name(f"{where}/high"), m.high, dtype))
    edit.add("Clip", [m.x, *bounds], m.node, into=m.node.outputs[0])


REWRITES = (
    Rewrite("x * gate(x) => hard_swish, gelu or mish of x", ("Mul", "Div"), _match_product, _check, _apply),
    Rewrite("log(1 + exp(x)) => softplus(x)", ("Log",), _match_log, _check, _apply),
    Rewrite("clip(relu(x)) => clip(x)", ("Clip", "Relu"), _match_clip, _check_clip, _apply_clip),
)
