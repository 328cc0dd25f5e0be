"""concat(f(x₀), f(x₁), …) = f(x): what an iteration of an unrolled loop makes of its slice is made of all slices at once.

The operands of a Concat, or of a sum that goes on from one iteration to the next, are lanes: in each, the same operators with
the same attributes stand between slices of one tensor (or constants, or what all lanes read) and the result. They become one
set of operators over a new first axis, that of the lanes.

Slices may differ in length along one axis, as bags of words do. Then they are padded with copies of their last element, which
change no maximum, and which sums and means leave out.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any, TypeAlias

import numpy as np
import onnx_graphsurgeon as gs

from tccompile.ir.weights import same, sources_of
from tccompile.load.constants import Weight, decide_by, derived, held, literal
from tccompile.rewrites.rule import Editor, Rewrite, constant, ints, name_of, operand, rank
from tccompile.rewrites.transposes import ELEMENTWISE, REDUCTIONS

Shape = tuple[int, ...]

LEAST = 8
"""Lanes from which a loop is worth another form: branches of a network, which are fewer, stay as they are."""

MOST = 1 << 27
"""Elements of a tensor of all lanes."""

SUMMED = 1 << 22
"""Elements of all lanes that are added up: more take longer through memory than a sum that is computed as it is read."""

ADDED = ("float16", "float32", "float64", "int32", "int64")
"""Types that ReduceSum takes."""

WASTE = 4
"""How often lanes of different lengths may take what they hold; beyond, those of about the same length go together."""

DEPTH = 150
"""Operators of a lane, one after the other."""

ALIKE = 6
"""How many operators back lanes must agree to be tried as one."""

POINTWISE = (*ELEMENTWISE, "IsInf", "IsNaN", "Mod", "Tan", "Xor")
FRAMES = (
    "AveragePool", "BatchNormalization", "Conv", "ConvTranspose", "DepthToSpace", "GlobalAveragePool", "GlobalMaxPool",
    "GroupNormalization", "InstanceNormalization", "LRN", "MaxPool", "SpaceToDepth",
)  # fmt: skip
"""Operators that treat the elements of their first axis alike: those of all lanes become one first axis."""

NOTHING = {"ReduceSum": 0, "ReduceL1": 0, "ReduceL2": 0, "ReduceSumSquare": 0, "ReduceMean": 0, "ReduceProd": 1}
"""What an element must be to change nothing, by reduction."""


@dataclass(frozen=True, eq=False)
class Apply:
    """A node to be made, and the tensor that it writes."""

    op: str
    inputs: tuple[gs.Tensor | Apply | None, ...]
    shape: Shape
    dtype: Any
    like: gs.Node
    attributes: tuple[tuple[str, Any], ...] = ()


Piece: TypeAlias = "gs.Tensor | Apply"


@dataclass(frozen=True)
class Stack:
    """A tensor of every lane as one tensor.

    value    of shape (lanes, *shape); of `shape` if it is the same in all lanes
    shape    of a lane; along an axis where lanes differ, the largest extent
    ragged   that axis, and its extent in each lane; elements beyond are copies of the last
    """

    value: Piece
    shape: Shape
    same: bool = False
    ragged: tuple[int, Shape] | None = None


def _dtype(piece: Piece) -> np.dtype:
    return np.dtype(piece.dtype)


def _shape(t: gs.Tensor) -> Shape:
    return tuple(int(n) for n in t.shape)


def _attributes(node: gs.Node) -> tuple[tuple[str, Any], ...]:
    plain = {k: tuple(v) if isinstance(v, list | tuple) else v for k, v in node.attrs.items()}
    return tuple(sorted(plain.items()))


def _producer(t: gs.Tensor) -> gs.Node | None:
    node = t.inputs[0] if not isinstance(t, gs.Constant) and len(t.inputs) == 1 else None
    return node if node is not None and node.domain in (None, "", "ai.onnx") else None


# --- Slices ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Part:
    """Elements of a tensor: along some axes those at `at`; the axis `dropped` is left out."""

    source: gs.Tensor
    at: dict[int, np.ndarray]
    dropped: int | None = None


def part(t: gs.Tensor) -> Part | None:
    """What a Slice, a Split or a Gather takes at places that are known."""
    node = _producer(t)
    if node is None or node.op not in ("Gather", "Slice", "Split") or isinstance(node.inputs[0].dtype, int):
        return None
    x = node.inputs[0]
    shape = _shape(x)
    match node.op:
        case "Slice":
            return _sliced(node, x, shape)
        case "Split":
            axis = int(node.attrs.get("axis", 0)) % len(shape)
            number = next(i for i, y in enumerate(node.outputs) if y is t)
            start = sum(_shape(y)[axis] for y in node.outputs[:number])
            return Part(x, {axis: np.arange(start, start + _shape(t)[axis])})
        case "Gather":
            indices = constant(node.inputs[1])
            if indices is None or len(indices.shape) > 1:
                return None
            axis = int(node.attrs.get("axis", 0)) % len(shape)
            at = np.asarray(indices.values, np.int64)
            if ((at < -shape[axis]) | (at >= shape[axis])).any():
                return None
            at = np.where(at < 0, at + shape[axis], at)
            return Part(x, {axis: at.reshape(-1)}, axis if at.ndim == 0 else None)
    return None


def _sliced(node: gs.Node, x: gs.Tensor, shape: Shape) -> Part | None:
    given = [ints(operand(node, i)) for i in (1, 2, 3, 4)]
    if any(v is None and operand(node, i) is not None for i, v in enumerate(given, 1)):
        return None
    starts, ends = given[0] or (), given[1] or ()
    axes, steps = given[2] or tuple(range(len(starts))), given[3] or (1,) * len(starts)
    at = {}
    for start, end, axis, step in zip(starts, ends, axes, steps, strict=True):
        n = shape[axis]
        at[axis % len(shape)] = np.arange(n)[slice(start, None if step < 0 and end < -n else end, step)]
    return Part(x, at)


# --- Lanes as one ----------------------------------------------------------------------------------------------------


class Stacker:
    """Finds what tensors of lanes are as one; makes no node yet. Remembers what it found, for results that share it."""

    def __init__(self) -> None:
        self.found: dict[tuple[int, ...], tuple[Sequence[gs.Tensor], Stack | None]] = {}
        self.made: dict[int, tuple[Apply, gs.Tensor]] = {}
        self.depth = 0

    def stack(self, lanes: Sequence[gs.Tensor]) -> Stack | None:
        key = tuple(map(id, lanes))
        if key not in self.found and self.depth < DEPTH:
            self.depth += 1
            found = self.stacked(lanes)
            self.depth -= 1
            if found is not None and math.prod(found.shape) * (1 if found.same else len(lanes)) > MOST:
                found = None
            self.found[key] = lanes, found
        return self.found.get(key, (lanes, None))[1]

    def stacked(self, lanes: Sequence[gs.Tensor]) -> Stack | None:
        first = lanes[0]
        if any(not t.name and not isinstance(t, gs.Constant) for t in lanes) or any(isinstance(t.dtype, int) for t in lanes):
            return None
        if all(t is first for t in lanes):
            return Stack(first, _shape(first), True)
        if any(isinstance(t, gs.Constant) for t in lanes):
            return _constants(lanes)
        nodes = [_producer(t) for t in lanes]
        if any(n is None for n in nodes):
            return None
        parts = [part(t) for t in lanes]
        if all(p is not None and p.source is parts[0].source and p.dropped == parts[0].dropped for p in parts):  # type: ignore[union-attr]
            return self.taken(parts, nodes[0], lanes)  # type: ignore[arg-type]
        return self.same_node(lanes, nodes)  # type: ignore[arg-type]

    def same_node(self, lanes: Sequence[gs.Tensor], nodes: Sequence[gs.Node]) -> Stack | None:
        node, number = nodes[0], next(i for i, y in enumerate(nodes[0].outputs) if y is lanes[0])
        rule = RULES.get(node.op)
        if rule is None or any(
            n.op != node.op
            or len(n.inputs) != len(node.inputs)
            or next(i for i, y in enumerate(n.outputs) if y is t) != number
            or _attributes(n) != _attributes(node)
            for n, t in zip(nodes, lanes, strict=True)
        ):
            return None
        inputs: list[Stack | None] = []
        for i in range(len(node.inputs)):
            left_out = [not n.inputs[i].name and not isinstance(n.inputs[i], gs.Constant) for n in nodes]
            found = None if all(left_out) or any(left_out) else self.stack([n.inputs[i] for n in nodes])
            if found is None and not all(left_out):
                return None
            inputs.append(found)
        if all(s is None or s.same for s in inputs):
            return Stack(lanes[0], _shape(lanes[0]), True)
        return rule(Lanes(node, lanes, number), *inputs)

    def taken(self, parts: Sequence[Part], node: gs.Node, lanes: Sequence[gs.Tensor]) -> Stack | None:
        """Of one tensor, along one axis: a Gather of all places. Along others, all lanes take the same."""
        x = parts[0].source
        shape = _shape(x)
        axes = sorted({a for p in parts for a in p.at})
        at = {a: [p.at.get(a, np.arange(shape[a])) for p in parts] for a in axes}
        differ = [a for a, places in at.items() if any(not np.array_equal(p, places[0]) for p in places)]
        if not differ:
            return Stack(lanes[0], _shape(lanes[0]), True)
        if len(differ) > 1 or any(not len(p) for p in at[differ[0]]):
            return None
        value: Piece = x
        for a in axes:
            if a not in differ and len(at[a][0]) != shape[a]:
                shape = (*shape[:a], len(at[a][0]), *shape[a + 1 :])
                value = _gather(value, at[a][0], a, shape, node)
            elif a not in differ and not np.array_equal(at[a][0], np.arange(shape[a])):
                value = _gather(value, at[a][0], a, shape, node)
        (axis,) = differ
        lengths = tuple(map(len, at[axis]))
        places = np.stack([np.pad(p, (0, max(lengths) - len(p)), mode="edge") for p in at[axis]])
        inner = () if parts[0].dropped is not None else (max(lengths),)
        lane = (*shape[:axis], *inner, *shape[axis + 1 :])
        whole = (*shape[:axis], len(parts), *inner, *shape[axis + 1 :])
        value = _gather(value, places.reshape(len(parts), *inner), axis, whole, node)
        ragged = (axis, lengths) if len(set(lengths)) > 1 else None
        return Stack(_lanes_first(value, axis, node), lane, False, ragged)

    # --- nodes

    def emit(self, edit: Editor, piece: Piece | None, into: gs.Tensor | None = None) -> gs.Tensor:
        """The tensor of a piece, whose node is made unless there is one."""
        if piece is None:
            return gs.Variable.empty()
        if not isinstance(piece, Apply):
            if isinstance(piece, gs.Constant) and not piece.name:
                edit.named(piece, "lanes")  # type: ignore[arg-type]
            return piece
        known = self.made.get(id(piece))
        if known is not None and known[1].inputs:
            return known[1]
        inputs = [self.emit(edit, x) for x in piece.inputs]
        name = edit.name(f"{name_of(piece.like)}/lanes/{piece.op}")
        if into is None:
            into = gs.Variable(name, np.dtype(piece.dtype), list(piece.shape))
        else:
            for old in list(into.inputs):
                old.outputs.clear()
            name = name_of(piece.like)
        edit.graph.nodes.append(gs.Node(piece.op, name, dict(piece.attributes), inputs, [into]))
        self.made[id(piece)] = piece, into
        return into


def _constants(lanes: Sequence[gs.Tensor]) -> Stack | None:
    first = lanes[0]
    if not all(isinstance(t, Weight) and t.shape == first.shape and t.dtype == first.dtype for t in lanes):
        return None
    shape = _shape(first)
    if all(same(t.recipe, first.recipe) for t in lanes):
        return Stack(first, shape, True)
    if all(np.array_equal(held(t), held(first)) for t in lanes):
        for t in lanes:
            decide_by(*sources_of(t.recipe))
        return Stack(first, shape, True)
    rows = [derived("", "reshape", t, shape=(1, *shape)) for t in lanes]
    return Stack(derived("", "concat", *rows, axis=0), shape)


# --- Pieces ----------------------------------------------------------------------------------------------------------


def _apply(op: str, inputs: Iterable[Piece | None], shape: Shape, like: gs.Node, dtype: Any = None, **attributes: Any) -> Apply:
    given = tuple(inputs)
    assert given[0] is not None
    return Apply(op, given, shape, _dtype(given[0]) if dtype is None else dtype, like, tuple(attributes.items()))


def _numbers(values: Iterable[int]) -> Weight:
    return literal("", np.array(list(values), np.int64))


def _reshaped(x: Piece, shape: Shape, like: gs.Node) -> Piece:
    return x if tuple(x.shape) == shape else _apply("Reshape", [x, _numbers(shape)], shape, like)


def _gather(x: Piece, places: np.ndarray, axis: int, shape: Shape, like: gs.Node) -> Apply:
    return _apply("Gather", [x, literal("", places)], shape, like, axis=axis)


def _moved(x: Piece, perm: Sequence[int], like: gs.Node) -> Piece:
    if list(perm) == list(range(len(perm))):
        return x
    return _apply("Transpose", [x], tuple(int(x.shape[a]) for a in perm), like, perm=list(perm))


def _lanes_first(x: Piece, axis: int, like: gs.Node) -> Piece:
    return _moved(x, [axis, *(a for a in range(len(x.shape)) if a != axis)], like)


# --- Rules -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Lanes:
    """The first lane's node, the tensors of which it writes that of the first, and which of its outputs that is."""

    node: gs.Node
    tensors: Sequence[gs.Tensor]
    number: int

    @property
    def count(self) -> int:
        return len(self.tensors)

    @property
    def dtype(self) -> Any:
        return self.tensors[0].dtype

    def attribute(self, name: str, default: Any) -> Any:
        return self.node.attrs.get(name, default)

    def shape(self, ragged: tuple[int, Shape] | None) -> Shape:
        """That of the result in a lane."""
        shape = list(_shape(self.tensors[0]))
        if ragged is not None:
            shape[ragged[0]] = max(ragged[1])
        return tuple(shape)

    def result(self, value: Piece, ragged: tuple[int, Shape] | None = None) -> Stack:
        return Stack(value, self.shape(ragged), False, ragged)

    def apply(
        self, inputs: Sequence[Piece | None], ragged: tuple[int, Shape] | None = None, op: str = "", **changed: Any
    ) -> Stack:
        """The node itself with other inputs and attributes, of all lanes."""
        shape = (self.count, *self.shape(ragged))
        attributes = self.node.attrs | changed
        return self.result(_apply(op or self.node.op, inputs, shape, self.node, self.dtype, **attributes), ragged)

    def spread(self, s: Stack) -> Piece:
        """With an axis of lanes, though it is the same in all."""
        if not s.same:
            return s.value
        rows = _reshaped(s.value, (1, *s.shape), self.node)
        whole = (self.count, *s.shape)
        return _apply("Expand", [rows, _numbers(whole)], whole, self.node)

    def aligned(self, s: Stack, axes: int) -> Piece:
        """To be broadcast with lanes of so many axes."""
        if s.same or len(s.shape) >= axes:
            return s.value
        return _reshaped(s.value, (self.count, *(1,) * (axes - len(s.shape)), *s.shape), self.node)

    def only(self, s: Stack, fill: int) -> Piece:
        """`fill` in place of elements beyond a lane's own."""
        if s.ragged is None:
            return s.value
        axis, lengths = s.ragged
        there = np.arange(max(lengths)) < np.array(lengths)[:, None]
        mask = there.reshape(self.count, *(max(lengths) if a == axis else 1 for a in range(len(s.shape))))
        inputs = [literal("", mask), s.value, literal("", np.array(fill, _dtype(s.value)))]
        return _apply("Where", inputs, (self.count, *s.shape), self.node, _dtype(s.value))


