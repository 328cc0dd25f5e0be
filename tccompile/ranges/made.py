"""Programs that were made at points of a range, not made again where they would be the same: parts of a range have points in
common, and a part whose programs differ is divided or decided otherwise, which changes few of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from tccompile.ir.extent import Asked, Decisions, deciding
from tccompile.ir.program import Program
from tccompile.ranges.box import Point

if TYPE_CHECKING:
    import onnx_graphsurgeon as gs

KEPT = 512
"""Points of which graphs and programs are kept."""


class Made:
    """What makes the program of a point, as decided by `Decisions`."""

    def __init__(self, load: Callable[[Point], gs.Graph], to_program: Callable[[gs.Graph], Program]) -> None:
        """load, which decides nothing; to_program, which may change the graph."""
        self._load, self._to_program = load, to_program
        self._graphs: dict[Point, gs.Graph] = {}
        self._programs: dict[Point, list[tuple[Asked, Program]]] = {}

    def at(self, point: Point, decided: Decisions) -> Program:
        """The program; `decided` learns what is asked for it."""
        with deciding(decided):
            for asked, program in self._programs.get(point, ()):
                if all(ask(what, here) == told for (ask, what, here), told in asked.items()):
                    return program
            decided.asked = {}
            program = self._to_program(self._graph(point))
        asked, decided.asked = decided.asked, {}
        if len(self._programs) < KEPT:
            self._programs.setdefault(point, []).append((asked, program))
        return program

    def _graph(self, point: Point) -> gs.Graph:
        if point not in self._graphs:
            if len(self._graphs) == KEPT:
                return self._load(point)
            self._graphs[point] = self._load(point)
        return self._graphs[point].copy()
