"""Weights that a plan was made without: evaluated from the model that they come from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TypeVar

import numpy as np

from tccompile.errors import PlanError, UsageError
from tccompile.ir.storage import pack_constant
from tccompile.ir.tensor import Tensor
from tccompile.ir.weights import Recipe, Source, digest, evaluate, leaves
from tccompile.plan.format import Contents

AnyPlan = TypeVar("AnyPlan", bound=Contents)


def fill(plan: AnyPlan, sources: Mapping[str, np.ndarray]) -> AnyPlan:
    """The plan with the weights that were left out of it, evaluated from the model's initializers by name.

    Raises UsageError if they are not the initializers of the model that the plan was made from.
    """
    weights, missing, told = dict(plan.weights), left_out(plan), dict(plan.origin.weights)
    for source in (leaf for _, recipe in missing.values() for leaf in leaves(recipe)):
        if not isinstance(source, Source):
            continue
        values = sources.get(source.name)
        if values is None:
            raise UsageError(f"the plan needs the weight {source.name!r}, which the model does not have: is it another model?")
        if values.shape != source.shape or values.dtype.name != source.dtype:
            raise UsageError(
                f"the plan needs the weight {source.name!r} as {source.dtype} {source.shape}, the model has "
                f"{values.dtype.name} {values.shape}: is it another model?"
            )
        if source.name in told and digest(values) != told.pop(source.name):
            raise UsageError(
                f"the weight {source.name!r} has other values than those that the plan was made with; tcrefit puts others into it"
            )
    for name, (tensor, recipe) in missing.items():
        try:
            weights[name] = pack_constant(tensor, evaluate(recipe, sources))
        except NOT_EVALUATED as error:
            raise PlanError(f"the recipe of the constant {name!r} cannot be evaluated: {error}") from error
    return replace(plan, weights=weights)


NOT_EVALUATED = (ArithmeticError, LookupError, MemoryError, TypeError, ValueError)
"""What evaluating a recipe raises that says something that no function takes."""


def left_out(plan: Contents) -> dict[str, tuple[Tensor, Recipe]]:
    """The constants whose values are not in the plan."""
    constants = {
        n: (e.program.tensors[n], r) for e in plan.entries for n, r in e.program.constants.items() if e.program.packed(n) is None
    }
    return {name: constant for name, constant in constants.items() if name not in plan.weights}
