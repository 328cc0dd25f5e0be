"""How far a command is, on stderr."""

from __future__ import annotations

import sys
import time
from contextlib import suppress
from typing import Any

import click

from tccompile.terminal import say


class Progress:
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

    def __enter__(self) -> Progress:
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
