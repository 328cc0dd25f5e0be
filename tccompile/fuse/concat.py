"""f(concat(x, y), z)  =>  concat(f(x, z), f(y, z)), each part with its own of z
concat(f(x), g(y))   =>  f and g write into slices of one tensor
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from tccompile.fuse.editor import Editor, copies, fits, names, shifted, tidy
from tccompile.ir.expr import View, canonical_view, constant, coord, identity_view, load, substitute
from tccompile.ir.extent import possible
from tccompile.ir.ops import Op, Pointwise
from tccompile.ir.program import Program
from tccompile.ir.tensor import Tensor, translated


def into_parts(program: Program) -> Program:
    """What is computed of a concatenation goes into what writes its parts: the tokens of an image beside one more, say, and all
    their positions added. A part is copied anyway, or its own writer writes it, with an epilogue then.
    """
    while (changed := _one_into_parts(program)) is not None:
        program = changed
    return program


def _one_into_parts(program: Program) -> Program | None:
    e = Editor(program)
    parts: dict[str, list[Op]] = {}
    for op in program.ops:
        if (base := e.tensors[op.y].base) is not None:
            parts.setdefault(base, []).append(op)
    for i, f in enumerate(program.ops):
        if not isinstance(f, Pointwise) or not e.is_private(f.y):
            continue
        for number, view in enumerate(f.views):
            whole = e.tensors[view.tensor]
            written = parts.get(whole.name, [])
            if any(whole.name in v.tensors for n, v in enumerate(f.views) if n != number):
                continue  # neighbours in other parts too
            if e.readers[whole.name] != {i} or not _is_concatenation(e, whole, written) or not _lies_as(e, f, view, whole):
                continue
            new = [made for op in written if (made := _of_part(e, f, number, op, whole)) is not None]
            if len(new) < len(written):
                continue
            y = e.tensors[f.y]
            for op, made in zip(written, new, strict=True):
                e.tensors[made.y] = replace(e.tensors[op.y], name=made.y, dtype=y.dtype, base=y.name)
            before = [op for op in program.ops[:i] if op not in written]
            return replace(program, tensors=e.tensors, ops=(*before, *new, *program.ops[i + 1 :]))
    return None


def _is_concatenation(e: Editor, whole: Tensor, parts: list[Op]) -> bool:
    """Whether `whole` is ours and made of just these parts, none of which is read by itself."""
    views = {t.name for t in e.tensors.values() if t.base == whole.name} if parts else set()
    ours = whole.base is None and not {whole.name} & {*e.program.inputs, *e.program.outputs, *e.constants, *e.position}
    return bool(parts) and ours and views == {op.y for op in parts} and not any(e.readers[name] for name in views)


def _lies_as(e: Editor, f: Pointwise, view: View, x: Tensor) -> bool:
    """Whether f's result has the shape and layout of x, which it reads element by element."""
    y = e.tensors[f.y]
    same = (x.shape, x.padded, x.strides) == (y.shape, y.padded, y.strides)
    return same and view == canonical_view(identity_view(x.name, x.rank), x.shape)


def _of_part(e: Editor, f: Pointwise, number: int, op: Op, whole: Tensor) -> Pointwise | None:
    """`f` of what `op` copies into a part of `whole`, which is the view `number` of f; None if something else reads that copy's
    source too, which could then be written into the part at once.
    """
    part = e.tensors[op.y]
    if not isinstance(op, Pointwise) or op.epilogue.expr.dtype is not whole.dtype.compute:
        return None
    if any(len(e.readers[v.tensor]) > 1 and v.tensor in e.position for v in op.views):
        return None
    start, rest = [0] * whole.rank, part.offset
    for axis in whole.order:
        if whole.padded[axis] > 1:
            start[axis], rest = rest // whole.strides[axis], rest % whole.strides[axis]
    index = [coord(a) + n if part.shape[a] > 1 else constant(n) for a, n in enumerate(start)]
    others = tuple(canonical_view(v.at(index, part.shape), part.shape) for v in f.views)
    body = shifted(op.epilogue.expr, len(others))
    expr = substitute(f.epilogue.expr, {load(number, whole.dtype.compute): body})
    epilogue = tidy(expr, others + op.views)
    if not fits(epilogue):
        return None
    return replace(f, y=f"{f.y}{op.y.removeprefix(whole.name)}", epilogue=epilogue, nodes=names(f, op))


