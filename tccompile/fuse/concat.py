"""concat(f(x), g(y))  =>  f and g write into slices of one tensor"""

from __future__ import annotations

from dataclasses import dataclass, replace

from tccompile.expr import identity_view
from tccompile.fuse.editor import Editor, canonical_view, copies
from tccompile.program import PAD, Program, Tensor


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
    offset, rest = new.offset, view.offset
    for axis in sorted(range(old.rank), key=lambda a: -old.strides[a]):
        if old.padded[axis] > 1:
            offset, rest = offset + rest // old.strides[axis] * new.strides[axis], rest % old.strides[axis]
    return replace(view, strides=new.strides, base=new.base, offset=offset)


def _write_in_place(e: Editor, piece: Piece) -> None:
    """Let the op that writes the source write the slice itself, where the source's lanes stay aligned in it."""
    source, part = e.tensors[piece.source], piece.slice
    if not e.is_private(source.name) or e.writer(source.name) is None or source.inner != part.inner:
        return
    lanes = source.inner
    if lanes is not None and (part.offset % PAD or part.padded[lanes] % PAD or source.padded != part.padded):
        return
    if any(t.base == source.name for t in e.tensors.values()):
        return
    e.tensors[source.name] = replace(part, name=source.name)
    e.drop(piece.position)
