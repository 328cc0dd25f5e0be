"""A program under change, and what all equations on programs share."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from operator import is_

from tccompile.ir.expr import Epilogue, Expr, View, canonical_view, identity_view, load, parts, substitute, walk
from tccompile.ir.extent import Shape
from tccompile.ir.ops import Op, Pointwise
from tccompile.ir.program import Program
from tccompile.ir.tensor import LANES, Tensor, padding
from tccompile.ir.weights import Recipe

MAX_LOADS = 12
"""Views in one expression: each costs a pointer and strides in the kernel's arguments, and registers."""

MAX_ATOMS = 32
"""Quotients, remainders and the like in what one view reads by: one reshape of a transposition of another doubles them."""

MAX_NODES, MAX_PARTS = 64, 256
"""Operations in one expression, and the same where one that several take is counted for each of them."""


class Editor:
    """A program under change: ops in order, who writes and reads what, kept true by `put` and `drop`."""

    def __init__(self, program: Program):
        self.program = program
        self.tensors = dict(program.tensors)
        self.constants = dict(program.constants)
        self.ops: list[Op | None] = list(program.ops)
        self.position: dict[str, int] = {}
        self.readers: dict[str, set[int]] = {name: set() for name in self.tensors}
        self.viewed = {t.base for t in self.tensors.values() if t.base}
        for i, op in enumerate(program.ops):
            self._enter(i, op)

    def _enter(self, i: int, op: Op) -> None:
        self.position[op.y] = i
        for name in op.inputs:
            self.readers[name].add(i)

    def drop(self, i: int) -> None:
        op = self.ops[i]
        assert op is not None
        self.ops[i] = None
        if self.position.get(op.y) == i:
            del self.position[op.y]
        for name in op.inputs:
            self.readers[name].discard(i)

    def put(self, i: int, op: Op) -> None:
        if self.ops[i] is not None:
            self.drop(i)
        self.ops[i] = op
        self._enter(i, op)

    def add_constant(self, tensor: Tensor, recipe: Recipe) -> None:
        self.tensors[tensor.name] = tensor
        self.constants[tensor.name] = recipe
        self.readers.setdefault(tensor.name, set())

    def writer(self, name: str) -> Op | None:
        i = self.position.get(name)
        return None if i is None else self.ops[i]

    def is_private(self, name: str) -> bool:
        """Whether the tensor is ours to do away with: no model input, output or constant, no view, not seen through one."""
        fixed = name in self.program.inputs or name in self.program.outputs or name in self.constants
        return not fixed and self.tensors[name].base is None and name not in self.viewed

    def grain(self, *names: str) -> int:
        """Multiples of so many elements at which parts of tensors begin and end, for all that reads what lies where these do."""
        kinds = {self.tensors[name].dtype for name in names}
        if all(padding(kind, multiplied=True) == LANES for kind in kinds):
            return LANES
        storages = {self.tensors[name].storage for name in names}
        read = {name: self.readers[name] for name, t in self.tensors.items() if t.storage in storages}
        ops = ((name, self.ops[i]) for name, readers in read.items() for i in readers)
        multiplied = any(op is not None and op.multiplies and name in op.operands for name, op in ops)
        return max(padding(kind, multiplied) for kind in kinds)

    def result(self) -> Program:
        """The program as it is now; the same one if nothing has changed."""
        ops, own = tuple(op for op in self.ops if op is not None), self.program
        if _identical(ops, own.ops) and all(
            _identical((*new.keys(), *new.values()), (*old.keys(), *old.values()))
            for new, old in ((self.tensors, own.tensors), (self.constants, own.constants))
        ):
            return own
        return replace(self.program, tensors=self.tensors, constants=self.constants, ops=ops)


def _identical(new: Sequence[object], old: Sequence[object]) -> bool:
    return len(new) == len(old) and all(map(is_, new, old))


def without_dead_code(program: Program) -> Program:
    """Drop ops whose results nobody reads, then tensors and constants that no op names."""
    owner = {name: t.base or name for name, t in program.tensors.items()}
    needed = set(program.outputs)
    kept: list[Op] = []
    for op in reversed(program.ops):
        if any(name in needed or owner[name] in needed for name in op.results):
            kept.append(op)
            needed.update(op.inputs, [owner[name] for name in op.inputs])
    ops = tuple(reversed(kept))
    named = {*program.inputs, *program.outputs}
    for op in ops:
        named.update(op.results, op.inputs)
    forms = {n: forms for n, forms in program.forms.items() if n in named}
    named |= {name for found in forms.values() for form in found for name in form.tensors}
    named |= {owner[name] for name in named}
    tensors = {n: t for n, t in program.tensors.items() if n in named}
    constants = {n: r for n, r in program.constants.items() if n in named}
    storage = {n: s for n, s in program.storage.items() if n in named}
    return replace(program, tensors=tensors, constants=constants, ops=ops, storage=storage, forms=forms)


