"""Loops in a program: ops that run again and again on the same memory.

A program has a loop's body once, as ops in a row. What it reads of outside comes in by a Carry ("enter"); what an iteration
leaves for the next one is written over what that read ("next"), and in the end over what says whether another iteration takes
place ("again"): the last op of the body. What the last iteration has left goes out by a Carry ("leave"). Whether an iteration
takes place is said by data on the device, so nobody waits for it; and one that is run all the same changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from tccompile.ir.ops import Carry, Op
from tccompile.ir.tensor import dense
from tccompile.ir.types import DType

if TYPE_CHECKING:
    from tccompile.ir.program import Program


@dataclass(frozen=True)
class Body:
    """The ops `first` to `last`, both included, of a loop: they run again while the tensor `going` is true, `most` times at
    most."""

    loop: str
    first: int
    last: int
    going: str
    most: int

    def __contains__(self, op: int) -> bool:
        return self.first <= op <= self.last


def bodies(program: Program) -> tuple[Body, ...]:
    """The bodies of a program's loops, in order: each begins after the last value that enters it."""
    if not any(isinstance(op, Carry) for op in program.ops):
        return ()
    entered = {op.loop: i for i, op in enumerate(program.ops) if isinstance(op, Carry) and op.role == "enter"}
    ends = ((i, op) for i, op in enumerate(program.ops) if isinstance(op, Carry) and op.role == "again")
    return tuple(Body(op.loop, entered.get(op.loop, i) + 1, i, op.over or "", op.most) for i, op in ends)


def in_turn(
    program: Program, goes_on: Callable[[Body], bool], most: int | None = None, order: Sequence[int] | None = None
) -> Iterator[int]:
    """The numbers of ops as they run.

    most   how often bodies run at most, if that is less than their loops say
    order  all ops in another order, in which a loop takes place where its first op comes
    """
    found = bodies(program)
    for i in range(len(program.ops)) if order is None else order:
        body = next((body for body in found if i in body), None)
        if body is None:
            yield i
        elif i == body.first:
            turns = body.most if most is None else min(body.most, most)
            while turns > 0 and goes_on(body):
                yield from range(body.first, body.last + 1)
                turns -= 1


def times(program: Program) -> list[int]:
    """How often each op runs at most."""
    out = [1] * len(program.ops)
    for body in bodies(program):
        out[body.first : body.last + 1] = [body.most] * (body.last + 1 - body.first)
    return out


# --- Order -----------------------------------------------------------------------------------------------------------


def together(program: Program) -> Program:
    """The program with the ops of each body in a row, behind those that enter values, and those last that write over what others
    read."""
    ends = [i for i, op in enumerate(program.ops) if isinstance(op, Carry) and op.role == "again"]
    if not ends:
        return program
    reads = readable(program)
    before: list[int] = []  # of each op those that it comes after, as bits
    for own in reads:
        found = 0
        for k in own:
            found |= before[k] | 1 << k
        before.append(found)
    body_of: dict[int, int] = {}
    for end in ends:
        loop = program.ops[end].loop  # type: ignore[attr-defined]
        enters = sum(1 << i for i, op in enumerate(program.ops) if _is(op, "enter", loop))
        for i in range(len(program.ops)):
            if (i == end or before[end] >> i & 1) and before[i] & enters:
                body_of.setdefault(i, end)
    order: dict[int, None] = {}

    def put(i: int) -> None:
        if i in order:
            return
        if (end := body_of.get(i)) is None:
            order[i] = None
            return
        inside = [k for k, own in body_of.items() if own == end]
        outside = [k for k in range(len(program.ops)) if before[end] >> k & 1 and k not in inside]
        for k in sorted(outside, key=lambda k: _is(program.ops[k], "enter", program.ops[end].loop)):  # type: ignore[attr-defined]
            put(k)
        order.update(dict.fromkeys(sorted(inside, key=lambda k: _rank(program.ops[k]))))

    for i in range(len(program.ops)):
        put(i)
    return replace(program, ops=tuple(program.ops[i] for i in order))


def _is(op: Op, role: str, loop: str) -> bool:
    return isinstance(op, Carry) and op.role == role and op.loop == loop


def _rank(op: Op) -> int:
    last = ("hold", "next", "again")
    return last.index(op.role) + 1 if isinstance(op, Carry) and op.role in last else 0


