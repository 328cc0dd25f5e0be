"""Einsum as a product of matrices.

Of the letters of `left, right -> result`, those in all three count matrices (b), those of both operands are summed over (k),
and those of one operand and the result are rows (m) or columns (n); a letter of one operand alone is summed over first.
Then einsum(x, y) is matmul(x as (b…, m, k), y as (b…, k, n)), brought to the order of the result. Of one operand it is a
sum and a transposition.

Every other einsum is first made one of these. A letter twice in an operand takes its diagonal, of an axis of n × n elements
every (n + 1)th. An extent of 1 that stands for another is left away, with its letter. And of more than two operands the two
whose product is smallest are multiplied first; it keeps the letters that the others or the result have.
"""

from __future__ import annotations

import math
import string
from dataclasses import dataclass
from itertools import combinations

import onnx_graphsurgeon as gs

from tccompile.load.constants import Weight, derived
from tccompile.rewrites.rule import Editor, Rewrite, is_float, rank, reshaped, shape_constant


@dataclass
class Einsum:
    node: gs.Node
    terms: list[str]  # the letters of each operand, with letters in place of an ellipsis
    result: str


def _match(node: gs.Node) -> Einsum:
    equation = node.attrs["equation"].replace(" ", "")
    left, arrow, right = equation.partition("->")
    if not arrow:  # without a result: what an ellipsis stands for, and the letters that occur once, sorted
        right = "..." * ("..." in left) + "".join(sorted(c for c in set(left) - {","} if left.count(c) == 1))
    terms = left.split(",")
    hidden = [rank(t) - len(letters) + 3 if "..." in letters else 0 for letters, t in zip(terms, node.inputs, strict=True)]
    names = [c for c in string.ascii_uppercase if c not in equation][: max(hidden)]
    # an ellipsis stands for as many axes as are left; they are aligned at the last
    terms = [letters.replace("...", "".join(names[len(names) - n :])) for letters, n in zip(terms, hidden, strict=True)]
    return Einsum(node, terms, right.replace("...", "".join(names)))


def _doubled(m: Einsum) -> tuple[int, str] | None:
    """An operand and a letter that it has twice."""
    return next(((i, c) for i, letters in enumerate(m.terms) for c in letters if letters.count(c) > 1), None)


def _extents(m: Einsum) -> dict[str, int]:
    """By letter, the largest extent that it has."""
    out: dict[str, int] = {}
    for letters, t in zip(m.terms, m.node.inputs, strict=True):
        for c, n in zip(letters, t.shape, strict=True):
            out[c] = n if out.get(c, 1) == 1 else out[c]
    return out


def _stretched(m: Einsum) -> tuple[int, str] | None:
    """An operand, and a letter whose extent there is 1 and stands for another."""
    extents = _extents(m)
    pairs = ((i, c, n) for i, letters in enumerate(m.terms) for c, n in zip(letters, m.node.inputs[i].shape, strict=True))
    return next(((i, c) for i, c, n in pairs if n != extents[c]), None)


def _einsum(edit: Editor, m: Einsum, operands: list[tuple[str, gs.Tensor]], result: str, into: gs.Tensor | None) -> gs.Tensor:
    """Adds an einsum of operands with their letters."""
    equation = f"{','.join(letters for letters, _ in operands)}->{result}"
    extents = _extents(m)
    return edit.add("Einsum", [t for _, t in operands], m.node, [extents[c] for c in result], into, equation=equation)


def _reshape(edit: Editor, node: gs.Node, x: gs.Tensor, shape: list[int]) -> gs.Tensor:
    if isinstance(x, Weight):
        return edit.named(reshaped(x, *shape), f"{x.name}/reshaped")
    attrs = {"allowzero": 1} if 0 in shape else {}
    return edit.add("Reshape", [x, shape_constant(edit, shape, node)], node, shape, **attrs)


def _check(edit: Editor, m: Einsum) -> str | None:
    if len(set(m.result)) < len(m.result):
        return f"a letter is twice in the result ({m.result})"
    if not is_float(m.node.outputs[0]):
        return "it is of integers"
    extents, inferred = _extents(m), list(m.node.outputs[0].shape)
    if [extents[c] for c in m.result] != inferred:  # ONNX's inference takes a letter's first extent, even where it is 1
        return f"the shape of its result was inferred as {inferred}"
    return None


# --- A letter twice in an operand ------------------------------------------------------------------------------------


def _check_diagonal(edit: Editor, m: Einsum) -> str | None:
    return _check(edit, m) or (None if _doubled(m) else "it takes no diagonal")


