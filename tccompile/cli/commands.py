"""The commands tccompile, tcrun, tcinspect and tcrefit: parse, call, print.

Results go to stdout, progress and errors to stderr. How a command fails is in `command`.
"""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from tccompile import __version__
from tccompile.cli.command import EXISTING, NEW, VERSION, Command, check_output, check_plan_output, fail, need_compiler
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
from tccompile.terminal import json_text, member_name, plain, say

if TYPE_CHECKING:
    from tccompile.check import Report
    from tccompile.cli.report import Json
    from tccompile.ir.tensor import Tensor
    from tccompile.load.model import Model
    from tccompile.plan.file import Plan
    from tccompile.runtime.profile import Profile
    from tccompile.runtime.session import Session
    from tccompile.verify.budgets import Budgets
    from tccompile.verify.oracle import Verification

# --- tccompile -------------------------------------------------------------------------------------------------------


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
    "total=past+new: a dimension that is a sum of others.",
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
def tccompile(
    model: Path,
    output: Path | None,
    inputs: Sequence[str],
    outputs: Sequence[str],
    shape_texts: Sequence[str],
    entry_texts: Sequence[str],
    size_texts: Sequence[str],
    arch: str | None,
    precision: str,
    fp32: Sequence[str],
    calibrate: Path | None,
    quantize: str | None,
    calibration: Path | None,
    max_error: float | None,
    metric: Path | None,
    range_texts: Sequence[str],
    verify: str | None,
    layers: bool,
    tolerance: float | None,
    nchwc_block: int | None,
    limit_texts: Sequence[str],
    lora: Path | None,
    lora_scale: float,
    names: Path | None,
    ops: Sequence[Path],
    max_vram: str | None,
    max_plan_size: str | None,
    require_tensor_cores: str | None,
    max_latency: str | None,
    no_fp32: bool,
    strip_weights: bool,
    check: bool,
    explain: bool,
    dump: Path | None,
    timing_cache: Path | None,
    tune: bool,
    jobs: int | None,
    quiet: bool,
    verbose: bool,
    as_json: bool,
) -> int:
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
    if quiet and verbose:
        raise UsageError("--quiet and --verbose contradict each other; give one")
    os.environ.setdefault("OPENBLAS_NUM_THREADS", ONE_THREAD)  # which NumPy reads when it is imported
    if tune:
        timing_cache = timing_cache or Path(model.stem + ".timings.json")
    from tccompile.plan.file import is_plan
    from tccompile.runtime.generations import archs_of

    if is_plan(model):
        raise UsageError(f"{model} is a plan already: tcrun runs it, and tcinspect says what is in it")
    whole_or_part = _part(model, inputs, outputs)
    options = Options(
        _entries(whole_or_part, shape_texts, entry_texts),
        archs_of((arch or "all").split(",")),
        precision=precision,
        strip_weights=strip_weights,
        nchwc_block=nchwc_block,
        limits=parse_limits(limit_texts),
        dump=dump,
        jobs=jobs,
        timing_cache=timing_cache,
        tune=tune,
        fp32=tuple(fp32),
        calibrate=calibrate,
        quantize=quantize,
        calibration=calibration,
        input_ranges=parse_ranges(range_texts),
        max_error=max_error,
        metric=metric,
        lora=lora,
        lora_scale=lora_scale,
        lora_names=names,
        ranges=parse_sizes(size_texts),
        ops=tuple(ops),
    )
    output = output or Path(model.stem + ".plan")
    data_file = Path(verify) if verify and verify != "-" else None
    if data_file is not None and not data_file.is_file():
        raise UsageError(f"--verify takes a file of inputs, or nothing, not {data_file}; put MODEL.onnx before it")
    if tolerance is not None and not math.isfinite(tolerance):
        raise UsageError(f"--tolerance {tolerance} is no error that can be measured; give a number such as 1e-2")
    if (layers or tolerance) and not verify:
        raise UsageError("--layers and --tolerance say how to --verify; give it too")
    if verify and metric is not None and tolerance is None:
        raise UsageError("--verify measures relative errors, of which --metric says nothing: give --tolerance X, too")
    if not check:
        check_output(output, model, timing_cache, calibrate, calibration, metric, data_file, lora, names, *ops)
        check_plan_output(output)
        if calibration is not None and not calibration.exists():
            check_output(calibration)
            if calibration.resolve() == output.resolve():
                raise UsageError(f"the plan and the calibration cannot both be {output}; choose another name for one")
        if tune and timing_cache:
            check_output(timing_cache, model)
            if timing_cache.resolve() == output.resolve():
                raise UsageError(f"the plan and the times cannot both be {output}; choose another name for one")
    need_compiler("compiling")
    from tccompile.cli import report
    from tccompile.pipeline import adapted, compile_model
    from tccompile.pipeline import check as check_model
    from tccompile.plan.file import write_plan

    if check:
        with _Progress(quiet or as_json, False) as progress:
            progress("check", 0, 1)
            found = check_model(whole_or_part, options)
        return _print_check(found, as_json)
    budgets = _budgets(max_vram, max_plan_size, require_tensor_cores, max_latency, no_fp32)
    notice = f"building for all {len(options.archs)} GPU generations: {FOR_ALL}" if arch is None else ""
    with _Progress(quiet, verbose, notice) as progress:
        whole_or_part = adapted(whole_or_part, options)
        plan = compile_model(whole_or_part, options, progress)
        if exceeded := _exceeded(plan, budgets, options, as_json, progress):
            return exceeded
        verification = _verify(whole_or_part, plan, tolerance, data_file, layers, options, progress) if verify else None
        plan = verification.plan if verification else plan
        if verification is None or verification.passed:
            write_plan(plan, output)
    if verification and not verification.passed:
        return _print_verification(verification, as_json, quiet, _way_out(verification, layers, options))
    if tune and not quiet:
        say(f"what was measured is in {timing_cache}: --timing-cache {timing_cache} builds the same elsewhere", err=True)
    data = {"plan": str(output), "bytes": output.stat().st_size, **report.inspect(plan)}
    sections = report.explain(plan) if explain else []
    if as_json:
        verified = verification.to_json() if verification else {}
        say(json_text(data | ({"explain": sections} if explain else {}) | verified))
        return 0
    if verification:
        _print_verification(verification, as_json, quiet)
    if explain:
        say(report.explain_text(sections, () if verbose else data["notes"]))  # which --verbose has among the rest
    if not quiet:
        say(report.inspect_text(data) if verbose else report.summary_text(data, None if explain else quantize))
    return 0