def tidy(expr: Expr, loads: Iterable[View]) -> Epilogue:
    """An epilogue with equal views merged, unread ones dropped, and loads renumbered in the order of first use."""
    loads = tuple(loads)
    order: dict[View, int] = {}
    leaf: dict[Expr, Expr] = {}
    for e in walk(expr):
        if e.fn == "load":
            number = order.setdefault(loads[e.value], len(order))  # type: ignore[index]
            leaf[e] = load(number, e.dtype)
    return Epilogue(substitute(expr, leaf), tuple(order))


def shifted(expr: Expr, by: int) -> Expr:
    """The expression with the numbers of its loads increased."""
    return substitute(expr, {e: load(e.value + by, e.dtype) for e in walk(expr) if e.fn == "load"})  # type: ignore[operator,arg-type]


def fits(epilogue: Epilogue) -> bool:
    all_ = walk(epilogue.expr)
    few = len(epilogue.loads) <= MAX_LOADS and len(all_) <= MAX_PARTS and len({id(e) for e in all_}) <= MAX_NODES
    return few and all(_atoms(view) <= MAX_ATOMS for view in epilogue.loads)


def _atoms(view: View) -> int:
    """How much arithmetic says where the view reads, as far as it counts."""
    left, found = [*view.index, *(r.index for r in view.valid)], 0
    while left and found <= MAX_ATOMS:
        inner = [index for atom, _ in left.pop().terms for index in parts(atom)]
        found += len(inner)
        left += inner
    return found


def names(*ops: Op) -> tuple[str, ...]:
    """The user's nodes that several ops stand for, once they are one."""
    return tuple(dict.fromkeys(node for op in ops for node in op.nodes))


def moves(e: Editor, op: Op) -> bool:
    """Whether `op` only moves a tensor of ours that has memory in the arena, without changing its type, perhaps with a border."""
    if not isinstance(op, Pointwise) or op.epilogue.expr.fn != "load":
        return False
    x = e.tensors[op.views[0].tensor]
    outside = {*e.program.inputs, *e.program.outputs, *e.constants}
    return x.dtype is e.tensors[op.y].dtype and x.name not in outside and x.storage not in outside


def copies(e: Editor, op: Op) -> bool:
    """Whether `op` moves a tensor and nothing else."""
    return moves(e, op) and not op.views[0].valid


def is_concatenated(e: Editor, name: str) -> bool:
    """Whether the tensor is copied into a part of another one, where its own writer could write it."""
    readers = (e.ops[i] for i in e.readers[name])
    return any(isinstance(op, Pointwise) and e.tensors[op.y].base is not None for op in readers)


def canonical(program: Program) -> Program:
    """Equal reads get equal views, whoever wrote them: coordinates along axes of extent 1 become constants."""
    ops = []
    for op in program.ops:
        shape = program.op_shape(op)
        loads = tuple(canonical_view(v, shape) for v in op.views)
        ops.append(replace(op, epilogue=replace(tidy(op.epilogue.expr, loads), shuffle=op.epilogue.shuffle)))
    return replace(program, ops=tuple(ops))


def channels_of(view: View, shape: Shape, seen: Shape) -> list[int] | None:
    """The channels of an image of `shape` that an image of the shape `seen` consists of, which the view reads; None if it is more
    than a choice of channels, or has one of them twice.
    """
    if len(shape) != len(seen) or len(shape) < 3 or shape[:1] + shape[2:] != seen[:1] + seen[2:] or view.valid:
        return None
    straight = canonical_view(identity_view(view.tensor, len(shape)), seen).index
    if any(i != s for axis, (i, s) in enumerate(zip(view.index, straight, strict=True)) if axis != 1):
        return None
    if any(True for _ in view.index[1].elements):
        return None
    channels = view.index[1].evaluate(seen)
    found = channels.reshape(-1).tolist()
    return found if channels.shape[1] == seen[1] and len({*found}) == len(found) == seen[1] else None