def _apply_diagonal(edit: Editor, m: Einsum) -> None:
    found = _doubled(m)
    assert found is not None
    i, c = found
    letters, x = m.terms[i], m.node.inputs[i]
    first = letters.index(c)
    second = letters.index(c, first + 1)
    rest = [a for a in range(len(letters)) if a not in (first, second)]
    lead, n = [x.shape[a] for a in rest], x.shape[first]
    x = edit.add("Transpose", [x], m.node, [*lead, n, n], perm=[*rest, first, second])
    x = _reshape(edit, m.node, x, [*lead, n * n])
    starts, ends, axes, steps = (shape_constant(edit, [v], m.node) for v in (0, n * n, len(rest), n + 1))
    x = edit.add("Slice", [x, starts, ends, axes, steps], m.node, [*lead, n])
    operands = list(zip(m.terms, m.node.inputs, strict=True))
    operands[i] = "".join(letters[a] for a in rest) + c, x
    _einsum(edit, m, operands, m.result, m.node.outputs[0])


# --- An extent of 1 for another --------------------------------------------------------------------------------------


def _check_stretched(edit: Editor, m: Einsum) -> str | None:
    return _check(edit, m) or (None if _stretched(m) else "all extents of a letter are equal")


def _apply_stretched(edit: Editor, m: Einsum) -> None:
    found = _stretched(m)
    assert found is not None
    i, c = found
    letters, x = m.terms[i], m.node.inputs[i]
    shape = [n for letter, n in zip(letters, x.shape, strict=True) if letter != c]
    operands = list(zip(m.terms, m.node.inputs, strict=True))
    operands[i] = letters.replace(c, ""), _reshape(edit, m.node, x, shape)
    _einsum(edit, m, operands, m.result, m.node.outputs[0])


# --- Three operands and more -----------------------------------------------------------------------------------------


def _check_many(edit: Editor, m: Einsum) -> str | None:
    return _check(edit, m) or (None if len(m.terms) > 2 else "it has no more than two operands")


def _apply_many(edit: Editor, m: Einsum) -> None:
    extents = _extents(m)

    def kept(pair: tuple[int, ...]) -> str:
        needed = {*m.result, *(c for i, letters in enumerate(m.terms) if i not in pair for c in letters)}
        return "".join(dict.fromkeys(c for i in pair for c in m.terms[i] if c in needed))

    pair = min(combinations(range(len(m.terms)), 2), key=lambda pair: math.prod(extents[c] for c in kept(pair)))
    operands = list(zip(m.terms, m.node.inputs, strict=True))
    product = _einsum(edit, m, [operands[i] for i in pair], kept(pair), None)
    rest = [operand for i, operand in enumerate(operands) if i not in pair]
    _einsum(edit, m, [(kept(pair), product), *rest], m.result, m.node.outputs[0])


# --- One or two ------------------------------------------------------------------------------------------------------


def _apply(edit: Editor, m: Einsum) -> None:
    node, y = m.node, m.node.outputs[0]
    extent = _extents(m)

    def summed(x: gs.Tensor, letters: str, kept: str) -> tuple[gs.Tensor, str]:
        axes = [i for i, c in enumerate(letters) if c not in kept]
        if not axes:
            return x, letters
        letters = "".join(c for c in letters if c in kept)
        out = edit.add("ReduceSum", [x, shape_constant(edit, axes, node)], node, [extent[c] for c in letters], keepdims=0)
        return out, letters

    def ordered(x: gs.Tensor, letters: str, order: str, into: gs.Tensor | None = None) -> gs.Tensor:
        perm = [letters.index(c) for c in order]
        if isinstance(x, Weight) and into is None:
            return edit.named(derived("", "transpose", x, axes=tuple(perm)), f"{x.name}/transposed")
        return edit.add("Transpose", [x], node, [extent[c] for c in order], into=into, perm=perm)

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
    left = _reshape(edit, node, ordered(a, p, "".join([*batch, *rows, *inner])), [*lead, rows_n, k])
    right = _reshape(edit, node, ordered(b, q, "".join([*batch, *inner, *columns])), [*lead, k, columns_n])
    product = edit.add("MatMul", [left, right], node, [*lead, rows_n, columns_n])
    whole = "".join([*batch, *rows, *columns])
    ordered(_reshape(edit, node, product, [extent[c] for c in whole]), whole, m.result, into=y)


REWRITES = (
    Rewrite("einsum(x, …) => einsum(diagonal(x), …)", ("Einsum",), _match, _check_diagonal, _apply_diagonal),
    Rewrite("einsum(x, …) => einsum(reshape(x), …)", ("Einsum",), _match, _check_stretched, _apply_stretched),
    Rewrite("einsum(x, y, z, …) => einsum(einsum(x, y), z, …)", ("Einsum",), _match, _check_many, _apply_many),
    Rewrite("einsum(x, y) => transpose(matmul(x', y'))", ("Einsum",), _match, _check, _apply),
)
