"""Attention that exporters take apart, put together again as the standard operator.

    matmul(softmax(c * matmul(a * q, b * kᵀ) + mask), v)  = attention(q, k, v, mask, scale = a * b * c)

The numbers a, b and c may be missing, or stand before transpositions and reshapes of q and k; numbers that differ by head go to
q. The mask may be added, or chosen by: where(seen, scores, lowest). A constant mask that hides just what comes later is
`is_causal`, one that hides nothing is left out, and so is a guard that turns the NaN of rows that see nothing to 0: Attention
gives 0 for these. k and v that are repeated for groups of q's heads are taken as they were before.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import reduce
from typing import Any

import numpy as np
import onnx_graphsurgeon as gs

from tccompile.load.constants import derived, literal
from tccompile.rewrites.movement import permutation
from tccompile.rewrites.rule import (
    Editor,
    Rewrite,
    calculate,
    constant,
    is_float,
    past_casts,
    producer,
    rank,
    reshaped,
    scalar,
    shape_constant,
)

LOWEST = -1e4
"""What is added to hidden scores, or put in their place, is this or less."""


@dataclass
class Parts:
    """y = softmax(scale * q @ kt + masks) @ v.

    factors  constants that scores are multiplied by as well, one number a head
    masks    tensors to add to the scores
    windows  constants to add, (1, windows, 1 or heads, rows, columns), where a batch is images · windows
    seen     which scores count: a tensor of bool, whether it says so by true or by false, and what the others become
    inner    results on the way, which nobody else may read
    """

    node: gs.Node
    q: gs.Tensor
    kt: gs.Tensor
    v: gs.Tensor
    scale: float = 1.0
    factors: list[gs.Constant] = field(default_factory=list)
    masks: list[gs.Tensor] = field(default_factory=list)
    windows: list[gs.Constant] = field(default_factory=list)
    seen: list[tuple[gs.Tensor, bool, float]] = field(default_factory=list)
    inner: list[gs.Tensor] = field(default_factory=list)


def _match(node: gs.Node) -> Parts | None:
    weights, v = node.inputs
    inner = [weights]
    guard = producer(weights, "Where")
    if guard is not None:
        nan = producer(guard.inputs[0], "IsNaN")
        if nan is None or nan.inputs[0] is not guard.inputs[2] or scalar(guard.inputs[1]) != 0:
            return None
        weights = guard.inputs[2]
        inner.append(weights)
    weights = past_casts(weights, inner)
    softmax = producer(weights, "Softmax")
    if softmax is None or softmax.attrs.get("axis", -1) not in (-1, rank(weights) - 1):
        return None
    parts = Parts(node, v, v, v, inner=inner)
    t = softmax.inputs[0]
    while True:
        parts.inner.append(t)
        t = past_casts(t, parts.inner)
        if (n := producer(t, "MatMul")) is not None:
            parts.q, parts.kt = n.inputs
            return parts
        if (found := _number(t)) is not None:
            parts.scale *= found[1]
            t = found[0]
        elif (by_head := _by_head(t)) is not None:
            parts.factors.append(by_head[1])
            t = by_head[0]
        elif parts.scale != 1.0 or parts.factors:
            return None
        elif (window := _windows(t)) is not None:
            t, mask, between = window
            parts.windows.append(mask)
            parts.inner.append(between)
        elif (n := producer(t, "Add", "Where")) is None:
            return None
        elif n.op == "Add":
            i = next((i for i in (0, 1) if _leads_to_product(n.inputs[i])), None)
            if i is None:
                return None
            parts.masks.append(n.inputs[1 - i])
            t = n.inputs[i]
        else:
            i = next((i for i in (1, 2) if _leads_to_product(n.inputs[i]) and scalar(n.inputs[3 - i]) is not None), None)
            if i is None:
                return None
            parts.seen.append((n.inputs[0], i == 1, float(scalar(n.inputs[3 - i]) or 0)))
            t = n.inputs[i]


ON_THE_WAY = ("Add", "Mul", "Div", "Where", "MatMul", "Reshape", "Cast")


def _leads_to_product(t: gs.Tensor) -> bool:
    """Whether the tensor is a product of matrices, scaled or masked."""
    while (node := producer(t, *ON_THE_WAY)) is not None:
        if node.op == "MatMul":
            return True
        t = next((x for x in node.inputs if producer(x, *ON_THE_WAY)), node.inputs[0])
    return False


def _windows(t: gs.Tensor) -> tuple[gs.Tensor, gs.Constant, gs.Tensor] | None:
    """x, a constant mask (1, windows, 1 or heads, rows, columns) and the sum, if t = reshape(reshape(x) + mask).

    x is (images · windows, heads, rows, columns), and in the sum its first axis is two.
    """
    after = producer(t, "Reshape")
    add = producer(after.inputs[0], "Add") if after else None
    if add is None or rank(add.outputs[0]) != 5 or rank(t) != 4 or list(add.outputs[0].shape[2:]) != list(t.shape[1:]):
        return None
    for i in (0, 1):
        before, mask = producer(add.inputs[i], "Reshape"), add.inputs[1 - i]
        if before is None or not isinstance(mask, gs.Constant) or list(before.inputs[0].shape) != list(t.shape):
            continue
        if _five(mask)[0] == 1 and _five(mask)[1] == add.outputs[0].shape[1]:
            return before.inputs[0], mask, add.outputs[0]
    return None


def _five(mask: gs.Tensor) -> list[int]:
    """The mask's shape, with five axes."""
    return [*[1] * (5 - rank(mask)), *mask.shape]


