"""What other weights make of a plan's constants, if the plan's choices hold for them.

A constant is made of the model's weights by its recipe, the same way as when the plan was made. The choices that were made by the
weights' values, for formats and scales, hold for others only as far as these are like them:

  in fp16          each value must be finite, and rounding may not lose more than fp16's digits do (`held.LOSS`)
  integers         each value must lie within its type; the scales of bytes that tccompile made follow the weights
  sums of bytes    may be `weights.GROWTH` times as large as they were, for which sums were found to be exact
  magnitudes       where ranges of tensors were measured with the weights, a constant's largest magnitude may be `Origin.factor`
                   times what it was, and its norm that or its inverse. For fp16 that is 2, of the factor of 8 that tensors have
                   above what was seen; for bytes, which end at what was seen, 1.25. What is added to results may be as large as
                   they were
  2:4              of weights that are read in their compressed form, two of every four neighbours along K must be zero
  even channels    weights whose channels had norms of about one size must still have (`held.EVEN`), if fp16 copies of what they
                   multiply rely on it
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from types import MappingProxyType

import numpy as np

from tccompile.errors import PlanError, UsageError, VerificationError
from tccompile.ir.sparse import is_sparse
from tccompile.ir.storage import pack_constant
from tccompile.ir.tensor import Tensor
from tccompile.ir.types import DType
from tccompile.ir.weights import GROWTH, TRANSFORMS, Literal, Recipe, Source, Transform, digest, leaves, sources_of
from tccompile.plan.file import Plan
from tccompile.plan.format import Held
from tccompile.plan.rules import check_left_out
from tccompile.plan.weights import NOT_EVALUATED
from tccompile.refit.held import EVEN, LOSS, exact, of_values, rounded, summed

COMPRESSED = "sparse_values", "sparse_places"
"""What makes the constants of a form of 2:4 weights: see `forms.Sparse`."""

INTEGERS = "packed_values", "packed_scales", "packed_zeros"
"""And of a form of integers in blocks: see `forms.Packed`."""

THREADS = min(os.cpu_count() or 1, 16)
"""That make constants: NumPy and hashing let others run."""

WAY_OUT = "compile the model with these weights"


def sources(plan: Plan) -> dict[str, Source]:
    """The initializers that the plan's constants are made of, by name."""
    recipes = (recipe for entry in plan.entries for recipe in entry.program.constants.values())
    return {leaf.name: leaf for recipe in recipes for leaf in leaves(recipe) if isinstance(leaf, Source)}


def refitted_constants(
    plan: Plan, given: Mapping[str, np.ndarray], others: Mapping[str, np.ndarray] = MappingProxyType({})
) -> dict[str, memoryview]:
    """The bytes of each constant that is made of a weight that is given, by name.

    others  what weights are that are not given, where constants are made of both
    Raises UsageError for weights that are none of the model's, have another type or shape, or decided what the plan is, or if one
    is missing that a constant is made of as well; VerificationError for values that the plan's choices do not hold for.
    """
    known = sources(plan)
    if not plan.origin.nodes:
        raise UsageError("the plan does not say what it was made from; compile the model again")
    check_left_out(replace(plan, weights={}))  # what is made here is held to what filling a plan is held to
    for name, values in given.items():
        _check_weight(plan, known, name, np.asarray(values))
    todo: dict[str, tuple[_Constant, set[str]]] = {}
    computed = {name for entry in plan.entries for name in entry.program.forms if entry.program.packed(name) is not None}
    for entry in plan.entries:
        terms = summed(entry.program)
        for name, recipe in entry.program.constants.items():
            names = sources_of(recipe)
            if name in todo or names.isdisjoint(given):
                continue
            if missing := sorted(names.difference(given, others)):
                whole = ", ".join(map(repr, sorted(names)))
                raise UsageError(f"{whole} are one constant of the plan: give {', '.join(map(repr, missing))} too")
            todo[name] = _Constant(name, entry.program.tensors[name], recipe, terms.get(name)), names

    def made(constant: _Constant, names: set[str]) -> memoryview:
        return constant.refitted(plan, {n: given[n] if n in given else others[n] for n in names})

    threads = ThreadPoolExecutor(THREADS)
    try:
        found = dict(zip(todo, threads.map(lambda one: made(*one), todo.values()), strict=True))
    finally:
        threads.shutdown(cancel_futures=True)  # if one is refused, others need not be made
    # What the plan has as integers alone is made to be checked: it follows from these
    return {name: data for name, data in found.items() if name in plan.weights or name not in computed}


def digests_of(given: Mapping[str, np.ndarray]) -> dict[str, str]:
    """The digest of each weight."""
    with ThreadPoolExecutor(THREADS) as threads:
        return dict(zip(given, threads.map(digest, map(np.asarray, given.values())), strict=True))


def together(plan: Plan, names: Collection[str]) -> set[str]:
    """These weights, and those that make constants of the plan with them."""
    recipes = (recipe for entry in plan.entries for recipe in entry.program.constants.values())
    made_of = map(sources_of, recipes)
    return set(names).union(*(found for found in made_of if not found.isdisjoint(names)))


def _check_weight(plan: Plan, known: Mapping[str, Source], name: str, values: np.ndarray) -> None:
    origin = plan.origin
    if name not in known and name not in origin.weights:
        raise UsageError(f"the plan has no weight {name!r}; tcinspect --weights lists those that it has")
    source = known.get(name)
    if source is not None and (values.shape != source.shape or values.dtype.name != source.dtype):
        raise UsageError(
            f"the weight {name!r} is {source.dtype} {source.shape} in the plan, the new one {values.dtype.name} {values.shape}"
        )
    if name in origin.decided and digest(values) != origin.weights[name]:
        raise UsageError(
            f"the weight {name!r} has other values than when the plan was made, and something was decided by them (it was folded "
            f"into other constants, a shape or an op): {WAY_OUT}"
        )


