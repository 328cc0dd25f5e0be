"""Shapes that are computed from how much there is, and what is made in them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import onnx
import onnx.helper

from tccompile.errors import UnsupportedError
from tccompile.load.counted.late import numbers, packed
from tccompile.load.sizes import Axes, Number, Rest, Size, Sizes
from tccompile.load.valid import title


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


def bounds_of(numbers: Iterable[Number]) -> list[int]:
    return [n.limit if isinstance(n, Size) else n for n in numbers]


def _wanted(s: Sizes, i: int) -> tuple[Number, ...] | None:
    """The numbers that input i holds, which then holds their bounds; None where they are not known."""
    found = s.number(s.node.input[i]) if s.node.op_type == "Reshape" else numbers(s, i)
    if found is not None and any(isinstance(n, Size) for n in found):
        s.node.input[i] = s.constant(bounds_of(found)) if s.shape(s.node.input[i]) else s.constant(bounds_of(found)[0])
    return found


def reshape(s: Sizes, node: onnx.NodeProto) -> bool:
    x, wanted = node.input[0], _wanted(s, 1)
    if wanted is None:  # other rules say that it must be known
        return False
    shape, own = s.shape(x), s.of(x)
    if not s.attribute("allowzero", 0):
        wanted = tuple(shape[i] if n == 0 and isinstance(n, int) else n for i, n in enumerate(wanted))
    target, known = bounds_of(wanted), math.prod(n for n in bounds_of(wanted) if n != -1)
    target = [math.prod(shape) // max(known, 1) if n == -1 else n for n in target]
    if math.prod(target) != math.prod(shape):
        axis = next(iter(own), None)
        if axis is None:
            return False
        raise s.refuse(x, axis, f"its shape is {list(target)}, where there is room for {list(shape)}")
    x = node.input[0] = _together(s, x, target)
    out = regrouped(s, x, target)
    if any(isinstance(n, Size) and out.get(a) != n for a, n in enumerate(wanted)):
        raise UnsupportedError(
            f"{title(node)}: its shape ({node.input[1]}) depends on the data in another way than its input does: "
            "end the model before it"
        )
    node.input[1] = s.constant(target)
    return s.says(node.output[0], out)


def regrouped(s: Sizes, x: str, target: Sequence[int]) -> Axes:
    """The axes of x as the target's: those that stay, and outermost ones of a group that are merged with others or split."""
    shape, own, out = s.shape(x), s.of(x), Axes()
    for first, i, to, j in _groups(shape, target):
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


def _groups(shape: Sequence[int], target: Sequence[int]) -> Iterator[tuple[int, int, int, int]]:
    """The least groups of axes with as many elements: where each begins and ends, in one shape and in the other."""
    i = j = 0
    while i < len(shape) or j < len(target):
        first, to = i, j
        left = right = 1
        while True:
            if i < len(shape) and (left <= right or j >= len(target)):
                left, i = left * shape[i], i + 1
            elif j < len(target):
                right, j = right * target[j], j + 1
            if (left == right and j > to and i > first) or (i == len(shape) and j == len(target)):
                break
        yield first, i, to, j


def _together(s: Sizes, x: str, target: Sequence[int]) -> str:
    """x, the elements of whose axes lie together that become one axis, and of which others than the first are counted."""
    for first, i, to, j in reversed(list(_groups(s.shape(x), target))):
        axes = [a for a in range(first, i) if s.shape(x)[a] != 1 or a in s.of(x)]
        if sum(target[a] != 1 for a in range(to, j)) == 1 and any(a in s.of(x) for a in axes[1:]):
            x = packed(s, x, list(range(first, i)))
    return x


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
    start, limit, step = s.number(node.input[0]), numbers(s, 1), s.number(node.input[2])
    if start is None or limit is None or step != (1,) or not isinstance(start[0], int) or not isinstance(limit[0], Size):
        return False
    size = s.combined("Sub", limit[0], start[0])
    assert isinstance(size, Size)
    dtype = s.folder.type_of(node.input[0], node).dtype
    values = s.constant(np.arange(start[0], start[0] + size.limit), dtype)
    s.says(node.output[0], {0: size})
    return s.instead("Identity", [values])
