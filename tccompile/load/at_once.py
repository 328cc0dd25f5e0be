"""Iterations of a loop at once, where none depends on another: the nodes of its body with one more axis in front.

What does not differ between iterations is computed once. Iterations that do not take place are computed as well; indices in them
are 0, since what they are computed from was not meant for it.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import numpy as np
import onnx
import onnx.helper

from tccompile.errors import UnsupportedError
from tccompile.load.counted.rules import ELEMENTWISE, OF_ROWS, REDUCTIONS
from tccompile.load.repeat import INDEXED, INT64, Folding, Repeater, tried
from tccompile.load.sizes import BOOL, OWN, Number, Size
from tccompile.load.types import Type
from tccompile.load.valid import title

MOST_AT_ONCE = 2**27
"""Elements that iterations at once may make. They are written, and memory is kept for some of them, also where few iterations or
none of them take place."""

MOST_PASSING = 2**29
"""The same of a tensor that will most likely not be stored."""

SEVERAL = "#several"
"""What the name of a loop ends with of whose iterations each is several of another loop's."""


def varying(nodes: Sequence[onnx.NodeProto], turn: str) -> set[str]:
    """What differs between iterations: all that is computed of the iteration's number."""
    found = {turn}
    for node in nodes:
        if not found.isdisjoint(node.input):
            found.update(node.output)
    return found


class AtOnce:
    """Makes the nodes of a body nodes of several iterations, which are put behind those that are kept.

    turns  the iterations' numbers, in a row
    there  booleans: which of them take place
    rows   by its name in the body, what is computed of all of them
    """

    def __init__(self, folder: Folding, turn: str, turns: str, there: str) -> None:
        self.folder, self.s, self.there = folder, folder.sizes, there
        self.rows = {turn: turns}
        self.count = self.s.shape(turns)[0]

    def run(self, nodes: Sequence[onnx.NodeProto]) -> None:
        """Raises UnsupportedError, which names a node, for one that has no rule here."""
        for node in nodes:
            self.s.node = node
            rule = RULES.get(node.op_type) if node.domain in ("", "ai.onnx") or node.op_type == "Pick" else None
            if rule is None:
                raise self.refuse(node, "it is computed for one iteration at a time")
            rule(self, node)

    def row(self, name: str) -> str:
        """What is computed of all iterations, also where that is the same for each."""
        if name in self.rows:
            return self.rows[name]
        shape = [self.count, *self.s.shape(name)]
        return self.add("Expand", [name, self.s.constant(shape)])

    # --- for rules

    def shape(self, name: str) -> tuple[int, ...]:
        """Of one iteration."""
        return self.s.shape(self.rows[name])[1:] if name in self.rows else self.s.shape(name)

    def add(self, op: str, inputs: Sequence[str], domain: str = "", **attributes: Any) -> str:
        """A node, in which axes have their bounds for extents: the name of its result."""
        with self.s.as_bounds(*inputs):
            return self.s.add(op, inputs, domain, **attributes)

    def put(self, node: onnx.NodeProto, inputs: Sequence[str], **changed: Any) -> None:
        """The same node with other inputs and attributes, whose results are those of all iterations."""
        attributes = {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute} | changed
        with self.s.as_bounds(*inputs):
            made = self.s.add_all(node.op_type, inputs, len(node.output), node.domain, **attributes)
        self.rows.update(zip(node.output, made, strict=True))

    def reshaped(self, name: str, shape: Sequence[int]) -> str:
        return self.add("Reshape", [name, self.s.constant(list(shape))], allowzero=1)

    def aligned(self, name: str, rank: int) -> str:
        """An operand whose other axes come last: with axes of one element behind that of the iterations."""
        own = self.shape(name)
        if name not in self.rows or len(own) >= rank:
            return self.rows.get(name, name)
        return self.reshaped(self.rows[name], [self.count, *[1] * (rank - len(own)), *own])

    def places(self, name: str) -> str:
        """Indices, which are 0 in iterations that do not take place."""
        at = self.rows[name]
        there = self.reshaped(self.there, [self.count, *[1] * (len(self.s.shape(at)) - 1)])
        return self.add("Where", [there, at, self.s.constant(0, self.folder.type_of(at, self.s.node).dtype)])

    def alone(self, node: onnx.NodeProto, inputs: Sequence[str]) -> None:
        """Raises UnsupportedError unless all but these inputs are the same in all iterations."""
        for name in node.input:
            if name in self.rows and name not in inputs:
                raise self.refuse(node, f"{name!r} differs between iterations")

    def refuse(self, node: onnx.NodeProto, why: str) -> UnsupportedError:
        return UnsupportedError(f"{title(node)}: {why}")


