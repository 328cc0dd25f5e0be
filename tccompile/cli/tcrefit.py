"""The command tcrefit: other weights in a plan."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from tccompile import __version__
from tccompile.cli.command import EXISTING, NEW, VERSION, Command, check_output, check_plan_output, need_compiler
from tccompile.cli.progress import Progress
from tccompile.cli.verified import TOLERANCE, print_verification
from tccompile.errors import UsageError
from tccompile.terminal import json_text, say

if TYPE_CHECKING:
    from tccompile.load.model import Model
    from tccompile.plan.file import Plan
    from tccompile.verify.oracle import Verification


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
    with Progress(quiet or as_json, False) as progress:
        progress("refit", 0, 1)
        made, model = refitted_as(loaded, Asked(new, was, names, lora, lora_scale))
    verification = None
    if verify:
        if model is None:
            raise UsageError(f"--verify runs NEW in ONNX Runtime, and {new} holds weights alone; give the model")
        with Progress(quiet or as_json, False) as progress:
            progress("verify", 0, 1)
            verification = _verified(made, model, loaded, tolerance, data)
        made = verification.plan
        if not verification.passed:
            return print_verification(verification, as_json, quiet, "compile the model with these weights")
    write_plan(made, output)
    dropped = bool(loaded.certificates) and not made.certificates
    if as_json:
        result = {"plan": str(output), "bytes": output.stat().st_size, "certificates": len(made.certificates)}
        say(json_text(result | (verification.to_json() if verification else {})))
        return 0
    if verification:
        print_verification(verification, as_json, quiet)
    if not quiet:
        say(f"{output}: the plan {plan} with the weights of {new}")
        if dropped:
            say("its certificate was of the weights before, and is left out: --verify makes one")
    return 0


def _verified(made: Plan, model: Model, was: Plan, tolerance: float | None, data: Path | None) -> Verification:
    """The plan beside ONNX Runtime, on inputs as the certificates that it had are about, and by the largest of their bounds."""
    from tccompile.verify import oracle

    bounds = [expected.bound for c in was.certificates for expected in c.outputs]
    ranges = {name: (r.low, r.high) for c in was.certificates for name, r in c.ranges.items() if not r.whole}
    return oracle.verify(model, made, tolerance or max(bounds, default=TOLERANCE["mixed"]), data, input_ranges=ranges)