Rule = Callable[..., "Stack | None"]
"""What a node of all lanes makes of its inputs as one, which are not all the same in all lanes; None if that is not known."""


def _pointwise(lanes: Lanes, *inputs: Stack | None) -> Stack | None:
    axes = rank(lanes.tensors[0])
    if lanes.node.op == "Clip" and any(s is not None and not s.same for s in inputs[1:]):
        return None
    ragged: tuple[int, Shape] | None = None
    for s in inputs:
        if s is not None and s.ragged is not None:
            found = s.ragged[0] + axes - len(s.shape), s.ragged[1]
            if ragged not in (None, found):
                return None
            ragged = found
    for s in inputs if ragged else ():
        if s is not None and s.ragged is None:
            axis = ragged[0] - axes + len(s.shape)  # type: ignore[index]
            if axis >= 0 and s.shape[axis] != 1:
                return None
    return lanes.apply([None if s is None else lanes.aligned(s, axes) for s in inputs], ragged)


def _same_rest(*inputs: Stack | None) -> bool:
    return all(s is None or s.same for s in inputs)


def _matmul(lanes: Lanes, a: Stack, b: Stack) -> Stack | None:
    """Rows of all lanes by one matrix are one product; else a product for each lane."""
    node, n = lanes.node, lanes.count
    if b.same and len(b.shape) == 2 and not a.same:
        if a.ragged is not None and a.ragged[0] == len(a.shape) - 1:
            return None
        shape = (n, *a.shape[:-1], b.shape[1])
        rows = _reshaped(a.value, (math.prod(shape[:-1]), a.shape[-1]), node)
        product = _apply("MatMul", [rows, b.value], (math.prod(shape[:-1]), b.shape[1]), node, lanes.dtype)
        return lanes.result(_reshaped(product, shape, node), a.ragged)
    if a.ragged or b.ragged or len(a.shape) < 2 or len(b.shape) < 2:
        return None
    axes = max(len(a.shape), len(b.shape))
    return lanes.apply([lanes.aligned(a, axes), lanes.aligned(b, axes)])


