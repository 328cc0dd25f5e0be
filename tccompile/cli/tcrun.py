"""The command tcrun: a plan on its inputs, with times and profiles if they are asked for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import IO, TYPE_CHECKING, Any, NamedTuple

import click

from tccompile import __version__
from tccompile.cli.command import EXISTING, NEW, VERSION, Command, check_output, fail, need_compiler
from tccompile.cli.progress import Progress
from tccompile.errors import UsageError, VerificationError
from tccompile.terminal import json_text, member_name, plain, say

if TYPE_CHECKING:
    from tccompile.cli.report import Json
    from tccompile.ir.program import Program
    from tccompile.ir.tensor import Tensor
    from tccompile.plan.file import Plan
    from tccompile.runtime.profile import Profile
    from tccompile.runtime.session import Session

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
    from tccompile.runtime.session import Session

    if iterations and not (bench or profile):
        raise UsageError("--iterations says how often --bench and --profile measure; give one of them too")
    page = Path(profile) if profile and profile != "-" else None
    _check_files(output, page, plan, input_file, weights)
    loaded = read_plan(plan)
    if trust is not None:
        check_trust(loaded, plan, trust)
    program = loaded.entries[0].program
    measured = Measured(bench, profile is not None, iterations)
    if selftest and (input_file or output or measured.anything):
        raise UsageError("--selftest has inputs of its own and prints its own result; run it alone")
    if input_file is None and program.inputs and not (measured.anything or selftest):
        raise UsageError(f"give INPUT: a file with {', '.join(map(repr, program.inputs))}")
    _check_results(output, input_file, program)
    feeds: dict[str, Any] | None = {} if not program.inputs else None
    if input_file is not None:
        feeds = read_arrays(input_file, program.inputs)
    if weights is not None:
        loaded = _filled(loaded, weights)
    with (
        Progress(quiet or as_json, False) as progress,
        Session(loaded, device=device, target=target, check_finite=check_finite, ops=ops) as session,
    ):
        progress("run", 0, 1)
        if not (quiet or as_json):
            say(f"on {session.describe()}", err=True)
        if selftest:
            return _selftest(loaded, session, as_json, progress)
        ran = _run(session, program, feeds, measured, progress)
    _write(ran, output, page, quiet or as_json)
    _print_result(ran, program, output, as_json)
    return 0


def _filled(plan: Plan, weights: Path) -> Plan:
    """The plan with the weights that it leaves out."""
    need_compiler("--weights")
    from tccompile.load.model import sources
    from tccompile.plan.weights import fill

    return fill(plan, sources(weights))


class Measured(NamedTuple):
    """What is to be measured, over how many inferences if somebody said so."""

    bench: bool
    profile: bool
    iterations: int | None

    @property
    def anything(self) -> bool:
        return self.bench or self.profile


class Ran(NamedTuple):
    """What a session gave: its device in words, outputs by name, milliseconds of inferences and times of steps if they were
    asked for, and the number and input shapes of the entry that they are of."""

    device: str
    outputs: Mapping[str, Any]
    times: Sequence[float] | None
    steps: Profile | None
    entry: int
    inputs: Mapping[str, tuple[int, ...]]


def _run(session: Session, program: Program, feeds: dict[str, Any] | None, measured: Measured, progress: Progress) -> Ran:
    """Run the plan on these inputs, if there are any, and measure it."""
    outputs = {} if feeds is None else dict(zip(program.results, session.run(None, feeds), strict=True))
    iterations = measured.iterations or ITERATIONS[session.device.partition(":")[0]]
    progress("measure", 0, 1)
    if session.device != "cpu":
        progress.stop()  # what draws it would take the processor between launches, and be measured
    times = session.bench(iterations, feeds) if measured.bench else None
    steps = session.profile(iterations, feeds) if measured.profile else None
    return Ran(session.describe(), outputs, times, steps, *_entry_of(session, feeds))


def _check_files(output: Path | None, page: Path | None, plan: Path, input_file: Path | None, weights: Path | None) -> None:
    """Refuse files to write that are none of what is written, or that would replace what is read."""
    if page is not None and page.suffix != ".html":
        raise UsageError(f"--profile takes the name of an .html file, or nothing, not {page}; put INPUT before it")
    for path in (output, page):
        if path is not None:
            check_output(path, plan, input_file, weights)
    if output is not None and output.suffix not in (".npy", ".npz"):
        raise UsageError(f"outputs are written as arrays, into .npy or .npz, not {output}; choose {output.with_suffix('.npy')}")


def _check_results(output: Path | None, input_file: Path | None, program: Program) -> None:
    """Refuse a file of outputs where there are none, or more than it can hold."""
    if output is None:
        return
    if input_file is None and program.inputs:
        raise UsageError("without INPUT there are no outputs to write; leave -o away, or give INPUT")
    if output.suffix == ".npy" and len(program.results) > 1:
        raise UsageError(
            f"the model has {len(program.results)} outputs ({', '.join(map(plain, program.results))}): "
            f"write them with -o {output.with_suffix('.npz')}"
        )


def _entry_of(session: Session, feeds: Mapping[str, Any] | None) -> tuple[int, Mapping[str, tuple[int, ...]]]:
    """The number and the input shapes of the entry that runs these inputs; without any, the first."""
    given = None if feeds is None else {name: tuple(x.shape) for name, x in feeds.items()}
    return next(((n, e) for n, e in enumerate(session.entries) if given in (None, e)), (0, session.entries[0]))


def _selftest(plan: Plan, session: Session, as_json: bool, progress: Progress) -> int:
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


def _write(ran: Ran, output: Path | None, page: Path | None, quiet: bool) -> None:
    """The files of outputs and of the profile that were asked for, each whole or not at all."""
    from tccompile.plan.file import whole_file

    if output is not None:
        with whole_file(output) as file:
            _write_arrays(file, output.suffix, ran.outputs)
        if not quiet:
            say(f"{output}: {', '.join(f'{plain(name)} {_extents(v.shape)}' for name, v in ran.outputs.items())}")
    if page is not None and ran.steps is not None:
        from tccompile.cli.profile_page import profile_page

        with whole_file(page) as file:
            file.write(profile_page(ran.steps).encode())


def _write_arrays(file: IO[bytes], suffix: str, arrays: Mapping[str, Any]) -> None:
    """The only array, or an archive of all of them."""
    import zipfile

    import numpy as np

    if suffix != ".npz":
        writer = SimpleNamespace(write=file.write)  # no file of Python's, or NumPy writes by C, and does not say what failed
        np.lib.format.write_array(writer, np.asarray(next(iter(arrays.values()))))
        return
    with zipfile.ZipFile(file, "w") as archive:  # np.savez takes names as keywords, and has some of its own
        for name, value in arrays.items():
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


def _print_result(ran: Ran, program: Program, output: Path | None, as_json: bool) -> None:
    """The outputs' summaries, unless they were written, and what was measured."""
    import numpy as np

    summaries = [_summary(program.tensors[name], value) for name, value in ran.outputs.items()]
    inputs = {name: list(shape) for name, shape in ran.inputs.items()}
    result: Json = {"device": ran.device, "outputs": summaries, "entry": ran.entry, "inputs": inputs}
    if output is not None:
        result["wrote"] = str(output)
    if ran.times is not None:
        median, p90, p99 = (float(np.percentile(ran.times, q)) for q in (50, 90, 99))
        figures = {"median_ms": median, "p90_ms": p90, "p99_ms": p99, "per_second": 1000 / median, "iterations": len(ran.times)}
        result["bench"] = figures
    if ran.steps is not None:
        result["profile"] = ran.steps.to_json()
    if as_json:
        say(json_text(result))
        return
    for s in summaries if output is None else ():
        say(f"{plain(s['name'])}: {s['dtype']}[{', '.join(map(str, s['shape']))}]  {_values_text(s)}")
    if ran.times is not None:
        shapes = ", ".join(f"{plain(n)} {_extents(s)}" for n, s in ran.inputs.items())
        many = f"of {len(ran.times)} inferences; {1000 / median:.1f} a second"
        say(f"median {median:.3f} ms, p90 {p90:.3f} ms, p99 {p99:.3f} ms {many}")
        say(f"of entry {ran.entry}: {shapes or 'no inputs'}")
    if ran.steps is not None:
        from tccompile.cli.profile_page import profile_text

        say(profile_text(ran.steps))


def _extents(shape: Sequence[int]) -> str:
    return "x".join(map(str, shape)) or "a scalar"


def _values_text(summary: Json) -> str:
    parts = [f"{key} {summary[key]:.6g}" for key in ("min", "max", "mean") if summary[key] is not None]
    if summary["not_finite"]:
        parts.append(f"{summary['not_finite']} not finite")
    return ", ".join(parts) or "empty"
