"""Sizes that are known late."""

from __future__ import annotations

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


@dataclass(frozen=True)
class Sum:
    """A dimension that is a sum of others: numbers, and the names of sizes."""

    terms: tuple[int | str, ...]

    @classmethod
    def of(cls, text: str) -> Sum:
        """As people write it, as `past + new`."""
        return cls(tuple(int(term) if term.isdecimal() else term for term in map(str.strip, text.split("+"))))

    def __str__(self) -> str:
        return "+".join(map(str, self.terms))
