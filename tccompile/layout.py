"""Program → Program: how far the innermost axis of each tensor is padded, now that it is known in which format it is stored.

The stages before this one settle in which order the axes of a tensor lie, and which tensors are parts of others. They place all
of them as if products read each as an operand, and floats in 16 bits, the narrowest format that is chosen for them: so a tensor
has as much padding there as it may need. Here each tensor that owns memory keeps what its format and its readers ask for
(`padding`), and its parts move with it. Model inputs and outputs stay as they are: without padding.
"""

from __future__ import annotations

from dataclasses import replace

from tccompile.ir.extent import round_up
from tccompile.ir.program import Program
from tccompile.ir.tensor import Tensor, dense, padding, translated


def lay_out(program: Program) -> Program:
    """The program with each tensor padded as its format asks for."""
    old = program.tensors
    multiplied = _multiplied(program)
    fixed = {*program.inputs, *program.outputs}
    whole = {name: t for name, t in old.items() if t.base is None}
    new = {name: t if name in fixed else _padded(t, padding(t.dtype, name in multiplied)) for name, t in whole.items()}
    parts = {name: _part(t, old[t.base], new[t.base]) for name, t in old.items() if t.base is not None}
    return replace(program, tensors={name: (new | parts)[name] for name in old})


def _multiplied(program: Program) -> set[str]:
    """The tensors that own the memory of operands of products, all forms of them included."""
    out = set()
    for op in program.ops:
        if op.multiplies:
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
