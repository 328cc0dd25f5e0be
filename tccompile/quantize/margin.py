"""What new inputs may be off by, from a few that were measured.

Errors of a network on inputs of one kind differ by factors, so their logarithms are taken as normal numbers. Of these, what is
known from other networks counts as FREEDOM more measurements do: by few inputs alone nothing could be said.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import cycle, islice

SPREAD = 0.25
"""Of the logarithms of errors: their standard deviation in networks of all kinds."""

FREEDOM = 4
"""How many degrees of freedom that is worth."""

STUDENT = (
    3.747, 3.365, 3.143, 2.998, 2.896, 2.821, 2.764, 2.718,
    2.681, 2.650, 2.624, 2.602, 2.583, 2.567, 2.552, 2.539,
    2.528, 2.518, 2.508, 2.500, 2.492, 2.485, 2.479, 2.473,
    2.467, 2.462, 2.457, 2.453, 2.449, 2.445, 2.441, 2.438,
)  # fmt: skip
"""What Student's t is below in 99 of 100 cases, for FREEDOM degrees of freedom and more."""

LEAST = 0.1
"""The share of the largest error up to which others count as that large: small ones say nothing of how large others are."""


def expected(errors: Sequence[float]) -> float:
    """What 99 of 100 new inputs are off by at most, from the errors of up to 32; not less than the largest of these."""
    if not all(map(math.isfinite, errors)):
        return math.nan
    largest = max(errors)
    if not largest:
        return 0.0
    logs = [math.log(max(e, LEAST * largest)) for e in errors]
    count = len(logs)
    mean = sum(logs) / count
    squares = FREEDOM * SPREAD**2 + sum((x - mean) ** 2 for x in logs)
    deviation = math.sqrt(squares / (FREEDOM + count - 1) * (1 + 1 / count))
    return max(largest, math.exp(mean + STUDENT[count - 1] * deviation))


def of_new(errors: Sequence[float], examples: int) -> float:
    """What `expected` says, from errors of so many examples that lie together in batches, where they are taken to be alike."""
    return expected([*islice(cycle(errors), max(len(errors), min(examples, len(STUDENT))))])