def _number(t: gs.Tensor) -> tuple[gs.Tensor, float] | None:
    """x and c, if the tensor is c * x or x / (1 / c)."""
    node = producer(t, "Mul", "Div")
    if node is None or list(t.shape) != list(node.inputs[0].shape if scalar(node.inputs[0]) is None else node.inputs[1].shape):
        return None
    for i in (0, 1) if node.op == "Mul" else (1,):
        c = scalar(node.inputs[i])
        if c is not None and c != 0 and math.isfinite(c):
            return node.inputs[1 - i], c if node.op == "Mul" else 1 / c
    return None


def _by_head(t: gs.Tensor) -> tuple[gs.Tensor, gs.Constant] | None:
    """x and c, if the tensor is x times a constant that has one element for all rows and columns of a head."""
    node = producer(t, "Mul")
    for i in (0, 1) if node else ():
        x, c = node.inputs[1 - i], constant(node.inputs[i])  # type: ignore[union-attr]
        if c is not None and rank(c) >= 2 and list(c.shape[-2:]) == [1, 1] and list(x.shape) == list(t.shape):
            return x, c
    return None


def _lies_across(t: gs.Tensor) -> bool:
    """Whether a transposition ahead of the tensor moves another axis to the end: attention between channels, say."""
    passing = ("Div", "Mul", "Slice", "Gather", "Split", "Squeeze", "Unsqueeze")
    while (node := producer(t, *passing)) is not None or (
        (node := producer(t, "Reshape")) is not None and node.inputs[0].shape[-1] == t.shape[-1]
    ):
        t = node.inputs[0]
    transpose = producer(t, "Transpose")
    return transpose is not None and permutation(transpose)[-1] != rank(t) - 1


def _scaled_before(edit: Editor, t: gs.Tensor) -> Iterator[tuple[gs.Node, float]]:
    """Products with numbers ahead of the tensor, past what only moves elements and nobody else reads."""
    while edit.only_use(t):
        if (found := _number(t)) is not None:
            yield t.inputs[0], found[1]
            t = found[0]
        elif (node := producer(t, "Transpose", "Reshape", "Squeeze", "Unsqueeze")) is not None:
            t = node.inputs[0]
        else:
            return


def _check(edit: Editor, m: Parts) -> str | None:
    y = m.node.outputs[0]
    if not is_float(y) or not 2 <= rank(y) <= 4:
        return f"it has {rank(y)} axes"
    if any(rank(t) != rank(y) for t in (m.q, m.kt, m.v)) or not all(
        list(t.shape[:-2]) == list(y.shape[:-2]) for t in (m.q, m.kt, m.v)
    ):
        return "its operands have other leading axes"
    for t in m.inner:
        readers = {id(n) for n in t.outputs} - {id(n) for n in t.outputs if n.op == "IsNaN"}
        if len(readers) != 1 or id(t) in edit.outputs:
            return f"{t.name} is used elsewhere as well"
    if m.factors and _lies_across(m.q):
        return "elements of its heads do not lie side by side, and plain products read them as they lie"
    rows, columns = m.q.shape[-2], m.kt.shape[-1]
    if any(list(mask.shape[-2:]) != [rows, columns] for mask in m.windows):
        return "the mask of its windows does not have their rows and columns"
    for mask in (*m.masks, *(t for t, _, _ in m.seen)):
        if rank(mask) > rank(y) or (columns > 1 and (rank(mask) == 0 or mask.shape[-1] != columns)):
            return f"its mask {mask.name} does not have an element for each key"
        if rank(mask) > 1 and mask.shape[-2] not in (1, rows):
            return f"its mask {mask.name} has other rows"
    for _, _, lowest in m.seen:
        if lowest > LOWEST:
            return f"hidden scores become {lowest:g}, which counts"
    return None


