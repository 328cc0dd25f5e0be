"""The base of objects that kernels call on the device."""

from __future__ import annotations

from itertools import count
from types import ModuleType
from typing import Any

_numbers = count()


class Part(ModuleType):
    """An object whose attributes are device functions, set in `__init__`: `ring.wait(state)` in a kernel calls ring's `wait`.

    Numba looks up attributes of modules when it compiles, and of no other objects that it does not know; so a part is a module.
    Numba tells modules apart by their names, so each part has one of its own.
    """

    def __init__(self) -> None:
        super().__init__(f"{type(self).__name__} {next(_numbers)}")


def part(**content: Any) -> Part:
    """A part of these device functions, and of numbers that the host asks for."""
    out = Part()
    out.__dict__.update(content)
    return out
