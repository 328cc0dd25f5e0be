"""The command tcinspect: what is in a plan, and whether it is what its kernels make."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from tccompile import __version__
from tccompile.cli.command import EXISTING, NEW, VERSION, Command, check_output, fail, need_compiler
from tccompile.cli.progress import Progress
from tccompile.errors import UsageError, VerificationError
from tccompile.terminal import json_text, say

if TYPE_CHECKING:
    from tccompile.plan.file import Plan


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

    with Progress(quiet=as_json, verbose=False) as progress, using(collected(ops)):
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