@dataclass(frozen=True)
class _Constant:
    """A constant that gets other values; `terms` as `held.of_values` has it."""

    name: str
    tensor: Tensor
    recipe: Recipe
    terms: int | None

    def refitted(self, plan: Plan, given: Mapping[str, np.ndarray]) -> memoryview:
        """Its bytes, if the plan's choices hold for them."""
        old = plan.origin.held.get(self.name)
        if old is None:
            raise PlanError(f"the plan does not say what {self.name!r} was: it is made of weights")
        with np.errstate(all="ignore"):
            try:
                values = self._evaluated(exact(self.recipe), given)
                new = of_values(self.recipe, values, self.tensor, self.terms, old.spread < np.inf)
                self._check(old, new, plan.origin.factor)
                return pack_constant(self.tensor, rounded(self.recipe, values))
            except NOT_EVALUATED as error:
                raise UsageError(f"{self._what()} cannot take the values given: {error}") from error

    def _what(self) -> str:
        names = sorted(sources_of(self.recipe))
        weights = ", ".join(map(repr, names[:4])) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
        return f"the weight {weights}" if len(names) == 1 else f"the constant {self.name!r} of the weights {weights}"

    def _refusal(self, why: str) -> VerificationError:
        return VerificationError(f"{self._what()}: {why}: {WAY_OUT}")

    def _evaluated(self, recipe: Recipe, given: Mapping[str, np.ndarray]) -> np.ndarray:
        """`weights.evaluate`, that refuses what would be cut off."""
        if isinstance(recipe, Source):
            return np.asarray(given[recipe.name])
        if isinstance(recipe, Literal):
            return recipe.values
        args = [self._evaluated(a, given) for a in recipe.args]
        attributes = dict(recipe.attributes)
        if recipe.fn in COMPRESSED and not is_sparse(args[0]):
            raise self._refusal("of four neighbouring channels more than two differ from zero, and the plan has it as 2:4")
        if recipe.fn == "cast" and args[0].dtype.kind == "f" and np.dtype(attributes["dtype"]).kind in "iu":
            limits, x = np.iinfo(attributes["dtype"]), args[0]
            if x.size and not (limits.min <= x.min() and x.max() <= limits.max):
                raise self._refusal(
                    f"values from {x.min():g} to {x.max():g} in {attributes['dtype']}, as which the plan has them"
                )
        return np.asarray(TRANSFORMS[recipe.fn](*args, **attributes))

    def _check(self, old: Held, new: Held, factor: float) -> None:
        if not self.tensor.dtype.is_float and _is_sum(self.recipe):
            return
        if isinstance(self.recipe, Transform) and self.recipe.fn in (*COMPRESSED, *INTEGERS):
            return  # what it is made of is a constant of the plan, too
        halves = self.tensor.dtype is DType.F16
        if np.isinf(new.largest) and not np.isinf(old.largest):
            raise self._refusal("not all values are finite, as they were")
        if halves and new.largest >= HALF_END:
            raise self._refusal(f"values up to {new.largest:.3g}, and the plan has it in fp16, which ends at 65504")
        if halves and new.loss > max(LOSS, 2 * old.loss):
            raise self._refusal(f"in fp16 its subnormals would cost {new.loss:.1e} of its norm; the plan allows for {LOSS:.1e}")
        for which, was, is_ in zip(("above 0", "below 0", "of both signs"), old.sums, new.sums, strict=False):
            if is_ > GROWTH * was:
                raise self._refusal(
                    f"values {which} add up to {is_:g} in a row; sums are known to be exact up to {GROWTH * was:g}"
                )
        if not self.tensor.dtype.is_float and not old.sums and new.largest > GROWTH * old.largest:
            raise self._refusal(f"integers up to {new.largest:g}; the plan was made for {GROWTH * old.largest:g}")
        if factor:
            self._check_magnitudes(old, new, factor)

    def _check_magnitudes(self, old: Held, new: Held, factor: float) -> None:
        """Hold values to those that the ranges of tensors were measured with."""
        most = max(factor * old.largest, old.room)
        if new.largest > most:
            raise self._refusal(
                f"values up to {new.largest:.3g}; precision was chosen with {old.largest:.3g}, and holds for {most:.3g}"
            )
        if new.norm > factor * old.norm and not old.room:
            raise self._refusal(
                f"a norm of {new.norm:.3g}; precision was chosen with {old.norm:.3g}, and holds for {factor:g} times that"
            )
        if new.norm < old.norm / factor and not old.room:
            raise self._refusal(
                f"a norm of {new.norm:.3g}; precision was chosen with {old.norm:.3g}, and holds for 1/{factor:g} of that"
            )
        if old.spread <= EVEN < new.spread:
            raise self._refusal(
                f"norms of input channels that are {new.spread:.3g} apart; precision was chosen for up to {EVEN:g}"
            )


def _is_sum(recipe: Recipe) -> bool:
    """Whether a constant is sums of weights, as zero points need them: these are held to with the weights themselves."""
    return isinstance(recipe, Transform) and (recipe.fn == "matmul" or any(map(_is_sum, recipe.args)))


HALF_END = 65520
"""The least magnitude that rounds to infinity in fp16."""