def _gemm(lanes: Lanes, a: Stack, b: Stack, c: Stack | None = None) -> Stack | None:
    wide = c is not None and len(c.shape) == 2 and c.shape[0] > 1
    if lanes.attribute("transA", 0) or not _same_rest(b, c) or wide or (a.ragged and a.ragged[0]):
        return None
    columns = _shape(lanes.tensors[0])[1]
    rows = lanes.count * a.shape[0]
    inputs = [_reshaped(a.value, (rows, a.shape[1]), lanes.node), b.value, c.value if c else None]
    product = _apply("Gemm", inputs, (rows, columns), lanes.node, lanes.dtype, **lanes.node.attrs)
    return lanes.result(_reshaped(product, (lanes.count, a.shape[0], columns), lanes.node), a.ragged)


def _gather_rule(lanes: Lanes, x: Stack, indices: Stack) -> Stack | None:
    axis = lanes.attribute("axis", 0) % len(x.shape)
    before, after = x.shape[:axis], x.shape[axis + 1 :]
    if x.same:
        ragged = (axis + indices.ragged[0], indices.ragged[1]) if indices.ragged else None
        whole = (*before, lanes.count, *indices.shape, *after)
        value = _apply("Gather", [x.value, indices.value], whole, lanes.node, axis=axis)
        return lanes.result(_lanes_first(value, axis, lanes.node), ragged)
    if not indices.same or (x.ragged and x.ragged[0] == axis):
        return None
    ragged = x.ragged
    if ragged and ragged[0] > axis:
        ragged = ragged[0] + len(indices.shape) - 1, ragged[1]
    return lanes.apply([x.value, indices.value], ragged, axis=axis + 1)


