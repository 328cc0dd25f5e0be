"""f(x, c)  =>  f(x, number), where all elements of a constant c are that number

Exporters expand scalars to whole tensors (masks of ones, clamps, scales), as long as there are tokens. Constants that come from
the model's weights stay: other weights may take their place.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from tccompile.fuse.editor import tidy
from tccompile.ir.expr import Expr, const, walk
from tccompile.ir.expr import substitute as substituted
from tccompile.ir.ops import Op, Pointwise
from tccompile.ir.program import Program
from tccompile.ir.tensor import Tensor
from tccompile.ir.types import DType
from tccompile.ir.weights import Literal, Recipe, evaluate, leaves

LARGEST = 1 << 24
"""Elements of constants that are looked at."""


def uniform(program: Program) -> Program:
    """The program in which expressions hold numbers in the place of constants that are the same everywhere."""
    numbers = {name: n for name, r in program.constants.items() if (n := _number(r, program.tensors[name])) is not None}
    return replace(program, ops=tuple(_with_numbers(op, numbers) for op in program.ops)) if numbers else program


def _number(recipe: Recipe, tensor: Tensor) -> Expr | None:
    """What all elements of a constant are, as the expression that stands for one; None if they differ."""
    if not 1 < tensor.size <= LARGEST or not all(isinstance(leaf, Literal) for leaf in leaves(recipe)):
        return None
    values = evaluate(recipe, {})
    first = values.flat[0]
    if tensor.dtype.compute is DType.F32 and (not np.isfinite(first) or np.signbit(first) != np.signbit(values).all()):
        return None
    return const(first.item(), tensor.dtype.compute) if (values == first).all() else None


def _with_numbers(op: Op, numbers: Mapping[str, Expr]) -> Op:
    """The op with numbers where its epilogue reads these constants."""
    loads = op.epilogue.loads
    found = {
        e: numbers[loads[e.value].tensor]  # type: ignore[index]
        for e in walk(op.epilogue.expr)
        if e.fn == "load" and loads[e.value].tensor in numbers and not loads[e.value].valid  # type: ignore[index]
    }
    if not found or (isinstance(op, Pointwise) and len(set(found.values())) == len({*walk(op.epilogue.expr)})):
        return op
    return replace(op, epilogue=replace(tidy(substituted(op.epilogue.expr, found), loads), shuffle=op.epilogue.shuffle))