FOR_ALL = (
    "a minute or two for ResNet-50 on two cores, five times as long as for one of them; --arch native, or --arch sm_86,sm_90a, "
    "builds for those that you have"
)
"""What somebody should know who has named no generation."""

ONE_THREAD = "1"
"""How many threads NumPy multiplies with while networks are measured: where others use the processor's cores too, or a container
may use fewer than there are, its threads spin for each other, some 10 ms a product, which is most often far smaller than that."""


TOLERANCE = {"mixed": 1e-2, "fp16": 1e-2, "bf16": 5e-2, "fp32": 1e-4}
"""The relative error of an output that --verify allows, by precision; of what is quantized it is what --quantize was allowed."""


def _budgets(vram: str | None, size: str | None, share: str | None, latency: str | None, no_fp32: bool) -> Budgets:
    from tccompile.verify.budgets import Budgets, parse_latency, parse_share, parse_size

    return Budgets(
        None if vram is None else parse_size(vram),
        None if size is None else parse_size(size),
        None if share is None else parse_share(share),
        None if latency is None else parse_latency(latency),
        no_fp32,
    )


def _exceeded(plan: Plan, budgets: Budgets, options: Options, as_json: bool, progress: _Progress) -> int:
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
    model: Model, plan: Plan, tolerance: float | None, data: Path | None, layers: bool, options: Options, progress: _Progress
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