def _reshape(lanes: Lanes, x: Stack, *rest: Stack | None) -> Stack | None:
    """Reshape, Flatten, Squeeze and Unsqueeze. Where lanes differ along one axis, it must stay one axis."""
    ragged = None
    if x.ragged is not None:
        shapes = [_shape(t) for t in lanes.tensors]
        if len(set(map(len, shapes))) > 1:
            return None
        differ = [a for a, extents in enumerate(zip(*shapes, strict=True)) if len(set(extents)) > 1]
        if len(differ) != 1 or tuple(s[differ[0]] for s in shapes) != x.ragged[1]:
            return None
        if math.prod(shapes[0][: differ[0]]) != math.prod(x.shape[: x.ragged[0]]):
            return None
        ragged = differ[0], x.ragged[1]
    elif any(t.shape != lanes.tensors[0].shape for t in lanes.tensors):
        return None
    return lanes.result(_reshaped(x.value, (lanes.count, *lanes.shape(ragged)), lanes.node), ragged)


def _transpose(lanes: Lanes, x: Stack) -> Stack | None:
    perm = list(lanes.attribute("perm", None) or reversed(range(len(x.shape))))
    ragged = (perm.index(x.ragged[0]), x.ragged[1]) if x.ragged else None
    return lanes.result(_moved(x.value, [0, *(a + 1 for a in perm)], lanes.node), ragged)


