"""Between which numbers a tensor's elements lie: so an extent that is computed has a bound, if what it is computed of has one."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import onnx
import onnx.helper

from tccompile.load.constants import held
from tccompile.load.sizes import OWN, Sizes

Reach = tuple[float, float]
ANY: Reach = (-math.inf, math.inf)

DEEP = 200
"""Nodes that are looked through, one behind the other."""

SAME = (
    "Expand", "Flatten", "Gather", "GatherElements", "GatherND", "Identity", "ReduceMax", "ReduceMin", "Reshape", "Slice",
    "Split", "Squeeze", "Tile", "TopK", "Transpose", "Unsqueeze",
)  # fmt: skip
"""Operators whose results are elements of their first input."""

ROUNDED = {"Floor": math.floor, "Ceil": math.ceil, "Round": round}


def reach(s: Sizes, name: str, deep: int = 0) -> Reach:
    """The least and the greatest number that an element of the tensor can be, infinite where nothing is known."""
    key = "reach", name
    if key not in s.made:
        weight = s.folder.constants.get(name)
        if weight is not None:
            values = held(weight)
            finite = values.size and values.dtype.kind in "biuf" and bool(np.isfinite(values).all())
            s.made[key] = (float(values.min()), float(values.max())) if finite else ANY
        else:
            node = s.maker(name) if deep < DEEP else None
            s.made[key] = ANY if node is None else _of(s, node, name, deep + 1)
    return s.made[key]  # type: ignore[no-any-return]


def _of(s: Sizes, node: onnx.NodeProto, name: str, deep: int) -> Reach:
    def at(i: int) -> Reach:
        return reach(s, node.input[i], deep) if i < len(node.input) and node.input[i] else ANY

    op = node.op_type
    if node.domain == OWN:
        return (0, s.folder.types[name].shape[0] - 1) if op == "Places" else ANY
    if node.domain not in ("", "ai.onnx"):
        return ANY
    if op == "ArgMax" or op == "ArgMin" or (op == "TopK" and name == node.output[1]):
        shape = s.folder.types[node.input[0]].shape if node.input[0] in s.folder.types else ()
        return (0, max(shape, default=math.inf))
    if op in SAME:
        return at(0)
    if op in ROUNDED:
        low, high = at(0)
        return low - 1, high + 1
    if op in ("Sigmoid", "Softmax", "Less", "LessOrEqual", "Greater", "GreaterOrEqual", "Equal", "Not", "And", "Or", "IsNaN"):
        return 0, 1
    if op in ("Concat", "Where", "Pad", "ScatterElements", "ScatterND"):
        return _union(s, node, deep)
    if op == "ReduceSum" and node.input[0] in s.folder.types:
        low, high = at(0)
        terms = math.prod(s.folder.types[node.input[0]].shape)  # at most
        return min(low * terms, 0), max(high * terms, 0)
    rule = ARITHMETIC.get(op)
    return ANY if rule is None else rule([at(i) for i in range(len(node.input))])


def _union(s: Sizes, node: onnx.NodeProto, deep: int) -> Reach:
    """Of operators that put elements of several tensors together."""
    op = node.op_type
    if any(a.name in ("mode", "reduction") and a.s not in (b"constant", b"none") for a in node.attribute):
        return ANY
    which = {"Where": (1, 2), "Pad": (0, 2), "Concat": range(len(node.input))}.get(op, (0, 2))
    parts = [reach(s, node.input[i], deep) for i in which if i < len(node.input) and node.input[i]]
    parts += [(0, 0)] if op == "Pad" else []
    return min(low for low, _ in parts), max(high for _, high in parts)


def _product(x: list[Reach]) -> Reach:
    if any(math.isinf(n) for pair in x[:2] for n in pair):
        return ANY
    ends = [a * b for a in x[0] for b in x[1]]
    return min(ends), max(ends)


def _quotient(x: list[Reach]) -> Reach:
    return _product([x[0], (1 / x[1][1], 1 / x[1][0])]) if x[1][0] > 0 else ANY


def _cast(x: list[Reach]) -> Reach:
    """Of numbers that were rounded when they were computed."""
    low, high = (0.0 if float(n).is_integer() else 1e-3 + 1e-5 * abs(n) for n in x[0])
    return x[0][0] - low, x[0][1] + high


ARITHMETIC: dict[str, Callable[[list[Reach]], Reach]] = {
    "Abs": lambda x: (0, max(abs(x[0][0]), abs(x[0][1]))),
    "Add": lambda x: (x[0][0] + x[1][0], x[0][1] + x[1][1]),
    "Cast": _cast,
    "Clip": lambda x: (max([x[0][0], *(r[0] for r in x[1:2] if r != ANY)]), min([x[0][1], *(r[1] for r in x[2:3] if r != ANY)])),
    "Div": _quotient,
    "Max": lambda x: (max(r[0] for r in x), max(r[1] for r in x)),
    "Min": lambda x: (min(r[0] for r in x), min(r[1] for r in x)),
    "Mul": _product,
    "Neg": lambda x: (-x[0][1], -x[0][0]),
    "Relu": lambda x: (max(x[0][0], 0), max(x[0][1], 0)),
    "Sub": lambda x: (x[0][0] - x[1][1], x[0][1] - x[1][0]),
}
