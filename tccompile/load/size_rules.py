"""What each operator does to axes whose extent the data decide: see `sizes.py`."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import onnx
import onnx.helper

from tccompile.errors import UnsupportedError
from tccompile.load.sizes import Axes, Folding, Number, Rest, Rule, Rules, Size, Sizes
from tccompile.load.types import Type
from tccompile.load.valid import invalid, title

BOOL, INT64 = onnx.TensorProto.BOOL, onnx.TensorProto.INT64

# --- Where such axes begin -------------------------------------------------------------------------------------------


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
    rows = min(s.shape(condition)[0], s.shape(x)[axis])
    if (own := s.of(x).get(axis)) is not None:
        if s.of(condition).get(0) != own:
            raise s.refuse(x, axis, "its condition is of another length")
        x = s.masked(x, axis, 0)
    first, _ = found_places(s, flags(s, condition), rows)
    return s.instead("Gather", [x, first], axis=axis)


def non_max_suppression(s: Sizes, node: onnx.NodeProto) -> bool:
    """Scores in order, what is kept of them, and where that lies: (image, class, box) a row."""
    boxes, scores = node.input[:2]
    (images, classes, count), least = s.shape(scores), _threshold(s, 4)
    if s.shape(boxes) != (images, count, 4):
        raise invalid(
            node, f"its boxes are {s.shape(boxes)} and its scores {s.shape(scores)}; they must be (N, P, 4) and (N, C, P)"
        )
    most = int(min(max(_number(s, 2, 0), 0), count))
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


def _number(s: Sizes, i: int, default: float) -> float:
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
    found = _number(s, i, math.nan)
    return None if math.isnan(found) else found


def choice(s: Sizes, node: onnx.NodeProto) -> bool:
    """One of two tensors, by a condition: where their extents differ, it decides how much there is."""
    condition, *both = node.input
    out = Axes()
    for axis, extents in enumerate(zip(*(s.shape(x) for x in both), strict=True)):
        one, other = (s.of(x).get(axis, n) for x, n in zip(both, extents, strict=True))
        if one == other:
            out |= {axis: one} if isinstance(one, Size) else {}
            continue
        counts = [n.count if isinstance(n, Size) else s.constant([n]) for n in (one, other)]
        out[axis] = s.size(s.add("Where", [condition, *counts]), max(_bounds((one, other))))
    if any(0 in s.shape(x) for x in both):
        x = next((x for x in both if 0 not in s.shape(x)), both[0])
        s.instead("Identity", [x])
    else:
        bounds = [max(pair) for pair in zip(*(s.shape(x) for x in both), strict=True)]
        both = [_with_room(s, x, bounds) for x in both]
        with s.as_bounds(*both):
            s.instead("Where", [condition, *both])
    return s.says(node.output[0], out) or True


def _with_room(s: Sizes, x: str, bounds: Sequence[int]) -> str:
    """The tensor with zeros beyond it, up to these extents."""
    dtype = s.folder.type_of(x, s.node).dtype
    for axis, n in enumerate(bounds):
        shape = s.shape(x)
        if shape[axis] < n:
            beyond = s.constant(np.zeros((*shape[:axis], n - shape[axis], *shape[axis + 1 :])), dtype)
            with s.as_bounds(x):
                x = s.add("Concat", [x, beyond], axis=axis)
    return x


COUNTS: dict[str, tuple[Rule, tuple[int, ...]]] = {
    "Choice": (choice, ()),
    "Compress": (compress, (1,)),
    "NonMaxSuppression": (non_max_suppression, (0, 1)),
    "NonZero": (non_zero, (0,)),
}
"""Operators that make as many elements as the data say, and the inputs that say it."""


# --- Shapes that are computed ----------------------------------------------------------------------------------------


def numbers_of(s: Sizes, node: onnx.NodeProto) -> np.ndarray | None:
    """What a node makes of shapes, if all of it is known and something of it depends on the data: an array."""
    if node.op_type in ("Shape", "Size") or not any(x in s.numbers for x in node.input):
        return None
    before, s.node = s.node, node
    given = [s.numbers_in(x) if x else None for x in node.input]
    try:
        return _made(s, node.op_type, given) if given[0] is not None else None
    finally:
        s.node = before


def _made(s: Sizes, op: str, given: Sequence[np.ndarray | None]) -> np.ndarray | None:
    x, second = given[0], s.integers(1, [])
    assert x is not None
    match op:
        case "Identity" | "Cast":
            return x
        case "Unsqueeze" if second:
            return np.expand_dims(x, tuple(second))
        case "Squeeze" if second is not None:
            return np.squeeze(x, tuple(second) or None)
        case "Reshape" if second is not None and 0 not in second:
            return x.reshape(second)
        case "Transpose":
            return x.transpose(s.attribute("perm", None))
        case "Gather" if second is not None:
            return np.asarray(np.take(x, np.reshape(second, s.shape(s.node.input[1])), s.attribute("axis", 0)), object)
        case "Slice":
            return _slice_of(s, x)
        case "Concat" if (parts := [part for part in given if part is not None]) and len(parts) == len(given):
            return np.concatenate(parts, s.attribute("axis"))
        case "ReduceMin" | "ReduceMax" if x.size:
            out: Number = x.flat[0]
            for n in x.flat[1:]:
                out = s.combined(op.removeprefix("Reduce"), out, n)
            return np.array(out, object).reshape((1,) * x.ndim if s.attribute("keepdims", 1) else ())
        case "Equal" | "Where" | "Add" | "Sub" | "Mul" | "Div" | "Min" | "Max" if all(part is not None for part in given):
            rows = np.broadcast_arrays(*(part for part in given if part is not None))
            made = np.empty(rows[0].shape, object)
            for at in np.ndindex(*made.shape):
                made[at] = _element(s, op, tuple(row[at] for row in rows))  # type: ignore[misc]
            return None if any(n is None for n in made.flat) else made
    return None


def _slice_of(s: Sizes, x: np.ndarray) -> np.ndarray | None:
    starts, ends = s.integers(1), s.integers(2)
    if starts is None or ends is None:
        return None
    axes, steps = s.integers(3, range(len(starts))) or [], s.integers(4, [1] * len(starts)) or []
    cut = [slice(None)] * x.ndim
    for start, end, axis, step in zip(starts, ends, axes, steps, strict=True):
        cut[axis] = slice(start, None if step < 0 and end < -x.shape[axis] else end, step)
    return x[tuple(cut)]


def _element(s: Sizes, op: str, numbers: tuple[Number | Rest, ...]) -> Number | Rest | None:
    """What is made of some numbers, if that is known."""
    if op == "Where":
        return numbers[1 if numbers[0] else 2] if isinstance(numbers[0], int) else None
    if len(numbers) != 2:
        return None
    a, b = numbers
    if op == "Mul" and isinstance(a, int):
        a, b = b, a
    if isinstance(a, Rest) and isinstance(b, int) and op == "Mul" and b > 0:
        return s.rest(a.whole * b, s.combined("Mul", a.size, b))
    if isinstance(a, Rest) or isinstance(b, Rest):
        return None
    if op == "Equal":
        unlike = any(isinstance(n, int) and n < 0 for n in numbers)  # sizes are not negative
        return int(a == b) if a == b or unlike or (isinstance(a, int) and isinstance(b, int)) else None
    if op == "Sub" and isinstance(a, int) and isinstance(b, Size) and b.limit <= a:
        return s.rest(a, b)
    if op in ("Sub", "Div") and isinstance(b, Size):  # which may be below 0, or divided by it
        return None
    if op in ("Add", "Mul", "Div") and any(isinstance(n, int) and n < 0 for n in numbers):
        return s.combined(op, a, b) if isinstance(a, int) and isinstance(b, int) else None
    return s.combined(op, a, b)


def shape_of(s: Sizes, node: onnx.NodeProto) -> bool:
    """Shape, as numbers and as a tensor that is computed."""
    x = node.input[0]
    shape = [s.of(x).get(a, n) for a, n in enumerate(s.shape(x))]
    part = tuple(shape[s.attribute("start", 0) : s.attribute("end", len(shape))])
    if not any(isinstance(n, Size) for n in part):
        return s.instead("Identity", [s.constant(part)])
    s.numbers[node.output[0]] = np.array(part, object)
    return s.instead("Concat", [n.count if isinstance(n, Size) else s.constant([n]) for n in part], axis=0)


def size_of(s: Sizes, node: onnx.NodeProto) -> bool:
    x, total = node.input[0], s.combined("Mul", 1, 1)
    for axis, n in enumerate(s.shape(x)):
        total = s.combined("Mul", s.of(x).get(axis, n), total)
    s.numbers[node.output[0]] = np.array(total, object)
    return s.instead("Reshape", [total.count if isinstance(total, Size) else s.constant([total]), s.constant(np.zeros(0))])


def _bounds(numbers: Iterable[Number]) -> list[int]:
    return [n.limit if isinstance(n, Size) else n for n in numbers]


def _wanted(s: Sizes, i: int) -> tuple[Number, ...] | None:
    """The numbers that input i holds, which then holds their bounds; None where they are not known."""
    found = s.number(s.node.input[i])
    if found is not None and any(isinstance(n, Size) for n in found):
        s.node.input[i] = s.constant(_bounds(found)) if s.shape(s.node.input[i]) else s.constant(_bounds(found)[0])
    return found


def reshape(s: Sizes, node: onnx.NodeProto) -> bool:
    x, wanted = node.input[0], _wanted(s, 1)
    if wanted is None:  # other rules say that it must be known
        return False
    shape, own = s.shape(x), s.of(x)
    if not s.attribute("allowzero", 0):
        wanted = tuple(shape[i] if n == 0 and isinstance(n, int) else n for i, n in enumerate(wanted))
    target, known = _bounds(wanted), math.prod(n for n in _bounds(wanted) if n != -1)
    target = [math.prod(shape) // max(known, 1) if n == -1 else n for n in target]
    if math.prod(target) != math.prod(shape):
        axis = next(iter(own), None)
        if axis is None:
            return False
        raise s.refuse(x, axis, f"its shape is {list(target)}, where there is room for {list(shape)}")
    out = _regrouped(s, x, target)
    if any(isinstance(n, Size) and out.get(a) != n for a, n in enumerate(wanted)):
        raise UnsupportedError(
            f"{title(node)}: its shape ({node.input[1]}) depends on the data in another way than its input does: "
            "end the model before it"
        )
    node.input[1] = s.constant(target)
    return s.says(node.output[0], out)


def _regrouped(s: Sizes, x: str, target: Sequence[int]) -> Axes:
    """The axes of x as the target's: those that stay, and outermost ones of a group that are merged with others or split."""
    shape, own, out = s.shape(x), s.of(x), Axes()
    i = j = 0
    while i < len(shape) or j < len(target):
        first, to = i, j
        left = right = 1
        while True:  # the least groups of axes with as many elements
            if i < len(shape) and (left <= right or j >= len(target)):
                left, i = left * shape[i], i + 1
            elif j < len(target):
                right, j = right * target[j], j + 1
            if (left == right and j > to and i > first) or (i == len(shape) and j == len(target)):
                break
        counted = [a for a in range(first, i) if a in own]
        if not counted:
            continue
        lead = next(a for a in range(first, i) if shape[a] != 1 or a in own)
        into = next((a for a in range(to, j) if target[a] != 1), to)
        if len(counted) > 1 or counted[0] != lead or to == j:
            raise s.refuse(x, counted[0], f"a shape of {list(target)} mixes it with others")
        inner, within = math.prod(shape[lead + 1 : i]), math.prod(target[into + 1 : j])
        out[into] = _scaled(s, x, lead, inner, within)
    return out


