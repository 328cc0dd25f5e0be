"""Branches in a program: ops that need not run, since a condition says that nobody reads what they make.

A Carry "pick" is one of two tensors, by a condition on the device. What is computed for one of them alone is a branch, and runs
only if that one is taken: on the CPU it is left out, and on a GPU it is the body of a conditional node. A branch is found by
who reads what, so it is all that an If's outputs alone need. To run it all the same changes nothing: whoever cannot leave it out
runs it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from tccompile.ir.loops import bodies, held_apart, readable
from tccompile.ir.ops import Carry, Op

if TYPE_CHECKING:
    from tccompile.ir.program import Program

LEAST_US, OP_US, BYTES_US, FLOPS_US = 25.0, 2.0, 2e6, 1e8
"""A conditional node takes 5 µs if its body does not run, and 9 µs if it does. A branch is one if it takes longer than this, by
these bytes and operations in a µs."""


@dataclass(frozen=True)
class Branch:
    """The ops `first` to `last`, both included: they need not run unless the tensor `going` is `wanted`, which `by` writes."""

    first: int
    last: int
    going: str
    wanted: bool
    by: int

    def __contains__(self, op: int) -> bool:
        return self.first <= op <= self.last


@dataclass(frozen=True)
class _Found:
    """The ops of a branch, wherever they are."""

    ops: frozenset[int]
    going: str
    wanted: bool


def branches(program: Program) -> tuple[Branch, ...]:
    """The branches that lie in a row, behind what writes their condition, outer ones before those in them."""
    out = []
    writers = {program.tensors[op.y].storage: i for i, op in enumerate(program.ops)}
    for found in _found(program):
        first, last = min(found.ops), max(found.ops)
        by = writers.get(program.tensors[found.going].storage, -1)
        if last - first + 1 == len(found.ops) and 0 <= by < first and _us(program, found.ops) >= LEAST_US:
            out.append(Branch(first, last, found.going, found.wanted, by))
    return tuple(sorted(out, key=lambda branch: (branch.first, -branch.last)))


def in_order(program: Program) -> Program:
    """The program as it can be run: see `loops.held_apart`; and with the ops of each branch in a row."""
    return _in_rows(held_apart(program))


def _in_rows(program: Program) -> Program:
    """The program with the ops of each branch in a row."""
    found = _found(program)
    if not found:
        return program
    reads = readable(program)
    writers = {program.tensors[op.y].storage: i for i, op in enumerate(program.ops)}
    units = [*((branch.ops, writers.get(program.tensors[branch.going].storage)) for branch in found)]
    units += [(ops, None) for ops in _loops(program)]
    order = _ordered(range(len(program.ops)), reads, sorted(units, key=lambda unit: -len(unit[0])))
    return replace(program, ops=tuple(program.ops[i] for i in order))


def _ordered(ops: Sequence[int], reads: Sequence[Sequence[int]], units: Sequence[tuple[frozenset[int], int | None]]) -> list[int]:
    """The ops in an order in which each comes after those that it reads, and each unit is in a row; larger units first."""
    own: dict[int, int] = {}
    for k, (members, _) in enumerate(units):
        for i in members:
            own.setdefault(i, k)
    inside, order = set(ops), dict[int, None]()

    def put(i: int) -> None:
        if i in order or i not in inside:
            return
        k = own.get(i)
        members, by = (frozenset({i}), None) if k is None else units[k]
        for j in sorted({*(j for m in members for j in reads[m]), *([] if by is None else [by])} - members):
            put(j)
        if k is None:
            order[i] = None
        else:
            inner = [unit for unit in units[k + 1 :] if unit[0] < members]
            order.update(dict.fromkeys(_ordered(sorted(members), reads, inner)))

    for i in ops:
        put(i)
    return list(order)


# --- What is a branch ------------------------------------------------------------------------------------------------


def _found(program: Program) -> list[_Found]:
    picks: dict[tuple[str, int], list[int]] = {}
    if not any(isinstance(op, Carry) and op.role == "pick" for op in program.ops):
        return []
    whole = _loops(program)
    scope = {i: k for k, body in enumerate(bodies(program)) for i in range(body.first, body.last + 1)}
    for i, op in enumerate(program.ops):
        if isinstance(op, Carry) and op.role == "pick":
            picks.setdefault((op.loop, scope.get(i, -1)), []).append(i)
    readers: list[list[int]] = [[] for _ in program.ops]
    for i, read in enumerate(readable(program)):
        for k in read:
            readers[k].append(i)
    told = {program.tensors[name].storage for name in (*program.outputs, *(count.tensor for count in program.counts))}
    escaping = {i for i, op in enumerate(program.ops) if any(program.tensors[name].storage in told for name in op.results)}
    together = [frozenset(own) for own in picks.values() if len(own) > 1]
    out = []
    for (_, place), own in picks.items():
        pick = program.ops[own[0]]
        assert isinstance(pick, Carry) and pick.going is not None
        if any(program.ops[i].going != pick.going for i in own):  # type: ignore[attr-defined]
            continue
        units = together if place >= 0 else [*whole, *together]
        for wanted in (True, False):
            inside = {i for i in range(max(own)) if scope.get(i, -1) == place or (place == -1 and i in scope)} - escaping
            ops = _alone(program, own, wanted, inside, readers, units)
            if ops:
                out.append(_Found(frozenset(ops), pick.going, wanted))
    return out


def _alone(
    program: Program, picks: Sequence[int], wanted: bool, inside: set[int], readers: Sequence[Collection[int]],
    units: Iterable[frozenset[int]],
) -> set[int]:  # fmt: skip
    """Of these ops, those that only what is picked needs if the condition is `wanted`."""
    taken, others = ({i: _storages(program, i, which) for i in picks} for which in (wanted, not wanted))
    conditions = {i: {program.tensors[program.ops[i].going].storage} for i in picks}  # type: ignore[attr-defined]
    found, before = inside, -1

    def reads_alone(op: int, reader: int) -> bool:
        storages = {program.tensors[name].storage for name in program.ops[op].results}
        return reader in taken and bool(storages & taken[reader]) and not storages & (others[reader] | conditions[reader])

    while len(found) != before:
        before = len(found)
        for i in sorted(found, reverse=True):
            if not all(reader in found or reads_alone(i, reader) for reader in readers[i]):
                found.discard(i)
        for unit in units:
            if not unit <= found:
                found -= unit
    return found


def _storages(program: Program, pick: int, wanted: bool) -> set[str]:
    """Whose memory a pick reads if its condition is `wanted`, beside that condition's."""
    op = program.ops[pick]
    assert isinstance(op, Carry) and op.over is not None
    return {program.tensors[op.x if wanted else op.over].storage}


