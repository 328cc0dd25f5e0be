"""Programs that were made at points of a range, not made again where they would be the same: parts of a range have points in
common, and a part whose programs differ is divided or decided otherwise, which changes few of them."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import TYPE_CHECKING

from tccompile.ir.extent import Asked, Decisions, deciding
from tccompile.ir.program import Program
from tccompile.ranges.box import Point

if TYPE_CHECKING:
    import onnx_graphsurgeon as gs

NODES, OPS = 1 << 15, 1 << 17
"""Nodes of graphs and ops of programs that are kept, about 400 megabytes of each: what is beyond begins anew."""


class Made:
    """What makes the program of a point, as decided by `Decisions`.

    count, ops  how many programs have been made, not counting those that were kept, and of how many ops all of them are
    """

    def __init__(self, load: Callable[[Point], gs.Graph], to_program: Callable[[gs.Graph], Program]) -> None:
        """load, which decides nothing; to_program, which may change the graph."""
        self._load, self._to_program = load, to_program
        self._graphs: dict[Point, gs.Graph] = {}
        self._programs: dict[Point, list[tuple[Asked, Program]]] = {}
        self._nodes = self._ops = 0
        self.count = self.ops = 0

    def at(self, point: Point, decided: Decisions) -> Program:
        """The program; `decided` learns what is asked for it."""
        with deciding(decided):
            for asked, program in self._programs.get(point, ()):
                if all(ask(what, here) == told for (ask, what, here), told in asked.items()):
                    return program
            decided.asked = {}
            program = self._to_program(self._graph(point))
            gc.collect(0)  # graphs, whose nodes and tensors hold each other: 40 megabytes of a program of 400 ops
        asked, decided.asked = decided.asked, {}
        self.count, self.ops = self.count + 1, self.ops + len(program.ops)
        self._ops += len(program.ops)
        if self._ops > OPS:
            self._programs, self._ops = {}, len(program.ops)
        self._programs.setdefault(point, []).append((asked, program))
        return program

    def _graph(self, point: Point) -> gs.Graph:
        if point not in self._graphs:
            graph = self._load(point)
            self._nodes += len(graph.nodes)
            if self._nodes > NODES:
                self._graphs, self._nodes = {}, len(graph.nodes)
            self._graphs[point] = graph
        return self._graphs[point].copy()
