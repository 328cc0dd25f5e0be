"""What the rules of several ops ask: what a program from an untrusted file may make of its parameters."""

from __future__ import annotations

import math

from tccompile.ir.extent import Shape

EXTENT = 1 << 31
"""Extents, strides of windows and the like are smaller."""

ON_THE_WAY, TIMES = 1 << 25, 64
"""Elements that computing an op may make between its operands and its result: so many, or so many times those that they have."""


def in_proportion(made: int, *shapes: Shape) -> bool:
    """Whether so many elements that computing an op makes on the way are not too many beside tensors of these shapes."""
    return made <= max(ON_THE_WAY, TIMES * sum(map(math.prod, shapes)))


def are_axes(axes: tuple[int, ...], shape: Shape) -> bool:
    """Whether these are axes of a tensor of this shape, each once."""
    return len(set(axes)) == len(axes) and all(0 <= a < len(shape) for a in axes)
