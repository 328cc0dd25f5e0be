"""`--max-error X`: precision rises, op by op, until what the program computes is within X of what it computes in fp32.

What each tensor's rounding moves the outputs by has been measured (`sensitivity.py`), so ops are kept in fp32 in the order of
that, the worst first, and the fewest that do are sought by doubling and halving their number. Each attempt is run on the CPU, as
it would be stored, beside the same program in fp32.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from tccompile.errors import VerificationError
from tccompile.ir.metric import relative_error
from tccompile.ir.program import Program
from tccompile.ir.reference import evaluate
from tccompile.precision.metric import Metric
from tccompile.precision.ranges import Spread

HALVINGS = 3
"""How often the number of ops is halved down: an eighth of the last doubling is as close as is sought."""


@dataclass(frozen=True)
class Raised:
    """The program within the budget and the one without it, their errors, the ops that are in fp32 for it, and the reason."""

    program: Program
    error: float
    before: Program
    error_before: float
    ops: tuple[int, ...]
    reason: str


def within(
    program: Program,
    bound: float,
    chosen: Callable[[Mapping[int, str]], Program],
    spreads: Mapping[str, Spread],
    runs: Sequence[Mapping[str, np.ndarray]],
    sources: Mapping[str, np.ndarray],
    floats: Program | None = None,
    metric: Metric | None = None,
    whole: Callable[[Sequence[float]], float] = max,
) -> Raised:
    """The program with as few ops in fp32 as bring its error to the bound: the largest of any output and run.

    program  as nothing is rounded; `chosen`, the same with precision chosen, and the ops that it is given in fp32, with a reason
    runs     inputs; sources, the model's weights by name
    floats   what the program is compared with, if it is quantized and not with itself
    metric   says what outputs are off by, in place of the relative error
    whole    what is held to the bound, of each run's largest error, if not the largest of all
    Raises VerificationError if fp32 everywhere is not enough, or is itself no more exact than that.
    """
    if metric is None and (least := _of_fp32(program, spreads)) > bound:
        of_products = [i for i in _worst_first(program, spreads) if program.products(program.ops[i])]
        raise VerificationError(
            f"--max-error {bound:g}: fp32 itself is off by about {least:.0e}, since sums of products are rounded to it, on each "
            f"device in another order; {_cause(program, of_products)}"
        )
    exact = [evaluate(floats or program, feeds, sources) for feeds in runs]
    order = _worst_first(program, spreads)
    tried: dict[int, tuple[Program, float]] = {}
    reason = f"fp32: without that, outputs would be off by more than {bound:g}"

    def error(count: int) -> float:
        if count not in tried:
            made = chosen(dict.fromkeys(order[:count], reason))
            outputs = [evaluate(made, feeds, sources, stored=True) for feeds in runs]
            errors = (_error(out, ref) for out, ref in zip(outputs, exact, strict=True))
            tried[count] = made, whole([*errors]) if metric is None else metric(outputs, exact, runs)
        return tried[count][1]

    count = 0
    while not error(count) <= bound and count < len(order):
        count = min(max(2 * count, len(order) // 32, 1), len(order))
    if not error(count) <= bound:
        raise VerificationError(
            f"--max-error {bound:g}: the error is {error(count):.1e} with everything between inputs and outputs in fp32; "
            f"{_cause(program, order)}"
        )
    low = count // 2 if count else 0
    for _ in range(HALVINGS):
        middle = (low + count) // 2
        if middle <= low:
            break
        low, count = (low, middle) if error(middle) <= bound else (middle, count)
    return Raised(*tried[count], *tried[0], tuple(order[:count]), reason)


NAMED = 5
"""How many nodes a message names, at most."""


def _cause(program: Program, order: Sequence[int]) -> str:
    """What is rounded all the same, and what to do about it."""
    types = {name: program.tensors[name].dtype for name in program.outputs}
    if narrow := [f"{name!r} to {dtype.value}" for name, dtype in types.items() if dtype.is_float and dtype.size < 4]:
        return f"the model itself rounds its outputs, {', '.join(narrow[:NAMED])}: make them float32 there, or allow that much"
    named = list(dict.fromkeys(repr(program.ops[i].nodes[0]) for i in order))[:NAMED]
    return (
        f"what is rounded in {', '.join(named)} moves the outputs most. Allow that much, or measure with other inputs "
        "(--calibrate DATA.npz, --input-range)"
    )


def _error(outputs: Mapping[str, np.ndarray], exact: Mapping[str, np.ndarray]) -> float:
    return max((relative_error(outputs[name], exact[name]) for name in exact), default=0.0)


DIGITS = 2.0**-13
"""What fp32 rounds by, of what fp16 does."""


def _of_fp32(program: Program, spreads: Mapping[str, Spread]) -> float:
    """What outputs are off by at least, as squares add up, since each product's results are rounded to fp32."""
    owners = {program.tensors[op.y].storage for op in program.ops if program.products(op)}
    return DIGITS * math.hypot(*(spreads[owner].share for owner in owners if owner in spreads))


def _worst_first(program: Program, spreads: Mapping[str, Spread]) -> list[int]:
    """The ops by what their rounding moves the outputs by; a product's weights are rounded too."""

    def share(i: int) -> float:
        op = program.ops[i]
        names = [op.y, *(name for name in op.inputs if name not in program.constants)]
        largest = max((spreads[o].share for o in (program.tensors[n].storage for n in names) if o in spreads), default=0.0)
        return largest * (2 if program.products(op) and any(w in program.constants for w in op.multiplied) else 1)

    return sorted(range(len(program.ops)), key=lambda i: (-share(i), i))
