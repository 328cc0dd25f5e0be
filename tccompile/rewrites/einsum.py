"""Einsum as a product of matrices.

Of the letters of `left, right -> result`, those in all three count matrices (b), those of both operands are summed over (k),
and those of one operand and the result are rows (m) or columns (n); a letter of one operand alone is summed over first.
Then einsum(x, y) is matmul(x as (b…, m, k), y as (b…, k, n)), brought to the order of the result. Of one operand it is a
sum and a transposition.
"""

from __future__ import annotations

import math
import string
from dataclasses import dataclass

import onnx_graphsurgeon as gs

from tccompile.rewrites.rule import Editor, Rewrite, is_float, rank, shape_constant


@dataclass
class Einsum:
    node: gs.Node
    terms: list[str]  # the letters of each operand, with letters in place of an ellipsis
    result: str


def _match(node: gs.Node) -> Einsum:
    equation = node.attrs["equation"].replace(" ", "")
    left, arrow, right = equation.partition("->")
    if not arrow:  # without a result: the letters that occur once, sorted
        right = "".join(sorted(c for c in set(left) - {","} if left.count(c) == 1))
    terms = left.split(",")
    hidden = [rank(t) - len(letters) + 3 if "..." in letters else 0 for letters, t in zip(terms, node.inputs, strict=True)]
    names = [c for c in string.ascii_uppercase if c not in equation][: max(hidden)]
    # an ellipsis stands for as many axes as are left; they are aligned at the last
    terms = [letters.replace("...", "".join(names[len(names) - n :])) for letters, n in zip(terms, hidden, strict=True)]
    return Einsum(node, terms, right.replace("...", "".join(names)))


def _check(edit: Editor, m: Einsum) -> str | None:
    if len(m.terms) > 2:
        return "it has more than two operands"
    for letters, t in zip([*m.terms, m.result], [*m.node.inputs, m.node.outputs[0]], strict=True):
        if len(set(letters)) < len(letters) or len(letters) != rank(t):
            return f"it takes a diagonal ({letters})"
    if not is_float(m.node.outputs[0]):
        return "it is of integers"
    extents: dict[str, int] = {}
    for letters, t in zip(m.terms, m.node.inputs, strict=True):
        if any(extents.setdefault(c, n) != n for c, n in zip(letters, t.shape, strict=True)):
            return "an extent of 1 stands for another"
    return None


def _apply(edit: Editor, m: Einsum) -> None:
    node, y = m.node, m.node.outputs[0]
    extent = {c: n for letters, t in zip(m.terms, node.inputs, strict=True) for c, n in zip(letters, t.shape, strict=True)}

    def summed(x: gs.Tensor, letters: str, kept: str) -> tuple[gs.Tensor, str]:
        axes = [i for i, c in enumerate(letters) if c not in kept]
        if not axes:
            return x, letters
        letters = "".join(c for c in letters if c in kept)
        out = edit.add("ReduceSum", [x, shape_constant(edit, axes, node)], node, [extent[c] for c in letters], keepdims=0)
        return out, letters

    def ordered(x: gs.Tensor, letters: str, order: str, into: gs.Tensor | None = None) -> gs.Tensor:
        perm = [letters.index(c) for c in order]
        return edit.add("Transpose", [x], node, [extent[c] for c in order], into=into, perm=perm)

    def shaped(x: gs.Tensor, shape: list[int]) -> gs.Tensor:
        attrs = {"allowzero": 1} if 0 in shape else {}
        return edit.add("Reshape", [x, shape_constant(edit, shape, node)], node, shape, **attrs)

    if len(m.terms) == 1:
        x, letters = summed(node.inputs[0], m.terms[0], m.result)
        ordered(x, letters, m.result, into=y)
        return
    (p, q), (a, b) = m.terms, node.inputs
    a, p = summed(a, p, q + m.result)
    b, q = summed(b, q, p + m.result)
    batch = [c for c in m.result if c in p and c in q]
    rows = [c for c in m.result if c in p and c not in q]
    columns = [c for c in m.result if c in q and c not in p]
    inner = [c for c in p if c in q and c not in m.result]
    lead = [extent[c] for c in batch]
    k, rows_n, columns_n = (math.prod(extent[c] for c in letters) for letters in (inner, rows, columns))
    left = shaped(ordered(a, p, "".join([*batch, *rows, *inner])), [*lead, rows_n, k])
    right = shaped(ordered(b, q, "".join([*batch, *inner, *columns])), [*lead, k, columns_n])
    product = edit.add("MatMul", [left, right], node, [*lead, rows_n, columns_n])
    whole = "".join([*batch, *rows, *columns])
    ordered(shaped(product, [extent[c] for c in whole]), whole, m.result, into=y)


REWRITES = (Rewrite("einsum(x, y) => transpose(matmul(x', y'))", ("Einsum",), _match, _check, _apply),)
