"""Program → Program: how far the innermost axis of each tensor is padded, now that it is known in which format it is stored.

The stages before this one settle in which order the axes of a tensor lie, and which tensors are parts of others. They place all
of them as if products read each as an operand, and floats in 16 bits, the narrowest format that is chosen for them: so a tensor
has as much padding there as it may need. Here each tensor that owns memory keeps what its format and its readers ask for
(`padding`), and its parts move with it. Model inputs and outputs stay as they are: without padding.

Weights of 8 bits that a convolution multiplies with single pixels are rows of K bytes, which Hopper's tensor copy engine reads
128 at a time, in boxes that take longer where they begin inside lines of memory. So each row begins with a line (`in_lines`).
Activations, with such gaps, would be larger for all that reads and writes them.
"""

from __future__ import annotations

from dataclasses import replace

from tccompile.ir.extent import round_up
from tccompile.ir.ops import Conv
from tccompile.ir.program import Program
from tccompile.ir.tensor import Tensor, dense, padding, translated

LINE = 128
"""Bytes of a line of memory, and of a row of the copy engine's widest boxes."""


def lay_out(program: Program) -> Program:
    """The program with each tensor padded as its format asks for, and rows of weights in lines."""
    old = program.tensors
    multiplied = _multiplied(program)
    fixed = {*program.inputs, *program.outputs}
    whole = {name: t for name, t in old.items() if t.base is None}
    new = {name: t if name in fixed else _padded(t, padding(t.dtype, name in multiplied)) for name, t in whole.items()}
    parts = {name: _part(t, old[t.base], new[t.base]) for name, t in old.items() if t.base is not None}
    new |= {name: in_lines(new[name]) for name in _of_single_pixels(program) - {t.base for t in parts.values()}}
    return replace(program, tensors={name: (new | parts)[name] for name in old})


def in_lines(w: Tensor) -> Tensor:
    """Weights of 8 bits, output channels first, whose rows begin with lines of memory, if each has half a line at least."""
    step = w.strides[0] if w.strides[0] < LINE // 2 else round_up(w.strides[0], LINE)
    return replace(w, strides=(step, *w.strides[1:]))


def _of_single_pixels(program: Program) -> set[str]:
    """The constants of 8 bits that are the weights of a convolution of one group whose window is one pixel."""
    convolutions = (op for op in program.ops if isinstance(op, Conv) and op.groups == 1)
    weights = (program.tensors[op.w] for op in convolutions)
    return {w.name for w in weights if w.name in program.constants and w.dtype.bits == 8 and {*w.shape[2:]} <= {1}}


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