@dataclass(frozen=True)
class Piece:
    """One input of a concatenation: the op that copies `source` into `slice`."""

    position: int
    source: str
    slice: Tensor


def elide_concat(program: Program) -> Program:
    """Largest concatenations first: a smaller one whose inputs then lie side by side becomes a view of the larger."""
    e = Editor(program)
    pieces: dict[str, list[Piece]] = {}
    for i, op in enumerate(e.ops):
        if op is None:
            continue
        y = e.tensors[op.y]
        if (
            y.base is not None
            and copies(e, op)
            and e.tensors[op.views[0].tensor].shape == y.shape
            and op.views[0] == canonical_view(identity_view(op.views[0].tensor, y.rank), y.shape)
        ):
            pieces.setdefault(y.base, []).append(Piece(i, op.views[0].tensor, y))
    for parent in sorted(pieces, key=lambda name: -e.tensors[name].span):
        if e.tensors[parent].base is None and not _joins_neighbours(e, parent, pieces[parent]):
            for piece in pieces[parent]:
                _write_in_place(e, piece)
    return e.result()


def _writers(e: Editor, parent: str) -> list[int]:
    return [i for name, i in e.position.items() if name == parent or e.tensors[name].base == parent]


def _joins_neighbours(e: Editor, parent: str, pieces: list[Piece]) -> bool:
    """Make `parent` a view if its inputs already lie in one tensor as they would lie in `parent`; else False."""
    whole = e.tensors[parent]
    if len(_writers(e, parent)) != len(pieces) or parent in e.program.outputs:
        return False
    first = e.tensors[pieces[0].source]
    if first.base is None:
        return False
    start = first.offset - pieces[0].slice.offset
    for p in pieces:
        source = e.tensors[p.source]
        if source.base != first.base or source.strides != first.strides or source.offset - p.slice.offset != start:
            return False
    last = pieces[-1]
    if e.tensors[last.source].padded != last.slice.padded or start < 0:
        return False
    if any(t.base == parent and t.strides != whole.strides for t in e.tensors.values()):
        return False
    moved = replace(whole, strides=first.strides, base=first.base, offset=start)
    e.tensors[parent] = moved
    for name, t in list(e.tensors.items()):  # views of the former parent are now views of its base
        if t.base == parent:
            e.tensors[name] = _moved(t, whole, moved)
    for p in pieces:
        e.drop(p.position)
    return True


def _moved(view: Tensor, old: Tensor, new: Tensor) -> Tensor:
    """A view of `old` with old's strides, when `old` itself has become the view `new`: the same elements."""
    return replace(view, strides=new.strides, base=new.base, offset=new.offset + translated(view.offset, old, new))


def _write_in_place(e: Editor, piece: Piece) -> None:
    """Let the op that writes the source write the slice itself, where the source's lanes stay aligned in it."""
    source, part = e.tensors[piece.source], piece.slice
    if not e.is_private(source.name) or e.writer(source.name) is None or source.inner != part.inner:
        return
    lanes, fits = source.inner, True
    if lanes is not None:
        grain = e.grain(part.name, source.name)
        alike = all(n == m or a == lanes for a, (n, m) in enumerate(zip(source.padded, part.padded, strict=True)))
        fits = alike and not (part.offset % grain or part.padded[lanes] % grain)
    if not possible(f"{source.name} in its place", fits):
        return
    if any(t.base == source.name for t in e.tensors.values()):
        return
    e.tensors[source.name] = replace(part, name=source.name)
    e.drop(piece.position)
