"""What commands share: how one fails, files that they take, outputs that would do harm.

Every failure ends in one short block and the exit code of its class in `errors`; what is not one of those is a bug of ours: exit
code 70, with a file to send.
"""

from __future__ import annotations

import os
import sys
import tempfile
import warnings
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import click

from tccompile.cli.foreign import message_of
from tccompile.errors import BROKEN, LaunchError, ModelError, TccompileError, UsageError
from tccompile.plan import FORMAT_VERSION
from tccompile.terminal import json_text, plain, say

VERSION = f"%(prog)s, version %(version)s, which writes and reads plan format {FORMAT_VERSION}"

INTERRUPTED = 130  # as shells say of a command that ended by SIGINT


class Command(click.Command):
    """A command whose failures are messages and exit codes, never tracebacks."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.context_settings["help_option_names"] = ["-h", "--help"]

    def main(self, args: Sequence[str] | None = None, prog_name: str | None = None, *_: Any, **extra: Any) -> Any:
        with warnings.catch_warnings():
            warnings.showwarning = _show_warning  # type: ignore[assignment]
            sys.exit(self._run(args, prog_name or self.name, **extra))

    def _run(self, args: Sequence[str] | None, prog_name: str | None, **extra: Any) -> int:
        """The command's exit code, after its failure has been printed; on stdout, too, as JSON where results are."""
        words = sys.argv[1:] if args is None else args

        def failed(message: str, code: int) -> int:
            fail(message)
            if "--json" in words:
                with suppress(OSError):
                    say(json_text({"error": {"code": code, "message": message}}))
            return code

        try:
            code = super().main(args, prog_name, standalone_mode=False, **extra)
            if sys.stdout:  # it may have been closed
                sys.stdout.flush()
            return code if isinstance(code, int) else 0
        except click.ClickException as error:
            failed(message_of(error), UsageError.exit_code)
            if isinstance(error, click.UsageError):
                say(f"see: {error.ctx.command_path if error.ctx else prog_name} --help", err=True)
            return UsageError.exit_code
        except (click.Abort, KeyboardInterrupt):
            return failed("stopped", INTERRUPTED)
        except TccompileError as error:
            bug = error.exit_code == TccompileError.exit_code or (
                _may_be_ours(error) and not {"-v", "--verbose"}.isdisjoint(words)
            )
            return failed(_bug(error, words) if bug else str(error), error.exit_code)
        except BrokenPipeError:  # the reader of our output, such as head, has seen enough
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 1
        except MemoryError as error:
            return failed(f"out of memory{f': {error}' if str(error) else ''}", LaunchError.exit_code)
        except OSError as error:
            says = f"{error.filename}: {error.strerror}" if error.filename and error.strerror else str(error)
            return failed(says, UsageError.exit_code)
        except Exception as error:
            return failed(_bug(error, words), TccompileError.exit_code)


def fail(message: str) -> None:
    """Say what went wrong, on stderr."""
    with suppress(OSError):  # where there is no room for a message, the exit code still says what it was
        say(f"error: {message}", err=True)


def _show_warning(message: Any, *_: Any) -> None:
    say(f"warning: {plain(str(message))}", err=True)


def _may_be_ours(error: TccompileError) -> bool:
    """Whether it is what Python said of a model, be it the model's fault or ours."""
    return isinstance(error, ModelError) and isinstance(error.__cause__, BROKEN)


def _bug(error: Exception, words: Sequence[str]) -> str:
    """What to say of a failure that is ours, with a file that holds what makes it again."""
    from tccompile.cli.bug import text_of, where_to_send

    named = isinstance(error, TccompileError)
    message, text = str(error) if named else f"{type(error).__name__}: {error}", text_of(error, words)
    try:
        with tempfile.NamedTemporaryFile("w", prefix="tccompile-bug-", suffix=".txt", delete=False, encoding="utf-8") as file:
            file.write(text)
    except OSError:
        return (
            f"{message}\nthis is a bug of tccompile's; please send this to {where_to_send()}, as no file can be written:\n{text}"
        )
    holds = "which has the command and what the failing nodes are, and none of the model's weights"
    if isinstance(error, TccompileError) and _may_be_ours(error):
        return f"{message}; then send the file {file.name}, {holds}, to {where_to_send()}"
    return f"{message}\nthis is a bug of tccompile's; please send the file {file.name}, {holds}, to {where_to_send()}"


EXISTING = click.Path(exists=True, dir_okay=False, path_type=Path)
NEW = click.Path(dir_okay=False, path_type=Path)


def check_output(path: Path, *inputs: Path | None) -> None:
    """Refuse, before any work is done, an output that could not be written, or would replace what is read."""
    folder = path.parent
    if not folder.is_dir():
        raise UsageError(f"cannot write {path}: there is no folder {folder}; make it first")
    if not os.access(folder, os.W_OK):
        raise UsageError(f"cannot write {path}: the folder {folder} is not writable")
    if path.exists() and not path.is_file():
        raise UsageError(f"cannot write {path}: it is not a regular file")
    for source in inputs:
        if source is not None and source.exists() and path.exists() and path.samefile(source):
            raise UsageError(f"the output {path} would replace the file {source}, which is read; choose another name")


def check_plan_output(path: Path) -> None:
    """Refuse to replace a file that is no plan, such as one that holds the model's weights."""
    from tccompile.plan.file import is_plan

    if path.exists() and path.stat().st_size and not is_plan(path):
        raise UsageError(f"the output {path} would replace a file that is no plan; choose another name, or delete it first")


def need_compiler(purpose: str) -> None:
    """Refuse what needs the compiler where it is not installed, and say what is missing."""
    from importlib.util import find_spec

    missing = [name for name in ("onnx", "onnx_graphsurgeon", "numba", "numba_cuda", "rich") if find_spec(name) is None]
    if missing:
        raise UsageError(
            f"{purpose} needs {', '.join(missing)}, which are not installed: pip install 'tccompile[compiler]'"
            if len(missing) > 1
            else f"{purpose} needs {missing[0]}, which is not installed: pip install 'tccompile[compiler]'"
        )
