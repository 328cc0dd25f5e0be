"""Program → Program: how far the innermost axis of each tensor is padded, now that it is known in which format it is stored.

The stages before this one settle in which order the axes of a tensor lie, and which tensors are parts of others. They place all
of them as if products read each as an operand, and floats in 16 bits, the narrowest format that is chosen for them: so a tensor
has as much padding there as it may need. Here each tensor that owns memory keeps what its format and its readers ask for
(`padding`), and its parts move with it. Model inputs and outputs stay as they are: without padding.

Weights that a convolution multiplies with single pixels are rows of K, which Hopper's tensor copy engine reads 128 bytes at a
time, in boxes that take longer where they reach into a second line of memory. So each row begins with a line (`in_lines`).
Activations, with such gaps, would be larger for all that reads and writes them; and where an image is one pixel, as in squeeze
and excitation, or at small batches rows are long, weights are read but once or twice: those rows are left as they are (`MOST`).
"""

from __future__ import annotations

from dataclasses import replace

from tccompile.ir.extent import round_up
from tccompile.ir.ops import Conv
from tccompile.ir.program import Program
from tccompile.ir.tensor import Tensor, dense, padding, translated

LINE = 128
"""Bytes of a line of memory, and of a row of the copy engine's widest boxes."""


MOST = 8
"""Lines of a row of weights up to which it begins with one. In fp16 on an H200, at batches of 1 and 8, 1×1 layers of shorter rows
are 1.03 times as fast with them; of 528 to 672 channels at batch 1, most take up to 5 % longer, and 5 % less at a batch of 32."""


def lay_out(program: Program) -> Program:
    """The program with each tensor padded as its format asks for, and rows of weights in lines."""
    old = program.tensors
    multiplied = _multiplied(program)
    fixed = {*program.inputs, *program.outputs}
    whole = {name: t for name, t in old.items() if t.base is None}
    new = {name: t if name in fixed else _padded(t, padding(t.dtype, name in multiplied)) for name, t in whole.items()}
    parts = {name: _part(t, old[t.base], new[t.base]) for name, t in old.items() if t.base is not None}
    return in_lines(replace(program, tensors={name: (new | parts)[name] for name in old}))


def in_lines(program: Program) -> Program:
    """The program with rows of weights that begin with lines of memory, of convolutions whose window is one pixel."""
    whole = {t.base for t in program.tensors.values()}
    found = {op.w for op in program.ops if isinstance(op, Conv) and _by_pixels(op, program)} - whole
    laid = {name: _lined(t) if name in found else t for name, t in program.tensors.items()}
    return replace(program, tensors=laid)


def _lined(w: Tensor) -> Tensor:
    """Weights, output channels first, whose rows begin with lines, if these are few."""
    line, row = 8 * LINE // w.dtype.bits, w.strides[0]
    return replace(w, strides=(round_up(row, line) if row <= MOST * line else row, *w.strides[1:]))


def _by_pixels(op: Conv, program: Program) -> bool:
    """Whether its window is one pixel of several, and its weights are constants that Tensor Cores multiply as they are stored."""
    x, w = program.tensors[op.x], program.tensors[op.w]
    several = any(not isinstance(n, int) or n > 1 for n in x.shape[2:])
    alone = op.groups == 1 and all(n == 1 for n in w.shape[2:])
    return several and alone and op.w in program.constants and w.dtype.bits in (8, 16)


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