Rule = Callable[[AtOnce, onnx.NodeProto], None]


def _attribute(node: onnx.NodeProto, name: str, default: Any = None) -> Any:
    return next((onnx.helper.get_attribute_value(a) for a in node.attribute if a.name == name), default)


def _elementwise(b: AtOnce, node: onnx.NodeProto) -> None:
    if node.op_type in ("Clip", "Dropout"):
        b.alone(node, node.input[:1])
    rank = max(len(b.shape(x)) for x in node.input if x)
    b.put(node, [b.aligned(x, rank) if x else "" for x in node.input])


def _like_before(b: AtOnce, node: onnx.NodeProto) -> None:
    """What only says other axes."""
    b.alone(node, node.input[:1])
    shape = b.folder.types[node.output[0]].shape
    b.rows[node.output[0]] = b.reshaped(b.rows[node.input[0]], [b.count, *shape])


def _expand(b: AtOnce, node: onnx.NodeProto) -> None:
    b.alone(node, node.input[:1])
    shape = b.folder.types[node.output[0]].shape
    b.put(node, [b.aligned(node.input[0], len(shape)), b.s.constant([b.count, *shape])])


def _along(default: int) -> Rule:
    """What goes along an axis, which an attribute says."""

    def rule(b: AtOnce, node: onnx.NodeProto) -> None:
        b.alone(node, node.input[:1])
        axis = _attribute(node, "axis", default)
        b.put(node, [b.rows[node.input[0]], *node.input[1:]], axis=axis + 1 if axis >= 0 else axis)

    return rule


def _concat(b: AtOnce, node: onnx.NodeProto) -> None:
    axis = _attribute(node, "axis")
    b.put(node, [b.row(x) for x in node.input], axis=axis + 1 if axis >= 0 else axis)


def _reduced(b: AtOnce, node: onnx.NodeProto) -> None:
    b.alone(node, node.input[:1])
    rank, axes = len(b.shape(node.input[0])), None
    if len(node.input) > 1 and node.input[1]:
        axes = b.s.integers(1)
        if axes is None:
            raise b.refuse(node, "its axes are computed")
    if not axes:
        axes = [] if _attribute(node, "noop_with_empty_axes", 0) else list(range(rank))
    if not axes:
        raise b.refuse(node, "it is along no axes")
    b.put(node, [b.rows[node.input[0]], b.s.constant([a % rank + 1 for a in axes])])


def _sliced(b: AtOnce, node: onnx.NodeProto) -> None:
    b.alone(node, node.input[:1])
    rank, starts = len(b.shape(node.input[0])), b.s.integers(1)
    axes = b.s.integers(3, range(len(starts))) if starts is not None else None
    if axes is None:
        raise b.refuse(node, "its starts or axes are computed")
    steps = list(node.input[4:5])
    b.put(node, [b.rows[node.input[0]], *node.input[1:3], b.s.constant([a % rank + 1 for a in axes]), *steps])


