"""The stage `measure`: the values that a program's tensors take, from running it on the CPU; and what it is run with."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import count
from pathlib import Path

import numpy as np
import onnx_graphsurgeon as gs

from tccompile.errors import InputError, TccompileError, blamed_on
from tccompile.ir.feeds import read_arrays, samples, seeded
from tccompile.ir.metric import relative_error
from tccompile.ir.program import Program
from tccompile.ir.reference import evaluate
from tccompile.load.model import Opened, load
from tccompile.lower.graph import lower
from tccompile.options import Options
from tccompile.precision.estimate import estimated
from tccompile.precision.positions import ranges_of
from tccompile.precision.ranges import Spread, activations, is_long, operands, smaller, why_too_long
from tccompile.precision.real_inputs import at_own_shapes, in_batches
from tccompile.quantize.calibration import Chosen
from tccompile.rewrites import rewrite
from tccompile.stages.progress import Progress, quiet

SAME = 1e-3
"""How far two programs that compute the same may be apart: they add up in another order, and may round to another byte."""


def measured(
    model: Opened, program: Program, options: Options, progress: Progress = quiet, calibration: Chosen | None = None
) -> dict[str, Spread]:
    """The values that the program's tensors take with the user's inputs, or else with random ones (see `positions.ranges_of`).

    With random ones, of mean 0 and positive as images often are, a network that would take long is run on smaller images, if it
    takes them; see `ranges.smaller`. Where nothing can be run, they are estimated from the weights.
    """
    progress("measure", 0, 1)
    weights = model.weights
    constants = operands(program, weights)

    def run(program: Program, runs: Sequence[Mapping[str, np.ndarray]]) -> dict[str, Spread]:
        done, total = count(1), len(runs) * len(program.ops)
        # Where tccompile has chosen the bytes, another one for a value about halfway is as good
        exact, step = options.quantize is None, lambda: progress("measure", next(done), total)
        return constants | activations(program, runs, weights, step, exact)

    def other(graph: gs.Graph) -> Program:
        """At other shapes: not fused, since that depends on them, and this way no tensor's name is missing."""
        return lower(graph if calibration is None else rewrite(calibration.applied(graph)))

    if options.calibrate is not None:
        arrays = read_arrays(options.calibrate, program.inputs)
        runs, long = samples(program, arrays), why_too_long(program) is not None
        if not runs or long:
            with blamed_on("the model"):
                if found := at_own_shapes(model, arrays, other_sizes=long):
                    return run(other(found[0]), found[1])
        if runs:
            return run(program, runs)
        if len(options.entries) == 1:
            raise misfit(options.calibrate, program)
    small = program
    if is_long(program):
        with suppress(TccompileError):
            small = other(rewrite(load(*smaller(model, program))))
    why = why_too_long(small)
    if why is None:
        try:
            with blamed_on("the model"):
                return run(small, random_inputs(small, options))
        except InputError as error:
            why = f"random inputs do not fit: {error}"
    way_out = "calibrate with real inputs to measure it"
    warnings.warn(f"what values tensors take was estimated from the weights, {why}: {way_out}", RuntimeWarning, stacklevel=2)
    return constants | estimated(program, weights)


def inputs_of(program: Program, options: Options) -> tuple[Sequence[Mapping[str, np.ndarray]], bool]:
    """What the program is measured with: the user's inputs, or random ones; and whether they are the user's. Of several entries
    these need to fit only one, and where a model is quantized, none.

    Raises InputError if the user's do not fit.
    """
    if options.calibrate is not None:
        arrays = read_arrays(options.calibrate, program.inputs)
        if runs := samples(program, arrays) or in_batches(program, arrays):
            return runs, True
        if len(options.entries) == 1 and options.quantize is None:
            raise misfit(options.calibrate, program)
    return random_inputs(program, options), False


def random_inputs(program: Program, options: Options) -> list[dict[str, np.ndarray]]:
    """Random inputs of mean 0, and positive as images often are."""
    known = ranges_of(program, options.input_ranges)
    return [seeded(program, 0, known), seeded(program, 0, known, positive=True)]


def agree(one: Program, other: Program, options: Options, weights: Mapping[str, np.ndarray]) -> bool:
    """Whether two programs of the same inputs compute the same of random ones; taken for granted where that takes too long."""
    if why_too_long(one) is not None or why_too_long(other) is not None:
        return True
    try:
        feeds = random_inputs(one, options)[0]
    except InputError:
        return True
    found, exact = (evaluate(program, feeds, weights) for program in (one, other))
    return all(np.array_equal(found[n], y, equal_nan=True) or relative_error(found[n], y) <= SAME for n, y in exact.items())


def misfit(data: Path, program: Program) -> InputError:
    if samples(program, read_arrays(data, program.inputs)) is not None:
        return InputError(f"{data}: the arrays hold no set of inputs, being empty")
    shapes = ", ".join(f"{n!r} {program.tensors[n].shape}" for n in program.inputs)
    return InputError(f"{data}: the arrays fit the inputs' shapes neither alone nor in a row: {shapes}")