def _concat(lanes: Lanes, *inputs: Stack) -> Stack | None:
    axis = lanes.attribute("axis", 0) % len(inputs[0].shape)
    ragged = inputs[0].ragged
    if any(s.ragged != ragged for s in inputs) or (ragged and ragged[0] == axis):
        return None
    return lanes.apply([lanes.spread(s) for s in inputs], ragged, axis=axis + 1)


def _reduce(lanes: Lanes, x: Stack, axes: Stack | None = None) -> Stack | None:
    if axes is not None and not isinstance(axes.value, gs.Constant):
        return None
    given = () if axes is None else ints(axes.value) if axes.same else None
    if given is None or (not given and lanes.attribute("noop_with_empty_axes", 0)):
        return None
    over = sorted(a % len(x.shape) for a in given) or list(range(len(x.shape)))
    kept, op = int(lanes.attribute("keepdims", 1)), lanes.node.op
    numbers = _numbers(a + 1 for a in over)
    if x.ragged is None or x.ragged[0] not in over:
        ragged = x.ragged
        if ragged and not kept:
            ragged = ragged[0] - sum(a < ragged[0] for a in over), ragged[1]
        return lanes.apply([x.value, numbers], ragged, keepdims=kept)
    if op in ("ReduceMax", "ReduceMin"):
        return lanes.apply([x.value, numbers], keepdims=kept)
    if op not in NOTHING:
        return None
    value = lanes.only(x, NOTHING[op])
    return _mean(lanes, x, value, over) if op == "ReduceMean" else lanes.apply([value, numbers], keepdims=kept)