def _loops(program: Program) -> list[frozenset[int]]:
    """Of each loop, its body and what enters it."""
    enters: dict[str, list[int]] = {body.loop: [] for body in bodies(program)}
    for i, op in enumerate(program.ops):
        if isinstance(op, Carry) and op.role == "enter" and op.loop in enters:
            enters[op.loop].append(i)
    return [frozenset([*enters[body.loop], *range(body.first, body.last + 1)]) for body in bodies(program)]


def _us(program: Program, ops: Collection[int]) -> float:
    """About how long ops take one after the other."""
    total = 0.0
    turns = {i: body.most for body in bodies(program) if body.last in ops for i in range(body.first, body.last + 1)}
    for i in ops:
        op = program.ops[i]
        moved = sum(min(program.tensors[name].nbytes, 4 * program.tensors[op.y].nbytes + 4) for name in (*op.inputs, op.y))
        total += (OP_US + moved / BYTES_US + program.products(op) / FLOPS_US) * turns.get(i, 1)
    return total


# --- As ops run ------------------------------------------------------------------------------------------------------


def taken(program: Program, order: Iterable[int], says: Callable[[str], bool]) -> Iterator[int]:
    """Of the numbers of ops in the order in which they run, those that need to: `says`, what a tensor of one boolean holds."""
    found = branches(program)
    for i in order:
        if all(says(branch.going) == branch.wanted for branch in found if i in branch):
            yield i


def picked(op: Op, says: Callable[[str], bool]) -> tuple[str, ...]:
    """The tensors that an op reads: what is not picked need not have been computed."""
    if not isinstance(op, Carry) or op.role != "pick" or op.going is None or op.over is None:
        return op.inputs
    return op.going, op.x if says(op.going) else op.over
