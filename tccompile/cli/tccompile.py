"""The command tccompile: a model into a plan."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict, Unpack

import click

from tccompile import __version__
from tccompile.cli.command import EXISTING, NEW, VERSION, Command, check_output, check_plan_output, fail, need_compiler
from tccompile.cli.progress import Progress
from tccompile.cli.verified import TOLERANCE, print_verification
from tccompile.errors import UsageError, VerificationError
from tccompile.options import (
    PRECISIONS,
    QUANTIZATIONS,
    Options,
    Shapes,
    parse_entry,
    parse_limits,
    parse_ranges,
    parse_shapes,
    parse_sizes,
)
from tccompile.terminal import json_text, say

if TYPE_CHECKING:
    from tccompile.check import Report
    from tccompile.load.model import Model
    from tccompile.plan.file import Plan
    from tccompile.verify.budgets import Budgets
    from tccompile.verify.oracle import Verification

SECTIONS = {
    "What to build": ("output", "arch", "inputs", "outputs", "ops", "strip_weights"),
    "Shapes": ("shape_texts", "entry_texts", "size_texts", "limit_texts", "nchwc_block"),
    "Precision": (
        "precision", "fp32", "calibrate", "range_texts", "quantize", "calibration", "max_error", "metric",
    ),
    "Checking": ("check", "verify", "layers", "tolerance", "explain", "dump"),
    "Budgets": ("max_vram", "max_plan_size", "require_tensor_cores", "max_latency", "no_fp32"),
    "Speed": ("timing_cache", "tune"),
    "Adapters": ("lora", "lora_scale", "names"),
}  # fmt: skip
"""Under which headings --help shows the options of tccompile, by their parameters; the rest comes last."""


class Compile(Command):
    """The command tccompile, whose one subcommand is named by its first word: `tccompile cache`."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        options = (p for p in self.get_params(ctx) if isinstance(p, click.Option))
        left = {p.name: record for p in options if (record := p.get_help_record(ctx))}
        for title, names in SECTIONS.items():
            with formatter.section(title):
                formatter.write_dl([left.pop(name) for name in names])
        with formatter.section("Others"):
            formatter.write_dl([*left.values()])

    def make_context(
        self, info_name: str | None, args: list[str], parent: click.Context | None = None, **extra: Any
    ) -> click.Context:
        if args[:1] == ["cache"]:
            from tccompile.cli.cache import cache

            return cache.make_context(f"{info_name} cache", args[1:], parent, **extra)
        return super().make_context(info_name, args, parent, **extra)

    def invoke(self, ctx: click.Context) -> Any:
        return super().invoke(ctx) if ctx.command is self else ctx.command.invoke(ctx)


class Asked(TypedDict):
    """What was asked for: the command's arguments and options, by their names."""

    model: Path
    output: Path | None
    inputs: Sequence[str]
    outputs: Sequence[str]
    shape_texts: Sequence[str]
    entry_texts: Sequence[str]
    size_texts: Sequence[str]
    arch: str | None
    precision: str
    fp32: Sequence[str]
    calibrate: Path | None
    quantize: str | None
    calibration: Path | None
    max_error: float | None
    metric: Path | None
    range_texts: Sequence[str]
    verify: str | None
    layers: bool
    tolerance: float | None
    nchwc_block: int | None
    limit_texts: Sequence[str]
    lora: Path | None
    lora_scale: float
    names: Path | None
    ops: Sequence[Path]
    max_vram: str | None
    max_plan_size: str | None
    require_tensor_cores: str | None
    max_latency: str | None
    no_fp32: bool
    strip_weights: bool
    check: bool
    explain: bool
    dump: Path | None
    timing_cache: Path | None
    tune: bool
    jobs: int | None
    quiet: bool
    verbose: bool
    as_json: bool


