"""y = x · w, where of every four neighbouring weights along K two are zero  =>  the same, of half of the weights and their places

Sparse Tensor Cores multiply such weights in half the time. The compressed weights are a form of the constant, which a kernel's
config may read in its place; the CPU engine, and kernels without sparse products, read the constant itself.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import replace

import numpy as np

from tccompile.ir import sparse
from tccompile.ir.forms import Sparse
from tccompile.ir.ops import Conv, Gemm, Op
from tccompile.ir.program import Program
from tccompile.ir.tensor import dense
from tccompile.ir.types import FLOAT8, DType
from tccompile.ir.weights import Recipe, Source, evaluate, leaves, transform

TYPES = (DType.F16, DType.I8, *FLOAT8)
"""Of weights that some kernel multiplies in their compressed form."""


def compress(program: Program, weights: Mapping[str, np.ndarray]) -> Program:
    """The program with a compressed form of the weights of each convolution of one group, and of each product with a matrix, that
    are 2:4. `weights` are the model's."""
    names = dict.fromkeys(filter(None, (_weights(op, program) for op in program.ops)))
    found = ((name, program.constants[name], program.tensors[name].shape) for name in names)
    return offered(program, [n for n, r, shape in found if _may_be(r, shape, weights) and sparse.is_sparse(evaluate(r, weights))])


def offered(program: Program, names: Iterable[str]) -> Program:
    """The program with a compressed form of each of these weights, which are 2:4."""
    tensors, constants, forms = dict(program.tensors), dict(program.constants), dict(program.forms)
    for name in names:
        w, recipe = tensors[name], constants[name]
        whole = sparse.whole(w.dtype)
        form = Sparse(f"{name}.2of4", f"{name}.2of4 places")
        of_values, of_places = sparse.shapes(w.shape, whole)
        tensors[form.tensor], tensors[form.places] = (
            dense(form.tensor, of_values, w.dtype),
            dense(form.places, of_places, DType.U8),
        )
        constants[form.tensor] = transform("sparse_values", recipe, whole=whole)
        constants[form.places] = transform("sparse_places", recipe, whole=whole)
        forms[name] = *forms.get(name, ()), form
    return replace(program, tensors=tensors, constants=constants, forms=forms)


def _weights(op: Op, program: Program) -> str | None:
    """The constant that an op multiplies by, if kernels may take it compressed."""
    name = op.w if isinstance(op, Conv) and op.groups == 1 else op.b if isinstance(op, Gemm) else None
    if name is None or name not in program.constants:
        return None
    w = program.tensors[name]
    return name if w.dtype in TYPES and (isinstance(op, Conv) or w.rank == 2) and w.size and w.shape[1] >= 4 else None


def _may_be(recipe: Recipe, shape: tuple[int, ...], weights: Mapping[str, np.ndarray]) -> bool:
    """Whether so much of something that the weights (O, C, …) are made of is zero that they may be 2:4: if not, they need not be
    made to know that they are not."""
    channels, size = shape[1], math.prod(shape)
    most = channels // 4 * 2 + min(channels % 4, 2)  # of a row's, that differ from zero
    for leaf in leaves(recipe):
        values = weights[leaf.name] if isinstance(leaf, Source) else leaf.values
        if 2 * values.size >= size and channels * np.count_nonzero(values) <= most * values.size:
            return True
    return False
