"""Sizes that are computed of the data themselves: of what is made in them, and of parts from computed places on."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import onnx
import onnx.helper

from tccompile.errors import UnsupportedError
from tccompile.ir.extent import round_up
from tccompile.load.constants import literal
from tccompile.load.counted.reach import reach
from tccompile.load.sizes import INT64, Number, Size, Sizes
from tccompile.load.valid import title

LATE = {
    "ConstantOfShape": (0,), "Expand": (1,), "OneHot": (1,), "Pad": (1,), "Range": (1,), "Resize": (3,), "Slice": (1, 2),
    "Tile": (1,), "TopK": (1,),
}  # fmt: skip
"""By operator, the inputs that hold sizes or places, which may be computed."""

WHOLE, VECTOR = 64, 8
"""Bounds of more elements than this are multiples of those that a thread reads at once."""


def numbers(s: Sizes, i: int, most: float = math.inf) -> tuple[Number, ...] | None:
    """What the node's input i holds; what is computed is a size, with a bound that follows from what it is computed of.

    `most` is what it cannot be more than.
    """
    name = s.node.input[i] if i < len(s.node.input) else ""
    found = s.number(name) if name else None
    if found is not None or not name:
        return found
    plain = len(s.shape(name)) < 2 and not s.of(name) and s.folder.type_of(name, s.node).dtype.kind in "iu"
    return tuple(_elements(s, name, most)) if plain else None


def _elements(s: Sizes, name: str, most: float) -> list[Number]:
    found, node = s.number(name), s.maker(name)
    if found is not None:
        return list(found)
    if node is not None and node.op_type == "Concat":
        return [n for part in node.input for n in _elements(s, part, most)]
    if node is not None and node.op_type in ("Unsqueeze", "Squeeze", "Identity", "Reshape", "Cast"):
        source = s.folder.type_of(node.input[0], s.node)
        if math.prod(source.shape) == 1 and source.dtype.kind in "iu":
            return _elements(s, node.input[0], most)
    return [_size(s, name, i, most) for i in range(math.prod(s.shape(name)))]


def _size(s: Sizes, name: str, i: int, most: float) -> Size:
    """Element i of a tensor, as how much there is of something: not less than nothing."""
    high, said = min(reach(s, name)[1], most), s.limit()
    limited = said is not None and said < high
    if not limited and high >= 2**31:
        raise UnsupportedError(
            f"{title(s.node)}: {name!r} is computed at run time, and says how much there is: say how much that is at most, with "
            f"--limit {s.node.name or s.node.output[0]}=N; or end the model before it"
        )
    key = "late", name, i, said if limited else most
    if key not in s.made:
        count = s.add("Cast", [name], to=INT64) if s.elem(name) != INT64 else name
        count = s.add("Reshape", [count, s.constant([-1])])
        if math.prod(s.shape(name)) > 1:
            count = s.add("Slice", [count, s.constant([i]), s.constant([i + 1])])
        count = s.add("Max", [count, s.constant([0])])
        bound = max(int(said if limited and said is not None else high), 0)
        if not limited and bound > WHOLE and math.isinf(most):
            bound = round_up(bound, VECTOR)
        s.made[key] = s.size(count, bound, limited)
    return s.made[key]  # type: ignore[no-any-return]


def parts(s: Sizes, node: onnx.NodeProto) -> bool:
    """Slice, from computed places on or to them, in steps of one: True if that was so."""
    x, (count, *more) = node.input[0], s.shape(node.input[1]) or (0,)
    if more or s.shape(node.input[2]) != (count,):
        return False
    axes, steps = s.integers(3, range(count)), s.integers(4, [1] * count)
    if axes is None or steps is None or any(step != 1 for step in steps):
        return False
    for i, axis in enumerate(axes):
        x = part(s, x, axis % len(s.shape(x)), _end(s, node.input[1], i), _end(s, node.input[2], i))
    s.instead("Identity", [x])
    return s.says(node.output[0], s.of(x)) or True


def _end(s: Sizes, name: str, i: int) -> str | Number:
    known = s.number(name)
    if known is not None:
        return known[i]
    return s.add("Slice", [name, s.constant([i]), s.constant([i + 1])]) if s.shape(name) != (1,) else name


def part(s: Sizes, x: str, axis: int, start: str | Number, end: str | Number) -> str:
    """What there is of x from a computed place on, to another: places are from the end if they are negative."""
    shape, own = s.shape(x), dict(s.of(x))
    whole = own.pop(axis, shape[axis])
    extent = whole.count if isinstance(whole, Size) else s.constant([whole])

    def inside(place: str | Number) -> str:
        if isinstance(place, Size):
            place = place.count
        if place == 0 or (isinstance(place, int) and place >= shape[axis]):
            return extent if place else s.constant([0])
        at = s.constant([place]) if isinstance(place, int) else s.add("Reshape", [place, s.constant([1])])
        if s.elem(at) != INT64:
            at = s.add("Cast", [at], to=INT64)
        at = s.add("Where", [s.add("Less", [at, s.constant([0])]), s.add("Add", [at, extent]), at])
        return s.add("Min", [s.add("Max", [at, s.constant([0])]), extent])

    first, limit = inside(start), shape[axis]
    if start == 0 and isinstance(end, Size):  # as many as of something else, or as there are
        size = s.combined("Min", end, whole)
        limit = size.limit if isinstance(size, Size) else size
    else:
        size = s.size(s.add("Max", [s.add("Sub", [inside(end), first]), s.constant([0])]), limit)
    at = s.add("Min", [s.add("Add", [s.constant(np.arange(limit)), first]), s.constant([max(shape[axis] - 1, 0)])])
    with s.as_bounds(x):
        y = s.add("Gather", [x, at], axis=axis)
    s.says(y, {**own, axis: size} if isinstance(size, Size) else own)
    return y


def tiled(s: Sizes, node: onnx.NodeProto) -> bool:
    """Tile as often as the data say: False if how often is known."""
    x, repeats = node.input[0], numbers(s, 1)
    if repeats is None or len(repeats) != len(s.shape(x)) or not any(isinstance(n, Size) for n in repeats):
        return False
    for axis, n in enumerate(repeats):
        if axis in s.of(x) and n != 1:
            raise s.refuse(x, axis)
        extent, own = s.shape(x)[axis], dict(s.of(x))
        if n != 1 and extent:
            bound = extent * (n.limit if isinstance(n, Size) else n)
            with s.as_bounds(x):
                x = s.add("Gather", [x, s.constant(np.arange(bound) % extent)], axis=axis)
            made = s.combined("Mul", n, extent)
            s.says(x, {**own, **({axis: made} if isinstance(made, Size) else {})})
    s.instead("Identity", [x])
    return s.says(node.output[0], s.of(x)) or True


def widened(s: Sizes, node: onnx.NodeProto) -> bool:
    """Pad by a number on either side, as far as the data say: False if how far is known, or it is otherwise."""
    x = node.input[0]
    axes, pads = s.integers(3, range(len(s.shape(x)))), numbers(s, 1)
    value = s.folder.values(node.input[2]) if len(node.input) > 2 and node.input[2] else np.zeros(())
    constant = s.attribute("mode", b"constant") == b"constant"
    if pads is None or not any(isinstance(n, Size) for n in pads):
        return False
    if axes is None or value is None or not constant or len(pads) != 2 * len(axes):
        return False
    for i, axis in enumerate(axes):
        ends = pads[i], pads[i + len(axes)]
        if any(isinstance(n, int) and n < 0 for n in ends):
            raise UnsupportedError(
                f"{title(node)}: a pad below 0 beside computed ones is not supported: slice its input in its place"
            )
        before, after = (_filled(s, x, axis % len(s.shape(x)), n, value) for n in ends)
        if before or after:
            x = s.add("Concat", [part for part in (before, x, after) if part], axis=axis)
    s.instead("Identity", [x])
    return s.says(node.output[0], s.of(x)) or True


def _filled(s: Sizes, x: str, axis: int, n: Number, value: np.ndarray) -> str:
    """So many rows along an axis of one number, as there are beside x; empty if there are none."""
    shape, dtype = list(s.shape(x)), s.folder.type_of(x, s.node).dtype
    shape[axis] = n.limit if isinstance(n, Size) else n
    if not shape[axis]:
        return ""
    y = s.fresh(f"{s.node.output[0]}/filled")
    s.folder.set_constant(y, literal("", np.full(shape, value.item(), dtype)))
    others = {a: size for a, size in s.of(x).items() if a != axis}
    s.says(y, {**others, **({axis: n} if isinstance(n, Size) else {})})
    return y


def packed(s: Sizes, x: str, axes: Sequence[int]) -> str:
    """x with these axes, one behind the other, as one, whose elements lie together: it has as many as there are of all."""
    shape, own = s.shape(x), dict(s.of(x))
    first, last = axes[0], axes[-1]
    sizes: list[Number] = [own.get(a, shape[a]) for a in axes]
    total, bounds = s.combined("Mul", 1, 1), [shape[a] for a in axes]
    for n in sizes:
        total = s.combined("Mul", n, total)
    assert isinstance(total, Size)
    rest, place, step = s.constant(np.arange(math.prod(bounds))), s.constant([0]), math.prod(bounds)
    for k, bound in enumerate(bounds):
        step //= bound
        inner = s.combined("Mul", 1, 1)
        for n in sizes[k + 1 :]:
            inner = s.combined("Mul", n, inner)
        inner_count = s.add("Max", [inner.count, s.constant([1])]) if isinstance(inner, Size) else s.constant([inner])
        here = s.add("Min", [s.add("Div", [rest, inner_count]), s.constant([bound - 1])])
        rest = s.add("Mod", [rest, inner_count])
        place = s.add("Add", [place, s.add("Mul", [here, s.constant([step])])])
    with s.as_bounds(x):
        flat = s.add("Reshape", [x, s.constant([*shape[:first], math.prod(bounds), *shape[last + 1 :]])])
        y = s.add("Gather", [flat, place], axis=first)
    s.made["packed", y] = x, tuple(axes)
    gone = len(axes) - 1
    kept = {a if a < first else a - gone: n for a, n in own.items() if a not in axes}
    s.says(y, {**kept, first: total})
    return y
