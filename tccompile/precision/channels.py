"""y = product(x, w)  =>  y = product(x, w · 2^e) · 2^-e, with a power of two for each output channel

fp16 holds numbers of about the same size to 11 digits, from 2^-14 on. Weights of one output channel that are far smaller than the
others', or far larger, would keep few of these, whatever the tensor is multiplied by. Such channels are stored times a power of
two each, and their sums multiplied by what is left of it, in fp32. That is done where the result's channels are told apart behind
the product: where they are stored in fp32, as the model's outputs are, or scaled each by its own number. Else the result loses in
fp16 what the weights lose.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from tccompile.ir.expr import ACC, Expr, View, call, coord, load, substitute, walk
from tccompile.ir.expr import constant as index_constant
from tccompile.ir.ops import Conv, Gemm, Op
from tccompile.ir.program import Program
from tccompile.ir.tensor import dense
from tccompile.ir.types import DType
from tccompile.ir.weights import Literal, transform

if TYPE_CHECKING:
    from tccompile.precision.ranges import Spread


def with_powers(program: Program, spreads: Mapping[str, Spread], wide: Collection[str]) -> tuple[Program, dict[str, Spread]]:
    """The program with such powers where channels are told apart, and the values of its tensors.

    wide  results that are stored in fp32
    """
    tensors, constants, found = dict(program.tensors), dict(program.constants), dict(spreads)
    ops = []
    for op in program.ops:
        apart = found[op.operands[1]].apart if isinstance(op, Conv | Gemm) and op.operands[1] in found else None
        if apart is None or not _told_apart(op, program, wide):
            ops.append(op)
            continue
        w, axis = program.tensors[op.operands[1]], 1 if isinstance(op, Conv) else program.tensors[op.y].rank - 1
        powers, (name, back) = apart.powers, (f"{w.name}/channels", f"{w.name}/back")
        along = np.ldexp(np.float32(1), powers)
        tensors[name] = replace(w, name=name)
        constants[name] = transform("mul", constants[w.name], Literal(along.reshape(-1, *[1] * (w.rank - 1))))
        tensors[back] = dense(back, along.shape, DType.F32)
        constants[back] = Literal(1 / along)
        found[name] = apart.values
        views = (*op.epilogue.loads, View(back, (coord(axis) if len(along) > 1 else index_constant(0),)))
        expr = substitute(op.epilogue.expr, {ACC: call("mul", ACC, load(len(views) - 1))})
        ops.append(replace(op.renamed({w.name: name}), epilogue=replace(op.epilogue, expr=expr, loads=views)))
    return replace(program, tensors=tensors, constants=constants, ops=tuple(ops)), found


def _told_apart(op: Op, program: Program, wide: Collection[str]) -> bool:
    """Whether channels of a product's result are stored in fp32, or scaled each by its own number."""
    y = program.tensors[op.y]
    if y.storage in wide or (y.storage in program.outputs and y.dtype is DType.F32):
        return True
    axis = 1 if isinstance(op, Conv) else y.rank - 1
    return any(_of_channels(a, op, program, axis) for e in walk(op.epilogue.expr) if e.fn in ("mul", "div") for a in e.args)


def _of_channels(e: Expr, op: Op, program: Program, axis: int) -> bool:
    """Whether an expression is a constant's number for each channel."""
    if e.fn != "load":
        return False
    view = op.epilogue.loads[int(e.value)]  # type: ignore[arg-type]
    return view.tensor in program.constants and any(i == coord(axis) for i in view.index)