@click.command(cls=Compile)
@click.argument("model", metavar="MODEL.onnx", type=EXISTING)
@click.option(
    "-o", "output", type=NEW, metavar="MODEL.plan", help="The plan to write; default: in this folder, the model's name."
)
@click.option(
    "--input", "inputs", multiple=True, metavar="TENSOR", help="Compile what comes behind this tensor; repeat for others."
)
@click.option(
    "--output",
    "outputs",
    multiple=True,
    metavar="TENSOR",
    help="Compile what computes this tensor; repeat for others. What a model does before or behind may be anything.",
)
@click.option(
    "--shape",
    "shape_texts",
    multiple=True,
    metavar="NAME=1x3x224x224",
    help="The shape of an input with open dimensions: what follows the last =. Repeat for other inputs.",
)
@click.option(
    "--entry",
    "entry_texts",
    multiple=True,
    metavar="x=1x3x224x224,y=1x10",
    help="A set of input shapes that the plan can run; repeat for more sets. "
    "A , or = may belong to an input's name: the longest names that the model has count.",
)
@click.option(
    "--range",
    "size_texts",
    multiple=True,
    metavar="batch=1..64",
    help="Sizes that one plan takes all of: a named dimension's, h=64..2160:8 in steps of 8, or an input's, x=1..64x3x224x224. "
    "total=past+new, high=8*h: a dimension that is a sum of others, or so many times one.",
)
@click.option(
    "--arch",
    metavar="sm_80,8.6,…|native|all",
    help="GPU generations to build for; native: this machine's. Default: all, which takes about five times as long as one.",
)
@click.option(
    "--precision",
    type=click.Choice(PRECISIONS),
    default=Options.precision,
    show_default=True,
    help="How tensors are stored. mixed: fp16, but scaled or in fp32 what fp16 would lose. bf16: range before digits.",
)
@click.option("--fp32", multiple=True, metavar="NODE", help="Keep a node, and its products, in fp32; repeat, or use patterns.")
@click.option("--calibrate", type=EXISTING, metavar="DATA.npz", help="Real inputs that tell mixed how large tensors get.")
@click.option(
    "--quantize",
    type=click.Choice(QUANTIZATIONS),
    help="Multiply in bytes, integers or floats (E4M3) or, with auto, either, where that is faster and, by --calibrate's inputs, "
    "outputs stay within --max-error (default: 5e-2; for fp8 1e-1).",
)
@click.option(
    "--calibration",
    type=NEW,
    metavar="FILE",
    help="What --quantize has found: read from the file if it is there, else written to it.",
)
@click.option(
    "--max-error",
    type=click.FloatRange(0, min_open=True),
    metavar="X",
    help="Raise precision where it is needed until outputs are within X of fp32's, relative; exit with 9 if that cannot be.",
)
@click.option(
    "--metric",
    type=EXISTING,
    metavar="SCRIPT.py",
    help="Its function error(found, exact, inputs) says what --max-error holds, in place of the relative error.",
)
@click.option(
    "--input-range",
    "range_texts",
    multiple=True,
    metavar="NAME=LOW..HIGH",
    help="Between what numbers an input's values lie, for measuring and --verify; by default, what the model tells of them.",
)
@click.option(
    "--verify",
    is_flag=False,
    flag_value="-",
    metavar="[DATA.npz]",
    help="Compare outputs with ONNX Runtime's, on random inputs and on DATA; the plan gets a certificate for tcrun --selftest.",
)
@click.option("--layers", is_flag=True, help="With --verify: compare every tensor too.")
@click.option(
    "--tolerance", type=click.FloatRange(0, min_open=True), metavar="X", help="The error that --verify allows, relative."
)
@click.option(
    "--nchwc-block",
    type=click.IntRange(1),
    metavar="N",
    help="Channels of a block, 8 or 16: of a model laid out by ONNX Runtime.",
)
@click.option(
    "--limit",
    "limit_texts",
    multiple=True,
    metavar="NODE=N",
    help="The most that a node finds in the data, such as boxes that are kept or elements that are not zero.",
)
@click.option("--lora", type=EXISTING, metavar="ADAPTERS.safetensors", help="Merge these adapters into the weights first.")
@click.option("--lora-scale", type=float, default=1.0, show_default=True, metavar="X", help="How much the adapters count.")
@click.option("--map", "names", type=EXISTING, metavar="NAMES.json", help="What modules the adapters call the model's weights.")
@click.option(
    "--ops", multiple=True, type=EXISTING, metavar="FILE.py", help="Operators and rewrites of your own; repeat for others."
)
@click.option("--max-vram", metavar="SIZE", help="Fail with exit code 9 if a session needs more of a GPU's memory, as 2GB.")
@click.option("--max-plan-size", metavar="SIZE", help="The same if the plan's file is larger, as 100MB.")
@click.option("--require-tensor-cores", metavar="SHARE", help="The same if fewer operations run on Tensor Cores, as 95%.")
@click.option("--max-latency", metavar="TIME@GPU", help="The same if an inference is estimated to take longer, as 2ms@h200.")
@click.option("--no-fp32", is_flag=True, help="The same if anything between inputs and outputs is stored in fp32.")
@click.option("--strip-weights", is_flag=True, help="Leave large weights out; tcrun --weights MODEL.onnx fills them in.")
@click.option(
    "--check",
    is_flag=True,
    help="Only list what is not supported: write nothing, exit with 3 if there is any, with 2 where a shape is open.",
)
@click.option(
    "--explain",
    is_flag=True,
    help="Print what takes longest, then each step: nodes, kernel, config, Tensor Cores or why not, precision, padding.",
)
@click.option("--dump", type=click.Path(file_okay=False, path_type=Path), metavar="DIR", help="Write every stage into a folder.")
@click.option("--timing-cache", type=NEW, metavar="FILE", help="Choose kernels by the times in this file, which --tune writes.")
@click.option("--tune", is_flag=True, help="Measure kernels on this machine's GPU; writes MODEL.timings.json, or --timing-cache.")
@click.option("-j", "--jobs", type=click.IntRange(1), metavar="N", help="Processes that compile kernels; default: one a core.")
@click.option("-q", "--quiet", is_flag=True, help="Print errors only.")
@click.option("-v", "--verbose", is_flag=True, help="Print the time of each stage, and what is in the plan.")
@click.option("--json", "as_json", is_flag=True, help="Print the result, or the error, as JSON.")
@click.version_option(__version__, message=VERSION)
def tccompile(**asked: Unpack[Asked]) -> int:
    """Compile an ONNX model into a plan. Needs no GPU.

    Without --arch the plan runs on every supported GPU generation; naming those that you have builds faster.

    \b
    tccompile model.onnx --arch native                       for the GPU of this machine
    tccompile model.onnx --arch sm_86,sm_90a -o model.plan   for those GPUs
    tccompile model.onnx --shape image=1x3x224x224           where the model leaves a shape open
    tccompile model.onnx --check                             what is not supported, if anything
    tcrun model.plan input.npy -o output.npy                 then run it
    tccompile cache --size                                   what is kept for other builds; --clear deletes it
    """
    model = asked["model"]
    if asked["quiet"] and asked["verbose"]:
        raise UsageError("--quiet and --verbose contradict each other; give one")
    os.environ.setdefault("OPENBLAS_NUM_THREADS", ONE_THREAD)  # which NumPy reads when it is imported
    from tccompile.plan.file import is_plan

    if is_plan(model):
        raise UsageError(f"{model} is a plan already: tcrun runs it, and tcinspect says what is in it")
    whole_or_part = _part(model, asked["inputs"], asked["outputs"])
    options = _options(asked, whole_or_part)
    output, data = asked["output"] or Path(model.stem + ".plan"), _data(asked)
    _check_verify(asked, data)
    if asked["check"]:
        need_compiler("compiling")
        return _check(whole_or_part, options, asked)
    _check_outputs(output, model, data, options)
    need_compiler("compiling")
    return _build(whole_or_part, output, data, options, asked)


