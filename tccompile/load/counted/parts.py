"""Operators that take parts of what there is, and put it together."""

from __future__ import annotations

import numpy as np
import onnx
import onnx.helper

from tccompile.load.constants import held
from tccompile.load.counted.begin import with_room
from tccompile.load.counted.elements import along_others
from tccompile.load.counted.late import parts
from tccompile.load.sizes import INT64, SMALL, Axes, Number, Size, Sizes
from tccompile.load.types import Type


def sliced(s: Sizes, node: onnx.NodeProto) -> bool:
    """The first elements along such an axis, those after some, or as many of others as the data say."""
    x = node.input[0]
    shape, own = s.shape(x), dict(s.of(x))
    starts, ends = s.number(node.input[1]), s.number(node.input[2])
    if (starts is None or ends is None) and parts(s, node):
        return True
    if starts is None or ends is None or (len(node.input) > 3 and node.input[3] and s.integers(3) is None):
        for axis in own:
            raise s.refuse(x, axis, "its starts or ends are computed")
        return False
    axes = s.integers(3, range(len(starts))) or []
    steps = s.integers(4, [1] * len(starts)) or []
    first, last, changed = list(starts), list(ends), False
    for i, (axis, step) in enumerate(zip(axes, steps, strict=True)):
        axis %= len(shape)
        if axis not in own and isinstance(starts[i], int) and isinstance(ends[i], int):
            continue
        whole: Number = own.pop(axis, shape[axis])
        start, end = starts[i], ends[i]
        if step != 1 or not isinstance(start, int) or start < 0:
            if axis in s.of(x):
                raise s.refuse(x, axis, f"it is sliced from {start} in steps of {step}")
            return False
        end = s.combined("Sub", whole, -end) if isinstance(end, int) and end < 0 else s.combined("Min", whole, end)
        made = s.combined("Sub", end, start)
        first[i], last[i], changed = start, start + (made.limit if isinstance(made, Size) else made), True
        if isinstance(made, Size):
            own[axis] = made
    if changed:
        node.input[:] = [x, *map(s.constant, (first, last, axes, steps))]
    return s.says(node.output[0], own)


def in_range(s: Sizes, indices: str) -> str:
    """Indices of which those that are not there are 0: what they are computed from need not have been meant for it."""
    if indices in s.safe or indices in s.folder.constants:
        return indices
    y = indices
    for axis in list(s.of(indices)):
        y = s.masked(y, axis, 0)
    s.says(y, s.of(indices))
    return y


def gather(s: Sizes, node: onnx.NodeProto) -> bool:
    """Elements at indices; those along such an axis are counted from its beginning or from the end of what is there."""
    x, indices = node.input[0], in_range(s, node.input[1])
    node.input[1] = indices
    axis, rank = s.attribute("axis", 0) % max(len(s.shape(x)), 1), len(s.shape(indices))
    own = s.of(x).get(axis)
    if own is not None:
        if indices in s.folder.constants and indices not in s.safe:
            raise s.refuse(x, axis, "its indices are constant, and there may be no such elements")
        node.input[1] = from_beginning(s, indices, own.count)
    out = {a if a < axis else a + rank - 1: size for a, size in s.of(x).items() if a != axis}
    out |= {axis + a: size for a, size in s.of(indices).items()}
    return s.says(node.output[0], out)


def gather_each(s: Sizes, node: onnx.NodeProto) -> bool:
    """Of each row of x elements at that row's indices."""
    x, at = node.input
    axis, shape = s.attribute("axis"), s.shape(x)
    s.folder.types[node.output[0]] = Type(s.elem(x), (*shape[:axis], *s.shape(at)[1:], *shape[axis + 1 :]))
    s.folder.kept.append(node)
    return True


def from_beginning(s: Sizes, indices: str, ends: str) -> str:
    """Indices of which none is negative: those are counted from `ends`, which has one number or one for each column."""
    if s.elem(indices) != INT64:
        indices = s.add("Cast", [indices], to=INT64)
    if s.shape(indices)[-1:] == (1,) or not s.shape(indices):
        ends = s.add("Reshape", [ends, s.constant(np.zeros(0) if not s.shape(indices) else [1])])
    return s.add("Where", [s.add("Less", [indices, s.constant(0)]), s.add("Add", [indices, ends]), indices])


def gather_elements(s: Sizes, node: onnx.NodeProto) -> bool:
    x, indices = node.input[0], in_range(s, node.input[1])
    node.input[1] = indices
    axis = s.attribute("axis", 0) % len(s.shape(x))
    for a, size in s.of(x).items():
        if a != axis and s.of(indices).get(a) != size:
            raise s.refuse(x, a, "its indices are of another length")
    if axis in s.of(x):
        counted = s.of(indices)
        node.input[1] = from_beginning(s, indices, s.of(x)[axis].count)
        return s.says(node.output[0], counted)
    return s.says(node.output[0], s.of(indices))


def gather_nd(s: Sizes, node: onnx.NodeProto) -> bool:
    """Rows of indices; of the first axes there is all that they name."""
    x, indices = node.input[0], in_range(s, node.input[1])
    node.input[1] = indices
    given, depth = len(s.shape(indices)), s.shape(indices)[-1]
    if s.attribute("batch_dims", 0) or given - 1 in s.of(indices):
        for name in (x, indices):
            for a in s.of(name):
                raise s.refuse(name, a)
    if any(a < depth for a in s.of(x)):  # indices from the end are from that of what there is
        ends = [s.of(x)[a].count if a in s.of(x) else s.constant([n]) for a, n in enumerate(s.shape(x)[:depth])]
        node.input[1] = from_beginning(s, indices, s.add("Concat", ends, axis=0))
    out = {a - depth + given - 1: size for a, size in s.of(x).items() if a >= depth} | s.of(indices)
    return s.says(node.output[0], out)


