"""Constants that differ at each size of a range: positions, masks, tables of weights by which images are resampled.

A plan for a range cannot hold them. So the nodes that make them stay in the graph, and compute them when the plan runs, from
positions (0, 1, 2, …) and from sizes. Which these are, `ranges.late` finds by what was folded at some sizes.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field

import onnx

from tccompile.load.constants import Weight


@dataclass
class Seen:
    """What was folded while a graph was loaded.

    makers     the nodes that made constants, by the constants' names
    constants  all of them
    kept       the nodes that are left
    """

    makers: dict[str, onnx.NodeProto] = field(default_factory=dict)
    constants: Mapping[str, Weight] = field(default_factory=dict)
    kept: list[onnx.NodeProto] = field(default_factory=list)


_seen: ContextVar[Seen | None] = ContextVar("seen", default=None)
_late: ContextVar[frozenset[str]] = ContextVar("late", default=frozenset())


@contextmanager
def watching() -> Iterator[Seen]:
    """What is folded within it is noted."""
    noted = Seen()
    token = _seen.set(noted)
    try:
        yield noted
    finally:
        _seen.reset(token)


@contextmanager
def computing(names: Collection[str]) -> Iterator[None]:
    """Within it the tensors of these names are computed when a plan runs, also where they do not depend on its inputs."""
    token = _late.set(frozenset(names))
    try:
        yield
    finally:
        _late.reset(token)


def is_late(*names: str) -> bool:
    """Whether one of these tensors, or a table that a node of this result reads, is computed when the plan runs."""
    return not _late.get().isdisjoint(names)


def note(node: onnx.NodeProto) -> None:
    """Say that the results of a node have been folded."""
    if (seen := _seen.get()) is not None:
        seen.makers.update((name, node) for name in node.output if name)


def note_all(constants: Mapping[str, Weight], kept: list[onnx.NodeProto]) -> None:
    """Say what a graph consists of, whose nodes have all been looked at."""
    if (seen := _seen.get()) is not None:
        seen.constants, seen.kept = dict(constants), list(kept)
