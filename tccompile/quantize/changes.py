"""What a choice gains by storing single activations otherwise.

What an activation saves is shared out as if all others were in bytes as well (`choose.share_out`). Where some stay in floats,
the steps between bytes and floats may take longer than either alone: such a step is no part of what the activation takes that is
left in floats. So each activation is tried in another way than the chosen one, with all others as they are. Those whose steps
have nothing to do with each other are tried at once.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from tccompile.quantize.insert import dequantize_of, quantize_of
from tccompile.quantize.known import FLOATS, Activation

Steps = Sequence[tuple[Collection[str], float]]
"""The names of each step's nodes, and its time in microseconds."""

INTEGERS = "/ConvInteger", "/MatMulInteger"
"""What the names of products in integers end with, behind those that they have in floats."""

TRIALS = 4
"""How often a choice's steps are estimated, at most, with some of its activations otherwise: of a graph whose steps have to do
with many others, some are not tried."""


@dataclass(frozen=True)
class Change:
    """An activation, and another way to store it; around: the names of the nodes whose steps that may change."""

    name: str
    way: int
    around: frozenset[str]


def plain(node: str) -> str:
    """The name of a node in floats."""
    for end in INTEGERS:
        node = node.removesuffix(end)
    return node


def changes(
    activations: Sequence[Activation],
    choice: Mapping[str, int],
    fastest: Mapping[str, int],
    steps: Steps,
    beside: Mapping[str, Collection[str]],
) -> list[Change]:
    """For each activation its other way: floats, or of those that are in floats the one that is fastest for all.

    steps   of the choice; beside: the nodes that make and read a tensor, by its name
    """
    owners: dict[str, list[int]] = {}
    for number, (nodes, _) in enumerate(steps):
        for node in nodes:
            owners.setdefault(plain(node), []).append(number)
    found = []
    for a in activations:
        tensors = {name for how in a.how for name in how}
        near = {*a.layers, *(node for t in tensors for node in (*beside.get(t, ()), quantize_of(t), dequantize_of(t)))}
        numbers = {number for node in near for number in owners.get(node, ())}
        around = near | {plain(node) for number in numbers for node in steps[number][0]}
        way = FLOATS if choice[a.name] else fastest[a.name]
        if way != choice[a.name]:
            found.append(Change(a.name, way, frozenset(around)))
    return found


def apart(every: Sequence[Change]) -> list[list[Change]]:
    """Lists of changes that have no node in common, as many as may be tried."""
    lists: list[tuple[list[Change], set[str]]] = []
    for change in every:
        for together, taken in lists:
            if taken.isdisjoint(change.around):
                together.append(change)
                taken |= change.around
                break
        else:
            lists.append(([change], {*change.around}))
    return [together for together, _ in lists][:TRIALS]


def saved(change: Change, before: Steps, after: Steps) -> float:
    """What the steps around an activation take less."""

    def takes(steps: Steps) -> float:
        return sum(time for nodes, time in steps if any(plain(node) in change.around for node in nodes))

    return takes(before) - takes(after)


def gains(
    every: Sequence[Change], choice: Mapping[str, int], before: Steps, steps: Callable[[Mapping[str, int]], Steps]
) -> list[tuple[Change, float]]:
    """What each change of a choice saves by itself.

    before  the choice's steps; steps: gives those of any choice
    """
    found = []
    for together in apart(every):
        after = steps({**choice, **{change.name: change.way for change in together}})
        found += [(change, saved(change, before, after)) for change in together]
    return found


def worth_most(worth: Sequence[tuple[Change, float]]) -> dict[str, int]:
    """Of changes and what they are worth, those that are worth most and have no node in common: the ways by name."""
    found, taken = dict[str, int](), set[str]()
    for change, gain in sorted(worth, key=lambda one: -one[1]):
        if gain > 0 and taken.isdisjoint(change.around):
            found[change.name] = change.way
            taken |= change.around
    return found