def _print_verification(
    verification: Verification,
    as_json: bool,
    quiet: bool,
    way_out: str = "",
) -> int:
    """Print each output's error, and each tensor's if they were compared; the exit code."""
    from tccompile.verify.certificate import results_text
    from tccompile.verify.oracle import layers_text

    if as_json:
        say(json_text(verification.to_json()))
    elif not quiet or not verification.passed:
        if verification.layers:
            say(layers_text(verification.layers))
        say(results_text(verification.results))
    if verification.passed:
        return 0
    own = any(c.oracle.startswith("NumPy") for c in verification.plan.certificates)
    fail(f"the plan differs from {'the references' if own else 'ONNX Runtime'}, and was not written: {way_out}")
    return VerificationError.exit_code


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


class _Progress:
    """Progress on stderr: on a terminal a bar, or where rich is not installed the stage; a line for each stage with --verbose;
    nothing with --quiet.

    notice  what to say as soon as there is code to compile
    """

    def __init__(self, quiet: bool, verbose: bool, notice: str = ""):
        self.verbose, self.stage, self.begin = verbose, "", 0.0
        self.notice = "" if quiet else notice
        self.bar: Any = None
        self.shown = not quiet and sys.stderr.isatty()
        if self.shown:
            with suppress(ModuleNotFoundError):  # it comes with the compiler
                from rich.console import Console
                from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

                columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
                self.bar = Progress(*columns, console=Console(stderr=True), transient=True, redirect_stdout=False)
                self.task = self.bar.add_task("load", total=None)

    def __enter__(self) -> _Progress:
        if self.bar:
            self.bar.start()
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        self.stop()
        if kind is None:
            self._next("")

    def __call__(self, stage: str, done: int, total: int) -> None:
        if self.notice and stage == "emit" and done < total:
            say(self.notice, err=True)
            self.notice = ""
        if self.bar:
            self.bar.update(self.task, description=stage, completed=done, total=total)
        elif self.shown and stage != self.stage:
            click.echo(f"\r{stage}…{CLEAR}", nl=False, err=True)
        if stage != self.stage:
            self._next(stage)

    def stop(self) -> None:
        """Take the bar away, so that something can be printed."""
        if self.bar:
            self.bar.stop()
        elif self.shown:
            click.echo(f"\r{CLEAR}", nl=False, err=True)
        self.bar, self.shown = None, False

    def _next(self, stage: str) -> None:
        now = time.perf_counter()
        if self.verbose and self.stage:
            say(f"{self.stage:10} {now - self.begin:6.2f} s", err=True)
        self.stage, self.begin = stage, now


CLEAR = "\x1b[K"
"""Takes the rest of a line away on a terminal."""

# --- tcrun -----------------------------------------------------------------------------------------------------------

TRUST = "Run the plan only if it is in this list, which tcinspect --rebuild --trust makes, or signed with this key (PEM; tcsign)."

ITERATIONS = {"gpu": 200, "cpu": 10}
"""Inferences that --bench measures: the CPU engine takes up to seconds for one."""


