"""conv(some channels of x, w)  =>  conv(x, w'), with zeros for the channels that are left out

Where the channels are not neighbours, or begin in the middle of a vector, the alternative is a copy of them: half of an image
whose channels were shuffled, say.
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from tccompile.fuse.editor import Editor, channels_of, copies
from tccompile.fuse.gaps import mixes, with_inputs
from tccompile.ir.extent import worth
from tccompile.ir.ops import Conv
from tccompile.ir.program import Program
from tccompile.ir.tensor import Tensor

ZEROS = 512
"""Multiplications with zeros that are worth as much as copying an element: Tensor Cores do 100 to 300 operations in the time in
which memory moves a byte, and a copy is one launch more."""


def gather_channels(program: Program) -> Program:
    e = Editor(program)
    for i, op in enumerate(program.ops):
        if not copies(e, op) or not e.is_private(op.y):
            continue
        (view,), y = op.views, e.tensors[op.y]
        x, readers = e.tensors[view.tensor], _convolutions(e, y)
        if not readers or not _pays(e, x, y, list(readers.values())):
            continue
        order = channels_of(view, x.shape, y.shape)
        if order is None:
            continue
        taken = np.full(x.shape[1], y.shape[1], np.int64)
        taken[order] = np.arange(y.shape[1])
        for r, conv in readers.items():
            e.put(r, replace(with_inputs(e, conv, taken, f"of.{y.name}"), x=x.name))
        e.drop(i)
    return e.result()


def _convolutions(e: Editor, y: Tensor) -> dict[int, Conv]:
    """The convolutions that read the tensor, by their places, if nobody else does and each mixes all of its channels."""
    readers = {i: op for i in e.readers[y.name] if isinstance(op := e.ops[i], Conv) and mixes(e, op, y.name)}
    return readers if len(readers) == len(e.readers[y.name]) else {}


def _pays(e: Editor, x: Tensor, y: Tensor, readers: list[Conv]) -> bool:
    """Whether x can be read in y's place, and zeros for the channels that y leaves out cost less than copying the others."""
    if x.base is not None or x.inner != 1 or y.inner != 1:
        return False
    for_each = (math.prod(e.program.op_shape(op)) * math.prod(e.tensors[op.w].shape[2:]) for op in readers)
    return worth(f"zeros of {y.name}", sum(for_each) * (x.shape[1] - y.shape[1]) <= ZEROS * y.size)
