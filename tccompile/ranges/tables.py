"""Constants that are as long as a size: positions of the tokens that there are, masks for them.

At other sizes such a constant is mostly a part of one table: the first rows of what it is at the greatest sizes. Then a plan
holds that, and the program reads the part as a view of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from tccompile.ir.ops import Pointwise
from tccompile.ir.program import Program
from tccompile.ir.tensor import Tensor
from tccompile.ir.weights import Recipe, evaluate, same

TABLE = ".table"
"""What a table's name ends with, after the constant's."""


@dataclass(frozen=True)
class Tables:
    """What constants are at the greatest sizes, of those that differ from size to size."""

    greatest: Program
    names: frozenset[str]
    weights: Mapping[str, np.ndarray]

    def shared_by(self, program: Program) -> Program:
        """The program with views of the tables in the place of its own constants, where these are parts of those."""
        tensors, constants = dict(program.tensors), dict(program.constants)
        for name in sorted(self.names & constants.keys()):
            own, whole, recipe = tensors[name], self.greatest.tensors[name], self.greatest.constants[name]
            if _may_be_part(own, whole) and _is_part(constants[name], recipe, own, self.weights):
                tensors[name] = replace(own, strides=whole.strides, base=name + TABLE)
                tensors[name + TABLE] = replace(whole, name=name + TABLE)
                del constants[name]
                constants[name + TABLE] = recipe
        return replace(program, tensors=tensors, constants=constants)


def tables(greatest: Program, other: Program, weights: Mapping[str, np.ndarray]) -> Tables:
    """The tables of a range, by the programs at its greatest and at other sizes: of constants that are only read by views."""
    operands = {name for op in greatest.ops for name in op.operands if not isinstance(op, Pointwise)}
    names = {
        name
        for name, recipe in greatest.constants.items()
        if name in other.constants and name not in operands and not same(recipe, other.constants[name])
    }
    return Tables(greatest, frozenset(names), weights)


def _may_be_part(own: Tensor, whole: Tensor) -> bool:
    """Whether a view of one tensor can have the other's shape and padding: its innermost axis is as long."""
    if own.dtype is not whole.dtype or own.rank != whole.rank or own.order != whole.order or own.base or whole.base:
        return False
    fits = all(n <= m and p <= q for n, m, p, q in zip(own.shape, whole.shape, own.padded, whole.padded, strict=True))
    return fits and all(
        p == q or (n == p and m == q and axis != own.order[-1])
        for axis, (n, m, p, q) in enumerate(zip(own.shape, whole.shape, own.padded, whole.padded, strict=True))
    )


def _is_part(recipe: Recipe, table: Recipe, own: Tensor, weights: Mapping[str, np.ndarray]) -> bool:
    values = evaluate(table, weights)[tuple(slice(n) for n in own.shape)]
    return np.array_equal(evaluate(recipe, weights), values)