def _transposed(b: AtOnce, node: onnx.NodeProto) -> None:
    perm = _attribute(node, "perm", list(range(len(b.shape(node.input[0]))))[::-1])
    b.put(node, [b.rows[node.input[0]]], perm=[0, *(a + 1 for a in perm)])


def _gather(b: AtOnce, node: onnx.NodeProto) -> None:
    x, at = node.input
    rank = len(b.shape(x))
    axis = _attribute(node, "axis", 0) % rank
    if at not in b.rows:
        b.put(node, [b.rows[x], at], axis=axis + 1)
        return
    places = b.places(at)
    if x in b.rows:
        b.rows[node.output[0]] = b.add("GatherEach", [b.rows[x], places], OWN, axis=axis + 1)
        return
    y = b.add("Gather", [x, places], axis=axis)
    if axis:
        y = b.add("Transpose", [y], perm=[axis, *range(axis), *range(axis + 1, len(b.s.shape(y)))])
    b.rows[node.output[0]] = y


def _pick(b: AtOnce, node: onnx.NodeProto) -> None:
    """One of two tensors, by each iteration's condition."""
    rank = len(b.shape(node.input[1]))
    b.rows[node.output[0]] = b.add("Where", [b.aligned(x, rank) for x in node.input])


def _gather_elements(b: AtOnce, node: onnx.NodeProto) -> None:
    x, at = node.input
    axis = _attribute(node, "axis", 0) % len(b.shape(x))
    places = b.places(at) if at in b.rows else b.row(at)
    b.put(node, [b.row(x), places], axis=axis + 1)


def _gather_nd(b: AtOnce, node: onnx.NodeProto) -> None:
    x, at = node.input
    b.put(node, [b.row(x), b.places(at) if at in b.rows else b.row(at)], batch_dims=_attribute(node, "batch_dims", 0) + 1)


def _product(b: AtOnce, node: onnx.NodeProto) -> None:
    ranks = [len(b.shape(x)) for x in node.input]
    if min(ranks) < 2:
        raise b.refuse(node, "it is a product of a vector")
    b.put(node, [b.aligned(x, max(ranks)) for x in node.input])


def _of_rows(b: AtOnce, node: onnx.NodeProto) -> None:
    """What computes of each image by itself: all images of all iterations."""
    b.alone(node, node.input[:1])
    if len(node.output) > 1:
        raise b.refuse(node, "it has several results")
    images, *shape = b.shape(node.input[0])
    flat = b.reshaped(b.rows[node.input[0]], [b.count * images, *shape])
    b.put(node, [flat, *node.input[1:]])
    y = node.output[0]
    b.rows[y] = b.reshaped(b.rows[y], [b.count, *b.folder.types[y].shape])


RULES: dict[str, Rule] = {
    **dict.fromkeys(ELEMENTWISE, _elementwise),
    **dict.fromkeys((op for op in OF_ROWS if op != "GridSample"), _of_rows),
    **{f"Reduce{kind}": _reduced for kind in REDUCTIONS},
    **dict.fromkeys(("ArgMax", "ArgMin"), _along(0)),
    **dict.fromkeys(("LogSoftmax", "Softmax", "TopK", "LayerNormalization"), _along(-1)),
    **dict.fromkeys(("Flatten", "Reshape", "Squeeze", "Unsqueeze"), _like_before),
    "Concat": _concat,
    "Expand": _expand,
    "Gather": _gather,
    "GatherElements": _gather_elements,
    "GatherND": _gather_nd,
    "MatMul": _product,
    "Pick": _pick,
    "Slice": _sliced,
    "Transpose": _transposed,
}
"""By operator, what it is of several iterations; not all of its inputs are the same for all."""


MIXING = (*OF_ROWS, *(f"Reduce{kind}" for kind in REDUCTIONS), "ArgMax", "ArgMin", "LayerNormalization", "LogSoftmax", "MatMul",
          "Softmax", "TopK")  # fmt: skip
"""Operators that read what is stored, and store what they make."""


