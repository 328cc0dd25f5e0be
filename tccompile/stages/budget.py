"""`--max-error X`: the program of a build within it, with the build's inputs, or at other shapes if it is large."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import onnx_graphsurgeon as gs

from tccompile.arch import ARCHS
from tccompile.errors import TccompileError, UsageError, blamed_on
from tccompile.fuse import fuse
from tccompile.ir.feeds import read_arrays
from tccompile.ir.program import Program
from tccompile.load.model import Opened, load
from tccompile.lower.graph import lower
from tccompile.options import Options
from tccompile.precision.error_budget import Raised, within
from tccompile.precision.metric import read_metric
from tccompile.precision.ranges import Spread, smaller, why_too_long
from tccompile.precision.real_inputs import at_own_shapes
from tccompile.quantize.calibration import Chosen
from tccompile.quantize.known import TESTED, tested
from tccompile.quantize.margin import of_new
from tccompile.rewrites import rewrite
from tccompile.schedule.choose import schedule
from tccompile.stages.measure import inputs_of, random_inputs


@dataclass(frozen=True)
class Budgeted:
    """The build whose error is held to what the user allows (`Options.max_error`).

    chosen       the precision of a program, with some ops raised
    spreads      of tensors' values, where precision goes by them
    opened       the model, and `calibration`, how it was quantized; None if it was not
    """

    chosen: Callable[..., Program]
    spreads: Mapping[str, Spread]
    options: Options
    opened: Opened
    calibration: Chosen | None


def raised_within(program: Program, floats: Program | None, build: Budgeted) -> tuple[Raised, str]:
    """The program within the error that the user allows, and a line on it. What takes too long to be run is measured at other
    shapes, and the same nodes are raised.

    floats  the model in floats, where the program is quantized
    Raises UsageError if it takes too long at any shapes.
    """
    options, opened, calibration, chosen = build.options, build.opened, build.calibration, build.chosen
    why = why_too_long(program)
    if why is None:
        runs, real = inputs_of(program, options)
        raised, known = _within_budget(program, floats, build, runs, real)
        return raised, _cost_of(raised, build, known)
    with blamed_on("the model"):
        found = _elsewhere(opened, program, options)
        if found is None:
            raise UsageError(f"--max-error runs the model on the CPU, and {why}: compile it for smaller shapes first")
        graph, runs, real = found
        small = fuse(lower(graph if calibration is None else rewrite(calibration.applied(graph))))
        exact = None if calibration is None else lower(graph)
        raised, known = _within_budget(small, exact, build, runs, real)
    reasons = {node: raised.reason for i in raised.ops for node in small.ops[i].nodes}
    ops = tuple(i for i, op in enumerate(program.ops) if not reasons.keys().isdisjoint(op.nodes))
    raised = replace(raised, program=with_raised(chosen, reasons, program), before=chosen(program), ops=ops)
    return raised, f"{_cost_of(raised, build, known)}; measured at smaller shapes, since {why}"


def with_raised(chosen: Callable[..., Program], reasons: Mapping[str, str], program: Program) -> Program:
    """The precision of a program with nodes raised for reasons, whatever its shapes."""
    ops = {
        i: next(reasons[n] for n in op.nodes if n in reasons)
        for i, op in enumerate(program.ops)
        if not reasons.keys().isdisjoint(op.nodes)
    }
    return chosen(program, raised=ops)


def _elsewhere(
    opened: Opened, program: Program, options: Options
) -> tuple[gs.Graph, Sequence[Mapping[str, np.ndarray]], bool] | None:
    """The graph at other shapes than the program's, where running it does not take too long; inputs, and whether they are the
    user's."""
    if options.calibrate is not None:
        arrays = read_arrays(options.calibrate, program.inputs)
        if found := at_own_shapes(opened, arrays, other_sizes=True):
            return *found, True
    with suppress(TccompileError):
        graph = rewrite(load(*smaller(opened, program)))
        if not why_too_long(small := lower(graph)):
            return graph, random_inputs(small, options), False
    return None


def _within_budget(
    program: Program,
    floats: Program | None,
    build: Budgeted,
    runs: Sequence[Mapping[str, np.ndarray]],
    real: bool,
) -> tuple[Raised, float]:
    """The program within the error that the user allows, and what of that error was measured when it was quantized.

    By the user's inputs what is quantized is compared with the model in floats, and it is held to what new ones are expected to
    be off by. Bytes need not hold what random inputs are: by them it is compared with itself, and what bytes cost is known.
    """
    options, calibration, weights = build.options, build.calibration, build.opened.weights
    assert options.max_error is not None

    def raising(ops: Mapping[int, str]) -> Program:
        return build.chosen(program, raised=ops)

    if calibration is None or real:
        few = runs if calibration is None else tested(runs, max(calibration.runs, TESTED))
        metric = None if options.metric is None else read_metric(options.metric)
        whole = max if calibration is None else partial(of_new, examples=calibration.runs)
        return within(program, options.max_error, raising, build.spreads, few, weights, floats, metric, whole), 0.0
    bound = math.sqrt(options.max_error**2 - calibration.off.expected**2)  # errors add up as squares
    return within(program, bound, raising, build.spreads, runs, weights), calibration.off.expected


def _cost_of(raised: Raised, build: Budgeted, known: float) -> str:
    """What an error budget was met by, and what it costs where there is most to lose: on the last generation asked for.

    known  an error that was measured before, and comes to it
    """
    options, arch = build.options, build.options.archs[-1]
    error, error_before = (math.hypot(e, known) for e in (raised.error, raised.error_before))
    errors = f"storage's error is {error:.1e} of {options.max_error:g} allowed"
    if build.calibration is not None and build.calibration.runs and options.metric is None:
        errors += ", as new inputs are expected to have it"
    if not raised.ops:
        return f"{errors}; nothing had to be raised for it"
    before, after = (sum(c.cost for c in schedule(p, ARCHS[arch])) for p in (raised.before, raised.program))
    return (
        f"{errors}, {error_before:.1e} without {len(raised.ops)} of {len(raised.program.ops)} ops in fp32: "
        f"by estimates {after:.1f} µs in place of {before:.1f} on {arch}; --explain names them"
    )