def _apply(edit: Editor, m: Parts) -> None:
    node, y = m.node, m.node.outputs[0]
    lead = [1] * (4 - rank(y)) + list(y.shape[:-2])
    for t in (m.q, m.kt):
        for number, factor in list(_scaled_before(edit, t)):
            m.scale *= factor
            source = next(x for x in number.inputs if scalar(x) is None)
            edit.redirect(source, number.outputs[0])
    q, kt = next(n for t in m.inner[1:] if (n := producer(t, "MatMul")) is not None).inputs

    for factor in m.factors:
        q = edit.add("Mul", [q, factor], node, q.shape)

    def shaped(t: gs.Tensor, shape: list[int], into: gs.Tensor | None = None) -> gs.Tensor:
        if into is None and list(t.shape) == shape:
            return t
        attrs = {"allowzero": 1} if 0 in shape else {}
        return edit.add("Reshape", [t, shape_constant(edit, shape, node)], node, shape, into, **attrs)

    k, (rows, size), columns = _transposed(edit, kt, lead, node), q.shape[-2:], kt.shape[-1]
    v, values = shaped(m.v, [*lead, *m.v.shape[-2:]]), m.v.shape[-1]
    q = shaped(q, [*lead, rows, size])
    k, v = _ungrouped(edit, k, v, node, shaped)
    causal, mask = _mask(edit, m, rows, columns)
    inputs = [q, k, v] if mask is None else [q, k, v, mask]
    attrs: dict[str, Any] = {"scale": float(m.scale), "is_causal": int(causal)}
    if rank(y) == 4:
        edit.add("Attention", inputs, node, into=y, **attrs)
    else:
        shaped(edit.add("Attention", inputs, node, [*lead, rows, values], **attrs), list(y.shape), into=y)


def _transposed(edit: Editor, t: gs.Tensor, lead: list[int], node: gs.Node) -> gs.Tensor:
    """The transpose of the tensor's last two axes, as (*lead, columns, rows): what was transposed, where that is to be had."""
    shape = [*lead, t.shape[-1], t.shape[-2]]
    inner = t
    while (reshape := producer(inner, "Reshape")) is not None and list(reshape.inputs[0].shape[-2:]) == list(inner.shape[-2:]):
        inner = reshape.inputs[0]
    transpose = producer(inner, "Transpose")
    if transpose is not None:
        r = rank(inner)
        perm = permutation(transpose)
        if perm[-2:] == [r - 1, r - 2] and perm[:-2] == list(range(r - 2)):
            inner = transpose.inputs[0]
            return (
                inner
                if list(inner.shape) == shape
                else edit.add("Reshape", [inner, shape_constant(edit, shape, node)], node, shape)
            )
        if r == 4 and list(inner.shape[:2]) == lead:  # transposed together with the heads
            swapped = [*perm[:2], perm[3], perm[2]]
            return edit.add("Transpose", [transpose.inputs[0]], node, shape, perm=swapped)
    if rank(t) < 4:
        t = edit.add("Reshape", [t, shape_constant(edit, [*lead, *t.shape[-2:]], node)], node, [*lead, *t.shape[-2:]])
    return edit.add("Transpose", [t], node, shape, perm=[0, 1, 3, 2])


