"""A plan with other weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from tccompile.plan.file import Plan
from tccompile.refit.constants import digests_of, refitted_constants

REFITTED = "its weights were replaced (tcrefit); precision, and errors that are told here, are of those that it was made with"


def refitted(plan: Plan, given: Mapping[str, np.ndarray]) -> Plan:
    """The plan with the weights that are given, by the model's names, in place of its own, and without certificates.

    Code, launches and formats are what they were. Raises what `refitted_constants` raises.
    """
    constants = refitted_constants(plan, given)
    new = digests_of(given)
    changed = any(plan.origin.weights.get(name) != value for name, value in new.items())
    return replace(
        plan,
        weights={**plan.weights, **constants},
        digests={name: value for name, value in plan.digests.items() if name not in constants},
        certificates=() if changed else plan.certificates,
        notes=tuple(dict.fromkeys((*plan.notes, REFITTED))) if changed else plan.notes,
        origin=replace(plan.origin, weights={**plan.origin.weights, **new}),
    )
