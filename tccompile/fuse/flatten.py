"""gemm(flatten(x), w)  =>  gemm(view(x), permuted w)"""

from __future__ import annotations

import math
from dataclasses import replace

from tccompile.fuse.editor import Editor
from tccompile.ir.expr import canonical_view, load, reshape_view
from tccompile.ir.ops import Gemm, Pointwise
from tccompile.ir.program import Program
from tccompile.ir.weights import transform


def flatten_into_weights(program: Program) -> Program:
    """An image flattened in the model's order (C, H, W) lies in memory as (H, W, C): reorder the weights' columns instead."""
    e = Editor(program)
    for i, gemm in enumerate(e.ops):
        if not isinstance(gemm, Gemm) or gemm.b not in e.constants or len(e.readers[gemm.a]) != 1 or not e.is_private(gemm.a):
            continue
        flatten = e.writer(gemm.a)
        if not isinstance(flatten, Pointwise) or flatten.epilogue.expr != load(0) or len(flatten.views) != 1:
            continue
        x, a, b = e.tensors[flatten.views[0].tensor], e.tensors[gemm.a], e.tensors[gemm.b]
        image = x.rank >= 3 and x.inner == 1 and a.rank == 2 and a.shape[0] == x.shape[0]
        if not image or x.base is not None or x.name in e.program.inputs or x.padded != x.shape or math.prod(x.shape[2:]) == 1:
            continue
        if flatten.views[0] != canonical_view(reshape_view(x.name, x.shape, a.shape), a.shape):
            continue
        rows, axes = b.shape[0], (0, *range(2, x.rank), 1)
        recipe = transform("reshape", e.constants[b.name], shape=(rows, *x.shape[1:]))
        recipe = transform("reshape", transform("transpose", recipe, axes=axes), shape=b.shape)
        e.add_constant(replace(b, name=f"{b.name}.hwc"), recipe)
        e.tensors[a.name] = replace(a, padded=a.shape, strides=(a.shape[1], 1), base=x.name)
        e.put(i, gemm.renamed({b.name: f"{b.name}.hwc"}))
        e.drop(e.position[a.name])
    return e.result()
