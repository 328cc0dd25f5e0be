"""The stages in order.

  load         ONNX file → gs.Graph      checked, one opset, shapes bound, constants folded
  rewrite      gs.Graph → gs.Graph       equations on standard ONNX ops
  quantize     gs.Graph → gs.Graph       if asked for: bytes for what products read, by running the graph on the CPU
  lower        gs.Graph → Program        typed ops; NHWC
  fuse         Program → Program         epilogues, views instead of copies
  measure      Program → spreads         what values tensors take, from running it on the CPU
  precision    Program → Program         fp16 or fp32 storage, scales; weights that kernels may take in other forms
  layout       Program → Program         how channels are padded, which depends on the formats
for each GPU generation:
  schedule     Program × Arch → choices  which kernel, which config, which launches, and why
  place        choices → placement       liveness, arena, edges between steps
  emit         choices → machine code    Numba → PTX → cubin, cached on disk
pack           → Plan                    one file

What a stage does that takes several rooms is in `stages`.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import tccompile
from tccompile.arch import ARCHS, PTX, Arch
from tccompile.check import Report, advise
from tccompile.check import check as check_entries
from tccompile.custom.files import Given as Own
from tccompile.custom.files import collected, using
from tccompile.dump import Dump
from tccompile.emit import toolchain
from tccompile.emit.job import Job, SpillError
from tccompile.emit.many import begin, emit, expect, team
from tccompile.emit.pack import Build, pack
from tccompile.emit.workers import Team
from tccompile.errors import ModelError, UnsupportedError, UsageError
from tccompile.fuse import fuse
from tccompile.fuse.groups import absorb_shuffles, join_groups
from tccompile.fuse.packed import pack as packed
from tccompile.fuse.sparse import compress
from tccompile.fuse.twice import store_twice
from tccompile.garbage import no_garbage
from tccompile.ir.branches import in_order
from tccompile.ir.extent import Decisions, deciding
from tccompile.ir.program import Program
from tccompile.ir.types import DType
from tccompile.ir.verify import verify
from tccompile.ir.weights import digest
from tccompile.kernels.remembered import forget
from tccompile.kernels.spec import Code, Work
from tccompile.layout import lay_out
from tccompile.load.classical import is_classical
from tccompile.load.constants import decisive, remembering
from tccompile.load.cut import Part, part
from tccompile.load.identity import digests
from tccompile.load.late import computing
from tccompile.load.model import Tuned, in_memory, load, metadata, read
from tccompile.load.modules import exported
from tccompile.lower.graph import check_together, lower
from tccompile.options import Options, Ranged, Shapes, as_sizes
from tccompile.plan.file import Plan, is_plan
from tccompile.plan.format import Image, Origin, Rewritten, Section, Step
from tccompile.precision.formats import precision, storage_note
from tccompile.precision.ranges import Spread, rooms
from tccompile.python import speaking_python
from tccompile.quantize.calibration import Chosen
from tccompile.ranges.alike import Pattern, ProgramAt, patterns, usual, with_forms
from tccompile.ranges.box import Box, Point, Region, corners
from tccompile.ranges.box import opened as opened_sizes
from tccompile.ranges.families import with_families
from tccompile.ranges.inputs import open_inputs
from tccompile.ranges.late import Trace, late, traced
from tccompile.ranges.made import Made
from tccompile.ranges.pool import Known
from tccompile.ranges.steps import parts
from tccompile.ranges.tables import Tables, tables
from tccompile.refit.lora import merged, places, read_adapters
from tccompile.refit.names import read_map
from tccompile.rewrites import rewrite
from tccompile.rewrites.rule import Applied
from tccompile.runtime.generations import Named, archs_of
from tccompile.schedule.choose import schedule
from tccompile.schedule.place import place
from tccompile.schedule.timings import NO_TIMINGS, Timings, timings
from tccompile.stages.budget import Budgeted, raised_within, with_raised
from tccompile.stages.measure import agree, measured
from tccompile.stages.progress import Progress, logged, quiet
from tccompile.stages.quantize import calibrated
from tccompile.stages.quantized_notes import quantization_notes
from tccompile.tune import gpu_to_measure, tune

if TYPE_CHECKING:
    import onnx_graphsurgeon as gs

    from tccompile.load.model import Given, Model, Opened


@speaking_python
def compile(
    model: Given,
    shapes: Shapes | None = None,
    archs: Sequence[Named] = Options.archs,
    *,
    entries: Sequence[Shapes] | None = None,
    precision: str = Options.precision,
    strip_weights: bool = False,
    timing_cache: str | Path | None = None,
    tune: bool = False,
    fp32: Sequence[str] = (),
    calibrate: str | Path | None = None,
    input_ranges: Mapping[str, tuple[float, float]] | None = None,
    max_error: float | None = None,
    metric: str | Path | None = None,
    quantize: str | None = None,
    calibration: str | Path | None = None,
    inputs: Sequence[str] = (),
    outputs: Sequence[str] = (),
    nchwc_block: int | None = None,
    limits: Mapping[str, int] | None = None,
    lora: str | Path | None = None,
    lora_scale: float = 1.0,
    lora_names: str | Path | None = None,
    ranges: Mapping[str, str | Ranged | Sequence[int | Ranged]] | None = None,
    ops: Sequence[Own] = (),
) -> Plan:
    """Compile an ONNX model into a plan. Needs no GPU, but for `tune`.

    model         its file, an onnx.ModelProto, a file's bytes, or a file that is open for reading
    shapes        of inputs whose shapes the model leaves open, by name, as {"image": (1, 3, 224, 224)}; `entries`: several such
                  sets, one plan for all of them
    ranges        sizes that are known when the plan runs: {"batch": (1, 64), "h": (64, 2160, 8)}, by the model's names of
                  dimensions, the last number saying how far sizes are apart, or {"x": ((1, 64), 3, 224, 224)}, by the input;
                  {"total": "past+new"} for a dimension that is a sum of others
    archs         GPU generations to build for, as "sm_86", "8.6", (8, 6), or "native" for this machine's GPU; by default all
    precision     "mixed", "fp16", "bf16" or "fp32": how tensors are stored (mixed: fp16, where that loses nothing)
    fp32          nodes that compute in fp32 in any of these; `calibrate`: real inputs
    input_ranges  of inputs, by name: the least and the greatest value, where the model does not tell them
    max_error     what outputs may be off by, relative to fp32, on the inputs that are measured with: precision rises for it
    metric        a Python file whose function `error(found, exact, inputs)` says that in place of the relative error
    quantize      "int8", "fp8" or "auto": products in bytes, of integers or of E4M3 or of either, where that is faster, as real
                  inputs show (`calibrate`, or an earlier `calibration`)
    calibration   the file that keeps what was chosen for that: read if it is there, else written
    inputs, outputs  compile the part of the model between these tensors; without one of them, from the beginning or to the end
    nchwc_block   how many channels a block has, 8 or 16, where ONNX Runtime has laid the model out for a CPU without showing it
    limits        the most that nodes find whose results' extents the data decide, by the nodes' names: room is kept for so much
    lora          a file of adapters to merge into the weights, lora_scale times; `lora_names`: a file that says what modules it
                  calls weights, where their own names do not show it
    ops           files, modules or objects with operators and rewrites of your own: see `tccompile.op` and `tccompile.rewrite`
    timing_cache  a file of measured times to choose kernels by; `tune` measures them on this machine's GPU and writes them there

    Raises UsageError, UnsupportedError or ModelError; what it says names the node, the rule and the way out.
    """
    if shapes and entries is not None:
        raise UsageError("shapes are those of the only entry; with entries, give all of them there")
    for what, names in (("archs", archs), ("fp32", fp32), ("inputs", inputs), ("outputs", outputs)):
        if isinstance(names, str):
            raise UsageError(f"{what} is a list of names, as [{names!r}]")
    if isinstance(model, str | os.PathLike) and Path(model).is_file() and is_plan(Path(model)):
        raise UsageError(f"{os.fspath(model)} is a plan already: open a Session of it")
    sets = tuple(entries) if entries is not None else (shapes or {},)
    options = Options(
        sets,
        archs_of(archs),
        precision=precision,
        strip_weights=strip_weights,
        timing_cache=_path("timing_cache", timing_cache),
        tune=tune,
        fp32=tuple(fp32),
        calibrate=_path("calibrate", calibrate),
        input_ranges=dict(input_ranges or {}),
        max_error=max_error,
        metric=_path("metric", metric),
        quantize=quantize,
        calibration=_path("calibration", calibration),
        nchwc_block=nchwc_block,
        limits=dict(limits or {}),
        lora=_path("lora", lora),
        lora_scale=lora_scale,
        lora_names=_path("lora_names", lora_names),
        ranges=as_sizes(ranges or {}),
        ops=ops if isinstance(ops, tuple) else tuple(ops),
    )
    return compile_model(adapted(part(in_memory(model), inputs, outputs), options), options)


def _path(argument: str, given: str | os.PathLike[str] | None) -> Path | None:
    if given is None or isinstance(given, str | os.PathLike):
        return None if given is None else Path(given)
    way_out = "; numpy.savez('data.npz', NAME=array, …) writes one, an array for each input" if argument == "calibrate" else ""
    raise UsageError(f"{argument} is the path of a file, not an object of type {type(given).__name__}{way_out}")


def adapted(model: Model, options: Options) -> Model:
    """The model with the adapters merged that the options name; the model itself where they name none.

    Raises UsageError for adapters that belong to no weights of it.
    """
    if options.lora is None:
        return model
    assert not isinstance(model, Tuned)
    with using(collected(options.ops)):
        opened = read(model, options.nchwc_block, options.limits)
        shapes = options.entries[0]
        if options.ranges:
            inputs = open_inputs(opened.proto.graph, opened.weights, options.ranges, shapes)
            shapes = inputs.shapes(tuple(size.low for size in inputs.box))
        known = places([lower(rewrite(load(opened, shapes)))], exported(opened))
    called = read_map(options.lora_names) if options.lora_names is not None else {}
    return Tuned(model, merged(opened.weights, known, read_adapters(options.lora), options.lora_scale, called))


def compile_model(model: Model, options: Options, progress: Progress = quiet) -> Plan:
    """The whole way, with the options of the command line."""
    # Ranges make objects by the million, of which nearly all are kept.
    with using(collected(options.ops)), no_garbage() if options.ranges else nullcontext():
        try:
            return _compiled(model, options, progress)
        finally:
            forget()


def _compiled(model: Model, options: Options, progress: Progress) -> Plan:
    measuring = gpu_to_measure(options.archs) if options.tune else None
    progress = logged(progress)
    progress("load", 0, 5)
    dumps = [Dump(options.dump, number) for number in range(len(options.entries))]
    notes: list[str] = []
    told = Told(notes)
    with team(options.jobs) as ahead:
        if options.ranges:
            expect(ahead)
        opened, programs, ranged, options, calibration = _programs(model, options, dumps, progress, told)
        if measuring:
            assert options.timing_cache is not None
            seen = [*programs, *(pattern.at(point) for pattern in ranged for point in corners(pattern.box))]
            tune(seen, *measuring, options.timing_cache, progress, options.jobs)
        known = timings(options.timing_cache, options.archs)
        builds, families, images = _built(programs, ranged, options, dumps, progress, known, ahead)
    dumps[0].images(list(images.values()))

    whole = model.model if isinstance(model, Tuned) else model
    whole = whole.model if isinstance(whole, Part) else whole
    name = Path(whole).stem if isinstance(whole, str | Path) else opened.proto.graph.name
    producer = {"tccompile": tccompile.__version__, **toolchain.versions()}
    entries = [*zip(programs, builds, strict=True), *((program, own) for _, program, own in families)]
    if calibration is not None:
        notes = [*quantization_notes(calibration, options), *notes]
    notes = [*dict.fromkeys([*(storage_note(program, mode_of(opened, options)) for program, _ in entries), *notes])]
    if mode_of(opened, options) != options.precision:
        notes.append(
            "what models of scikit-learn and its kind compute is compared, so mixed is fp32: --precision fp16 is fp16 still"
        )
    if doubles := dict.fromkeys(name for program, _ in entries for name in _doubles(program)):
        notes.append(f"{', '.join(doubles)}: float64, computed in float32")
    packing = partial(progress, "pack")
    origin = replace(origin_of(opened, told), model=_digest_of(whole) if isinstance(whole, str | Path) else "")
    plan = pack(name, producer, entries, images, opened.weights, options.strip_weights, notes, packing, origin, told.rooms)
    plan = with_families(plan, [Region(()) for _ in programs] + [region for region, _, _ in families])
    return replace(plan, metadata=metadata(opened), rewrites=told.rewrites)


def _programs(
    model: Model, options: Options, dumps: Sequence[Dump], progress: Progress, told: Told
) -> tuple[Opened, list[Program], list[Pattern], Options, Chosen | None]:
    """The model as it was opened, the programs of its entries or the patterns of its range, the options without what these are,
    and what is multiplied in bytes."""
    try:
        opened = read(model, options.nchwc_block, options.limits)
        with decisive() as told.decided:
            if options.ranges:
                ranged, options = to_patterns(opened, options, dumps[0], progress, told)
                return opened, [], ranged, options, told.calibration
            calibration = calibrated(opened, options, progress) if options.quantize else None
            programs = [
                to_program(opened, shapes, options, dump, progress, told, calibration)
                for shapes, dump in zip(options.entries, dumps, strict=True)
            ]
            return opened, programs, [], options, calibration
    except (UnsupportedError, ModelError) as error:
        advise(error, model, options.entries, options.nchwc_block, options.limits)
        raise


Parts = list[tuple[Region, Program, list[Build]]]
"""Of a range: regions of its sizes, each with its program and what is built for it."""


def _built(
    programs: Sequence[Program],
    ranged: Sequence[Pattern],
    options: Options,
    dumps: Sequence[Dump],
    progress: Progress,
    known: Timings,
    ahead: Team,
) -> tuple[list[list[Build]], Parts, dict[Job, Image]]:
    """What is chosen for programs and for the parts of a range, and its code, with which processes begin while it is chosen."""
    refused: set[Code] = set()
    ranked = Known(known, ranged, lambda arch, codes: begin(jobs_for(codes, arch), ahead))
    while True:
        builds = [
            to_builds(program, options, dump, progress, refused, known) for program, dump in zip(programs, dumps, strict=False)
        ]
        if ranged:
            progress("schedule", 0, 1)
        begin(likely_jobs(ranged, options, refused, ranked), ahead)
        families = [part for pattern in ranged for part in to_parts(pattern, options, progress, refused, known, ranked)]
        made = [*builds, *(own for _, _, own in families)]
        jobs = [job for entry in made for build in entry for job in jobs_of(build)]
        try:
            return builds, families, emit(jobs, lambda done, total: progress("emit", done, total), options.jobs, ahead)
        except SpillError as error:  # an epilogue too rich for the tile chosen: the next best config takes its place
            spilled = {code for code, _, _ in error.jobs}
            if spilled <= refused:
                raise
            refused |= spilled


IN_FP16, IN_BYTES = 2.0, 1.25
"""How much larger or smaller weights may become than those that tensors' ranges were measured with: fp16 has room for 8 times
what was seen, bytes for none."""


@dataclass
class Told:
    """What stages found out beside the program that they made.

    notes    lines on what was done for an error budget
    decided  the names of weights whose values something depends on
    rooms    what magnitudes constants may have in any case
    factor   how much larger or smaller constants may be, as precision was chosen by what values tensors take; 0 if not
    formats  chooses the formats of the last program's tensors for the same nodes at other shapes
    calibration  what is multiplied in bytes at all sizes of a range
    applied  what rewrites did
    """

    notes: list[str] = field(default_factory=list)
    decided: set[str] = field(default_factory=set)
    rooms: dict[str, float] = field(default_factory=dict)
    factor: float = 0.0
    formats: Callable[[Program], Program] | None = None
    calibration: Chosen | None = None
    applied: Applied = field(default_factory=dict)

    @property
    def rewrites(self) -> tuple[Rewritten, ...]:
        return tuple(Rewritten(equation, tuple(names)) for equation, names in self.applied.items())

    def add(self, applied: Applied, program: Program, spreads: Mapping[str, Spread], calibration: Chosen | None) -> None:
        """What another program's rewrites did, and what its constants may be."""
        for equation, names in applied.items():
            self.applied.setdefault(equation, {}).update(names)
        if spreads:
            self.factor = IN_FP16 if calibration is None or not calibration.layers else IN_BYTES
        for name, room in rooms(program, spreads).items():
            self.rooms[name] = min(self.rooms.get(name, room), room)


