"""Where axes begin whose extent the data decide: what is not zero, what is kept, what a condition chooses."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import onnx
import onnx.helper

from tccompile.errors import UnsupportedError
from tccompile.load.counted.shapes import bounds_of
from tccompile.load.sizes import BOOL, INT64, Axes, Size, Sizes
from tccompile.load.types import Type
from tccompile.load.valid import invalid, title


def found_places(s: Sizes, flat: str, limit: int) -> tuple[str, Size]:
    """Where a vector is not zero: (limit,) places, those beyond their number 0, and how many there are."""
    said = s.limit()
    limited, limit = said is not None and said < limit, limit if said is None else min(said, limit)
    key = "places", flat, limit
    if key not in s.made:  # of one vector there are as many, whoever asks
        places = s.own("Places", [flat], Type(INT64, (limit + 1,)), limit=limit)
        first = s.add("Slice", [places, s.constant([0]), s.constant([limit])])
        count = s.add("Slice", [places, s.constant([limit]), s.constant([limit + 1])])
        s.made[key] = first, s.size(count, limit, limited)
        s.says(first, {0: s.made[key][1]})
        s.safe.add(first)
    return s.made[key]  # type: ignore[no-any-return]


def flags(s: Sizes, x: str) -> str:
    """Booleans, all in one row: which elements there are that are not zero."""
    key = "flags", x
    if key not in s.made:
        y = x
        for axis in list(s.of(x)):
            y = s.masked(y, axis, 0)
        if s.elem(y) != BOOL:
            y = s.add("Cast", [y], to=BOOL)
        s.made[key] = s.add("Reshape", [y, s.constant([-1])])
    return str(s.made[key])


def non_zero(s: Sizes, node: onnx.NodeProto) -> bool:
    """The coordinates of what is not zero, a row for each axis."""
    shape, n = s.shape(node.input[0]), math.prod(s.shape(node.input[0]))
    if not shape or not n:
        return False
    first, _ = found_places(s, flags(s, node.input[0]), n)
    rows: list[str] = []
    step = n
    for extent in shape:
        step //= extent
        row = s.add("Div", [first, s.constant(step)]) if step > 1 else first
        rows.append(s.add("Mod", [row, s.constant(extent)]) if len(rows) else row)
    rows = [s.add("Unsqueeze", [row, s.constant([0])]) for row in rows]
    s.safe.update(node.output)
    return s.instead("Concat", rows, axis=0)


def compress(s: Sizes, node: onnx.NodeProto) -> bool:
    """Slices, or elements, of which a condition says that they stay."""
    x, condition = node.input
    axis = s.attribute("axis")
    if axis is None:
        for a in list(s.of(x)):
            raise s.refuse(x, a)
        x, axis = s.add("Reshape", [x, s.constant([-1])]), 0
    axis %= len(s.shape(x))
    rows = math.prod(s.shape(condition))
    if rows > s.shape(x)[axis]:
        raise invalid(node, f"its condition has {rows} elements, and axis {axis} of its input {s.shape(x)[axis]}")
    if (own := s.of(x).get(axis)) is not None:
        if s.of(condition).get(0) != own:
            raise s.refuse(x, axis, "its condition is of another length")
        x = s.masked(x, axis, 0)
    first, _ = found_places(s, flags(s, condition), rows)
    return s.instead("Gather", [x, first], axis=axis)


def unique(s: Sizes, node: onnx.NodeProto) -> bool:
    """Those of sorted elements that differ from the one before; of all elements, or along the only axis."""
    x, (values, *others) = node.input[0], node.output
    own = s.of(x)
    by_rows = len(s.shape(x)) != 1 and (own or s.attribute("axis") is not None)
    if by_rows or not s.attribute("sorted", 1) or 0 in s.shape(x):
        raise UnsupportedError(
            f"{title(s.node)}: of what is computed at run time, only a vector's elements or all of a tensor's are supported, and "
            "only sorted: end the model before it, and compute the rest in the application"
        )
    x = s.add("Reshape", [x, s.constant([-1])]) if len(s.shape(x)) != 1 else x
    n, dtype = s.shape(x)[0], s.folder.type_of(x, node).dtype
    there = s.inside(own[0], n) if own else s.constant(np.ones(n), np.bool_)
    with s.as_bounds(there, x):
        if own:
            greatest = np.inf if dtype.kind == "f" else np.iinfo(dtype).max
            x = s.add("Where", [there, x, s.constant(greatest, dtype)])
        ascending, order = s.add_all("TopK", [x, s.constant([n])], 2, axis=0, largest=0)
        ends = [s.add("Slice", [ascending, s.constant([a]), s.constant([b])]) for a, b in ((1, n), (0, n - 1))]
        new = s.add("Concat", [s.constant([True], np.bool_), s.add("Not", [s.add("Equal", ends)])], axis=0)
        new = s.add("And", [new, there])
        number = s.add("Sub", [s.add("CumSum", [s.add("Cast", [new], to=INT64), s.constant(0)]), s.constant([1])])
        number = s.add("Max", [number, s.constant([0])])
        first, size = found_places(s, new, n)
        nothing = s.constant(np.zeros(n))
        inverse = s.add("ScatterElements", [nothing, order, number], axis=0)
        one = s.add("Cast", [there], to=INT64)
        counts = s.add("ScatterElements", [nothing, number, one], axis=0, reduction="add")
    s.says(inverse, own)
    s.says(counts, {0: size})
    results = [s.add("Gather", [made, first], axis=0) for made in (ascending, order)] + [inverse, counts]
    for name, made in zip((values, *others), results, strict=False):
        if name:
            s.folder.visit(onnx.helper.make_node("Identity", [made], [name], node.name or name))
            s.says(name, s.of(made))
    return True


def non_max_suppression(s: Sizes, node: onnx.NodeProto) -> bool:
    """Scores in order, what is kept of them, and where that lies: (image, class, box) a row."""
    boxes, scores = node.input[:2]
    (images, classes, count), least = s.shape(scores), _threshold(s, 4)
    if s.shape(boxes) != (images, count, 4):
        raise invalid(
            node, f"its boxes are {s.shape(boxes)} and its scores {s.shape(scores)}; they must be (N, P, 4) and (N, C, P)"
        )
    most = int(min(max(constant_number(s, 2, 0), 0), count))
    if not most or not images * classes:
        return s.instead("Identity", [s.constant(np.zeros((0, 3)))])
    for axis in [a for a in s.of(boxes) if a != 1]:
        raise s.refuse(boxes, axis)
    for axis in list(s.of(scores)):
        if axis != 2:
            raise s.refuse(scores, axis)
        if s.of(boxes).get(1) != s.of(scores)[2]:
            raise s.refuse(scores, 2, "its boxes are not as many")
        scores = s.masked(scores, 2, -np.inf)
        least = least if least is not None else float(np.finfo(np.float32).min)
    best, order = s.add_all("TopK", [scores, s.constant([count])], 2, axis=2)
    how = {"iou": float(_threshold(s, 3) or 0.0), "centred": int(s.attribute("center_point_box", 0)), "most": most}
    how |= {} if least is None else {"least": least}
    kept = s.own("Suppress", [boxes, best, order], Type(BOOL, (images, classes, count)), **how)
    first, _ = found_places(s, s.add("Reshape", [kept, s.constant([-1])]), images * classes * most)
    box = s.add("Gather", [s.add("Reshape", [order, s.constant([-1])]), first], axis=0)
    line = s.add("Div", [first, s.constant(count)])
    s.safe.update(node.output)
    columns = [s.add("Div", [line, s.constant(classes)]), s.add("Mod", [line, s.constant(classes)]), box]
    return s.instead("Concat", [s.add("Unsqueeze", [c, s.constant([1])]) for c in columns], axis=1)


def constant_number(s: Sizes, i: int, default: float) -> float:
    """The constant number of the node's input i."""
    if i >= len(s.node.input) or not s.node.input[i]:
        return default
    weight = s.folder.constants.get(s.node.input[i])
    if weight is None or weight.values.size != 1:
        name = onnx.defs.get_schema(s.node.op_type).inputs[i].name
        raise UnsupportedError(
            f"{title(s.node)}: its {name} ({s.node.input[i]}) is computed at run time; export the model with that constant, or "
            "end it before this node"
        )
    return float(weight.values.reshape(-1)[0])


