"""Loops that stay loops: their bodies are nodes of the graph once, and run again and again on what they left behind.

A loop stays one if it would become many nodes otherwise, and each iteration does the same: what it carries has one type and one
shape, and nothing in it has an extent that the data decide. What no iteration changes is computed once, before the loop. Nodes
of the kind Carry say what comes in, what goes to the next iteration, and what is left: see `ir/loops.py`.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import numpy as np
import onnx
import onnx.helper

from tccompile.errors import ModelError, UnsupportedError
from tccompile.load.constants import Weight
from tccompile.load.sizes import OWN, Sizes
from tccompile.load.types import Type
from tccompile.load.valid import title

BOOL, INT64 = onnx.TensorProto.BOOL, onnx.TensorProto.INT64

LONG, LONG_COUNTED = 8192, 512
"""Nodes that a loop may become, and one whose number of iterations the data decide, which may be fewer: of more, it stays one if
it can. An iteration of a while node takes 4 µs longer than the same steps in a row."""


class Folding(Protocol):
    """What is asked of who folds a graph: see `fold.Folder`."""

    constants: dict[str, Weight]
    sequences: dict[str, list[str]]
    absent: set[str]
    types: dict[str, Type]
    kept: list[onnx.NodeProto]
    sizes: Sizes
    opsets: list[onnx.OperatorSetIdProto]

    def apart(self, nodes: Sequence[onnx.NodeProto]) -> None: ...
    def resolved(self, name: str) -> str: ...
    def same(self, name: str, as_name: str) -> None: ...
    def set_constant(self, name: str, weight: Weight) -> None: ...
    def type_of(self, name: str, node: onnx.NodeProto) -> Type: ...


INDEXED = ("Gather", "GatherElements", "GatherND", "ScatterElements", "ScatterND")
"""Operators whose second input says where in the first: on the CPU, outside of it is an error."""


@dataclass
class Repeated:
    """A loop as its body sees it.

    node     whose errors and results these are
    prefix   what names of its own begin with
    initial  what it carries begins as; `carried`, by what names its body reads that
    bound    how often it goes round at most; `limited`, if that is the user's word
    most     the name of the number of iterations, empty if that is the bound
    going    the name of what says whether the first iteration takes place; empty if it does
    short    whether it is better unrolled, if the data do not decide how often it goes round
    few      whether it may be unrolled
    """

    node: onnx.NodeProto
    prefix: str
    initial: list[str]
    bound: int
    limited: bool = False
    most: str = ""
    going: str = ""
    short: bool = False
    few: bool = True

    @cached_property
    def carried(self) -> list[str]:
        return [f"{self.prefix}#carried_{k}" for k in range(len(self.initial))]

    @property
    def turn(self) -> str:
        """The name of the iteration's number."""
        return f"{self.prefix}#turn"


@dataclass(frozen=True)
class _Rows:
    """What all iterations give: the names of it as it is so far, of its first value, and of one more row."""

    name: str
    zero: str
    row: str


