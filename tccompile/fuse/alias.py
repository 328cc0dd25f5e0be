"""y = copy(x)  =>  y is a view of x"""

from __future__ import annotations

from tccompile.fuse.editor import Editor, copies
from tccompile.ir.expr import Atom, Index, Quotient, Remainder, View, constant
from tccompile.ir.extent import possible
from tccompile.ir.ops import Attention, Conv, Gemm
from tccompile.ir.program import Program
from tccompile.ir.tensor import Tensor, merged

FEW_RESULTS = 8
"""Results of a convolution below which CUDA cores are as good for it as Tensor Cores."""


def alias(program: Program) -> Program:
    e = Editor(program)
    for i, op in enumerate(e.ops):
        if op is None or not copies(e, op):
            continue
        y = e.tensors[op.y]
        if not e.is_private(y.name):
            continue
        view = _as_view(e.tensors[op.views[0].tensor], y, op.views[0], e.grain(y.name))
        can = possible(f"{y.name} as a view", view is not None and _suits_readers(e, view))
        if view is not None and can:
            e.tensors[y.name] = view
            e.viewed.add(view.storage)
            e.drop(i)
    return e.result()


def _suits_readers(e: Editor, view: Tensor) -> bool:
    """Whether those that read it as an operand can: else the copy stays.

    Tensor Cores are fed with rows whose elements lie side by side: Attention's kernels rely on it, and Conv's are those of CUDA
    cores where an image's channels lie apart, which are as good for few results. Gemm's count rows by three strides at most, and
    the matrices of a batch by two.
    """
    for i in e.readers[view.name]:
        op = e.ops[i]
        if isinstance(op, Attention) and view.strides[-1] != 1:
            return False
        if isinstance(op, Conv) and op.x == view.name and view.strides[1] != 1 and e.tensors[op.w].shape[0] >= FEW_RESULTS:
            return False
        if isinstance(op, Gemm):
            a, b = (view if name == view.name else e.tensors[name] for name in op.operands)
            batch = merged(a.shape[:-2], [a.strides[:-2], b.strides[:-2]]) if b.rank > 2 else []
            rows = merged(a.shape[:-1], [a.strides[:-1]]) if b.rank == 2 else []
            if len(batch) > 2 or len(rows) > 3:
                return False
    return True


def _as_view(x: Tensor, y: Tensor, view: View, grain: int) -> Tensor | None:
    """`y` as a view of `x` with padding that is there and zero, at a multiple of `grain` elements; or None."""
    address = constant(0)
    for index, stride in zip(view.index, x.strides, strict=True):
        address = address + index * stride
    affine = _rejoined(address).affine
    if affine is None or any(k <= 0 for k in affine.values()):
        return None
    strides = tuple(affine.get(a, 1) if n > 1 else 1 for a, n in enumerate(y.shape))
    if any(n > 1 and a not in affine for a, n in enumerate(y.shape)):
        return None  # a broadcast
    offset = _rejoined(address).constant
    padded = list(y.shape)
    if x.inner is not None:
        index = view.index[x.inner]
        lo, hi = index.bounds(y.shape)
        lanes = [a for a, k in affine.items() if k == 1]
        if x.padded == x.shape and lanes and not (y.shape[lanes[0]] % grain or x.offset % grain or offset % grain):
            return Tensor(y.name, y.shape, y.dtype, y.shape, strides, x.storage, x.offset + offset)  # heads of a row, say
        if index.affine is None or len(index.terms) > 1 or (index.terms and not lanes) or lo % grain or x.offset % grain:
            return None
        if hi == x.shape[x.inner] - 1:  # reaches the end: x's padding is y's
            if lanes:
                padded[lanes[0]] += x.padded[x.inner] - x.shape[x.inner]
            elif x.padded[x.inner] != 1:
                return None
        elif not lanes or y.shape[lanes[0]] % grain:
            return None
    return Tensor(y.name, y.shape, y.dtype, tuple(padded), strides, x.storage, x.offset + offset)


def _rejoined(index: Index) -> Index:
    """k·d·floor(e/d) + k·(e mod d) = k·e, as often as it applies: what a reshape of neighbouring axes leaves."""
    terms = dict(index.terms)
    for atom, k in index.terms:
        if isinstance(atom, Remainder):
            whole = _whole_of(atom)
            if terms.get(whole) == k * atom.divisor:
                rest = index - Index(((atom, k),)) - Index(((whole, k * atom.divisor),))
                return _rejoined(rest + atom.index * k)
    return index


def _whole_of(atom: Remainder) -> Atom:
    """floor(e / d) for e mod d, as `quotient` writes it where it does not simplify."""
    (term, *more) = atom.index.terms
    if not more and not atom.index.constant and isinstance(term[0], Quotient) and term[1] == 1:
        return Quotient(term[0].index, term[0].divisor * atom.divisor)
    return Quotient(atom.index, atom.divisor)
