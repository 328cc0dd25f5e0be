"""Operators that mix what there is along such an axis: what is not there must not count."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnx.helper

from tccompile.load.counted.late import numbers
from tccompile.load.counted.parts import from_beginning
from tccompile.load.sizes import Axes, Number, Size, Sizes
from tccompile.load.valid import title


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
    if (place := _place_in_rows(s, node, x, axis)) is not None:
        y = s.add("Unsqueeze", [place, s.constant([axis])]) if keep else place
        s.says(y, out)
        return s.instead("Identity", [y])
    x = s.masked(x, axis, extreme(s.folder.type_of(x, node).dtype, node.op_type == "ArgMin"))
    return s.instead(node.op_type, [x], axis=axis, keepdims=keep)


def _place_in_rows(s: Sizes, node: onnx.NodeProto, x: str, axis: int) -> str | None:
    """Along an axis that is the last two of another tensor, put behind one another: the first row with the largest element, and
    the first such element in it. None for other axes."""
    while ("packed", x) not in s.made:
        maker = s.maker(x)
        if maker is None or maker.op_type != "Reshape" or s.shape(maker.input[0]) != s.shape(x):
            return None
        x = maker.input[0]
    whole, axes = s.made["packed", x]
    rank = len(s.shape(whole))
    if axes != (rank - 2, rank - 1) or axis != rank - 2 or any(a not in axes for a in s.of(whole)):
        return None
    width = s.of(whole).get(rank - 1, s.shape(whole)[rank - 1])
    fill = extreme(s.folder.type_of(whole, node).dtype, node.op_type == "ArgMin")
    for a in axes:
        whole = s.masked(whole, a, fill) if a in s.of(whole) else whole
    best = s.add(node.op_type.replace("Arg", "Reduce"), [whole, s.constant([rank - 1])], keepdims=0)
    row = s.add(node.op_type, [best], axis=rank - 2, keepdims=0)
    line = s.add("GatherND", [whole, s.add("Unsqueeze", [row, s.constant([rank - 2])])], batch_dims=rank - 2)
    column = s.add(node.op_type, [line], axis=rank - 2, keepdims=0)
    count = width.count if isinstance(width, Size) else s.constant([width])
    return s.add("Add", [s.add("Mul", [row, count]), column])


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
    x, largest = node.input[0], s.attribute("largest", 1)
    axis = s.attribute("axis", -1) % len(s.shape(x))
    wanted = numbers(s, 1, s.shape(x)[axis])
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
    """A row for each region; those that are not there are of image -1, and nothing is read for them."""
    x, rois, images = node.input
    for axis in s.of(x):
        raise s.refuse(x, axis)
    if s.of(rois).get(0) != s.of(images).get(0):
        name = rois if s.of(rois) else images
        raise s.refuse(name, 0, "regions and the images that they are of are not as many")
    if 0 in s.of(images):
        node.input[2] = s.masked(images, 0, -1)
    return s.says(node.output[0], {a: size for a, size in s.of(rois).items() if a == 0})


def one_hot(s: Sizes, node: onnx.NodeProto) -> bool:
    """An axis more, which may be as long as the data say."""
    x, depth = node.input[0], numbers(s, 1)
    rank = len(s.shape(x)) + 1
    axis = s.attribute("axis", -1) % rank
    kept = [a for a in range(rank) if a != axis]
    out = {kept[a]: size for a, size in s.of(x).items()}
    if depth is not None and isinstance(depth[0], Size):
        node.input[0], node.input[1] = from_beginning(s, x, depth[0].count), s.constant(depth[0].limit)
        out[axis] = depth[0]
    return s.says(node.output[0], out)


def _as_many(s: Sizes, indices: str, updates: str) -> str:
    """Indices as many as updates that are of one number at most: more of them are an error, in ONNX Runtime, too."""
    there, given = s.of(indices).get(0), s.of(updates).get(0)
    if there is None or given is None or there == given or s.made.get(("parts", given.count), ())[:2] != ("Min", there):
        return indices
    s.limited.append(Size(there.count, given.limit, title(s.node), limited=True))
    with s.as_bounds(indices):
        fewer = s.add("Slice", [indices, s.constant([0]), s.constant([given.limit]), s.constant([0])])
    s.says(fewer, {0: given})
    return fewer


def scatter(s: Sizes, node: onnx.NodeProto) -> bool:
    """Updates, of which those that are not there go to a place beyond the result."""
    x, indices, updates = node.input
    shape, own, nd = s.shape(x), s.of(x), node.op_type == "ScatterND"
    axis = 0 if nd else s.attribute("axis", 0) % len(shape)
    for a in own:
        if a != axis:
            raise s.refuse(x, a)
    indices = _as_many(s, indices, updates)
    counted = s.of(indices)
    if any(s.of(updates).get(a) != size for a, size in counted.items()) or len(counted) > 1 or len(s.of(updates)) > 1:
        name = indices if counted else updates
        raise s.refuse(name, next(iter(s.of(name))), "updates and their indices are not as many")
    depth = s.shape(indices)[-1] if nd else 1
    ends = [own[a].count if a in own else s.constant([n]) for a, n in enumerate(shape) if a < depth or not nd]
    place = from_beginning(s, indices, s.add("Concat", ends, axis=0) if nd else ends[axis])
    for along in counted:
        place = s.masked(place, along, shape[axis])
        if depth > 1:  # the other coordinates stay inside
            place = s.add("Min", [place, s.constant([shape[0], *(n - 1 for n in shape[1:depth])])])
    how = {"reduction": s.attribute("reduction", b"none").decode()} | ({} if nd else {"axis": axis})
    with s.as_bounds(x, updates):
        beyond = [0] * len(shape)
        beyond[axis] = 1
        room = s.made.get(("room", x, axis)) or s.add("Pad", [x, s.constant([0] * len(shape) + beyond)])
        y = s.add(node.op_type, [room, place, updates], **how)
    s.instead("Slice", [y, s.constant([0]), s.constant([shape[axis]]), s.constant([axis])])
    s.made["room", s.folder.resolved(node.output[0]), axis] = y  # whoever writes to that in turn has a place beyond it already
    return s.says(node.output[0], own) or True
