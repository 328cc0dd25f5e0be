"""conv(x, w) in g groups  =  conv(x, w') in g / j groups, with the weights of j neighbouring groups on the diagonal of w'

Tensor Cores are fed with 8 channels at once, and their tiles have 16 columns and more. Groups that are no multiple of 8 wide, or
narrow, are multiplied together with some of their neighbours: what is multiplied with zeros costs less than what stands still.
Which way is fastest depends on the generation, so each kernel's candidates have all of them, and the plan holds what is chosen.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import replace

import numpy as np

from tccompile.fuse.editor import Editor, channels_of, without_dead_code
from tccompile.fuse.epilogues import with_epilogue
from tccompile.fuse.gather import ZEROS
from tccompile.ir.forms import Form, Grouped
from tccompile.ir.ops import Conv, Pointwise
from tccompile.ir.program import Program
from tccompile.ir.tensor import Tensor, dense, per_row
from tccompile.ir.types import DType
from tccompile.ir.weights import Literal, Recipe, transform

WIDE = 64
"""Channels of joined groups beyond which wider ones only multiply more zeros, unless all groups become one: wgmma's kernel
takes convolutions of one group only."""

LARGE = 1 << 20
"""Elements of joined weights beyond which only the narrowest that Tensor Cores can be fed with are worth their memory: a network
of many such layers, 400 channels in groups of 16, would have four times the weights for a tenth of the time."""


def absorb_shuffles(program: Program) -> Program:
    """shuffle_channels(conv(x, w))  =>  conv(x, permuted w'), where all groups become one, for convolutions in fp16"""
    e = Editor(program)
    for i, op in enumerate(program.ops):
        for view in op.views if isinstance(op, Pointwise) else ():
            conv, x, y = e.writer(view.tensor), e.tensors[view.tensor].shape, e.tensors[op.y].shape
            if not isinstance(conv, Conv) or x != y or channels_of(view, x, y) is None:
                continue
            whole = _in_one_group(e, conv)
            assert isinstance(op, Pointwise)
            if whole is not None and (merged := with_epilogue(e, whole, op)) is not None:
                e.drop(e.position[conv.y])
                e.put(i, merged)
                break
    return without_dead_code(e.result())


def _in_one_group(e: Editor, conv: Conv) -> Conv | None:
    """The convolution with all groups joined; None if it is not for Tensor Cores, or that costs more than copying its result."""
    w = e.tensors[conv.w]
    zeros = (conv.groups - 1) * math.prod(w.shape[1:])  # for each result
    if conv.groups == 1 or zeros > ZEROS or not _is_joinable(conv, e.tensors, e.constants):
        return None
    t, recipe = _joined(w, e.constants[w.name], Grouped(_name(w.name, 1, conv.groups), 1, conv.groups))
    e.add_constant(t, recipe)
    return replace(conv, w=t.name, groups=1)


def join_groups(program: Program) -> Program:
    """The program with joined weights as forms of those of each grouped convolution in fp16. Depthwise ones have kernels of their
    own.
    """
    tensors, constants = dict(program.tensors), dict(program.constants)
    forms: dict[str, tuple[Form, ...]] = {}
    for op in program.ops:
        if isinstance(op, Conv) and op.groups > 1 and _is_joinable(op, program.tensors, program.constants):
            for together in _ways(tensors[op.w], op.groups):
                groups = op.groups // together
                form = Grouped(_name(op.w, groups, op.groups), groups, op.groups)
                if form not in forms.get(op.w, ()):
                    tensors[form.tensor], constants[form.tensor] = _joined(tensors[op.w], constants[op.w], form)
                    forms[op.w] = *forms.get(op.w, ()), form
    return replace(program, tensors=tensors, constants=constants, forms=forms)


def _name(w: str, groups: int, of: int) -> str:
    return f"{w}.{groups}of{of}"


def _is_joinable(op: Conv, tensors: Mapping[str, Tensor], constants: Collection[str]) -> bool:
    """Whether it is for Tensor Cores, has constant weights, and is no depthwise convolution."""
    w = tensors[op.w]
    return op.w in constants and w.dtype is tensors[op.x].dtype in (DType.F16, DType.BF16) and w.shape[:2] != (op.groups, 1)


def _joined(w: Tensor, recipe: Recipe, form: Grouped) -> tuple[Tensor, Recipe]:
    """The tensor and the recipe of a form of the weights `w`."""
    together = form.of // form.groups
    shape = (w.shape[0], together * w.shape[1], *w.shape[2:])
    return dense(form.tensor, shape, w.dtype, w.order), _diagonal(recipe, w.shape, form.of, together)


def _ways(w: Tensor, groups: int) -> list[int]:
    """How many neighbours of a convolution by `w` to join: those that Tensor Cores can be fed with, whole rows of them."""
    outputs, channels, size, row = w.shape[0] // groups, w.shape[1], w.size, per_row(w.dtype)
    whole = [j for j in range(1, groups + 1) if groups % j == 0 and not (j * channels % row or j * outputs % row)]
    ways = sorted({*whole, groups})  # all of them may have padding
    worth = [j for j in ways if (j * channels <= WIDE or j == groups) and j * size <= LARGE]
    return [j for j in sorted({ways[0], *worth}) if j > 1]


def _diagonal(w: Recipe, shape: tuple[int, ...], groups: int, together: int) -> Recipe:
    """(O, C, R, S) as (O, together · C, R, S): a group's weights at its own channels, zeros at its neighbours'."""
    outputs, channels, *taps = shape
    apart = transform("reshape", w, shape=(groups // together, together, outputs // groups, 1, channels * math.prod(taps)))
    own = np.eye(together, dtype=np.float16).reshape(1, together, 1, together, 1)
    return transform("reshape", transform("mul", apart, Literal(own)), shape=(outputs, together * channels, *taps))