@click.command(cls=Command)
@click.argument("plan", metavar="MODEL.plan", type=EXISTING)
@click.argument("input_file", metavar="[INPUT]", type=EXISTING, required=False)
@click.option(
    "-o",
    "--output",
    type=NEW,
    metavar="OUT",
    help="Write the outputs: OUT.npy for one, OUT.npz for several, by name (%XX for what no file can be called: /a is %2Fa).",
)
@click.option("--device", default="auto", show_default=True, metavar="auto|gpu|gpu:N|cpu", help="Where to run.")
@click.option("--target", metavar="sm_80", help="Run this generation's section of the plan, not the best for the device.")
@click.option(
    "--ops", multiple=True, type=EXISTING, metavar="FILE.py", help="Your own operators: on the CPU their references run."
)
@click.option("--weights", type=EXISTING, metavar="MODEL.onnx", help="The model that fills a plan made with --strip-weights.")
@click.option("--trust", type=EXISTING, metavar="FILE", help=f"{TRUST} Others are refused with exit code 9.")
@click.option("--check-finite", is_flag=True, help="Name the first tensor that is not finite; on a GPU, if an output is not.")
@click.option("--selftest", is_flag=True, help="Hold the plan to its certificate on this device; tccompile --verify makes one.")
@click.option("--bench", is_flag=True, help="Measure latency and throughput; without INPUT, on random values.")
@click.option(
    "--profile",
    is_flag=False,
    flag_value="-",
    metavar="[FILE.html]",
    help="Measure each step: a table, or a page with a timeline and a roofline; without INPUT, on random values.",
)
@click.option(
    "--iterations",
    type=click.IntRange(1),
    metavar="N",
    help="Inferences that --bench or --profile measures; default: 200, on the CPU 10.",
)
@click.option("-q", "--quiet", is_flag=True, help="Print results, warnings and errors only.")
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
@click.version_option(__version__, message=VERSION)
def tcrun(
    plan: Path,
    input_file: Path | None,
    output: Path | None,
    device: str,
    target: str | None,
    ops: Sequence[Path],
    weights: Path | None,
    trust: Path | None,
    check_finite: bool,
    selftest: bool,
    bench: bool,
    profile: str | None,
    iterations: int | None,
    quiet: bool,
    as_json: bool,
) -> int:
    """Run a plan. A plan is a program: run only those that you trust as you would trust a program from the same source.

    INPUT is an .npy file for a model with one input, or an .npz file with an array for each input, by name. tcinspect lists
    the inputs. Without -o, a summary of each output is printed.
    """
    from tccompile.ir.feeds import read_arrays
    from tccompile.plan.file import read_plan
    from tccompile.plan.trust import check_trust
    from tccompile.plan.weights import fill
    from tccompile.runtime.session import Session

    if iterations and not (bench or profile):
        raise UsageError("--iterations says how often --bench and --profile measure; give one of them too")
    page = Path(profile) if profile and profile != "-" else None
    if page is not None and page.suffix != ".html":
        raise UsageError(f"--profile takes the name of an .html file, or nothing, not {page}; put INPUT before it")
    for path in (output, page):
        if path is not None:
            check_output(path, plan, input_file, weights)
    if output is not None and output.suffix not in (".npy", ".npz"):
        raise UsageError(f"outputs are written as arrays, into .npy or .npz, not {output}; choose {output.with_suffix('.npy')}")
    loaded = read_plan(plan)
    if trust is not None:
        check_trust(loaded, plan, trust)
    program = loaded.entries[0].program
    if selftest and (input_file or output or bench or profile):
        raise UsageError("--selftest has inputs of its own and prints its own result; run it alone")
    if input_file is None and program.inputs and not (bench or profile or selftest):
        raise UsageError(f"give INPUT: a file with {', '.join(map(repr, program.inputs))}")
    if input_file is None and output is not None and program.inputs:
        raise UsageError("without INPUT there are no outputs to write; leave -o away, or give INPUT")
    if output is not None and output.suffix == ".npy" and len(program.results) > 1:
        raise UsageError(
            f"the model has {len(program.results)} outputs ({', '.join(map(plain, program.results))}): "
            f"write them with -o {output.with_suffix('.npz')}"
        )
    feeds: dict[str, Any] | None = {} if not program.inputs else None
    if input_file is not None:
        feeds = read_arrays(input_file, program.inputs)
    if weights is not None:
        need_compiler("--weights")
        from tccompile.load.model import sources

        loaded = fill(loaded, sources(weights))
    with (
        _Progress(quiet or as_json, False) as progress,
        Session(loaded, device=device, target=target, check_finite=check_finite, ops=ops) as session,
    ):
        where = session.describe()
        progress("run", 0, 1)
        if not quiet and not as_json:
            say(f"on {where}", err=True)
        if selftest:
            return _selftest(loaded, session, as_json, progress)
        outputs = {} if feeds is None else dict(zip(program.results, session.run(None, feeds), strict=True))
        iterations = iterations or ITERATIONS[session.device.partition(":")[0]]
        progress("measure", 0, 1)
        if session.device != "cpu":
            progress.stop()  # what draws it would take the processor between launches, and be measured
        times = session.bench(iterations, feeds) if bench else None
        steps = session.profile(iterations, feeds) if profile else None
        number, ran = _entry_of(session, feeds)
    if output is not None:
        _write_outputs(output, outputs)
        if not quiet and not as_json:
            written = ", ".join(f"{plain(n)} {'x'.join(map(str, v.shape)) or 'a scalar'}" for n, v in outputs.items())
            say(f"{output}: {written}")
    summaries = [_summary(program.tensors[name], value) for name, value in outputs.items()]
    if page is not None and steps is not None:
        from tccompile.cli.profile_page import profile_page
        from tccompile.plan.file import whole_file

        with whole_file(page) as file:
            file.write(profile_page(steps).encode())
    result: Json = {"device": where, "outputs": summaries, "entry": number, "inputs": {n: list(s) for n, s in ran.items()}}
    if output is not None:
        result["wrote"] = str(output)
    _print_result(result, times, steps, as_json, quiet=output is not None)
    return 0


