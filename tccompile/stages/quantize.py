"""The stage `quantize`: what is multiplied in bytes, chosen by the user's inputs, by times and by the error that is allowed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import onnx_graphsurgeon as gs

from tccompile.arch import ARCHS
from tccompile.errors import UsageError, blamed_on
from tccompile.ir.feeds import read_arrays, samples
from tccompile.ir.weights import digest
from tccompile.kernels.ptx.atoms import atoms
from tccompile.load.model import Opened, load
from tccompile.lower.graph import lower
from tccompile.options import Options
from tccompile.precision.metric import read_metric
from tccompile.precision.ranges import why_too_long
from tccompile.precision.real_inputs import at_own_shapes
from tccompile.quantize.calibration import Chosen, Purpose
from tccompile.quantize.calibration import read as read_calibration
from tccompile.quantize.calibration import write as write_calibration
from tccompile.quantize.choose import choose
from tccompile.quantize.known import Measure, find
from tccompile.quantize.marks import check_weights
from tccompile.quantize.smooth import smoothed
from tccompile.quantize.ticks import Ticks
from tccompile.rewrites import rewrite
from tccompile.schedule.timings import timings
from tccompile.stages.measure import misfit
from tccompile.stages.progress import Progress, quiet
from tccompile.stages.times import step_times

DEFAULT_ERROR = {"int8": 5e-2, "fp8": 1e-1, "auto": 5e-2}
"""What outputs may be off by where products are in bytes, relative to fp32, unless the user says it."""


SHARE = 0.95
"""What bytes may take of the error that is allowed, such that all else stays in fp16."""


def calibrated(model: Opened, options: Options, progress: Progress = quiet) -> Chosen:
    """What is multiplied in bytes at all entries' shapes: as the user's file has it, or else chosen by what is known, from the
    file or from running the model on the user's inputs.

    Raises InputError if the inputs fit neither an entry nor the model, or the file is of other weights; UsageError if running the
    model would take too long.
    """
    progress("load", 0, 5)
    graphs = [rewrite(load(model, shapes)) for shapes in options.entries]
    purpose = _purpose(graphs, options)
    file = options.calibration
    kept = read_calibration(file) if file is not None and file.exists() else None
    if kept is not None:
        check_weights(kept.known.weights, graphs[0])
    if kept is not None and kept.purpose == purpose:
        return kept.chosen
    with blamed_on("the model"):
        real = _to_measure(model, graphs, options.calibrate) if options.calibrate is not None else None
        measure, metric = None, None if options.metric is None else read_metric(options.metric)
        if kept is None:
            assert real is not None
            known, measure = find(*real, model.weights, partial(progress, "calibrate"), purpose.formats, metric)
        else:
            known = kept.known
            if real is not None:
                measure = Measure(
                    smoothed(real[0], known.smooth), real[1], model.weights, metric, Ticks(partial(progress, "calibrate"))
                )
        known_times = timings(options.timing_cache, options.archs)
        times = partial(step_times, archs=options.archs, known=known_times, ranked={}, ratios={})
        usable = known.within(graphs, options.fp32, purpose.formats)
        chosen, tried = choose(usable, graphs, purpose.bound, times, measure)
    if file is not None and kept is None:
        write_calibration(replace(known, tried=(*known.tried, *tried)), purpose, chosen, file)
    return chosen


def _purpose(graphs: Sequence[gs.Graph], options: Options) -> Purpose:
    """What bytes are to be chosen for."""
    assert options.quantize is not None
    bound = SHARE * (options.max_error or DEFAULT_ERROR[options.quantize])
    shapes = tuple({t.name: tuple(t.shape) for t in graph.inputs} for graph in graphs)
    metric = None if options.metric is None else digest(np.frombuffer(options.metric.read_bytes(), np.uint8))
    return Purpose(shapes, options.archs, formats_of(options), bound, metric, options.fp32)


def formats_of(options: Options) -> tuple[str, ...]:
    """Which bytes products may be in. `auto` takes floats only where all generations asked for multiply them on Tensor Cores: one
    program serves all."""
    assert options.quantize is not None
    if options.quantize != "auto":
        return (options.quantize,)
    return ("int8",) if without_float8(options.archs) else ("int8", "fp8")


def without_float8(archs: Sequence[str]) -> list[str]:
    """The generations whose Tensor Cores do not multiply floats of 8 bits."""
    return [name for name in archs if not atoms(ARCHS[name], "e4m3", "e4m3")]


def _to_measure(model: Opened, graphs: Sequence[gs.Graph], data: Path) -> tuple[gs.Graph, list[Mapping[str, np.ndarray]]]:
    """The graph at shapes that the user's inputs fit and that may be run on the CPU, an entry's if there is one; and the inputs.

    Raises InputError and UsageError.
    """
    fits, why = False, None
    for graph in graphs:
        program = lower(graph)
        arrays = read_arrays(data, program.inputs)
        runs, why = samples(program, arrays), why_too_long(program)
        if runs and why is None:
            return graph, [*runs]
        fits |= bool(runs)
    if found := at_own_shapes(model, arrays, other_sizes=why is not None):
        return found
    if fits and why is not None:
        smaller = "calibrate it for smaller shapes; images may be smaller than the model's"
        raise UsageError(f"quantizing runs the model on the CPU, and {why}: {smaller}")
    raise misfit(data, program)