FOR_ALL = (
    "a minute or two for ResNet-50 on two cores, five times as long as for one of them; --arch native, or --arch sm_86,sm_90a, "
    "builds for those that you have"
)
"""What somebody should know who has named no generation."""

ONE_THREAD = "1"
"""How many threads NumPy multiplies with while networks are measured: where others use the processor's cores too, or a container
may use fewer than there are, its threads spin for each other, some 10 ms a product, which is most often far smaller than that."""


def _options(asked: Asked, model: Model) -> Options:
    """What the compiler is asked for, of a model or a part of one."""
    timing_cache = asked["timing_cache"]
    if asked["tune"] and timing_cache is None:
        timing_cache = Path(asked["model"].stem + ".timings.json")
    from tccompile.runtime.generations import archs_of

    return Options(
        _entries(model, asked["shape_texts"], asked["entry_texts"]),
        archs_of((asked["arch"] or "all").split(",")),
        precision=asked["precision"],
        strip_weights=asked["strip_weights"],
        nchwc_block=asked["nchwc_block"],
        limits=parse_limits(asked["limit_texts"]),
        dump=asked["dump"],
        jobs=asked["jobs"],
        timing_cache=timing_cache,
        tune=asked["tune"],
        fp32=tuple(asked["fp32"]),
        calibrate=asked["calibrate"],
        quantize=asked["quantize"],
        calibration=asked["calibration"],
        input_ranges=parse_ranges(asked["range_texts"]),
        max_error=asked["max_error"],
        metric=asked["metric"],
        lora=asked["lora"],
        lora_scale=asked["lora_scale"],
        lora_names=asked["names"],
        ranges=parse_sizes(asked["size_texts"]),
        ops=tuple(asked["ops"]),
    )