def _ungrouped(edit: Editor, k: gs.Tensor, v: gs.Tensor, node: gs.Node, shaped) -> tuple[gs.Tensor, gs.Tensor]:
    """k and v before each of their heads was repeated for the same number of q's, if both were."""
    found = []
    for t in (k, v):
        reshape = producer(t, "Reshape")
        expand = producer(reshape.inputs[0], "Expand", "Tile") if reshape else None
        if expand is None or rank(expand.outputs[0]) != 5 or rank(expand.inputs[0]) != 5:
            return k, v
        whole, once = list(expand.outputs[0].shape), list(expand.inputs[0].shape)
        if once[2] != 1 or [*whole[:2], *whole[3:]] != [*once[:2], *once[3:]] or whole[:1] != list(t.shape[:1]):
            return k, v
        if [whole[1] * whole[2], *whole[3:]] != list(t.shape[1:]):
            return k, v
        found.append((expand.inputs[0], whole[1]))
    if found[0][1] != found[1][1]:
        return k, v
    first, second = (shaped(x, [x.shape[0], x.shape[1], *x.shape[3:]]) for x, _ in found)
    return first, second


def _mask(edit: Editor, m: Parts, rows: int, columns: int) -> tuple[bool, gs.Tensor | None]:
    """(whether rows see only what comes before them, the rest of the masks as one tensor)"""
    node, causal = m.node, False
    added: list[gs.Tensor] = []
    chosen: list[tuple[gs.Tensor, bool, float]] = []
    for t in m.masks:
        values = np.asarray(t.values) if isinstance(t, gs.Constant) else None
        if values is not None and _is_causal(values > LOWEST, rows, columns) and not values[values > LOWEST].any():
            causal = True
        elif values is None or values.any():
            added.append(t)
    for t, where_true, lowest in m.seen:
        seen = np.asarray(t.values) == where_true if isinstance(t, gs.Constant) else None
        if seen is not None and _is_causal(seen, rows, columns):
            causal = True
        elif seen is None or not seen.all():
            # What a row that sees nothing gives depends on how its scores are hidden.
            chosen.append((t, where_true, -math.inf if seen is not None and seen.any(-1).all() else lowest))
    if len(chosen) == 1 and not added and not m.windows and math.isinf(chosen[0][2]):
        t, where_true, _ = chosen[0]
        mask = t if where_true else edit.add("Not", [t], node, t.shape)
        mask.dtype = np.dtype(bool)
        return causal, _matrix(edit, mask, node)
    for t, where_true, lowest in chosen:
        zero, hidden = (literal(edit.name(f"{node.name}/hidden"), np.array(x), m.q.dtype) for x in (0.0, lowest))
        added.append(edit.add("Where", [t, zero, hidden] if where_true else [t, hidden, zero], node, t.shape))
    for t in m.windows:
        windows, heads = _five(t)[1:3]
        each = np.tile(np.arange(windows), m.q.shape[0] // windows)
        added.append(derived("", "take", reshaped(t, windows, heads, rows, columns), each, axis=0))  # type: ignore[arg-type]
    if fixed := [t for t in added if isinstance(t, gs.Constant)]:
        whole = reduce(lambda a, b: calculate("add", a, b), fixed[1:], fixed[0])
        added = [t for t in added if not isinstance(t, gs.Constant)]
        added.append(whole if whole.name else edit.named(whole, f"{node.name}/mask"))  # type: ignore[arg-type]
    if not added:
        return causal, None
    mask = added[0]
    for t in added[1:]:
        mask = edit.add("Add", [mask, t], node, np.broadcast_shapes(tuple(mask.shape), tuple(t.shape)))
    return causal, _matrix(edit, mask, node)


def _matrix(edit: Editor, mask: gs.Tensor, node: gs.Node) -> gs.Tensor:
    """The mask with two axes at least, as Attention takes it."""
    if rank(mask) >= 2:
        return mask
    shape = [1, *([1] * (1 - rank(mask))), *mask.shape]
    matrix = edit.add("Reshape", [mask, shape_constant(edit, shape, node)], node, shape)
    matrix.dtype = mask.dtype
    return matrix


def _is_causal(seen: np.ndarray, rows: int, columns: int) -> bool:
    """Whether row m sees columns 0 to m, in every batch and head."""
    return seen.shape[-2:] == (rows, columns) and bool((seen == np.tri(rows, columns, dtype=bool)).all())


REWRITES = (
    Rewrite("matmul(softmax(c * matmul(q, kᵀ) + mask), v) => attention(q, k, v, mask)", ("MatMul",), _match, _check, _apply),
)