def _mean(lanes: Lanes, x: Stack, value: Piece, over: Sequence[int]) -> Stack | None:
    """Sums, by how many elements each lane has: its length, and the extents of the other axes."""
    assert x.ragged is not None
    others = math.prod(x.shape[a] for a in over if a != x.ragged[0])
    exact = np.array(x.ragged[1]) * others
    total = lanes.apply([value, _numbers(a + 1 for a in over)], op="ReduceSum", keepdims=int(lanes.attribute("keepdims", 1)))
    counts = exact.astype(_dtype(value)).reshape(lanes.count, *(1,) * len(total.shape))
    if _dtype(value).kind != "f" or not np.array_equal(counts.reshape(-1), exact):
        return None
    inputs = [total.value, literal("", counts)]
    return lanes.result(_apply("Div", inputs, (lanes.count, *total.shape), lanes.node, lanes.dtype))


def _softmax(lanes: Lanes, x: Stack) -> Stack | None:
    axis = lanes.attribute("axis", -1) % len(x.shape)
    return None if x.ragged and x.ragged[0] == axis else lanes.apply([x.value], x.ragged, axis=axis + 1)


def _norm(lanes: Lanes, x: Stack, *rest: Stack | None) -> Stack | None:
    axis = lanes.attribute("axis", -1) % len(x.shape)
    if not _same_rest(*rest) or lanes.number or (x.ragged and x.ragged[0] >= axis):
        return None
    return lanes.apply([x.value, *(s.value if s else None for s in rest)], x.ragged, axis=axis + 1)


def _expand(lanes: Lanes, x: Stack, shape: Stack) -> Stack | None:
    if x.ragged or not shape.same:
        return None
    whole = (lanes.count, *_shape(lanes.tensors[0]))
    return lanes.apply([lanes.aligned(x, len(whole) - 1), _numbers(whole)])


def _slice(lanes: Lanes, x: Stack, *where: Stack | None) -> Stack | None:
    given = [s is None or (s.same and isinstance(s.value, gs.Constant)) for s in where]
    if not all(given):
        return None
    starts, ends, axes, steps = (
        ints(s.value) if s is not None else None  # type: ignore[arg-type]
        for s in (*where, None, None)[:4]
    )
    assert starts is not None and ends is not None
    axes = tuple(a % len(x.shape) for a in axes or range(len(starts)))
    if x.ragged and x.ragged[0] in axes:
        return None
    inputs = [x.value, *map(_numbers, (starts, ends, [a + 1 for a in axes], steps or [1] * len(starts)))]
    return lanes.apply(inputs, x.ragged)


def _split(lanes: Lanes, x: Stack, sizes: Stack | None = None) -> Stack | None:
    axis = lanes.attribute("axis", 0) % len(x.shape)
    if (sizes is not None and not sizes.same) or (x.ragged and x.ragged[0] == axis):
        return None
    start = sum(_shape(y)[axis] for y in lanes.node.outputs[: lanes.number])
    cut = [x.value, *(_numbers([v]) for v in (start, start + _shape(lanes.tensors[0])[axis], axis + 1))]
    return lanes.result(_apply("Slice", cut, (lanes.count, *lanes.shape(x.ragged)), lanes.node), x.ragged)