def _entry_of(session: Session, feeds: Mapping[str, Any] | None) -> tuple[int, Mapping[str, tuple[int, ...]]]:
    """The number and the input shapes of the entry that runs these inputs; without any, the first."""
    given = None if feeds is None else {name: tuple(x.shape) for name, x in feeds.items()}
    return next(((n, e) for n, e in enumerate(session.entries) if given in (None, e)), (0, session.entries[0]))


def _selftest(plan: Plan, session: Session, as_json: bool, progress: _Progress) -> int:
    """Hold the plan to its certificate, and print each output's error; the exit code."""
    from tccompile.verify.certificate import results_text, selftest

    results = selftest(plan, session)
    progress.stop()
    passed = all(r.passed for r in results)
    if as_json:
        say(json_text({"passed": passed, "outputs": [r.to_json() for r in results]}))
    else:
        say(results_text(results))
    if passed:
        return 0
    fail("the plan does not compute here what it did where it was made: do not use its results; update the driver, or rebuild")
    return VerificationError.exit_code


def _write_outputs(path: Path, outputs: dict[str, Any]) -> None:
    """Write the file whole or not at all."""
    import zipfile

    import numpy as np

    from tccompile.plan.file import whole_file

    with whole_file(path) as file:
        if path.suffix != ".npz":
            np.save(file, next(iter(outputs.values())))
            return
        with zipfile.ZipFile(file, "w") as archive:  # np.savez takes names as keywords, and has some of its own
            for name, value in outputs.items():
                with archive.open(f"{member_name(name)}.npy", "w", force_zip64=True) as member:
                    np.lib.format.write_array(member, np.asarray(value))


def _summary(tensor: Tensor, stored: Any) -> Json:
    """An output's name, shape, type, and what its finite values are like (None if there are none)."""
    import numpy as np

    from tccompile.ir.storage import from_storage

    values = from_storage(stored, tensor.dtype).astype(np.float64)
    finite = values[np.isfinite(values)]
    low, high, mean = (float(f(finite)) for f in (np.min, np.max, np.mean)) if finite.size else (None,) * 3
    found = {"min": low, "max": high, "mean": mean, "not_finite": int(values.size - finite.size)}
    return {"name": tensor.name, "shape": list(stored.shape), "dtype": tensor.dtype.value, **found}


