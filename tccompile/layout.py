"""Program → Program: how far the innermost axis of each tensor is padded, now that it is known in which format it is stored.

The stages before this one settle in which order the axes of a tensor lie, and which tensors are parts of others. They place all
of them as if every innermost axis were padded to a multiple of GRAIN elements, which holds whatever format is chosen: parts that
begin and end at multiples of GRAIN do so in any layout that this stage makes. Here each tensor that owns memory gets the padding
that its format asks for (`padding`), and its parts move with it. Model inputs and outputs stay as they are: without padding.
"""

from __future__ import annotations

from dataclasses import replace

from tccompile.ir.extent import round_up
from tccompile.ir.ops import Attention, Conv, Gemm, Mlp, Rnn
from tccompile.ir.program import Program
from tccompile.ir.tensor import GRAIN, Tensor, dense, per_row, translated
from tccompile.ir.types import DType

LANES = 8
"""Elements that a thread of most kernels reads, computes and writes at once, whatever their type. The innermost axis is padded to
a multiple of it, so that no thread has less to do."""


def padding(dtype: DType, multiplied: bool) -> int:
    """The innermost axis of a tensor of this type is padded to a multiple of so many elements.

    multiplied  whether Tensor Cores may read it as an operand, whose rows are of ROW bytes each
    """
    return max(LANES, per_row(dtype)) if multiplied else LANES


def lay_out(program: Program) -> Program:
    """The program with each tensor padded as its format asks for."""
    old = program.tensors
    multiplied = _multiplied(program)
    fixed, divided = {*program.inputs, *program.outputs}, {t.base for t in old.values()}
    new: dict[str, Tensor] = {}
    for name, t in old.items():
        if t.base is None:
            unit = padding(t.dtype, name in multiplied)
            if name in divided and GRAIN % unit:
                unit = GRAIN  # its parts lie at multiples of GRAIN: kernels that ask for more refuse them
            new[name] = t if name in fixed else _padded(t, unit)
    parts = {name: _part(t, old[t.base], new[t.base]) for name, t in old.items() if t.base is not None}
    return replace(program, tensors={name: (new | parts)[name] for name in old})


def _multiplied(program: Program) -> set[str]:
    """The tensors that own the memory of operands of products, all forms of them included."""
    out = set()
    for op in program.ops:
        if isinstance(op, Conv | Gemm | Mlp | Attention | Rnn):
            out |= {program.tensors[name].storage for name in op.operands}
            out |= {name for form in program.forms_of(op) for name in form.tensors}
    return out


def _padded(t: Tensor, unit: int) -> Tensor:
    """The tensor with its innermost axis padded to a multiple of `unit` elements."""
    if not t.rank or 0 in t.shape or t.padded[t.order[-1]] == round_up(t.shape[t.order[-1]], unit):
        return t
    return dense(t.name, t.shape, t.dtype, t.order, unit)


def _part(part: Tensor, old: Tensor, new: Tensor) -> Tensor:
    """A part of `old` where the same elements lie in `new`. Padding of old's that is its own has become new's."""
    inner, lane = old.inner, part.inner
    if old == new or inner is None:
        return part
    strides = tuple(translated(s, old, new) for s in part.strides)
    padded = list(part.padded)
    if lane is not None:
        start = part.offset
        for axis in old.order[:-1]:
            if old.padded[axis] > 1:
                start %= old.strides[axis]
        if start + part.padded[lane] > old.shape[inner]:
            padded[lane] += new.padded[inner] - old.padded[inner]
    return replace(part, padded=tuple(padded), strides=strides, offset=translated(part.offset, old, new))
