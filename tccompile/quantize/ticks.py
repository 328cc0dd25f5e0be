"""How far calibrating is, whose work is found out on the way: how often choices are run, and which weights are rounded for it."""

from __future__ import annotations

from collections.abc import Callable

ELEMENTS = 1 << 16
"""Weights that are rounded in about the time of a small op."""


class Ticks:
    """Counts work that is done, and tells how much there is.

    told  called with both
    """

    def __init__(self, told: Callable[[int, int], object]) -> None:
        self._told, self._done, self._total = told, 0, 0

    def expect(self, count: int) -> None:
        """So much more is to be done."""
        self._total += count

    def tick(self, count: int = 1) -> None:
        """So much is done."""
        self._done += count
        self._told(self._done, max(self._done, self._total))

    def rounded(self, elements: int) -> None:
        """So many weights are rounded, of which nothing was expected: each is rounded once."""
        count = -(-elements // ELEMENTS)
        self.expect(count)
        self.tick(count)
