"""The commands, from what click knows of them: arguments and options."""

from __future__ import annotations

import re
from collections.abc import Iterator

import click

from tccompile.cli import cache, commands, sign, triton

COMMANDS = (
    commands.tccompile,
    cache.cache,
    commands.tcrun,
    commands.tcinspect,
    commands.tcrefit,
    sign.tcsign,
    triton.tctriton,
)

INTRO = """# Commands

*Written by `python -m tests.reference` from the commands themselves. What they are for is in [commands](../guide/commands.md).*

Results go to stdout, progress and errors to stderr. All have the same [exit codes](exit-codes.md), and read the same
[variables](environment.md) of the environment.

"""


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
    yield from (f"## {command.name}", "", "```", f"{command.name} [OPTIONS] {_arguments(command)}".rstrip(), "```", "")
    for paragraph in re.split(r"\n\s*\n", (command.help or "").strip()):
        lines = [line.strip() for line in paragraph.splitlines()]
        verbatim = lines[0] == "\b"
        yield from ("```bash", *lines[1:], "```", "") if verbatim else (*lines, "")
    yield from ("| option | |", "| --- | --- |")
    options = [p for p in command.params if isinstance(p, click.Option) and p.name not in ("version",)]
    yield from (_option(option) for option in options)
    yield ""


def page() -> str:
    """docs/reference/commands.md"""
    return INTRO + "\n".join(line for command in COMMANDS for line in _command(command)).rstrip() + "\n"