def _build(model: Model, output: Path, data: Path | None, options: Options, asked: Asked) -> int:
    """Compile, hold the plan to its budgets and to ONNX Runtime, write it, and say so; the exit code."""
    from tccompile.pipeline import adapted, compile_model
    from tccompile.plan.file import write_plan

    budgets, quiet = _budgets(asked), asked["quiet"]
    notice = f"building for all {len(options.archs)} GPU generations: {FOR_ALL}" if asked["arch"] is None else ""
    verification = None
    with Progress(quiet, asked["verbose"], notice) as progress:
        model = adapted(model, options)
        plan = compile_model(model, options, progress)
        if exceeded := _exceeded(plan, budgets, options, asked["as_json"], progress):
            return exceeded
        if asked["verify"]:
            verification = _verify(model, plan, asked["tolerance"], data, asked["layers"], options, progress)
            plan = verification.plan
        if verification is None or verification.passed:
            write_plan(plan, output)
    if verification and not verification.passed:
        return print_verification(verification, asked["as_json"], quiet, _way_out(verification, asked["layers"], options))
    if options.tune and not quiet:
        times = options.timing_cache
        say(f"what was measured is in {times}: --timing-cache {times} builds the same elsewhere", err=True)
    _print_plan(plan, output, verification, options, asked)
    return 0


def _budgets(asked: Asked) -> Budgets:
    from tccompile.verify.budgets import Budgets, parse_latency, parse_share, parse_size

    vram, size, share, latency = (
        asked["max_vram"],
        asked["max_plan_size"],
        asked["require_tensor_cores"],
        asked["max_latency"],
    )
    return Budgets(
        None if vram is None else parse_size(vram),
        None if size is None else parse_size(size),
        None if share is None else parse_share(share),
        None if latency is None else parse_latency(latency),
        asked["no_fp32"],
    )


def _exceeded(plan: Plan, budgets: Budgets, options: Options, as_json: bool, progress: Progress) -> int:
    """Print what a plan takes of its budgets where it takes too much; the exit code, 0 if all are kept."""
    from tccompile.schedule.timings import timings
    from tccompile.verify.budgets import findings, text_of

    found = findings(plan, budgets, timings(options.timing_cache, options.archs)) if budgets else []
    if all(f.kept for f in found):
        return 0
    progress.stop()
    code, message = VerificationError.exit_code, "the plan takes more than it may, and was not written"
    told = {"error": {"code": code, "message": message}, "budgets": [f.to_json() for f in found]}
    say(json_text(told) if as_json else text_of(found))
    fail(message)
    return code


def _data(asked: Asked) -> Path | None:
    """The file of inputs that --verify names."""
    verify = asked["verify"]
    return None if verify in (None, "-") else Path(str(verify))


def _check_verify(asked: Asked, data: Path | None) -> None:
    """Refuse what --verify cannot do, and what says how to verify where nothing is verified."""
    tolerance, verify = asked["tolerance"], asked["verify"]
    if data is not None and not data.is_file():
        raise UsageError(f"--verify takes a file of inputs, or nothing, not {data}; put MODEL.onnx before it")
    if tolerance is not None and not math.isfinite(tolerance):
        raise UsageError(f"--tolerance {tolerance} is no error that can be measured; give a number such as 1e-2")
    if (asked["layers"] or tolerance) and not verify:
        raise UsageError("--layers and --tolerance say how to --verify; give it too")
    if verify and asked["metric"] is not None and tolerance is None:
        raise UsageError("--verify measures relative errors, of which --metric says nothing: give --tolerance X, too")


def _check_outputs(output: Path, model: Path, data: Path | None, options: Options) -> None:
    """Refuse files to write that would replace each other, or one that is read."""
    o = options
    check_output(output, model, o.timing_cache, o.calibrate, o.calibration, o.metric, data, o.lora, o.lora_names, *o.ops)
    check_plan_output(output)
    written = {"calibration": None if o.calibration is None or o.calibration.exists() else o.calibration}
    written["times"] = o.timing_cache if o.tune else None
    for what, path in written.items():
        if path is None:
            continue
        check_output(path, model)
        if path.resolve() == output.resolve():
            raise UsageError(f"the plan and the {what} cannot both be {output}; choose another name for one")


