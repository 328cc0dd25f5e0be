"""Sizes that are known late."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Size:
    """A size that is known late.

    name       as the user and messages call it
    low, high  the least and the greatest one; from the least on, each `step` further
    """

    name: str
    low: int
    high: int
    step: int = 1

    def __contains__(self, value: object) -> bool:
        return value in self.all

    @property
    def all(self) -> range:
        """Every size, the least first."""
        return range(self.low, self.high + 1, self.step)

    def near(self, at: float) -> int:
        """The size that is nearest, of two the smaller one."""
        below = self.all[min(max(int(at - self.low) // self.step, 0), len(self.all) - 1)]
        return min((n for n in (below, below + self.step) if n in self.all), key=lambda n: abs(n - at))


Term = tuple[int, str]
"""So many times the size of that name; without a name, the number."""


@dataclass(frozen=True)
class Sum:
    """A dimension that is a sum of others."""

    terms: tuple[Term, ...]

    @classmethod
    def of(cls, text: str) -> Sum:
        """As people write it, as `past + new`, `past + 1` or `8*h`."""
        return cls(tuple(map(_term, text.split("+"))))

    def __str__(self) -> str:
        return "+".join(name if n == 1 and name else f"{n}*{name}" if name else str(n) for n, name in self.terms)


def _term(text: str) -> Term:
    factors = [factor.strip() for factor in text.split("*")]
    names = [factor for factor in factors if not factor.isdecimal()]
    if len(names) > 1:
        return 1, text.strip()
    return math.prod(int(factor) for factor in factors if factor.isdecimal()), "".join(names)
