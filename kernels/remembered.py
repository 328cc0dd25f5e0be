"""What functions of an op and its program gave, kept for the next call: all of an op's configs ask the same."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")

KEPT = 1 << 12
"""Results of a function that are kept at most: of a range, an op's at many sizes are."""

PLAIN = frozenset((int, bool, str, tuple))
"""Types whose values are compared; objects of others are told apart by identity."""


_every: list[dict[Any, Any]] = []


def forget() -> None:
    """Let go of what functions gave, and of the programs that they were asked about."""
    for known in _every:
        known.clear()


def remembered(function: Callable[P, R]) -> Callable[P, R]:
    """The function, which computes nothing twice for the same objects. It must give what nobody changes.

    Objects are told apart by identity, since comparing programs would take longer than what is saved; those of results that are
    kept live as long.
    """
    known: dict[Any, tuple[Any, R]] = {}
    _every.append(known)

    @wraps(function)
    def asked(*args: P.args, **named: P.kwargs) -> R:
        given = (*args, *named.items()) if named else args
        key = tuple([a if type(a) in PLAIN else id(a) for a in given])
        found = known.get(key)
        if found is None:
            made = function(*args, **named)
            if len(known) >= KEPT:
                known.clear()
            found = known[key] = given, made
        return found[1]

    return asked