def _threshold(s: Sizes, i: int) -> float | None:
    found = constant_number(s, i, math.nan)
    return None if math.isnan(found) else found


def choice(s: Sizes, node: onnx.NodeProto) -> bool:
    """One of two tensors, by a condition: where their extents differ, it decides how much there is."""
    condition, *both = node.input
    branch, out = s.attribute("branch", b"").decode(), Axes()
    for axis, extents in enumerate(zip(*(s.shape(x) for x in both), strict=True)):
        one, other = (s.of(x).get(axis, n) for x, n in zip(both, extents, strict=True))
        if one == other:
            out |= {axis: one} if isinstance(one, Size) else {}
            continue
        counts = [n.count if isinstance(n, Size) else s.constant([n]) for n in (one, other)]
        out[axis] = s.size(s.one_of(condition, counts, branch), max(bounds_of((one, other))))
    bounds = [max(pair) for pair in zip(*(s.shape(x) for x in both), strict=True)]
    both = [with_room(s, x, bounds) for x in both]
    with s.as_bounds(*both):
        if branch:
            s.instead("Identity", [s.one_of(condition, both, branch)])
            return s.says(s.folder.resolved(node.output[0]), out) or True
        s.instead("Where", [condition, *both])
    return s.says(node.output[0], out) or True


def guard(s: Sizes, node: onnx.NodeProto) -> bool:
    """Indices of what need not take place, which are 0 then."""
    x, condition = node.input
    if x in s.folder.constants or x in s.safe:
        s.safe.add(node.output[0])
        s.instead("Identity", [x])
        return s.says(node.output[0], s.of(x)) or True
    return s.instead("Where", [condition, x, s.constant(0, s.folder.type_of(x, node).dtype)])


def with_room(s: Sizes, x: str, bounds: Sequence[int]) -> str:
    """The tensor with zeros beyond it, up to these extents."""
    dtype = s.folder.type_of(x, s.node).dtype
    for axis, n in enumerate(bounds):
        shape = s.shape(x)
        if shape[axis] < n:
            beyond = s.constant(np.zeros((*shape[:axis], n - shape[axis], *shape[axis + 1 :])), dtype)
            with s.as_bounds(x):
                x = s.add("Concat", [x, beyond], axis=axis)
    return x