def readable(program: Program) -> list[list[int]]:
    """For each op those that write what it reads, by name: what is written over something is another tensor."""
    tensors = program.tensors
    over = {op.y: i for i, op in enumerate(program.ops) if isinstance(op, Carry) and op.stays}
    writers: dict[str, list[int]] = {}
    for i, op in enumerate(program.ops):
        for name in op.results if op.y not in over else ():
            writers.setdefault(tensors[name].storage, []).append(i)
    out = []
    for i, op in enumerate(program.ops):
        read = [k for name in op.inputs for k in ([over[name]] if name in over else writers.get(tensors[name].storage, ()))]
        out.append([k for k in dict.fromkeys(read) if k < i])
    return out


def held_apart(program: Program) -> Program:
    """The program with copies of what iterations leave for the next one, where that lies in memory that others are left in."""
    carried = {op.over for op in program.ops if isinstance(op, Carry) and op.stays}
    tensors, ops = dict(program.tensors), list[Op]()
    for op in program.ops:
        if isinstance(op, Carry) and op.role == "next" and tensors[op.x].storage in carried:
            held = replace(tensors[op.over or ""], name=f"{op.y}/held")
            if op.at is not None:
                held = dense(held.name, tensors[op.x].shape, held.dtype)
            tensors[held.name] = held
            ops.append(Carry(nodes=op.nodes, y=held.name, epilogue=op.epilogue, role="hold", loop=op.loop, x=op.x))
            op = replace(op, x=held.name)
        ops.append(op)
    return together(replace(program, tensors=tensors, ops=tuple(ops)))


# --- Memory ----------------------------------------------------------------------------------------------------------


def kept(found: dict[str, tuple[int, int]], program: Program) -> dict[str, tuple[int, int]]:
    """From the first and the last op that use each of some memory, the same with what a body reads of outside, which is kept to
    the body's end."""
    out = dict(found)
    for body in bodies(program):
        for name, (first, last) in out.items():
            if first < body.first <= last < body.last:
                out[name] = first, body.last
    return out


# --- Rules -----------------------------------------------------------------------------------------------------------


def verify_loops(program: Program) -> None:
    """Hold loops to what every stage and both engines rely on; raises AssertionError that names the loop."""
    carries = {i: op for i, op in enumerate(program.ops) if isinstance(op, Carry) and op.role != "pick"}
    if not carries:
        return
    entered = {op.y: op.loop for op in carries.values() if op.role == "enter"}
    found = {body.loop: body for body in bodies(program)}
    assert len(found) == sum(op.role == "again" for op in carries.values()), "two loops of one name"
    over: dict[str, int] = {}
    for i, op in carries.items():
        where = f"loop {op.loop!r}: {op.y!r}"
        if op.loop not in found:
            assert op.role in ("enter", "leave"), f"{where}: the loop has no end"
            continue
        body, inside = found[op.loop], [other for other in found.values() if i in other]
        assert inside == ([body] if op.role in ("hold", "next", "again") else []), f"{where}: it is not where it has its place"
        assert op.role != "leave" or i > body.last, f"{where}: it comes before the loop"
        if op.over is not None and op.going is not None:
            y, whole, flag = (program.tensors[name] for name in (op.y, op.over, op.going))
            assert entered.get(op.over) == entered.get(op.going) == op.loop, f"{where}: it enters another loop, or none"
            assert replace(y, name=whole.name, base=None) == whole, f"{where}: it is not the memory of {op.over!r}"
            assert flag.dtype is DType.BOOL and op.going == body.going, f"{where}: {op.going!r} says nothing of it"
            assert op.over not in over, f"{where}: {op.over!r} is written twice"
            over[op.over] = i
    _verify_reads(program, found.values(), over)


def _verify_reads(program: Program, found: Collection[Body], over: Mapping[str, int]) -> None:
    """What a body makes is read in it alone, and what it writes over in it and before that; `over`, these and who does."""
    tensors = program.tensors
    home: dict[str, Body] = {}
    for i, op in enumerate(program.ops):
        if not (isinstance(op, Carry) and op.stays):
            home.update((tensors[name].storage, body) for name in op.results for body in found if i in body)
    left = {op.y for op in program.ops if isinstance(op, Carry) and op.stays}
    for i, op in enumerate(program.ops):
        for name in op.inputs:
            owner = tensors[name].storage
            assert owner not in home or i in home[owner], f"{op.nodes[0]!r} reads {name!r}, which is made in a loop"
            if owner in over and name not in left:
                body = next(body for body in found if over[owner] in body)
                assert body.first <= i <= over[owner], f"{op.nodes[0]!r} reads {name!r}, over which a loop writes"
        assert (isinstance(op, Carry) and op.stays) or tensors[op.y].base not in over, f"{op.y!r} lies in what a loop carries"
