"""Which tests `make test` runs, and which only `make test-all`: those that are marked as thorough."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

thorough = pytest.mark.thorough
"""What a change seldom breaks alone: the same text for other generations, more sizes and layouts of what is tested already."""

APART = ("sm_61", "sm_75", "sm_90a", "sm_120")
"""Generations for which the code of plain kernels differs, or what assembles it: `make kernels` compiles for all."""


def usually(values: Iterable[Any], *chosen: Any) -> list[Any]:
    """Parameters of a test, of which `make test` runs the chosen ones: by their places if they are tuples or objects, else by
    their values."""
    values = list(values)
    plain = all(isinstance(v, str) for v in values)
    return [
        v if (v if plain else i) in chosen else pytest.param(*(v if isinstance(v, tuple) else (v,)), marks=thorough)
        for i, v in enumerate(values)
    ]