def _at_most(nodes: Sequence[onnx.NodeProto], types: Mapping[str, Type], turn: str) -> int:
    """How many iterations may run at once, by what they make.

    What one elementwise node alone reads, or one that only moves it, will most likely be computed in that node's place.
    """
    differ, kept = varying(nodes, turn), {""}
    readers = Counter(name for node in nodes for name in node.input)
    for node in nodes:
        kept.update((*node.input, *node.output) if node.op_type in MIXING else ())
    sizes = {y: math.prod(types[y].shape) for node in nodes for y in node.output if y in differ and y in types}
    stored = sum(n for y, n in sizes.items() if y in kept or readers[y] != 1)
    return min(MOST_AT_ONCE // max(stored, 1), MOST_PASSING // max(sizes.values(), default=1))


def _needed(nodes: Sequence[onnx.NodeProto], results: Sequence[str]) -> list[onnx.NodeProto]:
    """The nodes without those that nobody reads."""
    read, out = {*results}, list[onnx.NodeProto]()
    for node in reversed(nodes):
        if not read.isdisjoint(node.output):
            out.append(node)
            read.update(node.input)
    return out[::-1]


class Several:
    """A loop whose iterations run at once, all of them or so many in each iteration of another loop.

    node  that loop, to be taken apart; None if there is none
    """

    def __init__(self, repeater: Repeater) -> None:
        self.repeater, self.folder, self.s, self.loop = repeater, repeater.folder, repeater.s, repeater.loop
        self.node: onnx.NodeProto | None = None
        self.size: Size | None = None

    def run(self) -> None:
        """Puts the body's nodes in. Raises UnsupportedError for one that is computed for one iteration at a time."""
        f, s, loop, mark = self.folder, self.s, self.loop, self.repeater.mark
        for name in self.repeater.rows:
            self.repeater.plain(name)
        f.kept[mark:], body = [], _needed(f.kept[mark:], self.repeater.rows)
        s.seen = min(s.seen, mark)
        count = min(loop.bound, _at_most(body, f.types, loop.turn))
        if count < 2:
            raise self.repeater.differs("an iteration is too large for several at once")
        same = dict(zip(loop.carried, loop.initial, strict=True))
        for node in body:
            node.input[:] = [same.get(name, name) for name in node.input]
        s.node = loop.node
        number = self._number()
        differ = varying(body, loop.turn)
        for node in body:
            if differ.isdisjoint(node.input):
                f.kept.append(self._safe(node, number))
        body = [node for node in body if not differ.isdisjoint(node.input)]
        carried = len(loop.carried)
        for y, of in zip(loop.node.output, loop.initial, strict=False):
            if y:
                f.same(y, of)
        if count == loop.bound:
            batch, known = self._batch(body, s.constant(np.arange(count)), number), {*f.types, *f.constants}
            for y, name in zip(loop.node.output[carried:], self.repeater.rows, strict=False):
                if y:
                    self._give(y, batch.row(name), known)
        else:
            self.node = self._loop(body, count, number)

    def put_together(self) -> None:
        """The results, from those of the iterations of the other loop: one behind the other."""
        s = self.s
        s.node = self.loop.node
        assert self.node is not None
        for y, name in zip(self.loop.node.output[len(self.loop.carried) :], self.node.output, strict=False):
            parts = self.folder.resolved(name)
            if y and parts in self.folder.types:
                turns, count, *shape = s.shape(parts)
                with s.as_bounds(parts):
                    rows = s.add("Reshape", [parts, s.constant([turns * count, *shape])], allowzero=1)
                    rows = s.add("Slice", [rows, s.constant([0]), s.constant([self.loop.bound]), s.constant([0])])
                self._give(y, rows, set())

    def _number(self) -> str:
        """How many iterations take place: a name, empty if all do."""
        s, loop = self.s, self.loop
        if not loop.most and not loop.going:
            return ""
        most = s.add("Reshape", [loop.most, s.constant([1])]) if loop.most else s.constant([loop.bound])
        most = s.add("Min", [s.add("Max", [most, s.constant([0])]), s.constant([loop.bound + loop.limited])])
        if loop.going:
            most = s.add("Where", [loop.going, most, s.constant([0])])
        self.size = s.size(most, loop.bound, loop.limited)
        return most

    def _safe(self, node: onnx.NodeProto, number: str) -> onnx.NodeProto:
        """A node that is the same in all iterations: its indices are 0 if none takes place."""
        if number and node.op_type in INDEXED and node.input[1] not in self.folder.constants:
            self.s.node, at = node, node.input[1]
            zero = self.s.constant(0, self.folder.type_of(at, node).dtype)
            with self.s.as_bounds(at):
                some = self.s.add("Reshape", [self.s.add("Less", [self.s.constant([0]), number]), self.s.constant(np.zeros(0))])
                node.input[1] = self.s.add("Where", [some, at, zero])
        return node

    def _batch(self, body: Sequence[onnx.NodeProto], turns: str, number: str) -> AtOnce:
        """The body's nodes of these iterations."""
        s = self.s
        there = s.add("Less", [turns, number]) if number else s.constant(np.ones(s.shape(turns)), np.bool_)
        batch = AtOnce(self.folder, self.loop.turn, turns, there)
        batch.run(body)
        return batch

    def _give(self, y: str, name: str, known: Collection[str]) -> None:
        """Of a result, what there is of it."""
        f, s = self.folder, self.s
        s.node = self.loop.node
        if self.size is not None and name in known:  # another may read all of it
            there = s.inside(self.size, self.loop.bound, len(s.shape(name)) - 1)
            with s.as_bounds(there):
                name = s.add("Where", [there, name, s.constant(0, f.type_of(name, s.node).dtype)])
        f.same(y, name)
        if self.size is not None:
            s.says(f.resolved(y), {0: self.size})

    def _loop(self, body: Sequence[onnx.NodeProto], count: int, number: str) -> onnx.NodeProto:
        """A loop whose iterations are so many of the body's."""
        f, s, loop = self.folder, self.s, self.loop
        most: Number = -(-loop.bound // count)
        if self.size is not None:
            whole = s.combined("Min", self.size, loop.bound) if loop.limited else self.size
            most = s.combined("Div", s.combined("Add", whole, count - 1), count)
        outside, turn = len(f.kept), f"{loop.prefix}{SEVERAL}"
        f.types[turn] = Type(INT64, ())
        turns = s.add("Add", [s.constant(np.arange(count)), s.add("Mul", [turn, s.constant(count)])])
        batch = self._batch(body, turns, number)
        rows = [batch.row(name) for name in self.repeater.rows]
        f.kept[outside:], nodes = [], f.kept[outside:]
        s.seen = min(s.seen, outside)
        going = f"{turn}/going"
        inputs = [onnx.helper.make_tensor_value_info(turn, INT64, ()), onnx.helper.make_tensor_value_info(going, BOOL, ())]
        outputs = [onnx.ValueInfoProto(name=name) for name in (going, *rows)]
        graph = onnx.helper.make_graph(nodes, turn, inputs, outputs)
        if isinstance(most, Size):
            s.numbers[most.count] = np.array([most], object)
        given = most.count if isinstance(most, Size) else s.constant(most)
        made = [f"{turn}/{k}" for k in range(len(rows))]
        return onnx.helper.make_node("Loop", [given, ""], made, f"{loop.node.name or loop.prefix}{SEVERAL}", body=graph)


def several_at_once(repeater: Repeater) -> Several | None:
    """The loop with several iterations at once, if none depends on another and all that they compute can be; else None."""
    if not repeater.independent:
        return None
    made = Several(repeater)
    with tried(repeater.folder, repeater.s) as why:
        made.run()
    return None if why else made