def concat(s: Sizes, node: onnx.NodeProto) -> bool:
    """Along other axes as elements are; along such an axis, one after the other."""
    rank = len(s.shape(node.input[0]))
    axis = s.attribute("axis") % max(rank, 1)
    for a in range(rank):
        there = [s.of(x).get(a, s.shape(x)[a]) for x in node.input]
        known = [n for n in there if isinstance(n, int)]
        if a != axis and known and len(known) < len(there):  # all must have as many: what is known holds for the others
            node.input[:] = [_as_many(s, x, a, known[0]) for x in node.input]
    out = Axes()
    for x in node.input:
        for a, size in s.of(x).items():
            if a != axis and out.setdefault(a, size) != size:
                raise s.refuse(x, a, f"{out[a].node} decides how much there is of another input")
    s.says(node.output[0], out)
    if not any(axis in s.of(x) for x in node.input):
        return False
    return _between(s, list(node.input), axis) or _one_after_the_other(s, list(node.input), axis)


def _as_many(s: Sizes, x: str, axis: int, n: int) -> str:
    """x, which has n elements along an axis."""
    own = dict(s.of(x))
    if own.pop(axis, None) is None:
        return x
    with s.as_bounds(x):
        y = with_room(s, x, [max(n, m) if a == axis else m for a, m in enumerate(s.shape(x))])
        y = s.add("Slice", [y, s.constant([0]), s.constant([n]), s.constant([axis])])
    s.says(y, own)
    return y


def _between(s: Sizes, inputs: list[str], axis: int) -> bool:
    """One tensor between others that are one number everywhere: a row is one of its, or that number. False for other tensors."""
    numbers = [_everywhere(s, x) for x in inputs]
    places = [i for i, number in enumerate(numbers) if number is None]
    if len(places) != 1 or len({number for number in numbers if number is not None}) != 1:
        return False
    x, fill = inputs[places[0]], next(number for number in numbers if number is not None)
    sizes = [s.of(name).get(axis, s.shape(name)[axis]) for name in inputs]
    before, own = s.combined("Add", 0, 0), sizes[places[0]]
    for size in sizes[: places[0]]:
        before = s.combined("Add", before, size)
    total = s.combined("Add", before, own)
    for size in sizes[places[0] + 1 :]:
        total = s.combined("Add", total, size)
    extents, after = [s.shape(name)[axis] for name in inputs], len(s.shape(x)) - 1 - axis
    begin, count = (n.count if isinstance(n, Size) else s.constant([n]) for n in (before, own))
    at = s.add("Sub", [s.constant(np.arange(sum(extents))), begin])
    inside = s.add("And", [s.add("GreaterOrEqual", [at, s.constant([0])]), s.add("Less", [at, count])])
    at = s.add("Min", [s.add("Max", [at, s.constant([0])]), s.constant([max(s.shape(x)[axis] - 1, 0)])])
    others = {a: size for a, size in s.of(x).items() if a != axis}
    with s.as_bounds(x):
        y = s.add("Gather", [x, at], axis=axis)
    s.instead(
        "Where",
        [s.add("Reshape", [inside, s.constant([-1, *[1] * after])]), y, s.constant(fill, s.folder.type_of(x, s.node).dtype)],
    )
    assert isinstance(total, Size)
    return s.says(s.node.output[0], {**others, axis: total}) or True


def _everywhere(s: Sizes, name: str) -> float | int | None:
    """The number that all elements of a constant are, which takes no memory but for one; None for others."""
    weight = s.folder.constants.get(name)
    if weight is None or not held(weight).size or (any(held(weight).strides) and held(weight).size > SMALL):
        return None
    values = weight.values if any(held(weight).strides) else weight.values.reshape(-1)[:1]
    return values.flat[0].item() if (values == values.flat[0]).all() else None


def _one_after_the_other(s: Sizes, inputs: list[str], axis: int) -> bool:
    """All that is there of several tensors: where it lies among their bounds is computed."""
    extents = [s.shape(x)[axis] for x in inputs]
    here, begin, before = s.constant(np.arange(sum(extents))), 0, s.combined("Add", 0, 0)
    place = here
    for x, extent in zip(inputs, extents, strict=True):
        before, begin = s.combined("Add", before, s.of(x).get(axis, extent)), begin + extent
        end = before.count if isinstance(before, Size) else s.constant([before])
        behind = s.add("Add", [here, s.add("Sub", [s.constant([begin]), end])])
        place = s.add("Where", [s.add("Less", [here, end]), place, behind])
    assert isinstance(before, Size)
    place = s.add("Min", [place, s.constant([sum(extents) - 1])])
    s.says(place, {0: before})
    return s.instead("Gather", [_plainly(s, inputs, axis), place], axis=axis)


def _plainly(s: Sizes, inputs: list[str], axis: int) -> str:
    """Concat along an axis whose bounds are meant."""
    others = {x: {a: size for a, size in s.of(x).items() if a != axis} for x in inputs}
    with s.as_bounds(*inputs):
        for x, axes in others.items():
            s.says(x, axes)
        return s.add("Concat", inputs, axis=axis)


def split(s: Sizes, node: onnx.NodeProto) -> bool:
    return along_others(s, node, 0)


def like_first(s: Sizes, node: onnx.NodeProto) -> bool:
    """Elements of the first input, with numbers or vectors along other axes."""
    for x in node.input[1:]:
        for axis in s.of(x):
            raise s.refuse(x, axis)
    return along_others(s, node, 1)
