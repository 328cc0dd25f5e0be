"""A plan's certificate: what it must compute from seeded inputs, and whether it does, on the device at hand. NumPy only."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tccompile.errors import UsageError, VerificationError
from tccompile.ir.feeds import Ranges, seeded
from tccompile.ir.metric import relative_error
from tccompile.ir.program import Program
from tccompile.ir.storage import from_storage
from tccompile.plan.file import Plan
from tccompile.plan.format import Certificate, Expected
from tccompile.plan.rules import SEEDED
from tccompile.runtime.session import Session
from tccompile.terminal import plain


@dataclass(frozen=True)
class Result:
    """How far an output is from its reference.

    error     ‖out - ref‖ / ‖ref‖; NaN if the output has an infinity or a NaN where the reference has a number
    inputs    what it was computed from
    expected  the error that the certificate tells of, if it was checked against one
    """

    output: str
    device: str
    inputs: str
    error: float
    bound: float
    expected: float | None = None

    @property
    def passed(self) -> bool:
        return self.error <= self.bound  # false for NaN

    def to_json(self) -> dict[str, Any]:
        error = self.error if math.isfinite(self.error) else None
        return {**vars(self), "error": error, "passed": self.passed}


def numbers(stored: np.ndarray, program: Program, name: str) -> np.ndarray:
    """A tensor's stored elements as float64."""
    return from_storage(stored, program.tensors[name].dtype).astype(np.float64)


def certificate(
    plan: Plan,
    entry: int,
    seed: int,
    ranges: Ranges,
    references: Mapping[str, np.ndarray],
    results: Sequence[Result],
    oracle: str,
    held: Sequence[Sequence[Result]] = (),
) -> Certificate | None:
    """The certificate of an entry, from the oracle's outputs for its seeded inputs and how far the plan was from them.

    held  how far it was on each set of inputs that were held back when it was quantized, output by output
    None where a reference or an output holds an infinity or a NaN: nothing can be measured by it.
    """
    program = plan.entries[entry].program
    outputs = []
    for i, result in enumerate(results):
        reference = np.asarray(references[result.output], np.float64).reshape(-1)
        real = [own[i].error for own in held]
        if not np.isfinite(reference).all() or not all(map(math.isfinite, (result.error, *real))):
            return None
        norm = float(np.linalg.norm(reference))
        outputs.append(Expected(result.output, _spread(reference), norm, result.error, result.bound, max(real, default=None)))
    inputs = digest(seeded(program, seed, ranges), program)
    return Certificate(entry, seed, inputs, oracle, results[0].device, tuple(outputs), dict(ranges), len(held))


def selftest(plan: Plan, session: Session) -> list[Result]:
    """What the session computes from the seeded inputs of each certificate, beside what it must be.

    The error is that at the certificate's places, or that of the norm over all elements if that is larger. Raises UsageError
    for a plan without a certificate.
    """
    if not plan.certificates:
        raise UsageError("the plan has no certificate: make it with tccompile MODEL.onnx --verify")
    results = []
    for made in plan.certificates:
        program = plan.entries[made.entry].program
        feeds = seeded(program, made.seed, made.ranges)
        if digest(feeds, program) != made.inputs:
            raise VerificationError(f"seed {made.seed} gives other inputs than when the plan was made: the plan is damaged")
        outputs = dict(zip(program.results, session.run(None, feeds), strict=True))
        for e in made.outputs:
            out = numbers(outputs[e.name], program, e.name).reshape(-1)
            norm = float(np.linalg.norm(out))
            errors = relative_error(_spread(out), e.values), abs(norm - e.norm) / (e.norm or 1.0)
            error = max(errors) if all(map(math.isfinite, errors)) else math.nan
            results.append(Result(e.name, session.describe(), f"entry {made.entry}, seed {made.seed}", error, e.bound, e.error))
    return results


def digest(feeds: Mapping[str, np.ndarray], program: Program) -> str:
    """SHA-256 of the inputs' bytes, in the program's order."""
    total = hashlib.sha256()
    for name in program.inputs:
        total.update(np.ascontiguousarray(feeds[name]).tobytes())
    return total.hexdigest()


def _spread(values: np.ndarray) -> np.ndarray:
    """Up to SEEDED of the values, at even distances."""
    count = min(values.size, SEEDED)
    return values[np.arange(count) * values.size // max(count, 1)].astype(np.float64)


def results_text(results: Sequence[Result]) -> str:
    """A line for each output."""
    lines = []
    for r in results:
        error = f"error {r.error:.2e}" if math.isfinite(r.error) else "not finite"
        then = f", {r.expected:.2e} when it was made" if r.expected is not None else ""
        lines.append(
            f"{'pass' if r.passed else 'FAIL'}  {r.output}: {error}{then}; {r.bound:.0e} is allowed  ({r.inputs}; {r.device})"
        )
    return "\n".join(map(plain, lines))
