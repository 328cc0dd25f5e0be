"""y = pad(x)  =>  x is written into the middle of y, and only the border is copied

The padding of a large image, with a constant, its edge or its reflection, moves all of it for the sake of a few rows and
columns. Here y becomes what a concatenation is: a tensor written in slices, the middle one a copy of x, which `elide_concat`
then leaves to x's own writer. It must be found before `compose` mixes it with what computes x.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from tccompile.fuse.editor import Editor, is_concatenated, moves
from tccompile.ir.expr import View, canonical_view, coord, identity_view
from tccompile.ir.extent import worth
from tccompile.ir.ops import Op
from tccompile.ir.program import Program
from tccompile.ir.tensor import Tensor

LARGE = 1 << 20
"""Elements of x from which moving them takes longer than launching what copies the border."""

LONGEST = 1 << 24
"""Elements along an axis beyond which nothing is split: no image is so wide, and looking at an index takes memory for each."""

BORDER = 0.25
"""The most of y that the border may be: beyond, one copy of everything is as fast."""


def split_pads(program: Program) -> Program:
    e, taken = Editor(program), set[str]()
    ops = tuple(part for op in program.ops for part in _parts(e, op, taken) or (op,))
    return replace(program, tensors=e.tensors, ops=ops)


def _parts(e: Editor, op: Op, taken: set[str]) -> list[Op] | None:
    """The ops that write the middle and the border of what `op` pads, or None if it does no such thing.

    taken  the tensors that lie in the middle of another one already
    """
    y = e.tensors[op.y]
    if not moves(e, op) or not e.is_private(y.name):
        return None
    view = op.views[0]
    x = e.tensors[view.tensor]
    if x.name in taken or not _writes_its_own(e, x) or x.shape == y.shape or (x.rank, x.inner) != (y.rank, y.inner):
        return None
    pays = x.size >= LARGE and y.size - x.size <= BORDER * y.size
    if any(True for i in view.index for _ in i.elements) or max(y.shape) > LONGEST or not worth(f"the border of {y.name}", pays):
        return None
    begin = [_run(view, axis, n, y) for axis, n in enumerate(x.shape)]
    if None in begin or (x.inner is not None and x.shape[x.inner] != y.shape[x.inner]):
        return None
    low = [b or 0 for b in begin]
    high = [b + n for b, n in zip(low, x.shape, strict=True)]
    identity = canonical_view(identity_view(x.name, x.rank), x.shape)
    if canonical_view(view.at([coord(a) + b for a, b in enumerate(low)], x.shape), x.shape) != identity:
        return None

    def part(name: str, start: list[int], stop: list[int]) -> Op:
        shape = tuple(b - a for a, b in zip(start, stop, strict=True))
        padded = tuple(p if a == y.inner else n for a, (n, p) in enumerate(zip(shape, y.padded, strict=True)))
        offset = sum(i * s for i, s in zip(start, y.strides, strict=True))
        e.tensors[f"{y.name}.{name}"] = Tensor(f"{y.name}.{name}", shape, y.dtype, padded, y.strides, y.name, offset)
        read = canonical_view(view.at([coord(a) + i for a, i in enumerate(start)], shape), shape)
        return replace(op, y=f"{y.name}.{name}", epilogue=replace(op.epilogue, loads=(read,)))

    taken.add(x.name)
    parts = [part("middle", low, high)]
    start, stop = [0] * y.rank, list(y.shape)
    for axis in range(y.rank):  # what lies before and after the middle along this axis, within it along the earlier ones
        for side, a, b in (("before", 0, low[axis]), ("after", high[axis], y.shape[axis])):
            if a < b:
                start[axis], stop[axis] = a, b
                parts.append(part(f"{side}{axis}", start, stop))
        start[axis], stop[axis] = low[axis], high[axis]
    return parts


def _writes_its_own(e: Editor, x: Tensor) -> bool:
    """Whether an op writes x that could as well write it elsewhere, and no other concatenation asks for that."""
    return e.is_private(x.name) and e.writer(x.name) is not None and not is_concatenated(e, x.name)


def _run(view: View, axis: int, extent: int, y: Tensor) -> int | None:
    """Where along the axis the view begins to read elements 0 … extent - 1 one after the other, or None."""
    index = view.index[axis].evaluate(y.shape).reshape(-1)
    if index.size != y.shape[axis]:
        return 0 if extent == 1 else None
    starts = np.flatnonzero(index[: index.size - extent + 1] == 0)
    return next((int(s) for s in starts if np.array_equal(index[s : s + extent], np.arange(extent))), None)
