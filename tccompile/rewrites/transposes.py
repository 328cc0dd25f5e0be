"""f(transpose(x)) = transpose(f(x)): transpositions move towards the outputs until they meet their inverse.

And f(reshape(x)) = reshape(f(x)), for elementwise operators whose large operands are all reshaped from one shape.

Exporters of networks whose channels come last put one before and one after every convolution; until they are gone, no
activation, scale or residual finds the convolution that it belongs to. For operators that work along axes, these change
their numbers with it. Operands of an elementwise operator that are not transposed themselves but smaller than the result
(one number a channel, say) get the inverse transposition, which for most of them is a reshape.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import onnx_graphsurgeon as gs

from tccompile.load.constants import derived
from tccompile.rewrites.movement import permutation
from tccompile.rewrites.rule import Editor, Rewrite, constant, ints, name_of, operand, producer, rank, reshaped, shape_constant

ELEMENTWISE = (
    "Abs", "Add", "And", "Cast", "Ceil", "Celu", "Clip", "Cos", "Div", "Elu", "Equal", "Erf", "Exp", "Floor", "Gelu", "Greater",
    "GreaterOrEqual", "HardSigmoid", "HardSwish", "LeakyRelu", "Less", "LessOrEqual", "Log", "Max", "Mean", "Min", "Mish", "Mul",
    "Neg", "Not", "Or", "PRelu", "Pow", "Reciprocal", "Relu", "Round", "Selu", "Shrink", "Sigmoid", "Sign", "Sin", "Softplus",
    "Softsign", "Sqrt", "Sub", "Sum", "Tanh", "ThresholdedRelu", "Where",
)  # fmt: skip
REDUCTIONS = tuple(f"Reduce{r}" for r in ("L1", "L2", "LogSum", "LogSumExp", "Max", "Mean", "Min", "Prod", "Sum", "SumSquare"))


@dataclass
class Moved:
    """A node that reads a transposition. `perm`: axis i of what it reads is axis perm[i] of what is transposed."""

    node: gs.Node
    perm: list[int]


def _transposed(t: gs.Tensor, perm: list[int] | None = None) -> gs.Node | None:
    """The Transpose (by `perm`) that writes the tensor."""
    node = producer(t, "Transpose")
    return node if node and (perm is None or permutation(node) == perm) else None


def _match(node: gs.Node) -> Moved | None:
    r = rank(node.outputs[0]) if node.op in ELEMENTWISE else rank(node.inputs[0])
    first = next((n for t in node.inputs if (n := _transposed(t)) and rank(t) == r), None)
    return Moved(node, permutation(first)) if first else None


def _size(t: gs.Tensor) -> int:
    return math.prod(t.shape)


def _small(t: gs.Tensor) -> bool:
    return not t.name or _size(t) == 1


def _check_elementwise(edit: Editor, m: Moved) -> str | None:
    y = m.node.outputs[0]
    moved = [t for t in m.node.inputs if t.name and rank(t) == rank(y) and _transposed(t, m.perm)]
    if not any(_size(t) == _size(y) for t in moved):
        return "what is transposed is smaller than the result"
    if any(_size(t) == _size(y) and not constant(t) for t in m.node.inputs if t not in moved and not _small(t)):
        return "another operand of the result's size is not transposed so"
    return None


def _inverse(perm: list[int]) -> list[int]:
    return [perm.index(a) for a in range(len(perm))]


def _before(edit: Editor, t: gs.Tensor, m: Moved) -> gs.Tensor:
    """The operand as it is ahead of the transposition."""
    r, where = len(m.perm), name_of(m.node)
    if t.name and rank(t) == r and (node := _transposed(t, m.perm)):
        return node.inputs[0]
    if _small(t):
        return t
    full = [1] * (r - rank(t)) + list(t.shape)
    shape, inverse = [full[a] for a in _inverse(m.perm)], _inverse(m.perm)
    if isinstance(t, gs.Constant):
        return edit.named(derived("", "transpose", reshaped(t, *full), axes=tuple(inverse)), f"{t.name}/transposed")
    wide = gs.Variable(edit.name(f"{where}/operand"), t.dtype, full)
    edit.graph.nodes.append(gs.Node("Reshape", wide.name, {}, [t, shape_constant(edit, full, m.node)], [wide]))
    out = gs.Variable(edit.name(f"{where}/operand"), t.dtype, shape)
    edit.graph.nodes.append(gs.Node("Transpose", out.name, {"perm": inverse}, [wide], [out]))
    return out


def _after(edit: Editor, m: Moved, perm: list[int]) -> None:
    """The node writes its results ahead of the transposition by `perm`, which follows it."""
    if perm == sorted(perm):
        return
    results, where = list(m.node.outputs), name_of(m.node)
    m.node.outputs.clear()
    for y in results:
        name = edit.name(f"{where}/Transpose")
        inner = gs.Variable(edit.name(f"{y.name}/moved"), y.dtype, [y.shape[a] for a in _inverse(perm)])
        m.node.outputs.append(inner)
        edit.graph.nodes.append(gs.Node("Transpose", name, {"perm": perm}, [inner], [y]))


def _apply_elementwise(edit: Editor, m: Moved) -> None:
    m.node.inputs = [_before(edit, t, m) for t in m.node.inputs]
    _after(edit, m, m.perm)


def _match_reshaped(node: gs.Node) -> gs.Node | None:
    return node if any(producer(t, "Reshape") for t in node.inputs) else None


def _number(t: gs.Tensor) -> bool:
    return not t.name or (constant(t) is not None and _size(t) == 1)


def _check_reshaped(edit: Editor, node: gs.Node) -> str | None:
    y = node.outputs[0]
    reshapes = [producer(t, "Reshape") for t in node.inputs if not _number(t)]
    shapes = {tuple(n.inputs[0].shape) if n and list(n.outputs[0].shape) == list(y.shape) else None for n in reshapes}
    if len(shapes) != 1 or None in shapes:
        return "its operands are not all reshaped from one shape"
    (shape,) = shapes
    wide = any(t.name and _number(t) and rank(t) > len(shape or ()) for t in node.inputs)
    return "a number has more axes than what is reshaped" if wide else None


def _apply_reshaped(edit: Editor, node: gs.Node) -> None:
    y = node.outputs[0]
    node.inputs = [t if _number(t) else t.inputs[0].inputs[0] for t in node.inputs]
    shape = next(t.shape for t in node.inputs if not _number(t))
    inner = gs.Variable(edit.name(f"{y.name}/moved"), y.dtype, list(shape))
    node.outputs = [inner]
    attrs = {"allowzero": 1} if 0 in y.shape else {}
    reshape = gs.Node("Reshape", edit.name(f"{name_of(node)}/Reshape"), attrs, [inner, shape_constant(edit, y.shape, node)], [y])
    edit.graph.nodes.append(reshape)


# --- along axes ---


def _check_axes(edit: Editor, m: Moved) -> str | None:
    values = m.node.inputs if m.node.op == "Concat" else m.node.inputs[:1]
    if not all(_transposed(t, m.perm) for t in values):
        return "another input is not transposed so"
    if any(constant(t) is None for t in m.node.inputs[len(values) :] if t.name):
        return "axes or amounts are not constant"
    if m.node.op == "Pad" and operand(m.node, 3) is not None:
        return "its axes are given"
    if m.node.op == "Slice" and operand(m.node, 3) is None:
        return "its axes are not given"
    return None


def _renumber(edit: Editor, m: Moved, i: int) -> None:
    """Input i, a list of axes, with the numbers that they have ahead of the transposition."""
    axes = [m.perm[a] for a in ints(operand(m.node, i)) or ()]
    m.node.inputs[i] = shape_constant(edit, axes, m.node)


def _apply_axes(edit: Editor, m: Moved) -> None:
    node, perm, r = m.node, m.perm, len(m.perm)
    if node.op in REDUCTIONS:
        axes = ints(operand(node, 1)) if operand(node, 1) is not None else tuple(range(r))
        if operand(node, 1) is not None:
            _renumber(edit, m, 1)
        if not node.attrs.get("keepdims", 1):
            kept = [perm[i] for i in range(r) if i not in {a % r for a in axes or ()}]
            perm = [sorted(kept).index(a) for a in kept]
    elif node.op == "Slice":
        _renumber(edit, m, 3)
    elif node.op == "Pad":
        pads = ints(node.inputs[1]) or ()
        node.inputs[1] = shape_constant(edit, [pads[half + a] for half in (0, r) for a in _inverse(perm)], node)
    else:
        default = 0 if node.op == "Split" else -1
        node.attrs["axis"] = m.perm[node.attrs.get("axis", default)]
    count = len(node.inputs) if node.op == "Concat" else 1
    node.inputs = [*(_before(edit, t, m) for t in node.inputs[:count]), *node.inputs[count:]]
    _after(edit, m, perm)


ALONG_AXES = (*REDUCTIONS, "Concat", "LogSoftmax", "Pad", "Slice", "Softmax", "Split")
REWRITES = (
    Rewrite("f(transpose(x)) => transpose(f(x))", ELEMENTWISE, _match, _check_elementwise, _apply_elementwise),
    Rewrite("f(reshape(x)) => reshape(f(x))", ELEMENTWISE, _match_reshaped, _check_reshaped, _apply_reshaped),
    Rewrite("f(transpose(x), axes) => transpose(f(x, axes'))", ALONG_AXES, _match, _check_axes, _apply_axes),
)