class Repeater:
    """Makes a loop's body nodes of a graph that is folded."""

    def __init__(self, folder: Folding, loop: Repeated) -> None:
        self.folder, self.loop = folder, loop
        self.s, self.node = folder.sizes, loop.node
        self.outside: dict[str, str] = {}
        self.written: set[str] = set()
        self.counted = False
        self.flags = [f"{loop.prefix}#going", f"{loop.prefix}#more"]
        self.mark, self.condition = 0, ""
        self.new: list[str] = []
        self.rows: list[str] = []

    def fold(self, body: Sequence[onnx.NodeProto], results: Sequence[str]) -> None:
        """Folds the body once, whose results are a condition, what is carried, and what it gives in each iteration."""
        f, loop = self.folder, self.loop
        self.mark = len(f.kept)
        self.s.node = self.node
        for name, of in zip(loop.carried, loop.initial, strict=True):
            self.plain(of)
            f.types[name] = f.type_of(of, self.node)
        f.types[loop.turn] = Type(INT64, ())
        f.types |= {flag: Type(BOOL, ()) for flag in self.flags}
        f.apart(body)
        self.condition, *made = (f.resolved(name) for name in results)
        self.new, self.rows = made[: len(loop.carried)], made[len(loop.carried) :]

    @property
    def independent(self) -> bool:
        """Whether no iteration depends on another one."""
        weight = self.folder.constants.get(self.condition)
        return self.new == self.loop.carried and (not self.condition or (weight is not None and bool(weight.values.all())))

    def stay(self) -> None:
        """Puts the body in. Raises UnsupportedError if an iteration differs from another one."""
        f, loop, mark, flags, new = self.folder, self.loop, self.mark, self.flags, self.new
        self.s.node = self.node
        for name, of in zip(new, loop.carried, strict=True):
            self.plain(name)
            if f.type_of(name, self.node) != f.types[of]:
                one, other = (f.type_of(n, self.node) for n in (of, name))
                raise self.differs(f"{name!r} is {_said(other)} where it was {_said(one)}")
        buffers = [self._row(k, name) for k, name in enumerate(self.rows)]
        turned = self.s.add("Add", [loop.turn, self.s.constant(1)])
        more, goes_on = self._condition(self.condition, turned)
        begin = dict(zip(loop.carried, loop.initial, strict=True))
        begin |= {loop.turn: self.s.constant(0), flags[0]: loop.going or self.s.constant(True, bool)}
        begin |= {buffer.name: buffer.zero for buffer in buffers}
        left = [*zip(loop.carried, new, strict=True), (loop.turn, turned)]
        if loop.short and not self.counted:
            raise self.differs("it goes round a known number of times, and is short")
        if loop.few and not self.counted and new == loop.carried:
            raise self.differs("iterations do not depend on each other: unrolled, they can run side by side")
        if loop.limited:
            begin[flags[1]] = self.s.constant(False, bool)
            left.append((flags[1], more))
        self._put_together(mark, begin, [(old, new) for old, new in left if old != new], buffers, goes_on)
        self._bind(begin, [*loop.carried, *(buffer.name for buffer in buffers)], flags[1])

    # --- what an iteration computes beside its body

    def _condition(self, condition: str, turned: str) -> tuple[str, str]:
        """Whether another iteration is asked for, and whether one takes place: no more than there is room for."""
        s, loop = self.s, self.loop
        inside = s.add("Less", [turned, s.constant(loop.bound)])
        parts = [s.add("Less", [turned, loop.most])] if loop.most else []
        weight = self.folder.constants.get(condition) if condition else None
        if weight is not None and not weight.values.all():
            raise self.differs("one iteration is the last one")
        if condition and weight is None:
            parts.append(s.add("Reshape", [condition, s.constant(np.zeros(0))]) if s.shape(condition) else condition)
        self.counted = bool(parts or loop.going)
        more = s.add("And", parts) if len(parts) > 1 else parts[0] if parts else inside
        return more, s.add("And", [more, inside]) if parts else inside

    def _row(self, k: int, name: str) -> _Rows:
        """What all iterations give, of which this is one's."""
        f, s, bound = self.folder, self.s, self.loop.bound
        self.plain(name)
        kind = f.type_of(name, self.node)
        buffer = f"{self.loop.prefix}#rows_{k}"
        f.types[buffer] = Type(kind.elem, (bound, *kind.shape))
        return _Rows(buffer, s.constant(kind.dtype.type(0), kind.dtype), s.add("Unsqueeze", [name, s.constant([0])]))

    def plain(self, name: str) -> None:
        """Raises UnsupportedError for what is no tensor of one shape."""
        f = self.folder
        if name in f.sequences or name in f.absent or self.s.of(name):
            raise self.differs(f"it carries {name!r}, which is a sequence, or how much of it there is the data decide")

    def differs(self, why: str) -> UnsupportedError:
        return UnsupportedError(f"{title(self.node)}: {why}")

    # --- nodes

    def _put_together(
        self, mark: int, begin: Mapping[str, str], left: Sequence[tuple[str, str]], rows: Sequence[_Rows], goes_on: str
    ) -> None:
        """Puts in order: what does not change from iteration to iteration, what enters, what does, and what is left behind."""
        going = self.flags[0]
        kept = self.folder.kept
        varying, before, body = {*begin}, kept[:mark], list[onnx.NodeProto]()
        for node in kept[mark:]:
            if varying.isdisjoint(node.input) and node.op_type not in INDEXED:  # nothing is read if no iteration takes place
                before.append(node)
            else:
                body.append(node)
                varying.update(node.output)
        for node in body:
            node.input[:] = [self._entered(name, varying) for name in node.input]
        self.written = {going, *(old for old, _ in left), *(own.name for own in rows)}
        entering = self.written.union(*(node.input for node in body)) & begin.keys()
        enters = [self._carry("enter", [begin[name]], name) for name in begin if name in entering]
        nexts = []
        for own in rows:
            inputs = [self._entered(own.row, varying), own.name, going, self.loop.turn]
            nexts.append(self._carry("next", inputs, f"{own.name}/left", row=1))
        put = [n.output[0] for n in nexts]  # where rows go is the iteration's number, which is written over after that
        for old, new in left:
            after = put if old == self.loop.turn else []
            nexts.append(self._carry("next", [self._entered(new, varying), old, going, *after], f"{old}/left"))
        last = [self._entered(goes_on, varying), going, going, *(n.output[0] for n in nexts)]
        again = self._carry("again", last, f"{going}/left", most=self.loop.bound)
        outer = [self._carry("enter", [name], to) for name, to in self.outside.items()]
        kept[:] = [*before, *enters, *outer, *body, *nexts, again]
        self.s.seen = mark

    def _entered(self, name: str, varying: set[str]) -> str:
        """What the body reads in the place of what is computed outside."""
        f = self.folder
        if not name or name in varying or name in f.constants or name in self.outside.values():
            return name
        if name not in self.outside:
            self.outside[name] = to = f"{self.loop.prefix}#outer_{len(self.outside)}"
            f.types[to] = f.type_of(name, self.node)
        return self.outside[name]

    def _carry(self, role: str, inputs: Sequence[str], y: str, most: int = 0, row: int = 0) -> onnx.NodeProto:
        """A node, whose result is of its second input's type if there is one; of what enters, its type is known."""
        if y not in self.folder.types:
            self.folder.types[y] = self.folder.types[inputs[1] if role != "leave" else inputs[0]]
        name = self.node.name or self.loop.prefix
        return onnx.helper.make_node("Carry", inputs, [y], name, domain=OWN, role=role, loop=self.loop.prefix, most=most, row=row)

    def _bind(self, begin: Mapping[str, str], carried: Sequence[str], over: str) -> None:
        """The loop's results."""
        f, s, loop = self.folder, self.s, self.loop
        size = None
        if self.counted:
            count = s.add("Reshape", [self._left(loop.turn), s.constant([1])])
            if loop.limited:
                count = s.add("Add", [count, s.as_count(self._left(over))])
            size = s.size(count, loop.bound, loop.limited)
        for k, (name, y) in enumerate(zip(carried, self.node.output, strict=False)):
            if y and name not in self.written:
                f.same(y, begin[name])
            elif y:
                self._left(name, y)
                s.says(y, {0: size} if size is not None and k >= len(loop.carried) else {})

    def _left(self, name: str, y: str = "") -> str:
        """What the last iteration has left."""
        y = y or f"{name}/last"
        self.folder.kept.append(self._carry("leave", [f"{name}/left", f"{self.loop.prefix}#going/left"], y))
        return y


def _said(kind: Type) -> str:
    shape = "×".join(map(str, kind.shape)) or "scalar"
    return f"{onnx.TensorProto.DataType.Name(kind.elem).lower()} of shape {shape}"


@contextmanager
def tried(*holders: Any) -> Iterator[list[str]]:
    """Tries something: if it is refused, what these objects hold is what it was before, and the list says why."""
    before = [{name: copy.copy(v) for name, v in vars(holder).items() if _is_state(v)} for holder in holders]
    why: list[str] = []
    try:
        yield why
    except (UnsupportedError, ModelError) as error:
        why.append(str(error))
        for holder, state in zip(holders, before, strict=True):
            for name, value in state.items():
                _restore(holder, name, value)


def _is_state(value: Any) -> bool:
    return isinstance(value, dict | list | set | deque) or type(value) is int


def _restore(holder: Any, name: str, value: Any) -> None:
    if isinstance(value, int):
        setattr(holder, name, value)
        return
    held = getattr(holder, name)
    held.clear()
    (held.update if isinstance(value, dict | set) else held.extend)(value)