def _frames(lanes: Lanes, x: Stack, *rest: Stack | None) -> Stack | None:
    together = lanes.number or lanes.attribute("training_mode", 0)  # indices and statistics are of all frames
    if together or not _same_rest(*rest) or (x.ragged and x.ragged[0]) or len(x.shape) < 2:
        return None
    rows = lanes.count * x.shape[0]
    shape = lanes.shape(x.ragged)
    inputs = [_reshaped(x.value, (rows, *x.shape[1:]), lanes.node), *(s.value if s else None for s in rest)]
    y = _apply(lanes.node.op, inputs, (rows, *shape[1:]), lanes.node, lanes.dtype, **lanes.node.attrs)
    return lanes.result(_reshaped(y, (lanes.count, *shape), lanes.node), x.ragged)


RULES: dict[str, Rule] = {
    **dict.fromkeys(POINTWISE, _pointwise),
    **dict.fromkeys(REDUCTIONS, _reduce),
    **dict.fromkeys(("LogSoftmax", "Softmax"), _softmax),
    **dict.fromkeys(("LayerNormalization", "RMSNormalization"), _norm),
    **dict.fromkeys(("Flatten", "Reshape", "Squeeze", "Unsqueeze"), _reshape),
    **dict.fromkeys(FRAMES, _frames),
    "Concat": _concat,
    "Expand": _expand,
    "Gather": _gather_rule,
    "Gemm": _gemm,
    "MatMul": _matmul,
    "Slice": _slice,
    "Split": _split,
    "Transpose": _transpose,
}

# --- The rewrite -----------------------------------------------------------------------------------------------------


@dataclass
class Found:
    """Groups of a node's operands, by their numbers, each with what it is as one; and those that stay as they are."""

    groups: list[tuple[list[int], Stack]]
    rest: list[int]


def _match(node: gs.Node) -> gs.Node | None:
    return node if len(node.outputs) == 1 and rank(node.outputs[0]) + (node.op == "Add") else None


def _axis(node: gs.Node) -> int:
    """That of a Concat."""
    return int(node.attrs["axis"]) % rank(node.outputs[0])


def _goes_on(edit: Editor, t: gs.Tensor, reader: gs.Node) -> bool:
    """Whether the node that writes t may be done as part of its reader: a Concat along the same axis, a sum of the same shape."""
    node = _producer(t)
    if node is None or node.op != reader.op or not edit.only_use(t):
        return False
    return _axis(node) == _axis(reader) if node.op == "Concat" else _shape(t) == _shape(reader.outputs[0])


def _operands(edit: Editor, node: gs.Node) -> list[gs.Tensor]:
    """What a Concat puts together or a sum adds up, as often as a result of the same kind is among it."""
    found, todo = [], list(reversed(node.inputs))
    while todo:
        t = todo.pop()
        if _goes_on(edit, t, node):
            todo += reversed(t.inputs[0].inputs)
        else:
            found.append(t)
    return found


def _alike(t: gs.Tensor, known: dict[tuple[int, int], int], depth: int = ALIKE) -> int:
    """What two lanes must have in common to be tried as one: the operators behind them, as one number."""
    node = _producer(t)
    if node is None or depth == 0:
        return isinstance(t, gs.Constant)
    key = id(t), depth
    if key not in known:
        known[key] = hash((node.op, *(_alike(x, known, depth - 1) for x in node.inputs)))
    return known[key]


def _groups(stacker: Stacker, lanes: Sequence[gs.Tensor]) -> Found:
    kinds: dict[int, list[int]] = {}
    known: dict[tuple[int, int], int] = {}
    for i, t in enumerate(lanes):
        kinds.setdefault(_alike(t, known), []).append(i)
    found = Found([], [])
    for numbers in kinds.values():
        for group in _of_a_length(numbers, lanes):
            stack = stacker.stack([lanes[i] for i in group]) if len(group) >= LEAST else None
            if stack is None:
                found.rest += group
            else:
                found.groups.append((group, stack))
    return found


def _of_a_length(numbers: list[int], lanes: Sequence[gs.Tensor]) -> list[list[int]]:
    """Lanes whose slices take about as much; all of them, if they are not too different."""
    lengths = [_length(lanes[i]) for i in numbers]
    if max(lengths) * len(lengths) <= WASTE * sum(lengths):
        return [numbers]
    by_length: dict[int, list[int]] = {}
    for i, n in zip(numbers, lengths, strict=True):
        by_length.setdefault(n.bit_length(), []).append(i)
    return list(by_length.values())