def _print_result(result: Json, times: Sequence[float] | None, steps: Profile | None, as_json: bool, quiet: bool) -> None:
    """The outputs' summaries, unless `quiet`, the milliseconds of `times`, and the profile."""
    import numpy as np

    if times is not None:
        median, p90, p99 = (float(np.percentile(times, q)) for q in (50, 90, 99))
        figures = {"median_ms": median, "p90_ms": p90, "p99_ms": p99, "per_second": 1000 / median, "iterations": len(times)}
        result["bench"] = figures
    if steps is not None:
        result["profile"] = steps.to_json()
    if as_json:
        say(json_text(result))
        return
    for s in () if quiet else result["outputs"]:
        say(f"{plain(s['name'])}: {s['dtype']}[{', '.join(map(str, s['shape']))}]  {_values_text(s)}")
    if times is not None:
        shapes = ", ".join(f"{plain(n)} {'x'.join(map(str, s)) or 'a scalar'}" for n, s in result["inputs"].items())
        many = f"of {len(times)} inferences; {1000 / median:.1f} a second"
        say(f"median {median:.3f} ms, p90 {p90:.3f} ms, p99 {p99:.3f} ms {many}")
        say(f"of entry {result['entry']}: {shapes or 'no inputs'}")
    if steps is not None:
        from tccompile.cli.profile_page import profile_text

        say(profile_text(steps))


def _values_text(summary: Json) -> str:
    parts = [f"{key} {summary[key]:.6g}" for key in ("min", "max", "mean") if summary[key] is not None]
    if summary["not_finite"]:
        parts.append(f"{summary['not_finite']} not finite")
    return ", ".join(parts) or "empty"


# --- tcinspect -------------------------------------------------------------------------------------------------------


@click.command(cls=Command)
@click.argument("plan", metavar="MODEL.plan", type=EXISTING)
@click.option("--steps", is_flag=True, help="Also print each section's steps, as tccompile --explain does.")
@click.option("--weights", is_flag=True, help="Print the model's weights that the plan is made of, and what is made of them.")
@click.option("--rebuild", is_flag=True, help="Make code and launches again, and say what differs; needs the compiler.")
@click.option(
    "--trust", type=NEW, metavar="FILE", help="With --rebuild: if nothing differs, add the plan to this list for tcrun."
)
@click.option(
    "--ops", multiple=True, type=EXISTING, metavar="FILE.py", help="With --rebuild: your own operators, for their code."
)
@click.option("--diff", type=EXISTING, metavar="OLD.plan", help="Print what is something else than in another plan.")
@click.option(
    "--report",
    "report_file",
    type=NEW,
    metavar="FILE.html",
    help="Write a page: graph, formats, memory, expected times, reasons.",
)
@click.option("--sbom", is_flag=True, help="Print what the plan was made of and by, as CycloneDX.")
@click.option("-j", "--jobs", type=click.IntRange(1), metavar="N", help="Processes that compile kernels; default: one a core.")
@click.option("--json", "as_json", is_flag=True, help="Print as JSON.")
@click.version_option(__version__, message=VERSION)
def tcinspect(
    plan: Path,
    steps: bool,
    weights: bool,
    rebuild: bool,
    trust: Path | None,
    ops: Sequence[Path],
    diff: Path | None,
    report_file: Path | None,
    sbom: bool,
    jobs: int | None,
    as_json: bool,
) -> int:
    """Print what is in a plan: inputs and outputs, GPU generations, steps, sizes. It runs none of the plan's code."""
    from tccompile.cli import report
    from tccompile.plan.file import read_plan

    if steps + rebuild + weights + sbom + (diff is not None) + (report_file is not None) > 1:
        raise UsageError("--rebuild and --diff compare, and --steps, --weights, --sbom and --report show; give one")
    if (jobs or trust or ops) and not rebuild:
        raise UsageError(f"--{'jobs' if jobs else 'trust' if trust else 'ops'} says how to --rebuild; give it too")
    for path in (trust, report_file):
        if path is not None:
            check_output(path, plan)
    if report_file is not None and report_file.suffix != ".html":
        raise UsageError(f"--report writes a page, not {report_file}; choose {report_file.with_suffix('.html')}")
    loaded = read_plan(plan)
    if report_file is not None:
        return _report(loaded, report_file, as_json)
    if rebuild:
        return _rebuild(loaded, ops, jobs, as_json, trust)
    if sbom:
        say(json_text(report.sbom(loaded)))
        return 0
    if weights:
        return _print_weights(loaded, as_json)
    if diff is not None:
        return _print_changes(read_plan(diff), loaded, as_json)
    data = {"plan": str(plan), "bytes": plan.stat().st_size, **report.inspect(loaded)}
    sections = report.explain(loaded) if steps else []
    if as_json:
        say(json_text(data | ({"explain": sections} if steps else {})))
        return 0
    say(report.inspect_text(data))
    if steps:
        say(report.explain_text(sections))
    return 0


