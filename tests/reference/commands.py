"""The commands, from what click knows of them: arguments, options, exit codes, and the environment."""

from __future__ import annotations

import re
from collections.abc import Iterator

import click

from tccompile import errors
from tccompile.cli import commands, sign, triton

COMMANDS = (
    commands.tccompile,
    commands.tcrun,
    commands.tcinspect,
    commands.tcrefit,
    sign.tcsign,
    triton.tctriton,
)

INTRO = """# Commands

*Written by `python -m tests.reference` from the commands themselves. What they are for is in [commands](../commands.md).*

Results go to stdout, progress and errors to stderr.

"""

ENVIRONMENT = {
    "TCCOMPILE_CACHE_DIR": "the folder of compiled kernels, and of models that `tccompile.ort` has compiled",
    "XDG_CACHE_HOME": "without it, the folder that `tccompile` is made in; without this, `~/.cache`",
    "LOCALAPPDATA": "the same on Windows",
    "OPENBLAS_NUM_THREADS": "threads of NumPy's products while networks are measured; 1 if it is not set",
}


def _option(option: click.Option) -> str:
    names = ", ".join(f"`{name}`" for name in sorted(option.opts, key=len))
    choices = f"[{'|'.join(option.type.choices)}]" if isinstance(option.type, click.Choice) else ""
    kind = "" if option.is_flag else option.metavar or choices or option.type.name.upper()
    said, kind = (text.replace("|", "\\|") for text in (option.help or "", kind))
    default = f" Default: {option.default}." if option.show_default and option.default is not None else ""
    several = " May be repeated." if option.multiple and "repeat" not in said.lower() else ""
    return f"| {names}{f' `{kind}`' if kind else ''} | {said}{several}{default} |"


def _arguments(command: click.Command) -> str:
    return " ".join(str(p.metavar) for p in command.params if isinstance(p, click.Argument))


def _command(command: click.Command) -> Iterator[str]:
    yield from (f"## {command.name}", "", "```", f"{command.name} [OPTIONS] {_arguments(command)}", "```", "")
    for paragraph in re.split(r"\n\s*\n", (command.help or "").strip()):
        lines = [line.strip() for line in paragraph.splitlines()]
        verbatim = lines[0] == "\b"
        yield from ("```bash", *lines[1:], "```", "") if verbatim else (*lines, "")
    yield from ("| option | |", "| --- | --- |")
    options = [p for p in command.params if isinstance(p, click.Option) and p.name not in ("version",)]
    yield from (_option(option) for option in options)
    yield ""


def exit_codes() -> dict[int, str]:
    """What each exit code says."""
    classes = [c for c in vars(errors).values() if isinstance(c, type) and issubclass(c, errors.TccompileError)]
    known = {c.exit_code: " ".join((c.__doc__ or "").split()) for c in classes}
    known |= {0: "Done.", commands.INTERRUPTED: "Interrupted."}
    known[errors.TccompileError.exit_code] = "A bug of tccompile's: the message names a file to send, and to whom."
    return dict(sorted(known.items()))


def page() -> str:
    """docs/reference/commands.md"""
    lines = [line for command in COMMANDS for line in _command(command)]
    lines += ["## Exit codes", "", "| code | when |", "| --- | --- |"]
    lines += [f"| {code} | {when} |" for code, when in exit_codes().items()]
    lines += ["", "## Environment", "", "| variable | what it says |", "| --- | --- |"]
    lines += [f"| `{name}` | {what} |" for name, what in ENVIRONMENT.items()]
    lines += ["", "For completion in a shell, see [commands](../commands.md#completion)."]
    return INTRO + "\n".join(lines).rstrip() + "\n"