def _part(model: Path, inputs: Sequence[str], outputs: Sequence[str]) -> Model:
    """The model, or its part if tensors are named between which it is to be compiled."""
    if not (inputs or outputs):
        return model
    need_compiler("compiling")
    from tccompile.load.cut import part

    return part(model, inputs, outputs)


def _entries(model: Model, shape_texts: Sequence[str], entry_texts: Sequence[str]) -> tuple[Shapes, ...]:
    """The sets of input shapes that --shape or --entry give; one empty set without either."""
    if shape_texts and entry_texts:
        raise UsageError("--shape binds the inputs of the only entry; with --entry, give all shapes there")
    if not (shape_texts or entry_texts):
        return ({},)
    need_compiler("compiling")
    from tccompile.load.model import input_names

    inputs = input_names(model)
    return tuple(parse_entry(text, inputs) for text in entry_texts) or (parse_shapes(shape_texts, inputs),)


def _verify(
    model: Model, plan: Plan, tolerance: float | None, data: Path | None, layers: bool, options: Options, progress: Progress
) -> Verification:
    """Bytes hold only what calibration has shown: random inputs of what is quantized lie where the user's do."""
    from tccompile.custom.files import collected, using
    from tccompile.stages.quantize import DEFAULT_ERROR
    from tccompile.verify.oracle import ranges_in, verify

    progress("verify", 0, 1)
    bound, ranges = TOLERANCE[options.precision], dict(options.input_ranges)
    if options.quantize is not None:
        bound = options.max_error or DEFAULT_ERROR[options.quantize]
        if options.calibrate is not None:
            ranges = ranges_in(options.calibrate, plan) | ranges
    with using(collected(options.ops)):
        return verify(model, plan, tolerance or bound, data, layers, ranges, options.calibrate if options.quantize else None)


def _way_out(verification: Verification, layers: bool, options: Options) -> str:
    """What may help against a large error, of that which was not asked for yet."""
    ways = {
        "--layers shows where it begins": not layers,
        "--fp32 NODE is more exact": options.precision != "fp32" and "*" not in options.fp32,
        "--input-range NAME=LOW..HIGH says what random inputs are like": not options.input_ranges
        and any(r.inputs.startswith("entry") and not r.passed for r in verification.results),
    }
    return "; ".join(way for way, fits in ways.items() if fits) or "its nodes may magnify any rounding, ONNX Runtime's too"


def _print_plan(plan: Plan, output: Path, verification: Verification | None, options: Options, asked: Asked) -> None:
    """Say what was written, and what was compared and explained, if it was."""
    from tccompile.cli import report

    explain, quiet, verbose, as_json = asked["explain"], asked["quiet"], asked["verbose"], asked["as_json"]
    data = {"plan": str(output), "bytes": output.stat().st_size, **report.inspect(plan)}
    sections = report.explain(plan) if explain else []
    if as_json:
        verified = verification.to_json() if verification else {}
        say(json_text(data | ({"explain": sections} if explain else {}) | verified))
        return
    if verification:
        print_verification(verification, as_json, quiet)
    if explain:
        say(report.explain_text(sections, () if verbose else data["notes"]))  # which --verbose has among the rest
    if not quiet:
        say(report.inspect_text(data) if verbose else report.summary_text(data, None if explain else options.quantize))


def _check(model: Model, options: Options, asked: Asked) -> int:
    """List what a model has that is not supported; the exit code."""
    from tccompile.pipeline import check

    with Progress(asked["quiet"] or asked["as_json"], False) as progress:
        progress("check", 0, 1)
        found = check(model, options)
    return _print_check(found, asked["as_json"])


def _print_check(report: Report, as_json: bool) -> int:
    """Print what is missing, and the cut that leaves it out; the exit code."""
    if as_json:
        say(json_text(report.to_json()))
    else:
        say(report.text)
    if report.exit_code == UsageError.exit_code:
        shapes = "; ".join(f"{m.issue.node}: {m.issue.way_out}" for m in report.missing)
        fail(f"every node is supported, and the shapes of inputs are all that is missing. {shapes}")
    return report.exit_code