def _report(plan: Plan, path: Path, as_json: bool) -> int:
    """Write a page about a plan."""
    need_compiler("--report, which estimates times,")
    from tccompile.cli.report_page import report_page
    from tccompile.plan.file import whole_file
    from tccompile.schedule.timings import timings

    with whole_file(path) as file:
        file.write(report_page(plan, timings(None, ())).encode())
    say(json_text({"report": str(path)}) if as_json else f"{path}: {len(plan.entries)} entries of {plan.name or 'a plan'}")
    return 0


def _print_weights(plan: Plan, as_json: bool) -> int:
    from tccompile.cli.report import weights, weights_text

    found = weights(plan)
    say(json_text({"weights": found}) if as_json else weights_text(found))
    return 0


def _print_changes(old: Plan, new: Plan, as_json: bool) -> int:
    from tccompile.cli.plan_diff import changes, text_of

    try:
        need_compiler("the time of an inference")
    except UsageError:  # the rest needs none
        found = changes(old, new)
    else:
        from functools import partial

        from tccompile.schedule.timings import timings
        from tccompile.verify.budgets import expected_time

        found = changes(old, new, partial(expected_time, timings=timings(None, ())))
    say(json_text({"changes": [c.to_json() for c in found]}) if as_json else text_of(found))
    return 0


def _rebuild(plan: Plan, ops: Sequence[Path], jobs: int | None, as_json: bool, trust: Path | None) -> int:
    """Print in what a plan's code and launches differ from what its kernels make here; the exit code. If in nothing, it can be
    trusted."""
    need_compiler("--rebuild")
    from tccompile.custom.files import collected, using
    from tccompile.verify.rebuild import differences

    with _Progress(quiet=as_json, verbose=False) as progress, using(collected(ops)):
        found = differences(plan, lambda done, total: progress("emit", done, total), jobs)
    if as_json:
        say(json_text({"images": len(plan.images), "differences": [vars(d) for d in found]}))
    else:
        for difference in found:
            say(str(difference))
    if found:
        fail("the plan is not what its kernels make: do not run it; compile the model again")
        return VerificationError.exit_code
    if trust is not None:
        from tccompile.plan.trust import confirm

        confirm(plan, trust, f"code and launches are what the kernels of tccompile {__version__} make")
    if not as_json:
        say(f"{len(plan.images)} pieces of code and all launches are what the kernels make here, byte for byte")
        if trust is not None:
            say(f"the plan is in the list {trust}: tcrun --trust {trust} runs it")
    return 0


# --- tcrefit ---------------------------------------------------------------------------------------------------------