def origin_of(model: Opened, told: Told) -> Origin:
    """What a plan tells of its model."""
    with ThreadPoolExecutor() as threads:
        weights = dict(zip(model.weights, threads.map(digest, model.weights.values()), strict=True))
    return Origin(
        weights,
        tuple(sorted(told.decided)),
        tuple(sorted({*digests(model).values()})),
        factor=told.factor,
        exported=exported(model),
    )


def _digest_of(path: str | Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _doubles(program: Program) -> list[str]:
    """The inputs and outputs whose digits are not all computed with."""
    return [name for name in (*program.inputs, *program.outputs) if program.tensors[name].dtype is DType.F64]


def without_code(
    model: Model,
    shapes: Shapes | None = None,
    precision: str = Options.precision,
    limits: Mapping[str, int] | None = None,
    ranges: Mapping[str, str | Ranged | Sequence[int | Ranged]] | None = None,
) -> Plan:
    """The plan that `compile` gives, without kernels: the CPU engine runs it. Takes a fraction of a second for fixed shapes."""
    options = Options((dict(shapes or {}),), precision=precision, limits=dict(limits or {}), ranges=as_sizes(ranges or {}))
    opened = read(model, limits=options.limits)
    told = Told()
    with decisive() as told.decided:
        if options.ranges:
            found, _ = to_patterns(opened, options, Dump(None), quiet, told)
            programs = [(p.box, p.at(opened_sizes(p.box)), p.at([size.all[-1] for size in p.box])) for p in found]
        else:
            program = to_program(opened, options.entries[0], options, Dump(None), told=told)
            programs = [((), program, program)]
    producer, origin = {"tccompile": tccompile.__version__}, origin_of(opened, told)
    entries = [(program, ()) for _, program, _ in programs]
    plan = pack("cpu", producer, entries, {}, opened.weights, False, origin=origin, rooms=told.rooms)
    sections = [_for_the_cpu(program, greatest) for _, program, greatest in programs]
    whole = [replace(e, sections=(section,)) for e, section in zip(plan.entries, sections, strict=True)]
    plan = replace(plan, entries=tuple(whole), metadata=metadata(opened), rewrites=told.rewrites)
    return with_families(plan, [Region(box) for box, _, _ in programs])


def _for_the_cpu(program: Program, greatest: Program) -> Section:
    """The steps of a program without launches."""
    layout = place(program, [Work(())] * len(program.ops), greatest)
    steps = tuple(Step(i, "none", {}, False, "it is for the CPU", (), after) for i, after in enumerate(layout.after))
    return Section("cpu", steps, layout.offsets, layout.arena, layout.counters)


def to_program(
    model: Model | Opened,
    shapes: Shapes,
    options: Options,
    dump: Dump,
    progress: Progress = quiet,
    told: Told | None = None,
    calibration: Chosen | None = None,
) -> Program:
    """From the model to typed ops: the stages that do not depend on a GPU generation.

    told         gets what the program does not say
    calibration  what is multiplied in bytes
    """
    progress("load", 0, 5)
    opened = read(model, options.nchwc_block, options.limits)
    graph = load(opened, shapes)
    dump.graph(0, "load", graph)

    progress("rewrite", 1, 5)
    applied: Applied = {}
    graph, floats = rewrite(graph, applied), None
    if calibration is not None:
        floats = lower(graph) if options.max_error is not None else None
        graph = rewrite(calibration.applied(graph), applied)
    dump.graph(1, "rewrite", graph)
    dump.rewrites(1, "rewrite", applied)

    progress("lower", 2, 5)
    program = lower(graph)
    check_together(program)
    dump.program(2, "lower", program)

    progress("fuse", 3, 5)
    program = in_order(fuse(program))
    verify(program)
    dump.program(3, "fuse", program)

    mode = mode_of(opened, options)
    spreads = measured(opened, program, options, progress, calibration) if mode == "mixed" else {}
    progress("precision", 4, 5)
    chosen = partial(precision, mode=mode, ranges=spreads, fp32=options.fp32, bytes_count=options.quantize is None)
    formats: Callable[[Program], Program] = chosen
    if options.max_error is not None:
        raised, note = raised_within(program, floats, Budgeted(chosen, spreads, options, opened, calibration))
        formats = partial(with_raised, chosen, {node: raised.reason for i in raised.ops for node in program.ops[i].nodes})
        if told is not None:
            told.notes.append(note)
    program = in_order(packed(compress(join_groups(absorb_shuffles(formats(program))), opened.weights), opened.weights))
    verify(program)
    dump.program(4, "precision", program)

    program = store_twice(lay_out(program))  # what it pads to depends on the formats
    verify(program)
    dump.program(5, "layout", program)
    if told is not None:
        told.formats = formats
        told.add(applied, program, spreads, calibration)
    return program


def mode_of(model: Opened, options: Options) -> str:
    """The precision: "mixed" is fp32 for models of scikit-learn and its kind, where rounding would move labels."""
    return "fp32" if options.precision == "mixed" and is_classical(model.proto) else options.precision


def to_patterns(opened: Opened, options: Options, dump: Dump, progress: Progress, told: Told) -> tuple[list[Pattern], Options]:
    """The programs for a range of sizes, each for a part of it, and the options without entries but for these.

    What precision is chosen by, and what is multiplied in bytes, is found at the least sizes of a part.
    """
    inputs = open_inputs(opened.proto.graph, opened.weights, options.ranges, options.entries[0])
    lowest = tuple(size.low for size in inputs.box)
    at_lowest = replace(options, entries=(inputs.shapes(lowest),))
    told.calibration = calibration = calibrated(opened, at_lowest, progress) if options.quantize else None
    highest = tuple(size.all[-1] for size in inputs.box)
    formats: dict[Point, Callable[[Program], Program]] = {}
    held: dict[Point, Tables] = {}

    def program_of(box: Box, decided: Decisions) -> ProgramAt:
        """What makes programs for sizes of a part; what is only faster at some sizes is decided by those in its middle."""
        lowest, middle = (tuple(size.all[len(size.all) // n] if n else size.low for size in box) for n in (0, 2))
        made_at = _telling(progress, box, made)
        made_at(middle, decided)
        with deciding(decided):
            if lowest not in formats:
                with _at(box, lowest):
                    to_program(opened, inputs.shapes(lowest), options, dump, progress, told, calibration)
                assert told.formats is not None
                formats[lowest] = told.formats

        def formed(point: Point) -> Program:
            program = made_at(point, decided)
            with deciding(decided):
                return store_twice(lay_out(in_order(join_groups(absorb_shuffles(formats[lowest](program))))))

        if lowest not in held:
            held[lowest] = tables(formed(highest), formed(lowest), opened.weights)
        return lambda point: held[lowest].shared_by(formed(point))

    def loaded(point: Point) -> gs.Graph:
        with _at(inputs.box, point):
            return load(opened, inputs.shapes(point))

    def to_fused(graph: gs.Graph) -> Program:
        graph = rewrite(graph)
        if calibration is not None:
            graph = rewrite(calibration.applied(graph))
        return fuse(lower(graph))

    def traced_at(point: Point) -> Trace:
        return traced(partial(loaded, point), to_fused)

    made = Made(loaded, to_fused)
    same = partial(agree, options=options, weights=opened.weights)
    with remembering(), computing(late(traced_at, inputs.box, opened.weights)):
        programs = patterns(inputs.box, program_of, same, lambda: made.ops)
        found = [with_forms(pattern, partial(packed, weights=opened.weights)) for pattern in programs]
    return found, replace(options, entries=(inputs.shapes(lowest),), ranges={})


def _telling(progress: Progress, box: Box, made: Made) -> Callable[[Point, Decisions], Program]:
    """`made.at` for a part of a range, which says how many programs it has made of about how many."""
    where = ", ".join(f"{size.name} {size.low} to {size.all[-1]}" for size in box if len(size.all) > 1)
    before, about = made.count, usual(box)

    def at(point: Point, decided: Decisions) -> Program:
        progress(f"range: {where}" if where else "range", min(made.count - before, about), about)
        return made.at(point, decided)

    return at


@contextmanager
def _at(box: Box, point: Point) -> Iterator[None]:
    """What is no model at these sizes is told with them."""
    try:
        yield
    except ModelError as error:
        at = ", ".join(f"{size.name} {n}" for size, n in zip(box, point, strict=True))
        raise ModelError(f"{error}; the range has sizes at which that is so, as {at}: leave them out of it") from error


def to_parts(
    pattern: Pattern, options: Options, progress: Progress, refused: Collection[Code], known: Timings, ranked: Known
) -> Parts:
    """What is built for a pattern: parts of its range, each with its program and what is chosen for each generation."""
    progress("schedule", 0, 1)
    out = []
    for region, program, chosen in parts(pattern, options.archs, refused, known, ranked):
        greatest = pattern.at([size.all[-1] for size in region.box])
        builds = []
        for name, choices in chosen.items():
            placement = place(program, [choice.work for choice in choices], greatest)
            builds += [Build(name, kind, choices, placement) for kind in kinds(name)]
        out.append((region, program, builds))
    return out


def likely_jobs(ranged: Sequence[Pattern], options: Options, refused: Collection[Code], ranked: Known) -> list[Job]:
    """What has to be compiled for a range, and little more, before it is chosen what runs which sizes: the surest first."""
    archs = [ARCHS[name] for name in options.archs] if ranged else []
    return [job for arch in archs for job in jobs_for(ranked.pool(ranged[0], arch, refused).by_use, arch)]


def jobs_for(codes: Sequence[Code], arch: Arch) -> list[Job]:
    """What has to be compiled for codes on a generation."""
    return [(code, arch, kind) for code in codes for kind in kinds(arch.name)]


def kinds(name: str) -> tuple[str, ...]:
    """As what code for a generation is carried: as PTX, too, for those of which later ones take it."""
    return ("cubin", "ptx") if name in PTX else ("cubin",)


def to_builds(
    program: Program,
    options: Options,
    dump: Dump,
    progress: Progress = quiet,
    refused: Collection[Code] = (),
    known: Timings = NO_TIMINGS,
) -> list[Build]:
    """Choices and placement for each generation, without the codes refused; those also carried as PTX come twice."""
    builds = []
    for number, name in enumerate(options.archs):
        progress("schedule", number, len(options.archs))
        choices = schedule(program, ARCHS[name], refused, known)
        dump.choices(6, "schedule", name, program, choices)
        placement = place(program, [choice.work for choice in choices])
        dump.placement(7, "place", name, program, placement)
        builds += [Build(name, kind, choices, placement) for kind in kinds(name)]
    return builds


def jobs_of(build: Build) -> list[Job]:
    """What must be compiled for a build."""
    return [(launch.code, ARCHS[build.arch], build.kind) for choice in build.choices for launch in choice.work.launches]


def check(model: Model, options: Options) -> Report:
    """What is not supported, for any of the entries, and where the model can be cut; see `check.check`."""
    with using(collected(options.ops)):
        entries = options.entries
        if options.ranges:
            opened = read(model, options.nchwc_block, options.limits)
            inputs = open_inputs(opened.proto.graph, opened.weights, options.ranges, entries[0])
            entries = tuple(map(inputs.shapes, dict.fromkeys((corners(inputs.box)[0], corners(inputs.box)[-1]))))
        return check_entries(model, entries, options.nchwc_block, options.limits)