def _length(t: gs.Tensor) -> int:
    """Elements of the first slice that a lane is made of."""
    for _ in range(DEPTH):
        node = _producer(t)
        if node is None:
            break
        if part(t) is not None:
            return math.prod(_shape(t))
        t = next((x for x in node.inputs if _producer(x) is not None), node.inputs[0])
    return 1


def _check(edit: Editor, node: gs.Node) -> str | None:
    y = node.outputs[0]
    if edit.only_use(y) and _goes_on(edit, y, y.outputs[0]):
        return "it is part of a longer one"
    lanes = _operands(edit, node)
    if len(lanes) < LEAST:
        return f"it has {len(lanes)} operands"
    if isinstance(y.dtype, int) or (node.op == "Add" and any(_shape(t) != _shape(y) for t in lanes)):
        return "they are of different shapes"
    if node.op == "Add" and (len(lanes) * math.prod(y.shape) > SUMMED or np.dtype(y.dtype).name not in ADDED):
        return f"they are {len(lanes)} tensors of {math.prod(y.shape)} elements of {y.dtype}"
    found = _groups(_stacker(edit), lanes)
    if 2 * (len(found.groups) + len(found.rest)) > len(lanes):
        return "they are not made in the same way of slices of the same tensors"
    return None


def _apply_lanes(edit: Editor, node: gs.Node) -> None:
    stacker, lanes = _stacker(edit), _operands(edit, node)
    found = _groups(stacker, lanes)
    whole = _sum(node, lanes, found) if node.op == "Add" else _side_by_side(node, lanes, found)
    stacker.emit(edit, whole, node.outputs[0])


def _sum(node: gs.Node, lanes: Sequence[gs.Tensor], found: Found) -> Apply:
    """The sum over lanes, and of what is in none."""
    shape = _shape(node.outputs[0])
    pieces: list[Piece] = []
    for group, stack in found.groups:
        rows = Lanes(node, [lanes[i] for i in group], 0).spread(stack)
        pieces.append(_apply("ReduceSum", [rows, _numbers([0])], shape, node, keepdims=0))
    pieces += [lanes[i] for i in found.rest]
    return reduce(lambda a, b: _apply("Add", [a, b], shape, node), pieces)


def _side_by_side(node: gs.Node, lanes: Sequence[gs.Tensor], found: Found) -> Apply:
    """Lanes after each other along the axis, in the order that they were in."""
    axis, shape = _axis(node), _shape(node.outputs[0])
    starts = np.concatenate([[0], np.cumsum([_shape(t)[axis] for t in lanes])])
    pieces: list[Piece] = [_joined(Lanes(node, [lanes[i] for i in group], 0), stack, axis) for group, stack in found.groups]
    pieces += [lanes[i] for i in found.rest]
    numbers = [i for group, _ in found.groups for i in group] + found.rest
    whole = pieces[0] if len(pieces) == 1 else _apply("Concat", pieces, shape, node, node.outputs[0].dtype, axis=axis)
    order = np.argsort(np.concatenate([np.arange(starts[i], starts[i + 1]) for i in numbers]), kind="stable")
    if not np.array_equal(order, np.arange(len(order))):
        whole = _gather(whole, order, axis, shape, node)
    return whole if isinstance(whole, Apply) else _apply("Reshape", [whole, _numbers(shape)], shape, node)


def _joined(lanes: Lanes, stack: Stack, axis: int) -> Piece:
    """The lanes one after the other along an axis, each as long as it is."""
    n = lanes.count * stack.shape[axis]
    shape = (*stack.shape[:axis], n, *stack.shape[axis + 1 :])
    perm = [*range(1, axis + 1), 0, *range(axis + 1, len(shape) + 1)]
    joined = _reshaped(_moved(lanes.spread(stack), perm, lanes.node), shape, lanes.node)
    if stack.ragged is None:
        return joined
    own = np.concatenate([np.arange(m) + i * stack.shape[axis] for i, m in enumerate(stack.ragged[1])])
    return _gather(joined, own, axis, (*shape[:axis], len(own), *shape[axis + 1 :]), lanes.node)


def _stacker(edit: Editor) -> Stacker:
    return edit.kept.setdefault(Stacker, Stacker())


REWRITES = (
    Rewrite("concat(f(x₀), f(x₁), …) = f(x), for slices x₀, x₁, … of x", ("Concat",), _match, _check, _apply_lanes),
    Rewrite("f(x₀) + f(x₁) + … = sum(f(x)), for slices x₀, x₁, … of x", ("Add",), _match, _check, _apply_lanes),
)