@click.command(cls=Command)
@click.argument("plan", metavar="MODEL.plan", type=EXISTING)
@click.argument("new", metavar="NEW", type=EXISTING)
@click.option("-o", "output", type=NEW, metavar="NEW.plan", help="The plan to write; default: in this folder, NEW's name.")
@click.option("--was", type=EXISTING, metavar="OLD", help="The weights that the plan has, by the names that NEW has.")
@click.option("--map", "names", type=EXISTING, metavar="NAMES.json", help="What weights are called in NEW, or by adapters.")
@click.option("--lora", type=EXISTING, metavar="ADAPTERS.safetensors", help="Merge these adapters into NEW's weights first.")
@click.option("--lora-scale", type=float, default=1.0, show_default=True, metavar="X", help="How much the adapters count.")
@click.option(
    "--verify",
    is_flag=False,
    flag_value="-",
    metavar="[DATA.npz]",
    help="Compare outputs with those of NEW in ONNX Runtime; the plan gets a certificate. Without it, it loses the one it has.",
)
@click.option(
    "--tolerance", type=click.FloatRange(0, min_open=True), metavar="X", help="The error that --verify allows, relative."
)
@click.option("-q", "--quiet", is_flag=True, help="Print errors only.")
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
@click.version_option(__version__, message=VERSION)
def tcrefit(
    plan: Path,
    new: Path,
    output: Path | None,
    was: Path | None,
    names: Path | None,
    lora: Path | None,
    lora_scale: float,
    verify: str | None,
    tolerance: float | None,
    quiet: bool,
    as_json: bool,
) -> int:
    """Put other weights into a plan: those of NEW, a model of the same graph (.onnx) or its weights alone (.safetensors).

    Nothing is compiled. Weights that the plan's precision does not hold for are refused with exit code 9.
    """
    from tccompile.cli.refit import Asked, refitted_as
    from tccompile.plan.file import read_plan, write_plan

    output = output or Path(new.stem + ".plan")
    data = Path(verify) if verify and verify != "-" else None
    if data is not None and not data.is_file():
        raise UsageError(f"--verify takes a file of inputs, or nothing, not {data}; put NEW before it")
    if tolerance is not None and not verify:
        raise UsageError("--tolerance says how to --verify; give it too")
    if lora is None and lora_scale != 1.0:
        raise UsageError("--lora-scale says how much adapters count; give --lora, too")
    check_output(output, plan, new, was, names, lora, data)
    check_plan_output(output)
    loaded = read_plan(plan)
    if new.suffix != ".safetensors" or (was is not None and was.suffix != ".safetensors"):
        need_compiler("reading a model")
    with _Progress(quiet or as_json, False) as progress:
        progress("refit", 0, 1)
        made, model = refitted_as(loaded, Asked(new, was, names, lora, lora_scale))
    verification = None
    if verify:
        from tccompile.verify import oracle

        if model is None:
            raise UsageError(f"--verify runs NEW in ONNX Runtime, and {new} holds weights alone; give the model")
        bounds = [expected.bound for c in loaded.certificates for expected in c.outputs]
        ranges = {name: (r.low, r.high) for c in loaded.certificates for name, r in c.ranges.items() if not r.whole}
        bound = tolerance or max(bounds, default=TOLERANCE["mixed"])
        with _Progress(quiet or as_json, False) as progress:
            progress("verify", 0, 1)
            verification = oracle.verify(model, made, bound, data, input_ranges=ranges)
        made = verification.plan
        if not verification.passed:
            return _print_verification(verification, as_json, quiet, "compile the model with these weights")
    write_plan(made, output)
    dropped = bool(loaded.certificates) and not made.certificates
    if as_json:
        result = {"plan": str(output), "bytes": output.stat().st_size, "certificates": len(made.certificates)}
        say(json_text(result | (verification.to_json() if verification else {})))
        return 0
    if verification:
        _print_verification(verification, as_json, quiet)
    if not quiet:
        say(f"{output}: the plan {plan} with the weights of {new}")
        if dropped:
            say("its certificate was of the weights before, and is left out: --verify makes one")
    return 0
