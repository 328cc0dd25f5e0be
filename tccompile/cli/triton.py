"""`tctriton`: a model repository of NVIDIA's Triton Inference Server for a plan."""

from __future__ import annotations

import re
from pathlib import Path

import click

from tccompile import __version__
from tccompile.cli.command import EXISTING, VERSION, Command
from tccompile.errors import UsageError
from tccompile.terminal import say


@click.command(cls=Command)
@click.argument("plan", metavar="MODEL.plan", type=EXISTING)
@click.option(
    "-o",
    "repository",
    type=click.Path(file_okay=False, path_type=Path),
    required=True,
    metavar="FOLDER",
    help="The repository to write into: tritonserver --model-repository FOLDER.",
)
@click.option("--name", metavar="NAME", help="What the server calls the model; default: the plan's file.")
@click.option("--cpu", is_flag=True, help="One instance on the CPU engine; default: one for each GPU.")
@click.option(
    "--wait-us",
    type=click.IntRange(0),
    default=0,
    show_default=True,
    metavar="N",
    help="Microseconds for which an idle instance waits for more requests, beside those that came while it was busy.",
)
@click.option("--update", is_flag=True, help="The model may be there: the plan becomes its next version.")
@click.option("-q", "--quiet", is_flag=True, help="Print errors only.")
@click.version_option(__version__, message=VERSION)
def tctriton(plan: Path, repository: Path, name: str | None, cpu: bool, wait_us: int, update: bool, quiet: bool) -> int:
    """Write a model repository for NVIDIA's Triton Inference Server: configuration, the plan, and its Python backend's model.

    Where examples are rows, along the first axis of all inputs and outputs, the server gathers requests for batches. The server's
    Python needs tccompile.
    """
    from tccompile.triton import write_repository

    name = name or plan.stem
    if not re.fullmatch(r"[A-Za-z0-9_.-]*[A-Za-z0-9_-][A-Za-z0-9_.-]*", name):
        raise UsageError(f"{name!r} is no name for a model: letters, digits, _, - and . may be in it; give --name")
    folder = write_repository(plan, repository, name, cpu=cpu, wait_us=wait_us, update=update)
    if not quiet:
        say(f"{folder}: for tritonserver --model-repository {repository}")
    return 0