def _scaled(s: Sizes, x: str, axis: int, by: int, over: int) -> Size:
    """How much there is of rows of `over` elements, where there are so many of `by`."""
    size = s.of(x)[axis]
    common = math.gcd(by, over)
    by, over = by // common, over // common
    if over > 1:
        fn, part, factor = s.made.get(("parts", size.count), ("", size, 1))
        if fn != "Mul" or not isinstance(factor, int) or factor % over:
            raise s.refuse(x, axis, f"rows of {over} elements need not be whole")
        size, by = part, by * (factor // over)
    made = s.combined("Mul", size, by)
    assert isinstance(made, Size)
    return made


def expand(s: Sizes, node: onnx.NodeProto) -> bool:
    x, wanted = node.input[0], _wanted(s, 1)
    if wanted is None:
        return False
    out: Axes = {a: n for a, n in enumerate(wanted) if isinstance(n, Size)}
    for axis, size in s.of(x).items():
        to = axis + max(len(wanted) - len(s.shape(x)), 0)
        n = wanted[to - max(len(s.shape(x)) - len(wanted), 0)] if to < len(wanted) else 1
        if n not in (1, size):
            raise s.refuse(x, axis, f"it is expanded to {n if isinstance(n, int) else 'another number'}")
        out[to] = size
    return s.says(node.output[0], out)


def constant_of_shape(s: Sizes, node: onnx.NodeProto) -> bool:
    wanted = _wanted(s, 0)
    return s.says(node.output[0], {a: n for a, n in enumerate(wanted or ()) if isinstance(n, Size)})


def range_(s: Sizes, node: onnx.NodeProto) -> bool:
    """From a constant on, in steps of one, to a number that is known late."""
    start, limit, step = (s.number(x) for x in node.input)
    if start is None or limit is None or step != (1,) or not isinstance(start[0], int) or not isinstance(limit[0], Size):
        return False
    size = s.combined("Sub", limit[0], start[0])
    assert isinstance(size, Size)
    dtype = s.folder.type_of(node.input[0], node).dtype
    values = s.constant(np.arange(start[0], start[0] + size.limit), dtype)
    s.says(node.output[0], {0: size})
    return s.instead("Identity", [values])


# --- Elements that stay apart ----------------------------------------------------------------------------------------


def elementwise(s: Sizes, node: onnx.NodeProto) -> bool:
    """Axes of inputs as they are broadcast; what is there along one axis is so of all inputs."""
    names = [x for x in node.input if x]
    shapes = [s.shape(x) for x in names]
    rank, out = max(map(len, shapes)), Axes()
    for x, shape in zip(names, shapes, strict=True):
        for axis, size in s.of(x).items():
            to = axis + rank - len(shape)
            if out.setdefault(to, size) != size:
                raise s.refuse(x, axis, f"{out[to].node} decides how much there is of another input")
    for x, shape in zip(names, shapes, strict=True):
        for axis, n in enumerate(shape):
            there = out.get(axis + rank - len(shape))
            if there is not None and n != 1 and axis not in s.of(x):  # nor is one element repeated, of which there may be none
                other = next(y for y in names if there in s.of(y).values())
                raise s.refuse(other, _axis_of(s, other, there), f"{x!r} has {n} elements there, as many as there may be")
    return s.says(node.output[0], out)


def _axis_of(s: Sizes, name: str, size: Size) -> int:
    return next(a for a, found in s.of(name).items() if found == size)


def transpose(s: Sizes, node: onnx.NodeProto) -> bool:
    x = node.input[0]
    perm = list(s.attribute("perm", range(len(s.shape(x)))[::-1]))
    return s.says(node.output[0], {perm.index(axis): size for axis, size in s.of(x).items()})


def unsqueeze(s: Sizes, node: onnx.NodeProto) -> bool:
    x, axes = node.input[0], s.integers(1) or []
    rank = len(s.shape(x)) + len(axes)
    added = {a % rank for a in axes}
    kept = [a for a in range(rank) if a not in added]
    return s.says(node.output[0], {kept[axis]: size for axis, size in s.of(x).items()})


def squeeze(s: Sizes, node: onnx.NodeProto) -> bool:
    x = node.input[0]
    shape = s.shape(x)
    axes = s.integers(1)
    gone = {a for a, n in enumerate(shape) if n == 1} if axes is None else {a % len(shape) for a in axes}
    for axis in s.of(x):
        if axis in gone:
            raise s.refuse(x, axis)
    kept = [a for a in range(len(shape)) if a not in gone]
    return s.says(node.output[0], {kept.index(axis): size for axis, size in s.of(x).items()})


def flatten(s: Sizes, node: onnx.NodeProto) -> bool:
    shape, axis = s.shape(node.input[0]), s.attribute("axis", 1)
    axis = axis % len(shape) if axis < 0 else axis
    target = [math.prod(shape[:axis]), math.prod(shape[axis:])]
    return s.says(node.output[0], _regrouped(s, node.input[0], target))


def along_others(s: Sizes, node: onnx.NodeProto, default: int = -1, outputs: int = 0) -> bool:
    """What goes along one axis, other than those that the data decide, and keeps all of them."""
    x = node.input[0]
    axis = s.attribute("axis", default) % max(len(s.shape(x)), 1)
    if axis in s.of(x):
        raise s.refuse(x, axis)
    for y in node.output[: outputs or len(node.output)]:
        s.says(y, s.of(x))
    return False


def rows(s: Sizes, node: onnx.NodeProto) -> bool:
    """What is done with each row of the first axis by itself, such as convolutions of images."""
    for i, x in enumerate(node.input):
        for axis in s.of(x):
            if i or axis:
                raise s.refuse(x, axis)
    for y in node.output:
        s.says(y, s.of(node.input[0]))
    return False


def normalized(s: Sizes, node: onnx.NodeProto) -> bool:
    """Norms over the axes from one on."""
    x = node.input[0]
    first = s.attribute("axis", -1) % len(s.shape(x))
    for name in node.input:
        for axis in s.of(name):
            if name != x or axis >= first:
                raise s.refuse(name, axis)
    return s.says(node.output[0], s.of(x))


def padded(s: Sizes, node: onnx.NodeProto) -> bool:
    """Pad along other axes; or behind what there is, as far as to an extent that is known."""
    x = node.input[0]
    shape, found = s.shape(x), s.numbers_in(node.input[1])
    pads = None if found is None else list(found.flat)
    axes, out, whole = s.integers(3, range(len(shape))), s.of(x), list(pads or ())
    for axis, size in s.of(x).items():
        at = [i for i, a in enumerate(axes or ()) if a % len(shape) == axis]
        if pads is None or axes is None:
            raise s.refuse(x, axis, "its pads are computed")
        for i in at:
            behind = pads[i + len(axes)]
            if pads[i] != 0 or not (behind == 0 or (isinstance(behind, Rest) and behind.size == size)):
                raise s.refuse(x, axis)
            if isinstance(behind, Rest):
                if s.attribute("mode", b"constant") != b"constant":
                    raise s.refuse(x, axis, "its mode is not constant")
                node.input[0] = s.masked(node.input[0], axis, _number(s, 2, 0.0))
                whole[i + len(axes)] = behind.whole - shape[axis]
                out = {a: other for a, other in out.items() if a != axis}
    if whole != (pads or []):
        node.input[1] = s.constant(whole)
    return s.says(node.output[0], out)


def tile(s: Sizes, node: onnx.NodeProto) -> bool:
    """Tile along other axes."""
    x, repeats = node.input[0], s.integers(1)
    for axis in s.of(x):
        if repeats is None or repeats[axis] != 1:
            raise s.refuse(x, axis)
    return s.says(node.output[0], s.of(x))


# --- Parts of tensors ------------------------------------------------------------------------------------------------


def sliced(s: Sizes, node: onnx.NodeProto) -> bool:
    """The first elements along such an axis, those after some, or as many of others as the data say."""
    x = node.input[0]
    shape, own = s.shape(x), dict(s.of(x))
    starts, ends = s.number(node.input[1]), s.number(node.input[2])
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


def _in_range(s: Sizes, indices: str) -> str:
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
    x, indices = node.input[0], _in_range(s, node.input[1])
    node.input[1] = indices
    axis, rank = s.attribute("axis", 0) % max(len(s.shape(x)), 1), len(s.shape(indices))
    own = s.of(x).get(axis)
    if own is not None:
        if indices in s.folder.constants:
            raise s.refuse(x, axis, "its indices are constant, and there may be no such elements")
        node.input[1] = _from_beginning(s, indices, own.count)
    out = {a if a < axis else a + rank - 1: size for a, size in s.of(x).items() if a != axis}
    out |= {axis + a: size for a, size in s.of(indices).items()}
    return s.says(node.output[0], out)


def _from_beginning(s: Sizes, indices: str, ends: str) -> str:
    """Indices of which none is negative: those are counted from `ends`, which has one number or one for each column."""
    if s.elem(indices) != INT64:
        indices = s.add("Cast", [indices], to=INT64)
    if s.shape(indices)[-1:] == (1,) or not s.shape(indices):
        ends = s.add("Reshape", [ends, s.constant(np.zeros(0) if not s.shape(indices) else [1])])
    return s.add("Where", [s.add("Less", [indices, s.constant(0)]), s.add("Add", [indices, ends]), indices])


def gather_elements(s: Sizes, node: onnx.NodeProto) -> bool:
    x, indices = node.input[0], _in_range(s, node.input[1])
    node.input[1] = indices
    axis = s.attribute("axis", 0) % len(s.shape(x))
    for a, size in s.of(x).items():
        if a != axis and s.of(indices).get(a) != size:
            raise s.refuse(x, a, "its indices are of another length")
    if axis in s.of(x):
        counted = s.of(indices)
        node.input[1] = _from_beginning(s, indices, s.of(x)[axis].count)
        return s.says(node.output[0], counted)
    return s.says(node.output[0], s.of(indices))


def gather_nd(s: Sizes, node: onnx.NodeProto) -> bool:
    """Rows of indices; of the first axes there is all that they name."""
    x, indices = node.input[0], _in_range(s, node.input[1])
    node.input[1] = indices
    given, depth = len(s.shape(indices)), s.shape(indices)[-1]
    if s.attribute("batch_dims", 0) or given - 1 in s.of(indices):
        for name in (x, indices):
            for a in s.of(name):
                raise s.refuse(name, a)
    if any(a < depth for a in s.of(x)):  # indices from the end are from that of what there is
        ends = [s.of(x)[a].count if a in s.of(x) else s.constant([n]) for a, n in enumerate(s.shape(x)[:depth])]
        node.input[1] = _from_beginning(s, indices, s.add("Concat", ends, axis=0))
    out = {a - depth + given - 1: size for a, size in s.of(x).items() if a >= depth} | s.of(indices)
    return s.says(node.output[0], out)


def concat(s: Sizes, node: onnx.NodeProto) -> bool:
    """Along other axes as elements are; along such an axis, one after the other."""
    rank = len(s.shape(node.input[0]))
    axis = s.attribute("axis") % max(rank, 1)
    out = Axes()
    for x in node.input:
        for a, size in s.of(x).items():
            if a != axis and out.setdefault(a, size) != size:
                raise s.refuse(x, a, f"{out[a].node} decides how much there is of another input")
    for x in node.input:
        for a, size in out.items():
            if a not in s.of(x):
                raise s.refuse(next(y for y in node.input if a in s.of(y)), a, f"{x!r} has {size.limit} elements there")
    s.says(node.output[0], out)
    if not any(axis in s.of(x) for x in node.input):
        return False
    return _one_after_the_other(s, list(node.input), axis)


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


# --- What mixes elements ---------------------------------------------------------------------------------------------


def extreme(dtype: np.dtype, largest: bool) -> Any:
    if dtype.kind == "f":
        return np.inf if largest else -np.inf
    if dtype.kind == "b":
        return largest
    return np.iinfo(dtype).max if largest else np.iinfo(dtype).min


NEUTRAL = {"Sum": 0, "L1": 0, "L2": 0, "SumSquare": 0, "LogSum": 0, "Prod": 1, "LogSumExp": -np.inf}


def reduced(s: Sizes, node: onnx.NodeProto) -> bool:
    """Reductions: what is not there counts for nothing."""
    x, kind = node.input[0], node.op_type.removeprefix("Reduce")
    shape, dtype = s.shape(x), s.folder.type_of(x, node).dtype
    axes = s.integers(1, [])
    if axes is None:
        raise s.refuse(x, next(iter(s.of(x))), "its axes are computed")
    over = {a % len(shape) for a in axes} if axes else set() if s.attribute("noop_with_empty_axes", 0) else set(range(len(shape)))
    keep = s.attribute("keepdims", 1)
    counted, divisor = [a for a in s.of(x) if a in over], s.combined("Mul", 1, 1)
    for axis in over:
        divisor = s.combined("Mul", s.of(x).get(axis, shape[axis]), divisor)
    rest = [a for a in range(len(shape)) if keep or a not in over]
    out = {rest.index(a): size for a, size in s.of(x).items() if a not in over}
    if not counted:
        return s.says(node.output[0], out)
    fill = extreme(dtype, kind == "Min") if kind in ("Max", "Min") else NEUTRAL.get(kind, 0)
    for axis in counted:
        x = s.masked(x, axis, fill)
    s.says(node.output[0], out)
    where = s.constant(sorted(over))
    if kind != "Mean":
        return s.instead(node.op_type, [x, where], keepdims=keep)
    assert isinstance(divisor, Size)
    number = s.add("Cast", [s.add("Reshape", [divisor.count, s.constant(np.zeros(0))])], to=s.elem(x))
    return s.instead("Div", [s.add("ReduceSum", [x, where], keepdims=keep), number])


def arg(s: Sizes, node: onnx.NodeProto) -> bool:
    """ArgMax and ArgMin: what is not there is last."""
    x = node.input[0]
    axis, keep = s.attribute("axis", 0) % len(s.shape(x)), s.attribute("keepdims", 1)
    out = {a - (a > axis and not keep): size for a, size in s.of(x).items() if a != axis}
    s.says(node.output[0], out)
    if axis not in s.of(x):
        return False
    if s.attribute("select_last_index", 0):
        raise s.refuse(x, axis, "it selects the last of equals")
    x = s.masked(x, axis, extreme(s.folder.type_of(x, node).dtype, node.op_type == "ArgMin"))
    return s.instead(node.op_type, [x], axis=axis, keepdims=keep)


def softmax(s: Sizes, node: onnx.NodeProto) -> bool:
    x = node.input[0]
    axis = s.attribute("axis", -1) % len(s.shape(x))
    own = s.of(x)
    s.says(node.output[0], own)
    if axis not in own:
        return False
    s.instead(node.op_type, [s.masked(x, axis, -np.inf)], axis=axis)
    s.says(node.output[0], own)
    return True


def top_k(s: Sizes, node: onnx.NodeProto) -> bool:
    """As many as are asked for, or as there are; what is not there is last."""
    x, wanted = node.input[0], s.number(node.input[1])
    axis, largest = s.attribute("axis", -1) % len(s.shape(x)), s.attribute("largest", 1)
    if wanted is None:
        return False
    there = s.of(x).get(axis, s.shape(x)[axis])
    made: Number = wanted[0]
    if isinstance(there, Size) or isinstance(made, Size):
        made = s.combined("Min", there, made)
    out = {a: size for a, size in s.of(x).items() if a != axis}
    if isinstance(made, Size):
        out[axis] = made
    for y in node.output:
        s.says(y, out)
    if not isinstance(made, Size):
        return False
    if axis in s.of(x):
        dtype = s.folder.type_of(x, node).dtype
        x = s.masked(x, axis, np.nan if dtype.kind == "f" and not largest else extreme(dtype, not largest))
    sorted_ = s.attribute("sorted", 1)
    s.instead("TopK", [x, s.constant([made.limit])], axis=axis, largest=largest, sorted=sorted_)
    for y in node.output:
        s.says(y, out)
    return True


def cumulative(s: Sizes, node: onnx.NodeProto) -> bool:
    """From the beginning on; from the end of what is there."""
    x, axes = node.input[0], s.integers(1)
    own = s.of(x)
    if axes is None:
        raise s.refuse(x, next(iter(own)), "its axis is computed")
    axis = axes[0] % len(s.shape(x))
    if axis in own and s.attribute("reverse", 0):
        node.input[0] = s.masked(x, axis, 1 if node.op_type == "CumProd" else 0)
    return s.says(node.output[0], own)


def matmul(s: Sizes, node: onnx.NodeProto) -> bool:
    """Rows, columns and matrices as they are; what is not there along K counts for nothing."""
    a, b = node.input
    ranks = [len(s.shape(x)) for x in (a, b)]
    for x in (a, b):
        if min(ranks) < 2 and s.of(x):
            raise s.refuse(x, next(iter(s.of(x))))
    k = [ranks[0] - 1, ranks[1] - 2]
    sizes = [s.of(x).get(axis) for x, axis in zip((a, b), k, strict=True)]
    if sizes[0] != sizes[1]:
        x = a if sizes[0] else b
        raise s.refuse(x, k[x == b], "the other operand has another number of elements there")
    rank, out = max(ranks), Axes()
    for x, own, inner in ((a, ranks[0], k[0]), (b, ranks[1], k[1])):
        for axis, size in s.of(x).items():
            if axis != inner and out.setdefault(axis + rank - own, size) != size:
                raise s.refuse(x, axis, f"{out[axis + rank - own].node} decides how much there is of another input")
    if sizes[0] is not None:
        node.input[:] = [s.masked(a, k[0], 0), s.masked(b, k[1], 0)]
    return s.says(node.output[0], out)


def gemm(s: Sizes, node: onnx.NodeProto) -> bool:
    """Rows of the first operand."""
    for i, x in enumerate(node.input):
        for axis in s.of(x):
            if i or axis != (1 if s.attribute("transA", 0) else 0):
                raise s.refuse(x, axis)
    counted = [*s.of(node.input[0]).values()]
    return s.says(node.output[0], {0: counted[0]} if counted else {})


def roi_align(s: Sizes, node: onnx.NodeProto) -> bool:
    """A row for each region."""
    node.input[2] = _in_range(s, node.input[2])
    x, rois, images = node.input
    for axis in s.of(x):
        raise s.refuse(x, axis)
    if s.of(rois).get(0) != s.of(images).get(0):
        name = rois if s.of(rois) else images
        raise s.refuse(name, 0, "regions and the images that they are of are not as many")
    return s.says(node.output[0], {a: size for a, size in s.of(rois).items() if a == 0})


def one_hot(s: Sizes, node: onnx.NodeProto) -> bool:
    """An axis more."""
    x = node.input[0]
    rank = len(s.shape(x)) + 1
    kept = [a for a in range(rank) if a != s.attribute("axis", -1) % rank]
    return s.says(node.output[0], {kept[axis]: size for axis, size in s.of(x).items()})


def scatter(s: Sizes, node: onnx.NodeProto) -> bool:
    """Updates, of which those that are not there go to a place beyond the result."""
    x, indices, updates = node.input
    shape, own, nd = s.shape(x), s.of(x), node.op_type == "ScatterND"
    axis = 0 if nd else s.attribute("axis", 0) % len(shape)
    for a in own:
        if a != axis:
            raise s.refuse(x, a)
    counted = s.of(indices)
    if any(s.of(updates).get(a) != size for a, size in counted.items()) or len(counted) > 1 or len(s.of(updates)) > 1:
        name = indices if counted else updates
        raise s.refuse(name, next(iter(s.of(name))), "updates and their indices are not as many")
    depth = s.shape(indices)[-1] if nd else 1
    ends = [own[a].count if a in own else s.constant([n]) for a, n in enumerate(shape) if a < depth or not nd]
    place = _from_beginning(s, indices, s.add("Concat", ends, axis=0) if nd else ends[axis])
    for along in counted:
        place = s.masked(place, along, shape[axis])
        if depth > 1:  # the other coordinates stay inside
            place = s.add("Min", [place, s.constant([shape[0], *(n - 1 for n in shape[1:depth])])])
    how = {"reduction": s.attribute("reduction", b"none").decode()} | ({} if nd else {"axis": axis})
    with s.as_bounds(x, updates):
        beyond = [0] * len(shape)
        beyond[axis] = 1
        room = s.add("Pad", [x, s.constant([0] * len(shape) + beyond)])
        y = s.add(node.op_type, [room, place, updates], **how)
    s.instead("Slice", [y, s.constant([0]), s.constant([shape[axis]]), s.constant([axis])])
    return s.says(node.output[0], own) or True


ELEMENTWISE = (
    "Abs", "Acos", "Acosh", "Add", "And", "Asin", "Asinh", "Atan", "Atanh", "BitShift", "BitwiseAnd", "BitwiseNot", "BitwiseOr",
    "BitwiseXor", "Cast", "CastLike", "Ceil", "Celu", "Clip", "Cos", "Cosh", "Div", "Dropout", "Elu", "Equal", "Erf", "Exp",
    "Floor", "Gelu", "Greater", "GreaterOrEqual", "HardSigmoid", "HardSwish", "Identity", "IsInf", "IsNaN", "LeakyRelu", "Less",
    "LessOrEqual", "Log", "Max", "Mean", "Min", "Mish", "Mod", "Mul", "Neg", "Not", "Or", "PRelu", "Pow", "Reciprocal", "Relu",
    "Round", "Selu", "Shrink", "Sigmoid", "Sign", "Sin", "Sinh", "Softplus", "Softsign", "Sqrt", "Sub", "Sum", "Swish", "Tan",
    "Tanh", "ThresholdedRelu", "Where", "Xor",
)  # fmt: skip

OF_ROWS = (
    "AveragePool", "BatchNormalization", "Conv", "ConvTranspose", "DepthToSpace", "Det", "GlobalAveragePool", "GlobalLpPool",
    "GlobalMaxPool", "GridSample", "GroupNormalization", "InstanceNormalization", "LRN", "LpPool", "MaxPool", "Resize",
    "SpaceToDepth",
)  # fmt: skip

SPLIT_UP = (
    "DynamicQuantizeLinear", "MeanVarianceNormalization", "SwiGLU", "SequenceConstruct", "SequenceInsert", "SequenceAt",
    "ConcatFromSequence",
)  # fmt: skip
"""Operators that become others, which have rules."""

REDUCTIONS = ("L1", "L2", "LogSum", "LogSumExp", "Max", "Mean", "Min", "Prod", "Sum", "SumSquare")

RULES: dict[str, Rule] = {
    **dict.fromkeys(ELEMENTWISE, elementwise),
    **dict.fromkeys(OF_ROWS, rows),
    **{f"Reduce{kind}": reduced for kind in REDUCTIONS},
    **dict.fromkeys(("ArgMax", "ArgMin"), arg),
    **dict.fromkeys(("CumSum", "CumProd"), cumulative),
    **dict.fromkeys(("LayerNormalization", "RMSNormalization"), normalized),
    **dict.fromkeys(("Hardmax", "LpNormalization"), along_others),
    **dict.fromkeys(("DequantizeLinear", "QuantizeLinear"), like_first),
    **dict.fromkeys(("Softmax", "LogSoftmax"), softmax),
    **dict.fromkeys(("ScatterElements", "ScatterND"), scatter),
    "Concat": concat,
    "ConstantOfShape": constant_of_shape,
    "Expand": expand,
    "Flatten": flatten,
    "Gather": gather,
    "GatherElements": gather_elements,
    "GatherND": gather_nd,
    "Gemm": gemm,
    "MatMul": matmul,
    "OneHot": one_hot,
    "Pad": padded,
    "Range": range_,
    "Reshape": reshape,
    "RoiAlign": roi_align,
    "Shape": shape_of,
    "Size": size_of,
    "Slice": sliced,
    "Split": split,
    "Squeeze": squeeze,
    "Tile": tile,
    "TopK": top_k,
    "Transpose": transpose,
    "Unsqueeze": unsqueeze,
}
"""By operator, of nodes that read an axis whose extent the data decide, or a shape that does."""


def sizes(folder: Folding, limits: Mapping[str, int]) -> Sizes:
    """What handles such axes of the graph that is folded; `limits`, how much nodes find at most, where the user says it."""
    return Sizes(folder, Rules(COUNTS, RULES, SPLIT_UP, numbers_of), limits)
